"""Which rows of a twin changed, what it is given instead of its records, and which of its fits are handed over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit.privacy.mechanism_outputs import HandedOver
from fedaudit.runtime.declarations import twin_client
from fedaudit.runtime.declarations.twin_client import (
    TwinClient,
    _bits,
    _drawn,
    _moved,
    _shown,
    exchanged,
    mixed_means,
    mixed_rows,
)
from fedaudit.runtime.party import Client


def test_rows_that_changed_in_any_place():
    before = torch.arange(24.0).view(4, 3, 2)
    after = before.clone()
    after[1, 2, 0] += 1
    after[3] += 1
    assert _moved(before, before.clone()) == set()
    assert _moved(before, after) == {1, 3}
    assert _moved(before, before[:3]) == {0, 1, 2, 3}, "of another shape all of them"
    assert _moved(before[:3], before) == {0, 1, 2}


def changed(rows, table):
    """A table in which these rows are other ones."""
    new = table.clone()
    new[list(rows)] += 1
    return new


@pytest.mark.parametrize(
    ("some", "rest", "one", "says"),
    [
        ([0, 2], [1, 3, 4], [1], None),  # five records, two of them exchanged, then the other three, then one
        ([0, 2], [1, 2, 3], [1], "several records"),
        ([0, 2, 4], [1, 3], [1], "several rows"),
        ([0, 2], [1, 3, 4], [1, 3], "several rows"),
        ([], [], [], None),
    ],
)
def test_a_row_is_of_one_record(some, rest, one, says):
    table = torch.arange(15.0).view(5, 3)
    twin = [("Reply.same", table), ("Reply.rows", {"a": table, "b": 2 * table})]
    others = [
        [("Reply.same", table), ("Reply.rows", {"a": table, "b": changed(rows, 2 * table)})]
        for rows in (some, rest, one)
    ]
    found = mixed_rows(twin, others, (2, 3, 1))
    assert [where for where, _ in found] == ["Reply.rows"] * (says is not None)
    assert all(says in how for _, how in found)


def test_rows_of_another_shape_count_only_where_both_halves_move_them():
    """A method may leave out rows: with some of the records, its table is shorter."""
    table = torch.arange(15.0).view(5, 3)
    twin, same, shorter = [("R.x", table)], [("R.x", table)], [("R.x", table[:4])]
    assert mixed_rows(twin, [shorter, same, same], (2, 3, 1)) == []
    assert [where for where, _ in mixed_rows(twin, [shorter, shorter, same], (2, 3, 1))] == ["R.x"]


def test_fields_and_parts_that_a_neighbour_did_not_come_to_are_left_out():
    """A neighbour whose task ended early has fewer of them."""
    table = torch.arange(15.0).view(5, 3)
    other = changed([0, 1, 2, 3, 4], table)
    twin = [("R.x", {"a": table, "b": table}), ("R.y", table)]
    same, fewer = [("R.x", {"a": table, "b": table}), ("R.y", other)], [("R.x", {"a": table})]
    assert mixed_rows(twin, [same, same, fewer], (2, 3, 1)) == []
    assert [where for where, _ in mixed_rows(twin, [same, same, same], (2, 3, 1))] == ["R.y"]
    moved = [("R.x", {"a": other})]
    assert [where for where, _ in mixed_rows(twin, [moved, moved, fewer], (2, 3, 1))] == ["R.x"]


def test_class_means_have_no_more_new_rows_than_records():
    """Their order means nothing, and a row that is there twice counts twice."""
    twin = ["a", "b", "c", "c", "d"]
    fits = [["x", "d", "c", "a", "y"], ["c", "b", "z", "d"], ["d", "c", "c", "w", "a"]]
    assert not mixed_means(twin, fits, (2, 1, 1))
    assert mixed_means(twin, fits, (1, 1, 1))
    assert mixed_means(twin, fits, (2, 1, 0))
    assert mixed_means(twin, [["a", "a", "a", "b"], [], []], (1, 9, 9))
    assert not mixed_means(twin, [["a", "a", "b"], [], []], (1, 0, 0))


def test_places_are_drawn_as_seldom_as_possible():
    """Seven of three places: three orders of the three, one after the other, and the generator has gone no further."""
    rng, by_hand = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    wanted = [place for _ in range(3) for place in torch.randperm(3, generator=by_hand).tolist()][:7]
    assert _drawn(3, 7, rng).tolist() == wanted
    assert torch.equal(rng.get_state(), by_hand.get_state())
    assert _drawn(3, 6, rng).tolist() == [p for _ in range(2) for p in torch.randperm(3, generator=by_hand).tolist()]
    assert _drawn(3, 0, rng).tolist() == []
    assert torch.equal(rng.get_state(), by_hand.get_state())


@pytest.mark.parametrize(("classes", "half"), [(2, 1), (3, 1), (5, 3), (8, 5), (10, 5)])
def test_other_records_by_hand(classes, half):
    rng, by_hand = torch.Generator().manual_seed(8), torch.Generator().manual_seed(8)
    x, y = torch.rand(7, 2, 3, generator=torch.Generator().manual_seed(1)), torch.arange(7) % classes
    others = torch.rand(4, 2, 3, dtype=torch.float64), torch.zeros(4).long()
    new, labels = exchanged((x, y), others, classes, rng)
    places = torch.cat([torch.randperm(4, generator=by_hand) for _ in range(2)])[:7]
    shift = torch.randint(1, classes, (7,), generator=by_hand)
    many = torch.rand(7, generator=by_hand) < 0.5
    assert new.dtype == x.dtype
    assert torch.equal(new, others[0][places].float())
    wanted = [(int(y[i]) + (half if many[i] else int(shift[i]))) % classes for i in range(7)]
    assert labels.tolist() == wanted


def test_records_of_ones_own_by_hand():
    rng, by_hand = torch.Generator().manual_seed(8), torch.Generator().manual_seed(8)
    x, y = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3
    new, labels = exchanged((x, y), (x[:0], y[:0]), 1, rng)
    order = torch.randperm(6, generator=by_hand)
    assert torch.allclose(new, -x[order] + 0.1 * torch.randn(6, 4, generator=by_hand))
    assert torch.equal(labels, y)
    assert labels is not y
    tokens = torch.arange(24).view(6, 4)
    shifted, _ = exchanged((tokens, y), (tokens[:0], y[:0]), 3, rng)
    order = torch.randperm(6, generator=by_hand)
    assert shifted.tolist() == [[row[-1], *row[:-1]] for row in tokens[order].tolist()]


def test_bits_tell_values_types_and_shapes_apart():
    values = [
        torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, 2.0]).double(), torch.tensor(1.0), torch.tensor([1.0]), {"a": 1}, {"a": 2},
        {"a": 1, "b": 2}, {"b": 2, "a": 1}, 3, "3",
    ]  # fmt: skip
    assert len({_bits(value) for value in values}) == len(values)
    assert _bits(torch.tensor([0.0])) != _bits(torch.tensor([-0.0])), "equal numbers of other bits"
    across = torch.arange(6.0).view(2, 3).t()
    assert _bits(across) == _bits(across.contiguous())


def test_long_values_are_cut_where_they_are_shown():
    assert _shown("a" * 198) == repr("a" * 198)
    assert _shown("a" * 199) == "'" + "a" * 199 + "..."
    assert _shown(torch.tensor([[1], [2]])) == "tensor([[1], [2]])"


class Gate(HandedOver):
    """Notes what is handed over, with a tape by hand."""

    def __init__(self, active=()):
        self.said, self.active = [], list(active)

    def trained(self, params, train):
        self.said.append(("trained", [p.tolist() for p in params()]))
        return train()

    def begin(self, what):
        self.said.append(("begin", what))
        return {"active": self.active, "slot": 2}

    def gradients(self):
        return iter([])


@pytest.fixture
def twin(monkeypatch):
    here = object.__new__(TwinClient)
    here.model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(here.model.weight, 3.0)
    gate = Gate()
    monkeypatch.setattr(twin_client, "outputs", lambda: gate)
    monkeypatch.setattr(Client, "fit", lambda self, loss, data, **options: ("fit", loss, data, options))
    monkeypatch.setattr(Client, "optimise", lambda self, params, *args, **options: ("optimise", params, args, options))
    return here, gate


def test_training_on_the_records_alone_is_handed_over(twin):
    here, gate = twin
    assert here.fit("loss", "data", E=2) == ("fit", "loss", "data", {"E": 2})
    assert gate.said == [], "given rows are not the client's records"
    assert here.fit("loss", E=3) == ("fit", "loss", None, {"E": 3})
    other = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(other.weight, 5.0)
    assert here.fit("loss", model=other) == ("fit", "loss", None, {"model": other})
    params = [torch.tensor([7.0])]
    assert here.optimise(params, "loss", 4, lr=0.5) == ("optimise", params, ("loss", 4), {"lr": 0.5})
    assert gate.said == [("trained", [[[3.0]]]), ("trained", [[[5.0]]]), ("trained", [[7.0]])]


@pytest.mark.parametrize("active", [[], [True, False]])
def test_a_private_fit_takes_the_steps_of_the_client(twin, active, monkeypatch):
    here, gate = twin
    gate.active = active
    spans = []

    class Span:
        def __init__(self, name):
            spans.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *of):
            pass

    here._meter, here.private_fits = SimpleNamespace(span=Span), 4
    monkeypatch.setattr(twin_client, "described", lambda model, loss, n, options, beside: (loss, n, beside))
    monkeypatch.setattr(twin_client, "fit_handed_over", lambda model, opt, gradients: 11)
    monkeypatch.setattr(
        twin_client,
        "fit_handed_over_in_stack",
        lambda model, opt, gradients, slot, active: 20 + slot if active == [True, False] else 0,
    )
    rows = [torch.zeros(9, 2), torch.zeros(9)]
    for n, epochs in enumerate((3, None), start=1):
        options = {"opt": "sgd", "epochs": epochs}
        found = here._fit_on_records(here.model, "loss", rows, None, True, options, ["beside"])
        assert (found.epochs, found.steps) == (epochs or 0, 22 if active else 11)
        assert found.loss != found.loss, "a twin looks at no loss"
        assert (here._fits, here.private_fits) == (n, 4 + n)
    assert gate.said == [("begin", ("loss", 9, ["beside"]))] * 2
    assert spans == ["fit", "fit"]
