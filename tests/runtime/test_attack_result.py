"""Results of attacks as they are read back: which class each is, and what a file does not say."""

from __future__ import annotations

from fedaudit.runtime.attack_result import (
    HistogramResult,
    MembershipResult,
    NotRun,
    ParticipationResult,
    ReconstructionResult,
    _sort,
)


def test_what_was_not_timed_took_no_time():
    """The forecast adds these seconds up."""
    for cls in (MembershipResult, ReconstructionResult, HistogramResult, ParticipationResult):
        assert cls.model_fields["wall_s"].default == 0.0, cls


def test_the_class_of_a_result_follows_from_what_it_claims():
    assert _sort({"ran": True, "claims": "histogram"}) == "histogram"
    assert _sort({"ran": True}) == "membership", "files from before there were others"
    assert _sort({"ran": False, "claims": "histogram"}) == "none"
    assert _sort(NotRun(attack="loss", threat="server")) == "none"


def test_an_attack_that_did_not_run_says_why():
    read = NotRun.model_validate({"attack": "loss", "threat": "server"})
    assert (read.ran, read.reason, read.blind, read.settings) == (False, "did not run", False, {})
    assert MembershipResult.model_fields["split_broken"].default is False
    assert MembershipResult.model_fields["leak"].default is None
