"""Two rounds of FedKD by hand: full batches; the singular values by NumPy."""

from __future__ import annotations

import numpy
import torch
from by_hand import close, drawing, played
from torch import nn
from torch.nn.functional import cross_entropy

T_start, T_end, eta, E = 0.5, 0.9, 0.1, 2


def left(g, energy):
    """What arrives of an update: of each matrix the fewest singular values that hold the energy."""
    after = {}
    for name, t in g.items():
        after[name] = t
        if t.dim() > 1:
            U, s, V = numpy.linalg.svd(t.reshape(len(t), -1).numpy(), full_matrices=False)
            K = next(K for K in range(1, len(s) + 1) if (s[:K] ** 2).sum() >= energy * (s**2).sum())
            if K * (len(t) + t[0].numel() + 1) < t.numel():
                after[name] = torch.from_numpy(U[:, :K] * s[:K] @ V[:K]).reshape(t.shape)
    return after


def kl(p, q):
    return (p * (p / q).log()).sum(1)


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "T_start": T_start, "T_end": T_end}
    ran = played("fedkd", tmp_path, rounds=2, model="cnn_bn:2,mlp:1", server_model="cnn", set=options)
    archs = ["cnn_bn", "cnn_bn", "mlp"]
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    theta, own, W, g = dict(ran.states[0].theta), dict(ran.first), {}, None
    for t in (1, 2):
        if g is not None:
            g = left(g, T_start)  # the energy of round 1
            theta = {name: theta[name] + g[name] for name in theta}
        sent = {}
        for k, (x, y) in ran.rows.items():
            if t == 1:
                close(theta, ran.down(t)[k].theta, f"down {t} {k}")
                with drawing(f"client {k}", t, 0):
                    torch.set_default_dtype(torch.float64)
                    W[k] = nn.Linear(64, 64 if k < 2 else 128, bias=False).weight.detach().clone()
                    torch.set_default_dtype(torch.float32)
            else:
                close(g, ran.down(t)[k].g, f"down {t} {k}")
            mentor, mentee = ran.net(own[k], archs[k]), ran.net(theta, "cnn")
            W_h = W[k].clone().requires_grad_()
            for _ in range(E):
                H_t, H_s = mentor.encode(x), mentee.encode(x)
                z_t, z_s = mentor.classify(H_t), mentee.classify(H_s)
                L_t, L_s = cross_entropy(z_t, y, reduction="none"), cross_entropy(z_s, y, reduction="none")
                D = (L_t + L_s).detach()
                hidden = ((H_t - H_s @ W_h.T) ** 2).mean(1)
                y_t, y_s = z_t.softmax(1), z_s.softmax(1)
                mentors = (L_t + (kl(y_s.detach(), y_t) + hidden) / D).mean()
                mentees = (L_s + (kl(y_t.detach(), y_s) + hidden) / D).mean()
                both = [(list(mentor.parameters()), mentors), ([*mentee.parameters(), W_h], mentees)]
                steps = [(of, torch.autograd.grad(loss, of, retain_graph=True)) for of, loss in both]
                with torch.no_grad():
                    for of, grads in steps:
                        for v, grad in zip(of, grads, strict=True):
                            v -= eta * grad
            own[k], W[k] = mentor.state_dict(), W_h.detach()
            close(own[k], ran.model(k, t), f"model {t} {k}")
            after = mentee.state_dict()
            sent[k] = left(
                {name: after[name] - theta[name] for name in after}, T_start + (T_end - T_start) * (t - 1) / 2
            )
            close(sent[k], ran.up(t)[k].g, f"up {t} {k}")
            close({"weight": W[k]}, ran.memory(k, t)["W_h"], f"W_h {t} {k}")
        g = {name: sum(n[k] / sum(n.values()) * sent[k][name] for k in n) for name in theta}
        close(g, ran.states[t].g, f"g {t}")
        close(theta, ran.states[t].theta, f"after {t}")
