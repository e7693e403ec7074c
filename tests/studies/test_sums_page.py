"""The page on sums: its tables come from the kept figures of its runs."""

from __future__ import annotations

import importlib.util
import json
import statistics
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "studies" / "sums"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("sums_table", STUDY / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_made_from_the_kept_figures(made):
    page = (ROOT / "docs" / "results" / "sums.md").read_text()
    assert made.place(page) == page
    assert all(f"<!-- {name} -->" in page for name in made.NAMES)


def figures(row, seed, accuracy, auc, **more):
    found = {"loss by server": {"value": auc, "low": 0.0, "high": 1.0}}
    rest = {"clients": 100, "epsilon": "infinite", "unit": "record", "to": "everybody", "up": 2000, "auc": found}
    return {"row": row, "seed": seed, "accuracy": accuracy, **rest, **more}


def test_a_line_of_the_table_by_hand(made, tmp_path, monkeypatch):
    """Two seeds of 0.8 and 0.9: mean 85, and t = 12.7 times 5 reaches beyond 0 to 100. The best comes first."""
    runs = [figures("open", 0, 0.8, 0.6), figures("open", 1, 0.9, 0.7)]
    promise = {"unit": "client", "to": "peers, outsiders"}
    runs.append(figures("noised", 0, 0.95, 0.5, epsilon=7.0, **promise))
    runs.append(figures("noised", 1, 0.95, 0.5, epsilon=8.0, **promise))
    monkeypatch.setattr(made, "kept", lambda name: runs)
    lines = made.table("digits").splitlines()
    assert lines[2].startswith("| noised | 2 | 95.0")  # with the larger epsilon of the two
    assert lines[2].endswith(" | 8.00, a client, peers, outsiders | 2.00 kB | 0.50; –; – |")
    assert lines[3] == "| open | 2 | 85.0 [21.5, 100.0] | infinite | 2.00 kB | 0.65; –; – |"


def test_the_study_has_every_setting():
    """No protection, secure sums, three guarantees by the server, one in shares, and DP-SGD; three seeds."""
    for name in ("digits", "fashion_100", "fashion_1000"):
        suite = tomllib.loads((STUDY / f"{name}.toml").read_text())
        assert suite["grid"]["seed"] == [0, 1, 2]
        ways = [(m.get("aggregate", "plain"), m.get("privacy", {})) for m in suite["methods"]]
        assert {("plain", 0), ("secure", 0)} == {(of, len(privacy)) for of, privacy in ways if not privacy}
        updates = [privacy["updates"] for _, privacy in ways if "updates" in privacy]
        assert sorted((u["where"], u["epsilon"]) for u in updates) == [
            ("server", 2.0), ("server", 8.0), ("server", 32.0), ("shares", 8.0),
        ]  # fmt: skip
        assert ("training" in {key for _, privacy in ways for key in privacy}) == (name != "fashion_1000")
        assert suite["base"]["clients"] == (1000 if name == "fashion_1000" else 100)


def test_what_the_page_says_of_the_runs(made):
    """Every figure of "What it shows", from the kept figures by other code than the table's."""
    flat = " ".join((ROOT / "docs" / "results" / "sums.md").read_text().split())
    runs = {}
    for name in made.NAMES:
        for run in json.loads((STUDY / "records" / f"{name}.json").read_text()):
            runs.setdefault((name, run["row"]), {})[run["seed"]] = run
    assert all(of.keys() == {0, 1, 2} and {run["rounds"] for run in of.values()} == {20} for of in runs.values())

    def accuracies(name, row):
        return [100 * runs[name, row][seed]["accuracy"] for seed in range(3)]

    def auc(name, row, who="server"):
        return statistics.mean(runs[name, row][seed]["auc"][f"loss by {who}"]["value"] for seed in range(3))

    def cost(name, row):
        plain, noised = accuracies(name, OPEN), accuracies(name, row)
        return statistics.mean(plain) - statistics.mean(noised)

    OPEN, SECURE, SHARES = (
        "open sums, no noise",
        "secure sums, no noise",
        "secure sums, updates ε=8 per client, clip 1, noise in shares",
    )
    by_server = {e: f"open sums, updates ε={e} per client, clip 1, noise by the server" for e in (32, 8, 2)}
    assert accuracies("digits", OPEN) == accuracies("digits", SECURE)
    on_fashion = ("fashion_100", "fashion_1000")
    apart = [
        abs(a - b) for name in on_fashion for a, b in zip(accuracies(name, OPEN), accuracies(name, SECURE), strict=True)
    ]
    assert f"on Fashion-MNIST within {max(apart):.2f} points" in flat
    falls = [f"from {auc(name, OPEN):.2f} to {auc(name, SECURE):.2f}" for name in made.NAMES]
    assert f"{falls[0]} on digits, {falls[1]} with 100 clients on Fashion-MNIST and {falls[2]} with 1,000" in flat
    for name in made.NAMES:
        assert abs(auc(name, SECURE) - auc(name, OPEN, "outsider")) < 0.01
    seen = [auc("digits", row) for row in by_server.values()]
    assert f"stays at {min(seen):.2f} to {max(seen):.2f} on digits" in flat
    prices = [[cost(name, row) for row in by_server.values()] for name in ("digits", "fashion_100")]
    told = ["{:.1f}, {:.1f} and {:.1f} points on ".format(*of) for of in prices]
    assert f"epsilon = 32, 8 and 2 cost {told[0]}digits and {told[1]}Fashion-MNIST" in flat
    most = max(abs(cost("fashion_1000", row)) for row in by_server.values())
    assert f"all three are within {most:.1f} points of no noise" in flat
    a, b, c = (cost(name, SHARES) for name in made.NAMES)
    assert f"at 8, {a:.1f} points on digits, {b:.1f} on Fashion-MNIST with 100 clients and {c:.1f} with 1,000" in flat
    spent = max(run["epsilon"] for name in made.NAMES for run in runs[name, SHARES].values())
    assert f"the ledgers have at most {spent:.1f} in place of 8" in flat
    dp_sgd = [cost(name, "open sums, DP-SGD, ε = 8") for name in ("digits", "fashion_100")]
    assert f"DP-SGD at 8 costs {dp_sgd[0]:.1f} points on digits**" in flat
    assert f"and {dp_sgd[1]:.1f} on Fashion-MNIST with 100 clients" in flat
    rates = json.loads((STUDY / "records" / "fashion_100_rate.json").read_text())
    at_02 = {run["seed"]: 100 * run["accuracy"]["20"] for run in rates if run["eta"] == 0.2}
    assert "ended at {:.1f}, {:.1f} and {:.1f} %".format(*(round(at_02[seed] + 1e-9, 1) for seed in range(3))) in flat
    chosen = max((run for run in rates if run["seed"] == 3), key=lambda run: run["accuracy"]["20"])
    assert f"and {chosen['eta']} on Fashion-MNIST with 100 clients, chosen there on seed 3" in flat
    suite = tomllib.loads((STUDY / "fashion_100.toml").read_text())
    assert {row["set"]["eta"] for row in suite["methods"]} == {chosen["eta"]}
