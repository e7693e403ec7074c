"""Seals and checks of the runs behind a report: one line that says what a reader can rely on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fedaudit.errors import RunError
from fedaudit.reports.summary_rows import SummaryRow
from fedaudit.runtime.seal import Seal, read_seal
from fedaudit.verify.check import Note, read_note


def checked(rows: Sequence[SummaryRow]) -> str:
    """Return when and by which version the runs were checked, what share was done again, and the digest of all seals.

    A note of a check counts for the folder as it was: one that was changed since counts as not checked.
    """
    runs = [run for row in rows for run in row.group.runs]
    notes: list[Note] = []
    changed = 0
    for run in runs:
        note = read_note(run.folder)
        if note is not None and note.seal == Seal.of(run.folder).digest:
            notes.append(note)
        elif note is not None:
            changed += 1
    parts = [_sealed(rows)] if _sealed(rows) else []
    if not notes:
        parts.append("not checked" + (f", {changed} changed since a check" if changed else ""))
    else:
        versions = ", ".join(sorted({note.fedaudit for note in notes}))
        tasks, again = sum(note.tasks for note in notes), sum(note.rerun for note in notes)
        share = f"{again / tasks:.1%} of client tasks done again" if again and tasks else "nothing done again"
        wrong = sum(note.contradicted for note in notes)
        parts.append(
            f"checked by fedaudit {versions}: {len(notes)} of {len(runs)} runs, last on "
            f"{max(note.when for note in notes)[:10]}, {share}, {wrong} figures contradicted"
            + (f", {changed} runs changed since" if changed else "")
        )
    return " · ".join(parts)


def _sealed(rows: Sequence[SummaryRow]) -> str:
    digests = []
    for row in rows:
        for run in row.group.runs:
            try:
                seal = read_seal(run.folder)
            except RunError:
                seal = None
            if seal is not None:
                digests.append(seal.digest)
    if not digests:
        return ""
    whole = hashlib.blake2b("".join(sorted(digests)).encode(), digest_size=16).hexdigest()
    return f"seal {digests[0][:32] if len(digests) == 1 else whole} over {len(digests)} runs"
