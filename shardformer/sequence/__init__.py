"""Sequence parallelism: layers that hold a part of the sequence on each rank, and attention over all of it."""
