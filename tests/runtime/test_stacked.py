"""The engine that trains clients together: the same protocol as one after another, the same numbers to rounding."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossings import apart, protocol
from engines import stack_sizes
from precision import double

from fedaudit import Setting, registry, run
from fedaudit.errors import SettingError
from fedaudit.runtime.engines import make_engine, stacked
from fedaudit.runtime.folder import setting_key
from fedaudit.runtime.run_record import RunRecord
from fedaudit.runtime.task import Done, Task
from fedaudit.runtime.world import chosen_engine as chosen

# FedZGE's server trains a generator with Adam, which makes steps of the gradients of biases before a batch norm: these
# are rounding and nothing else. The first round's replies differ by 1e-16, the images of the second by 7e-11. FedKTL's
# server trains with Adam too: the prototypes of the second round differ by 2e-10.
TOLERANCE = {"fedzge": 1e-8, "fedktl": 1e-8}
# Each way of training once: several asks, generators, nested gradients, sub-models, own terms of the loss, statistics.
QUICK = {"fedavg", "dfrd", "fedaf", "fedbn", "fedfree", "fedproto", "fke", "heterofl", "moon", "perfedavg", "scaffold"}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow if "+" in name else pytest.mark.long)
        for name in registry.names("methods")
    ],
)
def test_every_method_is_the_same_to_rounding(
    method: str, tiny: Callable[..., Setting], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds in double precision, four clients of unequal size, one of which drops out of the first: all that
    crosses the wire differs by 1e-10 at most, and names, bytes and ledger not at all."""
    values = {"rounds": 2, "clients": 4, "model": "cnn@0.25", "dropout": 0.1, "quorum": 0.25, "aux": 0.7, "seed": 5}
    values |= {"partition": "dirichlet:0.5", "eval_every": 2, "eval_clients": False, "keep_weights": 2}
    with double(method):
        serial = run(tiny(method, **values, engine="serial"), out=tmp_path / "a")
        stacked = run(tiny(method, **values, engine="stacked"), out=tmp_path / "b")
        assert protocol(serial) == protocol(stacked)
        assert apart(tmp_path / "a", tmp_path / "b") < TOLERANCE.get(method, 1e-10)
    assert 3 in [absence.client for absence in stacked.rounds[0].absent]
    assert (serial.setting.engine, stacked.setting.engine) == ("serial", "stacked")
    assert not [note for note in serial.notes if note.startswith("not stacked")]


@pytest.mark.parametrize(
    "values",
    [
        {"model": "cnn_bn@0.5"},
        {"model": "cnn_bn@0.5:2,mlp@0.5:3", "method": "local"},
        {"set": {"E": 2, "B": 7, "opt": "adam", "eta": 0.01}},
        pytest.param({"together": 3}, marks=pytest.mark.long),
        {"method": "fedavg", "participation": 0.6},
    ],
    ids=["batch norm", "two architectures", "adam", "three at a time", "some take part"],
)
def test_fedavg_in_its_variants(values: dict[str, Any], tmp_path: Path) -> None:
    setting: dict[str, Any] = {"method": "fedavg", "rounds": 2, "clients": 5, "aux": 0.7, "set": {"E": 2, "B": 8}}
    setting |= {"partition": "dirichlet:0.3", "eval_every": 2, "eval_clients": False, "model": "cnn@0.5", **values}
    with double(setting["method"]):
        serial = run(**setting, engine="serial", out=tmp_path / "a")
        stacked = run(**setting, engine="stacked", out=tmp_path / "b")
        assert protocol(serial) == protocol(stacked)
        assert apart(tmp_path / "a", tmp_path / "b") < 1e-10
    assert stacked.notes == []


@pytest.mark.long
def test_dffke_as_its_author_has_it_is_the_same_to_rounding(tmp_path: Path) -> None:
    """Docking layers that learn beside the networks, batches of one peer, past rows of two rounds, and local training
    that ends by its running accuracy: three rounds. Adam makes steps of gradients that are rounding alone."""
    values = {
        "tau": 0.4, "stops": "running", "E_local": 4, "B": 32, "h": 8, "T_Tran": 2, "T_Dec": 1, "T_FKE": 2, "w_Dec": 4,
        "B_Dec": 20, "mean_x": 0.0, "sigma_x": 1.0, "crop": 1,
    }  # fmt: skip
    setting: dict[str, Any] = {"method": "dffke", "preset": "authors", "set": values, "rounds": 3, "clients": 3}
    setting |= {"model": "mlp@0.5", "aux": 0.85, "partition": "dirichlet:1", "eval_every": 3, "eval_clients": False}
    with double("dffke"):
        serial = run(**setting, engine="serial", out=tmp_path / "a")
        stacked = run(**setting, engine="stacked", out=tmp_path / "b")
        assert protocol(serial) == protocol(stacked)
        assert apart(tmp_path / "a", tmp_path / "b") < 1e-8
    assert stacked.notes == []


# --- what fails, and what cannot be stacked -----------------------------------------------------------------------


def go(folder: Path, engine: str, **values: Any) -> RunRecord:
    chosen_values = {
        "clients": 4,
        "rounds": 1,
        "model": "mlp",
        "aux": 0.7,
        "eval_clients": False,
        "quorum": 0.25,
        **values,
    }
    return run(method="failing:OneFails", engine=engine, out=folder / engine, **chosen_values)


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_client_that_fails_leaves_the_others_alone(when: str, tmp_path: Path) -> None:
    serial, stacked = (go(tmp_path, engine, set={"who": 2, "when": when}) for engine in ("serial", "stacked"))
    (absence,) = stacked.rounds[0].absent
    assert absence == serial.rounds[0].absent[0]
    assert absence.client == 2
    assert protocol(serial) == protocol(stacked)
    assert apart(tmp_path / "serial", tmp_path / "stacked") < 1e-5


def test_what_is_trained_alone_is_said(tmp_path: Path, fedaudit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws from each client's own generator: alone it is equal to the bit, and `show` says so."""
    serial, stacked = (go(tmp_path, engine, set={"drop": True}) for engine in ("serial", "stacked"))
    assert serial.transcript_digest == stacked.transcript_digest
    assert stacked.notes == ["not stacked: train: dropout draws for each model in turn"]
    code, out, _ = fedaudit("show", tmp_path / "stacked")
    assert code == 0
    assert "not stacked: train: dropout" in out
    assert "stacked" in out


def test_a_stack_was_really_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stack_sizes(monkeypatch)
    run(method="fedavg", clients=5, rounds=2, model="mlp", engine="stacked", together=3, aux=0.7, out=tmp_path / "a")
    assert seen == [3, 2] * 2


def test_a_stacked_run_goes_on_as_a_stacked_run(tmp_path: Path) -> None:
    setting: dict[str, Any] = {"method": "fedavg", "clients": 4, "model": "mlp", "aux": 0.7, "set": {"B": 8}}
    whole = run(**setting, rounds=3, engine="stacked", out=tmp_path / "a")
    run(**setting, rounds=2, engine="stacked", out=tmp_path / "b")
    gone_on = run(**setting, rounds=3, engine="stacked", out=tmp_path / "b", resume=True)
    assert gone_on.transcript_digest == whole.transcript_digest
    assert not gone_on.notes


def test_a_stacked_run_may_go_on_otherwise_and_says_so(tmp_path: Path) -> None:
    """After an error of the device another engine, stack or step may be named; noise is drawn anew from there."""
    setting: dict[str, Any] = {"method": "fedavg", "clients": 4, "model": "mlp", "aux": 0.7, "set": {"B": 8}}
    run(**setting, rounds=2, engine="stacked", out=tmp_path / "b")
    gone_on = run(**setting, rounds=3, engine="serial", out=tmp_path / "b", resume=True)
    assert gone_on.notes == ["resumed after round 2 with other steps, stacks or engine: rounding may differ from there"]
    assert json.loads((tmp_path / "b" / "checkpoint" / "HEAD.json").read_text())["attempt"] == 1
    with pytest.raises(SettingError, match="precision = 'float32', now 'bf16'"):
        run(**setting, rounds=4, precision="bf16", out=tmp_path / "b", resume=True)


def test_the_key_tells_stacked_from_serial() -> None:
    def key(**values: Any) -> str:
        return setting_key(Setting.make(device="cpu", **values))

    assert key(engine="serial") == key(engine="ray") == key(engine="auto") == key(engine="serial", together=2)
    assert key(engine="stacked") != key(engine="serial")
    assert key(engine="stacked") != key(engine="stacked", together=2)


def test_auto_is_stacked_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(Setting.make(device="cpu")) == "serial"
    assert chosen(Setting.make(device="cuda:1")) == "stacked", "also where its name is asked for without a GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen(Setting.make(device="cuda")) == chosen(Setting.make(device="auto")) == "stacked"
    assert type(make_engine(Setting.make(device="cuda"))).__name__ == "StackedEngine"


def test_time_is_shared_out(tmp_path: Path) -> None:
    """The clients' phases together are no longer than the round, though each waited for all the others."""
    values: dict[str, Any] = {"clients": 4, "rounds": 1, "model": "mlp", "set": {"E": 8, "B": 8}, "aux": 0.5}
    record = run(method="fedavg", engine="stacked", out=tmp_path / "a", **values)
    of_clients = [row for row in record.timings if row.party.startswith("client") and row.phase == "task"]
    fits = [row for row in record.timings if row.phase == "fit"]
    assert len(of_clients) == len(fits) == 4
    assert sum(row.wall_s for row in of_clients) <= record.rounds[0].wall_s
    assert sum(row.wall_s for row in fits) > 0.3 * record.rounds[0].wall_s
    assert all(task.wall_s >= fit.wall_s for task, fit in zip(of_clients, fits, strict=True))


def test_the_caller_s_generators_are_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    run(method="fedavg", clients=3, rounds=1, model="mlp", engine="stacked", out=tmp_path / "a")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_as_many_tasks_take_turns_as_may_be_trained_together(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, the last one alone. The world is that of the first of them."""
    asked, together = [], []
    monkeypatch.setattr(stacked, "world_of", lambda text: asked.append(text) or text)
    monkeypatch.setattr(stacked, "compute", lambda world: contextlib.nullcontext())

    def side_by_side(tasks: Any, world: Any) -> list[str]:
        together.append((world, [task.k for task in tasks]))
        return [f"done {task.k}" for task in tasks]

    monkeypatch.setattr(stacked, "_side_by_side", side_by_side)
    engine = stacked.StackedEngine(Setting.make(together=2))
    tasks = [Task(f"setting of {k}", "f", k, 1, 0, None, b"") for k in range(count)]
    assert list(engine.map(tasks)) == [f"done {k}" for k in range(count)]
    assert [ids for _, ids in together] == [list(range(i, min(i + 2, count))) for i in range(0, count, 2)]
    assert asked == [f"setting of {i}" for i in range(0, count, 2)] == [world for world, _ in together]
    assert engine.in_process


def test_without_a_world_each_task_says_so_for_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def world_of(text: str) -> None:
        raise SettingError("no data")

    monkeypatch.setattr(stacked, "world_of", world_of)
    monkeypatch.setattr(stacked, "run_task", lambda task: f"alone {task.k}")
    tasks = [Task("{}", "f", k, 1, 0, None, b"") for k in range(3)]
    assert list(stacked.StackedEngine(Setting.make(together=2)).map(tasks)) == ["alone 0", "alone 1", "alone 2"]


@pytest.mark.parametrize("flops", [True, False])
def test_why_a_task_was_alone_is_said_once(flops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_turns(turns: Any) -> None:
        for turn in turns:
            turn.result = Done(turn.work.args[0].k)
            turn.alone = ["b", "a", "b"] if turn.result.k else []
            assert (turn.refuse is not None) is flops

    monkeypatch.setattr(stacked, "take_turns", take_turns)
    world: Any = SimpleNamespace(setting=SimpleNamespace(flops=flops), device=torch.device("cpu"))
    tasks = [Task("{}", "f", k, 1, 0, None, b"") for k in range(2)]
    found = stacked._side_by_side(tasks, world)
    assert [(done.k, done.alone) for done in found] == [(0, []), (1, ["b", "a"])]

    def fails(turns: Any) -> None:
        turns[1].error = ValueError("it broke")

    monkeypatch.setattr(stacked, "take_turns", fails)
    with pytest.raises(ValueError, match="it broke"):
        stacked._side_by_side(tasks, world)


@pytest.mark.parametrize(
    ("engine", "isolate", "name"),
    [
        ("serial", False, "SerialEngine"), ("stacked", False, "StackedEngine"), ("ray", False, "RayEngine"),
        ("serial", True, "IsolatedEngine"),
    ],
)  # fmt: skip
def test_each_engine_is_made_by_its_name(
    engine: str, isolate: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, cls in (("ray", "RayEngine"), ("isolated", "IsolatedEngine"), ("stacked", "StackedEngine")):
        monkeypatch.setattr(f"fedaudit.runtime.engines.{place}.{cls}", lambda setting, cls=cls: cls)
    found = make_engine(Setting.make(engine=engine, isolate=isolate))
    assert (found if isinstance(found, str) else type(found).__name__) == name
