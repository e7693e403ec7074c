"""Frozen values: a client keeps them as they are. They are large, read now and then, and never changed.

A client's state is read before each of its tasks and written after it, tensor by tensor, so that what it keeps for many
rounds costs more with each of them. A frozen value is looked at once, when it is frozen. From then on its digest stands
for it, and clients of one process that freeze equal tensors hold one copy of them. So nobody may change it: `read`
gives copies. It stays with its client: a message cannot hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedaudit.errors import ContractError
from fedaudit.wire.message import Size, fresh, size_of

if TYPE_CHECKING:
    from fedaudit.wire.codec.packing import Content


class Frozen:
    """A value that stays as it is. `fedaudit.freeze` makes one."""

    __slots__ = ("_contents", "_inside")

    def __init__(self, inside: Any, contents: Sequence[Content]):
        """Take a value whose tensors are those of `contents`, in this order."""
        self._inside, self._contents = inside, tuple(contents)

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
            return fresh(self._at(path))
        found = self._tensor(path)
        return found.index_select(0, rows.to(found.device))

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


def _named(path: Sequence[int | str], found: Any) -> str:
    return f"{f'{list(path)} of a' if path else 'A'} frozen value is a {type(found).__name__}"
