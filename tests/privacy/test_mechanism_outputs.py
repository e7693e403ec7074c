"""What a twin is handed over, and what a twin's neighbour is."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from fedaudit.privacy.mechanism_outputs import Diverged, HandedOver, Neighbour, Recorder, Tape, structure_of
from fedaudit.privacy.noise_key import NoiseKey
from fedaudit.wire.codec import decode_tree

CPU = torch.device("cpu")


def never():
    raise AssertionError("a neighbour's mechanism is not asked")


def twin_of_two_fields():
    twin = HandedOver(iter(()), CPU)
    twin.released += [torch.tensor([1.0]), torch.tensor([2.0])]
    return twin


def test_a_neighbour_is_given_what_the_twin_was_given_in_order():
    twin = twin_of_two_fields()
    found = Neighbour(twin, CPU)
    assert found.field("A.a", "record", torch.tensor([7.0]), never) == (torch.tensor([1.0]), [])
    assert found.field("A.b", "all", torch.tensor([8.0]), never) == (torch.tensor([2.0]), [])
    assert found.rows == [("A.a", torch.tensor([7.0]))], "only fields with a row for each record are kept"
    with pytest.raises(Diverged, match=r"A\.c: the twin's mechanism did not let it out"):
        found.field("A.c", "all", torch.tensor([9.0]), never)
    assert len(twin.released) == 2, "the twin's own list stays"


def test_a_neighbour_is_left_with_the_twins_training():
    """Weights, result and the three global generators are as the twin's training left them."""
    weights, twin = [torch.zeros(2), torch.zeros(1)], HandedOver(iter(()), CPU)

    def train():
        weights[0].fill_(3.0)
        weights[1].fill_(4.0)
        return "done", torch.rand(()), random.random(), np.random.rand()

    assert twin.trained(lambda: weights, train)[0] == "done"
    after = torch.rand(()), random.random(), np.random.rand()
    for t in weights:
        t.zero_()
    found = Neighbour(twin, CPU)
    assert found.trained(lambda: weights, never)[0] == "done"
    assert (weights[0].tolist(), weights[1].tolist()) == ([3.0, 3.0], [4.0])
    assert (torch.rand(()), random.random(), np.random.rand()) == after
    with pytest.raises(Diverged, match="the twin did not train there"):
        found.trained(lambda: weights, never)


def test_a_neighbour_of_another_size_is_no_neighbour():
    twin = HandedOver(iter(()), CPU)
    twin.trained(lambda: [torch.zeros(2), torch.zeros(2)], lambda: None)
    with pytest.raises(ValueError, match="longer"):
        Neighbour(twin, CPU).trained(lambda: [torch.zeros(2)], never)


def test_a_training_that_begins_anew_is_recorded_once():
    """A stack that failed leaves its steps on the tape; what came before the training stays."""
    recorder = Recorder(NoiseKey(b"0" * 32))
    recorder.field("A.a", "all", torch.ones(1), lambda: (torch.ones(1), []))
    training = recorder.training(lambda: {"epochs": "2"})
    training.restart(3, [4, 4])
    training.step({"w": torch.tensor([9.0])}, (0, 2))
    training.restart()
    training.step({"w": torch.tensor([1.0])}, (0, 2))
    training.step({"w": torch.tensor([2.0])}, (1, 2))
    twin = HandedOver(recorder.tape.items(), CPU)
    assert twin.field("A.a", "all", torch.ones(1), never)[0].item() == 1.0
    item = twin.begin({"epochs": "2"})
    assert (item["slot"], item["active"], twin.differences) == (0, [], [])
    assert [(g["w"].item(), at) for g, at in twin.gradients()] == [(1.0, (0, 2)), (2.0, (1, 2))]
    twin.finish()
    assert twin.differences == []


def test_a_structure_says_keys_shapes_and_types_and_no_numbers():
    assert structure_of({1: torch.zeros(2, 3), "a": [1, torch.ones(1, dtype=torch.int8)]}) == (
        "dict{1: float32[2, 3], 'a': list[int, int8[1]]}"
    )


def test_a_tape_keeps_what_is_not_finite():
    """A twin is handed what the mechanism let out, whatever it is: the wire refuses it later."""
    tape = Tape()
    tape.add({"a": torch.tensor([1.0, torch.inf, torch.nan])})
    tape.add({"b": 2})
    first, second = (decode_tree(blob, device=CPU) for blob in tape.items())
    assert first["a"].tolist() == pytest.approx([1.0, math.inf, math.nan], nan_ok=True)
    assert second == {"b": 2}
