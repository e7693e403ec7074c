"""How `benchmarks/studies/speed/arithmetic.py` counts the operations of a round from runs with few steps."""

from __future__ import annotations

import importlib
import json
import tomllib
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
from pages import STUDIES, script

from fedaudit import registry
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


@pytest.mark.long
def test_an_attack_counts_what_its_images_take(counting: ModuleType) -> None:
    """Each client's inverter trains alone, and what is added by a step is as much in each; scores count nothing."""
    kind = {"method": "dffke", "dataset": "digits", "model": "cnn", "clients": 2, "partition": "iid"}
    few = {"tau": "off", "E_local": 1, "B": 64, "h": 8, "T_Tran": 0, "T_Dec": 0, "T_FKE": 0, "w_Dec": 1, "R": 1}
    setting = json.dumps({**kind, "set": few})

    def inverted(steps: int, batch: int) -> int:
        return int(counting.of_attack({"attack": "decoder", "steps": steps, "batch": batch}, setting))

    one, two, three = (inverted(steps, 8) for steps in (1, 2, 3))
    assert two - one == three - two > 0
    assert inverted(2, 16) - inverted(1, 16) == 2 * (two - one), "twice the batch"
    assert one - (two - one) > 0, "the images that it gives in the end"
    assert counting.ran(setting) == counting.ran(setting), "one run for all of them"


def test_lines_of_attacks_count_the_attack(counting: ModuleType, monkeypatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(counting, "of_attack", lambda spec, setting: told.append((spec, json.loads(setting))) or 5)
    line = counting.LINES["matching"]
    assert counting.counted(line, {"steps": 7}) == 5
    ((spec, setting),) = told
    assert spec == {"attack": "gradient_match", "restarts": 4, "together": 64, "steps": 7}
    assert setting == {**line.setting, "set": line.fixed}


@pytest.mark.parametrize("line", ["decoders", "matching"])
def test_attacks_are_those_that_are_timed(line: str, counting: ModuleType, monkeypatch, tmp_path) -> None:
    """The same attack on the same run, with as many steps."""
    monkeypatch.syspath_prepend(STUDIES.parent)
    speed = importlib.import_module("gpu_speed")
    timed: list[Any] = []
    monkeypatch.setattr(speed, "_attacked", lambda bench, spec, **setting: timed.append((spec, setting)))
    getattr(speed, line)(speed.Bench(tmp_path, "cpu", tiny=False, seconds=1))
    mine, ((spec, setting),) = counting.LINES[line], timed
    assert {**mine.attack, **mine.steps} == spec
    assert {**mine.setting, "set": mine.fixed} == setting


@pytest.mark.parametrize("line", ["dfrd", "dffke", "dffke_second", "dffke_resnet18", "fedaf", "fedaf_cifar10"])
def test_rounds_are_those_that_are_timed(line: str, counting: ModuleType, monkeypatch, tmp_path) -> None:
    """The same setting but for the share of the records, and the round whose time counts."""
    monkeypatch.syspath_prepend(STUDIES.parent)
    speed = importlib.import_module("gpu_speed")
    bench, timed = speed.Bench(tmp_path, "cpu", tiny=False, seconds=1), list[Any]()
    monkeypatch.setattr(bench, "variants", lambda ways, rounds=3, **setting: timed.append((rounds, setting)))
    getattr(speed, line)(bench)
    mine, ((rounds, setting),) = counting.LINES[line], timed
    values, few = setting.pop("set"), mine.setting | {"aux": setting.get("aux")}
    assert few == {"aux": None} | setting
    method = registry.find(setting["method"])
    whole, counts = (method.make(of, setting.get("preset")).model_dump() for of in (values, mine.fixed | mine.steps))
    assert {name: (whole[name], counts[name]) for name in whole if whole[name] != counts[name]} == {}
    assert mine.round == rounds or rounds == 8, "of eight rounds all are alike"


def test_fedaf_on_cifar10_is_timed_in_the_tables_reading(monkeypatch, tmp_path) -> None:
    """Serial ways run one round in the precision of the others; the compiled one runs eight, or the whole twenty."""
    monkeypatch.syspath_prepend(STUDIES.parent)
    speed = importlib.import_module("gpu_speed")
    bench, timed = speed.Bench(tmp_path, "cpu", tiny=False, seconds=1), list[Any]()
    monkeypatch.setattr(bench, "variants", lambda ways, rounds=3, **setting: timed.append((ways, rounds, setting)))
    speed.fedaf_cifar10_row(bench)
    cells = tomllib.loads((STUDIES / "shared" / "published.toml").read_text())["cell"]
    (asked,) = [cell["asked"] for cell in cells if cell["key"] == "fedaf-cifar10"]
    mine = timed[0][2]
    assert {name: mine[name] for name in asked} == {
        **asked,
        "set": {**asked["set"], "aug_fill": mine["set"]["aug_fill"]},
    }
    assert list(mine["set"]["aug_fill"]) == asked["set"]["aug_fill"]
    speed.fedaf(bench)
    ways, rounds, _ = timed[1]
    told = {name: (way["precision"], way.get("rounds", rounds), way["step"]) for name, way in ways.items()}
    assert told == {
        "stacked_tf32_compiled": ("tf32", 8, "compiled"),
        "stacked_tf32": ("tf32", 1, "recorded"),
        "serial": ("tf32", 1, "eager"),
    }


def test_a_floor_is_the_arithmetic_over_the_rate_of_the_machine(counting: ModuleType) -> None:
    """The rate is that of the line `fedavg`, whose floor was measured on the GPU's machine."""
    table = script("speed_table")
    kept = json.loads((KEPT / "arithmetic.json").read_text())
    measured = json.loads((KEPT / "fedavg.json").read_text())["floor_s"]
    found = table.floors(KEPT)
    assert found["fedavg"] == pytest.approx(measured)
    times = kept["dfrd"]["flops"] / kept["fedavg"]["flops"]
    assert found["dfrd"]["tf32"] == pytest.approx(times * measured["tf32"])
    half = kept["shadows"]["flops"] / (64 * 100 * 64)
    assert found["shadows"]["tf32"] == pytest.approx(
        kept["shadows"]["flops"] / kept["fedavg"]["flops"] * measured["tf32"]
    )
    assert half == counting.of_rows("convnet@0.5", (3, 32, 32), 1)
    row = next(row for row in table.rows(KEPT) if row.startswith("| decoders | stacked |"))
    assert row.split(" | ")[2:4] == ["float32", f"{found['decoders']['float32']:.3f}"]
    convnet = build("convnet", shape=(1, 28, 28), classes=10)
    assert kept["fedavg"]["flops"] > 60_000 * 4 * sum(p.numel() for p in convnet.parameters() if p.dim() == 4)
