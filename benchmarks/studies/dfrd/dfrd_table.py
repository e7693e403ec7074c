"""The runs of dfrd*.toml as a table: G.acc and L.acc as DFRD defines them, mean and deviation over seeds.

python benchmarks/studies/dfrd/dfrd_table.py OUT [--json FILE]
python benchmarks/studies/dfrd/dfrd_table.py --page FILE      # the rows of the page from a file that --json wrote
python benchmarks/studies/dfrd/dfrd_table.py --gains FILE...  # what a distillation adds to its host, over seeds

G.acc: the global model on the test set, at the last round, at the round chosen on validation data, and at the best test
round (what the paper reports). L.acc: the test set is dealt to the clients at random and evenly, and each client's
final model is tested on its share. "L, all" tests each on the whole test set: the same in expectation, with less noise.
"before" is the host's model in the last round before the distillation; "fidelity" how often the ensemble says the label
of a synthetic image, first with the weights tau, then as a plain mean of logits; "agrees" how often the global model
says what the ensemble says. The JSON file has every evaluated round of every run, with Wilson intervals.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fedaudit import load
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.utility import hits
from fedaudit.stats import student_t
from fedaudit.training import models

PUBLISHED = {  # Table 1, Fashion-MNIST
    ("dense", "dirichlet:1.0"): "13.99", ("dense", "dirichlet:0.1"): "13.96", ("dense", "dirichlet:0.01"): "13.83",
    ("fedftg", "dirichlet:1.0"): "48.10", ("fedftg", "dirichlet:0.1"): "44.44", ("fedftg", "dirichlet:0.01"): "26.96",
    ("dfrd", "dirichlet:1.0"): "65.38", ("dfrd", "dirichlet:0.1"): "52.55", ("dfrd", "dirichlet:0.01"): "36.63",
    ("fedavg", "dirichlet:1.0"): "89.71", ("fedavg", "dirichlet:0.1"): "83.24", ("fedavg", "dirichlet:0.01"): "60.89",
    ("fedavg+dense", "dirichlet:1.0"): "90.13", ("fedavg+dense", "dirichlet:0.1"): "84.10",
    ("fedavg+dense", "dirichlet:0.01"): "63.36", ("fedavg+fedftg", "dirichlet:1.0"): "91.15",
    ("fedavg+fedftg", "dirichlet:0.1"): "84.93", ("fedavg+fedftg", "dirichlet:0.01"): "64.80",
    ("fedavg+dfrd", "dirichlet:1.0"): "91.65", ("fedavg+dfrd", "dirichlet:0.1"): "85.66",
    ("fedavg+dfrd", "dirichlet:0.01"): "65.23",
}  # fmt: skip


def local_accuracy(run: RunFolder) -> float | None:
    """L.acc: each client's final model on its own random, equal share of the test set."""
    if not (run.folder / "models").is_dir():
        return None  # only the record was kept
    x, y = run.world.federation.test()
    N = run.record.setting.clients
    shares = torch.randperm(len(y), generator=torch.Generator().manual_seed(run.record.setting.seed)).chunk(N)
    each = []
    for k, share in enumerate(shares):
        path = run.folder / "models" / f"client-{k:06d}.safetensors"
        if not path.exists():
            return None  # never took part
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            arch = file.metadata()["arch"]
        net = load(models.build(arch, shape=run.world.shape, classes=run.world.classes), state).eval()
        each.append(hits(net, x[share], y[share]) / len(share))
    return 100 * statistics.fmean(each)


def spread(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return ""
    return f"{statistics.fmean(known):.2f}" + (f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else "")


def row(runs: list[RunFolder]) -> list[str]:
    results = [run.record.result.model_dump() for run in runs]

    def G(when: str) -> list[float | None]:
        return [100 * r[when]["global"]["test"]["accuracy"] if r[when] and r[when]["global"] else None for r in results]

    best = [100 * r["best_test_round"]["accuracy"] if r["last"]["global"] else None for r in results]
    whole = [100 * r["last"]["clients"]["global_test"]["mean"] if r["last"]["clients"] else None for r in results]
    rounds = [row for run in runs for row in run.record.rounds]
    bytes_ = statistics.fmean(row.up_payload + row.down_payload for row in rounds) / 1e6
    seconds = statistics.fmean(row.wall_s for row in rounds)
    cells = [G("last"), G("chosen"), best, [local_accuracy(run) for run in runs], whole]
    last = [run.record.rounds[-1] for run in runs]
    points = [(r["last"].get("global_points") or {}).get("before distillation") for r in results]
    measured = [[row.diagnostics.get(name) for row in last] for name in ("fidelity", "fidelity_mean", "agreement")]
    cells += [[100 * p["test"]["accuracy"] if p else None for p in points]]
    cells += [[None if v is None else 100 * v for v in of] for of in measured]
    return [str(len(runs)), *map(spread, cells), f"{bytes_:.2f}", f"{seconds:.1f}"]


def numbers(run: RunFolder) -> dict[str, Any]:
    """One run for the JSON file: its curve, before and after each distillation, and what the method measured."""
    record = run.record
    s = record.setting
    rounds = [
        {
            "round": row.round,
            "test": utility["global"]["test"],
            "before": utility.get("global_points", {}).get("before distillation", {}).get("test"),
            "clients": ((utility["clients"] or {}).get("global_test") or {}).get("mean"),
            "diagnostics": row.diagnostics,
        }
        for row in record.rounds
        if row.utility and (utility := row.utility.model_dump())["global"]
    ]
    setting = {"method": s.method, "dataset": s.dataset, "partition": s.partition, "seed": s.seed, "preset": s.preset}
    facts = {"device": record.device, "finished": record.finished, "seconds": sum(row.wall_s for row in record.rounds)}
    return {**setting, "set": s.set, **facts, "rounds": rounds}


def table(folder: Path) -> list[str]:
    runs = [RunFolder(path.parent) for path in sorted(folder.glob("**/record.json"))]
    groups: dict[Any, list[RunFolder]] = {}
    for run in runs:
        s = run.record.setting
        if run.record.status == "done":
            key = s.method, s.partition, json.dumps(s.set, sort_keys=True), json.dumps(s.privacy, sort_keys=True)
            groups.setdefault(key, []).append(run)
    heads = ["method", "partition", "settings", "seeds", "G.acc, last", "chosen", "best", "published"]
    heads += ["L.acc", "L, all", "before", "fidelity", "by the mean", "agrees", "MB a round", "s a round"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for (method, partition, values, privacy), of in groups.items():
        fmnist = of[0].record.setting.dataset == "fashion-mnist"
        published = PUBLISHED.get((method, partition), "") if fmnist else ""
        said = values + (f" privacy {privacy}" if privacy != "{}" else "")
        cells = row(of)
        lines.append(f"| {' | '.join([method, partition, said, *cells[:4], published, *cells[4:]])} |")
    return lines


COMMON = ("host", "width", "B", "I", "E", "eta")  # the same in all runs of a table


def told(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sorted(run["set"].items()) if name not in COMMON)


def gains(kept: Sequence[dict[str, Any]]) -> list[str]:
    """A row per setting: the last round's G.acc less that of `fedavg` alone with the same seed, in points, and the mean
    over seeds with Student's 95 % interval."""
    host = {run["seed"]: run["rounds"][-1]["test"]["accuracy"] for run in kept if run["method"] == "fedavg"}
    found: dict[str, dict[int, float]] = {}
    for run in kept:
        if run["method"] != "fedavg":
            more = 100 * (run["rounds"][-1]["test"]["accuracy"] - host[run["seed"]])
            found.setdefault(told(run), {})[run["seed"]] = more
    lines = []
    for said, by_seed in sorted(found.items(), key=lambda row: -statistics.fmean(row[1].values())):
        each = " | ".join(f"{by_seed[seed]:+.1f}" if seed in by_seed else "-" for seed in sorted(host))
        mean = student_t(list(by_seed.values()))
        interval = "" if mean.low is None else f" [{mean.low:+.1f}, {mean.high:+.1f}]"
        lines.append(f"| {said} | {each} | {mean.value:+.1f}{interval} |")
    return lines


def page(kept: Sequence[dict[str, Any]]) -> list[str]:
    """A row per run: G.acc at each evaluated round, the last with its Wilson interval, what the last distillation got,
    the clients' mean."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    lines = []
    several = len({run["seed"] for run in kept}) > 1
    for run in sorted(kept, key=lambda run: (run["method"], json.dumps(run["set"]), run["seed"])):
        said = "; ".join(filter(None, [told(run), f"seed {run['seed']}" if several else ""]))
        rounds = run["rounds"]
        test, before = rounds[-1]["test"], rounds[-1]["before"]
        curve = ", ".join(percent(at["test"]["accuracy"]) for at in rounds)
        interval = f"{percent(test['low'])} to {percent(test['high'])}"
        got = percent(before["accuracy"] if before else None)
        cells = [f"`{run['method']}`", said, curve, interval, got, percent(rounds[-1]["clients"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--gains", type=Path, nargs="+")
    given = parser.parse_args()
    if given.page:
        print("\n".join(page(json.loads(given.page.read_text()))))
        return
    if given.gains:
        print("\n".join(gains([run for path in given.gains for run in json.loads(path.read_text())])))
        return
    print("\n".join(table(given.folder)))
    if given.json:
        runs = [RunFolder(path.parent) for path in sorted(given.folder.glob("**/record.json"))]
        done = [numbers(run) for run in runs if run.record.status == "done"]
        given.json.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
