"""Conversion of Flower's messages to ours and back: each array, metric and config record becomes a field.

The bytes of a field are those that Flower sends. An array record becomes a state (arrays by name, in their order), or a
tensor if it has one row for each record of the node. Metric and config records become tables. An entry that has its own
kind becomes its own field.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import SType
from torch import Tensor

from fedaudit.errors import WireError
from fedaudit.flower.record_kinds import UNMAPPED, Named, Names
from fedaudit.flower.secure_sums import protocol_fields
from fedaudit.wire.message import Declared, Down, Record, State, Up, class_named

LONG = 1000  # a text with more characters is sent as bytes
AUDIT = "fedaudit.audit"  # the audit's own record; it is removed before anybody else sees the message, and not counted


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a message: the record it came from, its value, and its declared kind."""

    record: str
    key: str | None  # the entry of a metric or config record; None: the whole record, or its remaining entries
    value: Any
    named: Named | None
    wire: int  # bytes as Flower sends them
    protocol: Declared | None = None  # its declaration, if it belongs to secure aggregation and not to the app

    @property
    def declared(self) -> Declared:
        if self.named is None and self.protocol is not None:
            return self.protocol
        if self.named is None:
            return Declared("private", UNMAPPED, via="data", unit="client", finite=False)
        return dataclasses.replace(self.named.declared(), kind=self.named.kind)


def field_name(record: str, key: str | None = None) -> str:
    """Return a valid field name for a record, or for one entry of it."""
    name = re.sub(r"\W", "_", record if key is None else f"{record}_{key}")
    return f"_{name}" if name[:1].isdigit() else name


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrays of an app's model in their order: shapes by name, and which of them are no parameters."""

    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    def named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return arrays that came as a list, numbered 0, 1, ..., under the model's names if they have its shapes."""
        numbered = list(tensors) == [str(i) for i in range(len(tensors))]
        if numbered and [tuple(t.shape) for t in tensors.values()] == list(self.shapes.values()):
            return dict(zip(self.shapes, tensors.values(), strict=True))
        return tensors


def fields_of(
    content: RecordDict, names: Names, message_type: str, layout: Layout | None = None
) -> tuple[dict[str, Field], int]:
    """Return the fields of a message's content, and how many of Flower's bytes belong to no field."""
    found: dict[str, Field] = {}
    sent: set[str] = set()
    frame = 0
    for record, value in content.items():
        size = _bytes(value, sent)
        split = [] if isinstance(value, ArrayRecord) else names.entries(message_type, record, value)
        of_protocol = protocol_fields(record)
        split += [key for key in of_protocol if key is not None and key in value and key not in split]
        for key in split:
            part = len(type(value)({key: value[key]}).deflate()) - len(type(value)({}).deflate())
            size -= part
            said = names.of(message_type, record, key)
            _put(found, Field(record, key, _plain(value[key]), said, part, of_protocol.get(key)))
        rest = None if isinstance(value, ArrayRecord) else {k: _plain(v) for k, v in value.items() if k not in split}
        if rest == {} and split:
            frame += size
            continue
        named = names.of(message_type, record)
        shown = _arrays(value, named, layout or Layout()) if isinstance(value, ArrayRecord) else rest
        _put(found, Field(record, None, shown, named, size, of_protocol.get(None)))
    return found, frame


def _put(found: dict[str, Field], field: Field) -> None:
    name = field_name(field.record, field.key)
    if name in found:
        raise WireError(f"Two records of one message would both become the field {name!r}. Rename {field.record!r}.")
    found[name] = field


def _bytes(value: Any, sent: set[str]) -> int:
    """Return how many bytes Flower sends for an object and its parts. Equal objects of one message are sent once."""
    if value.object_id in sent:
        return 0
    sent.add(value.object_id)
    return len(value.deflate()) + sum(_bytes(child, sent) for child in (value.children or {}).values())


def frame_bytes(message: Any) -> int:
    """Return the bytes of the message itself and its table of records, without the records."""
    return len(message.deflate()) + len(message.content.deflate())


def _arrays(record: ArrayRecord, named: Named | None, layout: Layout) -> Any:
    tensors = {name: tensor_of(array) for name, array in record.items()}
    if named is not None and named.unit == "record":
        return next(iter(tensors.values())) if len(tensors) == 1 else tensors
    return State(layout.named(tensors), layout.buffers)


def tensor_of(array: Array) -> Tensor:
    """Return a copy of the array as a tensor in its own memory; its bytes if it holds something else, such as trees."""
    if array.stype != SType.NUMPY or not array.data:
        return torch.from_numpy(np.frombuffer(array.data, dtype=np.uint8).copy())
    return torch.from_numpy(np.array(array.numpy(), order="C"))


def array_of(t: Tensor) -> Array:
    return Array(np.ascontiguousarray(t.detach().cpu().numpy()))


def _plain(value: Any) -> Any:
    """Return a metric's or config's value as our codec takes it: bytes and long texts become tensors of bytes."""
    if isinstance(value, str) and len(value) > LONG:
        value = value.encode()
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return str(value)  # a node's id, for example, has 64 bits and no sign: more than the codec's numbers
    for plain in (bool, int, float, str):  # np.float64 is a float, but the codec refuses it
        if isinstance(value, plain):
            return plain(value)
    return value


def replaced(content: RecordDict, fields: Mapping[str, Field], values: Mapping[str, Any]) -> None:
    """Put other values into a message, under the records and names that they came from."""
    for name, value in values.items():
        field = fields[name]
        if not isinstance(content[field.record], ArrayRecord):
            raise WireError(f"{name} is not an array record, so noise cannot be added. Remove the policy on its kind.")
        old = cast(ArrayRecord, content[field.record])
        tensors = value if isinstance(value, Mapping) else {next(iter(old)): value}
        content[field.record] = ArrayRecord({
            key: array_of(t.to(tensor_of(old[key]).dtype)) for key, t in tensors.items()
        })  # fmt: skip


# --- classes of messages ---------------------------------------------------------------------------------------------


def class_name(message_type: str, reply: bool) -> str:
    """Return the class name for a message type: the reply to `train.other` is `TrainOtherReply`."""
    words = re.split(r"\W|_", message_type)
    return "".join(word.capitalize() for word in words if word) + ("Reply" if reply else "")


def message_class(name: str, declared: Mapping[str, Declared | None], base: type[Up] | type[Down]) -> type[Any]:
    """Return the class of a message with these fields. An existing class with the same fields is used again."""
    known = class_named(f"{__name__}.{name}")
    if known is not None and issubclass(known, base) and known.declared() == dict(declared):
        return known
    body: dict[str, Any] = {
        field: dataclasses.field(metadata={"declared": said}) for field, said in declared.items() if said is not None
    }
    body |= {"__annotations__": dict.fromkeys(declared, Any), "__module__": __name__, "__qualname__": name}
    return type(name, (base,), body)


def downs(contents: list[dict[str, Field]], message_type: str) -> list[Record]:
    """Return the requests of one ask as objects of one class. A field that one of them lacks is None."""
    every = dict.fromkeys(name for fields in contents for name in fields)
    cls = message_class(class_name(message_type, False), dict.fromkeys(every), Down)
    made: dict[int, Record] = {}  # a broadcast stays one object
    for fields in contents:
        if id(fields) not in made:
            made[id(fields)] = cls(**{name: fields[name].value if name in fields else None for name in every})
    return [made[id(fields)] for fields in contents]


def ups(contents: list[dict[str, Field]], message_type: str) -> list[Record]:
    """Return the replies of one ask as objects of one class with the fields of all, so that no node chooses it."""
    every = {name: field.declared for fields in contents for name, field in fields.items()}
    cls = message_class(class_name(message_type, True), every, Up)
    return [cls(**{name: fields[name].value if name in fields else None for name in every}) for fields in contents]


def contents_of(values: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]) -> RecordDict:
    """Return Flower's form of a request. `fields` says which record each field was, and if it held arrays."""
    made = RecordDict()
    for name, of in fields.items():
        value = values[name]
        if value is None:
            continue
        if of["is"] == "arrays":
            tensors = value if isinstance(value, Mapping) else {"0": value}
            made[of["record"]] = ArrayRecord({key: array_of(t) for key, t in tensors.items()})
        else:
            back = {k: bytes(v.numpy()) if isinstance(v, Tensor) else v for k, v in value.items()}
            made[of["record"]] = ConfigRecord(back)
    return made
