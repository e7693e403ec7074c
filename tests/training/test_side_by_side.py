"""Models of a stack that are stepped side by side: each ends as it would alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import CASES, COUNTS, distance, make, make_single, trained
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import adam, sgd
from fedaudit.training import cuda_graphs, models
from fedaudit.training.stacked import kept_steps, mapped_loss, side_by_side, stack, stackable
from fedaudit.training.stacked.side_by_side import (
    DEEP,
    Lanes,
    drawing_nothing,
    goes_apart,
    halved,
    in_turn,
    is_deep,
    is_wide,
)
from fedaudit.training.stacked.stack import fit_together
from fedaudit.training.stacked.steppers import Stepper, stepper


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have models of all stacks train side by side, and count the models of each training."""
    counts: list[int] = []
    inner = stack.in_turn
    monkeypatch.setattr(stack, "goes_apart", lambda model, rows: True)
    monkeypatch.setattr(stack, "in_turn", lambda courses, lanes: counts.append(len(courses)) or inner(courses, lanes))
    return counts


@pytest.mark.parametrize(
    "case", [name for name in CASES if CASES[name]["arch"] != "mlp"] + ["given", "until", "running"]
)
def test_each_ends_as_it_would_alone(case: str, apart: list[int]) -> None:
    together, before = (make(counts=COUNTS, **CASES[case]) for _ in range(2))
    found, (alone, wanted) = fit_together(together), trained(case)
    assert apart == [len(COUNTS)], "they were mapped over, as ever"
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
    assert apart == [len(COUNTS)]
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


def test_factors_of_16_bits_are_those_of_each_model_alone(apart: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's autocast rounds them in both. Mapped over models it would not reach them."""
    cast: list[torch.device] = []
    inner = mapped_loss.rounded
    monkeypatch.setattr(mapped_loss, "rounded", lambda device: cast.append(device) or inner(device))
    together, alone, exact = (make_single("cnn_bn@0.25", [8, 12]) for _ in range(3))
    for job in exact:
        job.alone()
    with cuda_graphs.conditions("eager", bf16=True):
        found = fit_together(together)
        for job in alone:
            job.alone()
    rounding = distance(exact, alone)
    assert rounding > 1e-4, "nothing was rounded"
    assert distance(together, alone) < 0.4 * rounding, "images lie otherwise, and some processors then sum otherwise"
    steps = sum(of_model.steps for of_model in found)
    assert len(cast) == steps, "batch norms would be cast back and forth, which autocast spares"


def test_batches_are_counted_by_one_addition_a_step(apart: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each addition is a kernel, and a ResNet-18 has twenty batch norms."""
    added: list[int] = []
    inner = mapped_loss.CountingTogether.add

    def add(self: mapped_loss.CountingTogether) -> None:
        added.append(len(self._seen))
        inner(self)

    monkeypatch.setattr(mapped_loss.CountingTogether, "add", add)
    together, alone = (make("cnn_bn@0.25", [8, 12]) for _ in range(2))
    found = fit_together(together)
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in together[0].model.modules())
    assert added == [norms] * sum(of_model.steps for of_model in found)
    for job in alone:
        job.alone()
    for a, b in zip(together, alone, strict=True):
        for (name, t), other in zip(a.model.named_buffers(), b.model.buffers(), strict=True):
            if name.endswith("num_batches_tracked"):
                assert int(t) == int(other) > 0


@pytest.mark.parametrize("before", [0, 3])
def test_a_norm_that_averages_over_all_batches_goes_side_by_side(before: int, apart: list[int]) -> None:
    """It divides by the number of its batches, the present one among them."""
    together, alone = (make("cnn_bn@0.25", [8, 8]) for _ in range(2))
    for job in (*together, *alone):
        for m in job.model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.momentum = None
                m.num_batches_tracked.fill_(before)  # type: ignore[union-attr]
    fit_together(together)
    for job in alone:
        job.alone()
    assert apart == [2]
    assert distance(together, alone) < 1e-10


def test_a_residual_network_goes_side_by_side(apart: list[int]) -> None:
    """Its blocks add in place what they got to what they made of it."""
    together, alone = (list(make("mlp", [4, 4], epochs=1)) for _ in range(2))
    for jobs in (together, alone):
        for i, job in enumerate(jobs):
            torch.manual_seed(i)
            object.__setattr__(job, "model", models.build("resnet18@0.125", shape=(1, 8, 8), classes=4).double())
    fit_together(together)
    assert apart == [2]
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


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


def test_a_loss_is_given_what_it_is_given_alone(apart: list[int]) -> None:
    """A stack of one has one more dimension; a loss that sums over the first one would notice."""
    seen: set[tuple[int, ...]] = set()

    def weighted(f: Any, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        seen.add(tuple(weights.shape))
        return cross_entropy(f(x) * weights.sum(0), y, reduction="none")

    def jobs() -> list[stack.Job]:
        torch.manual_seed(0)
        own = [torch.rand(3, 4, dtype=torch.float64) for _ in range(2)]
        return make("cnn_bn@0.25", [8, 12], loss=weighted, each=lambda i, m: {"given": {"weights": own[i]}})

    together, alone = jobs(), jobs()
    fit_together(together)
    for job in alone:
        job.alone()
    assert apart == [2]
    assert seen == {(3, 4)}
    assert distance(together, alone) < 1e-10


def test_filters_lie_so_in_training(apart: list[int]) -> None:
    """Else tensor cores turn every one of them in every step."""
    seen: set[tuple[bool, bool]] = set()

    def looked_at(f: Any, x: Tensor, y: Tensor) -> Tensor:
        filters = f.params["encoder.conv2.weight"]
        seen.add((filters.is_contiguous(memory_format=torch.channels_last), filters.is_contiguous()))
        return cross_entropy(f(x), y, reduction="none")

    fit_together(make("cnn_bn@0.25", [8, 8], loss=looked_at))
    assert seen == {(True, False)}


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


def test_one_model_is_a_stack_as_ever(apart: list[int]) -> None:
    """It has nothing beside it."""
    together, alone = make("cnn_bn@0.25", [8]), make("cnn_bn@0.25", [8])
    fit_together(together)
    alone[0].alone()
    assert apart == []
    assert distance(together, alone) < 1e-10


@pytest.mark.parametrize("bf16", [False, True])
def test_models_side_by_side_are_compiled_once_for_all(bf16: bool, apart: list[int], traced: list[Any]) -> None:
    """Each ends as it would if nothing were compiled, with the batches that its norms counted."""
    kind = make_single if bf16 else make
    compiled, plain, before, exact = (kind("cnn_bn@0.25", [8, 12, 16], epochs=3) for _ in range(4))
    with cuda_graphs.conditions("compiled", bf16=bf16):
        fit_together(compiled)
    with cuda_graphs.conditions("eager", bf16=bf16):
        fit_together(plain)
    fit_together(exact)
    assert apart == [3, 3, 3]
    assert len(traced) == 1
    assert not cuda_graphs.unrecorded, "it was not refused"
    assert distance(plain, before) > 1e-2
    assert distance(compiled, plain) < (0.4 * distance(exact, plain) if bf16 else 1e-10), (
        "some processors sum otherwise"
    )
    for a, b in zip(compiled, plain, strict=True):
        for (name, t), other in zip(a.model.named_buffers(), b.model.buffers(), strict=True):
            if name.endswith("num_batches_tracked"):
                assert int(t) == int(other) > 0


def test_only_usual_batches_are_compiled_beside_others(apart: list[int], traced: list[Any]) -> None:
    """An epoch's last batch of another size is too seldom for it; the norms count its batches too."""
    compiled, plain = (make("cnn_bn@0.25", [10, 14], epochs=2) for _ in range(2))  # of 4, and two left over
    with cuda_graphs.conditions("compiled"):
        fit_together(compiled)
    fit_together(plain)
    assert len(traced) == 1
    assert apart == [2, 2]
    assert distance(compiled, plain) < 1e-10


def test_models_of_clients_with_few_records_are_not_compiled(apart: list[int], traced: list[Any]) -> None:
    """Each would need a step of its own size, and a compiler takes longer for it than it saves."""
    compiled, plain = (make("cnn_bn@0.25", [8, 3, 2], epochs=2) for _ in range(2))
    with cuda_graphs.conditions("compiled"):
        fit_together(compiled)
    fit_together(plain)
    assert len(traced) == 1, "of the client with batches of 4"
    assert list(cuda_graphs.unrecorded) == ["not compiled: networks side by side with less than a batch of records"]
    assert distance(compiled, plain) < 1e-10


def test_last_batches_are_not_compiled_beside_others(
    apart: list[int], traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients have last batches of many sizes, also where a stack would have them compiled."""
    monkeypatch.setattr(stack, "LASTING", 1)
    jobs = make("cnn_bn@0.25", [6, 7, 10], epochs=4)
    assert [stack.last_batches([job]) for job in jobs] == [{2}, {3}, {2}]
    with cuda_graphs.conditions("compiled"):
        fit_together(jobs)
    assert len(traced) == 1


def hooked(layer: Any, given: Any, out: Tensor) -> Tensor:
    return 2 * out


def test_what_is_done_to_a_model_later_is_no_part_of_other_trainings(apart: list[int], traced: list[Any]) -> None:
    """What was compiled is used again for models of the same structure, whatever became of the first one's model."""
    counts = [8, 12]
    earlier, compiled, plain = (make("cnn_bn@0.25", counts, epochs=3) for _ in range(3))
    with cuda_graphs.conditions("compiled"):
        fit_together(earlier)
        first = earlier[0].model
        first.register_forward_hook(hooked)
        for m in first.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eps = 1.0
        first.train()
        fit_together(compiled)
    fit_together(plain)
    assert len(traced) == 1
    assert first.training
    assert distance(compiled, plain) < 1e-10


def test_each_model_keeps_its_mode(apart: list[int], traced: list[Any]) -> None:
    jobs = make("cnn_bn@0.25", [8, 12, 16])
    jobs[1].model.train()
    with cuda_graphs.conditions("compiled"):
        fit_together(jobs)
    assert [job.model.training for job in jobs] == [False, True, False]


def test_a_step_that_is_not_compiled_is_not_replayed_as_one_that_is(
    apart: list[int], traced: list[Any], replays: list[int]
) -> None:
    """Clients with six records and batches of eight are not compiled; with batches of six they are."""
    for batch, compilers, recordings in ((8, 0, 2), (6, 1, 4)):
        with cuda_graphs.conditions("compiled"):
            fit_together(make("cnn_bn@0.25", [6, 6], epochs=4, batch=batch))
        assert (len(traced), len(replays)) == (compilers, recordings)


def test_a_model_that_is_looked_at_leaves_the_others_in_training(apart: list[int], traced: list[Any]) -> None:
    """One function serves all models; `until` asks each of them by itself, out of training."""
    options = {"epochs": 4, "each": lambda i, m: {"until": lambda f, x, y: bool(f(x).sum() > 1e9)}}
    compiled, plain = (make("cnn_bn@0.25", [8, 12], **options) for _ in range(2))
    with cuda_graphs.conditions("compiled"):
        fit_together(compiled)
    fit_together(plain)
    assert len(traced) == 1
    assert distance(compiled, plain) < 1e-10


def test_what_cannot_be_compiled_beside_others_runs_as_it_is(apart: list[int], traced: list[Any]) -> None:
    def asks(f: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(f(x), y, reduction="none") * (1.0 if float(x.sum()) > 1e9 else 2.0)

    compiled, plain = (make("cnn_bn@0.25", [8, 12], loss=asks) for _ in range(2))
    with cuda_graphs.conditions("compiled"):
        fit_together(compiled)
    fit_together(plain)
    (said,) = cuda_graphs.unrecorded
    assert said.startswith("not compiled: ")
    assert distance(compiled, plain) < 1e-10


def test_a_model_beside_others_has_torchs_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes them as they are, and a product instead of a convolution has its channels first."""
    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    monkeypatch.setattr(mapped_loss, "compiled_losses", {})
    (job,) = make("cnn_bn@0.25", [8])
    with cuda_graphs.conditions("recorded", bf16=True):
        for compile in (True, False):
            mapped = mapped_loss.mapped_loss(job, {}, compile, several=False, apart=True)
            assert mapped.apart
            assert mapped.compiles is compile
            assert not mapped.convolves, "there is nothing to choose"
            assert (mapped.model is job.model) is not compile, "what is compiled serves others too"
            kinds = [[type(layer) for layer in model.modules()] for model in (mapped.model, job.model)]
            assert kinds[0] == kinds[1]
            assert not mapped_loss.mapped_loss(job, {}, compile, several=False).apart, "alone it is another one"


def test_filters_lie_as_tensor_cores_take_them() -> None:
    """All numbers of a model are there, and so are an optimiser's, in one order: one kernel goes over all of them."""
    (job,) = make("cnn_bn@0.25", [8], opt=adam(0.01))
    how = stepper(job.option("opt"))
    assert isinstance(how, Stepper)
    found = stack.build([job], how, apart=True)
    tensors = {**dict(job.model.named_parameters()), **dict(job.model.named_buffers())}
    assert {**found.params, **found.rest}.keys() == tensors.keys()
    for name, t in {**found.params, **found.rest}.items():
        assert torch.equal(t[0], tensors[name])
        assert t.data_ptr() != tensors[name].data_ptr(), "training must not change the model before its end"
    filters = found.params["encoder.conv2.weight"]
    assert filters[0].is_contiguous(memory_format=torch.channels_last)
    assert not filters[0].is_contiguous()
    assert found.state["m.encoder.conv2.weight"].stride() == filters.stride()
    plain = stack.build([job], how)
    assert plain.params["encoder.conv2.weight"].is_contiguous()


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


def counted(streams: Streams, name: str, steps: int) -> Iterator[None]:
    for step in range(steps):
        streams.said.append(f"{name}{step} on {streams.current.name}")
        yield
    streams.said.append(f"{name} ends on {streams.current.name}")


def test_lanes_begin_after_what_came_before_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    own = [streams.named("a"), streams.named("b")]
    monkeypatch.setattr(side_by_side, "lane", lambda number, device: own[number])
    lanes = Lanes(2, torch.device("cuda"))
    assert streams.said == ["a waits for here", "b waits for here"]
    streams.said.clear()
    in_turn([counted(streams, "x", 1), counted(streams, "y", 2)], lanes)
    assert streams.said == ["x0 on a", "y0 on b", "x ends on a", "y1 on b", "y ends on b"]
    assert streams.current.name == "here"
    streams.said.clear()
    lanes.join()
    assert streams.said == ["here waits for a", "here waits for b"]


def test_a_cpu_has_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    lanes = Lanes(2, torch.device("cpu"))
    in_turn([counted(streams, "x", 2), counted(streams, "y", 1)], lanes)
    lanes.join()
    assert streams.said == ["x0 on here", "y0 on here", "x1 on here", "y ends on here", "x ends on here"]


def test_what_cannot_be_recorded_apart_is_a_stack(
    apart: list[int], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager steps, one by one, would be no faster than no stack at all. Nothing of the first try is left."""
    inner = stack.record_giving_back
    tried: list[int] = []

    def refuses(*given: Any, **how: Any) -> Any:
        tried.append(1)
        return None if len(tried) == 1 else inner(*given, **how)

    stacked: list[int] = []
    as_stack = stack._stacked
    monkeypatch.setattr(
        stack, "_stacked", lambda jobs, *how, **more: stacked.append(len(jobs)) or as_stack(jobs, *how, **more)
    )
    monkeypatch.setattr(stack, "record_giving_back", refuses)
    together, alone = (make("cnn_bn@0.25", COUNTS, epochs=4) for _ in range(2))
    with cuda_graphs.conditions("recorded"):
        fit_together(together)
    assert apart == [len(COUNTS)]
    assert stacked == [len(COUNTS)]
    assert replays, "the stack is recorded"
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


def test_if_one_of_them_fails_no_model_has_changed_and_nothing_is_kept(apart: list[int], replays: list[int]) -> None:
    """The first one is through by then."""

    def breaks(f: Any, x: Tensor, y: Tensor) -> bool:
        raise ValueError("no more")

    def each(i: int, model: Any) -> dict[str, Any]:
        return {"until": breaks} if i == 1 else {"epochs": 1}

    jobs, before = (make("cnn_bn@0.25", [8, 40, 8], epochs=3, each=each) for _ in range(2))
    with cuda_graphs.conditions("recorded"), pytest.raises(ValueError, match="no more"):
        fit_together(jobs)
    assert distance(jobs, before) == 0
    assert [job.model.training for job in jobs] == [job.model.training for job in before]
    assert not kept_steps._kept


def test_factors_are_rounded_together_to_the_bits_that_autocast_gives() -> None:
    """Batch norms keep their numbers. A parameter without a part in the loss has no gradient, and not one of zero."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))
    net[2].unused = nn.Linear(2, 2)
    params = dict(net.named_parameters())
    assert halved(net, params) is params, "in full precision all stay"
    x = torch.randn(5, 2, 4, 4)
    with cuda_graphs.conditions("eager", bf16=True), torch.autocast("cpu", torch.bfloat16):
        low = halved(net, params)
        assert {name for name, p in low.items() if p.dtype == torch.bfloat16} == {
            "0.weight", "0.bias", "3.weight", "3.bias", "2.unused.weight", "2.unused.bias",
        }  # fmt: skip
        mine = torch.func.functional_call(net, low, (x,)).square().sum()
        plain = net(x).square().sum()
    found = torch.autograd.grad(mine, list(params.values()), allow_unused=True)
    wanted = torch.autograd.grad(plain, list(params.values()), allow_unused=True)
    assert torch.equal(mine, plain)
    for name, a, b in zip(params, found, wanted, strict=True):
        if "unused" in name:
            assert a is None
            assert b is None
        else:
            assert a.dtype == torch.float32
            assert torch.equal(a, b), name


class Counted(Lanes):
    """Lanes that write down on which of them work is done, and when they meet again."""

    events: list[Any]

    def __init__(self, count: int, device: torch.device):
        super().__init__(count, device)
        self.events.append(("part", count))

    @contextmanager
    def on(self, number: int) -> Iterator[None]:  # type: ignore[override]
        self.events.append(number)
        yield

    def join(self) -> None:
        self.events.append("meet")


def test_functions_of_rows_run_on_lanes_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own; rows that need no gradient get none, and nothing is done for them."""
    Counted.events = []
    monkeypatch.setattr(side_by_side, "Lanes", Counted)
    a, b, c = (torch.arange(n, dtype=torch.float64) + 1 for n in (2, 3, 4))
    a.requires_grad_()
    c.requires_grad_()
    runs = [lambda x: x.square().sum(), lambda x: 3 * x, lambda x: x**3]
    outs = side_by_side.each_on_its_lane(runs, [a, b, c])
    assert Counted.events == [("part", 3), 0, 1, 2, "meet"]
    assert [out.tolist() for out in outs] == [5.0, [3.0, 6.0, 9.0], [1.0, 8.0, 27.0, 64.0]]
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    (7 * outs[0] + outs[1].sum() + (weights * outs[2]).sum()).backward()
    assert Counted.events[5:] == [("part", 2), 0, 1, "meet"]
    assert a.grad is not None
    assert c.grad is not None
    assert a.grad.tolist() == [14.0, 28.0]
    assert c.grad.tolist() == [3.0, 24.0, 81.0, 192.0]
    assert b.grad is None


@pytest.mark.parametrize("how", ["no gradient is wanted", "no row needs one"])
def test_functions_of_rows_without_a_gradient(how: str) -> None:
    x = torch.ones(3, requires_grad=how == "no gradient is wanted")
    with torch.set_grad_enabled(how == "no row needs one"):
        (out,) = side_by_side.each_on_its_lane([lambda row: row + 1], [x])
    assert out.tolist() == [2.0] * 3
    assert not out.requires_grad


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    (out,) = side_by_side.each_on_its_lane([lambda row: row**2], [x])
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
