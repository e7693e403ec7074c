"""What tests of training share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedaudit.training import cuda_graphs


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Recording as it is on a GPU, on this CPU: warm-ups that change everything, then a step on fixed memory.

    Returns how often each recording was replayed."""
    counts: list[int] = []

    def capture(step: Callable[[], cuda_graphs.Outputs]) -> tuple[Callable[[], None], cuda_graphs.Outputs]:
        for _ in range(cuda_graphs.WARM_UP):
            outputs = step()
        counts.append(0)
        number = len(counts) - 1

        def replay() -> None:
            counts[number] += 1
            for mine, new in zip(outputs, step(), strict=True):
                if mine is not None and new is not None:
                    mine.copy_(new)

        return replay, outputs

    monkeypatch.setattr(cuda_graphs, "_capture", capture)
    monkeypatch.setattr(cuda_graphs, "_records", lambda device: True)
    for module in ("fit", "stacked.stack"):
        monkeypatch.setattr(f"fedaudit.training.{module}.recordable", cuda_graphs.recordable)
    monkeypatch.setattr("fedaudit.training.stacked.stack.WORTH_IT", 2)
    monkeypatch.setattr(cuda_graphs, "WORTH_IT", 2)
    cuda_graphs.unrecorded.clear()
    return counts
