"""Reading the runs below a folder, and grouping those that differ in their seed alone."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedaudit.errors import FedauditError, RunError
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.privacy.policy import TRAINING, policy_of
from fedaudit.privacy.update_policy import UPDATES, UpdatePolicy
from fedaudit.runtime.folder import STALE, check_transcript
from fedaudit.runtime.run_record import EpsilonAudit, RunRecord, read_record
from fedaudit.setting import EXECUTION, Setting
from fedaudit.verify.check import Standing, standing

ARENA = ("dataset", "image_size", "clients", "partition")  # figures are compared only if these agree


@dataclass(frozen=True)
class Run:
    folder: Path
    record: RunRecord
    audits: list[EpsilonAudit] = field(default_factory=list)  # attempts to refute the claimed epsilon
    label: str | None = None  # the name that the audit or the run's setting gives it
    standing: Standing | None = None  # what its seal and its last check say; None: nobody has looked

    @property
    def doubts(self) -> list[str]:
        """Return why its figures cannot be relied on, if somebody has looked."""
        return [] if self.standing is None else self.standing.doubts

    @property
    def seed(self) -> int:
        return self.record.setting.seed


@dataclass(frozen=True)
class Group:
    """The runs of one setting, which differ in their seed alone."""

    label: str  # distinct within a report
    privacy: str
    runs: tuple[Run, ...]
    differs: dict[str, Any] = field(default_factory=dict)  # settings in which it differs from others of its method
    passed_over: tuple[Run, ...] = ()  # earlier runs of the same seeds that had another result

    @property
    def records(self) -> list[RunRecord]:
        return [run.record for run in self.runs]

    @property
    def setting(self) -> Setting:
        return self.runs[0].record.setting

    @property
    def method(self) -> str:
        return self.setting.method

    @property
    def name(self) -> str:
        """Return what stands in the column of methods: the name that the suite gives the row, or the method's."""
        return next((run.label for run in self.runs if run.label), self.method)

    @property
    def arena(self) -> tuple[Any, ...]:
        return tuple(getattr(self.setting, key) for key in ARENA)


def read_runs(folder: Path) -> tuple[list[Run], dict[str, str]]:
    """Return the runs below a folder, and those that cannot be read, with the reason."""
    runs, problems, labels = [], {}, _labels(folder)
    for path in sorted(folder.glob("**/record.json")):
        if STALE in path.relative_to(folder).parts:
            continue  # runs of older code, which an audit has put aside
        try:
            record = read_record(path)
            if (path.parent / "transcript").is_dir():
                check_transcript(path.parent, record)
        except FedauditError as e:
            problems[str(path.parent.relative_to(folder))] = str(e)
            continue
        label = labels.get(str(path.parent.relative_to(folder)), record.setting.label)
        runs.append(Run(path.parent, record, list(record.audits), label))
    if not runs:
        if problems:
            more = f" ({len(problems) - 1} more cannot be read either)" if len(problems) > 1 else ""
            raise RunError(f"{next(iter(problems.values()))}{more}")
        raise RunError(f"There is no run below {folder}. `fedaudit run --out {folder}/NAME` makes one.")
    return runs, problems


def looked_at(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with what the seal and the last check of each say. That reads all their sealed files."""
    return [replace(run, standing=standing(run.folder)) for run in runs]


def _labels(folder: Path) -> dict[str, str | None]:
    """Return the names that the last audit of this folder gave its cells. They win over those in older records."""
    try:
        cells = json.loads((folder / "audit.json").read_text())["cells"]
        return {cell["folder"]: cell.get("label") for cell in cells}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return {}  # a folder of runs without an audit; `report.failures` tells of a damaged file


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Return groups in order of method and privacy, those without protection first, each with its own label.

    If one setting and seed was run several times, the run that finished last counts. Earlier runs with another result
    (by other code, say) are passed over and named."""
    found: dict[str, dict[int, list[Run]]] = {}
    for run in runs:
        kept = run.record.setting.model_dump(mode="json", exclude={"seed", *EXECUTION})
        found.setdefault(json.dumps(kept, sort_keys=True), {}).setdefault(run.seed, []).append(run)
    sets = [tuple(_last(of[seed]) for seed in sorted(of)) for of in found.values()]
    given = Counter(_given(runs) for runs in sets)
    settings = [runs[0].record.setting for runs in sets]
    groups = []
    for shown, of in zip(sets, found.values(), strict=True):
        digests = {run.seed: run.record.transcript_digest for run in shown}
        done = [run for same in of.values() for run in same if run.record.status == "done"]
        others = tuple(run for run in done if run.record.transcript_digest != digests[run.seed])
        groups.append(replace(_labelled(shown, settings, given), passed_over=others))
    return sorted(groups, key=lambda g: (str(g.arena), g.method, bool(g.setting.privacy), _natural(g.label)))


def _last(same: Sequence[Run]) -> Run:
    """Return the run of one setting and seed that finished last; the first of equal ones."""
    return max(same, key=lambda run: (run.record.status == "done", run.record.finished or ""))


def _natural(label: str) -> list[str | float]:
    """Return a sort key with numbers as numbers, so that 8 is between 2 and 32. Words and numbers take turns."""
    parts = re.split(r"(\d+(?:\.\d+)?)", label)
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def _given(runs: Sequence[Run]) -> str | None:
    return next((run.label for run in runs if run.label), None)


def _labelled(runs: tuple[Run, ...], settings: Sequence[Setting], given: Counter[str | None]) -> Group:
    setting = runs[0].record.setting
    privacy = privacy_text(setting.privacy)
    rivals = [s for s in settings if s.method == setting.method and privacy_text(s.privacy) == privacy and s != setting]
    differs: dict[str, Any] = {}
    for rival in rivals:
        mine, theirs = (flat_setting(s) for s in (setting, rival))
        differs |= {
            key: mine.get(key, "default") for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)
        }
    for key in ARENA:
        if any(getattr(s, key) != getattr(setting, key) for s in settings):
            differs[key] = getattr(setting, key)
    own = _given(runs)
    parts = [own or setting.method, *([privacy] if setting.privacy else [])]
    parts += [f"{key}={value}" for key, value in sorted(differs.items())]
    if own is not None and given[own] == 1 and all(s.method != own for s in settings):
        parts = [own]  # nobody else is called so
    return Group(" · ".join(parts), privacy, runs, dict(sorted(differs.items())))


def flat_setting(setting: Setting) -> dict[str, Any]:
    """Return a setting's keys and the method's own in one table, without seed and execution."""
    values = setting.model_dump(mode="json", exclude={"seed", "set", "privacy", *EXECUTION})
    policies = {f"privacy.{kind}.{key}": v for kind, p in setting.privacy.items() for key, v in p.items()}
    return {**values, **setting.set, **policies}


def privacy_text(privacy: dict[str, Any]) -> str:
    """Return a setting's policies in a few words, with kinds that are protected alike together."""
    alike: dict[str, list[str]] = {}
    for kind, values in sorted(privacy.items()):
        alike.setdefault(_policy_text(kind, values), []).append(kind)
    return (
        "; ".join(how if kinds == [TRAINING] else f"{', '.join(kinds)} {how}" for how, kinds in alike.items()) or "none"
    )


def _policy_text(kind: str, values: dict[str, Any]) -> str:
    if kind == UPDATES:
        return UpdatePolicy(**values).text()
    policy = policy_of(kind, values)
    return mechanism_of(policy).label(policy)


def command(setting: Setting, out: str | None = None) -> str:
    """Return the command line that repeats a run of this setting."""
    words = ["fedaudit", "run"]
    for key, value in setting.model_dump(mode="json", exclude={"set", "privacy"}).items():
        default = Setting.model_fields[key].default
        if value != default or key in ("method", "seed"):
            name = key.replace("_", "-")
            words += (
                [f"--{name}" if value else f"--no-{name}"]
                if isinstance(value, bool)
                else [f"--{name}", _toml(value) if isinstance(value, dict) else str(value)]
            )
    if setting.dataset == "digits" and not setting.set and setting.preset is None:
        words.append("--as-is")  # otherwise a run on digits gets settings tuned for digits
    for key, value in setting.set.items():
        words += ["--set", f"{key}={_toml(value)}"]
    for kind, values in setting.privacy.items():
        words += ["--privacy", f"{kind}:" + ",".join(_option(key, value) for key, value in values.items())]
    return shlex.join([*words, *(["--out", out] if out else [])])


def _option(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else _toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + "}"
    return json.dumps(value)
