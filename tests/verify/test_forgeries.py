"""Forgeries of a run folder: `verify` names each, by file and field.

The forger is careful where a case does not say otherwise: what follows from an edited figure is edited, too, the
checkpoint's copy of the record says the same, and the folder is sealed again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import put_beside, put_raw, put_record, put_rows, seal
from safetensors.torch import load_file, save_file

from fedaudit.attack.attack_run import rescore
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.privacy.policy import read_policies
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.party import Server
from fedaudit.runtime.run_record import Absence, read_record
from fedaudit.runtime.scores import Accuracy
from fedaudit.runtime.seal import Seal
from fedaudit.runtime.utility import evaluate
from fedaudit.stats import wilson
from fedaudit.verify.check import cheap_check, verify
from fedaudit.wire.codec import decode, encode
from fedaudit.wire.contents import look_through
from fedaudit.wire.message import KINDS, Record

Forge = Callable[[Path], Any]
CASES: list[Any] = []
RECORD, INDEX, ATTACKS, AUDITS = "record.json", "transcript/index.jsonl", "attacks.json", "audits.json"


def forgery(run: str, file: str, field: str, *, rerun: float = 0.0, resealed: bool = True) -> Callable[[Forge], Forge]:
    """Register a forgery of a run, with the file and a part of the field that must be named."""

    def add(forge: Forge) -> Forge:
        CASES.append(pytest.param(run, forge, file, field, rerun, resealed, id=forge.__name__))
        return forge

    return add


def of_record(run: str, field: str, **how: Any) -> Callable[[Callable[[Any], Any]], None]:
    """Register a forgery that edits the typed record; what follows from the rounds follows."""

    def add(change: Callable[[Any], Any]) -> None:
        def forge(folder: Path) -> None:
            record = read_record(folder)
            change(record)
            put_record(folder, record)

        forge.__name__ = change.__name__
        forgery(run, RECORD, field, **how)(forge)

    return add


def more(test: Accuracy, by: int = 10) -> Accuracy:
    """Return an accuracy with more hits, and the interval that they have."""
    hits = round(test.accuracy * test.n)
    hits += by if hits + by <= test.n else -by
    low, high = wilson(hits, test.n)
    return Accuracy(accuracy=hits / test.n, low=low, high=high, n=test.n)


# --- accuracy ----------------------------------------------------------------------------------------------------


@of_record("plain", "rounds.1.utility.global.test.accuracy")
def accuracy_with_its_interval(record):
    utility = record.rounds[-1].utility.global_
    utility.test = more(utility.test)


@forgery("plain", RECORD, "utility.global.test", resealed=False)
def accuracy_outside_its_interval(folder):
    raw = json.loads((folder / RECORD).read_text())
    raw["rounds"][-1]["utility"]["global"]["test"]["accuracy"] = 0.99
    (folder / RECORD).write_text(json.dumps(raw))


@of_record("plain", "rounds.1.utility.global.test.low")
def interval_of_another_accuracy(record):
    test = record.rounds[-1].utility.global_.test
    test.low, test.high = test.low + 0.01, test.high - 0.01


@of_record("plain", "rounds.1.utility.global.validation")
def validation_score(record):
    record.rounds[-1].utility.global_.validation = 0.97


@of_record("noised", "rounds.1.utility.clients.global_test")
def accuracy_of_one_client(record):
    spread = record.rounds[-1].utility.clients.global_test
    spread.each[0] += 0.03
    spread.mean += 0.01
    spread.std = float(torch.tensor(spread.each, dtype=torch.float64).std(unbiased=False))


@of_record("noised", "rounds.1.utility.clients.local_test.mean")
def mean_over_clients_alone(record):
    record.rounds[-1].utility.clients.local_test.mean += 0.05


@forgery("plain", RECORD, "result.chosen")
def chosen_round(folder):
    raw = json.loads((folder / RECORD).read_text())
    raw["result"]["chosen"] = raw["result"]["last"] | {"round": 1}
    put_raw(folder, raw)


@of_record("plain", "rounds.0.utility.global.test.accuracy", rerun=0.01)
def accuracy_of_an_earlier_round(record):
    utility = record.rounds[0].utility.global_
    utility.test = more(utility.test)


@of_record("plain", "setting.rounds")
def a_round_left_out(record):
    del record.rounds[-1]


# --- traffic -----------------------------------------------------------------------------------------------------


@of_record("plain", "rounds.0.up_payload")
def bytes_of_a_round(record):
    record.rounds[0].up_payload //= 2


@of_record("plain", "traffic.")
def bytes_of_a_field(record):
    record.traffic[0].wire -= 1000


@of_record("plain", "rounds")
def clients_of_a_round(record):
    record.rounds[0].participants = [0, 1]


@of_record("plain", "rounds.0.absent")
def an_absence_that_was_none(record):
    record.rounds[0].absent = [Absence(client=2, ask=0, reason="dropped out")]


@of_record("noised", "releases.")
def protection_of_a_release(record):
    release = next(r for r in record.releases if r.protection is not None)
    release.protection.sigma *= 2


@of_record("plain", "transcript_digest")
def digest_of_the_transcript(record):
    record.transcript_digest = "0" * 32


@of_record("plain", "traffic_declared")
def traffic_said_to_be_undeclared(record):
    record.traffic_declared = False


# --- the ledger --------------------------------------------------------------------------------------------------


def closed(record: Any) -> None:
    """Compose the edited entries anew, as a careful forger does."""
    for ledger in record.ledger:
        ledger.reopen()
        ledger.close()


@of_record("noised", "ledger.0.epsilon")
def epsilon(record):
    record.ledger[0].epsilon = 0.5


@of_record("noised", "ledger.0.by_kind.embeddings")
def epsilon_of_a_kind(record):
    record.ledger[0].by_kind["embeddings"] = 0.5


@of_record("noised", "Shared.E")
def more_noise_in_an_entry(record):
    entry = next(e for e in record.ledger[0].entries if e.kind == "embeddings")
    entry.noise_multiplier, entry.sigma = entry.noise_multiplier * 3, entry.sigma * 3
    closed(record)


@forgery("noised", RECORD, "noise_multiplier")
def more_noise_by_a_mechanism(folder):
    """In the ledger, in what travelled with each release and in the record's releases: not in the policy."""
    record = read_record(folder)
    for ledger in record.ledger:
        for entry in ledger.entries:
            if entry.kind == "embeddings":
                entry.noise_multiplier, entry.sigma = entry.noise_multiplier * 2, entry.sigma * 2
    for release in record.releases:
        if release.kind == "embeddings":
            release.protection.sigma *= 2
    closed(record)

    def larger(rows):
        for row in rows:
            facts = row.get("fields", {}).get("E", {})
            if facts.get("protection") and row.get("direction") == "up":
                facts["protection"]["sigma"] *= 2

    put_rows(folder, larger)
    put_record(folder, record)


@of_record("noised", "Shared.E, round 2")
def a_round_less_in_an_entry(record):
    next(e for e in record.ledger[0].entries if e.kind == "embeddings").rounds.pop()
    closed(record)


@of_record("noised", "Shared.Y, round 1")
def an_unprotected_release_left_out(record):
    for ledger in record.ledger:
        ledger.entries = [e for e in ledger.entries if e.noise_multiplier != 0]
        ledger.observers = {kind: seen for kind, seen in ledger.observers.items() if kind == "embeddings"}
    closed(record)


@of_record("plain", "Local.w")
def unprotected_weights_called_free(record):
    for ledger in record.ledger:
        for entry in ledger.entries:
            entry.noise_multiplier, entry.condition = float("inf"), "n is public"
    closed(record)


@of_record("noised", "ledger.")
def another_clients_row(record):
    first, second = record.ledger[:2]
    first.n, first.delta, first.entries = second.n, second.delta, second.entries
    closed(record)


@of_record("noised", "ledger.0.delta")
def larger_delta(record):
    record.ledger[0].delta = 0.1
    closed(record)


@of_record("noised", "ledger.0.n")
def more_records(record):
    record.ledger[0].n *= 10


@of_record("noised", "ledger.0.observers")
def observers(record):
    for kind in record.ledger[0].observers:
        record.ledger[0].observers[kind] = []


@of_record("trained", "entries (training)")
def a_training_left_out(record):
    next(e for e in record.ledger[0].entries if e.kind == "training").rounds.pop()
    closed(record)


@of_record("trained", "noise_multiplier")
def more_noise_in_training(record):
    for ledger in record.ledger:
        for entry in ledger.entries:
            if entry.kind == "training":
                entry.noise_multiplier, entry.sigma = 4.0, 4.0
    closed(record)


@of_record("trained", "training, round", rerun=1.0)
def fewer_steps_in_training(record):
    for ledger in record.ledger:
        for entry in ledger.entries:
            if entry.kind == "training":
                entry.steps = 1
    closed(record)


@of_record("noised", "idle_policies")
def a_policy_called_idle(record):
    record.idle_policies = ["embeddings"]


# --- attacks and audits of epsilon -------------------------------------------------------------------------------


def result_of(rows: list[Any], name: str) -> Any:
    return next(row for row in rows if row["attack"] == name)


@forgery("attacked", ATTACKS, "pooled.auc.value")
def auc_within_its_interval(folder):
    put_beside(folder, "attacks", lambda rows: result_of(rows, "loss")["pooled"]["auc"].update(
        value=result_of(rows, "loss")["pooled"]["auc"]["low"]))  # fmt: skip


@forgery("attacked", ATTACKS, "leak")
def verdict_of_an_attack(folder):
    put_beside(folder, "attacks", lambda rows: result_of(rows, "loss").update(
        leak=not result_of(rows, "loss")["leak"]))  # fmt: skip


@forgery("attacked", ATTACKS, "attacks.")
def kept_scores(folder):
    path = folder / "scores" / "server" / "loss.safetensors"
    _rewrite(path, lambda key, tensor: tensor.flip(0) if key.endswith("scores") else tensor)


@forgery("attacked", "scores/server/blind_nearest.safetensors", "member")
def kept_truth_with_all_figures(folder):
    """Members and non-members are exchanged in every file, and all figures are computed anew."""
    for path in (folder / "scores" / "server").glob("*.safetensors"):
        _rewrite(path, lambda key, tensor: ~tensor if key.endswith("member") else tensor)
    rescore(folder)


@forgery("attacked", "scores/server/loss.safetensors", "the file")
def scores_left_out(folder):
    (folder / "scores" / "server" / "loss.safetensors").unlink()


@forgery("attacked", ATTACKS, "client.1.error")
def error_of_a_histogram(folder):
    put_beside(folder, "attacks", lambda rows: result_of(rows, "label_histogram")["client"]["1"].update(error=0.9))


@forgery("noised", AUDITS, "audits.0.p_value")
def p_value_of_an_audit(folder):
    put_beside(folder, "audits", lambda rows: rows[0].update(p_value=rows[0]["p_value"] / 2 + 0.001))


@forgery("noised", AUDITS, "audits.0.verdict")
def verdict_of_an_audit(folder):
    put_beside(folder, "audits", lambda rows: rows[0].update(verdict="refuted"))


@forgery("noised", AUDITS, "lower_bound")
def guesses_of_an_audit(folder):
    put_beside(folder, "audits", lambda rows: [
        row["guesses"].update(right=row["guesses"]["made"]) for row in rows if row.get("guesses")])  # fmt: skip


@forgery("noised", AUDITS, "audits.0.claim_epsilon")
def claim_of_an_audit(folder):
    put_beside(folder, "audits", lambda rows: rows[0].update(claim_epsilon=0.123))


# --- the transcript's files --------------------------------------------------------------------------------------


@forgery("plain", "transcript/000001.weights.pack", "byte")
def a_flipped_byte_of_weights(folder):
    flip(folder / "transcript" / "000001.weights.pack")


@forgery("noised", "transcript/000002.content.pack", "byte")
def a_flipped_byte_of_content(folder):
    flip(folder / "transcript" / "000002.content.pack")


@forgery("plain", "transcript/000001.weights.pack", "byte")
def swapped_packs(folder):
    one, two = (folder / "transcript" / f"00000{t}.weights.pack" for t in (1, 2))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


@forgery("plain", "transcript/000002.weights.pack", "the file")
def a_pack_left_out(folder):
    (folder / "transcript" / "000002.weights.pack").unlink()


@forgery("plain", INDEX, "its end")
def a_shortened_transcript(folder):
    put_rows(folder, lambda rows: [row for row in rows if row.get("round") != 2])


@forgery("plain", INDEX, "bytes")
def bytes_of_a_message(folder):
    put_rows(folder, lambda rows: rows[1].update(bytes=rows[1]["bytes"] - 500))


@forgery("plain", INDEX, "row")
def payload_of_a_message(folder):
    def smaller(rows):
        rows[1]["fields"]["w"]["payload"] -= 1000
        rows[1]["fields"]["w"]["wire"] -= 1000
        rows[1]["bytes"] -= 1000

    put_rows(folder, smaller)


@forgery("noised", RECORD, "Shared.E")
def sigma_of_a_message(folder):
    def larger(rows):
        row = next(row for row in rows if row.get("fields", {}).get("E", {}).get("protection"))
        row["fields"]["E"]["protection"]["sigma"] *= 2

    put_rows(folder, larger)


@forgery("plain", INDEX, "row")
def rows_after_the_end(folder):
    put_rows(folder, lambda rows: [*rows, {**rows[-2], "seq": rows[-1]["seq"] + 1}])


@forgery("plain", INDEX, "round 2", rerun=1.0)
def another_reply_everywhere(folder):
    """One client's last upload is replaced, in the pack, the index, the transcript's digest and the record."""
    replace_upload(folder)


# --- twins, noise keys, mechanisms, sums ---------------------------------------------------------------------------


@of_record("trained", "twins.tasks")
def more_tasks_with_twins(record):
    record.twins.tasks, record.twins.held = 600, 600


@of_record("trained", "twins.held")
def twins_that_differ_called_equal(record):
    record.twins.differences = ["Local.w, in client_update of round 1, client 0"]


@of_record("trained", "twins.clients")
def twins_of_clients_that_are_not_there(record):
    record.twins.clients = [7]


@of_record("noised", "twins")
def twins_left_out(record):
    record.twins = None


@forgery("noised", "noise.key", "the file", resealed=False)
def another_noise_key(folder):
    (folder / "noise.key").write_text("0" * 64 + "\n")


@forgery("noised", INDEX, "row", rerun=1.0)
def another_noise_key_under_a_new_seal(folder):
    (folder / "noise.key").write_text("0" * 64 + "\n")


@of_record("noised", "ledger.0.entries.1.unit")
def a_guarantee_for_persons(record):
    for ledger in record.ledger:
        for entry in ledger.entries:
            if 0 < entry.noise_multiplier < math.inf:
                entry.unit = "person"


@forgery("noised", RECORD, "Shared.E, round 1")
def a_mechanism_in_setting_and_ledger(folder):
    put_mechanism(folder, "discrete-gaussian")


@forgery("noised", INDEX, "row", rerun=1.0)
def a_mechanism_everywhere(folder):
    """In the setting, in the ledger, and in what travelled with each release: only the noise itself is another."""
    put_mechanism(folder, "discrete-gaussian")
    ledger = read_record(folder).ledger

    def name(rows):
        for row in rows:
            facts = row.get("fields", {}).get("E", {})
            if facts.get("protection") and row.get("direction") == "up":
                entries = next(of for of in ledger if of.client == row["client"]).entries
                facts["protection"] = next(e for e in entries if e.kind == "embeddings").public().model_dump()

    put_rows(folder, name)


@of_record("trained", "ledger.0.")
def epsilons_exchanged_between_clients(record):
    """Each client has its own number of records, so the same noise costs each another epsilon."""
    first, second = record.ledger[:2]
    first.by_relation, second.by_relation = second.by_relation, first.by_relation
    first.by_kind, second.by_kind = second.by_kind, first.by_kind
    first.epsilon, second.epsilon = second.epsilon, first.epsilon


@of_record("noised", "by_accountant")
def another_accountants_epsilon(record):
    for ledger in record.ledger:
        for total in ledger.by_relation.values():
            total.by_accountant = {name: epsilon / 2 for name, epsilon in total.by_accountant.items()}


@of_record("plain", "rounds.round")
def a_round_twice(record):
    record.rounds[1] = record.rounds[0].model_copy(update={"round": 1})


@of_record("plain", "rounds.1.")
def a_round_under_another_number(record):
    record.rounds[1] = record.rounds[0].model_copy(update={"round": 2})


@forgery("plain", "checkpoint/HEAD.json", "the file", resealed=False)
def a_seal_of_another_folder(folder):
    shutil.copy(folder.parent / "of other" / "seal.json", folder / "seal.json")


@forgery("attacked", ATTACKS, "against_blind")
def scores_sorted_with_their_truth(folder):
    """Members get the largest scores. Truth and classes stay where they are, so the file fits the data."""

    def order(tensors):
        for key in [key for key in tensors if key.endswith("scores")]:
            member = tensors[key.replace("scores", "member")]
            by_size = tensors[key].sort(descending=True).values
            tensors[key] = torch.empty_like(by_size)
            tensors[key][member], tensors[key][~member] = by_size.split([int(member.sum()), int((~member).sum())])

    _rewrite_all(folder / "scores" / "server" / "loss.safetensors", order)


@forgery("attacked", "scores/server/loss.safetensors", "member")
def scores_and_truth_in_another_order(folder):
    def order(tensors):
        for key in tensors:
            tensors[key] = tensors[key].flip(0)

    _rewrite_all(folder / "scores" / "server" / "loss.safetensors", order)


@of_record("plain", "data.digest")
def another_data_set_by_its_digest(record):
    record.data.digest = record.data.digest[::-1]


@forgery("plain", "verified.json", "tasks")
def a_check_typed_by_hand(folder):
    put_note(folder, tasks=1000, rerun=1000)


@forgery("plain", "verified.json", "contradicted")
def a_check_that_found_nothing(folder):
    record = read_record(folder)
    test = record.rounds[-1].utility.global_
    test.test = more(test.test)
    put_record(folder, record)
    put_note(folder, tasks=6, rerun=6)


@forgery("plain", "verified.json", "the file")
def a_check_of_more_tasks_than_there_are(folder):
    put_note(folder, tasks=6, rerun=7)


@of_record("summed", "rounds.0.sums.0.threshold")
def a_higher_threshold_of_a_sum(record):
    record.rounds[0].sums[0].threshold = 3


@forgery("summed", INDEX, "Invited.threshold")
def a_higher_threshold_everywhere(folder):
    def higher(raw):
        raw["threshold"] = 0.99

    put_setting(folder, higher)
    record = read_record(folder)
    for row in record.rounds:
        for one in row.sums:
            one.threshold = 3
    put_record(folder, record)


@of_record("summed", "rounds.1.sums.0.stayed")
def more_clients_in_a_sum(record):
    record.rounds[1].sums[0].stayed += 5


@of_record("summed", "Local.w, round 1")
def summed_weights_left_out(record):
    for ledger in record.ledger:
        ledger.entries = [e for e in ledger.entries if e.kind == "count"]
        ledger.observers = {kind: seen for kind, seen in ledger.observers.items() if kind == "count"}
    closed(record)


@of_record("summed", "ledger")
def noise_on_sums_without_a_policy(record):
    for ledger in record.ledger:
        for entry in ledger.entries:
            if entry.kind == "weights":
                entry.field, entry.noise_multiplier, entry.mechanism = "Local (update)", 4.0, "gaussian"
    closed(record)


@of_record("shared", "Local (update)")
def more_noise_on_sums(record):
    for ledger in record.ledger:
        for entry in ledger.entries:
            if entry.field == "Local (update)":
                entry.noise_multiplier, entry.sigma = entry.noise_multiplier * 3, entry.sigma * 3
    closed(record)


@of_record("shared", "Local (update)")
def a_sum_less_in_the_ledger(record):
    next(e for e in record.ledger[0].entries if e.field == "Local (update)").rounds.pop()
    closed(record)


@of_record("shared", "Local (update)")
def sums_protected_against_everybody_for_one_record(record):
    for ledger in record.ledger:
        for entry in ledger.entries:
            entry.unit = "record"


@forgery("shared", INDEX, "row", rerun=0.01)
def another_sum_for_the_attacks(folder):
    """What the server is said to have learned is replaced, with all digests on the way; it crossed no wire."""
    replace_upload(folder, kind="sum")


@forgery("summed", INDEX, "row", rerun=0.01)
def another_masked_vector_everywhere(folder):
    replace_upload(folder)


# --- models, setting, data, code, seal ---------------------------------------------------------------------------


@forgery("plain", "models/global.safetensors", "")
def another_global_model(folder):
    _rewrite(folder / "models" / "global.safetensors", lambda _, tensor: tensor * 1.01)


@forgery("plain", "models/client-000001.safetensors", "")
def another_client_model(folder):
    _rewrite(folder / "models" / "client-000001.safetensors", lambda _, tensor: tensor * 1.01)


@forgery("plain", "models/client-000009.safetensors", "the file")
def a_model_more(folder):
    shutil.copy(folder / "models" / "client-000000.safetensors", folder / "models" / "client-000009.safetensors")


@forgery("plain", "checkpoint", "the server's state", rerun=0.01)
def a_better_model_everywhere(folder):
    """The last global model is replaced in the checkpoint and in models/, and evaluated anew."""
    replace_global(folder)


@forgery("plain", RECORD, "published")
def names_of_models(folder):
    raw = json.loads((folder / RECORD).read_text())
    put_raw(folder, raw | {"published": []})


@forgery("plain", "setting.json", "seed")
def seed_in_the_setting(folder):
    raw = json.loads((folder / "setting.json").read_text())
    (folder / "setting.json").write_text(json.dumps(raw | {"seed": 7}))


@forgery("plain", RECORD, "data.")
def seed_everywhere(folder):
    raw = json.loads((folder / "setting.json").read_text())
    (folder / "setting.json").write_text(json.dumps(raw | {"seed": 7}))
    record = json.loads((folder / RECORD).read_text())
    put_raw(folder, record | {"setting": record["setting"] | {"seed": 7}})


@forgery("plain", RECORD, "transcript_digest")
def a_whole_record_of_another_seed(folder):
    other = folder.parent / "of other"
    record = json.loads((other / RECORD).read_text())
    put_raw(folder, record)
    shutil.copy(other / "setting.json", folder / "setting.json")


@of_record("plain", "data.counts")
def counts_of_the_data(record):
    record.data.counts[0][0] += 1


@of_record("plain", "data.digest")
def digest_of_the_data(record):
    record.data.digest = "0" * 32


@of_record("plain", "models.")
def size_of_the_model(record):
    next(iter(record.models.values())).parameters //= 2


@of_record("noised", "declarations.source")
def source_that_was_tested(record):
    record.declarations.source = record.declarations.source.partition(":")[0] + ":" + "0" * 32


@forgery("plain", RECORD, "timings", resealed=False)
def a_figure_that_only_the_copy_knows(folder):
    raw = json.loads((folder / RECORD).read_text())
    raw["timings"] = raw["timings"][:1]
    (folder / RECORD).write_text(json.dumps(raw))


@forgery("attacked", ATTACKS, "the file", resealed=False)
def an_old_seal(folder):
    path = folder / ATTACKS
    path.write_text(path.read_text() + "\n")


@forgery("plain", "seal.json", "digest", resealed=False)
def another_digest_in_the_seal(folder):
    raw = json.loads((folder / "seal.json").read_text())
    (folder / "seal.json").write_text(json.dumps(raw | {"digest": "0" * 64}))


@pytest.mark.parametrize(("run", "forge", "file", "field", "rerun", "resealed"), CASES)
def test_a_forgery_is_named(copy_of, honest, run, forge, file, field, rerun, resealed):
    folder = copy_of(run)
    if forge in (a_whole_record_of_another_seed, a_seal_of_another_folder):
        shutil.copytree(honest / "other", folder.parent / "of other")
    forge(folder)
    if resealed:
        seal(folder)
        about_this_seal(folder)
    found = verify(folder, rerun=rerun, seed=0).contradictions
    assert found, "nobody noticed"
    named = [finding for finding in found if finding.file == file and field in finding.field]
    assert named, "\n".join(finding.text() for finding in found)
    assert all(finding.recorded != finding.recomputed for finding in named)


def test_there_are_a_hundred_or_nearly():
    assert len(CASES) >= 90


def test_the_cheap_part_finds_what_gates_need(copy_of):
    """Digests, intervals and the ledger, without data, models or the method's code."""
    for run, forge in (("plain", a_flipped_byte_of_weights), ("attacked", an_old_seal), ("plain", chosen_round)):
        folder = copy_of(run)
        assert not cheap_check(folder)
        forge(folder)
        assert cheap_check(folder)
        shutil.rmtree(folder)


# --- what forgers do ---------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _rewrite(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Write a safetensors file with other tensors and the same metadata."""
    data = path.read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {key: change(key, tensor).contiguous() for key, tensor in load_file(path).items()}
    save_file(tensors, path, metadata=head["__metadata__"])


def replace_global(folder: Path) -> None:
    opened = RunFolder(folder)
    record, world = opened.record, opened.world
    last = record.rounds[-1].round
    path = folder / "checkpoint" / f"server.{last}"
    state = decode(path.read_bytes(), Record)
    for tensor in state.w.values():
        tensor.mul_(1.05)
    path.write_bytes(encode(state))
    predictor = world.method.predictor(state, Server(world.hub, last, Meter("server", last, world.device)))
    record.rounds[-1].utility.global_ = evaluate(world, predictor, None).global_
    put_record(folder, record)
    _rewrite(folder / "models" / "global.safetensors", lambda key, _: state.w[key])


def _rewrite_all(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write a safetensors file after its tensors were changed together."""
    tensors = load_file(path)
    change(tensors)
    _rewrite(path, lambda key, _: tensors[key])


def put_setting(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the setting in setting.json, in the record and in the checkpoint's copy."""
    raw = json.loads((folder / "setting.json").read_text())
    edit(raw)
    (folder / "setting.json").write_text(json.dumps(raw))
    record = json.loads((folder / RECORD).read_text())
    edit(record["setting"])
    put_raw(folder, record)


def put_mechanism(folder: Path, name: str) -> None:
    """Let the embeddings be protected by another mechanism, in the setting and in the ledger, with its noise."""
    put_setting(folder, lambda raw: raw["privacy"]["embeddings"].update(mechanism=name))
    record = read_record(folder)
    policy = read_policies(record.setting.privacy, KINDS)["embeddings"]
    for ledger in record.ledger:
        for entry in ledger.entries:
            if entry.kind == "embeddings":
                entry.mechanism = name
                wanted = mechanism_of(policy).follows(entry, policy, ledger.n, 10, 1)
                entry.noise_multiplier = wanted["noise_multiplier"]
                entry.sigma = entry.noise_multiplier * entry.sensitivity
                entry.grid = 2.0 ** math.floor(math.log2(entry.sigma / 256))
    closed(record)
    put_record(folder, record)


def put_note(folder: Path, **said: int) -> None:
    """Write a note of a check that nobody made."""
    note = {"fedaudit": "1.0", "when": "2026-01-01T00:00:00+00:00", "seal": "", "recomputed": 30, "contradicted": 0}
    (folder / "verified.json").write_text(json.dumps({**note, "word": 3, **said}))


def about_this_seal(folder: Path) -> None:
    """Let a typed note be about the files as they are."""
    path = folder / "verified.json"
    if path.exists():
        path.write_text(json.dumps({**json.loads(path.read_text()), "seal": Seal.of(folder).digest}))


def replace_upload(folder: Path, kind: str = "message") -> None:
    """Change one number of the last upload or sum, and all digests on the way."""
    import xxhash

    from fedaudit.wire.codec import stored_digest, stored_header

    def change(rows):
        private = ("private", "masked")  # not the shares of a secure sum
        at = max(
            i
            for i, row in enumerate(rows)
            if (row["type"], row.get("direction")) == (kind, "up")
            and any(facts.get("role") in private for facts in row["fields"].values())
        )
        row = rows[at]
        dtype, shape, pack_kind, offset, size, _ = row["tensors"][0]
        pack = folder / "transcript" / f"{row['round']:06d}.{pack_kind}.pack"
        data = bytearray(pack.read_bytes())
        own = bytearray(data[offset : offset + size])
        own[:4] = torch.tensor([0.5]).numpy().tobytes()
        begin = len(data)
        row["tensors"][0] = [dtype, shape, pack_kind, offset, size, xxhash.xxh3_128_hexdigest(bytes(own))]
        data[offset : offset + size] = own
        pack.write_bytes(data)
        assert begin == len(data)
        head, _ = stored_header(row["tree"], row["tensors"], row["digest"])
        spans = [tensor[3:5] for tensor in row["tensors"]]
        row["digest"] = stored_digest(head, lambda i: bytes(data[spans[i][0] : sum(spans[i])]))

    put_rows(folder, change)
    record = read_record(folder)
    record.transcript_digest = look_through(folder / "transcript", 2, 10).digest
    put_record(folder, record)
