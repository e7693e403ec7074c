"""Stacks of models that differ in how much they train: each ends as it would alone."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import CASES, COUNTS, distance, held_out, make, make_single, mirrored, scored, trained, until_fits
from torch import Tensor, nn

from fedaudit import adam
from fedaudit.errors import ContractError
from fedaudit.training import cuda_graphs
from fedaudit.training.fit import Opt, Running, Turns
from fedaudit.training.stacked import mapped_loss, stack, stackable, steppers
from fedaudit.training.stacked.given import stacked_given
from fedaudit.training.stacked.layers import FullNorm2d, NarrowConv2d
from fedaudit.training.stacked.mapped_loss import _Picks
from fedaudit.training.stacked.masked_norms import MaskedNorms
from fedaudit.training.stacked.stack import Job, _filled, _Fitting, fit_together
from fedaudit.training.stacked.stackable import stacks, why_not
from fedaudit.training.stacked.steppers import Stepper, stepper


@pytest.mark.parametrize("case", CASES)
def test_each_ends_as_it_would_alone(case: str) -> None:
    together, before = (make(counts=COUNTS, **CASES[case]) for _ in range(2))
    assert why_not(together) is None
    found, (alone, wanted) = fit_together(together), trained(case)
    assert distance(alone, before) > 1e-2, "nothing was trained, so nothing was compared"
    assert distance(together, alone) < 1e-10
    for a, b in zip(found, wanted, strict=True):
        assert (a.epochs, a.steps) == (b.epochs, b.steps)
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.rng.get_state(), b.rng.get_state()), "it drew as much as alone"
        assert not a.model.training, "the mode is as before"


def test_adam_in_one_kernel_is_adam_by_its_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a stack's Adam goes over all numbers once: also with gradients that lie otherwise in memory,
    and with models that have come differently far."""
    case = CASES["adam keeps each model's own count"]
    fused, plain = make(counts=COUNTS, **case), make(counts=COUNTS, **case)
    calls: list[int] = []
    kernel = torch._fused_adam_  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "_fused_adam_", lambda *given, **how: calls.append(1) or kernel(*given, **how))
    fit_together(plain)
    assert not calls
    monkeypatch.setattr(steppers, "_has_fused", lambda device: True)
    fit_together(fused)
    assert calls
    assert distance(fused, plain) < 1e-12
    how, params = stepper(adam(0.1)), {"w": torch.ones(2, 3, 4, dtype=torch.float64)}
    assert isinstance(how, Stepper)
    state, turned = how.state(params), torch.arange(24.0, dtype=torch.float64).view(2, 4, 3).transpose(1, 2)
    state["t"] += torch.tensor([0, 5])
    how.step(params, {"w": turned}, state)
    m, v = 0.1 * turned, 0.001 * turned.square()
    t = torch.tensor([1.0, 6.0], dtype=torch.float64)[:, None, None]
    wanted = 1 - 0.1 * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    torch.testing.assert_close(params["w"], wanted, atol=1e-12, rtol=1e-12)


def test_until_ends_the_models_at_different_times() -> None:
    """Else the cases above would not show that a model leaves the stack alone."""
    for case in ("until", "until with batch norm"):
        assert len({fitted.epochs for fitted in trained(case)[1]}) > 1
    for case in ("running", "running, augmented, batch norm"):
        epochs = [fitted.epochs for fitted in trained(case)[1]]
        assert len(set(epochs)) > 2
        assert epochs.count(0) == 1, "one has reached its goal before"
        assert max(epochs) < CASES[case]["epochs"]


def test_a_running_score_is_one_of_all_models_of_a_stack_or_of_none() -> None:
    a, b, plain, by_function = (
        *make("mlp", [9, 9], loss=scored, each=lambda i, m: {"until": Running(0.1 * i)}),
        *make("mlp", [9], loss=scored),
        *make("mlp", [9], loss=scored, until=until_fits),
    )
    assert why_not([a, b]) is None, "their goals may differ"
    for other in (plain, by_function):
        for pair in ([a, other], [other, a]):
            assert why_not(pair) == "one of them ends by its running score, and the other does not"
    assert why_not([plain, by_function]) is None
    (together,) = make("mlp", [9], loss=scored, until=Running(0.5), separable=False)
    assert stackable.never_stacked(together) == "its training is refused"
    with pytest.raises(ContractError, match="has no score of each row"):
        fit_together([together])
    opt = Opt(torch.optim.RMSprop, {"lr": 0.1})
    assert "different numbers" in why_not(make("mlp", [9, 9], loss=scored, until=Running(0.5), opt=opt))


def test_parts_that_are_gone_through_several_times_count_as_often() -> None:
    """Both trainings are planned and scored by the rows that an epoch goes through, and not by those there are."""

    def each(i: int, m: nn.Module) -> dict[str, Any]:
        return {"turns": Turns((5, 4), "step", ((3, 1), (1, 2))[i]), "until": Running(0.95)}

    together, alone = (make("mlp", [9, 9], loss=scored, epochs=12, each=each) for _ in range(2))
    assert [job.planned for job in together] == [12 * (3 * 2 + 1), 12 * (2 + 2 * 1)]
    found, wanted = fit_together(together), [job.alone() for job in alone]
    assert [(a.epochs, a.steps) for a in found] == [(b.epochs, b.steps) for b in wanted]
    assert all(1 < a.epochs < 12 for a in found), "a goal that is passed at some point"
    assert distance(together, alone) < 1e-10
    assert [a.loss for a in found] == pytest.approx([b.loss for b in wanted], abs=1e-5)


def test_a_running_score_is_looked_at_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look waits for the device. Nothing is written into the models before the end."""
    looks: list[int] = []
    passed = Running.passed
    monkeypatch.setattr(Running, "passed", lambda self, *of: looks.append(1) or passed(self, *of))
    monkeypatch.setattr(stack.Stack, "write", None)
    found = fit_together(make(counts=COUNTS, **CASES["running"]))
    assert len(looks) == sum(fitted.epochs for fitted in found)


def test_a_loss_without_scores_leaves_models_as_they_were() -> None:
    """It is refused before the first step, and the models stay in the modes they had."""
    jobs, before = (make("cnn_bn@0.25", COUNTS, until=Running(0.5)) for _ in range(2))
    for job in jobs:
        job.model.train()
    with pytest.raises(ContractError, match="it must give two columns"):
        fit_together(jobs)
    assert all(job.model.training for job in jobs)
    assert distance(jobs, before) == 0


def test_a_compiled_loss_with_scores_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_loss, "compiled_losses", {})
    jobs = [*make("mlp", [9], loss=scored), *make("mlp", [9, 9], loss=scored, until=Running(0.5))]
    plain, one, other = (mapped_loss.mapped_loss(job, {}, compile=True, several=True) for job in jobs)
    assert one is other
    assert one is not plain


def test_unequal_models_with_batch_norm_take_their_steps_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their batches are filled up: no step is taken for one of them alone."""
    taken: list[int] = []
    step = _Fitting._step

    def counted(self: _Fitting, group: Any) -> None:
        taken.append(len(group))
        step(self, group)

    monkeypatch.setattr(_Fitting, "_step", counted)
    jobs = make("cnn_bn@0.25", COUNTS)
    fit_together(jobs)
    assert len(taken) == 16, "as many as the longest takes: 30 rows in batches of 4, twice"
    taken.clear()
    fit_together(make("cnn_bn@0.25", COUNTS, loss=mirrored))
    assert len(taken) > 16, "where batch norms see other rows there are groups of one size"


def test_a_batch_norm_without_its_filling_is_that_of_the_rows() -> None:
    """Output, gradients and running statistics, for rows, signals and images."""
    counts, n = torch.arange(8) < 5, 5
    for make_norm, shape in ((nn.BatchNorm1d, (3,)), (nn.BatchNorm1d, (3, 4)), (nn.BatchNorm2d, (3, 4, 2))):
        norms = [make_norm(3, momentum=0.3, dtype=torch.float64) for _ in range(2)]
        x, weights = 3 + torch.randn(8, *shape, dtype=torch.float64), torch.randn(n, *shape, dtype=torch.float64)
        found = []
        for norm, masked in zip(norms, (False, True), strict=True):
            with torch.no_grad():
                norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
                norm.bias.copy_(torch.tensor([0.1, 0.0, 3.0]))
            mine = x.clone().requires_grad_()
            with MaskedNorms(counts) if masked else nullcontext():
                out = norm(mine if masked else mine[:n])[:n]
            gradients = torch.autograd.grad((out * weights).sum(), [mine, norm.weight, norm.bias])
            found.append([out, *norm.buffers(), *gradients])
            with MaskedNorms(counts) if masked else nullcontext():
                found[-1].append(norm.eval()(x))  # by the running statistics: nothing to leave out
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-11, rtol=0)


def test_parts_that_take_turns() -> None:
    def each(i: int, model: nn.Module) -> dict[str, Any]:
        return {"turns": Turns((COUNTS[i] // 2, COUNTS[i] - COUNTS[i] // 2), by="step" if i % 2 else "epoch")}

    together, alone = make("mlp", COUNTS, each), make("mlp", COUNTS, each)
    fit_together(together)
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


def test_a_stack_that_fails_leaves_models_as_they_were() -> None:
    calls = []

    def fails(f: Any, x: Tensor, y: Tensor) -> bool:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("no more")
        return False

    together, before = make("mlp", COUNTS, epochs=5, until=fails), make("mlp", COUNTS)
    with pytest.raises(RuntimeError, match="no more"):
        fit_together(together)
    assert distance(together, before) == 0
    assert not any(job.model.training for job in together)


def test_groups_are_by_what_must_be_equal() -> None:
    def drop(job: Job) -> Job:
        job.model.add_module("drop", nn.Dropout(0.5))
        return job

    jobs = [
        *make("mlp", [10, 20]),
        *make("cnn@0.25", [10]),
        *make("mlp", [15], opt=adam()),
        *make("mlp", [12]),
        *make("mlp", [12], opt=adam()),
        *map(drop, make("mlp", [12])),
        *make("cnn_bn@0.25", [12, 3]),
        *make("mlp", [12, 3], loss=held_out, separable=False, given={"held": torch.ones(4)}),
    ]
    groups, alone = stacks(jobs)
    assert groups == [[0, 1, 4], [3, 5], [7, 8]]
    assert alone.keys() == {2, 6, 9, 10}
    assert alone[2] == "the models differ"
    assert "dropout" in alone[6]
    assert "whole batch" in alone[10]


def test_hooks_with_other_numbers_are_other_models() -> None:
    def scaled(job: Job, by: float) -> Job:
        job.model.register_forward_hook(lambda m, i, out: out / by)
        return job

    a, b, c = make("mlp", [9, 9, 9])
    assert why_not([scaled(a, 2.0), scaled(b, 2.0)]) is None
    assert why_not([a, scaled(c, 3.0)]) == "the models differ"


def test_an_optimiser_of_ones_own_steps_a_whole_stack_only() -> None:
    class Own(torch.optim.SGD):
        elementwise = True

    equal, alone = (make("mlp", [12, 12], opt=Opt(Own, {"lr": 0.1, "momentum": 0.9})) for _ in range(2))
    assert why_not(equal) is None
    fit_together(equal)
    for job in alone:
        job.alone()
    assert distance(equal, alone) < 1e-10
    assert "different numbers" in why_not(make("mlp", [12, 20], opt=Opt(Own, {"lr": 0.1})))


def test_filling_is_not_more_than_half() -> None:
    assert _filled({0: 4, 1: 4, 2: 1}) == [[0, 1, 2]]
    assert _filled({0: 40, 1: 3, 2: 4, 3: 2}) == [[0], [1, 2, 3]]


def test_a_class_that_is_picked_by_comparing_is_the_same_loss() -> None:
    """What stacks do on a GPU: no index, whose gradient there has no fixed order."""
    from torch.nn.functional import cross_entropy, log_softmax, nll_loss

    out, y = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 1, 1, 2])
    weight = torch.arange(4.0, dtype=torch.float64)
    for loss in (
        lambda: cross_entropy(out, y, reduction="none"),
        lambda: nll_loss(log_softmax(out, 1), y, reduction="none"),
        lambda: cross_entropy(out, y, weight=weight, reduction="none"),
        lambda: cross_entropy(out, y)[None],
        lambda: cross_entropy(out, out.detach().softmax(1), reduction="none"),
    ):
        wanted = loss()
        with _Picks():
            found = loss()
        torch.testing.assert_close(found, wanted, atol=1e-15, rtol=0)
        (a,), (b,) = (torch.autograd.grad(v.square().sum(), out) for v in (found, wanted))
        torch.testing.assert_close(a, b, atol=1e-14, rtol=0)


def test_a_stack_on_a_gpu_has_no_gradient_of_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for among all operations of a stack that takes the GPU's way on this CPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("fedaudit.training.stacked.stackable.on_gpu", lambda rows: True)
    together, alone = make("cnn_bn@0.25", [9, 9]), make("cnn_bn@0.25", [9, 9])
    with Log():
        fit_together(together)
    assert not [name for name in seen if "scatter" in name or "gather" in name]
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


def test_what_a_compiler_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where steps are compiled: the first training tries it, and goes on without; the next does not."""
    tried = []

    def refuses(jobs: list[Job]) -> None:
        tried.append(jobs)
        raise RuntimeError("a loss that draws")

    for name, value in (("compiles", lambda: True), ("fit_together", refuses), ("refused", set())):
        monkeypatch.setattr(stack, name, value)
    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    monkeypatch.setattr(cuda_graphs, "unrecorded", {})
    a, b = make("cnn", [8, 8])
    assert a.alone().steps == b.alone().steps == 4
    assert len(tried) == 1
    assert list(cuda_graphs.unrecorded) == ["not compiled: RuntimeError: a loss that draws"]


@pytest.mark.parametrize("traced", ["eager"], indirect=True)
def test_networks_with_batch_norms_are_compiled_in_16_bits(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; dynamo traces all of it, without making kernels. Batch norms keep their precision: to the bit it is
    what hooks gave, which no compiler takes."""
    monkeypatch.setattr(mapped_loss, "quicker", lambda model, **how: model)  # it rounds in other places
    first, again, hooked, full = (make_single("cnn_bn@0.25", [8, 8], epochs=2) for _ in range(4))
    with cuda_graphs.conditions("recorded", bf16=True):
        stack.fit_together(first, compile=True)
        stack.fit_together(again, compile=True)
        assert len(traced) == 1, "the first one's is used again"
        monkeypatch.setattr(mapped_loss, "in_full", lambda model: model)
        stack.fit_together(hooked)
    assert distance(first, again) == 0
    assert distance(first, hooked) == 0
    with cuda_graphs.conditions("recorded"):
        stack.fit_together(full, compile=True)
    assert len(traced) == 2, "another precision is another function"


def test_what_is_compiled_in_16_bits_has_the_quicker_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is compiled, hooks do: a model whose layers are called from elsewhere is not copied."""
    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    (job,) = make("cnn_bn@0.25", [8])
    with cuda_graphs.conditions("recorded", bf16=True):
        compiled, plain = (mapped_loss.MappedLoss(job, {}, compile=how, several=True) for how in (True, False))
    kinds = [{type(m) for m in found.model.modules()} for found in (compiled, plain)]
    assert {NarrowConv2d, FullNorm2d} <= kinds[0]
    assert FullNorm2d not in kinds[1]


@pytest.mark.long
def test_a_loss_that_draws_is_compiled_for_a_stack_of_one(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Augmentation draws inside the loss, as FedAF's server does on CIFAR-10. Dynamo traces it as on a GPU, without
    making kernels; the draws and so the models are those of eager training."""

    def noisy(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(f(x + torch.randn_like(x)), y, reduction="none")

    eager, mine = (make("cnn_bn@0.25", [8], loss=noisy, epochs=2) for _ in range(2))
    torch.manual_seed(3)
    wanted = eager[0].alone()
    monkeypatch.setattr(stack, "compiles", lambda: True)
    monkeypatch.setattr(stack, "refused", set())
    torch.manual_seed(3)
    found = mine[0].alone()
    assert len(traced) == 1
    assert not cuda_graphs.unrecorded
    assert distance(eager, mine) < 1e-10
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)


def test_batch_norms_of_one_channel_are_trained_alone() -> None:
    """cuDNN refuses what a map over models makes of them."""
    groups, alone = stacks(make("cnn_bn@0.0625", [8, 8]))
    assert groups == []
    assert set(alone.values()) == {"a batch norm of one channel cannot be mapped over models"}
    assert stacks(make("cnn_bn@0.0625", [8, 8], norms="running"))[0] == [[0, 1]]
    assert stacks(make("cnn_bn@0.125", [8, 8]))[0] == [[0, 1]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"epochs": 2, "steps": None}, None),
        ({"epochs": None, "steps": 3}, None),
        ({"epochs": None, "steps": None}, "its training is refused"),
        ({"epochs": 2, "steps": 3}, "its training is refused"),
        ({"turns": Turns((5, 7))}, None),
        ({"turns": Turns((5, 6))}, "its training is refused"),
        ({"turns": Turns((5, 8))}, "its training is refused"),
    ],
)
def test_what_fit_refuses_is_left_to_fit(options: dict[str, Any], why: str | None) -> None:
    """Twelve records: epochs or steps, not both, and parts that add up to the records."""
    (job,) = make("mlp", [12], **options)
    assert stackable.never_stacked(job) == why


def test_a_loss_of_images_alone_is_stacked() -> None:
    """Jobs without labels have one tensor of rows."""

    def energy(f: Any, x: Tensor) -> Tensor:
        return f(x).square().sum(1)

    def unlabelled() -> list[Job]:
        jobs = make("mlp", [5, 9], loss=energy)
        return [Job(job.model, job.loss, job.rows[:1], job.rng, job.options) for job in jobs]

    together, alone = unlabelled(), unlabelled()
    fit_together(together)
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10


def test_who_trains_alone_as_a_stack_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam does where bits need not be torch's and the step can be recorded; everything on a GPU that compiles does."""
    ((plain,), (by_adam,)) = make("mlp", [9]), make("mlp", [9], opt=adam())
    assert not by_adam._as_stack, "on this processor nothing is recorded"
    monkeypatch.setattr(stack, "stacks_networks", lambda: True)
    monkeypatch.setattr(stack, "recordable", lambda model, device, planned: planned == 6)
    assert by_adam._as_stack
    assert not plain._as_stack
    assert not make("mlp", [9], opt=adam(), epochs=1)[0]._as_stack
    monkeypatch.setattr(stack, "stacks_networks", lambda: False)
    assert not by_adam._as_stack
    monkeypatch.setattr(stack, "compiles", lambda: True)
    assert not plain._as_stack
    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    assert plain._as_stack


def test_the_faster_of_two_ways_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take 1 s where they are recorded, and convolutions 9 s."""
    monkeypatch.setattr(stack, "_faster", {})
    monkeypatch.setattr(stack, "may_choose", lambda: True)
    fitting = SimpleNamespace(
        jobs=make("mlp", [5]), slots=[0, 1], device=torch.device("cpu"), mapped=SimpleNamespace(convolves=True)
    )
    recorded: list[bool] = []
    monkeypatch.setattr(stack, "record", lambda step, state: recorded.append(fitting.mapped.products) or recorded[-1])
    monkeypatch.setattr(stack, "timed", lambda recording, state: 1.0 if recording else 9.0)
    assert _Fitting._choose(fitting, list, [], 4, False) is True
    assert recorded == [True, False]
    assert _Fitting._choose(fitting, list, [], 4, False) is True
    assert recorded == [True, False, True], "it is known now"
    monkeypatch.setattr(stack, "timed", lambda recording, state: 9.0 if recording else 1.0)
    assert _Fitting._choose(fitting, list, [], 5, False) is False, "other sizes may have another faster way"
    assert fitting.mapped.products is False


def test_tied_weights_are_tied_in_half_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    caller = mapped_loss.Caller(net)
    f = mapped_loss.Functional(caller, dict(net.named_parameters()), {}, mapped_loss.places(caller))
    x = torch.randn(4, 3)
    assert torch.equal(f(x), net(x))
    monkeypatch.setattr(mapped_loss, "halves", lambda: torch.bfloat16)
    found = f(x)
    assert found.dtype == torch.float32
    assert not torch.equal(found, net(x))
    torch.testing.assert_close(found, net(x), atol=0.05, rtol=0.05)


def test_a_loss_is_compiled_once_for_each_shape_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second training may have other batches. Steps with a mask have functions of their own. Beyond the most shapes,
    and where rows are not worth it, the loss runs as it is."""
    made: list[str] = []
    monkeypatch.setattr(mapped_loss, "_compile", lambda run: made.append(run()) or (lambda *of: f"compiled {run()}"))
    monkeypatch.setattr(mapped_loss, "FORMS", 4)
    (job,) = make("mlp", [8])
    mapped = mapped_loss.MappedLoss(job, {}, compile=True, several=True)
    mapped._plain, mapped._masked = (lambda *of: "plain"), (lambda *of: "masked")  # type: ignore[assignment,return-value]

    def call(n: int, masked: bool = False, **how: Any) -> Any:
        return mapped({}, {}, [torch.zeros(n, 2)], {}, torch.ones(n) if masked else None, **how)

    assert [call(8), call(5), call(8)] == ["compiled plain"] * 3
    assert call(7, compiled=False) == "plain"
    assert [call(8, masked=True) for _ in range(2)] == ["compiled masked"] * 2
    assert made == ["plain", "plain", "masked"]
    told: list[str] = []
    monkeypatch.setattr(cuda_graphs, "unrecorded", {})
    with cuda_graphs.listening(told.append):
        assert [call(4), call(8)] == ["compiled plain"] * 2
        assert told == []
        assert [call(3), call(4)] == ["plain", "compiled plain"]
    assert told == ["not compiled: a loss whose batches or numbers come in more than 4 forms"]
    assert len(made) == 4
    (normed,) = make("cnn_bn@0.25", [8], separable=False)
    mapped = mapped_loss.MappedLoss(normed, {}, compile=True, several=True)
    mapped._masked = lambda *of: "masked"  # type: ignore[assignment,return-value]
    assert call(8, masked=True) == "masked", "masks of batch norms are no part of what is compiled"


def test_every_loss_is_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes one piece of code so many times and not more, and then says nothing."""
    traced: list[Any] = []
    compiler = torch.compile

    def counted(run: Any, dynamic: bool, fullgraph: bool, options: Any) -> Any:
        assert (dynamic, fullgraph, options) == (False, True, {"fallback_random": True})
        return compiler(
            run, dynamic=False, fullgraph=True, backend=lambda graph, example: traced.append(graph) or graph.forward
        )

    monkeypatch.setattr(torch, "compile", counted)
    with torch._dynamo.config.patch(recompile_limit=2):  # eight otherwise
        for several in (True, False):
            traced.clear()
            for n in range(4):
                (job,) = make("mlp", [8], loss=lambda f, x, y, scale=n: scale * f(x).sum(1))
                mapped = mapped_loss.MappedLoss(job, {}, compile=True, several=several)
                params = {name: p.detach()[None] for name, p in job.model.named_parameters()}
                rows = [row[None] for row in job.rows]
                means, _ = mapped(params, {}, rows, {}, None)
                assert means.tolist() == pytest.approx([n * float(job.model(job.rows[0]).sum(1).mean().detach())])
            assert len(traced) == 4


def test_other_numbers_are_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes them for granted, and other rows' shapes too. Tensors of one form may hold other numbers."""
    made: list[Any] = []
    monkeypatch.setattr(mapped_loss, "_compile", lambda run: made.append(run) or run)
    (job,) = make("mlp", [8])
    mapped = mapped_loss.MappedLoss(job, {}, compile=True, several=True)
    mapped._plain = lambda *of: None  # type: ignore[assignment,return-value]

    def call(given: Any, labels: torch.Tensor | None = None) -> int:
        mapped({}, {}, [torch.zeros(8, 2), torch.zeros(8) if labels is None else labels], given, None)
        return len(made)

    assert [call({"mu": 0.1}), call({"mu": 0.1}), call({"mu": 0.2}), call({"mu": 0.1})] == [1, 1, 2, 2]
    assert [call({"w": torch.zeros(3)}), call({"w": torch.ones(3)}), call({"w": torch.zeros(4)})] == [3, 3, 4]
    assert [call({"mu": 0.1}, torch.zeros(8, 5)), call({"mu": 0.1}, torch.zeros(8, dtype=torch.int64))] == [5, 6]


@pytest.mark.parametrize("several", [True, False])
def test_a_loss_that_cannot_be_compiled_runs_as_it_is_and_that_is_told(
    several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch alone would compile what it can of it, or nothing, without a word."""
    tried: list[Any] = []
    compiler = torch.compile

    def counted(run: Any, **how: Any) -> Any:
        made = compiler(run, dynamic=False, fullgraph=how["fullgraph"], backend="eager")
        return lambda *of: tried.append(run) or made(*of)

    def breaks(f: Any, x: Tensor, y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return f(x).sum(1)

    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(cuda_graphs, "unrecorded", {})
    (job,) = make("mlp", [8], loss=breaks)
    mapped = mapped_loss.MappedLoss(job, {}, compile=True, several=several)
    params = {name: p.detach()[None] for name, p in job.model.named_parameters()}
    told: list[str] = []
    with cuda_graphs.listening(told.append):
        for _ in range(3):
            means, _ = mapped(params, {}, [row[None] for row in job.rows], {}, None)
            assert means.tolist() == pytest.approx([float(job.model(job.rows[0]).sum(1).mean().detach())])
    assert len(tried) == len(told) == 1
    assert told[0].startswith("not compiled: Unsupported: ")


def test_losses_of_one_text_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method may make its loss anew in each round. Other plain values around it make it another one."""
    monkeypatch.setattr(mapped_loss, "compiled_losses", {})

    def made(scale: float) -> Any:
        return lambda f, x, y: scale * f(x).sum(1)

    jobs = [make("mlp", [9], loss=made(scale))[0] for scale in (2.0, 2.0, 3.0)]
    one, other, third = (mapped_loss.mapped_loss(job, {}, compile=True, several=True) for job in jobs)
    assert one is other
    assert third is not one
    (job,) = make("cnn@0.25", [9], loss=made(2.0))
    assert mapped_loss.mapped_loss(job, {}, compile=True, several=True) is not one, "of another network"


@pytest.mark.parametrize(
    ("counts", "epochs", "options", "sizes"),
    [
        ([7], 400, {}, {3}),
        ([7], 399, {}, set()),
        ([8], 400, {}, set()),
        ([3], 400, {}, set()),
        ([15], 400, {}, {3}),
        ([19], 400, {}, set()),
        ([7, 11], 400, {}, {3}),
        ([7, 10], 400, {}, set()),
        ([7, 8], 400, {}, set()),
        ([7], None, {"steps": 800}, {3}),
        ([7], None, {"steps": 799}, set()),
        ([7], 400, {"turns": Turns((3, 4))}, set()),
    ],
)
def test_last_batches_are_compiled_where_there_are_many(
    counts: list[int], epochs: int | None, options: dict[str, Any], sizes: set[int]
) -> None:
    """All models must have the same, in every fourth step or more, 400 times or more."""
    jobs = make("mlp", counts, epochs=epochs, batch=4, **options)
    assert stack.last_batches(jobs) == sizes
    assert _Fitting(jobs, compile=False).compiled_sizes == {min(4, max(counts)), *sizes}


@pytest.mark.parametrize("models", [1, 2])
def test_what_is_compiled_of_a_stack_s_steps(models: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches, and last ones if there are many, of all models; what is left when one has ended runs as it is."""
    shapes: list[tuple[int, ...]] = []

    def traced(run: Any) -> Any:
        def compiled(params: Any, rest: Any, rows: Any, *of: Any) -> Any:
            shapes.append(tuple(rows[0].shape[:2]))
            return run(params, rest, rows, *of)

        return compiled

    monkeypatch.setattr(stackable, "on_gpu", lambda rows: True)
    monkeypatch.setattr(mapped_loss, "_compile", traced)
    monkeypatch.setattr(mapped_loss, "quicker", lambda model, **how: model)

    def trained(counts: list[int], **options: Any) -> dict[tuple[int, ...], int]:
        shapes.clear()
        monkeypatch.setattr(mapped_loss, "compiled_losses", {})
        mine, alone = (make("cnn_bn@0.25", counts, batch=4, **options) for _ in range(2))
        fit_together(mine, compile=True)
        for job in alone:
            stack.fit(job.model, job.loss, job.rows, rng=job.rng, **job.options)
        assert distance(mine, alone) < 1e-10
        return {shape: shapes.count(shape) for shape in shapes}

    assert trained([7] * models, epochs=3) == {(models, 4): 3}
    monkeypatch.setattr(stack, "LASTING", 3)
    assert trained([7] * models, epochs=3) == {(models, 4): 3, (models, 3): 3}
    if models == 2:
        monkeypatch.setattr(cuda_graphs, "unrecorded", {})
        assert trained([8, 8], epochs=None, each=lambda i, m: {"steps": 2 + 3 * i}) == {(2, 4): 2, (1, 4): 3}
        assert not cuda_graphs.unrecorded
        assert trained([8, 8], epochs=None, each=lambda i, m: {"steps": 2 + 2 * i}) == {(2, 4): 2}
        why = "not compiled: fewer than 3 steps of models that are left when others have ended"
        assert list(cuda_graphs.unrecorded) == [why]


@pytest.mark.parametrize(("records", "group"), [(False, [0, 2]), (True, [0]), (True, [2, 0])])
def test_a_step_is_replayed_only_for_all_who_are_active(records: bool, group: list[int]) -> None:
    """Nothing else of the training is looked at: neither batches nor recordings."""
    here: Any = SimpleNamespace(records=records, active=[0, 2])
    assert _Fitting._recorded_step(here, group) is False


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1}, True),
        ({"lr": torch.tensor(0.1), "momentum": 0.9}, False),
        ({"lr": 0.1, "momentum": torch.tensor(0.9)}, False),
    ],
)
def test_a_rate_that_is_a_tensor_is_left_to_torch(options: dict[str, Any], plain: bool) -> None:
    assert (type(stepper(Opt(torch.optim.SGD, options))) is steppers._SGD) is plain


def test_lists_of_unequal_lengths_are_no_form_that_all_share() -> None:
    with pytest.raises(ValueError, match="differs in form"):
        stacked_given([(torch.ones(2), torch.ones(2)), (torch.ones(2),)], dry=False)
