"""Seeded blocks leave the global generators as they were, and give what these would give by themselves."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fedaudit.rng import _Numpys, generator, kept, numpy_generator, seed_of, seeded


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


def test_a_seed_is_the_digest_of_its_path() -> None:
    """The first eight bytes of BLAKE2b, the lowest first, without the lowest bit: 63 bits."""
    digest = hashlib.blake2b(b"5/client 3/7/noise", digest_size=8).digest()
    number = sum(byte * 256**i for i, byte in enumerate(digest))
    assert seed_of(5, "client 3", 7, "noise") == number // 2
    assert generator(5, "client 3", 7, "noise").initial_seed() == number // 2
    key = hashlib.blake2b(b"5/client 3/noise", digest_size=16).digest()
    by_hand = np.random.Generator(np.random.Philox(key=sum(byte * 256**i for i, byte in enumerate(key))))
    assert numpy_generator((5, "client 3"), "noise").random(3).tolist() == by_hand.random(3).tolist()
    secret = [numpy_generator((5, "client 3"), "noise", secure=True).random() for _ in range(2)]
    assert secret[0] != secret[1]


def test_a_kept_block_leaves_no_trace_and_seeds_nothing() -> None:
    afresh("before")
    wanted = drawn()
    again = drawn()
    afresh("before")
    with kept():
        assert drawn() == wanted, "it goes on where the generators were"
        np.random.seed(9)
        random.seed(9)
        torch.manual_seed(9)
    assert drawn() == wanted
    assert drawn() == again


def states() -> list[Any]:
    kind, numbers, *rest = np.random.get_state()
    return [kind, numbers.tolist(), *rest]


def test_numpys_state_is_kept_as_memory_where_that_is_all_of_it() -> None:
    """625 words: numbers and position. A second normal number is in none of them, so numpy's own tuple is kept."""
    before = np.random.get_state()
    try:
        held = _Numpys()
        np.random.seed(11)
        np.random.rand(5)
        mark, first = states(), held.state()
        words = np.frombuffer(first, np.uint32)
        assert [words[:-1].tolist(), int(words[-1])] == mark[1:3]
        assert held.state() is first, "what is known is not copied again"
        np.random.rand()
        moved, second = states(), held.state()
        assert second != first
        np.random.normal()
        half, third = states(), held.state()
        assert half[3] == 1
        assert isinstance(third, tuple)
        for state, wanted in ((first, mark), (second, moved), (third, half)):
            np.random.seed(1)
            np.random.normal()
            held.put_back(state)
            assert states() == wanted
        held.seed(13)
        seeded_at = states()
        np.random.seed(13)
        assert states() == seeded_at
        assert isinstance(held.state(), bytes)
    finally:
        np.random.set_state(before)


def test_memory_goes_back_where_the_address_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy before 1.24 has no function that gives its global generator: its own functions are used."""
    before = np.random.get_state()
    try:
        np.random.seed(11)
        np.random.rand(5)
        mark, memory = states(), _Numpys().state()
        monkeypatch.delattr(np.random, "get_bit_generator")
        held = _Numpys()
        np.random.seed(1)
        np.random.normal()
        held.put_back(memory)
        assert states() == mark
        assert isinstance(held.state(), tuple)
        held.seed(13)
        assert held.state()[2] == 624
    finally:
        np.random.set_state(before)


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_generators_address_is_found_anew() -> None:
    mine = np.random.get_bit_generator()
    held = _Numpys()
    try:
        held.seed(3)
        old = held._address()
        np.random.set_bit_generator(np.random.MT19937(5))
        state = held.state()
        assert held._address() != old
        assert np.frombuffer(state, np.uint32)[:-1].tolist() == np.random.get_state()[1].tolist()
        np.random.set_bit_generator(np.random.PCG64(5))
        assert held._address() is None
    finally:
        np.random.set_bit_generator(mine)


@pytest.mark.parametrize("block", [kept, seeded])
@pytest.mark.parametrize(("device", "devices"), [("cpu", []), ("cuda", [2]), ("cuda:1", [1])])
def test_the_generators_of_the_device_are_kept_too(block, device, devices, monkeypatch) -> None:
    """Of the one that is named, else of the current one; the processor's alone where none is."""
    asked, seeds = [], []

    @contextmanager
    def fork(devices):
        asked.append(devices)
        yield

    class Default:
        def __init__(self, index):
            self.index = index

        def manual_seed(self, seed):
            seeds.append((self.index, seed))

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_generators", [Default(i) for i in range(3)])
    before = torch.get_rng_state()
    with block(device=device) if block is kept else block("a", 1, device=device):
        pass
    torch.set_rng_state(before)
    assert asked == [devices]
    assert seeds == ([] if block is kept else [(index, seed_of("a", 1)) for index in devices])


def test_memory_of_numpys_state_is_known_after_seeding(monkeypatch) -> None:
    """Then `state` asks numpy for nothing; where another generator is in place, there is no memory to know."""
    mine, before = np.random.get_bit_generator(), np.random.get_state()
    try:
        held = _Numpys()
        held.seed(7)
        assert len(held._known) == 4 * 625
        first = held.state()
        assert first is held._known
        np.random.rand(3)
        wanted = states()
        second = held.state()
        held.put_back(first)
        assert held._known is first
        np.random.seed(7)
        seeded_at = states()
        held.put_back(first)
        assert states() == seeded_at
        held.put_back(second)
        assert states() == wanted
    finally:
        np.random.set_bit_generator(mine)
        np.random.set_state(before)
