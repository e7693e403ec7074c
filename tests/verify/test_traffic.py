"""Traffic of an index, added up by hand: two rounds, two directions, unequal clients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.runtime.run_record import Absence, RoundRecord
from fedaudit.verify import traffic
from fedaudit.verify.finding import Findings
from fedaudit.wire.message import Size


def size(payload, wire, buffers=0, **more):
    return {"payload": payload, "buffers": buffers, "wire": wire, **more}


def message(way, client, t, ask, seq, fields, fn="update", name=None, ends=None):
    sender, receiver = ("server", f"client {client}") if way == "down" else (f"client {client}", "server")
    sender, receiver = ends or (sender, receiver)
    return {
        "type": "message", "round": t, "client": client, "direction": way, "ask": ask, "seq": seq, "fn": fn,
        "message": name or ("Global" if way == "down" else "Local"), "from": sender, "to": receiver, "fields": fields,
        "tree": {"r": ["x", {}]},
    }  # fmt: skip


ROWS = [
    message("down", 2, 1, 0, 1, {"w": size(40, 50)}),
    message("down", 0, 1, 0, 2, {"w": size(40, 50)}),
    message("up", 2, 1, 0, 3, {"w": size(8, 16, 3, whole=32), "n": size(0, 5)}),
    message("up", 0, 1, 0, 4, {"w": size(9, 17, 2), "n": size(0, 6)}),
    message("down", 0, 1, 1, 5, {"w": size(0, 7)}, "(sum) share"),  # no ask of the method's
    {"type": "event", "event": "absent", "client": 2, "ask": 1, "reason": "dropped out", "round": 1},
    message("down", 5, 2, 1, 6, {"w": size(41, 51)}),
    message("up", 5, 2, 1, 7, {"w": size(10, 18), "n": size(0, 4)}),
]


@pytest.fixture
def index(monkeypatch):
    case = SimpleNamespace(found=Findings(), foreign_transport=False)
    read = traffic._Index(case)
    monkeypatch.setattr(read, "_sizes", lambda row, where: row["fields"])
    monkeypatch.setattr(traffic, "_release", lambda field, facts: (field, facts["role"]))
    for row in ROWS:
        read.row(row)
    return read


def test_bytes_of_rounds_by_direction(index):
    one, two = index.by_round[1], index.by_round[2]
    totals = {(way, what): one.total(way, what) for way in ("up", "down") for what in ("payload", "wire")}
    assert totals == {("up", "payload"): 17, ("up", "wire"): 44, ("down", "payload"): 80, ("down", "wire"): 107}
    assert (two.total("up", "payload"), two.total("down", "wire")) == (10, 51)
    assert one.whole["up", "Local.w"] == Size(32 + 9, 3 + 2), "before compression, where that is said"
    assert index.messages == 7


def test_bytes_of_fields_over_the_run(index):
    found = {(row.direction, row.field): (row.wire, row.payload, row.buffers) for row in index.fields()}
    assert found == {
        ("down", "Global.w"): (158, 121, 0), ("up", "Local.w"): (51, 27, 5), ("up", "Local.n"): (15, 0, 0),
    }  # fmt: skip
    assert [(row.direction, row.field) for row in index.fields()] == sorted(found)


def test_asks_are_the_methods_own(index):
    assert index.by_round[1].asks() == [([0, 2], [2, 0])], "replies in the order in which they came"
    assert index.by_round[2].asks() == [([], []), ([5], [5])]
    assert traffic._Round().asks() == []


@pytest.mark.parametrize(("said", "now"), [([0, 2, 3], [0, 2, 3]), ([0, 2], [0, 2]), ([0, 3], [0, 2])])
def test_a_round_has_at_least_the_clients_that_were_asked(index, said, now):
    row = RoundRecord(
        round=1, participants=said, absent=[Absence(client=9, ask=9, reason="r")], up_payload=1, up_wire=2,
        down_payload=3, down_wire=4, wall_s=0.0,
    )  # fmt: skip
    found = index.round(row)
    assert found.participants == now
    assert [(one.client, one.ask, one.reason) for one in found.absent] == [(2, 1, "dropped out")]
    assert (found.up_payload, found.up_wire, found.down_payload, found.down_wire) == (17, 44, 80, 107)


def test_releases_are_what_clients_send_under_a_role(index):
    facts = {"w": size(1, 1, role="private"), "n": size(1, 1), "r": size(1, 1, role="relay")}
    index.row(message("down", 1, 3, 0, 8, facts))
    assert index.releases() == []
    index.row(message("up", 1, 3, 0, 9, facts))
    assert index.releases() == [("Local.r", "relay"), ("Local.w", "private")]


@pytest.mark.parametrize("way", ["up", "down"])
def test_who_sends_a_message_and_to_whom(index, way):
    assert index.case.found.list == []
    turned = ("client 4", "server") if way == "down" else ("server", "client 4")
    index.row(message(way, 4, 2, 0, 12, {}, ends=turned))
    (found,) = index.case.found.list
    assert found.field == "row 12, from and to"
    assert (found.recorded, found.recomputed) == (" to ".join(turned), " to ".join(turned[::-1]))
    index.close()
    assert len(index.case.found.list) == 1, "then it is not called recomputed"
    for seq in range(20, 30):
        index.row(message(way, 4, 2, 0, seq, {}, ends=turned))
    assert len(index.case.found.list) == 5


def test_what_is_said_of_messages_whose_class_is_not_known(index):
    index.unknown, index.digests = 2, 4
    index.close()
    assert [(one.verdict, one.reason.partition(", from")[0]) for one in index.case.found.list] == [
        ("recomputed", "4 of 7 digests, and the sizes of 5"),
        ("the author's word", "the classes of 2 messages are not known here"),
    ]


@pytest.mark.parametrize(
    ("foreign", "declares", "other_code", "verdict"),
    [
        (False, {"a": 1}, "", "contradicted"),
        (False, None, "", "the author's word"),
        (False, {"a": 1}, "other code", "the author's word"),
        (True, {"a": 1}, "", "the author's word"),
    ],
)
def test_a_method_that_declares_its_traffic_says_so_in_the_record(foreign, declares, other_code, verdict, monkeypatch):
    monkeypatch.setattr(traffic, "participants_of", lambda setting, t: [t])
    seen = []

    def plan(t, who):
        seen.append((t, who))
        return "a plan"

    world = SimpleNamespace(method=SimpleNamespace(traffic=lambda plan: declares), setting="a setting", plan=plan)
    record = SimpleNamespace(traffic_declared=False)
    case = SimpleNamespace(
        found=Findings(), world=world, record=record, foreign_transport=foreign, other_code=other_code
    )
    traffic.check_declared(case, None)
    assert [one.verdict for one in case.found.list] == [verdict]
    assert seen == ([] if foreign else [(1, [1])])
    case.world, case.why_no_world, case.found = None, "no data", Findings()
    traffic.check_declared(case, None)
    assert [one.reason for one in case.found.list] == ["no data"]


def test_digests_are_read_once_and_of_packs_that_are_there(tmp_path, monkeypatch):
    """Two messages have the same content. A pack of an early round is gone: there is nothing to compare."""
    (tmp_path / "transcript").mkdir()
    (tmp_path / "transcript" / "000002.weights.pack").write_bytes(b"abcdefghij")
    case = SimpleNamespace(found=Findings(), folder=tmp_path, foreign_transport=False)
    read, made = traffic._Index(case), []

    def digest(head, content):
        made.append(bytes(content(0)))
        return "of " + made[-1].decode()

    monkeypatch.setattr(traffic, "stored_digest", digest)
    head = SimpleNamespace(text="head", tensors=["one"])

    def row(t, offset, said, type_="message"):
        return {"type": type_, "round": t, "tensors": [["w", [3], "weights", offset, 3, "x"]], "digest": said}

    read._digest(row(2, 2, "of cde"), head, "row 1")
    read._digest(row(2, 2, "of cde"), head, "row 2")
    read._digest(row(2, 4, "of efg", "sum"), head, "row 3")
    read._digest(row(1, 2, "of nothing"), head, "row 4")
    assert made == [b"cde", b"efg"]
    assert (read.digests, read.wrong) == (2, False), "sums are no messages"
    read._digest(row(2, 5, "of cde"), head, "row 5")
    assert [(one.field, one.recorded, one.recomputed) for one in case.found.list] == [
        ("row 5, digest", "of cde", "of fgh")
    ]
