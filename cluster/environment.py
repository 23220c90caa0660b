"""Environment of a process: variables of CUDA, NCCL and gloo, and the limit of open files.

[Note: several communicators] A rank runs kernels of several communicators on its GPU at once: of tensor parallelism,
of the pipeline, of gradients. A prefetched receive occupies the GPU until its sender starts. So the first use of a
kernel must not wait for the device (CUDA_MODULE_LOADING=EAGER), streams must not share a hardware queue with one that
waits (CUDA_DEVICE_MAX_CONNECTIONS), and all ranks must launch in one order (NCCL_LAUNCH_ORDER_IMPLICIT).
"""

import logging
import resource
import socket
import warnings
from collections.abc import MutableMapping

from .device import cuda_has_begun, is_cuda_built, orders_launches

_LOG = logging.getLogger(__name__)
# See [Note: several communicators]. CUDA reads these variables when it is initialized.
CUDA_VARIABLES = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"  # NCCL reads it when it creates its first communicator
INTERFACE = "GLOO_SOCKET_IFNAME"
_OTHER_FILES = 256  # open files of a process for libraries, data, workers and subgroups


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set unset variables where this is safe; give one warning about those that only the user can set.

    The user's values are kept. Called before the device is used. No communication.

    Args:
        environment: `os.environ`.
    """
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return
    chosen: dict[str, str] = {}
    advice: list[str] = []
    if is_cuda_built():
        unset = {name: value for name, value in CUDA_VARIABLES.items() if name not in environment}
        if cuda_has_begun():
            advice += [
                f"export {name}={value}, since CUDA was initialized before" for name, value in unset.items()
            ]
        else:
            chosen |= unset
        if LAUNCH_ORDER not in environment and orders_launches():
            chosen[LAUNCH_ORDER] = "1"
    environment.update(chosen)
    advice += interface_advice(environment, world_size) + file_advice(world_size)
    if int(environment.get("RANK", "0")) == 0 and chosen:
        _LOG.info("environment: set %s", ", ".join(f"{name}={value}" for name, value in chosen.items()))
    if int(environment.get("LOCAL_RANK", "0")) == 0 and advice:
        warnings.warn(f"before starting the processes: {'; '.join(advice)} (docs/cuda.md)", stacklevel=3)


def interface_advice(environment: MutableMapping[str, str], world_size: int) -> list[str]:
    """Advice for several nodes, if gloo would advertise an address that only this node can reach."""
    is_alone = int(environment.get("LOCAL_WORLD_SIZE", world_size)) == world_size
    if is_alone or INTERFACE in environment:
        return []
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "unknown"
    if address != "unknown" and not address.startswith("127."):
        return []
    interface = environment.get(
        "NCCL_SOCKET_IFNAME", "the interface to the other nodes, as `ip addr` lists it"
    )
    return [f"export {INTERFACE}={interface}, since the address of {name} is {address}"]


def file_advice(world_size: int) -> list[str]:
    """Raise the limit of open files as far as needed; return advice if it cannot be raised.

    gloo keeps a connection to every other rank in each of two groups of all ranks.
    """
    needed = 2 * (world_size - 1) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return []
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return [] if most >= needed else [f"ulimit -n {needed}, for {world_size} ranks and a limit of {hard}"]
