"""An app's claims of differential privacy: by mods on its clients, wrappers on its server, and numbers in its metrics.

A claim is written to the record beside the ledger and what was measured. It changes nothing in the ledger.
`fedaudit.flower.epsilon` tests the claims of mods by trials; until then a claim's verdict is "not tried".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from fedaudit.errors import ContractError
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.runtime.run_record import EpsilonAudit

TRIED_AS = "Flower mods"  # the test that tries the claim of a mod; its result takes the place of the untried claim
DELTA = 1e-5  # at which the epsilon of a claim is told that names no delta
EPSILONS = ("epsilon", "eps", "privacy_epsilon", "epsilon_spent")  # names of a reported epsilon in metrics
DELTAS = ("target_delta", "delta", "target-delta", "privacy_delta")


@dataclass(frozen=True)
class CentralClaim:
    """The claim of a DP wrapper around a server's strategy: noise on the mean of clipped updates."""

    wrapper: str
    noise_multiplier: float
    clip: float | None
    sampled: int | None  # the number of nodes for which the wrapper scales its noise
    on_clients: bool = False  # whether nodes add the noise, each its part

    @property
    def text(self) -> str:
        bound = "" if self.clip is None else f", clipping norm {self.clip:g}"
        if self.on_clients:
            return (
                f"claim of {self.wrapper}: noise multiplier {self.noise_multiplier:g}{bound}, for the sum of all "
                "updates; each node adds a part of the noise, so one upload has little of it"
            )
        return (
            f"claim of {self.wrapper}: noise multiplier {self.noise_multiplier:g}{bound}, for the models that the "
            "server passes on; the server adds the noise after it has seen the uploads, so there is no protection "
            "against the server"
        )

    def remark(self, nodes: int) -> str | None:
        """Return what is wrong with the noise if so many nodes took part and not as many as the wrapper was told."""
        if not self.sampled or not nodes or nodes >= self.sampled:
            return None
        real = self.noise_multiplier * nodes / self.sampled
        return (
            f"{self.wrapper} scales its noise for {self.sampled} nodes, and {nodes} took part: the noise multiplier is "
            f"{real:.3g}, not {self.noise_multiplier:g}"
        )

    def audit(self, rounds: int, ledger: float | None) -> EpsilonAudit:
        """Return the claim beside the ledger. Its epsilon is that of one client over all rounds, without sampling."""
        mu = math.sqrt(rounds) / self.noise_multiplier if self.noise_multiplier else math.inf
        return _untried(
            f"{self.wrapper}, {rounds} rounds", "outsider and peers", gaussian_epsilon(mu, DELTA), DELTA, ledger,
            "the epsilon is the Gaussian mechanism's, composed over the rounds and without amplification by sampling; "
            "canaries (--canaries) and `fedaudit epsilon canaries` would measure it",
        )  # fmt: skip


def strategy_claim(strategy: Any) -> CentralClaim | None:
    """Return what a DP wrapper of Flower claims, of the older or the newer API; None without a wrapper."""
    noise = getattr(strategy, "noise_multiplier", None)
    if not isinstance(noise, int | float):
        return None
    clip = getattr(strategy, "clipping_norm", getattr(strategy, "clip_norm", None))
    sampled = getattr(strategy, "num_sampled_clients", None)
    return CentralClaim(
        type(strategy).__name__,
        float(noise),
        float(clip) if isinstance(clip, int | float) else None,
        sampled if isinstance(sampled, int) else None,
        getattr(strategy, "server_side_noising", True) is False,
    )


@dataclass(frozen=True)
class Reported:
    """An epsilon that a node reports in its metrics, as apps with opacus do."""

    k: int
    epsilon: float
    delta: float | None


def reported(k: int, tables: Iterable[Mapping[str, Any]]) -> Reported | None:
    """Return the epsilon that a node's metrics hold; None if they hold none."""
    for table in tables:
        for name in EPSILONS:
            value = table.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
                deltas = (table.get(name) for name in DELTAS)
                delta = next((d for d in deltas if isinstance(d, float) and 0 <= d <= 1), None)
                return Reported(k, float(value), delta)
    return None


def reported_audit(found: list[Reported], ledger: float | None) -> tuple[EpsilonAudit, str | None]:
    """Return the largest reported epsilon beside the ledger, and a remark if it cannot be that of the whole run."""
    delta = next((r.delta for r in found if r.delta is not None), DELTA)
    by_node: dict[int, list[float]] = {}
    for r in found:
        by_node.setdefault(r.k, []).append(r.epsilon)
    anew = {k: said for k, said in by_node.items() if len(said) > 1 and max(said[1:]) <= said[0] * (1 + 1e-6)}
    remark = None
    if anew:
        k = max(anew, key=lambda k: sum(anew[k]))
        remark = (
            f"node {k} reports an epsilon of at most {max(anew[k]):.4g} in each of {len(anew[k])} rounds, and it does "
            f"not grow: it is that of one round. By basic composition the run has {sum(anew[k]):.4g}, at delta "
            f"{len(anew[k]) * delta:.2g}"
        )
    said = _untried(
        "reported by the app's metrics", "server", max(r.epsilon for r in found), delta, ledger,
        "fedaudit did not train, and takes no app's word; canaries (--canaries) and `fedaudit epsilon canaries` would "
        "measure it",
    )  # fmt: skip
    return said, remark


def _untried(
    claim: str, threat: str, epsilon: float, delta: float, ledger: float | None, how: str, test: str = "claim"
) -> EpsilonAudit:
    return EpsilonAudit(
        test=test, kind="weights", threat=threat, claim=claim, claim_epsilon=epsilon, ledger_epsilon=ledger,
        lower_bound=0.0, p_value=1.0, trials=0, confidence=0.95, delta=delta, verdict="not tried", method="", how=how,
    )  # fmt: skip


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

    def audit(self, ledger: float | None) -> EpsilonAudit:
        """Return the claim beside the ledger, as long as nobody has tried it."""
        return _untried(
            f"{self.mod}, one upload", "whoever sees the upload: server", self.epsilon, self.delta, ledger,
            "`fedaudit flower epsilon APP RUN` tries it", TRIED_AS,
        )  # fmt: skip


def local_claims(app: ClientApp) -> list[LocalClaim]:
    """Return the claims of all local DP mods around an app's training, outermost first."""
    return [
        LocalClaim(type(mod).__name__, mod.epsilon, mod.delta, mod.clipping_norm, mod.sensitivity)
        for mod in training_mods(app)
        if isinstance(mod, LocalDpMod | OlderLocalDpMod)
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
