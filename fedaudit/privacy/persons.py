"""Persons instead of records: who is drawn in a step of DP-SGD, and how gradients of a person's records are added up.

The derivation is in docs/design/privacy.md, under "A guarantee for persons".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def of_persons(most: int) -> str:
    """Return the condition of a guarantee for persons, who have so many records at most."""
    return f"a person has at most {most} record{'s' * (most != 1)}, and who has how many is public"


def drawn_persons(whose: Tensor, q: float, rng: torch.Generator) -> Tensor:
    """Return the places of all records of the persons that a step takes, each with probability q, person by person."""
    drawn = torch.rand(int(whose.max()) + 1, generator=rng, device=rng.device) < q
    index = drawn[whose].nonzero()[:, 0]
    return index[whose[index].argsort(stable=True)]


def parts_of(index: Tensor, whose: Tensor | None, together: int) -> Sequence[Tensor]:
    """Return places in a sample, cut into parts of so many rows. No person's rows are in two parts."""
    at = torch.arange(len(index), device=index.device)
    if whose is None:
        return at.split(together)
    sizes = whose[index].unique_consecutive(return_counts=True)[1].tolist()
    cuts, rows = [0], 0
    for size in sizes:
        if rows + size > together and rows:
            cuts.append(cuts[-1] + rows)
            rows = 0
        rows += size
    return [at[a:b] for a, b in itertools.pairwise([*cuts, len(index)]) if b > a]


def summed_by_person(row_grads: Mapping[str, Tensor], person: Tensor, into: Mapping[str, Tensor]) -> None:
    """Add the gradients of rows to those of the persons whose rows they are. `person` has a place in `into` per row."""
    for name, g in row_grads.items():
        into[name].index_add_(0, person, g)
