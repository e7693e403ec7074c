"""Images side by side, pixel by pixel: their order, the white between them, and a line that has fewer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit.attack.pictures import _side_by_side


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
