"""`init`: who starts from the same model."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit import Setting, read_record, run, sgd
from fedaudit.errors import RunError, SettingError
from fedaudit.methods.distillation.dsfl import SoftLabels
from fedaudit.runtime.world import World


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
