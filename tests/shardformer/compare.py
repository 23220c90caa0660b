"""Compare a sharded model or layer with the unsharded one. Runs on every rank of a tensor axis."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.cluster.collectives import all_gather
from echelon.cluster.placement import PartialGrad, Replicated, Shard, placement_on
from echelon.shardformer import ModelSharder, ShardConfig, policy_for

# No number of ranks divides it, and with padding to a multiple of 8 per rank no rank is empty.
VOCABULARY = 101
LENGTH = 13
TINY = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    num_labels=3,
)
GPT2 = dict(
    vocab_size=VOCABULARY,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_inner=48,
    n_positions=64,
    num_labels=3,
    pad_token_id=0,
)
# On purpose, encoder and decoder differ in sequence length and number of layers.
TARGET_LENGTH = 9
T5 = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=6,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
    num_labels=3,
)
BASES = dict(gpt2=GPT2, t5=T5, mt5=T5, umt5=T5)
NO_DROPOUT = dict(
    **{name: {"dropout_rate": 0.0} for name in ("t5", "mt5", "umt5")},
    bert=dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0),
    gpt2=dict(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0, classifier_dropout=0.0
    ),
)
# With this multiple the last shard is short, and no rank is empty, on 2 and on 4 ranks.
MULTIPLE = 8


def build(class_name: str, *, attention: str = "sdpa", seed: int = 0, **settings: Any) -> nn.Module:
    """Build a small model of this class in training mode, equal on all ranks; without dropout by default.

    Older releases of transformers have no fused attention for some classes; these get eager attention.
    """
    model_class = getattr(transformers, class_name)
    attention = attention if model_class._supports_sdpa else "eager"
    config_class = model_class.config_class
    model_type = config_class.model_type
    base = BASES.get(model_type, TINY)
    quiet = NO_DROPOUT.get(model_type, {"attention_dropout": 0.0, "classifier_dropout": 0.0})
    torch.manual_seed(seed)
    model = model_class._from_config(
        config_class(**{**base, **quiet, **settings}), attn_implementation=attention, dtype=torch.float32
    )
    # Biases and norms start at 0 and 1: equal entries hide a wrong order.
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.train()


def split(model: nn.Module, **settings: Any) -> nn.Module:
    """Shard the model over the world as a plugin does; partial gradients are not summed."""
    settings = {"make_vocab_size_divisible_by": MULTIPLE, **settings}
    config = ShardConfig(tensor_parallel_process_group=dist.group.WORLD, **settings)
    sharder = ModelSharder(model, policy_for(model), config)
    sharder.shard()
    return sharder.model


def integers(low: int, high: int, *shape: int, seed: int = 1) -> Tensor:
    """Draw integers, equal on all ranks."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Draw normal numbers, equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text() -> dict[str, Tensor]:
    """Return three rows of different lengths, padded."""
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7], [10]])).long()
    return {"input_ids": integers(3, VOCABULARY, 3, LENGTH) * mask, "attention_mask": mask}


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    """Return text with labels for the model's head: another sequence for a decoder, a class of three, or its tokens."""
    name, batch = type(model).__name__, text()
    if "ConditionalGeneration" in name:
        mask = torch.arange(TARGET_LENGTH) < torch.tensor([[5], [TARGET_LENGTH], [8]])
        targets = integers(3, VOCABULARY, 3, TARGET_LENGTH, seed=2)
        return {**batch, "labels": targets.masked_fill(~mask, -100)}
    if "SequenceClassification" in name:
        return {**batch, "labels": torch.tensor([0, 2, 1])}
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def loss_of(outputs: Any) -> Tensor:
    """Return the model's loss."""
    return outputs.loss


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients by the names of their parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def require_equal(actual: Any, expected: Any) -> None:
    """Require that tensors, or sequences and mappings of tensors, are equal bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def recompute_layers(model: Any, *settings: Any) -> None:
    """Recompute all layers by transformers' own call; its name before 5.23 is deprecated since."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(*settings)


def pieces(tensor: Tensor) -> list[Tensor]:
    """All-gather this tensor of all ranks, in order of rank."""
    world = dist.group.WORLD
    assert world is not None
    return list(all_gather(tensor.detach()[None], world, 0).unbind(0))


def require_equal_on_ranks(tensor: Tensor, what: str) -> None:
    """Require equality up to the last bits, in which MKL's products may differ if operands are aligned differently.

    Such a difference occurred once in some twenty runs of the dropout tests, on a loaded machine.
    """
    allowed = 1e-6 * tensor.abs().max()
    for rank, piece in enumerate(pieces(tensor)):
        message = f"{what} of rank {rank} is not that of rank {dist.get_rank()}"
        assert bool(((piece - tensor).abs() <= allowed).all()), message


def full_tensor(parameter: Parameter, *, gradient: bool, name: str = "") -> Tensor:
    """Return the full parameter or gradient from the shards of all ranks; partial gradients are summed."""
    tensor = parameter.grad if gradient else parameter.data
    assert tensor is not None
    placement = placement_on(parameter, "tp")
    if placement is None or isinstance(placement, Replicated):
        require_equal_on_ranks(tensor, name)
        return tensor
    all_pieces = pieces(tensor)
    if isinstance(placement, PartialGrad):
        return torch.stack(all_pieces).sum(0) if gradient else tensor
    if not gradient:
        return placement.full(all_pieces)
    replicas = placement.replicas
    summed = [torch.stack(all_pieces[i : i + replicas]).sum(0) for i in range(0, len(all_pieces), replicas)]
    full = placement.full([piece for piece in summed for _ in range(replicas)])
    _require_no_gradient_of_padding(placement, summed, full, name)
    return full


def _require_no_gradient_of_padding(placement: Shard, summed: list[Tensor], full: Tensor, name: str) -> None:
    count = sum(int(piece.count_nonzero()) for piece in summed)
    assert count == int(full.count_nonzero()), f"{name}: its padding has a gradient"


def require_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Require that every gradient of a sharded model equals that of the unsharded one.

    Tolerance for float32 sums in another order: 1e-5 of the tensor's largest entry. If the terms cancel (the gradient
    of a key's bias, or of one logit per position, is only noise): the last bit of the model's largest gradient.
    """
    expected = dict(reference.named_parameters())
    parameters = dict(model.named_parameters())
    assert list(parameters) == list(expected)
    assert any(parameter.grad is not None for parameter in expected.values())
    largest = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None)
    for name, parameter in expected.items():
        if parameter.grad is None:
            assert parameters[name].grad is None or not parameters[name].grad.any(), f"{name} has a gradient"
            continue
        gradient = full_tensor(parameters[name], gradient=True, name=name)
        tolerance = max(1e-5 * parameter.grad.abs().max().item(), 2**-23 * largest)
        departure = (gradient - parameter.grad).abs().max().item()
        assert departure <= tolerance, (
            f"gradient of {name} departs by {departure:.2e}, allowed {tolerance:.2e}"
        )


def require_same_training(
    model: nn.Module, batch: Mapping[str, Any], *, loss: Callable[[Any], Tensor] = loss_of, **settings: Any
) -> tuple[nn.Module, Any, Any]:
    """Shard a copy of the model, require the same loss and gradients, and return it with both outputs."""
    copied = split(deepcopy(model), **settings)
    expected = model(**batch)
    loss(expected).backward()
    outputs = copied(**batch)
    loss(outputs).backward()
    difference = abs(loss(outputs).item() - loss(expected).item())
    assert difference <= 1e-6 * max(1.0, abs(loss(expected).item())), f"the loss departs by {difference:.2e}"
    require_equal_on_ranks(loss(outputs), "the loss")
    require_same_gradients(copied, model)
    return copied, outputs, expected


class Attention(nn.Module):
    """The attributes that attention functions of transformers read."""

    def __init__(self, groups: int = 1, *, is_causal: bool = True, config: Any = None) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal, self.config = groups, is_causal, config


class Made(TorchDispatchMode):
    """Record shape and dtype of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: set[tuple[torch.Size, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors |= {(leaf.shape, leaf.dtype) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


@contextmanager
def named(case: object) -> Iterator[None]:
    """Add the case to the message of an error."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
