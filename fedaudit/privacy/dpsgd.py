"""DP-SGD inside `fit`: Poisson samples, per-row gradients by torch.func, opacus' optimizer for clipping and noise.

opacus' own hooks see only the layers' backward passes, and are silently wrong on losses with a proximal term or with
extra rows; its optimizer takes per-sample gradients from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.errors import ContractError, PrivacyError
from fedaudit.fit import Fitted, Loss, Opt, check_pure, check_rows
from fedaudit.privacy.accounting import Event, compose, rdp
from fedaudit.privacy.persample import row_gradients, validate
from fedaudit.privacy.policy import Policy

CHUNK = 64  # rows whose gradients are held at a time


def fit_private(
    model: nn.Module,
    loss: Loss,
    rows: Sequence[Tensor],
    *,
    opt: Opt,
    batch: int,
    epochs: int | None,
    steps: int | None,
    rng: torch.Generator,
    noise: torch.Generator,
    given: Mapping[str, Any] | None,
    policy: Policy,
    rounds: int,
) -> tuple[Fitted, dict[str, Any]]:
    """Train on private rows; returns what was done and the entry for the ledger.

    One step draws every record with probability q = batch / n, so an epoch is n / batch steps of random size.
    """
    optimizer_class = _dp_optimizer()
    n = check_rows(rows)
    check_pure(loss)
    validate(model)
    if (epochs is None) == (steps is None):
        raise ContractError("fit: say either epochs or steps.")
    q = min(1.0, batch / n)
    count = steps if steps is not None else (epochs or 0) * math.ceil(n / batch)
    delta, C = policy.delta_for(n), policy.clip or 1.0
    multiplier = policy.noise_multiplier or calibrated(policy.epsilon or 0.0, delta, q, max(count * rounds, 1))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_class(
        optimizer=opt.build(list(parameters.values())),
        noise_multiplier=multiplier,
        max_grad_norm=C,
        expected_batch_size=max(1, round(q * n)),
        generator=noise,
        secure_mode=False,
    )
    was_training = model.training
    model.train()
    for _ in range(count):
        index = (torch.rand(n, generator=rng, device=rng.device) < q).nonzero()[:, 0]
        optimizer.zero_grad()
        for name, gradient in row_gradients(model, loss, [row[index] for row in rows], given, chunk_size=CHUNK).items():
            parameters[name].grad_sample = gradient  # type: ignore[attr-defined]
        optimizer.step()
    optimizer.zero_grad()
    for p in parameters.values():
        for trace in ("grad_sample", "summed_grad"):
            if hasattr(p, trace):
                delattr(p, trace)
    model.train(was_training)
    entry = {
        "field": "training",
        "kind": "training",
        "mechanism": "dp-sgd",
        "noise_multiplier": multiplier,
        "sample_rate": q,
        "steps": count,
        "sensitivity": C,
        "sigma": multiplier * C,
        "clip": C,
        "relation": "add-or-remove",
        "condition": "n is public",
        "delta": delta,
        "claim": policy.epsilon,
    }
    return Fitted(0 if epochs is None else epochs, count, math.nan), entry


@lru_cache(maxsize=4096)
def calibrated(epsilon: float, delta: float, q: float, steps: int) -> float:
    """The noise multiplier for which `steps` sub-sampled steps together meet epsilon, by the accountant of record.

    RDP is quick and an upper bound: its root brackets that of the PRV accountant, which takes a second a look.
    """
    by_rdp = _root(lambda m: rdp(m, q, steps, delta) - epsilon, 1e-2, 1e6, 1e-6)
    if by_rdp is None:
        raise PrivacyError(f"No noise makes {steps} steps at sample rate {q:g} meet epsilon = {epsilon:g}.")

    def excess(multiplier: float) -> float:
        return compose([Event(multiplier, q, steps)], delta, compare=False).epsilon_of_record - epsilon

    return _root(excess, 0.75 * by_rdp, by_rdp, 2e-3) or by_rdp


def _root(excess: Callable[[float], float], low: float, high: float, tolerance: float) -> float | None:
    """The smallest multiplier, to a relative tolerance, at which a falling `excess` is no longer positive."""
    if excess(high) > 0:
        return None
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _dp_optimizer() -> Any:
    try:
        from opacus.optimizers import DPOptimizer
    except ImportError:
        raise PrivacyError('DP-SGD needs opacus: pip install "fedaudit[dp]".') from None
    return DPOptimizer
