"""Times, memory and operations, as the meter adds them up: with a clock and events whose figures are known."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from fedaudit.runtime import meter as module
from fedaudit.runtime.meter import Away, Meter, Span, Timing, Timings, peak_rss

CPU = torch.device("cpu")


class Event:
    """An event of a GPU that happened at a known moment."""

    def __init__(self, ms: float):
        self.ms = ms

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


@pytest.fixture
def clock(monkeypatch):
    """The meter's clock: it stands still until a test moves it."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_a_span_has_its_own_time_and_not_the_time_of_others(clock):
    """10 s pass. In two of its waits others worked for 3 s and 4 s, of which 1 s and 0.5 s were this party's."""
    meter = Meter("client 2", 7, CPU)
    meter.away(Away(wall_s=50.0))  # before the span: not its own
    with meter.span("task"):
        clock[0] += 6
        meter.away(Away(wall_s=3.0, share_s=1.0))
        with meter.span("fit"):
            clock[0] += 4
            meter.away(Away(wall_s=4.0, share_s=0.5))
    fit, task = meter.close()
    assert (task.party, task.round, task.phase) == ("client 2", 7, "task")
    assert task.wall_s == pytest.approx(10 - (3 - 1) - (4 - 0.5))
    assert fit.wall_s == pytest.approx(4 - (4 - 0.5))
    assert (task.gpu_s, task.flops) == (None, None)
    assert fit.peak_bytes is None, "of outermost phases only"
    assert task.peak_bytes > 0


def test_a_span_is_never_shorter_than_nothing(clock):
    meter = Meter("client 0", 1, CPU)
    with meter.span("task"):
        clock[0] += 1
        meter.away(Away(wall_s=3.0))
    assert meter.close()[0].wall_s == 0.0


def test_nothing_is_taken_off_where_nothing_was_said():
    away = Away()
    assert (away.wall_s, away.share_s, away.share, away.events, away.stack) == (0.0, 0.0, 0.0, None, None)


def test_a_rounds_own_time_is_without_its_clients(clock):
    meter = Meter("server", 3, CPU)
    with meter.span("round"):
        clock[0] += 10
        with meter.span("evaluation"):
            clock[0] += 2
    theirs = [Span("client 0", 3, "task", 2.5, 1.0, 30), Span("client 0", 3, "fit", 2.0, 1.0, 30)]
    meter.exclude(4.0, theirs, in_process=True)
    meter.exclude(1.0, [Span("client 1", 3, "encode", 0.5, 0.25, 4)], in_process=True)
    meter.exclude(0.5, theirs, in_process=False)
    assert meter.elsewhere.wall_s == pytest.approx(5.5)
    assert meter.elsewhere.gpu_s == pytest.approx(1.25), "a fit is part of its task"
    assert meter.elsewhere.flops == 34
    evaluation, whole = meter.close()
    assert whole.wall_s == pytest.approx(12 - 5.5)
    assert evaluation.wall_s == pytest.approx(2)


def test_a_rounds_operations_are_without_its_clients():
    meter = Meter("server", 1, CPU, flops=True)
    with meter.span("round"):
        torch.ones(2, 3) @ torch.ones(3, 5)
        with meter.span("sum"):
            pass
    meter.exclude(0.0, [Span("client 0", 1, "task", 0.0, None, 7)], in_process=True)
    inner, whole = meter.close()
    assert whole.flops == 2 * 2 * 3 * 5 - 7
    assert inner.flops is None


def test_seconds_of_a_gpu_are_between_its_two_events():
    assert module._elapsed((Event(500.0), Event(2750.0))) == pytest.approx(2.25)
    assert module._elapsed(None) == 0.0


@pytest.fixture
def gpu(monkeypatch):
    """A meter's GPU whose clock, in ms, stands still until a test moves it. `calls` has what else was asked of it."""
    now, calls = [0.0], []

    class Timed(Event):
        def __init__(self, enable_timing=False):
            assert enable_timing, "an event of a GPU has no time otherwise"
            super().__init__(-1.0)

        def record(self, stream):
            self.ms = now[0]

    monkeypatch.setattr(torch.cuda, "Event", Timed)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("waited"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    return now, calls


def test_gpu_time_is_without_the_others_share_of_a_stack(gpu):
    """8 s in all. It waited 5 s, in which a stack was trained for 4 s, a quarter of it for this party."""
    now, calls = gpu
    meter = Meter("client 0", 1, torch.device("cuda"))
    now[0] = 500.0
    with meter.span("task"):
        now[0] += 8000
        with meter.span("fit"):
            meter.away(Away(events=(Event(1000.0), Event(6000.0)), stack=(Event(1500.0), Event(5500.0)), share=0.25))
    assert calls == ["reset"]
    fit, task = meter.close()
    assert calls == ["reset", "waited"]
    assert task.gpu_s == pytest.approx(8 - (5 - 0.25 * 4))
    assert fit.gpu_s == 0.0, "never less than nothing"
    assert task.peak_bytes == meter.peak_gpu() == 123


def test_gpu_time_of_a_round_is_without_its_clients(gpu):
    meter = Meter("server", 1, torch.device("cuda"))
    with meter.span("round"):
        gpu[0][0] += 9000
    meter.exclude(0.0, [Span("client 0", 1, "task", 0.0, 2.5)], in_process=True)
    assert meter.close()[0].gpu_s == pytest.approx(6.5)
    meter.exclude(0.0, [Span("client 0", 1, "task", 0.0, 8.5)], in_process=True)
    assert meter.close()[0].gpu_s == 0.0
    assert Meter("server", 1, CPU).peak_gpu() is None


def test_work_that_was_done_before_is_billed_and_not_taken_from_the_server(gpu):
    """A client takes 2 s and is billed for 3 s that another one took. The server waited for 2 of its 9 s."""
    now, _ = gpu
    client, server = (Meter(name, 1, torch.device("cuda")) for name in ("client 0", "server"))
    with client.span("task"):
        now[0] += 2000
        client.away(Away(share_s=0.5, stack=(Event(1000.0), Event(4000.0)), share=1.0, done_before=True))
        client.away(Away(events=(Event(0.0), Event(0.0)), stack=(Event(0.0), Event(400.0)), share=0.25))
    (task,) = client.close()
    assert (task.gpu_s, task.done_before_s) == (pytest.approx(2 + 3 + 0.1), pytest.approx(3.0))
    assert task.wall_s == pytest.approx(0.5, abs=0.4)
    with server.span("round"):
        now[0] += 9000
    server.exclude(0.0, [task], in_process=True)
    assert server.close()[0].gpu_s == pytest.approx(9 - 2.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_in_bytes():
    """The kernel says it too, in kB; its two counters differ by some pages."""
    said = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert said is not None
    assert peak_rss() == pytest.approx(1024 * int(said[1]), rel=0.05)


def test_spans_add_up_and_the_peak_is_the_highest():
    timing = Timing(party="client 1", phase="task")
    timing.add(Span("client 1", 1, "task", 1.5))
    assert (timing.calls, timing.wall_s) == (1, 1.5)
    assert (timing.gpu_s, timing.flops, timing.peak_bytes) == (None, None, None), "not measured is not nothing"
    timing.add(Span("client 1", 2, "task", 2.0, 0.5, 10, 300))
    timing.add(Span("client 1", 3, "task", 0.25, 0.75, 32, 200))
    assert (timing.calls, timing.wall_s, timing.gpu_s) == (3, 3.75, 1.25)
    assert (timing.flops, timing.peak_bytes) == (42, 300)


def test_the_table_is_by_party_and_phase():
    timings = Timings([Timing(party="server", phase="round", calls=2, wall_s=3.0)], peak_rss_bytes=50)
    rows = [Span("server", 3, "round", 1.0), Span("client 1", 3, "task", 2.0), Span("client 0", 3, "task", 4.0)]
    timings.add(rows, rss=40, gpu=9)
    timings.add([Span("client 1", 4, "task", 0.5)], rss=60, gpu=7)
    timings.add([], rss=55)
    assert [(row.party, row.phase, row.calls, row.wall_s) for row in timings.table()] == [
        ("client 0", "task", 1, 4.0), ("client 1", "task", 2, 2.5), ("server", "round", 3, 4.0),
    ]  # fmt: skip
    assert (timings.peak_rss_bytes, timings.peak_gpu_bytes) == (60, 9)


def test_peaks_begin_at_nothing() -> None:
    timings = Timings()
    assert (timings.peak_rss_bytes, timings.peak_gpu_bytes) == (0, 0)
    timings.add([], rss=5, gpu=None)
    timings.add([], rss=3, gpu=2)
    assert (timings.peak_rss_bytes, timings.peak_gpu_bytes) == (5, 2)


def test_a_party_that_did_not_wait_was_away_for_no_time():
    away = Away()
    assert (away.wall_s, away.share_s, away.share, away.events, away.stack) == (0.0, 0.0, 0.0, None, None)
