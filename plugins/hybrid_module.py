"""A model as HybridParallelPlugin split it. Splitting it is hybrid_parallel.py, running it engine.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..checkpoint.lora import Adapter
from ..checkpoint.names import saved_state
from ..cluster.faults import naming_failures
from ..pipeline.cut import held_stages, refuse_direct_calls, takes
from ..pipeline.linear import hold_weight_gradients
from ..shardformer.equal_ranks import require_equal_inputs
from ..shardformer.given import mark_taken
from ..zero.optimizer import ShardedOptimizer
from .engine import PipelineEngine
from .names import ParameterNames

if TYPE_CHECKING:
    from .hybrid_parallel import HybridParallelPlugin


class HybridParallelModule(nn.Module):
    """A model as the plugin split it; `unwrap()` is the transformers model itself.

    Calling it runs the forward at pp_size=1, and under a pipeline says what to call instead.

    Args:
        module: split and cut.
        names: of the whole model.
        plugin: that split it.
        adapters: what is saved of it as LoRA.
    """

    def __init__(
        self,
        module: nn.Module,
        names: ParameterNames,
        plugin: "HybridParallelPlugin",
        adapters: Sequence[Adapter] = (),
    ) -> None:
        super().__init__()
        self.module = module
        mark_taken(module)
        if plugin.pp_size > 1:
            refuse_direct_calls(module)
        self.plugin = plugin
        self.adapters = tuple(adapters)
        self.optimizer: ShardedOptimizer | None = None
        # Not `names` itself, which would keep the parameters of all other stages in memory.
        self.state_names = names.state
        self._held = names.held(module)
        self._takes_cache = takes(module, "use_cache")
        splits_backward = plugin.config.pipeline.splits_backward(plugin.pp_size)
        self.engine = PipelineEngine(
            held_stages(module),
            plugin.mesh,
            plugin.config,
            placement=plugin.stage_manager.placement,
            weight_gradients=hold_weight_gradients(module) if splits_backward else None,
        )

    @property
    def held(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds, by their first names in the whole model."""
        if self.optimizer is not None:
            self.optimizer.publisher.wait()
        return self._held

    def unwrap(self) -> nn.Module:
        """The model without the wrapper."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, at pp_size=1; tensors are brought to the model's device and precision first.

        Raises:
            RuntimeError: under a pipeline.
            ValueError: ranks that compute one model have other inputs than their first one; on all of them.
        """
        self.plugin._refuse_pipeline("model(**batch)")
        mesh = self.plugin.mesh
        with naming_failures("model(**batch)", mesh.model_ranks()):
            for axis in ("tp", "sp"):
                if mesh.size(axis) > 1:
                    require_equal_inputs(args, kwargs, mesh.group(axis), axis)
            if self.training and self._takes_cache:  # a cache hides from transformers that texts are packed
                kwargs = {"use_cache": False, **kwargs}
            args, kwargs = self.engine.to_compute(args), self.engine.to_compute(kwargs)
            return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those that the optimizer has taken from the parameters (zero_stage 2)."""
        if self.optimizer is None:
            super().zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HybridParallelModule":
        raise TypeError("a boosted model holds process groups and cannot be copied: copy model.unwrap()")

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by their names in the whole model; a tied one once.

        Raises:
            ValueError: modules have an extra state, which would not be restored.
        """
        parameters = set(self.held.values())
        state = saved_state(self.module)
        buffers = {name: tensor for name, tensor in state.items() if tensor not in parameters}
        return {**self.held, **buffers}
