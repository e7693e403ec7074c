"""What strategies show while they run unchanged: their names, and the global model after each round."""

from __future__ import annotations

from types import SimpleNamespace

import flower_apps
import numpy as np
import pytest

from fedaudit.flower import App, run_app
from fedaudit.flower.recorder import Recorder
from fedaudit.flower.strategies import _Watch


@pytest.mark.parametrize(
    ("name", "said"),
    [("strategy", "FedAvg"), ("own_start", "OwnStart"), ("threads", "FedAvg"), ("workflow", "FedAvg"),
     ("secure", "FedAvg")],
)  # fmt: skip
def test_the_model_after_each_round_is_known(name, said, tmp_path, monkeypatch):
    """Nodes add 1, 2 and 3 to every parameter: the mean grows by 2 in each round.

    SecAgg+ rounds what it sums to steps of 16 / 2**22, after it has scaled it by 10 / 1000: the error of the mean stays
    below 0.01.
    """
    models = []
    end = Recorder.end_round

    def noting(self):
        models.append(None if self.wire is None or not self.fresh else [t.numpy() for t in self.arrays.values()])
        end(self)

    monkeypatch.setattr(Recorder, "end_round", noting)
    client, server = getattr(flower_apps, name)()
    record = run_app(App(name, client, server), out=tmp_path / "run", nodes=3)
    assert f"server strategy: {said}" in record.notes
    assert len(models) == flower_apps.ROUNDS
    for t, model in enumerate(models, 1):
        for array, start in zip(model, flower_apps.START, strict=True):
            assert np.allclose(array, start + 2 * t, atol=0.01 if name == "secure" else 1e-6)


def test_only_the_outermost_call_of_a_strategy_counts():
    """A strategy that wraps two others: one name is noted, each once, and after an error the next call is outermost."""
    said = []
    watch = _Watch(SimpleNamespace(note=said.append, central=[]))
    outer, inner = type("Outer", (), {})(), type("Inner", (), {})()
    with watch._call(outer) as first:
        with watch._call(inner) as second, watch._call(inner) as third:
            assert (first, second, third) == (True, False, False)
        with watch._call(inner) as again:
            assert again is False
    with pytest.raises(ValueError, match="broken"), watch._call(outer):
        raise ValueError("broken")
    with watch._call(inner) as alone:
        assert alone is True
    assert said == ["server strategy: Outer", "server strategy: Inner"]


def test_the_outermost_call_of_a_strategy_counts_and_each_strategy_is_met_once():
    """A strategy that wraps another one calls it. Two strategies that are equal are two."""

    class Same:
        def __eq__(self, other):
            return True

        __hash__ = None

    notes = []
    watch = _Watch(SimpleNamespace(note=notes.append, central=[]))
    first, second = Same(), Same()
    with watch._call(first) as outermost:
        assert outermost
        with watch._call(second) as inner, watch._call(second) as innermost:
            assert not inner
            assert not innermost
        with watch._call(second) as again:
            assert not again, "still inside of the first one"
    assert notes == ["server strategy: Same"], "an inner one is not met"
    with watch._call(second) as outermost:
        assert outermost
    with watch._call(first):
        pass
    assert notes == ["server strategy: Same"] * 2
