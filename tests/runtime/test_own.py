"""Somebody's own models and data, rows of numbers and texts: run, protected, attacked, reported, planned and gated."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
import torch

import fedaudit as api
from fedaudit.data import load
from fedaudit.errors import NotApplicable, SettingError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.world import world_of
from fedaudit.setting import Setting
from fedaudit.shape import Shape

PRIVACY = dict([parse_policy("training:noise=1,clip=1,delta=1e-3")])
COMMON = {"rounds": 2, "clients": 2, "partition": "iid", "engine": "serial", "eval_clients": False}
ROWS = {**COMMON, "dataset": "mine:cancer", "model": "mine:Net", "set": {"E": 3, "B": 16, "eta": 0.1}}
TEXTS = {**COMMON, "dataset": "mine:texts", "model": "transformer", "set": {"E": 1, "B": 16, "eta": 0.1}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run of each kind, texts under DP-SGD, attacked; nobody writes into them."""
    folder = tmp_path_factory.mktemp("own")
    api.run(**ROWS, out=folder / "rows")
    api.run(**TEXTS, out=folder / "texts", privacy=PRIVACY)
    for name in ("rows", "texts"):
        few = {"attack": "label_only", "queries": 64, "probes": 8}
        api.attack(folder / name, attacks=["loss", "gradient_norm", "gradient_match", "imprint", few])
    return folder


@pytest.mark.parametrize("name", ["rows", "texts"])
def test_a_run_of_own_records_learns_and_is_attacked(runs, name):
    record = api.read_record(runs / name)
    assert record.status == "done"
    assert record.result.last.test_score() > {"rows": 0.8, "texts": 0.5}[name]  # guessing: 0.63 and 0.33
    assert (record.data.shape, record.data.tokens) == {"rows": ([30], 0), "texts": ([10], 40)}[name]
    found = {result.attack: result for result in record.attacks}
    for attack in ("loss", "gradient_norm", "blind_pixels", "blind_nearest", "blind_prior"):
        assert found[attack].ran
        assert found[attack].pooled.auc.low < found[attack].pooled.auc.value < found[attack].pooled.auc.high
    assert found["label_only"].ran == (name == "rows")  # between two texts there is nothing
    for attack in ("gradient_match", "imprint"):
        assert not found[attack].ran
        assert "does not apply: it is for images" in found[attack].reason


def test_texts_are_trained_under_dp_sgd(runs):
    open_, private = (api.read_record(runs / name).ledger for name in ("rows", "texts"))
    assert all(client.epsilon == float("inf") for client in open_)
    for client in private:
        assert 0 < client.epsilon < float("inf")
        assert {entry.mechanism for entry in client.entries if entry.kind == "training"} == {"dp-sgd"}


@pytest.mark.long
def test_the_report_has_both(runs, tmp_path):
    api.report(runs, out=tmp_path, formats=["json", "html"])
    text = (tmp_path / "report.json").read_text()
    assert "mine:cancer" in text
    assert "mine:texts" in text
    assert "does not apply" in (tmp_path / "report.html").read_text()


def test_what_is_planned_is_what_was_sent(runs, fedaudit):
    """comm reads an own data set for its shape, and builds an own model for its size: 30 x 16 + 16 and 16 x 2 + 2
    numbers of 4 bytes to 2 clients, back with the number of records, twice."""
    numbers = 30 * 16 + 16 + 16 * 2 + 2
    words = ("--dataset", "mine:cancer", "--model", "mine:Net", "--clients", "2", "--rounds", "2", "--json")
    code, out, err = fedaudit("comm", "fedavg", *words)
    assert code == 0, err
    planned, record = json.loads(out), api.read_record(runs / "rows")
    assert planned["down"]["bytes"] == record.bytes("down") == 2 * 2 * 4 * numbers
    assert planned["up"]["bytes"] == record.bytes("up") == 2 * 2 * (4 * numbers + 8)


@pytest.mark.parametrize(
    ("name", "most", "kept"), [("rows", 2120, True), ("rows", 2119, False), ("texts", 10**6, True)]
)
def test_the_gate_holds_them_to_budgets(runs, tmp_path, fedaudit, name, most, kept):
    (tmp_path / "b.toml").write_text(f'[[budget]]\nmethod = "fedavg"\ndirection = "down"\nmax = "{most} B"\n')
    code, out, err = fedaudit("check", runs / name, "--budget", tmp_path / "b.toml")
    assert code == (0 if kept else 1), out + err


@pytest.mark.slow
def test_an_isolated_run_of_texts_has_the_same_bits(runs, tmp_path):
    record = api.run(**{**TEXTS, "isolate": True}, out=tmp_path / "run", privacy=PRIVACY)
    assert record.transcript_digest == api.read_record(runs / "texts").transcript_digest


@pytest.mark.long
def test_a_stacked_run_of_texts_is_the_serial_one(runs, tmp_path):
    record = api.run(**{**TEXTS, "engine": "stacked"}, out=tmp_path / "run", privacy=PRIVACY)
    before = api.read_record(runs / "texts")
    assert not [note for note in record.notes if "not stacked" in note]
    assert record.result.last.test_score() == pytest.approx(before.result.last.test_score(), abs=0.03)


@pytest.mark.parametrize("method", ["dfrd", "dffke", "fedaf", "fedzge", "fedktl"])
def test_a_method_of_images_says_that_rows_are_none(tmp_path, method):
    with pytest.raises(NotApplicable, match=r"it is for images, and the records are rows of 30 numbers"):
        api.run(**{**ROWS, "method": method, "set": {}, "public": 0.2}, out=tmp_path / "run")
    assert not (tmp_path / "run" / "record.json").exists()


def test_in_a_suite_that_is_a_result(tmp_path):
    from fedaudit.suite.cell import Cell, carry_out
    from fedaudit.suite.forecast import forecast

    setting = Setting.make(**{**ROWS, "method": "fedaf", "set": {}})
    cell = Cell(tmp_path / "run", setting, ["loss"], ["server"])
    [told] = forecast([cell])
    assert (told.state, told.bytes) == ("does not apply", 0)
    cell.status = "to do"
    carry_out(cell)
    assert cell.status == "refused"
    assert "images" in cell.reason
    assert api.read_record(tmp_path / "run").status == "refused"


def test_a_transfer_set_of_texts_is_sent_as_ids(tmp_path):
    """8 bytes an id: the run itself holds the declared traffic against what was sent."""
    setting = {**TEXTS, "method": "mhat", "set": {}, "public": 0.1, "rounds": 1, "model": "mine:Reader"}
    record = api.run(**setting, out=tmp_path / "run")
    sent = {row.field: row.payload for row in record.traffic}
    assert sent["Auxiliary.x_p"] == 2 * record.data.public * 10 * 8


def test_texts_are_told_apart_by_their_words():
    from types import SimpleNamespace

    from fedaudit.attacks.shared._view import numbers_of

    scene = SimpleNamespace(shape=Shape((3,), tokens=7))
    a, b, c = numbers_of(scene, torch.tensor([[1, 2, 2], [2, 1, 2], [1, 1, 2]]))
    assert a.tolist() == b.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert (a - c).norm() == pytest.approx(2**0.5)


@pytest.mark.parametrize("shape", [Shape((5,), tokens=7), Shape((5,)), Shape((1, 3, 3))])
def test_extreme_records_are_records(shape):
    """What a release path is tried with: ids of the vocabulary, and floats elsewhere; no two alike."""
    from fedaudit.epsilon.release_path import _extremes

    like = torch.arange(5) if shape.tokens else torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    found = list(_extremes(like, shape, torch.Generator().manual_seed(0)).values())
    assert {(tuple(x.shape), x.dtype) for x in found} == {(tuple(shape), like.dtype)}
    assert len({tuple(x.flatten().tolist()) for x in found}) == len(found) >= 4
    if shape.tokens:
        assert all(0 <= int(x.min()) <= int(x.max()) < 7 for x in found)


# --- code of one's own: trusted, and counted -----------------------------------------------------------------------

CODE = """
import pathlib
from torch import nn
pathlib.Path({told!r}).touch()

class Mine(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))

def data():
    import numpy
    return numpy.arange(240, dtype="f4").reshape(60, 4) / 240, numpy.arange(60) % 2
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A module with a name of its own, for modules stay imported; touches a file when it is imported."""
    name = f"own_{abs(hash(str(tmp_path))) % 10**9}"
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / f"{name}.py").write_text(CODE.format(told=str(tmp_path / "told")))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return name


@pytest.mark.parametrize(
    ("before", "after"),
    [('"model":"mlp"', '"model":"NAME:Mine"'), ('"dataset":"digits"', '"dataset":"NAME:data"'),
     ('"server_model":null', '"server_model":"NAME:Mine"')],
)  # fmt: skip
@pytest.mark.parametrize(
    "words",
    [("attack", "--attack", "loss"), ("run", "--resume", "--out"), ("run", "--method", "local", "--resume", "--out")],
)
def test_a_run_folder_that_names_own_code_imports_nothing(fedaudit, tmp_path, code, before, after, words):
    """Nor where the user names the method, and the folder's file the rest."""
    api.run(method="local", rounds=1, clients=2, model="mlp", set={"E": 1}, eval_clients=False, out=tmp_path / "run")
    for file in ("record.json", "setting.json"):
        text = json.dumps(json.loads((tmp_path / "run" / file).read_text()), separators=(",", ":"))
        assert before in text
        (tmp_path / "run" / file).write_text(text.replace(before, after.replace("NAME", code)))
    done, _, err = fedaudit(*words, tmp_path / "run")
    assert not (tmp_path / "told").exists()
    if "server" not in before:  # which a method without a server's model never asks for
        assert done == 2
        assert "--trust" in err


def test_a_published_model_that_names_own_code_imports_nothing(runs, tmp_path, code):
    """An architecture is read from the file of a model, too, long after the world was built."""
    import shutil

    import safetensors.torch

    from fedaudit.errors import RunError

    shutil.copytree(runs / "rows", tmp_path / "run")
    file = tmp_path / "run" / "models" / "global.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file), file, metadata={"arch": f"{code}:Mine"})
    with pytest.raises(RunError, match=r"it names code, .*, that the run's setting does not"):
        api.attack(tmp_path / "run", attacks=["loss"], threat="outsider")
    assert not (tmp_path / "told").exists()


def test_an_edited_model_or_data_function_is_run_again(tmp_path, code):
    from fedaudit.suite.cell import Cell, why_stale

    setting = Setting.make(**{**COMMON, "dataset": f"{code}:data", "model": f"{code}:Mine", "set": {"E": 1}})
    with pytest.raises(SettingError, match="fails on rows of 4 numbers"):  # its layer is for 64
        api.run(setting, out=tmp_path / "wrong")
    setting = setting.model_copy(update={"dataset": "digits"})
    cell = Cell(tmp_path / "run", setting, [], [])
    record = api.run(setting, out=cell.folder)
    assert why_stale(cell, record) is None
    file = tmp_path / "code" / f"{code}.py"
    file.write_text("# a comment\n" + file.read_text())
    assert why_stale(cell, record) is None
    file.write_text(file.read_text().replace("nn.ReLU()", "nn.Tanh()"))
    assert why_stale(cell, record) == f"{code} changed"


def test_other_arrays_of_the_same_function_are_other_data(tmp_path, monkeypatch):
    """A function that reads a file gives what the file holds now."""
    import mine

    from fedaudit.runtime.code_digest import code_of_setting, differences

    setting = Setting.make(**ROWS)
    before = code_of_setting(setting)
    x, y = mine.cancer()
    monkeypatch.setattr(mine, "cancer", lambda: (x + 1e-3, y))
    changed = [line for line in differences(before, code_of_setting(setting)) if "arrays" in line]
    assert len(changed) == 1
    assert changed[0].startswith("dataset (its arrays) was ")


def test_other_arrays_in_the_same_file_are_other_data(tmp_path):
    from fedaudit.suite.cell import Cell, why_stale

    file, x = tmp_path / "mine.npz", torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(0)).numpy()
    y = torch.arange(60).numpy() % 3
    np.savez(file, x=x, y=y)
    setting = Setting.make(method="constant", dataset=f"npz:{file}", model="mlp", clients=2, rounds=1, device="cpu")
    cell = Cell(tmp_path / "run", setting, [], [])
    record = api.run(setting, out=cell.folder)
    assert why_stale(cell, record) is None
    np.savez(file, x=x, y=(y + 1) % 3)
    assert why_stale(cell, record).startswith("dataset (its arrays) was ")
    file.unlink()
    assert why_stale(cell, record).endswith("is not there")


def test_a_second_run_reads_what_the_file_holds_by_then(tmp_path):
    """In one process, as in a notebook: the record tells of the arrays that were trained on."""
    g, file = np.random.default_rng(0), tmp_path / "m.npz"
    setting = Setting.make(method="constant", dataset=f"npz:{file}", model="mlp", clients=2, rounds=1, device="cpu")
    records = []
    for i in range(3):
        if i < 2:
            np.savez(file, x=g.random((60, 6), dtype=np.float32), y=np.arange(60) % 3)
        records.append(api.run(setting, out=tmp_path / str(i)))
    (one,), (other,), (same,) = ([v for k, v in r.code["values"].items() if "its arrays" in k] for r in records)
    assert one != other == same
    worlds = [world_of(setting.model_dump_json()) for _ in range(2)]
    assert worlds[0] is worlds[1]
    assert torch.equal(worlds[0].federation.dataset.x, load(f"npz:{file}").x)


@pytest.mark.parametrize("what", ["model", "dataset"])
def test_a_second_run_has_a_module_as_it_is_by_then(what, tmp_path, monkeypatch):
    """The record names the code that is loaded, so that it must be the one that ran."""
    source = """
import numpy as np
from torch import nn
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, classes)
        SEEN.append(SCALE)
    def forward(self, x):
        return self.b(self.a(x.flatten(1)))
def data():
    SEEN.append(SCALE)
    g = np.random.default_rng(0)
    return g.random((60, 64), dtype=np.float32) * SCALE, np.arange(60) % 3
"""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    own = {"model": {"model": "edited:Net"}, "dataset": {"dataset": "edited:data", "model": "mlp"}}[what]
    setting = Setting.make(**{"method": "constant", "dataset": "digits", "clients": 2, "rounds": 1, **own})
    seen = []
    for scale in (1, 7):
        (tmp_path / "edited.py").write_text(f"SEEN, SCALE = [], {scale}" + source)
        sys.modules.pop("edited", None)
        importlib.invalidate_caches()
        api.run(setting.model_copy(update={"device": "cpu"}), out=tmp_path / str(scale))
        seen.append(set(sys.modules["edited"].SEEN))
    monkeypatch.delitem(sys.modules, "edited")
    assert seen == [{1}, {7}]


# --- gradients of single rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["transformer", "mine:Reader"])
def test_row_gradients_of_embeddings_and_attention(arch):
    """Against one backward pass a row: a token that a row has not got has no gradient from it."""
    from fedaudit.privacy.persample import row_gradients, validate
    from fedaudit.training import models
    from fedaudit.training.losses import ce

    torch.manual_seed(0)
    model = models.build(arch, shape=Shape((6,), tokens=9), classes=3).train()
    x, y = torch.randint(9, (4, 6)), torch.tensor([0, 1, 2, 0])
    x[3] = 0  # nothing but padding
    validate(model)
    found = row_gradients(model, ce, (x, y))
    for i in range(4):
        model.zero_grad()
        ce(model, x[i : i + 1], y[i : i + 1]).sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name][i], p.grad, rtol=1e-4, atol=1e-6)
            assert bool(torch.isfinite(found[name][i]).all())
