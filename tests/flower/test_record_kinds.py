"""Kinds that the user gives to records: which name counts for which record, and what is refused."""

from __future__ import annotations

import pytest

from fedaudit.errors import PrivacyError, SettingError
from fedaudit.flower.record_kinds import UPDATE, Named, Names, app_policies
from fedaudit.wire.message import Declared


def test_the_most_exact_name_counts():
    """The type of the message, then its category, then the record alone; an entry is not its record."""
    names = Names({
        "arrays": "weights", "train.arrays": "gradients", "train.late.arrays": "logits", "metrics.n": "count",
        "evaluate.metrics.n": "labels",
    })  # fmt: skip
    found = {
        (kind, record, key): None if (named := names.of(kind, record, key)) is None else named.kind
        for kind in ("train", "train.late", "evaluate")
        for record, key in (("arrays", None), ("metrics", "n"), ("metrics", None), ("arrays", "n"))
    }
    assert {place: kind for place, kind in found.items() if kind} == {
        ("train", "arrays", None): "gradients", ("train.late", "arrays", None): "logits",
        ("evaluate", "arrays", None): "weights", ("train", "metrics", "n"): "count",
        ("train.late", "metrics", "n"): "count", ("evaluate", "metrics", "n"): "labels",
    }  # fmt: skip
    assert names.entries("train", "metrics", ["loss", "n", "m"]) == ["n"]
    assert names.entries("train", "other", ["loss", "n"]) == []


def test_names_that_match_nothing():
    names = Names({"arrays": "weights", "train.a": "logits", "train.late.b": "count", "evaluate.arrays": "weights"})
    assert names.unmatched([]) == ["arrays", "train.a", "train.late.b", "evaluate.arrays"]
    assert names.unmatched([("train.late", "arrays"), ("train.late", "a")]) == ["train.late.b", "evaluate.arrays"]
    assert names.unmatched([("train", "b"), ("evaluate", "arrays")]) == ["train.a", "train.late.b"]
    assert Names().unmatched([("train", "x")]) == []


def test_what_a_name_declares():
    plain = Names(
        {"e": {"kind": "embeddings", "unit": "record"}, "w": {"kind": "weights", "update": True}, "x": "logits"}
    )
    assert plain.said == {
        "e": Named(kind="embeddings", unit="record", update=False),
        "w": Named(kind="weights", unit="client", update=True),
        "x": Named(kind="logits", unit="client", update=False),
    }
    assert plain.said["e"].declared() == Declared("private", "embeddings", via="data", unit="record", finite=False)
    assert plain.said["w"].declared() == Declared("private", UPDATE, via="data", unit="client", finite=False)


@pytest.mark.parametrize(
    "kind",
    [
        "weight",
        {"kind": "logits", "update": True},
        {"kind": "weights", "update": True, "unit": "record"},
        {"kin": "logits"},
    ],
)
def test_kinds_that_are_refused(kind):
    with pytest.raises(SettingError, match="arrays"):
        Names({"arrays": kind})


def test_policies_on_messages_alone():
    """Of clients' records: the app trains by itself, and whose a record is nobody knows."""
    policy = {"noise_multiplier": 1.0, "sensitivity": "clip:1", "delta": 1e-5}
    found = app_policies({"gradients": policy})
    assert (list(found), found["gradients"].noise_multiplier, found["gradients"].unit) == (["gradients"], 1.0, "record")
    assert app_policies({}) == {}
    with pytest.raises(PrivacyError, match="an app trains its models itself"):
        app_policies({"training": policy, "gradients": policy})
    with pytest.raises(PrivacyError, match="unit = person"):
        app_policies({"gradients": {**policy, "unit": "person"}})
