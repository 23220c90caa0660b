"""`echelon doctor`: what this machine has for training, what is missing for which option, and whether ranks can talk.

torch is imported inside functions, so that help needs no torch.
"""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from .. import __version__
from ..cluster.releases import NEWEST_TRIED, installed_release, newer_releases
from .console import show_table

GOOD, HINT, BAD = "ok", "hint", "wrong"
_RANK_SECONDS = 60.0
_REQUIRED = ("torch", "transformers", "numpy", "safetensors")
# Optional packages: what they are for, and how to install them.
_OPTIONAL = {
    "peft": ("LoRA: booster.enable_lora", 'pip install "echelon[lora]"'),
    "accelerate": ("echelon.Trainer", 'pip install "echelon[trainer]"'),
    "tensorboard": ("Metrics(tensorboard=…)", "pip install tensorboard"),
    "matplotlib": ("pictures: timelines, curves", 'pip install "echelon[plot]"'),
}
_ON_CUDA = {
    "triton": ("compile_layers, enable_jit_fused", "pip install triton"),
    "flash-attn": ("enable_flash_attention=True", "pip install flash-attn --no-build-isolation"),
    "liger-kernel": ("fused norms and losses", 'pip install "echelon[cuda]"'),
    "apex": ("enable_fused_normalization by apex", "build it from github.com/NVIDIA/apex"),
    "xformers": ("enable_xformers=True", 'pip install "echelon[xformers]"'),
}
# Variables that change how ranks start and communicate.
_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "OMP_", "MKL_", "HF_", "PYTORCH_")
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NPROCS")


class Finding(NamedTuple):
    """One line of the report.

    Args:
        subject: what was looked at.
        state: GOOD, HINT (works without it) or BAD (does not work).
        text: what there is, and what to do unless it is good.
    """

    subject: str
    state: str
    text: str


def doctor(
    processes: Annotated[int, typer.Option(help="Local processes that try a collective; 0 tries none.")] = 2,
) -> None:
    """Report what this machine has for training: packages, devices, limits, environment; and try a collective.

    Run it on every kind of node. Exit status 1 if something does not work; hints are about what is merely missing.
    """
    packages = package_findings()
    can_run = not any(finding.state == BAD for finding in packages)
    findings = [*packages, *(machine_findings(processes) if can_run else ())]
    show_table(f"Echelon {__version__}", ("", "", ""), findings)
    wrong = [finding for finding in findings if finding.state == BAD]
    typer.echo(f"{len(wrong)} wrong" if wrong else "nothing is wrong")
    if wrong:
        raise typer.Exit(1)


def machine_findings(processes: int) -> list[Finding]:
    """Return what needs torch and transformers: devices, limits, environment, and a collective of local processes."""
    return [
        *device_findings(),
        *limit_findings(),
        *environment_findings(os.environ),
        *(collective_findings(processes) if processes > 0 else ()),
    ]


def package_findings() -> list[Finding]:
    """Return the releases of Python and of the packages, and what each missing one is for."""
    findings = [Finding("Python", GOOD, f"{platform.python_version()} at {sys.prefix}")]
    newer = newer_releases()
    for name in _REQUIRED:
        installed = installed_release(name)
        if installed is None:
            findings.append(Finding(name, BAD, f"not installed: pip install {name}"))
        elif name in newer:
            text = f"{installed}, newer than tried ({NEWEST_TRIED[name]}): compare a step by `echelon verify`"
            findings.append(Finding(name, HINT, text))
        else:
            findings.append(Finding(name, GOOD, installed))
    for name, (purpose, command) in (_OPTIONAL | (_ON_CUDA if _has_gpus() else {})).items():
        installed = installed_release(name)
        text = (
            f"not installed, for {purpose}: {command}" if installed is None else f"{installed}, for {purpose}"
        )
        findings.append(Finding(name, HINT if installed is None else GOOD, text))
    return findings


def _has_gpus() -> bool:
    if installed_release("torch") is None:
        return False
    from ..cluster.device import local_devices

    return bool(local_devices())


def device_findings() -> list[Finding]:
    """Return the devices that torch sees, their links, the backends of their collectives, and the precision."""
    import torch
    import torch.distributed as dist

    from ..cluster.device import described, is_cuda, local_devices
    from ..shardformer.fused_code import compiler_errors
    from ..zero.precision import default_precision

    devices = local_devices()
    device = devices[0] if devices else torch.device("cpu")
    findings = [Finding("device", GOOD, described(seen)) for seen in devices or [device]]
    if not devices and (Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi")):
        findings.append(
            Finding(
                "device",
                BAD,
                "there is an NVIDIA driver, but torch sees no GPU: install torch's build for this CUDA (pytorch.org), "
                "and look at CUDA_VISIBLE_DEVICES",
            )
        )
    for name in ("gloo", "nccl"):
        has_it = getattr(dist, f"is_{name}_available")()
        is_needed = name == ("nccl" if is_cuda(device) else "gloo")
        text = "available" if has_it else "this build of torch has none"
        state = GOOD if has_it else BAD if is_needed else HINT
        findings.append(Finding(f"backend {name}", state, text))
    findings.append(
        Finding("precision", GOOD, f"{default_precision(device)} unless a plugin is given another")
    )
    errors = compiler_errors("compile_layers=True", device)
    findings += [Finding("compiler", HINT, error) for error in errors] or [
        Finding("compiler", GOOD, "there is one")
    ]
    return findings


def limit_findings() -> list[Finding]:
    """Return limits of the system that training meets: open files, shared memory for workers, cores."""
    findings = []
    with suppress(ImportError):  # Windows has none
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        advice = ": many ranks and workers need more, `ulimit -n 65536`" if files < 4096 else ""
        findings.append(Finding("open files", HINT if advice else GOOD, f"{files}{advice}"))
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        text = f"{free / 2**30:.1f} GiB free in /dev/shm"
        is_small = free < 2**30
        advice = (
            ": workers of dataloaders pass batches through it, `docker run --shm-size=8g`" if is_small else ""
        )
        findings.append(Finding("shared memory", HINT if is_small else GOOD, text + advice))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    findings.append(Finding("cores", GOOD, f"{cores} for this process"))
    return findings


def environment_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Return the variables that change how ranks start and communicate, with advice on some."""
    findings = [
        Finding(name, GOOD, value)
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) or name in _LAUNCHED
    ]
    if "OMP_NUM_THREADS" not in environment:
        findings.append(
            Finding(
                "OMP_NUM_THREADS", HINT, "not set: on CPUs several ranks take all cores each; set 1 per rank"
            )
        )
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF") not in ("", "OFF"):
        findings.append(
            Finding(
                "TORCH_DISTRIBUTED_DEBUG",
                HINT,
                "checks every collective, which takes time: unset it to train",
            )
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        findings.append(
            Finding(
                "CUDA_LAUNCH_BLOCKING", HINT, "waits for every kernel, nothing overlaps: unset it to train"
            )
        )
    return findings


def collective_findings(processes: int) -> list[Finding]:
    """Start local processes that add up numbers over gloo; return whether that works."""
    from .local_processes import run_on_processes

    subject = f"{processes} processes"
    try:
        sums = run_on_processes(_added, (), num_processes=processes, timeout_seconds=_RANK_SECONDS)
    except OSError as error:
        sums = str(error)
    expected = processes * (processes - 1) / 2
    if isinstance(sums, str):
        last = sums.strip().splitlines()[-1]
        return [
            Finding(
                subject, BAD, f"cannot communicate over gloo: {last}; see the firewall and GLOO_SOCKET_IFNAME"
            )
        ]
    if sums != [expected] * processes:
        return [Finding(subject, BAD, f"add up to {sums}, and should to {expected}")]
    return [Finding(subject, GOOD, "communicate over gloo")]


def _added(rank: int) -> float:
    """Return the sum of all ranks' numbers, by a collective."""
    from ..cluster.gathering import gather_integers

    return float(sum(number for (number,) in gather_integers((rank,))))
