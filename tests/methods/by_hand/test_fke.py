"""Two rounds of FKE by hand: Eq. 9, then Eq. 8 on a public transfer set, in both directions of the KL."""

from __future__ import annotations

import pytest
import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

ETA, B, E_LOCAL, T_FKE = 1e-3, 30, 2, 2


@pytest.mark.parametrize("kl", ["teacher-first", pytest.param("student-first", marks=pytest.mark.long)])
def test_two_rounds(kl, tmp_path):
    setting = {"eta": ETA, "B": B, "tau": "off", "E_local": E_LOCAL, "T_FKE": T_FKE, "kl": kl}
    ran = played("fke", tmp_path, rounds=2, clients=3, model="cnn_bn:1,mlp:1,cnn:1", aux=0.5, set=setting)
    assert len({len(y) for _, y in ran.rows.values()}) == 3, "clients of unequal size"
    public, _ = ran.world.public()
    nets = {k: ran.net(w, ran.world.archs[k]) for k, w in ran.first.items()}
    for t in (1, 2):
        Y = {}
        for k, net in nets.items():
            x, y = ran.rows[k]
            order, adam = rng(f"client {k}", "fit 1", t), torch.optim.Adam(net.parameters(), lr=ETA)
            net.train()
            for _ in range(E_LOCAL):
                for b in epoch(order, len(x), B):
                    adam.zero_grad()
                    F.cross_entropy(net(x[b]), y[b]).backward()  # Eq. 9
                    adam.step()
            with torch.no_grad():
                Y[k] = net.eval()(public)  # f(D^_k; theta_k), D^_k the public set for everybody
            close({"Y": Y[k]}, {"Y": ran.sent("Known", t)[k].Y}, f"round {t}: client {k} says")
        for k, net in nets.items():
            teachers = [i for i in nets if i != k]
            sent = ran.sent("Others", t)[k].Y
            assert list(sent) == teachers
            close({str(i): Y[i] for i in teachers}, {str(i): y for i, y in sent.items()})
            order, adam = rng(f"client {k}", "fit 1", t, ask=1), torch.optim.Adam(net.parameters(), lr=ETA)
            trained = {name: p.clone() for name, p in net.state_dict().items()}
            net.train()
            for _ in range(T_FKE):
                for b in epoch(order, len(public), B):
                    student = net(public[b]).log_softmax(1)
                    loss = 0.0
                    for i in teachers:  # Eq. 8: sum_{i != k} KL[f(D^_i; theta_i) || f(D^_i; theta~_k)]
                        teacher = Y[i][b].log_softmax(1)
                        p, q = (teacher, student) if kl == "teacher-first" else (student, teacher)
                        loss = loss + (p.exp() * (p - q)).sum(1).mean()
                    adam.zero_grad()
                    loss.backward()
                    adam.step()
            close(net.state_dict(), ran.model(k, t), f"round {t}: client {k} after the exchange")
            close(trained, ran.memory(k, t)["trained"], f"round {t}: client {k} before it")
