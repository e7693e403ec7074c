"""FedFTG, three rounds by hand, from scratch: teachers are compared with the student one by one, every sample counts,
the label stands beside the noise as one-hot."""

from __future__ import annotations

import torch
from by_hand import close, played, rng
from conditional import Adam, Momentum, apart, ce, dcgan, drawn, images, kl, still, weights
from distilled import distilled_apart, plain_averages, taught
from narrow import trained
from torch.nn.functional import one_hot

B, ETA = 32, 0.1
SET = {"I": 2, "I_g": 2, "I_d": 2, "B": 12, "d": 6, "width": 4, "eta_g": 0.003, "eta_d": 0.02}


def test_three_rounds(tmp_path):
    values = {**SET, "lambda_cls": 0.8, "lambda_dis": 1.5, "host": {"B": B, "eta": ETA}}
    ran = played("fedftg", tmp_path / "run", rounds=3, set=values)
    n = torch.stack([torch.bincount(y, minlength=10) for _, y in ran.rows.values()]).double()
    alpha, p = n / n.sum(0).clamp_min(1), n.sum(0) / n.sum()
    own, w, f = dict(ran.first), weights(ran.states[0].nets.G), ran.net(ran.states[0].host.w)
    opt_G, opt_f = Adam(SET["eta_g"]), Momentum(SET["eta_d"], 0.9)
    for t in (1, 2, 3):
        for k, rows in ran.rows.items():
            own[k] = trained(ran.net(own[k]), *rows, k, t, B, ETA)
            close(own[k], ran.sent("Uploaded", t)[k]["w"], f"client {k}, round {t}")
            assert torch.equal(ran.sent("LabelCounts", t)[k]["n"].double(), n[k])
        teachers = [still(ran.net(own[k])) for k in own]
        draw = rng("server", "z and y", t)

        def made(z, y):
            return images(w, torch.cat([z, one_hot(y, 10).double()], 1), SET["width"])

        def L_md(s, y, teachers=teachers):
            return sum(alpha[i][y] * kl(teacher(s), f(s)) for i, teacher in enumerate(teachers)).mean()

        for _ in range(SET["I"]):
            still(f)
            for _ in range(SET["I_g"]):
                z, y = drawn(draw, p, SET["d"], SET["B"])
                s = made(z, y)
                L_cls = sum(alpha[i][y] * ce(teacher(s), y) for i, teacher in enumerate(teachers)).mean()
                opt_G.step(w, 0.8 * L_cls - L_md(s, y) + 1.5 * apart(s, z))
            f.train().requires_grad_(True)
            for _ in range(SET["I_d"]):
                z, y = drawn(draw, p, SET["d"], SET["B"])
                s = made(z, y).detach()
                opt_f.step(f, L_md(s, y))
        kept = ran.states[t]
        close(w, {name: kept.nets.G[name] for name in w}, f"the generator, round {t}")
        close(f.state_dict(), kept.host.w, f"the global model, round {t}")
        assert kept.nets.average is None


def test_two_rounds_on_fedavg_as_dfrds_authors_run_it(tmp_path):
    """All settings of the preset, with other numbers: a temperature, the student first and without a gradient for the
    generator, a mean over the classes, an embedding of the label beside z, mean squares in L_dis."""
    T, own = 3.0, {"tran": "student-detached", "classes": "mean", "merge": "cat", "metric": "ms"}
    shared = {
        "net": "dcgan", "betas": (0.5, 0.99), "momentum": 0.0, "decay": 0.1, "optimisers": "turn",
        "statistics": "batch", "feedback": False,
    }  # fmt: skip
    values = {**SET, "lambda_cls": 0.8, "lambda_dis": 1.5, "host": {"B": B, "eta": ETA}, "T": T, **own, **shared}
    ran = played("fedavg+fedftg", tmp_path / "run", rounds=2, model="cnn_bn", set=values)
    n = torch.stack([torch.bincount(y, minlength=10) for _, y in ran.rows.values()]).double()
    alpha, p = n / n.sum(0).clamp_min(1), n.sum(0) / n.sum()
    w = weights(ran.states[0].nets.G)
    for t, f, teachers in plain_averages(ran, 2, B, ETA):
        draw = rng("server", "z and y", t)

        def drawn_images(draw=draw):
            z, y = drawn(draw, p, SET["d"], SET["B"])
            return z, y, dcgan(w, torch.cat([z, w["E.weight"][y]], 1))

        for _ in range(SET["I"]):
            opt_G, opt_f = Adam(SET["eta_g"], (0.5, 0.99)), Momentum(SET["eta_d"], 0.0, 0.1)
            taught(f, learns=False)
            for _ in range(SET["I_g"]):
                z, y, s = drawn_images()
                student = f(s).detach()
                L_cls = sum(alpha[i][y] * ce(teacher(s), y) for i, teacher in enumerate(teachers)).mean()
                L_md = sum(alpha[i][y] * kl(student, teacher(s), T) / 10 for i, teacher in enumerate(teachers)).mean()
                opt_G.step(w, 0.8 * L_cls - L_md + 1.5 * apart(s, z, squared=True))
            taught(f, learns=True)
            for _ in range(SET["I_d"]):
                _, y, s = drawn_images()
                s = s.detach()
                opt_f.step(f, sum(alpha[i][y] * kl(q(s), f(s), T) / 10 for i, q in enumerate(teachers)).mean())
        kept = ran.states[t]
        close(w, {name: kept.nets.G[name] for name in w}, f"the generator, round {t}")
        distilled_apart(f, kept)
