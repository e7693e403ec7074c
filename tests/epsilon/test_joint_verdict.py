"""What several audits say together: corrected for how many they are, and never silent where nothing could be told."""

from __future__ import annotations

import math

import pytest

from fedaudit.epsilon.joint_verdict import judged, refuting, told, untried
from fedaudit.runtime.run_record import CERTAIN, EpsilonAudit
from fedaudit.significance import LEVEL, level_of, said


def audit(p=0.5, tells_at=1e-9, *, test="residuals", seeks: float | None = 0.9, trials=100, **facts) -> EpsilonAudit:
    """As an audit by itself would be filled in."""
    given = {
        "kind": "logits",
        "claim": "Y, one release",
        "verdict": said(p, tells_at),
        "method": "",
        "ledger_epsilon": 1.0,
    }
    given |= facts
    return EpsilonAudit(
        test=test, threat="server", claim_epsilon=1.0, lower_bound=0.0, p_value=p, trials=trials,
        confidence=0.95, delta=0.01, how="", seeks=seeks, tells_at=tells_at, **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("p", "tells_at", "tests", "word"),
    [
        (0.0009, None, 1, "refuted"),
        (0.001, None, 1, "suspicious"),  # a level is not reached by standing on it
        (0.049, None, 1, "suspicious"),
        (0.06, None, 1, "not refuted"),
        (0.06, 0.0009, 1, "not refuted"),
        (0.06, 0.001, 1, "cannot tell"),
        (0.06, 0.0004, 2, "not refuted"),
        (0.06, 0.0004, 3, "cannot tell"),  # 0.001 / 3 is less
        (0.0009, 1.0, 9, "refuted"),
    ],
)
def test_a_word_for_a_p_value(p, tells_at, tests, word):
    assert said(p, tells_at, tests=tests) == word


def test_who_asks_for_more_confidence_gets_it():
    assert level_of(0.95) == level_of(0.5) == LEVEL
    assert level_of(0.9999) == pytest.approx(1e-4)
    assert said(5e-4, confidence=0.9999) == "not refuted"


def test_one_audit_among_many_is_corrected():
    """0.0004 of 2 is refuted (0.0008), of 3 suspicious (0.0012)."""
    assert told([audit(0.0004), audit()]) == "refuted"
    assert told([audit(0.0004), audit(), audit()]) == "suspicious"
    assert [a.p_value for a in refuting([audit(0.0004), audit(0.0003), audit(trials=0)])] == [0.0004, 0.0003]
    assert refuting([audit(0.0004), audit(), audit()]) == []


def test_a_refutation_that_falls_does_not_hide_that_nothing_can_be_told():
    """p = 0.045 is suspicious by itself; of three it is 0.135, and of what is left the audit could find too little."""
    alone = audit(0.045, tells_at=0.4)
    assert alone.verdict == "suspicious"
    others = [audit(test="release path", seeks=0.5), audit(test="release path, Gaussian", seeks=0.5)]
    assert told([alone, *others]) == "cannot tell"
    assert told([audit(0.045), *others]) == "not refuted"


def test_power_counts_at_the_level_that_is_left():
    """What would be found at 0.0005 is found by one audit, or one of two's share; of three, 0.00033 is left."""
    assert told([audit(tells_at=0.0004)]) == "not refuted"
    assert told([audit(tells_at=0.0004), audit(claim="V, one release")]) == "not refuted"
    two_more = [audit(claim="V, one release"), audit(claim="W, one release")]
    assert told([audit(tells_at=0.0004), *two_more]) == "cannot tell"


def test_the_sharpest_test_of_a_claim_decides_whether_it_could_be_told():
    """A test that could have found half of the noise does not speak for one that looks for nine tenths."""
    half = audit(test="release path", seeks=0.5)
    assert told([audit(tells_at=0.5), half]) == "cannot tell"
    assert told([audit(), audit(tells_at=0.5, test="release path", seeks=0.5)]) == "not refuted"
    assert told([audit(), audit(tells_at=0.5, claim="V, one release")]) == "cannot tell", "of another claim"
    guesses = [audit(tells_at=0.5, seeks=None), audit(tells_at=1e-9, seeks=None)]
    assert told(guesses) == "not refuted", "one of two that ask the same could tell"


def test_a_p_value_of_a_run_that_does_not_come_out_again_counts_for_nothing():
    astray = audit(1e-12, tells_at=1.0, verdict="cannot tell")
    assert [word for _, word in judged([astray])] == ["cannot tell"]
    assert told([astray]) == "cannot tell"


def test_a_test_that_could_not_be_made_cannot_tell():
    """Residuals that were to be examined and could not; a kind that was never sent is no claim to test."""
    half = audit(test="release path", seeks=0.5)
    assert told([audit(trials=0, verdict="not tried"), half]) == "cannot tell"
    assert told([audit(trials=0, verdict="not tried", seeks=None, claim="V, one release"), half]) == "not refuted"
    assert told([audit(trials=0, verdict="cannot tell", seeks=None, claim="V, one release"), half]) == "cannot tell"
    assert told([]) == told([audit(trials=0, verdict="not tried", seeks=None)]) == "cannot tell"
    assert told([audit(0.0009), audit(trials=0, verdict="not tried", seeks=None)]) == "refuted", (
        "no test, no correction"
    )


def test_an_audit_that_is_not_random_neither_weakens_others_nor_is_weakened():
    """One that recomputes counts as no test: 0.0008 beside it is refuted, and would be 0.0016 of two. Its own word is
    its verdict, whatever its p-value is, and the order of the audits stays."""
    random, sure = audit(0.0008), audit(1.0, method=CERTAIN, verdict="not refuted")
    wrong, idle = (
        audit(1.0, method=CERTAIN, verdict="refuted"),
        audit(0.0, method=CERTAIN, trials=0, verdict="cannot tell"),
    )
    found = judged([sure, random, wrong, idle])
    assert [one for one, _ in found] == [sure, random, wrong, idle]
    assert [word for _, word in found] == ["not refuted", "refuted", "refuted", "not tried"]
    weak = audit(0.5, tells_at=0.0009)  # it tells alone, and not as one of two tests
    assert [word for _, word in judged([weak, sure])] == ["not refuted", "not refuted"]
    assert [word for _, word in judged([weak, audit()])] == ["cannot tell", "not refuted"]
    untried = audit(trials=0, verdict="not tried")
    assert [word for _, word in judged([weak, untried])] == ["not refuted", "not tried"], "no test"
    assert refuting([sure, random, wrong]) == [random, wrong]


def gone(**facts):
    """An audit that tried nothing."""
    return audit(1.0, None, trials=0, **{"verdict": "not tried", **facts})


def test_a_claim_that_no_test_could_try_is_named():
    """Of two the first. A test that should have been made (it seeks something) leaves a gap, unless another test tried
    its kind; one that could never be made leaves one only where nothing was tried at all."""
    due, never = gone(), gone(seeks=None, test="release path")
    other = audit(kind="embeddings", claim="E, one release")
    assert untried([]) is None
    assert untried([audit(), other]) is None
    assert untried([due]) is due
    assert untried([never]) is never
    assert untried([never, due]) is never
    assert untried([other, due]) is due, "another kind was tried"
    assert untried([other, never]) is None
    assert untried([never, other, due]) is due
    assert untried([audit(test="release path", seeks=0.5), due]) is None, "another test tried it"
    assert untried([audit(0.5, 1.0), due]) is None, "it was tried, and could not tell"
    lossy = gone(verdict="cannot tell")
    assert untried([lossy]) is lossy
    assert all(told([*audits]) == "cannot tell" for audits in ([due], [never], [other, due], [lossy]))


def test_made_up_values_are_no_trial_of_what_was_sent():
    certain = audit(1.0, None, test="clipping", method=CERTAIN, seeks=None)
    due, never = gone(), gone(seeks=None, test="release path")
    assert untried([certain, due]) is due
    assert untried([certain, never]) is None, "something was tried, and nothing else was due"
    assert untried([gone(method=CERTAIN, seeks=None)]) is not None


def test_what_was_never_released_has_no_claim():
    for facts in ({}, {"seeks": None}):
        assert untried([gone(ledger_epsilon=0.0, **facts)]) is None
        for spent in (1e-9, math.inf, None):
            assert untried([gone(ledger_epsilon=spent, **facts)]) is not None
