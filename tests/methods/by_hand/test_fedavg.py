"""Two rounds of FedAvg by hand: McMahan et al., AISTATS 2017, Algorithm 1."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

E, B, ETA = 2, 16, 0.1


def test_two_rounds(tmp_path):
    ran = played(
        "fedavg", tmp_path, rounds=2, model="cnn_bn", participation=0.67, set={"E": E, "B": B, "eta": ETA}, clients=4
    )
    w = {name: t.clone() for name, t in ran.states[0].w.items()}  # w_0
    assert len({len(y) for _, y in ran.rows.values()}) == 4, "clients of unequal size"
    for t in (1, 2):
        chosen = sorted(ran.down(t))
        assert len(chosen) == 3, "S_t: max(C K, 1) clients"
        local, n = {}, {}
        for k in chosen:
            close(w, ran.down(t)[k].w, f"round {t}: what client {k} is sent")
            x, y = ran.rows[k]
            net = ran.net(w)
            order = rng(f"client {k}", "fit 1", t)
            for _ in range(E):  # for each local epoch i from 1 to E
                for b in epoch(order, len(x), B):  # for batch b in B
                    loss = F.cross_entropy(net(x[b]), y[b])
                    gradient = torch.autograd.grad(loss, list(net.parameters()))
                    with torch.no_grad():
                        for p, g in zip(net.parameters(), gradient, strict=True):
                            p -= ETA * g  # w <- w - eta grad l(w; b)
            local[k], n[k] = dict(net.state_dict()), len(x)
            close(local[k], ran.up(t)[k].w, f"round {t}: client {k}'s reply")
            close(local[k], ran.model(k, t), f"round {t}: client {k}'s own model")
            assert ran.up(t)[k].n == n[k]
        total = sum(n.values())  # n: of the clients that took part
        w = {}
        for name, like in local[chosen[0]].items():  # w_{t+1} = sum_k n_k / n w^k_{t+1}
            mean = sum(n[k] / total * local[k][name].double() for k in chosen)
            w[name] = mean if like.is_floating_point() else mean.round().to(like.dtype)  # a counter of batches
        close(w, ran.states[t].w, f"the model after round {t}")
