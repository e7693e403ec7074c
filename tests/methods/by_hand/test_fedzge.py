"""A round of FedZGE by hand: Ma, Wang and Zhang, AAAI 2025, Algorithm 1 with E_G = 2 and two clients' networks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from by_hand import close, epoch, played, rng
from torch import nn
from torch.nn import functional as F

E_K, B_K, E_PRIME, E, B, Q, D_Z = 1, 32, 2, 3, 6, 3, 4
ETA_K, ETA, ETA_G = 0.01, 0.02, 0.003
TAU, BETA, EPSILON, C = 3.0, (0.7, 1.3, 0.4), 1e-3, 10
ARCHS = {0: "mlp", 1: "cnn_bn", 2: "cnn_bn"}
SET = {
    "E_k": E_K, "B_k": B_K, "E_prime": E_PRIME, "E": E, "E_G": 2, "B": B, "q": Q, "d_z": D_Z, "eta_k": ETA_K,
    "eta": ETA, "eta_G": ETA_G, "tau": TAU, "beta_1": BETA[0], "beta_2": BETA[1], "beta_3": BETA[2], "epsilon": EPSILON,
    "distance": "rms",
}  # fmt: skip


class G(nn.Module):
    """Table 7 for grey images of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(C, D_Z)
        self.layers = nn.Sequential(
            nn.Linear(2 * D_Z, 128 * 2 * 2), nn.Unflatten(1, (128, 2, 2)), nn.BatchNorm2d(128),
            nn.ConvTranspose2d(128, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
            nn.Conv2d(64, 1, 3, 1, 1), nn.BatchNorm2d(1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z, y):
        return self.layers(torch.cat([z, self.embedding(y)], 1))


def kl(a, b):
    """KL(sigma(a; tau) || sigma(b; tau)), one number a row."""
    p = torch.softmax(a / TAU, 1)
    return (p * (torch.log(p) - torch.log(torch.softmax(b / TAU, 1)))).sum(1)


def L_G(e, f, x, z, y, distance):
    """Eqs. 3, 5, 7, 8, 9, 10, written out; Eq. 7 with norms, root mean squares or mean squares."""

    def apart(a, b):
        square = (a - b).square()
        return {"norm": square.sum().sqrt(), "rms": square.mean().sqrt(), "ms": square.mean()}[distance]

    fid = -torch.log(torch.softmax(e, 1))[torch.arange(B), y].mean()
    adv = -kl(e, f).mean()
    pairs = [apart(x[i], x[j]) * apart(z[i], z[j]) for i in range(B) for j in range(B) if i != j]
    div = torch.exp(-sum(pairs) / B**2)
    p = torch.softmax(e, 1).mean(0)
    info = (p * torch.log(p)).sum()
    return fid + BETA[0] * adv + BETA[1] * div + BETA[2] * info


def taught(net, x, y, order, epochs, loss, rates, batch):
    """Adam on shuffled batches, with one rate for each epoch."""
    adam = torch.optim.Adam(net.train().parameters(), lr=1.0)
    for _, eta in zip(range(epochs), rates, strict=True):
        adam.param_groups[0]["lr"] = eta
        for b in epoch(order, len(x), batch):
            adam.zero_grad()
            loss(net(x[b]), y[b]).backward()
            adam.step()
    return net


AUTHORS = {
    "moments": "fresh", "estimate": "batch", "directions": "sphere", "distance": "ms", "schedule": "cosine",
    "answers": "batch", "B_prime": "all", "tested": "inner",
}  # fmt: skip


@pytest.mark.parametrize("moments", ["kept", "fresh"])
def test_a_round(moments, tmp_path):
    values = SET if moments == "kept" else {**SET, "moments": moments}  # kept is the default
    ran = played("fedzge", tmp_path, model="mlp:1,cnn_bn:2", server_model="cnn_bn", set=values)
    torch.set_default_dtype(torch.float64)
    try:
        retell(ran, moments)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_round_in_which_eq_20_has_a_rate_of_its_own(tmp_path):
    values = {**SET, "eta_prime": 3 * ETA_K}
    ran = played("fedzge", tmp_path, model="mlp:1,cnn_bn:2", server_model="cnn_bn", set=values)
    torch.set_default_dtype(torch.float64)
    try:
        retell(ran, "kept", values)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("left_out", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in AUTHORS)])
def test_a_round_as_the_authors_code_has_it(left_out, tmp_path):
    """All of the preset `authors`, and all but one fact at a time, so that each is told apart from the printed one."""
    values = {**SET, "E_k": 2, "E_prime": 3, "B_k": 4, **{name: v for name, v in AUTHORS.items() if name != left_out}}
    ran = played("fedzge", tmp_path, model="mlp:1,cnn_bn:2", server_model="cnn_bn", set=values)
    torch.set_default_dtype(torch.float64)
    try:
        retell(ran, values.get("moments", "kept"), values)
    finally:
        torch.set_default_dtype(torch.float32)


def cosine(t, T, values):
    """The share of the rate at epoch or step t of T."""
    return (1 + math.cos(math.pi * t / T)) / 2 if values.get("schedule") == "cosine" else 1.0


def by_itself(net, x):
    """f(x) with x normalised by its own statistics, the running ones left alone."""
    net = copy.deepcopy(net).train()
    return net(x)


def retell(ran, moments, values=SET):
    distance = values.get("distance", "norm")
    N = {k: len(y) for k, (_, y) in ran.rows.items()}
    assert len(set(N.values())) == 3, "clients of unequal size"
    total = sum(N.values())
    f, g = ran.net(ran.states[0].theta, "cnn_bn"), G()
    g.load_state_dict(dict(ran.states[0].theta_G))
    adam, adam_G = torch.optim.Adam(f.parameters(), lr=ETA), torch.optim.Adam(g.train().parameters(), lr=ETA_G)
    clients, inner = {}, []
    for k, (x, y) in ran.rows.items():  # lines 5-9, Eq. 1
        net, order = ran.net(ran.first[k], ARCHS[k]), rng(f"client {k}", "fit 1")
        rates = [ETA_K * cosine(t, values["E_k"], values) for t in range(values["E_k"])]
        clients[k] = taught(net, x, y, order, values["E_k"], F.cross_entropy, rates, values["B_k"])

    def answer(net, x):
        return by_itself(net, x) if values.get("answers") == "batch" else net.eval()(x)

    def ensemble(x):
        with torch.no_grad():
            return sum(N[k] / total * answer(clients[k], x) for k in clients)

    for i in range(2):  # Appendix C: alternately
        z = torch.randn(B, D_Z, generator=rng("server", f"z {i}"))  # line 10
        y = torch.randint(C, (B,), generator=rng("server", f"y {i}"))  # line 11
        x_hat = g(z, y)  # line 12
        x = x_hat.detach()
        u = torch.randn(Q, B, 1, 8, 8, generator=rng("server", f"u {i}"))  # line 13
        if values.get("directions") == "sphere":
            for image in u.view(Q * B, 64):
                image /= image.square().sum().sqrt()
        for k in clients:
            query, heard = ran.down(ask=i)[k], ran.up(ask=i)[k]
            close({"x": x, "x_u": x + EPSILON * u}, {"x": query.x, "x_u": query.x_u}, f"query {i} to client {k}")
            with torch.no_grad():
                told = torch.cat([answer(clients[k], v) for v in (x, *(x + EPSILON * u))])  # line 17
            close({"f": told}, {"f": heard.f}, f"answer {i} of client {k}")
            assert N[k] == heard.N
        e = ensemble(x)  # line 20
        f.eval()
        with torch.no_grad():
            here = L_G(e, f(x), x, z, y, distance)
        estimate = torch.zeros_like(x)
        for j in range(Q if values.get("estimate") == "batch" else 0):  # one difference for all images
            moved = x + EPSILON * u[j]
            with torch.no_grad():
                there = L_G(ensemble(moved), f(moved), moved, z, y, distance)
            estimate += 64 * (there - here) / EPSILON * u[j] / Q
        for b in range(0 if values.get("estimate") == "batch" else B):  # Eq. 17 as a function of one image, others held
            for j in range(Q):
                moved = x.clone()
                moved[b] += EPSILON * u[j, b]
                with torch.no_grad():
                    told = e.clone()  # an answer depends on the image's own batch, which is that of the direction
                    together = values.get("answers") == "batch"
                    told[b] = ensemble(x + EPSILON * u[j] if together else moved)[b]
                    there = L_G(told, f(moved), moved, z, y, distance)
                estimate[b] += 64 * (there - here) / EPSILON * u[j, b] / Q
        adam_G.zero_grad()
        x_hat.backward(estimate)  # Eq. 18
        adam_G.step()  # Eq. 19
        for step in range((1, 2)[i]):  # f's three epochs, shared out
            adam.param_groups[0]["lr"] = ETA * cosine(step, (1, 2)[i], values)
            adam.zero_grad()
            kl(e, f.train()(x)).mean().backward()  # Eqs. 4, 12
            adam.step()
            inner.append({name: t.clone() for name, t in f.state_dict().items()})
    assert len(ran.states[1].inner) == (3 if values.get("tested") == "inner" else 0)
    for i, kept in ran.states[1].inner.items():
        close(inner[i - 1], kept, f"f after inner step {i}")
    close(dict(g.state_dict()), ran.states[1].theta_G, "the generator")
    close(dict(f.state_dict()), ran.states[1].theta, "the global model")
    for opt, kept in ((adam, ran.states[1].moments), (adam_G, ran.states[1].moments_G)):
        told = {f"{i}.{name}": v for i, of in enumerate(opt.state.values()) for name, v in of.items()}
        if moments == "kept":
            close(told, kept, "Adam's moments")
        else:
            assert kept == {}, "Adam starts anew in the next round"
    for k in clients:
        close({"e": e}, {"e": ran.down(ask=2)[k].e}, f"the ensemble's output to client {k}")  # line 28
        order = rng(f"client {k}", "fit 1", ask=2)
        batch = B if values.get("B_prime") == "all" else values["B_k"]
        loss = lambda out, e: kl(e, out).mean()  # noqa: E731
        epochs, rate = values["E_prime"], values.get("eta_prime", ETA_K)
        rates = [rate * cosine(t, epochs, values) for t in range(epochs)]
        taught(clients[k], x, e, order, epochs, loss, rates, batch)  # lines 30-34, Eq. 20
        close(dict(clients[k].state_dict()), ran.model(k), f"client {k}'s model")
    assert not ran.down(ask=3)
