"""Augmentation and learning-rate schedules of `fit`: by hand, alone as in a stack, and under DP-SGD."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedaudit import Augment, adam, ce, sgd
from fedaudit._torchvision import torchvision
from fedaudit.errors import ContractError, PrivacyError
from fedaudit.privacy.dpsgd import fit_private
from fedaudit.privacy.dpsgd_stack import PrivateJob, fit_private_together
from fedaudit.privacy.policy import Policy
from fedaudit.training.augment import augmented, treats_rows_alone
from fedaudit.training.descent import Descent
from fedaudit.training.fit import batches, fit
from fedaudit.training.stacked.stack import Job
from fedaudit.training.stacked.stackable import why_not

POLICY = Policy(noise_multiplier=0.5, sensitivity="clip:1.0", delta=1e-5)


def moved(image, down, right, mirrored, fill):
    """The image, mirrored first if so, moved pixel by pixel; what comes from outside is the fill of its channel."""
    channels, h, w = image.shape
    out = torch.empty_like(image)
    for c in range(channels):
        for i in range(h):
            for j in range(w):
                from_i, from_j = i + down, (w - 1 - j if mirrored else j) + right
                inside = 0 <= from_i < h and 0 <= from_j < w
                out[c, i, j] = image[c, from_i, from_j] if inside else fill[c]
    return out


@pytest.mark.parametrize("fill", ["mean", 0.25, (0.5, -0.5)])
def test_crop_and_flip_by_hand(fill):
    """u = 0.1, 0.9, 0.3 at crop 2: floor(0.1 x 5) - 2 = -2 rows, floor(0.9 x 5) - 2 = 2 columns, mirrored (0.3 < 1/2);
    u = 0.5, 0.5, 0.7: not moved and not mirrored."""
    torch.manual_seed(0)
    x = torch.rand(2, 2, 4, 5) * 2 - 1
    u = torch.tensor([[0.1, 0.9, 0.3, 0, 0, 0], [0.5, 0.5, 0.7, 0, 0, 0]])
    out = Augment(crop=2, flip=True, fill=fill)(x, u)
    outside = {"mean": x[0].mean((1, 2)).tolist(), 0.25: [0.25, 0.25]}.get(fill, list(fill) if fill != 0.25 else None)
    assert torch.allclose(out[0], moved(x[0], -2, 2, True, outside))
    assert torch.equal(out[1], x[1])


def test_colours_by_hand():
    """jitter 0.4, u = 1, 0.25, 0: light x 1.4; then contrast x 0.8 about the image's mean; then saturation x 0.6 about
    grey; after each step inside [0, 1]. Light 0.5, 0.9 and 0.1, 0.2 in two channels of two pixels."""
    light = torch.tensor([[[[0.5, 0.9]], [[0.1, 0.2]]]])
    out = Augment(jitter=0.4)(2 * light - 1, torch.tensor([[0, 0, 0, 1.0, 0.25, 0.0]]))
    bright = [[0.7, 1.0], [0.14, 0.28]]  # 1.26 is cut to 1
    mean = (0.7 + 1.0 + 0.14 + 0.28) / 4
    contrast = [[mean + 0.8 * (v - mean) for v in row] for row in bright]
    wanted = []
    for channel in (0, 1):
        greys = [(contrast[0][j] + contrast[1][j]) / 2 for j in (0, 1)]
        wanted.append([greys[j] + 0.6 * (contrast[channel][j] - greys[j]) for j in (0, 1)])
    assert torch.allclose((out[0, :, 0] + 1) / 2, torch.tensor(wanted), atol=1e-6)


ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("number", range(6))
def test_colours_of_torchvision(channels, number):
    """torchvision's own functions in the drawn order, on the image that was moved over black; one number more says
    which of the six orders it is."""
    vision = torchvision().transforms.functional
    torch.manual_seed(number)
    augment = Augment(crop=1, flip=True, jitter=0.4, fill=-1.0, colours="torchvision")
    x = torch.rand(4, channels, 5, 6, dtype=torch.float64) * 2 - 1
    u = augment.draw(4, torch.Generator().manual_seed(number)).double()
    u[:, 6] = (number + torch.tensor([0.01, 0.3, 0.6, 0.99])) / 6
    assert u.shape == (4, 7)
    seen = Augment(crop=1, flip=True, fill=-1.0)(x, u)
    assert not torch.equal(seen, x)
    steps = vision.adjust_brightness, vision.adjust_contrast, vision.adjust_saturation
    for image, found, numbers in zip(seen, augment(x, u), u, strict=True):
        light = (image + 1) / 2
        for kind in ORDERS[number]:
            light = steps[kind](light, float(0.6 + 0.8 * numbers[3 + kind]))
        assert torch.allclose((found + 1) / 2, light, atol=1e-9)


def test_the_six_orders_are_equally_often_drawn():
    augment = Augment(jitter=0.4, colours="torchvision")
    u = augment.draw(6000, torch.Generator().manual_seed(0))
    assert (u[:, 6] * 6).floor().long().bincount().tolist() == pytest.approx([1000] * 6, abs=130)  # four deviations
    assert Augment(jitter=0.4).draw(2, torch.Generator()).shape == (2, 6), "others draw what they drew"


def test_every_image_is_moved_by_its_own_numbers():
    torch.manual_seed(0)
    augment, x = Augment(crop=1, flip=True, jitter=0.3), torch.rand(6, 1, 4, 4) * 2 - 1
    u = augment.draw(6, torch.Generator().manual_seed(1))
    together = augment(x, u)
    for i in range(6):
        assert torch.allclose(together[i], augment(x[i : i + 1], u[i : i + 1])[0])
    assert u.unique(dim=0).shape == (6, 6)


def test_what_is_no_image_is_refused():
    with pytest.raises(ContractError, match="needs images"):
        Augment(crop=1)(torch.zeros(2, 5), torch.zeros(2, 6))
    with pytest.raises(ContractError, match="is not a number of pixels"):
        Augment(crop=-1)
    with pytest.raises(ContractError, match="the images have 3 channels"):
        Augment(crop=1, fill=(0.1, 0.2))(torch.zeros(2, 3, 4, 4), torch.zeros(2, 6))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()


def records(n=10, seed=0):
    torch.manual_seed(seed)
    return torch.rand(n, 1, 4, 4, dtype=torch.float64) * 2 - 1, torch.randint(3, (n,))


def test_fit_trains_on_augmented_images_by_hand():
    """Each batch: its rows, then six numbers for each of them, from one generator; the gradient is of those images."""
    (x, y), augment, model = records(), Augment(crop=1, flip=True), net()
    fit(model, ce, (x, y), opt=sgd(0.5), batch=4, epochs=2, rng=torch.Generator().manual_seed(3), augment=augment)
    hand, rng = net(), torch.Generator().manual_seed(3)
    for _ in range(2):
        for index in batches(10, 4, rng):
            seen = augment(x[index], torch.rand(len(index), 6, generator=rng))
            loss = cross_entropy(hand(seen), y[index])
            for p, g in zip(hand.parameters(), torch.autograd.grad(loss, list(hand.parameters())), strict=True):
                p.data -= 0.5 * g
    for p, q in zip(model.parameters(), hand.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-12)


@pytest.mark.parametrize(("planned", "shares"), [
    ({"epochs": 3}, [1, 1, 0.75, 0.75, 0.25, 0.25]),  # (1 + cos(pi e / 3)) / 2 for e = 0, 1, 2; two steps each
    ({"steps": 4}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
])  # fmt: skip
def test_cosine_by_hand(planned, shares):
    """The rate falls from 0.5 along a cosine: by epoch if epochs are planned, by step if steps are."""
    (x, y), model = records(8), net()
    opt = sgd(0.5, momentum=0.9, schedule="cosine")
    fit(model, ce, (x, y), opt=opt, batch=4, rng=torch.Generator().manual_seed(3), **planned)
    hand, rng, velocity, left = net(), torch.Generator().manual_seed(3), None, list(shares)
    while left:
        for index in batches(8, 4, rng):
            g = torch.autograd.grad(cross_entropy(hand(x[index]), y[index]), list(hand.parameters()))
            velocity = g if velocity is None else [0.9 * v + d for v, d in zip(velocity, g, strict=True)]
            rate = 0.5 * left.pop(0)
            for p, v in zip(hand.parameters(), velocity, strict=True):
                p.data -= rate * v
            if not left:
                break
    for p, q in zip(model.parameters(), hand.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-12)


def test_a_descent_follows_its_schedule():
    """One number, gradient 1, SGD at 1: after four steps of the cosine it has moved by 1 + 0.854 + 0.5 + 0.146."""
    p = torch.zeros(1, requires_grad=True)
    Descent([p], lambda: p.sum(), 4, sgd(1.0, schedule="cosine")).alone()
    assert p.item() == pytest.approx(-2.5, abs=1e-6)


def private(augment=None, opt=None, n=12, seed=1):
    model = net(seed).float()
    x, y = (t.float() if t.is_floating_point() else t for t in records(n, seed))
    options = {"opt": opt or sgd(0.3), "batch": 4, "epochs": 3, "steps": None, "given": None, "augment": augment}
    job = Job(model, ce, (x, y), torch.Generator().manual_seed(seed), options)
    return PrivateJob(job, torch.Generator().manual_seed(100 + seed), POLICY, 1)


@pytest.mark.parametrize("what", ["augment", "cosine", "both"])
def test_private_trainings_in_a_stack_end_as_alone(what):
    """Samples, augmentation and noise are drawn as alone, also by clients of other sizes; and both do something."""
    pytest.importorskip("opacus")
    augment = Augment(crop=1, flip=True, jitter=0.2) if what != "cosine" else None
    opt = adam(0.05, schedule="cosine") if what != "augment" else None
    usual = adam(0.05) if opt else None
    kinds = ((augment, opt), (augment, opt), (None, usual))
    together, alone, plain = ([private(a, o, n, s) for n, s in ((12, 1), (20, 2))] for a, o in kinds)
    found, one_by_one = fit_private_together(together), [job.alone() for job in alone]
    for job in plain:
        job.alone()
    assert [entry for _, entry in found] == [entry for _, entry in one_by_one]
    for a, b, c in zip(together, alone, plain, strict=True):
        for p, q, r in zip(*(j.job.model.parameters() for j in (a, b, c)), strict=True):
            assert torch.allclose(p, q, atol=1e-5)
            assert not torch.allclose(q, r, atol=1e-3)
        assert torch.equal(a.job.rng.get_state(), b.job.rng.get_state())


class Mixed:
    """An augmentation that mixes each record with another, as mixup does."""

    def draw(self, rows, rng):
        return torch.rand(rows, 1, generator=rng)

    def __call__(self, x, u):
        share = u.view(-1, 1, 1, 1).to(x.dtype)
        return share * x + (1 - share) * x.flip(0)


def test_mixed_records_are_refused_under_dp_sgd_and_train_alone_without():
    """Mixup makes one record's gradient depend on another record: no clipping bounds that."""
    job = private(Mixed())
    with pytest.raises(PrivacyError, match="Mixed is not known to treat each record alone"):
        job.alone()
    assert why_not([job.job]) == "its augmentation is not known to treat every row alone"
    before = [p.clone() for p in job.job.model.parameters()]
    fit(job.job.model, ce, job.rows, opt=sgd(0.3), batch=4, epochs=1, rng=job.job.rng, augment=Mixed())
    assert any(not torch.equal(p, q) for p, q in zip(job.job.model.parameters(), before, strict=True))


def test_a_private_step_clips_the_gradient_of_the_augmented_record():
    """One step on all records without noise is the mean of the clipped gradients of the augmented records."""
    pytest.importorskip("opacus")
    augment, model, (x, y) = Augment(crop=1, flip=True), net().float(), records(5)
    x, policy = x.float(), Policy(noise_multiplier=1e-9, sensitivity="clip:0.1", delta=1e-5)
    rng = torch.Generator().manual_seed(1)
    fit_private(
        model, ce, (x, y), opt=sgd(1.0), batch=5, epochs=None, steps=1, rng=rng, noise=torch.Generator().manual_seed(2),
        given=None, policy=policy, fits=1, augment=augment,
    )  # fmt: skip
    hand, rng = net().float(), torch.Generator().manual_seed(1)
    torch.rand(5, generator=rng)  # the sample: all
    seen = augment(x, torch.rand(5, 6, generator=rng))
    total = [torch.zeros_like(p) for p in hand.parameters()]
    for i in range(5):
        g = torch.autograd.grad(cross_entropy(hand(seen[i : i + 1]), y[i : i + 1]), list(hand.parameters()))
        norm = math.sqrt(sum(float(v.square().sum()) for v in g))
        assert norm > 0.1
        total = [t + v * 0.1 / norm for t, v in zip(total, g, strict=True)]
    for p, q, t in zip(model.parameters(), hand.parameters(), total, strict=True):
        assert torch.allclose(p, q - t / 5, atol=1e-5)


def test_an_augmentation_of_which_nothing_is_said_changes_nothing():
    plain, x = Augment(), torch.rand(2, 1, 3, 3)
    assert (plain.crop, plain.flip, plain.jitter, plain.fill) == (0, False, 0.0, "mean")
    assert plain.chosen() == [0, False, 0.0, "mean"]
    assert Augment(crop=2, flip=True, jitter=0.5, fill=(0.1, 0.2)).chosen() == [2, True, 0.5, 0.1, 0.2]
    assert plain(x, torch.full((2, 6), 0.1)) is x
    assert [Augment(jitter=at).jitter for at in (0.0, 1.0)] == [0.0, 1.0]
    for wrong in (-0.1, 1.1):
        with pytest.raises(ContractError, match="jitter is not in"):
            Augment(jitter=wrong)
    drawn = plain.draw(3, torch.Generator().manual_seed(4))
    assert torch.equal(drawn, torch.rand(3, 6, generator=torch.Generator().manual_seed(4)))


def test_mirrored_alone_moved_alone_and_the_last_places():
    """u just below 1 moves by the crop itself; below one half an image is mirrored, where that was asked for."""
    x = torch.arange(12.0).view(1, 1, 3, 4)
    below = torch.tensor([[0.999999, 0.999999, 0.49, 0, 0, 0]])
    assert torch.equal(Augment(flip=True)(x, below), x.flip(3))
    assert torch.equal(Augment(flip=True)(x, torch.tensor([[0.0, 0.0, 0.51, 0, 0, 0]])), x)
    found = Augment(crop=1, fill=9.0)(x, below)
    assert found[0, 0].tolist() == [[5.0, 6.0, 7.0, 9.0], [9 - 0.0, 10.0, 11.0, 9.0], [9.0] * 4]
    first = Augment(crop=1, fill=-1.0)(x, torch.zeros(1, 6))
    assert first[0, 0].tolist() == [[-1.0] * 4, [-1.0, 0.0, 1.0, 2.0], [-1.0, 4.0, 5.0, 6.0]]
    last = Augment(crop=1, fill=9.0)(x, torch.ones(1, 6))
    assert torch.equal(last, found), "a number that was rounded to 1 is in the last place"


def test_what_is_known_to_treat_rows_alone():
    class Other(Augment):
        pass

    assert treats_rows_alone(None)
    assert treats_rows_alone(Augment(crop=1))
    assert not treats_rows_alone(Other(crop=1))
    assert not treats_rows_alone(Mixed())
    x, y, z = torch.rand(4, 1, 3, 3), torch.arange(4), torch.ones(4)
    rng = torch.Generator().manual_seed(2)
    before = rng.get_state()
    same = augmented(None, (x, y, z), rng)
    assert [a is b for a, b in zip(same, (x, y, z), strict=True)] == [True] * 3
    assert torch.equal(rng.get_state(), before), "it draws nothing"
    other = augmented(Augment(crop=1, flip=True), (x, y, z), rng)
    u = torch.rand(4, 6, generator=torch.Generator().manual_seed(2))
    assert torch.equal(other[0], Augment(crop=1, flip=True)(x, u))
    assert other[1] is y
    assert other[2] is z
