"""Seals and checks of the runs behind a report: one line that says what a reader can rely on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pydantic import Field

from fedaudit.reports.summary_rows import SummaryRow
from fedaudit.stored_model import StoredModel
from fedaudit.verify.check import Standing, standing


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
    broken: int = 0  # runs whose files are not as they were sealed
    seal: str | None = None  # one digest over the seals of all sealed runs

    def text(self) -> str:
        """Return this in words. Broken seals are told by `checked`."""
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
    known = [run.standing or standing(run.folder) for row in rows for run in row.group.runs]
    notes = [one.note for one in known if one.note is not None]
    return CheckedRuns(
        runs=len(known), checked=len(notes), changed=sum(one.changed for one in known),
        contradicted=sum(note.contradicted for note in notes),
        tasks=sum(note.tasks for note in notes), rerun=sum(note.rerun for note in notes),
        versions=sorted({note.fedaudit for note in notes}), last=max((note.when for note in notes), default=None),
        broken=sum(bool(one.broken) for one in known), seal=_sealed(known) or None,
    )  # fmt: skip


def checked(rows: Sequence[SummaryRow]) -> str:
    """Return the same in one line."""
    found = checked_runs(rows)
    broken = f"SEAL BROKEN in {found.broken} of {found.runs} runs" if found.broken else found.seal
    return " · ".join(part for part in (broken, found.text()) if part)


def _sealed(known: Sequence[Standing]) -> str:
    digests = [one.seal.digest for one in known if one.seal is not None]
    if not digests:
        return ""
    whole = hashlib.blake2b("".join(sorted(digests)).encode(), digest_size=16).hexdigest()
    return f"seal {digests[0][:32] if len(digests) == 1 else whole} over {len(digests)} runs"
