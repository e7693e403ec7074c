"""Two rounds of DS-FL by hand: Itahara et al., IEEE TMC 2021, with what FedZGE's paper says of it (Eq. 1, Table 8)."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

E_K, B_K, E_PRIME, E, B = 1, 32, 2, 2, 100
ETA_K, ETA, T = 0.01, 0.02, 0.2
ARCHS = {0: "mlp", 1: "cnn_bn", 2: "cnn_bn"}
SET = {"E_k": E_K, "B_k": B_K, "E_prime": E_PRIME, "E": E, "B": B, "eta_k": ETA_K, "eta": ETA, "T": T}


def imitation(out, p):
    """Cross-entropy against soft labels."""
    return -(p * torch.log(torch.softmax(out, 1))).sum(1).mean()


def trained(net, x, y, order, batch, epochs, loss, eta):
    adam = torch.optim.Adam(net.train().parameters(), lr=eta)
    for _ in range(epochs):
        for b in epoch(order, len(x), batch):
            adam.zero_grad()
            loss(net(x[b]), y[b]).backward()
            adam.step()
    return net


def test_two_rounds(tmp_path):
    ran = played("dsfl", tmp_path, rounds=2, model="mlp:1,cnn_bn:2", server_model="cnn_bn", set=SET)
    N = {k: len(y) for k, (_, y) in ran.rows.items()}
    assert len(set(N.values())) == 3, "clients of unequal size"
    public = ran.world.public()[0]
    order = torch.randperm(len(public), generator=rng("server", "order", t=0))
    assert B < len(public) < 2 * B, "the second round begins the set anew"
    clients = {k: ran.net(ran.first[k], ARCHS[k]) for k in N}
    f = ran.net(ran.states[0].theta, "cnn_bn")
    for t in (1, 2):
        x_p = public[torch.cat([order, order])[(t - 1) * B : t * B]]
        p = torch.zeros(B, 10, dtype=torch.float64)
        for k, (x, y) in ran.rows.items():
            close({"x_p": x_p}, {"x_p": ran.down(t)[k].x_p}, f"round {t}: open batch to client {k}")
            assert ran.down(t)[k].y_p is None, "an open set has no labels"
            trained(clients[k], x, y, rng(f"client {k}", "fit 1", t), B_K, E_K, F.cross_entropy, ETA_K)  # Eq. 1
            with torch.no_grad():
                p_k = torch.softmax(clients[k].eval()(x_p), 1)
            close({"p": p_k}, {"p": ran.up(t)[k].p}, f"round {t}: soft labels of client {k}")
            assert N[k] == ran.up(t)[k].N
            p += N[k] / sum(N.values()) * p_k
        p = torch.softmax(p / T, 1)  # entropy reduction
        trained(f, x_p, p, rng("server", "fit 1", t), B, E, imitation, ETA)
        close(dict(f.state_dict()), ran.states[t].theta, f"round {t}: the global model")
        for k in N:
            close({"p": p}, {"p": ran.down(t, ask=1)[k].p}, f"round {t}: global labels to client {k}")
            trained(clients[k], x_p, p, rng(f"client {k}", "fit 1", t, ask=1), B_K, E_PRIME, imitation, ETA_K)
            close(dict(clients[k].state_dict()), ran.model(k, t), f"round {t}: client {k}'s model")
