"""Figures of a run by hand, and what each metric says of itself."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from fedaudit.metrics import attacks, cost, guarantee, utility
from fedaudit.metrics.metric import Metric, metric_named, metrics

# part, unit, better, sampled, bounds, depends on the machine, over seeds, column, folded, name in tables, in budgets
SAYS = {
    "accuracy": ("Utility", "share", "high", True, (0, 1), False, "mean", True, False, "accuracy", "accuracy"),
    "own": ("Utility", "share", "high", True, (0, 1), False, "mean", True, False, "own", "own"),
    "global_own": ("Utility", "share", "high", True, (0, 1), False, "mean", True, True, "global_own", "global_own"),
    "claim": ("Guarantee", "epsilon", None, False, (0, math.inf), False, "set", True, True, "claim", "claim"),
    "epsilon": (
        "Guarantee", "epsilon", "low", False, (0, math.inf), False, "largest", True, False, "epsilon", "epsilon",
    ),
    "lower": ("Guarantee", "epsilon", None, True, (0, math.inf), False, "bound", True, False, "lower_bound", "lower"),
    "noise": ("Guarantee", "epsilon", None, True, (0, math.inf), False, "bound", True, True, "noise_bound", "noise"),
    "refuted": ("Guarantee", "count", "low", False, (0, math.inf), False, "mean", False, False, "refuted", "refuted"),
    "tpr": ("Attacks", "share", "low", True, (0, 1), False, "mean", True, True, "tpr", "tpr"),
    "auc": ("Attacks", "auc", "low", True, (0, 1), False, "mean", True, False, "auc", "auc"),
    "identified": ("Attacks", "share", "low", True, (0, 1), False, "mean", True, False, "identified", "identified"),
    "up": ("Cost", "bytes", "low", False, (0, math.inf), False, "mean", True, False, "up", "up"),
    "down": ("Cost", "bytes", "low", False, (0, math.inf), False, "mean", True, False, "down", "down"),
    "per_byte": ("Cost", "points", "high", True, (0, math.inf), False, "mean", True, False, "per_byte", "per_byte"),
    "flops": ("Cost", "count", "low", False, (0, math.inf), False, "mean", False, False, "flops", "flops"),
    "seconds": ("Cost", "seconds", "low", True, (0, math.inf), True, "mean", True, False, "seconds", "time"),
    "memory": ("Cost", "bytes", "low", True, (0, math.inf), True, "mean", True, True, "peak_memory", "peak_memory"),
}  # fmt: skip


def test_what_each_metric_says_of_itself():
    """None of them is a line of `fedaudit show`, which has other words; a remark disqualifies an epsilon alone."""
    found = {
        m.key: (m.part, m.unit, m.better, m.sampled, m.bounds, m.machine, m.seeds, m.column, m.folded, m.in_table,
                m.in_budget)
        for m in metrics().values()
    }  # fmt: skip
    assert {key: found[key] for key in SAYS} == SAYS
    assert [key for key in SAYS if metrics()[key].line] == []
    assert [key for key in SAYS if metrics()[key].flag_disqualifies] == ["epsilon"]


def test_a_metric_that_says_no_more_than_it_must():
    plain = Metric("x", "X", "Cost", "count", "low", False, "It is made up.", lambda record: 1.0)
    assert (plain.bounds, plain.machine, plain.seeds, plain.flag_disqualifies) == (
        (0.0, math.inf),
        False,
        "mean",
        False,
    )
    assert (plain.column, plain.folded, plain.line, plain.in_table, plain.in_budget) == (True, False, True, "x", "x")
    optional = (plain.attack, plain.interval, plain.missing, plain.left_out, plain.detail, plain.flag, plain.how)
    assert {*optional, plain.refusal} == {None}


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("share", 0.1234, "12.3 %"), ("auc", 0.12345, "0.123"), ("bytes", 2500.0, "2.50 kB"),
        ("seconds", 999.94, "999.9 s"), ("seconds", 1000.0, "1,000 s"), ("points", 12.345, "12.3"),
        ("count", None, "–"), ("count", math.inf, "∞"), ("count", math.nan, "not a number"), ("epsilon", 0.5, "0.5"),
    ],
)  # fmt: skip
def test_a_value_in_its_unit(unit, value, text):
    assert Metric("x", "X", "Cost", unit, "low", False, "Made up.", lambda record: 1.0).text(value) == text


# --- cost -------------------------------------------------------------------------------------------------------------


def timing(phase, wall_s, gpu_s=None, flops=None):
    return SimpleNamespace(phase=phase, wall_s=wall_s, gpu_s=gpu_s, flops=flops)


def record(timings=(), participants=((0, 1), (2,)), up=900, down=1500, score=0.8, **facts):
    test = SimpleNamespace(low=0.7, high=0.9)
    last = None if score is None else SimpleNamespace(
        test_score=lambda: score, global_=SimpleNamespace(test=test, local_test=SimpleNamespace(mean=0.25)),
        clients=SimpleNamespace(local_test=SimpleNamespace(mean=0.5)),
    )  # fmt: skip
    base = {
        "timings": list(timings), "rounds": [SimpleNamespace(participants=list(who)) for who in participants],
        "bytes": {"up": up, "down": down}.__getitem__, "result": SimpleNamespace(last=last), "audits": [],
        "setting": SimpleNamespace(method="fedavg", compress=None, privacy={}), "peak_gpu_bytes": 0,
        "peak_rss_bytes": 0,
    }  # fmt: skip
    return SimpleNamespace(**(base | facts))


def test_bytes_are_of_one_client_in_one_round():
    """Clients took part three times: two in the first round, one in the second."""
    one = record()
    assert cost.asked(one) == 3
    assert (metric_named("up").value(one), metric_named("down").value(one)) == (300.0, 500.0)
    assert metric_named("up").value(record(participants=((), ()))) is None


def test_accuracy_per_megabyte_with_its_interval():
    """80 % for 2 MB are 40 points for each; 70 % and 90 % scale alike."""
    one = record(up=2_000_000)
    assert cost.per_byte(one) == pytest.approx(40.0)
    low, high, name = cost._per_byte_interval(one)
    assert (low, high) == (pytest.approx(35.0), pytest.approx(45.0))
    assert name == utility.accuracy_interval(one)[2]
    assert cost.per_byte(record(up=0)) is None
    assert cost._per_byte_interval(record(up=0)) is None
    assert cost.per_byte(record(score=None)) is None
    local = record(up=2_000_000)
    local.result.last.global_ = None
    assert (cost.per_byte(local), cost._per_byte_interval(local)) == (pytest.approx(40.0), None)
    nothing = record(up=2_000_000, score=0.0)
    assert cost._per_byte_interval(nothing)[:2] == (0.7, 0.9)


def test_the_figure_per_byte_is_shown_where_something_is_compressed():
    compressed = record()
    compressed.setting.compress = {"weights": "half"}
    assert cost._nothing_compressed([record(), compressed]) == ""
    assert cost._nothing_compressed([record(), record()]) == "no run compresses what clients send"


def test_seconds_of_all_work_on_the_device_that_did_it():
    """Phases within others and evaluation do not count."""
    rows = [timing("task", 5.0), timing("round", 2.0), timing("train", 99.0), timing("evaluate", 99.0),
            timing("decode", 0.5), timing("encode", 0.25), timing("protect", 0.125)]  # fmt: skip
    assert cost.seconds(record(rows)) == 7.875
    assert (cost.uses_gpu(record(rows)), cost._device([record(rows)])) == (False, "CPU")
    gpu = [timing("task", 5.0, 1.5), timing("round", 2.0), timing("train", 9.0, 7.0)]
    assert (cost.seconds(record(gpu)), cost._device([record(gpu), record(rows)])) == (1.5, "GPU")
    assert cost.seconds(record([timing("train", 9.0)])) is None


def test_flops_are_those_of_tasks():
    rows = [timing("task", 1.0, flops=5), timing("task", 1.0, flops=7), timing("round", 1.0, flops=99),
            timing("task", 1.0)]  # fmt: skip
    assert (cost.flops(record(rows)), cost._uncounted(record(rows))) == (12, "")
    bare = record([timing("task", 1.0), timing("round", 1.0, flops=99)])
    assert cost.flops(bare) is None
    assert cost._uncounted(bare).startswith("A budget on FLOPs needs a run that counted them")


@pytest.mark.parametrize(("gpu", "host", "peak"), [(7, 9, 7), (0, 9, 9), (0, 0, None), (None, 9, 9)])
def test_the_peak_of_memory_is_the_gpus_if_there_is_one(gpu, host, peak):
    assert metric_named("memory").value(record(peak_gpu_bytes=gpu, peak_rss_bytes=host)) == peak


# --- utility, claims, attacks ---------------------------------------------------------------------------------------


def test_accuracies_of_the_last_round():
    one = record()
    own, of_global = metric_named("own").value, metric_named("global_own").value
    assert (utility.accuracy(one), own(one), of_global(one)) == (0.8, 0.5, 0.25)
    none = record(score=None)
    assert (utility.accuracy(none), own(none), of_global(none), utility.accuracy_interval(none)) == (None,) * 4
    bare = record()
    bare.result.last.clients.local_test = bare.result.last.global_.local_test = None
    assert (own(bare), of_global(bare)) == (None, None)
    bare.result.last.clients = bare.result.last.global_ = None
    assert (own(bare), of_global(bare), utility.accuracy_interval(bare)) == (None, None, None)


def test_why_a_run_has_no_accuracy():
    assert utility._no_accuracy(record()) == ""
    assert "has no evaluated round" in utility._no_accuracy(record(score=None))
    unscored = record()
    unscored.result.last.test_score = lambda: None
    assert "evaluated no model" in utility._no_accuracy(unscored)


def test_the_largest_epsilon_that_is_asked_for_is_the_claim():
    one = record()
    one.setting.privacy = {"logits": {"epsilon": 2}, "labels": {"epsilon": 5.5}, "training": {"noise_multiplier": 1}}
    claim = metric_named("claim")
    assert (claim.value(one), claim.detail([one]), guarantee._no_claim([one])) == (5.5, "labels, logits", "")
    assert (claim.value(record()), guarantee._no_claim([record()])) == (None, "none made")
    one.setting.privacy.pop("logits")
    one.setting.privacy.pop("labels")
    assert guarantee._no_claim([one]) == "not asked for"


def audit(bound, trials, of_noise=False, how="", claim="logits", confidence=0.95):
    return SimpleNamespace(
        lower_bound=bound, trials=trials, of_noise=of_noise, how=how, claim=claim, confidence=confidence
    )


def test_the_largest_lower_bound_of_audits_that_were_tried():
    runs = [
        record(audits=[audit(1.0, 10), audit(9.0, 0, how="too few"), audit(5.0, 7, of_noise=True, claim="weights")]),
        record(audits=[audit(3.0, 40, claim="labels", confidence=0.9), audit(2.0, 20)]),
    ]
    shown, noise = guarantee.SHOWN, guarantee.FOUND
    assert [shown.value(run) for run in runs] == [1.0, 3.0]
    assert [noise.value(run) for run in runs] == [5.0, None]
    assert shown.how(runs) == "one-sided 90 %, 40 trials, the largest of 3 audits, each by itself"
    assert noise.how(runs) == "one-sided 95 %, 7 trials, the one audit"
    assert (shown.detail(runs), noise.detail(runs)) == ("labels", "weights")
    assert (shown.missing(runs), noise.missing(runs[1:])) == ("", "not audited")
    assert shown.missing([record(audits=[audit(9.0, 0, how="too few")])]) == "not tried: too few"


def test_by_how_much_a_figure_is_beyond_chance():
    from fedaudit.runtime.attack_result import Rate
    from fedaudit.stats import Estimate

    assert attacks.beyond_chance(Estimate(value=0.75)) == 0.75
    assert attacks.beyond_chance(Rate.model_construct(value=0.75, chance=0.25)) == 0.5
    assert attacks.beyond_chance(Rate.model_construct(value=None, chance=0.25)) == -0.25
    assert attacks.beyond_chance(Rate.model_construct(value=0.75, chance=None)) == 0.75
