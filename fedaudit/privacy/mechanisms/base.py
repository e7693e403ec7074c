"""The interface of a mechanism, and the mechanisms by name.

A mechanism owns all that depends on how a release is protected: the values and options that it takes, its bound on one
record's effect, its noise, its event for the accountants, the test of its noise, and the words for people. Nobody else
asks for its name. A new mechanism is a new file in this folder: each file here is read the first time that a name is
looked up, and each class with a `name` is one mechanism.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import scipy
import torch
from torch import Generator, Tensor

from fedaudit.errors import PrivacyError, unknown
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.calibration import check_epsilon
from fedaudit.privacy.score_sums import ScaleTest
from fedaudit.stats import Floats

if TYPE_CHECKING:
    from fedaudit.privacy.ledger import LedgerEntry
    from fedaudit.privacy.policy import Policy
    from fedaudit.privacy.sensitivity import Bounding, Context
    from fedaudit.wire.message import Declared
    from fedaudit.wire.release import Protection

Words = tuple[str, str]  # a sentence for a report, and one of "open", "noise", "free" for its colour


@dataclass(frozen=True)
class Prepared:
    """A release before its noise: the values that noise is added to, and the amount of noise."""

    leaves: list[Tensor]  # bounded
    sensitivities: list[float]  # of each leaf, in the mechanism's norm
    multiplier: float  # scale of the noise / sensitivity
    delta: float
    bounded: Bounding
    deviation: float = 1.0  # standard deviation of noise of scale 1
    classes: int | None = None  # of labels
    grid: float | None = None  # the step between values that noise and release may have
    moves: int | None = None  # counts that one record may change, by 1 each

    @property
    def scales(self) -> list[float]:
        return [self.multiplier * s for s in self.sensitivities]

    @property
    def sigmas(self) -> list[float]:
        """Return the standard deviation of the noise on each leaf."""
        return [scale * self.deviation for scale in self.scales]


class Sizes(Protocol):
    """The part of one tensor's noise that tells its scale."""

    def test(self, parts: Sequence[Any]) -> ScaleTest:
        """Return the test of the scale of several tensors' noise."""


@dataclass(frozen=True)
class Noise:
    """The noise of one tensor, as the tests of residuals take it."""

    z: Floats  # (rows, columns): independent standard normal numbers, if the noise is as promised
    sizes: Sizes | None = None  # None: the squares of z tell the scale
    free: bool = True  # each value can be any number; False: the noise takes certain values only


class Mechanism:
    """One way to protect a release. The methods that a mechanism has no use for raise `PrivacyError`."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""  # one line for `fedaudit list mechanisms`
    chosen: ClassVar[bool] = True  # a policy may name it
    trains: ClassVar[bool] = False  # it protects local training, and no field
    persons: ClassVar[bool] = False  # its bounds are known for all records of a person together
    normal: ClassVar[bool] = False  # its noise is Gaussian, of which sharper tests are known
    rounds: ClassVar[bool] = False  # its noise can be looked at in numbers that travelled rounded
    relations: ClassVar[tuple[str, ...]] = ()  # the neighbours under which an entry of it holds beside its own

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            _known[cls.name] = cls()

    # --- a policy's options ---

    def refuses(self, kind: str) -> str | None:
        """Return why this mechanism cannot protect a kind of release, or None if it can."""
        return None

    def check(self, where: str, kind: str, policy: Policy) -> None:
        """Raise if the options of a policy do not fit: by default, unless it says how much noise, and the clipping."""
        if (policy.epsilon is None) == (policy.noise_multiplier is None):
            raise PrivacyError(f"{where}: give either epsilon or noise_multiplier.")
        if policy.epsilon is not None:
            check_epsilon(policy.epsilon)
        elif not 0 < (policy.noise_multiplier or 0) < math.inf:
            raise PrivacyError(f"{where}: noise_multiplier = {policy.noise_multiplier}; give a finite number above 0.")
        if policy.releases is not None and policy.releases < 1:
            raise PrivacyError(f"{where}: releases = {policy.releases}; give at least 1.")

    def plans_ahead(self, policy: Policy) -> bool:
        """Return whether the noise was calibrated so that all rounds of a run together meet an epsilon."""
        return policy.calibration == "total"

    def label(self, policy: Policy) -> str:
        """Return a policy in a few words, for the labels of reports."""
        amount = f"ε={policy.epsilon:g}" if policy.epsilon is not None else f"noise {policy.noise_multiplier:g}x"
        sensitivity = "random-pixel" if policy.clip is None else f"clip {policy.clip:g}"
        total = ", whole run" if policy.calibration == "total" else ""
        return f"{amount}{total}, {sensitivity}"

    # --- a release ---

    def clip(self, policy: Policy) -> float | None:
        """Return the norm to which records are clipped, or None if they are not."""
        return None

    def clipped(self, rows: Tensor, C: float) -> Tensor:
        """Return rows scaled down to norm C, in the norm of this mechanism."""
        raise self._unfit("clips no rows")

    def prepare(self, value: Any, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
        """Check and bound a release and return it ready for the noise. The release and its audit both begin here."""
        raise self._unfit("protects no field")

    def noised(self, ready: Prepared, where: str, declared: Declared, policy: Policy, context: Context) -> list[Tensor]:
        """Return the leaves of a release with noise. The same release always gets the same noise."""
        raise self._unfit("protects no field")

    def entry(self, where: str, kind: str, policy: Policy, ready: Prepared) -> LedgerEntry:
        """Return the entry of one release for the ledger."""
        raise self._unfit("protects no field")

    def imitated(self, rows: Tensor, protection: Protection, rng: Generator) -> Tensor:
        """Return what would have been released of these rows, by the mechanism's public parameters."""
        raise self._unfit("protects no rows")

    def label_counts(self, counts: Tensor, protection: Protection) -> Tensor:
        """Return an estimate of label counts from the counts of released labels, by the public parameters."""
        return counts

    def smallest_class(self, protection: Protection) -> float | None:
        """Return N_c - 1 of the smallest class, which the noise of class means tells; None if it does not."""
        return None

    def follows(
        self, entry: LedgerEntry, policy: Policy, n: int, classes: int, releases: int | None
    ) -> dict[str, float | str | None]:
        """Return the values of an entry that its policy decides, by name, so that others can check the entry.

        The client has n records, and `releases` share the policy's epsilon; None: their number is not known.
        """
        return {}

    # --- its cost ---

    def event(self, entry: LedgerEntry) -> Event:
        """Return the cost of all releases of an entry, for the accountants."""
        return Event(entry.noise_multiplier, entry.sample_rate, entry.steps * len(entry.rounds))

    def epsilon(self, multiplier: float, delta: float) -> float:
        """Return the epsilon of one release with this noise; infinite without noise."""
        raise self._unfit("has no epsilon of its own")

    def claim(self, policy: Policy, ready: Prepared) -> float:
        """Return the epsilon that a policy promises for one release."""
        if policy.epsilon is not None and policy.calibration != "total":
            return policy.epsilon
        return self.epsilon_at(ready, 1.0, ready.delta)

    # --- the test of its noise ---

    path: ClassVar[str | None] = None  # why neighbours' releases are not tried one against the other

    def noise(self, sent: Floats, ready: Prepared, leaf: int, seed: int) -> Noise:
        """Return the noise of one tensor of a release. Random choices follow from the seed."""
        raise self._unfit("adds no noise to fields")

    def centre(self, clean: Floats) -> Floats:
        """Return what is left of a release if its noise is 0."""
        return clean

    def direction(self, like: Tensor) -> Tensor:
        """Return a row of norm 1, in the norm of this mechanism, along which two rows are told apart best."""
        return torch.ones_like(like) / math.sqrt(max(like.numel(), 1))

    def quantiles(self, shares: Floats) -> Floats:
        """Return quantiles of noise with standard deviation 1."""
        return scipy.special.ndtri(shares)

    def epsilon_at(self, ready: Prepared, scale: float, delta: float) -> float:
        """Return the epsilon of one release with noise of so many times the promised."""
        return self.epsilon(ready.multiplier * scale, delta)

    # --- words ---

    def about(self) -> str:
        """Return the text at the head of its file, as one paragraph."""
        return " ".join((inspect.getdoc(inspect.getmodule(type(self))) or "").split())

    def words(self, entries: Sequence[LedgerEntry]) -> Words:
        """Return how a field was protected, for a report. The entries are all of one field."""
        raise self._unfit("has no words")

    def shown(self, entry: LedgerEntry) -> str:
        """Return how a field was protected, for `fedaudit show`."""
        text = entry.mechanism
        if entry.sigma is not None:
            text += f", sigma {entry.sigma:.4g}, sensitivity {entry.sensitivity:.4g}, {entry.relation}"
        return text

    def _unfit(self, why: str) -> PrivacyError:
        return PrivacyError(f"The mechanism {self.name!r} {why}. Choose another for this release.")


_known: dict[str, Mechanism] = {}


class Named(Protocol):
    """A thing that names its mechanism: a policy, an entry of the ledger, a protection in the transcript."""

    @property
    def mechanism(self) -> str: ...


@cache
def _read_files() -> None:
    for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def mechanisms() -> dict[str, Mechanism]:
    """Return all mechanisms by name, also those that no policy names."""
    _read_files()
    return dict(sorted(_known.items()))


def choices(trains: bool | None = None) -> list[str]:
    """Return the names that a policy may give; for local training, for fields, or (None) for both."""
    return [name for name, how in mechanisms().items() if how.chosen and trains in (None, how.trains)]


def mechanism_named(name: str) -> Mechanism:
    """Return a mechanism by its name. What follows a comma is a remark on it."""
    key = name.partition(",")[0]
    if key not in _known:
        _read_files()
    if key not in _known:
        raise PrivacyError(unknown("mechanism", name, choices()))
    return _known[key]


def mechanism_of(named: Named) -> Mechanism:
    """Return the mechanism of a policy, of an entry of the ledger, or of a protection."""
    return mechanism_named(named.mechanism)


def span(values: Sequence[float]) -> str:
    """Return one number as text, or the smallest and the largest."""
    if not values:
        return "–"
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def times(entries: Sequence[LedgerEntry]) -> str:
    """Return how often a field was released, in words."""
    rounds = sum(len(e.rounds) for e in entries)
    return f"{rounds} release" + ("s" if rounds != 1 else "")


def reason(entry: LedgerEntry) -> str:
    """Return the condition of an entry as the end of a sentence."""
    return f": {entry.condition}" if entry.condition else ""
