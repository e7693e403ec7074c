"""What a plan makes of a method's declared traffic: sums in place of replies, and compressed fields."""

from __future__ import annotations

from types import SimpleNamespace

from fedaudit import registry
from fedaudit.aggregation.secure.messages import SumFacts
from fedaudit.runtime.plan import (
    arch_on_server,
    as_sent,
    declared_of,
    in_sums,
    plan_of,
    planned_sums,
    summed_fields,
    unplanned,
)
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.wire.compression import stage_of
from fedaudit.wire.message import Size

METHOD = registry.find("fedavg")()
# Three clients: a model of ten numbers each, sent up and down, and how many records each has.
DECLARED = {
    ("up", "Local.w"): Size(120, numbers=30, tensors={(10,): 3}),
    ("up", "Local.n"): 24,
    ("down", "Global.w"): Size(120, numbers=30, tensors={(10,): 3}),
}


def test_private_uploads_travel_inside_of_sums():
    assert summed_fields(METHOD, DECLARED) == {("up", "Local.w"), ("up", "Local.n")}


def test_a_planned_sum_is_of_one_clients_numbers():
    """Ten numbers of the model and one of the count; where no shape is known, eight bytes are a number."""
    (facts,) = planned_sums(METHOD, DECLARED, SimpleNamespace(participants=[4, 7, 9]), 0.6)
    assert facts.length == 11
    assert facts.invited == facts.shared == facts.masked == facts.helped == [4, 7, 9]
    assert sorted(facts.neighbours) == [4, 7, 9]
    shapeless = {**DECLARED, ("up", "Local.w"): 240}
    (one,) = planned_sums(METHOD, shapeless, SimpleNamespace(participants=[4, 7, 9]), 0.6)
    assert one.length == 11


def test_declarations_are_found_for_uploads_alone():
    assert declared_of(METHOD, "Local.w").kind == "weights"
    assert declared_of(METHOD, "Local.n").kind == "count"
    assert declared_of(METHOD, "Local.v") is None
    assert declared_of(METHOD, "Global.w") is None
    assert declared_of(METHOD, "SentByNobody.w") is None


def test_without_compression_sizes_are_as_declared():
    sizes, unknown = as_sent(METHOD, None, DECLARED)
    assert unknown == frozenset()
    assert sizes == {**DECLARED, ("up", "Local.n"): Size(24)}


def test_compression_is_of_uploads_and_unknown_where_shapes_are():
    """Three models of 100 x 10 float32 numbers."""
    whole = Size(12_000, numbers=3000, tensors={(100, 10): 3})
    declared = {("up", "Local.w"): whole, ("up", "Local.n"): 24, ("down", "Global.w"): whole}
    sizes, unknown = as_sent(METHOD, "int8", declared)
    assert sizes["down", "Global.w"] == whole
    assert sizes["up", "Local.n"] == Size(24), "a count is no tensor"
    assert 3000 <= sizes["up", "Local.w"].payload < 4000, "a byte a number, and its scale"
    assert unknown == frozenset()
    assert as_sent(METHOD, "svd:0.9", declared)[1] == {("up", "Local.w")}, "the rank follows from the numbers"
    assert as_sent(METHOD, "int8", {**declared, ("up", "Local.w"): 12_000})[1] == {("up", "Local.w")}


def test_whose_architecture_is_the_servers():
    plain = SimpleNamespace(server_arch=lambda model: None)
    named = SimpleNamespace(server_arch=lambda model: f"of {model}")
    assert arch_on_server(Setting.make(server_model="mlp"), named, ["cnn", "resnet18"]) == "mlp"
    assert arch_on_server(Setting.make(model="HtFE-5"), named, ["cnn", "resnet18"]) == "of HtFE-5"
    assert arch_on_server(Setting.make(), plain, ["cnn", "resnet18"]) == "cnn"


def test_a_plan_has_what_belongs_to_its_participants():
    plain = SimpleNamespace(server_arch=lambda model: None)
    found = plan_of(
        Setting.make(clients=9), plain, ["a", "b", "c", "d"], [3, 1], t=5, n={0: 10, 1: 11, 2: 12, 3: 13},
        shape=Shape((1, 8, 8)), classes=7, model_size=Size, public=21, labelled=True, asks=[([1], [1])],
    )  # fmt: skip
    assert (found.t, found.participants, found.n, found.archs) == (5, [3, 1], {3: 13, 1: 11}, {3: "d", 1: "b"})
    assert (found.server_arch, tuple(found.shape), found.classes, found.clients) == ("a", (1, 8, 8), 7, 9)
    assert (found.public, found.labelled, found.model_size, found.asks) == (21, True, Size, [([1], [1])])


def test_sums_take_the_place_of_private_replies():
    """Two sums of five numbers of clients 4, 7 and 9, of whom 9 leaves the second one."""
    ids, near = [4, 7, 9], {4: [7, 9], 7: [4, 9], 9: [4, 7]}
    first, second = SumFacts(ids, near, ids, ids, ids, 5), SumFacts(ids, near, ids, [4, 7], [4], 5)
    found = in_sums(METHOD, DECLARED, [first, second])
    assert found["down", "Global.w"] == Size(120)
    assert ("up", "Local.w") not in found
    assert ("up", "Local.n") not in found
    assert found["up", "Masked.y"] == Size(4 * 5 * 3 + 4 * 5 * 2)
    assert found["down", "Invited.clients"] == Size(2 * 3 * 8)
    assert in_sums(METHOD, DECLARED, []) == {("down", "Global.w"): Size(120)}


def test_methods_say_how_many_numbers_their_sums_have():
    method = SimpleNamespace(summed_numbers=lambda plan: [3, 8])
    found = planned_sums(method, DECLARED, SimpleNamespace(participants=[4, 7, 9]), 0.6)
    assert [facts.length for facts in found] == [3, 8]


def test_sizes_that_do_not_follow_from_a_declaration_are_noted():
    """Of two fields the model is compressed; its size is as planned, another one, or known to the run alone."""
    whole = Size(12_000, numbers=3000, tensors={(100, 10): 3})
    declared = {("up", "Local.w"): whole, ("up", "Local.n"): 24, ("down", "Global.w"): whole}
    planned = as_sent(METHOD, "int8", declared)[0]

    def notes(compress, measured):
        return [note.partition(":")[0] for note in unplanned(METHOD, stage_of(compress), declared, measured)]

    assert notes("int8", planned) == []
    assert notes("int8", {**planned, ("up", "Local.w"): Size(1)}) == ["Local.w"]
    assert notes("int8", {("up", "Local.w"): planned["up", "Local.w"]}) == ["Global.w", "Local.n"]
    assert notes("svd:0.9", {**planned, ("up", "Local.w"): Size(1)}) == [], "only the run can tell its size"
