"""The brief: what it says of a folder in which the right answers are known, and how it looks on paper."""

from __future__ import annotations

import math
import re

import pytest
import reported
from browser import needed, prints, screen

from fedaudit.reports.brief import certainty, in_words, plain_words, printed
from fedaudit.reports.report import rows_below, write_report

STRICT = {"training": {"epsilon": 1.0, "sensitivity": "clip:1", "delta": 1e-5}}


def strict(record, epsilon):
    """The record with one epsilon and a delta of 1e-5 for all clients."""
    record.ledger = [client.model_copy(update={"delta": 1e-5, "epsilon": epsilon}) for client in record.ledger]
    return record


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The reports' folder, and FedAvg at epsilon = 1, which keeps 80 % and holds."""
    made = reported.write(tmp_path_factory.mktemp("audit"))
    for seed in range(3):
        record = reported._record("fedavg", seed, 0.80, releases=True, privacy=STRICT, epsilon=1.0)
        attacks = [reported._membership("loss", "server", 0.5)]
        reported._save(made, f"fedavg-strict-{seed}", strict(record, 1.0), attacks)
    return made


UNPRINTED = ("fedaudit.reports.brief.printed", lambda path: None)  # a browser prints, for a second


@pytest.fixture(scope="module")
def page(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*UNPRINTED)
        (path,) = write_report(folder, ["brief"], failed={"runs/lost": "it was lost"})
    return path


def words(path):
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", path.read_text(), flags=re.DOTALL))


def test_how_sure_somebody_can_be_by_hand():
    """Two equal chances and a likelihood ratio of e: e / (1 + e) = 73.1 %. Without a guarantee nothing is left."""
    assert certainty(0.0, 0.0) == 0.5
    assert certainty(1.0, 0.0) == pytest.approx(math.e / (1 + math.e))
    assert certainty(1.0, 0.01) == pytest.approx(math.e / (1 + math.e) + 0.01)
    assert certainty(50.0, 0.5) == 1.0


def test_every_question_is_answered_with_the_right_figures(page):
    """Epsilon = 1: at most 74 % sure (73.1 % and delta, rounded up). The loss attack reaches 62 of 100 on FedAvg as it
    is; the decoder's pictures are recognised in 50 of 100; one claim is refuted; one setting does not apply."""
    text = words(page)
    for title in ("What was audited", "Who could attack", "What is guaranteed", "What attacks reached",
                  "What it costs", "Which risk is left", "What was not looked at", "How to check it"):  # fmt: skip
        assert title in text
    assert "cannot be more than 74 % sure whether one given record of one participant was used" in text
    assert "The unit is one record" in text
    assert "the server included" in text
    assert "named the used one in 62 of 100 cases on fedavg by the server" in text
    assert "Guessing names 50." in text
    assert "50 of 100 were recognised, on fedavg." in text
    assert "refuted by measurement for: my_pkg" in text
    assert "a server that sends clients messages of its own" in text
    assert "could not be read, and are not part of this: 1." in text
    assert "applies to nothing that they send: 1." in text
    assert "fedaudit run --method" in text


def test_no_symbol_is_left_unexplained(page):
    text = words(page)
    assert not re.search("[εδ∞≥≤]|AUC|TPR|FPR", text)
    assert "epsilon = 1 (how much a record can change what is seen; smaller is safer)" in text
    assert "delta = 1e-05 (the probability that the bound fails)" in text
    assert plain_words("ε = ∞, δ ≥ 1") == "epsilon = infinity, delta at least 1"


def test_guarantees_that_say_little_are_called_so(folder):
    """The row with noise has an epsilon of 9.4 at delta = 1/n; the refuted one has a claim; local sends nothing."""
    said = {row.label: in_words(row) for row in rows_below(folder)[0] if row.group.method in ("fedavg", "local")}
    assert said["fedavg"] == "none"
    assert said["local"].startswith("sends nothing computed from records")
    strictest = next(text for label, text in said.items() if "ε = 1" in label)
    assert strictest == "nobody can be more than 74 % sure that a record was used (guessing: 50 %)"
    assert next(text for label, text in said.items() if "noise 1x" in label).startswith("in name only")


def test_a_file_of_somebody_elses_is_not_replaced(folder, tmp_path):
    from fedaudit.errors import RunError

    (tmp_path / "brief.html").write_text("<!doctype html><title>My own</title>")
    with pytest.raises(RunError, match="is not a report of fedaudit"):
        write_report(folder, ["brief"], out=tmp_path)


@prints
def test_it_prints_on_two_pages(page):
    pdf = printed(page)
    assert pdf is not None
    assert len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())) == 2


@prints
def test_a_large_audit_prints_on_two_pages_too(tmp_path):
    """Fifteen settings with long names, all of them leaking, half of them protected."""
    for i in range(15):
        policy = {"training": {"epsilon": 1.0 + i, "sensitivity": "clip:1", "delta": 1e-5}} if i % 2 else None
        name = f"somebodys_package.methods.of_last_summer:WithALongName{i}"
        record = reported._record(name, 0, 0.9, releases=True, privacy=policy, epsilon=1.0 + i if i % 2 else None)
        attacks = [reported._membership("loss", "server", 0.7, leak=True, verdict="A leak.")]
        reported._save(tmp_path, str(i), strict(record, 1.0 + i) if i % 2 else record, attacks)
    _, pdf = write_report(tmp_path, ["brief"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())) == 2


@needed
@pytest.mark.parametrize("width", [1400, 794, 390])
def test_nothing_is_clipped_and_everything_can_be_read(page, width, chromium):
    """No text is wider than its box, at any width; every colour of text has a contrast of 7 to 1 with white."""
    screen(chromium, width, 1000)
    chromium.get(page.as_uri())
    wide = chromium.execute_script(
        "return [...document.querySelectorAll('p, h1, h2, td, th, table')].filter(e => e.scrollWidth > "
        "e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.textContent.slice(0, 60))"
    )
    colours = chromium.execute_script(
        "return [...new Set([...document.querySelectorAll('p, h1, h2, td, th')].map(e => getComputedStyle(e).color))]"
    )
    assert wide == []
    assert len(colours) >= 2
    for colour in colours:
        assert contrast([int(n) for n in re.findall(r"\d+", colour)][:3]) >= 7, colour


def contrast(rgb):
    """With white, by the Web Content Accessibility Guidelines."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [
        (1.0, "nobody can be more than 74 % sure that a record was used (guessing: 50 %)"),
        (5.0, "nobody can be more than 99.34 % sure that a record was used (guessing: 50 %); that says little"),
        (12.0, "hardly any: somebody may be all but sure that a record was used"),
    ],
)
def test_a_bound_that_bounds_nothing_is_not_said_in_percent(tmp_path, epsilon, words, monkeypatch):
    """99.34 is e^5 / (1 + e^5) and delta, rounded up; e^12 would be 100.00."""
    record = reported._record("fedavg", 0, 0.8, releases=True, privacy=STRICT, epsilon=epsilon)
    reported._save(tmp_path, "one", strict(record, epsilon), [])
    ((row,), *_) = rows_below(tmp_path)
    assert in_words(row) == words
    monkeypatch.setattr(*UNPRINTED)
    (path,) = write_report(tmp_path, ["brief"])
    assert "100.00 %" not in path.read_text()
    assert ("all but sure" in path.read_text()) == (epsilon == 12.0)


def test_partitions_are_told_in_plain_words():
    assert plain_words("On records split by iid: a.") == "Where all participants hold alike records: a."
    said = plain_words("On records split by dirichlet:0.3: a.")
    assert said == "Where participants hold unlike records (dirichlet:0.3): a."
