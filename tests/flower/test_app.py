"""`fedaudit flower run`, what it refuses, and that a run folder imports nobody's code unasked."""

from __future__ import annotations

import importlib
import math
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedaudit import registry
from fedaudit.cli.main import app as cli
from fedaudit.errors import RunError, SettingError
from fedaudit.flower import Records, Terms, read_app, run_app
from fedaudit.flower import app as flower_app
from fedaudit.flower.app import App
from fedaudit.progress import unwatched
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.world import world_of

APP = Path(__file__).parents[2] / "examples" / "flower_sklearn"


def test_an_app_from_the_command_line(tmp_path):
    words = [
        "flower", "run", str(APP), "--out", str(tmp_path / "run"), "--nodes", "2", "--kind", "arrays=weights:update",
        "--run-config", "num-server-rounds=1", "--privacy", "gradients:eps=4,clip=1,delta=1e-5",
    ]  # fmt: skip
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output + str(result.exception)
    record = read_record(tmp_path / "run")
    assert record.setting.rounds == 1
    assert record.ledger[0].by_kind["gradients"] == pytest.approx(4.0, rel=0.02)
    assert "Everything is in" in result.output


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--kind", "arrays"], "write RECORD=KIND"),
        (["--kind", "arrays=weights:all"], "update or record"),
        (["--run-config", "rounds=1"], "has no config 'rounds'"),
        (["--adapter", "skdigits.task:fit"], "should be a Records"),
    ],
)
def test_what_makes_no_sense_is_refused(more, words, tmp_path):
    result = CliRunner().invoke(cli, ["flower", "run", str(APP), "--out", str(tmp_path / "run"), *more])
    assert isinstance(result.exception, SettingError)
    assert words in str(result.exception)
    assert not (tmp_path / "run" / "record.json").exists()


class Adapter(Records):
    """Tells nothing; only its place is read."""


def pair_of(told, status="done"):
    said = SimpleNamespace(begun=True, failure=None, redone="redone")
    return SimpleNamespace(server=said, client="the client", folder=told, record=lambda: SimpleNamespace(status=status))


@pytest.mark.parametrize(
    ("own", "asked", "found"),
    [(None, None, None), ("own", None, "own"), ("own", "asked", "asked"), (None, "asked", "asked")],
)
def test_what_an_app_is_run_with(own, asked, found, monkeypatch, tmp_path):
    """What is asked for goes over what the app says: its adapter, its kinds and its config."""
    said, ran = [], []
    monkeypatch.setattr(flower_app, "imported", lambda place, cls: (place, cls))
    monkeypatch.setattr(flower_app, "audited", lambda *of, **how: said.append((of, how)) or pair_of(tmp_path))
    monkeypatch.setattr(flower_app, "run_here", lambda *of: ran.append(("here", *of)))
    monkeypatch.setattr(flower_app, "in_simulation", lambda *of: ran.append(("ray", *of)))
    app = App("mine", "client", "server", {"lr": 1, "E": 2}, {"a": "weights", "b": "count"}, own, "pkg:client")
    record = run_app(app, out=tmp_path, nodes=3, adapter=asked, config={"E": 5}, kinds={"b": "logits"}, seed=7)
    assert record.status == "done"
    ((of, how),) = said
    assert of == ("client", "server")
    assert how == {
        "out": tmp_path, "nodes": 3, "kinds": {"a": "weights", "b": "logits"}, "privacy": None,
        "adapter": None if found is None else (found, Records), "config": {"lr": 1, "E": 5}, "canaries": 0, "seed": 7,
        "keep_weights": 10, "name": "mine", "client_at": "pkg:client", "watch": None, "resume": False,
    }  # fmt: skip
    assert [(row[0], *row[2:]) for row in ran] == [("here", "the client", 3, 7, tmp_path / flower_app.ERRORS)]
    run_app(app, out=tmp_path, nodes=3, ray=True, resume=True, canaries=2, keep_weights=4, privacy={"x": {}})
    assert [row[0] for row in ran] == ["here", "ray"]
    assert [said[1][1][name] for name in ("resume", "canaries", "keep_weights", "privacy", "seed")] == [
        True, 2, 4, {"x": {}}, 0,
    ]  # fmt: skip


def test_a_runtime_that_ends_early_left_no_run(monkeypatch, tmp_path):
    monkeypatch.setattr(flower_app, "audited", lambda *of, **how: pair_of(tmp_path, "running"))
    monkeypatch.setattr(flower_app, "run_here", lambda *of: None)
    with pytest.raises(RunError, match="its run is not complete"):
        run_app(App("mine", "client", "server"), out=tmp_path, nodes=1)


def test_the_recorder_of_an_app_knows_its_terms_and_claims(monkeypatch, tmp_path):
    made, notes = [], []
    monkeypatch.setattr(flower_app, "Recorder", lambda *of: made.append(of) or SimpleNamespace(note=notes.append))
    monkeypatch.setattr(flower_app, "local_claims", lambda app: [SimpleNamespace(text=f"claim of {app}")])
    monkeypatch.setattr(flower_app, "AuditedClientApp", lambda *of: of)
    monkeypatch.setattr(flower_app, "AuditedServerApp", lambda *of: of)
    how = {"kinds": {"a": "weights"}, "privacy": {"gradients": {"epsilon": 1}}, "adapter": Adapter}
    found = flower_app.audited("client", "server", out=tmp_path, nodes=4, **how)
    server, recorder, config = found.server
    assert (server, config, found.folder) == ("server", None, tmp_path)
    client, mod, config = found.client
    assert (client, config) == ("client", None)
    terms = Terms({"a": "weights"}, {"gradients": {"epsilon": 1}}, Adapter, 0, 4, 0)
    assert mod.terms == terms
    assert [claim.text for claim in recorder().local] == ["claim of client"] == notes
    ((folder, setting, of, watch, resume),) = made
    assert (folder, of, watch, resume) == (tmp_path, terms, unwatched, False)
    assert (setting.set["app"], setting.clients, setting.rounds, setting.keep_weights) == ("app", 4, 0, 10)
    more = {
        "config": {"num-server-rounds": 6},
        "canaries": 2,
        "seed": 5,
        "keep_weights": 3,
        "name": "n",
        "resume": True,
    }
    found = flower_app.audited(
        "client", "server", out=tmp_path, nodes=4, adapter=Adapter, client_at="p:c", watch=max, **more
    )
    found.server[1]()
    _, setting, of, watch, resume = made[-1]
    assert (of, watch, resume) == (Terms({}, {}, Adapter, 5, 4, 2), max, True)
    assert found.server[2] == {"num-server-rounds": 6}
    assert (setting.set["app"], setting.set["client"], setting.rounds, setting.keep_weights) == ("n", "p:c", 6, 3)
    assert (setting.seed, setting.canaries, setting.set["config"]) == (5, 2, {"num-server-rounds": 6})
    with pytest.raises(SettingError, match="Give an adapter"):
        flower_app.audited("client", "server", out=tmp_path, nodes=4, canaries=1)


def test_a_folder_that_is_no_app(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(SettingError, match="does not describe a Flower app"):
        read_app(tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.flwr.app.components]\nclientapp = 'nowhere:app'\nserverapp = 'nowhere:app'\n"
    )
    with pytest.raises(SettingError, match="cannot be imported"):
        read_app(tmp_path)


SCRIPT = """
import flwr as fl

class Client(fl.client.NumPyClient):
    pass

if __name__ == "__main__":
    fl.client.start_client(server_address="127.0.0.1:8080", client=Client().to_client())
"""


@pytest.mark.parametrize("described", [False, True])
def test_a_script_that_starts_its_clients_is_refused_with_the_way_out(described, tmp_path):
    """As older tutorials have it: client.py and server.py, without halves that an audit could run."""
    (tmp_path / "client.py").write_text(SCRIPT)
    if described:
        (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    result = CliRunner().invoke(cli, ["flower", "run", str(tmp_path), "--out", str(tmp_path / "run")])
    assert isinstance(result.exception, SettingError), result.output
    assert "is not a Flower app but a script: client.py, line 8, calls start_client." in str(result.exception)
    assert "ClientApp(client_fn=...) and ServerApp(config=..., strategy=...)" in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_the_halves_of_such_a_script_are_audited(tmp_path):
    """Its client and its strategy, as the refusal says."""
    import flower_apps
    from flwr.clientapp import ClientApp
    from flwr.server import ServerConfig
    from flwr.server import strategy as older
    from flwr.serverapp import ServerApp

    from fedaudit.flower import audited
    from fedaudit.flower.in_process_runtime import run_here

    pair = audited(
        ClientApp(client_fn=lambda context: flower_apps.Adding(flower_apps.number(context)).to_client()),
        ServerApp(config=ServerConfig(num_rounds=1), strategy=older.FedAvg(fraction_evaluate=0.0)),
        out=tmp_path / "run", nodes=2, kinds={"fitres.parameters": "weights"},
    )  # fmt: skip
    run_here(pair.server, pair.client, 2, 0)
    record = pair.record()
    assert record.status == "done"
    assert [row.participants for row in record.rounds] == [[0, 1]]
    assert {r.kind for r in record.releases if r.field == "TrainReply.fitres_parameters"} == {"weights"}


@pytest.mark.parametrize("gone", ["skdigits.audit", "skdigits.client_app"])
def test_a_run_imports_no_code_that_nobody_trusts(gone, sk_run, monkeypatch):
    """The folder names an adapter and a ClientApp: whoever opens it in another process has to trust both."""
    monkeypatch.delitem(sys.modules, gone)
    monkeypatch.setattr(registry, "_trusting", False)
    world_of.cache_clear()
    with pytest.raises(SettingError, match="--trust"):
        _ = RunFolder(sk_run).world
    world_of.cache_clear()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("array=weights", r"--kind array: Unknown record of a reply 'array'. Did you mean 'arrays'\? There is: arrays"),
        ("train.embedding=embeddings", "--kind train.embedding: .* metrics.num-examples"),
    ],
)
def test_a_kind_that_matches_nothing_is_an_error(kind, words, tmp_path):
    """One that looks mistyped after the first round, any other at the end."""
    words_of = ["flower", "run", str(APP), "--out", str(tmp_path / "run"), "--nodes", "2", "--kind", kind]
    result = CliRunner().invoke(cli, [*words_of, "--run-config", "num-server-rounds=2"])
    assert isinstance(result.exception, SettingError), result.output
    assert re.search(words, str(result.exception)), str(result.exception)
    record = read_record(tmp_path / "run")
    assert record.status == "running"
    assert len(record.rounds) == (1 if kind.startswith("array=") else 2)


def test_an_import_error_shows_the_apps_own_line(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.flwr.app.components]\nclientapp = 'lackingapp:app'\nserverapp = 'lackingapp:app'\n"
    )
    (tmp_path / "lackingapp.py").write_text("import json\nimport no_such_library\n")
    with pytest.raises(
        SettingError, match=r"No module named 'no_such_library' \(.*line 2: import no_such_library\)"
    ) as e:
        read_app(tmp_path)
    assert "package.module" not in str(e.value)
    (tmp_path / "lackingapp.py").write_text("app = 1\n")
    sys.modules.pop("lackingapp", None)
    importlib.invalidate_caches()
    with pytest.raises(SettingError, match="is a int, but should be a ClientApp"):
        read_app(tmp_path)


def test_the_torchvision_repair_is_lent_to_apps(tmp_path, monkeypatch):
    """An app that fails as torchvision's own import does is imported again after the repair."""
    from fedaudit.flower import app as module

    tried = []
    monkeypatch.setattr(module, "torchvision", lambda: tried.append("repair"))
    (tmp_path / "visionapp.py").write_text(
        "import builtins\n"
        "if not getattr(builtins, 'mended', False):\n"
        "    builtins.mended = True\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "from flwr.clientapp import ClientApp\n"
        "app = ClientApp()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from flwr.clientapp import ClientApp

    assert isinstance(module.imported("visionapp:app", ClientApp), ClientApp)
    assert tried == ["repair"]


# --- Flower's own examples -------------------------------------------------------------------------------------------

CHECKOUT = os.environ.get("FEDAUDIT_FLOWER_CHECKOUT", "")
RECIPES = Path(__file__).parents[2] / "docs" / "guide" / "flower.md"


def run_example(checkout, name, scratch, monkeypatch, nodes=5):
    """Audit an example of a checkout as it is, and return its record. Skip one whose libraries or data are not here.

    Some examples write files where they run. Data sets in folders of the hub's names may lie beside `examples`.
    """
    for beside in checkout.iterdir():
        (scratch / beside.name).symlink_to(beside.resolve())
    monkeypatch.chdir(scratch)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["flower", "run", f"examples/{name}", "--out", "run", "--nodes", str(nodes)]
    result = CliRunner().invoke(cli, words)
    log = scratch / "run" / "errors.log"
    said = f"{result.exception} {log.read_text() if log.exists() else ''}"
    record = None if result.exit_code else read_record(scratch / "run")
    if record is None or any(row.absent for row in record.rounds):
        if lacks := re.search("No module named .*|.*(Hub|[Cc]onnection|No such file).*", said):
            pytest.skip(lacks[0][:200])
        pytest.fail(f"{result.output} {said}")
    assert record.status == "done"
    assert RunFolder(scratch / "run").transcript.digest(len(record.rounds)) == record.transcript_digest
    wanted = record.setting.set["config"].get("num-server-rounds")
    assert wanted is None or len(record.rounds) == wanted
    return record


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="FEDAUDIT_FLOWER_CHECKOUT names no checkout of Flower's repository")
@pytest.mark.parametrize(
    "name",
    ["quickstart-numpy", "quickstart-sklearn", "quickstart-pytorch", "quickstart-xgboost", "opacus",
     "flower-secure-aggregation", "fl-dp-sa", "federated-analytics"],
)  # fmt: skip
def test_flowers_own_examples_run_as_they_are(name, tmp_path, monkeypatch):
    run_example(Path(CHECKOUT), name, tmp_path, monkeypatch)


SHAPES = {  # of the examples that have a recipe: the app of `flower_apps`, and its number of rounds
    "quickstart-pytorch": ("strategy", 2),
    "quickstart-sklearn": ("configured", 25),
    "opacus": ("opacus", 2),
    "flower-secure-aggregation": ("secure", 2),
    "quickstart-xgboost": ("xgboost", 2),
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder in the shape of a checkout, whose examples have the names and the records of Flower's."""
    for name, (shape, rounds) in SHAPES.items():
        module = f"{name.replace('-', '_')}_by_hand"
        folder = tmp_path / "checkout" / "examples" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            f"[project]\nname = '{name}'\n[tool.flwr.app.components]\nserverapp = '{module}.server_app:app'\n"
            f"clientapp = '{module}.client_app:app'\n[tool.flwr.app.config]\nnum-server-rounds = {rounds}\n"
        )
        (folder / module).mkdir()
        for half, place in (("client_app", 0), ("server_app", 1)):
            text = f"import flower_apps\n\napp = flower_apps.{shape}()[{place}]\n"
            (folder / module / f"{half}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path / "checkout"
    for module in set(sys.modules) - before:
        if module.partition(".")[0].endswith("_by_hand"):
            del sys.modules[module]


def test_a_checkout_that_is_given_by_path_is_run(checkout, tmp_path, monkeypatch):
    """One whose data lies beside the examples runs; one without its libraries or data is skipped with its line."""
    (checkout / "some-hub").mkdir()
    code = checkout / "examples" / "opacus" / "opacus_by_hand" / "client_app.py"
    code.write_text(f"import pathlib\n\nassert pathlib.Path('some-hub').is_dir()\n{code.read_text()}")
    (tmp_path / "here").mkdir()
    record = run_example(checkout, "opacus", tmp_path / "here", monkeypatch, nodes=3)
    assert [row.participants for row in record.rounds] == [[0, 1, 2]] * 2
    lacking = checkout / "examples" / "quickstart-xgboost" / "quickstart_xgboost_by_hand" / "client_app.py"
    lacking.write_text("import no_such_library\n")
    (tmp_path / "there").mkdir()
    with pytest.raises(pytest.skip.Exception, match="No module named 'no_such_library'"):
        run_example(checkout, "quickstart-xgboost", tmp_path / "there", monkeypatch)
    code = checkout / "examples" / "quickstart-pytorch" / "quickstart_pytorch_by_hand" / "client_app.py"
    failing = "app = ClientApp()\napp.train()(lambda *_: open('nowhere'))\n"
    code.write_text(f"from flwr.clientapp import ClientApp\n\n{failing}")
    (tmp_path / "without").mkdir()
    with pytest.raises(pytest.skip.Exception, match="No such file or directory: 'nowhere'"):
        run_example(checkout, "quickstart-pytorch", tmp_path / "without", monkeypatch)


def recipes():
    """Return the rows of the guide's recipes: example, command, what the audit says."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in RECIPES.read_text().splitlines()]
    return {row[0]: (row[1].strip("`"), row[2]) for row in rows if len(row) == 3 and row[0] in SHAPES}


def test_there_is_a_recipe_for_each_of_five():
    assert recipes().keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_runs_as_it_stands_and_its_row_is_true(name, checkout, monkeypatch):
    command, row = recipes()[name]
    program, *words = shlex.split(command)
    assert (program, words[2]) == ("fedaudit", f"examples/{name}")
    monkeypatch.chdir(checkout)
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output + str(result.exception)
    record = read_record(checkout / words[words.index("--out") + 1])
    assert record.setting.clients == int(words[words.index("--nodes") + 1])
    assert len(record.rounds) == SHAPES[name][1]
    spent, notes = record.ledger[0], " ".join(record.notes)
    assert spent.epsilon == math.inf  # metrics go up in the clear in all five
    if name == "quickstart-pytorch":
        assert "server strategy: FedAvg" in notes
        assert {"weights", "count"} <= spent.by_kind.keys()
    elif name == "quickstart-sklearn":
        assert "29.7 for the example's 25 rounds" in row
        assert spent.by_kind["gradients"] == pytest.approx(29.7, abs=0.05)
    elif name == "opacus":
        assert [(said.verdict, said.claim) for said in record.audits] == [
            ("not tried", "reported by the app's metrics")
        ]
        assert "it does not grow" in notes
    elif name == "flower-secure-aggregation":
        assert "the server sees only sums of at least 5 nodes' models" in notes
        assert "the server sees only sums of at least 5 nodes' models" in row
    else:
        assert "such as the bytes of trees: no noise can be added, and no attack reads it" in notes
