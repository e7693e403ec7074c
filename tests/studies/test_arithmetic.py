"""How `benchmarks/studies/speed/arithmetic.py` counts the operations of a round from runs with few steps."""

from __future__ import annotations

import json
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
from pages import STUDIES, script

from fedaudit.training.models import build

KEPT = STUDIES / "speed" / "records"


@pytest.fixture(scope="module")
def counting() -> ModuleType:
    return script("arithmetic")


@pytest.mark.long
def test_a_round_of_fedavg_counts_what_its_training_does(counting: ModuleType, monkeypatch) -> None:
    """Four epochs of two clients over a tenth of the records: neither evaluation nor the first round is counted."""
    setting = {"method": "fedavg", "dataset": "digits", "model": "cnn", "clients": 2, "aux": 0.9}
    line = counting.Line(setting, {"E": 4}, round=2, fixed={"B": 64})
    monkeypatch.setitem(counting.LINES, "few", line)
    rows = 1437 - 1293  # digits have 1,437 records to train on, and `aux` takes nine tenths of them away
    assert counting.arithmetic("few")["flops"] == counting.of_rows("cnn", (1, 8, 8), 4 * rows)


def made_up(counting: ModuleType, monkeypatch, runs: Any) -> None:
    monkeypatch.setattr(counting, "counted", lambda line, steps, times=1: runs(steps["E"], steps["T"], times))
    monkeypatch.setitem(counting.LINES, "line", counting.Line({}, {"E": 10, "T": 7}, rows=Fraction(3, 2)))


def test_a_sum_over_kinds_of_steps_is_told_from_few_of_them(counting: ModuleType, monkeypatch) -> None:
    made_up(counting, monkeypatch, lambda e, t, times: times * (100 + 20 * e + 4 * t))
    found = counting.arithmetic("line")
    assert (found["flops"], found["of_the_rest"]) == (1.5 * (100 + 200 + 28), 100)
    assert found["of_a_step"] == {"E": 20, "T": 4}


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (lambda e, t, times: times * (100 + 20 * e * t), "line: three steps of each kind count 280, and 200 were"),
        (lambda e, t, times: 100 + times * (20 * e + t), "line: twice the rows count 142, and 242 were expected"),
    ],
)
def test_what_is_no_such_sum_is_refused(counting: ModuleType, monkeypatch, runs: Any, words: str) -> None:
    made_up(counting, monkeypatch, runs)
    with pytest.raises(RuntimeError, match=words):
        counting.arithmetic("line")


def test_a_floor_is_the_arithmetic_over_the_rate_of_the_machine() -> None:
    """The rate is that of the line `fedavg`, whose floor was measured on the GPU's machine."""
    table = script("speed_table")
    kept = json.loads((KEPT / "arithmetic.json").read_text())
    measured = json.loads((KEPT / "fedavg.json").read_text())["floor_s"]
    found = table.floors(KEPT)
    assert found["fedavg"] == pytest.approx(measured)
    times = kept["dfrd"]["flops"] / kept["fedavg"]["flops"]
    assert found["dfrd"]["tf32"] == pytest.approx(times * measured["tf32"])
    convnet = build("convnet", shape=(1, 28, 28), classes=10)
    assert kept["fedavg"]["flops"] > 60_000 * 4 * sum(p.numel() for p in convnet.parameters() if p.dim() == 4)
