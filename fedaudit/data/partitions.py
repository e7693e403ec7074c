"""How records are spread over clients.

Every scheme but `domain` and `iid` fixes a table of counts (client x class) first; the records of a class are then
dealt at random to fill it. Work on the table costs nothing, work on records is done once, in arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedaudit.errors import DataError, SettingError, unknown

_REDRAWS = 20  # a Dirichlet draw is cheap, but at small alpha and many clients no number of draws would do


def names() -> dict[str, str]:
    """Each scheme as it is written, with a line on what it does."""
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
    """For each client the sorted indices of its records: disjoint, `minimum` or more each.

    `iid`, `dirichlet` and `domain` give away every record. `classes:K` leaves out the classes that nobody holds
    (clients * K < classes), and `ratio` what does not fit the ratio once its scarcest class is used up.
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
    order = np.argsort(owner, kind="stable")[len(y) - int(sizes.sum()) :]  # stable: indices stay sorted; -1 is nobody's
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
        """The owner of each record, given how many of each class each client gets; -1 for what is left over."""
        shuffled = self.rng.permutation(len(self.y))
        by_class = shuffled[np.argsort(self.y[shuffled], kind="stable")]
        padded = np.vstack([counts, self.size - counts.sum(0)])
        who = np.append(np.arange(self.clients), -1)
        owner = np.empty(len(self.y), dtype=np.int64)
        owner[by_class] = np.concatenate([np.repeat(who, column) for column in padded.T])
        return owner

    def turns(self, per_client: int) -> np.ndarray:
        """`per_client` different classes for each client, at random, each class held equally often (give or take 1)."""
        row: list[int] = []
        table: list[list[int]] = []
        while len(table) < self.clients:
            deck = self.rng.permutation(self.present).tolist()
            if row:  # this client began on the last deck: it goes on with classes that it does not hold yet
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
            raise SettingError(f"Partition: {what} is {value}; it has to be 1 or more.")
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
    """Label skew: class c is shared out in proportions ~ Dir(alpha, ..., alpha) over the clients."""
    alpha = _alpha(task)

    def draw() -> np.ndarray:
        p = task.rng.dirichlet(np.full(task.clients, alpha), size=len(task.size)).T  # clients x classes
        cuts = np.rint(np.cumsum(p, axis=0) * task.size).astype(np.int64)
        cuts[-1] = task.size  # the proportions add up to 1 only almost
        return np.diff(np.minimum(cuts, task.size), axis=0, prepend=0)

    return task.deal(_at_least(task, draw))


def _dirichlet_capped(task: _Task) -> np.ndarray:
    """As `dirichlet`, class by class, but a client that has its fair share of all records gets no more of them.

    Much published code deals so, and few papers say it. Clients come out of more equal size and with fewer classes.
    """
    alpha, fair = _alpha(task), len(task.y) / task.clients

    def draw() -> np.ndarray:
        counts = np.zeros((task.clients, len(task.size)), dtype=np.int64)
        for c in task.present:
            below = counts.sum(1) < fair  # somebody is, as long as records are left
            p = task.rng.dirichlet(np.full(task.clients, alpha)) * below
            p = p if p.sum() > 0 else below * 1.0  # tiny proportions underflow
            cuts = np.rint(np.cumsum(p / p.sum()) * task.size[c]).astype(np.int64)
            cuts[-1] = task.size[c]
            counts[:, c] = np.diff(np.minimum(cuts, task.size[c]), prepend=0)
        return counts

    return task.deal(_at_least(task, draw))


def _alpha(task: _Task) -> float:
    try:
        alpha = float(task.argument)
    except ValueError:
        raise task.bad(f"ALPHA is {task.argument!r}, no number") from None
    if not (alpha > 0 and math.isfinite(alpha)):
        raise task.bad(f"ALPHA is {alpha:g}; it has to be positive and finite")
    return alpha


def _at_least(task: _Task, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """A table of counts in which every client has the minimum.

    A draw that leaves a client below it is drawn again, _REDRAWS times at most; of those the one that lacks the fewest
    records is then mended by moving records from the largest class of the largest client.
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
    while total[poor := int(total.argmin())] < task.minimum:  # there is enough for all: `_check`
        rich = int(total.argmax())
        c = int(best[rich].argmax())
        spare = -(-(total[rich] - task.minimum) // 2)  # half of it at a time: the next richest may then be another
        moved = min(task.minimum - total[poor], spare, best[rich, c])
        best[[rich, poor], c] += (-moved, moved)
        total[[rich, poor]] += (-moved, moved)
    return best


def _classes(task: _Task) -> np.ndarray:
    """K classes for each client; the records of a class are shared equally among those who hold it."""
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
    """Each client: one dominant class and some minor ones, in the given ratio; all clients of the same size.

    FedFree, Section 4.3, names "a partitioning ratio of 8:1:1 (non-IID1) and 6:2:2 (non-IID2)" and no more; its
    Section 4.1 has non-IID1 as 1 of 10 (CIFAR-10) or 10 of 100 (CIFAR-100) classes a client, which is `classes:1` and
    `classes:10` here. The reading of the ratio as shares of classes within a client is ours.

    Among each |classes| clients in a row every class is dominant once, and minor once in each place, so that no
    class is in greater demand than another and all records are used when |classes| divides the clients.
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
        """The table for clients of n records: rounded cumulative shares add up to n."""
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
        "the same, but a client with its fair share of all records is given no more, as much published code deals",
        _dirichlet_capped,
    ),
    "classes": _Scheme("classes:K", "each client holds K classes, each class is held equally often", _classes),
    "ratio": _Scheme(
        "ratio:A:B:...",
        "a dominant class and minor ones per client in that ratio (8:1:1), clients of equal size",
        _ratio,
    ),
    "domain": _Scheme("domain", "one domain per client; several clients of a domain share it at random", _domain),
}
