"""The bytes of a secure sum's messages, by hand."""

from __future__ import annotations

from fedaudit.aggregation.secure.messages import SumFacts, traffic_of
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
