"""Declared traffic: the bytes that a round costs by a method's paper, compared with the measured bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedaudit.errors import RunError
from fedaudit.shape import Shape
from fedaudit.wire.message import TENSOR_HEADER, Part, Size, as_size

Key = tuple[str, str]  # ("up" or "down", "Message.field")
NUMBER = 8  # bytes of an int or float field


@dataclass(frozen=True)
class Plan:
    """One round as `Method.traffic` sees it: who took part in which ask, and what was chosen, but no byte counts.

    When planning, everybody answers and choices are expectations. When checking, they are those of the run.
    """

    t: int
    participants: Sequence[int]
    n: Mapping[int, int]  # records of each participant
    archs: Mapping[int, str]
    server_arch: str
    shape: Shape  # the shape of a record
    classes: int
    model_size: Callable[..., Size]  # gives the size of a named architecture, or of a part of it
    clients: int = 0
    public: int = 0  # rows of the public set
    labelled: bool = True  # whether its labels are labels of the task
    asks: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None  # per ask: who was asked, who replied
    choices: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    counts: Mapping[int, Sequence[int]] | None = None  # records of each class, where a partition was planned
    records: Mapping[int, int] = field(default_factory=dict)  # of every client, also those not in this round

    def held(self, k: int, least: int = 1) -> list[int]:
        """Return the classes of which client k should hold `least` records; all classes if no partition was planned."""
        if self.counts is None:
            return list(range(self.classes))
        return [c for c, n in enumerate(self.counts[k]) if n >= least]

    def asked(self, ask: int) -> Sequence[int]:
        """Return the clients that were sent the round's ask number `ask` (from 0)."""
        if self.asks is None:
            return self.participants
        return self.asks[ask][0] if ask < len(self.asks) else ()

    def replied(self, ask: int) -> Sequence[int]:
        if self.asks is None:
            return self.participants
        return self.asks[ask][1] if ask < len(self.asks) else ()

    def state(self, arch: int | str | None = None, part: Part | None = None) -> Size:
        """Return the size of a whole model or a part of it: of client k, of a named architecture, or the server's."""
        if isinstance(arch, int):
            arch = self.archs[arch]
        arch = arch or self.server_arch
        return self.model_size(arch) if part is None else self.model_size(arch, part)

    def low_rank(self, field_name: str, k: int, arch: str | None = None) -> Size:
        """Return the size of a `LowRank` state of the named architecture, or the server's, in client k's message.

        It follows from the ranks in the message. When planning, it is the whole state, an upper bound.
        """
        saved = 0
        ranks = self.choice(field_name, k)  # a list of names where everything travelled whole
        for rank, first, *others in ranks.values() if isinstance(ranks, dict) else ():
            rows, columns = first, math.prod(others)
            saved += 4 * (rows * columns - rank * (rows + columns + 1))
        whole = self.state(arch)
        return Size(whole.payload - saved, whole.buffers, whole.header, numbers=whole.numbers)

    def tensor(self, *shape: int, size: int = 4) -> Size:
        """Return the size of one tensor whose numbers have `size` bytes each; 4 stands for float32."""
        n = math.prod(shape)
        return Size(n * size, header=TENSOR_HEADER, tensors={shape: 1} if size == 4 else {}, numbers=n)

    def rows(self, n: int) -> Size:
        """Return the size of n records that are sent unchanged."""
        return self.tensor(n, *self.shape, size=self.shape.item)

    def choice(self, field_name: str, k: int, default: Any = None) -> Any:
        """Return the content of client k's "Message.field" without its tensors; `default` when planning."""
        return self.choices.get(field_name, {}).get(k, default)


def compare(declared: Mapping[Key, Size | int] | None, measured: Mapping[Key, Size], *, method: str, t: int) -> None:
    """Raise, with a table of both, if declared and measured sizes differ. Fields of size zero need no declaration."""
    if declared is None:
        return
    said = {key: as_size(size) for key, size in declared.items()}
    rows = []
    for key in sorted(said.keys() | measured.keys()):
        a, b = said.get(key, Size()), measured.get(key, Size())
        if a != b:
            rows.append(f"  {key[0]:>4}  {key[1]:<32} declared {_show(a):>24}   measured {_show(b):>24}")
    if rows:
        raise RunError(
            f"{method}, round {t}: the declared traffic is not what crossed the wire.\n" + "\n".join(rows) +
            f"\nCorrect {method}.traffic, or the message that grew."
        )  # fmt: skip


def _show(size: Size) -> str:
    return f"{size.payload:,} + {size.buffers:,} B" if size.buffers else f"{size.payload:,} B"
