"""Recorded steps that one training leaves to the next: nothing is recorded twice, and no bit changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import CASES, COUNTS, distance, make
from torch.nn.functional import cross_entropy

from fedaudit import Augment, adam, run, sgd
from fedaudit.training import cuda_graphs
from fedaudit.training.fit import OFTEN
from fedaudit.training.stacked import kept_steps, stack
from fedaudit.training.stacked.kept_steps import KeptSteps, StepForm
from fedaudit.training.stacked.stack import Job, _Fitting, fit_together


@pytest.fixture(autouse=True)
def recorded(replays: list[int]) -> Iterator[None]:
    with cuda_graphs.conditions("recorded"):
        yield


def others(case: str) -> list[Job]:
    """The case's jobs with other weights, records and generators than `make` gives them."""
    jobs = make(counts=COUNTS, **CASES[case])
    for i, job in enumerate(jobs):
        torch.manual_seed(100 + i)
        for p in job.model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        job.rows[0].normal_(mean=0.3 * i)
        job.rng.manual_seed(50 + i)
    return jobs


@pytest.mark.parametrize(
    "case",
    [
        "momentum, decay, nesterov",
        "adam keeps each model's own count",
        "batch norm",
        "given",
        "cosine, by step",
        "augmented",
        pytest.param("batch norm left alone", marks=pytest.mark.long),
        pytest.param("own numbers of epochs", marks=pytest.mark.long),
        pytest.param("until", marks=pytest.mark.long),
        pytest.param("running", marks=pytest.mark.long),
        pytest.param("does not separate", marks=pytest.mark.long),
    ],
)
def test_a_second_training_records_nothing_and_has_the_bits_of_one_that_records(case: str, replays: list[int]) -> None:
    anew = others(case)
    wanted = fit_together(anew)
    kept_steps.forget()
    replays.clear()
    fit_together(make(counts=COUNTS, **CASES[case]))
    made, before = len(replays), sum(replays)
    assert made > 0
    again = others(case)
    found = fit_together(again)
    assert len(replays) == made, "the first training has recorded every step"
    assert sum(replays) > before
    assert found == wanted
    assert distance(again, anew) == 0


def test_steps_of_a_stack_that_has_shrunk_are_kept_too(replays: list[int]) -> None:
    for _ in range(3):
        fit_together(make("mlp@0.02", [8, 8, 8, 40]))
        assert len(replays) == 2, "one of four models, and one of the model that goes on alone"


def at_once(f: Any, x: torch.Tensor, y: torch.Tensor) -> bool:
    return True


def test_a_stack_that_has_moved_records_for_itself_alone(replays: list[int]) -> None:
    """Models that end first but stand first leave copies of the others behind, which no later training has."""
    ends = lambda i, m: {"until": at_once} if i < 2 else {}  # noqa: E731
    for std in (0.1, 0.3):
        jobs, alone = (make("mlp@0.02", [12] * 4, each=ends, epochs=6) for _ in range(2))
        for job in (*jobs, *alone):
            torch.manual_seed(int(10 * std))
            for p in job.model.parameters():
                torch.nn.init.normal_(p, std=std)
        fit_together(jobs)
        with cuda_graphs.conditions("eager"):
            for job in alone:
                job.alone()
        assert distance(jobs, alone) < 1e-10
    assert len(replays) == 3, "the whole stack's recording is kept"


def ce_of(weight: float) -> Callable[..., torch.Tensor]:
    def weighted(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return weight * cross_entropy(f(x), y, reduction="none")

    return weighted


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        ({"loss": ce_of(2.0)}, False),
        ({"loss": ce_of(3.0)}, True),
        ({"opt": sgd(0.2)}, True),
        ({"opt": adam(0.1)}, True),
        ({"opt": sgd(0.1, schedule="cosine")}, True),
        ({"batch": 5}, True),
        ({"epochs": 5}, False),
        ({"augment": Augment(flip=True)}, True),
        ({"arch": "mlp@0.1"}, True),
        ({"counts": [12, 12]}, True),
        ({"counts": [8, 12, 12]}, False),
        ({"counts": [12, 12, 13]}, True),
        ({"norms": "running"}, True),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_another_form_is_recorded_anew(change: dict[str, Any], anew: bool, replays: list[int]) -> None:
    how: dict[str, Any] = {"arch": "mlp@0.02", "counts": [12, 12, 12], "loss": ce_of(2.0), "opt": sgd(0.1), "epochs": 4}
    fit_together(make(**how))
    before = len(replays)
    jobs, alone = make(**{**how, **change}), make(**{**how, **change})
    fit_together(jobs)
    assert (len(replays) > before) == anew
    for job in alone:
        job.alone()
    assert distance(jobs, alone) < 1e-10


@pytest.mark.parametrize("number", [1.0, 2.0])
def test_a_number_that_a_loss_is_given_belongs_to_the_form(number: float, replays: list[int]) -> None:
    def times(f: Any, x: torch.Tensor, y: torch.Tensor, by: float, of: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return by * cross_entropy(f(x) + of[0], y, reduction="none")

    def jobs(by: float, add: float) -> list[Job]:
        given = lambda i, m: {"given": {"by": by, "of": (torch.full((4,), add * i, dtype=torch.float64).cumsum(0),)}}  # noqa: E731
        return make("mlp@0.02", [12, 12], each=given, loss=times, epochs=4)

    fit_together(jobs(1.0, 0.1))
    before = len(replays)
    these, those = jobs(number, 0.7), jobs(number, 0.7)
    fit_together(these)
    assert (len(replays) > before) == (number != 1.0)
    for job in those:
        job.alone()
    assert distance(these, those) < 1e-10, "tensors that a loss is given are those of this training"


@pytest.mark.parametrize("flag", ["allow_tf32", "benchmark"])
def test_other_kernels_are_recorded_anew(flag: str, replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fit_together(make("mlp@0.02", [12, 12]))
    before = len(replays)
    monkeypatch.setattr(torch.backends.cudnn, flag, not getattr(torch.backends.cudnn, flag))
    fit_together(make("mlp@0.02", [12, 12]))
    assert len(replays) > before


def test_a_model_with_a_hook_is_recorded_anew(replays: list[int]) -> None:
    """A hook may read what no argument tells."""
    for times in (1, 2):
        jobs = make("mlp@0.02", [12, 12])
        for job in jobs:
            job.model.register_forward_hook(doubled)
        fit_together(jobs)
        assert len(replays) == times
    assert not kept_steps._kept


def doubled(layer: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
    return 2 * out


def test_a_training_that_fails_leaves_nothing(replays: list[int]) -> None:
    def breaks(f: Any, x: torch.Tensor, y: torch.Tensor) -> bool:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fit_together(make("mlp@0.02", [12, 12], epochs=3, until=breaks))
    assert replays
    assert not kept_steps._kept


def test_what_was_used_least_recently_goes(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    def trains(width: float) -> int:
        before = len(replays)
        fit_together(make(f"mlp@{width / 10}", [12, 12]))
        return len(replays) - before

    monkeypatch.setattr(kept_steps, "MOST", 2)
    assert [trains(w) for w in (0.25, 0.5, 0.25, 1.0)] == [1, 1, 0, 1]
    assert [trains(w) for w in (0.25, 0.5)] == [0, 1], "0.5 went when 1.0 came"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    fit_together(make("mlp@0.05", [12, 12]))
    (small,) = kept_steps._kept
    by_hand = 24 * (64 * 8 + 8) + sum(t.nbytes for t in small.stack.tensors())
    assert small.bytes == by_hand
    small.grown = 1000
    assert small.bytes == by_hand + 1000
    monkeypatch.setattr(kept_steps, "_memory", lambda device: kept_steps.SHARE * (by_hand + 1000))
    kept_steps.forget()
    kept_steps.keep(small)
    assert kept_steps._kept == [small], "a quarter of the memory may be kept"
    small.grown = 1001
    kept_steps.forget()
    kept_steps.keep(small)
    assert kept_steps._kept == []


def test_two_trainings_at_a_time_never_share_memory() -> None:
    fit_together(make("mlp@0.02", [12, 12]))
    (steps,) = kept_steps._kept
    form = steps.form
    assert kept_steps.taken(form, 24) is steps
    assert kept_steps.taken(form, 24) is None, "it belongs to whoever took it"


def test_what_a_training_has_outgrown_goes(replays: list[int]) -> None:
    """A buffer grows from round to round, and its old memory would lie there for nothing. Of several the smallest goes,
    for one that is made in its place; of another form none."""
    for counts in ([12, 12], [20, 20], [16, 16]):
        fit_together(make("mlp@0.02", counts))
        kept_steps._kept[-1].form = StepForm(kept_steps._kept[-1].form.loss, "one")
    fit_together(make("mlp@0.1", [4, 4]))
    form = kept_steps._kept[0].form
    assert kept_steps.taken(form, 41) is None, "there is room for 40 rows"
    assert [len(steps.rows[0]) for steps in kept_steps._kept] == [40, 32, 8]
    kept_steps.forget()
    fit_together(make("mlp@0.02", [20, 20]))
    fit_together(make("mlp@0.02", [12, 12]))
    before = len(replays)
    for _ in range(3):  # two trainings by turns find memory for both
        fit_together(make("mlp@0.02", [12, 12]))
        fit_together(make("mlp@0.02", [20, 20]))
    assert len(replays) == before


def test_of_several_that_are_large_enough_the_smallest_is_taken() -> None:
    for counts in ([12, 12], [20, 20], [16, 16]):
        fit_together(make("mlp@0.02", counts))
        kept_steps._kept[-1].form = StepForm(kept_steps._kept[-1].form.loss, "one")  # so that the next is made anew
    form = kept_steps._kept[0].form
    assert [len(kept_steps.taken(form, count).rows[0]) for count in (25, 25, 1)] == [32, 40, 24]
    assert kept_steps._kept == []


def test_of_equal_ones_the_newest_is_taken_and_of_another_loss_none() -> None:
    for _ in range(2):
        fit_together(make("mlp@0.02", [12, 12]))
        kept_steps._kept[-1].form = StepForm(kept_steps._kept[-1].form.loss, "one")
    first, second = kept_steps._kept
    assert kept_steps.taken(StepForm(lambda f, x: f(x), "one"), 24) is None
    assert kept_steps._kept == [first, second], "nothing of another loss is outgrown"
    assert kept_steps.taken(first.form, 24) is second


def test_missing_memory_is_taken_from_kept_steps(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """A training begins again without them; if there are none, the error is the caller's."""
    fit_together(make("mlp@0.02", [12, 12]))
    full, tried = KeptSteps.refill, []

    def refills(self: KeptSteps, *given: Any) -> None:
        full(self, *given)
        tried.append(1)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(KeptSteps, "refill", refills)
    jobs, alone = make("mlp@0.02", [12, 12]), make("mlp@0.02", [12, 12])
    fit_together(make("mlp@0.1", [12, 12]))
    fit_together(jobs)
    assert len(tried) == 1
    assert list(cuda_graphs.unrecorded) == [cuda_graphs.MEMORY_FULL], "a run that is slower for it says so"
    for job in alone:
        job.alone()
    assert distance(jobs, alone) < 1e-10
    monkeypatch.setattr("fedaudit.training.stacked.stack.build", refuses)
    kept_steps.forget()
    with pytest.raises(torch.OutOfMemoryError):
        fit_together(make("mlp@0.02", [12, 12]))


def refuses(*given: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


def test_only_the_first_round_of_a_run_records(tmp_path: Path, replays: list[int]) -> None:
    """The run's end lets go of them."""
    how: dict[str, Any] = {"dataset": "digits", "model": "mlp@0.05", "clients": 3, "engine": "stacked"}
    run(method="fedavg", step="recorded", rounds=1, out=tmp_path / "one", **how)
    first = len(replays)
    assert first > 0
    assert not kept_steps._kept
    run(method="fedavg", step="recorded", rounds=4, out=tmp_path / "four", **how)
    assert len(replays) == 2 * first


def test_models_side_by_side_have_recordings_of_their_own(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """A model that is through costs nothing. One with a smaller last batch has a second recording, by OFTEN epochs."""
    monkeypatch.setattr("fedaudit.training.stacked.stack.goes_apart", lambda model, rows: True)
    counts, epochs = [16, 8, 10], OFTEN + 1  # of 4 rows: 4, 2, and 2 and a half steps an epoch
    for again in range(2):
        jobs, alone = make("cnn_bn@0.1", counts, epochs=epochs), make("cnn_bn@0.1", counts, epochs=epochs)
        fit_together(jobs)
        with cuda_graphs.conditions("eager"):
            for job in alone:
                job.alone()
        assert distance(jobs, alone) < 1e-10
        assert len(replays) == 3 + 1, "the next round has them"
        if not again:
            first = sorted(replays)
    half = epochs - (OFTEN - 1)  # of the smaller batches; those before OFTEN are eager
    assert first == sorted([4 * epochs, 2 * epochs, 2 * epochs, half])
    assert sorted(replays) == sorted([8 * epochs, 4 * epochs, 4 * epochs, half + epochs])


def test_a_stack_has_recordings_for_so_many_sizes_of_batches_at_most(
    monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    """Clients of other sizes train in it from round to round. The usual size is always recorded."""
    monkeypatch.setattr("fedaudit.training.stacked.stack.goes_apart", lambda model, rows: True)
    monkeypatch.setattr(kept_steps, "FORMS", 2)
    for counts in ([11, 11], [10, 10]):  # last batches of 3 and of 2 rows
        jobs, alone = (make("cnn_bn@0.1", counts, epochs=OFTEN + 1) for _ in range(2))
        fit_together(jobs)
        with cuda_graphs.conditions("eager"):
            for job in alone:
                job.alone()
        assert distance(jobs, alone) < 1e-10
        assert len(replays) == 2 * 2, "two models, with the usual size and that of the first last batch"


def test_models_side_by_side_share_no_memory(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """They are replayed at the same time. Recordings of one model share theirs."""
    monkeypatch.setattr("fedaudit.training.stacked.stack.goes_apart", lambda model, rows: True)
    pools: list[object] = []
    capture = cuda_graphs._capture

    def noted(step: Callable[[], cuda_graphs.Outputs]) -> Any:
        pools.append(cuda_graphs._now.pool)
        return capture(step)

    monkeypatch.setattr(cuda_graphs, "_capture", noted)
    monkeypatch.setattr(kept_steps, "new_pool", lambda device: object())
    fit_together(make("cnn_bn@0.1", [10, 12], epochs=OFTEN + 1))
    assert len(pools) == 3
    assert len(set(pools)) == 2
    assert pools[0] is not pools[1]


def test_a_tensor_of_another_shape_is_another_form(replays: list[int]) -> None:
    """One number for all classes would fit into the memory of one for each."""

    def shifted(f: Any, x: torch.Tensor, y: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return cross_entropy(f(x) * by, y, reduction="none")

    for shape, recorded in (((4,), 1), ((1,), 2), ((4,), 2)):
        given = {"given": {"by": torch.full(shape, 0.5, dtype=torch.float64)}}
        fit_together(make("mlp@0.02", [12, 12], each=lambda i, m, given=given: given, loss=shifted))
        assert len(replays) == recorded


def test_recordings_of_one_training_share_their_memory(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """Two trainings never share it: they may run at the same time."""
    pools: list[object] = []
    capture = cuda_graphs._capture

    def noted(step: Callable[[], cuda_graphs.Outputs]) -> Any:
        pools.append(cuda_graphs._now.pool)
        return capture(step)

    monkeypatch.setattr(cuda_graphs, "_capture", noted)
    monkeypatch.setattr(kept_steps, "new_pool", lambda device: object())
    fit_together(make("mlp@0.02", [8, 8, 8, 40]))
    fit_together(make("mlp@0.1", [8, 8, 8, 40]))
    first, again, other, last = pools
    assert first is again is not None
    assert other is last is not first
    assert cuda_graphs._now.pool is None


def test_what_recordings_hold_is_counted_while_they_live(replays: list[int]) -> None:
    assert kept_steps.held() == 0
    fit_together(make("mlp@0.02", [12, 12]))
    fit_together(make("mlp@0.1", [12, 12]))
    for steps, grown in zip(kept_steps._kept, (30, 4), strict=True):
        steps.grown = grown
    assert kept_steps.held() == sum(of() for of in cuda_graphs.holders) == 34
    taken = kept_steps._kept.pop()
    assert kept_steps.held() == 34, "one of them is being used"
    del taken, steps
    kept_steps.forget()
    gc.collect()
    assert kept_steps.held() == 0


def test_a_step_is_not_recorded_for_few_that_are_left(monkeypatch):
    """Of the group, job 1 has two of ten steps left and job 2 one of five. Three would be worth it."""
    monkeypatch.setattr("fedaudit.training.stacked.stack.WORTH_IT", 3)
    fitting = SimpleNamespace(
        usual=4, came={}, jobs=[SimpleNamespace(planned=n) for n in (50, 10, 5)],
        courses=[SimpleNamespace(steps=n) for n in (0, 8, 4)],
    )  # fmt: skip
    assert _Fitting._record(fitting, (4, False), [1, 2]) is False
    assert fitting.came == {(4, False): 1}
    fitting.courses[1].steps = 7
    with pytest.raises(AttributeError):  # now it begins to record
        _Fitting._record(fitting, (4, False), [1, 2])


@pytest.mark.parametrize(
    "case",
    [
        "adam keeps each model's own count",
        "batch norm",
        "augmented",
        "given",
        pytest.param("momentum, decay, nesterov", marks=pytest.mark.long),
        pytest.param("cosine, by step", marks=pytest.mark.long),
        pytest.param("own numbers of epochs", marks=pytest.mark.long),
        pytest.param("until", marks=pytest.mark.long),
        pytest.param("running", marks=pytest.mark.long),
    ],
)
def test_rows_that_are_large_are_fetched_batch_by_batch(
    case: str, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    """To the bit what a recording gives that reads them in place, also in a second training with more rows; and no
    memory of theirs is kept."""
    monkeypatch.setattr(stack, "goes_apart", lambda model, rows: True)
    found: dict[bool, Any] = {}
    for fetched in (False, True):
        monkeypatch.setattr(kept_steps, "LARGE", 1 if fetched else 1 << 40)
        kept_steps.forget()
        first, again = make(counts=COUNTS, **CASES[case]), others(case)
        results = fit_together(first), fit_together(again)
        assert 3 <= len(kept_steps._kept) <= len(COUNTS), "one with few steps records nothing"
        assert all(bool(steps.rows) is not fetched for steps in kept_steps._kept)
        assert all(steps.form.plain[-1][-1] is fetched for steps in kept_steps._kept)
        found[fetched] = results, first, again, sum(replays)
    (results, first, again, counted), (mine, *jobs, also) = found[False], found[True]
    assert mine == results
    assert distance(jobs[0], first) == distance(jobs[1], again) == 0
    assert also == 2 * counted > 0, "as many steps were replayed"


def test_when_rows_are_large(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """By their bytes, labels too, and where a stack has one model: rows of several have to be put together anyway."""
    (job,) = make("mlp@0.02", [12])
    size = 12 * (64 * 8 + 8)
    monkeypatch.setattr(kept_steps, "LARGE", size)
    assert kept_steps.fetches([job])
    assert not kept_steps.fetches(make("mlp@0.02", [11]))
    assert not kept_steps.fetches(make("mlp@0.02", [12, 12]))
    assert size == kept_steps.LARGE
    with cuda_graphs.conditions("eager"):
        assert not _Fitting([job], compile=False).fetches, "an eager step reads them where they are"


def test_fetched_rows_need_no_room(monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    """A training with more rows takes the steps of one with fewer, and only the batch that is next is held."""
    monkeypatch.setattr(stack, "goes_apart", lambda model, rows: True)
    monkeypatch.setattr(kept_steps, "LARGE", 1)
    fit_together(make("mlp@0.02", [12, 12]))
    made, before = len(replays), list(kept_steps._kept)
    jobs, alone = make("mlp@0.02", [40, 20]), make("mlp@0.02", [40, 20])
    fit_together(jobs)
    assert len(replays) == made
    assert all(any(steps is kept for kept in kept_steps._kept) for steps in before)
    for job in alone:
        job.alone()
    assert distance(jobs, alone) < 1e-10
    (steps, *_) = before
    assert steps.bytes == sum(t.nbytes for t in steps.stack.tensors())
    ((_, (x, y), *_),) = (of for recordings in steps.recordings.values() for of in recordings.values())
    assert (x.shape[:2], y.shape) == ((1, 4), (1, 4))
