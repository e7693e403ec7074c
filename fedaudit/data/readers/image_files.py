"""Decodes files of images."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fedaudit.data.readers.source import decoding
from fedaudit.errors import DataError

GREY, _COLOUR = ("1", "L", "LA", "La"), ("P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV")


def image_modes(name: str, paths: list[Path]) -> set[str]:
    """Return the pixel formats of the images. Only the header of each file is read."""
    from PIL import Image

    modes = set()
    for path in paths:
        with decoding(name, path), Image.open(path) as file:
            mode = file.mode
        if mode not in GREY + _COLOUR:
            raise DataError(f"Data set {name!r}: {path} has pixels of format {mode}; convert it to 8 bits a channel.")
        modes.add(mode)
    return modes


def images(name: str, paths: list[Path], height: int, width: int, *, grey: bool = False) -> np.ndarray:
    """Return all images, decoded to uint8 (N, C, height, width). Those of another size are resized, bilinear."""
    from PIL import Image

    out = np.empty((len(paths), height, width, 1 if grey else 3), dtype=np.uint8)

    def decode(start: int) -> None:
        for row, path in enumerate(paths[start : start + 256], start):
            with decoding(name, path), Image.open(path) as file:
                image = file.convert("L" if grey else "RGB")
                if image.size != (width, height):
                    image = image.resize((width, height), Image.Resampling.BILINEAR)  # Pillow's is antialiased
                out[row] = np.asarray(image).reshape(height, width, -1)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes outside the interpreter lock
        for _ in pool.map(decode, range(0, len(paths), 256)):
            pass
    return out.transpose(0, 3, 1, 2)


def files_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".bmp") and p.is_file())


def folders_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
