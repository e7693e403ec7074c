"""Verdicts as XML: counts of each outcome, and text that XML allows."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from fedaudit.suite.junit import Case, _in_xml, junit


def test_outcomes_are_counted_and_named():
    outcomes = ["passed"] * 4 + ["failure"] * 3 + ["error"] * 2 + ["skipped"]
    made = [Case("claim", f"{i}", outcome, f"why {i}") for i, outcome in enumerate(outcomes)]
    suite = ElementTree.fromstring(junit(made))
    assert suite.attrib == {"name": "fedaudit", "tests": "10", "failures": "3", "errors": "2", "skipped": "1"}
    assert [[(child.tag, child.get("message")) for child in case] for case in suite] == [
        *[[]] * 4, *[[("failure", f"why {i}")] for i in (4, 5, 6)], *[[("error", f"why {i}")] for i in (7, 8)],
        [("skipped", "why 9")],
    ]  # fmt: skip
    assert {case.get("classname") for case in suite} == {"fedaudit.claim"}


@pytest.mark.parametrize(
    ("code", "legal"),
    [
        (0x8, False), (0x9, True), (0xA, True), (0xB, False), (0xD, True), (0x1F, False), (0x20, True),
        (0xD7FF, True), (0xD800, False), (0xDFFF, False), (0xE000, True), (0xFFFD, True), (0xFFFE, False),
        (0xFFFF, False), (0x10000, True), (0x10FFFF, True),
    ],
)  # fmt: skip
def test_characters_of_xml(code, legal):
    """XML 1.0, production 2."""
    assert _in_xml(code) == legal
