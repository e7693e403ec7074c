"""Two rounds of FedProto by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

lam, eta, E = 1.5, 0.1, 2


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "lam": lam}
    ran = played("fedproto", tmp_path, rounds=2, model="cnn_bn/24:2,mlp/24:1", set=options)
    archs = ["cnn_bn/24", "cnn_bn/24", "mlp/24"]
    own, C = dict(ran.first), {}
    for t in (1, 2):
        sent = {}
        for i, (x, y) in ran.rows.items():
            close(C, ran.down(t)[i].C, f"down {t} {i}")
            net = ran.net(own[i], archs[i])
            for _ in range(E):
                h = net.encode(x)
                L_R = sum(((h[r] - C[int(y[r])]) ** 2).mean() for r in range(len(y)) if int(y[r]) in C)
                loss = cross_entropy(net.classify(h), y) + lam * L_R / len(y)  # Eqs. 7, 8
                grads = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for w, grad in zip(net.parameters(), grads, strict=True):
                        w -= eta * grad
            own[i] = net.state_dict()
            close(own[i], ran.model(i, t), f"model {t} {i}")
            with torch.no_grad():
                h = net.eval().encode(x)
            sent[i] = {j: h[y == j].mean(0) for j in sorted(set(y.tolist()))}  # Eq. 3
            close(sent[i], ran.up(t)[i].C, f"up {t} {i}")
        for j in range(10):
            of = [sent[i][j] for i in sent if j in sent[i]]
            if of:
                C[j] = sum(of) / len(of)  # Eq. 6, alike
        close(C, ran.states[t].C, f"after {t}")
