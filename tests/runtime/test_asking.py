"""Who is asked, who answers, who drops out, and what a quorum is."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import DropEngine

from fedaudit import Down, Up, private, public, registry, run
from fedaudit.errors import ContractError, NotApplicable, RunError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.runtime import asking
from fedaudit.runtime.asking import RoundSoFar, asker, check_open, drops_out, participants_of, quorum_of
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.runtime.task import Done
from fedaudit.setting import Setting
from fedaudit.wire.transcript import Transcript

# --- unequal clients, deltas and rounds


def rounds(*utilities):
    sent = dict.fromkeys(("up_payload", "up_wire", "down_payload", "down_wire"), 0)
    return [RoundRecord(round=t, participants=[0], utility=u, wall_s=1, **sent) for t, u in enumerate(utilities, 1)]


def test_a_client_that_is_never_asked_spends_nothing_and_is_still_evaluated(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=1, clients=4, participation=0.5, eval_clients=True)
    record = run(setting, out=tmp_path / "a")
    asked = record.rounds[0].participants
    assert len(asked) == 2
    assert [row.client for row in record.ledger] == asked
    assert len(record.rounds[0].utility.clients.global_test.each) == 4
    assert {p.name for p in (tmp_path / "a" / "models").glob("client*")} == {
        f"client-{k:06d}.safetensors" for k in asked
    }


@pytest.mark.parametrize(
    ("quorum", "participants", "needed"), [(0.5, 5, 3), (0.5, 4, 2), (0.34, 3, 2), (0.01, 7, 1), (1.0, 3, 3)]
)
def test_the_quorum_is_rounded_up(quorum, participants, needed):
    assert quorum_of(Setting.make(quorum=quorum), list(range(participants))) == needed


@pytest.mark.parametrize(("share", "clients", "wanted"), [(0.1, 3, 1), (0.5, 5, 2), (0.8, 5, 4), (1.0, 3, 3)])
def test_the_share_of_participants_is_rounded_and_never_zero(share, clients, wanted):
    setting = Setting.make(participation=share, clients=clients)
    rounds = [participants_of(setting, t) for t in range(1, 9)]
    assert {len(ids) for ids in rounds} == {wanted}
    assert all(ids == sorted(set(ids)) for ids in rounds)
    assert wanted in (1, clients) or len({tuple(ids) for ids in rounds}) > 1


def test_drop_outs_are_as_frequent_as_set_and_differ_by_round_and_ask():
    setting = Setting.make(dropout=0.3)
    drops = [drops_out(setting, k, t, ask) for k in range(20) for t in range(20) for ask in range(5)]
    assert abs(sum(drops) / 2000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 2000)
    by_ask = torch.tensor(drops).reshape(20, 20, 5)
    assert (by_ask != by_ask[:, :1]).any()
    assert (by_ask != by_ask[:, :, :1]).any()
    assert (by_ask != by_ask[:1]).any()


# --- rounds, asks and fits that differ


def test_two_asks_draw_otherwise(tiny, tmp_path):
    run(tiny("outside:Draws", rounds=2, clients=2), out=tmp_path / "a")
    drawn = [e["s"] for e in Transcript(tmp_path / "a" / "transcript").entries() if e.direction == "up"]
    assert len(drawn) == 2 * 2 * 2, "two asks of two clients in two rounds"
    assert len(set(drawn)) == len(drawn)


def test_who_failed_is_not_asked_again_in_the_round(tiny, tmp_path):
    """Client 1 drops out of round 1's first ask; the second goes to the others, and round 2 to all again."""
    run(tiny("outside:Draws", rounds=2, clients=3), out=tmp_path / "a", engine=DropEngine({(1, 1, 0)}))
    asked = {}
    for e in Transcript(tmp_path / "a" / "transcript").entries():
        if e.direction == "down":
            asked.setdefault((e.round, e.ask), []).append(e.client)
    assert asked == {(1, 0): [0, 1, 2], (1, 1): [0, 2], (2, 0): [0, 1, 2], (2, 1): [0, 1, 2]}


# --- an ask by hand ------------------------------------------------------------------------------------------------


class Told(Down):
    n: int


PAID = LedgerEntry.unprotected("Reply.x", "logits")


class Asking:
    """Round 3 of 9 with clients 1, 4 and 6, whose engine answers what a test says."""

    def __init__(self, answers, *, policies=(), broken=(), quorum=1, aggregate="plain", compression=None):
        self.told, self.tasks, self.chosen, self.kept, self.logged, self.sent = [], [], [], [], [], []
        self.excluded, self.noted, self.spans = [], [], []
        setting = SimpleNamespace(aggregate=aggregate, rounds=9, dropout=0.0, seed=0)
        traffic = SimpleNamespace(asks=["the first"])

        def down(messages):
            self.sent.append(messages)
            return ((k, b"message to %d" % k) for k in sorted(messages))

        def engine(tasks):
            for task in tasks:
                self.tasks.append(task)
                yield answers[task.k]

        wire = SimpleNamespace(
            traffic=traffic,
            down=down,
            back=lambda done, path, device: None if done.reply is None else f"reply {done.k}",
        )
        twins = SimpleNamespace(
            choose=lambda *of: self.chosen.append(of), ask=lambda task: task, has=lambda k: k == 4, broken=list(broken),
            follow=lambda done: None, entries=lambda: ["a difference"],
        )  # fmt: skip
        self.run = SimpleNamespace(
            method=SimpleNamespace(), setting=setting, json="{}", secret=b"s", attempt=2, folder=Path("F"), twins=twins,
            engine=SimpleNamespace(in_process=False, map=engine),
            timings=SimpleNamespace(add=lambda *of: self.spans.append(of)),
            world=SimpleNamespace(policies=policies, device=None, compression=compression),
            store=SimpleNamespace(client=lambda k: b"state %d" % k, put_client=lambda *of: self.kept.append(of)),
            has_begun=lambda k: k == 1, log_failure=lambda *of: self.logged.append(of),
            note_alone=lambda *of: self.noted.append(of), watch=lambda *of: self.told.append(of),
        )  # fmt: skip
        meter = SimpleNamespace(exclude=lambda *of: self.excluded.append(of[1:]))
        self.so_far = RoundSoFar(3, wire, meter, quorum)
        self.cohort = SimpleNamespace(ids=[1, 4, 6])

    def ask(self, message, terms=None):
        return asker(self.run, self.so_far)(self.cohort, "update", message, terms)


def answers(**changes):
    made = {
        k: {"state": b"new %d" % k, "reply": b"bytes", "entries": [PAID] * k, "layout": f"layout {k}", "cut": k}
        for k in (1, 4, 6)
    }
    return {k: Done(k, **(of | changes.get(f"c{k}", {}))) for k, of in made.items()}


def test_replies_come_back_by_client_and_states_are_kept():
    here = Asking(answers(c4={"redone": 2, "spans": ["span"], "rss": 7}))
    message = Told(1)
    assert here.ask(message) == dict.fromkeys((1, 4, 6), b"bytes")
    assert here.sent == [dict.fromkeys((1, 4, 6), message)]
    assert here.chosen == [([1, 4, 6], [4, 6])], "client 1 has begun"
    assert [(task.k, task.t, task.ask, task.attempt, task.followed) for task in here.tasks] == [
        (1, 3, 1, 2, False), (4, 3, 1, 2, True), (6, 3, 1, 2, False),
    ]  # fmt: skip
    assert len({task.noise for task in here.tasks}) == 3
    assert here.kept == [(k, 3, 1, b"new %d" % k) for k in (1, 4, 6)]
    assert here.so_far.redone == [4, 4]
    assert here.so_far.layouts == {k: f"layout {k}" for k in (1, 4, 6)}
    assert here.so_far.cut_off == 1 + 4 + 6
    assert [(k, len(entries)) for k, entries in here.so_far.entries] == [(1, 1), (4, 4), (6, 6)]
    assert [told[:2] for told in here.told] == [(2, 9)] * 3
    assert here.told[1][2] == "round 3, update, 2/3 clients"
    assert here.excluded[1] == (["span"], False)
    assert here.spans[1] == (["span"], 7, None)
    assert here.so_far.absent == []


def test_only_those_are_asked_to_whom_something_is_sent():
    here = Asking(answers())
    assert here.ask({6: Told(2), 1: Told(3)}) == {1: b"bytes", 6: b"bytes"}
    with pytest.raises(ContractError, match="update: client 2 is not in this round's cohort"):
        here.ask({5: Told(1), 2: Told(1), 1: Told(1)})


@pytest.mark.parametrize("policies", [(), ("logits",)])
@pytest.mark.parametrize("lost", [False, True])
def test_a_client_that_fails_is_absent_from_then_on(policies, lost):
    """What it had cost before is billed. Where a policy is, so is that nobody knows what a lost task had seen."""
    here = Asking(answers(c4={"reply": None, "state": None, "error": "ValueError", "lost": lost}), policies=policies)
    assert sorted(here.ask(Told(1))) == [1, 6]
    assert here.cohort.ids == [1, 6]
    assert [(one.client, one.ask, one.reason) for one in here.so_far.absent] == [(4, 1, "ValueError")]
    assert dict(here.so_far.entries)[4][:4] == [PAID] * 4
    assert len(dict(here.so_far.entries)[4]) == (5 if lost and policies else 4)
    assert [k for k, *_ in here.kept] == [1, 6]
    assert [of[:2] for of in here.logged] == [(3, 1)]
    assert here.so_far.cut_off == 1 + 6


def test_a_reply_without_a_state_counts_as_none():
    here = Asking(answers(c1={"state": None, "error": "it is too large"}))
    assert sorted(here.ask(Told(1))) == [4, 6]


@pytest.mark.parametrize(("quorum", "enough"), [(2, True), (3, False)])
def test_a_round_with_fewer_than_its_quorum_ends(quorum, enough):
    failing = answers(c4={"reply": None, "error": "ValueError"}, c6={"reply": b"x"})
    here = Asking(failing, quorum=quorum)
    if enough:
        assert sorted(here.ask(Told(1))) == [1, 6]
        return
    with pytest.raises(
        RunError, match=r"Round 3, update: 2 clients are left, the quorum is 3. First failure: client 4: "
    ):
        here.ask(Told(1))


def test_the_first_failure_is_named():
    here = Asking(answers(c1={"reply": None, "error": "one"}, c6={"reply": None, "error": "two"}), quorum=2)
    with pytest.raises(RunError, match=r"1 clients are left, the quorum is 2. First failure: client 1: one"):
        here.ask(Told(1))


def test_an_error_of_the_method_ends_the_run():
    here = Asking(answers(c4={"fatal": ContractError("the method is wrong"), "reply": None}))
    with pytest.raises(ContractError, match="the method is wrong"):
        here.ask(Told(1))
    assert len(here.logged) == 1


def test_a_difference_of_a_twin_costs_all_that_are_asked():
    here = Asking(answers(), broken=["a difference"])
    here.ask({6: Told(1), 4: Told(1)})
    assert here.so_far.entries[2:] == [(4, ["a difference"]), (6, ["a difference"])]


def test_what_enters_a_sum_has_no_twin():
    here = Asking(answers(), aggregate="secure")
    here.ask(Told(1), {k: f"terms of {k}" for k in (1, 4, 6)})
    assert [(task.terms, task.followed) for task in here.tasks] == [(f"terms of {k}", False) for k in (1, 4, 6)]


class Open(Up):
    n: int = public()


class Hidden(Up):
    z: torch.Tensor = private("logits", via="data", unit="record")


def test_single_replies_that_hold_something_private_are_refused_in_secure_sums(monkeypatch):
    method = registry.find("fedavg")()
    for sent, taken in (([Open], True), ([Hidden], False), ([Open, Hidden], False), ([], False)):
        monkeypatch.setattr(asking, "promised", lambda fn, sent=sent: tuple(sent))
        if taken:
            check_open(method, "client_update")
        else:
            with pytest.raises(NotApplicable, match="cannot run with --aggregate secure"):
                check_open(method, "client_update")


def test_by_poisson_each_client_is_drawn_by_itself():
    setting = Setting.make(participation=0.3, clients=50, sampling="poisson")
    sizes = [len(participants_of(setting, t)) for t in range(1, 201)]
    assert abs(sum(sizes) / 200 - 15) < 4 * math.sqrt(50 * 0.3 * 0.7 / 200)
    assert len(set(sizes)) > 5


def test_phases_of_a_sum_have_drop_outs_of_their_own():
    setting = Setting.make(dropout=0.5)
    drops = [[drops_out(setting, k, 1, 0, phase) for k in range(60)] for phase in ("", "share", "unmask")]
    assert len({tuple(of) for of in drops}) == 3
    assert not any(drops_out(Setting.make(dropout=0.0), k, 1, 0) for k in range(60))
