"""Time, memory and FLOPs by phase.

A meter belongs to one party for one task. GPU time is taken with CUDA events, which cost no synchronisation
until the task is over.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass
class Span:
    """One phase of one party in one round. Phases nest: a task's wall time holds that of its fits."""

    party: str
    round: int
    phase: str
    wall_s: float
    gpu_s: float | None = None
    flops: int | None = None


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Meter:
    def __init__(self, party: str, t: int, device: torch.device, flops: bool = False):
        self.party, self.t, self.cuda, self.flops = party, t, device.type == "cuda", flops
        self.device = device
        self._spans: list[tuple[Span, Any]] = []
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else None
        counter = None
        if self.flops and phase in ("task", "round"):  # the outermost ones: a counter does not nest
            from torch.utils.flop_counter import FlopCounterMode

            counter = FlopCounterMode(display=False)
            counter.__enter__()
        if events:
            events[0].record()
        start = time.perf_counter()
        try:
            yield
        finally:
            span = Span(self.party, self.t, phase, time.perf_counter() - start)
            if events:
                events[1].record()
            if counter is not None:
                counter.__exit__(None, None, None)
                span.flops = counter.get_total_flops()
            self._spans.append((span, events))

    def close(self) -> list[Span]:
        """The spans, GPU time filled in. Waits for the device once."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        for span, events in self._spans:
            if events:
                span.gpu_s = events[0].elapsed_time(events[1]) / 1000
        return [span for span, _ in self._spans]

    def peak_gpu(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else None


class Timings:
    """Spans of a whole run, summed by side (server or client) and phase, and by round."""

    def __init__(self, rows: list[dict[str, Any]] | None = None, peak_rss_bytes: int = 0, peak_gpu_bytes: int = 0):
        self.rows: dict[tuple[str, str], dict[str, Any]] = {(r["party"], r["phase"]): dict(r) for r in rows or []}
        self.peak_rss_bytes, self.peak_gpu_bytes = peak_rss_bytes, peak_gpu_bytes

    def add(self, spans: list[Span], rss: int = 0, gpu: int | None = None) -> None:
        for span in spans:
            values = asdict(span)
            row = self.rows.setdefault(
                (span.party, span.phase),
                {"party": span.party, "phase": span.phase, "calls": 0, "wall_s": 0.0, "gpu_s": None, "flops": None},
            )
            row["calls"] += 1
            for key in ("wall_s", "gpu_s", "flops"):
                if values[key] is not None:
                    row[key] = (row[key] or 0) + values[key]
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
        self.peak_gpu_bytes = max(self.peak_gpu_bytes, gpu or 0)

    def table(self) -> list[dict[str, Any]]:
        return [self.rows[key] for key in sorted(self.rows)]
