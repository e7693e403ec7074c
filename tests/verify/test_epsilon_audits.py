"""Verdicts, claims and bounds of audits, recomputed from what the record keeps of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.epsilon.one_run import BOUNDS
from fedaudit.significance import said
from fedaudit.verify import epsilon_audits
from fedaudit.verify.finding import Findings


def audit(**facts):
    base = {
        "claim": "c", "test": "t", "kind": "logits", "claim_epsilon": 1.0, "ledger_epsilon": None, "guesses": None,
        "trials": 100, "verdict": "not refuted", "p_value": 0.5, "tells_at": 1e-9, "confidence": 0.95,
        "lower_bound": 0.5, "delta": 1e-5, "ceiling": 3.0,
    }  # fmt: skip
    return SimpleNamespace(**{**base, **facts})


@pytest.mark.parametrize(
    ("facts", "now"),
    [
        ({}, None),
        ({"trials": 0, "verdict": "not tried"}, None),
        ({"trials": 0, "verdict": "cannot tell"}, None),
        ({"trials": 0}, "not tried"),
        ({"p_value": 1e-12}, "refuted"),
        ({"p_value": 1e-12, "verdict": "refuted", "lower_bound": 4.0}, None),
        ({"verdict": "refuted"}, "not refuted"),
        ({"verdict": "cannot tell"}, None),  # a repetition that did not come out as the run
        ({"lower_bound": 1.0 + 1e-7}, None),  # rounding
        ({"lower_bound": 1.001}, "suspicious or refuted"),
    ],
)
def test_a_verdict_follows_from_its_p_value(facts, now):
    case, of = SimpleNamespace(found=Findings()), audit(**facts)
    assert epsilon_audits._check_verdict(case, "f", "audits.3", of) is (now is not None)
    found = [(one.field, one.recorded, one.recomputed) for one in case.found.list]
    assert found == ([] if now is None else [("audits.3.verdict", of.verdict, now)])
    assert said(0.5, 1e-9, 0.95) == "not refuted", "what the other rows are set against"


@pytest.mark.parametrize("change", [{}, {"lower_bound": 0.9}, {"p_value": 0.9}, {"ceiling": 0.1}, {"trials": 39}])
def test_bounds_follow_from_the_numbers_of_guesses(change):
    """30 of 40 guesses on 100 pairs were right; had all been right, the bound would be the ceiling."""
    name, bound = next(iter(BOUNDS.items()))
    kept = SimpleNamespace(bound=name, pairs=100, made=40, right=30, steps=1)
    now, best = (bound(100, 40, right, 1e-5, 0.95, 1) for right in (30, 40))
    assert 0 < now.epsilon < best.epsilon
    facts = {
        "lower_bound": now.epsilon, "p_value": now.p_value(0.3), "ceiling": best.epsilon, "trials": now.trials,
    }  # fmt: skip
    case = SimpleNamespace(found=Findings())
    epsilon_audits._check_guesses(case, "f", "audits.0", audit(guesses=kept, claim_epsilon=0.3, **(facts | change)))
    found = [one.field for one in case.found.list if one.verdict == "contradicted"]
    assert found == [f"audits.0.{place}" for place in change]


def test_a_claim_of_no_bound_is_never_unlikely_and_other_bounds_are_not_known():
    name, bound = next(iter(BOUNDS.items()))
    now = bound(100, 40, 30, 1e-5, 0.95, 1)
    best = bound(100, 40, 40, 1e-5, 0.95, 1)
    facts = {"claim_epsilon": float("inf"), "lower_bound": now.epsilon, "ceiling": best.epsilon, "trials": now.trials}
    kept = {"pairs": 100, "made": 40, "right": 30, "steps": 1}
    for p, verdict in ((1.0, "recomputed"), (0.5, "contradicted")):
        case = SimpleNamespace(found=Findings())
        one = audit(guesses=SimpleNamespace(bound=name, **kept), p_value=p, **facts)
        epsilon_audits._check_guesses(case, "f", "audits.0", one)
        assert [found.verdict for found in case.found.list] == [verdict]
    case = SimpleNamespace(found=Findings())
    epsilon_audits._check_guesses(case, "f", "audits.0", audit(guesses=SimpleNamespace(bound="later", **kept)))
    assert [found.verdict for found in case.found.list] == ["the author's word"]


def test_claims_about_other_noise_than_gaussian_are_not_held_against_the_ledger(monkeypatch):
    """Of three kinds, one has Gaussian noise, one Laplace noise, one none; sums have both. 7 is no epsilon of any."""
    facts = {"gaussian": (True, False), "laplace": (False, False), "steps": (False, True), "none": (False, False)}
    how = {name: SimpleNamespace(normal=normal, trains=trains) for name, (normal, trains) in facts.items()}
    monkeypatch.setattr(epsilon_audits, "mechanism_of", lambda entry: how[entry.mechanism])
    monkeypatch.setattr(epsilon_audits, "_epsilons", lambda case: [1.0])

    def entry(kind, mechanism, noise=1.0, unit="record"):
        return SimpleNamespace(kind=kind, mechanism=mechanism, noise_multiplier=noise, unit=unit)

    def accused(*entries):
        kinds = ("logits", "labels", "training", "count", epsilon_audits.KIND)
        audits = [audit(kind=kind, claim=kind, claim_epsilon=7.0) for kind in kinds]
        record = SimpleNamespace(ledger=[SimpleNamespace(entries=list(entries))], audits=audits)
        case = SimpleNamespace(found=Findings(), record=record)
        epsilon_audits.check_epsilon_audits(case)
        wrong = [one.figure for one in case.found.list if one.verdict == "contradicted"]
        return [kind for kind in kinds if f"epsilon of {kind}, t" in wrong]

    base = [
        entry("logits", "gaussian"),
        entry("labels", "laplace"),
        entry("training", "steps"),
        entry("count", "none", 0),
    ]
    sums = epsilon_audits.KIND
    assert accused(*base) == ["logits", "training", "count", sums]
    of_sums = entry("weights", "gaussian", unit="client"), entry("weights", "laplace", unit="client")
    assert accused(*base, of_sums[0]) == ["logits", "training", "count", sums]
    assert accused(*base, *of_sums) == ["logits", "training", "count"]
