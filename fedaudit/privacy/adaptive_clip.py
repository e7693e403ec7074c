"""A clipping norm that follows the clients' updates, by noised votes (Andrew et al., NeurIPS 2021).

    --privacy updates:eps=8,clip=1,quantile=0.5,unit=client,where=server

`clip` is the norm of the first sum. In each sum a client votes whether its update was within the norm C, and C moves
towards the `quantile` of the norms:

    C <- C exp(-eta_C (b - gamma))        b: the noised share of clients within C; gamma: the quantile

A vote is +1/2 (within C), -1/2 (beyond it), or 0 for a client whose update is zero. So one client moves the sum of the
votes by at most 1/2 from what it would be with that client zeroed out.

Votes cost something. Update and vote of a client are one release of the Gaussian mechanism. With deviations z_D C on
the updates and sigma_b on the votes it has the multiplier z of

    1 / z^2 = 1 / z_D^2 + 1 / (2 sigma_b)^2

The ledger is billed z, which follows from epsilon; so the noise on the updates, z_D, is larger.
"""

from __future__ import annotations

import math

OF_COHORT = 20  # the votes' deviation is the expected cohort over this number, as in the paper's experiments


def vote_deviation(multiplier: float, cohort: float) -> float:
    """Return sigma_b. In a small cohort it is the multiplier, so that votes take no more than a quarter of 1 / z^2."""
    return max(cohort / OF_COHORT, multiplier)


def update_multiplier(multiplier: float, vote_sigma: float) -> float:
    """Return z_D, the multiplier of the noise on the updates, if updates and votes together have `multiplier`."""
    return (multiplier**-2 - (2 * vote_sigma) ** -2) ** -0.5


def vote(norm: float, C: float) -> float:
    """Return a client's vote on the norm C, from the norm of its update before clipping."""
    if norm == 0:
        return 0.0
    return 0.5 if norm <= C else -0.5


def within(votes: float, cohort: float) -> float:
    """Return b, the share of clients within C, from the noised sum of their votes and the public size of the cohort."""
    return 0.5 + votes / cohort


def moved(C: float, share: float, quantile: float, rate: float) -> float:
    """Return the next sum's C."""
    return C * math.exp(-rate * (share - quantile))
