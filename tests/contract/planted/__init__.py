"""Planted faults by package: every file here has some. What a row is, and how to add one: ../mutations.py."""

from importlib import import_module
from pkgutil import iter_modules

from ..mutations import Mutation

FAULTS: dict[str, Mutation] = {
    f"{found.name}: {name}": fault
    for found in iter_modules(__path__)
    for name, fault in import_module(f"{__name__}.{found.name}").FAULTS.items()
}
