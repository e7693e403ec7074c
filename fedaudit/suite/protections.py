"""The protections of a suite: each method gets those of their policies that are about something that it releases."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from fedaudit.errors import SettingError
from fedaudit.setting import Frozen, Setting

TRAINING = "training"  # DP-SGD, which is about training and not about a kind of release
UNDER = "under_dp_sgd"  # key of a table [[methods]]: settings that replace the row's where DP-SGD trains
RELEASES = "releases"  # key of a table [[methods]]: how often a kind is released, where a run cannot count beforehand
CHOSEN = "protections"  # key of a table [[methods]]: names of the protections that the row is run with


class Protection(Frozen):
    """A name, policies by kind of release, and the epsilon that those of them that apply have together."""

    name: str = Field(min_length=1)
    epsilon: float | None = Field(None, gt=0)
    delta: float | None = Field(None, gt=0, lt=1)
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def privacy(self, kinds: frozenset[str] | None) -> dict[str, Any]:
        """Return the privacy setting for a method that releases these kinds (None: that is not known).

        Policies on other kinds are left out. Epsilon and delta are shared out evenly over the rest, so that simple
        composition gives back the whole. If no policy applies, all of them stay: the run is then refused, and its
        record says why.
        """
        about = [kind for kind in self.policies if kinds is None or kind in kinds or kind == TRAINING]
        chosen = about or list(self.policies)
        shares = {"epsilon": self.epsilon, "delta": self.delta}
        shared = {key: whole / len(chosen) for key, whole in shares.items() if whole is not None and chosen}
        return {kind: {**shared, **self.policies[kind]} for kind in chosen}


def variants(row: Mapping[str, Any], setting: Setting, protections: list[Protection]) -> list[dict[str, Any]]:
    """Return what the protections change in the setting of a row: one table of settings for each, equal ones once."""
    found: list[dict[str, Any]] = []
    for protection in chosen(row, protections):
        change: dict[str, Any] = {"privacy": protection.privacy(kinds_of(setting) if protection.policies else None)}
        for kind in change["privacy"].keys() & row.get(RELEASES, {}).keys():
            change["privacy"][kind] |= {"releases": row[RELEASES][kind]}
        if TRAINING in change["privacy"]:
            change |= row.get(UNDER, {})
        if change not in found:
            found.append(change)
    return found


def chosen(row: Mapping[str, Any], protections: list[Protection]) -> list[Protection]:
    """Return the protections that a row is run with: all, or those that it names."""
    names = row.get(CHOSEN)
    if names is None:
        return protections
    known = [protection.name for protection in protections]
    if not isinstance(names, list) or (strangers := [name for name in names if name not in known]):
        wrong = names if not isinstance(names, list) else strangers[0]
        raise SettingError(
            f"{CHOSEN} = {wrong!r} in [[methods]] is not a protection of the suite. Choose from {', '.join(known)}."
        )
    return [protection for protection in protections if protection.name in names]


def kinds_of(setting: Setting) -> frozenset[str] | None:
    """Return the kinds that the method of a setting releases, by its declared traffic.

    A method that does not declare its traffic may release every kind that the messages in its file have; None if there
    are no messages.
    """
    return _kinds(setting.model_copy(update={"privacy": {}, "seed": 0}).model_dump_json())


@functools.cache
def _kinds(text: str) -> frozenset[str] | None:
    from fedaudit.runtime.applicability import released_kinds
    from fedaudit.runtime.planned_traffic import make_plan
    from fedaudit.wire.message import Up, message_classes

    setting = Setting.make(**json.loads(text))
    method, plan = make_plan(setting)
    rounds = sorted({1, 2, max(setting.rounds, 1)})  # some messages are sent in one of these rounds only
    found = released_kinds(method, [dataclasses.replace(plan, t=t) for t in rounds])
    if found is not None:
        return found
    file = type(method).__module__
    messages = [cls for cls in message_classes(file) if issubclass(cls, Up) and cls.__module__ == file]
    fields = [declared for cls in messages for declared in cls.declared().values()]
    return frozenset(of.kind for of in fields if of is not None and of.kind is not None) or None
