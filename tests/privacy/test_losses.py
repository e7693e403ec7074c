"""Privacy losses with finitely many values, by hand."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import pytest

from fedaudit.privacy import losses
from fedaudit.privacy.losses import Atoms, Loss, RenyiBounded, _hull


class Three(Atoms):
    """Losses of -1, 0 and 2 with probabilities 1/2, 1/4 and 1/8; the rest of 1/8 is beyond all bounds."""

    @cached_property
    def atoms(self):
        return np.array([-1.0, 0.0, 2.0]), np.array([0.5, 0.25, 0.125])


class Negative(Atoms):
    @cached_property
    def atoms(self):
        return np.array([-3.0, 1.0]), np.array([0.5, 0.5])


def test_what_is_missing_is_infinite():
    assert Three().infinite == 0.125
    assert Negative().infinite == 0.0


def test_the_largest_loss_is_the_one_farthest_from_0():
    assert Three().largest == 2.0
    assert Negative().largest == 3.0


def test_distribution_and_mean_are_given_that_the_loss_is_finite():
    """Of 7/8: 4/7, 2/7, 1/7. A value counts as at most itself. The mean is (-4 + 2) / 7."""
    found = Three().cdf(np.array([-1.5, -1.0, -0.5, 0.0, 1.9, 2.0, 9.0]))
    assert found == pytest.approx([0, 4 / 7, 4 / 7, 6 / 7, 6 / 7, 1, 1])
    assert Three().mean() == pytest.approx(-2 / 7)


@pytest.mark.parametrize("a", [2, 3.5])
def test_the_renyi_divergence_by_hand(a):
    wanted = math.log(0.5 * math.exp(-(a - 1)) + 0.25 + 0.125 * math.exp(2 * (a - 1))) / (a - 1)
    assert Three().renyi([a]) == pytest.approx([wanted])


def test_the_hull_drops_what_lies_above_it():
    """(1, 5) lies above the line from (0, 4) to (2, 2), and (2, 2) is a corner; points on a line are no corners."""
    x, y = _hull(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), np.array([4.0, 5.0, 2.0, 1.5, 1.0]))
    assert x.tolist() == [0.0, 2.0, 4.0]
    assert y.tolist() == [4.0, 2.0, 1.0]


class Bounded(RenyiBounded):
    """A pair of which the divergence a / 8 is known, and above the order 4 a bound that is larger by 1/3."""

    def renyi(self, orders):
        return np.array([a / 8 + (a > 4) / 3 for a in orders])


def corners_below(points):
    """Return the corners of the lower convex hull of points that ascend in x."""
    kept = []
    for x, y in points:
        while len(kept) > 1:
            (ax, ay), (bx, by) = kept[-2:]
            if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                break
            kept.pop()
        kept.append((x, y))
    return kept


def test_a_curve_by_renyi_divergence_point_by_point(monkeypatch):
    """Twelve points up to epsilon = 6. At each the best of the orders: log delta = (a - 1) (D - epsilon)
    + a log(1 - 1/a) - log(a - 1), at most 0; and below 0 by symmetry. The atoms have the curve at its corners."""
    monkeypatch.setattr(losses, "POINTS", 12)
    monkeypatch.setattr(losses, "FARTHEST", 6.0)
    loss = Bounded()
    orders = [*(1 + np.geomspace(1e-3, 1, 60)[:-1]), *np.geomspace(2, 1e5, 400)]

    def delta(epsilon):
        best = min(
            (a - 1) * (a / 8 + (a > 4) / 3 - epsilon) + a * math.log(1 - 1 / a) - math.log(a - 1) for a in orders
        )
        return math.exp(min(best, 0.0))

    up = [6 * i / 11 for i in range(12)]
    points = [(0.0, 1.0), *((math.exp(-e), 1 - math.exp(-e) * (1 - delta(e))) for e in up[:0:-1])]
    corners = corners_below([*points, *((math.exp(e), delta(e)) for e in up)])
    x, y = loss._curve
    assert x == pytest.approx([corner[0] for corner in corners])
    assert y == pytest.approx([corner[1] for corner in corners])
    values, chances = loss.atoms
    assert loss.infinite == pytest.approx(delta(6.0))
    assert math.fsum(chances) + loss.infinite == pytest.approx(1)
    assert (chances > 0).all()
    for at, height in corners[1:]:
        total = math.fsum(p * max(0.0, 1 - at * math.exp(-v)) for v, p in zip(values, chances, strict=True))
        assert total + loss.infinite == pytest.approx(height, abs=1e-9)
    assert loss.largest == pytest.approx(6.0)


def test_a_loss_without_a_bound_has_no_pure_epsilon():
    assert Three().pure is None
    assert Loss().infinite == 0.0
    assert (losses.POINTS, losses.FARTHEST) == (4000, 60.0)


def test_several_orders_are_answered_one_by_one():
    """Also where e^((a - 1) loss) overflows: the largest loss is left, D = 2 + log(1/8) / (a - 1)."""
    found = Three().renyi([2, 1001.0])
    assert found == pytest.approx([math.log(0.5 / math.e + 0.25 + 0.125 * math.e**2), 2 + math.log(0.125) / 1000])


@pytest.mark.parametrize(
    ("y", "corners"),
    [([4.0, 3.0, 2.0], [0, 2]), ([4.0, 2.9, 2.0], [0, 1, 2]), ([4.0, 3.1, 2.0], [0, 2]), ([4.0, 4.0, 4.0], [0, 2])],
)
def test_points_on_a_line_are_no_corners_of_the_hull(y, corners):
    x = np.array([0.0, 2.0, 4.0])
    found, heights = _hull(x, np.array(y))
    assert found.tolist() == [x[i] for i in corners]
    assert heights.tolist() == [y[i] for i in corners]
