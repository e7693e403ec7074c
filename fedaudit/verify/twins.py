"""Checks of the twins of a protected run: their numbers against the transcript, what they cost against the ledger.

That a twin gave the same reply is the author's word: the twins' records are not kept. Whoever runs the setting again
has twins of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from fedaudit.privacy.update_policy import UPDATES
from fedaudit.runtime.run_record import TwinFacts
from fedaudit.verify.case import RECORD, Case
from fedaudit.verify.sum_rows import is_phase

FIGURE = "twins"
ENTRY = " (twin)"  # ends the name of what a difference costs in the ledger
DROPPED = "dropped out"  # the reason of an absence that nobody's task caused


def check_twins(case: Case) -> None:
    """Check what the record says of its twins. The transcript must be whole."""
    facts, promised = case.record.twins, bool(case.record.setting.privacy.keys() - {UPDATES})
    if facts is None or not promised:
        if promised and (case.other_code or case.foreign_transport):
            case.found.word(FIGURE, "the record does not tell of any: it may be older than they are")
        elif promised or facts is not None:
            said, now = ("nothing", "facts of twins") if promised else ("facts of twins", "nothing")
            case.found.contradicted(
                FIGURE, RECORD, "twins", said, now, "a run has them where a policy protects records"
            )
        return
    wrong = [*_impossible(facts), *_against_transcript(case, facts), *_against_ledger(case, facts)]
    for field, said, now, why in wrong[:5]:
        case.found.contradicted(FIGURE, RECORD, f"twins.{field}", said, now, why)
    if not wrong:
        case.found.recomputed(
            FIGURE, "clients and tasks with twins, from the transcript; what they cost, from the ledger"
        )
        case.found.word(
            "replies of twins",
            f"{facts.text()}. Twins' records are not kept; `fedaudit run --from` gives a run twins of its own",
        )


Wrong = tuple[str, Any, Any, str]  # field, recorded, recomputed, reason


def _impossible(facts: TwinFacts) -> list[Wrong]:
    """Return figures that cannot stand beside each other."""
    wrong: list[Wrong] = []
    if facts.wanted in ("off", "0") and (facts.clients or facts.tasks):
        wrong.append(("tasks", facts.tasks, 0, "no client had a twin"))
    if not 0 <= facts.held <= facts.tasks:
        wrong.append(("held", facts.held, f"at most {facts.tasks}", "of the tasks"))
    if (facts.held == facts.tasks) == bool(facts.differences):
        now = facts.tasks - 1 if facts.differences else facts.tasks
        wrong.append(("held", facts.held, now, f"{len(facts.differences)} differences are listed"))
    if len(set(facts.clients)) != len(facts.clients) or bool(facts.clients) != bool(facts.tasks):
        wrong.append(("clients", str(facts.clients), f"those of {facts.tasks} tasks", ""))
    return wrong


def _against_transcript(case: Case, facts: TwinFacts) -> list[Wrong]:
    """Return figures that the transcript contradicts: a twin does each task that its client has done."""
    answered, failed, absent = _tasks(case)
    if strangers := sorted(set(facts.clients) - (answered.keys() | failed.keys())):
        return [("clients", f"client {strangers[0]}", "a client that did a task", "")]
    of_twins = sum(answered[k] for k in facts.clients)
    with_failed = of_twins + sum(failed[k] for k in facts.clients)
    whole = not facts.differences and not facts.lost and facts.wanted == case.record.setting.twins
    if facts.tasks > with_failed or (whole and facts.tasks < of_twins):
        now = of_twins if of_twins == with_failed else f"{of_twins} to {with_failed}"
        return [("tasks", facts.tasks, now, f"tasks of clients {facts.clients}")]
    if whole and facts.wanted not in ("off", "0") and not absent and case.record.setting.start is None:
        least = len(answered) if facts.wanted == "all" else min(1, len(answered))
        if len(facts.clients) < least:
            return [("clients", len(facts.clients), f"at least {least}", f"twins = {facts.wanted}")]
    return []


def _tasks(case: Case) -> tuple[Counter[int], Counter[int], int]:
    """Return by client the tasks that were answered and those that failed, and how many clients were absent."""
    terms = case.record.setting.aggregate == "secure" or _where(case) == "client"  # such replies have no twin
    answered, failed, absent = Counter[int](), Counter[int](), 0
    for row in case.transcript.rows():
        if is_phase(row.get("fn", "")) or (terms and (row.get("round"), row.get("ask")) in case.sums):
            continue
        if row["type"] == "message" and row["direction"] == "up":
            answered[row["client"]] += 1
        elif row.get("event") == "absent":
            absent += 1
            failed[row["client"]] += row["reason"] != DROPPED
    return answered, +failed, absent


def _where(case: Case) -> str | None:
    policy = case.record.setting.privacy.get(UPDATES)
    return policy.get("where") if isinstance(policy, dict) else None


def _against_ledger(case: Case, facts: TwinFacts) -> list[Wrong]:
    """Return whether a difference was not billed: from then on, each client that is asked has no guarantee."""
    billed = {ledger.client for ledger in case.record.ledger for e in ledger.entries if e.field.endswith(ENTRY)}
    if not facts.differences:
        why = "the ledger has entries for a difference"
        return [("differences", "none", f"those of {len(billed)} clients", why)] if billed else []
    found = [re.search(r" of round (\d+), client \d+$", text) for text in facts.differences]
    first = min((int(match[1]) for match in found if match), default=1)
    asked = {k for row in case.record.rounds if row.round >= first for k in row.participants} - {
        absence.client for row in case.record.rounds for absence in row.absent
    }
    if missing := sorted(asked - billed):
        return [("differences", f"{len(facts.differences)}", f"no entry in the ledger of client {missing[0]}", "")]
    return []
