"""One quick round of every method, in turns with one of FedAvg: its ratio is what two savings are compared by.

Settings are each method's `quick` ones, for two clients on digits: they show a change of the code, not the cost of a
method at the size of its paper.
"""

from __future__ import annotations

import pytest

from fedaudit import registry

PAIRS = 8  # rounds of each; more only where a gate asks for it, and none does here
COMMON = {"clients": 2, "public": 0.1, "aux": 0.6, "device": "cpu"}
QUICK = ("fedavg", "dffke", "fedfree")  # without -m "": one that averages, one with embeddings, one with layers
REFERENCE = {"method": "fedavg", "set": {"E": 1, "B": 64, "eta": 0.05}}


def methods():
    names = [name for name in registry.names("methods") if "+" not in name]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.benchmark(group="a round of each method")
@pytest.mark.parametrize("method", methods())
def test_a_round(federated_benchmark, method):
    settings = dict(registry.find(method).quick)
    found = federated_benchmark(
        method=method, set=settings, rounds=PAIRS, relative_to=REFERENCE, flops=False, **COMMON
    )  # fmt: skip
    assert len(found.record.rounds) > 1
