"""Data sets in memory (images, rows of numbers, or texts as token ids), and their conversion to a model's input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.errors import DataError
from fedaudit.shape import Shape


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records to be shared out among clients (`x`, `y`) and a central test set that no client holds."""

    name: str
    x: Tensor  # uint8 (N, C, H, W): images; float32 (N, F): rows of numbers; int64 (N, L): texts as token ids
    y: Tensor  # int64 (N,)
    test_x: Tensor
    test_y: Tensor
    class_names: tuple[str, ...]
    domain: Tensor | None = None  # int64 (N,): index into domain_names
    domain_names: tuple[str, ...] = ()
    test_domain: Tensor | None = None  # int64: domains of the test records; None if they are not known
    vocabulary: int = 0  # for texts: the number of token ids
    person: Tensor | None = None  # int64 (N,): whose record each one is, by number; None if nobody says

    def __post_init__(self) -> None:
        if self.test_x.dtype != self.x.dtype:
            self._off("test_x", f"is {self.test_x.dtype}, x {self.x.dtype}; give records of one kind")
        for prefix, x, y in (("", self.x, self.y), ("test_", self.test_x, self.test_y)):
            self._check_records(f"{prefix}x", x)
            if y.dtype != torch.int64 or y.shape != x.shape[:1]:
                self._off(
                    f"{prefix}y",
                    f"is {y.dtype} of shape {tuple(y.shape)}, but has to be int64 of shape ({len(x)},) like {prefix}x",
                )
            if not len(y):
                self._off(f"{prefix}x", "holds no records; add some, or check that the files are complete")
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= self.classes:
                self._off(f"{prefix}y", f"has labels from {low} to {high}, but there are {self.classes} classes")
        if self.test_x.shape[1:] != self.x.shape[1:]:
            self._off("test_x", f"has {self._shape(self.test_x)}, x {self.shape}; make them the same")
        for name, domain, y in (("domain", self.domain, self.y), ("test_domain", self.test_domain, self.test_y)):
            if domain is not None and (
                domain.dtype != torch.int64
                or domain.shape != y.shape
                or int(domain.min()) < 0
                or int(domain.max()) >= len(self.domain_names)
            ):
                self._off(name, f"has to be int64 ({len(y)},), indices into the {len(self.domain_names)} domain names")

        if self.person is not None and (self.person.dtype != torch.int64 or self.person.shape != self.y.shape):
            self._off("person", f"has to be int64 ({len(self.y)},), the number of the person that each record is of")

    def _check_records(self, array: str, x: Tensor) -> None:
        is_text, is_row = x.dtype == torch.int64 and x.ndim == 2, x.dtype == torch.float32 and x.ndim == 2
        if not (is_text or is_row) and (x.dtype != torch.uint8 or x.ndim != 4):
            self._off(
                array,
                f"is {x.dtype} of shape {tuple(x.shape)}, but has to be uint8 (N, C, H, W), float32 (N, F) or int64 "
                "(N, L)",
            )
        if is_row and not bool(torch.isfinite(x).all()):
            bad = sorted(set((~torch.isfinite(x)).nonzero()[:, 1].tolist()))
            self._off(
                array, f"holds NaN or infinity in columns {', '.join(map(str, bad[:10]))}; fill or drop what is missing"
            )
        if is_text and x.numel() and not 0 <= int(x.min()) <= int(x.max()) < self.vocabulary:
            low, high = int(x.min()), int(x.max())
            self._off(array, f"has token ids from {low} to {high}, but the vocabulary has {self.vocabulary}")

    def _off(self, array: str, what: str) -> None:
        raise DataError(f"Data set {self.name!r}: {array} {what}.")

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> Shape:
        return self._shape(self.x)

    def _shape(self, x: Tensor) -> Shape:
        return Shape(x.shape[1:], self.vocabulary if x.dtype == torch.int64 else 0)


@dataclass(frozen=True)
class Facts:
    """The facts about a data set that are known without reading it; None if only the user's files can tell."""

    name: str
    classes: int | None
    shape: Shape | None
    train: int | None
    test: int | None
    source: str


def to_float(x: Tensor) -> Tensor:
    """Return uint8 numbers as floats in [-1, 1].

    The map is fixed, because a mean and a deviation computed from the data would be a release.
    """
    return x.to(torch.get_default_dtype()) / 127.5 - 1.0


def to_uint8(x: Tensor) -> Tensor:
    """Return floats as uint8, the inverse of `to_float`. Values outside [-1, 1] are clipped."""
    return ((x + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def to_input(x: Tensor) -> Tensor:
    """Return stored records as a model's input: images as floats in [-1, 1], rows and token ids unchanged."""
    if x.dtype == torch.uint8:
        return to_float(x)
    return x.to(torch.get_default_dtype()) if x.is_floating_point() else x
