"""Reads a user's folder of images."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedaudit.data.readers.arrays import known_domains, one_in_five
from fedaudit.data.readers.image_files import GREY, files_in, folders_in, image_modes, images
from fedaudit.data.readers.source import decoding, image_dataset
from fedaudit.data.records import Dataset
from fedaudit.errors import DataError

PERSONS = "persons.csv"  # beside the folders: a line FILE,PERSON for each training image
_FOLDER_LAYOUT = (
    "Put images (png, jpg, bmp) into PATH/train/CLASS/ and PATH/test/CLASS/, or, for data with domains, into "
    "PATH/DOMAIN/CLASS/ (one image in five of each class and domain then becomes the test set)"
)


def read_folder(name: str, path: Path, size: int | None) -> Dataset:
    if not path.is_dir():
        raise DataError(f"Data set {name!r} is not there: {path} is not a folder. {_FOLDER_LAYOUT}.")
    with decoding(name, path):
        split = (path / "train").is_dir() or (path / "test").is_dir()
        groups = [path / "train", path / "test"] if split else folders_in(path)
        found = [  # (group, class name, file)
            (g, kind.name, file)
            for g, group in enumerate(groups)
            if group.is_dir()
            for kind in folders_in(group)
            for file in files_in(kind)
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
    grey = image_modes(name, files) <= set(GREY)
    height = width = size or 0
    if size is None:
        from PIL import Image

        with decoding(name, files[0]), Image.open(files[0]) as first:
            width, height = first.size
    x, y = images(name, files, height, width, grey=grey), np.array([label[kind] for _, kind, _ in found])
    test = group == 1 if split else one_in_five(group, y)
    domains: dict[str, Any] = {}
    if (path / PERSONS).is_file():
        whose = persons_of(name, path, files)
        domains["person"] = torch.from_numpy(np.unique(whose, return_inverse=True)[1][~test].astype(np.int64))
    if not split:
        held, index = np.unique(group[~test], return_inverse=True)
        domains |= {"domain": torch.from_numpy(index), "domain_names": tuple(groups[g].name for g in held)}
        domains["test_domain"] = known_domains(held, group[test])
    return image_dataset(name, x[~test], y[~test], x[test], y[test], class_names, **domains)


def persons_of(name: str, path: Path, files: list[Path]) -> np.ndarray:
    """Return whose image each file is, by persons.csv. Images of the test set may be missing there."""
    said: dict[str, str] = {}
    with decoding(name, path / PERSONS), open(path / PERSONS, newline="") as file:
        for line in csv.reader(file):
            said[line[0]] = line[1]
    keys = [file.relative_to(path).as_posix() for file in files]
    split = (path / "train").is_dir()
    if lacking := [key for key in keys if key not in said and not (split and key.startswith("test/"))]:
        raise DataError(
            f"Data set {name!r}: {path / PERSONS} does not say whose image {lacking[0]} is ({len(lacking)} are "
            "missing). Write a line FILE,PERSON for each training image, with the file's path within the folder."
        )
    return np.array([said.get(key, "") for key in keys])
