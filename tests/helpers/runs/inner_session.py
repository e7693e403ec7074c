"""Sessions of pytest within a test forget what they imported, and parts of torch cannot be imported twice."""

from __future__ import annotations


def import_everything() -> None:
    """Import what a gated run imports on its way. Call it before `pytester` is set up: in a fixture of a module."""
    import opacus  # noqa: F401
    import torch._dynamo
    import torch.utils.flop_counter  # noqa: F401

    from fedaudit import registry
    from fedaudit.cli import main  # noqa: F401
    from fedaudit.gates import record_gates, round_benchmark  # noqa: F401

    registry.names("attacks")
    registry.names("methods")
