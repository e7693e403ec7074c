"""HeteroFL, two rounds by hand: the first units of each layer, the scaler, masked cross-entropy, DFRD's Eq. 1, and
static batch norm, whose statistics are asked for at the end."""

from __future__ import annotations

import torch
from by_hand import close, epoch, played, rng
from narrow import WIDTHS, cut, put_together, trained
from torch.nn.functional import cross_entropy

B, ETA = 32, 0.05
R = {0: 1.0, 1: 0.5, 2: 0.25}


def parameters(w):
    return {name: t for name, t in w.items() if "running" not in name and "tracked" not in name}


def scaled(net, ratio):
    """What the hidden layers put out, divided by R."""
    for layer in (net.encoder.conv1, net.encoder.conv2, net.encoder.fc1):
        layer.register_forward_hook(lambda layer, came, out: out / ratio)
    return net


def masked(y):
    """Logits of classes that the client does not hold are 0."""
    held = torch.zeros(10)
    held[y] = 1
    return lambda logits, labels: cross_entropy(logits * held, labels)


def statistics(net, x, k, t):
    """Mean over the batches of each layer's mean and unbiased variance, as the full network sees this client's data."""
    seen = {"bn1": [], "bn2": []}

    def hear(name):
        def hook(layer, came):
            seen[name].append((came[0].mean((0, 2, 3)), came[0].var((0, 2, 3), correction=1)))

        return hook

    for name in seen:
        getattr(net.encoder, name).register_forward_pre_hook(hear(name))
    with torch.no_grad():
        for index in epoch(rng(f"client {k}", "statistics", t, ask=1), len(x), B):
            net(x[index])  # in training mode: each layer normalises by its batch
    return {
        f"encoder.{name}.{part}": torch.stack([batch[i] for batch in batches]).mean(0)
        for name, batches in seen.items()
        for i, part in enumerate(("running_mean", "running_var"))
    }


def test_two_rounds(tmp_path):
    ran = played(
        "heterofl", tmp_path / "run", rounds=2, model="cnn_bn:1,cnn_bn@0.5:1,cnn_bn@0.25:1", set={"B": B, "eta": ETA}
    )
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    total = sum(n.values())
    assert any(len(y.unique()) < 10 for _, y in ran.rows.values()), "someone lacks a class, or the mask is not tested"
    w = dict(ran.states[0].w)
    for t in (1, 2):
        assert ran.order(0, t) == ["Part", "Query"]
        taken, parts = {}, {}
        for k, widths in WIDTHS.items():
            taken[k] = [torch.arange(m) for m in widths]
            part = cut(parameters(w), taken[k])
            close(part, ran.sent("Part", t)[k]["w"], f"to client {k}")
            net = ran.net({**ran.first[k], **part}, ran.world.archs[k])
            parts[k] = parameters(trained(scaled(net, R[k]), *ran.rows[k], k, t, B, ETA, masked(ran.rows[k][1])))
            close(parts[k], ran.sent("TrainedPart", t)[k]["w"], f"from client {k}")
        w |= put_together(w, parts, taken, n)  # Eq. 1
        fresh = {}
        for k, (x, _) in ran.rows.items():
            close(parameters(w), ran.sent("Query", t)[k]["w"], f"the query of client {k}")
            fresh[k] = statistics(ran.net(w), x, k, t)
            close(fresh[k], ran.sent("Statistics", t)[k]["s"], f"statistics of client {k}")
        w |= {name: sum(n[k] / total * fresh[k][name] for k in n) for name in fresh[0]}
        close(w, ran.states[t].w, "the global model")
