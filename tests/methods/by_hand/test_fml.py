"""Two rounds of FML by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

alpha, beta, eta, E = 0.7, 0.4, 0.1, 2


def kl(p, q):
    """D_KL(p || q) of probabilities, the mean over rows."""
    return (p * (p / q).log()).sum(1).mean()


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "alpha": alpha, "beta": beta}
    ran = played("fml", tmp_path, rounds=2, model="cnn_bn:2,mlp:1", server_model="cnn", set=options)
    archs = ["cnn_bn", "cnn_bn", "mlp"]
    w, own = dict(ran.states[0].w), dict(ran.first)
    for t in (1, 2):
        told = {}
        for k, (x, y) in ran.rows.items():
            close(w, ran.down(t)[k].w, f"down {t} {k}")
            mine, meme = ran.net(own[k], archs[k]), ran.net(w, "cnn")
            for _ in range(E):
                z, z_meme = mine(x), meme(x)
                p, p_meme = z.softmax(1), z_meme.softmax(1)
                L_own = alpha * cross_entropy(z, y) + (1 - alpha) * kl(p_meme.detach(), p)  # Eq. 6
                L_meme = beta * cross_entropy(z_meme, y) + (1 - beta) * kl(p.detach(), p_meme)  # Eq. 7
                for net, loss in ((mine, L_own), (meme, L_meme)):
                    grads = torch.autograd.grad(loss, list(net.parameters()))
                    with torch.no_grad():
                        for v, grad in zip(net.parameters(), grads, strict=True):
                            v -= eta * grad
            own[k], told[k] = mine.state_dict(), meme.state_dict()
            close(own[k], ran.model(k, t), f"model {t} {k}")
            close(told[k], ran.up(t)[k].w, f"up {t} {k}")
        w = {name: sum(told[k][name] for k in told) / 3 for name in w}
        close(w, ran.states[t].w, f"after {t}")
