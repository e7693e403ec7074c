"""What the first commands say: protections, a delta that is too large, tables, and how to install what is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import reported

from fedaudit.cli.listing import ledger_lines, protections, traffic_table
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
