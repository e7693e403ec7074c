"""Draws pictures of images side by side, and writes the small file beside them that other pictures can be made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedaudit.errors import RunError

TILE = 0.85  # width in inches of an image and the gap after it
SIDE = 96  # approximate width of an image in dots


def draw(lines: Mapping[str, Tensor], path: Path, *, titles: Sequence[str] = (), upright: bool = False) -> None:
    """Write a PNG of images in [0, 1], one tensor (n, C, H, W) a line. `upright` makes columns of the lines.

    `titles` has one title per image.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = max(len(images) for images in lines.values())
    down, across = (count, len(lines)) if upright else (len(lines), count)
    names = [name.replace(" ", "\n") for name in lines]
    above, beside = (names, list(titles)) if upright else (list(titles), names)
    head = 0.1 + 0.12 * max((text.count("\n") + 1 for text in above), default=0)
    wide, high = TILE * across + 0.85, TILE * down + head + 0.05
    figure = Figure(figsize=(wide, high))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.8 / wide, 0.05 / high, TILE * across / wide, TILE * down / high))
    axes.imshow(_side_by_side(list(lines.values()), count, upright), vmin=0, vmax=1, extent=(0, across, down, 0))
    axes.set(frame_on=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=7, pad=1)
    axes.set_xticks([i + 0.5 for i in range(len(above))], above)
    axes.set_yticks([i + 0.5 for i in range(len(beside))], beside)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _side_by_side(lines: Sequence[Tensor], count: int, upright: bool) -> NDArray[np.float32]:
    """Return one picture of all images, as rows x columns x RGB: white between them, and where a line has fewer."""
    _, h, w = lines[0].shape[1:]
    # Each pixel is repeated this often along each side, so that its edges stay sharp.
    enlarged = max(1, SIDE // max(h, w))
    gap = max(1, enlarged * max(h, w) // 12)
    tiles = np.ones((len(lines), count, h * enlarged + gap, w * enlarged + gap, 3), np.float32)
    for line, images in zip(tiles, lines, strict=True):
        for tile, image in zip(line, images.detach().cpu().numpy(), strict=False):
            tile[: h * enlarged, : w * enlarged] = image.transpose(1, 2, 0).repeat(enlarged, 0).repeat(enlarged, 1)
    grid = tiles.transpose(1, 0, 2, 3, 4) if upright else tiles
    return np.concatenate([np.concatenate(list(line), axis=1) for line in grid], axis=0)


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path)


def read(path: Path) -> dict[str, Tensor]:
    """Return what `save` wrote: originals, images, client, record and label of the pictures' images."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise RunError(f"{path} cannot be read: {e}. Run the attack again: fedaudit attack RUN --attack NAME.") from e
