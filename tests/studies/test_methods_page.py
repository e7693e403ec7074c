"""docs/results/methods.md says what the kept records say, and leaves out nothing without a reason."""

from __future__ import annotations

import dataclasses
import functools
import statistics

import pytest
from pages import RESULTS, script

from fedaudit import registry
from fedaudit.reports import method_comparison as comparison
from fedaudit.runtime.planned_traffic import make_plan
from fedaudit.suite.kept_records import CellFigures, MethodRecords, read_records
from fedaudit.suite.suite_file import read_suite, shipped
from fedaudit.wire.message import Up, message_classes

PAGE = (RESULTS / "methods.md").read_text()
script("methods_findings")  # which the page imports
page = script("methods_page")
KINDS = ("none", "messages", "DP-SGD")


@functools.cache
def suite():
    return read_suite(shipped("all"))


@functools.cache
def records():
    return read_records(page.RECORDS)


@functools.cache
def parts():
    return page.parts(suite(), records())


def test_the_page_is_the_records():
    assert page.with_parts(PAGE, parts()) == PAGE


def test_mhat_is_no_example_of_noise_that_pays():
    """Its DP-SGD costs less than noise on its messages, for a few points that three seeds hardly tell from none."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith("9. **Noise on messages pays for FedMD")]
    costs, leads = {}, {}
    for partition in ("iid", "dirichlet:0.3"):
        cells = [c for c in records()["mhat"].cells if c.partition == partition and c.asked in (None, 8.0)]
        of = {kind: {c.seed: 100 * c.global_test for c in cells if c.protection == kind} for kind in KINDS}
        assert {tuple(sorted(found)) for found in of.values()} == {(0, 1, 2)}
        lost = {kind: [of["none"][s] - of[kind][s] for s in range(3)] for kind in ("messages", "DP-SGD")}
        costs[partition] = {kind: statistics.mean(values) for kind, values in lost.items()}
        assert costs[partition]["DP-SGD"] < costs[partition]["messages"]
        apart = [of["DP-SGD"][s] - of["messages"][s] for s in range(3)]
        mean, half = statistics.mean(apart), 4.302653 * statistics.stdev(apart) / 3**0.5  # two degrees of freedom
        assert mean - half < 0.05, "hardly told from none"
        leads[partition] = f"{mean:+.1f} [{mean - half:.1f}, {mean + half:.1f}]"
    even, skewed = costs["iid"], costs["dirichlet:0.3"]
    said = [f"{even[kind]:.1f} on iid records and {skewed[kind]:.1f} on skewed ones" for kind in ("messages", "DP-SGD")]
    assert f"is no example of that: noise costs it {said[0]}, and DP-SGD {said[1]}." in line
    lead = f"{leads['iid']} points on iid records and {leads['dirichlet:0.3']} points on skewed ones more than noise"
    assert f"Seed by seed DP-SGD has {lead}, which 3 seeds hardly tell from none." in line


def test_the_sortable_page_is_the_records():
    rows = comparison.rows_of(records(), registry.names("methods"))
    assert page.html_page(rows) == (RESULTS / "methods.html").read_text()
    assert len(rows) == 2 * len(registry.names("methods"))
    assert (RESULTS / "methods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("partition", comparison.PARTITIONS)
def test_every_method_is_there(partition):
    """Also one without any figure: its row then says why."""
    of = parts()[f"table {partition}"]
    missing = [name for name in registry.names("methods") if f"\n| {name} | " not in of]
    assert not missing


def test_every_attack_is_there():
    listed = parts()["attacks"] + parts()["left out"]
    missing = [name for name in registry.names("attacks") if f"| {name} |" not in listed and f"`{name}`" not in listed]
    assert not missing


def test_every_field_is_there():
    """By the code: what a method's declared traffic sends up, unless it was not run, which the page says then."""
    listed, why = parts()["fields"], parts()["left out"]
    missing = []
    for setting in {cell.method: cell for cell in reversed(suite().cells()) if not cell.privacy}.values():
        if setting.method not in records():
            assert f" {setting.method} " in why
            continue
        missing += [f"{setting.method}: {name}" for name in _fields(setting) if not _is_listed(name, setting, listed)]
    assert not missing


def _fields(setting):
    method, plan = make_plan(setting)
    rounds = [method.traffic(dataclasses.replace(plan, t=t)) for t in (1, 2, setting.rounds)]
    sizes = [(way, where, getattr(size, "payload", size)) for of in rounds for (way, where), size in of.items()]
    sent = {where for way, where, size in sizes if way == "up" and size}
    classes = [cls for cls in message_classes(type(method).__module__) if issubclass(cls, Up)]
    kinds = {f"{cls.__name__}.{name}": of.kind for cls in classes for name, of in cls.declared().items() if of}
    return sorted(name for name in sent if kinds.get(name) is not None and kinds[name] != "statistics")


def _is_listed(name, setting, listed):
    of = listed.partition(f"`{name}`: ")[2]
    return setting.method in of.partition("; `")[0].partition(" |")[0].split(", ")


def test_what_is_missing_is_noticed():
    """A method without records, a cell that was not run and a failed one are named, with a reason or a forecast."""
    cell = CellFigures(key="k", partition="iid", seed=1, protection="none", status="failed", reason="it diverged")
    few = {"fedavg": MethodRecords(method="fedavg", cells=(cell,))}
    why = page.left_out(suite(), few)
    assert "- Failed: fedavg, iid, seed 1, unprotected: it diverged" in why
    assert f"- {len(suite().cells())} cells were not run (no forecast" in why
    assert ", dffke 42, " in why
    assert "- Attack `lira` ran on no cell: no cell was run." in why
    with pytest.raises(SystemExit, match="has no mark for 'more'"):
        page.with_parts(PAGE, {"more": ""})
