"""How an attack tells its progress, which results are news, and who the candidates are."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedaudit.attack import attack_run
from fedaudit.attack.attack_run import NOBODY, _is_news, _judge, _received, _within, candidates_of, made
from fedaudit.attack.claims import TookPart
from fedaudit.attack.scene import Attack
from fedaudit.attack.verdict import LeakVerdict
from fedaudit.errors import ContractError, DataError, RunError, ThreatError
from fedaudit.progress import unwatched
from fedaudit.rng import seed_of, seeded
from fedaudit.runtime.attack_result import MembershipFound, MembershipResult, NotRun, Ran
from fedaudit.shape import Shape
from fedaudit.wire.transcript import Threat


def told(title, times, monkeypatch):
    """Report steps 0, 1, ... of 10 at these times, and return what was told of part 2 of 5."""
    found, clock = [], iter(times)
    now = [0.0]
    monkeypatch.setattr(attack_run.time, "monotonic", lambda: now[0])
    tell = _within(lambda *said: found.append(said), 2, 5, title)
    for i, at in enumerate(clock):
        now[0] = at
        tell(i, 10, f"step {i}")
    return found


def test_without_a_title_every_step_is_told(monkeypatch):
    assert told("", [100.0, 100.0, 100.0], monkeypatch) == [
        (2.0, 5, "step 0"),
        (2.1, 5, "step 1"),
        (2.2, 5, "step 2"),
    ]


def test_with_a_title_steps_are_told_ten_times_a_second(monkeypatch):
    found = told("loss, ", [100.0, 100.05, 100.1, 100.15, 100.3], monkeypatch)
    assert [said for *_, said in found] == ["loss, step 0", "loss, step 2", "loss, step 4"]


def test_the_first_step_is_told_at_once(monkeypatch):
    assert len(told("loss, ", [0.0], monkeypatch)) == 1


def test_more_than_all_is_all(monkeypatch):
    found = []
    tell = _within(lambda *said: found.append(said), 0, 2)
    tell(15, 10, "")
    tell(0, 0, "")
    assert [done for done, *_ in found] == [1, 0]


def ran(clients, attack="a", blind=False, threat="server"):
    return MembershipResult.model_construct(attack=attack, threat=threat, clients=clients, blind=blind)


@pytest.mark.parametrize(
    ("now", "before", "news"),
    [
        (ran([0, 1]), None, True),
        (ran([0, 1]), ran([0]), True),
        (ran([0, 1]), ran([4, 5]), False),
        (ran([0]), NotRun(attack="a", threat="server", reason="r"), True),
        (NotRun(attack="a", threat="server", reason="r"), None, True),
        (NotRun(attack="a", threat="server", reason=f"the server {NOBODY}"), None, False),
        (NotRun(attack="a", threat="server", reason="r"), ran([0]), False),
    ],
)
def test_a_baseline_that_nobody_named_is_kept_where_it_tells_more(now, before, news):
    known = {} if before is None else {("a", "server"): before, ("b", "server"): ran([0, 1, 2])}
    assert _is_news(now, known) is news


def test_an_attack_is_named_with_its_settings():
    name, attack = made({"attack": "loss"})
    assert (name, type(attack).__name__) == ("loss", type(made("loss")[1]).__name__)
    with pytest.raises(ContractError, match="does not name an attack"):
        made({"shadows": 3})


@pytest.mark.parametrize("broken", [(True, False), (False, False)])
def test_all_attacks_are_judged_by_all_blind_baselines(broken, monkeypatch):
    """One of two baselines is enough for a broken split. What is no membership attack has no verdict."""
    seen = []
    verdicts = {name: LeakVerdict(f"of {name}", one) for name, one in zip("bc", broken, strict=True)}
    monkeypatch.setattr(attack_run, "judge_blind", lambda blind: verdicts)

    def judged(name, parts, blind, broken):
        seen.append((name, parts, sorted(blind), broken))
        return LeakVerdict("of a", broken, True, {"b": "gap"})

    monkeypatch.setattr(attack_run, "judge", judged)
    a, b, c = ran([0]), ran([0], "b", True), ran([0], "c", True)
    _judge([(b, "parts b"), (c, "parts c"), (a, "parts a"), (NotRun(attack="d", threat="server", reason="r"), "")])
    assert seen == [("a", "parts a", ["b", "c"], any(broken))]
    assert (a.leak, a.split_broken, a.verdict, a.against_blind) == (True, any(broken), "of a", {"b": "gap"})
    assert (b.split_broken, b.verdict, c.split_broken) == (broken[0], "of b", False)
    assert "leak" not in b.model_fields_set


def test_who_took_part_is_who_was_heard():
    entries = [("down", 0), ("up", 0), ("down", 3), ("up", 5)]
    transcript = SimpleNamespace(entries=lambda: [SimpleNamespace(direction=way, client=k) for way, k in entries])
    run = type("Run", (), {"transcript": transcript})()
    assert _received(run) == {0, 5}


@pytest.mark.parametrize(("members", "others"), [(5, 3), (3, 5), (4, 4)])
def test_as_many_members_as_others_are_candidates(members, others):
    """Members are records 0, 1, ..., the others 100, 101, ...; labels are the records' numbers."""

    def rows(first, n):
        return torch.arange(first, first + n).float().view(n, 1), torch.arange(first, first + n)

    world = SimpleNamespace(
        candidates=lambda k: rows(0, members), nonmembers=lambda k: rows(100, others), setting=SimpleNamespace(seed=11)
    )
    x, y, member = candidates_of(world, 3)
    n = min(members, others)
    assert len(x) == len(y) == len(member) == 2 * n
    assert (y < 100).tolist() == member.tolist()
    assert x.flatten().tolist() == y.tolist()
    assert len(set(y.tolist())) == 2 * n
    assert int(member.sum()) == n
    other = candidates_of(world, 4)[1]
    assert other.tolist() != y.tolist(), "each client has an order of its own"
    world.nonmembers = lambda k: rows(100, 0)
    with pytest.raises(DataError, match="Client 3 has no held-out records"):
        candidates_of(world, 3)


# --- attacks that are made up ----------------------------------------------------------------------------------------


class Told(Attack):
    pass


class Guess(Attack):
    blind = True


KNOWN = {"told": Told, "other": Told, "guess": Guess, "blank": Guess}


class Stage:
    """Stands in for everything around `attack_run`: a folder with a record, a clock, and attacks that take a while."""

    def __init__(self, monkeypatch, seconds=0.0, before=(), status="done"):
        self.did, self.now, self.seconds, self.failing = [], 0.0, seconds, set()
        record = SimpleNamespace(attacks=list(before), transcript_digest="digest", status=status)
        self.run = SimpleNamespace(
            world=SimpleNamespace(setting=SimpleNamespace(clients=3)), folder=Path("run"), record=record,
        )  # fmt: skip
        put = monkeypatch.setattr
        put(attack_run, "RunFolder", lambda folder: self.run)
        put(attack_run, "claim_for_attacks", lambda folder: self.did.append(("claim", folder)))
        put(attack_run, "unseal", lambda folder: self.did.append(("unseal", folder)))
        put(attack_run, "seal_again", lambda folder: self.did.append(("seal", folder)))
        put(attack_run, "save_attacks", lambda folder, digest, rows: self.did.append(
            ("save", folder, digest, [(row.attack, row.threat) for row in rows])))  # fmt: skip
        put(attack_run, "_judge", lambda found: self.did.append(("judge", [one[1] for one in found])))
        put(attack_run, "names", lambda what: sorted(KNOWN))
        put(attack_run, "find", lambda name, what: KNOWN[name])
        put(attack_run, "compute", lambda world: contextlib.nullcontext(self.did.append(("compute", world))))
        put(attack_run.time, "perf_counter", lambda: self.now)
        put(attack_run, "_one", self.one)

    def one(self, attack, name, run, world, threat, clients, tell):
        self.did.append(("attack", name, type(attack).__name__, str(threat), clients))
        self.now += self.seconds
        if name in self.failing:
            raise ValueError(name)
        tell(1, 2, name)
        return ran([0, 1], name, attack.blind, str(threat)), name

    def all(self, kind):
        return [row[1:] if len(row) > 2 else row[1] for row in self.did if row[0] == kind]


def test_blind_baselines_run_first_and_judge_all_others(monkeypatch):
    stage, told = Stage(monkeypatch), []
    found = attack_run.attack_run("run", attacks=["told", "guess"], watch=lambda *said: told.append(said))
    assert [row[0] for row in stage.all("attack")] == ["guess", "blank", "told"]
    assert stage.all("attack")[2] == ("told", "Told", "server", None)
    assert told == [(0.5, 3, "guess"), (1.5, 3, "blank"), (2.5, 3, "told")]
    assert stage.all("judge") == [["guess", "blank", "told"], ["guess", "blank"]]
    assert [result.attack for result in found] == ["told", "guess", "blank"], "a new baseline is news"
    assert stage.all("save") == [(Path("run"), "digest", [(n, "server") for n in ("blank", "guess", "told")])]
    assert [row[0] for row in stage.did] == [
        "claim", "unseal", "compute", "attack", "attack", "attack", "judge", "judge", "save", "seal",
    ]  # fmt: skip
    assert {row[1] for row in stage.did if row[0] in ("claim", "unseal", "seal")} == {Path("run")}
    assert stage.all("compute") == [stage.run.world]


def test_all_attacks_run_if_none_is_named(monkeypatch):
    stage = Stage(monkeypatch, status="running")
    attack_run.attack_run("run", threat="peer:1", clients=[2])
    assert stage.all("attack") == [
        (name, KNOWN[name].__name__, "peer:1", [2]) for name in ("blank", "guess", "other", "told")
    ]
    assert stage.all("seal") == [], "a run that is not done was not sealed"
    attack_run.attack_run("run", attacks=[])
    assert [row[0] for row in stage.all("attack")[4:]] == ["blank", "guess"]


def test_a_result_replaces_its_own_of_before_and_no_other(monkeypatch):
    """A baseline that nobody named, and that tells no more than the record holds, is no result."""
    before = [
        ran([0], "told"),
        ran([0], "told", threat="outsider"),
        ran([0, 1], "guess", True),
        ran([0], "blank", True),
    ]
    stage = Stage(monkeypatch, before=before)
    found = attack_run.attack_run("run", attacks=["told"])
    assert [result.attack for result in found] == ["told", "blank"]
    assert found[0].clients == [0, 1]
    ((_, _, keys),) = stage.all("save")
    assert keys == [("blank", "server"), ("guess", "server"), ("told", "outsider"), ("told", "server")]


@pytest.mark.parametrize(("seconds", "saves"), [(1.0, 2), (1.5, 3), (0.4, 2), (0.2, 1)])
def test_results_that_took_a_while_are_saved_at_once(seconds, saves, monkeypatch):
    """Two baselines, then two attacks. More than a second since the last time, and at the end."""
    stage = Stage(monkeypatch, seconds=seconds)
    attack_run.attack_run("run", attacks=["told", "other"])
    assert len(stage.all("save")) == saves


def test_an_attack_that_goes_wrong_is_told_and_the_others_run(monkeypatch):
    stage, failed = Stage(monkeypatch), []
    stage.failing = {"guess", "told"}
    with pytest.raises(ValueError, match="guess"):
        attack_run.attack_run("run", attacks=["told", "other"])
    found = attack_run.attack_run("run", attacks=["told", "other"], failed=lambda *of: failed.append(of))
    assert [(name, str(error)) for name, error in failed] == [("guess", "guess"), ("told", "told")]
    assert [result.attack for result in found] == ["other", "blank"]
    assert stage.all("judge") == [["blank", "other"], ["blank"]]


@pytest.mark.parametrize("options", [{"clients": [0, 3]}, {"clients": [-1]}, {"threat": "peer:3"}])
def test_a_client_that_is_not_there_is_not_attacked(options, monkeypatch):
    stage = Stage(monkeypatch)
    with pytest.raises(ThreatError, match=r"There is no client .*; the run has 3, numbered from 0"):
        attack_run.attack_run("run", **options)
    assert stage.did == []
    attack_run.attack_run("run", attacks=[], clients=[0, 2], threat="peer:0")


# --- scored again ----------------------------------------------------------------------------------------------------


class Kept:
    def __init__(self, client):
        self.client = client

    def attacked(self):
        return f"scores of {self.client}"


def test_membership_is_scored_again_from_what_was_kept(monkeypatch):
    """In the order of the result's clients, and only if none is missing. Each threat is judged by its own baselines."""
    judged, scored = [], []
    full, part, gone = ran([2, 0], "full"), ran([0, 1], "part", threat="peer:2"), ran([1], "gone")
    none = NotRun(attack="none", threat="server", reason="r")
    left = {"full": [Kept(0), Kept(2)], "part": [Kept(0), Kept(1)], "gone": []}
    record = SimpleNamespace(attacks=[full, none, part, gone])
    run = SimpleNamespace(folder="folder", record=record)
    full.wall_s, part.wall_s, gone.wall_s = 1.5, 2.5, 3.5

    def kept(folder, *, attack, threat, clients, record):
        assert (folder, record) == ("folder", run.record)
        assert (threat, clients) == next((r.threat, r.clients) for r in record.attacks if r.attack == attack)
        return left[attack]

    def result_of(who, anew, wall):
        assert isinstance(who, Ran)
        assert wall == {"anew full": 1.5, "anew part": 2.5}[anew]
        return ran(who.clients, anew, threat=who.threat)

    monkeypatch.setattr(attack_run, "kept", kept)
    monkeypatch.setattr(attack_run, "membership", lambda *of: scored.append(of) or f"anew {of[1]}")
    monkeypatch.setattr(attack_run, "result_of", result_of)
    monkeypatch.setattr(attack_run, "_judge", lambda found: judged.append([(r.attack, parts) for r, parts in found]))
    found = attack_run.rescored(run)
    whole, some = ["scores of 2", "scores of 0"], ["scores of 0", "scores of 1"]
    assert [(r.attack, parts) for r, parts in found] == [
        ("anew full", whole), ("none", []), ("anew part", some), ("gone", []),
    ]  # fmt: skip
    assert found[3][0] is gone
    assert judged == [[("anew full", whole)], [("anew part", some)]]
    assert scored == [(whole, "full", attack_run._seed("full")), (some, "part", attack_run._seed("part"))]


@pytest.mark.parametrize("status", ["done", "running"])
def test_new_scores_are_saved_and_the_run_is_sealed_again(status, monkeypatch):
    stage = Stage(monkeypatch, status=status)
    with_scores, without = ran([0], "a"), ran([0], "b")
    monkeypatch.setattr(attack_run, "rescored", lambda run: [(without, []), (with_scores, ["part"])])
    assert attack_run.rescore("run") == [with_scores]
    expected = [("unseal", Path("run")), ("save", Path("run"), "digest", [("b", "server"), ("a", "server")])]
    assert stage.did == expected + ([("seal", Path("run"))] if status == "done" else [])
    monkeypatch.setattr(attack_run, "rescored", lambda run: [(without, [])])
    with pytest.raises(RunError, match="keeps no scores of a membership attack"):
        attack_run.rescore("run")


def test_the_scorers_seed_is_a_number_of_32_bits_by_the_attacks_name():
    assert attack_run._seed("loss") == seed_of("attack", "loss", "scorer") % 4294967296
    assert attack_run._seed("loss") != attack_run._seed("lira")


# --- one attack on all clients ---------------------------------------------------------------------------------------


class Claiming(Attack):
    """Claims something of each client; some cannot be attacked, which shows before or on the way."""

    step: int = 1
    part: bool = False

    def misfit(self, shape):
        return "misfit" if shape == (9,) else None

    def cannot(self, scene):
        return f"cannot {scene.target}" if scene.target == 1 else None

    def at_once(self, scene):
        return self.step

    def run(self, scene):
        if scene.target == 3:
            raise ThreatError("on the way")
        return TookPart(float(scene.target)) if self.part else ("claims", scene.target)


class Room:
    """Stands in for everything around `_one`: five clients with two candidates each, and a scorer."""

    def __init__(self, monkeypatch, tmp_path, heard=(0, 2, 4), shape=(2,)):
        self.groups, self.scored, self.kept, self.told, self.scenes = [], [], [], [], []
        self.run = SimpleNamespace(folder=tmp_path, record="record", transcript="transcript")
        self.world = SimpleNamespace(setting=SimpleNamespace(clients=5))
        clock = iter([10.0, 12.34567])
        put = monkeypatch.setattr
        put(attack_run, "TranscriptView", lambda transcript, threat: (transcript, threat))
        put(attack_run, "source_of", lambda kind: f"source of {kind.__name__}")
        put(
            attack_run,
            "candidates_of",
            lambda world, k: (torch.full((2, 1), float(k)), torch.tensor([k, k]), f"truth {k}"),
        )
        put(attack_run, "settled", lambda claims, member: claims)
        put(attack_run, "_received", lambda run: set(heard))
        put(attack_run.time, "perf_counter", lambda: next(clock))
        put(attack_run, "score", lambda *of: self.scored.append(of) or self.found)
        put(attack_run, "keep", lambda *of: self.kept.append(of))
        put(attack_run, "result_of", lambda *of: of)
        put(attack_run, "Scene", self.scene)
        self.shape = Shape(shape)
        self.found = MembershipFound.model_construct()
        real = attack_run._claims
        put(attack_run, "_claims", lambda attack, name, scenes: self.groups.append([s.target for s in scenes]) or real(
            attack, name, scenes))  # fmt: skip

    def scene(self, run, view, k, x, y, tell):
        self.scenes.append((run, view, tell))
        return SimpleNamespace(target=k, x=x, y=y, shape=self.shape, device=torch.device("cpu"))

    def one(self, attack, threat="server", clients=None, name="mine"):
        watch = lambda *said: self.told.append(said)  # noqa: E731
        return attack_run._one(attack, name, self.run, self.world, Threat.parse(threat), clients, watch)


def test_one_attack_on_all_clients_is_scored_and_kept(monkeypatch, tmp_path):
    """Clients 1 and 3 cannot be attacked. The images of the candidates are not held on to."""
    room = Room(monkeypatch, tmp_path)
    attack = Claiming(step=2)
    (ran, found, wall), scores = room.one(attack)
    assert room.groups == [[0, 2], [3, 4], []]
    assert (ran.attack, ran.threat, ran.clients, ran.left_out) == (
        "mine",
        "server",
        [0, 2, 4],
        ["cannot 1", "on the way"],
    )
    assert (ran.settings, ran.blind, ran.source) == ({"step": 2, "part": False}, False, "source of Claiming")
    assert (found, wall) == (room.found, 2.346)
    ((parts, world, folder, name, seed),) = room.scored
    assert (world, folder, name, seed) == (
        room.world,
        tmp_path / "pictures" / "server",
        "mine",
        attack_run._seed("mine"),
    )
    assert [(part.client, part.claims, part.member) for part in parts] == [
        (k, ("claims", k), f"truth {k}") for k in (0, 2, 4)
    ]
    assert [(part.x.tolist(), part.y.tolist()) for part in parts] == [([[k], [k]], [k, k]) for k in (0, 2, 4)]
    assert [(part.client, len(part.x), part.y.tolist()) for part in scores] == [(k, 0, [k, k]) for k in (0, 2, 4)]
    assert room.kept == [(tmp_path, "record", ran, scores)]
    assert room.told == [(k, 5, f"mine, client {k}") for k in range(5)]
    run, view, tell = room.scenes[2]
    assert (run, view) == (room.run, ("transcript", Threat.parse("server")))
    tell(1, 4, "half way")
    assert room.told[5:] == [(2.25, 5, "mine, client 2: half way")]


def test_a_peer_does_not_attack_itself_and_one_client_has_no_number(monkeypatch, tmp_path):
    room = Room(monkeypatch, tmp_path)
    room.found = "no membership"
    (ran, found, _), scores = room.one(Claiming(), "peer:2", [2, 4])
    assert (ran.clients, found, scores, room.kept) == ([4], "no membership", [], [])
    assert room.told == [(0, 1, "mine")]
    assert room.scored[0][2] == tmp_path / "pictures" / "peer-2"
    assert room.groups == [[4], []]


@pytest.mark.parametrize(
    ("threat", "clients", "shape", "reason"),
    [
        ("server", [1, 3], (2,), "cannot 1"),
        ("server", [3], (2,), "on the way"),
        ("server", [0], (9,), "misfit"),
        ("peer:0", [0], (2,), f"peer:0 {NOBODY}"),
        ("active-server", [0], (2,), "not attacked by this: it sends nothing, and is for the threat server; not for an "
         "active-server"),
    ],
)  # fmt: skip
def test_without_a_client_to_attack_the_first_reason_is_told(threat, clients, shape, reason, monkeypatch, tmp_path):
    room = Room(monkeypatch, tmp_path, shape=shape)
    found, scores = room.one(Claiming(), threat, clients)
    assert (type(found), found.reason, found.ran, scores) == (NotRun, reason, False, [])
    assert (found.attack, found.threat) == ("mine", threat)
    assert room.scored == []


@pytest.mark.parametrize("kind", ["active", "blind"])
def test_under_an_active_server_those_run_that_send_or_see_nothing(kind, monkeypatch, tmp_path):
    room = Room(monkeypatch, tmp_path)
    special = type("Special", (Claiming,), {kind: True, "__module__": __name__})
    (ran, _, _), _ = room.one(special(), "active-server", [0])
    assert (ran.clients, ran.blind) == ([0], kind == "blind")


@pytest.mark.parametrize(
    ("heard", "clients", "every"),
    [((0, 2), [0, 2], "all"), ((4,), [0, 2], "none"), ((0,), [0], "all"), ((0,), [0, 2], None)],
)
def test_who_took_part_is_told_only_if_somebody_did_not(heard, clients, every, monkeypatch, tmp_path):
    room = Room(monkeypatch, tmp_path, heard)
    found, scores = room.one(Claiming(part=True), "server", clients)
    if every is None:
        assert [bool(part.member) for part in room.scored[0][0]] == [True, False]
        assert [part.claims for part in room.scored[0][0]] == [TookPart(0.0), TookPart(2.0)]
    else:
        assert found.reason == f"{every} of the clients took part: there is nobody to tell them from"
        assert (found.ran, scores) == (False, [])


def test_claims_of_which_some_are_scores_are_scored(monkeypatch, tmp_path):
    """All clients took part, and only one claim is about that."""

    class Mixed(Claiming):
        def run(self, scene):
            return TookPart(0.5) if scene.target == 0 else ("claims", scene.target)

    room = Room(monkeypatch, tmp_path, (0, 2))
    (ran, _, _), _ = room.one(Mixed(), "server", [0, 2])
    assert ran.clients == [0, 2]
    assert [part.claims for part in room.scored[0][0]] == [TookPart(0.5), ("claims", 2)]


def test_two_scenes_take_turns_and_one_has_none_to_take(monkeypatch):
    taken, real = [], attack_run.take_turns
    monkeypatch.setattr(attack_run, "take_turns", lambda turns: taken.append(len(turns)) or real(turns))
    for targets in ((), (5,), (3, 5), (3, 5, 6)):
        scenes = [SimpleNamespace(target=k, device=torch.device("cpu")) for k in targets]
        attack = SimpleNamespace(run=lambda scene: scene.target)
        assert attack_run._claims(attack, "draws", scenes) == list(targets)
    assert taken == [2, 3]


def test_each_client_is_attacked_with_generators_of_its_own(monkeypatch):
    """Side by side as alone. An error that is no reason is raised."""

    class Draws(Attack):
        def run(self, scene):
            if scene.target == 7:
                raise ValueError("seven")
            if scene.target == 6:
                raise ThreatError("six")
            return torch.rand(2).tolist()

    def scenes(*targets):
        return [SimpleNamespace(target=k, device=torch.device("cpu")) for k in targets]

    expected = []
    for k in (3, 5):
        with seeded("attack", "draws", k):
            expected.append(torch.rand(2).tolist())
    before = torch.get_rng_state()
    assert attack_run._claims(Draws(), "draws", scenes(3, 5)) == expected
    assert attack_run._claims(Draws(), "draws", scenes(5)) == expected[1:]
    assert attack_run._claims(Draws(), "draws", []) == []
    assert torch.equal(before, torch.get_rng_state())
    for targets in ((6,), (3, 6)):
        assert str(attack_run._claims(Draws(), "draws", scenes(*targets))[-1]) == "six"
    for targets in ((7,), (3, 7)):
        with pytest.raises(ValueError, match="seven"):
            attack_run._claims(Draws(), "draws", scenes(*targets))


def test_nobody_watches_unless_asked(monkeypatch):
    stage, watched = Stage(monkeypatch), []
    monkeypatch.setattr(attack_run, "_within", lambda watch, *of: watched.append((watch, *of)) or unwatched)
    attack_run.attack_run("run", attacks=["guess", "blank"])
    assert watched == [(unwatched, 0, 2), (unwatched, 1, 2)]
    assert len(stage.all("attack")) == 2
