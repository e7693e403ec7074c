"""Cells of a suite: what is done, and what is missing."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import reported

from fedaudit.errors import DataError, NotApplicable, RunError
from fedaudit.runtime.attack_result import NotRun
from fedaudit.runtime.run_record import REFUSED
from fedaudit.setting import Setting
from fedaudit.suite import cell as cell_module
from fedaudit.suite.cell import (
    Cell,
    carry_out,
    is_not_compared,
    look,
    missing,
    stage_of,
    stale_attacks,
    untried,
    why_again,
    why_stale,
)

# --- unequal rounds


@pytest.fixture
def record():
    """Two clients in round 1, one in round 2; 4000 bytes up and 2000 down."""
    made = reported._record("fedavg", 0, 0.8, releases=True)
    made.rounds[1].participants = [0]
    return made


def cell(setting=None, **more):
    values = {"attacks": ["loss"], "threats": ["server"], **more}
    return Cell(Path("nowhere"), setting or Setting.make(), **values)


def result(attack="loss", threat="server", clients=(0, 1), **more):
    from fedaudit.attack.attack_run import made
    from fedaudit.runtime.attack_result import MembershipResult
    from fedaudit.runtime.code_digest import source_of

    found = made(attack)[1]
    settings, source = found.model_dump(mode="json"), source_of(type(found))
    raw = reported._membership(attack, threat, 0.5, settings=settings, source=source)
    return MembershipResult(**{**raw, "clients": list(clients), **more})


def test_an_attack_on_some_clients_is_not_one_on_all(record):
    record.attacks = [result(clients=[0])]
    assert missing(cell(), record) == [("loss", "server")]
    record.attacks = [result(clients=[0], left_out=["client 1 was never asked"])]
    assert missing(cell(), record) == []
    record.attacks = [result(threat="peer:1", clients=[0])]  # a peer does not attack itself
    assert missing(cell(threats=["peer:1"]), record) == []
    assert missing(cell(threats=["peer:1", "server"]), record) == [("loss", "server")]


def test_claims_are_untried_only_where_there_is_a_claim_and_no_audit(record):
    private = Setting.make(privacy={"weights": {"epsilon": 1.0}})
    assert untried(cell(private, trials=10), record)
    assert not untried(cell(private, trials=0), record)
    assert not untried(cell(trials=10), record)
    record.audits = [reported._audit("not refuted", 9.2, 1.5)]
    assert not untried(cell(private, trials=10), record)


def test_a_cell_is_done_when_its_attacks_and_audits_are(record, tmp_path):
    for attacks, status in (([], "to do"), ([result(clients=[0, 1])], "done")):
        folder = tmp_path / status.replace(" ", "-")
        reported._save(folder, "a", record, attacks)
        found = Cell(folder / "runs" / "a", record.setting, ["loss"], ["server"])
        look(found)
        assert found.status == status


@pytest.mark.parametrize("status", ["done", "refused", "to do"])
def test_a_cell_that_is_over_is_left_as_it_is(status, monkeypatch):
    """Whatever failed before: only a cell that is still to do can fail."""
    cell = SimpleNamespace(status="", reason="as before")

    def look(cell):
        cell.status = status

    monkeypatch.setattr("fedaudit.suite.cell.look", look)
    carry_out(cell, failed=RunError("broken"))
    wanted = ("failed", "broken") if status == "to do" else (status, "as before")
    assert (cell.status, cell.reason.removeprefix("RunError: ")) == wanted


# --- each function alone, with what it asks made up ------------------------------------------------------------------


def test_a_record_of_an_earlier_audit_is_looked_at(record, tmp_path, monkeypatch):
    """A refusal holds for the version that made it; a run counts as done only with its attacks and its audits."""
    assert look(cell()) is None, "there is no folder"
    told = f"{REFUSED}no logits"
    for version, wanted in (("0.1.0", ("refused", "no logits; told twice")), ("0.1.1", ("to do", None))):
        monkeypatch.setattr(cell_module, "versions", lambda version=version: {"fedaudit": version})
        reported._save(
            tmp_path, version, record.model_copy(update={"status": "refused", "notes": [told, "told twice"]}), []
        )
        found = Cell(tmp_path / "runs" / version, record.setting, ["loss"], ["server"])
        assert look(found).status == "refused"
        assert (found.status, found.reason) == wanted
    private = record.setting.model_copy(update={"privacy": {"weights": {"epsilon": 1.0}}})
    untested = Cell(tmp_path / "runs" / "c", private, ["loss"], ["server"], trials=3)
    reported._save(tmp_path, "c", record.model_copy(update={"setting": private}), [result()])
    look(untested)
    assert untested.status == "to do", "its claims are not tested"
    running = Cell(tmp_path / "runs" / "d", record.setting, ["loss"], ["server"])
    reported._save(tmp_path, "d", record.model_copy(update={"status": "running"}), [result()])
    look(running)
    assert running.status == "to do"


def test_why_a_run_does_not_count_any_more(monkeypatch):
    """Its code changed, its libraries, or the harness. A run under way from before code was recorded goes on."""
    monkeypatch.setattr(cell_module, "versions", lambda: {"torch": "2", "numpy": "9"})
    monkeypatch.setattr(cell_module, "harness", lambda: "3:now")
    monkeypatch.setattr(cell_module, "code_of_setting", lambda setting: {"modules": {"a": "3:x"}})

    def why(code="3:x", torch="2", opacus=None, harness="3:now", status="done"):
        made = {"torch": torch, "opacus": opacus, "numpy": "1"}
        return why_stale(
            cell(),
            SimpleNamespace(
                code=code and {"modules": {"a": code}},
                versions={key: value for key, value in made.items() if value is not None},
                harness=harness,
                status=status,
            ),
        )

    assert why() is None
    assert why(harness="2:then") is None, "another scheme tells nothing"
    assert why(torch="1", opacus="5", harness="3:then", code="3:y") == (
        "a changed; torch was 1, is 2; opacus was 5, is not there; fedaudit's own code changed"
    )
    assert why(torch=None) == "torch was not there, is 2"
    assert why(code=None) == "its record does not say which code made it"
    assert why(code=None, status="running") is None


def test_why_a_cell_runs_again(monkeypatch):
    """A run under way is not continued by other code, whatever is kept."""
    monkeypatch.setattr(cell_module, "why_stale", lambda cell, record: "other code")
    done, running = SimpleNamespace(status="done"), SimpleNamespace(status="running")
    found = [
        why_again(cell(), of, force, keep)
        for of in (done, running)
        for force in (True, False)
        for keep in (True, False)
    ]
    assert found == ["--force", "--force", None, "other code", "--force", "--force", "other code", "other code"]


def test_attacks_by_other_code_are_told(record):
    """One by today's code, one by other code, one by another scheme of digests; others are none of the cell's."""
    one = cell(attacks=["loss", "entropy", "logit_gap"])
    record.code, record.harness = {"modules": {"a": "3:x"}}, "3:y"
    record.attacks = [
        result("loss"),
        result("entropy", source="3:then"),
        result("loss", source="3:a").model_copy(update={"attack": "stranger"}),
    ]
    assert stale_attacks(one, record) == ["entropy"]
    assert not is_not_compared(one, record)
    record.attacks += [result("logit_gap", source="2:then")]
    assert stale_attacks(one, record) == ["entropy"], "another scheme tells nothing"
    assert is_not_compared(one, record)
    assert missing(one, record) == [("entropy", "server")]
    assert not cell_module._same(record.attacks[1], "entropy", "server", 2)
    one.keep_stale = True
    assert missing(one, record) == []
    record.attacks, record.harness = [], "2:y"
    assert is_not_compared(one, record)


def test_an_attack_with_other_settings_or_by_another_threat_is_another(record):
    record.attacks = [result(settings={"other": 1})]
    assert missing(cell(), record) == [("loss", "server")]
    record.attacks = [result()]
    found = missing(cell(attacks=["loss", "entropy"], threats=["server", "outsider"]), record)
    assert found == [("entropy", "server"), ("loss", "outsider"), ("entropy", "outsider")]
    source, settings = record.attacks[0].source, record.attacks[0].settings
    record.attacks = [NotRun(attack="loss", threat="server", ran=False, reason="why", source=source, settings=settings)]
    assert missing(cell(), record) == [], "what cannot run has not to run again"


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        ("attack loss by server", "attacks"),
        ("attacks", "rounds"),
        ("claims of epsilon", "claims"),
        ("round 3", "rounds"),
    ],
)
def test_stages_by_the_words_of_their_progress(said, stage):
    assert stage_of(said) == stage


@pytest.fixture
def parts(monkeypatch):
    """Whatever a cell is carried out with, noted. What `parts.errors` holds goes wrong."""
    noted = SimpleNamespace(said=[], errors={}, record=None, trusted=[])

    def step(name, value=None):
        def done(*given, **named):
            noted.said.append(name)
            if isinstance(noted.errors.get(name), Exception):
                raise noted.errors[name]
            return noted.errors.get(name, value)

        return done

    monkeypatch.setattr(cell_module, "look", lambda cell: noted.record)
    monkeypatch.setattr(cell_module, "find", step("find"))
    monkeypatch.setattr(cell_module.registry, "trust", step("trust"))
    monkeypatch.setattr(cell_module, "run", lambda setting, **how: noted.said.append(("run", how)) or step("run")())
    monkeypatch.setattr(cell_module, "_attack", step("attack", []))
    monkeypatch.setattr(cell_module, "_try_claims", step("claims", []))
    refuse = SimpleNamespace(refuse=lambda folder, why: noted.said.append((str(folder), why)))
    monkeypatch.setattr(cell_module, "read_record", lambda folder: refuse)
    return noted


def test_a_cell_is_carried_out(parts):
    one = cell()
    carry_out(one, watch="a watch", engine="an engine")
    how = {"out": Path("nowhere"), "resume": True, "watch": "a watch", "engine": "an engine", "refuse_idle": True}
    assert parts.said == ["find", ("run", how), "run", "attack", "claims"]
    assert (one.status, one.reason) == ("done", None)
    parts.said.clear()
    parts.record, parts.errors["attack"], parts.errors["claims"] = SimpleNamespace(status="done"), ["a", "b"], ["c"]
    one = cell(trust=True)
    carry_out(one)
    assert (parts.said, one.status, one.reason) == (["trust", "find", "attack", "claims"], "failed", "a; b; c")
    assert one.error == "a; b; c"
    parts.record, parts.errors = SimpleNamespace(status="running"), {"run": NotApplicable("no logits")}
    one = cell()
    carry_out(one)
    assert (one.status, one.reason, one.error) == ("refused", "no logits", None)
    assert parts.said[-1] == ("nowhere", "no logits")
    parts.errors = {"run": ValueError("broken")}
    one = cell()
    carry_out(one)
    assert one.reason.startswith("ValueError: broken (done, test_cell.py:")


def test_cells_are_carried_out_together(parts, monkeypatch):
    """Of five cells two are run: one is over, one has only its attacks to do, one cannot be read."""
    cells = [Cell(Path(name), Setting.make(seed=i), [], []) for i, name in enumerate("abcde")]
    cells[1].status = "done"
    damaged = RunError("damaged")

    def look(cell):
        if cell.folder.name == "d":
            raise damaged
        return {"a": None, "c": SimpleNamespace(status="done"), "e": SimpleNamespace(status="running")}.get(
            cell.folder.name
        )

    ran, ended = [], []

    def together(places, **how):
        ran.append(([(place.setting.seed, place.folder.name, place.watch) for place in places], how))
        return [SimpleNamespace(error=None), SimpleNamespace(error=failure)]

    monkeypatch.setattr(cell_module, "look", look)
    monkeypatch.setattr(cell_module, "run_together", together)
    monkeypatch.setattr(cell_module, "carry_out", lambda cell, watch, failed: ended.append((cell, watch, failed)))
    failure = RunError("the last one")
    watches = ["w0", "w1", "w2", "w3", "w4"]
    assert list(cell_module.carry_out_together(cells, watches)) == cells
    assert ran == [([(0, "a", "w0"), (4, "e", "w4")], {"resume": True, "refuse_idle": True})]
    assert ended == list(zip(cells, watches, [None, None, None, damaged, failure], strict=True))
    ended.clear()
    monkeypatch.setattr(cell_module, "run_together", lambda places, **how: [SimpleNamespace(error=None)])
    list(cell_module.carry_out_together(cells, watches))
    assert [type(failed) for *_, failed in ended[::4]] == [ValueError, ValueError], "an end is missing"
    ended.clear()
    both = RunError("all of them")

    def fails(places, **how):
        raise both

    monkeypatch.setattr(cell_module, "run_together", fails)
    list(cell_module.carry_out_together(cells, watches))
    assert [failed for *_, failed in ended] == [both, None, None, damaged, both]
    ended.clear()
    list(cell_module.carry_out_together(cells[1:3], watches))
    assert [failed for *_, failed in ended] == [None, None], "there is nothing to run"


def test_missing_attacks_are_run_for_each_threat(monkeypatch):
    """One threat's attack fails, another threat fails as a whole, and the third is well."""
    asked, told = [], []

    def attack_run(folder, attacks, threat, watch, failed):
        asked.append((folder, attacks, threat))
        watch(1, 2, attacks[0])
        if threat == "server":
            failed("loss", RunError("broken"))
        if threat == "outsider":
            raise RunError("no messages")

    pairs = [("loss", "server"), ("gap", "peer:1"), ("entropy", "server"), ("loss", "outsider")]
    monkeypatch.setattr(cell_module, "attack_run", attack_run)
    monkeypatch.setattr(cell_module, "read_record", lambda folder: folder)
    monkeypatch.setattr(cell_module, "missing", lambda cell, record: pairs)
    one = cell(Setting.make(rounds=7))
    errors = cell_module._attack(one, lambda *given: told.append(given))
    assert errors == ["attack loss by server: broken", "attacks by outsider: no messages"]
    here = Path("nowhere")
    assert asked == [
        (here, ["loss", "entropy"], "server"), (here, ["gap"], "peer:1"), (here, ["loss"], "outsider"),
    ]  # fmt: skip
    assert told == [
        (7, 7, "attack loss by server"), (7, 7, "attack gap by peer:1"), (7, 7, "attack loss by outsider"),
    ]  # fmt: skip
    assert cell_module._attack(one, None) == errors


@pytest.mark.parametrize("training", [True, False])
def test_claims_are_tried_in_order(training, monkeypatch):
    """Canaries only where DP-SGD trains. Data that is missing is no error of the claims, anything else is."""
    room = lambda name: importlib.import_module(f"fedaudit.epsilon.{name}")  # noqa: E731
    done, told = [], []

    def noted(name, error=None):
        def step(folder, *given, **named):
            done.append((name, folder, *given, named))
            if error is not None:
                raise error

        return step

    monkeypatch.setattr(room("one_run"), "audit_run", noted("run", DataError("no losses")))
    monkeypatch.setattr(room("release_path"), "audit_releases", noted("releases"))
    monkeypatch.setattr(room("clipping"), "audit_clipping", noted("clipping"))
    monkeypatch.setattr(room("residuals"), "audit_residuals", noted("residuals"))
    canaries = SimpleNamespace(of="beside")
    monkeypatch.setattr(room("gradient_canaries"), "Canaries", lambda: canaries)
    monkeypatch.setattr(
        room("gradient_canaries"),
        "keep_canaries",
        noted("canaries", DataError("none")),
    )
    monkeypatch.setattr(cell_module, "read_record", lambda folder: SimpleNamespace(audits=[]))
    kind = "training" if training else "logits"
    one = cell(Setting.make(rounds=3, privacy={kind: {"epsilon": 1.0}}), trials=20)
    here = one.folder
    assert cell_module._try_claims(one, lambda *given: told.append(given)) == []
    assert told == [(3, 3, "claims of epsilon")]
    steps = [("run", here, {}), ("releases", here, {"trials": 20}), ("clipping", here, {})]
    steps += [("residuals", here, {"beside": "beside" if training else None})]
    assert done == steps + ([("canaries", here, canaries, {})] if training else [])
    monkeypatch.setattr("fedaudit.epsilon.clipping.audit_clipping", noted("clipping", DataError("none")))
    assert cell_module._try_claims(one, None) == ["claims of epsilon: none"]
    done.clear()
    assert cell_module._try_claims(cell(one.setting, trials=0), None) == []
    assert done == []


def test_a_cell_as_it_is_made():
    one = Cell(Path("a"), Setting.make(), ["loss"], ["server"])
    assert (one.trials, one.status, one.keep_stale, one.trust) == (0, "to do", False, False)
    assert (one.again, one.not_compared, one.reason, one.error) == (None, False, None, None)
