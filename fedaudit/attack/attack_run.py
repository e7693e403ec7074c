"""Runs attacks on a run folder, scores and judges them, and keeps the results in its record."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit.attack.claims import Attacked, TookPart
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attack.score import membership, score, settled
from fedaudit.attack.stored_scores import keep, kept
from fedaudit.attack.verdict import judge, judge_blind
from fedaudit.errors import ContractError, DataError, RunError, ThreatError
from fedaudit.progress import Watch, unwatched
from fedaudit.registry import find, names
from fedaudit.rng import generator, seed_of, seeded
from fedaudit.runtime.attack_result import AnyResult, MembershipFound, MembershipResult, NotRun, Ran, result_of
from fedaudit.runtime.code_digest import source_of
from fedaudit.runtime.folder import RunFolder, claim_for_attacks
from fedaudit.runtime.lockstep import Globals, Turn, take_turns
from fedaudit.runtime.run_record import save_attacks
from fedaudit.runtime.seal import seal_again, unseal
from fedaudit.runtime.task import compute
from fedaudit.runtime.world import World
from fedaudit.setting import validated
from fedaudit.wire.transcript import ACTIVE, Threat, TranscriptView

NOBODY = "has nobody to attack but itself"
A_WHILE = 1.0  # seconds: results are saved if the last save is older than this


def attack_run(
    folder: Path | str,
    *,
    attacks: Sequence[str | Mapping[str, Any]] | None = None,
    threat: str = "server",
    clients: list[int] | None = None,
    watch: Watch | None = None,
    failed: Callable[[str, Exception], None] | None = None,
) -> list[AnyResult]:
    """Run attacks on a run folder, score them, add the results to its record, and return them.

    An attack is named, or given with its settings: `{"attack": "loss", ...}`. The blind baselines always run, and run
    first: every membership result is held against them. A result that took a while is saved as soon as it is there. If
    `failed` is given, it is called with the name and the error of an attack that goes wrong, and the others run;
    otherwise the error is raised.
    """
    run = RunFolder(folder)
    world = run.world
    parsed = Threat.parse(threat)
    for k in [*(clients or []), *([] if parsed.peer is None else [parsed.peer])]:
        if not 0 <= k < world.setting.clients:
            raise ThreatError(f"There is no client {k}; the run has {world.setting.clients}, numbered from 0.")
    claim_for_attacks(run.folder)
    unseal(run.folder)
    chosen = [made(spec) for spec in (names("attacks") if attacks is None else attacks)]
    named = {name for name, _ in chosen}
    blind = [made(name) for name in names("attacks") if find(name, "attacks").blind]  # type: ignore[attr-defined]
    chosen += [(name, attack) for name, attack in blind if name not in named]
    before = {(r.attack, r.threat): r for r in run.record.attacks}
    found: dict[str, AnyResult] = {}
    baselines: list[tuple[AnyResult, list[Attacked]]] = []

    def save() -> list[AnyResult]:
        there = [found[name] for name, _ in chosen if name in found]
        results = [result for result in there if result.attack in named or _is_news(result, before)]
        known = before | {(r.attack, r.threat): r for r in results}
        save_attacks(run.folder, run.record.transcript_digest, [known[key] for key in sorted(known)])
        return results

    saved = time.perf_counter()
    with compute(world):
        for number, (name, attack) in enumerate(sorted(chosen, key=lambda item: not item[1].blind)):
            tell = _within(watch or unwatched, number, len(chosen))
            try:
                one = _one(attack, name, run, world, parsed, clients, tell)
            except Exception as e:
                if failed is None:
                    raise
                failed(name, e)
                continue
            found[name] = one[0]
            if attack.blind:
                baselines.append(one)
                continue
            _judge([*baselines, one])
            if time.perf_counter() > saved + A_WHILE:
                save()
                saved = time.perf_counter()
    _judge(baselines)
    results = save()
    if run.record.status == "done":
        seal_again(run.folder)
    return results


def rescore(folder: Path | str) -> list[AnyResult]:
    """Score and judge the membership attacks on a run once more, from the scores that they left; nothing is attacked.

    Use it after the way of scoring has changed. An attack's code, settings and time stay in its result as they are.
    Results without scores, from an earlier version, stay as they are.
    """
    run = RunFolder(folder)
    found = rescored(run)
    if not any(parts for _, parts in found):
        raise RunError(
            f"{folder} keeps no scores of a membership attack. Run `fedaudit attack {folder}` first, which leaves them."
        )
    unseal(run.folder)
    save_attacks(run.folder, run.record.transcript_digest, [result for result, _ in found])
    if run.record.status == "done":
        seal_again(run.folder)
    return [result for result, parts in found if parts]


def rescored(run: RunFolder) -> list[tuple[AnyResult, list[Attacked]]]:
    """Return each attack's result, scored and judged again where its scores were kept, and those scores.

    Nothing is written. A result without scores comes back as it is, with an empty list.
    """
    found: list[tuple[AnyResult, list[Attacked]]] = []
    for result in run.record.attacks:
        parts: list[Attacked] = []
        if isinstance(result, MembershipResult):
            same = kept(
                run.folder, attack=result.attack, threat=result.threat, clients=result.clients, record=run.record
            )
            if [part.client for part in same] == sorted(result.clients):
                order = {k: place for place, k in enumerate(result.clients)}
                parts = [part.attacked() for part in sorted(same, key=lambda part: order[part.client])]
                ran = Ran(**{name: getattr(result, name) for name in Ran.model_fields})
                anew = membership(parts, result.attack, _seed(result.attack))
                result = result_of(ran, anew, result.wall_s)
        found.append((result, parts))
    for threat in dict.fromkeys(result.threat for result, _ in found):
        _judge([(result, parts) for result, parts in found if result.threat == threat and parts])
    return found


def _judge(found: list[tuple[AnyResult, list[Attacked]]]) -> None:
    """Add to each membership result its verdict."""
    claims = [(result, parts) for result, parts in found if isinstance(result, MembershipResult)]
    blind = {result.attack: parts for result, parts in claims if result.blind}
    verdicts = judge_blind(blind)
    broken = any(verdict.split_broken for verdict in verdicts.values())
    for result, parts in claims:
        verdict = verdicts[result.attack] if result.blind else judge(result.attack, parts, blind, broken)
        if verdict.leak is not None:
            result.against_blind, result.leak = verdict.against_blind, verdict.leak
        result.split_broken, result.verdict = verdict.split_broken, verdict.verdict


def _is_news(result: AnyResult, before: Mapping[tuple[str, str], AnyResult]) -> bool:
    """Return whether a baseline that nobody named tells more than the record holds."""
    old = before.get((result.attack, result.threat))
    if isinstance(result, NotRun):
        return old is None and not result.reason.endswith(NOBODY)
    return len(result.clients) > (0 if old is None or isinstance(old, NotRun) else len(old.clients))


def made(spec: str | Mapping[str, Any]) -> tuple[str, Attack]:
    """Return an attack's name and the attack, from a name or from a table with its name and settings."""
    settings = {} if isinstance(spec, str) else dict(spec)
    name = spec if isinstance(spec, str) else settings.pop("attack", None)
    if not isinstance(name, str):
        raise ContractError(f"{spec!r} does not name an attack. Write a name, or {{attack = NAME, SETTING = VALUE}}.")
    return name, validated(find(name, "attacks"), settings, f"setting of {name}")


def _one(
    attack: Attack,
    name: str,
    run: RunFolder,
    world: World,
    threat: Threat,
    clients: list[int] | None,
    watch: Watch,
) -> tuple[AnyResult, list[Attacked]]:
    view = TranscriptView(run.transcript, threat)
    targets = [k for k in (clients if clients is not None else range(world.setting.clients)) if k != threat.peer]
    settings, source = attack.model_dump(mode="json"), source_of(type(attack))
    who: dict[str, Any] = {"attack": name, "threat": str(threat), "settings": settings}
    who |= {"blind": attack.blind, "source": source}
    parts: list[Attacked] = []
    begun = time.perf_counter()
    reasons: list[str] = []
    waiting: list[tuple[Scene, Tensor]] = []  # clients to be attacked at the same time

    def carry_out() -> None:
        for (scene, member), claims in zip(waiting, _claims(attack, name, [s for s, _ in waiting]), strict=True):
            if isinstance(claims, ThreatError):  # the attack found out on the way that it cannot run
                reasons.append(str(claims))
                continue
            found = settled(claims, member)
            truth = torch.tensor(scene.target in _received(run)) if isinstance(found, TookPart) else member
            parts.append(Attacked(scene.target, found, scene.x, scene.y, truth))
        waiting.clear()

    for place, k in enumerate(targets):
        x, y, member = candidates_of(world, k)
        watch(place, len(targets), f"{name}, client {k}" if len(targets) > 1 else name)
        scene = Scene(run, view, k, x, y, _within(watch, place, len(targets), f"{name}, client {k}: "))
        if threat.name == ACTIVE and not (attack.active or attack.blind):
            reasons.append(f"not attacked by this: it sends nothing, and is for the threat server; not for an {ACTIVE}")
            continue
        if reason := attack.misfit(scene.shape) or attack.cannot(scene):
            reasons.append(reason)
            continue
        waiting.append((scene, member))
        if len(waiting) >= attack.at_once(scene):
            carry_out()
    carry_out()
    if not parts:
        return NotRun(**who, ran=False, reason=reasons[0] if reasons else f"{threat} {NOBODY}"), []
    if all(isinstance(part.claims, TookPart) for part in parts) and len({bool(part.member) for part in parts}) == 1:
        every = "all" if bool(parts[0].member) else "none"
        return NotRun(
            **who, ran=False, reason=f"{every} of the clients took part: there is nobody to tell them from"
        ), []
    ran = Ran(**who, clients=[part.client for part in parts], left_out=reasons)
    found = score(parts, world, run.folder / "pictures" / str(threat).replace(":", "-"), name, _seed(name))
    # Only scores are judged afterwards. The images of every attack's candidates would fill the memory.
    scores = [replace(part, x=part.x[:0]) for part in parts] if isinstance(found, MembershipFound) else []
    if scores:
        keep(run.folder, run.record, ran, scores)
    return result_of(ran, found, round(time.perf_counter() - begun, 3)), scores


def _claims(attack: Attack, name: str, scenes: Sequence[Scene]) -> list[Any]:
    """Return the attack's claims on each scene, or the ThreatError that it met there.

    Several scenes take turns, and work that they join in is done as one stack. Each has the global generators that it
    would have alone.
    """
    if len(scenes) < 2:
        return [_claim(attack, name, scene) for scene in scenes]
    turns = []
    for scene in scenes:
        generators = Globals(scene.device)
        generators.seed("attack", name, scene.target)
        turns.append(Turn(functools.partial(_run, attack, scene), generators))
    take_turns(turns)
    for turn in turns:
        if turn.error is not None:
            raise turn.error
    return [turn.result for turn in turns]


def _claim(attack: Attack, name: str, scene: Scene) -> Any:
    with seeded("attack", name, scene.target, device=scene.device):
        return _run(attack, scene)


def _run(attack: Attack, scene: Scene) -> Any:
    try:
        return attack.run(scene)
    except ThreatError as e:
        return e


def _within(watch: Watch, place: int, of: int, title: str = "") -> Watch:
    """Return a callback that reports the progress of part `place` of `of` as progress of the whole.

    If it has a title, it reports single steps, and reports at most ten times a second.
    """
    last = 0.0

    def tell(done: float, whole: float, what: str) -> None:
        nonlocal last
        if not title or done == 0 or time.monotonic() >= last + 0.1:
            last = time.monotonic()
            watch(place + min(done / (whole or 1), 1), of, f"{title}{what}")

    return tell


@functools.lru_cache(maxsize=1)
def _received(run: RunFolder) -> frozenset[int]:
    """Return the clients that took part: those from which anything was received."""
    return frozenset(entry.client for entry in run.transcript.entries() if entry.direction == "up")


def _seed(name: str) -> int:
    """Return the seed for the scorer's random choices."""
    return seed_of("attack", name, "scorer") % 2**32


def candidates_of(world: World, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many members as non-members of client k, in random order; the third tensor is the scorer's secret."""
    (xm, ym), (xn, yn) = world.candidates(k), world.nonmembers(k)
    n = min(len(ym), len(yn))
    if n == 0:
        raise DataError(f"Client {k} has no held-out records to tell members from: set --holdout above 0.")
    rng = generator(world.setting.seed, "scorer", k)
    members, others = (torch.randperm(len(y), generator=rng)[:n].to(y.device) for y in (ym, yn))
    x, y = torch.cat([xm[members], xn[others]]), torch.cat([ym[members], yn[others]])
    member = torch.arange(2 * n) < n
    order = torch.randperm(2 * n, generator=rng)
    return x[order.to(x.device)], y[order.to(x.device)], member[order]
