"""DFFKE. "Aggregation-Free Heterogeneous Federated Learning with Data-Free Knowledge Exchange" (under review),
Algorithm 1 and Eqs. 9-14. The transfer set of FKE comes out of a decoder that the server trains on the clients'
embeddings.

These leave a client: theta_k, E_k, Y_k and logits. The two of Section 4.3 (line 7 of Algorithm 1) are protected by
policies on `embeddings` and `logits` before they leave. (The algorithm shares first and protects afterwards.) Table 4's
noise is `calibration = "classical"` (Eq. 15) with `sensitivity = "random-pixel"` (Appendix G). There two data sets are
neighbours if they differ in one random pixel of one record. Logits are of synthetic images, which contain no private
pixel. For them the policy has to state what the paper takes for granted, `assume = "logits-of-records"`. The ledger
says infinity for both, with the paper's epsilon as a claim. The table's last column is `mechanism = "pure-noise"` on
both; theta_k and Y_k travel even then.

Contradicted in the paper:

- Eq. 8 has the teacher first in the KL, Eqs. 13-14 the student. Algorithm 1 cites 13 and 14: `kl`, here
  `student-first`.
- "In each iteration" clients alternate between Eqs. 13 and 14 (Section 3.3), or in each of T_FKE steps, which are
  epochs (Algorithm 1, lines 18-20, and Section 4.1): `alternate`, `step` or `epoch`. One Adam serves the whole
  exchange.
- Section 2 defines Y^_k on X_k, Appendix D on D^_k. Eq. 13 compares it with f(D^_k): it is on D^_k.
- The docking layer is R^h -> R^h although encoders' widths differ: here it is R^{h_k} -> R^h, with a bias. h = 512 is
  said of the baselines only; with it the decoder has the 4.4 M parameters that are given.
- Buffers are "synchronized", but with participation rho < 1 clients miss rounds. Logits are keyed by round. A student
  skips rounds that it lacks; with `sync` it gets Dec and E~ of the rounds that it missed, and they are billed.
- Table 5's "Unlimited, up to 50" is read as a run of 50 rounds, not as a limit of 50.

Left open (those of local training, batch norm, collaboration and test points: see `fke`; those of the
decoder: `_decoder`):

- In the sums over clients of CE, MSE and KL of whole collections every row counts alike, as in the mini-batch epochs
  that the paper trains for. A mean per client would give too much weight to the rows of small clients.
- Dec and the docking layers go on from round to round: Algorithm 1 requires one Gen and trains it in every round, so
  Dec goes on, and so do the docking layers, whose space it decodes. `fresh`: both are new in each round. Only the head
  is said to be discarded.
- B^t is drawn by a seed that the server sends: |B^t_k| = N_k of client k's past rows, uniform, so that |B^t| = n^
  (Appendix D).
- The batch size of the docking layers is `B_Tran`, 100, as for the others.
- The n in delta = 1/n, "dataset size", is the client's, which protects each record of it. The sensitivity of Appendix G
  is the largest of 256 pixel edits, `random-pixel:SAMPLES`.
- Partitions are Dir(alpha), by class or by client, balanced or not: the setting's `partition` says which (`dirichlet`,
  `dirichlet-capped`).

Deviations, off by default:

- `own` adds the client's own D^_k with its own logits to Eq. 13, whose sum has i != k. It holds the client to what it
  knew.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit import (
    Client,
    Cohort,
    Down,
    Plan,
    Record,
    Server,
    State,
    Turns,
    Up,
    adam,
    load,
    private,
    register,
    relay,
    state_of,
)
from fedaudit.methods.datafree._buffer import Past, Sample, held, newest, remember
from fedaudit.methods.datafree._decoder import Decoder, Discrepancy, decode, train_decoder
from fedaudit.methods.datafree._dffke_traffic import Traffic, traffic
from fedaudit.methods.datafree._docking import unify, z
from fedaudit.methods.distillation.fke import FKE, Begin, Direction, Exchanged, outputs
from fedaudit.training.models import Net

Rows = list[tuple[Tensor, Tensor]]  # images, and logits on them as row x peer x class


class Shared(Up):
    theta: State = private("weights", via="model", unit="client")
    E: Tensor = private("embeddings", via="data", unit="record")
    Y: Tensor = private("labels", via="data", unit="record")


class Missed(Down):
    """The rounds that a client missed because it did not take part (`sync`)."""

    Dec: dict[int, State]
    E: dict[int, dict[int, Tensor]] = relay("embeddings")


class CaughtUp(Up):
    pass


class Unified(Down):
    Dec: State
    E: dict[int, Tensor] = relay("embeddings", by="client")  # E~_i of every client, the receiver's own among them
    seed: int  # by which everybody draws the same B^t


class Answered(Up):
    """Logits by round: those of this round on all of D^_k, those of earlier ones on the sample B^t_k."""

    Y: dict[int, Tensor] = private("logits", via="model", unit="client")


class Peers(Down):
    Y: dict[int, dict[int, Tensor]] = relay("logits", by="client")  # by peer and round


class DataFree(Record):
    Dec: State
    z: dict[int, State]  # theta_k^z
    past: dict[int, dict[str, Any]]  # with `sync`: the R newest rounds' Dec and E~, and who holds which of them
    holds: dict[int, list[int]]


@register("dffke", tables="DFFKE")
class DFFKE(FKE):
    images_only: ClassVar[str] = "decodes embeddings into images"
    quick: ClassVar = {**FKE.quick, "h": 16, "T_Tran": 2, "T_Dec": 1, "T_FKE": 1, "w_Dec": 4, "R": 2}
    on_digits: ClassVar = {"E_local": 10, "B": 32, "T_Tran": 20, "h": 64, "w_Dec": 16, "R": 5}
    needs_public: ClassVar = False
    presets: ClassVar = {
        "cifar10": {"T_Dec": 3, "T_FKE": 2},
        "cifar100": {"T_Dec": 6, "T_FKE": 4},
        "tinyimagenet": {"T_Dec": 6, "T_FKE": 4},
    }

    kl: Direction = "student-first"
    alternate: Literal["step", "epoch"] = "step"  # Eqs. 13 and 14 take turns by mini-batch or by epoch
    own: bool = False  # the client's own D^_k in Eq. 13: a deviation
    h: int = Field(512, ge=1)  # width of the unified embedding space
    T_Tran: int = Field(100, ge=0)  # epochs of the docking layers
    T_Dec: int = Field(3, ge=0)  # epochs of the decoder
    B_Tran: int = Field(100, ge=1)  # batch size of the docking layers
    B_Dec: int = Field(100, ge=1)  # batch size of the decoder
    w_Dec: int = Field(64, ge=1)  # channels of the decoder's last layer; 64 gives its 4.4 M parameters
    md: Discrepancy = "none"  # F of the model discrepancy loss (Appendix E)
    fresh: bool = False  # docking layers and decoder begin anew in each round
    R: Annotated[int, Field(ge=0)] | Literal["unlimited"] = "unlimited"  # rounds that the memory buffer holds
    sync: bool = False  # a client gets Dec and E~ of the rounds that it missed

    def init(self, server: Server) -> DataFree:
        return DataFree(state_of(Decoder(self.h, server.shape, self.w_Dec)), {}, {}, {})

    def round(self, s: DataFree, server: Server, cohort: Cohort) -> DataFree:
        members = [k for k in cohort.ids if self.collaborates(k, server.clients)]
        shared = cohort.ask(self.local_training, dict.fromkeys(members, Begin()))  # lines 3-7
        if not shared:
            return s
        holds = self.synchronise(s, cohort, list(shared)) if self.sync else s.holds
        clients = {k: load(server.model(server.arch(k)), r.theta) for k, r in shared.items()}
        theta_z = unify(  # lines 8-9, Eq. 11
            server, {k: (r.E, r.Y) for k, r in shared.items()}, {} if self.fresh else s.z, self.h,
            epochs=self.T_Tran, batch=self.B_Tran, opt=adam(self.eta),
        )  # fmt: skip
        E = {k: z(r.E, theta_z[k]) for k, r in shared.items()}  # line 10, Eq. 10
        Dec = self.train_decoder(s, server, clients, theta_z, E)  # lines 11-12
        seed = int(torch.randint(1 << 62, (), generator=server.rng("B^t"), device=server.device))
        present = [k for k in shared if k in cohort.ids]
        answered = cohort.ask(self.answer, dict.fromkeys(present, Unified(Dec, E, seed)))  # line 13
        peers = {k: Peers({i: r.Y for i, r in answered.items() if i != k}) for k in answered}
        exchanged = cohort.ask(self.exchange, peers)  # lines 14-21
        past = {**s.past, server.t: {"Dec": Dec, "E": E}} if self.sync else {}
        kept = newest(past, self.R)
        held_by = {k: [*holds.get(k, []), *([server.t] if k in exchanged else [])] for k in {*holds, *exchanged}}
        holds = {k: [t for t in rounds if t in kept] for k, rounds in sorted(held_by.items())}
        return DataFree(Dec, {**s.z, **theta_z}, {t: past[t] for t in kept}, holds if self.sync else {})

    # --- on client k ---

    def local_training(self, client: Client, msg: Begin) -> Shared:
        self.train(client)
        return Shared(state_of(client.model), outputs(client.model.encode, client.x), client.y)  # E_k = h(X_k)

    def catch_up(self, client: Client, msg: Missed) -> CaughtUp:
        for s in msg.Dec:
            remember(client.memory, s, msg.Dec[s], msg.E[s], self.R)
        return CaughtUp()

    def answer(self, client: Client, msg: Unified) -> Answered:
        k, past = client.id, held(client.memory)
        Y = {client.t: outputs(client.model, decode(msg.Dec, msg.E[k], client.shape))}  # Y^_k on D^_k
        client.memory["now"] = {"Dec": msg.Dec, "E": msg.E, "seed": msg.seed}
        if self.own:
            client.memory["now"]["Y"] = Y[client.t]
        for s, e in Sample(msg.seed).own(k, past, len(client)).items():  # line 17: Y^_k on B^t_k, theta_k the latest
            Y[s] = outputs(client.model, decode(past[s]["Dec"], e, client.shape))
        return Answered(Y)

    def exchange(self, client: Client, msg: Peers) -> Exchanged:
        now = client.memory.pop("now")
        self.mark_trained(client)
        D = self.current_rows(client, now, msg.Y)  # Eq. 13
        B = self.review_rows(client, Sample(now["seed"]), held(client.memory), msg.Y)  # Eq. 14
        if (D or B) and self.T_FKE:  # lines 18-20
            x, y = (torch.cat(parts) for parts in zip(*D, *B, strict=True))
            sizes = sum(len(ys) for _, ys in D), sum(len(ys) for _, ys in B)
            self.learn(client, (x, y), turns=Turns(sizes, self.alternate))
        remember(client.memory, client.t, now["Dec"], now["E"], self.R)  # line 21
        return Exchanged()

    def current_rows(self, client: Client, now: Past, Y: dict[int, dict[int, Tensor]]) -> Rows:
        """Return the rows of Eq. 13: D^_i = Dec(E~_i) of every peer i != k that answered (line 16), with Y^_i on it."""
        targets = {i: by_round[client.t] for i, by_round in Y.items()}
        if self.own:
            targets[client.id] = now["Y"]
        return self.decoded(client, now["Dec"], [(now["E"][i], ys) for i, ys in targets.items()])

    def review_rows(
        self, client: Client, sample: Sample, past: dict[int, Past], Y: dict[int, dict[int, Tensor]]
    ) -> Rows:
        """Return the rows of Eq. 14: B^t_i of every peer i != k, from the rounds that this client holds, with Y^_i on
        it.
        """
        rows: Rows = []
        for s in past:
            of_s = [(i, by_round[s]) for i, by_round in Y.items() if s in by_round]
            E = [(sample.of_peer(i, s, past[s], len(ys)), ys) for i, ys in of_s]
            rows += self.decoded(client, past[s]["Dec"], E)
        return rows

    def decoded(self, client: Client, Dec: State, rows: Rows) -> Rows:
        """Return Dec's images in place of embeddings, for all peers at once, and the logits as row x peer x class."""
        if not rows:
            return []
        e, ys = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return [(decode(Dec, e, client.shape), ys[:, None])]

    # --- on the server ---

    def train_decoder(
        self, s: DataFree, server: Server, clients: dict[int, Net], theta_z: dict[int, State], E: dict[int, Tensor]
    ) -> State:
        Dec = Decoder(self.h, server.shape, self.w_Dec).to(server.device)
        if not self.fresh:
            load(Dec, s.Dec)
        options: dict[str, Any] = {"epochs": self.T_Dec, "batch": self.B_Dec, "opt": adam(self.eta), "md": self.md}
        return train_decoder(server, Dec, clients, theta_z, E, **options)  # Eq. 12

    def synchronise(self, s: DataFree, cohort: Cohort, ids: list[int]) -> dict[int, list[int]]:
        """Send Dec and E~ of the buffer's rounds to those who lack them, and return who then holds which."""
        lacks = {k: [t for t in s.past if t not in s.holds.get(k, [])] for k in ids}
        missed = {
            k: Missed({t: s.past[t]["Dec"] for t in rounds}, {t: s.past[t]["E"] for t in rounds})
            for k, rounds in lacks.items()
            if rounds
        }
        return {**s.holds, **{k: list(s.past) for k in cohort.ask(self.catch_up, missed)}}

    def traffic(self, plan: Plan) -> Traffic:
        return traffic(self, plan)
