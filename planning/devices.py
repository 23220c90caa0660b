"""Figures of GPUs, from their makers' data sheets: dense 16-bit products, without sparsity."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU and its links.

    Args:
        teraflops: of dense 16-bit products, in 10**12 operations per second.
        memory: in GiB.
        bandwidth: of its memory, in 10**9 bytes per second.
        link: to GPUs of the same node, in 10**9 bytes per second and direction.
        network: to other nodes, for each GPU, in 10**9 bytes per second and direction.
        per_node: GPUs of a node.
    """

    teraflops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_node: int = 8


DEVICES = {
    "a100": Device(teraflops=312, memory=80, bandwidth=2039, link=300, network=25),
    "a100-40": Device(teraflops=312, memory=40, bandwidth=1555, link=300, network=25),
    "b200": Device(teraflops=2250, memory=180, bandwidth=8000, link=900, network=50),
    "h100": Device(teraflops=989, memory=80, bandwidth=3350, link=450, network=50),
    "h200": Device(teraflops=989, memory=141, bandwidth=4800, link=450, network=50),
    "l40s": Device(teraflops=362, memory=48, bandwidth=864, link=32, network=25),
    "mi300x": Device(teraflops=1307, memory=192, bandwidth=5300, link=448, network=50),
    "rtx4090": Device(teraflops=165, memory=24, bandwidth=1008, link=32, network=12.5),
    "v100": Device(teraflops=125, memory=32, bandwidth=900, link=150, network=12.5),
}

# Shares of these figures that good kernels reach.
PRODUCTS, MEMORY, LINKS = 0.7, 0.8, 0.8
# Seconds that an operation takes at least, and a message before its first byte arrives.
LAUNCH, LATENCY = 4e-6, 1.5e-5
