"""What torch 2.13 renamed and warns of under the old names. It can go once 2.13 is the oldest torch allowed."""

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
