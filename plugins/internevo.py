"""InternEvo configurations as arguments of HybridParallelPlugin."""

import json
import logging
import re
import runpy
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import isclass, isfunction, ismodule
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..shardformer.checkpoint_config import PipelineGradientCheckpointConfig
from .hybrid_config import told

_CLOSE = 0.85  # num_chunk to num_chunks, and no less
_FORMATS = ".py (run as Python) and .json"


class Section:
    """A dictionary of a configuration, from which keys are taken. What is wrong is noted, and never raised.

    Args:
        name: how faults call it; "" is the configuration itself.
        given: the dictionary.
        faults: where faults are noted.
    """

    def __init__(self, name: str, given: Any, faults: list[str]) -> None:
        self.name = name
        self._faults = faults
        self._taken: list[str] = []
        if not isinstance(given, Mapping):
            faults.append(f"{name}={given!r} must be a dict")
            given = {}
        self._left = dict(given)

    def take(self, key: str) -> Any | None:
        """A value of any kind; None where there is none."""
        self._taken.append(key)
        return self._left.pop(key, None)

    def whole_number(self, key: str) -> int | None:
        """A whole number."""
        return self._checked(key, lambda value: isinstance(value, int), "must be a whole number")

    def number(self, key: str) -> float | None:
        """A finite number."""
        return self._checked(
            key, lambda value: isinstance(value, (int, float)) and isfinite(value), "must be a number"
        )

    def switch(self, key: str) -> bool | None:
        """A truth value."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(key, value, "must be a bool")
        return None

    def text(self, key: str) -> str | None:
        """A string."""
        return self._checked(key, lambda value: isinstance(value, str), "must be a str")

    def subsection(self, key: str, *, number_is: str | None = None) -> "Section":
        """A dictionary in it, empty where there is none.

        Args:
            number_is: the key that a whole number in the place of the dictionary stands for.
        """
        value = self.take(key)
        if number_is is not None and isinstance(value, int) and not isinstance(value, bool):
            value = {number_is: value}
        return Section(self._path(key), {} if value is None else value, self._faults)

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Note that a value cannot be had."""
        self._faults.append(f"{self._path(key)}={value!r} {why}")

    def allow(self, key: str, *allowed: Any, why: str) -> None:
        """Take a key that may be absent, or have one of these values, which change nothing."""
        value = self.take(key)
        if value is not None and value not in allowed:
            self.refuse(key, value, why)

    def rest(self, known: Iterable[str] | None = ()) -> list[str]:
        """Names of what was not taken and may be there; whatever else was not taken is noted.

        Args:
            known: what may be there; None is anything whose name is not nearly that of a key that was taken.
        """
        may_be = []
        for key in self._left:
            meant = get_close_matches(str(key), self._taken, 1, _CLOSE)
            if key in (() if known is None else known) or (known is None and not meant):
                may_be.append(self._path(key))
            else:
                what = f"write {meant[0]}" if meant else f"known are {', '.join(dict.fromkeys(self._taken))}"
                self._faults.append(f"{self._path(key)} is not understood: {what}")
        return may_be

    def _checked(self, key: str, is_right: Callable[[Any], bool], why: str) -> Any | None:
        """A value that is right, and no truth value, which Python counts among the numbers."""
        value = self.take(key)
        if value is None or (not isinstance(value, bool) and is_right(value)):
            return value
        self.refuse(key, value, why)
        return None

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def read_configuration(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A configuration as a dictionary, from itself or from a file.

    Args:
        source: the dictionary, or the path of a Python file, whose variables are the sections, or of a JSON file. Of a
            Python file constants in capitals, names that begin with an underscore, modules, classes and functions are
            no sections.

    Raises:
        ValueError: it is neither, or no such file, or JSON that cannot be read.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise ValueError(f"an InternEvo configuration is a dict or the path of a file, and not {source!r}")
    path = Path(source)
    if path.suffix not in (".py", ".json") or not path.is_file():
        what = "is no file" if path.suffix in (".py", ".json") else f"must end in one of {_FORMATS}"
        raise ValueError(f"the InternEvo configuration {str(path)!r} {what}")
    return _read_json(path) if path.suffix == ".json" else _read_python(path)


def _read_python(path: Path) -> dict[str, Any]:
    return {
        name: value
        for name, value in runpy.run_path(str(path)).items()
        if not (name.startswith("_") or name.isupper())
        and not (ismodule(value) or isclass(value) or isfunction(value))
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"the InternEvo configuration {str(path)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the InternEvo configuration {str(path)!r} must hold an object of sections")
    return found


_LOG = logging.getLogger("echelon")

# What a mode asks of the plugin, besides the sizes. isp splits no layer over its `tensor` ranks: only the sequence.
_REGIONS = {
    "enable_sequence_parallelism": True,
    "sequence_parallelism_mode": "split_gather",
    "enable_sequence_overlap": True,
}
MODES: dict[str, dict[str, Any]] = {
    "mtp": {},
    "msp": _REGIONS,
    "fsp": {**_REGIONS, "enable_sequence_regather": True},
    "isp": {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
}
# Pipeline modes, with the schedule of one stage on a rank and of several.
_SCHEDULES = {"1f1b": ("1f1b", "interleaved"), "zbh1": ("zbh1", None), "zbv": ("zbv", "zbv")}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
_PARALLEL = (
    "zero1",
    "tensor",
    "pipeline",
    "weight",
    "sequence_parallel",
    "sequence_2D",
    "expert",
    "expert_weight",
)
_SECTIONS = ("parallel", "hybrid_zero_optimizer", "model", "data", "grad_scaler", "loss", "num_chunks")
# What is an object here (optimizer, schedulers, batches), or a matter of the script (files, alerts, backends).
_NOT_OF_PLUGIN = (
    *("JOB_NAME", "DO_ALERT", "model_type", "adam", "lr_scheduler", "beta2_scheduler", "ckpt", "monitor"),
    *("alert_address", "enable_tb", "tensorboard", "tensorboard_folder", "resume_tb_folder", "batch_count"),
    *("cudnn_deterministic", "cudnn_benchmark", "generation", "gradient_handler"),
)
# What becomes of sizes, as it is called here and there.
_CALLED = {
    "tp_size": "tensor.size",
    "sp_size": "tensor.size",
    "pp_size": "pipeline.size",
    "wp_size": "weight.size",
    "zero_size": "zero1.size",
    "num_model_chunks": "num_chunks",
    "num_microbatches": "data.micro_num",
}
_WEIGHT_TUNING = ("launch_allgather_before", "forward_overlap_per")
_ZERO_TUNING = ("use_split_tensor_optim", "all_gather_size")


def plugin_arguments(config: Mapping[str, Any] | str | Path, **others: Any) -> dict[str, Any]:
    """The keyword arguments of HybridParallelPlugin for an InternEvo configuration.

    What the configuration does not say is left to the plugin's defaults, but for `zero1` and `data.micro_num`, whose
    absence has a meaning of its own in InternEvo: all ranks, and 1. Sections that are no matter of the plugin (`adam`,
    `ckpt`, the model's sizes, …) are named once in an info line of the logger "echelon". No communication.

    Args:
        config: a configuration, the dictionary of its `parallel` section alone, or the path of a .py or .json file.
        others: further sections by name, and arguments of the plugin, which go before those of the configuration.

    Raises:
        ValueError: with all that is not understood, or cannot be done, at once.
    """
    given = read_configuration(config)
    sections = (*_PARALLEL, *_SECTIONS)
    twice = [name for name in others if name in given]
    faults = [f"{name} is given twice, in the configuration and besides: give one" for name in twice]
    root = Section("", given | {name: value for name, value in others.items() if name in sections}, faults)
    parallel = _parallel_section(root, faults)
    model = root.subsection("model")
    chunks = _num_chunks(root, model, faults)
    found, left = _layout(parallel, chunks)
    for arguments, names in (
        _batches(root, pp_size=found["pp_size"], faults=faults),
        _optimizer(root.subsection("hybrid_zero_optimizer")),
        _loss_scale(root.subsection("grad_scaler")),
        _model(model, is_given="model" in given or "model" in others),
    ):
        found |= arguments
        left += names
    _refuse_other_numbers(root)
    left += root.rest(_NOT_OF_PLUGIN)
    if faults:
        raise ValueError(told([f"InternEvo's configuration: {fault}" for fault in faults]))
    _tell(left)
    return found | {name: value for name, value in others.items() if name not in sections}


def in_its_words(fault: str, arguments: Mapping[str, Any]) -> str:
    """A fault of the plugin's arguments, with what the configuration calls those that it names.

    Args:
        fault: what the plugin says.
        arguments: those that came of the configuration alone.
    """
    names = [name for name in _CALLED if name in arguments and re.search(rf"\b{name}\b", fault)]
    if not names:
        return fault
    called = {name: f"{name}={arguments[name]} is {_CALLED[name]}" for name in names}
    size, wp_size = arguments.get("zero_size", -1), arguments.get("wp_size", 1)
    if "zero_size" in names and size > 1 and wp_size > 1:
        called["zero_size"] = f"zero_size={size} is zero1.size={size // wp_size} times weight.size={wp_size}"
    return f"{fault}\nin InternEvo's configuration {', '.join(called.values())}"


def _parallel_section(root: Section, faults: list[str]) -> Section:
    """`parallel`, whose keys may stand in the configuration itself instead."""
    bare = {name: value for name in _PARALLEL if (value := root.take(name)) is not None}
    section = root.take("parallel")
    if section is None:
        return Section("", bare, faults)
    faults += [f"{name} is given beside parallel, which has it: leave one out" for name in bare]
    return Section("parallel", section, faults)


def _num_chunks(root: Section, model: Section, faults: list[str]) -> int:
    inside, beside = model.whole_number("num_chunks"), root.whole_number("num_chunks")
    if None not in (inside, beside) and inside != beside:
        faults.append(f"num_chunks={beside} and model.num_chunks={inside} differ: give one")
    found = beside if inside is None else inside
    return 1 if found is None else found


def _layout(parallel: Section, chunks: int) -> tuple[dict[str, Any], list[str]]:
    """The sizes of all axes and how they are used, and what was left alone."""
    zero = parallel.subsection("zero1", number_is="size")
    size = zero.whole_number("size")
    zero.allow("fsdp", False, why="is not of this plugin: use TorchFSDPPlugin, or leave it out")
    zero.rest()
    mode, found = _tensor(parallel)
    weight = parallel.subsection("weight", number_is="size")
    found |= _weight(weight, mode)
    found |= {"zero_stage": 1, "zero_size": _zero_size(size, found.get("wp_size", 1))}
    left = weight.rest(_WEIGHT_TUNING)
    found |= _pipeline(parallel.subsection("pipeline", number_is="size"), chunks)
    spread = parallel.subsection("sequence_2D")
    spread.allow(
        "enable",
        False,
        why="cannot be had: use HybridParallelPlugin's own sequence_parallelism_mode, 'all_to_all' or 'ring_attn'",
    )
    left += spread.rest(None)
    for key in ("expert", "expert_weight"):
        experts = parallel.subsection(key, number_is="size")
        experts.allow(
            "size",
            1,
            why="cannot be had: each rank has all experts, split by tensor parallelism alone; use 1",
        )
        left += experts.rest(None)
    return found, left + parallel.rest()


def _zero_size(size: int | None, wp_size: int) -> int:
    """`zero1` counts ranks that hold the same weights, and the plugin all neighbours among whom those are."""
    if size is None or size <= 0:
        return -1
    return size if size == 1 else size * wp_size


def _tensor(parallel: Section) -> tuple[str, dict[str, Any]]:
    tensor = parallel.subsection("tensor", number_is="size")
    size, mode = tensor.whole_number("size"), tensor.text("mode") or "mtp"
    tensor.rest()
    size = 1 if size is None else size
    if mode not in MODES:
        tensor.refuse("mode", mode, f"must be one of {', '.join(map(repr, MODES))}")
        mode = "mtp"
    is_split = parallel.switch("sequence_parallel")
    if is_split is not None and size > 1 and is_split != (mode != "mtp"):
        parallel.refuse(
            "sequence_parallel", is_split, f"contradicts tensor.mode={mode!r}, which decides: leave it out"
        )
    sizes = {"tp_size": 1, "sp_size": size} if mode == "isp" else {"tp_size": size}
    return mode, sizes | (MODES[mode] if size > 1 else {})


def _weight(weight: Section, mode: str) -> dict[str, Any]:
    size = weight.whole_number("size")
    overlap, memory_pool = weight.switch("overlap"), weight.switch("memory_pool")
    if size is None or size == 1:
        return {}
    if mode != "isp":
        weight.refuse(
            "size", size, f"needs tensor=dict(mode='isp'), and the mode is {mode!r}: use 1, or that mode"
        )
    # InternEvo's defaults, which may not be the plugin's.
    return {"wp_size": size, "wp_overlap": bool(overlap), "wp_memory_pool": bool(memory_pool)}


def _pipeline(pipeline: Section, chunks: int) -> dict[str, Any]:
    size, overlap = pipeline.whole_number("size"), pipeline.switch("interleaved_overlap")
    mode = pipeline.text("mode") or "1F1B"
    pipeline.rest()
    found: dict[str, Any] = {"pp_size": 1 if size is None else size}
    styles = _SCHEDULES.get(mode.lower())
    if styles is None:
        pipeline.refuse(
            "mode", mode, f"must be one of {', '.join(repr(each.upper()) for each in _SCHEDULES)}"
        )
    elif (style := styles[chunks > 1]) is None or (style == "zbv" and chunks > 2):
        pipeline.refuse("mode", mode, f"and num_chunks={chunks} do not go together: ZBH1 has 1 chunk, ZBV 2")
    elif found["pp_size"] != 1:  # without a pipeline InternEvo looks at none of this
        found["pp_style"] = style
        if style == "interleaved":
            found |= {"num_model_chunks": chunks} | ({} if overlap is None else {"overlap_p2p": overlap})
    return found


def _batches(root: Section, *, pp_size: int, faults: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Into how many microbatches a step is cut, and what was left alone; nothing where there is no `data`."""
    given = root.take("data")
    if given is None:
        return {}, []
    data = Section("data", given, faults)
    count, accumulation = data.whole_number("micro_num"), data.whole_number("gradient_accumulation")
    count = 1 if count is None else count
    if pp_size == 1 and accumulation not in (None, count):
        data.refuse("gradient_accumulation", accumulation, f"must be micro_num={count} without a pipeline")
    return {"num_microbatches": count}, data.rest(None)


def _optimizer(zero: Section) -> tuple[dict[str, Any], list[str]]:
    overlap, older = zero.switch("overlap_sync_grad"), zero.switch("zero_overlap_communication")
    if None not in (overlap, older) and overlap != older:
        zero.refuse(
            "zero_overlap_communication", older, f"is the older name of overlap_sync_grad={overlap}: give one"
        )
    bucket = zero.number(
        "reduce_bucket_size"
    )  # InternEvo compares it with numbers of elements, not with bytes
    found = {
        "overlap_communication": older if overlap is None else overlap,
        "overlap_allgather": zero.switch("overlap_sync_param"),
        "zero_bucket_size_in_m": None if bucket is None else bucket / 2**20,
        "max_norm": zero.number("clip_grad_norm"),
    }
    return _said(found), zero.rest(_ZERO_TUNING)


def _loss_scale(scaler: Section) -> tuple[dict[str, Any], list[str]]:
    fp16 = scaler.subsection("fp16")
    found: dict[str, Any] = {name: fp16.number(name) for name in ("initial_scale", "min_scale")}
    found["growth_interval"] = fp16.whole_number("growth_interval")
    fp16.rest()
    found |= {name: scaler.number(name) for name in ("growth_factor", "backoff_factor", "max_scale")}
    found["hysteresis"] = scaler.whole_number("hysteresis")
    scaler.rest()
    return _said(found), []


def _model(model: Section, *, is_given: bool) -> tuple[dict[str, Any], list[str]]:
    """Precision, recomputation and kernels; the rest of the section describes the model, which is an object here."""
    found: dict[str, Any] = {"precision": _precision(model)} if is_given else {}
    share = model.take("checkpoint")
    if isinstance(share, (bool, int, float)) and 0 <= share <= 1:
        if share:
            recomputed = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=float(share))
            found["gradient_checkpoint_config"] = recomputed
    elif share is not None:
        model.refuse("checkpoint", share, "must be a bool, or a number from 0 to 1")
    found["parallel_output"] = model.switch("parallel_output")
    found["enable_flash_attention"] = model.switch("use_flash_attn")
    model.allow(
        "embed_grad_scale", 1, why="would change gradients, and the model is yours: scale there, and use 1"
    )
    return _said(found), model.rest(None)


def _precision(model: Section) -> str | None:
    given = model.take("dtype")
    name = "float16" if given is None else str(given).removeprefix("torch.")
    if isinstance(given, (str, torch.dtype, type(None))) and name in _DTYPES:
        return _DTYPES[name]
    why = f"must be one of {', '.join(f'torch.{each}' for each in _DTYPES)}"
    if name == "tf32":
        why = "is float32 with other products: use torch.float32, and torch.set_float32_matmul_precision('high')"
    model.refuse("dtype", given, why)
    return None


def _refuse_other_numbers(root: Section) -> None:
    """Note what would give other losses than InternEvo if it were left alone."""
    root.allow(
        "use_fp32_norm", False, why="cannot be had: norms compute as the model does, with float32 masters"
    )
    loss = root.subsection("loss")
    loss.allow(
        "label_smoothing",
        0,
        why="is not the plugin's: give execute_pipeline a criterion that has it, and use 0 here",
    )
    loss.rest(("moe_loss_coeff", "op_type"))


def _said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in arguments.items() if value is not None}


def _tell(left: list[str]) -> None:
    if left and not (dist.is_initialized() and dist.get_rank()):
        _LOG.info(
            "InternEvo's configuration: these are no arguments of the plugin (optimizer, model, data and files are "
            "given to Echelon as objects): %s",
            ", ".join(left),
        )
