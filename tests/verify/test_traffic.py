"""Traffic of an index, added up by hand: two rounds, two directions, unequal clients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.errors import RunError, SettingError
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


@pytest.mark.parametrize("dropped", [[], [1, 2, 5]])
def test_rounds_of_which_no_model_was_kept_are_told(dropped, tmp_path):
    (tmp_path / "transcript").mkdir()
    (tmp_path / "transcript" / "index.jsonl").touch()
    contents = SimpleNamespace(damage=[], text=lambda: "3 messages", digest="d", dropped=dropped)
    record = SimpleNamespace(transcript_digest="d", setting=SimpleNamespace(keep_weights=4))
    case = SimpleNamespace(folder=tmp_path, contents=contents, record=record, found=Findings())
    traffic.check_transcript(case)
    words = [str(one) for one in case.found.list if one.figure == "model states of early rounds"]
    assert len(words) == bool(dropped)
    assert all("none of 3 rounds (keep_weights = 4)" in text for text in words)


def test_five_wrong_messages_are_named():
    """Contradictions of another figure do not count among them."""
    case = SimpleNamespace(found=Findings())
    case.found.contradicted("seal", "seal.json", "digest", "a", "b")
    index = traffic._Index(case)
    for i in range(8):
        index._wrong(f"{i}.size", i, i + 1)
    assert index.wrong
    assert [one.field for one in case.found.list if one.figure == "messages"] == [f"{i}.size" for i in range(5)]


# --- declared traffic ------------------------------------------------------------------------------------------------


def declared_case(aggregate="plain", other_code="", sums=None, rounds=((1, [4, 2]), (3, [5]))):
    """The plan and the formula tell what they were given."""
    setting = SimpleNamespace(aggregate=aggregate, method="fedavg")
    method = SimpleNamespace(traffic=lambda plan: None if plan[0] == 3 else ("declared", plan))
    world = SimpleNamespace(
        method=method, setting=setting, plan=lambda t, who, asks, choices: (t, tuple(who), asks, choices)
    )
    record = SimpleNamespace(
        traffic_declared=True, setting=setting, rounds=[SimpleNamespace(round=t, participants=who) for t, who in rounds]
    )
    return SimpleNamespace(
        found=Findings(), world=world, record=record, other_code=other_code, foreign_transport=False, sums=sums or {}
    )


READ = SimpleNamespace(
    by_round={
        t: SimpleNamespace(asks=lambda t=t: f"asks {t}", choices=f"choices {t}", whole=f"measured {t}") for t in (1, 3)
    }
)


@pytest.mark.parametrize("aggregate", ["plain", "secure"])
def test_what_a_method_declares_of_each_round_is_compared(aggregate, monkeypatch):
    """Sums of a round are handed on in their order. In round 3 the method declares nothing."""
    compared = []
    monkeypatch.setattr(traffic, "compare", lambda *of, method, t: compared.append((*of, method, t)))
    monkeypatch.setattr(traffic, "in_sums", lambda method, declared, sums: ("in sums", declared, sums))
    sums = {
        key: SimpleNamespace(facts=lambda key=key: f"facts of {key}") for key in ((1, 2), (3, 0), (1, 0))
    }  # fmt: skip
    case = declared_case(aggregate, sums=sums)
    traffic.check_declared(case, READ)
    first = ("declared", (1, (4, 2), "asks 1", "choices 1"))
    if aggregate == "secure":
        first = ("in sums", first, ["facts of (1, 0)", "facts of (1, 2)"])
    assert compared == [(first, "measured 1", "fedavg", 1), (None, "measured 3", "fedavg", 3)]
    assert [(one.verdict, one.reason) for one in case.found.list] == [
        ("recomputed", "2 rounds agree with the method's formula")
    ]


LINES = """Not as declared.
  words of measured bytes
  words of declared bytes
  up Local.w  declared 5 B  measured 7 B
  down x  declared 1 B  measured 2 B"""


@pytest.mark.parametrize(
    ("error", "other_code", "told"),
    [
        (RunError(LINES), "", ("contradicted", "round 1, up Local.w", "7 B", "5 B")),
        (
            RunError("something else broke"),
            "",
            ("contradicted", "round 1, something else", "other traffic", "a formula"),
        ),
        (RunError(LINES), "changed", ("the author's word", "", None, None)),
        (SettingError("no such model"), "", ("the author's word", "", None, None)),
        (KeyError("share"), "", ("contradicted", "round 1", "rows of sums", "KeyError: 'share'")),
    ],
)
def test_what_is_told_where_traffic_is_not_as_declared(error, other_code, told, monkeypatch):
    def compare(*of, **more):
        raise error

    monkeypatch.setattr(traffic, "compare", compare)
    case = declared_case(other_code=other_code)
    traffic.check_declared(case, READ)
    (found,) = case.found.list
    assert (found.verdict, found.field, found.recorded, found.recomputed) == told
    if found.verdict == "the author's word":
        assert ("other code (changed)" if other_code else "cannot be computed here: no such model") in found.reason


# --- transcript and messages -----------------------------------------------------------------------------------------


def test_without_an_index_nothing_else_of_the_transcript_is_looked_at(tmp_path):
    case = SimpleNamespace(folder=tmp_path, found=Findings())
    traffic.check_transcript(case)
    assert [(one.verdict, one.file, one.field, one.recomputed) for one in case.found.list] == [
        ("contradicted", "transcript/index.jsonl", "the file", "nothing")
    ]


def test_every_damage_and_another_digest_are_named(tmp_path):
    (tmp_path / "transcript").mkdir()
    (tmp_path / "transcript" / "index.jsonl").touch()
    damage = [SimpleNamespace(file=f"{i}.pack", place=f"row {i}", recorded=i, found=-i) for i in (1, 2)]
    contents = SimpleNamespace(damage=damage, text=lambda: "3 messages", digest="now", dropped=[])
    case = SimpleNamespace(
        folder=tmp_path, contents=contents, record=SimpleNamespace(transcript_digest="then"), found=Findings()
    )
    traffic.check_transcript(case)
    assert [(one.figure, one.file, one.field, one.recorded, one.recomputed) for one in case.found.list] == [
        ("transcript", "transcript/1.pack", "row 1", 1, -1),
        ("transcript", "transcript/2.pack", "row 2", 2, -2),
        ("transcript's digest", "record.json", "transcript_digest", "then", "now"),
    ]


@pytest.mark.parametrize("known", [True, False])
def test_the_digest_of_a_sum_is_looked_at_and_no_size(known, monkeypatch):
    index, seen = traffic._Index(SimpleNamespace(found=Findings(), foreign_transport=False)), []
    monkeypatch.setattr(traffic, "stored_header", lambda *row: ("head of", *row) if known else None)
    monkeypatch.setattr(index, "_digest", lambda row, head, where: seen.append((row["seq"], head, where)))
    index.row({"type": "sum", "tree": "tree", "tensors": "tensors", "digest": "d", "seq": 8, "round": 1})
    assert seen == ([(8, "head of", "row 8")] if known else [])
    assert (index.messages, index.unknown, dict(index.by_round)) == (0, 0, {})


@pytest.mark.parametrize("known", [True, False])
def test_the_sizes_of_a_message(known, monkeypatch):
    """What is not said of a field is 0, but for what there was before compression. The frame counts as a field."""
    index = traffic._Index(SimpleNamespace(found=Findings(), foreign_transport=False))
    said = {
        "w": {"payload": 8, "buffers": 2, "wire": 30, "whole": 64}, "n": {"payload": 0, "buffers": 0, "wire": 5},
        "(frame)": {"payload": 0, "buffers": 0, "wire": 7},
    }  # fmt: skip
    now = {**said, "w": {"payload": 8, "buffers": 2, "wire": 31, "whole": 64}}
    monkeypatch.setattr(traffic, "stored_header", lambda *row: ("head", 50) if known else None)
    monkeypatch.setattr(traffic, "measure", lambda head, size: now if (head, size) == ("head", 50) else None)
    digests = []
    monkeypatch.setattr(index, "_digest", lambda row, head, where: digests.append((head, where)))
    fields = {"w": {**said["w"], "role": "private"}, "n": {"wire": 5, "payload": None}}
    row = {"fields": fields, "frame": 7, "bytes": 40, "tree": {}, "tensors": [], "digest": "d"}
    assert index._sizes(row, "row 4") == (now if known else said)
    assert index.unknown == (not known)
    assert digests == ([("head", "row 4")] if known else [])
    wrong = [("row 4, bytes", 40, 42)] + ([("row 4, w", str(said["w"]), str(now["w"]))] if known else [])
    assert [(one.field, one.recorded, one.recomputed) for one in index.case.found.list] == wrong


def test_a_message_of_which_one_pack_is_gone_has_no_digest(tmp_path, monkeypatch):
    (tmp_path / "transcript").mkdir()
    (tmp_path / "transcript" / "000002.logits.pack").write_bytes(b"abcdefghij")
    case = SimpleNamespace(found=Findings(), folder=tmp_path)
    index = traffic._Index(case)
    monkeypatch.setattr(
        traffic, "stored_digest", lambda head, content: b"".join(map(bytes, map(content, (0, 1)))).decode()
    )
    head = SimpleNamespace(text="head", tensors=["one", "two"])

    def row(*kinds):
        tensors = [["w", [3], kind, 2 + i, 3, "x"] for i, kind in enumerate(kinds)]
        return {"type": "message", "round": 2, "tensors": tensors, "digest": "cdedef"}

    for kinds in (("logits", "weights"), ("weights", "logits")):
        index._digest(row(*kinds), head, "row 1")
        assert (index.digests, index.wrong) == (0, False)
    index._digest(row("logits", "logits"), head, "row 2")
    assert (index.digests, index.wrong) == (1, False)


def test_figures_of_the_record_that_follow_from_the_index(monkeypatch):
    """Each of them is compared with what the index has; the clients that were asked follow from the seed."""
    read = SimpleNamespace(row=[].append, close=lambda: None, fields=lambda: ["fields"], releases=lambda: ["releases"])
    kept = {"round": 1, "participants": [2], "up_payload": 5, "up_wire": 6, "down_payload": 7, "down_wire": 8}
    said = RoundRecord.model_construct(**kept, absent=[], utility=None)
    read.round = lambda row: row.model_copy(update={"up_wire": 9})
    monkeypatch.setattr(traffic, "_Index", lambda case: read)
    monkeypatch.setattr(traffic, "participants_of", lambda setting, t: [t + 2])
    monkeypatch.setattr(traffic, "check_sums_of_clients", lambda case: None)
    monkeypatch.setattr(traffic, "check_declared", lambda case, index: None)
    record = SimpleNamespace(rounds=[said], traffic=["others"], releases=["few"], setting="a setting")
    for foreign in (True, False):
        case = SimpleNamespace(
            found=Findings(), record=record, foreign_transport=foreign, transcript=SimpleNamespace(rows=list)
        )
        traffic.check_traffic(case)
        wrong = [(one.field, one.recorded, one.recomputed) for one in case.found.list]
        own = [] if foreign else [("rounds.participants.0.0", 2, 3)]
        assert wrong == [
            ("rounds.0.up_wire", 6, 9),
            ("traffic.0", "others", "fields"),
            ("releases.0", "few", "releases"),
            *own,
        ]
