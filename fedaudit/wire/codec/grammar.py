"""The codec turns records into bytes and back. No other module knows the grammar of the encoded tree.

One codec serves the wire, the checkpoints and the clients' memory, so whatever a method keeps can also be sent,
counted and resumed. The format is safetensors. Tensors are named by their number; the tree around them is JSON under
the one metadata key `fedaudit` (safetensors writes several keys in no fixed order), together with an XXH3 digest over
the tree and all tensor bytes. Nothing in it can execute: decoding makes only plain values and instances of classes that
the running program has itself defined. Nodes of the tree:

    null, true, 1, 0.5, "text"                  themselves        {"f": "nan"}   a number that JSON lacks
    {"t": i}                                    tensor i          {"q": i, "as": dtype}   tensor i, sent as dtype
    {"m": [first, names, buffers]}              a model's state, tensors first, first + 1, ...
    {"z": [first, how, shape]}                  a tensor in parts: compressed (fedaudit.wire.compression)
    {"m": ..., "z": [how, shapes, base]}        a state with compressed tensors: changes of the state sent in `base`
    {"d": [[key, node], ...]}                   a dict            {"l": [...]}, {"u": [...]}   a list, a tuple
    {"r": [class, {field: node}]}               a record
    {"k": node}                                 what a client keeps frozen (fedaudit.wire.codec.frozen)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn

from fedaudit.errors import ContractError, WireError
from fedaudit.wire.codec.frozen import Frozen
from fedaudit.wire.codec.inspection import frozen_in, tensors_in
from fedaudit.wire.codec.packing import (
    FORMAT,
    HELD_ON,
    NAMES,
    Apart,
    Blob,
    Content,
    Gathered,
    Held,
    Spans,
    brought,
    contents_of,
    digest,
    frozen_content,
    gathered,
    packed,
    raw,
    there,
    unpacked,
)
from fedaudit.wire.compression import PARTS, Stage, applies, from_parts, reference, restored, squeezed
from fedaudit.wire.message import DTYPES, Declared, Down, Dtype, LowRank, Record, State, Up, class_named
from fedaudit.wire.svd import recombined

STRING_LIMIT = 4096  # characters: a longer text counts as data, and data travels as a tensor
BLOB_LIMIT = 1 << 36  # bytes
STORED_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip


# --- declarations ----------------------------------------------------------------------------------------------


# --- sizes -----------------------------------------------------------------------------------------------------


# --- encoding --------------------------------------------------------------------------------------------------


class _Encoder:
    """Collects tensors while it turns a value into the JSON tree that stands around them."""

    def __init__(self, compress: Stage | None = None, answered: Record | None = None, keeps: bool = False) -> None:
        """Begin. `keeps` says that frozen values may be in it: it is what a client keeps, and does not travel."""
        self.compress, self.answered, self.keeps = compress, answered, keeps
        self.tensors: list[Tensor] = []
        self.frozen: dict[int, Content] = {}  # by number: the contents of frozen tensors
        self._finite: list[tuple[int, str]] = []  # number and place of each tensor whose entries must be finite

    def tensor(self, t: Tensor, where: str, finite: bool) -> int:
        if type(t) not in (Tensor, nn.Parameter):
            raise _changeling(t, where, "Tensor")
        if t.layout != torch.strided or t.is_quantized or t.device.type == "meta":
            raise WireError(f"{where} is a {t.layout} tensor on {t.device}: only dense tensors with content travel.")
        if t.is_complex():
            raise WireError(f"{where} is complex. Send its real and imaginary part (torch.view_as_real).")
        if finite and t.is_floating_point() and t.numel():
            self._finite.append((len(self.tensors), where))
        self.tensors.append(t)
        return len(self.tensors) - 1

    def settle(self) -> list[Tensor]:
        """Check the numbers of all tensors and return the tensors in main memory; those on a GPU in one transfer."""
        return brought(self.tensors, self._checked())

    def digest(self, tree: str) -> str:
        """Check the numbers of all tensors and return the digest of the tree and of all of them."""
        return digest(tree, brought(self.tensors, self._checked(apart=self.frozen)), self.frozen)

    def lazily(self, text: str) -> Held:
        """Check the numbers of all tensors and return a `Held` message with copies on their own devices.

        A tensor that is held already with this content is neither checked nor copied again.
        """
        known = contents_of(self.tensors, self.frozen)
        there = self._checked({i for i, content in known.items() if content.finite}, self.frozen)
        for i, _ in self._finite:
            if i in known:
                known[i].finite = True
        return Held(text, self.tensors, there, known, frozen=self.frozen)

    def _checked(self, but: Collection[int] = (), apart: Collection[int] = ()) -> list[Gathered]:
        """Raise if a number that must be finite is not; return the tensors on GPUs, gathered.

        Those in `but` are not checked again, and those in `apart` are not gathered.
        """
        there, checked = gathered(self.tensors, apart), {i: where for i, where in self._finite if i not in but}
        # A sum is finite unless an entry is not, or the sum overflows. Only then look at every entry.
        sums: list[tuple[Tensor, list[int]]] = []
        for group, whole in there:  # one sum for a gathered group, if all of it must be finite
            if whole.is_floating_point() and checked.keys() >= {i for i in group if self.tensors[i].numel()}:
                sums.append((whole.sum().double(), [i for i in group if i in checked]))
        summed = {i for _, group in sums for i in group}
        alone = [i for i in checked if i not in summed]
        here = {i for i in alone if self.tensors[i].device.type == "cpu"}
        sums += [(self.tensors[i].detach().sum().double(), [i]) for i in alone if i not in here]
        by_device: dict[torch.device, list[int]] = {}
        for n, (of_some, _) in enumerate(sums):
            by_device.setdefault(of_some.device, []).append(n)
        suspect = [i for i in here if not math.isfinite(self.tensors[i].detach().sum().item())]
        suspect += [
            i
            for of_device in by_device.values()
            for n, fine in zip(of_device, torch.stack([sums[n][0] for n in of_device]).isfinite().tolist(), strict=True)
            if not fine
            for i in sums[n][1]
        ]
        for i in sorted(suspect):
            if not bool(torch.isfinite(self.tensors[i]).all()):
                raise WireError(
                    f"{checked[i]} holds NaN or infinity. Training has probably diverged: lower the learning rate. If "
                    "such values are intended, declare the field with finite=False."
                )
        return there

    def node(
        self, value: Any, where: str, dtype: str | None = None, finite: bool = True, stage: Stage | None = None
    ) -> Any:
        match value:
            case None | bool():
                return value
            case int() | str() if type(value) not in (int, str):
                raise _changeling(value, where, "int" if isinstance(value, int) else "str")
            case int():
                if not -(1 << 63) <= value < 1 << 63:
                    raise WireError(f"{where} = {value} does not fit into 64 bits. Send it as a float or a string.")
                return value
            case float():
                if math.isfinite(value):
                    return value
                if finite:
                    raise WireError(f"{where} is {value}. If that is intended, declare the field with finite=False.")
                return {"f": str(value)}
            case str():
                if len(value) > STRING_LIMIT:
                    raise WireError(
                        f"{where} is a text of {len(value)} characters; at most {STRING_LIMIT} may travel. Send it as "
                        "a tensor."
                    )
                return value
            case nn.Parameter():
                raise WireError(f"{where} is a live parameter. Send a copy: state_of(model), or tensor.detach().")
            case Tensor():
                if stage is not None and (parts := self._parts(value, where, stage)) is not None:
                    return {"z": [self._row(parts, where), stage.name, list(value.shape)]}
                if dtype is None or not value.is_floating_point():
                    return {"t": self.tensor(value, where, finite)}
                return {"q": self.tensor(_quantise(value, dtype, where), where, finite), "as": dtype}
            case LowRank():
                if type(value) is not LowRank:
                    raise _changeling(value, where, "LowRank")
                sent, shapes = value.factors()
                node = self.node(sent, where, dtype, finite)
                return {**node, "svd": shapes} if shapes else node
            case State():
                if type(value) is not State:
                    raise _changeling(value, where, "State")
                if stage is not None:
                    return self._squeezed(value, where, stage, None)
                names = list(value)
                first = len(self.tensors)
                for name in names:
                    t, place = value[name], f"{where}[{name!r}]"
                    if dtype is not None and t.is_floating_point():
                        t = _quantise(t, dtype, place)
                    self.tensor(t, place, finite)
                node = {"m": [first, names, [i for i, name in enumerate(names) if name in value.buffers]]}
                return node if dtype is None else {**node, "as": dtype}
            case Record():
                return {"r": [value.class_id(), self.fields(value, where)]}
            case Frozen():
                return {"k": self._kept(value, where)}
            case Mapping():
                if type(value) not in _MAPS:
                    raise _changeling(value, where, "dict")
                items = []
                for key, item in value.items():
                    if type(key) not in (int, str):
                        raise WireError(f"{where} has the key {key!r}. Use whole numbers or strings as keys.")
                    items.append([key, self.node(item, f"{where}[{key!r}]", dtype, finite, stage)])
                return {"d": items}
            case list() | tuple():
                if type(value).__iter__ not in (list.__iter__, tuple.__iter__):
                    raise _changeling(value, where, "list")
                nodes = [self.node(item, f"{where}[{i}]", dtype, finite, stage) for i, item in enumerate(value)]
                return {"l" if isinstance(value, list) else "u": nodes}
        if isinstance(value, nn.Module):
            raise WireError(f"{where} is a live module. Send its state: state_of(module).")
        raise WireError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}. Only tensors, states, numbers, short "
            "strings, and lists, tuples, dicts and records of these can travel."
        )

    def _kept(self, value: Frozen, where: str) -> Any:
        if type(value) is not Frozen:
            raise _changeling(value, where, "Frozen")
        if not self.keeps:
            raise WireError(
                f"{where} is frozen, which stays with its client as it is. Take a copy: what its `read` returns."
            )
        if any(content.changed for content in value.contents):
            raise ContractError(
                f"{where} was changed in place after it was frozen, for all clients that hold it. Change a copy: what "
                "its `read` returns."
            )
        first = len(self.tensors)
        node = self.node(value.inside, where, finite=False)  # its numbers were checked when it was frozen
        self.frozen.update(zip(range(first, len(self.tensors)), value.contents, strict=True))
        return node

    def fields(self, record: Record, where: str) -> dict[str, Any]:
        nodes = {}
        hints = _hints(type(record))
        for name, declared in record.declared().items():
            value, place = getattr(record, name), f"{where}.{name}"
            nodes[name] = self.field(value, place, declared)
            _check_type(value, hints[name], place)
        return nodes

    def field(self, value: Any, place: str, declared: Declared | None) -> Any:
        """Return the node of a field by its declaration, compressed if the setting asks for it."""
        stage = self.compress if applies(declared) else None
        if stage is not None and type(value) is State:
            return self._squeezed(value, place, stage, reference(declared, value, self.answered))
        dtype, finite = (None, True) if declared is None else (declared.dtype, declared.finite)
        return self.node(value, place, dtype, finite, stage)

    def _squeezed(self, state: State, where: str, stage: Stage, base: tuple[str, State] | None) -> Any:
        sent, shapes = squeezed(state, stage, base[1] if base else None)
        node = self.node(State(sent, state.buffers), where)
        return {**node, "z": [stage.name, shapes, base[0] if base else None]} if shapes else node

    def _parts(self, t: Tensor, where: str, stage: Stage) -> tuple[Tensor, ...] | None:
        if type(t) is not Tensor:
            raise _changeling(t, where, "Tensor")
        return stage.parts(t) if t.layout == torch.strided else None

    def _row(self, parts: tuple[Tensor, ...], where: str) -> int:
        """Add the parts and return the number of the first; the others follow it."""
        first = len(self.tensors)
        for part in parts:
            self.tensor(part, where, finite=True)
        return first


_MAPS = (dict, OrderedDict, defaultdict, Counter, types.MappingProxyType)


def _changeling(value: Any, where: str, plain: str) -> WireError:
    return WireError(
        f"{where} is a {type(value).__qualname__}. A subclass may misreport its content. Send a plain {plain}."
    )


def _quantise(t: Tensor, dtype: str, where: str) -> Tensor:
    if dtype != "uint8":
        return t.to(DTYPES[dtype])
    if not bool(torch.isfinite(t).all()):
        raise WireError(f"{where} holds NaN or infinity, which no uint8 can carry. Training has probably diverged.")
    if t.numel() and float(t.abs().max()) > 1 + 1e-6:
        raise WireError(f"{where} leaves [-1, 1], the range that travels as uint8. Clamp it before sending.")
    return ((t.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def _dequantise(t: Tensor, dtype: str) -> Tensor:
    real = t.to(torch.get_default_dtype())
    return real / 127.5 - 1 if dtype == "uint8" else real


def _digest_there(blob: bytes, head: Header, frozen: Mapping[int, str]) -> str:
    """Return the digest of a message from its bytes: of the tree, and of the tensors as they lie in the message. For
    frozen ones, their digests are given.
    """
    h, view = xxhash.xxh3_128(head.text.encode()), memoryview(blob)
    for i in range(len(head.tensors)):
        dtype, shape, begin, end = head.tensors[i]
        h.update(f"{STORED_TYPES[dtype]}{list(shape)}".encode())
        h.update(frozen[i].encode() if i in frozen else view[begin:end])
    return h.hexdigest()


def _frozen_there(blob: bytes, head: Header, known: Mapping[int, str] | None = None) -> dict[int, str]:
    """Return, by number, the digests of the frozen tensors of a client's state: known ones, or from its bytes."""
    view, found = memoryview(blob), dict(known or {})
    for i in _frozen_numbers(head) - found.keys():
        found[i] = xxhash.xxh3_128_hexdigest(view[slice(*head.tensors[i][2:])])
    return found


def _frozen_numbers(head: Header) -> set[int]:
    return frozen_in(head.tree) if _FROZEN in head.text else set()


def digest_of(value: Any) -> str:
    """Return a digest of any tree that may travel. It depends on the content only, not on where it is in memory."""
    encoder = _Encoder(keeps=True)
    tree = json.dumps(encoder.node(value, "value", None, False), separators=(",", ":"), allow_nan=False)
    return encoder.digest(tree)


def freeze(value: Any) -> Frozen:
    """Return a value frozen: a client may keep it as long as it likes, and read it, and nobody can change it.

    Clients of one process that freeze equal tensors hold one copy of them. Freeze what is large and stays. What is
    frozen already comes back.
    """
    if type(value) is Frozen:
        return value
    sent = _Encoder()
    node = sent.node(value, "what is frozen")
    encoder = _Encoder()  # as it would arrive: a LowRank as a State, whose tensors are others than those that travel
    node = encoder.node(_Decoder(sent.tensors).value(node), "what is frozen")
    encoder._checked()
    contents = [frozen_content(t) for t in encoder.tensors]
    return Frozen(_Decoder([content.of for content in contents]).value(node), contents)


def encode_tree(value: Any, where: str = "value", dtype: Dtype | None = None, finite: bool = True) -> bytes:
    """Return any tree that may travel as bytes. `dtype` and `finite` mean the same as in a field's declaration."""
    encoder = _Encoder()
    return _finished(encoder, encoder.node(value, where, dtype, finite))


def _finished(encoder: _Encoder, node: Any) -> bytes:
    tree = json.dumps(node, separators=(",", ":"), allow_nan=False)
    tensors = encoder.settle()
    return packed(tensors, f"{FORMAT}:{digest(tree, tensors, encoder.frozen)}:{tree}")


def _stays(record: Record) -> bool:
    """Return whether a record is no message, but what a party keeps."""
    return not isinstance(record, Up | Down)


def encode(record: Record, compress: Stage | None = None, answered: Record | None = None) -> bytes:
    """Return the record as bytes. A `WireError` names the message and the field that cannot travel.

    With `compress`, releases go through that stage. `answered` is the message to which this one is the reply.
    """
    encoder = _Encoder(compress, answered, _stays(record))
    return _finished(encoder, encoder.node(record, type(record).__name__))


def encode_lazily(record: Record, device: torch.device | None) -> Blob:
    """Encode a record like `encode`, but serialise it only when somebody needs the bytes.

    The reader is in this process, on `device`; None means that it is in another process, and gives bytes at once.

    A large tensor that another message or state in this process holds already is neither checked nor copied again.
    Examples are a client's memory that did not change, and its model if the client has just sent it.
    """
    encoder = _Encoder(keeps=_stays(record))
    node = encoder.node(record, type(record).__name__)
    if device is None or device.type not in HELD_ON or any(t.dtype not in NAMES for t in encoder.tensors):
        return _finished(encoder, node)
    return encoder.lazily(json.dumps(node, separators=(",", ":"), allow_nan=False))


def held_again(blob: bytes, apart: Sequence[Apart] = ()) -> Held:
    """Return a client's encoded state as a `Held` message, so that unchanged large tensors are recognised later.

    `apart` gives the tensors, in the order of their places, that lie in files of their own: their bytes are not in
    `blob`. Of those, frozen ones are not read here. The numbers are not checked again: they were checked when the state
    was encoded.
    """
    head = read_header(blob, sum(part.end - part.begin for part in apart))
    with _reading(blob):
        frozen_at = {head.tensors[i][2:]: i for i in _frozen_numbers(head)}
        whole, kept = _joined(blob, apart, {place: i for place, i in frozen_at.items() if place[0] < place[1]})
        head = dataclasses.replace(head, tensors=_closed_up(head.tensors, kept))
        digests = _frozen_there(whole, head, {i: part.digest for i, part in kept.items()})
        found = _tensors(whole, head, torch.device("cpu"), digests, kept)
        frozen = {i: part.content(*head.tensors[i][:2]) for i, part in kept.items()}
        frozen |= {i: frozen_content(found[i], digests[i]) for i in digests.keys() - kept.keys()}
        tensors = [frozen[i].of if i in kept else found[i] for i in range(len(head.tensors))]
        known = contents_of(tensors, frozen)
        for content in known.values():
            content.finite = True
        return Held(head.text, tensors, [], known, mine=True, frozen=frozen)


def _joined(
    blob: bytes, apart: Sequence[Apart], frozen: Mapping[tuple[int, int], int]
) -> tuple[bytes, dict[int, Apart]]:
    """Return a state's bytes with those of the tensors apart in their places, but without those that are frozen, and
    these by number. `frozen` gives the numbers by place.
    """
    kept: dict[int, Apart] = {}
    view, whole, at, gone = memoryview(blob), list[Any](), 0, 0
    for part in apart:
        here = part.begin - gone
        gone += part.end - part.begin
        if (part.begin, part.end) in frozen:
            kept[frozen[part.begin, part.end]] = part
        else:
            whole += [view[at:here], part.read()]
            at = here
    return b"".join([*whole, view[at:]]) if whole else blob, kept


def _closed_up(spans: Spans, without: Collection[int]) -> Spans:
    """Return the places of tensors in a message that lacks the bytes of some of them."""
    found, gone = {}, 0
    for i in sorted(spans, key=lambda i: spans[i][2:]):
        dtype, shape, begin, end = spans[i]
        gone += end - begin if i in without else 0
        found[i] = dtype, shape, begin - gone, end - gone
    return found


def encode_field(
    value: Any, where: str, declared: Declared | None, compress: Stage | None, answered: Record | None
) -> bytes:
    """Return one field of a message as bytes, encoded as in the whole message."""
    encoder = _Encoder(compress, answered)
    return _finished(encoder, encoder.field(value, where, declared))


# --- decoding --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Header:
    """Everything in an encoded message but its tensors: enough to measure and store it without decoding it."""

    tree: Any
    text: str
    told: str | Held  # the digest, or a message on another device that computes it once somebody asks
    tensors: dict[int, tuple[str, tuple[int, ...], int, int]]  # dtype, shape, begin, end (in the blob)

    @property
    def digest(self) -> str:
        return self.told.digest if isinstance(self.told, Held) else self.told

    @property
    def costly(self) -> bool:
        """Return whether the digest is not known and needs tensors from another device."""
        return isinstance(self.told, Held) and "digest" not in vars(self.told)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Header) and self._parts == other._parts

    def __reduce__(self) -> tuple[Any, ...]:
        return Header, self._parts

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.tree, self.text, self.digest, self.tensors


def read_header(blob: Blob | memoryview, apart: int = 0) -> Header:
    """Return the header of a message, of whose tensors so many bytes lie apart."""
    if isinstance(blob, Held):
        return Header(blob.tree, blob.text, blob if blob.elsewhere else blob.digest, blob.spans)
    try:
        length = int.from_bytes(bytes(blob[:8]), "little")
        if length > len(blob) - 8:
            raise ValueError(f"the header claims {length} bytes, but {len(blob)} arrived")
        head = json.loads(bytes(blob[8 : 8 + length]))
        version, digest, text = head.pop("__metadata__")["fedaudit"].split(":", 2)
        if version != str(FORMAT):
            raise ValueError(f"it has format {version}, and this program reads format {FORMAT}")
        start = 8 + length
        tensors = {int(name): _placed(t, start, len(blob) + apart) for name, t in head.items()}
        return Header(json.loads(text), text, digest, tensors)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as e:
        raise WireError(f"A message of {len(blob)} bytes is damaged or not a message at all: {e}.") from e


def tree_of(blob: Blob) -> tuple[Any, Spans]:
    """Return the tree of a message, and the positions of its tensors."""
    if isinstance(blob, Held):
        return blob.tree, blob.spans  # does not compute the digest
    head = read_header(blob)
    return head.tree, head.tensors


def known_content(blob: Blob, i: int) -> str | None:
    """Return the digest of the bytes of tensor i of a message, or None if it has not been computed."""
    return blob.content(i) if isinstance(blob, Held) else None


def content_of(blob: Blob, head: Header) -> Callable[[int], Any]:
    """Return a function that gives the bytes of a message's tensor by its number."""
    if isinstance(blob, Held):
        tensors = blob.tensors
        return lambda i: memoryview(raw(tensors[i]))
    view = memoryview(blob)
    return lambda i: view[slice(*head.tensors[i][2:])]


def _placed(t: Any, start: int, length: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return one row of the table of tensors. Raise, before any memory is allocated, if shape and bytes disagree."""
    shape, (begin, end) = t["shape"], t["data_offsets"]
    if not all(type(n) is int for n in (*shape, begin, end)) or not 0 <= begin <= end <= length - start:
        raise ValueError(
            f"it cannot hold a tensor of shape {str(shape)[:80]} from byte {str(begin)[:20]} to {str(end)[:20]}"
        )
    check_size(str(t["dtype"]), shape, end - begin)
    return str(t["dtype"]), tuple(shape), start + begin, start + end


def check_size(dtype: str, shape: list[int], size: int) -> None:
    """Raise unless `size` bytes are a tensor of that shape: memory must not be allocated on a file's word alone."""
    if dtype not in STORED_TYPES:
        raise ValueError(f"there is no tensor type {dtype[:40]!r}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise ValueError(f"{str(shape)[:80]} is not a tensor's shape")
    if math.prod(shape) * STORED_TYPES[dtype].itemsize != size:
        raise ValueError(f"{size} bytes are not a {dtype} tensor of shape {str(shape)[:80]}")


Base = Callable[[str], Any]  # gives the value of a field of the answered message


def _no_base(field: str) -> Any:
    raise ValueError(f"it is a change of the state that was sent in {field!r}, and that message is not here")


class _Decoder:
    def __init__(
        self,
        tensors: list[Tensor],
        base: Base = _no_base,
        frozen: Mapping[int, str] | None = None,
        device: torch.device | None = None,
    ):
        """Begin. `frozen` gives the digests of frozen tensors, and `device` says where they are read."""
        self.tensors, self.base, self.device = tensors, base, device
        self.contents = {i: frozen_content(tensors[i], found) for i, found in (frozen or {}).items()}
        for i, content in self.contents.items():
            tensors[i] = content.of
        self.plain = False

    def value(self, node: Any) -> Any:
        match node:
            case None | bool() | int() | float() | str():
                return node
            case {"f": "nan" | "inf" | "-inf" as text, **rest} if not rest:
                return float(text)
            case {"t": int(i), **rest} if not rest:
                return self.tensors[i]
            case {"q": int(i), "as": str(dtype), **rest} if not rest and dtype in DTYPES:
                return _dequantise(self.tensors[i], dtype)
            case {"z": [int(i), str(how), list(shape)], **rest} if not rest and how in PARTS:
                return from_parts(how, self.tensors[i : i + len(PARTS[how])], shape)
            case {"m": [int(first), list(names), list(buffers)], "z": [str(how), dict(shapes), base], **rest} if (
                not rest and how in PARTS
            ):
                by_name = dict(zip(names, self.tensors[first : first + len(names)], strict=True))
                state = None if base is None else self.base(str(base))
                return State(restored(how, by_name, shapes, state), buffers=[names[i] for i in buffers])
            case {"m": [int(first), list(names), list(buffers)], **rest} if rest.keys() <= {"as", "svd"}:
                tensors = self.tensors[first : first + len(names)]
                if "as" in rest:
                    sent_as = str(rest["as"])
                    tensors = [_dequantise(t, sent_as) if t.dtype == DTYPES[sent_as] else t for t in tensors]
                by_name, ranks = dict(zip(names, tensors, strict=True)), cast(Any, rest.get("svd", {}))
                return State(recombined(by_name, dict(ranks)), buffers=[names[i] for i in buffers])
            case {"d": list(items), **rest} if not rest:
                return {self._key(key): self.value(item) for key, item in items}
            case {"l": list(items), **rest} if not rest:
                return [self.value(item) for item in items]
            case {"u": list(items), **rest} if not rest:
                return tuple(self.value(item) for item in items)
            case {"k": item, **rest} if not rest:
                contents = [self.contents[i] for i in sorted(tensors_in(item))]
                return Frozen(self.value(item), contents, self.device)
            case {"r": [str(name), dict(fields)], **rest} if not rest:
                values = {field: self.value(item) for field, item in fields.items()}
                return values if self.plain else self._record(name, values)
        raise ValueError(f"there is no such node: {str(node)[:80]}")

    @staticmethod
    def _key(key: Any) -> int | str:
        if type(key) not in (int, str):
            raise ValueError(f"{key!r} is not a key: keys are whole numbers or strings")
        return key

    @staticmethod
    def _record(name: str, values: dict[str, Any]) -> Record:
        cls = class_named(name)
        if cls is None:
            raise ValueError(f"no class {name} is defined here")
        if values.keys() != cls.declared().keys():
            raise ValueError(f"{name} has the fields {sorted(cls.declared())}, not {sorted(values)}")
        hints = _hints(cls)
        for field, value in values.items():
            _check_type(value, hints[field], f"{cls.__name__}.{field}")
        return cls(**values)


def decode_tree(
    blob: Blob,
    *,
    device: torch.device | str = "cpu",
    plain: bool = False,
    base: Base = _no_base,
    look: bool = False,
) -> Any:
    """Return the encoded value in fresh memory.

    `plain` gives dicts for records, for readers without the classes. `base` gives the fields of the answered message;
    compressed states are changes of those. `look` promises that the caller changes nothing, so that held tensors need
    not be copied.
    """
    if len(blob) > BLOB_LIMIT:
        raise WireError(f"A message of {len(blob)} bytes is over the limit of {BLOB_LIMIT}. Send it in parts.")
    at = torch.device(device)
    if isinstance(blob, Held):
        digests = {i: content.digest for i, content in blob.frozen.items()}
        tensors = (blob.seen(at) if look else None) or blob.copies(at)
        decoder = _Decoder(tensors, base, digests, there(at) if digests else None)
        decoder.plain = plain
        return decoder.value(blob.tree)
    head = read_header(blob)
    with _reading(blob):
        digests = _frozen_there(blob, head)
        decoder = _Decoder([*_tensors(blob, head, at, digests).values()], base, digests)
        decoder.plain = plain
        return decoder.value(head.tree)


def _tensors(
    blob: bytes, head: Header, device: torch.device, frozen: Mapping[int, str], but: Collection[int] = ()
) -> dict[int, Tensor]:
    """Return the tensors of a message in fresh memory, by number. Raise if the checksum does not match.

    `frozen` gives the digests of the frozen ones. Those in `but` lie apart, and are left out.
    """
    if _digest_there(blob, head, frozen) != head.digest:
        raise ValueError("the checksum does not match")
    own = [i for i in range(len(head.tensors)) if i not in but]
    return dict(zip(own, unpacked(blob, {n: head.tensors[i] for n, i in enumerate(own)}, device), strict=True))


@contextlib.contextmanager
def _reading(blob: bytes) -> Iterator[None]:
    """Turn every error while a message is read into a `WireError`, because the message is at fault."""
    try:
        yield
    except WireError as e:
        raise WireError(f"A message of {len(blob)} bytes does not hold what its class declares: {e}") from e
    except (
        ValueError, KeyError, IndexError, TypeError, AssertionError, AttributeError, OverflowError, RuntimeError,
        SafetensorError, RecursionError,
    ) as e:  # fmt: skip
        raise WireError(f"A message of {len(blob)} bytes is damaged or not a message at all: {e}.") from e


_FROZEN = '{"k":'  # in the text of every tree with a frozen value, and of few others


def _has_frozen(blob: Blob) -> bool:
    """Return whether a frozen value is in an encoded record. Most are told apart without a look at the tree."""
    if isinstance(blob, Held):
        return bool(blob.frozen)
    head = blob[8 : 8 + int.from_bytes(blob[:8], "little")]
    return json.dumps(_FROZEN)[1:-1].encode() in head and bool(frozen_in(read_header(blob).tree))


R = TypeVar("R", bound=Record)


def decode(
    blob: Blob,
    cls: type[R],
    *,
    device: torch.device | str = "cpu",
    answered: Callable[[], Record] | None = None,
    look: bool = False,
) -> R:
    """Return a message or another record of class `cls`.

    `answered` gives the message to which a compressed one is the reply. `look` means the same as in `decode_tree`.
    """
    base = _no_base if answered is None else lambda field: getattr(answered(), field)
    value = decode_tree(blob, device=device, base=base, look=look)
    if not isinstance(value, cls):
        raise WireError(f"A {type(value).__name__} arrived where a {cls.__name__} was expected.")
    if not _stays(value) and _has_frozen(blob):
        raise WireError(f"A {type(value).__name__} arrived with a frozen value, which stays with its client.")
    return value


# --- types -----------------------------------------------------------------------------------------------------

_hint_cache: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _hint_cache:
        try:
            _hint_cache[cls] = get_type_hints(cls)
        except NameError as e:
            raise ContractError(f"{cls.__qualname__}: {e}. Define the types of its fields at module level.") from e
    return _hint_cache[cls]


def _fits(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if origin is list:
        return isinstance(value, list) and all(_fits(v, args[0]) for v in value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(v, args[0]) for v in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _check_type(value: Any, hint: Any, where: str) -> None:
    if not _fits(value, hint):
        name = getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
        raise WireError(f"{where} is a {type(value).__name__}, but it is declared as {name}.")


def value_of(node: Any, tensor: Callable[[int], Tensor], *, plain: bool = False, base: Base = _no_base) -> Any:
    """Return the value of an encoded tree. Tensors are read one by one: one field does not load the others.

    `plain` gives dicts for records, for readers without the classes.
    """
    decoder = _Decoder(cast(Any, _Lazy(tensor)), base)
    decoder.plain = plain
    return decoder.value(node)


def stored_tensor(dtype: str, shape: list[int], data: bytearray) -> Tensor:
    """Return a tensor made from its bytes. `dtype` is safetensors' name of the type."""
    check_size(dtype, shape, len(data))
    if not data:
        return torch.empty(shape, dtype=STORED_TYPES[dtype])
    return torch.frombuffer(data, dtype=STORED_TYPES[dtype]).reshape(shape)


class _Lazy:
    """Reads a tensor only when it is asked for, so that one field of a message does not load the others."""

    def __init__(self, read: Any):
        self.read = read

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self.read(j) for j in range(i.start, i.stop)]
        return self.read(i)
