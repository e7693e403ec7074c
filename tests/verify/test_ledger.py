"""A ledger, held against a transcript and policies by hand; and how often an accountant is called for it."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from fedaudit.privacy import dpsgd, ledger
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.privacy.ledger import ClientLedger, LedgerEntry, Total
from fedaudit.privacy.policy import Policy
from fedaudit.runtime.run_record import read_record
from fedaudit.verify import ledger as checks
from fedaudit.verify.case import Case
from fedaudit.verify.finding import Findings
from fedaudit.verify.ledger import check_totals
from fedaudit.wire.release import Protection, Sent


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of an accountant."""
    seen = []
    for module in (ledger, dpsgd):
        real = module.compose

        def counted(*args, _real=real, **named):
            seen.append((args, named))
            return _real(*args, **named)

        monkeypatch.setattr(module, "compose", counted)
    return seen


def test_clients_with_equal_entries_share_their_totals(honest, calls):
    record = read_record(honest / "trained")
    first = record.ledger[0]
    record.ledger = [first.model_copy(deep=True, update={"client": k}) for k in range(20)]
    case = Case(honest / "trained", record)
    check_totals(case)
    assert not [f for f in case.found.list if f.verdict == "contradicted"]
    assert len(calls) == len(first.by_kind) + len(first.by_relation)


def test_a_shared_total_accuses_the_client_whose_figure_is_another(honest):
    record = read_record(honest / "trained")
    record.ledger = [record.ledger[0].model_copy(deep=True, update={"client": k}) for k in range(3)]
    record.ledger[2].epsilon /= 2
    case = Case(honest / "trained", record)
    check_totals(case)
    (wrong,) = [f for f in case.found.list if f.verdict == "contradicted"]
    assert wrong.field == "ledger.2.epsilon"


def test_gates_leave_out_accountants_that_they_do_not_need(honest, calls):
    case = Case(honest / "trained", read_record(honest / "trained"))
    check_totals(case, compare=False)
    assert not any(named["compare"] for _, named in calls)


def test_a_multiplier_is_recognised_by_two_calls(calls):
    """epsilon = 8 over 40 steps at a rate of 0.1, as a run with DP-SGD calibrates it."""
    terms = (8.0, 1e-3, 0.1, 40)
    found = dpsgd.multiplier_for(*terms)
    calls.clear()
    assert dpsgd.is_multiplier_for(found, *terms)
    assert len(calls) <= 2
    assert not dpsgd.is_multiplier_for(found * 0.99, *terms)
    assert not dpsgd.is_multiplier_for(found * 1.01, *terms)
    assert math.isclose(found, dpsgd.multiplier_for(*terms))


# --- by hand ---------------------------------------------------------------------------------------------------------


def entry(**facts):
    base = {"field": "Local.z", "kind": "logits", "mechanism": "gaussian", "noise_multiplier": 2.0,
            "relation": "replace-one", "rounds": [1, 2]}  # fmt: skip
    return LedgerEntry(**(base | facts))


def client(k=0, entries=(), n=50, delta=1e-3, **facts):
    return ClientLedger(client=k, n=n, delta=delta, entries=list(entries), **facts)


def made(ledgers=(), **facts):
    setting = {"privacy": {"logits": {}}, "rounds": 4, "start": None, "clients": 3}
    setting |= {name: facts.pop(name) for name in list(facts) if name in setting}
    record = SimpleNamespace(ledger=list(ledgers), setting=SimpleNamespace(**setting), data=SimpleNamespace(classes=10))
    return SimpleNamespace(found=Findings(), record=record, **facts)


def wrong(case):
    return [(one.field, one.recorded, one.recomputed) for one in case.found.list if one.verdict == "contradicted"]


def test_five_contradictions_of_each_figure_are_told():
    case = made()
    for i in range(7):
        checks._wrong(case, "one", f"field {i}", 0, 1)
    checks._wrong(case, "two", "field", 0, 1)
    case.found.recomputed("three")
    assert [one.figure for one in case.found.list] == ["one"] * 5 + ["two", "three"]
    checks._noted(case, "two", "why")
    checks._noted(case, "three", "why")
    checks._noted(case, "four", "why")
    assert [one.figure for one in case.found.list[7:]] == ["three", "four"]


def test_all_epsilons_of_a_ledger_by_their_places():
    of = client(
        epsilon=3.0, claim=1.0, by_kind={"logits": 2.0, "labels": 1.5},
        by_relation={"replace-one": Total(epsilon=2.5, accountant="prv", by_accountant={"prv": 2.5, "rdp": 2.75})},
    )  # fmt: skip
    known = {"epsilon": 3.0, "claim": 1.0, "by_kind.logits": 2.0, "by_kind.labels": 1.5,
             "by_relation.replace-one.epsilon": 2.5}  # fmt: skip
    assert checks._epsilons(of, False) == known
    place = "by_relation.replace-one.by_accountant"
    assert checks._epsilons(of, True) == known | {f"{place}.prv": 2.5, f"{place}.rdp": 2.75}


def row(way, k, t, ask=0, **fields):
    facts = {name: Sent(role=role, kind=kind) for name, (role, kind) in fields.items()}
    values = {name: None if name == "empty" else 1 for name in fields}
    message = "Local" if way == "up" else "Global"
    return SimpleNamespace(
        direction=way, client=k, round=t, ask=ask, message=message, fields=facts, row={"tree": {"r": ["x", values]}}
    )


@pytest.mark.parametrize("protected", [True, False])
def test_what_clients_sent_and_what_was_relayed(protected):
    """Ask 1 of round 2 is a sum of client 0 and 1. A field without a value is no release."""
    entries = [
        row("down", 0, 1, w=("public", None), p=("relay", "logits")), row("down", 1, 3, p=("relay", None)),
        row("up", 0, 1, z=("private", "logits"), n=("public", None), empty=("private", "labels")),
        row("up", 0, 1, z=("private", "logits")), row("up", 1, 2, 1, z=("private", "logits")),
    ]  # fmt: skip
    total = row("up", -1, 2, 1, w=("private", "weights"))
    of = SimpleNamespace(secure=True, total=total, stayed=[0, 1])
    open_sum = SimpleNamespace(secure=False, total=total, stayed=[0])
    case = made(privacy={"updates": {}} if protected else {}, sums={(2, 1): of, (3, 0): open_sum})
    case.transcript = SimpleNamespace(entries=lambda: entries)
    clients, relayed = checks._read(case)
    assert relayed == {("logits", 0, 1)}
    assert {k: found.rounds for k, found in clients.items()} == {0: {1}, 1: {3, 2}}
    summed = {} if protected else {("Local.w", 2): 1}
    assert dict(clients[0].sent) == {("Local.z", 1): 2} | summed
    assert dict(clients[1].sent) == ({} if protected else {("Local.z", 2): 1}) | summed
    assert set(clients[0].facts) == {"Local.z", "Local.empty", "Local.w"}


@pytest.mark.parametrize(
    ("rounds", "sent", "taken_over", "field", "named"),
    [
        ([1, 2], {1: 1, 2: 1}, False, "Local.z", []),
        ([1, 2], {1: 1, 2: 2}, False, "Local.z", ["Local.z, round 2"]),  # one of two releases is not billed
        ([1, 2, 2], {1: 1, 2: 2}, False, "Local.z", []),
        ([1, 2, 2], {1: 1, 2: 1}, False, "Local.z", []),  # more than it had to
        ([1, 3], {1: 1}, False, "Local.z", ["Local.z"]),  # it was not asked in round 3
        ([1, 4], {1: 1}, False, "Local.z", []),  # it may be billed at the end
        ([1, 3], {1: 1}, True, "Local.z", []),  # the run before asked it
        ([1, 3], {}, False, "Local (update)", []),  # another check knows the rounds of sums
    ],
)
def test_each_release_has_an_entry(rounds, sent, taken_over, field, named):
    case = made()
    of = checks._Client(rounds={1, 2})
    of.sent.update({("Local.z", t): number for t, number in sent.items()})
    checks._check_entries(case, client(2, [entry(field=field, rounds=rounds)]), of, taken_over)
    assert [place for place, *_ in wrong(case)] == [f"ledger of client 2, {name}" for name in named]


def test_the_protection_that_travelled_is_that_of_the_entry():
    case, of = made(), checks._Client(rounds={1, 2})
    first, second = entry(rounds=[1], sigma=3.0), entry(rounds=[2], sigma=4.0)
    for t, protection in ((1, first.public()), (2, second.public()), (2, None)):
        of.sent["Local.z", t] = 1
        of.protection["Local.z", t].append(protection)
    checks._check_entries(case, client(0, [first, second]), of, False)
    assert wrong(case) == []
    of.protection["Local.z", 2].append(first.public())  # that of another round
    checks._check_entries(case, client(0, [first, second]), of, False)
    assert wrong(case) == [("ledger of client 0, Local.z, round 2", str(second.public()), str(first.public()))]
    assert isinstance(first.public(), Protection)


@pytest.mark.parametrize(
    ("facts", "sent", "policies", "said"),
    [
        ({"noise_multiplier": 0.0}, {}, {}, None),  # all of it is billed
        ({}, {}, {"logits": {}}, None),  # held against its policy elsewhere
        ({}, {}, {}, "noise x 2"),
        ({"noise_multiplier": math.inf}, {"via": "data"}, {}, "free"),
        ({"noise_multiplier": math.inf}, {"via": "released"}, {}, None),
        ({"noise_multiplier": 3.0}, {"via": "released"}, {}, "noise x 3"),
        ({"noise_multiplier": math.inf}, {"via": "model"}, {}, "free"),
        ({"noise_multiplier": math.inf}, {"via": "model"}, {"training": {}}, None),
        ({"noise_multiplier": math.inf}, {"via": "data"}, {"training": {}}, "free"),
        ({"noise_multiplier": math.inf, "kind": "count"}, {"kind": "count"}, {}, None),
        ({"kind": "labels", "noise_multiplier": 0.0}, {}, {}, "labels"),  # another kind than was declared
    ],
)
def test_what_may_cost_nothing(facts, sent, policies, said):
    case = made(privacy=policies)
    checks._check_free(case, "place", "Local.z", Sent(**({"role": "private", "kind": "logits"} | sent)), entry(**facts))
    now = "logits" if said == "labels" else "epsilon infinity"
    assert wrong(case) == ([] if said is None else [("place, Local.z", said, now)])


@pytest.mark.parametrize(
    ("observers", "start", "named"),
    [
        ({"logits": ["server", "client 2"], "training": []}, None, None),
        ({"logits": ["server"], "training": []}, None, ("server", "client 2, server")),
        ({"logits": ["server"], "training": []}, "another run", None),
        ({"logits": ["server", "client 1", "client 2"], "training": []}, None,
         ("client 1, client 2, server", "client 2, server")),
        ({"training": []}, None, ("nobody", "client 2, server")),
        ({"logits": ["server"], "training": ["server"]}, None, ("server", "client 2, server")),  # of two the first
    ],
)  # fmt: skip
def test_who_saw_what_was_relayed(observers, start, named):
    """The logits are first sent in round 2. Client 1 got them in round 1, client 2 in round 2; 0 is their own."""
    entries = [entry(rounds=[3]), entry(rounds=[2, 4], sigma=1.0), entry(kind="training", rounds=[1])]
    case = made([client(0, entries, observers=observers)], start=start)
    relayed = {("logits", 1, 1), ("logits", 2, 2), ("logits", 0, 3), ("labels", 1, 3), ("training", 1, 3)}
    checks._check_observers(case, relayed)
    assert wrong(case) == ([] if named is None else [("ledger.0.observers.logits", *named)])


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, []),
        ({"noise_multiplier": 2.0 * (1 + 1e-4)}, []),  # found by a search
        ({"noise_multiplier": 2.1}, [("noise_multiplier", 2.1, 2.0)]),
        ({"unit": "client"}, [("unit", "client", "record")]),
        ({"delta": 1e-4}, [("delta", 1e-4, 1e-3)]),
        ({"claim": None}, [("claim", None, 1.0)]),
        ({"noise_multiplier": 0.0, "delta": 1e-4}, []),
        ({"noise_multiplier": math.inf, "delta": 1e-4}, []),
        ({"kind": "labels", "delta": 1e-4}, []),  # no policy
        ({"field": "Local (update)", "delta": 1e-4}, []),  # of a sum
    ],
)
def test_noise_is_what_the_policy_asks_for(facts, named, monkeypatch):
    wanted = {"noise_multiplier": 2.0, "delta": 1e-3, "claim": 1.0}
    monkeypatch.setattr(checks, "_wanted", lambda *of: wanted)
    entries = [entry(field="Local.n", kind="count"), entry(**({"delta": 1e-3, "claim": 1.0} | facts))]
    world = SimpleNamespace(policies={"logits": Policy(epsilon=1.0)})
    case = made([client(0), client(1, entries)], world=world)
    checks._check_noise(case)
    assert wrong(case) == [(f"ledger.1.entries.1.{name}", said, now) for name, said, now in named]
    assert any(one.verdict == "recomputed" for one in case.found.list) is not bool(named)


def test_noise_without_a_formula_is_the_authors_word(monkeypatch):
    monkeypatch.setattr(checks, "_wanted", lambda *of: {})
    case = made([client(0, [entry()])], world=SimpleNamespace(policies={"logits": Policy(epsilon=1.0)}))
    checks._check_noise(case)
    assert [one.verdict for one in case.found.list] == ["the author's word", "recomputed"]
    assert case.found.list[0].reason.startswith("gaussian:")
    case = made([client(0, [entry()])], world=SimpleNamespace(policies={}))
    checks._check_noise(case)
    assert case.found.list == []


def test_what_a_policy_asks_of_private_training(monkeypatch):
    """epsilon = 8 over 4 rounds of 10 steps, or over the 2 trainings that the policy states."""
    seen = []

    def search(said, *terms):
        seen.append(terms)
        return 1.25

    monkeypatch.setattr(checks, "_for_training", search)
    of = client(0, n=100)
    one = entry(kind="training", mechanism="dp-sgd", steps=10, sample_rate=0.1, clip=0.5, sigma=3.0, sensitivity=1.5)

    def wanted(one=one, **policy):
        made_of = {"mechanism": "dp-sgd", "epsilon": 8.0, "delta": 1e-5, "sensitivity": "clip:0.5"} | policy
        return checks._wanted(made(), Policy(**made_of), one, of)

    assert wanted() == {"claim": 8.0, "delta": 1e-5, "clip": 0.5, "sigma": 2.0 * 1.5, "noise_multiplier": 1.25}
    assert wanted(releases=2)["noise_multiplier"] == 1.25
    assert seen == [(8.0, 1e-5, 0.1, 40), (8.0, 1e-5, 0.1, 20)]
    assert wanted(epsilon=None, noise_multiplier=0.75)["noise_multiplier"] == 0.75
    assert wanted(delta="1/n")["delta"] == 0.01
    bare = entry(kind="training", mechanism="dp-sgd", steps=10, sample_rate=0.1)
    assert wanted(bare).keys() == {"claim", "delta", "noise_multiplier"}
    monkeypatch.setattr(checks, "_for_training", lambda *of: None)
    assert "noise_multiplier" not in wanted()


@pytest.mark.parametrize(
    ("calibration", "stated", "world", "releases"),
    [("analytic", 7, 5, 1), ("total", 7, 5, 7), ("total", None, 5, 5), ("total", None, None, None)],
)
def test_how_many_releases_noise_is_calibrated_for(calibration, stated, world, releases, monkeypatch):
    asked = []
    how = SimpleNamespace(trains=False, follows=lambda *of: asked.append(of) or {"delta": 1.0})
    monkeypatch.setattr(checks, "mechanism_of", lambda policy: how)
    policy = SimpleNamespace(calibration=calibration, releases=stated)
    case = made(world=None if world is None else SimpleNamespace(releases=lambda kind: world))
    one, of = entry(), client(0, n=100)
    assert checks._wanted(case, policy, one, of) == {"delta": 1.0}
    assert asked == [(one, policy, 100, 10, releases)]


@pytest.mark.parametrize(
    ("change", "start", "foreign", "named"),
    [
        ({}, None, False, []),
        ({"n": 51}, None, False, [("ledger.0.n", 51, 50)]),
        ({"delta": 2e-3}, None, False, [("ledger.0.delta", 2e-3, 1e-3)]),
        ({"n": 51}, "another run", False, []),
        ({"n": 51}, None, True, []),
        ({"k": 3}, None, False, [("ledger.0.client", 3, "no such client")]),
        ({"k": -1}, None, False, [("ledger.0.client", -1, "no such client")]),
    ],
)
def test_records_and_delta_of_each_client(change, start, foreign, named):
    """Client k has 50 + 5 k records. The smallest of three deltas counts, one of them that of the sums."""
    policies = {"logits": Policy(epsilon=1.0, delta="1/n"), "labels": Policy(epsilon=1.0, delta=2e-3)}
    world = SimpleNamespace(
        count=lambda k: 50 + 5 * k, policies=policies, guarantee=SimpleNamespace(delta=1e-3)
    )  # fmt: skip
    case = made([client(**change), client(2, n=60)], start=start, world=world, foreign_transport=foreign)
    checks._check_sizes(case)
    assert wrong(case) == named
    world.guarantee, world.policies = None, {}
    case = made([client(delta=0.02), client(2, n=60, delta=1 / 60)], world=world, foreign_transport=False)
    checks._check_sizes(case)
    assert wrong(case) == []


def test_without_a_world_sizes_are_the_authors_word():
    case = made([client()], world=None, why_no_world="no data")
    checks._check_sizes(case)
    assert [one.reason for one in case.found.list] == ["no data"]


@pytest.mark.parametrize(("spent", "named"), [(3, []), (2, [("ledger.1.entries (training)", 3, 2)])])
def test_private_trainings_are_those_that_clients_count(spent, named, monkeypatch):
    states = {0: None, 1: b"state"}
    state = SimpleNamespace(spent={"training": spent, "logits": 9})
    monkeypatch.setattr(checks, "decode", lambda blob, cls: state)
    trained = entry(kind="training", mechanism="dp-sgd", rounds=[1, 2, 4])
    other = entry(kind="training", mechanism="none", rounds=[1], noise_multiplier=math.inf)
    ledgers = [client(0, [entry()]), client(1, [trained, other, entry()])]
    case = made(ledgers, privacy={"training": {}}, store=SimpleNamespace(client=states.get))
    checks._check_trainings(case)
    assert wrong(case) == named
    case = made(ledgers, privacy={"training": {}}, store=None)
    checks._check_trainings(case)
    assert [one.verdict for one in case.found.list] == ["the author's word"]
    case = made(ledgers, privacy={"logits": {}}, store=None)
    checks._check_trainings(case)
    assert case.found.list == []


def test_events_that_cost_something_are_merged():
    events = [Event(2.0, 1.0, 3), Event(1.0, 0.5, 4), Event(2.0, 1.0, 2), Event(0.0), Event(math.inf), Event(3.0, 0.0),
              Event(3.0, 1.0, 0)]  # fmt: skip
    assert checks._plain(events) == ((1.0, 0.5, 4), (2.0, 1.0, 5))


def test_a_second_accountant_finds_what_gaussian_noise_costs():
    """One release, and four of twice the noise, cost the same: epsilon of a Gaussian with mu = 1 / sigma."""
    pytest.importorskip("dp_accounting")
    assert checks._by_pld((), 1e-5) == 0.0
    exact = gaussian_epsilon(1 / 2.0, 1e-5)
    assert checks._by_pld(((2.0, 1.0, 1),), 1e-5) == pytest.approx(exact, rel=0.01)
    assert checks._by_pld(((4.0, 1.0, 4),), 1e-5) == pytest.approx(exact, rel=0.01)
    assert exact - 0.003 < checks._by_pld(((4.0, 1.0, 4),), 1e-5) <= exact, "from below, and near"
    assert checks._by_pld(((4.0, 1.0, 2), (2.0 * math.sqrt(2.0), 1.0, 1)), 1e-5) == pytest.approx(exact, rel=0.01)
    assert checks._by_pld(((2.0, 0.1, 1),), 1e-5) < exact / 2, "one record in ten is looked at"


@pytest.mark.parametrize(("said", "accused"), [(2.0, False), (1.95, False), (1.9, True)])
def test_the_worst_client_of_each_relation_goes_to_the_second_accountant(said, accused, monkeypatch):
    pytest.importorskip("dp_accounting")
    asked = []

    def second(events, delta):
        asked.append((events, delta))
        return 2.0

    monkeypatch.setattr(checks, "_by_pld", second)

    def of(k, epsilon, sigma, delta):
        total = Total(epsilon=epsilon, accountant="prv")
        return client(k, [entry(noise_multiplier=sigma)], delta=delta, by_relation={"replace-one": total})

    ledgers = [of(0, said / 2, 8.0, 1e-4), of(1, said, 4.0, 1e-5), of(2, math.inf, 0.0, 1e-6), of(3, 0.0, 9.0, 1e-6)]
    case = made(ledgers)
    checks.check_second_accountant(case)
    assert asked == [(((4.0, 1.0, 2),), 1e-5)]
    place = "ledger.1.by_relation.replace-one.epsilon"
    assert wrong(case) == ([(place, said, 2.0)] if accused else [])
    assert [one.verdict for one in case.found.list] == ["contradicted" if accused else "recomputed"]
    case = made([of(2, math.inf, 0.0, 1e-6)])
    checks.check_second_accountant(case)
    assert case.found.list == []


def test_other_noise_is_not_given_to_the_second_accountant(monkeypatch):
    pytest.importorskip("dp_accounting")
    total = Total(epsilon=1.0, accountant="prv")
    entries = [entry(), entry(field="Local.y", mechanism="laplace", noise_multiplier=1.0)]
    case = made([client(0, entries, by_relation={"replace-one": total})])
    checks.check_second_accountant(case)
    assert [one.verdict for one in case.found.list] == ["the author's word"]


def test_policies_are_those_of_the_world_and_without_it_those_of_the_setting():
    setting = SimpleNamespace(privacy={"embeddings": {"epsilon": 2.0}})
    case = SimpleNamespace(world=SimpleNamespace(policies="its own"), record=SimpleNamespace(setting=setting))
    assert checks._policies(case) == "its own"
    case.world = None
    assert {kind: policy.epsilon for kind, policy in checks._policies(case).items()} == {"embeddings": 2.0}
    setting.privacy = {"nothing of this name": {"epsilon": 2.0}}
    assert checks._policies(case) == {}


def test_without_a_second_accountant_nothing_is_said_where_nothing_is_finite(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for epsilon, verdicts in ((0.0, []), (math.inf, []), (1.0, ["the author's word"])):
        total = Total(epsilon=epsilon, accountant="prv")
        case = made([client(0, [entry()], by_relation={"replace-one": total})])
        checks.check_second_accountant(case)
        assert [one.verdict for one in case.found.list] == verdicts


def test_the_multiplier_that_a_search_finds(monkeypatch):
    """One that is recognised is taken as it is; another is searched for; where there is none, nothing is asked."""
    asked = []

    def recognised(*of):
        asked.append(of)
        if of[1] == 9.0:
            raise ArithmeticError("none")
        return of[0] == 1.25

    monkeypatch.setattr(checks, "is_multiplier_for", recognised)
    monkeypatch.setattr(checks, "multiplier_for", lambda *of: sum(of))
    assert checks._for_training(1.25, 8.0, 0.5, 0.25, 40) == 1.25
    assert checks._for_training(1.5, 8.0, 0.5, 0.25, 40) == 48.75
    assert checks._for_training(1.5, 9.0, 0.5, 0.25, 40) is None
    assert asked == [(1.25, 8.0, 0.5, 0.25, 40), (1.5, 8.0, 0.5, 0.25, 40), (1.5, 9.0, 0.5, 0.25, 40)]
    checks._for_training.cache_clear()


@pytest.mark.parametrize(("start", "taken_over"), [(None, False), ({"method": "fedavg"}, True)])
@pytest.mark.parametrize("whole", [True, False])
def test_the_steps_of_a_ledgers_check(start, taken_over, whole, monkeypatch):
    """Client 2 sent something and has no ledger; client 1 sent nothing. Of four policies, two applied to nothing."""
    done = []
    sender, silent = checks._Client(), checks._Client()
    sender.sent["Local.z", 1] = 1
    monkeypatch.setattr(checks, "_read", lambda case: ({0: sender, 2: sender, 1: silent, 3: sender}, "relayed"))
    monkeypatch.setattr(checks, "check_totals", lambda case, compare: done.append(("totals", compare)))
    monkeypatch.setattr(
        checks, "_check_entries", lambda case, of, who, over: done.append((of.client, who is sender, over))
    )
    for name in ("_check_updates", "_check_trainings", "_check_noise", "_check_sizes", "check_second_accountant"):
        monkeypatch.setattr(checks, name, lambda case, name=name: done.append(name))
    monkeypatch.setattr(checks, "_check_observers", lambda case, relayed: done.append(relayed))
    privacy = {"logits": {}, "updates": {}, "labels": {}, "embeddings": {}}
    case = made([client(0, [entry()]), client(4, [])], start=start, privacy=privacy, whole=whole)
    case.record.idle_policies = ["embeddings", "logits"]
    checks.check_ledger(case)
    last = ["_check_trainings", "_check_noise", "_check_sizes", "check_second_accountant"]
    of_rows = [(0, True, taken_over), (4, False, taken_over), "_check_updates", "relayed"] if whole else []
    assert done == [("totals", True), *of_rows, *last]
    assert wrong(case) == [
        *([("ledger of client 2", "nothing", "its releases")] if whole else []),
        ("idle_policies.1", "logits", "labels"),
    ]
    words = [one.reason for one in case.found.list if one.verdict == "the author's word"]
    assert words == ([] if whole else ["the transcript is not whole"])


@pytest.mark.parametrize(
    ("updates", "field", "named"),
    [
        (True, "Local (update)", [("ledger", "said", "now")]),
        (False, "Local (update)", [("ledger", "entries for updates", "none")]),
        (False, "Local.z", []),
    ],
)
def test_what_is_told_of_the_cost_of_sums(updates, field, named, monkeypatch):
    monkeypatch.setattr(checks, "guarantee_of", lambda setting: "guarantee")
    monkeypatch.setattr(checks, "check_update_entries", lambda case, terms: [("ledger", "said", "now")])
    case = made([client(0, [entry(), entry(field=field)])], privacy={"updates": {}} if updates else {})
    checks._check_updates(case)
    assert wrong(case) == named
    assert len(case.found.list) == len(named)


def test_sums_that_cost_what_they_should_and_policies_that_no_run_has(monkeypatch):
    monkeypatch.setattr(checks, "check_update_entries", lambda case, terms: [])
    monkeypatch.setattr(checks, "guarantee_of", lambda setting: "guarantee")
    case = made([client(0, [entry()])], privacy={"updates": {}})
    checks._check_updates(case)
    assert [(one.verdict, one.figure) for one in case.found.list] == [("recomputed", "cost of sums")]

    def broken(setting):
        raise TypeError("x" * 400)

    monkeypatch.setattr(checks, "guarantee_of", broken)
    case = made([client(0, [entry()])], privacy={"updates": {}})
    checks._check_updates(case)
    ((at, _, now),) = wrong(case)
    assert (at, now[:12]) == ("setting.privacy.updates", "TypeError: x")


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_totals_are_composed_again_once_for_equal_entries(compare, other, monkeypatch):
    """Clients 0 and 5 have equal entries, 7 another delta, 8 entries that nobody takes. What is said is off by 1 %."""
    closed = []

    def close(self, compare):
        closed.append((self.client, compare))
        if self.client == 8:
            raise ArithmeticError("no")
        self.epsilon, self.by_kind = 2.0, {"logits": 1.0}

    monkeypatch.setattr(ClientLedger, "close", close)
    monkeypatch.setattr(checks, "_other_opacus", lambda case: other)

    def of(k, epsilon, delta=1e-3, **facts):
        return client(k, [entry(**facts)], delta=delta, epsilon=epsilon, by_kind={"logits": 1.0})

    ledgers = [of(0, 2.0), of(5, 2.02, cosine=0.5), of(7, 2.0 * (1 + 1e-9), delta=1e-4), of(8, 2.0, sigma=9.0)]
    case = made(ledgers)
    checks.check_totals(case, compare=compare)
    assert closed == [(0, compare), (7, compare), (8, compare)]
    small = [] if other else [("ledger.1.epsilon", 2.02, 2.0)]
    assert wrong(case) == [*small, ("ledger.3.entries", "entries", "no accountant takes them: no")]
    case.record.ledger.pop()
    case.found = Findings()
    checks.check_totals(case, compare=compare)
    assert ("recomputed" in [one.verdict for one in case.found.list]) is other
