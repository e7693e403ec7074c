"""Combines what a server can read from answers into one score, with weights that shadows teach.

Attacks see different things: the confidence of the target, its entropy, how far both stand out from models that never
saw the record. Which of them says most depends on the run, and to pick the best one afterwards, by the truth, would
make it look better than an attacker can be. Here the attacker decides without the truth. Each shadow stands in for the
target in turn, and the others are its references. The auxiliary records that it was trained on, or not, teach a
logistic regression what the measurements are worth together. The regression is then asked about the target and the
candidates. No candidate has a part in the choice, so nothing has to be paid for it in the interval.

Measurements, each the mean over the rounds that the transcript kept:

- the logit-scaled confidence phi in the true class (`lira`);
- phi in standard deviations above the references that do not hold the record (`lira_offline`);
- the logarithm of p(x | theta) / p(x), with p(x) from these references (`rmia`), for each of its `a`.

Shadows are those of `lira_offline`, which the run folder keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.membership.rmia import MIXES, marginal
from fedaudit.attacks.shared._models import ShadowAttack, Shadows
from fedaudit.attacks.shared._view import confidence
from fedaudit.errors import ThreatError
from fedaudit.registry import register_attack

FEWEST = 2  # references that do not hold a record: one has no spread
LEAST = 1e-12  # of a variance
LOWEST = 1e-9  # of a probability: a logarithm below would rule the regression


def measured(answers: Tensor, references: Tensor, holds: Tensor, y: Tensor) -> Tensor:
    """Return the measurements of each row; NaN if fewer than two references do not hold its record.

    `answers` are logits (rows, classes) of the model that is looked at, `references` are logits (models, rows, classes)
    of others, and `holds` (models, rows) says whose training had the record.
    """
    phi = confidence(answers, y)
    of_references = confidence(references.flatten(0, 1), y.repeat(len(references))).unflatten(0, (-1, len(y)))
    out = ~holds
    count = out.sum(0).double()
    mean = of_references.where(out, 0).sum(0) / count
    squares = (of_references - mean).where(out, 0).square().sum(0)
    known = count >= FEWEST
    # One variance for all records, as `lira_offline` has it with few shadows.
    variance = (squares[known].sum() / (count[known] - 1).sum().clamp(min=1)).clamp(min=LEAST)
    p_out = of_references.sigmoid().where(out, 0).sum(0) / count
    log_p = phi.sigmoid().clamp(min=LOWEST).log()
    ratios = [log_p - marginal(p_out, a).clamp(min=LOWEST).log() for a in MIXES]
    found = torch.stack([phi, (phi - mean) / variance.sqrt(), *ratios], 1)
    return found.where(known[:, None], torch.nan)


def of_shadow(i: int, shadows: Shadows) -> Tensor:
    """Return the measurements of the auxiliary records where shadow i stands in for the target."""
    aux = shadows.auxiliary
    others = [j for j in range(len(shadows.logits)) if j != i]
    logits, member, y = shadows.logits[:, aux], shadows.member[:, aux], shadows.y[aux]
    return measured(logits[i], logits[others], member[others], y)


@register_attack("combined")
class Combined(ShadowAttack):
    def run(self, scene: Scene) -> Claims:
        rounds = self.attacked_rounds(scene, online=False)
        notes = sorted({note for _, shadows in rounds for note in shadows.notes})
        last = self._scores(rounds[-1:]) if len(rounds) > 1 else None
        return Claims(self._scores(rounds), tuple(notes), last)

    def _scores(self, rounds: Sequence[tuple[Tensor, Shadows]]) -> Tensor:
        shadows = rounds[-1][1]
        aux, n = shadows.auxiliary, shadows.candidates
        taught = [
            torch.stack([of_shadow(i, of_round) for _, of_round in rounds]).mean(0) for i in range(len(shadows.logits))
        ]
        asked = torch.stack(
            [measured(of[:n], seen.logits[:, :n], seen.member[:, :n], seen.y[:n]) for of, seen in rounds]
        ).mean(0)
        return torch.from_numpy(learned(torch.cat(taught), shadows.member[:, aux].flatten(), asked))


def learned(taught: Tensor, member: Tensor, asked: Tensor) -> NDArray[np.float64]:
    """Return the log-odds of "member" of each row of `asked`, by a regression on the rows of `taught`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known = taught.isfinite().all(1)
    X, inside = taught[known].cpu().numpy(), member[known].cpu().numpy()
    if not 0 < inside.sum() < len(inside):
        raise ThreatError(
            "the shadows leave too few auxiliary records in or out to learn from: raise aux, or take more shadows"
        )
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return np.asarray(model.fit(X, inside).decision_function(asked.cpu().numpy()))
