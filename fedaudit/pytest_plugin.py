"""A pytest plugin: gate the communication of your own method in your own test suite.

    @pytest.mark.comm_budget(uplink="12 MiB", downlink="12 MiB")      # per client and round
    def test_my_method_stays_small(federated_run):
        federated_run(method="my_package.my_method:MyMethod", rounds=2)

`comm_budget` is also a fixture, for runs that you made yourself: `comm_budget(record, uplink="12 MiB")`. With
`baseline="main.json"` (a saved record.json, beside the test's file) and `max_growth="1 %"` a run is compared with an
earlier one, and the failure message names the field that grew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "comm_budget(uplink=None, downlink=None, baseline=None, max_growth=None, per='client-round', "
        "convention='payload'): ceilings for every federated_run of the test, such as '12 MiB' or '1 %'",
    )


@pytest.fixture
def comm_budget(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that fails the test if a record sends more: `comm_budget(record, uplink="12 MiB", ...)`."""

    def check(
        record: Any,
        *,
        uplink: str | None = None,
        downlink: str | None = None,
        baseline: str | None = None,
        max_growth: str | None = None,
        per: str = "client-round",
        convention: str = "payload",
    ) -> None:
        from fedaudit.suite.budgets import check_budget, parse_budgets

        ways = (("up", uplink), ("down", downlink))
        limits: list[dict[str, Any]] = [{"direction": way, "max": most} for way, most in ways if most]
        if baseline is not None or max_growth is not None:
            limits.append({"baseline": baseline, "max_growth": max_growth})
        if not limits:
            raise pytest.UsageError(
                "comm_budget: give uplink= or downlink=, such as '12 MiB', or baseline= with max_growth=."
            )
        common = {"per": per, "convention": convention}
        for budget in parse_budgets([{**limit, **common} for limit in limits], "comm_budget"):
            outcome = check_budget(budget, record, record.setting.method, request.path.parent)
            if not outcome.kept:
                pytest.fail(outcome.message(), pytrace=False)

    return check


@pytest.fixture
def federated_run(
    request: pytest.FixtureRequest, tmp_path: Path, comm_budget: Callable[..., None]
) -> Callable[..., Any]:
    """Return a function that runs a setting in the test's folder and returns its record.

    Call it as `federated_run(method=..., rounds=...)`. It also applies the test's `comm_budget` mark.
    """
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
