"""What makes a process fast that trains: it keeps freed memory, and does not load what it does not need."""

import ctypes
import sys

from torch.optim import Optimizer

# glibc's mallopt(3): parameters, and "never" for both thresholds
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
NEVER, PAD = 2**31 - 1, 64 * 2**20


def keep_freed_memory() -> bool:
    """Have malloc reuse large blocks; True where that could be set (Linux with glibc).

    Activations of a few MB are allocated and freed in every step. By default malloc hands them back to the
    kernel, and each step pays thousands of page faults to get them again.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    wanted = {M_TRIM_THRESHOLD: NEVER, M_MMAP_THRESHOLD: 2**30, M_TOP_PAD: PAD}
    set_ = [mallopt(key, value) for key, value in wanted.items()]  # all of them, even if one is refused
    return all(set_)


def without_compiler() -> None:
    """Let PyTorch's optimisers work without its compiler, which takes two seconds to import.

    Some of their methods are marked as not to be compiled. When such a method is called for the first time, the mark
    imports the compiler and leaves, on the method, the function to call from then on; here that is the method itself.
    Where a version of PyTorch does it in another way, this changes nothing.
    """
    for method in vars(Optimizer).values():
        if (plain := getattr(method, "__wrapped__", None)) is not None:
            vars(plain).setdefault("__dynamo_disable", plain)
