"""Records and messages: frozen, typed trees of tensors, model states, numbers and short strings.

A message is a record that crosses the wire, `Down` (server to client) or `Up` (client to server). The author of an `Up`
message declares for each field whether it was computed from private data, and how: see `private` and `public`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast, dataclass_transform, get_args

import torch
from torch import Tensor, nn

from fedaudit.errors import ContractError, WireError, unknown
from fedaudit.registry import public_module
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
        """Return a state with other tensors under the same names, which travels in the same way."""
        return State(tensors, self.buffers)


class LowRank(State):
    """A state that travels as its largest singular values (see fedaudit.wire.svd). The receiver gets a State.

    Put it into a field that is declared as a State: LowRank(state, energy=0.95). Noise is added to the state itself.
    """

    def __init__(self, state: State, energy: float):
        super().__init__(state, state.buffers)
        if not 0 < energy <= 1:
            raise ContractError(f"LowRank: the energy {energy} is not in (0, 1]. Give a number above 0 and at most 1.")
        self.energy = energy

    def like(self, tensors: Mapping[str, Tensor]) -> LowRank:
        return LowRank(State(tensors, self.buffers), self.energy)

    def factors(self) -> tuple[State, Shapes]:
        """Return the tensors that travel, and the shapes of those that travel as factors."""
        sent, shapes = factorised(self, self.energy, self.buffers)
        return State(sent, self.buffers), shapes

    def recovered(self) -> State:
        """Return the state that the receiver gets."""
        return State(recombined(*self.factors()), self.buffers)


Part = Callable[[nn.Module], Collection[str]]  # gives the names of a model's tensors that travel


def trained(model: nn.Module) -> set[str]:
    """Return the names of a model's tensors without the parameters that are not trained (`requires_grad = False`)."""
    return set(model.state_dict()) - fixed(model)


def fixed(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def state_of(model: nn.Module, part: Part | None = None) -> State:
    """Return a copy of the model's state, or of a part of it. Later training does not change it."""
    state = live_state(model)
    names = None if part is None else part(model)
    tensors = {n: t.clone() for n, t in state.items() if names is None or n in names}
    return State(tensors, state.buffers)


def live_state(model: nn.Module) -> State:
    """Return the model's state without copying: the tensors are the model's own. Only read or encode them."""
    tensors, seen, buffers = {}, set(), []
    for name, t in model.state_dict(keep_vars=True).items():
        if not isinstance(t, nn.Parameter) or id(t) in seen:  # weights under two names count once
            buffers.append(name)
        seen.add(id(t))
        tensors[name] = t.detach()
    return State(tensors, buffers)


def fresh(value: Any, device: torch.device | None = None) -> Any:
    """Return a copy of a decoded value in its own memory: tensors, states, records, dicts, lists or tuples of them.

    Its tensors lie on `device`, or each where it lies in the value.
    """
    match value:
        case Tensor():
            return value.detach().clone() if device is None else value.detach().to(device, copy=True)
        case State():
            return State({name: fresh(t, device) for name, t in value.items()}, value.buffers)
        case Record():
            return type(value)(**{name: fresh(getattr(value, name), device) for name in type(value).declared()})
        case dict():
            return {key: fresh(item, device) for key, item in value.items()}
        case list() | tuple():
            return type(value)(fresh(item, device) for item in value)
    return value  # a number, a text, nothing


M = TypeVar("M", bound=nn.Module)


def load(model: M, state: Mapping[str, Tensor], part: Part | None = None) -> M:
    """Copy `state` into `model`, or into a part of it, and return the model. The two never share memory.

    A state without the parameters that are not trained fits, too: all models of an architecture have the same ones.
    """
    try:
        if part is not None and (wrong := set(part(model)) ^ state.keys()):
            raise RuntimeError(f"{', '.join(sorted(wrong))}: in the state or in the part, but not in both")
        left_out = part is None and bool(lacks := model.state_dict().keys() - state.keys()) and lacks <= fixed(model)
        model.load_state_dict({**model.state_dict(), **state} if part or left_out else state, strict=True)
    except RuntimeError as e:
        raise ContractError(
            f"A state does not fit the model {getattr(model, 'arch', type(model).__name__)!r}: {e}. "
            "Send it to a client of the same architecture (server.arch(k)), or load the layers one by one."
        ) from e
    return model


@dataclasses.dataclass(frozen=True)
class Declared:
    """The declaration of one field of a message, made by the message's author."""

    role: Literal["private", "public", "relay", "masked"]
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
    """Declare a field as a release: a value that is computed from the client's private data.

    `via` says how: from the data directly (`"data"`), only through the client's model (`"model"`), or from a value
    that `client.protect` returned (`"released"`: post-processing). `unit="record"` promises one row per record on
    dimension 0. `depends` says how rows depend on records, if kind and unit do not tell (see
    fedaudit.privacy.sensitivity). `dtype` is the type that travels; the conversion comes after the noise. `uint8` takes
    values in [-1, 1], the range of images.
    """
    if via not in get_args(Via) or unit not in get_args(Unit):
        raise ContractError(f"private({kind!r}): via is one of {get_args(Via)}, unit one of {get_args(Unit)}.")
    if depends is not None and depends not in get_args(Depends):
        raise ContractError(unknown(f"depends of private({kind!r})", depends, get_args(Depends)))
    if dtype is not None and dtype not in DTYPES:
        raise ContractError(unknown(f"dtype of private({kind!r})", dtype, DTYPES))
    return dataclasses.field(metadata={"declared": Declared("private", _kind(kind), via, unit, depends, dtype, finite)})


def masked() -> Any:
    """Declare a field as hidden by the masks of secure aggregation: by itself it is uniformly random."""
    return dataclasses.field(metadata={"declared": Declared("masked")})


def public(*, finite: bool = True) -> Any:
    """Declare a field as not computed from private data. A bit-for-bit test checks this for every method."""
    return dataclasses.field(metadata={"declared": Declared("public", finite=finite)})


def relay(kind: str, *, dtype: Dtype | None = None, finite: bool = True, by: By | None = None) -> Any:
    """Declare a field of a `Down` message as another client's release that is passed on.

    It costs no more privacy, but more parties see it. With `by="client"`, the field is a table whose keys are the
    clients that the values came from. Without it, the message does not show whose value it is.
    """
    if by is not None and by not in get_args(By):
        raise ContractError(unknown(f"by of relay({kind!r})", by, get_args(By)))
    declared = Declared("relay", _kind(kind), dtype=dtype, finite=finite, by=by)
    return dataclasses.field(metadata={"declared": declared})


_classes: dict[str, type[Record]] = {}


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(private, public, relay))
class Record:
    """The base class of everything that is sent or stored. A subclass is a frozen dataclass; it needs no decorator."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if sly := vars(cls).keys() & {"__getattribute__", "__getattr__"}:
            raise ContractError(f"{cls.__name__}.{min(sly)}: a record must return its fields unchanged. Remove it.")
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        cls._check_declarations()
        _classes[cls.class_id()] = cls

    @classmethod
    def _check_declarations(cls) -> None:
        for name, declared in cls.declared().items():
            if declared is not None and not issubclass(cls, Up | Down):
                raise ContractError(
                    f"{cls.__name__}.{name}: only fields of Up and Down messages are declared. Remove the declaration."
                )

    @classmethod
    def declared(cls) -> dict[str, Declared | None]:
        return {f.name: f.metadata.get("declared") for f in dataclasses.fields(cast(Any, cls))}

    @classmethod
    def optional(cls) -> frozenset[str]:
        """Return the fields that may be None, by the text of their annotations.

        It reads the text because the names in an annotation are known only in the module of the class.
        """
        named = {f.name: str(f.type) for f in dataclasses.fields(cast(Any, cls))}
        return frozenset(name for name, words in named.items() if "None" in words or "Optional" in words)

    @classmethod
    def class_id(cls) -> str:
        return f"{public_module(cls.__module__)}.{cls.__qualname__}"


def class_named(class_id: str) -> type[Record] | None:
    """Return the record class with this id, or None if the running program has not defined it."""
    return _classes.get(class_id)


def class_ids() -> frozenset[str]:
    """Return the ids of all record classes that are defined so far."""
    return frozenset(_classes)


def message_classes(module: str) -> list[type[Record]]:
    """Return all record classes, those that this module defines first."""
    own = [cls for cls in _classes.values() if cls.__module__ == module]
    return own + [cls for cls in _classes.values() if cls.__module__ != module]


class Up(Record):
    """A message from a client to the server. Each field declares whether it was computed from private data."""

    @classmethod
    def _check_declarations(cls) -> None:
        for name, declared in cls.declared().items():
            if declared is None or declared.role == "relay":
                raise ContractError(
                    f"{cls.__name__}.{name} leaves a client undeclared. Write `{name}: ... = private(kind, via=..., "
                    "unit=...)` if it was computed from private data, `= public()` if it was not."
                )


class Down(Record):
    """A message from the server to a client. A field that passes on another client's release is a `relay`."""

    @classmethod
    def _check_declarations(cls) -> None:
        for name, declared in cls.declared().items():
            if declared is not None and declared.role == "private":
                raise ContractError(
                    f"{cls.__name__}.{name}: the server has no private data. Use relay(kind) or nothing."
                )


@dataclasses.dataclass(frozen=True)
class Size:
    """The bytes of a field. `payload` is elements x element size without buffers, as papers count; `buffers` is extra.

    `header` is the cost of names and shapes on the wire: an estimate for planning, never compared. `tensors` counts
    the float32 tensors in the payload by shape. Their compressed size follows from it. `numbers` counts all elements.
    Their size in a secure sum follows from it.
    """

    payload: int = 0
    buffers: int = 0
    header: int = dataclasses.field(default=0, compare=False)
    tensors: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    numbers: int = dataclasses.field(default=0, compare=False, repr=False)  # elements, buffers too; 0: not known

    def __add__(self, other: Size | int) -> Size:
        other = as_size(other)
        counts = {shape: n + other.tensors.get(shape, 0) for shape, n in self.tensors.items()}
        both = {**other.tensors, **counts} if other.tensors else self.tensors
        numbers = self.numbers + other.numbers
        return Size(
            self.payload + other.payload, self.buffers + other.buffers, self.header + other.header, both, numbers
        )

    __radd__ = __add__  # sum() starts from 0

    def __mul__(self, times: int) -> Size:
        tensors = {shape: n * times for shape, n in self.tensors.items()}
        return Size(self.payload * times, self.buffers * times, self.header * times, tensors, self.numbers * times)

    __rmul__ = __mul__

    def without_buffers(self) -> Size:
        return dataclasses.replace(self, buffers=0)


FRAME = 160  # about how many bytes a message has around its fields


TENSOR_HEADER = 70  # about how many bytes describe one tensor


def model_size(model: nn.Module, part: Part | None = None) -> Size:
    """Return the size of a model, or of a part of it, as `state_of` sends it. This works on the meta device."""
    names = None if part is None else part(model)
    tensors = {name: t for name, t in model.state_dict().items() if names is None or name in names}
    bytes_of = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    counted = [tensors[name] for name, _ in model.named_parameters() if name in tensors]
    payload = sum(t.numel() * t.element_size() for t in counted)
    header = sum(TENSOR_HEADER + len(name) + 5 for name in tensors)
    shapes = Counter(tuple(t.shape) for t in counted if t.dtype == torch.float32)
    return Size(payload, sum(bytes_of.values()) - payload, header, shapes, sum(t.numel() for t in tensors.values()))


def as_size(size: Size | int) -> Size:
    return size if isinstance(size, Size) else Size(int(size))


def size_of(value: Any) -> Size:
    """Return the size of a value.

    A tensor has elements x element size, a number 8 bytes, a boolean 1 byte, a string its length in UTF-8.
    """
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
    raise WireError(f"A {type(value).__name__} has no size on the wire. Send tensors, states, numbers or strings.")
