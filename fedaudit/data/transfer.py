"""Public transfer sets taken from another data set: records in the shape of the task's, without labels."""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.data.datasets import load
from fedaudit.data.records import Dataset
from fedaudit.errors import SettingError
from fedaudit.shape import Shape

GREY = (0.299, 0.587, 0.114)  # the weights of red, green and blue in ITU-R BT.601


def transfer_records(name: str, root: str, shape: Shape, share: float, rng: torch.Generator) -> Tensor:
    """Return a random share of the records of `name` (0: all of them), with images resized to the given shape."""
    return fitted(load(name, root), shape, share, rng)


def fitted(data: Dataset, shape: Shape, share: float, rng: torch.Generator) -> Tensor:
    """Return a random share of the records in the given shape.

    Images change their channels first, so that resizing has less to do if they become fewer. Resizing is bilinear and
    antialiased.
    """
    n = len(data.x)
    wanted = max(int(share * n + 0.5), 1) if share else n
    chosen = torch.randperm(n, generator=rng)[:wanted].sort().values
    if data.shape != shape and not data.shape.kind == shape.kind == "images":
        raise SettingError(
            f"public_dataset = {data.name!r} holds {data.shape}, but the task has {shape}: only images can be made to "
            "fit. Choose a data set of the same shape."
        )
    if shape.kind != "images":
        return data.x[chosen]
    out = torch.empty(len(chosen), *shape, dtype=torch.uint8)
    for rows in torch.arange(len(chosen)).split(4096):  # in pieces: the floats take four times the room
        x = _channels(data.x[chosen[rows]].float(), shape[0], data.name)
        if x.shape[2:] != shape[1:]:
            x = torch.nn.functional.interpolate(x, size=shape[1:], mode="bilinear", antialias=True, align_corners=False)
        out[rows] = x.round().clamp(0, 255).to(torch.uint8)
    return out


def _channels(x: Tensor, wanted: int, name: str) -> Tensor:
    have = x.shape[1]
    if have == wanted:
        return x
    if have == 1:
        return x.expand(-1, wanted, -1, -1)
    if wanted == 1 and have == 3:
        return (x * torch.tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)
    raise SettingError(
        f"public_dataset = {name!r} has {have} channels, but the task's images have {wanted}. Grey images fit any "
        "number of channels, and colour images can become grey. Choose such a data set."
    )
