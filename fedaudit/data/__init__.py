"""Data sets, the partitions that spread them over clients, and the split that the audit needs."""

from fedaudit.data.datasets import available, describe, load
from fedaudit.data.federation import Federation, Shard, federate
from fedaudit.data.partitions import partition
from fedaudit.data.plot import bubbles
from fedaudit.data.readers.arrays import Arrays
from fedaudit.data.records import Dataset, Facts, to_float, to_input, to_uint8
from fedaudit.data.transfer import transfer_records

__all__ = [
    "Arrays",
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
    "to_input",
    "to_uint8",
    "transfer_records",
]
