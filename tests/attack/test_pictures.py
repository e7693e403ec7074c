"""Images side by side, pixel by pixel: their order, the white between them, and a line that has fewer."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest
import torch

from fedaudit.attack.pictures import _side_by_side, draw


def line(*greys: float) -> torch.Tensor:
    """Images of one channel, 2 x 3 pixels, each of one grey."""
    return torch.stack([torch.full((1, 2, 3), grey) for grey in greys])


@pytest.mark.parametrize(
    ("lines", "upright", "wanted"),
    [
        ([line(0.1, 0.2)], False, [[0.1, 0.2]]),  # a single line
        ([line(0.1, 0.2), line(0.3)], False, [[0.1, 0.2], [0.3, 1.0]]),
        ([line(0.1, 0.2), line(0.3)], True, [[0.1, 0.3], [0.2, 1.0]]),
    ],
)
def test_every_image_has_its_place(lines, upright, wanted):
    """96 dots for three pixels: each is repeated 32 times, and 96 / 12 = 8 white ones follow on either side."""
    found = _side_by_side(lines, 2, upright)
    rows, columns = np.shape(wanted)
    assert found.shape == (rows * (64 + 8), columns * (96 + 8), 3)
    for r, row in enumerate(wanted):
        for c, grey in enumerate(row):
            tile = found[r * 72 : (r + 1) * 72, c * 104 : (c + 1) * 104]
            assert np.allclose(tile[:64, :96], grey)
            assert bool((tile[64:] == 1).all())
            assert bool((tile[:, 96:] == 1).all())


@pytest.mark.parametrize("upright", [False, True])
def test_the_picture_has_each_image_where_its_title_is(tmp_path, upright):
    """Three images a line, two lines: tiles of 0.85 inches from 0.8 inches on, at 120 dots an inch. A tile of 2 x 3
    pixels is 104 x 72 dots, 96 x 64 of them the image: each is looked at in its middle."""
    lines = {"first line": line(0.1, 0.2, 0.3), "second": line(0.6, 0.7, 0.8)}
    draw(lines, tmp_path / "folder" / "a.png", titles=["a", "b\nc\nd", "e"], upright=upright)
    found = matplotlib.image.imread(tmp_path / "folder" / "a.png")[..., :3]
    wanted = np.array([[0.1, 0.2, 0.3], [0.6, 0.7, 0.8]])
    wanted = wanted.T if upright else wanted
    down, across = wanted.shape
    head = 0.1 + 0.12 * (2 if upright else 3)  # above: names of two words, or titles of three rows
    high, wide = round(120 * (0.85 * down + head + 0.05)), round(120 * (0.85 * across + 0.85))
    assert np.abs(np.subtract(found.shape[:2], (high, wide))).max() <= 1
    ink = (found < 0.95).all(axis=2)
    # The picture keeps the shape of its tiles and lies in the middle of its place.
    scale = min(0.85 * 120 * across / (104 * across), 0.85 * 120 * down / (72 * down))
    top = 120 * head + (0.85 * 120 * down - 72 * down * scale) / 2
    for r, row in enumerate(wanted):
        for c, grey in enumerate(row):
            y, x = top + scale * (72 * r + 32), 0.8 * 120 + scale * (104 * c + 48)
            assert found[round(y), round(x)] == pytest.approx([grey] * 3, abs=0.01), (r, c)
    assert ink[:, : round(0.8 * 120) - 2].any(), "names or titles are beside the pictures"
