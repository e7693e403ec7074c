"""A twin shows whether a client's replies are functions of what the mechanism let out.

Beside a client runs its twin: the same tasks, seeds and received messages, with all records exchanged for others, and
with a model and a memory of its own that go on from task to task. Each output of a mechanism (the noised gradient of a
step of DP-SGD, a noised field) is handed over from the client instead of computed. Post-processing of these outputs
gives the same reply to the bit. Whatever else reaches a reply, its structure or its absence shows as a difference, by
whatever road it came, also rounds later through memory.

A twin looks at no record in a private training: the noised gradients are all that such a training lets out, so the
loss, the forward pass of the network on records and what is computed `beside` them are left out. Code that keeps what
it sees there finds nothing in the twin, and its reply is another one.

The model and the memory themselves may differ: they stay.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.privacy.dpsgd import fit_handed_over
from fedaudit.privacy.dpsgd_stack import fit_handed_over_in_stack
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import HandedOver, outputs
from fedaudit.privacy.trees import leaves_of
from fedaudit.runtime.party import Client, described
from fedaudit.runtime.site import Rows
from fedaudit.training.fit import Fitted, Loss, Until
from fedaudit.wire.codec import decode, digest_of, encode_tree, read_header
from fedaudit.wire.codec.packing import Blob
from fedaudit.wire.message import Down, Up

MANY = 0.5  # of the labels move by half of the classes
SCALED = "and the noise is scaled for rows of one record each"


class TwinClient(Client):
    """A client with other records, which is handed what its original's mechanisms let out."""

    def fit(self, loss: Loss, data: Sequence[Tensor] | None = None, **options: Any) -> Fitted:
        gate, model = outputs(), options.get("model") or self.model
        assert isinstance(gate, HandedOver)  # else it is no twin
        train = functools.partial(super().fit, loss, data, **options)
        return train() if data is not None else gate.trained(lambda: list(model.state_dict().values()), train)

    def optimise(self, params: Sequence[Tensor], *args: Any, **options: Any) -> dict[str, Tensor]:
        gate = outputs()
        assert isinstance(gate, HandedOver)
        return gate.trained(lambda: list(params), functools.partial(super().optimise, params, *args, **options))

    def _fit_on_records(
        self,
        model: nn.Module,
        loss: Loss,
        rows: Sequence[Tensor],
        until: Until | None,
        separable: bool,
        options: dict[str, Any],
        beside: Sequence[Callable[[Tensor], Tensor]],
    ) -> Fitted:
        """Take the client's steps. The records, the loss and what is beside it are not needed."""
        gate = outputs()
        assert isinstance(gate, HandedOver)  # else it is no twin
        self._fits = getattr(self, "_fits", 0) + 1
        item = gate.begin(described(model, loss, len(rows[0]), options, beside))
        with self._meter.span("fit"):
            if item["active"]:
                steps = fit_handed_over_in_stack(model, options["opt"], gate.gradients(), item["slot"], item["active"])
            else:
                steps = fit_handed_over(model, options["opt"], gate.gradients())
        self.private_fits += 1
        return Fitted(options["epochs"] or 0, steps, math.nan)


def mixed_rows(
    twin: Sequence[tuple[str, Any]], others: Sequence[Sequence[tuple[str, Any]]], exchanged: Sequence[int]
) -> list[tuple[str, str]]:
    """Return which fields have rows that are not made of one record each.

    `twin` has its fields as they were before any protection. `others` has them with some of the records exchanged, with
    all other records exchanged, and with one; `exchanged` has how many these are. A row of one record changes in one of
    the first two at most, and no more rows change than records were exchanged.
    """
    found = []
    for (where, mine), *theirs in zip(twin, *others, strict=False):
        leaves = (leaves_of(value, where) for value in (mine, *(value for _, value in theirs)))
        for before, *after in zip(*leaves, strict=False):
            moved = [_moved(before, rows) for rows in after]
            if moved[0] & moved[1]:
                found.append((where, f"a row of it changes with several records, {SCALED}"))
                break
            if any(len(m) > n and x.shape == before.shape for m, n, x in zip(moved, exchanged, after, strict=True)):
                found.append((where, f"several rows of it change with one record, {SCALED}"))
                break
    return found


def mixed_means(twin: Sequence[str], others: Sequence[Sequence[str]], exchanged: Sequence[int]) -> bool:
    """Return whether rows that go into means of classes are not made of one record each, by their digests.

    `others` has them with some of the records exchanged, with all other ones, and with one; `exchanged` has how many
    these are. Rows of one record each give no more new rows than records were exchanged. In which order they come means
    nothing: a method may sort its records by their labels, or leave out classes of few.
    """
    new = [sum((Counter(rows) - Counter(twin)).values()) for rows in others]
    return any(count > most for count, most in zip(new, exchanged, strict=True))


def _moved(before: Tensor, after: Tensor) -> set[int]:
    """Return the rows that changed; all of them if there are more or fewer now."""
    if before.shape != after.shape:
        return set(range(len(before)))
    same = (before == after).reshape(len(before), -1).all(1)
    return set((~same).nonzero()[:, 0].tolist())


def exchanged(rows: Rows, others: Rows, classes: int, rng: torch.Generator) -> Rows:
    """Return as many other records of the same shape, each with another label than the record in its place.

    They are drawn from `others` (the auxiliary share). If there are none, the records themselves are put into another
    order and each is changed: numbers are mirrored and moved, tokens are shifted along the text. Many labels move by
    half of the classes, to the other parity and the other half, so that a bit that was read off a label is another one.
    """
    x, y = rows
    n = len(x)
    if len(others[0]):
        x = others[0][_drawn(len(others[0]), n, rng)].to(x)
    else:
        x = x[torch.randperm(n, generator=rng)]
        x = x.roll(1, -1) if not x.is_floating_point() else (-x + 0.1 * torch.randn(x.shape, generator=rng)).to(x)
    if classes < 2:
        return x, y.clone()
    half = (classes // 2) | 1
    shift = torch.randint(1, classes, (n,), generator=rng)
    shift[torch.rand(n, generator=rng) < MANY] = half % classes or 1
    return x, (y + shift.to(y)) % classes


def _drawn(m: int, n: int, rng: torch.Generator) -> Tensor:
    """Return n of m places, each as seldom as possible more than once."""
    return torch.cat([torch.randperm(m, generator=rng) for _ in range(-(-n // m))])[:n] if n else torch.zeros(0).long()


@dataclass(frozen=True)
class Difference:
    """A place in which a twin's reply is not its client's."""

    client: int
    round: int
    ask: int
    fn: str
    field: str  # "Message.field", or what else of the reply
    how: str

    def entry(self) -> LedgerEntry:
        """Return the entry for the ledger."""
        condition = (
            f"{self.field} follows the records by another way than through a mechanism: in round {self.round}, "
            f"{self.fn} of client {self.client} and of its twin with other records differ there. twins.log has both; "
            f"`fedaudit check-method` tries the method by itself"
        )
        return LedgerEntry.unprotected(f"{self.fn} (twin)", "reply", condition)

    def text(self) -> str:
        return f"round {self.round}, ask {self.ask}, client {self.client}, {self.fn}: {self.field}: {self.how}"


@dataclass(frozen=True)
class Answer:
    """The outcome of a task, as far as somebody else sees it."""

    reply: Blob | None
    error: str | None  # type and place of the error that ended it


def differences(
    task: tuple[int, int, int, str],
    message: Blob,
    client: Answer,
    twin: Answer,
    found: Sequence[tuple[str, str]],
    paid: frozenset[str],
) -> list[Difference]:
    """Return where a twin's answer is not its client's. `task` is client, round, ask and function.

    `found` is what the twin's gate noticed. `paid` names fields that are billed with infinity in any case: they may
    hold anything.
    """
    differ = functools.partial(Difference, *task)
    rows = [differ(where, how) for where, how in found if where not in paid]
    if client.reply is None or twin.reply is None:
        said = ["answered" if of.reply is not None else f"ended with {of.error}" for of in (client, twin)]
        if said[0] != said[1] and not rows:
            rows.append(differ("absence", f"the client {said[0]}, its twin {said[1]}"))
        return rows
    sent = functools.partial(decode, message, Down)
    mine, other = (decode(reply, Up, answered=sent) for reply in (client.reply, twin.reply))
    if type(mine) is not type(other):
        return [*rows, differ("message class", f"{type(mine).__name__}, with other records {type(other).__name__}")]
    for name in mine.declared():
        where = f"{type(mine).__name__}.{name}"
        a, b = getattr(mine, name), getattr(other, name)
        if where not in paid and _bits(a) != _bits(b) and where not in {row.field for row in rows}:
            rows.append(differ(where, f"{_shown(a)}, with other records {_shown(b)}"))
    return rows


def _bits(value: Any) -> str:
    """Return a digest of all bits of a value, its keys and their order, its shapes and types."""
    if isinstance(value, Tensor):
        flat = torch.atleast_1d(value).contiguous().view(torch.uint8)
        return f"{value.dtype} {list(value.shape)} {read_header(encode_tree(flat)).digest}"
    return digest_of(value)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def paid_fields(entries: Sequence[LedgerEntry]) -> frozenset[str]:
    """Return the fields that a task's entries bill with infinity: what they hold is paid for."""
    return frozenset(entry.field for entry in entries if entry.noise_multiplier == 0 and not entry.field.endswith(")"))
