"""docs/results/baselines.md says what its records say: every table is computed again."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from pages import RESULTS, of_study, script

from fedaudit import Setting, registry
from fedaudit.runtime.planned_traffic import plan_traffic

PAGE = (RESULTS / "baselines.md").read_text()


@pytest.mark.parametrize(
    ("made_by", "records"),
    [
        ("baselines_table", "baselines"),
        ("baselines_readings", "baselines_readings"),
        ("baselines_attacks", "baselines_privacy"),
    ],
)
def test_the_table_is_the_records(made_by, records):
    kept = json.loads(of_study(f"records/{records}.json").read_text())["runs"]
    assert script(made_by).table(kept) in PAGE
    kept[0]["own"] += 0.05
    assert script(made_by).table(kept) not in PAGE


def test_every_method_is_in_a_group_and_in_the_suite():
    grouped = [name for names in script("baselines_table").GROUPS.values() for name in names]
    listed = [m["method"] for m in tomllib.loads(of_study("baselines.toml").read_text())["methods"]]
    assert sorted(grouped) == sorted(listed) == sorted(registry.names("methods"))


def test_no_accuracy_lies_beyond_what_is_possible():
    """Student's interval of a mean near 100 does, if it is taken as it stands."""
    percent = [line for line in PAGE.splitlines() if re.match(r"\| \S+( \S+)* \| (open \| |\d+ \| )?3 \| ", line)]
    ends = [float(end) for line in percent for end in re.findall(r"\[(\d+\.\d), (?:\d+\.\d)\]", line)]
    ends += [float(end) for line in percent for end in re.findall(r"\[(?:\d+\.\d), (\d+\.\d)\]", line)]
    assert len(ends) > 100
    assert 0 <= min(ends) <= max(ends) <= 100


def test_forecasts_are_the_records():
    kept = json.loads(of_study("records/forecasts_cpu.json").read_text())
    assert script("forecasts").table(kept) in PAGE
    assert {row["table"] for row in kept} == set(script("forecasts").TABLES)
    published = json.loads(of_study("records/forecasts_gpu.json").read_text())
    assert script("forecasts").table(published) in PAGE
    assert {row["scale"] for row in published} == {"gpu"}


@pytest.mark.parametrize(
    "method", ["fedbn", "lgfedavg", "fedgen_lg", "fedgh", "fml", "fedkd", "feddistill", "fedproto", "fedktl"]
)
def test_planned_traffic_is_what_the_methods_declare(method):
    values = {
        "dataset": "cifar100",
        "clients": 10,
        "model": "HtFE-1/512",
        "image_size": 128,
        "rounds": 300,
        "public": 0.1,
    }
    found = plan_traffic(Setting.make(method=method, **values))
    up, down = (found[way]["bytes_per_round"] / 10 / 2**20 for way in ("up", "down"))
    assert f"| {method} | {up:.4f} | {down:.4f} | {found['total']['MiB'] / 1000:.3f} |" in PAGE


@pytest.mark.long
@pytest.mark.parametrize("table", ["fedaf_models", "dffke_rivals"])
def test_the_rivals_stand_in_the_papers_communication_tables(table, capsys):
    getattr(script("communication"), table)()
    assert capsys.readouterr().out.strip() in (RESULTS / "communication.md").read_text()
