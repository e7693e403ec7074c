"""DFFKE and FKE. "Aggregation-Free Heterogeneous Federated Learning with Data-Free Knowledge Exchange" (under review),
Algorithm 1 and Eqs. 8-14.

What leaves a client: theta_k, E_k, Y_k and logits. The two of Section 4.3 (line 7 of Algorithm 1) are protected by
policies on `embeddings` and `logits`, before they leave (the algorithm shares first and protects then). The sensitivity
of Appendix G is that of an image's output under an edit of one pixel: it is carried out for embeddings; logits are of
synthetic images, which no private pixel is a pixel of, so for them it is refused, and clip=C is what there is. The
pure-noise column of Table 4 is `--privacy embeddings:pure-noise --privacy logits:pure-noise`; theta_k and Y_k travel
even then.

Left open by the paper or contradicted in it, and chosen here:

- Eq. 8 has the teacher first in the KL, Eqs. 13-14 the student. Algorithm 1 cites 13 and 14: `student-first` is the
  default of DFFKE, Eq. 8's `teacher-first` that of FKE, which Eq. 8 defines; `kl` sets it. No temperature is given: 1.
- Sums over clients of CE, MSE and KL of whole collections: every row counts alike, as in the mini-batch epochs that
  the paper trains for; a mean per client would blow up the rows of small clients.
- h = 512: the paper says it of its baselines only; with it the decoder has the 4.4 M parameters that it gives.
- Table 5's "Unlimited, up to 50" is read as a run of 50 rounds, not as a limit of 50.
- The docking layer is written R^h -> R^h while encoders' widths differ: here R^{h_k} -> R^h, with a bias.
- Whether Dec and docking layers go on from round to round: Algorithm 1 requires one Gen and trains it in every round,
  so Dec goes on, and so do the docking layers, whose space it decodes (`fresh`: both are new in each round). Only the
  head is said to be discarded.
- Dec's batches mix all clients, so that its batch norms see in training what they are averaged over.
- Appendix E does not say who the student of L_md is: here every peer of the client whose embedding is decoded, on
  average. MAE and MSE are of probabilities, which the bound 2/n implies. L_fid and L_md add up, KL scaled by 0.1.
- Section 2 defines Y^_k on X_k, Appendix D on D^_k. Eq. 13 compares it with f(D^_k): it is on D^_k.
- How B^t is drawn: |B^t_k| = N_k of client k's past rows, uniform, so that |B^t| = n^ (Appendix D). The server sends a
  seed, by which all draw the same rows. Under partial participation buffers cannot be "synchronized": logits are keyed
  by round, and a student skips the rounds that it does not hold.
- Exchange and review alternate by epochs (Algorithm 1, lines 18-20), not by steps; Adam starts anew in each.
- A cap on local epochs: 100; Table 9 has 80 at most. `tau = "off"` trains exactly so many, as DP-SGD demands.
- The batch of the docking layers' training is not given: 100, as of the others.
- Limited collaboration (Table 6) is `pi`: the first pi K clients take part at all, the others are never asked. Whose
  accuracy that table averages is not said; the run record lists every client's.
- When a client's model is tested "after each round": as Algorithm 1 leaves it, just drawn towards its peers. Local
  accuracy (Table 3) is far lower there than after the next local training; `deploy = "trained"` tests it as Eq. 9 does.
- With public data "the rest of the protocol would remain unchanged" (Section 3.2), which has Eq. 13's direction and a
  buffer; Eq. 8, which defines FKE, has neither, and is followed.
- FKE needs "the transfer dataset assigned to client i", D^_i: here everybody's is the whole public set. A buffer would
  hold that set again, so FKE has none.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit import NUMBER, Down, Method, Record, State, Up, adam, ce, kl, load, private, register, relay, state_of
from fedaudit.methods._buffer import allot, held, pick, remember
from fedaudit.methods._decoder import Decoder, decode, decoder_size
from fedaudit.methods._docking import Docking, z
from fedaudit.training import models  # fmt: skip
from fedaudit.training.fit import batches

Direction = Literal["student-first", "teacher-first"]
Discrepancy = Literal["none", "KL", "MAE", "MSE"]


# --- the losses: one value per row ------------------------------------------------------------------------------------


def student_first(f: Any, x: Tensor, ys: Tensor) -> Tensor:
    """sum_i KL[f(x; theta_k) || Y^_i], Eqs. 13-14. `ys` is row x peer x class, with the peers that answered on x."""
    return kl(f(x)[:, None], ys).sum(1)


def teacher_first(f: Any, x: Tensor, ys: Tensor) -> Tensor:
    """sum_i KL[Y^_i || f(x; theta_k)], Eq. 8."""
    return kl(ys, f(x)[:, None]).sum(1)


def alignment(f: Any, e: Tensor, k: Tensor, y: Tensor) -> Tensor:
    """CE(l(z(e; theta_k^z); theta_global^l), y), Eq. 11."""
    return F.cross_entropy(f(e, k), y, reduction="none")


def fidelity(pred: Tensor, e: Tensor) -> Tensor:
    """MSE(z(h(Dec(e); theta_k^h); theta_k^z), e), Eq. 12."""
    return (pred - e).square().mean(1)


def discrepancy(choice: Discrepancy, teacher: Tensor, student: Tensor) -> Tensor:
    """L_md of Eq. 4 and Appendix E: minus the gap of two models' logits. MAE and MSE lie in [-2/n, 0]."""
    if choice == "KL":
        return -0.1 * kl(teacher, student)  # unscaled it diverges, says Appendix E
    gap = teacher.softmax(-1) - student.softmax(-1)
    return -(gap.abs() if choice == "MAE" else gap.square()).mean(-1)


def reached(f: Any, x: Tensor, y: Tensor, tau: float) -> bool:
    """Whether the training accuracy has come to the goal tau (Appendix F)."""
    hits = [(f(xs).argmax(1) == ys).sum() for xs, ys in zip(x.split(1000), y.split(1000), strict=True)]
    return bool(torch.stack(hits).sum() >= tau * len(y))


@torch.no_grad()
def outputs(function: Any, x: Tensor, batch: int = 1000) -> Tensor:
    return torch.cat([function(part) for part in x.split(batch)])


# --- FKE: exchange on a public transfer set ---------------------------------------------------------------------------


class Begin(Down):
    pass


class Known(Up):
    Y: Tensor = private("logits", via="model", unit="client")


class Others(Down):
    Y: dict[int, Tensor] = relay("logits")


class Exchanged(Up):
    pass


class Nothing(Record):
    pass


@register("fke")
class FKE(Method):
    quick: ClassVar = {"tau": "off", "E_local": 1, "B": 32}

    tau: float | Literal["off"] = 0.98  # local training goes on to this training accuracy; off: for E_local epochs
    E_local: int = Field(100, ge=1)  # epochs of local training, at most
    eta: float = 1e-3  # learning rate of Adam, everywhere
    B: int = Field(100, ge=1)  # batch size
    T_FKE: int = Field(2, ge=0)  # epochs of knowledge exchange
    kl: Direction = "teacher-first"
    pi: float = Field(1.0, gt=0, le=1)  # share of the clients that collaborate at all (Table 6)
    deploy: Literal["exchanged", "trained"] = "exchanged"  # what is evaluated: theta_k as of the round's end, or Eq. 9

    def collaborates(self, k: int, K: int) -> bool:
        return self.pi == 1 or k < max(1, round(self.pi * K))

    def init(self, server):
        return Nothing()

    def round(self, s, server, cohort):
        members = [k for k in cohort.ids if self.collaborates(k, server.clients)]
        known = cohort.ask(self.share, dict.fromkeys(members, Begin()))
        others = {k: Others({i: r.Y for i, r in known.items() if i != k}) for k in known}
        cohort.ask(self.exchange, others)
        return s

    def share(self, client, msg):
        self.train(client)
        x, _ = client.public
        return Known(outputs(client.model, x))  # f(D^_k; theta_k)

    def train(self, client):
        until = None if self.tau == "off" else functools.partial(reached, tau=self.tau)
        client.fit(ce, epochs=self.E_local, batch=self.B, opt=adam(self.eta), until=until)  # Eq. 9
        if self.deploy == "trained":
            client.memory["trained"] = state_of(client.model)

    def exchange(self, client, msg):
        loss = {"student-first": student_first, "teacher-first": teacher_first}[self.kl]
        if msg.Y and self.T_FKE:
            x, _ = client.public
            rows = x, torch.stack(list(msg.Y.values()), 1)
            client.fit(loss, rows, epochs=self.T_FKE, batch=self.B, opt=adam(self.eta))  # Eq. 8
        return Exchanged()

    def personal(self, client):
        return load(client.model, client.memory["trained"]) if "trained" in client.memory else client.model

    def traffic(self, plan):
        logits = plan.tensor(plan.public, plan.classes)
        known = self._of(plan, plan.replied(0))
        others = len(known) - 1
        return {
            ("up", "Known.Y"): logits * len(known),
            ("down", "Others.Y"): (logits + NUMBER) * others * len(self._of(plan, plan.asked(1))),
        }

    def _of(self, plan, ids):
        return [k for k in ids if self.collaborates(k, plan.clients)]


# --- DFFKE: the transfer set comes out of a decoder -------------------------------------------------------------------


class Shared(Up):
    theta: State = private("weights", via="model", unit="client")
    E: Tensor = private("embeddings", via="data", unit="record")
    Y: Tensor = private("labels", via="data", unit="record")


class Unified(Down):
    Dec: State
    E: dict[int, Tensor] = relay("embeddings")  # E~_i of every client, the receiver's own among them
    seed: int  # by which everybody draws the same B^t


class Answered(Up):
    """Logits by round: of this one on all of D^_k, of earlier ones on the sample B^t_k."""

    Y: dict[int, Tensor] = private("logits", via="model", unit="client")


class Peers(Down):
    Y: dict[int, dict[int, Tensor]] = relay("logits")  # by peer and round


class DataFree(Record):
    Dec: State
    z: dict[int, State]  # theta_k^z


@functools.cache
def width_of(arch: str, shape: tuple[int, int, int], classes: int) -> int:
    return int(models.describe(arch, shape, classes)["width"])


@register("dffke")
class DFFKE(FKE):
    quick: ClassVar = {**FKE.quick, "h": 16, "T_Tran": 2, "T_Dec": 1, "T_FKE": 1, "w_Dec": 4, "R": 2}
    presets: ClassVar = {
        "cifar10": {"T_Dec": 3, "T_FKE": 2},
        "cifar100": {"T_Dec": 6, "T_FKE": 4},
        "tinyimagenet": {"T_Dec": 6, "T_FKE": 4},
    }

    kl: Direction = "student-first"
    h: int = Field(512, ge=1)  # width of the unified embedding space
    T_Tran: int = Field(100, ge=0)  # epochs of the docking layers
    T_Dec: int = Field(3, ge=0)  # epochs of the decoder
    B_Tran: int = Field(100, ge=1)  # batch size of the docking layers
    B_Dec: int = Field(100, ge=1)  # batch size of the decoder
    w_Dec: int = Field(64, ge=1)  # channels of the decoder's last layer; 64 gives its 4.4 M parameters
    md: Discrepancy = "none"  # F of the model discrepancy loss (Appendix E)
    fresh: bool = False  # docking layers and decoder begin anew in each round
    R: int | Literal["unlimited"] = "unlimited"  # rounds that the memory buffer holds

    def init(self, server):
        return DataFree(state_of(Decoder(self.h, server.shape, self.w_Dec)), {})

    def round(self, s, server, cohort):
        members = [k for k in cohort.ids if self.collaborates(k, server.clients)]
        shared = cohort.ask(self.local_training, dict.fromkeys(members, Begin()))  # lines 3-7
        if not shared:
            return s
        clients = {k: load(server.model(server.arch(k)), r.theta).requires_grad_(False) for k, r in shared.items()}
        theta_z = self.unify(s, server, {k: (r.E, r.Y) for k, r in shared.items()})  # lines 8-10
        E = {k: z(r.E, theta_z[k]) for k, r in shared.items()}  # Eq. 10
        Dec = self.train_decoder(s, server, clients, theta_z, E)  # lines 11-12
        seed = int(torch.randint(1 << 62, (), generator=server.rng("B^t"), device=server.device))
        answered = cohort.ask(self.answer, dict.fromkeys(shared, Unified(Dec, E, seed)))  # line 13
        peers = {k: Peers({i: r.Y for i, r in answered.items() if i != k}) for k in answered}
        cohort.ask(self.exchange, peers)  # lines 14-21
        return DataFree(Dec, {**s.z, **theta_z})

    # --- on client k ---

    def local_training(self, client, msg):
        self.train(client)
        return Shared(state_of(client.model), outputs(client.model.encode, client.x), client.y)  # E_k = h(X_k)

    def answer(self, client, msg):
        k, past = client.id, held(client.memory)
        client.memory["now"] = {"Dec": msg.Dec, "E": msg.E, "seed": msg.seed}
        Y = {client.t: outputs(client.model, decode(msg.Dec, msg.E[k], client.shape))}  # Y^_k on D^_k
        for s, m in allot(msg.seed, k, sorted(past), len(client)).items():  # line 17: Y^_k on B^t_k, theta_k the latest
            rows = pick(msg.seed, k, s, len(client), m).to(client.device)
            Y[s] = outputs(client.model, decode(past[s]["Dec"], past[s]["E"][k][rows], client.shape))
        return Answered(Y)

    def exchange(self, client, msg):
        now = client.memory.pop("now")
        D = self.transfer_set(client, msg, {client.t: now}, now["seed"])  # line 16: D^_i = Dec(E~_i), i != k
        B = self.transfer_set(client, msg, held(client.memory), now["seed"])
        loss = {"student-first": student_first, "teacher-first": teacher_first}[self.kl]
        for _ in range(self.T_FKE):
            if D:
                client.fit(loss, D, epochs=1, batch=self.B, opt=adam(self.eta))  # Eq. 13
            if B:
                client.fit(loss, B, epochs=1, batch=self.B, opt=adam(self.eta))  # Eq. 14
        remember(client.memory, client.t, now["Dec"], now["E"], self.R)  # line 21
        return Exchanged()

    def transfer_set(self, client, msg, rounds, seed):
        """Synthetic data of all peers with their logits, of the rounds that this client holds; () if there is none."""
        x: list[Tensor] = []
        y: list[Tensor] = []
        for s, past in rounds.items():
            logits = {i: by_round[s] for i, by_round in msg.Y.items() if s in by_round}
            if not logits:
                continue
            e = []
            for i, ys in logits.items():
                n, m = len(past["E"][i]), len(ys)
                all_of_it = s == client.t
                e.append(past["E"][i] if all_of_it else past["E"][i][pick(seed, i, s, n, m).to(client.device)])
            x.append(decode(past["Dec"], torch.cat(e), client.shape))
            y += logits.values()
        return (torch.cat(x), torch.cat(y)[:, None]) if x else ()  # one peer a row

    # --- the data-free module, on the server ---

    def unify(self, s, server, shared):
        """Eq. 11: docking layers and the temporary head, trained together on everybody's embeddings."""
        widths = {k: e.shape[1] for k, (e, _) in shared.items()}
        layers = [nn.Linear(width, self.h) for width in widths.values()]
        for k, layer in zip(widths, layers, strict=True):
            if k in s.z and not self.fresh:
                load(layer, s.z[k])
        model = Docking(layers, server.classes).to(server.device)
        pad = max(widths.values())
        e = torch.cat([F.pad(e, (0, pad - e.shape[1])) for e, _ in shared.values()])
        k = torch.cat([torch.full_like(y, position) for position, (_, y) in enumerate(shared.values())])
        y = torch.cat([y for _, y in shared.values()])
        server.fit(model, alignment, (e, k, y), epochs=self.T_Tran, batch=self.B_Tran, opt=adam(self.eta))
        return {k: model.layer(position, width) for position, (k, width) in enumerate(widths.items())}

    def train_decoder(self, s, server, clients, theta_z, E):
        """Eq. 12: Dec's images, through the frozen encoder and docking layer of the row's client, give the row back."""
        Dec = Decoder(self.h, server.shape, self.w_Dec).to(server.device)
        if not self.fresh:
            load(Dec, s.Dec)
        rows, sizes = torch.cat(list(E.values())), [len(e) for e in E.values()]
        owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        rng = server.rng("Dec")
        order = [i.cpu().sort().values for _ in range(self.T_Dec) for i in batches(len(rows), self.B_Dec, rng)]
        todo = iter(order)

        def loss() -> Tensor:
            index = next(todo)  # sorted, and so by client: the split below is known without asking the device
            split = torch.bincount(owner[index], minlength=len(sizes)).tolist()
            e = rows[index.to(rows.device)]
            parts = zip(clients, Dec(e).split(split), e.split(split), strict=True)
            return torch.cat([self.decoder_loss(k, x, e, clients, theta_z) for k, x, e in parts if len(x)]).mean()

        Dec.train()
        server.optimise(list(Dec.parameters()), loss, steps=len(order), opt=adam(self.eta))
        return state_of(Dec)

    def decoder_loss(self, k, x, e, clients, theta_z):
        """L_fid (Eq. 12) of client k's rows, and with `md` L_md (Eq. 4) towards every peer."""
        embedding = clients[k].encode(x)
        value = fidelity(z(embedding, theta_z[k]), e)
        peers = [model for i, model in clients.items() if i != k]
        if self.md == "none" or not peers:
            return value
        teacher = clients[k].classify(embedding)
        return value + torch.stack([discrepancy(self.md, teacher, model(x)) for model in peers]).mean(0)

    # --- bytes of a round: two circulations (Appendix D), and the models ---

    def traffic(self, plan):
        shared, answered = self._of(plan, plan.replied(0)), self._of(plan, plan.replied(1))
        unified, asked = self._of(plan, plan.asked(1)), self._of(plan, plan.asked(2))
        width = {k: width_of(plan.archs[k], plan.shape, plan.classes) for k in shared}
        embeddings = sum(plan.tensor(plan.n[k], self.h) + NUMBER for k in shared)
        logits = {k: self._logits(plan, k) for k in answered}
        return {
            ("up", "Shared.theta"): sum(plan.state(k) for k in shared),
            ("up", "Shared.E"): sum(plan.tensor(plan.n[k], width[k]) for k in shared),
            ("up", "Shared.Y"): sum(plan.tensor(plan.n[k], size=8) for k in shared),
            ("down", "Unified.Dec"): decoder_size(self.h, plan.shape, self.w_Dec) * len(unified),
            ("down", "Unified.E"): embeddings * len(unified),
            ("down", "Unified.seed"): NUMBER * len(unified),
            ("up", "Answered.Y"): sum(logits.values()),
            ("down", "Peers.Y"): sum(logits[i] + NUMBER for k in asked for i in answered if i != k),
        }

    def _logits(self, plan, k):
        """N_k rows on D^_k, as many on B^t_k once there is a buffer; a key for each round."""
        rounds = plan.choice("Answered.Y", k)
        if rounds is None:  # planning: the rounds in which a client is expected to have taken part
            past = round((plan.t - 1) * len(plan.participants) / max(plan.clients, 1))
            past = past if self.R == "unlimited" else min(past, self.R)
        else:
            past = len(rounds) - 1
        return plan.tensor(plan.n[k] * (2 if past else 1), plan.classes) + NUMBER * (1 + past)
