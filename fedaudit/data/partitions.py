"""Partitions: the schemes that spread records over clients.

Every scheme but `domain` and `iid` first makes a table of counts (client x class). The records of a class are then
dealt at random to fill it. Work on the table is cheap; work on the records is done once, in arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedaudit.errors import DataError, SettingError, unknown

_REDRAWS = 20  # a Dirichlet draw is cheap, but with small alpha and many clients no number of draws would be enough


def names() -> dict[str, str]:
    """Return each scheme as users write it, with a line on what it does."""
    return {scheme.form: scheme.line for scheme in _SCHEMES.values()}


def partition(
    spec: str,
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int,
    minimum: int = 10,
    domain: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return for each client the sorted indices of its records. They are disjoint, `minimum` or more for each.

    `iid`, `dirichlet` and `domain` share out every record. `classes:K` leaves out the classes that no client holds
    (clients * K < classes). `ratio` leaves out the records that are left when its scarcest class is used up.
    """
    kind, _, argument = spec.partition(":")
    if kind not in _SCHEMES:
        raise SettingError(unknown("partition", spec, names()))
    y = np.asarray(y)
    _check(y, clients, classes, minimum)
    owner = _SCHEMES[kind].deal(_Task(spec, argument, y, clients, rng, classes, minimum, domain))
    sizes = np.bincount(owner[owner >= 0], minlength=clients)
    if (short := int(sizes.min())) < minimum:
        raise DataError(
            f"Partition {spec!r} of {len(y)} records leaves client {int(sizes.argmin())} with {short}, fewer than the "
            f"minimum of {minimum}. Take fewer clients than {clients}, a lower minimum or more data."
        )
    order = np.argsort(owner, kind="stable")[len(y) - int(sizes.sum()) :]  # stable: keeps indices sorted; -1: no owner
    return np.split(order, np.cumsum(sizes)[:-1])


class _Task:
    """One call of `partition`, as the schemes see it."""

    def __init__(
        self,
        spec: str,
        argument: str,
        y: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        classes: int,
        minimum: int,
        domain: np.ndarray | None,
    ) -> None:
        self.spec, self.argument, self.y, self.clients, self.rng = spec, argument, y, clients, rng
        self.minimum, self.domain = minimum, domain
        self.size = np.bincount(y, minlength=classes)  # records of each class
        self.present = np.flatnonzero(self.size)

    def bad(self, why: str) -> SettingError:
        kind = self.spec.partition(":")[0]
        return SettingError(f"Partition {self.spec!r}: {why}. Write {_SCHEMES[kind].form}: {_SCHEMES[kind].line}.")

    def deal(self, counts: np.ndarray) -> np.ndarray:
        """Return the owner of each record, given the counts (client x class); -1 for records that are left over."""
        shuffled = self.rng.permutation(len(self.y))
        by_class = shuffled[np.argsort(self.y[shuffled], kind="stable")]
        padded = np.vstack([counts, self.size - counts.sum(0)])
        who = np.append(np.arange(self.clients), -1)
        owner = np.empty(len(self.y), dtype=np.int64)
        owner[by_class] = np.concatenate([np.repeat(who, column) for column in padded.T])
        return owner

    def turns(self, per_client: int) -> np.ndarray:
        """Return `per_client` random classes for each client. Each class is held equally often (give or take 1)."""
        row: list[int] = []
        table: list[list[int]] = []
        while len(table) < self.clients:
            deck = self.rng.permutation(self.present).tolist()
            if row:  # this client took classes from the last deck: it continues with classes that it does not hold
                new = [c for c in deck if c not in row][: per_client - len(row)]
                deck = new + [c for c in deck if c not in new]
            for c in deck:
                row.append(c)
                if len(row) == per_client:
                    table.append(row)
                    row = []
        return np.array(table[: self.clients])


def _check(y: np.ndarray, clients: int, classes: int, minimum: int) -> None:
    for what, value in (("clients", clients), ("minimum", minimum), ("classes", classes)):
        if value < 1:
            raise SettingError(f"Partition: {what} is {value}; give 1 or more.")
    if y.ndim != 1 or y.dtype.kind not in "iu" or (len(y) and (y.min() < 0 or y.max() >= classes)):
        raise DataError(f"Partition: labels have to be whole numbers from 0 to {classes - 1}, in one axis.")
    if len(y) < clients * minimum:
        raise DataError(
            f"Partition: {len(y)} records are too few for {clients} clients of at least {minimum} each. "
            f"Take at most {len(y) // minimum} clients, a minimum of at most {len(y) // clients}, or more data."
        )


# --- the schemes ------------------------------------------------------------------------------------------------


def _spread(n: int, among: int) -> np.ndarray:
    return n // among + (np.arange(among) < n % among)


def _iid(task: _Task) -> np.ndarray:
    if task.argument:
        raise task.bad("it takes no parameter")
    return task.rng.permutation(np.repeat(np.arange(task.clients), _spread(len(task.y), task.clients)))


def _dirichlet(task: _Task) -> np.ndarray:
    """Return owners with label skew: class c is shared out in proportions ~ Dir(alpha, ..., alpha) over the clients."""
    alpha = _alpha(task)

    def draw() -> np.ndarray:
        p = task.rng.dirichlet(np.full(task.clients, alpha), size=len(task.size)).T  # clients x classes
        cuts = np.rint(np.cumsum(p, axis=0) * task.size).astype(np.int64)
        cuts[-1] = task.size  # the proportions add up to 1 only almost
        return np.diff(np.minimum(cuts, task.size), axis=0, prepend=0)

    return task.deal(_at_least(task, draw))


def _dirichlet_capped(task: _Task) -> np.ndarray:
    """Return owners as `dirichlet` does, class by class, but a client with its fair share of all records gets no more.

    Much published code does this, and few papers say so. Clients get more equal sizes and fewer classes.
    """
    alpha, fair = _alpha(task), len(task.y) / task.clients

    def draw() -> np.ndarray:
        counts = np.zeros((task.clients, len(task.size)), dtype=np.int64)
        for c in task.present:
            below = counts.sum(1) < fair  # as long as records are left, some client is below its share
            p = task.rng.dirichlet(np.full(task.clients, alpha)) * below
            p = p if p.sum() > 0 else below * 1.0  # tiny proportions underflow
            cuts = np.rint(np.cumsum(p / p.sum()) * task.size[c]).astype(np.int64)
            cuts[-1] = task.size[c]
            counts[:, c] = np.diff(np.minimum(cuts, task.size[c]), prepend=0)
        return counts

    return task.deal(_at_least(task, draw))


def _dirichlet_balanced(task: _Task) -> np.ndarray:
    """Return owners of exactly equal numbers of records, whose shares of the classes are ~ Dir(alpha, ..., alpha).

    Clients are filled in turns of a tenth, in an order drawn anew for each turn. A class that is used up is left out,
    and what a client lacks then comes from its other classes.
    """
    alpha, left = _alpha(task), task.size.astype(np.int64).copy()
    share = _spread(len(task.y), task.clients)
    p = task.rng.dirichlet(np.full(len(task.size), alpha), size=task.clients)
    counts = np.zeros((task.clients, len(task.size)), dtype=np.int64)
    while (lacking := share - counts.sum(1)).any():
        for k in task.rng.permutation(np.flatnonzero(lacking)):
            wanted = p[k] * (left > 0)
            wanted = wanted if wanted.sum() > 0 else (left > 0) * 1.0
            turn = min(int(lacking[k]), max(1, int(share[k]) // 10))
            got = np.minimum(task.rng.multinomial(turn, wanted / wanted.sum()), left)
            counts[k] += got
            left -= got
    return task.deal(counts)


def _dirichlet_filled(task: _Task) -> np.ndarray:
    """Return owners of exactly equal numbers of records: classes are shared out one after another, ~ Dir(alpha).

    Of each class the last client takes first: of what is left it takes its proportion among those whose turn has not
    come, as far as it has room. This goes on until the class is used up. So the classes that come last fill who has
    room left.
    """
    alpha, share = _alpha(task), _spread(len(task.y), task.clients)
    counts = np.zeros((task.clients, len(task.size)), dtype=np.int64)
    for c in task.present:
        p, left = task.rng.dirichlet(np.full(task.clients, alpha)), int(task.size[c])
        while left:
            room = share - counts.sum(1)
            wanted = p * (room > 0)
            wanted = wanted if wanted.sum() > 0 else (room > 0) * 1.0  # those who wanted some are full
            among = np.cumsum(wanted)
            for k in np.flatnonzero(wanted)[::-1]:
                got = min(int(room[k]), int(wanted[k] / among[k] * left))
                counts[k, c] += got
                left -= got
    return task.deal(counts)


def _alpha(task: _Task) -> float:
    try:
        alpha = float(task.argument)
    except ValueError:
        raise task.bad(f"ALPHA is {task.argument!r}, which is not a number") from None
    if not (alpha > 0 and math.isfinite(alpha)):
        raise task.bad(f"ALPHA is {alpha:g}; it has to be positive and finite")
    return alpha


def _at_least(task: _Task, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Return a table of counts in which every client has the minimum.

    If a draw leaves a client below it, draw again, at most _REDRAWS times. If none is good enough, take the one that
    lacks the fewest records and move records from the largest class of the largest client.
    """
    best, least = None, math.inf
    for _ in range(_REDRAWS):
        counts = draw()
        lacking = int(np.maximum(task.minimum - counts.sum(1), 0).sum())
        if lacking < least:
            best, least = counts, lacking
        if not lacking:
            break
    assert best is not None
    total = best.sum(1)
    while total[poor := int(total.argmin())] < task.minimum:  # `_check` has made sure that there is enough for all
        rich = int(total.argmax())
        c = int(best[rich].argmax())
        spare = -(-(total[rich] - task.minimum) // 2)  # half at a time: afterwards another client may be the richest
        moved = min(task.minimum - total[poor], spare, best[rich, c])
        best[[rich, poor], c] += (-moved, moved)
        total[[rich, poor]] += (-moved, moved)
    return best


def _classes(task: _Task) -> np.ndarray:
    """Return owners with K classes for each client. A class is shared equally among the clients that hold it."""
    if not task.argument.isdecimal() or not 1 <= int(task.argument) <= len(task.present):
        raise task.bad(
            f"K is {task.argument!r}; it has to be a whole number from 1 to the {len(task.present)} classes there are"
        )
    table = task.turns(int(task.argument))
    counts = np.zeros((task.clients, len(task.size)), dtype=np.int64)
    for c in np.unique(table):
        holders = np.flatnonzero((table == c).any(1))
        if task.size[c] < len(holders):
            raise DataError(
                f"Partition {task.spec!r}: class {c} has {task.size[c]} records, but {len(holders)} clients are to "
                f"hold it. Take fewer clients than {task.clients}, fewer classes a client or more data."
            )
        counts[holders, c] = _spread(int(task.size[c]), len(holders))
    return task.deal(counts)


def _ratio(task: _Task) -> np.ndarray:
    """Return owners with one dominant class and some minor ones for each client, in the given ratio.

    All clients have the same size. FedFree, Section 4.3, names "a partitioning ratio of 8:1:1 (non-IID1) and 6:2:2
    (non-IID2)" and does not explain it. Its Section 4.1 has non-IID1 as 1 of 10 (CIFAR-10) or 10 of 100 (CIFAR-100)
    classes for each client, which is `classes:1` and `classes:10` here. We read the ratio as shares of classes within
    a client; that reading is our choice.

    Among each |classes| clients in a row, every class is dominant once, and minor once in each position. So no class is
    in greater demand than another, and all records are used if |classes| divides the number of clients.
    """
    parts = task.argument.split(":")
    try:
        share = np.array([float(part) for part in parts])
    except ValueError:
        raise task.bad(f"the parts are {task.argument!r}; they have to be numbers") from None
    if not (np.isfinite(share).all() and (share > 0).all()):
        raise task.bad(f"the parts are {task.argument!r}; they have to be positive")
    if len(share) > len(task.present):
        raise task.bad(f"it has {len(share)} parts, but there are {len(task.present)} classes")
    share /= share.sum()
    blocks = []
    for _ in range(-(-task.clients // len(task.present))):
        deck = task.rng.permutation(task.present)
        blocks.append(np.stack([np.roll(deck, -place) for place in range(len(share))], axis=1))
    table = np.concatenate(blocks)[: task.clients]  # clients x places

    def counts(n: int) -> np.ndarray:
        """Return the table for clients of n records. Its cumulative shares are rounded so that they add up to n."""
        cut = np.rint(np.cumsum(share) * n).astype(np.int64)
        cut[-1] = n
        out = np.zeros((task.clients, len(task.size)), dtype=np.int64)
        np.put_along_axis(out, table, np.broadcast_to(np.diff(cut, prepend=0), table.shape), axis=1)
        return out

    demand = np.bincount(table.ravel(), np.tile(share, task.clients), minlength=len(task.size))
    wanted = demand > 0
    n = int((task.size[wanted] / demand[wanted]).min()) + 1
    while n and (counts(n).sum(0) > task.size).any():  # rounding may ask for a few more than there are
        n -= 1
    return task.deal(counts(n))


def _domain(task: _Task) -> np.ndarray:
    if task.argument:
        raise task.bad("it takes no parameter")
    if task.domain is None:
        raise SettingError(
            "Partition 'domain': the data set has no domains. Take folder:PATH with PATH/DOMAIN/CLASS/, "
            "npz:PATH with an array domain, or another partition."
        )
    found, which = np.unique(np.asarray(task.domain), return_inverse=True)
    if len(which) != len(task.y):
        raise DataError(
            f"Partition 'domain': {len(which)} domain labels for {len(task.y)} records; there has to be one each."
        )
    if task.clients % len(found):
        raise SettingError(
            f"Partition 'domain': {task.clients} clients do not divide evenly over {len(found)} domains. "
            f"Take {len(found)} clients, or a multiple."
        )
    each = task.clients // len(found)
    owner = np.empty(len(task.y), dtype=np.int64)
    for d in range(len(found)):
        records = np.flatnonzero(which == d)
        owner[records] = task.rng.permutation(np.repeat(d * each + np.arange(each), _spread(len(records), each)))
    return owner


class _Scheme:
    def __init__(self, form: str, line: str, deal: Callable[[_Task], np.ndarray]) -> None:
        self.form, self.line, self.deal = form, line, deal


_SCHEMES = {
    "iid": _Scheme("iid", "records at random, clients of equal size", _iid),
    "dirichlet": _Scheme(
        "dirichlet:ALPHA",
        "label skew, each class shared out ~ Dir(ALPHA); the smaller ALPHA, the more skew",
        _dirichlet,
    ),
    "dirichlet-capped": _Scheme(
        "dirichlet-capped:ALPHA",
        "like dirichlet, but a client with its fair share of all records gets no more, as in much published code",
        _dirichlet_capped,
    ),
    "dirichlet-balanced": _Scheme(
        "dirichlet-balanced:ALPHA",
        "all clients of one size, with shares of the classes drawn from a Dirichlet distribution",
        _dirichlet_balanced,
    ),
    "dirichlet-filled": _Scheme(
        "dirichlet-filled:ALPHA",
        "all clients of one size, each class shared out ~ Dir(ALPHA) among those who have room left",
        _dirichlet_filled,
    ),
    "classes": _Scheme("classes:K", "each client holds K classes, each class is held equally often", _classes),
    "ratio": _Scheme(
        "ratio:A:B:...",
        "a dominant class and minor ones per client in that ratio (8:1:1), clients of equal size",
        _ratio,
    ),
    "domain": _Scheme("domain", "one domain per client; several clients of a domain share it at random", _domain),
}
