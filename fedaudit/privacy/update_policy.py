"""The policy on clients' updates, as settings and command lines write it. `updates` beside it says what it comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from fedaudit.errors import PrivacyError, SettingError, did_you_mean
from fedaudit.privacy.calibration import check_delta, check_epsilon
from fedaudit.setting import Frozen, parse_value, validated

UPDATES = "updates"
Where = Literal["server", "shares", "client"]
ADDED = {"server": "by the server", "shares": "in shares", "client": "by each client"}


class UpdatePolicy(Frozen):
    """The protection of clients' updates."""

    unit: Literal["client"] = "client"
    where: Where = "server"
    clip: float = 1.0
    quantile: float | None = None  # of the clients' norms: the clip follows it, from `clip` on; None: the clip stays
    clip_rate: float = 0.2  # how fast it follows (eta_C)
    epsilon: float | None = None
    noise_multiplier: float | None = None  # instead of epsilon: sigma / clip, of the noise on the sum
    delta: float | str = "1/K"  # K: the number of clients
    secure: bool = False  # draw the noise from the operating system's entropy; a replay then draws anew

    def text(self) -> str:
        """Return the policy in a few words, for the labels of reports."""
        amount = f"ε={self.epsilon:g}" if self.epsilon is not None else f"noise {self.noise_multiplier:g}x"
        clip = f"clip {self.clip:g}" if self.quantile is None else f"clip at the {self.quantile:g} quantile"
        return f"{amount} per client, {clip}, noise {ADDED[self.where]}"

    def delta_for(self, clients: int) -> float:
        return check_delta(1 / max(clients, 2) if self.delta == "1/K" else float(self.delta))


def read_updates(privacy: Mapping[str, Any]) -> UpdatePolicy | None:
    """Return the policy on updates that a setting has; None if it has none. Raise if it is wrong."""
    values = privacy.get(UPDATES)
    if values is None:
        return None
    where = f"privacy.{UPDATES}"
    if not isinstance(values, Mapping):
        raise PrivacyError(f"{where} = {values!r}: write a table, such as {{epsilon = 8, clip = 1, unit = 'client'}}.")
    try:
        policy: UpdatePolicy = validated(UpdatePolicy, dict(values), f"option of {where}")
    except SettingError as e:
        raise PrivacyError(str(e)) from None
    if (policy.epsilon is None) == (policy.noise_multiplier is None):
        raise PrivacyError(f"{where}: give either epsilon or noise_multiplier.")
    if policy.epsilon is not None:
        check_epsilon(policy.epsilon)
    elif not 0 < (policy.noise_multiplier or 0) < math.inf:
        raise PrivacyError(f"{where}: noise_multiplier = {policy.noise_multiplier}; give a finite number above 0.")
    if not 0 < policy.clip < math.inf:
        raise PrivacyError(f"{where}: clip = {policy.clip:g}; give a number above 0.")
    if policy.quantile is not None:
        _check_quantile(policy, where)
    if policy.delta != "1/K":
        try:
            check_delta(float(policy.delta))
        except ValueError:
            raise PrivacyError(
                f"{where}: delta = {policy.delta!r}; write a number between 0 and 1, or '1/K'."
            ) from None
    return policy


def _check_quantile(policy: UpdatePolicy, where: str) -> None:
    if not 0 < (policy.quantile or 0) < 1:
        raise PrivacyError(f"{where}: quantile = {policy.quantile:g}; give a number between 0 and 1, such as 0.5.")
    if not 0 < policy.clip_rate < math.inf:
        raise PrivacyError(f"{where}: clip_rate = {policy.clip_rate:g}; give a number above 0, such as 0.2.")
    if policy.where != "server":
        raise PrivacyError(
            f"{where}: a clip that follows a quantile needs the norms of single updates, which only where = 'server' "
            "has. Leave `quantile` out, or let the server add the noise."
        )


_SHORT = {"eps": "epsilon", "noise": "noise_multiplier"}


def parse_updates(text: str, rest: str) -> dict[str, Any]:
    """Return the options of `updates:eps=8,clip=1,unit=client,where=server` as a table."""
    values: dict[str, Any] = {}
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        name = _SHORT.get(key, key)
        if not equals and key == "secure":
            values["secure"] = True
        elif equals and name in UpdatePolicy.model_fields:
            values[name] = parse_value(value)
        else:
            known = [*UpdatePolicy.model_fields, *_SHORT]
            raise PrivacyError(f"--privacy {text!r}: unknown option {part!r}.{did_you_mean(key, known)}")
    return values
