"""Steps that are recorded: on a GPU a step of a small network is many small kernels, and starting them costs more than
running them. A CUDA graph starts all of them at once: the same kernels on the same memory, so the same bits.

A recorded step has fixed shapes: an epoch's ragged last batch is done eagerly beside it. What cannot be recorded (a
loss that asks the device for a value, dropout) is done eagerly, and `unrecorded` keeps why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.cuda_streams import capture_stream

Stepping = Literal["eager", "recorded", "compiled"]
WORTH_IT = 8  # steps: recording one takes about as long as five
SPARE = 4 << 30  # bytes that may lie idle in torch's cache
WARM_UP = 3  # runs before a recording, in which libraries choose kernels and get their memory


class _Conditions:
    """How steps are carried out, and in which precision: set for a whole run by its setting."""

    stepping: Stepping = "eager"
    bf16: bool = False
    stacked: bool = False
    warm_ups: int = WARM_UP


_now = _Conditions()
unrecorded: dict[str, None] = {}  # reasons, in the order in which they came up
_listeners: list[Callable[[str], None]] = []


def fall_back(reason: str) -> None:
    """Keep why steps are carried out in a slower way, and tell whoever listens, once for each reason."""
    if reason not in unrecorded:
        unrecorded[reason] = None
        for tell in _listeners:
            tell(reason)


@contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Within: `tell` is called as soon as steps are carried out in a slower way, with the reason."""
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
    """The context of a forward pass: bfloat16 where the setting says so, parameters and sums staying as they are."""
    return torch.autocast(device.type, torch.bfloat16) if _now.bf16 else nullcontext()


def stacks_networks() -> bool:
    """Whether networks of one architecture are run as one (training.many)."""
    return _now.stacked


def halves() -> torch.dtype | None:
    """What a stack's forward pass computes in, where that is not its tensors' own: autocast does not reach into it."""
    return torch.bfloat16 if _now.bf16 else None


def records_steps(device: torch.device) -> bool:
    """Whether steps are recorded here at all."""
    return _now.stepping != "eager" and _records(device)


def recordable(model: nn.Module, device: torch.device, steps: int) -> bool:
    """Whether so many steps of a model are to be recorded here."""
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
    """A step without arguments, recorded. `state`: the tensors that it changes; recording leaves them as they were.

    `outputs`: the tensors that the step returned, each time the same memory with new content.
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


_warm: set[Any] = set()  # what steps that were recorded before have in common with those to come


def record(step: Callable[[], Outputs], state: Sequence[Tensor], like: Any = None) -> Recording | None:
    """The recording; None, with the reason kept, where it cannot be made. `like`: the same for steps that are alike:
    for the first of them libraries choose their kernels, the others run once and are recorded."""
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
    """The global generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def record_giving_back(
    step: Callable[[], Outputs], state: Sequence[Tensor], device: torch.device, like: Any = None
) -> Recording | None:
    """Record as `record` does, and give back what the step drew of the device's global generator meanwhile."""
    generator = shared(device)
    drawn = generator.get_state()
    made = record(step, state, like)
    generator.set_state(drawn)
    return made


def timed(recording: Recording, state: Sequence[Tensor], times: int = 5) -> float:
    """Seconds that so many replays take; the state is as it was afterwards."""
    before = [t.detach().clone() for t in state]
    took = clocked(recording, times)
    with torch.no_grad():
        for t, kept in zip(state, before, strict=True):
            t.copy_(kept)
    return took


def clocked(work: Callable[[], Any], times: int = 5) -> float:
    """Seconds that so many calls take, after one that does not count."""
    work()
    _wait()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    _wait()
    return time.perf_counter() - begun


def may_choose() -> bool:
    """Whether the faster of two ways may be taken: it may be the other one next time, and with it the last bits. A run
    that promises the same bits again has one way."""
    return not torch.are_deterministic_algorithms_enabled()


def capturing() -> bool:
    """Whether a step is being recorded, in which nothing can be measured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _capture(step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """By hand, because torch.cuda.graph collects garbage and empties the cache first: longer than what is to be won."""
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > SPARE:
        torch.cuda.empty_cache()  # memory of recordings that are gone
    stream = capture_stream()  # kept for this: no other thread ever has it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_now.warm_ups):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            outputs = step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, outputs
