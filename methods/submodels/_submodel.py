"""Sub-models by width, and the selective average that puts them together again (DFRD, Section 2, Eq. 1).

`heterofl` (static), `feddropout` (random) and `fedrolex` (rolling) differ only in which units a client trains. They
share what is here: who gets which width, which units of which layer belong together, extraction, and Eq. 1.

- Units that must go together are found by walking the network's graph. A layer's outputs are the inputs of the next
  one, both sides of a sum have equal units, a concatenation keeps its parts, and a flattened channel takes its pixels
  along. Networks that split or shuffle channels, and transformers, are refused.
- A client's model is a dense, narrow network (`cnn@0.25`). It needs no index to train, and as many bytes travel as a
  network of that width has.
- If the setting's `model` names one family, widths follow the paper's budgets R_i. A list such as `cnn:2,cnn@0.5:3`
  says them itself. The global model is the family at full width.
- If nobody has R = 1, HeteroFL never trains the units beyond the widest client's: they stay as they were drawn, in the
  global model that is evaluated. With DFRD's rho = 5 that is so for five clients or fewer (three quarters of the
  parameters, for five); `rho` is therefore N - 1 there by default, which leaves the first client whole. Every round's
  record has the share of parameters that nobody has trained so far (diagnostic `untrained`). DFRD's own rho = 10 for
  ten clients has nobody at R = 1, and is left as it is.
- Eq. 1 leaves p_i open ("generally the size of data held"): it is n_i. HeteroFL and FedRolex average without weights in
  their papers; DFRD's equation is the default here, `weighted = false` gives theirs.
- Batch-norm statistics have a unit each, and are extracted and averaged like parameters (HeteroFL does otherwise).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, fx, nn

from fedaudit import (
    NUMBER,
    Client,
    Cohort,
    Down,
    Plan,
    Record,
    Sender,
    Server,
    Size,
    State,
    Up,
    ce,
    load,
    private,
    state_of,
)  # fmt: skip
from fedaudit.errors import SettingError
from fedaudit.methods.shared._local_training import WithLocalTraining
from fedaudit.shape import Shape
from fedaudit.training import models

Axis = tuple[int, ...] | None  # the groups of units that a dimension runs over, in order; None: taken whole
Units = dict[int, Tensor]  # group: the units taken, as indices into its full width
Where = dict[str, tuple[Tensor, ...]]  # tensor: indices that pick a sub-model's entries out of the full one's
Pick = Callable[[int, int], Tensor]  # full width, how many: which


# --- who gets which width -------------------------------------------------------------------------------------------


def budgets(N: int, sigma: int, rho: int) -> list[Fraction]:
    """Return R_i = (1/2)^min(sigma, floor(rho i / N)), i = 1..N (DFRD, Section 4.1).

    Our copy prints floor(rho / N), the same for all. With the i, rho = 40 gives everybody 1/16, as Section 4.2 says.
    """
    return [Fraction(1, 2 ** min(sigma, rho * i // N)) for i in range(1, N + 1)]


def default_rho(N: int) -> int:
    """Return DFRD's 5, or less where nobody of N clients would have the full width."""
    return min(5, N - 1)


def ratio_of(arch: str) -> Fraction:
    return Fraction(arch.partition("@")[2] or 1)


def family_of(model: str) -> str:
    """Return the one family that a setting's `model` names."""
    families = {block.partition(":")[0].strip().partition("@")[0] for block in model.split(",")}
    if len(families) > 1 or families & models.GROUPS.keys():
        raise SettingError(
            f"Sub-models are cut out of one network, and --model {model!r} names several families. Name one, such as "
            "cnn, or one family in several widths, such as cnn:2,cnn@0.5:3."
        )
    return families.pop()


# --- which units belong together ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """A network's groups of units, and which of them each dimension of each tensor runs over."""

    widths: dict[int, int]  # group: its full width
    axes: dict[str, tuple[Axis, ...]]  # tensor: its leading dimensions; those not named are taken whole


_SAME = {"relu", "relu6", "adaptive_avg_pool2d", "max_pool2d", "dropout", "flatten", "stochastic_depth", "mean"}
_JOIN = {"add", "iadd", "mul"}  # element by element: both sides have the same units (or one is a number)
_LAYERS = (
    nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Dropout, nn.Identity, nn.Flatten,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


@lru_cache
def layout(arch: str, shape: Shape, classes: int) -> Layout:
    """Return the layout, found by walking the network in the order of execution.

    That order numbers the groups, so the numbers are the same everywhere.
    """
    with torch.device("meta"):  # the structure is enough
        net = models.build(arch, shape=shape, classes=classes)

    def refuse(what: str) -> SettingError:
        return SettingError(
            f"Model {arch!r} has no sub-models: {what}, so which units belong together is not known. Use mlp, cnn, "
            "cnn_bn, convnet, fedfree_cnn or a ResNet."
        )

    try:
        graph = fx.symbolic_trace(net).graph
    except Exception as e:
        raise refuse(f"its layers cannot be traced ({type(e).__name__}: {e})") from e
    widths: dict[int, int] = {}
    parent: dict[int, int] = {}
    axes: dict[str, tuple[Axis, ...]] = {}
    flow: dict[fx.Node, Axis] = {}  # the units on dimension 1 of what each node puts out

    def new(width: int) -> Axis:
        group = len(parent)
        parent[group], widths[group] = group, width
        return (group,)

    def root(group: int) -> int:
        while parent[group] != group:
            group = parent[group]
        return group

    def join(a: Axis, b: Axis, where: str) -> Axis:
        if a is None or b is None or [widths[g] for g in a] != [widths[g] for g in b]:
            raise refuse(f"{where} combines layers of different widths")
        for one, other in zip(a, b, strict=True):
            parent[max(root(one), root(other))] = min(root(one), root(other))
        return a

    for node in graph.nodes:
        name = str(node.target)
        came = [flow[arg] for arg in node.all_input_nodes]
        if node.op == "call_module":
            layer = net.get_submodule(name)
            if isinstance(layer, nn.Conv2d) and layer.groups == 1:
                out = new(layer.out_channels)
                axes[f"{name}.weight"], axes[f"{name}.bias"] = (out, came[0]), (out,)
            elif isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels == layer.out_channels:
                out = came[0]  # depthwise: a filter belongs to its channel
                axes[f"{name}.weight"] = axes[f"{name}.bias"] = (out,)
            elif isinstance(layer, nn.Linear):
                out = None if name == "classifier" else new(layer.out_features)
                axes[f"{name}.weight"], axes[f"{name}.bias"] = (out, came[0]), (out,)
            elif isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
                out = came[0]
                axes |= {f"{name}.{part}": (out,) for part in ("weight", "bias", "running_mean", "running_var")}
            elif isinstance(layer, _LAYERS):
                out = came[0]
            else:
                raise refuse(f"{name} is a {type(layer).__name__}")
            flow[node] = out
        elif node.op in ("call_function", "call_method"):
            does = getattr(node.target, "__name__", name)
            if does == "cat":
                flow[node] = tuple(group for axis in came for group in axis or ())
            elif does in _JOIN and len(came) == 2:
                flow[node] = join(came[0], came[1], node.name)
            elif does in _SAME | _JOIN | {"truediv"}:
                flow[node] = came[0]
            else:
                raise refuse(f"{node.name} splits, moves or mixes channels")
        elif node.op == "get_attr":
            raise refuse(f"{name} is used outside of a layer")
        else:
            flow[node] = came[0] if came else None  # the images, and the logits

    named = {name: tuple(None if axis is None else tuple(map(root, axis)) for axis in of) for name, of in axes.items()}
    return Layout({g: w for g, w in widths.items() if root(g) == g}, named)


def choose(plan: Layout, R: Fraction, pick: Pick) -> Units:
    """Return ceil(R width) units of each group: the widths of `name@R`."""
    return {group: pick(width, max(1, math.ceil(width * R))) for group, width in plan.widths.items()}


def positions(plan: Layout, units: Units, full: Mapping[str, Tensor]) -> Where:
    """Return where a sub-model's entries lie in the full tensors: `full[name][where[name]]` is the sub-model's."""
    where: Where = {}
    for name, t in full.items():
        index = []
        for dim, axis in enumerate(plan.axes.get(name, ())[: t.dim()]):
            if axis is None:
                index.append(torch.arange(t.shape[dim], device=t.device))
                continue
            pixels = t.shape[dim] // sum(plan.widths[g] for g in axis)  # of a flattened channel; else 1
            begin, parts = 0, []
            for group in axis:
                parts.append(units[group].to(t.device) + begin)
                begin += plan.widths[group]
            channels = torch.cat(parts)
            index.append((channels[:, None] * pixels + torch.arange(pixels, device=t.device)).flatten())
        where[name] = (index[0][:, None], index[1]) if len(index) == 2 else tuple(index)
    return where


def extract(w: Mapping[str, Tensor], where: Where, buffers: frozenset[str] = frozenset()) -> State:
    """Return theta_i: the sub-model's own copy of its entries."""
    return State({name: t[where[name]].clone() for name, t in w.items()}, buffers)


@lru_cache
def full_shapes(arch: str, shape: Shape, classes: int) -> dict[str, torch.Size]:
    """Return the shape of each tensor of a network."""
    return {name: t.shape for name, t in models.structure(arch, shape=shape, classes=classes).state_dict().items()}


def placed(
    change: Mapping[str, Tensor], where: Where, shapes: Mapping[str, torch.Size], buffers: frozenset[str]
) -> State:
    """Return a sub-model's change as one of the full model: 0 for entries that the client did not train."""
    filled = {}
    for name, t in change.items():
        whole = t.new_zeros(shapes[name])
        whole[where[name]] = t
        filled[name] = whole
    return State(filled, buffers)


def average(w: State, change: Mapping[str, Tensor], share: Mapping[int, float], where: Mapping[int, Where]) -> State:
    """Return Eq. 1: each entry moves by the mean change over the clients that trained it; the others stay as they are.

    `change` is the mean over all clients of their changes, 0 for entries that a client did not train. Clients of one
    group have trained the same entries, `where` says which. `share` is a group's part of the weights. Whole numbers
    are in every sub-model.
    """
    mean = dict(w)
    for name, moved in change.items():
        old = w[name]
        held = torch.zeros_like(old, dtype=torch.float64)
        for group, part in share.items():
            held[where[group][name]] += part
        by = moved / held.to(moved.dtype) if old.is_floating_point() else moved
        mean[name] = torch.where(held > 0, old + by, old)
    return State(mean, buffers=w.buffers)


def marked(w: State, trained: Mapping[str, Tensor], where: Mapping[int, Where]) -> dict[str, Tensor]:
    """Return which entries of the parameters anybody has trained, after a round in which `where` was."""
    masks = {}
    for name, t in w.parameters.items():
        mask = trained[name].clone() if name in trained else torch.zeros_like(t, dtype=torch.bool)
        for of_client in where.values():
            mask[of_client[name]] = True
        masks[name] = mask
    return masks


def untrained(trained: Mapping[str, Tensor]) -> float:
    """Return the share of parameters that nobody has trained."""
    return 1 - sum(int(mask.sum()) for mask in trained.values()) / sum(mask.numel() for mask in trained.values())


# --- what the three methods share -----------------------------------------------------------------------------------


class Part(Down):
    w: State  # theta_i


class TrainedPart(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


class Placed(Up):
    """A client's part in Eq. 1."""

    change: State = private("gradients", via="model", unit="client")  # theta_i less what it was sent, placed in theta
    group: Tensor | None = private("count", via="model", unit="client")  # 1 for the client's group, else 0
    n: int = private("count", via="data", unit="client")


class Whole(Record):
    w: State  # theta
    trained: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # which entries anybody has trained so far


class SubModels(WithLocalTraining):
    """Partial training: extract, train, average. A method says in `units` which units a client trains."""

    alone_in_sums: ClassVar[str] = "entries of the model that one client alone trains are that client's"

    on_digits: ClassVar[Mapping[str, Any]] = {"E": 10, "B": 16, "eta": 0.1}
    quick: ClassVar[Mapping[str, Any]] = {"B": 32, "eta": 0.05}

    sigma: int = 4  # the narrowest client has (1/2)^sigma of the width
    rho: int | None = Field(default=None, ge=0)  # how fast budgets fall; None: 5, or N - 1 if N is at most 5
    weighted: bool = True  # p_i = n_i in Eq. 1; false: p_i = 1

    def archs(self, model: str, clients: int) -> list[str]:
        family_of(model)
        if "@" in model or "," in model or ":" in model:
            return models.assign(model, clients)
        scaled = budgets(clients, self.sigma, default_rho(clients) if self.rho is None else self.rho)
        return [model if R == 1 else f"{model}@{float(R)}" for R in scaled]

    def server_arch(self, model: str) -> str | None:
        return family_of(model)

    def init(self, server: Server) -> Whole:
        net = server.model()
        family = family_of(server.arch(0))
        if net.arch != family:
            raise SettingError(
                f"Sub-models of {family} are cut out of {family} itself; --server-model {net.arch} is another network. "
                "Leave it out."
            )
        layout(family, server.shape, server.classes)  # refuses at once a network that has no sub-models
        return Whole(state_of(net))

    def round(self, s: Whole, server: Server, cohort: Cohort) -> Whole:
        return self.settle(self.train(s, server, cohort), server, cohort)

    def train(self, s: Whole, server: Server, cohort: Cohort) -> Whole:
        plan, w = layout(family_of(server.arch(0)), server.shape, server.classes), self.travels(s.w)
        messages, where = dict[int, Down](), dict[int, Where]()
        for k in cohort.ids:
            units, message = self.units(plan, ratio_of(server.arch(k)), server, k)
            where[k] = positions(plan, units, w)
            messages[k] = message(extract(w, where[k], w.buffers))
        mean: Any = cohort.mean(self.client_update, messages, by="n" if self.weighted else None).value
        archs = tuple(map(server.arch, range(server.clients)))
        groups = self.groups(archs)
        trained = {groups[k]: where[k] for k in where}
        if mean.group is None:  # under a guarantee for clients nobody says who is in the sum, and all weigh the same
            share = {g: groups.count(g) / len(groups) for g in sorted(set(groups))}
            for g in share.keys() - trained.keys():
                units, _ = self.units(plan, ratio_of(archs[groups.index(g)]), server, groups.index(g))
                trained[g] = positions(plan, units, w)
        else:
            share = {g: part for g, part in enumerate(mean.group.tolist()) if part > 0}
        theta = average(s.w, mean.change, share, trained)  # Eq. 1
        return Whole(theta, marked(s.w, s.trained, {k: where[k] for k in cohort.ids}))

    def summand(self, sender: Sender, reply: Any, message: Any) -> Up:
        """Return a sub-model's change, placed in the full model, and the client's group."""
        if not isinstance(reply, TrainedPart):
            return cast(Up, reply)
        family = family_of(sender.arch)
        plan = layout(family, sender.shape, sender.classes)
        one = next(iter(reply.w.values()))
        shapes = full_shapes(family, sender.shape, sender.classes)
        full = {name: one.new_empty(()).expand(shapes[name]) for name in reply.w}
        where = positions(plan, self.taken(plan, sender, message), full)
        change = {name: t - message.w[name] for name, t in reply.w.items()}
        groups = self.groups(sender.archs)
        group = torch.zeros(max(groups) + 1, dtype=torch.float64, device=one.device)
        group[groups[sender.k]] = 1
        return Placed(placed(change, where, shapes, reply.w.buffers), group, reply.n)

    def groups(self, archs: tuple[str, ...]) -> list[int]:
        """Return the group of each client. Clients of a group train the same units in a round."""
        widths = sorted(set(map(ratio_of, archs)))
        return [widths.index(ratio_of(arch)) for arch in archs]

    def taken(self, plan: Layout, sender: Sender, message: Any) -> Units:
        """Return which units a client has trained, by what everybody knows of it and by what it was sent."""
        return self.units(plan, ratio_of(sender.arch), sender, sender.k)[0]

    def units(
        self, plan: Layout, R: Fraction, server: Server | Sender, k: int
    ) -> tuple[Units, Callable[[State], Down]]:
        """Return which units client k trains in this round, and the message that brings it its part."""
        raise NotImplementedError

    def travels(self, w: State) -> State:
        """Return the part of the global model that is sent, trained and averaged."""
        return w

    def settle(self, s: Whole, server: Server, cohort: Cohort) -> Whole:
        """Do what is left once a round's model is final: a distillation may come before it."""
        return s

    def client_update(self, client: Client, msg: Any) -> TrainedPart:
        load(client.model, msg.w)
        client.fit(ce, **self.local_training, batch=self.B, opt=self.optimiser(self.eta))
        return TrainedPart(state_of(client.model), len(client))

    def teacher(self, server: Server, k: int, w: State) -> nn.Module:
        """Return client k's model as the server can run it from the upload."""
        return server.model(server.arch(k), state=w)

    def goes_on(self) -> bool:
        return False

    def measures_statistics(self) -> bool:
        return False

    def predictor(self, s: Whole, server: Server) -> nn.Module:
        return server.model(state=s.w)

    def diagnostics(self, s: Whole) -> dict[str, float]:
        return {"untrained": untrained(s.trained)} if s.trained else {}

    def summed_numbers(self, plan: Plan) -> list[int]:
        return [plan.state().numbers + len(set(self.groups(tuple(plan.archs.values())))) + 1]

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Part.w"): sum((plan.state(k) for k in plan.asked(0)), Size()),
            ("up", "TrainedPart.w"): sum((plan.state(k) for k in plan.replied(0)), Size()),
            ("up", "TrainedPart.n"): NUMBER * len(plan.replied(0)),
        }
