"""Server-side distillation without data, on top of a host. `dfrd`, `fedftg` and `dense` share it.

The distillation takes the models that the host's clients upload as teachers, and puts the global model that it
has trained back into the host's state. Hosts are composed, not copied (see fedaudit/methods/datafree/_host.py):

    dfrd             host = alone: every client trains by itself, the global model begins at random  ("data-free")
    fedavg+dfrd      host = fedavg; likewise heterofl+, feddropout+, fedrolex+                       ("fine-tuning")

Local training belongs to the host, and so do its hyper-parameters: `--set 'host={E=5, eta=0.05}'`, in a file
`set = { host = { E = 5 }, alpha = 0.5 }`. Label counts travel in an ask of their own, after the host's; a client that
fails there is averaged, but is not a teacher.

The papers do not say the following. It is chosen for all three:

- Batch norm in the global model f (`statistics`). `synthetic`: f is normalised by its batches of synthetic images, and
  its running statistics follow them; it is then evaluated on real ones with those. `host`: f keeps the statistics of
  the host's average, in the distillation and after it. `recalibrated`: as `synthetic`, and then the clients are asked
  for the statistics of the new f on their records, a release of kind `statistics` (HeteroFL's own, where it asks).
  The default is `synthetic` from scratch, where there are no others, and on hosts of sub-models; on FedAvg it is
  `host`. The statistics of narrow networks do not fit the wide f: in a fresh ResNet-18 for 3x32x32, with clients of a
  half down to a sixteenth of its width, they make logits a hundred times as long as its own, and the first steps of Eq.
  7 diverge. `batch`: nobody has running statistics; teachers, f and tests are normalised by their own batch, as in the
  networks of DFRD's authors.
- Rates and steps: G learns by Adam at 1e-3, f by SGD with momentum 0.9 at 0.01 from scratch and 0.001 on a host.
  FedFTG's public code takes short steps, too: no momentum, and a loss that is a mean over classes as well.
- Optimiser state goes on over the rounds (`optimisers = "kept"`): G's always, f's where f itself goes on. On a host the
  average has taken its place, so its momentum begins anew. `"reset"`: both begin anew in each round. `"turn"`: in each
  turn, as in the code of DFRD's authors.
- On a host the distilled model takes the average's place, and clients get it in the next round. In the code of DFRD's
  authors clients of one architecture get the plain average, and the distilled model is scored only: `feedback = false`.
- `guard`: clients count how many of their validation records the host's model and the distilled one classify right. If
  the distilled one has fewer in all, the host's is kept, and the round's record says so. These are two counts, each of
  which one record changes by one: a release of kind `statistics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field, create_model
from torch import Tensor, nn

from fedaudit import (
    Client,
    Cohort,
    Down,
    Many,
    Method,
    Opt,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    adam,
    load,
    private,
    register,
    sgd,
    state_of,
)  # fmt: skip
from fedaudit.errors import SettingError
from fedaudit.methods.averaging.fedavg import FedAvg
from fedaudit.methods.datafree._generator import NETWORKS, Generator, Merge, Network, diversity
from fedaudit.methods.datafree._host import Alone, Host, Overheard, host_of
from fedaudit.methods.shared._batch_statistics import OnBatchStatistics
from fedaudit.methods.shared._statistics import Query, Statistics, batch_norms, measured, settled, statistics_traffic
from fedaudit.methods.submodels._submodel import SubModels
from fedaudit.methods.submodels.feddropout import FederatedDropout
from fedaudit.methods.submodels.fedrolex import FedRolex
from fedaudit.methods.submodels.heterofl import HeteroFL
from fedaudit.training.descent import Kept

Moments = dict[str, Tensor]  # what an optimiser remembers
Before = Callable[[int], None]  # before a step, with its number


# --- training two networks against each other -----------------------------------------------------------------------


def frozen(net: nn.Module) -> nn.Module:
    return net.eval().requires_grad_(False)


def by_batch(net: nn.Module) -> nn.Module:
    """Return the network with batch norms that use their batch alone. Running statistics stay as they are."""
    for norm in batch_norms(net).values():
        norm.train()
        norm.momentum = 0.0
    return net


def learning(net: nn.Module, keep_statistics: bool = False) -> nn.Module:
    """Return the network in training mode. Its batch norms stay fixed if `keep_statistics` is set."""
    net.train().requires_grad_(True)
    if keep_statistics:
        for norm in batch_norms(net).values():
            norm.eval()
    return net


def take_turns(
    server: Server,
    G: nn.Module,
    f: nn.Module,
    L_gen: Callable[[], Tensor],
    L_md: Callable[[], Tensor],
    *,
    turns: int,
    steps: tuple[int, int],
    opts: tuple[Opt, Opt],
    begin: Callable[[], None] = lambda: None,
    moments: tuple[Moments, Moments] = ({}, {}),
    keep_statistics: bool = False,
    settle: tuple[Before, Before] | None = None,
    beside: Sequence[nn.Module] = (),
    anew: bool = False,
    mode: Callable[[nn.Module], nn.Module] = lambda net: net,
) -> tuple[Moments, Moments]:
    """Run so many turns, and return what the optimisers remember. A turn is `begin`, then steps of the generator
    against a fixed f, then steps of f.

    `settle` is called before each step, and draws all that the losses draw. Steps can then be recorded, and the
    recordings serve all turns. `beside` lists further networks that the losses run. `anew`: the optimisers begin anew
    in each turn. `mode` puts f into a mode of its own, after it was frozen or set to learn.
    """
    opt_G, opt_f = moments
    changed = [t for net in (G, f, *beside) for t in net.buffers()]
    of_G, of_f = dict[str, Any](), dict[str, Any]()
    if settle is not None:
        of_G = {"repeats": True, "before": settle[0], "kept": Kept(turns * steps[0], changed)}
        of_f = {"repeats": True, "before": settle[1], "kept": Kept(turns * steps[1], changed)}
    for _ in range(turns):
        begin()
        if anew:
            opt_G, opt_f = {}, {}
        mode(frozen(f))
        opt_G = server.optimise(list(G.parameters()), L_gen, steps=steps[0], opt=opts[0], moments=opt_G, **of_G)
        mode(learning(f, keep_statistics))
        opt_f = server.optimise(list(f.parameters()), L_md, steps=steps[1], opt=opts[1], moments=opt_f, **of_f)
    return opt_G, opt_f


# --- records --------------------------------------------------------------------------------------------------------


class HowMany(Down):
    pass


class LabelCounts(Up):
    n: Tensor = private("label_counts", via="data", unit="client")  # n_i^y, y = 1..C


class Candidates(Down):
    host: State  # the host's global model
    distilled: State


class Right(Up):
    n: Tensor = private("statistics", via="data", unit="client", depends="histogram")  # of validation records, by each


class Generators(Record):
    """The state that the server keeps of a distillation from one round to the next."""

    G: State
    average: State | None = None  # G~ of DFRD's Eq. 6; None before round 1, and where a method has none
    opt_G: Moments = dataclasses.field(default_factory=dict)  # Adam's moments
    opt_f: Moments = dataclasses.field(default_factory=dict)  # the global model's momentum


class Measured(Record):
    """Shares of a batch of synthetic data at the end of a round, as the teachers and the distilled model see it."""

    fidelity: float  # the method's own ensemble says y
    fidelity_mean: float  # the plain mean of the teachers' logits says y: it has not been told y
    epsilon: float  # rows that count for transferability under DFRD's mask
    L_div: float  # Eq. 4, `mean`
    agreement: float  # the global model says what the ensemble says
    kept_host: bool = False  # the guard threw the distilled model away


class Tuned(Record):
    host: Record
    nets: Generators
    before: State  # the host's global model before the distillation
    measured: Measured | None
    apart: State | None = None  # the distilled model, where it does not go back to the host


@torch.no_grad()
def diagnose(f: nn.Module, logits: Tensor, ensemble: Tensor, s: Tensor, y: Tensor, h: Tensor) -> Measured:
    """Return the shares for synthetic data s, which were made from h for the labels y.

    `logits` (teachers, rows, classes) are the teachers' answers to s, and `ensemble` is made from them.
    """
    student = frozen(f)(s).argmax(1)

    def share(rows: Tensor) -> float:
        return float(rows.float().mean())

    said = ensemble.argmax(1)
    return Measured(
        fidelity=share(said == y),
        fidelity_mean=share(logits.mean(0).argmax(1) == y),
        epsilon=share((student != y) & (said == y)),
        L_div=float(diversity(s, h)),
        agreement=share(student == said),
    )


# --- the method -----------------------------------------------------------------------------------------------------


# One budget for all three methods, chosen on the positive control (one teacher that has seen all classes) and, for
# fine-tuning, on FedAvg: see docs/results/dfrd.md.
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"I": 20, "B": 32, "width": 32},
    "fashion-mnist": {"I": 40},
}
ON_HOSTS: dict[str, dict[str, Any]] = {
    "digits": {"I": 5, "B": 32, "width": 32},
    "fashion-mnist": {"I": 5},
}
# What the public code of DFRD's authors settles for a distillation, and which they also give its rivals: rates,
# optimisers that begin anew in each turn, the generator, networks without running statistics, and a
# temperature of 10 with a generator that gets no gradient through f. 10 turns of 2 and 5 steps and d = 64 are its
# README's for DFRD; they serve all three, since the paper gives them one setting. Its parser has d = 100 for all, 5 and
# 1 steps for FedFTG, 1 and 5 for DENSE.
AUTHORS: dict[str, Any] = {
    "I": 10, "I_g": 2, "I_d": 5, "eta_g": 2e-4, "betas": (0.5, 0.999), "eta_d": 0.01, "momentum": 0.0, "decay": 1e-4,
    "optimisers": "turn", "net": "dcgan", "d": 64, "statistics": "batch",
    "T": 10.0, "tran": "student-detached",
}  # fmt: skip


class DataFree(Method):
    """A host, followed by a distillation of its clients' uploads into the global model."""

    single_replies: ClassVar[str] = "the uploaded models are the teachers of a distillation, each by itself"

    images_only: ClassVar[str] = "trains a generator of images on the server"
    on_digits: ClassVar[Mapping[str, Any]] = {
        "I": 5, "B": 32, "width": 32, "host": {"E": 10, "B": 16, "eta": 0.1},
    }  # fmt: skip
    quick: ClassVar[Mapping[str, Any]] = {"I": 1, "I_g": 1, "I_d": 1, "B": 16, "d": 8, "width": 8}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS

    host: Alone = Alone()
    I: int = 10  # turns of the two networks in a round  # noqa: E741
    I_g: int = 5  # steps of the generator in a turn
    I_d: int = 5  # steps of the global model in a turn
    B: int = 64  # synthetic batch
    eta_g: float = 1e-3  # learning rate of the generator, Adam
    eta_d: float = 0.01  # learning rate of the global model, SGD; 0.001 on a host
    betas: tuple[float, float] = (0.9, 0.999)  # of the generator's Adam
    momentum: float = 0.9  # of the global model
    decay: float = Field(0.0, ge=0)  # weight decay of the global model
    d: int = 100  # dimension of z
    width: int = 128  # channels of the generator
    net: Network = "table7"  # the generator
    statistics: Literal["synthetic", "host", "recalibrated", "batch"] = "synthetic"  # batch norm of the global model
    optimisers: Literal["kept", "reset", "turn"] = "kept"  # their state: from round to round, or turn to turn
    feedback: bool = True  # the distilled model goes back to the host, and to its clients
    guard: bool = False  # keep the host's model where the distilled one is worse on the clients' validation records

    def archs(self, model: str, clients: int) -> list[str]:
        return self.host.archs(model, clients)

    def server_arch(self, model: str) -> str | None:
        return self.host.server_arch(model)

    def counts_labels(self) -> bool:
        """Return whether clients are asked for their label counts."""
        raise NotImplementedError

    def operator(self) -> Merge:
        """Return how the generator takes its label."""
        raise NotImplementedError

    def distil(
        self, server: Server, f: nn.Module, teachers: list[nn.Module], n: Tensor, nets: Generators
    ) -> tuple[Generators, Measured]:
        """Train the global model f in place; n is (teachers, classes)."""
        raise NotImplementedError

    def generator(self, server: Server, w: State | None = None) -> Generator:
        make = NETWORKS[self.net]
        G = make(self.operator(), self.d, server.shape, server.classes, self.width).to(server.device)
        return (G if w is None else load(G, w)).train()

    def compete(
        self,
        server: Server,
        G: nn.Module,
        f: nn.Module,
        nets: Generators,
        L_gen: Callable[[], Tensor],
        L_md: Callable[[], Tensor],
        begin: Callable[[], None] = lambda: None,
        settle: tuple[Before, Before] | None = None,
        beside: Sequence[nn.Module] = (),
    ) -> Generators:
        """Carry out the turns of both networks in a round, and return the generator and the optimisers' state."""
        kept = self.optimisers == "kept"
        moments = (nets.opt_G if kept else {}, nets.opt_f if kept and self._host.goes_on() else {})
        opts = adam(self.eta_g, betas=self.betas), sgd(self.eta_d, momentum=self.momentum, weight_decay=self.decay)
        opt_G, opt_f = take_turns(
            server, G, f, L_gen, L_md, turns=self.I, steps=(self.I_g, self.I_d), opts=opts, begin=begin,
            moments=moments, keep_statistics=self.statistics == "host", settle=settle, beside=beside,
            anew=self.optimisers == "turn", mode=self.normed,
        )  # fmt: skip
        return Generators(state_of(G), opt_G=opt_G, opt_f=opt_f)

    def normed(self, net: nn.Module) -> nn.Module:
        """Return a network with batch norms in the mode that `statistics` demands of all networks."""
        return by_batch(net) if self.statistics == "batch" else net

    @property
    def _host(self) -> Host:
        return host_of(self.host)

    def init(self, server: Server) -> Tuned:
        s = self.host.init(server)
        return Tuned(s, Generators(state_of(self.generator(server))), cast(Any, s).w, None)

    def round(self, s: Tuned, server: Server, cohort: Cohort) -> Tuned:
        heard, host = Overheard(cohort, server), self._host
        after = host.train(s.host, server, heard)
        uploaded = heard.replies[0]
        n = torch.ones(len(uploaded), server.classes, device=server.device)
        if self.counts_labels():
            counts = cohort.ask(self.count_labels, HowMany())
            uploaded = {k: uploaded[k] for k in counts}
            n = torch.stack([r.n for r in counts.values()]).clamp_min(0)  # noise could have made one negative
        f = server.model(state=after.w)
        teachers = Many(self.normed(frozen(host.teacher(server, k, r.w))) for k, r in uploaded.items())
        nets, seen = self.distil(server, f, teachers, n, s.nets)
        self._check(server, f, nets)
        w = state_of(f, lambda _: after.w.keys())  # what the host sends of a model
        if self._recalibrates(w):
            w = settled(w, cohort.mean(self.measure, Query(State(w.parameters)), by="n").value.s)
        if self.guard and not self._better(cohort, after.w, w):
            w, seen = after.w, dataclasses.replace(seen, kept_host=True)
        if not self.feedback:
            return Tuned(host.settle(cast(Any, after), server, cohort), nets, after.w, seen, w)
        tuned = dataclasses.replace(cast(Any, after), w=w)
        return Tuned(host.settle(tuned, server, cohort), nets, after.w, seen)

    def _check(self, server: Server, f: nn.Module, nets: Generators) -> None:
        """Raise SettingError if a network holds NaN or infinity. The error names the likely cause and the remedy."""
        trained = {"global model": state_of(f), "generator": nets.G}
        lost = [name for name, w in trained.items() if not all(bool(t.isfinite().all()) for t in w.values())]
        if not lost:
            return
        rate = {"global model": "eta_d", "generator": "eta_g"}[lost[0]]
        why, other = f"with {rate} = {getattr(self, rate)} its steps grew without bound", ""
        if self.statistics == "host":
            why += ", on batch norms of the global model that keep the statistics of the host's average"
            other = ", or statistics=synthetic or batch, which normalise it by its own batches"
        raise SettingError(
            f"Round {server.t}: the {lost[0]} of {self.registered_name} holds NaN or infinity after the distillation: "
            f"{why}. Set {rate}=... lower{other}."
        )

    def count_labels(self, client: Client, msg: HowMany) -> LabelCounts:
        return LabelCounts(torch.bincount(client.y.cpu(), minlength=client.classes).float())

    def _recalibrates(self, w: State) -> bool:
        return self.statistics == "recalibrated" and bool(w.buffers) and not self._host.measures_statistics()

    def measure(self, client: Client, msg: Query) -> Statistics:
        net = client.server_model()
        return measured(client, load(net, {**state_of(net), **msg.w}), self.host.B)

    def _better(self, cohort: Cohort, host: State, distilled: State) -> bool:
        """Return whether the distilled model is right on at least as many validation records as the host's."""
        replies = cohort.ask(self.compare, Candidates(host, distilled))
        of_host, of_distilled = torch.stack([r.n for r in replies.values()]).sum(0).tolist()
        return bool(of_distilled >= of_host)

    def compare(self, client: Client, msg: Candidates) -> Right:
        x, y = client.validation
        net = client.server_model().eval()
        with torch.no_grad():
            right = [(load(net, w)(x).argmax(1) == y).sum() for w in (msg.host, msg.distilled)]
        return Right(torch.stack(right).float())

    def predictor(self, s: Tuned, server: Server) -> nn.Module | None:
        apart = None if s.apart is None else server.model(state=s.apart)
        return self.tested(self.host.predictor(cast(Any, s.host), server) if apart is None else apart)

    def tested(self, net: nn.Module | None) -> nn.Module | None:
        """Return a network as it is tested: by batch statistics where nobody has others."""
        return OnBatchStatistics(net) if self.statistics == "batch" and net is not None else net

    def global_points(self, s: Tuned, server: Server) -> dict[str, nn.Module]:
        return {"before distillation": cast(nn.Module, self.tested(server.model(state=s.before)))}

    def diagnostics(self, s: Tuned) -> dict[str, float]:
        own = {} if s.measured is None else {k: float(v) for k, v in dataclasses.asdict(cast(Any, s.measured)).items()}
        return {**self.host.diagnostics(s.host), **own}

    def personal(self, client: Client) -> nn.Module:
        return cast(nn.Module, self.tested(self.host.personal(client)))

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        own, ask = dict[tuple[str, str], Size | int](), 1  # the host's training is ask 0
        if self.counts_labels():
            own[("up", "LabelCounts.n")] = plan.tensor(plan.classes) * len(plan.replied(ask))
            ask += 1
        if self.statistics == "recalibrated" and plan.state().buffers and not self._host.measures_statistics():
            own |= statistics_traffic(plan, ask)
            ask += 1
        if self.guard:
            sent = plan.state() * len(plan.asked(ask))
            own |= {("down", "Candidates.host"): sent, ("down", "Candidates.distilled"): sent}
            own[("up", "Right.n")] = plan.tensor(2) * len(plan.replied(ask))
            ask += 1
        asks = None if plan.asks is None else [*plan.asks[:1], *plan.asks[ask:]]  # what the host itself asked
        return {**(self.host.traffic(dataclasses.replace(plan, asks=asks)) or {}), **own}


HOSTS: dict[str, type[Method]] = {
    "fedavg": FedAvg, "heterofl": HeteroFL, "feddropout": FederatedDropout, "fedrolex": FedRolex,
}  # fmt: skip


RHO = {"svhn": 10, "cifar10": 10, "cifar100": 5}  # DFRD, Section 4.3


def register_on_hosts(distillation: type[DataFree]) -> None:
    """Register a distillation on each host, as `fedrolex+dfrd` and the like, with other defaults.

    On a host it must not spoil the host's average: it takes steps a tenth as long as from scratch, and keeps the
    statistics if they are those of a network as wide as the average. On FedAvg, the preset `authors` keeps the
    distilled model from the clients.
    """
    for name, host in HOSTS.items():
        title = f"{host.__name__}And{distillation.__name__}"
        statistics = "synthetic" if issubclass(host, SubModels) else "host"
        kept: Any = (distillation.model_fields["statistics"].annotation, statistics)
        fields: dict[str, Any] = {"host": (host, host()), "statistics": kept, "eta_d": (float, 0.001)}
        cls = create_model(title, __base__=distillation, __module__=distillation.__module__, **fields)
        cls.on_digits = {**distillation.on_digits, "I": 2, "host": dict(host.on_digits)}
        cls.presets = {**distillation.presets, **ON_HOSTS}
        if name == "fedavg":  # clients of one architecture go on from the plain average
            cls.presets |= {"authors": {**cls.presets["authors"], "feedback": False}}
        if "rho" in host.model_fields:
            cls.presets |= {data: {**cls.presets.get(data, {}), "host": {"rho": rho}} for data, rho in RHO.items()}
        register(f"{name}+{distillation.registered_name}", tables="DFRD")(cls)
