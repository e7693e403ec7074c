"""Keeps freed memory with the process, up to a bound, instead of giving it back to the system each time.

A training step frees and takes the same megabytes over and over, and so do messages. The C library's allocator gives
large pieces back at once. The system then hands them out anew page by page and fills each page with zeros first. In a
run on small models this was a sixth of what the harness cost.
"""

from __future__ import annotations

import ctypes
import functools
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as glibc's malloc.h numbers them
KEPT = 1 << 27  # bytes that may be free at the end of the heap
LARGEST = 1 << 25  # bytes from which a piece is not taken from the heap; glibc takes no more than this


@functools.cache
def keep_freed() -> bool:
    """Ask the C library to keep freed memory from now on, and return whether it agreed.

    Nothing is changed, and the answer is False, if the environment already configures the allocator.
    """
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another system, another C library
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
