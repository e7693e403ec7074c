"""What is known of a method's declarations: whether the code that was tested is the code that runs."""

from __future__ import annotations

import pytest

from fedaudit import registry
from fedaudit.runtime.declarations import tested
from fedaudit.runtime.declarations.tested import TestedMethod, declarations_of, key_of


@pytest.mark.parametrize(
    ("source", "held", "verdict"),
    [
        ("as it is", True, "held"),
        ("as it is", False, "broken"),
        ("as it was", True, "another source"),
        ("as it was", False, "another source"),
        (None, True, "never"),
    ],
)
def test_a_verdict_is_of_one_source(source, held, verdict, monkeypatch):
    method = registry.find("fedavg").make({})
    entry = TestedMethod(source=source or "", held=held, fields={}, fedaudit="1.0", twin_sets=2)
    monkeypatch.setattr(tested, "source_of_method", lambda method: "as it is")
    monkeypatch.setattr(tested, "read", lambda path: {key_of(type(method)): entry} if source else {})
    found = declarations_of(method)
    assert (found.tested, found.source) == (verdict, "as it is")
    assert found.tested_source == source
