"""What an app's user says of the records in its messages: which kind of release each is.

    kinds = { "arrays" = "weights", "metrics.num-examples" = "count" }

A key is `RECORD`, for a whole record, or `RECORD.KEY`, for one entry of a metric or config record; with the message
type before it (`train.arrays`) it is about replies of that type alone, and goes first. What no key names has the kind
`unmapped`: no policy can be about it, and every release of it costs infinity.

    "arrays" = { kind = "weights", update = true }    # the policy on `gradients` protects reply - request
    "features" = { kind = "embeddings", unit = "record" }    # one row for each of the node's records
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedaudit.errors import PrivacyError, SettingError, unknown
from fedaudit.privacy.policy import TRAINING, Policy, read_policies
from fedaudit.setting import Frozen, validated
from fedaudit.wire.message import KINDS, Declared, Unit

UNMAPPED = "unmapped"
UPDATE = "gradients"  # the kind whose policy protects an update: a gradient, up to a factor


class Named(Frozen):
    """The kind of one record, or of one entry of it."""

    kind: str
    unit: Unit = "client"
    update: bool = False  # what is protected is its difference from the record of that name in the request

    def declared(self) -> Declared:
        kind = UPDATE if self.update else self.kind
        return Declared("private", kind, via="data", unit=self.unit, finite=False)


class Names:
    """All of them."""

    def __init__(self, kinds: Mapping[str, Any] | None = None):
        self.said: dict[str, Named] = {}
        for key, value in (kinds or {}).items():
            named = validated(Named, {"kind": value} if isinstance(value, str) else dict(value), f"kind of {key}")
            if named.kind not in KINDS:
                raise SettingError(f"{key}: {unknown('kind of release', named.kind, KINDS)}")
            if named.update and (named.kind != "weights" or named.unit != "client"):
                raise SettingError(f"{key}: update = true is for the weights of a whole client; leave it out here.")
            self.said[key] = named

    def of(self, message_type: str, record: str, key: str | None = None) -> Named | None:
        """What is said of a record (or of one entry of it) in replies of a type; None: nothing."""
        place = record if key is None else f"{record}.{key}"
        category = message_type.partition(".")[0]
        return next((self.said[k] for k in (f"{message_type}.{place}", f"{category}.{place}", place) if k in self.said),
                    None)  # fmt: skip

    def entries(self, message_type: str, record: str, keys: Any) -> list[str]:
        """The entries of a metric or config record of which something is said: they become fields of their own."""
        return [key for key in keys if self.of(message_type, record, key) is not None]


def app_policies(privacy: Mapping[str, Any]) -> dict[str, Policy]:
    """The policies that can protect an app's messages."""
    if TRAINING in privacy:
        raise PrivacyError(
            "privacy.training: an app trains its models itself, and no DP-SGD of fedaudit is inside. Use Flower's own "
            'mods, or protect the update: kinds = {"arrays" = {kind = "weights", update = true}} and a policy on '
            f"{UPDATE}."
        )
    return read_policies(privacy, KINDS)
