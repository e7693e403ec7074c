"""Runs as tables: one row per run, per round, per measure of an attack, per release. `fedaudit.load(PATH)` reads them.

The rows are typed and need nothing but fedaudit. Data frames need pandas.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedaudit.errors import SettingError
from fedaudit.extras import install
from fedaudit.metrics.guarantee import largest_delta
from fedaudit.metrics.metric import metrics
from fedaudit.metrics.utility import accuracy_interval
from fedaudit.reports.runs import Run, privacy_text, read_runs
from fedaudit.runtime.attack_result import AnyResult, MembershipResult, NotRun, leak_of, measures_of
from fedaudit.runtime.run_record import RunRecord
from fedaudit.stats import Estimate

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunRow:
    """One run: its setting, what it reached, its guarantee and its cost. Bytes are those of all clients and rounds.

    Every metric of `fedaudit.metrics` is a column: those that have no field here are in `more`, by name.
    """

    run: str  # its folder, relative to the named one
    method: str
    dataset: str
    seed: int
    privacy: str
    compress: str | None
    status: str
    rounds: int
    clients: int
    accuracy: float | None  # after the last round, on the common test set; a global model has an interval, too
    low: float | None
    high: float | None
    chosen_round: int | None  # chosen on validation data
    chosen_accuracy: float | None
    epsilon: float | None  # guaranteed to the worst-off client; infinite: something is unprotected
    delta: float | None
    lower_bound: float | None  # the largest lower bound of all audits of epsilon
    refuted: int  # number of claims of epsilon that measurements refuted
    auc: float | None  # of the best membership attack
    leaks: int  # number of attacks that found a leak, each judged by itself
    up_payload: int
    up_wire: int
    down_payload: int
    down_wire: int
    seconds: float | None
    peak_memory: int | None
    device: str
    started: str
    finished: str | None
    digest: str  # digest of all messages in order
    more: Mapping[str, float | None] = field(default_factory=dict)  # further metrics


@dataclass(frozen=True)
class RoundRow:
    """One round: the bytes of its messages, and what it reached if it was evaluated."""

    run: str
    method: str
    seed: int
    round: int
    participants: int
    absent: int
    accuracy: float | None
    low: float | None
    high: float | None
    clients_mean: float | None
    clients_std: float | None
    validation: float | None
    up_payload: int
    up_wire: int
    down_payload: int
    down_wire: int
    wall_s: float


@dataclass(frozen=True)
class AttackRow:
    """One measure of one attack; an attack that did not run has one row with the reason."""

    run: str
    method: str
    seed: int
    attack: str
    threat: str
    claims: str | None
    blind: bool
    ran: bool
    measure: str | None
    value: float | None
    low: float | None
    high: float | None
    interval: str | None
    leak: bool | None
    verdict: str | None
    reason: str | None


@dataclass(frozen=True)
class ReleaseRow:
    """The releases of one field by one client under one protection, over the whole run."""

    run: str
    method: str
    seed: int
    client: int
    records: int
    field: str
    kind: str
    mechanism: str
    relation: str
    noise_multiplier: float
    sigma: float | None
    sensitivity: float | None
    clip: float | None
    claim: float | None
    releases: int
    epsilon_of_kind: float | None  # all releases of the kind together
    delta: float
    condition: str | None
    seen_by: str


AnyRow = RunRow | RoundRow | AttackRow | ReleaseRow


class Tables:
    """The runs below a folder. `runs`, `rounds`, `attacks` and `releases` are data frames; `rows` are typed."""

    names = ("runs", "rounds", "attacks", "releases")

    def __init__(self, found: Sequence[Run], folder: Path, problems: dict[str, str] | None = None):
        self.problems = problems or {}  # runs that could not be read, with the reason
        self._found = [(name_of(run, folder), run) for run in found]

    @cached_property
    def rows(self) -> dict[str, list[AnyRow]]:
        """Return the rows by table."""
        return {
            "runs": [_run_row(name, run) for name, run in self._found],
            "rounds": [row for name, run in self._found for row in _round_rows(name, run.record)],
            "attacks": [row for name, run in self._found for row in _attack_rows(name, run.record)],
            "releases": [row for name, run in self._found for row in _release_rows(name, run.record)],
        }

    @property
    def runs(self) -> pd.DataFrame:
        return self._frame("runs")

    @property
    def rounds(self) -> pd.DataFrame:
        return self._frame("rounds")

    @property
    def attacks(self) -> pd.DataFrame:
        return self._frame("attacks")

    @property
    def releases(self) -> pd.DataFrame:
        return self._frame("releases")

    def _frame(self, table: str) -> pd.DataFrame:
        try:
            import pandas as pd
        except ImportError:
            raise SettingError(f"Tables as data frames need pandas: {install('pandas')}.") from None
        return pd.DataFrame([values_of(row) for row in self.rows[table]], columns=columns_of(table))

    def csv(self, table: str) -> str:
        """Return a table as CSV text. Unknown values are empty; infinity is `inf`."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = columns_of(table)
        writer.writerow(names)
        for row in self.rows[table]:
            values = values_of(row)
            writer.writerow(["" if values[name] is None else values[name] for name in names])
        return text.getvalue()


ROWS: dict[str, type] = {"runs": RunRow, "rounds": RoundRow, "attacks": AttackRow, "releases": ReleaseRow}


def columns_of(table: str) -> list[str]:
    names = [f.name for f in fields(ROWS[table]) if f.name != "more"]
    return names + ([m.in_table for m in metrics().values() if m.in_table not in names] if table == "runs" else [])


def values_of(row: AnyRow) -> dict[str, Any]:
    """Return the values of a row by column."""
    values = asdict(row)
    further = values.pop("more", {})
    return values | further


def tables_of(path: Path | str) -> Tables:
    """Return the tables of a run folder, or of all runs below the folder of an audit."""
    folder = Path(path)
    if not folder.is_dir():
        raise SettingError(f"There is no folder {folder}. Name a run, or the folder of an audit.")
    found, problems = read_runs(folder)
    return Tables(found, folder, problems)


def name_of(run: Run, folder: Path) -> str:
    """Return a run's name: its folder relative to the named one, or the named folder's own name."""
    below = run.folder.relative_to(folder).as_posix()
    return run.folder.resolve().name if below == "." else below.removeprefix("runs/")


# --- rows ------------------------------------------------------------------------------------------------------


def _run_row(name: str, run: Run) -> RunRow:
    record = run.record
    setting, chosen = record.setting, record.result.chosen
    within = accuracy_interval(record)
    figures: dict[str, Any] = {metric.in_table: metric.value(record) for metric in metrics().values()}
    own = [f.name for f in fields(RunRow)]  # metrics with a field of their own
    return RunRow(
        run=name,
        method=setting.method,
        dataset=setting.dataset,
        seed=setting.seed,
        privacy=privacy_text(setting.privacy),
        compress=setting.compress,
        status=record.status,
        rounds=len(record.rounds),
        clients=setting.clients,
        low=within[0] if within else None,
        high=within[1] if within else None,
        chosen_round=chosen.round if chosen else None,
        chosen_accuracy=chosen.test_score() if chosen else None,
        delta=largest_delta([record]) if any(client.entries for client in record.ledger) else None,
        leaks=sum(bool(_leak(result)) for result in record.attacks),
        up_payload=record.bytes("up"),
        up_wire=record.bytes("up", "wire"),
        down_payload=record.bytes("down"),
        down_wire=record.bytes("down", "wire"),
        device=record.device,
        started=record.started,
        finished=record.finished,
        digest=record.transcript_digest,
        **{name: value for name, value in figures.items() if name in own},
        more={name: value for name, value in figures.items() if name not in own},
    )


def _round_rows(name: str, record: RunRecord) -> list[RoundRow]:
    points = {point.round: point for point in record.curve}
    rows = []
    for row in record.rounds:
        point = points.get(row.round)
        rows.append(
            RoundRow(
                run=name,
                method=record.setting.method,
                seed=record.setting.seed,
                round=row.round,
                participants=len(row.participants),
                absent=len(row.absent),
                accuracy=point.accuracy if point else None,
                low=point.low if point else None,
                high=point.high if point else None,
                clients_mean=point.clients_mean if point else None,
                clients_std=point.clients_std if point else None,
                validation=row.utility.validation_score() if row.utility else None,
                up_payload=row.up_payload,
                up_wire=row.up_wire,
                down_payload=row.down_payload,
                down_wire=row.down_wire,
                wall_s=row.wall_s,
            )
        )
    return rows


def _attack_rows(name: str, record: RunRecord) -> list[AttackRow]:
    return [
        AttackRow(
            run=name,
            method=record.setting.method,
            seed=record.setting.seed,
            attack=result.attack,
            threat=result.threat,
            claims=None if isinstance(result, NotRun) else result.claims,
            blind=result.blind,
            ran=result.ran,
            measure=measure,
            value=estimate.value if estimate else None,
            low=estimate.low if estimate else None,
            high=estimate.high if estimate else None,
            interval=(estimate.interval or None) if estimate else None,
            leak=_leak(result),
            verdict=None if isinstance(result, NotRun) else result.verdict or None,
            reason=result.reason if isinstance(result, NotRun) else (estimate.reason or None) if estimate else None,
        )
        for result in record.attacks
        for measure, estimate in measures(result)
    ]


def measures(result: AnyResult) -> list[tuple[str | None, Estimate | None]]:
    """Return all that an attack measured over all clients together, by name, with the TPR at each FPR."""
    if isinstance(result, NotRun):
        return [(None, None)]
    found: list[tuple[str | None, Estimate | None]] = list(measures_of(result).items())
    if isinstance(result, MembershipResult):
        found += [(f"tpr_at_fpr_{at.fpr:g}", at) for at in result.pooled.tpr_at_fpr]
    return found


def _leak(result: AnyResult) -> bool | None:
    return None if isinstance(result, NotRun) else leak_of(result)


def _release_rows(name: str, record: RunRecord) -> list[ReleaseRow]:
    return [
        ReleaseRow(
            run=name,
            method=record.setting.method,
            seed=record.setting.seed,
            client=client.client,
            records=client.n,
            field=entry.field,
            kind=entry.kind,
            mechanism=entry.mechanism,
            relation=entry.relation,
            noise_multiplier=entry.noise_multiplier,
            sigma=entry.sigma,
            sensitivity=entry.sensitivity,
            clip=entry.clip,
            claim=entry.claim,
            releases=len(entry.rounds),
            epsilon_of_kind=client.by_kind.get(entry.kind),
            delta=client.delta,
            condition=entry.condition,
            seen_by=", ".join(client.observers.get(entry.kind, [])),
        )
        for client in record.ledger
        for entry in client.entries
    ]


def finite(values: dict[str, Any]) -> dict[str, float]:
    """Return the values that every tracker takes: numbers, without infinities and truth values."""
    kinds = {key: value for key, value in values.items() if isinstance(value, int | float)}
    return {k: float(v) for k, v in kinds.items() if not isinstance(v, bool) and math.isfinite(v)}
