"""Recorded steps: what surrounds a recording, with the recording itself stood in for by the step it would replay."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from jobs import CASES, COUNTS, distance, make, trained
from torch import nn

from fedaudit import adam, sgd
from fedaudit.training import cuda_graphs
from fedaudit.training.fit import Opt
from fedaudit.training.stacked.stack import _Fitting, fit_together


def every_other(first: int) -> list[Any]:
    """The cases, of which every other one runs with the long tests: those of two tests take turns."""
    return [pytest.param(case, marks=[] if i % 2 == first else [pytest.mark.long]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case", every_other(0))
def test_a_recorded_fit_is_the_eager_one_to_the_bit(case: str, replays: list[int]) -> None:
    eager, wanted = trained(case)
    steps = make(counts=COUNTS, **CASES[case])
    assert not replays
    with cuda_graphs.conditions("recorded"):
        found = [job.alone() for job in steps]
    assert sum(replays) > 0
    assert distance(eager, steps) == 0
    assert found == wanted


@pytest.mark.parametrize("case", ["adam keeps each model's own count", "adam, and models that come differently far"])
def test_adam_alone_is_recorded_with_its_step(case: str, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stack of one, without a map over models, where the engine need not have torch's bits."""
    eager, wanted = trained(case)
    one, plain = (make(counts=COUNTS, **CASES[case]) for _ in range(2))
    seen: list[int] = []
    core = _Fitting._core
    monkeypatch.setattr(_Fitting, "_core", lambda self, *given: seen.append(len(given[0])) or core(self, *given))
    monkeypatch.setattr("fedaudit.training.stacked.mapped_loss.vmap", lambda *given, **how: refused)
    with cuda_graphs.conditions("recorded"):
        plain[0].alone()
        assert not seen, "one after the other has torch's bits"
    with cuda_graphs.conditions("recorded", stacked=True):
        found = [job.alone() for job in one]
        make(counts=[8], arch="mlp")[0].alone()
    assert set(seen) == {1}
    assert len(seen) > len(one), "SGD's step is as quick beside the recording, and keeps its bits"
    assert distance(eager, one) < 1e-10
    for a, b in zip(found, wanted, strict=True):
        assert (a.epochs, a.steps) == (b.epochs, b.steps)
        assert a.loss == pytest.approx(b.loss, abs=1e-5)


def refused(*given: Any) -> Any:
    raise AssertionError("a stack of one needs no map")


@pytest.mark.parametrize("opt", [sgd(0.1), adam(0.01)], ids=["sgd", "adam, as a stack of one"])
def test_what_a_loss_draws_while_it_is_recorded_is_given_back(opt: Opt, replays: list[int]) -> None:
    def noisy(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(f(x + torch.randn_like(x)), y, reduction="none")

    found = []
    for how in ("eager", "recorded"):
        jobs = make("cnn_bn", counts=[40], epochs=8, loss=noisy, opt=opt)
        torch.manual_seed(1)
        with cuda_graphs.conditions(how, stacked=True):  # type: ignore[arg-type]
            found.append((jobs, jobs[0].alone(), torch.rand(3)))
    assert sum(replays) > 0
    # A stack's Adam rounds otherwise than torch's, over 80 steps; another draw would move weights by about 0.01.
    assert distance(found[0][0], found[1][0]) <= (0 if opt.make is torch.optim.SGD else 1e-6)
    assert found[0][1].loss == pytest.approx(found[1][1].loss, abs=1e-5)
    assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("case", every_other(1))
def test_a_recorded_stack_is_what_each_would_be_alone(case: str, replays: list[int]) -> None:
    """Those that are through stay in it as idle models, and leave when they are half of it."""
    alone, wanted = trained(case)
    together = make(counts=COUNTS, **CASES[case])
    with cuda_graphs.conditions("recorded"):
        found = fit_together(together)
    assert sum(replays) > 0
    assert distance(alone, together) < 1e-10
    for a, b in zip(found, wanted, strict=True):
        assert (a.epochs, a.steps) == (b.epochs, b.steps)
        assert a.loss == pytest.approx(b.loss, abs=1e-5)


def test_a_stack_is_recorded_anew_when_half_of_it_is_through(replays: list[int]) -> None:
    counts = [8, 8, 8, 40]
    together, alone = make("mlp", counts), make("mlp", counts)
    with cuda_graphs.conditions("recorded"):
        fit_together(together)
    assert len(replays) == 2
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


def test_a_smaller_stack_is_warmed_up_once(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    warm: list[int] = []
    capture = cuda_graphs._capture

    def counted(step: Callable[[], cuda_graphs.Outputs]) -> Any:
        warm.append(cuda_graphs._now.warm_ups)
        return capture(step)

    monkeypatch.setattr(cuda_graphs, "_capture", counted)
    monkeypatch.setattr(cuda_graphs, "_warm", set())
    monkeypatch.setattr("fedaudit.training.stacked.stack.may_choose", lambda: False)
    with cuda_graphs.conditions("recorded"):
        fit_together(make("cnn_bn@0.25", [8, 8, 8, 40]))
        fit_together(make("cnn_bn@0.5", [8, 8]))
    assert warm == [cuda_graphs.WARM_UP, 1, cuda_graphs.WARM_UP], "as many as another's; another network's are its own"


def test_what_cannot_be_recorded_is_done_eagerly_and_said(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    def refuses(step: Callable[[], cuda_graphs.Outputs]) -> Any:
        step()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(cuda_graphs, "_capture", refuses)
    alone, eager, stacked = (make("cnn_bn@0.25", COUNTS) for _ in range(3))
    for job in eager:
        job.alone()
    with cuda_graphs.conditions("recorded"):
        for job in alone:
            job.alone()
        fit_together(stacked)
    assert list(cuda_graphs.unrecorded) == ["RuntimeError: operation not permitted when stream is capturing"]
    assert distance(alone, eager) == 0
    assert distance(stacked, eager) < 1e-10


def test_dropout_and_few_steps_are_not_recorded(replays: list[int]) -> None:
    (job,) = make("mlp", [20])
    job.model.add_module("drop", nn.Dropout(0.5))
    with cuda_graphs.conditions("recorded"):
        job.alone()
        assert list(cuda_graphs.unrecorded) == ["dropout draws in each step"]
        make("mlp", [3], epochs=1)[0].alone()
    assert not replays


def test_without_a_gpu_nothing_is_recorded() -> None:
    (job,) = make("mlp", [20], epochs=20)
    with cuda_graphs.conditions("recorded"):
        assert not cuda_graphs.recordable(job.model, torch.device("cpu"), 100)
    assert not cuda_graphs.recordable(job.model, torch.device("cuda"), 100), "eager was asked for"


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("arch", ["mlp", "cnn_bn@0.5"])
def test_bf16_is_near_and_parameters_stay(arch: str, together: bool) -> None:
    def single() -> list[Any]:
        made = make(arch, [12, 12], epochs=4)
        return [dataclasses.replace(j, rows=(j.rows[0].float(), j.rows[1]), model=j.model.float()) for j in made]

    exact, jobs = single(), single()
    wanted = [job.alone().loss for job in exact]
    with cuda_graphs.conditions("eager", bf16=True):
        found = [fitted.loss for fitted in (fit_together(jobs) if together else [job.alone() for job in jobs])]
    assert 1e-5 < max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True)) < 0.05, "near, and not the same"
    assert all(t.dtype in (torch.float32, torch.int64) for job in jobs for t in job.model.state_dict().values())


# --- with a device that stands in for a GPU --------------------------------------------------------------------------


def test_the_global_generator_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the present GPU, unless it has a number."""
    monkeypatch.setattr(torch.cuda, "default_generators", ("zero", "one", "two"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert cuda_graphs.shared(torch.device("cpu")) is torch.default_generator
    assert cuda_graphs.shared(torch.device("cuda")) == "two"
    assert cuda_graphs.shared(torch.device("cuda", 1)) == "one"


def test_conditions_are_plain_unless_said_and_end() -> None:
    def now() -> tuple[Any, ...]:
        return cuda_graphs.compiles(), cuda_graphs.halves(), cuda_graphs.stacks_networks()

    before = now()
    with cuda_graphs.conditions("compiled"):
        assert now() == (True, None, False)
        with cuda_graphs.conditions("eager", bf16=True, stacked=True):
            assert now() == (False, torch.bfloat16, True)
        assert now() == (True, None, False)
    assert now() == before


def test_replays_are_timed_and_leave_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five calls after one that does not count, a second each; waits before and after them."""
    now, waits, state = [0.0], [], torch.zeros(2)

    def work() -> None:
        state.add_(1)
        now[0] += 100.0 if state[0] == 1 else 1.0

    monkeypatch.setattr(cuda_graphs.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cuda_graphs, "_wait", lambda: waits.append(int(state[0])))
    assert cuda_graphs.clocked(work) == 5.0
    assert waits == [1, 6]
    state.fill_(0)
    assert cuda_graphs.timed(work, [state]) == 5.0  # type: ignore[arg-type]
    assert state.tolist() == [0, 0]
    assert cuda_graphs.timed(work, [state], 2) == 2.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("there", "waited"), [(True, 1), (False, 0)])
def test_a_gpu_is_waited_for_where_there_is_one(there: bool, waited: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda_graphs._wait()
    assert len(calls) == waited
    assert cuda_graphs.capturing() is there


class StandIn:
    """Stands in for a GPU's streams and graphs. `did` lists what was asked of them; `warns` is what a capture's end
    warns of, and `fails` the number of the step that fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, over: int = 0, fails: int = 0, warns: Sequence[str] = ()):
        did: list[Any] = []
        self.did, self.fails = did, fails

        class Graph:
            replay = "replay"

            def capture_begin(self, **how: Any) -> None:
                did.append(("begin", how))

            def capture_end(self) -> None:
                did.append("end")
                for text in warns:
                    warnings.warn(text, stacklevel=1)

        class Stream:
            def __init__(self, name: str):
                self.name = name

            def wait_stream(self, other: Any) -> None:
                did.append(f"{self.name} waits for {other.name}")

        usual, aside = Stream("usual"), Stream("aside")
        put = monkeypatch.setattr
        put(cuda_graphs, "holders", [lambda: 3, lambda: 4])
        put(torch.cuda, "memory_reserved", lambda: cuda_graphs.SPARE + 10 + 7 + over)
        put(torch.cuda, "memory_allocated", lambda: 10)
        put(torch.cuda, "empty_cache", lambda: did.append("emptied"))
        put(torch.cuda, "current_stream", lambda: usual)
        put(torch.cuda, "stream", lambda stream: nullcontext(did.append(f"on {stream.name}")))
        put(torch.cuda, "synchronize", lambda: did.append("through"))
        put(torch.cuda, "CUDAGraph", Graph)
        put(cuda_graphs, "capture_stream", lambda: aside)
        put(cuda_graphs._now, "warm_ups", 3, raising=False)
        put(cuda_graphs._now, "pool", "pool", raising=False)

    def step(self) -> list[Any]:
        self.did.append("step")
        if self.did.count("step") == self.fails:
            raise torch.OutOfMemoryError(f"step {self.fails}")
        return [f"output {self.did.count('step')}"]


BEGUN = [
    "aside waits for usual", "on aside", "step", "step", "step", "through",
    ("begin", {"pool": "pool", "capture_error_mode": "thread_local"}), "step", "end",
]  # fmt: skip
JOINED = "usual waits for aside"
EMPTY = "The CUDA Graph is empty. This usually means that the graph was captured on the wrong stream."


@pytest.mark.parametrize("over", [0, 1])
def test_a_step_is_warmed_up_and_captured(over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied if more is spare than recordings and their holders may keep."""
    gpu = StandIn(monkeypatch, over)
    assert cuda_graphs._capture(gpu.step) == ("replay", ["output 4"])
    assert gpu.did == [*["emptied"] * over, *BEGUN, JOINED]


@pytest.mark.parametrize("warns", [(), (EMPTY,)])
def test_a_capture_that_fails_ends_and_what_it_began_is_waited_for(
    warns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The error is the step's own, also where nothing was captured before it."""
    gpu = StandIn(monkeypatch, fails=4, warns=warns)
    with pytest.raises(torch.OutOfMemoryError, match="step 4"):
        cuda_graphs._capture(gpu.step)
    assert gpu.did == [*BEGUN, JOINED]
    assert not recwarn.list


def test_a_failed_warm_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may still write into what the caller puts back."""
    gpu = StandIn(monkeypatch, fails=2)
    with pytest.raises(torch.OutOfMemoryError, match="step 2"):
        cuda_graphs._capture(gpu.step)
    assert gpu.did == ["aside waits for usual", "on aside", "step", "step", JOINED]


def test_a_recording_without_work_is_refused_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay would do nothing, so that a model would not be trained."""
    gpu, reasons = StandIn(monkeypatch, warns=["something else", EMPTY]), dict[str, None]()
    monkeypatch.setattr(cuda_graphs, "unrecorded", reasons)
    with pytest.warns(UserWarning, match="something else") as said:
        assert cuda_graphs.record(gpu.step, []) is None
    assert [str(one.message) for one in said] == ["something else"]
    assert list(reasons) == ["RuntimeError: the recording holds no work: its step ran on another stream"]


def test_other_warnings_of_a_capture_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="something else"):
        assert cuda_graphs.record(StandIn(monkeypatch, warns=["something else"]).step, []) is not None
