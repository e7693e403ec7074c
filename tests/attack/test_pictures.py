"""Images side by side, pixel by pixel: their order, the white between them, and a line that has fewer."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from fedaudit.attack.pictures import _side_by_side, draw, read, save
from fedaudit.errors import RunError


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


@pytest.mark.parametrize("upright", [False, True])
def test_titles_and_names_stand_at_the_middle_of_their_images(tmp_path, monkeypatch, upright):
    """Two lines of 3 and 1 images. Nothing is drawn here: the figure is looked at before it becomes a file."""
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: made.append((figure, path, how)))
    path = tmp_path / "there" / "a.png"
    for _ in range(2):  # the folder may be there already
        draw({"one two": line(0.1, 0.2, 0.3), "b": line(0.5)}, path, titles=["x", "y"], upright=upright)
    figure, where, how = made[-1]
    assert (where, how) == (path, {"dpi": 120, "metadata": {"Software": None}})
    assert path.parent.is_dir()
    (axes,) = figure.axes
    down, across = (3, 2) if upright else (2, 3)
    wide, high = 0.85 * across + 0.85, 0.85 * down + 0.05 + 0.1 + 0.12 * (2 if upright else 1)
    assert figure.get_size_inches().tolist() == pytest.approx([wide, high])
    (picture,) = axes.get_images()
    assert picture.get_clim() == (0, 1)
    assert list(picture.get_extent()) == [0, across, down, 0]
    assert picture.get_array().shape == (down * 72, across * 104, 3)
    assert not axes.get_frame_on()
    words = {"x": axes.get_xticklabels(), "y": axes.get_yticklabels()}
    words = {side: [label.get_text() for label in labels] for side, labels in words.items()}
    titles, names = ("y", "x") if upright else ("x", "y")
    assert words[titles] == ["x", "y"]
    assert words[names] == ["one\ntwo", "b"]
    assert axes.get_xticks().tolist() == axes.get_yticks().tolist() == [0.5, 1.5]
    tick = axes.xaxis.get_major_ticks()[0]
    assert (tick.tick2line.get_markersize(), tick.label2.get_fontsize(), tick.get_pad()) == (0, 7, 1)
    assert axes.xaxis.get_ticks_position() == "top"
    box = axes.get_position(original=True).bounds
    assert box == pytest.approx((0.8 / wide, 0.05 / high, 0.85 * across / wide, 0.85 * down / high))


def test_without_titles_there_is_little_room_above(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: made.append(figure))
    draw({"a": line(0.1)}, tmp_path / "a.png")
    assert made[0].get_size_inches().tolist() == pytest.approx([1.7, 0.85 + 0.1 + 0.05])


def test_what_is_saved_is_read_again(tmp_path):
    path = tmp_path / "there" / "deeper" / "a.safetensors"
    whole = torch.arange(12.0).view(3, 4)
    for _ in range(2):
        save(path, {"images": whole.T, "label": torch.tensor([3, 1])})
    found = read(path)
    assert torch.equal(found["images"], whole.T)
    assert found["label"].tolist() == [3, 1]
    path.write_bytes(b"nothing")
    with pytest.raises(RunError, match="Run the attack again"):
        read(path)


def test_large_images_are_not_enlarged():
    found = _side_by_side([torch.zeros(1, 1, 100, 60)], 1, False)
    assert found.shape == (100 + 8, 60 + 8, 3)
    colours = torch.tensor([0.2, 0.4, 0.6])[None, :, None, None].expand(1, 3, 120, 120)
    assert _side_by_side([colours], 1, False)[5, 5].tolist() == pytest.approx([0.2, 0.4, 0.6])
