"""Seals and checks of the runs behind a report: one line that says what a reader can rely on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pydantic import Field

from fedaudit.errors import RunError
from fedaudit.reports.summary_rows import SummaryRow
from fedaudit.runtime.seal import Seal, read_seal
from fedaudit.stored_model import StoredModel
from fedaudit.verify.check import Note, read_note


class CheckedRuns(StoredModel):
    """The checks of a report's runs, as far as they are known. A check counts for the files as they were."""

    runs: int
    checked: int = 0  # runs that were checked, and have not changed since
    changed: int = 0  # runs that were checked, and have changed since
    contradicted: int = 0  # figures
    tasks: int = 0
    rerun: int = 0  # of the tasks, those that were done again
    versions: list[str] = Field(default_factory=list)  # of fedaudit
    last: str | None = None
    seal: str | None = None  # one digest over the seals of all sealed runs

    def text(self) -> str:
        """Return this in words."""
        if not self.checked:
            return "not checked" + (f", {self.changed} changed since a check" if self.changed else "")
        share = f"{self.rerun / self.tasks:.1%} of client tasks done again" if self.rerun else "nothing done again"
        return (
            f"checked by fedaudit {', '.join(self.versions)}: {self.checked} of {self.runs} runs, last on "
            f"{(self.last or '')[:10]}, {share}, {self.contradicted} figures contradicted"
            + (f", {self.changed} runs changed since" if self.changed else "")
        )


def checked_runs(rows: Sequence[SummaryRow]) -> CheckedRuns:
    """Return when and by which version the runs were checked, what share was done again, and one digest of seals."""
    runs = [run for row in rows for run in row.group.runs]
    notes: list[Note] = []
    changed = 0
    for run in runs:
        note = read_note(run.folder)
        if note is not None and note.seal == Seal.of(run.folder).digest:
            notes.append(note)
        elif note is not None:
            changed += 1
    return CheckedRuns(
        runs=len(runs), checked=len(notes), changed=changed, contradicted=sum(note.contradicted for note in notes),
        tasks=sum(note.tasks for note in notes), rerun=sum(note.rerun for note in notes),
        versions=sorted({note.fedaudit for note in notes}), last=max((note.when for note in notes), default=None),
        seal=_sealed(rows) or None,
    )  # fmt: skip


def checked(rows: Sequence[SummaryRow]) -> str:
    """Return the same in one line."""
    found = checked_runs(rows)
    return " · ".join(part for part in (found.seal, found.text()) if part)


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
