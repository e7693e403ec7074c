"""One round through the wire: which message is encoded, held, and taken for the one that was answered."""

from __future__ import annotations

import copy
import dataclasses
import threading

import pytest
import torch
from outside import Answer, Peers, Sent, Shared

from fedaudit import State
from fedaudit.errors import ContractError
from fedaudit.runtime.task import Done
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import encode, encode_lazily, packing, read_header
from fedaudit.wire.codec.packing import Held
from fedaudit.wire.compression import stage_of
from fedaudit.wire.message import Size
from fedaudit.wire.release import Protection, Release
from fedaudit.wire.transcript import Transcript, TranscriptWriter

CPU = torch.device("cpu")


@pytest.fixture
def writer(tmp_path):
    made = TranscriptWriter(tmp_path, keep_weights=10)
    made.begin_round(1)
    yield made
    made.close()


def told(value):
    return Sent(State({"w": torch.full((3,), float(value))}))


def answer(k):
    return encode(Shared(torch.full((2, 3), float(k)), torch.arange(2), State({"w": torch.zeros(5)}), k))


def test_clients_in_this_process_get_a_message_that_is_held(writer):
    """Elsewhere they get bytes. Both say the same."""
    elsewhere = dict(Wire(writer, 1).down({0: told(1)}))
    here = dict(Wire(writer, 1, here=CPU).down({0: told(1)}))
    assert type(elsewhere[0]) is bytes
    assert type(here[0]) is Held
    assert bytes(here[0]) == elsewhere[0]


def test_a_broadcast_is_encoded_once_and_others_by_themselves(writer):
    one = told(1)
    sent = dict(Wire(writer, 1).down({2: one, 0: one, 1: told(2)}))
    assert list(sent) == [0, 1, 2]
    assert sent[0] == sent[2] != sent[1]
    both = dict(Wire(writer, 1).down({0: one, 1: one}))
    assert both[0] is both[1]


def test_a_message_that_comes_encoded_is_checked(writer):
    blob = encode(told(4))
    assert dict(Wire(writer, 1).down({0: blob}))[0] == blob
    with pytest.raises(ContractError, match="was given a str"):
        list(Wire(writer, 1).down({0: "text"}))


def test_each_reply_is_a_change_of_the_message_that_its_client_got(writer):
    """The message that was decoded last is kept, and taken for the same bytes on the same device alone."""
    wire = Wire(writer, 1)
    blobs = dict(wire.down({0: told(1), 1: told(2)}))
    first = wire._message(blobs[0], CPU)
    assert wire._message(blobs[0], CPU) is first, "decoded once"
    assert wire._message(blobs[1], CPU).w["w"].tolist() == [2.0] * 3
    again = wire._message(blobs[0], CPU)
    assert again.w["w"].tolist() == [1.0] * 3
    assert wire._message(blobs[0], torch.device("meta")).w["w"].device.type == "meta"


def test_who_asked_and_who_answered_by_ask(writer, tmp_path):
    """Two asks of the round: three are asked, one does not answer; the second goes to the two who are left."""
    wire = Wire(writer, 1)
    for k, _ in wire.down({0: told(0), 1: told(1), 2: told(2)}):
        reply = wire.back(Done(k, b"", None if k == 1 else answer(k), error="away"), "update", "cpu")
        assert (reply is None) is (k == 1)
    for k, _ in wire.down({0: told(3), 2: told(3)}):
        assert wire.back(Done(k, b"", answer(k)), "update", "cpu").t == k
    assert wire.traffic.asks == [([0, 1, 2], [0, 2]), ([0, 2], [0, 2])]
    writer.end_round(1)
    entries = list(Transcript(tmp_path).entries())
    assert [(e.ask, e.direction, e.client) for e in entries] == [
        (0, "down", 0), (0, "up", 0), (0, "down", 1), (0, "down", 2), (0, "up", 2),
        (1, "down", 0), (1, "up", 0), (1, "down", 2), (1, "up", 2),
    ]  # fmt: skip
    assert [(e.sender, e.receiver) for e in entries[:2]] == [("server", "client 0"), ("client 0", "server")]


def test_one_function_has_one_class_of_replies(writer):
    wire = Wire(writer, 1, answers={"update": Sent})
    list(wire.down({0: told(0)}))
    with pytest.raises(ContractError, match=r"client 0 answered with a Shared.*with a Sent"):
        wire.back(Done(0, b"", answer(0)), "update", "cpu")


def test_bytes_of_a_message_are_those_of_its_parts(writer):
    wire = Wire(writer, 1)
    ((_, blob),) = wire.down({0: told(1)})
    wire.back(Done(0, b"", answer(0)), "update", "cpu")
    sizes = wire.sizes("down", 0, read_header(blob), len(blob))
    assert sum(size["wire"] for size in sizes.values()) == len(blob)
    assert sizes["w"]["payload"] == 12


def test_a_round_is_counted_in_every_way(writer, tmp_path):
    """Client 0 gets 12 bytes and client 2 gets 20; each answers with 24 + 16 + 20 + 8 bytes. Client 1 is away."""
    wire = Wire(writer, 1)
    noise = Protection(mechanism="gaussian", sigma=0.5)
    sent = {0: told(1), 1: told(1), 2: Sent(State({"w": torch.ones(3), "n": torch.tensor(4)}, buffers=["n"]))}
    blobs, replies = {}, {}
    for k, blob in wire.down(sent):
        blobs[k] = bytes(blob)
        if k == 1:
            wire.back(Done(k, b"", None, error="away"), "update", "cpu")
        else:
            replies[k] = answer(k)
            wire.back(Done(k, b"", replies[k], protection={"e": noise}), "update", "cpu")
    traffic = wire.traffic
    assert traffic.sizes == {
        ("down", "Sent.w"): Size(36, 8), ("up", "Shared.e"): Size(48), ("up", "Shared.y"): Size(32),
        ("up", "Shared.w"): Size(40), ("up", "Shared.t"): Size(16),
    }  # fmt: skip
    assert traffic.whole == traffic.sizes
    down, up = sum(map(len, blobs.values())), sum(map(len, replies.values()))
    assert traffic.total("down") == (36, down)
    assert traffic.total("up") == (48 + 32 + 40 + 16, up)
    assert {key for key in traffic.wire if key not in traffic.sizes} == {
        ("down", "Sent.(frame)"),
        ("up", "Shared.(frame)"),
    }
    assert traffic.choices["Sent.w"] == {0: ["w"], 1: ["w"], 2: ["w", "n"]}
    assert traffic.choices["Shared.t"] == {0: 0, 2: 2}
    assert traffic.choices["Shared.e"] == {0: None, 2: None}
    assert traffic.relayed == set()
    assert traffic.releases == {
        "Shared.e": Release(
            field="Shared.e", role="private", kind="embeddings", via="data", unit="record", protection=noise
        ),
        "Shared.y": Release(field="Shared.y", role="private", kind="labels", via="data", unit="record"),
        "Shared.w": Release(field="Shared.w", role="private", kind="weights", via="model", unit="client"),
        "Shared.t": Release(field="Shared.t", role="public"),
    }  # fmt: skip
    assert traffic.digests == [
        f"down 0 {read_header(blobs[0]).digest}", f"up 0 {read_header(replies[0]).digest}",
        f"down 1 {read_header(blobs[1]).digest}", f"down 2 {read_header(blobs[2]).digest}",
        f"up 2 {read_header(replies[2]).digest}",
    ]  # fmt: skip
    writer.end_round(1)
    entries = list(Transcript(tmp_path).entries())
    first = entries[1]
    assert first.fields["e"].protection == noise
    assert first.row["fields"]["e"]["protection"] == {"mechanism": "gaussian", "sigma": 0.5}
    assert (first.fields["y"].protection, "protection" in first.row["fields"]["y"]) == (None, False)
    assert (first.fields["y"].role, first.fields["y"].kind) == ("private", "labels")
    assert [e.bytes for e in entries] == [len(b) for b in (blobs[0], replies[0], blobs[1], blobs[2], replies[2])]
    absent = next(row for row in Transcript(tmp_path).events() if row["event"] == "absent")
    wanted = {"round": 1, "ask": 0, "fn": "update", "client": 1, "reason": "away"}
    assert {key: absent[key] for key in wanted} == wanted


def test_what_is_compressed_counts_as_sent_and_as_whole(writer):
    """Of 100 numbers, 10 travel with their places: 80 bytes instead of 400. The key of the table has 8 bytes."""
    wire = Wire(writer, 1)
    list(wire.down({0: told(1)}))
    reply = Answer({4: torch.arange(100.0)})
    wire.back(Done(0, b"", encode(reply, stage_of("topk:0.1"))), "answer", "cpu")
    assert wire.traffic.sizes["up", "Answer.z"] == Size(88)
    assert wire.traffic.whole["up", "Answer.z"] == Size(408)


def test_a_relay_is_noted_with_the_client_that_sees_it(writer):
    wire = Wire(writer, 1)
    for k, _ in wire.down({3: Peers({1: torch.ones(2)}), 5: Peers({})}):
        wire.back(Done(k, error="away"), "answer", "cpu")
    assert wire.traffic.relayed == {("embeddings", 3), ("embeddings", 5)}
    assert wire.traffic.releases == {}
    assert wire.traffic.asks == [([3, 5], [])]


def test_messages_aside_and_sums_are_recorded_as_such(writer, tmp_path):
    wire = Wire(writer, 1)
    wire.aside("down", 4, told(7), "keys", 2)
    assert wire.aside("up", 4, Answer({1: torch.ones(2)}), "keys", 2).z[1].tolist() == [1.0, 1.0]
    wire.left(5, 2, "keys", "gone")
    wire.summed(Answer({1: torch.full((3,), 6.0)}), "update", 2, (4, 9))
    writer.end_round(1)
    transcript = Transcript(tmp_path)
    aside = list(transcript.entries())
    assert [(e.direction, e.client, e.fn, e.ask, e.message) for e in aside] == [
        ("down", 4, "(sum) keys", 2, "Sent"), ("up", 4, "(sum) keys", 2, "Answer"),
    ]  # fmt: skip
    assert wire.traffic.total("down") == (12, aside[0].bytes)
    (total,) = transcript.sums()
    assert (total.sender, total.receiver, total.direction, total.client) == ("sum", "server", "up", -1)
    assert (total.bytes, total.row["frame"], total.round, total.ask, total.fn) == (0, 0, 1, 2, "update")
    assert total.row["clients"] == [4, 9]
    facts = total.fields["z"]
    assert (facts.payload, facts.buffers, facts.wire, facts.role, facts.kind) == (0, 0, 0, "private", "logits")
    assert total["z"][1].tolist() == [6.0] * 3
    (absent,) = [row for row in transcript.events() if row["event"] == "absent"]
    assert (absent["client"], absent["ask"], absent["fn"], absent["reason"]) == (5, 2, "(sum) keys", "gone")
    view = transcript.view("server")
    assert [e.client for e in view.entries(kind="logits")] == [4, 4, 9]
    assert [e.client for e in view.entries(kind="logits", client=9)] == [9]
    assert list(transcript.view("peer:9").entries(kind="logits")) == []


def test_the_first_class_of_replies_is_kept_for_each_function(writer):
    wire = Wire(writer, 1, answers=(known := {}))
    for k, _ in wire.down({0: told(0), 1: told(0)}):
        wire.back(Done(k, b"", answer(k)), "update", "cpu")
    list(wire.down({0: told(0)}))
    wire.back(Done(0, b"", encode(Answer({}))), "answer", "cpu")
    assert known == {"update": Shared, "answer": Answer}


@pytest.fixture
def digesting(monkeypatch):
    """Have tensors lie as on a GPU, and list the threads in which digests of messages are computed."""
    threads = []
    real = packing.digest
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    monkeypatch.setattr(
        packing, "digest", lambda *of: threads.append(threading.current_thread().name.split("_")[0]) or real(*of)
    )
    return threads


def test_a_digest_that_needs_a_device_is_computed_while_the_receiver_works(writer, digesting, tmp_path):
    """One for each message and none for each receiver. The transcript has what it would have had."""
    wire = Wire(writer, 1, here=CPU)
    one = told(1)
    for _ in wire.down({0: one, 1: one, 2: told(2)}):
        pass
    for k in range(3):
        wire.back(Done(k, b"", answer(k)), "shared", CPU)
    assert digesting == ["digests"] * 2
    writer.settle()
    down = [entry for entry in Transcript(tmp_path).entries() if entry.direction == "down"]
    digests = [read_header(encode(message)).digest for message in (one, one, told(2))]
    assert [entry.digest for entry in down] == digests
    assert wire.traffic.digests[::2] == [f"down {k} {digest}" for k, digest in enumerate(digests)]


def test_no_thread_stays_when_a_transcript_is_closed(digesting, tmp_path):
    """An audit of many runs would gather them."""
    writer = TranscriptWriter(tmp_path, keep_weights=1)
    list(Wire(writer, 1, here=CPU).down({0: told(1)}))
    mine = {thread for executor in (writer._digests, writer._behind) for thread in executor._threads}
    assert mine, "a digest was computed in one"
    writer.close()
    assert not any(thread.is_alive() for thread in mine)


def test_a_digest_waits_for_no_write(writer, digesting):
    """A message of others is being written, and goes on until the reply is there."""
    replied = threading.Event()
    writing = writer._later(lambda: replied.wait(20), 0)
    wire = Wire(writer, 1, here=CPU)
    list(wire.down({0: told(1)}))
    wire._sent[0][-1].result(timeout=10)
    replied.set()
    assert writing.result() is True
    wire.back(Done(0, b"", answer(0)), "shared", CPU)
    assert digesting == ["digests"]


def test_tensors_of_a_reply_are_fetched_before_the_transcript_asks_for_them(writer, digesting, monkeypatch):
    """Otherwise two threads fetch them from the device at the same time."""
    known, real = [], writer.message
    monkeypatch.setattr(
        writer, "message", lambda blob, *of, **facts: known.append("digest" in vars(blob)) or real(blob, *of, **facts)
    )
    wire = Wire(writer, 1, here=CPU)
    list(wire.down({0: told(1)}))
    reply = Shared(torch.zeros(2, 3), torch.arange(2), State({"w": torch.zeros(5)}), 0)
    wire.back(Done(0, b"", encode_lazily(reply, CPU)), "shared", CPU)
    assert known == [True, True]
    assert digesting == ["digests", "MainThread"]


def test_a_digest_that_failed_in_the_background_is_computed_where_it_is_needed(writer, digesting, monkeypatch):
    real, failures = packing.digest, [RuntimeError("no room")]

    def fails_once(*of):
        if failures:
            raise failures.pop()
        return real(*of)

    monkeypatch.setattr(packing, "digest", fails_once)
    wire = Wire(writer, 1, here=CPU)
    list(wire.down({0: told(1)}))
    wire.back(Done(0, b"", answer(0)), "shared", CPU)
    assert not failures
    assert digesting == ["MainThread"]
    assert wire.traffic.digests[0] == f"down 0 {read_header(encode(told(1))).digest}"


def test_a_digest_of_what_lies_in_main_memory_is_not_prepared(writer):
    wire = Wire(writer, 1, here=CPU)
    ((_, blob),) = wire.down({0: told(1)})
    head = read_header(blob)
    assert writer.prepare(head) is None
    blob.seen(CPU)[0].add_(1)
    assert head.digest == read_header(encode(told(1))).digest, "it is that of what was sent"


def test_headers_are_equal_and_copied_by_what_they_say(digesting):
    """Whoever holds the message itself says the same as its bytes. A header with another digest is another one."""
    held = read_header(encode_lazily(told(1), CPU))
    plain = read_header(encode(told(1)))
    assert held.costly
    assert held == plain
    assert not held.costly, "it is known now"
    assert held != read_header(encode(told(2)))
    assert dataclasses.replace(plain, told="another") != plain
    assert copy.deepcopy(held) == held
    assert held != plain.text
