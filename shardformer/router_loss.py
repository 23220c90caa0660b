"""The auxiliary loss of mixtures of experts, over the tokens of all replicas and the layers of all stages.

[Note: router statistics] transformers multiplies, for each expert, the fraction of tokens that chose it by its mean
probability, both over the tokens of all layers. This is no sum over layers, ranks or microbatches. Sums are the factors
before the product: numbers of choices, sums of probabilities and the number of tokens, a tensor (3, E) in float32.
They are added over layers and ranks; the product is formed once. So a microbatch has the loss that one process has for
the tokens of this microbatch of all replicas. Masked tokens do not count.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..cluster.collectives import all_reduce, paired
from ..cluster.mesh import ParallelMesh
from ..cluster.transformers_api import (
    ROUTER_LOGITS,
    ROUTER_LOSS,
    adds_router_loss,
    router_loss_file,
    routers_of,
    routing_sizes,
)
from ..pipeline.stage import Stage, argument
from .layers.sequence_axis import SequenceAxis, axis_of

# B batch, S sequence, E experts, N tokens of a layer on this rank


class RouterLoss:
    """A replacement of transformers' auxiliary loss, over the tokens of all ranks; see [Note: router statistics].

    During the model's forwards it replaces the function of this name in the globals of the model's file, which the
    forward calls. It communicates in forwards with gradients and in those of a `Stage`, which all ranks run; other
    calls compute the loss of the local tokens.

    An encoder-decoder (NLLB-MoE) has one loss for the encoder and one for the decoder, each with its own routers, mask
    and tokens: supported on one stage with unsharded sequences only.

    Under a pipeline the statistics of earlier stages arrive with the activations, and those of this stage are added and
    sent on (`Stage.carried`: `begin`, `sent`, `finish`). Autograd returns their gradient in the same way. The last
    stage alone communicates over the data axis.

    Args:
        model: its forward calls the function.
        file_globals: the globals of the file of its forward.
        mesh: the mesh.
    """

    def __init__(self, model: nn.Module, file_globals: dict[str, Any], mesh: ParallelMesh) -> None:
        self._model, self._file_globals, self._native = model, file_globals, file_globals[ROUTER_LOSS]
        self._device = mesh.device
        self._group = mesh.group("data") if mesh.size("data") > 1 else None
        self._is_refused = getattr(model.config, "is_encoder_decoder", False) and mesh.size("pp", "sp") > 1
        self._sizes = routing_sizes(model) if mesh.size("pp") > 1 and not self._is_refused else None
        axes = filter(None, map(axis_of, model.modules()))
        self._axis: SequenceAxis | None = next(axes, None) if mesh.size("sp") > 1 else None
        # Set by `begin` for one stage's forward, cleared by `finish`.
        self._is_stage_forward = False  # all ranks run this forward
        self._is_carried = False  # stages pass statistics on in this forward: `adds_loss` at its begin
        self._received_3E: Tensor | None = None  # statistics of the stages before
        # Of this stage's routers, to which their hooks append; None where they record none, as on the last stage.
        self._logits: list[Tensor] | None = None
        self._mask: Tensor | None = None
        if not self._is_refused:
            self._add_hooks(mesh)

    def _add_hooks(self, mesh: ParallelMesh) -> None:
        """Replace the loss function of the model's file during its forwards; under a pipeline record router logits."""
        is_partial = mesh.size("pp", "sp") > 1

        def enter(module: nn.Module, args: tuple) -> None:
            self._file_globals[ROUTER_LOSS] = self

        def leave(module: nn.Module, args: tuple, outputs: Any) -> Any:
            self._file_globals[ROUTER_LOSS] = self._native
            return _without_logits(outputs) if is_partial else outputs

        self._model.register_forward_pre_hook(_Hook(enter))
        self._model.register_forward_hook(_Hook(leave), always_call=True)
        for router, index in routers_of(self._model).items() if mesh.size("pp") > 1 else ():
            router.register_forward_hook(_Hook(partial(self._record_logits, index)))

    def _record_logits(self, index: int, router: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook: record a router's logits, entry `index` of its output, on a stage before the last."""
        if self._logits is not None:  # not in a recomputation, nor in the last stage
            self._logits.append(output[index] if isinstance(output, tuple) else output)

    @property
    def adds_loss(self) -> bool:
        """True if the model's config asks for the auxiliary loss, which the model then adds to its loss."""
        return adds_router_loss(self._model)

    def batch_error(self, batch: Mapping[str, Any]) -> str | None:
        """Return the error of a batch that requests the loss otherwise than the config, or in a layout without support.

        All ranks follow the config, so that they communicate alike. None if there is no error.
        """
        asked = batch.get(ROUTER_LOGITS)
        if self._is_refused and (asked or self.adds_loss):
            return (
                f"{ROUTER_LOGITS}=True of an encoder-decoder needs all layers and positions on each rank: set it to "
                "False, or use pp_size=1 and sp_size=1"
            )
        if asked is None or bool(asked) == self.adds_loss:
            return None
        return (
            f"{ROUTER_LOGITS}={asked!r} in the batch differs from the model's config, by which all ranks run alike: "
            f"leave it out, and set model.config.{ROUTER_LOGITS}={asked!r}"
        )

    def begin(
        self, args: tuple, kwargs: dict[str, Any], received: tuple[Tensor, ...], *, is_last: bool
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Start a stage's forward, and take the statistics from what the stage before has sent.

        Args:
            args, kwargs: arguments of the model's forward.
            received: tensors from the stage before; the statistics are the last of them.
            is_last: this is the last stage, which alone asks the model for router logits and its loss.

        Returns:
            The keyword arguments for the model's forward, and the tensors received for its layers.
        """
        self._is_stage_forward = True
        self._is_carried = self.adds_loss
        if not self._is_carried:
            return kwargs, received
        if received:
            *of_layers, self._received_3E = received
            received = tuple(of_layers)
        self._mask = argument(self._model, args, kwargs, "attention_mask")
        self._logits = None if is_last else []  # the last stage gets its logits from the model
        return {**kwargs, ROUTER_LOGITS: is_last}, received

    def sent(self) -> tuple[Tensor, ...]:
        """Return what this stage sends besides activations: the statistics of its layers and all before them."""
        if not self._is_carried:
            return ()
        assert self._logits is not None and self._sizes is not None
        return (self._accumulated_statistics(self._logits, *self._sizes, self._mask),)

    def finish(self) -> None:
        """End a stage's forward: forget its statistics, logits and mask."""
        self._is_stage_forward = self._is_carried = False
        self._received_3E = self._logits = self._mask = None

    @torch.compiler.disable
    def __call__(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Return the loss; arguments as of transformers' function. In forward and backward one all-reduce."""
        if gate_logits is None and self._is_carried:
            gate_logits = ()  # a last stage without mixtures, before transformers 5.1 gave it this
        if not isinstance(gate_logits, tuple) or num_experts is None:
            return self._native(gate_logits, num_experts, top_k, attention_mask)
        if self._sizes not in (None, (num_experts, top_k)):
            raise AssertionError(
                f"the model's numbers of experts are {(num_experts, top_k)}, not {self._sizes}"
            )
        total_3E = self._accumulated_statistics(gate_logits, num_experts, top_k, attention_mask)
        if self._group is not None and (self._is_stage_forward or torch.is_grad_enabled()):
            total_3E = _over_ranks(total_3E, self._group)
        return balance_loss(total_3E)

    def _accumulated_statistics(
        self, logits_NE: Sequence[Tensor], num_experts: int, top_k: int, mask_BS: Tensor | None
    ) -> Tensor:
        """Return the statistics (3, E) of the logits of some layers plus the statistics of earlier stages."""
        if not logits_NE:
            nothing_3E = torch.zeros(3, num_experts, dtype=torch.float32, device=self._device)
            return nothing_3E if self._received_3E is None else self._received_3E
        if self._axis is not None:
            mask_BS = local_mask(logits_NE[0], mask_BS, self._axis)
        local_3E = router_statistics(logits_NE, num_experts, top_k, mask_BS)
        return local_3E if self._received_3E is None else self._received_3E + local_3E


class _Hook:
    """A hook that a copy or pickle of the module has without effect: it belongs to the original model."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def router_statistics(
    logits_NE: Sequence[Tensor], num_experts: int, top_k: int, mask: Tensor | None
) -> Tensor:
    """Return (3, E) in float32, summed over layers: choices of each expert, probabilities, and tokens (all equal).

    Args:
        logits_NE: the router's logits of each layer.
        num_experts: E.
        top_k: the number of experts of a token.
        mask: the weight of each of the N tokens, 1 or 0; None counts all.
    """
    kind: Any = {"dtype": torch.float32, "device": logits_NE[0].device}
    total_3E = torch.zeros(3, num_experts, **kind)
    mask_N = None if mask is None else mask.reshape(-1).to(**kind)
    for layer_NE in logits_NE:
        probabilities_NE = F.softmax(layer_NE, dim=-1)
        chosen = torch.topk(probabilities_NE, top_k, dim=-1).indices.reshape(-1)
        weight_N = torch.ones(len(layer_NE), **kind) if mask_N is None else mask_N
        counts_E = torch.zeros(num_experts, **kind)
        counts_E.scatter_add_(0, chosen, weight_N.repeat_interleave(top_k))
        sums_E = (probabilities_NE.float() * weight_N.unsqueeze(-1)).sum(0)
        total_3E = total_3E + torch.stack([counts_E, sums_E, weight_N.sum().expand(num_experts)])
    return total_3E


def balance_loss(total_3E: Tensor) -> Tensor:
    """Return the auxiliary loss from the statistics of all its tokens, 0-d."""
    counts_E, sums_E, tokens_E = total_3E.unbind(0)
    return len(counts_E) * (counts_E / tokens_E * (sums_E / tokens_E)).sum()


def _over_ranks(total_3E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum statistics over ranks, and the gradients in backward: every rank's loss has the sum. One all-reduce each."""

    def over_ranks(x: Tensor) -> Tensor:
        return all_reduce(x, group)

    return paired(total_3E, over_ranks, over_ranks)


def local_mask(layer_NE: Tensor, mask_BS: Tensor | None, axis: SequenceAxis) -> Tensor:
    """Return this rank's shard of a mask (B, S), in which the padding of sequence shards is 0; None counts all.

    Args:
        layer_NE: the logits of a layer for the N tokens of this rank, by which B is known without a mask.
        mask_BS: the mask of full sequences.
        axis: the sharding of sequences.
    """
    if mask_BS is None:
        mask_BS = layer_NE.new_ones(len(layer_NE) // axis.shard_length, axis.length)
    return axis.shard(mask_BS, 1)


def _without_logits(outputs: Any) -> Any:
    """Return a model's outputs without logits of routers, of which a rank has only some."""
    if getattr(outputs, "router_logits", None) is None:
        return outputs
    return replace(outputs, router_logits=None)


def share_router_loss(model: nn.Module, stages: Iterable[Stage], mesh: ParallelMesh) -> RouterLoss | None:
    """Compute the auxiliary loss of a model over the data axis and all stages, in place; None for a model without one.

    Args:
        model: the local model.
        stages: its stages on this rank.
        mesh: the mesh.
    """
    file_globals = router_loss_file(model)
    if file_globals is None or mesh.size("data", "pp") == 1:
        return None
    shared = RouterLoss(model, file_globals, mesh)
    for stage in stages:
        stage.carried = shared
    return shared
