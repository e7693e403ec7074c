"""Runs of several seeds side by side: each is as alone, and one that fails leaves the others alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossings import apart, protocol
from engines import stack_sizes
from precision import double

from fedaudit import Setting, run
from fedaudit.errors import RunError, SettingError
from fedaudit.methods.condensation import _folded
from fedaudit.runtime import lockstep, run_opening, seeds_together, world
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.runtime.seeds_together import Ended, Place, alike, run_seeds, run_together
from fedaudit.training import cuda_graphs
from fedaudit.training.stacked import mapped_loss, stackable

SEEDS = (0, 3)


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return stack_sizes(monkeypatch)


def setting_of(method: str, **values: Any) -> Setting:
    usual: dict[str, Any] = {"rounds": 2, "clients": 3, "model": "mlp@0.25", "aux": 0.8, "partition": "dirichlet:0.5"}
    usual |= {"eval_every": 2, "eval_clients": False, "keep_weights": 2, "engine": "stacked"}
    return Setting.make(method=method, **{**usual, **values})


def both_ways(setting: Setting, folder: Path, seeds: tuple[int, ...] = SEEDS) -> Iterator[tuple[RunRecord, RunRecord]]:
    """Each seed alone, and beside the others; their transcripts must be the same to 1e-12."""
    alone = [run(setting, seed=seed, out=folder / f"alone-{seed}") for seed in seeds]
    beside = run_seeds(setting, seeds, out=[folder / f"beside-{seed}" for seed in seeds])
    for seed, one, other in zip(seeds, alone, beside, strict=True):
        assert protocol(one) == protocol(other)
        assert apart(folder / f"alone-{seed}", folder / f"beside-{seed}") < 1e-12
        yield one, other


@pytest.mark.parametrize(
    ("method", "values", "sizes"),
    [
        ("fedavg", {"dropout": 0.2, "quorum": 0.3, "set": {"E": 1, "B": 16}}, [5, 5]),
        ("fedavg", {"model": "cnn_bn@0.5", "set": {"E": 1, "B": 16}}, [6, 6]),
        pytest.param("fedfree", {"set": {"E": 1, "B": 16}, "rounds": 1}, [6], marks=pytest.mark.long),
        pytest.param("local", {"set": {"E": 1, "B": 16}, "participation": 0.7}, [4, 4], marks=pytest.mark.long),
    ],
    ids=["some drop out", "batch norm", "fedfree", "some take part"],
)
def test_each_seed_is_as_alone(
    method: str, values: dict[str, Any], sizes: list[int], tmp_path: Path, stacked: list[int]
) -> None:
    """In double precision, with unequal clients: the clients of both seeds were one stack, and nothing differs."""
    setting = setting_of(method, **values)
    with double(method):
        for one, other in both_ways(setting, tmp_path):
            assert one.setting == other.setting
            assert one.notes == other.notes
            assert [row.utility for row in one.rounds] == pytest.approx([row.utility for row in other.rounds])
    assert stacked[-len(sizes) :] == sizes


@pytest.mark.long
def test_a_server_that_trains_has_its_stack_too(
    tmp_path: Path, tiny: Callable[..., Setting], stacked: list[int]
) -> None:
    """FedDF's server distils a model by `fit`. The models of the two seeds are trained as one stack."""
    setting = tiny("feddf", rounds=1, eval_every=1, engine="stacked", model="mlp@0.25", keep_weights=1)
    with double("feddf"):
        for one, other in both_ways(setting, tmp_path):
            assert one.rounds[0].absent == other.rounds[0].absent
    assert 2 in stacked


@pytest.mark.long
def test_private_training_draws_each_runs_own_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: list[int]
) -> None:
    """DP-SGD: with the same secret a seed has the same noise beside another as alone. The ledgers are equal."""
    monkeypatch.setattr(run_opening, "fresh_secret", lambda: bytes(range(32)))
    privacy = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1.0"}}
    setting = setting_of("fedavg", privacy=privacy, twins="off", rounds=1, eval_every=1, set={"E": 1, "B": 16})
    with double("fedavg"):
        for one, other in both_ways(setting, tmp_path):
            assert one.ledger == other.ledger
    assert 6 in stacked


def test_what_trains_alone_draws_from_its_own_generators(tmp_path: Path) -> None:
    """Dropout draws from the global generator and is never stacked: every run has its own state of it, to the bit."""
    setting = setting_of("failing:OneFails", set={"drop": True}, rounds=2)
    for one, other in both_ways(setting, tmp_path):
        assert one.transcript_digest == other.transcript_digest


# --- what the record says -----------------------------------------------------------------------------------------


def test_the_record_says_who_shared_the_time(tmp_path: Path) -> None:
    setting = setting_of("fedavg", rounds=3, set={"E": 1, "B": 8})
    one, other = run_seeds(setting, SEEDS, out=[tmp_path / "a", tmp_path / "b"])
    assert (one.beside, other.beside) == ([3], [0])
    assert [row.seeds for row in (*one.rounds, *other.rounds)] == [2] * 6
    for row in (*one.rounds, *other.rounds):
        assert 0 < row.own_s == row.share_s < row.wall_s
    # Each waits for the other one. Shares of both are within the time from the first round to the last one's end.
    shares = [sum(row.own_s for row in record.rounds) for record in (one, other)]
    elapsed = [sum(row.wall_s for row in record.rounds) for record in (one, other)]
    assert sum(shares) < 1.2 * max(elapsed)
    assert sum(shares) > 0.6 * min(elapsed)
    fits = sum(row.wall_s for row in one.timings if row.phase == "fit")
    assert 0 < fits < shares[0]


def test_a_plain_record_says_nothing_of_it(tmp_path: Path) -> None:
    record = run(setting_of("fedavg", rounds=1, set={"E": 1, "B": 16}), out=tmp_path / "a")
    text = json.loads((tmp_path / "a" / "record.json").read_text())
    assert "beside" not in text
    assert not {"seeds", "share_s"} & text["rounds"][0].keys()
    assert record.rounds[0].own_s == record.rounds[0].wall_s


# --- what ends early ------------------------------------------------------------------------------------------------


def failing_at(t: int) -> Callable[[float, float, str], None]:
    def watch(done: float, whole: float, what: str) -> None:
        if done >= t:
            raise RuntimeError("the disk is full")

    return watch


def test_a_seed_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    """The second of three seeds fails after its first round; the others go on to their end, and are as alone."""
    setting = setting_of("fedavg", rounds=3, eval_every=3, keep_weights=3, set={"E": 1, "B": 16})
    with double("fedavg"):
        run(setting, seed=2, out=tmp_path / "alone")
        places = [Place(setting.model_copy(update={"seed": seed}), tmp_path / str(seed)) for seed in range(3)]
        places[1] = Place(places[1].setting, places[1].folder, failing_at(1))
        ends = run_together(places)
        assert [end.error is None for end in ends] == [True, False, True]
        assert "the disk is full" in str(ends[1].error)
        assert apart(tmp_path / "alone", tmp_path / "2") < 1e-12
    last = read_record(tmp_path / "2")
    assert (last.status, read_record(tmp_path / "1").status) == ("done", "running")
    assert [row.seeds for row in last.rounds] == [3, 3, 2] or [row.seeds for row in last.rounds] == [3, 2, 2]


def test_the_error_names_the_seeds_that_failed(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "record.json").write_text("{}")
    setting = setting_of("fedavg", rounds=1, set={"E": 1, "B": 16})
    with pytest.raises(RunError, match=r"1 of 2 seeds .* failed; the others are done.\nseed 3 .*b"):
        run_seeds(setting, SEEDS, out=[tmp_path / "a", tmp_path / "b"])
    assert read_record(tmp_path / "a").status == "done"


@pytest.mark.long
def test_a_stop_ends_all_threads(tmp_path: Path) -> None:
    """Ctrl-C reaches the thread that gives the turns. No run goes on, and each can be resumed."""

    def stop(jobs: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    setting = setting_of("fedavg", rounds=1, set={"E": 1, "B": 16})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "fit_together", stop)
        with pytest.raises(KeyboardInterrupt):
            run_seeds(setting, SEEDS, out=[tmp_path / "a", tmp_path / "b"])
    done = run_seeds(setting, SEEDS, out=[tmp_path / "a", tmp_path / "b"], resume=True)
    assert [record.status for record in done] == ["done", "done"]


def test_resumed_seeds_go_on_and_draw_fresh_noise(tmp_path: Path) -> None:
    """Seed 0 has one round behind it and seed 3 none: both go on, each from where it was, and end as if in one go.

    Rounding may differ from there, so that noise on a replayed round must be other noise: `attempt` counts up.
    """
    setting = setting_of("fedavg", rounds=3, eval_every=3, keep_weights=3, set={"E": 1, "B": 16})
    out = [tmp_path / "a", tmp_path / "b"]
    with double("fedavg"):
        run(setting, rounds=1, eval_every=3, out=out[0])
        run(setting, out=tmp_path / "alone")
        done = run_seeds(setting, SEEDS, out=out, resume=True)
        assert apart(tmp_path / "alone", out[0]) < 1e-12
    assert [row.seeds for row in done[0].rounds] == [None, 2, 2]
    assert any(note.startswith("resumed after round 1, with runs of other seeds") for note in done[0].notes)
    assert [Store(folder / "checkpoint", 0).head()["attempt"] for folder in out] == [1, 0]  # type: ignore[index]
    assert not done[1].notes


def test_a_run_that_was_beside_others_draws_fresh_noise_when_it_goes_on_alone(tmp_path: Path) -> None:
    setting = setting_of("fedavg", rounds=1, set={"E": 1, "B": 16})
    run_seeds(setting, SEEDS, out=[tmp_path / "a", tmp_path / "b"])
    record = run(setting, rounds=2, out=tmp_path / "a", resume=True)
    assert any("other seeds" in note for note in record.notes)
    assert Store(tmp_path / "a" / "checkpoint", 0).head()["attempt"] == 1  # type: ignore[index]
    assert record.beside == [3]


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    """The second seed is done. The first one opens before the second one's turn, and is alone all the same."""
    setting = setting_of("fedavg", rounds=1, set={"E": 1, "B": 16})
    first = run(setting, seed=3, out=tmp_path / "b")
    other, again = run_seeds(setting, SEEDS, out=[tmp_path / "a", tmp_path / "b"], resume=True)
    assert again.finished == first.finished
    assert (again.beside, other.beside, other.rounds[0].seeds) == ([], [], None)


# --- what is for the whole process ----------------------------------------------------------------------------------


def test_the_first_to_end_leaves_the_conditions_to_the_others(tmp_path: Path) -> None:
    """The first seed is through after one more round; the other one still has deterministic algorithms after that."""
    setting = setting_of("fedavg", rounds=3, set={"E": 1, "B": 16})
    run(setting, rounds=2, out=tmp_path / "0")
    seen: list[tuple[float, int]] = []
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        places = [
            Place(setting, tmp_path / "0"),
            Place(
                setting.model_copy(update={"seed": 3}),
                tmp_path / "3",
                lambda done, whole, what: seen.append((done, torch.get_deterministic_debug_mode())),
            ),
        ]
        run_together(places, resume=True)
        assert torch.get_deterministic_debug_mode() == 0
    finally:
        torch.set_deterministic_debug_mode(before)
    assert {mode for done, mode in seen if done > 1} == {2}


def test_a_reason_of_one_run_is_not_forgotten_by_another(tmp_path: Path) -> None:
    """Why steps are slower is kept for the whole process. The second run opens after the first one has said why."""
    setting = setting_of("fedavg", rounds=1, set={"E": 1, "B": 16})
    said: list[str] = []

    def slow(done: float, whole: float, what: str) -> None:
        if not said:
            said.append("once")
            cuda_graphs.fall_back("a reason of the first run")

    places = [Place(setting, tmp_path / "0", slow), Place(setting.model_copy(update={"seed": 3}), tmp_path / "3")]
    ends = run_together(places)
    notes = [end.record.notes for end in ends if end.record is not None]
    assert notes[0] == ["steps not recorded: a reason of the first run"]
    run(setting, seed=4, out=tmp_path / "4")
    assert not cuda_graphs.unrecorded


def test_a_run_begins_without_what_earlier_ones_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what they compiled nor what failed nor what fitted into memory: else speed, bits and notes would depend
    on what the process ran before. Runs that take turns forget it once, before the first begins."""
    kept: list[Any] = [mapped_loss.compiled_losses, stackable.refused, lockstep._fitted, _folded._uncompiled]
    setting = setting_of("fedavg", rounds=1, set={"E": 1, "B": 16})

    def left() -> None:
        for of in kept:
            of.add("of before") if isinstance(of, set) else of.update({"of before": 2})

    def seen(done: float, whole: float, what: str) -> None:
        if what.startswith("round 1"):
            assert not any("of before" in of for of in kept)

    left()
    run(setting, out=tmp_path / "one", watch=seen)
    left()
    run_together([Place(setting.model_copy(update={"seed": s}), tmp_path / str(s), seen) for s in (5, 6)])
    assert not any("of before" in of for of in kept)
    calls: list[str] = []
    monkeypatch.setattr(cuda_graphs, "_each_run", [lambda: calls.append("begun")])
    run_together([Place(setting.model_copy(update={"seed": s}), tmp_path / str(s)) for s in (7, 8)])
    assert calls == ["begun"]


def test_each_world_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs take turns, and a process keeps two worlds otherwise: each would be built anew for every task."""
    built: list[int] = []
    make = world.World

    def counted(setting: Setting) -> world.World:
        built.append(setting.seed)
        return make(setting)

    monkeypatch.setattr(world, "World", counted)
    world.world_of.cache_clear()
    setting = setting_of("local", rounds=2, set={"E": 1, "B": 16})
    run_seeds(setting, range(4), out=[tmp_path / str(seed) for seed in range(4)])
    assert sorted(built) == [0, 1, 2, 3]
    assert len(world.world_of._made) == 2


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "seeds", "why"),
    [
        ({"engine": "serial"}, (0, 1), "--engine serial does not"),
        ({"engine": "auto", "isolate": True}, (0, 1), "--isolate does not"),
        ({"flops": True}, (0, 1), "--flops counts"),
        ({}, (1, 1), "not all different"),
        ({}, (), "No seeds"),
    ],
)
def test_what_cannot_go_on_side_by_side_is_refused(
    values: dict[str, Any], seeds: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=why):
        run_seeds(setting_of("fedavg", **values), seeds, out=[tmp_path / str(i) for i in range(len(seeds))])
    assert not list(tmp_path.iterdir())


def test_settings_that_differ_are_refused(tmp_path: Path) -> None:
    one, other = setting_of("fedavg"), setting_of("fedavg", rounds=3, seed=1)
    assert not alike(one, other)
    with pytest.raises(SettingError, match="differ in more than the seed"):
        run_together([Place(one, tmp_path / "a"), Place(other, tmp_path / "b")])
    with pytest.raises(SettingError, match="same folder"):
        run_seeds(one, SEEDS, out=[tmp_path / "a", tmp_path / "a"])
    with pytest.raises(SettingError, match="2 seeds need as many folders, not 1"):
        run_seeds(one, SEEDS, out=[tmp_path / "a"])


def test_the_command_line_takes_seeds(tmp_path: Path, fedaudit: Callable[..., tuple[int, str, str]]) -> None:
    how = ["run", "--clients", "2", "--rounds", "1", "--model", "mlp@0.25", "--set", "B=64", "--device", "cpu"]
    code, out, _ = fedaudit(*how, "--out", tmp_path / "r", "--seeds-together", "1,4")
    assert code == 0
    assert [read_record(tmp_path / f"r-{seed}").setting.seed for seed in (1, 4)] == [1, 4]
    assert f"Everything is in {tmp_path / 'r-4'}" in out
    assert read_record(tmp_path / "r-1").setting.engine == "stacked"
    code, _, err = fedaudit(*how, "--seeds-together", "1,4", "--seed", "2")
    assert (code, "--seed is for one run" in err) == (2, True)
    code, _, err = fedaudit(*how, "--seeds-together", "1;4")
    assert (code, "write the seeds with commas" in err) == (2, True)


# --- runs that are made up -------------------------------------------------------------------------------------------


def test_each_seed_has_its_place_and_errors_name_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders in the order of the seeds, progress that names the seed; one error is raised as it is, if it is alone."""
    given: list[Any] = []
    ended: list[Ended] = []

    def together(places: list[Place], **how: bool) -> list[Ended]:
        given.append((places, how))
        return ended

    monkeypatch.setattr(seeds_together, "run_together", together)
    monkeypatch.setattr(seeds_together, "default_folder", lambda setting: Path(f"default-{setting.seed}"))
    told: list[Any] = []
    setting = setting_of("fedavg", engine="auto", seed=1)
    ended[:] = [Ended("record 4"), Ended("record 2")]  # type: ignore[arg-type]
    found = run_seeds(setting, [4, 2], out=["a", Path("b")], resume=True, watch=lambda *said: told.append(said))
    assert found == ["record 4", "record 2"]
    places, how = given.pop()
    assert [(p.setting.seed, p.setting.engine, p.folder) for p in places] == [
        (4, "stacked", Path("a")), (2, "stacked", Path("b")),
    ]  # fmt: skip
    assert how == {"resume": True, "overwrite": False}
    places[1].watch(1, 5, "round 2")
    assert told == [(1, 5, "seed 2: round 2")]
    run_seeds(setting, [4, 2], overwrite=True)
    places, how = given.pop()
    assert [p.folder for p in places] == [Path("default-4"), Path("default-2")]
    assert how == {"resume": False, "overwrite": True}
    for out in (["a"], ["a", "b", "c"]):
        with pytest.raises(SettingError, match=f"2 seeds need as many folders, not {len(out)}"):
            run_seeds(setting, [4, 2], out=out)
    ended[:] = [Ended("record 4"), Ended(error=ValueError())]  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"^1 of 2 seeds .* failed; the others are done.\nseed 2 \(b\): ValueError$"):
        run_seeds(setting, [4, 2], out=["a", "b"])
    ended[:] = [Ended(error=KeyError("k")), Ended(error=ValueError("v"))]
    with pytest.raises(RunError, match=r"^2 of 2 seeds .*\nseed 4 \(a\): 'k'\nseed 2 \(b\): v$") as caught:
        run_seeds(setting, [4, 2], out=["a", "b"])
    assert isinstance(caught.value.__cause__, KeyError)
    ended[:] = [Ended(error=ValueError("alone"))]
    with pytest.raises(ValueError, match="alone"):
        run_seeds(setting, [4], out=["a"])


@pytest.mark.parametrize(
    ("over", "resume", "beside", "alone"),
    [
        ((), True, [1, 2, 3], []),
        ((2,), True, [1, 3], [2]),
        ((1, 2), True, [], [1, 2, 3]),
        ((1, 2, 3), True, [], [1, 2, 3]),
        ((1, 2), False, [1, 2, 3], []),
    ],
)
def test_what_is_over_or_the_only_one_left_runs_as_usual(
    over: tuple[int, ...], resume: bool, beside: list[int], alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Any] = []
    stacked: list[int] = []

    def begin(setting: Setting, **how: Any) -> str:
        began.append((setting.seed, setting.engine, how))
        return f"record {setting.seed}"

    def side_by_side(places: list[Place], works: list[Callable[[], Any]]) -> list[Ended]:
        stacked.extend(place.setting.seed for place in places)
        return [Ended(f"stacked {work()}") for work in works]  # type: ignore[arg-type]

    monkeypatch.setattr(seeds_together, "run", begin)
    monkeypatch.setattr(seeds_together, "is_over", lambda place: place.setting.seed in over)
    monkeypatch.setattr(seeds_together, "_side_by_side", side_by_side)
    setting = setting_of("fedavg", engine="auto")
    places = [Place(setting.model_copy(update={"seed": seed}), Path(f"run-{seed}"), print) for seed in (1, 2, 3)]
    found = run_together(places, resume=resume, overwrite=True, refuse_idle=True)
    assert [end.record for end in found] == [f"{'stacked ' * (s in beside)}record {s}" for s in (1, 2, 3)]
    assert stacked == beside
    assert sorted(seed for seed, *_ in began if seed not in beside) == alone
    for seed, engine, how in began:
        assert engine == "stacked"
        assert how == {
            "out": Path(f"run-{seed}"), "watch": print, "resume": resume, "overwrite": True, "refuse_idle": True,
        }  # fmt: skip
    began.clear()
    run_together(places[:1])
    assert [began[0][2][name] for name in ("resume", "overwrite", "refuse_idle")] == [False] * 3


@pytest.mark.parametrize(
    ("there", "status", "rounds", "over"),
    [
        (False, "done", 3, False), (True, "done", 3, True), (True, "done", 2, False), (True, "done", 4, True),
        (True, "running", 3, False),
    ],
)  # fmt: skip
def test_a_run_is_over_with_all_its_rounds(
    there: bool, status: str, rounds: int, over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (tmp_path / "record.json").touch()
    record = SimpleNamespace(status=status, rounds=[None] * rounds)
    monkeypatch.setattr(seeds_together, "read_record", lambda folder: record)
    assert seeds_together.is_over(Place(setting_of("fedavg", rounds=3), tmp_path)) is over


def test_runs_take_turns_under_the_conditions_of_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of one run is its end. A stop is everybody's."""
    did: list[Any] = []
    errors: dict[int, BaseException] = {5: ValueError("five")}

    def take(turns: list[Any]) -> None:
        did.append(("turns", [turn.seed for turn in turns]))
        for turn in turns:
            turn.result, turn.error = turn.work(), errors.get(turn.seed)

    def turn(work: Callable[[], Any], generators: str, seed: int) -> Any:
        return SimpleNamespace(work=work, generators=generators, seed=seed)

    class Worlds:
        def __call__(self, text: str) -> str:
            return f"world of seed {json.loads(text)['seed']}"

        def room_for(self, n: int) -> Any:
            return nullcontext(did.append(("room", n)))

    monkeypatch.setattr(seeds_together, "before_cuda", lambda setting: did.append(("before", setting.seed)))
    monkeypatch.setattr(seeds_together, "resolve_device", lambda device: "device")
    monkeypatch.setattr(seeds_together, "begin_run", lambda: did.append("clear"))
    monkeypatch.setattr(seeds_together, "world_of", Worlds())
    monkeypatch.setattr(seeds_together, "compute", lambda world: nullcontext(did.append(world)))
    monkeypatch.setattr(seeds_together, "Globals", lambda device: f"generators on {device}")
    monkeypatch.setattr(seeds_together, "Turn", turn)
    monkeypatch.setattr(seeds_together, "take_turns", take)
    places = [Place(setting_of("fedavg", seed=seed), Path()) for seed in (4, 5)]
    works: list[Any] = [lambda: "record 4", lambda: None]
    ends = seeds_together._side_by_side(places, works)
    assert [(end.record, str(end.error)) for end in ends] == [("record 4", "None"), (None, "five")]
    assert did == [("before", 4), "clear", ("room", 2), "world of seed 4", ("turns", [4, 5])]
    errors[4] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        seeds_together._side_by_side(places, works)
