"""FKE, federated knowledge exchange on a public transfer set: Eq. 8 of "Aggregation-Free Heterogeneous Federated
Learning with Data-Free Knowledge Exchange" (under review). `dffke` is the same without public data.

Everybody is teacher and student at once: a round is local training (Eq. 9), logits of every client on the transfer
set, and a pull of each client's model towards everybody else's logits (Eq. 8).

Contradicted in the paper:

- Eq. 8 has the teacher first in the KL, Eqs. 13-14 (DFFKE) the student: `kl`, here `teacher-first`. With public data
  "the rest of the protocol would remain unchanged" (Section 3.2), which has a buffer; Eq. 8, which defines FKE, has
  none, and is followed.

The paper leaves these points open, and we chose:

- The KL has no temperature: it is 1. Eq. 8 sums over clients; one row has all peers' logits, so the peers are summed.
- "Until converge" (Section 4.1) is a training accuracy of `tau` (Appendix F), after `E_local` epochs at most: 100,
  where Table 9 has 80. `tau = "off"` trains exactly so many, as DP-SGD demands. `stops` says which accuracy counts.
  `after`: that after an epoch, on the records as they are; one epoch is trained in any case. `running`: that within an
  epoch, on the batches as they are trained on; a client that has it before is not trained.
- `statistics` says what batch norm does while a client learns from its peers. `synthetic`, as in any training, leaves
  running statistics of the transfer set behind. `own` trains with those of the client's own records and does not change
  them.
- "The transfer dataset assigned to client i", D^_i, is the whole public set for everybody. A buffer would hold that set
  again.
- Limited collaboration (Table 6) is `pi`: the first pi K clients take part at all, the others are never asked. Whose
  accuracy that table averages is not said; the run record lists every client's.
- A model that is tested "after each round" (Section 4.1) is tested as Algorithm 1 leaves it, just drawn towards its
  peers. Both points of a round are evaluated, `trained` (after Eq. 9) and `exchanged`; `deploy` says which one the
  client deploys.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import (
    NUMBER,
    Augment,
    Client,
    Cohort,
    Down,
    Method,
    Plan,
    Record,
    Running,
    Server,
    Size,
    Up,
    adam,
    ce,
    in_chunks,
    kl,
    load,
    private,
    register,
    relay,
    state_of,
)  # fmt: skip
from fedaudit.methods.shared._local_training import views
from fedaudit.training.augment import Colours
from fedaudit.training.fit import Until

Direction = Literal["student-first", "teacher-first"]
Statistics = Literal["synthetic", "own"]
Traffic = dict[tuple[str, str], Size | int]


# --- the losses: one value per row ------------------------------------------------------------------------------------


def student_first(f: Any, x: Tensor, ys: Tensor) -> Tensor:
    """Return sum_i KL[f(x; theta_k) || Y^_i], Eqs. 13-14 as printed. `ys` is row x peer x class, with the peers that
    answered on x.
    """
    return kl(f(x)[:, None], ys).sum(1)


def teacher_first(f: Any, x: Tensor, ys: Tensor) -> Tensor:
    """Return sum_i KL[Y^_i || f(x; theta_k)], Eq. 8."""
    return kl(ys, f(x)[:, None]).sum(1)


def reached(f: Any, x: Tensor, y: Tensor, tau: float) -> bool:
    """Return whether the training accuracy has come to the goal tau (Appendix F)."""
    hits = [(f(xs).argmax(1) == ys).sum() for xs, ys in zip(x.split(1000), y.split(1000), strict=True)]
    return bool(torch.stack(hits).sum() >= tau * len(y))


def ce_and_hits(f: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return two columns, the cross-entropy and whether the label is right, as a running accuracy needs them."""
    out = f(x)
    losses = cross_entropy(out, y, reduction="none")
    return torch.stack([losses, (out.argmax(1) == y).to(losses.dtype)], 1)


def outputs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return in_chunks(function, x, 1000)


# --- the protocol -----------------------------------------------------------------------------------------------------


class Begin(Down):
    pass


class Known(Up):
    Y: Tensor = private("logits", via="model", unit="client")


class Others(Down):
    Y: dict[int, Tensor] = relay("logits", by="client")


class Exchanged(Up):
    pass


class Nothing(Record):
    pass


@register("fke", tables="DFFKE")
class FKE(Method):
    """Learn from each other's answers on a public transfer set. A client sends logits."""

    single_replies: ClassVar[str] = "what a client shares is passed on to its peers by name"

    quick: ClassVar = {"tau": "off", "E_local": 1, "B": 32}
    on_digits: ClassVar = {"E_local": 10, "B": 32}
    needs_public: ClassVar = True

    tau: Annotated[float, Field(gt=0, le=1)] | Literal["off"] = 0.98  # training accuracy at which local training stops
    stops: Literal["after", "running"] = "after"  # local training: by the accuracy after an epoch, or that within it
    E_local: int = Field(100, ge=1)  # epochs of local training, at most; with tau = "off" exactly
    eta: float = Field(1e-3, gt=0)  # learning rate of Adam, everywhere
    B: int = Field(100, ge=1)  # batch size
    T_FKE: int = Field(2, ge=0)  # epochs of knowledge exchange
    kl: Direction = "teacher-first"
    statistics: Statistics = "synthetic"  # of batch norm in the exchange
    decay: float = Field(0.0, ge=0)  # weight decay of the clients' Adam
    crop: int = Field(0, ge=0)  # local training: images are moved by so many pixels at most
    jitter: float = Field(0.0, ge=0, le=1)  # and brightness, contrast and saturation changed by such a share at most
    colours: Colours = "plain"  # before images are moved, in one order; or after that, in any order, as torchvision
    flip: bool = False  # and mirrored every other time
    pi: float = Field(1.0, gt=0, le=1)  # share of the clients that collaborate at all (Table 6)
    deploy: Literal["exchanged", "trained"] = "exchanged"  # theta_k as of the round's end, or as of Eq. 9

    def collaborates(self, k: int, K: int) -> bool:
        return self.pi == 1 or k < max(1, round(self.pi * K))

    def init(self, server: Server) -> Record:
        return Nothing()

    def round(self, s: Any, server: Server, cohort: Cohort) -> Record:
        members = [k for k in cohort.ids if self.collaborates(k, server.clients)]
        known = cohort.ask(self.share, dict.fromkeys(members, Begin()))
        cohort.ask(self.exchange, {k: Others({i: r.Y for i, r in known.items() if i != k}) for k in known})
        return s

    # --- on client k ---

    def share(self, client: Client, msg: Begin) -> Known:
        self.train(client)
        x, _ = client.public
        return Known(outputs(client.model, x))  # f(D^_k; theta_k)

    def train(self, client: Client) -> None:
        loss, until = self.stopping
        opt = adam(self.eta, weight_decay=self.decay)
        client.fit(loss, epochs=self.E_local, batch=self.B, opt=opt, until=until, augment=self.augment)  # Eq. 9

    @property
    def stopping(self) -> tuple[Callable[..., Tensor], Until | None]:
        """Return the loss of local training, and what ends it before E_local epochs; None without."""
        if self.tau == "off":
            return ce, None
        if self.stops == "running":
            return ce_and_hits, Running(self.tau)
        return ce, functools.partial(reached, tau=self.tau)

    @property
    def augment(self) -> Augment | None:
        """Return the augmentation of local training; None without."""
        return views(self.crop, self.flip, self.jitter, self.colours)

    def exchange(self, client: Client, msg: Any) -> Exchanged:
        self.mark_trained(client)
        if msg.Y and self.T_FKE:
            x, _ = client.public
            self.learn(client, (x, torch.stack(list(msg.Y.values()), 1)))  # Eq. 8
        return Exchanged()

    def learn(self, client: Client, rows: tuple[Tensor, Tensor], **options: Any) -> None:
        """Train for T_FKE epochs on images and the peers' logits on them, with one Adam."""
        loss = {"student-first": student_first, "teacher-first": teacher_first}[self.kl]
        self.teach(client, loss, rows, **options)

    def teach(self, client: Client, loss: Callable[..., Tensor], rows: tuple[Tensor, ...], **options: Any) -> None:
        norms: Any = {"synthetic": "batch", "own": "running"}[self.statistics]
        opt = adam(self.eta, weight_decay=self.decay)
        client.fit(loss, rows, batch=self.B, opt=opt, norms=norms, **{"epochs": self.T_FKE, **options})

    # --- the two points of a round ---

    def mark_trained(self, client: Client) -> None:
        """Keep theta_k as Eq. 9 left it.

        The task that trains does not do this, because whatever it remembers has seen the records.
        """
        client.memory["trained"] = state_of(client.model)

    def points(self, client: Client) -> dict[str, nn.Module]:
        """Return the client's models to evaluate. A client that never came to an exchange has one model for both
        points.
        """
        trained = client.memory.get("trained")
        before = client.model if trained is None else load(copy.deepcopy(client.model), trained)
        return {"trained": before, "exchanged": client.model}

    def personal(self, client: Client) -> nn.Module:
        return self.points(client)[self.deploy]

    # --- bytes of a round ---

    def traffic(self, plan: Plan) -> Traffic:
        logits = plan.tensor(plan.public, plan.classes)
        known = self.members(plan, plan.replied(0))
        others = len(known) - 1
        return {
            ("up", "Known.Y"): logits * len(known),
            ("down", "Others.Y"): (logits + NUMBER) * others * len(self.members(plan, plan.asked(1))),
        }

    def members(self, plan: Plan, ids: Iterable[int]) -> list[int]:
        return [k for k in ids if self.collaborates(k, plan.clients)]
