"""A record that version 0.1 wrote is still read, to the last number. `version_0_1` was made by
`fedaudit run --method fedavg --rounds 2 --clients 2 --model mlp --set E=1` and an attack, of which a part was kept; the
audit is in the form of that version."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedaudit import read_record
from fedaudit.errors import RunError
from fedaudit.runtime import run_record
from fedaudit.runtime.run_record import CurvePoint, Declarations, EpsilonAudit, RoundRecord, TwinFacts, save_attacks
from fedaudit.runtime.scores import Accuracy, ClientScores, GlobalScores, Spread, Utility

OLD = Path(__file__).with_name("version_0_1")


def test_an_old_record_is_read():
    raw = json.loads((OLD / "record.json").read_text())
    record = read_record(OLD)
    assert record.setting.init == "own", "what every client did before there was a choice"
    last = record.result.last
    assert last.round == 2
    assert last.global_.test.accuracy == raw["result"]["last"]["global"]["test"]["accuracy"]
    assert last.global_.local_test is None, "it was not tried then"
    assert last.clients.local_test.each == raw["result"]["last"]["clients"]["local_test"]["each"]
    assert [point.accuracy for point in record.curve] == [
        row["utility"]["global"]["test"]["accuracy"] for row in raw["rounds"]
    ]
    assert record.result.best_test_round.model_dump() == raw["result"]["best_test_round"]


def test_what_was_kept_beside_it_is_read():
    record = read_record(OLD)
    assert len(record.attacks) == len(record.audits) == 1
    assert json.loads((OLD / "audits.json").read_text())["audits"][0]["claim_epsilon"] == "Infinity"
    assert record.audits[0].claim_epsilon == math.inf
    [loss] = record.attacks
    assert (loss.attack, loss.claims, loss.source) == ("loss", "membership", None)
    assert [at.fpr for at in loss.pooled.tpr_at_fpr] == [0.1, 0.01, 0.001]


def test_old_attacks_are_written_as_they_were(tmp_path):
    """What a later version would say besides is not made up: the file stays the same, to the last field."""
    record = read_record(OLD)
    save_attacks(tmp_path, record.transcript_digest, record.attacks)
    assert json.loads((tmp_path / "attacks.json").read_text()) == json.loads((OLD / "attacks.json").read_text())


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda attack: attack["pooled"]["auc"].update(value="high"), r"attacks\.0\.membership\.pooled\.auc\.value"),
        (lambda attack: attack["pooled"].pop("auc"), r"attacks\.0\.membership\.pooled\.auc"),
        (lambda attack: attack.update(claims="everything"), r"attacks\.0"),
        (lambda attack: attack.update(leek=True), r"attacks\.0\.membership\.leek"),
    ],
)
def test_a_damaged_attack_is_refused(tmp_path, change, where):
    shutil.copytree(OLD, tmp_path / "run")
    raw = json.loads((OLD / "attacks.json").read_text())
    change(raw["attacks"][0])
    (tmp_path / "run" / "attacks.json").write_text(json.dumps(raw))
    with pytest.raises(RunError, match=rf"attacks\.json cannot be read: {where}: .*attack again"):
        read_record(tmp_path / "run")


def test_an_old_record_is_written_as_it_was(tmp_path):
    """Fields that were added since have values of their own; no old one is lost, renamed or rounded."""
    raw = json.loads((OLD / "record.json").read_text())
    read_record(OLD).save(tmp_path)
    written = json.loads((tmp_path / "record.json").read_text())

    def within(old, new, where="record"):
        if isinstance(old, dict):
            for key in old:
                assert key in new, f"{where}.{key} is lost"
                within(old[key], new[key], f"{where}.{key}")
        elif isinstance(old, list):
            assert len(old) == len(new), where
            for i, (a, b) in enumerate(zip(old, new, strict=True)):
                within(a, b, f"{where}[{i}]")
        else:
            assert old == new, where

    within(raw, written)
    assert list(written["result"]["last"]) == ["round", "global", "clients"], "empty tables are not written"


@pytest.mark.parametrize("damage", ["accuracy", "global"])
def test_a_damaged_score_is_refused(tmp_path, damage):
    shutil.copytree(OLD, tmp_path / "run")
    raw = json.loads((OLD / "record.json").read_text())
    if damage == "accuracy":
        raw["rounds"][0]["utility"]["global"]["test"]["accuracy"] = "high"
    else:
        raw["rounds"][0]["utility"]["globl"] = raw["rounds"][0]["utility"].pop("global")
    (tmp_path / "run" / "record.json").write_text(json.dumps(raw))
    with pytest.raises(RunError, match=r"not a valid run record: rounds\.0\.utility"):
        read_record(tmp_path / "run")


def set_at(tree, place, value):
    """Put a value where a path such as ledger.0.by_kind.weights leads to."""
    *way, last = (int(part) if part.isdigit() else part for part in place.split("."))
    for part in way:
        tree = tree[part]
    tree[last] = value


def changed_copy(tmp_path, file, place, value):
    """Return a copy of the old run, in which one value of one file is another."""
    folder = Path(shutil.copytree(OLD, tmp_path / "run"))
    raw = json.loads((OLD / file).read_text())
    if place.startswith("releases"):
        raw["releases"][0]["protection"] = {"mechanism": "gaussian"}
    set_at(raw, place, value)
    (folder / file).write_text(json.dumps(raw))
    return folder


EPSILONS = (
    "ledger.0.epsilon", "ledger.1.claim", "ledger.0.by_kind.weights", "ledger.0.by_relation.any.epsilon",
    "ledger.0.by_relation.any.by_accountant.rdp", "ledger.0.entries.1.claim", "releases.0.protection.claim",
    "audits.0.claim_epsilon", "audits.0.ledger_epsilon", "audits.0.lower_bound",
)  # fmt: skip
DELTAS = ("ledger.1.delta", "ledger.0.entries.0.delta", "releases.0.protection.delta", "audits.0.delta")


@pytest.mark.parametrize(
    ("place", "value"),
    [(place, value) for place in EPSILONS for value in (-1.5, "NaN", math.nan, "-Infinity")]
    + [(place, value) for place in DELTAS for value in (-1.5, 1.5, "NaN", math.nan, "Infinity")],
)
def test_an_impossible_epsilon_or_delta_is_refused(tmp_path, place, value):
    """The error names the file, the place in it, the value, and what to do."""
    beside = place.startswith("audits")
    file, lead = ("audits.json", "cannot be read") if beside else ("record.json", "is not a valid run record")
    folder = changed_copy(tmp_path, file, place, value)
    remedy = "Remove it, and audit again." if beside else "Name a folder of `fedaudit run`."
    with pytest.raises(RunError) as refused:
        read_record(folder)
    said = str(refused.value)
    assert said.startswith(f"{folder / file} {lead}: {place}: Input should be ")
    assert said.endswith(f" (it is {value}). {remedy}")


@pytest.mark.parametrize(
    ("place", "value"),
    [(place, value) for place in EPSILONS for value in (0.0, "Infinity")]
    + [(place, value) for place in DELTAS for value in (0.0, 1.0)],
)
def test_no_guarantee_and_the_ends_of_the_range_are_read(tmp_path, place, value):
    assert read_record(
        changed_copy(tmp_path, "audits.json" if place.startswith("audits") else "record.json", place, value)
    )


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"epsilon": -1}, r"privacy\.weights\.epsilon = -1 is not a number from 0 to inf"),
        ({"epsilon": "NaN"}, r"privacy\.weights\.epsilon = nan"),
        ({"epsilon": 1.0, "delta": 1.5}, r"privacy\.weights\.delta = 1\.5 is not a number from 0 to 1"),
        ({"epsilon": 1.0, "delta": "-0.5"}, r"privacy\.weights\.delta = -0\.5"),
    ],
)
def test_an_impossible_epsilon_that_was_asked_for_is_refused(tmp_path, policy, told):
    folder = changed_copy(tmp_path, "record.json", "setting.privacy", {"weights": policy})
    with pytest.raises(RunError, match=rf"record\.json is not a valid run record: setting: .*{told}.* Name a folder"):
        read_record(folder)


@pytest.mark.parametrize("policy", [{"epsilon": 0.5, "delta": "1/n"}, {"epsilon": None, "delta": 0}, "a word"])
def test_what_may_be_asked_for_is_read(tmp_path, policy):
    assert read_record(changed_copy(tmp_path, "record.json", "setting.privacy", {"weights": policy})).setting.privacy


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_accuracy_against_the_bytes_of_all_rounds_before():
    """The second of four rounds was not evaluated, and sent bytes all the same."""
    both = Utility.model_validate(
        {"global": GlobalScores(test=Accuracy(accuracy=0.5, low=0.25, high=0.75, n=8)),
         "clients": ClientScores(global_test=Spread(mean=0.4, std=0.1, each=[0.3, 0.5]))}
    )  # fmt: skip
    none, without = Utility(), Utility(clients=ClientScores())
    rounds = [
        RoundRecord(round=t, participants=[0], up_payload=t, up_wire=10 * t, down_payload=100 * t, down_wire=1000 * t,
                    utility=utility, wall_s=1.0)
        for t, utility in enumerate((both, None, none, without), 1)
    ]  # fmt: skip
    assert run_record.curve_of(rounds) == [
        CurvePoint(round=1, up_payload=1, up_wire=10, down_payload=100, down_wire=1000, accuracy=0.5, low=0.25,
                   high=0.75, clients_mean=0.4, clients_std=0.1),
        CurvePoint(round=3, up_payload=6, up_wire=60, down_payload=600, down_wire=6000),
        CurvePoint(round=4, up_payload=10, up_wire=100, down_payload=1000, down_wire=10000),
    ]  # fmt: skip


def test_a_rounds_own_seconds():
    row = RoundRecord.model_construct(wall_s=3.0, share_s=None)
    assert row.own_s == 3.0
    assert RoundRecord.model_construct(wall_s=3.0, share_s=1.25).own_s == 1.25


def audit(**facts):
    base = {
        "test": "residuals", "kind": "logits", "threat": "server", "claim": "c", "claim_epsilon": 1.0,
        "ledger_epsilon": None, "lower_bound": 0.5, "p_value": 0.5, "trials": 10, "confidence": 0.95, "delta": 1e-5,
        "verdict": "not refuted", "method": "m", "how": "h",
    }  # fmt: skip
    return EpsilonAudit(**(base | facts))


def test_what_an_audit_cannot_say():
    assert audit().of_noise
    assert not audit(test="one run").of_noise
    assert audit(method=run_record.CERTAIN).certain
    assert not audit().certain
    assert audit(ceiling=0.5).ceiling == 0.5
    assert audit(ceiling=0.25, trials=0, verdict="not tried").trials == 0, "nothing was tried"
    for wrong in ({"p_value": 1.5}, {"confidence": -0.1}, {"ceiling": 0.25}):
        with pytest.raises(ValueError):  # noqa: PT011 (each names another field)
            audit(**wrong)


def test_what_refutes_without_a_bound_has_none():
    assert audit().bound == audit(verdict="refuted").bound == 0.5
    assert audit(lower_bound=0.0).bound == 0.0, "the test found nothing"
    assert audit(lower_bound=0.0, verdict="suspicious").bound == 0.0
    assert audit(lower_bound=0.0, verdict="refuted").bound is None


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"tested": "never"}, "never tested (`fedaudit check-method` tests them; source abcdefghijkl)"),
        ({"tested": "another source", "tested_source": "zyx"}, "for another version of the source (zyx); this is abc"),
        ({"tested": "another source", "tested_source": "zyx", "source": "2:abc"}, "cannot be compared with 2:abc"),
        ({"tested": "another source", "tested_source": "2:zyx", "source": "2:abc"}, "another version of the source"),
        ({"tested": "held"}, "for this version of the source (abcdefghijkl): held"),
        ({"tested": "broken", "twin_sets": 3}, ": broken; 3 sets of other records for every client"),
    ],
)
def test_what_is_known_of_declarations_in_words(facts, words):
    found = Declarations(**({"source": "abcdefghijklmnop", "fedaudit": "1.0"} | facts)).text()
    assert words in found
    assert ("sets of other records" in found) is ("twin_sets" in facts)


def test_twins_in_words():
    assert TwinFacts().text().startswith("no client had a twin")
    one = TwinFacts(wanted="1", clients=[3], tasks=4, held=4)
    assert one.text() == "1 client had a twin with other records: 4 of 4 tasks gave the same reply to the bit"
    assert one.text(1) == one.text(), "every client had one"
    assert one.text(3) == (
        "1 of 3 clients had a twin with other records: 4 of 4 tasks gave the same reply to the bit "
        "(--twins all compares every client)"
    )
    assert TwinFacts().text(3) == TwinFacts().text()
    two = TwinFacts(wanted="2", clients=[3, 5], tasks=4, held=3, lost=1, differences=["a", "b"])
    assert two.text().startswith("2 clients had a twin")
    assert two.text().endswith("1 were lost when the run was resumed; different: a; b")


@pytest.mark.parametrize(
    ("published", "privacy", "covered"),
    [([], {}, True), (["global.safetensors"], {}, True), (["client-000000.safetensors"], {}, False),
     (["client-000000.safetensors"], {"training": {}}, True), (["client-000000.safetensors"], {"logits": {}}, False)],
)  # fmt: skip
def test_published_models_that_the_ledger_covers(published, privacy, covered):
    record = SimpleNamespace(published=published, setting=SimpleNamespace(privacy=privacy))
    assert run_record.RunRecord.models_covered.fget(record) is covered


@pytest.mark.parametrize(
    ("status", "idle", "privacy", "applies"),
    [("done", [], {}, None), ("done", [], {"a": 1}, True), ("done", ["a"], {"a": 1}, False),
     ("done", ["a"], {"a": 1, "b": 1}, True), ("refused", [], {"a": 1}, False)],
)  # fmt: skip
def test_a_policy_that_protected_something(status, idle, privacy, applies):
    record = SimpleNamespace(status=status, idle_policies=idle, setting=SimpleNamespace(privacy=privacy))
    assert run_record.RunRecord.privacy_applies.fget(record) is applies


def test_bytes_of_a_run_by_direction():
    rows = [("up", 1, 10), ("down", 2, 20), ("up", 4, 40)]
    record = SimpleNamespace(
        traffic=[SimpleNamespace(direction=way, payload=payload, wire=wire) for way, payload, wire in rows]
    )
    sent = run_record.RunRecord.bytes
    assert (sent(record, "up"), sent(record, "down"), sent(record, "up", "wire")) == (5, 2, 50)


def test_machines_of_one_type():
    def record(device="d", **versions):
        return SimpleNamespace(device=device, versions={"cpu": "c", "torch": "1", "platform": "p"} | versions)

    same = run_record.same_machine_type
    assert same(record(), record(numpy="other"))
    assert not same(record(), record(torch="2"))
    assert not same(record(), record("other"))
    assert not same(record(cuda="12"), record())
    old = SimpleNamespace(device="d", versions={"torch": "1", "platform": "p"})
    assert not same(old, old), "which processor it was is not known"


def test_a_later_audit_of_the_same_claim_replaces_the_earlier(tmp_path):
    shutil.copytree(OLD, tmp_path / "run")
    folder, digest = tmp_path / "run", read_record(OLD).transcript_digest
    known = read_record(folder).audits
    run_record.save_audits(folder, digest, [audit(p_value=0.5), audit(test="one run", p_value=0.25)], 1.23456)
    run_record.save_audits(folder, digest, [audit(p_value=0.125)], 7.0)
    found = {(one.test, one.claim): one.p_value for one in read_record(folder).audits}
    assert found == {(one.test, one.claim): one.p_value for one in known} | {
        ("residuals", "c"): 0.125, ("one run", "c"): 0.25,
    }  # fmt: skip
    assert run_record.audit_seconds(folder, digest)["residuals"] == 7.0
    assert run_record.audit_seconds(folder, "another transcript") == {}
    run_record.save_audits(folder, "another transcript", [audit()], 2.0)
    assert run_record.audit_seconds(folder, "another transcript") == {"residuals": 2.0}


@pytest.mark.parametrize(
    ("cls", "defaults"),
    [
        (run_record.FieldTraffic, {"payload": 0, "buffers": 0, "wire": 0}),
        (run_record.SumRecord, {"secure": False} | dict.fromkeys(
            ("advertised", "shared", "helped", "neighbours", "threshold", "bound", "error", "cut_off", "clip", "sigma",
             "where", "within"))),
        (RoundRecord, {"absent": [], "redone": 0, "utility": None, "sums": [], "diagnostics": {}, "seeds": None,
                       "share_s": None}),
        (CurvePoint, dict.fromkeys(("accuracy", "low", "high", "clients_mean", "clients_std"))),
        (EpsilonAudit, dict.fromkeys(("ceiling", "finds", "seeks", "tells_at", "guesses"))),
        (Declarations, {"tested_source": None, "fedaudit": None, "settings": {}, "twin_sets": 0}),
        (TwinFacts, {"wanted": "off", "clients": [], "tasks": 0, "held": 0, "lost": 0, "differences": [],
                     "wall_s": 0.0}),
        (run_record.DataFacts, {"tokens": 0, "persons": [], "most_of_person": 1, "most_clients": 1, "copies": 1,
                                "digest": None}),
        (run_record.RunRecord, {
            "schema_version": 1, "status": "running", "traffic_declared": True, "peak_rss_bytes": 0,
            "peak_gpu_bytes": 0, "transcript_digest": "", "result": run_record.Result(),
            **dict.fromkeys(("finished", "harness", "declarations", "twins", "code")),
            **{name: [] for name in ("rounds", "curve", "traffic", "releases", "ledger", "timings", "published",
                                     "attacks", "audits", "notes", "idle_policies", "beside")}}),
    ],
)  # fmt: skip
def test_what_a_record_does_not_say_is_as_before_it_could(cls, defaults):
    fields = {name: field for name, field in cls.model_fields.items() if not field.is_required()}
    assert run_record.curve_of([]) == []
    assert {name: field.get_default(call_default_factory=True) for name, field in fields.items()} == defaults


def test_a_record_is_written_one_blank_a_level_and_without_what_lies_beside_it():
    record = read_record(OLD)
    text = record.text()
    assert text.startswith('{\n "schema_version": 1,\n')
    assert record.attacks
    assert record.audits
    assert not {"attacks", "audits"} & json.loads(text).keys()
    assert json.loads(text)["transcript_digest"] == record.transcript_digest


def test_what_lies_beside_a_record_is_written_one_blank_a_level(tmp_path):
    save_attacks(tmp_path, "d", [])
    assert (tmp_path / "attacks.json").read_text() == '{\n "transcript_digest": "d",\n "attacks": []\n}'


def test_a_refused_record_says_so(tmp_path):
    record = read_record(OLD)
    record.setting.privacy.update({"logits": {}, "labels": {}})
    record.refuse(tmp_path, "it releases nothing")
    assert (record.status, record.idle_policies) == ("refused", ["labels", "logits"])
    assert record.notes == [run_record.REFUSED + "it releases nothing"]
    assert (tmp_path / "record.json").exists()


def test_a_curve_that_does_not_follow_from_the_rounds_is_refused(tmp_path):
    raw = json.loads((OLD / "record.json").read_text())
    record = run_record.RunRecord.model_validate({**raw, "curve": []})
    assert len(record.curve) == 2, "an old record has none"
    plain = json.loads(record.text())
    assert run_record.RunRecord.model_validate(plain).curve == record.curve
    plain["curve"][1]["up_wire"] += 1
    with pytest.raises(ValueError, match="the curve does not follow"):
        run_record.RunRecord.model_validate(plain)


def test_how_clients_began_is_filled_in_for_old_records_alone():
    fill = run_record.RunRecord._each_client_drew_its_own
    assert fill({"setting": {"seed": 1}, "x": 2}) == {"setting": {"seed": 1, "init": "own"}, "x": 2}
    assert fill({"setting": {"init": "same"}}) == {"setting": {"init": "same"}}
    assert fill({"setting": 3}) == {"setting": 3}
    assert fill([]) == []


def test_a_fault_of_ours_is_told_from_a_damaged_record(tmp_path, monkeypatch):
    """The record is as its run left it if the checkpoint says the same, whatever lies beside it."""
    monkeypatch.delenv("FEDAUDIT_TRACEBACK", raising=False)

    def told(what):
        with pytest.raises(RunError) as raised, run_record.reading(what):
            raise KeyError("x")
        return str(raised.value)

    assert "does not hold what a run leaves (KeyError 'x', in told)" in told(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "HEAD.json").write_text(json.dumps({"record": {"a": 1, "attacks": [3]}}))
    (tmp_path / "record.json").write_text(json.dumps({"a": 1, "audits": [4]}))
    assert "a bug of fedaudit" in told(tmp_path)
    assert "does not hold" in told("two folders")
    (tmp_path / "record.json").write_text(json.dumps({"a": 2}))
    assert "does not hold" in told(tmp_path)
    with pytest.raises(RunError, match="as it is"), run_record.reading(tmp_path):
        raise RunError("as it is")
    monkeypatch.setenv("FEDAUDIT_TRACEBACK", "1")
    with pytest.raises(KeyError), run_record.reading(tmp_path):
        raise KeyError("x")


def test_a_record_of_another_schema_and_no_record_are_refused(tmp_path):
    with pytest.raises(RunError, match=r"record\.json is missing"):
        read_record(tmp_path)
    path = tmp_path / "record.json"
    for text, words in (
        ("no JSON", "cannot be read"), ('{"schema_version": 2}', "has schema version 2; this fedaudit reads version 1"),
        ("[]", "is not a valid run record"), ('{"schema_version": 1}', "is not a valid run record: setting: "),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(RunError, match=words):
            read_record(path)


def test_audits_of_no_test_take_no_time(tmp_path):
    run_record.save_audits(tmp_path, "d", [], 3.0)
    assert run_record.audit_seconds(tmp_path, "d") == {}
    run_record.save_audits(tmp_path, "d", [audit()])
    assert run_record.audit_seconds(tmp_path, "d") == {"residuals": 0.0}
    assert run_record._read_beside(tmp_path / "record.json", "audits", "e", run_record.audits) == []
    assert [
        one.claim for one in run_record._read_beside(tmp_path / "record.json", "audits", "d", run_record.audits)
    ] == ["c"]
