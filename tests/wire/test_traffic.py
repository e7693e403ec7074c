"""Declared traffic: one round as a method sees it, and the table that is raised where it was declared wrong."""

from __future__ import annotations

import pytest

from fedaudit.errors import RunError
from fedaudit.shape import Shape
from fedaudit.wire.message import Size
from fedaudit.wire.traffic import NUMBER, Plan, compare

SIZES = {("small", None): Size(80, 8, 90, {(4, 5): 1}, 22), ("large", None): Size(800, 16, 180, {(10, 20): 1}, 204),
         ("large", "head"): Size(40, 4, 75, {(10,): 1}, 11)}  # fmt: skip


def plan(**changes):
    values = {
        "t": 3, "participants": (1, 4), "n": {1: 10, 4: 20}, "archs": {1: "small", 4: "large"}, "server_arch": "large",
        "shape": Shape((3, 8, 6)), "classes": 4, "model_size": lambda arch, part=None: SIZES[arch, part],
    }  # fmt: skip
    return Plan(**{**values, **changes})


def test_what_a_plan_says_where_nothing_more_is_known():
    made = plan()
    assert (made.clients, made.public, made.labelled, made.asks, made.counts) == (0, 0, True, None, None)
    assert (made.choices, made.records) == ({}, {})
    assert made.choice("Up.w", 1) is None
    assert made.choice("Up.w", 1, default=7) == 7


def test_classes_that_a_client_holds():
    counts = {1: (0, 1, 2, 3), 4: (5, 0, 0, 2)}
    made = plan(counts=counts)
    assert made.held(1) == [1, 2, 3]
    assert made.held(1, least=2) == [2, 3]
    assert made.held(1, least=4) == []
    assert made.held(4, 2) == [0, 3]
    assert plan().held(4, 9) == [0, 1, 2, 3]


def test_who_was_asked_and_who_replied():
    made = plan(asks=[((1, 4), (4,)), ((4,), ())])
    assert [made.asked(i) for i in range(3)] == [(1, 4), (4,), ()]
    assert [made.replied(i) for i in range(3)] == [(4,), (), ()]
    assert plan().asked(5) == plan().replied(5) == (1, 4), "when planning, everybody answers"


def test_states_of_clients_architectures_and_the_server():
    made = plan()
    assert made.state() == SIZES["large", None]
    assert made.state(1) == made.state("small") == SIZES["small", None]
    assert made.state(4, "head") == made.state(part="head") == SIZES["large", "head"]


def test_a_state_of_low_rank_saves_what_its_factors_do_not_have():
    """10 x 20 of rank 2 has 2 x 31 numbers instead of 200; 6 x (3 x 3) of rank 1 has 16 instead of 54. Each has 4
    bytes."""
    ranks = {"a": [2, 10, 20], "b": [1, 6, 3, 3]}
    made = plan(choices={"Up.w": {4: ranks, 1: ["a", "b"]}})
    size = made.low_rank("Up.w", 4)
    saved = 4 * (200 - 62) + 4 * (54 - 16)
    assert (size.payload, size.buffers, size.header, size.numbers) == (800 - saved, 16, 180, 204)
    assert size.tensors == {}
    assert made.low_rank("Up.w", 1, "small").payload == 80, "a list of names: all of it travelled whole"
    assert made.low_rank("Up.w", 2) == made.low_rank("Down.w", 4) == Size(800, 16)
    assert made.choice("Up.w", 4) == ranks


def test_tensors_and_rows_by_shape_and_bytes():
    made = plan()
    one = made.tensor(3, 5)
    assert (one.payload, one.buffers, one.header, one.tensors, one.numbers) == (60, 0, 70, {(3, 5): 1}, 15)
    wide = made.tensor(3, 5, size=8)
    assert (wide.payload, wide.tensors, wide.numbers) == (120, {}, 15)
    rows = made.rows(2)
    assert (rows.payload, rows.tensors) == (4 * 2 * 144, {(2, 3, 8, 6): 1})
    tokens = plan(shape=Shape((7,), tokens=100)).rows(2)
    assert (tokens.payload, tokens.tensors, tokens.numbers) == (8 * 14, {}, 14)
    assert NUMBER == 8


def test_declared_and_measured_are_held_against_each_other():
    """A field of size zero needs no declaration. Headers and shapes are not compared, numbers of bytes are."""
    measured = {("up", "A.w"): Size(1200, 8), ("down", "B.w"): Size(5), ("up", "A.empty"): Size()}
    said = {("up", "A.w"): Size(1200, 8, 99, {(3,): 1}), ("down", "B.w"): 5, ("down", "B.nothing"): 0}
    compare(said, measured, method="m", t=2)
    compare(None, measured, method="m", t=2)
    with pytest.raises(RunError) as e:
        compare({("up", "A.w"): Size(1200), ("up", "A.more"): 1}, measured, method="fedavg", t=2)
    lines = str(e.value).split("\n")
    assert lines[0] == "fedavg, round 2: the declared traffic is not what crossed the wire."
    assert [line.split() for line in lines[1:-1]] == [
        ["down", "B.w", "declared", "0", "B", "measured", "5", "B"],
        ["up", "A.more", "declared", "1", "B", "measured", "0", "B"],
        ["up", "A.w", "declared", "1,200", "B", "measured", "1,200", "+", "8", "B"],
    ]
    assert lines[-1] == "Correct fedavg.traffic, or the message that grew."
