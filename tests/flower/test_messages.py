"""Arrays that came as a list get the model's names, and arrays that are no NumPy arrays stay bytes."""

from __future__ import annotations

import torch
from flwr.app import Array, ConfigRecord, RecordDict

from fedaudit.flower.messages import Layout, downs, fields_of, tensor_of
from fedaudit.flower.record_kinds import Names
from fedaudit.wire.codec import encode

LAYOUT = Layout({"weight": (2, 3), "bias": (2,)}, frozenset({"bias"}))


def test_numbered_arrays_get_the_models_names_if_they_have_its_shapes():
    listed = {"0": torch.ones(2, 3), "1": torch.zeros(2)}
    assert list(LAYOUT.named(listed)) == ["weight", "bias"]
    assert torch.equal(LAYOUT.named(listed)["weight"], listed["0"])
    for other in ({"0": torch.ones(3, 2), "1": torch.zeros(2)}, {"0": torch.ones(2, 3)}, {"a": torch.ones(2, 3)}):
        assert LAYOUT.named(other) == other


def test_what_is_no_numpy_array_stays_bytes():
    """Older apps send trees as bytes of an empty type, and an empty model as no bytes at all."""
    trees = Array(dtype="", shape=(), stype="", data=b'{"trees": []}')
    assert bytes(tensor_of(trees).numpy()) == b'{"trees": []}'
    assert tensor_of(Array(dtype="", shape=(), stype="numpy.ndarray", data=b"")).numel() == 0


def test_numbers_that_the_codec_cannot_hold_become_texts():
    """Flower's own runtimes give nodes ids of 64 bits, and secure aggregation sends them."""
    content = RecordDict({"config": ConfigRecord({"nodes": [2**64 - 1, 5], "big": 2**63, "least": -(2**63)})})
    fields, _ = fields_of(content, Names(), "train")
    assert fields["config"].value == {"nodes": ["18446744073709551615", 5], "big": "9223372036854775808",
                                      "least": -(2**63)}  # fmt: skip
    assert encode(downs([fields], "train")[0])
