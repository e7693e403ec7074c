"""Long runs on a GPU: that they end, that memory stays flat, and that recorded steps are the eager ones.

    python benchmarks/gpu_soak.py --out runs/soak                        # every line, about five minutes on an H200
    python benchmarks/gpu_soak.py --out runs/soak --only methods --part 2/4
    python benchmarks/gpu_soak.py --out runs/soak-tiny --tiny --device cpu     # that it runs

`fedavg`: 300 rounds, clients stacked, steps recorded, messages written behind. `dffke`, `dfrd`, `fedaf`, `dp_sgd`,
`shadows`: rounds until 100 steps were recorded, or as many rounds where a kind records none. `methods`: every method
for three rounds with its quick settings. `equality`: stacked against serial in float64, recorded against eager.

Memory is read after every round: of the host, of the GPU as allocated and as reserved, with threads and open files.
Its slope is that of a straight line through the rounds after the first third. `flat` says that the slopes are below
`LIMITS`. A round's own entry in the record is a few kB of the host's. Libraries and the allocator take until about
round 100 to settle, so the host's slope counts in runs of 150 rounds and more. Torch's reserve, which recordings leave
behind, is given back once 4 GiB lie idle (`recorded.SPARE`): what counts is that no more lies idle.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), *map(str, (HERE.parent / "tests" / "helpers").glob("*/")), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpu_speed import LINES as SPEED_LINES  # noqa: E402
from gpu_speed import Bench  # noqa: E402

import fedaudit  # noqa: E402
from fedaudit import registry  # noqa: E402
from fedaudit.training import cuda_graphs  # noqa: E402

RECORDINGS = 100  # of each kind
LIMITS = {"host": 64 << 10, "allocated": 4 << 10, "threads": 0.02, "files": 0.02}  # a round
SETTLED = 150  # rounds from which the host's slope counts
HOW: dict[str, Any] = {"engine": "stacked", "step": "recorded", "eval_every": 1000, "eval_clients": False}


class Enough(Exception):
    """Ends a run that has recorded what it was to record."""


class Soak(Bench):
    part: tuple[int, int] = (1, 1)

    def sample(self) -> dict[str, float]:
        """Return what the process holds now."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found = {
            "host": float(pages * os.sysconf("SC_PAGE_SIZE")),
            "threads": float(threading.active_count()),
            "files": float(len(os.listdir("/proc/self/fd"))),
        }
        if self.device.startswith("cuda"):
            gc.collect()  # what nobody holds any more, a stack among it, may wait long for the next collection
            found["allocated"] = float(torch.cuda.memory_allocated())
            found["reserved"] = float(torch.cuda.memory_reserved())
        return found

    def rounds(self, most: int, recordings: int | None = None, **setting: Any) -> None:
        """Run so many rounds, or until so many steps were recorded; keep seconds a round and the slopes of memory."""
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        samples: list[dict[str, float]] = []
        made = Counted()

        def watch(done: float, total: float, what: str) -> None:
            if done <= len(samples):
                return
            samples.append(self.sample())
            if self.left() < 0 or (recordings is not None and made.count >= recordings and len(samples) >= 20):
                raise Enough

        values: dict[str, Any] = {"device": self.device, "keep_weights": 1, "rounds": most, **HOW, **setting}
        begun = time.perf_counter()
        try:
            with made:
                record = fedaudit.run(out=folder / "run", watch=watch, **values)
            notes = record.notes
        except Enough:
            notes = list(cuda_graphs.unrecorded)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        took = time.perf_counter() - begun
        self.keep(samples, made.count, took, notes, most if recordings is None else None)

    def keep(
        self, samples: list[dict[str, float]], made: int, took: float, notes: list[str], wanted: int | None = None
    ) -> None:
        slopes = slopes_of(samples)
        judged = [name for name in slopes if name in LIMITS and (name != "host" or len(samples) >= SETTLED)]
        flat = all(slopes[name] <= LIMITS[name] for name in judged)
        idle = max((s["reserved"] - s["allocated"] for s in samples if "reserved" in s), default=0.0)
        flat = flat and idle <= 1.25 * cuda_graphs.SPARE
        whole = wanted is None or len(samples) == wanted
        last = {name: round(value) for name, value in samples[-1].items()}
        self.save(
            rounds=len(samples), recordings=made, seconds=round(took, 1), slopes_a_round=slopes, flat=flat,
            judged=judged, most_idle=round(idle), last=last, whole=whole, notes=notes,
        )  # fmt: skip


class Counted:
    """Counts the recordings that are made within."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Counted:
        self._capture = cuda_graphs._capture

        def capture(step: Callable[[], cuda_graphs.Outputs]) -> Any:
            self.count += 1
            return self._capture(step)

        cuda_graphs._capture = capture  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        cuda_graphs._capture = self._capture  # type: ignore[assignment]


def slopes_of(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return what each quantity grows by in a round, by a straight line through all rounds after the first third."""
    rest = samples[len(samples) // 3 :]
    if len(rest) < 3:
        return {}
    at = np.arange(len(rest))
    return {name: round(float(np.polyfit(at, [s[name] for s in rest], 1)[0]), 3) for name in rest[0]}


Line = Callable[[Soak], None]
LINES: dict[str, Line] = {}


def line(fn: Line) -> Line:
    LINES[fn.__name__] = fn
    return fn


DATA: dict[str, Any] = {"dataset": "digits", "clients": 10, "partition": "dirichlet:0.5", "aux": 0.2}


@line
def fedavg(soak: Soak) -> None:
    """300 rounds of FedAvg: stacked, recorded, written behind."""
    rounds = 6 if soak.tiny else 300
    soak.rounds(rounds, method="fedavg", model="fedfree_cnn", set={"E": 2, "B": 10, "eta": 0.01}, **DATA)


@line
def dffke(soak: Soak) -> None:
    """DFFKE until 100 steps were recorded."""
    quick = {**_quick("dffke"), "E_local": 4, "T_Tran": 10, "T_Dec": 4, "T_FKE": 4, "tau": "off"}
    soak.rounds(3 if soak.tiny else 100, RECORDINGS, method="dffke", model="cnn_bn", set=quick, **DATA)


@line
def dfrd(soak: Soak) -> None:
    """DFRD until 100 steps were recorded."""
    quick = {**_quick("dfrd"), "I": 10, "I_g": 2, "I_d": 2}
    soak.rounds(3 if soak.tiny else 100, RECORDINGS, method="dfrd", model="cnn", set=quick, **DATA)


@line
def fedaf(soak: Soak) -> None:
    """FedAF until 100 steps were recorded."""
    quick = {**_quick("fedaf"), "steps": 40, "B": 8, "E": 4, "clamp": "step"}
    soak.rounds(3 if soak.tiny else 100, RECORDINGS, method="fedaf", model="cnn_bn", set=quick, **DATA)


@line
def dp_sgd(soak: Soak) -> None:
    """FedAvg under DP-SGD, 100 rounds: its stacks are not recorded."""
    privacy = {"training": {"mechanism": "dp-sgd", "sensitivity": "clip:1.0", "noise_multiplier": 1.0}}
    rounds = 3 if soak.tiny else 100
    soak.rounds(rounds, RECORDINGS, method="fedavg", model="cnn", set={"E": 2, "B": 16}, privacy=privacy, **DATA)


@line
def shadows(soak: Soak) -> None:
    """Shadow models as one stack, recorded anew each time."""
    from test_shadows import jobs

    from fedaudit.training.stacked.stack import fit_together

    samples: list[dict[str, float]] = []
    begun = time.perf_counter()
    with Counted() as made, cuda_graphs.conditions("recorded", stacked=True):
        for _ in range(3 if soak.tiny else RECORDINGS):
            fit_together(jobs("convnet@0.25", count=4, shape=(3, 8, 8), n=64, batch=16, steps=20, device=soak.device))
            samples.append(soak.sample())
    soak.keep(samples, made.count, time.perf_counter() - begun, list(cuda_graphs.unrecorded))


@line
def methods(soak: Soak) -> None:
    """Every method for three rounds with its quick settings."""
    from fingerprint import BASE, MODELS

    number, parts = soak.part
    names = [name for i, name in enumerate(sorted(registry.names("methods"))) if i % parts == number - 1]
    failed: dict[str, str] = {}
    passed: dict[str, float] = {}
    for name in names[:2] if soak.tiny else names:
        if soak.left() < 5:
            failed[name] = "no time left"
            continue
        begun = time.perf_counter()
        try:
            _three_rounds(soak, name, dict(BASE), MODELS)
            passed[name] = round(time.perf_counter() - begun, 1)
        except Exception as e:  # noqa: BLE001 (a method that fails must not cost the others)
            traceback.print_exc()
            failed[name] = f"{type(e).__name__}: {e}".splitlines()[0]
        soak.save(passed=passed, failed=failed, of=len(names))


def _three_rounds(soak: Soak, name: str, base: dict[str, Any], models: list[dict[str, Any]]) -> None:
    """Run a method on the first networks that it allows."""
    from fedaudit import FedauditError

    for number, of_method in enumerate(models):
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        try:
            values = {**base, **HOW, "device": soak.device, "method": name, "set": _quick(name), **of_method}
            fedaudit.run(out=folder / "run", **values)
            return
        except FedauditError:
            if number == len(models) - 1:
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@line
def equality(soak: Soak) -> None:
    """Stacked and serial in float64; recorded and eager to the bit."""
    SPEED_LINES["equality"](soak)


def _quick(method: str) -> dict[str, Any]:
    return dict(registry.find(method).quick)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(LINES), help="lines, separated by commas")
    parser.add_argument("--part", default="1/1", help="of the methods: 2/4 is the second of four parts")
    parser.add_argument("--seconds", type=float, default=600.0, help="nothing further begins after these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes with which a CPU is through in a minute")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.only.split(",") if name not in LINES]:
        parser.error(f"unknown line {unknown[0]!r}; choose from {', '.join(LINES)}")
    soak = Soak(chosen.out, chosen.device, chosen.tiny, chosen.seconds)
    number, _, parts = chosen.part.partition("/")
    soak.part = int(number), int(parts)
    for name in chosen.only.split(","):
        suffix = f"-{soak.part[0]}" if name == "methods" and soak.part[1] > 1 else ""
        soak.name, soak.figures = f"{name}{suffix}", {}
        where = torch.cuda.get_device_name() if chosen.device.startswith("cuda") else "cpu"
        soak.save(line=(LINES[name].__doc__ or "").strip(), device=where, torch=torch.__version__, tiny=chosen.tiny)
        begun = time.perf_counter()
        try:
            LINES[name](soak)
        except Exception as e:  # noqa: BLE001 (a line that fails must not cost the others)
            traceback.print_exc()
            soak.save(failed=f"{type(e).__name__}: {e}".splitlines()[0])
        soak.save(line_s=round(time.perf_counter() - begun, 1))


if __name__ == "__main__":
    main()
