"""What a record says of its twins, held against a transcript and a ledger by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.runtime.run_record import TwinFacts
from fedaudit.verify import twins
from fedaudit.verify.finding import Findings


def row(type_="message", direction="up", client=0, t=1, ask=0, fn="update", **more):
    return {"type": type_, "direction": direction, "client": client, "round": t, "ask": ask, "fn": fn, **more}


ROWS = [
    row(direction="down"), row(direction="down", client=1), row(client=0), row(client=1), row(client=1, t=2),
    row(client=1, ask=1, fn="(sum) share"),  # a phase of a secure sum is no task
    row("event", event="absent", client=2, reason="dropped out"),
    row("event", event="absent", client=3, reason="its task failed"),
    row("event", event="begun"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("aggregate", "privacy", "answered"),
    [
        ("plain", {}, {0: 1, 1: 2}),
        ("plain", {"updates": {"where": "server"}}, {0: 1, 1: 2}),
        ("plain", {"updates": {"where": "client"}}, {0: 1, 1: 1}),  # replies of the sum in round 2 have no twin
        ("secure", {"updates": {"where": "server"}}, {0: 1, 1: 1}),
    ],
)
def test_the_tasks_of_a_transcript(aggregate, privacy, answered):
    setting = SimpleNamespace(aggregate=aggregate, privacy=privacy)
    case = SimpleNamespace(
        record=SimpleNamespace(setting=setting), transcript=SimpleNamespace(rows=lambda: ROWS), sums={(2, 0): "a sum"}
    )
    done, failed, absent = twins._tasks(case)
    assert (dict(done), dict(failed), absent) == (answered, {3: 1}, 2)


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        ({"wanted": "2", "clients": [0, 1], "tasks": 5, "held": 5}, []),
        ({"wanted": "2", "clients": [0, 1], "tasks": 5, "held": 4, "differences": ["one"]}, []),
        ({"wanted": "2", "clients": [0, 1], "tasks": 5, "held": 0, "differences": ["one"]}, []),
        ({"wanted": "off"}, []),
        ({"wanted": "off", "clients": [0], "tasks": 1, "held": 1}, [("tasks", 1, 0)]),
        ({"wanted": "0", "clients": [0], "tasks": 1, "held": 1}, [("tasks", 1, 0)]),
        (
            {"wanted": "2", "clients": [0, 1], "tasks": 5, "held": 6},
            [("held", 6, "at most 5"), ("held", 6, 5)],
        ),
        (
            {"wanted": "2", "clients": [0, 1], "tasks": 5, "held": -1, "differences": ["one"]},
            [("held", -1, "at most 5")],
        ),
        ({"wanted": "2", "clients": [0, 1], "tasks": 5, "held": 5, "differences": ["one"]}, [("held", 5, 4)]),
        ({"wanted": "2", "clients": [0, 1], "tasks": 5, "held": 4}, [("held", 4, 5)]),
        ({"wanted": "2", "clients": [1, 1], "tasks": 5, "held": 5}, [("clients", "[1, 1]", "those of 5 tasks")]),
        ({"wanted": "2", "clients": [0]}, [("clients", "[0]", "those of 0 tasks")]),
        ({"wanted": "2", "tasks": 3, "held": 3}, [("clients", "[]", "those of 3 tasks")]),
    ],
)  # fmt: skip
def test_figures_that_cannot_stand_beside_each_other(facts, wrong):
    assert [one[:3] for one in twins._impossible(TwinFacts(**facts))] == wrong


def of_ledger(billed, differences):
    """Of three rounds the first has clients 0 and 1, the second 1 and 2, the third 0, 2 and 3, of which 3 is absent."""
    rounds = [
        SimpleNamespace(round=1, participants=[0, 1], absent=[]),
        SimpleNamespace(round=2, participants=[1, 2], absent=[]),
        SimpleNamespace(round=3, participants=[0, 2, 3], absent=[SimpleNamespace(client=3)]),
    ]
    fields = {k: ["Local.w", "Local.w (twin)"] if k in billed else ["Local.w"] for k in range(4)}
    ledger = [
        SimpleNamespace(client=k, entries=[SimpleNamespace(field=name) for name in names])
        for k, names in fields.items()
    ]
    case = SimpleNamespace(record=SimpleNamespace(rounds=rounds, ledger=ledger))
    return [one[:3] for one in twins._against_ledger(case, SimpleNamespace(differences=differences))]


@pytest.mark.parametrize(
    ("billed", "differences", "wrong"),
    [
        ([], [], []),
        ([1, 2], [], [("differences", "none", "those of 2 clients")]),
        ([0, 1, 2], ["w of round 1, client 1"], []),
        ([0, 1], ["w of round 1, client 1"], [("differences", "1", "no entry in the ledger of client 2")]),
        ([0, 2], ["w of round 3, client 2", "w of round 3, client 0"], []),  # 1 was asked before it, not after
        ([], ["w of round 3, client 2", "w of round 3, client 0"],
         [("differences", "2", "no entry in the ledger of client 0")]),
        ([0, 2], ["w of round 3, client 2", "w of round 2, client 1"],
         [("differences", "2", "no entry in the ledger of client 1")]),
        ([0, 2], ["in words"], [("differences", "1", "no entry in the ledger of client 1")]),  # from the first round on
    ],
)  # fmt: skip
def test_a_difference_costs_each_client_that_is_asked_from_then_on(billed, differences, wrong):
    assert of_ledger(billed, differences) == wrong


@pytest.mark.parametrize(
    ("facts", "privacy", "other_code", "foreign", "told"),
    [
        (None, {}, "", False, []),
        (None, {"updates": {}}, "", False, []),  # a policy on sums protects no single records
        (None, {"logits": {}}, "", False, [("contradicted", "nothing", "facts of twins")]),
        (None, {"logits": {}}, "other code", False, [("the author's word", None, None)]),
        (None, {"logits": {}}, "", True, [("the author's word", None, None)]),
        ("facts", {}, "", False, [("contradicted", "facts of twins", "nothing")]),
        ("facts", {"updates": {}}, "other code", True, [("contradicted", "facts of twins", "nothing")]),
    ],
)
def test_a_run_has_twins_where_a_policy_protects_records(facts, privacy, other_code, foreign, told):
    record = SimpleNamespace(twins=facts, setting=SimpleNamespace(privacy=privacy))
    case = SimpleNamespace(found=Findings(), record=record, other_code=other_code, foreign_transport=foreign)
    twins.check_twins(case)
    assert [(one.verdict, one.recorded, one.recomputed) for one in case.found.list] == told


@pytest.mark.parametrize("wrong", [0, 1, 7])
def test_five_of_the_wrong_figures_are_named(wrong, monkeypatch):
    many = [(f"field {i}", i, i + 1, "why") for i in range(wrong)]
    monkeypatch.setattr(twins, "_impossible", lambda facts: many[:2])
    monkeypatch.setattr(twins, "_against_transcript", lambda case, facts: many[2:4])
    monkeypatch.setattr(twins, "_against_ledger", lambda case, facts: many[4:])
    record = SimpleNamespace(twins=TwinFacts(wanted="1"), setting=SimpleNamespace(privacy={"logits": {}}))
    case = SimpleNamespace(found=Findings(), record=record)
    twins.check_twins(case)
    if wrong:
        assert [one.field for one in case.found.list] == [f"twins.field {i}" for i in range(min(wrong, 5))]
    else:
        assert [one.figure for one in case.found.list] == ["twins", "replies of twins"]
