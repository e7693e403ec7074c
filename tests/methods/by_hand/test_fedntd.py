"""Two rounds of FedNTD by hand: full batches, so that no draw matters."""

from __future__ import annotations

import torch
from by_hand import close, played
from torch.nn.functional import cross_entropy

beta, tau, eta, E = 1.5, 2.0, 0.1, 2


def others(z, y):
    """The softmax at temperature tau over all classes but the true one, row by row."""
    rows = [torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(z, y.tolist(), strict=True)]
    return torch.softmax(torch.stack(rows) / tau, 1)


def test_rounds(tmp_path):
    options = {"E": E, "B": 1000, "eta": eta, "beta": beta, "tau": tau}
    ran = played("fedntd", tmp_path, rounds=2, model="cnn_bn", set=options)
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    w_t = dict(ran.states[0].w)
    for t in (1, 2):
        own = {}
        for k, (x, y) in ran.rows.items():
            close(w_t, ran.down(t)[k].w, f"down {t} {k}")
            net, glob = ran.net(w_t), ran.net(w_t).eval()
            with torch.no_grad():
                q_g = others(glob(x), y)
            for _ in range(E):
                z = net(x)
                q = others(z, y)
                L_NTD = -(q_g * torch.log(q / q_g)).sum(1).mean()  # Eqs. 4, 5
                grads = torch.autograd.grad(cross_entropy(z, y) + beta * L_NTD, list(net.parameters()))  # Eq. 3
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
