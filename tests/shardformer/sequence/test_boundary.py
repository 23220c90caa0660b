"""Both ends of sequence-sharded layers: shards before the first layer, losses of shards after the last."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from echelon.shardformer.layers.sequence_axis import axis_of
from echelon.shardformer.sequence.before_layers import ShardTensor
from echelon.shardformer.sequence.loss import SequenceParallelLogits

from ...plugins.training import hybrid, sgd
from ...pool import Pool
from ...slow import slow
from ..compare import Made, build, gradients

LENGTH = 37  # two ranks have 20 each in zigzag, with padding; no other size of the model is 37 or 20


def boosted(
    model: nn.Module, *, sp: int = 2, tp: int = 1, mode: str = "ring_attn", **settings: Any
) -> nn.Module:
    settings |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
    model, *_ = hybrid(tp_size=tp, sp_size=sp, **settings).boost(model, sgd(model))
    return model


def pair(
    name: str = "LlamaForCausalLM", *, tp: int = 1, settings: Any = (), **plugin: Any
) -> list[nn.Module]:
    """Return a model and its boosted copy."""
    reference = build(name, **dict(settings)).train()
    return [reference, boosted(deepcopy(reference), tp=tp, **plugin).train()]


def batch(length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, -4:] = -100
    return {"input_ids": ids, "labels": labels}


def require_same_gradients(reference: nn.Module, model: nn.Module) -> None:
    """Compare the gradients of all parameters, averaged over the sequence axis."""
    means = {name: gradient / dist.get_world_size() for name, gradient in gradients(model.module).items()}
    for mean in means.values():
        dist.all_reduce(mean)
    torch.testing.assert_close(means, gradients(reference), rtol=1e-4, atol=1e-6)


def train_alike(reference: nn.Module, model: nn.Module) -> None:
    model(**batch()).loss.backward()
    reference(**batch()).loss.backward()
    require_same_gradients(reference, model)


# Losses of sequence shards.


def train_and_evaluate(tp: int) -> None:
    reference, model = pair(tp=tp)
    lengths: list[int] = []
    model.module.lm_head.register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    expected = reference(**batch())
    outputs = model(**batch())
    assert lengths == [20]
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert isinstance(outputs.logits, SequenceParallelLogits)
    for misuse in (lambda: outputs.logits.shape, lambda: outputs.logits[0]):
        with pytest.raises((AttributeError, TypeError), match=r"outputs\.logits\.gather\(\) on every rank"):
            misuse()
    torch.testing.assert_close(outputs.logits.gather(), expected.logits)
    shifted = batch()["labels"].roll(-2, 1)
    for arguments in ({"num_items_in_batch": torch.tensor(5)}, {"shift_labels": shifted}):
        torch.testing.assert_close(model(**batch(), **arguments).loss, reference(**batch(), **arguments).loss)
    asked = model(**batch(), logits_to_keep=LENGTH)  # a call that selects positions itself
    torch.testing.assert_close(asked.logits.gather() if tp > 1 else asked.logits, expected.logits)
    kept = torch.tensor([0, LENGTH - 1])
    assert model(**{**batch(), "labels": None}, logits_to_keep=kept).logits.shape[1] == 2
    as_tuple = model(**batch(), return_dict=False)
    torch.testing.assert_close(as_tuple[0], expected.loss)
    assert isinstance(as_tuple[1], SequenceParallelLogits)
    # Evaluation, with another length and without labels, returns full logits.
    model.eval(), reference.eval()
    with torch.no_grad():
        for inputs in (batch(7), {"input_ids": batch(5)["input_ids"]}):
            torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits)
    torch.testing.assert_close(model.train()(**batch()).loss, expected.loss)


def weigh_gathered_logits() -> None:
    """Train with a user's criterion, for example a penalty on the logits' normalizers."""

    def criterion(loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 0.1 * logits.logsumexp(-1).pow(2).mean()

    reference, model = pair()
    expected, outputs = reference(**batch()), model(**batch())
    criterion(expected.loss, expected.logits).backward()
    criterion(outputs.loss, outputs.logits.gather()).backward()
    require_same_gradients(reference, model)
    reference, model = pair(parallel_output=False)
    torch.testing.assert_close(model(**batch()).logits, reference(**batch()).logits)


def forward_between(mode: str, *, use_reentrant: bool) -> None:
    """Use transformers' checkpointing, with a forward of another sequence length before the backward."""
    sizes = {"sp": 1, "tp": 2} if mode == "ring" else {}
    reference, model = pair("BertForSequenceClassification", mode=mode, **sizes)
    inputs = {"input_ids": batch()["input_ids"], "labels": torch.tensor([0, 1])}
    for module in (reference, model.unwrap()):
        module.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        module.enable_input_require_grads()
    loss = model(**inputs).loss
    with torch.no_grad():
        model(input_ids=batch(LENGTH + 1)["input_ids"])
    loss.backward()
    reference(**inputs).loss.backward()
    if mode != "ring":
        return require_same_gradients(reference, model)
    name = "bert.embeddings.position_embeddings.weight"
    expected, gradient = (module.get_parameter(name).grad for module in (reference, model.unwrap()))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def sharded_over_two_rings() -> None:
    axis = axis_of(boosted(build("LlamaForCausalLM"), sp=4, inner_ring_size=2).unwrap().model.layers[0])
    assert axis is not None and [ring.size() for ring in axis.rings] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_sequence_sharded_logits_have_the_loss_of_the_full_sequence(pool: Pool, tp: int) -> None:
    pool.run(2 * tp, train_and_evaluate, tp)


def test_gathered_logits_have_gradients(pool: Pool) -> None:
    pool.run(2, weigh_gathered_logits)


def test_a_double_ring_reaches_attention(pool: Pool) -> None:
    pool.run(4, sharded_over_two_rings)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
# From the forward without gradients in between.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    ("mode", "use_reentrant"), [("ring_attn", False), ("all_to_all", True), ("ring", False), ("ring", True)]
)
def test_recomputation_has_the_sequence_length_of_the_forward(
    pool: Pool, mode: str, *, use_reentrant: bool
) -> None:
    pool.run(2, forward_between, mode, use_reentrant=use_reentrant)


# Sequence shards before the layers.


def has_full_sequence(shape: tuple[int, ...], tp: int) -> bool:
    """Return True if a shape contains the full sequence, with padding or not, or both samples flattened.

    40 rows may be the shards of two samples, and 80 numbers the two sums per row in the loss of sharded logits.
    """
    if tp == 2 and shape == (80,):
        return False
    return bool({LENGTH, 2 * LENGTH, 80} & set(shape)) or (len(shape) > 2 and 40 in shape)


def hold_no_whole_sequence(tp: int) -> None:
    reference, model = pair(tp=tp)
    for _ in range(2):
        with Made() as made:
            model(**batch()).loss.backward()
        shapes = [shape for shape, dtype in made.tensors if dtype.is_floating_point]
        assert any(20 in shape for shape in shapes)
        full_shapes = [shape for shape in shapes if has_full_sequence(shape, tp)]
        assert not full_shapes, full_shapes
        model.zero_grad()
    if tp == 1:
        train_alike(reference, model)


def looked_up(model: nn.Module) -> list[int]:
    """Return the sequence lengths of the embedding's calls in one forward."""
    lengths: list[int] = []
    embedding = model.unwrap().get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, out: lengths.append(args[0].shape[1]))
    model(**batch())
    handle.remove()
    return lengths


def read(module: nn.Module, args: tuple, output: Tensor) -> None:
    """Hook of a user that reads the output, on every rank."""
    with torch.no_grad():
        assert output.norm() > 0


def compute_with_what_is_looked_up() -> None:
    """GPT-2 adds positions, Granite multiplies; Gemma 3 does so within its embedding; a user's hook reads."""
    # `both`: a shard in the first call, full sequences from then on.
    both, always, never = [LENGTH, 20], [LENGTH], [20]
    for name, first, later in (
        ("LlamaForCausalLM", both, always),
        ("GraniteForCausalLM", both, always),
        ("GPT2LMHeadModel", always, always),
        ("Gemma3ForCausalLM", never, never),
    ):
        reference, model = pair(
            name, settings={} if name == "GPT2LMHeadModel" else {"num_key_value_heads": 2}
        )
        if name == "LlamaForCausalLM":
            model.unwrap().model.embed_tokens.register_forward_hook(read)
        assert sorted(looked_up(model)) == sorted(first), name
        assert looked_up(model) == later, name
        train_alike(reference, model)


def know_frequencies() -> None:
    """Rotary tables that depend on the largest position get full sequences."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    settings = {"rope_parameters": dynamic, "max_position_embeddings": 16}
    for options, expected in (({}, ShardTensor), (settings, Tensor)):
        reference, model = pair(settings=options)
        tables: list[Any] = []
        model.unwrap().model.rotary_emb.register_forward_hook(
            lambda *args, tables=tables: tables.extend(args[2])
        )
        train_alike(reference, model)
        assert [type(table) for table in tables] == [expected] * 2


@pytest.mark.parametrize("tp", [1, *slow(2)])
def test_no_rank_materializes_a_full_sequence(pool: Pool, tp: int) -> None:
    pool.run(2 * tp, hold_no_whole_sequence, tp)


@pytest.mark.parametrize("function", [compute_with_what_is_looked_up, *slow(know_frequencies)])
def test_modules_that_compute_with_full_sequences_get_them(pool: Pool, function: Callable[[], None]) -> None:
    pool.run(2, function)


def stands_for(full: Tensor) -> tuple[ShardTensor, list[int]]:
    """Return a placeholder with a shard of half the length, and a list of materializations."""
    made: list[int] = []

    def make() -> Tensor:
        made.append(1)
        return full

    return ShardTensor(full[:, : full.shape[1] // 2], length=full.shape[1], make_full=make), made


def test_shape_and_dtype_are_known_without_materializing() -> None:
    x, made = stands_for(torch.ones(2, 6, 4, requires_grad=True))
    known = (x.shape, x.size(1), x.ndim, x.dim(), len(x), x.dtype, x.device.type, x.is_floating_point())
    assert known == ((2, 6, 4), 6, 3, 3, 2, torch.float32, "cpu", True)
    assert x.requires_grad and isinstance(x, Tensor) and {x: 1}[x] == 1
    assert not made and x.shard is not None and x.shard.shape == (2, 3, 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.ones(4) + x,
        lambda x: x[:, -1],
        lambda x: torch.cat([x, x], 1),
        lambda x: x.clone().masked_fill_(x > 3, 0.0),
        lambda x: x.to(torch.float64),
    ],
    ids=["plus", "entry", "cat", "in place", "dtype"],
)
def test_operations_on_the_placeholder_use_the_full_tensor(use: Callable[[Tensor], Tensor]) -> None:
    full = torch.arange(48.0).view(2, 6, 4).requires_grad_()
    x, made = stands_for(full)
    with torch.no_grad():  # a use without gradients must not remove them
        use(x)
    output = use(x)
    assert type(output) is Tensor and torch.equal(output, use(full))
    (gradient,), (expected,) = (torch.autograd.grad(tensor.sum(), full) for tensor in (output, use(full)))
    assert torch.equal(gradient, expected)
    assert made == [1] and x.shard is None  # shards are taken from the full tensor from now on


class Doubled(Function):
    """Autograd function that gets the placeholder itself."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.ones(2, 6, 4)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_an_autograd_function_that_gets_the_placeholder_fails() -> None:
    x, _ = stands_for(torch.ones(2, 6, 4, requires_grad=True))
    with pytest.raises(AssertionError, match="would be lost"):
        Doubled.apply(x).sum().backward()
    refused = pytest.raises(AssertionError, match="a placeholder of a full sequence")
    with torch._C.DisableTorchFunctionSubclass(), refused:
        x + 1
