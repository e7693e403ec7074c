"""Two rounds of FedKTL by hand: full batches. The decoder is what `init` left; the rest is told from the start."""

from __future__ import annotations

import torch
from by_hand import close, drawing, played, rng
from torch import nn
from torch.nn.functional import cross_entropy

eta, E, mu, s, m, S, eta_s, lam, H = 0.01, 2, 0.5, 8.0, 0.4, 3, 0.01, 2.0, 6


def vectors(seed):
    """The simplex, from ten orthonormal columns."""
    U = torch.linalg.qr(torch.randn(10, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    v = U - U.mean(1, keepdim=True)
    return (v / v.norm(dim=0)).T


def unit(h):
    return h / h.norm(dim=1, keepdim=True)


def kernel(a, b):
    apart = ((a[:, None] - b[None]) ** 2).sum(2)
    return sum(torch.exp(-apart / (2 * v)) for v in (10, 15, 20, 50)).mean()


def test_rounds(tmp_path):
    options = {
        "E": E, "B": 1000, "eta": eta, "mu": mu, "s": s, "m": m, "S": S, "eta_s": eta_s, "lam": lam, "H": H, "S_G": 2,
        "width": 4,
    }  # fmt: skip
    ran = played("fedktl", tmp_path, rounds=2, model="cnn_bn:2,mlp:1", set=options)
    archs = ["cnn_bn", "cnn_bn", "mlp"]
    start = ran.states[0]
    v, own, h, F, pairs = vectors(start.seed), dict(ran.first), {}, dict(start.F), {}
    for t in (1, 2):
        P, c = [], []
        for k, (x, y) in ran.rows.items():
            down = ran.down(t)[k]
            assert down.seed == start.seed
            close({j: q for j, (_, q) in pairs.items()}, down.Q, f"Q {t} {k}")
            close({j: i for j, (i, _) in pairs.items()}, down.I, f"I {t} {k}")
            if t == 1:
                with drawing(f"client {k}", t, 0):
                    torch.set_default_dtype(torch.float64)
                    h[k] = nn.Linear(64 if k < 2 else 128, H).state_dict()
                    torch.set_default_dtype(torch.float32)
            net = ran.net(own[k], archs[k])
            A, b = h[k]["weight"].clone().requires_grad_(), h[k]["bias"].clone().requires_grad_()
            for _ in range(E):
                cos = unit(net(x)) @ v.T
                angle = torch.acos(cos[torch.arange(len(y)), y])
                logits = s * cos.scatter(1, y[:, None], torch.cos(angle + m)[:, None])
                loss = cross_entropy(logits, y)
                # a batch of images goes through the network in any case, and its batch norm sees it
                images = torch.stack([i for i, _ in pairs.values()]) if pairs else torch.zeros(2, 1, 8, 8).double()
                mapped = net.encode(images) @ A.T + b
                if pairs:
                    loss = loss + mu * ((mapped - torch.stack([q for _, q in pairs.values()])) ** 2).mean()
                else:
                    loss = loss + 0 * mapped.sum()
                weights = [*net.parameters(), A, b]
                grads = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    for w, grad in zip(weights, grads, strict=True):
                        w -= eta * grad
            own[k], h[k] = net.state_dict(), {"weight": A.detach(), "bias": b.detach()}
            close(own[k], ran.model(k, t), f"model {t} {k}")
            close(h[k], ran.memory(k, t)["h"], f"h {t} {k}")
            with torch.no_grad():
                e = unit(net.eval()(x))
            sent = {j: e[y == j].mean(0) for j in sorted(set(y.tolist()))}
            close(sent, ran.up(t)[k].P, f"up {t} {k}")
            P += sent.values()
            c += sent
        P, c = unit(torch.stack(P)), torch.tensor(c)
        with drawing("server", t):
            torch.set_default_dtype(torch.float64)
            net = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, H))
            torch.set_default_dtype(torch.float32)
        net.load_state_dict(F)
        latents = torch.randn(len(P), H, generator=rng("server", "latents", t), dtype=torch.float64)
        adam = torch.optim.Adam(net.parameters(), lr=eta_s)
        for _ in range(S):
            Q = net(P)
            centres = torch.stack([Q[c == j].mean(0) for j in c])
            apart = kernel(Q, Q) + kernel(latents, latents) - 2 * kernel(Q, latents)
            loss = apart + lam * ((Q - centres) ** 2).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        F = net.state_dict()
        close(F, ran.states[t].F, f"F {t}")
        with torch.no_grad():
            Q = net.eval()(P)
        Q = {int(j): Q[c == j].mean(0) for j in c.unique()}
        close(Q, ran.states[t].Q, f"Q after {t}")
        pairs = {j: (ran.states[t].I[j], q) for j, q in Q.items()}  # the decoder's pictures are not retold
        assert all(float(i.abs().max()) <= 1 and i.shape == (1, 8, 8) for i, _ in pairs.values())
