"""The optimiser that methods share: what it is by default, what each setting does, and that every method uses it."""

from __future__ import annotations

import pytest
import torch

from fedaudit import Augment, adam, sgd
from fedaudit.errors import SettingError
from fedaudit.methods.shared._optimiser import WithOptimiser
from fedaudit.registry import find
from fedaudit.runtime.runner import run

TRAIN_LOCALLY = ["fedavg", "local", "fedgen", "heterofl", "fedrolex", "feddropout"]


def stepped(method: WithOptimiser, gradients: list[float], eta: float) -> float:
    """Where 1.0 is after a step on each of the gradients."""
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimiser = method.optimiser(eta).build([w])
    for g in gradients:
        w.grad = torch.tensor([g], dtype=torch.float64)
        optimiser.step()
    return w.item()


def test_without_a_word_it_is_plain_sgd():
    """The same options as `sgd(eta)`, so that nothing moved for those who set none of them."""
    assert WithOptimiser().optimiser(0.3) == sgd(0.3)


def test_momentum_and_weight_decay_by_hand():
    """w = 1, eta = 0.1, gradients 1 and 2. Momentum 0.5: velocities 1 and 0.5 + 2, so w = 1 - 0.1 - 0.25. Decay 0.2 as
    well: velocities 1 + 0.2 = 1.2 (w = 0.88) and 0.6 + 2 + 0.2 x 0.88 = 2.776, so w = 0.88 - 0.2776."""
    assert stepped(WithOptimiser(), [1, 2], 0.1) == pytest.approx(0.7)
    assert stepped(WithOptimiser(momentum=0.5), [1, 2], 0.1) == pytest.approx(0.65)
    assert stepped(WithOptimiser(momentum=0.5, weight_decay=0.2), [1, 2], 0.1) == pytest.approx(0.6024)


def test_adam_by_hand():
    """Adam's first step is eta in the direction of the gradient, whatever its length; decay turns the gradient -0.1 of
    w = 1 into -0.1 + 0.3 > 0."""
    assert stepped(WithOptimiser(opt="adam"), [-7], 0.01) == pytest.approx(1.01)
    assert stepped(WithOptimiser(opt="adam", weight_decay=0.3), [-0.1], 0.01) == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"opt": "adam", "momentum": 0.9}, 'momentum belongs to opt = "sgd"'),
        ({"momentum": 1.0}, "less than 1"),
        ({"momentum": float("nan")}, "less than 1"),
        ({"weight_decay": -1e-4}, "greater than or equal to 0"),
        ({"opt": "lion"}, "'sgd' or 'adam'"),
    ],
)
def test_what_makes_no_sense_is_refused(values, why):
    with pytest.raises(SettingError, match=why):
        find("fedavg").make(values)


def test_adam_takes_a_momentum_of_zero():
    assert find("fedavg").make({"opt": "adam", "momentum": 0}).optimiser(0.1).make is torch.optim.Adam


@pytest.mark.parametrize("name", TRAIN_LOCALLY)
@pytest.mark.parametrize("values", [{"momentum": 0.9}, {"weight_decay": 0.5}, {"opt": "adam"}], ids=str)
def test_every_method_trains_with_it(name, values, monkeypatch, tiny, tmp_path):
    """What client.fit is given is the optimiser of the settings, at the method's own learning rate."""
    from fedaudit.runtime.party import Party
    from fedaudit.training.fit import fit as real

    seen = []

    def watched(self, model, loss, rows, **options):
        if self._name.startswith("client"):
            seen.append(options["opt"])
        return real(model, loss, rows, rng=self.rng("fit"), **options)

    monkeypatch.setattr(Party, "_fit", watched)
    quick = {**find(name).quick, "eta": 0.02}
    run(tiny(name, rounds=1, clients=2, set={**quick, **values}), out=tmp_path / "a")
    assert seen
    assert all(opt == WithOptimiser(**values).optimiser(0.02) for opt in seen)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "moon", "fedbn", "fedntd", "fedavgm", "heterofl", "fedrolex"])
def test_the_rate_falls_within_a_round_where_it_is_asked_for(name, monkeypatch, tiny, tmp_path):
    """The optimiser is the same in all else, and without a word its rate is constant."""
    from fedaudit.runtime.party import Party
    from fedaudit.training.fit import fit as real

    seen = []

    def watched(self, model, loss, rows, **options):
        seen.append(options["opt"])
        return real(model, loss, rows, rng=self.rng("fit"), **options)

    monkeypatch.setattr(Party, "_fit", watched)
    for schedule, wanted in (({}, "constant"), ({"schedule": "cosine"}, "cosine")):
        seen.clear()
        quick = {**find(name).quick, "eta": 0.02, "opt": "adam", **schedule}
        run(tiny(name, rounds=1, clients=2, set=quick), out=tmp_path / wanted)
        assert seen == [adam(0.02, schedule=wanted)] * 2


@pytest.mark.parametrize("name", ["dffke", "fke", "fedproto", "fml", "local"])
def test_colours_reach_local_training(name):
    """Of DFFKE and of its rivals, as the preset of its author's code has them; without a word they are plain."""
    preset = {"dffke": "authors", "fke": None}.get(name, "dffke_authors")
    more = {"crop": 4, "flip": True, "jitter": 0.4, "colours": "torchvision"} if preset is None else {}
    wanted = Augment(crop=4, flip=True, jitter=0.4, fill=-1.0, colours="torchvision")
    assert find(name).make(more, preset).augment == wanted
    assert find(name).make({"jitter": 0.4}).augment == Augment(jitter=0.4, fill=-1.0)


@pytest.mark.parametrize("name", ["fedavg", "local", "fedgen"])
def test_the_preset_is_the_rival_of_fedaf(name):
    """FedAF, Section 5.1 and Appendix A: ten epochs, batches of 64, 0.01, momentum 0.9."""
    method = find(name).make({}, "fedaf")
    assert (method.E, method.B, method.optimiser(method.eta)) == (10, 64, sgd(0.01, momentum=0.9))


def test_a_host_takes_it_too():
    method = find("fedavg+dfrd").make({"host": {"momentum": 0.9}})
    assert method.host.optimiser(0.1) == sgd(0.1, momentum=0.9)
    alone = find("dfrd").make({"host": {"opt": "adam"}})
    assert alone.host.optimiser(0.1).make is torch.optim.Adam
