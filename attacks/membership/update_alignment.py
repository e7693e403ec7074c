"""Updates over rounds, other clients' as the null. FedMIA: Zhu et al., CVPR 2025, arXiv 2402.06289.

A client that trained on a record moved along that record's gradient, and its model has a smaller loss there. Neither
says much by itself: some records are easy for everybody. The other clients do not hold the candidate, so their updates
of the same round give its null distribution.

`null`: a few other clients give each candidate a mean that is itself mostly noise, and a variance that is worse. With
"shrunken", the default, the candidates share one variance, and each mean is drawn towards the mean over all candidates
as far as its noise says (empirical Bayes: the variance of a mean of K clients is the shared one over K). The score is
the mean over rounds of the distance in standard deviations. "own" is as published: a normal distribution for each
candidate by itself, and the mean of one-tailed probabilities.

Measurements: `cosine` of the candidate's gradient at the received model and the client's update (the paper's better
one); `loss`, the confidence log(p / (1 - p)) in the true label under the uploaded model; `both`, the mean of the two.
Rounds whose models the transcript no longer has are left out. Only clients of the target's architecture
count; where clients got different models, each one's gradient is taken at its own.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import confidence, in_chunks, others, received, trained, uploads
from fedaudit.registry import register_attack
from fedaudit.training.models import Net
from fedaudit.wire.transcript import TranscriptEntry

FEWEST = 2  # other clients: one has no spread
ENTRIES = 1 << 26  # of the gradients that are in memory at a time


@register_attack("update_alignment")
class UpdateAlignment(Attack):
    measure: Literal["cosine", "loss", "both"] = "both"
    null: Literal["shrunken", "own"] = "shrunken"  # how the other clients' measurements become a distribution
    rounds: int | None = Field(None, ge=1)  # the last so many; None: all that the transcript kept

    def cannot(self, scene: Scene) -> str | None:
        who = f"the {scene.view.threat}"
        shown = next((found for t in self._rounds(scene) if (found := self._shown(scene, t))), None)
        if shown is None:
            return (
                f"{who} sees no round with models of client {scene.target} and {FEWEST} others of its architecture, "
                "the null distribution"
            )
        if self.measure == "cosine" and received(scene, shown[scene.target][0]) is None:
            return f"{who} does not see the model that client {scene.target} started from, which the cosine needs"
        return None

    def run(self, scene: Scene) -> Claims:
        test = above_null if self.null == "shrunken" else one_tailed
        by_round: list[list[Tensor]] = []
        for t in self._rounds(scene):
            if not (shown := self._shown(scene, t)):
                continue
            tests: list[Tensor] = []
            if self.measure != "cosine":
                of_each = [confidence(in_chunks(model, scene.x), scene.y) for _, model in shown.values()]
                tests.append(test(torch.stack(of_each)))
            if self.measure != "loss" and (measured := self._cosines(scene, shown)) is not None:
                tests.append(test(measured))
            by_round += [tests] if tests else []
        together = torch.stack([one for tests in by_round for one in tests]).mean(0)
        return Claims(together, (), torch.stack(by_round[-1]).mean(0) if len(by_round) > 1 else None)

    def _rounds(self, scene: Scene) -> list[int]:
        kept = sorted(uploads(scene, scene.target))
        return kept[-self.rounds :] if self.rounds else kept

    def _shown(self, scene: Scene, t: int) -> dict[int, tuple[TranscriptEntry, Net]]:
        """Return the models of one round, the target's first; nothing if it or a null distribution is missing."""
        found: dict[int, tuple[TranscriptEntry, Net]] = {}
        for k in [scene.target, *others(scene)]:
            upload = uploads(scene, k).get(t) if scene.arch(k) == scene.arch(scene.target) else None
            if upload is not None and (model := trained(scene, *upload)) is not None:
                found[k] = upload[0], model
        return found if scene.target in found and len(found) > FEWEST else {}

    def _cosines(self, scene: Scene, shown: dict[int, tuple[TranscriptEntry, Net]]) -> Tensor | None:
        """Return, as client x candidate, how well an update agrees with a step down the candidate's gradient."""
        updates: dict[int, tuple[Net, Tensor]] = {}
        for k, (entry, model) in shown.items():
            if (start := received(scene, entry)) is not None:
                updates[k] = start, flat(start) - flat(model)  # what training took away
        if scene.target not in updates or len(updates) <= FEWEST:
            return None
        starts = [flat(start) for start, _ in updates.values()]
        if all(torch.equal(start, starts[0]) for start in starts):  # one broadcast: one gradient for all
            common = next(iter(updates.values()))[0]
            return cosines(common, scene.x, scene.y, torch.stack([change for _, change in updates.values()]))
        return torch.cat([cosines(start, scene.x, scene.y, change[None]) for start, change in updates.values()])


def above_null(measured: Tensor) -> Tensor:
    """Return by how many standard deviations the target's measurement (the first row) lies above the others' null.

    The null of a candidate is normal. Its variance is shared by all candidates, and its mean is shrunken.
    """
    null = measured[1:].double()
    K, mean = len(null), null.mean(0)
    within = null.var(0).mean()  # of one client around a candidate's mean
    between = (mean.var() - within / K).clamp(min=0) if len(mean) > 1 else within.new_zeros(())
    weight = between / (between + within / K + 1e-12)  # 1: a candidate's own mean; 0: the mean of all
    centre = mean.mean() + weight * (mean - mean.mean())
    return (measured[0].double() - centre) / (within * (1 + weight / K) + 1e-12).sqrt()


def one_tailed(measured: Tensor) -> Tensor:
    """Return P(a client that does not hold the candidate shows less than the target). The target's row is the first."""
    null = measured[1:].double()
    z = (measured[0].double() - null.mean(0)) / (null.var(0) + 1e-8).sqrt()
    return torch.special.ndtr(z)


def flat(model: Net) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def cosines(model: Net, x: Tensor, y: Tensor, updates: Tensor) -> Tensor:
    """Return, as update x candidate, the cosine of each update with each candidate's gradient."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(values: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, (values, buffers), (one[None],)), label[None])

    gradient = vmap(grad(loss), in_dims=(None, 0, 0))
    rows = max(1, min(len(x), ENTRIES // max(updates.shape[1], 1)))
    directions = torch.nn.functional.normalize(updates, dim=1)
    found = []
    for part, labels in zip(x.split(rows), y.split(rows), strict=True):
        of_part = torch.cat([g.flatten(1) for g in gradient(params, part, labels).values()], 1)
        found.append(torch.nn.functional.normalize(of_part, dim=1) @ directions.T)
    return torch.cat(found).T
