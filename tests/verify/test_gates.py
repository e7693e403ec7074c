"""Gates and readers of a folder that is not what its run left: none goes on as if nothing were wrong."""

from __future__ import annotations

import json
import shutil

import pytest
from forging import put_beside, put_record, seal

from fedaudit.epsilon import residuals
from fedaudit.errors import ThreatError
from fedaudit.reports.compare import as_json, as_text, compare
from fedaudit.runtime.run_record import EpsilonAudit, read_record, save_audits
from fedaudit.runtime.scores import Accuracy
from fedaudit.stats import wilson
from fedaudit.verify.check import verify


def flip(folder) -> None:
    path = folder / "transcript" / "000001.weights.pack"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def budget(tmp_path):
    path = tmp_path / "budget.toml"
    path.write_text('[[budget]]\nmax = "1 GiB"\nper = "run"\n')
    return path


# --- fedaudit check ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["table", "junit", pytest.param("github", marks=pytest.mark.long)])
def test_check_fails_a_folder_that_contradicts_itself(fedaudit, copy_of, budget, format):
    folder = copy_of("plain")
    assert fedaudit("check", folder, "--budget", budget, "--format", format)[0] == 0
    flip(folder)
    seal(folder)
    code, out, _ = fedaudit("check", folder, "--budget", budget, "--format", format)
    assert code == 1
    assert "000001.weights.pack" in out


def test_check_fails_an_epsilon_that_its_ledger_does_not_give(fedaudit, copy_of, budget):
    folder = copy_of("noised")
    record = read_record(folder)
    record.ledger[0].epsilon = 0.5
    put_record(folder, record)
    seal(folder)
    code, out, _ = fedaudit("check", folder, "--budget", budget)
    assert code == 1
    assert "ledger.0.epsilon is 0.5" in " ".join(out.split())


def test_check_fails_a_value_outside_its_interval(fedaudit, copy_of, budget):
    folder = copy_of("plain")
    raw = json.loads((folder / "record.json").read_text())
    raw["rounds"][-1]["utility"]["global"]["test"]["accuracy"] = 0.99
    (folder / "record.json").write_text(json.dumps(raw))
    code, out, _ = fedaudit("check", folder, "--budget", budget)
    assert code == 1
    assert "outside of its own interval" in " ".join(out.split())


# --- a damaged part is not skipped in silence --------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("transcript", "RUN"), ("show", "RUN"), ("attack", "RUN", "--attack", "loss"), ("report", "ALL"),
        ("epsilon", "residuals", "RUN"), ("epsilon", "release-path", "RUN"), ("compare", "ALL", "ALL"),
        ("export", "ALL", "--to", "csv", "--out", "OUT"),
    ],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_a_flipped_byte_stops_every_command(fedaudit, copy_of, tmp_path, words):
    folder = copy_of("trained")
    flip(folder)
    seal(folder)
    named = {"RUN": folder, "ALL": folder.parent, "OUT": tmp_path / "out"}
    code, out, err = fedaudit(*(named.get(word, word) for word in words))
    assert code == 2
    assert "000001.weights.pack" in " ".join((out + err).split())


def test_residuals_count_the_clients_they_looked_at(copy_of, monkeypatch):
    """A client that cannot be repeated is not left out without a word: of the others, nothing follows for all."""
    folder = copy_of("noised")
    (before,) = residuals.audit_residuals(folder)
    real = residuals.repeat

    def lost(run, k, *more):
        if k == 1:
            raise ThreatError("it is gone")
        return real(run, k, *more)

    monkeypatch.setattr(residuals, "repeat", lost)
    (audit,) = residuals.audit_residuals(folder)
    assert "2 of 3 clients were looked at; client 1 could not be repeated: it is gone" in audit.how
    assert (before.verdict, audit.verdict) == ("not refuted", "cannot tell")
    assert not verify(folder).contradictions


@pytest.mark.long
def test_fail_if_refuted_looks_at_the_whole_run(fedaudit, copy_of):
    """What another test refuted in this run counts, as it does for a budget of refuted claims."""
    folder = copy_of("noised")
    assert fedaudit("epsilon", "residuals", folder, "--fail-if-refuted")[0] == 0
    record = read_record(folder)
    refuted = EpsilonAudit(
        test="another test", kind="embeddings", threat="server", claim="Shared.E, one release", claim_epsilon=2.0,
        ledger_epsilon=2.0, lower_bound=9.0, p_value=1e-12, trials=1000, confidence=0.95, delta=1e-5,
        verdict="refuted", method="by hand", how="by hand",
    )  # fmt: skip
    save_audits(folder, record.transcript_digest, [refuted])
    assert fedaudit("epsilon", "residuals", folder, "--fail-if-refuted")[0] == 1
    assert fedaudit("epsilon", "residuals", folder)[0] == 0


def test_a_claim_that_could_not_be_tried_is_not_green(fedaudit, copy_of, tmp_path, monkeypatch):
    """Nothing refutes what nothing could try: a gate says so, with the cause, and a command without a gate does not."""
    folder, rule = copy_of("noised"), tmp_path / "refuted.toml"
    rule.write_text('[[budget]]\nmetric = "refuted"\nmax = 0\n')

    def lost(run, k, *more):
        raise ThreatError("it is gone")

    monkeypatch.setattr(residuals, "repeat", lost)
    code, out, err = fedaudit("epsilon", "residuals", folder, "--fail-if-refuted")
    assert code == 2
    assert "tried" in out, "the table comes first"
    words = "is untested, so it cannot count as not refuted: residuals could not try it: it is gone. Remove that cause"
    assert words in " ".join(err.split())
    code, out, err = fedaudit("check", folder, "--budget", rule)
    assert code == 2
    assert words in " ".join((out + err).split())
    assert fedaudit("epsilon", "residuals", folder)[0] == 0
    # Another test of the same kind tries it, and a policy on what is never released claims nothing.
    (left,) = [audit for audit in read_record(folder).audits if audit.test == "residuals"]
    tried = left.model_copy(update={"test": "release path", "trials": 9, "verdict": "not refuted"})
    for audits in ([tried], [left.model_copy(update={"ledger_epsilon": 0.0})]):
        save_audits(folder, read_record(folder).transcript_digest, audits)
        assert fedaudit("check", folder, "--budget", rule)[0] == 0


# --- fedaudit compare --------------------------------------------------------------------------------------------


@pytest.fixture
def two(honest, tmp_path):
    """The same run in two folders."""
    for name in ("a", "b"):
        shutil.copytree(honest / "attacked", tmp_path / name / "run")
    return tmp_path / "a", tmp_path / "b"


def test_equal_folders_raise_no_alarm(two):
    assert compare(*two).alarms == []


def test_equal_messages_with_unequal_accuracy_are_an_alarm(fedaudit, two):
    record = read_record(two[1] / "run")
    scores = record.rounds[-1].utility.global_
    hits = round(scores.test.accuracy * scores.test.n) - 7
    low, high = wilson(hits, scores.test.n)
    scores.test = Accuracy(accuracy=hits / scores.test.n, low=low, high=high, n=scores.test.n)
    put_record(two[1] / "run", record)
    seal(two[1] / "run")
    result = compare(*two)
    (alarm,) = result.alarms
    assert "every message is the same to the bit, but accuracy of round 2" in alarm
    assert "ALARM" in as_text(result)
    assert json.loads(as_json(result))["alarms"] == [alarm]
    assert fedaudit("compare", *two)[0] == 1
    assert fedaudit("compare", *two, "--max-drop", "auc=1")[0] == 1, "no gate lets an alarm pass"


def test_equal_messages_with_unequal_epsilon_or_auc_are_an_alarm(two):
    record = read_record(two[1] / "run")
    for ledger in record.ledger:
        ledger.entries = ledger.entries[:1]
    put_record(two[1] / "run", record)
    assert any("ledger" in alarm for alarm in compare(*two).alarms)
    put_beside(two[0] / "run", "attacks", lambda rows: rows[-1]["pooled"]["auc"].update(
        value=rows[-1]["pooled"]["auc"]["low"]))  # fmt: skip
    assert any("AUC" in alarm for alarm in compare(*two).alarms)


def test_unequal_messages_of_one_setting_and_machine_are_an_alarm(two, monkeypatch):
    """Without a policy and on one machine type: a record from before the processor was recorded raises none."""

    def another(record):
        record.transcript_digest = "0" * 32
        return record

    import fedaudit.reports.runs as runs

    real = runs.read_record
    monkeypatch.setattr(runs, "check_transcript", lambda *_: None)
    monkeypatch.setattr(runs, "read_record", lambda path: another(real(path)) if "/b/" in str(path) else real(path))
    (alarm,) = compare(*two).alarms
    assert "the messages are not" in alarm

    def older(path):
        record = another(real(path)) if "/b/" in str(path) else real(path)
        record.versions.pop("cpu", None)
        return record

    monkeypatch.setattr(runs, "read_record", older)
    assert compare(*two).alarms == []


# --- seals and notes ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_show_and_report_say_whether_a_run_was_checked(fedaudit, copy_of):
    folder = copy_of("plain")
    _, out, _ = fedaudit("show", folder)
    assert "seal " in out
    assert "not checked" in out
    verify(folder, rerun=0.5, seed=1)
    _, out, _ = fedaudit("show", folder)
    assert "50.0% of the client tasks done again" in " ".join(out.split())
    assert "0 contradicted" in " ".join(out.split())
    fedaudit("report", folder.parent, "--format", "md,html,json")
    for name in ("report.md", "report.html"):
        page = (folder.parent / name).read_text()
        assert "checked by fedaudit" in page
        assert "50.0% of client tasks done again" in page
    told = json.loads((folder.parent / "report.json").read_text())["checked"]
    assert (told["runs"], told["checked"], told["tasks"], told["rerun"], told["contradicted"]) == (1, 1, 6, 3, 0)
    assert "50.0% of client tasks done again" in told["text"]
    (folder / "setting.json").write_text((folder / "setting.json").read_text() + " ")
    _, out, _ = fedaudit("show", folder)
    assert "BROKEN" in out
    assert "THE FOLDER WAS CHANGED SINCE" in " ".join(out.split())
    fedaudit("report", folder.parent, "--format", "md")
    assert "not checked, 1 changed since a check" in (folder.parent / "report.md").read_text()


def test_a_signature_is_that_of_the_key(fedaudit, copy_of, tmp_path):
    pytest.importorskip("cryptography")
    folder = copy_of("plain")
    code, out, _ = fedaudit("seal", folder, "--new-key", tmp_path / "author")
    assert code == 0
    assert "signed" in out
    assert (tmp_path / "author").stat().st_mode & 0o077 == 0
    public = tmp_path / "author.pub"
    assert fedaudit("verify", folder, "--key", public)[0] == 0
    fedaudit("seal", copy_of("other"), "--new-key", tmp_path / "else")
    code, out, _ = fedaudit("verify", folder, "--key", tmp_path / "else.pub")
    assert code == 1
    assert "signed by another key" in " ".join(out.split())
    seal(folder)  # whoever edits the folder can seal it, and cannot sign it
    code, out, _ = fedaudit("verify", folder, "--key", public)
    assert code == 1
    assert "it is not signed" in " ".join(out.split())


def test_a_folder_is_handed_on_without_its_noise_key(fedaudit, copy_of, tmp_path):
    """The seal and its signature hold without the key; another key breaks them. `seal` says what a key is for."""
    pytest.importorskip("cryptography")
    folder = copy_of("noised")
    _, out, _ = fedaudit("seal", folder, "--new-key", tmp_path / "author")
    assert "whoever has it can draw noise and masks again and subtract them" in " ".join(out.split())
    assert fedaudit("export", folder, "--to", "csv", "--out", tmp_path / "csv")[0] == 0
    secret = (folder / "noise.key").read_text().strip()
    assert not any(secret in path.read_text() for path in (tmp_path / "csv").rglob("*") if path.is_file())
    (folder / "noise.key").unlink()
    code, out, _ = fedaudit("verify", folder, "--key", tmp_path / "author.pub", "--rerun", "0.1")
    assert code == 0, out
    assert "noise.key was not handed on" in " ".join(out.split())
    assert "cannot be drawn again" in " ".join(out.split())
    assert "BROKEN" not in fedaudit("show", folder)[1]
    (folder / "noise.key").write_text("0" * 64 + "\n")
    code, out, _ = fedaudit("verify", folder, "--key", tmp_path / "author.pub")
    assert code == 1
    assert "noise.key: the file" in " ".join(out.split())


def test_an_attack_does_not_replace_a_signed_seal(fedaudit, copy_of, tmp_path):
    """It is the author's. What was added after it is named."""
    pytest.importorskip("cryptography")
    folder = copy_of("plain")
    fedaudit("seal", folder, "--new-key", tmp_path / "author")
    before = (folder / "seal.json").read_bytes()
    assert fedaudit("attack", folder, "--attack", "label_histogram")[0] == 0
    assert (folder / "seal.json").read_bytes() == before
    code, out, _ = fedaudit("verify", folder, "--key", tmp_path / "author.pub")
    assert code == 1
    assert "attacks.json" in out
    assert "it was added after the folder was sealed" in " ".join(out.split())


def test_a_key_that_is_none_is_said(fedaudit, copy_of, tmp_path):
    pytest.importorskip("cryptography")
    folder = copy_of("plain")
    (tmp_path / "key").write_text("nonsense")
    code, _, err = fedaudit("seal", folder, "--key", tmp_path / "key")
    assert code == 2
    assert "is not a private key in PEM" in err
    code, _, err = fedaudit("seal", folder, "--key", tmp_path / "missing")
    assert code == 2
    assert "cannot be read" in err


def test_verify_prints_json_and_says_when_there_is_nothing(fedaudit, copy_of, tmp_path):
    folder = copy_of("plain")
    code, out, _ = fedaudit("verify", folder, "--json")
    (checked,) = json.loads(out)
    assert code == 0
    assert {finding["verdict"] for finding in checked["findings"]} == {"recomputed", "the author's word"}
    assert fedaudit("verify", tmp_path / "nobody")[0] == 2
    (tmp_path / "empty").mkdir()
    assert fedaudit("verify", tmp_path / "empty")[0] == 2
