"""Raw scores beside the record: what an attack gave, to the bit, by client and round; and results made from it anew."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import fedaudit
from fedaudit.attack.attack_run import attack_run, rescore
from fedaudit.attack.membership import membership_scores
from fedaudit.attack.stored_scores import kept, pooled_scores
from fedaudit.epsilon.lower_bounds import from_scores
from fedaudit.errors import RunError
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
