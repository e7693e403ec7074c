"""The page on compression: its tables come from the kept figures of its runs."""

from __future__ import annotations

import json

from pages import RESULTS, STUDIES, of_study, script


def test_the_tables_are_made_from_the_kept_figures():
    made = script("compression_table")
    page = (RESULTS / "compression.md").read_text()
    for name in made.NAMES:
        if (STUDIES / "compression" / "records" / f"{name}.json").exists():
            assert made.table(name) in page


def test_the_kept_bytes_are_those_of_the_network():
    """13,706 numbers: 144, 4608, 8192, 64 and 640 that are compressed, 16, 32 and 10 that are too few (232 bytes), and
    the count n (8 bytes). int8: a byte each and 5 scales; top-k at 0.1: 15 + 461 + 820 + 7 + 64 numbers of 8 bytes; at
    0.01: 2 + 47 + 82 + 1 + 7."""
    expected = {None: 4 * 13706, "int8": 13648 + 20 + 232, "topk:0.1": 8 * 1367 + 232, "topk:0.01": 8 * 139 + 232}
    for run in json.loads(of_study("records/compression.json").read_text()):
        if run["compress"] in expected:
            assert run["up"] == run["rounds"] * run["clients"] * (expected[run["compress"]] + 8)
