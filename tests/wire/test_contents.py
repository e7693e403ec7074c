"""The whole content of a transcript against its digests: what is counted, what is damage, and where reading stops."""

from __future__ import annotations

import pytest
import torch
import xxhash
from forging import index_rows, put_index
from outside import Sent, Shared

from fedaudit import State
from fedaudit.errors import TranscriptError
from fedaudit.runtime.task import Done
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import encode
from fedaudit.wire.contents import MOST, Contents, Damage, check_contents, look_through
from fedaudit.wire.transcript import TranscriptWriter


def write(folder, keep_weights=10):
    """Write two rounds of two clients; client 1 is absent in round 2. The event of a round 0 ends what is set up.

    Round 1 stores in weights: 1 broadcast (12 bytes) and 2 replies (20 bytes each); in content: e of each (16 bytes)
    and one y for both (16 bytes). Round 2: one broadcast and one reply, one e and one y.
    """
    writer = TranscriptWriter(folder, keep_weights=keep_weights)
    writer.event(event="round", round=0)
    digests = []
    for t in (1, 2):
        writer.begin_round(t)
        wire = Wire(writer, t)
        message = Sent(State({"w": torch.full((3,), float(t))}))
        for k, _ in wire.down(dict.fromkeys((0, 1), message)):
            if (t, k) == (2, 1):
                wire.back(Done(k, error="away"), "update", "cpu")
                continue
            value = float(10 * t + k)
            reply = Shared(torch.full((2, 2), value), torch.arange(2), State({"w": torch.full((5,), value)}), t)
            wire.back(Done(k, b"", encode(reply)), "update", "cpu")
        writer.end_round(t)
        digests.append(list(wire.traffic.digests))
    writer.close()
    return digests


def chained(digests):
    whole = ""
    for sent in digests:
        whole = xxhash.xxh3_128_hexdigest((whole + "".join(sent)).encode())
    return whole


def test_a_whole_transcript_is_counted_and_has_the_digest_of_its_messages(tmp_path):
    digests = write(tmp_path)
    found = look_through(tmp_path, 2, 10)
    assert found == Contents(7, 2, 3 + 3 + 2 + 2, 10, (), chained(digests), [])
    assert found.text() == "10 of 10 stored tensors of 7 messages"
    assert check_contents(tmp_path, 2, 10, chained(digests)) == found
    with pytest.raises(TranscriptError, match=f"its digest is {found.digest}, the record has {'0' * 32}"):
        check_contents(tmp_path, 2, 10, "0" * 32)
    with pytest.raises(TranscriptError, match=r"the record has none"):
        check_contents(tmp_path, 2, 10, "")


@pytest.mark.parametrize(("keep", "lost"), [(1, False), (2, True)])
def test_states_of_old_rounds_may_be_gone_those_of_kept_rounds_may_not(tmp_path, keep, lost):
    write(tmp_path)
    (tmp_path / "000001.weights.pack").unlink()
    found = look_through(tmp_path, 2, keep)
    assert (found.tensors, found.read) == (10, 7)
    missing = Damage("000001.weights.pack", "the file", "3 tensors", "it is missing")
    assert found.damage == ([missing] if lost else [])
    assert found.dropped == (() if lost else (1,))
    assert found.text().endswith("messages" if lost else "; the model states of 1 rounds were not kept")


def test_other_content_of_an_old_round_must_be_there(tmp_path):
    digests = write(tmp_path)
    (tmp_path / "000001.content.pack").unlink()
    found = look_through(tmp_path, 2, 1)
    assert found.damage == [Damage("000001.content.pack", "the file", "3 tensors", "it is missing")]
    assert found.dropped == ()
    told = r"is damaged: 000001\.content\.pack, the file: it is missing, where the index says 3 tensors\. Copy"
    with pytest.raises(TranscriptError, match=told):
        check_contents(tmp_path, 2, 1, chained(digests))
    (tmp_path / "000002.content.pack").unlink()
    with pytest.raises(TranscriptError, match=r"3 tensors \(2 parts are damaged\)\. Copy"):
        check_contents(tmp_path, 2, 1, chained(digests))


def test_a_pack_of_empty_tensors_alone_may_be_missing(tmp_path):
    write(tmp_path)
    rows = index_rows(tmp_path)
    for row in rows:
        if row["type"] == "message":
            row["tensors"] = [["F32", [0], "content", 0, 0, xxhash.xxh3_128_hexdigest(b"")]]
    put_index(tmp_path, rows)
    for pack in tmp_path.glob("*.pack"):
        pack.unlink()
    assert look_through(tmp_path, 2, 10).damage == []
    (tmp_path / "000001.content.pack").write_bytes(b"")
    found = look_through(tmp_path, 2, 10)
    assert (found.tensors, found.read, found.damage) == (2, 1, [])


def test_damage_in_a_pack_is_told_by_its_place(tmp_path):
    """The pack of round 1's states: 12 bytes sent down, then twice 20 bytes of replies."""
    write(tmp_path)
    pack = tmp_path / "000001.weights.pack"
    whole = pack.read_bytes()
    assert len(whole) == 12 + 20 + 20
    first = xxhash.xxh3_128_hexdigest(whole[:12])
    pack.write_bytes(b"\x01" + whole[1:])
    found = look_through(tmp_path, 2, 10)
    now = xxhash.xxh3_128_hexdigest(b"\x01" + whole[1:12])
    assert found.damage == [Damage(pack.name, "byte 0", f"digest {first}", f"digest {now}")]
    assert (found.tensors, found.read) == (10, 9)
    pack.write_bytes(whole[:-1])
    assert look_through(tmp_path, 2, 10).damage == [Damage(pack.name, "byte 32", "20 bytes", "it ends at byte 51")]
    pack.write_bytes(whole + b"ab")
    assert look_through(tmp_path, 2, 10).damage == [
        Damage(pack.name, "byte 52", "its end", "2 bytes that no message has")
    ]
    pack.write_bytes(b"")
    assert [one.place for one in look_through(tmp_path, 2, 10).damage] == ["byte 0", "byte 12", "byte 32"]


def test_a_negative_place_is_damage(tmp_path):
    write(tmp_path)
    rows = index_rows(tmp_path)
    row = next(row for row in rows if row.get("direction") == "up")
    row["tensors"][0][3] = -16
    put_index(tmp_path, rows)
    assert (
        Damage("000001.content.pack", "byte -16", "16 bytes", "it ends at byte 48")
        in look_through(tmp_path, 2, 10).damage
    )


def test_packs_that_no_row_names_are_damage_unless_empty_or_of_another_name(tmp_path):
    write(tmp_path)
    (tmp_path / "000009.weights.pack").write_bytes(b"123")
    (tmp_path / "000008.content.pack").write_bytes(b"")
    (tmp_path / "other.pack").write_bytes(b"123")
    assert look_through(tmp_path, 2, 10).damage == [
        Damage("000009.weights.pack", "the file", "no such file", "3 bytes")
    ]


def test_rows_are_numbered_without_a_gap(tmp_path):
    write(tmp_path)
    rows = index_rows(tmp_path)
    put_index(tmp_path, [row for row in rows if row["seq"] != 3])
    found = look_through(tmp_path, 2, 10)
    assert found.damage[0] == Damage("index.jsonl", "row 4", "row 3", "row 4")
    assert [one for one in found.damage if one.file == "index.jsonl"] == found.damage[:1], "and no other gap"
    put_index(tmp_path, rows[1:])
    assert look_through(tmp_path, 2, 10).damage[0] == Damage("index.jsonl", "row 1", "row 0", "row 1")


def test_the_index_ends_with_its_last_round(tmp_path):
    write(tmp_path)
    assert look_through(tmp_path, 3, 10).damage == [Damage("index.jsonl", "its end", "3 rounds", "2 rounds")]
    early = look_through(tmp_path, 1, 10)
    assert early.damage[0] == Damage("index.jsonl", "row 6", "an end after round 1", "more rows")
    assert (early.messages, early.rounds) == (4, 1)
    index = tmp_path / "index.jsonl"
    data = bytearray(index.read_bytes())
    data[data.index(b"\n") + 30] ^= 1
    index.write_bytes(bytes(data))
    damage = look_through(tmp_path, 2, 10).damage
    assert (damage[0].file, damage[0].place, damage[0].recorded) == ("index.jsonl", "after row 0", "a row")
    assert "line 2 is damaged" in damage[0].found
    assert not any(one.place == "its end" for one in damage)


def test_a_sum_is_content_and_no_message(tmp_path):
    """Its tensors are read with the others; its digest is not in the chain of messages."""
    digests = write(tmp_path)
    rows = index_rows(tmp_path)
    row = next(row for row in rows if row.get("direction") == "up")
    rows.insert(-1, {**row, "type": "sum", "seq": rows[-1]["seq"], "round": 2, "tensors": []})
    rows[-1]["seq"] += 1
    put_index(tmp_path, rows)
    found = look_through(tmp_path, 2, 10)
    assert (found.messages, found.digest, found.damage) == (7, chained(digests), [])


def test_a_row_without_a_number_takes_the_place_of_one(tmp_path):
    write(tmp_path)
    rows = index_rows(tmp_path)
    at = next(i for i, row in enumerate(rows) if row.get("event") == "absent")
    del rows[at]["seq"]
    put_index(tmp_path, rows)
    assert look_through(tmp_path, 2, 10).damage == [Damage("index.jsonl", "row None", f"row {at}", "row None")]


def test_a_missing_pack_is_damage_if_one_of_its_tensors_is_not_empty(tmp_path):
    write(tmp_path)
    rows = index_rows(tmp_path)
    for row in rows:
        if row["type"] == "message":
            row["tensors"] = []
    rows[1]["tensors"] = [["F32", [n], "content", 0, 4 * n, "0" * 32] for n in (0, 1)]
    put_index(tmp_path, rows)
    for pack in tmp_path.glob("*.pack"):
        pack.unlink()
    assert look_through(tmp_path, 2, 10).damage == [
        Damage("000001.content.pack", "the file", "2 tensors", "it is missing")
    ]


def test_no_other_pack_is_opened_when_the_list_is_full(tmp_path):
    """Twenty damaged tensors fill the first pack to its end; those of the second are not looked at."""
    write(tmp_path)
    rows = index_rows(tmp_path)
    for row in rows:
        if row["type"] == "message":
            row["tensors"] = []
    for t in (1, 2):
        row = next(row for row in rows if row.get("direction") == "up" and row["round"] == t)
        row["tensors"] = [["U8", [1], "content", i, 1, "0" * 32] for i in range(20)]
        (tmp_path / f"00000{t}.content.pack").write_bytes(bytes(20))
        (tmp_path / f"00000{t}.weights.pack").unlink()
    put_index(tmp_path, rows)
    found = look_through(tmp_path, 2, 10)
    assert (len(found.damage), found.tensors) == (20, 20)


def test_the_list_of_damage_has_an_end(tmp_path):
    """Thirty tensors of one pack are damaged: so many are told as are listed, and no other pack is opened."""
    write(tmp_path)
    rows = index_rows(tmp_path)
    for t in (1, 2):
        row = next(row for row in rows if row.get("direction") == "up" and row["round"] == t)
        row["tensors"] = [["U8", [1], "content", i, 1, "0" * 32] for i in range(30)]
    put_index(tmp_path, rows)
    found = look_through(tmp_path, 2, 10)
    assert MOST == 20
    assert len(found.damage) == MOST + 1, "and the bytes after the last one that was looked at"
    assert {one.file for one in found.damage} == {"000001.content.pack"}
    assert [one.place for one in found.damage[:20]] == [f"byte {i}" for i in range(20)]
