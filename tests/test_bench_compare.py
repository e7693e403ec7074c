"""Two savings of the benchmarks held against each other: what gates, what does not, and what is said of damage."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("bench_compare", Path(__file__).parents[1] / "benchmarks" / "compare.py")
bench_compare = sys.modules["bench_compare"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_compare)


def save(path: Path, when: str, **benchmarks) -> Path:
    """A saving as pytest-benchmark writes it, in miniature: {name: ratio, or extra_info}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"name": name, "fullname": f"benchmarks/test_x.py::{name}", "stats": {"median": 1.0},
         "extra_info": info if isinstance(info, dict) else {"ratio": info}}
        for name, info in benchmarks.items()
    ]  # fmt: skip
    path.write_text(json.dumps({"datetime": when, "machine_info": {}, "benchmarks": rows}))
    return path


@pytest.fixture
def folder(tmp_path):
    """Three savings of one machine; the middle one is the last by time."""
    here = tmp_path / "Linux-64bit"
    save(here / "0001_a.json", "2026-01-01T00:00:00", wire=1.0, codec=2.0)
    save(here / "0002_b.json", "2026-01-03T00:00:00", wire=1.05, codec=2.3)
    save(here / "0003_c.json", "2026-01-02T00:00:00", wire=1.0, codec=2.2)
    return tmp_path


def call(capsys, *words):
    code = bench_compare.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_latest_two_by_time_are_compared(folder, capsys):
    """codec: 2.3 / 2.2 = 1.045; wire: 1.05. Both below 1.1, and above 1.04."""
    code, out, _ = call(capsys, "--folder", folder)
    assert code == 0
    assert f"A: {folder}/Linux-64bit/0003_c.json\nB: {folder}/Linux-64bit/0002_b.json" in out
    assert "0 of 2 ratios grew by more than a factor of 1.1." in out
    code, out, _ = call(capsys, "--folder", folder, "--threshold", 1.04)
    assert code == 1
    assert out.count("SLOWER") == 2
    assert "1.045" in out


def test_two_named_savings_by_number_name_or_path(folder, capsys):
    """codec: 2.3 / 2.0 = 1.15 fails, wire: 1.05 does not; the other way round codec is 0.87, which is faster."""
    code, out, _ = call(capsys, "0001", "0002_b", "--folder", folder)
    assert code == 1
    codec, wire = out.splitlines()[5:7]
    assert codec.split()[-3:] == ["2.300", "1.150", "SLOWER"]
    assert wire.split()[-3:] == ["1.050", "1.050", "same"]
    here = folder / "Linux-64bit"
    code, out, _ = call(capsys, here / "0002_b.json", here / "0001_a.json")
    assert code == 0
    assert "0.870  faster" in out


def test_what_has_no_ratio_or_no_partner_is_shown_and_does_not_gate(tmp_path, capsys):
    a = save(tmp_path / "a.json", "1", both=1.0, gone=1.0, plain={"note": 3})
    b = save(tmp_path / "b.json", "2", both=1.0, new=9.0, plain={"note": 9})
    code, out, _ = call(capsys, a, b)
    assert code == 0
    verdicts = {line.split()[0].split("::")[-1]: line for line in out.splitlines() if "::" in line}
    assert verdicts["gone"].endswith("only in A")
    assert verdicts["new"].endswith("only in B")
    assert verdicts["plain"].endswith("no ratio, not gated")
    assert "0 of 1 ratios" in out


def test_the_interval_of_a_median():
    """Of 10 pairs, P(Bin(10, 1/2) <= 1) = 11/1024 = 1.1 % and P(<= 2) = 56/1024 = 5.5 %: the second smallest and the
    second largest hold the median with 97.9 %. Of 5, P(<= 0) = 1/32 = 3.1 % is already too much: there is none."""
    assert bench_compare.interval({"ratios": [10, 1, 2, 3, 4, 5, 6, 7, 8, 9]}) == (2, 9)
    assert bench_compare.interval({"ratios": [1, 2, 3, 4, 5]}) is None
    assert bench_compare.interval({}) is None


def test_what_changed_by_more_than_its_noise_is_listed_and_only_that_gates(tmp_path, capsys):
    """Twice the ratio in both: one with intervals apart, [1.0, 1.1] and [2.0, 2.2]; one with intervals that overlap."""
    quiet, loud = [1.0, 1.0, 1.0, 1.1, 1.1, 1.1], [0.5, 0.8, 1.0, 1.0, 1.5, 3.0]
    a = save(tmp_path / "a.json", "1", quiet={"ratio": 1.05, "ratios": quiet}, loud={"ratio": 1.0, "ratios": loud})
    twice = {"quiet": {"ratio": 2.1, "ratios": [2 * r for r in quiet]}, "loud": {"ratio": 2.0, "ratios": loud}}
    code, out, _ = call(capsys, a, save(tmp_path / "b.json", "2", **twice))
    assert code == 1
    verdicts = {line.split()[0].split("::")[-1]: line for line in out.splitlines() if line.startswith("benchmarks/")}
    assert verdicts["quiet"].endswith("SLOWER")
    assert verdicts["loud"].endswith("within noise")
    assert "1 of 2 ratios changed by more than their noise." in out
    assert "::quiet: 1.050 [1.000, 1.100] before, 2.100 [2.000, 2.200] now" in out
    del twice["quiet"]
    code, out, _ = call(capsys, a, save(tmp_path / "c.json", "3", **twice))
    assert code == 0


def test_savings_of_another_machine_are_not_mixed_in(folder, capsys):
    save(folder / "Darwin" / "0009_z.json", "2026-02-01T00:00:00", wire=5.0)
    code, _, err = call(capsys, "--folder", folder)
    assert code == 2
    assert "There is one saving only" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folder", "nowhere"], "There is no saving below nowhere. `make bench` saves one"),
        (["0001", "--folder", "."], "Two savings are compared, not 1"),
        (["0001", "0002", "--folder", "nowhere"], "There is no file 0001, nor a saving of that name below nowhere"),
        (["--threshold", "0.5"], "a factor of at least 1"),
        (["damaged.json", "damaged.json"], "damaged.json cannot be read"),
        (["foreign.json", "foreign.json"], "is no saving of pytest-benchmark"),
        (["empty.json", "empty.json"], "no benchmark with a ratio in common"),
        (["000", "000", "--folder", "several"], "000 fits 2 savings below several"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("damaged.json").write_text("{")
    Path("foreign.json").write_text("[]")
    save(Path("empty.json"), "1", plain={})
    save(Path("several/0001_a.json"), "1", wire=1.0)
    save(Path("several/0002_a.json"), "1", wire=1.0)
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
