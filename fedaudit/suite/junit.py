"""Verdicts in JUnit's XML, which every CI shows beside its tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree


@dataclass(frozen=True)
class Case:
    """One verdict: what it is about, and its outcome. `skipped` means that nothing could be concluded."""

    about: str  # budget, claim, leak, run
    name: str
    outcome: Literal["passed", "failure", "error", "skipped"]
    message: str = ""


def junit(cases: Sequence[Case]) -> str:
    counts = {word: sum(case.outcome == word for case in cases) for word in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite", name="fedaudit", tests=str(len(cases)), failures=str(counts["failure"]),
        errors=str(counts["error"]), skipped=str(counts["skipped"]),
    )  # fmt: skip
    for case in cases:
        row = ElementTree.SubElement(suite, "testcase", classname=f"fedaudit.{case.about}", name=_legal(case.name))
        if case.outcome != "passed":
            ElementTree.SubElement(row, case.outcome, message=_legal(case.message))
    return ElementTree.tostring(suite, encoding="unicode")


def _legal(text: str) -> str:
    """Return the text without characters that XML forbids: surrogates, and controls other than tab and line ends."""
    return "".join(c if _in_xml(ord(c)) else "\ufffd" for c in text)


def _in_xml(code: int) -> bool:
    return code in (9, 10, 13) or 0x20 <= code < 0xD800 or 0xE000 <= code < 0xFFFE or code >= 0x10000
