"""Only what is trained travels: frozen parameters are the same for everybody and in no message."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import adapted
import pytest
import torch
from safetensors.torch import load_file

import fedaudit
from fedaudit.attack.attack_run import attack_run
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.planned_traffic import plan_traffic

METHODS = ["fedavg", "fedavgm", "fedprox", "moon", "fedntd", "fedbn", "fednova", "scaffold", "feddyn", "perfedavg"]


def setting(method, **more):
    return fedaudit.Setting.make(**{
        "method": method, "dataset": "digits", "clients": 2, "partition": "iid", "model": "adapted:Adapted",
        "rounds": 2, "seed": 3, "device": "cpu", "engine": "serial", "eval_clients": False, "twins": 0, "aux": 0.1,
        **more,
    })  # fmt: skip


def states(folder):
    """All states in all messages, by message and field."""
    for e in RunFolder(folder).transcript.entries():
        for name in e.fields:
            if e.state_shapes(name) is not None:
                yield e, e[name]


@pytest.mark.parametrize("method", METHODS)
def test_adapters_cost_what_they_should(method, tmp_path):
    """Measured and declared traffic agree in every run; here both are also the adapters' and the head's by hand."""
    quick = {"tau": 2} if method == "perfedavg" else {}
    record = fedaudit.run(setting(method, set={"B": 64, **quick}), out=tmp_path)
    sizes = {(row.direction, row.field.rpartition(".")[2]): row.payload for row in record.traffic}
    whole = {(way, name): n for (way, name), n in sizes.items() if name in ("w", "x", "y", "theta", "c", "delta_c")}
    assert len(whole) == (4 if method == "scaffold" else 2)
    assert set(whole.values()) == {2 * 2 * 4 * adapted.TRAINED}
    for _, state in states(tmp_path):
        assert not any(name.startswith(("encoder.base", "base")) for name in state)


def test_the_whole_model_travels_if_asked_for(tmp_path):
    record = fedaudit.run(setting("fedavg", set={"send": "all"}), out=tmp_path)
    sizes = {(row.direction, row.field): row.payload for row in record.traffic}
    assert sizes["down", "Global.w"] == sizes["up", "Local.w"] == 2 * 2 * 4 * (adapted.TRAINED + adapted.FROZEN)


@pytest.mark.parametrize("init", ["common", "own"])
def test_the_frozen_part_is_the_same_for_everybody(init, tmp_path):
    """Sending all or the trained part gives the same models, though the frozen weights are drawn at random."""
    for send in ("trained", "all"):
        fedaudit.run(setting("fedavg", set={"send": send}, init=init), out=tmp_path / send)
    ours, theirs = (load_file(tmp_path / send / "models" / "global.safetensors") for send in ("trained", "all"))
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        assert torch.equal(t, theirs[name]), name


@pytest.mark.slow
def test_attacks_see_the_whole_model(tmp_path):
    """A state of adapters is loaded over the public base: the attack runs as on a whole model, with the same scores."""
    found = []
    for send in ("trained", "all"):
        fedaudit.run(setting("fedavg", set={"send": send}), out=tmp_path / send)
        loss = next(r for r in attack_run(tmp_path / send, attacks=["loss"]) if r.attack == "loss")
        assert loss.ran, loss.reason
        found.append(loss.pooled.auc.value)
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_a_state_that_lacks_more_does_not_fit():
    from fedaudit.errors import ContractError
    from fedaudit.wire.message import load, state_of, trained

    net = adapted.Adapted((8, 8), 10)
    other = adapted.Adapted((8, 8), 10)
    load(other, state_of(net, trained))
    assert torch.equal(other.up.weight, net.up.weight)
    assert not torch.equal(other.base.weight, net.base.weight)
    part = state_of(net, trained)
    del part["head.bias"]
    with pytest.raises(ContractError, match=r"head\.bias"):
        load(other, part)


def test_the_plan_knows_it():
    """One round of two clients, in float32."""
    planned = {row["field"]: row["bytes"] for row in plan_traffic(setting("fedavg"))["fields"]}
    assert planned == {"Global.w": 2 * 4 * adapted.TRAINED, "Local.w": 2 * 4 * adapted.TRAINED, "Local.n": 16}


@pytest.mark.slow
def test_the_lora_examples_commands_run_as_they_stand(tmp_path):
    """In a copy, with one round in the place of five and one epoch in the place of three. A message has 23.7 kB."""
    example = Path(__file__).parents[2] / "examples" / "lora_text"
    shutil.copytree(example, tmp_path / "examples" / "lora_text")
    (block,) = re.findall(r"```sh\n(.*?)```", (example / "README.md").read_text(), re.DOTALL)
    assert block.count("fedaudit ") == 5
    script = block.replace("--rounds 5", "--rounds 1").replace("--set E=3", "--set E=1")
    script = script.replace("PYTHONPATH=", f"PYTHONPATH={os.pathsep.join(sys.path)}{os.pathsep}")
    python = shlex.quote(sys.executable)
    program = f'fedaudit() {{ {python} -m fedaudit "$@"; }}\npython() {{ {python} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program + script], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"fedavg · DP-SGD ε=8 .* 23\.70 kB", done.stdout), done.stdout[-2000:]


@pytest.mark.slow
def test_the_lora_example_sends_its_adapters_only(tmp_path, monkeypatch):
    """Embedding 1024 x 4 and 4 x 48; queries and values of two blocks 2 x 4 x 48 each; a head of 48 x 2 + 2."""
    adapters = 1024 * 4 + 4 * 48 + 2 * 2 * (2 * 4 * 48) + 48 * 2 + 2
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "lora_text")
    record = fedaudit.run(
        setting("fedavg", dataset="lora_text.data:docstrings", model="lora_text.model:Adapted", rounds=1,
                privacy={"training": {"epsilon": 8, "sensitivity": "clip:1"}}, twins="all", set={"B": 128}),
        out=tmp_path / "run",
    )  # fmt: skip
    sizes = {(row.direction, row.field): row.payload for row in record.traffic}
    assert sizes["down", "Global.w"] == sizes["up", "Local.w"] == 2 * 4 * adapters
    assert record.twins.held == record.twins.tasks == 2
    assert max(client.epsilon for client in record.ledger) <= 8.0
    loss = next(r for r in attack_run(tmp_path / "run", attacks=["loss"]) if r.attack == "loss")
    assert loss.ran, loss.reason
