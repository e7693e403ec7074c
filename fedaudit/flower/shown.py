"""Notes on apps that train no model of numbers: what the server sees of them, and which audits do not apply.

Queries of statistics, trees and embeddings cross the wire like models do. Their bytes and fields are counted, and so is
who sees them. Accuracy, attacks on models and noise on updates need a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REPLY = "Reply"


def shown(messages: Mapping[str, Any]) -> list[str]:
    """Return notes on an app's replies, from the shapes of its messages; none for an app that trains a model."""
    replies = {name: shape for name, shape in messages.items() if name.endswith(REPLY) and shape["fields"]}
    trained = [shape for shape in replies.values() if shape["type"].partition(".")[0] == "train"]
    if any(_is_model(field) for shape in trained for field in shape["fields"].values()):
        return []
    clear = sorted(f"{name}.{field}" for name, shape in replies.items() for field in shape["fields"])
    notes = [
        "no reply holds a model of numbers, so accuracy, attacks on models and noise on updates do not apply; bytes, "
        "fields and the ledger do",
        f"the server sees of each node that it asks, in the clear: {', '.join(clear) or 'nothing'}",
    ]
    for name, shape in replies.items():
        for field, of in shape["fields"].items():
            if of["is"] == "arrays" and of["named"] is None:
                notes.append(_arrays(f"{name}.{field}", of))
    return notes


def _is_model(field: Mapping[str, Any]) -> bool:
    return field["role"] == "masked" or (field["is"] == "arrays" and field["numbers"] == "real")


def _arrays(name: str, of: Mapping[str, Any]) -> str:
    if of["numbers"] == "whole":
        return f"{name} holds whole numbers, such as the bytes of trees: no noise can be added, and no attack reads it"
    return (
        f"{name} holds numbers: if each record of a node has a row, --kind {of['record']}=embeddings:record says so. "
        "Attacks on embeddings and noise on rows then apply; an adapter has to tell how many records there are"
    )
