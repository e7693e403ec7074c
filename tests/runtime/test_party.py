"""What a client does within a task: trainings, draws, memory and class means, and what they cost."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from fedaudit import State, Up, private, run
from fedaudit.errors import ContractError, PrivacyError
from fedaudit.privacy import dpsgd
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.party import Client, Cohort, Party, check_buffers, digest_of_all
from fedaudit.runtime.task import open_client
from fedaudit.runtime.world import World

# --- unequal clients, deltas and rounds


def privacy(*texts):
    return dict(parse_policy(text) for text in texts)


def test_two_private_fits_share_neither_noise_nor_sample(tiny, tmp_path):
    seeds = []
    real = dpsgd.fit_private

    def watched(*args, **options):
        seeds.append((options["rng"].initial_seed(), options["noise"].initial_seed()))
        return real(*args, **options)

    setting = tiny("outside:TwiceTrained", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    with mock.patch.object(dpsgd, "fit_private", watched):
        run(setting, out=tmp_path / "a")
    assert len(seeds) == 2 * 2 * 2, "two fits of two clients in two rounds"
    assert len({seed for pair in seeds for seed in pair}) == 2 * len(seeds)


def test_memory_written_from_records_is_paid_under_dp_sgd(tiny, tmp_path):
    """Hoarder keeps its records in memory and sends them, a later ask, as if they came from the model."""
    setting = tiny("outside:Hoarder", rounds=1, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        assert row.by_kind["weights"] == math.inf
        assert row.epsilon == math.inf


def test_memory_written_before_the_first_look_is_free_under_dp_sgd(tiny, tmp_path):
    """Exchange remembers the rounds, then looks at its records: its weights are post-processing all the same."""
    setting = tiny("outside:Exchange", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        assert row.by_kind["weights"] == 0
        assert row.by_kind["embeddings"] == math.inf


# --- rounds, asks and fits that differ


def test_a_plain_training_is_remembered_in_later_rounds(tiny, tmp_path):
    """Round 1 trains past DP-SGD, round 2 with it: the model of round 2 is still one that saw the records."""
    setting = tiny("outside:OncePlain", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        weights = [e for e in row.entries if e.kind == "weights"]
        assert [e.noise_multiplier for e in weights] == [0.0] * len(weights)
        assert sorted(t for e in weights if e.field == "Weights.w" for t in e.rounds) == [1, 2]


def test_trainings_are_counted_over_rounds(tiny, tmp_path):
    """Two rounds were planned for, one training each; with two a round the third, in round 2, is one too many."""
    setting = tiny("outside:TwiceTrained", rounds=2, clients=2, privacy=privacy("training:eps=2,clip=1"))
    with pytest.raises(PrivacyError, match="planned 2 trainings of client 0, and this is number 3"):
        run(setting, out=tmp_path / "a")


def test_two_fits_of_a_task_shuffle_otherwise(tiny, tmp_path):
    asked = []
    real = Party.rng

    def rng(self, purpose):
        asked.append((self._name, purpose))
        return real(self, purpose)

    with mock.patch.object(Party, "rng", rng):
        run(tiny("outside:TwiceTrained", rounds=1, clients=2), out=tmp_path / "a")
    fits = sorted(pair for pair in asked if pair[1].startswith("fit"))
    assert fits == [(f"client {k}", f"fit {i}") for k in (0, 1) for i in (1, 2)]


def test_class_means_are_of_clipped_rows(tiny):
    world = World(tiny("fedavg", privacy=privacy("prototypes:eps=1,clip=0.5")))
    client = open_client(world.site(0), 1, 0, Meter("client 0", 1, world.device), None)
    rows = torch.randn(len(client), 7, generator=torch.Generator().manual_seed(0)) * 3
    means = client.class_means(rows, "prototypes")
    assert sorted(means) == sorted(set(client.y.tolist()))
    for c, mean in means.items():
        of_class = rows[client.y == c]
        clipped = of_class * (0.5 / of_class.norm(dim=1, keepdim=True)).clamp(max=1)
        assert torch.allclose(mean, clipped.mean(0), atol=1e-6)


def test_of_classes_with_equal_means_the_smallest_counts(tiny):
    """One row moves the mean of a small class most. The noise is scaled by how many rows a mean is of."""
    world = World(tiny("fedavg", privacy=privacy("prototypes:eps=1,clip=4")))
    client = open_client(world.site(0), 1, 0, Meter("client 0", 1, world.device), None)
    n = len(client)
    y = torch.tensor([0] * 3 + [1] * 2 + [2] * (n - 5))
    rows = torch.where(y[:, None] == 2, 2.0, 1.0).expand(n, 7).contiguous()
    means = client.class_means(rows, "prototypes", y)
    assert [float(means[c][0]) for c in (0, 1, 2)] == pytest.approx([1.0, 1.0, 4 / 7**0.5])
    assert sorted(client._context.means.values()) == [(4.0, 2), (4.0, n - 5)]
    assert set(client._context.tables.values()) == {0}
    client.class_means(rows[:4] * 0.5, "prototypes", y[:4])
    assert set(client._context.tables.values()) == {0, 1}, "each call has a number of its own"
    with pytest.raises(PrivacyError, match=f"was given {n + 1} rows"):
        client.class_means(torch.ones(n + 1, 7), "prototypes", torch.zeros(n + 1).long())
    assert client.class_means(torch.ones(n + 1, 7), "logits", torch.zeros(n + 1).long()), "no policy bounds these"


@pytest.mark.parametrize(("people", "most"), [(None, 1), ([], 1), ([4, 4, 9, 4, 9], 3)])
def test_the_most_records_of_one_person(people, most):
    site = SimpleNamespace(people=lambda: None if people is None else torch.tensor(people))
    assert Client._most.func(SimpleNamespace(_site=site)) == most


def test_a_digest_tells_everything_that_a_training_is_told():
    """Names, kinds, lengths and numbers each change it."""
    one = {"a": torch.ones(2), "b": [1, 2.5, "text", None]}
    others = [
        {"a": torch.ones(2), "c": [1, 2.5, "text", None]}, {"a": torch.ones(2).int(), "b": [1, 2.5, "text", None]},
        {"a": torch.ones(1, 2), "b": [1, 2.5, "text", None]}, {"a": torch.ones(2), "b": (1, 2.5, "text", None)},
        {"a": torch.ones(2), "b": [1, 2.5, "text"]}, {"a": torch.ones(2), "b": [1, 2.5, "text", 0]},
        {"a": torch.zeros(2), "b": [1, 2.5, "text", None]},
    ]  # fmt: skip
    found = [digest_of_all(value) for value in (one, *others)]
    assert len(set(found)) == len(found)
    assert digest_of_all({"a": torch.ones(2), "b": [1, 2.5, "text", None]}) == found[0]
    linear, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    other.load_state_dict(linear.state_dict())
    assert digest_of_all(linear) == digest_of_all(other)
    torch.nn.init.ones_(other.weight)
    assert digest_of_all(linear) != digest_of_all(other)
    assert digest_of_all(SimpleNamespace(a=1)) == digest_of_all(SimpleNamespace(a=2)), "of others the type counts"


@pytest.mark.parametrize(
    ("buffers", "wrong"),
    [({"1.running_mean"}, None), ({"own.running_var"}, None), ({"0.weight"}, "0.weight"), ({"z", "extra"}, "extra"),
     ({"1.num_batches_tracked", "0.bias"}, "0.bias")],
)  # fmt: skip
def test_parameters_are_not_called_buffers(buffers, wrong):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = State({name: torch.zeros(1) for name in buffers}, buffers=frozenset(buffers))
    if wrong is None:
        check_buffers(Whole(state), model)
    else:
        with pytest.raises(ContractError, match=f"Whole.w calls '{wrong}' a buffer"):
            check_buffers(Whole(state), model)


class Whole(Up):
    w: State = private("weights", via="model", unit="client")


class Sent(Up):
    v: Tensor = private("weights", via="data", unit="client")
    n: int = private("count", via="data", unit="client")


def test_without_a_way_of_summing_a_cohorts_mean_is_the_mean_of_its_replies():
    """(1 x 2 + 3 x 6) / 4 = 5 by records, and (2 + 6) / 2 = 4 where all weigh the same."""
    replies = {0: Sent(torch.tensor([2.0]), 1), 4: Sent(torch.tensor([6.0]), 3)}
    asked = []
    cohort = Cohort([0, 4], lambda *words: asked.append(words) or replies)
    mean = cohort.mean("fn", "message", by="n")
    assert asked == [(cohort, "fn", "message")]
    assert (mean.value.v.tolist(), mean.value.n, mean.count) == ([5.0], 4, 2)
    assert cohort.mean("fn", "message").value.v.tolist() == [4.0]


def test_a_cohorts_mean_is_the_runs_where_the_run_has_one():
    cohort = Cohort([0], lambda *words: {}, lambda *words: words)
    assert cohort.mean("fn", "message", by="n") == (cohort, "fn", "message", "n")
    assert cohort.mean("fn", "message") == (cohort, "fn", "message", None)
