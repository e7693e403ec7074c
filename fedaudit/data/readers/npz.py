"""Reads a user's NumPy archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.data.readers.arrays import Arrays, dataset_of
from fedaudit.data.readers.source import damaged, decoding
from fedaudit.data.records import Dataset
from fedaudit.errors import DataError


def read_npz(name: str, path: Path, size: int | None) -> Dataset:
    if not path.is_file():
        raise DataError(
            f"Data set {name!r} is not there: no file {path}. "
            "Write one with numpy.savez(PATH, x=images, y=labels), and test_x, test_y, domain, person if you have them."
        )
    with decoding(name, path):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise damaged(name, path, "holds a single array; write it with numpy.savez(PATH, x=images, y=labels)")
        with archive:
            arrays: dict[str, Any] = {
                key: archive[key] for key in ("x", "y", "test_x", "test_y", "domain", "person") if key in archive.files
            }
    for key, partner in (("x", "x"), ("y", "y"), ("test_y", "test_x"), ("test_x", "test_y")):
        if key not in arrays and (partner == key or partner in arrays):
            raise DataError(f"Data set {name!r}: {path} has no array {key}; add it with numpy.savez.")
    return dataset_of(name, Arrays(**arrays))
