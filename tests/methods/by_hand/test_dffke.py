"""Three rounds of DFFKE by hand: "Aggregation-Free Heterogeneous Federated Learning with Data-Free Knowledge Exchange",
Algorithm 1 and Eqs. 9-14, in both directions of the KL; two architectures, clients that sit out rounds, two held.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from by_hand import close, drawing, epoch, played, rng
from torch import nn
from torch.nn import functional as F

from fedaudit.rng import generator

ETA, B, E_LOCAL, H, W = 1e-3, 40, 2, 12, 3
T_TRAN, B_TRAN, T_DEC, B_DEC, T_FKE, R = 2, 50, 2, 60, 2, 2
NUMBERS = {
    "eta": ETA, "B": B, "tau": "off", "E_local": E_LOCAL, "h": H, "w_Dec": W, "T_Tran": T_TRAN, "B_Tran": B_TRAN,
    "T_Dec": T_DEC, "B_Dec": B_DEC, "T_FKE": T_FKE, "R": R,
}  # fmt: skip
LITERAL = {"kl": "student-first", "alternate": "step"}
OTHER = {"kl": "teacher-first", "alternate": "epoch", "own": True, "statistics": "own", "md": "MSE", "fresh": True}
AUTHORS = {
    "kl": "teacher-first", "alternate": "step", "embed": True, "review": True, "fresh": "decoder",
    "output": "standardised", "mean_x": -0.1, "sigma_x": 0.6, "B_Tran": "client", "decay_Tran": 1e-3, "decay": 1e-2,
    "crop": 1, "jitter": 0.4, "flip": True,
}  # fmt: skip
BY_PEER = {**AUTHORS, "alike": True, "rests": True, "batches": "peer"}
BY_AUTHOR = {
    **BY_PEER, "embed": "answered", "dock": True, "reviewed": 2, "batches_Dec": "client", "answer_Dec": True,
    "md": "inverse-CE", "md_of": "exchanged", "B_Dec": 20,
}  # fmt: skip
ARCHS = ["cnn_bn", "mlp", "cnn_bn", "mlp"]


class Scaled(nn.Module):
    """Standardised images in the units of the real ones."""

    def forward(self, x):
        return x * AUTHORS["sigma_x"] + AUTHORS["mean_x"]


def decoder(standardised=False):
    """Section 4.1: three layers; images of 8 x 8 begin as 2 x 2. The author's code: unit variance behind them."""
    last = [nn.BatchNorm2d(1, affine=False)] if standardised else []
    more = OrderedDict(units=Scaled()) if standardised else {}
    return nn.Sequential(OrderedDict(
        linear=nn.Linear(H, 2 * W * 2 * 2),
        shape=nn.Unflatten(1, (2 * W, 2, 2)),
        layers=nn.Sequential(
            nn.BatchNorm2d(2 * W), nn.Upsample(scale_factor=2), nn.Conv2d(2 * W, 2 * W, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * W), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * W, W, 3, padding=1, bias=False), nn.BatchNorm2d(W), nn.LeakyReLU(0.2),
            nn.Conv2d(W, 1, 3, padding=1), nn.Tanh(), *last,
        ),
        **more,
    ))  # fmt: skip


def steps(losses, parameters, decay=0.0):
    """Adam over a list of losses, each computed when its turn comes."""
    adam = torch.optim.Adam(parameters, lr=ETA, weight_decay=decay)
    for loss in losses:
        adam.zero_grad()
        loss().backward()
        adam.step()


def augmented(x, u):
    """Brightness, contrast and saturation times a factor in [0.6, 1.4], put back into [0, 1] after each; then a step of
    at most one pixel down and right, and a mirror image every other time. Pixels from outside are black."""
    out = []
    for image, (down, right, mirror, *colours) in zip(x, u.tolist(), strict=True):
        bright, contrast, saturation = (0.6 + 0.8 * number for number in colours)
        light = ((image + 1) / 2 * bright).clamp(0, 1)
        light = (light.mean() + (light - light.mean()) * contrast).clamp(0, 1)
        grey = light.mean(0, keepdim=True)
        seen = (grey + (light - grey) * saturation).clamp(0, 1) * 2 - 1
        h, w = seen.shape[1:]
        made = torch.full_like(seen, -1.0)
        at = [r + int(down * 3) - 1 for r in range(h)]
        of = [(w - 1 - c if mirror < 0.5 else c) + int(right * 3) - 1 for c in range(w)]
        inside = [r for r in range(h) if 0 <= at[r] < h], [c for c in range(w) if 0 <= of[c] < w]
        for r in inside[0]:
            made[:, r, inside[1]] = seen[:, at[r], [of[c] for c in inside[1]]]
        out.append(made)
    return torch.stack(out)


def local_training(net, x, y, order, setting):
    """Line 5, Eq. 9: min CE(f(x; theta_k), y). Each batch's images are moved, mirrored and coloured by numbers that are
    drawn when its turn comes."""
    adam = torch.optim.Adam(net.parameters(), lr=ETA, weight_decay=setting.get("decay", 0.0))
    for _ in range(E_LOCAL):
        for b in epoch(order, len(x), B):
            seen = augmented(x[b], torch.rand(len(b), 6, generator=order)) if "crop" in setting else x[b]
            adam.zero_grad()
            F.cross_entropy(net(seen), y[b]).backward()
            adam.step()


def docking(E, Y, layers, head, order, setting):
    """Line 9, Eq. 11: min sum_k CE(l(z(E_k; theta_k^z); theta^l), Y_k), over rows of all clients mixed."""
    rows = [(k, i) for k in E for i in range(len(E[k]))]
    parameters = [p for layer in [*layers.values(), head] for p in layer.parameters()]
    if setting.get("rests"):  # no other layer has a gradient, so that Adam skips it
        own = [lambda k=k: F.cross_entropy(head(layers[k](E[k])), Y[k]) for _ in range(T_TRAN) for k in E]
        steps(own, parameters, setting["decay_Tran"])
        return

    def loss(b):
        of = {k: [i for owner, i in (rows[j] for j in b.tolist()) if owner == k] for k in E}
        ce = [F.cross_entropy(head(layers[k](E[k][i])), Y[k][i], reduction="none") for k, i in of.items()]
        return torch.cat(ce).mean()  # a layer without rows in b has the gradient 0, and Adam still moves it

    if setting.get("B_Tran") == "client":  # an epoch is one step on all rows of each client
        todo, first = [], 0
        for k in E:
            todo.append(torch.arange(first, first + len(E[k])))
            first += len(E[k])
        for _ in range(T_TRAN):
            for k in E:
                torch.randperm(len(E[k]), generator=order)
        todo = todo * T_TRAN
    else:
        todo = [b for _ in range(T_TRAN) for b in epoch(order, len(rows), B_TRAN)]
    steps([lambda b=b: loss(b) for b in todo], parameters, setting.get("decay_Tran", 0.0))


def train_decoder_by_client(Dec, E, h, nets, peers, layers, order):
    """Line 12 by the author's code. A batch is of one client in turn, the first of a new shuffle. Beside the MSE there
    are the KL from the answer to the record to that to its image, and the mean of -p log(1 - q) for q of the others."""
    frozen, before = ({k: copy.deepcopy(net).eval() for k, net in of.items()} for of in (nets, peers))
    fixed = {k: copy.deepcopy(layer) for k, layer in layers.items()}
    size = BY_AUTHOR["B_Dec"]

    def loss(k, b):
        x, e = Dec(E[k][b]), E[k][b]
        there = frozen[k].encode(x)
        p = frozen[k].classify(h[k][b]).softmax(1).detach()
        far = ((fixed[k](there) - e) ** 2).mean()
        kl = (p * (p.log() - frozen[k].classify(there).log_softmax(1))).sum(1).mean()
        inverse = [-(p * (1 - before[i](x).softmax(1) + 1e-9).log()).sum(1).mean() for i in before if i != k]
        return far + kl + sum(inverse) / len(inverse)

    turns = T_DEC * max(len(e) // size for e in E.values())
    todo = [(k, torch.randperm(len(E[k]), generator=order)[:size]) for _ in range(turns) for k in E]
    todo = [(k, b.sort().values) for k, b in todo]
    Dec.train()
    steps([lambda k=k, b=b: loss(k, b) for k, b in todo], Dec.parameters())


def train_decoder(Dec, E, nets, layers, order, md):
    """Line 12, Eq. 12: min sum_k MSE(z(h(Dec(E~_k); theta_k^h); theta_k^z), E~_k), encoders and docking layers frozen.
    With `md` also Eq. 4 by Appendix E: minus the mean over peers of the mean squared gap of probabilities."""
    frozen = {k: copy.deepcopy(net).eval() for k, net in nets.items()}
    fixed = {k: copy.deepcopy(layer) for k, layer in layers.items()}
    rows = [(k, i) for k in E for i in range(len(E[k]))]

    def loss(b):
        pairs = [rows[j] for j in sorted(b.tolist())]
        images = Dec(torch.stack([E[k][i] for k, i in pairs]))
        values = []
        for k in E:  # what is frozen takes each image by itself
            mine = images[[owner == k for owner, _ in pairs]]
            there = E[k][[i for owner, i in pairs if owner == k]]
            value = ((fixed[k](frozen[k].encode(mine)) - there) ** 2).mean(1)
            if md:
                p = frozen[k](mine).softmax(1)
                gaps = [((p - frozen[i](mine).softmax(1)) ** 2).mean(1) for i in frozen if i != k]
                value = value - torch.stack(gaps).mean(0)
            values.append(value)
        return torch.cat(values).mean()

    Dec.train()
    todo = [b for _ in range(T_DEC) for b in epoch(order, len(rows), B_DEC)]
    steps([lambda b=b: loss(b) for b in todo], Dec.parameters())


def images(state, e):
    """D^ = Dec(E~), by the decoder of that round, in evaluation mode."""
    Dec = decoder("layers.11.running_mean" in state).double()
    Dec.load_state_dict(state)
    with torch.no_grad():
        return Dec.eval()(e)


def divergence(kl, student, teacher):
    """Eqs. 13-14: KL[f(x; theta_k) || Y^_i]. Eq. 8: KL[Y^_i || f(x; theta_k)]."""
    p, q = (student, teacher) if kl == "student-first" else (teacher, student)
    p, q = p.softmax(1), q.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def exchange(net, D, B_t, order, setting, own=None, z=None, past_of=(), of=()):
    """Lines 18-20: T_FKE epochs, Eq. 13 on D^_i and Eq. 14 on B^t_i taking turns, one Adam. By the author's code, own
    records are a third part, all three spread evenly over the epoch, and docked embeddings are drawn together. By peer:
    one batch of the own records, one of each peer's past images, one of each peer's current ones, and again. With two
    times as many past images, those of a peer are gone through once while all else is gone through twice."""
    by_peer = setting.get("batches") == "peer"
    peers = [[row for i, row in zip(past_of, B_t, strict=True) if i == peer] for peer in dict.fromkeys(sorted(past_of))]
    found = [*peers, *([row] for row in D)] if by_peer else [D, B_t]
    parts = [[torch.cat(t) for t in zip(*part, strict=True)] for part in found if part]
    losses = []

    def loss(x, y, e=None):
        if e is None and y.dim() == 1:  # own records with their labels
            return F.cross_entropy(net(x), y)
        h = net.encode(x)
        far = ((z(h) - e) ** 2).mean() if setting.get("embed") else 0
        return divergence(setting["kl"], net.classify(h), y) + far

    if setting.get("review"):
        parts.insert(0 if by_peer else len(parts), own)
    if setting.get("reviewed"):  # all epochs in one, part by part
        now = {peer: len(row[0]) for peer, row in zip(sorted(of), D, strict=True)}
        past = [
            (sum(len(row[0]) for row in rows), now[peer])
            for peer, rows in zip(sorted(set(past_of)), peers, strict=True)
        ]
        assert all(m in (n, 2 * n) for m, n in past)
        passes = [T_FKE, *(1 if m == 2 * n else 2 for m, n in past), *[T_FKE] * len(D)]
        batches = [
            [tuple(t[b] for t in part) for _ in range(often) for b in epoch(order, len(part[0]), B)]
            for part, often in zip(parts, passes, strict=True)
        ]
        turns = [part[i] for i in range(max(map(len, batches))) for part in batches if i < len(part)]
        losses += [lambda rows=rows: loss(*rows) for rows in turns]
    for _ in range(0 if setting.get("reviewed") else T_FKE):
        batches = [[tuple(t[b] for t in part) for b in epoch(order, len(part[0]), B)] for part in parts]
        if by_peer:
            turns = [part[i] for i in range(max(map(len, batches))) for part in batches if i < len(part)]
        elif setting.get("review"):
            at = [((j + 0.5) / len(part), i, j) for i, part in enumerate(batches) for j in range(len(part))]
            turns = [batches[i][j] for _, i, j in sorted(at)]
        elif setting["alternate"] == "step" and len(batches) == 2:
            first, second = batches
            turns = [pair for i in range(max(map(len, batches))) for pair in (*first[i : i + 1], *second[i : i + 1])]
        else:
            turns = [pair for part in batches for pair in part]
        losses += [lambda rows=rows: loss(*rows) for rows in turns]
    net.train()
    if setting.get("statistics") == "own":
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
    both = [*net.parameters(), *(z.parameters() if setting.get("dock") else ())]
    for p in both:
        p.grad = None

    def stays(
        loss,
    ):  # the docking layer's gradient is 0 where a step has none for it, so that Adam moves it all the same
        value = loss()
        return value + 0 * sum(p.sum() for p in z.parameters()) if setting.get("dock") else value

    steps([lambda loss=loss: stays(loss) for loss in losses], both, setting.get("decay", 0.0))


def sample(seed, i, past, n, times=1):
    """B^t_i: n of the rows of client i in the rounds of `past`, by round, from the seed that all were sent."""
    rounds = sorted(past)
    if not rounds:
        return {}
    drawn = torch.randperm(n * len(rounds), generator=generator(seed, i, "rounds"))[: times * n] // n
    counts = {s: int((drawn == j).sum()) for j, s in enumerate(rounds)}
    return {s: torch.randperm(n, generator=generator(seed, i, s))[:m] for s, m in counts.items() if m}


OTHER_READING, MIXED, ONE_PEER = (
    pytest.param(reading, marks=pytest.mark.slow) for reading in (OTHER, AUTHORS, BY_PEER)
)


@pytest.mark.parametrize(
    "reading",
    [LITERAL, OTHER_READING, BY_AUTHOR, MIXED, ONE_PEER],
    ids=["literal", "other", "authors", "mixed", "by peer"],
)
def test_three_rounds(reading, tmp_path):
    setting = {**NUMBERS, **reading}
    ran = played(
        "dffke",
        tmp_path,
        rounds=3,
        clients=4,
        participation=0.75,
        model="cnn_bn:1,mlp:1,cnn_bn:1,mlp:1",
        aux=0.7,
        set=setting,
        partition="dirichlet:0.3",
    )
    assert ran.world.archs == ARCHS
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    assert len(set(n.values())) > 1, "clients of unequal size"
    nets = {k: ran.net(ran.first[k], ARCHS[k]) for k in n}
    Dec_state = ran.states[0].Dec
    z = {}
    memory = {k: {} for k in n}  # round: (Dec, E~)
    last = {}  # models as the last exchange left them
    for t in (1, 2, 3):
        present = sorted(ran.down(t))
        E, Y = {}, {}
        for k in present:  # lines 4-6
            x, y = ran.rows[k]
            nets[k].train()
            local_training(nets[k], x, y, rng(f"client {k}", "fit 1", t), setting)
            nets[k].eval()
            with torch.no_grad():
                E[k], Y[k] = nets[k].encode(x), y
            shared = ran.sent("Shared", t)[k]
            close(nets[k].state_dict(), shared.theta, f"round {t}: theta_{k}")
            close({"E": E[k], "Y": Y[k]}, {"E": shared.E, "Y": shared.Y}, f"round {t}, client {k}")

        with drawing("server", t):  # lines 8-9
            torch.set_default_dtype(torch.float64)
            layers = {k: nn.Linear(E[k].shape[1], H) for k in present}
            head = nn.Linear(H, 10)
            Dec = decoder(setting.get("output") == "standardised")
            torch.set_default_dtype(torch.float32)
        if setting.get("alike"):  # all of one width
            for k in present:
                alike = next(i for i in present if E[i].shape[1] == E[k].shape[1])
                layers[k].load_state_dict(layers[alike].state_dict())
        if not setting.get("fresh"):
            Dec.load_state_dict(Dec_state)
        if setting.get("fresh") is not True:
            for k in present:
                if k in z:
                    layers[k].load_state_dict(z[k])
        docking(E, Y, layers, head, rng("server", "fit 1", t), setting)
        z |= {k: {name: p.detach().clone() for name, p in layers[k].named_parameters()} for k in present}
        with torch.no_grad():
            E_ = {k: layers[k](E[k]) for k in present}  # line 10, Eq. 10
        here = {k: nets[k] for k in present}
        if setting.get("batches_Dec") == "client":
            peers = {k: last.get(k, nets[k]) for k in present}
            assert t == 1 or any(k in last for k in present)
            train_decoder_by_client(Dec, E_, E, here, peers, layers, rng("server", "Dec", t))
        else:
            train_decoder(Dec, E_, here, layers, rng("server", "Dec", t), setting.get("md"))  # line 12
        Dec_state = {name: p.clone() for name, p in Dec.state_dict().items()}
        for k in present:  # line 13
            unified = ran.sent("UnifiedDocked" if setting.get("embed") else "Unified", t)[k]
            if setting.get("embed"):
                close(z[k], unified.z, f"round {t}: the docking layer of client {k}")
            close(Dec_state, unified.Dec, f"round {t}: Dec")
            close({str(i): e for i, e in E_.items()}, {str(i): e for i, e in unified.E.items()}, f"round {t}: E~")
        close(Dec_state, ran.states[t].Dec, f"the decoder after round {t}")

        seed = unified.seed
        answers, rows, near = {}, {}, {}
        for k in present:  # lines 16-17
            rows[k] = sample(seed, k, memory[k], n[k], setting.get("reviewed", 1))
            sets = {t: images(Dec_state, E_[k])}
            sets |= {s: images(memory[k][s][0], memory[k][s][1][k][chosen]) for s, chosen in rows[k].items()}
            with torch.no_grad():
                answers[k] = {s: nets[k](x) for s, x in sets.items()}
            answered = ran.sent("AnsweredDocked" if setting.get("embed") == "answered" else "Answered", t)[k]
            close({str(s): y for s, y in answers[k].items()}, {str(s): y for s, y in answered.Y.items()}, f"Y^_{k}")
            if setting.get("embed") == "answered":
                with torch.no_grad():
                    near[k] = {s: layers[k](nets[k].encode(x)) for s, x in sets.items()}
                close({str(s): e for s, e in near[k].items()}, {str(s): e for s, e in answered.Z.items()}, f"Z_{k}")
        if t == 3:
            assert any(len(answers[k]) == 3 for k in present), "somebody reviews two rounds"
            held = {tuple(memory[k]) for k in present}
            assert len(held) > 1, "they hold different rounds"
        for k in present:
            told = ran.sent("PeersDocked" if near else "Peers", t)[k]
            peers = told.Y
            assert set(peers) == set(present) - {k}
            for i in near.keys() - {k}:
                close({str(s): e for s, e in near[i].items()}, {str(s): e for s, e in told.Z[i].items()}, f"Z to {k}")
            for i in peers:
                close({str(s): y for s, y in answers[i].items()}, {str(s): y for s, y in peers[i].items()}, f"to {k}")

        for k in present:  # lines 18-21
            teachers = [i for i in present if i != k] + ([k] if setting.get("own") else [])

            def decoded(Dec, e, y, near):
                to = [e if near is None else near] if setting.get("embed") else []
                return images(Dec, e), y, *to

            D = [decoded(Dec_state, E_[i], answers[i][t], near.get(i, {}).get(t)) for i in teachers]  # Eq. 13
            B_t = [  # Eq. 14
                decoded(memory[k][s][0], memory[k][s][1][i][rows[i][s]], answers[i][s], near.get(i, {}).get(s))
                for s in sorted(memory[k])
                for i in present
                if i != k and s in rows[i]
            ]
            past_of = [i for s in sorted(memory[k]) for i in present if i != k and s in rows[i]]
            layer = copy.deepcopy(layers[k]).requires_grad_(bool(setting.get("dock")))
            order = rng(f"client {k}", "fit 1", t, ask=2)
            exchange(nets[k], D, B_t, order, setting, ran.rows[k], layer, past_of, teachers)
            close(nets[k].state_dict(), ran.model(k, t), f"round {t}: client {k} after the exchange")
            if setting.get("dock"):
                z[k] = {name: p.detach().clone() for name, p in layer.named_parameters()}
                last[k] = copy.deepcopy(nets[k])
                back = ran.sent("ExchangedModel", t)[k]
                close(z[k], back.z, f"round {t}: the docking layer of client {k} after the exchange")
                close(last[k].state_dict(), back.theta, f"round {t}: client {k}, sent after the exchange")
            memory[k][t] = (Dec_state, E_)
            memory[k] = {s: memory[k][s] for s in sorted(memory[k])[-R:]}
            kept = {s: past.read() for s, past in ran.memory(k, t)["B"].items()}
            assert list(kept) == list(memory[k])
            for s in kept:
                close(memory[k][s][0], kept[s]["Dec"], f"client {k}'s buffer, round {s}")
                close({str(i): e for i, e in memory[k][s][1].items()}, {str(i): e for i, e in kept[s]["E"].items()})
