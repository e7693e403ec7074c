"""Results that the processes of one audit leave for each other. They would come out alike in every one of them.

Each lies in a file whose name is a digest of all that decides it. The folder is the audit's own and ends with it, so
that no other code or version ever reads it.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

_folder: Path | None = None


def share(folder: Path | None) -> None:
    """Leave results in this folder from now on, and take from it what other processes left. None: do neither."""
    global _folder
    _folder = folder


def from_others(key: str) -> bytes | None:
    """Return what was left under this name; None if there is nothing."""
    if _folder is None:
        return None
    try:
        return (_folder / key).read_bytes()
    except OSError:  # nobody left it yet
        return None


def for_others(key: str, data: bytes) -> None:
    """Leave data under this name, if there is a folder for it."""
    if _folder is None:
        return
    with contextlib.suppress(OSError):  # a full disk, or the folder is gone: the others compute it themselves
        with tempfile.NamedTemporaryFile(dir=_folder, delete=False) as file:
            file.write(data)
        Path(file.name).replace(_folder / key)  # readers see all of it or nothing
