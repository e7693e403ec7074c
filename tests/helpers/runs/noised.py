"""Releases through one mechanism, and the tests of their noise, with or without sabotage."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit import Up, private
from fedaudit.epsilon.noise_tests import Finding, Residual, examine
from fedaudit.privacy.mechanisms.base import Prepared, mechanism_of
from fedaudit.privacy.policy import read_policies
from fedaudit.privacy.sensitivity import Context
from fedaudit.wire.codec import digest_of
from fedaudit.wire.message import KINDS


class Rows(Up):
    e: Tensor = private("embeddings", via="data", unit="record")


class Many(Up):
    z: Tensor = private("logits", via="model", unit="client")


class Counts(Up):
    n: Tensor = private("label_counts", via="data", unit="client")


class Answers(Up):
    n: Tensor = private("statistics", via="data", unit="client", depends="histogram")


class Labels(Up):
    y: Tensor = private("labels", via="data", unit="record")


class Means(Up):
    p: dict[int, Tensor] = private("prototypes", via="data", unit="client")


class Images(Up):
    x: Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")


def context(key: object = 0, n: int = 1000, classes: int | None = 10, **privacy: dict) -> Context:
    """Return the context of one release under policies that a setting could hold."""
    return Context(
        key=(key,), n=n, policies=read_policies(privacy, KINDS), releases=lambda kind: 5, classes=classes,
        images=lambda: torch.zeros(3, 1, 4, 4), encode=lambda x: x.flatten(1),
    )  # fmt: skip


Sabotage = Callable[[Prepared], Prepared]


def honest(ready: Prepared) -> Prepared:
    return ready


def times(factor: float) -> Sabotage:
    """Return a release with so many times the noise that it promises."""
    return lambda ready: dataclasses.replace(ready, multiplier=factor * ready.multiplier)


def released(
    cls: type[Up], value: Any, policy: dict, key: object = 0, sabotage: Sabotage = honest,
    tables: Sequence[Mapping[int, int]] = (), **facts,
):  # fmt: skip
    """Return the mechanism, the release as it should be noised, and the tensors as they were.

    `tables`: for a release of class means, how many records of each class went into each of its tables, in order."""
    (name, declared), *_ = cls.declared().items()
    assert declared is not None
    made = context(key, **{declared.kind: policy}, **facts)
    rules = made.policies[declared.kind]
    how = mechanism_of(rules)
    for call, counts in enumerate(tables):
        for c, count in counts.items():
            digest = digest_of(value[c])
            made.means[digest], made.tables[digest] = (how.clip(rules), count), call
    ready = how.prepare(value, f"{cls.__name__}.{name}", declared, rules, made)
    return how, ready, how.noised(sabotage(ready), f"{cls.__name__}.{name}", declared, rules, made)


def examined(
    cls: type[Up], value: Tensor, policy: dict, releases: int, seed: int, sabotage: Sabotage = honest, **facts
) -> Finding:
    """Return what the tests of residuals say of so many releases of one client."""
    found = []
    for t in range(releases):
        how, ready, noisy = released(cls, value, policy, (seed, t), sabotage, **facts)
        for i, leaf in enumerate(noisy):
            noise = how.noise(leaf.double().numpy(), ready, i, seed * 1000 + t)
            found.append(Residual(0, t, f"part {i}", noise.z, np.zeros_like(noise.z), noise.sizes))
    return examine(found, exact=True)


def refuted(finding: Finding) -> bool:
    return finding.p < 1e-3


def measured(cls: type[Up], value: Tensor, policy: dict, releases: int, sabotage: Sabotage, runs: int, **facts):
    """Return in what share of runs noise is refuted, and what the last run said it would find."""
    findings = [examined(cls, value, policy, releases, seed, sabotage, **facts) for seed in range(runs)]
    return sum(map(refuted, findings)) / runs, findings[-1]


def profile(values: np.ndarray, chances: np.ndarray, epsilon: float) -> float:
    """Return delta(epsilon) of a loss with these values, from its definition."""
    return math.fsum(p * max(0.0, 1 - math.exp(epsilon - v)) for v, p in zip(values, chances, strict=True))
