"""Malformed command lines and files: one clear error and exit code 2, no traceback, no work without end."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys
import time

import pytest

from fedaudit.cli.output import chosen_clients
from fedaudit.errors import FedauditError, SettingError, ThreatError
from fedaudit.setting import Setting, out_of_bounds, parse_value, read_toml
from fedaudit.suite.budgets import parse_budgets
from fedaudit.wire.transcript import Threat

DIGITS = "9" * 5000
DEEP = "[" * 100_000
ONE_RUN = ("epsilon", "one-run", "--canaries")
CALIBRATE = ("privacy", "calibrate", "--delta", "1e-5", "--epsilon")


@pytest.mark.parametrize(
    "words",
    [
        ("comm", "fedavg", "--rounds", "0"),
        ("comm", "fedavg", "--rounds", "1" + "0" * 400),
        ("comm", "fedavg", "--rounds", "1e400"),
        ("comm", "fedavg", "--clients", "10000000000"),
        ("comm", "fedavg", "--rounds", "1", "--set", f"E={DIGITS}"),
        ("comm", "fedavg", "--rounds", "1", "--set", f"E={DEEP}"),
        ("comm", "fedavg", "--rounds", "1", "--set", "E=0x" + "f" * 5000),
        ("comm", "fedavg", "--rounds", "1", "--model", "resnet18:1000000000000"),
        ("comm", "fedavg", "--rounds", "1", "--model", f"resnet18:{DIGITS}"),
        (*ONE_RUN, "1000000000000", "--correct", "1"),
        (*ONE_RUN, DIGITS, "--correct", "1"),
        (*CALIBRATE, "1e308"),
        (*CALIBRATE, "inf"),
        (*CALIBRATE, "nan"),
        ("privacy", "compose", "--noise-multiplier", "1", "--delta", "1e-5", "--releases", "1000000000000"),
        ("run", "--rounds", DIGITS),
        ("run", "--rounds", "1000000000000"),
        ("run", "--start", DEEP),
        ("run", "--privacy", "embeddings:eps=1e308,clip=1"),
        ("run", "--privacy", f"embeddings:eps={DIGITS},clip=1"),
        ("run", "--privacy", f"embeddings:eps={DEEP},clip=1"),
        ("run", "--dataset", "folder:a\0b"),
        ("run", "--out", "a\0b"),
        ("show", "a\0b"),
        ("report", ".", "--format", ""),
        ("report", ".", "--format", ",,"),
        ("audit", "--jobs", "1000000000"),
    ],
)
def test_a_malformed_command_is_one_error(fedaudit, words):
    code, _, err = fedaudit(*words)
    assert code == 2
    assert err
    assert "Traceback" not in err


@pytest.mark.parametrize("k", ["²", "٣", "-1", "", DIGITS, "1e3"])
def test_who_is_no_client(k):
    with pytest.raises(ThreatError):
        Threat.parse(f"peer:{k}")
    with pytest.raises(SettingError):
        chosen_clients(k)


@pytest.mark.parametrize(
    "text",
    [
        f"rounds = {DIGITS}",
        f"rounds = {DEEP}",
        "rounds = 0x" + "f" * 5000,
        'dataset = "folder:\\u0000"',
        "rounds = \xff",
    ],
)
def test_a_malformed_file_is_one_error(tmp_path, text):
    (tmp_path / "a.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingError):
        read_toml(tmp_path / "a.toml")


def test_a_setting_has_bounds_however_it_comes():
    deep: list = []
    for _ in range(40):
        deep = [deep]
    wrong = [{"rounds": 10**7}, {"seed": 1 << 63}, {"set": {"E": 1 << 70}}, {"set": {"a": deep}}, {"model": "c\0nn"},
             {"dataset": "\udc80"}, {"model": "x" * 5000}, {"privacy": {"embeddings": {"epsilon": 1e308}}},
             {"privacy": {"embeddings": {"epsilon": float("nan")}}}]  # fmt: skip
    for values in wrong:
        with pytest.raises(SettingError):
            Setting.make(**values)
    assert out_of_bounds({"E": 5, "eta": [0.1, {"deep": ("x", None)}]}) is None


@pytest.mark.parametrize("key", ["cls", "self", "values", "setting"])
def test_no_key_of_a_file_is_an_argument_of_ours(fedaudit, tmp_path, key):
    """Found by the fuzzer: `cls = 1` was taken for the class."""
    (tmp_path / "file.toml").write_text(f"{key} = 1")
    code, _, err = fedaudit("run", tmp_path / "file.toml", "--out", tmp_path / "out")
    assert (code, "Unknown setting" in err) == (2, True)


def test_a_value_of_usual_length_is_read_as_ever():
    assert parse_value("5") == 5
    assert parse_value("[1, [2]]") == [1, [2]]
    assert parse_value("a.b:C") == "a.b:C"


@pytest.mark.parametrize(
    "budget",
    [
        {"max": float("nan")},
        {"max": -1.0},
        {"max": float("inf")},
        {"max": "9" * 400 + " TB"},
        {"metric": "accuracy", "min": float("nan")},
        {"metric": "accuracy", "min": -0.5},
        {"baseline": "a.json", "max_growth": "nan %"},
        {"baseline": "a.json", "max_growth": "-5 %"},
    ],
)
def test_a_budget_is_a_finite_number_from_0_up(budget):
    with pytest.raises(FedauditError, match="is not a limit"):
        parse_budgets([budget], "budgets.toml")


def test_a_budget_of_0_is_one():
    assert parse_budgets([{"max": 0.0}], "budgets.toml")[0].limit() == 0


@pytest.mark.slow  # a process of its own; what follows an interrupt is tried here below
def test_ctrl_c_says_how_to_go_on(tmp_path):
    out = tmp_path / "my run"
    words = [sys.executable, "-m", "fedaudit", "run", "--rounds", "10000", "--clients", "2", "--out", str(out)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    until = time.monotonic() + 120
    while not (out / "record.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    err = None
    for _ in range(6):  # on a busy machine one did not stop it: one presses again
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, err = process.communicate(timeout=20)
            break
    assert err is not None, "it goes on"
    assert process.returncode == 130
    assert f"fedaudit run --out '{out}' --resume" in err
    assert "Traceback" not in err


def test_ctrl_c_elsewhere_is_told_too(fedaudit, monkeypatch, tmp_path):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedaudit.runtime.run_record.read_record", stopped)
    code, _, err = fedaudit("show", tmp_path)
    assert (code, err.startswith("stopped")) == (130, True)


# --- reports -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_no_cell_of_a_csv_file_is_a_formula(start):
    from fedaudit.reports.formats import _cell

    buffer = io.StringIO()
    csv.writer(buffer).writerow([_cell(f'{start}HYPERLINK("x")')])
    assert next(csv.reader(io.StringIO(buffer.getvalue()))) == [f'\'{start}HYPERLINK("x")']
    assert _cell("fedavg") == "fedavg"


def test_a_class_named_like_a_formula_is_drawn_as_it_is(tmp_path):
    import numpy as np

    from fedaudit.data.plot import bubbles

    bubbles(np.array([[1, 2], [3, 4]]), tmp_path / "a.svg", title=r"$\frac{$ of $x$", class_names=[r"$\frac{$", "b"])
    assert (tmp_path / "a.svg").stat().st_size


def test_the_line_of_facts_is_escaped(tmp_path):
    import reported

    from fedaudit.reports.formats import markdown
    from fedaudit.reports.runs import grouped, read_runs
    from fedaudit.reports.summary_rows import rows_of

    rows = rows_of(grouped(read_runs(reported.write(tmp_path))[0]))
    text = markdown(rows, {}, "a | b", "folder:<b>x</b> · *y*")
    assert "\\<b>x" in text
    assert "\\*y\\*" in text
    assert "# a \\| b" in text
