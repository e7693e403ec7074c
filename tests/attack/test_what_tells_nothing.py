"""What must not tell an attacker who is a member: position, name, file time, size, time and order of messages."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_metadata import OF_CLIENTS, OF_FILES, OF_PLACES
from PIL import Image

import fedaudit
from fedaudit.attack import attack_run as attacking
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.membership import auc
from fedaudit.attack.stored_scores import pooled_scores
from fedaudit.data import federation
from fedaudit.runtime.asking import participants_of
from fedaudit.setting import Setting

THREATS = ("server", "active-server", "peer:1", "outsider")
SURE = 0.999  # many intervals are looked at
IMAGES = 150  # of each class


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Images in the order of their names, as they are read: the later, the larger is the file, and the older."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, number in (("train", IMAGES), ("test", 4)):
        for kind in range(2):
            (folder / part / f"class-{kind}").mkdir(parents=True)
            for i in range(number):
                # The noisier rows an image has, the longer is its file.
                pixels = np.zeros((8, 8), dtype=np.uint8)
                pixels[0] = np.frombuffer(np.array([i, kind, 7, 7], dtype=np.uint16), dtype=np.uint8)
                place = kind * number + i
                noisy = 1 + 7 * place // (2 * number)
                pixels[1 : 1 + noisy] = rng.integers(0, 256, (noisy, 8))
                file = folder / part / f"class-{kind}" / f"{i:04d}.png"
                Image.fromarray(pixels).save(file)
                os.utime(file, (1_000_000 - place,) * 2)
    return folder


def ran(images, folder, **values):
    """Clients hold unequal numbers of records, and one is left out of the last round."""
    setting = {
        "dataset": f"folder:{images}", "clients": 4, "partition": "dirichlet:1", "rounds": 2, "participation": 0.75,
        "model": "mlp", "holdout": 0.4, "validation": 0.05, "aux": 0.05, "eval_clients": False, "set": {"E": 1},
    }  # fmt: skip
    fedaudit.run(method="fedavg", out=folder, **{**setting, **values})
    return folder


@pytest.fixture(scope="module")
def a_run(images, tmp_path_factory):
    return ran(images, tmp_path_factory.mktemp("run") / "run")


def found(images, folder, threat, rule):
    """Return the AUC over all candidates, as the harness runs and scores the attack."""
    name = f"by_metadata:{'Active' if threat == 'active-server' else 'ByMetadata'}"
    attack_run(folder, attacks=[{"attack": name, "folder": str(images), "rule": rule}], threat=threat)
    return auc(*pooled_scores(folder, name, threat), SURE)


@pytest.mark.parametrize("rule", OF_FILES + OF_PLACES)
@pytest.mark.parametrize("threat", THREATS)
def test_neither_place_nor_file_tells_a_member(a_run, images, threat, rule):
    value = found(images, a_run, threat, rule)
    assert value.low < 0.5 < value.high, value


@pytest.mark.parametrize("rule", OF_CLIENTS)
@pytest.mark.parametrize("threat", THREATS)
def test_what_is_the_same_for_a_whole_client_tells_no_member(a_run, images, threat, rule):
    """Each client has as many members as others among its candidates: the AUC is 1/2 to the last digit."""
    value = found(images, a_run, threat, rule)
    assert value.value == pytest.approx(0.5, abs=1e-12)
    assert value.low < 0.5 < value.high


def told(images, tmp_path, rules, seed):
    """Return whether each rule tells members from others, in a run with a seed of its own: worlds are kept by it."""
    folder = ran(images, tmp_path / "run", seed=seed)
    values = [found(images, folder, "server", rule) for rule in rules]
    return {rule: not value.low < 0.5 < value.high for rule, value in zip(rules, values, strict=True)}


def test_members_that_come_first_would_be_told_by_place(images, tmp_path, monkeypatch):
    """The tests above can fail: the candidates stay in the order in which they were put together."""
    monkeypatch.setattr(attacking.torch, "randperm", lambda n, **how: torch.arange(n))
    assert told(images, tmp_path, OF_PLACES, seed=1) == {"position": True, "middle": False, "parity": False}


@pytest.mark.long
def test_a_split_in_the_order_of_the_file_would_be_told_by_name_time_and_size(images, tmp_path, monkeypatch):
    real = federation._shard

    def in_order(k, records, canaries, holdout, validation, rng):
        still = SimpleNamespace(permutation=np.sort)
        return real(k, records, canaries, holdout, validation, still)

    monkeypatch.setattr(federation, "_shard", in_order)
    assert told(images, tmp_path, OF_FILES, seed=2) == dict.fromkeys(OF_FILES, True)


def test_unequal_shares_of_members_would_be_told_by_what_a_client_has_alone(images, tmp_path, monkeypatch):
    """Of every other client only half of the others are among the candidates."""
    real = attacking.candidates_of

    def unequal(world, k):
        x, y, member = real(world, k)
        kept = member | (torch.arange(len(y)) % 2 == 0) if k % 2 else torch.ones_like(member)
        return x[kept], y[kept], member[kept]

    monkeypatch.setattr(attacking, "candidates_of", unequal)
    value = found(images, ran(images, tmp_path / "run", seed=3), "server", "candidates").value
    assert abs(value - 0.5) > 0.01


# --- who takes part at all ---


@pytest.fixture(scope="module")
def some_asked(images, tmp_path_factory):
    """Three clients of six are asked, once."""
    return ran(images, tmp_path_factory.mktemp("some") / "run", clients=6, participation=0.5, rounds=1)


@pytest.mark.parametrize("rule", ["bytes", "clock", "arrival", "candidates"])
def test_a_peer_does_not_see_who_else_takes_part(some_asked, rule):
    attack = {"attack": "by_metadata:WhoTookPart", "rule": rule}
    found, *_ = (r for r in attack_run(some_asked, attacks=[attack], threat="peer:1") if not r.blind)
    assert not found.leak
    assert found.pooled.auc.low < 0.5 < found.pooled.auc.high
    if rule != "candidates":
        assert {client.score for client in found.client.values()} == {0.0}, "it sees messages of its own alone"


def test_an_outsider_sees_who_sends_by_the_messages(some_asked):
    """Sizes and times are an outsider's to see: the test above would notice a peer that sees them."""
    attack = {"attack": "by_metadata:WhoTookPart", "rule": "bytes"}
    found, *_ = (r for r in attack_run(some_asked, attacks=[attack], threat="outsider") if not r.blind)
    assert found.pooled.auc.value == 1.0


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_clients_number_does_not_tell_who_is_asked(sampling):
    """200 seeds, two rounds each: by number, from both ends, by parity."""
    setting = Setting.make(clients=10, participation=0.3)
    asked = []
    for seed in range(200):
        one = setting.model_copy(update={"seed": seed, "sampling": sampling})
        asked += [np.isin(np.arange(10), participants_of(one, t)) for t in (1, 2)]
    member, k = np.concatenate(asked), np.tile(np.arange(10.0), len(asked))
    for scores in (k, np.abs(k - 4.5), k % 2):
        value = auc(scores, member, SURE)
        assert value.low < 0.5 < value.high, value
