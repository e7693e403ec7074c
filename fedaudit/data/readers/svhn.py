"""Reads the cropped digits of SVHN from MATLAB's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedaudit.data.readers.source import TEN, Layout, Source, damaged, decoding, image_dataset
from fedaudit.data.records import Dataset, Facts
from fedaudit.shape import Shape


def _svhn_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import loadmat

    with decoding("svhn", path):
        mat = loadmat(path, variable_names=["X", "y"])
        x, y = np.asarray(mat["X"]), np.asarray(mat["y"]).ravel()
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2] != 3 or y.dtype.kind not in "iuf":
        raise damaged(
            "svhn", path, f"has X of {x.dtype} {x.shape} and y of {y.dtype}; X must be uint8 (H, W, 3, N), y numbers"
        )
    return x.transpose(3, 2, 0, 1), np.where(y == 10, 0, y)  # the files write the digit 0 as 10


def _svhn(paths: list[Path], size: int | None) -> Dataset:
    return image_dataset("svhn", *_svhn_file(paths[0]), *_svhn_file(paths[1]), TEN)


def _svhn_layouts(root: Path) -> list[Layout]:
    files = (("train_32x32.mat",), ("test_32x32.mat",))
    return [Layout(folder, files, _svhn) for folder in (root, root / "svhn", root / "SVHN")]


SVHN = Source(
    Facts("svhn", 10, Shape((3, 32, 32)), 73_257, 26_032, "Netzer et al. 2011, cropped digits; .mat files"),
    _svhn_layouts,
    "train_32x32.mat and test_32x32.mat into one of these folders",
    "torchvision.datasets.SVHN(ROOT, split='train', download=True) and the same with split='test',",
    tuple(("SVHN", arguments) for arguments in ({"split": "train"}, {"split": "test"})),
)
