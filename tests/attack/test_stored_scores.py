"""Raw scores beside the record: what an attack gave, to the bit, by client and round; and results made from it anew."""

from __future__ import annotations

import hashlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

import fedaudit
from fedaudit.attack import stored_scores
from fedaudit.attack.attack_run import attack_run, rescore
from fedaudit.attack.claims import Attacked, Claims, Groups
from fedaudit.attack.membership import membership_scores
from fedaudit.attack.stored_scores import keep, kept, pooled_scores
from fedaudit.epsilon.lower_bounds import from_scores
from fedaudit.errors import RunError
from fedaudit.runtime.attack_result import Ran
from fedaudit.runtime.run_record import read_record, save_attacks

SETTING = {"method": "fedavg", "dataset": "digits", "clients": 2, "model": "mlp", "set": {"E": 1}}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """Attacked after round 1 and after round 2."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    fedaudit.run(**SETTING, rounds=1, out=folder)
    attack_run(folder, attacks=["loss"])
    fedaudit.run(**SETTING, rounds=2, out=folder, resume=True)
    attack_run(folder, attacks=["loss", "entropy"])
    return folder


@pytest.fixture
def copy(attacked, tmp_path):
    shutil.copytree(attacked, tmp_path / "run")
    return tmp_path / "run"


def of(results, name):
    return next(result for result in results if result.attack == name)


def test_scores_by_client_with_the_truth(attacked):
    """Each client's scores give the client's row of the result, and all together the pooled one."""
    loss = of(read_record(attacked).attacks, "loss")
    parts = kept(attacked, attack="loss", threat="server")
    assert [(part.client, part.round) for part in parts] == [(0, 2), (1, 2)]
    for part in parts:
        found = membership_scores(part.scores.numpy(), part.member.numpy())
        assert found.auc == loss.client[str(part.client)].auc
        assert (int(part.member.sum()), len(part.member)) == (found.members, found.members + found.nonmembers)
    scores, member = pooled_scores(attacked, "loss")
    assert membership_scores(scores, member).auc == loss.pooled.auc
    assert np.array_equal(pooled_scores(attacked, "entropy")[1], member), "the same candidates in the same order"


def test_each_round_that_was_attacked_is_kept(attacked):
    rounds = kept(attacked, attack="loss", all_rounds=True)
    assert [(part.round, part.client) for part in rounds] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    first, last = (torch.cat([part.scores for part in rounds if part.round == t]) for t in (1, 2))
    assert not torch.equal(first, last), "another model, other scores"


def test_scores_of_another_transcript_do_not_count(copy):
    record = json.loads((copy / "record.json").read_text())
    (copy / "record.json").write_text(json.dumps({**record, "transcript_digest": "0" * 32}))
    assert kept(copy) == []
    [of_first] = {part.round for part in kept(copy, all_rounds=True) if part.attack == "loss" and part.round == 1}
    assert of_first == 1, "the first round is as it was"


def test_results_are_the_same_without_attacking_again(copy, monkeypatch):
    """Every number and verdict, the blind baselines' too; what is wrong in the file is put right."""
    before = read_record(copy)
    damaged = [result.model_copy(deep=True) for result in before.attacks]
    for result in damaged:
        result.pooled.auc.value, result.verdict, result.split_broken = result.pooled.auc.low, "nonsense", True
    save_attacks(copy, before.transcript_digest, damaged)
    monkeypatch.setattr("fedaudit.attack.scene.Scene.__init__", lambda *_: pytest.fail("it was attacked again"))
    found = rescore(copy)
    assert {result.attack for result in found} >= {"loss", "entropy", "blind_prior", "blind_nearest"}
    assert read_record(copy).attacks == before.attacks


def test_a_part_of_the_clients_leaves_the_others_scores(copy):
    attack_run(copy, attacks=["loss"], clients=[1])
    assert [part.client for part in kept(copy, attack="loss")] == [0, 1]
    assert of(rescore(copy), "loss").clients == [1]


def test_other_settings_replace_what_was_kept(copy):
    """The rounds of an attack with other settings are another attack's."""
    attack_run(copy, attacks=[{"attack": "lira", "shadows": 2}], clients=[0])
    assert [part.client for part in kept(copy, attack="lira")] == [0]
    attack_run(copy, attacks=[{"attack": "lira", "shadows": 4}], clients=[1])
    assert [part.client for part in kept(copy, attack="lira")] == [1]


def test_epsilon_from_the_scores_of_a_run(attacked, fedaudit):
    code, out, _ = fedaudit("epsilon", "from-scores", attacked, "--attack", "loss", "--delta", 1e-3, "--json")
    assert code == 0
    bound = from_scores(*pooled_scores(attacked, "loss"), 1e-3, 0.95, "exact")
    found = json.loads(out)["from_scores"]
    assert found.pop("ceiling") > bound.epsilon
    assert found == bound.as_dict()
    one = json.loads(fedaudit("epsilon", "from-scores", attacked, "--client", 1, "--json")[1])["from_scores"]
    assert one["trials"] == len(kept(attacked, attack="loss")[1].scores)
    code, _, err = fedaudit("epsilon", "from-scores", attacked, "--attack", "rmia")
    assert code == 2
    assert "keeps no scores of rmia by the server; it has those of blind_nearest by the server" in err


def test_rescoring_by_command(copy, fedaudit):
    code, out, _ = fedaudit("attack", copy, "--rescore", "--json")
    assert code == 0
    assert {row["attack"] for row in json.loads(out)} >= {"loss", "entropy"}
    assert fedaudit("attack", copy, "--rescore", "--attack", "loss")[0] == 2
    shutil.rmtree(copy / "scores")
    code, _, err = fedaudit("attack", copy, "--rescore")
    assert (code, "keeps no scores" in err) == (2, True)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"PK" + b"\xff" * 40])
def test_a_damaged_file_is_one_error(copy, content):
    (copy / "scores" / "server" / "loss.safetensors").write_bytes(content)
    with pytest.raises(RunError, match="does not hold the scores of an attack"):
        kept(copy)


# --- by hand, without a run -------------------------------------------------------------------------------------------

DIGESTS = {1: "one", 2: "two", 3: "three"}


@pytest.fixture
def digests(monkeypatch):
    """The digests of the transcript's first rounds, as the test sets them."""
    told = dict(DIGESTS)
    monkeypatch.setattr(stored_scores, "Transcript", lambda path: SimpleNamespace(digest=lambda t: told.get(t)))
    return told


def record_of(rounds):
    return SimpleNamespace(
        rounds=[SimpleNamespace(round=t) for t in range(1, rounds + 1)], transcript_digest=DIGESTS.get(rounds, "none")
    )


def result_of(attack="loss", threat="server", n=1, **more):
    return Ran(attack=attack, threat=threat, settings={"n": n}, source="s", clients=[4], **more)


def given(k, scores, notes=(), last=None):
    n = len(scores)
    claims = Claims(torch.tensor(scores), notes, None if last is None else torch.tensor(last))
    return Attacked(k, claims, torch.zeros(n, 3), torch.arange(n) + k, torch.arange(n) % 2 == 0)


def told(parts):
    return [(p.round, p.client, p.scores.tolist(), None if p.last is None else p.last.tolist(), p.notes) for p in parts]


def test_rounds_and_clients_are_added_and_replaced_one_by_one(tmp_path, digests):
    """Clients 4 and 2 after round 1; client 4 alone after round 2, twice."""
    keep(tmp_path, record_of(1), result_of(), [given(4, [1.0, 2.0], ("x",), [9.0, 8.0]), given(2, [3.0])])
    first = [(1, 2, [3.0], None, ()), (1, 4, [1.0, 2.0], [9.0, 8.0], ("x",))]
    assert told(kept(tmp_path, record=record_of(1))) == first
    keep(tmp_path, record_of(2), result_of(), [given(4, [5.0, 6.0], ("y", "z"), [7.0, 7.0])])
    keep(tmp_path, record_of(2), result_of(), [given(4, [5.0, 6.5], ("z",))])
    second = [(2, 4, [5.0, 6.5], None, ("z",))]
    assert told(kept(tmp_path, record=record_of(2))) == second
    every = told(kept(tmp_path, record=record_of(2), all_rounds=True))
    assert [row[:4] for row in every] == [row[:4] for row in (*first, *second)]
    assert told(kept(tmp_path, record=record_of(2), all_rounds=True, clients=[2])) == first[:1]
    part = kept(tmp_path, record=record_of(2))[0]
    assert (part.attack, part.threat, part.groups) == ("loss", "server", False)
    assert (part.member.tolist(), part.labels.tolist()) == ([True, False], [4, 5])
    again = part.attacked()
    assert (again.client, again.claims.notes, len(again.x)) == (4, ("z",), 0)
    assert again.claims.scores.tolist() == [5.0, 6.5]
    digests[1] = "another"
    assert told(kept(tmp_path, record=record_of(2), all_rounds=True)) == second, "the first round is another one now"
    keep(tmp_path, record_of(3), result_of(), [given(2, [0.0])])
    assert [row[:2] for row in told(kept(tmp_path, record=record_of(3), all_rounds=True))] == [(2, 4), (3, 2)]


def test_other_settings_or_groups_begin_anew(tmp_path, digests):
    keep(tmp_path, record_of(1), result_of(), [given(4, [1.0])])
    keep(tmp_path, record_of(1), result_of(n=2), [given(2, [3.0])])
    assert [row[:2] for row in told(kept(tmp_path, record=record_of(1)))] == [(1, 2)]
    member = torch.tensor([True, False])
    groups = Attacked(7, Groups(torch.tensor([5, 6])), torch.zeros(2), torch.zeros(2).long(), member)
    keep(tmp_path, record_of(1), result_of(n=2), [groups, groups])
    (part,) = kept(tmp_path, record=record_of(1))
    assert (part.client, part.groups, part.notes, part.last) == (7, True, (), None)
    assert isinstance(part.attacked().claims, Groups)


def test_files_are_told_apart_by_attack_and_threat(tmp_path, digests):
    record = record_of(2)
    for number, (attack, threat) in enumerate([("a b", "peer:3"), ("a_b", "peer:3"), ("a_b", "server")]):
        keep(tmp_path, record, result_of(attack, threat), [given(number, [float(number)])])
    names = sorted(path.relative_to(tmp_path / "scores").as_posix() for path in tmp_path.glob("scores/*/*"))
    plain = [name for name in names if "-" not in name.partition("/")[2]]
    assert plain == ["peer-3/a_b.safetensors", "server/a_b.safetensors"]
    marked = hashlib.blake2b(b"a b", digest_size=4).hexdigest()
    assert set(names) - set(plain) == {f"peer-3/a_b-{marked}.safetensors"}

    def found(**wanted):
        return [part.client for part in kept(tmp_path, record=record, **wanted)]

    assert sorted(found()) == [0, 1, 2]
    assert found(attack="a b") == [0]
    assert found(attack="a_b") == [1, 2]
    assert sorted(found(threat="peer:3")) == [0, 1]
    assert found(attack="a_b", threat="server") == [2]
    assert found(attack="a b", threat="server") == []
    (tmp_path / "scores" / "peer-3" / "a_b.safetensors").write_bytes(b"damaged")
    assert found(attack="a_b", threat="server") == [2], "no other file is opened"
    with pytest.raises(RunError, match="does not hold the scores"):
        found(attack="a_b")


def test_scores_before_any_round(tmp_path, digests):
    keep(tmp_path, record_of(0), result_of(), [given(4, [1.0])])
    assert [row[:2] for row in told(kept(tmp_path, record=record_of(0)))] == [(0, 4)]
    assert kept(tmp_path, record=record_of(1), all_rounds=True) == []


@pytest.mark.parametrize("column", ["scores", "member", "labels", "last"])
def test_columns_of_different_lengths_are_damage(tmp_path, digests, column):
    keep(tmp_path, record_of(1), result_of(), [given(4, [1.0, 2.0], (), [3.0, 4.0]), given(2, [1.0])])
    (path,) = tmp_path.glob("scores/*/*")
    data = path.read_bytes()
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load(data)
    for wrong in (torch.ones(3), torch.ones(2, 1)):
        path.write_bytes(save({**tensors, f"round 1, client 4: {column}": wrong}, metadata=about))
        with pytest.raises(RunError, match="client 4 has columns of different lengths"):
            kept(tmp_path, record=record_of(1))
    path.write_bytes(save({**tensors, "round 1, client x: scores": torch.ones(1)}, metadata=about))
    with pytest.raises(RunError, match="is not a name of kept scores"):
        kept(tmp_path, record=record_of(1))
