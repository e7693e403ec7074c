"""Two rounds of FKE by hand: Eq. 9, then Eq. 8 on a public transfer set, in both directions of the KL.

Local training ends after so many epochs, or by its running accuracy."""

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


def test_local_training_by_its_running_accuracy(tmp_path):
    """Hits count on the mirrored images of each batch, before its step, until more than tau of an epoch's are right.
    Who has them in evaluation, on images mirrored once, is not trained."""
    tau, eta, most, epochs = 0.6, 4e-3, 30, {}
    setting = {"eta": eta, "B": B, "tau": tau, "stops": "running", "E_local": most, "T_FKE": 0, "flip": True}
    ran = played("fke", tmp_path, rounds=2, clients=2, model="cnn_bn:1,mlp:1", aux=0.8, set=setting)

    def mirrored(x, draws):
        chosen = torch.rand(len(x), 6, generator=draws)[:, 2] < 0.5
        return torch.where(chosen[:, None, None, None], x.flip(-1), x)

    for k, w in ran.first.items():
        net, (x, y) = ran.net(w, ran.world.archs[k]), ran.rows[k]
        for t in (1, 2):
            draws, adam = rng(f"client {k}", "fit 1", t), torch.optim.Adam(net.parameters(), lr=eta)
            net.eval()
            passed, epochs[k, t] = (net(mirrored(x, draws)).argmax(1) == y).double().mean() >= tau, 0
            while not passed and epochs[k, t] < most:
                net.train()
                hits = 0
                for b in epoch(draws, len(x), B):
                    out = net(mirrored(x[b], draws))
                    hits += int((out.argmax(1) == y[b]).sum())
                    adam.zero_grad()
                    F.cross_entropy(out, y[b]).backward()
                    adam.step()
                passed, epochs[k, t] = hits / len(x) > tau, epochs[k, t] + 1
            close(net.state_dict(), ran.model(k, t), f"round {t}: client {k}")
    assert all(1 < epochs[k, 1] < most for k in ran.first)
    assert not any(epochs[k, 2] for k in ran.first), "in the second round nobody is trained again"
