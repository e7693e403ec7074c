"""Reads scikit-learn's handwritten digits from its package."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedaudit.data.readers.arrays import one_in_five
from fedaudit.data.readers.source import TEN, Layout, Source, image_dataset
from fedaudit.data.records import Dataset, Facts
from fedaudit.shape import Shape


def _digits(_: list[Path], size: int | None) -> Dataset:
    table = _digits_table()  # 64 pixels from 0 to 16, then the class
    x = np.round(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    test = one_in_five(y)
    return image_dataset("digits", x[~test], y[~test], x[test], y[test], TEN)


def _digits_table() -> np.ndarray:
    """Return the rows of scikit-learn's copy. They are read from its file, because importing the package is slow."""
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or []:
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            with gzip.open(path, "rt") as file:
                return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


DIGITS = Source(
    Facts("digits", 10, Shape((1, 8, 8)), 1438, 359, "handwritten digits, inside scikit-learn"),
    lambda root: [Layout(root, (), _digits)],
    "nothing anywhere: it comes with scikit-learn",
    "pip install scikit-learn",
)
