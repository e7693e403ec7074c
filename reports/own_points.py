"""The effect of a method's own steps: the accuracy of its models within a round, held against what it deploys.

A method may offer its models at further points of a round (`Method.global_points`, `Method.points`), and the record
keeps what they reached. A point called "before X" says what X did. If a step changed nothing, its row says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedaudit.reports.runs import Group
from fedaudit.runtime.scores import ClientScores, Utility

BEFORE = "before "  # begins the name of a point that lies before a step; the rest of the name is the step
BETWEEN = "what clients do between the points of a round"  # these points have no order
NOTHING = 0.0005  # a change of accuracy that prints as 0.0 points


@dataclass(frozen=True)
class Effect:
    """The change of accuracy by one step of a method. `last` is by seed, in the last evaluated round."""

    step: str
    last: dict[int, float]
    largest: float  # the largest size of a change in any evaluated round of any seed
    signed: bool = True  # the order of the two points is known, so that the change has a direction

    @property
    def nothing(self) -> bool:
        """Say if the step changed nothing in any round of any seed."""
        return self.largest < NOTHING

    def text(self) -> str:
        """Return the effect in a sentence."""
        seeds = f"{len(self.last)} {'seed' if len(self.last) == 1 else 'seeds'}"
        words = self.step[:1].upper() + self.step[1:]
        if self.nothing:
            return f"{words} changed accuracy by 0.0 points in every evaluated round of {seeds}: it does nothing here."
        mean = 100 * sum(self.last.values()) / len(self.last)
        by = f"{mean:+.1f}" if self.signed else f"{mean:.1f}"
        return f"{words} changed accuracy by {by} points in the last round ({seeds})."


def effects(group: Group) -> list[Effect]:
    """Return what each step of the method that has a point before it did to accuracy."""
    changes: dict[str, dict[int, list[float]]] = {}
    for run in group.runs:
        for row in run.record.rounds:
            for step, change in (_changes(row.utility) if row.utility else {}).items():
                changes.setdefault(step, {}).setdefault(run.seed, []).append(change)
    return [
        Effect(
            step, {seed: of[-1] for seed, of in by_seed.items()},
            max(abs(c) for of in by_seed.values() for c in of), not step.startswith(BETWEEN),
        )
        for step, by_seed in changes.items()
    ]  # fmt: skip


def _changes(utility: Utility) -> dict[str, float]:
    found = {}
    if utility.global_ is not None:
        for name, point in utility.global_points.items():
            if name.startswith(BEFORE):
                found[name.removeprefix(BEFORE)] = utility.global_.test.accuracy - point.test.accuracy
    # Points of clients' models have no order that the record knows: a step did something if they differ at all.
    of_clients = [score for point in (utility.clients, *utility.points.values()) if (score := _mean(point)) is not None]
    if utility.points and len(of_clients) > 1:
        found[f"{BETWEEN} ({', '.join(utility.points)})"] = max(of_clients) - min(of_clients)
    return found


def _mean(scores: ClientScores | None) -> float | None:
    return scores.global_test.mean if scores is not None and scores.global_test is not None else None
