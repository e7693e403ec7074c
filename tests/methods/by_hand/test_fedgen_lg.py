"""A round and a half of FedGen on LG-FedAvg by hand: full batches; noise and labels drawn by the parties' names."""

from __future__ import annotations

import torch
from by_hand import close, played, rng
from torch.nn.functional import cross_entropy

eta, E, d, hidden, I_g, B_g, B_hat, eta_g, alpha = 0.1, 2, 6, 8, 2, 12, 10, 0.01, 1.5


def generate(w, epsilon, y, training):
    """z = G(epsilon, y): linear, batch norm, ReLU, linear; batch norm by the batch's statistics or the kept ones."""
    h = torch.cat([epsilon, torch.eye(10, dtype=epsilon.dtype)[y]], 1) @ w["layers.0.weight"].T + w["layers.0.bias"]
    if training:
        mean, var = h.mean(0), h.var(0, unbiased=False)
    else:
        mean, var = w["layers.1.running_mean"], w["layers.1.running_var"]
    h = (h - mean) / (var + 1e-5).sqrt() * w["layers.1.weight"] + w["layers.1.bias"]
    return h.relu() @ w["layers.3.weight"].T + w["layers.3.bias"], mean, var


def draw(p, B, order):
    epsilon = torch.randn(B, d, generator=order, dtype=torch.float64)
    u = torch.rand(B, generator=order, dtype=torch.float64)
    edges = (p / p.sum()).cumsum(0)
    return epsilon, torch.tensor([int((edges <= v).sum()) for v in u])


def test_rounds(tmp_path):
    options = {
        "E": E, "B": 1000, "eta": eta, "d": d, "hidden": hidden, "I_g": I_g, "B_g": B_g, "B_hat": B_hat,
        "eta_g": eta_g, "alpha": alpha,
    }  # fmt: skip
    ran = played("fedgen_lg", tmp_path, rounds=1, model="cnn_bn/24:2,mlp/24:1", set=options)
    archs = ["cnn_bn/24", "cnn_bn/24", "mlp/24"]
    theta, w, p = dict(ran.states[0].theta), dict(ran.states[0].w), torch.full((10,), 0.1, dtype=torch.float64)
    heads, counts = {}, {}
    for k, (x, y) in ran.rows.items():
        close(theta, ran.down()[k].theta)
        close(w, ran.down()[k].w)
        epsilon, y_hat = draw(p, B_hat, rng(f"client {k}", "epsilon and y"))
        with torch.no_grad():
            z = generate(w, epsilon, y_hat, training=False)[0]
        net = ran.net({**ran.first[k], **theta}, archs[k])
        for _ in range(E):
            loss = cross_entropy(net(x), y) + alpha * cross_entropy(net.classify(z), y_hat)  # Eq. 5
            grads = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for v, grad in zip(net.parameters(), grads, strict=True):
                    v -= eta * grad
        close(net.state_dict(), ran.model(k), f"model {k}")
        heads[k] = {name: net.state_dict()[name] for name in theta}
        counts[k] = torch.bincount(y, minlength=10).double()
        close(heads[k], ran.up()[k].theta, f"up {k}")
        assert ran.up()[k].c.tolist() == counts[k].tolist()
    total = sum(counts.values()).sum()
    theta = {name: sum(counts[k].sum() / total * heads[k][name] for k in heads) for name in theta}
    close(theta, ran.states[1].theta, "theta")
    p = sum(counts.values()) / total
    close({"p": p}, {"p": ran.states[1].p.double()}, "p")
    learned = {name: t.clone() for name, t in w.items()}
    trained = [name for name in w if name.startswith("layers") and "running" not in name and "num" not in name]
    m, v2, order = dict.fromkeys(trained, 0), dict.fromkeys(trained, 0), rng("server", "epsilon and y")
    for step in range(1, I_g + 1):
        epsilon, y_hat = draw(p, B_g, order)
        leaves = {name: learned[name].clone().requires_grad_() for name in trained}
        z, mean, var = generate({**learned, **leaves}, epsilon, y_hat, training=True)
        logits = sum(z @ h["classifier.weight"].T + h["classifier.bias"] for h in heads.values()) / 3
        grads = torch.autograd.grad(cross_entropy(logits, y_hat), list(leaves.values()))  # Eq. 4
        for name, grad in zip(trained, grads, strict=True):  # Adam
            m[name], v2[name] = 0.9 * m[name] + 0.1 * grad, 0.999 * v2[name] + 0.001 * grad**2
            step_m, step_v = m[name] / (1 - 0.9**step), v2[name] / (1 - 0.999**step)
            learned[name] = learned[name] - eta_g * step_m / (step_v.sqrt() + 1e-8)
        learned["layers.1.running_mean"] = 0.9 * learned["layers.1.running_mean"] + 0.1 * mean.detach()
        unbiased = var.detach() * B_g / (B_g - 1)
        learned["layers.1.running_var"] = 0.9 * learned["layers.1.running_var"] + 0.1 * unbiased
        learned["layers.1.num_batches_tracked"] = learned["layers.1.num_batches_tracked"] + 1
    close(learned, ran.states[1].w, "w")
