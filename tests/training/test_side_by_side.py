"""Models of a stack that are stepped side by side: each ends as it would alone."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import CASES, COUNTS, distance, make, trained
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import sgd
from fedaudit.training import cuda_graphs, models
from fedaudit.training.stacked import mapped_loss, side_by_side, stack, stackable
from fedaudit.training.stacked.side_by_side import DEEP, drawing_nothing, goes_apart, is_deep, is_wide
from fedaudit.training.stacked.stack import _Fitting, fit_together


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have all stacks step their models side by side, and count the models of each step."""
    counts: list[int] = []
    inner = side_by_side.side_by_side
    monkeypatch.setattr(mapped_loss, "goes_apart", lambda model, rows: True)
    monkeypatch.setattr(mapped_loss, "side_by_side", lambda n, *of: counts.append(n) or inner(n, *of))
    return counts


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name]["arch"] != "mlp"] + ["given", "until"])
def test_each_ends_as_it_would_alone(case: str, apart: list[int]) -> None:
    together, before = (make(counts=COUNTS, **CASES[case]) for _ in range(2))
    found, (alone, wanted) = fit_together(together), trained(case)
    assert apart, "they were mapped over, as ever"
    assert distance(alone, before) > 1e-2, "nothing was trained, so nothing was compared"
    assert distance(together, alone) < 1e-10
    for a, b in zip(found, wanted, strict=True):
        assert (a.epochs, a.steps) == (b.epochs, b.steps)
        assert a.loss == pytest.approx(b.loss, abs=1e-5)


def test_recorded_steps_go_side_by_side_too(apart: list[int], replays: list[int]) -> None:
    together, alone = (make("cnn_bn@0.25", COUNTS, epochs=4) for _ in range(2))
    with cuda_graphs.conditions("recorded"):
        fit_together(together)
    assert replays
    assert max(apart) == len(COUNTS)
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


def test_factors_of_16_bits_are_those_of_each_model_alone(apart: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's autocast rounds them in both. Mapped over models it would not reach them."""
    cast: list[torch.device] = []
    inner = mapped_loss.rounded
    monkeypatch.setattr(mapped_loss, "rounded", lambda device: cast.append(device) or inner(device))
    together, alone, exact = (make("cnn_bn@0.25", [8, 12]) for _ in range(3))
    for job in [*together, *alone, *exact]:
        job.model.float()
        object.__setattr__(job, "rows", (job.rows[0].float(), job.rows[1]))
    for job in exact:
        job.alone()
    with cuda_graphs.conditions("eager", bf16=True):
        fit_together(together)
        for job in alone:
            job.alone()
    assert distance(exact, alone) > 1e-4, "nothing was rounded"
    assert distance(together, alone) < 1e-5
    assert len(cast) == sum(apart), "batch norms would be cast back and forth, which autocast spares"


def test_images_lie_as_tensor_cores_take_them(apart: list[int]) -> None:
    seen: list[tuple[bool, bool]] = []

    def looked_at(f: Any, x: Tensor, y: Tensor) -> Tensor:
        seen.append((x.is_contiguous(memory_format=torch.channels_last), x.is_contiguous()))
        return cross_entropy(f(x[:, :1]), y, reduction="none")

    jobs = make("mlp", [8, 8], loss=looked_at)
    for job in jobs:
        object.__setattr__(job, "rows", (job.rows[0].expand(-1, 3, -1, -1).contiguous(), job.rows[1]))
    fit_together(jobs)
    assert set(seen) == {(True, False)}


def test_a_model_whose_parameter_has_no_gradient_stays_as_it_is(apart: list[int]) -> None:
    """As when it is trained alone: no gradient is not a gradient of zero, which weight decay would move."""
    opt = sgd(0.1, weight_decay=0.5)
    together, alone = (make("mlp", [8, 12], opt=opt) for _ in range(2))
    for job in [*together, *alone]:
        job.model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    fit_together(together)
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10
    assert all(torch.equal(job.model.unused, torch.ones(3, dtype=torch.float64)) for job in together)


def test_a_loss_that_draws_is_refused(apart: list[int]) -> None:
    def noisy(f: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(f(x + torch.randn_like(x)), y, reduction="none")

    with pytest.raises(RuntimeError, match="draws random numbers"):
        fit_together(make("mlp", [8, 8], loss=noisy))
    with drawing_nothing(torch.device("cpu")):
        torch.ones(3)


@pytest.mark.parametrize("from_device", [True, False])
def test_draws_of_either_generator_are_seen(from_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a loss may draw from the device's generator or from the host's."""
    of_device = torch.Generator()
    monkeypatch.setattr(side_by_side, "shared", lambda device: of_device)
    with pytest.raises(RuntimeError, match="draws random numbers"), drawing_nothing(torch.device("cpu")):
        torch.rand(1, generator=of_device if from_device else None)


def test_deep_and_wide_networks_on_tensor_cores_go_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [torch.zeros(1)]
    deep, flat = (models.build(arch, shape=(3, 32, 32), classes=10) for arch in ("resnet18", "convnet"))
    assert is_deep(deep)
    assert not is_deep(flat)
    assert is_deep(nn.Sequential(*[nn.Conv2d(2, 2, 1) for _ in range(DEEP)]))
    assert not is_deep(nn.Sequential(*[nn.Conv2d(2, 2, 1) for _ in range(DEEP - 1)]))
    assert not is_deep(nn.Sequential(*[nn.Conv2d(2, 2, 1, groups=2) for _ in range(2 * DEEP)]))
    wide = models.build("conv4", shape=(1, 28, 28), classes=10)
    assert is_wide(wide)
    assert not is_deep(wide)
    assert not is_wide(flat)
    assert is_wide(nn.Conv2d(256, 256, 1))
    assert not is_wide(nn.Conv2d(512, 512, 1, groups=512)), "it has groups already"
    assert not is_wide(nn.Sequential(nn.Conv2d(255, 512, 1), nn.Conv2d(512, 255, 1), nn.Linear(512, 512)))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert not goes_apart(deep, rows), "a CPU has no streams, and no slow groups"
    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    assert goes_apart(deep, rows)
    assert goes_apart(wide, rows)
    assert not goes_apart(flat, rows)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not goes_apart(deep, rows), "in float32 it was not measured"
    assert not goes_apart(wide, rows)
    with cuda_graphs.conditions("recorded", bf16=True):
        assert goes_apart(deep, rows)


def test_a_stack_of_one_and_a_compiled_one_are_not_stepped_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model has nothing beside it. Deep networks are not compiled as a stack, in whose groups the time goes."""
    monkeypatch.setattr(mapped_loss, "goes_apart", lambda model, rows: True)
    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    (job,) = make("cnn_bn@0.25", [8])
    assert not mapped_loss.mapped_loss(job, {}, False, several=False).apart
    several = mapped_loss.mapped_loss(job, {}, True, several=True)
    assert several.apart
    assert not several._compile
    assert not several.convolves, "there is nothing to choose"
    assert several.model is job.model, "its layers are torch's own"


class Streams:
    """Streams that write down who waits for whom, and what runs on which."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = self.named("here")

    def named(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.said.append(f"{name} waits for {other.name}"))

    @contextmanager
    def on(self, stream: Any) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_streams_begin_after_what_came_before_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    forks = [streams.named("a"), streams.named("b")]
    monkeypatch.setattr(side_by_side, "forked_streams", lambda count, device: forks)

    def work(number: int) -> int:
        streams.said.append(f"{number} on {streams.current.name}")
        return 10 * number

    assert side_by_side.side_by_side(2, torch.device("cuda"), work) == [0, 10]
    assert streams.said == [
        "a waits for here", "b waits for here", "0 on a", "1 on b", "here waits for a", "here waits for b",
    ]  # fmt: skip
    streams.said.clear()
    monkeypatch.setattr(side_by_side, "forked_streams", lambda count, device: [])
    assert side_by_side.side_by_side(2, torch.device("cuda"), work) == [0, 10]
    assert streams.said == ["0 on here", "1 on here"]


def test_what_cannot_be_recorded_apart_is_recorded_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps, one by one, would be no faster than no stack at all."""
    fitting = SimpleNamespace(
        jobs=make("mlp", [5]), slots=[0, 1], device=torch.device("cpu"), mapped=SimpleNamespace(convolves=False)
    )
    fitting.mapped.apart = True
    monkeypatch.setattr(stack, "record_giving_back", lambda *of, **how: None if fitting.mapped.apart else "recorded")
    assert _Fitting._choose(fitting, list, [], 4, False) == "recorded"
    assert fitting.mapped.apart is False
