"""The siamese augmentation: one view for all images, one kind at a time, against torch's own resampling."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn import functional as F

from fedaudit.errors import ContractError, SettingError
from fedaudit.methods.condensation._siamese import KINDS, View, _affine, _kept, _Parameters, each, view, views


@functools.cache
def picked(seed: int) -> str:
    """The kind that the first random number after a seed picks."""
    torch.manual_seed(seed)
    return KINDS[int(torch.rand(1, dtype=torch.float64) * len(KINDS))]


def drawn(kind, shape=(1, 8, 8), *, tries=200) -> list[View]:
    """Views of one kind: those whose first random number picks it."""
    found = []
    for seed in range(tries):
        if picked(seed) == kind:
            torch.manual_seed(seed)
            found.append(view(shape, torch.zeros(1, dtype=torch.float64)))
    return found


def identity(seen: View) -> set[str]:
    """Which parts of a view do something."""
    n = seen.move.shape[0]
    return {
        name
        for name, still in {
            "move": torch.allclose(seen.move, torch.eye(n, dtype=seen.move.dtype), atol=1e-9),
            "keep": bool((seen.keep == 1).all()),
            "brightness": seen.brightness.item() == 0,
            "saturation": seen.saturation.item() == 1,
            "contrast": seen.contrast.item() == 1,
        }.items()
        if not still
    }


@pytest.mark.parametrize(
    ("kind", "acts"),
    [
        ("colour", {"brightness", "saturation", "contrast"}),
        ("crop", {"move"}),
        ("cutout", {"keep"}),
        ("flip", {"move"}),
        ("scale", {"move"}),
        ("rotate", {"move"}),
    ],
)
def test_one_kind_at_a_time(kind, acts):
    views_of_it = drawn(kind)
    assert len(views_of_it) > 15, "each kind comes up about once in six"
    assert set().union(*(identity(seen) for seen in views_of_it)) == acts
    if kind == "flip":  # half of the time nothing
        assert 0.2 < sum(not identity(seen) for seen in views_of_it) / len(views_of_it) < 0.8
    else:
        assert all(identity(seen) for seen in views_of_it)


@pytest.mark.parametrize("shape", [(6, 6), (5, 8)])
@pytest.mark.parametrize(
    ("scale", "angle", "shift"), [((1, 1), 0.2, (0, 0)), ((1.1, 0.9), 0, (0.1, -0.2)), ((-1, 1), -0.1, (0, 0.3))]
)
def test_moves_are_bilinear_resampling(shape, scale, angle, shift):
    """The matrix against torch's grid_sample with the same affine map; outside is nothing."""
    torch.manual_seed(0)
    x = torch.rand(3, 2, *shape, dtype=torch.float64)
    numbers = [torch.tensor(float(v), dtype=torch.float64) for v in (*scale, angle, *shift)]
    ours = (x.flatten(2) @ _affine(*shape, *numbers).T).unflatten(2, shape)
    c, s = math.cos(angle), math.sin(angle)
    theta = [[scale[0] * c, -scale[0] * s, shift[0]], [scale[1] * s, scale[1] * c, shift[1]]]
    grid = F.affine_grid(torch.tensor([theta] * 3, dtype=torch.float64), list(x.shape), align_corners=False)
    assert torch.allclose(ours, F.grid_sample(x, grid, align_corners=False), atol=1e-9)


def test_a_flip_mirrors():
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64) * 2 - 1
    flipped = next(seen for seen in drawn("flip") if identity(seen))
    assert torch.allclose(flipped(x), x.flip(3), atol=1e-9)


def test_a_cutout_is_black_and_of_half_the_side():
    x = torch.ones(1, 1, 16, 16, dtype=torch.float64)
    for seen in drawn("cutout", (1, 16, 16)):
        out = seen(x)
        assert set(out.flatten().tolist()) == {-1.0, 1.0}
        rows = (out[0, 0] == -1).any(1).sum().item()
        assert 4 <= rows <= 8  # 8 of 16, fewer at the edge


def test_real_and_condensed_images_see_the_same_view():
    """The same images, in two batches of different size, come out the same; unlike what went in."""
    x = torch.rand(4, 3, 8, 8) * 2 - 1
    moved = 0
    for seed in range(30):
        torch.manual_seed(seed)
        a, b = views("siamese", x, x[:2])
        assert torch.allclose(a[:2], b, atol=1e-6)
        moved += not torch.allclose(a, x, atol=1e-3)
    assert moved > 20
    assert views("none", x)[0] is x


def test_a_view_has_a_gradient():
    x = (torch.rand(2, 1, 4, 4, dtype=torch.float64) * 2 - 1).requires_grad_()
    for kind in KINDS:
        seen = drawn(kind, (1, 4, 4), tries=60)[0]
        assert torch.autograd.gradcheck(seen, (x,))


def test_outside_and_cut_out_pixels_are_the_mean():
    """On standardised images, outside is 0: in [-1, 1] each channel's own mean, here 0.2 and -0.5."""
    x = torch.ones(1, 2, 16, 16, dtype=torch.float64)
    for kind in ("cutout", "crop"):
        out = drawn(kind, (2, 16, 16))[0](x, (0.2, -0.5), 0.4)
        assert out[0, 0].min().item() == pytest.approx(0.2)
        assert out[0, 1].min().item() == pytest.approx(-0.5)
        assert out.max().item() == pytest.approx(1.0)
    with pytest.raises(SettingError, match="aug_fill has 3 numbers, and the images have 2 channels"):
        drawn("crop", (2, 16, 16))[0](x, (0.1, 0.2, 0.3))


def test_brightness_counts_in_deviations():
    """+0.5 in units of 0.4 is +0.2. Saturation and contrast are ratios, and know no unit."""
    one = torch.tensor(1.0, dtype=torch.float64)
    x = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    brighter = View(torch.eye(16, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64), 0.5 * one, one, one)
    assert torch.allclose(brighter(x, (0.3,), 0.4), x + 0.2)
    twice = View(torch.eye(16, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64), 0 * one, one, 2 * one)
    mean = x.mean((1, 2, 3), keepdim=True)
    assert torch.allclose(twice(x, (0.3,), 0.4), mean + 2 * (x - mean))


@pytest.mark.parametrize("kind", KINDS)
def test_each_image_has_its_own_parameters_and_all_one_kind(kind):
    """Image i as the view of its own numbers makes it alone, by the matrix of `view`; the kind is everybody's."""
    for seed in range(100):
        torch.manual_seed(seed)
        u = torch.rand(10, 3, dtype=torch.float64)
        if int(u[0, 0] * len(KINDS)) == KINDS.index(kind):
            break
    x = torch.rand(3, 2, 6, 8, dtype=torch.float64) * 2 - 1
    torch.manual_seed(seed)
    out = each(x, (0.1, -0.2), 0.5)
    different = set()
    for i in range(3):
        mine = torch.cat([u[0, :1], u[1:, i]])  # the kind of the first, the strengths of its own
        with_these = _Given(mine)
        alone = with_these(x[i : i + 1], (0.1, -0.2), 0.5)
        assert torch.allclose(out[i], alone[0], atol=1e-9)
        different.add(round(float((alone - x[i]).sum()), 6))
    assert len(different) == 3 or kind == "flip"


class _Given:
    """The view that ten given numbers stand for."""

    def __init__(self, u):
        self.u = u

    def __call__(self, x, fill, unit):
        of = _Parameters(*_numbers(self.u))
        h, w = x.shape[2:]
        move = _affine(h, w, of.scale_x, of.scale_y, of.angle, of.shift_x, of.shift_y)
        return View(move, _kept(h, w, of), of.brightness, of.saturation, of.contrast)(x, fill, unit)


def _numbers(u):
    """The eleven parameters from ten uniform numbers, as dataset condensation has them."""
    kind, s = KINDS[int(u[0] * len(KINDS))], 2 * u[1:] - 1
    still, one = torch.zeros((), dtype=u.dtype), torch.ones((), dtype=u.dtype)
    mirror = -one if kind == "flip" and u[4] < 0.5 else one
    scale = (1.2 ** s[0], 1.2 ** s[1]) if kind == "scale" else (one, one)
    angle = s[2] * math.radians(15) if kind == "rotate" else still
    shift = (s[4] / 4, s[5] / 4) if kind == "crop" else (still, still)
    colour = (u[7] - 0.5, 2 * u[8], u[9] + 0.5) if kind == "colour" else (still, one, one)
    return (scale[0] * mirror, scale[1], angle, *shift, s[6], s[7], one if kind == "cutout" else still, *colour)


def test_learned_images_are_not_augmented_one_by_one():
    with pytest.raises(ContractError, match="not images that are learned"):
        views("siamese-each", torch.zeros(2, 1, 4, 4, requires_grad=True))


def test_pixels_are_in_units_of_1_and_black_outside_if_nothing_is_said():
    """Twenty draws: each is that of a unit of 1 and of black pixels; some differ in a unit of 2, or with white ones."""
    x = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(3)) * 2 - 1

    def drawn(seed, *given):
        torch.manual_seed(seed)
        return each(x, *given)

    assert all(torch.equal(drawn(seed), drawn(seed, (-1.0,), 1.0)) for seed in range(20))
    assert any(not torch.allclose(drawn(seed), drawn(seed, (-1.0,), 2.0)) for seed in range(20))
    assert any(not torch.allclose(drawn(seed), drawn(seed, (1.0,), 1.0)) for seed in range(20))
