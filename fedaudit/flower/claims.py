"""An app's claims of differential privacy, by Flower's mods on its clients and Flower's wrappers on its server.

A claim is written to the record beside what was measured. It changes nothing in the ledger. `fedaudit.flower.epsilon`
tests the claims of mods by trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import Strategy

from fedaudit.errors import ContractError
from fedaudit.privacy.calibration import gaussian_epsilon


def strategy_claim(strategy: Strategy) -> str | None:
    """Return what a DP wrapper claims about the model that the server publishes; None without a wrapper."""
    noise = getattr(strategy, "noise_multiplier", None)
    if noise is None:
        return None
    clip = getattr(strategy, "clipping_norm", None)
    bound = f", clipping norm {clip:g}" if isinstance(clip, int | float) else ""
    return (
        f"claim of {type(strategy).__name__}: noise multiplier {noise:g}{bound}, for the models that the server passes "
        "on; the server adds the noise after it has seen the uploads, so there is no protection against the server"
    )


@dataclass(frozen=True)
class LocalClaim:
    """The claim of a local DP mod about one upload."""

    mod: str
    epsilon: float
    delta: float
    clip: float
    sensitivity: float

    @property
    def sigma(self) -> float:
        """Return the noise's deviation by the formula of Flower's mod: the classical one, proven for epsilon <= 1."""
        return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    @property
    def text(self) -> str:
        more = f"; such noise gives epsilon {gaussian_epsilon(self.sensitivity / self.sigma, self.delta):.3g}"
        if self.sensitivity < 2 * self.clip:
            more += (
                f"; two clients' clipped updates may lie {2 * self.clip:g} apart, more than this sensitivity: for such "
                "neighbours the protection is weaker"
            )
        return (
            f"claim of {self.mod}: ({self.epsilon:g}, {self.delta:g})-DP of one upload, clipping norm {self.clip:g}, "
            f"sensitivity {self.sensitivity:g}{more}"
        )


def local_claims(app: ClientApp) -> list[LocalClaim]:
    """Return the claims of all local DP mods around an app's training, outermost first."""
    return [
        LocalClaim(type(mod).__name__, mod.epsilon, mod.delta, mod.clipping_norm, mod.sensitivity)
        for mod in training_mods(app)
        if isinstance(mod, LocalDpMod)
    ]


def training_mods(app: ClientApp) -> list[Callable[..., Any]]:
    """Return the mods around an app's function for `train`, outermost first."""
    found: list[Any] = []
    fn: Any = app._call or app._registered_funcs.get("train.default")
    while fn is not None and (inside := _free(fn)).keys() >= {"_mod", "_ffn"}:
        found.append(inside["_mod"])
        fn = inside["_ffn"]
    if not found and app._mods:
        raise ContractError(
            "This version of Flower attaches mods in a way unknown to fedaudit, so their claims cannot be read. "
            "Install flwr 1.41."
        )
    return found


def _free(fn: Any) -> dict[str, Any]:
    """Return the values in a function's closure, by name."""
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
