"""Several optimizers as one: Muon for matrices beside AdamW for the other parameters."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """An optimizer whose step is that of several optimizers, with their groups in a row.

    It is an ordinary torch optimizer: schedulers, loss scales and checkpoints see its groups and states, which are
    those of its members.

    Args:
        optimizers: the members, of different parameters. Give their groups before combining them.

    Attributes:
        optimizers: the members.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        if not self.optimizers:
            raise ValueError("CombinedOptimizer([]) has no optimizers: give at least one")
        for member in self.optimizers:
            if not isinstance(member, Optimizer) or isinstance(member, CombinedOptimizer):
                raise ValueError(
                    f"CombinedOptimizer got a {type(member).__name__}: give torch optimizers that are not combined"
                )
        # False while torch's constructor adds the members' groups by `add_param_group`, which then refuses others.
        self._is_complete = False
        super().__init__([group for member in self.optimizers for group in member.param_groups], {})
        self._is_complete = True
        # Not given to the constructor, which would add them to the groups.
        common_options = set.intersection(*(set(member.defaults) for member in self.optimizers))
        self.defaults = {name: self.optimizers[0].defaults[name] for name in sorted(common_options)}
        self._share_groups_and_states()

    def _share_groups_and_states(self) -> None:
        """Take over the groups of the members as the same objects; give all members one dictionary of states."""
        self.param_groups = [group for member in self.optimizers for group in member.param_groups]
        self.state = defaultdict(dict)
        for member in self.optimizers:
            self.state.update(member.state)
            member.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse, except for the groups of the members: no member would step it."""
        if self._is_complete:
            raise RuntimeError(
                "a combined optimizer takes no further groups: add them to a member before combining"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member, in their order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.optimizers:
            member.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups and states of all members, from the `state_dict` of an optimizer of the same members.

        Raises:
            ValueError: the number of groups differs.
        """
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(saved)} parameter groups, not {len(self.param_groups)}: load it into an optimizer "
                "of the same members"
            )
        for member in self.optimizers:
            num_groups = len(member.param_groups)
            groups, saved = saved[:num_groups], saved[num_groups:]
            # torch's state dict numbers the parameters.
            numbers = {number for group in groups for number in group["params"]}
            state = {number: value for number, value in state_dict["state"].items() if number in numbers}
            member.load_state_dict({"state": state, "param_groups": groups})
        self._share_groups_and_states()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers, "_is_complete": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_groups_and_states()


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that step the groups: the members of a combined one, or itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def name_of(optimizer: Optimizer) -> str:
    """Return the class of an optimizer, with those of its members."""
    name = type(optimizer).__name__
    if isinstance(optimizer, CombinedOptimizer):
        name += f"({', '.join(map(name_of, optimizer.optimizers))})"
    return name
