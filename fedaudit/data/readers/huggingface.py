"""Data sets of Hugging Face's `datasets` library. Nothing is downloaded.

`hf:NAME` is read from the local cache, `hf:PATH` from a data set that was saved on disk or a folder with its files.
Options follow a question mark: `hf:imdb?x=text&y=label&length=64`. By default, the label is the column of class labels,
or a column with a name such as "label". A column "person", or `person=COLUMN`, says whose record each one is. The
records are the column of images, of texts or of token ids, or all columns of numbers together. Between a column of
texts and columns of numbers beside it nobody guesses: name one with `x=`. A text becomes token ids by a hash of its
words. A vocabulary taken from the data would be a release. Id 0 is padding.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl

import numpy as np
import xxhash

from fedaudit.data.readers.arrays import Arrays, dataset_of
from fedaudit.data.records import Dataset
from fedaudit.errors import DataError, SettingError, did_you_mean
from fedaudit.extras import install

LABELS = ("label", "labels", "target", "class")  # usual names of a column of labels
NUMBERING = ("id", "idx", "index")  # names of columns that number the records: nobody learns from them
TRAIN, TEST = ("train",), ("test", "validation", "valid", "dev")  # usual names of splits, best first


@dataclass(frozen=True)
class Choice:
    """The parts of a data set's name: the place of the data, and which columns and splits to use."""

    place: str
    x: str | None = None  # columns, with commas between them
    y: str | None = None
    person: str | None = None  # the column that says whose record each one is; "person" if there is one
    config: str | None = None
    train: str | None = None
    test: str | None = None
    length: int = 64  # for texts: the number of tokens to read
    vocabulary: int = 4096  # for texts: the number of token ids that the hash can give


def choice_of(name: str) -> Choice:
    place, _, text = name.removeprefix("hf:").partition("?")
    pairs = dict(parse_qsl(text, keep_blank_values=True))
    known = [key for key in Choice.__dataclass_fields__ if key != "place"]
    if not place:
        raise SettingError(f"Data set {name!r} has no name or path; write hf:NAME or hf:PATH, as in hf:imdb?x=text.")
    if strange := [key for key in pairs if key not in known]:
        raise SettingError(f"Data set {name!r}: unknown option {strange[0]!r}.{did_you_mean(strange[0], known)}")
    values: dict[str, Any] = dict(pairs)
    for key in ("length", "vocabulary"):
        if key in pairs and not (pairs[key].isdecimal() and 2 <= int(pairs[key]) <= 10**7):
            raise SettingError(f"Data set {name!r}: {key} = {pairs[key]!r}; give a whole number from 2 to 10,000,000.")
        values |= {key: int(pairs[key])} if key in pairs else {}
    return Choice(place, **values)


def there(name: str) -> bool:
    """Return whether the files are there, as far as can be told without the library."""
    place = choice_of(name).place
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
    return Path(place).expanduser().is_dir() or (cache / place.replace("/", "___")).is_dir()


def dataset(name: str, size: int | None) -> Dataset:
    choice = choice_of(name)
    splits = _read(name, choice)
    train = _split(name, splits, choice.train, TRAIN) or (None if choice.train else next(iter(splits), None))
    if train is None:
        raise DataError(f"Data set {name!r} has no split to train on. Choose one that has.")
    test = _split(name, splits, choice.test, TEST)
    test = None if test == train else test
    columns = splits[train].features
    y = _label(name, choice, columns)
    person = _person(name, choice, columns)
    x = _records(name, choice, columns, y, person)
    labels, names = _labels(name, y, columns[y], [splits[s] for s in (train, test) if s])
    if test and choice.test is None and (labels[1] < 0).all():  # a contest's test set, whose labels are secret
        others = [s for s in TEST if s in splits and s not in (train, test)]
        test = others[0] if others else None
        labels, names = _labels(name, y, columns[y], [splits[s] for s in (train, test) if s])
    arrays = [_column(name, choice, x, splits[s], size) for s in (train, test) if s]
    words = choice.vocabulary if _is_text(columns, x) else None
    whose = None if person is None else np.asarray(splits[train][person][:])
    given = Arrays(arrays[0], labels[0], class_names=names, vocabulary=words, person=whose)
    if test:
        given = dataclasses.replace(given, test_x=arrays[1], test_y=labels[1])
    return dataset_of(name, given)


# --- the library -------------------------------------------------------------------------------------------------


def _read(name: str, choice: Choice) -> dict[str, Any]:
    try:
        import datasets
        import huggingface_hub.constants as hub
    except ImportError:
        raise DataError(f"Data set {name!r} needs Hugging Face's library: {install('hf')}.") from None
    folder = Path(choice.place).expanduser()
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    with ExitStack() as stack:
        for module in (hub, datasets.config):  # nothing is downloaded, whatever the environment says
            stack.enter_context(mock.patch.object(module, "HF_HUB_OFFLINE", True, create=True))
        try:
            if saved:
                found = datasets.load_from_disk(str(folder))
            else:
                found = datasets.load_dataset(str(folder) if folder.exists() else choice.place, choice.config)
        except Exception as e:  # the library raises errors of many classes
            why = f"{type(e).__name__}: {e}".strip().splitlines()[0]
            raise DataError(
                f"Data set {name!r} cannot be read ({why}). Give the folder of a data set that save_to_disk wrote, or "
                f"fetch it once: python -c \"import datasets; datasets.load_dataset('{choice.place}')\"."
            ) from e
    return dict(found) if isinstance(found, dict) else {"train": found}


def _split(name: str, splits: dict[str, Any], wanted: str | None, usual: Sequence[str]) -> str | None:
    if wanted is None:
        return next((split for split in usual if split in splits), None)
    if wanted not in splits:
        raise DataError(f"Data set {name!r} has no split {wanted!r}.{did_you_mean(wanted, splits)}")
    return wanted


# --- columns -----------------------------------------------------------------------------------------------------


def _label(name: str, choice: Choice, columns: Any) -> str:
    if choice.y is not None:
        if choice.y not in columns:
            raise DataError(f"Data set {name!r} has no column {choice.y!r}.{did_you_mean(choice.y, columns)}")
        return choice.y
    classes = [key for key, of in columns.items() if type(of).__name__ == "ClassLabel"]
    named = [key for key in LABELS if key in columns]
    if len(classes) == 1 or named:
        return (classes if len(classes) == 1 else named)[0]
    raise DataError(
        f"Data set {name!r}: no column is clearly the label. Write hf:{choice.place}?y=COLUMN, with one of "
        f"{_told(columns)}."
    )


def _person(name: str, choice: Choice, columns: Any) -> str | None:
    if choice.person is not None and choice.person not in columns:
        raise DataError(f"Data set {name!r} has no column {choice.person!r}.{did_you_mean(choice.person, columns)}")
    return choice.person or ("person" if "person" in columns else None)


def _records(name: str, choice: Choice, columns: Any, y: str, person: str | None) -> list[str]:
    rest = [key for key in columns if key not in (y, person)]
    if choice.x is not None:
        wanted = choice.x.split(",")
        if strange := [key for key in wanted if key not in rest]:
            raise DataError(f"Data set {name!r} has no column {strange[0]!r}.{did_you_mean(strange[0], rest)}")
        return wanted
    rest = [key for key in rest if key.lower() not in NUMBERING]
    numbers = [key for key in rest if _kind(columns[key]) == "number"]
    for kind in ("image", "tokens", "text"):
        of = [key for key in rest if _kind(columns[key]) == kind]
        if len(of) == 1 and not (kind == "text" and numbers):
            return of
    if numbers and len(numbers) == len(rest):
        return numbers
    raise DataError(
        f"Data set {name!r}: no column clearly holds the records. Write hf:{choice.place}?x=COLUMN, with one of "
        f"{_told(columns)}."
    )


def _kind(column: Any) -> str:
    dtype = str(getattr(column, "dtype", ""))
    if type(column).__name__ == "Image":
        return "image"
    if type(column).__name__ in ("List", "LargeList", "Sequence"):
        return "tokens" if str(getattr(column.feature, "dtype", "")).startswith(("int", "uint")) else "numbers"
    return "text" if "string" in dtype else "number" if dtype.startswith(("int", "uint", "float", "bool")) else "other"


def _told(columns: Any) -> str:
    return ", ".join(f"{key} ({_kind(of)})" for key, of in columns.items())


def _is_text(columns: Any, x: list[str]) -> bool:
    return _kind(columns[x[0]]) == "text"


def _labels(name: str, y: str, column: Any, parts: Sequence[Any]) -> tuple[list[np.ndarray], list[str] | None]:
    values = [np.asarray(part[y][:]) for part in parts]
    if values[0].dtype.kind in "US":
        names = np.unique(np.concatenate(values))
        return [np.searchsorted(names, of) for of in values], [str(text) for text in names]
    names_of = getattr(column, "names", None)
    return values, None if names_of is None else list(names_of)


def _column(name: str, choice: Choice, x: list[str], rows: Any, size: int | None) -> np.ndarray:
    kind = _kind(rows.features[x[0]])
    if kind == "number":
        return np.stack([np.asarray(rows[key][:], dtype=np.float32) for key in x], axis=1)
    if len(x) > 1:
        raise DataError(f"Data set {name!r}: {', '.join(x)} are columns of {kind}s. Choose only one of them.")
    values = rows[x[0]][:]
    if kind == "text":
        return np.stack([hashed(text, choice.length, choice.vocabulary) for text in values])
    if kind == "tokens":
        longest = min(max(map(len, values)), choice.length)
        return np.stack([np.pad(np.asarray(v[:longest], np.int64), (0, longest - len(v[:longest]))) for v in values])
    if kind == "image":
        return _images(values, size)
    return np.asarray(values, dtype=np.float32)


def hashed(text: str, length: int, vocabulary: int) -> np.ndarray:
    """Return the first words of a text as ids from 1 up, the same on every machine. Two words may share an id."""
    words = re.findall(r"\w+", text.lower())[:length]
    ids = [1 + xxhash.xxh3_64_intdigest(word.encode()) % (vocabulary - 1) for word in words]
    return np.array(ids + [0] * (length - len(ids)), dtype=np.int64)


def _images(images: Sequence[Any], size: int | None) -> np.ndarray:
    grey = all(image.mode in ("1", "L", "LA") for image in images)
    wanted = (size, size) if size else images[0].size
    made = [image.convert("L" if grey else "RGB").resize(wanted) for image in images]
    stacked = np.stack([np.asarray(image, dtype=np.uint8) for image in made])
    return stacked[:, None] if grey else stacked.transpose(0, 3, 1, 2)
