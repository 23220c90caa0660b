"""How processes are started."""

import sys


def torchrun(num_processes: int) -> list[str]:
    """The words before a script that start so many processes of it on this machine."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)),
    ]
