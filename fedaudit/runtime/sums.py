"""Sums of replies in a run: plain means, secure sums over the wire, and the noise of a guarantee for clients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
from fedaudit.aggregation.secure.ring import HALF
from fedaudit.aggregation.secure.shamir import BYTES
from fedaudit.aggregation.sender import Sender
from fedaudit.aggregation.terms import Noise, Terms, gaussian
from fedaudit.aggregation.update import Layout, clipped, restored, update_of
from fedaudit.errors import NotApplicable, PrivacyError, RunError
from fedaudit.privacy.adaptive_clip import moved, vote, within
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.noise_key import derived
from fedaudit.privacy.updates import FINE, Guarantee
from fedaudit.runtime.asking import Asker, RoundSoFar, drops_out
from fedaudit.runtime.method import function_path
from fedaudit.runtime.party import Cohort
from fedaudit.runtime.run_record import DROPPED_OUT, Absence, RoundRecord, SumRecord
from fedaudit.runtime.run_state import RunState
from fedaudit.runtime.task import promised
from fedaudit.setting import Setting
from fedaudit.wire.message import Down, Record, Up

IN_SUMS = "in sums of clients, without noise"
# Steps in a deviation of one client's discrete noise, at most. numpy draws Poisson numbers by logarithms of factorials,
# which cancel: at a variance of 2^30 to a millionth, at 2^52 the noise has a fifth too much variance.
FINEST = 1 << 15
TAIL = 12.0  # deviations of noise in a sum for which the ring keeps room: beyond it a sum would wrap round


@dataclass
class Summing:
    """Carries out the sums of one round."""

    run: RunState
    so_far: RoundSoFar
    ask: Asker
    secret: bytes  # of this attempt at the run: noise, keys and masks follow from it, each from a key of its own
    guarantee: Guarantee | None
    largest: int  # the most records that a client has, which is public
    before: SumRecord | None = None  # the last sum of the rounds before
    facts: list[SumFacts] = field(default_factory=list)  # of this round's secure sums
    records: list[SumRecord] = field(default_factory=list)
    entries: list[tuple[int, list[LedgerEntry]]] = field(default_factory=list)

    def mean(self, cohort: Cohort, fn: Any, message: Down | Mapping[int, Any], by: str | None) -> Mean[Any]:
        """Return the mean of the replies to a message, by the setting's way of summing."""
        path = function_path(self.run.method, fn)
        if self.guarantee is not None and self.records:
            name = self.run.setting.method
            raise NotApplicable(
                f"privacy.updates accounts for one sum in a round, and {name} takes another one, {path}. Set {name} so "
                "that it takes one, or protect its releases by their kinds."
            )
        if self.run.setting.aggregate == "secure":
            return self._secure(cohort, fn, path, message, by)
        if self.guarantee is None:
            return mean_of(self._summands(self.ask(cohort, fn, message), message), by)
        return self._noised(cohort, fn, path, message, by)

    def _summands(self, replies: Mapping[int, Any], message: Down | Mapping[int, Any]) -> dict[int, Up]:
        """Return the replies in the form in which they are added up."""
        hub, method = self.run.world.hub, self.run.world.method
        return {
            k: method.summand(
                Sender(k, self.so_far.t, hub.archs, hub.shape, hub.classes),
                reply,
                message if isinstance(message, Down) else message[k],
            )
            for k, reply in replies.items()
        }

    # --- plain sums under a guarantee for clients ---

    def _noised(
        self, cohort: Cohort, fn: Any, path: str, message: Down | Mapping[int, Any], by: str | None
    ) -> Mean[Any]:
        guarantee, number = self._guaranteed(), len(self.so_far.wire.traffic.asks)
        base = message if isinstance(message, Down) else None
        local = guarantee.policy.where == "client"
        terms = None
        if local:
            noise = Noise(guarantee.policy.clip, guarantee.sigma, secure=guarantee.policy.secure)
            terms = {k: self._terms(k, number, by, 1, base is not None, noise) for k in cohort.ids}
        invited = list(cohort.ids)
        mark = len(self.so_far.entries)
        replies = self.ask(cohort, fn, message, terms)
        if not replies:
            raise RunError(f"Round {self.so_far.t}, {path}: no client answered, so there is no sum.")
        ids = sorted(replies)
        if not local:  # otherwise the client has brought it into this form, and added noise
            replies = self._summands(replies, message)
        updates = [update_of(replies[k], base, by, counts=False) for k in ids]
        share = None
        if not local:
            both = [clipped(update, guarantee.policy.clip) for update in updates]
            updates = [update for update, _ in both]
            share = self._share_within([norm for _, norm in both], number, len(invited))
        if any(update.layout != updates[0].layout for update in updates):
            raise RunError(f"Round {self.so_far.t}, {path}: clients sent replies of several shapes, which have no sum.")
        real, whole = (np.sum([getattr(u, of) for u in updates], axis=0) for of in ("real", "whole"))
        if not local:
            real = real + self._server_noise(number, len(real))
        divisor = self._divisor(len(invited))
        value = restored(updates[0].layout, real / divisor, whole / divisor, divisor, base, self.run.world.device)
        self._bill(type(value), sent_by(fn), invited, mark)
        self.records.append(
            SumRecord(
                ask=number,
                fn=path,
                invited=len(invited),
                stayed=len(ids),
                divisor=divisor,
                within=share,
                **self._noise_facts(),
            )
        )
        self.so_far.wire.summed(value, path, number, [])  # the server knows the replies themselves
        return Mean(value, round(divisor))

    def _guaranteed(self) -> Guarantee:
        """Return the guarantee with the clip of the sum that is next, or in progress."""
        assert self.guarantee is not None
        last = self.records[-1] if self.records else self.before
        return at_the_clip(self.guarantee, last)

    def _share_within(self, norms: Sequence[float], number: int, invited: int) -> float | None:
        """Return the noised share of clients within the clip; None if the clip stays."""
        guarantee = self._guaranteed()
        if guarantee.vote_sigma is None:
            return None
        key = (derived(self.secret, "votes", self.so_far.t, number).hex(),)
        noise = gaussian(key, "vote noise", guarantee.vote_sigma, 1, secure=guarantee.policy.secure)[0]
        votes = sum(vote(norm, guarantee.policy.clip) for norm in norms)
        return within(votes + float(noise), self._divisor(invited))

    def _server_noise(self, number: int, length: int) -> np.ndarray:
        guarantee = self._guaranteed()
        key = (derived(self.secret, "server", self.so_far.t, number).hex(),)
        return gaussian(key, "sum noise", guarantee.sigma, length, secure=guarantee.policy.secure)

    def _divisor(self, invited: int) -> float:
        """Return the public number that a noised sum is divided by: who answered must not show in it."""
        expected = self.run.setting.participation * self.run.setting.clients
        return max(expected, 1.0) if self._guaranteed().poisson else float(invited)

    def _noise_facts(self, multiplier: float | None = None) -> dict[str, Any]:
        if self.guarantee is None:
            return {}
        guarantee = self._guaranteed()
        sigma = guarantee.sigma if multiplier is None else multiplier * guarantee.policy.clip
        return {"clip": guarantee.policy.clip, "sigma": sigma, "where": guarantee.policy.where}

    def _bill(
        self,
        cls: type[Up],
        sent: Sequence[type[Up]],
        invited: Sequence[int],
        mark: int,
        grid: float | None = None,
    ) -> None:
        """Enter what this sum cost the clients. Where sampling amplifies, every client pays in every round.

        The reply by itself was entered as unprotected by its client's task, after `mark`; it is in the sum alone.
        """
        guarantee = self._guaranteed()
        kinds = sorted({d.kind for d in cls.declared().values() if d is not None and d.kind not in (None, "count")})
        entry = guarantee.entry(f"{cls.__name__} (update)", kinds[0] if kinds else "weights", grid)
        fields = fields_of((cls, *sent))
        for at in range(mark, len(self.so_far.entries)):
            k, of_client = self.so_far.entries[at]
            self.so_far.entries[at] = k, [e for e in of_client if e.field not in fields or e.noise_multiplier > 0]
        who = range(guarantee.clients) if guarantee.amplified else invited
        self.entries += [(k, [entry]) for k in who]

    def _hide(self, classes: Sequence[type[Up]], mark: int) -> None:
        """Say of the releases after `mark` that they are in sums alone. That is no guarantee, and costs as before."""
        fields = fields_of(classes)
        for at in range(mark, len(self.so_far.entries)):
            k, of_client = self.so_far.entries[at]
            self.so_far.entries[at] = (
                k,
                [
                    e.model_copy(update={"condition": IN_SUMS}) if e.field in fields and e.noise_multiplier == 0 else e
                    for e in of_client
                ],
            )

    # --- secure sums ---

    def _terms(
        self, k: int, number: int, by: str | None, clients: int, based: bool, noise: Noise | None = None, **more: Any
    ) -> Terms:
        key = (derived(self.secret, "client", k, self.so_far.t, number).hex(),)
        return Terms(by, clients, self._bound(), 1.0, based, key, noise=noise, **more)

    def _bound(self) -> float:
        return self.run.setting.update_bound if self.guarantee is None else self.guarantee.policy.clip

    def _secret(self, k: int, number: int) -> bytes:
        return derived(self.secret, "masks", k, self.so_far.t, number)

    def _secure(
        self, cohort: Cohort, fn: Any, path: str, message: Down | Mapping[int, Any], by: str | None
    ) -> Mean[Any]:
        check_installed()
        number, invited = len(self.so_far.wire.traffic.asks), list(cohort.ids)
        if len(invited) < 2:
            raise RunError(
                f"Round {self.so_far.t}, {path}: a sum of {len(invited)} client is that client's value. Secure "
                "aggregation needs at least two: raise --participation."
            )
        members = {k: Member(k, self._secret(k, number)) for k in invited}
        largest = 1.0 if by is None or self.guarantee is not None else float(self.largest)
        multiplier, noise, bound = own_noise(self.guarantee, len(invited), self.run.setting)

        # Phase 0: keys.
        invitation = Invited(len(invited), self.run.setting.threshold, bound, largest)
        keys: dict[int, bytes] = {}
        for k in invited:
            self._down(k, invitation, "advertise", number)
            if self._stays(cohort, k, number, "advertise"):
                own = members[k].advertise()
                said = self._up(k, Advertised(as_bytes([own.seal + own.mask], KEYS)), "advertise", number)
                keys[k] = rows_of(said.keys)[0]
        self._enough(len(keys), len(invited), path, "advertised keys")
        public = {k: keys_of(row) for k, row in keys.items()}
        dropping = 1 - (1 - self.run.setting.dropout) ** 4  # a chance in each of four phases
        degree = graph.degree(len(keys), self.run.setting.threshold, dropping)
        near = graph.neighbours(list(keys), degree, int.from_bytes(self._secret(-1, number)[:8], "little"))

        # Phase 1: shares.
        sealed: dict[int, dict[int, bytes]] = {}
        for k in sorted(keys):
            roster = Roster(ids_of(near[k]), as_bytes([keys[v] for v in near[k]], KEYS))
            heard = self._down(k, roster, "share", number)
            if self._stays(cohort, k, number, "share"):
                known = dict(zip(heard.ids.tolist(), map(keys_of, rows_of(heard.keys)), strict=True))
                given = members[k].share(known, self.run.setting.threshold)
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
        self.so_far.layouts.clear()
        self.so_far.cut_off = 0
        messages = (
            dict.fromkeys(sorted(sealed), message)
            if isinstance(message, Down)
            else {k: message[k] for k in sorted(sealed)}
        )
        mark = len(self.so_far.entries)
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
                    roster_of_k, inbox[k], heard.stayed.tolist(), heard.dropped.tolist(), self.run.setting.threshold
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
        summed = total(words, public, near, sorted(sealed), revealed, self.run.setting.threshold)

        ring = layout.ring(len(invited), bound, largest)
        parts = ring.decoded(summed)
        weight = float(parts[2][0]) if layout.weighted else float(len(masked))
        divisor = weight if self.guarantee is None else self._divisor(len(invited))
        if divisor <= 0:
            raise RunError(
                f"Round {self.so_far.t}, {path}: the weights sum to {divisor:g}. Give weights with a positive sum."
            )
        real = parts[0]
        if self.guarantee is not None and self.guarantee.policy.where == "server":
            real = real + self._server_noise(number, len(real))
        base = message if isinstance(message, Down) else None
        value = restored(layout, real / divisor, parts[1] / divisor, divisor, base, self.run.world.device)
        self.facts.append(SumFacts(invited, near, sorted(sealed), sorted(masked), sorted(revealed), ring.length))
        if self.guarantee is None:
            self._hide((type(value), *sent_by(fn)), mark)
        else:
            self._bill(type(value), sent_by(fn), invited, mark, ring.steps()[0])
        self.records.append(
            SumRecord(
                ask=number, fn=path, invited=len(invited), stayed=len(masked), divisor=divisor, secure=True,
                advertised=len(keys), shared=len(sealed), helped=len(revealed), neighbours=degree,
                threshold=graph.needed(self.run.setting.threshold, degree + 1), bound=bound,
                error=ring.error(len(masked), divisor), cut_off=self.so_far.cut_off, **self._noise_facts(multiplier),
            )
        )  # fmt: skip
        self.so_far.wire.summed(value, path, number, sorted(masked))
        return Mean(value, len(masked) if self.guarantee is None else round(divisor))

    def _layout(self, path: str) -> Layout:
        texts = set(self.so_far.layouts.values())
        if len(texts) != 1:
            raise RunError(f"Round {self.so_far.t}, {path}: clients sent replies of several shapes, which have no sum.")
        return Layout.of_text(texts.pop())

    def _enough(self, there: int, invited: int, path: str, did: str) -> None:
        least = graph.needed(self.run.setting.threshold, invited)
        if there < least:
            raise RunError(
                f"Round {self.so_far.t}, {path}: {there} of {invited} clients {did}, the threshold is {least}. The "
                "server learns nothing of this round. Lower --dropout or --threshold, and go on with --resume."
            )

    def _stays(self, cohort: Cohort, k: int, number: int, phase: str) -> bool:
        if not drops_out(self.run.setting, k, self.so_far.t, number, phase):
            return True
        self.so_far.wire.left(k, number, phase, f"dropped out ({phase})")
        self.so_far.absent.append(Absence(client=k, ask=number, reason=f"{DROPPED_OUT} ({phase})"))
        if k in cohort.ids:
            cohort.ids.remove(k)
        return False

    def _down(self, k: int, message: Record, phase: str, number: int) -> Any:
        return self.so_far.wire.aside("down", k, message, phase, number)

    def _up(self, k: int, message: Record, phase: str, number: int) -> Any:
        return self.so_far.wire.aside("up", k, message, phase, number)


def sent_by(fn: Any) -> tuple[type[Up], ...]:
    """Return the messages that a client's function is annotated to return."""
    return promised(getattr(fn, "__func__", fn))


def fields_of(classes: Sequence[type[Up]]) -> set[str]:
    """Return all fields of these messages, as the ledger names them."""
    return {f"{cls.__name__}.{name}" for cls in classes for name in cls.declared()}


def summing_of(run: RunState, so_far: RoundSoFar, ask: Asker) -> Summing:
    """Return what carries out the sums of a round."""
    largest = max(map(run.world.count, range(run.setting.clients)))
    secret = secret_of_sums(run.secret, run.attempt)
    return Summing(run, so_far, ask, secret, run.world.guarantee, largest, last_sum(run.record.rounds))


def last_sum(rounds: Sequence[RoundRecord]) -> SumRecord | None:
    """Return the last sum of these rounds; None if there is none."""
    return next((one for row in reversed(rounds) for one in reversed(row.sums)), None)


def at_the_clip(guarantee: Guarantee, last: SumRecord | None) -> Guarantee:
    """Return the guarantee with the clip that the votes of the last sum have moved it to."""
    policy = guarantee.policy
    if policy.quantile is None or last is None or last.within is None or last.clip is None:
        return guarantee
    return guarantee.at(moved(last.clip, last.within, policy.quantile, policy.clip_rate))


def secret_of_sums(secret: bytes, attempt: int) -> bytes:
    """Return the secret of a run's sums in one attempt at the run. Nobody but the driver may have it."""
    return derived(secret, "sums", attempt)


def own_noise(guarantee: Guarantee | None, invited: int, setting: Setting) -> tuple[float | None, Noise | None, float]:
    """Return the multiplier of the noise on the sum, what each client adds, and the bound of single numbers."""
    if guarantee is None:
        return None, None, setting.update_bound
    policy, z = guarantee.policy, guarantee.multiplier
    if policy.where == "server":
        return z, Noise(policy.clip), policy.clip
    if policy.where == "client":
        bound = policy.clip + TAIL * guarantee.sigma
        return z, Noise(policy.clip, guarantee.sigma, secure=policy.secure), bound
    # Each client adds a part, so that as many as the threshold asks for add all of it; who stays beyond adds more.
    part = guarantee.sigma**2 / graph.needed(setting.threshold, invited)
    bound = policy.clip + TAIL * math.sqrt(invited * part) / invited
    step = max(bound / (HALF // invited), math.sqrt(part) / FINEST)
    if guarantee.sigma < FINE * step:
        raise PrivacyError(
            f"privacy.updates: noise of deviation {guarantee.sigma:.3g} has fewer than {FINE} steps of the ring, "
            f"{step:.3g}. Ask fewer clients in a round, or raise the noise."
        )
    return z, Noise(policy.clip, variance=part / step**2, secure=policy.secure), step * (HALF // invited)
