"""Encoded records looked at without decoding them: bytes of every kind of node, choices, names and numbers."""

from __future__ import annotations

import json

import pytest

from fedaudit.wire.codec.grammar import Header
from fedaudit.wire.codec.inspection import (
    bases_of,
    choices,
    class_of,
    fields_of,
    measure,
    moved,
    names_of,
    node_of,
    state_shapes,
    state_tensors,
    tensors_in,
)

TENSOR = {"t": 0}
SENT_AS = {"q": 1, "as": "uint8"}
PARTS = {"z": [2, "topk", [10, 10]]}
STATE = {"m": [4, ["w", "n", "v"], [1]]}
SQUEEZED = {"m": [7, ["w|q", "w|s", "b", "k|q"], [2]], "z": ["int8", {"w": [8, 9]}, "sent"]}
LOW = {"m": [11, ["w|U", "w|s", "w|V", "c"], []], "svd": {"w": [1, 6, 5]}}
PLAIN = {"d": [["ü", {"l": [None, True, 7]}], [3, {"u": ["äb", {"f": "nan"}]}]]}
INNER = {"r": ["x.Inner", {"one": {"t": 15}, "two": False}]}
FIELDS = {
    "tensor": TENSOR, "sent_as": SENT_AS, "parts": PARTS, "state": STATE, "squeezed": SQUEEZED, "low": LOW,
    "plain": PLAIN, "inner": INNER,
}  # fmt: skip
TREE = {"r": ["some.module.Message", FIELDS]}
BYTES = [12, 5, 40, 44, 16, 8, 24, 72, 4, 20, 7, 24, 4, 20, 28, 9]
SHAPES = [[3], [5], [10], [11], [4], [1], [2, 3], [8, 9], [1], [5], [7], [6, 1], [1], [1, 5], [7], [9]]


def head():
    spans, at = {}, 1000
    for i, n in enumerate(BYTES):
        spans[i] = "F32", tuple(SHAPES[i]), at, at + n
        at += n
    return Header(TREE, "", "", spans)


def text(node):
    return len(json.dumps(node, separators=(",", ":")))


def test_bytes_of_every_kind_of_node():
    """Of PLAIN: keys 2 + 8, nothing 0, a truth value 1, a number 8, a text of 3, and 8 for what JSON lacks."""
    sizes = measure(head(), 5000)
    assert sizes["tensor"] == {"payload": 12, "buffers": 0, "wire": 12 + 7}
    assert sizes["sent_as"] == {"payload": 5, "buffers": 0, "wire": 5 + text(SENT_AS)}
    assert sizes["parts"] == {"payload": 84, "buffers": 0, "wire": 84 + text(PARTS), "whole": 400}
    assert sizes["state"] == {"payload": 40, "buffers": 8, "wire": 48 + text(STATE)}
    assert sizes["squeezed"] == {"payload": 83, "buffers": 20, "wire": 103 + text(SQUEEZED), "whole": 4 * 72 + 7}
    assert sizes["low"] == {"payload": 76, "buffers": 0, "wire": 76 + text(LOW)}
    assert sizes["plain"] == {"payload": 30, "buffers": 0, "wire": text(PLAIN)}
    assert sizes["inner"] == {"payload": 10, "buffers": 0, "wire": 9 + text(INNER)}
    frame = sizes.pop("(frame)")
    assert frame == {"payload": 0, "buffers": 0, "wire": 5000 - sum(size["wire"] for size in sizes.values())}
    assert list(sizes) == list(FIELDS) == list(fields_of(head()))


@pytest.mark.parametrize(
    ("node", "left"),
    [
        (TENSOR, None), (SENT_AS, None), (PARTS, None), (STATE, ["w", "n", "v"]), (SQUEEZED, ["w", "b", "k|q"]),
        (LOW, {"w": [1, 6, 5]}), (PLAIN, {"ü": [None, True, 7], 3: ["äb", {"f": "nan"}]}),
        (INNER, {"one": None, "two": False}), (7, 7),
    ],
)  # fmt: skip
def test_what_is_left_of_a_value_without_its_tensors(node, left):
    assert choices(node) == left


def test_class_names_and_fields_of_an_encoded_record():
    assert class_of(TREE) == "some.module.Message"
    assert node_of(TREE, "low") is LOW
    assert node_of(TREE, "nothing") is None
    assert names_of(TREE) == sorted(FIELDS)
    assert names_of(TREE) != list(FIELDS)


def test_numbers_of_tensors():
    found = [tensors_in(node) for node in FIELDS.values()]
    assert found == [{0}, {1}, {2, 3}, {4, 5, 6}, {7, 8, 9, 10}, {11, 12, 13, 14}, set(), {15}]
    assert tensors_in(TREE) == set(range(16))
    assert tensors_in({"l": [TENSOR, {"u": [STATE]}, {"d": [["a", SENT_AS]]}]}) == {0, 1, 4, 5, 6}
    assert tensors_in({"z": [5, "svd", [4, 4]]}) == {5, 6, 7}
    assert state_tensors(TREE) == set(range(4, 15)) - set()
    assert state_tensors({"l": [TENSOR, PARTS]}) == set()


def test_shapes_of_one_state():
    """A compressed tensor has its own shape, all others theirs. Factors that a method sent are not the state's own."""
    shape = SHAPES.__getitem__
    assert state_shapes(STATE, shape) == {"w": (4,), "n": (1,), "v": (2, 3)}
    assert state_shapes(SQUEEZED, shape) == {"w": (8, 9), "b": (5,), "k|q": (7,)}
    for other in (LOW, TENSOR, PARTS, PLAIN, INNER, None):
        assert state_shapes(other, shape) is None


def test_fields_of_which_parts_are_changes():
    whole = {"m": [0, ["a|q", "a|s"], []], "z": ["int8", {"a": [70]}, None]}
    other = {"m": [2, ["a|q", "a|s"], []], "z": ["int8", {"a": [70]}, "before"]}
    assert bases_of(TREE) == ["sent"]
    assert bases_of({"l": [SQUEEZED, whole, other, SQUEEZED, STATE]}) == ["before", "sent"]
    assert bases_of(whole) == []


def test_a_state_is_moved_with_all_that_belongs_to_it():
    assert moved(SQUEEZED, 30) == {**SQUEEZED, "m": [37, *SQUEEZED["m"][1:]]}
    assert SQUEEZED["m"][0] == 7, "and the one that was given stays"
