"""Flower's secure aggregation (SecAgg and SecAgg+): what its messages are, and the stage that each belongs to.

One round of it has four exchanges with the nodes, all of the type `train`. The stage is an entry of a config record.
Only the third one trains; its reply holds the node's model under masks. The server gets the sum alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedaudit.wire.message import Declared

COLLECT = Stage.COLLECT_MASKED_VECTORS
PROTOCOL = {Key.MASKED_PARAMETERS: Declared("masked"), None: Declared("public", finite=False)}


def stage_of(content: RecordDict) -> str | None:
    """Return the stage of secure aggregation that a request belongs to; None if it belongs to none."""
    said = content.config_records.get(RECORD_KEY_CONFIGS)
    stage = None if said is None else said.get(Key.STAGE)
    return stage if isinstance(stage, str) else None


def protocol_fields(record: str) -> Mapping[str | None, Declared]:
    """Return the declarations of the protocol's own entries in a record. None stands for the remaining entries.

    Keys and encrypted shares are drawn at random and tell nothing of records. A masked vector is uniform by itself.
    """
    return PROTOCOL if record == RECORD_KEY_CONFIGS else {}


def typed(message_type: str, content: RecordDict) -> str:
    """Return a request's message type with the stage behind it, so that each stage has messages of its own name."""
    stage = stage_of(content)
    return message_type if stage is None else f"{message_type}.{stage}"
