"""Batches whose rows belong to several networks; each row goes through its own network.

The number of rows that belong to a network differs from batch to batch, so every step would have other shapes. Where
steps are recorded and networks run stacked, each network therefore gets as many rows as it has in any batch at most.
The rows that only fill up count nothing. All batches are known beforehand, so that a step only has to say which one is
next.

If each batch belongs to one network alone, nothing has to be filled up: a step picks that network by its number.

    mixed = Mixed(networks, sizes, order, device)  # sizes: rows of each network; order: the rows of each batch, sorted
    mixed.put(i)                                   # batch i is next; False: it has another size than the first
    mixed.index                                    # its rows
    mixed(x)                                       # each row's output from its own network, row by row
    mixed.owner                                    # where each batch has one network: its number, a tensor of one
    mixed.beside(x, others)                        # the same outputs, and those of all others to every row
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fedaudit.training.cuda_graphs import records_steps, stacks_networks
from fedaudit.training.stacked.networks import Many, picked_beside
from fedaudit.training.stacked.stackable import rowwise


class Mixed:
    def __init__(self, networks: Many, sizes: Sequence[int], order: Sequence[Tensor], device: torch.device):
        self._networks, self._order, self._device = networks, order, device
        owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        self._owners = [owner[rows] for rows in order]
        self._counts = [torch.bincount(mine, minlength=len(sizes)) for mine in self._owners]
        self._usual = len(order[0]) if order else 0
        self._most = torch.stack(self._counts).amax(0) if order else torch.zeros(len(sizes), dtype=torch.long)
        alone = all(rowwise(layer, not layer.training) for net in networks for layer in net.modules())
        self.repeats = alone and stacks_networks() and records_steps(device)  # each step is the same operations
        self._one_each = bool(order) and all(int((counts > 0).sum()) == 1 for counts in self._counts)
        if self._one_each and not networks.pickable:
            self.repeats = False
        self._memory: list[Tensor] = []
        self._whole: list[Tensor] = []
        if self.repeats:
            like = [i for i, rows in enumerate(order) if len(rows) == self._usual]
            self._at = {i: at for at, i in enumerate(like)}
            parts = zip(*(self._laid_out(i) for i in like), strict=True)
            self._whole = [torch.stack(part).to(device) for part in parts]
            self._memory = [part[0].clone() for part in self._whole]
        self.put(0)

    def put(self, i: int) -> bool:
        """Make batch i the next one, and return whether it has the usual size."""
        if i >= len(self._order):
            return True
        self.split: list[int] = self._counts[i].tolist()
        usual = len(self._order[i]) == self._usual
        if not self.repeats:
            self.index, self.owner = self._order[i].to(self._device), self._owners[i][:1].to(self._device)
        elif usual:
            for mine, whole in zip(self._memory, self._whole, strict=True):
                mine.copy_(whole[self._at[i]])
            self._next(self._memory)
        else:
            self._next([part.to(self._device) for part in self._laid_out(i)])
        return usual

    def _next(self, laid_out: Sequence[Tensor]) -> None:
        if self._one_each:
            self.index, self.owner = laid_out
        else:
            self.index, self._there, self._back = laid_out

    def _laid_out(self, i: int) -> tuple[Tensor, ...]:
        """Return three index tensors for batch i: its rows, where to fetch each place from, and each row's place.

        The places are those of all networks one after the other. A place that only fills up takes the batch's first
        row. Where the batch has one network, there are two: its rows, and the network's number.
        """
        if self._one_each:
            return self._order[i], self._owners[i][:1]
        mine, counts = self._owners[i], self._counts[i]
        first = counts.cumsum(0) - counts
        begins = self._most.cumsum(0) - self._most
        back = begins[mine] + torch.arange(len(mine)) - first[mine]
        there = torch.zeros(int(self._most.sum()), dtype=torch.long)
        there[back] = torch.arange(len(mine))
        return self._order[i], there, back

    def __call__(self, x: Tensor) -> Tensor:
        if self.repeats and self._one_each:
            return self._networks.picked(self.owner, x)
        laid_out = _moved(x, self._there, self._back) if self.repeats else x
        parts = enumerate(laid_out.split(self._most.tolist() if self.repeats else self.split))
        drawn = {place: part for place, part in parts if len(part)}
        found = torch.cat(self._networks.each(list(drawn.values()), only=list(drawn)))
        return _moved(found, self._back, self._there) if self.repeats else found

    def beside(self, x: Tensor, others: Many) -> tuple[Tensor, list[Tensor]]:
        """Return each row's output from its own network, and the answers of all other networks to every row."""
        if self.repeats and self._one_each:
            return picked_beside(self._networks, self.owner, others, x)
        return self(x), others(x)


def _moved(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """Return x[there], with a gradient that `back` moves back and that leaves out the filling rows.

    No two real rows share a place, so nothing has to be added up. torch would add the rows that share one, in no fixed
    order, or by a sort that cannot be recorded.
    """
    return cast(Tensor, _Moved.apply(x, there, back))


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[there]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0][back], None, None
