"""Runs fedaudit's baselines beside the same methods of PFLlib and HtFLlib, and says how far their numbers are apart.

    python benchmarks/studies/parity/parity.py --pfllib CHECKOUT --htfllib CHECKOUT --json parity.json
    python benchmarks/studies/parity/parity.py --table parity.json

Three clients of unequal size and skewed classes on digits, float64, mini-batches, one to three rounds. fedaudit runs as
it always does; the libraries' own client and server classes then get its records, first weights, batches and draws
(`reference_library.py`). The largest difference of any number is taken over every client's model, what it uploads, and
the server's state, after each round. A library that deviates from the paper, or from fedaudit, is run twice: as it is,
and mended, where the table says in which point.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_library import Given, Instead, Library, Split, weights
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "helpers" / "retelling"))

from by_hand import Played, drawing, epoch, played, rng  # noqa: E402

LIMIT = 1e-12  # a mended reference and fedaudit differ by no more than this
B, ETA = 16, 0.05  # batch size and local learning rate of both


@dataclass(frozen=True)
class Row:
    """One comparison: fedaudit's method with its settings, the library's, and how far they are apart."""

    method: str
    settings: str  # of fedaudit
    library: str
    reference: str  # "as it is", or what was mended
    compared: str
    rounds: int
    difference: float
    equal: bool  # whether it is meant to be nothing but rounding


@dataclass
class Checkouts:
    pfllib: Path
    htfllib: Path


class Apart:
    """Collects the largest difference."""

    def __init__(self) -> None:
        self.most = 0.0

    def __call__(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
        missing = ours.keys() ^ theirs.keys()
        assert not missing, f"tensors of one side only: {sorted(missing)}"
        for name in ours:
            gap = (ours[name].double() - torch.as_tensor(theirs[name]).double()).abs()
            self.most = max(self.most, float(gap.max()) if gap.numel() else 0.0)


def ran(method: str, rounds: int, model: str = "cnn@0.25", **options: Any) -> Played:
    """fedaudit's run, with every message and state kept."""
    with tempfile.TemporaryDirectory() as folder:
        return played(method, Path(folder), rounds=rounds, model=model, set=options)


def given(run: Played, shared: Mapping[str, Tensor] | None = None) -> Given:
    """Return what the library gets of the run. `shared`: the first weights of a model that travels beside the own."""

    def batches(k: int, t: int) -> Iterator[Any]:
        order = rng(f"client {k}", "fit 1", t)
        while True:
            yield epoch(order, len(run.rows[k][0]), B)

    def shuffled(t: int, n: int) -> Iterator[Any]:
        order = rng("server", "fit 1", t)
        while True:
            yield epoch(order, n, B)

    def model(k: int, is_global: bool) -> nn.Module:
        return Split(run.net(shared if is_global and shared is not None else run.first[k]))

    return Given(run.rows, batches, model, shuffled)


def of_parameters(w: Any) -> dict[str, Tensor]:
    return dict(getattr(w, "parameters", w))


# --- PFLlib: whole models travel ------------------------------------------------------------------------------------


def whole_models(
    at: Checkouts,
    method: str,
    names: tuple[str, str, str],
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    rounds: int = 3,
    mend: Callable[[Library], None] = lambda library: None,
    begin: Callable[[Any], None] = lambda server: None,
    finish: Callable[[Any], None] = lambda server: server.aggregate_parameters(),
    sent: Callable[[Any], Any] = lambda reply: reply.w,
    state: Callable[[Any], Any] = lambda s: s.w,
    check: Callable[[Apart, Any, Any], None] = lambda apart, server, s: None,
) -> float:
    """Play the rounds of a method of PFLlib beside fedaudit's, and return the largest difference."""
    run = ran(method, rounds, **options)
    start = state(run.states[0])
    client, server, cls = names
    with Library(at.pfllib, given(run)).imported(f"clients.{client}", f"servers.{server}") as library:
        mend(library)
        model = Split(run.net(start))
        values = {"model": model, "num_classes": 10, "batch_size": B, "local_epochs": 1, "local_learning_rate": ETA}
        theirs = library.server(server, cls, **{**values, **arguments})
        apart = Apart()
        for t in range(1, rounds + 1):
            library.given.t = t
            theirs.send_models()
            begin(theirs)
            for k, c in enumerate(theirs.clients):
                c.train()
                apart(of_parameters(sent(run.up(t)[k])), weights(c.model))
            theirs.receive_models()
            finish(theirs)
            apart(of_parameters(state(run.states[t])), weights(theirs.global_model))
            check(apart, theirs, run.states[t])
    return apart.most


LOCAL = {"E": 1, "B": B, "eta": ETA}


def fedavg(at: Checkouts) -> Iterator[Row]:
    found = whole_models(at, "fedavg", ("clientavg", "serveravg", "FedAvg"), LOCAL, {})
    yield Row("fedavg", "", "PFLlib", "as it is", "uploads, global model", 3, found, True)


def fedprox(at: Checkouts) -> Iterator[Row]:
    names = ("clientprox", "serverprox", "FedProx")
    found = whole_models(at, "fedprox", names, {**LOCAL, "mu": 0.3}, {"mu": 0.3})
    yield Row("fedprox", "mu 0.3", "PFLlib", "as it is", "uploads, global model", 3, found, True)


def moon(at: Checkouts) -> Iterator[Row]:
    both = {"mu": 1.5, "tau": 0.5}
    found = whole_models(at, "moon", ("clientmoon", "servermoon", "MOON"), {**LOCAL, **both}, both)
    yield Row("moon", "mu 1.5", "PFLlib", "as it is", "uploads, global model", 3, found, True)


def fedntd(at: Checkouts) -> Iterator[Row]:
    names, both = ("clientntd", "serverntd", "FedNTD"), {"beta": 1.5, "tau": 1.0}

    def by_records(server: Any) -> None:
        server.add_parameters = types.MethodType(type(server).__mro__[1].add_parameters, server)  # FedAvg's
        server.aggregate_parameters()

    def as_it_is(server: Any) -> None:
        server.aggregate_parameters()

    for finish, what, equal in (
        (as_it_is, "as it is: all clients weigh alike", False),
        (by_records, "averaged by records", True),
    ):
        found = whole_models(at, "fedntd", names, {**LOCAL, **both}, both, finish=finish)
        yield Row("fedntd", "beta 1.5", "PFLlib", what, "uploads, global model", 3, found, equal)


def feddyn(at: Checkouts) -> Iterator[Row]:
    def squared(library: Library) -> None:
        library.mend("clientdyn", torch=Instead(torch, norm=lambda v, p: v.square().sum()))

    def play(mend: Callable[[Library], None]) -> float:
        def both(server: Any) -> None:
            server.update_server_state()
            server.aggregate_parameters()

        options, names = {**LOCAL, "alpha": 0.3}, ("clientdyn", "serverdyn", "FedDyn")
        return whole_models(
            at, "feddyn", names, options, {"alpha": 0.3}, mend=mend, finish=both, sent=lambda r: r.theta,
            state=lambda s: s.theta,
        )  # fmt: skip

    what = "uploads, global model"
    yield Row("feddyn", "alpha 0.3", "PFLlib", "as it is", what, 3, play(lambda library: None), False)
    yield Row("feddyn", "alpha 0.3", "PFLlib", "penalty squared, as in the paper", what, 3, play(squared), True)


def scaffold(at: Checkouts) -> Iterator[Row]:
    def control(apart: Apart, server: Any, s: Any) -> None:
        names = [name for name, _ in server.global_model.named_parameters()]
        ours = {name.replace("encoder.", "base.").replace("classifier.", "head."): t for name, t in s.c.items()}
        apart(ours, dict(zip(names, server.global_c, strict=True)))

    found = whole_models(
        at, "scaffold", ("clientscaffold", "serverscaffold", "SCAFFOLD"),
        {"E": 2, "B": B, "eta_l": ETA, "eta_g": 0.7}, {"server_learning_rate": 0.7, "local_epochs": 2},
        sent=lambda r: r.y, state=lambda s: s.x, check=control,
    )  # fmt: skip
    yield Row("scaffold", "eta_g 0.7", "PFLlib", "as it is", "uploads, global model, c", 3, found, True)


def perfedavg(at: Checkouts) -> Iterator[Row]:
    tau = 4

    def pairs(library: Library) -> None:
        """PFLlib cuts a batch of twice the size in two; here the two are the run's, of their own sizes."""

        def load_train_data(client: Any, batch_size: int | None = None) -> Iterator[Any]:
            x, y = library.given.rows[client.id]
            drawn = library.given.batches(client.id, library.given.t)
            flat = (b for of_epoch in drawn for b in of_epoch)  # type: ignore[attr-defined]
            for _ in range(tau):
                D, D_2 = next(flat), next(flat)
                client.batch_size = len(D)
                yield x[torch.cat([D, D_2])], y[torch.cat([D, D_2])]

        library.modules["clientperavg"].Client.load_train_data = load_train_data

    def alike(server: Any) -> None:
        for client in server.clients:
            client.train_samples = 1

    options = {"tau": tau, "B": B, "alpha": ETA, "beta": ETA, "adapt": 0}
    names = ("clientperavg", "serverperavg", "PerAvg")
    for begin, what, equal in (
        (lambda server: None, "one training a round; by records", False),
        (alike, "one training a round; all clients alike, as in the paper", True),
    ):
        found = whole_models(at, "perfedavg", names, options, {}, mend=pairs, begin=begin)
        yield Row("perfedavg", "FO", "PFLlib", what, "uploads, global model", 3, found, equal)


def drawn_noise(order: torch.Generator, n: int, d: int, p: Tensor) -> tuple[Tensor, Tensor]:
    """Noise and labels as fedaudit's generators draw them: uniform noise, labels by inversion."""
    z = torch.rand(n, d, generator=order)
    total = p.double().cumsum(0)
    u = torch.rand(n, generator=order, dtype=torch.float64)
    return z, torch.searchsorted(total / total[-1], u, right=True)


GENERATOR = {"I_g": 3, "B_g": 12, "eta_g": 0.01, "B_hat": 10, "d": 8, "hidden": 16, "noise": "uniform"}
SAMPLED = {**LOCAL, **GENERATOR, "teacher": "samples", "weights": "samples"}
GENERATES = {"noise_dim": 8, "hidden_dim": 16, "generator_learning_rate": 0.01, "server_epochs": 3}


class Draws:
    """Hands the library the noise and labels that fedaudit drew, one pair for each call of its generator."""

    def __init__(self, run: Played) -> None:
        self.run, self.order, self.z, self.y = run, None, torch.empty(0), torch.empty(0)

    def of_client(self, k: int, t: int) -> None:
        p = self.run.down(t)[k].p
        self.order = None
        self.z, self.y = drawn_noise(rng(f"client {k}", "epsilon and y", t), 10, 8, p)

    def of_server(self, t: int) -> None:
        self.order, self.p = rng("server", "epsilon and y", t), self.run.states[t].p

    def labels(self, *_: Any) -> Any:
        if self.order is not None:
            self.z, self.y = drawn_noise(self.order, 12, 8, self.p)
        return self.y.numpy()

    def noise(self, *_: Any, **__: Any) -> Tensor:
        return self.z

    def into(self, library: Library, client: str, server: str) -> None:
        numpy = Instead(np, random=Instead(np.random, choice=self.labels))
        library.mend(client, np=numpy)
        library.mend(server, np=numpy, torch=Instead(torch, rand=self.noise))


LAYERS = {"fc1.0": "layers.0", "fc1.1": "layers.1", "fc": "layers.3"}  # of a generator, theirs and ours


def generators(apart: Apart, ours: Mapping[str, Tensor], G: nn.Module) -> None:
    """Compare two generators, but for the bias before the batch norm, which takes it out again: its gradient is nothing
    but rounding, and Adam divides it by its own size."""
    named = {f"{LAYERS[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": t for name, t in G.state_dict().items()}
    left = ("layers.0.bias", "layers.1.running_mean", "layers.1.num_batches_tracked")  # the mean holds that bias
    apart(*({name: t for name, t in of.items() if name not in left} for of in (ours, named)))


def load_latents(G: nn.Module, w: Mapping[str, Tensor]) -> None:
    G.load_state_dict(
        {f"{theirs}.{n}": w[f"{ours}.{n}"] for theirs, ours in LAYERS.items() for n in parts_of(G, theirs)}
    )


def parts_of(G: nn.Module, layer: str) -> list[str]:
    return list(G.get_submodule(layer).state_dict())


def fedgen(at: Checkouts) -> Iterator[Row]:
    """One round: from the second on PFLlib goes on with its Adam, and fedaudit begins a new one."""
    for evaluated in (False, True):
        run = ran("fedgen", 1, **SAMPLED)
        draws, apart = Draws(run), Apart()
        library = Library(at.pfllib, given(run))
        with library.imported("clients.clientgen", "servers.servergen"):
            values = {"num_classes": 10, "batch_size": B, "local_epochs": 1, "local_learning_rate": ETA, **GENERATES}
            server = library.server("servergen", "FedGen", model=Split(run.net(run.states[0].theta)), **values)
            draws.into(library, "clientgen", "servergen")
            load_latents(server.generative_model, run.states[0].w)
            server.send_models()
            for k, c in enumerate(server.clients):
                draws.of_client(k, 1)
                c.generative_model = server.generative_model.eval() if evaluated else server.generative_model.train()
                c.train()
                apart(of_parameters(run.up(1)[k].theta), weights(c.model))
            server.receive_models()
            draws.of_server(1)
            server.train_generator()
            server.aggregate_parameters()
            apart(of_parameters(run.states[1].theta), weights(server.global_model))
            generators(apart, run.states[1].w, server.generative_model)
        what = "clients run the generator in evaluation mode" if evaluated else "as it is"
        compared = "uploads, global model, generator"
        yield Row("fedgen", "teacher samples, noise uniform", "PFLlib", what, compared, 1, apart.most, evaluated)


# --- HtFLlib: models stay, parts or vectors travel ------------------------------------------------------------------


SERVES = {"num_classes": 10, "batch_size": B, "local_epochs": 1, "local_learning_rate": ETA}


def head_of(w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("classifier."): t for name, t in w.items()}


def put_head(library: Library, head: nn.Module, w: Mapping[str, Tensor]) -> None:
    head.load_state_dict(head_of(w))
    library.items.save(head, "Server", "head")


def own_models(apart: Apart, library: Library, run: Played, t: int) -> None:
    for k in run.rows:
        apart(run.model(k, t) or {}, weights(library.items.kept[f"Client_{k}", "model"]))


def lgfedavg(at: Checkouts) -> Iterator[Row]:
    run, apart = ran("lgfedavg", 3, **LOCAL), Apart()
    library = Library(at.htfllib, given(run))
    with library.imported("clients.clientlg", "servers.serverlg"):
        server = library.server("serverlg", "LG_FedAvg", **SERVES)
        put_head(library, library.items.load("Server", "head"), run.states[0].theta_g)
        for t in (1, 2, 3):
            library.given.t = t
            server.send_parameters()
            for c in server.clients:
                c.train()
            server.receive_ids()
            server.aggregate_parameters()
            own_models(apart, library, run, t)
            apart(head_of(run.states[t].theta_g), library.items.kept["Server", "head"].state_dict())
    yield Row("lgfedavg", "", "HtFLlib", "as it is", "clients' models, head", 3, apart.most, True)


def by_class(vectors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    return {str(c): vector for c, vector in sorted(vectors.items()) if not isinstance(vector, list)}


def fedgh(at: Checkouts) -> Iterator[Row]:
    run, apart = ran("fedgh", 3, **LOCAL, S=2, B_s=B, eta_s=0.1), Apart()
    library = Library(at.htfllib, given(run))
    with library.imported("clients.clientgh", "servers.servergh"):
        server = library.server("servergh", "FedGH", server_learning_rate=0.1, server_epochs=2, **SERVES)
        put_head(library, library.items.load("Server", "head"), run.states[0].theta)
        for t in (1, 2, 3):
            library.given.t = t
            server.send_parameters()
            for k, c in enumerate(server.clients):
                c.train()
                c.collect_protos()
                apart(by_class(run.up(t)[k].V), by_class(library.items.kept[c.role, "protos"]))
            server.receive_protos()
            server.train_head()
            own_models(apart, library, run, t)
            apart(head_of(run.states[t].theta), library.items.kept["Server", "head"].state_dict())
    yield Row("fedgh", "S 2", "HtFLlib", "as it is", "clients' models, class means, head", 3, apart.most, True)


def fedproto(at: Checkouts) -> Iterator[Row]:
    run = ran("fedproto", 3, **LOCAL, lam=2.0)
    for after in (False, True):
        apart, library = Apart(), Library(at.htfllib, given(run))
        with library.imported("clients.clientproto", "clients.clientgh", "servers.serverproto"):
            server = library.server("serverproto", "FedProto", lamda=2.0, **SERVES)
            for t in (1, 2, 3):
                library.given.t = t
                for k, c in enumerate(server.clients):
                    c.train()
                    if after:  # by FedGH's client of the same library
                        library.modules["clientgh"].clientGH.collect_protos(c)
                    apart(by_class(run.up(t)[k].C), by_class(library.items.kept[c.role, "protos"]))
                server.receive_protos()
                own_models(apart, library, run, t)
                apart(by_class(run.states[t].C), by_class(library.items.kept["Server", "global_protos"]))
        what = "prototypes of the trained model, as in the paper" if after else "as it is"
        compared = "clients' models, prototypes, their means"
        yield Row("fedproto", "lambda 2", "HtFLlib", what, compared, 3, apart.most, after)


def fedtgp(at: Checkouts) -> Iterator[Row]:
    width = 16
    options = {**LOCAL, "lam": 2.0, "S": 2, "B_s": B, "eta_s": ETA, "margin": "nearest", "hidden": width}
    run = ran("fedtgp", 3, **options)
    names = {"P": "embedings.weight", "F.0": "middle.0.0", "F.2": "fc"}

    def theirs(w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            names.get(name) or f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": t for name, t in w.items()
        }

    for after in (False, True):
        apart, library = Apart(), Library(at.htfllib, given(run))
        with library.imported("clients.clienttgp", "servers.servertgp"):
            more = {"lamda": 2.0, "server_epochs": 2, "margin_threthold": 100.0, "feature_dim": width}
            server = library.server("servertgp", "FedTGP", **more, **SERVES)
            library.items.kept["Server", "TGP"].load_state_dict(theirs(run.states[0].net))
            for t in (1, 2, 3):
                library.given.t = t
                for k, c in enumerate(server.clients):
                    c.train()
                    if after:
                        c.collect_protos()
                    apart(by_class(run.up(t)[k].C), by_class(library.items.kept[c.role, "protos"]))
                server.receive_protos()
                server.update_TGP()
                own_models(apart, library, run, t)
                apart(theirs(run.states[t].net), library.items.kept["Server", "TGP"].state_dict())
        what = "prototypes of the trained model, as in the paper" if after else "as it is: of the model before training"
        compared = "clients' models, prototypes, the server's network"
        yield Row("fedtgp", "margin nearest", "HtFLlib", what, compared, 3, apart.most, after)


def fml(at: Checkouts) -> Iterator[Row]:
    both = {"alpha": 0.5, "beta": 0.7}
    libraries_form = {"teaching": "joint", "clip": 10.0}

    def as_the_paper(library: Library, server: Any) -> None:
        library.mend("clientfml", F=Instead(F, softmax=lambda z, dim: torch.softmax(z, dim).detach()))
        for client in server.clients:
            client.KL = nn.KLDivLoss(reduction="batchmean")

    for settings, extra, mended in (
        ("teaching joint, clip 10", libraries_form, False),
        ("default", {}, False),
        ("default", {}, True),
    ):
        run, apart = ran("fml", 3, **LOCAL, **both, **extra), Apart()
        library = Library(at.htfllib, given(run, shared=run.states[0].w))
        with library.imported("clients.clientfml", "servers.serverfml"):
            server = library.server("serverfml", "FML", global_model="given", **both, **SERVES)
            if mended:
                as_the_paper(library, server)
            for t in (1, 2, 3):
                library.given.t = t
                for k, c in enumerate(server.clients):
                    c.train()
                    apart(run.up(t)[k].w, weights(library.items.kept[c.role, "global_model"]))
                server.receive_ids()
                server.aggregate_parameters()
                own_models(apart, library, run, t)
                apart(run.states[t].w, weights(library.items.kept["Server", "global_model"]))
        what = "divergence summed over classes, other network fixed" if mended else "as it is"
        compared = "clients' models, uploads, shared model"
        yield Row("fml", settings, "HtFLlib", what, compared, 3, apart.most, bool(extra) or mended)


def fedkd(at: Checkouts) -> Iterator[Row]:
    options = {**LOCAL, "T_start": 1.0, "T_end": 1.0, "intensity": "batch", "weights": "equal", "clip": 10.0}
    width = 16
    for whole in (False, True):
        run, apart = ran("fedkd", 3, **options), Apart()
        library = Library(at.htfllib, given(run, shared=run.states[0].theta))
        with library.imported("clients.clientkd", "servers.serverkd"):
            more = {"mentee_learning_rate": ETA, "T_start": 1.0, "T_end": 1.0, "feature_dim": width}
            server = library.server("serverkd", "FedKD", global_model="given", **more, **SERVES)
            if whole:

                def as_they_are(params: Any, energy: float) -> dict[str, Any]:
                    return {name: p.detach().numpy() if isinstance(p, Tensor) else p for name, p in params}

                library.mend("clientkd", decomposition=as_they_are)
                library.mend("serverkd", decomposition=as_they_are)
            for k in run.rows:
                with drawing(f"client {k}", 1, 0):
                    run.world.build(run.world.server_arch)  # the mentee is drawn first
                    first = nn.Linear(width, width, bias=False)
                library.items.kept[f"Client_{k}", "W_h"].load_state_dict(first.state_dict())
            for t in (1, 2, 3):
                library.given.t = t
                for k, c in enumerate(server.clients):
                    c.train()
                    memory = run.memory(k, t) or {}
                    apart(memory["W_h"], library.items.kept[c.role, "W_h"].state_dict())
                    after = {name: memory["theta"][name] + g for name, g in run.up(t)[k].g.items()}
                    apart(after, weights(library.items.kept[c.role, "global_model"]))
                server.receive_ids()
                server.aggregate_parameters()
                server.send_parameters()
                own_models(apart, library, run, t)
        what = "nothing decomposed" if whole else "as it is at T = 1: every matrix is sent with rank 0"
        compared = "mentors, mentees, W_h"
        yield Row("fedkd", "intensity batch, T 1", "HtFLlib", what, compared, 3, apart.most, whole)
    yield from ranks(at)


def ranks(at: Checkouts) -> Iterator[Row]:
    """The rank of 200 matrices at energies from 0.5 to 0.9999: the largest difference, and how many came out as 0."""
    from fedaudit.wire.svd import factors

    numbers, zeros, most = np.random.RandomState(0), 0, 0
    run = ran("fedkd", 1, **LOCAL)
    with Library(at.htfllib, given(run)).imported("clients.clientkd") as library:
        decomposition = library.modules["clientkd"].decomposition
        for i in range(200):
            shape = (40 + i % 7, 60 if i % 4 else 6)
            matrix = numbers.standard_normal(shape) * np.exp(-numbers.uniform(0, 0.4) * np.arange(shape[1]))
            energy = 0.5 + 0.4999 * i / 199
            rank = len(decomposition([("matrix", matrix)], energy)["matrix"][1])
            ours = factors(torch.from_numpy(matrix), energy)
            zeros += rank == 0
            if ours is not None and rank:
                most = max(most, abs(len(ours[1]) - rank))
    what = f"as it is; {zeros} that need all values came out as rank 0"
    yield Row("fedkd", "rank rule", "HtFLlib", what, "ranks of 200 matrices", 0, float(most), True)


def feddistill(at: Checkouts) -> Iterator[Row]:
    run = ran("feddistill", 3, **LOCAL, gamma=0.7, others=False)

    def softened(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.softmax(1) if target.is_floating_point() else target)

    for mended in (False, True):
        apart, library = Apart(), Library(at.htfllib, given(run))
        with library.imported("clients.clientfd", "servers.serverfd"):
            server = library.server("serverfd", "FD", lamda=0.7, **SERVES)
            for t in (1, 2, 3):
                library.given.t = t
                for k, c in enumerate(server.clients):
                    c.loss = softened if mended else c.loss
                    c.train()
                    if mended:
                        x, y = run.rows[k]
                        model, told = library.items.load(c.role, "model").eval(), defaultdict(list)
                        with torch.no_grad():
                            for row, label in zip(model(x), y.tolist(), strict=True):
                                told[label].append(row)
                        library.items.save(library.modules["clientfd"].agg_func(told), c.role, "logits")
                    apart(by_class(run.up(t)[k].F), by_class(library.items.kept[c.role, "logits"]))
                server.receive_logits()
                own_models(apart, library, run, t)
        what = (
            "softmax of the means, as until 29 November 2025; means of the trained model" if mended else
            "as it is: raw logits as targets, means collected while training"
        )  # fmt: skip
        compared = "clients' models, mean logits"
        yield Row("feddistill", "gamma 0.7, own included", "HtFLlib", what, compared, 3, apart.most, mended)


def fedgen_lg(at: Checkouts) -> Iterator[Row]:
    """Two rounds: from round to round Adam makes more of the rounding of a bias without gradient (see `generators`)."""
    run = ran("fedgen_lg", 2, **SAMPLED)
    for mended in (False, True):
        draws, apart, library = Draws(run), Apart(), Library(at.htfllib, given(run))
        with library.imported("clients.clientgen", "servers.servergen"):
            server = library.server("servergen", "FedGen", feature_dim=16, **GENERATES, **SERVES)
            draws.into(library, "clientgen", "servergen")
            put_head(library, library.items.load("Server", "head"), run.states[0].theta)
            G = library.items.kept["Server", "generative_model"]
            load_latents(G, run.states[0].w)
            for t in (1, 2):
                library.given.t = t
                server.send_parameters()
                if mended:
                    G.eval()
                for k, c in enumerate(server.clients):
                    draws.of_client(k, t)
                    c.train()
                server.receive_ids()
                draws.of_server(t)
                if mended:
                    library.items.shared = {("Server", "generative_model")}
                server.train_generator()
                library.items.shared = set()
                server.aggregate_parameters()
                own_models(apart, library, run, t)
                apart(head_of(run.states[t].theta), library.items.kept["Server", "head"].state_dict())
                if mended:
                    generators(apart, run.states[t].w, G)
        what = (
            "the trained generator is saved, and clients run it in evaluation mode" if mended else
            "as it is: the trained generator is never saved"
        )  # fmt: skip
        compared = "clients' models, head, generator" if mended else "clients' models, head"
        yield Row("fedgen_lg", "teacher samples, noise uniform", "HtFLlib", what, compared, 2, apart.most, mended)


CASES: tuple[Callable[[Checkouts], Iterator[Row]], ...] = (
    fedavg, fedprox, moon, feddyn, fedntd, scaffold, perfedavg, fedgen, lgfedavg, fedgh, fedproto, fedtgp, fml, fedkd,
    feddistill, fedgen_lg,
)  # fmt: skip


# --- the table ------------------------------------------------------------------------------------------------------


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout: by git, or from a file COMMIT beside an unpacked archive."""
    kept = checkout / "COMMIT"
    if kept.is_file():
        return kept.read_text().strip()
    found = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def table(kept: Mapping[str, Any]) -> str:
    lines = [
        "| method | fedaudit's setting | reference | compared | rounds | largest difference |",
        "|---|---|---|---|---:|---:|",
    ]
    for row in kept["rows"]:
        shown = f"{row['difference']:.1e}" if row["difference"] else "0"
        shown = f"**{shown}**" if row["equal"] else shown
        cells = [row["method"], row["settings"] or "default", f"{row['library']}, {row['reference']}", row["compared"]]
        lines.append(f"| {' | '.join(cells)} | {row['rounds'] or '-'} | {shown} |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfllib", type=Path, help="a checkout of github.com/TsingZ0/PFLlib")
    parser.add_argument("--htfllib", type=Path, help="a checkout of github.com/TsingZ0/HtFLlib")
    parser.add_argument("--only", default="", help="the methods to compare, by comma")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--table", type=Path, help="print the table of kept figures, and run nothing")
    asked = parser.parse_args(words)
    if asked.table:
        print(table(json.loads(asked.table.read_text())))
        return 0
    if not asked.pfllib or not asked.htfllib:
        parser.error("give --pfllib and --htfllib, or --table")
    at, rows = Checkouts(asked.pfllib, asked.htfllib), []
    chosen = [case for case in CASES if not asked.only or case.__name__ in asked.only.split(",")]
    for i, case in enumerate(chosen, 1):
        for row in case(at):
            rows.append(asdict(row))
            said = f"{row.method}, {row.library} {row.reference}: {row.difference:.1e}"
            print(f"{i} of {len(chosen)}  {said}", file=sys.stderr, flush=True)
    kept = {
        "pfllib": commit_of(at.pfllib), "htfllib": commit_of(at.htfllib), "torch": torch.__version__,
        "numpy": np.__version__, "machine": platform.machine(), "limit": LIMIT, "rows": rows,
    }  # fmt: skip
    apart = [row["method"] for row in rows if row["equal"] and row["difference"] > LIMIT]
    return reported(kept, asked.json, table(kept), apart)


def reported(kept: Mapping[str, Any], file: Path | None, shown: str, apart: list[str]) -> int:
    """Keep the figures of a comparison, show their table, and return 1 if something is apart that should be equal."""
    if file:
        file.write_text(json.dumps(kept, indent=1) + "\n")
    print(shown)
    if apart:
        print(f"Further apart than {kept['limit']:g}: {', '.join(apart)}.", file=sys.stderr)
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
