"""Work that clients of one process share: done once, billed to each, and known to nobody who could not do it."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch

from fedaudit import Frozen, LowRank, Record, Setting, State, freeze, run
from fedaudit.errors import ContractError
from fedaudit.methods.datafree import dffke
from fedaudit.runtime import work_once as module
from fedaudit.runtime.meter import Away, Meter
from fedaudit.runtime.party import Client
from fedaudit.runtime.work_once import Once, check_work, done_alone, room_for_results
from fedaudit.runtime.world import World, world_of
from fedaudit.shape import Shape
from fedaudit.wire.codec import FrozenPart, decode, encode_lazily, held_again
from fedaudit.wire.codec.packing import Content
from tests.wire.test_frozen import kept

CPU = torch.device("cpu")
done: list[str] = []


def scaled(state, e, by=1.0, **more):
    done.append("scaled")
    return e * state["w"] * by


def other(state, e, by=1.0, **more):
    done.append("other")
    return e * state["w"] * by


def drawn(e):
    return e + torch.rand(len(e))


def several(e):
    return {"a": [e, (e + 1,)], "n": 3}


@pytest.fixture(autouse=True)
def _nothing_done():
    done.clear()


def a_value(w=2.0, first=0.0):
    return freeze({"Dec": State({"w": torch.tensor([w])}), "E": {4: torch.arange(3.0) + first, 5: torch.arange(3.0)}})


class Bills(list):
    """Asks for work as clients do, and notes what each was billed."""

    def __init__(self, once):
        super().__init__()
        self.once = once

    def ask(self, value, make=scaled, t=1, k=4, rows=None, **given):
        return self.once.do(make, [value.part("Dec"), value.part("E", k, rows=rows)], given, t, self.append)


def test_the_first_does_it_and_each_later_one_pays(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(State, "__getitem__", lambda self, key: now.__setitem__(0, now[0] + 2.5) or dict(self)[key])
    bills = Bills(Once(CPU))
    found = [bills.ask(a_value()) for _ in range(3)]
    assert done == ["scaled"]
    assert all(x.tolist() == [0, 2, 4] for x in found)
    assert bills == [Away(share_s=2.5, share=1.0, done_before=True)] * 2


def test_everybody_has_a_copy_of_its_own():
    bills = Bills(Once(CPU))
    for _ in range(3):
        found = bills.ask(a_value())
        assert found.tolist() == [0, 2, 4]
        found.zero_()


@pytest.mark.parametrize("change", [
    {"value": a_value(w=3.0)}, {"value": a_value(first=1.0)}, {"k": 5, "value": a_value(first=1.0)}, {"by": 3.0},
    {"make": other}, {"t": 2}, {"rows": torch.tensor([2, 0])},
    {"value": freeze({"Dec": State({"w": torch.tensor([2.0]), "v": torch.ones(1)}), "E": {4: torch.arange(3.0)}})},
    {"value": freeze({"Dec": {"w": torch.tensor([2.0])}, "E": {4: torch.arange(3.0)}})},
    {"value": freeze({"Dec": State({"w": torch.tensor([2.0])}), "E": {4: torch.arange(3.0).double()}})},
    {"value": freeze({"Dec": State({"w": torch.tensor([2.0])}), "E": {4: torch.arange(3.0).view(1, 3)}})},
])  # fmt: skip
def test_other_work_is_done_anew(change):
    bills = Bills(Once(CPU))
    first = bills.ask(a_value(first=7.0) if "k" in change else a_value())
    again = bills.ask(**{"value": a_value(), **change})
    assert len(done) == 2
    assert not bills
    assert first.tolist() != again.tolist() or {"make", "t"} & change.keys() or "value" in change


def test_other_rows_are_other_work():
    bills = Bills(Once(CPU))
    for rows in ([2, 0], [0, 2], [2, 0], [2]):
        assert bills.ask(a_value(), rows=torch.tensor(rows)).tolist() == [2.0 * i for i in rows]
    assert len(done) == 3


def difference(a, b):
    return a - b


def test_parts_in_another_order_are_other_work():
    once, value = Once(CPU), a_value(first=1.0)
    a, b = value.part("E", 4), value.part("E", 5)
    found = [once.do(difference, parts, {}, 1, print).tolist() for parts in ([a, b], [b, a], [a, a])]
    assert found == [[1, 1, 1], [-1, -1, -1], [0, 0, 0]]


def test_another_round_forgets_what_was_made():
    bills = Bills(Once(CPU, room=12))
    for t in (1, 2, 1):
        for _ in range(2):
            bills.ask(a_value(), t=t)
    assert len(done) == 3


def test_what_was_forgotten_takes_no_room():
    bills = Bills(Once(CPU, room=12))
    for _ in range(3):
        bills.ask(a_value())
        bills.once.forget()
    assert len(done) == 3
    assert not bills
    bills.ask(a_value())
    bills.ask(a_value())
    assert (len(done), len(bills)) == (4, 1), "there was room again"


def test_what_has_no_room_is_made_by_each():
    """A result has 12 bytes: the first stays, the second does not."""
    bills = Bills(Once(CPU, room=23))
    for by in (1.0, 2.0, 1.0, 2.0):
        bills.ask(a_value(), by=by)
    assert len(done) == 3
    assert len(bills) == 1


def test_the_size_of_a_result_is_that_of_all_its_tensors():
    """Two tensors of 12 bytes each, and a number."""
    for room, kept_there in ((23, 0), (24, 1)):
        once, bills = Once(CPU, room=room), []
        for _ in range(2):
            found = once.do(several, [a_value().part("E", 4)], {}, 1, bills.append)
            assert found["a"][1][0].tolist() == [1, 2, 3]
            assert found["n"] == 3
        assert len(bills) == kept_there


def test_random_numbers_follow_from_the_contents():
    """Not from the client that does the work, whose generator may have been used as its records say."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(Once(CPU).do(drawn, [a_value().part("E", 4)], {}, 1, print))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)
    other_rows = Once(CPU).do(drawn, [a_value(first=1.0).part("E", 4)], {}, 1, print)
    assert not torch.equal(found[0], other_rows - 1)


def test_random_numbers_are_the_same_where_nothing_is_shared():
    """Or a run that counts FLOPs would send something else."""
    site, part = World(Setting.make(**SETTING)).site(1), a_value().part("E", 4)
    found = []
    for once in (site.once, None):
        client = Client(replace(site, once=once), 3, 0, Meter("client 1", 3, CPU), None, {})
        before = torch.get_rng_state()
        found.append(client.once(drawn, part))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)


def test_random_numbers_are_the_same_on_every_device(monkeypatch):
    seeds = []
    monkeypatch.setattr(module, "seeded", lambda *parts, device: seeds.append(parts) or nullcontext())
    for device in ("cpu", "meta"):
        value = on("meta") if device == "meta" else freeze({"E": torch.ones(1)})
        done_alone(where, [value.part("E")], {}, torch.device(device))
    assert seeds[0] == seeds[1]


def on(device):
    """As if a value had been frozen on another device."""
    content = Content(freeze({"E": torch.ones(1)}).contents[0].digest)
    return Frozen({"E": content.held(torch.ones(1, device=device), torch.detach)}, [content])


def where(e):
    return str(e.device)


def test_what_lies_on_another_device_is_other_work():
    once = Once(CPU)
    found = [once.do(where, [v.part("E")], {}, 1, print) for v in (freeze({"E": torch.ones(1)}), on("meta"))]
    assert found == ["cpu", "meta"]


def test_what_is_given_is_told_by_its_type_too():
    """1, 1.0 and True are equal, and a function need not do the same with them."""
    unlike = [1, 1.0, True, "1", None, "None", 0.0, -0.0, float("nan"), (1,), (1.0,), ("1",), ((1,),), (1, 1)]
    unlike += [Shape((1,)), Shape((1,), tokens=5), Shape((1,), tokens=6), "tuple 0 (1)"]
    once, bills = Once(CPU), []
    for turn in range(2):
        for by in unlike:
            assert once.do(said, [a_value().part("E", 4)], {"by": by}, 1, bills.append) == tell(by)
        assert len(bills) == turn * len(unlike)
    assert once.do(said, [a_value().part("E", 4)], {"more": 1}, 1, bills.append) == tell(0), "under another name"


def said(e, by=0, more=None):
    return tell(by)


def tell(by):
    return f"{type(by).__name__} {by!r} {getattr(by, 'tokens', None)}"


class Two(NamedTuple):
    a: torch.Tensor
    b: int


class Made(Record):
    a: object


def uncopied(e, kind):
    return {
        "numpy": e.numpy(), "named": Two(e, 1), "inside": [{"a": (e, e.numpy())}], "record": Made(e.numpy()),
        "module": torch.nn.Linear(1, 1), "learns": (e + 1).requires_grad_(), "shape": Shape((1,), tokens=5),
        "sparse": torch.ones(2).to_sparse(), "low": LowRank(State({"a": e}), energy=0.5),
    }[kind]  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["numpy", "named", "inside", "record", "module", "learns", "shape", "sparse", "low"]
)  # fmt: skip
def test_what_cannot_be_copied_is_made_by_each(kind):
    once, bills, part = Once(CPU), [], a_value().part("E", 4)
    first, again = (once.do(uncopied, [part], {"kind": kind}, 1, bills.append) for _ in range(2))
    assert first is not again
    assert not bills
    assert type(first) is type(again) is type(done_alone(uncopied, [part], {"kind": kind}, CPU))
    assert kind != "learns" or again.requires_grad
    assert kind != "shape" or again.tokens == 5


def in_a_record(e):
    return Made({"a": State({"w": e}, buffers=["w"])})


def a_view(e):
    return torch.zeros(100)[:1]


def test_records_are_shared_and_views_count_as_what_they_hold():
    for make, room, kept_there in ((in_a_record, 11, 0), (in_a_record, 12, 1), (a_view, 399, 0), (a_view, 400, 1)):
        once, bills = Once(CPU, room=room), []
        for _ in range(2):
            once.do(make, [a_value().part("E", 4)], {}, 1, bills.append)
        assert len(bills) == kept_there
    once = Once(CPU)
    first, again = (once.do(in_a_record, [a_value().part("E", 4)], {}, 1, bills.append) for _ in range(2))
    first.a["a"]["w"].zero_()
    assert again.a["a"]["w"].tolist() == [0, 1, 2]
    assert list(again.a["a"].buffers) == ["w"]


class FakeEvent:
    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None
        FakeEvent.made.append(self)

    def record(self, stream):
        self.at = len(done)


def test_on_a_gpu_events_stand_around_the_work(monkeypatch):
    @contextmanager
    def unseeded(*parts, device):
        assert device == torch.device("cuda")
        yield

    FakeEvent.made = []
    monkeypatch.setattr(module, "seeded", unseeded)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    bills = Bills(Once(torch.device("cuda"), room=100))
    bills.ask(a_value())
    bills.ask(a_value())
    assert [event.at for event in FakeEvent.made] == [0, 1]
    assert bills[0].stack == tuple(FakeEvent.made)


def test_room_is_a_part_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1600))
    assert room_for_results(torch.device("cuda")) == 100
    assert room_for_results(CPU) == 1 << 28


@functools.lru_cache
def cached(e):
    return e


class Sly(FrozenPart):
    """Says that it is what another client holds."""

    key = "what another client holds"


class Text(str):
    """May have attributes, which no key tells."""


def test_work_carries_nothing_of_its_own():
    secret = torch.ones(1)

    def inner(e):
        return e + secret

    part = a_value().part("E", 4)
    for make in (inner, lambda e: e, torch.nn.Linear(2, 2), Bills.ask):
        with pytest.raises(ContractError, match="is not a function of a module"):
            check_work(make, [part], {})
    for make in (Made, cached, torch.relu):
        with pytest.raises(ContractError, match="is not a function of a module"):
            check_work(make, [part], {})
    with pytest.raises(ContractError, match="was given a Sly for scaled, which is not a part of a frozen value"):
        check_work(scaled, [part, Sly(a_value(), ("E", 4), None)], {})
    with pytest.raises(ContractError, match="was given a Tensor for scaled, which is not a part of a frozen value"):
        check_work(scaled, [part, torch.ones(2)], {})
    for wrong in (secret, [1.0], (1, (2, secret)), {"a": 1}, Text("a"), Two(1, 2), (Text("a"),)):
        with pytest.raises(ContractError, match="more of scaled is not a number, a text or a tuple"):
            check_work(scaled, [part, part], {"by": 1.0, "more": wrong})
    check_work(scaled, [part, part], {"by": (1, (2.0, "a", None, True))})


def test_a_part_is_known_after_a_state_was_stored():
    """As long as it lies in memory, and when it was read from a file again."""
    value = a_value()
    state = encode_lazily(kept({"B": value}), CPU)
    for blob in (state, held_again(bytes(state)), bytes(state)):
        again = decode(blob, type(kept({}))).memory["B"]
        assert again.part("E", 4).key == value.part("E", 4).key
        assert again.part("Dec").key == value.part("Dec").key
        assert again.part().key == value.part().key
    rows = torch.tensor([2, 1])
    assert value.part("E", 4, rows=rows).key != value.part("E", 4).key
    assert value.part("E", 4, rows=rows).read().tolist() == [2, 1]
    assert value.part().read()["E"][5].tolist() == [0, 1, 2]
    with pytest.raises(ContractError, match="Only tensors have rows"):
        value.part("Dec", rows=rows)


SETTING = {
    "method": "dffke", "dataset": "digits", "model": "mlp", "clients": 3, "rounds": 2, "aux": 0.0, "holdout": 0.0,
    "validation": 0.0, "twins": "off",
    "set": {"h": 8, "T_Tran": 1, "T_Dec": 1, "T_FKE": 1, "w_Dec": 2, "E_local": 1, "tau": "off", "B": 32},
}  # fmt: skip


REAL_WORK = Once._work


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_a_client_decodes_nothing_that_another_has_decoded(tmp_path, monkeypatch, engine):
    """Three clients' images of a round, and in the second round of the first as well: nine, where each client by itself
    would make three and then six. What crosses the wire is the same to the bit."""
    calls, records = [], {}

    def work(self, make, *rest):
        assert make is dffke.decode
        calls.append(make)
        return REAL_WORK(self, make, *rest)

    monkeypatch.setattr(Once, "_work", work)
    opened, begin = [], Once.__init__
    monkeypatch.setattr(Once, "__init__", lambda self, *given: opened.append(self) or begin(self, *given))
    for name, room in (("shared", 1 << 28), ("alone", 0)):
        calls.clear()
        world_of.cache_clear()
        monkeypatch.setattr(module, "room_for_results", lambda device, room=room: room)
        records[name] = run(Setting.make(**SETTING, engine=engine), out=tmp_path / name), len(calls)
    (shared, few), (alone, many) = records["shared"], records["alone"]
    assert (few, many) == (3 + 6, 3 * 3 + 3 * 6)
    assert shared.transcript_digest == alone.transcript_digest
    assert opened
    assert not any(once._made for once in opened), "at the end of a round nothing stays"


def test_nothing_is_shared_where_flops_are_counted():
    setting = Setting.make(**SETTING)
    world = World(setting)
    assert world.site(0).once is world.site(2).once is not None
    assert World(setting.model_copy(update={"flops": True})).site(0).once is None


def test_a_client_asks_for_work_through_its_site():
    site = World(Setting.make(**SETTING)).site(1)
    part = a_value().part("E", 4)
    meters = [Meter(f"client {k}", t, CPU) for k, t in ((1, 3), (2, 3), (1, 4), (2, 4))]
    for meter in meters:
        client = Client(site, meter.t, 0, meter, None, {})
        with meter.span("task"):
            assert client.once(several, part)["a"][0].tolist() == [0, 1, 2]
        with pytest.raises(ContractError, match="not a function of a module"):
            client.once(lambda e: e, part)
    assert [len(meter._aways) for meter in meters] == [0, 1, 0, 1]
    alone = Client(replace(site, once=None), 3, 0, meters[0], None, {})
    assert alone.once(several, part)["n"] == 3
    assert not meters[0]._aways
