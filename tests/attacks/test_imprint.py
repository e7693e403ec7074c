"""The trap of an active server: its layers, the message it sends, and the model that comes back."""

from __future__ import annotations

import pytest
import torch
from scenes import Entry, scene
from torch import nn

from fedaudit import State, Up, private
from fedaudit.attacks.inversion import imprint
from fedaudit.attacks.inversion.imprint import SCALE, _download, _returned, between, trap
from fedaudit.errors import ThreatError


class Whole(Up):
    n: int = private("count", via="data", unit="client")
    w: State = private("weights", via="model", unit="client")


class Change(Up):
    g: State = private("gradients", via="data", unit="client")


def test_a_change_is_added_to_the_model_that_was_sent():
    sent = State({"a": torch.tensor([1.0, 2.0])})
    back = State({"a": torch.tensor([0.5, 0.25])})
    assert _returned(Whole(3, back), sent)["a"].tolist() == [0.5, 0.25]
    assert _returned(Change(back), sent)["a"].tolist() == [1.5, 2.25]
    with pytest.raises(ThreatError, match="does not answer with a model like the one"):
        _returned(Change(State({"b": torch.ones(2)})), sent)


def test_units_sort_records_by_their_mean():
    """Three units: biases at the quartiles of the auxiliary means 0, 1, 2, 3, 4. Later layers pass all units on alike,
    with weights of SCALE times 1/2 to 3/2, another for each class, and no bias."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5, bias=False), nn.Linear(5, 6))
    aux = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 2, 2)
    assert trap(model, aux, torch.Generator().manual_seed(0)) == "1"
    first, middle, last = model[1], model[3], model[4]
    assert torch.allclose(first.weight, torch.full((3, 4), 0.25))
    assert first.bias.tolist() == pytest.approx([-1.0, -2.0, -3.0])
    for layer in (middle, last):
        assert torch.equal(layer.weight, layer.weight[:, :1].expand_as(layer.weight))
        assert ((layer.weight >= 0.5 * SCALE) & (layer.weight <= 1.5 * SCALE)).all()
        assert len(layer.weight[:, 0].unique()) == len(layer.weight)
    assert last.bias.tolist() == [0.0] * 6
    assert middle.bias is None


def test_records_between_units_that_cannot_be_images_are_left_out():
    """Differences of neighbours, the last one's own: (0.5, 0.5) / 1, (6, 0) / 2 and (0.2, -0.4) / 2."""
    weight = torch.tensor([[6.7, 0.1], [6.2, -0.4], [0.2, -0.4]])
    found = between(weight, torch.tensor([5.0, 4.0, 2.0]))
    assert torch.allclose(found, torch.tensor([[0.5, 0.5], [0.1, -0.2]]))
    # A unit whose share is nothing holds no record.
    found = between(torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.2, 0.2]]), torch.tensor([1.0, 1.0, 0.5]))
    assert torch.allclose(found, torch.tensor([[0.6, 0.6], [0.4, 0.4]]))


MODEL = nn.Linear(2, 1)
STATE = State({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})


@pytest.mark.parametrize(
    ("answer", "ask", "dropped", "shown", "found"),
    [
        ("weights", 0, False, STATE, True),
        ("gradients", 0, False, STATE, True),
        ("logits", 0, False, STATE, False),  # answered by something else
        ("weights", 1, False, STATE, False),  # in another ask
        ("weights", 0, True, STATE, False),  # not kept
        ("weights", 0, False, State({"weight": torch.ones(1, 3), "bias": torch.zeros(1)}), False),
    ],
)
def test_the_message_that_brings_a_whole_model(answer, ask, dropped, shown, found):
    """Of two rounds in which it does, the last one is taken."""
    entries = [
        entry
        for t in (1, 2)
        for entry in (
            Entry("down", 0, t, role="public", dropped=dropped, n=(None, 3), w=(None, shown)),
            Entry("up", 0, t, ask, g=(answer, STATE)),
        )
    ]
    other = Entry("down", 1, 3, role="public", w=(None, STATE)), Entry("up", 1, 3, g=("weights", STATE))
    got = _download(scene(*entries, *other, fresh=lambda arch: MODEL))
    assert got == ((entries[2], "w") if found else None)
    assert imprint.Imprint().active
