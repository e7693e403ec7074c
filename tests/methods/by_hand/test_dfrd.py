"""DFRD, three rounds by hand. From scratch: clients train their own models, label counts give tau and p(y), the
generator and the global model take turns (Eqs. 2-7), and both optimisers go on over the rounds.

On FedAvg, a composition of a host and a distillation: clients start from the global model, the server averages what
they upload and distils it into the average, which keeps its batch-norm statistics; the momentum of the global model
begins anew, because the average has taken its place."""

from __future__ import annotations

import pytest
import torch
from by_hand import close, played, rng
from conditional import Adam, Momentum, apart, ce, dcgan, drawn, images, kl, still, weights
from distilled import by_its_batch, distilled_apart, plain_averages
from narrow import trained

B, ETA = 32, 0.1
SET = {"I": 2, "I_g": 2, "I_d": 2, "B": 12, "d": 6, "width": 4, "eta_g": 0.003, "eta_d": 0.02}
LAM, ALPHA = 0.4, 0.7


AUTHORS = {
    "T": 3.0, "tran": "student-detached", "metric": "ms", "net": "dcgan", "betas": (0.5, 0.99), "momentum": 0.0,
    "decay": 0.1, "optimisers": "turn", "statistics": "batch", "feedback": False, "rows": "counted",
}  # fmt: skip


class Server:
    """What the server keeps: the generator, its average, and the optimisers' state."""

    def __init__(self, G, of=None):
        self.w, self.w_, self.of = weights(G), None, of or {}
        self.renew()

    def renew(self):
        self.opt_G = Adam(SET["eta_g"], self.of.get("betas", (0.9, 0.999)))
        self.opt_f = Momentum(SET["eta_d"], self.of.get("momentum", 0.9), self.of.get("decay", 0.0))

    def images(self, w, h):
        return dcgan(w, h) if self.of.get("net") == "dcgan" else images(w, h, SET["width"])

    def distil(self, f, teachers, n, t, mode, beta_tran=1.0, beta_div=1.0, weighting="dynamic"):
        """Eqs. 2-7. `mode` puts f into the mode in which it learns; `weighting` says where tau weighs."""
        tau, p = n / n.sum(0).clamp_min(1), n.sum(0) / n.sum()  # dynamic weighting and label sampling
        alike = torch.full_like(n, 1 / len(n))
        tau_gen = tau if weighting in ("dynamic", "images") else alike
        tau_md = tau if weighting in ("dynamic", "targets") else alike
        draw = rng("server", "z and y", t)

        def h_of(w, z, y):
            return z * w["E.weight"][y]  # o(z, y) = z x E(y)

        def ensemble(s, y, tau):
            return sum(tau[i][y][:, None] * teacher(s) for i, teacher in enumerate(teachers))

        T = self.of.get("T", 1.0)
        for _ in range(SET["I"]):
            for p_ in f.parameters():
                p_.requires_grad_(False)
            if self.of.get("optimisers") == "turn":
                self.renew()
            f.train(self.of.get("statistics") == "batch")
            for _ in range(SET["I_g"]):
                z, y = drawn(draw, p, SET["d"], SET["B"])
                h = h_of(self.w, z, y)
                s = self.images(self.w, h)
                teacher, student = ensemble(s, y, tau_gen), f(s)
                black = (student.argmax(1) != y) & (teacher.argmax(1) == y)  # epsilon
                L_fid = ce(teacher, y).mean()  # Eq. 2
                detached = self.of.get("tran") == "student-detached"
                gap = kl(student.detach(), teacher, T) if detached else kl(teacher, student, T)
                over = max(int(black.sum()), 1) if self.of.get("rows") == "counted" else len(y)
                L_tran = -(black * gap).sum() / over  # Eq. 3
                L_div = apart(s, h, self.of.get("metric") == "ms")  # Eq. 4
                self.opt_G.step(self.w, L_fid + beta_tran * L_tran + beta_div * L_div)  # Eq. 5
            for p_ in f.parameters():
                p_.requires_grad_(True)
            mode(f)
            for _ in range(SET["I_d"]):
                L_md = torch.zeros(())
                for w, weight in ((self.w, 1.0), (self.w_, ALPHA)):  # Eq. 7
                    if w is None:
                        continue
                    z, y = drawn(draw, p, SET["d"], SET["B"])
                    with torch.no_grad():
                        s = self.images(w, h_of(w, z, y))
                        teacher = ensemble(s, y, tau_md)
                    printed = self.of.get("md") == "student-teacher"
                    L_md = L_md + weight * (kl(f(s), teacher, T) if printed else kl(teacher, f(s), T)).mean()
                self.opt_f.step(f, L_md)
        now = {name: v.detach().clone() for name, v in self.w.items()}
        self.w_ = now if self.w_ is None else {n: LAM * self.w_[n] + (1 - LAM) * now[n] for n in now}  # Eq. 6

    def agrees(self, kept, what):
        close(self.w, {n: kept.G[n] for n in self.w}, f"the generator, {what}")
        close(self.w_, {n: kept.average[n] for n in self.w}, f"its average, {what}")


def counts(ran):
    n = torch.stack([torch.bincount(y, minlength=10) for _, y in ran.rows.values()]).double()
    assert (n == 0).any(), "skewed, or tau is not tested"
    return n


def test_three_rounds_from_scratch(tmp_path):
    """With Eq. 7 as printed; on FedAvg it is KL(teacher, student), the default."""
    values = {**SET, "lam": LAM, "alpha": ALPHA, "beta_div": 1.5, "beta_tran": 2.0, "host": {"B": B, "eta": ETA}}
    values["md"] = "student-teacher"
    ran = played("dfrd", tmp_path / "run", rounds=3, set=values)
    n, own = counts(ran), dict(ran.first)
    server, f = Server(ran.states[0].nets.G, {"md": "student-teacher"}), ran.net(ran.states[0].host.w)
    for t in (1, 2, 3):
        assert ran.order(0, t) == ["Begin", "HowMany"]
        for k, rows in ran.rows.items():
            own[k] = trained(ran.net(own[k]), *rows, k, t, B, ETA)
            close(own[k], ran.sent("Uploaded", t)[k]["w"], f"client {k}, round {t}")
            assert torch.equal(ran.sent("LabelCounts", t)[k]["n"].double(), n[k])
        teachers = [still(ran.net(own[k])) for k in own]
        server.distil(f, teachers, n, t, lambda f: f.train(), beta_tran=2.0, beta_div=1.5)
        server.agrees(ran.states[t].nets, f"round {t}")
        close(f.state_dict(), ran.states[t].host.w, f"the global model, round {t}")


def keeps_statistics(f):
    f.train()
    f.encoder.bn1.eval()
    f.encoder.bn2.eval()


@pytest.mark.parametrize("weighting", ["dynamic", "uniform", "images", "targets"])
def test_two_rounds_on_fedavg(weighting, tmp_path):
    """With tau nowhere, for the generator alone, and for the targets alone; from scratch it is everywhere. One round is
    enough to tell them apart; what goes on from one round to the next is the same for all."""
    rounds = 2 if weighting == "dynamic" else 1
    values = {**SET, "lam": LAM, "alpha": ALPHA, "host": {"B": B, "eta": ETA}}
    values |= {} if weighting == "dynamic" else {"weighting": weighting}  # dynamic is the default
    ran = played("fedavg+dfrd", tmp_path / "run", rounds=rounds, model="cnn_bn", set=values)
    n = counts(ran)
    share = n.sum(1) / n.sum()
    server, w = Server(ran.states[0].nets.G), dict(ran.states[0].host.w)
    for t in range(1, rounds + 1):
        assert ran.order(0, t) == ["Global", "HowMany"]
        up = {}
        for k, rows in ran.rows.items():
            close(w, ran.sent("Global", t)[k]["w"], f"to client {k}")
            up[k] = trained(ran.net(w), *rows, k, t, B, ETA)
            close(up[k], ran.sent("Local", t)[k]["w"], f"from client {k}")
        w = {name: sum(share[k] * up[k][name] for k in up) for name in up[0]}  # n_k / n
        w = {name: v.round().long() if "tracked" in name else v for name, v in w.items()}
        close(w, ran.states[t].before, "the average")
        f = ran.net(w)
        server.opt_f = Momentum(SET["eta_d"], 0.9)
        server.distil(f, [still(ran.net(up[k])) for k in up], n, t, keeps_statistics, weighting=weighting)
        server.agrees(ran.states[t].nets, f"round {t}")
        statistics = {name for name in w if "running" in name}
        assert all(torch.equal(f.state_dict()[name], w[name]) for name in statistics)
        w = dict(f.state_dict())
        close(w, ran.states[t].host.w, "the global model")


def test_two_rounds_on_fedavg_as_the_authors_code_has_it(tmp_path):
    """All settings of the preset: the clients get the plain average, and the distilled model is scored only."""
    values = {**SET, "lam": LAM, "alpha": ALPHA, "host": {"B": B, "eta": ETA}, **AUTHORS}
    ran = played("fedavg+dfrd", tmp_path / "run", rounds=2, model="cnn_bn", set=values)
    n = counts(ran)
    server = Server(ran.states[0].nets.G, AUTHORS)
    for t, f, teachers in plain_averages(ran, 2, B, ETA):
        server.distil(f, teachers, n, t, by_its_batch)
        server.agrees(ran.states[t].nets, f"round {t}")
        distilled_apart(f, ran.states[t])
