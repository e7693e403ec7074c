"""Shadows: trained together as they would be one by one, and replayed as the method runs."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedaudit.attack.replay
from fedaudit import Down, Method, Record, State, Up, adam, ce, private, run, sgd, state_of
from fedaudit.attack.attack_run import candidates_of
from fedaudit.attack.replay import downloads, replay
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import last_upload
from fedaudit.errors import ThreatError
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.world import World
from fedaudit.training import models
from fedaudit.training.stacked.stack import Job, fit_together
from fedaudit.training.stacked.stackable import why_not


def proximal(f, x, y, received, mu):
    far = sum((p - received[name]).square().sum() for name, p in f.params.items())
    return cross_entropy(f.classify(f.encode(x)), y, reduction="none") + mu * far


def masked(f, x, y, held):
    return cross_entropy(f(x).masked_fill(held == 0, 0.0), y, reduction="none").mean()


def jobs(arch: str, *, count=3, n=21, loss=ce, given=None, dtype=torch.float64, **options) -> list[Job]:
    made = []
    for i in range(count):
        torch.manual_seed(i)
        model = models.build(arch, shape=(1, 8, 8), classes=4).to(dtype).eval()
        rows = torch.randn(n, 1, 8, 8, dtype=dtype), torch.randint(4, (n,))
        defaults = {"opt": sgd(0.1, momentum=0.9), "batch": 4, "steps": 10, "given": given(model) if given else None}
        made.append(Job(model, loss, rows, torch.Generator().manual_seed(i), {**defaults, **options}))
    return made


def distance(these: list[Job], those: list[Job]) -> float:
    """The largest difference of a number in a model's state."""
    pairs = zip(these, those, strict=True)
    return max(
        float((a - b).abs().max())
        for p, q in pairs
        for a, b in zip(p.model.state_dict().values(), q.model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("mlp", {}),
        ("cnn@0.25", {"opt": adam(1e-2, weight_decay=1e-3)}),
        ("cnn_bn@0.25", {}),  # batch norm's running statistics are part of what is compared
        ("convnet@0.0625", {"steps": None, "epochs": 2}),
        (
            "cnn_bn@0.25",
            {
                "loss": proximal,
                "given": lambda m: {"received": {k: p.detach().clone() for k, p in m.named_parameters()}, "mu": 0.1},
            },
        ),
        ("mlp", {"loss": masked, "separable": False, "given": lambda m: {"held": torch.tensor([1, 1, 0, 1])}}),
    ],
)
def test_a_stack_trains_as_each_would_alone(arch, options):
    """In float64 to 1e-5 over 10 steps, with batches of 4 from 21 rows, so that the last one of an epoch is larger."""
    together, alone = jobs(arch, **options), jobs(arch, **options)
    before = jobs(arch, **options)
    assert why_not(together) is None
    found, wanted = fit_together(together), [job.alone() for job in alone]
    assert distance(alone, before) > 1e-2, "nothing was trained, so nothing was compared"
    assert distance(together, alone) < 1e-5
    for a, b in zip(found, wanted, strict=True):
        assert (a.epochs, a.steps) == (b.epochs, b.steps)
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
    assert not any(job.model.training for job in together), "the mode is as before"


def test_frozen_parameters_stay_and_shared_ones_stay_shared():
    def make():
        made = jobs("mlp", count=2)
        for job in made:
            job.model.encoder.fc1.bias.requires_grad_(False)
            job.model.twin = job.model.classifier  # the same layer under two names
        return made

    together, alone, before = make(), make(), make()
    fit_together(together)
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-5
    for a, b in zip(together, before, strict=True):
        assert torch.equal(a.model.encoder.fc1.bias, b.model.encoder.fc1.bias)


def test_what_cannot_be_stacked_says_why():
    class Own(torch.optim.SGD):
        pass

    drop = jobs("mlp")
    for job in drop:
        job.model.encoder.add_module("drop", nn.Dropout(0.5))
    uneven = [job for n in (21, 22) for job in jobs("cnn_bn@0.25", count=1, n=n, batch=32, separable=False)]
    for these, reason in [
        (jobs("mlp", opt=type(sgd(0.1))(Own, {"lr": 0.1})), "Own"),
        (drop, "dropout"),
        (uneven, "looks at a whole batch"),
        ([*jobs("mlp", count=1), *jobs("mlp", count=1, loss=proximal)], "different losses"),
        ([*jobs("mlp", count=1), *jobs("mlp", count=1, given=lambda m: {"mu": 1.0})], "given differs"),
        (jobs("mlp", given=lambda m: {"teacher": m}), "a Net"),
    ]:
        assert reason in why_not(these), reason


# --- replays ---------------------------------------------------------------------------------------------------------


def scene_of(folder, k=0, threat="server"):
    opened = RunFolder(folder)
    x, y, member = candidates_of(opened.world, k)
    return Scene(opened, opened.transcript.view(threat), k, x, y), member


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shadows") / "run"
    setting = {"set": {"E": 2, "B": 8, "eta": 0.1}, "aux": 0.6, "clients": 3, "rounds": 2, "partition": "iid"}
    run(method="fedavg", model="cnn_bn@0.25", eval_clients=False, out=folder, **setting)
    return folder


@pytest.mark.parametrize(
    ("method", "model", "begins", "note"),
    [
        ("fedavg", "cnn_bn@0.25", 2, None),
        pytest.param("fedzkt", "cnn_bn@0.25", 1, None, marks=pytest.mark.long),
        ("perfedavg", "mlp", 2, "FirstOrder is not known"),
        pytest.param("heterofl", "cnn@0.25", 2, None, marks=pytest.mark.long),
        ("dffke", "mlp", 1, None),
    ],
)
def test_a_replay_with_own_records_and_seed_is_the_upload(method, model, begins, note, tiny, tmp_path, monkeypatch):
    """Bit for bit: the shadow differs from the target by its records and its seed, and by nothing else.

    fedavg begins anew with each download; fedzkt with the model it got at the end of the round before; dffke goes on
    from its own model and memory, so it is replayed from the first round; heterofl hangs hooks into its model.

    Two at once are equal up to float32 rounding, except dffke's: Adam makes a whole step of a gradient that is rounding
    and nothing else.
    """
    run(tiny(method, model=model, eval_clients=False), out=tmp_path / "a")
    scene, _ = scene_of(tmp_path / "a", 1)
    entry, field, _ = last_upload(scene)
    world = scene._world
    monkeypatch.setattr(fedaudit.attack.replay, "seed_of", lambda *_: world.setting.seed)
    pool = world.members(1)
    pick = torch.arange(len(pool[1]))
    messages = downloads(scene.view, entry, world, scene.auxiliary)
    assert entry.round == 2
    assert messages[0].round == begins
    (reply,) = replay(world, messages, pool, [pick], together=1)
    for name, tensor in entry[field].items():
        assert torch.equal(getattr(reply, field)[name], tensor), name
    notes = set()
    two = list(replay(world, messages, pool, [pick, pick], together=2, notes=notes))
    assert (note in str(notes)) if note else not notes
    for reply in two if method != "dffke" else ():
        for name, tensor in entry[field].items():
            torch.testing.assert_close(getattr(reply, field)[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.long
def test_shadows_together_are_the_shadows_one_by_one(plain):
    scene, _ = scene_of(plain)
    entry, field, _ = last_upload(scene)
    generator = torch.Generator().manual_seed(0)
    picks = [torch.randperm(len(scene.pool[1]), generator=generator)[:30] for _ in range(5)]
    alone = list(scene.replay(entry, picks, together=1))
    for together in (2, 5):
        for a, b in zip(scene.replay(entry, picks, together=together), alone, strict=True):
            for name, tensor in getattr(b, field).items():
                torch.testing.assert_close(getattr(a, field)[name], tensor, atol=1e-4, rtol=1e-3)
    weights = [getattr(reply, field)["classifier.weight"] for reply in alone]
    assert all((a - b).norm() > 1e-3 for i, a in enumerate(weights) for b in weights[:i]), "other records, other model"


def test_where_a_stack_cannot_be_they_are_trained_one_by_one(plain, monkeypatch):
    """A loss that looks at a value cannot be mapped over models: found out by trying, and nothing is drawn twice."""

    def looks(f, x, y):
        value = ce(f, x, y)
        return value * 2 if float(value.detach().sum()) > 1e9 else value

    scene, _ = scene_of(plain)
    entry, field, _ = last_upload(scene)
    module = sys.modules[type(scene._world.method).__module__]
    monkeypatch.setattr(module, "ce", looks)
    picks, notes = [torch.arange(20), torch.arange(20, 40)], set()
    messages = scene.replayable(entry)
    alone = list(replay(scene._world, messages, scene.pool, picks, together=1))
    tried = list(replay(scene._world, messages, scene.pool, picks, together=2, notes=notes))
    (note,) = notes
    assert note.startswith("shadows were trained one after another:")
    assert "vmap" in note
    for a, b in zip(alone, tried, strict=True):
        assert all(torch.equal(getattr(a, field)[name], t) for name, t in getattr(b, field).items())


def test_a_replay_leaves_the_global_generators_alone(plain):
    scene, _ = scene_of(plain)
    before = torch.get_rng_state()
    list(scene.replay(last_upload(scene)[0], [torch.arange(20)] * 2))
    assert torch.equal(before, torch.get_rng_state())


def test_shadows_are_kept_by_content(plain, monkeypatch):
    scene, _ = scene_of(plain)
    entry, field, _ = last_upload(scene)
    folder = plain / "shadows"
    shutil.rmtree(folder, ignore_errors=True)
    picks = [torch.arange(30), torch.arange(30, 60)]
    first, _ = scene.shadows(entry, field, picks)
    (file,) = folder.iterdir()
    real = fedaudit.attack.replay.replay
    monkeypatch.setattr(fedaudit.attack.replay, "replay", lambda *_, **__: pytest.fail("they were kept"))
    again, _ = scene.shadows(entry, field, picks)
    assert torch.equal(first, again)
    monkeypatch.setattr(fedaudit.attack.replay, "replay", real)
    scene.shadows(entry, field, [picks[0], picks[1].flip(0)])
    assert len(list(folder.iterdir())) == 2, "the same records in another order are other shadows"
    file.write_bytes(file.read_bytes()[:-8])
    assert torch.equal(scene.shadows(entry, field, picks)[0], first), "a damaged file is made again"


def test_shadows_need_nothing_of_the_truth(plain, monkeypatch):
    scene, _ = scene_of(plain)
    entry, _, _ = last_upload(scene)
    for name in ("members", "nonmembers", "validation", "other_rows", "candidates", "count"):
        monkeypatch.setattr(World, name, lambda *_, name=name: pytest.fail(f"a shadow asked for {name}"))
    assert len(list(scene.replay(entry, [torch.arange(20)] * 2))) == 2


def test_a_function_that_fails_is_a_reason_and_no_crash(plain, monkeypatch):
    scene, _ = scene_of(plain)
    entry, _, _ = last_upload(scene)
    method = type(scene._world.method)
    monkeypatch.setattr(method, "client_update", lambda self, client, msg: client.memory["gone"])
    monkeypatch.setattr(fedaudit.attack.replay, "starts_anew", lambda *of: True)  # whatever other tests found out
    with pytest.raises(ThreatError, match=r"client_update of round 2 cannot be replayed.*KeyError.*gone"):
        list(scene.replay(entry, [torch.arange(20)] * 3))


class Teacher(Down):
    w: State


class Taught(Up):
    w: State = private("weights", via="model", unit="client")


class Nothing(Record):
    w: State


class GoesOn(Method):
    """Sends a whole model, which the client may look at; it goes on training its own."""

    def init(self, server):
        return Nothing(state_of(server.model()))

    def round(self, s, server, cohort):
        cohort.ask(self.train, Teacher(s.w))
        return s

    def train(self, client, msg):
        client.fit(ce, epochs=1, batch=16, opt=sgd(0.1))
        return Taught(state_of(client.model))


def test_a_model_that_is_sent_and_not_taken_is_no_beginning(tmp_path):
    run(method=f"{__name__}:GoesOn", model="mlp", clients=2, rounds=3, eval_clients=False, out=tmp_path / "a")
    scene, _ = scene_of(tmp_path / "a")
    entry, _, _ = last_upload(scene)
    assert [message.round for message in scene.replayable(entry)] == [1, 2, 3]


def test_messages_that_were_not_kept_are_a_reason(tiny, tmp_path):
    run(tiny("fedzkt", keep_weights=1, model="mlp", eval_clients=False), out=tmp_path / "a")
    scene, _ = scene_of(tmp_path / "a")
    with pytest.raises(ThreatError, match="keep_weights"):
        scene.replayable(last_upload(scene)[0])


@pytest.mark.parametrize(("results", "anew"), [(("a", "a"), True), (("a", "b"), False), (("a", None), False)])
def test_whether_a_client_starts_anew_is_tried_once(results, anew, monkeypatch):
    """Two models before the message, and equal results after it. A client that fails needs what it knew before."""
    tried, here = [], fedaudit.attack.replay

    def perform(world, shadows, *rest):
        tried.append(shadows)
        if results[len(tried) - 1] is None:
            raise ThreatError("it needs what it knew")
        return [SimpleNamespace(result=results[len(tried) - 1])]

    monkeypatch.setattr(here, "_tried", {})
    monkeypatch.setattr(here, "signature", lambda *of: "this message")
    monkeypatch.setattr(here, "_shadow", lambda world, k, i, rows, fresh: fresh)
    monkeypatch.setattr(here, "_perform", perform)
    rows = (torch.zeros(3, 1), torch.zeros(3))
    for _ in range(2):
        assert here.starts_anew(None, SimpleNamespace(client=0), rows) is anew
    assert tried == [[0], [1]]
