"""Metrics of cost: bytes, work, time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedaudit.metrics.metric import Metric, Records, register
from fedaudit.metrics.utility import accuracy, accuracy_interval
from fedaudit.runtime.run_record import RunRecord
from fedaudit.units import UNITS

OUTER = ("decode", "task", "protect", "encode", "round")  # phases that contain all others

# --- bytes -------------------------------------------------------------------------------------------------------


def asked(record: RunRecord) -> int:
    """Return how often clients took part in rounds, in total."""
    return sum(len(row.participants) for row in record.rounds)


def _bytes(direction: str) -> Callable[[RunRecord], float | None]:
    return lambda record: record.bytes(direction) / asked(record) if asked(record) else None


def per_byte(record: RunRecord) -> float | None:
    """Return the percent of accuracy per megabyte that the clients sent in the whole run."""
    reached, sent = accuracy(record), record.bytes("up")
    return None if reached is None or not sent else 100 * reached / (sent / UNITS["MB"])


def _per_byte_interval(record: RunRecord) -> tuple[float, float, str] | None:
    """Return the interval of the accuracy, scaled as the figure is."""
    value, reached, within = per_byte(record), accuracy(record), accuracy_interval(record)
    if value is None or within is None:
        return None
    scale = value / reached if reached else 1.0
    return scale * within[0], scale * within[1], within[2]


def _nothing_compressed(records: Records) -> str:
    compressed = any(record.setting.compress for record in records)
    return "" if compressed else "no run compresses what clients send"


register(
    Metric(
        "up", "Up", "Cost", "bytes", "low", False,
        "Bytes that one client sends in one round, counted as papers do: number of values times their size.",
        _bytes("up"), line=False,
    )
)  # fmt: skip
register(
    Metric(
        "down", "Down", "Cost", "bytes", "low", False,
        "Bytes that one client receives in one round, counted the same way.",
        _bytes("down"), line=False,
    )
)  # fmt: skip
register(
    Metric(
        "per_byte", "Accuracy per MB up", "Cost", "points", "high", True,
        "Accuracy after the last round, in percent, for each megabyte that all clients together sent in the whole run. "
        "Shown if a run of the report compresses what clients send.",
        per_byte, interval=_per_byte_interval, left_out=_nothing_compressed, line=False,
    )
)  # fmt: skip

# --- work, time and memory ---------------------------------------------------------------------------------------


def uses_gpu(record: RunRecord) -> bool:
    return any(row.gpu_s is not None for row in record.timings)


def _device(records: Records) -> str:
    return "GPU" if uses_gpu(records[0]) else "CPU"


def seconds(record: RunRecord) -> float | None:
    """Return the seconds of all parties' work, without evaluation."""
    gpu = uses_gpu(record)
    outer = [row for row in record.timings if row.phase in OUTER]
    return math.fsum((row.gpu_s if gpu else row.wall_s) or 0.0 for row in outer) if outer else None


def flops(record: RunRecord) -> int | None:
    counted = [row.flops for row in record.timings if row.phase == "task" and row.flops is not None]
    return sum(counted) if counted else None


def _uncounted(record: RunRecord) -> str:
    counted = flops(record) is not None
    return "" if counted else "A budget on FLOPs needs a run that counted them: fedaudit run --flops."


register(
    Metric(
        "flops", "FLOPs", "Cost", "count", "low", False,
        "Floating-point operations of all clients' tasks, in runs that counted them.",
        flops, refusal=_uncounted, column=False, line=False,
    )
)  # fmt: skip
register(
    Metric(
        "seconds", "Compute", "Cost", "seconds", "low", True,
        "Seconds of all clients' and the server's work, without evaluation: on the GPU if there is one, otherwise "
        "of one CPU thread. It depends on the machine as much as on the method.",
        seconds, machine=True, detail=_device, line=False, budget="time",
    )
)  # fmt: skip
MEMORY = register(
    Metric(
        "memory", "Peak memory", "Cost", "bytes", "low", True,
        "Most memory in use: on the GPU if there is one, otherwise of the process, and then earlier runs of the same "
        "process count, too.",
        lambda record: record.peak_gpu_bytes or record.peak_rss_bytes or None, machine=True, detail=_device,
        folded=True, line=False, table="peak_memory", budget="peak_memory",
    )
)  # fmt: skip
