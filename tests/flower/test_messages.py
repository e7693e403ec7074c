"""Arrays that came as a list get the model's names, and arrays that are no NumPy arrays stay bytes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedaudit import State
from fedaudit.flower.client import identify
from fedaudit.flower.messages import Layout, _arrays, downs, fields_of, frame_bytes, tensor_of
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


def test_the_frame_of_a_message_is_itself_and_its_table():
    identify()
    message = Message(RecordDict({"config": ConfigRecord({"a": 1})}), 1, "train")
    assert frame_bytes(message) == len(message.deflate()) + len(message.content.deflate())
    assert min(len(message.deflate()), len(message.content.deflate())) > 0


@pytest.mark.parametrize(("unit", "names", "made"), [
    ("record", ["e"], Tensor), ("record", ["e", "f"], dict), ("client", ["e"], State), (None, ["e"], State),
])  # fmt: skip
def test_arrays_with_a_row_for_each_record_are_tensors(unit, names, made):
    record = ArrayRecord({name: Array(np.ones((2, 3), np.float32)) for name in names})
    named = None if unit is None else SimpleNamespace(unit=unit)
    layout = SimpleNamespace(named=lambda tensors: tensors, buffers=())
    found = _arrays(record, named, layout)
    assert type(found) is made
    assert torch.equal(found if made is Tensor else found["e"], torch.ones(2, 3))
