"""What a task may know of its records: so that nothing computed from them leaves unpaid.

A task that only trains through `client.fit` knows of the records what the trained model knows. One that looks at them
(`client.x`, `client.y`) may put what it saw anywhere. From the first look on, therefore:

- the model may change in private fits alone. Any other change, an own training loop among them, taints it;
- memory must stay as it was, whole numbers and strings included, but for what `client.protect` gave back under the
  field's own name;
- a field that is declared `public()`, `via="model"` or `via="released"` is believed if it can be traced: to the model
  as a private fit left it, to the message that was received, to what was released, or to a derivation from that which
  the harness carried out itself (`client.derive`). Otherwise it is billed as a release of the records.

What is tainted stays so: every later release of the model, or from memory, has epsilon infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from fedaudit.errors import WireError
from fedaudit.wire.codec import digest_of
from fedaudit.wire.message import Record, State


class Provenance:
    """Follows one task of one client."""

    def __init__(
        self, model: nn.Module, memory: dict[str, Any], message: Any, plain: Iterable[Any], kept: Mapping[str, str]
    ):
        self._model, self._memory = model, memory
        self._known = {_digest(leaf) for leaf in (*_leaves(message), *plain)} - {""}  # what was no secret anyway
        self._released = dict(kept)  # digest of what was released, by the field's name: also of earlier tasks
        self._derived: set[str] = set()
        self._clean: dict[int, dict[str, str]] = {}  # digests by tensor of each model, as it was last paid for
        self._clean_memory: dict[str, str] = {}
        self.looked = False
        self.tainted = False  # model or memory hold more of the records than was paid for
        self.dirty = False  # memory does

    def look(self) -> None:
        """The task reads its records."""
        if not self.looked:
            self.looked = True
            self._clean[id(self._model)] = _tensors(self._model)
            self._clean_memory = {key: digest_of(value) for key, value in self._memory.items()}

    def before_fit(self, model: nn.Module) -> None:
        """A private fit begins: what it starts from must be paid for."""
        if self.looked and not self._holds_clean(model):
            self.tainted = True

    def after_fit(self, model: nn.Module) -> None:
        if self.looked:
            self._clean[id(model)] = _tensors(model)

    def released(self, field: str, value: Any) -> None:
        self._released[field] = digest_of(value)
        self._known |= {_digest(leaf) for leaf in _leaves(value)} - {""}

    def is_released(self, value: Any) -> bool:
        return digest_of(value) in self._released.values()

    def is_known(self, value: Any) -> bool:
        """Whether each part came with the message, was released, or is a hyper-parameter."""
        return all(_digest(leaf) in self._known for leaf in _leaves(value))

    def derived(self, value: Any) -> None:
        """The harness made this from what was released."""
        self._derived.add(digest_of(value))

    def is_derived(self, value: Any) -> bool:
        return digest_of(value) in self._derived | set(self._released.values())

    def settle(self) -> dict[str, str]:
        """The task is through: see what it changed. Returns what memory holds of released values, for later tasks."""
        if self.looked and not self._holds_clean(self._model):
            self.tainted = True
        kept = {}
        for key, value in self._memory.items():
            digest = digest_of(value)
            if self._released.get(key) == digest:
                kept[key] = digest
            elif self.looked and self._clean_memory.get(key) != digest:
                self.tainted = self.dirty = True
        if self.looked and list(self._clean_memory) != [key for key in self._memory if key in self._clean_memory]:
            self.tainted = self.dirty = True  # what was forgotten tells something too, and so does the order
        return kept

    def traced(self, value: Any) -> bool:
        """Whether a value is known to hold nothing of the records but what was paid for."""
        if not self.looked:
            return True
        if self.is_derived(value):
            return True
        if isinstance(value, State):
            return self._is_part(value)
        believed = self._known | {digest for model in self._clean.values() for digest in model.values()}
        return not _has_keys(value) and all(_digest(leaf) in believed for leaf in _leaves(value))

    def _holds_clean(self, model: nn.Module) -> bool:
        """Whether each tensor is as a private fit, or the beginning, left it, or came with the message."""
        clean = self._clean.get(id(model), {})
        return all(clean.get(name) == digest or digest in self._known for name, digest in _tensors(model).items())

    def _is_part(self, state: State) -> bool:
        """Whether a state is a model that was paid for, whole or some of its top-level parts: names tell too, and so
        does their order."""
        for model in self._clean.values():
            tops = {name.split(".")[0] for name in state}
            if list(state) == [name for name in model if name.split(".")[0] in tops]:
                return all(model[name] == digest_of(t) for name, t in state.items())
        return False


def _tensors(model: nn.Module) -> dict[str, str]:
    return {name: digest_of(t) for name, t in model.state_dict().items()}


def _has_keys(value: Any) -> bool:
    """Whether keys of its own say something, beside the values: a model's state has its model's names."""
    if isinstance(value, Mapping) and not isinstance(value, State):
        return True
    return isinstance(value, list | tuple) and any(map(_has_keys, value))


def _digest(leaf: Any) -> str:
    """Empty for what cannot travel, and so cannot be traced."""
    try:
        return digest_of(leaf)
    except WireError:
        return ""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Record):
        for name in value.declared():
            yield from _leaves(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
