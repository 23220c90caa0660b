"""The newest releases of other packages that Echelon was tried with, and one log line for newer ones."""

import logging
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_LOG = logging.getLogger("echelon")
# The newest with a row in docs/releases.md, which runs of the tests make.
NEWEST_TRIED = {"torch": "2.15.0", "transformers": "5.24.0", "peft": "0.21.2"}


@cache
def log_newer_releases() -> None:
    """Log the installed packages that are newer than the newest tried: one line, once per process. No error."""
    if newer := newer_releases():
        _LOG.warning(
            "newer than Echelon was tried with: %s. To compare a step with one process: echelon verify",
            ", ".join(
                f"{name} {installed} (tried up to {NEWEST_TRIED[name]})" for name, installed in newer.items()
            ),
        )


def newer_releases() -> dict[str, str]:
    """Return the releases of installed packages that are newer than the newest tried, by package."""
    installed = {name: installed_release(name) for name in NEWEST_TRIED}
    return {
        name: release
        for name, release in installed.items()
        if release is not None and _numbers(release) > _numbers(NEWEST_TRIED[name])
    }


def installed_release(package: str) -> str | None:
    """Return the release of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, without its build or a suffix: (2, 14, 1) of "2.14.1+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
