"""Shadows: trained together as they would be one by one, and replayed as the method runs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from scenes import Entry, View
from torch import nn
from torch.nn.functional import cross_entropy

import fedaudit.attack.replay
from fedaudit import Down, Method, Record, State, Up, adam, ce, private, run, sgd, state_of
from fedaudit.attack.attack_run import candidates_of
from fedaudit.attack.replay import brings_model, downloads, replay, signature
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import last_upload
from fedaudit.errors import ThreatError
from fedaudit.rng import seed_of
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.world import World
from fedaudit.setting import Setting
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


# --- replays that are made up ----------------------------------------------------------------------------------------

HERE = fedaudit.attack.replay
WHOLE = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}  # the state of the architecture "2"


class Message(Entry):
    """A message to client 1 whose fields may be lost one by one."""

    def __init__(self, t, ask=0, lost=(), client=1, direction="down", fn="train", digest="d", **options):
        super().__init__(direction, client, t, ask, **options)
        self.lost, self.fn, self.digest = lost, fn, digest

    def kept(self, name):
        return name not in self.lost

    def record(self):
        return f"record of {self.round}"


def made_world(**facts):
    base = {
        "archs": ["1", "2", "3"], "device": torch.device("cpu"), "compression": None, "method": "method",
        "build": lambda arch: nn.Linear(int(arch), 1), "setting": Setting.make(method="fedavg", clients=3),
    }  # fmt: skip
    return SimpleNamespace(**(base | facts))


def sent(lost=(), later=()):
    return [
        Message(1, w=("weights", {"weight": torch.zeros(2, 2)}), n=("count", 3)),
        Message(2, lost=lost, n=("count", 3), w=("weights", WHOLE)),
        Message(3, role="relay", w=("weights", WHOLE)),
        Message(3, 1, lost=later, w=("weights", {"weight": torch.zeros(1, 2)})),
        Message(3, 2, w=("weights", WHOLE)),
        Message(4, w=("weights", WHOLE)),
        Message(3, client=0, w=("weights", WHOLE)),
        Message(3, direction="up", w=("weights", WHOLE)),
    ]


UPLOAD = SimpleNamespace(client=1, round=3, ask=1)


@pytest.mark.parametrize(("anew", "begins"), [(True, 1), (False, 0)])
def test_a_replay_begins_at_the_last_whole_model_that_is_taken(anew, begins, monkeypatch):
    messages, asked = sent(), []
    monkeypatch.setattr(HERE, "starts_anew", lambda *of: asked.append(of) or anew)
    world = made_world()
    before = torch.get_rng_state()
    assert downloads(View(messages), UPLOAD, world, "rows") == messages[begins:4]
    assert asked == [(world, messages[1], "rows")]
    assert torch.equal(before, torch.get_rng_state())
    asked.clear()
    first = SimpleNamespace(client=1, round=2, ask=0)
    assert downloads(View(messages[1:]), first, world, "rows") == messages[1:2]
    assert asked == [], "there is no earlier message to begin at"
    without = [messages[0], *messages[2:4]]
    assert downloads(View(without), UPLOAD, world, "rows") == without, "no message brings a model"
    assert asked == []


@pytest.mark.parametrize(("lost", "later", "round"), [("w", "", 2), ("n", "", 2), ("wn", "", 2), ("", "w", 2)])
def test_a_replay_needs_all_that_was_sent_from_its_beginning(lost, later, round, monkeypatch):
    monkeypatch.setattr(HERE, "starts_anew", lambda *of: not lost or pytest.fail("it cannot be tried"))
    with pytest.raises(ThreatError, match=f"a replay of client 1 begins in round {round}, whose model states"):
        downloads(View(sent(lost, later)), UPLOAD, made_world(), "rows")


def test_a_message_brings_a_model_if_one_field_is_its_whole_state():
    model = nn.Linear(2, 1)
    bare = ("weights", {"weight": torch.zeros(1, 2)})
    assert brings_model(Message(1, a=("count", 3), b=("weights", WHOLE), c=bare), model)
    assert not brings_model(Message(1, a=("count", 3), b=bare), model)
    assert not brings_model(Message(1, a=("weights", {**WHOLE, "bias": torch.zeros(2)})), model)
    assert not brings_model(Message(1, role="relay", a=("weights", WHOLE)), model)
    assert not brings_model(Message(1), model)


def test_a_beginning_is_tried_on_eight_records_and_two_fresh_models(monkeypatch):
    asked, named = [], []
    monkeypatch.setattr(HERE, "_tried", {})
    monkeypatch.setattr(HERE, "signature", lambda *of: named.append(of) or "key")
    monkeypatch.setattr(HERE, "_shadow", lambda world, k, seed, rows, fresh: (world, k, seed, rows, fresh))
    monkeypatch.setattr(HERE, "_perform", lambda *of: asked.append(of) or [SimpleNamespace(result=1)])
    entry, rows = SimpleNamespace(client=2), (torch.arange(9), torch.arange(9) + 10)
    assert HERE.starts_anew("world", entry, rows) is True
    ((world, entries, few, picks),) = named
    assert (world, entries, picks) == ("world", [entry], [])
    assert [part.tolist() for part in few] == [list(range(8)), list(range(10, 18))]
    for fresh, (world, [shadow], message, states, compile, notes) in enumerate(asked):
        assert (world, message, states, compile, notes) == ("world", entry, [None], False, set())
        assert (shadow[:3], shadow[4]) == (("world", 2, 0), fresh)
        assert [part.tolist() for part in shadow[3]] == [part.tolist() for part in few]
    assert len(asked) == 2


@dataclasses.dataclass
class Place:
    k: int
    rows: object
    seed: int = 99
    fresh_model: object = None


def test_a_shadow_has_another_seed_other_records_and_a_fresh_model():
    world = made_world(site=Place, fresh_model=lambda k, seed: ("fresh", k, seed))
    site = HERE._shadow(world, 1, 7, "rows")
    assert (site.k, site.rows, site.seed, site.fresh_model()) == (1, "rows", 7, ("fresh", 1, 7))
    weights = [HERE._shadow(world, 1, 7, "rows", fresh=i).fresh_model().weight for i in (0, 1, 0)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert weights[0].shape == (1, 2)


def test_turns_that_went_wrong_and_reasons_to_go_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(HERE, "take_turns", lambda turns, compile: taken.append((list(turns), compile)))
    turns = [SimpleNamespace(error=None, alone=reasons, refuse=None) for reasons in (["b", "a"], [], ["c"])]
    notes = {"before"}
    HERE._take_turns(turns, True, notes)
    assert taken == [(turns, True)]
    assert notes == {"before", *(f"shadows were trained one after another: {reason}" for reason in "abc")}
    assert all(turn.refuse is None for turn in turns)
    HERE._take_turns(turns[1:2], False, notes)
    assert taken[1] == (turns[1:2], False)
    assert turns[1].refuse == "one shadow at a time was asked for"
    turns[2].error = ValueError("third")
    with pytest.raises(ValueError, match="third"):
        HERE._take_turns(turns, False, notes)


@pytest.mark.parametrize(("together", "groups"), [(2, [[0, 1], [2]]), (3, [[0, 1, 2]]), (64, [[0, 1, 2]]), (1, None)])
def test_shadows_get_all_messages_a_group_at_a_time(together, groups, monkeypatch):
    """A state goes from message to message; the reply to the last one is what counts."""
    performed = []

    def perform(world, sites, entry, states, compile, notes):
        performed.append(([site[2] for site in sites], entry.round, list(states), compile, notes))
        return [SimpleNamespace(result=(f"{entry.round} after {state}", f"{site[3]}, {entry.round}"))
                for site, state in zip(sites, states, strict=True)]  # fmt: skip

    monkeypatch.setattr(
        HERE, "_shadow", lambda world, k, seed, rows: (world, k, seed, rows[0].tolist() + rows[1].tolist())
    )
    monkeypatch.setattr(HERE, "_perform", perform)
    monkeypatch.setattr(HERE, "decode", lambda reply, kind, device: (reply, kind, device.type))
    pool, picks = (torch.arange(4), torch.arange(4) * 10), [torch.tensor([i + 1, 0]) for i in range(3)]
    notes = set()
    messages = [Message(5), Message(6)]
    found = list(replay(made_world(), messages, pool, picks, together=together, compile=True, notes=notes))
    assert found == [(f"[{i}, 0, {i}0, 0], 6", Up, "cpu") for i in (1, 2, 3)]
    expected = []
    for group in groups or [[0], [1], [2]]:
        seeds = [seed_of("replay", 1, i) for i in group]
        expected += [(seeds, 5, [None] * len(group), True), (seeds, 6, ["5 after None"] * len(group), True)]
    assert [row[:4] for row in performed] == expected
    assert all(row[4] is notes for row in performed)


def test_shadows_are_64_at_a_time_and_not_compiled_unless_asked(monkeypatch):
    performed = []
    monkeypatch.setattr(HERE, "_shadow", lambda *of: of)
    monkeypatch.setattr(HERE, "_perform", lambda world, sites, entry, states, compile, notes: performed.append(
        (len(sites), compile, notes)) or [SimpleNamespace(result=(b"", b""))] * len(sites))  # fmt: skip
    monkeypatch.setattr(HERE, "decode", lambda *of, **more: None)
    pool = torch.arange(2), torch.arange(2)
    assert len(list(replay(made_world(), [Message(1)], pool, [torch.arange(1)] * 65))) == 65
    assert performed == [(64, False, set()), (1, False, set())]


def test_clients_that_started_elsewhere_have_no_shadows():
    world = made_world(setting=SimpleNamespace(start="another run"))
    with pytest.raises(ThreatError, match="Attack a run without start"):
        next(replay(world, [Message(1)], (torch.arange(2),) * 2, [torch.arange(1)]))


def test_a_message_goes_to_each_shadow_with_generators_of_its_own(monkeypatch):
    class Seeds:
        def __init__(self, device):
            self.device = device

        def seed(self, *parts):
            self.parts = parts

    taken = []
    monkeypatch.setattr(HERE, "encode", lambda record: f"bytes of {record}")
    monkeypatch.setattr(HERE, "Globals", Seeds)
    monkeypatch.setattr(HERE, "_turn", lambda *of: of)
    monkeypatch.setattr(HERE, "_take_turns", lambda *of: taken.append(of) or torch.rand(3))
    world, entry, sites = made_world(), Message(4, 2), [SimpleNamespace(seed=8), SimpleNamespace(seed=9)]
    before = torch.get_rng_state()
    turns = HERE._perform(world, sites, entry, [None, b"state"], True, {"note"})
    assert torch.equal(before, torch.get_rng_state()), "the caller's generators stay as they are"
    assert taken == [(turns, True, {"note"})]
    for turn, site, state in zip(turns, sites, (None, b"state"), strict=True):
        assert turn[:5] == (world, site, entry, "bytes of record of 4", state)
        assert turn[5].parts == (site.seed, "client 1", 4, 2)
        assert turn[5].device == world.device
    for error, kind, words in (
        (ThreatError("known"), ThreatError, "^known$"),
        (KeyError("gone"), ThreatError, r"client 1's train of round 4 cannot be replayed .*: KeyError: 'gone'"),
    ):
        monkeypatch.setattr(HERE, "_take_turns", lambda *of, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(kind, match=words):
            HERE._perform(world, sites, entry, [None, None], False, set())


@pytest.mark.parametrize("compression", [None, "squeeze"])
def test_a_turn_does_what_a_task_does(compression, monkeypatch):
    """The function that the message is for, then protection, then the compression that an attacker would see."""
    calls = []

    class Shadow:
        def settle(self):
            return "kept"

        def release(self, reply):
            return f"released {reply}", "protection"

    def opened(site, t, ask, meter, state, message):
        calls.append((site, t, ask, meter.party, meter.t, state, message))
        return shadow

    shadow = Shadow()
    monkeypatch.setattr(HERE, "Meter", lambda party, t, device: SimpleNamespace(party=party, t=t))
    monkeypatch.setattr(HERE, "open_client", opened)
    monkeypatch.setattr(HERE, "find_function", lambda method, fn: lambda client, msg: f"{method}.{fn}({msg})")
    monkeypatch.setattr(HERE, "state_after", lambda client, kept: f"state with {kept}")
    monkeypatch.setattr(HERE, "encode", lambda what, *more: f"[{what}{''.join(map(str, more))}]")
    monkeypatch.setattr(
        HERE,
        "decode",
        lambda what, kind, device, answered=None: f"{kind.__name__} {what}" + (answered() if answered else ""),
    )
    world = made_world(compression=compression)
    turn = HERE._turn(world, "site", Message(4, 2, fn="learn"), "m", "state", "generators")
    assert turn.generators == "generators"
    state, reply = turn.work()
    assert calls == [("site", 4, 2, "replay", 4, "state", "Down m")]
    assert state == "[state with kept]"
    plain = "released method.learn(Down m)"
    assert reply == (f"[{plain}]" if compression is None else f"[Up [{plain}squeezeDown m]Down m]")


def test_a_name_tells_every_replay_from_every_other(monkeypatch):
    """But for the seed, and for how it is computed, which change nothing."""
    monkeypatch.setattr(HERE, "_code", lambda world: [world.method])
    pool, picks = (torch.arange(4.0), torch.arange(4)), [torch.tensor([0, 1])]

    def name(world=None, messages=None, pool=pool, picks=picks, *more):
        return signature(world or made_world(), messages or [Message(1), Message(2)], pool, picks, *more)

    def setting(**values):
        return made_world(setting=Setting.make(method="fedavg", clients=3, **values))

    first = name()
    assert len(first) == 32
    same = [name(), name(setting(seed=9)), name(setting(workers=3)), name(pool=(pool[0].clone(), pool[1].clone()))]
    assert set(same) == {first}
    training = [name(setting(set=dict(of))) for of in ((("E", 2), ("B", 8)), (("B", 8), ("E", 2)))]
    assert training[0] == training[1] != first, "the order of keys says nothing"
    others = [
        name(setting(rounds=7)), name(made_world(archs=["1", "2"])), name(made_world(method="another")),
        name(messages=[Message(1)]), name(messages=[Message(1), Message(3)]),
        name(messages=[Message(1), Message(2, 1)]),
        name(messages=[Message(1), Message(2, fn="f")]), name(messages=[Message(1), Message(2, digest="e")]),
        name(messages=[Message(1, client=0), Message(2)]), name(pool=(pool[0] + 1, pool[1])),
        name(pool=(pool[0], pool[1] + 1)), name(pool=(pool[0][None], pool[1])), name(picks=[]),
        name(picks=[torch.tensor([1, 0])]), name(None, None, pool, picks, "w"), name(None, None, pool, picks, "w", 2),
        name(pool=(pool[0].int(), pool[1])), name(pool=(pool[0].view(torch.int32), pool[1])),
    ]  # fmt: skip
    assert len({first, *others}) == len(others) + 1


def test_answers_of_shadows_are_made_once_and_kept_with_their_notes(monkeypatch, tmp_path):
    """Two shadows, whose models give x and 3 x + 1; each is told of."""
    states = [{"weight": torch.tensor([[w]]), "bias": torch.tensor([b])} for w, b in ((1.0, 0.0), (3.0, 1.0))]
    world, told, asked = made_world(archs=["2", "1"]), [], []
    pool, picks = (torch.tensor([[2.0], [4.0], [5.0]]), torch.zeros(3).long()), [torch.arange(2)] * 2

    def replayed(*of, notes, **more):
        asked.append((*of, more))
        notes.update({"b", "a"})
        return (SimpleNamespace(w=state) for state in states)

    def answered(notes, together=5):
        return HERE.answers(
            world, [message], "w", pool, picks, folder=tmp_path, together=together, compile=True, notes=notes,
            tell=lambda *of: told.append(of),
        )  # fmt: skip

    message = Message(1)
    monkeypatch.setattr(HERE, "signature", lambda *of: "-".join(map(str, of[4:])))
    monkeypatch.setattr(HERE, "replay", replayed)
    before, notes = torch.get_rng_state(), {"mine"}
    table = answered(notes)
    assert torch.equal(before, torch.get_rng_state())
    assert table.tolist() == [[[2], [4], [5]], [[7], [13], [16]]]
    assert notes == {"mine", "a", "b"}
    assert asked == [(world, [message], pool, picks, {"together": 5, "compile": True})]
    assert told == [(0, 2, "2 of 2 shadows at a time"), (1, 2, "shadow 1 of 2"), (2, 2, "shadow 2 of 2")]
    assert [path.name for path in tmp_path.iterdir()] == ["w-5-True.safetensors"]
    again = set()
    assert torch.equal(answered(again), table)
    assert again == {"a", "b"}, "and not what somebody else noted"
    assert len(asked) == 1
    told.clear()
    answered(set(), together=1)
    assert told[0] == (0, 2, "1 of 2 shadows at a time")
    assert len(asked) == 2
    (tmp_path / "w-5-True.safetensors").write_bytes(b"damaged")
    assert torch.equal(answered(set()), table)
    assert len(asked) == 3


def test_logits_are_those_of_evaluation_a_thousand_rows_at_a_time(monkeypatch):
    asked = []
    monkeypatch.setattr(HERE, "in_chunks", lambda *of: asked.append(of))
    model = nn.Linear(1, 1)
    HERE.logits(model, "x")
    HERE.logits(model, "x", 3)
    assert asked == [(model, "x", 1024), (model, "x", 3)]
    assert not model.training


def test_the_versions_of_all_that_computes(monkeypatch):
    monkeypatch.setattr(HERE, "harness", lambda rooms: f"rooms {rooms[-1]}, {len(rooms)}")
    monkeypatch.setattr(HERE, "source_of_method", lambda method: f"source of {method}")
    rooms = len(HERE.ROOMS) + 1
    assert HERE._code(made_world()) == [f"rooms attack, {rooms}", "source of method", torch.__version__, "cpu"]
