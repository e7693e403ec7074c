"""SecAgg+: a stage is no round, a masked vector is named so, and the sum that the server sees is what is attacked."""

from __future__ import annotations

import math

import flower_apps
import numpy as np
import pytest
from typer.testing import CliRunner

from fedaudit.cli.main import app as cli
from fedaudit.flower import App, run_app
from fedaudit.runtime.folder import RunFolder

MASKED = "TrainCollectMaskedVectorsReply"


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secure") / "run"
    client, server = flower_apps.secure()
    kinds = {"fitres.num_examples.num_examples": "count"}
    return folder, run_app(App("secure", client, server), out=folder, nodes=3, kinds=kinds)


def test_masked_vectors_are_named_so(secure):
    folder, _ = secure
    for e in RunFolder(folder).transcript.entries():
        roles = {name: field.role for name, field in e.fields.items() if name.startswith("secaggplus")}
        if e.message == MASKED:
            assert roles == {"secaggplus_configs_masked_params": "masked"}
            vectors = [bytes(v.numpy()) for v in e["secaggplus_configs_masked_params"]]
            assert len(vectors) == 3  # the weight, and the model's two arrays
        elif e.direction == "up":
            assert set(roles.values()) == {"public"}


def test_the_server_sees_the_sum_and_no_single_model(secure):
    """Nodes add 1, 2 and 3: the mean after round t is 2 t, in the place of each node's reply."""
    folder, record = secure
    run = RunFolder(folder)
    view = run.transcript.view("server")
    for k in range(3):
        seen = list(view.entries(direction="up", kind="weights", client=k))
        assert [e.round for e in seen] == [1, 2]
        for e in seen:
            assert e.message == "SumReply"
            assert e.row["clients"] == [0, 1, 2]
            for array in e["sum"].values():
                assert np.allclose(array.numpy(), 2 * e.round, atol=0.01)
    assert not list(run.transcript.view("outsider").entries(kind="weights"))
    assert not list(run.transcript.view("peer:0").entries(kind="weights"))
    assert "secure aggregation: the server sees only sums of at least 3 nodes' models" in record.notes


def test_a_sum_without_noise_protects_nobody(secure):
    _, record = secure
    for client in record.ledger:
        assert client.by_kind["weights"] == math.inf
        assert "public" not in client.by_kind  # keys and shares cost nothing


def test_a_run_with_secure_sums_is_like_any_other(secure):
    folder, _ = secure
    for words in (["show", str(folder)], ["transcript", str(folder)], ["verify", str(folder)]):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, (words, result.output, result.exception)
