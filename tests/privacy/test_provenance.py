"""What a task may send for nothing: values that came, that were released, or that private fits left behind."""

from __future__ import annotations

import torch
from torch import nn

from fedaudit import Down, State
from fedaudit.privacy.provenance import Provenance, _key


class Told(Down):
    w: State
    n: int


def model(*values):
    made = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in values))
    for layer, value in zip(made, values, strict=True):
        nn.init.constant_(layer.weight, value)
    return made


def tensor(value):
    return torch.full((1, 1), float(value))


def seen(message=None, plain=(), kept=None, looked=None, memory=None):
    found = Provenance(message, plain, kept or {})
    if looked is not None:
        found.look(looked, memory or {})
    return found


def test_before_the_records_are_read_everything_is_traced():
    found = seen()
    assert found.traced(tensor(9), "Reply.x")
    assert not found.traced(tensor(9), "Reply.x", unpaid=True), "model or memory hold more than was paid for"
    found.look(model(1), {})
    assert not found.traced(tensor(9), "Reply.x")


def test_what_came_or_is_a_hyper_parameter_is_known():
    found = seen(Told(State({"a": tensor(5)}), 7), plain=[0.25], looked=model(1))
    assert found.traced(tensor(5), "Reply.x")
    assert found.traced(7, "Reply.n")
    assert found.traced(0.25, "Reply.r")
    assert not found.traced(8, "Reply.n")
    assert found.is_known({"x": tensor(5), "y": [7]})
    assert not found.is_known({"x": tensor(5), "y": [8]}), "each part has to be known"
    assert found.picked[0] == ["sent Reply.x: message.w.a"]


def test_what_was_released_or_derived_is_known_also_when_unpaid():
    found = seen(looked=model(1))
    found.released("Reply.e", tensor(3))
    found.derived(tensor(4), "class_means")
    for value in (3, 4):
        assert found.traced(tensor(value), "Reply.x", unpaid=True)
        assert found.is_derived(tensor(value))
    assert found.is_released(tensor(3))
    assert not found.is_released(tensor(4))
    assert not found.is_derived(tensor(5))
    assert found.picked == [["derived by class_means"]]


def test_a_model_is_paid_for_as_it_was_at_the_first_look_and_after_private_fits():
    mine = model(1, 2)
    found = seen(looked=mine)
    assert found.traced(tensor(1), "Reply.x")
    assert not found.traced(tensor(1), "Reply.x", unpaid=True)
    nn.init.constant_(mine[0].weight, 8.0)
    assert not found.traced(tensor(8), "Reply.x")
    found.after_fit(mine)
    assert found.traced(tensor(8), "Reply.x")
    assert not found.traced(tensor(1), "Reply.x"), "the model is another one now"


def test_a_state_is_of_the_model_with_its_names_in_their_order():
    found = seen(looked=model(1, 2))
    whole = State({"0.weight": tensor(1), "1.weight": tensor(2)})
    assert found.traced(whole, "Reply.w")
    assert found.picked[-1] == ["sent Reply.w: model 0, whole"]
    assert found.traced(State({"1.weight": tensor(2)}), "Reply.w")
    assert found.picked[-1] == ["sent Reply.w: model 0, 1"]
    assert not found.traced(State({"1.weight": tensor(2), "0.weight": tensor(1)}), "Reply.w"), "the order tells"
    assert not found.traced(State({"0.weight": tensor(1), "1.weight": tensor(3)}), "Reply.w")
    assert not found.traced(State({"2.weight": tensor(1)}), "Reply.w")


def test_which_of_two_models_a_state_is_of_is_told():
    """Sending one or the other is a choice, so that the ways of the two must not read alike."""
    first, second = model(1, 2), model(3, 4)
    found = seen(looked=first)
    found.after_fit(second)
    for number, (a, b) in enumerate([(1, 2), (3, 4)]):
        assert found.traced(State({"0.weight": tensor(a), "1.weight": tensor(b)}), "Reply.w")
        assert found.picked[-1] == [f"sent Reply.w: model {number}, whole"]
        assert found.traced(tensor(b), "Reply.x")
        assert found.picked[-1] == [f"sent Reply.x: model {number}, 1.weight"]


def test_a_model_in_the_place_of_the_first_one_is_looked_at():
    for asked in ("settle", "before_fit"):
        found = seen(looked=model(1))
        other = model(7)
        found.settle(other, {}) if asked == "settle" else found.before_fit(other)
        assert found.tainted, asked


def test_a_private_fit_from_a_model_that_was_not_paid_for_taints():
    mine = model(1)
    for changed, tainted in ((1.0, False), (6.0, True)):
        found = seen(looked=mine)
        nn.init.constant_(mine[0].weight, changed)
        found.before_fit(mine)
        assert found.tainted is tainted
        nn.init.constant_(mine[0].weight, 1.0)
    unread = seen()
    unread.before_fit(mine)
    assert not unread.tainted


def test_a_model_that_came_with_the_message_is_clean():
    mine = model(1, 2)
    found = seen(Told(State({"0.weight": tensor(5), "1.weight": tensor(6)}), 1), looked=mine)
    nn.init.constant_(mine[0].weight, 5.0)
    found.settle(mine, {})
    assert not found.tainted
    assert found.picked[0] == ["loaded 0.weight[]", "loaded 0.weight[]"]
    nn.init.constant_(mine[1].weight, 5.0)  # known, but as another tensor: that is a choice
    found.settle(mine, {})
    assert not found.tainted
    assert found.picked[2] == ["loaded all['1.weight']", "loaded all['1.weight']"]
    nn.init.constant_(mine[1].weight, 7.0)
    found.settle(mine, {})
    assert found.tainted
    assert not found.dirty, "the model is, and memory is not"


def test_memory_at_the_end_of_a_task():
    """Released values are kept for later tasks; what was there before may stay; anything else makes memory dirty."""
    mine = model(1)
    found = seen(looked=mine, memory={"old": tensor(1), "older": tensor(2)})
    found.released("e", tensor(3))
    kept = found.settle(mine, {"old": tensor(1), "older": tensor(2), "e": tensor(3)})
    assert list(kept) == ["e"]
    assert (found.tainted, found.dirty) == (False, False)
    assert found.picked[-1] == ["kept ['e']"]
    for memory in (
        {"old": tensor(1)},  # a missing value tells something
        {"older": tensor(2), "old": tensor(1)},  # and so does the order
        {"old": tensor(1), "older": tensor(9)},
        {"old": tensor(1), "older": tensor(2), "new": tensor(4)},
        *({"old": tensor(1), "older": tensor(2), "new": new} for new in (4, 4.0, "4", True, None, [4])),
        {"old": tensor(1), "older": tensor(2), "f": tensor(3)},  # released, but under another name
    ):
        found = seen(looked=mine, memory={"old": tensor(1), "older": tensor(2)})
        found.released("e", tensor(3))
        found.settle(mine, memory)
        assert (found.tainted, found.dirty) == (True, True), memory
    unread = seen(kept={"e": "digest"})
    assert unread.settle(mine, {"anything": tensor(9)}) == {}
    assert not unread.dirty


def test_the_first_look_counts():
    mine = model(1)
    found = seen(looked=mine)
    nn.init.constant_(mine[0].weight, 6.0)
    found.look(mine, {})
    assert not found.traced(tensor(6), "Reply.x")


class Pair(Down):
    a: torch.Tensor
    b: torch.Tensor


def test_the_key_of_a_message_is_that_of_all_its_fields():
    """Equal messages have one key; another first field, another last field or another order has another."""
    one, two, three = (torch.full((3,), value) for value in (1.0, 2.0, 3.0))
    key = _key(Pair(one, two))
    assert key
    assert key == _key(Pair(one.clone(), two.clone()))
    others = [_key(Pair(one, three)), _key(Pair(three, two)), _key(Pair(two, one)), _key(one)]
    assert len({key, *others}) == 5
