"""What a twin is handed over, and what a twin's neighbour is."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import (
    OF_TASK,
    Diverged,
    HandedOver,
    Neighbour,
    Outputs,
    Recorder,
    Tape,
    Training,
    gated,
    outputs,
    structure_of,
)
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


def entry(noise):
    return LedgerEntry(field="A.a", kind="logits", mechanism="none", noise_multiplier=noise, relation="any")


@pytest.mark.parametrize(
    ("noises", "shape", "told"),
    [
        ([2.0, 3.0], (1,), []),
        ([2.0, 3.0], (2,), [("A.a", "its keys, shapes or types follow the records (float32[1], float32[2])")]),
        ([2.0, 0.0], (2,), []),
        ([2.0, 0.0], (1,), []),
    ],
)
@pytest.mark.parametrize("depends", ["record", "all"])
def test_a_twins_field_of_another_structure_is_a_difference_unless_it_is_paid(noises, shape, told, depends):
    """The client's own structure counts, and not that of the release. One entry without noise pays for it."""
    recorder, entries = Recorder(NoiseKey(b"0" * 32)), [entry(m) for m in noises]
    made = (torch.tensor([5.0, 6.0, 7.0]), entries)
    assert recorder.field("A.a", depends, torch.ones(1), lambda: made) is not None
    twin, value = HandedOver(recorder.tape.items(), CPU), torch.full(shape, 9.0)
    released, bill = twin.field("A.a", depends, value, never)
    assert (released.tolist(), bill) == ([5.0, 6.0, 7.0], [])
    assert twin.differences == told
    assert twin.rows == ([("A.a", value)] if depends == "record" else [])
    assert [t.tolist() for t in twin.released] == [[5.0, 6.0, 7.0]]
    twin.finish()
    assert twin.differences == told


def recorded():
    recorder = Recorder(NoiseKey(b"0" * 32))
    assert recorder.field("A.a", "all", torch.ones(1), lambda: (torch.ones(1), [])) == (torch.ones(1), [])
    training = recorder.training(lambda: {"epochs": "2", "batch": "8"})
    training.restart(1, [2, 2])
    training.step({"w": torch.tensor([1.0])})
    return recorder


def test_a_twin_that_asks_for_something_else_ends_there():
    twin = HandedOver(recorded().tape.items(), CPU)
    with pytest.raises(Diverged, match=r"A\.b: the client's mechanism let out A\.a there"):
        twin.field("A.b", "all", torch.ones(1), never)
    assert twin.differences == [("A.b", "the client's mechanism let out A.a there")]
    twin.finish()
    assert len(twin.differences) == 1, "what is left over is no further difference"
    late = HandedOver(iter(()), CPU)
    with pytest.raises(Diverged, match="training: the client's mechanism let out the end there"):
        late.begin({})


def test_a_twins_training_is_told_what_the_clients_was_told():
    twin = HandedOver(recorded().tape.items(), CPU)
    twin.field("A.a", "all", torch.ones(1), never)
    item = twin.begin({"epochs": "3", "batch": "8", "rate": "0.1"})
    assert (item["slot"], item["active"]) == (1, [2, 2])
    told = "it was told epochs 2, with other records 3, rate None, with other records 0.1"
    assert twin.differences == [("training (epochs, rate)", told)]
    assert [(g["w"].item(), at) for g, at in twin.gradients()] == [(1.0, (0, 1))]
    twin.finish()
    assert len(twin.differences) == 1


def test_what_a_twin_does_not_ask_for_is_a_difference():
    twin = HandedOver(recorded().tape.items(), CPU)
    twin.finish()
    assert twin.differences == [("A.a", "the client's mechanism let it out, and the twin did not ask for it")]
    silent = HandedOver(iter(()), CPU)
    silent.finish()
    assert silent.differences == []


def test_a_tape_is_read_cut_and_sent_as_often_as_is_liked():
    tape = Tape()
    tape.add({"a": 1})
    mark = tape.mark()
    tape.add({"b": 2})
    for _ in range(2):
        assert [decode_tree(blob, device=CPU) for blob in tape.items()] == [{"a": 1}, {"b": 2}]
    make, given = tape.__reduce__()
    other = make(*given)
    other.add({"c": 3})
    assert [decode_tree(blob, device=CPU) for blob in other.items()] == [{"a": 1}, {"b": 2}, {"c": 3}]
    tape.cut(mark)
    tape.add({"d": 4})
    assert [decode_tree(blob, device=CPU) for blob in tape.items()] == [{"a": 1}, {"d": 4}]
    assert list(Tape().items()) == []


def test_a_task_that_nobody_follows_lets_everything_through():
    gate = Outputs(NoiseKey(b"0" * 32))
    assert gate.field("A.a", "all", torch.ones(1), lambda: ("made", [])) == ("made", [])
    training = gate.training(never)
    assert type(training) is Training
    assert (training.restart(), training.step({}), gate.tape, gate.replay) == (None, None, None, [])
    followed = [cls.followed for cls in (Outputs, Recorder, HandedOver, Neighbour)]
    assert followed == [False, True, True, True]


def fails_within(gate):
    with gated(gate):
        assert outputs() is gate
        raise RuntimeError


def test_the_gate_of_a_task_is_that_of_its_thread_and_its_time():
    one, other = Outputs(NoiseKey(b"1" * 32)), Outputs(NoiseKey(b"2" * 32))
    assert outputs() is None
    with gated(one):
        with pytest.raises(RuntimeError):
            fails_within(other)
        assert outputs() is one
        drawn = torch.rand(3, generator=OF_TASK.generator("a", 1))
    assert outputs() is None
    assert torch.equal(drawn, torch.rand(3, generator=NoiseKey(b"1" * 32).generator("a", 1)))
