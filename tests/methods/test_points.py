"""Further points of a round that a method offers for evaluation: scored as the deployed models are, beside them."""

from __future__ import annotations

import copy
from statistics import fmean, pstdev

import pytest
import torch

from fedaudit import run
from fedaudit.errors import ContractError
from fedaudit.methods.references.local import Local
from fedaudit.setting import Setting


class TwoPoints(Local):
    """Deploys what it trained; offers that again, and the same model with its classes turned round."""

    def points(self, client):
        turned = copy.deepcopy(client.model)
        for p in turned.classifier.parameters():
            p.data = p.data.flip(0)
        return {"turned": turned, "trained": client.model}


class Uneven(Local):
    def points(self, client):
        return {"early": client.model} if client.id == 0 else {}


def setting(cls):
    name = f"{__name__}:{cls.__name__}"
    return Setting.make(method=name, rounds=1, clients=3, partition="dirichlet:0.3", set={"E": 2})


def test_points_are_scored_beside_what_is_deployed(tmp_path, fedaudit):
    utility = run(setting(TwoPoints), out=tmp_path / "a").result.last
    assert set(utility.points) == {"trained", "turned"}
    assert utility.points["trained"] == utility.clients, "one and the same model"
    turned = utility.points["turned"]
    assert turned.global_test.each != utility.clients.global_test.each
    for scores in (turned.global_test, turned.local_test, turned.validation):
        assert scores.mean == pytest.approx(fmean(scores.each))
        assert scores.std == pytest.approx(pstdev(scores.each))
    _, shown, _ = fedaudit("show", tmp_path / "a")
    assert "client models, turned: common" in shown


def test_a_point_that_only_some_clients_offer_is_refused(tmp_path):
    with pytest.raises(ContractError, match=r"different names for different clients .*early"):
        run(setting(Uneven), out=tmp_path / "a")


def test_a_point_is_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(TwoPoints, "points", lambda self, client: {"early": torch.zeros(1)})
    with pytest.raises(ContractError, match="points: early returned a Tensor"):
        run(setting(TwoPoints), out=tmp_path / "a")
