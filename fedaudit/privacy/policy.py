"""Privacy policies of a setting: one for each kind of release, and one for local training.

    [privacy.embeddings]
    mechanism = "gaussian"
    epsilon = 1.0
    delta = "1/n"
    calibration = "analytic"
    sensitivity = "clip:1.0"

On a command line: `--privacy embeddings:eps=1,clip=1`. The name `training` stands for DP-SGD inside `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from fedaudit.errors import PrivacyError, SettingError, did_you_mean, unknown
from fedaudit.privacy.calibration import check_delta
from fedaudit.privacy.mechanisms.base import choices, mechanism_named, mechanism_of
from fedaudit.privacy.update_policy import UPDATES, parse_updates
from fedaudit.setting import Frozen, parse_value, validated

TRAINING = "training"
Calibration = Literal["analytic", "classical", "total"]
Relation = Literal["replace-one", "zero-out"]
Unit = Literal["record", "person"]
Assume = Literal["nothing", "logits-of-records"]  # the second: logits were computed on the client's own records


class Policy(Frozen):
    """The protection of one kind of release."""

    mechanism: str = "gaussian"  # a name from `fedaudit list mechanisms`
    epsilon: float | None = None
    delta: float | str = "1/n"  # n: the client's number of records
    calibration: Calibration = "analytic"
    sensitivity: str = "clip:1.0"  # clip:C, random-pixel or random-pixel:SAMPLES
    assume: Assume = "nothing"  # an assumption of a published way of counting; it gives no guarantee
    relation: Relation = "replace-one"
    noise_multiplier: float | None = None  # instead of epsilon
    releases: int | None = None  # over the run, for calibration = "total"; for DP-SGD the trainings. Needed if the
    # harness cannot count them beforehand
    unit: Unit = "record"  # whom it protects; "person": all of a person's records together, by the data's column
    secure: bool = False  # draw the noise from the operating system's entropy; a replay then draws anew

    @property
    def clip(self) -> float | None:
        name, _, text = self.sensitivity.partition(":")
        return float(text or 1.0) if name == "clip" else None

    @property
    def samples(self) -> int:
        """Return the number of one-pixel edits that the random-pixel heuristic tries."""
        return int(self.sensitivity.partition(":")[2] or 256)

    def delta_for(self, n: int) -> float:
        return check_delta(1 / n if self.delta == "1/n" else float(self.delta))


def read_policies(privacy: Mapping[str, Any], kinds: frozenset[str]) -> dict[str, Policy]:
    """Return the policies by kind. Raise, before anything runs, if one is wrong."""
    policies = {}
    for name, values in privacy.items():
        if name == UPDATES:  # for clients, not for records: see fedaudit.privacy.update_policy
            continue
        if name not in kinds and name != TRAINING:
            raise PrivacyError(unknown("kind of release", name, [*kinds, TRAINING, UPDATES]))
        if not isinstance(values, Mapping):
            raise PrivacyError(
                f"privacy.{name} = {values!r}: write a table, such as {{epsilon = 1, sensitivity = 'clip:1'}}."
            )
        policy = policy_of(name, values)
        _check(name, policy)
        policies[name] = policy
    if len(units := sorted({policy.unit for policy in policies.values()})) > 1:
        by = {unit: [name for name, policy in policies.items() if policy.unit == unit] for unit in units}
        raise PrivacyError(
            f"privacy: {', '.join(by['person'])} protects persons, and {', '.join(by['record'])} single records, which "
            "do not add up to one guarantee. Say unit = 'person' in all policies, or in none."
        )
    return policies


def protects_persons(policies: Mapping[str, Policy]) -> bool:
    """Return whether the guarantee is for all records of a person together."""
    return any(policy.unit == "person" for policy in policies.values())


def policy_of(name: str, values: Mapping[str, Any]) -> Policy:
    """Return the policy for a kind of release, or for training, from its options. They are read, but not checked."""
    defaults = {"mechanism": choices(trains=True)[0]} if name == TRAINING else {}
    try:
        policy: Policy = validated(Policy, {**defaults, **values}, f"option of privacy.{name}")
    except SettingError as e:
        raise PrivacyError(str(e)) from None
    return policy


def _check(name: str, policy: Policy) -> None:
    where, how = f"privacy.{name}", mechanism_of(policy)
    if not how.chosen:
        raise PrivacyError(unknown("mechanism", policy.mechanism, choices()))
    if (name == TRAINING) != how.trains:
        only = "is for privacy.training only" if how.trains else "is for fields only"
        names = ", ".join(choices(trains=name == TRAINING))
        raise PrivacyError(f"{where}: mechanism {policy.mechanism!r} {only}. Choose from {names}.")
    if (reason := how.refuses(name)) is not None:
        raise PrivacyError(f"{where}: {reason}")
    if policy.delta != "1/n":
        try:
            check_delta(float(policy.delta))
        except ValueError:
            raise PrivacyError(
                f"{where}: delta = {policy.delta!r}; write a number between 0 and 1, or '1/n'."
            ) from None
    how.check(where, name, policy)
    if policy.unit == "person" and (not how.persons or policy.clip is None):
        able = [name for name in choices(trains=how.trains) if mechanism_named(name).persons]
        raise PrivacyError(
            f"{where}: {policy.mechanism} with sensitivity {policy.sensitivity} is not bounded for several records of "
            f"a person. Choose from {', '.join(able)} with clip=C, or say unit = 'record'."
        )


_SHORT = {"eps": "epsilon", "noise": "noise_multiplier"}


def _words() -> dict[str, str]:
    """Return the words that need no "=", and the option that each of them sets."""
    return {
        **dict.fromkeys(get_args(Calibration), "calibration"),
        **dict.fromkeys(get_args(Relation), "relation"),
        **dict.fromkeys(choices(), "mechanism"),
        "random-pixel": "sensitivity",
    }


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return `embeddings:eps=1,clip=1` as ("embeddings", {...}).

    A word without "=" names a calibration, a relation or a mechanism.
    """
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise PrivacyError(f"--privacy {text!r}: write KIND:OPTIONS, for example embeddings:eps=1,clip=1.")
    if kind == UPDATES:
        return kind, parse_updates(text, rest)
    values: dict[str, Any] = {}
    words = _words()
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and key in words:
            values[words[key]] = key
        elif not equals and key == "secure":
            values["secure"] = True
        elif key == "clip" and equals:
            values["sensitivity"] = f"clip:{value}"
        elif key == "random-pixel" and equals:
            values["sensitivity"] = f"random-pixel:{value}"
        elif equals and (name := _SHORT.get(key, key)) in Policy.model_fields:
            values[name] = parse_value(value)
        else:
            known = [*Policy.model_fields, *_SHORT, *words, "clip", "secure"]
            raise PrivacyError(f"--privacy {text!r}: unknown option {part!r}.{did_you_mean(key, known)}")
    return kind, values
