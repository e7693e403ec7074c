"""What `benchmarks/gpu_speed.py` makes of the rounds of a run."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import STUDIES

KEPT = STUDIES / "speed" / "records"


@pytest.fixture(scope="module")
def speed() -> Any:
    before = list(sys.path)
    sys.path.append(str(STUDIES.parent))
    yield importlib.import_module("gpu_speed")
    sys.path[:] = before


def test_a_round_s_time_leaves_the_first_and_the_last_out(speed: Any) -> None:
    told = {(9.0,): 9.0, (9.0, 2.0): 2.0, (9.0, 2.0, 5.0): 2.0, (9.0, 3.0, 1.0, 2.0, 8.0): 2.0}
    assert {rounds: speed.middle(rounds) for rounds in told} == told


def test_kept_lines_have_the_time_of_such_a_round(speed: Any) -> None:
    found = 0
    for path in KEPT.glob("*.json"):
        for way in json.loads(path.read_text()).values():
            if isinstance(way, dict) and "round_s" in way:
                assert way["round_s"] == round(speed.middle(way["rounds_s"]), 3), path.stem
                found += 1
    assert found > 20


def test_a_run_that_is_cut_off_leaves_the_rounds_that_ended(speed: Any, tmp_path: Path, monkeypatch) -> None:
    """Notes and evaluations tell a run's watcher too; neither begins nor ends a round."""
    now = [0.0]
    monkeypatch.setattr("round_seconds.time.perf_counter", lambda: now[0])
    bench = speed.Bench(tmp_path, "cpu", True, 60)
    bench.name = "line"
    watch = bench.watch("fast")
    told = [(0, "ready"), (0, "round 1"), (0, "note: slow"), (0, "round 1, evaluating"), (1, "round 1")]
    told += [(1, "round 2"), (1, "round 2, 3/4 clients"), (2, "round 2"), (2, "round 3"), (2, "note: slow")]
    for done, what in told:
        now[0] += 2.0
        watch(done, 3, what)
    assert json.loads((tmp_path / "line.json").read_text()) == {"fast_rounds_so_far_s": [6.0, 4.0]}


@pytest.mark.parametrize("compiles", [False, True])
def test_a_line_says_whether_its_steps_were_compiled(speed: Any, compiles: bool, tmp_path: Path, monkeypatch) -> None:
    """For each way anew: what one seed compiled is none of three seeds' steps."""
    monkeypatch.setattr(speed.mapped_loss, "_compile", lambda run: run)
    begun = []

    def run_seeds(setting: Any, seeds: list[int], out: list[Path]) -> Any:
        begun.append(len(seeds))
        if compiles == (len(seeds) == 3):
            speed.mapped_loss._compile(print)
        row = SimpleNamespace(wall_s=1.0, own_s=0.3)
        return [SimpleNamespace(rounds=[row, row], notes=[]) for _ in seeds]

    monkeypatch.setattr("fedaudit.runtime.seeds_together.run_seeds", run_seeds)
    bench = speed.Bench(tmp_path, "cpu", tiny=True, seconds=60)
    trained: list[int] = []
    monkeypatch.setattr(bench, "floor", lambda arch, shape, rows: trained.append(rows) or {"tf32": 0.1})
    bench.name = "line"
    speed.seeds_together(bench)
    assert trained == [5 * 37_500], "five epochs; a quarter of the records is held out"
    ways = [bench.figures[way]["step"] for way in ("one_seed", "three_seeds")]
    assert begun == [1, 3]
    assert ways == (["recorded", "compiled"] if compiles else ["compiled", "recorded"])


@pytest.mark.parametrize(("whole", "rounds"), [(True, 20), (False, 8)])
def test_only_whole_runs_of_fedaf_have_all_rounds(speed: Any, whole: bool, rounds: int, tmp_path: Path) -> None:
    bench = speed.Bench(tmp_path, "cpu", tiny=False, seconds=60, whole=whole)
    asked: list[int] = []
    bench.variants = lambda ways, rounds, **setting: asked.append(rounds)
    speed.fedaf(bench)
    speed.fedaf_cifar10(bench)
    assert asked == [rounds, rounds]


def test_seconds_of_server_and_clients_are_told_round_by_round(speed: Any, tmp_path: Path) -> None:
    bench = speed.Bench(tmp_path, "cpu", True, 60)
    setting = {"method": "fedavg", "set": {"E": 1, "B": 64}, "clients": 2, "model": "cnn", **speed.SERIAL}
    record, _, took = bench.run(**setting, rounds=3, eval_every=3)
    figures = bench.figures_of(record, took)
    for party in ("server", "clients"):
        each = figures[f"{party}_rounds_s"]
        assert len(each) == 3
        assert all(0 < seconds < whole for seconds, whole in zip(each, figures["rounds_s"], strict=True))
        assert figures[f"{party}_s"] == each[1], "the round between the first and the last"
        phase = {"server": ("server", "round"), "clients": ("client", "task")}[party]
        all_of_them = sum(t.wall_s for t in record.timings if t.party.startswith(phase[0]) and t.phase == phase[1])
        assert sum(each) == pytest.approx(all_of_them, abs=0.002)


def test_a_way_may_have_rounds_of_its_own(speed: Any, tmp_path: Path) -> None:
    bench = speed.Bench(tmp_path, "cpu", True, 60)
    bench.name = "line"
    ways = {"long": {}, "short": {"rounds": 1}}
    bench.variants(ways, rounds=2, method="fedavg", set={"E": 1, "B": 64}, clients=2, model="cnn")
    assert {way: len(bench.figures[way]["rounds_s"]) for way in ways} == {"long": 2, "short": 1}
    assert all(bench.figures[way]["accuracy"] > 0 for way in ways), "its last round is evaluated"


def test_a_line_counts_the_answers_that_are_missing(speed: Any, tmp_path: Path) -> None:
    """Clients that fail leave less work to those that are left, which would look like speed."""
    bench = speed.Bench(tmp_path, "cpu", True, 60)
    setting = {"method": "fedavg", "set": {"E": 1, "B": 64}, "clients": 8, "model": "cnn", "rounds": 2, **speed.SERIAL}
    for dropout in (0.0, 0.3):
        record, _, took = bench.run(**setting, dropout=dropout, quorum=0.1)
        missing = [absence for row in record.rounds for absence in row.absent]
        assert bool(missing) == bool(dropout)
        assert bench.figures_of(record, took)["absent"] == len(missing)
