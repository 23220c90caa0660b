"""An optimizer in the place of another, as far as torch asks. What it does instead is the subclass's."""

from typing import Any, NoReturn

from torch.optim import Optimizer

NOT_PICKLED = (
    "a boosted optimizer cannot be copied or pickled, since its parameters and process groups cannot: call "
    "booster.save_optimizer(optimizer, folder) on every rank, or copy the optimizer before boost"
)


class OptimizerWrapper(Optimizer):
    """Has the groups, states, defaults and hooks of an inner optimizer, which nobody else may step from now on.

    Args:
        optimizer: the inner one.
    """

    def __init__(
        self, optimizer: Optimizer
    ) -> None:  # the base class is not initialized: it would make groups
        self.inner = optimizer
        self._is_stepping = False
        optimizer.register_step_pre_hook(self._refuse_inner_step)
        # Hooks registered on this optimizer run with the inner one's.
        self.__dict__.update(
            {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's own groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by piece."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the flat memory is laid out once."""
        raise RuntimeError("add parameter groups to the optimizer before boost: its memory is laid out there")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    def _step_inner(self) -> None:
        self._is_stepping = True
        try:
            self.inner.step()
        finally:
            self._is_stepping = False

    def _refuse_inner_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                "this optimizer was boosted: step the one that boost returned, which reduces gradients first"
            )
