"""Users' own data, named by `package.module:function`. The function returns arrays.

It is called without arguments, or with `data_dir` if it has a parameter of that name. It returns `Arrays`, a dict with
their names, or a tuple: (x, y), of which one record in five becomes the test set, or (x, y, test_x, test_y). It is
called in every process of a run, each time with the global generators seeded the same way, and must always return the
same data.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from fedaudit import registry
from fedaudit.data.readers.arrays import Arrays, dataset_of
from fedaudit.data.records import Dataset
from fedaudit.errors import DataError, FedauditError, did_you_mean
from fedaudit.rng import seeded

FORMS = (
    "It has to return (x, y), (x, y, test_x, test_y), a dict with these names, or fedaudit.data.Arrays; arrays are "
    "NumPy's, torch's or lists"
)


def function(path: str) -> Callable[..., Any]:
    """Return the function behind a path. It is imported by the rules of trust."""
    found = registry.outside(path, "data set")
    if not callable(found):
        raise DataError(f"Data set {path!r} is a {type(found).__name__}. Name a function that returns arrays.")
    return found


def dataset(path: str, root: Path) -> Dataset:
    call = function(path)
    try:
        wants = "data_dir" in inspect.signature(call).parameters
    except (TypeError, ValueError):  # a built-in function without a signature
        wants = False
    try:
        with seeded("own data", path):
            given = call(**({"data_dir": root} if wants else {}))
    except FedauditError:
        raise
    except Exception as e:  # a user's code may raise anything
        raise DataError(f"Data set {path!r} fails while it is read: {registry.failure(e)}.") from e
    if isinstance(given, Dataset):
        return dataclasses.replace(given, name=path)
    return dataset_of(path, _arrays(path, given))


def _arrays(path: str, given: Any) -> Arrays:
    if isinstance(given, Arrays):
        return given
    known = [field.name for field in dataclasses.fields(Arrays)]
    if isinstance(given, Mapping):
        if strange := [key for key in given if key not in known]:
            raise DataError(
                f"Data set {path!r} returned an unknown array {strange[0]!r}.{did_you_mean(str(strange[0]), known)}"
            )
        if missing := [key for key in ("x", "y") if given.get(key) is None]:
            raise DataError(f"Data set {path!r} returned no {' and no '.join(missing)}. {FORMS}.")
        return Arrays(**given)
    if isinstance(given, tuple | list) and len(given) in (2, 4) and not any(value is None for value in given):
        return Arrays(*given)
    what = f"{len(given)} values" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
    raise DataError(f"Data set {path!r} returned {'nothing' if given is None else what}, not arrays. {FORMS}.")


def digest(data: Dataset) -> str:
    """Return a digest of all arrays. It changes if a function, or a file that it reads, gives other data."""
    found = xxhash.xxh3_128()
    for part in (data.x, data.y, data.test_x, data.test_y, data.domain, data.test_domain):
        if part is not None:
            found.update(f"{part.dtype} {tuple(part.shape)}\n".encode())
            found.update(part.contiguous().numpy().tobytes())
    if data.person is not None:  # data that says nothing of persons keeps the digest that it had
        found.update(b"person\n" + data.person.contiguous().numpy().tobytes())
    found.update(repr((data.class_names, data.domain_names, data.vocabulary)).encode())
    return found.hexdigest()
