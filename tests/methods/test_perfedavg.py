"""Per-FedAvg: its two approximations, what is deployed, and that the quick setting learns."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from bench import Bench
from safetensors.torch import load_file
from torch import nn

from fedaudit.errors import PrivacyError
from fedaudit.methods.averaging import perfedavg
from fedaudit.runtime.declarations.contract import check_declarations
from fedaudit.runtime.runner import run
from fedaudit.runtime.world import world_of
from fedaudit.training.fit import Opt
from fedaudit.wire.transcript import Transcript


def test_first_order_steps_by_hand():
    """f(w) = w^2 / 2 at w = 2, alpha = 0.5, beta = 0.1: w~ = 2 - 0.5 * 2 = 1, then 2 - 0.1 * 1 = 1.9. Once more:
    w~ = 0.95, 1.9 - 0.095 = 1.805."""
    w = torch.tensor([2.0], requires_grad=True)
    optimiser = Opt(perfedavg.FirstOrder, {"alpha": 0.5, "beta": 0.1}).build([w])
    seen = []
    for _ in range(4):
        optimiser.zero_grad()
        (w**2 / 2).sum().backward()
        optimiser.step()
        seen.append(w.item())
    assert seen == pytest.approx([1.0, 1.9, 0.95, 1.805])


def test_hessian_free_direction_by_hand():
    """f(w) = w^4 / 4 at w = 1, alpha = 0.1: grad = w^3, so w~ = 0.9 and u = 0.729. The central difference of w^3 along
    u is 3 u + delta^2 u^3, and the direction u - 0.1 (3 u + delta^2 u^3). Each gradient uses its own batch."""
    used = []

    def grad(w, batch):
        used.append(batch)
        return {"w": w["w"] ** 3}

    u, delta = 0.729, 0.5
    step = perfedavg.hessian_free(grad, {"w": torch.tensor(1.0, dtype=torch.float64)}, ["D", "D'", "D''"], 0.1, delta)
    assert step["w"].item() == pytest.approx(u - 0.1 * (3 * u + delta**2 * u**3))
    assert used == ["D", "D'", "D''", "D''"]


def test_hessian_free_is_the_derivative_of_the_adapted_loss():
    """On one batch, (I - alpha H(w)) grad f(w - alpha grad f(w)) is the gradient of f(w - alpha grad f(w)): autograd's,
    through both gradients, against one meta step of rate 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    w = dict(model.named_parameters())

    def f(at):
        return nn.functional.cross_entropy(torch.func.functional_call(model, at, (x,)), y)

    first = torch.autograd.grad(f(w), list(w.values()), create_graph=True)
    adapted = {name: t - 0.3 * g for (name, t), g in zip(w.items(), first, strict=True)}
    exact = torch.autograd.grad(f(adapted), list(w.values()))
    client = SimpleNamespace(x=x, y=y, rng=Bench().rng, device=torch.device("cpu"), optimise=Bench().optimise)
    before = copy.deepcopy(w)
    perfedavg.PerFedAvg(variant="HF", tau=1, B=6, alpha=0.3, beta=1.0, delta=1e-4).fit_hessian_free(client, model)
    for (name, t), g in zip(w.items(), exact, strict=True):
        assert torch.allclose(before[name] - t, g, atol=1e-7)


def test_per_fedavg_counts_epochs_or_steps():
    """25 records in batches of 10 are 3 batches: 5 epochs make 15 meta steps."""
    client = range(25)
    assert perfedavg.PerFedAvg(tau=7).meta_steps(client) == 7
    assert perfedavg.PerFedAvg.make({}, "cifar10").meta_steps(client) == 15


def test_per_fedavg_deploys_one_step_from_what_it_received(tiny, tmp_path):
    """With every record in the batch, the step is that of the client's whole loss."""
    setting = tiny("perfedavg", rounds=1, set={"tau": 2, "B": 10_000, "alpha": 0.2, "variant": "HF"})
    run(setting, out=tmp_path / "a")
    world = world_of(setting.model_dump_json())
    w = next(iter(Transcript(tmp_path / "a" / "transcript").entries()))["w"]
    model = world.build("cnn")
    model.load_state_dict(w)
    x, y = world.members(0)
    nn.functional.cross_entropy(model(x), y).backward()
    deployed = load_file(tmp_path / "a" / "models" / "client-000000.safetensors")
    for name, p in model.named_parameters():
        assert torch.allclose(deployed[name], p - 0.2 * p.grad, atol=1e-5)


def test_hessian_free_declarations_hold(tiny):
    engine = check_declarations(
        tiny("perfedavg", rounds=1, clients=2, model="cnn@0.25", set={"variant": "HF", "tau": 2})
    )
    assert engine.compared == {"Updated.w"}


@pytest.mark.long
def test_first_order_trains_with_dp_sgd_and_hessian_free_is_refused(tiny, tmp_path):
    privacy = {"training": {"noise_multiplier": 1.0}}
    record = run(tiny("perfedavg", rounds=1, privacy=privacy), out=tmp_path / "FO")
    entries = {e.mechanism for c in record.ledger for e in c.entries if e.field == "Updated.w"}
    assert entries == {"post-processing of DP-SGD"}
    with pytest.raises(PrivacyError, match="optimise cannot be made private"):
        run(tiny("perfedavg", rounds=1, privacy=privacy, set={"variant": "HF"}), out=tmp_path / "HF")


@pytest.mark.long
def test_the_quick_setting_learns(tiny, tmp_path):
    """Six rounds of it on digits. With alpha = 0.1 they end where guessing does."""
    setting = tiny("perfedavg", rounds=6, partition="iid", public=0.0, eval_every=6)
    record = run(setting, out=tmp_path / "a")
    assert record.result.last.global_.test.accuracy > 0.4
