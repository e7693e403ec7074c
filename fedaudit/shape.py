"""The shape of one record: an image, a row of numbers, or a text as token ids. All rooms share this one type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Kind = Literal["images", "rows", "tokens"]
KINDS: frozenset[Kind] = frozenset({"images", "rows", "tokens"})
IMAGES: frozenset[Kind] = frozenset({"images"})


class Shape(tuple[int, ...]):
    """The sizes of one record: (channels, height, width) of an image, (features,) of a row, (length,) of a text.

    `tokens` is the number of different token ids, or 0 if a record does not consist of token ids.
    """

    tokens: int

    def __new__(cls, sizes: Iterable[int] = (), tokens: int = 0) -> Shape:
        made = super().__new__(cls, sizes)
        made.tokens = tokens
        return made

    @property
    def kind(self) -> Kind:
        return "tokens" if self.tokens else "images" if len(self) == 3 else "rows"

    @property
    def item(self) -> int:
        """Return the bytes that one number of a record takes when it is sent unchanged: a float, or a token id."""
        return 8 if self.tokens else 4

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.tokens == getattr(other, "tokens", 0)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    def __getnewargs__(self) -> tuple[tuple[int, ...], int]:
        return tuple(self), self.tokens

    def __str__(self) -> str:
        """Return the shape in words, for use in a sentence."""
        if self.kind == "images":
            return f"images of {' x '.join(map(str, self))}"
        if self.kind == "tokens":
            return f"texts of {self[0]} token ids below {self.tokens}"
        return f"rows of {self[0]} numbers" if len(self) == 1 else f"arrays of {' x '.join(map(str, self))}"
