"""Runs of DFFKE: what crosses the wire, noise and ledger, collaboration, and both points of a round."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from fedaudit import run
from fedaudit.errors import PrivacyError
from fedaudit.methods.datafree._decoder import (
    decoder_size,
)
from fedaudit.methods.datafree.dffke import DFFKE
from fedaudit.methods.distillation.fke import FKE, outputs
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.wire.transcript import Transcript

LN = math.log

QUICK = dict(DFFKE.quick)
FEW = {"aux": 0.7, "eval_clients": False}


def sent(folder, t):
    """Payload by message and field in one round, and how many messages."""
    sizes = {}
    for entry in Transcript(folder / "transcript").entries():
        if entry.round == t:
            for name, field in entry.fields.items():
                sizes.setdefault(f"{entry.message}.{name}", []).append(field.payload + field.buffers)
    return {name: (sum(values), len(values)) for name, values in sizes.items()}


def test_both_circulations_one_copy_up_and_the_others_down(dffke_run):
    """n = members. Up: theta_k, n_k h_k embeddings and as many labels, each once. Down: everybody gets Dec and all
    translated embeddings (h = 16). Logits: n_k x 10 up, in later rounds twice as many (B^t_k); each copy goes down to
    the K - 1 = 2 others, with eight bytes more for the peer's number."""
    n = read_record(dffke_run).data.members
    widths = [64, 64, 128]
    for t in (1, 2, 3):
        size = sent(dffke_run, t)
        assert size["Shared.E"] == (sum(4 * a * b for a, b in zip(n, widths, strict=True)), 3)
        assert size["Shared.Y"] == (8 * sum(n), 3)
        assert size["Unified.E"] == (3 * (4 * sum(n) * 16 + 3 * 8), 3)
        Dec = decoder_size(16, (1, 8, 8), QUICK["w_Dec"])
        assert size["Unified.Dec"] == (3 * (Dec.payload + Dec.buffers), 3)
        rounds = 1 if t == 1 else 2  # this one, and the one in the buffer (R = 1)
        assert size["Answered.Y"] == (4 * 10 * sum(n) * rounds + 3 * 8 * rounds, 3)
        assert size["Peers.Y"] == (2 * size["Answered.Y"][0] + 3 * 2 * 8, 3)


def test_a_docking_layer_and_a_standardised_decoder_are_billed(tmp_path):
    """`embed`: client k gets its own theta_k^z, 16 x h_k weights and 16 biases of four bytes. The decoder has two more
    numbers and a count, of the batch norm behind its output."""
    values = {**QUICK, "embed": True, "output": "standardised"}
    record = run(method="dffke", rounds=1, clients=2, model="cnn:1,mlp:1", set=values, out=tmp_path / "a", **FEW)
    size = sent(tmp_path / "a", 1)
    assert size["UnifiedDocked.z"] == (sum(4 * (16 * h + 16) for h in (64, 128)), 2)
    plain, standard = (decoder_size(16, (1, 8, 8), QUICK["w_Dec"], output) for output in ("tanh", "standardised"))
    assert size["UnifiedDocked.Dec"] == (2 * (standard.payload + standard.buffers), 2)
    assert (standard.payload, standard.buffers) == (plain.payload, plain.buffers + 4 + 4 + 8)
    assert not [note for note in record.notes if "traffic" in note.lower()], "declared as it was sent"


def test_the_paper_noise_and_what_the_ledger_says(tmp_path):
    """Eq. 15: sigma = sqrt(2 ln(1.25 / delta)) Delta / epsilon with delta = 1/n; Delta = 2 C = 2 under clipping. Pure
    noise on the logits: they keep their size and nothing else. theta_k and Y_k are unprotected: epsilon is infinite."""
    privacy = {
        "embeddings": {"epsilon": 0.5, "calibration": "classical", "sensitivity": "clip:1.0"},
        "logits": {"mechanism": "pure-noise"},
    }
    record = run(method="dffke", rounds=1, clients=3, set=QUICK, privacy=privacy, out=tmp_path / "a", **FEW)
    for client in record.ledger:
        entries = {e.field: e for e in client.entries}
        sigma = math.sqrt(2 * LN(1.25 * client.n)) * 2 / 0.5
        assert entries["Shared.E"].sigma == pytest.approx(sigma)
        assert entries["Answered.Y"].mechanism == "pure-noise"
        assert abs(entries["Answered.Y"].cosine) < 0.1
        assert client.by_kind["logits"] == 0
        assert client.by_kind["labels"] == client.by_kind["weights"] == math.inf


def test_dp_sgd_needs_the_goal_switched_off(tmp_path):
    privacy = {"training": {"noise_multiplier": 1.0}}
    values = {"method": "dffke", "rounds": 1, "clients": 2, "model": "mlp", "privacy": privacy, **FEW}
    with pytest.raises(PrivacyError, match="Set its stopping rule off"):
        run(**values, set={**QUICK, "tau": 0.9}, out=tmp_path / "a")
    record = run(**values, set=QUICK, out=tmp_path / "b")
    for client in record.ledger:
        assert {e.field: e.mechanism for e in client.entries}["Shared.theta"] == "post-processing of DP-SGD"


def decoders(folder):
    """The decoder that was sent in each round."""
    entries = [e for e in Transcript(folder / "transcript").entries() if e.message == "Unified"]
    return {e.round: e["Dec"] for e in entries}


def test_the_decoder_goes_on_unless_fresh(tmp_path):
    """Without training (T_Dec = 0) a decoder that goes on stays bit for bit what it was."""
    for fresh in (False, True):
        values = {**QUICK, "T_Dec": 0, "T_Tran": 0, "fresh": fresh}
        run(method="dffke", rounds=2, clients=2, set=values, out=tmp_path / str(fresh), **FEW)
        sent = decoders(tmp_path / str(fresh))
        assert torch.equal(sent[1]["linear.weight"], sent[2]["linear.weight"]) is not fresh


def test_limited_collaboration_asks_the_first_clients_only(tmp_path):
    """pi = 0.5 of four clients: 0 and 1, in every round; the others' models stay as they were."""
    for name in ("dffke", "fke"):
        quick = {"dffke": QUICK, "fke": dict(FKE.quick)}[name]
        folder = tmp_path / name
        run(method=name, rounds=2, clients=4, public=0.1, set={**quick, "pi": 0.5}, out=folder, **FEW)
        assert {e.client for e in Transcript(folder / "transcript").entries()} == {0, 1}


def test_both_points_of_a_round_are_evaluated(tmp_path):
    """In round 2 of one run: `trained` is the accuracy of the models that clients uploaded, `exchanged` of what they
    then became and deploy. On the common test set and on own held-out records, mean and deviation over clients."""
    record = run(
        method="dffke", rounds=2, clients=3, set={**QUICK, "T_FKE": 2, "eta": 0.01}, aux=0.7, out=tmp_path / "a"
    )
    world = RunFolder(tmp_path / "a").world
    utility = record.rounds[1].utility
    points = utility.points
    uploaded = {
        e.client: e["theta"]
        for e in Transcript(tmp_path / "a" / "transcript").entries()
        if e.message == "Shared" and e.round == 2
    }
    right = []
    for k, theta in uploaded.items():
        model = world.blank_model(k)
        model.load_state_dict(theta)
        x, y = world.test
        right.append(float((outputs(model.eval(), x).argmax(1) == y).float().mean()))
    found = points["trained"].global_test
    assert found.each == pytest.approx(right)
    assert found.mean == pytest.approx(sum(right) / 3)
    assert points["exchanged"].global_test.each != found.each
    assert points["exchanged"] == utility.clients


def test_what_is_deployed(tmp_path):
    """The exchange moves theta_k. `trained` is tested as local training left it: what the client uploaded."""
    for deploy in ("exchanged", "trained"):
        folder = tmp_path / deploy
        run(method="dffke", rounds=1, clients=2, set={**QUICK, "deploy": deploy}, out=folder, **FEW)
        shared = next(e for e in Transcript(folder / "transcript").entries() if e.message == "Shared" and e.client == 1)
        final = load_file(folder / "models" / "client-000001.safetensors")
        same = all(torch.equal(t, final[name]) for name, t in shared["theta"].items())
        assert same is (deploy == "trained")
