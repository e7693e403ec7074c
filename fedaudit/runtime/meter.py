"""The meter measures time, memory and FLOPs by phase.

A meter belongs to one party for one task. GPU time is taken with CUDA events, which cost no synchronisation until the
task is over.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fedaudit.stored_model import StoredModel


@dataclass
class Span:
    """One phase of one party in one round. Phases nest: a task's wall time holds that of its fits."""

    party: str
    round: int
    phase: str
    wall_s: float
    gpu_s: float | None = None
    flops: int | None = None
    peak_bytes: int | None = None  # outermost phases only: memory on the GPU if there is one, else of the process
    done_before_s: float = 0.0  # of gpu_s: what another party's task had done already


class Timing(StoredModel):
    """The spans of one party and phase over a whole run, summed; None for what was not measured."""

    party: str
    phase: str
    calls: int = 0
    wall_s: float = 0.0
    gpu_s: float | None = None
    flops: int | None = None
    peak_bytes: int | None = None

    def add(self, span: Span) -> None:
        self.calls += 1
        self.wall_s += span.wall_s
        if span.gpu_s is not None:
            self.gpu_s = (self.gpu_s or 0.0) + span.gpu_s
        if span.flops is not None:
            self.flops = (self.flops or 0) + span.flops
        if span.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, span.peak_bytes)


@dataclass
class Away:
    """The time in which a party waited for others, and its share of the training that it waited for."""

    wall_s: float = 0.0
    share_s: float = 0.0
    events: tuple[Any, Any] | None = None  # on a GPU: events before and after the waiting
    stack: tuple[Any, Any] | None = None  # on a GPU: events before and after the training of the whole stack
    share: float = 0.0  # this party's share of the stack
    done_before: bool = False  # the work was done in another party's task, and this one is billed for it as well


def _elapsed(events: tuple[Any, Any] | None) -> float:
    return float(events[0].elapsed_time(events[1])) / 1000 if events else 0.0


def peak_rss() -> int:
    """Return the peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Meter:
    def __init__(self, party: str, t: int, device: torch.device, flops: bool = False):
        self.party, self.t, self.cuda, self.flops = party, t, device.type == "cuda", flops
        self.device = device
        self._spans: list[tuple[Span, Any, list[Away]]] = []
        self._aways: list[Away] = []
        self.elsewhere = Span(party, t, "elsewhere", 0.0, 0.0, 0)  # what others did inside this one's phases
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else None
        counter = None
        if self.flops and phase in ("task", "round"):  # only the outermost phases: a counter does not nest
            from torch.utils.flop_counter import FlopCounterMode

            counter = FlopCounterMode(display=False)
            counter.__enter__()
        if events:
            events[0].record(torch.cuda.current_stream(self.device))
        start, first = time.perf_counter(), len(self._aways)
        try:
            yield
        finally:
            aways = self._aways[first:]
            wall = time.perf_counter() - start - sum(away.wall_s - away.share_s for away in aways)
            span = Span(self.party, self.t, phase, max(0.0, wall))
            if events:
                events[1].record(torch.cuda.current_stream(self.device))
            if counter is not None:
                counter.__exit__(None, None, None)
                span.flops = counter.get_total_flops()
            self._spans.append((span, events, aways))

    def close(self) -> list[Span]:
        """Return the spans with GPU time filled in. This waits for the device once."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        for span, events, aways in self._spans:
            if events:
                span.gpu_s = max(
                    0.0, _elapsed(events) - sum(_elapsed(a.events) - a.share * _elapsed(a.stack) for a in aways)
                )
                span.done_before_s = sum(a.share * _elapsed(a.stack) for a in aways if a.done_before)
            if span.phase in ("task", "round"):
                span.peak_bytes = self.peak_gpu() if self.cuda else peak_rss()
            if span.phase == "round":
                span.wall_s = max(0.0, span.wall_s - self.elsewhere.wall_s)
                if span.gpu_s is not None:
                    span.gpu_s = max(0.0, span.gpu_s - (self.elsewhere.gpu_s or 0.0))
                if span.flops is not None:
                    span.flops -= self.elsewhere.flops or 0
        return [span for span, _, _ in self._spans]

    def away(self, away: Away) -> None:
        """Note that others worked for some time inside the phases that are open, and this party's share of it."""
        self._aways.append(away)

    def exclude(self, wall_s: float, spans: list[Span], in_process: bool) -> None:
        """Take out the time that a round spent waiting for clients, and their work if it ran in this process: both are
        theirs."""
        self.elsewhere.wall_s += wall_s
        for span in spans if in_process else ():
            if span.phase in ("decode", "task", "protect", "encode"):
                self.elsewhere.gpu_s = (self.elsewhere.gpu_s or 0.0) + (span.gpu_s or 0.0) - span.done_before_s
                self.elsewhere.flops = (self.elsewhere.flops or 0) + (span.flops or 0)

    def peak_gpu(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else None


class Timings:
    """The spans of a whole run, summed by party and phase."""

    def __init__(self, rows: Iterable[Timing] = (), peak_rss_bytes: int = 0, peak_gpu_bytes: int = 0):
        self.rows = {(row.party, row.phase): row.model_copy() for row in rows}
        self.peak_rss_bytes, self.peak_gpu_bytes = peak_rss_bytes, peak_gpu_bytes

    def add(self, spans: list[Span], rss: int = 0, gpu: int | None = None) -> None:
        for span in spans:
            self.rows.setdefault((span.party, span.phase), Timing(party=span.party, phase=span.phase)).add(span)
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
        self.peak_gpu_bytes = max(self.peak_gpu_bytes, gpu or 0)

    def table(self) -> list[Timing]:
        return [self.rows[key] for key in sorted(self.rows)]
