"""A field that is None: nothing is billed where that was known before the run, and everything where it was not."""

from __future__ import annotations

import math

import pytest

import fedaudit
from fedaudit.errors import RunError
from fedaudit.methods.distillation.dsfl import SoftLabels
from fedaudit.runtime.world import World
from fedaudit.setting import Setting

TINY = {"dataset": "digits", "model": "mlp", "clients": 6, "rounds": 2, "eval_clients": False}


def billed(record):
    return [sum(entry.field == "Perhaps.w" for entry in client.entries) for client in record.ledger]


def test_what_the_setting_leaves_out_is_not_billed(tmp_path):
    record = fedaudit.run(method="leaky_means:Silent", out=tmp_path / "never", **TINY)
    assert billed(record) == [0] * 6
    assert all(client.epsilon == 0 for client in record.ledger)


def test_what_the_records_leave_out_is_billed_whether_sent_or_not(tmp_path):
    record = fedaudit.run(method="leaky_means:Silent", set={"when": "records"}, out=tmp_path / "records", **TINY)
    sent = sum(t.payload for t in record.traffic if t.field == "Perhaps.w")
    assert 0 < sent < 2 * 6 * 8, "some clients send a number in both rounds, the others None"
    assert billed(record) == [1] * 6
    assert all(client.epsilon == math.inf for client in record.ledger)


def test_traffic_that_waits_for_what_was_chosen_does_not_make_it_free(tmp_path):
    """Planned as nothing, and sent by those whose records say so: the bytes agree, and the run ends all the same."""
    with pytest.raises(RunError, match=r"Perhaps.w was sent, and the traffic that was declared before the run"):
        fedaudit.run(
            method="leaky_means:Silent", set={"when": "records", "hides": True}, out=tmp_path / "hides", **TINY
        )


def test_ds_fl_with_equal_weights_is_not_billed_for_counts_that_it_does_not_send():
    values = {"method": "dsfl", "public": 0.1, **TINY}
    equal, samples = (World(Setting.make(**values, set={"weights": weights})) for weights in ("equal", "samples"))
    assert "SoftLabels.N" in equal.absent(1)
    assert "SoftLabels.N" not in samples.absent(1)
    assert SoftLabels.optional() == {"N"}
