"""DENSE, two rounds by hand, from scratch and with batch norm: all teachers count alike, nothing but models is asked
for, and a turn has one batch of noise."""

from __future__ import annotations

import torch
from by_hand import close, played, rng
from conditional import Adam, Momentum, ce, dcgan, drawn, images, kl, still, weights
from distilled import distilled_apart, plain_averages, taught
from narrow import trained

B, ETA = 32, 0.1
SET = {"I": 2, "I_g": 3, "I_d": 2, "B": 12, "d": 6, "width": 4, "eta_g": 0.003, "eta_d": 0.02}


def heard(teachers, s):
    """D(s), the mean of the teachers' logits, and L_BN: how far the batch's statistics are from the running ones."""
    logits, far = [], torch.zeros(())
    for net in teachers:
        x = net.encoder.conv1(s)
        for i, norm in ((1, net.encoder.bn1), (2, net.encoder.bn2)):
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            far = far + (mean - norm.running_mean).norm() + (var - norm.running_var).norm()
            x = torch.nn.functional.max_pool2d(norm(x).relu(), 2)
            x = net.encoder.conv2(x) if i == 1 else x
        logits.append(net.classifier(net.encoder.fc1(x.flatten(1)).relu()))
    return torch.stack(logits).mean(0), far / len(teachers)


def test_two_rounds(tmp_path):
    values = {**SET, "lambda_1": 0.3, "lambda_2": 0.7, "host": {"B": B, "eta": ETA}}
    ran = played("dense", tmp_path / "run", rounds=2, model="cnn_bn", set=values)
    own, w, f = dict(ran.first), weights(ran.states[0].nets.G), ran.net(ran.states[0].host.w)
    opt_G, opt_f = Adam(SET["eta_g"]), Momentum(SET["eta_d"], 0.9)
    for t in (1, 2):
        assert ran.order(0, t) == ["Begin"], "no label counts"
        for k, rows in ran.rows.items():
            own[k] = trained(ran.net(own[k]), *rows, k, t, B, ETA)
            close(own[k], ran.sent("Uploaded", t)[k]["w"], f"client {k}, round {t}")
        teachers = [still(ran.net(own[k])) for k in own]
        draw = rng("server", "z and y", t)
        for _ in range(SET["I"]):
            z, y = drawn(draw, torch.ones(10), SET["d"], SET["B"])
            still(f)
            for _ in range(SET["I_g"]):
                s = images(w, z, SET["width"])
                D, L_BN = heard(teachers, s)
                student = f(s)
                omega = D.argmax(1) != student.argmax(1)
                L_div = -(omega * kl(D, student)).mean()
                opt_G.step(w, ce(D, y).mean() + 0.3 * L_BN + 0.7 * L_div)
            f.train().requires_grad_(True)
            for _ in range(SET["I_d"]):
                s = images(w, z, SET["width"]).detach()
                opt_f.step(f, kl(heard(teachers, s)[0], f(s)).mean())
        kept = ran.states[t]
        close(w, {name: kept.nets.G[name] for name in w}, f"the generator, round {t}")
        close(f.state_dict(), kept.host.w, f"the global model, round {t}")


def test_two_rounds_on_fedavg_as_dfrds_authors_run_it(tmp_path):
    """All settings of the preset, with other numbers: a temperature, the student first and without a gradient for the
    generator, omega where exactly one of the two is right and the mean over those rows, a generator that sees y, fresh
    z and y in each step."""
    T, own = (
        3.0,
        {"tran": "student-detached", "mask": "one-right", "rows": "counted", "merge": "mul", "batches": "step"},
    )
    shared = {
        "net": "dcgan", "betas": (0.5, 0.99), "momentum": 0.0, "decay": 0.1, "optimisers": "turn",
        "statistics": "batch", "feedback": False,
    }  # fmt: skip
    values = {**SET, "lambda_1": 0.0, "lambda_2": 0.7, "host": {"B": B, "eta": ETA}, "T": T, **own, **shared}
    ran = played("fedavg+dense", tmp_path / "run", rounds=2, model="cnn_bn", set=values)
    w, counted = weights(ran.states[0].nets.G), 0
    for t, f, teachers in plain_averages(ran, 2, B, ETA):
        draw = rng("server", "z and y", t)

        def drawn_images(draw=draw):
            z, y = drawn(draw, torch.ones(10), SET["d"], SET["B"])
            return y, dcgan(w, z * w["E.weight"][y])

        def D(s, teachers=teachers):
            return sum(teacher(s) for teacher in teachers) / len(teachers)

        for _ in range(SET["I"]):
            opt_G, opt_f = Adam(SET["eta_g"], (0.5, 0.99)), Momentum(SET["eta_d"], 0.0, 0.1)
            taught(f, learns=False)
            for _ in range(SET["I_g"]):
                y, s = drawn_images()
                said, student = D(s), f(s).detach()
                omega = (said.argmax(1) == y) ^ (student.argmax(1) == y)
                counted += int(omega.sum())
                L_div = -(omega * kl(student, said, T)).sum() / max(int(omega.sum()), 1)
                opt_G.step(w, ce(said, y).mean() + 0.7 * L_div)
            taught(f, learns=True)
            for _ in range(SET["I_d"]):
                y, s = drawn_images()
                s = s.detach()
                opt_f.step(f, kl(D(s), f(s), T).mean())
        kept = ran.states[t]
        close(w, {name: kept.nets.G[name] for name in w}, f"the generator, round {t}")
        distilled_apart(f, kept)
    assert counted, "or omega is not tested"
