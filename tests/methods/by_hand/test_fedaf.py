"""Two rounds of FedAF by hand: Wang et al., CVPR 2024, Section 4, in two readings of what it leaves open."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import close, drawing, epoch, played, rng
from precision import double
from torch.func import functional_call
from torch.nn import functional as F

IPC, STEPS, B, AVERAGED, LEAST = 3, 3, 9, 3, 2
ETA_S, SIGMA, MOMENTUM, GAMMA, LAMBDA_LOC, L = 40.0, 0.7, 0.9, 0.8, 0.5, 4
E, B_W, ETA_W, LAMBDA_GLOB, TAU = 2, 8, 0.05, 2.0, 3.0


def fresh(net):
    """w~: what a new layer's weights would be, in the order of the parameters; norms are 1 and 0."""
    parameters = dict(net.named_parameters())
    u = torch.empty(sum(p.numel() for p in parameters.values())).uniform_(-1, 1)
    new = {}
    for (name, p), part in zip(parameters.items(), u.split([p.numel() for p in parameters.values()]), strict=True):
        if ".bn" in name:
            new[name] = torch.ones_like(p) if name.endswith("weight") else torch.zeros_like(p)
        else:
            fan_in = parameters[name.replace("bias", "weight")][0].numel()
            new[name] = part.view_as(p) / math.sqrt(fan_in)
    return new


def begun(x, y, classes):
    """Where the images start: shares of few records, or plain averages of many."""
    torch.randn(len(classes), IPC, *x.shape[1:])  # noise, for a class of one record
    S = []
    for c in classes:
        of_c = x[y == c]
        if len(of_c) < 3 * AVERAGED:
            shares = torch.distributions.Dirichlet(torch.full((IPC, len(of_c)), (AVERAGED - 1) / len(of_c))).sample()
            S.append(torch.einsum("in,nchw->ichw", shares, of_c))
        else:
            which = torch.rand(IPC, len(of_c)).topk(AVERAGED).indices
            S.append(torch.stack([of_c[i].mean(0) for i in which]))
    return torch.stack(S)


def condensed(net, x, y, classes, V, S, norm, clamp):
    """Eqs. 3, 4, 6, 10 and 17: three steps of SGD with momentum on the images."""
    w = {name: p.detach().clone() for name, p in net.named_parameters()}
    statistics = {name: b.clone() for name, b in net.named_buffers()}
    real = {c: x[y == c] for c in classes}
    velocity = None
    net.train(norm == "joint")
    for _ in range(STEPS):
        if clamp == "step":
            S = S.clamp(-1, 1)
        S = S.detach().requires_grad_()
        new = fresh(net)
        at = {name: GAMMA * w[name] + (1 - GAMMA) * new[name] for name in w}  # Eq. 17
        at |= {name: b.clone() for name, b in statistics.items()}
        if any(len(of_c) > B for of_c in real.values()):
            r = torch.rand(sum(len(of_c) for of_c in real.values())).split([len(of_c) for of_c in real.values()])
            drawn = [of_c[order.argsort()[:B]] for of_c, order in zip(real.values(), r, strict=True)]
        else:
            drawn = list(real.values())
        theta = torch.randn(L, 10)
        theta = theta / theta.norm(dim=1, keepdim=True)

        def h(images, at=at):  # the feature extractor: all layers before the last
            weights = {name.removeprefix("encoder."): t for name, t in at.items() if name.startswith("encoder.")}
            return functional_call(net.encoder, weights, (images,))

        def f(features, at=at):
            return features @ at["classifier.weight"].T + at["classifier.bias"]

        h_real = h(torch.cat(drawn)).detach().split([len(d) for d in drawn])
        h_syn = h(S.flatten(0, 1)).split(IPC)
        loss = torch.zeros(())
        for c, of_real, of_syn in zip(classes, h_real, h_syn, strict=True):
            loss = loss + ((of_real.mean(0) - of_syn.mean(0)) ** 2).sum()  # Eqs. 3, 4
            u = f(of_syn).mean(0)  # Eq. 6
            loss = loss + LAMBDA_LOC * sum((a @ (u - V[c])).abs() for a in theta) / L  # Eq. 10
        (g,) = torch.autograd.grad(loss, S)
        velocity = g if velocity is None else MOMENTUM * velocity + g
        S = S.detach() - ETA_S * SIGMA**2 * velocity
    return S


def divergence(p, q):
    return (p * (p / q).log()).sum()


def trained(net, S, y, r, classes, t):
    """Eqs. 13-16: cross-entropy of the batch, and soft labels of all condensed images against those of the clients."""
    order = rng("server", "fit 1", t)
    velocity = None
    net.train()
    for _ in range(E):
        for b in epoch(order, len(S), B_W):
            ce = F.cross_entropy(net(S[b]), y[b])
            z = net(S)
            lgkm = torch.zeros(())
            for c in classes:
                t_c = (z[y == c].mean(0) / TAU).softmax(0)  # Eq. 13
                lgkm = lgkm + (divergence(r[c], t_c) + divergence(t_c, r[c])) / 2  # Eq. 15
            loss = ce + LAMBDA_GLOB * lgkm  # Eq. 14
            gradient = torch.autograd.grad(loss, list(net.parameters()))
            velocity = (
                gradient if velocity is None else [MOMENTUM * v + g for v, g in zip(velocity, gradient, strict=True)]
            )
            with torch.no_grad():
                for p, v in zip(net.parameters(), velocity, strict=True):
                    p -= ETA_W * v
    return dict(net.state_dict())


@pytest.mark.parametrize(
    ("norm", "clamp", "restart"),
    [("frozen", "step", True), ("joint", "end", False), pytest.param("frozen", "none", False, marks=pytest.mark.long)],
)
def test_two_rounds(norm, clamp, restart, tmp_path):
    values = {
        "IPC": IPC, "steps": STEPS, "B": B, "averaged": AVERAGED, "least": LEAST, "eta_S": ETA_S, "sigma_x": SIGMA,
        "gamma": GAMMA, "lambda_loc": LAMBDA_LOC, "L": L, "E": E, "B_w": B_W, "eta_w": ETA_W, "tau": TAU,
        "lambda_glob": LAMBDA_GLOB, "norm": norm, "clamp": clamp, "restart": restart,
    }  # fmt: skip
    ran = played("fedaf", tmp_path, rounds=2, model="cnn_bn", aux=0.6, set=values)
    held = {k: [c for c in range(10) if (y == c).sum() >= LEAST] for k, (_, y) in ran.rows.items()}
    sizes = {(k, c): int((ran.rows[k][1] == c).sum()) for k in held for c in held[k]}
    assert len({len(y) for _, y in ran.rows.values()}) == 3, "clients of unequal size"
    assert len({tuple(classes) for classes in held.values()}) > 1, "and of different classes"
    assert any(n < 3 * AVERAGED for n in sizes.values())
    assert any(n >= max(3 * AVERAGED, B + 1) for n in sizes.values())
    w, kept = ran.states[0].w, {}
    with double("fedaf"):
        for t in (1, 2):
            V_k, R_k, images, labels = {}, {}, [], []
            for k, (x, y) in ran.rows.items():
                close(w, ran.down(t)[k].w, f"round {t}: what client {k} is sent")
                net = ran.net(w).eval()
                with torch.no_grad():
                    V_k[k] = {c: net(x[y == c]).mean(0) for c in held[k]}  # Eq. 5
                close(V_k[k], ran.up(t)[k].V, f"round {t}: V of client {k}")
            everybody = sorted({c for classes in held.values() for c in classes})
            V = {c: torch.stack([of[c] for of in V_k.values() if c in of]).mean(0) for c in everybody}  # Eq. 8
            for k, (x, y) in ran.rows.items():
                close(V, ran.down(t, 1)[k].V, f"round {t}: V to client {k}")
                net = ran.net(w)
                with drawing(f"client {k}", t, 1):
                    S = kept[k] if k in kept and not restart else begun(x, y, held[k])
                    S = condensed(net, x, y, held[k], V, S, norm, clamp)
                kept[k] = S.clamp(-1, 1) if clamp == "step" else S
                assert (S.abs() > 1).any(), "some pixel has left the range"
                if clamp != "none":
                    S = (((S.clamp(-1, 1) + 1) * 127.5).round() / 127.5) - 1  # 8 bits a pixel
                R_k[k] = {c: (V_k[k][c] / TAU).softmax(0) for c in held[k]}  # Eq. 11
                close(dict(zip(held[k], S, strict=True)), ran.up(t, 1)[k].S, f"round {t}: S of client {k}")
                close(R_k[k], ran.up(t, 1)[k].R, f"round {t}: R of client {k}")
                images.append(S.flatten(0, 1))
                labels += [c for c in held[k] for _ in range(IPC)]
            r = {c: torch.stack([of[c] for of in R_k.values() if c in of]).mean(0) for c in everybody}  # Eq. 12
            w = trained(ran.net(w), torch.cat(images), torch.tensor(labels), r, everybody, t)
            close(w, ran.states[t].w, f"the model after round {t}")
