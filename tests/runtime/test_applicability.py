"""What a method's clients release by its declared traffic, and whether a policy covers any of it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fedaudit import Down, Up, private, public, relay
from fedaudit.privacy.policy import TRAINING, UPDATES
from fedaudit.runtime.applicability import inapplicable, released_kinds


class Sent(Up):
    logits: torch.Tensor = private("logits", via="data", unit="record")
    counts: torch.Tensor = private("label_counts", via="data", unit="client")
    step: int = public()


class Other(Up):
    logits: torch.Tensor = private("embeddings", via="data", unit="record")


class Told(Down):
    counts: torch.Tensor = relay("prototypes")


class Declares:
    """Sends something else in each round."""

    def __init__(self, *rounds):
        self.rounds = rounds

    def traffic(self, plan):
        return self.rounds[plan]


def test_kinds_are_those_of_declared_fields_that_go_up():
    """Fields of other messages, fields without a kind, names that nobody declares and what goes down do not count."""
    method = Declares(
        {("up", "Sent.counts"): 3, ("up", "Sent.step"): 1, ("down", "Told.counts"): 9, ("down", "Sent.logits"): 2},
        {("up", "Other.logits"): 3, ("up", "Sent.gone"): 1, ("up", "Gone.logits"): 1},
        {},
        None,
    )
    assert released_kinds(method, [0]) == {"label_counts"}
    assert released_kinds(method, [1]) == {"embeddings"}
    assert released_kinds(method, [2, 0, 1]) == {"label_counts", "embeddings"}
    assert released_kinds(method, [2]) == released_kinds(method, []) == frozenset()
    assert released_kinds(method, [0, 3, 1]) is None, "one round without a declaration is enough"


def test_a_policy_that_covers_nothing_is_told():
    policy = SimpleNamespace()
    kinds = frozenset({"prototypes", "logits"})
    said = "a policy on embeddings, label_counts protects nothing where logits, prototypes is released"
    assert inapplicable({"label_counts": policy, "embeddings": policy}, kinds) == said
    assert (
        inapplicable({"logits": policy}, frozenset()) == "a policy on logits protects nothing where nothing is released"
    )
    assert inapplicable({"label_counts": policy, "logits": policy}, kinds) is None
    assert inapplicable({"label_counts": policy}, None) is None, "the traffic is not declared"
    assert inapplicable({}, kinds) is None
    assert inapplicable({TRAINING: policy}, kinds) is None
    assert inapplicable({UPDATES: policy}, kinds) is None
