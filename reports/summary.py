"""A folder of runs as one page: what was reached, what it cost, what the attacks found."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from fedaudit.data.plot import bubbles
from fedaudit.errors import RunError
from fedaudit.record import RunRecord, read_record
from fedaudit.stats import mean_std
from fedaudit.units import bytes_text


def summarise(folder: Path, errors: dict[str, str] | None = None) -> list[Path]:
    """Write report.html and report.md beside the runs, and return their paths."""
    paths = sorted(folder.glob("**/record.json"))
    records = [read_record(path) for path in paths]
    if not records:
        raise RunError(f"There is no run below {folder}. `fedaudit run --out {folder}/NAME` makes one.")
    rows = [_row(group) for group in _groups(records)]
    facts = {
        "rows": rows,
        "records": records,
        "errors": errors or {},
        "curves": _curves(_groups(records)),
        "partition": _svg(bubbles(_counts(records[0]), None, title="Records that each client trains on")),
        "columns": COLUMNS,
    }
    written = []
    for name in ("report.html", "report.md"):
        text = _templates().get_template(name).render(**facts)
        path = folder / name
        path.write_text(text)
        written.append(path)
    return written


COLUMNS = {
    "accuracy": "Share of the common test set that is classified right in the last round, mean ± standard deviation "
    "over seeds: by the global model, or, where a method has none, by the clients' models on average.",
    "local": "Clients' own models on their own held-out records, mean over clients and seeds.",
    "up": "Bytes that one client sends in one round, papers' convention (elements x size).",
    "down": "Bytes that one client receives in one round.",
    "epsilon": "What the ledger guarantees for the worst-off client, all rounds together: the smaller, the less one "
    "record can show. ∞: something computed from private data was sent unprotected.",
    "attack": "Best membership attack: probability that it ranks a trained-on record above one that was not. "
    "0.5 is a coin flip. In brackets: 95 % interval of the first seed.",
    "seconds": "Wall time of all clients' tasks and the server's rounds together.",
}


def _groups(records: list[RunRecord]) -> list[list[RunRecord]]:
    """Runs that differ in their seed alone."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        key = record.setting.model_dump_json(exclude={"seed"})
        groups.setdefault(key, []).append(record)
    return sorted(groups.values(), key=lambda g: g[0].setting.method)


def _score(utility: dict[str, Any]) -> float:
    if utility["global"] is not None:
        return utility["global"]["test"]["accuracy"]
    return utility["clients"]["global_test"]["mean"]


def _row(group: list[RunRecord]) -> dict[str, Any]:
    last = [r.result["last"] for r in group if r.result.get("last")]
    first = group[0]
    mean, std = mean_std([_score(u) for u in last])
    local = mean_std([u["clients"]["local_test"]["mean"] for u in last if u["clients"] and u["clients"]["local_test"]])
    asked = sum(len(row.participants) for row in first.rounds) or 1
    ran = [a for a in first.attacks if a["ran"]]
    best = max(ran, key=lambda a: a["pooled"]["auc"]["value"], default=None)
    return {
        "method": first.setting.method,
        "privacy": ", ".join(sorted(first.setting.privacy)) or "none",
        "seeds": len(group),
        "accuracy": f"{100 * mean:.1f} ± {100 * std:.1f} %",
        "local": f"{100 * local[0]:.1f} %",
        "up": bytes_text(first.bytes("up") / asked),
        "down": bytes_text(first.bytes("down") / asked),
        "epsilon": _epsilon_text(group),
        "attack": _attack_text(best),
        "seconds": f"{sum(row.wall_s for r in group for row in r.rounds) / len(group):.1f} s",
        "releases": [r for r in first.releases if r.role == "private"],
    }


def _epsilon_text(group: list[RunRecord]) -> str:
    """The worst client of the worst seed, by the ledger."""
    clients = [client for record in group for client in record.ledger]
    if any(client.epsilon is None and client.by_relation for client in clients):
        return "not composable"
    worst = max((client.epsilon or 0.0 for client in clients), default=0.0)
    return "∞" if worst == math.inf else f"{worst:.3g}"


def _attack_text(best: dict[str, Any] | None) -> str:
    if best is None:
        return "none ran"
    auc = best["pooled"]["auc"]
    return f"{auc['value']:.2f} [{auc['low']:.2f}, {auc['high']:.2f}] {best['attack']}, {best['threat']}"


def _counts(record: RunRecord) -> Any:
    import numpy as np

    return np.array(record.data["counts"])


def _curves(groups: list[list[RunRecord]]) -> str:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for group in groups:
        runs = [[(row.round, _score(row.utility)) for row in r.rounds if row.utility] for r in group]
        rounds = [t for t, _ in runs[0]]
        each = [[score for _, score in run] for run in runs if [t for t, _ in run] == rounds]
        middle = [mean_std(values)[0] for values in zip(*each, strict=True)]
        (line,) = axes.plot(rounds, middle, label=group[0].setting.method, linewidth=2)
        axes.fill_between(
            rounds,
            [min(values) for values in zip(*each, strict=True)],
            [max(values) for values in zip(*each, strict=True)],
            alpha=0.15,
            color=line.get_color(),
            linewidth=0,
        )
    axes.set(xlabel="round", ylabel="accuracy on the common test set", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    return jinja2.Environment(loader=loader, autoescape=jinja2.select_autoescape(["html"]), trim_blocks=True)
