"""Clipping and calibration tested apart from the code that clips and calibrates.

The release and its other audits begin with the same step, which bounds the values and says how much noise they need: a
fault there is in both, and noise cannot show it. So the release is handed values that this module made, and what comes
out is held against C and against a sensitivity that are computed here.

    values      all rows 10 C long; 0.1 C long; one row alone; one coordinate of each row alone; rows of both signs
    what leaves the release path is run twice with the same noise, once with such values and once with zeros: the
                difference is what the noise was added to. Where noise cannot be drawn again, the values before it
    bounds      each row's length at most C; class means of far rows at most C long, and moved by one record by at most
                2 C / N_c; pixels within [-1, 1]; more counts than records refused
    formats     float64, float32, float16 and bfloat16, each to its rounding
    noise       sigma at least as large as epsilon, delta and the sensitivity ask for, by this module's own formula

Nothing here is random: a bound holds or it does not, and no correction for several tests is due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.special import log_ndtr
from torch import Tensor

from fedaudit.epsilon.finished_run import closed_run
from fedaudit.epsilon.release_path import Rehearsal, Tried, released_fields
from fedaudit.errors import FedauditError
from fedaudit.privacy.mechanism import prepare, protect_field
from fedaudit.privacy.mechanisms.base import Prepared
from fedaudit.privacy.policy import TRAINING
from fedaudit.privacy.sensitivity import dependence
from fedaudit.privacy.trees import leaves_of, rebuilt
from fedaudit.rng import generator
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import CERTAIN, EpsilonAudit, save_audits
from fedaudit.runtime.task import compute

TEST = "clipping"
FAR, NEAR = 10.0, 0.1  # lengths of rows, in clipping norms
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SLACK = 1e-4  # relative, of a calibration that is found by a search


@dataclass(frozen=True)
class Broken:
    """A bound that does not hold: in words, and by which factor what one record does exceeds it."""

    words: str
    factor: float


def audit_clipping(
    folder: Path | str,
    *,
    kinds: Sequence[str] | None = None,
    clients: Sequence[int] | None = None,
    confidence: float = 0.95,
) -> list[EpsilonAudit]:
    """Hold what each protected field's release does to values of any length against its policy.

    The results are kept in the run folder. Private training has this test in its repetition (`residuals`).
    """
    begun = time.perf_counter()
    run = closed_run(folder, kinds, clients, "there is no clipping to test.")
    audits: list[EpsilonAudit] = []
    with compute(run.world):
        for kind in kinds or sorted(run.world.policies):
            if kind == TRAINING:
                continue
            fields: dict[str, list[Tried]] = {}
            for release in released_fields(run, kind, clients):
                fields.setdefault(release.where, []).append(release)
            audits += [_audit_field(run, of_field, confidence) for of_field in fields.values()]
    save_audits(run.folder, run.record.transcript_digest, audits, time.perf_counter() - begun)
    return audits


def _audit_field(run: RunFolder, releases: list[Tried], confidence: float) -> EpsilonAudit:
    first, tried = releases[0], 0
    reasons: list[str] = []
    broken: list[Broken] = []
    for release in releases:
        try:
            test = FieldTest(run, release)
            for count, found in test.all():
                tried, broken = tried + count, broken + sorted(found, key=lambda b: -b.factor)[:1]
        except FedauditError as e:
            reasons.append(str(e))
    worst = max(broken, key=lambda b: b.factor, default=None)
    delta = first.policy.delta_for(min(row.n for row in run.record.ledger))
    how = f"{tried} bounds held" if worst is None else f"{worst.words}; {len(broken)} of {tried} bounds are broken"
    if reasons:
        how += f"; not tried on all clients: {reasons[0]}"
    ledger = max(run.record.ledger, key=lambda c: c.by_kind.get(first.declared.kind or "", 0.0))
    claim = math.inf if first.policy.epsilon is None else first.policy.epsilon
    bound = 0.0
    if tried:
        ready = test.ready() if not reasons else None
        if ready is not None:
            claim = first.how.claim(first.policy, ready)
            if worst is not None:
                bound = first.how.epsilon_at(ready, 1 / worst.factor, ready.delta)
    return EpsilonAudit(
        test=TEST,
        kind=first.declared.kind or "",
        threat=f"whoever sees the release: {', '.join(ledger.observers.get(first.declared.kind or '', ['server']))}",
        claim=f"{first.where}, one release",
        claim_epsilon=claim,
        ledger_epsilon=ledger.by_kind.get(first.declared.kind or "", math.inf),
        lower_bound=bound,
        p_value=1.0 if worst is None else 1e-15,
        trials=tried,
        confidence=confidence,
        delta=delta,
        verdict="not tried" if not tried else "not refuted" if worst is None else "refuted",
        method=CERTAIN,
        how=how,
    )


class FieldTest:
    """One client's release of one field, and values that are handed to it."""

    def __init__(self, run: RunFolder, release: Tried):
        self.release, self.world = release, run.world
        k, sent = release.sent.client, release.sent
        state = run.client_state(k)
        assert state is not None  # it has sent something
        self.client = Rehearsal.of(run.world, k, sent.round, sent.ask, state, run.world.members(k))
        self.template = sent[release.name]
        self.leaves = [leaf for leaf in leaves_of(self.template, release.where) if leaf.numel()]
        self.depends = dependence(release.declared)
        self.C = release.how.clip(release.policy)
        self.power = getattr(release.how, "norm", 2)  # of the norm in which the mechanism measures
        self.rng = generator(TEST, release.where, k)

    def all(self) -> Iterator[tuple[int, list[Broken]]]:
        """Yield how many bounds were tried at a time, and which of them do not hold."""
        if self.release.declared.via == "released":
            return
        if self.depends == "class":
            yield from self._means()
        elif self.depends == "histogram":
            yield from self._counts()
        elif self.C is not None or self.depends == "range":
            yield from self._rows()
        if self.release.policy.clip is not None:  # without it the sensitivity is a heuristic, and nothing is promised
            yield from self._noise()

    # --- rows -------------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[int, list[Broken]]]:
        for name, value in self._values():
            for dtype in FORMATS:
                leaves = [leaf.to(dtype) for leaf in value]
                yield 1, self._bounded(name, [leaf.double() for leaf in self._before(leaves)], dtype)
            if not self.release.policy.secure and self._adds:
                yield 1, self._bounded(f"{name}, as released", self._added(value), torch.float32, path=True)

    @property
    def _adds(self) -> bool:
        """Return whether what leaves is value plus noise, so that the same noise twice cancels."""
        return self.release.declared.dtype != "uint8" and not self.release.policy.sensitivity.startswith("random")

    def _values(self) -> Iterator[tuple[str, list[Tensor]]]:
        C, like = self.C or 1.0, [torch.zeros_like(leaf, dtype=torch.float64) for leaf in self.leaves]
        for length in (FAR, NEAR, 1.0):
            yield f"rows {length:g} C long", [self._long(leaf, length * C) for leaf in like]
        signed = [self._long(leaf, FAR * C) for leaf in like]
        for leaf in signed:
            torch.atleast_1d(leaf)[::2] *= -1
        yield "rows of both signs", signed
        alone = [leaf.clone() for leaf in like]
        alone[0].view(-1, *alone[0].shape[1:])[:1] = FAR * C
        yield "one row or number alone", alone
        single = [leaf.clone() for leaf in like]
        for leaf in single:
            flat = leaf.view(len(leaf), -1) if leaf.dim() > 1 else leaf.view(1, -1)
            flat[:, -1] = -FAR * C
        yield "one coordinate of each row", single

    def _long(self, leaf: Tensor, length: float) -> Tensor:
        rows = len(leaf) if leaf.dim() > 1 else 1
        flat = torch.randn(rows, leaf.numel() // max(1, rows), generator=self.rng, dtype=torch.float64)
        return (length * flat / self._lengths(flat)[:, None]).reshape(leaf.shape).to(leaf.device)

    def _lengths(self, flat: Tensor) -> Tensor:
        """Return the length of each row, in the mechanism's norm."""
        return flat.abs().sum(1) if self.power == 1 else flat.square().sum(1).sqrt()

    def _before(self, leaves: list[Tensor]) -> list[Tensor]:
        return self._prepared(leaves).leaves

    def _prepared(self, leaves: list[Tensor]) -> Prepared:
        release = self.release
        value = rebuilt(self.template, iter(self._with_empty(leaves)))
        return prepare(value, release.where, release.declared, release.policy, self.client.context(TEST))

    def _with_empty(self, leaves: list[Tensor]) -> list[Tensor]:
        """Return the leaves with the template's empty ones between them."""
        made = iter(leaves)
        return [next(made) if leaf.numel() else leaf for leaf in leaves_of(self.template, self.release.where)]

    def ready(self) -> Prepared:
        """Return a release that is ready for its noise: of zeros, or of means that no two classes share."""
        if self.depends == "class":
            rows = torch.zeros(len(self.client), self.leaves[0].numel(), dtype=torch.float64)
            return self._prepared_means(self._long(rows, self.C or 1.0).float())
        return self._prepared([torch.zeros_like(leaf, dtype=torch.float32) for leaf in self.leaves])

    def _added(self, value: list[Tensor]) -> list[Tensor]:
        """Return what the release path adds its noise to: two releases with one noise, the second of zeros."""
        with_value, without = (self._through(leaves) for leaves in (value, [0 * leaf for leaf in value]))
        return [a - b for a, b in zip(with_value, without, strict=True)]

    def _through(self, value: list[Tensor]) -> list[Tensor]:
        release = self.release
        made = rebuilt(self.template, iter(self._with_empty([leaf.float() for leaf in value])))
        out = protect_field(release.message, release.name, made, self.client.context(TEST, "one noise"))
        return [leaf.double() for leaf in leaves_of(out, release.where) if leaf.numel()]

    def _bounded(self, name: str, leaves: list[Tensor], dtype: torch.dtype, path: bool = False) -> list[Broken]:
        """Return the rows that are longer than they may be."""
        found = []
        for leaf in leaves:
            if not leaf.numel():
                continue
            if self.depends == "range":
                most, bound = float(leaf.abs().max()), 1.0
            else:
                flat = leaf.reshape(len(leaf) if leaf.dim() > 1 else 1, -1)
                most, bound = float(self._lengths(flat).max()), self.C or 1.0
            if most > bound * (1 + self._rounding(leaf, dtype, path)):
                words = f"{name} ({str(dtype).removeprefix('torch.')}) leave {most / bound:.4g} times as long as C"
                found.append(Broken(words, most / bound))
        return found

    def _rounding(self, leaf: Tensor, dtype: torch.dtype, path: bool) -> float:
        """Return the share of C that rounding may add: of a row itself, and of the noise that was taken off again."""
        eps, d = torch.finfo(dtype).eps, leaf.numel() / max(1, len(leaf) if leaf.dim() > 1 else 1)
        share = 4 * eps * (1 if self.power == 2 else math.sqrt(d))
        if path:
            ready = self.ready()
            noise = max(ready.sigmas, default=0.0)
            spread = math.sqrt(d) if self.power == 2 else d
            share += 16 * eps * noise * spread / (self.C or 1.0)
            if ready.grid:
                share += ready.grid * spread / (self.C or 1.0)
        return share

    # --- means, counts ----------------------------------------------------------------------------------------

    def _prepared_means(self, rows: Tensor) -> Prepared:
        release = self.release
        means = self.client.class_means(rows.to(self.world.device), release.declared.kind or "")
        value = rebuilt(self.template, iter(means.values())) if len(means) == len(self.leaves) else means
        return prepare(value, release.where, release.declared, release.policy, self.client.context(TEST))

    def _means(self) -> Iterator[tuple[int, list[Broken]]]:
        if self.C is None:
            return
        n, d, y = len(self.client), self.leaves[0].numel(), self.client.y
        counts = {int(c): int((y == c).sum()) for c in y.unique()}
        for length in (FAR, NEAR):
            rows = self._long(torch.zeros(n, d, dtype=torch.float64), length * self.C).float()
            along = torch.ones(n, d) * (length * self.C / self._lengths(torch.ones(1, d)))
            for name, made in (("random rows", rows), ("rows of one direction", along)):
                yield 1, self._bounded(f"class means of {name} {length:g} C long", self._plain(made), torch.float32)
            turned = along.clone()
            turned[0] *= -FAR
            c = int(y[0])
            before, after = (self._by_class(r)[c] for r in (along, turned))
            moved = float(self._lengths((after - before).reshape(1, -1).double())[0])
            most = 2 * self.C / counts[c]
            if moved > most * (1 + 1e-4):
                words = f"one record moves a class mean by {moved / most:.4g} times 2 C / N_c"
                yield 1, [Broken(words, moved / most)]
            else:
                yield 1, []

    def _by_class(self, rows: Tensor) -> dict[int, Tensor]:
        return self.client.class_means(rows.to(self.world.device), self.release.declared.kind or "")

    def _plain(self, rows: Tensor) -> list[Tensor]:
        return [mean.reshape(1, -1).double() for mean in self._by_class(rows).values()]

    def _counts(self) -> Iterator[tuple[int, list[Broken]]]:
        """More than the records there are, counts that are none, and negative ones must be refused."""
        n, label = self.client._context.n, self.release.declared.kind == "label_counts"
        wrong = {"half a record": 0.5, "less than none": -1.0} | ({"one more than there are": n + 1.0} if label else {})
        for name, count in wrong.items():
            leaves = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in self.leaves]
            leaves[0].view(-1)[0] = count
            try:
                self._prepared(leaves)
            except FedauditError:
                yield 1, []
            else:
                yield 1, [Broken(f"counts of {name} are released, and the noise is scaled for single records", 2.0)]

    # --- noise ------------------------------------------------------------------------------------------------

    def _noise(self) -> Iterator[tuple[int, list[Broken]]]:
        """Hold sigma against what the policy's epsilon and this module's sensitivity ask for."""
        policy, how = self.release.policy, self.release.how
        ready, n = self.ready(), self.client._context.n
        delta = 1 / n if policy.delta == "1/n" else float(policy.delta)
        for sigma, needed in zip(ready.sigmas, self._sensitivities(ready), strict=True):
            multiplier = sigma / ready.deviation / needed
            if policy.noise_multiplier is not None:
                lacking = policy.noise_multiplier / max(multiplier, 1e-300)
            elif how.normal:
                releases = 1 if policy.calibration != "total" else policy.releases or self._planned()
                lacking = least_multiplier(policy.epsilon or 0.0, delta, releases) / max(multiplier, 1e-300)
            elif policy.calibration == "total":
                continue
            else:
                spent = how.epsilon(multiplier, delta)
                lacking = 1.0 if spent <= (policy.epsilon or 0.0) * (1 + SLACK) else 1 + SLACK * 2
            if lacking > 1 + SLACK:
                words = f"sigma = {sigma:.4g} is {1 / lacking:.4g} of what epsilon, delta and the sensitivity ask for"
                yield 1, [Broken(words, lacking)]
            else:
                yield 1, []

    def _planned(self) -> int:
        return self.client._context.releases(self.release.declared.kind or "") or 1

    def _sensitivities(self, ready: Prepared) -> list[float]:
        """Return how far one record moves each leaf at most, by the table of docs/design/privacy.md."""
        policy, most = self.release.policy, self.client._context.most
        swing = 2.0 if policy.relation == "replace-one" else 1.0
        C, leaves = self.C or 1.0, ready.leaves

        def together(k: float) -> float:
            return math.sqrt(k) if self.power == 2 else k

        if self.depends == "record":
            return [swing * C * together(most * len(leaves))] * len(leaves)
        if self.depends == "all":
            rows = sum(len(leaf) if leaf.dim() > 1 else 1 for leaf in leaves)
            return [2 * C * together(rows)] * len(leaves)
        if self.depends == "range":
            return [2 * together(sum(leaf.numel() for leaf in leaves))] * len(leaves)
        if self.depends == "class":
            y = self.client.y
            counts = [int((y == c).sum()) for c in y.unique()]
            return [together(2) * swing * C / max(n - 1, 1) for n in counts]
        if self.release.declared.kind == "label_counts":
            return [most * (together(2) if policy.relation == "replace-one" else 1.0)] * len(leaves)
        return [most * together(max(1, sum(leaf.numel() for leaf in leaves)))] * len(leaves)


def least_multiplier(epsilon: float, delta: float, releases: int = 1) -> float:
    """Return the least sigma / sensitivity at which so many Gaussian releases meet (epsilon, delta).

    Two Gaussians mu apart have delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) (Balle and Wang
    2018, Theorem 8), and releases compose as mu = sqrt(releases) / multiplier.
    """

    def spent(mu: float) -> float:
        first = math.exp(float(log_ndtr(mu / 2 - epsilon / mu)))
        return first - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))

    low, high = 1e-9, 1e4
    while high / low > 1 + 1e-10:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) <= delta else (low, middle)
    return math.sqrt(releases) / low
