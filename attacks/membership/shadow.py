"""Shadow-model attack. Shokri et al., "Membership Inference Attacks Against Machine Learning Models", S&P 2017.

A classifier learns to tell members from others. It learns from shadows' predictions on auxiliary records, for which the
attacker knows whether the shadow was trained on them. It is then asked about the target's predictions on the
candidates.

- Shadows are replays of the target's own update (fedaudit.attack.replay, `_models`): those of `lira_offline`.
- The classifier sees the log-probabilities of all classes and, as the paper has it, there is one for each true class
  (`per_class`). A class with fewer than `least` examples of either sort, which happens with skewed clients, is judged
  by one classifier for all classes together, which sees the class as well; so are all without `per_class`.
- The paper leaves the classifier open (its own are small networks); `forest` is a random forest, `logistic` a logistic
  regression on standardised features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._models import ShadowAttack, Shadows
from fedaudit.errors import ThreatError
from fedaudit.registry import register_attack


def features(logits: Tensor) -> NDArray[np.float64]:
    return logits.log_softmax(-1).clamp(min=-100).cpu().numpy()


@register_attack("shadow")
class ShadowModels(ShadowAttack):
    classifier: Literal["forest", "logistic"] = "forest"
    per_class: bool = True  # one classifier for each true class
    # Classifiers see the answers of so many of the last uploads side by side (None: of all that the transcript kept).
    # They take as many times longer.
    rounds: int | None = Field(1, ge=1)
    least: int = Field(20, ge=2)  # examples of members, and of others, that a class needs for its own

    def run(self, scene: Scene) -> Claims:
        rounds = self.attacked_rounds(scene, online=False)
        notes = sorted({note for _, shadows in rounds for note in shadows.notes})
        last = self._scores(scene, rounds[-1:]) if len(rounds) > 1 else None
        return Claims(self._scores(scene, rounds), tuple(notes), last)

    def _scores(self, scene: Scene, rounds: Sequence[tuple[Tensor, Shadows]]) -> Tensor:
        """Return the classifier's answers about the candidates, learned from the answers of these rounds together."""
        shadows = rounds[-1][1]
        aux = shadows.auxiliary
        y = shadows.y[aux].cpu().numpy()
        of_rounds = [
            features(of_round.logits[:, aux]).reshape(len(of_round.logits) * len(y), -1) for _, of_round in rounds
        ]
        inside, labels = shadows.member[:, aux].cpu().numpy().ravel(), np.tile(y, len(shadows.logits))
        asked = np.hstack([features(target[: shadows.candidates]) for target, _ in rounds])
        seed = int(torch.randint(2**31 - 1, (), generator=scene.rng("classifier"), device=scene.device))
        asked_y = scene.y.cpu().numpy()
        scores = self.learn(np.hstack(of_rounds), labels, inside, asked, asked_y, scene.classes, seed)
        return torch.from_numpy(scores)

    def learn(
        self, X: Any, labels: Any, inside: Any, asked: Any, asked_y: Any, classes: int, seed: int
    ) -> NDArray[np.float64]:
        """Return the probability of "member" for each row that is asked about."""
        if not 0 < inside.sum() < len(inside):
            raise ThreatError("the shadows leave no auxiliary record out: raise aux, so that a classifier can learn")
        scores = np.empty(len(asked_y))
        rest = np.ones(len(asked_y), dtype=bool)
        for c in np.unique(asked_y) if self.per_class else ():
            rows = labels == c
            if min(inside[rows].sum(), (~inside[rows]).sum()) < self.least:
                continue
            mine = asked_y == c
            scores[mine] = self._made(seed).fit(X[rows], inside[rows]).predict_proba(asked[mine])[:, 1]
            rest &= ~mine
        if rest.any():
            one_hot = np.eye(classes)
            model = self._made(seed).fit(np.hstack([X, one_hot[labels]]), inside)
            scores[rest] = model.predict_proba(np.hstack([asked[rest], one_hot[asked_y[rest]]]))[:, 1]
        return scores

    def _made(self, seed: int) -> Any:
        if self.classifier == "logistic":
            from sklearn.linear_model import LogisticRegression
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import StandardScaler

            return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        from sklearn.ensemble import RandomForestClassifier

        return RandomForestClassifier(n_estimators=100, min_samples_leaf=5, random_state=seed, n_jobs=1)
