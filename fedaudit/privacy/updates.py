"""The guarantee of a policy on clients' updates: it is for whole clients, by noise on the sum of their updates.

    --privacy updates:eps=8,clip=1,unit=client,where=server

Each update is clipped to an L2 norm of `clip`, and all weigh the same. `where` says who adds the noise:

    server   the server, to the sum (DP-FedAvg; McMahan et al., ICLR 2018). It holds against everybody but the server.
    shares   each client a part of a discrete noise (Skellam; Agarwal et al., NeurIPS 2021), under secure aggregation.
             It holds against everybody, as long as `threshold` of the round's clients stay.
    client   each client all of the noise, to its own update. It holds against everybody.

The relation is zero-out: neighbouring federations differ in one client, whose updates are all zero in one of them. One
update changes the sum by at most `clip`. The sum is divided by a public number, not by how many clients answered.

Where the cohort is drawn by Poisson (`--sampling poisson`), a round is a Poisson-sampled Gaussian mechanism to whoever
does not know who took part. The server does know, and so `shares` and `client` are accounted without amplification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fedaudit.errors import PrivacyError
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.adaptive_clip import update_multiplier, vote_deviation
from fedaudit.privacy.calibration import total
from fedaudit.privacy.dpsgd import multiplier_for
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.update_policy import UpdatePolicy

EVERYBODY = "server, peers, outsiders"
TO = {"server": "peers, outsiders", "shares": EVERYBODY, "client": EVERYBODY}  # against whom it holds
RELATION = "zero-out"


@dataclass(frozen=True)
class Guarantee:
    """The noise that a policy on updates takes in one run, and what a round costs a client."""

    policy: UpdatePolicy
    clients: int  # K
    rounds: int  # in which a client may take part
    rate: float  # with which a client is in a round's cohort
    poisson: bool  # whether each client is drawn by itself

    @property
    def amplified(self) -> bool:
        """Return whether a client's absence from most rounds counts: drawn by Poisson, and unknown to the reader."""
        return self.poisson and self.rate < 1 and self.policy.where == "server"

    @property
    def delta(self) -> float:
        return self.policy.delta_for(self.clients)

    @property
    def multiplier(self) -> float:
        """Return sigma / clip of the noise on the sum, or on an update where each client adds its own."""
        if self.policy.noise_multiplier is not None:
            return self.policy.noise_multiplier
        assert self.policy.epsilon is not None  # the policy was checked
        if self.policy.where == "shares":
            return _skellam_multiplier(self.policy.epsilon, self.delta, max(self.rounds, 1))
        if self.amplified:
            return multiplier_for(self.policy.epsilon, self.delta, self.rate, max(self.rounds, 1))
        return total(self.policy.epsilon, self.delta, 1.0, max(self.rounds, 1))

    @property
    def vote_sigma(self) -> float | None:
        """Return the deviation of the noise on the votes on the clip; None if the clip stays."""
        return None if self.policy.quantile is None else vote_deviation(self.multiplier, self.rate * self.clients)

    @property
    def sigma(self) -> float:
        """Return the deviation of the noise on the sum of the updates."""
        z = self.multiplier
        return (z if self.vote_sigma is None else update_multiplier(z, self.vote_sigma)) * self.policy.clip

    def at(self, clip: float) -> Guarantee:
        """Return the same guarantee with another clip, at which the votes have arrived. It costs the same."""
        return replace(self, policy=self.policy.model_copy(update={"clip": clip}))

    def entry(self, field: str, kind: str, grid: float | None = None) -> LedgerEntry:
        """Return one round's entry in the ledger of a client. `grid`: the step of discrete noise."""
        z = self.multiplier
        return LedgerEntry(
            field=field,
            kind=kind,
            mechanism=MECHANISMS[self.policy.where],
            noise_multiplier=z,
            relation=RELATION,
            sample_rate=self.rate if self.amplified else 1.0,
            sigma=z * self.policy.clip,
            sensitivity=self.policy.clip,
            clip=self.policy.clip,
            condition=self.condition(),
            delta=self.delta,
            claim=self.policy.epsilon,
            grid=grid,
            unit="client",
            to=TO[self.policy.where],
        )

    def condition(self) -> str:
        voted = "" if self.policy.quantile is None else "update and vote on the clip together; "
        return voted + self._taking_part()

    def _taking_part(self) -> str:
        if self.amplified:
            return f"for who does not know the cohort, each client drawn with probability {self.rate:g}"
        if self.poisson and self.rate < 1:
            return "without amplification: the server knows the cohort"
        if self.rate < 1:
            return "without amplification: the cohort has a fixed size"
        return "every client takes part"

    def epsilon(self) -> float:
        """Return what all rounds together cost a client that is in every cohort that it may be in."""
        if self.policy.where == "shares":
            return skellam_epsilon(self.multiplier, self.rounds, self.delta)
        event = Event(self.multiplier, self.rate if self.amplified else 1.0, self.rounds)
        return compose([event], self.delta, compare=False).epsilon_of_record


MECHANISMS = {"server": "gaussian", "shares": "skellam", "client": "gaussian"}
FINE = 256  # the least number of steps in a deviation of discrete noise
ORDERS = np.arange(2, 2049, dtype=np.float64)


def skellam_epsilon(multiplier: float, rounds: int, delta: float) -> float:
    """Return epsilon of Skellam noise on whole vectors, over all rounds, by its Renyi divergence.

    With sigma = m Delta_2 and at least 256 steps of the grid in sigma, one release has at most
    a / (2 m^2) + ((2 a - 1) Delta_2^2 + 6 Delta_1) / (4 sigma^4) at a whole order a (Agarwal et al. 2021, Theorem 3.5),
    and Delta_1 <= Delta_2^2 for whole vectors. The conversion is that of Balle et al. 2020, Theorem 21.
    """
    squared = multiplier**2
    divergence = rounds * (ORDERS / (2 * squared) + (2 * ORDERS + 5) / (4 * squared * FINE**2))
    found = divergence + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(float(found.min()), 0.0)


@lru_cache(maxsize=256)
def _skellam_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Return the least multiplier, to one in a million, that meets epsilon over all rounds."""
    low, high = 1e-2, 1.0
    while skellam_epsilon(high, rounds, delta) > epsilon:
        low, high = high, 2 * high
        if high > 1e7:
            raise PrivacyError(f"No noise makes {rounds} rounds meet epsilon = {epsilon:g}. Raise epsilon.")
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if skellam_epsilon(middle, rounds, delta) > epsilon else (low, middle)
    return high
