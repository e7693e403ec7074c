"""The runs of the fedaf*.toml suites as a table: mean and deviation over seeds, and what was published.

python benchmarks/studies/fedaf/fedaf_table.py OUT
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from fedaudit import RunRecord, read_record

Row = tuple[str, str, str]
PUBLISHED: dict[tuple[str, str, str], Row] = {  # alpha 0.02, 0.05, 0.1: the highest accuracy within 20 rounds
    ("fashion-mnist", "convnet", "fedavg"): ("56.50 ± 5.55", "69.14 ± 5.84", "82.19 ± 5.67"),  # Table 1
    ("fashion-mnist", "convnet", "fedgen"): ("61.44 ± 2.07", "75.48 ± 1.83", "82.29 ± 2.53"),
    ("fashion-mnist", "convnet", "feddm"): ("85.36 ± 0.96", "86.08 ± 0.68", "86.65 ± 0.31"),
    ("fashion-mnist", "convnet", "fedaf"): ("87.53 ± 0.32", "87.29 ± 0.23", "87.91 ± 0.41"),
    ("cifar10", "convnet", "fedaf, IPC 10"): ("53.39 ± 2.09", "55.33 ± 0.81", "56.15 ± 0.42"),  # Table 3
    ("cifar10", "convnet", "fedaf, IPC 20"): ("58.56 ± 0.55", "60.89 ± 0.11", "61.79 ± 0.59"),
    ("cifar10", "convnet", "fedaf, IPC 80"): ("67.94 ± 1.18", "70.07 ± 0.45", "70.72 ± 0.37"),
    ("cifar10", "convnet", "fedaf, IPC 100"): ("69.14 ± 0.56", "71.27 ± 0.58", "71.66 ± 0.37"),
    ("cifar10", "convnet", "fedaf"): ("65.15 ± 0.86", "67.50 ± 0.76", "69.11 ± 0.86"),  # Table 4
    ("cifar10", "convnet", "fedaf, w/o CDC"): ("64.16 ± 0.83", "65.88 ± 0.93", "67.90 ± 0.53"),
    ("cifar10", "convnet", "fedaf, w/o LGKM"): ("64.12 ± 0.85", "66.27 ± 1.31", "68.14 ± 0.81"),
    ("cifar10", "convnet", "feddm"): ("60.28 ± 0.82", "62.97 ± 0.96", "64.88 ± 0.35"),
    ("cifar10", "convnet", "fedaf, gamma 0.2"): ("-", "-", "61.30"),  # Table 5, ten rounds
    ("cifar10", "convnet", "fedaf, gamma 0.5"): ("-", "-", "63.52"),
    ("cifar10", "convnet", "fedaf, gamma 0.8"): ("-", "-", "66.15"),
    ("cifar10", "convnet", "fedaf, gamma 0.9"): ("-", "-", "66.97"),
    ("cifar10", "convnet", "fedaf, gamma 1.0"): ("-", "-", "64.92"),
    ("cifar10", "resnet18", "fedaf"): ("41.10 ± 0.50", "41.40 ± 0.66", "42.93 ± 0.29"),  # Table 6
    ("cifar10", "resnet18", "feddm"): ("39.18 ± 0.29", "39.47 ± 0.66", "40.83 ± 0.67"),
    ("cifar10", "resnet18", "fedavg"): ("26.48 ± 0.58", "32.72 ± 2.47", "35.85 ± 3.73"),
    ("cifar10", "resnet18", "fedgen"): ("26.63 ± 2.07", "32.48 ± 3.04", "38.85 ± 2.00"),
}
ALPHAS = ("dirichlet-capped:0.02", "dirichlet-capped:0.05", "dirichlet-capped:0.1")
DOMAINS: dict[str, str] = {  # Table 2: clipart, infograph, painting, quickdraw, real, sketch, mean
    "fedavg": "43.03 40.76 59.16 39.60 41.03 28.46 42.01",
    "fedgen": "42.77 37.88 54.37 37.33 42.86 25.69 40.15",
    "feddm": "52.28 41.38 60.58 62.37 52.45 46.69 52.62",
    "fedaf": "51.2 47.05 62.53 64.6 52.64 50.06 54.68",
}
TOLD = ("IPC", "gamma", "norm", "clamp", "restart", "sigma_x", "aug", "swd_scale", "dm_scale", "lgkm_scale", "aug_w")
TOLD += ("start", "averaged", "tau", "eta_w", "momentum", "lambda_glob", "lambda_loc")


def name(record: RunRecord) -> str:
    setting = record.setting
    without = [what for key, what in (("lambda_loc", "CDC"), ("lambda_glob", "LGKM")) if setting.set.get(key) == 0]
    plain = {"IPC": 50, "lambda_glob": 0, "lambda_loc": 0}  # the paper's, and what `without` says
    told = [f"{key} {setting.set[key]}" for key in TOLD if setting.set.get(key, plain.get(key)) != plain.get(key)]
    return ", ".join([setting.method, *(f"w/o {what}" for what in without), *told])


def accuracy(record: RunRecord, which: str) -> float | None:
    """In percent, of the global model, or of the clients' own on average where there is no global one."""
    found = record.result.model_dump()[which]
    if found is None:
        return None
    if "accuracy" in found:
        return 100 * found["accuracy"]
    if found["global"] is not None:
        return 100 * found["global"]["test"]["accuracy"]
    return 100 * found["clients"]["global_test"]["mean"] if found["clients"] else None


def cell(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.2f}{spread}"


def main(out: Path) -> None:
    groups: dict[tuple[str, str, str], list[RunRecord]] = {}
    for path in sorted(out.glob("runs/*/record.json")):
        record = read_record(path.parent)
        groups.setdefault((record.setting.partition, record.setting.model, name(record)), []).append(record)
    print(
        "| partition | model | method | seeds | rounds | last | chosen | best test round | published | MB up a client |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (partition, model, method), records in sorted(groups.items()):
        first = records[0].setting
        paper = "-"
        if partition in ALPHAS:
            kept = PUBLISHED.get((first.dataset, model, method)) or PUBLISHED.get((first.dataset, model, first.method))
            paper = kept[ALPHAS.index(partition)] if kept else "-"
        rounds = "/".join(str(n) for n in sorted({len(r.rounds) for r in records}))
        up = statistics.mean(r.bytes("up", "payload") / sum(len(t.participants) for t in r.rounds) for r in records)
        scores = [cell([accuracy(r, which) for r in records]) for which in ("last", "chosen", "best_test_round")]
        row = [partition, model, method, str(len(records)), rounds, *scores, paper, f"{up / 1e6:.3f}"]
        print(f"| {' | '.join(row)} |")
    for (_, _, method), records in sorted(groups.items()):
        by_domain(method, records)


def by_domain(method: str, records: list[RunRecord]) -> None:
    """The last round's test accuracy in each domain, where the data have domains; the paper's beside it."""
    found = [u.global_.test_by_domain if (u := r.rounds[-1].utility) and u.global_ else {} for r in records]
    if not all(found):
        return
    domains = sorted(found[0])
    means = [cell([100 * of[d].accuracy for of in found]) for d in domains]
    print(f"\n{method}, test accuracy by domain: " + ", ".join(f"{d} {m}" for d, m in zip(domains, means, strict=True)))
    print(f"published: {DOMAINS.get(records[0].setting.method, '-')}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
