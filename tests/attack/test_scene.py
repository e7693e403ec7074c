"""The attack's side of the harness: what a scene shows to whom, and how claims are scored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from scenes import Entry, View
from scipy import stats as scipy_stats
from torch import nn

import fedaudit
import fedaudit.attack.active_server
import fedaudit.attack.replay
from fedaudit.attack.attack_run import attack_run, made
from fedaudit.attack.claims import Attacked, Claims, Histogram
from fedaudit.attack.scene import Attack, Passed, Scene
from fedaudit.attack.score import score
from fedaudit.errors import ContractError, RunError, SettingError, ThreatError
from fedaudit.progress import unwatched
from fedaudit.runtime.folder import RunFolder
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.stats import student_t


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attack") / "run"
    fedaudit.run(method="fedavg", dataset="digits", clients=3, partition="dirichlet:0.3", rounds=2, out=folder)
    return folder


def scene_of(folder, threat, target=0):
    run = RunFolder(folder)
    x, y = run.world.nonmembers(target)
    return Scene(run, run.transcript.view(threat), target, x, y), run.world


def test_a_peer_knows_its_own_records_and_state(a_run):
    scene, world = scene_of(a_run, "peer:1")
    x, y, state = scene.own
    assert torch.equal(x, world.members(1)[0])
    assert torch.equal(y, world.members(1)[1])
    # FedAvg's client ends the round with what it uploaded, which the peer's own messages show too.
    upload = list(scene.view.entries(direction="up", kind="weights", client=1))[-1]["w"]
    assert all(torch.equal(tensor, upload[name]) for name, tensor in state.model.items())


@pytest.mark.parametrize("threat", ["server", "outsider"])
def test_others_have_no_records_of_their_own(a_run, threat):
    with pytest.raises(ThreatError, match="a peer does"):
        _ = scene_of(a_run, threat)[0].own


def test_a_scene_tells_neither_seed_nor_truth(a_run):
    scene, _ = scene_of(a_run, "server")
    assert "seed" not in scene.setting
    assert not {"member", "members", "truth", "seed"} & {name for name in vars(scene) if not name.startswith("_")}


def test_an_attack_takes_settings_by_table(a_run):
    assert made("loss")[0] == made({"attack": "loss"})[0] == "loss"
    with pytest.raises(SettingError, match="Unknown setting of loss 'stepz'"):
        made({"attack": "loss", "stepz": 3})
    with pytest.raises(ContractError, match="does not name an attack"):
        made({"steps": 3})
    (result,) = [r for r in attack_run(a_run, attacks=[{"attack": "loss"}]) if r.attack == "loss"]
    assert result.claims == "membership"
    assert result.settings == {"rounds": None}


def attacked(world, claims, k=0):
    x, y = world.members(k)
    return Attacked(k, claims, x, y, torch.ones(len(y), dtype=torch.bool))


def test_label_shares_are_scored_by_half_the_l1_distance(a_run):
    """Claiming the truth has error 0; the uniform guess has the error that the scorer gives for it."""
    world = RunFolder(a_run).world
    parts, uniform = [], []
    for k in range(3):
        true = torch.bincount(world.members(k)[1], minlength=10).double()
        true = true / true.sum()
        parts.append(attacked(world, Histogram(true), k))
        uniform.append(float((true - 0.1).abs().sum() / 2))
    result = score(parts, world, a_run, "mine", 0)
    assert result.claims == "histogram"
    assert result.pooled.error.value == pytest.approx(0, abs=1e-12)
    assert result.pooled.uniform.value == pytest.approx(sum(uniform) / 3)
    assert result.pooled.gain.low < result.pooled.gain.value < result.pooled.gain.high


@pytest.mark.parametrize(
    "claims", [Histogram(torch.ones(10)), Histogram(torch.ones(9) / 9), Claims(torch.zeros(3)), object()]
)
def test_ill_formed_claims_are_refused(a_run, claims):
    world = RunFolder(a_run).world
    with pytest.raises(ContractError, match="mine"):
        score([attacked(world, claims)], world, a_run, "mine", 0)


def test_student_t_is_scipys():
    values = [0.3, 0.5, 0.45, 0.7]
    ours = student_t(values, 0.9)
    low, high = scipy_stats.t.interval(0.9, 3, loc=sum(values) / 4, scale=scipy_stats.sem(values))
    assert (ours.low, ours.high) == pytest.approx((low, high))
    assert student_t([0.4]).low is None
    assert student_t([]).value is None


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_candidates_tells_nothing(seed, tiny):
    """An attacker that scores by position, or from both ends, has an interval around 1/2."""
    from fedaudit.attack.attack_run import candidates_of
    from fedaudit.attack.membership import auc
    from fedaudit.runtime.world import World

    world = World(tiny("local", partition="iid", holdout=0.4, seed=seed))
    truths = [candidates_of(world, k)[2] for k in range(3)]
    member = torch.cat(truths).numpy()
    for rule in (lambda i, n: i, lambda i, n: (i - (n - 1) / 2).abs(), lambda i, n: i % 2):
        scores = torch.cat([rule(torch.arange(len(truth)).double(), len(truth)) for truth in truths])
        found = auc(scores.numpy(), member)
        assert found.low < 0.5 < found.high, (found, rule)


# --- a scene that is made up ----------------------------------------------------------------------------------------


class MadeWorld:
    """A world of three clients with architectures of their own, and records that are told apart by their numbers."""

    def __init__(self, **setting):
        self.setting = Setting.make(method="fedavg", seed=5, clients=3, **setting)
        self.shape, self.classes, self.device = Shape((1, 1, 2)), 2, torch.device("cpu")
        self.archs, self.has_public = ["1", "2", "3"], False
        self.federation = SimpleNamespace(auxiliary=lambda: (torch.full((2, 2), 7.0), torch.tensor([1, 0])))

    def _to_device(self, rows):
        return rows

    def public(self):
        return torch.full((3, 2), 9.0), None

    def members(self, k):
        return torch.full((1, 2), float(k)), torch.tensor([k])

    def build(self, arch):
        return nn.Linear(int(arch), 1)


def made_scene(*entries, peer=None, threat=None, target=1, folder=Path(), published=(), world=None, **more):
    view = View(list(entries), peer)
    view.threat.name = threat or view.threat.name
    run = SimpleNamespace(
        world=world or MadeWorld(), folder=folder, record=SimpleNamespace(published=published),
        client_state=lambda k: None,
    )  # fmt: skip
    return Scene(run, view, target, torch.ones(3, 2), torch.tensor([0, 1, 0]), **more)


def test_everybody_knows_what_is_public():
    scene = made_scene()
    assert scene.tell is unwatched
    assert made_scene(tell=print).tell is print
    assert (scene.target, scene.shape, scene.classes, scene.device.type) == (1, (1, 1, 2), 2, "cpu")
    assert scene.setting["clients"] == 3
    assert [scene.arch(k) for k in range(3)] == ["1", "2", "3"]
    assert scene.public is None
    scene._world.has_public = True
    assert torch.equal(scene.public, torch.full((3, 2), 9.0))
    x, y = scene.auxiliary
    assert (x.tolist(), y.tolist()) == ([[7, 7], [7, 7]], [1, 0])
    x, y = scene.pool
    assert (x.tolist(), y.tolist()) == ([[1, 1]] * 3 + [[7, 7]] * 2, [0, 1, 0, 1, 0])
    drawn = [torch.rand(3, generator=made_scene(target=k).rng(purpose)).tolist() for k in (1, 2) for purpose in "ab"]
    assert len({tuple(row) for row in drawn}) == 4
    assert torch.rand(3, generator=scene.rng("a")).tolist() == drawn[0]


def test_a_peer_that_was_never_asked_has_no_state():
    x, y, state = made_scene(peer=2).own
    assert (x.tolist(), y.tolist(), state) == ([[2, 2]], [2], None)


def test_models_are_built_with_what_the_view_had():
    scene = made_scene()
    before = torch.get_rng_state()
    model = scene.model("2", {"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([5.0])})
    assert torch.equal(before, torch.get_rng_state())
    assert (model.weight.tolist(), model.bias.tolist()) == ([[3, 4]], [5])
    torch.manual_seed(3)
    first = scene.fresh("3").weight
    torch.manual_seed(3)
    assert torch.equal(scene.fresh("3").weight, first)


def test_uploads_of_a_kind_are_the_targets_that_were_kept():
    mine = Entry("up", 1, 1, a=("weights", 10), b=("count", 3), c=("weights", 11))
    late = Entry("up", 1, 2, a=("weights", 12))
    others = [
        Entry("up", 0, 1, a=("weights", 0)), Entry("down", 1, 1, a=("weights", 0)),
        Entry("up", 1, 3, dropped=True, a=("weights", 0)),
    ]  # fmt: skip
    scene = made_scene(*others, mine, late)
    assert scene.released("weights") == [(mine, "a"), (mine, "c"), (late, "a")]
    assert scene.released("count") == [(mine, "b")]
    assert scene.released("logits") == []


def test_what_a_peer_was_passed_on_by_client_and_mixed():
    """By client only if the message says whose value it is."""
    told = Entry("down", 2, 1, ask=4, role="relay", by="client", p=("prototypes", {0: "of 0", 1: "of 1"}))
    again = Entry("down", 2, 3, role="relay", by="client", p=("prototypes", {1: "later"}), q=("logits", {1: "z"}))
    mean = Entry("down", 2, 2, role="relay", p=("prototypes", "mean"), q=("logits", "mean"))
    others = [
        Entry("down", 2, 1, role="private", by="client", p=("prototypes", {1: "no relay"})),
        Entry("down", 0, 1, role="relay", by="client", p=("prototypes", {1: "another peer's"})),
        Entry("up", 2, 1, role="relay", by="client", p=("prototypes", {1: "sent"})),
        Entry("down", 2, 5, role="relay", by="client", dropped=True, p=("prototypes", {1: "dropped"})),
        Entry("down", 2, 6, role="relay", by="client", p=("prototypes", ["no table", "at all"])),
        Entry("down", 2, 7, role="relay", dropped=True, p=("prototypes", "dropped")),
        Entry("down", 2, 8, p=("prototypes", "no relay")),
    ]
    scene = made_scene(told, mean, again, *others, peer=2)
    assert scene.relayed("prototypes") == [Passed(1, 4, "of 1"), Passed(3, 0, "later")]
    assert scene.relayed("prototypes", 0) == [Passed(1, 4, "of 0")]
    assert scene.relayed("logits") == [Passed(3, 0, "z")]
    assert scene.relayed("weights") == []
    assert scene.mixed("prototypes") == [(mean, "p")]
    assert scene.mixed("logits") == [(mean, "q")]
    server = made_scene(told, mean, again)
    assert (server.relayed("prototypes"), server.mixed("prototypes")) == ([], [])


def test_only_an_active_server_asks(monkeypatch):
    monkeypatch.setattr(fedaudit.attack.active_server, "ask", lambda *of: of)
    scene = made_scene(threat="active-server")
    assert scene.ask("like", "message", "purpose", 3) == (scene._run, 1, "like", "message", "purpose", 3)
    with pytest.raises(ThreatError, match="follows the protocol"):
        made_scene().ask("like", "message", "purpose", 3)


def test_shadows_of_a_scene_are_those_of_its_pool(monkeypatch, tmp_path):
    here, asked = fedaudit.attack.replay, {}
    monkeypatch.setattr(here, "downloads", lambda *of: asked.update(downloads=of) or ["messages"])
    monkeypatch.setattr(here, "replay", lambda *of, **more: (of, more))

    def answers(*of, notes, **more):
        notes.update("ba")
        return of, more

    monkeypatch.setattr(here, "answers", answers)
    scene = made_scene(folder=tmp_path, tell=print)
    pool = scene.pool
    assert scene.replayable("upload") == ["messages"]
    view, upload, world, (x, y) = asked["downloads"]
    assert (view, upload, world, x.tolist(), y.tolist()) == (
        scene.view, "upload", scene._world, scene.auxiliary[0].tolist(), [1, 0],
    )  # fmt: skip
    (world, messages, (x, y), picks), more = scene.replay("upload", ["picks"])
    assert (world, messages, picks, more) == (
        scene._world, ["messages"], ["picks"], {"together": 64, "compile": False},
    )  # fmt: skip
    assert torch.equal(x, pool[0])
    assert torch.equal(y, pool[1])
    assert scene.replay("upload", [], together=2, compile=True)[1] == {"together": 2, "compile": True}
    (of, more), notes = scene.shadows("upload", "w", ["picks"])
    assert notes == ("a", "b")
    assert (of[0], of[1], of[2], of[4]) == (scene._world, ["messages"], "w", ["picks"])
    assert more == {"folder": tmp_path / "shadows", "together": 64, "compile": False, "tell": print}
    (_, more), _ = scene.shadows("upload", "w", [], together=2, compile=True)
    assert (more["together"], more["compile"]) == (2, True)


def keep_model(folder, name, arch, weight):
    state = {"weight": torch.tensor([weight]), "bias": torch.zeros(1)}
    (folder / "models").mkdir(exist_ok=True)
    metadata = None if arch is None else {"arch": arch}
    (folder / "models" / name).write_bytes(safetensors.torch.save(state, metadata=metadata))


def test_the_published_model_is_that_of_all_or_the_targets(tmp_path):
    keep_model(tmp_path, "global.safetensors", "2", [1.0, 2.0])
    keep_model(tmp_path, "client-000001.safetensors", "1", [3.0])
    names = ("global.safetensors", "client-000001.safetensors")
    both = made_scene(folder=tmp_path, published=names)
    assert both.published().weight.tolist() == [[1, 2]]
    model, arch = both.of_all()
    assert (model.weight.tolist(), arch) == ([[1, 2]], "2")
    own = made_scene(folder=tmp_path, published=names[1:])
    assert own.published().weight.tolist() == [[3]]
    assert own.of_all() is None
    assert made_scene(folder=tmp_path, published=names[1:], target=0).published() is None
    assert made_scene(folder=tmp_path).published() is None, "files that the record does not name"


@pytest.mark.parametrize("arch", [None, "3", "gone", "own.py:Net"])
def test_a_published_file_that_is_no_model_says_so(arch, tmp_path):
    if arch != "gone":
        keep_model(tmp_path, "global.safetensors", arch, [1.0, 2.0])
    scene = made_scene(folder=tmp_path, published=("global.safetensors",))
    with pytest.raises(RunError, match=r"global.safetensors is not a model that a run published"):
        scene.of_all()


def test_a_users_own_code_counts_if_the_setting_names_it():
    world = MadeWorld(model="own.py:Net", server_model="big.py:Big")
    scene = made_scene(world=world)
    assert [scene._named(arch) for arch in ("own.py:Net", "big.py:Big", "cnn")] == ["own.py:Net", "big.py:Big", "cnn"]
    with pytest.raises(SettingError, match=r"it names code, 'other.py:Net', that the run's setting does not"):
        scene._named("other.py:Net")


def test_why_an_attack_cannot_run():
    class Sees(Attack):
        needs = frozenset({"weights", "count", "logits"})
        takes = frozenset({"rows", "images"})

    class Sends(Attack):
        active = True

    mine = Entry("up", 1, 1, w=("weights", 0), n=("count", 1), z=("logits", 2))
    part = Entry("up", 1, 1, w=("weights", 0))
    assert Sees().cannot(made_scene(mine)) is None
    assert Sees().cannot(made_scene(part)).endswith("sees no count, logits of client 1")
    passed = Entry("down", 2, 1, role="relay", by="client", z=("logits", {1: 5}), n=("count", {0: 5}))
    why = Sees().cannot(made_scene(part, passed, peer=2))
    assert "is passed on logits of client 1, and this attack needs the upload itself" in why
    assert Sends().cannot(made_scene(threat="active-server")) is None
    assert Sends().cannot(made_scene()).startswith("not attacked by this: it takes a server that sends messages")
    assert Attack().cannot(made_scene()) is None
    assert Attack().at_once(None) == 1
    assert (Attack.active, Attack.blind, Attack.needs) == (False, False, frozenset())
    image, table, text = Shape((1, 8, 8)), Shape((5,)), Shape((5,), tokens=9)
    assert [Attack().misfit(shape) for shape in (image, table, text)] == [None] * 3
    assert [Sees().misfit(shape) for shape in (image, table)] == [None] * 2
    assert Sees().misfit(text).startswith("does not apply: it is for images and rows, and the records are texts of 5")
    with pytest.raises(ContractError, match=r"Sees.run is missing"):
        Sees().run(made_scene())
