"""`fedaudit check-method`: a verdict on each field, kept with the version of the source that it is about."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedaudit import read_record, registry, run
from fedaudit.runtime.code_digest import source_of_method
from fedaudit.runtime.declarations import tested
from fedaudit.runtime.declarations.contract import check_method
from fedaudit.runtime.run_record import Declarations

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

    def make(name, **values):
        setting = tiny(f"cheats:{name}", rounds=1, clients=2, model="mlp", set={}, **values)
        found = check_method(setting)
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
    assert not (Path(sys.modules["cheats"].__file__).parent / tested.NAME).exists()


@pytest.mark.slow
def test_every_method_of_the_package_was_tested_as_it_is():
    """`make tested` tests those that were edited, and keeps the verdicts: once before a release."""
    wrong = []
    for name in registry.names("methods"):
        cls = registry.find(name)
        entry = tested.read(tested.file_of(cls)).get(tested.key_of(cls))
        if entry is None or not entry.held or entry.source != source_of_method(cls.make({})):
            wrong.append(name)
    assert not wrong, f"not tested as they are: {', '.join(wrong)}. `make tested` does it"
