"""A model under torch's fully_shard. What it is asked for, and its optimizer, are files of their own."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn import Parameter

from ..checkpoint.lora import Adapter
from ..cluster.random import ForwardRandom
from ..shardformer.checkpoint_config import recomputable_layers
from ..shardformer.given import mark_taken
from ..shardformer.partial_state import refuse_partial_state
from .boosted_module import BoostedModule


class TorchFSDPModel(BoostedModule):
    """A model whose parameters are shared out; `unwrap()` is the model itself.

    Its layers and then the rest are sharded by fully_shard, which replaces every parameter by a DTensor: this
    rank's rows of it in float32. Building it is collective over the world.

    Args:
        module: the model, changed in place. Parameters of 16 bits become float32 masters.
        policy: the keyword arguments of fully_shard.
        random: of the forwards in training.
        adapters: what is saved of it as LoRA.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Mapping[str, Any],
        random: ForwardRandom,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        super().__init__(adapters)
        self._random = random
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize:
                parameter.data = parameter.data.float()
        layers = separable_layers(module)
        for layer in layers:
            fully_shard(layer, **policy)
        # Layers that are freed are gathered in every forward; what stays gathered may be used alone.
        always_gathers = bool(layers) and policy["reshard_after_forward"] is not False
        mesh = policy["mesh"]
        self._ranks = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)) if always_gathers else ()
        self.root = (fully_shard(module, **policy),)  # a tuple is not registered: one name per parameter
        refuse_partial_state(module)
        self.module = module
        mark_taken(module)

    def ranks_of_call(self) -> Sequence[int]:
        """The ranks of a shard group, where layers are gathered in every forward."""
        return self._ranks

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs; each layer is gathered when it computes. Every rank of a shard group calls."""
        with self._random.call(self._random.draw(self.module)):
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The `generate` of the transformers model, whose layers are gathered in every forward. Every rank calls.

        Ranks whose texts end early go on computing until all have ended, which costs a reduction for each token.
        """
        module: Any = self.module
        return module.generate(*args, **{"synced_gpus": True, **kwargs})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up whole on every rank until a backward outside of the block."""
        self.root[0].set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.root[0].set_requires_gradient_sync(True)

    def free_whole_parameters(self) -> None:
        """Keep this rank's pieces alone. What a forward without a backward left whole would outlive a step."""
        for module in self._sharded_modules():
            module.reshard()

    def has_unreduced_gradients(self) -> bool:
        """Whether gradients of a `no_sync` block wait on this rank."""
        return bool(self.unreduced_gradients())

    def unreduced_gradients(self) -> list[Tensor]:
        """Those of a `no_sync` block that wait on this rank, whole."""
        found = (
            each
            for held, whole in self._whole_parameters()
            for each in (held.unsharded_accumulated_grad, whole.grad)
        )
        return [each for each in found if each is not None]

    def drop_unreduced_gradients(self) -> None:
        """Forget what a `no_sync` block added up."""
        for held, whole in self._whole_parameters():
            held.unsharded_accumulated_grad = None
            whole.grad = None

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        yield from (module for module in self.module.modules() if isinstance(module, FSDPModule))

    def _whole_parameters(self) -> Iterator[tuple[Any, Parameter]]:
        """What fully_shard knows of each parameter that was whole before, and that parameter. Private to torch."""
        for module in self._sharded_modules():
            groups: list[FSDPParamGroup] = module._get_fsdp_state()._fsdp_param_groups
            for held in (each for group in groups for each in group.fsdp_params):
                if hasattr(held, "_unsharded_param"):
                    yield held, held._unsharded_param


def separable_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers that can be gathered one by one: no parameter of theirs is used outside. Inner first."""
    uses = _uses(model)
    found = []
    for layer in reversed(recomputable_layers(model)):
        own = _uses(layer)
        if own and layer is not model and all(uses[parameter] == count for parameter, count in own.items()):
            found.append(layer)
    return found


def _uses(module: nn.Module) -> Counter[Parameter]:
    """How many places below the module hold each parameter; a module in two places counts twice."""
    return Counter(
        parameter
        for _, part in module.named_modules(remove_duplicate=False)
        for parameter in part._parameters.values()
        if parameter is not None
    )
