"""Two rounds of FedMD by hand: transfer once, then communicate, digest and revisit in each round; two architectures."""

from __future__ import annotations

import pytest
import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

B_0, B, ETA = 100, 32, 0.01
E_0, E_K, E_DIGEST, E = 1, 2, 2, 1
ARCHS = {0: "mlp", 1: "cnn_bn", 2: "cnn_bn"}
SET = {"E_0": E_0, "E_k": E_K, "B_0": B_0, "E_digest": E_DIGEST, "E": E, "B": B, "eta": ETA}


def absolute(out, f):
    return (out - f).abs().mean(1).mean()


def divergence(out, f):
    p = torch.softmax(f, 1)
    return (p * (torch.log(p) - torch.log_softmax(out, 1))).sum(1).mean()


def trained(net, x, y, order, epochs, loss):
    adam = torch.optim.Adam(net.train().parameters(), lr=ETA)
    for _ in range(epochs):
        for b in epoch(order, len(x), B):
            adam.zero_grad()
            loss(net(x[b]), y[b]).backward()
            adam.step()


@pytest.mark.parametrize(("digest", "loss"), [("mae", absolute), ("kl", divergence)])
def test_two_rounds(tmp_path, digest, loss):
    options = {**SET, "digest": digest}
    ran = played("fedmd", tmp_path, rounds=2, model="mlp:1,cnn_bn:2", server_model="cnn_bn", set=options)
    x_0, y_0 = ran.world.public()
    assert len(x_0) > B_0, "a part of the public set is drawn"
    nets = {k: ran.net(ran.first[k], ARCHS[k]) for k in ran.rows}
    for t in (1, 2):
        d = torch.randperm(len(x_0), generator=rng("server", "d_j", t))[:B_0]
        told = {}
        for k, (x, y) in ran.rows.items():
            assert ran.down(t)[k].d.tolist() == d.tolist()
            if t == 1:  # transfer
                trained(nets[k], x_0, y_0, rng(f"client {k}", "fit 1", t), E_0, F.cross_entropy)
                trained(nets[k], x, y, rng(f"client {k}", "fit 2", t), E_K, F.cross_entropy)
            with torch.no_grad():
                told[k] = nets[k].eval()(x_0[d])
            close({"f": told[k]}, {"f": ran.up(t)[k].f}, f"round {t}: scores of client {k}")
        f = sum(told.values()) / len(told)
        for k, (x, y) in ran.rows.items():
            close({"f": f}, {"f": ran.down(t, ask=1)[k].f}, f"round {t}: consensus to client {k}")
            trained(nets[k], x_0[d], f, rng(f"client {k}", "fit 1", t, ask=1), E_DIGEST, loss)
            trained(nets[k], x, y, rng(f"client {k}", "fit 2", t, ask=1), E, F.cross_entropy)
            close(dict(nets[k].state_dict()), ran.model(k, t), f"round {t}: client {k}'s model")
