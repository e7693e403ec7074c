"""What clients did unlike each other after a look at their records."""

from __future__ import annotations

from fedaudit.runtime.alike import Alike


def billed(*answers: tuple[int, list[str]]) -> list[int]:
    alike = Alike()
    for k, told in answers:
        alike.add("update", k, told, chose=False)
    return [k for k, _ in alike.entries()]


def test_who_trains_more_often_is_found_also_one_by_one() -> None:
    """The second client is asked when the first has answered: both are first answers to that function."""
    assert billed((0, ["sgd"]), (1, ["sgd", "sgd"])) == [0, 1]
    assert billed((0, ["sgd"]), (1, ["sgd"])) == []


def test_first_answers_are_held_against_first_ones() -> None:
    """Two asks: twice in the first, once in the second, the same on both clients."""
    assert billed((0, ["sgd", "sgd"]), (1, ["sgd", "sgd"]), (0, ["sgd"]), (1, ["sgd"])) == []


def test_numbers_that_one_client_alone_was_told_are_billed() -> None:
    assert billed((0, ["sgd [3]"])) == [0]
    assert billed((0, ["sgd"])) == []
