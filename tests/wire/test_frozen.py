"""What a client keeps frozen: how it is read, that nobody can change it, and that it is held and written once."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaudit import Frozen, LowRank, Record, State, Up, freeze, public, registry, run
from fedaudit.errors import ContractError, WireError
from fedaudit.privacy.provenance import Provenance
from fedaudit.runtime import checkpoint
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.task import ClientState
from fedaudit.wire.codec import decode, digest_of, encode, encode_lazily, grammar, packing, tree_of
from fedaudit.wire.codec.inspection import frozen_in, tensors_in
from fedaudit.wire.message import Size

CPU = torch.device("cpu")
LARGE = torch.arange(40_000.0)  # 160 000 bytes


def some() -> dict[str, Any]:
    return {"Dec": State({"w": torch.ones(2, 2), "n": torch.tensor([3.0])}, buffers=["n"]), "E": {4: LARGE.view(-1, 4)}}


def kept(memory: dict[str, Any], seed: int = 0) -> ClientState:
    return ClientState(State({"w": torch.full((100,), float(seed))}), memory, 0, {})


def tensor_of(state: ClientState) -> Tensor:
    found: Tensor = state.memory["B"].inside["E"][4]
    return found


def test_a_frozen_value_is_read_by_its_keys_and_rows() -> None:
    frozen = freeze(some())
    assert (frozen.keys(), frozen.keys("E"), frozen.keys("Dec")) == (["Dec", "E"], [4], ["w", "n"])
    assert (frozen.rows("E", 4), frozen.size("Dec")) == (10_000, Size(16, 4))
    assert frozen.size("E", 4) == Size(160_000)
    assert frozen.read("E", 4, rows=torch.tensor([2, 0])).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    whole = frozen.read()
    assert torch.equal(whole["E"][4].flatten(), LARGE)
    assert isinstance(whole["Dec"], State)
    assert list(whole["Dec"].buffers) == ["n"]


def test_nobody_changes_a_frozen_value() -> None:
    """Neither who froze it, nor who read it."""
    mine = some()
    frozen = freeze(mine)
    before = digest_of(frozen)
    mine["E"][4].add_(0)
    mine["Dec"]["w"].zero_()
    for read in (frozen.read("Dec")["w"], frozen.read("E", 4), frozen.read("E", 4, rows=torch.arange(10_000))):
        read.fill_(7)
    assert frozen.read("Dec")["w"].tolist() == [[1, 1], [1, 1]]
    assert torch.equal(frozen.read("E", 4).flatten(), LARGE)
    assert digest_of(frozen) == before == digest_of(freeze(some()))


def test_what_is_not_there_is_named() -> None:
    frozen = freeze(some())
    with pytest.raises(ContractError, match=r"A frozen value has no 5 under \['E'\]. Look at its `keys`"):
        frozen.read("E", 5)
    with pytest.raises(ContractError, match=r"A frozen value has no 'e'\. Look at its `keys`"):
        frozen.keys("e")
    with pytest.raises(ContractError, match=r"\['Dec'\] of a frozen value is a State. Only tensors have rows"):
        frozen.read("Dec", rows=torch.tensor([0]))


class Pair(Record):
    a: Any
    b: Any


class OtherPair(Record):
    a: Any
    b: Any


ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])
UNLIKE: list[list[Any]] = [
    [ONE, TWO, ONE.double(), ONE.view(1, 1), ONE.view(torch.int32), ONE[:0], ONE[:0].double()],
    [[1], [1.0], [True], ["1"], [None], ["None"], [0.0], [-0.0], [], [[]], ["list"], (), (1,), {}, "dict", {0: 1}],
    [{"a": ONE, "b": TWO}, {"b": ONE, "a": TWO}, {"a": ONE, "b": ONE}, {"a": ONE}, {"b": ONE}, {1: ONE}, {"1": ONE}],
    [{"a": {"b": ONE}}, {"a/'b'": ONE}, {"a": [ONE]}, {"a": ()}, {"a": ("tuple",)}, {"a": "tuple"}],
    [Pair(ONE, 1), Pair(1, ONE), OtherPair(ONE, 1), {"a": ONE, "b": 1}, Pair(ONE, 1.0)],
    [State({"a": ONE, "b": TWO}, names) for names in ([], ["a"], ["b"], ["a", "b"])],
    [{"a": ONE, "b": TWO}, State({"a": ONE, "b": TWO})],
]


@pytest.mark.parametrize("unlike", UNLIKE)
def test_a_part_is_told_from_every_other_content(unlike: list[Any]) -> None:
    """By types, names and what holds them too: 1 and True are equal, and work on them need not be."""
    keys = [freeze(value).part().key for value in unlike]
    assert len(set(keys)) == len(unlike)
    assert keys == [freeze({"in": copy.deepcopy(value)}).part("in").key for value in unlike], "and by nothing else"
    assert keys == [copy.deepcopy(freeze(value)).part().key for value in unlike]


def test_a_part_is_known_by_its_rows() -> None:
    frozen = freeze({"E": torch.arange(6.0), "F": torch.arange(6.0) + 1})
    chosen = [[2, 0], [0, 2], [2], [2, 0, 0], [], [5]]
    parts = [frozen.part("E", rows=torch.tensor(rows, dtype=torch.long)) for rows in chosen]
    assert len({part.key for part in (*parts, frozen.part("E"), frozen.part("F", rows=torch.tensor([2, 0])))}) == 8
    assert [part.read().tolist() for part in parts] == chosen
    assert frozen.part("E", rows=torch.tensor([9, 2, 9, 0])[1::2]).key == parts[0].key
    one = frozen.part("E", rows=torch.tensor(2))
    assert (one.key, one.read().tolist()) == (parts[2].key, [2])
    wide = [frozen.part("E", rows=rows).key for rows in (torch.tensor([1]), torch.tensor([1, 0], dtype=torch.int32))]
    assert wide[0] != wide[1], "though their bytes are the same"


def test_the_content_of_a_part_is_the_same_on_every_device() -> None:
    here = freeze({"E": ONE, "n": 1})
    content = packing.Content(here.contents[0].digest)
    there = Frozen({"E": content.held(ONE.to("meta"), torch.detach), "n": 1}, [content])
    assert there.part().key == here.part().key
    assert (here.part().devices, there.part("E").devices) == (("cpu",), ("meta",))


def test_what_lies_in_main_memory_is_read_on_the_clients_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client elsewhere leaves it there, and copies what it reads. If that device holds the tensor, it takes that."""
    meta = torch.device("meta")
    held = encode_lazily(kept({"B": freeze(some())}), CPU)
    assert isinstance(held, packing.Held)
    found = decode(held, ClientState, device=meta).memory["B"]
    assert found.inside["E"][4].device == CPU
    whole = found.read()
    for t in (whole["E"][4], whole["Dec"]["n"], found.read("Dec")["w"], found.read("E", 4, rows=torch.tensor([1]))):
        assert t.device == meta
    assert found.part("Dec").devices == ("meta", "meta")
    assert found.part("E", 4, rows=torch.tensor([1])).devices == ("meta",)
    assert found.part("E", 4, rows=torch.tensor([1])).read().shape == (1, 4)
    assert digest_of(found) == digest_of(freeze(some()))
    assert copy.deepcopy(found).read("E", 4).device == meta
    there = packing.frozen_content(tensor_of(decode(held, ClientState)).to(meta), held.frozen[3].digest)
    assert decode(held, ClientState, device=meta).memory["B"].inside["E"][4] is there.of
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    assert decode(held, ClientState, device=meta).memory["B"].inside["Dec"]["w"].device == meta, (
        "it lies on a third one"
    )


@pytest.mark.parametrize("read_back", [False, True])
def test_who_changes_what_all_clients_hold_is_told(read_back: bool) -> None:
    """`read` gives copies. Who writes into the value itself is told so, and so are the others who hold it."""

    def value() -> dict[str, Any]:
        return {"E": {4: LARGE + 5 + read_back}}  # nobody else holds that

    mine, other, apart = (kept({"B": freeze(value())}) for _ in range(3))
    if read_back:
        mine = decode(encode(mine), ClientState)
    apart, model, seen = copy.deepcopy(apart), torch.nn.Linear(1, 1), Provenance(None, [], {})
    seen.look(model, mine.memory)
    tensor_of(mine)[:2].zero_()
    told = "was changed in place after it was frozen, for all clients that hold it. Change a copy: what its `read`"
    with pytest.raises(ContractError, match=f"^value {told}"):
        seen.settle(model, mine.memory)
    with pytest.raises(ContractError, match=rf"^ClientState\.memory\['B'\] {told}"):
        encode_lazily(other, CPU)
    assert torch.equal(apart.memory["B"].read("E", 4), value()["E"][4])
    assert digest_of(apart.memory), "a copy is another tensor, which nobody changed"


def test_a_value_may_be_frozen_in_inference_mode() -> None:
    """Torch does not count changes of a tensor that was made there."""
    with torch.inference_mode():
        frozen = freeze(LARGE + 9)
    assert digest_of(frozen) == digest_of(decode(encode(kept({"B": frozen})), ClientState).memory["B"])


def test_only_what_has_keys_gives_keys() -> None:
    """The "keys" of a list would be the tensors that all clients hold, and those of a tensor its rows."""
    frozen = freeze({"E": torch.ones(2, 2), "l": [torch.ones(3)], "n": 1})
    for key, kind in (("E", "Tensor"), ("l", "list"), ("n", "int")):
        with pytest.raises(ContractError, match=rf"\['{key}'\] of a frozen value is a {kind}. Only dicts and states"):
            frozen.keys(key)
    with pytest.raises(ContractError, match=r"^A frozen value is a list. Only dicts and states have keys. Call `read`"):
        freeze([LARGE]).keys()


def test_what_cannot_travel_cannot_be_frozen() -> None:
    with pytest.raises(WireError, match=r"what is frozen\['a'\] holds NaN or infinity"):
        freeze({"a": torch.tensor([torch.inf])})
    with pytest.raises(WireError, match=r"what is frozen\['a'\] is frozen, which stays with its client as it is"):
        freeze({"a": freeze(LARGE)})
    frozen = freeze(LARGE)
    assert freeze(frozen) is frozen


class Told(Up):
    value: Any = public()


def test_a_message_cannot_hold_a_frozen_value() -> None:
    for encoded in (encode, lambda message: encode_lazily(message, CPU)):
        with pytest.raises(
            WireError, match=r"Told\.value\['a'\] is frozen, which stays with its client as it is. Take"
        ):
            encoded(Told({"a": freeze(LARGE)}))

    class Sly(Frozen):
        pass

    with pytest.raises(WireError, match=r"A subclass may misreport its content\. Send a plain Frozen"):
        encode(kept({"a": Sly(LARGE, [])}))


def test_a_message_with_a_frozen_value_is_refused_on_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender whose codec lets it pass."""
    with monkeypatch.context() as sender:
        sender.setattr(grammar, "_stays", lambda record: True)
        blobs = [encode(Told(freeze(LARGE))), encode_lazily(Told(freeze(LARGE)), CPU)]
    for blob in blobs:
        with pytest.raises(WireError, match="A Told arrived with a frozen value, which stays with its client"):
            decode(blob, Told)


def test_the_digest_is_that_of_the_content() -> None:
    one = digest_of({"a": freeze(some())})
    assert one == digest_of({"a": freeze(some())})
    assert one != digest_of({"a": some()})
    for key, value in (("E", {4: LARGE.view(-1, 4) + 1}), ("E", {5: LARGE.view(-1, 4)}), ("E", {4: LARGE.view(4, -1)})):
        assert one != digest_of({"a": freeze({**some(), key: value})})


def test_a_state_is_the_same_held_and_as_bytes() -> None:
    state = kept({"B": freeze(some()), "x": LARGE + 1})
    held, blob = encode_lazily(state, CPU), encode(state)
    assert bytes(held) == blob
    assert len(held) == len(blob)
    tree, _ = tree_of(blob)
    assert len(tensors_in(tree)) == 5
    assert len(frozen_in(tree)) == 3
    for stored in (held, blob):
        again = decode(stored, ClientState)
        assert type(again.memory["B"]) is Frozen
        assert digest_of(again.memory["B"]) == digest_of(state.memory["B"])
        assert torch.equal(again.memory["B"].read("E", 4).flatten(), LARGE)
        assert encode(again) == blob


def test_all_clients_of_a_process_hold_one_copy() -> None:
    """Each froze what it got by itself. Held or read from bytes, it is one tensor; everything else is a copy."""
    states = [kept({"B": freeze(some()), "x": LARGE + 1}, seed) for seed in (0, 1)]
    found = [decode(encode_lazily(state, CPU), ClientState) for state in states]
    found += [decode(encode(state), ClientState) for state in states]
    assert len({tensor_of(state).data_ptr() for state in (*states, *found)}) == 1
    assert len({state.memory["x"].data_ptr() for state in found}) == 4
    held = encode_lazily(states[0], CPU)
    assert isinstance(held, packing.Held)
    there = held.copies(CPU)
    assert [there[i] is content.of for i, content in held.frozen.items()] == [True] * 3, "and no copy is made for it"


def test_a_state_of_low_rank_is_frozen_as_it_would_arrive() -> None:
    """It travels as two factors and a bias, and arrives as a matrix and a bias."""
    state = State({"w": torch.outer(torch.arange(20.0), torch.ones(20)), "b": torch.ones(3)})
    frozen = freeze({"a": LowRank(state, energy=0.9)})
    assert frozen.keys("a") == ["w", "b"]
    assert torch.allclose(frozen.read("a", "w"), state["w"], atol=1e-5)
    again = decode(encode(kept({"B": frozen})), ClientState).memory["B"]
    assert digest_of(again) == digest_of(frozen)
    assert torch.equal(again.read("a")["w"], frozen.read("a")["w"])


def test_a_frozen_tensor_that_lies_elsewhere_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    held = encode_lazily(ClientState(State(), {"B": freeze(LARGE)}, 0, {}), CPU)
    assert isinstance(held, packing.Held)
    assert held.seen(CPU) is not None
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    assert held.seen(CPU) is None


def test_damage_to_a_frozen_tensor_is_seen() -> None:
    blob = bytearray(encode(kept({"B": freeze(some())})))
    at = bytes(blob).index(LARGE[:64].numpy().tobytes())
    blob[at + 8] ^= 1
    with pytest.raises(WireError, match="the checksum does not match"):
        decode(bytes(blob), ClientState)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if all tensors lay on a GPU: the bytes of each transfer from it."""
    bytes_of: list[int] = []
    real = packing._brought

    def counted(flat: Tensor, ready: Any = None) -> Tensor:
        bytes_of.append(flat.nbytes)
        return real(flat, ready)

    monkeypatch.setattr(packing, "_brought", counted)
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    return bytes_of


def test_a_frozen_tensor_leaves_its_device_to_be_frozen_and_to_be_written(brought: list[int], tmp_path: Path) -> None:
    """Two clients freeze it, which takes a look each. One file is written, and none in the rounds after."""
    store = Store(tmp_path)
    frozen = [freeze(some()) for _ in range(2)]
    assert sorted(brought) == [4, 4, 16, 16, 160_000, 160_000]
    brought.clear()
    for t in (1, 2, 3):
        for k in (0, 1):
            store.put_client(k, t, 0, encode_lazily(kept({"B": frozen[k], "t": t}, k), CPU))
        store.commit(t, b"", {})
    assert brought.count(160_000) == 1, "when its file was written"
    assert sum(brought) < 160_000 + 6 * 500, "else the models and what is small"
    brought.clear()
    for value in frozen:
        digest_of({"B": value})
    assert not brought
    again = Store(tmp_path)
    again.head()
    state = decode(again.client(1) or b"", ClientState)
    assert torch.equal(state.memory["B"].read("E", 4).flatten(), LARGE)
    assert len(list(tmp_path.glob("part-*"))) == 1


@pytest.mark.parametrize("stays", [0, 1 << 30])
def test_what_was_forgotten_and_comes_back_is_written_again(stays: int, tmp_path: Path) -> None:
    """The file of a tensor that nobody holds is removed. A client that misses that round gets it again (DFFKE)."""
    store = Store(tmp_path, stays)
    for t, values in enumerate(([LARGE], [LARGE + 1], [LARGE, LARGE + 1], [], [LARGE]), 1):
        store.put_client(0, t, 0, encode_lazily(kept({"B": [freeze(value) for value in values]}), CPU))
        store.commit(t, b"", {})
        assert len(list(tmp_path.glob("part-*"))) == len(values)
        again = Store(tmp_path)
        again.peek()
        found = decode(again.client(0) or b"", ClientState).memory["B"]
        assert [value.read().tolist() for value in found] == [value.tolist() for value in values]


def test_a_frozen_tensor_takes_room_once(brought: list[int], tmp_path: Path) -> None:
    """Five states of 160 000 bytes and a few stay in a room of 200 000; with a tensor of their own one of them does."""
    for memory, stay in ((lambda: {"B": freeze(some())}, 5), (lambda: {"B": some()}, 1)):
        store = Store(tmp_path / str(stay), stays=200_000)
        for t, k in itertools.product((1, 2, 3), range(5)):
            store.put_client(k, t, 0, encode_lazily(kept(memory(), k), CPU))
        store.settle()
        assert sum(store.client(k) is store.client(k) for k in range(5)) == stay


def test_room_is_counted_without_a_look_at_the_other_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hundredth client costs what the second did, or a round would cost their number squared."""
    store, seen = Store(tmp_path, stays=1 << 30), []

    def shared(held: packing.Held) -> dict[int, int]:
        seen.append(held)
        return {id(content): 160_000 for content in held.frozen.values()}

    monkeypatch.setattr(packing.Held, "shared", property(shared))
    looks = []
    for k in range(100):
        store.put_client(k, 1, 0, encode_lazily(kept({"B": freeze(LARGE)}, k), CPU))
        looks.append(len(seen))
        seen.clear()
    assert looks[99] == looks[1]


def test_memory_that_was_frozen_anew_after_a_look_is_a_change() -> None:
    model = torch.nn.Linear(1, 1)
    for after, dirty in ((some(), False), ({**some(), "E": {4: LARGE.view(-1, 4) * 2}}, True)):
        seen = Provenance(None, [], {})
        seen.look(model, {"B": freeze(some())})
        seen.settle(model, {"B": freeze(after)})
        assert seen.dirty is dirty


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"embed": True, "review": True, "fresh": "decoder"}, {"sync": True}])
def test_a_run_sends_the_same_where_states_stay_on_their_device(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DFFKE with an unlimited buffer: as on a GPU, with all tensors gathered and all states held, and as on a CPU."""
    quick = {**registry.find("dffke").quick, "R": "unlimited", **more}  # type: ignore[attr-defined]
    setting: dict[str, Any] = {"method": "dffke", "model": "mlp", "rounds": 3, "clients": 3, "eval_clients": False}
    here = run(**setting, set=quick, out=tmp_path / "here")
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    monkeypatch.setattr(checkpoint, "STAYS_HERE", 1 << 40)
    there = run(**setting, set=quick, out=tmp_path / "there")
    assert there.transcript_digest == here.transcript_digest
