"""What a run writes down before its first round: facts about its data, and the secret of its noise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit.errors import NotApplicable, SettingError
from fedaudit.privacy.noise_key import FILE, SIZE, write_secret
from fedaudit.privacy.policy import Policy
from fedaudit.runtime import plan as plan_module
from fedaudit.runtime import run_opening
from fedaudit.runtime.run_opening import _secret, data_facts, model_facts
from fedaudit.runtime.run_record import TwinFacts
from fedaudit.runtime.world import World
from fedaudit.setting import Setting
from fedaudit.wire.message import Size


@pytest.fixture
def world():
    return World(Setting.make(clients=3, public=0.1, model="mlp:2,cnn:1"))


def test_the_parts_of_the_data_are_counted(world):
    facts, federation = data_facts(world), world.federation
    assert facts.members == [len(shard.members) for shard in federation.shards]
    assert facts.nonmembers == [len(shard.nonmembers) for shard in federation.shards]
    assert facts.validation == [len(shard.validation) for shard in federation.shards]
    assert len({*facts.members, *facts.nonmembers, *facts.validation}) == 9, "no two are alike"
    assert (facts.test, facts.aux, facts.classes) == (len(federation.dataset.test_y), len(federation.aux), 10)
    assert facts.public == len(federation.public) > 0
    labels = [federation.dataset.y[torch.as_tensor(shard.members)] for shard in federation.shards]
    assert facts.counts == [[int((y == c).sum()) for c in range(10)] for y in labels]
    assert (facts.persons, facts.most_of_person, facts.most_clients, facts.copies) == ([], 1, 1, 1)


def test_persons_are_counted_at_each_client_and_over_clients(world, monkeypatch):
    """Client 0 has three records of one person and one of another, who has two records at client 1 and one at 2."""
    people = [torch.tensor([5, 8, 5, 5]), torch.tensor([9, 8, 8]), torch.tensor([8])]
    monkeypatch.setattr(world, "people", people.__getitem__)
    facts = data_facts(world)
    assert facts.persons == [2, 2, 1]
    assert facts.most_of_person == 3
    assert facts.most_clients == 3


@pytest.mark.parametrize(
    ("policies", "people", "copies"),
    [({}, False, 1), ({"logits": Policy(epsilon=1.0)}, False, 6), ({"logits": Policy(epsilon=1.0)}, True, 1)],
)
def test_copies_are_counted_where_a_guarantee_is_for_records(policies, people, copies, world, monkeypatch):
    monkeypatch.setattr(world, "policies", policies)
    monkeypatch.setattr(world, "copies", lambda: 6)
    if people:
        monkeypatch.setattr(world, "people", lambda k: torch.tensor([k]))
    facts = data_facts(world)
    assert facts.copies == copies
    assert (facts.shape, facts.tokens, facts.class_names) == ([1, 8, 8], 0, list(world.federation.dataset.class_names))
    assert len(facts.digest) > 8


def test_people_of_clients_without_records_are_none(world, monkeypatch):
    monkeypatch.setattr(world, "people", lambda k: torch.zeros(0).long())
    facts = data_facts(world)
    assert (facts.persons, facts.most_of_person, facts.most_clients) == ([0, 0, 0], 1, 1)


def test_a_client_without_records_has_no_person(world, monkeypatch):
    monkeypatch.setattr(world, "people", lambda k: torch.tensor([4] * k, dtype=torch.long))
    facts = data_facts(world)
    assert (facts.persons, facts.most_of_person, facts.most_clients) == ([0, 1, 1], 2, 2)


def test_each_architecture_is_counted_once(world):
    """An mlp on 64 pixels: 64 x 128 + 128 and 128 x 10 + 10 parameters."""
    found = model_facts(world)
    assert {name: facts.clients for name, facts in found.items()} == {"mlp": 2, "cnn": 1}
    assert found["mlp"].parameters == 64 * 128 + 128 + 128 * 10 + 10


def opened(folder, noise_key=None, **values):
    return SimpleNamespace(setting=Setting.make(**values), folder=folder, noise_key=noise_key)


def test_a_run_without_noise_and_masks_has_no_secret(tmp_path):
    assert _secret(opened(tmp_path)) == b""
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("values", [{"aggregate": "secure"}, {"privacy": {"logits": {"epsilon": 1.0}}}])
def test_a_secret_is_drawn_once_and_kept(values, tmp_path):
    found = _secret(opened(tmp_path, **values))
    assert len(found) == SIZE
    assert (tmp_path / FILE).exists()
    write_secret(tmp_path / "other", bytes(SIZE))
    assert _secret(opened(tmp_path, tmp_path / "other", **values)) == found, "the folder's own comes first"


def test_a_secret_is_taken_from_another_run_where_that_is_asked_for(tmp_path):
    write_secret(tmp_path / "other", bytes(range(1, SIZE + 1)))
    found = _secret(opened(tmp_path, tmp_path / "other", aggregate="secure"))
    assert found == bytes(range(1, SIZE + 1))


# --- going on --------------------------------------------------------------------------------------------------------


def facts_of(**facts):
    return SimpleNamespace(**({"persons": [], "most_clients": 1, "copies": 1} | facts))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, None),
        ({"copies": 2}, "one record up to 2 times"),
        ({"persons": [3], "copies": 2}, None),  # the guarantee is for persons
        ({"persons": [3], "most_clients": 2}, "at up to 2 clients"),
        ({"most_clients": 2}, None),
    ],
)
def test_what_the_data_mean_for_the_guarantee(facts, words):
    found = run_opening._notes(facts_of(**facts))
    assert found == [] if words is None else (len(found) == 1 and words in found[0])


@pytest.fixture
def going_on(monkeypatch, tmp_path):
    """A run after its third round, on the machine that began it: each test changes one thing."""
    monkeypatch.setattr(run_opening, "versions", lambda: {"torch": "9"})
    monkeypatch.setattr(run_opening, "device_name", lambda device: "a device")
    monkeypatch.setattr(run_opening, "harness", lambda: "code")
    monkeypatch.setattr(run_opening, "is_same", lambda a, b: a == b)
    monkeypatch.setattr(run_opening, "not_compared", lambda code, harness: code == "an old scheme")
    monkeypatch.setattr(run_opening, "beside", list)
    monkeypatch.setattr(run_opening, "rounding", lambda setting: setting.engine)
    amended, reopened = {}, []
    client = SimpleNamespace(reopen=lambda: reopened.append(1))
    record = SimpleNamespace(
        versions={"torch": "9"}, device="a device", harness="code", code="digests", notes=["first"], beside=[],
        status="done", finished="then", published=["a model"], ledger=[client],
    )  # fmt: skip
    (tmp_path / run_opening.SEAL).touch()
    run = SimpleNamespace(
        record=record, world=SimpleNamespace(device="cpu"), started=3, setting=Setting.make(keep_weights=2),
        store=SimpleNamespace(amend=lambda **facts: amended.update(facts)), folder=tmp_path, attempt=0,
    )  # fmt: skip

    def go(before=None):
        run_opening._go_on(run, {"attempt": 4}, before or Setting.make(keep_weights=2))
        assert (record.status, record.finished, record.published) == ("running", None, [])
        assert reopened == [1]
        assert amended == {"attempt": run.attempt}
        return run.attempt, record.notes[1:]

    return run, go


def test_the_same_machine_goes_on_with_the_same_noise(going_on):
    run, go = going_on
    assert go() == (4, [])
    assert not (run.folder / run_opening.SEAL).exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": {"torch": "8"}}, "resumed under other versions"),
        ({"device": "another"}, "resumed under other versions"),
        ({"harness": "other code"}, "resumed under other versions"),
        ({"code": "an old scheme"}, "resumed: "),
        ({"beside": [7]}, "resumed after round 3, with runs of other seeds beside it"),
    ],
)
def test_where_bits_may_differ_noise_is_drawn_anew(change, words, going_on):
    """Equal noise on unequal values would give both away."""
    run, go = going_on
    vars(run.record).update(change)
    attempt, notes = go()
    assert attempt == 5
    assert len(notes) == 1
    assert notes[0].startswith(words)


def test_other_seeds_beside_it_now_are_noted(going_on, monkeypatch):
    run, go = going_on
    run.record.beside = [9, 3]
    monkeypatch.setattr(run_opening, "beside", lambda: [5, 3])
    attempt, notes = go()
    assert (attempt, len(notes), run.record.beside) == (5, 1, [3, 5, 9])


def test_a_run_whose_results_vary_never_draws_the_same_noise(going_on):
    run, go = going_on
    run.setting = Setting.make(keep_weights=2, deterministic=False)
    assert go() == (5, [])


@pytest.mark.parametrize(
    ("before", "attempt", "words"),
    [
        ({"engine": "stacked"}, 5, "resumed after round 3 with other steps"),
        ({"keep_weights": 1}, 4, "keep_weights was raised after round 3"),
        ({"keep_weights": 3}, 4, None),
    ],
)
def test_settings_that_may_change_when_a_run_goes_on(before, attempt, words, going_on):
    _, go = going_on
    found, notes = go(Setting.make(**({"keep_weights": 2} | before)))
    assert found == attempt
    assert notes == [] if words is None else notes[0].startswith(words)


@pytest.mark.parametrize(
    ("before", "ahead", "words"),
    [
        ({}, False, None),
        ({"seed": 1}, False, "seed = 1, now 0"),
        ({"rounds": 3}, False, None),
        ({"rounds": 3}, True, "rounds = 3, now 5"),
        ({"engine": "stacked"}, True, None),
        ({"quorum": 0.9, "dropout": 0.1, "keep_weights": 7}, True, None),
        ({"channels_last": True}, False, "channels_last = True, now False"),
    ],
)
def test_a_run_goes_on_with_the_setting_that_it_began_with(before, ahead, words, monkeypatch):
    monkeypatch.setattr(run_opening, "_planned_for_rounds", lambda run: ahead)
    record = SimpleNamespace(code=None, rounds=[SimpleNamespace(round=t) for t in (1, 2, 3)])
    run = SimpleNamespace(setting=Setting.make(rounds=5), record=record, folder="FOLDER", method=None)
    old = Setting.make(**({"rounds": 5} | before))
    if words is None:
        run_opening._check_same(run, old)
    else:
        with pytest.raises(SettingError, match=words):
            run_opening._check_same(run, old)


def test_a_run_does_not_go_back_and_not_on_with_other_code(monkeypatch):
    monkeypatch.setattr(run_opening, "_planned_for_rounds", lambda run: False)
    monkeypatch.setattr(run_opening, "code_of", lambda method, setting: "new")
    monkeypatch.setattr(run_opening, "differences", lambda a, b: [] if a == b else ["its method was edited"])
    record = SimpleNamespace(code="new", rounds=[SimpleNamespace(round=t) for t in (1, 2, 3)])
    run = SimpleNamespace(setting=Setting.make(rounds=3), record=record, folder="FOLDER", method=None)
    run_opening._check_same(run, run.setting)
    record.code = "old"
    with pytest.raises(SettingError, match="its method was edited"):
        run_opening._check_same(run, run.setting)
    record.code, run.setting = "new", Setting.make(rounds=2)
    with pytest.raises(SettingError, match="has 3 rounds; --rounds asks for fewer"):
        run_opening._check_same(run, run.setting)
    record.rounds = []
    run_opening._check_same(run, run.setting)


@pytest.mark.parametrize(
    ("policies", "epsilon", "ahead"),
    [
        ({}, "no guarantee", False),
        ({}, None, False),
        ({}, 8.0, True),
        ({"logits": Policy(epsilon=1.0)}, "no guarantee", False),
        ({"logits": Policy(epsilon=1.0, calibration="total")}, "no guarantee", True),
        ({"labels": Policy(noise_multiplier=1.0), "logits": Policy(epsilon=1.0, calibration="total")}, None, True),
    ],
)
def test_noise_that_was_calibrated_for_all_rounds(policies, epsilon, ahead):
    guarantee = None if epsilon == "no guarantee" else SimpleNamespace(policy=SimpleNamespace(epsilon=epsilon))
    world = SimpleNamespace(guarantee=guarantee, policies=policies)
    assert run_opening._planned_for_rounds(SimpleNamespace(world=world)) is ahead


@pytest.mark.parametrize(("rounds", "looked"), [(1, [1, 2]), (2, [1, 2]), (9, [1, 2, 9]), (0, [1, 2])])
def test_a_policy_is_held_against_the_first_and_the_last_rounds(rounds, looked, monkeypatch):
    plans, closed = [], []

    def kinds(method, given):
        plans.extend(given)
        return "kinds"

    monkeypatch.setattr(run_opening, "released_kinds", kinds)
    monkeypatch.setattr(run_opening, "inapplicable", lambda privacy, found: "it covers nothing")
    world = SimpleNamespace(policies={"logits": 1}, plan=lambda t, who: (t, who))
    setting = SimpleNamespace(rounds=rounds, clients=3, privacy={})
    transcript = SimpleNamespace(close=lambda: closed.append(1))
    run = SimpleNamespace(world=world, setting=setting, method=None, transcript=transcript)
    with pytest.raises(NotApplicable, match=r"it covers nothing\."):
        run_opening.check_applicable(run)
    assert plans == [(t, [0, 1, 2]) for t in looked]
    assert closed == [1]
    world.policies = {}
    run_opening.check_applicable(run)


@pytest.mark.parametrize(
    ("rounds", "declared", "asked", "words"),
    [
        (9, lambda t: None, [1], "the transcript grows by what the method sends, which it does not declare"),
        (
            9,
            lambda t: {("up", "a.b"): Size(1000, 200), ("down", "c.d"): 300},
            [1, 2, 9],
            "a round adds up to 1.50 kB of messages to the transcript",
        ),
        (9, lambda t: {("up", "a.b"): 1000 * t}, [1, 2, 9], "a round adds up to 9.00 kB of messages to the transcript"),
        (
            9,
            lambda t: {("up", "a.b"): 4000 // t},
            [1, 2, 9],
            "a round adds up to 4.00 kB of messages to the transcript",
        ),
        (
            9,
            lambda t: {("up", "a.b"): 5000 if t == 2 else 1},
            [1, 2, 9],
            "a round adds up to 5.00 kB of messages to the transcript",
        ),
        (1, lambda t: {("up", "a.b"): 1000 * t}, [1], "a round adds up to 1.00 kB of messages to the transcript"),
        (0, lambda t: {("up", "a.b"): 1000 * t}, [1], "a round adds up to 1.00 kB of messages to the transcript"),
    ],
)
def test_how_much_a_round_adds_to_the_transcript(rounds, declared, asked, words, monkeypatch):
    """The most of the first, the second and the last round."""
    plans = []
    monkeypatch.setattr(run_opening, "participants_of", lambda setting, t: f"of round {t}")
    method = SimpleNamespace(traffic=declared)
    world = SimpleNamespace(plan=lambda t, who: plans.append((t, who)) or t)
    run = SimpleNamespace(method=method, world=world, setting=Setting.make().model_copy(update={"rounds": rounds}))
    assert run_opening._expected_size(run) == words
    assert plans == [(t, f"of round {t}") for t in asked]


@pytest.mark.parametrize(
    ("values", "size"),
    [({"compress": "int8"}, "250 B"), ({"aggregate": "secure"}, "70 B"), ({}, "1.00 kB")],
)
def test_how_much_a_compressed_or_summed_round_adds(values, size, monkeypatch):
    """The size of a stage's own making; a secure sum's masks and shares in place of the replies."""
    declared = {("up", "a.b"): Size(1000)}
    monkeypatch.setattr(run_opening, "participants_of", lambda setting, t: [0, 1])
    small = {"int8": {("up", "a.b"): Size(250)}}
    monkeypatch.setattr(plan_module, "as_sent", lambda method, stage, sizes: (small.get(stage, sizes), frozenset()))
    monkeypatch.setattr(plan_module, "planned_sums", lambda method, sizes, plan, threshold: ["one sum"])
    monkeypatch.setattr(plan_module, "in_sums", lambda method, sizes, sums: {("up", "masked"): Size(30, 20, 20)})
    method = SimpleNamespace(traffic=lambda plan: declared)
    setting = Setting.make(rounds=3).model_copy(update=values)
    run = SimpleNamespace(method=method, world=SimpleNamespace(plan=lambda t, who: t), setting=setting)
    assert run_opening._expected_size(run) == f"a round adds up to {size} of messages to the transcript"


@pytest.mark.parametrize(
    ("aggregate", "words"),
    [
        ("plain", "a round adds up to 700 B of messages to the transcript"),
        ("secure", "a round adds up to 500 B of messages to the transcript"),
    ],
)
def test_the_round_with_the_most_clients_tells_the_size(aggregate, words, monkeypatch):
    """Clients are drawn: nobody in the first round, one in the second, none in the last, five in round 4. Nobody sends
    nothing, and there is no sum of one client."""
    drawn = {2: [3], 4: [0, 1, 2, 3, 4], 6: [1, 2]}
    monkeypatch.setattr(run_opening, "participants_of", lambda setting, t: drawn.get(t, []))
    sizes = {"plain": {1: 700, 5: 500}, "secure": {5: 500}}[aggregate]

    def sent(method, plan, setting):
        return {("up", "a.b"): Size(sizes[len(plan)])}, frozenset()

    monkeypatch.setattr(run_opening, "sent_in_round", sent)
    setting = Setting.make(rounds=9, sampling="poisson", participation=0.3).model_copy(update={"aggregate": aggregate})
    run = SimpleNamespace(method=None, world=SimpleNamespace(plan=lambda t, who: who), setting=setting)
    assert run_opening._expected_size(run) == words


@pytest.mark.parametrize("refuse_idle", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_records_that_a_method_cannot_take(refuse_idle, begun, monkeypatch):
    """In a suite a new run keeps that as its result."""
    saved = []
    record = SimpleNamespace(save=saved.append)
    monkeypatch.setattr(run_opening, "_new_record", lambda run: record)
    run = SimpleNamespace(
        world=SimpleNamespace(misfit=lambda: "it takes images"), refuse_idle=refuse_idle, folder="FOLDER",
        store=SimpleNamespace(head=lambda: {} if begun else None), record=None,
    )  # fmt: skip
    with pytest.raises(NotApplicable, match=r"it takes images\."):
        run_opening.check_records(run)
    assert saved == (["FOLDER"] if refuse_idle and not begun else [])
    run.world.misfit = lambda: ""
    run_opening.check_records(run)


@pytest.mark.parametrize(
    ("policies", "before"), [({}, None), ({"logits": 1}, None), ({"logits": 1}, TwinFacts(tasks=7))]
)
def test_twins_are_noted_where_something_is_promised(policies, before, monkeypatch, tmp_path):
    monkeypatch.setattr(run_opening, "_secret", lambda run: b"secret")
    monkeypatch.setattr(run_opening, "Twins", lambda *of: of)
    run = SimpleNamespace(
        world=SimpleNamespace(policies=policies), record=SimpleNamespace(twins=before), folder=tmp_path, twin_sets=4,
        setting=SimpleNamespace(twins="all"),
    )  # fmt: skip
    run_opening._begin_twins(run)
    world, folder, secret, facts, sets = run.twins
    assert (world, folder, secret, sets) == (run.world, tmp_path, b"secret", 4)
    assert (facts.wanted, facts.tasks) == (("off", 7) if before else ("all", 0) if policies else ("off", 0))
    assert run.record.twins is (facts if policies else None)
