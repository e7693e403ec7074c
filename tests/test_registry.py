"""Families are folders: the names that users import and that transcripts hold do not change with them."""

from __future__ import annotations

import importlib

import pytest

from fedaudit import registry


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("fedaudit.methods.fedavg", "fedaudit.methods.averaging.fedavg"),
        ("fedaudit.methods._host", "fedaudit.methods.datafree._host"),
        ("fedaudit.attacks.lira", "fedaudit.attacks.membership.lira"),
    ],
)
def test_a_module_without_its_family_is_the_same_module(short: str, whole: str) -> None:
    one, other = importlib.import_module(short), importlib.import_module(whole)
    assert one is other
    assert (one.__name__, one.__spec__.name) == (whole, whole)
    assert registry.public_module(whole) == short


def test_a_message_is_named_without_the_family() -> None:
    """A transcript from before there were families is read, and one from today has the same digests."""
    from fedaudit.methods.averaging.fedavg import FedAvg, Local

    assert Local.class_id() == "fedaudit.methods.fedavg.Local"
    assert registry.family_of(FedAvg) == "averaging"


def test_other_modules_keep_their_names() -> None:
    assert registry.public_module("fedaudit.runtime.engines.ray") == "fedaudit.runtime.engines.ray"
    assert registry.public_module("mine.methods.a.b") == "mine.methods.a.b"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fedaudit.methods.no_such_method")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("a.b:C", True), ("a:b.C", True), ("fedavg", False), ("a.b:", False), (":C", False), ("1a:C", False)],
)
def test_which_texts_name_users_own_code(text, is_one):
    assert registry.is_path(text) is is_one
