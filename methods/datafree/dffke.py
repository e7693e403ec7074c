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

- Eq. 8 has the teacher first in the KL, Eqs. 13-14 the student. The author's public code calls torch's kl_div, whose
  first argument is the student's: Eqs. 13-14 write its order of arguments, and KL[Y^_i || f] was run. So `kl` is
  `teacher-first`, which is also ahead in all pairs of docs/results/dffke.md; `student-first` is as printed.
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
  Dec goes on, and so do the docking layers, whose space it decodes. `fresh`: both are new in each round. In the
  author's code the decoder is new and the docking layers go on (`fresh = "decoder"`). Only the head is said to be
  discarded.
- B^t is drawn by a seed that the server sends: |B^t_k| = N_k of client k's past rows, uniform, so that |B^t| = n^
  (Appendix D).
- The batch size of the docking layers is `B_Tran`, 100, as for the others. In the author's code an epoch is one step on
  all rows of each client (`B_Tran = "client"`), with a weight decay of 1e-3 (`decay_Tran`).
- The n in delta = 1/n, "dataset size", is the client's, which protects each record of it. The sensitivity of Appendix G
  is the largest of 256 pixel edits, `random-pixel:SAMPLES`.
- Partitions are Dir(alpha), by class or by client, balanced or not: the setting's `partition` says which (`dirichlet`,
  `dirichlet-capped`).

The author's public code is an earlier state than the paper (32 x 32 pixels, ResNet-18 with a 3x3 stem, `partition =
"dirichlet-filled"`, 30 to 40 rounds). The preset `authors` has what it does besides:

- In the exchange (`embed = "answered"`) a student's docked embedding of a synthetic image also comes close to that of
  its teacher, by the teacher's newest model. So teachers answer with docked embeddings, and clients get their docking
  layer, which learns on (`dock`) and goes back to the server.
- `review` gives the client's own records, unaugmented, a share of the exchange. With `batches = "peer"` an own batch,
  one of each peer's past and one of each peer's current images take turns. Past images are up to `reviewed` times N_k.
- The decoder's batches are of one client (`batches_Dec`), and two terms join Eq. 12 (`answer_Dec`, `md =
  "inverse-CE"`, see `_decoder`). The peers in the second are as the last exchange left them (`md_of`), for which
  clients send their weights a second time.
- Docking layers begin alike (`alike`) and rest in the steps of other clients (`rests`). `output` standardises decoded
  images. Local training moves, mirrors and colours its images (`crop`, `flip`, `jitter`, `colours`), and ends by its
  running accuracy on them (`stops`), or is left out. That code has no limit of epochs; here `E_local` is 1000.

The following points of that code are not here; with all of them mended the two do the same (docs/results/authors.md):

- Docking layers rest in an exchange's steps on own records. Here their gradient is 0 there, and Adam moves them on.
- The Adam of an exchange goes on in the local training of the next round.
- It rounds augmented images to 8 bits, and standardises each channel.

Deviations, off by default:

- `own` adds the client's own D^_k with its own logits to Eq. 13, whose sum has i != k. It holds the client to what it
  knew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

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
    kl,
    load,
    private,
    register,
    relay,
    state_of,
)
from fedaudit.methods.datafree._buffer import Past, Sample, a_round, held, newest, remember
from fedaudit.methods.datafree._decoder import Decoder, Discrepancy, Output, decode, train_decoder
from fedaudit.methods.datafree._dffke_traffic import Traffic, traffic
from fedaudit.methods.datafree._docking import unify, z
from fedaudit.methods.distillation.fke import FKE, Begin, Direction, Exchanged, outputs
from fedaudit.training.models import Net
from fedaudit.wire.codec import FrozenPart

Rows = list[tuple[Tensor, ...]]  # images, logits on them as row x peer x class, and with `embed` what they decode
ByRound = dict[int, dict[int, Tensor]]  # what peers answered, by peer and round
OfPeer = tuple[int, tuple[Tensor, ...]]  # a peer, and rows of its images


def exchanged(
    f: Any,
    x: Tensor,
    ys: Tensor,
    e: Tensor,
    y: Tensor,
    own: Tensor,
    *,
    student_first: bool,
    z: dict[str, Tensor] | Literal["learns"] | None,
) -> Tensor:
    """Return the loss of a synthetic row, Eqs. 13-14 and with z also MSE(z(h(x; theta_k^h); theta_k^z), e); of an own
    record, CE(f(x), y). A docking layer that learns is f's own.
    """
    h = f.encode(x)
    out = f.classify(h)
    p, q = (out[:, None], ys) if student_first else (ys, out[:, None])
    drawn = kl(p, q).sum(1)
    if z == "learns":
        z = {name: f.params[f"z_{name}"] for name in ("weight", "bias")}
    if z is not None:
        drawn = drawn + (linear(h, z["weight"], z["bias"]) - e).square().mean(1)
    return torch.where(own > 0, cross_entropy(out, y, reduction="none"), drawn)


class WithDocking(nn.Module):
    """A client's network with its docking layer, which learn together. The layer's numbers are not those of a linear
    layer, so that they keep their precision where factors are rounded.
    """

    def __init__(self, net: Net, z: State) -> None:
        super().__init__()
        self.net = net
        self.z_weight, self.z_bias = (nn.Parameter(z[name].clone()) for name in ("weight", "bias"))

    def encode(self, x: Tensor) -> Tensor:
        return self.net.encode(x)

    def classify(self, e: Tensor) -> Tensor:
        return self.net.classify(e)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    @property
    def docking(self) -> State:
        return State({"weight": self.z_weight.detach().clone(), "bias": self.z_bias.detach().clone()})


def _labelled(x: Tensor, ys: Tensor, *e: Tensor, h: int) -> tuple[Tensor, ...]:
    """Return synthetic rows as `exchanged` takes them: with an embedding, no label, and marked as not the client's."""
    of = e[0] if e else x.new_zeros(len(x), h)
    return x, ys, of, torch.zeros(len(x), dtype=torch.long, device=x.device), x.new_zeros(len(x))


def _own_records(x: Tensor, y: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a client's own records as `exchanged` takes them, beside synthetic rows like these."""
    _, ys, e, *_ = like
    n = len(y)
    return x, ys.new_zeros(n, *ys.shape[1:]), e.new_zeros(n, *e.shape[1:]), y, x.new_ones(n)


def _count(rows: Rows) -> int:
    return sum(len(x) for x, *_ in rows)


def _joined(rows: Rows) -> tuple[Tensor, ...]:
    """Return all rows, one under the other. The list is empty afterwards, so that no row lies in memory twice."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    rows.clear()
    found = []
    while columns:
        found.append(torch.cat(columns.pop(0)))
    return tuple(found)


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


class UnifiedDocked(Down):
    """The same with the receiver's own docking layer, theta_k^z (`embed`)."""

    Dec: State
    E: dict[int, Tensor] = relay("embeddings", by="client")
    seed: int
    z: State


class Answered(Up):
    """Logits by round: those of this round on all of D^_k, those of earlier ones on the sample B^t_k."""

    Y: dict[int, Tensor] = private("logits", via="model", unit="client")


class AnsweredDocked(Up):
    """The same with docked embeddings of these images, z(h(x; theta_k^h); theta_k^z), by round (`embed`)."""

    Y: dict[int, Tensor] = private("logits", via="model", unit="client")
    Z: dict[int, Tensor] = private("embeddings", via="model", unit="client")


class Peers(Down):
    Y: dict[int, dict[int, Tensor]] = relay("logits", by="client")  # by peer and round


class PeersDocked(Down):
    Y: dict[int, dict[int, Tensor]] = relay("logits", by="client")
    Z: dict[int, dict[int, Tensor]] = relay("embeddings", by="client")


class ExchangedModel(Up):
    """The client after its exchange: theta_k (`md_of`), theta_k^z (`dock`)."""

    theta: State | None = private("weights", via="model", unit="client")
    z: State | None = private("weights", via="model", unit="client")


class DataFree(Record):
    Dec: State
    z: dict[int, State]  # theta_k^z
    exchanged: dict[int, State]  # theta_k as the last exchange left it, with `md_of`
    past: dict[int, dict[str, Any]]  # with `sync`: the R newest rounds' Dec and E~, and who holds which of them
    holds: dict[int, list[int]]


@register("dffke", tables="DFFKE")
class DFFKE(FKE):
    """Exchange knowledge through images decoded from embeddings.

    A client sends its weights, embeddings, labels and logits.
    """

    images_only: ClassVar[str] = "decodes embeddings into images"
    quick: ClassVar = {**FKE.quick, "h": 16, "T_Tran": 2, "T_Dec": 1, "T_FKE": 1, "w_Dec": 4, "R": 2}
    on_digits: ClassVar = {"E_local": 10, "B": 32, "T_Tran": 20, "h": 64, "w_Dec": 16, "R": 5}
    needs_public: ClassVar = False
    presets: ClassVar = {
        "cifar10": {"T_Dec": 3, "T_FKE": 2},
        "cifar100": {"T_Dec": 6, "T_FKE": 4},
        "tinyimagenet": {"T_Dec": 6, "T_FKE": 4},
        # The author's public code, on CIFAR-10. The setting has to say partition, image size, model and rounds besides.
        "authors": {
            "T_Dec": 3,
            "T_FKE": 2,
            "kl": "teacher-first",
            "embed": "answered",
            "review": True,
            "fresh": "decoder",
            "output": "standardised",
            "mean_x": -0.053,
            "sigma_x": 0.5,
            "B_Tran": "client",
            "decay_Tran": 1e-3,
            "alike": True,
            "rests": True,
            "batches": "peer",
            "dock": True,
            "reviewed": 2,
            "batches_Dec": "client",
            "answer_Dec": True,
            "md": "inverse-CE",
            "md_of": "exchanged",
            "decay": 1e-5,
            "crop": 4,
            "jitter": 0.4,
            "colours": "torchvision",
            "flip": True,
            "stops": "running",
            "E_local": 1000,
        },
    }

    kl: Direction = "teacher-first"
    alternate: Literal["step", "epoch"] = "step"  # Eqs. 13 and 14 take turns by mini-batch or by epoch
    own: bool = False  # the client's own D^_k in Eq. 13: a deviation
    h: int = Field(512, ge=1)  # width of the unified embedding space
    T_Tran: int = Field(100, ge=0)  # epochs of the docking layers
    T_Dec: int = Field(3, ge=0)  # epochs of the decoder
    B_Tran: Annotated[int, Field(ge=1)] | Literal["client"] = 100  # batch size of the docking layers
    decay_Tran: float = Field(0.0, ge=0)  # weight decay of the docking layers' Adam
    alike: bool = False  # new docking layers begin alike
    rests: bool = False  # a docking layer rests in the steps of other clients, which B_Tran = "client" has
    B_Dec: int = Field(100, ge=1)  # batch size of the decoder
    batches_Dec: Literal["mixed", "client"] = "mixed"  # whether a batch of the decoder mixes clients, or is of one
    answer_Dec: bool = False  # decoded images also have to be answered as the records behind them
    w_Dec: int = Field(64, ge=1)  # channels of the decoder's last layer; 64 gives its 4.4 M parameters
    md: Discrepancy = "none"  # F of the model discrepancy loss (Appendix E)
    md_of: Literal["trained", "exchanged"] = "trained"  # peers' models in it: of this round, or of the last exchange
    fresh: bool | Literal["decoder"] = False  # docking layers and decoder, or the latter, begin anew in each round
    output: Output = "tanh"  # of the decoder
    mean_x: float = 0.0  # mean and deviation of standardised images, in [-1, 1]
    sigma_x: float = Field(1.0, gt=0)
    # The exchange also draws docked embeddings together: to those decoded, or those with which teachers answer.
    embed: bool | Literal["answered"] = False
    dock: bool = False  # docking layers learn in the exchange, and the server goes on from there
    review: bool = False  # the client's own records have a share of the exchange
    batches: Literal["mixed", "peer"] = "mixed"  # whether a batch of the exchange mixes peers, or is of one
    R: Annotated[int, Field(ge=0)] | Literal["unlimited"] = "unlimited"  # rounds that the memory buffer holds
    reviewed: int = Field(1, ge=1)  # past rows in an exchange, in N_k: those beyond the first are for later epochs
    sync: bool = False  # a client gets Dec and E~ of the rounds that it missed

    @model_validator(mode="after")
    def _rests_by_client(self) -> Self:
        if self.rests and self.B_Tran != "client":
            raise ValueError('a docking layer that rests needs steps of single clients: set B_Tran = "client"')
        if self.dock and not self.embed:
            raise ValueError("a docking layer learns in the exchange by docked embeddings: set embed, or dock = false")
        if self.dock and self.fresh is True:
            raise ValueError('docking layers that go on cannot begin anew: set fresh = "decoder", or dock = false')
        if self.reviewed > 1 and self.batches != "peer":
            raise ValueError('reviewed above 1 spreads each peer\'s past rows over the epochs: set batches = "peer"')
        if self.md_of == "exchanged" and self.md == "none":
            raise ValueError('clients would send models that nothing is compared with: set md, or md_of = "trained"')
        return self

    def init(self, server: Server) -> DataFree:
        return DataFree(state_of(self.decoder(server)), {}, {}, {}, {})

    def decoder(self, server: Server) -> Decoder:
        return Decoder(self.h, server.shape, self.w_Dec, self.output, self.pixels)

    @property
    def pixels(self) -> tuple[float, float]:
        return self.mean_x, self.sigma_x

    def round(self, s: DataFree, server: Server, cohort: Cohort) -> DataFree:
        members = [k for k in cohort.ids if self.collaborates(k, server.clients)]
        shared = cohort.ask(self.local_training, dict.fromkeys(members, Begin()))  # lines 3-7
        if not shared:
            return s
        holds = self.synchronise(s, cohort, list(shared)) if self.sync else s.holds
        clients = {k: server.model(server.arch(k), state=r.theta) for k, r in shared.items()}
        theta_z = unify(  # lines 8-9, Eq. 11
            server, {k: (r.E, r.Y) for k, r in shared.items()}, {} if self.fresh is True else s.z, self.h,
            epochs=self.T_Tran, batch=self.B_Tran, opt=adam(self.eta, weight_decay=self.decay_Tran),
            alike=self.alike, rests=self.rests,
        )  # fmt: skip
        E = {k: z(r.E, theta_z[k]) for k, r in shared.items()}  # line 10, Eq. 10
        Dec = self.train_decoder(s, server, clients, theta_z, E, {k: r.E for k, r in shared.items()})  # lines 11-12
        seed = int(torch.randint(1 << 62, (), generator=server.rng("B^t"), device=server.device))
        present = [k for k in shared if k in cohort.ids]
        unified: dict[int, Any] = dict.fromkeys(present, Unified(Dec, E, seed))
        if self.embed:
            unified = {k: UnifiedDocked(Dec, E, seed, theta_z[k]) for k in present}
        ask = self.answer_embedded if self.embed == "answered" else self.answer_docked if self.embed else self.answer
        answered = cohort.ask(ask, unified)  # line 13
        exchanged = cohort.ask(*self.told(answered))  # lines 14-21
        past = {**s.past, server.t: {"Dec": Dec, "E": E}} if self.sync else {}
        kept = newest(past, self.R)
        held_by = {k: [*holds.get(k, []), *([server.t] if k in exchanged else [])] for k in {*holds, *exchanged}}
        holds = {k: [t for t in rounds if t in kept] for k, rounds in sorted(held_by.items())}
        theta_z = {**s.z, **theta_z, **{k: r.z for k, r in exchanged.items() if self.dock}}
        last = {**s.exchanged, **{k: r.theta for k, r in exchanged.items() if self.md_of == "exchanged"}}
        return DataFree(Dec, theta_z, last, {t: past[t] for t in kept}, holds if self.sync else {})

    def told(self, answered: dict[int, Any]) -> tuple[Any, dict[int, Any]]:
        """Return the task of lines 14-21, and what each client is told for it: all that the others have answered."""
        Y = {k: {i: r.Y for i, r in answered.items() if i != k} for k in answered}
        if self.embed == "answered":
            Z = {k: {i: r.Z for i, r in answered.items() if i != k} for k in answered}
            given: dict[int, Any] = {k: PeersDocked(Y[k], Z[k]) for k in answered}
        else:
            given = {k: Peers(Y[k]) for k in answered}
        returns = self.dock or self.md_of == "exchanged"
        return self.exchange_returning if returns else self.exchange, given

    # --- on client k ---

    def local_training(self, client: Client, msg: Begin) -> Shared:
        self.train(client)
        return Shared(state_of(client.model), outputs(client.model.encode, client.x), client.y)  # E_k = h(X_k)

    def catch_up(self, client: Client, msg: Missed) -> CaughtUp:
        for s in msg.Dec:
            remember(client.memory, s, a_round(msg.Dec[s], msg.E[s]), self.R)
        return CaughtUp()

    def answer(self, client: Client, msg: Unified) -> Answered:
        Y = {s: outputs(client.model, x) for s, x in self.asked(client, msg)}
        if self.own:
            client.memory["now"]["Y"] = Y[client.t]
        return Answered(Y)

    def answer_docked(self, client: Client, msg: UnifiedDocked) -> Answered:
        answered = self.answer(client, Unified(msg.Dec, msg.E, msg.seed))
        client.memory["now"]["z"] = msg.z
        return answered

    def answer_embedded(self, client: Client, msg: UnifiedDocked) -> AnsweredDocked:
        """Answer with docked embeddings of the images too."""
        Y, Z = {}, {}
        for s, x in self.asked(client, Unified(msg.Dec, msg.E, msg.seed)):
            h = outputs(client.model.encode, x)
            Y[s], Z[s] = outputs(client.model.classify, h), z(h, msg.z)
        client.memory["now"]["z"] = msg.z
        if self.own:
            client.memory["now"] |= {"Y": Y[client.t], "Z": Z[client.t]}
        return AnsweredDocked(Y, Z)

    def asked(self, client: Client, msg: Unified) -> Iterator[tuple[int, Tensor]]:
        """Yield the images that the client answers on, by round: D^_k, and B^t_k of the rounds before (line 17)."""
        k, past = client.id, held(client.memory)
        client.memory["now"] = {"round": a_round(msg.Dec, msg.E), "seed": msg.seed}
        now = client.memory["now"]["round"]
        yield client.t, self.images(client, now, now.part("E", k))
        for s, e in self.sample(msg.seed).own(k, past, len(client)).items():
            yield s, self.images(client, past[s], e)

    def sample(self, seed: int) -> Sample:
        return Sample(seed, self.reviewed)

    def images(self, client: Client, past: Past, e: FrozenPart) -> Tensor:
        """Return D^ = Dec(E~) of some rows of a round. Teacher and students decode the same rows."""
        made: Tensor = client.once(decode, past.part("Dec"), e, shape=client.shape, pixels=self.pixels)
        return made

    def exchange(self, client: Client, msg: Any) -> Exchanged:
        now = client.memory.pop("now")
        self.mark_trained(client)
        if self.T_FKE:  # lines 18-20
            self.learn_from_peers(client, now, msg.Y, getattr(msg, "Z", None))
        remember(client.memory, client.t, now["round"], self.R)  # line 21
        if self.dock:
            client.memory["z"] = now["z"]
        return Exchanged()

    def exchange_returning(self, client: Client, msg: Any) -> ExchangedModel:
        """Exchange, and return the model and the docking layer as the exchange left them."""
        self.exchange(client, msg)
        theta = state_of(client.model) if self.md_of == "exchanged" else None
        return ExchangedModel(theta, client.memory.pop("z") if self.dock else None)

    def learn_from_peers(self, client: Client, now: dict[str, Any], Y: ByRound, Z: ByRound | None = None) -> None:
        """Learn from the peers' answers on their images, of this round and of those before."""
        current = self.current_rows(client, now, Y, Z)  # Eq. 13
        past = self.review_rows(client, self.sample(now["seed"]), held(client.memory), Y, Z)  # Eq. 14
        parts = self.parts(current, past)
        sizes, rows = tuple(map(_count, parts)), [row for part in parts for row in part]
        if not rows:
            return
        del current, past, parts  # `_joined` empties the list of rows, so that none lies in memory twice
        if self.embed or self.review:
            self.learn_more(client, rows, sizes, now)
        else:
            x, y = _joined(rows)
            self.learn(client, (x, y), **self.in_epochs(Turns(sizes, self.in_turn), sizes))

    def parts(self, current: list[OfPeer], past: list[OfPeer]) -> list[Rows]:
        """Return the rows in the parts that take turns: Eq. 13 and Eq. 14, or those of each peer, past ones first."""
        if self.batches == "mixed":
            return [[row for _, row in rows] for rows in (current, past)]
        peers = dict.fromkeys(i for i, _ in current)
        return [[row for i, row in rows if i == peer] for rows in (past, current) for peer in peers]

    @property
    def in_turn(self) -> Literal["step", "epoch"]:
        """Return how the parts take turns. One batch of each peer follows the other."""
        return "step" if self.batches == "peer" else self.alternate

    def learn_more(self, client: Client, rows: Rows, sizes: tuple[int, ...], now: dict[str, Any]) -> None:
        """Exchange with `embed` or `review`: a row also has the embedding to come close to, a label and whether it is
        one of the client's own records.
        """
        z: State | None = now.get("z")
        given: dict[str, Any] = {"student_first": self.kl == "student-first", "z": None if z is None else dict(z)}
        rows[:] = [_labelled(*of_some, h=self.h) for of_some in rows]
        turns = Turns(sizes, self.in_turn)
        if self.review:
            mine = _own_records(client.x, client.y, rows[0])
            if self.batches == "peer":
                rows.insert(0, mine)
                turns = Turns((len(client.y), *sizes), "step")
            else:
                rows.append(mine)
                turns = Turns((*sizes, len(client.y)), "even")
        options = self.in_epochs(turns, sizes)
        if self.dock and z is not None:
            options["model"] = both = WithDocking(client.model, z)
            self.teach(client, exchanged, _joined(rows), given={**given, "z": "learns"}, **options)
            now["z"] = both.docking
            return
        self.teach(client, exchanged, _joined(rows), given=given, **options)

    def in_epochs(self, turns: Turns, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the turns of an exchange's parts as `fit` takes them; with `reviewed`, all epochs are one."""
        if self.reviewed == 1:
            return {"turns": turns}
        return {"turns": self.in_all_epochs(turns, sizes), "epochs": 1}

    def in_all_epochs(self, turns: Turns, sizes: tuple[int, ...]) -> Turns:
        """Return the turns of all epochs as one: as many steps of a peer's past rows as of its current ones, the former
        in fewer passes where there are more of them. Where there are fewer, no row is seen more often than a current
        one.
        """
        past, current = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        passes = [max(1, round(self.T_FKE * n / max(m, n))) for m, n in zip(past, current, strict=True)]
        first = [self.T_FKE] * (len(turns.sizes) - len(sizes))  # own records
        return Turns(turns.sizes, turns.by, (*first, *passes, *[self.T_FKE] * len(current)))

    def current_rows(self, client: Client, now: dict[str, Any], Y: ByRound, Z: ByRound | None = None) -> list[OfPeer]:
        """Return the rows of Eq. 13: D^_i = Dec(E~_i) of every peer i != k that answered (line 16), with Y^_i on it."""
        targets = {i: by_round[client.t] for i, by_round in Y.items()}
        if self.own:
            targets[client.id] = now["Y"]
        near = None if Z is None else [now["Z"] if i == client.id else Z[i][client.t] for i in targets]
        E = [(now["round"].part("E", i), ys) for i, ys in targets.items()]
        return list(zip(targets, self.decoded(client, now["round"], E, near), strict=True))

    def review_rows(
        self, client: Client, sample: Sample, past: dict[int, Past], Y: ByRound, Z: ByRound | None = None
    ) -> list[OfPeer]:
        """Return the rows of Eq. 14: B^t_i of every peer i != k, from the rounds that this client holds, with Y^_i on
        it.
        """
        rows: list[OfPeer] = []
        for s in past:
            of_s = {i: by_round[s] for i, by_round in Y.items() if s in by_round}
            near = None if Z is None else [Z[i][s] for i in of_s]
            E = [(sample.of_peer(i, s, past[s], len(ys)), ys) for i, ys in of_s.items()]
            rows += zip(of_s, self.decoded(client, past[s], E, near), strict=True)
        return rows

    def decoded(
        self, client: Client, past: Past, E: Sequence[tuple[FrozenPart, Tensor]], near: Sequence[Tensor] | None = None
    ) -> Rows:
        """Return a round's images in place of embeddings, peer by peer, and the logits as row x peer x class; with
        `embed` also the embeddings to come close to, `near` or those that were decoded.
        """
        rows: Rows = []
        for position, (e, ys) in enumerate(E):
            made = self.images(client, past, e), ys[:, None]
            rows.append((*made, e.read() if near is None else near[position]) if self.embed else made)
        return rows

    # --- on the server ---

    def train_decoder(
        self,
        s: DataFree,
        server: Server,
        clients: dict[int, Net],
        theta_z: dict[int, State],
        E: dict[int, Tensor],
        h: dict[int, Tensor],
    ) -> State:
        """Train Dec by Eq. 12, and return its state. `h` are the embeddings as the clients sent them."""
        Dec = self.decoder(server).to(server.device)
        if not self.fresh:
            load(Dec, s.Dec)
        options: dict[str, Any] = {"epochs": self.T_Dec, "batch": self.B_Dec, "opt": adam(self.eta), "md": self.md}
        options |= {"answers": self.answer_Dec, "by_client": self.batches_Dec == "client"}
        if self.answer_Dec or self.md == "inverse-CE":
            options["Y"] = {k: outputs(clients[k].eval().classify, e) for k, e in h.items()}  # f(X_k; theta_k)
        if self.md_of == "exchanged":  # a client that has exchanged nothing yet is as it is now
            last = {k: s.exchanged.get(k) for k in clients}
            options["peers"] = {
                k: model if (w := last[k]) is None else server.model(server.arch(k), state=w)
                for k, model in clients.items()
            }
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
