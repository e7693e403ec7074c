"""FedGen: its losses by hand, what its generator learns, and what travels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedaudit import registry, run, state_of
from fedaudit.methods.datafree import fedgen
from fedaudit.methods.datafree._datafree import frozen
from fedaudit.methods.datafree.fedgen import FedGen, Images, Latents
from fedaudit.training.fit import Live
from fedaudit.training.models import Net
from fedaudit.training.stacked.networks import Many
from fedaudit.wire.transcript import Transcript

LN2, LN3 = math.log(2), math.log(3)


# --- losses ---------------------------------------------------------------------------------------------------------


def test_the_servers_loss_by_hand():
    """Eq. 4: logits (2 ln 3, 0) and (0, 0) average to (ln 3, 0), which is (3/4, 1/4): -ln 3/4 for the first class and
    -ln 1/4 for the second. The mean of the two losses would be (-ln 9/10 - ln 1/2) / 2."""
    teachers = torch.tensor([[[2 * LN3, 0.0], [2 * LN3, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    rows = fedgen.L_logits(teachers, torch.tensor([0, 1]))
    assert rows.tolist() == pytest.approx([math.log(4 / 3), math.log(4)], abs=1e-6)


def test_the_codes_loss_by_hand():
    """Shares of class 0 are (1/4, 3/4), of class 1 (1, 0). Client 0 says (3/4, 1/4), client 1 (1/2, 1/2): class 0 costs
    1/4 ln 4/3 + 3/4 ln 2, class 1 costs ln 4."""
    teachers = torch.tensor([[[LN3, 0.0], [LN3, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    share = torch.tensor([[0.25, 1.0], [0.75, 0.0]])
    rows = fedgen.L_losses(teachers, share, torch.tensor([0, 1]))
    assert rows.tolist() == pytest.approx([math.log(4 / 3) / 4 + 3 / 4 * LN2, math.log(4)], abs=1e-6)


class Doubles(Net):
    """The encoder doubles, the classifier changes the sign: f(x) = -2 x."""

    def __init__(self):
        super().__init__(nn.Identity(), nn.Identity(), width=2, arch="by hand")

    def encode(self, x):
        return 2 * x

    def classify(self, e):
        return -e


def test_the_clients_loss_by_hand():
    """Eq. 5 with alpha = 2. The record (0, ln 3 / 2) has logits (0, -ln 3): class 0 costs ln 4/3. Latents (0, ln 3) and
    (0, 0), labels 0 and 1, go through the classifier only: logits (0, -ln 3) and (0, 0) cost ln 4/3 and ln 2, on
    average (ln 8/3) / 2. As images they would be doubled too: logits (0, -2 ln 3) cost ln 10/9."""
    f = Live(Doubles())
    x, y = torch.tensor([[0.0, LN3 / 2], [0.0, 0.0]]), torch.tensor([0, 0])
    given = {"z": torch.tensor([[0.0, LN3], [0.0, 0.0]]), "y_hat": torch.tensor([0, 1]), "alpha": 2.0}
    own = [math.log(4 / 3), LN2]
    latent, image = math.log(8 / 3), math.log(20 / 9)
    assert fedgen.local_loss(f, x, y, **given).tolist() == pytest.approx([v + latent for v in own], abs=1e-6)
    assert fedgen.local_loss_on_images(f, x, y, **given).tolist() == pytest.approx([v + image for v in own], abs=1e-6)
    given["alpha"] = 0.0
    assert fedgen.local_loss(f, x, y, **given).tolist() == pytest.approx(own, abs=1e-6)


# --- the generator --------------------------------------------------------------------------------------------------


def test_generators_have_the_sizes_that_the_docstring_says():
    """Latents: (64 + 10) x 512 + 512, 2 x 512, 512 x 512 + 512."""
    count = {
        "latent": Latents(64, 512, 512, 10),
        "image, 10 classes": Images(100, (3, 32, 32), 10, 128),
        "image, 100 classes": Images(100, (3, 32, 32), 100, 128),
    }
    count = {name: sum(p.numel() for p in G.parameters()) for name, G in count.items()}
    assert count == {"latent": 302_080, "image, 10 classes": 2_043_377, "image, 100 classes": 2_052_377}


class Stage:
    """As much of a server as the generator's training needs."""

    def __init__(self, shape=(1, 8, 8), classes=3):
        self.shape, self.classes, self.device = shape, classes, torch.device("cpu")

    def rng(self, purpose):
        return torch.Generator().manual_seed(7)

    def optimise(self, params, closure, *, steps, opt):
        optimiser = opt.build(params)
        for _ in range(steps):
            optimiser.zero_grad()
            closure().backward()
            optimiser.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"teacher": "losses"},
        {"lambda_div": 1.0},
        pytest.param({"space": "image", "hidden": 8}, marks=pytest.mark.long),
    ],
)
def test_the_generator_learns_what_the_teachers_call_each_label(options):
    """Two teachers that agree: after training they recognise nearly every generated sample, before they did not."""
    torch.manual_seed(0)
    method = FedGen(d=8, **{"hidden": 32, "I_g": 120, "B_g": 32, "eta_g": 0.01, **options})
    teacher = frozen(Net(nn.Flatten(), nn.Linear(64, 3), width=64, arch="by hand"))
    nn.init.normal_(teacher.classifier.weight, std=1.0)
    before = method.generator(Stage(), 64)
    after = method.generator(Stage(), 64)
    after.load_state_dict(
        method.learn_generator(Stage(), state_of(before), Many([teacher, teacher]), torch.ones(2, 3) * 9)
    )
    z, y = torch.randn(300, 8), torch.arange(300) % 3

    def recognised(G):
        out = G.train()(z, y)
        logits = teacher(out) if method.space == "image" else teacher.classify(out)
        return (logits.argmax(1) == y).float().mean().item()

    assert recognised(after) > 0.95
    assert recognised(before) < 0.7


def test_labels_that_nobody_holds_are_not_asked_for(tiny, tmp_path):
    """p^(y) in the second round's broadcast is the share of each label in the first round's counts."""
    run(tiny("fedgen", rounds=2), out=tmp_path / "a")
    entries = list(Transcript(tmp_path / "a" / "transcript").entries())
    down = {e.round: e["p"] for e in entries if e.message == "Broadcast"}
    counts = sum(e["c"] for e in entries if e.message == "Update" and e.round == 1)
    assert torch.equal(down[1], torch.full((10,), 0.1))
    assert torch.allclose(down[2], counts / counts.sum())


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"space": "image", "hidden": 8}, {"teacher": "losses", "lambda_div": 1.0, "weights": "samples"}]
)
def test_switches_run_and_keep_to_their_traffic(options, tiny, tmp_path):
    record = run(tiny("fedgen", model="cnn_bn", set={**FedGen.quick, **options}), out=tmp_path / "a")
    assert record.status == "done"
    assert record.traffic_declared


@pytest.mark.long
def test_without_generated_samples_it_is_fedavg_of_equal_weights(tiny, tmp_path):
    """With alpha = 0 the local loss is FedAvg's; clients of equal size make its weights equal too."""
    same = {"E": 1, "B": 32, "eta": 0.1}
    values = {"partition": "iid", "clients": 2, "public": 0.0, "aux": 0.0, "minimum": 10}
    a = run(tiny("fedgen", set={**FedGen.quick, **same, "alpha": 0.0}, **values), out=tmp_path / "a")
    b = run(tiny("fedavg", set=same, **values), out=tmp_path / "b")
    assert len({*a.data.members}) == 1
    assert [p.accuracy for p in a.curve] == [p.accuracy for p in b.curve]
    used = run(tiny("fedgen", set={**FedGen.quick, **same, "first": 3}, **values), out=tmp_path / "c")
    assert [p.accuracy for p in used.curve] == [p.accuracy for p in a.curve]


def test_label_counts_are_a_release(tiny, tmp_path):
    """A histogram changes by sqrt(2) when a record changes its label; noise may make a count negative."""
    policy = {"label_counts": {"epsilon": 0.1}}
    record = run(tiny("fedgen", rounds=2, privacy=policy), out=tmp_path / "a")
    release = next(r for r in record.releases if r.kind == "label_counts")
    assert release.protection.sensitivity == pytest.approx(math.sqrt(2))


def test_it_can_be_trained_privately(tiny, tmp_path):
    """The generated samples' term is the same for every record, so the loss separates."""
    record = run(tiny("fedgen", rounds=1, privacy={"training": {"noise_multiplier": 1.0}}), out=tmp_path / "a")
    assert all(client.by_kind["weights"] < math.inf for client in record.ledger)


def test_the_preset_is_the_rival_of_fedzge():
    method = registry.find("fedgen").make({}, "fedzge")
    assert (method.space, method.d, method.hidden, method.B_g) == ("image", 100, 128, 500)


def test_one_client_is_enough_for_a_generator():
    method = FedGen(d=4, hidden=8, I_g=1, B_g=4)
    teacher = frozen(Net(nn.Flatten(), nn.Linear(64, 3), width=64, arch="by hand"))
    before = method.generator(Stage(), 64)
    after = method.learn_generator(Stage(), state_of(before), Many([teacher]), torch.ones(1, 3))
    assert after.keys() == state_of(before).keys()
