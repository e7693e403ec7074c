"""Checks of users' arrays, which make a data set of them: from a file, a user's function or another library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.records import Dataset
from fedaudit.errors import DataError


@dataclass(frozen=True, eq=False)
class Arrays:
    """Records and labels, as NumPy arrays, torch tensors or lists.

    `x` holds images, uint8 or floats from 0 to 1, of shape (N, H, W), (N, H, W, C) or (N, C, H, W); or rows of numbers,
    floats of shape (N, F); or texts as token ids, whole numbers of shape (N, L), padded with 0. `y` holds the labels 0,
    1, ... If no test set is given, one record in five of each class (and domain) becomes the test set.

    Rows are not scaled. A mean and a deviation computed from the data would be a release that no ledger counts. Scale
    rows yourself, by numbers that are known without the data.
    """

    x: Any
    y: Any
    test_x: Any = None
    test_y: Any = None
    domain: Any = None  # of each record: whole numbers or strings
    test_domain: Any = None
    class_names: Sequence[str] | None = None
    vocabulary: int | None = None  # the number of token ids; None: the largest id plus one
    person: Any = None  # of each record: whose it is, as whole numbers or strings


def dataset_of(name: str, given: Arrays) -> Dataset:
    """Return the data set of these arrays. Raise a DataError that names the array that is wrong."""
    arrays = {
        key: _array(name, key, getattr(given, key))
        for key in ("x", "y", "test_x", "test_y", "domain", "test_domain", "person")
        if getattr(given, key) is not None
    }
    for key, partner in (("x", "x"), ("y", "y"), ("test_y", "test_x"), ("test_x", "test_y"), ("domain", "test_domain")):
        if key not in arrays and (partner == key or partner in arrays):
            raise DataError(f"Data set {name!r}: there is no array {key}. Give it beside {partner}.")
    x, y = _records(name, "x", arrays["x"]), _labels(name, "y", arrays["y"], len(arrays["x"]))
    named, domain = _domains(name, "domain", arrays.get("domain"), len(y))
    _, person = _domains(name, "person", arrays.get("person"), len(y))
    of_names, of_test = _domains(name, "test_domain", arrays.get("test_domain"), len(arrays.get("test_y", ())))
    if "test_x" in arrays:
        test_x = _records(name, "test_x", arrays["test_x"])
        test_y = _labels(name, "test_y", arrays["test_y"], len(test_x))
        if of_test is not None and named is not None and of_names is not None:
            place = {value: i for i, value in enumerate(named)}
            of_test = np.array([place.get(value, len(named)) for value in of_names], dtype=np.int64)[of_test]
    else:
        test = one_in_five(y) if domain is None else one_in_five(domain, y)
        x, y, test_x, test_y = x[~test], y[~test], x[test], y[test]
        domain, of_test = (None, None) if domain is None else (domain[~test], domain[test])
        person = None if person is None else person[~test]
    class_names = _class_names(name, y, test_y, given.class_names)
    domains: dict[str, Any] = {}
    if domain is not None and named is not None:
        held, index = np.unique(domain, return_inverse=True)
        domains = {"domain": torch.from_numpy(index), "domain_names": tuple(named[d] for d in held)}
        domains["test_domain"] = None if of_test is None else known_domains(held, of_test)
    vocabulary = _vocabulary(name, given.vocabulary, x, test_x)
    of_person = None if person is None else torch.from_numpy(np.array(person, dtype=np.int64))
    return tensors(name, x, y, test_x, test_y, class_names, vocabulary=vocabulary, person=of_person, **domains)


def tensors(name: str, x: Any, y: Any, test_x: Any, test_y: Any, class_names: Sequence[str], **more: Any) -> Dataset:
    """Return a data set of checked arrays. Its tensors are copies, independent of a file's buffer."""
    of_x, of_test_x = (torch.from_numpy(np.array(array, order="C")) for array in (x, test_x))
    of_y, of_test_y = (torch.from_numpy(np.array(array, dtype=np.int64, order="C")) for array in (y, test_y))
    return Dataset(name, of_x, of_y, of_test_x, of_test_y, tuple(class_names), **more)


def one_in_five(*keys: np.ndarray) -> np.ndarray:
    """Return a mask that makes a test set for data without one: records 3, 8, 13, ... of every class (and domain).

    It depends only on the order of the records, not on a seed or on the version of a random generator.
    A group of n records gives round(n / 5).
    """
    _, group = np.unique(np.stack(keys), axis=1, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    sizes = np.bincount(group.ravel())
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank % 5 == 2


def known_domains(held: np.ndarray, of_test: np.ndarray) -> Tensor | None:
    """Return the domains of the test records as indices into those `held` in training; None if one is not there."""
    if not np.isin(of_test, held).all():
        return None
    return torch.from_numpy(np.searchsorted(held, of_test).astype(np.int64))


# --- one array ---------------------------------------------------------------------------------------------------


def _array(name: str, key: str, value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        return np.asarray(value.detach().cpu().numpy())
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as e:  # lists of different lengths
        raise DataError(f"Data set {name!r}: {key} is not an array ({e}). Make all records equally long.") from e
    if array.dtype.kind == "O":
        raise DataError(
            f"Data set {name!r}: array {key} holds Python objects (a {type(array.flat[0]).__name__}, for one), not "
            "numbers." + (" Make all records equally long; pad texts with 0." if key.endswith("x") else "")
            if array.size
            else f"Data set {name!r}: array {key} is empty. Give at least one record."
        )
    return array


def off(name: str, key: str, array: np.ndarray, wanted: str) -> DataError:
    return DataError(f"Data set {name!r}: array {key} is {array.dtype} of shape {array.shape}; it has to be {wanted}.")


def _records(name: str, key: str, x: np.ndarray) -> np.ndarray:
    wanted = (
        "uint8, or float from 0 to 1, of shape (N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1 or 3 (images); float "
        "of shape (N, F) (rows of numbers); or whole numbers of shape (N, L) (token ids)"
    )
    if x.ndim == 2 and x.size and x.dtype.kind in "fbiu" and x.dtype != np.uint8:
        return x.astype(np.float32 if x.dtype.kind in "fb" else np.int64)
    first, last = x.ndim == 4 and x.shape[1] in (1, 3), x.ndim == 4 and x.shape[3] in (1, 3)
    if not x.size or (x.dtype != np.uint8 and x.dtype.kind != "f") or not (x.ndim == 3 or first or last):
        raise off(name, key, x, wanted)
    if first and last:
        raise off(name, key, x, "clear about its axis of channels: here it may be the second or the last")
    if x.dtype.kind == "f":
        low, high = float(x.min()), float(x.max())
        if not (low >= 0.0 and high <= 1.0):  # also when they are not numbers
            raise DataError(
                f"Data set {name!r}: array {key} has floats from {low:g} to {high:g}; they have to lie from 0 to 1, "
                "or be uint8."
            )
        x = np.round(x.astype(np.float32) * 255.0).astype(np.uint8)
    if x.ndim == 3:
        return x[:, None]
    return x if first else x.transpose(0, 3, 1, 2)


def _labels(name: str, key: str, y: np.ndarray, rows: int) -> np.ndarray:
    if y.dtype.kind not in "iub" or y.shape != (rows,):
        raise off(name, key, y, f"whole numbers of shape ({rows},), one for each record")
    if rows and (int(y.min()) < 0 or int(y.max()) >= 2**31):
        raise DataError(
            f"Data set {name!r}: array {key} has labels from {y.min()} to {y.max()}; they have to be 0, 1, ..."
        )
    return y.astype(np.int64)


def _domains(
    name: str, key: str, domain: np.ndarray | None, rows: int
) -> tuple[tuple[str, ...] | None, np.ndarray | None]:
    """Return the names of the domains (or persons), and for each record the index of its domain."""
    if domain is None:
        return None, None
    if domain.shape != (rows,) or domain.dtype.kind not in "iuU":
        raise off(name, key, domain, f"one whole number or string for each of the {rows} records")
    names, index = np.unique(domain, return_inverse=True)
    return tuple(str(value) for value in names), index


def _class_names(name: str, y: np.ndarray, test_y: np.ndarray, given: Sequence[str] | None) -> list[str]:
    seen = np.unique(np.concatenate([y, test_y]))
    if given is not None:
        return [str(text) for text in given]
    if seen[0] != 0 or seen[-1] != len(seen) - 1:
        raise DataError(
            f"Data set {name!r}: the labels in y run from {seen[0]} to {seen[-1]} with {len(seen)} different values; "
            "they have to be 0, 1, ... without a gap. numpy.unique(y, return_inverse=True)[1] renumbers them."
        )
    return [str(label) for label in seen]


def _vocabulary(name: str, given: int | None, *texts: np.ndarray) -> int:
    if texts[0].dtype != np.int64:
        if given is not None:
            raise DataError(
                f"Data set {name!r}: a vocabulary of {given} was given, but x holds {texts[0].dtype}, not token ids. "
                "Give whole numbers of shape (N, L), or leave the vocabulary out."
            )
        return 0
    return max(int(x.max()) for x in texts) + 1 if given is None else int(given)
