"""Work that the clients of one process would all do alike: it is done once, and billed to each of them.

Ten clients that decode the same images from the same message would decode them ten times. A client may ask for such
work by `client.once`. It names a plain function and frozen values, and gets what the function makes of them. The first
client that asks does the work. Each later one gets a copy, and the seconds that the work took are added to its own: on
a machine of its own it would have done it itself.

Nothing passes from one client to another in this way. The result is known by the contents it was made of, so only a
client that holds all of them gets it. The function is one of a module, which brings nothing of its own, and its random
numbers follow from those contents. A result that cannot be copied is not kept, and each client makes its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor

from fedaudit.errors import ContractError
from fedaudit.rng import seeded
from fedaudit.runtime.meter import Away
from fedaudit.shape import Shape
from fedaudit.wire.codec import FrozenPart
from fedaudit.wire.message import Record, State, fresh

PLAIN = (NoneType, bool, int, float, str)  # and no classes made of them, which could carry more
ROOM_HERE = 1 << 28  # bytes of results that are kept in main memory


def room_for_results(device: torch.device) -> int:
    """Return how many bytes of results may be kept on a device."""
    return torch.cuda.get_device_properties(device).total_memory // 16 if device.type == "cuda" else ROOM_HERE


@dataclass(frozen=True)
class _Made:
    """A result that is kept, and what it took."""

    value: Any
    wall_s: float
    events: tuple[Any, Any] | None  # on a GPU: events before and after the work


class Once:
    """Keeps what clients of this process made of equal contents, for the length of a round."""

    def __init__(self, device: torch.device, room: int | None = None) -> None:
        self._device, self._room = device, room_for_results(device) if room is None else room
        self._round, self._bytes = 0, 0
        self._made: dict[Hashable, _Made] = {}

    def do(
        self,
        make: Callable[..., Any],
        parts: Sequence[FrozenPart],
        given: Mapping[str, Any],
        t: int,
        bill: Callable[[Away], None],
    ) -> Any:
        """Return `make(*parts, **given)`, with each part read. `bill` takes the time of work that was done before, in
        round t.
        """
        if t != self._round:
            self.forget()
            self._round = t
        key = work_of(make, parts, given), tuple(part.devices for part in parts)
        if (found := self._made.get(key)) is not None:
            bill(Away(share_s=found.wall_s, stack=found.events, share=1.0, done_before=True))
            return fresh(found.value)
        made = self._work(make, parts, given)
        size = _bytes_of(made.value)
        if size is None or self._bytes + size > self._room:
            return made.value
        self._made[key], self._bytes = made, self._bytes + size
        return fresh(made.value)

    def forget(self) -> None:
        """Let go of all results: what a round has made takes room that the next one needs."""
        self._made.clear()
        self._bytes = 0

    def _work(self, make: Callable[..., Any], parts: Sequence[FrozenPart], given: Mapping[str, Any]) -> _Made:
        events = None
        if self._device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record(torch.cuda.current_stream(self._device))
        begun = time.perf_counter()
        value = done_alone(make, parts, given, self._device)
        wall_s = time.perf_counter() - begun
        if events:
            events[1].record(torch.cuda.current_stream(self._device))
        return _Made(value, wall_s, events)


def done_alone(
    make: Callable[..., Any], parts: Sequence[FrozenPart], given: Mapping[str, Any], device: torch.device
) -> Any:
    """Return `make(*parts, **given)`, with each part read. Its random numbers are the same whoever does it."""
    with seeded("once", work_of(make, parts, given), device=device):
        return make(*(part.read() for part in parts), **given)


def work_of(make: Callable[..., Any], parts: Sequence[FrozenPart], given: Mapping[str, Any]) -> str:
    """Return a text that tells work from all other work, on whatever device it is done."""
    named = [(name, _told(value)) for name, value in sorted(given.items())]
    return repr((make.__module__, make.__qualname__, [part.key for part in parts], named))


def check_work(make: Callable[..., Any], parts: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Raise ContractError unless work follows from what it names alone."""
    name = getattr(make, "__qualname__", repr(make))
    there = getattr(sys.modules.get(getattr(make, "__module__", "")), name, None)
    if there is not make or not isinstance(make, FunctionType):
        raise ContractError(
            f"client.once: {name} is not a function of a module, so it may carry values of its own. Define it in a "
            "module, and give it what it needs as arguments."
        )
    if wrong := [part for part in parts if type(part) is not FrozenPart]:  # another class has its own key
        raise ContractError(
            f"client.once was given a {type(wrong[0]).__name__} for {name}, which is not a part of a frozen value. "
            "Freeze it, and give a `part` of what comes back."
        )
    if unknown := [key for key, value in given.items() if not _plain(value)]:
        raise ContractError(
            f"client.once: {', '.join(unknown)} of {name} is not a number, a text or a tuple of them. Freeze it, and "
            "give a `part` of what comes back."
        )


def _plain(value: Any) -> bool:
    if type(value) in (tuple, Shape):
        return all(map(_plain, value))
    return type(value) in PLAIN


def _told(value: Any) -> str:
    """Return a text for a plain value: 1, 1.0 and True are equal, and have other texts."""
    if isinstance(value, tuple):
        return f"{type(value).__name__} {getattr(value, 'tokens', 0)} ({', '.join(map(_told, value))})"
    return repr(value)


def _bytes_of(value: Any) -> int | None:
    """Return how many bytes a result takes, or None if there is something in it that `fresh` cannot copy as it is."""
    if type(value) is Tensor:
        return None if value.requires_grad or value.layout != torch.strided else value.untyped_storage().nbytes()
    if isinstance(value, Record):
        value = [getattr(value, name) for name in type(value).declared()]
    elif type(value) in (dict, State):
        value = list(value.values())
    if type(value) in (list, tuple):
        sizes = [size for item in value if (size := _bytes_of(item)) is not None]
        return sum(sizes) if len(sizes) == len(value) else None
    return 0 if type(value) in PLAIN else None
