"""The transcript: complete, content-addressed, readable while written, safe against kills; views per threat."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
import xxhash
from forging import index_rows, put_index
from outside import Peers, Sent, Shared

from fedaudit import Down, Record, State, Up, private, public
from fedaudit.errors import ThreatError, TranscriptError
from fedaudit.runtime.task import Done
from fedaudit.wire import transcript
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import encode, read_header
from fedaudit.wire.compression import stage_of
from fedaudit.wire.message import masked
from fedaudit.wire.transcript import BEHIND, LARGE, Threat, Transcript, TranscriptWriter


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
    whole = Transcript(tmp_path)
    assert len(list(whole.view("server").entries())) == 6
    peer = whole.view("peer:1")
    assert {e.client for e in peer.entries()} == {1}
    assert peer.kinds == {"embeddings", "labels", "weights"}
    outsider = whole.view("outsider")
    assert outsider.kinds == set()
    entry = next(outsider.entries())
    assert entry.bytes > 4000
    assert entry.at >= 0
    for hidden in (lambda: entry["w"], lambda: entry.fields, lambda: entry.message):
        with pytest.raises(ThreatError, match="An outsider sees"):
            hidden()
    with pytest.raises(ThreatError, match="Unknown threat 'pear:1'"):
        whole.view("pear:1")


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


class Hidden(Up):
    v: torch.Tensor = masked()
    p: torch.Tensor = public()


class Part(Record):
    n: int


class Holder(Down):
    part: Part
    w: State


class Squeezed(Up):
    w: State = private("weights", via="model", unit="client")


def opened(folder, **changes):
    writer = TranscriptWriter(folder, **{"keep_weights": 2, **changes})
    writer.begin_round(1)
    return writer, Wire(writer, 1)


class Write:
    """A write that is under way until somebody waits for it."""

    def __init__(self, name, waited, done=False):
        self.name, self.waited, self.is_done = name, waited, done

    def done(self):
        return self.is_done

    def result(self):
        self.waited.append(self.name)


@pytest.mark.parametrize(
    ("sizes", "done", "size", "waited"),
    [
        ((40, 50), (), 10, ""), ((40, 50), (), 11, "a"), ((40, 50), (), 60, "ab"), ((1, 1, 1), (), 0, "a"),
        ((1, 1), (), 0, ""), ((40, 50), ("a",), 0, "a"), ((40, 50), ("b",), 0, ""), ((200,), (), 1, "a"),
        ((), (), 9, ""),
    ],
)  # fmt: skip
def test_a_write_waits_until_there_is_room(tmp_path, monkeypatch, sizes, done, size, waited):
    """At most three wait, with at most 100 bytes together."""
    monkeypatch.setattr(transcript, "BEHIND", 3)
    monkeypatch.setattr(transcript, "ROOM", 100)
    writer, _ = opened(tmp_path)
    seen = []
    writer._pending.extend((Write(name, seen, name in done), n) for name, n in zip("abc", sizes, strict=False))
    writer._make_room(size)
    assert "".join(seen) == waited
    assert len(writer._pending) == len(sizes) - len(waited)
    writer._pending.clear()
    writer.close()


def test_a_message_is_written_behind_from_the_limit_on(tmp_path, monkeypatch):
    monkeypatch.setattr(transcript, "LARGE", 100)
    writer, _ = opened(tmp_path)
    by = []
    writer._in_order(lambda: by.append(threading.current_thread() is threading.main_thread()), 99)
    writer._in_order(lambda: by.append(threading.current_thread() is threading.main_thread()), 100)
    writer.settle()
    assert by == [True, False]
    writer.close()


def test_a_folder_is_made_and_links_are_not_written_through(tmp_path):
    folder = tmp_path / "a" / "b"
    writer, wire = opened(folder)
    kept = tmp_path / "kept"
    kept.write_bytes(b"mine")
    (folder / "000001.weights.pack").symlink_to(kept)
    for k, _ in wire.down({0: Sent(State({"w": torch.ones(3)}))}):
        wire.back(Done(k, error="gone"), "update", "cpu")
    writer.end_round(1)
    writer.close()
    assert kept.read_bytes() == b"mine"
    assert (folder / "000001.weights.pack").stat().st_size == 12
    index = tmp_path / "other"
    index.mkdir()
    (index / "index.jsonl").symlink_to(kept)
    with pytest.raises(TranscriptError, match="is a symbolic link"):
        TranscriptWriter(index, keep_weights=1)


def test_going_on_removes_packs_of_later_rounds_and_nothing_else(tmp_path):
    offsets = write(tmp_path, rounds=3)
    for name in ("000003.other.pack", "x.weights.pack", "000009.weights.pack.txt"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "000007.weights.pack").symlink_to(tmp_path / "000001.weights.pack")
    (tmp_path / "000008.content.pack").mkdir()
    writer = TranscriptWriter(tmp_path, keep_weights=10, offset=offsets[1], last_round=2, seq=40, clock=5.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([
        "000001.content.pack", "000001.weights.pack", "000002.content.pack", "000002.weights.pack",
        "000003.other.pack", "000007.weights.pack", "000008.content.pack", "000009.weights.pack.txt", "index.jsonl",
        "x.weights.pack",
    ])  # fmt: skip
    writer.event(event="here", round=3)
    writer.close()
    last = index_rows(tmp_path)[-1]
    assert (last["seq"], last["event"], last["type"]) == (40, "here", "event")
    assert 5.0 <= last["at"] < 60.0
    assert (tmp_path / "index.jsonl").stat().st_size > offsets[1]


def test_old_packs_that_are_not_there_are_no_error(tmp_path):
    writer = TranscriptWriter(tmp_path, keep_weights=1)
    for t in (1, 2, 3):
        writer.begin_round(t)
        writer.end_round(t)
    writer.close()
    assert [(row["event"], row["round"], row["seq"]) for row in index_rows(tmp_path)] == [
        ("round", 1, 0), ("round", 2, 1), ("round", 3, 2),
    ]  # fmt: skip
    line = (tmp_path / "index.jsonl").read_text().splitlines()[0].partition(" ")[2]
    assert line == json.dumps(json.loads(line), separators=(",", ":"), sort_keys=True)


def test_masked_vectors_are_stored_with_the_states_and_so_is_their_message(tmp_path):
    """One masked field is enough: the whole message is dropped as soon as states are."""
    writer, wire = opened(tmp_path)
    list(wire.down({0: Sent(State())}))
    wire.back(Done(0, b"", encode(Hidden(torch.ones(3), torch.zeros(2)))), "sum", "cpu")
    writer.end_round(1)
    writer.close()
    entry = list(Transcript(tmp_path).entries())[-1]
    assert [row[2] for row in entry.row["tensors"]] == ["weights", "weights"]
    assert entry.kept("v")
    (tmp_path / "000001.weights.pack").unlink()
    assert (entry.kept("v"), entry.kept("p"), entry.kept("nothing")) == (False, True, True)
    with pytest.raises(TranscriptError, match="its model states were not kept"):
        entry["v"]


def test_a_broadcast_is_stored_with_its_first_copy(tmp_path, monkeypatch):
    """The same message to a second client is not looked at again; a reply in between changes nothing."""
    stored = []
    store = TranscriptWriter._store

    def counted(self, data, pack, *known):
        stored.append((pack, len(data)))
        return store(self, data, pack, *known)

    monkeypatch.setattr(TranscriptWriter, "_store", counted)
    writer, wire = opened(tmp_path)
    message = Sent(State({"w": torch.ones(3), "v": torch.ones(2)}))
    for k, _ in wire.down(dict.fromkeys((0, 1, 2), message)):
        wire.back(Done(k, b"", encode(shared(k))) if k == 1 else Done(k, error="gone"), "update", "cpu")
    for k, _ in wire.down({0: Sent(State({"w": torch.zeros(4)}))}):
        wire.back(Done(k, error="gone"), "update", "cpu")
    writer.end_round(1)
    writer.close()
    assert stored == [
        ("weights", 12),
        ("weights", 8),
        ("content", 48),
        ("content", 32),
        ("weights", 20),
        ("weights", 16),
    ]
    down = [e for e in Transcript(tmp_path).entries() if e.direction == "down"]
    assert [e["w"]["w"].tolist() for e in down] == [[1.0] * 3] * 3 + [[0.0] * 4]


def test_a_change_is_read_with_the_message_that_it_answers(tmp_path):
    """Two clients with messages of their own: what the index gives is what the server got."""
    writer, wire = opened(tmp_path)
    sent = {k: Sent(State({"b": torch.full((2,), float(k)), "w": torch.full((8, 8), 10.0 * k)})) for k in (1, 2)}
    got = {}
    for k, _ in wire.down(sent):
        change = torch.zeros(8, 8)
        change[k, k] = 1.0
        reply = Squeezed(State({"b": torch.ones(2), "w": sent[k].w["w"] + change}))
        blob = encode(reply, stage_of("topk:0.1"), sent[k])
        got[k] = wire.back(Done(k, b"", blob), "update", "cpu")
    writer.end_round(1)
    writer.close()
    for entry in Transcript(tmp_path).entries():
        k = entry.client
        if entry.direction == "down":
            assert "base" not in entry.row
            assert len(entry.row["tensors"]) == 2
            continue
        assert entry.row["base"] == {"w": {"m": [3, ["b", "w"], []]}}
        assert len(entry.row["tensors"]) == 5, "b, values and places, and the two of the message"
        assert float(entry["w"]["w"][k, k]) == 10 * k + 1
        assert float(entry["w"]["w"][0, 0]) == 10 * k
        assert torch.equal(entry["w"]["w"], got[k].w["w"])
        assert entry.record().w["b"].tolist() == [1.0, 1.0]
        assert entry.state_shapes("w") == {"b": (2,), "w": (8, 8)}
        assert entry.fields["w"].whole == 4 * 64 + 8


def test_a_record_within_a_message_is_plain_by_field_and_itself_as_a_whole(tmp_path):
    writer, wire = opened(tmp_path)
    for k, _ in wire.down({4: Holder(Part(7), State({"w": torch.zeros(2, 5)}))}):
        wire.back(Done(k, error="gone"), "update", "cpu")
    writer.end_round(1)
    writer.close()
    (entry,) = Transcript(tmp_path).entries()
    assert entry["part"] == {"n": 7}
    assert type(entry.record()) is Holder
    assert entry.record().part.n == 7
    assert entry.class_id == Holder.class_id()
    assert (entry.seq, entry.round, entry.client, entry.ask, entry.fn) == (0, 1, 4, 0, "update")
    assert (entry.sender, entry.receiver, entry.message) == ("server", "client 4", "Holder")
    assert entry.digest == read_header(encode(entry.record())).digest
    assert entry.kinds() == set()
    assert entry.state_shapes("w") == {"w": (2, 5)}
    assert entry.state_shapes("part") is None
    assert entry.kept("part")


@pytest.mark.parametrize(
    "change",
    [
        {2: "other"}, {3: -1}, {3: 0.0}, {3: True}, {4: -4}, {0: "F9"}, {1: [3, 1]}, {1: "x"}, {4: "12"},
    ],
)  # fmt: skip
def test_a_tensors_row_that_is_damaged_is_told(tmp_path, change):
    write(tmp_path)
    rows = index_rows(tmp_path)
    for at, value in change.items():
        rows[0]["tensors"][0][at] = value
    put_index(tmp_path, rows)
    entry = next(Transcript(tmp_path).entries())
    with pytest.raises(TranscriptError, match=r"row 0: its tensor 0 is damaged"):
        entry["w"]


def test_a_pack_that_ends_within_a_tensor_is_told(tmp_path):
    """It may end with the tensor, and not a byte before."""
    write(tmp_path, clients=1)
    pack = tmp_path / "000001.weights.pack"
    whole = pack.read_bytes()
    last = list(Transcript(tmp_path).entries())[-1]
    assert last["w"]["w"].shape == (5,)
    pack.write_bytes(whole[:-1])
    with pytest.raises(TranscriptError, match=f"is cut off: it does not reach byte {len(whole)}"):
        last["w"]
    pack.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(TranscriptError, match="is damaged at byte 4000: the checksum does not match"):
        last["w"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seq", "0"), ("seq", True), ("seq", 0.5), ("at", "x"), ("at", True), ("from", 3), ("client", None),
        ("tree", []), ("bytes", 1.5), ("fields", []), ("tensors", {}), ("digest", 0), ("ask", "0"), ("type", 3),
        ("fields", {"w": 3}), ("fields", {"w": {"kind": 3}}), ("tree", {"r": ["a"]}), ("fields", {"other": 3}),
    ],
)  # fmt: skip
def test_a_row_that_is_not_one_is_refused(tmp_path, key, value):
    write(tmp_path)
    rows = index_rows(tmp_path)
    rows[0][key] = value
    put_index(tmp_path, rows)
    with pytest.raises(TranscriptError, match="line 1 is not a row of a transcript"):
        list(Transcript(tmp_path).rows())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"w": {}, "v": 3}, "its fields are not tables"), ({"v": {}, "w": 3}, "its fields are not tables"),
        ({"w": {"kind": "weights"}, "v": {"kind": 3}}, "a kind is not a text"),
        ({"w": {"kind": 3}, "v": {}}, "a kind is not a text"),
    ],
)  # fmt: skip
def test_one_field_that_is_not_a_table_is_one_too_many(tmp_path, fields, words):
    write(tmp_path)
    rows = index_rows(tmp_path)
    rows[0]["fields"] = fields
    put_index(tmp_path, rows)
    with pytest.raises(TranscriptError, match=words):
        list(Transcript(tmp_path).rows())


def test_a_row_may_have_whole_seconds_and_an_event_little_else(tmp_path):
    write(tmp_path)
    rows = index_rows(tmp_path)
    rows[0]["at"] = 3
    rows[0]["fields"]["w"]["kind"] = None
    rows.append({"type": "event"})
    put_index(tmp_path, rows)
    assert list(Transcript(tmp_path).rows()) == rows
    del rows[0]["digest"]
    put_index(tmp_path, rows)
    with pytest.raises(TranscriptError, match="KeyError 'digest'"):
        list(Transcript(tmp_path).rows())


def test_fields_that_are_damaged_are_told(tmp_path):
    write(tmp_path)
    rows = index_rows(tmp_path)
    rows[0]["fields"]["w"]["nobody"] = 1
    put_index(tmp_path, rows)
    with pytest.raises(TranscriptError, match="row 0: its fields are damaged"):
        next(Transcript(tmp_path).entries()).fields  # noqa: B018


def test_the_digest_of_the_first_rounds(tmp_path):
    """Messages in order, chained by rounds. The event of round 0 ends nothing, and a sum is no message."""
    write(tmp_path, rounds=2)
    rows = index_rows(tmp_path)
    chain = [""]
    for t in (1, 2):
        said = [
            f"{r['direction']} {r['client']} {r['digest']}" for r in rows if r["type"] == "message" and r["round"] == t
        ]
        assert len(said) == 4
        chain.append(xxhash.xxh3_128_hexdigest((chain[-1] + "".join(said)).encode()))
    rows.insert(2, {"type": "event", "event": "round", "round": 0})
    rows.insert(1, {**rows[0], "type": "sum"})
    rows.insert(1, {"type": "event", "event": "absent", "round": 1})
    put_index(tmp_path, rows)
    found = Transcript(tmp_path)
    assert [found.digest(t) for t in (1, 2, 3)] == [chain[1], chain[2], chain[2]]
    assert len(list(found.entries())) == 8
    assert len(list(found.sums())) == 1
    assert [row["event"] for row in found.events()] == ["absent", "round", "round", "round"]


@pytest.mark.parametrize(
    ("text", "name", "peer"),
    [("server", "server", None), ("active-server", "active-server", None), ("outsider", "outsider", None),
     ("peer:0", "peer", 0), ("peer:999999999", "peer", 999999999)],
)  # fmt: skip
def test_threats_by_name(text, name, peer):
    threat = Threat.parse(text)
    assert (threat.name, threat.peer, str(threat)) == (name, peer, text)


@pytest.mark.parametrize("text", ["peer", "peer:", "peer:-1", "peer:1234567890", "peer:²", "pear:1", "Server", ""])
def test_threats_that_are_none(text):
    with pytest.raises(ThreatError, match="Unknown threat"):
        Threat.parse(text)


def test_entries_of_a_view_by_direction_kind_client_and_round(tmp_path):
    """Two rounds of two clients; a sum of both stands for their masked replies of round 2."""
    write(tmp_path, rounds=2)
    rows = index_rows(tmp_path)
    up = next(row for row in rows if row.get("direction") == "up" and row["round"] == 2)
    rows.append({**up, "type": "sum", "client": -1, "clients": [0, 1], "seq": 99,
                 "fields": {"e": {"kind": "logits", "role": "private"}}})  # fmt: skip
    put_index(tmp_path, rows)

    def found(view, **wanted):
        return [(e.round, e.direction, e.client) for e in view.entries(**wanted)]

    server, peer, outsider = (Transcript(tmp_path).view(text) for text in ("server", "peer:1", "outsider"))
    every = [(t, d, k) for t in (1, 2) for k in (0, 1) for d in ("down", "up")]
    assert found(server) == every
    assert found(server, direction="up") == [row for row in every if row[1] == "up"]
    assert found(server, direction="down", t=2) == [(2, "down", 0), (2, "down", 1)]
    assert found(server, client=1, t=1) == [(1, "down", 1), (1, "up", 1)]
    assert found(server, client=7) == []
    assert found(server, kind="embeddings", client=0) == [(1, "up", 0), (2, "up", 0)]
    assert found(server, kind="logits") == [(2, "up", 0), (2, "up", 1)]
    assert found(server, kind="logits", client=1) == [(2, "up", 1)]
    assert found(server, kind="logits", t=1) == found(server, kind="logits", direction="down") == []
    assert server.kinds == {"embeddings", "labels", "weights", "logits"}
    assert found(Transcript(tmp_path).view("active-server"), kind="logits", client=0) == [(2, "up", 0)]
    assert found(peer) == [row for row in every if row[2] == 1]
    assert found(peer, kind="logits") == []
    assert peer.kinds == {"embeddings", "labels", "weights"}
    assert found(outsider) == every
    assert found(outsider, kind="embeddings") == []
    assert found(outsider, client=0, direction="up") == [(1, "up", 0), (2, "up", 0)]
    assert [(e.seq, e.bytes, e.sender) for e in outsider.entries(t=1)] == [
        (e.seq, e.bytes, e.sender) for e in server.entries(t=1)
    ]


def test_a_new_transcript_begins_with_nothing(tmp_path, monkeypatch):
    """Packs that an unfinished run left are removed, also those of its first round."""
    (tmp_path / "000001.weights.pack").write_bytes(b"old")
    monkeypatch.setattr(transcript.time, "time", lambda: 1000.0)
    writer = TranscriptWriter(tmp_path, keep_weights=1)
    assert not list(tmp_path.glob("*.pack"))
    assert (writer.clock(), writer.seq, writer._t) == (0.0, 0, 0)
    monkeypatch.setattr(transcript.time, "time", lambda: 1002.00006)
    assert writer.clock() == 2.0001
    writer.close()
    assert (tmp_path / "index.jsonl").stat().st_size == 0
