"""The round that a message of an app belongs to, by the app's own number.

Flower's older servers and many apps write the round into the message's group; Flower's newer strategies write it into
the config that they send. Only a server that numbers nothing has its rounds told by what it asks again.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, Message

ENTRIES = ("server-round", "server_round", "current-round", "current_round", "round")  # names in use, Flower's first


def round_number(message: Message) -> int | None:
    """Return the round that a request names, in its group or in one of its configs; None if it names none."""
    group = message.metadata.group_id
    if group.isascii() and group.isdigit():
        return int(group)
    configs = [record for record in message.content.values() if isinstance(record, ConfigRecord)]
    for name in ENTRIES:
        for config in configs:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
