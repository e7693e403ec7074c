"""Many runs from one TOML file: methods x whatever the grid lists. Each cell is a run folder named by its content."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fedaudit.config import Frozen, Setting, read_toml, validated
from fedaudit.errors import FedauditError, RunError, SettingError

QUICKSTART = Path(__file__).parent / "suites" / "quickstart.toml"
Watch = Callable[[int, int, str], None]


class Suite(Frozen):
    """A grid of settings, and the attacks to run on each."""

    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    methods: list[dict[str, Any]] = Field(default_factory=list)
    attacks: list[str] | None = None  # None: all there are; []: none
    threats: list[str] = Field(default_factory=lambda: ["server"])

    def cells(self) -> list[Setting]:
        """Every setting, methods outermost. A method's own keys win over the grid, the grid's over the base."""
        axes = [[(key, value) for value in values] for key, values in self.grid.items()]
        cells = []
        for method in self.methods or [{}]:
            for point in itertools.product(*axes):
                setting = Setting.make(**{**self.base, **dict(point), **method})
                if setting not in cells:  # where a method fixes a key of the grid, its points coincide
                    cells.append(setting)
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


def audit(suite: Suite, out: Path, watch: Watch | None = None, jobs: int = 1) -> list[Outcome]:
    """Run all cells and attacks. A finished cell is not run again; a failing one does not stop the rest."""
    from fedaudit.runner import setting_key

    outcomes = [Outcome(out / "runs" / f"{s.method.replace(':', '_')}-{setting_key(s)[:12]}", s) for s in suite.cells()]
    tell = watch or (lambda *_: None)
    if jobs == 1:
        for number, outcome in enumerate(outcomes):
            _here(outcome, suite, _share(tell, number, outcomes))
    else:
        done = itertools.count(1)
        with ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(lambda outcome: _elsewhere(outcome, suite), outcomes):
                tell(next(done), len(outcomes), outcome.setting.method)
    if all(outcome.error for outcome in outcomes):
        raise RunError(f"Every run of the suite failed. The first: {outcomes[0].error}")
    return outcomes


def _share(tell: Watch, number: int, outcomes: list[Outcome]) -> Watch:
    """One cell's progress as a part of the suite's."""
    setting = outcomes[number].setting

    def watch(t: int, rounds: int, what: str) -> None:
        tell(number * 1000 + round(1000 * t / max(rounds, 1)), len(outcomes) * 1000, f"{setting.method}: {what}")

    return watch


def _here(outcome: Outcome, suite: Suite, watch: Watch | None = None) -> None:
    from fedaudit.attack import attack_run
    from fedaudit.record import read_record
    from fedaudit.registry import names
    from fedaudit.runner import run

    try:
        run(outcome.setting, out=outcome.folder, resume=True, watch=watch)
        for threat in suite.threats:
            known = {(a["attack"], a["threat"]) for a in read_record(outcome.folder).attacks}
            wanted = names("attacks") if suite.attacks is None else suite.attacks
            if todo := [name for name in wanted if (name, threat) not in known]:
                attack_run(outcome.folder, attacks=todo, threat=threat)
    except FedauditError as e:
        outcome.error = str(e)
    except Exception as e:  # noqa: BLE001 (a bug in somebody's attack must not stop the other cells; it is listed)
        outcome.error = f"{type(e).__name__}: {e}"


def _elsewhere(outcome: Outcome, suite: Suite) -> Outcome:
    """The cell in a process of its own."""
    cell = {
        "folder": str(outcome.folder),
        "setting": outcome.setting.model_dump(),
        "suite": suite.model_dump(include={"attacks", "threats"}),
    }
    command = [sys.executable, "-m", "fedaudit.suite"]
    done = subprocess.run(command, input=json.dumps(cell), capture_output=True, text=True, check=False)
    if done.returncode:
        outcome.error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return outcome


def _cell() -> None:
    """Entry point of such a process: a cell as JSON on standard input."""
    cell = json.load(sys.stdin)
    outcome = Outcome(Path(cell["folder"]), Setting.make(**cell["setting"]))
    _here(outcome, Suite(**cell["suite"]))
    if outcome.error:
        sys.exit(outcome.error.replace("\n", " "))


if __name__ == "__main__":
    _cell()
