"""DFFKE's memory buffer: which rounds it holds, its size, how rows are drawn from it, who is sent what it missed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fedaudit import run
from fedaudit.methods.datafree import _dffke_traffic
from fedaudit.methods.datafree._buffer import Sample, a_round, buffer_bytes, formula_bytes, held, remember
from fedaudit.methods.datafree._decoder import (
    Decoder,
    decoder_size,
)
from fedaudit.methods.datafree.dffke import DFFKE
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.shape import Shape
from fedaudit.wire.codec import decode as decode_record
from fedaudit.wire.message import Size, State, as_size, state_of

QUICK = dict(DFFKE.quick)


def test_the_buffer_keeps_the_newest_rounds_by_number():
    for R, expected in ((0, []), (1, [7]), (2, [4, 7]), ("unlimited", [1, 2, 4, 7])):
        memory = {}
        for t in (1, 2, 4, 7):  # this client sat out rounds 3, 5 and 6
            remember(memory, t, a_round(State(), {0: torch.full((1, 1), t)}), R)
        assert list(held(memory)) == expected
        assert all(int(held(memory)[s].read("E", 0)) == s for s in expected)


def test_the_buffers_bytes_are_the_papers_formula():
    """Three rounds of a decoder at h = 8, 1x8x8, width 2 and of N = 5 + 6 rows: 3 (|Dec| + 11 x 8 x 4). |Dec| by hand:
    linear 8 x 16 + 16, batch norms 2 (4 + 4 + 2), convolutions 4 x 4 x 9, 4 x 2 x 9, 2 x 1 x 9 + 1: 399 parameters; 20
    buffers and three counters: 399 x 4 + 20 x 4 + 24 = 1700."""
    memory = {}
    for t in (1, 2, 3):
        E = {0: torch.zeros(5, 8), 1: torch.zeros(6, 8)}
        remember(memory, t, a_round(state_of(Decoder(8, (1, 8, 8), width=2)), E), "unlimited")
    assert buffer_bytes(memory) == formula_bytes(3, 1700, 11, 8) == 3 * (1700 + 352)


def test_the_sample_is_uniform_over_the_buffer_and_as_large_as_the_client():
    """N = 400 rows out of 3 x 400: each round gives 400/3 on average; hypergeometric, standard deviation 7.7."""
    counts = Sample(11).counts(2, [1, 3, 4], 400)
    assert sum(counts.values()) == 400
    assert all(abs(m - 400 / 3) < 5 * 7.7 for m in counts.values())
    assert Sample(11).counts(2, [5], 9) == {5: 9}
    assert Sample(11).counts(2, [], 9) == {}
    assert len({Sample(s).counts(2, [1, 2], 40)[1] for s in range(9)}) > 1
    assert len(set(Sample(11).rows(2, 3, 50, 20).tolist())) == 20
    assert Sample(11).rows(2, 3, 50, 20).tolist() == Sample(11).rows(2, 3, 50, 30).tolist()[:20]
    others = [Sample(12).rows(2, 3, 50, 20), Sample(11).rows(1, 3, 50, 20), Sample(11).rows(2, 4, 50, 20)]
    assert all(Sample(11).rows(2, 3, 50, 20).tolist() != rows.tolist() for rows in others)


def buffers(folder, clients):
    """The rounds that each client holds after a run, with whose rows."""
    states = {k: RunFolder(folder).client_state(k) for k in range(clients)}
    memories = {k: decode_record(state, ClientState).memory for k, state in states.items() if state is not None}
    return {k: {s: sorted(past.keys("E")) for s, past in held(memory).items()} for k, memory in memories.items()}


@pytest.mark.slow
def test_missed_rounds_are_sent_again_and_billed(tmp_path):
    """Two of four clients a round, six rounds, R = 3. Without `sync` a client holds the rounds that it was in; with it,
    whoever was in the last round holds the last three, with the rows of those who were in them. The run itself compares
    what was declared with what crossed the wire; here the bytes once more by hand, from who sat out which round."""
    values = {"method": "dffke", "rounds": 6, "clients": 4, "participation": 0.5}
    records = {}
    for sync in (False, True):
        records[sync] = run(**values, set={**QUICK, "R": 3, "sync": sync}, out=tmp_path / str(sync))
    took_part = {row.round: row.participants for row in records[True].rounds}
    for k, rounds in buffers(tmp_path / "False", 4).items():
        mine = [t for t in took_part if k in took_part[t]]
        assert rounds == {t: took_part[t] for t in mine[-3:]}
    caught_up = buffers(tmp_path / "True", 4)
    for k in took_part[6]:
        assert caught_up[k] == {t: took_part[t] for t in (4, 5, 6)}
    n = records[True].data.members
    Dec, rows, holds = 0, 0, {k: set() for k in range(4)}
    one = decoder_size(16, (1, 8, 8), QUICK["w_Dec"])
    for t, present in took_part.items():
        for k in present:
            lacks = set(range(max(t - 3, 1), t)) - holds[k]
            Dec += len(lacks) * (one.payload + 8)
            rows += sum(8 + sum(8 + 4 * 16 * n[i] for i in took_part[s]) for s in lacks)
            holds[k] |= lacks | {t}
    sent = {row.field: row.payload for row in records[True].traffic}
    assert (sent["Missed.Dec"], sent["Missed.E"]) == (Dec, rows)
    assert Dec > 0, "the seed was chosen so that somebody misses a round"
    assert "Missed.Dec" not in {row.field for row in records[False].traffic}


@pytest.mark.slow
def test_sync_survives_drop_outs(tmp_path):
    """A client that came past catching up (the second of four asks) holds all earlier rounds, those among them in which
    it failed or sat out; and the round itself, if it came to the end."""
    setting = {"rounds": 5, "clients": 5, "participation": 0.8, "dropout": 0.15, "quorum": 0.25}
    record = run(method="dffke", **setting, set={**QUICK, "R": "unlimited", "sync": True}, out=tmp_path / "a")
    assert {absence.ask for row in record.rounds for absence in row.absent} >= {1, 2}
    assert record.status == "done"
    expected = {k: set() for k in range(5)}
    for row in record.rounds:
        failed = {absence.client: absence.ask for absence in row.absent}
        for k in row.participants:
            if failed.get(k, 4) >= 2:
                expected[k] |= set(range(1, row.round)) | ({row.round} if k not in failed else set())
    assert {k: set(rounds) for k, rounds in buffers(tmp_path / "a", 5).items()} == expected


def test_what_a_client_lacks_is_billed_row_by_row():
    """One client lacks round 2, of clients 0 and 3 with 5 and 7 records: rows of h = 4 numbers of 4 bytes, a key of 8
    bytes for the round and one for each of the two."""
    method = DFFKE(h=4, R=3, sync=True)
    plan = SimpleNamespace(
        asks=["the run's own"], shape=Shape((1, 8, 8)), asked=lambda i: [1], records={0: 5, 3: 7},
        choice=lambda field, k, default: {2: [0, 3]}, tensor=lambda *sizes: Size(4 * math.prod(sizes)),
    )  # fmt: skip
    found = _dffke_traffic._missed(method, plan)
    assert as_size(found["down", "Missed.E"]) == Size(8 + (5 * 16 + 8) + (7 * 16 + 8))
    Dec = decoder_size(4, (1, 8, 8), method.w_Dec, method.output)
    assert found["down", "Missed.Dec"] == Size(Dec.payload + 8, Dec.buffers)


@pytest.mark.parametrize(
    ("R", "sync", "t", "participants", "past"),
    [
        ("unlimited", False, 1, 4, 0),
        ("unlimited", False, 6, 4, 5),  # all five earlier rounds
        ("unlimited", False, 6, 2, 2),  # half of five, rounded to the even number
        (2, False, 6, 4, 2),
        (3, False, 6, 1, 1),  # a quarter of five
        (4, True, 6, 2, 2),  # half of the four that are kept
        (9, True, 6, 4, 5),  # no more than there were
        ("unlimited", True, 4, 4, 3),
    ],
)
def test_logits_are_planned_by_the_rounds_that_a_client_will_hold(R, sync, t, participants, past):
    """Four clients; client 2 has 5 records of 3 classes: 60 bytes, twice where there is a buffer, and a key a round."""
    plan = SimpleNamespace(
        choice=lambda field, k: None, participants=range(participants), clients=4, t=t, n={2: 5}, classes=3,
        tensor=lambda *sizes: Size(4 * math.prod(sizes)),
    )  # fmt: skip
    found = _dffke_traffic._answers(DFFKE(R=R, sync=sync), plan, 2, "Answered", 3)
    assert as_size(found) == Size(60 * (2 if past else 1) + 8 * (1 + past))


def test_a_sample_of_several_times_the_rows_repeats_none():
    """Three rounds of five rows, two times five of them; of one round alone all five."""
    past = {s: a_round(State({}), {4: torch.arange(5.0)[:, None] + 10 * s}) for s in (1, 2, 6)}
    drawn = {s: e.read() for s, e in Sample(7, times=2).own(4, past, 5).items()}
    rows = torch.cat([e[:, 0] for e in drawn.values()]).tolist()
    assert len(rows) == len(set(rows)) == 10
    assert all(s in past for s in drawn)
    assert Sample(7, times=2).own(4, {2: past[2]}, 5)[2].read()[:, 0].sort().values.tolist() == [20, 21, 22, 23, 24]
    assert torch.equal(Sample(7, times=2).of_peer(4, 6, past[6], len(drawn[6])).read(), drawn[6])


def test_each_client_has_a_draw_of_its_own():
    """Teacher and student read the rows that `rows` names: others of each client, though all have as many."""
    past = a_round(State({}), {i: torch.arange(20.0) for i in range(4)})
    found = [Sample(7).of_peer(i, 6, past, 10).read().tolist() for i in range(4)]
    assert found == [Sample(7).rows(i, 6, 20, 10).tolist() for i in range(4)]
    assert len(set(map(tuple, found))) == 4


def test_logits_are_billed_by_the_rounds_that_a_client_answered():
    """This round and two of the buffer: three keys, and twice the rows."""
    plan = SimpleNamespace(choice=lambda field, k: {("Answered.Y", 2): [4, 1, 2]}[field, k], n={2: 5}, classes=3,
                           tensor=lambda *sizes: Size(4 * math.prod(sizes)))  # fmt: skip
    assert as_size(_dffke_traffic._answers(DFFKE(R=1), plan, 2, "Answered", 3)) == Size(2 * 60 + 3 * 8)
    more = DFFKE(reviewed=4, batches="peer")
    assert as_size(_dffke_traffic._answers(more, plan, 2, "Answered", 3)) == Size(3 * 60 + 3 * 8), "two past rounds"
    more = DFFKE(reviewed=2, batches="peer")
    assert as_size(_dffke_traffic._answers(more, plan, 2, "Answered", 3)) == Size(3 * 60 + 3 * 8)
