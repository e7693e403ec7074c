"""Stored records: what is written, what is left out, and numbers that JSON does not have."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from fedaudit.stored_model import AsGiven, Sparse, StoredModel, number_of, plain


class Part(StoredModel):
    value: float = 1.0
    global_: int = Field(2, alias="global")


def test_infinity_is_written_as_a_text_and_read_again():
    made = Part(value=math.inf, global_=3)
    assert made.model_dump_json() == '{"value":"Infinity","global":3}'
    assert Part.model_validate_json(made.model_dump_json()) == made
    assert Part(**{"global": 4}).global_ == 4
    with pytest.raises(ValidationError, match="Extra inputs"):
        Part(other=1)


def test_any_value_as_json_holds_it():
    assert plain({1: (2, math.nan), "a": -math.inf, "b": None}) == {"1": [2, "NaN"], "a": "-Infinity", "b": None}


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (-0.5, -0.5), ("Infinity", math.inf), ("-Infinity", -math.inf), ("3", None), (True, None), (None, None)],
)
def test_numbers_of_json(value, number):
    found = number_of(value)
    assert (found, type(found)) == (number, type(number))
    assert math.isnan(number_of("NaN"))


def test_empty_tables_are_left_out_where_they_are_optional():
    class Some(Sparse):
        optional: ClassVar[tuple[str, ...]] = ("b", "c")
        a: dict = Field(default_factory=dict)
        b: dict = Field(default_factory=dict)
        c: int = 0

    assert Some().model_dump() == {"a": {}}
    assert Some(a={1: 2}, b={3: 4}, c=5).model_dump() == {"a": {1: 2}, "b": {3: 4}, "c": 5}


def test_what_was_not_given_is_left_out():
    class Given(AsGiven):
        a: int = 1
        b: int | None = 2
        global_: int = Field(3, alias="global")

    assert Given().model_dump() == {}
    assert Given(b=None, global_=3).model_dump() == {"b": None, "global": 3}
