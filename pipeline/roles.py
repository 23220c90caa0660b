"""The roles of a stage: which modules of the model stand-ins replace; see [Note: whole forward] in stage.py."""

from collections.abc import Sequence

from torch import nn

from .plan import Stack, StagePlan, is_within
from .stand_ins import (
    Absent,
    Arriving,
    Encoded,
    Leaving,
    LeavingDecoder,
    LeavingEncoder,
    LeavingWithAll,
    Outline,
    Passing,
    Placeholder,
    Recalled,
    RecalledEntry,
    Role,
    Roles,
    Runs,
    Sent,
    StandIn,
)


def stage_roles(model: nn.Module, plan: StagePlan, start: int, stop: int) -> Roles:
    """Return the roles of the modules that a stage with the layers range(start, stop) lacks; see [Note: whole forward].

    Args:
        model: the full model.
        plan: the paths of its layers.
        start, stop: the stage's first layer and the end of its layers, counted over all stacks.
    """
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
                after_layers = _other_modules(model, plan.kept_paths(model), under=stack.plan.module)
                roles |= dict.fromkeys(after_layers, Role(Absent))
    if stop < stacks[-1].stop:
        earlier_modules = [stack.plan.module for stack in stacks[:-1]]
        roles |= dict.fromkeys(
            _other_modules(model, [*plan.kept_paths(model), *earlier_modules, *roles]), Role(Absent)
        )
    return roles


def _roles_outside(model: nn.Module, stack: Stack, kind: type[StandIn]) -> Roles:
    """Return the roles in a stack of which the stage has no layer.

    Args:
        model: the full model.
        stack: an encoder's or a decoder's.
        kind: the stand-in for the module that runs the stack.
    """
    path = stack.plan.module
    absent = dict.fromkeys(stack.plan.before, Role(Absent))
    roles = _roles_before_layers(model, stack) if kind is Encoded else absent
    return {path: Role(kind)} | {name: role for name, role in roles.items() if not is_within(name, path)}


def _roles_before_layers(model: nn.Module, stack: Stack) -> Roles:
    """Return the roles of the modules before the first layer, on the stages after them.

    Outputs of entries and leading modules are replaced by tensors of their shape, which nothing reads; those in
    `StagePlan.sent` were received. A list of modules has a role for each of them.
    """
    leading: list[str] = []
    for path in stack.plan.leading:
        module = model.get_submodule(path)
        is_list = isinstance(module, nn.ModuleList)
        leading += [f"{path}.{name}" for name in module._modules] if is_list else [path]
    entry_kind = Outline if stack.plan.derives_entry_shapes else Placeholder
    sent: Roles = {}
    carried = stack.plan.carried
    index = 1 if carried is None else carried.num_tensors  # after those of the layer
    for path, output in stack.plan.sent.items():
        sent[path] = Role(Sent, received_index=index, output=output)
        index += output.num_tensors
    return dict.fromkeys(stack.plan.entry, Role(entry_kind)) | dict.fromkeys(leading, Role(Outline)) | sent


def _layer_roles(model: nn.Module, stack: Stack, start: int, stop: int, leaving: type[StandIn]) -> Roles:
    """Return the roles of the layers in a stack of which the stage has some, and of the modules before them.

    A layer that the stage runs has no role, unless other stages have some of its runs.

    Args:
        model: the full model.
        stack: the stack.
        start, stop: the first run of a layer in the stage, and the end of its runs, counted within the stack.
        leaving: the stand-in for layers after the stage.
    """
    roles: Roles = {}
    carried = stack.plan.carried
    for path, (first, end) in stack.runs.items():
        arity = 0 if stack.changes_shape(path) else stack.plan.arity
        if end < start:  # earlier than the layer whose output is received
            roles[path] = Role(Outline) if stack.changes_shape(path) else Role(Passing, arity, output=carried)
        elif end == start:
            roles[path] = Role(Arriving, arity) if carried is None else Role(Sent, output=carried)
        elif first >= stop:
            roles[path] = Role(leaving)
        elif first < start or end > stop:  # other stages have some of its runs
            roles[path] = Role(Runs, arity, (start - first, stop - first))
    if start > 0:
        roles |= _roles_before_layers(model, stack)
    return roles


def _collecting_roles(stack: Stack, start: int, stop: int) -> Roles:
    """Return the roles in the only stack of a model that reads the outputs of all layers; see [Note: collecting].

    Args:
        stack: the stack.
        start, stop: the stage's first layer, and the end of its layers.
    """
    roles: Roles = {}
    for index, path in enumerate(stack.paths):
        if index < start:
            roles[path] = Role(
                Recalled, 0 if stack.changes_shape(path) else stack.plan.arity, received_index=index + 1
            )
        elif index >= stop:
            roles[path] = Role(LeavingWithAll)
    if start > 0:
        kind = RecalledEntry if stack.plan.derives_entry_shapes else Recalled
        roles |= dict.fromkeys(stack.plan.entry, Role(kind))
    return roles


def _other_modules(model: nn.Module, kept: Sequence[str], under: str = "") -> list[str]:
    """Return the paths of the outermost modules that have parameters, are not kept and contain no kept module.

    Args:
        model: the full model.
        kept: paths.
        under: only modules below this path.
    """
    outermost: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            has_parameters = next(child.parameters(), None) is not None
            if child_path in kept or not has_parameters:
                continue
            if any(keep.startswith(f"{child_path}.") for keep in kept):
                visit(child, child_path)
            else:
                outermost.append(child_path)

    visit(model.get_submodule(under), under)
    return outermost
