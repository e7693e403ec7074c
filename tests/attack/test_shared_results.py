"""What processes of an audit leave for each other: whole files or nothing, and nothing without a folder."""

from __future__ import annotations

import pytest

from fedaudit.attack import shared_results
from fedaudit.attack.shared_results import for_others, from_others, share


@pytest.fixture(autouse=True)
def nothing_shared(monkeypatch):
    monkeypatch.setattr(shared_results, "_folder", None)


def test_what_one_leaves_the_others_find(tmp_path):
    share(tmp_path)
    assert from_others("a") is None
    for_others("a", b"first")
    for_others("b", b"other")
    assert (from_others("a"), from_others("b")) == (b"first", b"other")
    for_others("a", b"second")
    assert from_others("a") == b"second"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]  # nothing half written is left


def test_nothing_is_left_or_found_without_a_folder(tmp_path):
    share(tmp_path)
    for_others("a", b"first")
    share(None)
    for_others("b", b"other")
    assert from_others("a") is None
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_gone_is_not_missed(tmp_path):
    share(tmp_path / "gone")
    for_others("a", b"first")
    assert from_others("a") is None
    assert not (tmp_path / "gone").exists()
