"""Utility: accuracy of the global model and of what each client would deploy, on copies, out of band."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedaudit.errors import ContractError
from fedaudit.runtime.party import Client
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.runtime.scores import (
    Accuracy,
    BestTestRound,
    ClientScores,
    GlobalScores,
    Reached,
    Result,
    Spread,
    Utility,
)
from fedaudit.runtime.world import World
from fedaudit.stats import mean_std, wilson
from fedaudit.training.copying import copied

DEPLOYED = ""  # the name, among a client's scores, of the model that it would deploy
SETS = ("global_test", "local_test", "validation")
Scores = dict[str, dict[str, float]]  # by point of the round and by test set


@torch.no_grad()
def hits(model: nn.Module, x: Tensor, y: Tensor, batch: int = 1024) -> int:
    """How many rows the model classifies right."""
    right = torch.zeros((), dtype=torch.int64, device=y.device)
    for xs, ys in zip(x.split(batch), y.split(batch), strict=True):
        right += (model(xs).argmax(1) == ys).sum()
    return int(right)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> Accuracy:
    right = hits(model, x, y)
    low, high = wilson(right, len(y))
    return Accuracy(accuracy=right / max(len(y), 1), low=low, high=high, n=len(y))


def evaluate(
    world: World,
    predictor: nn.Module | None,
    open_client: Callable[[int], Client] | None,
    version: Callable[[int], object] = lambda k: None,
    known: dict[object, Scores] | None = None,
    global_points: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Utility:
    """One round's utility. `open_client(k)` gives client k in a copy of its committed state.

    The global model is tried on the common test set and, as papers on personalisation report it, on each client's own
    held-out records (`local_test`). A client whose state is of a `version` that is in `known` is not evaluated again.
    Where the method offers further points of a round (`Method.points`), their models are scored as the deployed ones
    are, under `points` by name; the server's (`Method.global_points`) as the global model is, under `global_points`.
    """
    known = {} if known is None else known
    utility = Utility()
    if predictor is not None:
        utility.global_ = _global_scores(world, _frozen(predictor, "predictor"))
    utility.global_points = {
        name: _global_scores(world, _frozen(model, f"global_points: {name}")) for name, model in global_points.items()
    }
    if open_client is not None:
        each: list[Scores] = []
        for k in range(world.setting.clients):
            key = (k, version(k))
            if key not in known:
                for old in [other for other in known if isinstance(other, tuple) and other[0] == k]:
                    del known[old]
                known[key] = _client_scores(world, k, open_client)
            each.append(known[key])
        utility.clients = _over_clients([scores[DEPLOYED] for scores in each])
        utility.points = {name: _over_clients([scores[name] for scores in each]) for name in _points(each)}
    return utility


def _global_scores(world: World, model: nn.Module) -> GlobalScores:
    right = total = 0
    own: list[float] = []  # of each client that holds records out
    for k in range(world.setting.clients):
        x, y = world.held_out(k, "validation")
        right, total = right + hits(model, x, y), total + len(y)
        x, y = world.held_out(k, "nonmembers")
        own += [hits(model, x, y) / len(y)] if len(y) else []
    scores = GlobalScores(
        test=accuracy(model, *world.test),
        local_test=_spread(own),
        validation=right / total if total else None,
    )
    if (domain := world.federation.dataset.test_domain) is not None:  # one column for each, as papers print them
        x, y = world.test
        of = {name: (domain == d).to(y.device) for d, name in enumerate(world.federation.dataset.domain_names)}
        scores.test_by_domain = {name: accuracy(model, x[rows], y[rows]) for name, rows in of.items()}
    return scores


def _client_scores(world: World, k: int, open_client: Callable[[int], Client]) -> Scores:
    client = open_client(k)
    models = {**world.method.points(client), DEPLOYED: world.method.personal(client)}
    local, validation = world.held_out(k, "nonmembers"), world.held_out(k, "validation")
    sets = {"global_test": world.test, "local_test": local, "validation": validation}
    scored: dict[int, dict[str, float]] = {}  # by the module's identity: the deployed one is often a point, too
    for point, model in models.items():
        if id(model) not in scored:
            what = f"points: {point}" if point else "personal"
            # The client was opened for this alone: its own model need not be copied.
            frozen = model.eval() if model is client.model else _frozen(model, what)
            scored[id(model)] = {name: hits(frozen, x, y) / len(y) for name, (x, y) in sets.items() if len(y)}
    return {point: scored[id(model)] for point, model in models.items()}


def _points(each: list[Scores]) -> list[str]:
    """The names of the points, which all clients must offer: a mean over some of them would pass for one over all."""
    if len({frozenset(scores) for scores in each}) > 1:
        offered = sorted({name for scores in each for name in scores} - {DEPLOYED})
        raise ContractError(
            f"Method.points offers other names for one client than for another ({', '.join(offered)}). Offer the same "
            "for all; a client that has not come so far offers its model as it is."
        )
    return sorted(each[0].keys() - {DEPLOYED}) if each else []


def _over_clients(each: list[dict[str, float]]) -> ClientScores:
    return ClientScores(**{name: _spread([scores[name] for scores in each if name in scores]) for name in SETS})


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    mean, std = mean_std(values)
    return Spread(mean=mean, std=std, each=values)


def _frozen(model: nn.Module, what: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ContractError(f"Method.{what} returned a {type(model).__name__}, not a module.")
    return copied(model).eval()


def results(rounds: Sequence[RoundRecord]) -> Result:
    """The last round and the one chosen on validation data; the best test round only under that name."""
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
