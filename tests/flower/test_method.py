"""A Flower app as a method: how the parts of its replies are declared."""

from __future__ import annotations

from fedaudit.flower.method import FlowerApp
from fedaudit.flower.record_kinds import UNMAPPED
from fedaudit.flower.secure_sums import PROTOCOL


def test_a_part_of_a_reply_is_private_by_its_kind_its_role_or_not_at_all():
    """A kind that the user named goes before a role. What nobody named is unmapped, and may hold any number."""
    rows = {"kind": "embeddings", "unit": "record"}
    named = FlowerApp._declared({"named": rows, "role": "masked"})
    assert (named.kind, named.unit, named.via, named.finite) == ("embeddings", "record", "data", False)
    bare = FlowerApp._declared({"named": None})
    assert (bare.kind, bare.unit, bare.via, bare.finite) == (UNMAPPED, "client", "data", False)
    for said in PROTOCOL.values():
        found = FlowerApp._declared({"named": None, "role": said.role})
        assert found.role == said.role
