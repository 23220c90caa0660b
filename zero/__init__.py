"""Sharded optimizers: from gradients to updated parameters."""
