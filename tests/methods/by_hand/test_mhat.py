"""Two rounds of MHAT by hand: Hu et al., Information Sciences 2021, as FedZGE's paper has it (Eqs. 1, 2, Table 8)."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

E_K, B_K, E_PRIME, E, B = 1, 32, 2, 2, 100
ETA_K, ETA, TAU, LAM = 0.01, 0.02, 3.0, 0.6
ARCHS = {0: "mlp", 1: "cnn_bn", 2: "cnn_bn"}
SET = {
    "E_k": E_K, "B_k": B_K, "E_prime": E_PRIME, "E": E, "B": B, "eta_k": ETA_K, "eta": ETA, "tau": TAU, "lam": LAM
}  # fmt: skip


def distillation(out, e, y):
    """Eq. 2, and cross-entropy against the auxiliary set's labels."""
    p = torch.softmax(e / TAU, 1)
    kl = (p * (torch.log(p) - torch.log(torch.softmax(out / TAU, 1)))).sum(1).mean()
    return kl + LAM * F.cross_entropy(out, y)


def trained(net, rows, order, batch, epochs, loss, eta):
    adam = torch.optim.Adam(net.train().parameters(), lr=eta)
    for _ in range(epochs):
        for b in epoch(order, len(rows[0]), batch):
            adam.zero_grad()
            x, *others = (column[b] for column in rows)
            loss(net(x), *others).backward()
            adam.step()
    return net


def test_two_rounds(tmp_path):
    ran = played("mhat", tmp_path, rounds=2, model="mlp:1,cnn_bn:2", server_model="cnn_bn", set=SET)
    N = {k: len(y) for k, (_, y) in ran.rows.items()}
    assert len(set(N.values())) == 3, "clients of unequal size"
    public = ran.world.public()
    order = torch.randperm(len(public[0]), generator=rng("server", "order", t=0))
    assert B < len(order) < 2 * B, "the second round begins the set anew"
    clients = {k: ran.net(ran.first[k], ARCHS[k]) for k in N}
    f = ran.net(ran.states[0].theta, "cnn_bn")
    for t in (1, 2):
        x_p, y_p = (column[torch.cat([order, order])[(t - 1) * B : t * B]] for column in public)
        e = torch.zeros(B, 10, dtype=torch.float64)
        for k, rows in ran.rows.items():
            close({"x_p": x_p}, {"x_p": ran.down(t)[k].x_p}, f"round {t}: auxiliary batch to client {k}")
            assert ran.down(t)[k].y_p.tolist() == y_p.tolist()
            trained(clients[k], rows, rng(f"client {k}", "fit 1", t), B_K, E_K, F.cross_entropy, ETA_K)  # Eq. 1
            with torch.no_grad():
                f_k = clients[k].eval()(x_p)
            close({"f": f_k}, {"f": ran.up(t)[k].f}, f"round {t}: outputs of client {k}")
            assert N[k] == ran.up(t)[k].N
            e += N[k] / sum(N.values()) * f_k
        trained(f, (x_p, e, y_p), rng("server", "fit 1", t), B, E, distillation, ETA)  # Eq. 2
        close(dict(f.state_dict()), ran.states[t].theta, f"round {t}: the global model")
        with torch.no_grad():
            back = f.eval()(x_p)  # Table 8: the global model's outputs, not the ensemble's, go down
        for k in N:
            close({"f": back}, {"f": ran.down(t, ask=1)[k].f}, f"round {t}: global outputs to client {k}")
            rows, drawn = (x_p, back, y_p), rng(f"client {k}", "fit 1", t, ask=1)
            trained(clients[k], rows, drawn, B_K, E_PRIME, distillation, ETA_K)
            close(dict(clients[k].state_dict()), ran.model(k, t), f"round {t}: client {k}'s model")
