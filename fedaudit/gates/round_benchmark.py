"""Rounds of a run as the samples of a benchmark, and their cost beside them.

A sample is one round after the first, from the first message until its state is handed to the disk. Writing goes on
behind it, as in any run. Opening the run, the first round (in which steps are recorded or compiled) and evaluation are
not part of any sample. FLOPs are counted in a run of their own, because counting takes time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from fedaudit.errors import SettingError
from fedaudit.gates.finding import Finding
from fedaudit.gates.in_turns import FEWEST, LOOKS, Compared, Pairs, Turns, compared, without_garbage
from fedaudit.metrics.cost import OUTER
from fedaudit.runtime.meter import peak_rss
from fedaudit.runtime.run_record import RunRecord
from fedaudit.runtime.runner import RoundByRound, run
from fedaudit.runtime.world import on_gpu, world_of
from fedaudit.setting import Setting
from fedaudit.units import bytes_text

ROUNDS = 10  # samples of a comparison, unless the caller says otherwise
HORIZON = 10_000  # rounds of a run whose number of samples pytest-benchmark chooses
COUNTED = 2  # rounds of the run in which FLOPs are counted
Reference = str | Mapping[str, Any] | Setting


class Samples(Protocol):
    """The part of pytest-benchmark's fixture that is used here."""

    disabled: bool
    extra_info: dict[str, Any]

    def __call__(self, function_to_benchmark: Any) -> Any: ...
    def pedantic(self, target: Any, *, setup: Any = None, teardown: Any = None, rounds: int = 1) -> Any: ...


@dataclass(frozen=True)
class RoundCosts:
    """The cost of one round: means over the rounds after the first, and of what conditions they are."""

    bytes_up: float  # payload of all clients, as the papers count it
    bytes_down: float
    wire_up: float  # bytes that were really sent
    wire_down: float
    gpu_s: float | None  # by CUDA events; None without a GPU
    flops: float | None  # of clients and server; None if they were not counted
    peak_host_bytes: int  # of the whole process
    peak_gpu_bytes: int | None
    round_s: float | None  # median, without waiting for other processes; None where benchmarks are disabled
    samples_per_s: float | None  # records of the clients that took part, each counted once a round
    opening_s: float
    first_round_s: float
    engine: str
    step: str
    precision: str
    device: str


@dataclass(frozen=True)
class Benchmarked:
    """A benchmark's result: the costs of a round, and those of the reference with the ratio of times."""

    record: RunRecord
    costs: RoundCosts
    reference: RunRecord | None = None
    reference_costs: RoundCosts | None = None
    compared: Compared | None = None  # None without a reference, or where benchmarks are disabled


@dataclass(frozen=True)
class Limits:
    """The most that a round may take, as multiples of the reference's."""

    max_ratio: float | None = None  # time
    max_bytes_ratio: float | None = None
    max_flops_ratio: float | None = None

    def check(self, reference: Reference | None) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name, value in given.items():
            if reference is None:
                raise SettingError(
                    f"{name} = {value}: give relative_to= as well: the name of another method, or a table of settings."
                )
            if not 0 < value < float("inf"):
                raise SettingError(f"{name} = {value} is not a ratio. Give a number above 0, such as 1.2.")


class _Side:
    """A run taken round by round, and when it was opened and warm."""

    def __init__(self, setting: Setting, folder: Path):
        self.setting, self.folder = setting, folder
        self.opening_s = self.first_round_s = 0.0

    def open(self, closing: ExitStack) -> None:
        begun = time.perf_counter()
        self.run = closing.enter_context(RoundByRound(self.setting, self.folder))
        opened = time.perf_counter()
        self.run.round()
        self.opening_s, self.first_round_s = opened - begun, time.perf_counter() - opened
        self.gpu_before = _gpu_seconds(self.run.record)

    def costs(self, seconds: float | None, flops: float | None, peak: int) -> RoundCosts:
        record = self.run.record
        rounds = record.rounds[1:] or record.rounds
        n = len(rounds)
        setting = record.setting
        gpu = _gpu_seconds(record)
        trained = sum(record.data.members[k] for row in rounds for k in row.participants) / n
        stepped = setting.step if setting.step != "auto" else "recorded"
        return RoundCosts(
            bytes_up=sum(row.up_payload for row in rounds) / n,
            bytes_down=sum(row.down_payload for row in rounds) / n,
            wire_up=sum(row.up_wire for row in rounds) / n,
            wire_down=sum(row.down_wire for row in rounds) / n,
            gpu_s=None if gpu is None or self.gpu_before is None else (gpu - self.gpu_before) / n,
            flops=flops,
            peak_host_bytes=peak,
            peak_gpu_bytes=record.peak_gpu_bytes or None,
            round_s=seconds,
            samples_per_s=trained / seconds if seconds else None,
            opening_s=round(self.opening_s, 4),
            first_round_s=round(self.first_round_s, 4),
            engine=setting.engine,
            step=stepped if on_gpu(setting) else "eager",
            precision=setting.precision,
            device=record.device,
        )


def _gpu_seconds(record: RunRecord) -> float | None:
    found = [row.gpu_s for row in record.timings if row.phase in OUTER and row.gpu_s is not None]
    return sum(found) if found else None


def reference_of(setting: Setting, relative_to: Reference) -> Setting:
    """Return the setting of the reference: `setting` with another method, or with whatever else is named.

    Where the reference is another method and `set` is not given, the hyper-parameters that both have by the same name
    are equal, so that both train alike.
    """
    if isinstance(relative_to, Setting):
        return relative_to.model_copy(update={"rounds": setting.rounds})
    changes: dict[str, Any] = {"method": relative_to} if isinstance(relative_to, str) else dict(relative_to)
    other = changes.get("method", setting.method) != setting.method
    if other and "set" not in changes:
        ours = world_of(setting.model_dump_json()).method
        known = type(world_of(_default(setting, changes).model_dump_json()).method).model_fields
        changes["set"] = {name: value for name, value in ours.model_dump().items() if name in known}
    if other:
        changes.setdefault("preset", None)
    return Setting.make(**{**setting.model_dump(), **changes})


def _default(setting: Setting, changes: Mapping[str, Any]) -> Setting:
    return Setting.make(**{**setting.model_dump(), **changes, "set": {}, "preset": None})


def counted_flops(setting: Setting, folder: Path) -> float:
    """Return the FLOPs of one round, of clients and server together: the mean of the first rounds of a run."""
    record = run(
        setting.model_copy(
            update={
                "rounds": COUNTED, "eval_every": COUNTED, "eval_clients": False, "flops": True, "engine": "serial",
                "step": "eager",
            }
        ),
        out=folder,
    )  # fmt: skip
    counted = [row.flops for row in record.timings if row.phase in ("task", "round") and row.flops is not None]
    return sum(counted) / COUNTED


def benchmark_rounds(
    samples: Samples,
    values: Mapping[str, Any],
    folder: Path,
    *,
    rounds: int | None = None,
    relative_to: Reference | None = None,
    limits: Limits | None = None,
    flops: bool = True,
) -> Benchmarked:
    """Time rounds of a setting as the samples of a benchmark, in turns with a reference if there is one.

    Without a reference and without `rounds`, pytest-benchmark chooses how many rounds there are. With a reference it
    is `rounds` at first, and up to 16 times as many where the verdict on the time cannot be told before.
    """
    limits = limits or Limits()
    limits.check(relative_to)
    if limits.max_flops_ratio is not None and not flops:
        raise SettingError("max_flops_ratio needs FLOPs that are counted: leave out flops=False.")
    if relative_to is not None:
        rounds = ROUNDS if rounds is None else rounds
        if limits.max_ratio is not None and rounds < FEWEST:
            raise SettingError(f"rounds = {rounds} are too few to gate a ratio: give {FEWEST} at least.")
    elif rounds is not None and rounds < 1:
        raise SettingError(f"rounds = {rounds}: at least one round is timed.")
    most = HORIZON if rounds is None else 2 + rounds * (1 if relative_to is None else 2 ** (LOOKS - 1))
    setting = Setting.make(**{**values, "rounds": most})
    sides = [_Side(setting, folder / "ours")]
    if relative_to is not None:
        sides.append(_Side(reference_of(setting, relative_to), folder / "reference"))
    counts = [counted_flops(side.setting, side.folder.with_name(f"{side.folder.name}-flops")) if flops else None
              for side in sides]  # fmt: skip
    _forget_peak()
    with ExitStack() as closing:
        for side in sides:
            side.open(closing)
        with without_garbage():
            pairs = _sample(samples, [side.run for side in sides], rounds, limits.max_ratio)
        peak = _peak()
        measured = len(pairs.ours) > 1 or not samples.disabled
        found = compared(pairs.ratios, limits.max_ratio) if len(sides) > 1 and measured else None
        medians = [statistics.median(times) if times and measured else None for times in (pairs.ours, pairs.theirs)]
        costs = [side.costs(seconds, n, peak) for side, seconds, n in zip(sides, medians, counts, strict=False)]
        records = [side.run.record for side in sides]
    samples.extra_info |= asdict(costs[0])
    if len(sides) == 1:
        return Benchmarked(records[0], costs[0])
    samples.extra_info |= {"relative_to": records[1].setting.method, "reference": asdict(costs[1])}
    if found is not None:
        samples.extra_info |= {
            "ratio": found.ratio.value, "ratio_low": found.ratio.low, "ratio_high": found.ratio.high,
            "max_ratio": limits.max_ratio, "told": found.told, "rounds_to_tell": found.rounds_to_tell,
            "ratios": [round(ratio, 4) for ratio in pairs.ratios],
        }  # fmt: skip
    return Benchmarked(records[0], costs[0], records[1], costs[1], found)


def _sample(samples: Samples, runs: list[RoundByRound], rounds: int | None, max_ratio: float | None) -> Pairs:
    """Time the rounds and return their seconds, those of the reference beside them."""

    def rest() -> None:
        for one in runs:
            one.settle()

    turns = Turns(runs[0].round, runs[-1].round, rest)
    if len(runs) == 1:
        if rounds is None:
            samples(turns.sample)
        else:
            samples.pedantic(turns.sample, setup=rest, rounds=rounds)
        return turns.pairs
    assert rounds is not None  # a comparison always has a number of rounds
    samples.pedantic(turns.sample, setup=turns.before, teardown=lambda *_: turns.after(), rounds=rounds)
    if samples.disabled:
        return turns.pairs
    for look in range(LOOKS - 1):
        if max_ratio is None or compared(turns.pairs.ratios, max_ratio).told != "cannot be told":
            break
        turns.more(rounds * 2**look)
    return turns.pairs


def findings(found: Benchmarked, limits: Limits) -> list[Finding]:
    """Hold a benchmark against its limits: the time by its interval, bytes and FLOPs as they are."""
    made = []
    if found.compared is not None and limits.max_ratio is not None:
        made.append(_time(found, found.compared))
    if found.reference_costs is None:
        return made
    ours, theirs = found.costs, found.reference_costs
    if limits.max_bytes_ratio is not None:
        pair = ours.bytes_up + ours.bytes_down, theirs.bytes_up + theirs.bytes_down
        named = max(found.record.traffic, key=lambda row: row.payload, default=None)
        more = f"; the largest field is {named.direction} {named.field}" if named else ""
        made.append(_exact("bytes", "sends", pair, limits.max_bytes_ratio, found, more, bytes_text))
    if limits.max_flops_ratio is not None:
        flops = float(ours.flops or 0), float(theirs.flops or 0)
        made.append(_exact("flops", "computes", flops, limits.max_flops_ratio, found, "", lambda n: f"{n:.4g} FLOPs"))
    return made


def _names(found: Benchmarked) -> tuple[str, str]:
    assert found.reference is not None
    ours, theirs = found.record.setting.method, found.reference.setting.method
    return ours, theirs if theirs != ours else "the reference"


def _time(found: Benchmarked, ratio: Compared) -> Finding:
    ours, theirs = _names(found)
    assert ratio.limit is not None
    text = (
        f"{ours}: a round takes {ratio.shown()} times as long as one of {theirs} ({ratio.ratio.n} pairs of rounds in "
        f"turns), the limit {ratio.limit:g}"
    )
    if ratio.told == "broken":
        text += f" ({(ratio.ratio.value or 0.0) / ratio.limit - 1:.1%} over)"
    elif ratio.told == "cannot be told":
        text += ": the interval spans the limit, so it cannot be told"
        if ratio.rounds_to_tell:
            text += f"; about {ratio.rounds_to_tell:,} rounds would tell (rounds={ratio.rounds_to_tell})"
    return Finding("max_ratio", ratio.told, text + ".")


def _exact(
    what: str, does: str, pair: tuple[float, float], limit: float, found: Benchmarked, more: str, show: Any
) -> Finding:
    ours, theirs = _names(found)
    gate = f"max_{what}_ratio"
    if pair[1] == 0:
        raise SettingError(f"{gate}: {theirs} {does} nothing in a round, so there is no ratio. Choose another one.")
    ratio = pair[0] / pair[1]
    text = (
        f"{ours}: a round {does} {show(pair[0])}, {ratio:.4g} times the {show(pair[1])} of {theirs}, the limit "
        f"{limit:g}"
    )
    if ratio <= limit * (1 + 1e-12):
        return Finding(gate, "kept", text + ".")
    return Finding(gate, "broken", f"{text} ({ratio / limit - 1:.1%} over){more}.")


def _forget_peak() -> None:
    """Forget the process's peak of memory, where the system can: what came before is not this benchmark's."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak() -> int:
    """Return the process's peak of memory in bytes, since it was forgotten if the system can do that."""
    with suppress(OSError, StopIteration, IndexError, ValueError), open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return peak_rss()
