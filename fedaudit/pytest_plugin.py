"""A pytest plugin: gate the communication of your own method in your own test suite.

    @pytest.mark.comm_budget(uplink="12 MiB", downlink="12 MiB")      # per client and round
    def test_my_method_stays_small(federated_run):
        federated_run(method="my_package.my_method:MyMethod", rounds=2)

`comm_budget` is also a fixture, for runs that you made yourself: `comm_budget(record, uplink="12 MiB")`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "comm_budget(uplink=None, downlink=None, per='client-round', convention='payload'): ceilings for every "
        "federated_run of the test, such as '12 MiB'",
    )


@pytest.fixture
def comm_budget() -> Callable[..., None]:
    """`comm_budget(record, uplink="12 MiB", downlink=None, ...)` fails the test where a record sends more."""

    def check(
        record: Any,
        *,
        uplink: str | None = None,
        downlink: str | None = None,
        per: str = "client-round",
        convention: str = "payload",
    ) -> None:
        from fedaudit.config import validated
        from fedaudit.gate import Budget, hold

        if uplink is None and downlink is None:
            raise pytest.UsageError("comm_budget: give uplink=, downlink= or both, such as '12 MiB'.")
        for direction, ceiling in (("up", uplink), ("down", downlink)):
            if ceiling is None:
                continue
            values = {"direction": direction, "max": ceiling, "per": per, "convention": convention}
            outcome = hold(validated(Budget, values, "option of comm_budget"), record, record.setting.method)
            if not outcome.kept:
                pytest.fail(outcome.message(), pytrace=False)

    return check


@pytest.fixture
def federated_run(
    request: pytest.FixtureRequest, tmp_path: Path, comm_budget: Callable[..., None]
) -> Callable[..., Any]:
    """`federated_run(method=..., rounds=...)` runs a setting in the test's folder and returns its record."""
    marker = request.node.get_closest_marker("comm_budget")
    count = 0

    def call(**setting: Any) -> Any:
        nonlocal count
        from fedaudit import run

        count += 1
        record = run(out=tmp_path / f"federated-run-{count}", **setting)
        if marker is not None:
            comm_budget(record, **marker.kwargs)
        return record

    return call
