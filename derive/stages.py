"""Stage plans from a traced forward of a small copy, each proven by executing it.

[Note: derived stages] Hooks tell which modules a forward of the small copy calls, in which order. The layers are the
list with the most parameters whose members are called once each, in order. Modules that ran before the first layer are
placed on the first stage, all others on the last. Later stages get outlines of the former's outputs, full of nan. If a
value of theirs is read after the first layer (a position bias for all layers, encoder states, a residual around the
layers), the trial shows it: the output of an embedding is then computed on every stage, any other is sent along.

Two lists that run one after the other, the first of them within a module before the second (an encoder and a decoder,
a vision model and a language model), are derived each for itself. Together they are one plan if it stands the trial.

Nothing of this is believed: `departure` runs a plan with a stage for every layer, each on a copy of the model that has
this stage alone, as on a rank of its own, forward and backward, and compares loss and gradients with the whole model.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..pipeline.stage import Stage, cut_stages
from ..pipeline.stage_plan import OutputStructure, StagePlan, is_within
from ..pipeline.transport import takes_gradient
from .build import Copy, described
from .double import StaysDouble, gradient_departure, loss_departure
from .inputs import loss_of, tensors_in
from .module_calls import ModuleCall, calls_of, structure_of

_NUM_STACKS = 2  # lists of layers that are tried


def derived_plan(copy: Copy, model: nn.Module) -> StagePlan:
    """Return a stage plan of a model, proven by execution of a small copy.

    Args:
        copy: the small copy; in float64 (`in_double`) roundings do not blur the comparison.
        model: the full model, perhaps on the meta device. Its largest list of layers becomes the stages, or its two
            largest lists.

    Raises:
        ValueError: no plan was found, or none that gives the numbers of the whole model; with the departure.
    """
    calls = calls_of(copy)
    sizes = sizes_of(model)
    stacks = stacks_of(copy.model, calls, sizes)
    plans: list[StagePlan] = []
    errors: list[str] = []
    for stack, layers in stacks.items():
        try:
            plans.append(_plan_of_stack(copy, calls, stack, layers))
        except ValueError as error:
            errors.append(str(error))
    if len(plans) > 1:
        in_order = sorted(plans, key=lambda plan: stacks[plan.layers][0].start)
        with suppress(ValueError):  # the two lists do not run one after the other
            joined = _joined_plan(calls, stacks, *in_order)
            if departure(copy, joined) is None:
                return joined
    largest = sizes[next(iter(stacks))]
    if plans and sizes[plans[0].layers] * 2 >= largest:  # otherwise one stage would have most of the model
        return plans[0]
    raise ValueError(errors[0])  # of the largest list, which has no plan here


def _plan_of_stack(
    copy: Copy, calls: Sequence[ModuleCall], stack: str, layers: Sequence[ModuleCall]
) -> StagePlan:
    """Return a plan of one list of layers, proven by execution.

    Args:
        copy: the small copy.
        calls: of one forward, after its backward.
        stack: the path of a list of layers.
        layers: the calls of its members.

    Raises:
        ValueError: there is no such plan; with the departure of the first one tried.
    """
    errors: list[str] = []
    for make_plan in (traced_plan, _carrying_plan):
        try:
            plan = make_plan(copy.model, calls, stack, layers)
        except ValueError as error:
            errors.append(str(error))
            continue
        proven = _proven(copy, plan, {call.path: call.output for call in calls})
        if isinstance(proven, StagePlan):
            return proven
        errors.append(proven)
    raise ValueError(errors[0])


def _joined_plan(
    calls: Sequence[ModuleCall],
    stacks: Mapping[str, Sequence[ModuleCall]],
    first: StagePlan,
    second: StagePlan,
) -> StagePlan:
    """Return the plan of two lists of layers, the first of which runs within a module before the second.

    Args:
        calls: of one forward.
        stacks: the calls of the layers of each list, by its path.
        first, second: their plans, in the order in which they run.

    Raises:
        ValueError: there is no such module, or it returns outputs of several layers, or what cannot travel.
    """
    # A module before the second list, whose plan computes it on the first stage or sends its output along.
    module = next((path for path in (*second.leading, *second.sent) if is_within(first.layers, path)), None)
    output = next((call.output for call in calls if call.path == module), None)
    # Outputs of all layers but the last exist on earlier stages only.
    early_outputs = {tensor for call in stacks[first.layers][:-1] for tensor in tensors_in(call.output)}
    if module is None or not early_outputs.isdisjoint(tensors_in(output)):
        raise ValueError(f"{first.layers} are no layers of a module before {second.layers}")

    def inside(paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(path for path in paths if is_within(path, module))

    encoder = replace(
        first,
        module=module,
        returned=structure_of(output),
        entry=inside(first.entry),
        leading=inside(first.leading),
        everywhere=inside(first.everywhere),
        sent={path: first.sent[path] for path in inside([*first.sent])},
    )
    everywhere = tuple(path for path in second.everywhere if not is_within(path, module))
    return replace(second, everywhere=everywhere, encoder=encoder)


def _proven(copy: Copy, plan: StagePlan, outputs: Mapping[str, Any]) -> StagePlan | str:
    """Return a plan as executed: perhaps with outputs of modules before its layers on later stages; or the departure.

    Args:
        copy: the small copy.
        plan: a traced plan.
        outputs: of the copy's modules, by path.
    """
    if departure(copy, plan) is None:
        return plan
    # Later stages read values of modules before the layers, or cannot outline them: look for these modules.
    read = [
        name
        for name in plan.before
        if departure(copy, _kept(copy.model, plan, outputs, without=name)) is not None
    ]
    plan = _kept(copy.model, plan, {name: outputs[name] for name in read})
    return departure(copy, plan) or plan


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of every module that is a list, by its path."""
    return {
        path: sum(parameter.numel() for parameter in module.parameters())
        for path, module in model.named_modules()
        if module._modules and all(name.isdecimal() for name in module._modules)
    }


def traced_plan(
    model: nn.Module,
    calls: Sequence[ModuleCall],
    stack: str,
    layers: Sequence[ModuleCall],
    *,
    arity: int | None = None,
) -> StagePlan:
    """Return the plan that the calls of a forward suggest.

    Modules that ran before the first layer are `entry` if a placeholder can stand for their output, else `leading`.
    Modules that ran after it too, and parameters that were used without a call, are `everywhere`.

    Args:
        model: the small copy.
        calls: of one forward, after its backward.
        stack: the path of a list of layers.
        layers: the calls of its members.
        arity: as in the plan; None reads it from the calls.

    Raises:
        ValueError: the layers return neither tensors nor tuples of one length.
    """
    first = layers[0]
    around = [call.path for call in calls if call.start < first.start and call.stop > layers[-1].stop]
    outside = [call for call in _outermost(model, calls, around) if not is_within(call.path, stack)]
    before: dict[str, ModuleCall] = {}  # the first call of each module
    for call in outside:
        if call.stop < first.start:
            before.setdefault(call.path, call)
    after = {call.path for call in outside if call.start > first.start}
    only_before = [call for path, call in before.items() if path not in after]
    before_and_after = [path for path in before if path in after]
    return StagePlan(
        layers=stack,
        entry=tuple(call.path for call in only_before if _is_placeholder(call, first)),
        leading=tuple(call.path for call in only_before if not _is_placeholder(call, first)),
        everywhere=tuple(dict.fromkeys([*before_and_after, *_uncalled(model, calls, around)])),
        arity=_arity(layers) if arity is None else arity,
    )


def _carrying_plan(
    model: nn.Module, calls: Sequence[ModuleCall], stack: str, layers: Sequence[ModuleCall]
) -> StagePlan:
    """Return the plan by which stages send all tensors that their last layer returned; see [Note: carried outputs].

    Raises:
        ValueError: layers return outputs of different structures, or numbers that may differ in the full model.
    """
    structures = {OutputStructure.of(call.output) for call in layers[:-1]}
    (carried, *others) = structures
    if others or any(type(leaf[0]) in (int, float) for leaf in carried.leaves if leaf is not None):
        raise ValueError(
            "its layers return different structures, or numbers, which cannot travel between stages"
        )
    return replace(traced_plan(model, calls, stack, layers, arity=0), carried=carried)


def stacks_of(
    model: nn.Module, calls: Sequence[ModuleCall], sizes: Mapping[str, int]
) -> dict[str, list[ModuleCall]]:
    """Return the `_NUM_STACKS` largest lists of layers, less one that was not called in order, by falling size.

    Args:
        model: the small copy.
        calls: of one forward.
        sizes: the number of parameters of each list in the full model.

    Returns:
        By the path of a list the calls of its layers.

    Raises:
        ValueError: the largest list was not called in order, or there is none.
    """
    by_path: dict[str, list[ModuleCall]] = {}
    for call in calls:
        by_path.setdefault(call.path, []).append(call)
    stacks: dict[str, list[ModuleCall]] = {}
    irregular: dict[str, str] = {}  # lists that cannot be stages, with the reason
    for path in sizes_of(model):
        members = [f"{path}.{name}" for name in model.get_submodule(path)._modules]
        runs = [by_path.get(member, []) for member in members]
        if len(runs) > 1 and sizes.get(path) and not any(is_within(path, outer) for outer in stacks):
            if reason := _irregularity(runs):
                irregular[path] = reason
            else:
                stacks[path] = [layer_calls[0] for layer_calls in runs]
    by_size = sorted([*stacks, *irregular], key=lambda path: -sizes[path])
    if not by_size:
        raise ValueError("it has no list of several layers")
    if by_size[0] not in stacks:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in irregular.items())
        raise ValueError(f"its largest list of layers does not run in order, each layer once ({reasons})")
    return {path: stacks[path] for path in by_size[:_NUM_STACKS] if path in stacks}


def _irregularity(runs: Sequence[Sequence[ModuleCall]]) -> str:
    """Return why the members of a list cannot be the layers of stages; empty if they can."""
    if silent := [place for place, layer_calls in enumerate(runs) if not layer_calls]:
        return f"layers {silent} were not called, or as layer.forward(), in the traced forward"
    if any(len(layer_calls) > 1 for layer_calls in runs):
        return f"its layers run up to {max(map(len, runs))} times"
    flat = [layer_calls[0] for layer_calls in runs]
    is_ordered = all(left.stop < right.start for left, right in pairwise(flat))
    return "" if is_ordered else "its layers do not run one after the other"


def _outermost(model: nn.Module, calls: Sequence[ModuleCall], around: Sequence[str]) -> list[ModuleCall]:
    """Return the calls of modules with parameters that no other call contains, but for those around the layers."""
    outermost: list[ModuleCall] = []
    for call in calls:
        if call.path in around or (outermost and call.stop < outermost[-1].stop):
            continue
        if any(True for _ in model.get_submodule(call.path).parameters()):
            outermost.append(call)
    return outermost


def _uncalled(model: nn.Module, calls: Sequence[ModuleCall], around: Sequence[str]) -> list[str]:
    """Return the modules whose parameters got gradients though neither they nor a module around them was called."""
    called = {call.path for call in calls} - {*around}
    uncalled = []
    for path, module in model.named_modules():
        trained = [parameter for parameter in module.parameters(recurse=False) if parameter.grad is not None]
        is_called = any(is_within(path, called_path) for called_path in called)
        is_around = not path or any(is_within(called_path, path) for called_path in called)
        if trained and not is_called and not is_around:
            uncalled.append(path)
    return uncalled


def _is_placeholder(call: ModuleCall, first: ModuleCall) -> bool:
    """Return True if a Placeholder has the shape of a module's output: that of ids, or of the first layer's output."""
    if not isinstance(call.output, Tensor) or not call.inputs:
        return False
    layer_shape = next(tensors_in(first.output)).shape
    first_input = call.inputs[0]
    leading_shape = layer_shape[:-1] if first_input.is_floating_point() else first_input.shape
    return call.output.shape == (*leading_shape, layer_shape[-1])


def _arity(layers: Sequence[ModuleCall]) -> int:
    """Return the `StagePlan.arity` of layers from their outputs.

    Raises:
        ValueError: the layers return tuples of different lengths, or something else than tensors and tuples.
    """
    kinds = {len(call.output) if isinstance(call.output, tuple) else type(call.output) for call in layers}
    (kind, *further) = kinds
    if further or not (kind is Tensor or isinstance(kind, int)):
        names = sorted(getattr(output, "__name__", f"a tuple of {output}") for output in kinds)
        raise ValueError(f"its layers return {' or '.join(names)}, and not a tensor or tuples of one length")
    return kind if isinstance(kind, int) else 0


def departure(copy: Copy, plan: StagePlan) -> str | None:
    """Return how the stages of a plan depart from the whole model, in words; None if they do not.

    Args:
        copy: the model and its batch; in float64 (`in_double`) roundings do not blur the comparison.
        plan: the plan, with a stage for each layer.
    """
    with StaysDouble():
        return _departure(copy, plan)


def _departure(copy: Copy, plan: StagePlan) -> str | None:
    """Run all stages forward, then backward in reverse order, in this process; compare them with the whole model."""
    try:
        reference, loss = copy.trained
        stages = _stages(copy, plan)
    except Exception as error:  # of any model class
        return described(error)
    received: tuple[Tensor, ...] = ()
    sent: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for stage in stages:
        try:
            torch.default_generator.manual_seed(1)  # of the CPU alone
            output = stage.forward(tree_map_only(Tensor, Tensor.clone, copy.batch), received)
        except Exception as error:
            return f"the stage of layer {stage.index} fails: {described(error)}"
        if not stage.is_last:
            sent.append((output, received))
            received = tuple(
                tensor.detach().requires_grad_(takes_gradient(tensor.dtype)) for tensor in output
            )
    staged = loss_of(output)
    try:
        return (
            loss_departure(loss, staged, "in stages")
            or _backward(sent, received, staged)
            or _gradient_departure(reference, plan, stages)
        )
    except RuntimeError as error:  # a graph that layers of two stages share
        return f"the backward of the stages fails: {described(error)}"


def _stages(copy: Copy, plan: StagePlan) -> list[Stage]:
    """Return a stage for each layer, each of a copy of the model that was cut for it alone."""
    count = plan.num_layers(copy.model)
    return [
        cut_stages(copy.make(0), plan, stages=[stage], bounds=range(count + 1))[stage]
        for stage in range(count)
    ]


def _backward(
    sent: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]], received: tuple[Tensor, ...], loss: Tensor
) -> str | None:
    """Run the backward of all stages, from the last to the first.

    Args:
        sent: by stage, except for the last: the outputs that it sent, and the inputs that it had received.
        received: the inputs of the last stage.
        loss: of the last stage.

    Returns:
        An error if a stage gets no gradient; None if all do.
    """
    loss.backward()
    next_inputs = received
    for index, (outputs, inputs) in reversed([*enumerate(sent)]):
        # A stage's inputs are the outputs of the one before, detached from its graph. As between ranks, zeros come back
        # for those without gradient.
        pairs = [
            (output, torch.zeros_like(next_input) if next_input.grad is None else next_input.grad)
            for output, next_input in zip(outputs, next_inputs, strict=True)
            if output.requires_grad
        ]
        if not pairs or all(next_input.grad is None for next_input in next_inputs):
            return f"no gradient comes back to layer {index}"
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        next_inputs = inputs
    return None


def _gradient_departure(reference: nn.Module, plan: StagePlan, stages: Sequence[Stage]) -> str | None:
    """Return the largest departure of a gradient, summed over the stages that have the parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    bounds = range(len(stages) + 1)
    local = [dict(stage.model.named_parameters(remove_duplicate=False)) for stage in stages]
    for parameter, aliases in names.items():
        owners = {stage for name in aliases for stage in plan.stages_of(reference, name, bounds)}
        gradients: dict[int, Tensor] = {}  # by stage
        for stage, parameters in enumerate(local):
            stage_parameter = next((parameters[name] for name in aliases if name in parameters), None)
            if stage_parameter is not None and stage_parameter.grad is not None:
                gradients[stage] = stage_parameter.grad
        if gradients.keys() - owners:
            stage = min(gradients.keys() - owners)
            return f"{aliases[0]} gets a gradient on the stage of layer {stage}, which does not own it"
        if (parameter.grad is None) != (not gradients):
            with_gradient = "the stages" if gradients else "the whole model"
            return f"{aliases[0]} has a gradient, perhaps of zeros, in {with_gradient} alone"
        if parameter.grad is not None:
            total = torch.stack([*gradients.values()]).sum(0)
            if error := gradient_departure(aliases[0], parameter.grad, [total]):
                return error
    return None


def _kept(model: nn.Module, plan: StagePlan, outputs: Mapping[str, Any], *, without: str = "") -> StagePlan:
    """Return the plan with these modules' outputs on every stage: of small modules computed again, of others sent.

    Args:
        model: the small copy.
        plan: a plan whose later stages have outlines of the outputs of all modules before the layers.
        outputs: outputs by module; those that the plan does not place before the layers are skipped.
        without: a module to leave out.
    """
    names = [name for name in plan.before if name in outputs and name != without]
    sent = {}
    for name in names:
        with suppress(ValueError):  # an output that cannot travel
            if not isinstance(model.get_submodule(name), nn.Embedding):
                sent[name] = structure_of(outputs[name])
    return replace(
        plan,
        entry=tuple(name for name in plan.entry if name not in names),
        leading=tuple(name for name in plan.leading if name not in names),
        everywhere=(*plan.everywhere, *(name for name in names if name not in sent)),
        sent=sent,
    )
