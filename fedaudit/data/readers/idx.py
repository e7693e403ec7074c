"""Reads idx files: MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedaudit.data.readers.source import TEN, Layout, Source, damaged, decoding, image_dataset
from fedaudit.data.records import Dataset, Facts
from fedaudit.shape import Shape

_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_IDX = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (plain or .gz)"
)


def _idx_file(name: str, path: Path) -> np.ndarray:
    with decoding(name, path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        raw = file.read()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":  # two zeros, then the element type: 8 is unsigned bytes
        raise damaged(name, path, "does not begin as an idx file of unsigned bytes does")
    start = 4 + 4 * raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw[4:start], dtype=">u4", count=len(raw[4:start]) // 4))
    if len(shape) != raw[3] or len(raw) - start != int(np.prod(shape, dtype=object)):
        raise damaged(name, path, f"has {len(raw)} bytes, which does not fit the shape {shape} in its head")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


def _idx(name: str, class_names: Sequence[str], paths: list[Path], size: int | None) -> Dataset:
    arrays = [_idx_file(name, path) for path in paths]
    for path, array, axes in zip(paths, arrays, (3, 1, 3, 1), strict=True):
        if array.ndim != axes:
            raise damaged(name, path, f"has {array.ndim} axes instead of {axes}")
    x, y, test_x, test_y = arrays
    return image_dataset(name, x[:, None], y, test_x[:, None], test_y, class_names)


def _idx_layouts(name: str, folders: Sequence[str], class_names: Sequence[str], root: Path) -> list[Layout]:
    # The root itself is not among the folders: MNIST and Fashion-MNIST have the same file names, and one would
    # silently be taken for the other.
    files = tuple(
        tuple(f"{part}{mark}idx{axes}-ubyte{gz}" for gz in ("", ".gz") for mark in "-.")
        for part, axes in (("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1))
    )
    return [Layout(root / folder, files, partial(_idx, name, class_names)) for folder in folders]


MNIST = Source(
    Facts("mnist", 10, Shape((1, 28, 28)), 60_000, 10_000, "LeCun et al. 1998; idx files"),
    partial(_idx_layouts, "mnist", ("MNIST/raw", "mnist"), TEN),
    f"{_IDX} into one of these folders",
    "torchvision.datasets.MNIST(ROOT, download=True)",
    (("MNIST", {}),),
)
FASHION_MNIST = Source(
    Facts("fashion-mnist", 10, Shape((1, 28, 28)), 60_000, 10_000, "Xiao et al. 2017; idx files"),
    partial(
        _idx_layouts,
        "fashion-mnist",
        ("FashionMNIST/raw", "fashion-mnist", "/usr/share/datasets/fashion-mnist"),
        _FASHION,
    ),
    f"{_IDX} into one of these folders",
    "torchvision.datasets.FashionMNIST(ROOT, download=True), or Debian's package dataset-fashion-mnist,",
    (("FashionMNIST", {}),),
)
