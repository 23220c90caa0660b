"""Lazy initialization: models built without memory, of which each rank materializes its part."""

from .context import LazyInitContext, materialize

__all__ = ["LazyInitContext", "materialize"]
