"""Arrays that came as a list get the model's names, and arrays that are no NumPy arrays stay bytes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedaudit import State
from fedaudit.errors import WireError
from fedaudit.flower import messages
from fedaudit.flower.client import identify
from fedaudit.flower.messages import (
    UNMAPPED,
    Layout,
    _arrays,
    class_name,
    contents_of,
    downs,
    field_name,
    fields_of,
    frame_bytes,
    replaced,
    tensor_of,
    ups,
)
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


@pytest.mark.parametrize(
    ("record", "key", "name"),
    [("arrays", None, "arrays"), ("a.b-c", "d e", "a_b_c_d_e"), ("0", None, "_0"), ("x", "1", "x_1"), ("", None, "")],
)
def test_names_of_fields(record, key, name):
    assert field_name(record, key) == name


@pytest.mark.parametrize(
    ("kind", "reply", "name"),
    [("train", False, "Train"), ("train", True, "TrainReply"), ("train.other_way", True, "TrainOtherWayReply")],
)
def test_names_of_classes(kind, reply, name):
    assert class_name(kind, reply) == name


def test_values_become_what_the_codec_takes():
    long = "x" * (messages.LONG + 1)
    assert messages._plain("x" * messages.LONG) == "x" * messages.LONG
    assert bytes(messages._plain(long).numpy()) == long.encode()
    assert messages._plain(b"\1\2").tolist() == [1, 2]
    assert (messages._plain(b"").dtype, messages._plain(b"").numel()) == (torch.uint8, 0)
    assert messages._plain((1, np.float64(2.5), [True])) == [1, 2.5, [True]]
    assert [type(messages._plain(v)) for v in (True, 3, np.float64(1), "a")] == [bool, int, float, str]
    assert [messages._plain(v) for v in (2**63 - 1, -(2**63), -(2**63) - 1)] == [
        2**63 - 1, -(2**63), "-9223372036854775809",
    ]  # fmt: skip


def test_a_request_comes_back_as_it_was():
    """Arrays by their names, one tensor as a list of one, bytes as bytes; what a node was not sent is left out."""
    fields = {"a": {"is": "arrays", "record": "w"}, "b": {"is": "arrays", "record": "e"},
              "c": {"is": "config", "record": "conf"}, "d": {"is": "config", "record": "none"}}  # fmt: skip
    values = {
        "a": {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([[3]])}, "b": torch.tensor([5.0]),
        "c": {"t": 1, "raw": torch.tensor([7, 8], dtype=torch.uint8)}, "d": None,
    }  # fmt: skip
    found = contents_of(values, fields)
    assert list(found) == ["w", "e", "conf"]
    assert {k: a.numpy().tolist() for k, a in found["w"].items()} == {"x": [1.0, 2.0], "y": [[3]]}
    assert {k: a.numpy().tolist() for k, a in found["e"].items()} == {"0": [5.0]}
    assert dict(found["conf"]) == {"t": 1, "raw": b"\7\10"}


def test_protected_arrays_keep_their_names_and_types():
    content = RecordDict({
        "w": ArrayRecord({"x": Array(np.zeros(2, np.float32)), "y": Array(np.zeros(1, np.float64))}),
        "e": ArrayRecord({"rows": Array(np.zeros((1, 2), np.float16))}),
        "conf": ConfigRecord({"t": 1}),
    })  # fmt: skip
    fields, _ = fields_of(content, Names(), "train")
    replaced(content, fields, {
        "w": {"x": torch.tensor([1.5, 2.5]).double(), "y": torch.tensor([3.5])}, "e": torch.tensor([[4.5, 5.5]]),
    })  # fmt: skip
    assert {k: (a.dtype, a.numpy().tolist()) for k, a in content["w"].items()} == {
        "x": ("float32", [1.5, 2.5]), "y": ("float64", [3.5]),
    }  # fmt: skip
    assert {k: (a.dtype, a.numpy().tolist()) for k, a in content["e"].items()} == {"rows": ("float16", [[4.5, 5.5]])}
    with pytest.raises(WireError, match="conf is not an array record"):
        replaced(content, fields, {"conf": torch.zeros(1)})


def test_requests_of_one_ask_are_of_one_class_and_a_broadcast_is_one_object():
    first, _ = fields_of(RecordDict({"a": ConfigRecord({"t": 1})}), Names(), "train")
    other, _ = fields_of(RecordDict({"b": ConfigRecord({"t": 2})}), Names(), "train")
    made = downs([first, other, first], "train")
    assert made[0] is made[2]
    assert [(m.a, m.b) for m in made[:2]] == [({"t": 1}, None), (None, {"t": 2})]
    assert {type(m) for m in made} == {type(made[0])}
    assert type(made[0]).__name__ == "Train"
    assert type(downs([other, first], "train")[0]) is not type(downs([first], "train")[0])
    replies = ups([first, other], "train")
    assert [(m.a, m.b) for m in replies] == [({"t": 1}, None), (None, {"t": 2})]
    assert {type(m).__name__ for m in replies} == {"TrainReply"}
    (said,) = {m.declared()["a"] for m in replies}
    assert (said.kind, said.via, said.unit, said.finite) == (UNMAPPED, "data", "client", False)


def test_two_records_must_not_become_one_field():
    content = RecordDict({"a.b": ConfigRecord({"t": 1}), "a_b": ConfigRecord({"t": 2})})
    with pytest.raises(WireError, match="both become the field 'a_b'"):
        fields_of(content, Names(), "train")
