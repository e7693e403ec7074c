"""The positive control of distillation without data: one teacher that knows all classes, a student from scratch."""

from __future__ import annotations

import pytest

from fedaudit import Setting, run

# DENSE's generator does not see the label: it has to be fitted to each batch of noise anew, with more steps a turn, and
# to teachers with batch norm, whose statistics it imitates.
BUDGETS = {
    "dfrd": ("cnn", 5, {}),
    "fedftg": ("cnn", 5, {}),
    "dense": ("cnn_bn", 8, {"I_g": 30, "I_d": 10}),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", BUDGETS)
def test_a_student_reaches_four_fifths_of_its_teacher(method, tmp_path):
    """Digits, preset `digits`, one client that holds everything. The round is chosen on validation data."""
    model, rounds, values = BUDGETS[method]
    record = run(
        Setting.make(
            method=method, preset="digits", model=model, clients=1, partition="iid", holdout=0.0, aux=0.0,
            rounds=rounds, init="own", onednn="on", set={**values, "host": {"E": 2, "B": 32, "eta": 0.1}},
        ),
        out=tmp_path / "run",
    )  # fmt: skip
    teacher = record.result.last.clients.global_test.mean
    student = record.result.chosen.global_.test.accuracy
    assert teacher > 0.9
    assert student >= 0.8 * teacher, f"{student:.3f} of {teacher:.3f}"
