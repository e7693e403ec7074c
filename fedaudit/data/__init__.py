"""Data sets, how they are spread over clients, and the split that the audit needs."""

from fedaudit.data.datasets import Dataset, Facts, available, describe, load, to_float, to_uint8
from fedaudit.data.federation import Federation, Shard, federate
from fedaudit.data.partitions import partition
from fedaudit.data.plot import bubbles
from fedaudit.data.transfer import transfer_images

__all__ = [
    "Dataset",
    "Facts",
    "Federation",
    "Shard",
    "available",
    "bubbles",
    "describe",
    "federate",
    "load",
    "partition",
    "to_float",
    "to_uint8",
    "transfer_images",
]
