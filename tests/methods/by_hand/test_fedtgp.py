"""Two rounds of FedTGP by hand: full batches at the clients, and all prototypes in one batch on the server."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

lam, eta, eta_s, E, S, tau = 1.5, 0.1, 0.3, 2, 3, 2.0


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "lam": lam, "S": S, "B_s": 1000, "eta_s": eta_s, "tau": tau, "hidden": 8}
    ran = played("fedtgp", tmp_path, rounds=2, model="cnn_bn/24:2,mlp/24:1", set=options)
    archs = ["cnn_bn/24", "cnn_bn/24", "mlp/24"]
    own, C, net_s = dict(ran.first), {}, dict(ran.states[0].net)
    for t in (1, 2):
        sent = {}
        for i, (x, y) in ran.rows.items():
            close(C, ran.down(t)[i].C, f"down {t} {i}")
            net = ran.net(own[i], archs[i])
            for _ in range(E):
                h = net.encode(x)
                apart = sum(((h[r] - C[int(y[r])]) ** 2).mean() for r in range(len(y)) if int(y[r]) in C)
                loss = cross_entropy(net.classify(h), y) + lam * apart / len(y)  # Eq. 8
                grads = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for w, grad in zip(net.parameters(), grads, strict=True):
                        w -= eta * grad
            own[i] = net.state_dict()
            with torch.no_grad():
                h = net.eval().encode(x)
            sent[i] = {c: h[y == c].mean(0) for c in sorted(set(y.tolist()))}
            close(sent[i], ran.up(t)[i].C, f"up {t} {i}")
        Q = {c: torch.stack([s[c] for s in sent.values() if c in s]).mean(0) for s in sent.values() for c in s}
        delta = min(max(float((Q[a] - Q[b]).norm()) for a in Q for b in Q if a != b), tau)  # Eq. 6
        names = ["P", "F.0.weight", "F.0.bias", "F.2.weight", "F.2.bias"]
        P, W1, b1, W2, b2 = (net_s[name].clone().requires_grad_() for name in names)
        arrived = [(v, c) for s in sent.values() for c, v in s.items()]
        for _ in range(S):
            hat = (P @ W1.T + b1).relu() @ W2.T + b2
            L_P = 0
            for v, c in arrived:  # Eq. 7
                phi = (v - hat).norm(dim=1)
                mine = torch.exp(-(phi[c] + delta))
                L_P = L_P - torch.log(mine / (mine + sum(torch.exp(-phi[o]) for o in range(10) if o != c)))
            grads = torch.autograd.grad(L_P / len(arrived), (P, W1, b1, W2, b2))
            with torch.no_grad():
                for w, grad in zip((P, W1, b1, W2, b2), grads, strict=True):
                    w -= eta_s * grad
        net_s = {name: w.detach() for name, w in zip(names, (P, W1, b1, W2, b2), strict=True)}
        close(net_s, ran.states[t].net, f"net {t}")
        hat = ((P @ W1.T + b1).relu() @ W2.T + b2).detach()
        C = {c: hat[c] for c in sorted({*C, *Q})}
        close(C, ran.states[t].C, f"after {t}")
