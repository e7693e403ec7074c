"""Utility: accuracy of the global model and of what each client would deploy, on copies, out of band."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.errors import ContractError
from fedaudit.runtime.party import Client
from fedaudit.runtime.world import World
from fedaudit.stats import mean_std, wilson

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


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    right = hits(model, x, y)
    low, high = wilson(right, len(y))
    return {"accuracy": right / max(len(y), 1), "low": low, "high": high, "n": len(y)}


def evaluate(
    world: World,
    predictor: nn.Module | None,
    open_client: Callable[[int], Client] | None,
    version: Callable[[int], object] = lambda k: None,
    known: dict[object, Scores] | None = None,
    global_points: Mapping[str, nn.Module] = MappingProxyType({}),
) -> dict[str, Any]:
    """One round's utility. `open_client(k)` gives client k in a copy of its committed state.

    The global model is tried on the common test set and, as papers on personalisation report it, on each client's own
    held-out records (`local_test`). A client whose state is of a `version` that is in `known` is not evaluated again.
    Where the method offers further points of a round (`Method.points`), their models are scored as the deployed ones
    are, under `points` by name; the server's (`Method.global_points`) as the global model is, under `global_points`.
    """
    known = {} if known is None else known
    utility: dict[str, Any] = {"global": None, "clients": None}
    if predictor is not None:
        utility["global"] = _global_scores(world, _frozen(predictor, "predictor"))
    if global_points:
        utility["global_points"] = {
            name: _global_scores(world, _frozen(model, f"global_points: {name}"))
            for name, model in global_points.items()
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
        utility["clients"] = _over_clients([scores[DEPLOYED] for scores in each])
        if points := _points(each):
            utility["points"] = {name: _over_clients([scores[name] for scores in each]) for name in points}
    return utility


def _global_scores(world: World, model: nn.Module) -> dict[str, Any]:
    right = total = 0
    own: list[float] = []  # of each client that holds records out
    for k in range(world.setting.clients):
        x, y = world.validation(k)
        right, total = right + hits(model, x, y), total + len(y)
        x, y = world.nonmembers(k)
        own += [hits(model, x, y) / len(y)] if len(y) else []
    scores: dict[str, Any] = {
        "test": accuracy(model, *world.test),
        "local_test": _mean_std_each(own),
        "validation": right / total if total else None,
    }
    if (domain := world.federation.dataset.test_domain) is not None:  # one column for each, as papers print them
        x, y = world.test
        of = {name: (domain == d).to(y.device) for d, name in enumerate(world.federation.dataset.domain_names)}
        scores["test_by_domain"] = {name: accuracy(model, x[rows], y[rows]) for name, rows in of.items()}
    return scores


def _client_scores(world: World, k: int, open_client: Callable[[int], Client]) -> Scores:
    client = open_client(k)
    models = {**world.method.points(client), DEPLOYED: world.method.personal(client)}
    sets = {"global_test": world.test, "local_test": world.nonmembers(k), "validation": world.validation(k)}
    scored: dict[int, dict[str, float]] = {}  # by the module's identity: the deployed one is often a point, too
    for point, model in models.items():
        if id(model) not in scored:
            frozen = _frozen(model, f"points: {point}" if point else "personal")
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


def _over_clients(each: list[dict[str, float]]) -> dict[str, Any]:
    """Mean, standard deviation and every client's own, by test set; None for a set of which nobody has records."""
    rows = {name: [scores[name] for scores in each if name in scores] for name in SETS}
    return {name: _mean_std_each(values) for name, values in rows.items()}


def _mean_std_each(values: list[float]) -> dict[str, Any] | None:
    if not values:
        return None
    mean, std = mean_std(values)
    return {"mean": mean, "std": std, "each": values}


def _frozen(model: nn.Module, what: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ContractError(f"Method.{what} returned a {type(model).__name__}, not a module.")
    return copy.deepcopy(model).eval()


def validation_score(utility: dict[str, Any]) -> float | None:
    """What chooses the round: the global model's validation accuracy, or the clients' mean where there is none."""
    if utility["global"] is not None:
        return utility["global"]["validation"]
    clients = utility["clients"]
    return clients["validation"]["mean"] if clients and clients["validation"] else None


def test_score(utility: dict[str, Any]) -> float | None:
    if utility["global"] is not None:
        return utility["global"]["test"]["accuracy"]
    return utility["clients"]["global_test"]["mean"] if utility["clients"] else None


def results(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The last round and the one chosen on validation data; the best test round only under that name."""
    evaluated = [(row["round"], row["utility"]) for row in rounds if row["utility"] is not None]
    if not evaluated:
        return {"last": None, "chosen": None, "best_test_round": None}
    scored = [(validation_score(u), t, u) for t, u in evaluated]
    chosen = max((s for s in scored if s[0] is not None), key=lambda s: (s[0], -s[1]), default=None)
    best = max(evaluated, key=lambda e: (test_score(e[1]) or 0.0, -e[0]))
    return {
        "last": {"round": evaluated[-1][0], **evaluated[-1][1]},
        "chosen": {"round": chosen[1], **chosen[2]} if chosen else None,
        "best_test_round": {"round": best[0], "accuracy": test_score(best[1])},
    }
