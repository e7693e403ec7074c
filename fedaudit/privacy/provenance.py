"""What a task may know of its records: so that nothing computed from them leaves unpaid.

A task that only trains through `client.fit` knows of the records what the trained model knows. One that looks at them
(`client.x`, `client.y`) may put what it saw anywhere. From the first look on, therefore:

- the model may change in private fits alone. Any other change, an own training loop among them, taints it;
- memory must stay as it was, whole numbers and strings included, but for what `client.protect` gave back under the
  field's own name;
- a field that is declared `public()`, `via="model"` or `via="released"` is believed if it can be traced: to the model
  as a private fit left it, to the message that was received, to what was released, or to a derivation from that which
  the harness carried out itself (`client.derive`). Otherwise it is billed as a release of the records. A list is
  traced as a whole: each of its entries may be known, and which of them stand there be read off the records.

Where several things are known, which of them a task sent, loaded, kept or trained with is a choice, and a choice may
be made by the records. So each is written down (`picked`), as the ways in which it may have come about; clients whose
code chose, and not their records, have a way in common (fedaudit.runtime.alike).

What is tainted stays so: every later release of the model, or from memory, has epsilon infinity. A task whose model was
trained without DP, or whose memory is tainted, holds more of the records than was paid for, whether or not it looks:
what it sends is traced too, and its model counts for nothing then.
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
        self._known: dict[str, set[str]] = defaultdict(set)  # what was no secret anyway, by its key: where it stands
        self._know("message", message)
        for i, value in enumerate(plain):
            self._know(f"setting {i}", value)
        self._released = dict(kept)  # digest of what was released, by the field's name: also of earlier tasks
        self._derived: set[str] = set()
        self._clean: dict[int, dict[str, str]] = {}  # digests by tensor of each model, as it was last paid for
        self._clean_memory: dict[str, str] = {}
        self.picked: list[list[str]] = []  # of each choice: the ways in which it may have come about
        self.looked = False
        self.tainted = False  # model or memory hold more of the records than was paid for
        self.dirty = False  # memory does

    def _know(self, where: str, value: Any) -> None:
        for at, key in _nodes(value, where):
            if key:
                self._known[key].add(at)

    def look(self, model: nn.Module, memory: Mapping[str, Any]) -> None:
        """The task reads its records."""
        if not self.looked:
            self.looked = True
            self._clean[id(model)] = _tensors(model)
            self._clean_memory = {key: digest_of(value) for key, value in memory.items()}

    def before_fit(self, model: nn.Module) -> None:
        """A private fit begins: what it starts from must be paid for."""
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
        """Whether each part came with the message, was released, or is a hyper-parameter."""
        return all(_digest(leaf) in self._known for leaf in _leaves(value))

    def ways(self, value: Any) -> list[str]:
        """Where a value may have come from; its digest, if that is not known."""
        return sorted(self._known.get(_key(value), ())) or [f"{NEW} {_key(value)}"]

    def derived(self, value: Any, how: str) -> None:
        """The harness made this from what was released."""
        self._derived.add(digest_of(value))
        if self.looked:
            self.picked.append([f"derived by {how}"])

    def is_derived(self, value: Any) -> bool:
        return digest_of(value) in self._derived | set(self._released.values())

    def settle(self, model: nn.Module, memory: Mapping[str, Any]) -> dict[str, str]:
        """The task is through: see what it changed. Returns what memory holds of released values, for later tasks."""
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
            self.tainted = self.dirty = True  # what was forgotten tells something too, and so does the order
        if self.looked:
            self.picked.append([f"kept {[key for key in memory if key in kept]}"])
        return kept

    def traced(self, value: Any, where: str, unpaid: bool = False) -> bool:
        """Whether a value is known to hold nothing of the records but what was paid for.

        `unpaid`: model or memory hold more than that, so that nothing that follows from them is believed."""
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
        """Which models that were paid for hold this: as one of their tensors, or as a state of some of their top-level
        parts. Names tell too, and so does their order."""
        for i, model in enumerate(self._clean.values()):
            if not isinstance(value, State):
                yield from (f"model {i}, {name}" for name, digest in model.items() if digest == _digest(value))
                continue
            tops = {name.split(".")[0] for name in value}
            names = [name for name in model if name.split(".")[0] in tops]
            if list(value) == names and all(model[name] == digest_of(t) for name, t in value.items()):
                yield f"model {i}, " + (WHOLE if len(value) == len(model) else ", ".join(sorted(tops)))

    def _holds_clean(self, model: nn.Module) -> bool:
        """Whether each tensor is as a private fit, or the beginning, left it, or came with the message."""
        clean, now = self._clean.get(id(model), {}), _tensors(model)
        if not all(clean.get(name) == digest or digest in self._known for name, digest in now.items()):
            return False
        # Which are which is a choice. What is both as it was and as it came may count as either.
        came = {
            name for name, digest in now.items() if any(at.endswith(f".{name}") for at in self._known.get(digest, ()))
        }
        changed = {name for name, digest in now.items() if clean.get(name) != digest}
        moved = sorted(changed - came)  # known, but as something else
        self.picked.append([f"loaded {_parts(changed, now)}{moved}", f"loaded {_parts(changed | came, now)}{moved}"])
        return True


NEW = "="  # begins a way that says nothing but which value it is
SENT = "sent"  # begins the ways of what stands in the reply
WHOLE = "whole"


def _parts(names: set[str], model: Mapping[str, str]) -> str:
    """Some tensors of a model, in words that fit all architectures where they can."""
    return {0: "nothing", len(model): "all"}.get(len(names)) or ", ".join(sorted(names))


def _tensors(model: nn.Module) -> dict[str, str]:
    return {name: digest_of(t) for name, t in model.state_dict().items()}


def _digest(leaf: Any) -> str:
    """Empty for what cannot travel, and so cannot be traced."""
    try:
        return digest_of(leaf)
    except WireError:
        return ""


def _inside(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by name, key or place; None of a leaf."""
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
    """Where each part of a value stands, and its key: a digest, or those of its parts under their names."""
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
