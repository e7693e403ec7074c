"""The world of a run: who starts from which model, which records stay where, and what a party is told."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit import Setting, State, Up, read_record, run, sgd
from fedaudit.errors import DataError, RunError, SettingError
from fedaudit.methods.distillation.dsfl import SoftLabels
from fedaudit.rng import seeded
from fedaudit.runtime import world as worlds
from fedaudit.runtime.world import KeptRows, World, Worlds, chosen_engine, leaves, on_gpu
from fedaudit.wire.message import Size


def world(**values: object) -> World:
    return World(Setting.make(**{"method": "local", "device": "cpu", "clients": 4, "rounds": 1, **values}))


def weights(world: World, k: int) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in world.fresh_model(k).parameters()])


def same(a: World, i: int, b: World, j: int) -> bool:
    return torch.equal(weights(a, i), weights(b, j))


def test_clients_of_one_architecture_start_alike_unless_each_has_its_own():
    common, own = world(), world(init="own")
    assert Setting.make().init == "common"
    assert all(same(common, 0, common, k) for k in (1, 2, 3))
    assert not any(same(own, i, own, j) for i in range(4) for j in range(i))
    assert not same(common, 0, world(seed=1), 0), "another seed, another start"
    assert same(own, 2, world(init="own"), 2), "derived, not drawn anew"


def test_architectures_differ_and_each_starts_alike():
    mixed = world(model="digits-3", clients=6)
    for i in range(6):
        for j in range(i):
            if mixed.archs[i] == mixed.archs[j]:
                assert same(mixed, i, mixed, j)
    a, b = (mixed.fresh_model(mixed.archs.index(arch)) for arch in dict.fromkeys(mixed.archs[:2]))
    first_a, first_b = (next(m.parameters()).flatten()[:9] for m in (a, b))
    assert not torch.equal(first_a, first_b), "another architecture draws from a generator of its own"


@pytest.mark.parametrize(("init", "alike"), [("common", True), ("own", False)])
def test_the_clients_start_from_the_servers_first_model(init, alike, tmp_path):
    """What a method without common weights, such as FedFree, relies on. No round is run."""
    setting = Setting.make(method="fedavg", device="cpu", clients=2, rounds=0, init=init)
    run(setting, out=tmp_path / "a")
    w0 = load_file(tmp_path / "a" / "models" / "global.safetensors")
    theta = dict(World(setting).fresh_model(0).state_dict())
    assert all(torch.equal(w0[name], theta[name]) for name in w0) is alike


def test_a_record_from_before_the_choice_says_own(tmp_path, tiny):
    run(tiny("local", rounds=1), out=tmp_path / "a")
    path = tmp_path / "a" / "record.json"
    written = json.loads(path.read_text())
    assert written["setting"]["init"] == "common"
    del written["setting"]["init"]
    path.write_text(json.dumps(written))
    assert read_record(path).setting.init == "own"


def test_a_run_cannot_go_on_from_another_start(tmp_path, tiny):
    run(tiny("local", rounds=1), out=tmp_path / "a")
    with pytest.raises(SettingError, match="init = 'common', now 'own'"):
        run(tiny("local", rounds=2, init="own"), out=tmp_path / "a", resume=True)


def test_records_that_stay_are_brought_once_and_handed_out_as_copies(monkeypatch):
    """What is beyond the limit is brought each time."""
    from fedaudit.runtime import world as worlds

    w = world()
    wanted = [w.members(k) for k in range(4)]
    brought: list[int] = []
    monkeypatch.setattr(w, "_to_device", lambda rows: brought.append(len(rows[1])) or rows)
    size = sum(t.numel() * t.element_size() for t in wanted[0])
    monkeypatch.setattr(w, "_there", worlds.KeptRows(size + 100))
    for _ in range(3):
        for k in (0, 1):
            x, y = w.members(k)
            assert torch.equal(x, wanted[k][0])
            assert torch.equal(y, wanted[k][1])
            x.zero_(), y.zero_()
    assert len(brought) == 1 + 3, "client 0's once; there is no room for client 1's"


def wreck(f, x, y):
    x.zero_()
    return True


def to_nothing(x):
    return x.zero_()


def late(client):
    client.x.zero_()


def no_harm(client):
    pass


@pytest.mark.parametrize(
    ("how", "after"), [({}, no_harm), ({"until": wreck}, no_harm), ({"beside": [to_nothing]}, no_harm), ({}, late)]
)
def test_records_that_stay_are_as_they_were_whatever_a_method_does(how, after):
    """Training itself reads them where they are kept; what the method's own functions get is the task's own."""
    from fedaudit.runtime.meter import Meter
    from fedaudit.runtime.task import open_client

    w = world()
    wanted = w.members(0)[0]
    client = open_client(w.site(0), 1, 0, Meter("client 0", 1, w.device), None)

    def loss(f, x, y, *rest):
        return cross_entropy(f(x), y, reduction="none")

    client.fit(loss, epochs=1, batch=64, opt=sgd(0.1), **how)
    after(client)
    assert torch.equal(w.members(0)[0], wanted)
    assert torch.equal(w.seen_members(0)[0], wanted)
    assert client.x.data_ptr() != w.seen_members(0)[0].data_ptr()
    assert client.x is client.x


def test_held_out_records_are_handed_out_as_copies():
    w = world()
    for what in ("nonmembers", "validation"):
        wanted = w.held_out(0, what)[0].clone()
        getattr(w, what)(0)[0].zero_()
        assert torch.equal(w.held_out(0, what)[0], wanted)
        assert len(wanted) == len(getattr(w.federation.shards[0], what))


def test_what_a_client_deploys_is_what_is_saved(tmp_path, tiny, monkeypatch):
    """Its model as its state has it, or what the method makes of it."""
    from fedaudit.methods.references.local import Local
    from fedaudit.runtime.folder import RunFolder
    from fedaudit.runtime.task import ClientState
    from fedaudit.wire.codec import decode

    def negated(self, client):
        for p in client.model.parameters():
            p.data.neg_()
        return client.model

    for name in ("as it is", "its own"):
        if name == "its own":
            monkeypatch.setattr(Local, "personal", negated, raising=False)
        run(tiny("local", rounds=1, model="mlp@0.25", eval_clients=False), out=tmp_path / name)
        kept = decode(RunFolder(tmp_path / name).client_state(1) or b"", ClientState).model
        saved = load_file(tmp_path / name / "models" / "client-000001.safetensors")
        sign = 1 if name == "as it is" else -1
        assert saved.keys() == kept.keys()
        assert all(torch.equal(saved[key], sign * kept[key]) for key in kept)


# --- a field that is None: nothing is billed where that was known before the run, and everything where it was not.


TINY = {"dataset": "digits", "model": "mlp", "clients": 6, "rounds": 2, "eval_clients": False}


def billed(record):
    return [sum(entry.field == "Perhaps.w" for entry in client.entries) for client in record.ledger]


def test_what_the_setting_leaves_out_is_not_billed(tmp_path):
    record = fedaudit.run(method="leaky_means:Silent", out=tmp_path / "never", **TINY)
    assert billed(record) == [0] * 6
    assert all(client.epsilon == 0 for client in record.ledger)


def test_what_the_records_leave_out_is_billed_whether_sent_or_not(tmp_path):
    record = fedaudit.run(method="leaky_means:Silent", set={"when": "records"}, out=tmp_path / "records", **TINY)
    sent = sum(t.payload for t in record.traffic if t.field == "Perhaps.w")
    assert 0 < sent < 2 * 6 * 8, "some clients send a number in both rounds, the others None"
    assert billed(record) == [1] * 6
    assert all(client.epsilon == math.inf for client in record.ledger)


def test_traffic_that_waits_for_what_was_chosen_does_not_make_it_free(tmp_path):
    """Planned as nothing, and sent by those whose records say so: the bytes agree, and the run ends all the same."""
    with pytest.raises(RunError, match=r"Perhaps.w was sent, and the traffic that was declared before the run"):
        fedaudit.run(
            method="leaky_means:Silent", set={"when": "records", "hides": True}, out=tmp_path / "hides", **TINY
        )


def test_ds_fl_with_equal_weights_is_not_billed_for_counts_that_it_does_not_send():
    values = {"method": "dsfl", "public": 0.1, **TINY}
    equal, samples = (World(Setting.make(**values, set={"weights": weights})) for weights in ("equal", "samples"))
    assert "SoftLabels.N" in equal.absent(1)
    assert "SoftLabels.N" not in samples.absent(1)
    assert SoftLabels.optional() == {"N"}


def test_a_process_of_one_party_knows_one_world(monkeypatch):
    from fedaudit.errors import ContractError
    from fedaudit.runtime import world as module

    monkeypatch.setattr(module, "_held", [])
    mine = object()
    try:
        module.keep_world("a", mine)
        assert module.world_of("a") is mine
        with pytest.raises(ContractError, match="cannot open the world of another setting"):
            module.world_of("b")
    finally:
        module.world_of.cache_clear()


@pytest.mark.parametrize(
    ("unit", "known", "found"),
    [("person", True, "those of client 2"), ("person", False, None), ("record", True, None)],
)
def test_whose_records_they_are_is_told_where_persons_are_protected(unit, known, found):
    federation = SimpleNamespace(
        dataset=SimpleNamespace(person=torch.zeros(3) if known else None), people=lambda k: f"those of client {k}"
    )
    here = SimpleNamespace(federation=federation, policies={"training": SimpleNamespace(unit=unit)})
    assert World.people(here, 2) == found


@pytest.mark.parametrize("other", [None, "digits"])
def test_labels_of_another_data_set_are_not_this_tasks(other):
    here = SimpleNamespace(setting=SimpleNamespace(public_dataset=other))
    assert World.public_labelled.fget(here) is (other is None)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_records_stay_up_to_a_limit_in_bytes():
    """Ten numbers of 4 bytes and ten labels of 8 take 120 bytes. The limit is 240."""
    made = []

    def rows(n):
        def make():
            made.append(n)
            return torch.zeros(n), torch.zeros(n).long()

        return make

    kept = KeptRows(240)
    for key, n in (("a", 10), ("b", 11), ("c", 10), ("a", 10), ("b", 11), ("c", 10), ("d", 1), ("d", 1)):
        assert len(kept.get((key, 0), rows(n))[0]) == n
    assert made == [10, 11, 10, 11, 1, 1], "b does not fit beside a, c does, and then nothing else"


def test_the_last_worlds_are_kept(monkeypatch):
    built = []
    monkeypatch.setattr(worlds, "_held", [])
    monkeypatch.setattr(worlds, "World", lambda setting: built.append(setting) or f"world {setting}")
    monkeypatch.setattr(worlds, "Setting", SimpleNamespace(model_validate_json=lambda text: text))
    get = Worlds(room=2)
    for name in "abacb":
        assert get(name) == f"world {name}"
    assert built == ["a", "b", "c", "b"], "b was used longest ago when c came"
    with get.room_for(1):
        get("a")
        get("b")
        get("c")
    assert built == ["a", "b", "c", "b", "a"]
    get("c")
    get("b")
    assert len(built) == 5
    get("a")
    assert built[5:] == ["a"], "afterwards there is room for two again"
    get.cache_clear()
    get("a")
    assert built[5:] == ["a", "a"]


@pytest.mark.parametrize(
    ("device", "gpu", "engine", "isolate", "chosen"),
    [
        ("cpu", True, "auto", False, "serial"),
        ("cuda", False, "auto", False, "stacked"),
        ("cuda:1", False, "auto", False, "stacked"),
        ("auto", True, "auto", False, "stacked"),
        ("auto", False, "auto", False, "serial"),
        ("cuda", True, "serial", False, "serial"),
        ("cpu", False, "stacked", False, "stacked"),
        ("cuda", True, "auto", True, "serial"),
        ("cuda", True, "serial", True, "serial"),
    ],
)
def test_on_a_gpu_clients_are_stacked(device, gpu, engine, isolate, chosen, monkeypatch):
    monkeypatch.setattr(worlds.torch.cuda, "is_available", lambda: gpu)
    setting = SimpleNamespace(device=device, engine=engine, isolate=isolate)
    assert chosen_engine(setting) == chosen
    assert on_gpu(setting) is (device.startswith("cuda") or (device == "auto" and gpu))


@pytest.mark.parametrize("engine", ["stacked", "ray"])
def test_isolated_clients_go_one_after_the_other(engine):
    with pytest.raises(SettingError, match=f"--engine {engine} does not"):
        chosen_engine(SimpleNamespace(device="cpu", engine=engine, isolate=True))


def test_a_device_that_is_not_there_is_said(monkeypatch):
    for there, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(worlds.torch.cuda, "is_available", lambda there=there: there)
        assert worlds.resolve_device("auto").type == found
    with pytest.raises(SettingError, match=r"no GPU here\. Use --device cpu, or device = .cpu. in a suite\."):
        worlds.resolve_device("cuda:1")
    for name in ("nonsense", "mps"):
        with pytest.raises(SettingError, match="Choose from auto, cpu, cuda"):
            worlds.resolve_device(name)


def test_plain_values_of_a_tree():
    assert list(leaves({"a": 1, "b": [2, (3, {"c": "x"})], "d": None})) == [1, 2, 3, "x", None]


def test_as_many_other_records_as_a_client_has():
    here = world(clients=2, aux=0.3)
    other, labels = here.other_rows(1)
    assert len(other) == len(labels) == here.count(1) != here.count(0)
    x, _ = here.federation.auxiliary()
    assert all((x == row).flatten(1).all(1).any() for row in other[:5])
    assert torch.equal(here.other_rows(1)[0], other)
    none = world(clients=2, aux=0.0)
    with pytest.raises(DataError, match="needs an auxiliary set"):
        none.other_rows(0)


def test_copies_of_records_are_counted_with_their_labels():
    """Client 0 has one record three times, twice with one label; client 1 has two records twice."""
    x = torch.tensor([[1.0], [1.0], [1.0], [2.0]])
    parts = [(x, torch.tensor([0, 0, 1, 0])), (torch.tensor([[1.0], [1.0], [2.0], [2.0]]), torch.zeros(4).long())]
    federation = SimpleNamespace(shards=parts, members=parts.__getitem__)
    assert World.copies(SimpleNamespace(federation=federation)) == 2
    parts[1] = (torch.zeros(0, 1), torch.zeros(0).long())
    parts[0] = (x, torch.tensor([0, 0, 0, 0]))
    assert World.copies(SimpleNamespace(federation=federation)) == 3
    federation.shards, federation.members = parts[1:], parts[1:].__getitem__
    assert World.copies(SimpleNamespace(federation=federation)) == 1


@pytest.mark.parametrize("given", [True, False])
def test_a_client_whose_records_are_given_has_no_others(given):
    here = world(clients=3, privacy={"training": {"noise_multiplier": 1.0}})
    rows = torch.zeros(7, 1, 8, 8), torch.arange(7)
    site = here.site(1, rows if given else None)
    assert site.count == (7 if given else here.count(1))
    assert len(site.own()[1]) == site.count
    assert (site.seen is None) is given
    if given:
        assert site.own() is rows
        for others in (site.validation, site.others):
            with pytest.raises(DataError, match="has no other records"):
                others()
    else:
        assert len(site.validation()[1]) == len(here.federation.shards[1].validation)
    assert (site.k, site.rounds, site.classes, site.method) == (1, 1, 10, "local")
    hub = here.hub
    assert (hub.clients, hub.rounds, hub.classes, len(hub.archs), hub.public_labelled) == (3, 1, 10, 3, True)


def test_a_channel_may_come_last():
    for last in (False, True):
        here = SimpleNamespace(device=torch.device("cpu"), setting=SimpleNamespace(channels_last=last))
        x, _ = World._to_device(here, (torch.zeros(2, 3, 4, 4), torch.zeros(2)))
        assert x.is_contiguous(memory_format=torch.channels_last) is last
        flat, _ = World._to_device(here, (torch.zeros(2, 5), torch.zeros(2)))
        assert flat.shape == (2, 5)


def test_how_often_a_kind_is_released():
    """FedAvg uploads weights and a count once in each of 4 rounds, to which downloads do not count."""
    here = world(method="fedavg", rounds=4)
    assert here.releases("weights") == 4
    assert here.releases("logits") == 0
    here = world(method="fedavg", rounds=4)
    here.method = SimpleNamespace(traffic=lambda plan: None, server_arch=lambda model: None)
    assert here.releases("weights") is None


# --- a world that is made up ------------------------------------------------------------------------------------------


def made_world(method=None, federation=None, **setting):
    """Return a world without records: clients of the architectures a, b and a, whose models have one weight."""
    world = World.__new__(World)
    values = {"seed": 5, "init": "common", "clients": 3, "rounds": 4, "method": "mine", "server_model": None}
    values |= {"model": "a", "public": 0.0, "public_dataset": None, "channels_last": False}
    world.setting = SimpleNamespace(**(values | setting))
    world.method = method or SimpleNamespace(server_arch=lambda model: None)
    world.archs, world.shape, world.classes = ["a", "b", "a"], (1, 2, 2), 3
    world.device, world.policies, world.federation = torch.device("cpu"), {}, federation
    world._templates, world._bases = {}, {}
    world.build = lambda arch: nn.Linear(1, 1 if arch == "a" else 2)
    return world


def drawn_by(*names, out=1):
    with seeded(*names):
        return nn.Linear(1, out).weight


@pytest.mark.parametrize("init", ["common", "own"])
def test_the_names_that_a_first_model_follows_from(init, monkeypatch):
    """The server's architecture begins as the server does; with `own`, each client by itself."""
    monkeypatch.setattr(worlds, "arch_on_server", lambda setting, method, archs: "a")
    world = made_world(init=init)
    common = init == "common"
    names = [("server", 0), ("model", "b"), ("server", 0)] if common else [(f"client {k}", "model") for k in range(3)]
    for k, of in enumerate(names):
        wanted = drawn_by(5, *of, out=1 if k != 1 else 2)
        assert torch.equal(world.fresh_model(k).weight, wanted)
        assert torch.equal(world.fresh_model(k, 9).weight, drawn_by(9, *of, out=1 if k != 1 else 2)), "a shadow's seed"
    assert world.fresh_model(0) is not world.fresh_model(0)
    first = world.blank_model(0)
    assert world.is_start(0, first) is common
    assert world.is_start(2, first) is common
    assert not world.is_start(1, first)
    with torch.no_grad():
        first.bias.add_(1)
    assert not world.is_start(0, first)
    assert not world.is_start(0, nn.Linear(1, 1, bias=False))


@pytest.mark.parametrize("init", ["common", "own"])
def test_nothing_is_drawn_for_a_model_whose_weights_are_replaced(init, monkeypatch):
    """It is built once for each architecture, the server's own too, and copied. What is drawn afterwards does not
    depend on it."""
    monkeypatch.setattr(worlds, "arch_on_server", lambda setting, method, archs: "a")
    world, built = made_world(init=init, server_model="c"), []
    made = world.build
    world.build = lambda arch: built.append(arch) or made(arch)
    before = torch.get_rng_state()
    blanks = [world.blank(arch) for arch in ("a", "b", "c", "a", "b", "c")]
    assert torch.equal(torch.get_rng_state(), before)
    assert built == ["a", "b", "c"]
    assert [len(net.weight) for net in blanks] == [1, 2, 2, 1, 2, 2]
    with torch.no_grad():
        blanks[2].weight.fill_(7.0)
        blanks[0].weight.fill_(7.0)
    assert not (blanks[5].weight == 7).any()
    assert world.hub.blank("c") is not world.hub.blank("c")
    assert built == ["a", "b", "c"]
    assert torch.equal(torch.get_rng_state(), before)
    assert not (world.fresh_model(0).weight == 7).any()
    other = made_world(init=init, server_model="c")
    assert torch.equal(world.fresh_model(0).weight, other.fresh_model(0).weight), "no client begins otherwise for it"


def test_a_model_takes_a_state_or_a_copy_of_it():
    world = made_world()
    world.setting.init = "own"
    state = State({"weight": torch.tensor([[4.0]]), "bias": torch.tensor([5.0])})
    mine = world.model_with(0, state)
    assert mine.weight.data_ptr() == state["weight"].data_ptr()
    double = State({name: t.double() for name, t in state.items()})
    assert world.model_with(0, double).weight.item() == 4
    assert world.model_name(0) == "Linear"


@pytest.mark.parametrize(
    ("named", "by_method", "archs", "found"),
    [
        ("big", "m", "ab", "big"),
        (None, "m", "ab", "m"),
        (None, None, "aa", "a"),
        (None, None, "a", "a"),
        (None, None, "ab", None),
    ],
)
def test_the_servers_architecture_is_named_or_that_of_all(named, by_method, archs, found):
    method = SimpleNamespace(server_arch=lambda model: f"{by_method} for {model}" if by_method else None)
    world = made_world(method, server_model=named)
    world.archs = list(archs)
    if found is None:
        with pytest.raises(SettingError, match=r"mine asks for one server model, .* have several \(a, b\)"):
            _ = world.server_arch
    else:
        assert world.server_arch == ("m for a" if found == "m" else found)


def test_records_of_a_client_and_of_everybody():
    shards = [SimpleNamespace(members=[1, 2, 3], canaries=[4]), SimpleNamespace(members=[5], canaries=[])]
    rows = (torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))
    federation = SimpleNamespace(shards=shards, public=[1, 2, 3], public_set=lambda: rows, rows=lambda index: index)
    world = made_world(federation=federation, public=0.1)
    assert [world.count(k) for k in (0, 1)] == [4, 1]
    assert (world.has_public, world.public_labelled, world.public_size) == (True, True, 3)
    assert torch.equal(world.public()[1], rows[1])
    none = made_world(federation=federation)
    assert not none.has_public
    with pytest.raises(SettingError, match="mine needs a public transfer set"):
        none.public()
    foreign = made_world(federation=federation, public_dataset="other")
    foreign._foreign = [0] * 7
    assert (foreign.has_public, foreign.public_labelled, foreign.public_size) == (True, False, 7)


@pytest.mark.parametrize(("last", "shape", "moved"), [(True, (2, 3, 2, 2), True), (True, (2, 3), False),
                                                      (False, (2, 3, 2, 2), False)])  # fmt: skip
def test_only_images_have_their_channels_last(last, shape, moved):
    x, y = made_world(channels_last=last)._to_device((torch.zeros(shape), torch.zeros(2)))
    assert x.shape == shape
    assert (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)) is moved
    assert y.shape == (2,)


def test_how_often_a_kind_is_released_and_what_is_never_sent(monkeypatch):
    """Two fields of a kind in each of four rounds; a field of no bytes, or not declared, is absent."""
    asked = []
    declared = {("up", "A.w"): 5, ("up", "A.v"): 7, ("up", "B.n"): 0, ("down", "C.w"): 9}
    kinds = {"A.w": "weights", "A.v": "weights", "B.n": "count"}

    class Sends(Up):
        @classmethod
        def optional(cls):
            return ["w", "n", "z"]

    method = SimpleNamespace(traffic=lambda plan: asked.append(plan) or declared)
    world = made_world(method)
    world.plan = lambda t, participants: (t, participants)
    monkeypatch.setattr(worlds, "declared_of", lambda method, name: SimpleNamespace(kind=kinds[name]))
    monkeypatch.setattr(worlds, "message_classes", lambda module: [Sends, Size])
    assert (world.releases("weights"), world.releases("count"), world.releases("logits")) == (8, 4, 0)
    assert asked[0] == (1, [0, 1, 2])
    declared |= {("up", "Sends.w"): 5, ("up", "Sends.n"): 0, ("down", "Sends.z"): 9}
    assert world.absent(3) == {"Sends.n", "Sends.z"}
    assert asked[-1] == (3, [0, 1, 2])
    silent = made_world(SimpleNamespace(traffic=lambda plan: None))
    silent.plan = world.plan
    assert silent.releases("weights") is None
    assert silent.absent(1) == frozenset()


def test_a_plan_has_the_records_of_all_clients(monkeypatch):
    monkeypatch.setattr(worlds, "plan_of", lambda *of, **facts: (of, facts))
    shards = [SimpleNamespace(members=[0] * n, canaries=[]) for n in (3, 4, 5)]
    world = made_world(federation=SimpleNamespace(shards=shards, public=[1]))
    of, facts = world.plan(2, [0, 2], asks="asks")
    assert of == (world.setting, world.method, world.archs, [0, 2])
    size = facts.pop("model_size")
    counts = {0: 3, 1: 4, 2: 5}
    assert facts == {
        "t": 2, "n": counts, "shape": (1, 2, 2), "classes": 3, "public": 1, "labelled": True, "records": counts,
        "asks": "asks",
    }  # fmt: skip
    assert size("b").payload == 4 * 4
    assert size("b", lambda model: ["bias"]).payload == 4 * 2


def test_parameters_that_are_not_trained_are_the_same_in_all_models(monkeypatch):
    """They are drawn once for an architecture; what is trained is each model's own."""
    world = made_world()
    del world.build
    world._build = lambda arch: nn.Linear(1, 2)
    monkeypatch.setattr(worlds, "fixed", lambda model: {"bias"})
    torch.manual_seed(0)
    one, other = world.build("a"), world.build("a")
    with seeded(5, "model", "a", "not trained"):
        wanted = nn.Linear(1, 2).bias
    assert torch.equal(one.bias, wanted)
    assert torch.equal(other.bias, wanted)
    assert not torch.equal(one.weight, other.weight)
    assert not torch.equal(world.build("b").bias, wanted)


def test_images_of_another_data_set_have_no_labels(monkeypatch):
    world = made_world(public_dataset="other")
    world._foreign = [[1.0], [2.0]]
    monkeypatch.setattr(worlds, "to_input", torch.tensor)
    x, y = world.public()
    assert (x.tolist(), y.tolist()) == ([[1], [2]], [-1, -1])


def test_all_clients_of_an_architecture_copy_one_first_model(monkeypatch):
    """It is drawn once, and a client with a seed of its own draws another."""
    monkeypatch.setattr(worlds, "arch_on_server", lambda setting, method, archs: "a")
    world, built = made_world(), []
    made = world.build
    world.build = lambda arch: built.append(arch) or made(arch)
    for k in (0, 2, 1, 0):
        world.fresh_model(k)
    assert built == ["a", "b"]
    world.fresh_model(0, 7)
    assert built == ["a", "b", "a"]
