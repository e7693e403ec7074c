"""Who is paired with whom: symmetric, regular, of the stated degree."""

from __future__ import annotations

import math

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
