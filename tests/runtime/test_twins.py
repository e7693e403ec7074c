"""Which clients have a twin, what is noted of them, and how they go on, with a host that answers by hand."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedaudit import Down, Up, private
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import Tape
from fedaudit.privacy.noise_key import derived
from fedaudit.runtime.declarations import twins
from fedaudit.runtime.declarations.twin_client import Answer, Difference, differences, exchanged, paid_fields
from fedaudit.runtime.declarations.twins import BACK, FOLDER, LOG, Twins, wanted
from fedaudit.runtime.engines.losses import TRIES
from fedaudit.runtime.isolated_worker import done_as_frame, receive, send
from fedaudit.runtime.run_record import TwinFacts
from fedaudit.runtime.task import Done, Task
from fedaudit.setting import Setting
from fedaudit.wire.codec import decode_tree, encode


class Told(Down):
    n: int


class Reply(Up):
    a: int = private("count", via="data", unit="client")
    b: torch.Tensor = private("logits", via="data", unit="record")


def reply(a=1, b=(2.0, 3.0)):
    return encode(Reply(a, torch.tensor(b)))


def made(tmp_path, of="3", policies=("logits",), clients=10, sets=1, facts=None, start=None):
    setting = SimpleNamespace(twins=of, clients=clients, start=start, isolate=False)
    world = SimpleNamespace(policies=dict.fromkeys(policies), setting=setting)
    found = Twins(world, tmp_path, b"secret", facts or TwinFacts(wanted=of), sets)
    found._lot = lambda k: (7 * k) % 10 * 2**60  # the order of the lots: 0, 3, 6, 9, 2, 5, 8, 1, 4, 7
    return found


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    monkeypatch.setattr(twins.nursery, "nursery_of_twins", lambda *of: None)


@pytest.mark.parametrize(
    ("text", "clients", "count"),
    [("auto", 3, 1), ("auto", 13, 1), ("auto", 14, 2), ("auto", 100, 15), ("all", 7, 7), ("off", 7, 0), ("2", 7, 2),
     ("9", 7, 7), ("0", 7, 0)],
)  # fmt: skip
def test_how_many_clients_have_a_twin(text, clients, count):
    assert wanted(text, clients) == count


def test_as_large_a_share_of_those_that_come_later_has_one(tmp_path):
    """Of 4 clients in the first ask 3 have a twin. Then each has one whose lot lies in the first three quarters."""
    here = made(tmp_path)
    here.choose([1, 2, 3, 6], [1, 2, 3, 6])
    assert here._chosen == {3, 6, 2}
    here.choose([1, 2, 4, 5, 7, 8], [4, 5, 7, 8])
    # Lots in tenths of 1.6: 5 has 5/16, 8 has 6/16, 4 has 8/16, 7 has 9/16.
    assert here._chosen == {3, 6, 2, 5, 8, 4, 7}
    few = made(tmp_path, "1")
    few.choose([0, 1, 2, 3], [0, 1, 2, 3])
    assert few._chosen == {0}
    few.choose([4, 9, 2], [4, 9])  # a quarter: 9 has 3/16, 4 has 8/16
    assert few._chosen == {0, 9}
    few.choose([1, 7, 8], [7, 8])  # none of the quarter: the first of the new ones
    assert few._chosen == {0, 9, 8}
    few.choose([8, 7], [7])
    assert few._chosen == {0, 9, 8}, "one of them has a twin"
    quarter = made(tmp_path, "1")
    quarter.choose([0, 1, 3, 6], [0, 1, 3, 6])
    quarter.choose([9, 2], [9, 2])  # 2 has 4/16, which is outside of the first quarter
    assert quarter._chosen == {0, 9}


@pytest.mark.parametrize(("of", "policies"), [("off", ["logits"]), ("0", ["logits"]), ("3", [])])
def test_without_a_policy_or_a_wish_nobody_has_one(of, policies, tmp_path):
    here = made(tmp_path, of, policies)
    here.choose([0, 1], [0, 1])
    assert not here.on
    assert not here.has(0)
    assert here._chosen == set()


def task(k=3, t=1, state=None, drop=False, followed=True):
    return Task("{}", "update", k, t, 0, state, encode(Told(1)), drop=drop, followed=followed)


def follow(here, one, answer, twin=None, found=()):
    """Let the twin of a client answer `twin` (or the same), and note what comes of it."""
    here._run = lambda task, done, number: (
        twin if isinstance(twin, Done) else Done(task.k, state=b"s%d" % number, reply=twin or answer.reply),
        list(found),
    )
    here.ask(one)
    here.follow(answer)


def test_tasks_that_hold_and_that_differ_are_counted(tmp_path):
    here = made(tmp_path)
    here._chosen = {1, 3, 5}
    follow(here, task(3), Done(3, state=b"x", reply=reply()))
    follow(here, task(1), Done(1, state=b"x", reply=reply()))
    facts = here.facts
    assert (facts.clients, facts.tasks, facts.held, facts.lost, facts.differences) == ([1, 3], 2, 2, 0, [])
    assert here.entries() == []
    assert not (tmp_path / LOG).exists()
    follow(here, task(3, 2, b"x"), Done(3, state=b"x", reply=reply()), twin=reply(a=9))
    assert (facts.clients, facts.tasks, facts.held) == ([1, 3], 3, 2)
    assert facts.differences == ["Reply.a, in update of round 2, client 3"]
    assert not here.has(3)
    assert here.has(1)
    assert [entry.field for entry in here.entries()] == ["update (twin)"]
    assert "round 2, ask 0, client 3, update: Reply.a: 1, with other records 9" in (tmp_path / LOG).read_text()


@pytest.mark.parametrize(
    ("one", "answer"),
    [
        (task(followed=False), Done(3, state=b"x", reply=reply())),
        (task(drop=True), Done(3)),
        (task(), Done(3, lost=True)),
        (task(), Done(3, fatal=ValueError("it broke"))),
    ],
)
def test_tasks_that_nobody_carried_out_have_no_twin(one, answer, tmp_path):
    here = made(tmp_path)
    follow(here, one, answer)
    assert (here.facts.tasks, here.facts.lost) == (0, 0)


def test_a_twin_whose_state_is_gone_cannot_go_on(tmp_path):
    here = made(tmp_path)
    here._chosen = {3, 4}
    follow(here, task(3, 2, b"state"), Done(3, state=b"x", reply=reply()))
    assert (here.facts.lost, here.facts.tasks, here.has(3)) == (1, 0, False)
    taken_over = made(tmp_path, start="another run")
    taken_over._chosen = {3}
    follow(taken_over, task(3, 1, b"state"), Done(3, state=b"x", reply=reply()))
    assert (taken_over.facts.lost, taken_over.facts.tasks, taken_over.has(3)) == (0, 1, True)
    known = made(tmp_path, start="another run", facts=TwinFacts(wanted="3", clients=[3]))
    follow(known, task(3, 4, b"state"), Done(3, state=b"x", reply=reply()))
    assert known.facts.lost == 1, "it had a twin of this run, whose state is gone"


def test_every_set_of_other_records_is_tried_until_one_differs(tmp_path):
    here = made(tmp_path, sets=3)
    asked = []

    def run(one, done, number):
        asked.append(number)
        return Done(3, state=b"s%d" % number, reply=reply(a=1 if number < 1 else 2)), []

    here._run = run
    here.ask(task())
    here.follow(Done(3, state=b"x", reply=reply()))
    assert asked == [0, 1], "the third is not needed"
    assert (here.facts.tasks, here.facts.held) == (1, 0)
    assert set(here._states) == {(3, 0), (3, 1)}


def test_states_are_those_after_tasks_that_were_answered(tmp_path):
    here = made(tmp_path)
    follow(here, task(), Done(3, error="ValueError"), twin=Done(3, state=b"new", error="ValueError"))
    assert here._states == {}
    assert (here.facts.tasks, here.facts.held) == (1, 1), "both failed in the same place"
    follow(here, task(4), Done(4, state=b"x", reply=reply()), twin=Done(4, state=None, reply=reply()))
    assert here._states == {}
    follow(here, task(5), Done(5, state=b"x", reply=reply()))
    assert here._states == {(5, 0): b"s0"}


def test_states_of_the_last_rounds_are_kept_and_taken_up(tmp_path):
    here = made(tmp_path, sets=2)
    here.commit(1)
    assert not (tmp_path / FOLDER).exists()
    for t in range(1, 5):
        here._states = {(3, 0): b"three after %d" % t, (3, 1): b"another set"}
        if t == 1:
            here._states[11, 0] = b"eleven after 1"
        here.commit(t)
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == ["client-000003.2", "client-000003.3", "client-000003.4", "client-000011.1"]
    assert BACK == 2
    (tmp_path / FOLDER / "client-x.1").touch()
    for t, three in ((4, b"three after 4"), (3, b"three after 3"), (9, b"three after 4"), (1, None)):
        again = made(tmp_path, facts=TwinFacts(wanted="3", clients=[3]))
        again.go_on(t)
        assert again._states == ({} if three is None else {(3, 0): three}), "11 was not chosen"
        assert again._share == 0.3
    first = made(tmp_path)
    first.go_on(0)
    assert first._share == 0.0


def test_a_difference_is_billed_on_after_a_resumption(tmp_path):
    said = ["Reply.a, in update of round 2, client 3", "absence, in other of round 4, client 5"]
    here = made(tmp_path, facts=TwinFacts(wanted="3", clients=[3, 4, 5], differences=said))
    here.go_on(4)
    assert [(one.client, one.round, one.fn, one.field) for one in here.broken] == [
        (3, 2, "update", "Reply.a"), (5, 4, "other", "absence"),
    ]  # fmt: skip
    assert [here.has(k) for k in (3, 4, 5)] == [False, True, False]
    assert [entry.field for entry in here.entries()] == ["update (twin)"], "the first one"
    untold = made(tmp_path, facts=TwinFacts(wanted="3", clients=[3]))
    untold.go_on(4)
    assert untold.broken == []


# --- where they live ---------------------------------------------------------------------------------------------


class Nursery:
    """Keeps the ends of connections that were handed over, for the test to answer."""

    def __init__(self):
        self.ends = []

    def hand_over(self, theirs):
        self.ends.append(theirs)


@pytest.fixture
def hosted(monkeypatch):
    """A nursery by hand; facts are told as client and round, and records as whose they are."""
    here = Nursery()
    monkeypatch.setattr(twins.nursery, "nursery_of_twins", lambda *of: here)
    monkeypatch.setattr(twins, "facts_of", lambda world, k, t: {"facts of": [k, t]})
    monkeypatch.setattr(twins, "encoded_rows", lambda world, k, own, public: f"{k} {own} {public}".encode())
    return here


def answered(end, done, differences=()):
    """Answer the next task before it is asked: the connection holds it."""
    said, blobs = done_as_frame(done)
    with end.makefile("rwb") as file:
        send(file, {**said, "differences": [list(row) for row in differences]}, blobs)


def heard(end):
    """Return the next frame that came over a connection."""
    with end.makefile("rwb", buffering=0) as raw:
        return receive(io.BufferedReader(raw, 1))


def test_a_host_is_told_each_task_and_the_records_of_a_client_once(hosted):
    """Client 3 has two outputs of mechanisms and no state yet, client 5 none. Then client 3 is asked again."""
    world = SimpleNamespace(setting=Setting.make(dataset="digits", data_dir="/data", seed=7))
    host = twins._Host(world, {"environment": {"A": "1"}, "path": ["p"], "folder": "/f"})
    (end,) = hosted.ends
    tape = Tape()
    tape.add({"what": "first"})
    tape.add({"what": "second"})
    answered(end, Done(3, state=b"new", reply=b"reply"), [("Reply.a", "how"), ("steps", "other")])
    asked = []

    def rows(k):
        asked.append(k)
        return f"records of {k}"

    found = host.run(task(3, 4), Done(3, tape=tape), None, rows, 77)
    assert (found[0].k, found[0].state, found[0].reply) == (3, b"new", b"reply")
    assert found[1] == [("Reply.a", "how"), ("steps", "other")]
    said, blobs = heard(end)
    told = json.loads(said.pop("setting"))
    assert (told["dataset"], told["data_dir"], told["seed"]) == ("(elsewhere)", "", 7)
    assert said == {
        "what": "twin", "facts": {"facts of": [3, 4]}, "outputs": 2, "half": 77, "dtype": "float32",
        "task": {"fn": "update", "k": 3, "t": 4, "ask": 0, "attempt": 0, "followed": True},
        "environment": {"A": "1"}, "path": ["p"], "folder": "/f",
    }  # fmt: skip
    assert blobs == [encode(Told(1)), b"", b"3 records of 3 True"]
    assert [decode_tree(heard(end)[1][0])["what"] for _ in range(2)] == ["first", "second"]
    for k, state, records in ((5, b"s5", [b"5 records of 5 False"]), (3, b"s3", [])):
        answered(end, Done(k, error="ValueError"))
        found, differences = host.run(task(k, 5), Done(k), state, rows, 78)
        assert (found.k, found.reply, found.error, differences) == (k, None, "ValueError", [])
        said, blobs = heard(end)
        assert (said["outputs"], said["half"], said["task"]["k"], said["task"]["t"]) == (0, 78, k, 5)
        assert blobs == [encode(Told(1)), state, *records]
    assert asked == [3, 5]
    host.close()
    assert end.recv(1) == b"", "the connection is closed"
    end.close()


def test_an_isolated_host_has_a_folder_of_its_own_until_it_is_closed(hosted):
    world = SimpleNamespace(setting=Setting.make(dataset="digits"))
    host = twins._Host(world, None)
    scratch = host._around["folder"]
    assert Path(scratch).is_dir()
    assert host._around.keys() == {"folder", "setting"}
    host.close()
    assert not Path(scratch).exists()
    hosted.ends[0].close()
    here = twins._Host(world, {"folder": os.getcwd()})
    here.close()
    assert Path(os.getcwd()).is_dir()
    assert here._scratch == ""
    hosted.ends[1].close()


class Host:
    """A host that fails as often as it is told to, and notes who asked it for what."""

    made, closed, fails = [], [], 0

    def __init__(self, world, around):
        self.number = len(Host.made)
        Host.made.append(around)

    def run(self, task, done, state, rows, half):
        if Host.fails:
            Host.fails -= 1
            raise EOFError("no more") if Host.fails else OSError
        return (self.number, state, rows(task.k), half), []

    def close(self):
        Host.closed.append(self.number)


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.setattr(twins, "_Host", Host)
    monkeypatch.setattr(Host, "made", [])
    monkeypatch.setattr(Host, "closed", [])
    monkeypatch.setattr(Host, "fails", 0)
    return Host


def test_a_host_serves_one_set_of_records_for_many_tasks(hosts, tmp_path):
    here = made(tmp_path, sets=2)
    here._rows = lambda number, k: (number, k)
    here._states = {(3, 0): b"s0", (3, 1): b"s1"}
    half = int.from_bytes(derived(b"secret", "half", 3, 4, 0)[:7], "little")
    assert here._run(task(3, 4), Done(3), 0) == ((0, b"s0", (0, 3), half), [])
    assert here._run(task(3, 4), Done(3), 1) == ((1, b"s1", (1, 3), half), [])
    found, _ = here._run(task(5, 4), Done(5), 0)
    assert found[:3] == (0, None, (0, 5))
    assert found[3] != half
    assert hosts.made == [here._around] * 2
    assert here._around.keys() == {"environment", "path", "folder"}
    assert hosts.closed == []
    here.close()
    assert sorted(hosts.closed) == [0, 1]
    assert here._hosts == {}


def test_an_isolated_twin_has_a_host_for_each_task(hosts, tmp_path):
    here = made(tmp_path)
    here.world.setting.isolate, here._rows = True, lambda number, k: (number, k)
    assert [here._run(task(), Done(3), 0)[0][0] for _ in range(3)] == [0, 1, 2]
    assert hosts.made == [None] * 3
    assert hosts.closed == [0, 1]


@pytest.mark.parametrize("fails", [TRIES - 1, TRIES])
def test_a_twin_is_tried_as_often_as_a_client(hosts, fails, tmp_path):
    here = made(tmp_path)
    here._rows = lambda number, k: (number, k)
    hosts.fails = fails
    found, differences = here._run(task(), Done(3), 0)
    assert differences == []
    assert hosts.closed == list(range(fails))
    if fails < TRIES:
        assert found[0] == fails
    else:
        assert (found.k, found.error, found.lost) == (3, "its process ended", True)
        assert here._hosts == {}
        hosts.fails = 1 + TRIES
        assert here._run(task(), Done(3), 0)[0].error == "its process ended (no more)"


def test_the_records_of_a_twin_are_drawn_for_its_client_and_set(tmp_path):
    """Each is made of other records, and follows from the run's secret, the client and the set alone."""
    here = made(tmp_path)
    own = {k: (torch.full((4 + k, 2), float(k)), torch.arange(4 + k) % 3) for k in (1, 2)}
    kept = {k: (torch.full((k, 2), -1.0), torch.zeros(k).long()) for k in (1, 2)}
    others = torch.arange(40.0).view(20, 2), torch.zeros(20).long()
    world = here.world
    world.federation, world.classes = SimpleNamespace(auxiliary=lambda: others), 3
    world.seen_members = own.__getitem__
    world.held_out = lambda k, which: kept[k] if which == "validation" else None
    for k, number in ((1, 0), (1, 1), (2, 0)):
        found = here._rows(number, k)
        seed = int.from_bytes(derived(b"secret", "exchanged", k, number)[:8], "little") // 2
        rng = torch.Generator().manual_seed(seed)
        wanted = {"own": exchanged(own[k], others, 3, rng), "validation": exchanged(kept[k], others, 3, rng)}
        wanted["other"] = exchanged(wanted["own"], others, 3, rng)
        assert list(found) == ["own", "validation", "other"]
        for name, (x, y) in wanted.items():
            assert torch.equal(found[name][0], x)
            assert torch.equal(found[name][1], y)
        assert not torch.equal(found["own"][1], found["other"][1])


def test_lots_follow_from_the_secret_alone(tmp_path):
    here = made(tmp_path)
    lots = [Twins._lot(here, k) for k in range(50)]
    assert lots == [int.from_bytes(derived(b"secret", "twin", k)[:8], "little") for k in range(50)]
    assert len(set(lots)) == 50
    assert min(lots) < 2**62 < 2**63 < max(lots) < 2**64


def test_the_seconds_of_twins_add_up(tmp_path, monkeypatch):
    ticks = iter([10.0, 12.5, 20.0, 21.00004])
    monkeypatch.setattr(twins.time, "perf_counter", lambda: next(ticks))
    here = made(tmp_path)
    assert here.wall_s == 0
    follow(here, task(3), Done(3, state=b"x", reply=reply()))
    assert (here.wall_s, here.facts.wall_s) == (2.5, 2.5)
    follow(here, task(4), Done(4, state=b"x", reply=reply()))
    assert here.wall_s == pytest.approx(3.50004)
    assert here.facts.wall_s == 3.5


def test_a_state_of_another_run_is_taken_over_for_every_set(tmp_path):
    here = made(tmp_path, start="another run", sets=2)
    seen = []

    def run(one, done, number):
        seen.append(dict(here._states))
        return Done(3, reply=reply()), []

    here._run = run
    here.ask(task(3, 1, b"state"))
    here.follow(Done(3, state=b"x", reply=reply()))
    assert seen == [{(3, 0): b"state", (3, 1): b"state"}] * 2


def test_what_a_twin_says_of_its_error_is_kept_here_alone(tmp_path):
    here = made(tmp_path)
    follow(here, task(3, 2), Done(3, reply=reply()), twin=Done(3, error="KeyError", detail="the whole text"))
    assert (tmp_path / LOG).read_text().splitlines() == [
        "round 2, ask 0, client 3, update: absence: the client answered, its twin ended with KeyError",
        "the whole text",
    ]
    assert here.facts.differences == ["absence, in update of round 2, client 3"]


def test_another_message_class_is_a_difference():
    class Other(Up):
        a: int = private("count", via="data", unit="client")

    rows = differences(
        (3, 2, 1, "update"), encode(Told(1)), Answer(reply(), None), Answer(encode(Other(1)), None),
        [("steps", "how")], frozenset(),
    )  # fmt: skip
    assert [(row.field, row.how) for row in rows] == [
        ("steps", "how"), ("message class", "Reply, with other records Other"),
    ]  # fmt: skip


# --- the answers of both -----------------------------------------------------------------------------------------


def compared(client, twin, found=(), paid=()):
    rows = differences((3, 2, 1, "update"), encode(Told(1)), client, twin, list(found), frozenset(paid))
    assert all((row.client, row.round, row.ask, row.fn) == (3, 2, 1, "update") for row in rows)
    return [row.field for row in rows]


def test_fields_that_are_paid_for_may_differ():
    same, other = Answer(reply(), None), Answer(reply(a=2, b=(2.0, 4.0)), None)
    assert compared(same, same) == []
    assert compared(same, other) == ["Reply.a", "Reply.b"]
    assert compared(same, other, paid=["Reply.a"]) == ["Reply.b"]
    assert compared(same, other, found=[("Reply.b", "how"), ("steps", "how")]) == ["Reply.b", "steps", "Reply.a"]
    assert compared(same, same, found=[("Reply.b", "how")], paid=["Reply.b"]) == []


def test_absences_are_compared_by_their_reasons():
    there, one, other = Answer(reply(), None), Answer(None, "ValueError"), Answer(None, "KeyError")
    assert compared(there, one) == compared(one, there) == compared(one, other) == ["absence"]
    assert compared(one, one) == []
    assert compared(one, other, found=[("steps", "how")]) == ["steps"], "that says it already"


def test_what_is_billed_with_infinity_is_paid_for():
    entries = [
        LedgerEntry.unprotected("Reply.a", "count"), LedgerEntry.free("Reply.b", "logits", "public"),
        LedgerEntry.unprotected("update (choice)", "choice"),
    ]  # fmt: skip
    assert paid_fields(entries) == {"Reply.a"}


def test_the_text_and_the_bill_of_a_difference():
    one = Difference(3, 2, 1, "update", "Reply.a", "1, with other records 9")
    assert one.text() == "round 2, ask 1, client 3, update: Reply.a: 1, with other records 9"
    entry = one.entry()
    assert (entry.field, entry.kind, entry.noise_multiplier) == ("update (twin)", "reply", 0.0)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_no_record_keeps_its_label(classes):
    """At least half of the labels move by half of the classes, to the other parity where there is one."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(600, 4, generator=rng), torch.arange(600) % classes
    others = torch.randn(250, 4, generator=rng), torch.zeros(250).long()
    new, labels = exchanged((x, y), others, classes, rng)
    moved = (labels - y) % classes
    assert (moved != 0).all()
    half = {2: 1, 3: 1, 10: 5}[classes]
    assert (moved == half).float().mean() > 0.5
    assert len(set(moved.tolist())) == classes - 1
    places = (new[:, None] == others[0][None]).all(2)
    assert (places.sum(1) == 1).all()
    assert {2, 3} == set(places.sum(0).tolist()), "250 others in 600 places: each two or three times"


def test_without_other_records_their_own_are_changed():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(200, 5, generator=rng), torch.zeros(200).long()
    nothing = x[:0], y[:0]
    new, labels = exchanged((x, y), nothing, 1, rng)
    assert labels.tolist() == y.tolist()
    assert new.mean() < -0.4, "mirrored"
    assert 0.05 < (new.std() ** 2 - x.std() ** 2).abs().sqrt() < 0.2, "moved by a tenth"
    tokens = torch.arange(12).view(3, 4)
    shifted, _ = exchanged((tokens, torch.tensor([0, 1, 0])), (tokens[:0], y[:0]), 2, rng)
    assert sorted(shifted.tolist()) == [[3, 0, 1, 2], [7, 4, 5, 6], [11, 8, 9, 10]]
    none, _ = exchanged((x[:0], y[:0]), (x, y), 3, rng)
    assert len(none) == 0
