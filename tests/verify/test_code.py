"""Copies of setting and record, and what is known of the code that ran."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fedaudit.errors import RunError
from fedaudit.runtime.run_record import Declarations
from fedaudit.setting import Setting
from fedaudit.verify import code
from fedaudit.verify.finding import Findings

SETTING = Setting.make(method="fedavg", clients=3, seed=7)


def copies(tmp_path, setting=None, record=None, head=None, checkpoint=True):
    """Check the copies of a record that says {"a": 1, "status": "done"} beside these files; None leaves one out."""
    if setting is not None:
        (tmp_path / "setting.json").write_text(setting if isinstance(setting, str) else json.dumps(setting))
    (tmp_path / "record.json").write_text(json.dumps(record or {"a": 1, "status": "done"}))
    if checkpoint:
        (tmp_path / "checkpoint").mkdir()
    case = SimpleNamespace(
        found=Findings(), folder=tmp_path, record=SimpleNamespace(setting=SETTING), head=head, other_code=""
    )
    code.check_copies(case)
    return [(one.figure, one.verdict, one.field) for one in case.found.list]


PLAIN = SETTING.model_dump(mode="json")
HEAD = {"record": {"a": 1, "status": "done"}}
FINE = ("copy of the record", "recomputed", None)


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (PLAIN, [("setting", "recomputed")]),
        (PLAIN | {"rounds": 99, "engine": "ray"}, [("setting", "recomputed")]),  # may change when a run goes on
        ({k: v for k, v in PLAIN.items() if k != "compress"}, [("setting", "recomputed")]),  # an older one
        (PLAIN | {"seed": 8}, [("setting", "contradicted")]),
        ({k: v for k, v in PLAIN.items() if k != "seed"}, [("setting", "recomputed"), ("setting", "contradicted")]),
        ("[]", [("setting", "recomputed"), ("setting", "contradicted")]),
        ("no JSON", [("setting", "contradicted")]),
        (None, [("setting", "contradicted")]),
    ],
)
def test_the_setting_beside_the_record(setting, found, tmp_path):
    told = copies(tmp_path, setting, head=HEAD)
    assert [one[:2] for one in told[:-1]] == found
    assert told[-1][:2] == FINE[:2]


@pytest.mark.parametrize(
    ("head", "checkpoint", "verdict", "fields"),
    [
        (HEAD, True, "recomputed", [None]),
        ({"record": {"a": 2, "status": "done"}}, True, "contradicted", ["a"]),
        ({"record": {"a": 1, "status": "running"}}, True, "recomputed", [None]),  # killed between two writes
        ({"record": {"a": 2, "status": "running"}}, True, "contradicted", ["a"]),
        ({"record": {"a": 1, "status": "refused"}}, True, "contradicted", ["status"]),
        ({"record": {"a": 1, "status": "done", "attacks": [1]}}, True, "recomputed", [None]),  # they lie beside it
        ({"record": []}, True, "contradicted", ["the file"]),
        (None, True, "contradicted", ["the file"]),
        (None, False, "the author's word", [None]),
    ],
)
def test_the_checkpoints_copy_of_the_record(head, checkpoint, verdict, fields, tmp_path):
    told = copies(tmp_path, PLAIN, head=head, checkpoint=checkpoint)[1:]
    assert {one[1] for one in told} == {verdict}
    assert [one[2] or None for one in told] == fields


@pytest.mark.parametrize(
    ("said", "now", "other_code", "verdict"),
    [
        (("held", "1:s"), ("held", "1:s"), "", "recomputed"),
        (("broken", "1:s"), ("broken", "1:s"), "", "recomputed"),
        (("held", "1:s"), ("broken", "1:s"), "", "contradicted"),
        (("never", "1:s"), ("held", "1:s"), "", "the author's word"),
        (("held", "1:s"), ("held", "1:t"), "", "contradicted"),
        (("held", "1:s"), ("held", "1:t"), "a line was changed", "the author's word"),
        (("held", "1:s"), ("held", "2:s"), "", "the author's word"),  # digests of two schemes
    ],
)
def test_declarations_were_tested_as_the_record_says(said, now, other_code, verdict, monkeypatch):
    def told(of):
        return Declarations(tested=of[0], source=of[1], fedaudit="1.0")

    monkeypatch.setattr(code, "read_from", lambda folder: nullcontext())
    monkeypatch.setattr(code, "find", lambda name: SimpleNamespace(make=lambda given, preset: name))
    monkeypatch.setattr(code, "declarations_of", lambda method: told(now))
    monkeypatch.setattr(code, "comparable", lambda a, b: a.partition(":")[0] == b.partition(":")[0])
    record = SimpleNamespace(declarations=told(said), code=None, setting=SETTING)
    case = SimpleNamespace(found=Findings(), record=record, folder=None, other_code=other_code)
    code._check_declarations(case)
    assert [one.verdict for one in case.found.list] == [verdict]


def test_declarations_that_nobody_can_look_up(monkeypatch):
    def find(name):
        raise RunError("there is none")

    monkeypatch.setattr(code, "read_from", lambda folder: nullcontext())
    monkeypatch.setattr(code, "find", find)
    for said, words in ((None, "does not say"), (Declarations(tested="held", source="s"), "there is none")):
        record = SimpleNamespace(declarations=said, code=None, setting=SETTING)
        for world, lead in (("a world", ""), (None, "no world: ")):
            case = SimpleNamespace(
                found=Findings(), record=record, folder=None, other_code="", world=world,
                why_no_world="no world: there is none",
            )  # fmt: skip
            code._check_declarations(case)
            assert [one.verdict for one in case.found.list] == ["the author's word"]
            assert words in case.found.list[0].reason
            assert case.found.list[0].reason.startswith(lead if said else "the record")


@pytest.mark.parametrize(
    ("other_code", "old", "verdict"),
    [("", False, "recomputed"), ("a line", False, "the author's word"), ("", True, "the author's word")],
)
def test_which_code_ran(other_code, old, verdict, monkeypatch):
    monkeypatch.setattr(code, "_check_declarations", lambda case: None)
    monkeypatch.setattr(code, "not_compared", lambda *of: old)
    monkeypatch.setattr(code, "versions", lambda: {"torch": "9", "ray": "1"})
    record = SimpleNamespace(code=None, harness=None, versions={"torch": "8", "opacus": "2"})
    case = SimpleNamespace(found=Findings(), record=record, other_code=other_code)
    code.check_code(case)
    first, second, last = case.found.list
    assert (first.figure, first.verdict) == ("code", verdict)
    assert second.reason == "opacus 2, here None; ray None, here 1; torch 8, here 9"
    assert last.figure == "times, memory and dates"
    record.versions = {"torch": "9", "ray": "1"}
    case.found = Findings()
    code.check_code(case)
    assert case.found.list[1].reason == "those recorded are those that are here"


@pytest.mark.parametrize("gone", [["clients"], ["seed", "privacy"]])
def test_an_entry_that_is_not_there_is_named(gone, tmp_path):
    """Options that came later may be missing; of these entries the first one is told."""
    setting = Setting.make(method="fedavg", clients=3)
    known = {key: value for key, value in setting.model_dump(mode="json").items() if key not in gone}
    (tmp_path / "setting.json").write_text(json.dumps(known))
    case = SimpleNamespace(folder=tmp_path, record=SimpleNamespace(setting=setting), head=None, found=Findings())
    code.check_copies(case)
    wrong = [one for one in case.found.list if one.verdict == "contradicted"]
    assert [(one.figure, one.field) for one in wrong] == [("setting", gone[0])]
