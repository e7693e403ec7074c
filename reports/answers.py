"""The report's first screen: which setting to use, what leaks, what is guaranteed, what it costs, in a few sentences.

A setting is *trained* if it is not near chance, and *protected* if the ledger's epsilon is finite and above 0,
its delta is below 1/n for every client, and no claim of it was refuted. Epsilon is infinite if models are published
that it does not cover. A setting whose files were changed, or that a check contradicted, is named first and recommended
nowhere. Settings are compared at an equal guarantee. Of those that no test tells apart, the simpler or
cheaper one is named. Leaks are ranked by what they are above guessing and above an attacker who sees nothing. Nothing
here says that a setting leaks nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedaudit.metrics.guarantee import OPEN_MODELS
from fedaudit.reports.attack_rows import Found, best_attack
from fedaudit.reports.leak_tests import (
    beside,
    blind_auc,
    leak,
    membership_lift,
    rebuilt,
    reconstruction_lift,
    strongest,
)
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.reports.tests_over_seeds import compared
from fedaudit.reports.vocabulary import BY_KEY, interval_text, text
from fedaudit.setting import Setting

Tone = Literal["good", "bad", "plain"]
THREATS = {
    "server": "the server, which follows the protocol and sees every message",
    "active-server": "a server that sends clients messages of its own",
    "outsider": "an outsider, who sees the published models and the sizes and times of messages",
    "peer": "another client, which sees its own messages",
}
NEITHER = "No setting here is both trained and protected."
DOUBTS = "What cannot be relied on"
NEARLY = 0.02  # accuracy that a stricter guarantee, or a cheaper setting, may cost and still be recommended
ALIKE = 1.05  # guarantees whose epsilons are at most this factor apart count as equal
DEARER = 1.2  # a setting that takes this many times the compute of an equal one is named as dearer
EVERYBODY = "everybody"  # against whom noise holds that participants add themselves


@dataclass(frozen=True)
class Part:
    """The sentences on the settings that ran on the same records; `where` is empty if all did."""

    where: str
    lines: list[str]


@dataclass(frozen=True)
class Answer:
    question: str
    lines: list[str]  # each part's first sentence says where
    tone: Tone = "plain"  # from the view of whoever gave the records
    parts: tuple[Part, ...] = ()


def answers(rows: Sequence[SummaryRow]) -> list[Answer]:
    """Return the four answers over the rows that ran. If data differ, each data set has its own sentences.

    If some rows cannot be relied on, one more answer before the others says which and why. The others leave them out.
    """
    every = [row for row in rows if not refused(row.group)]
    ran = [row for row in every if not row.doubts]
    arenas = list(dict.fromkeys(row.group.arena for row in ran))
    named = dict(zip(arenas, _places([row.group.setting for row in _firsts(ran, arenas)]), strict=True))
    doubted = len(ran) < len(every)
    made = [_doubted(every)] if doubted else []
    nothing = "No run here can be relied on." if doubted else "Nothing was run."
    apart = _by_arena(ran, arenas)
    for question, answer in (
        ("Which to use", which), ("What leaks", leaks), ("What is guaranteed", guaranteed), ("What it costs", costs),
    ):  # fmt: skip
        found = [answer(of) for of in apart]
        if answer is which:
            found = [_with_failures(one, of) for one, of in zip(found, apart, strict=True)]
        parts = tuple(Part(named[arena], one.lines) for arena, one in zip(arenas, found, strict=True))
        tones = {one.tone for one in found}
        worst: Tone = "bad" if "bad" in tones else "good" if tones == {"good"} else "plain"
        lines = [line for part in parts for line in _said(part)]
        made.append(Answer(question, lines or [nothing], "bad" if doubted and not lines else worst, parts))
    return made


def _doubted(rows: Sequence[SummaryRow]) -> Answer:
    """Name the rows that cannot be relied on, and why. The other answers leave them out."""
    lines = [f"{_named(row)}: {'; '.join(row.doubts)}." for row in rows if row.doubts]
    lines.append("The answers below leave this out. `fedaudit verify` names each file and figure.")
    return Answer(DOUBTS, lines, "bad", (Part("", lines),))


def _with_failures(answer: Answer, rows: Sequence[SummaryRow]) -> Answer:
    """Return the answer with a sentence about rows whose clients failed, if there are any."""
    fallen = [_named(row) for row in rows if row.clients_failed]
    if not fallen:
        return answer
    said = f"Clients failed in {listed(fallen)}: the figures there are of those left. The notes say why."
    return replace(answer, lines=[*answer.lines, said])


def listed(labels: Sequence[str], most: int = 4) -> str:
    """Return labels in one line: the first ones, and how many more there are."""
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return "; ".join(labels[:most]) + more


def _by_arena(rows: Sequence[SummaryRow], arenas: Sequence[tuple[Any, ...]]) -> list[list[SummaryRow]]:
    return [[row for row in rows if row.group.arena == arena] for arena in arenas]


def _firsts(rows: Sequence[SummaryRow], arenas: Sequence[tuple[Any, ...]]) -> list[SummaryRow]:
    return [next(row for row in rows if row.group.arena == arena) for arena in arenas]


def _places(settings: Sequence[Setting]) -> list[str]:
    """Return in which each setting's records differ from the others'; all there is to say if that tells none apart."""
    if len(settings) < 2:
        return [""] * len(settings)
    whole = [(one.dataset, f"records split by {one.partition}", f"{one.clients} clients") for one in settings]
    differ = [i for i in range(3) if len({words[i] for words in whole}) > 1]
    short = [", ".join(words[i] for i in differ) for words in whole]
    return short if len(set(short)) == len(short) else [", ".join(words) for words in whole]


def _said(part: Part) -> list[str]:
    """Return a part's sentences for a page without headings: the first one says where."""
    return [f"On {part.where}: {line}" if part.where and i == 0 else line for i, line in enumerate(part.lines)]


def protected(row: SummaryRow) -> bool:
    epsilon = row.cells["epsilon"].value
    covered = epsilon is not None and 0 < epsilon < math.inf
    return covered and not row.weak_delta and not row.refuted and not row.doubts


def trained(row: SummaryRow) -> bool:
    return row.cells["accuracy"].value is not None and not row.untrained


def which(rows: Sequence[SummaryRow]) -> Answer:
    """Recommend the strictest protected setting that is nearly as accurate as the best protected one, with its cost.

    Also say what a looser one would give, what a stricter one costs, which equal one is dearer, and what is lost
    against the best without a guarantee. Guarantees of other units (records, clients) have a sentence each."""
    able = [row for row in rows if trained(row)]
    if not able:
        return Answer("", [f"None: every setting is near chance. {NEITHER}"], "bad")
    covered = [row for row in able if protected(row)]
    if not covered:
        best = cheapest_equal(able, max(able, key=_accuracy))
        words = (
            f"{NEITHER} {_named(best)} is the most accurate, {_reached(best)}; it {_covers(best)}. {_its_cost(best)}"
        )
        return Answer("", [words + _dearer(best, able)], "bad")
    lines, named = [], []
    for terms in dict.fromkeys(unit_and_observer(row) for row in covered):
        alike = [row for row in covered if unit_and_observer(row) == terms]
        first = _strictest(alike)
        named.append(first)
        unit = "" if terms[0] == "record" else f" for whole {terms[0]}s"
        lines.append(f"With a guarantee{unit}: {_with_guarantee(first, alike)}")
    bare = [row for row in able if not protected(row)]
    if bare:
        first, top = max(named, key=_accuracy), cheapest_equal(bare, max(bare, key=_accuracy))
        gap = 100 * (_accuracy(top) - _accuracy(first))
        if gap > 0:
            told = ", which no test tells" if _not_told(top, first) else ""
            lines.append(
                f"Without: {_named(top)}, {_reached(top)}, {gap:.1f} points more{told}; it {_covers(top)}."
                f"{_dearer(top, bare)}"
            )
    return Answer("", lines, "good")


def _strictest(covered: Sequence[SummaryRow]) -> SummaryRow:
    top = max(covered, key=_accuracy)
    near = [row for row in covered if _accuracy(row) >= _accuracy(top) - NEARLY]
    first = min(near, key=lambda row: (_spent(row), -_accuracy(row)))
    same = [row for row in covered if equal_guarantee(row, first)]
    return cheapest_equal(same, max(same, key=_accuracy))


def _with_guarantee(first: SummaryRow, covered: Sequence[SummaryRow]) -> str:
    line = f"{_named(first)}, accuracy {_reached(first)} at {_epsilon(first)}. {_its_cost(first)}"
    line += _dearer(first, [row for row in covered if equal_guarantee(row, first)])
    others = [row for row in covered if not equal_guarantee(row, first)]
    looser = [row for row in others if _spent(row) > _spent(first) and _accuracy(row) > _accuracy(first)]
    if looser:
        top = max(looser, key=_accuracy)
        line += f" ε = {_spent(top):.3g} would give {100 * (_accuracy(top) - _accuracy(first)):.1f} points more."
    if stricter := [row for row in others if _spent(row) < _spent(first)]:
        least = min(stricter, key=_spent)
        best = cheapest_equal(
            same := [row for row in stricter if equal_guarantee(row, least)], max(same, key=_accuracy)
        )
        line += f" Stricter: {_named(best)}, {_reached(best)} at {_epsilon(best)}."
    return line


def equal_guarantee(a: SummaryRow, b: SummaryRow) -> bool:
    """Say if two protected settings guarantee the same: one unit, one observer, and nearly one epsilon."""
    low, high = sorted((_spent(a), _spent(b)))
    return unit_and_observer(a) == unit_and_observer(b) and high <= ALIKE * low


def cheapest_equal(rows: Sequence[SummaryRow], top: SummaryRow) -> SummaryRow:
    """Return the one to name among the rows that are not told from the most accurate one: whose method has no part that
    changes nothing, the simpler one, then the one with the least compute, then with the fewest bytes.

    Rows whose clients failed come after all others: what is missing there makes them cheap."""
    return min((row for row in rows if row is top or _not_told(row, top)), key=_effort)


def _not_told(row: SummaryRow, top: SummaryRow) -> bool:
    """Say if two accuracies are near each other and no test over seeds tells them apart."""
    test = compared(row.cells["accuracy"].each, top.cells["accuracy"].each)
    return abs(_accuracy(row) - _accuracy(top)) <= NEARLY and not test.more_than_noise


def _effort(row: SummaryRow) -> tuple[bool, int, int, float, float]:
    seconds, sent = row.cells["seconds"].value, row.cells["up"].value
    return (
        row.clients_failed, len(row.idle), row.group.method.count("+"), math.inf if seconds is None else seconds,
        math.inf if sent is None else sent,
    )  # fmt: skip


def _dearer(first: SummaryRow, rows: Sequence[SummaryRow]) -> str:
    """Name the dearest setting of those that are not told from the first, if it takes clearly more compute."""
    own = first.cells["seconds"].value
    equal = [row for row in rows if row is not first and _not_told(row, first) and row.cells["seconds"].value]
    if not own or not equal:
        return ""
    most = max(equal, key=lambda row: row.cells["seconds"].value or 0.0)
    times = (most.cells["seconds"].value or 0.0) / own
    return f" {_named(most)} cannot be told from it and takes {times:.1f} times the compute." if times >= DEARER else ""


def unit_and_observer(row: SummaryRow) -> tuple[str, str]:
    """Return what the noise of a row protects (record or client), and against whom it holds."""
    noisy = [
        entry
        for run in row.group.runs
        for client in run.record.ledger
        for entry in client.entries
        if 0 < entry.noise_multiplier < math.inf
    ]
    units = sorted({str(entry.unit or "record") for entry in noisy}) or ["record"]
    return units[-1], ", ".join(sorted({str(entry.to or EVERYBODY) for entry in noisy})) or EVERYBODY


def _spent(row: SummaryRow) -> float:
    return row.cells["epsilon"].value or 0.0


def leaks(rows: Sequence[SummaryRow]) -> Answer:
    """Name the membership attack and the reconstruction that are furthest above guessing, and the attacker."""
    lines = []
    judged = [row for row in rows if row.cells["auc"].value is not None]
    shown = [row for row in judged if leak(row)]
    open_ = sum(leak(row) is None for row in judged)
    not_told = f" (not told in {open_})" if open_ else ""
    if shown:
        worst = max(shown, key=membership_lift)
        cell, blind = worst.cells["auc"], blind_auc(worst.group)
        others = "" if blind is None else f", the best blind attacker {blind:.3f}"
        lines.append(
            f"Membership, in {len(shown)} of {len(judged)} settings{not_told}: most on {_named(worst)}, AUC "
            f"{text(BY_KEY['auc'], cell.value)} {interval_text(BY_KEY['auc'], cell)} (guessing gives 0.5{others}), by "
            f"{_attacker(strongest(worst.group))}; its accuracy is {_reached(worst)}."
        )
    elif judged:
        lines.append(
            f"No membership attack found more than guessing in the {len(judged)} settings that were attacked"
            f"{not_told}. That proves nothing."
        )
    tried = [row for row in rows if row.cells["identified"].value is not None]
    pictured = [row for row in tried if rebuilt(row)]
    if pictured:
        worst = max(pictured, key=reconstruction_lift)
        found = best_attack(worst.group, "reconstruction", "identification")
        share = text(BY_KEY["identified"], worst.cells["identified"].value)
        guessing = (beside(found) if found else "") or "what guessing gives is not known"
        spread = interval_text(BY_KEY["identified"], worst.cells["identified"])
        lines.append(
            f"Records, in {len(pictured)} of {len(tried)} settings: most on {_named(worst)}, {share} {spread} of the "
            f"rebuilt images identified ({guessing}), by {_attacker(found)}."
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
            f"At best {_epsilon(least)}, for {least.unit}{relation}, all rounds together: {_named(least)}, "
            f"accuracy {_reached(least)}. {len(covered)} of {len(rows)} have a finite epsilon that holds and beat "
            "chance."
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
    if wrong := [_named(row) for row in rows if row.refuted]:
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
        times = list(dict.fromkeys(f"{ratio:.1f}" for ratio in (min(ratios), max(ratios))))
        line += f" Protection took {' to '.join(times)} times the compute of the same method without it."
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
    if row.refuted:
        return "has a claim that is refuted"
    return f"guarantees {_epsilon(row)}" + (", with δ ≥ 1/n" if row.weak_delta else "")


def _attacker(best: Found | None) -> str:
    return f"the {best.threat} ({best.attack})" if best else "nobody"


def _bill(row: SummaryRow) -> str:
    return f"{_cost(row)} ({_named(row)})"


def _its_cost(row: SummaryRow) -> str:
    return f"It costs {_cost(row)}."


def _cost(row: SummaryRow) -> str:
    up, down, seconds = (row.cells[key] for key in ("up", "down", "seconds"))
    sent = f"{text(BY_KEY['up'], up.value)} up and {text(BY_KEY['down'], down.value)} down a client and round"
    return f"{sent}, {text(BY_KEY['seconds'], seconds.value)} of {seconds.detail or 'compute'} a run"


# --- what the page is about --------------------------------------------------------------------------------------


def scope(rows: Sequence[SummaryRow]) -> dict[str, str]:
    """Return date, purpose, threat models and scope, for the head of the page and the first printed sheet."""
    finished = max((run.record.finished or "" for row in rows for run in row.group.runs), default="")
    threats = sorted({result.threat for row in rows for run in row.group.runs for result in run.record.attacks})
    named = dict.fromkeys(THREATS.get(name.split(":")[0], name) for name in threats)
    ran = [result for row in rows for run in row.group.runs for result in run.record.attacks if result.ran]
    attacks, blind = ({result.attack for result in ran if result.blind is of} for of in (False, True))
    counted = f"{len(attacks)} {'attack' if len(attacks) == 1 else 'attacks'}"
    if blind:
        counted += f" and {len(blind)} blind {'baseline' if len(blind) == 1 else 'baselines'}"
    seeds = sorted({len(row.group.runs) for row in rows})
    many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return {
        "Date": f"last run finished {finished[:10]}" if finished else "no run is finished",
        "Purpose": "what these federated methods reach, give away, guarantee and cost, measured on the same data",
        "Threat models": "; ".join(named) or "none: nothing was attacked",
        "Scope": f"{counted}, {many} {'seed' if many == '1' else 'seeds'} a setting; other data, models "
        "and attacks may give another picture",
    }
