"""Two rounds of federated distillation by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

gamma, eta, E = 1.5, 0.1, 2


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "gamma": gamma}
    ran = played("feddistill", tmp_path, rounds=2, model="cnn_bn:2,mlp:1", set=options)
    archs = ["cnn_bn", "cnn_bn", "mlp"]
    own, heard = dict(ran.first), {}
    for t in (1, 2):
        sent = {}
        for k, (x, y) in ran.rows.items():
            G = {}
            for label in range(10):  # the others' mean
                of = [F[label] for i, F in heard.items() if i != k and label in F]
                if of:
                    G[label] = sum(of) / len(of)
            close(G, ran.down(t)[k].G, f"down {t} {k}")
            net = ran.net(own[k], archs[k])
            for _ in range(E):
                z = net(x)
                loss = cross_entropy(z, y)
                for r in range(len(y)):
                    if int(y[r]) in G:
                        p = G[int(y[r])].softmax(0)
                        loss = loss - gamma / len(y) * (p * z[r].log_softmax(0)).sum()
                grads = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for w, grad in zip(net.parameters(), grads, strict=True):
                        w -= eta * grad
            own[k] = net.state_dict()
            close(own[k], ran.model(k, t), f"model {t} {k}")
            with torch.no_grad():
                z = net.eval()(x)
            sent[k] = {label: z[y == label].mean(0) for label in sorted(set(y.tolist()))}
            close(sent[k], ran.up(t)[k].F, f"up {t} {k}")
        heard = sent
