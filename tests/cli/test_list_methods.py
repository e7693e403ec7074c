"""`fedaudit list methods`: a paper's methods stand together, and each paper's rivals are all there."""

from __future__ import annotations

from itertools import groupby

from fedaudit.cli.listing import listing

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
