"""Folders of the packages. Everything else about the project is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# `echelon.booster` is `booster/` and so on, which the `__init__.py` of the root shows to tools that read sources. Those
# that look a package up by its name find links in the folder `echelon/` (`ln -s ../booster echelon/booster`).
FOLDERS = (
    "cluster",
    "data",
    "lazy",
    "pipeline",
    "zero",
    "shardformer",
    "checkpoint",
    "plugins",
    "booster",
    "verify",
    "cli",
)


def package_dir() -> dict[str, str]:
    """Return the folder of `echelon` and of each of its direct sub-packages."""
    return {"echelon": "echelon"} | {f"echelon.{folder}": folder for folder in FOLDERS}


def packages() -> list[str]:
    """Return `echelon`, its sub-packages, and every folder with an `__init__.py` below those."""
    nested = [
        f"echelon.{folder}.{name}" for folder in FOLDERS for name in find_packages(where=str(ROOT / folder))
    ]
    return sorted([*package_dir(), *nested])


if __name__ == "__main__":
    setup(
        packages=packages(),
        package_dir=package_dir(),
        package_data={"echelon": ["py.typed"], "echelon.cli": ["matrix.json"]},
    )
