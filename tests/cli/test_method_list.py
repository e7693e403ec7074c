"""`fedaudit list methods`: by family and without torch; each paper's rivals are all there."""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby

import pytest

from fedaudit import registry
from fedaudit.cli.listing import listing
from fedaudit.cli.method_list import listed, of_other_packages, on_hosts

TABLES = {
    "DFFKE": "dffke feddistill fedgen_lg fedgh fedkd fedktl fedproto fedtgp fke fml lgfedavg",  # its Tables 2 and 3
    "FedAF": "fedaf fedavg fedbn feddm feddyn fedgen fedprox moon",  # Table 1
    "FedFree": "fedavg fedfree fedgh fedkd fedproto fedprox fedtgp perfedavg pfedla",  # Table 1
    "FedZGE": "dfrd dsfl fedavg fedftg fedgen fedzge fedzkt mhat",  # Table 2
    "DFRD": "dense dfrd fedavg feddropout fedftg fedrolex heterofl",  # Tables 1 and 2, without compositions
}


def test_every_papers_rivals_are_listed_together():
    rows = [row for row in listing("methods") if "+" not in row["name"]]
    found = {
        paper: " ".join(sorted(row["name"] for row in rows if paper in row.get("in the tables of", "").split(", ")))
        for paper in TABLES
    }
    assert found == TABLES
    groups = [group for group, _ in groupby(row.get("in the tables of") for row in rows)]
    assert len(groups) == len(set(groups)), "a group is in one piece"


@pytest.mark.parametrize("group", ["methods", "attacks"])
def test_what_is_read_from_files_is_what_is_registered(group):
    composed = [f"{host}+{part}" for part, hosts in on_hosts(group).items() for host in hosts]
    found = [one.name for one in listed(group)] + composed
    assert sorted([*found, *of_other_packages(group)]) == registry.names(group)


def test_every_method_says_what_it_does_and_what_leaves_a_client():
    for one in listed("methods"):
        assert len(one.does) <= 66, f"{one.name}: the line is cut at 80 columns"
        assert "leaves a client" in one.sends or one.sends.startswith("A client sends"), one.name
        assert registry.family_of(registry.find(one.name)) != "own"


def test_the_list_stands_by_family_and_imports_no_torch():
    code = (
        "import sys; from fedaudit.cli.main import app; app(['list', 'methods'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False"
    families = [line for line in out.splitlines() if line and line[0].isupper() and ": " in line]
    assert [line.split(":")[0] for line in families][:3] == ["Averaging", "Condensation", "Distillation without data"]
    assert out.index("Averaging:") < out.index("  fedavg ") < out.index("Condensation:") < out.index("  fedaf ")
    assert max(map(len, out.splitlines())) <= 80
