"""Count, on a CPU, the arithmetic of lines whose floor `benchmarks/gpu_speed.py` does not know: a round or an attack.

    python benchmarks/studies/speed/arithmetic.py                    # all lines, about an hour on two cores
    python benchmarks/studies/speed/arithmetic.py fedaf dfrd         # some of them

A line is run by the serial engine with few steps and epochs, under torch's counter of floating-point operations. What
a round counts is a sum: one part for each kind of step, as often as the step is taken, and a part that does not depend
on them. So one run more for each kind, with one step of it more, tells the whole. A last run with three of each must
come out as predicted, to the digit. Where rows are fewer than in the line, the sum goes up in proportion, and a run
with twice as many rows must count twice as much. Of an attack the same is told from attacks on one run.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2])]

import fedaudit  # noqa: E402
from fedaudit.attack import attack_run  # noqa: E402
from fedaudit.runtime.folder import RunFolder  # noqa: E402
from fedaudit.runtime.task import compute  # noqa: E402
from fedaudit.training.models import build  # noqa: E402
from fedaudit.wire.transcript import Threat  # noqa: E402

KEPT = HERE / "records" / "arithmetic.json"


class Through(Exception):
    """Ends a run whose last round has trained, and an attack that has its images."""


@dataclass(frozen=True)
class Line:
    """A line's setting, how often each kind of step is taken in it, and in which round what is counted lies."""

    setting: dict[str, Any]
    steps: dict[str, int]
    round: int = 1
    rows: Fraction = Fraction(1)  # those of the line over those of this setting
    fixed: dict[str, Any] = field(default_factory=dict)  # hyper-parameters that stay as they are


@dataclass(frozen=True)
class Attacked(Line):
    """A line of an attack on all clients of a run of one round, and how often it takes its own steps."""

    attack: dict[str, Any] = field(default_factory=dict)


FMNIST = {"dataset": "fashion-mnist", "clients": 10, "model": "convnet"}
FEDAF: dict[str, Any] = {"method": "fedaf", "clients": 10, "model": "convnet"}
EPOCHS = {"E_local": 20, "T_Tran": 100, "T_Dec": 3, "T_FKE": 2}
FEW: dict[str, Any] = {**FMNIST, "method": "dffke", "partition": "dirichlet:1", "aux": 0.995}
LINES = {
    "dfrd": Line(
        {**FMNIST, "method": "dfrd", "preset": "fashion-mnist", "partition": "dirichlet:1.0", "aux": 0.8},
        {"I": 40},
        round=2,
        fixed={"host": {"E": 1, "B": 64, "eta": 0.05}},
    ),
    "dffke": Line(FEW, EPOCHS, rows=Fraction(40), fixed={"tau": "off"}),
    "dffke_second": Line(FEW, EPOCHS, round=2, rows=Fraction(40), fixed={"tau": "off"}),
    "dffke_resnet18": Line(
        {**FEW, "model": "resnet18"},
        {"E_local": 2, "T_Tran": 5, "T_Dec": 1, "T_FKE": 1},
        round=2,
        rows=Fraction(10),
    ),
    "fedaf": Line(
        {**FEDAF, "dataset": "fashion-mnist", "preset": "fashion-mnist", "partition": "dirichlet-capped:0.05"},
        {"steps": 1000, "E": 500},
        fixed={"T_over": "batch"},
    ),
    "fedaf_cifar10": Line(
        {**FEDAF, "dataset": "cifar10", "preset": "cifar10", "partition": "dirichlet-capped:0.02"},
        {"steps": 1000, "E": 500},
        fixed={"sigma_x": 0.402},
    ),
    "decoders": Attacked(
        {**FMNIST, "method": "dffke", "model": "cnn", "partition": "iid"},
        {"steps": 300},
        fixed={"tau": "off", "E_local": 1, "B": 64, "h": 32, "T_Tran": 0, "T_Dec": 0, "T_FKE": 0, "w_Dec": 1, "R": 1},
        attack={"attack": "decoder"},
    ),
    "matching": Attacked(
        {**FMNIST, "method": "fedavg", "model": "cnn", "partition": "iid"},
        {"steps": 100},
        fixed={"E": 1, "B": 64, "eta": 0.1},
        attack={"attack": "gradient_match", "restarts": 4, "together": 64},
    ),
}


def counted(line: Line, steps: dict[str, int], times: int = 1) -> int:
    """Return the operations of the line's round, without evaluation, with so many steps and so many times the rows. Of
    an attack's line it is the operations of the attack, without scores.
    """
    if isinstance(line, Attacked):
        return of_attack({**line.attack, **steps}, json.dumps({**line.setting, "set": line.fixed}))
    begun = found = 0

    def watch(done: float, whole: float, what: str) -> None:
        nonlocal begun, found
        if what == f"round {line.round}" and done == line.round - 1:
            begun = counter.get_total_flops()
        if what == f"round {line.round}, evaluating":
            found = counter.get_total_flops() - begun
            raise Through

    whole = {"aux": 0.0, "holdout": 0.0, "validation": 0.0, "keep_weights": 1, "eval_clients": False, "eval_every": 1}
    setting = {**whole, **line.setting, "set": {**line.fixed, **steps}, "rounds": line.round}
    setting |= {"engine": "serial", "step": "eager", "device": "cpu", "aux": 1 - times * (1 - setting["aux"])}
    with tempfile.TemporaryDirectory() as folder, FlopCounterMode(display=False) as counter:
        try:
            fedaudit.run(out=Path(folder) / "run", watch=watch, **setting)
        except Through:
            return found
    raise RuntimeError(f"The run of {line.setting['method']} ended without an evaluation of round {line.round}.")


def of_attack(spec: dict[str, Any], setting: str) -> int:
    """Return the operations of an attack on the clients of a run, as `benchmarks/gpu_speed.py` times it."""
    opened, claims, found = RunFolder(ran(setting)), attack_run._claims, 0

    def told(attack: Any, name: str, scenes: Any) -> Any:
        nonlocal found
        assert len(scenes) < 2, "clients that are attacked together are so in threads, which torch's counter misses"
        begun = counter.get_total_flops()
        made = claims(attack, name, scenes)
        found += counter.get_total_flops() - begun
        return made

    name, attack = attack_run.made(spec)
    replaced: dict[str, Any] = {"_claims": told, "score": mock.Mock(side_effect=Through)}
    alone = mock.patch.object(type(attack), "at_once", return_value=1)
    others = mock.patch.multiple(attack_run, **replaced)
    with FlopCounterMode(display=False) as counter, alone, others, compute(opened.world), suppress(Through):
        attack_run._one(attack, name, opened, opened.world, Threat.parse("server"), None, lambda *_: None)
    return found


@functools.cache
def ran(setting: str) -> Path:
    """Return the folder of a run of one round, which is carried out once."""
    values = {"keep_weights": 1, "validation": 0.0, "holdout": 0.2, "aux": 0.2, **json.loads(setting)}
    folder = Path(tempfile.mkdtemp(prefix="arithmetic-")) / "run"
    fedaudit.run(out=folder, rounds=1, eval_every=1, eval_clients=False, device="cpu", **values)
    return folder


def arithmetic(name: str) -> dict[str, Any]:
    """Return the operations of a line's round, with the runs that they come from."""
    line = LINES[name]
    one = dict.fromkeys(line.steps, 1)

    def run(steps: dict[str, int], times: int = 1) -> int:
        found = counted(line, steps, times)
        print(f"{name}: {steps}, {times} x the rows: {found:,}", flush=True)
        return found

    base = run(one)
    each = {kind: run({**one, kind: 2}) - base for kind in line.steps}
    three, told = run(dict.fromkeys(line.steps, 3)), base + 2 * sum(each.values())
    if three != told:
        raise RuntimeError(f"{name}: three steps of each kind count {three:,}, and {told:,} were expected.")
    if line.rows != 1 and (more := run(one, times=2)) != 2 * base:
        raise RuntimeError(f"{name}: twice the rows count {more:,}, and {2 * base:,} were expected.")
    rest = base - sum(each.values())
    total = line.rows * (rest + sum(line.steps[kind] * each[kind] for kind in each))
    return {"flops": int(total), "of_a_step": each, "of_the_rest": rest, "steps": line.steps, "rows": float(line.rows)}


def of_rows(arch: str, shape: tuple[int, int, int], rows: int) -> int:
    """Return the operations of training an architecture on so many rows."""
    with FlopCounterMode(display=False) as counter:
        out = build(arch, shape=shape, classes=10)(torch.zeros(2, *shape))
        torch.nn.functional.cross_entropy(out, torch.zeros(2, dtype=torch.long)).backward()
    return counter.get_total_flops() * rows // 2


def main() -> None:
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept["fedavg"] = {"flops": of_rows("convnet", (1, 28, 28), 60_000)}  # whose floor the GPU's machine knows
    kept["shadows"] = {"flops": of_rows("convnet@0.5", (3, 32, 32), 64 * 100 * 64)}  # models, steps, batch
    for name in sys.argv[1:] or LINES:
        kept[name] = arithmetic(name)
        kept = {**(json.loads(KEPT.read_text()) if KEPT.exists() else {}), **kept}
        KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
