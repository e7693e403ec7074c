"""Many runs from one TOML file: methods x whatever the grid lists. Each cell is a run folder named by its content."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from fedaudit.config import Frozen, Setting, read_toml, validated
from fedaudit.errors import FedauditError, RunError, SettingError

QUICKSTART = Path(__file__).parent / "suites" / "quickstart.toml"


class Suite(Frozen):
    """A grid of settings, and the attacks to run on each."""

    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    methods: list[dict[str, Any]] = Field(default_factory=list)
    attacks: list[str] | None = None
    threats: list[str] = Field(default_factory=lambda: ["server"])

    def cells(self) -> list[Setting]:
        """Every setting of the grid, methods outermost."""
        axes = [[(key, value) for value in values] for key, values in self.grid.items()]
        cells = []
        for method in self.methods or [{}]:
            for point in itertools.product(*axes):
                cells.append(Setting.make(**{**self.base, **method, **dict(point)}))
        if not cells:
            raise SettingError("The suite has no cell: a list in [grid] is empty.")
        return cells


def read_suite(path: Path | str | None) -> Suite:
    return validated(Suite, read_toml(path or QUICKSTART), "key of the suite")


@dataclass
class Outcome:
    folder: Path
    setting: Setting
    error: str | None = None
    attacks: list[dict[str, Any]] = field(default_factory=list)


def audit(suite: Suite, out: Path, watch: Callable[[int, int, str], None] | None = None) -> list[Outcome]:
    """Run all cells and attacks. A finished cell is not run again; a failing one does not stop the rest."""
    from fedaudit.attack import attack_run
    from fedaudit.record import read_record
    from fedaudit.runner import run, setting_key

    outcomes = []
    cells = suite.cells()
    for number, setting in enumerate(cells):
        name = f"{setting.method.replace(':', '_')}-{setting_key(setting)[:12]}"
        outcome = Outcome(out / "runs" / name, setting)
        outcomes.append(outcome)

        def tell(t: int, rounds: int, what: str, number: int = number, setting: Setting = setting) -> None:
            if watch:
                done = number * 1000 + round(1000 * t / max(rounds, 1))
                watch(done, len(cells) * 1000, f"{setting.method}, seed {setting.seed}: {what}")

        try:
            run(setting, out=outcome.folder, resume=True, watch=tell)
            for threat in suite.threats:
                done = {(a["attack"], a["threat"]) for a in read_record(outcome.folder).attacks}
                wanted = [a for a in suite.attacks or [] if (a, threat) not in done] if suite.attacks else None
                if wanted != []:
                    outcome.attacks += attack_run(outcome.folder, attacks=wanted, threat=threat)
        except FedauditError as e:
            outcome.error = str(e)
    if all(outcome.error for outcome in outcomes):
        raise RunError(f"Every run of the suite failed. The first: {outcomes[0].error}")
    return outcomes
