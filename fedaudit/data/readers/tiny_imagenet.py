"""Reads Tiny ImageNet as Stanford's archive unpacks it."""

from __future__ import annotations

from pathlib import Path

from fedaudit.data.readers.image_files import files_in, images
from fedaudit.data.readers.source import Layout, Source, damaged, decoding, image_dataset
from fedaudit.data.records import Dataset, Facts
from fedaudit.errors import DataError
from fedaudit.shape import Shape


def _tiny_imagenet(paths: list[Path], size: int | None) -> Dataset:
    name, (wnids_file, annotations, train) = "tinyimagenet", paths
    with decoding(name, wnids_file):
        wnids = sorted(set(wnids_file.read_text().split()))
    label = {wnid: i for i, wnid in enumerate(wnids)}
    words = dict.fromkeys(wnids, "")
    if (words_file := wnids_file.parent / "words.txt").is_file():
        with decoding(name, words_file):
            words = dict(line.split("\t", 1) for line in words_file.read_text().splitlines() if "\t" in line)
    files, y = [], []
    for wnid in wnids:
        folder = train / wnid / "images"
        found = files_in(folder) if folder.is_dir() else []
        if not found:
            raise DataError(
                f"Data set {name!r}: {folder} holds no images, though {wnids_file} lists {wnid}. "
                "Unpack the archive again."
            )
        files += found
        y += [label[wnid]] * len(found)
    test_files, test_y = [], []
    with decoding(name, annotations):
        rows = [line.split("\t") for line in annotations.read_text().splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):  # file name, wnid, bounding box
        if len(row) < 2 or row[1] not in label:
            raise damaged(name, annotations, f"has no known class in line {number}")
        test_files.append(annotations.parent / "images" / row[0])
        test_y.append(label[row[1]])
    side = size or 64
    x, test_x = images(name, files, side, side), images(name, test_files, side, side)
    return image_dataset(name, x, y, test_x, test_y, [words.get(w, "").split(",")[0].strip() or w for w in wnids])


def _tiny_layouts(root: Path) -> list[Layout]:
    files = (("wnids.txt",), ("val/val_annotations.txt",), ("train",))
    return [Layout(base / "tiny-imagenet-200", files, _tiny_imagenet) for base in (root, root / "tinyimagenet")]


TINY_IMAGENET = Source(
    Facts(
        "tinyimagenet",
        200,
        Shape((3, 64, 64)),
        100_000,
        10_000,
        "Stanford CS231n; tests on its validation images",
    ),
    _tiny_layouts,
    "wnids.txt, train/WNID/images/*.JPEG, val/val_annotations.txt and val/images/*.JPEG into such a folder",
    "unpack tiny-imagenet-200.zip of Stanford's course CS231n in ROOT,",
)
