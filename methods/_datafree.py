"""Server-side distillation without data, on top of a host: what `dfrd`, `fedftg` and `dense` share.

A host is a method whose clients upload trained models: the replies to its first ask have a field `w`, and so has its
state (the global model). The distillation hears those replies, takes the uploaded models as teachers, and puts the
global model that it has trained back into the host's state. Hosts are composed, not copied:

    dfrd             host = alone: every client trains by itself, the global model begins at random  ("data-free")
    fedavg+dfrd      host = fedavg; likewise heterofl+, feddropout+, fedrolex+                       ("fine-tuning")

Local training belongs to the host, and so do its hyper-parameters: `--set 'host={E=5, eta=0.05}'`, in a file
`set = { host = { E = 5 }, alpha = 0.5 }`. Label counts travel in an ask of their own, after the host's; a client that
fails there is averaged, but is no teacher.

Two more functions of a host are used where it has them: `teacher(server, k, w)`, which makes the network from what
client k uploaded, and `train` with `settle`, which split its round so that what has to come last (HeteroFL's query of
statistics) comes after the distillation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import create_model
from torch import Tensor, nn

from fedaudit import Down, Method, Opt, Record, State, Up, adam, ce, load, private, register, sgd, state_of
from fedaudit.methods._optimiser import WithOptimiser
from fedaudit.methods.fedavg import FedAvg
from fedaudit.methods.feddropout import FederatedDropout
from fedaudit.methods.fedrolex import FedRolex
from fedaudit.methods.heterofl import HeteroFL

Merge = Literal["mul", "add", "cat", "ncat", "none"]
Mask = Literal["dfrd", "fedftg", "dense"]
Ensemble = Callable[[Tensor, Tensor], Tensor]  # synthetic data, labels: the teachers' weighted logits


# --- the generator --------------------------------------------------------------------------------------------------


class Generator(nn.Module):
    """s = G(h, w) with h = o(z, y): a linear layer, two transposed convolutions, images in [-1, 1].

    DFRD's own is in an appendix that we do not have; this is the one that FedZGE gives in its Table 7 as common to the
    data-free methods. It is always used with batch statistics, also as an average over rounds, so the running ones do
    not matter.
    """

    def __init__(self, merge: Merge, d: int, shape: tuple[int, int, int], classes: int, width: int):
        super().__init__()
        channels, height, breadth = shape
        self.merge, self.shape, self.classes = merge, shape, classes
        self.E = nn.Embedding(classes, d) if merge in ("mul", "add", "cat") else None
        inputs = {"cat": 2 * d, "ncat": d + classes}.get(merge, d)
        self.small = (width, -(-height // 4), -(-breadth // 4))
        self.project = nn.Linear(inputs, self.small[0] * self.small[1] * self.small[2])
        self.layers = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
            nn.BatchNorm2d(width // 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, channels, 3, 1, 1),
            nn.BatchNorm2d(channels),
            nn.Tanh(),
        )

    def h(self, z: Tensor, y: Tensor) -> Tensor:
        """The merge operator o(z, y) of DFRD, Section 4.3."""
        match self.merge:
            case "mul":
                return z * self.E(y)  # type: ignore[misc]
            case "add":
                return z + self.E(y)  # type: ignore[misc]
            case "cat":
                return torch.cat([z, self.E(y)], 1)  # type: ignore[misc]
            case "ncat":
                classes = torch.arange(self.classes, device=y.device)  # one_hot would wait for the GPU to check y
                return torch.cat([z, (y[:, None] == classes).to(z)], 1)
            case "none":
                return z

    def forward(self, h: Tensor) -> Tensor:
        s = self.layers(self.project(h).unflatten(1, self.small))
        return s[..., : self.shape[1], : self.shape[2]]  # sides that 4 does not divide were rounded up


# --- losses ---------------------------------------------------------------------------------------------------------


def weighted_logits(teachers: Sequence[nn.Module], tau: Tensor) -> Ensemble:
    """sum_i tau_{i,y} f_i(s, theta_i), with tau (teachers, classes)."""
    return lambda s, y: (tau[:, y, None] * torch.stack([f(s) for f in teachers])).sum(0)


def epsilon(mask: Mask, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """Which rows count for transferability: this paper's (diamond), FedFTG's (triangle), DENSE's (nabla)."""
    if mask == "fedftg":
        return torch.ones_like(y, dtype=student.dtype)
    f, ensemble = student.argmax(1), teacher.argmax(1)
    counts = (f != y) & (ensemble == y) if mask == "dfrd" else f != ensemble
    return counts.to(student.dtype)


def diversity(s: Tensor, h: Tensor, metric: Literal["l2", "mean"] = "l2") -> Tensor:
    """DFRD, Eq. 4: exp(-sum_{j,k} ||s_j - s_k|| ||h_j - h_k|| / B^2)."""
    s, h = s.flatten(1), h.flatten(1)
    if metric == "mean":  # mean absolute difference: does not grow with the number of pixels
        apart = torch.cdist(s, s, p=1) / s.shape[1] * torch.cdist(h, h, p=1) / h.shape[1]
    else:
        exactly = "donot_use_mm_for_euclid_dist"  # the quick way has no gradient where two rows are equal
        apart = torch.cdist(s, s, compute_mode=exactly) * torch.cdist(h, h, compute_mode=exactly)
    return torch.exp(-apart.mean())


# --- labels ---------------------------------------------------------------------------------------------------------


def dynamic_weights(n: Tensor) -> Tensor:
    """tau_{i,y} = n_i^y / n_S^y from counts (clients, classes); 0 where nobody holds y (DFRD, Section 3.2)."""
    return n / n.sum(0).clamp_min(torch.finfo(n.dtype).tiny)


def label_distribution(n: Tensor) -> Tensor:
    """p(y) = n_S^y / sum_y n_S^y."""
    held = n.sum(0)
    return held / held.sum() if bool(held.sum() > 0) else torch.full_like(held, 1 / len(held))


class Sampler:
    """z ~ N(0, I) and y ~ p(y), from one generator.

    Labels by inversion: torch.multinomial has no deterministic form on GPUs.
    """

    def __init__(self, p: Tensor, d: int, B: int, rng: torch.Generator):
        self.d, self.B, self.rng = d, B, rng
        cumulated = p.double().cpu().cumsum(0)
        self.cumulated = (cumulated / cumulated[-1]).to(rng.device)

    def __call__(self) -> tuple[Tensor, Tensor]:
        device = self.rng.device
        z = torch.randn(self.B, self.d, generator=self.rng, device=device)
        u = torch.rand(self.B, generator=self.rng, device=device, dtype=torch.float64)
        return z, torch.searchsorted(self.cumulated, u, right=True)


# --- training two networks against each other -----------------------------------------------------------------------


def frozen(net: nn.Module) -> nn.Module:
    return net.eval().requires_grad_(False)


def held(opt: Opt, net: nn.Module) -> Opt:
    """An optimiser that keeps its state over several calls of server.optimise, because two networks take turns."""
    optimiser = opt.build(list(net.parameters()))
    return Opt(cast(Any, lambda parameters: optimiser))


def take_turns(
    server: Any,
    G: nn.Module,
    f: nn.Module,
    L_gen: Callable[[], Tensor],
    L_md: Callable[[], Tensor],
    *,
    turns: int,
    steps: tuple[int, int],
    opts: tuple[Opt, Opt],
    begin: Callable[[], None] = lambda: None,
) -> None:
    """So many times: `begin`, steps of the generator against a fixed f, then steps of f."""
    opt_g, opt_f = held(opts[0], G), held(opts[1], f)
    for _ in range(turns):
        begin()
        frozen(f)
        server.optimise(list(G.parameters()), L_gen, steps=steps[0], opt=opt_g)
        f.train().requires_grad_(True)
        server.optimise(list(f.parameters()), L_md, steps=steps[1], opt=opt_f)


# --- hosts ----------------------------------------------------------------------------------------------------------


class Begin(Down):
    w: State | None  # the global model, where clients start from it


class Uploaded(Up):
    w: State = private("weights", via="model", unit="client")


class Given(Record):
    w: State


class Alone(WithOptimiser):
    """The host of the data-free mode: clients train by themselves and upload; nothing is averaged.

    What goes down is not said. In the paper's Table 1 L.acc hardly depends on G.acc in this mode, so clients go on from
    their own models (`start = "local"`). FedZGE's Table 8 bills the global model to each client in each round:
    `start = "global"`, where those of another architecture than the server's receive it and go on from their own.
    """

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    start: Literal["local", "global"] = "local"

    def init(self, server):
        return Given(state_of(server.model()))

    def round(self, s, server, cohort):
        cohort.ask(self.client_update, Begin(s.w if self.start == "global" else None))
        return s

    def client_update(self, client, msg):
        if msg.w is not None and {n: t.shape for n, t in msg.w.items()} == {
            n: t.shape for n, t in client.model.state_dict().items()
        }:
            load(client.model, msg.w)
        client.fit(ce, epochs=self.E, batch=self.B, opt=self.optimiser(self.eta))
        return Uploaded(state_of(client.model))

    def predictor(self, s, server):
        return load(server.model(), s.w)

    def traffic(self, plan):
        sent = plan.state() * len(plan.asked(0)) if self.start == "global" else 0
        return {("down", "Begin.w"): sent, ("up", "Uploaded.w"): sum((plan.state(k) for k in plan.replied(0)), 0)}


class Overheard:
    """A cohort that keeps what it was answered: a host's replies are the distillation's teachers."""

    def __init__(self, cohort: Any):
        self.cohort, self.replies = cohort, list[dict[int, Any]]()

    @property
    def ids(self) -> list[int]:
        return self.cohort.ids

    def ask(self, fn: Any, message: Any) -> dict[int, Any]:
        self.replies.append(self.cohort.ask(fn, message))
        return self.replies[-1]


# --- the method -----------------------------------------------------------------------------------------------------


class HowMany(Down):
    pass


class LabelCounts(Up):
    n: Tensor = private("label_counts", via="data", unit="client")  # n_i^y, y = 1..C


class Tuned(Record):
    host: Record
    nets: dict[str, State]  # generators


class DataFree(Method):
    """A host, then a distillation of what its clients uploaded into the global model."""

    quick: ClassVar[Mapping[str, Any]] = {"I": 1, "I_g": 1, "I_d": 1, "B": 16, "d": 8, "width": 8}

    host: Alone = Alone()
    I: int = 10  # turns of the two networks in a round  # noqa: E741
    I_g: int = 5  # steps of the generator in a turn
    I_d: int = 5  # steps of the global model in a turn
    B: int = 64  # synthetic batch
    eta_g: float = 0.01  # learning rate of the generator, Adam
    eta_d: float = 0.01  # learning rate of the global model, SGD
    momentum: float = 0.9  # of the global model
    d: int = 100  # dimension of z
    width: int = 128  # channels of the generator
    keep_statistics: bool = False  # put the host's batch-norm statistics back after the distillation

    def archs(self, model: str, clients: int) -> list[str]:
        return self.host.archs(model, clients)

    def server_arch(self, model: str) -> str | None:
        return self.host.server_arch(model)

    def counts_labels(self) -> bool:
        """Whether clients are asked for their label counts."""
        raise NotImplementedError

    def operator(self) -> Merge:
        """How the generator takes its label."""
        raise NotImplementedError

    def distil(
        self, server: Any, f: nn.Module, teachers: list[nn.Module], n: Tensor, nets: dict[str, State]
    ) -> dict[str, State]:
        """Train the global model f in place; n is (teachers, classes). Returns the generators."""
        raise NotImplementedError

    def generator(self, server: Any, w: State | None = None) -> Generator:
        G = Generator(self.operator(), self.d, server.shape, server.classes, self.width).to(server.device)
        return (G if w is None else load(G, w)).train()

    def compete(self, server: Any, G: nn.Module, f: nn.Module, *losses: Callable[[], Tensor], **options: Any) -> None:
        opts = adam(self.eta_g), sgd(self.eta_d, momentum=self.momentum)
        take_turns(server, G, f, *losses, turns=self.I, steps=(self.I_g, self.I_d), opts=opts, **options)

    def init(self, server):
        return Tuned(self.host.init(server), {"G": state_of(self.generator(server))})

    def round(self, s, server, cohort):
        heard, host = Overheard(cohort), cast(Any, self.host)
        after = getattr(host, "train", host.round)(s.host, server, heard)
        uploaded = heard.replies[0]
        n = torch.ones(len(uploaded), server.classes, device=server.device)
        if self.counts_labels():
            counts = cohort.ask(self.count_labels, HowMany())
            uploaded = {k: uploaded[k] for k in counts}
            n = torch.stack([r.n for r in counts.values()]).clamp_min(0)  # noise could have made one negative
        f = load(server.model(), after.w)
        teachers = [frozen(self.teacher(server, k, r.w)) for k, r in uploaded.items()]
        nets = self.distil(server, f, teachers, n, s.nets)
        if self.keep_statistics:
            load(f, {**state_of(f), **{name: after.w[name] for name in after.w.buffers}})
        after = dataclasses.replace(after, w=state_of(f))
        return Tuned(host.settle(after, server, cohort) if hasattr(host, "settle") else after, nets)

    def teacher(self, server: Any, k: int, w: State) -> nn.Module:
        if hasattr(self.host, "teacher"):
            return cast(Any, self.host).teacher(server, k, w)
        return load(server.model(server.arch(k)), w)

    def count_labels(self, client, msg):
        return LabelCounts(torch.bincount(client.y.cpu(), minlength=client.classes).float())

    def predictor(self, s, server):
        return self.host.predictor(s.host, server)

    def personal(self, client):
        return self.host.personal(client)

    def traffic(self, plan):
        if not self.counts_labels():
            return self.host.traffic(plan)
        inner, ask = plan, 1
        if plan.asks is not None:  # the counts come after the host's own asks, but before it settles
            ask = 1 if hasattr(self.host, "settle") else len(plan.asks) - 1
            inner = dataclasses.replace(plan, asks=[*plan.asks[:ask], *plan.asks[ask + 1 :]])
        counts = plan.tensor(plan.classes) * len(plan.replied(ask))
        return {**(self.host.traffic(inner) or {}), ("up", "LabelCounts.n"): counts}


HOSTS: dict[str, type[Method]] = {
    "fedavg": FedAvg, "heterofl": HeteroFL, "feddropout": FederatedDropout, "fedrolex": FedRolex,
}  # fmt: skip


RHO = {"svhn": 10, "cifar10": 10, "cifar100": 5}  # DFRD, Section 4.3


def register_on_hosts(distillation: type[DataFree]) -> None:
    """`fedrolex+dfrd` and the like: the registered distillation with another default host."""
    for name, host in HOSTS.items():
        title = f"{host.__name__}And{distillation.__name__}"
        cls = create_model(title, __base__=distillation, __module__=distillation.__module__, host=(host, host()))
        if "rho" in host.model_fields:
            presets = {data: {**distillation.presets.get(data, {}), "host": {"rho": rho}} for data, rho in RHO.items()}
            cls.presets = {**distillation.presets, **presets}
        register(f"{name}+{distillation.registered_name}")(cls)
