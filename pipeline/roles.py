"""The roles of a stage: which modules of the model stand-ins replace; see [Note: whole forward] in stage.py."""

from collections.abc import Sequence

from torch import nn

from .stage_plan import Stack, StagePlan, is_within
from .stand_ins import (
    Absent,
    Arriving,
    Leaving,
    LeavingEmpty,
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
            # Nothing reads the modules before its layers, which may run before the encoder.
            before = [name for name in stack.plan.before if name != stacks[0].plan.module]
            roles |= dict.fromkeys(_members(model, before), Role(Outline))
            roles |= dict.fromkeys(stack.plan.list_paths(model), Role(LeavingEmpty))
        elif start >= stack.stop:
            outside = _roles_before_layers(model, stack).items()
            roles |= {name: role for name, role in outside if not is_within(name, stack.plan.module)}
        else:
            if plan.collects(model):
                roles |= _collecting_roles(stack, start, stop)
            else:
                roles |= _layer_roles(model, stack, start - stack.first, stop - stack.first)
            if stop < stack.stop and stack is not stacks[-1]:
                after_layers = _other_modules(model, plan.kept_paths(model), under=stack.plan.module)
                roles |= dict.fromkeys(after_layers, Role(Absent))
            if start == stack.first and stack is not stacks[0]:
                roles[stacks[0].plan.module] = _role_of_encoder(stacks[0], stack)
    if stop < stacks[-1].stop:
        earlier_modules = [stack.plan.module for stack in stacks[:-1]]
        roles |= dict.fromkeys(
            _other_modules(model, [*plan.kept_paths(model), *earlier_modules, *roles]), Role(Absent)
        )
    return roles


def _role_of_encoder(encoder: Stack, decoder: Stack) -> Role:
    """Return the role of the encoder's module on the stage of the decoder's first layer, which received its output."""
    path, returned = encoder.plan.module, encoder.plan.returned
    assert returned is not None
    sends = path in decoder.plan.sent
    return Role(Sent, output=returned, sent=((path, returned.num_tensors),) if sends else ())


def _roles_before_layers(model: nn.Module, stack: Stack) -> Roles:
    """Return the roles of the modules before the first layer, on the stages after them.

    Outputs of entries and leading modules are replaced by tensors of their shape, which nothing reads; those in
    `StagePlan.sent` were received. A list of modules has a role for each of them.
    """
    entry_kind = Outline if stack.plan.derives_entry_shapes else Placeholder
    carried = stack.plan.carried
    sent: Roles = {}
    index = 1 if carried is None else carried.num_tensors  # after those of the layer
    for path, output in stack.plan.sent.items():
        count = output.num_tensors
        sent[path] = Role(Sent, received_index=index, output=output, sent=((path, count),))
        index += count
    leading = _members(model, stack.plan.leading)
    return dict.fromkeys(stack.plan.entry, Role(entry_kind)) | dict.fromkeys(leading, Role(Outline)) | sent


def _members(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return paths, of lists of modules those of their members."""
    members: list[str] = []
    for path in paths:
        module = model.get_submodule(path)
        is_list = isinstance(module, nn.ModuleList)
        members += [f"{path}.{name}" for name in module._modules] if is_list else [path]
    return members


def _layer_roles(model: nn.Module, stack: Stack, start: int, stop: int) -> Roles:
    """Return the roles of the layers in a stack of which the stage has some, and of the modules before them.

    A layer that the stage runs has no role, unless other stages have some of its runs.

    Args:
        model: the full model.
        stack: the stack.
        start, stop: the first run of a layer in the stage, and the end of its runs, counted within the stack.
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
            roles[path] = Role(
                Leaving, sent=tuple((name, output.num_tensors) for name, output in stack.plan.sent.items())
            )
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
