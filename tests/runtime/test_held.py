"""Messages and states that stay in the process, as on a GPU: they are what their bytes would be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outside import Sent, Shared

from fedaudit import Down, State, registry, run
from fedaudit.errors import WireError
from fedaudit.runtime import checkpoint
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.task import ClientState, received
from fedaudit.wire import packing
from fedaudit.wire.codec import content_of, decode, encode, hold, read_header
from fedaudit.wire.packing import Held

CPU = torch.device("cpu")


@pytest.fixture(params=["one by one", "gathered"])
def held_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU: messages are held; gathered, with all tensors of a type in one."""
    if request.param == "gathered":
        monkeypatch.setattr(packing, "_is_home", lambda t: False)
    packing.HELD_ON.add("cpu")
    yield
    packing.HELD_ON.discard("cpu")


def shared() -> Shared:
    return Shared(torch.randn(4, 3).T, torch.arange(3), State({"w": torch.randn(5), "n": torch.tensor(3)}, ["n"]), 1)


def test_a_message_is_what_its_bytes_are(held_here: None) -> None:
    message = shared()
    held, blob = hold(message, CPU), encode(message)
    assert isinstance(held, Held)
    assert bytes(held) == blob
    assert len(held) == len(blob)
    assert copy.copy(held) == blob, "what pickle would make of it in another process"
    assert read_header(held) == read_header(blob)
    ours, theirs = (content_of(of, read_header(of)) for of in (held, blob))
    assert all(bytes(ours(i)) == bytes(theirs(i)) for i in range(4))
    message.e.zero_()  # who sent it goes on
    message.w["w"].zero_()
    first = decode(held, Shared)
    wanted = decode(blob, Shared)
    assert torch.equal(first.e, wanted.e)
    assert first.e.is_contiguous()
    first.e.zero_()  # and who received it does what he likes
    first.w["w"].zero_()
    again = decode(held, Shared)
    assert torch.equal(again.e, wanted.e)
    assert torch.equal(again.w["w"], wanted.w["w"])
    assert (again.w.buffers, again.t) == (wanted.w.buffers, wanted.t)
    assert bytes(held) == blob
    with pytest.raises(WireError, match="A Shared arrived where a Down was expected"):
        decode(held, Down)


def test_a_broadcast_that_is_held_is_copied_for_each(held_here: None) -> None:
    held = hold(Sent(State({"w": torch.ones(3)})), CPU)
    first = received(held, CPU)
    assert isinstance(first, Sent)
    first.w["w"].zero_()
    second = received(held, CPU)
    assert isinstance(second, Sent)
    assert second.w["w"].tolist() == [1, 1, 1]


def test_only_finite_values_are_held(held_here: None) -> None:
    with pytest.raises(WireError, match=r"Sent\.w\['w'\] holds NaN or infinity"):
        hold(Sent(State({"w": torch.tensor([1.0, torch.inf])})), CPU)


def test_where_bytes_are_made_at_once_nothing_is_held() -> None:
    assert isinstance(hold(shared(), CPU), bytes)


def kept(seed: int, memory: dict[str, Any]) -> ClientState:
    model = State({"w": torch.randn(30_000, generator=torch.Generator().manual_seed(seed))})
    return ClientState(model, memory, 0, {})


def test_a_state_that_is_held_lies_on_the_disk_as_its_bytes_would(held_here: None, tmp_path: Path) -> None:
    large = torch.arange(40_000.0)
    states = {0: kept(0, {"a": large, "b": [3, large + 1]}), 1: kept(1, {"c": large}), 2: kept(2, {})}
    one, two = Store(tmp_path / "held", stays=700_000), Store(tmp_path / "bytes")  # room for the first, and the last
    for k, state in states.items():
        one.put_client(k, 1, 0, hold(state, CPU))
        two.put_client(k, 1, 0, encode(state))
        assert bytes(one.client(k) or b"") == encode(state)
    one.settle()
    assert [isinstance(one.client(k), Held) for k in states] == [True, False, True]
    one.commit(1, b"", {})
    two.commit(1, b"", {})
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / of).iterdir()} for of in ("held", "bytes"))
    assert a == b
    assert sum(name.startswith("part-") for name in a) == 2
    again = Store(tmp_path / "held")
    again.head()
    assert [again.client(k) for k in states] == [encode(state) for state in states.values()]
    one.put_client(1, 2, 0, hold(states[2], CPU))
    one.put_client(1, 2, 1, hold(states[2], CPU))
    one.settle()
    assert not list((tmp_path / "held").glob("client-*.2.*")), "it is written with the round"
    one.put_client(0, 2, 0, encode(states[2]))
    assert one.client(0) == encode(states[2]), "another state has taken the held one's place"
    one.put_client(0, 2, 1, hold(states[1], CPU))
    assert isinstance(one.client(0), Held)
    one.peek()  # the round is undone
    assert one.client(0) == encode(states[0])


class Killed(Exception):
    pass


@pytest.mark.parametrize(("method", "engine"), [("fedavg", "stacked"), ("dffke", "serial")])
def test_a_run_whose_messages_are_held_is_the_same(
    method: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message and state, to the byte; killed and gone on with, too."""
    monkeypatch.setattr(checkpoint, "LARGE", 1024)
    quick = dict(registry.find(method).quick)  # type: ignore[attr-defined]
    setting: dict[str, Any] = {"method": method, "set": quick, "model": "mlp", "clients": 2, "aux": 0.6, "rounds": 2}
    setting |= {"eval_every": 2, "engine": engine, "partition": "iid", "eval_clients": False}

    def die(done: int, rounds: int, what: str) -> None:
        if done == 1 and "1/2 clients" in what:
            raise Killed

    was_held: list[bool] = []
    real = Store.put_client

    def put(self: Store, k: int, t: int, ask: int, state: Any) -> None:
        was_held.append(isinstance(state, Held))
        real(self, k, t, ask, state)

    monkeypatch.setattr(Store, "put_client", put)
    plain = run(**setting, out=tmp_path / "plain")
    assert not any(was_held)
    packing.HELD_ON.add("cpu")
    try:
        held = run(**setting, out=tmp_path / "held")
        assert was_held[-1]
        with pytest.raises(Killed):
            run(**setting, out=tmp_path / "cut", watch=die)
        cut = run(**setting, out=tmp_path / "cut", resume=True)
    finally:
        packing.HELD_ON.discard("cpu")
    assert held.transcript_digest == plain.transcript_digest == cut.transcript_digest
    assert held.traffic == plain.traffic
    for part in ("checkpoint", "models", "transcript"):
        a, b, c = (
            {path.name: path.read_bytes() for path in (tmp_path / of / part).iterdir()
             if path.suffix not in (".json", ".jsonl")}
            for of in ("plain", "held", "cut")
        )  # fmt: skip
        assert a == b == c
