"""`fedaudit check-method`: a verdict on each field, kept with the version of the source that it is about."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from roads import bit as road_bit

from fedaudit import read_record, registry, run
from fedaudit.privacy.noise_key import write_secret
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.asking import participants_of
from fedaudit.runtime.code_digest import source_of_method
from fedaudit.runtime.declarations import tested
from fedaudit.runtime.declarations.contract import check_method, further, setting_for, try_twins
from fedaudit.runtime.declarations.twins import Twins
from fedaudit.runtime.run_record import Declarations, TwinFacts
from fedaudit.runtime.world import world_of

MINE = """
from outside import Averages, Weights, ce
from fedaudit import load, sgd, state_of


class Mine(Averages):
    def update(self, client, msg):
        load(client.model, msg.w)
        client.fit(ce, steps=1, batch=16, opt=sgd(0.1))
        return Weights(state_of(client.model))
"""


@pytest.fixture
def tried(tiny):
    """Verdicts by field on `cheats:NAME`."""

    def make(name, sets=0, **values):
        setting = tiny(f"cheats:{name}", rounds=1, clients=2, model="mlp", set={}, **values)
        found = check_method(setting, sets)
        return found, {row.field: row for row in found.fields if row.verdict != "not sent"}

    return make


def test_a_careful_method_holds(tried):
    found, fields = tried("Counts")
    assert found.held
    assert {name: row.verdict for name, row in fields.items()} == {"Told.w": "held", "Told.n": "pays"}


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("ReadBefore", "Weights.w", "beside training"),
        ("PublicNumber", "Marked.t", "is declared public"),
        ("Switches", "update (message class)", "class of the message tells of the records"),
        ("FailsByRecords", "update (absence)", "failed on client"),
        ("NamedByData", "(the run)", "while it ran"),
        ("Mixes", "Rows.e", "the noise is scaled for one"),
        ("Repeats", "update (class means)", "the noise is scaled for one"),
        ("Tallies", "Tallied.n", "and the noise is scaled for 1.41"),
    ],
)
def test_what_is_broken_is_named(tried, name, field, words):
    found, fields = tried(name)
    assert not found.held
    assert (fields[field].verdict, words in fields[field].why) == ("broken", True)


@pytest.mark.parametrize("name", ["PublicNumberOfOne", "PublicNumberLater"])
def test_what_a_method_does_to_one_client_or_later_shows_in_a_further_trial(tiny, name):
    setting = tiny(f"cheats:{name}", rounds=2, clients=3, model="mlp", set={})
    assert check_method(setting, 0).held, "no trial of three clients and two rounds sees it"
    found = check_method(setting, 0, further(setting))
    assert [row.field for row in found.fields if row.verdict == "broken"] == ["Marked.t"]


@pytest.mark.parametrize("when", ["late", "one"])
def test_what_leaks_from_one_client_or_later_shows_in_further_twins(tiny, when):
    setting = tiny("roads:LaterStill", rounds=2, clients=3, model="mlp", set={"when": when})
    found = check_method(setting, 1, further(setting))
    fields = {row.field: row.verdict for row in found.fields}
    assert (fields["(twins)"], fields["(twins, further)"]) == ("held", "broken")


def test_a_further_trial_asks_each_client_and_the_last_one_late():
    setting = further(setting_for("fedavg"))
    asked = [participants_of(setting, t) for t in range(1, setting.rounds + 1)]
    assert {k for ks in asked for k in ks} == set(range(6))
    assert all(5 in asked[i] for i in (0, -1))
    assert [len(ks) for ks in asked] == [3] * 4


def test_all_clients_have_twins_and_the_verdict_says_so(tried):
    found, fields = tried("Counts", sets=2)
    twins = fields["(twins)"]
    assert (twins.verdict, twins.why) == ("held", "2 of 2 tasks gave the same reply to the bit")
    assert twins.declared.startswith("all clients, 2 sets of other records each, under training, embeddings")
    assert fields["Told.n"].verdict == "pays", "the verdict on a field stays"
    assert (found.entry().fields["(twins)"], found.entry().twin_sets) == ("held", 2)
    again = Declarations(source="a", tested="held", fedaudit="0.1.0", twin_sets=2)
    assert again.text().endswith("held; 2 sets of other records for every client")


def test_a_bit_that_agrees_with_the_first_set_shows_with_the_second(tiny, tmp_path):
    """The secret is one under which each twin has its client's bit in the first set, and another one in the second."""
    privacy = dict([parse_policy("embeddings:eps=1,clip=1")])
    setting = tiny("roads:Structure", rounds=1, clients=2, model="mlp", set={"what": "dtype"}, aux=0.2, privacy=privacy)
    world = world_of(setting.model_dump_json())
    for i in range(1000):
        secret = i.to_bytes(32, "little")
        of_run = Twins(world, tmp_path, secret, TwinFacts())
        bits = [[road_bit(of_run._rows(number, k)["own"][1]) for number in (0, 1)] for k in (0, 1)]
        mine = [road_bit(world.seen_members(k)[1]) for k in (0, 1)]
        if all(first == own != second for own, (first, second) in zip(mine, bits, strict=True)):
            break
    else:
        pytest.fail("no such secret")
    write_secret(tmp_path / "noise.key", secret)
    (one,) = try_twins(setting, 1, tmp_path / "noise.key")
    assert one.verdict == "held", "half of all bits agree"
    two = {row.field: row for row in try_twins(setting, 2, tmp_path / "noise.key")}
    assert (two["(twins)"].verdict, two["Table.e"].verdict) == ("broken", "broken")
    assert "2 sets of other records" in two["(twins)"].declared


def test_a_method_that_cannot_train_privately_is_tried_with_its_messages_protected(tiny):
    (row,) = try_twins(tiny("cheats:OwnRows", rounds=1, clients=2, model="mlp", set={}), 1)
    assert "under training" in row.declared
    (row,) = try_twins(tiny("outside:Paints", rounds=1, clients=2, model="mlp", set={}), 1)
    assert (row.verdict, "under embeddings" in row.declared) == ("held", True)


@pytest.mark.parametrize("name", ["OwnRows", "OwnMeans", "OwnCounts"])
def test_a_row_for_each_record_holds(tried, name):
    assert tried(name)[0].held


def test_a_broken_field_does_not_hide_the_others(tried):
    """Both fields break, each in its own way; the run goes on to the end."""
    _, fields = tried("BothWrong")
    assert {name: row.verdict for name, row in fields.items()} == {"Marked.t": "broken", "Marked.w": "broken"}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    name = f"tested_{abs(hash(str(tmp_path))) % 10**9}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path, name


@pytest.mark.slow
def test_the_verdict_is_kept_for_that_source_alone(mine, fedaudit, tiny):
    folder, name = mine
    method = f"{name}:Mine"

    def said(number: int):
        record = run(tiny(method, rounds=1, clients=2, model="mlp", set={}), out=folder / str(number))
        assert read_record(folder / str(number)).declarations == record.declarations
        return record.declarations

    assert (said(1).tested, "never tested" in said(2).text()) == ("never", True)
    code, out, _ = fedaudit("check-method", method, "--model", "mlp", "--rounds", 1, "--clients", 2, "--write")
    assert (code, "held" in out) == (0, True)
    held = said(3)
    assert (held.tested, held.tested_source) == ("held", held.source)
    assert "declarations: tested by fedaudit" in fedaudit("show", folder / "3")[1]
    report = fedaudit("report", folder / "3", "--format", "md")
    assert report[0] == 0
    assert held.source[:12] in (folder / "3" / "report.md").read_text()

    path = folder / tested.NAME
    kept = path.read_text()
    path.write_text(kept.replace('"held": true', '"held": false'))
    assert said(4).tested == "never"  # edited by hand: its digest is another
    path.write_text(kept)
    source = folder / f"{name}.py"
    source.write_text(MINE.replace("steps=1", "steps=2"))
    other = said(5)
    assert (other.tested, other.tested_source) == ("another source", held.source)
    assert "for another version of the source" in other.text()
    path.write_text("{}")
    assert said(6).tested == "never"
    again = Declarations(source="2:abc", tested="another source", tested_source="abc", fedaudit="0.1.0")
    assert "cannot be compared" in again.text()
    assert "another version" in again.model_copy(update={"tested_source": "2:abd"}).text()


def test_the_command_tells_what_is_broken(fedaudit, tmp_path):
    code, out, _ = fedaudit(
        "check-method", "cheats:ReadBefore", "--rounds", 1, "--clients", 2, "--model", "mlp", "--json"
    )
    (found,) = json.loads(out)
    assert (code, found["held"], found["fields"]["Weights.w"]) == (1, False, "broken")
    assert found["settings"]["further"]["clients"] == 6
    assert "only for clients from 6 on, only in rounds after 4" in found["unseen"]
    assert not (Path(sys.modules["cheats"].__file__).parent / tested.NAME).exists()


@pytest.mark.slow
def test_every_method_of_the_package_was_tested_as_it_is():
    """`make tested` tests those that were edited, and keeps the verdicts. `make verdicts`, a part of CI, asks this. As
    a quick test it would notice any edit of a method, wrong or right, and hide that no other test does."""
    wrong = []
    for name in registry.names("methods"):
        cls = registry.find(name)
        entry = tested.read(tested.file_of(cls)).get(tested.key_of(cls))
        if entry is None or not entry.held or entry.source != source_of_method(cls.make({})):
            wrong.append(name)
    assert not wrong, f"not tested as they are: {', '.join(wrong)}. `make tested` does it"
