"""Measures the accuracy of the global model and of what each client would deploy, on copies, outside the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedaudit.errors import ContractError
from fedaudit.rng import generator
from fedaudit.runtime.party import Client
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.runtime.scores import (
    Accuracy,
    BestTestRound,
    ClientScores,
    GlobalScores,
    Reached,
    Result,
    Sampled,
    Spread,
    Utility,
)
from fedaudit.runtime.world import World
from fedaudit.stats import mean_std, sampled_mean, wilson
from fedaudit.training.model_copies import copied

DEPLOYED = ""  # the name, among a client's scores, of the model that it would deploy
SETS = ("global_test", "local_test", "matched_test", "validation")
BATCH = 1024  # records that go through a model at a time
# Up to this many clients are all evaluated; of more, this many are drawn. The mean of a thousand accuracies lies within
# 3.1 points of the mean over all clients with 95 % probability, and closer as a rule: their standard deviation is at
# most 0.5. More would cost time and room in the record, and tell hardly more.
EVERY_CLIENT = 1_000
Scores = dict[str, dict[str, float]]  # by point of the round and by test set


Points = Callable[[Client], Mapping[str, nn.Module]]  # a client's models at other points, by name


@dataclass
class Known:
    """A cache of earlier evaluations, so that nothing is evaluated twice."""

    # By client: the version of its state, and its scores.
    clients: dict[int, tuple[object, Scores]] = field(default_factory=dict)
    # By architecture: which records of the common test set the common start classifies right.
    starts: dict[str, Tensor] = field(default_factory=dict)


def looked_at(seed: int, clients: int) -> list[int]:
    """Return the clients that are evaluated, ascending: all, or a sample of many.

    The sample is the same in every round, so that rounds can be compared, and a client that did not train in between is
    not evaluated again.
    """
    if clients <= EVERY_CLIENT:
        return list(range(clients))
    order = torch.randperm(clients, generator=generator(seed, "evaluation", "clients"))
    return sorted(order[:EVERY_CLIENT].tolist())


def sampling_note(utility: Utility) -> list[str]:
    """Return a note for the record that some of many clients were looked at; empty if all were."""
    seen = utility.sampled()
    if seen is None:
        return []
    return [
        f"means over clients are from {seen.looked_at:,} of {seen.of:,} clients, drawn at random: each has a 95 % "
        "interval in the record"
    ]


@torch.no_grad()
def right(model: nn.Module, x: Tensor, y: Tensor, batch: int = BATCH) -> Tensor:
    """Return for each row whether the model classifies it right."""
    if not len(y):
        return torch.zeros(0, dtype=torch.bool, device=y.device)
    pairs = zip(x.split(batch), y.split(batch), strict=True)
    return torch.cat([model(xs).argmax(1) == ys for xs, ys in pairs])


def hits(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Return how many rows the model classifies right."""
    return int(right(model, x, y).sum())


def matched(is_right: Tensor, y: Tensor, own: Tensor) -> float | None:
    """Return the accuracy on a test set whose classes are weighted by their numbers of records in `own`.

    Classes that the test set lacks do not count; None if it lacks all of them.
    """
    is_right, y, share = is_right.cpu(), y.cpu(), own.double()
    there = y.bincount(minlength=len(share))
    share = share.where(there > 0, 0.0)
    by_class = y[is_right].bincount(minlength=len(share)) / there.clamp(min=1)
    return float((share * by_class).sum() / share.sum()) if share.any() else None


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> Accuracy:
    right = hits(model, x, y)
    low, high = wilson(right, len(y))
    return Accuracy(accuracy=right / max(len(y), 1), low=low, high=high, n=len(y))


def evaluate(
    world: World,
    predictor: nn.Module | None,
    open_client: Callable[[int], Client] | None,
    version: Callable[[int], object] = lambda k: None,
    known: Known | None = None,
    global_points: Mapping[str, nn.Module] = MappingProxyType({}),
    next_points: Points | None = None,
) -> Utility:
    """Return one round's utility. `open_client(k)` gives client k in a copy of its committed state.

    The global model is tried on the common test set and, as papers on personalisation report it, on each client's own
    held-out records (`local_test`), and so are the clients' models. If nobody holds out records, a client's accuracy on
    the common test set is told a second time, with the classes weighted as in its own records (`matched_test`).
    A client whose state is of a `version` that is in `known` is not evaluated again.
    If there are more than EVERY_CLIENT clients, a sample is looked at (`looked_at`), and the means over clients say so.
    If the method offers further points of a round (`Method.points`), their models are scored like the deployed ones,
    under `points` by name; so are those that depend on the server's new state (`Method.next_points`). The server's
    points (`Method.global_points`) are scored like the global model, under `global_points`.
    """
    known = Known() if known is None else known
    utility = Utility()
    if predictor is not None:
        utility.global_ = _global_scores(world, _frozen(predictor, "predictor"))
    utility.global_points = {
        name: _global_scores(world, _frozen(model, f"global_points: {name}")) for name, model in global_points.items()
    }
    if open_client is not None:
        each: list[Scores] = []
        for k in looked_at(world.setting.seed, world.setting.clients):
            now = version(k)
            if k not in known.clients or known.clients[k][0] != now or next_points is not None:
                known.clients[k] = now, _client_scores(world, k, open_client, known.starts, next_points)
            each.append(known.clients[k][1])
        utility.clients = _over_clients(world, [scores[DEPLOYED] for scores in each])
        utility.points = {name: _over_clients(world, [scores[name] for scores in each]) for name in _points(each)}
    return utility


def _global_scores(world: World, model: nn.Module) -> GlobalScores:
    clients = range(world.setting.clients)
    looked = looked_at(world.setting.seed, len(clients))
    count = _counts_one_by_one if len(looked) == len(clients) else _counts_in_batches
    validation = count(world, model, clients, "validation")
    own = count(world, model, looked, "nonmembers")
    total = sum(n for _, n in validation)
    scores = GlobalScores(
        test=accuracy(model, *world.test),
        local_test=_spread([right / n for right, n in own if n], _holders(world, "local_test")),
        validation=sum(right for right, _ in validation) / total if total else None,
    )
    if (domain := world.federation.dataset.test_domain) is not None:  # one column for each, as papers print them
        x, y = world.test
        of = {name: (domain == d).to(y.device) for d, name in enumerate(world.federation.dataset.domain_names)}
        scores.test_by_domain = {name: accuracy(model, x[rows], y[rows]) for name, rows in of.items()}
    return scores


HeldOut = Literal["nonmembers", "validation"]
Counts = list[tuple[int, int]]  # by client: how many of its records are classified right, and how many it has


def _counts_one_by_one(world: World, model: nn.Module, clients: Sequence[int], what: HeldOut) -> Counts:
    rows = (world.held_out(k, what) for k in clients)
    return [(hits(model, x, y), len(y)) for x, y in rows]


@torch.no_grad()
def _counts_in_batches(world: World, model: nn.Module, clients: Sequence[int], what: HeldOut) -> Counts:
    """Count like `_counts_one_by_one`, for many clients with a few records each: a batch holds those of several
    clients.

    A call of a model takes as long for four records as for a hundred.
    """
    held = [getattr(world.federation.shards[k], what) for k in clients]
    index = np.concatenate(held)
    right = [0]  # for each record: how many of those before it are right
    for at in range(0, len(index), BATCH):
        x, y = world.records(index[at : at + BATCH])
        right += (right[-1] + (model(x).argmax(1) == y).cumsum(0)).tolist()
    ends = np.cumsum([len(of) for of in held]).tolist()
    return [(right[end] - right[end - len(of)], len(of)) for end, of in zip(ends, held, strict=True)]


def _client_scores(
    world: World, k: int, open_client: Callable[[int], Client], starts: dict[str, Tensor], next_points: Points | None
) -> Scores:
    """Return the scores of a client's models.

    The model of a client that was never asked is still the start of its architecture. All such models classify the same
    records of the common test set right, which are found once (`starts`).
    """
    client = open_client(k)
    further = next_points(client) if next_points is not None else {}
    models = {**world.method.points(client), **further, DEPLOYED: world.method.personal(client)}
    local, validation = world.held_out(k, "nonmembers"), world.held_out(k, "validation")
    sets = {"global_test": world.test, "local_test": local, "validation": validation}
    own = world.federation.labels(k).bincount(minlength=world.federation.dataset.classes)
    scored: dict[int, dict[str, float]] = {}  # by the module's id(): the deployed one is often a point, too
    for point, model in models.items():
        if id(model) not in scored:
            what = f"points: {point}" if point else "personal"
            # The client was opened for this alone: its own model need not be copied.
            frozen = model.eval() if model is client.model else _frozen(model, what)
            mine = scored[id(model)] = {}
            untouched = model is client.model and world.is_start(k, model)
            for name, (x, y) in sets.items():
                if not len(y):
                    continue
                if untouched and name == "global_test" and world.archs[k] in starts:
                    is_right = starts[world.archs[k]]
                else:
                    is_right = right(frozen, x, y)
                mine[name] = int(is_right.sum()) / len(y)
                if name == "global_test":
                    if untouched:
                        starts[world.archs[k]] = is_right
                    if not world.setting.holdout and (like_own := matched(is_right, y, own)) is not None:
                        mine["matched_test"] = like_own
    return {point: scored[id(model)] for point, model in models.items()}


def _points(each: list[Scores]) -> list[str]:
    """Return the names of the points, which all clients must offer: a mean over some clients would pass for one over
    all."""
    if len({frozenset(scores) for scores in each}) > 1:
        offered = sorted({name for scores in each for name in scores} - {DEPLOYED})
        raise ContractError(
            f"Method.points offers different names for different clients ({', '.join(offered)}). Offer the same "
            "for all; a client that has not come so far offers its model as it is."
        )
    return sorted(each[0].keys() - {DEPLOYED}) if each else []


def _over_clients(world: World, each: list[dict[str, float]]) -> ClientScores:
    by_set = {name: [scores[name] for scores in each if name in scores] for name in SETS}
    return ClientScores(**{name: _spread(values, _holders(world, name)) for name, values in by_set.items()})


def _holders(world: World, name: str) -> int | None:
    """Return how many of all clients have records of a set, if only some are looked at; None if all are."""
    if world.setting.clients <= EVERY_CLIENT:
        return None
    if name in ("global_test", "matched_test"):
        return world.setting.clients
    what = "nonmembers" if name == "local_test" else name
    return sum(len(getattr(shard, what)) > 0 for shard in world.federation.shards)


def _spread(values: list[float], of: int | None) -> Spread | None:
    """Return the spread of all clients' values or, if `of` is set, of a sample of `of` clients."""
    if not values:
        return None
    mean, std = mean_std(values)
    if of is None:
        return Spread(mean=mean, std=std, each=values)
    low, high = sampled_mean(values, of)
    return Spread(mean=mean, std=std, each=values, sampled=Sampled(looked_at=len(values), of=of, low=low, high=high))


def _frozen(model: nn.Module, what: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ContractError(f"Method.{what} returned a {type(model).__name__}, not a module.")
    return copied(model).eval()


def results(rounds: Sequence[RoundRecord]) -> Result:
    """Return the last round and the one chosen on validation data; the best test round appears only under that name."""
    evaluated = [_reached(row.round, row.utility) for row in rounds if row.utility is not None]
    if not evaluated:
        return Result()
    scored = [(score, reached) for reached in evaluated if (score := reached.validation_score()) is not None]
    chosen = max(scored, key=lambda s: (s[0], -s[1].round), default=None)
    best = max(evaluated, key=lambda reached: (reached.test_score() or 0.0, -reached.round))
    return Result(
        last=evaluated[-1],
        chosen=chosen[1] if chosen else None,
        best_test_round=BestTestRound(round=best.round, accuracy=best.test_score()),
    )


def _reached(t: int, utility: Utility) -> Reached:
    return Reached(round=t, **{name: getattr(utility, name) for name in Utility.model_fields})
