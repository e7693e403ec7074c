"""The ledger of private training, counted again: what was done, and each number that says less."""

from __future__ import annotations

import pytest
from protected import fedavg

from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.privacy.dpsgd import Planned
from fedaudit.runtime.run_record import read_record

REAL = Planned.entry


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        ("steps", lambda s: s // 2, "steps, and"),
        ("sample_rate", lambda q: q / 2, "a sample rate of"),
        ("clip", lambda C: C / 2, "a clipping norm of"),
        ("noise_multiplier", lambda m: 2 * m, "a noise multiplier of"),
        ("delta", lambda d: 10 * d, "delta ="),
    ],
)
def test_each_number_of_the_ledger_is_counted_again(tmp_path, monkeypatch, number, change, words):
    def entry(self, made=None):
        true = REAL(self, made)
        return true.model_copy(update={number: change(getattr(true, number))})

    with monkeypatch.context() as m:
        m.setattr(Planned, "entry", entry)
        folder = fedavg(tmp_path / "a")
    (found,) = audit_residuals(folder)
    assert found.verdict == "refuted"
    assert words in found.how
    if number in ("steps", "sample_rate"):
        assert "and what was done costs" in found.how
        assert found.lower_bound > read_record(folder).ledger[0].by_kind["training"]
