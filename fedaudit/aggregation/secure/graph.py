"""Who is paired with whom in a secure sum: everybody below 100 clients, a random regular graph from there up.

The degree follows Bell et al. 2020, Section 3: it is the least even one for which, over all clients together,

- a neighbourhood holds `threshold` colluding clients with probability at most 2^-40 (they could unmask its client);
- a neighbourhood loses so many clients that its secret cannot be joined with probability at most 2^-30;
- a client's neighbours all collude or drop out with probability at most 2^-40 (its mask would then be known).

The neighbours of a client are drawn without replacement, so the probabilities are hypergeometric. The degree grows with
the logarithm of the number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fedaudit.errors import RunError

COMPLETE_BELOW = 100  # clients
COLLUDING = 0.1  # share of clients that may tell the server what they know
DROPPING = 0.1  # least share of clients that the degree allows to drop out
SECURITY, CORRECTNESS = 40, 30  # bits


def needed(share: float, members: int) -> int:
    """Return how many of a neighbourhood's members (its client among them) must help to unmask: at least two."""
    return max(2, math.ceil(share * members - 1e-9))


@lru_cache(maxsize=64)
def degree(clients: int, share: float, dropping: float = DROPPING) -> int:
    """Return how many neighbours each of so many clients gets."""
    if clients < COMPLETE_BELOW:
        return clients - 1
    from scipy.stats import hypergeom  # the slow part of importing scipy

    others = clients - 1
    corrupt = math.ceil(COLLUDING * clients)
    dropped = math.ceil(max(dropping, DROPPING) * clients)
    for k in range(2, others, 2):
        t = needed(share, k + 1)
        told = clients * hypergeom.sf(t - 1, others, corrupt, k)  # t or more of its neighbours collude
        lost = clients * hypergeom.sf(k - t, others, dropped, k)  # fewer than t of them are left
        alone = clients * hypergeom.sf(k - 1, others, min(corrupt + dropped, others), k)
        if told <= 2.0**-SECURITY and lost <= 2.0**-CORRECTNESS and alone <= 2.0**-SECURITY:
            return k
    return others


def neighbours(ids: Sequence[int], k: int, seed: int) -> dict[int, tuple[int, ...]]:
    """Return each client's neighbours: the k nearest on a circle in an order that `seed` draws. It is symmetric."""
    if len(ids) < 2:
        raise RunError("A sum of one client is that client's value. Secure aggregation needs at least two clients.")
    order = [sorted(ids)[i] for i in np.random.default_rng(seed).permutation(len(ids))]
    n = len(order)
    if k >= n - 1:
        return {u: tuple(sorted(v for v in order if v != u)) for u in order}
    reach = [d for d in range(-(k // 2), k // 2 + 1) if d]
    return {u: tuple(sorted({order[(i + d) % n] for d in reach})) for i, u in enumerate(order)}
