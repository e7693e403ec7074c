"""Who is paired with whom: symmetric, regular, of the stated degree."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import hypergeom

from fedaudit.aggregation.secure import graph
from fedaudit.errors import RunError


def test_a_graph_is_symmetric_and_regular():
    near = graph.neighbours(range(3, 203), 20, 7)
    assert all(len(of) == 20 and k not in of for k, of in near.items())
    assert all(k in near[v] for k, of in near.items() for v in of)
    assert near == graph.neighbours(range(3, 203), 20, 7)
    assert near != graph.neighbours(range(3, 203), 20, 8)
    assert graph.neighbours([5, 1, 9], 2, 0) == {1: (5, 9), 5: (1, 9), 9: (1, 5)}
    with pytest.raises(RunError, match="at least two"):
        graph.neighbours([5], 2, 0)


def test_the_degree_grows_with_the_logarithm():
    assert graph.degree(99, 0.6) == 98
    degrees = {n: graph.degree(n, 0.6) for n in (100, 1000, 10_000)}
    assert degrees[100] < 60
    assert degrees[10_000] - degrees[1000] < degrees[1000]
    assert degrees[10_000] < 110


@pytest.mark.parametrize("n", [100, 1000])
def test_the_degree_is_the_least_that_holds(n):
    """The three probabilities of Bell et al., over all clients, at the degree and two below it."""

    def holds(k: int) -> bool:
        t, bad = graph.needed(0.6, k + 1), math.ceil(n / 10)
        told = n * hypergeom.sf(t - 1, n - 1, bad, k)
        lost = n * hypergeom.sf(k - t, n - 1, bad, k)
        alone = n * hypergeom.pmf(k, n - 1, 2 * bad, k)
        return told <= 2**-40 and lost <= 2**-30 and alone <= 2**-40

    k = graph.degree(n, 0.6)
    assert holds(k)
    assert not holds(k - 2)
    assert graph.degree(n, 0.6, 0.25) > k


def test_nobody_unmasks_alone():
    assert graph.needed(0.01, 50) == 2
    assert graph.needed(0.6, 5) == 3
    assert graph.needed(0.6, 10) == 6
    assert graph.needed(1.0, 7) == 7


def above(k: int, population: int, bad: int, drawn: int) -> float:
    """P[more than k of those drawn are bad], by binomial coefficients."""
    ways = sum(math.comb(bad, i) * math.comb(population - bad, drawn - i) for i in range(max(k + 1, 0), drawn + 1))
    return ways / math.comb(population, drawn)


@pytest.mark.parametrize(("share", "binds"), [(0.4, "told"), (0.6, "lost"), (0.8, "lost"), (0.52, None)])
def test_each_of_the_three_risks_is_held_down(share, binds):
    """200 clients: a small threshold is reached by colluders, a large one is missed by those who stay."""
    n, bad = 200, 20
    k = graph.degree(n, share)

    def risks(degree: int) -> dict[str, bool]:
        t = graph.needed(share, degree + 1)
        return {
            "told": n * above(t - 1, n - 1, bad, degree) <= 2.0**-40,
            "lost": n * above(degree - t, n - 1, bad, degree) <= 2.0**-30,
            "alone": n * above(degree - 1, n - 1, 2 * bad, degree) <= 2.0**-40,
        }

    assert k % 2 == 0
    assert all(risks(k).values())
    assert not all(risks(k - 2).values())
    assert binds is None or [name for name, held in risks(k - 2).items() if not held] == [binds]


def test_where_no_degree_is_enough_everybody_is_a_neighbour():
    assert graph.degree(100, 1.0) == 99
    assert graph.degree(2, 0.6) == 1


@pytest.mark.parametrize(("share", "members", "most"), [(0.07, 100, 7), (0.55, 20, 11), (0.6, 6, 4), (0.5, 3, 2)])
def test_a_share_of_a_neighbourhood_is_rounded_up_and_not_by_floating_point(share, members, most):
    """0.07 x 100 and 0.55 x 20 are a little more than 7 and 11 in floating point."""
    assert graph.needed(share, members) == most


@pytest.mark.parametrize("limits", [(8, 12, 6), (12, 6, 8), (6, 8, 12), (2, 2, 2)])
def test_the_degree_is_the_first_at_which_all_three_risks_are_held(limits, monkeypatch):
    """131 clients: 14 collude, 27 drop out. Each risk is one client's, times all, and may be the limit itself."""
    import scipy.stats

    told, lost, alone = limits
    asked = set()

    def sf(above, population, bad, k):
        t = max(2, math.ceil(0.6 * (k + 1) - 1e-9))
        name, least, at = {14: ("told", told, t - 1), 27: ("lost", lost, k - t), 41: ("alone", alone, k - 1)}[bad]
        assert (population, above) == (130, at)
        asked.add(name)
        if k < least:
            return 2.0**-30  # one client's; that of all is more than any limit
        return 2.0 ** -(30 if name == "lost" else 40) / 131

    monkeypatch.setattr(scipy.stats, "hypergeom", SimpleNamespace(sf=sf))
    assert graph.degree.__wrapped__(131, 0.6, 0.2) == max(limits)
    assert asked == {"told", "lost", "alone"}


def test_a_limit_is_held_when_it_is_met_exactly(monkeypatch):
    """128 clients: 128 x 2^-47 is 2^-40 to the last bit."""
    import scipy.stats

    risk = {13: 2.0**-47, 26: 2.0**-37, 39: 2.0**-47}
    monkeypatch.setattr(scipy.stats, "hypergeom", SimpleNamespace(sf=lambda above, population, bad, k: risk[bad]))
    assert graph.degree.__wrapped__(128, 0.6, 0.2) == 2
    for bad in risk:
        held = risk[bad]
        risk[bad] = held * 1.001
        assert graph.degree.__wrapped__(128, 0.6, 0.2) == 127
        risk[bad] = held


def test_fewer_than_all_may_drop_out_but_no_less_than_a_tenth():
    assert graph.degree(205, 0.6, 0.01) == graph.degree(205, 0.6, 0.1) == graph.degree(205, 0.6)
    assert graph.degree(205, 0.6, 0.2) > graph.degree(205, 0.6)


def test_two_clients_are_each_others_neighbours():
    assert graph.neighbours([9, 4], 1, 3) == {4: (9,), 9: (4,)}


@pytest.mark.parametrize(("n", "k"), [(7, 2), (7, 4), (8, 6), (9, 8)])
def test_neighbours_are_the_nearest_on_a_circle(n, k):
    """Taken out of the circle, the order of a client's neighbours is found again: each is k / 2 steps away at most."""
    ids = [3 * i + 2 for i in range(n)]
    near = graph.neighbours(ids, k, 11)
    order = [ids[i] for i in np.random.default_rng(11).permutation(n)]
    for place, u in enumerate(order):
        steps = {v: min((order.index(v) - place) % n, (place - order.index(v)) % n) for v in ids if v != u}
        assert near[u] == tuple(sorted(v for v, far in steps.items() if far <= k // 2))
        assert len(near[u]) == k
