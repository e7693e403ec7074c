"""Packages that are not needed for a plain run, and the command that installs one.

The command names the package itself, so that it works wherever fedaudit came from: a checkout, a wheel, an index.
"""

from __future__ import annotations

EXTRAS = {
    "opacus": "opacus>=1.5",
    "ray": "ray>=2.40",
    "cryptography": "cryptography>=42",
    "flower": "flwr[simulation]>=1.41",
    "hf": "datasets>=2.19",
    "pandas": "pandas>=2.1",
    "tensorboard": "tensorboard>=2.16",
    "mlflow": "mlflow-skinny>=2.12",
    "wandb": "wandb>=0.17",
    "benchmark": "pytest-benchmark>=4",
}


def install(name: str) -> str:
    """Return the command that installs what `name` stands for."""
    return f'pip install "{EXTRAS[name]}"'
