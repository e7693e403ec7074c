"""Each way to forget noise, for each kind of release: what the audits say of it, beside honest runs.

    python benchmarks/studies/epsilon/epsilon_forged.py OUT [--shard k/n] [--seeds 20] [--honest 400] [--only WAY ...]
    python benchmarks/studies/epsilon/epsilon_forged.py OUT --keep benchmarks/studies/epsilon/records/forged.json

A run is made with code that was tampered with, then audited: `residuals` and `clipping`. Noise that is drawn otherwise
is forged in the run alone, and what is wrong in the release's own code is wrong in its audit as well, as it would be.
`run only` says that private training was tampered with in the run, and its audit is honest. A release counts as found
where the joint verdict of its audits is "refuted".

Fields: one method that releases rows of records (embeddings), class means (logits), counts, rows that depend on all
records (soft labels) and images of 256 levels; two clients, two rounds. DP-SGD: FedAvg, two clients, two rounds, each
client alone or both as a stack.

OUT/forged-k.json has the rows of shard k. Shards can run side by side, one thread each; the rows of a shard are kept
as they are made, and a shard that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.special import ndtr, ndtri, stdtrit
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from epsilon_fields import KINDS  # noqa: E402
from epsilon_shared import DIGITS, ONE, PRIVATE  # noqa: E402

from fedaudit.epsilon.clipping import audit_clipping  # noqa: E402
from fedaudit.epsilon.joint_verdict import told  # noqa: E402
from fedaudit.epsilon.residuals import audit_residuals  # noqa: E402
from fedaudit.privacy import dpsgd, dpsgd_stack, sensitivity  # noqa: E402
from fedaudit.privacy.dpsgd import Planned  # noqa: E402
from fedaudit.privacy.mechanisms import additive  # noqa: E402
from fedaudit.privacy.mechanisms.gaussian import Gaussian  # noqa: E402
from fedaudit.runtime.runner import run  # noqa: E402
from fedaudit.significance import holm, said  # noqa: E402

# Images: noise of deviation 0.5 leaves half of the pixels inside their range.
FIELDS = {**dict.fromkeys(KINDS, ONE), "synthetic_images": {"noise_multiplier": 0.016, "delta": 1e-2}}
SMALL: dict[str, Any] = {
    **DIGITS, "holdout": 0.4, "aux": 0.7, "eval_clients": False, "clients": 2, "rounds": 2, "twins": "off",
}  # fmt: skip

# --- noise that is drawn otherwise: z are the honest numbers, of deviation 1, and c is what they are added to ---------

_fixed = torch.Generator().manual_seed(43)
POOL = torch.randn(1000, generator=_fixed, dtype=torch.float64)
TAPE = torch.randn(100_000, generator=_fixed, dtype=torch.float64)
Forge = Callable[[Tensor, Tensor], Tensor]


def _shares(z: Tensor) -> np.ndarray:
    return ndtr(z.double().numpy())


def _pool(z: Tensor, c: Tensor) -> Tensor:
    return POOL[torch.from_numpy(np.minimum(1000 * _shares(z), 999).astype(np.int64))]


def _period(z: Tensor, c: Tensor) -> Tensor:
    return z.reshape(-1)[torch.arange(z.numel()) % 50].reshape(z.shape)


def _bare(z: Tensor, c: Tensor) -> Tensor:
    kept = (torch.arange(z.numel()) % 50 != 7).reshape(z.shape)
    return z * kept * math.sqrt(50 / 49)


def _column(z: Tensor, c: Tensor) -> Tensor:
    width = z[0].numel() if z.dim() > 1 else z.numel()
    return torch.where((torch.arange(z.numel()) % width == min(3, width - 1)).reshape(z.shape), 0.0, z)


def _mirrored(z: Tensor, c: Tensor) -> Tensor:
    flat = z.reshape(-1).clone()
    half = len(flat) // 2
    flat[half : 2 * half] = -flat[:half]
    return flat.reshape(z.shape)


def _taped(z: Tensor, c: Tensor) -> Tensor:
    begin = int(1e5 * float(_shares(z.reshape(-1)[:1])[0]))
    return TAPE[(begin + torch.arange(z.numel())) % len(TAPE)].reshape(z.shape)


def _shuffled(z: Tensor, c: Tensor) -> Tensor:
    """The same numbers in every release, in an order that the honest noise gives."""
    return TAPE[: z.numel()][z.reshape(-1).argsort()].reshape(z.shape)


def _smooth(z: Tensor, c: Tensor) -> Tensor:
    flat = z.reshape(-1)
    return ((flat + flat.roll(1)) / math.sqrt(2)).reshape(z.shape)


def _cut(z: Tensor, c: Tensor) -> Tensor:
    low, high = float(ndtr(-2.0)), float(ndtr(2.0))
    return torch.from_numpy(ndtri(low + _shares(z) * (high - low)) / 0.879626).reshape(z.shape)


def _heavy(z: Tensor, c: Tensor) -> Tensor:
    return torch.from_numpy(stdtrit(5, _shares(z)) / math.sqrt(5 / 3)).reshape(z.shape)


def _across(z: Tensor, c: Tensor) -> Tensor:
    size = float(c.double().square().sum())
    return z if size == 0 else z - float((z * c.double()).sum()) / size * c.double()


def _times(factor: float) -> Forge:
    return lambda z, c: factor * z


def _grid(step: float) -> Forge:
    return lambda z, c: (z / step).round() * step


def _format(dtype: torch.dtype) -> Forge:
    return lambda z, c: z.to(dtype).double()


NOISE: dict[str, Forge] = {
    "noise x 0.9": _times(0.9), "noise x 0.5": _times(0.5), "no noise": _times(0.0),
    "grid of 0.1 sigma": _grid(0.1), "bfloat16": _format(torch.bfloat16), "pool of 1,000 numbers": _pool,
    "period of 50": _period, "one number in 50 without": _bare,
    # Ten that the review did not have.
    "grid of 0.001 sigma": _grid(0.001), "float16": _format(torch.float16), "second half mirrored": _mirrored,
    "one tape, from anywhere": _taped, "same numbers, shuffled": _shuffled, "low frequencies only": _smooth,
    "cut off at 2 sigma": _cut, "Student's t, 5 degrees": _heavy, "one column without": _column,
    "none along the release": _across,
}  # fmt: skip


@contextmanager
def forged_fields(forge: Forge) -> Iterator[None]:
    real = Gaussian.draw

    def draw(self: Gaussian, like: Tensor, scale: float, *rest: Any) -> Tensor:
        z = real(self, like, 1.0, *rest).double()
        return (scale * forge(z, like)).to(like.dtype)

    with mock.patch.object(Gaussian, "draw", draw):
        yield


StepForge = Callable[[Tensor, Tensor, int, int], Tensor]  # z, c, number of the step, steps


@contextmanager
def forged_steps(forge: StepForge) -> Iterator[None]:
    """Noise of steps, alone and in a stack."""
    from opacus.optimizers import DPOptimizer

    real, planned, stacked = DPOptimizer.add_noise, dpsgd.planned, dpsgd_stack._Training._noise
    at = {"step": 0, "steps": 1}

    def plan(*args: Any, **more: Any) -> Planned:
        made = planned(*args, **more)
        at.update(step=0, steps=made.steps)
        return made

    def add_noise(self: Any) -> None:
        real(self)
        std = self.noise_multiplier * self.max_grad_norm
        for p in self.params:
            total = p.summed_grad.view_as(p)
            z = (p.grad - total).double() / std
            p.grad = (total + std * forge(z, total, at["step"], at["steps"])).to(p.dtype)
        at["step"] += 1

    def of_stack(self: Any, k: int, sums: Any) -> Any:
        made, std = stacked(self, k, sums), self.plans[k].multiplier * self.plans[k].C
        step = self.jobs[k].progress.made
        return {
            name: (std * forge(n.double() / std, sums[name][k], step, self.plans[k].steps)).to(n.dtype)
            for name, n in made.items()
        }

    with (
        mock.patch.object(DPOptimizer, "add_noise", add_noise),
        mock.patch.object(dpsgd, "planned", plan),
        mock.patch.object(dpsgd_stack._Training, "_noise", of_stack),
    ):
        yield


# --- what is wrong in the release's own code --------------------------------------------------------------------------


def _clip_of_fields(clip: Callable[..., Tensor]) -> Callable[[], ExitStack]:
    def made() -> ExitStack:
        stack = ExitStack()
        for module in (sensitivity, additive):
            stack.enter_context(mock.patch.object(module, "clip_rows", clip))
        return stack

    return made


def _some_rows(t: Tensor, C: float, norm: Any = 2) -> Tensor:
    made = REAL_CLIP(t, C, norm)
    if t.dim() > 1:
        made[::10] = t[::10]
    return made


REAL_CLIP, REAL_BOUNDED = sensitivity.clip_rows, sensitivity.bounded
REAL_MULTIPLIER, REAL_DELTA = Gaussian.multiplier, additive.AddsNoise.delta


def _half_sensitivity(*args: Any, **more: Any) -> Any:
    leaves, sensitivities, how = REAL_BOUNDED(*args, **more)
    return leaves, [s / 2 for s in sensitivities], how


def _patched(*patches: tuple[Any, str, Any]) -> Callable[[], ExitStack]:
    def made() -> ExitStack:
        stack = ExitStack()
        for where, name, what in patches:
            stack.enter_context(mock.patch.object(where, name, what))
        return stack

    return made


PATH: dict[str, Callable[[], ExitStack]] = {
    "clipping removed": _clip_of_fields(lambda t, C, norm=2: t.clone()),
    "clipping at 3 C": _clip_of_fields(lambda t, C, norm=2: REAL_CLIP(t, 3 * C, norm)),
    "one row in ten not clipped": _clip_of_fields(_some_rows),
    "sensitivity halved": _patched((additive, "bounded", _half_sensitivity)),
    "calibration halved": _patched((Gaussian, "multiplier", lambda self, *a: 0.5 * REAL_MULTIPLIER(self, *a))),
    "delta x 10": _patched((additive.AddsNoise, "delta", lambda self, p, n: min(0.5, 10 * REAL_DELTA(self, p, n)))),
}
# What a kind of release has no part in: counts and images are not clipped, and images have their noise by a multiplier.
IDLE = {
    ("clipping removed", "label_counts"), ("clipping removed", "synthetic_images"),
    ("clipping at 3 C", "label_counts"), ("clipping at 3 C", "synthetic_images"),
    ("one row in ten not clipped", "label_counts"), ("one row in ten not clipped", "synthetic_images"),
    ("calibration halved", "synthetic_images"), ("delta x 10", "synthetic_images"),
}  # fmt: skip

REAL_SUM, REAL_DRAWN, REAL_ENTRY = dpsgd.clip_and_sum, dpsgd._drawn, Planned.entry
REAL_INIT = dpsgd_stack._Training.__init__


def _per_layer(grads: Any, C: float) -> Any:
    sums: dict[str, Tensor] = {}
    norms = None
    for name, g in grads.items():
        one, norms = REAL_SUM({name: g}, C)
        sums |= one
    return sums, norms


def _whole_batch(grads: Any, C: float) -> Any:
    sums, norms = REAL_SUM(grads, 1e9)
    size = math.sqrt(sum(float(s.square().sum()) for s in sums.values()))
    return {name: s * min(1.0, C / max(size, 1e-12)) for name, s in sums.items()}, norms


def _fixed_size(n: int, q: float, rng: torch.Generator) -> Tensor:
    return torch.randperm(n, generator=rng, device=rng.device)[: max(1, round(q * n))].sort().values


def _all_records(n: int, q: float, rng: torch.Generator) -> Tensor:
    REAL_DRAWN(n, q, rng)
    return torch.arange(n, device=rng.device)


def _longer(factor: float) -> Callable[..., None]:
    def made(self: Any, *args: Any) -> None:
        REAL_INIT(self, *args)
        self.C = self.C * factor

    return made


def _entry(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    def made(self: Planned, count: int | None = None) -> Any:
        entry = REAL_ENTRY(self, count)
        return entry.model_copy(update={name: change(getattr(entry, name)) for name, change in changes.items()})

    return made


def _clip_of_steps(factor: float) -> Callable[[], ExitStack]:
    return _patched(
        (dpsgd, "clip_and_sum", lambda g, C: REAL_SUM(g, factor * C)),
        (dpsgd_stack._Training, "__init__", _longer(factor)),
    )


TRAINING: dict[str, Callable[[], ExitStack]] = {
    "clipping removed": _clip_of_steps(1e9),
    "clipping at 3 C": _clip_of_steps(3.0),
    "clipping by layer": _patched((dpsgd, "clip_and_sum", _per_layer)),
    "clipping of the batch": _patched((dpsgd, "clip_and_sum", _whole_batch)),
    "batches of fixed size": _patched((dpsgd, "_drawn", _fixed_size)),
    "sample rate x 2": _patched((dpsgd, "_drawn", lambda n, q, rng: REAL_DRAWN(n, min(1.0, 2 * q), rng))),
    "all records in each step": _patched((dpsgd, "_drawn", _all_records)),
    "steps halved in the ledger": _patched((Planned, "entry", _entry(steps=lambda s: s // 2))),
    "sample rate halved in the ledger": _patched((Planned, "entry", _entry(sample_rate=lambda q: q / 2))),
}
ALONE = {
    "clipping by layer",
    "clipping of the batch",
    "batches of fixed size",
    "sample rate x 2",
    "all records in each step",
}  # what a stack does in other code


def _last_step(z: Tensor, c: Tensor, t: int, steps: int) -> Tensor:
    return z * (math.sqrt(steps) if t == steps - 1 else 0.0)


def _every_second(z: Tensor, c: Tensor, t: int, steps: int) -> Tensor:
    return z * (math.sqrt(2) if t % 2 else 0.0) if steps > 1 else z


_kept: dict[Any, Tensor] = {}


def _same_in_steps(z: Tensor, c: Tensor, t: int, steps: int) -> Tensor:
    if t == 0:
        _kept[tuple(z.shape)] = z
    return _kept[tuple(z.shape)]


OVER_STEPS: dict[str, StepForge] = {
    "all noise in the last step": _last_step,
    "every second step x sqrt 2": _every_second,
    "the same noise in all steps": _same_in_steps,
}
RUN_ONLY = {
    "run only: no noise": "no noise", "run only: noise x 0.5": "noise x 0.5",
    "run only: clipping removed": "clipping removed", "run only: all records in each step": "all records in each step",
}  # fmt: skip

# --- one run, and what is said of it ----------------------------------------------------------------------------------


def fields(way: str, seed: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        noise = NOISE.get(way)
        with PATH[way]() if way in PATH else ExitStack():
            begun = time.process_time()
            with forged_fields(noise) if noise else ExitStack():
                run(method="epsilon_fields:OneOfEach", privacy=FIELDS, seed=seed, out=out, **SMALL)
            ran = time.process_time()
            audits = [*audit_residuals(out), *audit_clipping(out)]
            seconds = {"run_s": round(ran - begun, 3), "audit_s": round(time.process_time() - ran, 3)}
        for kind in KINDS:
            if (way, kind) not in IDLE:
                yield _row(way, kind, seed, [a for a in audits if a.kind == kind]) | seconds


def training(way: str, seed: int, engine: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as both:
        out, once = Path(folder) / "run", ExitStack()
        what = RUN_ONLY.get(way, way)
        into = once if way in RUN_ONLY else both
        if what in TRAINING:
            into.enter_context(TRAINING[what]())
        elif what in OVER_STEPS:
            into.enter_context(forged_steps(OVER_STEPS[what]))
        elif what in NOISE:
            into.enter_context(forged_steps(lambda z, c, t, steps: NOISE[what](z, c)))
        begun = time.process_time()
        with once:
            run(method="fedavg", set={"E": 1, "B": 32, "eta": 0.1}, privacy=PRIVATE, seed=seed, out=out, engine=engine,
                **SMALL)  # fmt: skip
        ran = time.process_time()
        audits = audit_residuals(out)
        seconds = {"run_s": round(ran - begun, 3), "audit_s": round(time.process_time() - ran, 3)}
        yield _row(way, f"training, {engine}", seed, audits) | seconds


def _row(way: str, kind: str, seed: int, audits: list[Any]) -> dict[str, Any]:
    tests = [
        {"test": a.test, "verdict": a.verdict, "p": a.p_value, "n": a.trials, "finds": a.finds, "by": _by(a)}
        for a in audits
    ]
    return {"way": way, "kind": kind, "seed": seed, "told": told(audits), "tests": tests}


def _by(audit: Any) -> str:
    """Return the test that decides, by its name in the audit's words."""
    if audit.certain or not audit.how.startswith("noise x"):
        return audit.how.split(";")[0][:120]
    return audit.how.partition(" tests: ")[2].partition(",")[0]


def jobs(seeds: int, honest: int) -> list[tuple[str, str, int]]:
    """Return every run that is to be made: where, what is wrong with it, and its seed."""
    first = 500  # seeds that no test and no other study has
    found = [("fields", way, first + s) for s in range(seeds) for way in (*NOISE, *PATH)]
    for engine in ("serial", "stacked"):
        ways = [*NOISE, *OVER_STEPS, *RUN_ONLY, *TRAINING]
        if engine == "stacked":
            ways = [way for way in ways if RUN_ONLY.get(way, way) not in ALONE]
        found += [(engine, way, first + s) for s in range(seeds) for way in ways]
    found += [("fields", "honest", 10_000 + s) for s in range(honest // 2)]
    found += [(engine, "honest", 10_000 + s) for engine in ("serial", "stacked") for s in range(honest // 4)]
    return found


def rows(where: str, way: str, seed: int) -> Iterator[dict[str, Any]]:
    """Return what is said of one run."""
    yield from fields(way, seed) if where == "fields" else training(way, seed, where)


def kept(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each way and kind of release: what was said of its runs, by which tests, and what it took."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["way"], row["kind"]), []).append(row)
    rows = []
    for (way, kind), group in groups.items():
        strongest = [min(row["tests"], key=lambda test: test["p"])["by"] for row in group if row["told"] == "refuted"]
        rows.append({
            "way": way, "kind": kind, "seeds": sorted(row["seed"] for row in group),
            "told": dict(Counter(row["told"] for row in group).most_common()),
            "by": dict(Counter(map(_short, strongest)).most_common()),
            "numbers": max((t["n"] for row in group for t in row["tests"] if t["finds"] is not None), default=0),
            "run_s": statistics.median(row["run_s"] for row in group),
            "audit_s": statistics.median(row["audit_s"] for row in group),
        })  # fmt: skip
    return rows


def honest_runs(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is said of honest runs, with the correction for all noise that was tested in each (Holm)."""
    runs: dict[tuple[str, int], list[float]] = {}
    for row in found:
        if row["way"] == "honest":
            random = [t for t in row["tests"] if t["test"] != "clipping"]  # bounds that hold or not are no chance
            ps = [t["p"] if t["verdict"] in ("refuted", "suspicious") else 1.0 for t in random]
            runs.setdefault((row["job"], row["seed"]), []).extend(ps)
    words = Counter(said(min(p for p in holm(ps) if p is not None)) for ps in runs.values())
    return [{"runs": len(runs), "refuted": words["refuted"], "suspicious": words["suspicious"]}]


def _short(by: str) -> str:
    """Return the name of a test, or of the bound that does not hold."""
    for words, name in (
        ("ledger", "recount"), ("run's", "what was sent"), ("clipping norm", "clipping"), ("as long as C", "clipping"),
        ("class mean", "clipping"), ("ask for", "calibration"),
    ):  # fmt: skip
        if words in by:
            return name
    return by


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep", type=Path, help="add up all shards in OUT into this file, and run nothing")
    parser.add_argument("--shard", default="0/1", help="k/n: every n-th job, from the k-th on")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--honest", type=int, default=400)
    parser.add_argument("--only", action="append", help="ways, by name; default: all")
    chosen = parser.parse_args(arguments)
    if chosen.keep is not None:
        shards = [json.loads(path.read_text())["forged"] for path in sorted(chosen.out.glob("forged-*.json"))]
        # A run that was made again replaces the earlier one.
        last = {(row["job"], row["way"], row["kind"], row["seed"]): row for shard in shards for row in shard}
        found = list(last.values())
        made = {"forged": kept(found), "honest_runs": honest_runs(found)}
        chosen.keep.write_text(json.dumps(made, indent=1) + "\n")
        return
    torch.set_num_threads(1)
    k, n = (int(part) for part in chosen.shard.split("/"))
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / f"forged-{k}.json"
    found = json.loads(path.read_text())["forged"] if path.exists() else []
    done = {(row["job"], row["way"], row["seed"]) for row in found}
    todo = [job for job in jobs(chosen.seeds, chosen.honest)[k::n] if not chosen.only or job[1] in chosen.only]
    for number, job in enumerate(todo):
        if job in done:
            continue
        found += [{"job": job[0], **row} for row in rows(*job)]
        if number % 10 == 9 or number == len(todo) - 1:
            path.write_text(json.dumps({"forged": found}))
            print(f"{number + 1} of {len(todo)}", flush=True)
    path.write_text(json.dumps({"forged": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
