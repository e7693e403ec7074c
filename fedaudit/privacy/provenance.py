"""Provenance: it follows what a task may know of its records, so that nothing computed from them leaves uncounted.

A task that only trains through `client.fit` knows no more of the records than the trained model does. A task that reads
them (`client.x`, `client.y`) may store what it saw anywhere. So, from the first reading on, these rules hold:

- Only private fits may change the model. Any other change, such as the task's own training loop, taints it.
- Memory must not change, whole numbers and strings included. The only exceptions are values that `client.protect`
  returned, stored under the field's own name.
- A field that is declared `public()`, `via="model"` or `via="released"` is believed if it can be traced: to the model
  as a private fit left it, to the received message, to a released value, or to a derivation from a released value that
  the harness carried out itself (`client.derive`). Otherwise it is billed as a release of the records. A list is
  traced as a whole: even if each entry is known, the records may have decided which entries are in it.

If a task knows several values, it chooses which of them it sends, loads, keeps or trains with, and the records may
decide that choice. So each choice is noted (`picked`), as the list of ways in which it may have come about. If the
code decided, and not the records, all clients have a way in common (fedaudit.runtime.declarations.cross_client_check).

A taint stays: every later release of the model, or from memory, has epsilon infinity. A task whose model was trained
without DP, or whose memory is tainted, holds more of the records than was paid for, even if it does not read them. Then
its messages are traced, too, and tracing to its model does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from fedaudit.errors import WireError
from fedaudit.wire.codec import digest_of
from fedaudit.wire.message import Record, State


class Provenance:
    """Follows one task of one client."""

    def __init__(self, message: Any, plain: Iterable[Any], kept: Mapping[str, str]):
        self._known: dict[str, set[str]] = defaultdict(set)  # key of a value that is no secret: its places
        self._know("message", message)
        for i, value in enumerate(plain):
            self._know(f"setting {i}", value)
        self._released = dict(kept)  # field: digest of its released value, also of earlier tasks
        self._derived: set[str] = set()
        self._clean: dict[int, dict[str, str]] = {}  # each model's digests by tensor, when it was last paid for
        self._clean_memory: dict[str, str] = {}
        self.picked: list[list[str]] = []  # for each choice: the ways in which it may have come about
        self.looked = False
        self.tainted = False  # whether model or memory hold more of the records than was paid for
        self.dirty = False  # whether memory does

    def _know(self, where: str, value: Any) -> None:
        for at, key in _nodes(value, where):
            if key:
                self._known[key].add(at)

    def look(self, model: nn.Module, memory: Mapping[str, Any]) -> None:
        """Note that the task reads its records, and how model and memory are at the first reading."""
        if not self.looked:
            self.looked = True
            self._clean[id(model)] = _tensors(model)
            self._clean_memory = {key: digest_of(value) for key, value in memory.items()}

    def before_fit(self, model: nn.Module) -> None:
        """Note that a private fit begins. It taints the task if the model it starts from was not paid for."""
        if self.looked and not self._holds_clean(model):
            self.tainted = True

    def after_fit(self, model: nn.Module) -> None:
        if self.looked:
            self._clean[id(model)] = _tensors(model)

    def released(self, field: str, value: Any) -> None:
        self._released[field] = digest_of(value)
        self._know(f"released {field}", value)

    def is_released(self, value: Any) -> bool:
        return digest_of(value) in self._released.values()

    def is_known(self, value: Any) -> bool:
        """Return whether each part came with the message, was released, or is a hyper-parameter."""
        return all(_digest(leaf) in self._known for leaf in _leaves(value))

    def derived(self, value: Any, how: str) -> None:
        """Note that the harness derived this value from released values."""
        self._derived.add(digest_of(value))
        if self.looked:
            self.picked.append([f"derived by {how}"])

    def is_derived(self, value: Any) -> bool:
        return digest_of(value) in self._derived | set(self._released.values())

    def settle(self, model: nn.Module, memory: Mapping[str, Any]) -> dict[str, str]:
        """Check, at the end of the task, what it changed. Return memory's released values, for later tasks."""
        if self.looked and not self._holds_clean(model):
            self.tainted = True
        kept = {}
        for key, value in memory.items():
            digest = digest_of(value)
            if self._released.get(key) == digest:
                kept[key] = digest
            elif self.looked and self._clean_memory.get(key) != digest:
                self.tainted = self.dirty = True
        if self.looked and list(self._clean_memory) != [key for key in memory if key in self._clean_memory]:
            self.tainted = self.dirty = True  # missing values reveal something, too, and so does the order
        if self.looked:
            self.picked.append([f"kept {[key for key in memory if key in kept]}"])
        return kept

    def traced(self, value: Any, where: str, unpaid: bool = False) -> bool:
        """Return whether a value is known to hold no more of the records than was paid for.

        `unpaid` says that model or memory hold more than that, so that nothing that follows from them is believed.
        """
        if not (self.looked or unpaid):
            return True
        if self.is_derived(value):
            return True
        ways = {*self._known.get(_key(value), ())}
        if not unpaid:
            ways.update(self._of_a_model(value))
        self.picked += [[f"{SENT} {where}: {way}" for way in sorted(ways)]] if ways else []
        return bool(ways)

    def _of_a_model(self, value: Any) -> Iterator[str]:
        """Yield the places in paid-for models that hold this value: a tensor, or a state of some top-level parts.

        Names and their order must match, too, because they can carry information.
        """
        for i, model in enumerate(self._clean.values()):
            if not isinstance(value, State):
                yield from (f"model {i}, {name}" for name, digest in model.items() if digest == _digest(value))
                continue
            tops = {name.split(".")[0] for name in value}
            names = [name for name in model if name.split(".")[0] in tops]
            if list(value) == names and all(model[name] == digest_of(t) for name, t in value.items()):
                yield f"model {i}, " + (WHOLE if len(value) == len(model) else ", ".join(sorted(tops)))

    def _holds_clean(self, model: nn.Module) -> bool:
        """Return whether each tensor is as a private fit or the task's start left it, or came with the message."""
        clean, now = self._clean.get(id(model), {}), _tensors(model)
        if not all(clean.get(name) == digest or digest in self._known for name, digest in now.items()):
            return False
        # It is a choice which tensors changed and which came. One that is unchanged and also came counts as either.
        came = {
            name for name, digest in now.items() if any(at.endswith(f".{name}") for at in self._known.get(digest, ()))
        }
        changed = {name for name, digest in now.items() if clean.get(name) != digest}
        moved = sorted(changed - came)  # known, but as something else
        self.picked.append([f"loaded {_parts(changed, now)}{moved}", f"loaded {_parts(changed | came, now)}{moved}"])
        return True


SENT = "sent"  # begins the ways of a value in the reply
WHOLE = "whole"


def _parts(names: set[str], model: Mapping[str, str]) -> str:
    """Return the names of some tensors of a model: "nothing" or "all" if possible, which fit all architectures."""
    return {0: "nothing", len(model): "all"}.get(len(names)) or ", ".join(sorted(names))


def _tensors(model: nn.Module) -> dict[str, str]:
    return {name: digest_of(t) for name, t in model.state_dict().items()}


def _digest(leaf: Any) -> str:
    """Return the digest of a leaf; empty if it cannot travel, and so cannot be traced."""
    try:
        return digest_of(leaf)
    except WireError:
        return ""


def _inside(value: Any) -> dict[Any, Any] | None:
    """Return the content of a container by name, key or position; None for a leaf."""
    if isinstance(value, Record):
        return {name: getattr(value, name) for name in value.declared()}
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _leaves(value: Any) -> Iterator[Any]:
    inside = _inside(value)
    if inside is None:
        yield value
    for item in (inside or {}).values():
        yield from _leaves(item)


def _nodes(value: Any, at: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the key of each part of a value. A key is a digest, or the keys of the parts by name."""
    inside = _inside(value)
    if inside is None:
        yield at, _digest(value)
        return
    keys = []
    for name, item in inside.items():
        below = list(_nodes(item, f"{at}.{name}"))
        keys.append((name, below[-1][1]))
        yield from below
    yield at, f"{type(value).__name__} {keys}" if all(key for _, key in keys) else ""


def _key(value: Any) -> str:
    return list(_nodes(value, ""))[-1][1]
