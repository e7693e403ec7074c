"""Scripts with start_server and start_client are audited like apps: each is run up to its call."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import flower_apps
import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

from fedaudit.cli.main import app as cli
from fedaudit.errors import FedauditError, SettingError
from fedaudit.flower import App, run_app
from fedaudit.flower.scripts import ScriptClients, ScriptServer, halves_of, starts_in
from fedaudit.runtime.folder import RunFolder

SCRIPTS = Path(flower_apps.__file__).parent / "flower_scripts"
NODE = ["--client-args", "--partition-id {partition-id}"]


def context(k=0, of=3):
    return Context(1, 7, {"partition-id": k, "num-partitions": of}, RecordDict(), {})


def test_scripts_are_audited_by_the_command(tmp_path):
    """Nodes add 1, 2 and 3. A node's client is the same in both rounds: it counts its trainings."""
    words = ["flower", "run", str(SCRIPTS), "--out", str(tmp_path / "run"), "--nodes", "3", *NODE]
    result = CliRunner().invoke(cli, [*words, "--kind", "fitres.parameters=weights"])
    assert result.exit_code == 0, result.output + str(result.exception)
    record = RunFolder(tmp_path / "run").record
    assert [row.participants for row in record.rounds] == [[0, 1, 2]] * 2
    assert not any(row.absent for row in record.rounds)
    sent = [e for e in RunFolder(tmp_path / "run").transcript.entries() if e.message == "TrainReply"]
    model = [(e.round, e.client, e["fitres_parameters"]["1"].item()) for e in sent]
    assert model == [(t, k, 2 * (t - 1) + k + 1) for t in (1, 2) for k in range(3)]
    assert [e["fitres_metrics"]["fits"] for e in sent] == [1, 1, 1, 2, 2, 2]
    assert any("FedAvg" in note for note in record.notes)


def test_a_script_without_its_arguments_ends_the_run_with_the_way_out(tmp_path):
    result = CliRunner().invoke(cli, ["flower", "run", str(SCRIPTS), "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, FedauditError), result.output
    words = (
        "client.py was run without arguments and did not call start_client or start_numpy_client: it ended with exit"
    )
    assert f"{words} code 2. Give the arguments of a client's script with --client-args" in str(result.exception)


def test_arguments_are_for_scripts_alone(tmp_path):
    app = Path(__file__).parents[2] / "examples" / "flower_sklearn"
    result = CliRunner().invoke(cli, ["flower", "run", str(app), "--out", str(tmp_path / "run"), *NODE])
    assert isinstance(result.exception, SettingError)
    assert "This app has none: leave it out" in str(result.exception)


CLIENT = """
import sys
from flwr import client

class Mine(client.NumPyClient):
    words = sys.argv[1:]

def made(context):
    return Mine().to_client()

{call}
"""


@pytest.mark.parametrize(
    "call",
    [
        "client.start_client(server_address='a', client=Mine().to_client())",
        "client.start_client(server_address='a', client=Mine())",
        "client.start_numpy_client(server_address='a', client=Mine())",
        "client.start_client(server_address='a', client_fn=made)",
    ],
)
def test_every_way_to_start_a_client_is_known(call, tmp_path):
    (tmp_path / "client.py").write_text(CLIENT.format(call=call))
    made = ScriptClients(tmp_path / "client.py", "{partition-id} 'of {num-partitions}'")
    for k in (1, 0):
        client = made(context(k, 4))
        assert client.numpy_client.words == [str(k), "of 4"]
    assert copy.copy(made)._clients == {}, "a client stays in its process"  # copied as for another process


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\n", "it came to its end"),
        ("raise SystemExit('no data')\n", "it ended with exit code no data"),
        ("import flwr as fl\nfl.client.start_client(server_address='a')\n", "it called start_client"),
    ],
)
def test_a_server_that_does_not_start_is_told(text, why, tmp_path):
    (tmp_path / "server.py").write_text(text)
    with pytest.raises(SettingError, match=f"did not call start_server: {why}"):
        ScriptServer(tmp_path / "server.py")(context())


def test_a_script_is_run_with_the_runs_seed(tmp_path):
    """Its server may draw the first model."""
    (tmp_path / "server.py").write_text(
        "import numpy as np\nfrom flwr import server\nfrom flwr.common import ndarrays_to_parameters\n"
        "first = ndarrays_to_parameters([np.random.rand(3).astype('float32')])\n"
        "server.start_server(strategy=server.strategy.FedAvg(initial_parameters=first))\n"
    )
    client, _ = flower_apps.threads()
    _, server = halves_of(starts_in(SCRIPTS)[:1] + starts_in(tmp_path), "")
    digests = [
        run_app(App("x", client, server), out=tmp_path / str(i), nodes=2, seed=seed).transcript_digest
        for i, seed in enumerate((1, 1, 2))
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "files",
    [
        {"all.py": "fl.client.start_client()\nfl.server.start_server()\n"},
        {"a.py": "start_client()", "b.py": "start_client()", "server.py": "start_server()"},
        {"client.py": "start_client()"},
        {"sim.py": "fl.simulation.start_simulation()"},
        {"broken.py": "start_client(", "server.py": "start_server()"},
    ],
)
def test_other_scripts_have_no_halves(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = starts_in(tmp_path)
    assert halves_of(found, "") is None
    assert re.fullmatch(r"\w+\.py, line 1, calls start_\w+", str(found[0]))
