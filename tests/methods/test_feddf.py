"""FedDF beside its round by hand: what its hosts do, and that no step is no change."""

from __future__ import annotations

import torch

from fedaudit import run
from fedaudit.wire.transcript import Transcript


def test_without_steps_it_is_its_host_to_the_bit(tiny, tmp_path):
    host = {"E": 1, "B": 32, "eta": 0.1}
    a = run(tiny("feddf", rounds=2, set={"N": 0, "host": host}), out=tmp_path / "a")
    b = run(tiny("fedavg", rounds=2, set=host), out=tmp_path / "b")
    assert a.result.last.global_ == b.result.last.global_
    assert a.bytes("up", "wire") == b.bytes("up", "wire")


def test_a_host_settles_after_the_distillation(tiny, tmp_path):
    """HeteroFL's clients are asked for statistics of the model that was distilled, not of the one before."""
    set_ = {"N": 3, "B": 16, "host": {"B": 32}}
    record = run(tiny("heterofl+feddf", rounds=1, model="cnn_bn", set=set_), out=tmp_path / "a")
    entries = list(Transcript(tmp_path / "a" / "transcript").entries())
    assert [e.message for e in entries if e.direction == "down" and e.client == 0] == ["Part", "Query"]
    assert "agreement" in record.rounds[0].diagnostics
    assert record.result.last.global_points.keys() == {"before distillation"}
    query = next(e for e in entries if e.message == "Query")["w"]
    first = next(e for e in entries if e.message == "Part" and e.client == 0)["w"]
    assert not any(torch.equal(query[name], first[name]) for name in ("classifier.weight", "classifier.bias"))
