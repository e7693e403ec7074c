"""Verification of a run folder: all checks, in the order in which they build on each other, and what becomes of them.

`verify` recomputes everything that the folder allows. `cheap_check` is the part for gates: digests, seal, intervals and
the ledger, without data, models or the method's code.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from fedaudit.errors import FedauditError, RunError
from fedaudit.progress import Watch, unwatched
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.folder import MARKER
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.runtime.seal import NAME as SEAL
from fedaudit.runtime.seal import Seal, read_seal
from fedaudit.stored_model import StoredModel
from fedaudit.verify.accuracy import check_accuracy, check_data, check_sums
from fedaudit.verify.attacks import check_attacks
from fedaudit.verify.case import RECORD, Case
from fedaudit.verify.code import check_code, check_copies
from fedaudit.verify.epsilon_audits import check_epsilon_audits
from fedaudit.verify.finding import IMPOSSIBLE, Checked, Finding
from fedaudit.verify.ledger import check_ledger
from fedaudit.verify.noise_key import check_noise_key
from fedaudit.verify.rerun import check_rerun, number_of_tasks
from fedaudit.verify.seal import check_seal
from fedaudit.verify.traffic import check_traffic, check_transcript
from fedaudit.verify.twins import check_twins

NOTE = "verified.json"
REMEDY = re.compile(r"\. (?:Name|Remove|Use) [^.]*\.$")  # the last sentence of a reader's error


class Note(StoredModel):
    """The note that a verification leaves in a run folder. It is about the files of one seal.

    Anybody can write one. It is for people who trust whoever checked.
    """

    fedaudit: str  # the version that checked
    when: str
    seal: str
    recomputed: int = Field(ge=0)
    contradicted: int = Field(ge=0)
    word: int = Field(ge=0)  # figures that rest on the author's word
    tasks: int = Field(ge=0)
    rerun: int = Field(ge=0)

    @model_validator(mode="after")
    def _is_possible(self) -> Note:
        if self.rerun > self.tasks:
            raise ValueError(f"{self.rerun} of {self.tasks} tasks were done again")
        return self

    def text(self, seal: str | None) -> str:
        """Return this in a line. `seal` is the digest of the folder as it is now; None: nobody computed it."""
        share = f", {self.rerun / self.tasks:.1%} of the client tasks done again" if self.rerun and self.tasks else ""
        figures = (
            f"{self.recomputed} figures recomputed, {self.contradicted} contradicted, {self.word} the author's word"
        )
        old = "" if seal in (None, self.seal) else "; THE FOLDER WAS CHANGED SINCE"
        return f"checked by fedaudit {self.fedaudit} on {self.when}: {figures}{share or ', nothing done again'}{old}"


def verify(
    folder: Path | str,
    *,
    rerun: float = 0.0,
    seed: int = 0,
    key: Path | None = None,
    data_dir: str | None = None,
    note: bool = True,
    watch: Watch | None = None,
) -> Checked:
    """Check one run folder, and leave a note in it if it can be written.

    `rerun` is the share of client tasks that are done again, chosen by `seed`. `key` is the public key that the seal
    must be signed with. `data_dir` is where this machine keeps data sets.
    """
    folder = Path(folder)
    begun = _begun(folder)
    if isinstance(begun, Checked):
        return begun
    case = Case(folder, begun, data_dir=data_dir, watch=watch or unwatched)
    found = case.found
    seal = check_seal(case, key)
    check_copies(case)
    if begun.status != "done":
        what = "does not apply, so nothing was run" if begun.status == "refused" else "is not finished"
        found.word("the run", f"it {what}: it has no result yet")
        return Checked(folder=str(folder), findings=found.list, seal=seal.digest)
    tell = case.watch
    tell(0, 6, "transcript")
    case.world  # noqa: B018 (so that the classes of its messages are known)
    check_transcript(case)
    if case.whole:
        check_traffic(case)
    tell(1, 6, "ledger")
    check_ledger(case)
    if case.whole:
        check_twins(case)
    check_noise_key(case)
    tell(2, 6, "accuracy")
    check_sums(case)
    check_data(case)
    check_accuracy(case)
    tell(3, 6, "attacks")
    check_attacks(case)
    check_epsilon_audits(case)
    check_code(case)
    tasks = redone = 0
    if rerun > 0:
        if case.whole:
            tell(4, 6, "rerun")
            tasks, redone = check_rerun(case, rerun, seed)
        else:
            found.word("rerun", "the transcript is not whole")
    elif case.whole and case.sums:
        found.word("content of sums", "--rerun computes them again from what the clients sent")
    _check_note(case, seal.digest)
    checked = Checked(folder=str(folder), findings=found.list, tasks=tasks, rerun=redone, seal=seal.digest)
    if note:
        _leave_note(folder, checked)
    return checked


def cheap_check(folder: Path | str) -> list[Finding]:
    """Return the contradictions that need neither data nor models nor the method's code.

    A record that was taken out of its folder has nothing to be held against: it has none.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("transcript", "checkpoint", "setting.json", MARKER)):
        return []
    begun = _begun(folder)
    if isinstance(begun, Checked):
        return begun.contradictions
    case = Case(folder, begun)
    check_seal(case)
    check_copies(case)
    if begun.status == "done":
        check_transcript(case)
        check_ledger(case, cheap=True)
        check_sums(case)
    return [finding for finding in case.found.list if finding.verdict == "contradicted"]


def _begun(folder: Path) -> RunRecord | Checked:
    """Return the record of a run folder; if it does not hold one that is possible, the contradiction."""
    if not (folder / RECORD).is_file():
        raise RunError(f"{folder} holds no run: {RECORD} is missing. Name the folder of a run or of an audit.")
    try:
        return read_record(folder)
    except FedauditError as e:
        file = next((name for name in ("attacks.json", "audits.json") if f"{name} cannot" in str(e)), RECORD)
        finding = Finding(
            figure="record", verdict="contradicted", file=file, field=_field(str(e)),
            recorded=_what_is_wrong(str(e))[:300], recomputed=IMPOSSIBLE,
        )  # fmt: skip
        return Checked(folder=str(folder), findings=[finding])


def _field(text: str) -> str:
    """Return the place that a reader's error names, such as rounds.0.utility."""
    after = _after_lead(text)
    place = after.partition(":")[0]
    return "" if after == text or " " in place else place


def _what_is_wrong(text: str) -> str:
    """Return what a reader's error says of that place, without the file, the place and the remedy."""
    said = _after_lead(REMEDY.sub("", text))
    return said.removeprefix(f"{field}:").strip() if (field := _field(text)) else said


def _after_lead(text: str) -> str:
    for lead in ("run record: ", "cannot be read: "):
        if lead in text:
            return text.partition(lead)[2]
    return text


def _check_note(case: Case, seal: str) -> None:
    """Check the note of an earlier check of these very files. It says less than this one, or it was typed."""
    if not (case.folder / NOTE).exists():
        return
    note, figure = read_note(case.folder), "note of an earlier check"
    if note is None:
        case.found.contradicted(figure, NOTE, "the file", "something else", "a note of `fedaudit verify`")
        return
    if note.seal != seal:
        case.found.word(figure, "it is about other files than these")
        return
    here = sum(finding.verdict == "contradicted" for finding in case.found.list)
    tasks = number_of_tasks(case) if case.whole else note.tasks
    if note.tasks and note.tasks != tasks:
        case.found.contradicted(figure, NOTE, "tasks", note.tasks, tasks, "client tasks in the transcript")
    elif here and not note.contradicted:
        case.found.contradicted(figure, NOTE, "contradicted", note.contradicted, here, "found in the same files")
    else:
        case.found.word(figure, f"{note.text(None)}: whoever can write the file can type it")


def _leave_note(folder: Path, checked: Checked) -> None:
    from fedaudit import __version__

    note = Note(
        fedaudit=__version__, when=datetime.now(UTC).isoformat(timespec="seconds"), seal=checked.seal or "",
        recomputed=checked.count("recomputed"), contradicted=checked.count("contradicted"),
        word=checked.count("the author's word"), tasks=checked.tasks, rerun=checked.rerun,
    )  # fmt: skip
    with contextlib.suppress(OSError):  # a reviewer may have the folder for reading only
        write_atomic(folder / NOTE, note.model_dump_json(indent=1).encode())


def read_note(folder: Path) -> Note | None:
    """Return the note that the last verification of a folder left; None if there is none that can be read."""
    try:
        return Note.model_validate_json((folder / NOTE).read_bytes())
    except (OSError, ValidationError, ValueError):
        return None


@dataclass(frozen=True)
class Standing:
    """The standing of a run folder's files as they are now, by its seal and by the note of its last check."""

    seal: Seal | None = None
    broken: str = ""  # why the seal does not hold; empty if it does, or there is none
    note: Note | None = None  # of a check of these very files
    changed: bool = False  # the note is about other files

    @property
    def doubts(self) -> list[str]:
        """Return why the run's figures cannot be relied on."""
        found = [f"the seal is broken ({self.broken})"] if self.broken else []
        if self.note is not None and self.note.contradicted:
            figures = f"{self.note.contradicted} figure{'s' * (self.note.contradicted != 1)}"
            found.append(f"a check on {self.note.when[:10]} contradicted {figures}")
        return found


def standing(folder: Path) -> Standing:
    """Return how a run folder stands. That reads all its sealed files, unless it has neither seal nor note."""
    note, broken = read_note(folder), ""
    try:
        seal = read_seal(folder)
    except RunError:
        seal, broken = None, f"{SEAL} does not hold a seal"
    if seal is None and note is None:
        return Standing(broken=broken)
    now = Seal.of(folder)
    same = note is not None and note.seal == now.digest
    broken = broken if seal is None else seal.broken_text(now)
    return Standing(seal, broken, note if same else None, note is not None and not same)


def checked_lines(folder: Path) -> list[str]:
    """Return a run folder's seal, and when and by which version it was checked, a line each."""
    now, note = Seal.of(folder), read_note(folder)
    try:
        seal = read_seal(folder)
    except RunError as e:
        return [str(e)]
    if seal is None:
        told = "not sealed"
    else:
        told = f"seal {seal.digest[:32]}{', signed' if seal.signature else ''}"
        told += "; BROKEN: files were changed after it (`fedaudit verify` names them)" if seal.broken_by(now) else ""
    return [told, "not checked (`fedaudit verify` does it)" if note is None else note.text(now.digest)]
