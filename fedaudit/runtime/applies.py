"""Whether a privacy setting is about anything that a method sends: known from its declared traffic, before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedaudit.privacy.policy import TRAINING
from fedaudit.runtime.method import Method
from fedaudit.wire.message import Up, message_classes
from fedaudit.wire.traffic import Plan


def released_kinds(method: Method, plans: Iterable[Plan]) -> frozenset[str] | None:
    """The kinds that a method's clients may release in these rounds; None where it does not declare its traffic.

    Messages are known by their names here. Where two classes share one, the kinds of both count: this says of a kind
    that it is never released only if that is certain.
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
    """Why none of the policies is about anything released; None where one is, where there is none, or unknown."""
    if kinds is None or not privacy or TRAINING in privacy or kinds & privacy.keys():
        return None
    released = ", ".join(sorted(kinds)) or "nothing"
    return f"a policy on {', '.join(sorted(privacy))} protects nothing where {released} is released"
