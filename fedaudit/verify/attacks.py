"""Checks of attack results: scored and judged again from what was kept.

Membership attacks keep the score of every candidate. The truth and the classes beside them are computed anew from the
data, and then every figure, interval and verdict. Histograms and scores of participation stand in the result itself.
Of reconstructions nothing is kept: their intervals and verdicts are checked, and the rest is the author's word.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedaudit.attack.attack_run import candidates_of, rescored
from fedaudit.attack.membership import auc
from fedaudit.attack.stored_scores import KeptScores, kept
from fedaudit.errors import FedauditError
from fedaudit.registry import find, read_from
from fedaudit.runtime.attack_result import (
    AnyResult,
    HistogramResult,
    MembershipResult,
    NotRun,
    ParticipationResult,
    Rate,
    ReconstructionResult,
)
from fedaudit.runtime.code_digest import is_same, source_of
from fedaudit.runtime.world import World
from fedaudit.stats import clopper_pearson, student_t
from fedaudit.verify.case import Case

FILE = "attacks.json"
CLOSE = 1e-6
ROUNDED = 1e-3  # claimed shares are kept to four digits, and errors are sums of them
DIGITS = 1.01e-4  # by which two rounded shares may differ in truth
JUDGED = ("against_blind", "leak", "split_broken", "verdict")


def check_attacks(case: Case) -> None:
    """Check every attack's result."""
    if not case.record.attacks:
        return
    again: dict[tuple[str, str], tuple[AnyResult, bool]] = {}
    try:
        again = {(r.attack, r.threat): (r, bool(parts)) for r, parts in rescored(case.run)}
    except (FedauditError, ValueError, KeyError, IndexError, RuntimeError) as e:
        case.found.contradicted("kept scores", "scores", "the files", "scores of attacks", str(e)[:300])
    _check_truth(case)
    alike = _same_clients(case)
    for i, result in enumerate(case.record.attacks):
        figure, at = f"attack {result.attack} by the {result.threat}", f"attacks.{i}"
        now, scored = again.get((result.attack, result.threat), (result, False))
        if isinstance(result, NotRun):
            case.found.word(figure, f"it did not run: {result.reason}")
        elif isinstance(result, MembershipResult):
            _check_membership(case, figure, at, result, now, scored, alike)
        elif isinstance(result, HistogramResult):
            _check_histogram(case, figure, at, result)
        elif isinstance(result, ParticipationResult):
            _check_participation(case, figure, at, result)
        else:
            _check_reconstruction(case, figure, at, result)


def _other_code(result: AnyResult, case: Case) -> str:
    """Return why the code that scores here may give other figures; empty if it is the code that scored there."""
    try:
        with read_from(case.folder):
            now = source_of(find(result.attack, "attacks"))
    except FedauditError as e:
        return f"the attack's code is not here: {e}"
    return "" if is_same(result.source, now) else "other code attacked and scored it than is here"


def _same_clients(case: Case) -> bool:
    """Return whether all membership attacks were on the same clients, and judged by the same baselines."""
    by_threat: dict[str, set[tuple[int, ...]]] = {}
    for result in case.record.attacks:
        if isinstance(result, MembershipResult):
            by_threat.setdefault(result.threat, set()).add(tuple(result.clients))
    return all(len(of) == 1 for of in by_threat.values())


def _check_membership(
    case: Case, figure: str, at: str, result: MembershipResult, now: AnyResult, scored: bool, alike: bool
) -> None:
    if not scored:
        case.found.contradicted(
            figure, f"scores/{result.threat.replace(':', '-')}/{result.attack}.safetensors", "the file",
            f"scores of {len(result.clients)} clients", "no scores of this transcript",
        )  # fmt: skip
        return
    left_out = {"wall_s", *(() if alike else JUDGED)}
    said, computed = result.model_dump(exclude=left_out), now.model_dump(exclude=left_out)
    case.found.compare(
        figure, FILE, at, said, computed, close=CLOSE, reason="from kept scores", excuse=_other_code(result, case)
    )
    if not alike:
        case.found.word(f"{figure}, verdict", "attacks were on different clients, so their baselines differ")


def _check_truth(case: Case) -> None:
    """Check that the candidates' membership and classes beside the kept scores are those of the data."""
    figure = "truth beside the scores"
    try:
        parts = kept(case.folder, record=case.record)
    except FedauditError as e:
        case.found.contradicted(figure, "scores", "the files", "scores of attacks", str(e)[:300])
        return
    if not parts:
        return
    if case.world is None:
        case.found.word(figure, case.why_no_world)
        return
    known: dict[int, tuple[Any, Any]] = {}
    wrong = False
    for part in parts:
        if part.client not in known:
            try:
                known[part.client] = _truth(case.world, part.client)
            except (FedauditError, IndexError) as e:
                case.found.contradicted(figure, _file(part), f"client {part.client}", "candidates", str(e)[:200])
                return
        labels, member = known[part.client]
        for name, said, true in (("member", part.member, member), ("labels", part.labels, labels)):
            if said.tolist() != true and not wrong:
                wrong = True
                apart = sum(a != b for a, b in zip(said.tolist(), true, strict=False))
                case.found.contradicted(
                    figure, _file(part), f"client {part.client}: {name}", f"{len(said)} values",
                    f"{len(true)} values, {apart} of them others",
                )  # fmt: skip
    if not wrong:
        case.found.recomputed(figure, f"{len(parts)} tables, from the data")


def _truth(world: World, k: int) -> tuple[list[int], list[bool]]:
    _, y, member = candidates_of(world, k)
    return y.cpu().tolist(), member.tolist()


def _file(part: KeptScores) -> str:
    return f"scores/{part.threat.replace(':', '-')}/{part.attack}.safetensors"


def _check_histogram(case: Case, figure: str, at: str, result: HistogramResult) -> None:
    if case.world is None:
        case.found.word(figure, case.why_no_world)
        return
    errors, uniform, claimed, held = [], [], [], []
    for k, said in result.client.items():
        labels = case.world.members(int(k))[1].cpu().numpy()
        true = np.bincount(labels, minlength=case.world.classes) / max(len(labels), 1)
        shares = np.asarray(said.claimed)
        if shares.shape != true.shape:
            case.found.contradicted(figure, FILE, f"{at}.client.{k}.claimed", len(shares), len(true))
            return
        claimed.append(shares)
        held.append(true > 0)
        errors.append(float(abs(shares - true).sum() / 2))
        uniform.append(float(abs(1 / case.world.classes - true).sum() / 2))
        for name, now in (("error", errors[-1]), ("uniform", uniform[-1])):
            if abs(getattr(said, name) - now) > ROUNDED:
                case.found.contradicted(figure, FILE, f"{at}.client.{k}.{name}", getattr(said, name), now)
                return
    gain = student_t([u - e for u, e in zip(uniform, errors, strict=True)])
    pooled = {"error": student_t(errors), "uniform": student_t(uniform), "gain": gain}
    for name, now_ in pooled.items():
        if not case.found.compare(f"{figure}, {name}", FILE, f"{at}.pooled.{name}", getattr(result.pooled, name), now_,
                                  close=ROUNDED, reason="from the claimed shares"):  # fmt: skip
            return
    _check_presence(case, f"{figure}, presence", at, result, np.concatenate(claimed), np.concatenate(held))
    leak = result.pooled.gain.low is not None and result.pooled.gain.low > 0
    case.found.compare(f"{figure}, verdict", FILE, f"{at}.leak", result.leak, leak)


def _check_presence(case: Case, figure: str, at: str, result: HistogramResult, claimed: Any, held: Any) -> None:
    """Check the AUC for "holds this class". Shares are kept rounded, so pairs that are nearly equal leave it open."""
    said = result.pooled.presence
    if said is None or said.value is None or held.all() or not held.any():
        return
    gaps = claimed[held][:, None] - claimed[~held][None, :]
    low, high = float((gaps > DIGITS).mean()), float((gaps > -DIGITS).mean())
    if low - CLOSE <= said.value <= high + CLOSE:
        case.found.recomputed(figure, f"from the claimed shares, which are rounded: {low:.3f} to {high:.3f}")
    else:
        case.found.contradicted(figure, FILE, f"{at}.pooled.presence.value", said.value, f"{low:.4f} to {high:.4f}")


def _check_participation(case: Case, figure: str, at: str, result: ParticipationResult) -> None:
    if not case.whole:
        case.found.word(figure, "the transcript is not whole")
        return
    heard = {entry.client for entry in case.transcript.entries() if entry.direction == "up"}
    said = {k: row.took_part for k, row in result.client.items()}
    case.found.compare(
        f"{figure}, truth", FILE, f"{at}.client", said, {k: int(k) in heard for k in said},
        reason="from the transcript",
    )  # fmt: skip
    scores = np.array([row.score for row in result.client.values()], dtype=np.float64)
    took_part = np.array(list(said.values()))
    case.found.compare(figure, FILE, f"{at}.pooled.auc", result.pooled.auc, auc(scores, took_part), close=CLOSE,
                       reason="from the scores in the result")  # fmt: skip
    case.found.compare(f"{figure}, verdict", FILE, f"{at}.leak", result.leak, result.pooled.auc.low > 0.5)


def _check_reconstruction(case: Case, figure: str, at: str, result: ReconstructionResult) -> None:
    wrong = False
    tables = {"pooled": result.pooled, **{f"baselines.{name}": of for name, of in result.baselines.items()}}
    for place, scores in (tables | {f"client.{k}": of for k, of in result.client.items()}).items():
        for name, said, now in _rate(scores.identification):
            if not math.isclose(said, now, rel_tol=CLOSE, abs_tol=CLOSE):
                wrong = True
                case.found.contradicted(figure, FILE, f"{at}.{place}.identification.{name}", said, now)
    if not wrong:
        case.found.word(
            figure, "rebuilt records are not kept (`fedaudit attack` repeats it); shares of identified records and "
            "their intervals were recomputed from the hits"
        )  # fmt: skip


def _rate(rate: Rate) -> list[tuple[str, float, float]]:
    if rate.value is None or rate.hits is None or not rate.n:
        return []
    low, high = clopper_pearson(rate.hits, rate.n)
    found = [("value", rate.value, rate.hits / rate.n)]
    return found + ([("low", rate.low, low), ("high", rate.high, high)] if rate.low is not None else [])  # type: ignore[list-item]
