"""Shapes of records: what kind they are, what equals what, and their words."""

from __future__ import annotations

import copy

import pytest

from fedaudit.shape import IMAGES, KINDS, Shape


@pytest.mark.parametrize(
    ("shape", "kind", "item", "words"),
    [
        (Shape((3, 32, 28)), "images", 4, "images of 3 x 32 x 28"),
        (Shape((7,)), "rows", 4, "rows of 7 numbers"),
        (Shape((7, 5)), "rows", 4, "arrays of 7 x 5"),
        (Shape((80,), tokens=90), "tokens", 8, "texts of 80 token ids below 90"),
        (Shape((2, 4, 8), tokens=9), "tokens", 8, "texts of 2 token ids below 9"),
    ],
)
def test_a_shape_tells_what_a_record_is(shape, kind, item, words):
    assert (shape.kind, shape.item, str(shape)) == (kind, item, words)


def test_shapes_of_texts_equal_only_those_of_as_many_tokens():
    rows, texts = Shape((7,)), Shape((7,), tokens=5)
    assert rows == Shape((7,)) == (7,)
    assert texts == Shape([7], tokens=5)
    assert texts != rows
    assert texts != Shape((7,), tokens=6)
    assert texts != (7,)
    assert rows != Shape((8,))
    assert rows != [7]
    assert not rows != Shape((7,))  # noqa: SIM202 (this is the operator that is tested)
    assert (hash(rows), Shape().tokens, Shape()) == (hash((7,)), 0, ())


def test_a_copy_keeps_its_tokens():
    texts = Shape((7,), tokens=5)
    assert texts.__getnewargs__() == ((7,), 5), "as pickle asks"
    for made in (copy.copy(texts), copy.deepcopy(texts)):
        assert (made, made.tokens, type(made)) == (texts, 5, Shape)


def test_there_are_three_kinds():
    assert ({"images", "rows", "tokens"}, {"images"}) == (KINDS, IMAGES)
