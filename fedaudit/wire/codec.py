"""Records: frozen, typed trees of tensors, model states, numbers and short strings, and their one codec.

A message is a record that crosses the wire, `Down` (server to client) or `Up` (client to server). The same
codec serves the wire, the checkpoints and the clients' memory, so whatever a method keeps can also be sent,
counted and resumed.

The format is safetensors. Tensors are named by their number; the tree around them is JSON under the one
metadata key `fedaudit` (safetensors writes several keys in no fixed order), together with an XXH3 digest over
the tree and all tensor bytes. Nothing in it can execute: decoding makes plain values and classes that the
running program has itself defined.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin, get_type_hints

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn

from fedaudit.errors import ContractError, WireError, unknown

FORMAT = 1
KINDS = frozenset({
    "weights", "gradients", "layers", "statistics", "embeddings", "labels", "logits", "soft_labels", "prototypes",
    "label_counts", "count", "synthetic_images",
})  # fmt: skip
STRING_LIMIT = 4096  # characters: a longer text is data, and data travels as a tensor
BLOB_LIMIT = 1 << 36  # bytes
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}

Dtype = Literal["float16", "bfloat16", "uint8"]
Via = Literal["data", "model", "released"]
Unit = Literal["record", "client"]
Depends = Literal["record", "all", "class", "histogram", "range"]


class State(dict[str, Tensor]):
    """A model's parameters and buffers by name. It remembers which are buffers: papers count parameters only."""

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = (), buffers: Iterable[str] = ()):
        super().__init__(tensors)
        self.buffers = frozenset(buffers) & self.keys()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.items() if name not in self.buffers}


Part = Callable[[nn.Module], Collection[str]]  # the names of those tensors of a model that travel


def state_of(model: nn.Module, part: Part | None = None) -> State:
    """A copy of the model's state, or of a part of it: later training does not reach it."""
    parameters = dict(model.named_parameters())
    names = None if part is None else part(model)
    tensors = {n: t.detach().clone() for n, t in model.state_dict().items() if names is None or n in names}
    return State(tensors, buffers=tensors.keys() - parameters.keys())


M = TypeVar("M", bound=nn.Module)


def load(model: M, state: Mapping[str, Tensor], part: Part | None = None) -> M:
    """Put `state` into `model`, or into a part of it (copied, never aliased), and return the model."""
    try:
        if part is not None and (wrong := set(part(model)) ^ state.keys()):
            raise RuntimeError(f"{', '.join(sorted(wrong))} on one side only")
        model.load_state_dict({**model.state_dict(), **state} if part is not None else state, strict=True)
    except RuntimeError as e:
        raise ContractError(
            f"A state does not fit the model {getattr(model, 'arch', type(model).__name__)!r}: {e}. "
            "Send it to a client of the same architecture (server.arch(k)), or load the layers one by one."
        ) from e
    return model


# --- declarations ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Declared:
    """What the author of a message says about one of its fields."""

    role: Literal["private", "public", "relay"]
    kind: str | None = None
    via: Via | None = None
    unit: Unit | None = None
    depends: Depends | None = None
    dtype: Dtype | None = None
    finite: bool = True


def _kind(kind: str) -> str:
    if kind not in KINDS:
        raise ContractError(unknown("kind of release", kind, KINDS))
    return kind


def private(
    kind: str,
    *,
    via: Via,
    unit: Unit,
    depends: Depends | None = None,
    dtype: Dtype | None = None,
    finite: bool = True,
) -> Any:
    """A release: computed from the client's private data, directly (`via="data"`) or through its model only, or from
    what `client.protect` gave back (`via="released"`: post-processing).

    `unit="record"` promises one row per record on dimension 0. `depends` says how rows depend on records where the
    kind and unit do not tell (see fedaudit.privacy.mechanism). `dtype` is what travels, applied after the noise;
    `uint8` takes values in [-1, 1], the range of images.
    """
    if via not in get_args(Via) or unit not in get_args(Unit):
        raise ContractError(f"private({kind!r}): via is one of {get_args(Via)}, unit one of {get_args(Unit)}.")
    if depends is not None and depends not in get_args(Depends):
        raise ContractError(unknown(f"depends of private({kind!r})", depends, get_args(Depends)))
    if dtype is not None and dtype not in _DTYPES:
        raise ContractError(unknown(f"dtype of private({kind!r})", dtype, _DTYPES))
    return dataclasses.field(metadata={"declared": Declared("private", _kind(kind), via, unit, depends, dtype, finite)})


def public(*, finite: bool = True) -> Any:
    """Not computed from private data: a bit-for-bit test holds every method to it."""
    return dataclasses.field(metadata={"declared": Declared("public", finite=finite)})


def relay(kind: str, *, dtype: Dtype | None = None, finite: bool = True) -> Any:
    """In a `Down` message: another client's release, passed on. It costs no more, but more parties see it."""
    return dataclasses.field(metadata={"declared": Declared("relay", _kind(kind), dtype=dtype, finite=finite)})


_classes: dict[str, type[Record]] = {}


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(private, public, relay))
class Record:
    """Base of everything that is sent or kept. A subclass is a frozen dataclass; it needs no decorator."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        cls._check_declarations()
        _classes[cls.class_id()] = cls

    @classmethod
    def _check_declarations(cls) -> None:
        for name, declared in cls.declared().items():
            if declared is not None and not issubclass(cls, Up | Down):
                raise ContractError(f"{cls.__name__}.{name}: only fields of Up and Down messages are declared.")

    @classmethod
    def declared(cls) -> dict[str, Declared | None]:
        return {f.name: f.metadata.get("declared") for f in dataclasses.fields(cast(Any, cls))}

    @classmethod
    def class_id(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


def message_classes(module: str) -> list[type[Record]]:
    """The record classes that a module defined or imported messages from, nearest first."""
    own = [cls for cls in _classes.values() if cls.__module__ == module]
    return own + [cls for cls in _classes.values() if cls.__module__ != module]


class Up(Record):
    """A message from a client to the server. Each field says whether it was computed from private data."""

    @classmethod
    def _check_declarations(cls) -> None:
        for name, declared in cls.declared().items():
            if declared is None or declared.role == "relay":
                raise ContractError(
                    f"{cls.__name__}.{name} leaves a client undeclared. Write `{name}: ... = private(kind, via=..., "
                    "unit=...)` if it was computed from private data, `= public()` if it was not."
                )


class Down(Record):
    """A message from the server to a client. A field that passes on what another client sent is a `relay`."""

    @classmethod
    def _check_declarations(cls) -> None:
        for name, declared in cls.declared().items():
            if declared is not None and declared.role == "private":
                raise ContractError(
                    f"{cls.__name__}.{name}: the server has no private data. Use relay(kind) or nothing."
                )


# --- sizes -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of a field. `payload`: elements x element size without buffers, as papers count; `buffers` beside it.

    `header` is what names and shapes cost on the wire: an estimate for planning, never compared.
    """

    payload: int = 0
    buffers: int = 0
    header: int = dataclasses.field(default=0, compare=False)

    def __add__(self, other: Size | int) -> Size:
        other = as_size(other)
        return Size(self.payload + other.payload, self.buffers + other.buffers, self.header + other.header)

    __radd__ = __add__  # sum() starts from 0

    def __mul__(self, times: int) -> Size:
        return Size(self.payload * times, self.buffers * times, self.header * times)

    __rmul__ = __mul__


FRAME = 160  # bytes of a message around its fields, about
TENSOR_HEADER = 70  # bytes that describe one tensor, about


def model_size(model: nn.Module, part: Part | None = None) -> Size:
    """A whole model, or a part of it, as `state_of` sends it. Works on the meta device."""
    names = None if part is None else part(model)
    tensors = {name: t for name, t in model.state_dict().items() if names is None or name in names}
    bytes_of = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    payload = sum(bytes_of[name] for name, _ in model.named_parameters() if name in bytes_of)
    header = sum(TENSOR_HEADER + len(name) + 5 for name in tensors)
    return Size(payload, sum(bytes_of.values()) - payload, header)


def as_size(size: Size | int) -> Size:
    return size if isinstance(size, Size) else Size(int(size))


def size_of(value: Any) -> Size:
    """Tensors: elements x element size. Numbers: 8 bytes, truth values 1, strings their UTF-8 length."""
    match value:
        case None:
            return Size()
        case Tensor():
            return Size(value.numel() * value.element_size())
        case State():
            every = {name: t.numel() * t.element_size() for name, t in value.items()}
            buffers = sum(every[name] for name in value.buffers)
            return Size(sum(every.values()) - buffers, buffers)
        case bool():
            return Size(1)
        case int() | float():
            return Size(8)
        case str():
            return Size(len(value.encode()))
        case Mapping():
            return sum((size_of(k) + size_of(v) for k, v in value.items()), Size())
        case list() | tuple():
            return sum((size_of(v) for v in value), Size())
        case Record():
            return sum((size_of(getattr(value, name)) for name in value.declared()), Size())
    raise WireError(f"{type(value).__name__} has no size on the wire.")


# --- encoding --------------------------------------------------------------------------------------------------


class _Encoder:
    """Collects tensors while it turns a value into the JSON tree that stands around them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._storages: set[int] = set()

    def tensor(self, t: Tensor, where: str, finite: bool) -> int:
        if t.layout != torch.strided or t.is_quantized or t.device.type == "meta":
            raise WireError(f"{where} is a {t.layout} tensor on {t.device}: only dense tensors with content travel.")
        if t.is_complex():
            raise WireError(f"{where} is complex. Send its real and imaginary part (torch.view_as_real).")
        # A sum is finite unless an entry is not, or it overflows: only then look at every entry.
        suspect = finite and t.is_floating_point() and t.numel() and not torch.isfinite(t.detach().sum())
        if suspect and not bool(torch.isfinite(t).all()):
            raise WireError(
                f"{where} holds NaN or infinity. Training has probably diverged: lower the learning rate. If "
                "such values are meant, declare the field with finite=False."
            )
        t = t.detach().to("cpu").contiguous()
        storage = t.untyped_storage().data_ptr()
        if storage in self._storages or (t.numel() and t.untyped_storage().nbytes() != t.numel() * t.element_size()):
            t = t.clone()  # tied or sliced: safetensors takes neither, and the receiver gets its own memory anyway
        self._storages.add(t.untyped_storage().data_ptr())
        self.tensors.append(t)
        return len(self.tensors) - 1

    def node(self, value: Any, where: str, dtype: str | None = None, finite: bool = True) -> Any:
        match value:
            case None | bool():
                return value
            case int():
                if not -(1 << 63) <= value < 1 << 63:
                    raise WireError(f"{where} = {value} does not fit 64 bits.")
                return value
            case float():
                if math.isfinite(value):
                    return value
                if finite:
                    raise WireError(f"{where} is {value}. If that is meant, declare the field with finite=False.")
                return {"f": str(value)}
            case str():
                if len(value) > STRING_LIMIT:
                    raise WireError(f"{where} is a text of {len(value)} characters; {STRING_LIMIT} may travel.")
                return value
            case nn.Parameter():
                raise WireError(f"{where} is a live parameter. Send a copy: state_of(model), or tensor.detach().")
            case Tensor():
                if dtype is None or not value.is_floating_point():
                    return {"t": self.tensor(value, where, finite)}
                return {"q": self.tensor(_quantise(value, dtype, where), where, finite), "as": dtype}
            case State():
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
            case Mapping():
                items = []
                for key, item in value.items():
                    if type(key) not in (int, str):
                        raise WireError(f"{where} has the key {key!r}: keys are whole numbers or strings.")
                    items.append([key, self.node(item, f"{where}[{key!r}]", dtype, finite)])
                return {"d": items}
            case list() | tuple():
                nodes = [self.node(item, f"{where}[{i}]", dtype, finite) for i, item in enumerate(value)]
                return {"l" if isinstance(value, list) else "u": nodes}
        if isinstance(value, nn.Module):
            raise WireError(f"{where} is a live module. Send its state: state_of(module).")
        raise WireError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}. Only tensors, states, numbers, short "
            "strings, and lists, tuples, dicts and records of these can travel."
        )

    def fields(self, record: Record, where: str) -> dict[str, Any]:
        nodes = {}
        hints = _hints(type(record))
        for name, declared in record.declared().items():
            value, place = getattr(record, name), f"{where}.{name}"
            nodes[name] = self.node(
                value, place, declared.dtype if declared else None, declared.finite if declared else True
            )
            _check_type(value, hints[name], place)
        return nodes


def _quantise(t: Tensor, dtype: str, where: str) -> Tensor:
    if dtype != "uint8":
        return t.to(_DTYPES[dtype])
    if not bool(torch.isfinite(t).all()):
        raise WireError(f"{where} holds NaN or infinity, which no uint8 can carry. Training has probably diverged.")
    if t.numel() and float(t.abs().max()) > 1 + 1e-6:
        raise WireError(f"{where} leaves [-1, 1], the range that travels as uint8. Clamp it before sending.")
    return ((t.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def _dequantise(t: Tensor, dtype: str) -> Tensor:
    real = t.to(torch.get_default_dtype())
    return real / 127.5 - 1 if dtype == "uint8" else real


def _raw(t: Tensor) -> Any:
    return t.reshape(-1).view(torch.uint8).numpy() if t.numel() else b""


def _digest(tree: str, tensors: list[Tensor]) -> str:
    h = xxhash.xxh3_128(tree.encode())
    for t in tensors:
        h.update(f"{t.dtype}{list(t.shape)}".encode())
        h.update(_raw(t))
    return h.hexdigest()


def encode_tree(value: Any, where: str = "value", dtype: Dtype | None = None, finite: bool = True) -> bytes:
    """Any tree that may travel, as bytes; `dtype` and `finite` as in the declaration of a field."""
    encoder = _Encoder()
    tree = json.dumps(encoder.node(value, where, dtype, finite), separators=(",", ":"), allow_nan=False)
    head = f"{FORMAT}:{_digest(tree, encoder.tensors)}:{tree}"
    return safetensors.torch.save({str(i): t for i, t in enumerate(encoder.tensors)}, metadata={"fedaudit": head})


def encode(record: Record) -> bytes:
    """The record as bytes. `WireError` names the message and the field that cannot travel."""
    return encode_tree(record, type(record).__name__)


# --- decoding --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Header:
    """What stands around the tensors of a blob: enough to meter and store it without decoding it."""

    tree: Any
    text: str
    digest: str
    tensors: dict[int, tuple[str, tuple[int, ...], int, int]]  # dtype, shape, begin, end (in the blob)


def read_header(blob: bytes | memoryview) -> Header:
    try:
        length = int.from_bytes(bytes(blob[:8]), "little")
        if length > len(blob) - 8:
            raise ValueError(f"the header claims {length} bytes, {len(blob)} arrived")
        head = json.loads(bytes(blob[8 : 8 + length]))
        version, digest, text = head.pop("__metadata__")["fedaudit"].split(":", 2)
        if version != str(FORMAT):
            raise ValueError(f"format {version}, this is a reader of format {FORMAT}")
        start = 8 + length
        tensors = {
            int(name): (
                str(t["dtype"]),
                tuple(int(n) for n in t["shape"]),
                start + int(t["data_offsets"][0]),
                start + int(t["data_offsets"][1]),
            )
            for name, t in head.items()
        }
        return Header(json.loads(text), text, digest, tensors)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise WireError(f"A message of {len(blob)} bytes is damaged or no message at all: {e}.") from e


class _Decoder:
    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self.plain = False

    def value(self, node: Any) -> Any:
        match node:
            case None | bool() | int() | float() | str():
                return node
            case {"f": "nan" | "inf" | "-inf" as text, **rest} if not rest:
                return float(text)
            case {"t": int(i), **rest} if not rest:
                return self.tensors[i]
            case {"q": int(i), "as": str(dtype), **rest} if not rest and dtype in _DTYPES:
                return _dequantise(self.tensors[i], dtype)
            case {"m": [int(first), list(names), list(buffers)], **rest} if rest.keys() <= {"as"}:
                tensors = self.tensors[first : first + len(names)]
                if "as" in rest:
                    sent_as = str(rest["as"])
                    tensors = [_dequantise(t, sent_as) if t.dtype == _DTYPES[sent_as] else t for t in tensors]
                return State(zip(names, tensors, strict=True), buffers=[names[i] for i in buffers])
            case {"d": list(items), **rest} if not rest:
                return {self._key(key): self.value(item) for key, item in items}
            case {"l": list(items), **rest} if not rest:
                return [self.value(item) for item in items]
            case {"u": list(items), **rest} if not rest:
                return tuple(self.value(item) for item in items)
            case {"r": [str(name), dict(fields)], **rest} if not rest:
                values = {field: self.value(item) for field, item in fields.items()}
                return values if self.plain else self._record(name, values)
        raise ValueError(f"no such node: {str(node)[:80]}")

    @staticmethod
    def _key(key: Any) -> int | str:
        if type(key) not in (int, str):
            raise ValueError(f"no such key: {key!r}")
        return key

    @staticmethod
    def _record(name: str, values: dict[str, Any]) -> Record:
        cls = _classes.get(name)
        if cls is None:
            raise ValueError(f"no class {name} is defined here")
        if values.keys() != cls.declared().keys():
            raise ValueError(f"{name} has the fields {sorted(cls.declared())}, not {sorted(values)}")
        hints = _hints(cls)
        for field, value in values.items():
            _check_type(value, hints[field], f"{cls.__name__}.{field}")
        return cls(**values)


def decode_tree(blob: bytes, *, device: torch.device | str = "cpu", plain: bool = False) -> Any:
    """The value that was encoded, in fresh memory. `plain` gives dicts for records, for readers without the classes."""
    if len(blob) > BLOB_LIMIT:
        raise WireError(f"A message of {len(blob)} bytes is over the limit of {BLOB_LIMIT}.")
    head = read_header(blob)
    try:
        by_name = safetensors.torch.load(blob)
        tensors = [by_name[str(i)] for i in range(len(by_name))]
        if _digest(head.text, tensors) != head.digest:
            raise ValueError("the checksum does not match")
        if torch.device(device).type != "cpu":
            tensors = [t.to(device) for t in tensors]
        decoder = _Decoder(tensors)
        decoder.plain = plain
        return decoder.value(head.tree)
    except WireError as e:
        raise WireError(f"A message of {len(blob)} bytes does not hold what its class declares: {e}") from e
    except (ValueError, KeyError, IndexError, TypeError, AssertionError, SafetensorError, RecursionError) as e:
        raise WireError(f"A message of {len(blob)} bytes is damaged or no message at all: {e}.") from e


R = TypeVar("R", bound=Record)


def decode(blob: bytes, cls: type[R], *, device: torch.device | str = "cpu") -> R:
    value = decode_tree(blob, device=device)
    if not isinstance(value, cls):
        raise WireError(f"A {type(value).__name__} arrived where a {cls.__name__} was expected.")
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
        raise WireError(f"{where} is a {type(value).__name__}, declared as {name}.")
