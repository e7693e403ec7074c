"""Real numbers in the ring: no overflow, the stated error, and what is cut off."""

from __future__ import annotations

import numpy as np
import pytest

from fedaudit.aggregation.secure.ring import Part, Ring
from fedaudit.errors import RunError


def test_by_hand():
    """levels = floor((2^31 - 1) / 1000) = 2147483; bound 2147.483: steps of 0.001, 1.0004 -> 1000, -0.0006 -> -1."""
    ring = Ring((Part(2, 2147.483),), 1000)
    words, clipped = ring.encoded([np.array([1.0004, -0.0006])])
    assert words.tolist() == [1000, 2**32 - 1]
    assert clipped == 0
    assert ring.decoded(words)[0] == pytest.approx([1.0, -0.001])


def test_the_largest_sums_do_not_overflow():
    for clients in (2, 3, 100, 1000):
        ring = Ring((Part(2, 8.0),), clients)
        words, clipped = ring.encoded([np.array([8.0, -8.0])])
        total = np.zeros(2, np.uint32)
        for _ in range(clients):
            total += words
        assert clipped == 0
        assert ring.decoded(total)[0] == pytest.approx([8.0 * clients, -8.0 * clients])


def test_beyond_the_bound_is_cut_off_and_counted():
    ring = Ring((Part(3, 1.0), Part(1, 100.0)), 4)
    words, clipped = ring.encoded([np.array([5.0, -1.5, 0.5]), np.array([99.0])])
    assert clipped == 2
    first, second = ring.decoded(words)
    assert first == pytest.approx([1.0, -1.0, 0.5])
    assert second == pytest.approx([99.0])


def test_rounding_stays_within_the_stated_error():
    rng = np.random.default_rng(0)
    ring = Ring((Part(70_000, 4.0),), 10)
    vectors = [rng.normal(0, 1, 70_000).clip(-4, 4) for _ in range(10)]
    total = np.zeros(70_000, np.uint32)
    for v in vectors:
        total += ring.encoded([v])[0]
    off = np.abs(ring.decoded(total)[0] / 10 - sum(vectors) / 10).max()
    assert 0.05 * ring.error(10, 10) < off <= ring.error(10, 10)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(RunError, match="NaN or infinity"):
        Ring((Part(1, 1.0),), 2).encoded([np.array([value])])


def test_other_sizes_are_refused():
    with pytest.raises(RunError, match="other sizes"):
        Ring((Part(2, 1.0),), 2).encoded([np.zeros(3)])
    with pytest.raises(RunError, match="cannot sum"):
        Ring((Part(2, 1.0),), 1 << 30)


@pytest.mark.parametrize("at", [0, 2, -1])
def test_one_number_that_is_not_finite_among_others_is_refused(at):
    vector = np.array([0.5, -0.25, 0.0, 1.0])
    vector[at] = np.nan
    with pytest.raises(RunError, match="NaN or infinity"):
        Ring((Part(4, 1.0),), 2).encoded([vector])


def test_how_many_clients_a_ring_can_sum():
    """From one to (2^31 - 1) / 256, whatever a bound is."""
    assert Ring((Part(1, 1.0),), 1).levels == 2**31 - 1
    most = (2**31 - 1) // 256
    assert Ring((Part(1, 1.0),), most).levels == 256
    for clients in (0, most + 1):
        with pytest.raises(RunError, match=f"cannot sum {clients} clients"):
            Ring((Part(1, 1.0),), clients)


def test_steps_lengths_and_errors_by_hand():
    """levels 2147483 for 1000 clients: steps of 0.001 and 0.002. Ten clients move a mean by 10 steps over twice 4."""
    ring = Ring((Part(2, 2147.483), Part(3, 4294.966)), 1000)
    assert ring.steps() == pytest.approx([0.001, 0.002])
    assert ring.length == 5
    assert ring.error(10, 4.0) == pytest.approx(10 * 0.001 / 8)
    assert ring.error(1, 1.0) == pytest.approx(0.0005)
    words, clipped = ring.encoded([np.array([[0.003], [-0.001]]), np.array([0.0, 0.004, 5000.0])])
    assert words.tolist() == [3, 2**32 - 1, 0, 2, 2147483]
    assert clipped == 1
    first, second = ring.decoded(words)
    assert first == pytest.approx([0.003, -0.001])
    assert second == pytest.approx([0.0, 0.004, 4294.966])
    edge, none = ring.encoded([np.array([2147.483, -2147.483]), np.zeros(3)])
    assert (edge[:2].tolist(), none) == ([2147483, 2**32 - 2147483], 0), "the bound itself is not cut off"
