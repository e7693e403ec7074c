"""One round through the wire: which message is encoded, held, and taken for the one that was answered."""

from __future__ import annotations

import pytest
import torch
from outside import Sent, Shared

from fedaudit import State
from fedaudit.errors import ContractError
from fedaudit.runtime.task import Done
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import encode, read_header
from fedaudit.wire.codec.packing import Held
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
