"""A client's update as one vector: its reply, less what it was sent, and the way back from a sum of such vectors.

A model's state is taken as its change from the state in the message that it answers, if that is the same for all
clients: a change is small, and can be clipped. Anything else is taken as it is. Whole numbers such as batch norm's
counters have a stretch of their own, because they have another range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.aggregation.mean import weight_of
from fedaudit.aggregation.secure.ring import HALF, Part, Ring
from fedaudit.errors import ContractError, PrivacyError
from fedaudit.wire.compression import reference
from fedaudit.wire.message import Declared, Record, State, Up, class_named

WHOLE = float(1 << 16)  # the largest change of a whole number, such as batch norm's counter of batches


@dataclass(frozen=True)
class Slot:
    """A place in the vector: one tensor or number of the reply."""

    field: str
    name: str | None  # of a state's tensor
    shape: tuple[int, ...]
    whole: bool  # whether it holds whole numbers
    form: str  # state, tensor, number, weight, none

    @property
    def length(self) -> int:
        return math.prod(self.shape) if self.form in ("state", "tensor") else int(self.form == "number")


@dataclass(frozen=True)
class Layout:
    """The fields of a reply as they lie in the vector. All clients of a sum have the same, which everybody knows."""

    slots: tuple[Slot, ...]
    class_id: str  # of the reply

    def text(self) -> str:
        return json.dumps([self.class_id, [[s.field, s.name, list(s.shape), s.whole, s.form] for s in self.slots]])

    @classmethod
    def of_text(cls, text: str) -> Layout:
        class_id, slots = json.loads(text)
        return cls(tuple(Slot(f, n, tuple(shape), bool(w), form) for f, n, shape, w, form in slots), class_id)

    def reply(self) -> type[Up]:
        """Return the class of the replies."""
        cls = class_named(self.class_id)
        if cls is None or not issubclass(cls, Up):
            raise ContractError(f"{self.class_id} is not a message of this program. Define it in the method's module.")
        return cls

    def length(self, whole: bool) -> int:
        return sum(s.length for s in self.slots if s.whole == whole)

    @property
    def weighted(self) -> bool:
        return any(s.form == "weight" for s in self.slots)

    def ring(self, clients: int, bound: float, largest: float) -> Ring:
        """Return the ring of a sum: real numbers, whole numbers, and the weight, which is summed exactly."""
        levels = HALF // max(clients, 1)
        parts = [Part(self.length(False), bound * largest), Part(self.length(True), WHOLE * largest)]
        if self.weighted:
            if largest > levels:
                raise ContractError(f"A weight of {largest:g} is too large for a sum of {clients} clients in 32 bits.")
            parts.append(Part(1, float(levels)))  # steps of 1
        return Ring(tuple(parts), clients)


@dataclass(frozen=True)
class Update:
    """One client's update: real numbers, whole numbers, and what it weighs."""

    layout: Layout
    real: np.ndarray
    whole: np.ndarray
    weight: float

    def parts(self) -> list[np.ndarray]:
        """Return the vectors as they enter a sum: times the weight, and the weight itself where there is one."""
        parts = [self.real * self.weight, self.whole * self.weight] if self.weight != 1 else [self.real, self.whole]
        return [*parts, np.array([self.weight])] if self.layout.weighted else parts


def update_of(reply: Up, message: Record | None, by: str | None, counts: bool = True) -> Update:
    """Return a reply as an update. `message` is what it answers; None: there is none that all clients share.

    Without `counts` the reply's counts are left out: under a guarantee for clients all weigh the same, and a number of
    records or steps would take up the clip that is there for the update.
    """
    slots: list[Slot] = []
    real: list[np.ndarray] = []
    whole: list[np.ndarray] = []
    weight = weight_of(reply, by)

    def put(slot: Slot, value: Tensor, base: Tensor | None) -> None:
        flat = _numbers(value)
        if base is not None and base.shape == value.shape:
            flat = flat - _numbers(base)
        slots.append(slot)
        (whole if slot.whole else real).append(flat.reshape(-1))

    for field, declared in reply.declared().items():
        value = getattr(reply, field)
        if field == by:
            slots.append(Slot(field, None, (), isinstance(value, int), "weight"))
        elif value is None or (not counts and _is_count(declared, value)):
            slots.append(Slot(field, None, (), False, "none"))
        elif isinstance(value, State):
            base = _base(declared, value, message)
            for name, t in value.items():
                slot = Slot(field, name, tuple(t.shape), not t.is_floating_point(), "state")
                put(slot, t, base.get(name) if base else None)
        elif isinstance(value, Tensor):
            put(Slot(field, None, tuple(value.shape), not value.is_floating_point(), "tensor"), value, None)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            put(
                Slot(field, None, (), isinstance(value, int), "number"),
                torch.tensor(float(value), dtype=torch.float64),
                None,
            )
        else:
            raise ContractError(
                f"{type(reply).__name__}.{field} is a {type(value).__name__}, which has no sum. Average states, "
                "tensors and numbers."
            )
    return Update(Layout(tuple(slots), reply.class_id()), _joined(real), _joined(whole), weight)


def _is_count(declared: Declared | None, value: object) -> bool:
    """Return whether a field holds counts that are not whole: whole numbers do not move under a guarantee anyway."""
    return declared is not None and declared.kind == "count" and not isinstance(value, int)


def _numbers(t: Tensor) -> np.ndarray:
    return t.detach().cpu().to(torch.float64).numpy()


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _base(declared: Declared | None, value: State, message: Record | None) -> State | None:
    found = reference(declared, value, message)
    return None if found is None else found[1]


def clipped(update: Update, C: float) -> tuple[Update, float]:
    """Return the update with an L2 norm of at most C and weight 1, and the norm it had. Whole numbers stay unchanged.

    Counters say how many records a client has; they do not move under a guarantee for clients.
    """
    if not np.isfinite(update.real).all():
        raise PrivacyError("An update holds NaN or infinity. Training has probably diverged: lower the learning rate.")
    norm = float(np.linalg.norm(update.real))
    real = update.real * (C / norm) if norm > C else update.real
    return Update(update.layout, real, np.zeros_like(update.whole), 1.0), norm


def restored(
    layout: Layout,
    real: np.ndarray,
    whole: np.ndarray,
    weight: float,
    message: Record | None,
    device: torch.device,
) -> Up:
    """Return a reply from the mean of updates. The field of the weights holds their sum."""
    values: dict[str, Any] = {}
    states: dict[str, dict[str, Tensor]] = {}
    at = {False: 0, True: 0}
    cls = layout.reply()
    declared = cls.declared()
    for slot in layout.slots:
        if slot.form in ("weight", "none"):
            values[slot.field] = None if slot.form == "none" else round(weight) if slot.whole else weight
            continue
        source = whole if slot.whole else real
        begin = at[slot.whole]
        at[slot.whole] = begin + slot.length
        mean = torch.from_numpy(source[begin : begin + slot.length].copy()).reshape(slot.shape)
        if slot.form == "number":
            values[slot.field] = round(float(mean)) if slot.whole else float(mean)
        elif slot.form == "tensor":
            values[slot.field] = _typed(mean, slot).to(device)
        else:
            assert slot.name is not None
            states.setdefault(slot.field, {})[slot.name] = mean
    for field, tensors in states.items():
        like = {name: torch.empty(t.shape, device="meta") for name, t in tensors.items()}
        base = _base(declared[field], State(like), message)
        slots = {s.name: s for s in layout.slots if s.field == field}
        found = {}
        for name, mean in tensors.items():
            start = base.get(name) if base else None
            if start is not None and start.shape == mean.shape:
                moved = start.detach().cpu().to(torch.float64) + mean
                found[name] = (moved.round() if slots[name].whole else moved).to(start.dtype).to(device)
            else:
                found[name] = _typed(mean, slots[name]).to(device)
        values[field] = State(found, base.buffers if base else ())
    return cls(**values)


def _typed(mean: Tensor, slot: Slot) -> Tensor:
    return mean.round().to(torch.int64) if slot.whole else mean.to(torch.get_default_dtype())
