"""Two rounds of FedFree by hand: Du et al., NeurIPS 2025, Algorithm 1. Two architectures, a third on the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import close, epoch, played, rng
from torch.nn import functional as F

E, B, ETA, K, ALPHA, STEPS, SAMPLES, BINS = 2, 16, 0.1, 2, 0.05, 2, 24, 32
LAYERS = {  # convolutions and linear layers, from first to last
    "cnn_bn": ["encoder.conv1", "encoder.conv2", "encoder.fc1", "classifier"],
    "mlp": ["encoder.fc1", "classifier"],
    "fedfree_cnn": ["encoder.conv1", "encoder.conv2", "encoder.fc1", "encoder.fc2", "classifier"],
}
ARCHS = ["cnn_bn", "cnn_bn", "mlp"]


def kind(layer):
    return "conv" if "conv" in layer else "linear"


def depth(layer, arch):
    return LAYERS[arch].index(layer) / (len(LAYERS[arch]) - 1)


def corresponding(layer, arch):
    """Of the same type, the nearest in relative depth; the shallower of two."""
    distances = [(abs(depth(layer, arch) - depth(j, "fedfree_cnn")), j) for j in LAYERS["fedfree_cnn"]]
    return min(((d, n, j) for n, (d, j) in enumerate(distances) if kind(j) == kind(layer)), default=(0, 0, None))[2]


def response(w, b, X, outputs, inputs):
    """A layer's output on X^, of the units that both layers have; a smaller kernel looks at the middle of the patch."""
    if w.dim() == 2:
        w = w[:, :, None, None]
    top, left = ((X.shape[a] - w.shape[a]) // 2 for a in (2, 3))
    patch = X[:, :inputs, top : top + w.shape[2], left : left + w.shape[3]]
    return F.conv2d(patch, w[:outputs, :inputs], b[:outputs]).flatten(1)


def H(w, low, high):
    """Shannon's entropy of the weights in equal bins."""
    counts, _ = np.histogram(w.flatten().numpy(), bins=BINS, range=(low, high))
    p = counts[counts > 0] / w.numel()
    return float(-(p * np.log(p)).sum())


def gain(theta, g, bin_range):
    """Eq. 6."""
    ends = [(t.min().item(), t.max().item()) for t in (theta, g)]
    if bin_range == "common":
        ends = [(min(low for low, _ in ends), max(high for _, high in ends))] * 2
    return H(g, *ends[1]) - H(theta, *ends[0])


@pytest.mark.parametrize(
    ("bin_range", "fill", "candidates"),
    [("own", "zero", "type"), ("common", "keep", "type"), ("own", "zero", "updated")],
)
def test_two_rounds(tmp_path, bin_range, fill, candidates):
    hyper = {"E": E, "B": B, "eta": ETA, "k": K, "alpha": ALPHA, "steps": STEPS, "samples": SAMPLES, "bins": BINS}
    hyper |= {"bin_range": bin_range, "fill": fill, "candidates": candidates}
    ran = played("fedfree", tmp_path, rounds=2, model="cnn_bn:2,mlp:1", set=hyper)
    assert len({len(y) for _, y in ran.rows.values()}) == 3, "clients of unequal size"
    G = {name: t.clone() for name, t in ran.states[0].G.items()}  # line 1
    theta = {i: dict(first) for i, first in ran.first.items()}
    partial = fresh = 0
    for t in (1, 2):
        L = {}
        for i, arch in enumerate(ARCHS):
            net, (x, y) = ran.net(theta[i], arch), ran.rows[i]
            order = rng(f"client {i}", "fit 1", t)
            for _ in range(E):  # line 5
                for b in epoch(order, len(x), B):
                    gradient = torch.autograd.grad(F.cross_entropy(net(x[b]), y[b]), list(net.parameters()))
                    with torch.no_grad():
                        for p, d in zip(net.parameters(), gradient, strict=True):
                            p -= ETA * d
            after = {name: p.detach().clone() for name, p in net.state_dict().items()}
            change = {}
            for layer in LAYERS[arch]:  # Eq. 2, weight and bias together
                names = (f"{layer}.weight", f"{layer}.bias")
                up = sum((after[n] - theta[i][n]).square().sum() for n in names)
                change[layer] = (up / sum(theta[i][n].square().sum() for n in names)).item()
            critical = sorted(change, key=change.get, reverse=True)[:K]  # line 6
            L[i] = {layer: (after[f"{layer}.weight"], after[f"{layer}.bias"]) for layer in critical}
            sent = {f"{layer}.{part}": after[f"{layer}.{part}"] for layer in critical for part in ("weight", "bias")}
            close(sent, ran.up(t)[i].layers, f"round {t}: what client {i} uploads")  # line 7
            assert ran.up(t)[i].types == {layer: kind(layer) for layer in critical}
            theta[i] = after

        mapped = {}  # the client layers of each global layer, in the order of clients and of their changes
        for i, arch in enumerate(ARCHS):
            for layer, (w, b) in L[i].items():
                mapped.setdefault(corresponding(layer, arch), []).append((w, b))
        draw, before = rng("server", "pseudo-data", t), dict(G)
        for j, thetas in mapped.items():  # lines 10-13
            w, b = (G[f"{j}.{part}"].clone().requires_grad_() for part in ("weight", "bias"))
            sides = [[k.shape[a] if k.dim() == 4 else 1 for k in (w, *(v for v, _ in thetas))] for a in (2, 3)]
            X = torch.randn((SAMPLES, w.shape[1], *map(max, sides)), generator=draw, dtype=torch.float64)
            for _ in range(STEPS):
                L_D = 0.0
                for v, c in thetas:  # Eq. 3
                    units = min(len(w), len(v)), min(w.shape[1], v.shape[1])
                    apart = response(w, b, X, *units) - response(v, c, X, *units)
                    L_D = L_D + apart.square().sum() / SAMPLES / len(thetas)
                for p, d in zip((w, b), torch.autograd.grad(L_D, (w, b)), strict=True):
                    p.data -= ALPHA * d  # Eq. 4, Eq. 5
            G[f"{j}.weight"], G[f"{j}.bias"] = w.detach(), b.detach()
        assert mapped
        assert any(not torch.equal(G[name], before[name]) for name in G)
        close(G, ran.states[t].G, f"the global model after round {t}")

        for i in range(3):  # lines 15-21
            KGE = {
                (layer, j): gain(w, G[f"{j}.weight"], bin_range)
                for layer, (w, _) in L[i].items()
                for j in LAYERS["fedfree_cnn"]
                if kind(j) == kind(layer) and (candidates == "type" or j in mapped)
            }
            layer, j = max(KGE, key=KGE.get)  # line 16
            if KGE[layer, j] <= 0:  # line 17
                assert i not in ran.down(t, ask=1)
            else:
                told = ran.down(t, ask=1)[i]
                assert (told.layer, next(iter(told.g))) == (layer, f"{j}.weight")
                close({f"{j}.{part}": G[f"{j}.{part}"] for part in ("weight", "bias")}, told.g, f"to client {i}")
                for part in ("weight", "bias"):  # Eq. 7, of weight and bias each
                    g, mine = G[f"{j}.{part}"].flatten(), theta[i][f"{layer}.{part}"]
                    put = [g[: mine.numel()], (0.0 if fill == "zero" else 1.0) * mine.flatten()[len(g) :]]
                    theta[i][f"{layer}.{part}"] = torch.cat(put).view_as(mine)
                    partial += len(g) != mine.numel()
                fresh += not torch.equal(G[f"{j}.weight"], before[f"{j}.weight"])
            close(theta[i], ran.model(i, t), f"client {i} after round {t}")
    assert partial, "no layer was replaced by one of another size"
    assert fresh or candidates == "type", "no layer was sent that the round had changed"
