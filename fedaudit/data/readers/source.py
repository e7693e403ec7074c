"""Describes where a known data set may lie, and turns errors of decoders into errors that name the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.data.readers.arrays import tensors
from fedaudit.data.records import Dataset, Facts
from fedaudit.errors import DataError, FedauditError

TEN = tuple("0123456789")  # the names of ten digits

Reader = Callable[[int | None], Dataset]  # the size is a hint for readers that decode image by image


@dataclass(frozen=True)
class Layout:
    """One way in which the files of a data set may be stored: all of `files` in `folder`."""

    folder: Path
    files: tuple[tuple[str, ...], ...]  # for each file the names it may have; messages use the first
    read: Callable[[list[Path], int | None], Dataset]

    def lacking(self) -> list[str]:
        return [alternatives[0] for alternatives in self.files if self._first(alternatives) is None]

    def reader(self) -> Reader:
        return partial(self.read, [self.folder / (self._first(names) or names[0]) for names in self.files])

    def _first(self, alternatives: tuple[str, ...]) -> str | None:
        return next((name for name in alternatives if (self.folder / name).exists()), None)


@dataclass(frozen=True)
class Source:
    facts: Facts
    layouts: Callable[[Path], list[Layout]]
    needs: str  # which files, where
    usually: str  # how to get them
    download: tuple[tuple[str, dict[str, Any]], ...] = ()  # torchvision classes that fetch it into the root

    def find(self, root: Path) -> Reader | None:
        return next((layout.reader() for layout in self.layouts(root) if not layout.lacking()), None)

    def missing(self, root: Path) -> str:
        looked = []
        for layout in self.layouts(root):
            lacking = layout.lacking()
            looked.append(
                f"{layout.folder} ({'lacks ' + ', '.join(lacking) if layout.folder.is_dir() else 'no such folder'})"
            )
        fetch = f" load({self.facts.name!r}, ROOT, download=True) does that too." if self.download else ""
        return (
            f"Data set {self.facts.name!r} is not there. Looked in {'; '.join(looked)}. Put {self.needs}. "
            f"Usually: {self.usually} with ROOT = {root}.{fetch}"
        )


@contextmanager
def decoding(name: str, path: Path) -> Iterator[None]:
    """Turn every error of a decoder into a DataError. Put nothing else in the block: the file is at fault."""
    try:
        yield
    except FedauditError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(
            f"Data set {name!r}: cannot read {path} ({why}). The file is damaged or of another format; "
            "remove it and fetch it again."
        ) from error


def damaged(name: str, path: Path, why: str) -> DataError:
    return DataError(f"Data set {name!r}: {path} {why}. The file is damaged or of another format; fetch it again.")


def image_dataset(
    name: str, x: Any, y: Any, test_x: Any, test_y: Any, class_names: Sequence[str], **domains: Any
) -> Dataset:
    x, test_x = (np.asarray(array, dtype=np.uint8) for array in (x, test_x))
    return tensors(name, x, y, test_x, test_y, class_names, **domains)
