"""The brief: two pages of A4 for somebody who decides, in plain words, from the same rows as the report.

It says what was audited, who could attack, what is guaranteed and to whom, what attacks reached against guessing, what
it costs, which risk is left, what was not looked at, and how to check it. Every figure is one of the report's.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from fedaudit.reports import sentences
from fedaudit.reports.answers import EVERYBODY, THREATS, answers, listed, protected, trained, unit_and_observer
from fedaudit.reports.attack_rows import best_attack
from fedaudit.reports.leak_tests import guessed, leak, membership_lift, reconstruction_lift, strongest
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.reports.vocabulary import BY_KEY, text

MOST = 7  # rows of the table: more would not fit the first page
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CERTAIN = "100.00 %"  # rounded up: a bound that bounds nothing
SAYS_LITTLE = 0.95  # a guarantee that lets somebody be surer than this of a record's use says little


@dataclass(frozen=True)
class Line:
    """One setting in the table of the brief."""

    name: str
    accuracy: str
    guarantee: str
    attack: str
    sent: str


@dataclass(frozen=True)
class Section:
    title: str
    sentences: list[str]


def brief(rows: Sequence[SummaryRow], failed: dict[str, str], title: str, facts: str) -> str:
    """Return the page as HTML that prints on two sheets of A4."""
    ran = [row for row in rows if not refused(row.group)]
    shown = chosen(ran)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("brief.html").render(
        title=title.replace("Audit of", "Brief: audit of"),
        facts=facts,
        date=max((run.record.finished or "" for row in ran for run in row.group.runs), default="")[:10],
        lines=[line(row) for row in shown],
        left_out=len(ran) - len(shown),
        first=[audited(ran), attackers(ran), guarantee(ran)],
        second=[reached(ran), costs(ran), risk(ran), not_looked_at(rows, failed), check(ran)],
    )


def chosen(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the rows that a decision is about: the protected first, then the most accurate, in the report's order."""
    order = sorted(rows, key=lambda row: (not (protected(row) and trained(row)), -(row.cells["accuracy"].value or 0.0)))
    kept = {row.label for row in order[:MOST]}
    return [row for row in rows if row.label in kept]


def line(row: SummaryRow) -> Line:
    return Line(
        _name(row), text(BY_KEY["accuracy"], row.cells["accuracy"].value) + (", near chance" if row.untrained else ""),
        in_words(row), _pairs(row), f"{text(BY_KEY['up'], row.cells['up'].value)}",
    )  # fmt: skip


def _name(row: SummaryRow) -> str:
    return plain_words(row.label)


def certainty(epsilon: float, delta: float) -> float:
    """Return how sure somebody can be at most that a record was used, who held both for equally likely before.

    Under (epsilon, delta), what is seen is at most exp(epsilon) times as likely with the record as without it, apart
    from the probability delta. Of two equal chances that leaves exp(epsilon) / (1 + exp(epsilon)), plus delta.
    """
    return min(1.0, 1 / (1 + math.exp(-epsilon)) + delta)


def in_words(row: SummaryRow) -> str:
    """Return a row's guarantee without a symbol."""
    epsilon = row.cells["epsilon"].value
    if row.doubts:
        return "not to be relied on: the run's files were changed, or a check contradicted them"
    if row.refuted:
        return "a claim that measurement refuted"
    if epsilon is None:
        return "none that can be stated as one number"
    if epsilon == 0:
        return "sends nothing computed from records, but publishes its models"
    if row.open_models:
        return "none: models of single participants are published without noise"
    if math.isinf(epsilon):
        return "none"
    if row.weak_delta:
        return "in name only: its failure probability is too large"
    sure = certainty(epsilon, row.delta)
    if _percent(sure) == CERTAIN:
        return "hardly any: somebody may be all but sure that a record was used"
    words = f"nobody can be more than {_percent(sure)} sure that a record was used (guessing: 50 %)"
    return words + ("; that says little" if sure > SAYS_LITTLE else "")


def _percent(share: float) -> str:
    """Return a share in percent, rounded up, so that it still bounds."""
    digits = 0 if share < 0.99 else 2
    return f"{math.ceil(share * 10 ** (2 + digits)) / 10**digits:.{digits}f} %"


def _pairs(row: SummaryRow) -> str:
    """Return the best membership attack's AUC as what it means: how often the used record of a pair is named."""
    value = row.cells["auc"].value
    if value is None:
        return "not attacked"
    return f"{100 * value:.0f} of 100" + (" (more than guessing)" if leak(row) else " (not told from guessing)")


def audited(rows: Sequence[SummaryRow]) -> Section:
    data = sorted({row.group.setting.dataset for row in rows})
    clients = sorted({row.group.setting.clients for row in rows})
    many = f"{clients[0]}" if len(clients) == 1 else f"{clients[0]} to {clients[-1]}"
    seeds = sorted({len(row.group.runs) for row in rows})
    runs = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return Section(
        "What was audited",
        [
            f"{len(rows)} ways of training one model on the records of {many} participants without collecting the "
            f"records, on {', '.join(data)}, {runs} {'run' if runs == '1' else 'runs'} each. Everything that left a "
            "participant was recorded, and attacked afterwards.",
        ],
    )


def _threats(rows: Sequence[SummaryRow]) -> list[str]:
    found = {result.threat.split(":")[0] for row in rows for run in row.group.runs for result in run.record.attacks}
    return [name for name in THREATS if name in found]


def attackers(rows: Sequence[SummaryRow]) -> Section:
    played = [THREATS[name] for name in _threats(rows)]
    words = f"These attackers were played: {'; '.join(played)}." if played else "No attacker was played."
    return Section("Who could attack", [words])


def guarantee(rows: Sequence[SummaryRow]) -> Section:
    covered = [row for row in rows if trained(row) and protected(row)]
    if not covered:
        return Section(
            "What is guaranteed",
            ["Nothing: no setting that learnt anything has a guarantee that holds and was not refuted."],
        )
    best = min(covered, key=lambda row: row.cells["epsilon"].value or 0.0)
    epsilon = best.cells["epsilon"].value or 0.0
    unit, to = unit_and_observer(best)
    who = (
        "whoever sees all messages and the published model, the server included,"
        if to == EVERYBODY
        else to.replace(", ", " and ")
    )
    what, whole = (
        ("one given record of one participant was used", "record, not everything that a participant holds")
        if unit == "record"
        else ("the records of one given person were used", "person, with all records that a participant holds of them")
        if unit == "person"
        else ("one given participant took part", "participant, with all records that it holds")
    )
    sure = _percent(certainty(epsilon, best.delta))
    limit = f"cannot be more than {sure} sure" if sure != CERTAIN else "may still be all but sure"
    lines = [
        f"At best, with {_name(best)}: {who} {limit} whether {what}, if both were "
        f"equally likely before. The unit is one {whole}.",
        f"In the experts' notation that is epsilon = {epsilon:.3g} (how much a record can change what is seen; smaller "
        f"is safer) and delta = {best.delta:.2g} (the probability that the bound fails), over all rounds together.",
    ]
    bare = sum(row.cells["epsilon"].value == math.inf for row in rows)
    if bare:
        lines.append(
            f"{bare} of the {len(rows)} settings guarantee nothing: they send or publish something without noise."
        )
    return Section("What is guaranteed", lines)


def reached(rows: Sequence[SummaryRow]) -> Section:
    """Say what the worst attacks reached, and what guessing reaches."""
    judged = [row for row in rows if row.cells["auc"].value is not None]
    if not judged:
        return Section("What attacks reached", ["No attack was run, so nothing is known."])
    worst = max(judged, key=membership_lift)
    found = strongest(worst.group)
    by = f" by {THREATS.get(found.threat.split(':')[0], found.threat)}" if found else ""
    lines = [
        f"Shown a record that was used and one that was not, the best attack named the used one in "
        f"{100 * (worst.cells['auc'].value or 0.0):.0f} of 100 cases on {_name(worst)}{by}. Guessing names 50.",
    ]
    pictured = [row for row in rows if (row.cells["identified"].value or 0.0) > 0]
    if pictured:
        most = max(pictured, key=reconstruction_lift)
        share = 100 * (most.cells["identified"].value or 0.0)
        rebuilt = best_attack(most.group, "reconstruction", "identification")
        chance = guessed(rebuilt) if rebuilt else None
        guess = f" Guessing recognises {100 * chance:.2g}." if chance is not None else ""
        lines.append(
            f"Of the pictures that an attack rebuilt, {share:.0f} of 100 were recognised, on {_name(most)}.{guess}"
        )
    safe = sum(not leak(row) for row in judged)
    lines.append(
        f"In {safe} of the {len(judged)} settings that were attacked, no attack told used records better than "
        "guessing. That proves nothing: a better attack may."
        if safe
        else f"In all {len(judged)} settings that were attacked, an attack told used records better than guessing."
    )
    return Section("What attacks reached", lines)


def costs(rows: Sequence[SummaryRow]) -> Section:
    (found,) = (answer for answer in answers(rows) if answer.question == "What it costs")
    return Section("What it costs", [plain_words(sentence) for sentence in found.lines])


def risk(rows: Sequence[SummaryRow]) -> Section:
    lines = []
    if leaking := [_name(row) for row in rows if leak(row)]:
        lines.append(f"Records can be told to have been used with: {listed(leaking)}.")
    if refuted := [_name(row) for row in rows if row.refuted]:
        lines.append(f"A claimed guarantee was refuted by measurement for: {listed(refuted)}. Do not rely on it.")
    if doubted := [_name(row) for row in rows if row.doubts]:
        lines.append(
            "Files were changed after the run, or a check contradicted figures, so nothing here may be relied on for: "
            f"{listed(doubted)}."
        )
    weak = [
        row for row in rows if protected(row) and certainty(row.cells["epsilon"].value or 0.0, row.delta) > SAYS_LITTLE
    ]
    if weak:
        lines.append(f"The guarantee is too loose to rely on alone for: {listed([_name(row) for row in weak])}.")
    if open_ := [_name(row) for row in rows if row.open_models or row.cells["epsilon"].value == 0]:
        lines.append(f"Models of single participants are published without protection for: {listed(open_)}.")
    lines.append(
        "What is left in any case: attacks that nobody has thought of, and errors outside of what was audited."
    )
    return Section("Which risk is left", lines)


def not_looked_at(rows: Sequence[SummaryRow], failed: dict[str, str]) -> Section:
    ran = [row for row in rows if not refused(row.group)]
    unplayed = [words for name, words in THREATS.items() if name not in _threats(ran)]
    lines = [f"These attackers were not played: {'; '.join(unplayed)}."] if unplayed else []
    if failed:
        lines.append(f"Runs that failed or could not be read, and are not part of this: {len(failed)}.")
    if idle := len(rows) - len(ran):
        lines.append(f"Settings that were not run, because their protection applies to nothing that they send: {idle}.")
    lines.append(
        "Other data, other models, longer training, participants who set out to harm the training, and whatever else "
        "the machines of participants and server give away (sizes and times of messages, logs, files)."
    )
    return Section("What was not looked at", lines)


def check(rows: Sequence[SummaryRow]) -> Section:
    made = sentences.made(rows[0].group)
    return Section(
        "How to check it",
        [
            "The full report, report.html, lies beside this page with every figure, its interval and its test. "
            f"The command fedaudit show prints a run again, and this one repeats the first: {made['command']}",
            f"Made with {sentences.versions(rows)[0]}.",
        ],
    )


def plain_words(sentence: str) -> str:
    """Return a sentence with symbols spelled out."""
    for symbol, word in (("ε", "epsilon"), ("δ", "delta"), ("∞", "infinity"), ("≥", "at least"), ("≤", "at most")):
        sentence = sentence.replace(symbol, word)
    sentence = sentence.replace("On records split by iid", "Where all participants hold alike records")
    return re.sub(r"On records split by (\S+):", r"Where participants hold unlike records (\1):", sentence)


def printed(page: Path) -> Path | None:
    """Print the page as PDF beside it, with the browser of this machine; None if there is none, or it fails."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        return None
    pdf = page.with_suffix(".pdf")
    with tempfile.TemporaryDirectory() as profile:
        words = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            f"--user-data-dir={profile}", "--no-pdf-header-footer", f"--print-to-pdf={pdf}", page.resolve().as_uri(),
        ]  # fmt: skip
        try:
            subprocess.run(words, capture_output=True, timeout=120, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
    return pdf if pdf.exists() else None
