"""Two rounds of pFedLA by hand: Ma et al., CVPR 2022, Algorithm 1. In the second a client is not asked."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

E, B, ETA, ETA_H, WIDTH, DEPTH, N = 2, 16, 0.1, 0.05, 6, 2, 4
MODULES = ["encoder.conv1", "encoder.bn1", "encoder.conv2", "encoder.bn2", "encoder.fc1", "classifier"]


def HN(v, psi, n):
    """One hypernetwork: v through DEPTH hidden layers with ReLU; a softmax over the clients for each layer."""
    h = v
    for d in range(DEPTH + 1):
        h = h @ psi[f"{d}.weight"] + psi[f"{d}.bias"]
        h = torch.clamp(h, min=0) if d < DEPTH else h
    rows = h.reshape(n, N)
    return torch.exp(rows) / torch.exp(rows).sum(1, keepdim=True)


def test_two_rounds(tmp_path):
    hyper = {"E": E, "B": B, "eta": ETA, "eta_h": ETA_H, "width": WIDTH, "depth": DEPTH}
    ran = played("pfedla", tmp_path, rounds=2, clients=N, model="cnn_bn", participation=0.75, set=hyper)
    s = ran.states[0]
    names = list(s.theta)
    layer_of = {name: name.rpartition(".")[0] for name in names}
    modules = list(dict.fromkeys(layer_of.values()))
    assert sorted(modules) == sorted(MODULES), "a layer is a module with tensors of its own"
    theta = [{name: s.theta[name][j].clone() for name in names} for j in range(N)]
    assert all(torch.equal(theta[0][name], theta[j][name]) for name in names for j in range(N)), "one common start"
    v = [s.v[i].clone() for i in range(N)]
    psi = [{name: p[i].clone() for name, p in s.psi.items()} for i in range(N)]
    for t in (1, 2):
        asked = sorted(ran.down(t))
        assert len(asked) == 3
        after = [dict(own) for own in theta]
        for i in asked:
            v_i = v[i].requires_grad_()
            psi_i = {name: p.requires_grad_() for name, p in psi[i].items()}
            alpha = HN(v_i, psi_i, len(modules))
            theta_bar = {}
            for name in names:  # theta-bar_i^l = sum_j alpha_i^{l,j} theta_j^l
                weights = alpha[modules.index(layer_of[name])]
                mixed = sum(weights[j] * theta[j][name].double() for j in range(N))
                theta_bar[name] = (
                    mixed if theta[0][name].is_floating_point() else mixed.round().to(theta[0][name].dtype)
                )
            sent = {name: p.detach() for name, p in theta_bar.items()}
            close(sent, ran.down(t)[i].theta_bar, f"round {t}: what client {i} is sent")

            net, (x, y) = ran.net(sent), ran.rows[i]
            order = rng(f"client {i}", "fit 1", t)
            for _ in range(E):
                for b in epoch(order, len(x), B):
                    gradient = torch.autograd.grad(F.cross_entropy(net(x[b]), y[b]), list(net.parameters()))
                    with torch.no_grad():
                        for p, d in zip(net.parameters(), gradient, strict=True):
                            p -= ETA * d
            trained = {name: p.detach().clone() for name, p in net.state_dict().items()}
            delta = {name: trained[name] - sent[name] for name in names}  # Delta theta_i
            close(delta, ran.up(t)[i].delta_theta, f"round {t}: client {i}'s reply")
            close(trained, ran.model(i, t), f"round {t}: client {i}'s own model")
            after[i] = trained

            learnt = [name for name, _ in net.named_parameters()]  # statistics of batch norm do not steer
            towards = sum((theta_bar[name] * delta[name]).sum() for name in learnt)
            moved = torch.autograd.grad(towards, [v_i, *psi_i.values()])  # (d theta-bar_i)^T Delta theta_i
            v[i] = (v_i + ETA_H * moved[0]).detach()
            psi[i] = {name: (p + ETA_H * d).detach() for (name, p), d in zip(psi_i.items(), moved[1:], strict=True)}
        theta = after  # who was not asked stays as it was
        close({name: torch.stack([own[name] for own in theta]) for name in names}, ran.states[t].theta, "theta")
        close({"v": torch.stack([e.detach() for e in v])}, {"v": ran.states[t].v}, f"embeddings after round {t}")
        stacked = {name: torch.stack([p[name].detach() for p in psi]) for name in psi[0]}
        close(stacked, ran.states[t].psi, f"hypernetworks after round {t}")
    assert not torch.allclose(ran.states[2].v, s.v)
