"""The bytes of a secure sum's messages, by hand."""

from __future__ import annotations

import numpy as np
import torch

from fedaudit.aggregation.secure.messages import (
    SumFacts,
    as_bytes,
    as_words,
    ids_of,
    keys_of,
    rows_of,
    traffic_of,
    words_of,
)
from fedaudit.aggregation.secure.protocol import PublicKeys
from fedaudit.wire.message import TENSOR_HEADER


def test_the_traffic_of_a_sum_with_drop_outs_by_hand():
    """Five are invited, 4 advertise keys, all of them neighbours; 0, 1 and 2 share, 0 and 1 send, 0 helps. A key pair
    has two keys of 32 bytes, a client's number 4 bytes, a share 33, and two sealed shares 16 more."""
    near = {0: [1, 2, 3], 1: [0, 2, 3], 2: [0, 1, 3], 3: [0, 1, 2]}
    found = traffic_of(SumFacts(range(5), near, [0, 1, 2], [0, 1], [0], 100))
    payload = {f"{way} {name}": size.payload for (way, name), size in found.items()}
    sealed = payload["up Shared.sealed"] // 9
    share = payload["up Helped.own"] // 2
    keys = payload["up Advertised.keys"] // 4
    number = payload["down Roster.ids"] // 12
    assert payload == {
        "down Invited.clients": 40, "down Invited.threshold": 40, "down Invited.bound": 40, "down Invited.largest": 40,
        "up Advertised.keys": 4 * keys,
        "down Roster.ids": 12 * number, "down Roster.keys": 12 * keys,  # each of the four hears of three
        "up Shared.to": 9 * number, "up Shared.sealed": 9 * sealed,  # three send to three each
        "down Delivered.by": 6 * number, "down Delivered.sealed": 6 * sealed,  # of which two are still there for each
        "up Masked.y": 2 * 100 * 4,
        "down Unmask.stayed": 4 * number, "down Unmask.dropped": 2 * number,  # 0 and 1 stayed, and 2 is gone
        "up Helped.own": 2 * share, "up Helped.keys": 1 * share,
    }  # fmt: skip
    assert (keys, share, number, sealed) == (64, 33, 4, 2 * 33 + 16)
    headers = {name: size.header // TENSOR_HEADER for (_, name), size in found.items()}
    assert [headers[name] for name in ("Invited.clients", "Advertised.keys", "Roster.keys", "Shared.to")] == [
        0,
        4,
        4,
        3,
    ]
    assert [headers[name] for name in ("Delivered.by", "Masked.y", "Unmask.stayed", "Helped.own")] == [3, 2, 2, 1]


def test_words_keys_and_numbers_go_there_and_back():
    row = bytes(range(64))
    assert keys_of(row) == PublicKeys(bytes(range(32)), bytes(range(32, 64)))
    table = as_bytes([b"abc", b"def"], 3)
    assert (table.dtype, table.tolist()) == (torch.uint8, [[97, 98, 99], [100, 101, 102]])
    assert rows_of(table) == [b"abc", b"def"]
    assert as_bytes([], 5).shape == (0, 5)
    assert (ids_of((3, 1)).dtype, ids_of((3, 1)).tolist()) == (torch.int32, [3, 1])
    words = np.array([1, 2**32 - 1, 2**31], np.uint32)
    assert as_words(words).tolist() == [1, -1, -(2**31)]
    assert words_of(as_words(words)).tolist() == words.tolist()


def test_the_traffic_of_a_sum_in_which_clients_have_different_neighbours():
    """0 has one neighbour, 1 has two, 2 has three, 3 has two. All but 3 send; 2 and 1 help. 3 dropped out after it
    shared: of those who help, it is a neighbour of 2 alone."""
    near = {0: [2], 1: [2, 0], 2: [0, 1, 3], 3: [2, 1]}
    found = traffic_of(SumFacts([0, 1, 2, 3, 4, 5], near, [0, 1, 2, 3], [0, 1, 2], [1, 2], 10))
    payload = {name: size.payload for (_, name), size in found.items()}
    assert payload == {
        "Invited.clients": 48, "Invited.threshold": 48, "Invited.bound": 48, "Invited.largest": 48,
        "Advertised.keys": 256, "Roster.ids": 32, "Roster.keys": 8 * 64, "Shared.to": 32, "Shared.sealed": 8 * 82,
        "Delivered.by": 32, "Delivered.sealed": 8 * 82, "Masked.y": 120, "Unmask.stayed": 4 * (2 + 3 + 3),
        "Unmask.dropped": 4, "Helped.own": 33 * 6, "Helped.keys": 33,
    }  # fmt: skip
    none = traffic_of(SumFacts([0, 1, 2, 3], near, [0, 1, 2], [0, 1, 2], [0], 10))
    assert none["up", "Helped.keys"].payload == none["down", "Unmask.dropped"].payload == 0
    assert none["up", "Helped.own"].payload == 66
    assert none["down", "Delivered.by"].payload == 4 * (1 + 2 + 2)
    assert all(size.buffers == 0 for size in found.values())
