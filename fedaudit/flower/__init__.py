"""Audits of unchanged Flower apps. This needs the extra `flower`.

`audited(client_app, server_app, ...)` puts the audit around an app's two halves, for any Flower runtime. `run_app` runs
an app's folder. The result is a run folder that attacks, reports and gates take like any other.
"""

from __future__ import annotations

import os

from fedaudit.errors import SettingError
from fedaudit.extras import install

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # an audit must not report itself to anybody
try:
    import flwr  # noqa: F401
except ImportError as e:
    raise SettingError(f"Flower is not installed ({e}). Install it: {install('flower')}.") from e

from fedaudit.flower.app import App, Audited, audited, read_app, run_app
from fedaudit.flower.client import AuditMod, Terms
from fedaudit.flower.epsilon import audit_mods
from fedaudit.flower.node_log import RecordingMod, collect
from fedaudit.flower.records import Records, served

__all__ = [
    "App",
    "AuditMod",
    "Audited",
    "RecordingMod",
    "Records",
    "Terms",
    "audit_mods",
    "audited",
    "collect",
    "read_app",
    "run_app",
    "served",
]
