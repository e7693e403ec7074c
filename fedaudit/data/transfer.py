"""A public transfer set from another data set: its images in the shape of the task's, its labels dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit.data.datasets import Dataset, load
from fedaudit.errors import SettingError

GREY = (0.299, 0.587, 0.114)  # of red, green and blue, as ITU-R BT.601 weighs them


def transfer_images(name: str, root: str, shape: tuple[int, int, int], share: float, rng: torch.Generator) -> Tensor:
    """A random share of the records of `name` (0: all of them), uint8 and of the given shape."""
    return fitted(load(name, root), shape, share, rng)


def fitted(data: Dataset, shape: tuple[int, int, int], share: float, rng: torch.Generator) -> Tensor:
    """Channels first, so that fewer numbers are resized where they become fewer; then bilinear, antialiased."""
    n = len(data.x)
    wanted = max(int(share * n + 0.5), 1) if share else n
    chosen = torch.randperm(n, generator=rng)[:wanted].sort().values
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
        f"public_dataset = {name!r} has {have} channels and the task's images have {wanted}: only grey images can "
        "become any, and colour images grey."
    )
