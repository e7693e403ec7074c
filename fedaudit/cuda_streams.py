"""CUDA streams that are kept for the life of the process, one for each purpose.

Torch hands out 32 streams a device in turn and then begins again. Code that takes a new stream each time gets, sooner
or later, one that another thread is using. That ends a run when the stream is being captured: a CUDA graph must not
record another thread's work. So a stream is taken once for each purpose here, and no two purposes share one.

Recordings that are replayed side by side must not be captured on one stream: cuBLAS keeps a workspace for each stream,
a recording uses that of the stream on which it was captured, and two kernels in one workspace wait for each other for
ever. So every stream on which recordings are replayed has a stream of its own on which they are captured.

Streams run side by side as far as the driver gives a process connections to the device. It gives eight, but fewer where
the device is shared through NVIDIA's Multi-Process Service: ten ResNet-18 that train side by side then took twice as
long, and as long as alone when eight were asked for (docs/results/speed.md). So this module asks for eight in any case,
when it is imported, before CUDA starts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping
from typing import Any

import torch

TRANSFER = "transfer"  # messages are copied to main memory on it, from any thread
LANES = 12  # streams for what runs side by side, and as many to capture on; if there is more of it, it shares them
CAPTURE = "capture for"
POOL = 32  # streams that torch hands out before the first one comes again
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # the driver's variable for connections of a process to the device
ENOUGH = 8  # what the driver gives a process that shares the device with nobody


def ask_for_connections(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask for as many connections to the device as a process has alone, unless somebody has asked already."""
    environment.setdefault(CONNECTIONS, str(ENOUGH))


ask_for_connections()
_kept: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()


def kept_stream(purpose: str, device: torch.device) -> Any:
    """Return the stream of a device for this purpose. It is always the same one, and no other purpose uses it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if (index, purpose) not in _kept:
            _kept[index, purpose] = _unused_stream(index)
        return _kept[index, purpose]


def capture_stream() -> Any:
    """Return the stream on which to capture a recording that will be replayed on the current stream."""
    current = torch.cuda.current_stream()
    return kept_stream(f"{CAPTURE} {current.cuda_stream}", current.device)


def lane(number: int, device: torch.device) -> Any:
    """Return the stream for number `number` of what runs side by side: descents, or models in training."""
    return kept_stream(f"lane {number % LANES}", device)


def _unused_stream(index: int) -> Any:
    """Return a stream that no purpose has yet. Other code may have taken streams from torch's pool in between."""
    used = {stream.cuda_stream for (at, _), stream in _kept.items() if at == index}
    for _ in range(POOL):
        stream: Any = torch.cuda.Stream(index)
        if stream.cuda_stream not in used:
            return stream
    raise RuntimeError(f"All {POOL} CUDA streams of device {index} have a purpose already. Use fewer purposes.")
