"""What the stacked engine and recorded steps gain on a GPU, line by line, against the serial engine of the same commit.

    python benchmarks/gpu_speed.py --out runs/speed                 # every line
    python benchmarks/gpu_speed.py --out runs/speed --only fedavg,dfrd --seconds 120
    python benchmarks/gpu_speed.py --out runs/speed-tiny --tiny --device cpu   # that it runs, not how fast

Each line is one file, written as soon as a figure of it is known, so that a time limit loses nothing. A round's time is
the median over the rounds between the first and the last, or that of the second of two: the first has the warm-ups, the
recordings and, where asked for, the compiling, whose time stands beside it; the last has the evaluation. Kernels that a
compiler made stay on the disk, where later lines find them. `equality` says first whether the numbers are the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), *map(str, (HERE.parent / "tests" / "helpers").glob("*/")), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from round_seconds import each_round  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import fedaudit  # noqa: E402
from fedaudit import registry  # noqa: E402
from fedaudit.methods.condensation._condense import as_the_authors  # noqa: E402
from fedaudit.runtime.meter import Span, Timing  # noqa: E402
from fedaudit.runtime.run_record import RunRecord  # noqa: E402
from fedaudit.setting import Setting  # noqa: E402
from fedaudit.training.cuda_graphs import unrecorded  # noqa: E402
from fedaudit.training.device_rates import rates  # noqa: E402
from fedaudit.training.models import build  # noqa: E402
from fedaudit.training.stacked import mapped_loss  # noqa: E402
from fedaudit.training.stacked.stack import _faster  # noqa: E402
from fedaudit.wire.transcript import Transcript  # noqa: E402

Line = Callable[["Bench"], None]
LINES: dict[str, Line] = {}


def line(fn: Line) -> Line:
    LINES[fn.__name__] = fn
    return fn


class Bench:
    def __init__(
        self, out: Path, device: str, tiny: bool, seconds: float, ways: Sequence[str] = (), whole: bool = False
    ):
        self.out, self.device, self.tiny, self.ways_wanted, self.whole = out, device, tiny, ways, whole
        self.ends = time.perf_counter() + seconds
        self.name, self.figures, self.products = "", dict[str, Any](), dict[str, float]()
        self.spent = defaultdict[tuple[str, int], float](float)  # of the last run: seconds by party and round
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self.ends - time.perf_counter()

    def save(self, **figures: Any) -> None:
        """Keep what is known of this line so far."""
        self.figures |= figures
        text = json.dumps(self.figures, indent=1)
        (self.out / f"{self.name}.json").write_text(text + "\n")
        print(f"{self.name}: {json.dumps(figures)}", flush=True)

    def run(self, **setting: Any) -> tuple[RunRecord, Path, float]:
        """A run in a folder of its own: its record, the folder, and the seconds it took."""
        folder = Path(tempfile.mkdtemp(prefix="speed-"))
        values = {"device": self.device, "eval_clients": False, "keep_weights": 1, "aux": 0.0, "validation": 0.0}
        values |= {"holdout": 0.0, **setting}
        if self.tiny:
            values |= {"dataset": "digits", "image_size": None, "aux": 0.7}
        self.spent.clear()
        add = Timing.add

        def note(timing: Timing, span: Span) -> None:
            add(timing, span)
            if (party := {"round": "server", "task": "clients"}.get(span.phase)) is not None:
                self.spent[party, span.round] += span.wall_s

        begun = time.perf_counter()
        with mock.patch.object(Timing, "add", note):
            record = fedaudit.run(out=folder / "run", **values)
        self.sync()
        return record, folder / "run", time.perf_counter() - begun

    def watch(self, way: str) -> Callable[[float, float, str], None]:
        """Return what keeps the seconds of each round of a run as it ends, for a run that a limit cuts off."""
        return each_round(lambda seconds: self.save(**{f"{way}_rounds_so_far_s": seconds}))

    def floor(self, arch: str, shape: tuple[int, int, int], rows: int) -> dict[str, float]:
        """Keep and return the seconds that training on so many rows takes at least, by precision: its arithmetic over
        the rate that a large product of matrices reaches on this machine."""
        model, x = build(arch, shape=shape, classes=10), torch.zeros(2, *shape)
        with FlopCounterMode(display=False) as counter:
            torch.nn.functional.cross_entropy(model(x), torch.zeros(2, dtype=torch.long)).backward()
        if not self.products:
            self.products = rates(torch.device(self.device)).products
        found = {name: counter.get_total_flops() / 2 * rows / rate for name, rate in self.products.items()}
        self.save(floor_s=found)
        return found

    def sync(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def variants(self, names: dict[str, dict[str, Any]], rounds: int = 3, **setting: Any) -> None:
        """The same setting carried out in several ways, each compared with the serial one, or with the first. A way may
        have a number of rounds of its own."""
        known: dict[str, dict[str, Any]] = {}
        unrecorded.clear()
        for name, how in names.items():
            if self.ways_wanted and name not in self.ways_wanted:
                continue
            if self.left() < 5:
                self.save(**{f"{name}_skipped": "no time left"})
                continue
            try:
                whole = {"rounds": rounds, "eval_every": rounds, "watch": self.watch(name)}
                record, folder, took = self.run(**{**setting, **whole, **how})
            except Exception as e:  # noqa: BLE001 (one way that fails must not cost the others)
                self.save(**{f"{name}_failed": f"{type(e).__name__}: {e}".splitlines()[0]})
                traceback.print_exc()
                continue
            known[name] = self.figures_of(record, took)
            base = known.get("serial", next(iter(known.values())))
            for figures in known.values():
                for part in ("round_s", "server_s", "clients_s"):
                    if figures[part] > 0:
                        figures[f"{part[:-2]}_times"] = round(base[part] / figures[part], 2)
            self.save(**known)
            shutil.rmtree(folder.parent, ignore_errors=True)

    def figures_of(self, record: RunRecord, took: float) -> dict[str, Any]:
        rows = record.timings
        spent, rounds = [row.wall_s for row in record.rounds], len(record.rounds)
        parties = {party: [self.spent[party, t + 1] for t in range(rounds)] for party in ("server", "clients")}

        def of(party: str, *phases: str) -> float:
            found = (r.wall_s for r in rows if r.party.startswith(party) and r.phase in phases)
            return float(sum(found))

        return {
            "round_s": round(middle(spent), 3),
            "first_round_s": round(spent[0], 3),
            "rounds_s": [round(wall_s, 3) for wall_s in spent],
            **{f"{party}_rounds_s": [round(s, 3) for s in seconds] for party, seconds in parties.items()},
            "run_s": round(took, 2),
            "absent": sum(len(row.absent) for row in record.rounds),  # answers that are missing: less work was done
            **{f"{party}_s": round(middle(seconds), 3) for party, seconds in parties.items()},
            "codec_s": round(of("client", "encode", "decode") / rounds, 3),
            "peak_gpu_gb": round(record.peak_gpu_bytes / 1e9, 2),
            "accuracy": _accuracy(record),
            "engine": record.setting.engine,
            "step": record.setting.step,
            "precision": record.setting.precision,
            "notes": record.notes,
            "unrecorded": list(unrecorded),
            "products_faster": sorted(_faster.values()),
        }


def middle(rounds_s: Sequence[float]) -> float:
    """Return the median over the rounds between the first and the last, or the time of the last of two or of one."""
    between = sorted(rounds_s[1:-1] or rounds_s[-1:])
    return between[len(between) // 2]


def _accuracy(record: RunRecord) -> float | None:
    utility = record.rounds[-1].utility
    return utility.global_.test.accuracy if utility and utility.global_ else None


SERIAL = {"engine": "serial", "step": "eager"}
STACKED = {"engine": "stacked", "step": "recorded"}
COMPILED = {"engine": "stacked", "step": "compiled"}


@line
def equality(bench: Bench) -> None:
    """Stacked and serial in float64; recorded and eager to the bit."""
    from precision import double

    def sent(folder: Path) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for entry in Transcript(folder / "transcript").entries():
            for name in entry.fields:
                value = entry[name]
                parts = value.items() if isinstance(value, dict) else [("", value)]
                for key, t in parts:
                    if isinstance(t, torch.Tensor) and t.is_floating_point():
                        found[f"{entry.round}.{entry.ask} {entry.direction} {entry.client} {name} {key}"] = t.double()
        return found

    deep: dict[str, Any] = {"method": "fedavg", "dataset": "digits", "clients": 4, "rounds": 2, "keep_weights": 2}
    deep |= {
        "precision": "tf32",
        "model": "cnn_bn" if bench.tiny else "resnet18_cifar",
        "partition": "dirichlet:0.5",
        "set": {"E": 3, "B": 16},
    }
    with double("fedavg"):  # in float64 nothing is rounded to TF32, and models still go side by side
        alone = sent(bench.run(**deep, **SERIAL)[1])
        for name, how in (("resnet18", STACKED), ("resnet18_compiled", COMPILED)):
            record, folder, _ = bench.run(**deep, **how)
            found = sent(folder)
            apart = {t: [alone[k] - found[k] for k in alone if k.startswith(t) and alone[k].numel()] for t in "12"}
            far = {t: max(float(each.abs().max()) for each in of_round) for t, of_round in apart.items()}
            same = {f"{name}_same_fields": alone.keys() == found.keys(), f"{name}_compile_notes": record.notes}
            bench.save(**same, **{f"{name}_farthest_float64_by_round": far})
    one, two = (bench.run(**deep, **STACKED)[0] for _ in range(2))
    bench.save(resnet18_again_same_bits=one.transcript_digest == two.transcript_digest, resnet18_notes=two.notes)
    frozen = dict(registry.find("dffke").quick) | {"T_Dec": 3, "B_Dec": 50}  # type: ignore[attr-defined]
    frozen_deep = {**deep, "method": "dffke", "aux": 0.3, "set": frozen}  # a decoder trains on frozen ResNet-18
    with double("dffke"):
        (_, a, _), (_, b, _) = (bench.run(**frozen_deep, **how) for how in (SERIAL, STACKED))
        x, y = sent(a), sent(b)
        far = {t: max(float((x[k] - y[k]).abs().max()) for k in x if k.startswith(t) and x[k].numel()) for t in "12"}
    bench.save(dffke_resnet18_same_fields=x.keys() == y.keys(), dffke_resnet18_farthest_float64_by_round=far)
    one, two = (bench.run(**frozen_deep, **STACKED)[0] for _ in range(2))
    same = one.transcript_digest == two.transcript_digest
    bench.save(dffke_resnet18_again_same_bits=same, dffke_resnet18_notes=two.notes)
    for method in ("fedaf", "fedavg", "dfrd", "dffke"):
        quick = dict(registry.find(method).quick)  # type: ignore[attr-defined]
        if method == "fedaf":
            quick |= {"steps": 40, "B": 8}  # enough to record, and draws
        if method == "dfrd":
            quick |= {"I": 10, "I_g": 2, "I_d": 2}  # likewise
        setting: dict[str, Any] = {"method": method, "dataset": "digits", "clients": 4, "rounds": 2, "aux": 0.3}
        setting |= {
            "keep_weights": 2,
            "model": "cnn_bn" if method in ("fedavg", "fedaf") else "cnn",
            "partition": "dirichlet:0.5",
            "set": quick,
        }
        with double(method):
            (_, a, _), (_, b, _) = (bench.run(**setting, **how) for how in (SERIAL, STACKED))
            x, y = sent(a), sent(b)
            same = x.keys() == y.keys()
            far = max(float((x[key] - y[key]).abs().max()) for key in x if x[key].numel())
        bench.save(**{f"{method}_same_fields": same, f"{method}_farthest_float64": far})
        one, two = (bench.run(**setting, engine="serial", step=step)[0] for step in ("eager", "recorded"))
        same_bits = one.transcript_digest == two.transcript_digest
        bench.save(**{f"{method}_recorded_same_bits": same_bits, f"{method}_notes": two.notes})
        if method == "fedaf":
            three = bench.run(**setting, **STACKED)[0]
            bench.save(fedaf_side_by_side_same_bits=two.transcript_digest == three.transcript_digest, notes=three.notes)


@line
def fedavg(bench: Bench) -> None:
    """ConvNet 3 x 128 with batch norm, Fashion-MNIST, ten clients, B = 64: 938 steps a round. Goal: 6 times."""
    tf32 = {"precision": "tf32"}
    bench.floor("convnet", (1, 28, 28), 60_000)
    bench.variants(
        {
            "serial": SERIAL,
            "stacked_tf32_compiled": COMPILED | tf32,
            "stacked_tf32": STACKED | tf32,
            "stacked": STACKED,
            "serial_tf32": SERIAL | tf32,
            "stacked_bf16_compiled": COMPILED | {"precision": "bf16"},
        },
        method="fedavg", set={"E": 1, "B": 64, "eta": 0.01}, dataset="fashion-mnist", clients=10, partition="iid",
        model="convnet",
    )  # fmt: skip


@line
def fedfree_cnn(bench: Bench) -> None:
    """FedFree's network, B = 10, a fifth of Fashion-MNIST: 1200 steps a round. Goal: 12 times."""
    tf32 = {"precision": "tf32"}
    bench.floor("fedfree_cnn", (1, 28, 28), 12_000)
    bench.variants(
        {
            "serial": SERIAL,
            "stacked": STACKED,
            "stacked_tf32": STACKED | tf32,
            "stacked_tf32_compiled": COMPILED | tf32,
        },
        method="fedavg", set={"E": 1, "B": 10, "eta": 0.01}, dataset="fashion-mnist", clients=10, partition="iid",
        model="fedfree_cnn", aux=0.8,
    )  # fmt: skip


def fedfree_row(bench: Bench, rounds: int) -> Setting:
    """Return the setting of FedFree's Table 1 row, compiled and in TF32, for so many rounds."""
    values: dict[str, Any] = {"method": "fedfree", "preset": "cifar10", "dataset": "cifar10", "model": "fedfree_cnn"}
    values |= {"clients": 10, "partition": "classes:2", "validation": 0.0, "aux": 0.0, "keep_weights": 1}
    values |= {"rounds": rounds, "eval_every": rounds, "eval_clients": False}
    if bench.tiny:
        values |= {"dataset": "digits", "preset": None, "model": "cnn", "set": {"E": 1, "B": 32}}
    return Setting.make(**values, device=bench.device, precision="tf32", **COMPILED)


@line
def seeds_together(bench: Bench) -> None:
    """FedFree's Table 1 row: one seed, and three as one stack of 30. Goal: three in 1.5 times the time of one, which is
    twice as fast as one after another."""
    from fedaudit.runtime.seeds_together import run_seeds

    setting = fedfree_row(bench, 2 if bench.tiny else 6)
    trained = round(50_000 * (1 - setting.holdout))  # own tests need records that nobody is trained on
    one_s, floor = 0.0, bench.floor("fedfree_cnn", (3, 32, 32), trained * 5)
    for name, seeds in (("one_seed", [0]), ("three_seeds", [0, 1, 2])):
        folder, compiled = Path(tempfile.mkdtemp(prefix="speed-")), mock.Mock(side_effect=mapped_loss._compile)
        with mock.patch.object(mapped_loss, "_compile", compiled):
            records = run_seeds(setting, seeds, out=[folder / str(seed) for seed in seeds])
        rounds = records[-1].rounds  # the last seed's: all take turns, and each waits for the others in each round
        took = middle([row.wall_s for row in rounds])
        one_s = one_s or took
        figures = {
            "s": round(took, 3),
            "first_s": round(rounds[0].wall_s, 3),
            "times": round(len(seeds) * one_s / took, 2),
            "of_one": round(took / one_s, 2),
            "step": "compiled" if compiled.called else "recorded",
            "floor_s": len(seeds) * floor.get("tf32", 0.0),
            "rounds_s": [row.wall_s for row in rounds],
            "shares_s": [[row.own_s for row in record.rounds] for record in records],
            "notes": records[0].notes,
        }
        bench.save(**{name: figures})
        shutil.rmtree(folder, ignore_errors=True)


@line
def dfrd(bench: Bench) -> None:
    """DFRD's server: ten teachers of the ConvNet, its preset's steps. Goal: 4 times, of server_s."""
    values: dict[str, Any] = {"host": {"E": 1, "B": 64, "eta": 0.05}}
    if bench.tiny:
        values = dict(registry.find("dfrd").quick)  # type: ignore[attr-defined]
    tf32 = {"precision": "tf32"}
    ways = {"serial": SERIAL, "stacked_tf32": STACKED | tf32, "stacked": STACKED, "serial_tf32": SERIAL | tf32}
    bench.variants(
        ways | {"stacked_tf32_compiled": COMPILED | tf32},
        rounds=2, method="dfrd", preset=None if bench.tiny else "fashion-mnist", set=values,
        dataset="fashion-mnist", clients=10, partition="dirichlet:1.0", model="convnet", aux=0.8,
    )  # fmt: skip


def _dffke(bench: Bench, ways: dict[str, dict[str, Any]], rounds: int) -> None:
    steps: dict[str, Any] = {"E_local": 20, "tau": "off"}
    if bench.tiny:
        steps = dict(registry.find("dffke").quick)  # type: ignore[attr-defined]
    bench.variants(
        ways, rounds=rounds, method="dffke", set=steps, dataset="fashion-mnist", clients=3 if bench.tiny else 10,
        partition="dirichlet:1", model="cnn_bn" if bench.tiny else "convnet", aux=0.8,
    )  # fmt: skip


@line
def dffke(bench: Bench) -> None:
    """DFFKE's first round, ten ConvNets, a fifth of Fashion-MNIST, its own epochs but 20 of local training. Goal: 4."""
    ways = {"stacked_tf32": STACKED | {"precision": "tf32"}, "serial": SERIAL, "stacked": STACKED}
    _dffke(bench, ways, 1)


@line
def dffke_second(bench: Bench) -> None:
    """The same for two rounds; the second, which also reviews the first, counts."""
    tf32 = {"precision": "tf32"}
    ways = {"stacked_tf32": STACKED | tf32, "stacked_tf32_compiled": COMPILED | tf32}
    _dffke(bench, ways, 2)


@line
def dffke_resnet18(bench: Bench) -> None:
    """The same with ResNet-18, a twentieth of the data and few epochs: mostly what is not training. Two rounds."""
    steps = {"E_local": 2, "T_Tran": 5, "T_Dec": 1, "T_FKE": 1}
    if bench.tiny:
        steps = dict(registry.find("dffke").quick)  # type: ignore[attr-defined]
    bench.variants(
        {"serial": SERIAL, "stacked_tf32": STACKED | {"precision": "tf32"}, "stacked": STACKED},
        rounds=2, method="dffke", set=steps, dataset="fashion-mnist", clients=3 if bench.tiny else 10,
        partition="dirichlet:1", model="cnn_bn" if bench.tiny else "resnet18", aux=0.95,
    )  # fmt: skip


@line
def fedzge_row(bench: Bench) -> None:
    """FedAvg as in FedZGE's Table 2: stock ResNet-18, CIFAR-10, ten epochs of Adam in batches of 256. Two rounds."""
    tf32, bf16 = {"precision": "tf32"}, {"precision": "bf16"}
    bench.floor("resnet18", (3, 32, 32), 50_000 * 10)
    bench.variants(
        {
            "serial": SERIAL | tf32,
            "stacked_tf32": STACKED | tf32,
            "stacked_bf16": STACKED | bf16,
            "stacked_bf16_compiled": COMPILED | bf16,
        },
        rounds=2, method="fedavg", set={"E": 1 if bench.tiny else 10, "B": 256, "eta": 0.01, "opt": "adam"},
        dataset="cifar10", clients=3 if bench.tiny else 10, partition="dirichlet:1",
        model="cnn_bn" if bench.tiny else "resnet18",
    )  # fmt: skip


@line
def shadows(bench: Bench) -> None:
    """64 ConvNets of width 64, batch 64, as shadows of one client. Goal: 10 times over one after another."""
    from test_shadows import jobs

    from fedaudit.training.cuda_graphs import conditions
    from fedaudit.training.stacked.stack import fit_together

    def work() -> Any:
        small = {"count": 4, "shape": (3, 8, 8), "n": 64, "batch": 16, "steps": 20}
        large = {"count": 64, "shape": (3, 32, 32), "n": 512, "batch": 64, "steps": 100}
        return jobs("convnet@0.5", **(small if bench.tiny else large), device=bench.device)

    def timed(fn: Callable[[], Any]) -> float:
        bench.sync()
        begun = time.perf_counter()
        fn()
        bench.sync()
        return time.perf_counter() - begun

    alone = work()
    for job in alone[:1]:
        job.alone()
    alone = work()
    alone_s = timed(lambda: [job.alone() for job in alone])
    bench.save(one_by_one_s=round(alone_s, 2))
    for name, stepping, compile in (
        ("stacked_eager", "eager", False),
        ("stacked_recorded", "recorded", False),
        ("stacked_compiled", "recorded", True),
    ):
        if bench.left() < 10:
            return
        with conditions(stepping):  # type: ignore[arg-type]
            first_s = timed(functools.partial(fit_together, work(), compile=compile))
            these = work()
            took = timed(functools.partial(fit_together, these, compile=compile))
        norms = [float(sum(p.norm() for p in job.model.parameters())) for job in (*alone, *these)]
        apart = max(abs(a / b - 1) for a, b in zip(norms[: len(alone)], norms[len(alone) :], strict=True))
        bench.save(**{name: {"s": round(took, 2), "first_s": round(first_s, 2), "times": round(alone_s / took, 1),
                             "norms_apart": apart}})  # fmt: skip


def _attacked(bench: Bench, spec: dict[str, Any], **setting: Any) -> None:
    """One attack on every client of a run, one after the other and as one stack: the attack's own time, without scores.
    Twice each; the second counts. How far images lie from those of the first run of all is told, too: for the second,
    one after the other again, as a control that begins 1e-6 beside it where images are descended."""
    from fedaudit.attack import attack_run
    from fedaudit.attacks.inversion import _invert
    from fedaudit.attacks.inversion._matching import Matching
    from fedaudit.runtime.folder import RunFolder
    from fedaudit.runtime.task import compute
    from fedaudit.wire.transcript import Threat

    _, folder, _ = bench.run(**{**setting, "holdout": 0.2, "aux": 0.2}, rounds=1, eval_every=1)
    opened = RunFolder(folder)
    real, images, spent = attack_run._claims, list[Any](), 0.0

    def timed(attack: Any, name: str, scenes: Any) -> Any:
        nonlocal spent
        bench.sync()
        begun = time.perf_counter()
        claims = real(attack, name, scenes)
        bench.sync()
        spent += time.perf_counter() - begun
        images.extend(found.images for found in claims)
        return claims

    descend = Matching._descend

    def beside(self: Matching, jobs: Any, begin: list[torch.Tensor], *more: Any) -> Any:
        return descend(self, jobs, [start * (1 + 1e-6) for start in begin], *more)

    base, alone_images = None, list[Any]()
    for way, devices in (("one_by_one", set[str]()), ("stacked", {"cuda", "cpu"})):
        seconds = []
        for control in (False, way == "one_by_one"):
            images.clear()
            spent = 0.0
            name, attack = attack_run.made(spec)
            stacks, clock, nudge = (
                mock.patch.object(_invert, "STACKS", devices),
                mock.patch.object(attack_run, "_claims", timed),
                mock.patch.object(Matching, "_descend", beside if control else descend),
            )
            with stacks, clock, nudge, compute(opened.world):
                attack_run._one(attack, name, opened, opened.world, Threat.parse("server"), None, lambda *_: None)
            seconds.append(spent)
            alone_images = alone_images or list(images)
        base = base or seconds[-1]
        apart = max(float((a - b).abs().mean()) for a, b in zip(alone_images, images, strict=True))
        bench.save(**{way: {"s": round(seconds[-1], 3), "first_s": round(seconds[0], 3),
                            "times": round(base / seconds[-1], 2), "images_apart": apart}})  # fmt: skip


@line
def decoders(bench: Bench) -> None:
    """Inversion networks for DFFKE's embeddings, one for each of ten clients (Fashion-MNIST)."""
    quick = {"tau": "off", "E_local": 1, "B": 64, "h": 32, "T_Tran": 0, "T_Dec": 0, "T_FKE": 0, "w_Dec": 1, "R": 1}
    spec = {"attack": "decoder", "steps": 5 if bench.tiny else 300}
    _attacked(bench, spec, method="dffke", set=quick, dataset="fashion-mnist", clients=10, model="cnn", partition="iid")


@line
def matching(bench: Bench) -> None:
    """Gradients matched by the cosine: ten clients, four restarts each, eight images (Fashion-MNIST)."""
    spec = {"attack": "gradient_match", "steps": 3 if bench.tiny else 100, "restarts": 4, "together": 64}
    quick = {"E": 1, "B": 64, "eta": 0.1}
    setting: dict[str, Any] = {"dataset": "fashion-mnist", "clients": 10, "model": "cnn", "partition": "iid"}
    _attacked(bench, spec, method="fedavg", set=quick, **setting)


FEDAF: dict[str, Any] = {"method": "fedaf", "dataset": "fashion-mnist", "clients": 10, "model": "convnet"}
FEDAF |= {"preset": "fashion-mnist", "partition": "dirichlet-capped:0.05", "set": {"T_over": "batch"}}
FEDAF_CIFAR10 = {"dataset": "cifar10", "preset": "cifar10", "partition": "dirichlet-capped:0.02"}
FEDAF_TINY: dict[str, Any] = {"preset": None, "clients": 3, "model": "cnn_bn"}
FEDAF_TINY["set"] = {"steps": 20, "E": 2, "IPC": 2, "least": 2}


@line
def fedaf(bench: Bench) -> None:
    """FedAF's preset on Fashion-MNIST, 10 clients, capped 0.05, T_over = batch: eight rounds, or with `--whole` all 20.
    Goal: 240 s for all of them, and 12 s a round. The other ways run one round."""
    _fedaf(bench, FEDAF, "tf32")


def _fedaf(bench: Bench, setting: dict[str, Any], *precisions: str) -> None:
    rounds = 2 if bench.tiny else 20 if bench.whole else 8
    ways = {f"stacked_{name}_compiled": COMPILED | {"precision": name} for name in precisions}
    ways["stacked_tf32"] = STACKED | {"precision": "tf32", "rounds": 1}
    ways["serial"] = SERIAL | {"precision": "tf32", "rounds": 1}
    bench.variants(ways, rounds=rounds, **setting | (FEDAF_TINY if bench.tiny else {}))


@line
def fedaf_cifar10(bench: Bench) -> None:
    """FedAF's preset on CIFAR-10, 10 clients, capped 0.02, with `sigma_x = 0.402`: as the preset stands, answers of
    clients are missing in the second and third rounds. Eight rounds, or with `--whole` all 20. Goal: 240 s for all of
    them. The other ways run one round."""
    _fedaf(bench, FEDAF | FEDAF_CIFAR10 | {"set": {"sigma_x": 0.402}}, "bf16", "tf32")


@line
def fedaf_cifar10_row(bench: Bench) -> None:
    """The same in the reading that stands in FedAF's table, five rounds."""
    set_ = {"T_over": "batch", "start": "single", "lgkm_scale": "mean", **as_the_authors("cifar10")}
    ways = {"stacked_tf32_compiled": COMPILED | {"precision": "tf32", "rounds": 5}}
    bench.variants(ways, **FEDAF | FEDAF_CIFAR10 | {"set": set_} | (FEDAF_TINY if bench.tiny else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(LINES), help="lines, separated by commas")
    parser.add_argument("--ways", default="", help="of carrying a line out, separated by commas; all of them otherwise")
    parser.add_argument("--seconds", type=float, default=1800.0, help="no further measurement begins after these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes with which a CPU is through in a minute")
    parser.add_argument("--whole", action="store_true", help="all 20 rounds of FedAF's lines, and not eight")
    chosen = parser.parse_args()
    names = chosen.only.split(",")
    if unknown := [name for name in names if name not in LINES]:
        parser.error(f"unknown line {unknown[0]!r}; there is: {', '.join(LINES)}")
    np.random.seed(0)
    ways = [way for way in chosen.ways.split(",") if way]
    bench = Bench(chosen.out, chosen.device, chosen.tiny, chosen.seconds, ways, chosen.whole)
    if chosen.device.startswith("cuda"):  # else the first line's first run would have the start of CUDA's libraries
        warm = {"dataset": "digits", "clients": 2, "rounds": 1, "model": "fedfree_cnn", "aux": 0.5}
        bench.run(method="fedavg", set={"E": 1, "B": 10}, **warm, **SERIAL)
    for name in names:
        if bench.left() < 5:
            print(f"{name}: no time left", flush=True)
            continue
        bench.name, bench.figures = name, {}
        begun = time.perf_counter()
        doc = (LINES[name].__doc__ or "").strip()
        where = torch.cuda.get_device_name() if chosen.device.startswith("cuda") else "cpu"
        bench.save(line=doc, device=where, torch=torch.__version__, tiny=chosen.tiny)
        try:
            LINES[name](bench)
        except Exception as e:  # noqa: BLE001 (a line that fails must not cost the others)
            traceback.print_exc()
            bench.save(failed=f"{type(e).__name__}: {e}".splitlines()[0])
        bench.save(line_s=round(time.perf_counter() - begun, 1))


if __name__ == "__main__":
    main()
