r"""Loss curves of a Llama on real text: Echelon's layouts, compared with a plain torch loop in one process.

    python benchmarks/curves.py --plot curves.svg
    python benchmarks/curves.py --data ../shared/data/tinyshakespeare/input.txt --steps 200

A layout is a run of examples/language/llama/pretrain.py, started as users do. Tokens are bytes. By default the text is
a part of Python's own library. The exit status is 1 if a loss or a gradient norm departs from the plain loop's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
import torch
from checkout import refuse_another_checkout
from plain_training import Curve, Training, byte_sequences, train_plainly, unigram_entropy
from processes import run, torchrun
from transformers import LlamaConfig

from echelon.cli.curve_picture import draw_curves

EXAMPLE = Path(__file__).parents[1] / "examples" / "language" / "llama" / "pretrain.py"
LIBRARY = sorted(Path(os.__file__).parent.glob("[a-e]*.py"))
# By name: the number of processes, and further arguments of pretrain.py.
LAYOUTS = {
    "dp2·zero2": (2, "--tp_size 1 --pp_size 1 --zero_stage 2"),
    "tp2·dp2·zero1": (4, "--tp_size 2 --pp_size 1 --zero_stage 1"),
    "tp2·pp2": (4, "--tp_size 2 --pp_size 2"),
}
# Several buckets even for this small model, and gradient accumulation over microbatches.
COMMON = "--precision fp32 --zero_bucket_size_in_m 0.25 --num_microbatches 4 --max_norm 1"
# Relative, in any step. Another order of summation differs by 1e-7, which training amplifies. Initial weights that are
# off by 1e-6 change losses by 2e-7 and norms by 3e-5; a learning rate 1 % higher changes losses by 1e-3.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-3
HELD_OUT = 4  # batches at the beginning that pretrain.py does not train on
_MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The largest relative differences of a curve from the reference, over its steps."""

    loss: float
    norm: float


def main() -> int:
    """Run everything; return the exit status."""
    refuse_another_checkout()
    arguments = parse_arguments()
    torch.set_num_threads(1)
    training = Training(steps=arguments.steps)
    with tempfile.TemporaryDirectory(prefix="echelon-curves-") as folder:
        results = measure(arguments, training, Path(folder))
    show_results(results, arguments)
    errors = curve_errors(results["departures"])
    for error in errors:
        print(f"curves.py: {error}", file=sys.stderr)
    worst = max(departure.loss for departure in results["departures"].values())
    print(f"largest_difference={worst:.2e}")
    return 1 if errors else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", default=LIBRARY, metavar="FILE", help="text files")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequence", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--json", type=Path, help="write every step's loss and norm to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file")
    parser.add_argument("--quick", action="store_true", help="3 steps: shows that it runs, no more")
    if parser.parse_args().quick:
        parser.set_defaults(steps=3, sequence=16, data=LIBRARY[:4])
    return parser.parse_args()


def measure(arguments: argparse.Namespace, training: Training, folder: Path) -> dict[str, Any]:
    """Return the curves of the reference and of every layout, their departures, seconds, and facts about the text."""
    sequences = byte_sequences(arguments.data, arguments.sequence)
    config = LlamaConfig(**_MODEL, vocab_size=256, max_position_embeddings=arguments.sequence)
    config.to_json_file(folder / "config.json", use_diff=False)
    start = time.monotonic()
    reference = train_plainly(config, sequences[HELD_OUT * training.batch_size :], training)
    seconds = {"reference": time.monotonic() - start}
    curves = {}
    for name in arguments.layouts:
        start = time.monotonic()
        curves[name] = run_layout(name, arguments, training, folder)
        seconds[name] = time.monotonic() - start
    return {
        "text": "Python's library"
        if arguments.data == LIBRARY
        else ", ".join(path.name for path in arguments.data),
        "unigram_entropy": unigram_entropy(sequences),
        "reference": reference,
        "curves": curves,
        "departures": {name: departure(curve, reference) for name, curve in curves.items()},
        "seconds": seconds,
    }


def run_layout(name: str, arguments: argparse.Namespace, training: Training, folder: Path) -> Curve:
    """Run pretrain.py under a layout, on the texts and the config in a folder.

    Raises:
        RuntimeError: it failed.
    """
    num_processes, options = LAYOUTS[name]
    metrics = folder / "metrics.jsonl"
    flags = {"sequence_length": arguments.sequence, "config": folder, "metrics": metrics, "log_every": 1}
    flags |= {"steps": training.steps, "batch_size": training.batch_size, "lr": training.lr}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    words += ["--data", *map(str, arguments.data)]
    command = [*torchrun(num_processes), str(EXAMPLE), *words, *COMMON.split(), *options.split()]
    run(name, command)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    records = [record for record in records if "loss" in record]
    return Curve(
        losses=tuple(record["loss"] for record in records),
        norms=tuple(record["grad_norm"] for record in records),
    )


def departure(curve: Curve, reference: Curve) -> Departure:
    """Return the distance of a curve from the reference."""
    return Departure(
        loss=max(relative(curve.losses, reference.losses)), norm=max(relative(curve.norms, reference.norms))
    )


def relative(values: Sequence[float | None], expected: Sequence[float]) -> list[float]:
    """Return differences by step; infinite for a missing number."""
    return [
        float("inf") if one is None or one != one else abs(one - other) / abs(other)
        for one, other in zip(values, expected, strict=True)
    ]


def curve_errors(departures: Mapping[str, Departure]) -> list[str]:
    """Describe the layouts whose curves differ from the reference."""
    return [
        f"the {what} of {name} departs from the reference's by {distance:.1e} of it; {allowed:.0e} is allowed"
        for name, departure in departures.items()
        for what, distance, allowed in (
            ("loss", departure.loss, LOSS_TOLERANCE),
            ("norm", departure.norm, NORM_TOLERANCE),
        )
        if not distance <= allowed
    ]


def show_results(results: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Print the table; write the requested files."""
    entropy, reference, seconds = (results[name] for name in ("unigram_entropy", "reference", "seconds"))
    rows = [["plain torch", "1", f"{reference.losses[-1]:.4f}", "", "", f"{seconds['reference']:.0f}"]]
    for name, curve in results["curves"].items():
        away = results["departures"][name]
        figures = [f"{curve.losses[-1]:.4f}", f"{away.loss:.1e}", f"{away.norm:.1e}", f"{seconds[name]:.0f}"]
        rows.append([name, str(LAYOUTS[name][0]), *figures])
    title = f"{arguments.steps} steps on {results['text']}, unigram entropy {entropy:.4f}"
    header = ["layout", "processes", "last loss", "loss off by", "norm off by", "seconds"]
    report.show(title, header, rows, note="largest relative difference of all steps; seconds with start-up")
    if arguments.json is not None:
        plain = {name: asdict(curve) for name, curve in results["curves"].items()}
        away = {name: asdict(departure) for name, departure in results["departures"].items()}
        report.write_json(
            arguments.json, {**results, "reference": asdict(reference), "curves": plain, "departures": away}
        )
    if arguments.plot is not None:
        draw_curves(
            arguments.plot,
            reference.losses,
            {name: curve.losses for name, curve in results["curves"].items()},
            level=(f"unigram entropy of {results['text']}", entropy),
            unit="loss (nats per token)",
        )


if __name__ == "__main__":
    sys.exit(main())
