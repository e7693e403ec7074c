"""Runs FedZGE's preset `authors` beside the authors' public code, and says how far their numbers are apart.

    git clone https://github.com/maxinge8698/FedZGE
    python benchmarks/studies/authors/parity_fedzge.py --checkout FedZGE --json parity_fedzge.json
    python benchmarks/studies/authors/parity_fedzge.py --checkout FedZGE --json parity_fedzge.json --shares
    python benchmarks/studies/authors/parity_fedzge.py --table parity_fedzge.json

Three clients of unequal size and skewed classes on digits, a CNN with batch norm, double precision, up to three rounds.
fedaudit runs as it always does. The authors' own program, started from the checkout (`fedzge_checkout.py`), then gets
its records, first weights, batches and draws. The largest difference of any number is taken in each stage of a round.
The program runs as it is, then with every point mended in which the two differ, then with all points mended but one.

`--shares` asks something else, and takes half an hour on one core. Both learn on the same digits with draws of their
own, in single precision. Each round counts the share of generated images that the ensemble takes for their labels.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from fedzge_checkout import MENDS, Draws, Given, Program, Seen, Weights
from torch import Tensor, nn

from fedaudit import Setting, registry, run
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.runtime.world import World
from fedaudit.stats import student_t
from fedaudit.training import models

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "helpers" / "retelling"), str(ROOT / "benchmarks" / "studies" / "parity")]

import by_hand  # noqa: E402
from by_hand import Played, epoch, played, rng  # noqa: E402
from parity import commit_of, reported  # noqa: E402

LIMIT = 1e-10  # the mended code and fedaudit differ by no more than this
ROUNDS, B, Q, D_Z, B_K = 3, 8, 3, 6, 64
SIZES = {"B": B, "q": Q, "d_z": D_Z, "B_k": B_K, "E_k": 2, "E": 4, "E_prime": 3}
ARGUMENTS = {"R": ROUNDS, "E1": 2, "E2": 4, "E3": 3, "batch_size": B_K, "nz": D_Z, "synthetic_size": B, "q": Q}
# Eq. 17 divides the rounding of a loss by epsilon, and Adam divides a gradient by its size: at the published epsilon
# rounding grows from round to round, and at the long one it does not.
PUBLISHED, LONG_STEP = 0.001, 0.5
STAGES = {
    "trained": "clients after local training",
    "x": "x^",
    "answers": "answers",
    "e": "ensemble",
    "g": "Eq. 17",
    "G": "G",
    "inner": "f, each inner step",
    "distilled": "clients after Eq. 20",
    "accuracy": "best accuracy",
}
# The generator's tensors: the checkout's names, and fedaudit's.
LAYERS = {
    "embedding": "embedding", "linear.0": "layers.0", "bn0": "layers.2", "deconv1": "layers.3", "bn1": "layers.4",
    "deconv2": "layers.6", "bn2": "layers.7", "conv3": "layers.9", "bn3": "layers.10",
}  # fmt: skip
# A batch norm takes the bias before it out again. Its gradient is nothing but rounding, and the running mean holds it.
TAKEN_OUT = {
    *("deconv1.bias", "bn1.running_mean", "deconv2.bias", "bn2.running_mean", "conv3.bias", "bn3.running_mean"),
    *(f"encoder.{name}" for name in ("conv1.bias", "bn1.running_mean", "conv2.bias", "bn2.running_mean")),
}


def theirs_of(G: Mapping[str, Tensor]) -> Weights:
    """Return fedaudit's generator under the checkout's names."""
    return {
        f"{theirs}.{part}": G[f"{ours}.{part}"]
        for theirs, ours in LAYERS.items()
        for part in ("weight", "bias", "running_mean", "running_var")
        if f"{ours}.{part}" in G
    }


class Ours:
    """A run of fedaudit with the preset, and what a round did, in the order of the checkout's labels."""

    def __init__(self, epsilon: float, **other: Any) -> None:
        self.epsilon = epsilon
        cls: Any = registry.find("fedzge")
        estimated, mapped = cls.estimated, by_hand.Watching.map
        self.g: list[Tensor] = []  # Eq. 17, by round
        self.asked: dict[tuple[int, int, int], Weights] = {}  # a client's model, by round, ask and client

        def keeping(method: Any, *words: Any) -> Tensor:
            self.g.append(estimated(method, *words))
            return self.g[-1]

        def each(engine: Any, tasks: Any) -> Iterator[Any]:
            for task in tasks:
                for done in mapped(engine, [task]):
                    self.asked[task.t, task.ask, task.k] = dict(engine.ran.held[task.t, task.k].model)
                    yield done

        options = {
            "eval_every": 1,
            "model": "cnn_bn@0.5",
            "set": {**SIZES, "tested": "inner", "epsilon": epsilon, **other},
        }
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(cls, "estimated", keeping),
            mock.patch.object(by_hand.Watching, "map", each),
        ):
            self.run: Played = played("fedzge", Path(folder), rounds=ROUNDS, preset="authors", **options)
            record = read_record(Path(folder) / "run")
        self.accuracy = [best_inner(record, t) for t in range(1, ROUNDS + 1)]

    def order(self, t: int) -> Tensor:
        y = torch.randint(10, (B,), generator=rng("server", "y 0", t))
        return y.sort(stable=True)[1]

    def draws(self, t: int) -> Draws:
        """Return z, y and u of a round: as drawn here, in the order of the sorted labels."""
        at, shape = self.order(t), self.run.world.shape
        z = torch.randn(B, D_Z, generator=rng("server", "z 0", t), dtype=torch.float64)[at]
        y = torch.randint(10, (B,), generator=rng("server", "y 0", t))[at]
        u = torch.randn(Q, B, *shape, generator=rng("server", "u 0", t), dtype=torch.float64)[:, at]
        return Draws(z, y, list(u))

    def seen(self, t: int) -> Seen:
        """Return what round t did."""
        run, at = self.run, self.order(t)
        clients = sorted(run.rows)
        answers = {k: [f[at] for f in run.up(t)[k].f.view(1 + Q, B, -1)] for k in clients}
        N = {k: run.up(t)[k].N for k in clients}
        e = run.down(t, 1)[0].e
        queries = [sum(answers[k][i] * N[k] for k in clients) / sum(N.values()) for i in range(1, 1 + Q)]
        state = run.states[t]
        return Seen(
            trained={k: named(self.asked[t, 0, k]) for k in clients},
            answers=answers,
            e=[e[at], *queries],
            x=run.down(t)[0].x[at],
            g=self.g[t - 1][at],
            G=theirs_of(state.theta_G),
            inner=[named(state.inner[i]) for i in sorted(state.inner)],
            accuracy=self.accuracy[t - 1],
            distilled={k: named(self.asked[t, 1, k]) for k in clients},
        )

    def given(self, dtype: torch.dtype) -> Given:
        """Return what the checkout's program gets of this run."""
        run = self.run

        def batches(k: int, t: int) -> Iterator[Sequence[Tensor]]:
            order = rng(f"client {k}", "fit 1", t)
            while True:
                yield epoch(order, len(run.rows[k][0]), B_K)

        def net(k: int | None) -> nn.Module:
            return run.net(run.states[0].theta if k is None else run.first[k])

        def draws(t: int) -> Draws:
            drawn = self.draws(t)
            return Draws(drawn.z.to(dtype), drawn.y, [u.to(dtype) for u in drawn.u])

        G = theirs_of(run.states[0].theta_G)
        return Given(run.rows, run.world.test, run.world.classes, net, G, batches, draws, dtype)


def best_inner(record: RunRecord, t: int) -> float:
    """Return the accuracy of the best inner step of a round, by test batch statistics."""
    utility = record.rounds[t - 1].utility
    assert utility is not None
    return max(p.test.accuracy for name, p in utility.global_points.items() if "inner" in name)


def named(w: Mapping[str, Tensor]) -> Weights:
    return {name: t for name, t in w.items() if not name.endswith("num_batches_tracked")}


def most(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if any is: Python's own `max` may pass over it."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def gap(ours: Any, theirs: Any) -> float:
    """Return the largest difference of any number."""
    if isinstance(ours, Mapping):
        ours, theirs = ({name: of[name] for name in of if name not in TAKEN_OUT} for of in (ours, theirs))
        assert ours.keys() == theirs.keys(), f"of one side only: {sorted(map(str, ours.keys() ^ theirs.keys()))}"
        return most(gap(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list):
        assert len(ours) == len(theirs)
        return most(gap(a, b) for a, b in zip(ours, theirs, strict=True))
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (ours, theirs))
    assert a.shape == b.shape
    return float((a - b).abs().max())


def apart(ours: Seen, theirs: Seen) -> dict[str, float]:
    """Return the largest difference in each stage of a round."""
    return {name: gap(getattr(ours, name), getattr(theirs, name)) for name in STAGES}


ALL = "all points mended"
WITH = "all mended but: "


def compared(checkout: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    runs = {epsilon: Ours(epsilon) for epsilon in (PUBLISHED, LONG_STEP)}
    everything, double = list(MENDS), torch.float64
    but = {name: [n for n in everything if n != name] for name in MENDS}
    cases: list[tuple[str, list[str], torch.dtype, float, int]] = [
        ("as it is", [], double, PUBLISHED, ROUNDS),
        (ALL, everything, double, LONG_STEP, ROUNDS),
        (ALL, everything, double, PUBLISHED, 1),
        *((WITH + said, but[name], double, LONG_STEP, ROUNDS) for name, said in MENDS.items()),
        (WITH + MENDS["info"], but["info"], double, PUBLISHED, 1),
        (WITH + "single precision", everything, torch.float32, PUBLISHED, 1),
    ]
    for what, mended, dtype, epsilon, rounds in cases:
        ours = runs[epsilon]
        theirs = Program(checkout, ours.given(dtype), mended).run(**{**ARGUMENTS, "R": rounds, "eps": epsilon})
        each = [apart(ours.seen(t), of) for t, of in enumerate(theirs, 1)]
        difference = {name: most(of[name] for of in each) for name in STAGES}
        yield {"reference": what, "epsilon": epsilon, "rounds": rounds, "equal": what == ALL, "difference": difference}


# Each setting of the preset but `tested`, which teaches nothing, with another value than the preset's.
OTHER = {
    "moments": "kept", "estimate": "image", "directions": "gaussian", "distance": "rms", "schedule": "constant",
    "answers": "running", "B_prime": B // 2,
}  # fmt: skip


def noticed(checkout: Path) -> dict[str, float]:
    """Return for each setting of the preset the largest difference in two rounds if fedaudit alone changes it."""
    found = {}
    for name, value in OTHER.items():
        ours = Ours(LONG_STEP, **{name: value})
        program = Program(checkout, ours.given(torch.float64), list(MENDS))
        theirs = program.run(**{**ARGUMENTS, "R": 2, "eps": LONG_STEP})
        found[name] = most(most(apart(ours.seen(t), of).values()) for t, of in enumerate(theirs, 1))
    return found


def resnet18(checkout: Path) -> dict[str, float]:
    """Compare the ResNet-18 of both: outputs under the same weights, and how far first weights spread."""
    torch.manual_seed(0)
    ours = [models.build("resnet18", shape=(3, 32, 32), classes=10) for _ in range(2)]
    x = torch.randn(8, 3, 32, 32)
    with Program(checkout, Given({}, (x, x), 10, lambda k: nn.Identity(), dtype=torch.float32)).imported():
        made = importlib.import_module("model.resnet").resnet18
        theirs = [made(num_classes=10).to(torch.float32) for _ in range(2)]
    pairs = list(zip(theirs[0].state_dict(), ours[0].state_dict().values(), strict=True))
    theirs[0].load_state_dict(dict(pairs))
    with torch.no_grad():
        far = most(gap(ours[0].train(mode)(x), theirs[0].train(mode)(x)) for mode in (True, False))
    spread = [
        float(a.detach().std() / b.detach().std())
        for a, b in zip(ours[1].parameters(), theirs[1].parameters(), strict=True)
        if a.dim() > 1
    ]
    return {"outputs": far, "least": min(spread), "most": max(spread)}


def without_a_class(checkout: Path) -> float:
    """Return the share of the generator's numbers that are not numbers after a round in which p is 0 for one class."""
    given = Ours(PUBLISHED).given(torch.float32)
    first = given.net

    def net(k: int | None) -> nn.Module:
        made = first(k)
        with torch.no_grad():
            made.classifier.bias[-1] -= 1000.0  # type: ignore[index,operator,union-attr]
        return made

    given.net = net
    (seen,) = Program(checkout, given).run(**{**ARGUMENTS, "R": 1, "eps": PUBLISHED})
    numbers = torch.cat([t.flatten() for name, t in seen.G.items() if "running" not in name])
    return float(numbers.isnan().double().mean())


# --- whether the generator learns its labels --------------------------------------------------------------------------

LEARNING = {"B": 200, "B_k": 64, "E_k": 5, "E": 10, "E_prime": 5, "q": 10}
LEARNS = {"E1": 5, "E2": 10, "E3": 5, "batch_size": 64, "synthetic_size": 200, "q": 10}
CLIENTS, LONG, SEEDS, CHOSEN = 3, 20, range(6), (1, 5, 10, 15, 20)  # chosen: the rounds that the table shows
WHO = {
    "theirs": "the authors' code, as it is",
    "mended": "the authors' code, all points mended",
    "ours": "fedaudit, preset `authors`",
    "printed": "fedaudit, as printed",
}


def shares(checkout: Path) -> Iterator[dict[str, Any]]:
    """Yield for each seed and each of `WHO` the share of x^ with argmax e = y^, and f's best accuracy, by round."""
    for seed in SEEDS:
        values = {
            "seed": seed, "dataset": "digits", "clients": CLIENTS, "partition": "dirichlet:1", "aux": 0.0,
            "holdout": 0.0, "init": "own", "model": "cnn_bn", "rounds": LONG, "eval_every": 1, "eval_clients": False,
            "keep_weights": 0, "device": "cpu", "set": {**LEARNING, "tested": "inner"},
        }  # fmt: skip
        for who, preset in (("ours", {"preset": "authors"}), ("printed", {})):
            made = Setting.make(method="fedzge", **preset, **values)
            with tempfile.TemporaryDirectory() as folder:
                record = run(made, out=Path(folder) / "run")
            share = [r.diagnostics["agreement of e with y^"] for r in record.rounds]
            yield {"who": who, "seed": seed, "share": share, "best": [best_inner(record, t + 1) for t in range(LONG)]}
        world = World(made)
        starts = [world.fresh_model(k) for k in range(CLIENTS)]

        def net(k: int | None, starts: Sequence[nn.Module] = starts) -> nn.Module:
            return like(starts[0]) if k is None else copy.deepcopy(starts[k])

        rows = {k: world.members(k) for k in range(CLIENTS)}
        given = Given(rows, world.test, world.classes, net, dtype=torch.float32)
        for who, mended in (("theirs", ()), ("mended", tuple(MENDS))):
            seen = Program(checkout, given, mended).run(seed=seed, R=LONG, **LEARNS)
            yield {"who": who, "seed": seed, "share": [s.agreement for s in seen], "best": [s.accuracy for s in seen]}


def like(net: nn.Module) -> nn.Module:
    """Return a network of the same layers with first weights of its own."""
    made = copy.deepcopy(net)
    for layer in made.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            layer.reset_parameters()
    return made


def table_of_shares(kept: Mapping[str, Any]) -> str:
    """Return the table of the shares, in Markdown: each seed's, in percent."""
    rounds = " | ".join(f"round {t}" for t in CHOSEN)
    lines = [
        f"| share of x^ with argmax e = y^, % | {rounds} | rounds 11 to 20, each seed | their mean [95 %] "
        "| best accuracy of f, each seed, % |",
        "|---|" + "---:|" * len(CHOSEN) + "---|---|---|",
    ]
    for who, said in WHO.items():
        runs = sorted((r for r in kept["shares"] if r["who"] == who), key=lambda r: r["seed"])
        cells = [f"{100 * fmean(r['share'][t - 1] for r in runs):.0f}" for t in CHOSEN]
        late = [100 * fmean(r["share"][LONG // 2 :]) for r in runs]
        found = student_t(late)
        mean = f"{fmean(late):.0f} [{found.low or 0:.0f}, {min(found.high or 100, 100):.0f}]"
        best = ", ".join(f"{100 * max(r['best']):.0f}" for r in runs)
        lines.append(f"| {said} | {' | '.join(cells)} | {', '.join(f'{v:.0f}' for v in late)} | {mean} | {best} |")
    return "\n".join(lines)


# --- the table ------------------------------------------------------------------------------------------------------


def shown(value: float, equal: bool) -> str:
    said = "nan" if value != value else f"{value:.0e}" if value else "0"
    return f"**{said}**" if equal else said


def table(kept: Mapping[str, Any]) -> str:
    """Return the table of the differences, in Markdown."""
    head = " | ".join(["the authors' code", "epsilon", "rounds", *STAGES.values()])
    lines = [f"| {head} |", "|---|" + "---:|" * (2 + len(STAGES))]
    for row in kept["rows"]:
        cells = [shown(value, value <= kept["limit"]) for value in (row["difference"][name] for name in STAGES)]
        lines.append(f"| {row['reference']} | {row['epsilon']:g} | {row['rounds']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="a checkout of github.com/maxinge8698/FedZGE")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--shares", action="store_true", help="count the shares alone, into the file of --json")
    parser.add_argument("--table", type=Path, help="print the tables of kept figures, and run nothing")
    asked = parser.parse_args(words)
    if asked.table:
        kept = json.loads(asked.table.read_text())
        print(f"{table(kept)}\n\n{table_of_shares(kept)}")
        return 0
    if not asked.checkout:
        parser.error("give --checkout, or --table")
    kept = json.loads(asked.json.read_text()) if asked.json and asked.json.is_file() else {}
    if asked.shares:
        kept["shares"] = []
        for found in shares(asked.checkout):
            kept["shares"].append(found)
            print(f"seed {found['seed']}, {found['who']}: {found['share'][-1]:.2f}", file=sys.stderr, flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(kept, indent=1) + "\n")
        print(table_of_shares(kept))
        return 0
    rows = []
    for row in compared(asked.checkout):
        rows.append(row)
        print(f"{row['reference']}: {most(row['difference'].values()):.1e}", file=sys.stderr, flush=True)
    kept |= {
        "checkout": commit_of(asked.checkout), "torch": torch.__version__, "machine": platform.machine(),
        "limit": LIMIT, "rows": rows, "resnet18": resnet18(asked.checkout), "nan": without_a_class(asked.checkout),
        "noticed": noticed(asked.checkout),
    }  # fmt: skip
    far = [row["reference"] for row in rows if row["equal"] and not most(row["difference"].values()) <= LIMIT]
    return reported(kept, asked.json, table(kept), far)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
