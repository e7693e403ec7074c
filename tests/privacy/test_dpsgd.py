"""DP-SGD inside fit: against opacus, against the ledger, and where it is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from gaussian_by_hand import epsilon_of
from scipy import optimize
from torch.nn.functional import cross_entropy

from fedaudit import run, sgd
from fedaudit.errors import PrivacyError
from fedaudit.privacy import dpsgd
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.dpsgd import Planned, Progress, calibrated, fit_handed_over, fit_private, multiplier_for, planned
from fedaudit.privacy.dpsgd_stack import fit_handed_over_in_stack
from fedaudit.privacy.policy import Policy, parse_policy
from fedaudit.training import models


def ce(f, x, y):
    return cross_entropy(f(x), y, reduction="none")


def training(text):
    return dict([parse_policy(f"training:{text}")])


def one_step(policy, n=40, seed=0, lr=1.0, sample=1, **options):
    torch.manual_seed(seed)
    model = models.build("mlp", shape=(1, 4, 4), classes=3)
    x, y = torch.randn(n, 1, 4, 4), torch.randint(3, (n,))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = {"opt": sgd(lr), "batch": n, "epochs": 1, "steps": None, "given": None, "fits": 1} | options
    fitted, entry = fit_private(
        model,
        ce,
        (x, y),
        policy=policy,
        rng=torch.Generator().manual_seed(sample),
        noise=torch.Generator().manual_seed(2),
        **values,
    )
    return model, before, (x, y), fitted, entry


def test_one_step_equals_opacus_on_plain_cross_entropy():
    """A full batch, multiplier 1e-9 (no noise to speak of): the step is the mean of clipped per-sample gradients, which
    opacus' own hooks compute as well."""
    from opacus import GradSampleModule

    C = 0.5
    model, before, (x, y), _, entry = one_step(
        Policy(mechanism="dp-sgd", noise_multiplier=1e-9, sensitivity=f"clip:{C}")
    )
    torch.manual_seed(0)
    twin = GradSampleModule(models.build("mlp", shape=(1, 4, 4), classes=3))
    cross_entropy(twin(x), y, reduction="sum").backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in twin.parameters()]).norm(dim=0)
    assert (norms > C).any(), "the clipping must bite, or the test shows nothing"
    factor = (C / (norms + 1e-6)).clamp(max=1)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        step = torch.einsum("i,i...->...", factor, q.grad_sample) / len(x)
        assert torch.allclose(before[name] - p.detach(), step, atol=1e-6)
    assert entry.sample_rate == 1.0
    assert not any(hasattr(p, "grad_sample") for p in model.parameters()), "nothing is left behind"


@pytest.mark.parametrize("batch", [40, 10])
def test_the_noise_on_a_step_has_the_right_scale(batch):
    """C = 1, multiplier 2, an expected batch of B of 40 records: the step is the clipped mean + N(0, (2 / B)^2)."""
    how = {"batch": batch, "epochs": None, "steps": 1}
    quiet, *_ = one_step(Policy(mechanism="dp-sgd", noise_multiplier=1e-9), **how)
    loud, *_ = one_step(Policy(mechanism="dp-sgd", noise_multiplier=2.0), **how)
    difference = torch.cat(
        [(a - b).detach().flatten() for a, b in zip(loud.parameters(), quiet.parameters(), strict=True)]
    )
    assert float(difference.std()) == pytest.approx(2 / batch, rel=0.1)
    assert abs(float(difference.mean())) < 4 * (2 / batch) / math.sqrt(len(difference))


def test_poisson_sampling_and_steps():
    """n = 40, batch 10: q = 0.25, four steps an epoch."""
    *_, fitted, entry = one_step(Policy(mechanism="dp-sgd", noise_multiplier=1.0), batch=10, epochs=3)
    assert fitted.steps == entry.steps == 12
    assert entry.sample_rate == 0.25
    assert entry.relation == "add-or-remove"


def test_samples_differ_in_size():
    """One step at q = 1/40 without noise to speak of: of 30 samples e^-1 are empty, and leave the model where it is."""
    policy, empty = Policy(mechanism="dp-sgd", noise_multiplier=1e-9), 0
    for sample in range(30):
        model, before, *_ = one_step(policy, batch=1, epochs=None, steps=1, sample=sample)
        empty += all(torch.allclose(p, before[name], atol=1e-6) for name, p in model.named_parameters())
    assert 4 <= empty <= 18  # 11 expected; less than 1 % outside


def test_empty_samples_are_steps_too():
    *_, fitted, entry = one_step(Policy(mechanism="dp-sgd", noise_multiplier=1.0), n=40, batch=1, epochs=None, steps=30)
    assert fitted.steps == 30
    assert entry.sample_rate == 1 / 40


@pytest.mark.parametrize(("epsilon", "q", "steps"), [(1.0, 0.1, 50), (8.0, 0.3, 200), (3.0, 1.0, 10)])
def test_calibration_meets_epsilon_and_is_not_wasteful(epsilon, q, steps):
    multiplier = calibrated(epsilon, 1e-3, q, steps)
    spent = compose([Event(multiplier, q, steps)], 1e-3, compare=False).epsilon_of_record
    assert 0.96 * epsilon < spent <= epsilon


def test_a_run_under_dp_sgd_has_a_finite_ledger(tiny, tmp_path):
    two = {"clients": 2, "partition": "iid", "aux": 0.5}  # of one size: they share a calibration
    record = run(tiny("fedavg", rounds=2, privacy=training("eps=2,clip=1"), **two), out=tmp_path / "a")
    for client in record.ledger:
        assert 1.5 < client.epsilon <= 2
        assert client.by_relation["add-or-remove"].accountant == "prv"
        assert client.by_kind["weights"] == 0, "post-processing of protected training"
        assert client.by_kind["count"] == 0


def test_what_reads_the_records_again_pays_also_under_dp_sgd(tiny, tmp_path):
    record = run(tiny("outside:Exchange", rounds=1, privacy=training("noise=1,clip=1")), out=tmp_path / "a")
    client = record.ledger[0]
    assert client.by_kind["weights"] == client.by_kind["logits"] == 0
    assert client.by_kind["embeddings"] == client.by_kind["labels"] == client.epsilon == math.inf


def test_dp_sgd_repeats_with_its_seed(tiny, tmp_path):
    setting = tiny("fedavg", rounds=1, clients=2, privacy=training("noise=1,clip=1"))
    a, b = (run(setting, out=tmp_path / name) for name in "ab")
    assert a.transcript_digest == b.transcript_digest


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("outside:Stops", {}, "stops training by looking at its records"),
        ("outside:Inseparable", {}, "does not separate over records"),
        ("outside:Paints", {}, "client.optimise cannot be made private"),
        ("fedavg", {"model": "cnn_bn"}, r"BatchNorm2d.*--norm group"),
    ],
)
def test_where_dp_sgd_does_not_apply_it_says_why(method, options, words, tiny, tmp_path):
    with pytest.raises(PrivacyError, match=words):
        run(tiny(method, rounds=1, privacy=training("noise=1,clip=1"), **options), out=tmp_path / "a")


def test_the_repaired_model_trains_with_and_without_privacy(tiny, tmp_path):
    options = {"rounds": 1, "clients": 2, "model": "cnn_bn", "norm": "group"}
    plain = run(tiny("fedavg", **options), out=tmp_path / "a")
    private = run(tiny("fedavg", privacy=training("noise=1,clip=1"), **options), out=tmp_path / "b")
    assert plain.models == private.models
    assert plain.bytes("up") == private.bytes("up")


def test_training_past_dp_sgd_is_not_free(tiny, tmp_path):
    record = run(tiny("outside:Unbilled", rounds=1, privacy=training("noise=1,clip=1")), out=tmp_path / "a")
    assert record.ledger[0].epsilon == math.inf


@pytest.mark.long
def test_more_trainings_than_planned_are_refused(tiny, tmp_path):
    with pytest.raises(PrivacyError, match=r"planned 1 trainings of client 0, and this is number 2.*releases"):
        run(tiny("outside:TwiceTrained", rounds=1, clients=1, privacy=training("eps=2,clip=1")), out=tmp_path / "a")
    two = {"rounds": 1, "clients": 2, "partition": "iid"}
    record = run(tiny("outside:TwiceTrained", privacy=training("eps=2,clip=1,releases=2"), **two), out=tmp_path / "b")
    assert all(1.5 < client.epsilon <= 2 for client in record.ledger)


def test_secure_training_does_not_repeat(tiny, tmp_path):
    setting = tiny("fedavg", rounds=1, clients=2, privacy=training("noise=1,clip=1,secure"))
    assert len({run(setting, out=tmp_path / name).transcript_digest for name in "ab"}) == 2


def test_memory_is_that_of_a_chunk(monkeypatch):
    """130 rows in chunks of 64, where there is no room for more: the step is the same as with all gradients at once."""
    from fedaudit.privacy import dpsgd

    whole, held = [], []
    real = dpsgd.row_gradients

    def watched(model, loss, rows, given):
        held.append(len(rows[0]))
        return real(model, loss, rows, given)

    monkeypatch.setattr(dpsgd, "row_gradients", watched)
    for room in (0, dpsgd.ROOM):
        monkeypatch.setattr(dpsgd, "ROOM", room)
        model, *_ = one_step(Policy(mechanism="dp-sgd", noise_multiplier=1e-9), n=130)
        whole.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert held == [64, 64, 2, 130], "a small model's sample takes one call"
    assert torch.allclose(whole[0], whole[1], atol=1e-6)


def test_clients_of_nearly_the_same_size_share_a_calibration():
    from fedaudit.privacy.dpsgd import multiplier_for

    calibrated.cache_clear()
    found = {multiplier_for(2.0, 1 / n, 32 / n, 3 * math.ceil(n / 32)) for n in (700, 701, 702)}
    assert calibrated.cache_info().misses == 1
    (multiplier,) = found
    for n in (700, 701, 702):
        assert compose([Event(multiplier, 32 / n, 3 * math.ceil(n / 32))], 1 / n, compare=False).epsilon_of_record <= 2


# --- unequal deltas, clients and claims


def trained(n, batch, epochs, fits, epsilon=2.0):
    torch.manual_seed(0)
    model = models.build("mlp", shape=(1, 4, 4), classes=3)
    rows = torch.randn(n, 1, 4, 4), torch.randint(3, (n,))
    _, made = fit_private(
        model, ce, rows, opt=sgd(0.1), batch=batch, epochs=epochs, steps=None, given=None, fits=fits,
        policy=Policy(mechanism="dp-sgd", epsilon=epsilon),
        rng=torch.Generator().manual_seed(1), noise=torch.Generator().manual_seed(2),
    )  # fmt: skip
    return made


def test_several_trainings_of_several_epochs_together_meet_epsilon():
    """37 records in batches of 10: q = 10/37, four steps an epoch, two epochs, three trainings: 24 steps."""
    made = trained(37, 10, epochs=2, fits=3)
    assert (made.steps, made.sample_rate, made.delta) == (8, pytest.approx(10 / 37), pytest.approx(1 / 37))
    spent = compose([Event(made.noise_multiplier, 10 / 37, 24)], 1 / 37, compare=False).epsilon_of_record
    assert 1.8 < spent <= 2.0


@pytest.mark.parametrize(
    ("delta", "q", "steps"), [(1.09e-5, 0.02, 200), (1e-5, 0.0191, 200), (1e-5, 0.02, 191), (1e-5, 0.02, 200)]
)
def test_a_shared_calibration_is_enough_for_the_client_that_needs_most(delta, q, steps):
    """Rounded to two digits: 1.09e-5 to 1.0e-5, 0.0191 to 0.020, 191 to 200. The other way would be too little."""
    spent = compose([Event(multiplier_for(1.0, delta, q, steps), q, steps)], delta, compare=False).epsilon_of_record
    assert 0.9 < spent <= 1.0


def test_a_shared_calibration_is_sought_on_the_safe_side(monkeypatch):
    """Less delta, a higher rate, more steps: what the accountant says of them is more than any client spends."""
    asked = []
    monkeypatch.setattr(dpsgd, "calibrated", lambda *values: asked.append(values) or 1.0)
    multiplier_for(1.0, 1.09e-5, 0.0191, 191)
    assert asked == [(1.0, pytest.approx(1.0e-5), pytest.approx(0.020), 200)]


def test_a_plan_by_hand():
    """7 records in batches of 3 are ceil(7/3) = 3 steps an epoch, each record drawn with probability 3/7, so that 3 are
    expected; 10 epochs of steps are 30. More than n in a batch are all of them."""
    policy = Policy(mechanism="dp-sgd", noise_multiplier=1.5, sensitivity="clip:0.2", delta=1e-3)
    plan = planned(7, 3, 10, None, policy, 1)
    assert (plan.n, plan.q, plan.steps, plan.C, plan.multiplier, plan.expected) == (7, 3 / 7, 30, 0.2, 1.5, 3)
    assert planned(7, 3, None, 4, policy, 1).steps == 4
    assert planned(7, 70, 2, None, policy, 1).q == 1.0
    assert planned(7, 70, 2, None, policy, 1).steps == 2
    assert planned(1000, 1, None, 1, Policy(noise_multiplier=1.0), 1).C == 1.0
    assert Planned(10, 0.01, 1, 1.0, 1.0, 1e-3, None).expected == 1, "never less than one"


def test_how_far_a_training_is_before_a_step():
    """30 steps of 10 epochs: three an epoch. Planned in steps, it is the step itself."""
    plan = Planned(7, 3 / 7, 30, 0.2, 1.5, 1e-3, None)
    assert [plan.done(t, 10) for t in (0, 2, 3, 5, 6, 29)] == [(0, 10), (0, 10), (1, 10), (1, 10), (2, 10), (9, 10)]
    assert [plan.done(t, None) for t in (0, 7, 29)] == [(0, 30), (7, 30), (29, 30)]


def test_steps_are_billed_as_they_are_made():
    plan = Planned(7, 3 / 7, 30, 0.2, 1.5, 1e-3, 8.0, "client")
    progress = Progress()
    assert progress.made == 0
    assert progress.entry() is None
    progress.begin(plan)
    assert progress.entry() is None, "no step, no bill"
    progress.made += 2
    entry = progress.entry()
    assert (entry.steps, entry.sample_rate, entry.noise_multiplier, entry.claim) == (2, 3 / 7, 1.5, 8.0)
    assert (entry.sigma, entry.sensitivity, entry.clip, entry.unit) == (1.5 * 0.2, 0.2, 0.2, "client")
    assert plan.entry().steps == 30
    progress.begin(plan)
    assert progress.made == 0, "a training that begins anew has made no step"


def test_handed_over_steps_follow_the_schedule():
    """Rates 1, 1/2 (cosine of a half) and the gradients 1 and 4: 10 - 0.1 (1 + 2) = 9.7."""
    model = torch.nn.Linear(1, 1, bias=False).eval()
    torch.nn.init.constant_(model.weight, 10.0)
    steps = [({"weight": torch.tensor([[1.0]])}, (0, 2)), ({"weight": torch.tensor([[4.0]])}, (1, 2))]
    assert fit_handed_over(model, sgd(0.1, schedule="cosine"), steps) == 2
    assert float(model.weight) == pytest.approx(9.7)
    assert not model.training
    assert model.weight.grad is None
    for slot in (0, 1):
        torch.nn.init.constant_(model.weight, 10.0)
        assert fit_handed_over_in_stack(model, sgd(0.1, schedule="cosine"), iter(steps), slot, [2, 2]) == 2
        assert float(model.weight) == pytest.approx(9.7)
    torch.nn.init.constant_(model.weight, 10.0)
    assert fit_handed_over_in_stack(model, sgd(0.1), iter(steps), 0, [3, 1]) == 2, "two others were through earlier"
    assert float(model.weight) == pytest.approx(9.5)
    assert fit_handed_over_in_stack(model, sgd(0.1), iter(()), 0, []) == 0
    assert float(model.weight) == pytest.approx(9.5)


def test_rounding_for_a_shared_calibration():
    """Two digits: delta down, rate and steps up; what has two digits stays."""
    assert dpsgd._rounded(1.29e-5, 0.1234, 1234) == pytest.approx((1.2e-5, 0.13, 1300))
    assert dpsgd._rounded(1.2e-5, 0.12, 1200) == pytest.approx((1.2e-5, 0.12, 1200))
    assert dpsgd._rounded(1e-5, 0.999, 7) == pytest.approx((1e-5, 1.0, 7))


class Accountant:
    """An accountant by which so many steps at a rate cost what a function of the multiplier says."""

    def __init__(self, monkeypatch, cost):
        self.asked = []

        def compose(events, delta, compare=True):
            (event,) = events
            self.asked.append((event.noise_multiplier, event.sample_rate, event.count, delta, compare))
            return SimpleNamespace(epsilon_of_record=cost(event.noise_multiplier))

        monkeypatch.setattr(dpsgd, "compose", compose)

    @property
    def multipliers(self):
        return [one[0] for one in self.asked]


def by_the_limit(epsilon, delta, q, steps):
    """The multiplier m at which a normal shift of q sqrt(steps (e^(1/m^2) - 1)) costs epsilon."""

    def excess(m):
        return epsilon_of(1 / (q * math.sqrt(steps * (math.exp(1 / m**2) - 1))), delta) - epsilon

    return optimize.brentq(excess, 0.4, 20, xtol=1e-9)


@pytest.mark.parametrize("root", [1.0, 1.03, 3.0, 0.5, 0.94, 1.11])
def test_the_search_for_a_multiplier_begins_at_the_limit_and_ends_on_the_safe_side(monkeypatch, root):
    """The accountant's root is at some multiple of the limit's. Between e^-0.05 and e^0.1 of that it is looked for at
    once, and farther off in steps of e^0.3. What comes out is at most two tolerances above the root."""
    start = by_the_limit(2.0, 1e-3, 0.1, 50)
    accountant = Accountant(monkeypatch, lambda m: 2.0 * root * start / m)
    found = calibrated.__wrapped__(2.0, 1e-3, 0.1, 50)
    assert root * start <= found <= root * start * math.exp(2.1e-3)
    assert all(one[1:] == (0.1, 50, 1e-3, False) for one in accountant.asked)
    logs = [math.log(m / start) for m in accountant.multipliers]
    ups = [0.1 + 0.3 * i for i in range(9) if i == 0 or 0.1 + 0.3 * (i - 1) < math.log(root)]
    assert logs[: len(ups)] == pytest.approx(ups, abs=1e-4)
    low = -0.05 if len(ups) == 1 else ups[-2]
    downs = [low - 0.3 * i for i in range(9) if i == 0 or low - 0.3 * (i - 1) >= math.log(root)]
    assert logs[len(ups) : len(ups) + len(downs)] == pytest.approx(downs, abs=1e-4)


def test_where_hardly_any_noise_is_enough_the_search_stops(monkeypatch):
    """An accountant for which nothing costs anything: below a multiplier of 0.01 it is not asked."""
    accountant = Accountant(monkeypatch, lambda m: 0.0)
    found = calibrated.__wrapped__(2.0, 1e-3, 0.1, 50)
    assert 0.01 <= found < 0.01 * math.exp(0.3)
    assert min(accountant.multipliers) == pytest.approx(found)
    assert calibrated.__wrapped__(1e5, 1e-3, 1e-6, 1) < 0.01 * math.exp(0.3), "the limit has no root above 0.05"


def test_what_no_noise_can_meet_is_refused(monkeypatch):
    Accountant(monkeypatch, lambda m: 0.0)
    with pytest.raises(PrivacyError, match="No noise makes"):
        calibrated.__wrapped__(1e-12, 1e-12, 1.0, 10**12)


@pytest.mark.parametrize(
    ("multiplier", "root", "fits"),
    [
        (1.0, 1.0, True),
        (1.0, 1.0 + 0.5e-4, True),  # other libraries round otherwise
        (1.0, 1.0 + 2e-4, False),  # too little noise
        (1.0, 1.0 - 2.3e-3, True),
        (1.0, 1.0 - 3e-3, False),  # more than the search would have left
        (0.01, 1e-9, True),  # the least that is looked for
        (0.01 * math.exp(0.29), 1e-9, True),
        (0.01 * math.exp(0.31), 1e-9, False),
    ],
)
def test_whether_a_multiplier_is_what_the_search_finds(monkeypatch, multiplier, root, fits):
    """Epsilon is 2 at the root, and falls as 1 / m."""
    accountant = Accountant(monkeypatch, lambda m: 2.0 * root / m)
    assert dpsgd.is_multiplier_for(multiplier, 2.0, 1.29e-5, 0.1234, 1234) is fits
    assert all(one[1:] == pytest.approx((0.13, 1300, 1.2e-5, False)) for one in accountant.asked)
    assert accountant.multipliers[0] == multiplier
    assert accountant.multipliers[1:] in ([], [pytest.approx(multiplier * math.exp(-2.5e-3))])


def test_the_least_multiplier_of_a_search_is_still_found(monkeypatch):
    """Exactly 0.01 e^0.3 counts as the least."""
    Accountant(monkeypatch, lambda m: 0.0)
    assert dpsgd.is_multiplier_for(dpsgd.SMALLEST * math.exp(dpsgd.STEP), 2.0, 1e-5, 0.1, 10)


def test_the_bill_of_a_plan_says_all_of_it():
    of_records = Planned(7, 3 / 7, 30, 0.2, 1.5, 1e-3, 8.0).entry()
    assert (of_records.field, of_records.kind, of_records.mechanism) == ("training", "training", "dp-sgd")
    assert (of_records.relation, of_records.condition, of_records.unit) == ("add-or-remove", "n is public", "record")
    assert (of_records.delta, of_records.steps, of_records.sigma) == (1e-3, 30, pytest.approx(0.3))
    of_persons = Planned(7, 3 / 7, 30, 0.2, 1.5, 1e-3, 8.0, "person").entry(0)
    assert of_persons.condition == "n, and who has how many records, is public"
    assert of_persons.steps == 0


def test_a_plan_meets_the_epsilon_of_all_trainings_together(monkeypatch):
    """7 records in batches of 3, 10 epochs, 4 trainings: 120 steps share epsilon = 2, at delta = 1/7."""
    asked = []
    monkeypatch.setattr(dpsgd, "multiplier_for", lambda *how: asked.append(how) or 1.25)
    policy = Policy(mechanism="dp-sgd", epsilon=2.0, unit="person")
    plan = planned(7, 3, 10, None, policy, 4)
    assert (plan.multiplier, plan.delta, plan.claim, plan.unit, plan.C) == (1.25, 1 / 7, 2.0, "person", 1.0)
    planned(7, 3, None, 0, policy, 4)
    assert asked == [(2.0, 1 / 7, 3 / 7, 120), (2.0, 1 / 7, 3 / 7, 1)]


def test_samples_are_drawn_by_the_rate_from_the_generator():
    drawn = dpsgd._drawn(50, 0.3, torch.Generator().manual_seed(4))
    u = torch.rand(50, generator=torch.Generator().manual_seed(4)).tolist()
    assert drawn.tolist() == [i for i, value in enumerate(u) if value < 0.3]
    assert dpsgd._drawn(5, 1.0, torch.Generator().manual_seed(4)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [0.29, 0.57, 0.58, 1.1e-5, 2.3e-5, 0.07])
def test_numbers_of_two_digits_stay_as_they_are(value: float) -> None:
    """0.29 / 0.01 is 28.999999999999996: rounded down as it stands it would lose a digit."""
    assert dpsgd._down(value, 2) == pytest.approx(value, rel=1e-9)
    assert dpsgd._up(value, 2) == pytest.approx(value, rel=1e-9)


def test_other_numbers_go_to_the_next_of_two_digits() -> None:
    assert [dpsgd._down(value, 2) for value in (0.2999, 1.19e-5, 737.0)] == pytest.approx([0.29, 1.1e-5, 730.0])
    assert [dpsgd._up(value, 2) for value in (0.2901, 1.11e-5, 731.0)] == pytest.approx([0.3, 1.2e-5, 740.0])
