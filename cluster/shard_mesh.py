"""The data axis seen as replicas of shards, as torch's fully_shard takes it. The axis itself is mesh.py."""

from torch.distributed.device_mesh import DeviceMesh

from .mesh import ParallelMesh, torch_mesh

REPLICATE, SHARD = "replicate", "shard"


def shard_mesh(mesh: ParallelMesh, shard_size: int) -> DeviceMesh:
    """A torch mesh of all ranks: neighbours in groups of `shard_size` share out what each group has whole.

    Collective over the world where the groups are smaller than it: makes process groups.

    Args:
        mesh: one that has no axis but dp.
        shard_size: divides the world size.

    Returns:
        Of the dims (replicate, shard), or of the data axis alone where one group has all ranks.
    """
    if shard_size == mesh.world_size:
        return mesh.device_mesh["dp"]
    shape = (mesh.world_size // shard_size, shard_size)
    return torch_mesh(mesh.device.type, shape, (REPLICATE, SHARD))
