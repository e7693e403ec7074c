"""Which trainings may be one stack: each reason against it, by two jobs that differ in one thing alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import make

from fedaudit import Augment, adam, ce, sgd
from fedaudit.training.stacked.stackable import unlike


def another_loss(*given: Any) -> Any:
    return ce(*given)


def of_rows(job: Any, *rows: torch.Tensor) -> Any:
    return replace(job, rows=list(rows))


def with_options(job: Any, **options: Any) -> Any:
    return replace(job, options={**job.options, **options})


FORMS = "the forms of their records differ"
OPTIONS = "their optimisers or options differ"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda job: job, None),
        (lambda job: of_rows(job, job.rows[0][:5], job.rows[1][:5]), None),  # fewer records
        (lambda job: replace(job, loss=another_loss), "the models are trained on different losses"),
        (lambda job: replace(job, model=make("cnn@0.25", [9])[0].model), "the models differ"),
        (lambda job: of_rows(job, job.rows[0][..., :4], job.rows[1]), FORMS),
        (lambda job: of_rows(job, job.rows[0].float(), job.rows[1]), FORMS),
        (lambda job: of_rows(job, job.rows[0], job.rows[1].float()), FORMS),
        (lambda job: of_rows(job, *job.rows, job.rows[1]), FORMS),
        (lambda job: with_options(job, opt=adam(0.1)), OPTIONS),
        (lambda job: with_options(job, separable=False), OPTIONS),
        (lambda job: with_options(job, norms="running"), OPTIONS),
        (lambda job: with_options(job, augment=Augment(flip=True)), OPTIONS),
    ],
)
def test_what_two_trainings_must_have_in_common(change: Any, why: str | None) -> None:
    """Both have nine records; what is left out of the options counts as its default."""
    a, b = (with_options(job, opt=sgd(0.1)) for job in make("mlp", [9, 9]))
    assert unlike(a, change(b)) == why
    assert unlike(change(b), a) == why
    assert unlike(a, with_options(b, norms="batch", separable=True, augment=None)) is None
