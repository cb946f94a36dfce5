"""Keep freed memory instead of giving it back to the system after every training step."""

import ctypes
import sys

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
