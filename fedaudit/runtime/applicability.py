"""Tells before a run, from a method's declared traffic, whether a privacy setting covers anything that it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedaudit.privacy.policy import TRAINING
from fedaudit.privacy.update_policy import UPDATES
from fedaudit.runtime.method import Method
from fedaudit.wire.message import Up, message_classes
from fedaudit.wire.traffic import Plan


def released_kinds(method: Method, plans: Iterable[Plan]) -> frozenset[str] | None:
    """Return the kinds that a method's clients may release in these rounds; None if it does not declare its traffic.

    Messages are known by their names here. If two classes share one, the kinds of both count: a kind is left out only
    if it is certain that it is never released.
    """
    classes = [cls for cls in message_classes(type(method).__module__) if issubclass(cls, Up)]
    kinds: set[str] = set()
    for plan in plans:
        declared = method.traffic(plan)
        if declared is None:
            return None
        for direction, where in declared:
            message, _, name = where.partition(".")
            for cls in classes if direction == "up" else ():
                field = cls.declared().get(name) if cls.__name__ == message else None
                if field is not None and field.kind is not None:
                    kinds.add(field.kind)
    return frozenset(kinds)


def inapplicable(privacy: Mapping[str, object], kinds: frozenset[str] | None) -> str | None:
    """Return why none of the policies covers anything released; None if one does, if there is no policy, or if it is
    unknown."""
    if kinds is None or not privacy or TRAINING in privacy or UPDATES in privacy or kinds & privacy.keys():
        return None
    released = ", ".join(sorted(kinds)) or "nothing"
    return f"a policy on {', '.join(sorted(privacy))} protects nothing where {released} is released"
