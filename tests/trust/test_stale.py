"""No stale result: a cell counts only while the code that made it is the code that would make it now."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from fedaudit import read_record, run
from fedaudit.errors import SettingError
from fedaudit.runtime.code_digest import SCHEME, differences, source_of, sources
from fedaudit.runtime.code_digest import _text as source_text
from fedaudit.suite.cell import Cell, missing, stale_attacks, why_stale
from fedaudit.suite.scheduler import audit

BASE = """
from fedaudit.methods.averaging.fedavg import FedAvg


def scale():
    return 1


class Base(FedAvg):
    pass
"""
MINE = """
from {name}_base import Base


class Mine(Base):
    mine: int = 1
"""
SUITE = """
attacks = ["loss"]
[base]
rounds = 1
clients = 2
model = "mlp"
[[methods]]
method = "fedavg"
set = {{ E = 1 }}
[[methods]]
method = "{name}:Mine"
set = {{ E = 1 }}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A method of somebody's own in two modules; a name of its own, for modules stay imported."""
    name = f"mine_{abs(hash(str(tmp_path))) % 10**9}"
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / f"{name}_base.py").write_text(BASE)
    (folder / f"{name}.py").write_text(MINE.format(name=name))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder, name


def test_an_edited_method_reruns_its_cells_and_no_other(own, quick, tmp_path):
    folder, name = own
    (tmp_path / "suite.toml").write_text(SUITE.format(name=name))
    out = tmp_path / "out"

    def carried_out(**how):
        cells = audit(tmp_path / "suite.toml", out, **how)
        assert [cell.status for cell in cells] == ["done", "done"], [cell.reason for cell in cells]
        started = [(cell.folder / "record.json").stat().st_mtime_ns for cell in cells]
        return [cell.again for cell in cells], started

    again, first = carried_out()
    assert again == [None, None]
    again, second = carried_out()
    assert (again, second) == ([None, None], first)

    path = folder / f"{name}_base.py"
    path.write_text(path.read_text().replace("return 1", "return 2"))
    again, kept = carried_out(keep_stale=True)
    assert (again, kept) == ([None, None], first)
    again, third = carried_out()
    assert again == [None, f"{name}_base changed"]
    assert third[0] == first[0]
    assert third[1] > first[1]
    aside = list((out / ".stale").iterdir())
    assert len(aside) == 1
    assert read_record(aside[0]).status == "done"  # nothing was deleted

    from fedaudit.reports.runs import read_runs

    assert len(read_runs(out)[0]) == 2  # what was put aside is in no report


def test_code_is_the_module_its_bases_and_what_they_import(own):
    import importlib

    from fedaudit.methods.averaging.fedavg import FedAvg

    folder, name = own
    cls = importlib.import_module(name).Mine
    before = sources([cls])
    assert {name, f"{name}_base", "fedaudit.methods.fedavg"} <= before.keys()
    assert not any(module.startswith(("fedaudit.runtime", "pydantic", "torch")) for module in before)
    path = folder / f"{name}_base.py"
    path.write_text('"""What this is for."""\n# a remark\n' + path.read_text())
    assert sources([cls]) == before  # prose is no code
    path.write_text(path.read_text().replace("return 1", "return 3"))
    now = sources([cls])
    assert [module for module in now if now[module] != before[module]] == [f"{name}_base"]
    assert name not in sources([FedAvg])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "run"
    return folder, run(method="fedavg", rounds=1, clients=2, out=folder)


def test_other_defaults_versions_and_records_without_code_are_stale(kept):
    folder, record = kept
    cell = Cell(folder, record.setting, [], ["server"])
    assert why_stale(cell, record) is None
    values = {**record.code["values"], "E": "77"}
    other = record.model_copy(update={"code": {**record.code, "values": values}})
    assert "E was 77, is" in why_stale(cell, other)
    assert "torch was 1.0" in why_stale(
        cell, record.model_copy(update={"versions": {**record.versions, "torch": "1.0"}})
    )
    assert "does not say" in why_stale(cell, record.model_copy(update={"code": None}))
    assert why_stale(cell, record.model_copy(update={"harness": "3:another"})) == "fedaudit's own code changed"


@pytest.mark.long
def test_the_harness_is_the_files_that_compute_a_run(tmp_path, monkeypatch):
    """An edit of any of them is another harness, without a new version; one of the command line is not."""
    from fedaudit.runtime import code_digest

    shutil.copytree(
        Path(code_digest.__file__).parents[1], tmp_path / "fedaudit", ignore=shutil.ignore_patterns("*.pyc")
    )
    monkeypatch.setattr(code_digest, "__file__", str(tmp_path / "fedaudit" / "runtime" / "source.py"))
    found = {}
    for name in ("", "cli/main.py", "training/fit.py", "runtime/engines/serial.py", "rng.py", "attack/score.py"):
        if name:
            path = tmp_path / "fedaudit" / name
            path.write_text(path.read_text() + "\nMORE = 1\n")
        code_digest.harness.cache_clear()
        found[name] = code_digest.harness(), code_digest.harness(("attack",))
    code_digest.harness.cache_clear()
    assert found[""] == found["cli/main.py"]
    runs, attacks = zip(*found.values(), strict=True)
    assert len(set(runs)) == 4  # as it was; fit; serial; rng
    assert len(set(attacks)) == 3  # as it was; rng; score


def test_a_digest_is_the_same_for_every_python():
    """Trees of later versions have fields that earlier ones lack, and which are empty where nothing new is used."""
    tree = ast.parse("def f(x: int = 1) -> None:\n    return f'{x}'")
    before = source_text(tree)
    tree.body[0].type_params, tree.body[0]._fields = [], (*tree.body[0]._fields, "type_params")
    assert source_text(tree) == before
    assert before != source_text(ast.parse("def f(x: int = 2) -> None:\n    return f'{x}'"))


def test_a_dry_run_says_which_cells_would_run_again_and_why(fedaudit, quick, tmp_path):
    (tmp_path / "suite.toml").write_text(
        'attacks = ["loss"]\n[base]\nrounds = 1\nclients = 2\nmodel = "mlp"\n[[methods]]\nmethod = "fedavg"'
    )
    (cell,) = audit(tmp_path / "suite.toml", tmp_path / "out")
    words = ("audit", tmp_path / "suite.toml", "--out", tmp_path / "out", "--dry-run")

    def said(*more):
        return " ".join(fedaudit(*words, *more)[1].split())

    assert "again" not in said()
    assert "again: --force" in said("--force")
    changed(cell.folder, "3:another")
    assert "again: fedaudit.methods.fedavg changed" in said()
    assert "again" not in said("--keep-stale")
    assert read_record(cell.folder).status == "done"  # nothing was moved


def test_an_attack_of_other_code_is_attacked_again(kept):
    from fedaudit.attack.attack_run import made
    from fedaudit.runtime.attack_result import NotRun

    folder, record = kept
    cell = Cell(folder, record.setting, ["loss"], ["server"])
    attack = made("loss")[1]
    result = {"attack": "loss", "threat": "server", "settings": attack.model_dump(mode="json"), "ran": False}
    fresh = record.model_copy(update={"attacks": [NotRun(**result, source=source_of(type(attack)))]})
    stale = record.model_copy(update={"attacks": [NotRun(**result, source=f"{SCHEME}:of yesterday")]})
    assert (missing(cell, fresh), stale_attacks(cell, fresh)) == ([], [])
    assert (missing(cell, stale), stale_attacks(cell, stale)) == ([("loss", "server")], ["loss"])
    unknown = record.model_copy(update={"attacks": [NotRun(**result)]})
    assert stale_attacks(cell, unknown) == ["loss"]  # no digest at all: nobody knows what made it
    cell.keep_stale = True
    assert missing(cell, stale) == []


def test_cells_of_an_older_scheme_are_kept_and_the_audit_says_so_once(fedaudit, quick, tmp_path):
    (tmp_path / "suite.toml").write_text(
        'attacks = ["loss"]\n[grid]\nseed = [0, 1]\n[base]\nrounds = 1\nclients = 2\nmodel = "mlp"\n'
        '[[methods]]\nmethod = "fedavg"'
    )
    cells = audit(tmp_path / "suite.toml", tmp_path / "out")
    assert len(cells) == 2
    words = ("audit", tmp_path / "suite.toml", "--out", tmp_path / "out")
    assert "kept (" not in fedaudit(*words, "--dry-run")[1]
    for cell in cells:
        changed(cell.folder, "of an older scheme")
        for name in ("record.json", "attacks.json"):  # and the harness, and the attacks
            path = cell.folder / name
            path.write_text(re.sub(r'("(harness|source)": ?")\d:', r"\1", path.read_text()))
    record = read_record(cells[0].folder)
    assert ":" not in record.harness + record.attacks[0].source
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").glob("*/record.json"))]
    for more in ((), ("--dry-run",)):
        out = " ".join(fedaudit(*words, *more)[1].split())
        assert out.count("kept (2 cells): code recorded by another scheme of digests") == 1
        assert "again:" not in out
    assert before == [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").glob("*/record.json"))]
    assert "again: --force" in fedaudit(*words, "--dry-run", "--force")[1]


def changed(folder, to):
    record = json.loads((folder / "record.json").read_text())
    record["code"]["modules"]["fedaudit.methods.fedavg"] = to
    (folder / "record.json").write_text(json.dumps(record))


def test_compare_does_not_call_runs_of_other_code_the_same(fedaudit, tmp_path):
    for name in "ab":
        run(method="fedavg", rounds=1, clients=2, out=tmp_path / name / "run")
    assert "the same to the bit" in fedaudit("compare", tmp_path / "a", tmp_path / "b")[1]
    changed(tmp_path / "b" / "run", "of an older scheme")
    _, out, _ = fedaudit("compare", tmp_path / "a", tmp_path / "b")
    assert "the same to the bit" in out
    assert "other code" not in out
    assert "code not compared, recorded by two schemes of digests: " in " ".join(out.split())
    changed(tmp_path / "b" / "run", "3:another")
    _, out, _ = fedaudit("compare", tmp_path / "a", tmp_path / "b")
    assert "the same to the bit" not in out
    assert "made by other code: fedaudit.methods.fedavg changed" in out


def test_a_run_does_not_go_on_with_other_code(tmp_path):
    run(method="fedavg", rounds=1, clients=2, out=tmp_path)
    head = json.loads((tmp_path / "checkpoint" / "HEAD.json").read_text())
    head["record"]["code"]["modules"]["fedaudit.methods.fedavg"] = "3:another"
    (tmp_path / "checkpoint" / "HEAD.json").write_text(json.dumps(head))
    with pytest.raises(SettingError, match=r"begun by other code: fedaudit.methods.fedavg changed"):
        run(method="fedavg", rounds=2, clients=2, out=tmp_path, resume=True)


def test_differences_in_words():
    before = {"modules": {"a": "1", "b": "1"}, "values": {"E": "1"}}
    now = {"modules": {"a": "2", "c": "1"}, "values": {"E": "2"}}
    assert differences(before, now) == ["a changed", "b is gone", "c is new", "E was 1, is 2"]
    assert differences(before, before) == []
