"""Runs the public code of FedZGE's authors from a checkout, as it is, and looks at every number on its way.

Nothing of that code is copied. Its program is started from the checkout, with its own classes and its own order of
steps. It gets the records and the network, and, where a run of fedaudit is to be met, first weights, batches and draws.
`MENDS` names the points in which that code does something else than fedaudit. A point is mended only where that is
asked for, by a name that the code looks up or by what surrounds a call.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import os
import runpy
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

MENDS = {
    "pixels": "real images in [0, 1] beside generated ones in [-1, 1]",
    "bias": "transposed convolutions without a bias",
    "info": "L_info of a perturbed batch takes the logarithm of the unperturbed p",
    "share": "Eq. 17 divided by B once more",
    "tau": "a factor tau^2 in Eqs. 4 and 20",
    "cosine": "the rate of Eq. 20 falls over E_k epochs, whatever E'_k is",
    "last": "a last batch of one record makes a step of its own",
    "tests": "tests move the running statistics of f, which Eq. 5 reads",
    "statistics": "tests and queries move the clients' running statistics, which nothing reads",
    "accuracy": "the mean of the test batches' accuracies, of which the last is smaller",
}
NAMES = ("node", "utils", "model", "dataset")  # modules of the checkout
TEST_ROWS = 256  # test images that are normalised together, in the published command

Rows = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]


def weights(net: nn.Module) -> Weights:
    """Return copies of a network's tensors, running statistics included, without the counts of passes."""
    return {n: t.detach().clone() for n, t in net.state_dict().items() if not n.endswith("num_batches_tracked")}


class Instead:
    """A module of which some names mean something else."""

    def __init__(self, of: Any, **others: Any) -> None:
        self._of, self._others = of, others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._of, name)


@dataclass(frozen=True)
class Draws:
    """The random numbers of one round on the server; labels are in ascending order, and the rest follows them."""

    z: Tensor
    y: Tensor
    u: Sequence[Tensor]


@dataclass
class Given:
    """What the program gets. Clients are numbered from 0. Without batches or draws it makes its own."""

    rows: Mapping[int, Rows]
    test: Rows
    classes: int
    net: Callable[[int | None], nn.Module]  # of a client, or of the server
    G: Mapping[str, Tensor] | None = None  # the generator's first weights, under the checkout's names
    batches: Callable[[int, int], Iterator[Sequence[Tensor]]] | None = None  # client, round: an epoch's index batches
    draws: Callable[[int], Draws] | None = None  # by round
    dtype: torch.dtype = torch.float64


@dataclass
class Seen:
    """What one round of the program did."""

    trained: dict[int, Weights] = field(default_factory=dict)
    answers: dict[int, list[Tensor]] = field(default_factory=dict)  # of each client: on x^, then on its perturbations
    e: list[Tensor] = field(default_factory=list)
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    g: Tensor = field(default_factory=lambda: torch.empty(0))
    G: Weights = field(default_factory=dict)
    inner: list[Weights] = field(default_factory=list)  # f after each of its steps
    accuracy: float = 0.0  # the best inner step's, as the program counts
    distilled: dict[int, Weights] = field(default_factory=dict)

    @property
    def agreement(self) -> float:
        """Return the share of x^ that the ensemble takes for their labels."""
        return float((self.e[0].argmax(1) == self.y).double().mean())


class Program:
    """One run of the checkout's program."""

    def __init__(self, checkout: Path, given: Given, mended: Sequence[str] = ()) -> None:
        self.root = checkout.resolve()
        if not (self.root / "node" / "server.py").is_file():
            raise SystemExit(f"{checkout} is not a checkout of maxinge8698/FedZGE: it has no node/server.py.")
        self.given, self.mended = given, frozenset(mended)
        assert self.mended <= MENDS.keys(), f"no such points: {sorted(self.mended - MENDS.keys())}"
        self.rounds: list[Seen] = []
        self.direction = 0  # directions that were handed out in this round
        self.at_work: Any = None  # the client or server whose method runs

    def run(self, **arguments: Any) -> list[Seen]:
        """Start the program with these command-line arguments, and return what each round did."""
        words = [str(w) for name, value in arguments.items() for w in (f"--{name}", value)]
        with self.imported(), tempfile.TemporaryDirectory() as folder:
            self.replace()
            argv, sys.argv = sys.argv, ["main.py", *words, "--K", str(len(self.given.rows)), "--output_dir", folder]
            try:
                runpy.run_path(str(self.root / "main.py"), run_name="__main__")
            finally:
                sys.argv = argv
        return self.rounds

    @contextlib.contextmanager
    def imported(self) -> Iterator[None]:
        """Within: the checkout's modules, in the given precision, without its prints and log files."""
        before = {name: m for name, m in sys.modules.items() if name.split(".")[0] in NAMES}
        for name in before:
            del sys.modules[name]
        dtype, root, state = torch.get_default_dtype(), logging.getLogger(), torch.random.get_rng_state()
        handlers, level, hashing = root.handlers[:], root.level, os.environ.get("PYTHONHASHSEED")
        cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        sys.path.insert(0, str(self.root))
        torch.set_default_dtype(self.given.dtype)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                sys.modules["dataset"] = self.data()
                yield
        finally:
            for handler in root.handlers:
                if handler not in handlers:
                    handler.close()
            root.handlers[:], root.level = handlers, level
            torch.set_default_dtype(dtype)
            torch.random.set_rng_state(state)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
            os.environ.pop("PYTHONHASHSEED", None)
            os.environ |= {} if hashing is None else {"PYTHONHASHSEED": hashing}
            sys.path.remove(str(self.root))
            for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
                del sys.modules[name]
            sys.modules |= before

    def data(self) -> types.ModuleType:
        """Return what stands for the checkout's reader of data sets."""
        made = types.ModuleType("dataset")

        def rows(of: Rows) -> TensorDataset:
            x = of[0].to(self.given.dtype)
            return TensorDataset(x if "pixels" in self.mended else (x + 1) / 2, of[1])

        def load_dataset(args: Any) -> tuple[None, TensorDataset]:
            args.num_classes, args.nc, args.img_size = self.given.classes, *self.given.test[0].shape[1:3]
            return None, rows(self.given.test)

        def partition_dataset(args: Any, _: Any) -> tuple[dict[int, TensorDataset], dict[int, Any]]:
            return {k + 1: rows(of) for k, of in self.given.rows.items()}, {}

        vars(made).update(load_dataset=load_dataset, partition_dataset=partition_dataset)
        return made

    def replace(self) -> None:
        """Hand over networks, batches and draws, mend what is to be mended, and look at what every call returns."""
        server, client = (importlib.import_module(f"node.{name}") for name in ("server", "client"))
        if "bias" in self.mended:
            layers = importlib.import_module("model.generator")
            layers.nn = Instead(nn, ConvTranspose2d=with_bias)  # type: ignore[attr-defined]
        for module in (server, client):
            vars(module).update(init_model=self.model, DataLoader=self.loader)
        if "tau" in self.mended:
            for module in (server, client):
                functional = module.F
                module.F = Instead(functional, kl_div=self.without_factor(functional.kl_div))  # type: ignore[attr-defined]
        if "accuracy" in self.mended:
            server.accuracy_score = self.by_rows(server.accuracy_score)  # type: ignore[attr-defined]
        torch_of_server: dict[str, Any] = {}
        if self.given.draws:
            torch_of_server |= {"randn": self.next_normal, "randint": self.next_labels}
        if "info" in self.mended:
            last: list[Tensor] = []

            def softmax(logits: Tensor, dim: int) -> Tensor:
                last[:] = [torch.softmax(logits, dim=dim)]
                return last[0]

            torch_of_server |= {"softmax": softmax, "log": lambda _: last[0].mean(dim=0).log()}
        server.torch = Instead(torch, **torch_of_server)  # type: ignore[attr-defined]
        self.watch_server(server.Server)
        self.watch_client(client.Client)

    # --- what is handed over ---

    def model(self, kind: str, classes: int, name: str) -> nn.Module:
        return self.given.net(None if name == "server" else int(name.removeprefix("client")) - 1).to(self.given.dtype)

    def loader(self, data: TensorDataset, shuffle: bool, batch_size: int) -> Any:
        if not shuffle:
            return Tested(self, DataLoader(data, batch_size=TEST_ROWS))
        if self.given.batches is None:
            return DataLoader(data, shuffle=True, batch_size=batch_size)
        most = len(data) if "last" in self.mended else batch_size
        return Epochs(self.given.batches(self.at_work.id - 1, len(self.rounds)), data, most)

    def next_normal(self, *shape: Any) -> Tensor:
        drawn = self.drawn()
        return drawn.z if len(shape) == 2 else drawn.u[self.asked()]

    def next_labels(self, low: int, high: int, size: Any) -> Tensor:
        return self.drawn().y

    def drawn(self) -> Draws:
        assert self.given.draws is not None
        return self.given.draws(len(self.rounds))

    def asked(self) -> int:
        self.direction += 1
        return self.direction - 1

    # --- what is mended ---

    def without_factor(self, kl_div: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Eqs. 4 and 20 are trained by back-propagation; L_adv, which has no factor, is computed without."""

        def mended(*words: Any, **more: Any) -> Tensor:
            found = kl_div(*words, **more)
            return found / self.at_work.temperature**2 if torch.is_grad_enabled() else found

        return mended

    def by_rows(self, score: Callable[..., float]) -> Callable[..., float]:
        def mended(y_pred: Tensor, y_true: Tensor) -> float:
            n = len(self.given.test[0])
            return score(y_pred=y_pred, y_true=y_true) * len(y_true) * -(-n // TEST_ROWS) / n

        return mended

    def keeps_statistics(self, of: Any) -> bool:
        """Return whether a pass that teaches nothing leaves the running statistics as they are."""
        return ("tests" if of.name == "server" else "statistics") in self.mended

    # --- what is looked at ---

    def watch_server(self, cls: Any) -> None:
        begin, select, make = cls.__init__, cls.select_active_clients, cls.generate_data
        mean, update_G, update_f = cls.ensemble_logits, cls.generator_update, cls.global_model_update

        def init(s: Any, *words: Any, **more: Any) -> None:
            begin(s, *words, **more)
            if self.given.G is not None:
                named = {n: t for n, t in self.given.G.items() if n in s.generator.state_dict()}
                s.generator.load_state_dict(named, strict=False)
            s.generator.to(self.given.dtype)

        def select_active_clients(s: Any, *words: Any) -> Any:
            self.rounds.append(Seen())
            self.direction = 0
            return select(s, *words)

        def generate_data(s: Any) -> Any:
            z, y, x = make(s)
            self.rounds[-1].y, self.rounds[-1].x = y, x.detach().clone()
            return z, y, x

        def ensemble_logits(s: Any, *words: Any) -> Tensor:
            found = mean(s, *words)
            self.rounds[-1].e.append(found.detach().clone())
            return found

        def generator_update(s: Any, x: Tensor, *words: Any) -> None:
            self.at_work, seen, size = s, self.rounds[-1], s.synthetic_size
            x.register_hook(lambda g: setattr(seen, "g", g.detach().clone()))
            s.synthetic_size = 1 if "share" in self.mended else size
            update_G(s, x, *words)
            s.synthetic_size = size
            seen.G = weights(s.generator)

        def global_model_update(s: Any, *words: Any) -> float:
            self.at_work = s
            self.rounds[-1].accuracy = float(update_f(s, *words))
            return self.rounds[-1].accuracy

        for f in (select_active_clients, generate_data, ensemble_logits, generator_update, global_model_update):
            setattr(cls, f.__name__, f)
        cls.__init__ = init

    def watch_client(self, cls: Any) -> None:
        train, answer, distil = cls.local_update, cls.compute_logits, cls.local_distillation

        def local_update(c: Any) -> None:
            self.at_work = c
            train(c)
            self.rounds[-1].trained[c.id - 1] = weights(c.model)

        def compute_logits(c: Any, x: Tensor) -> Tensor:
            with kept_buffers(c.model, self.keeps_statistics(c)):
                found = answer(c, x)
            self.rounds[-1].answers.setdefault(c.id - 1, []).append(found.detach().clone())
            return found

        def local_distillation(c: Any, *words: Any) -> float:
            self.at_work, epochs = c, c.epochs
            c.epochs = c.dis_epochs if "cosine" in self.mended else epochs
            found = distil(c, *words)
            c.epochs = epochs
            self.rounds[-1].distilled[c.id - 1] = weights(c.model)
            return float(found)

        for f in (local_update, compute_logits, local_distillation):
            setattr(cls, f.__name__, f)


def with_bias(*words: Any, **more: Any) -> nn.Module:
    return nn.ConvTranspose2d(*words, **{**more, "bias": True})


@contextlib.contextmanager
def kept_buffers(net: nn.Module, keep: bool) -> Iterator[None]:
    """Within: passes of the network. After them its running statistics are as before, if they are to be kept."""
    before = copy.deepcopy(dict(net.named_buffers())) if keep else {}
    yield
    for name, t in net.named_buffers():
        if name in before:
            t.copy_(before[name])


class Epochs:
    """A client's records in a run's batches, cut where they are larger than `most`. Each pass over it is the next
    epoch.
    """

    def __init__(self, epochs: Iterator[Sequence[Tensor]], data: TensorDataset, most: int) -> None:
        self._epochs = ([part for b in batches for part in b.split(most)] for batches in epochs)
        self._data, self._next = data, next(self._epochs)

    def __len__(self) -> int:
        return len(self._next)

    def __iter__(self) -> Iterator[Any]:
        for b in self._next:
            yield self._data[b]
        self._next = next(self._epochs)


class Tested:
    """The test set in batches. Before each pass the server's model is kept: it has just made a step."""

    def __init__(self, program: Program, batches: DataLoader[Any]) -> None:
        self._program, self._batches = program, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        of = self._program.at_work
        if of.name == "server":
            self._program.rounds[-1].inner.append(weights(of.model))
        with kept_buffers(of.model, self._program.keeps_statistics(of)):
            yield from self._batches
