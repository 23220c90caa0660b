"""Booster, the public entry point for training."""

from .booster import Booster

__all__ = ["Booster"]
