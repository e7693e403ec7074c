"""The kinds that an app's user gives to the records in its messages: which kind of release each one is.

    kinds = { "arrays" = "weights", "metrics.num-examples" = "count" }

A key is `RECORD`, for a whole record, or `RECORD.KEY`, for one entry of a metric or config record. With the message
type before it (`train.arrays`) it is about replies of that type alone, and wins over a key without. A record that no
key names has the kind `unmapped`: no policy can protect it, and every release of it costs infinity.

    "arrays" = { kind = "weights", update = true }    # the policy on `gradients` protects reply - request
    "features" = { kind = "embeddings", unit = "record" }    # one row for each of the node's records
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedaudit.errors import PrivacyError, SettingError, unknown
from fedaudit.privacy.policy import TRAINING, Policy, protects_persons, read_policies
from fedaudit.setting import Frozen, validated
from fedaudit.wire.message import KINDS, Declared, Unit

UNMAPPED = "unmapped"
UPDATE = "gradients"  # the kind whose policy protects an update, which is a gradient up to a factor


class Named(Frozen):
    """The kind of one record, or of one entry of it."""

    kind: str
    unit: Unit = "client"
    update: bool = False  # protect its difference from the record of the same name in the request

    def declared(self) -> Declared:
        kind = UPDATE if self.update else self.kind
        return Declared("private", kind, via="data", unit=self.unit, finite=False)


class Names:
    """The kinds of all records that the user named."""

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
        """Return the kind of a record (or of one entry of it) in replies of a type; None if the user named none."""
        place = record if key is None else f"{record}.{key}"
        category = message_type.partition(".")[0]
        return next((self.said[k] for k in (f"{message_type}.{place}", f"{category}.{place}", place) if k in self.said),
                    None)  # fmt: skip

    def unmatched(self, seen: Iterable[tuple[str, str]]) -> list[str]:
        """Return the keys that name nothing in these replies, given as message types and places in them."""
        names = {key for kind, place in seen for key in (f"{kind}.{place}", f"{kind.partition('.')[0]}.{place}", place)}
        return [key for key in self.said if key not in names]

    def entries(self, message_type: str, record: str, keys: Any) -> list[str]:
        """Return the entries of a metric or config record that have a kind. They become fields of their own."""
        return [key for key in keys if self.of(message_type, record, key) is not None]


def app_policies(privacy: Mapping[str, Any]) -> dict[str, Policy]:
    """Return the policies that protect an app's messages; raise an error for one that cannot."""
    if TRAINING in privacy:
        raise PrivacyError(
            "privacy.training: an app trains its models itself, without fedaudit's DP-SGD. Use Flower's own "
            'mods, or protect the update: kinds = {"arrays" = {kind = "weights", update = true}} and a policy on '
            f"{UPDATE}."
        )
    policies = read_policies(privacy, KINDS)
    if protects_persons(policies):
        raise PrivacyError(
            "unit = person: fedaudit does not know which of an app's records belong to one person. Leave the unit out, "
            "and the guarantee is for single records."
        )
    return policies
