"""A server's rounds, done again on messages by hand: what it sends is compared, and what it asks is answered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit import Down, State, Up, private
from fedaudit.verify import server_rounds
from fedaudit.verify.finding import Findings
from fedaudit.verify.server_rounds import _Apart, _Replay, _round, _Sums, rerun_server
from fedaudit.verify.sum_rows import SumRows
from fedaudit.wire.codec import encode, read_header


class Told(Down):
    w: State


class Reply(Up):
    z: torch.Tensor = private("logits", via="data", unit="record")


def told(value):
    return Told(State({"a": torch.tensor([float(value)])}))


def digest(message):
    return read_header(encode(message)).digest


def down(message, seq=5, fn="update"):
    return SimpleNamespace(fn=fn, digest=digest(message), seq=seq)


def up(value):
    return SimpleNamespace(record=lambda: Reply(torch.tensor([float(value)])))


def replay(there, sums=None):
    world = SimpleNamespace(device=torch.device("cpu"), method=None)
    return _Replay(SimpleNamespace(sums=sums or {}), world, 3, {(3, 0): there})


def test_replies_are_those_of_the_transcript_and_absences_too():
    one, two = told(1), told(2)
    there = {4: (down(two), up(40)), 1: (down(one), up(10)), 6: (down(one), None)}
    cohort = SimpleNamespace(ids=[1, 4, 6])
    here = replay(there)
    found = here.ask(cohort, "update", {1: one, 4: two, 6: one})
    assert {k: reply.z.item() for k, reply in found.items()} == {1: 10.0, 4: 40.0}
    assert cohort.ids == [1, 4], "client 6 did not answer"
    assert here.terms == {}
    with pytest.raises(_Apart) as apart:
        here.ask(SimpleNamespace(ids=[1]), "update", {1: one})
    assert apart.value.args == ("round 3, ask 1", "clients []", "clients [1]"), "there is one ask alone"


@pytest.mark.parametrize(
    ("sent", "fn", "where"),
    [
        ({1: 1, 4: 2}, "update", None),
        ({1: 1, 4: 1}, "update", "row 7: to client 4, round 3"),
        ({1: 1}, "update", "round 3, ask 0"),
        ({1: 1, 4: 2, 5: 2}, "update", "round 3, ask 0"),
        ({1: 1, 4: 2}, "other", "row 5, fn"),
    ],
)
def test_where_a_server_sends_something_else(sent, fn, where):
    there = {1: (down(told(1)), up(1)), 4: (down(told(2), seq=7), up(2))}
    messages = {k: told(value) for k, value in sent.items()}
    if where is None:
        assert len(replay(there).ask(SimpleNamespace(ids=[1, 4]), fn, messages)) == 2
    else:
        with pytest.raises(_Apart) as apart:
            replay(there).ask(SimpleNamespace(ids=[1, 4]), fn, messages)
        assert apart.value.args[0] == where


def test_a_broadcast_goes_to_all_that_are_left():
    message = told(1)
    there = {k: (down(message), up(k)) for k in (1, 4)}
    assert sorted(replay(there).ask(SimpleNamespace(ids=[1, 4]), "update", message)) == [1, 4]


def sum_of(value, clients=(1, 4), fn="update"):
    return SumRows(3, 0, SimpleNamespace(digest=digest(value), seq=9, row={"clients": list(clients)}, fn=fn))


@pytest.mark.parametrize(
    ("value", "clients", "fn", "where"),
    [
        (1.0, [1, 4], "update", None),
        (2.0, [1, 4], "update", "row 9: the sum of round 3"),
        (1.0, [1], "update", "row 9, clients"),
        (1.0, [1, 4], "other", "row 9, clients"),
    ],
)
def test_a_sum_is_the_transcripts(value, clients, fn, where):
    here = replay({}, {(3, 0): sum_of(Reply(torch.tensor([1.0])))})
    if where is None:
        here.summed(Reply(torch.tensor([value])), fn, 0, clients)
    else:
        with pytest.raises(_Apart) as apart:
            here.summed(Reply(torch.tensor([value])), fn, 0, clients)
        assert apart.value.args[0] == where


def test_a_sum_that_is_not_there():
    here = replay({}, {(3, 0): SumRows(3, 0)})
    for number in (0, 1):
        with pytest.raises(_Apart) as apart:
            here.summed(Reply(torch.tensor([1.0])), "update", number, [])
        assert apart.value.args[:2] == (f"round 3, ask {number}", "no sum")


def test_phases_of_a_sum_are_those_of_the_transcript():
    """Client 1 answered in the phase, client 4 left in it, client 5 was not in it."""
    rows = SumRows(3, 0, phases={"share": {1: ("down 1", "up 1"), 4: ("down 4", None)}})
    here = _Sums(None, replay({}, {(3, 0): rows}), None, b"", None, 1)
    cohort = SimpleNamespace(ids=[1, 4])
    assert here._stays(cohort, 1, 0, "share")
    assert not here._stays(cohort, 4, 0, "share")
    assert not here._stays(cohort, 4, 0, "share"), "it has left already"
    assert cohort.ids == [1]
    with pytest.raises(_Apart) as apart:
        here._both(5, "share", 0)
    assert apart.value.args == ("round 3, ask 0, share", "clients [1, 4]", "client 5")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dropped": [1, 2]}, "the messages of 2 rounds were not kept"),
        ({"secure": True, "where": "server"}, "the server's noise came from the operating system's entropy"),
        ({"aggregate": "secure"}, "noise.key is not there"),
        ({"where": "client"}, "noise.key is not there"),
    ],
)
def test_why_rounds_cannot_be_done_again(change, words, tmp_path):
    facts = {"dropped": [], "secure": False, "where": None, "aggregate": "plain"} | change
    policy = SimpleNamespace(secure=facts["secure"], where=facts["where"])
    guarantee = None if facts["where"] is None else SimpleNamespace(policy=policy)
    world = SimpleNamespace(guarantee=guarantee, setting=SimpleNamespace(aggregate=facts["aggregate"]))
    contents = SimpleNamespace(dropped=facts["dropped"])
    case = SimpleNamespace(found=Findings(), contents=contents, folder=tmp_path)
    assert rerun_server(case, world) == {}
    assert [one.verdict for one in case.found.list] == ["the author's word"]
    assert words in case.found.list[0].reason


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("right", [0, 2, 5])
@pytest.mark.parametrize("where", [None, "server", "client"])
def test_each_attempt_at_a_round_is_tried(attempts, right, where, monkeypatch):
    """A resumed run draws noise anew. A client's own noise does not show which attempt drew it: no terms then."""
    tried = []
    monkeypatch.setattr(server_rounds, "participants_of", lambda setting, t: [] if t == 9 else [1])
    monkeypatch.setattr(server_rounds, "decode", lambda blob, cls, device: "a copy of the state")
    monkeypatch.setattr(server_rounds, "encode", lambda state: state)
    monkeypatch.setattr(server_rounds, "Server", lambda *of: "server")
    monkeypatch.setattr(
        server_rounds, "_Sums", SimpleNamespace(of=lambda replay, n: SimpleNamespace(mean=n, records=[], n=n))
    )

    def once(state, server, cohort):
        n = cohort._mean
        tried.append((state, n))
        if n != right:
            raise _Apart("where", "said", "now")
        return "the state after"

    guarantee = None if where is None else SimpleNamespace(policy=SimpleNamespace(where=where))
    world = SimpleNamespace(
        method=SimpleNamespace(round=once), setting=SimpleNamespace(seed=1), device=torch.device("cpu"), hub=None,
        guarantee=guarantee,
    )  # fmt: skip
    case = SimpleNamespace(found=Findings(), attempts=attempts, sums={(3, 0): "a sum"})
    row = SimpleNamespace(round=3, sums=[])
    if right >= attempts:
        with pytest.raises(_Apart):
            _round(case, world, "state", row, {})
        assert [n for _, n in tried] == list(range(attempts))
        return
    after, terms = _round(case, world, "state", row, {})
    assert (after, terms) == ("the state after", {})
    assert tried == [("a copy of the state", n) for n in range(right + 1)]
    assert _round(case, world, "state", SimpleNamespace(round=9, sums=[]), {}) == ("state", {}), "nobody was drawn"
    case.sums, tried[:] = {}, []
    if right:
        with pytest.raises(_Apart):
            _round(case, world, "state", row, {})
        assert len(tried) == 1, "without sums there is one attempt"


@pytest.mark.parametrize(
    ("said", "now", "compared"),
    [((None, {}), None, False), ((None, {"a": 1}), None, True), (("g", {}), None, True), ((None, {}), "g", True)],
)
def test_a_round_without_a_model_of_the_server_has_nothing_to_compare(said, now, compared, monkeypatch):
    calls = []
    monkeypatch.setattr(server_rounds, "Server", lambda *of: "server")
    monkeypatch.setattr(server_rounds, "encode", lambda state: state)
    monkeypatch.setattr(server_rounds, "decode", lambda blob, cls, device: blob)
    monkeypatch.setattr(server_rounds, "evaluate", lambda *of, **more: SimpleNamespace(global_=now))
    monkeypatch.setattr(server_rounds, "Utility", SimpleNamespace(model_validate=lambda values: values))
    monkeypatch.setattr(server_rounds, "compare_utility", lambda *of: calls.append(of) or False)
    method = SimpleNamespace(predictor=lambda *of: None, global_points=lambda *of: {})
    world = SimpleNamespace(method=method, hub=None, device=torch.device("cpu"), setting=SimpleNamespace(seed=1))
    utility = SimpleNamespace(global_=said[0], global_points=said[1])
    assert server_rounds._compare_round(None, world, "state", 4, utility) is not compared
    assert [of[1:4] for of in calls] == (
        [("accuracy of round 4", "rounds.3.utility", {"global": said[0], "global_points": said[1]})] if compared else []
    )
