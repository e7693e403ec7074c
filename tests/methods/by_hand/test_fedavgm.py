"""Three rounds of FedAvgM by hand, in its plain form and in Nesterov's."""

from __future__ import annotations

import pytest
import torch
from by_hand import close, played
from narrow import trained

beta, eta_s, B, ETA = 0.6, 0.8, 32, 0.05


@pytest.mark.parametrize("nesterov", [False, True])
def test_rounds(tmp_path, nesterov):
    options = {"B": B, "eta": ETA, "beta": beta, "eta_s": eta_s, "nesterov": nesterov}
    ran = played("fedavgm", tmp_path, rounds=3, model="cnn_bn", set=options)
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    w = dict(ran.states[0].w)
    weights = [name for name, _ in ran.net(w).named_parameters()]
    v = {name: torch.zeros_like(w[name]) for name in weights}
    for t in (1, 2, 3):
        own = {}
        for k, rows in ran.rows.items():
            close(w, ran.down(t)[k].w, f"down {t} {k}")
            own[k] = trained(ran.net(w), *rows, k, t, B, ETA)
            close(own[k], ran.up(t)[k].w, f"up {t} {k}")
            assert ran.up(t)[k].n == n[k]
        after = {name: sum(n[k] / sum(n.values()) * own[k][name] for k in n) for name in w}
        for name in w:
            if name in weights:
                delta = w[name] - after[name]
                v[name] = beta * v[name] + delta
                after[name] = w[name] - eta_s * (beta * v[name] + delta if nesterov else v[name])
            elif not w[name].is_floating_point():
                after[name] = after[name].round().long()
        w = after
        close(w, ran.states[t].w, f"after {t}")
        close(v, ran.states[t].v, f"v {t}")
