"""Two rounds of FedGen by hand: Zhu, Hong and Zhou, ICML 2021, Algorithm 1, and the reading of its authors' code."""

from __future__ import annotations

import pytest
import torch
from by_hand import close, epoch, played, rng
from precision import double
from torch import nn
from torch.nn import functional as F

E, B, ETA, MOMENTUM, DECAY = 2, 16, 0.05, 0.9, 0.01
B_HAT, ALPHA, I_G, B_G, ETA_G, D, HIDDEN = 12, 2.0, 3, 10, 0.01, 5, 7


def generator(w, width):
    """A hidden layer with batch norm and ReLU, then a linear one into the space of embeddings."""
    G = nn.Sequential(nn.Linear(D + 10, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width))
    G.load_state_dict({name.removeprefix("layers."): t.clone() for name, t in w.items()})
    return G


def drawn(order, p, n):
    """epsilon ~ N(0, I) and y ~ p^(y), by inversion: the first class whose share, added up, exceeds u."""
    epsilon = torch.randn(n, D, generator=order)
    u = torch.rand(n, generator=order, dtype=torch.float64)
    upto = p.double().cumsum(0) / p.double().sum()
    return epsilon, torch.stack([(value >= upto).sum() for value in u])


def made(G, epsilon, y):
    return G(torch.cat([epsilon, F.one_hot(y, 10).to(epsilon)], 1))


def local_update(net, G, x, y, p, k, t, momentum, decay):  # lines 5-11
    with torch.no_grad():
        epsilon, y_hat = drawn(rng(f"client {k}", "epsilon and y", t), p, B_HAT)
        z = made(G.eval(), epsilon, y_hat)  # line 7
    order, velocity = rng(f"client {k}", "fit 1", t), None
    net.train()
    for _ in range(E):
        for b in epoch(order, len(x), B):
            loss = F.cross_entropy(net(x[b]), y[b]) + ALPHA * F.cross_entropy(net.classifier(z), y_hat)  # Eq. 5
            g = torch.autograd.grad(loss, list(net.parameters()))
            g = [d + decay * p.detach() for d, p in zip(g, net.parameters(), strict=True)]
            velocity = g if velocity is None else [momentum * v + d for v, d in zip(velocity, g, strict=True)]
            with torch.no_grad():
                for p_, v in zip(net.parameters(), velocity, strict=True):
                    p_ -= ETA * v
    return dict(net.state_dict())


def learned(G, teachers, counts, t, code):  # line 14
    """Adam on Eq. 4: the loss of the averaged logits, or as the code has it, the clients' own losses by their share."""
    c = torch.stack(counts)
    order, moments = rng("server", "epsilon and y", t), [(0.0, 0.0) for _ in G.parameters()]
    G.train()
    for step in range(1, I_G + 1):
        epsilon, y = drawn(order, c.sum(0), B_G)
        z = made(G, epsilon, y)
        logits = [net.eval().classifier(z) for net in teachers]
        if code:
            loss = torch.zeros(())
            for i, y_i in enumerate(y):
                for k, of_k in enumerate(logits):
                    share = c[k, y_i] / c[:, y_i].sum()
                    loss = loss - share * of_k[i].log_softmax(0)[y_i] / B_G
            apart = torch.zeros(())
            for i in range(B_G):
                for j in range(B_G):
                    apart = apart + (z[i] - z[j]).abs().mean() * ((epsilon[i] - epsilon[j]) ** 2).mean() / B_G**2
            loss = loss + 1.5 * torch.exp(-apart)
        else:
            loss = F.cross_entropy(sum(logits) / len(logits), y)  # Eq. 4
        gradient = torch.autograd.grad(loss, list(G.parameters()))
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(G.parameters(), gradient, strict=True)):
                m, v = 0.9 * moments[i][0] + 0.1 * g, 0.999 * moments[i][1] + 0.001 * g**2
                moments[i] = m, v
                p -= ETA_G * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return {f"layers.{name}": t for name, t in G.state_dict().items()}


@pytest.mark.parametrize("code", [False, True])
def test_two_rounds(code, tmp_path):
    values = {"E": E, "B": B, "eta": ETA, "B_hat": B_HAT, "alpha": ALPHA, "I_g": I_G, "B_g": B_G, "eta_g": ETA_G}
    values |= {"d": D, "hidden": HIDDEN}
    momentum, decay = (MOMENTUM, DECAY) if code else (0.0, 0.0)
    if code:
        values |= {"teacher": "losses", "lambda_div": 1.5, "weights": "samples", "momentum": momentum}
        values |= {"weight_decay": decay}
    ran = played("fedgen", tmp_path, rounds=2, model="cnn_bn", set=values)
    assert len({len(y) for _, y in ran.rows.values()}) == 3, "clients of unequal size"
    assert any((y.bincount(minlength=10) == 0).any() for _, y in ran.rows.values()), "and skewed classes"
    theta, w, p = ran.states[0].theta, ran.states[0].w, torch.full((10,), 0.1)
    with double("fedgen"):
        for t in (1, 2):
            local, counts = {}, {}
            for k, (x, y) in ran.rows.items():
                sent = ran.down(t)[k]
                close(theta, sent.theta, f"round {t}: theta to client {k}")
                close(w, sent.w, f"round {t}: the generator to client {k}")
                torch.testing.assert_close(p.double(), sent.p.double(), rtol=1e-6, atol=1e-6)
                net = ran.net(theta)
                local[k] = local_update(net, generator(w, net.width), x, y, p, k, t, momentum, decay)
                counts[k] = torch.stack([(y == c).sum() for c in range(10)]).double()  # line 8
                close(local[k], ran.up(t)[k].theta, f"round {t}: theta of client {k}")
                torch.testing.assert_close(counts[k], ran.up(t)[k].c.double(), rtol=0, atol=0)
            n = {k: float(c.sum()) if code else 1.0 for k, c in counts.items()}
            theta = {}
            for name, like in local[0].items():  # line 13
                mean = sum(n[k] / sum(n.values()) * local[k][name].double() for k in local)
                theta[name] = mean if like.is_floating_point() else mean.round().to(like.dtype)
            G = generator(w, net.width)
            w = learned(G, [ran.net(local[k]) for k in local], list(counts.values()), t, code)
            p = sum(counts.values()) / sum(c.sum() for c in counts.values())
            close(theta, ran.states[t].theta, f"theta after round {t}")
            close(w, ran.states[t].w, f"the generator after round {t}")
