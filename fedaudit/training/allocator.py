"""Memory that was freed stays with the process, up to a bound, instead of going back to the system each time.

A training step frees and takes the same megabytes over and over, and so do messages. The allocator of the C library
gives large pieces back at once, and the system hands them out anew page by page, each filled with zeros first: of a run
on small models that was a sixth of what the harness cost.
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
    """From now on; whether that could be asked for. Who said something else in the environment is left alone."""
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another system, another C library
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
