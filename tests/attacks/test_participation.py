"""Who took part at all: told from a model that learned its clients by heart, and not from one under DP-SGD."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scenes import scene
from torch import nn

import fedaudit
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.claims import Attacked, TookPart
from fedaudit.attack.score import participation
from fedaudit.attacks.property import participation as attack
from fedaudit.runtime.run_record import read_record

SMALL = {"dataset": "digits", "model": "mlp", "eval_clients": False, "aux": 0.8, "holdout": 0.45}
SOME = {**SMALL, "clients": 20, "participation": 0.3, "rounds": 1, "partition": "iid"}
HARD = {"E": 30, "B": 4, "eta": 0.3}
PRIVATE = {"training": {"noise_multiplier": 2.0, "delta": 1e-2}}


@pytest.fixture(scope="module", params=["plain", "private"])
def some(request, tmp_path_factory):
    """Six clients of twenty are asked, once, and learn ten records by heart; the others' records are in no model."""
    folder = tmp_path_factory.mktemp("some") / request.param
    leaks = request.param == "plain"
    hard = HARD if leaks else {**HARD, "E": 3}
    fedaudit.run(method="fedavg", out=folder, set=hard, privacy={} if leaks else PRIVATE, **SOME)
    return folder, leaks


def of(folder, threat):
    (found,) = [r for r in attack_run(folder, attacks=["participation"], threat=threat) if not r.blind]
    return found


def test_who_took_part_is_told_from_the_published_model(some):
    folder, leaks = some
    found = of(folder, "outsider")
    assert found.leak is leaks, found.verdict
    asked = read_record(folder).rounds[0].participants
    assert sorted(int(k) for k, client in found.client.items() if client.took_part) == asked
    assert (found.pooled.took_part, found.pooled.others) == (6, 14)
    assert read_record(folder).attacks[-1].claims == "participation"


def test_the_server_asks_and_knows(some):
    assert "knows who took part" in of(some[0], "server").reason
    assert of(some[0], "peer:0").ran


def test_where_all_took_part_there_is_nobody_to_tell(tmp_path):
    fedaudit.run(method="fedavg", out=tmp_path / "a", rounds=1, clients=2, set={"E": 1}, **SMALL)
    assert "all of the clients took part" in of(tmp_path / "a", "outsider").reason
    fedaudit.run(method="local", out=tmp_path / "b", rounds=1, clients=2, **SMALL)
    assert of(tmp_path / "b", "outsider").reason == "not visible: no model that all clients made is published"


def test_the_auc_over_clients_by_hand():
    """Took part: 3 and 1; did not: 2 and 0. Of four pairs three are right."""
    nothing = torch.empty(0)
    parts = [
        Attacked(k, TookPart(score), nothing, nothing, torch.tensor(took_part))
        for k, (score, took_part) in enumerate([(3.0, True), (1.0, True), (2.0, False), (0.0, False)])
    ]
    found = participation(parts)
    assert found.pooled.auc.value == pytest.approx(0.75)
    assert not found.leak
    assert found.client["2"].score == 2.0
    sure = [Attacked(k, TookPart(float(k)), nothing, nothing, torch.tensor(bool(k > 9))) for k in np.arange(20)]
    assert participation(sure).leak


def test_the_likelihood_is_held_against_a_model_that_never_saw_the_client(monkeypatch):
    """log p(y | x) of the published model, in the mean, less that of a reference if there are auxiliary records."""
    x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1])

    def model(slope):
        made = nn.Linear(1, 2, bias=False)
        made.weight.data = torch.tensor([[slope], [0.0]])
        return made

    def mean(slope):
        p = 1 / (1 + np.exp(-slope * np.array([1.0, 2.0, 3.0])))
        return np.log(np.where([True, False, False], p, 1 - p)).mean()

    asked, held = [], (torch.zeros(2, 1), torch.zeros(2).long())
    monkeypatch.setattr(attack, "taught", lambda *of: asked.append(of) or model(0.5))
    seen = scene(x=x, y=y, of_all=lambda: (model(-0.3), "arch"))
    assert attack.Participation(steps=7).run(seen).score == pytest.approx(mean(-0.3))
    assert asked == []
    seen.auxiliary = held
    assert attack.Participation(steps=7).run(seen).score == pytest.approx(mean(-0.3) - mean(0.5))
    assert asked == [(seen, "arch", *held, 7)]


@pytest.mark.parametrize(
    ("name", "published", "words"),
    [("server", True, "knows who took part"), ("active-server", True, "knows who took part"),
     ("outsider", False, "no model that all clients made is published"), ("outsider", True, None)],
)  # fmt: skip
def test_what_it_takes_to_tell_who_took_part(name, published, words):
    view = SimpleNamespace(threat=SimpleNamespace(name=name))
    why = attack.Participation().cannot(SimpleNamespace(view=view, of_all=lambda: "model" if published else None))
    assert why is None if words is None else why.endswith(words)
