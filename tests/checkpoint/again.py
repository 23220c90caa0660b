"""A run that is saved again at once by the ranks that loaded it."""

from pathlib import Path
from typing import Any

from .runs import Run, config_of


def save_again(directory: Path, out: Path, plugin: dict[str, Any], config: dict[str, Any]) -> None:
    """Load the newest checkpoint under a layout, and save it under that."""
    run = Run(config_of(**config), seed=7, **plugin)
    resumed = run.booster.load_checkpoint(directory, **run.everything)
    assert resumed is not None
    run.booster.save_checkpoint(out, resumed.step, **run.everything, user=resumed.user).wait()
