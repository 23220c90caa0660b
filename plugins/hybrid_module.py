"""A model as HybridParallelPlugin split it. Splitting it is hybrid_parallel.py, running it engine.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.lora import Adapter
from ..checkpoint.names import saved_state
from ..cluster.faults import naming_failures
from ..cluster.random import ForwardRandom
from ..pipeline.cut import held_stages, refuse_direct_calls, takes
from ..pipeline.linear import hold_weight_gradients
from ..pipeline.uncached import argument, without_cache
from ..shardformer.equal_ranks import require_equal_inputs
from ..shardformer.given import mark_taken
from ..zero.optimizer import ShardedOptimizer
from .boosted_module import BoostedModule
from .engine import PipelineEngine
from .names import ParameterNames

if TYPE_CHECKING:
    from .hybrid_parallel import HybridParallelPlugin


COMPILED = (
    "torch.compile does not go with a tp_size, sp_size or wp_size above 1, whose layers talk to other ranks: leave it "
    "out, and give the plugin enable_all_optimization=True"
)


class HybridParallelModule(BoostedModule):
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
        super().__init__(adapters)
        self.module = module
        mark_taken(module)
        if plugin.pp_size > 1:
            refuse_direct_calls(module)
        self.plugin = plugin
        self.optimizer: ShardedOptimizer | None = None
        # Not `names` itself, which would keep the parameters of all other stages in memory.
        self.state_names = names.state
        self._held = names.held(module)
        self._takes_cache = takes(module, "use_cache")
        self._compiles = plugin.mesh.size("tp", "sp") == plugin.config.wp == 1
        self.random = ForwardRandom(plugin.mesh)
        splits_backward = plugin.config.pipeline.splits_backward(plugin.pp_size)
        self.engine = PipelineEngine(
            held_stages(module),
            plugin.mesh,
            plugin.config,
            placement=plugin.stage_manager.placement,
            random=self.random,
            weight_gradients=hold_weight_gradients(module) if splits_backward else None,
        )

    @property
    def held(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds, by their first names in the whole model."""
        if self.optimizer is not None:
            self.optimizer.publisher.wait()
        return self._held

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, at pp_size=1; tensors are brought to the model's device and precision first.

        Raises:
            RuntimeError: under a pipeline.
            ValueError: ranks that compute one model have other inputs than their first one; on all of them.
        """
        if torch.compiler.is_compiling() and not self._compiles:
            _refuse_compiling()
        self.plugin._refuse_pipeline("model(**batch)")
        return super().forward(*args, **kwargs)

    def ranks_of_call(self) -> Sequence[int]:
        """The ranks that compute one model."""
        return self.plugin.mesh.model_ranks()

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of inputs that all ranks of the model have alike."""
        drawn = self._require_equal_inputs(args, kwargs, self.random.draw(self.module))
        if self.training and self._takes_cache and argument(self.module, args, kwargs, "use_cache") is None:
            kwargs = without_cache(self.module, args, kwargs)
        args, kwargs = self.engine.to_compute(args), self.engine.to_compute(kwargs)
        with self.random.call(drawn):
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The `generate` of the transformers model. All ranks of a tensor axis give equal inputs.

        Raises:
            RuntimeError: pp_size, sp_size or wp_size is above 1.
            ValueError: ranks that compute one model have other inputs than their first one; on all of them.
        """
        if self.plugin.mesh.size("pp", "sp") * self.plugin.config.wp > 1:
            raise RuntimeError(
                "model.generate needs pp_size, sp_size and wp_size of 1: save the model by booster.save_model, and "
                "generate with what from_pretrained loads"
            )
        with naming_failures("model.generate", self.plugin.mesh.model_ranks()):
            self._require_equal_inputs(args, kwargs)
            module: Any = self.module
            return module.generate(*self.engine.to_compute(args), **self.engine.to_compute(kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model in place, for `execute_pipeline` and calls alike; see torch.nn.Module.compile.

        Raises:
            RuntimeError: layers talk to other ranks.
        """
        if not self._compiles:
            raise RuntimeError(COMPILED)
        self.module.compile(*args, **kwargs)

    def _require_equal_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: int = 0) -> int:
        """Compare inputs over the axes whose ranks compute together. Return the first one's number of `random`."""
        mesh = self.plugin.mesh
        for axis in ("tp", "sp"):
            if mesh.size(axis) > 1:
                drawn = require_equal_inputs(args, kwargs, mesh.group(axis), axis, drawn=drawn)
        return drawn

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those that the optimizer has taken from the parameters (zero_stage 2)."""
        if self.optimizer is None:
            super().zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none)

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by their names in the whole model; a tied one once.

        Raises:
            ValueError: modules have an extra state, which would not be restored.
        """
        parameters = set(self.held.values())
        state = saved_state(self.module)
        buffers = {name: tensor for name, tensor in state.items() if tensor not in parameters}
        return {**self.held, **buffers}


@torch.compiler.disable
def _refuse_compiling() -> None:
    """Raise where torch.compile has traced a call: as it cannot trace this one, it makes it."""
    raise RuntimeError(COMPILED)
