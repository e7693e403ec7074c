"""Two rounds of training alone, by hand: nothing is sent, and each client goes on from where it was."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

E, B, ETA = 2, 16, 0.1


def test_two_rounds(tmp_path):
    ran = played("local", tmp_path, rounds=2, model="cnn_bn:2,mlp:1", set={"E": E, "B": B, "eta": ETA})
    for k, (x, y) in ran.rows.items():
        net = ran.net(ran.first[k], ran.world.archs[k])
        for t in (1, 2):
            assert not vars(ran.down(t)[k])
            assert not vars(ran.up(t)[k])
            order = rng(f"client {k}", "fit 1", t)
            for _ in range(E):
                for b in epoch(order, len(x), B):
                    gradient = torch.autograd.grad(F.cross_entropy(net(x[b]), y[b]), list(net.parameters()))
                    with torch.no_grad():
                        for p, g in zip(net.parameters(), gradient, strict=True):
                            p -= ETA * g
            close(dict(net.state_dict()), ran.model(k, t), f"client {k} after round {t}")
