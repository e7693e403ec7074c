"""Which clients have a twin, what is noted of them, and how they go on, with a host that answers by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit import Down, Up, private
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.runtime.declarations import twins
from fedaudit.runtime.declarations.twin_client import Answer, Difference, differences, exchanged, paid_fields
from fedaudit.runtime.declarations.twins import BACK, FOLDER, LOG, Twins, wanted
from fedaudit.runtime.run_record import TwinFacts
from fedaudit.runtime.task import Done, Task
from fedaudit.wire.codec import encode


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
