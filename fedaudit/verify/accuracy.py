"""Checks of accuracy: the kept models, tried again on the data set, and the data set itself by its digest.

The checkpoint holds the server's and the clients' states after the last round. From them the deployed models are built
as the run built them, compared with the published files, and evaluated. Earlier rounds' models are not kept: `rerun`
builds the server's again from the messages. The rest of the result follows from the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedaudit.errors import FedauditError
from fedaudit.rng import seeded
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import offers_next_points
from fedaudit.runtime.party import Client, Server
from fedaudit.runtime.run_opening import data_facts, model_facts
from fedaudit.runtime.scores import Accuracy, ClientScores, Spread, Utility
from fedaudit.runtime.task import compute, open_client
from fedaudit.runtime.utility import accuracy, evaluate, results
from fedaudit.runtime.world import World
from fedaudit.stats import mean_std, wilson
from fedaudit.verify.case import RECORD, Case
from fedaudit.wire.codec import decode
from fedaudit.wire.message import Record, load, state_of

CLOSE = 1e-6
ELSEWHERE = 0.01  # an accuracy may differ by this much on another machine type: a few records lie on the boundary
CLIENTS_ELSEWHERE = 0.05  # the same for a mean over clients, which have few records each
GLOBAL = "global.safetensors"


def check_sums(case: Case) -> None:
    """Check what follows from the record itself: intervals from hits, means from clients, the result from rounds."""
    record, found = case.record, case.found
    wrong = False
    for row in record.rounds:
        for path, part in _parts(row.utility, f"rounds.{row.round - 1}.utility"):
            for name, said, now in _derived(part):
                if abs(said - now) > CLOSE:
                    wrong = True
                    found.contradicted("intervals and means", RECORD, f"{path}.{name}", said, now)
    if not wrong:
        found.recomputed("intervals and means", "from hits and from the values of single clients")
    found.compare(
        "chosen, last and best round", RECORD, "result", record.result, results(record.rounds),
        reason="they follow from the rounds",
    )  # fmt: skip
    last = record.rounds[-1].round if record.rounds else 0
    numbers = [row.round for row in record.rounds]
    found.compare("numbers of rounds", RECORD, "rounds.round", numbers, list(range(1, len(numbers) + 1)))
    found.compare("number of rounds", RECORD, "setting.rounds", record.setting.rounds, last)


def _parts(tree: Any, path: str) -> Any:
    """Yield all accuracies and spreads of a utility, with their places."""
    if isinstance(tree, Accuracy | Spread):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, inner in tree.items():
            yield from _parts(inner, f"{path}.{key}")
    elif hasattr(tree, "model_fields_set"):
        for name, field in type(tree).model_fields.items():
            yield from _parts(getattr(tree, name), f"{path}.{field.alias or name}")


def _derived(part: Accuracy | Spread) -> list[tuple[str, float, float]]:
    """Return figures that follow from others: name, recorded, recomputed."""
    if isinstance(part, Accuracy):
        hits = round(part.accuracy * part.n)
        low, high = wilson(min(max(hits, 0), part.n), part.n)
        whole = hits / part.n if part.n else part.accuracy
        return [("accuracy", part.accuracy, whole), ("low", part.low, low), ("high", part.high, high)]
    mean, std = mean_std(part.each)
    return [("mean", part.mean, mean), ("std", part.std, std)] if part.each else []


def check_data(case: Case) -> None:
    """Check that the data set here is the run's, and that its parts have the recorded sizes."""
    if case.world is None:
        case.found.word("data", case.why_no_world)
        return
    if case.foreign_transport:
        case.found.word("data", "the app brings its own records")
        return
    said, now = case.record.data, data_facts(case.world)
    if said.digest is None:
        now = now.model_copy(update={"digest": None})
        case.found.word("the data set's digest", "the record is from before it was kept")
    case.found.compare("data", RECORD, "data", said, now, reason=f"data set {case.record.setting.dataset}")
    case.found.compare("models' sizes", RECORD, "models", case.record.models, model_facts(case.world))


def check_accuracy(case: Case) -> None:
    """Check the published models and the last round's accuracies."""
    record, world, found = case.record, case.world, case.found
    if not record.rounds:
        return
    if world is None:
        found.word("accuracy", case.why_no_world)
        return
    last = record.rounds[-1]
    if case.store is None or case.foreign_transport:
        _check_published(case, world)
        return
    try:
        with compute(world):
            predictor = _check_models(case, world)
            if last.utility is None:
                found.word("accuracy", "the last round was not evaluated")
                return
            state = decode(case.store.server(f"server.{last.round}"), Record, device=world.device)
            server = Server(world.hub, last.round, Meter("server", last.round, world.device))
            with seeded(world.setting.seed, "evaluation", last.round, device=world.device):
                predictor = world.method.predictor(state, server)
                again = evaluate(
                    world, predictor, _opener(case, world) if world.setting.eval_clients else None,
                    global_points=world.method.global_points(state, server),
                    next_points=partial(world.method.next_points, state) if offers_next_points(world.method) else None,
                )  # fmt: skip
            diagnostics = world.method.diagnostics(state)
    except FedauditError as e:
        found.contradicted("accuracy", "checkpoint", "the states after the last round", "states", str(e)[:200])
        return
    except Exception as e:  # noqa: BLE001 (the files are somebody else's, and may hold anything)
        found.contradicted(
            "accuracy", "checkpoint", "the states after the last round", "states", f"{type(e).__name__}: {e}"[:200]
        )
        return
    at = f"rounds.{len(record.rounds) - 1}"
    note = f"of round {last.round}, from the kept models"
    compare_utility(case, "accuracy", f"{at}.utility", last.utility, again, note)
    close = CLIENTS_ELSEWHERE if case.other_machine else CLOSE
    found.compare("diagnostics", RECORD, f"{at}.diagnostics", last.diagnostics, diagnostics, close=close)
    earlier = [row.round for row in record.rounds[:-1] if row.utility is not None]
    if earlier:
        found.word(
            "accuracy of earlier rounds",
            f"{len(earlier)} evaluated rounds: only the last round's models are kept (--rerun computes the server's "
            "again from the messages)",
        )


def compare_utility(case: Case, figure: str, at: str, said: Utility, now: Utility, note: str) -> bool:
    """Compare two utilities: to the bit on one machine type, else the shares of records, which may differ by a few.

    Figures that the code here adds to those of the code that ran are left out, and named.
    """
    known, added = _without_added(said, now)
    if added and case.other_code:
        now = known
        case.found.word(f"{figure}: {', '.join(added)}", "the code here measures it, and the code that ran did not")
    if not case.other_machine:
        return case.found.compare(figure, RECORD, at, said, now, reason=note)
    mine, other = dict(_parts(said, at)), dict(_parts(now, at))
    apart = mine.keys() ^ other.keys()
    for path in sorted(mine.keys() & other.keys()):
        a, b = mine[path], other[path]
        if isinstance(a, Accuracy) and isinstance(b, Accuracy):
            x, y, room = a.accuracy, b.accuracy, max(ELSEWHERE, 2 / max(b.n, 1))
        else:
            x, y, room = a.mean, b.mean, CLIENTS_ELSEWHERE
        if abs(x - y) > room:
            case.found.contradicted(figure, RECORD, path, x, y, f"more than {room:.2g} apart; {note}")
            apart.add(path)
    if not apart:
        case.found.recomputed(figure, f"{note}; up to {ELSEWHERE:g} apart, as this is another machine type")
    return not apart


def _without_added(said: Utility, now: Utility) -> tuple[Utility, list[str]]:
    """Return `now` without the figures that later versions add, where `said` has none, and the names of these."""
    points = {name: scores for name, scores in now.points.items() if name in said.points}
    added = sorted(now.points.keys() - points.keys())

    def as_told(of: ClientScores, mine: ClientScores | None) -> ClientScores:
        if mine is None or mine.matched_test is not None or of.matched_test is None:
            return of
        added.append("matched_test")
        return of.model_copy(update={"matched_test": None})

    clients = now.clients and as_told(now.clients, said.clients)
    points = {name: as_told(scores, said.points[name]) for name, scores in points.items()}
    return now.model_copy(update={"clients": clients, "points": points}), list(dict.fromkeys(added))


def _opener(case: Case, world: World) -> Any:
    def opened(k: int) -> Client:
        assert case.store is not None  # the caller has looked
        meter = Meter(f"client {k}", world.setting.rounds, world.device)
        return open_client(world.site(k), 0, 0, meter, case.store.client(k))

    return opened


def _check_models(case: Case, world: World) -> nn.Module | None:
    """Compare the published models with those that follow from the checkpoint. Return the global one."""
    record, found, store = case.record, case.found, case.store
    assert store is not None  # the caller has looked
    last = record.rounds[-1].round
    state = decode(store.server(f"server.{last}"), Record, device=world.device)
    server = Server(world.hub, last, Meter("server", last, world.device))
    with seeded(world.setting.seed, "evaluation", last, device=world.device):
        predictor = world.method.predictor(state, server)
    names, wrong = [], False
    with seeded(world.setting.seed, "evaluation", "final", device=world.device):
        made: list[tuple[str, nn.Module]] = [] if predictor is None else [(GLOBAL, predictor)]
        for k in sorted(store.clients):
            made.append((f"client-{k:06d}.safetensors", world.method.personal(_opener(case, world)(k))))
        for name, model in made:
            names.append(name)
            wrong = _differs(case, name, state_of(model)) or wrong
    there = {path.name for path in (case.folder / "models").glob("*")} if (case.folder / "models").is_dir() else set()
    for name in sorted(there - set(names)):
        wrong = True
        found.contradicted("published models", f"models/{name}", "the file", "a model", "the run left no such model")
    published = names[:1] if predictor is not None else names
    wrong = not found.compare("names of published models", RECORD, "published", record.published, published) or wrong
    if not wrong:
        found.recomputed("published models", f"{len(names)} files, to the bit, from the checkpoint")
    return predictor


def _differs(case: Case, name: str, state: Mapping[str, Tensor]) -> bool:
    """Note how a model file differs from a state; return whether it does."""
    file, path = f"models/{name}", case.folder / "models" / name
    try:
        said = _tensors(path)
    except (OSError, SafetensorError, ValueError) as e:
        case.found.contradicted("published models", file, "the file", str(e)[:120], "a model of the checkpoint")
        return True
    if said.keys() != state.keys():
        other = min(said.keys() ^ state.keys())
        case.found.contradicted(
            "published models", file, other, "there" if other in said else "missing",
            "there" if other in state else "missing",
        )  # fmt: skip
        return True
    for key, tensor in state.items():
        mine = tensor.detach().cpu()
        if said[key].shape != mine.shape or not _close(said[key], mine, case):
            case.found.contradicted("published models", file, key, _norm(said[key]), _norm(mine), "its norm")
            return True
    return False


def _close(a: Tensor, b: Tensor, case: Case) -> bool:
    if torch.equal(a, b) or ((a.isnan() == b.isnan()).all() and torch.equal(a.nan_to_num(), b.nan_to_num())):
        return True
    # What a method computes to deploy a model may round otherwise on another machine.
    return bool(case.other_machine) and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5)


def _norm(tensor: Tensor) -> str:
    return f"{float(tensor.double().norm()):.9g}"


def _tensors(path: Any) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _check_published(case: Case, world: World) -> None:
    """Check the last round's global accuracy from the published file alone, for a folder without a checkpoint."""
    last = case.record.rounds[-1]
    said = last.utility.global_.test if last.utility is not None and last.utility.global_ is not None else None
    path = case.folder / "models" / GLOBAL
    if said is None or not path.is_file():
        case.found.word("accuracy", "the models of the last round are not here (neither a checkpoint nor models/)")
        return
    try:
        state = _tensors(path)
        arch = world.archs[0] if case.foreign_transport else world.server_arch
        with compute(world), seeded("verify"):
            now = accuracy(load(world.build(arch), state).eval(), *world.test)
    except (FedauditError, OSError, SafetensorError, RuntimeError, ValueError) as e:
        case.found.word("accuracy", f"models/{GLOBAL} is not a plain model of this setting: {str(e)[:120]}")
        return
    at = f"rounds.{len(case.record.rounds) - 1}.utility.global.test"
    close = ELSEWHERE if case.other_machine else 0.0
    case.found.compare("accuracy", RECORD, at, said, now, close=close, reason=f"from models/{GLOBAL}")
    case.found.word("accuracy of clients and of earlier rounds", "their models are not here")
