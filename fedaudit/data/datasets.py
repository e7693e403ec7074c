"""Data sets found by name and loaded into memory: known images as uint8, and users' own files and functions.

Files are read from their folders and never downloaded unless `download=True` says so. This module reads no pickle: the
CIFAR archives in the pickle layout are left to torchvision, which checks their MD5 sums first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit.data.readers import huggingface, own_function
from fedaudit.data.readers.cifar import CIFAR10, CIFAR100
from fedaudit.data.readers.digits import DIGITS
from fedaudit.data.readers.folder import read_folder
from fedaudit.data.readers.idx import FASHION_MNIST, MNIST
from fedaudit.data.readers.npz import read_npz
from fedaudit.data.readers.source import Source
from fedaudit.data.readers.svhn import SVHN
from fedaudit.data.readers.tiny_imagenet import TINY_IMAGENET
from fedaudit.data.records import Dataset, Facts
from fedaudit.errors import DataError, SettingError, unknown
from fedaudit.registry import is_path
from fedaudit.shape import Shape

# --- the public functions ---------------------------------------------------------------------------------------


def load(name: str, root: Path | str = ".data", *, size: int | None = None, download: bool = False) -> Dataset:
    """Return the data set `name`, read from files under `root`; `size` resizes to size x size (bilinear, antialiased).

    Names are those of `names()`, or `package.module:function` of your own; the PATH of `folder:PATH` and `npz:PATH` is
    relative to the working directory.
    The last few results stay in memory and are shared, so do not write into their tensors.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise SettingError(f"Data set {name!r}: size is {size!r}; give a positive whole number of pixels, or None.")
    base = Path(root).expanduser().resolve()
    kind, path = _split(name)
    if download and path is None and kind in _SOURCES and not available(kind, base):
        _download(_SOURCES[kind], base)
    return _load(name, kind, base if path is None else path, size, stamp(name))


def stamp(name: str) -> Any:
    """Return what changes when a user's data set of this name becomes another one: the function behind it, or when its
    files were written, and their sizes. It is None of all others.
    """
    kind, path = _split(name)
    if kind == "own":
        return own_function.function(name)
    if path is None or not path.exists():
        return None
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return tuple((str(file), at.st_mtime_ns, at.st_size) for file, at in ((f, f.stat()) for f in files if f.exists()))


def names() -> tuple[str, ...]:
    return (*_SOURCES, *(f"{kind}:PATH" for kind in _OWN), "hf:NAME")


def describe(name: str) -> Facts:
    """Return the facts that are known without reading files. They are None for users' own files and functions."""
    kind, path = _split(name)
    if kind in ("own", "hf"):
        source = "your own function" if kind == "own" else HF
        return Facts(name, None, None, None, None, source)
    return _SOURCES[kind].facts if path is None else Facts(name, None, None, None, None, _OWN[kind].source)


def facts_of(name: str, root: Path | str = ".data", *, size: int | None = None) -> Facts:
    """Return the facts of a data set, with images of side `size`. A user's own data set is read for them."""
    facts = describe(name)
    if facts.classes is not None and facts.shape is not None:
        return facts if not size else dataclasses.replace(facts, shape=Shape((facts.shape[0], size, size)))
    data = load(name, root, size=size)
    return Facts(name, data.classes, data.shape, len(data.y), len(data.test_y), facts.source)


def is_own(name: str) -> bool:
    """Return whether a user's own function gives the data set. Its code may change under the same name."""
    return _split(name)[0] == "own"


def is_yours(name: str) -> bool:
    """Return whether a user's function, files or cache give the data set. Its name may stand for other data later."""
    return _split(name)[0] not in _SOURCES


def available(name: str, root: Path | str = ".data") -> bool:
    """Return whether the files are there. They are not opened: a damaged file raises when it is loaded."""
    kind, path = _split(name)
    if kind == "own":
        return True  # only running the function could tell
    if kind == "hf":
        return huggingface.there(name)
    if path is not None:
        return path.is_dir() if kind == "folder" else path.is_file()
    return _SOURCES[kind].find(Path(root).expanduser().resolve()) is not None


@dataclass(frozen=True)
class _OwnFiles:
    source: str
    example: str
    read: Callable[[str, Path, int | None], Dataset]


def _split(name: str) -> tuple[str, Path | None]:
    """Return the kind and the path that a name stands for: ('mnist', None) or ('folder', absolute path)."""
    kind, colon, path = name.partition(":")
    if kind in _OWN:
        if not path:
            raise SettingError(f"Data set {name!r} has no path; write {kind}:PATH, as in {_OWN[kind].example}.")
        return kind, Path(path).expanduser().resolve()
    if kind == "hf":
        huggingface.choice_of(name)
        return "hf", None
    if is_path(name):
        return "own", None
    if colon or kind not in _SOURCES:
        raise SettingError(unknown("data set", name, names()) + " For your own data, write package.module:function.")
    return kind, None


@lru_cache(maxsize=4)
def _load(name: str, kind: str, where: Path, size: int | None, stamp: Any) -> Dataset:
    if kind == "own":
        return _resized(own_function.dataset(name, where), size)
    if kind == "hf":
        return _resized(huggingface.dataset(name, size), size)
    if kind in _OWN:
        return _resized(_OWN[kind].read(name, where, size), size)
    source = _SOURCES[kind]
    read = source.find(where)
    if read is None:
        raise DataError(source.missing(where))
    return _resized(read(size), size)


def _resized(data: Dataset, size: int | None) -> Dataset:
    if size is None or data.shape[1:] == (size, size):
        return data
    if data.shape.kind != "images":
        raise SettingError(f"Data set {data.name!r} holds {data.shape}, which have no image_size. Leave it out.")

    def resize(x: Tensor) -> Tensor:
        out = torch.empty(len(x), x.shape[1], size, size, dtype=torch.uint8)
        for rows in torch.arange(len(x)).split(4096):  # in pieces: the floats take four times the room
            part = torch.nn.functional.interpolate(
                x[rows].float(), size=(size, size), mode="bilinear", antialias=True, align_corners=False
            )
            out[rows] = part.round().clamp(0, 255).to(torch.uint8)
        return out

    return dataclasses.replace(data, x=resize(data.x), test_x=resize(data.test_x))


def _download(source: Source, root: Path) -> None:
    if not source.download:
        raise DataError(f"{source.missing(root)} It cannot be downloaded from here.")
    from fedaudit._torchvision import torchvision

    for cls, arguments in source.download:
        try:
            getattr(torchvision().datasets, cls)(str(root), download=True, **arguments)
        except (OSError, RuntimeError) as error:  # no network, no disk space, or a checksum that does not match
            raise DataError(
                f"Data set {source.facts.name!r}: torchvision could not download it into {root} "
                f"({type(error).__name__}: {error}). Check the network and the free space, or put {source.needs}."
            ) from error


_SOURCES: dict[str, Source] = {
    source.facts.name: source for source in (DIGITS, MNIST, FASHION_MNIST, CIFAR10, CIFAR100, SVHN, TINY_IMAGENET)
}
HF = "Hugging Face's, from the local cache, or hf:PATH of one saved on disk; ?x=COLUMN&y=COLUMN chooses"
_OWN: dict[str, _OwnFiles] = {
    "folder": _OwnFiles(
        "your images: PATH/train/CLASS and PATH/test/CLASS, or PATH/DOMAIN/CLASS", "folder:photos", read_folder
    ),
    "npz": _OwnFiles("your arrays: x, y and optionally test_x, test_y, domain", "npz:mine.npz", read_npz),
}
