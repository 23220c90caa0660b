"""Measurements of a training run: time, throughput, utilisation, memory, norm, loss, skipped steps, experts."""

import json
import math
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ..cluster.device import peak_memory
from ..cluster.errors import raise_errors
from ..cluster.failures import all_ranks_in, naming_failures
from ..cluster.gathering import gather_integers, run_or_raise_together
from ..pipeline.timeline_drawing import require_matplotlib
from .booster import Booster
from .flops import peak_flops

Record = dict[str, Any]
_SHOWN = ("auto", "lines", "bar", None)


class Metrics:
    """Measurements of a run, written on the first rank every few steps.

        metrics = Metrics(booster, optimizer, tokens_per_step=16 * 512, every=10, jsonl="steps.jsonl")
        for batch in dataloader:
            loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
            metrics.step(loss, lr=scheduler.get_last_lr()[0])

    A record has `step`, `loss` (the mean of the steps since the last record), further values of the script, `grad_norm`
    of the last step before clipping, `skipped_steps` so far, `step_seconds`, `peak_memory_bytes` of the rank with the
    highest (allocated by torch on a GPU, resident on a CPU), and where their arguments are given `tokens_per_second`,
    `tokens_per_second_per_device`, `flops_utilisation` and `imbalance/LAYER` of experts. Steps between two records read
    nothing and send nothing; a record reads the loss once, and gathers two integers over the world.

    Args:
        booster: knows device and precision.
        optimizer: the one that `boost` returned.
        every: steps between records.
        num_steps: steps of the run, for the progress bar and "step 3/200".
        first_step: steps taken before, in a run that resumed.
        tokens_per_step: tokens of a global batch, over all replicas.
        flops_per_token: of the model, see `flops_per_token`.
        peak_flops: FLOPs per second of a device; None takes it from a table of devices, in 16 bits.
        mixture: a boosted model whose `expert_load()` is read for every record.
        show: "lines" prints a line for every record, "bar" shows them beside a progress bar, "auto" takes the bar where
            standard error is a terminal. None prints nothing.
        jsonl: a file of JSON lines. A resumed run keeps the lines up to `first_step`.
        tensorboard: a folder for TensorBoard.

    Attributes:
        records: all records; on the first rank those of the file before `first_step`, too.

    Raises:
        ImportError: TensorBoard is not installed. ValueError: an argument has an invalid value. OSError: a file cannot
            be written. On every rank.
    """

    def __init__(
        self,
        booster: Booster,
        optimizer: Any,
        *,
        every: int = 10,
        num_steps: int | None = None,
        first_step: int = 0,
        tokens_per_step: int | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        mixture: Any = None,
        show: Literal["auto", "lines", "bar"] | None = "auto",
        jsonl: str | Path | None = None,
        tensorboard: str | Path | None = None,
    ) -> None:
        raise_errors(_errors(every, show))
        self._optimizer, self._device, self._mixture = optimizer, booster.device, mixture
        self._every, self._num_steps, self._step = every, num_steps, first_step
        self._tokens, self._flops = tokens_per_step, flops_per_token
        self._peak = peak_flops or _peak_of(booster)
        self.records: list[Record] = []
        is_first = dist.get_rank() == 0
        self._file = Path(jsonl) if jsonl is not None and is_first else None
        self._board: Any = None
        if jsonl is not None or tensorboard is not None:
            with all_ranks_in("Metrics", raised_alike=(ImportError, OSError, ValueError)):
                run_or_raise_together(
                    lambda: self._open(first_step, tensorboard if is_first else None),
                    booster.plugin.mesh.side_group(),
                )
        shows_bar = show == "bar" or (show == "auto" and sys.stderr.isatty())
        self._bar = tqdm(total=num_steps, initial=first_step) if shows_bar and is_first else None
        self._prints = show is not None and not shows_bar and is_first
        self._losses: Tensor | float = 0.0  # sum of the losses since the last record
        self._recorded = first_step
        self._began = self._stepped = time.perf_counter()

    def _open(self, first_step: int, tensorboard: str | Path | None) -> None:
        """Read the file's records up to a step and drop the others, and open TensorBoard's."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.records = _lines_until(self._file, first_step)
            self._file.write_text("".join(map(_as_line, self.records)))
        if tensorboard is not None:
            self._board = _summary_writer(tensorboard)

    def step(self, loss: Tensor | float, **values: float) -> Record | None:
        """Count a step, after the optimizer's. Every `every` steps it writes a record: collective over the world.

        Args:
            loss: of the step; read with the next record.
            values: further numbers of a record, as `lr`.

        Returns:
            The record on every rank, or None.

        Raises:
            ValueError: the loss is no number.
        """
        if not isinstance(loss, Tensor | float | int):
            raise ValueError(
                f"loss={loss!r} must be a tensor or a number: give the loss of execute_pipeline's result"
            )
        self._step += 1
        self._losses += loss.detach().float() if isinstance(loss, Tensor) else loss
        self._stepped = time.perf_counter()
        if self._bar is not None:
            self._bar.update()
        if self._step % self._every and self._step != self._num_steps:
            return None
        with naming_failures("metrics.step"):
            record = {"step": self._step, **self._measured(values)}
            self._losses, self._recorded = 0.0, self._step
            self._began = self._stepped = time.perf_counter()
            self._write(record)
        return record

    def write(self, **values: float) -> None:
        """Write further numbers of this step, as of an evaluation. The time since the last step is none of training."""
        now = time.perf_counter()
        self._began += now - self._stepped
        self._stepped = now
        self._write({"step": self._step, **values})

    def draw(self, path: str | Path, *names: str) -> None:
        """Plot numbers by step into a file (.svg, .png or .pdf), on the first rank.

        Args:
            path: the file.
            names: of numbers of the records; "imbalance" stands for all that begin with "imbalance/".

        Raises:
            ImportError: matplotlib is not installed.
        """
        if dist.get_rank():
            return
        require_matplotlib()
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(name for record in self.records for name in record):
            kind, _, layer = name.partition("/")
            if name in names or kind in names:
                rows = [record for record in self.records if name in record]
                steps, values = [row["step"] for row in rows], [row[name] for row in rows]
                axes.plot(steps, values, marker=".", label=layer or name)
        axes.set_ylabel(", ".join(names))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)

    def _measured(self, values: Mapping[str, float]) -> Record:
        """Return the numbers of a record. Collective over the world."""
        num_steps = self._step - self._recorded
        loss = float(self._losses) / num_steps  # waits for the device: the steps have ended
        seconds = (time.perf_counter() - self._began) / num_steps
        peak = peak_memory(self._device)
        bits = struct.unpack("q", struct.pack("d", loss))[0]
        ranks = gather_integers((_resident_peak() if peak is None else peak, bits))
        losses = [struct.unpack("d", struct.pack("q", bits))[0] for _, bits in ranks]
        record: Record = {
            "loss": sum(losses) / len(losses),
            **values,
            "skipped_steps": self._optimizer.skipped_steps,
            "step_seconds": seconds,
            "peak_memory_bytes": max(bytes_ for bytes_, _ in ranks),
        }
        norm = self._optimizer.get_grad_norm()
        if norm is not None:  # torch's wrappers have one where the script clips
            record["grad_norm"] = norm
        if self._tokens is not None:
            per_device = self._tokens / seconds / len(ranks)
            record |= {
                "tokens_per_second": self._tokens / seconds,
                "tokens_per_second_per_device": per_device,
            }
            if self._flops is not None and self._peak is not None:
                record["flops_utilisation"] = per_device * self._flops / self._peak
        if self._mixture is not None:
            loads = self._mixture.expert_load().items()
            record |= {f"imbalance/{layer}": load.imbalance for layer, load in loads}
        return record

    def _write(self, record: Record) -> None:
        """Keep a record, and write it to the outputs, which only the first rank has."""
        self.records.append(record)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(_as_line(record))
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])
            self._board.flush()
        if self._bar is not None:
            self._bar.set_postfix_str(line_of(record))
            if self._step == self._num_steps:
                self._bar.close()
                self._bar, self._prints = None, True  # a closed bar would not show a last evaluation
        elif self._prints:
            total = "" if self._num_steps is None else f"/{self._num_steps}"
            print(f"step {record['step']}{total}, {line_of(record)}", flush=True)


def line_of(record: Record) -> str:
    """Return a record as text, without the step: the highest imbalance of all layers."""
    texts = []
    for name, value in record.items():
        match name:
            case "step" | "step_seconds" | "tokens_per_second_per_device":
                continue
            case "peak_memory_bytes":
                texts.append(f"memory {value / 2**20:.0f} MiB")
            case "tokens_per_second":
                texts.append(f"{value:.0f} tokens/s")
            case "flops_utilisation":
                texts.append(f"{value:.1%} of peak FLOPs")
            case "skipped_steps":
                texts += [f"skipped {value}"] if value else []
            case _ if not name.startswith("imbalance/"):
                texts.append(f"{name} {value:.4g}")
    if imbalances := [value for name, value in record.items() if name.startswith("imbalance/")]:
        texts.append(f"imbalance {max(imbalances):.2f}")
    return ", ".join(texts)


def _errors(every: int, show: str | None) -> list[str]:
    """List the arguments with invalid values."""
    errors = [] if every >= 1 else [f"every={every} must be at least 1: it counts the steps between records"]
    if show not in _SHOWN:
        errors.append(f"show={show!r} must be one of {', '.join(map(repr, _SHOWN))}")
    return errors


def _peak_of(booster: Booster) -> float | None:
    return peak_flops(booster.device, booster.mixed_precision)


def _summary_writer(folder: str | Path) -> Any:
    """Return a writer for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"tensorboard={str(folder)!r} needs the package tensorboard: pip install tensorboard, or leave it out"
        ) from error
    return SummaryWriter(str(folder))


def _as_line(record: Record) -> str:
    """Return a record as a line of JSON; numbers that are not finite become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _lines_until(path: Path, step: int) -> list[Record]:
    """Return the records of a file up to a step; none of a run that begins. A torn last line is left out."""
    lines: Sequence[str] = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ()
    records = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [record for record in records if record["step"] <= step and step]


def _resident_peak() -> int:
    """Return the peak of this process's resident memory in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak includes that of the parent process before the exec.
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
