"""`fedaudit audit --suite`, `--beside` and `--missing`: what goes together, and what is printed of a method's place."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import fedaudit
from fedaudit.cli.main import app
from fedaudit.cli.method_place import say_place
from fedaudit.suite.beside import Beside
from fedaudit.suite.kept_records import CellFigures, MethodRecords
from fedaudit.suite.suite_file import read_suite, shipped


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "everything"], "everything"),
        (["suite.toml", "--suite", "all"], "--suite all names a suite already"),
        (["--method", "fedavg"], "--method and --beside go together"),
        (["--beside", "all"], "--method and --beside go together"),
        (["suite.toml", "--method", "fedavg", "--beside", "all"], "leave out suite.toml"),
        (["--set", "E=2"], "go with --method and --beside only"),
        (["--missing"], "--missing goes with --suite all"),
        (["--method", "fedavg", "--beside", "quickstart"], "quickstart"),
    ],
)
def test_what_does_not_go_together_is_refused(words, message):
    result = CliRunner().invoke(app, ["audit", *words])
    said = " ".join((result.output + str(result.exception or "")).split())
    assert result.exit_code != 0
    assert message in said


def test_the_place_of_a_method_is_printed_and_drawn(tmp_path, capsys):
    how = {"method": "fedavg", "model": "mlp", "clients": 2, "rounds": 1, "partition": "iid", "set": {"E": 1, "B": 32}}
    fedaudit.run(**how, out=tmp_path / "runs" / "one")
    cell = CellFigures(key="k", partition="iid", seed=0, protection="none", status="done", global_test=0.999)
    kept = {"fedprox": MethodRecords(method="fedprox", cells=(cell,))}
    say_place(Beside(read_suite(shipped("quickstart")), kept, ("feddyn",), True), "fedavg", tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 2 of 2" in said
    assert "kept records of other code: feddyn" in said
    assert "another version of fedaudit's own code" in said
    assert "| fedprox |" in (tmp_path / "beside.md").read_text()
    assert (tmp_path / "beside.png").is_file()
