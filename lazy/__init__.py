"""Lazy initialization: build a model without memory, then materialize the local shard on each rank."""

from .context import LazyInitContext, materialize

__all__ = ["LazyInitContext", "materialize"]
