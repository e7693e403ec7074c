"""The rates of a device: what is counted for each, and that they are measured at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedaudit.cli.doctor import rate_findings
from fedaudit.training import device_rates
from fedaudit.training.device_rates import Rates, Sizes, rates, seconds

CPU = torch.device("cpu")


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """If everything took half a second: a product of 8 x 8 matrices is 8 x 8 x 8 additions and as many multiplications,
    1,024 in all; 64 numbers of 4 bytes are read and written, 512 bytes; 16 of them are brought, 64 bytes."""
    monkeypatch.setattr(device_rates, "seconds", lambda work, device, times: 0.5)
    found = rates(CPU, Sizes(side=8, numbers=64, times=1))
    assert found == Rates({"float32": 2048.0, "bf16": 2048.0}, 1024.0, 128.0, 0.5, None)


def test_a_call_is_timed_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 1 s with each call, and by 9 s with the first: five calls a try, 1 s each."""
    now = [0.0]
    calls: list[int] = []

    def work() -> None:
        now[0] += 9.0 if not calls else 1.0
        calls.append(1)

    monkeypatch.setattr(device_rates.time, "perf_counter", lambda: now[0])
    assert seconds(work, CPU, 5) == 1.0
    assert len(calls) == 16


def test_the_least_of_three_tries_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one call that warms up, tries of two calls: 6, 2 and 4 seconds. Each begins when the device is through."""
    now, steps, waits = [0.0], iter([9.0, 3.0, 3.0, 1.0, 1.0, 2.0, 2.0]), []
    monkeypatch.setattr(device_rates.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(device_rates, "_wait", waits.append)

    def work() -> None:
        now[0] += next(steps)

    assert seconds(work, CPU, 2) == 1.0
    assert waits == [CPU] * 6


def test_only_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (CPU, torch.device("cuda", 1)):
        device_rates._wait(device)
    assert waited == [torch.device("cuda", 1)]


def test_a_recording_is_timed_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many additions as it has kernels, replayed twenty times."""
    asked: list[Any] = []
    one = torch.zeros(1)
    monkeypatch.setattr(device_rates, "Recording", lambda step, state: (step, state))
    monkeypatch.setattr(device_rates, "seconds", lambda work, *of: asked.append((work, of)) or 3.0)
    assert device_rates._replay(one, CPU) == 3.0 / device_rates.KERNELS
    (((step, state), of),) = asked
    assert (state, of) == ([one], (CPU, 20))
    assert step() == []
    assert one.item() == device_rates.KERNELS


def test_the_doctor_says_them() -> None:
    lines = [f.line() for f in rate_findings(Rates({"float32": 5e13, "tf32": 4e14}, 4.1e12, 5.5e10, 4.2e-6, 1.1e-6))]
    assert "float32 50, tf32 400 TFLOP/s" in lines[0]
    assert "4,100 GB/s read and written, 55 GB/s from main memory" in lines[1]
    assert "4.2 us to start a small one, 1.1 us in a recording" in lines[2]


@pytest.mark.long
def test_a_cpu_is_measured(fedaudit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = rates(CPU, Sizes(side=32, numbers=1 << 12, times=1))
    assert min(*found.products.values(), found.memory, found.to_device, found.start_s) > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = fedaudit("doctor", "--gpu")
    assert code == 1
    assert "torch sees no GPU here" in out
