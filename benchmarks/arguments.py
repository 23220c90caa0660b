"""Arguments shared by the benchmarks; each script adds its own."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from workload import Workload

_TINY = {"hidden": 64, "layers": 4, "vocabulary": 128, "sequence": 16, "rounds": 3, "warmup": 1}


def workload_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser for the size of the workload, and the file for the results."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=256, help="32 lets overhead rule")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, over all ranks")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes and few rounds: shows that it runs, no more"
    )
    return parser


def common_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser for the size of the workload, the rounds, and the output files."""
    parser = workload_parser(description)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="steps of each contender that are not timed")
    parser.add_argument(
        "--matmul",
        choices=["highest", "high", "medium"],
        default="highest",
        help="torch.set_float32_matmul_precision, for all contenders",
    )
    parser.add_argument("--plot", type=Path, help="draw the times to this file")
    return parser


def add_max_norm(parser: argparse.ArgumentParser) -> None:
    """Add the argument of scripts whose contenders all clip their gradients."""
    parser.add_argument(
        "--max_norm", type=float, default=1.0, help="clip gradients to this norm; 0: do not clip"
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments; --quick replaces defaults by tiny values."""
    if parser.parse_args().quick:
        parser.set_defaults(**_TINY)
    return parser.parse_args()


def workload_of(arguments: argparse.Namespace, kind: type[Workload] = Workload, **others: int) -> Workload:
    """Return the workload of the arguments; `others` are values that they lack, before the defaults."""
    sizes = [field.name for field in fields(kind) if field.name in arguments and field.name not in others]
    return kind(**{name: getattr(arguments, name) for name in sizes}, **others)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a benchmark, for its JSON."""
    return {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
