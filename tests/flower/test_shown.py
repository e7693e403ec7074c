"""Apps that train no model: what the server sees is said, and what cannot be audited is named."""

from __future__ import annotations

import flower_apps
import pytest

from fedaudit.flower import App, run_app

NONE = "no reply holds a model of numbers"


def notes_of(name, tmp_path, **more):
    client, server = getattr(flower_apps, name)()
    return run_app(App(name, client, server), out=tmp_path / "run", nodes=3, **more)


@pytest.mark.parametrize(
    ("name", "sees", "more"),
    [
        ("analytics", "in the clear: QueryReply.query_results", None),
        ("xgboost", "in the clear: TrainReply.arrays, TrainReply.metrics", "TrainReply.arrays holds whole numbers"),
        ("vertical", "in the clear: QueryEmbeddingsReply.arrays", "--kind arrays=embeddings:record says so"),
    ],
)
def test_what_the_server_sees_is_said(name, sees, more, tmp_path):
    notes = notes_of(name, tmp_path).notes
    assert any(note.startswith(NONE) for note in notes)
    assert any(note.endswith(sees) for note in notes)
    assert more is None or any(more in note for note in notes)


@pytest.mark.parametrize("name", ["strategy", "secure"])
def test_an_app_that_trains_a_model_needs_no_such_words(name, tmp_path):
    assert not any(note.startswith(NONE) for note in notes_of(name, tmp_path).notes)
