"""Forecasts: the pace of rounds, and what is left to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import reported

from fedaudit.setting import Setting
from fedaudit.suite.cell import Cell
from fedaudit.suite.forecast import Forecast, Pace, total

# --- unequal rounds


def test_the_pace_is_over_all_rounds_and_of_the_nearest_cell():
    pace = Pace()
    pace.add_rounds(Setting.make(seed=0), 10.0, 5)
    pace.add_rounds(Setting.make(seed=0), 2.0, 1)
    pace.add_rounds(Setting.make(seed=1), 100.0, 10)
    assert pace.per_round(Setting.make(seed=0)) == (pytest.approx(2.0), "this cell's own rounds")
    assert pace.per_round(Setting.make(seed=2)) == (pytest.approx(112 / 16), "the same with another seed")
    assert pace.per_round(Setting.make(method="local")) is None


def cell(setting=None, **more):
    values = {"attacks": ["loss"], "threats": ["server"], **more}
    return Cell(Path("nowhere"), setting or Setting.make(), **values)


def test_the_total_leaves_out_what_is_done_and_what_does_not_apply():
    forecasts = [
        Forecast(cell(), "done", 0, 0.0), Forecast(cell(), "does not apply", 0, 0.0),
        Forecast(cell(), "new", 4000, 100.0), Forecast(cell(), "new", None, None),
    ]  # fmt: skip
    text = total(forecasts, 2)
    assert text.splitlines()[0] == "4 cells: 1 done, 1 does not apply, 2 to do."
    assert "To send: 4.00 kB of payload, without 1 cells whose traffic is not known." in text
    assert "about 50 s with 2 at a time, without 1 cells that are unlike any measured one" in text


def test_audits_are_forecast_for_each_round():
    """Eight seconds of audits on a run of as many rounds as the record has."""
    record = reported._record("fedavg", 0, 0.8)
    pace = Pace()
    pace.learn(record, {"residuals": 5.0, "release": 3.0})
    assert set(pace.audits.values()) == {8.0 / len(record.rounds)}
    assert len(record.rounds) > 1
