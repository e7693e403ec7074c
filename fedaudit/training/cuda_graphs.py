"""Recorded steps. On a GPU a step of a small network is many small kernels, and starting them costs more than running
them. A CUDA graph starts all of them at once: the same kernels on the same memory, so the same bits.

A recorded step has fixed shapes. An epoch's last batch may be smaller; it is done eagerly beside the recording. Steps
that cannot be recorded (a loss that asks the device for a value, dropout) are done eagerly too, and `unrecorded` keeps
the reason.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.cuda_streams import capture_stream

Stepping = Literal["eager", "recorded", "compiled"]
WORTH_IT = 8  # steps from which recording pays: it takes about as long as five of them
SPARE = 4 << 30  # bytes that may lie idle in torch's cache
WARM_UP = 3  # runs before a recording, in which libraries choose kernels and get their memory
MEMORY_FULL = "the GPU's memory was full, so recordings of earlier trainings had to go"
EMPTY = "CUDA Graph is empty"  # what torch warns of when a capture has seen no work


class _Conditions:
    """The way in which steps are carried out, and their precision. A run's setting sets them for the whole run."""

    stepping: Stepping = "eager"
    bf16: bool = False
    stacked: bool = False
    warm_ups: int = WARM_UP
    pool: Any = None


_now = _Conditions()
unrecorded: dict[str, None] = {}  # reasons, in the order in which they came up
_listeners: list[Callable[[str], None]] = []
holders: list[Callable[[], int]] = []  # each says how many bytes its recordings hold, which no emptying gives back


_each_run: list[Callable[[], object]] = [lambda: unrecorded.clear()]


def each_run(forget: Callable[[], object]) -> None:
    """Have something forgotten whenever a run begins, so that neither its speed nor its bits, nor what is told of them,
    depend on what the process ran before.
    """
    _each_run.append(forget)


def begin_run() -> None:
    """Forget what earlier runs of this process have left."""
    for forget in _each_run:
        forget()


def fall_back(reason: str) -> None:
    """Keep the reason why steps are carried out in a slower way, and tell each listener once for each reason."""
    if reason not in unrecorded:
        unrecorded[reason] = None
        for tell in _listeners:
            tell(reason)


@contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` with the reason, within this context, as soon as steps are carried out in a slower way."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


@contextmanager
def conditions(stepping: Stepping, bf16: bool = False, stacked: bool = False) -> Iterator[None]:
    before = _now.stepping, _now.bf16, _now.stacked
    _now.stepping, _now.bf16, _now.stacked = stepping, bf16, stacked
    try:
        yield
    finally:
        _now.stepping, _now.bf16, _now.stacked = before


def compiles() -> bool:
    return _now.stepping == "compiled"


def precision(device: torch.device) -> Any:
    """Return the context of a forward pass.

    It is bfloat16 if the setting says so; parameters and sums stay as they are.
    """
    return torch.autocast(device.type, torch.bfloat16) if _now.bf16 else nullcontext()


def stacks_networks() -> bool:
    """Return whether networks of one architecture are run as one (training.many)."""
    return _now.stacked


def halves() -> torch.dtype | None:
    """Return the type in which a stack's forward pass computes, or None if that is the type of its tensors.

    A stack needs this because autocast does not reach into it.
    """
    return torch.bfloat16 if _now.bf16 else None


def records_steps(device: torch.device) -> bool:
    """Return whether steps are recorded on this device at all."""
    return _now.stepping != "eager" and _records(device)


def recordable(model: nn.Module, device: torch.device, steps: int) -> bool:
    """Return whether so many steps of a model are to be recorded on this device."""
    if not records_steps(device):
        return False
    if any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules()):
        fall_back("dropout draws in each step")
        return False
    return steps >= WORTH_IT


def _records(device: torch.device) -> bool:
    return device.type == "cuda"


Outputs = list[Tensor | None]


class Recording:
    """A recorded step without arguments.

    `state` holds the tensors that the step changes; recording leaves them as they were. `outputs` holds the tensors
    that the step returned: the same memory each time, with new content.
    """

    def __init__(self, step: Callable[[], Outputs], state: Sequence[Tensor]):
        before = [t.detach().clone() for t in state]
        try:
            self._replay, self.outputs = _capture(step)
        finally:
            with torch.no_grad():
                for t, kept in zip(state, before, strict=True):
                    t.copy_(kept)

    def __call__(self) -> None:
        self._replay()


_warm: set[Any] = set()  # the `like` of steps that were recorded before


def record(step: Callable[[], Outputs], state: Sequence[Tensor], like: Any = None) -> Recording | None:
    """Return the recording, or None if it cannot be made; the reason is then kept.

    `like` is equal for steps that are alike. For the first of them libraries choose their kernels in several runs; the
    others run once and are recorded.
    """
    _now.warm_ups = 1 if like in _warm else WARM_UP
    try:
        made = Recording(step, state)
        if like is not None:
            _warm.add(like)
        return made
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # noqa: BLE001 (whatever CUDA or torch has against it: an eager step says what is wrong)
        fall_back(f"{type(e).__name__}: {e}".splitlines()[0])
        return None


def shared(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def record_giving_back(
    step: Callable[[], Outputs], state: Sequence[Tensor], device: torch.device, like: Any = None
) -> Recording | None:
    """Record as `record` does, and put the device's global generator back to where it was before."""
    generator = shared(device)
    drawn = generator.get_state()
    made = record(step, state, like)
    generator.set_state(drawn)
    return made


@contextmanager
def sharing(pool: Any) -> Iterator[None]:
    """Let recordings that are made within this context use one memory. They must never be replayed at the same time."""
    before, _now.pool = _now.pool, pool
    try:
        yield
    finally:
        _now.pool = before


def new_pool(device: torch.device) -> Any:
    """Return a memory that several recordings may share; None where nothing is recorded."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def timed(recording: Recording, state: Sequence[Tensor], times: int = 5) -> float:
    """Return the seconds that so many replays take. The state is as it was afterwards."""
    before = [t.detach().clone() for t in state]
    took = clocked(recording, times)
    with torch.no_grad():
        for t, kept in zip(state, before, strict=True):
            t.copy_(kept)
    return took


def clocked(work: Callable[[], Any], times: int = 5) -> float:
    """Return the seconds that so many calls take, after one that does not count."""
    work()
    _wait()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    _wait()
    return time.perf_counter() - begun


def may_choose() -> bool:
    """Return whether the faster of two ways may be taken.

    Another run may measure the other one as faster, and the last bits would differ. A run that promises the same bits
    again therefore has one way only.
    """
    return not torch.are_deterministic_algorithms_enabled()


def capturing() -> bool:
    """Return whether a step is being recorded. Nothing can be measured meanwhile."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _capture(step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Capture a step as a CUDA graph, and return the function that replays it and its outputs.

    This is done by hand, because torch.cuda.graph first collects garbage and empties the cache, which takes longer than
    the recording saves.
    """
    held = sum(of() for of in holders)
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - held > SPARE:
        torch.cuda.empty_cache()  # memory of recordings that are gone
    stream = capture_stream()  # kept for this: no other thread ever has it
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(_now.warm_ups):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=_now.pool, capture_error_mode="thread_local")
            try:
                outputs = step()
            except BaseException:
                _end_capture(graph)
                raise
            if not _end_capture(graph):
                raise RuntimeError("the recording holds no work: its step ran on another stream")
    finally:  # after a failure too: what was begun on that stream may still write
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, outputs


def _end_capture(graph: torch.cuda.CUDAGraph) -> bool:
    """End a capture, and return whether it has seen any work. To replay one without would be to do nothing, silently.

    Torch says so by a warning alone. Other warnings are passed on.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        graph.capture_end()
    for other in said:
        if EMPTY not in str(other.message):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return not any(EMPTY in str(one.message) for one in said)
