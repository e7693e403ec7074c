"""Two rounds of MOON by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

mu, tau, eta, E = 2.0, 0.5, 0.1, 2


def cosine(a, b):
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "mu": mu, "tau": tau}
    ran = played("moon", tmp_path, rounds=2, model="cnn_bn", set=options)
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    w_t = dict(ran.states[0].w)
    own = dict.fromkeys(ran.rows)  # each client's model after its last training
    for t in (1, 2):
        for k, (x, y) in ran.rows.items():
            close(w_t, ran.down(t)[k].w, f"down {t} {k}")
            net, glob, prev = ran.net(w_t), ran.net(w_t).eval(), ran.net(own[k] or w_t).eval()
            with torch.no_grad():
                z_glob, z_prev = glob.encode(x), prev.encode(x)
            for _ in range(E):
                z = net.encode(x)
                a, b = (cosine(z, z_glob) / tau).exp(), (cosine(z, z_prev) / tau).exp()
                loss = cross_entropy(net.classify(z), y) + mu * -torch.log(a / (a + b)).mean()  # Eqs. 3, 4
                grads = torch.autograd.grad(loss, list(net.parameters()))
                with torch.no_grad():
                    for w, grad in zip(net.parameters(), grads, strict=True):
                        w -= eta * grad
            own[k] = net.state_dict()
            close(own[k], ran.up(t)[k].w, f"up {t} {k}")
            assert ran.up(t)[k].n == n[k]
        w_t = {
            name: sum(n[k] / sum(n.values()) * own[k][name] for k in n)
            if v.is_floating_point()
            else torch.tensor(t * E)
            for name, v in w_t.items()
        }
        close(w_t, ran.states[t].w, f"after {t}")
