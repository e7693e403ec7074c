"""CUDA streams that are kept for the life of the process, one for each purpose.

Torch hands out 32 streams a device in turn and then begins again. Code that takes a new stream each time gets, sooner
or later, one that another thread is using. That ends a run when the stream is being captured: a CUDA graph must not
record another thread's work. So a stream is taken once for each purpose here, and no two purposes share one.

Recordings that are replayed side by side must not be captured on one stream: cuBLAS keeps a workspace for each stream,
a recording uses that of the stream on which it was captured, and two kernels in one workspace wait for each other for
ever. So every stream on which recordings are replayed has a stream of its own on which they are captured.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

TRANSFER = "transfer"  # messages are copied to main memory on it, from any thread
LANES = 12  # streams for descents that run side by side, and as many to capture on; further descents share them
FORKS = 10  # streams for models of one stack that are stepped side by side in a recording; further models share them
URGENT = -1  # the priority of those: torch has a pool of its own for each priority
CAPTURE = "capture for"
POOL = 32  # streams that torch hands out before the first one comes again

_kept: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()


def kept_stream(purpose: str, device: torch.device, priority: int = 0) -> Any:
    """Return the stream of a device for this purpose. It is always the same one, and no other purpose uses it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if (index, purpose) not in _kept:
            _kept[index, purpose] = _unused_stream(index, priority)
        return _kept[index, purpose]


def capture_stream() -> Any:
    """Return the stream on which to capture a recording that will be replayed on the current stream."""
    current = torch.cuda.current_stream()
    return kept_stream(f"{CAPTURE} {current.cuda_stream}", current.device)


def lane(number: int, device: torch.device) -> Any:
    """Return the stream for descent `number` of those that run side by side."""
    return kept_stream(f"lane {number % LANES}", device)


def forked_streams(count: int, device: torch.device) -> list[Any]:
    """Return streams on which a recording's work can go side by side, one for each of so many models.

    They belong to the current stream, if recordings are captured on it. Elsewhere the list is empty, because only a
    recording starts its kernels fast enough to fill several streams. It is empty, too, once torch has no more of them.
    """
    current = torch.cuda.current_stream(device)
    with _lock:
        captures = {s.cuda_stream for (_, purpose), s in _kept.items() if purpose.startswith(CAPTURE)}
    if current.cuda_stream not in captures:
        return []
    try:
        mine = [kept_stream(f"fork {n} of {current.cuda_stream}", device, URGENT) for n in range(min(count, FORKS))]
    except RuntimeError:
        return []
    return [mine[number % len(mine)] for number in range(count)]


def _unused_stream(index: int, priority: int) -> Any:
    """Return a stream that no purpose has yet. Other code may have taken streams from torch's pool in between."""
    used = {stream.cuda_stream for (at, _), stream in _kept.items() if at == index}
    for _ in range(POOL):
        stream: Any = torch.cuda.Stream(index, priority=priority)
        if stream.cuda_stream not in used:
            return stream
    raise RuntimeError(f"All {POOL} CUDA streams of device {index} have a purpose already. Use fewer purposes.")
