"""Releases as they are stored: what was given, and nothing else."""

from __future__ import annotations

from fedaudit.wire.message import Declared
from fedaudit.wire.release import UNPROTECTED, Protection, Release, Sent


def test_an_entry_holds_what_was_given():
    empty = Sent()
    assert (empty.payload, empty.buffers, empty.wire, empty.whole, empty.protection) == (0, 0, 0, None, None)
    assert empty.model_dump() == {}
    noise = Protection(mechanism="gaussian", sigma=0.5, clip=2.0)
    declared = Declared("private", "logits", "model", "client", "class", "float16", False)
    made = Sent.of({"payload": 3, "buffers": 0, "wire": 9, "whole": 12}, declared, noise)
    assert made.model_dump() == {
        "payload": 3, "buffers": 0, "wire": 9, "whole": 12, "role": "private", "kind": "logits", "via": "model",
        "unit": "client", "dtype": "float16", "protection": {"mechanism": "gaussian", "sigma": 0.5, "clip": 2.0},
    }  # fmt: skip
    passed = Sent.of({"payload": 1}, Declared("relay", "logits", by="client"), None)
    assert passed.model_dump() == {"payload": 1, "role": "relay", "kind": "logits", "by": "client"}
    assert Sent.of({"payload": 1}, None, None).model_dump() == {"payload": 1}
    assert UNPROTECTED.model_dump() == {"mechanism": "none"}


def test_a_release_has_its_declaration_and_its_protection():
    declared = Declared("private", "labels", "data", "record", dtype="uint8")
    made = Release.of("Up.y", declared, UNPROTECTED)
    assert (made.field, made.role, made.kind, made.via, made.unit) == ("Up.y", "private", "labels", "data", "record")
    assert made.protection == UNPROTECTED
    assert Release.of("Up.p", Declared("public"), None).protection is None
