"""`make gpu`: tests and measurements that need a GPU. All parts that do not depend on CUDA also run without one.

    python -m tests.gpu                     # all parts, for nine minutes; repeat to continue where it stopped
    python -m tests.gpu alone ranks4        # some parts
    python -m tests.gpu --table             # only rewrite the table of docs/cuda.md

It needs torch, transformers and their dependencies, and no optional package of Echelon. See docs/cuda.md.
"""

import argparse
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from .results import FAILED, ROOT, Results, commit, measured_on, run_rows, running_since
from .speed import PATIENCE as PATIENCE_OF_ONE
from .table import write_tables

SECONDS = 505.0
PATIENCE = 25.0  # for the current row when a part's time is over
MOURNING = 5.0  # time for ranks to report errors that follow from the end of another rank
HANGS = 60.0  # a row that began this long before the end of the time counts as hanging
STACKS = 2.0  # time for a hanging process to write its stacks
MOST_STARTS = 8
START = "its start"  # name for a failure before the first row
ALL_DONE, TIME_IS_OVER = 0, 3  # exit statuses of a part's process


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of `make gpu`, which runs in its own processes.

    Args:
        seconds: time in which it may begin rows.
        num_ranks: number of processes; 0 is one process without a group.
        hangs: seconds after which a row counts as hanging, even if there is time.
        about: description of the part.
    """

    seconds: float
    num_ranks: int = 0
    hangs: float = 100.0
    about: str


# Estimates for one H200; none of them is measured. Their sum is SECONDS. `speed` needs about twice its share to finish,
# and gets the time that other parts leave.
PARTS = {
    "alone": Part(seconds=130, about="a world of one beside plain torch: precisions, features, kernels"),
    "ranks2": Part(seconds=60, num_ranks=2, about="rows of parity on two ranks"),
    "ranks4": Part(seconds=95, num_ranks=4, about="rows of parity on four ranks"),
    "ranks8": Part(seconds=40, num_ranks=8, about="rows of parity on eight ranks"),
    "many": Part(seconds=60, about="one rank of many under the fake process group: memory, kernels, times"),
    "speed": Part(
        seconds=120, hangs=PATIENCE_OF_ONE + 10, about="tokens/s and memory beside torch; the host's time"
    ),
}


def main() -> int:
    """Run the parts, write the table, and return 1 if a row failed."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Prove and measure on a GPU.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)  # the process of a part
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its child processes are ended on exit
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}: use some of {', '.join(PARTS)}")
    if arguments.within:
        return run_here(arguments.parts[0], arguments.results, seconds=arguments.seconds)
    try:
        arguments.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"results cannot be written, {error}: give another folder, `make gpu RESULTS=…`")
    if not arguments.table:
        for name, value in {**measured_on(), "commit": commit()}.items():
            print(f"{name:13}{value}")
        if not torch.cuda.is_available():
            print("There is no GPU here: rows that only CUDA has are unavailable, all else runs on the CPU.")
        left = run_parts(arguments.parts or list(PARTS), arguments.results, seconds=arguments.seconds)
    status = write_tables(arguments.results)
    if not arguments.table:
        print(f"not over: {', '.join(left)}; the same again goes on with them" if left else "all is over")
        print(f"{time.monotonic() - start:.0f} s in all")
    return status


def run_parts(names: list[str], folder: Path, *, seconds: float) -> list[str]:
    """Run parts one after the other; time that one leaves is available to the next.

    Returns:
        Names of parts with rows left.
    """
    end = time.monotonic() + seconds
    unfinished = []
    for place, name in enumerate(names):
        later = sum(PARTS[following].seconds for following in names[place + 1 :])
        limit = max(PARTS[name].seconds, end - time.monotonic() - later)
        limit = min(limit, end - time.monotonic())
        print(f"\n{name}: {PARTS[name].about}, up to {max(limit, 0):.0f} s", flush=True)
        if limit <= 0 or not run_leg(name, folder, seconds=limit):
            unfinished.append(name)
    return unfinished


def run_leg(name: str, folder: Path, *, seconds: float) -> bool:
    """Run a part until its rows or its time are over; a row that ends the process, or hangs, has failed.

    Returns:
        True if no row is left.
    """
    end, path, part = time.monotonic() + seconds, folder / f"{name}.json", PARTS[name]
    Results(path, name).forget(START)
    for _ in range(MOST_STARTS):
        settle(Results(path, name), "its process was ended from outside")
        if (left := end - time.monotonic()) <= 0:
            return False
        command = [sys.executable, "-m", "tests.gpu", "--within", "--results", str(folder)]
        log = path.with_suffix(".log")
        try:
            code = run_processes(
                [*command, "--seconds", f"{left:.0f}", name],
                part.num_ranks,
                log,
                seconds=left + PATIENCE,
                is_stuck=lambda: time.time() - running_since(path) > part.hangs,
            )
        except (KeyboardInterrupt, SystemExit):
            settle(Results(path, name), "it was broken off", least_seconds=HANGS)
            raise
        if code in (ALL_DONE, TIME_IS_OVER):
            return code == ALL_DONE
        status = "it hung" if code is None else f"its process ended with status {code}"
        why, least = f"{status}; {last_lines(log)}", HANGS if code is None else 0.0
        if not settle(Results(path, name), why, least_seconds=least):
            print(f"{FAILED:13}{START}  {shortened(why)}", flush=True)
            Results(path, name).put(START, FAILED, error=why)
            return False
    return False


def run_processes(
    command: list[str],
    num_ranks: int,
    log: Path,
    *,
    seconds: float,
    is_stuck: Callable[[], bool] = lambda: False,
) -> int | None:
    """Run a command on several ranks of one group; if one of them fails, end the others.

    Args:
        num_ranks: number of ranks; 0 is one process without a group.
        log: file for their standard error.
        is_stuck: polled; if it returns True, the processes are ended, too.

    Returns:
        The first status that is not 0, or 0; None if they were ended after `seconds` or as stuck.
    """
    end, port = time.monotonic() + seconds, free_port()
    with log.open("w") as errors:
        environments = [environment(rank, num_ranks, port) for rank in range(max(num_ranks, 1))]
        options = {"cwd": ROOT, "stderr": errors, "start_new_session": True}
        processes = [subprocess.Popen(command, env=variables, **options) for variables in environments]
        try:
            while True:
                codes = [process.poll() for process in processes]
                if failed := [code for code in codes if code]:
                    end = min(end, time.monotonic() + MOURNING)
                if all(code is not None for code in codes):
                    return failed[0] if failed else 0
                if time.monotonic() > end or is_stuck():
                    if not failed:  # faulthandler writes the stacks
                        signal_all(processes, signal.SIGABRT)
                        time.sleep(STACKS)
                    return failed[0] if failed else None
                time.sleep(0.1)
        finally:
            signal_all(processes, signal.SIGKILL)
            for process in processes:
                process.wait()


def signal_all(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to processes and to their child processes."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def run_here(name: str, folder: Path, *, seconds: float) -> int:
    """Run a part's rows in this process and return its status."""
    faulthandler.enable()
    results = Results(folder / f"{name}.json", name)
    if PARTS[name].num_ranks:
        from . import ranks

        return ALL_DONE if ranks.run(results, seconds=seconds) else TIME_IS_OVER
    module = import_module(f".{name}", __package__)
    return ALL_DONE if run_rows(results, module.rows(), seconds=seconds) else TIME_IS_OVER


def environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment of a part's process."""
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if num_ranks:
        size, number = str(num_ranks), str(rank)
        variables |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # With several ranks per GPU no kernel waits for another rank, and loading all kernels eagerly takes long.
        if torch.cuda.device_count() < num_ranks:
            variables |= {"CUDA_MODULE_LOADING": "LAZY"}
    return {**os.environ, **variables}


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settle(results: Results, why: str, *, least_seconds: float = 0.0) -> int:
    """Mark rows that began and did not end as failed; rows that began less than `least_seconds` ago are tried again.

    Returns:
        The number of such rows.
    """
    rows = results.running()
    for row in rows:
        if time.time() - results.rows[row]["begun"] < least_seconds:
            results.forget(row)
            continue
        print(f"{FAILED:13}{row}  {shortened(why)}", flush=True)
        results.put(row, FAILED, error=why)
    return len(rows)


def shortened(text: str) -> str:
    """Return the beginning and the end of a text."""
    return text if len(text) < 600 else f"{text[:200]} … {text[-400:]}"


def last_lines(log: Path) -> str:
    """Return the end of a part's standard error: the errors of ranks if it has any, else their stacks."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    rank_errors = [line for line in lines if line.startswith("rank ")]
    for at, line in enumerate(lines):
        if not rank_errors and line.startswith("Current thread"):
            return " | ".join(text.strip() for text in lines[at + 1 : at + 9])[-3000:]
    return " | ".join((rank_errors or lines)[-6:])[-3000:]


if __name__ == "__main__":
    sys.exit(main())
