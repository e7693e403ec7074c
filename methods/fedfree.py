"""FedFree. Du et al., "FedFree: Breaking Knowledge-sharing Barriers through Layer-wise Alignment in Heterogeneous
Federated Learning", NeurIPS 2025, Algorithm 1.

The paper leaves open or contradicts itself, and we chose:

- What a layer is: a convolution or a linear layer, weight and bias together. Table A1 counts those and no others, and
  the global model has no batch norm to match one with.
- Which global layer corresponds to a client's ("layer type and potentially approximate depth"): of the same type, the
  nearest in relative depth, which is the position among all layers from 0 (first) to 1 (last); the shallower of two.
- Eq. 3 for unequal shapes: only the first min(inputs) input units and min(outputs) output units of both take part. A
  convolution is probed on patches as large as the larger kernel, the smaller one in its middle: every further position
  would repeat that. A grouped convolution is read as the dense one that it equals; a missing bias is 0.
- Eq. 3's norm: summed over output units, averaged over the pseudo-samples. Summed over them too, the step would grow
  with their number, and alpha = 0.01 diverge: averaged it is stable while alpha (1 + sqrt(inputs / samples))^2 < 1, so
  256 `samples` serve every layer of Table A1. `steps` is 1, as Eqs. 4-5 write it; all steps see the same X^.
- The bins of Eq. 6 span each layer's own [min, max], as histograms do when nobody says otherwise. H then ignores scale,
  is largest for uniform weights, which is what an untrained layer has, and is at most ln(number of weights): a small
  layer loses to a large one whatever they know. Natural logarithm; the order `q` of Tsallis' entropy is not given: 2.
- Eq. 6 admits every global layer of the client layer's type; the introduction speaks of "corresponding" layers. The
  equation is the default (`candidates = "type"`), the other is `"corresponding"`.
- Eq. 7 zero-fills what its text says keeps its local values (`fill = "keep"`), and line 19 inserts an adapter of which
  nothing else is said: the equation is the default, for weight and bias each, and there is no adapter.
- What is evaluated. Algorithm 1 ends a round by replacing a layer of a model that was just trained; Section 3.5 counts
  on the local training that follows. A client deploys its model as trained (`deploy = "trained"`, the default), or with
  the layer just received (`"aligned"`).
- Section 4.1 gives clients architectures at random; here they are dealt in turn, so that a setting names them.
- E is 5 in Section 4.1 and 30 in Table A2; 5 here. The "plain averaging" of Figure 4(b) averages over the clients that
  have an entry in the shared block; entries that none has stay.
- Which clients' layers are chosen depends on the data (Eq. 2): it is a release like the layers themselves.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from fedaudit import Down, Method, Record, State, Up, ce, load, private, register, sgd, state_of
from fedaudit.errors import SettingError
from fedaudit.training import models

TYPES = {nn.Conv2d: "conv", nn.Linear: "linear"}


class Go(Down):
    pass


class Critical(Up):
    layers: State = private("layers", via="model", unit="client")  # L_i^t
    types: dict[str, str] = private("layers", via="model", unit="client")  # of each layer in L_i^t, by its name


class Knowledge(Down):
    layer: str  # the client's layer l that is to be replaced
    g: State  # g_{j*}^t


class Aligned(Up):
    pass


class Global(Record):
    arch: str
    G: State


# --- layers ------------------------------------------------------------------------------------------------------


def types_in(model: nn.Module) -> dict[str, str]:
    """The model's layers from first to last, and the type of each."""
    return {name: kind for name, m in model.named_modules() for of, kind in TYPES.items() if isinstance(m, of)}


def of_layer(state: State, name: str) -> State:
    """The weight and, where there is one, the bias of a layer."""
    return State({full: state[full] for full in (f"{name}.weight", f"{name}.bias") if full in state})


@dataclass(frozen=True)
class Layer:
    type: str
    depth: float  # relative: 0 the first, 1 the last
    groups: int
    bytes: int


@functools.cache
def layers_of(arch: str, shape: tuple[int, int, int], classes: int) -> dict[str, Layer]:
    """The layers of an architecture: public knowledge, found without allocating the model."""
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        net = models.build(arch, shape=shape, classes=classes)
    types, found = types_in(net), {}
    for position, (name, kind) in enumerate(types.items()):
        module = net.get_submodule(name)
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        found[name] = Layer(kind, position / max(len(types) - 1, 1), getattr(module, "groups", 1), size)
    return found


def corresponding(layer: Layer, among: dict[str, Layer]) -> str | None:
    """The global layer of the same type at the nearest relative depth; None if no layer is of that type."""
    same = [name for name, g in among.items() if g.type == layer.type]
    return min(same, key=lambda name: abs(among[name].depth - layer.depth), default=None)


# --- Eq. 2 -------------------------------------------------------------------------------------------------------


def relative_change(before: State, after: State, names: list[str]) -> Tensor:
    """Delta theta_l = ||theta_l^t - theta_l^{t-1}||^2 / ||theta_l^{t-1}||^2 for each layer."""
    changes = []
    for name in names:
        old, new = (torch.cat([t.flatten() for t in of_layer(s, name).values()]) for s in (before, after))
        changes.append((new - old).square().sum() / old.square().sum().clamp(min=torch.finfo(old.dtype).tiny))
    return torch.stack(changes)


# --- Eq. 3 -------------------------------------------------------------------------------------------------------


def kernel(weight: Tensor, groups: int = 1, outputs: int | None = None) -> Tensor:
    """A layer's weight as outputs x inputs x height x width: linear layers are 1 x 1, grouped ones made dense. Of those
    the first `outputs` are enough: all of them can be many."""
    if weight.dim() == 2:
        return weight[:, :, None, None]
    if groups == 1:
        return weight
    in_a_group = len(weight) // groups
    weight = weight[:outputs]
    rows = torch.arange(len(weight), device=weight.device)
    dense = weight.new_zeros(len(weight), groups, *weight.shape[1:])
    dense[rows, rows // in_a_group] = weight
    return dense.flatten(1, 2)


def centred(weight: Tensor, h: int, w: int) -> Tensor:
    """The kernel in the middle of h x w: zeros around it, or its rim cut off."""
    dh, dw = h - weight.shape[2], w - weight.shape[3]
    return pad(weight, (dw // 2, dw - dw // 2, dh // 2, dh - dh // 2))


def output(weight: Tensor, bias: Tensor | None, X: Tensor, outputs: int, inputs: int) -> Tensor:
    """theta X^ on the shared block: samples x outputs."""
    w = centred(weight[:outputs, :inputs], *X.shape[2:])
    y = X[:, :inputs].flatten(1) @ w.flatten(1).T
    return y if bias is None else y + bias[:outputs]


def distillation_loss(g: tuple[Tensor, Tensor | None], thetas: list[tuple[Tensor, Tensor | None]], X: Tensor) -> Tensor:
    """L_D: the mean over client layers of ||g X^ - theta X^||^2; kernels as `kernel` gives them."""
    total = X.new_zeros(())
    for theta in thetas:
        outputs, inputs = (min(g[0].shape[i], theta[0].shape[i]) for i in (0, 1))
        difference = output(*g, X, outputs, inputs) - output(*theta, X, outputs, inputs)
        total = total + difference.square().sum(1).mean()
    return total / len(thetas)


def average(g: Tensor, thetas: list[Tensor]) -> Tensor:
    """Figure 4(b): each entry of g as the mean over the client tensors that have it."""
    total, count = torch.zeros_like(g), torch.zeros_like(g)
    for theta in thetas:
        shared = theta[tuple(slice(n) for n in g.shape[:2])]  # a bias has one dimension, a kernel four
        block = tuple(slice(n) for n in shared.shape[:2])
        fits = (lambda t: centred(t, *g.shape[2:])) if g.dim() == 4 else (lambda t: t)
        total[block] += fits(shared)
        count[block] += fits(torch.ones_like(shared))
    return torch.where(count > 0, total / count.clamp(min=1), g)


# --- Eq. 6 and 7 -------------------------------------------------------------------------------------------------

Entropy = Literal["shannon", "tsallis", "collision"]


def entropy(weight: Tensor, bins: int, kind: Entropy = "shannon", q: float = 2.0) -> Tensor:
    """H of the weights in equal bins over their own [min, max]."""
    w = weight.flatten()
    low, high = w.aminmax()
    scaled = (w - low) / (high - low).clamp(min=torch.finfo(w.dtype).tiny)
    counts = (scaled * bins).long().clamp(max=bins - 1).bincount(minlength=bins)
    p = counts.double() / len(w)
    if kind == "shannon":
        return -torch.special.xlogy(p, p).sum()
    if kind == "tsallis":
        return (1 - (p**q).sum()) / (q - 1)
    return -p.square().sum().log()  # collision: Renyi's of order 2


def project(g: Tensor | None, theta: Tensor, fill: Literal["zero", "keep"]) -> Tensor:
    """Eq. 7: the first d_min numbers of theta are g's; what is left is 0, or stays."""
    flat = torch.zeros_like(theta).flatten() if fill == "zero" else theta.flatten().clone()
    if g is not None:
        d_min = min(g.numel(), theta.numel())
        flat[:d_min] = g.flatten()[:d_min]
    return flat.view_as(theta)


# --- Algorithm 1 -------------------------------------------------------------------------------------------------


@register("fedfree")
class FedFree(Method):
    quick: ClassVar = {"E": 1, "B": 64, "eta": 0.1, "samples": 32}
    presets: ClassVar = {
        name: {"E": 5, "B": 10, "eta": 0.01, "k": 2, "alpha": 0.01} for name in ("cifar10", "cifar100")
    }

    E: int = 5  # local epochs
    B: int = 10  # local batch size
    eta: float = 0.01  # local learning rate
    k: Annotated[int, Field(ge=1)] = 2  # critical layers that a client uploads
    select: Literal["change", "random"] = "change"  # by Eq. 2, or at random: the ablation of Figure 4(a)
    share: Literal["distil", "average"] = "distil"  # Eqs. 3-5, or plain averaging: the ablation of Figure 4(b)
    alpha: float = 0.01  # server learning rate
    steps: int = 1  # server steps a round
    samples: int = 256  # pseudo-samples
    entropy: Entropy = "shannon"
    bins: Annotated[int, Field(ge=1)] = 256
    q: float = 2.0  # order of the Tsallis entropy
    candidates: Literal["type", "corresponding"] = "type"  # global layers that Eq. 6 compares a client layer with
    fill: Literal["zero", "keep"] = "zero"  # Eq. 7, or its text
    deploy: Literal["trained", "aligned"] = "trained"  # before the received layer is put in, or after

    def server_arch(self, model):
        return "fedfree_cnn"  # Table A1, Global Model

    def init(self, server):
        model = server.model()
        if any(layer.groups > 1 for layer in layers_of(model.arch, server.shape, server.classes).values()):
            raise SettingError(
                f"FedFree's global model cannot be {model.arch!r}: dense layers cannot be transferred into its grouped "
                "convolutions. Choose another --server-model; the paper's is fedfree_cnn."
            )
        return Global(model.arch, state_of(model))  # line 1: G^0

    def round(self, s, server, cohort):
        L = cohort.ask(self.extract, Go())  # lines 4-8: L_i^t of each client i
        ours = layers_of(s.arch, server.shape, server.classes)
        theirs = {i: layers_of(server.arch(i), server.shape, server.classes) for i in L}
        G = self.share_knowledge(s.G, L, ours, theirs, server)  # lines 9-13
        cohort.ask(self.align, self.distribute(G, L, ours, theirs))  # lines 14-21
        return Global(s.arch, G)

    def extract(self, client, msg):  # on client i
        before = state_of(client.model)  # theta_i^{t-1}
        client.memory.pop("trained", None)
        client.fit(ce, epochs=self.E, batch=self.B, opt=sgd(self.eta))  # line 5
        theta, types = state_of(client.model), types_in(client.model)
        names = list(types)
        if self.select == "random":
            order = torch.randperm(len(names), generator=client.rng("random layers"), device=client.device)
        else:
            order = relative_change(before, theta, names).argsort(descending=True, stable=True)  # Eq. 2
        chosen = [names[i] for i in order[: self.k].tolist()]  # line 6: top k
        layers = State({full: t for name in chosen for full, t in of_layer(theta, name).items()})
        return Critical(layers, {name: types[name] for name in chosen})  # line 7

    def share_knowledge(self, G, L, ours, theirs, server):
        """The global model after all clients' layers were transferred into it (Eqs. 3-5)."""
        mapped: dict[str, list[tuple[Tensor, Tensor | None]]] = {}  # client layers by the global layer they map to
        for i, reply in L.items():
            for name in reply.types:
                j = corresponding(theirs[i][name], ours)
                if j is not None:
                    weight = kernel(reply.layers[f"{name}.weight"], theirs[i][name].groups, len(G[f"{j}.weight"]))
                    mapped.setdefault(j, []).append((weight, reply.layers.get(f"{name}.bias")))
        G = State(G, G.buffers)
        if self.share == "average":
            for j, thetas in mapped.items():
                weights, biases = [w for w, _ in thetas], [b for _, b in thetas if b is not None]
                G[f"{j}.weight"] = average(kernel(G[f"{j}.weight"]), weights).view_as(G[f"{j}.weight"])
                if f"{j}.bias" in G:
                    G[f"{j}.bias"] = average(G[f"{j}.bias"], biases)
            return G
        g = {full: G[full].clone().requires_grad_() for j in mapped for full in of_layer(G, j)}
        rng, X = server.rng("pseudo-data"), {}
        for j, thetas in mapped.items():
            sizes = [kernel(G[f"{j}.weight"]).shape, *(w.shape for w, _ in thetas)]
            shape = (self.samples, sizes[0][1], max(size[2] for size in sizes), max(size[3] for size in sizes))
            X[j] = torch.randn(shape, generator=rng, device=server.device)  # line 10: X^ ~ N(0, I)

        def L_D():  # of all layers: each term depends on its own layer alone
            return sum(
                distillation_loss((kernel(g[f"{j}.weight"]), g.get(f"{j}.bias")), thetas, X[j])  # Eq. 3
                for j, thetas in mapped.items()
            )

        if g:
            server.optimise(list(g.values()), L_D, steps=self.steps, opt=sgd(self.alpha))  # Eqs. 4, 5
        G.update({full: t.detach() for full, t in g.items()})
        return G

    def distribute(self, G, L, ours, theirs):
        """To each client that can gain, the global layer of the largest gain, and which of its layers to replace."""
        messages = {}
        H = functools.partial(entropy, bins=self.bins, kind=self.entropy, q=self.q)
        H_g = dict(zip(ours, torch.stack([H(G[f"{j}.weight"]) for j in ours]).tolist(), strict=True))
        for i, reply in L.items():
            H_theta = torch.stack([H(reply.layers[f"{name}.weight"]) for name in reply.types]).tolist()
            KGE = {
                (name, j): H_g[j] - h  # Eq. 6
                for (name, kind), h in zip(reply.types.items(), H_theta, strict=True)
                for j in ours
                if ours[j].type == kind and (self.candidates == "type" or j == corresponding(theirs[i][name], ours))
            }
            best = max(KGE, key=KGE.__getitem__, default=None)  # line 16: l and j*
            if best is not None and KGE[best] > 0:  # line 17
                messages[i] = Knowledge(best[0], of_layer(G, best[1]))  # line 18
        return messages

    def align(self, client, msg):  # on client i
        theta = state_of(client.model)
        mine = of_layer(theta, msg.layer)
        g = {full.rpartition(".")[2]: t for full, t in msg.g.items()}  # weight, bias
        theta.update({full: project(g.get(full.rpartition(".")[2]), t, self.fill) for full, t in mine.items()})  # Eq. 7
        load(client.model, theta)
        if self.deploy == "trained":
            client.memory["trained"] = mine
        return Aligned()

    def personal(self, client):
        return load(client.model, {**client.model.state_dict(), **client.memory.get("trained", {})})

    def traffic(self, plan):
        """The round's own choice of layers. When planning: k layers of the mean size from each client, and one global
        layer of the mean size to each, which is the most that a client can receive."""
        ours = layers_of(plan.server_arch, plan.shape, plan.classes)
        theirs = {i: layers_of(plan.archs[i], plan.shape, plan.classes) for i in plan.participants}
        L = {i: _layers(plan.choice("Critical.layers", i)) for i in plan.replied(0)}
        g = {i: _layers(plan.choice("Knowledge.g", i)) for i in plan.asked(1)}
        replaced = {i: _layers(plan.choice("Knowledge.layer", i)) for i in plan.asked(1)}

        def size(name, layer):
            return layer.bytes

        def text(name, layer):
            return len(name.encode()) + len(layer.type)

        def only_name(name, layer):
            return len(name.encode())

        return {
            ("up", "Critical.layers"): sum(_total(size, theirs[i], L[i], self.k) for i in L),
            ("up", "Critical.types"): sum(_total(text, theirs[i], L[i], self.k) for i in L),
            ("down", "Knowledge.layer"): sum(_total(only_name, theirs[i], replaced[i], 1) for i in g),
            ("down", "Knowledge.g"): sum(_total(size, ours, g[i], 1) for i in g),
        }


def _layers(choice):
    """The layers that a message named, as one string or as the tensors of a state; None when planning."""
    if isinstance(choice, str):
        return [choice]
    return None if choice is None else list(dict.fromkeys(full.rpartition(".")[0] for full in choice))


def _total(size, layers, chosen, count):
    """`size` summed over the chosen layers; when planning, over `count` layers of the mean size."""
    if chosen is not None:
        return sum(size(name, layers[name]) for name in chosen)
    return round(min(count, len(layers)) * sum(size(name, layer) for name, layer in layers.items()) / len(layers))
