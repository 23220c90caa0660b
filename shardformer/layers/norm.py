"""Root-mean-square norm of activations that are sharded over the tensor axis."""

# B batch, S sequence, H features of all ranks together, T size of the group

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ...cluster.collectives import copy_to, reduce_from
from ...cluster.placement import place
from .parallel_module import AROUND_FORWARD, HOOKS_LOST, ParallelModule, require_none, shard_of

# Names of the epsilon that classes of transformers and torch add to the mean of squares.
_EPSILONS = ("variance_epsilon", "eps")


def norm_errors(native: nn.Module) -> list[str]:
    """Return the reasons why a norm cannot be sharded over its features; empty if it can.

    Tested on sample numbers, since class names do not tell: norms that look alike may differ.
    """
    if "forward" in vars(native) or any(getattr(native, hooks) for hooks in AROUND_FORWARD):
        return [HOOKS_LOST]
    weight, epsilon = getattr(native, "weight", None), epsilon_of(native)
    other_parameters = [name for name, _ in native.named_parameters() if name != "weight"]
    if not isinstance(weight, Parameter) or weight.ndim != 1 or epsilon is None or other_parameters:
        return ["is not a root-mean-square norm of one weight: name it in partial, or write a policy for it"]
    generator = torch.Generator("cpu").manual_seed(0)
    features = weight.shape[0]
    x_BH = torch.randn(2, features, generator=generator, device="cpu")
    trial = copy.copy(native)
    trial_weight = Parameter(torch.rand(features, generator=generator, device="cpu") + 0.5)
    trial._parameters = {**native._parameters, "weight": trial_weight}
    expected_BH = _normalized(x_BH, trial_weight, x_BH.pow(2).mean(-1, keepdim=True), epsilon)
    with torch.no_grad():
        if torch.allclose(trial.forward(x_BH), expected_BH, rtol=1e-5, atol=1e-6):
            return []
    return [f"does not compute weight * x / sqrt(mean(x²) + {epsilon}): use tp_size=1"]


class SplitRMSNorm(ParallelModule):
    """A root-mean-square norm of sharded features: each rank normalizes its shard by the mean over all ranks.

    Args:
        native: the norm to shard; see `norm_errors`.
        process_group: the tensor axis, of size T.
        cut: sharding of the features, see `shard_of`. Padded features are zeros in the input.
    """

    def __init__(self, native: nn.Module, process_group: dist.ProcessGroup, **cut: Any) -> None:
        require_none(native, norm_errors(native))
        super().__init__()
        self.group = process_group
        self.epsilon = epsilon_of(native)
        self.weight: Parameter = native.weight  # type: ignore[assignment]
        shard = shard_of(self.weight, 0, process_group, **cut)
        self._num_features = sum(shard.blocks) * shard.replicas  # of all ranks together, replicas included
        place(self.weight, shard, process_group.rank())
        self.train(native.training)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """(B, S, H/T) in and out. All-reduce of (B, S, 1) in forward, and in backward.

        The activations of all ranks depend on the mean, so its gradient is summed, too. All features have equally many
        replicas in the mean.
        """
        squares_BS1 = x_BSH.float().pow(2).sum(-1, keepdim=True) / self._num_features
        mean_BS1 = copy_to(reduce_from(squares_BS1, self.group), self.group)
        return _normalized(x_BSH, self.weight, mean_BS1, self.epsilon)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}, ranks={self.group.size()}"


def _normalized(x: Tensor, weight: Tensor, mean: Tensor, epsilon: Any) -> Tensor:
    """Return x (…, H), divided by the root of its mean of squares `mean` (…, 1), times the weight (H)."""
    return (weight * (x.float() * torch.rsqrt(mean + epsilon))).to(x.dtype)


def epsilon_of(native: nn.Module) -> Any:
    """Return the epsilon of a norm; None if it has no attribute of a known name."""
    return next((getattr(native, name) for name in _EPSILONS if hasattr(native, name)), None)
