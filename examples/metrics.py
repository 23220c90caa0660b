"""Reports of a training run: peak memory, a line and a JSON object per step, a plot of the losses."""

import importlib.util
import json
import math
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
import torch.distributed as dist

PICTURES = (".png", ".svg", ".pdf")
PER_SECOND = "_per_second"  # suffix of throughputs in a record
EVAL = "eval_"  # prefix of evaluation figures in a record


def peak_memory() -> tuple[int, str]:
    """Return the peak memory in bytes and its kind: "cuda" as allocated by torch, or "process" for resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "cuda"
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak includes that of the parent process before the exec.
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024, "process"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def highest_memory() -> tuple[int, str]:
    """Return the highest peak memory of all ranks in bytes, and its kind. All-reduce over the world."""
    peak, of = peak_memory()
    highest = torch.tensor(peak)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest), of


def progress_of(record: dict[str, Any]) -> str:
    """Return the text beside the progress bar."""
    texts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}"]
    texts += [
        f"{value:.0f} {name.removesuffix(PER_SECOND)}/s"
        for name, value in record.items()
        if name.endswith(PER_SECOND)
    ]
    if record["skipped_steps"]:  # by an overflow of fp16
        texts.append(f"steps skipped so far {record['skipped_steps']}")
    return ", ".join(texts)


def line_of(record: dict[str, Any], num_steps: int) -> str:
    """Return a step's record as a line of text."""
    texts = [
        f"step {record['step']}/{num_steps}",
        progress_of(record),
        f"gradient norm {record['grad_norm']:.3f}",
        f"peak memory {record['peak_memory_bytes'] / 2**20:.0f} MiB ({record['peak_memory_of']})",
    ]
    texts += [
        f"{name.replace('_', ' ')} {value:.5g}" for name, value in record.items() if name.startswith(EVAL)
    ]
    return ", ".join(texts)


class JsonLines:
    """File of JSON lines, flushed after each line.

    Args:
        path: an existing file is replaced; None writes nothing.
        records: records to write first.
    """

    def __init__(self, path: Path | None, records: Sequence[dict[str, Any]] = ()) -> None:
        self._file: TextIO | None = None if path is None else path.open("w", encoding="utf-8")
        for record in records:
            self.write(record)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append an object; numbers that are not finite become null."""
        if self._file is None:
            return
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()


def file_errors(lines: Path | None, **pictures: Path | None) -> list[str]:
    """Return errors, before training, for files that could not be written at the end.

    Args:
        lines: the file of `--metrics`.
        pictures: plots, by the name of their option.
    """
    plots = {name: path for name, path in pictures.items() if path is not None}
    files = plots if lines is None else {"metrics": lines, **plots}
    errors = [f"--{name} {path}: {error}" for name, path in files.items() if (error := _file_error(path))]
    errors += [
        f"--{name} {path}: the name must end in one of {', '.join(PICTURES)}"
        for name, path in plots.items()
        if path.suffix not in PICTURES
    ]
    if plots and importlib.util.find_spec("matplotlib") is None:
        names = " and ".join(f"--{name}" for name in plots)
        errors.append(
            f"{names} needs matplotlib, which is not installed: pip install 'echelon[plot]', or leave it out"
        )
    return errors


def _file_error(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir():
        return "it is a folder: give the name of a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "it cannot be written to: give the name of another file"
    return None


def draw_curve(
    records: Sequence[dict[str, Any]],
    path: Path,
    *,
    unit: str = "nats",
    level: tuple[str, float] | None = None,
    shares: Sequence[str] = (),
) -> None:
    """Plot the losses by step and, below them, the fractions found by evaluations.

    Args:
        unit: unit of the loss.
        level: label and loss of a reference line, for example the loss of a model that ignores its input.
        shares: names of record entries between 0 and 1.
    """
    from matplotlib.figure import Figure  # optional: the extra "plot"

    figure = Figure(figsize=(8, 7 if shares else 5), layout="constrained")
    first, *others = figure.subplots(2 if shares else 1, 1, sharex=True, squeeze=False)[:, 0]
    first.plot([row["step"] for row in records], [row["loss"] for row in records], label="training")
    _draw_evaluations(first, records, "eval_loss", "evaluation")
    if level is not None:
        first.axhline(level[1], linestyle="--", color="gray", label=level[0])
    first.set_ylabel(f"loss ({unit})")
    for axes in others:
        for name in shares:
            _draw_evaluations(axes, records, name, name.removeprefix(EVAL).replace("_", " "))
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of the test samples")
    for axes in (first, *others):
        axes.grid(alpha=0.3)
        axes.legend()
    (others or [first])[-1].set_xlabel("step")
    figure.savefig(path)


def draw_imbalance(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot by step the imbalance of every layer's experts: tokens of the fullest expert over the mean of all."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    layers = list(records[0]["imbalance"])
    for color, layer in zip(colormaps["viridis"].resampled(len(layers)).colors, layers, strict=True):
        values = [row["imbalance"][layer] for row in records]
        axes.plot([row["step"] for row in records], values, color=color, label=layer)
    axes.axhline(1, linestyle="--", color="gray", label="even")
    axes.set(xlabel="step", ylabel="tokens of the fullest expert / mean")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _draw_evaluations(axes: Any, records: Sequence[dict[str, Any]], name: str, label: str) -> None:
    rows = [row for row in records if name in row]
    if rows:
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], marker=".", label=label)
