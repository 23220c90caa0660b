"""Lazy initialization: models built without memory, of which each rank makes real what it holds."""

from .context import LazyInitContext
from .materialize import materialize

__all__ = ["LazyInitContext", "materialize"]
