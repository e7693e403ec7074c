"""What a newcomer types first: short lists, defaults in the help, files to begin with, and lines of 80 columns."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import reported
from rich.console import Console

from fedaudit.cli import output
from fedaudit.cli.attack_lines import print_attacks
from fedaudit.cli.method_list import listed
from fedaudit.errors import SettingError
from fedaudit.runtime import attack_result
from fedaudit.setting import Setting, nested
from fedaudit.suite.budgets import read_budgets
from fedaudit.suite.suite_file import read_suite

GOLDEN = Path(__file__).parents[1] / "golden"


def narrow(out: str) -> bool:
    return max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("what", ["methods", "attacks", "datasets", "partitions"])
def test_a_list_has_a_line_each(fedaudit, what):
    code, out, _ = fedaudit("list", what)
    assert code == 0
    assert narrow(out)
    assert len(out.splitlines()) < (130 if what == "methods" else 60)  # methods: by family, two lines each
    assert out.splitlines()[-1].endswith(f"fedaudit list {what} NAME")


def test_one_of_a_list_with_all_about_it(fedaudit):
    code, out, _ = fedaudit("list", "methods", "fedavg")
    assert code == 0
    assert "  eta = 0.01\n" in out
    assert "McMahan" in out
    code, _, err = fedaudit("list", "attacks", "los")
    assert (code, "Did you mean 'loss'?" in err) == (2, True)


def test_the_help_shows_every_default(fedaudit, monkeypatch):
    """As a terminal of 80 columns shows it; the only example of a policy is whole."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = fedaudit("run", "--help")
    assert code == 0
    assert narrow(out)
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert "training:eps=8,clip=1" in text
    for name in ("rounds", "clients", "partition", "model", "holdout", "seed"):
        default = Setting.model_fields[name].default
        after = text.partition(f"--{name} ")[2][:160]
        assert f"[default: ({default})]" in after, name


def test_the_help_names_every_command(fedaudit, monkeypatch):
    """As it is at 80 columns, but for the frames and the wrapping, which are those of a version of typer."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = fedaudit("--help")
    assert code == 0
    assert narrow(out)
    words = re.sub(r"[│╭╮╰╯─]", " ", out.partition("Commands")[2])
    plain = re.sub(r"\n {3,}(?=\S)", " ", re.sub(r" +\n", "\n", words)).strip()
    lines = [" ".join(line.split()) for line in plain.splitlines() if line.strip()]
    assert "\n".join(lines) + "\n" == (GOLDEN / "help.txt").read_text()


def test_the_help_of_every_command_fits(fedaudit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = [line.split()[0] for line in (GOLDEN / "help.txt").read_text().splitlines()]
    for word in words:
        code, out, _ = fedaudit(word, "--help")
        assert code == 0
        assert narrow(out), word


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["list"], "methods | attacks | datasets | models | partitions"),
        (["show"], "A run folder"),
        (["audit"], "the quickstart"),
        (["epsilon", "release-path"], "A run folder"),
    ],
)
def test_the_help_says_what_arguments_are(fedaudit, monkeypatch, command, said):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = fedaudit(*command, "--help")
    assert code == 0
    assert said in " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())


def test_lists_as_they_are_printed(fedaudit, monkeypatch):
    """Of some methods: others come and go."""
    some = [one for one in listed("methods") if one.name in ("fedavg", "local", "fedzge", "fke")]
    monkeypatch.setattr("fedaudit.cli.method_list.listed", lambda group: some)
    monkeypatch.setattr("fedaudit.cli.method_list.on_hosts", lambda group: {"dfrd": ["fedavg"]})
    out = "".join(fedaudit("list", what)[1] for what in ("methods", "partitions"))
    assert narrow(out)
    assert out == (GOLDEN / "list.txt").read_text()


# --- lines as they are printed -----------------------------------------------------------------------------------


def results() -> list[attack_result.AnyResult]:
    broken = {"attack": "decoder", "threat": "server", "ran": False, "reason": "no embeddings were sent"}
    given = [
        reported._membership("loss", "server", 0.62, leak=True),
        reported._membership("blind_prior", "server", 0.5, blind=True, leak=None),
        {**reported._reconstruction("inversion", 0.89), "threat": "outsider"},
        reported._histogram(),
        broken,
    ]
    return attack_result.results.validate_python(given)


def test_attacks_are_a_line_each(capsys):
    print_attacks(results(), verbose=False)
    out = capsys.readouterr().out
    assert narrow(out)
    assert out == (GOLDEN / "attack.txt").read_text()
    print_attacks(results(), verbose=True)
    out = capsys.readouterr().out
    assert "decoder, server did not run: no embeddings were sent" in out
    assert "TPR at 1.0% FPR          0.120 [0.110, 0.130]" in out


def test_a_comparison_fits(fedaudit, tmp_path):
    for name, accuracies in (("a", (0.9, 0.91, 0.92)), ("b", (0.8, 0.82, 0.81))):
        for seed, accuracy in enumerate(accuracies):
            reported._save(tmp_path / name, str(seed), reported._record("fedavg", seed, accuracy, releases=True), [])
    code, out, _ = fedaudit("compare", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert narrow(out)
    assert out == (GOLDEN / "compare.txt").read_text()


def test_traffic_fits(capsys, monkeypatch):
    """A line each, nothing cut; buffers only where something has some."""
    monkeypatch.setenv("COLUMNS", "80")
    sent = {"messages": 6, "payload": 230640, "buffers": 0, "wire": 231190}
    rows = [
        {"direction": "down", "field": "Global.(frame)", **sent, "kind": None, "protection": None},
        {"direction": "up", "field": "Local.w", **sent, "kind": "weights", "protection": "none"},
    ]
    output.print_table(rows, "a", total=("payload", "wire"), narrow=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [
        ["a"],
        ["direction", "field", "messages", "payload", "wire", "kind", "protection"],
        ["down", "Global.(frame)", "6", "230.64", "kB", "231.19", "kB"],
        ["up", "Local.w", "6", "230.64", "kB", "231.19", "kB", "weights", "none"],
        ["461.28", "kB", "462.38", "kB"],
    ]
    rows[0]["buffers"] = 8
    output.print_table(rows, "a", narrow=True)
    assert "buffers" in capsys.readouterr().out


def test_a_dry_run_has_a_line_for_each_row_of_the_grid(fedaudit, tmp_path):
    (tmp_path / "s.toml").write_text(
        "attacks = []\n[grid]\nseed = [0, 1, 2]\nprivacy = [{}, { training = { epsilon = 1.0 } }]\n"
        '[[methods]]\nmethod = "fedavg"\n[[methods]]\nmethod = "local"\nprivacy = {}\n'
    )
    code, out, _ = fedaudit("audit", tmp_path / "s.toml", "--dry-run", "--out", tmp_path / "out")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["row", "cells"], ["fedavg", "3"], ["fedavg", "training"], ["local", "3"],
    ]  # fmt: skip
    assert lines[4].startswith("9 cells:")
    assert narrow(out)


def test_progress_without_a_terminal_is_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(output, "EVERY", 0.0)
    with output.progress_bar("audit") as watch:
        watch(1, 4, "1 of 4 cells")
    assert capsys.readouterr().err == "audit:  25% 1 of 4 cells\n"
    clock = iter([0.0, *[100.0] * 4])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress_bar("attacks") as watch:
        watch(1, 4, "loss")
    assert capsys.readouterr().err == "attacks:  25% loss, about 5:00 left\n", "a quarter took 100 s"
    monkeypatch.undo()
    monkeypatch.setattr(output, "EVERY", 10.0)
    with output.progress_bar("audit") as watch:
        watch(2, 4, "2 of 4 cells")
    assert capsys.readouterr().err == "", "what is done in a moment needs no line"


def test_the_time_left_stands_in_lines_of_a_log(capsys, monkeypatch):
    """As whoever tells says, not at the pace of the cells; nothing is made up before anybody can tell."""
    monkeypatch.setattr(output, "EVERY", 0.0)
    with output.progress_bar("audit", remaining=False) as watch:
        watch(1, 4, "1 of 4 cells, fedavg: round 2", None)
        watch(2, 4, "2 of 4 cells, fedavg: round 2", 95.4)
        watch(4, 4, "4 of 4 cells", 0.0)
    assert capsys.readouterr().err.splitlines() == [
        "audit:  25% 1 of 4 cells, fedavg: round 2, estimating",
        "audit:  50% 2 of 4 cells, fedavg: round 2, about 1:35 left",
        "audit: 100% 4 of 4 cells",
    ]


@pytest.mark.parametrize(
    ("left", "said"), [(95.4, "about 1:35 left"), (36000.0, "about 10:00:00 left"), (None, "estimating")]
)
def test_the_time_left_stands_in_a_line_of_80_columns(left, said):
    """Whatever is being done is cut, the time is not."""
    file = io.StringIO()
    console = Console(width=80, file=file, force_terminal=True, color_system=None, legacy_windows=False)
    with output.bar_on(console, "audit", remaining=False) as watch:
        watch(12, 48, "12 of 48 cells, fedavg+dfrd: round 4, host.client_update, 1/3 clients", left)
    lines = [line for line in re.split(r"[\r\n]|\x1b\[[0-9?]*[A-Za-z]", file.getvalue()) if "12 of 48" in line]
    assert lines, "the bar is drawn once more when it is over"
    for line in lines:
        assert len(line) <= 80
        assert line.startswith("audit: 12 of 48 cells, fedavg+dfrd: ro")
        assert line.rstrip().endswith(said)
        assert "0:00:00" in line, "and the time so far"


# --- settings of a part of a method ------------------------------------------------------------------------------


def test_a_dot_reaches_into_a_table():
    assert nested({"host.E": 1, "I": 2, "host.B": 8}) == {"host": {"E": 1, "B": 8}, "I": 2}
    assert nested({"host": {"E": 1}, "host.B": 8}) == {"host": {"E": 1, "B": 8}}
    assert nested({"host.B": 8, "host": {"E": 1}}) == {"host": {"E": 1, "B": 8}}
    with pytest.raises(SettingError, match="host was set to 3 before"):
        nested({"host": 3, "host.E": 1})


# --- files to begin with -----------------------------------------------------------------------------------------


def test_what_init_writes_runs(fedaudit, tmp_path, monkeypatch):
    """The method runs, its own attack finds what it needs, the suite is read, the budgets are kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for what in ("method", "attack", "suite", "tests", "ci"):
        code, out, err = fedaudit("init", what)
        assert code == 0, err
        assert all(Path(line).is_file() for line in out.split())
    assert fedaudit("init", "method")[0] == 2, "nothing is overwritten"
    words = ("--rounds", 1, "--clients", 2, "--set", "E=1", "--out", "run")
    code, _, err = fedaudit("run", "--method", "my_method:Mine", *words)
    assert code == 0, err
    code, out, _ = fedaudit("attack", "run", "--attack", "my_attack:Margin", "--trust")
    assert code == 0
    assert out.startswith("my_attack:Margin  server    AUC ")
    assert len(read_suite("suite.toml").cells()) == 6
    assert [budget.metric for budget in read_budgets("budgets.toml")] == ["bytes", "accuracy"]
    steps = re.findall(r"- run: (fedaudit .*)", Path(".github/workflows/federated.yml").read_text())
    assert steps[-1] == "fedaudit check run --budget budgets.toml --format github"
    assert 'METHOD = "my_method:Mine"' in Path("test_my_method.py").read_text()


def test_the_doctor_finds_what_a_plain_run_needs(fedaudit):
    code, out, _ = fedaudit("doctor")
    assert code == 0
    assert re.search(r"^ok +torch +\d", out, re.MULTILINE)
    assert re.search(r"^ok +data +digits", out, re.MULTILINE)


def test_a_table_of_80_columns_keeps_its_right_edge(monkeypatch, capsys):
    """Long texts beside figures fit when wrapped: no column is so wide that the last one is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    row = {"run": "runs/fedavg of an audit", "budget": "epsilon of all rounds together", "measured": "54.83 kB up",
           "allowed": 60000.5, "kept": "no, 78.4% off, by much", "digest": "d" * 14}  # fmt: skip
    output.print_table([row, row | {"measured": "x" * 8 + " y"}], "budgets.toml")
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) == 80
    assert {line[-1] for line in lines} == {"┓", "┃", "┩", "│", "┘"}
    assert any("dddddddddddddd" in line for line in lines)


def test_columns_share_the_room_by_what_they_lack():
    least, most = {"a": 3, "b": 2, "c": 5}, {"a": 10, "b": 4, "c": 5}
    assert output._widths(least, most, 0) == least
    assert output._widths(least, most, 5) == {"a": 8, "b": 2, "c": 5}
    assert output._widths(least, most, 7) == {"a": 9, "b": 3, "c": 5}
    assert output._widths(least, most, 50) == most
    assert output._widths({}, {}, 9) == {}


def test_a_sum_below_a_table_takes_part_in_its_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    output.print_table([{"n": 9}, {"n": 9}], "t", total=("n",), narrow=True)
    assert capsys.readouterr().out.split() == ["t", "n", "9", "9", "18"]
