"""The section on Fashion-MNIST of docs/results/methods.md says what the kept records say."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest
from pages import RESULTS, script

from fedaudit import registry
from fedaudit.suite.kept_records import read_records
from fedaudit.suite.suite_file import read_suite, shipped

PAGE = (RESULTS / "methods.md").read_text()
script("methods_findings")
methods = script("methods_page")
page = script("fashion_page")


@functools.cache
def parts() -> dict[str, str]:
    return page.parts()


def raw(folder, method, partition):
    """Return the unprotected cells of a method, as they lie in the file."""
    cells = json.loads((folder / f"{method}.json").read_text())["cells"]
    return [c for c in cells if c["partition"] == partition and c["protection"] == "none" and c["status"] == "done"]


def test_the_section_is_the_records() -> None:
    assert methods.with_parts(PAGE, parts()) == PAGE


def test_the_records_are_cells_of_the_suite() -> None:
    """The suite extends `all`, whose points they are; its arrays are written by a script, and need not be here."""
    wanted = {(s.method, s.partition, s.seed) for s in read_suite(shipped("all")).cells() if not s.privacy}
    kept = [(name, cell) for name, of in read_records(page.RECORDS).items() for cell in of.cells]
    assert len(kept) == 2 * len(registry.names("methods"))
    assert {(name, cell.partition, cell.seed) for name, cell in kept} <= wanted
    assert {cell.protection for _, cell in kept} == {"none"}


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.3"])
def test_every_method_is_there(partition: str) -> None:
    of = parts()[f"fashion table {partition}"]
    assert [name for name in registry.names("methods") if f"\n| {name} | " not in of] == []


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "dsfl"])
def test_accuracy_and_members_are_those_of_the_files(method: str) -> None:
    """By the files' own figures: the mean accuracy of the global model, and the best mean AUC of the server."""
    for partition in ("iid", "dirichlet:0.3"):
        (line,) = re.findall(rf"\n(\| {method} \| .*)", parts()[f"fashion table {partition}"])
        texts = [text.strip() for text in line.split("|")[2:-1]]
        for folder, accuracy, members in ((methods.RECORDS, *texts[0:3:2]), (page.RECORDS, *texts[1:4:2])):
            cells = raw(folder, method, partition)
            assert accuracy == f"{100 * np.mean([cell['global_test'] for cell in cells]):.1f}"
            by: dict[str, list[float]] = {}
            for cell in cells:
                for attack, threat, claims, value, *_ in cell["attacks"]:
                    if (threat, claims) == ("server", "membership") and value is not None:
                        by.setdefault(attack, []).append(value)
            means = {attack: f"{np.mean(of):.2f}" for attack, of in by.items()}
            if members.startswith("not found"):
                assert members == f"not found ({max(means.values())})"
            else:
                value, attack = members.split()
                assert value == means[attack]


def test_the_correlation_of_ranks() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 1.0, 4.0, 3.0, 6.0, 5.0]
    rho, low, high = page.carried_over(x, y)
    assert rho == pytest.approx(1 - 6 * 6 / (6 * 35))
    assert low < rho < high <= 1
    assert page.carried_over(x, [-v for v in x])[0] == pytest.approx(-1)
