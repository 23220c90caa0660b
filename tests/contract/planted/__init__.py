"""Planted faults by package; every file here has some. To add one, see ../mutations.py."""

from importlib import import_module
from pkgutil import iter_modules

from ..mutations import Mutation


def planted(file: str) -> dict[str, Mutation]:
    """Return the faults of a file by name, prefixed by the file's name."""
    return {
        f"{file}: {name}": mutation for name, mutation in import_module(f"{__name__}.{file}").FAULTS.items()
    }


FAULTS = {name: mutation for file in iter_modules(__path__) for name, mutation in planted(file.name).items()}
