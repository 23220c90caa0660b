"""ColossalAI's import path of the public layers, which are in `layers`."""

from typing import TYPE_CHECKING

from ..migration.names import names_of
from .layers import *  # noqa: F403

__path__: list[str] = []  # as of a package: ColossalAI's modules below this name are looked for

if not TYPE_CHECKING:
    __getattr__ = names_of("shardformer.layer")  # names that ColossalAI has here
