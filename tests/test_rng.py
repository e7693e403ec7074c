"""Seeded blocks leave the global generators as they were, and give what these would give by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedaudit.rng import seed_of, seeded


def drawn() -> list[Any]:
    return [np.random.normal(size=3).tolist(), np.random.rand(), random.random(), torch.rand(2).tolist()]


def afresh(*parts: object) -> list[Any]:
    """What the generators give after seeding by their own functions."""
    seed = seed_of(*parts)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    return drawn()


def nothing() -> None:
    pass


def one_normal() -> None:
    np.random.normal()  # the second of the two that are drawn at once is left over


def many() -> None:
    np.random.rand(10_000)


@pytest.mark.parametrize("before", [nothing, one_normal, many])
@pytest.mark.parametrize("inside", [nothing, one_normal, many])
def test_a_block_is_seeded_and_leaves_no_trace(before: Callable[[], None], inside: Callable[[], None]) -> None:
    def outside() -> list[Any]:
        np.random.seed(3)
        random.seed(3)
        torch.manual_seed(3)
        before()
        return [np.random.get_state()[2:], random.getstate(), torch.get_rng_state().tolist()]

    wanted = outside(), drawn()
    inner, first = afresh("inner"), afresh("a", 1)
    outside()
    for _ in range(2):
        with seeded("a", 1):
            assert drawn() == first
            inside()
            mark = np.random.get_state()
            with seeded("inner"):
                assert drawn() == inner
            assert all(np.array_equal(a, b) for a, b in zip(mark, np.random.get_state(), strict=True))
    assert [np.random.get_state()[2:], random.getstate(), torch.get_rng_state().tolist()] == wanted[0]
    assert drawn() == wanted[1]


def test_another_generator_in_numpys_place_is_no_trouble() -> None:
    mine = np.random.get_bit_generator()
    wanted = afresh("a")
    np.random.seed(3)
    expected = np.random.rand(4).tolist()
    np.random.seed(3)
    try:
        with seeded("a"):
            assert drawn() == wanted
            np.random.set_bit_generator(np.random.MT19937(5))
        assert np.random.rand(4).tolist() == expected, "the state goes back, into whatever is there"
        np.random.set_bit_generator(np.random.PCG64(5))
        ours = np.random.rand()
        np.random.set_bit_generator(np.random.PCG64(5))
        state = np.random.get_state(legacy=False)
        assert state["bit_generator"] == "PCG64"
    finally:
        np.random.set_bit_generator(mine)
    assert ours == np.random.RandomState(np.random.PCG64(5)).rand()
