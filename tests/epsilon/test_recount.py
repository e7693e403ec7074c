"""The ledger of private training, counted again: what was done, and each number that says less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from protected import few_steps

from fedaudit.epsilon import recount
from fedaudit.epsilon.client_replay import noise_of, repeat
from fedaudit.epsilon.recount import _differences, counted_again
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.privacy.dpsgd import Planned
from fedaudit.progress import unwatched
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.task import compute

REAL = Planned.entry


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run, and its trainings as they are seen when they are repeated."""
    run = RunFolder(few_steps(tmp_path_factory.mktemp("recount") / "run"))
    with compute(run.world):
        return run, [made for k in range(2) for made in repeat(run, k, unwatched, noise_of).made]


def test_an_honest_ledger_says_what_was_done(done):
    run, trainings = done
    assert counted_again(run, trainings) is None


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        ("steps", lambda s: s // 2, "steps, and"),
        ("sample_rate", lambda q: q / 2, "a sample rate of"),
        ("clip", lambda C: C / 2, "a clipping norm of"),
        ("noise_multiplier", lambda m: 2 * m, "a noise multiplier of"),
        ("delta", lambda d: 10 * d, "delta ="),
    ],
)
def test_each_number_of_the_ledger_is_counted_again(done, monkeypatch, number, change, words):
    run, trainings = done
    for entry in run.record.ledger[1].entries:
        if entry.kind == "training":
            monkeypatch.setattr(entry, number, change(getattr(entry, number)))
    found = counted_again(run, trainings)
    assert found is not None
    assert found.words.startswith("the ledger of client 1 says")
    assert words in found.words


def test_an_epsilon_that_is_too_small_for_its_own_entries_is_found(done, monkeypatch):
    run, trainings = done
    row = run.record.ledger[0]
    true = row.by_kind["training"]
    monkeypatch.setitem(row.by_kind, "training", 0.9 * true)
    found = counted_again(run, trainings)
    assert found is not None
    assert found.epsilon == pytest.approx(true, rel=1e-6)
    assert "and what was done costs" in found.words


def test_a_ledger_with_half_of_the_steps_refutes_its_run(tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(Planned, "entry", lambda self, made=None: REAL(self, (made or self.steps) // 2))
        folder = few_steps(tmp_path / "a")
    (found,) = audit_residuals(folder)
    assert found.verdict == "refuted"
    assert found.lower_bound > read_record(folder).ledger[0].by_kind["training"]


def differences(*, policy=None, row_delta=1e-5, made=((4, 0.1), (5, 0.2)), **numbers):
    """The words about a ledger of two trainings, 9 steps in all, the second of them with the given numbers."""
    honest = {"kind": "training", "steps": 1, "rounds": [1], "sample_rate": 0.2, "clip": 2.0, "sigma": 3.0,
              "noise_multiplier": 1.5, "delta": 1e-5}  # fmt: skip
    entries = [SimpleNamespace(**{**honest, "steps": 2, "rounds": [1, 2]}),
               SimpleNamespace(**{**honest, "steps": 5, "rounds": [2], **numbers}),
               SimpleNamespace(**{**honest, "kind": "count", "sample_rate": 0.0, "clip": 9.0})]  # fmt: skip
    mine = [SimpleNamespace(steps=steps, q=q) for steps, q in made]
    policy = {"clip": 2.0, "noise_multiplier": 1.5} | (policy or {})
    return _differences(SimpleNamespace(entries=entries, delta=row_delta), mine, SimpleNamespace(**policy), 1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"noise_multiplier": 1.5 * (1 - 1e-10)}, []),  # rounding
        ({"policy": {"noise_multiplier": None}}, []),
        ({"policy": {"clip": None}}, []),
        ({"clip": None, "sigma": None, "delta": None}, []),
        ({"steps": 6}, []),  # a ledger may say more
        ({"sample_rate": 0.3}, []),
        ({"sample_rate": 0.2 * (1 - 1e-10)}, []),  # rounding
        ({"sample_rate": 0.2 * (1 - 1e-8)}, ["a sample rate of 0.2, and it was 0.2"]),
        ({"sample_rate": 0.2 * (1 - 1e-9)}, []),  # exactly as much as rounding may take
        ({"noise_multiplier": 3.0 * (1 + 1e-6) / 2}, []),
        ({"noise_multiplier": 1.5 * (1 - 1e-9)}, []),
        ({"delta": 1e-5 * (1 + 1e-9), "row_delta": 1e-5 * (1 + 1e-9)}, []),
        ({"sigma": 3.0 * (1 - 5e-7)}, []),
        ({"sigma": 3.0 * (1 - 2e-6)}, ["a noise multiplier of 1.5, and its sigma is 3"]),
        ({"clip": 2.0 * (1 + 5e-10)}, []),
        ({"clip": 2.0 * (1 + 1.5e-9)}, ["a clipping norm of 2, and the policy's is 2"]),
        ({"steps": 4}, ["8 steps, and 9 were made"]),
        ({"sample_rate": 0.15}, ["a sample rate of 0.15, and it was 0.2"]),
        ({"clip": 1.0}, ["a clipping norm of 1, and the policy's is 2"]),
        ({"sigma": 2.9}, ["a noise multiplier of 1.5, and its sigma is 2.9"]),
        ({"noise_multiplier": 1.4}, ["a noise multiplier of 1.4, and 1.5 is asked"]),
        ({"delta": 2e-5}, ["delta = 2e-05, and the policy's is 1e-05"]),
        ({"row_delta": 2e-5}, ["delta = 2e-05 for the client, and the policy's is 1e-05"]),
    ],
)
def test_each_number_is_held_against_its_own(changed, words):
    assert differences(**changed) == words


def test_a_ledger_without_training_says_that_nothing_was_drawn():
    """No entry is of training: no step and a rate of 0, where nine steps at rates of up to 0.2 were made."""
    row = SimpleNamespace(entries=[SimpleNamespace(kind="logits", steps=99, rounds=[1])], delta=1e-5)
    mine = [SimpleNamespace(steps=4, q=0.1), SimpleNamespace(steps=5, q=0.2)]
    words = _differences(row, mine, SimpleNamespace(clip=1.0, noise_multiplier=None), 1e-5)
    assert words == ["0 steps, and 9 were made", "a sample rate of 0, and it was 0.2"]


def test_of_several_wrong_clients_the_one_that_costs_most_is_named(monkeypatch):
    """Client 2 has done nothing, and client 3's ledger says enough."""
    monkeypatch.setattr(recount, "_differences", lambda row, mine, policy, delta: [])
    monkeypatch.setattr(
        recount, "compose", lambda events, delta, compare: SimpleNamespace(epsilon_of_record=float(events[0].count))
    )
    rows = [
        SimpleNamespace(client=k, n=10 + k, delta=1e-5, by_kind={"training": said})
        for k, said in ((0, 2.0), (1, 2.0), (2, 0.0), (3, 7.0))
    ]
    policy = SimpleNamespace(clip=2.0, delta_for=lambda n: 1 / n)
    run = SimpleNamespace(
        world=SimpleNamespace(policies={"training": policy}), record=SimpleNamespace(ledger=rows)
    )  # fmt: skip
    made = [SimpleNamespace(client=k, sigma=3.0, q=0.5, steps=steps) for k, steps in ((0, 4), (1, 9), (3, 7), (0, 1))]
    found = counted_again(run, made)
    assert found.epsilon == 9.0
    assert "the ledger of client 1 says epsilon = 2, and what was done costs 9" in str(vars(found))
    assert counted_again(run, [made[2]]) is None
    assert counted_again(run, [made[0], made[3]]).epsilon == 5.0, "equal events are added up"


@pytest.mark.parametrize(("policies", "delta"), [(("training",), 1e-3), (("training", "logits"), 2e-5)])
def test_what_was_done_is_composed_by_client_at_the_ledgers_delta(policies, delta, monkeypatch):
    """Client 4 made two trainings alike and one of another size. Client 6 made none, and client 8 said enough."""
    asked = []

    def compose(events, at, *, compare):
        asked.append(([(e.noise_multiplier, e.sample_rate, e.count) for e in events], at, compare))
        return SimpleNamespace(epsilon_of_record=3.0)

    monkeypatch.setattr(recount, "compose", compose)
    monkeypatch.setattr(
        recount, "_differences", lambda row, mine, policy, delta: [f"{len(mine)} at {delta:g}"][row.n :]
    )
    policy = SimpleNamespace(clip=2.0, delta_for=lambda n: 1e-3)
    ledger = [
        SimpleNamespace(client=k, n=n, delta=2e-5, by_kind=said)
        for k, n, said in ((4, 0, {"training": 2.9}), (6, 0, {}), (8, 1, {"training": 3.0}), (9, 1, {}))
    ]
    run = SimpleNamespace(
        world=SimpleNamespace(policies=dict.fromkeys(policies, policy)), record=SimpleNamespace(ledger=ledger)
    )
    made = [
        SimpleNamespace(client=k, sigma=sigma, q=q, steps=steps)
        for k, sigma, q, steps in ((4, 4.0, 0.1, 5), (8, 6.0, 0.2, 7), (4, 4.0, 0.1, 6), (4, 5.0, 0.1, 3))
    ]
    found = counted_again(run, made)
    assert asked == [([(2.0, 0.1, 11), (2.5, 0.1, 3)], delta, False), ([(3.0, 0.2, 7)], delta, False)]
    words = f"3 at {delta:g}; epsilon = 2.9, and what was done costs 3"
    assert (found.words, found.epsilon) == (f"the ledger of client 4 says {words}", 3.0)
    assert counted_again(run, made[1:2]) is None


@pytest.mark.parametrize("said", [0.0, 0.5, 100.0])
def test_an_epsilon_may_be_larger_by_rounding(said, monkeypatch):
    """By a share of what was said, and by as much again."""
    limit = said * (1 + recount.CLOSE) + recount.CLOSE
    monkeypatch.setattr(recount, "_differences", lambda *of: [])
    row = SimpleNamespace(client=0, n=9, delta=1e-5, by_kind={"training": said})
    policy = SimpleNamespace(clip=None, delta_for=lambda n: 1e-5)
    run = SimpleNamespace(
        world=SimpleNamespace(policies={"training": policy}), record=SimpleNamespace(ledger=[row])
    )  # fmt: skip
    made = [SimpleNamespace(client=0, sigma=1.0, q=0.1, steps=2)]
    for epsilon, wrong in ((said, False), (limit, False), (limit + recount.CLOSE / 10, True)):
        monkeypatch.setattr(
            recount, "compose", lambda *of, epsilon=epsilon, **how: SimpleNamespace(epsilon_of_record=epsilon)
        )
        assert (counted_again(run, made) is not None) is wrong
