"""Messages and states that stay in the process: they are what their bytes would be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outside import Sent, Shared

from fedaudit import Down, State, Up, public, registry, relay, run
from fedaudit.errors import ContractError, WireError
from fedaudit.runtime import checkpoint, task
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.task import ClientState, Done, Task, received, run_task
from fedaudit.wire.codec import content_of, decode, encode, encode_lazily, packing, read_header
from fedaudit.wire.codec.packing import Held

CPU = torch.device("cpu")


@pytest.fixture(params=["one by one", "gathered"])
def held_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are held; gathered, with all tensors of a type in one, as on a GPU."""
    if request.param == "gathered":
        monkeypatch.setattr(packing, "_is_home", lambda t: False)


def shared() -> Shared:
    return Shared(torch.randn(4, 3).T, torch.arange(3), State({"w": torch.randn(5), "n": torch.tensor(3)}, ["n"]), 1)


def test_a_message_is_what_its_bytes_are(held_here: None) -> None:
    message = shared()
    held, blob = encode_lazily(message, CPU), encode(message)
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
    held = encode_lazily(Sent(State({"w": torch.ones(3)})), CPU)
    first = received(held, CPU)
    assert isinstance(first, Sent)
    first.w["w"].zero_()
    second = received(held, CPU)
    assert isinstance(second, Sent)
    assert second.w["w"].tolist() == [1, 1, 1]


def test_only_finite_values_are_held(held_here: None) -> None:
    with pytest.raises(WireError, match=r"Sent\.w\['w'\] holds NaN or infinity"):
        encode_lazily(Sent(State({"w": torch.tensor([1.0, torch.inf])})), CPU)


def test_for_another_process_nothing_is_held() -> None:
    message = shared()
    assert encode_lazily(message, None) == encode(message)


def kept(seed: int, memory: dict[str, Any]) -> ClientState:
    model = State({"w": torch.randn(30_000, generator=torch.Generator().manual_seed(seed))})
    return ClientState(model, memory, 0, {})


def test_a_state_that_is_held_lies_on_the_disk_as_its_bytes_would(held_here: None, tmp_path: Path) -> None:
    large = torch.arange(40_000.0)
    states = {0: kept(0, {"a": large, "b": [3, large + 1]}), 1: kept(1, {"c": large}), 2: kept(2, {})}
    one, two = Store(tmp_path / "held", stays=700_000), Store(tmp_path / "bytes")  # room for the first, and the last
    for k, state in states.items():
        one.put_client(k, 1, 0, encode_lazily(state, CPU))
        two.put_client(k, 1, 0, encode(state))
        assert bytes(one.client(k) or b"") == encode(state)
    one.settle()
    assert [one.client(k) is one.client(k) for k in states] == [True, False, True], "else it is read each time"
    one.commit(1, b"", {})
    two.commit(1, b"", {})
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / of).iterdir()} for of in ("held", "bytes"))
    assert a == b
    assert sum(name.startswith("part-") for name in a) == 2
    again = Store(tmp_path / "held")
    again.head()
    assert [bytes(again.client(k) or b"") for k in states] == [encode(state) for state in states.values()]
    one.put_client(1, 2, 0, encode_lazily(states[2], CPU))
    one.put_client(1, 2, 1, encode_lazily(states[2], CPU))
    one.settle()
    assert not list((tmp_path / "held").glob("client-*.2.*")), "it is written with the round"
    one.put_client(0, 2, 0, encode(states[2]))
    assert one.client(0) == encode(states[2]), "another state has taken the held one's place"
    one.put_client(0, 2, 1, encode_lazily(states[1], CPU))
    assert isinstance(one.client(0), Held)
    one.peek()  # the round is undone
    assert bytes(one.client(0) or b"") == encode(states[0])


# --- what stays as it is in a client's memory ---


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tensors that were copied to be held."""
    found: list[int] = []
    real = packing._copy

    def spy(t: torch.Tensor) -> torch.Tensor:
        found.append(t.numel())
        return real(t)

    monkeypatch.setattr(packing, "_copy", spy)
    return found


def test_what_stays_as_it_was_is_neither_checked_nor_copied_again(
    copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever object it lies in, and whichever client's it is."""
    first = encode_lazily(kept(0, {"a": torch.arange(40_000.0)}), CPU)
    assert copied == [30_000, 40_000]
    memory = decode(first, ClientState).memory
    summed: list[int] = []
    real = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda t: summed.append(t.numel()) or real(t))
    second = encode_lazily(kept(1, {"new": [memory["a"]], "small": torch.ones(3)}), CPU)
    assert copied[2:] == summed == [30_000, 3]
    assert bytes(second) == encode(kept(1, {"new": [memory["a"]], "small": torch.ones(3)}))
    del first, second
    encode_lazily(kept(2, {"a": memory["a"]}), CPU)
    assert copied[4:] == [30_000, 40_000], "nobody holds it any more"


CHANGES = {
    "in place": lambda t: t.add_(1),
    "unseen by torch's count": lambda t: t.data.add_(1),
    "through numpy": lambda t: t.numpy().__setitem__(7, 5),
    "of one bit": lambda t: t[0].neg_(),  # 0 becomes -0, which is equal to it
    "of its shape": lambda t: t.unsqueeze_(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stays", [None, 0])
def test_what_changed_in_memory_is_kept_as_it_is_now(change: str, stays: int | None, tmp_path: Path) -> None:
    store = Store(tmp_path, stays)
    store.put_client(0, 1, 0, encode_lazily(kept(0, {"a": torch.arange(40_000.0)}), CPU))
    store.commit(1, b"", {})
    before = store.client(0)
    assert before is not None
    was, state = bytes(before), decode(before, ClientState)
    CHANGES[change](state.memory["a"])
    store.put_client(0, 2, 0, encode_lazily(state, CPU))
    store.commit(2, b"", {})
    assert bytes(before) == was, "who holds the state of before still has it"
    again = Store(tmp_path)
    again.head()
    found = decode(again.client(0) or b"", ClientState).memory["a"]
    assert found.shape == state.memory["a"].shape
    assert found.numpy().tobytes() == state.memory["a"].numpy().tobytes()


class Loose(Down):
    e: torch.Tensor = relay("logits", finite=False)


def test_what_was_sent_unchecked_is_checked_before_it_is_remembered() -> None:
    sent = encode_lazily(Loose(torch.full((40_000,), torch.nan)), CPU)
    with pytest.raises(WireError, match=r"memory\['a'\] holds NaN"):
        encode_lazily(kept(0, {"a": decode(sent, Loose).e}), CPU)


def test_a_model_that_was_sent_is_not_copied_again(copied: list[int]) -> None:
    state = kept(0, {})
    sent = encode_lazily(Sent(state.model), CPU)
    copied.clear()
    second = encode_lazily(state, CPU)
    assert copied == []
    assert bytes(second) == encode(state)
    del sent
    assert bytes(second) == encode(state)


def test_what_changed_in_memory_is_checked(tmp_path: Path) -> None:
    first = encode_lazily(kept(0, {"a": torch.arange(40_000.0)}), CPU)
    state = decode(first, ClientState)
    state.memory["a"][3] = torch.nan
    with pytest.raises(WireError, match=r"memory\['a'\] holds NaN"):
        encode_lazily(state, CPU)


@pytest.mark.parametrize("stays", [None, 0])
def test_what_stays_as_it_was_is_not_written_again(
    stays: int | None, copied: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a state is read from the disk, for there is no room for it: what is read counts as held."""
    store = Store(tmp_path, stays)
    store.put_client(0, 1, 0, encode_lazily(kept(0, {"a": torch.arange(40_000.0)}), CPU))
    store.commit(1, b"", {})
    written: list[str] = []
    real = Store._write

    def spy(self: Store, name: str, content: Any) -> None:
        written.append(name)
        real(self, name, content)

    monkeypatch.setattr(Store, "_write", spy)
    for t in (2, 3):
        copied.clear()
        before = store.client(0)  # as a task has it
        assert isinstance(before, Held)
        state = decode(before, ClientState)
        state.model["w"].add_(1)
        store.put_client(0, t, 0, encode_lazily(state, CPU))
        store.commit(t, b"", {})
        assert copied == [30_000], "the model alone"
    assert written == ["client-000000.2.0", "server.2", "client-000000.3.0", "server.3"]


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("method", "engine"), [("fedavg", "stacked"), pytest.param("dffke", "serial", marks=pytest.mark.long)]
)
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
    packing.HELD_ON.discard("cpu")
    try:
        plain = run(**setting, out=tmp_path / "plain")
    finally:
        packing.HELD_ON.add("cpu")
    assert not any(was_held)
    held = run(**setting, out=tmp_path / "held")
    assert was_held[-1]
    with pytest.raises(Killed):
        run(**setting, out=tmp_path / "cut", watch=die)
    cut = run(**setting, out=tmp_path / "cut", resume=True)
    assert held.transcript_digest == plain.transcript_digest == cut.transcript_digest
    assert held.traffic == plain.traffic
    for part in ("checkpoint", "models", "transcript"):
        a, b, c = (
            {path.name: path.read_bytes() for path in (tmp_path / of / part).iterdir()
             if path.suffix not in (".json", ".jsonl")}
            for of in ("plain", "held", "cut")
        )  # fmt: skip
        assert a == b == c


# --- a broadcast is decoded once in a process, and every client gets a copy of its own.


class Broadcast(Down):
    w: State
    rest: dict[str, list[torch.Tensor]]
    t: int


def test_each_gets_fresh_memory() -> None:
    w = State({"a": torch.ones(3), "b": torch.zeros(2)}, buffers=["b"])
    blob = encode(Broadcast(w, {"x": [torch.arange(4)]}, 7))
    first = task.received(blob, CPU)
    assert isinstance(first, Broadcast)
    first.w["a"].add_(5)
    first.w["c"] = torch.zeros(1)
    first.rest["x"][0].zero_()
    second = task.received(blob, CPU)
    assert isinstance(second, Broadcast)
    assert second.w["a"].tolist() == [1, 1, 1]
    assert second.rest["x"][0].tolist() == [0, 1, 2, 3]
    assert second.w.keys() == {"a", "b"}
    assert (type(second.w), second.w.buffers, second.t) == (State, frozenset({"b"}), 7)
    other = task.received(encode(Broadcast(State({"a": torch.zeros(3)}), {}, 8)), CPU)
    assert isinstance(other, Broadcast)
    assert other.t == 8


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_a_broadcast_is_decoded_once(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []
    real = task.decode

    def spy(blob: bytes, cls: Any, **more: Any) -> Any:
        seen.append(cls)
        return real(blob, cls, **more)

    monkeypatch.setattr(task, "decode", spy)
    run(method="fedavg", model="mlp", clients=4, rounds=2, eval_clients=False, engine=engine, out=tmp_path / "a")
    assert seen.count(Down) == 2, "one for each round"


@pytest.mark.parametrize("part", ["looked", "fitting", "dirty", "plain_fits"])
def test_what_a_client_did_with_its_records_may_tell(part: str) -> None:
    """Each alone is enough, a training that is going on too; without any of them nothing was read."""
    nothing = SimpleNamespace(looked=False, fitting=False, dirty=False, plain_fits=0)
    assert not task._may_tell(nothing)
    assert task._may_tell(SimpleNamespace(**{**vars(nothing), part: 1}))


def test_a_task_of_which_nothing_else_is_said() -> None:
    """It is its client's first attempt, and nobody tests a declaration by it."""
    task = Task("{}", "f", 1, 2, 0, None, b"")
    assert run_task(dataclasses.replace(task, drop=True)).error == "dropped out"
    assert (task.attempt, task.drop, task.watch, task.here, task.followed) == (0, False, False, False, False)
    assert (task.swap, task.replay, task.noise, task.terms) == (None, None, b"", None)
    assert dataclasses.asdict(Done(4)) == {
        "k": 4, "state": None, "reply": None, "protection": {}, "entries": [], "released": None, "tape": None,
        "spans": [], "rss": 0, "gpu": None, "private_fits": 0, "picked": [], "chose": False, "brought": False,
        "layout": "", "cut": 0, "rows": [], "alone": [], "error": None, "detail": "", "lost": False, "redone": 0,
        "fatal": None,
    }  # fmt: skip


def test_a_client_that_drops_out_answers_nothing() -> None:
    assert run_task(Task("{}", "f", 3, 2, 0, b"state", b"message", drop=True)) == Done(3, error="dropped out")


@pytest.mark.parametrize(
    ("asked", "machine", "side", "uses"),
    [
        ("auto", "x86_64", 8, True),
        ("auto", "aarch64", 8, False),
        ("auto", "arm64", 16, False),
        ("auto", "aarch64", 17, True),
        ("on", "aarch64", 8, True),
        ("off", "x86_64", 32, False),
    ],
)
def test_where_onednn_computes(
    asked: str, machine: str, side: int, uses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task.platform, "machine", lambda: machine)
    world: Any = SimpleNamespace(setting=SimpleNamespace(onednn=asked), shape=(3, side, side))
    assert task.uses_onednn(world) is uses


@pytest.mark.parametrize(
    ("precision", "engine", "step", "wanted"),
    [
        ("bf16", "stacked", "auto", ("recorded", True, True)),
        ("float32", "serial", "eager", ("eager", False, False)),
        ("tf32", "serial", "recorded", ("recorded", False, False)),
    ],
)
def test_the_conditions_of_a_computation_are_those_of_the_setting(
    precision: str, engine: str, step: str, wanted: tuple[str, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @contextmanager
    def conditions(step: str, *, bf16: bool, stacked: bool) -> Iterator[None]:
        seen.append((step, bf16, stacked))
        yield

    monkeypatch.setattr(task, "conditions", conditions)
    setting = SimpleNamespace(
        threads=torch.get_num_threads(), deterministic=True, precision=precision, step=step, onednn=True, engine=engine
    )
    monkeypatch.setattr(task, "chosen_engine", lambda setting: setting.engine)
    world: Any = SimpleNamespace(setting=setting, device=CPU, shape=(1, 8, 8))
    with task.compute(world):
        pass
    assert seen == [wanted]


@pytest.mark.parametrize(
    ("device", "precision", "allowed"),
    [("cuda", "float32", False), ("cuda", "tf32", True), ("cuda", "bf16", True), ("cpu", "tf32", False)],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_are_chosen_for_a_computation_and_put_back(
    device: str, precision: str, allowed: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, determinism, TF32, oneDNN: as the setting says within, and as they were afterwards."""
    monkeypatch.setattr(task, "chosen_engine", lambda setting: "serial")
    monkeypatch.setattr(task, "keep_freed", lambda: None)
    flags: list[Any] = []
    monkeypatch.setattr(torch.backends.mkldnn, "set_flags", lambda on: flags.append(on) or ("before",))

    def now() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        )  # fmt: skip

    before = now()
    threads = 1 + before[0] % 2
    setting = SimpleNamespace(
        threads=threads, deterministic=deterministic, precision=precision, step="eager", onednn="off"
    )
    world: Any = SimpleNamespace(setting=setting, device=torch.device(device), shape=(1, 8, 8))
    with task.compute(world):
        assert now() == (threads, 2 if deterministic else 0, not deterministic, False, allowed, allowed)
        assert flags == [False]
    assert now() == before
    assert flags == [False, "before"]


class One(Up):
    n: int = public()


class Two(Up):
    n: int = public()


def promises_one(client: Any, message: Any) -> One: ...
def promises_two(client: Any, message: Any) -> One | Two: ...
def promises_any(client: Any, message: Any) -> Up: ...
def promises_else(client: Any, message: Any) -> One | int: ...
def promises_nothing(client, message): ...  # type: ignore[no-untyped-def]
def promises_unknown(client: Any, message: Any) -> Unknown: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("fn", "classes"),
    [
        (promises_one, (One,)), (promises_two, (One, Two)), (promises_any, ()), (promises_else, ()),
        (promises_nothing, ()), (promises_unknown, ()),
    ],
)  # fmt: skip
def test_which_messages_a_function_promises(fn: Any, classes: tuple[type, ...]) -> None:
    assert task.promised(fn) == classes
    asked = Task("{}", "update", 3, 1, 0, None, b"")
    known = frozenset({One.class_id(), Two.class_id()})
    for reply in (One(1), Two(2)):
        if not classes or type(reply) in classes:
            task._check_reply(reply, fn, known, asked)
        else:
            with pytest.raises(ContractError, match="it is annotated to return One"):
                task._check_reply(reply, fn, known, asked)
    with pytest.raises(ContractError, match="returned a int on client 3; it must return an Up message"):
        task._check_reply(3, fn, known, asked)
    with pytest.raises(ContractError, match="made the message class One while it ran"):
        task._check_reply(One(1), fn, known - {One.class_id()}, asked)


def test_a_broadcast_is_kept_for_one_message_and_device() -> None:
    one, two = (encode(Broadcast(State({"a": torch.ones(1)}), {}, t)) for t in (1, 2))
    first = task._kept(one, CPU)
    assert task._kept(one, CPU) is first
    assert task._kept(bytes(bytearray(one)), CPU) is not first, "an equal message is another one"
    assert task._kept(two, CPU).t == 2  # type: ignore[attr-defined]
    again = task._kept(one, CPU)
    assert again is not first
    assert task._kept(one, torch.device("meta")) is not again


def test_names_of_errors_that_a_task_made_are_not_told() -> None:
    made = type("Secret7", (Exception,), {})
    assert task._known_name(ValueError) == "ValueError"
    assert task._known_name(ContractError) == "ContractError"
    assert task._known_name(made) == "an error of a class that was made by the task"
    assert task._known_name(type("ValueError", (Exception,), {"__module__": "builtins"})).startswith("an error of")


@pytest.mark.parametrize("entry", [task.absence, task.left_behind])
def test_what_a_task_told_beside_its_reply_has_no_protection(entry: Any) -> None:
    found = entry("update")
    kind = entry.__name__.replace("_", " ")
    assert (found.field, found.kind, found.noise_multiplier) == (f"update ({kind})", kind, 0.0)


# --- a task that is made up ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class MadeSite:
    k: int
    swap: Any = None


class Stage:
    """Stands in for everything around a task: its world, its client, the wire, and what the client did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policies: bool = True, compression: str | None = None):
        self.did: list[Any] = []
        self.traced = ["before", "before"]
        self.fails: BaseException | None = None
        self.watched: list[Any] = []
        self.client = SimpleNamespace(
            looked=True, private_fits=2, entries=["paid"], released={"x": 1}, brought="brought", picked=[["p"]],
            settle=lambda: "kept", release=lambda reply: (f"released {reply}", {"w": "protection"}),
            bill=lambda entry: self.did.append(("bill", entry.kind)), fitting=False, dirty=False, plain_fits=0,
        )  # fmt: skip
        self.world = SimpleNamespace(
            device=CPU, setting=SimpleNamespace(flops="flops", seed=5), policies={"a": 1} if policies else {},
            compression=compression, archs=["a", "b"], shape="shape", classes=3, site=MadeSite,
            method=SimpleNamespace(summand=lambda *of: ("summand", *of)),
        )  # fmt: skip
        self.turn: Any = None
        put = monkeypatch.setattr
        put(task, "world_of", lambda text: self.did.append(("world", text)) or self.world)
        put(task, "Meter", self.meter)
        put(task, "here", lambda: self.turn)
        put(task, "compute", self.compute)
        put(task, "received", lambda message, device: f"received {message}")
        put(task, "_kept", lambda message, device: f"kept {message}")
        put(task, "open_client", lambda *of: self.did.append(("open", *of[:3], *of[4:])) or self.client)
        put(task, "find_function", lambda method, fn: self.fn)
        put(task, "class_ids", lambda: "known")
        put(task, "_wrap_steps", lambda fn: self.did.append("wrap"))
        put(task, "traces", lambda fn, seen: self.traced.pop(0))
        put(task, "_check_reply", lambda *of: self.did.append(("check", of[0], of[2])))
        put(task, "encode", lambda *of: ("encoded", *of))
        put(task, "encode_lazily", lambda what, at: ("held", what, at))
        put(task, "encode_tree", lambda what: ("tree", what))
        put(task, "decode_tree", lambda what, device: ("decoded", what))
        put(task, "state_after", lambda client, kept: ("state", kept))
        put(task, "peak_rss", lambda: 77)
        put(task, "promised", lambda fn: ("one", "two"))
        put(task, "device_error", lambda e, who: None)

    def meter(self, party: str, t: int, device: torch.device, flops: str) -> Any:
        self.did.append(("meter", party, t, flops))
        return SimpleNamespace(away="away", span=self.span, close=lambda: ["span"], peak_gpu=lambda: 88)

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        self.did.append(("span", phase))
        yield

    @contextmanager
    def compute(self, world: Any) -> Iterator[None]:
        yield

    def fn(self, client: Any, message: Any) -> str:
        with task.seeded(5, "client 4", 6, 1):
            expected = torch.rand(2).tolist()
        assert torch.rand(2).tolist() == expected, "the client's own generator of this ask"
        self.watched.append(client.watched)
        if self.fails is not None:
            raise self.fails
        return f"reply to {message}"

    def run(self, gate: Any = None, **options: Any) -> Done:
        asked = Task("setting", "train", 4, 6, 1, b"state", b"message", attempt=2, **options)
        return task._gated_task(asked, gate or SimpleNamespace(tape="tape"))


OPENED = ("open", MadeSite(4), 6, 1, b"state", 2, "received b'message'", task.Client)


def test_a_task_from_its_message_to_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    before = torch.get_rng_state()
    done = stage.run()
    assert torch.equal(before, torch.get_rng_state())
    assert done == Done(
        4, ("held", ("state", "kept"), None), ("held", "released reply to received b'message'", None),  # type: ignore[arg-type]
        protection={"w": "protection"}, entries=["paid"], released=("tree", {"x": 1}), tape="tape", spans=["span"],  # type: ignore
        rss=77, gpu=88, private_fits=2, brought="brought", picked=[["p"]], chose=True,  # type: ignore[arg-type]
    )  # fmt: skip
    assert stage.did == [
        ("world", "setting"), ("meter", "client 4", 6, "flops"), ("span", "decode"), OPENED, "wrap", ("span", "task"),
        ("check", "reply to received b'message'", "known"), ("span", "encode"),
    ]  # fmt: skip
    assert stage.watched == [None]


def test_a_task_without_policies_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has it chosen anything that has to be paid for."""
    stage = Stage(monkeypatch, policies=False)
    stage.client.released = {}
    done = stage.run(here=True)
    assert "wrap" not in stage.did
    assert len(stage.traced) == 2
    assert (done.chose, done.released) == (False, None)
    assert done.state == ("held", ("state", "kept"), CPU)
    assert done.reply == ("held", "released reply to received b'message'", CPU)


@pytest.mark.parametrize(
    ("looked", "fits", "after", "billed"),
    [
        (True, 0, "changed", True),
        (False, 1, "changed", True),
        (False, 0, "changed", False),
        (True, 1, "before", False),
    ],
)
def test_what_is_left_behind_after_a_look_is_billed(
    looked: bool, fits: int, after: str, billed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(monkeypatch)
    stage.client.looked, stage.client.private_fits, stage.traced = looked, fits, ["before", after]
    done = stage.run()
    assert (("bill", "left behind") in stage.did) is billed
    assert done.chose is looked


def test_a_function_of_one_message_class_has_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    monkeypatch.setattr(task, "promised", lambda fn: ("one",))
    assert stage.run().chose is False


def test_a_compressed_reply_is_encoded_against_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, compression="svd")
    found = stage.run().reply
    assert found == ("encoded", "released reply to received b'message'", "svd", "kept b'message'")


@pytest.mark.parametrize("masked", [True, False])
def test_a_reply_that_enters_a_sum(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked one has no protection of its own."""
    stage, asked = Stage(monkeypatch), []
    reply = task.Masked.__new__(task.Masked) if masked else "in the sum"

    def entered(*of: Any) -> Any:
        asked.append(of)
        return SimpleNamespace(reply=reply, layout="layout", cut=9)

    monkeypatch.setattr(task, "entered", entered)
    done = stage.run(terms="terms")
    ((_, sender, value, message), told, terms, k, device) = asked[0]
    assert (value, message, told) == ("released reply to received b'message'", *["received b'message'"] * 2)
    assert (terms, k, device) == ("terms", 4, CPU)
    assert dataclasses.astuple(sender) == (4, 6, ("a", "b"), "shape", 3)
    assert (done.layout, done.cut, done.protection) == ("layout", 9, {} if masked else {"w": "protection"})
    assert done.reply is not None
    assert done.reply[1] is reply
    assert [row for row in stage.did if row[0] == "span"][2] == ("span", "sum")


def test_a_task_that_is_watched_swapped_or_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.turn = SimpleNamespace(away=None)
    gate = SimpleNamespace(tape=None)
    swap: Any = "swap"
    done = stage.run(gate, watch=True, swap=swap, replay=b"before")
    assert stage.did[3][1] == MadeSite(4, "swap")
    assert stage.watched == [[]]
    assert done.rows == []
    assert gate.replay == ("decoded", b"before")
    assert stage.turn.away == "away"
    stage = Stage(monkeypatch)
    stage.run(task.HandedOver(iter(()), CPU))
    assert stage.did[3][-1] is task.TwinClient


@pytest.mark.parametrize(
    ("policies", "told", "entries"),
    [(True, True, ["paid", "absence"]), (True, False, ["paid"]), (False, True, ["paid"])],
)
def test_a_client_that_fails_pays_for_what_it_did(
    policies: bool, told: bool, entries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(monkeypatch, policies)
    stage.fails, stage.client.looked = ValueError("secret"), told
    done = stage.run()
    assert (done.k, done.reply, done.state, done.fatal) == (4, None, None, None)
    assert done.error is not None
    assert done.error.startswith("ValueError")
    assert "secret" not in done.error
    assert "secret" in done.detail
    assert [getattr(entry, "kind", entry) for entry in done.entries] == entries
    assert (done.spans, done.rss, done.gpu, done.tape) == (["span"], 77, 88, "tape")


def test_who_is_to_blame_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device, or the method if our code says so: the run ends. A client that could not be opened pays nothing."""
    stage = Stage(monkeypatch)
    stage.fails = ContractError("raised by the method")
    assert stage.run().fatal is None
    stage = Stage(monkeypatch)
    ours: Any = SimpleNamespace(filename=str(task.OURS / "runtime" / "party.py"))
    monkeypatch.setattr(task, "last_frame", lambda e: ours)
    stage.fails = ContractError("of the contract")
    done = stage.run()
    assert (done.fatal, done.error, done.entries) == (stage.fails, "of the contract", [])
    stage = Stage(monkeypatch)
    stage.fails = ValueError("of ours, and no contract")
    assert stage.run().fatal is None
    stage = Stage(monkeypatch)
    stage.fails = ValueError("x")
    found: Any = ContractError("the device is full")
    monkeypatch.setattr(task, "device_error", lambda e, who: found if who == "client 4" else None)
    done = stage.run()
    assert (done.fatal, done.error) == (found, "the device is full")
    assert "ValueError: x" in done.detail
    stage = Stage(monkeypatch)
    stage.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stage.run()
    stage = Stage(monkeypatch)
    monkeypatch.setattr(task, "open_client", lambda *of: (_ for _ in ()).throw(OSError("gone")))
    done = stage.run()
    assert (done.entries, done.fatal) == ([], None)
    monkeypatch.setattr(task, "world_of", lambda text: (_ for _ in ()).throw(WireError("no such world")))
    done = stage.run()
    assert (done.k, done.error, str(done.fatal)) == (4, "no such world", "no such world")


@pytest.mark.parametrize("followed", [True, False])
def test_a_gate_records_what_is_let_out_if_there_is_a_twin(followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gates: list[Any] = []
    monkeypatch.setattr(task, "_gated_task", lambda asked, gate: gates.append(gate) or Done(asked.k))
    asked = Task("{}", "f", 3, 2, 0, b"", b"", noise=b"n" * 32, followed=followed)
    assert run_task(asked) == Done(3)
    assert type(gates[0]) is (task.Recorder if followed else task.Outputs)
    given: Any = task.Outputs(task.NoiseKey(b"m" * 32))
    run_task(asked, given)
    assert gates[1] is given


def test_steps_of_optimisers_of_a_tasks_own_are_wrapped_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    module = SimpleNamespace(Mine=Mine, Other=dict, value=3)
    monkeypatch.setitem(task.sys.modules, "made up", module)  # type: ignore[arg-type]
    fn: Any = SimpleNamespace(__module__="made up")
    before = Mine.step
    task._wrap_steps(fn)
    assert Mine.step is not before
    assert Mine.step.hooked is True  # type: ignore[attr-defined]
    wrapped = Mine.step
    task._wrap_steps(fn)
    assert Mine.step is wrapped, "once is enough"
