"""Causal language-model loss from the inputs of the head, one chunk of tokens at a time.

With a large vocabulary the float32 logits of all tokens are by far the largest tensors of a training step. Here they
exist for one chunk only: its loss and its gradients are computed together, in forward, as in Liger Kernel's fused
linear cross entropy (arXiv:2410.10989, section 3.2). Backward needs only the saved gradient of each input of the head.
"""

# N tokens, C those of a chunk, H hidden, V vocabulary, P vocabulary padded to a multiple of T, T size of the group

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PreTrainedModel

from ...cluster.collectives import begin_gather, copy_to, once_differentiable
from ...cluster.device import is_cuda
from ...derive.logits import LogitsUse
from .class_change import change_class
from .deferred_linear import DeferrableLinear, add_product
from .embedding import VocabParallelLMHead1D, VocabRange
from .parallel_module import native_errors
from .vocabulary_loss import ShardedLogits, causal_logits_use, require_labels, route_causal_loss

# From hidden_CH and labels_C to the sum of a chunk's losses in float32 and the gradient of its logits, (C, P) in the
# format of hidden_CH. Without needs_gradient the latter is undefined.
ChunkLoss = Callable[..., tuple[Tensor, Tensor]]


def torch_chunk_loss(
    hidden_CH: Tensor,
    labels_C: Tensor,
    *,
    head: Callable[[Tensor], Tensor],
    entries: VocabRange,
    group: dist.ProcessGroup | None,
    ignore_index: int,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Compute a `ChunkLoss` in float32 with torch. Over a group one all-gather of 2C numbers.

    Args:
        hidden_CH: inputs of the head.
        labels_C: labels of the same tokens.
        head: computes this rank's logits_CP from hidden_CH; logits of padding are -inf.
        entries: the vocabulary entries of this rank's logits.
        group: the tensor axis; None if the vocabulary is unsharded.
        ignore_index: the label that does not count.
        needs_gradient: also compute the gradient of the logits.
    """
    scores_CP = head(hidden_CH).float()
    is_counted_C = labels_C != ignore_index
    is_local_C = is_counted_C & (labels_C >= entries.first) & (labels_C < entries.first + entries.valid)
    index_C1 = (labels_C - entries.first).masked_fill(~is_local_C, 0).unsqueeze(1)
    label_score_C = scores_CP.gather(1, index_C1).squeeze(1).masked_fill(~is_local_C, 0.0)
    log_sum_C = scores_CP.logsumexp(1)
    if group is not None:
        of_ranks_T2C = begin_gather(torch.stack([log_sum_C, label_score_C]), group).wait()
        log_sum_C, label_score_C = of_ranks_T2C[:, 0].logsumexp(0), of_ranks_T2C[:, 1].sum(0)
    loss = ((log_sum_C - label_score_C) * is_counted_C).sum()
    if not needs_gradient:
        return loss, scores_CP
    log_sum_C = log_sum_C.masked_fill(~is_counted_C, torch.inf)  # a gradient of 0
    gradient_CP = scores_CP.sub_(log_sum_C.unsqueeze(1)).exp_()
    gradient_CP.scatter_add_(1, index_C1, -is_local_C.float().unsqueeze(1))
    return loss, gradient_CP.to(hidden_CH.dtype)


def liger_chunk_loss(
    hidden_CH: Tensor,
    labels_C: Tensor,
    *,
    head: Callable[[Tensor], Tensor],
    entries: VocabRange,
    group: None,
    ignore_index: int,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Compute a `ChunkLoss` of an unsharded vocabulary with Liger's kernel, which overwrites logits by their gradient.

    The kernel computes in float32 for any format of the logits, without host reads. Liger's own function around it
    reads three numbers in every call, and rounds losses to the format of the logits.

    Raises:
        ImportError: as `liger_kernel`.
    """
    kernel, logits_CP = liger_kernel(), head(hidden_CH)
    # The kernel writes no loss where a label does not count.
    loss_C = logits_CP.new_zeros(len(labels_C), dtype=torch.float32)
    arguments = _LIGER_ARGUMENTS | dict(
        X_ptr=logits_CP,
        X_stride=logits_CP.stride(0),
        Y_ptr=labels_C,
        Y_stride=labels_C.stride(0),
        loss_ptr=loss_C,
        n_cols=entries.width,
        ignore_index=ignore_index,
        HAS_GRADIENTS=needs_gradient,
        BLOCK_SIZE=min(_LIGER_BLOCK, 1 << (entries.width - 1).bit_length()),
    )
    kernel[(len(labels_C),)](**{name: arguments[name] for name in kernel.arg_names}, num_warps=_LIGER_WARPS)
    return loss_C.sum(), logits_CP.to(hidden_CH.dtype)


# The arguments of all releases, set for a plain cross entropy. Dummy numbers are 1, for which Triton specializes.
_LIGER_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "n_cols", "ignore_index")),
    **dict.fromkeys(("weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr")),
    **dict.fromkeys(("loss_stride", "token_accuracy_stride", "predicted_tokens_stride"), 1),
    **dict.fromkeys(("n_non_ignore", "sum_non_ignore_weight", "weight_sum"), 1),
    **dict.fromkeys(("lse_square_scale", "label_smoothing", "softcap"), 0.0),
    **dict.fromkeys(("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"), False),
    **dict.fromkeys(("HAS_WEIGHT", "HAS_SOFTCAPPING", "HAS_GRADIENTS"), False),
    "reduction": "sum",
    "BLOCK_SIZE": None,
}
_LIGER_BLOCK, _LIGER_WARPS = 32768, 32  # as Liger has tuned them for Hopper and before


def liger_kernel() -> Any:
    """Return Liger's Triton kernel of the cross entropy.

    Raises:
        ImportError: it is not installed, older than 0.5.3, or a release with unknown arguments.
    """
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel

    names = set(kernel.arg_names)
    # Before 0.5.3, which added HAS_WEIGHT, unused arguments may not be None; 0.3 rounds the label's gradient twice.
    if "HAS_WEIGHT" not in names or names - _LIGER_ARGUMENTS.keys():
        raise ImportError(
            f"liger-kernel {version('liger-kernel')} has a cross entropy with other arguments than 0.5.3 to "
            "0.8.5: install one of these releases, or uninstall it for torch's cross entropy"
        )
    return kernel


def fused_chunk_loss(device: torch.device, group: dist.ProcessGroup | None) -> ChunkLoss:
    """Return the `ChunkLoss` of a device: Liger's on CUDA, if installed, for an unsharded head, else torch's."""
    return liger_chunk_loss if group is None and _uses_liger(device) else torch_chunk_loss


def chunk_loss_errors(device: torch.device) -> list[str]:
    """Return the error of an installed Liger without a usable kernel; empty if there is none. No communication."""
    if _uses_liger(device):
        try:
            liger_kernel()
        except ImportError as error:
            return [str(error)]
    return []


def _uses_liger(device: torch.device) -> bool:
    """Return True on CUDA if Liger is installed."""
    return is_cuda(device) and find_spec("liger_kernel") is not None


class _ChunkedCrossEntropy(Function):
    """The sum of the losses; forward computes the gradients, backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_PH: Tensor,
        bias_P: Tensor | None,
        labels_N: Tensor,
        entries: VocabRange,
        group: dist.ProcessGroup | None,
        ignore_index: int,
    ) -> Tensor:
        """Return the sum of the losses of all chunks; save the gradients of the head's inputs, weight and bias.

        Args: see `chunked_cross_entropy`. Gradients of inputs are of this rank's part of the vocabulary alone.
        """
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        hidden_gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_gradient_PH = torch.zeros_like(weight_PH, dtype=torch.float32) if needs_weight else None
        bias_gradient_P = total.new_zeros(entries.width) if needs_bias else None

        def head(hidden_CH: Tensor) -> Tensor:
            """Return this rank's logits, -inf at padded entries of the vocabulary."""
            logits_CP = F.linear(hidden_CH, weight_PH, bias_P)
            logits_CP[:, entries.valid :] = -torch.inf
            return logits_CP

        chunk_loss = partial(
            fused_chunk_loss(hidden_NH.device, group),
            head=head,
            entries=entries,
            group=group,
            ignore_index=ignore_index,
            needs_gradient=any(ctx.needs_input_grad),
        )
        length = chunk_length(len(hidden_NH), hidden_NH.shape[1], entries.width)
        for start in range(0, len(hidden_NH), length):
            chunk = slice(start, start + length)
            hidden_CH = hidden_NH[chunk]
            loss, gradient_CP = chunk_loss(hidden_CH, labels_N[chunk])
            total += loss
            if hidden_gradient_NH is not None:
                torch.mm(gradient_CP, weight_PH, out=hidden_gradient_NH[chunk])
            if weight_gradient_PH is not None:
                add_product(weight_gradient_PH, gradient_CP.T, hidden_CH)
            if bias_gradient_P is not None:
                bias_gradient_P += gradient_CP.sum(0, dtype=torch.float32)
            del gradient_CP  # otherwise two chunks of logits would be in memory
        ctx.save_for_backward(hidden_gradient_NH, weight_gradient_PH, bias_gradient_P)
        ctx.dtype = weight_PH.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients by that of the sum."""
        hidden_gradient_NH, weight_gradient_PH, bias_gradient_P = ctx.saved_tensors
        return (
            None if hidden_gradient_NH is None else hidden_gradient_NH * gradient,
            None if weight_gradient_PH is None else (weight_gradient_PH * gradient).to(ctx.dtype),
            None if bias_gradient_P is None else (bias_gradient_P * gradient).to(ctx.dtype),
            *[None] * 4,  # labels_N, entries, group, ignore_index
        )


def chunk_length(num_tokens: int, hidden: int, width: int) -> int:
    """Return the tokens per chunk, so that its logits have about as many elements as all inputs of the head."""
    num_chunks = -(-width // hidden)
    return max(1, -(-num_tokens // num_chunks))


def chunked_cross_entropy(
    hidden_NH: Tensor,
    weight_PH: Tensor,
    bias_P: Tensor | None,
    labels_N: Tensor,
    *,
    entries: VocabRange,
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the sum of the cross entropies of a head's logits, without materializing all logits.

    Over a group one all-gather of 2C numbers a chunk in forward, one all-reduce of N × H in backward.

    Args:
        hidden_NH: inputs of the head, equal on all ranks of the group.
        weight_PH: this rank's rows of the head's weight.
        bias_P: of the head.
        labels_N: equal on all ranks.
        entries: the vocabulary entries of this rank's rows.
        group: the tensor axis; None if the head is unsharded.
        ignore_index: the label that is ignored.

    Returns:
        A float32 scalar, equal on all ranks.

    Raises:
        ValueError: a label is outside the vocabulary.
    """
    require_labels(labels_N, entries.vocab_size, ignore_index)
    if not torch.is_grad_enabled():  # `needs_input_grad` is True for a parameter even then
        hidden_NH, weight_PH = hidden_NH.detach(), weight_PH.detach()
        bias_P = None if bias_P is None else bias_P.detach()
    if group is not None:
        hidden_NH = copy_to(hidden_NH, group)
    total: Tensor = _ChunkedCrossEntropy.apply(
        hidden_NH, weight_PH, bias_P, labels_N, entries, group, ignore_index
    )
    return total


class ChunkedLossHead(DeferrableLinear):
    """An unsharded head that returns its inputs while `makes_logits` is False: the loss is computed from them."""

    makes_logits = True

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """Map (B, S, H) to logits (B, S, V), or return the inputs."""
        return super().forward(hidden_BSH) if self.makes_logits else hidden_BSH


@dataclass(frozen=True)
class UncomputedLogits(ShardedLogits):
    """`ShardedLogits` that are not computed yet; only the inputs of the head exist."""

    hidden_BSH: Tensor
    head: nn.Module
    _description = "not computed, since the loss was computed in chunks (enable_fused_loss)"

    def gather(self) -> Tensor:
        """Return all logits, (B, S, V), with gradients. All-gather over the tensor axis if the head is sharded."""
        logits: Tensor = self.head(self.hidden_BSH)
        return logits


def _chunked_sum(
    hidden_BSH: Tensor,
    shift_labels_BS: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    head: ChunkedLossHead | VocabParallelLMHead1D,
) -> Tensor:
    """Return the loss sum of a batch, from the inputs of its head instead of logits; a `LossSum`."""
    if isinstance(head, VocabParallelLMHead1D):
        entries, group = head.range, head.group
    else:
        rows, group = len(head.weight), None
        entries = VocabRange(vocab_size=rows, first=0, width=rows, valid=rows)
    return chunked_cross_entropy(
        hidden_BSH.flatten(0, -2),
        head.weight,
        head.bias,
        shift_labels_BS.flatten(),
        entries=entries,
        group=group,
        ignore_index=ignore_index,
    )


def chunked_loss_errors(model: nn.Module) -> list[str]:
    """Return the reasons why a model's loss cannot be rerouted to the inputs of its head; empty if it can."""
    subject, instead = f"the loss of {type(model).__name__}", "leave enable_fused_loss out"
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    path = next((name for name, module in model.named_modules() if module is head), None)
    use = LogitsUse.OTHER if path is None else causal_logits_use(model, path)
    if use is LogitsUse.OTHER:
        return [f"{subject} is not transformers' causal loss alone, in transformers' own forward: {instead}"]
    if native_errors(head, nn.Linear, VocabParallelLMHead1D):
        return [f"{subject} is computed by a {type(head).__name__} head, not a plain nn.Linear: {instead}"]
    if use is LogitsUse.SCALED:
        return [f"{subject} needs the logits, which its forward scales, caps or converts: {instead}"]
    return []


def route_chunked_loss(model: nn.Module, *, parallel_output: bool) -> None:
    """Compute the loss of a model without `chunked_loss_errors` from the inputs of its head.

    Calls with labels then compute no logits; other calls do.

    Args:
        model: a transformers model, whose head is already sharded if requested.
        parallel_output: return `UncomputedLogits` from training calls with labels; otherwise compute all logits there.
    """
    head: Any = cast(PreTrainedModel, model).get_output_embeddings()
    if not isinstance(head, VocabParallelLMHead1D):
        change_class(head, ChunkedLossHead)
    route_causal_loss(
        model,
        (head, "makes_logits"),
        total=partial(_chunked_sum, head=head),
        finish=lambda hidden: (
            UncomputedLogits(hidden, head) if model.training and parallel_output else head(hidden)
        ),
    )
