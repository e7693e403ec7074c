"""Clients' states on disk: what they remember is kept by content."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedaudit import State, freeze, registry, run
from fedaudit.errors import RunError, WireError
from fedaudit.runtime import checkpoint
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.engines.serial import SerialEngine
from fedaudit.runtime.task import ClientState, Done, Task
from fedaudit.wire.codec import decode, encode, encode_lazily, packing
from fedaudit.wire.codec.packing import Held


def state(memory: dict[str, Any], seed: int = 0) -> bytes:
    model = State({"w": torch.randn(40_000, generator=torch.Generator().manual_seed(seed))})
    return encode(ClientState(model, memory, 0, {}))


def large(seed: int) -> torch.Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(seed))


def parts(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}


def whole(store: Store, k: int) -> bytes | None:
    """Client k's state as bytes, whether it is held or not."""
    found = store.client(k)
    return None if found is None else bytes(found)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    small = {"t": 3, "x": torch.arange(5), "name": "a"}
    first = state({"b": [large(1), {"c": large(2)}], "a": large(1), **small})
    store.put_client(0, 1, 0, first)
    store.put_client(1, 1, 0, state(small))
    store.put_client(2, 1, 0, state({}))
    assert whole(store, 0) == first, "while it is written"
    store.settle()
    assert whole(store, 0) == first
    assert whole(store, 1) == state(small)
    assert whole(store, 2) == state({})
    assert len(parts(tmp_path)) == 2, "the same tensor twice is one file, and the model is none"
    assert (tmp_path / "client-000001.1.0").read_bytes() == state(small), "nothing large: the state itself"


def test_what_all_hold_lies_there_once_and_what_stays_is_not_written_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for k in range(5):
        store.put_client(k, 1, 0, state({"buffer": large(1)}, seed=k))
    store.commit(1, b"", {})
    before = parts(tmp_path)
    assert len(before) == 1
    for k in range(5):
        store.put_client(k, 2, 0, state({"buffer": large(1), "own": large(10 + k)}, seed=9 + k))
    store.commit(2, b"", {})
    after = parts(tmp_path)
    assert len(after) == 6
    assert before.items() <= after.items()
    assert sum(path.stat().st_size for path in tmp_path.glob("client-*")) < 5 * (4 * 40_000 + 2_000)
    for k in range(5):
        assert whole(store, k) == state({"buffer": large(1), "own": large(10 + k)}, seed=9 + k)


def test_what_nobody_remembers_any_more_goes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_client(0, 1, 0, state({"a": large(1)}))
    store.put_client(1, 1, 0, state({"a": large(1), "b": large(2)}))
    store.commit(1, b"", {})
    store.put_client(1, 2, 0, state({}))
    store.commit(2, b"", {})
    assert len(parts(tmp_path)) == 1
    store.put_client(0, 3, 0, state({}))
    assert len(parts(tmp_path)) == 1, "the round is not over: a kill would undo it"
    store.commit(3, b"", {})
    assert not parts(tmp_path)


def test_a_kill_leaves_the_last_whole_round(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_client(0, 1, 0, state({"a": large(1)}))
    store.commit(1, b"", {})
    store.put_client(0, 2, 0, state({"a": large(3)}))
    store.settle()  # written, and never committed
    again = Store(tmp_path)
    assert again.head() is not None
    assert whole(again, 0) == state({"a": large(1)})
    assert len(parts(tmp_path)) == 1
    damaged = next(tmp_path.glob("part-*"))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    again.put_client(1, 2, 0, state({"a": large(1)}))
    again.settle()
    assert whole(again, 1) == state({"a": large(1)}), "a part that was cut is written again"


def test_what_is_being_written_is_read_whole_and_a_failed_write_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow writes: a state is read as it was put, the round is committed after them. A full disk ends the round."""
    write = Store._write

    def slowly(self: Store, name: str, content: bytes) -> None:
        time.sleep(0.1 if name.startswith("client") else 0)
        write(self, name, content)

    monkeypatch.setattr(Store, "_write", slowly)
    store = Store(tmp_path)
    for k in range(6):  # more than may be on their way
        store.put_client(k, 1, 0, state({"b": large(1)}, k))
    assert len(store._pending) <= checkpoint.BEHIND
    assert whole(store, 5) == state({"b": large(1)}, 5)
    store.put_client(5, 1, 1, state({}, 7))
    store.commit(1, b"server", {})
    again = Store(tmp_path)
    assert again.head() is not None
    assert whole(again, 0) == state({"b": large(1)}, 0)
    assert whole(again, 5) == state({}, 7)

    def full(self: Store, name: str, content: bytes) -> None:
        if name.startswith("client"):
            raise OSError("no space left on device")
        write(self, name, content)

    monkeypatch.setattr(Store, "_write", full)
    store.put_client(0, 2, 0, state({}))
    with pytest.raises(OSError, match="no space left"):
        store.commit(2, b"server", {})
    assert Store(tmp_path).peek()["round"] == 1  # type: ignore[index]


def test_a_round_becomes_a_fact_while_the_next_goes_on(tmp_path: Path) -> None:
    """A part that no state refers to any more is swept with the round; the next round may bring it back before that."""
    store, go, followed = Store(tmp_path), threading.Event(), []
    store.put_client(0, 1, 0, state({"a": large(1)}))
    store.put_client(1, 1, 0, state({"b": large(2)}))
    store.commit(1, b"first", {})
    store.put_client(0, 2, 0, state({}, seed=5))

    def facts() -> dict[str, Any]:
        assert go.wait(20)
        return {"said": 2}

    store.commit_behind(2, b"second", facts, then=lambda: followed.append(Store(tmp_path).peek()["round"]))  # type: ignore[index]
    store.put_client(1, 3, 0, state({"a": large(1)}, seed=6))  # the part that round 2 is about to sweep
    assert whole(store, 1) == state({"a": large(1)}, seed=6), "while it is not on the disk yet"
    assert whole(store, 0) == state({}, seed=5)
    assert Store(tmp_path).peek()["round"] == 1, "it is no fact before all of it is there"  # type: ignore[index]
    go.set()
    store.settle()
    assert followed == [2]
    killed = Store(tmp_path)
    clients = {"0": "client-000000.2.0", "1": "client-000001.1.0"}
    assert killed.peek() == {"round": 2, "server": "server.2", "clients": clients, "said": 2}
    assert whole(killed, 1) == state({"b": large(2)})
    assert whole(store, 1) == state({"a": large(1)}, seed=6)
    store.commit(3, b"third", {})
    again = Store(tmp_path)
    again.head()
    assert whole(again, 1) == state({"a": large(1)}, seed=6)
    assert len(parts(tmp_path)) == 1


def test_after_a_write_that_failed_no_later_round_is_a_fact(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_client(0, 1, 0, state({}))
    store.commit(1, b"first", {})

    def full() -> dict[str, Any]:
        raise OSError("no space left on device")

    store.commit_behind(2, b"second", full)
    with pytest.raises(OSError, match="no space left"):
        store.settle()
    with pytest.raises(OSError, match="no space left"):
        store.commit(3, b"third", {})
    assert Store(tmp_path).peek()["round"] == 1  # type: ignore[index]
    store.abandon()


def test_a_round_keeps_one_new_state_of_a_client_beside_the_last_whole_rounds(tmp_path: Path) -> None:
    """A round of three asks does not take the disk of three."""
    store = Store(tmp_path)
    store.put_client(0, 1, 0, state({}, seed=1))
    store.commit(1, b"", {})
    for ask in (0, 1, 2):
        store.put_client(0, 2, ask, state({}, seed=2 + ask))
        store.settle()
        assert {path.name for path in tmp_path.glob("client-*")} == {"client-000000.1.0", f"client-000000.2.{ask}"}
    assert whole(store, 0) == state({}, seed=4)
    again = Store(tmp_path)
    again.head()
    assert whole(again, 0) == state({}, seed=1), "a kill undoes the round"


@pytest.mark.long
def test_an_unlimited_buffer_grows_by_one_copy_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DFFKE: every client remembers each round's decoder and all clients' embeddings."""
    monkeypatch.setattr(checkpoint, "LARGE", 1024)
    sizes: list[int] = []
    real = Store.commit_behind

    def commit(self: Store, t: int, *rest: Any, **more: Any) -> None:
        real(self, t, *rest, **more)
        self.settle()
        sizes.append(sum(path.stat().st_size for path in self.folder.glob("part-*")))

    monkeypatch.setattr(Store, "commit_behind", commit)
    quick = {**registry.find("dffke").quick, "R": "unlimited"}  # type: ignore[attr-defined]
    setting: dict[str, Any] = {"method": "dffke", "model": "mlp", "rounds": 3, "eval_every": 3, "set": quick}
    for clients in (2, 4):
        run(**setting, clients=clients, partition="iid", aux=0.8, eval_clients=False, out=tmp_path / str(clients))
    few, many = sizes[:4], sizes[4:]
    grown = [[b - a for a, b in itertools.pairwise(of)] for of in (few, many)]
    assert all(step > 0 for of in grown for step in of)
    assert max(grown[0][1:]) <= 1.1 * min(grown[0][1:]), "each round adds as much as the one before"
    assert max(grown[1][1:]) <= 1.1 * min(grown[1][1:])
    # What is remembered of a round is one decoder and one set of embeddings, whoever holds them; only what is each
    # client's own grows with their number, and the records are the same in both runs.
    assert grown[1][1] <= 1.5 * grown[0][1], "four clients store hardly more than two"


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    class Dies(SerialEngine):
        left = 15

        def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
            for done in super().map(tasks):
                self.left -= 1
                if self.left < 0:
                    raise Killed
                yield done

    monkeypatch.setattr(checkpoint, "LARGE", 1024)
    quick = {**registry.find("dffke").quick, "R": "unlimited"}  # type: ignore[attr-defined]
    setting: dict[str, Any] = {
        "method": "dffke",
        "model": "mlp",
        "rounds": 3,
        "clients": 2,
        "eval_every": 3,
        "aux": 0.6,
    }
    setting |= {"set": quick, "partition": "iid", "eval_clients": False}
    whole = run(**setting, out=tmp_path / "a")
    with pytest.raises(Killed):
        run(**setting, out=tmp_path / "b", engine=Dies())
    assert run(**setting, out=tmp_path / "b", resume=True).transcript_digest == whole.transcript_digest
    a, b = (sorted(path.name for path in (tmp_path / run / "checkpoint").iterdir()) for run in "ab")
    assert a == b
    assert any(name.startswith("part-") for name in a)


def test_how_much_of_a_device_states_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=48 << 30))
    assert checkpoint.room_for_states(torch.device("cuda")) == 3 << 30, "a sixteenth"
    assert checkpoint.room_for_states(torch.device("cpu")) == 16 << 20


def test_which_tensors_are_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 36, 40 and 44 bytes, of which 40 are large; the model is never one. They lie in any order."""
    monkeypatch.setattr(checkpoint, "LARGE", 40)
    memory = {"a": torch.arange(9.0), "b": [torch.arange(10.0), torch.arange(11.0)], "c": {"d": torch.arange(10.0) + 1}}
    blob = state(memory)
    found = checkpoint._remembered(blob)
    assert sorted(end - begin for _, begin, end in found) == [40, 40, 44]
    assert [begin for _, begin, _ in found] == sorted(begin for _, begin, _ in found)
    contents = {bytes(blob[begin:end]) for _, begin, end in found}
    assert contents == {t.numpy().tobytes() for t in (*memory["b"], memory["c"]["d"])}
    store = Store(tmp_path)
    store.put_client(0, 1, 0, blob)
    store.settle()
    assert len(parts(tmp_path)) == 3
    assert whole(store, 0) == blob
    assert (tmp_path / "client-000000.1.0").stat().st_size < len(blob) + 400


def written(pieces: str, rest: bytes = b"") -> bytes:
    """A state that refers to files, by hand."""
    return checkpoint._PARTS + len(pieces).to_bytes(8, "little") + pieces.encode() + rest


def test_references_to_files_are_read_as_they_were_written() -> None:
    part = f"part-{'0a' * 16}"
    pieces = [[0, 0, part], [7, 40, part]]
    assert checkpoint._split(written(json.dumps(pieces), b"its own")) == (pieces, b"its own")
    for wrong in (
        [[-1, 4, part]],
        [[4, -1, part]],
        [[1.0, 4, part]],
        [[1, True, part]],
        [[1, 4, "../x"]],
        [[1, 4]],
        [3],
    ):
        with pytest.raises(RunError, match="damaged"):
            checkpoint._split(written(json.dumps(wrong)))
    with pytest.raises(RunError, match="damaged"):
        checkpoint._split(written("no JSON"))
    own = checkpoint._without(b"0123456789", [[2, 3, part], [1, 2, part]])
    assert own == b"01" + b"5" + b"89"


HEAD = {"round": 2, "server": "server.2", "clients": {"3": "client-000003.2.0"}, "transcript": 5, "seq": 0,
        "attempt": 0, "clock": 1.5}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"round": -1}, {"round": 1.0}, {"round": True}, {"transcript": -1}, {"seq": "1"}, {"attempt": -1},
        {"clock": "x"}, {"server": "server"}, {"server": 3}, {"clients": []}, {"clients": {"3": "../client"}},
        {"clients": {"3": None}}, {"clients": {"x": "client-000003.2.0"}},
    ],
)  # fmt: skip
def test_a_head_names_its_own_files_and_whole_numbers(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "HEAD.json"
    path.write_text(json.dumps(HEAD))
    store = Store(tmp_path)
    assert store.peek() == HEAD
    assert store.clients == {3: "client-000003.2.0"}
    path.write_text(json.dumps(HEAD | change))
    with pytest.raises(RunError, match="is damaged"):
        store.peek()
    path.write_text("[]")
    with pytest.raises(RunError, match="is damaged"):
        store.peek()
    path.write_text(json.dumps({key: HEAD[key] for key in ("round", "server", "clients")}))
    assert store.peek() is not None, "the first version wrote less"


def test_facts_that_are_json_already_are_not_written_as_texts() -> None:
    text = checkpoint._json_of({"round": 1, "record": checkpoint.Json('{"a": 2}'), "note": "b"})
    assert text == '{"round": 1, "record": {"a": 2}, "note": "b"}'


def test_facts_of_the_last_round_can_be_changed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_client(0, 1, 0, state({}))
    store.commit(1, b"server", {"attempt": 0, "said": "a"})
    store.amend(attempt=3)
    again = Store(tmp_path)
    assert again.peek() == {
        "round": 1, "server": "server.1", "clients": {"0": "client-000000.1.0"}, "attempt": 3, "said": "a",
    }  # fmt: skip
    assert again.server("server.1") == b"server"
    again.amend(said="b")
    assert (again.peek() or {})["attempt"] == 3
    with pytest.raises(RunError, match=r"misses server\.9"):
        again.server("server.9")
    assert Store(tmp_path / "none").peek() is None
    assert Store(tmp_path / "none").client(0) is None


def test_what_waits_for_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many files, and together so many bytes; one alone may have more."""
    store = Store(tmp_path)
    monkeypatch.setattr(checkpoint, "ROOM", 100)
    monkeypatch.setattr(checkpoint, "BEHIND", 3)
    assert store._has_room(100)
    assert not store._has_room(101)
    store._pending = {"a": SimpleNamespace(size=40), "b": SimpleNamespace(size=20)}  # type: ignore[dict-item]
    assert store._has_room(40)
    assert not store._has_room(41)
    store._pending["c"] = SimpleNamespace(size=0)  # type: ignore[assignment]
    assert not store._has_room(0)
    store._pending = {}
    store.put_client(0, 1, 0, state({}))
    store.settle()
    assert whole(store, 0) == state({})


def test_links_are_not_followed_and_folders_are_made(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"kept")
    (tmp_path / ".x.tmp").symlink_to(tmp_path / "outside")
    checkpoint.write_atomic(tmp_path / "x", [b"a", b"", b"bc"])
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert (tmp_path / "outside").read_bytes() == b"kept"
    assert not (tmp_path / ".x.tmp").exists()
    checkpoint.write_atomic(tmp_path / "new" / "folder" / "y", b"d")
    assert (tmp_path / "new" / "folder" / "y").read_bytes() == b"d"
    (tmp_path / ".z.tmp").mkdir()
    with pytest.raises(IsADirectoryError):
        checkpoint.write_atomic(tmp_path / "z", b"")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_client(0, 1, 0, state({}))
    store.commit(1, b"first", {})
    stays = ["notes.txt", "client-3.1.0", "server.1.bak", "part-xyz"]
    for name in (*stays, "client-000009.1.0", "server.0", f"part-{'0' * 32}"):
        (tmp_path / name).touch()
    (tmp_path / "server.77").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "server.78").mkdir()
    Store(tmp_path).head()
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {*stays, "server.77", "server.78", "HEAD.json", "server.1", "client-000000.1.0"}


def test_all_that_a_round_wrote_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1 was asked in the round before: its state is there already."""
    synced: list[str] = []
    monkeypatch.setattr(checkpoint.os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    store = Store(tmp_path)
    store.put_client(0, 1, 0, state({}))
    store.put_client(1, 1, 0, state({"a": large(1)}))
    store.commit(1, b"first", {})
    (part,) = parts(tmp_path)
    assert synced == ["server.1", part, "client-000000.1.0", "client-000001.1.0", ".HEAD.json.tmp"]
    synced.clear()
    store.put_client(0, 2, 1, state({"a": large(1)}))
    store.commit(2, b"second", {})
    assert synced == ["server.2", "client-000000.2.1", ".HEAD.json.tmp"]


def test_a_file_that_is_gone_already_can_be_removed(tmp_path):
    (tmp_path / "part-a").write_bytes(b"a")
    store = SimpleNamespace(folder=tmp_path, _parts={"part-a": 1, "part-b": 2, "part-c": 3})
    Store._remove(store, "part-a")
    Store._remove(store, "part-b")
    assert list(tmp_path.iterdir()) == []
    assert store._parts == {"part-c": 3}


CPU = torch.device("cpu")
SEEDS = itertools.count(1000)  # nobody else in this process holds what is frozen here


def with_buffer(buffer: list[torch.Tensor], k: int) -> ClientState:
    """A state with frozen tensors, one of them small, between a model and other large tensors of several types."""
    memory = {
        "B": {t: freeze({"E": tensor, "n": torch.tensor([t])}) for t, tensor in enumerate(buffer)},
        "own": large(k),
        "also": torch.arange(9_000) + k,
        "few": torch.ones(3, dtype=torch.bool),
    }
    return ClientState(State({"w": torch.full((40_000,), float(k))}), memory, 0, {})


def buffer_of(n: int = 2) -> list[torch.Tensor]:
    tensors = [torch.randn(100, 300, generator=torch.Generator().manual_seed(next(SEEDS))) for _ in range(n)]
    return [*tensors, (tensors[0] > 0).repeat(3, 1), tensors[0].bfloat16().repeat(2, 1)]


def stored(folder: Path, buffer: list[torch.Tensor], clients: int = 3) -> list[bytes]:
    """Commit a round in which all clients hold a buffer; return their states."""
    store, states = Store(folder, stays=0), []
    for k in range(clients):
        state = with_buffer(buffer, k)
        states.append(encode(state))
        store.put_client(k, 1, 0, encode_lazily(state, CPU))
    store.commit(1, b"", {})
    return states


def opened(folder: Path) -> Store:
    store = Store(folder, stays=0)
    assert store.head() is not None
    return store


def frozen_parts(held: Any) -> dict[str, torch.Tensor]:
    """The frozen tensors of a state that lie in files, by the names of these."""
    assert isinstance(held, Held)
    found = {f"part-{content.digest}": content.of for content in held.frozen.values()}
    return {name: t for name, t in found.items() if t.nbytes >= checkpoint.LARGE}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What was read from parts, compared with its digest, and mapped."""
    found: dict[str, list[Any]] = {"read": [], "compared": [], "mapped": []}
    read, compare, mapped = Store._read, checkpoint._digest_in, torch.from_file

    def reads(self: Store, name: str) -> bytes:
        found["read"] += [name] if name.startswith("part-") else []
        return read(self, name)

    def compares(file: Any) -> str:
        found["compared"].append(Path(file.name).name)
        return compare(file)

    def maps(path: str, **given: Any) -> torch.Tensor:
        found["mapped"].append(Path(path).name)
        return mapped(path, **given)

    monkeypatch.setattr(Store, "_read", reads)
    monkeypatch.setattr(checkpoint, "_digest_in", compares)
    monkeypatch.setattr(torch, "from_file", maps)
    return found


def test_what_is_frozen_is_mapped_once_for_all_clients_and_not_read(
    tmp_path: Path, looks: dict[str, list[Any]]
) -> None:
    """And compared with its digest once, though it is mapped anew when nobody has held it for a while."""
    states = stored(tmp_path, buffer_of())
    store = opened(tmp_path)
    held = [store.client(k) for k in range(3)]
    frozen = [frozen_parts(state) for state in held]
    assert len(frozen[0]) == 4
    assert sorted(looks["mapped"]) == sorted(looks["compared"]) == sorted(frozen[0])
    assert not set(looks["read"]) & frozen[0].keys()
    assert len(looks["read"]) == 6, "what is large and not frozen: two for each client"
    for other in frozen[1:]:
        assert {name: t.data_ptr() for name, t in other.items()} == {n: t.data_ptr() for n, t in frozen[0].items()}
    names = [*frozen[0]]
    assert [bytes(state or b"") for state in held] == states
    del held, frozen, other
    for k in (0, 1, 2, 0):
        assert whole(store, k) == states[k], "each was dropped before the next"
    assert len(looks["mapped"]) == 4 * 5
    assert sorted(looks["compared"]) == sorted(names)


def test_what_a_live_client_holds_is_taken_from_it(tmp_path: Path, looks: dict[str, list[Any]]) -> None:
    buffer = buffer_of()
    stored(tmp_path, buffer)
    mine = with_buffer(buffer, 7)
    found = decode(opened(tmp_path).client(1) or b"", ClientState)
    assert not looks["mapped"]
    for t in mine.memory["B"]:
        assert found.memory["B"][t].inside["E"] is mine.memory["B"][t].inside["E"]


def test_a_state_is_put_again_as_it_was_without_its_frozen_parts(tmp_path: Path, looks: dict[str, list[Any]]) -> None:
    """Decoded by a client, encoded again and written: the same bytes in the same files, and frozen ones untouched."""
    states = stored(tmp_path, buffer_of())
    before, own = parts(tmp_path), (tmp_path / "client-000001.1.0").read_bytes()
    store = opened(tmp_path)
    again = encode_lazily(decode(store.client(1) or b"", ClientState), CPU)
    assert isinstance(again, Held)
    store.put_client(1, 2, 0, again)
    store.commit(2, b"", {})
    assert bytes(again) == states[1]
    assert (tmp_path / "client-000001.2.0").read_bytes() == own
    assert parts(tmp_path) == before
    assert packing.digest(again.text, again.tensors, again.frozen) == again.digest


def test_nobody_changes_a_file_through_its_mapping(tmp_path: Path) -> None:
    stored(tmp_path, buffer_of())
    state = opened(tmp_path).client(0)
    for name, tensor in frozen_parts(state).items():
        content = (tmp_path / name).read_bytes()
        tensor.zero_()
        assert (tmp_path / name).read_bytes() == content
        assert any(content)


def test_what_is_mapped_outlives_its_file(tmp_path: Path) -> None:
    """A round in which everybody forgot it sweeps the file away. It is written again if it comes back."""
    states = stored(tmp_path, buffer_of())
    store = opened(tmp_path)
    held = store.client(0)
    names = frozen_parts(held).keys()
    for k in range(3):
        store.put_client(k, 2, 0, state({}, seed=k))
    store.commit(2, b"", {})
    assert not parts(tmp_path)
    assert not store._compared
    assert bytes(held or b"") == states[0]
    store.put_client(0, 3, 0, held or b"")
    store.commit(3, b"", {})
    assert names <= parts(tmp_path).keys()
    del held
    assert whole(opened(tmp_path), 0) == states[0]


def test_a_file_that_is_mapped_is_never_written_over(tmp_path: Path) -> None:
    """Else its mapping would change, and to read it while the file is short would end the process."""
    content = large(next(SEEDS))
    store = Store(tmp_path)
    name = store._keep(packing.raw(content))
    mapped = store._mapped(name, content.nbytes)
    before = (tmp_path / name).stat().st_ino
    with open(tmp_path / name, "ab") as file:  # longer than it should be
        file.write(b"more")
    assert store._keep(packing.raw(content)) == name
    assert (tmp_path / name).stat().st_ino != before
    assert torch.equal(mapped.view(torch.float32), content)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "changed"])
def test_a_damaged_part_is_named(damage: str, frozen: bool, tmp_path: Path) -> None:
    stored(tmp_path, buffer_of())
    held = opened(tmp_path).client(0)
    known = frozen_parts(held).keys()
    own = {f"part-{held.content(i)}" for i in range(len(held.spans))}  # type: ignore[union-attr]
    name = min(known if frozen else (own & parts(tmp_path).keys()) - known)
    del held
    path, store = tmp_path / name, opened(tmp_path)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-4], "longer": content + b"0000", "changed": b"1" + content[1:]}[damage])
    words = {
        "cut": f"{name} in the checkpoint is damaged: it has {len(content) - 4} bytes, and {len(content)} were written",
        "longer": f"{name} in the checkpoint is damaged: it has {len(content) + 4} bytes, and {len(content)} were",
        "gone": f"The checkpoint misses {name}: ",
        "changed": f"{name} in the checkpoint is damaged: its content is not the one that was written. Start the run",
    }
    if damage == "changed" and not frozen:
        with pytest.raises(WireError, match="the checksum does not match"):
            store.client(0)
        return
    with pytest.raises(RunError, match=words[damage]):
        store.client(0)


def test_a_part_that_changed_after_it_was_compared_is_compared_again(tmp_path: Path) -> None:
    stored(tmp_path, buffer_of())
    store = opened(tmp_path)
    name = min(frozen_parts(store.client(0)))
    path = tmp_path / name
    path.write_bytes(b"1" + path.read_bytes()[1:])
    os.utime(path, ns=(1, 1))
    with pytest.raises(RunError, match=f"{name} in the checkpoint is damaged: its content"):
        store.client(0)


def test_a_state_that_names_another_part_is_refused(tmp_path: Path) -> None:
    """Two frozen tensors of one size: only the digests in the names of their files tell which is which."""
    stored(tmp_path, buffer_of())
    one, other = [*frozen_parts(opened(tmp_path).client(0))][:2]
    path = tmp_path / "client-000000.1.0"
    text = path.read_bytes()
    path.write_bytes(
        text.replace(one.encode(), b"?").replace(other.encode(), one.encode()).replace(b"?", other.encode(), 1)
    )
    with pytest.raises(WireError, match="damaged"):
        opened(tmp_path).client(0)
