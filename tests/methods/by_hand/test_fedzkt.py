"""FedZKT, two rounds by hand: proximal training on devices of three architectures, the disagreement of the global model
and the devices' mean softmax (SL loss) that the generator raises and the global model lowers, then the way back."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from conditional import Adam, Momentum, images, still, weights
from torch.nn.functional import cross_entropy

SET = {
    "B": 32, "eta": 0.1, "mu": 0.3, "I": 2, "I_g": 2, "I_d": 2, "I_k": 3, "B_s": 12, "d": 6, "width": 4,
    "eta_g": 0.003, "eta_d": 0.02, "eta_k": 0.03,
}  # fmt: skip


def on_device(net, x, y, k, t):
    """CE + mu / 2 ||theta - theta_received||^2, one epoch of SGD."""
    received = {name: p.detach().clone() for name, p in net.named_parameters()}
    for index in epoch(rng(f"client {k}", "fit 1", t), len(y), SET["B"]):
        far = sum(((p - received[name]) ** 2).sum() for name, p in net.named_parameters())
        net.zero_grad()
        (cross_entropy(net(x[index]), y[index]) + SET["mu"] / 2 * far).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= SET["eta"] * p.grad
    return {name: v.detach().clone() for name, v in net.state_dict().items()}


def L_SL(a, b):
    return (a.softmax(1) - b).abs().sum(1).mean()


def test_two_rounds(tmp_path):
    ran = played("fedzkt", tmp_path / "run", rounds=2, model="digits-3", server_model="cnn", set=SET)
    archs = ran.world.archs
    assert len(set(archs)) == 3
    own, w, F = dict(ran.first), weights(ran.states[0].G), ran.net(ran.states[0].w)
    for t in (1, 2):
        for k, rows in ran.rows.items():
            own[k] = on_device(ran.net(own[k], archs[k]), *rows, k, t)
            close(own[k], ran.sent("OnDevice", t)[k]["w"], f"device {k}, round {t}")
        devices = {k: still(ran.net(own[k], archs[k])) for k in own}
        opt_G, opt_F = Adam(SET["eta_g"]), Momentum(SET["eta_d"], 0.9)  # both begin anew in each round
        draw = rng("server", "z", t)

        def made(draw=draw):
            z = torch.randn(SET["B_s"], SET["d"], generator=draw, dtype=torch.float64)
            return images(w, z, SET["width"])

        def disagreement(x, devices=devices):
            return L_SL(F(x), torch.stack([f(x).softmax(1) for f in devices.values()]).mean(0))

        for _ in range(SET["I"]):
            still(F)
            for _ in range(SET["I_g"]):
                opt_G.step(w, -disagreement(made()))
            F.train().requires_grad_(True)
            for _ in range(SET["I_d"]):
                opt_F.step(F, disagreement(made().detach()))
        close(w, {name: ran.states[t].G[name] for name in w}, f"the generator, round {t}")
        close(F.state_dict(), ran.states[t].w, f"the global model, round {t}")
        still(F)
        for k, f_k in devices.items():  # the way back
            f_k.train().requires_grad_(True)
            opt_k = Momentum(SET["eta_k"], 0.9)
            for _ in range(SET["I_k"]):
                x = made().detach()
                opt_k.step(f_k, L_SL(f_k(x), F(x).softmax(1)))
            after = dict(f_k.state_dict())
            after |= {name: own[k][name] for name in own[k] if "running" in name or "tracked" in name}
            close(after, ran.sent("Transferred", t)[k]["w"], f"back to device {k}, round {t}")
            own[k] = {name: v.clone() for name, v in after.items()}
