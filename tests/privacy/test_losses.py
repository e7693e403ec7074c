"""Privacy losses with finitely many values, by hand."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import pytest

from fedaudit.privacy.losses import Atoms, _hull


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
