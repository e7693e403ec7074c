"""Forward passes over more rows than fit into memory at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def in_chunks(fixed: Callable[[Tensor], Tensor], x: Tensor, size: int = 500) -> Tensor:
    """Return `fixed` of the rows of x, computed in pieces that fit into memory."""
    return torch.cat([fixed(part) for part in x.split(size)])


def row_by_row(fixed: Callable[[Tensor], Tensor], x: Tensor, size: int = 500) -> Tensor:
    """Return `fixed` of the rows of x, where no row may see another. Each row goes through by itself, many side by
    side.
    """
    with torch.no_grad():
        return torch.func.vmap(lambda row: fixed(row[None])[0], chunk_size=size)(x)
