"""The scorer turns claims of one attack on several clients into numbers with intervals. It alone holds the truth."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from fedaudit.attack import shared_results
from fedaudit.attack.claims import Attacked, Claims, Features, Groups, Histogram, Reconstructions, TookPart
from fedaudit.attack.membership import auc, by_group, membership_scores
from fedaudit.errors import ContractError
from fedaudit.rng import generator
from fedaudit.runtime.attack_result import (
    ClientHistogram,
    ClientScore,
    Findings,
    HistogramFound,
    HistogramScores,
    MembershipFound,
    ParticipationFound,
    ParticipationScores,
)
from fedaudit.runtime.world import World
from fedaudit.stats import Estimate, student_t
from fedaudit.wire.codec import digest_of


def score(parts: Sequence[Attacked], world: World, folder: Path, name: str, seed: int) -> Findings:
    """Score claims of one sort, and return what was found. Pictures of this attack may be put into `folder`."""
    sorts = {type(part.claims) for part in parts}
    if sorts <= {Claims, Groups}:
        return membership(parts, name, seed)
    if sorts == {Histogram}:
        return histogram(parts, world, name)
    if sorts == {Reconstructions}:
        # It imports what draws pictures, which other claims do not need.
        from fedaudit.attack.reconstruction import reconstruction

        return reconstruction(parts, world, folder, name, seed)
    if sorts == {TookPart}:
        return participation(parts)
    what = ", ".join(sorted(sort.__name__ for sort in sorts))
    raise ContractError(
        f"{name} returned {what}. Return Claims, Reconstructions, Histogram or TookPart, always the same one."
    )


def membership(parts: Sequence[Attacked], name: str, seed: int) -> MembershipFound:
    scores, member = pooled(parts, name)
    owners = torch.cat([torch.full((len(part.y),), part.client) for part in parts])
    labels = torch.cat([part.y.cpu() for part in parts])
    found = _measured(scores, member, owners, labels, seed)
    if any(isinstance(part.claims, Claims) and part.claims.last is not None for part in parts):
        found.last_round = auc(*pooled([last_round(part) for part in parts], name))
    if notes := sorted({note for part in parts if isinstance(part.claims, Claims) for note in part.claims.notes}):
        found.notes = notes
    return found


def _measured(
    scores: NDArray[np.float64], member: NDArray[np.bool_], owners: Tensor, labels: Tensor, seed: int
) -> MembershipFound:
    """Return what the scores are worth. Baselines have the same in all rows of a seed, and against every threat."""
    truth = [torch.from_numpy(scores), torch.from_numpy(member), owners, labels]
    key = f"membership {seed} {digest_of(truth)}"
    if (data := shared_results.from_others(key)) is not None:
        try:
            return MembershipFound.model_validate_json(data)
        except ValidationError:  # a damaged file
            pass
    found = MembershipFound(
        pooled=membership_scores(scores, member, seed=seed),
        client=by_group(scores, member, owners.numpy(), "client", seed=seed),
    )
    found.class_ = by_group(scores, member, labels.numpy(), "class", seed=seed)
    shared_results.for_others(key, found.model_dump_json().encode())
    return found


def last_round(part: Attacked) -> Attacked:
    """Return the claims of the last round alone. A client of which one round was attacked has them as its claims."""
    last = part.claims.last if isinstance(part.claims, Claims) else None
    return part if last is None else replace(part, claims=Claims(last))


def pooled(parts: Sequence[Attacked], name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return scores and truth of all candidates of all clients, in one order for every attack."""
    scores = []
    for part in parts:
        claimed = part.claims.groups if isinstance(part.claims, Groups) else part.claims.scores
        if claimed.shape != (len(part.y),):
            shape = tuple(claimed.shape)
            raise ContractError(
                f"{name} gave scores of shape {shape} for {len(part.y)} candidates. Give one score each."
            )
        values = claimed.detach().cpu()
        scores.append(learned(values, part.member) if isinstance(part.claims, Groups) else values.double())
    return torch.cat(scores).numpy(), torch.cat([part.member for part in parts]).numpy()


def settled(claims: Any, member: Tensor) -> Any:
    """Return claims as they are; features are replaced by the scores that the scorer learns from them."""
    if not isinstance(claims, Features):
        return claims
    if len(claims.values) != len(member):
        raise ContractError(
            f"An attack gave features of {len(claims.values)} candidates; give those of all {len(member)}."
        )
    return Claims(classified(claims.values, member))


def halves(member: Tensor) -> Tensor:
    """Return a mask of the candidates that are judged by what was learned from the others.

    It holds half of the members, and half of the non-members.
    """
    judged = torch.zeros(len(member), dtype=torch.bool)
    rng = generator("scorer", "halves")
    for rows in (member.nonzero()[:, 0], (~member).nonzero()[:, 0]):
        judged[rows[torch.randperm(len(rows), generator=rng)[: (len(rows) + 1) // 2]]] = True
    return judged


TREES, LEARNED_ON = 100, 2000  # trees of a forest, and the most candidates that it learns from
_known: dict[str, Tensor] = {}  # a cache of forests' scores by candidates: baselines run with every attack


def classified(values: Tensor, member: Tensor) -> Tensor:
    """Return, for the candidates of one random half, the chance of being a member as a forest grown on the other half
    sees it.

    The other half gets 1/2. As in `learned`, the expected AUC is 1/2 exactly if membership is a coin flip.
    """
    key = digest_of([values.detach().cpu().contiguous(), member.cpu()])
    if key not in _known:
        scores = _grown_elsewhere(key, len(member))
        if scores is None:
            scores = _grown(values, member)
            file = io.BytesIO()
            np.save(file, scores.numpy(), allow_pickle=False)
            shared_results.for_others(f"forest {key}", file.getvalue())
        if len(_known) > 1000:
            _known.clear()
        _known[key] = scores
    return _known[key]


def _grown(values: Tensor, member: Tensor) -> Tensor:
    """Grow a forest on the half that is not judged, and return the scores of all candidates."""
    from sklearn.ensemble import ExtraTreesClassifier

    judged, x = halves(member), values.detach().flatten(1).double().cpu().numpy()
    at = (~judged).nonzero()[:, 0]
    at = at[torch.randperm(len(at), generator=generator("scorer", "forest"))[:LEARNED_ON]]
    scores = torch.full((len(member),), 0.5, dtype=torch.float64)
    if len(member[at].unique()) == 2:
        forest = ExtraTreesClassifier(TREES, min_samples_leaf=2, random_state=0, n_jobs=1)
        forest.fit(x[at.numpy()], member[at].numpy())
        scores[judged] = torch.from_numpy(forest.predict_proba(x[judged.numpy()])[:, 1])
    return scores


def _grown_elsewhere(key: str, count: int) -> Tensor | None:
    """Return the scores that another process left; None if there are none that fit."""
    data = shared_results.from_others(f"forest {key}")
    try:
        found = np.load(io.BytesIO(data or b""), allow_pickle=False)
    except (ValueError, EOFError):  # nobody grew it yet, or the file is damaged: it is grown again
        return None
    return torch.from_numpy(found) if found.dtype == np.float64 and found.shape == (count,) else None


def learned(groups: Tensor, member: Tensor) -> Tensor:
    """Return, for the candidates of one random half, the share of members of their group in the other half.

    The other half gets 1/2. Each half has half of the members and half of the non-members. If membership is a coin
    flip, the halves of a group are independent: the expected AUC is 1/2 exactly, and given what was learned the scores
    are independent, as intervals assume. If each half were scored by the other, the test would gain power (a perfect
    tell reaches 7/8 here), and lose both properties.
    """
    judged = halves(member)
    found, index = groups.unique(return_inverse=True)
    inside, every = (torch.bincount(index[rows], minlength=len(found)) for rows in (member & ~judged, ~judged))
    share = (inside + 1).double() / (every + 2)
    return share[index].where(judged, torch.tensor(0.5, dtype=torch.float64))


def histogram(parts: Sequence[Attacked], world: World, name: str) -> HistogramFound:
    """Return half the L1 distance to the true shares (0 to 1), and that of the uniform guess, over clients.

    `presence` says how well claimed shares rank the classes that a client holds above those that it does not, as an AUC
    over all pairs of a client and a class.
    """
    errors, uniform = [], []
    clients: dict[str, ClientHistogram] = {}
    claimed, held = [], []
    for part in parts:
        shares = part.claims.shares.detach().double().cpu().numpy()
        if shares.shape != (world.classes,) or not (shares >= 0).all() or abs(shares.sum() - 1) > 1e-4:
            raise ContractError(
                f"{name} did not give {world.classes} shares, one per class, that are >= 0 and sum to 1."
            )
        true = np.bincount(world.members(part.client)[1].cpu().numpy(), minlength=world.classes)
        true = true / true.sum()
        claimed.append(shares)
        held.append(true > 0)
        errors.append(float(abs(shares - true).sum() / 2))
        uniform.append(float(abs(1 / world.classes - true).sum() / 2))
        said = {"source": part.claims.source} if part.claims.source else {}
        clients[str(part.client)] = ClientHistogram(
            error=errors[-1], uniform=uniform[-1], claimed=shares.round(4).tolist(), **said
        )
    gain = student_t([u - e for u, e in zip(uniform, errors, strict=True)])
    leak = gain.low is not None and gain.low > 0
    verdict = "A leak: the label shares are nearer" if leak else "No leak shown: the label shares are not surely nearer"
    verdict += " to the truth than the uniform guess, where 0 is the truth itself."
    return HistogramFound(
        pooled=HistogramScores(
            error=student_t(errors),
            uniform=student_t(uniform),
            gain=gain,
            presence=presence(np.concatenate(claimed), np.concatenate(held)),
        ),
        client=clients,
        measure="half the L1 distance to the true label shares",
        leak=leak,
        verdict=verdict,
    )


def presence(claimed: NDArray[np.float64], held: NDArray[np.bool_]) -> Estimate:
    """Return the AUC of claimed shares for "holds this class", over pairs of client and class."""
    if held.all() or not held.any():
        reason = "all clients hold all classes" if held.all() else "no client holds a class"
        return Estimate(value=None, reason=reason)
    return auc(claimed, held)


def participation(parts: Sequence[Attacked]) -> ParticipationFound:
    """Return the AUC over clients: every client is one candidate, and took part if anything of it was received."""
    scores = np.array([part.claims.score for part in parts], dtype=np.float64)
    took_part = np.array([bool(part.member) for part in parts])
    value = auc(scores, took_part)
    leak = value.low > 0.5
    words = "A leak: who took part is told" if leak else "No leak shown: who took part is not surely told"
    count = int(took_part.sum())
    return ParticipationFound(
        pooled=ParticipationScores(auc=value, took_part=count, others=len(parts) - count),
        client={
            str(part.client): ClientScore(score=score, took_part=bool(part.member))
            for part, score in zip(parts, scores.tolist(), strict=True)
        },
        leak=leak,
        verdict=f"{words} from others better than by guessing: AUC {value.shown()} over clients.",
    )
