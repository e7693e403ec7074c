"""Says which trainings can be carried out as one stack, and why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedaudit.errors import ContractError
from fedaudit.training.augment import treats_rows_alone
from fedaudit.training.cuda_graphs import each_run
from fedaudit.training.fit import (
    Running,
    check_pure,
    check_rows,
    running_score,
)
from fedaudit.training.stacked.given import stacked_given
from fedaudit.training.stacked.likeness import same_function, same_hooks
from fedaudit.training.stacked.masked_norms import maskable
from fedaudit.training.stacked.steppers import stepper

if TYPE_CHECKING:
    from fedaudit.training.stacked.stack import Job

refused: set[Any] = set()  # losses, each with a structure, that could not be trained as a stack of one in this run
each_run(refused.clear)


def stacks(jobs: Sequence[Job]) -> tuple[list[list[int]], dict[int, str]]:
    """Return the groups of jobs that become one stack each, by number, and why each of the others is trained alone."""
    groups: list[list[int]] = []
    alone: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for i, job in enumerate(jobs):
        if reason := never_stacked(job):
            alone[i] = reason
            continue
        for group in groups:
            other = unlike(jobs[group[0]], job)
            if other is None:
                group.append(i)
                break
            reasons[i] = other
            reasons.setdefault(group[0], other)
        else:
            groups.append([i])
    for group in groups:
        if len(group) == 1:
            alone[group[0]] = reasons.get(group[0], "there is no other to train it with")
    return [group for group in groups if len(group) > 1], alone


def why_not(jobs: Sequence[Job]) -> str | None:
    """Return why these cannot be trained as one stack; None if they can."""
    return never_stacked(jobs[0]) or next(
        (r for job in jobs[1:] if (r := never_stacked(job) or unlike(jobs[0], job))), None
    )


def never_stacked(job: Job) -> str | None:
    """Return why a job cannot be part of any stack; None if it can."""
    try:
        check_rows(job.rows)
        check_pure(job.loss)
        running_score(job.option("until"), job.option("separable", True))
    except ContractError:
        return "its training is refused"  # trained alone, it raises the error that says why
    how = stepper(job.option("opt"))
    if isinstance(how, str):
        return how
    if any(isinstance(m, _DropoutNd) and m.p > 0 for m in job.model.modules()):
        return "dropout draws for each model in turn"
    if not any(p.requires_grad for p in job.model.parameters()):
        return "nothing in it is trained"
    if job.option("norms", "batch") == "batch" and any(
        isinstance(m, _BatchNorm) and m.num_features == 1 for m in job.model.modules()
    ):
        return "a batch norm of one channel cannot be mapped over models"
    if not treats_rows_alone(job.option("augment")):
        return "its augmentation is not known to treat every row alone"
    turns = job.option("turns")
    if (job.option("epochs") is None) == (job.option("steps") is None) or (
        turns is not None and sum(turns.sizes) != len(job.rows[0])
    ):
        return "its training is refused"
    return None


def unlike(a: Job, b: Job) -> str | None:
    """Return why two jobs cannot be in one stack; None if they can."""
    if not same_function(a.loss, b.loss):
        return "the models are trained on different losses"
    if a.structure != b.structure or not same_hooks(a.model, b.model):
        return "the models differ"
    if [(row.shape[1:], row.dtype) for row in a.rows] != [(row.shape[1:], row.dtype) for row in b.rows]:
        return "the forms of their records differ"
    options = {"opt": None, "separable": True, "norms": "batch", "augment": None}
    if any(a.option(name, default) != b.option(name, default) for name, default in options.items()):
        return "their optimisers or options differ"
    if isinstance(a.option("until"), Running) != isinstance(b.option("until"), Running):
        return "one of them ends by its running score, and the other does not"
    together = stepper(a.option("opt")).together  # type: ignore[union-attr] # it is not a string: `never_stacked` came before
    if not (fills(a) or masks_norms(a)) and a.batch != b.batch:
        return "their batches differ in size, and the loss or a layer looks at a whole batch"
    if together and (a.planned, a.option("until")) != (b.planned, None):
        return f"{a.option('opt').make.__name__} counts steps for all of a stack, and these take different numbers"
    try:
        stacked_given([job.option("given") or {} for job in (a, b)], dry=True)
    except ValueError as e:
        return str(e)
    return None


def fills(job: Job) -> bool:
    """Return whether a batch may be filled up with rows that do not count: no row's loss depends on the other rows."""
    frozen = job.option("norms", "batch") == "running"
    return job.option("separable", True) and all(rowwise(layer, frozen) for layer in job.model.modules())


def masks_norms(job: Job) -> bool:
    """Return whether a batch may be filled up if its batch norms leave out the filling: nothing else mixes rows."""
    layers = list(job.model.modules())
    return job.option("separable", True) and all(maskable(layer) or rowwise(layer, False) for layer in layers)


def rowwise(layer: nn.Module, frozen: bool) -> bool:
    if isinstance(layer, _BatchNorm):
        return frozen and layer.running_mean is not None
    if isinstance(layer, _InstanceNorm):
        return False
    return type(layer).__module__.split(".")[0] in (
        "torch",
        "torchvision",
        "fedaudit",
    )  # a layer from elsewhere may do anything


def on_gpu(rows: Sequence[Tensor]) -> bool:
    return rows[0].device.type == "cuda"
