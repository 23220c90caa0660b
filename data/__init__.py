"""Data sharded over the data axis: sample order, dataloaders, and resuming inside an epoch."""
