"""Data sharded over the data axis: the order of samples, dataloaders, and the place in them."""
