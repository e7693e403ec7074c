"""Judges membership results against chance, and tests the audit split with baselines that saw no release.

A baseline is blind: it knows the candidates and the auxiliary set, and no release. Whatever it finds is the fault of
the audit split. If none finds anything, an attack is held against chance alone, not against what a baseline happened to
find in its noise. If the split is broken, an attack shows a leak only if it beats every baseline too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedaudit.attack.claims import Attacked, Groups
from fedaudit.attack.membership import auc, auc_difference
from fedaudit.attack.score import pooled
from fedaudit.stats import Measured

CONFIDENCE = 0.95
BROKEN_CONFIDENCE = 0.99  # every run is tested: at 0.95 one honest split in twenty would be called broken
Parts = Sequence[Attacked]
BROKEN = "the audit split is broken: it can be told from the records alone who is a member"


@dataclass(frozen=True)
class LeakVerdict:
    """The meaning of a membership result: whether it shows a leak, and the reasons in words."""

    verdict: str
    split_broken: bool
    leak: bool | None = None  # None for a blind baseline, which cannot show a leak
    against_blind: dict[str, Measured] = field(default_factory=dict)  # the AUC minus that of each blind baseline


def judge_blind(blind: Mapping[str, Parts], confidence: float = BROKEN_CONFIDENCE) -> dict[str, LeakVerdict]:
    """Return, for each blind baseline, whether it shows the split to be broken, corrected for the number of tests
    (Bonferroni).

    A ranking that is wrong beyond its interval tells members as well as one that is right. Scores that the scorer
    learned have their direction already: for them, only above chance counts.
    """
    each = 1 - (1 - confidence) / max(len(blind), 1)
    found = {}
    for name, parts in blind.items():
        value = auc(*pooled(parts, name), each)
        one_way = any(isinstance(part.claims, Groups) for part in parts)
        broken = value.low > 0.5 or (value.high < 0.5 and not one_way)
        text = BROKEN if broken else "no sign that the audit split is broken"
        shown = f"AUC {value.shown()} at {each:.2%} confidence, corrected for {len(blind)} blind baselines"
        found[name] = LeakVerdict(f"{_upper(text)} ({shown}).", broken)
    return found


def judge(
    name: str, parts: Parts, blind: Mapping[str, Parts], broken: bool, confidence: float = CONFIDENCE
) -> LeakVerdict:
    """Return whether an attack shows a leak. It must beat chance beyond its interval.

    On a broken split it must also beat every blind baseline on its own candidates, so that what the split tells is not
    taken for a leak.
    """
    scores, member = pooled(parts, name)
    value = auc(scores, member, confidence)
    of_client = {part.client for part in parts}
    against = {}
    for baseline, theirs in blind.items():
        same = [part for part in theirs if part.client in of_client]
        if [part.client for part in same] == [part.client for part in parts]:
            against[baseline] = auc_difference(scores, pooled(same, baseline)[0], member, confidence)
    unbeaten = [baseline for baseline, gap in against.items() if gap.low <= 0] if broken else []
    leak = value.low > 0.5 and not unbeaten
    if value.low <= 0.5:
        text = f"No leak shown: AUC {value.shown()} is not above chance beyond its interval"
    elif unbeaten:
        worst = unbeaten[0]
        text = (
            f"No leak shown: AUC {value.shown()} is above chance, but not above the blind baseline {worst} beyond the "
            f"interval of their difference, {against[worst].shown()}"
        )
    else:
        text = f"A leak: AUC {value.shown()} is above chance"
        over = ", ".join(f"{baseline} by {gap.shown()}" for baseline, gap in against.items())
        text += f" and above {over}" if broken and over else ""
    text += f"; but {BROKEN}." if broken else "."
    return LeakVerdict(text, broken, leak, against)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
