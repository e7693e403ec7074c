"""Rounds as samples of a benchmark: what each figure counts, with runs, clocks and settings that are made up."""

from __future__ import annotations

import io
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedaudit.errors import SettingError
from fedaudit.gates import in_turns, round_benchmark
from fedaudit.gates.in_turns import Compared
from fedaudit.gates.round_benchmark import (
    Benchmarked,
    Limits,
    RoundCosts,
    _Side,
    benchmark_rounds,
    counted_flops,
    findings,
    reference_of,
)
from fedaudit.setting import Setting
from fedaudit.stats import Estimate

ROUNDS = [  # up, down, wire up, wire down, participants
    (1000, 2000, 1111, 2222, [0, 1, 2]),
    (7, 20, 11, 100, [0, 2]),
    (8, 40, 13, 300, [1]),
    (30, 90, 18, 800, [0, 1, 2]),
]
MEMBERS = [10, 200, 3000]


def rows(which=ROUNDS):
    names = ("up_payload", "down_payload", "up_wire", "down_wire", "participants")
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in which]


def timing(phase, gpu_s, flops=None):
    return SimpleNamespace(phase=phase, gpu_s=gpu_s, flops=flops)


def record_of(setting, which=ROUNDS, timings=(), peak=0):
    return SimpleNamespace(
        setting=setting, rounds=rows(which), timings=list(timings), data=SimpleNamespace(members=MEMBERS),
        peak_gpu_bytes=peak, device="a device", traffic=[],
    )  # fmt: skip


def setting_of(**changes):
    return SimpleNamespace(
        **{"method": "ours", "engine": "stacked", "step": "auto", "precision": "tf32", "device": "cpu", **changes}
    )


# --- the cost of a round ---------------------------------------------------------------------------------------------


def side_of(record, **facts):
    side = _Side(record.setting, Path("unused"))
    side.run = SimpleNamespace(record=record)
    for name, value in {"gpu_before": None, "opening_s": 1.23456789, "first_round_s": 2.3456789, **facts}.items():
        setattr(side, name, value)
    return side


def test_the_costs_of_a_round_by_hand():
    """The first round counts in nothing. Clients 0 and 2, 1, and all: 3010 + 200 + 3210 records in three rounds."""
    found = side_of(record_of(setting_of())).costs(4.0, 77.0, 555)
    assert found == RoundCosts(
        bytes_up=15.0, bytes_down=50.0, wire_up=14.0, wire_down=400.0, gpu_s=None, flops=77.0, peak_host_bytes=555,
        peak_gpu_bytes=None, round_s=4.0, samples_per_s=6420 / 3 / 4, opening_s=1.2346, first_round_s=2.3457,
        engine="stacked", step="eager", precision="tf32", device="a device",
    )  # fmt: skip


def test_the_costs_of_a_round_on_a_gpu():
    """Phases within others count once: 2 + 5 + 8 + 0.5 seconds less the 3.5 of the first round, in three rounds."""
    timings = [timing("task", 2.0), timing("train", 100.0), timing("round", 5.0), timing("encode", None),
               timing("decode", 8.0), timing("evaluate", 50.0), timing("protect", 0.5)]  # fmt: skip
    record = record_of(setting_of(device="cuda:1"), timings=timings, peak=99)
    found = side_of(record, gpu_before=3.5).costs(None, None, 1)
    assert (found.gpu_s, found.peak_gpu_bytes, found.step) == (4.0, 99, "recorded")
    assert (found.round_s, found.samples_per_s, found.flops) == (None, None, None)
    assert side_of(record, gpu_before=None).costs(None, None, 1).gpu_s is None
    compiled = record_of(setting_of(device="cuda", step="compiled"))
    assert side_of(compiled, gpu_before=1.0).costs(None, None, 1).step == "compiled"
    assert side_of(compiled, gpu_before=1.0).costs(None, None, 1).gpu_s is None


def test_a_run_of_one_round_has_the_costs_of_that():
    found = side_of(record_of(setting_of(), ROUNDS[:1])).costs(2.0, None, 0)
    assert (found.bytes_up, found.bytes_down, found.wire_up, found.wire_down) == (1000, 2000, 1111, 2222)
    assert found.samples_per_s == 3210 / 2


def test_opening_and_the_first_round_are_timed_apart(monkeypatch):
    now = iter([100.0, 103.0, 110.0])
    events = []

    class Run:
        record = record_of(setting_of(), timings=[timing("task", 1.5), timing("round", 2.0)])

        def __init__(self, *given):
            events.append(given)

        def __enter__(self):
            events.append("opened")
            return self

        def __exit__(self, *_):
            events.append("closed")

        def round(self):
            events.append("round")

    monkeypatch.setattr(round_benchmark, "RoundByRound", Run)
    monkeypatch.setattr(round_benchmark, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    side = _Side("a setting", "a folder")
    assert (side.opening_s, side.first_round_s) == (0.0, 0.0)
    with ExitStack() as closing:
        side.open(closing)
    assert events == [("a setting", "a folder"), "opened", "round", "closed"]
    assert (side.opening_s, side.first_round_s, side.gpu_before) == (3.0, 7.0, 3.5)


def test_flops_are_counted_in_a_short_eager_run(monkeypatch, tmp_path):
    """Of clients' tasks and the server's rounds, half of them in each of two rounds; other phases lie within."""
    ran = []

    def run(setting, out):
        ran.append((setting, out))
        counts = [("task", 3.0), ("train", 1000.0), ("round", 5.0), ("task", None), ("task", 20.0)]
        return SimpleNamespace(timings=[timing(phase, None, flops) for phase, flops in counts])

    monkeypatch.setattr(round_benchmark, "run", run)
    asked = Setting.make(method="fedavg", rounds=50, engine="stacked", eval_every=7)
    assert counted_flops(asked, tmp_path) == 14.0
    ((setting, out),) = ran
    assert out == tmp_path
    changed = {name for name, value in setting.model_dump().items() if value != asked.model_dump()[name]}
    assert {name: getattr(setting, name) for name in changed} == {
        "rounds": 2, "eval_every": 2, "eval_clients": False, "flops": True, "engine": "serial", "step": "eager",
    }  # fmt: skip


# --- the reference ---------------------------------------------------------------------------------------------------


def test_a_reference_of_another_method_trains_alike(monkeypatch):
    """Of E, B and own, the other method has the first two. A table may say otherwise."""
    asked = []

    class Other:
        model_fields = ("E", "B", "else")

    def world_of(text):
        setting = Setting.model_validate_json(text)
        asked.append((setting.method, setting.set, setting.preset))
        ours = SimpleNamespace(model_dump=lambda: {"E": 3, "B": 64, "own": 1})
        return SimpleNamespace(method=ours if setting.method == "fedavg" else Other())

    monkeypatch.setattr(round_benchmark, "world_of", world_of)
    setting = Setting.make(method="fedavg", rounds=7, clients=5, set={"E": 3}, preset="published")
    found = reference_of(setting, "fedprox")
    assert (found.method, found.set, found.preset) == ("fedprox", {"E": 3, "B": 64}, None)
    assert (found.rounds, found.clients) == (7, 5)
    assert asked == [("fedavg", {"E": 3}, "published"), ("fedprox", {}, None)]
    assert reference_of(setting, {"method": "fedprox", "set": {"B": 8}}).set == {"B": 8}
    same = reference_of(setting, {"method": "fedavg", "clients": 9})
    assert (same.set, same.clients, same.preset) == ({"E": 3}, 9, "published")
    whole = Setting.make(method="fedprox", rounds=99, clients=2)
    assert reference_of(setting, whole) == whole.model_copy(update={"rounds": 7})
    assert len(asked) == 2, "only another method's hyper-parameters have to be looked up"


# --- the samples -----------------------------------------------------------------------------------------------------


class Samples:
    """Stands in for pytest-benchmark: it takes `chosen` rounds where it may choose, and one where it is disabled."""

    def __init__(self, disabled=False, chosen=3):
        self.disabled, self.chosen, self.extra_info = disabled, chosen, {"kept": 1}

    def __call__(self, work):
        for _ in range(1 if self.disabled else self.chosen):
            work()

    def pedantic(self, target, *, setup=None, teardown=None, rounds=1):
        for _ in range(1 if self.disabled else rounds):
            if setup is not None:
                setup()
            target()
            if teardown is not None:
                teardown()


class World:
    """A clock that only rounds move, and the runs of both sides."""

    def __init__(self, monkeypatch, ours, theirs):
        self.now, self.events, self.seconds = 0.0, [], {"ours": ours, "reference": theirs}
        self.settings, self.counted = {}, []
        monkeypatch.setattr(in_turns, "clock", lambda: self.now)
        monkeypatch.setattr(in_turns, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
        monkeypatch.setattr(round_benchmark, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(round_benchmark, "_peak", lambda: 4321)
        monkeypatch.setattr(round_benchmark, "_forget_peak", lambda: self.events.append("forgotten"))
        monkeypatch.setattr(round_benchmark, "RoundByRound", self.run)
        monkeypatch.setattr(round_benchmark, "counted_flops", self.count)
        monkeypatch.setattr(round_benchmark, "reference_of", lambda setting, of: setting_of(method=of, device="cpu"))

    def count(self, setting, folder):
        self.counted.append((setting.method, folder))
        return 10.0 * len(self.counted)

    def run(self, setting, folder):
        world, name = self, folder.name
        self.settings[name] = setting
        seconds = iter(self.seconds[name])

        class Run:
            record = record_of(setting, [])

            def __enter__(self):
                return self

            def __exit__(self, *_):
                world.events.append(f"{name} closed")

            def round(self):
                world.events.append(name)
                world.now += next(seconds)
                self.record.rounds += rows([(100, 300, 1, 1, [0])] if name == "ours" else [(50, 150, 2, 2, [1])])

            def settle(self):
                world.events.append(f"{name} settled")

        return Run()


def test_a_benchmark_alone(monkeypatch, tmp_path):
    """After a first round of 50 seconds, rounds of 2, 6 and 4: their median is 4. Nothing is waited for before them."""
    world = World(monkeypatch, [50.0, 2.0, 6.0, 4.0], [])
    samples = Samples()
    found = benchmark_rounds(samples, {"method": "fedavg"}, tmp_path)
    assert world.settings["ours"].rounds == 10_000
    assert world.events == ["forgotten", "ours", "ours", "ours", "ours", "ours closed"]
    assert (found.costs.round_s, found.costs.flops, found.costs.peak_host_bytes) == (4.0, 10.0, 4321)
    assert (found.costs.first_round_s, found.costs.samples_per_s) == (50.0, 2.5)
    assert world.counted == [("fedavg", tmp_path / "ours-flops")]
    assert (found.reference, found.reference_costs, found.compared) == (None, None, None)
    assert samples.extra_info == {"kept": 1, **asdict(found.costs)}


def test_a_benchmark_of_so_many_rounds(monkeypatch, tmp_path):
    world = World(monkeypatch, [50.0, 2.0, 6.0], [])
    found = benchmark_rounds(Samples(), {"method": "fedavg"}, tmp_path, rounds=2, flops=False)
    assert world.settings["ours"].rounds == 4
    assert world.events == ["forgotten", "ours", "ours settled", "ours", "ours settled", "ours", "ours closed"]
    assert (found.costs.round_s, found.costs.flops, world.counted) == (4.0, None, [])


@pytest.mark.parametrize(("rounds", "seconds"), [(None, None), (1, None)])
def test_a_disabled_benchmark_measures_nothing(rounds, seconds, monkeypatch, tmp_path):
    World(monkeypatch, [50.0, 2.0], [])
    found = benchmark_rounds(Samples(disabled=True), {"method": "fedavg"}, tmp_path, rounds=rounds)
    assert found.costs.round_s is seconds
    assert found.costs.samples_per_s is None


def test_one_round_is_a_measurement_where_benchmarks_are_not_disabled(monkeypatch, tmp_path):
    World(monkeypatch, [50.0, 2.0], [])
    assert benchmark_rounds(Samples(), {"method": "fedavg"}, tmp_path, rounds=1).costs.round_s == 2.0


def test_a_benchmark_beside_a_reference(monkeypatch, tmp_path):
    """Eight pairs: ours take 3 seconds, theirs 2, and the ratio is 1.5. Theirs come first in every other pair."""
    world = World(monkeypatch, [50.0] + [3.0] * 8, [70.0] + [2.0] * 8)
    samples = Samples()
    found = benchmark_rounds(samples, {"method": "fedavg"}, tmp_path, rounds=8, relative_to="fedprox",
                             limits=Limits(max_ratio=1.25))  # fmt: skip
    assert world.settings["ours"].rounds == 2 + 8 * 16
    turns = [event for event in world.events if "settled" not in event]
    pairs = ["reference", "ours", "ours", "reference"]
    assert turns == ["forgotten", "ours", "reference", *pairs * 4, "reference closed", "ours closed"]
    assert (found.costs.round_s, found.reference_costs.round_s) == (3.0, 2.0)
    assert (found.costs.bytes_up, found.reference_costs.bytes_up) == (100, 50)
    assert (found.costs.flops, found.reference_costs.flops) == (10.0, 20.0)
    assert world.counted[1] == ("fedprox", tmp_path / "reference-flops")
    assert (found.record.setting.method, found.reference.setting.method) == ("fedavg", "fedprox")
    assert found.compared.told == "broken"
    assert samples.extra_info == {
        "kept": 1, **asdict(found.costs), "relative_to": "fedprox", "reference": asdict(found.reference_costs),
        "ratio": pytest.approx(1.5), "ratio_low": pytest.approx(1.5), "ratio_high": pytest.approx(1.5),
        "max_ratio": 1.25, "told": "broken", "rounds_to_tell": None, "ratios": [1.5] * 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "disabled", "pairs"),
    [(1.0, False, 16 * 8), (None, False, 8), (9.0, False, 8), (1.0, True, 1)],
)
def test_more_rounds_are_taken_while_the_verdict_cannot_be_told(limit, disabled, pairs, monkeypatch, tmp_path):
    """Ratios spread widely about 1, so that no number of rounds tells: 8, and 8, 16, 32, 64 more."""
    ours = np.exp(np.random.default_rng(0).normal(0.0, 0.5, 160)).tolist()
    World(monkeypatch, [50.0, *ours], [70.0] + [1.0] * 160)
    samples = Samples(disabled=disabled)
    limits = Limits(max_ratio=limit)
    found = benchmark_rounds(samples, {"method": "fedavg"}, tmp_path, rounds=8, relative_to="fedprox", limits=limits)
    assert len(found.record.rounds) == len(found.reference.rounds) == 1 + pairs
    if disabled:
        assert found.compared is None
        assert "ratio" not in samples.extra_info
    else:
        assert found.compared.ratio.n == pairs
        assert found.compared.told == ("cannot be told" if limit == 1.0 else "kept")


def test_a_comparison_has_ten_rounds_unless_it_is_said(monkeypatch, tmp_path):
    world = World(monkeypatch, [1.0] * 30, [1.0] * 30)
    found = benchmark_rounds(Samples(), {"method": "fedavg"}, tmp_path, relative_to="fedprox")
    assert world.settings["ours"].rounds == 2 + 10 * 16
    assert found.compared.ratio.n == 10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": 0}, "at least one round"),
        ({"rounds": 7, "relative_to": "fedprox", "limits": Limits(max_ratio=1.2)}, "give 8 at least"),
        ({"limits": Limits(max_flops_ratio=1.2), "relative_to": "fedprox", "flops": False}, "leave out flops=False"),
        ({"limits": Limits(max_bytes_ratio=1.2)}, "relative_to="),
        ({"limits": Limits(max_ratio=0.0), "relative_to": "fedprox"}, "not a ratio"),
        ({"limits": Limits(max_ratio=float("inf")), "relative_to": "fedprox"}, "not a ratio"),
    ],
)
def test_what_cannot_be_benchmarked(given, words, monkeypatch, tmp_path):
    World(monkeypatch, [1.0] * 30, [1.0] * 30)
    with pytest.raises(SettingError, match=words):
        benchmark_rounds(Samples(), {"method": "fedavg"}, tmp_path, **given)


def test_seven_rounds_are_enough_where_no_time_is_limited(monkeypatch, tmp_path):
    World(monkeypatch, [1.0] * 30, [1.0] * 30)
    limits = Limits(max_bytes_ratio=1.2, max_flops_ratio=3.0)
    given = {"rounds": 7, "relative_to": "fedprox", "limits": limits}
    assert benchmark_rounds(Samples(), {"method": "fedavg"}, tmp_path, **given).compared.told == "kept"


# --- the verdicts ----------------------------------------------------------------------------------------------------


def costs_of(up, down, flops):
    return RoundCosts(up, down, 0, 0, None, flops, 0, None, None, None, 0, 0, "serial", "eager", "float32", "cpu")


def benchmarked(told="kept", *, theirs="fedprox", value=1.5, to_tell=None, traffic=True, flops=(600.0, 400.0)):
    fields = [("up", "A.a", 5), ("down", "B.b", 50), ("up", "C.c", 7)] if traffic else []
    record = SimpleNamespace(
        setting=SimpleNamespace(method="fedavg"),
        traffic=[SimpleNamespace(direction=way, field=name, payload=size) for way, name, size in fields],
    )
    reference = SimpleNamespace(setting=SimpleNamespace(method=theirs))
    compared = Compared(Estimate(value=value, low=value - 0.25, high=value + 0.5, n=11), 1.2, told, to_tell)
    return Benchmarked(
        record, costs_of(1000.0, 1048, flops[0]), reference, costs_of(1000.0, 24, flops[1]), compared
    )  # fmt: skip


def test_every_limit_has_its_finding():
    every = Limits(max_ratio=1.2, max_bytes_ratio=2.0, max_flops_ratio=1.5)
    assert [(one.gate, one.told, one.message) for one in findings(benchmarked(), every)] == [
        (
            "max_ratio", "kept",
            "fedavg: a round takes 1.5 [1.25, 2] times as long as one of fedprox (11 pairs of rounds in turns), the "
            "limit 1.2.",
        ),
        ("max_bytes_ratio", "kept", "fedavg: a round sends 2.05 kB, 2 times the 1.02 kB of fedprox, the limit 2."),
        (
            "max_flops_ratio", "kept",
            "fedavg: a round computes 600 FLOPs, 1.5 times the 400 FLOPs of fedprox, the limit 1.5.",
        ),
    ]  # fmt: skip
    for name in ("max_ratio", "max_bytes_ratio", "max_flops_ratio"):
        assert [one.gate for one in findings(benchmarked(), Limits(**{name: 1.0}))] == [name]
    alone = benchmarked()
    assert findings(Benchmarked(alone.record, alone.costs), every) == []


def test_a_broken_limit_says_by_how_much():
    over = Limits(max_ratio=1.2, max_bytes_ratio=1.6, max_flops_ratio=1.0)
    time, sent, flops = findings(benchmarked("broken"), over)
    assert (time.told, sent.told, flops.told) == ("broken", "broken", "broken")
    assert time.message.endswith("the limit 1.2 (25.0% over).")
    assert sent.message.endswith("the limit 1.6 (25.0% over); the largest field is down B.b.")
    assert flops.message.endswith("the limit 1 (50.0% over).")
    (bare,) = findings(benchmarked(traffic=False), Limits(max_bytes_ratio=1.6))
    assert bare.message.endswith("the limit 1.6 (25.0% over).")


@pytest.mark.parametrize(
    ("to_tell", "end"), [(None, "told."), (1234, "; about 1,234 rounds would tell (rounds=1234).")]
)
def test_what_cannot_be_told_says_what_would_tell(to_tell, end):
    (found,) = findings(benchmarked("cannot be told", to_tell=to_tell), Limits(max_ratio=1.2))
    assert found.told == "cannot be told"
    assert "the limit 1.2: the interval spans the limit, so it cannot be told" in found.message
    assert found.message.endswith(end)


def test_a_reference_of_the_same_method_is_called_the_reference():
    time, sent = findings(benchmarked(theirs="fedavg"), Limits(max_ratio=1.2, max_bytes_ratio=2.0))
    assert "one of the reference (" in time.message
    assert "of the reference, the limit" in sent.message


def test_there_is_no_ratio_to_nothing():
    with pytest.raises(SettingError, match="fedprox computes nothing in a round"):
        findings(benchmarked(flops=(600.0, None)), Limits(max_flops_ratio=1.0))
    (found,) = findings(benchmarked(flops=(None, 400.0)), Limits(max_flops_ratio=1.0))
    assert (found.told, " 0 times the 400 FLOPs" in found.message) == ("kept", True)


def test_rounding_breaks_no_limit():
    for ours, told in ((3.0 * (1 + 1e-12), "kept"), (3.0 * (1 + 1e-11), "broken")):
        (found,) = findings(benchmarked(flops=(ours, 1.0)), Limits(max_flops_ratio=3.0))
        assert found.told == told


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_peak_of_memory_is_read_from_the_system(monkeypatch):
    opened = []

    def there(path, *mode):
        opened.append((path, *mode))
        return io.StringIO("VmPeak:\t 9 kB\nVmHWM:\t 1500 kB\nVmRSS:\t 7 kB\n")

    monkeypatch.setattr(round_benchmark, "open", there, raising=False)
    monkeypatch.setattr(round_benchmark, "peak_rss", lambda: 77)
    assert round_benchmark._peak() == 1500 * 1024
    round_benchmark._forget_peak()
    assert opened == [("/proc/self/status",), ("/proc/self/clear_refs", "w")]
    monkeypatch.setattr(round_benchmark, "open", lambda *path: io.StringIO("VmPeak:\t 9 kB\n"))
    assert round_benchmark._peak() == 77
