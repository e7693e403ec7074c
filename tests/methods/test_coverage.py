"""No method without its tests: a new one cannot be registered without a fingerprint and a round by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedaudit import registry

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", registry.names("methods"))
def test_a_round_by_hand(name):
    """A composition is its two parts; each has one of its own."""
    missing = [part for part in name.split("+") if not (HERE / "by_hand" / f"test_{part}.py").exists()]
    assert not missing, f"retell a round of {', '.join(missing)}: tests/methods/by_hand/test_<name>.py"


@pytest.mark.parametrize("name", [path.stem for path in sorted((HERE / "by_hand").glob("test_*.py"))])
def test_a_round_by_hand_uses_nothing_of_the_method(name):
    """It shares the run's random numbers and nothing else of the project: what it compares with must be its own."""
    lines = (HERE / "by_hand" / f"{name}.py").read_text().splitlines()
    taken = [line for line in lines if "import" in line and ("fedaudit" in line or "methods" in line)]
    assert not [line for line in taken if not line.startswith("from fedaudit.rng import")], taken
