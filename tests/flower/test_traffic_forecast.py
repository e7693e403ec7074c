"""The bytes of a longer run with more nodes, from rounds by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.errors import RunError
from fedaudit.flower import traffic_forecast
from fedaudit.flower.traffic_forecast import planned


def entry(t, direction, sizes, frame=7):
    fields = {name: SimpleNamespace(payload=payload, wire=payload + 5) for name, payload in sizes.items()}
    message = "Train" if direction == "down" else "Trained"
    return SimpleNamespace(round=t, direction=direction, message=message, fields=fields, row={"frame": frame})


@pytest.fixture
def of_rounds(monkeypatch):
    """`of_rounds(...)`: a run of two nodes with so many payload bytes down, and a tenth of them up, in each round."""

    def make(*down, absent=()):
        rounds = [SimpleNamespace(round=t, absent=[1] if t in absent else []) for t in range(1, len(down) + 1)]
        entries = [entry(t, way, {"arrays": size // part, "config": 0}) for t, size in enumerate(down, 1)
                   for way, part in (("down", 1), ("up", 10))]  # fmt: skip
        run = SimpleNamespace(
            record=SimpleNamespace(rounds=rounds, setting=SimpleNamespace(clients=2)),
            transcript=SimpleNamespace(entries=lambda: iter(entries)),
        )
        monkeypatch.setattr(traffic_forecast, "RunFolder", lambda folder: run)

    return make


def test_a_round_grows_with_the_nodes_and_the_run_with_the_rounds(of_rounds):
    """1,000 bytes down and 100 up by two nodes: six nodes in four rounds send 12 times that. Round 2 is not whole."""
    of_rounds(1000, 5000, 1000, absent={2})
    found = planned("run", nodes=6, rounds=4)
    assert (found.up, found.down, found.total) == (1200, 12_000, 13_200)
    assert [(one.direction, one.field, one.bytes) for one in found.fields] == [
        ("down", "Train.arrays", 3000), ("down", "Train.config", 0), ("up", "Trained.arrays", 300),
        ("up", "Trained.config", 0),
    ]  # fmt: skip
    wire = planned("run", nodes=2, rounds=1, convention="wire")
    assert (wire.up, wire.down) == (100 + 2 * 5 + 7, 1000 + 2 * 5 + 7)


def test_rounds_may_differ_by_one_percent(of_rounds):
    """10,000 + 1,000 bytes, and 9,900 + 990: the difference is 110, one in a hundred."""
    of_rounds(10_000, 9900)
    assert planned("run", nodes=2, rounds=1).total == 11_000
    of_rounds(10_000, 9800)
    with pytest.raises(RunError, match=r"its rounds sent between 10\.78 kB and 11\.00 kB, so further rounds"):
        planned("run", nodes=2, rounds=1)


def test_without_a_whole_round_nothing_is_planned(of_rounds):
    of_rounds(1000, 1000, absent={1, 2})
    with pytest.raises(RunError, match="no round in which every node answered"):
        planned("run", nodes=2, rounds=1)
