"""The page on sums: its tables come from the kept figures of its runs."""

from __future__ import annotations

import importlib.util
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
    promise = {"epsilon": 8.0, "unit": "client", "to": "peers, outsiders"}
    runs.append(figures("noised", 0, 0.95, 0.5, **promise))
    monkeypatch.setattr(made, "kept", lambda name: runs)
    lines = made.table("digits").splitlines()
    assert lines[2].startswith("| noised | 1 | 95.0 | 8.00, a client, peers, outsiders | 2.00 kB | 0.50; –; – |")
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
