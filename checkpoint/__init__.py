"""Save and load checkpoints under any parallel layout."""
