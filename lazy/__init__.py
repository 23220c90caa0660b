"""Lazy initialization: models built without memory, of which each rank makes real what it holds."""

from .context import LazyInitContext, materialize

__all__ = ["LazyInitContext", "materialize"]
