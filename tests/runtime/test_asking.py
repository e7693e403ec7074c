"""Who is asked, who answers, who drops out, and what a quorum is."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from engines import DropEngine

from fedaudit import run
from fedaudit.runtime.asking import drops_out, participants_of, quorum_of
from fedaudit.runtime.engines.serial import SerialEngine
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.setting import Setting
from fedaudit.wire.transcript import Transcript

# --- unequal clients, deltas and rounds


def rounds(*utilities):
    sent = dict.fromkeys(("up_payload", "up_wire", "down_payload", "down_wire"), 0)
    return [RoundRecord(round=t, participants=[0], utility=u, wall_s=1, **sent) for t, u in enumerate(utilities, 1)]


def test_a_client_that_is_never_asked_spends_nothing_and_is_still_evaluated(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=1, clients=4, participation=0.5, eval_clients=True)
    record = run(setting, out=tmp_path / "a")
    asked = record.rounds[0].participants
    assert len(asked) == 2
    assert [row.client for row in record.ledger] == asked
    assert len(record.rounds[0].utility.clients.global_test.each) == 4
    assert {p.name for p in (tmp_path / "a" / "models").glob("client*")} == {
        f"client-{k:06d}.safetensors" for k in asked
    }


@pytest.mark.parametrize(
    ("quorum", "participants", "needed"), [(0.5, 5, 3), (0.5, 4, 2), (0.34, 3, 2), (0.01, 7, 1), (1.0, 3, 3)]
)
def test_the_quorum_is_rounded_up(quorum, participants, needed):
    assert quorum_of(Setting.make(quorum=quorum), list(range(participants))) == needed


@pytest.mark.parametrize(("share", "clients", "wanted"), [(0.1, 3, 1), (0.5, 5, 2), (0.8, 5, 4), (1.0, 3, 3)])
def test_the_share_of_participants_is_rounded_and_never_zero(share, clients, wanted):
    setting = Setting.make(participation=share, clients=clients)
    rounds = [participants_of(setting, t) for t in range(1, 9)]
    assert {len(ids) for ids in rounds} == {wanted}
    assert all(ids == sorted(set(ids)) for ids in rounds)
    assert wanted in (1, clients) or len({tuple(ids) for ids in rounds}) > 1


def test_drop_outs_are_as_frequent_as_set_and_differ_by_round_and_ask():
    setting = Setting.make(dropout=0.3)
    drops = [drops_out(setting, k, t, ask) for k in range(20) for t in range(20) for ask in range(5)]
    assert abs(sum(drops) / 2000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 2000)
    by_ask = torch.tensor(drops).reshape(20, 20, 5)
    assert (by_ask != by_ask[:, :1]).any()
    assert (by_ask != by_ask[:, :, :1]).any()
    assert (by_ask != by_ask[:1]).any()


# --- rounds, asks and fits that differ


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


class LosesTasks(SerialEngine):
    """Says that client 0's task was lost twice before, and client 2's once."""

    def map(self, tasks):
        for done in super().map(tasks):
            yield dataclasses.replace(done, redone={0: 2, 2: 1}.get(done.k, 0))


def test_each_time_that_a_task_was_done_again_counts(tiny, tmp_path):
    """Two asks a round, and three tasks of each were done again."""
    record = run(tiny("outside:Draws", rounds=1, clients=3), out=tmp_path / "a", engine=LosesTasks())
    assert [row.redone for row in record.rounds] == [6]
