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

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from fedaudit.errors import PrivacyError, SettingError, did_you_mean, unknown
from fedaudit.privacy.calibration import check_delta, check_epsilon
from fedaudit.privacy.update_policy import UPDATES, parse_updates
from fedaudit.setting import Frozen, parse_value, validated

TRAINING = "training"
Mechanism = Literal["gaussian", "pure-noise", "dp-sgd"]
Calibration = Literal["analytic", "classical", "total"]
Relation = Literal["replace-one", "zero-out"]
Assume = Literal["nothing", "logits-of-records"]  # the second: logits were computed on the client's own records

# Kinds to which output noise cannot be added, and what to do instead.
REFUSED = {
    "weights": "noise on finished weights destroys them long before it protects a record. Use DP-SGD: training:eps=...",
    "layers": "noise on finished layers destroys them long before it protects a record. Use DP-SGD: training:eps=...",
    "labels": "labels are class numbers, which take no Gaussian noise. Their release stays unprotected in the ledger.",
    "count": "a number of records takes no Gaussian noise; under replace-one all neighbours have the same. Remove it.",
}


class Policy(Frozen):
    """The protection of one kind of release."""

    mechanism: Mechanism = "gaussian"
    epsilon: float | None = None
    delta: float | str = "1/n"  # n: the client's number of records
    calibration: Calibration = "analytic"
    sensitivity: str = "clip:1.0"  # clip:C, random-pixel or random-pixel:SAMPLES
    assume: Assume = "nothing"  # an assumption of a published way of counting; it gives no guarantee
    relation: Relation = "replace-one"
    noise_multiplier: float | None = None  # instead of epsilon
    releases: int | None = None  # over the run, for calibration = "total"; for DP-SGD the trainings. Needed if the
    # harness cannot count them beforehand
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
        defaults = {"mechanism": "dp-sgd"} if name == TRAINING else {}
        try:
            policy = validated(Policy, {**defaults, **values}, f"option of privacy.{name}")
        except SettingError as e:
            raise PrivacyError(str(e)) from None
        _check(name, policy)
        policies[name] = policy
    return policies


def _check(name: str, policy: Policy) -> None:
    where = f"privacy.{name}"
    if (name == TRAINING) != (policy.mechanism == "dp-sgd"):
        raise PrivacyError(f"{where}: mechanism 'dp-sgd' is for privacy.training only, which takes nothing else.")
    if name in REFUSED:
        raise PrivacyError(f"{where}: {REFUSED[name]}")
    if policy.delta != "1/n":
        try:
            check_delta(float(policy.delta))
        except ValueError:
            raise PrivacyError(
                f"{where}: delta = {policy.delta!r}; write a number between 0 and 1, or '1/n'."
            ) from None
    if policy.mechanism == "pure-noise":
        return
    if (policy.epsilon is None) == (policy.noise_multiplier is None):
        raise PrivacyError(f"{where}: give either epsilon or noise_multiplier.")
    if policy.epsilon is not None:
        check_epsilon(policy.epsilon)
        if policy.calibration == "classical" and policy.epsilon > 1:
            raise PrivacyError(
                f"{where}: the classical calibration (DFFKE, Eq. 15) is proven for epsilon <= 1 only, not "
                f"{policy.epsilon:g}. Use calibration = 'analytic'."
            )
    elif not 0 < (policy.noise_multiplier or 0) < math.inf:
        raise PrivacyError(f"{where}: noise_multiplier = {policy.noise_multiplier}; give a finite number above 0.")
    kind, _, number = policy.sensitivity.partition(":")
    if kind not in ("clip", "random-pixel"):
        raise PrivacyError(unknown(f"sensitivity of {where}", kind, ["clip", "random-pixel"]))
    try:
        value = float(number or 1)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise PrivacyError(f"{where}: sensitivity = {policy.sensitivity!r}; give a number above 0 behind the colon.")
    if policy.releases is not None and policy.releases < 1:
        raise PrivacyError(f"{where}: releases = {policy.releases}; give at least 1.")
    if kind == "random-pixel" and not value.is_integer():
        raise PrivacyError(f"{where}: sensitivity = {policy.sensitivity!r}; give a whole number of edits.")
    if policy.assume == "logits-of-records" and (name != "logits" or kind != "random-pixel"):
        raise PrivacyError(
            f"{where}: assume = 'logits-of-records' is only for the random-pixel sensitivity of logits, which it takes "
            "from the model's logits on the client's records. Remove it here."
        )
    if policy.mechanism == "dp-sgd":
        if kind == "random-pixel":
            raise PrivacyError(f"{where}: DP-SGD clips gradients; random-pixel is about images. Use clip=C.")
        if policy.relation != "replace-one" or policy.calibration != "analytic":
            raise PrivacyError(
                f"{where}: DP-SGD is accounted under add-or-remove, for all steps of the run together; it takes no "
                "relation and no calibration. Remove them."
            )


_SHORT = {"eps": "epsilon", "noise": "noise_multiplier"}
_WORDS = {
    **dict.fromkeys(get_args(Calibration), "calibration"),
    **dict.fromkeys(get_args(Relation), "relation"),
    **dict.fromkeys(get_args(Mechanism), "mechanism"),
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
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and key in _WORDS:
            values[_WORDS[key]] = key
        elif not equals and key == "secure":
            values["secure"] = True
        elif key == "clip" and equals:
            values["sensitivity"] = f"clip:{value}"
        elif key == "random-pixel" and equals:
            values["sensitivity"] = f"random-pixel:{value}"
        elif equals and (name := _SHORT.get(key, key)) in Policy.model_fields:
            values[name] = parse_value(value)
        else:
            known = [*Policy.model_fields, *_SHORT, *_WORDS, "clip", "secure"]
            raise PrivacyError(f"--privacy {text!r}: unknown option {part!r}.{did_you_mean(key, known)}")
    return kind, values
