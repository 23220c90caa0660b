"""Large pages for long buffers of the CPU.

[Note: large pages] Linux gives memory in pages of 4 KiB, unless it is asked for pages of 2 MiB (madvise(2), where
transparent huge pages are "madvise" or "always"). Whoever reads another process's memory pays for each: of 128 MiB on
two ranks (2 cores) gathering took 5 ms with large pages and 14 without, averaging 10 and 21; on four ranks 15 and 32,
21 and 44. They are given when memory is first written to.
"""

import ctypes
import mmap
import os

from torch import Tensor

_PAGE = 2 * 1024**2
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # None elsewhere than on Linux
_LIBRARY = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def large_pages(memory: Tensor) -> Tensor:
    """Ask for large pages for a new tensor, nothing of which was written to; it is returned. No effect off the CPU."""
    start = -(-memory.data_ptr() // _PAGE) * _PAGE  # whole pages within
    nbytes = (memory.data_ptr() + memory.nbytes - start) // _PAGE * _PAGE
    if _LIBRARY is not None and _ADVICE is not None and memory.device.type == "cpu" and nbytes > 0:
        # A kernel that has none refuses, and all stays as it is.
        _LIBRARY.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), ctypes.c_int(_ADVICE))
    return memory
