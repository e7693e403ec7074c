"""FedAF. Wang et al., "An Aggregation-Free Federated Learning for Tackling Data Heterogeneity", CVPR 2024, Section 4.

Two asks a round: mean logits up and averaged down (Eqs. 5-9), then condensation and training (Eqs. 10-17).

The paper leaves these points open or contradicts itself, and we chose:

- Eqs. 8 and 12 divide by K, but a client has no v_{k,c} of a class it does not hold: the mean is over those that do.
  Appendix C calls V the means of all *other* clients; the equation, which has them all, is followed.
- Eq. 17 read as a recursion would erase w within a few steps: each step interpolates the *received* w with a fresh w~.
  "Randomly sampled" w~ is PyTorch's default initialisation of a layer, for every network (also for
  ResNets, which start otherwise themselves); batch-norm statistics stay those received. u is taken at
  the interpolated weights, v at the received ones.
- u_c and v_c are single vectors. F is the sliced Wasserstein-1 distance of two point masses, the mean |theta . (u - v)|
  over random unit vectors theta (`swd="points"`). `"entries"` takes each vector's entries as samples of a distribution
  on the line, which no longer knows what class an entry belongs to. The number of projections L is not given.
- Eq. 11 makes r_{k,c} from v_{k,c}, which has left the client already: R_k is made from V_k as it was released, and
  costs no more privacy (`soft="released"`). Appendix C's "class-wise mean soft labels", read as means of the records'
  own soft labels, are a second release of the records (`soft="records"`). The temperature tau is not given.
- Eq. 13 takes t_c over all condensed images of a class, in every step (`T_over="all"`); `"batch"` takes those in the
  mini-batch. D_KL of the matrices in Eq. 15 is the sum over the classes, as in Eqs. 4 and 10.
- Eq. 3 takes all records of a class, Section 5.1 a local batch of 256. Here a step takes B records of each class, or
  all of them if there are no more.
- On the server batch norm trains as usual; with `T_over="all"` every step passes the mini-batch and all of S, so that
  the running statistics see both and t_c is at batch statistics of S. Without LGKM they see the mini-batches alone.
- Eq. 10 sums F over all classes; a client sums over those it holds, as it has no u_c of the others.
- The scale of F and of the losses decides what the published weights mean. F is a mean over the L projections
  (`swd_scale="sum"`: their sum, L times as much). Eq. 4 is a sum over the features (`dm_scale`). Eq. 15 is a sum over
  the classes (`lgkm_scale="mean"`: their mean, ten times less, as a "batchmean" gives it). With the published
  lambda_loc and the defaults CDC is 7e-5 of an image's gradient (docs/results/fedaf.md), so that Table 4's 1 to 1.6
  points can hardly come from it. With the other scales it is larger. A test measures all four.
- tau = 2, L = 50 and averages of 10 records are ours: a usual temperature, enough projections for ten logits, and
  enough records that a start resembles none of them.
- The points that FedDM shares (batch norm, clamping, pixel units, starting images, `restart`, augmentation, `least`)
  are in fedaudit/methods/condensation/_condense.py.
- The condensation code of FedAF is not public. The preset `authors` has what its first author's code of the rivals, and
  the authors' code of distribution matching, settle: pixels standardised by the data set's deviations, no clamping and
  no 8 bits, augmentation in those units, drawn for each image on the server. On 28 x 28 pixels their network has 2,048
  features: take `model = "convnet_padded"`. The printed reading stays the default.

`lambda_loc = 0` is Table 4's "w/o CDC", `lambda_glob = 0` its "w/o LGKM". An ablation does not send what it does not
need. Every message of a client shows which classes it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fedaudit import (
    NUMBER,
    Client,
    Cohort,
    Down,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    kl,
    load,
    private,
    register,
    relay,
    sgd,
    state_of,
)
from fedaudit.methods.condensation._condense import (
    Condensing,
    Records,
    Sampled,
    Scale,
    as_the_authors,
    dm,
    gathered,
    in_chunks,
    seen_ce,
)  # fmt: skip
from fedaudit.methods.condensation._siamese import BLACK, Augmentation, Fill, views


class Global(Down):
    w: State


class MeanLogits(Up):
    V: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")  # V_k, by class


class Peers(Down):
    V: dict[int, Tensor] = relay("logits")


class Condensed(Up):
    S: dict[int, Tensor] = private("synthetic_images", via="data", unit="client", dtype="uint8")  # S_k, by class
    R: dict[int, Tensor] = private("soft_labels", via="released", unit="client")  # R_k, made from the V_k that left


class CondensedAnew(Up):
    S: dict[int, Tensor] = private("synthetic_images", via="data", unit="client", dtype="uint8")
    R: dict[int, Tensor] = private("soft_labels", via="data", unit="client", depends="class")  # R_k, from the records


class CondensedFloats(Up):
    """The same with images as float32: without clamping they leave the range of 8 bits."""

    S: dict[int, Tensor] = private("synthetic_images", via="data", unit="client")
    R: dict[int, Tensor] = private("soft_labels", via="released", unit="client")


class CondensedAnewFloats(Up):
    S: dict[int, Tensor] = private("synthetic_images", via="data", unit="client")
    R: dict[int, Tensor] = private("soft_labels", via="data", unit="client", depends="class")


Answer = Condensed | CondensedAnew | CondensedFloats | CondensedAnewFloats


class Trained(Record):
    w: State


def swd_points(u: Tensor, v: Tensor, L: int) -> Tensor:
    """Return sliced W_1 of point masses at u_c and v_c: |theta . (u - v)| for each row c and each of L directions
    theta.
    """
    theta = normalize(torch.randn(L, u.shape[1], device=u.device, dtype=u.dtype), dim=1)
    return ((u - v) @ theta.T).abs()


def swd_entries(u: Tensor, v: Tensor) -> Tensor:
    """Return W_1 of the entries of u_c and v_c as samples on the line, as sorted distances of each row c to average."""
    return (u.sort(1).values - v.sort(1).values).abs()


def mean_by_class(sent: dict[int, dict[int, Tensor]]) -> dict[int, Tensor]:
    """Return Eqs. 8 and 12 over the clients that hold the class."""
    held = sorted({c for of_client in sent.values() for c in of_client})
    return {c: torch.stack([sent[k][c] for k in sorted(sent) if c in sent[k]]).mean(0) for c in held}


def lgkm(z: Tensor, y: Tensor, r: Tensor, held: Tensor, tau: float, scale: Scale = "sum") -> Tensor:
    """Return Eqs. 13 and 15 from the logits z of condensed images of classes y.

    Classes without r_c or without an image count nothing.
    """
    member = (y[:, None] == torch.arange(len(r), device=y.device)).to(z.dtype)
    n = member.sum(0)
    t = member.T @ z / n.clamp(min=1)[:, None] / tau  # Eq. 13, before the softmax
    counts = held * (n > 0)
    both = 0.5 * ((kl(r.log(), t) + kl(t, r.log())) * counts).sum()  # Eq. 15
    return both / counts.sum().clamp(min=1) if scale == "mean" else both


def l_glob(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    S: tuple[Tensor, Tensor] | None,
    r: Tensor,
    held: Tensor,
    tau: float,
    lambda_glob: float,
    scale: Scale = "sum",
    aug: Augmentation = "none",
    fill: Fill = BLACK,
    unit: float = 1.0,
) -> Tensor:
    """Return Eq. 14. The LGKM term is one number, the same on every row."""
    z = f(*views(aug, x, fill=fill, unit=unit))
    matched = lgkm(z, y, r, held, tau, scale) if S is None else lgkm(f(S[0]), S[1], r, held, tau, scale)
    return cross_entropy(z, y, reduction="none") + lambda_glob * matched


def softened(V: dict[int, Tensor], tau: float) -> dict[int, Tensor]:  # R_k (Eq. 11), from the V_k that left
    return {c: (v / tau).softmax(0) for c, v in V.items()}


@register("fedaf", tables="FedAF")
class FedAF(Condensing):
    """Train the server on images that clients condense together.

    A client sends mean logits, synthetic images and soft labels.
    """

    lambda_loc: float = 1e-4  # weight of CDC; 0 leaves it out
    gamma: float = 0.9  # re-sampling: share of the received model
    swd: Literal["points", "entries"] = "points"
    swd_scale: Scale = "mean"
    L: int = 50  # projections
    lambda_glob: float = 0.01  # weight of LGKM; 0 leaves it out
    lgkm_scale: Scale = "sum"
    tau: float = 2.0  # temperature
    soft: Literal["released", "records"] = "released"
    T_over: Literal["all", "batch"] = "all"

    on_digits: ClassVar = {
        "IPC": 10, "steps": 30, "E": 40, "eta_w": 0.02, "lambda_loc": 0.01, "lambda_glob": 1.0,
        "clamp": "step",
    }  # fmt: skip
    quick: ClassVar = {"IPC": 2, "steps": 2, "B": 16, "E": 2, "B_w": 16, "eta_w": 0.05}
    presets: ClassVar = {  # Section 5.1 and Appendix A; `least` as Table 7 has it
        "fashion-mnist": {"eta_S": 0.2, "lambda_loc": 0.001, "lambda_glob": 2.0, "least": 50},
        "cifar10": {"eta_S": 1.0, "lambda_loc": 0.0001, "lambda_glob": 0.01, "least": 50},
        "cifar100": {"eta_S": 0.1, "lambda_loc": 0.0001, "lambda_glob": 0.01, "least": 50},
        "domainnet": {"eta_S": 1.0, "lambda_loc": 0.01, "lambda_glob": 0.1, "IPC": 20, "least": 20},
    }
    # Beside them, what public code of the authors does: `authors` is CIFAR-10's, the others are named after the data.
    presets = {
        **presets,
        "authors": {**presets["cifar10"], **as_the_authors("cifar10")},
        "authors-cifar100": {**presets["cifar100"], **as_the_authors("cifar100")},
        "authors-fashion-mnist": {**presets["fashion-mnist"], **as_the_authors("fashion-mnist")},
    }

    def init(self, server: Server) -> Trained:
        return Trained(state_of(server.model()))

    def round(self, s: Trained, server: Server, cohort: Cohort) -> Trained:  # on the server
        logits: dict[int, Any] = cohort.ask(self.share, Global(s.w))
        V = mean_by_class({k: a.V for k, a in logits.items()}) if self.lambda_loc else {}  # Eqs. 8, 9
        sent: dict[int, Any] = cohort.ask(self.condense, Peers(V))
        S = gathered({k: a.S for k, a in sent.items()})
        w = server.model(state=s.w)
        opt = sgd(self.eta_w, momentum=self.momentum)
        if not self.lambda_glob:
            server.fit(w, seen_ce, S, epochs=self.E, batch=self.B_w, opt=opt, given=self.of_views)
            return Trained(state_of(w))
        r, held = self.soft_targets({k: a.R for k, a in sent.items()}, server.classes, server.device)
        given: dict[str, Any] = {
            "r": r,
            "held": held,
            "tau": self.tau,
            "lambda_glob": self.lambda_glob,
            "scale": self.lgkm_scale,
        }
        given |= {"S": S if self.T_over == "all" else None, **self.of_views}
        server.fit(w, l_glob, S, epochs=self.E, batch=self.B_w, opt=opt, given=given, separable=False)  # Eqs. 13-16
        return Trained(state_of(w))

    def soft_targets(
        self, R: dict[int, dict[int, Tensor]], classes: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return r (class, class), a row for each class, and which classes have one."""
        r = torch.full((classes, classes), 1 / classes, device=device)
        held = torch.zeros(classes, device=device)
        for c, r_c in mean_by_class(R).items():  # Eq. 12
            r[c] = r_c.clamp(min=1e-8) / r_c.clamp(min=1e-8).sum()  # a probability, also after noise or underflow
            held[c] = 1
        return r, held

    def share(self, client: Client, msg: Global) -> MeanLogits:  # on client k: V_k
        load(client.model, msg.w)
        if not self.needs_V:
            return MeanLogits({})
        D = Records(client.x, client.y, self.B, self.least)
        V = client.class_means(in_chunks(client.model.eval(), D.x), "logits", D.y) if D.classes else {}  # Eq. 5
        client.memory["V"] = client.protect(MeanLogits, "V", V)
        return MeanLogits(client.memory["V"])

    @property
    def needs_V(self) -> bool:  # for CDC (Eq. 10), or to make R_k from it
        return bool(self.lambda_loc or (self.lambda_glob and self.soft == "released"))

    @property
    def answer(self) -> type[Answer]:
        if self.lambda_glob and self.soft == "records":
            return CondensedAnewFloats if self.clamp == "none" else CondensedAnew
        return CondensedFloats if self.clamp == "none" else Condensed

    def condense(self, client: Client, msg: Peers) -> Answer:  # on client k: S_k and R_k
        D = Records(client.x, client.y, self.B, self.least)
        S = self.condensed(client, D, msg.V) if D.classes else {}
        R = self.soft_labels(client, D) if self.lambda_glob and D.classes else {}
        return self.answer(S, R)

    def soft_labels(self, client: Client, D: Records) -> dict[int, Tensor]:
        if self.soft == "released":
            return cast(dict[int, Tensor], client.derive(softened, client.memory["V"], tau=self.tau))
        z = in_chunks(client.model.eval(), D.x)
        return client.class_means((z / self.tau).softmax(1), "soft_labels", D.y)

    def condensed(self, client: Client, D: Records, V: dict[int, Tensor]) -> dict[int, Tensor]:
        S = self.begin(client, D)
        w = Sampled(client.model, self.norm)
        common = [c for c in D.classes if c in V]  # of another class nobody sent v_c: it has no part in Eq. 10
        v = torch.stack([V[c] for c in common]) if common else None
        among = None if common == D.classes else torch.tensor([D.classes.index(c) for c in common], device=S.device)

        def l_loc(S: Tensor) -> Tensor:
            f = w.interpolate(self.gamma)  # Eq. 17
            x, x_tilde = self.seen(D.draw(), S.flatten(0, 1))
            mu_real = D.mean(w.real(x))  # Eq. 3
            h = w.encode(x_tilde)
            loss = dm(mu_real, h.unflatten(0, S.shape[:2]).mean(1), self.dm_scale)  # Eqs. 3, 4
            if v is None:
                return loss
            u = f.classify(h).unflatten(0, S.shape[:2]).mean(1)  # Eq. 6
            u = u if among is None else u[among]
            F = swd_points(u, v, self.L) if self.swd == "points" else swd_entries(u, v)
            F = F.mean(1) if self.swd_scale == "mean" else F.sum(1)
            return loss + self.lambda_loc * F.sum()  # Eq. 10

        return self.descend(client, S, D, l_loc)

    def predictor(self, s: Trained, server: Server) -> nn.Module:
        return server.model(state=s.w)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        planned = {k: plan.held(k, self.least) for k in plan.participants}
        everybody = {c for of_client in planned.values() for c in of_client}
        up = self.answer.__name__
        vector = plan.tensor(plan.classes) + NUMBER  # and the class it belongs to
        images = plan.tensor(self.IPC, *plan.shape, size=self.pixel_bytes) + NUMBER

        def classes(field: str, k: int, sent: object) -> int:
            return len(plan.choice(field, k, everybody if field == "Peers.V" else planned[k])) if sent else 0

        V, R = self.needs_V, self.lambda_glob
        return {
            ("down", "Global.w"): plan.state() * len(plan.asked(0)),
            ("up", "MeanLogits.V"): sum(vector * classes("MeanLogits.V", k, V) for k in plan.replied(0)),
            ("down", "Peers.V"): sum(vector * classes("Peers.V", k, self.lambda_loc) for k in plan.asked(1)),
            ("up", f"{up}.S"): sum(images * classes(f"{up}.S", k, True) for k in plan.replied(1)),
            ("up", f"{up}.R"): sum(vector * classes(f"{up}.R", k, R) for k in plan.replied(1)),
        }
