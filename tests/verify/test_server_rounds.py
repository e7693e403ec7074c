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


# --- all rounds -------------------------------------------------------------------------------------------------------


class Rounds:
    """A case of three rounds, of which 1 and 3 are evaluated, and what is done with it."""

    def __init__(self, monkeypatch, tmp_path, *, error=None, at=None, other_code="", other_machine="", sums=None):
        self.events = events = []

        def once(case, world, state, row, by_ask):
            events.append((row.round, state, dict(by_ask)))
            if row.round == at:
                raise error
            return f"state {row.round}", {(0, row.round, 0): f"terms {row.round}"}

        monkeypatch.setattr(server_rounds, "_round", once)
        monkeypatch.setattr(server_rounds, "Server", lambda hub, t, meter: (hub, t))
        monkeypatch.setattr(server_rounds, "_compare_round", lambda case, world, *of: events.append(of))
        monkeypatch.setattr(server_rounds, "_compare_last", lambda case, state: events.append(("last", state)))
        rows = [SimpleNamespace(round=t, utility=of) for t, of in ((1, "u1"), (2, None), (3, "u3"))]
        entries = [
            SimpleNamespace(fn=fn, round=t, ask=ask, client=k, direction=way, name=name)
            for name, fn, t, ask, k, way in (
                ("a", "update", 1, 0, 4, "down"), ("b", "update", 1, 0, 2, "down"), ("c", "update", 1, 0, 4, "up"),
                ("d", "(sum) share", 1, 0, 4, "down"), ("e", "update", 2, 1, 4, "down"),
            )
        ]  # fmt: skip
        self.by_name = {entry.name: entry for entry in entries}
        self.case = SimpleNamespace(
            found=Findings(), contents=SimpleNamespace(dropped=[]), folder=tmp_path, other_code=other_code,
            other_machine=other_machine, record=SimpleNamespace(rounds=rows), sums=sums or {},
            transcript=SimpleNamespace(entries=lambda: entries), watch=lambda *of: events.append(of),
        )  # fmt: skip
        method = SimpleNamespace(init=lambda server: ("first state", server))
        self.world = SimpleNamespace(
            guarantee=None, setting=SimpleNamespace(aggregate="plain", seed=3), device=torch.device("cpu"), hub="hub",
            method=method,
        )  # fmt: skip


@pytest.mark.parametrize("sums", [{}, {(1, 0): "one", (2, 0): "two"}])
def test_every_round_goes_on_from_the_one_before(sums, monkeypatch, tmp_path):
    """Messages are by round, ask and client, those of phases left out. Evaluated rounds but the last are compared."""
    here = Rounds(monkeypatch, tmp_path, sums=sums)
    assert rerun_server(here.case, here.world) == {(0, t, 0): f"terms {t}" for t in (1, 2, 3)}
    of = here.by_name
    asks = {(1, 0): {4: (of["a"], of["c"]), 2: (of["b"], None)}, (2, 1): {4: (of["e"], None)}}
    assert here.events == [
        (0, 3, "rerun, the server's round 1"), (1, ("first state", ("hub", 0)), asks), ("state 1", 1, "u1"),
        (1, 3, "rerun, the server's round 2"), (2, "state 1", asks),
        (2, 3, "rerun, the server's round 3"), (3, "state 2", asks), ("last", "state 3"),
    ]  # fmt: skip
    ((verdict, reason),) = [(one.verdict, one.reason) for one in here.case.found.list]
    more = ", and 2 sums" if sums else ""
    assert (verdict, reason) == ("recomputed", f"3 rounds: every message to a client comes out to the bit{more}")


@pytest.mark.parametrize(
    ("error", "other", "told"),
    [
        (_Apart("row 7", "a", "b"), {}, ("contradicted", "row 7", "a", "b")),
        (_Apart("row 7", "a", "b"), {"other_code": "changed"}, ("the author's word", "", None, None)),
        (_Apart("row 7", "a", "b"), {"other_machine": "ARM"}, ("the author's word", "", None, None)),
        (KeyError("k"), {}, ("contradicted", "server's rounds", "messages", "KeyError: 'k'")),
    ],
)
def test_rounds_end_where_something_else_comes_out(error, other, told, monkeypatch, tmp_path):
    here = Rounds(monkeypatch, tmp_path, error=error, at=2, **other)
    assert rerun_server(here.case, here.world) == {(0, 1, 0): "terms 1"}
    (found,) = here.case.found.list
    assert (found.verdict, found.field, found.recorded, found.recomputed) == told
    assert ("last", "state 3") not in here.events
    if other:
        assert found.reason == f"row 7: other bits come out here ({next(iter(other.values()))})"


@pytest.mark.parametrize(
    ("where", "secure", "key", "done"),
    [("server", False, False, False), ("server", False, True, True), ("client", True, False, True),
     ("shares", True, False, True), ("server", True, True, False)],
)  # fmt: skip
def test_rounds_whose_noise_can_be_drawn_again(where, secure, key, done, monkeypatch, tmp_path):
    """Clients' own noise from the system stands in their replies; the server's does not stand anywhere."""
    here = Rounds(monkeypatch, tmp_path)
    here.world.guarantee = SimpleNamespace(policy=SimpleNamespace(where=where, secure=secure))
    if key:
        (tmp_path / "noise.key").touch()
    assert bool(rerun_server(here.case, here.world)) is done


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("where", [None, "server", "shares", "client"])
def test_the_terms_of_a_round_are_handed_on(where, attempts, monkeypatch):
    """Where a client's own noise may be of either attempt, nobody knows them. Sums that differ are told."""
    monkeypatch.setattr(server_rounds, "participants_of", lambda setting, t: [1, 4])
    monkeypatch.setattr(server_rounds, "decode", lambda blob, cls, device: blob)
    monkeypatch.setattr(server_rounds, "encode", lambda state: state)
    monkeypatch.setattr(server_rounds, "Server", lambda hub, t, meter: (hub, t))

    def dumped(value):
        return SimpleNamespace(model_dump=lambda exclude: {"divisor": value, "left out": sorted(exclude)})

    def of(replay, n):
        replay.terms["key"] = "terms"
        return SimpleNamespace(mean="mean", records=[dumped(2.0 * (1 + 1e-8))])

    monkeypatch.setattr(server_rounds, "_Sums", SimpleNamespace(of=of))
    seen = []
    method = SimpleNamespace(round=lambda state, server, cohort: seen.append((state, server, cohort.ids)) or "after")
    guarantee = None if where is None else SimpleNamespace(policy=SimpleNamespace(where=where))
    world = SimpleNamespace(
        method=method, setting=SimpleNamespace(seed=1), device=torch.device("cpu"), hub="hub", guarantee=guarantee
    )
    case = SimpleNamespace(found=Findings(), attempts=attempts, sums={(3, 0): "a sum"})
    row = SimpleNamespace(round=3, sums=[dumped(2.0)])
    terms = {} if where == "client" and attempts > 1 else {"key": "terms"}
    assert _round(case, world, "state", row, {}) == ("after", terms)
    assert seen == [("state", ("hub", 3), [1, 4])]
    assert [(one.figure, one.field, one.recorded) for one in case.found.list] == [
        ("sums of round 3, done again", "rounds.2.sums.0.divisor", 2.0)
    ]


def test_messages_of_a_phase_are_compared_in_their_direction(monkeypatch):
    rows = SumRows(3, 0, phases={"share": {1: ("down 1", "up 1")}})
    here = _Sums(None, replay({}, {(3, 0): rows}), None, b"", None, 1)
    monkeypatch.setattr(here, "_same", lambda message, entry: (message, entry))
    assert here._down(1, "a message", "share", 0) == ("a message", "down 1")
    assert here._up(1, "an answer", "share", 0) == ("an answer", "up 1")


@pytest.mark.parametrize("there", [True, False])
def test_sums_are_drawn_from_the_runs_secret(there, monkeypatch, tmp_path):
    """The largest weight is that of the client with most records. The sum before is of an earlier round."""
    if there:
        (tmp_path / "noise.key").touch()
    monkeypatch.setattr(server_rounds, "secret_of_sums", lambda secret, attempt: (secret, attempt))
    monkeypatch.setattr(server_rounds, "last_sum", lambda rows: [row.round for row in rows])
    made = []
    monkeypatch.setattr(_Sums, "__init__", lambda self, *of: made.append(of))
    world = SimpleNamespace(
        count=[5, 90, 7].__getitem__, setting=SimpleNamespace(clients=3), guarantee="guarantee", method="method"
    )
    rounds = [SimpleNamespace(round=t) for t in (1, 2, 3, 4)]
    case = SimpleNamespace(
        folder=tmp_path, run=SimpleNamespace(secret=b"key"), record=SimpleNamespace(rounds=rounds), sums={}
    )
    again = _Replay(case, world, 3, {})
    _Sums.of(again, 2)
    ((run, so_far, ask, secret, guarantee, largest, before),) = made
    assert (run.setting, run.method) == (world.setting, "method")
    assert so_far is again
    assert (ask, guarantee, largest, before) == (again.ask, "guarantee", 90, [1, 2])
    assert secret == (b"key" if there else b"", 2)


@pytest.mark.parametrize("excuse", [{}, {"other_code": "changed"}, {"other_machine": "ARM"}])
@pytest.mark.parametrize("left", [1, 2])
def test_the_servers_last_state_is_that_of_the_checkpoint(left, excuse):
    asked = []
    store = SimpleNamespace(server=lambda name: asked.append(name) or encode(told(left)))
    rounds = [SimpleNamespace(round=t) for t in (1, 2, 6)]
    case = SimpleNamespace(
        found=Findings(),
        store=store,
        record=SimpleNamespace(rounds=rounds),
        **({"other_code": "", "other_machine": ""} | excuse),
    )
    server_rounds._compare_last(case, told(1))
    verdict = "recomputed" if left == 1 else "the author's word" if excuse else "contradicted"
    assert [one.verdict for one in case.found.list] == [verdict]
    assert asked == ["server.6"]
    case.found = Findings()
    for change in ({"store": None}, {"record": SimpleNamespace(rounds=[])}):
        server_rounds._compare_last(SimpleNamespace(**(vars(case) | change)), told(1))
    assert case.found.list == []
