"""The transcript: complete, content-addressed, readable while written, safe against kills; views per threat."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from outside import Peers, Sent, Shared

from fedaudit import State
from fedaudit.errors import ThreatError, TranscriptError
from fedaudit.runtime.task import Done
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import encode, read_header
from fedaudit.wire.transcript import BEHIND, LARGE, Transcript, TranscriptWriter


def shared(k, t=1):
    g = torch.Generator().manual_seed(100 * t + k)
    return Shared(torch.randn(4, 3, generator=g), torch.arange(4), State({"w": torch.randn(5, generator=g)}), t)


def write(folder, rounds=1, clients=2, keep_weights=10):
    writer = TranscriptWriter(folder, keep_weights=keep_weights)
    offsets = []
    for t in range(1, rounds + 1):
        writer.begin_round(t)
        wire = Wire(writer, t)
        message = Sent(State({"w": torch.full((1000,), float(t))}))
        for k, _ in wire.down(dict.fromkeys(range(clients), message)):
            wire.back(Done(k, b"", encode(shared(k, t))), "update", "cpu")
        offsets.append(writer.end_round(t))
    writer.close()
    return offsets


def test_everything_is_there_in_order(tmp_path):
    write(tmp_path, rounds=2)
    entries = list(Transcript(tmp_path).entries())
    assert [(e.round, e.direction, e.client) for e in entries] == [
        (t, d, k) for t in (1, 2) for k in (0, 1) for d in ("down", "up")
    ]
    first = entries[1]
    assert first.message == "Shared"
    assert first.sender == "client 0"
    assert torch.equal(first["e"], shared(0).e)
    assert torch.equal(first["w"]["w"], shared(0).w["w"])
    assert first["t"] == 1
    assert first.fields["e"].model_dump() | {"wire": 0} == {
        "payload": 48, "buffers": 0, "wire": 0,
        "role": "private", "kind": "embeddings", "via": "data", "unit": "record",
    }  # fmt: skip
    with pytest.raises(TranscriptError, match=r"no field 'z'; it has e, t, w, y"):
        first["z"]


def test_field_bytes_add_up_to_the_message(tmp_path):
    write(tmp_path)
    for entry in Transcript(tmp_path).entries():
        assert sum(f.wire for f in entry.fields.values()) + entry.row["frame"] == entry.bytes
        assert entry.row["frame"] > 0


def test_a_broadcast_is_billed_to_each_and_stored_once(tmp_path):
    write(tmp_path, clients=10)
    down = [e for e in Transcript(tmp_path).entries() if e.direction == "down"]
    assert sum(e.fields["w"].payload for e in down) == 10 * 4000
    assert (tmp_path / "000001.weights.pack").stat().st_size == 4000 + 10 * 20


def test_the_same_bytes_in_the_next_round_are_stored_there(tmp_path):
    """A pack is dropped with its round: what is sent again is written again."""
    writer = TranscriptWriter(tmp_path, keep_weights=1)
    blob = encode(Sent(State({"w": torch.full((1000,), 3.0)})))
    for t in (1, 2):
        writer.begin_round(t)
        wire = Wire(writer, t)
        wire.traffic.asks.append(([0, 1], []))
        for k in (0, 1):
            wire._record(blob, read_header(blob), "down", k, 0, "update", {}, at=0.0)
        writer.end_round(t)
    writer.close()
    assert not (tmp_path / "000001.weights.pack").exists()
    assert (tmp_path / "000002.weights.pack").stat().st_size == 4000
    last = list(Transcript(tmp_path).entries())[-1]
    assert torch.equal(last["w"]["w"], torch.full((1000,), 3.0))


def test_relayed_tensors_are_stored_once(tmp_path):
    writer = TranscriptWriter(tmp_path, keep_weights=1)
    writer.begin_round(1)
    wire = Wire(writer, 1)
    for k, _ in wire.down(dict.fromkeys(range(3), Sent(State()))):
        wire.back(Done(k, b"", encode(shared(k))), "share", "cpu")
    before = sum(p.stat().st_size for p in tmp_path.glob("*.content.pack"))
    for k, _ in wire.down({k: Peers({i: shared(i).e for i in range(3) if i != k}) for k in range(3)}):
        wire.back(Done(k, error="gone"), "answer", "cpu")
    writer.end_round(1)
    writer.close()
    assert sum(p.stat().st_size for p in tmp_path.glob("*.content.pack")) == max(before, 3 * 48 + 32)


def test_old_model_states_are_dropped_and_said_so(tmp_path):
    write(tmp_path, rounds=4, keep_weights=2)
    entries = {(e.round, e.direction): e for e in Transcript(tmp_path).entries()}
    assert entries[4, "up"]["w"]["w"].shape == (5,)
    assert entries[3, "up"].kept("w")
    assert not entries[2, "up"].kept("w")
    assert entries[2, "up"].kept("e")
    assert torch.equal(entries[1, "up"]["e"], shared(1, 1).e)
    with pytest.raises(TranscriptError, match="round 2: its model states were not kept"):
        entries[2, "up"]["w"]


def test_cut_off_anywhere_every_whole_message_is_readable(tmp_path):
    write(tmp_path, rounds=1)
    index = (tmp_path / "index.jsonl").read_bytes()
    ends = [i + 1 for i, c in enumerate(index) if c == ord("\n")]
    for cut in range(0, len(index), 37):
        (tmp_path / "index.jsonl").write_bytes(index[:cut])
        rows = list(Transcript(tmp_path).rows())
        assert len(rows) == sum(end <= cut for end in ends)


def test_damage_in_the_middle_is_an_error(tmp_path):
    write(tmp_path)
    path = tmp_path / "index.jsonl"
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(TranscriptError, match="line 1 is damaged"):
        list(Transcript(tmp_path).rows())
    write(tmp_path / "b")
    pack = tmp_path / "b" / "000001.content.pack"
    data = bytearray(pack.read_bytes())
    data[3] ^= 1
    pack.write_bytes(bytes(data))
    with pytest.raises(TranscriptError, match="damaged at byte 0"):
        next(e for e in Transcript(tmp_path / "b").entries() if e.direction == "up")["e"]


def test_readable_while_being_written(tmp_path):
    writer = TranscriptWriter(tmp_path, keep_weights=1)
    writer.begin_round(1)
    wire = Wire(writer, 1)
    for k, _ in wire.down({0: Sent(State())}):
        wire.back(Done(k, b"", encode(shared(k))), "share", "cpu")
    *_, last = Transcript(tmp_path).entries()
    assert torch.equal(last["e"], shared(0).e)
    writer.close()


def test_large_messages_are_written_behind_and_in_order(tmp_path, monkeypatch):
    """The disk is slow here: small messages wait for the large ones before them, and a round for all."""
    store = TranscriptWriter._store

    def slow(self, data, pack, *known):
        time.sleep(0.02 if len(data) >= LARGE else 0.0)
        return store(self, data, pack, *known)

    monkeypatch.setattr(TranscriptWriter, "_store", slow)
    writer = TranscriptWriter(tmp_path, keep_weights=1)
    writer.begin_round(1)
    wire = Wire(writer, 1)
    large = {k: Sent(State({"w": torch.full((LARGE,), float(k))})) for k in range(6)}
    for k, _ in wire.down(large):
        wire.back(Done(k, b"", encode(shared(k))), "update", "cpu")
        assert len(writer._pending) <= BEHIND
    assert writer._pending, "nothing was written behind, so nothing was shown"
    offset = writer.end_round(1)
    assert offset == (tmp_path / "index.jsonl").stat().st_size
    entries = list(Transcript(tmp_path).entries())
    assert [(e.seq, e.direction, e.client) for e in entries] == [
        (2 * k + up, d, k) for k in range(6) for up, d in enumerate(("down", "up"))
    ]
    for k in range(6):
        assert torch.equal(entries[2 * k]["w"]["w"], torch.full((LARGE,), float(k)))
        assert torch.equal(entries[2 * k + 1]["e"], shared(k).e)
    writer.close()


def test_a_round_ends_while_the_next_one_is_written(tmp_path, monkeypatch):
    """The disk is slow here: what the next round sends waits for the end of this one, and lies in its own pack."""
    end = TranscriptWriter._end

    def slow(self, t):
        time.sleep(0.1)
        return end(self, t)

    monkeypatch.setattr(TranscriptWriter, "_end", slow)
    writer = TranscriptWriter(tmp_path, keep_weights=2)
    ends = []
    for t in (1, 2):
        writer.begin_round(t)
        wire = Wire(writer, t)
        for k, _ in wire.down({0: Sent(State({"w": torch.full((1000,), float(t))}))}):
            wire.back(Done(k, b"", encode(shared(k, t))), "update", "cpu")
        ends.append(writer.end_round_behind(t))
        assert not ends[-1].done(), "nothing was left for behind, so nothing was shown"
    writer.settle()
    writer.close()
    assert ends[1].result() == (tmp_path / "index.jsonl").stat().st_size
    lines = (tmp_path / "index.jsonl").read_bytes()[: ends[0].result()].splitlines()
    assert len(lines) == 3, "two messages of the first round, and its end"
    for t in (1, 2):
        assert (tmp_path / f"00000{t}.weights.pack").stat().st_size == 4000 + 20
    for entry in Transcript(tmp_path).entries():
        if entry.direction == "down":
            assert torch.equal(entry["w"]["w"], torch.full((1000,), float(entry.round)))


def test_a_write_behind_that_fails_is_said(tmp_path, monkeypatch):
    go = threading.Event()

    def full(self, data, pack, *known):
        assert go.wait(20)
        raise OSError("no space left on device")

    writer = TranscriptWriter(tmp_path, keep_weights=1)
    writer.begin_round(1)
    wire = Wire(writer, 1)
    monkeypatch.setattr(TranscriptWriter, "_store", full)
    blob = encode(Sent(State({"w": torch.zeros(LARGE)})))
    wire._record(blob, read_header(blob), "down", 0, 0, "update", {}, at=0.0)
    end = writer.end_round_behind(1)
    go.set()
    with pytest.raises(OSError, match="no space left"):
        end.result()
    with pytest.raises(OSError, match="no space left"):
        writer.end_round(1)
    writer.close()


def test_going_on_forgets_an_unfinished_round(tmp_path):
    offsets = write(tmp_path, rounds=2)
    before = [row for row in Transcript(tmp_path).rows() if row["round"] <= 1]
    TranscriptWriter(tmp_path, keep_weights=10, offset=offsets[0], last_round=1).close()
    assert list(Transcript(tmp_path).rows()) == before
    assert not list(tmp_path.glob("000002.*"))


def test_each_threat_sees_its_own_part(tmp_path):
    write(tmp_path, clients=3)
    transcript = Transcript(tmp_path)
    assert len(list(transcript.view("server").entries())) == 6
    peer = transcript.view("peer:1")
    assert {e.client for e in peer.entries()} == {1}
    assert peer.kinds == {"embeddings", "labels", "weights"}
    outsider = transcript.view("outsider")
    assert outsider.kinds == set()
    entry = next(outsider.entries())
    assert entry.bytes > 4000
    assert entry.at >= 0
    for hidden in (lambda: entry["w"], lambda: entry.fields, lambda: entry.message):
        with pytest.raises(ThreatError, match="An outsider sees"):
            hidden()
    with pytest.raises(ThreatError, match="Unknown threat 'pear:1'"):
        transcript.view("pear:1")


def test_no_transcript(tmp_path):
    with pytest.raises(TranscriptError, match="holds no transcript"):
        Transcript(tmp_path)


def test_index_rows_are_plain_json(tmp_path):
    write(tmp_path)
    line = (tmp_path / "index.jsonl").read_text().splitlines()[0]
    assert json.loads(line.partition(" ")[2])["message"] == "Sent"


def test_an_outsiders_entries_hold_nothing_else(tmp_path):
    write(tmp_path)
    for entry in Transcript(tmp_path).view("outsider").entries():
        assert set(entry.row) == {"seq", "at", "round", "from", "to", "client", "direction", "bytes"}


def test_going_on_without_the_transcript_is_an_error(tmp_path):
    offsets = write(tmp_path)
    (tmp_path / "index.jsonl").unlink()
    with pytest.raises(TranscriptError, match="missing or cut off"):
        TranscriptWriter(tmp_path, keep_weights=1, offset=offsets[0], last_round=1)


def test_the_clock_goes_on(tmp_path):
    writer = TranscriptWriter(tmp_path, keep_weights=1, clock=100.0)
    assert writer.clock() >= 100
    writer.close()
