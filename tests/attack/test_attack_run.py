"""How an attack tells its progress, which results are news, and who the candidates are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit.attack import attack_run
from fedaudit.attack.attack_run import NOBODY, _is_news, _judge, _received, _within, candidates_of, made
from fedaudit.attack.verdict import LeakVerdict
from fedaudit.errors import ContractError, DataError
from fedaudit.runtime.attack_result import MembershipResult, NotRun


def told(title, times, monkeypatch):
    """Report steps 0, 1, ... of 10 at these times, and return what was told of part 2 of 5."""
    found, clock = [], iter(times)
    now = [0.0]
    monkeypatch.setattr(attack_run.time, "monotonic", lambda: now[0])
    tell = _within(lambda *said: found.append(said), 2, 5, title)
    for i, at in enumerate(clock):
        now[0] = at
        tell(i, 10, f"step {i}")
    return found


def test_without_a_title_every_step_is_told(monkeypatch):
    assert told("", [100.0, 100.0, 100.0], monkeypatch) == [
        (2.0, 5, "step 0"),
        (2.1, 5, "step 1"),
        (2.2, 5, "step 2"),
    ]


def test_with_a_title_steps_are_told_ten_times_a_second(monkeypatch):
    found = told("loss, ", [100.0, 100.05, 100.1, 100.15, 100.3], monkeypatch)
    assert [said for *_, said in found] == ["loss, step 0", "loss, step 2", "loss, step 4"]


def test_the_first_step_is_told_at_once(monkeypatch):
    assert len(told("loss, ", [0.0], monkeypatch)) == 1


def test_more_than_all_is_all(monkeypatch):
    found = []
    tell = _within(lambda *said: found.append(said), 0, 2)
    tell(15, 10, "")
    tell(0, 0, "")
    assert [done for done, *_ in found] == [1, 0]


def ran(clients, attack="a", blind=False, threat="server"):
    return MembershipResult.model_construct(attack=attack, threat=threat, clients=clients, blind=blind)


@pytest.mark.parametrize(
    ("now", "before", "news"),
    [
        (ran([0, 1]), None, True),
        (ran([0, 1]), ran([0]), True),
        (ran([0, 1]), ran([4, 5]), False),
        (ran([0]), NotRun(attack="a", threat="server", reason="r"), True),
        (NotRun(attack="a", threat="server", reason="r"), None, True),
        (NotRun(attack="a", threat="server", reason=f"the server {NOBODY}"), None, False),
        (NotRun(attack="a", threat="server", reason="r"), ran([0]), False),
    ],
)
def test_a_baseline_that_nobody_named_is_kept_where_it_tells_more(now, before, news):
    known = {} if before is None else {("a", "server"): before, ("b", "server"): ran([0, 1, 2])}
    assert _is_news(now, known) is news


def test_an_attack_is_named_with_its_settings():
    name, attack = made({"attack": "loss"})
    assert (name, type(attack).__name__) == ("loss", type(made("loss")[1]).__name__)
    with pytest.raises(ContractError, match="does not name an attack"):
        made({"shadows": 3})


@pytest.mark.parametrize("broken", [(True, False), (False, False)])
def test_all_attacks_are_judged_by_all_blind_baselines(broken, monkeypatch):
    """One of two baselines is enough for a broken split. What is no membership attack has no verdict."""
    seen = []
    verdicts = {name: LeakVerdict(f"of {name}", one) for name, one in zip("bc", broken, strict=True)}
    monkeypatch.setattr(attack_run, "judge_blind", lambda blind: verdicts)

    def judged(name, parts, blind, broken):
        seen.append((name, parts, sorted(blind), broken))
        return LeakVerdict("of a", broken, True, {"b": "gap"})

    monkeypatch.setattr(attack_run, "judge", judged)
    a, b, c = ran([0]), ran([0], "b", True), ran([0], "c", True)
    _judge([(b, "parts b"), (c, "parts c"), (a, "parts a"), (NotRun(attack="d", threat="server", reason="r"), "")])
    assert seen == [("a", "parts a", ["b", "c"], any(broken))]
    assert (a.leak, a.split_broken, a.verdict, a.against_blind) == (True, any(broken), "of a", {"b": "gap"})
    assert (b.split_broken, b.verdict, c.split_broken) == (broken[0], "of b", False)
    assert "leak" not in b.model_fields_set


def test_who_took_part_is_who_was_heard():
    entries = [("down", 0), ("up", 0), ("down", 3), ("up", 5)]
    transcript = SimpleNamespace(entries=lambda: [SimpleNamespace(direction=way, client=k) for way, k in entries])
    run = type("Run", (), {"transcript": transcript})()
    assert _received(run) == {0, 5}


@pytest.mark.parametrize(("members", "others"), [(5, 3), (3, 5), (4, 4)])
def test_as_many_members_as_others_are_candidates(members, others):
    """Members are records 0, 1, ..., the others 100, 101, ...; labels are the records' numbers."""

    def rows(first, n):
        return torch.arange(first, first + n).float().view(n, 1), torch.arange(first, first + n)

    world = SimpleNamespace(
        candidates=lambda k: rows(0, members), nonmembers=lambda k: rows(100, others), setting=SimpleNamespace(seed=11)
    )
    x, y, member = candidates_of(world, 3)
    n = min(members, others)
    assert len(x) == len(y) == len(member) == 2 * n
    assert (y < 100).tolist() == member.tolist()
    assert x.flatten().tolist() == y.tolist()
    assert len(set(y.tolist())) == 2 * n
    assert int(member.sum()) == n
    other = candidates_of(world, 4)[1]
    assert other.tolist() != y.tolist(), "each client has an order of its own"
    world.nonmembers = lambda k: rows(100, 0)
    with pytest.raises(DataError, match="Client 3 has no held-out records"):
        candidates_of(world, 3)
