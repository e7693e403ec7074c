"""The attack's side of the harness: what a scene shows to whom, and how claims are scored."""

from __future__ import annotations

import pytest
import torch
from scipy import stats as scipy_stats

import fedaudit
from fedaudit.attack.attack_run import attack_run, made
from fedaudit.attack.claims import Attacked, Claims, Histogram
from fedaudit.attack.scene import Scene
from fedaudit.attack.score import score
from fedaudit.errors import ContractError, SettingError, ThreatError
from fedaudit.runtime.folder import RunFolder
from fedaudit.stats import student_t


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attack") / "run"
    fedaudit.run(method="fedavg", dataset="digits", clients=3, partition="dirichlet:0.3", rounds=2, out=folder)
    return folder


def scene_of(folder, threat, target=0):
    run = RunFolder(folder)
    x, y = run.world.nonmembers(target)
    return Scene(run, run.transcript.view(threat), target, x, y), run.world


def test_a_peer_knows_its_own_records_and_state(a_run):
    scene, world = scene_of(a_run, "peer:1")
    x, y, state = scene.own
    assert torch.equal(x, world.members(1)[0])
    assert torch.equal(y, world.members(1)[1])
    # FedAvg's client ends the round with what it uploaded, which the peer's own messages show too.
    upload = list(scene.view.entries(direction="up", kind="weights", client=1))[-1]["w"]
    assert all(torch.equal(tensor, upload[name]) for name, tensor in state.model.items())


@pytest.mark.parametrize("threat", ["server", "outsider"])
def test_others_have_no_records_of_their_own(a_run, threat):
    with pytest.raises(ThreatError, match="a peer does"):
        _ = scene_of(a_run, threat)[0].own


def test_a_scene_tells_neither_seed_nor_truth(a_run):
    scene, _ = scene_of(a_run, "server")
    assert "seed" not in scene.setting
    assert not {"member", "members", "truth", "seed"} & {name for name in vars(scene) if not name.startswith("_")}


def test_an_attack_takes_settings_by_table(a_run):
    assert made("loss")[0] == made({"attack": "loss"})[0] == "loss"
    with pytest.raises(SettingError, match="Unknown setting of loss 'stepz'"):
        made({"attack": "loss", "stepz": 3})
    with pytest.raises(ContractError, match="does not name an attack"):
        made({"steps": 3})
    (result,) = [r for r in attack_run(a_run, attacks=[{"attack": "loss"}]) if r.attack == "loss"]
    assert result.claims == "membership"
    assert result.settings == {"rounds": None}


def attacked(world, claims, k=0):
    x, y = world.members(k)
    return Attacked(k, claims, x, y, torch.ones(len(y), dtype=torch.bool))


def test_label_shares_are_scored_by_half_the_l1_distance(a_run):
    """Claiming the truth has error 0; the uniform guess has the error that the scorer gives for it."""
    world = RunFolder(a_run).world
    parts, uniform = [], []
    for k in range(3):
        true = torch.bincount(world.members(k)[1], minlength=10).double()
        true = true / true.sum()
        parts.append(attacked(world, Histogram(true), k))
        uniform.append(float((true - 0.1).abs().sum() / 2))
    result = score(parts, world, a_run, "mine", 0)
    assert result.claims == "histogram"
    assert result.pooled.error.value == pytest.approx(0, abs=1e-12)
    assert result.pooled.uniform.value == pytest.approx(sum(uniform) / 3)
    assert result.pooled.gain.low < result.pooled.gain.value < result.pooled.gain.high


@pytest.mark.parametrize(
    "claims", [Histogram(torch.ones(10)), Histogram(torch.ones(9) / 9), Claims(torch.zeros(3)), object()]
)
def test_ill_formed_claims_are_refused(a_run, claims):
    world = RunFolder(a_run).world
    with pytest.raises(ContractError, match="mine"):
        score([attacked(world, claims)], world, a_run, "mine", 0)


def test_student_t_is_scipys():
    values = [0.3, 0.5, 0.45, 0.7]
    ours = student_t(values, 0.9)
    low, high = scipy_stats.t.interval(0.9, 3, loc=sum(values) / 4, scale=scipy_stats.sem(values))
    assert (ours.low, ours.high) == pytest.approx((low, high))
    assert student_t([0.4]).low is None
    assert student_t([]).value is None


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_candidates_tells_nothing(seed, tiny):
    """An attacker that scores by position, or from both ends, has an interval around 1/2."""
    from fedaudit.attack.attack_run import candidates_of
    from fedaudit.attack.membership import auc
    from fedaudit.runtime.world import World

    world = World(tiny("local", partition="iid", holdout=0.4, seed=seed))
    truths = [candidates_of(world, k)[2] for k in range(3)]
    member = torch.cat(truths).numpy()
    for rule in (lambda i, n: i, lambda i, n: (i - (n - 1) / 2).abs(), lambda i, n: i % 2):
        scores = torch.cat([rule(torch.arange(len(truth)).double(), len(truth)) for truth in truths])
        found = auc(scores.numpy(), member)
        assert found.low < 0.5 < found.high, (found, rule)
