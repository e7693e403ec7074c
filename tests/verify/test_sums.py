"""Sums of clients, held against rows by hand: terms, divisors, noise and what they cost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.privacy.ledger import ClientLedger, LedgerEntry
from fedaudit.privacy.update_policy import UpdatePolicy
from fedaudit.privacy.updates import Guarantee
from fedaudit.runtime.run_record import SumRecord
from fedaudit.verify import sums
from fedaudit.verify.finding import Findings
from fedaudit.verify.sum_rows import SumRows

LEVELS = (2**31 - 1) // 4  # of a ring in which 4 clients are summed


class Row(dict):
    """A message of a phase: its fields by name, and its place in the index."""

    seq = 9


def secure_rows(**terms):
    """Clients 1, 2, 5 and 7 are invited, three share keys, 1 and 5 stay, and one of them helps to unmask."""
    invited = {k: Row({"clients": 4, "threshold": 0.5, "bound": 2.0, "largest": 1.0} | terms) for k in (1, 2, 5, 7)}
    near = {1: [2, 5, 7], 2: [1, 5], 5: [1, 2]}
    total = SimpleNamespace(message="Local", fields={}, row={"tree": {"r": ["Local", {}]}})
    return SumRows(
        3, 1, total,
        asked={1: (SimpleNamespace(fn="update"), "up"), 2: (SimpleNamespace(fn="update"), None),
               5: (SimpleNamespace(fn="update"), "up")},
        phases={
            "advertise": {k: (down, None if k == 7 else "up") for k, down in invited.items()},
            "share": {k: ({"ids": SimpleNamespace(tolist=lambda ids=ids: ids)}, "up") for k, ids in near.items()},
            "unmask": {1: ("down", "up"), 5: ("down", None)},
        },
    )  # fmt: skip


def case_of(**facts):
    setting = {"aggregate": "secure", "threshold": 0.5, "participation": 0.25, "clients": 20, "update_bound": 2.0}
    setting = SimpleNamespace(**(setting | {name: facts.pop(name) for name in list(facts) if name in setting}))
    record = SimpleNamespace(setting=setting, data=SimpleNamespace(members=[3, 30, 8]), **facts)
    return SimpleNamespace(found=Findings(), record=record, sums={})


def guarantee(where="server", poisson=False, rate=0.25, **policy):
    made = UpdatePolicy(**({"noise_multiplier": 2.0, "clip": 1.5, "where": where, "delta": 1e-5} | policy))
    return Guarantee(made, clients=20, rounds=4, rate=rate, poisson=poisson)


def test_a_secure_sum_from_its_rows():
    """Two clients stayed. The step of the ring is bound x largest / levels, and half of it for each is the error."""
    found = sums._record(case_of(), None, secure_rows(largest=3.0), None)
    assert found.model_dump(exclude_none=True) == {
        "ask": 1, "fn": "update", "invited": 4, "stayed": 2, "divisor": 2.0, "secure": True, "advertised": 3,
        "shared": 3, "helped": 1, "neighbours": 3, "threshold": 2, "bound": 2.0,
        "error": pytest.approx(2 * (2.0 * 3.0 / LEVELS) / (2 * 2.0)),
    }  # fmt: skip
    noised = sums._record(case_of(), guarantee(), secure_rows(), None)
    assert noised.divisor == 4.0, "the public number of those invited"
    assert noised.error == pytest.approx(2 * (2.0 / LEVELS) / (2 * 4.0))
    assert (noised.clip, noised.sigma, noised.where, noised.within) == (1.5, 3.0, "server", None)


def plain_rows(**numbers):
    fields = dict.fromkeys(numbers, SimpleNamespace(role="private", kind="weights"))
    total = SimpleNamespace(message="Local", fields=fields, row={"tree": {"r": ["Local", dict(numbers)]}})
    asked = {k: (SimpleNamespace(fn="update"), None if k == 4 else "up") for k in (0, 4, 6)}
    return SumRows(2, 0, total, asked=asked)


@pytest.mark.parametrize(
    ("said", "divisor"),
    [(None, 2.0), (2.0, 2.0), (41.0, 41.0), (40.0, 2.0)],  # 41 records are the sum of the weights; 40 are nobody's
)
def test_a_sum_is_divided_by_its_weights_or_by_who_stayed(said, divisor):
    rows = plain_rows(w=["a tensor"], n=41)
    one = None if said is None else SumRecord(ask=0, fn="update", invited=3, stayed=2, divisor=said)
    assert sums._record(case_of(aggregate="plain"), None, rows, one).divisor == divisor


def test_numbers_of_a_sum():
    assert sums._numbers(plain_rows(w=["a tensor"], n=41, m=2.5)) == {41.0, 2.5}
    rows = plain_rows(n=41)
    rows.total = None
    assert sums._numbers(rows) == set()


@pytest.mark.parametrize(("poisson", "participation", "divisor"), [(False, 0.25, 3), (True, 0.25, 5), (True, 0.01, 1)])
def test_a_noised_sum_is_divided_by_a_public_number(poisson, participation, divisor):
    """Three are invited. Drawn by Poisson, a quarter of 20 clients is expected; a divisor below one would be none."""
    case = case_of(aggregate="plain", participation=participation)
    assert sums._record(case, guarantee(poisson=poisson), plain_rows(n=41), None).divisor == divisor


def test_votes_on_the_clip_are_the_authors_word_here():
    said = SumRecord(ask=0, fn="update", invited=3, stayed=2, divisor=3.0, within=0.625)
    case = case_of(aggregate="plain")
    assert sums._record(case, guarantee(quantile=0.5), plain_rows(n=4), said).within == 0.625
    assert sums._record(case, guarantee(quantile=0.5), plain_rows(n=4), None).within is None
    assert sums._record(case, guarantee(), plain_rows(n=4), said).within is None, "nobody votes"


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ({}, None),
        ({"largest": 30.0}, None),  # the method weighs by n, and the largest client has 30
        ({"largest": 8.0}, "Invited.largest"),
        ({"clients": 3}, "Invited.clients"),
        ({"threshold": 0.4}, "Invited.threshold"),
        ({"bound": 2.5}, "Invited.bound"),
        ({"bound": 2.0 * (1 + 1e-12)}, None),
    ],
)
def test_clients_are_invited_on_the_terms_of_the_setting(terms, named):
    case = case_of()
    assert sums._check_invitations(case, None, [secure_rows(), secure_rows(**terms)]) is (named is not None)
    assert [one.field for one in case.found.list] == ([] if named is None else [f"row 9: to client 1, {named}"])


def test_under_a_guarantee_all_weigh_the_same():
    assert sums._weights(case_of(), guarantee()) == {1.0}
    assert sums._weights(case_of(), None) == {1.0, 30.0}
    case = case_of()
    assert sums._check_invitations(case, guarantee(), [secure_rows(bound=1.5, largest=30.0)])
    assert [(one.field, one.recomputed) for one in case.found.list] == [("row 9: to client 1, Invited.largest", 1.0)]


@pytest.mark.parametrize(("aggregate", "rows"), [("plain", secure_rows()), ("secure", plain_rows(n=1))])
def test_sums_are_made_as_the_setting_says(aggregate, rows):
    case = case_of(aggregate=aggregate)
    assert sums._check_invitations(case, None, [rows])
    (found,) = case.found.list
    assert (found.field, found.recomputed) == (f"round {rows.t}, ask {rows.ask}", aggregate)


def test_the_sum_before_another():
    """Round 1 has two sums, round 2 none, round 3 those of asks 0, 2 and 5."""
    one, two, three, four, five = (
        SumRecord(ask=ask, fn="f", invited=1, stayed=1, divisor=float(i)) for i, ask in enumerate((0, 1, 0, 2, 5))
    )
    rounds = [
        SimpleNamespace(round=t, sums=of) for t, of in ((1, [one, two]), (2, []), (3, [three, four, five]))
    ]  # fmt: skip
    case = case_of(rounds=rounds)

    def before(t, ask):
        return sums._before(case, SimpleNamespace(t=t, ask=ask))

    assert before(1, 0) is None
    assert before(1, 1) is one
    assert before(3, 0) is two
    assert before(3, 2) is three
    assert before(3, 5) is four
    assert before(4, 0) is five


def test_the_entry_of_a_sum_has_its_kind_and_its_grid():
    rows = plain_rows(n=1)
    rows.total.fields = {
        "n": SimpleNamespace(role="private", kind="count"), "z": SimpleNamespace(role=None, kind="labels"),
        "w": SimpleNamespace(role="private", kind="weights"), "g": SimpleNamespace(role="private", kind="gradients"),
    }  # fmt: skip
    plain = sums._entry(case_of(), guarantee(), rows)
    assert (plain.field, plain.kind, plain.grid) == ("Local (update)", "gradients", None)
    secure = secure_rows()
    made = sums._entry(case_of(), guarantee(), secure)
    assert (made.kind, made.grid) == ("weights", pytest.approx(1.5 / LEVELS))  # the bound of what travels is the clip


def entry(**facts):
    return LedgerEntry(
        **({"field": "Local (update)", "kind": "weights", "mechanism": "gaussian", "noise_multiplier": 2.0,
            "relation": "zero-out", "sigma": 3.0, "rounds": [1, 2]} | facts)
    )  # fmt: skip


def test_the_first_entries_that_differ():
    a, b, c = entry(), entry(sigma=3.0 * (1 + 1e-12)), entry(sigma=3.1)
    assert sums._first_apart([a, a], [a, b]) is None
    assert sums._first_apart([a, a, c], [a, c, a]) == (a, c)
    assert sums._first_apart([a, a], [a]) == (a, None)
    assert sums._first_apart([a], [a, c]) == (None, c)
    assert not sums._alike(entry().model_dump(), entry(rounds=[1, 3]).model_dump())
    assert not sums._alike(entry().model_dump(), entry(sigma=0.0).model_dump())
    assert sums._alike(entry(sigma=0.0).model_dump(), entry(sigma=0.0).model_dump())


@pytest.mark.parametrize("poisson", [False, True])
def test_what_sums_cost_each_client(poisson, monkeypatch):
    """Two rounds: clients 0, 4 and 6 are in the first, 0 and 4 in the second. Amplified, each round costs all five."""
    terms = Guarantee(guarantee().policy, clients=5, rounds=2, rate=0.5, poisson=poisson)
    first, second = plain_rows(n=1), plain_rows(n=1)
    second.t, second.asked = 3, {k: pair for k, pair in second.asked.items() if k != 6}
    here = case_of(aggregate="plain", participation=0.5, clients=5, rounds=[])
    here.sums = {(2, 0): first, (3, 0): second}
    one = sums._entry(here, terms, first)
    of = {0: [2, 3], 4: [2, 3], 6: [2]} if not poisson else {k: [2, 3] for k in range(5)}

    def ledger(k, rounds):
        made = ClientLedger(client=k, n=9, delta=1e-5)
        made.add(LedgerEntry.free("Local.n", "count", "public"), 2)
        for t in rounds:
            made.add(one, t)
        return made

    here.record.ledger = [ledger(k, rounds) for k, rounds in of.items()]
    assert sums.check_update_entries(here, terms) == []
    last = max(of)
    here.record.ledger[-1] = ledger(last, [3])
    ((at, said, now),) = sums.check_update_entries(here, terms)
    assert at == f"ledger of client {last}, Local (update)"
    assert said.startswith("1 rounds [3]")
    assert now.startswith(f"{len(of[last])} rounds {of[last]}")
    here.record.ledger.pop()
    assert [row[:2] for row in sums.check_update_entries(here, terms)] == [(f"ledger of client {last}", "nothing")]
    second.total = None
    assert sums.check_update_entries(here, terms) == [("round 3, ask 0", "no sum", "the sum of the replies")]


@pytest.mark.parametrize("aggregate", ["secure", "plain"])
@pytest.mark.parametrize("fields", [{}, {"w": "facts"}])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_secure_run_without_sums_sent_nothing(aggregate, fields, direction):
    """Local training sends messages without a field."""
    case = case_of(aggregate=aggregate, rounds=[SimpleNamespace(sums=[])])
    case.transcript = SimpleNamespace(entries=lambda: [SimpleNamespace(direction=direction, fields=fields)])
    sums.check_sums_of_clients(case)
    wrong = aggregate == "secure" and fields and direction == "up"
    assert [one.verdict for one in case.found.list] == (["contradicted"] if wrong else [])


@pytest.mark.parametrize("bound", [False, True])
def test_the_sums_of_a_round_are_held_against_its_record(bound, monkeypatch):
    """The clip of each follows from the sum before: of the first that of an earlier round. The second's is told."""
    asked = []

    def record(case, terms, of, said):
        asked.append((terms, of.ask, said and said.divisor))
        return SumRecord(ask=of.ask, fn="f", invited=9, stayed=4, divisor=4.0)

    monkeypatch.setattr(sums, "_record", record)
    monkeypatch.setattr(sums, "last_sum", lambda rows: f"last of {[row.round for row in rows]}")
    monkeypatch.setattr(sums, "at_the_clip", lambda terms, last: (terms, getattr(last, "divisor", last)))

    def said(ask, divisor):
        return SumRecord(ask=ask, fn="f", invited=9, stayed=4, divisor=divisor, cut_off=5)

    rows = [SumRows(3, 0), SumRows(3, 1)]
    rounds = [SimpleNamespace(round=t, sums=[]) for t in (1, 2)]
    here = SimpleNamespace(round=3, sums=[said(0, 4.0 * (1 + 1e-12)), said(1, 4.5)])
    case = case_of(rounds=[*rounds, here])
    terms = "terms" if bound else None
    assert sums._check_round(case, terms, 2, here, rows) is True
    assert [(one.field, one.recorded, one.recomputed) for one in case.found.list] == [
        ("rounds.2.sums.1.divisor", 4.5, 4.0)
    ]
    of_first, of_second = (("terms", "last of [1, 2]"), ("terms", 4.0 * (1 + 1e-12))) if bound else (None, None)
    assert asked == [(of_first, 0, 4.0 * (1 + 1e-12)), (of_second, 1, 4.5)]
    here.sums.pop()
    case.found.list.clear()
    assert sums._check_round(case, terms, 2, here, rows) is True, "one is missing in the record"
    assert asked[-1][2] is None
    here.sums.append(said(1, 4.0))
    case.found.list.clear()
    case.found.word("before", "kept")
    assert sums._check_round(case, terms, 2, here, rows) is False
    assert [one.figure for one in case.found.list] == ["before"], "one finding tells of all rounds"


@pytest.mark.parametrize("wrong", ["", "invitations", "round"])
def test_each_round_is_looked_at_with_its_own_sums(wrong, monkeypatch):
    looked = []
    monkeypatch.setattr(sums, "guarantee_of", lambda setting: "guarantee")

    def invitations(case, terms, rows):
        looked.append((terms, [(of.t, of.ask) for of in rows]))
        return wrong == "invitations" and len(looked) == 1

    def of_round(case, terms, i, row, rows):
        looked.append((terms, i, row.round, [(of.t, of.ask) for of in rows]))
        return wrong == "round" and i == 0

    monkeypatch.setattr(sums, "_check_invitations", invitations)
    monkeypatch.setattr(sums, "_check_round", of_round)
    case = case_of(rounds=[SimpleNamespace(round=t, sums=[]) for t in (2, 3)])
    case.sums = {(t, ask): SumRows(t, ask) for t, ask in ((3, 0), (2, 1), (2, 0))}
    sums.check_sums_of_clients(case)
    first, second = [(2, 0), (2, 1)], [(3, 0)]
    assert looked == [
        ("guarantee", first),
        ("guarantee", 0, 2, first),
        ("guarantee", second),
        ("guarantee", 1, 3, second),
    ]
    found = [(one.verdict, one.figure, one.reason.partition(":")[0]) for one in case.found.list]
    assert found == (
        []
        if wrong
        else [
            ("recomputed", "sums of clients", "3 sums"),
            ("the author's word", "numbers cut off in sums", "only the clients saw them"),
        ]
    )


def test_sums_of_a_record_whose_rows_are_gone_are_looked_at_too(monkeypatch):
    """There are no rows, and the record has a sum. Rows that no run leaves are a contradiction."""
    monkeypatch.setattr(sums, "guarantee_of", lambda setting: None)
    said = SumRecord(ask=0, fn="f", invited=1, stayed=1, divisor=1.0)
    case = case_of(rounds=[SimpleNamespace(round=1, sums=[]), SimpleNamespace(round=2, sums=[said])])
    sums.check_sums_of_clients(case)
    assert [(one.verdict, one.field) for one in case.found.list] == [("contradicted", "rounds.1.sums")]

    def broken(*of):
        raise KeyError("x" * 400)

    monkeypatch.setattr(sums, "_check_round", broken)
    case.found.list.clear()
    sums.check_sums_of_clients(case)
    ((verdict, now),) = [(one.verdict, one.recomputed) for one in case.found.list]
    assert (verdict, now[:12]) == ("contradicted", "KeyError: 'x")
