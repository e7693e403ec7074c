"""Two rounds of FedDM by hand: Xiong et al., CVPR 2023, as FedAF runs it, in two readings of what is left open."""

from __future__ import annotations

import pytest
import torch
from by_hand import close, drawing, epoch, played, rng
from precision import double
from torch.func import functional_call
from torch.nn import functional as F

IPC, STEPS, B, AVERAGED, LEAST = 3, 3, 9, 3, 2
ETA_S, SIGMA, MOMENTUM, CLIP = 20.0, 0.7, 0.9, 0.05
E, B_W, ETA_W = 2, 8, 0.05


def begun(x, y, classes):
    torch.randn(len(classes), IPC, *x.shape[1:])  # noise, for a class of one record
    S = []
    for c in classes:
        of_c = x[y == c]
        if len(of_c) < 3 * AVERAGED:
            shares = torch.distributions.Dirichlet(torch.full((IPC, len(of_c)), (AVERAGED - 1) / len(of_c))).sample()
            S.append(torch.einsum("in,nchw->ichw", shares, of_c))
        else:
            which = torch.rand(IPC, len(of_c)).topk(AVERAGED).indices
            S.append(torch.stack([of_c[i].mean(0) for i in which]))
    return torch.stack(S)


def perturbed(net, rho):
    """w ~ P(w_r): Gaussian noise over all weights, cut to the ball of radius rho, on top of them."""
    w = {name: p.detach().clone() for name, p in net.named_parameters()}
    noise = torch.empty(sum(p.numel() for p in w.values())).normal_()
    length = float((noise**2).sum()) ** 0.5
    if length > rho:
        noise = noise * rho / length
    return {n: w[n] + d.view_as(w[n]) for n, d in zip(w, noise.split([p.numel() for p in w.values()]), strict=True)}


def condensed(net, x, y, classes, S, rho, norm, clamp):
    statistics = {name: b.clone() for name, b in net.named_buffers()}
    real = {c: x[y == c] for c in classes}
    velocity, clipped = None, 0
    net.train(norm == "joint")
    for _ in range(STEPS):
        S = (S.clamp(-1, 1) if clamp == "step" else S).detach().requires_grad_()
        at = perturbed(net, rho) | {name: b.clone() for name, b in statistics.items()}
        drawn = list(real.values())
        if any(len(of_c) > B for of_c in drawn):
            r = torch.rand(sum(len(of_c) for of_c in drawn)).split([len(of_c) for of_c in drawn])
            drawn = [of_c[order.argsort()[:B]] for of_c, order in zip(drawn, r, strict=True)]

        def both(images, at=at):  # embeddings and logits
            weights = {name.removeprefix("encoder."): t for name, t in at.items() if name.startswith("encoder.")}
            e = functional_call(net.encoder, weights, (images,))
            return e, e @ at["classifier.weight"].T + at["classifier.bias"]

        loss = torch.zeros(())
        for of_real, of_syn in zip(both(torch.cat(drawn)), both(S.flatten(0, 1)), strict=True):
            of_real = of_real.detach().split([len(d) for d in drawn])
            for a, b in zip(of_real, of_syn.split(IPC), strict=True):
                loss = loss + ((a.mean(0) - b.mean(0)) ** 2).sum()
        (g,) = torch.autograd.grad(loss, S)
        length = SIGMA * float((g**2).sum()) ** 0.5  # of the gradient in units of sigma
        if length > CLIP:
            g, clipped = g * CLIP / length, clipped + 1
        velocity = g if velocity is None else MOMENTUM * velocity + g
        S = S.detach() - ETA_S * SIGMA**2 * velocity
    return S, clipped


@pytest.mark.parametrize(
    ("rho", "norm", "clamp", "restart"),
    [(5.0, "frozen", "step", True), (1000.0, "joint", "end", False), (5.0, "frozen", "none", False)],
)
def test_two_rounds(rho, norm, clamp, restart, tmp_path):
    """At radius 5 the noise of some 14,000 weights is cut; at 1,000 it is not."""
    values = {
        "IPC": IPC, "steps": STEPS, "B": B, "averaged": AVERAGED, "least": LEAST, "eta_S": ETA_S, "sigma_x": SIGMA,
        "E": E, "B_w": B_W, "eta_w": ETA_W, "rho": rho, "clip": CLIP, "norm": norm, "clamp": clamp, "restart": restart,
    }  # fmt: skip
    ran = played("feddm", tmp_path, rounds=2, model="cnn_bn", aux=0.6, set=values)
    held = {k: [c for c in range(10) if (y == c).sum() >= LEAST] for k, (_, y) in ran.rows.items()}
    assert len({len(y) for _, y in ran.rows.values()}) == 3, "clients of unequal size"
    w, kept, clips = ran.states[0].w, {}, 0
    with double("feddm"):
        for t in (1, 2):
            images, labels = [], []
            for k, (x, y) in ran.rows.items():
                close(w, ran.down(t)[k].w, f"round {t}: what client {k} is sent")
                net = ran.net(w)
                with drawing(f"client {k}", t, 0):
                    S = kept[k] if k in kept and not restart else begun(x, y, held[k])
                    S, clipped = condensed(net, x, y, held[k], S, rho, norm, clamp)
                kept[k], clips = S.clamp(-1, 1) if clamp == "step" else S, clips + clipped
                if clamp != "none":
                    S = (((S.clamp(-1, 1) + 1) * 127.5).round() / 127.5) - 1  # 8 bits a pixel
                close(dict(zip(held[k], S, strict=True)), ran.up(t)[k].S, f"round {t}: S of client {k}")
                images.append(S.flatten(0, 1))
                labels += [c for c in held[k] for _ in range(IPC)]
            S, y = torch.cat(images), torch.tensor(labels)
            net, order, velocity = ran.net(w), rng("server", "fit 1", t), None
            for _ in range(E):
                for b in epoch(order, len(S), B_W):
                    g = torch.autograd.grad(F.cross_entropy(net(S[b]), y[b]), list(net.parameters()))
                    velocity = g if velocity is None else [MOMENTUM * v + d for v, d in zip(velocity, g, strict=True)]
                    with torch.no_grad():
                        for p, v in zip(net.parameters(), velocity, strict=True):
                            p -= ETA_W * v
            w = dict(net.state_dict())
            close(w, ran.states[t].w, f"the model after round {t}")
    assert clips, "some gradient is longer than the clip"
