"""Cross entropy on logits sharded over the vocabulary, and the hooks that install it in a transformers model."""

# N tokens, V vocabulary, P vocabulary padded to a multiple of T, T size of the group

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ...cluster.collectives import all_reduce, once_differentiable
from ...cluster.transformers_api import ForCausalLMLoss
from ...derive.logits import LogitsUse, use_of_logits
from ...pipeline.counted_loss import divide_by_count
from .embedding import VocabParallelLMHead1D, VocabRange
from .parallel_module import require_all


class _VocabParallelCrossEntropy(Function):
    """Per-token losses. All-reduces the maximum, then the sum of exponentials and the label's logit."""

    @staticmethod
    def forward(
        ctx: Any, logits_NP: Tensor, labels_N: Tensor, entries: VocabRange, group: dist.ProcessGroup
    ) -> Tensor:
        """Return the loss of every token, and save the probabilities; two all-reduces of numbers per token."""
        scores_NP = logits_NP.to(torch.float32, copy=True)
        scores_NP[:, entries.valid :] = -torch.inf
        maximum_N = scores_NP.amax(-1)
        dist.all_reduce(maximum_N, dist.ReduceOp.MAX, group=group)
        scores_NP -= maximum_N.unsqueeze(-1)

        is_local_N = (labels_N >= entries.first) & (labels_N < entries.first + entries.valid)
        index_N = (labels_N - entries.first).masked_fill(~is_local_N, 0)
        label_score_N = scores_NP.gather(-1, index_N.unsqueeze(-1)).squeeze(-1).masked_fill(~is_local_N, 0.0)
        exponentials_NP = scores_NP.exp_()
        sums_2N = all_reduce(torch.stack([exponentials_NP.sum(-1), label_score_N]), group)

        exponentials_NP /= sums_2N[0].unsqueeze(-1)
        ctx.save_for_backward(exponentials_NP, index_N, is_local_N)
        ctx.dtype = logits_NP.dtype
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the local logits: probabilities, minus 1 at the label, times that of the loss."""
        probabilities_NP, index_N, is_local_N = ctx.saved_tensors
        gradient_NP = probabilities_NP * gradient_N.unsqueeze(-1)
        gradient_NP.scatter_add_(-1, index_N.unsqueeze(-1), -(gradient_N * is_local_N).unsqueeze(-1))
        return gradient_NP.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits_NP: Tensor,
    labels_N: Tensor,
    *,
    entries: VocabRange,
    group: dist.ProcessGroup,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Compute the cross entropy of logits sharded over the vocabulary (arXiv:1909.08053, section 3).

    Two all-reduces of N and 2N numbers in forward, none in backward; the logits are never gathered.

    Args:
        logits_NP: (N, P/T), this rank's columns.
        labels_N: (N,), equal on all ranks.
        entries: the vocabulary entries of this rank's columns.
        group: the tensor axis.
        ignore_index: the label that is ignored.
        reduction: "mean" over the labels that are not ignored, "sum" or "none".

    Returns:
        A float32 scalar, or (N,) for "none"; equal on all ranks.

    Raises:
        ValueError: a label is outside the vocabulary, or the reduction is unknown.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    require_labels(labels_N, entries.vocab_size, ignore_index)
    ignored_N = labels_N == ignore_index
    losses_N = _VocabParallelCrossEntropy.apply(logits_NP, labels_N, entries, group).masked_fill(
        ignored_N, 0.0
    )
    if reduction == "none":
        return losses_N
    return losses_N.sum() if reduction == "sum" else losses_N.sum() / (~ignored_N).sum()


def require_labels(labels_N: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError for a label outside the vocabulary."""
    is_entry_N = (labels_N == ignore_index) | ((labels_N >= 0) & (labels_N < vocab_size))
    require_all(
        is_entry_N,
        lambda: f"label {labels_N[~is_entry_N][0].item()} is outside the vocabulary of {vocab_size}",
    )


class ShardedLogits(ABC):
    """Replacement of `outputs.logits` after a training step with labels: only this rank's shard.

    Computing with it raises, so that a shard is never mistaken for all logits. `gather()`, on every rank of the axis,
    returns (B, S, V); with `parallel_output=False` in the plugin the logits are always (B, S, V).
    """

    _description = ""  # of the logits, for error messages

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"outputs.logits.{name}: {self._advice()}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"outputs.logits[...]: {self._advice()}")

    @abstractmethod
    def gather(self) -> Tensor:
        """Return all logits, (B, S, V), with gradients."""

    def _advice(self) -> str:
        return (
            f"these logits are {self._description}; call outputs.logits.gather() on every rank, or give "
            "parallel_output=False to the plugin"
        )


@dataclass(frozen=True)
class VocabParallelLogits(ShardedLogits):
    """`ShardedLogits` over the vocabulary."""

    local: Tensor
    head: VocabParallelLMHead1D
    _description = "sharded over the vocabulary"

    def gather(self) -> Tensor:
        """Return all logits, (B, S, V). One all-gather: every rank of the tensor axis must call."""
        return self.head.gathered(self.local)


class LossSum(Protocol):
    """Function that sums token losses to a float32 scalar, equal on all ranks.

    Arguments: `logits`, or the tensor that a model has instead, of which only the last dimension may differ;
    `shift_labels` (B, S), at each position the label of the next one.
    """

    def __call__(
        self, logits: Tensor, shift_labels: Tensor, *, vocab_size: int, ignore_index: int
    ) -> Tensor: ...


def route_loss(model: nn.Module, head_path: str, *, parallel_output: bool) -> None:
    """Compute the loss of a model with a sharded head without gathering the logits, where possible.

    If a transformers model computes its causal loss through `model.loss_function`, that function is replaced by one for
    sharded logits; calls with labels then keep the logits sharded. Models with a hard-coded loss, the user's losses and
    forwards, and calls without labels get all logits. No forward is rewritten.

    Args:
        model: a transformers model.
        head_path: path of its head, already sharded.
        parallel_output: leave `outputs.logits` sharded (as `VocabParallelLogits`) after training calls with labels.
    """
    if causal_logits_use(model, head_path) is not LogitsUse.OTHER:
        head: Any = model.get_submodule(head_path)
        route_causal_loss(
            model,
            (head, "gather_output"),
            total=partial(_vocab_parallel_sum, head=head),
            finish=lambda logits: (
                VocabParallelLogits(logits, head)
                if model.training and parallel_output
                else head.gathered(logits)
            ),
        )


def _vocab_parallel_sum(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    head: VocabParallelLMHead1D,
) -> Tensor:
    """Return the loss sum of a batch from sharded logits; a `LossSum`."""
    return vocab_parallel_cross_entropy(
        logits.flatten(0, -2),
        shift_labels.flatten(),
        entries=head.range,
        group=head.group,
        ignore_index=ignore_index,
        reduction="sum",
    )


def has_labels(arguments: Mapping[str, Any]) -> bool:
    """Return True if the arguments of a call include labels, so that it computes a loss."""
    return arguments.get("labels") is not None


def route_causal_loss(
    model: nn.Module,
    switch: tuple[Any, str],
    *,
    total: LossSum,
    finish: Callable[[Any], Any],
    is_sharded: Callable[[Mapping[str, Any]], bool] = has_labels,
) -> None:
    """Compute transformers' causal loss from something other than all logits, with hooks on the model.

    Args:
        model: a model that computes that loss through `model.loss_function`.
        switch: an object and the name of its attribute. It is False only during calls with sharded logits, so that
            calls of the model's forward without its hooks get full logits.
        total: sums the losses of the sharded logits, or of what the model has instead of them.
        finish: converts the same to `outputs.logits`.
        is_sharded: returns True if a call with these arguments keeps its logits sharded.
    """
    original: Any = model.loss_function
    model.loss_function = partial(  # type: ignore[assignment]
        _causal_lm_loss, switch=switch, total=total, of_full_logits=original
    )
    _keep_logits_sharded(model, switch, is_sharded=is_sharded, finish=finish)


def _causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    switch: tuple[Any, str],
    total: LossSum,
    of_full_logits: Callable[..., Tensor] = ForCausalLMLoss,
    **kwargs: Any,
) -> Tensor:
    """Return transformers' causal language-model loss of the next token, in its signature, from sharded logits.

    A mean over the labels, or their sum over `num_items_in_batch`. The keyword-only arguments are those of
    `route_causal_loss`; `of_full_logits` computes the loss of calls with full logits.
    """
    owner, name = switch  # an object, and its attribute that is True while logits are gathered
    if getattr(owner, name):
        return of_full_logits(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    shift_labels = shift_labels.to(logits.device)
    loss_sum = total(logits, shift_labels, vocab_size=vocab_size, ignore_index=ignore_index)
    if num_items_in_batch is None:
        return divide_by_count(loss_sum, (shift_labels != ignore_index).sum())
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return divide_by_count(loss_sum, num_items_in_batch, adds_up=True)  # the count of all microbatches


def _keep_logits_sharded(
    model: nn.Module,
    switch: tuple[Any, str],
    *,
    is_sharded: Callable[[Mapping[str, Any]], bool],
    finish: Callable[[Any], Any],
) -> None:
    """Add hooks that set `switch` to False during calls with sharded logits, and convert these to `outputs.logits`.

    Args: see `route_causal_loss`.
    """
    owner, name = switch
    signature = inspect.signature(model.forward)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: set the switch for this call."""
        setattr(owner, name, not is_sharded(signature.bind_partial(*args, **kwargs).arguments))

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Forward hook: turn the switch back on, and convert the logits if it was off in this call."""
        had_full_logits = getattr(owner, name)
        setattr(owner, name, True)
        if had_full_logits or outputs is None:  # None: the forward raised
            return outputs
        if isinstance(outputs, tuple):  # return_dict=False: the loss, then the logits
            return (outputs[0], finish(outputs[1]), *outputs[2:])
        outputs.logits = finish(outputs.logits)
        return outputs

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Shift labels along the last dimension to the label of the next position; the last one gets `ignore_index`."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def causal_logits_use(model: nn.Module, head: str) -> LogitsUse:
    """Return how a model's forward uses the logits, if for the rest only transformers' own causal loss does.

    OTHER for a forward that is not transformers' own, and for another loss. Traced, see `use_of_logits`.

    Args:
        model: the model.
        head: path of its head.
    """
    is_plain = (
        getattr(_forward(model), "__module__", "").startswith("transformers.")
        and getattr(model, "loss_function", None) is ForCausalLMLoss
    )
    return use_of_logits(model, head) if is_plain else LogitsUse.OTHER


def reads_weights(model: nn.Module) -> bool:
    """Return True if the model's own forward reads a weight instead of calling its module."""
    code = getattr(_forward(model), "__code__", None)
    return code is not None and "weight" in code.co_names


def _forward(model: nn.Module) -> Any:
    """Return the function of a model's forward, without decorators."""
    unwrapped: Any = inspect.unwrap(model.forward)
    return getattr(unwrapped, "__func__", unwrapped)
