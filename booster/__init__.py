"""The user's face: Booster."""

from .booster import Booster

__all__ = ["Booster"]
