"""Trial of tensor and sequence parallelism: a small copy, sharded over threads of one process, beside the whole copy.

[Note: tried splits] A plan says how weights are sharded, and nothing in it says that the forward between them allows
it. So the layers that boost would make are executed: every rank is a thread with its shards of the small copy, and
collectives exchange tensors in memory (cluster/threads.py). In float64, loss and gradients equal those of the whole
copy but for rounding; a plan with which they depart is not used, and a mode of sequence parallelism is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy as shallow_copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedConfig

from ..cluster.placement import PartialGrad, Shard, placement_on
from ..cluster.threads import ThreadGroup, run_threads, thread_groups
from ..cluster.transformers_api import attention_name
from ..derive.build import Copy, described
from ..derive.double import StaysDouble, gradient_departure, in_dtype, loss_departure
from ..derive.inputs import loss_of
from ..derive.plans import isolated
from .equal_ranks import has_replaced_forward
from .layers.attention_kernels import EAGER
from .layers.sequence_axis import INSTEAD, SAMPLE_DROPPER
from .policy import Policy
from .refusals import mark_all_parallelized
from .sequence.config import SEQUENCE_MODES
from .shard_config import ShardConfig
from .sharder import ModelSharder
from .table_policy import TablePolicy

# Of this process, by all that a trial depends on: a script may boost several models of a type.
RESULTS: dict[Any, Any] = {}
_TRIAL_RANKS = 2  # whatever the sizes of the run are
_Result = TypeVar("_Result")

# Modules that compute each position independently, which a script may put into layers.
_HARMLESS = (
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Dropout, nn.Identity),
    *(nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Sequential),
)


def sequence_errors(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """List how sequence parallelism would change the numbers of a model: by trial on a small copy, on two ranks.

    If sequences that stay sharded between the last layer and the loss depart, `policy.keeps_sequences` becomes False.

    Args:
        model: the full model; may be on the meta device.
        policy: the policy of the model, with its config.
        config: axes and options.
    """
    mode = config.sequence.mode
    if mode is None or (plan := policy.sequence_plan()) is None:  # which is an error of the policy
        return []
    error, policy.keeps_sequences = _once(
        model, policy, (mode, repr(plan)), lambda: _try_mode(model, policy, mode)
    )
    return [] if error is None else [f"sequence_parallelism_mode={mode!r}: {error}: {INSTEAD}"]


def script_code_errors(model: nn.Module, policy: TablePolicy, config: ShardConfig) -> list[str]:
    """List how a table for tensor parallelism departs for code that is not of transformers, by trial.

    Tables are tried by the tests, with the classes of transformers; a class of a script or a checkpoint that has their
    `model_type` may compute something else. A module that a script puts into a layer of a model is in no copy, so none
    can be tried. Empty if no small copy trains, which tells nothing.

    Args:
        model: the full model; may be on the meta device.
        policy: the policy of the model, with its config.
        config: axes and options.
    """
    if config.tensor_parallel_size == 1:
        return []
    kind = type(model)
    foreign = [
        module
        for module in policy.modules_with_shards()
        if has_replaced_forward(module) or not _is_of_libraries(type(module))
    ]
    is_derived = type(policy) is not TablePolicy  # derived tables were tried when they were made
    if not foreign and (is_derived or _is_of_libraries(kind)):
        return []

    def departure_of_copy() -> str | None:
        """Return why the sharded copy is not equal to the copy; None if it is equal, or if no copy runs."""
        try:
            with isolated():
                copy = policy.small_copy()
                if unseen := ", ".join(_unseen_classes(foreign, copy)):
                    return (
                        f"tensor parallelism of a {kind.__name__} is tried on a small copy, built from the config, "
                        f"whose layers have no {unseen}"
                    )
                departure = (
                    None
                    if is_derived
                    else split_departure(copy, lambda _: shallow_copy(policy), _TRIAL_RANKS)
                )
                return departure and f"the table of a {kind.__name__}'s type departs: {departure}"
        except Exception:  # of any model's constructor, or sizes of the copy that the table does not take
            return None

    error = _once(model, policy, ("tensors",), departure_of_copy)
    advice = "give a table for this class as custom_policy (docs/policies.md), or leave tp_size at 1"
    return [] if error is None else [f"{error}: {advice}"]


def _is_of_libraries(kind: type[nn.Module]) -> bool:
    """Return True for classes with which tables are tried, unless a script has replaced their forward."""
    libraries = ("transformers.", "torch.", "peft.")
    return kind.__module__.startswith(libraries) and kind.forward.__module__.startswith(libraries)


def _once(model: nn.Module, policy: Policy, name: tuple[str, ...], trial: Callable[[], _Result]) -> _Result:
    """Return the result of a trial. It is made once for its name, the tables, the config and the modules' code.

    Args:
        model, policy: the full model, and its policy; a policy that is more than tables keeps its results itself.
        name: of the trial.
        trial: makes the result.
    """
    tables = policy.tables()
    known: dict[Any, Any] = vars(policy).setdefault("_results", {}) if tables is None else RESULTS
    settings = _settings(getattr(model, "config", None))
    key = (name, tables, settings, *map(_code_of, model.modules()))
    if key not in known:
        known[key] = trial()
    result: _Result = known[key]
    return result


def _settings(config: Any) -> str:
    """Return all settings of a config and its sections as text, private ones (the attention) too."""
    if not isinstance(config, PreTrainedConfig):
        return repr(config)
    return repr((type(config), {name: _settings(value) for name, value in vars(config).items()}))


def _try_mode(model: nn.Module, policy: Policy, mode: str) -> tuple[str | None, bool]:
    """Return why a mode is refused, or None; and True if sequences may stay sharded up to the loss.

    Tried with sequences that stay sharded up to the loss, if the copy has all classes of the model, then without.
    """
    kind = type(model).__name__
    try:
        with isolated():
            copy, uneven = _copy_and_uneven_batch(policy)
            plan: Any = policy.sequence_plan()
            layers = map(model.get_submodule, plan.layer_paths(model))
            if unseen := ", ".join(_unseen_classes(layers, copy)):
                return (
                    f"it is tried on a small copy, built from the config, whose layers have no {unseen}",
                    True,
                )
            departures: list[str] = []
            for keeps_sequences in (False,) if _unseen_classes([model], copy) else (True, False):
                policy.keeps_sequences = keeps_sequences
                departure = split_departure(
                    copy,
                    lambda _: shallow_copy(policy),
                    _TRIAL_RANKS,
                    mode=mode,
                    batches=[copy.batch, uneven],
                )
                if departure is None:
                    return None, keeps_sequences
                departures.append(departure)
    except Exception as error:  # of any model's constructor, or of a policy's code
        reason = str(error) if isinstance(error, ValueError) else described(error)
        return f"it is tried on a small copy, built from the config of this {kind}: {reason}", True
    return f"a small copy of this {kind} departs from one process: {departures[0]}", True


def _copy_and_uneven_batch(policy: Policy) -> tuple[Copy, dict[str, Any]]:
    """Return a small copy, and three samples of a length that ranks do not divide, if the model takes it.

    One of the three is padded, if the model takes a mask.
    """
    copy = policy.small_copy()
    if attention_name(policy.model.config) == EAGER:
        copy = replace(copy, make=partial(_with_eager_attention, copy.make))
    dtype = next(copy.model.parameters()).dtype
    odd = shallow_copy(copy.inputs)
    odd.length -= 1
    for inputs in (odd, copy.inputs):
        with suppress(Exception), StaysDouble():  # of any model class
            batch = in_dtype(inputs.make(3), dtype)
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 2:
                mask[0, -3:] = 0
            copy.model(**batch)
            return copy, batch
    return copy, copy.batch


def _with_eager_attention(make: Callable[[int], nn.Module], seed: int) -> nn.Module:
    model: Any = make(seed)
    model.set_attn_implementation(EAGER)
    eager: nn.Module = model
    return eager


def _unseen_classes(modules: Iterable[nn.Module], copy: Copy) -> list[str]:
    """Return the names of classes inside modules that a small copy does not have; peft's and harmless ones may be.

    Modules whose forward a script has replaced are in no copy, unless their constructor does so.
    """
    inside = dict.fromkeys(_code_of(inner) for module in modules for inner in module.modules())
    seen = {*map(_code_of, copy.model.modules())}
    return [
        kind.__name__ + " with a replaced forward" * is_replaced
        for kind, forward, is_replaced in inside
        if (kind, forward, is_replaced) not in seen
        and (is_replaced or not _is_harmless(kind))
        and not kind.__module__.startswith("peft.")
        and not kind.__name__.endswith(SAMPLE_DROPPER)
    ]


def _is_harmless(kind: type[nn.Module]) -> bool:
    """Return True for containers, which compute nothing, and for `_HARMLESS`."""
    forwards = [nn.Module.forward, *(known.forward for known in _HARMLESS if issubclass(kind, known))]
    return any(kind.forward is forward for forward in forwards)


def _code_of(module: nn.Module) -> tuple[type[nn.Module], Any, bool]:
    """Return what determines a module's results: its class, its forward, and True if another stands in its place."""
    return type(module), type(module).forward, has_replaced_forward(module)


def split_departure(
    copy: Copy,
    policy: Callable[[nn.Module], Policy],
    size: int,
    *,
    mode: str | None = None,
    batches: Sequence[dict[str, Any]] = (),
) -> str | None:
    """Return how loss or gradients of a small copy on `size` ranks differ from the unsharded copy; None if they agree.

    Args:
        copy: the small copy; `in_double` gives exact comparisons.
        policy: returns a policy for a model that the copy makes.
        size: number of ranks.
        mode: of sequence parallelism; None shards tensors alone.
        batches: are compared one after the other; by default that of the copy.

    Raises:
        ValueError: the policy refuses the model, or its sizes.
    """
    groups = thread_groups(size)
    # By rank, with equal weights.
    sharded = [_shard_over(copy.make(0), policy, group, mode) for group in groups]
    unsharded = copy.make(0)
    for batch in batches or [copy.batch]:
        if departure := _batch_departure(unsharded, sharded, groups, batch, mode):
            return departure
        for model in (unsharded, *sharded):
            model.zero_grad()
    return None


def _batch_departure(
    unsharded: nn.Module,
    sharded: Sequence[nn.Module],
    groups: Sequence[ThreadGroup],
    batch: dict[str, Any],
    mode: str | None,
) -> str | None:
    """Return how loss or gradients of a batch differ; None if they agree."""
    size = len(groups)
    try:
        loss = _loss(unsharded, batch)
        losses = run_threads(groups, lambda group: _loss(sharded[group.rank()], batch))
    except Exception as error:  # the code of any model, given tensors of another width, may raise anything
        return described(error)
    for sharded_loss in losses:
        if departure := loss_departure(loss, sharded_loss, f"on {size} ranks"):
            return departure
    parameters_by_rank = [dict(model.named_parameters()) for model in sharded]
    for name, parameter in unsharded.named_parameters():
        local = [parameters[name] for parameters in parameters_by_rank]
        if departure := _gradient_departure(name, parameter, local, is_averaged=mode in SEQUENCE_MODES):
            return departure
    return None


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Compute loss and gradients of a batch, with random numbers that are the same for all; return the loss."""
    torch.default_generator.manual_seed(1)  # of the CPU alone
    with StaysDouble():
        loss = loss_of(model(**batch))
        loss.backward()
    return loss.detach()


def _shard_over(
    model: nn.Module, policy: Callable[[nn.Module], Policy], group: Any, mode: str | None
) -> nn.Module:
    """Shard a model, in place, as one rank of a group of threads would."""
    axis = "sequence" if mode in SEQUENCE_MODES else "tensor"
    config = ShardConfig(
        **{f"{axis}_parallel_process_group": group},
        enable_sequence_parallelism=mode is not None,
        sequence_parallelism_mode=mode,
    )
    sharder = ModelSharder(model, policy(model), config)
    mark_all_parallelized(model)
    sharder.shard()
    return sharder.model


def _gradient_departure(
    name: str, unsharded: Parameter, local: Sequence[Parameter], *, is_averaged: bool
) -> str | None:
    """Return how the gradients of a parameter's shards on all ranks differ from that of the unsharded one.

    Args:
        name: name of the parameter.
        unsharded: the unsharded parameter.
        local: the parameter of each rank, in order.
        is_averaged: the optimizer averages gradients over the ranks, as those of a sequence axis.
    """
    placement = placement_on(local[0], "tp")
    gradients = [_gradient_or_zeros(shard) for shard in local]
    if isinstance(placement, Shard):
        num_replicas = placement.replicas  # of each shard, on neighbouring ranks that add their gradients
        gradients = [
            sum(gradients[rank - rank % num_replicas :][:num_replicas], start=torch.zeros(()))
            for rank in range(len(gradients))
        ]
        totals = [placement.full(gradients)]
    elif is_averaged:
        totals = [sum(gradients, start=torch.zeros(())) / len(gradients)]
    else:
        totals = [sum(gradients, start=torch.zeros(()))] if isinstance(placement, PartialGrad) else gradients
    return gradient_departure(f"{name} on {len(local)} ranks", _gradient_or_zeros(unsharded), totals)


def _gradient_or_zeros(parameter: Parameter) -> Tensor:
    """Return the gradient of a parameter; zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
