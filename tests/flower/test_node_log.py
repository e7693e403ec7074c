"""The mod alone: what the nodes kept, put together, is what an audit on both sides would have recorded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from typer.testing import CliRunner

from fedaudit.cli.main import app as cli
from fedaudit.errors import RunError
from fedaudit.flower import RecordingMod, Terms, collect, node_log, run_app
from fedaudit.flower.in_process_runtime import run_here
from fedaudit.runtime.folder import RunFolder

CONFIG = {"num-server-rounds": 2, "local-epochs": 1}
KINDS = {"arrays": {"kind": "weights", "update": True}, "train.metrics.num-examples": "count"}
PRIVACY = {"gradients": {"noise_multiplier": 1.0, "sensitivity": "clip:0.5", "delta": 1e-5}}


class Configured(ClientApp):
    """The app with its mod, where the runtime has no config to give."""

    def __init__(self, mod):
        super().__init__()
        from skdigits import client_app

        self.inner = ClientApp(mods=[mod])
        self.inner.train()(client_app.train)
        self.inner.evaluate()(client_app.evaluate)

    def __call__(self, message, context):
        context.run_config = CONFIG
        return self.inner(message, context)


@pytest.fixture(scope="module")
def pages(sk_app, tmp_path_factory):
    from flwr.serverapp import ServerApp
    from skdigits.audit import Digits

    folder = tmp_path_factory.mktemp("pages")
    server = ServerApp()

    @server.main()
    def main(grid, context):
        context.run_config = CONFIG
        sk_app.server(grid, context)

    run_here(server, Configured(RecordingMod(Terms(KINDS, PRIVACY, Digits, partitions=2), folder)), 2, seed=0)
    return folder


@pytest.mark.long
def test_the_same_run_as_with_both_sides(pages, sk_app, tmp_path):
    result = CliRunner().invoke(cli, ["flower", "collect", str(pages), "--out", str(tmp_path / "mod"), "--nodes", "2"])
    assert result.exit_code == 0, result.output + str(result.exception)
    both = run_app(sk_app, out=tmp_path / "both", nodes=2, config=CONFIG, kinds=KINDS, privacy=PRIVACY)
    alone = RunFolder(tmp_path / "mod").record
    assert alone.transcript_digest == both.transcript_digest  # every tensor, the noise too
    assert alone.traffic == both.traffic
    assert alone.ledger == both.ledger
    assert [row.participants for row in alone.rounds] == [row.participants for row in both.rounds]


def test_a_message_without_an_answer_is_an_absence(pages, tmp_path):
    import shutil

    mine = tmp_path / "pages"
    shutil.copytree(pages, mine)
    (mine / "000001-000002.told").unlink()  # node 1, its second training
    record = collect(mine, out=tmp_path / "run", nodes=2)
    assert [(a.client, a.ask) for a in record.rounds[1].absent] == [(1, 0)]
    assert "absence" in record.ledger[1].by_kind
    (mine / "000001-000001.reply").write_bytes(b"\xff\xff\xff")
    with pytest.raises(RunError, match=r"000001-000001\.asked is not a node's log"):
        collect(mine, out=tmp_path / "other", nodes=2)
    with pytest.raises(RunError, match="does not hold nodes' logs"):
        collect(tmp_path, out=tmp_path / "third", nodes=2)


def test_the_server_gets_what_the_page_has(pages):
    """Nothing of the audit, and the noisy arrays."""
    from fedaudit.flower.node_log import _pages

    first = next(_pages(pages))
    assert set(first.reply.content) == {"arrays", "metrics"}
    sent = torch.from_numpy(first.reply.content["arrays"].to_numpy_ndarrays()[0])
    assert float(sent.std()) == pytest.approx(1.0, rel=0.15)  # multiplier 1, sensitivity 2 C = 1, from zeros
    assert np.array_equal(first.asked.content["arrays"].to_numpy_ndarrays()[0], np.zeros((10, 64)))


def test_pages_are_told_by_round_and_then_in_the_order_of_the_nodes(monkeypatch, tmp_path):
    """Two nodes. Round 1 has evaluation after training, round 2 the other way; node 1 was not asked at first."""
    rounds = [(0, 0, 1, "train"), (0, 1, 1, "evaluate"), (0, 2, 2, "evaluate"), (0, 3, 2, "train"),
              (1, 0, 1, "evaluate"), (1, 1, 2, "evaluate"), (1, 2, 2, "train")]  # fmt: skip
    pages = [
        SimpleNamespace(
            k=k, n=n, round=t, asked=SimpleNamespace(metadata=SimpleNamespace(message_type=kind), content=t)
        )
        for k, n, t, kind in rounds
    ]
    terms = {
        "adapter": None,
        "kinds": {"a": "weights"},
        "privacy": {"p": {}},
        "seed": 4,
        "partitions": None,
        "canaries": 3,
    }
    (tmp_path / node_log.TERMS).write_text(json.dumps(terms))
    said = []

    class Made:
        def __init__(self, *given):
            said.append(given)

        def __getattr__(self, name):
            return lambda *of: said.append((name, *of)) or name

    monkeypatch.setattr(node_log, "Recorder", Made)
    monkeypatch.setattr(node_log, "_pages", lambda folder: iter(pages))
    monkeypatch.setattr(node_log, "typed", lambda kind, content: kind)
    monkeypatch.setattr(node_log, "_exchange", lambda page, recorder: (page.k, page.n))
    monkeypatch.setattr(node_log, "round_number", lambda asked: asked.content)
    monkeypatch.setattr(node_log, "setting_of", lambda terms, **how: how)
    assert collect(tmp_path, out=tmp_path / "run", nodes=2, name="mine") == "finish"
    (out, setting, of, _), *told = said
    assert (out, setting) == (tmp_path / "run", {"name": "mine", "nodes": 2})
    assert of == Terms({"a": "weights"}, {"p": {}}, None, 4, 2, 3), "as many parts as nodes, where it is not said"
    asked = [row for row in told if row[0] == "ask"]
    assert asked == [
        ("ask", "train", [(0, 0)], 1), ("ask", "evaluate", [(0, 1), (1, 0)], 1),
        ("ask", "evaluate", [(0, 2), (1, 1)], 2), ("ask", "train", [(0, 3), (1, 2)], 2),
    ]  # fmt: skip
    assert [row[0] for row in told] == ["ask"] * 4 + ["note", "finish", "close"]
