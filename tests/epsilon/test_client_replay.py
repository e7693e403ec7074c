"""What a repeated client is compared by, and which path of a run its noise is compared with."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from protected import SMALL, STEPS_OF_FEW, few_steps
from weak_elsewhere import half_the_noise

from fedaudit import Up, private, public, run
from fedaudit.epsilon import client_replay
from fedaudit.epsilon.client_replay import (
    QUIET,
    STEP,
    PrivateFit,
    Repeated,
    Seen,
    Watching,
    Witness,
    _made_gradient,
    _promised,
    _tasks,
    apart,
    clipped_lengths,
    noise_of,
    repeat,
)
from fedaudit.epsilon.private_steps import MadeStep, MadeTraining, Span
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.errors import ThreatError
from fedaudit.privacy import dpsgd_stack
from fedaudit.privacy.mechanism_outputs import Training
from fedaudit.privacy.policy import Policy
from fedaudit.progress import unwatched
from fedaudit.runtime.engines import isolated
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.nursery import nursery_of_twins
from fedaudit.runtime.party import Client
from fedaudit.runtime.task import ClientState, compute
from fedaudit.training.fit import Fitted
from fedaudit.wire.codec import digest_of


def test_the_largest_difference_counts_relative_to_the_largest_number_sent():
    """Differences 1 and 3 in two tensors; the largest number of the other is 12."""
    mine = {"a": torch.tensor([2.0, 4.0]), "b": torch.tensor([[9.0]])}
    other = {"a": torch.tensor([2.0, 5.0]), "b": torch.tensor([[-12.0]])}
    assert apart(mine, other) == pytest.approx(21 / 12)
    other["b"] = torch.tensor([[12.0]])
    assert apart(mine, other) == pytest.approx(3 / 12)
    assert apart(other, mine) == pytest.approx(3 / 9)
    assert apart(mine, mine) == 0.0


def test_differences_from_zeros_are_taken_as_they_are():
    assert apart(torch.tensor([0.5, -2.0]), torch.zeros(2)) == 2.0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2), torch.zeros(3)),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
        ("text", torch.zeros(1)),
        ({"a": torch.zeros(0)}, {"b": torch.zeros(0)}),
    ],
)
def test_what_differs_in_anything_else_is_infinitely_far(a, b):
    assert apart(a, b) == math.inf


# --- paths other than a single process: each is sabotaged by itself, in the run alone -----------------------------


def trained(folder, spared=0, **how):
    """The run of `few_steps`, by a method whose noise is halved in every process but the one that is spared."""
    values = {**STEPS_OF_FEW["set"], "spared": spared}
    run(method="weak_elsewhere:WeakElsewhere", out=folder, **{**SMALL, **STEPS_OF_FEW, "set": values, **how})
    return folder


def comes_out_again(folder) -> bool:
    """Whether every step that left is made again from the run's key, to the bit."""
    opened = RunFolder(folder)
    with compute(opened.world):
        found = repeat(opened, 0, unwatched, noise_of)
    assert sum(made.steps for made in found.made) == sum(len(made.found) for made in found.made) > 0
    return found.exact


@pytest.mark.long
def test_the_process_that_is_spared_is_honest(tmp_path):
    """The control of the sabotage: in this process it does nothing."""
    (found,) = audit_residuals(trained(tmp_path / "here", os.getpid()))
    assert found.verdict == "not refuted"


@pytest.fixture
def warm(monkeypatch):
    """Isolated processes are forks of the process that this session has for twins, which has imported everything."""
    nursery = nursery_of_twins()
    monkeypatch.setattr(nursery, "close", lambda: None)
    monkeypatch.setattr(isolated, "Nursery", lambda *how: nursery)


@pytest.mark.slow
def test_the_noise_of_an_isolated_process_is_its_own(tmp_path, warm):
    assert comes_out_again(trained(tmp_path / "honest", isolate=True))
    weak = trained(tmp_path / "weak", os.getpid(), isolate=True)
    (found,) = audit_residuals(weak)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how


@pytest.mark.slow
def test_the_noise_of_workers_on_ray_is_their_own(tmp_path, ray_engine):
    honest = trained(tmp_path / "honest", engine=ray_engine)
    assert comes_out_again(honest)
    weak = trained(tmp_path / "weak", os.getpid(), engine=ray_engine)
    (found,) = audit_residuals(weak)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how


def test_what_a_worker_sends_back_is_held_against_the_key(tmp_path, monkeypatch):
    """As on Ray, without its processes: a worker runs the task, and what it sends back is what counts."""
    from fedaudit.runtime.engines import serial

    real = serial.SerialEngine.map

    def weak(self, tasks):
        with half_the_noise():
            yield from real(self, tasks)

    with monkeypatch.context() as m:
        m.setattr(serial.SerialEngine, "map", weak)
        folder = few_steps(tmp_path / "weak")
    (found,) = audit_residuals(folder)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how


@pytest.mark.parametrize("step", ["eager", pytest.param("compiled", marks=pytest.mark.long)])
def test_the_noise_of_a_stack_is_its_own(tmp_path, monkeypatch, step):
    """Private training in a stack has code of its own, whichever step a run asks for. Sabotaged in the run alone."""
    with monkeypatch.context() as m:
        real = dpsgd_stack._Training._noise
        m.setattr(
            dpsgd_stack._Training, "_noise", lambda self, k, sums: {n: 0.5 * z for n, z in real(self, k, sums).items()}
        )
        weak = few_steps(tmp_path / "weak", engine="stacked", step=step)
        alone = few_steps(tmp_path / "alone", engine="serial", step=step)
    (found,) = audit_residuals(weak)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how
    assert audit_residuals(alone)[0].verdict == "not refuted"
    assert comes_out_again(few_steps(tmp_path / "honest", engine="stacked", step=step))


class ParameterByParameter(PrivateFit):
    """A training that clips each parameter's gradient by itself, which two parameters at once get past."""

    def after(self, multiplier=None):
        params = {name: p.clone().requires_grad_() for name, p in self.start.items()}
        sums = {name: torch.zeros_like(p) for name, p in params.items()}
        for of_record in self.loss(SimpleNamespace(params=params), *self.rows):
            grads = torch.autograd.grad(of_record, list(params.values()), retain_graph=True, allow_unused=True)
            for name, g in zip(params, grads, strict=True):
                if g is not None:
                    sums[name] += g * min(1.0, self.C / max(float(g.norm()), 1e-300))
        return {name: p.detach() - STEP * sums[name] / len(self.rows[0]) for name, p in params.items()}


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
def test_a_record_along_two_parameters_is_long_in_both(C):
    """Weight and bias are clipped to C each: a record that is long in both moves the sum by sqrt(2) C, for every C."""
    fit = ParameterByParameter(
        0, 1, torch.nn.Linear(2, 1), lambda f, x: x[:, 0], (torch.zeros(4, 2),), {}, 2, 1, None, 2, 1.0,
        Policy(noise_multiplier=1.0, sensitivity=f"clip:{C}"), 1, ("a", 1), torch.device("cpu"),
    )  # fmt: skip
    assert clipped_lengths(fit) == pytest.approx(math.sqrt(2), rel=1e-6)


# --- each step of a repetition by itself ----------------------------------------------------------------------------


class Reply(Up):
    e: torch.Tensor = private("embeddings", via="data", unit="record")
    z: torch.Tensor = private("soft_labels", via="data", unit="client")
    w: dict = private("weights", via="model", unit="client")
    t: int = public()


class Another(Up):
    e: torch.Tensor = private("embeddings", via="data", unit="record")


class Bare(Witness):
    """A witness without a run: what a client knows of it is given."""

    entries = (SimpleNamespace(sigma=9.0), SimpleNamespace(sigma=0.75, delta=0.125))

    def __init__(self, sent=None, **policies):
        self.id, self.t, self.device = 3, 2, torch.device("cpu")
        self.repeated, self.probes, self.compression, self.answered = Repeated(3), (), None, None
        self._site = SimpleNamespace(policies=policies, people=lambda: None, rounds=6)
        self._context = SimpleNamespace(done={})
        self._provenance = mock.MagicMock()
        self.sent = sent
        of = {name: SimpleNamespace(protection=None) for name in ("z", "w", "t")}
        self.was = SimpleNamespace(fields={"e": SimpleNamespace(protection=SimpleNamespace(sigma=2.5)), **of})


ONLY = {"embeddings": Policy(epsilon=1.0)}


def reply_of(e, z=1.0, w=None, t=2):
    of = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])} if w is None else w
    return Reply(torch.as_tensor(e), torch.tensor([z, 0.0]), of, t)


def test_a_repetition_is_exact_if_nothing_differs():
    assert Seen("A.e", "logits", None, 0, 1, None, [], None).rounded is False
    found = Repeated(1)
    assert (found.apart, found.same_state, found.exact) == (0.0, False, False)
    found.same_state = True
    assert found.exact
    found.apart = 1e-300
    assert not found.exact
    found.add(None)
    assert found.trained == []
    found.add("one")
    assert found.trained == ["one"]


def test_the_gate_shows_the_next_training_to_who_asked():
    gate = Watching(None)
    assert type(gate.training(dict)) is Training
    gate.next = "watch"
    assert gate.training(dict) == "watch"


@pytest.mark.parametrize(
    ("stacked", "alone", "path"), [(True, {}, "stack"), (True, {1: "why"}, "alone"), (False, {}, "alone")]
)
def test_a_training_takes_the_path_of_the_run(monkeypatch, stacked, alone, path):
    """A stack has to have room for two of them: whether one alone would be stacked says nothing."""
    asked = []
    monkeypatch.setattr(client_replay, "private_stacks", lambda jobs: asked.append(jobs) or ([], alone))
    monkeypatch.setattr(client_replay, "fit_private_together", lambda jobs: [("stack", *jobs)])
    monkeypatch.setattr(Client, "_train", lambda self, job: ("alone", job))
    client = Bare()
    assert client.stacked is False
    client.stacked = stacked
    assert client._train("job") == (path, "job")
    assert asked == ([["job", "job"]] if stacked else [])


def test_who_is_protected_in_the_message_that_was_sent_is_looked_at(monkeypatch):
    """Not a field of another kind, or of another message, nor one that was released before."""
    monkeypatch.setattr(Client, "protect", lambda self, message, field, value: ("as ever", field))
    monkeypatch.setattr(Bare, "_see", lambda self, name, value: torch.tensor([value]))
    client = Bare(reply_of([0.0]), **ONLY)
    assert client.protect(Reply, "z", 5.0) == ("as ever", "z")
    assert client.protect(Reply, "t", 5.0) == ("as ever", "t")
    assert client.protect(Another, "e", 5.0) == ("as ever", "e")
    assert client._context.done == {}
    assert client.protect(Reply, "e", 5.0).tolist() == [5.0]
    assert client._context.done == {"Reply.e": (digest_of(torch.tensor([5.0])), [])}
    client._provenance.released.assert_called_once_with("e", torch.tensor([5.0]))
    assert client.protect(Reply, "e", 5.0) == ("as ever", "e")
    free = Bare(reply_of([0.0]), **ONLY)
    free._provenance = None
    assert free.protect(Reply, "e", 5.0).tolist() == [5.0]


class Compressed:
    """A witness whose release is [1, 2] before the noise, [1.5, 2.5] with it, and was sent as [7, 8]."""

    def __init__(self, monkeypatch, policy=None, name="int8", clean=(1.0, 2.0), arrives=None, compress=True):
        self.ready = SimpleNamespace(leaves=[torch.tensor(clean)], delta=0.1)
        self.asked = []
        monkeypatch.setattr(client_replay, "prepare", lambda *how: self.asked.append(how) or self.ready)
        monkeypatch.setattr(client_replay, "with_noise", lambda *how: [torch.tensor([1.5, 2.5])])
        monkeypatch.setattr(client_replay, "applies", lambda declared: compress)
        arrived = torch.tensor([0.0]) if arrives is None else torch.tensor(arrives)
        monkeypatch.setattr(Bare, "_arrived", lambda self, value, where, declared: arrived)
        self.policy = policy or Policy(epsilon=1.0)
        self.client = Bare(reply_of([7.0, 8.0]), embeddings=self.policy)
        self.client.compression = None if name is None else SimpleNamespace(name=name)
        self.given_back = self.client._see("e", torch.zeros(2))

    def seen(self):
        (found,) = self.client.repeated.seen
        assert (found.where, found.kind, found.dtype, found.client, found.round) == (
            "Reply.e",
            "embeddings",
            None,
            3,
            2,
        )
        assert found.ready is self.ready
        assert found.sigma == 2.5
        assert self.client.repeated.reasons == []
        return [t.tolist() for t in found.sent], found.rounded, self.given_back.tolist()


@pytest.mark.parametrize("how", [{"name": None}, {"compress": False}])
def test_what_was_not_compressed_is_looked_at_as_it_was_sent(monkeypatch, how):
    found = Compressed(monkeypatch, **how)
    assert found.seen() == ([[7.0, 8.0]], False, [7.0, 8.0])
    ((value, where, declared, policy, context),) = found.asked
    assert (value.tolist(), where, declared.kind, policy) == ([0.0, 0.0], "Reply.e", "embeddings", found.policy)
    assert context is found.client._context


def test_a_field_that_says_no_sigma_has_none(monkeypatch):
    monkeypatch.setattr(client_replay, "prepare", lambda *how: SimpleNamespace(leaves=[]))
    client = Bare(reply_of([7.0]), soft_labels=Policy(epsilon=1.0))
    client._see("z", torch.zeros(2))
    assert client.repeated.seen[0].sigma is None


def test_what_comes_out_again_compressed_is_looked_at_before_that(monkeypatch):
    assert Compressed(monkeypatch, arrives=[7.0, 8.0]).seen() == ([[1.5, 2.5]], False, [1.5, 2.5])


def test_levels_that_do_not_come_out_again_are_rounded_numbers(monkeypatch):
    assert Compressed(monkeypatch).seen() == ([[7.0, 8.0]], True, [7.0, 8.0])


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"name": "topk"}, "it does not come out again"),
        ({"name": "topk", "policy": Policy(epsilon=1.0, secure=True)}, "its noise cannot be drawn again"),
        ({"clean": (1.0, 2.0, 3.0)}, "it does not come out again"),
        ({"policy": Policy(epsilon=1.0, mechanism="laplace")}, "it does not come out again"),
    ],
)
def test_what_compression_left_nothing_of_is_named(monkeypatch, how, why):
    found = Compressed(monkeypatch, **how)
    assert found.client.repeated.seen == []
    name = how.get("name", "int8")
    assert found.client.repeated.reasons == [
        f"Reply.e was compressed ({name}), and {why}: what its noise was cannot be told"
    ]
    assert found.given_back.tolist() == [7.0, 8.0]


def test_only_what_was_sent_unprotected_is_compared(monkeypatch):
    """Protected fields are looked at, once. Of the others the largest difference counts, of the model's its place."""
    seen, held = [], []
    monkeypatch.setattr(Bare, "_see", lambda self, name, value: seen.append(name))
    monkeypatch.setattr(Bare, "_arrived", lambda self, value, where, declared: value)
    monkeypatch.setattr(Bare, "_hold_against_noise", lambda self, now, sent: held.append((now, sent)))
    client = Bare(reply_of([7.0]), **ONLY)
    client.compare(reply_of([1.0], z=1.5))
    assert (seen, client.repeated.apart) == (["e"], 0.5)
    assert [of is client.sent.w for _, of in held] == [True]
    client._context.done["Reply.e"] = "released"
    client.compare(reply_of([1.0], z=1.25))
    assert (seen, client.repeated.apart) == (["e"], 0.5), "the largest of all tasks stays"
    client.compare(reply_of([1.0], t=3))
    assert client.repeated.apart == math.inf
    open_ = Bare(reply_of([7.0]))
    open_.compare(reply_of([14.0]))
    assert open_.repeated.apart == 1.0, "without a policy all of it is compared"


def test_a_field_as_it_is_at_the_receivers():
    """In eight bits of [-1, 1]: 0.3 is level 165 or 166, which is within 1 / 255."""

    class Pixels(Up):
        S: torch.Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")

    client = Bare()
    found = client._arrived(torch.tensor([0.3, -1.0]), "Pixels.S", Pixels.declared()["S"])
    assert found.tolist() == pytest.approx([0.3, -1.0], abs=1 / 255)
    assert found[0] != pytest.approx(0.3, abs=1e-6)
    assert client._arrived(7, "Pixels.t", None) == 7


def trained_of(round, *values):
    steps = tuple(
        MadeStep(t, {"a": np.array([[v, 0.0]]), "b": np.array([[2 * v]])}, {}, {}, 1) for t, v in enumerate(values)
    )
    return MadeTraining(3, round, 10, 0.5, len(values), 1.0, 1.0, steps)


def test_the_missing_part_of_a_model_is_held_against_the_noise_of_its_round():
    """The noise of both steps is (4, 0, 8). What is missing, (1, 0, 2), lies along it; in d = 3 dimensions."""
    now = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0]), "c": torch.tensor([5.0])}
    sent = {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([6.0]), "c": torch.tensor([9.0])}

    def held(made, now=now, sent=sent):
        client = Bare()
        client.repeated.made = made
        client._hold_against_noise(now, sent)
        return client.repeated.lacking

    ((cosine, p),) = held([trained_of(1, 5.0), trained_of(2, 1.0, 3.0)])
    assert (cosine, p) == pytest.approx((1.0, math.erfc(math.sqrt(3 / 2))))
    ((cosine, _),) = held([trained_of(2, 1.0, 3.0)], sent, now)
    assert cosine == pytest.approx(-1.0)
    ((cosine, _),) = held([trained_of(2, 1.0)], *({"a": of["a"], "b": of["b"]} for of in (now, sent)))
    assert cosine == pytest.approx(1.0), "a model may have these parameters and no others"
    assert held([trained_of(1, 5.0)]) == [], "another round"
    assert held([trained_of(2, 1.0), trained_of(2, 3.0)]) == [], "whose of two?"
    assert held([MadeTraining(3, 2, 10, 0.5, 2, 1.0, 1.0)]) == [], "no step is known"
    assert held([trained_of(2, 1.0, 3.0)], now, dict(now)) == [], "nothing is missing"
    without = {"a": torch.tensor([1.0, 2.0])}
    assert held([trained_of(2, 1.0)], without) == held([trained_of(2, 1.0)], now, without) == []
    assert held([trained_of(2, 1.0)], torch.zeros(3)) == []
    longer = {**sent, "b": torch.tensor([6.0, 1.0])}
    assert held([trained_of(2, 1.0)], now, longer) == held([trained_of(2, 1.0)], longer, now) == []


class OfFit:
    """One private training of a witness: 10 records, batches of 4, and whatever a test changes."""

    def __init__(self, monkeypatch):
        self.told, self.gate, self.options, self.steps = [], Watching(None), {}, 6
        self.asked, self.lacks = [], None

        def told(*facts):
            self.told.append(facts)
            return SimpleNamespace(lacks=self.lacks, sigma=facts[7])

        def watch(told):
            return SimpleNamespace(told=told, made=5, found=["one", "two"], span="span", wrong="wrong")

        def fitted(client, *how):
            self.asked.append(how)
            client._fits = getattr(client, "_fits", 0) + 1
            return Fitted(2, self.steps, 0.5)

        monkeypatch.setattr(client_replay, "Told", told)
        monkeypatch.setattr(client_replay, "StepWatch", watch)
        monkeypatch.setattr(client_replay, "outputs", lambda: self.gate)
        monkeypatch.setattr(client_replay, "clipped_lengths", lambda fit: 0.25)
        monkeypatch.setattr(client_replay, "MadeTraining", lambda *facts: facts)
        monkeypatch.setattr(Client, "_fit_private", fitted)
        monkeypatch.setattr(Bare, "_key", ("task",))
        self.model, self.rows = torch.nn.Linear(2, 1), (torch.ones(10, 2), torch.zeros(10, dtype=torch.long))

    def fit(self, policy=None, promised=1.5, **options):
        policy = policy or Policy(noise_multiplier=3.0, sensitivity="clip:0.5")
        client = Bare(training=policy)
        client._fits, client.promised, client.stacked = 1, promised, True
        self.others = []
        client.probes = (client_replay.noise_of, lambda fit: self.others.append(fit) or "probed")
        given = {"scale": torch.ones(1)}
        options = {"batch": 4, "epochs": 2, "steps": None, "given": given, "opt": "opt", "augment": "turned"} | options
        assert client._fit_private(self.model, "loss", self.rows, None, True, options, ("beside",)).steps == self.steps
        return client.repeated


@pytest.fixture
def of_fit(monkeypatch):
    return OfFit(monkeypatch)


def test_a_training_is_watched_with_all_that_it_was_told(of_fit):
    """10 records in batches of 4 are 3 steps an epoch. It is the client's second training."""
    found = of_fit.fit()
    (told,) = of_fit.told
    assert told[0] is not of_fit.model
    assert torch.equal(told[0].weight, of_fit.model.weight)
    assert told[1] == "loss"
    assert [row is mine for row, mine in zip(told[2], of_fit.rows, strict=True)] == [True, True]
    assert (told[3]["scale"].dtype, told[4], told[5]) == (torch.float32, "opt", 4)
    assert (told[6].noise_multiplier, told[7], told[8]) == (3.0, 1.5, ("task", 2))
    assert told[9:] == (torch.device("cpu"), 6, "turned", None)
    assert of_fit.asked[0][1:5] == ("loss", of_fit.rows, None, True)
    assert of_fit.asked[0][6] == ("beside",)
    assert of_fit.gate.next.found == ["one", "two"]
    assert found.made == [(3, 2, 10, 0.4, 5, 0.5, 1.5, ("one", "two"), "span", "wrong", "", 0.25)]
    (fit,) = of_fit.others
    assert found.trained == ["probed"]
    assert (fit.client, fit.round, fit.loss, fit.batch, fit.epochs, fit.steps, fit.count) == (
        3,
        2,
        "loss",
        4,
        2,
        None,
        6,
    )
    assert (fit.rows[0].dtype, fit.rows[1].dtype, fit.given["scale"].dtype) == (
        torch.float64, torch.long, torch.float64,
    )  # fmt: skip
    assert (fit.sigma, fit.fits, fit.key, fit.augment, fit.people, fit.stacked) == (
        0.75, 6, ("task", 2), "turned", None, True,
    )  # fmt: skip
    assert (fit.policy.noise_multiplier, fit.policy.clip, fit.policy.delta) == (3.0, 0.5, 0.125), "as it was billed"
    assert told[6].delta == "1/n"


def test_what_a_training_was_told_otherwise(of_fit):
    """Steps instead of epochs, no ledger, no gradient that is given, a batch of all, and releases of its own."""
    policy = Policy(noise_multiplier=3.0, sensitivity="clip:0.5", releases=8)
    found = of_fit.fit(policy, None, steps=7, given=None, batch=12)
    (told,) = of_fit.told
    assert (told[3], told[7], told[10]) == ({}, 1.5, 7)
    assert found.made[0][3] == 1.0, "no rate is above 1"
    (fit,) = of_fit.others
    assert (fit.given, fit.fits) == ({}, 8)


@pytest.mark.parametrize("why", ["lacks", "no sigma", "nobody asks"])
def test_a_training_whose_steps_cannot_be_seen_is_known_by_its_sum(of_fit, monkeypatch, why):
    """The noise of its sum is then probed, and stands in what is known of it."""
    monkeypatch.setattr(client_replay, "noise_of", lambda fit: "sum")
    policy = None
    if why == "lacks":
        of_fit.lacks = "dropout"
    elif why == "no sigma":
        policy = Policy(epsilon=1.0, sensitivity="clip:0.5")
    else:
        of_fit.gate = None
    found = of_fit.fit(policy, None if policy else 1.5)
    assert found.trained == ["sum", "probed"]
    span = found.made[0][8]
    said = "dropout" if why == "lacks" else ""
    assert found.made == [(3, 2, 10, 0.4, 6, 0.5, 0.75, (), span, "", said, 0.25)]
    assert span == Span()
    if of_fit.gate is not None:
        assert of_fit.gate.next is None


def test_a_training_without_steps_shows_nothing(of_fit):
    of_fit.steps = 0
    found = of_fit.fit()
    assert (found.made, found.trained, of_fit.others) == ([], [], [])


def test_noise_from_the_systems_entropy_has_another_key_each_time(of_fit):
    of_fit.fit(Policy(noise_multiplier=3.0, secure=True))
    (fit,) = of_fit.others
    assert fit.key[1:] == (2,)
    assert len(fit.key[0]) == 32


def fit_of(model=None, rows=None, cls=PrivateFit, C=0.5, n=5, **facts):
    rows = (torch.arange(2.0 * n).reshape(n, 2).double(),) if rows is None else rows
    values = {"client": 0, "round": 1, "model": model or torch.nn.Linear(2, 1), "loss": None, "rows": rows, "given": {}}
    values |= {"batch": 2, "epochs": 1, "steps": None, "count": 3, "sigma": 0.75, "fits": 1, "key": ("a", 1)}
    values |= {"policy": Policy(noise_multiplier=1.5, sensitivity=f"clip:{C}"), "device": torch.device("cpu")}
    return cls(**{**values, **facts})


def test_what_a_training_was_called_with():
    fit = fit_of()
    assert (fit.C, fit.expected, fit.stacked, fit.people, fit.augment) == (0.5, 2, False, None, None)
    assert fit_of(batch=9).expected == 5
    assert fit_of(rows=(torch.zeros(3, 2), torch.zeros(7))).expected == 2
    assert fit.with_noise(None) is fit.policy
    planned = fit_of(policy=Policy(epsilon=3.0))
    assert planned.with_noise(2.5) == Policy(noise_multiplier=2.5)
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert list(fit_of(model).start) == ["weight"]
    assert fit_of(model).start["weight"].dtype == torch.float64


@pytest.mark.parametrize("stacked", [False, True])
def test_a_training_in_double_precision_goes_by_its_clipped_gradients(monkeypatch, stacked):
    """The loss w x has the gradient x, of norms 0 to 4, clipped to 1.5. All records are in each of two steps, which
    are divided by five: in all STEP 2 / 5 (0 + 1 + 1.5 + 1.5 + 1.5)."""
    x = torch.arange(5.0).double()[:, None]
    asked = []
    real = client_replay.fit_private_together
    monkeypatch.setattr(client_replay, "fit_private_together", lambda jobs: asked.append(len(jobs)) or real(jobs))
    model = torch.nn.Linear(1, 1, bias=False)
    fit = fit_of(model, (x,), C=1.5, batch=5, epochs=2, loss=lambda f, x: f(x)[:, 0], stacked=stacked)
    after = fit.after(QUIET)
    assert list(after) == ["weight"]
    moved = float(fit.start["weight"] - after["weight"]) / STEP
    assert moved == pytest.approx(2 / 5 * 5.5, rel=1e-6)
    assert asked == ([1] if stacked else [])
    noisy = fit.after()
    assert float(noisy["weight"] - after["weight"]) != 0
    assert torch.equal(fit.after()["weight"], noisy["weight"]), "the same noise whenever it is asked for"
    assert model.weight.dtype == torch.float32


class Known(PrivateFit):
    """A training whose models are known: 1e-6 times its rows' sum, and with noise 1e-6 more for each parameter."""

    def after(self, multiplier=None):
        step = STEP * self.rows[0].sum(0)
        more = 0.0 if multiplier == QUIET else STEP
        single = self.batch == 1
        assert not single or (self.epochs, self.steps, self.people, len(self.rows[0])) == (None, 1, None, 1)
        start = self.start
        return {"weight": start["weight"] - step - more, "bias": start["bias"] - 2 * more - (STEP if single else 0)}


def test_the_noise_of_all_steps_by_hand():
    """Noise of 1 and 2 times STEP; a deviation is STEP / 2 x 0.75 x sqrt(3) on either. Of the first four rows, with 1
    in the bias, the longest is (6, 7, 1), in units of C = 0.5. The fifth, (8, 9), is not looked at."""
    found = noise_of(fit_of(cls=Known))
    assert (found.client, found.round, found.sigma, found.steps) == (0, 1, 0.75, 3)
    unit = 0.75 / 2 * math.sqrt(3)
    assert found.noise["weight"].flatten().tolist() == pytest.approx([1 / unit] * 2, rel=1e-6)
    assert found.noise["bias"].tolist() == pytest.approx([2 / unit], rel=1e-6)
    assert found.clean["weight"].flatten().tolist() == pytest.approx([20.0, 25.0], rel=1e-6)
    assert found.clean["bias"].tolist() == pytest.approx([0.0], abs=1e-6)
    assert found.largest == pytest.approx(math.sqrt(36 + 49 + 1) / 0.5, rel=1e-6)
    few = noise_of(fit_of(cls=Known, n=2))
    assert few.largest == pytest.approx(math.sqrt(4 + 9 + 1) / 0.5, rel=1e-6), "two records, and no more"


class Asked(PrivateFit):
    """A training that keeps what it is asked for, and clips by a rule: a function from the records' lengths to sums."""

    asked: ClassVar[list] = []
    rule: ClassVar = None

    def after(self, multiplier=None):
        records = self.loss.keywords["records"]
        assert (multiplier, self.batch, self.epochs, self.steps) == (QUIET, len(records), None, 1)
        assert [len(row) for row in self.rows] == [len(records)] * 2
        assert self.rows[0].tolist() == list(range(len(records)))
        Asked.asked.append(records)
        after = self.start
        for name, value in type(self).rule(records, self.C):
            after[name] = after[name].clone()
            after[name].view(-1)[0] -= STEP * value / len(records)
        return after


def whole(records, C):
    """Clip each record over all parameters."""
    for record in records:
        norm = math.sqrt(sum(g * g for _, g in record))
        for name, g in record:
            yield name, g * min(1.0, C / norm)


def stretched(records, C):
    """Make every gradient as long as C, also one that was shorter."""
    for record in records:
        for name, g in record:
            yield name, g * C / abs(g) / math.sqrt(len(record))


def in_front(records, C):
    """Clip the first record alone."""
    yield from whole(records[:1], C)
    for record in records[1:]:
        yield from record


def alone_in(number, times):
    """Return a rule by which long records along so many parameters, not the first one alone, are `times` C long."""

    def rule(records, C):
        for name, g in whole(records, C):
            (last, size), long = records[0][-1], len(records) == 1 and len(records[0]) == number
            yield name, g * (times if long and size > C and last != "p00" else 1.0)

    return rule


@pytest.mark.parametrize(
    ("rule", "longest"),
    [(whole, 1.0), (stretched, 1.0), (in_front, 100.0), (alone_in(1, 3.0), 3.0), (alone_in(2, 3.0), 3.0)],
)
def test_which_records_are_made_to_try_a_clipping(monkeypatch, rule, longest):
    """Of 17 parameters every third: 10 C and C / 10 along each. Then the first and last at once, and -100 C beside
    10 C: what the second record adds to the sum is C long at most, unless the first alone is clipped."""
    model = torch.nn.ParameterDict({f"p{i:02}": torch.nn.Parameter(torch.ones(2)) for i in range(17)})
    monkeypatch.setattr(Asked, "asked", [])
    monkeypatch.setattr(Asked, "rule", staticmethod(rule))
    C = 0.5
    found = clipped_lengths(fit_of(model, cls=Asked, C=C))
    singles = [((f"p{i:02}", times * C),) for i in range(0, 17, 3) for times in (10, 0.1)]
    first = ("p00", 10 * C)
    wanted = [*((one,) for one in singles), ((first, ("p16", 10 * C)),)]
    wanted += [((first,), (("p00", -100 * C),)), ((first,),)]
    assert [tuple(records) for records in Asked.asked] == [
        tuple(tuple((n, pytest.approx(g)) for n, g in record) for record in records) for records in wanted
    ]
    assert found == pytest.approx(longest, rel=1e-5)


def test_short_gradients_may_not_grow_to_more_than_twice(monkeypatch):
    """A gradient of C / 10 that leaves as 0.15 C is not told from rounding; one of C / 4 is, and counts."""
    model = torch.nn.ParameterDict({"p": torch.nn.Parameter(torch.ones(2))})
    for grown, longest in ((1.5, 0.0), (2.5, 0.25)):
        monkeypatch.setattr(Asked, "asked", [])

        def rule(records, C, grown=grown):
            return [(name, g * grown if abs(g) < C else 0.0) for record in records for name, g in record]

        monkeypatch.setattr(Asked, "rule", staticmethod(rule))
        assert clipped_lengths(fit_of(model, cls=Asked, C=4.0)) == pytest.approx(longest, rel=1e-5)
        assert len(Asked.asked) == 4, "one parameter has no other beside it"


def test_made_gradients_are_as_long_as_they_should_be():
    """Two records: 3 along the first entry of a, and 4 along that of b; then -5 along a."""
    params = {name: torch.zeros(2, 2, requires_grad=True) for name in "ab"}
    records = ((("a", 3.0), ("b", 4.0)), (("a", -5.0),))
    losses = _made_gradient(SimpleNamespace(params=params), torch.tensor([1, 0]), torch.zeros(2), records=records, k=1)
    (second,) = torch.autograd.grad(losses[0], [params["a"]], retain_graph=True)
    assert second.tolist() == [[-5.0, 0.0], [0.0, 0.0]]
    first = torch.autograd.grad(losses[1], list(params.values()))
    assert [g.tolist() for g in first] == [[[3.0, 0.0], [0.0, 0.0]], [[4.0, 0.0], [0.0, 0.0]]]


def test_equal_things_are_not_apart_whatever_they_are():
    assert apart("text", "text") == apart(3, 3) == 0.0
    one, four = ({"a": torch.zeros(0), "b": torch.tensor([number])} for number in (1.0, 4.0))
    assert apart(one, four) == 0.75


def told_entry(direction, client, round, ask=0, kept=(True, True), **more):
    fields = dict(zip(("a", "b"), kept, strict=True))
    return SimpleNamespace(
        direction=direction, client=client, round=round, ask=ask, fields=fields, kept=fields.get, **more
    )


def test_the_tasks_of_a_client_are_those_that_it_answered_in_order():
    """Client 1 is asked twice in round 1, answers the second first, and does not answer in round 2."""
    downs = {key: told_entry("down", 1, *key) for key in ((1, 0), (1, 1), (2, 0), (3, 0))}
    ups = {key: told_entry("up", 1, *key) for key in ((1, 1), (1, 0), (3, 0))}
    others = [told_entry("down", 0, 2), told_entry("up", 0, 2, kept=(False, False)), told_entry("up", 1, 9)]
    entries = [downs[1, 0], downs[1, 1], *others, ups[1, 1], ups[1, 0], downs[2, 0], downs[3, 0], ups[3, 0]]
    run = SimpleNamespace(transcript=SimpleNamespace(entries=lambda: iter(entries)))
    assert list(_tasks(run, 1)) == [(downs[key], ups[key]) for key in ((1, 1), (1, 0), (3, 0))]
    entries[-1] = told_entry("up", 1, 3, kept=(True, False))
    with pytest.raises(ThreatError, match="did not keep what client 1 sent in round 3"):
        list(_tasks(run, 1))


def test_the_promise_of_a_round_is_the_largest_of_that_clients_trainings():
    def entry(kind, sigma, *rounds):
        return SimpleNamespace(kind=kind, sigma=sigma, rounds=list(rounds))

    mine = [entry("training", 2.0, 1, 2), entry("training", 3.0, 2), entry("training", 9.0, 3), entry("logits", 8.0, 2)]
    ledger = [
        SimpleNamespace(client=0, entries=[entry("training", 7.0, 1, 2)]),
        SimpleNamespace(client=1, entries=[*mine, entry("training", None, 2, 4)]),
    ]
    run = SimpleNamespace(record=SimpleNamespace(ledger=ledger))
    assert [_promised(run, 1, t) for t in (1, 2, 3, 4, 5)] == [2.0, 3.0, 9.0, None, None]


class OfRepetition:
    """A run of one client with two tasks, and a world in which a task leaves the state that a test says."""

    def __init__(self, monkeypatch):
        self.left, self.opened, self.keys, self.engine, self.out = "state 2", [], [], "stacked", 0.0
        downs = [told_entry("down", 4, t, t + 1, fn=f"fn {t}", record=lambda t=t: f"down {t}") for t in (1, 2)]
        ups = [told_entry("up", 4, t, t + 1, record=lambda t=t: f"up {t}") for t in (1, 2)]
        self.tasks = list(zip(downs, ups, strict=True))
        setting = SimpleNamespace(start=None, seed=5)
        self.world = SimpleNamespace(
            setting=setting, device=torch.device("cpu"), site=lambda k: f"site {k}", compression="int8", method="method"
        )
        self.run = SimpleNamespace(world=self.world, secret=b"s", client_state=lambda k: self.left)

        def opened(site, t, ask, meter, state, *, message, cls):
            client = SimpleNamespace(site=site, t=t, ask=ask, state=state, message=message, cls=cls)
            client.settle = lambda: f"kept {t}"
            client.compare = lambda reply: setattr(client.repeated, "apart", max(client.repeated.apart, self.out))
            self.opened.append(client)
            return client

        for name, made in {
            "_tasks": lambda run, k: self.tasks,
            "_promised": lambda run, k, t: (k, t),
            "open_client": opened,
            "encode": lambda value: value,
            "decode": lambda blob, cls, device=None: SimpleNamespace(model=blob) if cls is ClientState else [blob],
            "find_function": lambda method, fn: lambda client, message: (method, fn, message),
            "state_after": lambda client, kept: f"state {client.t}",
            "chosen_engine": lambda setting: self.engine,
            "task_key": lambda *of: of,
            "NoiseKey": lambda key, once: self.keys.append((key, once)),
            "apart": lambda a, b: {("state 2", "other"): 0.25}[a, b],
        }.items():
            monkeypatch.setattr(client_replay, name, made)


@pytest.fixture
def repetition(monkeypatch):
    return OfRepetition(monkeypatch)


def test_each_task_begins_where_the_one_before_ended(repetition):
    said = []
    found = repeat(repetition.run, 4, lambda *how: said.append(how), "probe")
    one, other = repetition.opened
    assert (one.state, other.state) == (None, "state 1")
    assert [(c.site, c.t, c.ask, c.message, c.cls) for c in (one, other)] == [
        ("site 4", 1, 2, ["down 1"], Witness), ("site 4", 2, 3, ["down 2"], Witness)
    ]  # fmt: skip
    assert [c.sent for c in (one, other)] == [["up 1"], ["up 2"]]
    assert [c.was for c in (one, other)] == [up for _, up in repetition.tasks]
    assert one.repeated is other.repeated is found
    assert (one.probes, one.compression, one.stacked, other.promised) == (("probe",), "int8", True, (4, 2))
    assert one.answered == one.message
    assert one.answered is not one.message
    assert repetition.keys == [((b"s", 4, 1, 2, 0), False), ((b"s", 4, 2, 3, 0), False)]
    assert said == [(0, 2, "client 4, round 1"), (1, 2, "client 4, round 2")]
    assert (found.client, found.same_state, found.apart) == (4, True, 0.0)
    repetition.engine = "serial"
    repeat(repetition.run, 4, lambda *how: None)
    assert repetition.opened[-1].stacked is False


def test_another_last_state_is_as_far_as_its_model(repetition):
    repetition.left = "other"
    found = repeat(repetition.run, 4, lambda *how: None)
    assert (found.same_state, found.apart) == (False, 0.25)
    repetition.out = 0.5
    assert repeat(repetition.run, 4, lambda *how: None).apart == 0.5


def test_what_cannot_be_repeated_is_said(repetition):
    downs = repetition.tasks
    repetition.tasks = [(told_entry("down", 4, 7, kept=(True, False)), downs[0][1])]
    with pytest.raises(ThreatError, match="did not keep what client 4 was sent in round 7"):
        repeat(repetition.run, 4, lambda *how: None)
    repetition.tasks = []
    with pytest.raises(ThreatError, match="no state of client 4"):
        repeat(repetition.run, 4, lambda *how: None)
    repetition.tasks, repetition.left = downs, None
    with pytest.raises(ThreatError, match="no state of client 4"):
        repeat(repetition.run, 4, lambda *how: None)
    repetition.world.setting.start = "there"
    with pytest.raises(ThreatError, match="started as another run left them"):
        repeat(repetition.run, 4, lambda *how: None)
