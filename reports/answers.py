"""The report's first screen: which setting to use, what leaks, what is guaranteed, what it costs, in a few sentences.

A setting is *trained* if it is not near chance, and *protected* if the ledger's epsilon is finite and above 0,
its delta is below 1/n for every client, and no claim of it was refuted. Epsilon is infinite if models are published
that it does not cover.
Nothing here says that a setting leaks nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedaudit.metrics.guarantee import OPEN_MODELS
from fedaudit.reports.attack_rows import best_attack
from fedaudit.reports.leak_tests import leak, rebuilt
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.reports.vocabulary import BY_KEY, interval_text, text

Tone = Literal["good", "bad", "plain"]
THREATS = {
    "server": "the server, which follows the protocol and sees every message",
    "active-server": "a server that sends clients messages of its own",
    "outsider": "an outsider, who sees the published models and the sizes and times of messages",
    "peer": "another client, which sees its own messages",
}
NEITHER = "No setting here is both trained and protected."
NEARLY = 0.02  # accuracy that a stricter guarantee may cost and still be recommended


@dataclass(frozen=True)
class Answer:
    question: str
    lines: list[str]
    tone: Tone = "plain"  # from the view of whoever gave the records


def answers(rows: Sequence[SummaryRow]) -> list[Answer]:
    """Return the four answers over the rows that ran. If data differ, each data set has its own sentences."""
    ran = [row for row in rows if not refused(row.group)]
    arenas = list(dict.fromkeys(row.group.arena for row in ran))
    parts = {arena: [row for row in ran if row.group.arena == arena] for arena in arenas}
    made = []
    for question, answer in (
        ("Which to use", which), ("What leaks", leaks), ("What is guaranteed", guaranteed), ("What it costs", costs),
    ):  # fmt: skip
        lines, tones = [], []
        for arena, of in parts.items():
            found = answer(of)
            tones.append(found.tone)
            where = f"On {arena[0]}, {arena[3]}, {arena[2]} clients: " if len(parts) > 1 else ""
            lines += [f"{where}{line}" for line in found.lines]
        worst: Tone = "bad" if "bad" in tones else "good" if tones and set(tones) == {"good"} else "plain"
        made.append(Answer(question, lines or ["Nothing was run."], worst))
    return made


def protected(row: SummaryRow) -> bool:
    epsilon = row.cells["epsilon"].value
    covered = epsilon is not None and 0 < epsilon < math.inf
    return covered and not row.weak_delta and not row.cells["lower"].flag


def trained(row: SummaryRow) -> bool:
    return row.cells["accuracy"].value is not None and not row.untrained


def which(rows: Sequence[SummaryRow]) -> Answer:
    """Recommend the strictest protected setting that is nearly as accurate as the best protected one.

    Also say what a looser one would give, what a stricter one costs, and what is lost against the best of all."""
    able = [row for row in rows if trained(row)]
    best = max(able, key=_accuracy, default=None)
    if best is None:
        return Answer("", [f"None: every setting is near chance. {NEITHER}"], "bad")
    covered = [row for row in able if protected(row)]
    if not covered:
        return Answer(
            "", [f"{NEITHER} {_named(best)} is the most accurate, {_reached(best)}; it {_covers(best)}."], "bad"
        )
    top = max(covered, key=_accuracy)
    near = [row for row in covered if _accuracy(row) >= _accuracy(top) - NEARLY]
    first = min(near, key=lambda row: (_spent(row), -_accuracy(row)))
    lines = [f"With a guarantee: {_named(first)}, accuracy {_reached(first)} at {_epsilon(first)}."]
    if _spent(first) < _spent(top):
        more = 100 * (_accuracy(top) - _accuracy(first))
        lines[0] += f" ε = {_spent(top):.3g} would give {more:.1f} points more."
    stricter = [row for row in covered if _spent(row) < _spent(first)]
    if stricter:
        least = min(stricter, key=_spent)
        lines[0] += f" Stricter: {_named(least)}, {_reached(least)} at {_epsilon(least)}."
    if best is not first:
        gap = 100 * (_accuracy(best) - _accuracy(first))
        lines.append(f"Without: {_named(best)}, {_reached(best)}, {gap:.1f} points more; it {_covers(best)}.")
    return Answer("", lines, "good")


def _spent(row: SummaryRow) -> float:
    return row.cells["epsilon"].value or 0.0


def leaks(rows: Sequence[SummaryRow]) -> Answer:
    """Name the worst membership attack and the worst reconstruction, and the attacker."""
    lines = []
    judged = [row for row in rows if row.cells["auc"].value is not None]
    shown = [row for row in judged if leak(row)]
    if shown:
        worst = max(shown, key=lambda row: row.cells["auc"].value or 0.0)
        cell = worst.cells["auc"]
        spread = interval_text(BY_KEY["auc"], cell)
        lines.append(
            f"Membership, in {len(shown)} of {len(judged)} settings: at worst AUC {text(BY_KEY['auc'], cell.value)} "
            f"{spread} on {_named(worst)} (accuracy {_reached(worst)}), by {_attacker(worst, 'membership', 'auc')}."
        )
    elif judged:
        lines.append(
            f"No membership attack found more than guessing in the {len(judged)} settings that were attacked. That "
            "proves nothing."
        )
    pictured = [row for row in rows if rebuilt(row)]
    if pictured:
        worst = max(pictured, key=lambda row: row.cells["identified"].value or 0.0)
        share = text(BY_KEY["identified"], worst.cells["identified"].value)
        spread = interval_text(BY_KEY["identified"], worst.cells["identified"])
        lines.append(
            f"Records, in {len(pictured)} of {len(rows)} settings: at worst {share} {spread} of the rebuilt images "
            f"identified on {_named(worst)}, by {_attacker(worst, 'reconstruction', 'identification')}."
        )
    if not lines:
        lines.append("No attack was run, so nothing is known.")
    return Answer("", lines, "bad" if shown or pictured else "plain")


def guaranteed(rows: Sequence[SummaryRow]) -> Answer:
    """Name the smallest epsilon of a trained setting, and what is open, refuted, or guaranteed in name only."""
    lines = []
    covered = [row for row in rows if trained(row) and protected(row)]
    if covered:
        least = min(covered, key=lambda row: row.cells["epsilon"].value or 0.0)
        relation = f" ({least.relation})" if least.relation else ""
        lines.append(
            f"At best {_epsilon(least)}, for one record of any client{relation}, all rounds together: {_named(least)}, "
            f"accuracy {_reached(least)}. {len(covered)} of {len(rows)} have a finite epsilon and beat chance."
        )
    else:
        lines.append(f"No useful guarantee. {NEITHER}")
    bare = [row for row in rows if row.cells["epsilon"].value == math.inf and not row.open_models]
    if bare:
        lines.append(f"No guarantee at all in {len(bare)} (ε = ∞): something is sent without noise.")
    if weak := [row for row in rows if row.weak_delta]:
        lines.append(f"In name only in {len(weak)}: δ ≥ 1/n, which publishing one record at random would meet, too.")
    if apart := [row for row in rows if row.open_models]:
        lines.append(f"For the messages alone in {len(apart)} (ε = ∞): {OPEN_MODELS}.")
    if wrong := [_named(row) for row in rows if row.cells["lower"].flag]:
        lines.append(f"Refuted by measurement: {', '.join(wrong)}.")
    return Answer("", lines, "good" if covered and not wrong else "bad")


def costs(rows: Sequence[SummaryRow]) -> Answer:
    able = [row for row in rows if trained(row) and row.cells["up"].value is not None] or list(rows)
    sending = [row for row in able if (row.cells["up"].value or 0.0) > 0]
    if not sending:
        return Answer("", ["Nothing is sent."])
    least, most = (pick(sending, key=lambda row: row.cells["up"].value or 0.0) for pick in (min, max))
    line = f"From {_bill(least)} to {_bill(most)}." if most is not least else f"{_bill(least)}."
    noisy = [row for row in able if protected(row)]
    plain = {row.group.method: row for row in able if not row.group.setting.privacy}
    ratios = [
        (row.cells["seconds"].value or 0.0) / (plain[row.group.method].cells["seconds"].value or math.inf)
        for row in noisy
        if row.group.method in plain
    ]
    ratios = [ratio for ratio in ratios if ratio > 0]
    if ratios:
        line += (
            f" Protection took {min(ratios):.1f} to {max(ratios):.1f} times the compute of the same method without it."
        )
    return Answer("", [line])


# --- words -------------------------------------------------------------------------------------------------------


def _accuracy(row: SummaryRow) -> float:
    return row.cells["accuracy"].value or 0.0


def _named(row: SummaryRow) -> str:
    return row.label


def _reached(row: SummaryRow) -> str:
    cell = row.cells["accuracy"]
    spread = interval_text(BY_KEY["accuracy"], cell)
    return " ".join(part for part in (text(BY_KEY["accuracy"], cell.value), spread) if part)


def _epsilon(row: SummaryRow) -> str:
    return f"ε = {text(BY_KEY['epsilon'], row.cells['epsilon'].value)}, δ = {row.delta:.2g}"


def _covers(row: SummaryRow) -> str:
    epsilon = row.cells["epsilon"].value
    if epsilon is None:
        return "has a guarantee that cannot be composed"
    if epsilon == 0:
        return "sends nothing computed from its records, but publishes its models"
    if row.open_models:
        return f"guarantees nothing, as its clients' models are published (the messages alone: {row.messages})"
    if math.isinf(epsilon):
        return "guarantees nothing"
    if row.cells["lower"].flag:
        return "has a claim that is refuted"
    return f"guarantees {_epsilon(row)}" + (", with δ ≥ 1/n" if row.weak_delta else "")


def _attacker(row: SummaryRow, claims: str, measure: str) -> str:
    best = best_attack(row.group, claims, measure)
    return f"the {best.threat} ({best.attack})" if best else "nobody"


def _bill(row: SummaryRow) -> str:
    up, down, seconds = (row.cells[key] for key in ("up", "down", "seconds"))
    sent = f"{text(BY_KEY['up'], up.value)} up and {text(BY_KEY['down'], down.value)} down a client and round"
    return f"{sent}, {text(BY_KEY['seconds'], seconds.value)} of {seconds.detail or 'compute'} a run ({_named(row)})"


# --- what the page is about --------------------------------------------------------------------------------------


def scope(rows: Sequence[SummaryRow]) -> dict[str, str]:
    """Return date, purpose, threat models and scope, for the head of the page and the first printed sheet."""
    finished = max((run.record.finished or "" for row in rows for run in row.group.runs), default="")
    threats = sorted({result.threat for row in rows for run in row.group.runs for result in run.record.attacks})
    named = dict.fromkeys(THREATS.get(name.split(":")[0], name) for name in threats)
    attacks = {result.attack for row in rows for run in row.group.runs for result in run.record.attacks if result.ran}
    seeds = sorted({len(row.group.runs) for row in rows})
    many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return {
        "Date": f"last run finished {finished[:10]}" if finished else "no run is finished",
        "Purpose": "what these federated methods reach, give away, guarantee and cost, measured on the same data",
        "Threat models": "; ".join(named) or "none: nothing was attacked",
        "Scope": f"{len(attacks)} attacks, {many} {'seed' if many == '1' else 'seeds'} a setting; other data, models "
        "and attacks may give another picture",
    }
