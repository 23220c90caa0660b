"""What is told of a training run: memory, a line and a JSON object per step, a picture of the losses."""

import importlib.util
import json
import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

PICTURES = (".png", ".svg", ".pdf")


def peak_memory() -> tuple[int, str]:
    """The most memory so far in bytes, and of what: what torch allocated by CUDA, or this process in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "cuda"
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage, which on Linux begins with the peak of the process that started this one.
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024, "process"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def line_of(record: dict[str, Any], num_steps: int) -> str:
    """A step's record as a line to read."""
    told = [
        f"step {record['step']}/{num_steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"gradient norm {record['grad_norm']:.3f}",
        f"{record['tokens_per_second']:.0f} tokens/s",
        f"peak memory {record['peak_memory_bytes'] / 2**20:.0f} MiB ({record['peak_memory_of']})",
    ]
    if record["skipped_steps"]:
        told.append(f"steps skipped so far {record['skipped_steps']}")
    if "eval_loss" in record:
        told.append(f"eval loss {record['eval_loss']:.4f} (perplexity {record['eval_perplexity']:.1f})")
    return ", ".join(told)


class JsonLines:
    """A file that gets one JSON object per line, each written out at once; None writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None if path is None else path.open("w", encoding="utf-8")

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Add an object; numbers that JSON has no word for become null."""
        if self._file is None:
            return
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()


def file_faults(lines: Path | None, curve: Path | None) -> list[str]:
    """Why these files could not be written at the end; found before training."""
    faults = [
        f"--{name} {path}: there is no folder {path.parent}"
        for name, path in (("metrics", lines), ("curve", curve))
        if path is not None and not path.parent.is_dir()
    ]
    if curve is not None and curve.suffix not in PICTURES:
        faults.append(f"--curve {curve}: the name must end in one of {', '.join(PICTURES)}")
    if curve is not None and importlib.util.find_spec("matplotlib") is None:
        faults.append(
            "--curve needs matplotlib, which is not installed: pip install 'echelon[plot]', or leave --curve out"
        )
    return faults


def draw_curve(records: Sequence[dict[str, Any]], path: Path, *, unigram_entropy: float) -> None:
    """A picture of the losses by step, beside what a model that only counts tokens would reach."""
    from matplotlib.figure import Figure  # optional: the extra "plot"

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.plot([row["step"] for row in records], [row["loss"] for row in records], label="training")
    judged = [row for row in records if "eval_loss" in row]
    if judged:
        steps, losses = [row["step"] for row in judged], [row["eval_loss"] for row in judged]
        axes.plot(steps, losses, marker="o", label="evaluation")
    axes.axhline(unigram_entropy, linestyle="--", color="gray", label="unigram entropy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
