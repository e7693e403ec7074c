"""A broadcast is decoded once in a process, and every client gets a copy of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit import Down, State, run
from fedaudit.runtime import task
from fedaudit.wire.codec import encode

CPU = torch.device("cpu")


class Sent(Down):
    w: State
    rest: dict[str, list[torch.Tensor]]
    t: int


def test_each_gets_fresh_memory() -> None:
    w = State({"a": torch.ones(3), "b": torch.zeros(2)}, buffers=["b"])
    blob = encode(Sent(w, {"x": [torch.arange(4)]}, 7))
    first = task.received(blob, CPU)
    assert isinstance(first, Sent)
    first.w["a"].add_(5)
    first.w["c"] = torch.zeros(1)
    first.rest["x"][0].zero_()
    second = task.received(blob, CPU)
    assert isinstance(second, Sent)
    assert second.w["a"].tolist() == [1, 1, 1]
    assert second.rest["x"][0].tolist() == [0, 1, 2, 3]
    assert second.w.keys() == {"a", "b"}
    assert (type(second.w), second.w.buffers, second.t) == (State, frozenset({"b"}), 7)
    other = task.received(encode(Sent(State({"a": torch.zeros(3)}), {}, 8)), CPU)
    assert isinstance(other, Sent)
    assert other.t == 8


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_a_broadcast_is_decoded_once(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []
    real = task.decode

    def spy(blob: bytes, cls: Any, **more: Any) -> Any:
        seen.append(cls)
        return real(blob, cls, **more)

    monkeypatch.setattr(task, "decode", spy)
    run(method="fedavg", model="mlp", clients=4, rounds=2, eval_clients=False, engine=engine, out=tmp_path / "a")
    assert seen.count(Down) == 2, "one for each round"
