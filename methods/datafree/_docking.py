"""The docking layers of DFFKE, z(.; theta_k^z): R^{h_k} -> R^h (Section 3.1), one linear layer per client, and their
training towards one embedding space (Eq. 11).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit import Opt, Server, State, Turns, load, state_of


class Docking(nn.Module):
    """z(.; theta_k^z) of all clients side by side, and the temporary head l(.; theta_global^l).

    Narrower embeddings are padded with zeros, whose weights get no gradient. So one product serves a mixed batch.
    """

    def __init__(self, layers: list[nn.Linear], classes: int) -> None:
        super().__init__()
        width = max(layer.in_features for layer in layers)
        padded = [F.pad(layer.weight.detach().T, (0, 0, 0, width - layer.in_features)) for layer in layers]
        self.weight = nn.Parameter(torch.stack(padded))  # client, h_k, h
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))
        self.head = nn.Linear(layers[0].out_features, classes)

    def forward(self, e: Tensor, k: Tensor) -> Tensor:
        own = F.one_hot(k, len(self.weight)).to(e.dtype)
        placed = (own[:, :, None] * e[:, None]).flatten(1)  # in the place of its client, with zeros in all others
        return self.head(placed @ self.weight.flatten(0, 1) + own @ self.bias)

    def layer(self, position: int, width: int) -> State:
        return State({"weight": self.weight.detach()[position, :width].T, "bias": self.bias.detach()[position]})


def z(e: Tensor, theta_z: State) -> Tensor:
    return F.linear(e, theta_z["weight"], theta_z["bias"])


def alignment(f: Any, e: Tensor, k: Tensor, y: Tensor) -> Tensor:
    """Return CE(l(z(e; theta_k^z); theta_global^l), y), Eq. 11."""
    return F.cross_entropy(f(e, k), y, reduction="none")


def unify(
    server: Server,
    shared: Mapping[int, tuple[Tensor, Tensor]],
    before: Mapping[int, State],
    h: int,
    *,
    epochs: int,
    batch: int | Literal["client"],
    opt: Opt,
    alike: bool = False,
    rests: bool = False,
) -> dict[int, State]:
    """Train theta_k^z and the temporary head together on everybody's (E_k, Y_k) (Eq. 11), and return the theta_k^z.

    The head is dropped. A layer in `before` goes on from there; with `alike`, all others of one width begin with the
    same weights. With batch = "client", an epoch is one step on all rows of each client in turn; with `rests`, Adam
    leaves the other clients' layers alone in that step.
    """
    widths = {k: e.shape[1] for k, (e, _) in shared.items()}
    layers = {k: nn.Linear(width, h) for k, width in widths.items()}
    if alike:
        first = {layer.in_features: state_of(layer) for layer in reversed(layers.values())}
        for layer in layers.values():
            load(layer, first[layer.in_features])
    for k in layers.keys() & before.keys():
        load(layers[k], before[k])
    model = Docking(list(layers.values()), server.classes).to(server.device)
    if rests:
        return _in_turn(server, layers, model.head, shared, epochs, opt)
    pad = max(widths.values())
    e = torch.cat([F.pad(e, (0, pad - e.shape[1])) for e, _ in shared.values()])
    owner = torch.cat([torch.full_like(y, position) for position, (_, y) in enumerate(shared.values())])
    y = torch.cat([y for _, y in shared.values()])
    sizes = tuple(len(y_k) for _, y_k in shared.values())
    one_step_each: dict[str, Any] = {"batch": max(sizes), "turns": Turns(sizes, "epoch")}
    how = one_step_each if batch == "client" else {"batch": batch}
    server.fit(model, alignment, (e, owner, y), epochs=epochs, opt=opt, **how)
    return {k: model.layer(position, width) for position, (k, width) in enumerate(widths.items())}


def _in_turn(
    server: Server,
    layers: Mapping[int, nn.Linear],
    head: nn.Linear,
    shared: Mapping[int, tuple[Tensor, Tensor]],
    epochs: int,
    opt: Opt,
) -> dict[int, State]:
    """Train each layer in its own client's steps alone, the head in all, and return the layers.

    A layer without a gradient is none of Adam's business: neither its moments nor its decay move it.
    """
    clients = [(layers[k].to(server.device), e, y) for k, (e, y) in shared.items()]
    of = clients[:1]

    def next_client(step: int) -> None:
        of[0] = clients[step % len(clients)]

    def loss() -> Tensor:
        z, e, y = of[0]
        return F.cross_entropy(head(z(e)), y)  # Eq. 11, of one client

    parameters = [*head.parameters(), *(p for z, _, _ in clients for p in z.parameters())]
    server.optimise(parameters, loss, steps=epochs * len(clients), opt=opt, before=next_client)
    return {k: state_of(layer) for k, layer in layers.items()}
