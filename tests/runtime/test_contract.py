"""Words of the verdicts on a method's declarations."""

from __future__ import annotations

from fedaudit.runtime.declarations.contract import _cut


def test_a_text_that_is_too_long_is_cut():
    assert _cut("abcd", 4) == "abcd"
    assert _cut("abcde", 4) == "abcd..."
    assert _cut("a" * 160) == "a" * 160
    assert _cut("a" * 161) == "a" * 160 + "..."
