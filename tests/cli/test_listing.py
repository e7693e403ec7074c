"""What the first commands say: protections, a delta that is too large, tables, and how to install what is missing."""

from __future__ import annotations

import re
import statistics
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import reported
import unequal

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


# --- runs in which everything differs ---


@pytest.mark.parametrize("name", ["digits-0", "digits-1", "mnist-0"])
def test_show_says_what_the_raw_record_holds(uneven, name, fedaudit):
    """Bytes and seconds are of all rounds; accuracy and its spread of the last and of the chosen one; epsilon, delta
    and noise are of the client that is worst off, which is not the first, and not one that was never asked."""
    told = unequal.raw(uneven, name)
    code, out, _ = fedaudit("show", uneven / "runs" / name)
    assert code == 0
    said = " ".join(out.split())
    for direction in ("up", "down"):
        payload, wire = (unequal.sent(told, direction, kind) / 1000 for kind in ("payload", "wire"))
        assert f"{direction} {payload:.2f} kB payload, {wire:.2f} kB on the wire, all clients and rounds" in said
    seconds = sum(row["wall_s"] for row in told["rounds"])
    assert f"{seconds:.1f} s, peak memory {told['peak_rss_bytes'] / 2**20:.2f} MiB" in said
    for row, words in (
        (told["rounds"][3], "last round (4):"),
        (told["rounds"][1], "round chosen on validation data (2):"),
    ):
        part = said.partition(words)[2]
        test, each = row["utility"]["global"]["test"], row["utility"]["clients"]["global_test"]["each"]
        assert part.startswith(f" global model, common test set {100 * test['accuracy']:.2f} %"), part[:80]
        assert f"[{100 * test['low']:.2f} %, {100 * test['high']:.2f} %], n = {test['n']}" in part
        mean, std = statistics.fmean(each), statistics.pstdev(each)
        assert f"client models, common test set {100 * mean:.2f} % ± {100 * std:.2f} % over clients" in part
    spent = [client for client in told["ledger"] if client["entries"]]
    delta = max(client["delta"] for client in spent)
    assert f"epsilon = {unequal.most_spent(told):.4g} at delta <= {delta:.2g} for the worst client" in said
    least = min(entry["sigma"] for client in spent for entry in client["entries"])
    assert least < spent[0]["entries"][0]["sigma"]
    assert f"training (training): dp-sgd, sigma {least:g}, " in said
    assert "1 answer missing" in said


def test_show_names_each_claim_and_each_attack_with_its_figures(uneven, fedaudit):
    said = " ".join(fedaudit("show", uneven / "runs" / "digits-0")[1].split())
    assert "attack strong by the server: AUC 0.710 [0.670, 0.750], a leak" in said
    assert "attack weak by the outsider: AUC 0.530 [0.490, 0.570], no leak shown" in said
    assert "attack peek by the peer:1 did not run: it sees nothing" in said
    assert "a claim of 3: claimed 3, ledger 3, at least 4.25: refuted (p = 1e-09" in said
    assert "a claim of 5: claimed 5, ledger 5, at least 1.125: not refuted (p = 0.4" in said
    said = " ".join(fedaudit("show", uneven / "runs" / "mnist-0")[1].split())
    assert "a leak" not in said
    assert said.count("refuted") == said.count("not refuted") == 1


def test_what_sends_nothing_shows_no_bytes_and_no_epsilon(uneven, fedaudit):
    said = " ".join(fedaudit("show", uneven / "runs" / "local-0")[1].split())
    assert "up 0 B payload, 0 B on the wire" in said
    assert "nothing computed from private data was released" in said
    assert "epsilon =" not in said


def test_the_table_of_an_audit_has_the_means_of_its_seeds(uneven, fedaudit):
    """Two seeds on digits, one on MNIST: accuracy with Student's interval, the larger epsilon, and the mark of a
    refuted claim on digits alone. Bytes are the mean over seeds of what a client sends when it is asked."""
    lines = fedaudit("show", uneven)[1].splitlines()
    digits, mnist = (
        [line for line in lines if line.startswith("uneven") and mark in line] for mark in ("leak", "0.540")
    )
    told = [unequal.raw(uneven, name) for name in ("digits-0", "digits-1")]
    mean, low, _ = unequal.student([100 * one["rounds"][3]["utility"]["global"]["test"]["accuracy"] for one in told])
    shown, half = re.search(r" ([\d.]+) ±([\d.]+) ", digits[0]).groups()
    assert (float(shown), float(half)) == pytest.approx((mean, mean - low), abs=0.051)
    each = [unequal.sent(one, "up") / unequal.times_asked(one) for one in told]
    assert digits[0].endswith(f" {statistics.fmean(each):.0f} B")
    assert f" !{max(map(unequal.most_spent, told)):g} " in digits[0]
    assert "!" not in mnist[0]
    assert f" {unequal.most_spent(unequal.raw(uneven, 'mnist-0')):g} " in mnist[0]
