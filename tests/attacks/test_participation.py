"""Who took part at all: told from a model that learned its clients by heart, and not from one under DP-SGD."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedaudit
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.claims import Attacked, TookPart
from fedaudit.attack.score import participation
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
