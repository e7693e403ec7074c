"""Further points of a round that a method offers for evaluation: scored as the deployed models are, beside them."""

from __future__ import annotations

import copy
from statistics import fmean, pstdev

import pytest
import torch

from fedaudit import Record, registry, run
from fedaudit.errors import ContractError
from fedaudit.methods.references.local import Local
from fedaudit.runtime.world import World
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


# --- what the next message would bring --------------------------------------------------------------------------------


class Told(Local):
    """Offers each client's model with the number of the round in its last bias: what the server knows and no client."""

    def round(self, s, server, cohort):
        super().round(s, server, cohort)
        return After(server.t)

    def next_points(self, s, client):
        seen.append((s.t, client.id))
        changed = copy.deepcopy(client.model)
        changed.classifier.bias.data[s.t] += 1e6
        return {"told": changed}


class After(Record):
    t: int


seen = []


def test_a_point_of_the_servers_new_state_is_scored_anew_in_each_round(tmp_path):
    """One of three clients is asked in a round; the others are as they were, and their point is another one all the
    same: the class whose number is the round's wins for every record, so that the accuracy is that class's share."""
    seen.clear()
    name = f"{__name__}:Told"
    record = run(
        Setting.make(method=name, rounds=2, clients=3, partition="iid", participation=0.34), out=tmp_path / "a"
    )
    world = World(record.setting)
    for t, row in enumerate(record.rounds, 1):
        share = float((world.test[1] == t).double().mean())
        assert row.utility.points["told"].global_test.mean == pytest.approx(share)
    assert seen == [(t, k) for t in (1, 2) for k in range(3)]


@pytest.mark.parametrize("method", ["lgfedavg", "fedgh", "fedgen_lg"])
def test_the_new_head_is_the_servers(method, tiny, tmp_path, monkeypatch):
    """HtFLlib's point of evaluation: the client's encoder after training under the head that it will get next."""
    cls, found = registry.find(method), {}
    of = cls.next_points

    def kept(self, s, client):
        found[client.id] = of(self, s, client)["new head"].state_dict(), client.model.state_dict(), s
        return of(self, s, client)

    monkeypatch.setattr(cls, "next_points", kept)
    record = run(tiny(method, rounds=1, eval_clients=True), out=tmp_path / "a")
    assert record.result.last.points.keys() == {"new head"}
    for new, own, s in found.values():
        head = getattr(s, "theta_g", None) or s.theta
        assert head.keys() == {"classifier.weight", "classifier.bias"}
        for tensor, value in new.items():
            assert torch.equal(value, head[tensor] if tensor in head else own[tensor])
        assert not torch.equal(new["classifier.weight"], own["classifier.weight"])
