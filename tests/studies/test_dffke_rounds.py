"""The script that runs the code of DFFKE's author for many rounds: what it changes there, and what it measures."""

from __future__ import annotations

import contextlib
import json
import os
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import of_study, script_in_place
from torch import nn

from fedaudit import Setting
from fedaudit.data.records import to_uint8
from fedaudit.runtime.world import World
from fedaudit.suite.suite_file import read_suite

UTILS = '''
def run_one_epoch(net, loader, optimizer=None, device="cpu"):
    seen.append((net, optimizer is not None))
    devices.add(device)
    return 0.0, net.accuracy

def local_align_clients(clients, optimizers, train_loaders, passing_acc, test_loader=None, device="cpu"):
    assert test_loader is None, "a test in each epoch takes most of the time"
    for net, loader in zip(clients, train_loaders):
        run_one_epoch(net, loader, None, device)
        while run_one_epoch(net, loader, optimizers[0], device)[1] <= 100 * passing_acc:
            pass
'''  # fmt: skip


@pytest.fixture(scope="module")
def rounds_script():
    with script_in_place("dffke_rounds") as module:
        yield module


class Client(nn.Module):
    def __init__(self, accuracy):
        super().__init__()
        self.accuracy = accuracy


@pytest.fixture
def played(rounds_script):
    """Return the script's rounds over a stand-in for the code, whose every answer is known, and what it called."""
    utils = types.ModuleType("utils")
    exec(UTILS, vars(utils))
    utils.seen, utils.devices = seen, devices = [], set()
    docked = [np.float32([[1, 2], [3, 2]]), np.float32([[1, 2], [3, 2]])]
    answers = [([[0.9, 0.1], [0.2, 0.8]], [0, 1]), ([[0.3, 0.7], [0.6, 0.4]], [0, 0])]
    loaders = [types.SimpleNamespace(dataset=types.SimpleNamespace(emb=e)) for e in docked]
    sets = [types.SimpleNamespace(logit=np.array(p), target=np.array(y)) for p, y in answers]
    theirs = types.SimpleNamespace(
        local_to_generator=lambda *_, **__: loaders, generator_to_local=lambda *_, **__: sets
    )
    code = types.SimpleNamespace(utils=utils, theirs=theirs)
    setting, method = types.SimpleNamespace(rounds=3), types.SimpleNamespace(E_local=4)
    yield rounds_script.Rounds(code, setting, method, test=[], device="cuda"), seen
    assert devices <= {"cuda"}, "networks and batches on two devices"


def test_local_training_ends_after_the_row_s_epochs(played):
    """One client never passes and has four epochs, the other passes at once."""
    rounds, seen = played
    slow, quick = Client(50.0), Client(99.0)
    rounds.align([slow, quick], ["Adam"], train_loaders=[0, 0], passing_acc=0.98, test_loader="all", device="cuda")
    trained = [net for net, training in seen if training]
    assert (trained.count(slow), trained.count(quick)) == (4, 1)
    seen.clear()
    rounds.align([slow, quick], ["Adam"], train_loaders=[0, 0], passing_acc=0.98, device="cuda")
    assert sum(training for _, training in seen) == 5, "epochs are counted anew in each round"
    assert rounds.epochs == 2.5, "their mean over clients"
    rounds.docked()
    rounds.exchange(clients=[slow])
    assert rounds.rows[-1].epochs == 2.5


def test_rounds_are_tested_every_second_time_before_and_after(played):
    """Accuracies 40 before and 60 after an exchange; the last round is tested, whatever its number."""
    rounds, _ = played
    client = Client(40.0)
    kept = []
    rounds.keep = lambda rows: kept.append(len(rows))
    for _ in range(3):
        client.accuracy = 40.0
        rounds.align([client], ["Adam"], train_loaders=[0], passing_acc=0.98, device="cuda")
        rounds.docked()
        client.accuracy = 60.0
        rounds.exchange(clients=[client])
    assert [(row.round, row.before, row.after) for row in rounds.rows] == [
        (1, None, None),
        (2, 40.0, 60.0),
        (3, 40.0, 60.0),
    ]
    assert kept == [1, 2, 3]


def test_accuracy_is_the_mean_over_clients_as_they_are_deployed(played):
    """0, 0 and 90: the median is 0. A test is no training: the networks' batch norms go by their own statistics."""
    rounds, seen = played
    clients = [Client(0.0), Client(0.0), Client(90.0)]
    assert rounds.tested(clients, 2) == 30.0
    assert [(net, training) for net, training in seen] == [(client, False) for client in clients]
    assert not any(client.training for client in clients)


def test_minutes_are_since_the_run_began(played, monkeypatch):
    rounds, _ = played
    monkeypatch.setattr(time, "perf_counter", lambda: rounds.begun + 90)
    rounds.docked()
    rounds.exchange(clients=[Client(1.0)])
    assert rounds.rows[0].minutes == 1.5


@pytest.fixture
def given(rounds_script, monkeypatch):
    """Return what the code's main function gets on digits, of two clients: its arguments, data and functions."""
    found = types.SimpleNamespace(transforms={"train_transform": "moved", "test_transform": "as it is"})

    @contextlib.contextmanager
    def mended(**named):
        found.named = named
        yield

    def records(images, y, transform):
        return types.SimpleNamespace(images=images, y=y, transform=transform)

    code = types.SimpleNamespace(
        mended=mended,
        args=lambda **values: values,
        main=types.SimpleNamespace(
            data_free_federated_knowledge_exchange=lambda args, data: vars(found).update(args=args, data=data)
        ),
        generators=types.SimpleNamespace(LatentGenerator=lambda *words: words),
        transforms=types.SimpleNamespace(get_cifar10_transform=lambda: found.transforms),
        dataset=types.SimpleNamespace(CustomDataset=records),
    )
    monkeypatch.setattr(rounds_script, "clients_of", lambda code, world, count: [nn.Linear(2, 2) for k in range(count)])
    monkeypatch.setattr(
        rounds_script, "DataLoader", lambda of, batch_size, shuffle: types.SimpleNamespace(
            of=of, batch=batch_size, shuffle=shuffle)
    )  # fmt: skip
    values = {"w_Dec": 16, "T_Dec": 7, "T_FKE": 3, "B": 20, "tau": 0.9, "crop": 1}
    found.setting = Setting.make(
        method="dffke", preset="authors", dataset="digits", aux=0.5, clients=2, model="cnn_bn", rounds=5, set=values
    )
    rounds_script.play(code, found.setting, lambda rows: None, "meta")
    return found


def test_the_code_gets_the_row_s_values(given):
    assert given.args == {
        "n_clients": 2, "batch_size": 20, "L2G_epoch": 7, "G2L_epoch": 3, "client_lr": 0.001,
        "local_align_acc": 0.9, "knowledge_exchange_rounds": 5,
        "device": "meta",
    }  # fmt: skip
    assert given.named["get_generator"](model_name="any", nz=64, n_cls=10) == (64, 16, 32, 3, 10)
    assert [client.weight.device.type for client in given.named["init_client_nets"]("words")] == ["meta", "meta"]
    assert given.named["evaluate"]("words") == [0.0], "its own early end"


def test_the_code_gets_each_client_s_records(given):
    """As bytes, rows of pixels by columns by channels; moved in training, and as they are in docking and review."""
    world = World(given.setting)
    assert (given.data.n_class, given.data.client_class_cnt.shape) == (10, (2, 10))
    for k in range(2):
        x, y = world.members(k)
        for loader, how in (
            (given.data.client_train_loaders[k], "moved"),
            (given.data.client_fixed_train_loaders[k], "as it is"),
        ):
            assert (loader.of.transform, loader.batch, loader.shuffle) == (how, 20, True)
            assert np.array_equal(loader.of.y, y.numpy())
            assert loader.of.images.dtype == np.uint8
            assert np.array_equal(loader.of.images, to_uint8(x).permute(0, 2, 3, 1).numpy())
            assert loader.of.images.shape[1:] == (8, 8, 1)
            assert not np.array_equal(loader.of.images, loader.of.images.transpose(0, 2, 1, 3))


def test_what_is_measured_of_embeddings_and_answers(played):
    """Rows (1, 2) and (3, 2), twice: mean square (1 + 4 + 9 + 4) / 4 = 4.5; variance 1 of 9. Three of four answers are
    right, their largest probabilities 0.9, 0.8, 0.7 and 0.6."""
    rounds, _ = played
    rounds.docked()
    rounds.exchange(clients=[Client(1.0)])
    (row,) = rounds.rows
    assert row.length == pytest.approx(4.5**0.5)
    assert row.apart == pytest.approx(1 / 9)
    assert (row.said, row.sure) == (0.75, pytest.approx(0.75))


@pytest.mark.parametrize(
    ("name", "words", "epochs"),
    [
        ("dffke_cifar_small", [], 10),
        ("dffke_cifar_small_resnet18", ["--rounds", "3", "--device", "cuda"], 1000),
        ("dffke_cifar_small", ["--epochs", "1000", "--rounds", "3", "--device", "cuda"], 1000),
    ],
)
def test_a_record_says_what_the_code_was_given(rounds_script, monkeypatch, tmp_path, name, words, epochs):
    """The row's values, with another limit of local epochs where one is asked for; the code gets the same."""
    given, settings = [], []
    code = types.SimpleNamespace(imported=contextlib.nullcontext)

    def play(code, setting, keep, device):
        settings.append((setting, device))
        given.append(rounds_script.method_of(setting))
        keep([rounds_script.Row(1, 1.0, 1.0)])

    monkeypatch.setattr(rounds_script, "Code", lambda checkout: code)
    monkeypatch.setattr(rounds_script, "commit_of", lambda checkout: "7030348d")
    monkeypatch.setattr(rounds_script, "play", play)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    kept = tmp_path / "rounds.json"
    suite = str(of_study(f"{name}.toml"))
    rounds_script.main(["--checkout", "x", "--suite", suite, "--seed", "1", "--json", str(kept), *words])
    (setting, device), found = settings[0], json.loads(kept.read_text())
    assert setting.rounds == (3 if words else 40)
    assert setting.device == "cpu", "records and first weights come from there, on any machine"
    assert device == found["device"] == ("cuda" if words else "cpu")
    assert found["values"] == {
        "E_local": epochs, "tau": 0.98, "eta": 0.001, "B": 100, "T_Dec": 10, "w_Dec": 16, "T_FKE": 2,
    }  # fmt: skip
    assert {name: getattr(given[0], name) for name in found["values"]} == found["values"]
    assert found["seed"] == 1


def test_where_the_code_would_have_ended(rounds_script):
    """More than 8 points below the best test so far; rounds that were not tested do not count."""

    def rows(*accuracies):
        return [rounds_script.Row(t, 1.0, 1.0, after=a) for t, a in enumerate(accuracies, 1)]

    assert rounds_script.ended(rows(20.0, 30.0, 22.0, 21.9, 50.0)) == 4
    assert rounds_script.ended(rows(None, 30.0, None, 22.0)) is None
    assert rounds_script.ended([]) is None


def test_the_extra_student_has_a_gradient_and_no_effect(rounds_script):
    student = rounds_script.PureStudent(5, 3)
    e, y = student(torch.ones(4, 3, 8, 8), use_docking=True)
    assert (e.shape, y.shape) == ((4, 5), (4, 3))
    (e.sum() + y.sum()).backward()
    assert all(p.grad is not None for p in student.parameters())


@pytest.mark.slow
@pytest.mark.skipif(
    "FEDAUDIT_DFFKE" not in os.environ, reason="no checkout: set FEDAUDIT_DFFKE to one of HaowenGuan/DFFKE"
)
def test_the_code_begins_as_fedaudit_does(rounds_script, monkeypatch):
    """On standardised images the code's clients say what fedaudit's say on their own, and their docking is one draw."""
    first = read_suite(of_study("dffke_cifar_small.toml")).cells()[0]
    values = {**first.model_dump(), "dataset": "digits", "aux": 0.5, "partition": "iid", "clients": 2}
    world = World(Setting.make(**values))
    code = rounds_script.Code(Path(os.environ["FEDAUDIT_DFFKE"]))
    with code.imported():
        torch.set_default_dtype(torch.float32)
        made = rounds_script.clients_of(code, world, 2)
        x = world.members(0)[0][:5]
        for k in range(2):
            ours = world.fresh_model(k).eval()
            h, y = made[k].eval()(x)
            torch.testing.assert_close(y, ours(x))
            torch.testing.assert_close(h, ours.encode(x))
        assert torch.equal(made[0].docking.weight, made[1].docking.weight)
