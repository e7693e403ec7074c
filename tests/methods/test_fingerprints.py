"""Every method still computes what it did: each field of each message of a tiny run, and each final model.

A failure names the field and the round that moved. If the change is meant: `make fingerprints CASES=name`.
"""

from __future__ import annotations

import copy
import json

import fingerprint
import pytest

# One of each family. Of the others every round is told by hand, in by_hand/, and they run with the long tests.
# Compositions share both their parts' code, and variants most of it: they run with the slow tests.
QUICK = {"fedaf", "fedavg", "fedfree", "fedgen", "fedmd", "fedproto", "heterofl", "scaffold", "fedzge"}


def marked() -> list:
    slow = [case for case in fingerprint.cases() if "+" in case or "@" in case]
    long = set(fingerprint.cases()) - {*slow, *QUICK}
    marks = {**dict.fromkeys(slow, pytest.mark.slow), **dict.fromkeys(long, pytest.mark.long)}
    return [pytest.param(case, marks=marks.get(case, ())) for case in fingerprint.cases()]


@pytest.mark.parametrize("case", marked())
def test_nothing_moved(case):
    moved = fingerprint.moved(case)
    assert not moved, "\n".join(moved[:20])


def test_every_method_has_a_fingerprint():
    missing = [case for case in fingerprint.cases() if not fingerprint.path_of(case).exists()]
    assert not missing, f"make fingerprints CASES='{' '.join(missing)}'"


def test_no_fingerprint_is_of_nothing():
    assert {path.stem for path in fingerprint.FOLDER.glob("*.json")} == set(fingerprint.cases())


def test_a_kept_run_is_unequal_where_it_should_be():
    """Somebody drops out, in a second ask too; not everybody is asked; two architectures and batch norm are there."""
    kept = json.loads(fingerprint.path_of("dffke").read_text())
    found = kept["fingerprint"]
    asked = {t: set(",".join(found[f"round {t}, ask 0, up, Shared.E"]).split(",")) for t in (1, 2, 3)}
    assert asked[1] == {"0", "1", "3", "4"}
    assert asked[2] == {"0", "1", "4"}  # 2 was asked, and dropped out
    answered = [where for where in found if where.startswith("round 1, ask 1, up")]
    assert answered
    assert all("3" not in ",".join(found[where]).split(",") for where in answered)  # dropped out in the second ask
    assert kept["setting"]["model"] == "cnn_bn:3,mlp:2"


def test_what_moved_is_named():
    kept = json.loads(fingerprint.path_of("fedavg").read_text())["fingerprint"]
    other = copy.deepcopy(kept)
    other["round 2, ask 0, up, Local.w"]["1"]["values"][1] += 1e-4
    del other["model client-000003"]
    other["round 3, ask 0, up, Local.n"]["9"] = other["round 3, ask 0, up, Local.n"].pop("2")
    assert [line.split(":")[0] for line in fingerprint.differences(kept, other)] == [
        "round 2, ask 0, up, Local.w, client 1, values",
        "round 3, ask 0, up, Local.n",
        "model client-000003",
    ]
