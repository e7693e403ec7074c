"""Tasks done again: which of them, on which terms, and what is said of a reply that comes out otherwise."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fedaudit import Up, private
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.verify import rerun
from fedaudit.verify.finding import Findings
from fedaudit.verify.rerun import _Outcome, _Rerun
from fedaudit.wire.codec import encode, read_header


class Reply(Up):
    a: torch.Tensor = private("logits", via="data", unit="record")
    b: torch.Tensor = private("logits", via="data", unit="record")


@pytest.mark.parametrize("where", ["server", "shares", "client", None])
@pytest.mark.parametrize("aggregate", ["plain", "secure"])
def test_replies_of_sums_need_their_terms(where, aggregate):
    """Ask 1 of round 2 is a sum. Terms are known of client 3 alone."""
    guarantee = None if where is None else SimpleNamespace(policy=SimpleNamespace(where=where))
    world = SimpleNamespace(guarantee=guarantee, setting=SimpleNamespace(aggregate=aggregate))
    again = _Rerun(SimpleNamespace(sums={(2, 1): "a sum"}), world, {(3, 2, 1): "terms"})

    def lacks(client, t, ask):
        return again.lacks_terms(SimpleNamespace(up=SimpleNamespace(client=client, round=t, ask=ask)))

    assert lacks(4, 2, 1) is (where == "client" or aggregate == "secure")
    assert not lacks(3, 2, 1), "they are known"
    assert not lacks(4, 2, 0), "no sum"
    assert not lacks(3, 1, 1), "no sum"


@pytest.mark.parametrize(
    ("policies", "where", "secure", "secret", "words"),
    [
        ([], None, False, None, ""),
        ([False], None, False, b"key", ""),
        ([False], None, False, None, "noise.key"),
        ([False, True], None, False, b"key", "entropy"),
        ([], "server", True, None, ""),  # the server's own noise is none of the clients'
        ([], "client", True, None, "entropy"),
        ([], "shares", True, b"key", "entropy"),
        ([], "client", False, b"key", ""),
    ],
)
def test_why_no_task_can_be_done_again(policies, where, secure, secret, words):
    named = {str(i): SimpleNamespace(secure=own) for i, own in enumerate(policies)}
    guarantee = None if where is None else SimpleNamespace(policy=SimpleNamespace(where=where, secure=secure))
    world = SimpleNamespace(policies=named, guarantee=guarantee)
    found = _Rerun(SimpleNamespace(run=SimpleNamespace(secret=secret)), world, {}).why_not
    assert words in found if words else found == ""


def test_tasks_are_asks_of_the_method_that_were_answered():
    def entry(direction, client, t, ask=0, fn="update", seq=0):
        return SimpleNamespace(direction=direction, client=client, round=t, ask=ask, fn=fn, seq=seq)

    entries = [
        entry("down", 0, 1, seq=1), entry("down", 1, 1, seq=2), entry("up", 1, 1, seq=3), entry("up", 0, 1, seq=4),
        entry("down", 0, 1, 1, seq=5), entry("down", 1, 1, 1, seq=6), entry("up", 1, 1, 1, seq=7),  # 0 is gone
        entry("down", 1, 2, 0, "(sum) share", 8), entry("up", 1, 2, 0, "(sum) share", 9),
        entry("up", 2, 2, seq=10),  # nobody asked
    ]  # fmt: skip
    case = SimpleNamespace(transcript=SimpleNamespace(entries=lambda: entries))
    found = {k: [(one.down.seq, one.up.seq) for one in of] for k, of in rerun._tasks(case).items()}
    assert found == {0: [(1, 4)], 1: [(2, 3), (6, 7)]}
    assert rerun.number_of_tasks(case) == 3


def compared(said, now, *, other_code="", other_machine="", role="private", outcome=None):
    """Compare a reply that came out as `now` with the transcript's, `said`; return outcome and contradictions."""
    case = SimpleNamespace(found=Findings(), other_code=other_code, other_machine=other_machine)
    up = SimpleNamespace(
        digest=read_header(encode(said)).digest, record=lambda: said, fields={"a": SimpleNamespace(role=role)}
    )
    asked = SimpleNamespace(up=up, where="row 4", down=SimpleNamespace(record=lambda: None))
    outcome = outcome or _Outcome()
    done = SimpleNamespace(reply=None if now is None else encode(now), error="it broke")
    rerun._compare(case, asked, done, outcome)
    return outcome, [(one.field, str(one.recomputed)) for one in case.found.list]


def test_what_a_reply_that_comes_out_otherwise_means():
    one = Reply(torch.tensor([3.0, 4.0]), torch.tensor([1.0]))
    near = Reply(torch.tensor([3.0, 4.001]), torch.tensor([1.0]))  # |gap| / |value| = 0.001 / 5 = 0.0002
    far = Reply(torch.tensor([3.0, 4.0]), torch.tensor([1.5]))  # half of the smaller field
    outcome, wrong = compared(one, one)
    assert (outcome.exact, outcome.wrong, wrong) == (1, 0, [])
    outcome, wrong = compared(one, near)
    assert (outcome.exact, outcome.wrong) == (0, 1)
    assert wrong == [("row 4", read_header(encode(near)).digest)]
    outcome, wrong = compared(one, None)
    assert (outcome.wrong, wrong) == (1, [("row 4", "none: it broke")])
    outcome, wrong = compared(one, far, other_code="a line was changed")
    assert (outcome.wrong, wrong, len(outcome.reasons)) == (0, [], 1)
    outcome, wrong = compared(one, near, other_machine="another machine")
    assert (outcome.wrong, wrong) == (0, [])
    assert outcome.largest == pytest.approx(2e-4, rel=0.3)
    outcome, wrong = compared(one, far, other_machine="another machine")
    assert (outcome.wrong, wrong[0][0]) == (1, "row 4")
    assert outcome.largest == pytest.approx(0.5, rel=0.4)
    assert "more than 0.01" in wrong[0][1]
    outcome, wrong = compared(one, far, other_machine="another machine", role="masked")
    assert (outcome.wrong, wrong, outcome.largest) == (0, [], 0.0)
    assert "masked" in outcome.reasons[0]
    outcome, wrong = compared(one, near, other_machine="another machine", outcome=_Outcome(largest=0.4))
    assert outcome.largest == 0.4, "the largest of all"


@pytest.mark.parametrize("now", [None, Reply(torch.tensor([9.0]), torch.tensor([1.0]))])
def test_five_wrong_replies_are_named(now):
    one = Reply(torch.tensor([3.0]), torch.tensor([1.0]))
    for before, named in ((3, 1), (4, 1), (5, 0)):
        outcome, wrong = compared(one, now, outcome=_Outcome(wrong=before))
        assert (outcome.wrong, len(wrong)) == (before + 1, named)


def entry(**facts):
    base = {
        "field": "Reply.a", "kind": "logits", "mechanism": "gaussian", "noise_multiplier": 2.0, "sigma": 4.0,
        "relation": "zero-out", "rounds": [1, 2],
    }  # fmt: skip
    return LedgerEntry(**(base | facts))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"noise_multiplier": 2.0 * (1 + 1e-8)}, True),
        ({"noise_multiplier": 2.001}, False),
        ({"sigma": 4.01}, False),
        ({"sigma": None}, False),
        ({"sample_rate": 0.5}, False),
        ({"steps": 2}, False),
        ({"unit": "client"}, False),
        ({"mechanism": "laplace"}, False),
        ({"kind": "labels"}, False),
        ({"field": "Reply.b"}, False),
        ({"relation": "replace-one"}, False),
        ({"clip": 1.0}, True),  # what follows from it is compared
    ],
)
def test_bills_are_the_same_but_for_rounding(change, same):
    assert rerun._same_bill(entry(), entry(**change)) is same
    assert rerun._same_bill(entry(sigma=None), entry(**{**change, "sigma": None})) is (same or "sigma" in change)


@pytest.mark.parametrize(
    ("ledger", "other_code", "said"),
    [
        ([(3, entry())], "", None),
        ([(3, entry(rounds=[1]))], "", "no entry"),  # of another round
        ([(4, entry())], "", "no entry"),  # of another client
        ([(3, entry(noise_multiplier=1.0))], "", "gaussian, noise x 1, 1 steps, rate 1"),
        ([(3, entry(noise_multiplier=1.0))], "other code", None),
        ([(4, entry(noise_multiplier=1.0)), (3, entry())], "", None),
    ],
)
def test_what_a_task_costs_stands_in_its_clients_ledger(ledger, other_code, said):
    rows = [SimpleNamespace(client=k, entries=[entry(field="Reply.b"), one]) for k, one in ledger]
    case = SimpleNamespace(found=Findings(), record=SimpleNamespace(ledger=rows), other_code=other_code)
    asked = SimpleNamespace(up=SimpleNamespace(client=3, round=2))
    rerun._compare_bill(case, asked, [entry()])
    found = [(one.field, one.recorded, one.recomputed) for one in case.found.list]
    now = "gaussian, noise x 2, 1 steps, rate 1"
    assert found == ([] if said is None else [("ledger of client 3, Reply.a, round 2", said, now)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world": None}, "the data set is not here"),
        ({"foreign_transport": True}, "another framework ran the clients"),
        ({"start": "another run"}, "the clients started as another run left them"),
    ],
)
def test_why_nothing_is_done_again(change, words, monkeypatch):
    monkeypatch.setattr(rerun, "_tasks", lambda case: {0: ["one", "two"], 1: ["three"]})
    facts = {"world": "a world", "foreign_transport": False, "start": None} | change
    record = SimpleNamespace(setting=SimpleNamespace(start=facts.pop("start")))
    case = SimpleNamespace(found=Findings(), record=record, why_no_world="the data set is not here", **facts)
    assert rerun.check_rerun(case, 0.5, 1) == (3, 0)
    assert [one.verdict for one in case.found.list] == ["the author's word"]
    assert words in case.found.list[0].reason


@pytest.mark.parametrize(("share", "wanted"), [(0.01, 1), (0.3, 2), (1.0, 5)])
def test_a_share_of_the_tasks_is_chosen_by_the_reviewers_seed(share, wanted, monkeypatch):
    """Client 0 has rows 2, 6 and 8, client 1 rows 3 and 4. A third of 5 tasks is two of them."""
    tasks = {
        k: [SimpleNamespace(up=SimpleNamespace(seq=seq, client=k)) for seq in rows]
        for k, rows in {0: [2, 6, 8], 1: [3, 4]}.items()
    }
    asked, reported = [], []
    monkeypatch.setattr(rerun, "_tasks", lambda case: tasks)
    monkeypatch.setattr(rerun, "rerun_server", lambda case, world: {})

    def client(again, of, some, outcome):
        assert of == tasks[of[0].up.client]
        asked.extend((of[0].up.client, seq) for seq in sorted(some))
        outcome.done += len(some)

    monkeypatch.setattr(rerun, "_rerun_client", client)
    monkeypatch.setattr(rerun, "_report", lambda case, outcome, *numbers: reported.append(numbers))
    monkeypatch.setattr(rerun, "compute", lambda world: nullcontext())
    record = SimpleNamespace(setting=SimpleNamespace(start=None))
    case = SimpleNamespace(
        found=Findings(), record=record, world="world", foreign_transport=False, watch=lambda *of: None
    )
    assert rerun.check_rerun(case, share, 7) == (5, wanted)
    assert reported == [(wanted, 5, 7)]
    assert len(asked) == wanted
    assert set(asked) <= {(0, 2), (0, 6), (0, 8), (1, 3), (1, 4)}
    assert asked == sorted(asked), "client after client"


# --- a task, done again -----------------------------------------------------------------------------------------------


def task_of(monkeypatch, digests, *, policies=True, attempts=3, terms=None, secret=b"secret", store=None):
    """A rerun whose tasks give replies with these digests (None: no reply), one after the other, and all its tasks."""
    tasks, replies = [], iter(digests)

    def run_task(task):
        tasks.append(task)
        return SimpleNamespace(reply=next(replies))

    monkeypatch.setattr(rerun, "run_task", run_task)
    monkeypatch.setattr(rerun, "read_header", lambda reply: SimpleNamespace(digest=reply))
    monkeypatch.setattr(rerun, "encode", lambda record: f"bytes of {record}")
    monkeypatch.setattr(rerun, "task_key", lambda *of: of)
    setting = SimpleNamespace(model_dump_json=lambda: "a setting")
    world = SimpleNamespace(
        setting=SimpleNamespace(model_dump_json=setting.model_dump_json, aggregate="plain"), guarantee=None,
        policies={"logits": "policy"} if policies else {},
    )  # fmt: skip
    case = SimpleNamespace(attempts=attempts, run=SimpleNamespace(secret=secret), store=store, sums={})
    return _Rerun(case, world, terms or {}), tasks


def asked_of(readable=True):
    down = SimpleNamespace(client=3, round=5, ask=1, fn="update", record=lambda: "what was sent")
    return SimpleNamespace(down=down, up=SimpleNamespace(client=3, round=5, ask=1, digest="right"), readable=readable)


@pytest.mark.parametrize("secret", [b"secret", None])
def test_a_task_is_given_what_an_engine_gave_it(secret, monkeypatch):
    again, _ = task_of(monkeypatch, [], terms={(3, 5, 1): "terms", (5, 3, 1): "others"}, secret=secret)
    task = rerun._task(again, asked_of(), b"state", 2)
    assert (task.setting, task.fn, task.k, task.t, task.ask) == ("a setting", "update", 3, 5, 1)
    assert (task.state, task.message, task.attempt) == (b"state", "bytes of what was sent", 2)
    assert (task.noise, task.terms) == ((secret or b"", 3, 5, 1, 2), "terms")
    assert (task.drop, task.watch, task.here, task.followed, task.swap, task.replay) == (False,) * 4 + (None, None)


@pytest.mark.parametrize(
    ("digests", "policies", "attempts", "tried"),
    [
        (["right"], True, 3, [0]),
        (["wrong", "right"], True, 3, [0, 1]),
        ([None, "wrong", "wrong"], True, 3, [0, 1, 2]),
        (["wrong"], True, 1, [0]),
        (["wrong"], False, 3, [0]),  # without noise there is one attempt
    ],
)
def test_each_attempt_at_a_task_is_tried(digests, policies, attempts, tried, monkeypatch):
    again, tasks = task_of(monkeypatch, digests, policies=policies, attempts=attempts)
    assert rerun._done_as(again, asked_of(), b"state").reply == digests[-1]
    assert [task.attempt for task in tasks] == tried
    assert {task.state for task in tasks} == {b"state"}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("digests", "right"),
    [(["right"], True), (["wrong", "right"], True), ([None, "right"], True), ([None, "wrong"], False)],
)
def test_a_reply_from_the_first_or_the_last_state(digests, right, kept, monkeypatch):
    store = SimpleNamespace(client=lambda k: f"last state of {k}") if kept else None
    again, tasks = task_of(monkeypatch, digests, store=store)
    outcome = _Outcome(done=4, exact=2)
    assert rerun._from_any_state(again, asked_of(), outcome) is right
    assert [task.state for task in tasks] == [None, "last state of 3" if kept else None][: len(digests)]
    assert {task.attempt for task in tasks} == {0}
    assert (outcome.done, outcome.exact) == ((5, 3) if right else (4, 2))


def test_what_was_not_kept_comes_from_no_state(monkeypatch):
    again, tasks = task_of(monkeypatch, [])
    assert not rerun._from_any_state(again, asked_of(readable=False), _Outcome())
    again.case.sums[5, 1] = "a sum"
    again.world.setting.aggregate = "secure"
    assert not rerun._from_any_state(again, asked_of(), _Outcome()), "its terms are not known"
    assert tasks == []


def test_a_task_is_readable_where_every_field_of_both_messages_was_kept():
    def entry(fields, kept):
        return SimpleNamespace(fields=fields, kept=kept.__contains__, seq=7, client=3, round=5, fn="update")

    for down, up, readable in (("ab", "c", True), ("a", "c", False), ("ab", "", False)):
        asked = rerun.Asked(entry(["a", "b"], down), entry(["c"], up))
        assert asked.readable is readable
    assert asked.where == "row 7: client 3, round 5, update"


@pytest.mark.parametrize(
    ("readable", "lacks", "words"),
    [(False, False, "what was sent in round 2 was not kept"), (True, True, "the server's round 2 was not done again")],
)
def test_a_chain_ends_where_a_task_cannot_be_done_again(readable, lacks, words, monkeypatch):
    """Under policies tasks are done in order from the first; the second of three cannot be, and two are wanted."""
    tasks = [
        SimpleNamespace(up=SimpleNamespace(seq=i), down=SimpleNamespace(round=i), readable=readable or i != 2)
        for i in (1, 2, 3)
    ]
    done, bills = [], []
    again = SimpleNamespace(
        case="case", world=SimpleNamespace(policies={"logits": 1}), why_not="",
        lacks_terms=lambda asked: lacks and asked.up.seq == 2,
    )  # fmt: skip

    def do(again, asked, state):
        done.append((asked.up.seq, state))
        return SimpleNamespace(state=b"after", reply=b"reply")

    monkeypatch.setattr(rerun, "_done_as", do)
    monkeypatch.setattr(rerun, "_compare", lambda *of: None)
    monkeypatch.setattr(rerun, "_billed", lambda again, asked, done: f"bill of {asked.up.seq}")
    monkeypatch.setattr(rerun, "_compare_bill", lambda case, asked, bill: bills.append(bill))
    outcome = _Outcome()
    rerun._rerun_client(again, tasks, {1, 3}, outcome)
    assert (done, bills) == ([(1, None)], ["bill of 1"])
    assert (outcome.done, outcome.unreadable) == (1, 1)
    assert [text.startswith(words) for text in outcome.reasons] == [True]


@pytest.mark.parametrize(
    ("policies", "reply", "state", "tried", "bills"),
    [
        (True, b"reply", b"after", [(1, None), (2, b"after"), (3, b"after")], [2, 3]),
        (False, b"reply", b"after", [(1, None), (2, b"after"), (3, b"after")], []),
        (True, None, b"after", [(1, None), (2, b"after"), (3, b"after")], []),
        (True, b"reply", None, [(1, None)], []),  # a client that has no state cannot be followed
    ],
)
def test_a_client_goes_on_from_the_state_before(policies, reply, state, tried, bills, monkeypatch):
    tasks = [
        SimpleNamespace(up=SimpleNamespace(seq=i), down=SimpleNamespace(round=i), readable=True) for i in (1, 2, 3, 4)
    ]
    done, billed = [], []
    again = SimpleNamespace(
        case="case", world=SimpleNamespace(policies={"logits": 1} if policies else {}), why_not="",
        lacks_terms=lambda asked: False,
    )  # fmt: skip

    def do(again, asked, state_):
        done.append((asked.up.seq, state_))
        return SimpleNamespace(state=state, reply=reply)

    monkeypatch.setattr(rerun, "_from_any_state", lambda *of: False)
    monkeypatch.setattr(rerun, "_done_as", do)
    monkeypatch.setattr(rerun, "_compare", lambda *of: None)
    monkeypatch.setattr(rerun, "_billed", lambda again, asked, done: asked.up.seq)
    monkeypatch.setattr(rerun, "_compare_bill", lambda case, asked, bill: billed.append(bill))
    outcome = _Outcome()
    rerun._rerun_client(again, tasks, {2, 3}, outcome)
    assert (done, billed) == (tried, bills)
    assert outcome.done == len([seq for seq, _ in tried if seq in (2, 3)])


def test_a_client_of_whom_nothing_can_be_done_again_says_why():
    again = SimpleNamespace(case="case", world=None, why_not="no key")
    outcome = _Outcome(unreadable=1, reasons=["another"])
    rerun._rerun_client(again, [SimpleNamespace(up=SimpleNamespace(seq=4))], {4, 9}, outcome)
    assert (outcome.unreadable, outcome.reasons) == (3, ["another", "no key"])


def test_nothing_is_done_at_first():
    assert vars(_Outcome()) == {"done": 0, "exact": 0, "largest": 0.0, "unreadable": 0, "wrong": 0, "reasons": []}
