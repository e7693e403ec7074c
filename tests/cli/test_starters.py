"""The test file and the workflow that `fedaudit init` writes, in a fresh folder, as they are."""

from __future__ import annotations

import os
import re
import shlex

import pytest
from inner_session import import_everything

from fedaudit.cli.starters import BUDGETS, CI, begin
from fedaudit.errors import SettingError

pytest_plugins = ["pytester"]
QUIET = ("-q", "-p", "no:cacheprovider", "--strict-markers")


@pytest.fixture(scope="module")
def imported():
    import_everything()


@pytest.fixture
def fresh(imported, pytester, monkeypatch):
    """A fresh folder with the workflow, its budgets, the tests and the method."""
    monkeypatch.chdir(pytester.path)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
    begin("ci", None)
    return pytester


def commands(workflow: str) -> dict[str, list[list[str]]]:
    """The commands of each job that are ours or pytest's, as words."""
    found: dict[str, list[list[str]]] = {}
    job = ""
    for line in re.sub(r"run: >\n\s+", "run: ", workflow).splitlines():
        if named := re.fullmatch(r"  (\w+):", line):
            job = named[1]
        step = re.search(r"- run: ((fedaudit|pytest) .*)", line)
        if step:
            found.setdefault(job, []).append(shlex.split(os.path.expandvars(step[1].replace(" || true", ""))))
        elif found.get(job) and re.match(r"          --", line):
            found[job][-1] += shlex.split(os.path.expandvars(line))
    return found


def test_ci_has_a_job_for_each_and_keeps_what_is_there(fresh):
    assert list(commands(CI)) == ["communication", "privacy", "performance"]
    assert "actions/upload-artifact" in CI
    assert "pull_request.base.sha" in CI
    method = fresh.path / "my_method.py"
    method.write_text("mine = 1\n")
    (fresh.path / "budgets.toml").unlink()
    (fresh.path / ".github" / "workflows" / "federated.yml").unlink()
    begin("ci", None)
    assert method.read_text() == "mine = 1\n"
    assert (fresh.path / "budgets.toml").read_text() == BUDGETS


def test_the_workflow_installs_fedaudit_from_where_its_owner_says():
    """The package is on no index: every job takes it from one place, which stands at the top."""
    installs = re.findall(r"- run: pip install (.*)", CI)
    own = [words for words in installs if "torch " not in words]
    assert len(own) == len(commands(CI))
    assert all(words.endswith('"$FEDAUDIT"') for words in own)
    assert re.search(r"(?m)^  FEDAUDIT: \S+ ", CI)
    assert "github.com" not in CI


@pytest.mark.long
def test_bytes_and_flops_of_the_starter_are_those_of_fedavg(fresh):
    """Without the time, which `--benchmark-disable` leaves out: the exact gates of the test file."""
    fresh.runpytest_inprocess(*QUIET, "-k", "fast", "--benchmark-disable").assert_outcomes(passed=1, deselected=2)


@pytest.mark.slow
def test_every_command_of_the_workflow_passes(fresh, fedaudit):
    """Of the base branch and of the change: the second saving is compared with the first."""
    jobs = commands((fresh.path / ".github" / "workflows" / "federated.yml").read_text())
    for words in jobs["communication"]:
        code, out, err = fedaudit(*words[1:])
        assert code == 0, out + err
    for words in [*jobs["privacy"], *jobs["performance"]]:
        result = fresh.runpytest_inprocess(*QUIET, *words[1:])
        assert result.ret == 0
    result.stdout.fnmatch_lines(["*test_how_fast_it_is (*_base*"])
    assert len(list((fresh.path / ".benchmarks").rglob("*.json"))) == 2


@pytest.mark.slow
def test_the_whole_test_file_passes(fresh):
    fresh.runpytest_inprocess(*QUIET).assert_outcomes(passed=3)


def test_a_starter_that_is_there_already_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin("ci", None)
    for what, file in (("tests", "test_my_method.py"), ("method", "my_method.py")):
        said = (
            f"{file} is there already, as `fedaudit init {what}` or `fedaudit init ci` wrote it, and was not changed. "
            "Use it, or name another file."
        )
        with pytest.raises(SettingError, match=f"^{re.escape(said)}$"):
            begin(what, None)
    begin("suite", None)
    with pytest.raises(
        SettingError, match=r"^suite\.toml is there already, as `fedaudit init suite` wrote it, and was"
    ):
        begin("suite", None)
    (tmp_path / "test_my_method.py").write_text("mine = 1")
    with pytest.raises(SettingError, match=r"^test_my_method\.py exists already and was not changed\. Name another"):
        begin("tests", None)
    assert (tmp_path / "test_my_method.py").read_text() == "mine = 1"
