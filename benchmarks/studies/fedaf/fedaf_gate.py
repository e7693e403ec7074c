"""The eight readings of fedaf_gate.toml as a table, and the suites that follow from the winner.

python benchmarks/studies/fedaf/fedaf_gate.py OUT [--best SUITE.toml] [--more SUITE.toml] [--rounds N]

--best: the winner, FedDM in the same reading and FedAvg, at the paper's 1,000 steps, N rounds (20; FedAvg always 20).
Raise N and run the suite again: it goes on. --more: the winner with one thing changed each.

The winner is the reading with the highest test accuracy in any of its rounds, since that is what the paper reports
("best test round"); the last round and the one chosen on validation data stand beside it. An interval is Wilson's, of
one model on the test set; it says nothing of other seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record
from fedaudit.runtime.scores import Accuracy

READING = ("norm", "clamp", "restart")
PUBLISHED = 87.53  # Table 1, Fashion-MNIST, alpha = 0.02, three seeds, 20 rounds
BASE = """threats = []

[base]
dataset = "fashion-mnist"
partition = "dirichlet-capped:0.02"
model = "{model}"
clients = 10
rounds = {rounds}
holdout = 0.0
aux = 0.0
validation = 0.02
eval_clients = false
keep_weights = 1
device = "{device}"
seed = 0
"""
MORE: list[dict[str, Any]] = [  # one thing changed each
    {"sigma_x": 0.706},
    {"aug": "siamese"},
    {"T_over": "all"},
    {"swd_scale": "sum", "dm_scale": "mean"},
    {"lgkm_scale": "mean"},
]


def best(record: RunRecord) -> Accuracy:
    """The test accuracy of the round that is best on the test set, with its interval."""
    rounds = [r for r in record.rounds if r.utility and r.utility.global_]
    return max((r.utility.global_.test for r in rounds), key=lambda test: test.accuracy)


def percent(test: Accuracy) -> str:
    return f"{100 * test.accuracy:.2f} [{100 * test.low:.2f}, {100 * test.high:.2f}]"


def value(v: Any) -> str:
    return str(v).lower() if isinstance(v, bool) else f'"{v}"' if isinstance(v, str) else str(v)


def entry(method: str, preset: str, values: dict[str, Any], **more: Any) -> str:
    table = ", ".join(f"{key} = {value(v)}" for key, v in values.items())
    extra = "".join(f"{key} = {value(v)}\n" for key, v in more.items())
    return f'\n[[methods]]\nmethod = "{method}"\npreset = "{preset}"\n{extra}set = {{ {table} }}\n'


def main(out: Path, options: dict[str, str]) -> None:
    records = [read_record(path.parent) for path in sorted(out.glob("runs/*/record.json"))]
    if not records:
        sys.exit(f"There is no finished run under {out}/runs. Run the suite first.")
    records.sort(key=lambda record: -best(record).accuracy)
    print("| batch norm | clamp | restart | rounds | steps | best test round | last | short of the published 87.53 |")
    print("|---|---|---|---|---|---|---|---|")
    for record in records:
        values, found = record.setting.set, best(record)
        last = record.rounds[-1].utility.global_.test
        short = PUBLISHED - 100 * found.accuracy
        told = " | ".join(str(values[key]).lower() for key in READING)
        print(
            f"| {told} | {len(record.rounds)} | {values['steps']} | {percent(found)} | {percent(last)} | {short:.2f} |"
        )
    setting = records[0].setting
    winner = {key: setting.set[key] for key in READING}
    if "--best" in options:
        suite = BASE.format(rounds=options.get("--rounds", 20), device=setting.device, model=setting.model)
        suite += entry("fedaf", "fashion-mnist", {**winner, "T_over": "batch"})
        suite += entry("feddm", "fashion-mnist", winner)
        suite += entry("fedavg", "fedaf", {}, rounds=20)
        Path(options["--best"]).write_text(suite)
    if "--more" in options:
        suite = BASE.format(rounds=5, device=setting.device, model=setting.model)
        common = {**winner, "steps": setting.set["steps"], "T_over": "batch"}
        for change in MORE:
            suite += entry("fedaf", "fashion-mnist", {**common, **change})
        suite += entry("fedaf", "fashion-mnist", common, model="convnet_padded")
        Path(options["--more"]).write_text(suite)


if __name__ == "__main__":
    words = sys.argv[1:]
    flags = dict(zip(words[1::2], words[2::2], strict=False))
    if len(words) % 2 == 0 or not set(flags) <= {"--best", "--more", "--rounds"}:
        sys.exit(__doc__)
    main(Path(words[0]), flags)
