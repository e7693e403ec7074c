"""The result of checking one figure of a run folder, and the collection of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from fedaudit.stored_model import StoredModel, number_of, plain

Verdict = Literal["recomputed", "contradicted", "the author's word"]
Shown = str | float | int | bool | None
ABSENT = "nothing"  # stands for a value that one side does not have
IMPOSSIBLE = "no run leaves such a file"  # stands for the value of a file that is not valid
LONGEST = 160  # characters of a value that are shown


class Finding(StoredModel):
    """One figure: whether it was recomputed, is contradicted, or rests on the author's word, and why.

    A contradiction names the file, the field in it, the recorded value and the recomputed one.
    """

    figure: str
    verdict: Verdict
    reason: str = ""
    file: str = ""
    field: str = ""
    recorded: Shown = None
    recomputed: Shown = None

    def text(self) -> str:
        """Return this in one line."""
        if self.verdict == "contradicted":
            at = f"{self.file}: {self.field}" if self.field else self.file
            why = f" ({self.reason})" if self.reason else ""
            if self.recomputed == IMPOSSIBLE:
                place = f"{self.field}: " if self.field else ""
                said = f"{self.file} is not valid: {place}{self.recorded}; {IMPOSSIBLE}{why}"
                return f"{self.figure}: contradicted. {said}"
            return (
                f"{self.figure}: contradicted. {at} is {_word(self.recorded)}, recomputed {_word(self.recomputed)}{why}"
            )
        return f"{self.figure}: {self.verdict}" + (f". {self.reason}" if self.reason else "")


def _word(value: Shown) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Checked(StoredModel):
    """All that `verify` found out about one run folder."""

    folder: str
    findings: list[Finding] = Field(default_factory=list)
    tasks: int = 0  # client tasks of the run
    rerun: int = 0  # of them, those that were done again
    seal: str | None = None  # the digest over the folder's files as they were checked

    def count(self, verdict: Verdict) -> int:
        return sum(finding.verdict == verdict for finding in self.findings)

    @property
    def contradictions(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "contradicted"]


class Findings:
    """Collects findings. Figures of one name that agree become one finding; each contradiction is one of its own."""

    def __init__(self) -> None:
        self.list: list[Finding] = []

    def recomputed(self, figure: str, reason: str = "") -> None:
        self.list.append(Finding(figure=figure, verdict="recomputed", reason=reason))

    def word(self, figure: str, reason: str) -> None:
        self.list.append(Finding(figure=figure, verdict="the author's word", reason=reason))

    def contradicted(
        self, figure: str, file: str, field: str, recorded: Any, recomputed: Any, reason: str = ""
    ) -> None:
        self.list.append(
            Finding(
                figure=figure,
                verdict="contradicted",
                reason=reason,
                file=file,
                field=field,
                recorded=_shown(recorded),
                recomputed=_shown(recomputed),
            )
        )

    def compare(
        self, figure: str, file: str, field: str, recorded: Any, recomputed: Any, *, close: float = 0.0,
        reason: str = "", excuse: str = "",
    ) -> bool:  # fmt: skip
        """Compare two values or trees of them, and note the outcome. Return whether they agree.

        `close` is the difference up to which two numbers are the same. If `excuse` is given, a difference is not a
        contradiction but the author's word, for that reason.
        """
        equal = recorded == recomputed  # most figures are, and walking through two trees takes longer
        found = [] if equal is True else list(differences(plain(recorded), plain(recomputed), field, close))
        if not found:
            self.recomputed(figure, reason)
        elif excuse:
            where, a, b = found[0]
            self.word(figure, f"{excuse}; {where} is {_word(_shown(a))}, and {_word(_shown(b))} by the code here")
        else:
            for where, a, b in found[:5]:
                self.contradicted(figure, file, where, a, b, reason)
        return not found


def differences(a: Any, b: Any, path: str = "", close: float = 0.0) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two trees differ, as a path such as rounds.0.utility, with both values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted(a.keys() | b.keys()):
            yield from differences(a.get(key, ABSENT), b.get(key, ABSENT), f"{path}.{key}" if path else str(key), close)
    elif isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str) and not isinstance(b, str):
        if len(a) != len(b):
            yield path, f"{len(a)} entries", f"{len(b)} entries"
            return
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{path}.{i}" if path else str(i), close)
    elif not _same(a, b, close):
        yield path, a, b


def _same(a: Any, b: Any, close: float) -> bool:
    x, y = number_of(a), number_of(b)
    if x is None or y is None:
        return type(a) is type(b) and a == b
    if x == y or (math.isnan(x) and math.isnan(y)):
        return True
    return math.isfinite(x) and math.isfinite(y) and abs(x - y) <= close * max(1.0, abs(x), abs(y))


def _shown(value: Any) -> Shown:
    if isinstance(value, bool | int | float) or value is None:
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else str(plain(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
