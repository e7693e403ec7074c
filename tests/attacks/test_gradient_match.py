"""What inversion from updates needs, which updates it takes, and what it starts from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from fedaudit.attack.scene import Attack
from fedaudit.attacks.inversion import class_inversion, gradient_match, imprint
from fedaudit.attacks.inversion.class_inversion import ClassInversion
from fedaudit.attacks.inversion.decoder import DecoderAttack
from fedaudit.attacks.inversion.gradient_match import GradientMatch
from fedaudit.attacks.inversion.imprint import between


def layer(weight, bias=0.0):
    made = nn.Linear(1, 1)
    nn.init.constant_(made.weight, weight)
    nn.init.constant_(made.bias, bias)
    return made


def test_an_update_in_one_tensor_is_an_update(monkeypatch):
    """Round 1 changed the weight alone, round 2 nothing, round 3 came without a start: one update, oldest first."""
    after = {3: ("c", layer(9.0)), 1: ("a", layer(2.0)), 2: ("b", layer(1.0)), 4: ("d", layer(1.0, 3.0))}
    monkeypatch.setattr(gradient_match, "uploaded", lambda scene, k: after)
    monkeypatch.setattr(gradient_match, "received", lambda scene, entry: None if entry == "c" else layer(1.0))
    found = GradientMatch()._updates(SimpleNamespace(target=0))
    assert [(u["weight"].item(), u["bias"].item()) for _, u in found] == [(-1.0, 0.0), (0.0, -3.0)]
    assert all(model.training for model, _ in found)


@pytest.mark.parametrize(
    ("form", "linear", "public", "words"),
    [
        ("closed", False, {"epochs": None}, "is not linear with a bias; use another form"),
        ("closed", True, {"epochs": None}, None),  # it needs nothing of the method
        ("cosine", False, {"epochs": 1, "eta": 0.1}, None),
        ("cosine", False, {"epochs": None, "size": 3, "eta": None}, "does not say its epochs, eta: set epochs=..."),
        ("idlg", True, {"epochs": None}, "does not say its epochs"),
    ],
)
def test_what_a_form_needs(form, linear, public, words, monkeypatch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)) if linear else nn.Conv2d(1, 1, 1)
    monkeypatch.setattr(GradientMatch, "_updates", lambda self, scene: [(model, {})])
    monkeypatch.setattr(GradientMatch, "_public", lambda self, scene: public)
    scene = SimpleNamespace(target=0, shape=(1, 2, 2), view=SimpleNamespace(threat="server"))
    found = GradientMatch(form=form).cannot(scene)
    assert found is None if words is None else words in found


@pytest.mark.parametrize(
    ("given", "n", "found"),
    [
        ({}, 8, (1234, 4)),  # as the forecast says
        ({}, 9, (200, 1)),  # more records than images: what happened is not simulated
        ({"steps": 7}, 8, (7, 4)),
        ({"restarts": 2}, 9, (200, 2)),
        ({"most": 20}, 9, (1234, 4)),
    ],
)
def test_how_many_steps_and_starts_a_search_has(monkeypatch, given, n, found):
    seen = []
    monkeypatch.setattr(gradient_match, "forecast", lambda model, x, classes, steps: seen.append(len(x)) or 1234)
    scene = SimpleNamespace(shape=(1, 2, 2), device="cpu", classes=3)
    how = GradientMatch(**given)._search(scene, None, n, None)
    assert (how["iterations"], how["restarts"]) == found
    assert seen in ([], [n])
    assert [gradient_match.trial(steps) for steps in (40, 399, 400, 2000)] == [0, 0, 20, 100]


def test_a_class_whose_entry_is_below_zero_is_there():
    """The model says (0.952, 0.047, 0) of auxiliary images; the gradient of the last bias is (0.045, 0.0025, -0.0475).
    4 (p - gradient) is (3.63, 0.18, 0.19): rounded, four records of class 0. But p - y is below zero only for a label.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 3))
    nn.init.zeros_(model[1].weight)
    model[1].bias.data = torch.tensor([4.0, 1.0, -4.0])
    p = model[1].bias.softmax(0).detach()
    gradient = torch.tensor([0.045, 0.0025, -0.0475])
    steps = gradient_match.Steps([torch.arange(4)], 0.5)
    assert (4 * (p - gradient)).round().tolist() == [4, 0, 0]
    found = gradient_match.inferred(model, {"1.bias": 0.5 * gradient}, steps, 4, torch.zeros(5, 1, 1))
    assert found.tolist() == [0, 0, 0, 2]
    below = {"1.bias": -0.5 * torch.tensor([0.3, 0.2, 0.1])}
    many = gradient_match.inferred(model, below, steps, 2, torch.zeros(5, 1, 1))
    assert len(many) == 2, "not more classes than records"


def test_a_search_by_lbfgs_ends_on_a_plateau(monkeypatch):
    """An update that no image gives leaves a loss that does not fall: a search is over after few calls, not 40."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    update = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    steps, told = gradient_match.Steps([torch.arange(1)], 0.1), []
    gradient_match.match_lbfgs(
        model, update, steps, torch.tensor([1]), 3, lambda r: torch.zeros(1, 1, 2, 2), torch.Generator(),
        iterations=2000, restarts=2, tell=lambda done, of, what: told.append(what),
    )  # fmt: skip
    assert told[0] == "restart 1 of 2, step 0 of 2000"
    assert 2 <= len(told) < 20
    assert any("restart 2" in line for line in told)


def test_without_updates_there_is_nothing_to_invert(monkeypatch):
    monkeypatch.setattr(GradientMatch, "_updates", lambda self, scene: [])
    scene = SimpleNamespace(target=3, view=SimpleNamespace(threat="server"))
    assert "the model that client 3 was sent" in GradientMatch().cannot(scene)


@pytest.mark.parametrize(
    ("form", "norms", "deep"),
    [("deepinversion", True, True), ("auto", True, True), ("auto", False, False), ("miface", True, False)],
)
def test_which_loss_a_class_is_inverted_by(form, norms, deep, monkeypatch):
    """The published form is what it says; `auto` takes batch norms where there are some."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), *([nn.BatchNorm2d(2)] if norms else []))
    asked = []
    monkeypatch.setattr(class_inversion, "target_model", lambda scene: model)
    monkeypatch.setattr(class_inversion, "miface", lambda model, labels: asked.append(False))
    monkeypatch.setattr(ClassInversion, "_deep", lambda self, model, labels: asked.append(True))
    monkeypatch.setattr(class_inversion, "starts", lambda scene, n, rng: None)
    monkeypatch.setattr(class_inversion, "descend", lambda loss, begin, **how: (torch.zeros(6, 1, 2, 2), None))
    scene = SimpleNamespace(classes=3, device="cpu", rng=lambda name: None, tell=None)
    found = ClassInversion(form=form).run(scene)
    assert asked == [deep]
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_training_images_are_mixed_with_others():
    """Images of 0 and others of 4: a mixed one is 4 (1 - w), anywhere between; a half is left as it is."""
    rng = torch.Generator().manual_seed(0)
    images, x = torch.zeros(400, 1, 2, 2), torch.full((7, 1, 2, 2), 4.0)
    found = DecoderAttack(mix=0.5)._mixed(images, x, rng)[:, 0, 0, 0]
    mixed = found[found > 0]
    assert 150 < len(mixed) < 250
    assert float(mixed.min()) < 0.4
    assert float(mixed.max()) > 3.6
    assert float(mixed.mean()) == pytest.approx(2, abs=0.4)
    same = DecoderAttack(mix=1.0)._mixed(images + 4, x, rng)
    assert torch.allclose(same, torch.full_like(same, 4.0)), "weights add up to 1"
    assert DecoderAttack(mix=0.0)._mixed(images, x, rng) is images
    assert DecoderAttack(mix=0.5, labels=True)._mixed(images, x, rng) is images


def test_units_that_nothing_reached_hold_no_record():
    """No unit moved: one empty image, and no division by 0. Records that cannot be images are cut to the range."""
    assert between(torch.zeros(3, 2), torch.zeros(3)).tolist() == [[0.0, 0.0]]
    # Units hold 2 and 1 records: the second's own is (0.5, -0.5), the first's is (0.2, 0.4).
    weight, bias = torch.tensor([[0.7, -0.1], [0.5, -0.5]]), torch.tensor([2.0, 1.0])
    assert torch.allclose(between(weight, bias), torch.tensor([[0.2, 0.4], [0.5, -0.5]]))
    far = between(torch.tensor([[5.0, -7.0]]), torch.tensor([1.0]))
    assert far.tolist() == [[1.0, -1.0]]


def test_a_search_that_is_through_starts_no_other():
    """It begins at the image itself, whose gradient is the update's: of five starts one is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    x, y = torch.rand(1, 1, 2, 2).double(), torch.tensor([1])
    steps, begun = gradient_match.Steps([torch.arange(1)], 0.1), []
    update = gradient_match.simulated(model, x, one_hot(y, 3).double(), steps)
    update = {name: t.detach() for name, t in update.items()}

    def begin(r):
        begun.append(r)
        return x

    found = gradient_match.match_lbfgs(
        model, update, steps, y, 3, begin, torch.Generator(), iterations=20, restarts=5, tell=lambda *told: None
    )
    assert begun == [0]
    assert torch.allclose(found, x.float(), atol=1e-5)


@pytest.mark.parametrize(
    ("download", "linear", "auxiliary", "words"),
    [
        (True, True, 1, None),
        (False, True, 1, "no message brings client 0 a whole model"),
        (True, False, 1, "the first layer of client 0's model is not linear on the pixels"),
        (True, True, 0, "no auxiliary records to place the bins by"),
    ],
)
def test_what_an_imprint_needs(download, linear, auxiliary, words, monkeypatch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)) if linear else nn.Conv2d(1, 1, 1)
    monkeypatch.setattr(Attack, "cannot", lambda self, scene: None)
    monkeypatch.setattr(imprint, "_download", lambda scene: ("entry", "w") if download else None)
    scene = SimpleNamespace(
        target=0, shape=(1, 2, 2), arch=lambda k: "mlp", fresh=lambda arch: model,
        auxiliary=(torch.zeros(auxiliary, 1, 2, 2), torch.zeros(auxiliary)),
    )  # fmt: skip
    found = imprint.Imprint().cannot(scene)
    assert found is None if words is None else words in found


def test_labels_are_made_up_to_as_many_as_there_are_records():
    """Twelve records of eight classes, and no auxiliary images, so that p is 1/8. Rounded down there are eight labels;
    the four classes with the most left get one more each.
    """
    counts = torch.tensor([1.9, 1.8, 1.7, 1.6, 1.4, 1.3, 1.2, 1.1])
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 8))
    steps = gradient_match.Steps([torch.arange(12)], 0.5)
    update = {"1.bias": 0.5 * (1 / 8 - counts / 12)}
    found = gradient_match.inferred(model, update, steps, 12, torch.zeros(0, 1, 1))
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("form", "stacks", "count"), [("cosine", True, 7), ("cosine", False, 1), ("dlg", True, 1), ("idlg", True, 1)]
)
def test_only_cosine_searches_go_side_by_side_where_models_stack(form, stacks, count, monkeypatch):
    monkeypatch.setattr(gradient_match, "stacks_on", lambda device: stacks)
    attack = GradientMatch(form=form).model_copy(update={"together": 7})
    assert attack.at_once(SimpleNamespace(device="any")) == count


def test_labels_are_read_off_the_last_bias():
    """Two layers have one; the last without any tells nothing."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3), nn.Linear(3, 3, bias=False))
    update = {"0.bias": torch.tensor([-1.0, 1.0]), "2.bias": torch.tensor([0.5, 0.25, -0.75])}
    steps = gradient_match.Steps([torch.arange(1)], 0.1)
    assert gradient_match.inferred(model, update, steps, 1, torch.zeros(0, 1)).tolist() == [2]


def test_a_unit_that_hardly_moved_holds_no_record():
    """Its share is a billionth of the largest, or less: what is left of it is rounding."""
    weight, bias = torch.tensor([[0.5], [1e-13]]).double(), torch.tensor([1.0, 1e-12]).double()
    found = between(weight, bias)
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(0.5)


def test_a_label_too_many_is_taken_from_a_class_that_can_spare_it():
    """Counts are 2.47, 1.87 and 0.87 for two records: 2, 1 and 0 are one too many, and class 1 has its only one."""
    model, steps = nn.Sequential(nn.Linear(1, 3)), gradient_match.Steps([torch.arange(1)], 1.0)
    update = {"0.bias": torch.tensor([-0.9, -0.6, -0.1])}
    found = gradient_match.inferred(model, update, steps, 2, torch.zeros(0, 1))
    assert sorted(found.tolist()) == [0, 1]


def test_an_update_of_many_steps_is_as_long_as_all_of_them():
    """Two steps of 0.25: gradients are twice the update, and the counts 3 (1/3 - g) = 2.5, 1, -0.5: labels 0, 0, 1."""
    model, steps = nn.Sequential(nn.Linear(1, 3)), gradient_match.Steps([torch.arange(1)] * 2, 0.25)
    update = {"0.bias": torch.tensor([-0.25, 0.0, 0.25])}
    found = gradient_match.inferred(model, update, steps, 3, torch.zeros(0, 1))
    assert sorted(found.tolist()) == [0, 0, 1]


@pytest.mark.parametrize("form", ["cosine", "dlg", "idlg", "closed"])
def test_images_of_the_first_updates_by_each_form(form, monkeypatch):
    """Two of three updates; ten records, of which three are searched. The closed form is cut to the range."""
    did, told = [], []
    seen = SimpleNamespace(
        rng=lambda purpose: f"rng of {purpose}", shape=(1, 1, 2), auxiliary=("x", "y"), tell="tell", classes=4
    )
    put = monkeypatch.setattr
    put(GradientMatch, "_updates", lambda self, scene: [("m1", "u1"), ("m2", "u2"), ("m3", "u3")])
    put(GradientMatch, "_steps", lambda self, *of: ("steps", *of[1:]))
    put(GradientMatch, "_search", lambda self, *of: told.append(of[1:]) or {"iterations": 100, "restarts": 2})
    put(gradient_match, "records_of", lambda scene: 10)
    put(gradient_match, "first_linear", lambda model, pixels: f"first of {model}, {pixels}")
    put(gradient_match, "inferred", lambda *of: ("labels", *of))
    put(gradient_match, "starts", lambda scene, n, rng: ("starts", n, rng))
    put(gradient_match, "trial", lambda iterations: iterations // 20)

    def made(kind):
        def search(*of, **how):
            did.append((kind, of, how))
            rows = torch.tensor([[3.0, -0.5]])
            return rows if kind == "closed" else rows[:, None, None]

        return search

    for name in ("closed_form", "match_cosine", "match_lbfgs"):
        put(gradient_match, name, made(name.split("_")[0] if name == "closed_form" else name.split("_")[1]))
    attack = GradientMatch(form=form, uploads=2, most=3, tv=0.5, lr=0.25, together=6)
    images = attack.run(seen).images
    assert images.shape == (2, 1, 1, 2)
    assert images[0].flatten().tolist() == ([1, -0.5] if form == "closed" else [3, -0.5])
    rng, how = "rng of gradient_match", {"iterations": 100, "restarts": 2, "tell": "tell"}
    for i, (kind, of, options) in enumerate(did, 1):
        steps = ("steps", 10, rng)
        labels = ("labels", f"m{i}", f"u{i}", steps, 3, "x")
        begin = ("starts", 3, rng)
        if form == "closed":
            assert (kind, of, options) == ("closed", (f"u{i}", f"first of m{i}, 2", 3), {})
        elif form == "cosine":
            assert (kind, of) == ("cosine", (f"m{i}", f"u{i}", steps, labels, begin))
            assert options == how | {"tv": 0.5, "lr": 0.25, "together": 6, "trial": 5}
        else:
            known = labels if form == "idlg" else None
            assert (kind, of, options) == ("lbfgs", (f"m{i}", f"u{i}", steps, known, 4, begin, rng), how)
    assert len(did) == 2
    assert told == ([] if form == "closed" else [(f"m{i}", 10, ("steps", 10, rng)) for i in (1, 2)])
    did.clear()
    GradientMatch(form=form, records=2).run(seen)
    counts = {"closed": lambda of: of[2], "cosine": lambda of: of[4][1]}.get(form, lambda of: of[5][1])
    assert [counts(of) for _, of, _ in did] == [2], "one update, and two records that are said"


@pytest.mark.parametrize(("iterations", "options", "shares"), [
    (200, {"restarts": 2}, [0, 0.25, 1, 1.25]), (30, {}, [0]), (50, {}, [0]), (51, {}, [0, 50 / 51]),
])  # fmt: skip
def test_a_search_by_lbfgs_looks_at_its_loss_every_fifty_steps(iterations, options, shares, monkeypatch):
    """An optimiser that stays where it is: over at the second look. A start that is nearer wins."""
    made, told, begun = [], [], []

    class Stays:
        def __init__(self, free, **how):
            made.append((len(free), how))

        def step(self, closure):
            assert closure() > 0

    monkeypatch.setattr(gradient_match.torch.optim, "LBFGS", Stays)
    model, rng = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.Generator().manual_seed(0)
    update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    steps = gradient_match.Steps([torch.arange(1)], 0.1)

    def begin(r):
        begun.append(r)
        return torch.full((1, 1, 2, 2), 0.9 - r)

    for labels in (torch.tensor([1]), None):
        told.clear()
        found = gradient_match.match_lbfgs(
            model,
            update,
            steps,
            labels,
            3,
            begin,
            rng,
            iterations=iterations,
            tell=lambda *of: told.append(of),
            **options,
        )
        assert found.shape == (1, 1, 2, 2)
        assert found.flatten().tolist() in ([pytest.approx(0.9)] * 4, [pytest.approx(-0.1)] * 4)
    of = options.get("restarts", 1)
    assert [share for share, *_ in told] == pytest.approx(shares)
    assert {whole for _, whole, _ in told} == {of}
    assert told[0][2] == f"restart 1 of {of}, step 0 of {iterations}"
    assert begun == list(range(of)) * 2
    assert [free for free, _ in made] == [1] * of + [2] * of, "guesses of labels are free too"
    assert all(how == {
        "max_iter": min(50, iterations), "history_size": 50, "line_search_fn": "strong_wolfe",
        "tolerance_change": 1e-16, "tolerance_grad": 1e-14,
    } for _, how in made)  # fmt: skip


def test_an_update_of_one_weight_of_many_is_an_update(monkeypatch):
    before, after = nn.Linear(2, 2), nn.Linear(2, 2)
    after.load_state_dict(before.state_dict())
    with torch.no_grad():
        after.weight[1, 0] += 1
    monkeypatch.setattr(gradient_match, "uploaded", lambda scene, k: {1: ("a", after)})
    monkeypatch.setattr(gradient_match, "received", lambda scene, entry: before)
    ((model, update),) = GradientMatch()._updates(SimpleNamespace(target=0))
    assert model is before
    assert update["weight"].tolist() == [[0, 0], [pytest.approx(-1), 0]]


@pytest.mark.parametrize(("n", "sizes", "eta"), [(8, [3, 5] * 2, 0.5), (9, [8], 0.5 * 2 * 3)])
def test_the_clients_steps_are_simulated_or_taken_as_one(n, sizes, eta, monkeypatch):
    """Two epochs in batches of 3 (the last of an epoch is larger); above eight records one step as long as all."""
    public = {"epochs": 2.0, "size": 3.0, "eta": 0.5}
    monkeypatch.setattr(GradientMatch, "_public", lambda self, scene: public)
    monkeypatch.setattr(gradient_match, "batches", lambda n, size, rng: [torch.arange(size), torch.arange(size, n)])
    found = GradientMatch(most=8)._steps(SimpleNamespace(device="cpu"), n, torch.Generator())
    assert [len(index) for index in found.plan] == sizes
    assert found.eta == pytest.approx(eta)


def test_a_search_that_finds_no_number_gives_grey(monkeypatch):
    monkeypatch.setattr(
        gradient_match.torch.optim, "LBFGS", lambda *of, **how: SimpleNamespace(step=lambda closure: None)
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    steps, nowhere = gradient_match.Steps([torch.arange(1)], 0.1), torch.full((1, 1, 2, 2), torch.nan)
    found = gradient_match.match_lbfgs(
        model, update, steps, torch.tensor([1]), 3, lambda r: nowhere, torch.Generator(), iterations=50
    )
    assert found.tolist() == torch.zeros(1, 1, 2, 2).tolist()


def test_records_a_little_beyond_the_range_are_images():
    """By a hundredth at most: that is rounding."""
    assert between(torch.tensor([[1.005], [0.5]]) * torch.tensor([[2.0], [1.0]]), torch.tensor([2.0, 1.0])).shape == (
        1,
        1,
    )
    found = between(torch.tensor([[1.5 + 1.008], [1.5]]), torch.tensor([2.0, 1.0]))
    assert found.flatten().tolist() == pytest.approx([1.008], abs=1e-5)
