"""What the first commands say: protections, a delta that is too large, tables, and how to install what is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import reported

from fedaudit.cli.listing import ledger_lines, protections, summary, traffic_table
from fedaudit.cli.output import print_table
from fedaudit.extras import EXTRAS, install
from fedaudit.wire.release import Sent

DP = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}


def test_install_hints_name_what_pyproject_asks_for():
    """The package itself, with the version: it works in a checkout, too, where `fedaudit[ray]` is nowhere to be had."""
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = {*about["dependencies"], *(one for of in about["optional-dependencies"].values() for one in of)}
    assert set(EXTRAS.values()) <= asked
    assert install("ray") == 'pip install "ray>=2.40"'
    assert any(one.startswith("opacus") for one in about["dependencies"]), "privacy is the point"
    assert about["optional-dependencies"]["dp"] == []


@pytest.mark.parametrize(("delta", "warned"), [(0.04, True), (0.039, False), (0.1, True)])
def test_a_delta_of_one_in_n_or_more_is_warned_of(delta, warned):
    """25 records a client: 1/n is 0.04."""
    record = reported._record("fedavg", 0, 0.9, releases=True, privacy=DP, epsilon=8.0)
    record.ledger = [client.model_copy(update={"delta": delta}) for client in record.ledger]
    said = " ".join(ledger_lines(record))
    assert ("is 1/n or more for 2 of 2 clients (n = 25)" in said) is warned
    assert ("such as delta=4e-03" in said) is warned


@pytest.mark.parametrize(
    ("device", "how", "notes", "said"),
    [
        ("x86_64 CPU", {"step": "compiled", "precision": "tf32"}, [], "engine serial, eager steps, float32"),
        ("NVIDIA H200", {"engine": "stacked"}, [], "engine stacked, recorded steps, float32"),
        ("NVIDIA H200", {"step": "compiled", "precision": "tf32"}, [], "engine stacked, compiled steps, tf32"),
        (
            "NVIDIA H200",
            {"engine": "serial", "step": "eager", "precision": "bf16"},
            ["not stacked: train: dropout", "steps not recorded: dropout", "something else"],
            "engine serial, eager steps, bf16; slower than that in 2 respects: see the notes",
        ),
    ],
)
def test_a_run_says_how_it_was_carried_out(device, how, notes, said):
    """Steps are recorded and compiled on a GPU only, and only there is there TF32."""
    record = reported._record("fedavg", 0, 0.9)
    record.device, record.setting, record.notes = device, record.setting.model_copy(update=how), notes
    assert f"  {said}" in summary(record)


def test_a_run_says_who_shared_its_time():
    record = reported._record("fedavg", 0, 0.9)
    for row in record.rounds:
        row.wall_s, row.share_s = 9.0, 3.0
    rounds = len(record.rounds)
    assert any(line.startswith(f"  {9 * rounds:.1f} s, peak") for line in summary(record))
    record.beside = [1, 2]
    words = f"  {9 * rounds:.1f} s beside seeds 1, 2, {3 * rounds:.1f} s of them its own, peak"
    assert any(line.startswith(words) for line in summary(record))


def test_the_transcript_says_that_weights_come_from_private_training():
    """Weights carry no noise of their own. After DP-SGD that is no lack of protection, and without it it is."""
    sent = {"w": Sent(role="private", kind="weights", wire=10, payload=8)}
    entry = SimpleNamespace(
        seq=1, readable=True, fields=sent, message="Local", direction="up", client=0, round=1, row={"frame": 2}
    )
    view = SimpleNamespace(entries=lambda: [entry])
    for privacy, epsilon, said in ((DP, 8.0, "post-processing of DP-SGD"), (None, None, "none")):
        record = reported._record("fedavg", 0, 0.9, releases=True, privacy=privacy, epsilon=epsilon)
        rows = {row["field"]: row for row in traffic_table(view, "field", protections(record))}
        assert rows["Local.w"]["protection"] == said


WIDE = {
    "claim": "training, all rounds together", "ledger": 8.0, "verdict": "suspicious", "measured": 31.6,
    "confidence": 0.95, "neighbouring": "replace-one", "trials": 1000, "test": "gradient canaries", "p": 0.0123,
    "ceiling": 503000.0,
}  # fmt: skip


@pytest.mark.parametrize("columns", [4, 7, 10])
def test_no_table_breaks_a_word_at_80_columns(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = dict(list(WIDE.items())[:columns])
    print_table([row, row], "audits")
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    for key, value in row.items():
        named = [] if columns > 4 and key == "claim" else [key]  # a paragraph begins with the first figure itself
        words = [*named, *(value.split() if isinstance(value, str) else [f"{value:.4g}" if value != 1000 else "1000"])]
        assert all(word in out for word in words), (words, out)
