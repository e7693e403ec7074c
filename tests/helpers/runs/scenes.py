"""Scenes of attacks by hand: messages with their fields, and what a view of them shows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fedaudit.shape import Shape
from fedaudit.wire.release import Protection, Sent


class Entry:
    """One message of a transcript: `Entry("up", 2, 1, z=("logits", tensor))` is client 2's upload of round 1."""

    def __init__(
        self, direction: str, client: int, t: int, ask: int = 0, role: str = "private", dropped: bool = False,
        protection: Protection | None = None, unit: str | None = None, by: str | None = None, **fields: Any,
    ):  # fmt: skip
        self.direction, self.client, self.round, self.ask, self.dropped = direction, client, t, ask, dropped
        self.fields = {
            name: Sent(role=role, kind=kind, protection=protection, unit=unit, by=by)
            for name, (kind, _) in fields.items()
        }
        self.values = {name: value for name, (_, value) in fields.items()}

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def kept(self, name: str) -> bool:
        return not self.dropped

    @property
    def readable(self) -> bool:
        return not self.dropped

    def kinds(self) -> set[str]:
        return {field.kind for field in self.fields.values() if field.kind is not None}

    def state_shapes(self, name: str) -> dict[str, tuple[int, ...]] | None:
        value = self.values[name]
        return {key: tuple(t.shape) for key, t in value.items()} if isinstance(value, dict) else None


class View:
    def __init__(self, entries: list[Entry], peer: int | None = None):
        self._entries = entries
        self.threat = SimpleNamespace(peer=peer, name="server" if peer is None else "peer")

    def entries(
        self, direction: str | None = None, kind: str | None = None, client: int | None = None, t: int | None = None
    ) -> Iterator[Entry]:
        for entry in self._entries:
            right = direction in (None, entry.direction) and client in (None, entry.client) and t in (None, entry.round)
            if right and (kind is None or kind in entry.kinds()):
                yield entry


def scene(*entries: Entry, target: int = 0, peer: int | None = None, classes: int = 3, **facts: Any) -> SimpleNamespace:
    """Return a scene of an attack on `target`, with images of 1 x 2 x 2 pixels."""
    view = View(list(entries), peer)

    def released(kind: str) -> list[tuple[Entry, str]]:
        uploads = view.entries(direction="up", kind=kind, client=target)
        return [(e, name) for e in uploads for name, of in e.fields.items() if of.kind == kind and e.kept(name)]

    base: dict[str, Any] = {
        "x": torch.zeros(4, 1, 2, 2), "y": torch.tensor([0, 1, 2, 0]), "public": None, "relayed": lambda *of: [],
        "auxiliary": (torch.zeros(0, 1, 2, 2), torch.zeros(0).long()), "device": torch.device("cpu"),
        "shape": Shape((1, 2, 2)), "setting": {"clients": 3}, "released": released, "arch": lambda k: f"net {k}",
        "published": lambda: None,
    }  # fmt: skip
    return SimpleNamespace(view=view, target=target, classes=classes, **(base | facts))
