"""Records and messages: frozen, typed trees of tensors, model states, numbers and short strings.

A message is a record that crosses the wire, `Down` (server to client) or `Up` (client to server). The author of an `Up`
message says of each field whether it was computed from private data, and how: see `private` and `public`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast, dataclass_transform, get_args

import torch
from torch import Tensor, nn

from fedaudit.errors import ContractError, WireError, unknown
from fedaudit.wire.svd import Shapes, factorised, recombined

KINDS = frozenset({
    "weights", "gradients", "layers", "statistics", "embeddings", "labels", "logits", "soft_labels", "prototypes",
    "label_counts", "count", "synthetic_images",
})  # fmt: skip


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


Dtype = Literal["float16", "bfloat16", "uint8"]


Via = Literal["data", "model", "released"]


Unit = Literal["record", "client"]


Depends = Literal["record", "all", "class", "histogram", "range"]


By = Literal["client"]


class State(dict[str, Tensor]):
    """A model's parameters and buffers by name. It remembers which are buffers: papers count parameters only."""

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = (), buffers: Iterable[str] = ()):
        super().__init__(tensors)
        self.buffers = frozenset(buffers) & self.keys()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.items() if name not in self.buffers}

    def like(self, tensors: Mapping[str, Tensor]) -> State:
        """Other tensors under the same names, to travel in the same way."""
        return State(tensors, self.buffers)


class LowRank(State):
    """A state that travels as its largest singular values (see fedaudit.wire.svd); who receives it gets a State.

    Put it where a field is declared as a State: LowRank(state, energy=0.95). What noise is added to is the state.
    """

    def __init__(self, state: State, energy: float):
        super().__init__(state, state.buffers)
        if not 0 < energy <= 1:
            raise ContractError(f"LowRank: the energy {energy} is no number in (0, 1].")
        self.energy = energy

    def like(self, tensors: Mapping[str, Tensor]) -> LowRank:
        return LowRank(State(tensors, self.buffers), self.energy)

    def factors(self) -> tuple[State, Shapes]:
        """What travels, and which of its tensors are factors."""
        sent, shapes = factorised(self, self.energy, self.buffers)
        return State(sent, self.buffers), shapes

    def recovered(self) -> State:
        """What is left of the state at the receiver's."""
        return State(recombined(*self.factors()), self.buffers)


Part = Callable[[nn.Module], Collection[str]]  # the names of those tensors of a model that travel


def state_of(model: nn.Module, part: Part | None = None) -> State:
    """A copy of the model's state, or of a part of it: later training does not reach it."""
    state = live_state(model)
    names = None if part is None else part(model)
    tensors = {n: t.clone() for n, t in state.items() if names is None or n in names}
    return State(tensors, state.buffers)


def live_state(model: nn.Module) -> State:
    """The model's state, whose tensors are the model's own: to look at, or to be encoded."""
    tensors, seen, buffers = {}, set(), []
    for name, t in model.state_dict(keep_vars=True).items():
        if not isinstance(t, nn.Parameter) or id(t) in seen:  # weights under two names count once
            buffers.append(name)
        seen.add(id(t))
        tensors[name] = t.detach()
    return State(tensors, buffers)


def fresh(value: Any) -> Any:
    """A copy of what was decoded, in memory of its own: tensors, states, records, dicts, lists and tuples of these."""
    match value:
        case Tensor():
            return value.detach().clone()
        case State():
            return State({name: t.detach().clone() for name, t in value.items()}, value.buffers)
        case Record():
            return type(value)(**{name: fresh(getattr(value, name)) for name in type(value).declared()})
        case dict():
            return {key: fresh(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(fresh(item) for item in value)
    return value  # a number, a text, nothing


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
    by: By | None = None


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
    if dtype is not None and dtype not in DTYPES:
        raise ContractError(unknown(f"dtype of private({kind!r})", dtype, DTYPES))
    return dataclasses.field(metadata={"declared": Declared("private", _kind(kind), via, unit, depends, dtype, finite)})


def public(*, finite: bool = True) -> Any:
    """Not computed from private data: a bit-for-bit test holds every method to it."""
    return dataclasses.field(metadata={"declared": Declared("public", finite=finite)})


def relay(kind: str, *, dtype: Dtype | None = None, finite: bool = True, by: By | None = None) -> Any:
    """In a `Down` message: another client's release, passed on. It costs no more, but more parties see it.

    `by="client"`: a table whose keys are the clients that the values came from. Otherwise whose it is does not show.
    """
    if by is not None and by not in get_args(By):
        raise ContractError(unknown(f"by of relay({kind!r})", by, get_args(By)))
    declared = Declared("relay", _kind(kind), dtype=dtype, finite=finite, by=by)
    return dataclasses.field(metadata={"declared": declared})


_classes: dict[str, type[Record]] = {}


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(private, public, relay))
class Record:
    """Base of everything that is sent or kept. A subclass is a frozen dataclass; it needs no decorator."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if sly := vars(cls).keys() & {"__getattribute__", "__getattr__"}:
            raise ContractError(f"{cls.__name__}.{min(sly)}: a record holds what it was given, and says nothing else.")
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
    def optional(cls) -> frozenset[str]:
        """The fields that may be None, by the text of their annotations: its names are known in its module only."""
        named = {f.name: str(f.type) for f in dataclasses.fields(cast(Any, cls))}
        return frozenset(name for name, words in named.items() if "None" in words or "Optional" in words)

    @classmethod
    def class_id(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


def class_named(class_id: str) -> type[Record] | None:
    """The class that calls itself so in an encoded record; None where the running program has none."""
    return _classes.get(class_id)


def class_ids() -> frozenset[str]:
    """All record classes that are defined by now."""
    return frozenset(_classes)


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


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of a field. `payload`: elements x element size without buffers, as papers count; `buffers` beside it.

    `header` is what names and shapes cost on the wire: an estimate for planning, never compared. `tensors` are the
    float32 tensors in the payload, by shape, and how many there are: what compression makes of them follows from it.
    """

    payload: int = 0
    buffers: int = 0
    header: int = dataclasses.field(default=0, compare=False)
    tensors: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __add__(self, other: Size | int) -> Size:
        other = as_size(other)
        counts = {shape: n + other.tensors.get(shape, 0) for shape, n in self.tensors.items()}
        both = {**other.tensors, **counts} if other.tensors else self.tensors
        return Size(self.payload + other.payload, self.buffers + other.buffers, self.header + other.header, both)

    __radd__ = __add__  # sum() starts from 0

    def __mul__(self, times: int) -> Size:
        tensors = {shape: n * times for shape, n in self.tensors.items()}
        return Size(self.payload * times, self.buffers * times, self.header * times, tensors)

    __rmul__ = __mul__

    def without_buffers(self) -> Size:
        return dataclasses.replace(self, buffers=0)


FRAME = 160  # bytes of a message around its fields, about


TENSOR_HEADER = 70  # bytes that describe one tensor, about


def model_size(model: nn.Module, part: Part | None = None) -> Size:
    """A whole model, or a part of it, as `state_of` sends it. Works on the meta device."""
    names = None if part is None else part(model)
    tensors = {name: t for name, t in model.state_dict().items() if names is None or name in names}
    bytes_of = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    counted = [tensors[name] for name, _ in model.named_parameters() if name in tensors]
    payload = sum(t.numel() * t.element_size() for t in counted)
    header = sum(TENSOR_HEADER + len(name) + 5 for name in tensors)
    shapes = Counter(tuple(t.shape) for t in counted if t.dtype == torch.float32)
    return Size(payload, sum(bytes_of.values()) - payload, header, shapes)


def as_size(size: Size | int) -> Size:
    return size if isinstance(size, Size) else Size(int(size))


def size_of(value: Any) -> Size:
    """Tensors: elements x element size. Numbers: 8 bytes, truth values 1, strings their UTF-8 length."""
    match value:
        case None:
            return Size()
        case Tensor():
            return Size(value.numel() * value.element_size())
        case LowRank():
            return size_of(value.factors()[0])
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
