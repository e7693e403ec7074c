"""The runs of baselines.toml as a Markdown table: means over seeds with a 95 % interval of Student's t.

python benchmarks/studies/baselines/baselines_table.py AUDIT... --json FILE     the figures are kept in FILE
python benchmarks/studies/baselines/baselines_table.py FILE                     the table from what was kept
python benchmarks/studies/baselines/baselines_table.py FILE AUDIT --json FILE   what was kept, and more runs
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record, registry
from fedaudit.stats import mean_in_range

SUITE = Path(__file__).with_name("baselines.toml")
COLUMNS = {
    "global": "global model, common test",
    "common": "clients' models, common test",
    "own": "clients' models, own held-out",
}
WAYS = ("prototypes", "classifier")  # in which clients of FedProto and FedTGP may predict: a row for each
HEADS = ("after training", "with the new head")  # the two points at which a model with a shared head may be scored

HOSTS, BY = ("heterofl", "feddropout", "fedrolex"), ("dense", "fedftg", "dfrd", "feddf")
GROUPS = {
    "No exchange": ["local", "constant"],
    "Whole models travel and are averaged": [
        "fedavg", "fedprox", "feddyn", "moon", "scaffold", "fednova", "fedavgm", "fedntd", "perfedavg", "fedgen",
    ],
    "A part of a model, or a shared one beside the own": [
        "fedbn", "pfedla", "fedfree", "lgfedavg", "fedgen_lg", "fedgh", "fml", "fedkd",
    ],
    "One vector for each class": ["feddistill", "fedproto", "fedtgp", "fedktl"],
    "Outputs, embeddings or images": ["fke", "dffke", "mhat", "dsfl", "fedmd", "feddm", "fedaf"],
    "The server distils what clients upload": [
        "feddf", "fedzkt", "fedzge", "dense", "fedftg", "dfrd", *(f"fedavg+{by}" for by in BY[:3]),
    ],
    "Sub-models by width": [*HOSTS],
    "The server distils sub-models": [f"{host}+{by}" for host in HOSTS for by in BY],
}  # fmt: skip


def figures(record: RunRecord) -> list[dict[str, Any]]:
    """Of the last round of one run: shares, and bytes that a client sends and receives in a round."""
    last = record.result.model_dump()["last"]
    tasks = sum(len(row.participants) for row in record.rounds)
    shared = {
        "method": record.setting.method,
        "seed": record.setting.seed,
        "set": record.setting.set,
        "global": last["global"]["test"]["accuracy"] if last["global"] else None,
        **{way: record.bytes(way) / tasks for way in ("up", "down")},
        **widths(record),
    }
    points = last.get("points", {})
    ways = {f"by {way}": points[way] for way in WAYS if way in points} or {"": last["clients"]}
    if "new head" in points:
        ways = dict(zip(HEADS, (last["clients"], points["new head"]), strict=True))
    return [
        {**shared, "way": way, "common": of["global_test"]["mean"], "own": of["local_test"]["mean"]}
        for way, of in ways.items()
    ]


def widths(record: RunRecord) -> dict[str, Any]:
    """Of methods that cut sub-models: rho, and the share of the global model that nobody had trained at the end."""
    method: Any = registry.find(record.setting.method).make(record.setting.set, record.setting.preset)  # type: ignore[attr-defined]
    host = getattr(method, "host", method)
    if not hasattr(host, "sigma"):
        return {}
    rho = host.rho if host.rho is not None else min(5, record.setting.clients - 1)
    return {"rho": rho, "untrained": record.rounds[-1].diagnostics["untrained"]}


def table(rows: list[dict[str, Any]]) -> str:
    """A table for each group, with a line per method and way to predict, in the order of the groups."""
    return "\n\n".join(f"**{group}**\n\n{of_group(rows, names)}" for group, names in GROUPS.items())


def of_group(rows: list[dict[str, Any]], names: list[str]) -> str:
    cut = any(name.split("+")[0] in HOSTS for name in names)
    more = ["rho", "never trained, %"] if cut else []
    heads = ["method", "seeds", *(f"{name}, %" for name in COLUMNS.values()), "up, kB", "down, kB", *more]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for method in names:
        for way in dict.fromkeys(row["way"] for row in rows if row["method"] == method):
            of = [row for row in rows if (row["method"], row["way"]) == (method, way)]
            cells = [str(len({row["seed"] for row in of})), *(_cell([row[key] for row in of]) for key in COLUMNS)]
            cells += [f"{sum(row[to] for row in of) / len(of) / 1e3:.1f}" for to in ("up", "down")]
            if cut:
                cells.append(", ".join(str(rho) for rho in dict.fromkeys(row.get("rho", 5) for row in of)))
                cells.append(_cell([row.get("untrained") for row in of], "not kept"))
            lines.append(f"| {' '.join(filter(None, (method, way)))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float | None], none: str = "none") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return none
    found = mean_in_range(known, 0, 1)
    if found.low is None:
        return f"{100 * found.value:.1f}"
    return f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def kept(paths: list[Path]) -> list[dict[str, Any]]:
    """Every run once, in the order of the suite: of the same one the last that is given."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in paths:
        if path.is_file():
            rows = json.loads(path.read_text())["runs"]
        else:
            found = map(read_record, sorted(path.glob("runs/*/record.json")))
            rows = [row for record in found if record.status == "done" for row in figures(record)]
        for key in {(row["method"], row["seed"]) for row in rows}:
            runs[key] = [row for row in rows if (row["method"], row["seed"]) == key]
    order = [method["method"] for method in tomllib.loads(SUITE.read_text())["methods"]]
    in_order = sorted(runs, key=lambda key: (order.index(key[0]), key[1]))
    return [row for key in in_order for row in runs[key]]


def main(words: list[str]) -> None:
    keep = Path(words.pop(words.index("--json") + 1)) if "--json" in words else None
    paths = [Path(word) for word in words if word != "--json"]
    rows = kept(paths)
    if keep:
        keep.write_text(json.dumps({"suite": "baselines.toml", "runs": rows}, separators=(",", ":")) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
