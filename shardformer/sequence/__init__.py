"""Sequence parallelism: layers compute on a shard of the sequence, attention on the full sequence."""
