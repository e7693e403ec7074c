"""DP-SGD as a mechanism: its options, its cost and its words. `fedaudit.privacy.dpsgd` carries it out inside `fit`."""

from __future__ import annotations

from collections.abc import Sequence

from fedaudit.errors import PrivacyError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanisms.additive import check_sensitivity
from fedaudit.privacy.mechanisms.base import Mechanism, Words, span
from fedaudit.privacy.mechanisms.free import Nothing
from fedaudit.privacy.policy import Policy


class DpSgd(Mechanism):
    name = "dp-sgd"
    summary = "local training: Poisson samples, clipped gradients of single records, normal noise in each step"
    trains = True
    persons = True
    # A zeroed record adds nothing to a step's sum, and n stays public: the pair of sums is that of add-or-remove.
    relations = ("zero-out",)

    def label(self, policy: Policy) -> str:
        amount = f"ε = {policy.epsilon:g}" if policy.epsilon is not None else f"noise {policy.noise_multiplier:g}x"
        return f"DP-SGD, {amount}"

    def check(self, where: str, kind: str, policy: Policy) -> None:
        super().check(where, kind, policy)
        check_sensitivity(where, kind, policy)
        if policy.clip is None:
            raise PrivacyError(f"{where}: DP-SGD clips gradients; random-pixel is about images. Use clip=C.")
        if policy.relation != "replace-one" or policy.calibration != "analytic":
            raise PrivacyError(
                f"{where}: DP-SGD is accounted under add-or-remove, for all steps of the run together; it takes no "
                "relation and no calibration. Remove them."
            )

    def plans_ahead(self, policy: Policy) -> bool:
        return policy.epsilon is not None

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        worst = min(entries, key=lambda e: e.noise_multiplier)
        steps = span([float(e.steps * len(e.rounds)) for e in entries])
        return f"DP-SGD: noise {worst.noise_multiplier:.3g} times the clipping norm, {steps} steps a client", "noise"


class AfterDpSgd(Nothing):
    """Computed from a model that DP-SGD alone has trained on the records."""

    name = "post-processing of DP-SGD"

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        return "covered by the noise in training", "free"
