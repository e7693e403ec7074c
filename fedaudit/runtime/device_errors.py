"""This module recognises errors of a device, of its memory and of the compiler, and says how a run goes on after one.

No client is to blame for them. A client whose task ends in one is not left out of the round: the run ends, with
everything up to the last whole round kept, and says with which option it goes on.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import torch

from fedaudit.errors import DeviceError, RunError
from fedaudit.setting import Setting

Crowding = Literal["memory", "device"]  # what is missing where processes beside this one may be the reason
OWN_FAULT = "device-side assert"  # in the text of a device's error that the code of this process has caused
Trouble = Literal[Crowding, "compiler"]
_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
_DEVICE = ("CUDA error", "CUDA driver error", "CUDNN_STATUS", "cuDNN error", "CUBLAS_STATUS", "CUSOLVER_STATUS")
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
_ACCELERATOR: type[BaseException] | None = getattr(torch, "AcceleratorError", None)


def trouble_of(e: BaseException) -> Trouble | None:
    """Return what kind of trouble an error is; None if it is not about the device, its memory or the compiler."""
    if isinstance(e, torch.OutOfMemoryError | MemoryError):
        return "memory"
    if type(e).__module__.startswith(_COMPILERS):
        return "compiler"
    text = str(e)
    if isinstance(e, RuntimeError) and any(word in text for word in _MEMORY):
        return "memory"
    accelerator = _ACCELERATOR is not None and isinstance(e, _ACCELERATOR)
    if accelerator or (isinstance(e, RuntimeError) and any(word in text for word in _DEVICE)):
        return "device"
    return None


def device_error(e: BaseException, who: str) -> DeviceError | None:
    """Return a DeviceError for an error of the device, its memory or the compiler; None for any other.

    `who`: the party whose work it was.
    """
    if isinstance(e, DeviceError):
        return e
    trouble = trouble_of(e)
    return None if trouble is None else DeviceError(trouble, who, first_line(e))


def crowding(e: BaseException) -> Crowding | None:
    """Return "memory" or "device" if processes beside this one may have caused the error, or one that it was raised
    from; None otherwise.

    Memory may be short because of others. And under NVIDIA's Multi-Process Service a process that is killed takes the
    device from those beside it: their next call ends in an error of the device.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = e
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    troubles = [c.trouble if isinstance(c, DeviceError) else trouble_of(c) for c in causes]
    own = any(OWN_FAULT in str(c) for c in causes)
    return "memory" if "memory" in troubles else "device" if "device" in troubles and not own else None


def first_line(e: BaseException) -> str:
    """Return the first line of an error's text, or its type's name if it has no text."""
    lines = str(e).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(e).__name__


def explained(e: DeviceError, t: int, folder: Path, setting: Setting) -> RunError:
    """Return an error that says what failed in round t, what is kept, and the command with which the run goes on."""
    what = {
        "memory": f"{setting.method} ran out of memory",
        "compiler": f"compiling a step of {setting.method} failed",
        "device": f"the device failed under {setting.method}",
    }[e.trouble]
    kept = f"Rounds 1 to {t - 1} are kept" if t > 1 else "No round was finished yet"
    options = _options(e.trouble, setting)
    command = shlex.join(["fedaudit", "run", "--out", str(folder), "--resume", *options])
    last = {
        "memory": "If that is not enough, the model or its batches need a device with more memory.",
        "compiler": "Steps are then carried out one by one, which takes longer, and rounding may differ.",
        "device": "Steps are then carried out one by one, which takes longer. If it fails again, look at the device.",
    }[e.trouble]
    return RunError(
        f"Round {t}, {e.who}: {what} ({e.said}). {kept} in {folder}; the whole text is in {folder / 'errors.log'}. "
        f"Go on with `{command}`. {last}"
    )


def _options(trouble: str, setting: Setting) -> list[str]:
    if trouble != "memory":
        return ["--step", "eager"]
    half = min(setting.together, setting.clients) // 2
    return ["--together", str(half)] if setting.engine == "stacked" and half >= 1 else []
