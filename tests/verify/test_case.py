"""A run folder under examination: what of it is whole, and what this machine can build of it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedaudit.errors import FedauditError, RunError
from fedaudit.setting import Setting
from fedaudit.verify import case as module
from fedaudit.verify import many
from fedaudit.verify import seal as seals
from fedaudit.verify.case import Case
from fedaudit.verify.finding import Findings
from fedaudit.verify.sum_rows import SumRows, is_phase, sums_of


@pytest.mark.parametrize(
    ("there", "damage", "digest", "whole"),
    [(True, [], "d", True), (False, [], "d", False), (True, ["one"], "d", False), (True, [], "e", False)],
)
def test_a_whole_transcript_is_there_undamaged_and_the_records(there, damage, digest, whole, tmp_path):
    if there:
        (tmp_path / "transcript").mkdir()
        (tmp_path / "transcript" / "index.jsonl").touch()
    here = SimpleNamespace(
        folder=tmp_path, contents=SimpleNamespace(damage=damage, digest=digest),
        record=SimpleNamespace(transcript_digest="d"),
    )  # fmt: skip
    assert Case.whole.fget(here) is whole


@pytest.mark.parametrize(
    ("aggregate", "privacy", "read"),
    [("plain", {}, False), ("plain", {"logits": {}}, False), ("plain", {"updates": {}}, True), ("secure", {}, True)],
)
def test_sums_are_read_where_there_may_be_some(aggregate, privacy, read, monkeypatch):
    monkeypatch.setattr(module, "sums_of", lambda transcript: "the sums")
    setting = SimpleNamespace(aggregate=aggregate, privacy=privacy)
    here = SimpleNamespace(record=SimpleNamespace(setting=setting), transcript=None)
    assert Case.sums.func(here) == ("the sums" if read else {})


@pytest.mark.parametrize(
    ("device", "gpu", "data_dir", "built"),
    [
        ("cuda:1", False, None, {"device": "cpu", "data_dir": "there"}),
        ("cuda:1", True, None, {"device": "cuda:1", "data_dir": "there"}),
        ("cpu", False, "here", {"device": "cpu", "data_dir": "here"}),
    ],
)
def test_a_world_is_built_for_this_machine(device, gpu, data_dir, built, monkeypatch, tmp_path):
    """One client after the other, on what there is, with data where the reviewer keeps it."""
    made = []
    monkeypatch.setattr(module, "world_of", lambda text: made.append(json.loads(text)) or "a world")
    monkeypatch.setattr(module, "read_from", lambda folder: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    setting = Setting.make(device=device, data_dir="there", engine="stacked", isolate=False)
    here = SimpleNamespace(record=SimpleNamespace(setting=setting), data_dir=data_dir, folder=tmp_path)
    assert Case._opened.func(here) == ("a world", "")
    assert {key: made[0][key] for key in built} == built
    assert (made[0]["engine"], made[0]["isolate"]) == ("serial", False)


@pytest.mark.parametrize(("error", "why"), [(RunError("no data"), "no data"), (KeyError("x"), "KeyError: 'x'")])
def test_why_a_world_cannot_be_built(error, why, monkeypatch, tmp_path):
    def world_of(text):
        raise error

    monkeypatch.setattr(module, "world_of", world_of)
    monkeypatch.setattr(module, "read_from", lambda folder: nullcontext())
    here = SimpleNamespace(record=SimpleNamespace(setting=Setting.make()), data_dir=None, folder=tmp_path)
    assert Case._opened.func(here) == (None, why)


@pytest.mark.parametrize(
    ("code", "changed", "same", "words"),
    [
        (None, [], True, "the record does not say which code ran"),
        ("code", [], True, ""),
        ("code", ["a module changed"], True, "a module changed"),
        ("code", ["one", "two"], False, "one; two; fedaudit's own code is another here"),
    ],
)
def test_how_the_code_here_differs(code, changed, same, words, monkeypatch):
    monkeypatch.setattr(module, "read_from", lambda folder: nullcontext())
    monkeypatch.setattr(module, "code_of_setting", lambda setting: setting)
    monkeypatch.setattr(module, "differences", lambda then, now: list(changed))
    monkeypatch.setattr(module, "harness", lambda: "a digest")
    monkeypatch.setattr(module, "is_same", lambda then, now: same)
    here = SimpleNamespace(record=SimpleNamespace(code=code, harness="h", setting="s"), world=None, folder=None)
    assert Case.other_code.func(here) == words


def test_a_head_that_is_no_table_is_none(tmp_path):
    here = SimpleNamespace(folder=tmp_path)
    assert Case.head.func(here) is None
    (tmp_path / "checkpoint").mkdir()
    for text, found in (('{"attempt": 2}', {"attempt": 2}), ("[]", None), ("no JSON", None)):
        (tmp_path / "checkpoint" / "HEAD.json").write_text(text)
        assert Case.head.func(here) == found


@pytest.mark.parametrize("foreign", [True, False, None])
def test_another_transport_is_the_methods(foreign, monkeypatch):
    def find(name):
        if foreign is None:
            raise FedauditError("there is none")
        return SimpleNamespace(foreign_transport=foreign)

    monkeypatch.setattr(module, "read_from", lambda folder: nullcontext())
    monkeypatch.setattr(module, "find", find)
    here = SimpleNamespace(record=SimpleNamespace(setting=SimpleNamespace(method="m")), folder=None)
    assert Case.foreign_transport.func(here) is bool(foreign)


@pytest.mark.parametrize(("rounds", "last"), [([], 0), ([4], 4), ([1, 2, 7], 7)])
def test_a_transcript_is_looked_through_to_the_records_last_round(rounds, last, monkeypatch, tmp_path):
    looked = []
    monkeypatch.setattr(module, "look_through", lambda *of: looked.append(of) or "contents")
    monkeypatch.setattr(module, "kept_rounds", lambda record: "kept")
    record = SimpleNamespace(rounds=[SimpleNamespace(round=t) for t in rounds])
    assert Case.contents.func(SimpleNamespace(folder=tmp_path, record=record)) == "contents"
    assert looked == [(tmp_path / "transcript", last, "kept")]


@pytest.mark.parametrize("there", [True, False, None])
def test_a_checkpoint_that_cannot_be_read_is_none(there, monkeypatch, tmp_path):
    class Store:
        def __init__(self, folder):
            self.folder = folder

        def peek(self):
            if there is None:
                raise FedauditError("it is cut off")
            return {} if there else None

    monkeypatch.setattr(module, "Store", Store)
    found = Case.store.func(SimpleNamespace(folder=tmp_path))
    assert (found and found.folder) == (tmp_path / "checkpoint" if there else None)


def test_code_is_compared_as_this_machine_would_run_it(monkeypatch):
    """With a world its setting counts, which may name another folder of data."""
    asked = []
    monkeypatch.setattr(module, "read_from", lambda folder: nullcontext())
    monkeypatch.setattr(module, "code_of_setting", lambda setting: asked.append(setting) or "now")
    monkeypatch.setattr(module, "differences", lambda then, now: [f"{then} {now}"])
    monkeypatch.setattr(module, "harness", lambda: "h")
    monkeypatch.setattr(module, "is_same", lambda then, now: then == now)
    record = SimpleNamespace(code="then", harness="h", setting="the records")
    for world in (None, SimpleNamespace(setting="the worlds")):
        assert Case.other_code.func(SimpleNamespace(record=record, world=world, folder=None)) == "then now"
    assert asked == ["the records", "the worlds"]

    def gone(setting):
        raise FedauditError("no module")

    monkeypatch.setattr(module, "code_of_setting", gone)
    here = SimpleNamespace(record=record, world=SimpleNamespace(setting="s"), folder=None)
    assert Case.other_code.func(here) == "its code is not here: no module"
    here = SimpleNamespace(record=record, world=None, folder=None, why_no_world="there is no world")
    assert Case.other_code.func(here) == "there is no world"


def test_a_world_and_why_there_is_none():
    here = SimpleNamespace(_opened=("a world", "why"))
    assert Case.world.fget(here) == "a world"
    assert Case.why_no_world.fget(here) == "the run's data or code is not here: why"


# --- the rows of sums ------------------------------------------------------------------------------------------------


def row(type_, t, ask, client=0, direction="down", fn="update"):
    return {"type": type_, "round": t, "ask": ask, "client": client, "direction": direction, "fn": fn, "fields": {},
            "seq": 0, "from": "a", "to": "b", "message": "M", "tensors": [["w", [12], "x", 0, 0, ""]]}  # fmt: skip


def test_asks_without_a_sum_are_left_out():
    """Ask 0 of round 1 has none. Ask 1 is secure: clients 1 and 2 are asked, 2 shares and leaves. Round 2 is plain."""
    rows = [
        row("message", 1, 0), row("message", 1, 1, 1, fn="(sum) advertise"),
        row("message", 1, 1, 2, fn="(sum) advertise"),
        row("message", 1, 1, 1, "up", "(sum) advertise"), row("message", 1, 1, 2, fn="(sum) share"),
        row("message", 1, 1, 2, "up", "(sum) share"), row("message", 1, 1, 1), row("message", 1, 1, 1, "up"),
        row("message", 1, 1, 2), row("message", 2, 0, 5), row("message", 2, 0, 5, "up"), row("sum", 2, 0),
        {"type": "event", "event": "absent"},
    ]  # fmt: skip
    found = sums_of(SimpleNamespace(rows=lambda: rows, folder=Path()))
    assert sorted(found) == [(1, 1), (2, 0)]
    secure, plain = found[1, 1], found[2, 0]
    assert (secure.secure, secure.invited, secure.stayed, secure.total) == (True, [1, 2], [1], None)
    assert (secure.answered("advertise"), secure.answered("share"), secure.answered("unmask")) == ([1], [2], [])
    assert (plain.secure, plain.invited, plain.stayed) == (False, [5], [5])
    assert plain.total is not None
    assert is_phase("(sum) share")
    assert not is_phase("share (sum) ")


def test_what_the_traffic_of_a_secure_sum_depends_on():
    ids = SimpleNamespace(tolist=lambda: [2, 5])
    up = SimpleNamespace(row={"tensors": [["y", [12], "x"], ["z", [3], "x"]]})
    rows = SumRows(
        1, 0, phases={"advertise": {1: (0, 0), 2: (0, None)}, "share": {1: ({"ids": ids}, "up")}, "unmask": {}}
    )
    assert rows.facts().length == 0, "nobody answered"
    rows.asked = {1: ("down", up), 2: ("down", None)}
    facts = rows.facts()
    assert (facts.length, facts.invited, facts.masked) == (12, [1, 2], [1])
    assert rows.neighbours() == {1: [2, 5]}


# --- seals, and many folders -----------------------------------------------------------------------------------------


def sealed(monkeypatch, said, now, signature=None, key=None, why="", digest="d"):
    """Check a folder whose files have these digests `now` against a seal that has `said`; None: there is none."""
    files = SimpleNamespace(files=now, digest="n", signature=None)
    monkeypatch.setattr(seals, "Seal", SimpleNamespace(of=lambda folder: files))
    monkeypatch.setattr(seals, "digest_over", lambda of: "d")
    monkeypatch.setattr(seals, "check_signature", lambda seal, key: why)
    made = None if said is None else SimpleNamespace(
        files=said, digest=digest, signature=signature,
        broken_by=lambda now: sorted(k for k in said.keys() | now.files.keys() if said.get(k) != now.files.get(k)),
    )  # fmt: skip
    monkeypatch.setattr(seals, "read_seal", lambda folder: made)
    case = SimpleNamespace(found=Findings(), folder="F")
    assert seals.check_seal(case, key) is files
    return [(one.figure, one.verdict) for one in case.found.list], case.found.list


def test_files_that_were_changed_after_the_seal(monkeypatch):
    told, found = sealed(monkeypatch, {"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"})
    assert told == [("seal", "contradicted")] * 3
    assert [(one.file, one.reason.split(" after")[0]) for one in found] == [
        ("b", "it was changed"), ("c", "it is missing"), ("d", "it was added"),
    ]  # fmt: skip
    many_files = {str(i): "1" for i in range(9)}
    assert len(sealed(monkeypatch, many_files, {})[0]) == 5
    same, found = sealed(monkeypatch, {"a": "1"}, {"a": "1"})
    assert same == [("seal", "recomputed")]
    assert "unsigned" in found[0].reason
    assert sealed(monkeypatch, {"a": "1"}, {"a": "1"}, digest="e")[0] == [("seal", "contradicted")]
    assert sealed(monkeypatch, None, {})[0] == [("seal", "the author's word")]
    assert sealed(monkeypatch, None, {}, key="key.pub")[0] == [("seal", "contradicted")]


def test_signatures_are_those_of_the_key(monkeypatch):
    signature = SimpleNamespace(public_key="0123456789abcdefgh")
    one = {"a": "1"}
    assert sealed(monkeypatch, one, one, signature)[0] == [("signature", "the author's word"), ("seal", "recomputed")]
    told, found = sealed(monkeypatch, one, one, signature, key="key.pub")
    assert told == [("signature", "recomputed"), ("seal", "recomputed")]
    assert "unsigned" not in found[1].reason
    assert sealed(monkeypatch, one, one, signature, why="it is not")[0][0] == ("signature", "contradicted")
    assert sealed(monkeypatch, one, one, None, key="key.pub", why="there is none")[0][0] == (
        "signature",
        "contradicted",
    )


def test_folders_are_checked_in_their_order_with_their_progress(monkeypatch, tmp_path):
    told = []

    def verify(folder, watch, **how):
        watch(3, 6, "ledger")
        watch(9, 6, "end")
        watch(0, 0, "nothing")
        return folder.name, how

    monkeypatch.setattr(many, "verify", verify)
    found = many.verify_all([tmp_path / "b", tmp_path / "a"], watch=lambda *of: told.append(of), rerun=0.5)
    assert found == [("b", {"rerun": 0.5}), ("a", {"rerun": 0.5})]
    assert told == [
        (0.5, 2, "b: ledger"), (1.0, 2, "b: end"), (0.0, 2, "b: nothing"),
        (1.5, 2, "a: ledger"), (2.0, 2, "a: end"), (1.0, 2, "a: nothing"),
    ]  # fmt: skip
    assert many.verify_all([tmp_path / "b"], jobs=4) == [("b", {})], "one folder needs no other process"
    (tmp_path / "a" / "transcript" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "transcript" / "x").write_bytes(b"12345")
    (tmp_path / "a" / "transcript" / "y").write_bytes(b"67")
    assert many._size(tmp_path / "a") == 7


@pytest.mark.parametrize(("jobs", "workers"), [(2, 2), (9, 3)])
def test_the_largest_folder_is_checked_first_and_each_is_found_in_its_place(jobs, workers, monkeypatch, tmp_path):
    made, told = [], []

    class Answer:
        def __init__(self, *of):
            self.result = lambda: of

    class Pool:
        def __init__(self, *of):
            made.append(of)
            self.asked = []

        def __enter__(self):
            return self

        def __exit__(self, *of):
            pass

        def submit(self, fn, folder, how):
            self.asked.append(folder.name)
            made.append(folder.name)
            return Answer(fn, folder.name, how)

        def shutdown(self, cancel_futures):
            made.append(("shut down", cancel_futures))

    folders = [tmp_path / name for name in ("small", "large", "middle")]
    for folder, size in zip(folders, (1, 9, 5), strict=True):
        (folder / "transcript").mkdir(parents=True)
        (folder / "transcript" / "x").write_bytes(b"0" * size)
    monkeypatch.setattr(many, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(many, "as_completed", lambda waiting: sorted(waiting, key=lambda one: -waiting[one]))
    found = many.verify_all(folders, jobs=jobs, trust=True, watch=lambda *of: told.append(of), seed=4)
    assert found == [(many._verified, folder.name, {"seed": 4}) for folder in folders]
    (count, context, begin, trusted), *rest = made
    assert (count, begin, trusted) == (workers, many.registry.trust, (True,))
    assert context.get_start_method() == "spawn"
    assert rest == ["large", "middle", "small", ("shut down", True)]
    assert told == [(0, 3, "starting"), (1, 3, "middle"), (2, 3, "large"), (3, 3, "small")]
    assert many.verify_all.__kwdefaults__ == {"jobs": 1, "trust": False, "watch": None}
