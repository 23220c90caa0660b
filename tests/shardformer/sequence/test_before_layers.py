"""Embeddings and rotary tables compute this rank's part alone, and hand on what stands for the whole."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.shardformer.sequence.before_layers import PartTensor

from ...pool import Pool
from ..compare import build
from .test_loss import batch, boosted, require_same_gradients

LENGTH = (
    37  # of which two ranks hold 20 each in zigzag, with padding, and which is no other size of the model
)


class Shapes(TorchDispatchMode):
    """Gathers the shapes of all floating tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what it makes."""
        result = func(*args, **(kwargs or {}))
        self.made |= {
            tuple(each.shape)
            for each in tree_leaves(result)
            if isinstance(each, Tensor) and each.is_floating_point()
        }
        return result


def is_whole(shape: tuple[int, ...], tp: int) -> bool:
    """Return True where a tensor has a whole sequence, with padding or not, or the rows of both samples'.

    40 rows may be those of two parts, and 80 numbers the two sums that the loss of split logits has of each.
    """
    if tp == 2 and shape == (80,):
        return False
    return bool({LENGTH, 2 * LENGTH, 80} & set(shape)) or (len(shape) > 2 and 40 in shape)


def hold_no_whole_sequence(tp: int) -> None:
    whole = build("LlamaForCausalLM").train()
    model = boosted(deepcopy(whole), tp=tp).train()
    for _ in range(2):
        with Shapes() as shapes:
            model(**batch(LENGTH)).loss.backward()
        assert any(20 in shape for shape in shapes.made)
        wholes = [shape for shape in shapes.made if is_whole(shape, tp)]
        assert not wholes, wholes
        model.zero_grad()
    if tp == 1:
        model(**batch(LENGTH)).loss.backward()
        whole(**batch(LENGTH)).loss.backward()
        require_same_gradients(model, whole)


def looked_up(model: nn.Module, inputs: dict[str, Tensor]) -> list[int]:
    """The lengths of what the embedding is asked for in a call."""
    lengths: list[int] = []
    embedding = model.unwrap().get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, out: lengths.append(args[0].shape[1]))
    model(**inputs)
    handle.remove()
    return lengths


def read(module: nn.Module, args: tuple, output: Tensor) -> None:
    """As one does who watches a training, on every rank alike."""
    with torch.no_grad():
        assert output.norm() > 0


def compute_with_what_is_looked_up() -> None:
    """GPT-2 adds positions, Granite multiplies; Gemma 3 does so within its embedding; a user's hook reads."""
    both, always, never = [LENGTH, 20], [LENGTH], [20]  # of which parts first, and the whole from then on
    for name, first, later in (
        ("LlamaForCausalLM", both, always),
        ("GraniteForCausalLM", both, always),
        ("GPT2LMHeadModel", always, always),
        ("Gemma3ForCausalLM", never, never),
    ):
        settings = {} if name == "GPT2LMHeadModel" else {"num_key_value_heads": 2}
        whole = build(name, **settings)
        model = boosted(deepcopy(whole.train())).train()
        if name == "LlamaForCausalLM":
            model.unwrap().model.embed_tokens.register_forward_hook(read)
        assert sorted(looked_up(model, batch(LENGTH))) == sorted(first), name
        assert looked_up(model, batch(LENGTH)) == later, name
        model(**batch(LENGTH)).loss.backward()
        whole(**batch(LENGTH)).loss.backward()
        require_same_gradients(model, whole)


def compute_again(*, use_reentrant: bool) -> None:
    whole = build("LlamaForCausalLM").train()
    model = boosted(deepcopy(whole)).train()
    for each in (whole, model.unwrap()):
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        each.enable_input_require_grads()
    model(**batch(LENGTH)).loss.backward()
    whole(**batch(LENGTH)).loss.backward()
    require_same_gradients(model, whole)


def ask_for_what_is_not_in_the_vocabulary() -> None:
    model = boosted(build("LlamaForCausalLM"))
    ids = batch(LENGTH)["input_ids"]
    ids[0, -1] = 10**6  # the first rank's in zigzag
    with pytest.raises(ValueError, match="entry 1000000 is outside the vocabulary"):
        model(input_ids=ids)


def know_frequencies() -> None:
    """Rotary tables that depend on the longest position see whole sequences."""
    for kind, expected in (("default", PartTensor), ("dynamic", Tensor)):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        settings = {} if kind == "default" else {"rope_parameters": rope, "max_position_embeddings": 16}
        whole = build("LlamaForCausalLM", **settings).train()
        model = boosted(deepcopy(whole)).train()
        found: list[Any] = []
        model.unwrap().model.rotary_emb.register_forward_hook(
            lambda *given, found=found: found.extend(given[2])
        )
        model(**batch(LENGTH)).loss.backward()
        assert [type(each) for each in found] == [expected] * 2
        whole(**batch(LENGTH)).loss.backward()
        require_same_gradients(model, whole)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_rank_holds_a_whole_sequence(pool: Pool, tp: int) -> None:
    pool.run(2 * tp, hold_no_whole_sequence, tp)


def test_who_computes_with_the_embedding_gets_the_whole(pool: Pool) -> None:
    pool.run(2, compute_with_what_is_looked_up)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_layers_have_the_same_gradients(pool: Pool, *, use_reentrant: bool) -> None:
    pool.run(2, compute_again, use_reentrant=use_reentrant)


def test_an_entry_that_no_vocabulary_has_is_told_to_all(pool: Pool) -> None:
    pool.run(2, ask_for_what_is_not_in_the_vocabulary)


@pytest.mark.slow
def test_tables_that_depend_on_the_length_are_whole(pool: Pool) -> None:
    pool.run(2, know_frequencies)


def stands_for(whole: Tensor) -> tuple[PartTensor, list[int]]:
    """A part of half the length, and how often the whole was made."""
    made: list[int] = []

    def make() -> Tensor:
        made.append(1)
        return whole

    return PartTensor(whole[:, : whole.shape[1] // 2], length=whole.shape[1], make_whole=make), made


def test_shape_and_kind_are_told_without_the_whole() -> None:
    x, made = stands_for(torch.ones(2, 6, 4, requires_grad=True))
    told = (x.shape, x.size(1), x.ndim, x.dim(), len(x), x.dtype, x.device.type, x.is_floating_point())
    assert told == ((2, 6, 4), 6, 3, 3, 2, torch.float32, "cpu", True)
    assert x.requires_grad and isinstance(x, Tensor) and {x: 1}[x] == 1
    assert not made and x.part is not None and x.part.shape == (2, 3, 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x * 2,
        lambda x: torch.ones(4) + x,
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: x[:, -1],
        lambda x: torch.cat([x, x], 1),
        lambda x: x.clone().masked_fill_(x > 3, 0.0),
        lambda x: x.to(torch.float64),
    ],
    ids=["times", "plus", "norm", "entry", "cat", "in place", "dtype"],
)
def test_whatever_computes_with_it_computes_with_the_whole(use: Callable[[Tensor], Tensor]) -> None:
    whole = torch.arange(48.0).view(2, 6, 4).requires_grad_()
    x, made = stands_for(whole)
    found = use(x)
    assert type(found) is Tensor and torch.equal(found, use(whole))
    found.sum().backward()
    gradient, whole.grad = whole.grad, None
    use(whole).sum().backward()
    assert gradient is not None and torch.equal(gradient, whole.grad)  # type: ignore[arg-type]
    assert made == [1] and x.part is None  # parts are of the whole from here on


def test_who_reads_without_gradients_takes_none_away() -> None:
    weight = torch.ones(4, requires_grad=True)
    x = PartTensor(torch.ones(2, 3, 4), length=6, make_whole=lambda: torch.ones(2, 6, 4) * weight)
    with torch.no_grad():
        assert x.sum() == 48
    x.whole().sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [12.0] * 4


class Doubled(Function):
    """Computes with what it is given behind the back of what stands for it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.ones(2, 6, 4)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_a_gradient_that_would_be_lost_fails() -> None:
    x, _ = stands_for(torch.ones(2, 6, 4, requires_grad=True))
    with pytest.raises(AssertionError, match="would be lost"):
        Doubled.apply(x).sum().backward()


def test_what_reads_it_below_python_fails() -> None:
    x, _ = stands_for(torch.ones(2, 6, 4))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(AssertionError, match="a part for the whole"):
        x + 1
