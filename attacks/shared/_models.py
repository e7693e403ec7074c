"""Shared by several attacks: the attacked model, its answers to records, and shadows of it.

The attacked models are those that the target uploaded whole, in all rounds that the transcript kept, if the threat sees
them; otherwise the published one. A record leaves its trace in every round, so scores of all rounds together say more
than those of the last one, which stand beside them.

Shadows exist only if the threat sees that upload and the messages that led to it. They replay the target's update
function on these messages (fedaudit.attack.replay). A published model, which many clients made over many rounds, has no
shadows: a shadow would be a model trained centrally, and its answers would be about that. Attacks that need shadows
then say so and do not run; those that only query a model do run.

A shadow is trained on these records:

- It has as many records as the target: its uploaded count if the view shows one, otherwise an estimate from the number
  of candidates and the public shares of the split (holdout, validation).
- Online, it has a random half of the candidates, and the next shadow has the other half. Every candidate is in exactly
  half of the shadows, by a fair coin. Offline, it has none of them.
- The rest are auxiliary records, by class in the candidates' proportions. Members and non-members of a client are of
  one distribution, so the candidates' labels show its skew. If a class runs out, others fill in. If all are used up,
  records are repeated, and the result says so.
- Offline, every shadow leaves half of the auxiliary records of each class out: its answers on them are those of a model
  that has not seen them, which `shadow` and `rmia` need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import in_chunks, model_of
from fedaudit.errors import ThreatError
from fedaudit.wire.transcript import TranscriptEntry

# --- the attacked model ----------------------------------------------------------------------------------------------


def whole_uploads(scene: Scene) -> Iterator[tuple[TranscriptEntry, str, nn.Module]]:
    """Yield the messages in which the target uploaded its whole model, the field, and the model; the last one first."""
    for entry, name in reversed(scene.released("weights")):
        if entry.state_shapes(name) is not None and (model := model_of(scene, scene.target, entry[name])) is not None:
            yield entry, name, model


def last_upload(scene: Scene) -> tuple[TranscriptEntry, str, nn.Module] | None:
    return next(whole_uploads(scene), None)


def target_model(scene: Scene) -> nn.Module | None:
    found = last_upload(scene)
    return scene.published() if found is None else found[2]


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits in double precision: these attacks look at the tails of a softmax."""
    return in_chunks(model.eval(), x).double()


def log_rest(logits: Tensor) -> Tensor:
    """Return log(1 - p_i) of each class, also where p_i rounds to 1."""
    log_p = logits.log_softmax(-1)
    rest = torch.log1p(-log_p.exp().clamp(max=0.9))
    top = log_p.argmax(-1, keepdim=True)  # the only one that may come near 1: as the sum of the others
    others = log_p.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return rest.scatter(-1, top, others)


def over_rounds(scores: Sequence[Tensor], notes: Sequence[str] = ()) -> Claims:
    """Return claims whose scores are the mean over rounds, oldest first, with the last round's beside them."""
    together = torch.stack(list(scores))
    return Claims(together.mean(0), tuple(notes), together[-1] if len(together) > 1 else None)


class ModelAttack(Attack):
    """An attack that needs a model to query, whichever one the threat sees."""

    rounds: int | None = Field(None, ge=1)  # the last so many uploads; None: all that the transcript kept

    def cannot(self, scene: Scene) -> str | None:
        if target_model(scene) is None:
            return f"the {scene.view.threat} sees no model of client {scene.target}"
        return None

    def by_round(self, scene: Scene, score: Callable[[nn.Module], Tensor]) -> Claims:
        """Return claims from the scores that each of the attacked models gives."""
        uploads = itertools.islice(whole_uploads(scene), self.rounds)
        found = [score(model) for _, _, model in uploads][::-1]
        if not found:
            model = scene.published()
            assert model is not None  # cannot() has looked
            found = [score(model)]
        return over_rounds(found)


# --- shadows ---------------------------------------------------------------------------------------------------------


def records(scene: Scene) -> int:
    """Return how many records the target has, as far as the attacker knows."""
    for entry, name in reversed(scene.released("count")):
        if isinstance(entry[name], int):
            return entry[name]
    holdout, validation = scene.setting["holdout"], scene.setting["validation"]
    return max(1, round(len(scene.y) / 2 * max(1.0, (1 - holdout - validation) / holdout)))


def draw(scene: Scene, shadows: int, online: bool) -> tuple[list[Tensor], Tensor, bool]:
    """Return indices into the pool for each shadow, which pool records each one holds, and whether any was repeated."""
    candidates, (_, y) = len(scene.y), scene.pool
    n, rng = records(scene), scene.rng("online shadows" if online else "offline shadows")
    picks, repeated = [], False
    half = torch.empty(0, dtype=torch.int64, device=scene.device)
    for i in range(shadows):
        inside = half[:0]
        if online:
            if i % 2 == 0:
                half = torch.randperm(candidates, generator=rng, device=scene.device)
            inside = half[: candidates // 2] if i % 2 == 0 else half[candidates // 2 :]
        wanted = max(0, n - len(inside))
        filled = candidates + fill(scene.y, y[candidates:], wanted, 0.0 if online else 0.5, rng)
        pick = torch.cat([inside, filled])
        if 0 < len(filled) < wanted:
            pick = torch.cat([inside, filled.repeat(-(-wanted // len(filled)))[:wanted]])
            repeated = True
        picks.append(pick)
    member = torch.zeros(shadows, len(y), dtype=torch.bool, device=scene.device)
    for row, pick in zip(member, picks, strict=True):
        row[pick] = True
    return picks, member, repeated


def fill(like: Tensor, y: Tensor, wanted: int, spare: float, rng: torch.Generator) -> Tensor:
    """Return up to `wanted` different indices into y, by class in the proportions of `like`, then any.

    `spare` is the share of each class that is left out.
    """
    order = torch.randperm(len(y), generator=rng, device=y.device)
    classes = y.unique().tolist()
    free = {c: order[y[order] == c] for c in classes}
    free = {c: of_class[: len(of_class) - int(spare * len(of_class))] for c, of_class in free.items()}
    quota = {c: round(wanted * float((like == c).double().mean())) for c in classes}
    taken = torch.cat([free[c][: quota[c]] for c in classes] or [order[:0]])
    others = torch.cat([free[c][quota[c] :] for c in classes] or [order[:0]])
    others = others[torch.randperm(len(others), generator=rng, device=y.device)]
    return torch.cat([taken, others])[:wanted]


@dataclass(frozen=True, eq=False)
class Shadows:
    """The shadows' answers. Rows are the pool: the candidates first, then the auxiliary records."""

    logits: Tensor  # (shadows, rows, classes), double
    member: Tensor  # (shadows, rows): whether the shadow was trained on the record
    y: Tensor
    candidates: int
    notes: tuple[str, ...]

    @cached_property
    def auxiliary(self) -> slice:
        return slice(self.candidates, None)


class ShadowAttack(Attack):
    """An attack that compares the target's upload with shadows of it."""

    needs: ClassVar[frozenset[str]] = frozenset({"weights"})

    shadows: int = Field(16, ge=2)  # shadows of each client; the papers take 64 and more
    # The last so many uploads are attacked together; each has shadows of its own. None: all that the transcript kept.
    rounds: int | None = Field(None, ge=1)
    together: int = Field(64, ge=1)  # shadows that are trained at the same time
    compile: bool = False  # compile the stacked training: it pays on a GPU, for long trainings

    def cannot(self, scene: Scene) -> str | None:
        if (reason := super().cannot(scene)) is not None:
            return reason
        if (found := last_upload(scene)) is None:
            return f"client {scene.target} uploads parts of its model, of which no shadow is made"
        if not len(scene.auxiliary[1]):
            return "there are no auxiliary records to train shadows on: set aux above 0"
        try:
            scene.replayable(found[0])
        except ThreatError as e:
            return str(e)
        return None

    def attacked_rounds(self, scene: Scene, online: bool) -> list[tuple[Tensor, Shadows]]:
        """Return the target's and the shadows' logits for each of the last uploads, oldest first.

        A shadow holds the same records in each round, so its answers and the target's answers of a round belong
        together. Going back from the last upload, the first one that cannot be replayed ends the series.
        """
        picks, member, repeated = draw(scene, self.shadows, online)
        x, y = scene.pool
        found: list[tuple[Tensor, Shadows]] = []
        for entry, field, model in itertools.islice(whole_uploads(scene), self.rounds):
            try:
                table, notes = scene.shadows(entry, field, picks, together=self.together, compile=self.compile)
            except ThreatError:
                if not found:
                    raise
                break
            if repeated:
                notes += ("there are too few auxiliary records for shadows as large as the target: some are repeated",)
            found.append((logits_of(model, x), Shadows(table.double(), member, y, len(scene.y), notes)))
        return found[::-1]
