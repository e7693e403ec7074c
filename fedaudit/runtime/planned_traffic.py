"""This module plans communication: what a full-size experiment sends, by the method's own declaration.

Nothing is trained. No data is read but your own, whose size is only known once it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedaudit import registry
from fedaudit.data import datasets
from fedaudit.data.partitions import partition
from fedaudit.errors import FedauditError, NotApplicable, RunError, SettingError, unknown
from fedaudit.runtime.method import Method
from fedaudit.runtime.plan import plan_of, sent_in_round
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.training import models, own_model
from fedaudit.wire.message import FRAME, Part, Size, as_size, model_size
from fedaudit.wire.traffic import Key, Plan

CONVENTIONS = ("payload", "wire")
HEAD = 16  # rounds that are computed one by one before any is taken to follow from others
MOST = 256  # rounds of drawn clients that are computed


def make_plan(setting: Setting, participants: list[int] | None = None) -> tuple[Method, Plan]:
    """Return the setting's method and the plan of its first round, with these participants, or as many as a round has
    on average.

    The data set has its published size and is spread evenly, and every record is trained on.
    """
    facts = datasets.facts_of(setting.dataset, setting.data_dir, size=setting.image_size)
    assert facts.classes is not None and facts.shape is not None and facts.train is not None  # noqa: PT018
    shape, classes = facts.shape, facts.classes
    method: Method = registry.find(setting.method).make(setting.set, setting.preset)  # type: ignore[attr-defined]
    if why := method.cannot_take(shape):
        raise NotApplicable(f"{why}.")
    archs = method.archs(setting.model, setting.clients)
    if participants is None:
        participants = on_average(setting)
    own = round(facts.train * setting.public) if setting.public_dataset is None else 0
    public = own if setting.public_dataset is None else _foreign_size(setting)
    plan = plan_of(
        setting,
        method,
        archs,
        participants,
        t=1,
        n=dict.fromkeys(participants, (facts.train - own) // setting.clients),
        shape=shape,
        classes=classes,
        model_size=lambda arch, part=None: _model_size(arch, shape, classes, part),
        public=public,
        labelled=setting.public_dataset is None,
    )
    return method, plan


def on_average(setting: Setting) -> list[int]:
    """Return stand-ins for the participants of a round: the first clients, as many as take part on average."""
    return list(range(max(1, round(setting.participation * setting.clients))))


def with_participants(plan_of_all: Plan, t: int, participants: list[int]) -> Plan:
    """Return the plan of round t, in which some of the participants of a bare plan take part."""
    n = {k: plan_of_all.n[k] for k in participants}
    archs = {k: plan_of_all.archs[k] for k in participants}
    return dataclasses.replace(plan_of_all, t=t, participants=participants, n=n, archs=archs)


def _foreign_size(setting: Setting) -> int:
    facts = datasets.facts_of(str(setting.public_dataset), setting.data_dir)
    assert facts.train is not None
    return round(facts.train * setting.public) if setting.public else facts.train


def _model_size(arch: str, shape: Shape, classes: int, part: Part | None = None) -> Size:
    # A model of your own may have changed by the next time.
    measured = _measured.__wrapped__ if own_model.is_own(arch) else _measured
    return measured(arch, shape, classes, part, torch.get_default_dtype())


@functools.cache
def _measured(arch: str, shape: Shape, classes: int, part: Part | None, numbers: torch.dtype) -> Size:
    """Return the model's size if its numbers are of type `numbers`, which is the type that torch makes now."""
    return model_size(models.structure(arch, shape=shape, classes=classes), part)


def drawn(plan: Plan, setting: Setting, draw: int) -> Plan:
    """Return the plan with one draw of the setting's partition, of a data set whose classes have equal size."""
    facts = datasets.facts_of(setting.dataset, setting.data_dir)
    assert facts.train is not None
    y = np.arange(facts.train - (plan.public if plan.labelled else 0)) % plan.classes
    rng = np.random.default_rng([setting.seed, draw])
    shards = partition(setting.partition, y, setting.clients, rng, classes=plan.classes, minimum=setting.minimum)
    counts = {k: np.bincount(y[shards[k]], minlength=plan.classes).tolist() for k in plan.participants}
    return dataclasses.replace(plan, counts=counts, n={k: sum(of_client) for k, of_client in counts.items()})


def plan_traffic(setting: Setting, convention: str = "payload", draws: int = 0) -> dict[str, Any]:
    """Return the bytes by direction and field, over all rounds and for an average round.

    If `draws` is given, the setting's partition is drawn so many times, and the figures are means over the draws.
    Otherwise records are spread evenly and every client holds every class. Under a compression, `at_most` names the
    fields whose size only a run can tell: they count as if they were sent whole.
    """
    if convention not in CONVENTIONS:
        raise SettingError(unknown("convention", convention, CONVENTIONS))
    method, plan = make_plan(setting)
    plans = [drawn(plan, setting, draw) for draw in range(draws)] or [plan]
    at_most: set[Key] = set()
    sent = [_over_rounds(method, one, setting, convention, at_most) for one in plans]
    names = sorted({key for of_draw in sent for key in of_draw}, key=lambda key: (key[1].endswith("(frame)"), key))
    fields = [
        {"direction": key[0], "field": key[1], "bytes": _mean([s.get(key, 0) for s in sent], setting.rounds)}
        for key in names
    ]
    result: dict[str, Any] = {
        "method": setting.method,
        "convention": convention,
        "rounds": setting.rounds,
        "clients": setting.clients,
        "participants": len(plan.participants),
        "fields": fields,
    }
    if setting.compress is not None:
        result |= {"compress": setting.compress, "at_most": sorted(name for _, name in at_most)}
    if draws:
        result |= {"partition": setting.partition, "draws": draws}
    for name, wanted in (("up", {"up"}), ("down", {"down"}), ("total", {"up", "down"})):
        totals = [sum(size for key, size in of_draw.items() if key[0] in wanted) for of_draw in sent]
        total = _mean(totals)
        result[name] = {
            "bytes_per_round": _mean(totals, setting.rounds),
            "bytes": total,
            "MB": total / 1000**2,
            "GB": total / 1000**3,
            "MiB": total / 1024**2,
            "GiB": total / 1024**3,
        }
        if draws:
            result[name]["bytes_std"] = _spread(totals)  # from one partition to another
    return result


def _over_rounds(method: Method, plan: Plan, setting: Setting, convention: str, at_most: set[Key]) -> dict[Key, int]:
    """Return every field's bytes over all rounds: what a round sends may depend on how many came before it."""
    total: dict[Key, int] = {}
    for t in range(1, setting.rounds + 1):
        sent = sent_in_round(method, dataclasses.replace(plan, t=t), setting)
        if sent is None:
            raise SettingError(
                f"{setting.method} does not declare its traffic. Write its `traffic(plan)`, or measure a run."
            )
        sizes, unknown = sent
        at_most |= unknown
        for key, size in _counted(sizes, convention, len(plan.participants)).items():
            total[key] = total.get(key, 0) + size
    return total


def payload_of_rounds(
    method: Method, plan_of_round: Callable[[int], Plan], setting: Setting, rounds: range
) -> int | None:
    """Return the payload of these rounds in both directions, or None if the method does not declare its traffic.

    Where clients are drawn, every round is computed, or of more than 256 so many at even distances, for all. Where all
    clients take part, the first rounds are computed. If their sizes never fall, we take it that later ones do not
    either, and what lies between two rounds on one line with the middle is not computed.
    """

    @functools.cache
    def payload(t: int) -> int:
        plan = plan_of_round(t)
        if not plan.participants:
            return 0  # nobody was drawn, and nothing is sent
        try:
            sent = sent_in_round(method, plan, setting)
        except FedauditError as e:  # a sum of one client, for example
            raise RunError(f"Round {t}: {e}") from e
        if sent is None:
            raise _Undeclared
        return sum(size.payload for size in sent[0].values())

    def line(first: int, last: int) -> int:
        if last - first < 2:
            return sum(payload(t) for t in range(first, last + 1))
        middle = (first + last) // 2
        rise = payload(last) - payload(first)
        if (payload(middle) - payload(first)) * (last - first) == rise * (middle - first):
            return (last - first + 1) * (payload(first) + payload(last)) // 2
        return line(first, middle) + line(middle + 1, last)

    try:
        if setting.participation < 1:
            some = rounds[:: max(1, math.ceil(len(rounds) / MOST))]
            return round(sum(map(payload, some)) * len(rounds) / max(1, len(some)))
        head = [payload(t) for t in rounds[:HEAD]]
        rest = rounds[HEAD:]
        if head != sorted(head):
            return sum(map(payload, rounds))
        return sum(head) + (line(rest[0], rest[-1]) if rest else 0)
    except _Undeclared:
        return None


class _Undeclared(Exception):
    """The method does not declare its traffic."""


def _counted(declared: Mapping[Key, Size | int], convention: str, participants: int) -> dict[Key, int]:
    sizes = {key: as_size(size) for key, size in declared.items()}
    if convention == "payload":
        return {key: size.payload for key, size in sizes.items()}
    sent = {key: size.payload + size.buffers + size.header for key, size in sizes.items()}
    # each message that has a field travels once per participant, in a frame of its own
    messages = {(direction, name.partition(".")[0]) for direction, name in sizes}
    return sent | {(direction, f"{message}.(frame)"): FRAME * participants for direction, message in messages}


def _mean(totals: Sequence[int], rounds: int = 1) -> int | float:
    """Return the mean over draws and rounds, as a whole number wherever it is one."""
    exact, rest = divmod(sum(totals), len(totals) * rounds)
    return sum(totals) / (len(totals) * rounds) if rest else exact


def _spread(totals: Sequence[int]) -> float | None:
    """Return the sample standard deviation; None for a single draw."""
    return statistics.stdev(totals) if len(totals) > 1 else None
