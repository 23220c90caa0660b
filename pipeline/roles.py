"""What stands where in a model for one stage of it. Putting it there is cut.py."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from .collect import LeavingWithAll, Recalled, RecalledEntry
from .plan import Stack, StagePlan, is_within
from .stand_in import (
    Absent,
    Arriving,
    Encoded,
    Leaving,
    LeavingDecoder,
    LeavingEncoder,
    Outline,
    Passing,
    Placeholder,
    Runs,
    StandIn,
)


class Role(NamedTuple):
    """What stands in a place for one stage.

    Args:
        kind: its class.
        arity: what a layer there would return (see `StagePlan.arity`).
        own_runs: of a layer that runs several times, the first of its runs that is the stage's and the one after
            the last.
        arrives_as: of a layer that is recalled, which of the tensors that arrive is its output.
    """

    kind: type[StandIn]
    arity: int = 0
    own_runs: tuple[int, int] = (0, 0)
    arrives_as: int = 0


Roles = dict[str, Role]  # by path; elsewhere stands what the stage holds


def stage_roles(model: nn.Module, plan: StagePlan, start: int, stop: int) -> Roles:
    """What takes whose place for the stage of these layers; see [Note: whole forward]."""
    roles: Roles = {}
    stacks = plan.stacks(model)
    for stack in stacks:
        if stop <= stack.first:
            roles |= _roles_outside(model, stack, LeavingEncoder if stop == stack.first else Absent)
        elif start >= stack.stop:
            roles |= _roles_outside(model, stack, Encoded)
        else:
            leaving = Leaving if stack is stacks[0] else LeavingDecoder
            if plan.collects(model):
                roles |= _collecting_roles(stack, start, stop)
            else:
                roles |= _layer_roles(model, stack, start - stack.first, stop - stack.first, leaving)
            if stop < stack.stop and stack is not stacks[-1]:
                rest = _rest(model, plan.kept_paths(model), under=stack.plan.module)
                roles |= dict.fromkeys(rest, Role(Absent))
    if stop < stacks[-1].stop:
        before = [stack.plan.module for stack in stacks[:-1]]
        roles |= dict.fromkeys(_rest(model, [*plan.kept_paths(model), *before, *roles]), Role(Absent))
    return roles


def _roles_outside(model: nn.Module, stack: Stack, module: type[StandIn]) -> Roles:
    """Of a stack that the stage has no layer of."""
    path = stack.plan.module
    before = (
        _before_roles(model, stack) if module is Encoded else dict.fromkeys(stack.plan.before, Role(Absent))
    )
    return {path: Role(module)} | {name: role for name, role in before.items() if not is_within(name, path)}


def _before_roles(model: nn.Module, stack: Stack) -> Roles:
    """Of what runs before the first layer, on stages that do not hold it; a list of layers is meant one by one."""
    singles: list[str] = []
    for path in stack.plan.leading:
        module = model.get_submodule(path)
        is_list = isinstance(module, nn.ModuleList)
        singles += [f"{path}.{name}" for name in module._modules] if is_list else [path]
    entry = Outline if stack.plan.are_entries_reckoned else Placeholder
    return dict.fromkeys(stack.plan.entry, Role(entry)) | dict.fromkeys(singles, Role(Outline))


def _layer_roles(model: nn.Module, stack: Stack, start: int, stop: int, leaving: type[StandIn]) -> Roles:
    """Of a stack that the stage has some layers of, counted within the stack."""
    roles: Roles = {}
    for path, (first, end) in stack.runs.items():
        arity = 0 if stack.changes_shape(path) else stack.plan.arity
        if end < start:
            roles[path] = Role(Outline) if stack.changes_shape(path) else Role(Passing, arity)
        elif end == start:
            roles[path] = Role(Arriving, arity)
        elif first >= stop:
            roles[path] = Role(leaving)
        elif first < start or end > stop:
            roles[path] = Role(Runs, arity, (start - first, stop - first))
    if start > 0:
        roles |= _before_roles(model, stack)
    return roles


def _collecting_roles(stack: Stack, start: int, stop: int) -> Roles:
    """Of the only stack, where the model reads the outputs of all layers."""
    roles: Roles = {}
    for index, path in enumerate(stack.paths):
        if index < start:
            roles[path] = Role(
                Recalled, 0 if stack.changes_shape(path) else stack.plan.arity, arrives_as=index + 1
            )
        elif index >= stop:
            roles[path] = Role(LeavingWithAll)
    if start > 0:
        kind = RecalledEntry if stack.plan.are_entries_reckoned else Recalled
        roles |= dict.fromkeys(stack.plan.entry, Role(kind))
    return roles


def _rest(model: nn.Module, kept: Sequence[str], under: str = "") -> list[str]:
    """The outermost modules that hold parameters and are neither kept nor around what is."""
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if child_path in kept or not any(True for _ in child.parameters()):
                continue
            if any(keep.startswith(f"{child_path}.") for keep in kept):
                visit(child, child_path)
            else:
                found.append(child_path)

    visit(model.get_submodule(under), under)
    return found
