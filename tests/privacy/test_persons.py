"""A guarantee for persons: all records of a person at a client together, with numbers by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn

from fedaudit import sgd
from fedaudit.cli.listing import ledger_lines
from fedaudit.errors import NotApplicable, PrivacyError, SettingError
from fedaudit.privacy import dpsgd, persons
from fedaudit.privacy.dpsgd import fit_private
from fedaudit.privacy.mechanism_outputs import Training
from fedaudit.privacy.policy import Policy, parse_policy, read_policies
from fedaudit.privacy.sensitivity import Context, bounded
from fedaudit.runtime.runner import run
from fedaudit.runtime.world import world_of
from fedaudit.wire.message import KINDS, private


def slope(f, x, y):
    """Its gradient in the one weight is x."""
    return f(x)[:, 0]


class Gradients(Training):
    def __init__(self):
        self.found = []

    def step(self, gradient, at=(0, 1)):
        self.found.append(float(gradient["weight"]))


def sums(x, people, *, q=1.0, steps=1, noise=1e-9):
    """The clipped sums of all steps on rows x: C = 1, so little noise that it cannot be seen."""
    rows, gate = (torch.tensor(x)[:, None], torch.zeros(len(x), dtype=torch.long)), Gradients()
    policy = Policy(mechanism="dp-sgd", sensitivity="clip:1", noise_multiplier=noise, unit="person", delta=1e-5)
    batch = round(q * len(x))
    _, entry = fit_private(
        nn.Linear(1, 1, bias=False), slope, rows, opt=sgd(1.0), batch=batch, epochs=None, steps=steps, given=None,
        rng=torch.Generator().manual_seed(0), noise=torch.Generator().manual_seed(1), policy=policy, fits=1, gate=gate,
        people=None if people is None else torch.tensor(people),
    )  # fmt: skip
    return [g * max(1, batch) for g in gate.found], entry


def test_the_sum_of_a_persons_gradients_is_clipped():
    """Anna has 0.6 and 0.8, together 1.4, which is clipped to 1; Bert has 0.3. Row by row nothing would be clipped."""
    together, entry = sums([0.6, 0.3, 0.8], [7, 2, 7])
    alone, _ = sums([0.6, 0.3, 0.8], None)
    assert together[0] == pytest.approx(1.3, abs=1e-4)
    assert alone[0] == pytest.approx(1.7, abs=1e-4)
    assert (entry.unit, entry.sensitivity, entry.sample_rate) == ("person", 1.0, 1.0)
    assert "who has how many records" in entry.condition


def test_rows_that_cancel_within_a_person_are_summed_first():
    """5 and -4.5 are 0.5 together; clipped one by one they would be 0."""
    assert sums([5.0, -4.5], [0, 0])[0][0] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("together", [1, 2, 3, 100])
def test_however_rows_are_cut_a_person_stays_whole(together, monkeypatch):
    """0.9 + 0.8 + 0.7 and 0.6 + 0.5 are clipped to 1 each, 0.2 stays: 2.2."""
    monkeypatch.setattr(dpsgd, "CHUNK", together)
    monkeypatch.setattr(dpsgd, "ROOM", 0)
    found, _ = sums([0.9, 0.6, 0.8, 0.2, 0.7, 0.5], [0, 1, 0, 2, 0, 1])
    assert found[0] == pytest.approx(2.2, abs=1e-4)


def test_persons_are_drawn_whole_and_each_with_probability_q():
    """Anna's rows sum to 1 (of ten tenths), Bert's one row to 0.5: a step finds 0, 0.5, 1 or 1.5, a quarter each."""
    found, _ = sums([0.1] * 10 + [0.5], [0] * 10 + [1], q=0.5454, steps=300)
    q = 6 / 11
    values = [round(value, 2) for value in found]
    assert set(values) == {0.0, 0.5, 1.0, 1.5}
    anna, bert = (sum(v in of for v in values) / 300 for of in ((1.0, 1.5), (0.5, 1.5)))
    spread = 4 * math.sqrt(q * (1 - q) / 300)
    assert abs(anna - q) < spread, "ten records make nobody likelier"
    assert abs(bert - q) < spread
    assert abs(values.count(1.5) / 300 - q * q) < spread, "independently"


def test_with_a_record_each_it_is_the_usual_training():
    x = [0.5, 2.0, -3.0, 0.1, 0.7]
    assert sums(x, [3, 1, 0, 2, 4])[0][0] == pytest.approx(sums(x, None)[0][0], abs=1e-6)


# --- fields -----------------------------------------------------------------------------------------------------------


def context(most):
    return Context(key=("k",), n=10, policies={}, releases=lambda _: 1, images=None, encode=None, most=most)


@pytest.mark.parametrize(
    ("kind", "unit", "value", "wanted"),
    [
        ("embeddings", "record", torch.ones(10, 4), 2 * 0.5 * math.sqrt(4)),  # four rows move by 2 C each
        ("label_counts", "client", torch.tensor([4.0, 6.0]), 4 * math.sqrt(2)),  # four labels move from a to b
        ("statistics", "client", torch.ones(3, 4), 2 * 0.5 * math.sqrt(3)),  # three rows, wherever they move to
    ],
)
def test_how_far_all_records_of_a_person_move_a_field(kind, unit, value, wanted):
    policy = Policy(epsilon=1.0, sensitivity="clip:0.5", unit="person")
    declared = declared_of(kind, unit)
    _, found, how = bounded([value], "A.b", declared, policy, context(4))
    assert found == [pytest.approx(wanted)]
    assert "a person has at most 4 records" in how.condition
    _, of_record, _ = bounded([value], "A.b", declared, policy.model_copy(update={"unit": "record"}), context(1))
    assert of_record[0] <= found[0]


def declared_of(kind, unit):
    from fedaudit import Up

    made = type("Made", (Up,), {"__annotations__": {"v": torch.Tensor}, "v": private(kind, via="data", unit=unit)})
    return made.declared()["v"]


def test_means_of_classes_are_refused():
    policy = Policy(epsilon=1.0, unit="person")
    with pytest.raises(NotApplicable, match="not bounded for all records of a person"):
        bounded([torch.ones(4)], "A.b", declared_of("prototypes", "client"), policy, context(2))


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (["training:eps=1,unit=person", "embeddings:eps=1"], "training protects persons, and embeddings single"),
        (["embeddings:eps=1,laplace,unit=person"], "not bounded for several records of a person. Choose from gaussian"),
        (["embeddings:eps=1,discrete-gaussian,unit=person"], "Choose from gaussian"),
        (["labels:eps=1,randomised-response,unit=person"], "Choose from gaussian"),
        (["embeddings:eps=1,random-pixel,unit=person"], "Choose from gaussian"),
    ],
)
def test_policies_that_give_no_guarantee_for_persons_are_refused(policies, words):
    with pytest.raises(PrivacyError, match=words):
        read_policies(dict(map(parse_policy, policies)), KINDS)


def test_data_that_names_no_person_are_refused(tiny, tmp_path):
    with pytest.raises(SettingError, match="does not say whose record each one is"):
        run(tiny(privacy=dict([parse_policy("training:noise=1,unit=person")])), out=tmp_path / "run")


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["serial", "stacked", pytest.param("isolated", marks=pytest.mark.slow)])
def test_a_run_protects_persons(engine, tiny, tmp_path):
    values = {"isolate": True} if engine == "isolated" else {"engine": engine}
    privacy = dict(map(parse_policy, ["training:noise=1,clip=1,unit=person", "label_counts:noise=2,unit=person"]))
    setting = tiny("roads:Honest", dataset="tenfold:of_persons", model="mlp", rounds=1, set={}, privacy=privacy,
                   twins="all", aux=0.1, **values)  # fmt: skip
    record, world = run(setting, out=tmp_path / "run"), world_of(setting.model_dump_json())
    facts = record.data
    assert (record.twins.held, record.twins.tasks) == (3, 3)
    assert (facts.most_of_person, facts.most_clients, len(facts.persons)) == (3, 3, 3)
    assert any("records of one person lie at up to 3 clients" in note for note in record.notes)
    assert not any("one record up to" in note for note in record.notes)
    for client in record.ledger:
        noisy = [e for e in client.entries if 0 < e.noise_multiplier < math.inf]
        assert {e.unit for e in noisy} == {"person"}
        (counts,) = [e for e in noisy if e.kind == "label_counts"]
        most = max(Counter(world.people(client.client).tolist()).values())
        assert counts.sensitivity == pytest.approx(most * math.sqrt(2))
        assert counts.sigma == pytest.approx(2 * most * math.sqrt(2))
    assert "for one person)" in "".join(ledger_lines(record)) or None in [c.epsilon for c in record.ledger]


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_the_training_of_a_run_knows_the_persons(engine, tiny, tmp_path, monkeypatch):
    """Each sum that is clipped is a person's: as many as there are persons at a client, if a step takes everybody."""
    from fedaudit.privacy import dpsgd_stack

    clipped = []
    real = dpsgd.clip_and_sum
    monkeypatch.setattr(
        dpsgd, "clip_and_sum", lambda g, C: (clipped.append(len(next(iter(g.values())))), real(g, C))[1]
    )
    monkeypatch.setattr(dpsgd_stack, "fit_private_together", lambda jobs: pytest.fail("a stack clips row by row"))
    setting = tiny(
        "fedavg", dataset="tenfold:of_persons", model="mlp", rounds=1, set={"E": 1, "B": 10**6, "eta": 0.1}, aux=0.1,
        privacy=dict([parse_policy("training:noise=1,clip=1,unit=person")]), engine=engine,
    )  # fmt: skip
    record = run(setting, out=tmp_path / "run")
    assert clipped == record.data.persons
    assert sum(record.data.persons) < sum(record.data.members)


# --- each function alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("together", "parts"),
    [
        (1, [[0, 1], [2], [3, 4, 5], [6]]), (2, [[0, 1], [2], [3, 4, 5], [6]]), (3, [[0, 1, 2], [3, 4, 5], [6]]),
        (4, [[0, 1, 2], [3, 4, 5, 6]]), (6, [[0, 1, 2, 3, 4, 5], [6]]), (7, [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)  # fmt: skip
def test_no_person_is_in_two_parts(together, parts):
    """Persons 4, 0, 2 and 9 have 2, 1, 3 and 1 of the seven rows."""
    whose = torch.tensor([9, 4, 2, 4, 0, 2, 2])
    index = torch.tensor([1, 3, 4, 2, 5, 6, 0])
    assert [part.tolist() for part in persons.parts_of(index, whose, together)] == parts
    assert list(persons.parts_of(index[:0], whose, together)) == []
    assert [len(part) for part in persons.parts_of(index, None, 3)] == [3, 3, 1]


def test_all_records_of_the_drawn_persons_come_person_by_person():
    whose = torch.tensor([2, 0, 1, 2, 0, 2])
    coins = torch.rand(3, generator=torch.Generator().manual_seed(5))
    for q in (0.0, float(coins.sort()[0][1]) + 1e-6, 1.0):
        found = persons.drawn_persons(whose, q, torch.Generator().manual_seed(5)).tolist()
        in_order = [i for k in range(3) if coins[k] < q for i in range(6) if whose[i] == k]
        assert found == in_order


def test_gradients_of_rows_are_added_to_their_persons():
    into = {"w": torch.ones(2, 2), "b": torch.zeros(2)}
    rows = {"w": torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]), "b": torch.tensor([1.0, 2.0, 4.0])}
    persons.summed_by_person(rows, torch.tensor([1, 0, 1]), into)
    assert into["w"].tolist() == [[5.0, 9.0], [18.0, 35.0]]
    assert into["b"].tolist() == [2.0, 5.0]


def test_the_condition_of_a_guarantee_for_persons():
    assert persons.of_persons(1).startswith("a person has at most 1 record, and")
    assert persons.of_persons(3).startswith("a person has at most 3 records, and")
