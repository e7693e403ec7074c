"""When a claim is refuted, and what is corrected for the number of tests, by hand."""

from __future__ import annotations

import itertools

import pytest

from fedaudit.significance import LEVEL, holm, level_of, said


def test_the_level_is_the_stricter_of_both():
    assert LEVEL == 0.001
    assert level_of(0.95) == 0.001
    assert level_of(0.9999) == pytest.approx(0.0001)


@pytest.mark.parametrize(
    ("p", "tells_at", "confidence", "tests", "verdict"),
    [
        (0.0009, None, 0.95, 1, "refuted"),
        (0.001, None, 0.95, 1, "suspicious"),  # a level is not below itself
        (0.049, 0.5, 0.95, 9, "suspicious"),  # power counts only where nothing was found
        (0.5, None, 0.5, 1, "not refuted"),  # and neither is the confidence
        (0.25, None, 0.5, 1, "suspicious"),
        (0.06, None, 0.95, 4, "not refuted"),
        (0.06, None, 0.9, 4, "suspicious"),
        (0.06, 0.00024, 0.95, 4, "not refuted"),  # a quarter of the level is 0.00025
        (0.06, 0.00025, 0.95, 4, "cannot tell"),
        (0.06, 0.0004, 0.95, 4, "cannot tell"),
        (0.06, 0.0004, 0.95, 2, "not refuted"),
        (0.06, 0.0009, 0.95, 1, "not refuted"),
        (0.0005, None, 0.9999, 1, "not refuted"),
        (0.00005, None, 0.9999, 1, "refuted"),
    ],
)
def test_what_is_said_of_a_test(p, tells_at, confidence, tests, verdict):
    assert said(p, tells_at, confidence, tests) == verdict


def test_one_test_at_95_percent_unless_told():
    assert (said(0.049), said(0.051), said(0.5, 0.0009), said(0.5, 0.001)) == (
        "suspicious", "not refuted", "not refuted", "cannot tell",
    )  # fmt: skip


def test_holms_values_by_hand():
    """Four tests were made and two were not. The smallest p counts four times, the next three times, and none falls
    below one before it: 4 * 0.01, 3 * 0.02, then 2 * 0.025 is less than that, and 0.6 once."""
    found = holm([0.6, None, 0.02, 0.01, None, 0.025])
    assert found == [0.6, None, pytest.approx(0.06), pytest.approx(0.04), None, pytest.approx(0.06)]
    assert holm([0.7, 0.9]) == [1.0, 1.0], "no probability is above 1"
    assert holm([None]) == [None]
    assert holm([]) == []


def test_holm_is_the_closed_test_of_bonferroni():
    """A p-value's adjusted value is the largest Bonferroni value of all sets of tests that hold it."""
    ps = [0.04, 0.013, 0.2, 0.011, 0.5]
    for i, adjusted in enumerate(holm(ps)):
        sets = [s for n in range(1, 6) for s in itertools.combinations(range(5), n) if i in s]
        assert adjusted == pytest.approx(max(min(1.0, len(s) * min(ps[j] for j in s)) for s in sets))
