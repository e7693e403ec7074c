"""FedFree. Du et al., "FedFree: Breaking Knowledge-sharing Barriers through Layer-wise Alignment in Heterogeneous
Federated Learning", NeurIPS 2025, Algorithm 1. Its three modules: knowledge extraction is `extract` below, sharing
(Eqs. 3-5) lies in `_fedfree_sharing`, alignment (Eqs. 6-7) in `_fedfree_alignment`.

The paper leaves open or contradicts itself, and we chose:

- The start of the clients. Line 1 initialises G^0 and no client. With the run's `init = "common"`, clients of one
  architecture start alike; those of the global model's architecture start from G^0. `"own"` gives each client its own
  draw.
- A layer is a convolution or a linear layer, weight and bias together. Table A1 counts those and no others, and the
  global model has no batch norm to match one with.
- The global layer that corresponds to a client's ("layer type and potentially approximate depth") is the one of the
  same type that is nearest in relative depth; the shallower of two. Relative depth is the position among all layers
  from 0 (first) to 1 (last).
- Eq. 3 for unequal shapes: only the first min(inputs) input units and min(outputs) output units of both take part. A
  convolution is probed on patches as large as the larger kernel, with the smaller one in its middle: every further
  position would repeat that. A grouped convolution is read as the dense one that it equals; a missing bias is 0.
- Eq. 3's norm is summed over output units and averaged over the pseudo-samples. If it were summed over these too, the
  step would grow with their number, and alpha = 0.01 would diverge. Averaged, it is stable while
  alpha (1 + sqrt(inputs / samples))^2 < 1, so 256 `samples` serve every layer of Table A1. `steps` is 1, as Eqs. 4-5
  write it; all steps see the same X^. One step then moves a global layer by 2 alpha of its way to the clients' mean:
  2 % a round, a third of the way after 20 rounds in which it is updated, 98 % after 200. In early rounds G knows little
  more than its own start.
- The bins of Eq. 6 span each layer's own [min, max] (`bin_range = "own"`), the usual default of histograms. H then
  ignores scale. It is largest for uniform weights, which an untrained layer has. (Normally distributed ones look
  poorer: initialisation families are told apart.) It is at most ln(number of weights), so a small layer loses to a
  large one whatever they know. `"common"` puts the two layers of a comparison into the same bins, from the least to the
  largest weight of both. The logarithm is natural; the order `q` of Tsallis' entropy is not given and is 2 here.
- Eq. 6 admits every global layer of the client layer's type (`candidates = "type"`); Section 3.2 compares with "the
  updated global layers" (`"updated"`: those into which this round some client's layer went); the introduction with
  "corresponding" ones (`"corresponding"`). The equation is the default.
- Eq. 7 zero-fills entries of which its text says that they keep their local values (`fill = "keep"`), and line 19
  inserts an adapter of which nothing else is said. The equation is the default, for weight and bias each, and there is
  no adapter. Under batch norm a filter of zeros has variance 0, and the norm divides its gradient by
  sqrt(epsilon) = 0.003. If that gradient is not stopped (a short cut, as in ResNets, or a shift above 0 before the
  ReLU), it grows a hundredfold. For example, the global conv2 put into resnet18's layer4.0.conv2 leaves 2.2 % of it
  nonzero and raises its gradient's norm from 5 to 550, so that the next local training starts with a leap. If it is
  stopped, the filter is dead. `keep` does neither.
- The model that is evaluated. Algorithm 1 ends a round by replacing a layer of a model that was just trained; Section
  3.5 counts on the local training that follows. A client deploys its model as trained (`deploy = "trained"`, the
  default), or with the layer just received (`"aligned"`). The other one is evaluated beside it.
- Section 4.1 gives clients architectures at random; here they are dealt in turn, so that a setting names them.
- E is 5 in Section 4.1 and 30 in Table A2; 5 here. The "plain averaging" of Figure 4(b) averages over the clients that
  have an entry in the shared block; entries that none has stay.
- The choice of a client's layers depends on the data (Eq. 2): it is a release like the layers themselves.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit import (
    Client,
    Cohort,
    Down,
    Method,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    ce,
    load,
    private,
    register,
    sgd,
    state_of,
)
from fedaudit.errors import SettingError
from fedaudit.methods.layers._fedfree_alignment import Entropy, Fill, entropy, gains, project
from fedaudit.methods.layers._fedfree_layers import (
    Layer,
    Weights,
    billed,
    chosen,
    corresponding,
    layers_of,
    named,
    of_layer,
    types_in,
    weights_of,
)
from fedaudit.methods.layers._fedfree_sharing import averaged, mapped_to, pseudo_data, transferred

Layers = Mapping[str, Layer]


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


def relative_change(before: State, after: State, names: list[str]) -> Tensor:
    """Return Delta theta_l = ||theta_l^t - theta_l^{t-1}||^2 / ||theta_l^{t-1}||^2 for each layer (Eq. 2)."""
    changes = []
    for name in names:
        old, new = (torch.cat([t.flatten() for t in of_layer(s, name).values()]) for s in (before, after))
        changes.append((new - old).square().sum() / old.square().sum().clamp(min=torch.finfo(old.dtype).tiny))
    return torch.stack(changes)


@register("fedfree", tables="FedFree")
class FedFree(Method):
    """Share layers between unlike models, as far as they gain knowledge. A client sends some of its layers."""

    single_replies: ClassVar[str] = "the layers of each client are compared and distributed one by one"

    on_digits: ClassVar = {"E": 5, "B": 16, "eta": 0.1}
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
    bin_range: Literal["own", "common"] = "own"  # of each layer, or of both that Eq. 6 compares
    q: float = 2.0  # order of the Tsallis entropy
    candidates: Literal["type", "updated", "corresponding"] = "type"  # global layers that Eq. 6 compares with
    fill: Fill = "zero"  # Eq. 7, or its text
    deploy: Literal["trained", "aligned"] = "trained"  # before the received layer is put in, or after

    def server_arch(self, model: str) -> str:
        return "fedfree_cnn"  # Table A1, Global Model

    def init(self, server: Server) -> Global:
        model = server.model()
        arch = str(model.arch)
        if any(layer.groups > 1 for layer in layers_of(arch, server.shape, server.classes).values()):
            raise SettingError(
                f"FedFree's global model cannot be {arch!r}: dense layers cannot be transferred into its grouped "
                "convolutions. Choose another --server-model; the paper's is fedfree_cnn."
            )
        return Global(arch, state_of(model))  # line 1: G^0

    def round(self, s: Global, server: Server, cohort: Cohort) -> Global:
        L = cohort.ask(self.extract, Go())  # lines 4-8: L_i^t of each client i
        ours = layers_of(s.arch, server.shape, server.classes)
        theirs = {i: layers_of(server.arch(i), server.shape, server.classes) for i in L}
        G, updated = self.share_knowledge(s.G, L, ours, theirs, server)  # lines 9-13
        cohort.ask(self.align, self.distribute(G, L, ours, theirs, updated))  # lines 14-21
        return Global(s.arch, G)

    def extract(self, client: Client, msg: Go) -> Critical:  # on client i
        before = state_of(client.model)  # theta_i^{t-1}
        client.memory.pop("trained", None)
        client.fit(ce, epochs=self.E, batch=self.B, opt=sgd(self.eta))  # line 5
        theta, types = state_of(client.model), types_in(client.model)
        names = list(types)
        if self.select == "random":
            order = torch.randperm(len(names), generator=client.rng("random layers"), device=client.device)
        else:
            order = relative_change(before, theta, names).argsort(descending=True, stable=True)  # Eq. 2
        critical = [names[n] for n in order[: self.k].tolist()]  # line 6: top k
        layers = State({full: t for name in critical for full, t in of_layer(theta, name).items()})
        return Critical(layers, {name: types[name] for name in critical})  # line 7

    def share_knowledge(
        self, G: State, L: Mapping[int, Any], ours: Layers, theirs: Mapping[int, Layers], server: Server
    ) -> tuple[State, set[str]]:
        """Return the global model with all clients' layers transferred into it, and the names of the layers that
        changed.
        """
        mapped = mapped_to(G, {i: reply.layers for i, reply in L.items()}, ours, theirs)
        if self.share == "average":
            return averaged(G, mapped), set(mapped)
        X = pseudo_data(G, mapped, self.samples, server)  # line 10
        return transferred(G, mapped, X, server, steps=self.steps, alpha=self.alpha), set(mapped)  # lines 11-13

    def distribute(
        self, G: State, L: Mapping[int, Any], ours: Layers, theirs: Mapping[int, Layers], updated: set[str]
    ) -> dict[int, Knowledge]:
        """Return a message for each client that can gain: the global layer of the largest gain, and the layer to
        replace.
        """
        H = functools.partial(entropy, bins=self.bins, kind=self.entropy, q=self.q)
        g = {j: G[f"{j}.weight"] for j in ours}
        H_g: dict[str, Tensor] = {}
        messages = {}
        for i, reply in L.items():
            pairs = [
                (name, j)
                for name, kind in reply.types.items()
                for j in ours
                if ours[j].type == kind and self._admitted(j, theirs[i][name], ours, updated)
            ]
            theta = {name: reply.layers[f"{name}.weight"] for name in reply.types}
            KGE = gains(pairs, theta, g, H, self.bin_range, H_g)  # Eq. 6
            best = max(KGE, key=KGE.__getitem__, default=None)  # line 16: l and j*
            if best is not None and KGE[best] > 0:  # line 17
                messages[i] = Knowledge(best[0], of_layer(G, best[1]))  # line 18
        return messages

    def _admitted(self, j: str, layer: Layer, ours: Layers, updated: set[str]) -> bool:
        """Return whether Eq. 6 compares the global layer j, of the same type, with a client's layer."""
        if self.candidates == "updated":
            return j in updated
        return self.candidates == "type" or j == corresponding(layer, ours)

    def align(self, client: Client, msg: Knowledge) -> Aligned:  # on client i
        theta = state_of(client.model)
        mine, g = weights_of(theta, msg.layer), weights_of(msg.g, next(iter(msg.g)).rpartition(".")[0])
        b = None if mine.b is None else project(g.b, mine.b, self.fill)
        theta.update(named(msg.layer, Weights(project(g.w, mine.w, self.fill), b)))  # Eq. 7
        load(client.model, theta)
        client.memory["trained"] = named(msg.layer, mine)
        return Aligned()

    def _trained(self, client: Client) -> nn.Module:
        """Return the model before the received layer was put in. If none was received, return it as it is."""
        return load(copy.deepcopy(client.model), {**client.model.state_dict(), **client.memory.get("trained", {})})

    def personal(self, client: Client) -> nn.Module:
        return self._trained(client) if self.deploy == "trained" else client.model

    def points(self, client: Client) -> dict[str, nn.Module]:
        return {"aligned": client.model} if self.deploy == "trained" else {"trained": self._trained(client)}

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        """Return the bytes of the layers that the round chose.

        When planning, each client sends k layers of the mean size, and receives one global layer of the mean size,
        which is the most that it can receive.
        """
        ours = layers_of(plan.server_arch, plan.shape, plan.classes)
        theirs = {i: layers_of(plan.archs[i], plan.shape, plan.classes) for i in plan.participants}
        L = {i: chosen(plan.choice("Critical.layers", i)) for i in plan.replied(0)}
        g = {i: chosen(plan.choice("Knowledge.g", i)) for i in plan.asked(1)}
        replaced = {i: chosen(plan.choice("Knowledge.layer", i)) for i in plan.asked(1)}

        def size(name: str, layer: Layer) -> int:
            return layer.bytes

        def text(name: str, layer: Layer) -> int:
            return len(name.encode()) + len(layer.type)

        def only_name(name: str, layer: Layer) -> int:
            return len(name.encode())

        return {
            ("up", "Critical.layers"): sum(billed(size, theirs[i], L[i], self.k) for i in L),
            ("up", "Critical.types"): sum(billed(text, theirs[i], L[i], self.k) for i in L),
            ("down", "Knowledge.layer"): sum(billed(only_name, theirs[i], replaced[i], 1) for i in g),
            ("down", "Knowledge.g"): sum(billed(size, ours, g[i], 1) for i in g),
        }
