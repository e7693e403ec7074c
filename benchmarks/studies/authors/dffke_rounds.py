"""Runs the public code of DFFKE's author round after round on the clients of a suite's row, and keeps what came out.

    python benchmarks/studies/authors/dffke_rounds.py --checkout DFFKE --json dffke_rounds.json \
        --suite benchmarks/studies/dffke/dffke_cifar_small.toml --seed 0

It answers whose a weakness of a long run is: the method's, or that of its retelling here. The code's own main function
runs with its own order of steps, its own draws, its own augmentation and its own Adam. It gets the records of
fedaudit's clients, their network with the same first weights, and the row's T_Dec and w_Dec, where the code has 3 and
64. B, tau, eta and T_FKE of the row are the code's own. These are changed:

- Local training has at most the row's E_local epochs a round, as in fedaudit; the code has no limit. `--epochs 1000`
  takes the limit away in effect.
- The code ends when a test after the exchange is more than 8 points below the best one. Here it goes on, and the record
  says after which of the tests that are kept it would have ended.
- Only every second round is tested, and on the test set alone.
- Its pure student, from which nothing comes back, is a network without weights that matter.

The columns are those of `benchmarks/studies/dffke/dffke_answers.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from parity_dffke import Code, commit_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedaudit import Setting
from fedaudit.data.records import to_uint8
from fedaudit.methods.datafree.dffke import DFFKE
from fedaudit.runtime.world import World
from fedaudit.suite.suite_file import read_suite
from fedaudit.training import models

FALL = 8.0  # points below the best test: the code's own rule ends a run there
EVERY = 2  # rounds between two tests
VALUES = ("E_local", "tau", "eta", "B", "T_Dec", "w_Dec", "T_FKE")  # of the row, as the code is given them


@dataclass
class Row:
    """What one round showed. Accuracies are means over clients on the common test set, in %."""

    round: int
    length: float  # root mean square of a number of the docked embeddings that are decoded
    apart: float  # variance of these embeddings over rows, as a share of their mean square
    said: float = 0.0  # share of the images on which their own teacher says the class of the record behind them
    sure: float = 0.0  # mean of the largest probability in these answers
    epochs: float = 0.0  # of local training, mean over clients
    before: float | None = None  # accuracy right before the exchange
    after: float | None = None  # right after it
    minutes: float = 0.0  # since the run began


class Body(nn.Module):
    """A network of fedaudit in the form in which the code takes its ResNet apart: an encoder and `fc`."""

    def __init__(self, net: models.Net, classes: int) -> None:
        super().__init__()
        self.encoder, self.fc = nn.Sequential(net.encoder), nn.Linear(net.width, classes)
        self.fc.load_state_dict(net.classifier.state_dict())


class PureStudent(nn.Module):
    """Stands for the code's extra student. Its answers have a gradient, and nobody reads them."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.h, self.y = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor, use_docking: bool = False) -> tuple[Tensor, Tensor]:
        return self.h.expand(len(x), -1), self.y.expand(len(x), -1)


@dataclass
class Rounds:
    """The code's clients, and what their rounds showed."""

    code: Code
    setting: Setting
    method: Any
    test: DataLoader[Any]
    device: str = "cpu"
    begun: float = field(default_factory=time.perf_counter)
    rows: list[Row] = field(default_factory=list)
    trained: float | None = None  # the last test right after local training
    epochs: float = 0.0  # of the last local training, mean over clients
    keep: Callable[[list[Row]], object] = list  # called after each round

    @property
    def t(self) -> int:
        """Return the round that local training belongs to: the one after the last exchange."""
        return len(self.rows) + 1

    def tested(self, clients: list[nn.Module], t: int) -> float | None:
        if t % EVERY and t != self.setting.rounds:
            return None
        found = []
        for client in clients:
            client.eval()
            with torch.no_grad():
                found.append(self.code.utils.run_one_epoch(client, self.test, None, self.device)[1])
        return float(np.mean(found))

    def decoder(self, model_name: str, nz: int, n_cls: int) -> nn.Module:
        made: nn.Module = self.code.generators.LatentGenerator(nz, self.method.w_Dec, 32, 3, n_cls)
        return made

    def align(self, clients: list[nn.Module], optimizers: Any, **options: Any) -> None:
        """Let the code train the clients, for at most E_local epochs each, and test them."""
        theirs, done = self.code.utils.run_one_epoch, dict.fromkeys(map(id, clients), 0)

        def epoch(net: nn.Module, loader: Any, optimizer: Any = None, device: str = "cpu") -> tuple[float, float]:
            loss, accuracy = theirs(net, loader, optimizer, device)
            done[id(net)] += optimizer is not None
            return loss, 101.0 if done[id(net)] >= self.method.E_local else accuracy

        with mock.patch.object(self.code.utils, "run_one_epoch", epoch):
            self.code.utils.local_align_clients(clients, optimizers, **{**options, "test_loader": None})
        self.epochs = float(np.mean(list(done.values())))
        self.trained = self.tested(clients, self.t)

    def docked(self, *words: Any, **named: Any) -> Any:
        """Let the code train docking layers and decoder, and look at the docked embeddings."""
        found = self.code.theirs.local_to_generator(*words, **named)
        e = torch.cat([torch.from_numpy(loader.dataset.emb) for loader in found])
        variance, square = e.var(0, correction=0).sum(), e.square().sum(1).mean()
        self.rows.append(Row(len(self.rows) + 1, float(e.square().mean().sqrt()), float(variance / square)))
        return found

    def exchange(self, *words: Any, **named: Any) -> Any:
        """Let the code exchange knowledge, and look at the answers and the clients' accuracy."""
        found, row = self.code.theirs.generator_to_local(*words, **named), self.rows[-1]
        p, y = (np.concatenate([getattr(of, name) for of in found]) for name in ("logit", "target"))
        row.said, row.sure = float((p.argmax(1) == y).mean()), float(p.max(1).mean())
        row.epochs, row.before, row.after = self.epochs, self.trained, self.tested(named["clients"], row.round)
        row.minutes = round((time.perf_counter() - self.begun) / 60, 2)
        self.keep(self.rows)
        return found


def clients_of(code: Code, world: World, count: int) -> list[nn.Module]:
    """Return the code's clients with the first weights of fedaudit's, and its extra student."""
    made, docking = [], None
    for k in range(count):
        net = world.fresh_model(k)
        with mock.patch.object(code.model, "resnet18_32x32", return_value=Body(net, world.classes)):
            client = code.model.ClientModel("ResNet18_32x32", world.classes)
        client.output.load_state_dict(net.classifier.state_dict())
        docking = docking or client.docking.state_dict()  # the code draws one for all
        client.docking.load_state_dict(docking)
        made.append(client)
    return [*made, PureStudent(world.fresh_model(0).width, world.classes)]


def records(code: Code, rows: tuple[Tensor, Tensor], how: str, batch: int, shuffle: bool) -> DataLoader[Any]:
    """Return records as the code's loader has them: images of bytes, then its own transforms."""
    x, y = rows
    images = to_uint8(x).permute(0, 2, 3, 1).contiguous().numpy()
    rows_of = code.dataset.CustomDataset(images, y.numpy(), transform=code.transforms.get_cifar10_transform()[how])
    return DataLoader(rows_of, batch_size=batch, shuffle=shuffle)


def ended(rows: list[Row]) -> int | None:
    """Return the round after which the code's own rule would have ended the run, by the tests that are kept."""
    best = 0.0
    for row in rows:
        if row.after is not None:
            best = max(best, row.after)
            if best - row.after > FALL:
                return row.round
    return None


def method_of(setting: Setting) -> Any:
    """Return the method of the suite's row, whose values the code gets."""
    return DFFKE.make(dict(setting.set), "authors")


def play(code: Code, setting: Setting, keep: Callable[[list[Row]], object], device: str = "cpu") -> None:
    """Let the code's main function run for the setting's rounds, with its networks on a device."""
    method = method_of(setting)
    world = World(setting)
    torch.manual_seed(setting.seed)
    np.random.seed(setting.seed)
    made = [client.to(device) for client in clients_of(code, world, setting.clients)]
    test = records(code, world.test, "test_transform", 500, False)
    rounds = Rounds(code, setting, method, test, device, keep=keep)
    of = {k: world.members(k) for k in range(setting.clients)}
    data = types.SimpleNamespace(
        n_class=world.classes, full_train_loader=None, full_test_loader=None,
        client_train_loaders=[records(code, of[k], "train_transform", method.B, True) for k in of],
        client_fixed_train_loaders=[records(code, of[k], "test_transform", method.B, True) for k in of],
        client_class_cnt=np.zeros((setting.clients, world.classes)),
    )  # fmt: skip
    named = {
        "init_client_nets": lambda *_: made, "get_generator": rounds.decoder, "local_align_clients": rounds.align,
        "local_to_generator": rounds.docked, "generator_to_local": rounds.exchange, "mkdir": lambda path: None,
        "evaluate": lambda *_: [0.0], "pure_student_evaluation": lambda *_: None,
    }  # fmt: skip
    args = code.args(
        n_clients=setting.clients, batch_size=method.B, L2G_epoch=method.T_Dec, G2L_epoch=method.T_FKE,
        client_lr=method.eta, local_align_acc=method.tau, knowledge_exchange_rounds=setting.rounds,
        device=device,
    )  # fmt: skip
    with code.mended(**named), contextlib.redirect_stdout(io.StringIO()):
        code.main.data_free_federated_knowledge_exchange(args, data)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of github.com/HaowenGuan/DFFKE")
    parser.add_argument("--suite", type=Path, required=True, help="a suite, of whose first row the clients are")
    parser.add_argument("--seed", type=int, default=0, help="the clients' seed")
    parser.add_argument("--rounds", type=int, help="in place of the suite's")
    parser.add_argument("--epochs", type=int, help="of local training a round at most, in place of the row's E_local")
    parser.add_argument(
        "--device", default="cpu", help="cpu or cuda; products in float32, convolutions as torch has them"
    )
    parser.add_argument("--json", type=Path, required=True, help="keep the figures in this file")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    first = read_suite(asked.suite).cells()[0]
    values = first.set if asked.epochs is None else {**first.set, "E_local": asked.epochs}
    rounds = first.rounds if asked.rounds is None else asked.rounds
    of = {"seed": asked.seed, "rounds": rounds, "set": values, "device": "cpu"}  # records and first weights
    setting = first.model_copy(update=of)
    code = Code(asked.checkout)
    what = {
        "checkout": commit_of(asked.checkout), "suite": asked.suite.name, "seed": setting.seed,
        "rounds": setting.rounds, "device": asked.device,
        "torch": torch.__version__, "numpy": np.__version__, "machine": platform.machine(),
        "values": {name: getattr(method_of(setting), name) for name in VALUES},
    }  # fmt: skip

    def keep(rows: list[Row]) -> None:
        print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
        kept = {**what, "ends_after": ended(rows), "rows": [asdict(row) for row in rows]}
        asked.json.write_text(json.dumps(kept, indent=1) + "\n")

    with code.imported():
        torch.set_default_dtype(torch.float32)
        play(code, setting, keep, asked.device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
