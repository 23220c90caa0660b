"""Figures of GPUs from their makers' data sheets."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and its links.

    Args:
        product: a part of the device's name.
        teraflops: of dense products in bf16 and fp16, in 10**12 operations per second.
        memory: in GiB.
        bandwidth: of its memory, in 10**9 bytes per second.
        link: to GPUs of the same node, in 10**9 bytes per second and direction.
        network: to other nodes, for each GPU, in 10**9 bytes per second and direction.
        per_node: GPUs of a node.
    """

    product: str
    teraflops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_node: int = 8


# By short names.
GPUS = {
    "a10": Gpu(product="A10", teraflops=125, memory=24, bandwidth=600, link=32, network=12.5),
    "a10g": Gpu(product="A10G", teraflops=70, memory=24, bandwidth=600, link=32, network=12.5),
    "a100": Gpu(product="A100", teraflops=312, memory=80, bandwidth=2039, link=300, network=25),
    "a100-40": Gpu(product="A100-SXM4-40GB", teraflops=312, memory=40, bandwidth=1555, link=300, network=25),
    "a100-40-pcie": Gpu(
        product="A100-PCIE-40GB", teraflops=312, memory=40, bandwidth=1555, link=32, network=25
    ),
    "a800": Gpu(product="A800", teraflops=312, memory=80, bandwidth=2039, link=200, network=25),
    "b200": Gpu(product="B200", teraflops=2250, memory=180, bandwidth=8000, link=900, network=50),
    "gh200": Gpu(product="GH200", teraflops=989, memory=96, bandwidth=4000, link=450, network=50),
    "h100": Gpu(product="H100", teraflops=989, memory=80, bandwidth=3350, link=450, network=50),
    "h100-nvl": Gpu(product="H100 NVL", teraflops=835, memory=94, bandwidth=3900, link=300, network=50),
    "h100-pcie": Gpu(product="H100 PCIe", teraflops=756, memory=80, bandwidth=2000, link=64, network=50),
    "h200": Gpu(product="H200", teraflops=989, memory=141, bandwidth=4800, link=450, network=50),
    "h800": Gpu(product="H800", teraflops=989, memory=80, bandwidth=3350, link=200, network=50),
    "l4": Gpu(product="L4", teraflops=121, memory=24, bandwidth=300, link=32, network=12.5),
    "l40": Gpu(product="L40", teraflops=181, memory=48, bandwidth=864, link=32, network=25),
    "l40s": Gpu(product="L40S", teraflops=362, memory=48, bandwidth=864, link=32, network=25),
    "mi300x": Gpu(product="MI300X", teraflops=1307, memory=192, bandwidth=5300, link=448, network=50),
    "rtx3090": Gpu(product="RTX 3090", teraflops=71, memory=24, bandwidth=936, link=32, network=12.5),
    "rtx4090": Gpu(product="RTX 4090", teraflops=165, memory=24, bandwidth=1008, link=32, network=12.5),
    "v100": Gpu(product="V100", teraflops=125, memory=32, bandwidth=900, link=150, network=12.5),
}


def gpu_of(name: str) -> Gpu | None:
    """Return the GPU of a device's name, the one with the longest product in it; None if none is."""
    matching = [gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.product}\b", name)]
    return max(matching, key=lambda gpu: len(gpu.product), default=None)
