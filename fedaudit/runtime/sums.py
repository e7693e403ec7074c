"""Sums of replies in a run: plain means, secure sums over the wire, and the noise of a guarantee for clients."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedaudit.aggregation.mean import Mean, mean_of
from fedaudit.aggregation.secure import graph
from fedaudit.aggregation.secure.keys import check_installed
from fedaudit.aggregation.secure.messages import (
    KEYS,
    Advertised,
    Delivered,
    Helped,
    Invited,
    Masked,
    Roster,
    Shared,
    SumFacts,
    Unmask,
    as_bytes,
    ids_of,
    keys_of,
    rows_of,
    words_of,
)
from fedaudit.aggregation.secure.protocol import SEALED, Member, Revealed, total
from fedaudit.aggregation.secure.shamir import BYTES
from fedaudit.aggregation.terms import Noise, Terms
from fedaudit.aggregation.update import Layout, clipped, restored, update_of
from fedaudit.errors import PrivacyError, RunError
from fedaudit.privacy.ledger import Entry
from fedaudit.privacy.updates import Guarantee
from fedaudit.rng import numpy_generator
from fedaudit.runtime.party import Cohort
from fedaudit.runtime.run_record import SumRecord
from fedaudit.wire.channel import Wire
from fedaudit.wire.message import Down, Record, Up

TAIL = 12.0  # deviations of noise in a sum for which the ring keeps room: beyond it a sum would wrap round


def no_way(*_: Any) -> dict[int, Any]:
    raise RunError("This sum has no clients to ask.")


@dataclass
class Summing:
    """Everything that a sum needs of the run that it is part of."""

    wire: Wire
    t: int
    key: tuple[object, ...]  # (seed, attempt): all keys and all noise follow from it
    secure: bool
    threshold: float
    bound: float
    dropping: float  # the share of clients that may drop out of a sum
    expected: float  # clients that a round has by the setting
    guarantee: Guarantee | None
    largest: int  # the most records that a client has, which is public
    drops: Callable[[int, int, str], bool]  # client, ask, phase
    device: torch.device
    absent: Callable[[int, int, str], None]
    ask: Callable[..., dict[int, Any]] = no_way  # the run's own way to ask, with terms
    layouts: dict[int, str] = field(default_factory=dict)  # by client: what the last ask's updates look like
    cut: int = 0
    facts: list[SumFacts] = field(default_factory=list)  # of this round's secure sums
    records: list[SumRecord] = field(default_factory=list)
    entries: list[tuple[int, list[Entry]]] = field(default_factory=list)

    def heard(self, k: int, layout: str, cut: int) -> None:
        """Note what a client's reply to the last ask looks like, and how many of its numbers were cut off."""
        self.layouts[k] = layout
        self.cut += cut

    def mean(self, cohort: Cohort, fn: Any, path: str, message: Down | Mapping[int, Any], by: str | None) -> Mean[Any]:
        """Return the mean of the replies to a message, by the setting's way of summing."""
        if self.secure:
            return self._secure(cohort, fn, path, message, by)
        if self.guarantee is None:
            return mean_of(self.ask(cohort, fn, message), by)
        return self._noised(cohort, fn, path, message, by)

    # --- plain sums under a guarantee for clients ---

    def _noised(
        self, cohort: Cohort, fn: Any, path: str, message: Down | Mapping[int, Any], by: str | None
    ) -> Mean[Any]:
        guarantee, number = self._guaranteed(), len(self.wire.traffic.asks)
        base = message if isinstance(message, Down) else None
        local = guarantee.policy.where == "client"
        terms = None
        if local:
            noise = Noise(guarantee.policy.clip, guarantee.sigma, secure=guarantee.policy.secure)
            terms = {k: self._terms(k, number, by, 1, base is not None, noise) for k in cohort.ids}
        invited = list(cohort.ids)
        replies = self.ask(cohort, fn, message, terms)
        if not replies:
            raise RunError(f"Round {self.t}, {path}: no client answered, so there is no sum.")
        ids = sorted(replies)
        updates = [update_of(replies[k], base, by) for k in ids]
        if not local:
            updates = [clipped(update, guarantee.policy.clip)[0] for update in updates]
        if any(update.layout != updates[0].layout for update in updates):
            raise RunError(f"Round {self.t}, {path}: clients sent replies of several shapes, which have no sum.")
        real, whole = (np.sum([getattr(u, of) for u in updates], axis=0) for of in ("real", "whole"))
        if not local:
            real = real + self._server_noise(number, len(real))
        divisor = self._divisor(len(invited))
        value = restored(updates[0].layout, real / divisor, whole / divisor, divisor, base, self.device)
        self._bill(type(value), invited)
        self.records.append(
            SumRecord(
                ask=number, fn=path, invited=len(invited), stayed=len(ids), divisor=divisor, **self._noise_facts()
            )
        )
        return Mean(value, round(divisor))

    def _guaranteed(self) -> Guarantee:
        assert self.guarantee is not None
        return self.guarantee

    def _server_noise(self, number: int, length: int) -> np.ndarray:
        guarantee = self._guaranteed()
        rng = numpy_generator((*self.key, "server", self.t, number), "sum noise", secure=guarantee.policy.secure)
        return rng.normal(0.0, guarantee.sigma, length)

    def _divisor(self, invited: int) -> float:
        """Return the public number that a noised sum is divided by: who answered must not show in it."""
        return max(self.expected, 1.0) if self._guaranteed().poisson else float(invited)

    def _noise_facts(self, multiplier: float | None = None) -> dict[str, Any]:
        if self.guarantee is None:
            return {}
        z = self.guarantee.multiplier if multiplier is None else multiplier
        return {
            "clip": self.guarantee.policy.clip,
            "sigma": z * self.guarantee.policy.clip,
            "where": self.guarantee.policy.where,
        }

    def _bill(self, cls: type[Up], invited: Sequence[int]) -> None:
        """Enter what this sum cost the clients. Where sampling amplifies, every client pays in every round."""
        guarantee = self._guaranteed()
        kinds = sorted({d.kind for d in cls.declared().values() if d is not None and d.kind not in (None, "count")})
        entry = guarantee.entry(f"{cls.__name__} (update)", kinds[0] if kinds else "weights")
        who = range(guarantee.clients) if guarantee.amplified else invited
        self.entries += [(k, [entry]) for k in who]

    # --- secure sums ---

    def _terms(
        self, k: int, number: int, by: str | None, clients: int, based: bool, noise: Noise | None = None, **more: Any
    ) -> Terms:
        key = (*self.key, f"client {k}", self.t, number)
        return Terms(by, clients, self._bound(), 1.0, based, key, noise=noise, **more)

    def _bound(self) -> float:
        return self.bound if self.guarantee is None else self.guarantee.policy.clip

    def _secret(self, k: int, number: int) -> bytes:
        parts = (*self.key, f"client {k}", self.t, number, "secure sum")
        return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).digest()

    def _secure(
        self, cohort: Cohort, fn: Any, path: str, message: Down | Mapping[int, Any], by: str | None
    ) -> Mean[Any]:
        check_installed()
        number, invited = len(self.wire.traffic.asks), list(cohort.ids)
        if len(invited) < 2:
            raise RunError(
                f"Round {self.t}, {path}: a sum of {len(invited)} client is that client's value. Secure aggregation "
                "needs at least two: raise --participation."
            )
        members = {k: Member(k, self._secret(k, number)) for k in invited}
        largest = 1.0 if by is None or self.guarantee is not None else float(self.largest)
        multiplier, noise, bound = self._own_noise(len(invited))

        # Phase 0: keys.
        invitation = Invited(len(invited), self.threshold, bound, largest)
        keys: dict[int, bytes] = {}
        for k in invited:
            self._down(k, invitation, "advertise", number)
            if self._stays(cohort, k, number, "advertise"):
                own = members[k].advertise()
                said = self._up(k, Advertised(as_bytes([own.seal + own.mask], KEYS)), "advertise", number)
                keys[k] = rows_of(said.keys)[0]
        self._enough(len(keys), len(invited), path, "advertised keys")
        public = {k: keys_of(row) for k, row in keys.items()}
        degree = graph.degree(len(keys), self.threshold, self.dropping)
        near = graph.neighbours(list(keys), degree, int.from_bytes(self._secret(-1, number)[:8], "little"))

        # Phase 1: shares.
        sealed: dict[int, dict[int, bytes]] = {}
        for k in sorted(keys):
            roster = Roster(ids_of(near[k]), as_bytes([keys[v] for v in near[k]], KEYS))
            heard = self._down(k, roster, "share", number)
            if self._stays(cohort, k, number, "share"):
                known = dict(zip(heard.ids.tolist(), map(keys_of, rows_of(heard.keys)), strict=True))
                given = members[k].share(known, self.threshold)
                sent = Shared(ids_of(list(given)), as_bytes(list(given.values()), SEALED))
                said = self._up(k, sent, "share", number)
                sealed[k] = dict(zip(said.to.tolist(), rows_of(said.sealed), strict=True))
        self._enough(len(sealed), len(invited), path, "shared their keys")

        # Phase 2: masked vectors.
        inbox: dict[int, dict[int, bytes]] = {}
        terms: dict[int, Terms] = {}
        for k in sorted(sealed):
            peers = [v for v in near[k] if v in sealed]
            message_to_k = Delivered(ids_of(peers), as_bytes([sealed[v][k] for v in peers], SEALED))
            heard = self._down(k, message_to_k, "deliver", number)
            inbox[k] = dict(zip(heard.by.tolist(), rows_of(heard.sealed), strict=True))
            plain = self._terms(k, number, by, len(invited), isinstance(message, Down), noise)
            terms[k] = dataclasses.replace(
                plain, bound=bound, largest=largest, secret=self._secret(k, number).hex(),
                peers={str(v): keys[v].hex() for v in peers},
            )  # fmt: skip
        self.layouts.clear()
        self.cut = 0
        messages = (
            dict.fromkeys(sorted(sealed), message)
            if isinstance(message, Down)
            else {k: message[k] for k in sorted(sealed)}
        )
        masked: dict[int, Masked] = self.ask(cohort, fn, messages, terms)
        self._enough(len(masked), len(invited), path, "sent a masked vector")
        layout = self._layout(path)

        # Phase 3: unmasking.
        revealed: dict[int, Revealed] = {}
        for k in sorted(masked):
            around = sorted((*near[k], k))
            stayed = [v for v in around if v in masked]
            dropped = [v for v in around if v in sealed and v not in masked]
            heard = self._down(k, Unmask(ids_of(stayed), ids_of(dropped)), "unmask", number)
            if self._stays(cohort, k, number, "unmask"):
                roster_of_k = {v: public[v] for v in near[k]}
                gave = members[k].unmask(
                    roster_of_k, inbox[k], heard.stayed.tolist(), heard.dropped.tolist(), self.threshold
                )
                rows = [
                    [of[v].to_bytes(BYTES, "little") for v in asked]
                    for of, asked in ((gave.own, stayed), (gave.keys, dropped))
                ]
                said = self._up(k, Helped(as_bytes(rows[0], BYTES), as_bytes(rows[1], BYTES)), "unmask", number)
                shares = [[int.from_bytes(row, "little") for row in rows_of(t)] for t in (said.own, said.keys)]
                revealed[k] = Revealed(
                    dict(zip(stayed, shares[0], strict=True)), dict(zip(dropped, shares[1], strict=True))
                )
        words = {k: words_of(m.y) for k, m in masked.items()}
        summed = total(words, public, near, sorted(sealed), revealed, self.threshold)

        ring = layout.ring(len(invited), bound, largest)
        parts = ring.decoded(summed)
        weight = float(parts[2][0]) if layout.weighted else float(len(masked))
        divisor = weight if self.guarantee is None else self._divisor(len(invited))
        if divisor <= 0:
            raise RunError(f"Round {self.t}, {path}: the weights sum to {divisor:g}. Give weights with a positive sum.")
        real = parts[0]
        if self.guarantee is not None and self.guarantee.policy.where == "server":
            real = real + self._server_noise(number, len(real))
        base = message if isinstance(message, Down) else None
        value = restored(layout, real / divisor, parts[1] / divisor, divisor, base, self.device)
        self.facts.append(SumFacts(invited, near, sorted(sealed), sorted(masked), sorted(revealed), ring.length))
        if self.guarantee is not None:
            self._bill(type(value), invited)
        self.records.append(
            SumRecord(
                ask=number, fn=path, invited=len(invited), stayed=len(masked), divisor=divisor, secure=True,
                advertised=len(keys), shared=len(sealed), helped=len(revealed), neighbours=degree,
                threshold=graph.needed(self.threshold, degree + 1), bound=bound,
                error=ring.error(len(masked), divisor), cut_off=self.cut, **self._noise_facts(multiplier),
            )
        )  # fmt: skip
        self.wire.summed(value, path, number, sorted(masked))
        return Mean(value, len(masked) if self.guarantee is None else round(divisor))

    def _own_noise(self, invited: int) -> tuple[float | None, Noise | None, float]:
        """Return the multiplier of the noise on the sum, what each client adds, and the bound of single numbers."""
        if self.guarantee is None:
            return None, None, self.bound
        policy, z = self.guarantee.policy, self.guarantee.multiplier
        if policy.where == "server":
            return z, Noise(policy.clip), policy.clip
        if policy.where == "client":
            bound = policy.clip + TAIL * self.guarantee.sigma
            return z, Noise(policy.clip, self.guarantee.sigma, secure=policy.secure), bound
        raise PrivacyError("where=shares is not there yet.")

    def _layout(self, path: str) -> Layout:
        texts = set(self.layouts.values())
        if len(texts) != 1:
            raise RunError(f"Round {self.t}, {path}: clients sent replies of several shapes, which have no sum.")
        return Layout.of_text(texts.pop())

    def _enough(self, there: int, invited: int, path: str, did: str) -> None:
        least = graph.needed(self.threshold, invited)
        if there < least:
            raise RunError(
                f"Round {self.t}, {path}: {there} of {invited} clients {did}, the threshold is {least}. The server "
                "learns nothing of this round. Lower --dropout or --threshold, and go on with --resume."
            )

    def _stays(self, cohort: Cohort, k: int, number: int, phase: str) -> bool:
        if not self.drops(k, number, phase):
            return True
        self.wire.left(k, number, phase, "dropped out")
        self.absent(k, number, f"dropped out ({phase})")
        if k in cohort.ids:
            cohort.ids.remove(k)
        return False

    def _down(self, k: int, message: Record, phase: str, number: int) -> Any:
        return self.wire.aside("down", k, message, phase, number)

    def _up(self, k: int, message: Record, phase: str, number: int) -> Any:
        return self.wire.aside("up", k, message, phase, number)
