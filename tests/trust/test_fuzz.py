"""A slice of the fuzz campaign (`make fuzz`): nothing but our errors."""

from __future__ import annotations

import random

from fuzz import campaign, mutated


def test_mutated_files_give_nothing_but_our_errors():
    assert campaign(300, seed=1, share_of_folders=0.1) == []


def test_a_case_follows_from_its_seed():
    assert mutated(b"abc" * 50, random.Random("x")) == mutated(b"abc" * 50, random.Random("x"))
    assert len({mutated(b"abc" * 50, random.Random(i)) for i in range(50)}) > 40
