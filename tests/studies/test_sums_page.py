"""The page on sums: its table comes from the kept figures of its runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "studies" / "sums"


def script():
    spec = importlib.util.spec_from_file_location("sums_table", STUDY / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_made_from_the_kept_figures():
    made = script()
    page = (ROOT / "docs" / "results" / "sums.md").read_text()
    for name in made.NAMES:
        if (STUDY / "records" / f"{name}.json").exists():
            assert made.table(name) in page


def test_a_secure_sum_costs_four_bytes_a_number_and_the_shares():
    """1,210 numbers and the weight, 4 bytes each; keys, sealed shares (82 bytes) and opened ones (33) beside."""
    path = STUDY / "records" / "digits.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    secure = {run["seed"]: run["up"] for run in runs if run["row"] == "secure sums, no noise"}
    opened = {run["seed"]: run["up"] for run in runs if run["row"] == "open sums, no noise"}
    for seed, up in secure.items():
        replies = opened[seed] / (4 * 1210 + 8)
        assert replies == int(replies)
        assert up > replies * 4 * 1211
