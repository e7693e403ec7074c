"""What tests of training share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fedaudit.training import cuda_graphs
from fedaudit.training.stacked import kept_steps, mapped_loss, stackable
from fedaudit.training.stacked.stack import _Fitting


def modes(step: Callable[..., Any]) -> list[tuple[nn.Module, bool]]:
    """Return the layers of a stack's network, each with its mode: a recording has the mode in which it was made."""
    found = [cell.cell_contents for cell in step.__closure__ or ()]
    models = [fitting.mapped.model for fitting in found if isinstance(fitting, _Fitting)]
    return [(layer, layer.training) for model in models for layer in model.modules()]


def put(kept: list[tuple[nn.Module, bool]]) -> None:
    for layer, mode in kept:
        layer.training = mode


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Recording as it is on a GPU, on this CPU: warm-ups that change everything, then a step on fixed memory.

    Returns how often each recording was replayed."""
    counts: list[int] = []

    def capture(step: Callable[[], cuda_graphs.Outputs]) -> tuple[Callable[[], None], cuda_graphs.Outputs]:
        for _ in range(cuda_graphs.WARM_UP):
            outputs = step()
        counts.append(0)
        number = len(counts) - 1
        recorded = modes(step)

        def replay() -> None:
            counts[number] += 1
            now = modes(step)
            put(recorded)
            for mine, new in zip(outputs, step(), strict=True):
                if mine is not None and new is not None:
                    mine.copy_(new)
            put(now)

        return replay, outputs

    monkeypatch.setattr(cuda_graphs, "_capture", capture)
    monkeypatch.setattr(cuda_graphs, "_records", lambda device: True)
    for module in ("fit", "stacked.stack"):
        monkeypatch.setattr(f"fedaudit.training.{module}.recordable", cuda_graphs.recordable)
    monkeypatch.setattr("fedaudit.training.stacked.stack.WORTH_IT", 2)
    monkeypatch.setattr(cuda_graphs, "WORTH_IT", 2)
    cuda_graphs.unrecorded.clear()
    kept_steps.forget()
    yield counts
    kept_steps.forget()


@pytest.fixture
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have steps compiled as on a GPU: a compiler traces all of a loss, but makes no kernels. Return what it traced.

    With the parameter "eager" it also leaves every operation as it was, for tests that compare bits.
    """
    found, backend = list[Any](), getattr(request, "param", "aot_eager")

    def compiler(run: Any) -> Any:
        found.append(run)
        return torch.compile(run, dynamic=False, backend=backend, fullgraph=True)

    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    monkeypatch.setattr(mapped_loss, "_compile", compiler)
    monkeypatch.setattr(mapped_loss, "compiled_losses", {})
    monkeypatch.setattr(cuda_graphs, "unrecorded", {})
    return found
