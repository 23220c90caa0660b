"""The composition of parallelisms: one plugin per way of training."""
