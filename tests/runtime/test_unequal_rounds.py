"""Rounds, asks and fits that differ from one another: what is of one of them must not pass for another's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from engines import DropEngine
from safetensors.torch import load_file

from fedaudit import run
from fedaudit.errors import PrivacyError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.party import Party
from fedaudit.runtime.task import open_client
from fedaudit.runtime.utility import hits
from fedaudit.runtime.world import World
from fedaudit.wire.transcript import Transcript


def privacy(*texts):
    return dict(parse_policy(text) for text in texts)


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


def test_two_asks_draw_otherwise(tiny, tmp_path):
    run(tiny("outside:Draws", rounds=2, clients=2), out=tmp_path / "a")
    drawn = [e["s"] for e in Transcript(tmp_path / "a" / "transcript").entries() if e.direction == "up"]
    assert len(drawn) == 2 * 2 * 2, "two asks of two clients in two rounds"
    assert len(set(drawn)) == len(drawn)


def test_who_failed_is_not_asked_again_in_the_round(tiny, tmp_path):
    """Client 1 drops out of round 1's first ask; the second goes to the others, and round 2 to all again."""
    run(tiny("outside:Draws", rounds=2, clients=3), out=tmp_path / "a", engine=DropEngine({(1, 1, 0)}))
    asked = {}
    for e in Transcript(tmp_path / "a" / "transcript").entries():
        if e.direction == "down":
            asked.setdefault((e.round, e.ask), []).append(e.client)
    assert asked == {(1, 0): [0, 1, 2], (1, 1): [0, 2], (2, 0): [0, 1, 2], (2, 1): [0, 1, 2]}


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


def test_the_digest_is_of_all_rounds(tiny, tmp_path):
    """Local sends the same two empty messages in each round; one round and two are not the same protocol."""
    digests = [run(tiny("local", rounds=t), out=tmp_path / str(t)).transcript_digest for t in (1, 2)]
    assert digests[0] != digests[1]


def test_traffic_adds_up_over_unequal_rounds(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=3, clients=4, partition="dirichlet:0.3", participation=0.5)
    record = run(setting, out=tmp_path / "a")
    assert len({row.up_payload for row in record.rounds}) > 1, "other clients, other sizes"
    for direction in ("up", "down"):
        for convention in ("payload", "wire"):
            total = sum(getattr(row, f"{direction}_{convention}") for row in record.rounds)
            assert record.bytes(direction, convention) == total


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


def test_clients_are_scored_on_what_they_held_out(tiny, tmp_path):
    """By hand from the published models; the second round's scores are not those of the first."""
    setting = tiny("local", rounds=2, partition="dirichlet:0.3", set={"eta": 0.1, "B": 16}, eval_clients=True)
    record = run(setting, out=tmp_path / "a")
    world = World(setting)
    told = [row.utility.clients.local_test.each for row in record.rounds]
    assert told[0] != told[1]
    for k in range(3):
        model = world.build(world.archs[k])
        model.load_state_dict(load_file(tmp_path / "a" / "models" / f"client-{k:06d}.safetensors"))
        x, y = world.nonmembers(k)
        inside = world.members(k)
        assert told[1][k] == pytest.approx(hits(model.eval(), x, y) / len(y))
        assert told[1][k] != pytest.approx(hits(model, *inside) / len(inside[1])), "not what it trained on"
