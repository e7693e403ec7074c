"""Two rounds of FedDF by hand: FedAvg's average is the student, the uploads are the teachers, the open set has no
labels."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from narrow import trained

B_K, ETA_K, N, B, ETA, TAU = 32, 0.05, 5, 48, 0.01, 1.5


def test_two_rounds(tmp_path):
    options = {"N": N, "B": B, "eta": ETA, "tau": TAU, "host": {"B": B_K, "eta": ETA_K}}
    ran = played("feddf", tmp_path, rounds=2, model="cnn_bn", set=options)
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    d = ran.world.public()[0]
    w = dict(ran.states[0].host.w)
    for t in (1, 2):
        assert ran.order(0, t) == ["Global"], "the open set does not travel"
        own = {}
        for k, rows in ran.rows.items():
            close(w, ran.down(t)[k].w, f"down {t} {k}")
            own[k] = trained(ran.net(w), *rows, k, t, B_K, ETA_K)
            close(own[k], ran.up(t)[k].w, f"up {t} {k}")
        mean = {name: sum(n[k] / sum(n.values()) * own[k][name] for k in n) for name in w}
        mean = {name: v if v.is_floating_point() and "tracked" not in name else v.round().long()
                for name, v in mean.items()}  # fmt: skip
        close(mean, ran.states[t].before, f"round {t}: before the distillation")
        with torch.no_grad():
            logits = sum(ran.net(own[k]).eval()(d) for k in own) / len(own)  # all teachers alike
        teacher = torch.softmax(logits / TAU, 1)
        net, order, steps = ran.net(mean), rng("server", "fit 1", t), 0
        adam = torch.optim.Adam(net.parameters(), lr=ETA)
        while steps < N:
            for b in epoch(order, len(d), B):
                if steps == N:
                    break
                student = torch.log_softmax(net(d[b]) / TAU, 1)
                loss = (teacher[b] * (teacher[b].log() - student)).sum(1).mean()
                adam.zero_grad()
                loss.backward()
                adam.step()
                steps += 1
        w = dict(net.state_dict())
        close(w, ran.states[t].host.w, f"round {t}: the fused model")
        with torch.no_grad():
            said = (net.eval()(d).argmax(1) == logits.argmax(1)).double().mean()
        assert abs(ran.states[t].agreement - float(said)) < 1e-9
