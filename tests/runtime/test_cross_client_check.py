"""What clients did unlike each other after a look at their records."""

from __future__ import annotations

from fedaudit.runtime.declarations.cross_client_check import CrossClientCheck

WHOLE = ["sent w: model 0, whole"]


def billed(*answers: tuple[int, list[list[str]]]) -> list[int]:
    alike = CrossClientCheck()
    for k, did in answers:
        alike.add("update", k, did)
    return [k for k, _ in alike.entries()]


def test_who_sends_more_is_found_also_one_by_one() -> None:
    """The second client is asked when the first has answered: both are first answers to that function."""
    assert billed((0, [WHOLE]), (1, [WHOLE, WHOLE])) == [0, 1]
    assert billed((0, [WHOLE]), (1, [WHOLE])) == []


def test_who_did_not_look_is_held_against_nobody() -> None:
    assert billed((0, [WHOLE]), (1, [])) == []


def test_first_answers_are_held_against_first_ones() -> None:
    """Two asks: twice in the first, once in the second, the same on both clients."""
    assert billed((0, [WHOLE, WHOLE]), (1, [WHOLE, WHOLE]), (0, [WHOLE]), (1, [WHOLE])) == []


def test_values_are_alike_that_may_be_from_one_place() -> None:
    """1 is the round and the first client's number; n is another number on each client."""
    assert billed((0, [["setting 0", "setting 1"]]), (1, [["setting 0", "setting 7"]])) == []
    assert billed((0, [["setting 2"]]), (1, [["setting 2"]])) == []
    assert billed((0, [["setting 3"]]), (1, [["setting 4"]])) == [0, 1]


def test_what_one_client_alone_sends_of_several_known_things_is_billed() -> None:
    part, loaded = ["sent w: model 0, head"], ["loaded all[]"]
    assert billed((0, [WHOLE, loaded])) == []
    assert billed((0, [part])) == [0]
    assert billed((0, [part]), (1, [part])) == []
    assert billed((0, [part]), (1, [WHOLE])) == [0, 1]
