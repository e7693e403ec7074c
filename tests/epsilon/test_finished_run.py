"""A finished run that is to be audited: what it must have, and what was other when it was made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.epsilon import finished_run
from fedaudit.epsilon.finished_run import closed_run, other_conditions
from fedaudit.errors import RunError, SettingError, TranscriptError


@pytest.fixture
def run(monkeypatch):
    """A run of three clients whose logits and labels are protected, made under today's conditions."""

    class Found:
        damage = ""
        record = SimpleNamespace(
            status="done", versions={"torch": "2", "numpy": "1"}, device="a CPU", harness="3:a", code={"a": 1},
            setting="its setting",
        )  # fmt: skip
        world = SimpleNamespace(
            policies={"logits": 1, "labels": 2}, setting=SimpleNamespace(clients=3), device="cpu", method="its method"
        )

        @property
        def transcript(self):
            if self.damage:
                raise TranscriptError(self.damage)
            return "whole"

    found = Found()
    monkeypatch.setattr(finished_run, "RunFolder", lambda folder: found)
    monkeypatch.setattr(finished_run, "BITS", ("torch", "cpu"))
    monkeypatch.setattr(finished_run, "versions", lambda: {"torch": "2", "numpy": "9"})
    monkeypatch.setattr(finished_run, "device_name", lambda device: {"cpu": "a CPU"}[device])
    monkeypatch.setattr(finished_run, "harness", lambda: "3:a")
    monkeypatch.setattr(finished_run, "code_of", lambda method, setting: {(method, setting): 1})
    monkeypatch.setattr(
        finished_run,
        "differences",
        lambda then, now: [] if (then, list(now)) == ({"a": 1}, [("its method", "its setting")]) else ["x"],
    )
    return found


def test_a_run_is_closed_if_it_is_done_whole_and_protected(run):
    assert closed_run("here", None, None, "why") is run
    assert closed_run("here", ["labels", "logits"], [0, 2], "why") is run
    with pytest.raises(SettingError, match=r"Unknown protected kind of this run 'label'\. Did you mean 'labels'"):
        closed_run("here", ["logits", "label"], None, "why")
    for k in (-1, 3):
        with pytest.raises(SettingError, match=f"There is no client {k}; the run has 3, numbered from 0"):
            closed_run("here", None, [0, k], "why")
    run.damage = "a message is missing"
    with pytest.raises(TranscriptError, match="a message is missing"):
        closed_run("here", None, None, "why")
    run.damage, run.world.policies = "", {}
    with pytest.raises(SettingError, match="in here was protected: there is no noise"):
        closed_run("here", None, None, "there is no noise")
    run.record.status = "running"
    with pytest.raises(RunError, match="is not finished"):
        closed_run("here", None, None, "why")


def test_all_that_was_other_is_told(run):
    assert other_conditions(run) == "", "numpy changes no bits"
    run.record.versions = {"torch": "1", "cpu": "old"}
    assert other_conditions(run) == "torch 1, cpu old"
    run.record.versions = {"torch": "2"}
    run.record.device = "a GPU"
    assert other_conditions(run) == "the device a GPU"
    run.record.device, run.record.harness = "a CPU", "3:b"
    assert other_conditions(run) == "another version of fedaudit's code"
    for code in (None, {"b": 1}):
        run.record.harness, run.record.code = "3:a", code
        assert other_conditions(run) == "another version of the method's code"
    run.record.harness = None
    assert other_conditions(run) == "another version of fedaudit's code, another version of the method's code"
