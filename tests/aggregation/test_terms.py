"""The terms of a sum: what travels to a client, its noise, and what its reply becomes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedaudit import Down, State, Up, private
from fedaudit.aggregation.terms import Entered, Noise, Terms, bounded, entered, skellam, terms_of
from fedaudit.aggregation.update import update_of


class Begin(Down):
    w: State


class Reply(Up):
    w: State = private("weights", via="model", unit="client")
    v: Tensor = private("statistics", via="data", unit="client")
    r: float = private("statistics", via="data", unit="client")
    c: int = private("count", via="data", unit="client")
    n: int = private("count", via="data", unit="client")
    maybe: Tensor | None = private("statistics", via="data", unit="client")


TERMS = Terms(by="n", clients=3, bound=10.0, largest=5.0, based=True, key=(0, "client 1", 2))
SENT = Begin(State({"a": torch.tensor([1.0, 2.0])}))
REPLY = Reply(State({"a": torch.tensor([4.0, 6.0])}), torch.tensor([[7.0]]), 0.5, 3, 4, None)


def test_terms_arrive_as_they_were_sent():
    """With noise and without: another process gets lists and tables, and no classes."""
    for noise in (None, Noise(2.0, variance=9.0, secure=True)):
        made = dataclasses.replace(TERMS, noise=noise)
        values = dataclasses.asdict(made)
        assert terms_of({**values, "key": list(made.key)}) == made


def test_noise_and_terms_promise_nothing_by_themselves():
    assert Noise(2.0) == Noise(2.0, 0.0, 0.0, False)
    assert (TERMS.secret, dict(TERMS.peers), TERMS.noise) == (None, {}, None)
    assert (Entered(REPLY).layout, Entered(REPLY).cut, Entered(REPLY).norm) == ("", 0, None)


def test_a_reply_as_an_update_by_hand():
    """States are counted from what was sent; tensors and numbers are taken as they are; n is the weight."""
    update = update_of(REPLY, SENT, "n")
    assert update.real.tolist() == [3.0, 4.0, 7.0, 0.5]
    assert update.whole.tolist() == [3]
    assert update.weight == 4
    assert update_of(REPLY, None, "n").real.tolist() == [4.0, 6.0, 7.0, 0.5]


def test_without_noise_and_masks_a_reply_is_what_it_was():
    found = entered(REPLY, SENT, TERMS, 1, torch.device("cpu"))
    assert found.reply.w["a"].tolist() == [4.0, 6.0]
    assert (found.reply.v.tolist(), found.reply.r, found.reply.c, found.reply.maybe) == ([[7.0]], 0.5, 3, None)
    assert (found.cut, found.norm) == (0, None)


def test_an_update_is_clipped_and_then_noised():
    """|(3, 4, 7, 1/2)| = sqrt(74.25), clipped to 1; the noise has deviation 2 and comes from the key."""
    update = update_of(REPLY, SENT, "n")
    short, norm = bounded(update, dataclasses.replace(TERMS, noise=Noise(1.0)))
    assert norm == pytest.approx(math.sqrt(74.25))
    assert np.linalg.norm(short.real) == pytest.approx(1)
    wide = dataclasses.replace(update, real=np.zeros(20_000))
    once, again, other = (
        bounded(wide, dataclasses.replace(TERMS, key=(0, k), noise=Noise(1.0, sigma=2.0)))[0].real for k in (1, 1, 2)
    )
    assert once.std() == pytest.approx(2, rel=0.03)
    assert np.array_equal(once, again)
    assert abs(np.corrcoef(once, other)[0, 1]) < 0.04
    assert bounded(update, TERMS) == (update, None)


def test_skellam_noise_is_on_the_first_words_alone():
    found = skellam(np.random.default_rng(0), 9.0, 20_000, 20_003).view(np.int32)
    assert found[20_000:].tolist() == [0, 0, 0]
    assert found[:20_000].var() == pytest.approx(9, rel=0.05)
    assert abs(found[:20_000].mean()) < 5 * 3 / math.sqrt(20_000)
