"""Plays the public code of DFFKE's author beside fedaudit's DFFKE with the preset `authors`, step by step.

    python benchmarks/studies/authors/parity_dffke.py --checkout DFFKE --json parity_dffke.json
    python benchmarks/studies/authors/parity_dffke.py --table parity_dffke.json

Three clients of 40 records each, 3 x 8 x 8 pixels, a CNN with batch norm, float64, three rounds. fedaudit runs as it
always does. Each step of the author's code, imported from a checkout and unchanged, then gets what that step had in
fedaudit's run: records, weights, batches and draws. The largest difference of any number is taken. A step in which the
two do something else has a row with the code as it is, a row for each point with all other points mended, and a row
with all of them mended. What is left in the last row is rounding, so that the list of points is complete.

A point is mended by a name that the code's module looks up, or by what its function is given. Rows of the exchange are
not shuffled, on both sides. Nothing is shown for clients of unequal size: there the code drops a last,
shorter batch and repeats the rows of smaller clients, and the partition of its experiments has none.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import itertools
import json
import platform
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "helpers" / "retelling"), str(ROOT / "benchmarks" / "studies" / "parity")]

import by_hand  # noqa: E402
from by_hand import Played, drawing, epoch, played, rng  # noqa: E402
from parity import Apart, commit_of, reported  # noqa: E402
from reference_library import Instead  # noqa: E402

from fedaudit import Augment  # noqa: E402
from fedaudit._torchvision import torchvision  # noqa: E402
from fedaudit.data.partitions import _dirichlet_filled, _Task  # noqa: E402
from fedaudit.methods.datafree._buffer import Sample  # noqa: E402
from fedaudit.methods.datafree._decoder import Decoder, decode  # noqa: E402
from fedaudit.methods.datafree.dffke import DFFKE  # noqa: E402
from fedaudit.methods.shared._local_training import views  # noqa: E402
from fedaudit.training import models  # noqa: E402
from fedaudit.training.fit import Turns  # noqa: E402

LIMIT = 1e-9  # where everything is mended, the two differ by no more than this
K, N, B, CLASSES = 3, 40, 10, 5  # clients, records of each, batch size, classes
H, W = 16, 4  # width of the embeddings, channels of the decoder's last layer
PRESET: Mapping[str, Any] = DFFKE.presets["authors"]
MEAN, SIGMA = 0.0, 0.5  # of standardised images in the runs: exact in binary, so that units add no rounding
TAU = 0.85
SETTINGS: dict[str, Any] = {
    "tau": TAU,
    "E_local": 1000,
    "crop": 1,
    "B": B,
    "B_Dec": B,
    "h": H,
    "w_Dec": W,
    "mean_x": MEAN,
    "sigma_x": SIGMA,
}
ARCH = "cnn_bn@0.25"
EXPERIMENT = "experiment_CIFAR10_Dir0.1_HtFE1"
STUBS = ("wandb", "timm", "ml_collections")  # what the code imports, and no step here needs
OURS = ("DFFKE", "DFFKE_losses", "DFFKE_utils", "models", "dataset", *STUBS)


@dataclass(frozen=True)
class Row:
    """One comparison of a step."""

    step: str
    reference: str  # "as it is", or which point was not mended, or "all mended"
    compared: str
    difference: float
    equal: bool  # whether it is meant to be nothing but rounding
    note: str = ""


@dataclass
class Steps:
    """What the steps share: the author's code, and fedaudit's run as ever and with the batches of that code."""

    code: Code
    run: Played
    in_order: Played  # the same without a shuffle in the exchange
    accuracy: list[float]  # on the test set, by client, after the last round, from the run's own record
    test: tuple[Tensor, Tensor]


# --- the author's code ----------------------------------------------------------------------------------------------


class Code:
    """Imports the author's modules from a checkout, without their prints, in double precision."""

    def __init__(self, checkout: Path) -> None:
        if not (checkout / "DFFKE.py").is_file():
            raise SystemExit(f"{checkout} is not a checkout of HaowenGuan/DFFKE: it has no DFFKE.py.")
        self.root = checkout
        self.settings: dict[str, Any] = {}
        for name in ("__init__", "DFFKE"):
            self.settings |= flat((checkout / "configs" / EXPERIMENT / f"{name}.yaml").read_text())

    @contextlib.contextmanager
    def imported(self) -> Iterator[Code]:
        torchvision()
        before = {name: m for name, m in sys.modules.items() if name.split(".")[0] in OURS}
        for name in before:
            del sys.modules[name]
        sys.modules |= {name: types.ModuleType(name) for name in STUBS}
        sys.path.insert(0, str(self.root))
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.main = importlib.import_module("DFFKE")
                self.utils = importlib.import_module("DFFKE_utils")
                self.model = importlib.import_module("models.model")
                self.factory = importlib.import_module("models.model_factory_fn")
                self.generators = importlib.import_module("models.generators")
                self.resnet = importlib.import_module("models.resnet32x32")
                self.transforms = importlib.import_module("dataset.transforms")
                self.dataset = importlib.import_module("dataset.utils_dataset")
                self.theirs = Instead(  # as imported, also while the main function is given others
                    self.main,
                    **{name: getattr(self.main, name) for name in ("local_to_generator", "generator_to_local")},
                )
                for module in (self.main, self.utils, self.dataset):
                    vars(module)["tqdm"] = lambda found: found
                yield self
        finally:
            torch.set_default_dtype(dtype)
            sys.path.remove(str(self.root))
            for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
                del sys.modules[name]
            sys.modules |= before

    def args(self, **more: Any) -> dict[str, Any]:
        """Return the code's settings for CIFAR-10, without its logs and files."""
        none = {"log_wandb": False, "save_clients": False, "load_clients": None, "device": "cpu", "checkpoint_dir": ""}
        return {**self.settings, **none, "batch_size": B, "n_clients": K, **more}

    def mended(self, **names: Any) -> Any:
        """Let names mean something else within DFFKE.py."""
        return mock.patch.multiple(self.main, **names)

    def client(self, w: Mapping[str, Tensor], z: Mapping[str, Tensor] | None = None) -> Any:
        """Return the code's own client with a network of fedaudit in it, and these weights."""
        body = Body()
        with mock.patch.object(self.model, "resnet18_32x32", return_value=body):
            made = self.model.ClientModel("ResNet18_32x32", CLASSES)
        found = {f"encoder.0.1.{n.removeprefix('encoder.')}": t for n, t in w.items() if n.startswith("encoder.")}
        found |= {f"output.{n.removeprefix('classifier.')}": t for n, t in w.items() if n.startswith("classifier.")}
        found |= {f"docking.{n}": t for n, t in (z or made.docking.state_dict()).items()}
        made.load_state_dict({**copy.deepcopy(found), "tau": made.tau.detach()})
        return made

    def decoder(self, w: Mapping[str, Tensor]) -> Any:
        made = self.generators.LatentGenerator(nz=H, ngf=W, img_size=8, nc=3)
        made.load_state_dict({theirs_of(name): t.clone() for name, t in w.items()})
        return made

    def clients(self, run: Played, t: int) -> list[Any]:
        """Return the clients of round t: as local training left them, with the docking layers of that round."""
        return [self.client(run.up(t)[k].theta, run.down(t, 1)[k].z) for k in range(K)]


def flat(text: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file without levels."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition("#")[0].partition(":"))
        if colon:
            plain = value.lower() if value in ("True", "False") else value
            try:
                found[key] = json.loads(plain)
            except ValueError:
                found[key] = value
    return found


class Units(nn.Module):
    """Brings standardised images back into [-1, 1], where fedaudit's networks have them."""

    def forward(self, x: Tensor) -> Tensor:
        return x * SIGMA + MEAN


class Body(nn.Module):
    """A network of fedaudit in the form in which the code takes its ResNet apart: an encoder and `fc`."""

    def __init__(self) -> None:
        super().__init__()
        net = models.build(ARCH, shape=(3, 8, 8), classes=CLASSES)
        self.encoder, self.fc = nn.Sequential(Units(), net.encoder), nn.Linear(net.width, CLASSES)


def theirs_of(name: str) -> str:
    return name.replace("linear.", "l1.0.").replace("layers.", "conv_blocks.")


def weights(client: nn.Module) -> dict[str, Tensor]:
    """Return a client's tensors under fedaudit's names, without its docking layer."""
    state = {name: t for name, t in client.state_dict().items() if name != "tau" and not name.startswith("docking.")}
    return {name.replace("encoder.0.1.", "encoder.").replace("output.", "classifier."): t for name, t in state.items()}


def standard(x: Tensor) -> Tensor:
    return (x - MEAN) / SIGMA


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference of any number; batch norms' counts of batches are left out."""
    found, counts = Apart(), "num_batches_tracked"
    found(*({name: t for name, t in of.items() if not name.endswith(counts)} for of in (ours, theirs)))
    return found.most


def furthest(found: Iterable[float]) -> float:
    return max(found)


def ordered(rows: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> Any:
    """Stand for the code's DataLoader: the same rows, one batch after the other, never shuffled."""
    return DataLoader(rows, batch_size=batch_size, drop_last=drop_last)


# --- fedaudit's runs ------------------------------------------------------------------------------------------------


def records(folder: Path) -> str:
    """Write images of five classes, each a pattern under noise, and return the data set's name."""
    numbers = np.random.RandomState(0)
    patterns = numbers.uniform(40, 215, (CLASSES, 8, 8, 3))

    def drawn(n: int) -> tuple[Any, Any]:
        y = np.arange(n) % CLASSES
        return (patterns[y] + numbers.normal(0, 25, (n, 8, 8, 3))).round().clip(0, 255).astype(np.uint8), y

    (x, y), (test_x, test_y) = drawn(2 * K * N), drawn(60)
    np.savez(folder / "records.npz", x=x, y=y, test_x=test_x, test_y=test_y)
    return f"npz:{folder / 'records.npz'}"


def unshuffled(turns: Turns, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield the batches of an epoch of the exchange, in which the parts take turns as ever, without a shuffle."""
    begins = itertools.accumulate(turns.sizes, initial=0)
    passes = zip(begins, turns.sizes, turns.times or (1,) * len(turns.sizes), strict=False)
    parts = [torch.arange(begin, begin + n).split(size) * often for begin, n, often in passes if n]
    yield from (index for turn in itertools.zip_longest(*parts) for index in turn if index is not None)


def runs(code: Code) -> Steps:
    kept: list[Any] = []

    def record(*words: Any, **options: Any) -> Any:
        kept.append(by_hand_run(*words, **options))
        return kept[-1]

    by_hand_run = by_hand.run
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(by_hand, "run", record):
        values: dict[str, Any] = {
            "rounds": 3, "dataset": records(Path(folder)), "clients": K, "partition": "dirichlet-filled:1.0",
            "holdout": 0.0, "validation": 0.0, "aux": 0.5, "public": 0.0, "init": "common", "model": ARCH,
            "preset": "authors", "set": SETTINGS, "eval_clients": True, "eval_every": 3,
        }  # fmt: skip
        run = played("dffke", Path(folder) / "a", **values)
        with mock.patch.object(Turns, "batches", unshuffled):
            in_order = played("dffke", Path(folder) / "b", **values)
    for one in (run, in_order):
        assert [len(y) for _, y in one.rows.values()] == [N] * K, "clients of another size"
        x, y = run.world.federation.test()
    each = kept[0].rounds[-1].utility.clients.global_test.each
    return Steps(code, run, in_order, list(each), (x.double(), y))


# --- settings, partition, network and augmentation --------------------------------------------------------------------


def settings(on: Steps) -> Iterator[Row]:
    """The numbers of the code's files for CIFAR-10, and those of the preset; and the choices that are played here."""
    method: Any = DFFKE.make({}, "authors")
    names = {
        "client_lr": "eta", "generator_model_lr": "eta", "reg": "decay", "batch_size": "B", "local_align_acc": "tau",
        "L2G_epoch": "T_Dec", "G2L_epoch": "T_FKE",
    }  # fmt: skip
    found = furthest(abs(float(on.code.settings[theirs]) - getattr(method, ours)) for theirs, ours in names.items())
    sizes = furthest(abs(on.code.settings["batch_size"] - size) for size in (method.B, method.B_Dec))
    chosen = {
        "L2G_sample_ratio": 1.0, "L2G_augment_logits": False, "L2G_use_emb_md_loss": False,
        "L2G_use_logit_md_loss": True, "G2L_local_review_iteration": 1, "G2L_data_bank_iteration": 1,
        "G2L_augment_real": False, "G2L_cal_emb_loss": True, "local_align_after_knowledge_exchange": True,
        "new_client_opt_every_round": True, "warmup_clients": True, "generator_model": "LatentGenerator",
    }  # fmt: skip
    other = {name for name, value in chosen.items() if on.code.settings[name] != value}
    assert not other, f"the code's files say something else about {sorted(other)}"
    what = "rates, decay, batch sizes, goal, epochs"
    yield Row("settings", "as it is", what, max(found, sizes), True)


def partition(on: Steps) -> Iterator[Row]:
    """Both get the same proportions for each class. What is compared are counts, client x class."""
    y = np.repeat(np.arange(10), 500)
    drawn = np.random.RandomState(1).dirichlet(np.full(10, 0.1), size=10)

    class Told:
        def __init__(self) -> None:
            self.left = iter(drawn.copy())

        def dirichlet(self, alpha: Any) -> Any:
            return next(self.left)

        def permutation(self, n: int) -> Any:
            return np.arange(n)

    task = _Task("dirichlet-filled:0.1", "0.1", y, 10, Told(), 10, 1, None)  # type: ignore[arg-type]
    owner = _dirichlet_filled(task)
    ours = np.stack([np.bincount(y[owner == k], minlength=10) for k in range(10)])
    by_class = {c: np.flatnonzero(y == c) for c in range(10)}

    def gap(mended: bool) -> float:
        tables: list[Any] = []

        def zeros(*words: Any, **options: Any) -> Any:
            tables.append(np.zeros(*words, **options))
            return tables[-1]

        def cumsum(found: Any) -> Any:
            if mended:
                found[tables[0].sum(1) == len(y) // 10] = 0
            return np.cumsum(found)

        numbers = Instead(np.random, dirichlet=Told().dirichlet, shuffle=lambda found: None)
        with mock.patch.object(on.code.dataset, "np", Instead(np, random=numbers, zeros=zeros, cumsum=cumsum)):
            *_, theirs = on.code.dataset.non_iid_dirichlet_partition(by_class, len(y), 10, 10, alpha=0.1, balance=True)
        return float(np.abs(ours - theirs).max())

    what = "records of each client and class, of 5,000"
    said = "as it is: a full client counts until its turn comes"
    yield Row("partition", said, what, gap(False), False)
    yield Row("partition", "all mended", what, gap(True), True)


def network(on: Steps) -> Iterator[Row]:
    """ResNet-18 with equal first weights, eight images, in training mode: embeddings and logits."""
    torch.manual_seed(0)
    theirs = on.code.model.ClientModel("ResNet18_32x32", 10).train()
    ours = models.build("resnet18_cifar", shape=(3, 32, 32), classes=10).train()
    named = [t for name, t in theirs.state_dict().items() if name.startswith(("encoder.", "output."))]
    ours.load_state_dict(dict(zip(ours.state_dict(), named, strict=True)))
    x = torch.rand(8, 3, 32, 32) * 2 - 1
    channels = on.code.transforms.get_cifar10_transform()["test_transform"].transforms[1]
    seen = channels((x + 1) / 2)

    def gap(images: Tensor) -> float:
        h, y = theirs(images)
        e = ours.encode(x)
        return apart({"h": e, "y": ours.classify(e)}, {"h": h, "y": y})

    what = "embeddings and logits of ResNet-18"
    with torch.no_grad():
        yield Row("network", "as it is: images standardised by channel", what, gap(seen), False)
        yield Row("network", "all mended: images in [-1, 1]", what, gap(x), True)


ORDERS = tuple(itertools.permutations(range(3)))  # of brightness, contrast and saturation


def augmentation(on: Steps) -> Iterator[Row]:
    """128 images of 32 x 32 with the same numbers: where each is moved, whether mirrored, three factors, an order."""
    numbers = np.random.RandomState(0)
    base = numbers.uniform(0, 255, (128, 4, 4, 3)).repeat(8, 1).repeat(8, 2)
    images = (base + numbers.normal(0, 20, base.shape)).clip(0, 255).astype(np.uint8)
    u = torch.from_numpy(numbers.uniform(0, 1, (len(images), 7)))
    exact = torch.from_numpy(images).double().permute(0, 3, 1, 2) / 255
    ours = ours_of(PRESET["crop"])(exact * 2 - 1, u)
    vision = torchvision().transforms
    steps = list(on.code.transforms.get_cifar10_transform()["train_transform"].transforms)
    _, crop, jitter, mirror, _, channels = steps

    def transformed(i: int, bits: bool) -> Tensor:
        down, right, flip, *factors, order = u[i].tolist()
        by = [0.6 + 0.8 * number for number in factors]
        drawn = torch.tensor([*ORDERS[int(6 * order)], 3])  # last the hue, which it leaves alone
        chance = Instead(torch, rand=lambda n: torch.tensor([flip]))
        with (
            mock.patch.object(type(crop), "get_params", return_value=(int(down * 9), int(right * 9), 32, 32)),
            mock.patch.object(type(jitter), "get_params", return_value=(drawn, *by, None)),
            mock.patch.object(vision.transforms, "torch", chance),
        ):
            if bits:  # as the code has it: an image of the Python library, that is, of bytes
                return vision.Compose(steps)(images[i])
            return vision.Compose([crop, jitter, mirror, channels])(exact[i])

    def gap(bits: bool) -> float:
        mean, deviation = (torch.tensor(v)[:, None, None] for v in (channels.mean, channels.std))
        seen = torch.stack([(transformed(i, bits) * deviation + mean) * 2 - 1 for i in range(len(images))])
        return apart({"x": ours}, {"x": seen})

    what = "augmented images, in [-1, 1]"
    yield Row("augmentation", "as it is: rounded to 8 bits after each change", what, gap(bits=True), False)
    yield Row("augmentation", "all mended", what, gap(bits=False), True)


def ours_of(crop: int) -> Augment:
    """Return the preset's augmentation, with so many pixels to move by."""
    found = views(crop, PRESET["flip"], PRESET["jitter"], PRESET["colours"])
    assert found is not None
    return found


# --- local training -------------------------------------------------------------------------------------------------


class Epochs:
    """A client's records in the run's batches, augmented by its numbers. Each pass in training is the next epoch. The
    pass in evaluation mode comes before them, with the first numbers of the same generator.
    """

    def __init__(self, run: Played, k: int, t: int, model: nn.Module) -> None:
        self.x, self.y = run.rows[k]
        self.order, self.model = rng(f"client {k}", "fit 1", t), model
        self.augment = ours_of(SETTINGS["crop"])
        self.done = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.done += self.model.training
        batches = epoch(self.order, N, B) if self.model.training else [torch.arange(N)]
        for b in batches:
            yield standard(self.augment(self.x[b], self.augment.draw(len(b), self.order))), self.y[b]


def aligned(on: Steps, run: Played, t: int, clients: list[Any], optimisers: Sequence[Any]) -> list[int]:
    """Let the code train clients as it does between exchanges, and return their epochs."""
    loaders = [Epochs(run, k, t, clients[k]) for k in range(K)]
    on.code.utils.local_align_clients(clients, optimisers, loaders, passing_acc=TAU)
    return [loader.done for loader in loaders]


def adams(clients: Iterable[nn.Module], make: type[torch.optim.Adam] = torch.optim.Adam) -> list[Any]:
    """Return new optimisers as the code makes them."""
    return [make(client.parameters(), lr=1e-3, weight_decay=PRESET["decay"]) for client in clients]


def local_training(on: Steps) -> Iterator[Row]:
    what = "clients' models after local training"

    def row(said: str, run: Played, t: int, clients: list[Any], optimisers: Sequence[Any], equal: bool) -> Row:
        done = aligned(on, run, t, clients, optimisers)
        found = furthest(apart(run.up(t)[k].theta, weights(clients[k])) for k in range(K))
        return Row("local training", said, what, found, equal, note=f"epochs {', '.join(map(str, done))}")

    clients = [on.code.client(on.run.first[k]) for k in range(K)]
    yield row("round 1, as it is", on.run, 1, clients, adams(clients), True)
    for t, carried in ((2, True), (2, False), (3, False)):
        _, clients, optimisers = exchanged(on, on.in_order, t - 1, resting=False)
        said = "as it is: Adam goes on from the exchange" if carried else "all mended"
        yield row(f"round {t}, {said}", on.in_order, t, clients, optimisers if carried else adams(clients), not carried)


# --- docking layers -------------------------------------------------------------------------------------------------


def first_draws(run: Played, t: int) -> tuple[list[nn.Linear], nn.Linear, Decoder]:
    """Return what fedaudit's server draws in a round: docking layers, their head, and a decoder."""
    with drawing("server", t):
        for k in range(K):
            run.net(run.up(t)[k].theta)  # the server makes room for theta_k, and draws weights for it
        layers = [nn.Linear(H, H) for _ in range(K)]
        for layer in layers:
            layer.load_state_dict(layers[0].state_dict())
        head = nn.Linear(H, CLASSES)
        return layers, head, Decoder(H, run.world.shape, W, "standardised", (MEAN, SIGMA))


COUNTS = np.zeros((K, CLASSES))  # the code asks for its shape alone


def plain_batches(run: Played) -> list[list[tuple[Tensor, Tensor]]]:
    """Return each client's plain records in batches, in order."""
    return [[(standard(x[i : i + B]), y[i : i + B]) for i in range(0, N, B)] for x, y in run.rows.values()]


def dock(on: Steps, run: Played, t: int, clients: list[Any]) -> Any:
    """Let the code train the clients' docking layers, and return its docked embeddings in batches."""
    _, head, _ = first_draws(run, t)
    in_order = Instead(torch, randperm=torch.arange)
    with on.code.mended(DataLoader=ordered, torch=in_order, nn=Instead(nn, Linear=lambda i, o: head)):
        return on.code.theirs.local_to_generator(
            on.code.args(), clients, plain_batches(run), None, COUNTS, nn.Identity(), None, B, 0, clients, "cpu"
        )


def docked(on: Steps, run: Played, t: int, layers: Sequence[Mapping[str, Tensor]]) -> float:
    """Return how far docking layers are apart that the code has trained from these on."""
    clients = [on.code.client(run.up(t)[k].theta, layers[k]) for k in range(K)]
    loaders = dock(on, run, t, clients)
    found = []
    for k, client in enumerate(clients):
        told = run.down(t, 1)[k]
        e = torch.cat([e for e, *_ in loaders[k]])
        found.append(apart({**told.z, "E": told.E[k]}, {**client.docking.state_dict(), "E": e}))
    return furthest(found)


def docking(on: Steps) -> Iterator[Row]:
    run, what = on.run, "docking layers and docked embeddings"
    layers, _, _ = first_draws(run, 1)
    begun = [layer.state_dict() for layer in layers]
    alike = on.code.factory.init_client_nets
    with mock.patch.object(on.code.model, "resnet18_32x32", Body):
        nets = alike(K, "ResNet18_32x32", CLASSES, "cpu")
    theirs = furthest(apart(nets[0].docking.state_dict(), net.docking.state_dict()) for net in nets)
    ours = furthest(apart(begun[0], of) for of in begun)
    said = "as it is: one draw for all clients"
    yield Row("docking", f"first weights, {said}", "two clients' first docking layers", abs(ours - theirs), True)
    yield Row("docking", "round 1, as it is", what, docked(on, run, 1, begun), True)
    kept = [run.up(1, 2)[k].z for k in range(K)]
    yield Row("docking", "round 2, as it is: from where the exchange left them", what, docked(on, run, 2, kept), True)


# --- decoder --------------------------------------------------------------------------------------------------------


class Drawn:
    """A client's rows in the batches that fedaudit's decoder saw: each pass has the next one, as the first of a new
    shuffle.
    """

    def __init__(self, rows: Any, batches: Iterable[Tensor]) -> None:
        self.rows, self.batches = rows, iter(batches)

    def __len__(self) -> int:
        return N // B

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        index = next(self.batches)
        yield tuple(torch.from_numpy(of[index]) for of in (self.rows.emb, self.rows.logit, self.rows.target))


def train_generator(
    on: Steps, run: Played, t: int, clients: list[Any], students: Sequence[Any], generator: Any, adam: Any
) -> None:
    """Let the code train the decoder, against students as the last exchange left them."""
    loops = iter((False, True))  # the docking layers are there already
    stream, order = rng("server", "Dec", t), [list[Tensor]() for _ in range(K)]
    for _, k in itertools.product(range(PRESET["T_Dec"] * (N // B)), range(K)):
        order[k].append(torch.randperm(N, generator=stream)[:B].sort().values)
    drawn = iter(order)

    def some(found: Iterable[Any]) -> Iterable[Any]:
        return found if next(loops) else ()

    def loader(rows: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> Any:
        return Drawn(rows, next(drawn)) if shuffle else DataLoader(rows, batch_size=batch_size)

    with on.code.mended(tqdm=some, DataLoader=loader, torch=Instead(torch, randperm=torch.arange)):
        on.code.theirs.local_to_generator(
            on.code.args(), clients, plain_batches(run), None, COUNTS, generator, adam, B, PRESET["T_Dec"], students,
            "cpu",
        )  # fmt: skip


def decoded(on: Steps, t: int) -> float:
    """Return how far the trained decoders of a round are apart."""
    *_, first = first_draws(on.run, t)
    generator = on.code.decoder(first.state_dict())
    adam = torch.optim.Adam(generator.parameters(), lr=1e-3)
    before = [on.run.up(t)[k].theta if t == 1 else on.run.up(t - 1, 2)[k].theta for k in range(K)]
    students = [on.code.client(w) for w in before]
    train_generator(on, on.run, t, on.code.clients(on.run, t), students, generator, adam)
    return apart({theirs_of(name): w for name, w in on.run.down(t, 1)[0].Dec.items()}, generator.state_dict())


def decoder(on: Steps) -> Iterator[Row]:
    run, what = on.run, "the trained decoder"
    Dec, e = run.down(1, 1)[0].Dec, run.down(1, 1)[0].E[0]
    middle, spread = PRESET["mean_x"], PRESET["sigma_x"]
    theirs, ours = on.code.decoder(Dec), Decoder(H, run.world.shape, W, "standardised", (middle, spread))
    ours.load_state_dict(Dec)
    with torch.no_grad():
        pairs = [(ours.train(mode)(e), theirs.train(mode)(e, None)) for mode in (True, False)]
    found = furthest(apart({"x": x}, {"x": x_ * spread + middle}) for x, x_ in pairs)
    yield Row("decoder", "architecture, as it is", "images in both modes", found, True)
    channels = on.code.transforms.get_cifar10_transform()["test_transform"].transforms[1]
    mean, deviation = (torch.tensor(v)[:, None, None] for v in (channels.mean, channels.std))
    x, x_ = pairs[1]
    found = apart({"x": x}, {"x": (x_ * deviation + mean) * 2 - 1})
    said = "units, as it is: each channel of the real images has its own mean and deviation"
    yield Row("decoder", said, "images in [-1, 1]", found, False)
    for t in (1, 2):
        yield Row("decoder", f"training in round {t}, as it is", what, decoded(on, t), True)


# --- answers, buffer and exchange -----------------------------------------------------------------------------------


RESTING = "docking layers rest in steps on own records"


class Moving(torch.optim.Adam):
    """Adam for which a layer without a gradient has the gradient 0, so that it moves on."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad = torch.zeros_like(p)


def bank(run: Played, t: int, k: int) -> Tensor:
    """Return client k's past images as fedaudit draws them for round t."""
    past = {s: run.down(s, 1)[0] for s in range(1, t)}
    sample = Sample(run.down(t, 1)[0].seed, PRESET["reviewed"])
    rows = {s: sample.rows(k, s, N, m) for s, m in sample.counts(k, past, N).items()}
    made = [decode(past[s].Dec, past[s].E[k][i], run.world.shape, pixels=(MEAN, SIGMA)) for s, i in rows.items()]
    return torch.cat(made) if made else torch.empty(0)


class Sets:
    """Makes the code's sets of synthetic images and keeps them."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.made: list[Any] = []

    def __call__(self, *columns: Tensor) -> Any:
        self.made.append(self.make(*columns))
        return self.made[-1]


def played_exchange(
    on: Steps, run: Played, t: int, clients: list[Any], optimisers: list[Any], banks: Sequence[Tensor] | None = None
) -> list[Any]:  # fmt: skip
    """Let the code exchange knowledge, and return the sets of images that it made: current ones, then past ones."""
    told = run.down(t, 1)[0]
    embeddings = [[(e, None, torch.zeros(len(e), dtype=torch.long)) for e in told.E[k].split(B)] for k in range(K)]
    images = [bank(run, t, k) for k in range(K)] if banks is None else banks
    data_banks = [on.code.dataset.CustomDataset(standard(x), torch.zeros(len(x), dtype=torch.long)) for x in images]
    sets = Sets(on.code.main.FakeDataset)
    torch.manual_seed(0)
    with on.code.mended(FakeDataset=sets, DataLoader=ordered):
        on.code.main.generator_to_local(
            on.code.args(), clients, optimisers, plain_batches(run), COUNTS, on.code.decoder(told.Dec),
            copy.deepcopy(clients[0]), data_banks, embeddings, PRESET["T_FKE"], B,
        )  # fmt: skip
    return sets.made


def exchanged(on: Steps, run: Played, t: int, *, resting: bool) -> tuple[float, list[Any], list[Any]]:
    """Return how far the clients' models and docking layers are apart after the exchange of round t; and the code's
    clients and their optimisers. `resting`: as the code has it.
    """
    clients = on.code.clients(run, t)
    optimisers = adams(clients, torch.optim.Adam if resting else Moving)
    played_exchange(on, run, t, clients, optimisers)
    pairs = [(run.model(k, t) or {}, weights(client)) for k, client in enumerate(clients)]
    pairs += [(run.up(t, 2)[k].z, client.docking.state_dict()) for k, client in enumerate(clients)]
    return furthest(apart(*pair) for pair in pairs), clients, optimisers


def answers(on: Steps) -> Iterator[Row]:
    run, t = on.run, 3
    clients = on.code.clients(run, t)
    made = played_exchange(on, run, t, clients, adams(clients))
    told, logits, embeddings = [], [], []
    for k in range(K):
        said, mine = run.down(t, 1)[k], run.up(t, 1)[k]
        x = decode(said.Dec, said.E[k], run.world.shape, pixels=(MEAN, SIGMA))
        told.append(apart({"x": x}, {"x": torch.from_numpy(made[k].fake_data) * SIGMA + MEAN}))
        for found, rounds in ((made[k], [t]), (made[K + k], [1, 2])):
            p, e = (torch.cat([of[s] for s in rounds]) for of in (mine.Y, mine.Z))
            logits.append(apart({"p": p.softmax(1)}, {"p": torch.from_numpy(found.logit)}))
            embeddings.append(apart({"e": e}, {"e": torch.from_numpy(found.emb)}))
    yield Row("answers", "as it is", "synthetic images", furthest(told), True)
    yield Row("answers", "as it is", "probabilities on current and past images", furthest(logits), True)
    yield Row("answers", "as it is", "docked embeddings of current and past images", furthest(embeddings), True)


def buffer(on: Steps) -> Iterator[Row]:
    """How many of client 0's past images are used, by round: all of what the code keeps, and fedaudit's sample."""
    run = on.run
    for t in (2, 3):
        clients = on.code.clients(run, t)
        whole = []
        for k in range(K):
            past = [(run.down(s, 1)[0].Dec, run.down(s, 1)[0].E[k]) for s in range(1, t)]
            whole.append(torch.cat([decode(Dec, e, run.world.shape, pixels=(MEAN, SIGMA)) for Dec, e in past]))
        made = played_exchange(on, run, t, clients, adams(clients), whole)
        theirs, ours = len(made[K].fake_data), sum(len(y) for s, y in run.up(t, 1)[0].Y.items() if s < t)
        said = f"round {t}, as it is: {theirs} of {(t - 1) * N} rows; fedaudit {ours}"
        yield Row("buffer", said, "past rows of a client that are reviewed", float(theirs - ours), True)


def exchange(on: Steps) -> Iterator[Row]:
    for t in (1, 2, 3):
        what = f"clients' models and docking layers after the exchange of round {t}"
        if t == 2:
            found, *_ = exchanged(on, on.in_order, t, resting=True)
            yield Row("exchange", f"as it is: {RESTING}", what, found, False)
        found, *_ = exchanged(on, on.in_order, t, resting=False)
        yield Row("exchange", "all mended", what, found, True)


def tests(on: Steps) -> Iterator[Row]:
    x, y = on.test
    clients = [on.code.client(on.run.model(k, 3) or {}) for k in range(K)]
    accuracy = on.code.utils.evaluate(clients, [(standard(x), y)], "Test", "Global Exchanged")
    found = furthest(abs(ours - theirs / 100) for ours, theirs in zip(on.accuracy, accuracy, strict=True))
    yield Row("tests", "as it is", "accuracies after the exchange of round 3", found, True)


# --- the whole program ----------------------------------------------------------------------------------------------


def program(on: Steps) -> Iterator[Row]:
    """Two rounds of the code's own main function: what follows what, and what goes on from round to round."""
    what = "clients' models after each exchange, decoders"
    yield Row("program", "two rounds, as it is", what, whole(on, mended=False), False)
    yield Row("program", "two rounds, all of the above mended", what, whole(on, mended=True), True)


def whole(on: Steps, mended: bool) -> float:
    """Let the code's main function run for two rounds, and return how far it is from fedaudit's run."""
    main, run, at, found = on.code.main, on.in_order, Place(), []
    made = [on.code.client(run.first[k], first_draws(run, 1)[0][k].state_dict()) for k in range(K)]
    if not mended:
        made = [copy.deepcopy(made[0]) for _ in made]
    l2g, g2l = main.local_to_generator, main.generator_to_local

    def local_align_clients(clients: list[Any], optimizers: Any, **_: Any) -> None:
        at.t += 1
        aligned(on, run, at.t, clients, adams(clients) if mended else optimizers)

    def get_generator(**_: Any) -> Any:
        return on.code.decoder(first_draws(run, at.t)[2].state_dict())

    def local_to_generator(args: Any, clients: list[Any], generator: Any, generator_optimizer: Any, **more: Any) -> Any:
        torch.manual_seed(0)
        if not mended:
            more["client_data_loaders"] = plain_batches(run)
            made = l2g(args, clients, generator=generator, generator_optimizer=generator_optimizer, **more)
        else:
            made, students = dock(on, run, at.t, clients), more["knowledge_exchanged_clients"]
            train_generator(on, run, at.t, clients, students, generator, generator_optimizer)
        found.append(
            apart({theirs_of(name): w for name, w in run.down(at.t, 1)[0].Dec.items()}, generator.state_dict())
        )
        return made

    def generator_to_local(args: Any, clients: list[Any], data_banks: list[Any], **more: Any) -> Any:
        more["client_data_loaders"] = plain_batches(run)
        if not mended:
            sets = g2l(args, clients, data_banks=data_banks, **more)
        else:
            if at.t > 1:  # fedaudit draws its rows in another order
                data_banks = [Reordered(rows, run, at.t, k) for k, rows in enumerate(data_banks)]
            more["client_optimizers"] = adams(clients, Moving)
            with on.code.mended(DataLoader=ordered):
                sets = g2l(args, clients, data_banks=data_banks, **more)
        found.extend(apart(run.model(k, at.t) or {}, weights(clients[k])) for k in range(K))
        return sets

    named = {
        "init_client_nets": lambda n, *_: [*made, copy.deepcopy(made[0])], "get_generator": get_generator,
        "local_to_generator": local_to_generator, "generator_to_local": generator_to_local,
        "local_align_clients": local_align_clients, "mkdir": lambda path: None,
    }  # fmt: skip
    loader = [(standard(on.test[0]), on.test[1])]
    data = types.SimpleNamespace(
        n_class=CLASSES, client_train_loaders=None, client_fixed_train_loaders=None, full_train_loader=loader,
        full_test_loader=loader, client_class_cnt=COUNTS,
    )  # fmt: skip
    with on.code.mended(**named):
        main.data_free_federated_knowledge_exchange(
            on.code.args(local_align_acc=TAU, knowledge_exchange_rounds=2), data
        )
    return furthest(found)


class Place:
    """Says in which round the program is."""

    t = 0


class Reordered:
    """A client's past images in the order in which fedaudit drew them."""

    def __init__(self, rows: Any, run: Played, t: int, k: int) -> None:
        assert t == 2, "of one past round"
        self.rows, self.order = rows, Sample(run.down(t, 1)[0].seed).rows(k, 1, N, N)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[int(self.order[index])]

    def update(self, *rows: Any) -> None:
        self.rows.update(*rows)


CASES: tuple[Callable[[Steps], Iterator[Row]], ...] = (
    settings, partition, network, augmentation, local_training, docking, decoder, answers, buffer, exchange, tests,
    program,
)  # fmt: skip


# --- the table ------------------------------------------------------------------------------------------------------


def table(kept: Mapping[str, Any]) -> str:
    lines = ["| step | the author's code | compared | largest difference |", "|---|---|---|---:|"]
    for row in kept["rows"]:
        shown = f"{row['difference']:.1e}" if row["difference"] else "0"
        shown = f"**{shown}**" if row["equal"] else shown
        said = row["reference"] + (f" ({row['note']})" if row["note"] else "")
        lines.append(f"| {row['step']} | {said} | {row['compared']} | {shown} |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="a checkout of github.com/HaowenGuan/DFFKE")
    parser.add_argument("--only", default="", help="the steps to compare, by comma")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--table", type=Path, help="print the table of kept figures, and run nothing")
    asked = parser.parse_args(words)
    if asked.table:
        print(table(json.loads(asked.table.read_text())))
        return 0
    if not asked.checkout:
        parser.error("give --checkout, or --table")
    torch.set_num_threads(1)
    code, rows = Code(asked.checkout), []
    on = runs(code)
    chosen = [case for case in CASES if not asked.only or case.__name__ in asked.only.split(",")]
    with code.imported():
        for case in chosen:
            for row in case(on):
                rows.append(asdict(row))
                print(f"{row.step}, {row.reference}: {row.difference:.1e} {row.note}", file=sys.stderr, flush=True)
    kept = {
        "checkout": commit_of(asked.checkout), "torch": torch.__version__, "torchvision": torchvision().__version__,
        "numpy": np.__version__, "machine": platform.machine(), "limit": LIMIT, "rows": rows,
    }  # fmt: skip
    far = [f"{row['step']} ({row['reference']})" for row in rows if row["equal"] and row["difference"] > LIMIT]
    return reported(kept, asked.json, table(kept), far)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
