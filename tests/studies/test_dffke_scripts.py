"""The scripts that look at a run of DFFKE: its pictures, the age of its buffer, what its teachers answer."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from pages import script

from fedaudit import run
from fedaudit.methods.datafree._buffer import held
from fedaudit.methods.datafree._decoder import Decoder
from fedaudit.methods.datafree.dffke import DFFKE
from fedaudit.rng import seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.wire.codec import decode
from fedaudit.wire.transcript import Transcript


@pytest.fixture(scope="module")
def authors_run(tmp_path_factory):
    """Three clients on digits with the preset `authors`, whose decoder gives standardised images, for two rounds. Their
    mean is the preset's, their deviation is not.
    """
    out = tmp_path_factory.mktemp("authors") / "run"
    tiny = {**DFFKE.quick, "R": "unlimited", "tau": "off", "E_local": 1, "crop": 1, "sigma_x": 0.7}
    options = {"rounds": 2, "clients": 3, "model": "cnn_bn", "aux": 0.6, "keep_weights": 2}
    run(method="dffke", preset="authors", set=tiny, out=out, **options)
    return out


def decoded_by_hand(state, e, shape, pixels):
    """Return images of a standardised decoder in evaluation mode."""
    with seeded("any"):
        made = Decoder(e.shape[1], shape, len(state["layers.6.weight"]), "standardised", pixels)
    made.load_state_dict(state)
    with torch.no_grad():
        return made.eval()(e)


def test_the_pictures_of_a_standardised_decoder_have_its_units(authors_run):
    images, labels = script("dffke_pictures").synthetic(authors_run, [2], client=1, columns=4)[2]
    told = [entry for entry in Transcript(authors_run / "transcript").entries() if entry.message == "UnifiedDocked"]
    last = next(entry for entry in told if entry.round == 2)
    with torch.no_grad():
        every = decoded_by_hand(last["Dec"], last["E"][1], (1, 8, 8), (-0.053, 0.7))
    assert labels.shape == (4,)
    for image in images:
        assert min((image - of).abs().max() for of in every) < 1e-5


def test_the_ages_of_a_standardised_buffer_are_judged_in_its_units(authors_run):
    """The share of images whose owner's model says the class, with the images decoded by hand."""
    world = RunFolder(authors_run).world
    blobs = {k: RunFolder(authors_run).client_state(k) for k in range(3)}
    states = {k: decode(blob, ClientState) for k, blob in blobs.items()}
    hits = []
    kept = held(states[2].memory)[2].read()
    for k, e in kept["E"].items():
        model = world.blank_model(k)
        model.load_state_dict(states[k].model)
        with torch.no_grad():
            said = model.eval()(decoded_by_hand(kept["Dec"], e, (1, 8, 8), (-0.053, 0.7))).argmax(1)
        hits.append(said == world.members(k)[1])
    rows = script("dffke_ages").ages(authors_run)
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[1]["target"] == pytest.approx(float(torch.cat(hits).float().mean()), abs=1e-6)


def test_what_teachers_answer_is_counted_by_hand(monkeypatch):
    """Two clients with two rows each, embeddings of two numbers.

    said: rows 1 and 2 of client 0 and row 1 of client 1 say their class: 3 of 4. sure: logits (1 + ln 3, 1) give 3/4,
    and (1, 1) give 1/2: (3/4 + 3/4 + 3/4 + 1/2) / 4 = 11/16. Embeddings (0, 2), (0, 0), (4, 2), (4, 0): the mean square
    of a number is (4 + 0 + 20 + 16) / 8 = 5, and its root 2.2361. The variance is 4 + 1 = 5, of a mean square of 10:
    1/2. Answers lie (1, 0) beside them in the first row alone: 1/4 of 5 is missed by 1/20.
    """
    answers = script("dffke_answers")
    ln3 = torch.tensor(3.0).log().item()
    E = {0: torch.tensor([[0.0, 2.0], [0.0, 0.0]]), 1: torch.tensor([[4.0, 2.0], [4.0, 0.0]])}
    moved = {k: e.clone() for k, e in E.items()}
    moved[0][0, 0] += 1
    Y = {0: torch.tensor([[ln3, 0.0], [0.0, ln3]]) + 1, 1: torch.tensor([[ln3, 0.0], [0.0, 0.0]]) + 1}

    class Answer(dict):
        message = "AnsweredDocked"

    told = {k: Answer(Y={7: Y[k]}, Z={7: moved[k]}) for k in E}
    labels = {0: torch.tensor([0, 1]), 1: torch.tensor([0, 1])}
    monkeypatch.setattr(answers, "by_round", lambda run: [(7, labels, told, {"E": E})])
    assert answers.figures(None) == [
        {"round": 7, "said": 0.75, "sure": 0.6875, "length": 2.2361, "apart": 0.5, "missed": 0.05}
    ]
    for answer in told.values():
        answer.message = "Answered"
    (plain,) = answers.figures(None)
    assert "missed" not in plain
    assert answers.lines([plain])[-1].endswith("| 0.500 | - |")


def test_what_teachers_answer_is_kept_and_printed_by_the_name_of_the_run(tmp_path, monkeypatch, capsys):
    answers = script("dffke_answers")
    monkeypatch.setattr(answers, "figures", lambda run: [{"round": 3, "said": len(run.name) / 10}])
    monkeypatch.setattr(sys, "argv", ["x", "some/first", "some/other-one", "--json", str(tmp_path / "kept.json")])
    answers.main()
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept == {"first": [{"round": 3, "said": 0.5}], "other-one": [{"round": 3, "said": 0.9}]}
    told = capsys.readouterr().out
    assert told.index("first:") < told.index("| 3 | 0.500 | - |") < told.index("other-one:")
    monkeypatch.setattr(sys, "argv", ["x", "a/run", "b/run"])
    with pytest.raises(SystemExit, match="Two run folders are named run"):
        answers.main()


def test_only_clients_that_answered_are_counted(monkeypatch):
    """Client 1 sent embeddings and did not answer: length and variance are those of client 0's rows alone."""
    answers = script("dffke_answers")
    E = {0: torch.tensor([[1.0], [3.0]]), 1: torch.tensor([[100.0]])}

    class Answer(dict):
        message = "Answered"

    told = {0: Answer(Y={1: torch.zeros(2, 2)})}
    monkeypatch.setattr(answers, "by_round", lambda run: [(1, {0: torch.tensor([0, 1])}, told, {"E": E})])
    (row,) = answers.figures(None)
    assert (row["length"], row["apart"]) == (2.2361, 0.2)


def test_what_teachers_answer_in_a_run(authors_run, dffke_run):
    """Every round has a row; labels, embeddings and answers are those of one round and of the same rows."""
    answers = script("dffke_answers")
    table = answers.figures(authors_run)
    assert [row["round"] for row in table] == [1, 2]
    assert [set(row) for row in table] == [{"round", *answers.COLUMNS}] * 2
    assert all(0 < row["said"] < 1 and row["length"] > 0 and row["missed"] > 0 for row in table)
    plain = answers.figures(dffke_run)
    assert [set(row) for row in plain] == [{"round", *answers.COLUMNS} - {"missed"}] * 3
    entries = list(Transcript(authors_run / "transcript").entries())
    second = {
        message: {entry.client: entry for entry in entries if (entry.message, entry.round) == (message, 2)}
        for message in ("Shared", "UnifiedDocked", "AnsweredDocked")
    }
    *_, (t, labels, told, docked) = answers.by_round(authors_run)
    assert (t, docked.round, docked.message) == (2, 2, "UnifiedDocked")
    assert {k: y.tolist() for k, y in labels.items()} == {k: of["Y"].tolist() for k, of in second["Shared"].items()}
    assert {k: of.seq for k, of in told.items()} == {k: of.seq for k, of in second["AnsweredDocked"].items()}
    hits = [of["Y"][2].argmax(1) == second["Shared"][k]["Y"] for k, of in second["AnsweredDocked"].items()]
    assert table[1]["said"] == pytest.approx(float(torch.cat(hits).float().mean()), abs=1e-4)
    every = torch.cat(list(second["UnifiedDocked"][0]["E"].values()))
    assert table[1]["length"] == pytest.approx(float(every.square().mean().sqrt()), abs=1e-4)


def test_rounds_in_which_somebody_sat_out_are_read_by_themselves(monkeypatch):
    """Client 1 takes part in the first round alone; in the third nobody answers."""
    answers = script("dffke_answers")

    def told(t, message, client=0, **fields):
        return type("Entry", (dict,), {"round": t, "message": message, "client": client})(fields)

    first = [told(1, "Shared", k, Y=f"{k} in 1") for k in (0, 1)] + [told(1, "Unified", k) for k in (0, 1)]
    first += [told(1, "Answered", k) for k in (0, 1)]
    second = [told(2, "Shared", 0, Y="0 in 2"), told(2, "Unified"), told(2, "Answered")]
    entries = [*first, *second, told(3, "Shared", 0, Y="0 in 3"), told(3, "Unified"), told(4, "Begin")]
    monkeypatch.setattr(answers, "Transcript", lambda path: type("T", (), {"entries": lambda self: iter(entries)})())
    found = list(answers.by_round(answers.Path("run")))
    assert [(t, labels, sorted(of)) for t, labels, of, _ in found] == [
        (1, {0: "0 in 1", 1: "1 in 1"}, [0, 1]),
        (2, {0: "0 in 2"}, [0]),
    ]


def test_the_table_of_noise_has_a_dash_where_an_attack_was_not_run():
    """AUC 0.6 and 0.8; errors 0.2 and 0.6 beside guesses of 0.4 and 0.5, of which the better counts."""
    kept = script("dffke_kept")

    def run(auc, error=None):
        found = {"embedding_match": {"auc": [auc, 0, 1], "leak": auc > 0.7}}
        if error is not None:
            guesses = {"mean": [0.4, 0, 1], "nearest": [0.5, 0, 1]}
            found["decoder"] = {"mse": [error, 0, 1], "baselines": guesses, "beats_baselines": error < 0.4}
        return {"attacks": found}

    both = kept.found_by([run(0.6, 0.2), run(0.8, 0.6)])
    assert both == ["0.70 ± 0.14 (1 of 2)", "1.00 ± 0.71 (1 of 2)"]
    assert kept.found_by([run(0.6), run(0.8)]) == [both[0], "-"]
    assert kept.found_by([run(0.8)]) == ["0.80 (1 of 1)", "-"]
    with pytest.raises(SystemExit, match="decoder was run on 1 of 2 seeds"):
        kept.found_by([run(0.6, 0.2), run(0.8)])
