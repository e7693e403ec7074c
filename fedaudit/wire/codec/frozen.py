"""Frozen values: a client keeps them as they are. They are large, read now and then, and never changed.

A client's state is read before each of its tasks and written after it, tensor by tensor, so that what it keeps for many
rounds costs more with each of them. A frozen value is looked at once, when it is frozen. From then on its digest stands
for it, and clients of one process that freeze equal tensors hold one copy of them. So nobody may change it: `read`
gives copies. It stays with its client: a message cannot hold it.

A frozen tensor of a client on a GPU may lie in main memory, or in a file that is mapped there. What `read` gives of it
lies on the client's device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from fedaudit.errors import ContractError
from fedaudit.wire.message import Record, Size, State, fresh, size_of

if TYPE_CHECKING:
    from fedaudit.wire.codec.packing import Content


class Frozen:
    """A value that stays as it is. `fedaudit.freeze` makes one."""

    __slots__ = ("_contents", "_device", "_inside")

    def __init__(self, inside: Any, contents: Sequence[Content], device: torch.device | None = None):
        """Take a value whose tensors are those of `contents`, in this order. Its reader is on `device`; None means that
        copies lie where the tensors do."""
        self._inside, self._contents, self._device = inside, tuple(contents), device

    @property
    def inside(self) -> Any:
        """Return the value itself, for the codec, which changes nothing."""
        return self._inside

    @property
    def contents(self) -> tuple[Content, ...]:
        """Return the contents of its tensors, for the codec."""
        return self._contents

    def size(self, *path: int | str) -> Size:
        """Return the size of what lies under these keys."""
        return size_of(self._at(path))

    def rows(self, *path: int | str) -> int:
        """Return how many rows the tensor under these keys has."""
        return len(self._tensor(path))

    def keys(self, *path: int | str) -> list[Any]:
        """Return the keys of the dict, or the names of the state, that lies under these keys."""
        found = self._at(path)
        if not isinstance(found, dict):  # a list would give its tensors, and a tensor its rows, which are no copies
            raise ContractError(f"{_named(path, found)}. Only dicts and states have keys. Call `read` for its content.")
        return list(found)

    def read(self, *path: int | str, rows: Tensor | None = None) -> Any:
        """Return a copy of what lies under these keys; with `rows`, of these rows of the tensor there."""
        if rows is None:
            return fresh(self._at(path), self._device)
        found = self._tensor(path)
        return found.index_select(0, rows.to(found.device)).to(self._device or found.device)

    def part(self, *path: int | str, rows: Tensor | None = None) -> FrozenPart:
        """Return a part that is known by its content and read later: what lies under these keys, or rows of it."""
        if rows is not None:
            self._tensor(path)
        return FrozenPart(self, path, rows)

    def _tensor(self, path: Sequence[int | str]) -> Tensor:
        found = self._at(path)
        if not isinstance(found, Tensor):
            raise ContractError(f"{_named(path, found)}. Only tensors have rows.")
        return found

    def _at(self, path: Sequence[int | str]) -> Any:
        found = self._inside
        for depth, key in enumerate(path):
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError) as e:
                where = f" under {list(path[:depth])}" if depth else ""
                raise ContractError(f"A frozen value has no {key!r}{where}. Look at its `keys`.") from e
        return found


class FrozenPart:
    """A part of a frozen value, or some rows of a tensor in it, that nobody has read yet. `Frozen.part` makes one."""

    __slots__ = ("_of", "_path", "_rows")

    def __init__(self, of: Frozen, path: tuple[int | str, ...], rows: Tensor | None):
        self._of, self._path, self._rows = of, path, rows

    def read(self) -> Any:
        """Return a copy of it."""
        return self._of.read(*self._path, rows=self._rows)

    @property
    def key(self) -> Hashable:
        """Return what tells it from parts with another content, on whatever device they lie. It is found without
        reading the part.
        """
        known = {id(content.of): content for content in self._of.contents}
        found: list[Hashable] = []
        for name, leaf in _leaves(self._of._at(self._path)):
            if isinstance(leaf, Tensor):
                found.append((name, known[id(leaf)].digest, str(leaf.dtype), tuple(leaf.shape)))
            else:
                found.append((name, leaf))
        rows = self._rows
        chosen = None if rows is None else (rows.numel(), xxhash.xxh3_128_hexdigest(rows.cpu().numpy().tobytes()))
        return tuple(found), chosen

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices on which `read` gives its tensors, one by one."""
        there, leaves = self._of._device, _leaves(self._of._at(self._path))
        return tuple(str(there or leaf.device) for _, leaf in leaves if isinstance(leaf, Tensor))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | str]]:
    """Yield the tensors in a tree, and texts for its plain values and for what they lie in, each with its names."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if not isinstance(value, Record | dict | list | tuple):
        yield name, repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        return
    kind = value.class_id() if isinstance(value, Record) else type(value).__name__
    yield name, f"{kind} {sorted(value.buffers)}" if isinstance(value, State) else kind
    if isinstance(value, Record):
        value = {field: getattr(value, field) for field in type(value).declared()}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{name}/{key!r}")


def _named(path: Sequence[int | str], found: Any) -> str:
    return f"{f'{list(path)} of a' if path else 'A'} frozen value is a {type(found).__name__}"
