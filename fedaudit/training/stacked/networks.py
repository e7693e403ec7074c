"""Many networks at once: teachers, encoders, clients' models on the server, run stacked by architecture.

Ten networks that look at the same images one after the other leave most of a GPU idle. Here those of one architecture
are one network whose tensors have a further dimension: one pass answers for all of them. Gradients reach the images,
not the networks.

    teachers = Many(models)                  # a list of them; parameters are read now: make it anew after training one
    teachers(x)                              # [f_0(x), f_1(x), ...], in the order of `models`
    teachers.encode(x)                       # their embeddings
    teachers.each([x_0, x_1, ...])           # f_0(x_0), f_1(x_1), ...: each has its own rows, any number of them
    teachers(x, only=[0, 3])                 # some of them: those with weight 0 on a batch cost nothing
    teachers.picked(which, x)                # the one whose number the tensor `which` holds, for recorded steps
    picked_beside(teachers, which, peers, x) # the same, and the answers of other networks, all at once

Deep and wide networks are faster side by side, each on a stream of its own (see `side_by_side`). They run that way
where steps are recorded, with factors of 16 bits where the setting says so.

Only the stacked engine does this. The others run the networks one after the other and keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedaudit.training.cuda_graphs import capturing, clocked, halves, may_choose, records_steps, stacks_networks
from fedaudit.training.folded_norms import folded
from fedaudit.training.stacked.layers import quicker
from fedaudit.training.stacked.likeness import same_hooks, structure
from fedaudit.training.stacked.mapped_loss import PRODUCTS_WIN, Caller, picking, places
from fedaudit.training.stacked.masked_norms import one_channel
from fedaudit.training.stacked.side_by_side import as_tensor_cores_take_it, each_on_its_lane, goes_apart, rounded
from fedaudit.training.stacked.stackable import rowwise

_faster: dict[Any, bool] = {}  # whether convolutions as products were the faster way, by what was measured


class Many(list[nn.Module]):
    """K networks that run as one, each in its present mode. Their tensors are copied: later training does not reach
    them.
    """

    def __init__(self, networks: Iterable[nn.Module], *, stacked: bool | None = None):
        super().__init__(networks)
        groups = (
            _groups(self) if (stacks_networks() if stacked is None else stacked) else [[i] for i in range(len(self))]
        )
        self._group_of = {i: group for group in groups for i in group}
        self._stacks = {id(group): _Stack([self[i] for i in group]) for group in groups if len(group) > 1}
        self._layers = [layer for f in self for layer in f.modules()]

    def __call__(self, x: Tensor, only: Sequence[int] | None = None) -> list[Tensor]:
        return self._all("forward", x, only)

    def encode(self, x: Tensor, only: Sequence[int] | None = None) -> list[Tensor]:
        return self._all("encode", x, only)

    def classify(self, e: Tensor, only: Sequence[int] | None = None) -> list[Tensor]:
        return self._all("classify", e, only)

    def each(self, xs: Sequence[Tensor], method: str = "forward", only: Sequence[int] | None = None) -> list[Tensor]:
        """Return every network's answer to its own rows."""
        chosen = range(len(self)) if only is None else only
        return self._run(method, dict(zip(chosen, xs, strict=True)), list(chosen))

    @property
    def pickable(self) -> bool:
        """Return whether all are one stack, from which a recorded step can pick one by a number on the device."""
        return len(self._stacks) == 1 and len(self._group_of[0]) == len(self)

    def picked(self, which: Tensor, x: Tensor) -> Tensor:
        """Return the answer of one network, the one whose number is in `which`: a recorded step reads it there, so that
        the same recording serves all of them.
        """
        return self._stacks[id(self._group_of[0])].picked(which, x)

    def side_by_side(self, x: Tensor) -> _Stack | None:
        """Return the stack of all networks if they look at these rows side by side, each by itself; else None."""
        if not self.pickable or self._heard:
            return None
        stack = self._stacks[id(self._group_of[0])]
        return stack if stack.apart([x]) and not stack.thawed else None

    @property
    def _heard(self) -> bool:
        """Return whether somebody listens to a layer: hooks are called by the network itself only."""
        return any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers)

    def _all(self, method: str, x: Tensor, only: Sequence[int] | None) -> list[Tensor]:
        chosen = list(range(len(self)) if only is None else only)
        return self._run(method, dict.fromkeys(chosen, x), chosen)

    def _run(self, method: str, rows: dict[int, Tensor], chosen: list[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        heard = self._heard
        for i in chosen:
            if i in found:
                continue
            group = [j for j in self._group_of[i] if j in rows]
            stack = self._stacks.get(id(self._group_of[i]))
            if stack is None or len(group) == 1 or heard or stack.thawed:
                found[i] = _call(self[i], method, rows[i])
                continue
            where = [self._group_of[i].index(j) for j in group]
            found |= dict(zip(group, stack(method, where, [rows[j] for j in group]), strict=True))
        return [found[i] for i in chosen]


class _Stack:
    """Networks of one architecture, with their tensors stacked."""

    def __init__(self, networks: Sequence[nn.Module]):
        bare, states, self._norms = folded(networks)  # frozen batch norms become part of the convolutions before them
        first = next(networks[0].parameters(), None)
        self._caller = Caller(quicker(bare) if first is not None and _on_gpu(first) else bare)
        self._places = places(self._caller)
        self._bare = bare
        self._laid: dict[Any, dict[str, Tensor]] = {}  # by precision: all tensors as tensor cores take them
        self._tensors = {name: torch.stack([s[name].detach() for s in states]) for name in states[0]}
        self._fills = all(rowwise(layer, not layer.training) for layer in networks[0].modules())
        self._convolves = any(isinstance(layer, nn.Conv2d) for layer in networks[0].modules())
        self._structure = repr(structure(networks[0]))
        self._count = len(networks)

    @property
    def thawed(self) -> bool:
        """Return whether a batch norm that was folded is in training again."""
        return any(norm.training for norm in self._norms)

    def __call__(self, method: str, where: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        if self.apart(rows):
            return each_on_its_lane([self.one_apart(method, i) for i in where], rows)
        tensors = self._tensors
        if len(where) < self._count:
            index = torch.tensor(where, device=rows[0].device)
            tensors = {name: t.index_select(0, index) for name, t in tensors.items()}
        if all(row is rows[0] for row in rows):
            return list(self._mapped(method, tensors, rows[0], None).unbind(0))
        sizes = [len(row) for row in rows]
        if min(sizes) < max(sizes) and not self._fills:  # filling rows would enter a batch's statistics
            one = self._one(method)
            return [one({n: t[i] for n, t in tensors.items()}, row) for i, row in enumerate(rows)]
        most = max(sizes)
        filled = torch.stack([row if len(row) == most else _fill(row, most) for row in rows])
        out = self._mapped(method, tensors, filled, 0)
        return [of_one[:size] for of_one, size in zip(out.unbind(0), sizes, strict=True)]

    def picked(self, which: Tensor, x: Tensor) -> Tensor:
        """Return the answer of the network at the place that a tensor of one number says."""
        if self.apart([x]):
            return self.one_apart("forward", which)(x)
        found: Tensor = self._one("forward")({n: t.index_select(0, which)[0] for n, t in self._tensors.items()}, x)
        return found

    def apart(self, rows: Sequence[Tensor]) -> bool:
        """Return whether the networks run side by side.

        Without a recording, a pass of each would start too many kernels one after the other.
        """
        return goes_apart(self._bare, rows) and records_steps(rows[0].device)

    def one_apart(self, method: str, which: int | Tensor) -> Callable[[Tensor], Tensor]:
        """Return one network, whose images and filters lie as tensor cores take them. A recorded step reads its number
        from a tensor of one.
        """
        caller = Caller(self._bare)
        at, laid = places(caller), self._laid_out()

        def one(x: Tensor) -> Tensor:
            of_one = {name: _of_network(t, which) for name, t in laid.items()}
            placed = {place: of_one[name] for place, name in at.items()}
            with rounded(x.device):
                found: Tensor = functional_call(caller, placed, (method, as_tensor_cores_take_it(x)), tie_weights=False)
            return found if found.dtype != halves() else found.float()

        return one

    def _laid_out(self) -> dict[str, Tensor]:
        """Return all networks' tensors, filters with their channels behind, and factors in 16 bits where the setting
        says so: they are frozen, so that no step has to round them again.
        """
        if (dtype := halves()) not in self._laid:
            factors = {name for name, m in self._bare.named_modules() if type(m) in (nn.Conv2d, nn.Linear)}
            laid = self._laid[dtype] = {}
            for name, t in self._tensors.items():
                lies = t.movedim(2, -1).contiguous() if t.dim() == 5 else t
                rounds = name.rpartition(".")[0] in factors and dtype is not None and t.dtype == torch.float32
                laid[name] = lies.to(dtype) if rounds else lies
        return self._laid[dtype]

    def _mapped(self, method: str, tensors: dict[str, Tensor], x: Tensor, over: int | None) -> Tensor:
        """Run all networks at once. On a GPU, convolutions are products of matrices where that was measured to be
        faster.
        """

        def run(products: bool) -> Tensor:
            out: Tensor = vmap(self._one(method, products), in_dims=(0, over))(tensors, x)
            return out

        if not (self._convolves and _on_gpu(x) and may_choose()):
            return run(False)
        first = next(iter(tensors.values()))
        key = self._structure, method, len(first), tuple(x.shape), over, torch.backends.cudnn.allow_tf32
        if key not in _faster:
            if capturing():
                return run(False)
            with torch.no_grad():
                _faster[key] = PRODUCTS_WIN * _taken(lambda: run(True)) < _taken(lambda: run(False))
        return run(_faster[key])

    def _one(self, method: str, products: bool = False) -> Any:
        def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
            placed = {place: tensors[name] for place, name in self._places.items()}
            with picking(products):
                return functional_call(self._caller, placed, (method, x), tie_weights=False)

        return one


def picked_beside(one: Many, which: Tensor, others: Many, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the answer of the one network whose number is in `which`, and the answers of all others, to the same rows.

    Where both kinds run side by side, nobody waits for another.
    """
    picked, rest = one.side_by_side(x), others.side_by_side(x)
    if picked is None or rest is None:
        return one.picked(which, x), others(x)
    runs = [picked.one_apart("forward", which), *(rest.one_apart("forward", i) for i in range(len(others)))]
    found, *said = each_on_its_lane(runs, [x] * len(runs))
    return found, said


def _of_network(t: Tensor, which: int | Tensor) -> Tensor:
    """Return one network's part of a tensor of all, filters with their channels last in memory alone."""
    mine = t[which] if isinstance(which, int) else t.index_select(0, which)[0]
    return mine.movedim(-1, 1) if t.dim() == 5 else mine


def answers(networks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return the answers of all networks to x, (networks, rows, ...), in one pass if they are `Many`."""
    return torch.stack(networks(x) if isinstance(networks, Many) else [f(x) for f in networks])


def _taken(work: Callable[[], Tensor]) -> float:
    """Return the seconds that the work takes, or infinity if it cannot be done."""
    try:
        return clocked(work)
    except RuntimeError:  # memory, or an operation that cannot be mapped
        return math.inf


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _fill(row: Tensor, size: int) -> Tensor:
    return torch.cat([row, row.new_zeros((size - len(row), *row.shape[1:]))])


def _groups(networks: Sequence[nn.Module]) -> list[list[int]]:
    groups: list[list[int]] = []
    for i, f in enumerate(networks):
        for group in groups:
            if _alike(networks[group[0]], f):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _alike(f: nn.Module, g: nn.Module) -> bool:
    """Return whether two networks can be one stack.

    Structure, hooks and modes have to agree. Dropout that draws and a `one_channel` batch norm rule it out.
    """
    modes = [[m.training for m in net.modules()] for net in (f, g)]
    draws = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in f.modules())
    fits = not draws and not one_channel(f)
    return modes[0] == modes[1] and fits and structure(f) == structure(g) and same_hooks(f, g)


def _call(network: nn.Module, method: str, x: Tensor) -> Tensor:
    found: Tensor = network(x) if method == "forward" else getattr(network, method)(x)
    return found
