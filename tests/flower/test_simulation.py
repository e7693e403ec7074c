"""Flower's own simulation, on Ray: the same audit around the same app, in processes of Flower's."""

from __future__ import annotations

import pytest

from fedaudit.flower import run_app
from fedaudit.runtime.folder import RunFolder

pytestmark = pytest.mark.slow


def test_the_simulation_leaves_what_this_process_leaves(sk_app, tmp_path):
    """Training draws nothing at random, and node numbers are partition-ids: the models are equal to rounding."""
    import torch

    short = {"num-server-rounds": 2, "local-epochs": 2}
    here = run_app(sk_app, out=tmp_path / "here", nodes=2, config=short)
    there = run_app(sk_app, out=tmp_path / "there", nodes=2, config=short, ray=True)
    assert there.status == "done"
    assert [row.participants for row in there.rounds] == [[0, 1], [0, 1]]
    assert there.bytes("up") == here.bytes("up")
    assert there.bytes("down") == here.bytes("down")
    ours, theirs = (
        [e for e in RunFolder(tmp_path / name).transcript.entries() if e.message == "TrainReply"]
        for name in ("here", "there")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a.round, a.client) == (b.round, b.client)
        torch.testing.assert_close(a["arrays"]["0"], b["arrays"]["0"])
        assert a["metrics_num_examples"] == b["metrics_num_examples"]
    assert [c.by_kind for c in there.ledger] == [c.by_kind for c in here.ledger]


def test_a_protected_run_in_the_simulation(sk_app, tmp_path):
    """The noise is drawn on the nodes, from the run's seed: the same in either runtime."""
    import torch

    how = {
        "nodes": 2, "config": {"num-server-rounds": 1, "local-epochs": 1}, "canaries": 4,
        "kinds": {"arrays": {"kind": "weights", "update": True}},
        "privacy": {"gradients": {"noise_multiplier": 1.0, "delta": 1e-5}},
    }  # fmt: skip
    for name, ray in (("here", False), ("there", True)):
        record = run_app(sk_app, out=tmp_path / name, ray=ray, **how)
        assert record.ledger[0].by_kind["gradients"] < 10
        assert record.ledger[0].by_kind["count"] == 0.0  # of the canaries too
    ours, theirs = (
        next(e for e in RunFolder(tmp_path / name).transcript.entries() if e.message == "TrainReply")
        for name in ("here", "there")
    )
    torch.testing.assert_close(ours["arrays"]["0"], theirs["arrays"]["0"])
