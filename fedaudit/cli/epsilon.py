"""The commands `fedaudit epsilon ...`: find lower bounds on epsilon, and hold claims against them."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli.help_group import Helped
from fedaudit.cli.options import Json, RunArgument, Trust
from fedaudit.cli.output import chosen_clients, print_table, progress_bar
from fedaudit.errors import DataError, SettingError
from fedaudit.significance import holm, level_of, said

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedaudit.epsilon.lower_bounds import Bound
    from fedaudit.runtime.run_record import EpsilonAudit

epsilon_app = typer.Typer(
    cls=Helped, help="Find lower bounds on epsilon, and test claims against them.", no_args_is_help=True
)

MOST = 1_000_000  # the most canaries, guesses or trials
Delta = Annotated[float, typer.Option(help="Failure probability of the claim.")]
Confidence = Annotated[float, typer.Option(help="Probability with which a bound holds.")]
Claim = Annotated[float | None, typer.Option(help="An epsilon to test against the bound.", show_default=False)]
FAILS = "Exit with code 1 if a claim is refuted, for CI; with 2 if a claim could not be tried."
Fail = Annotated[bool, typer.Option("--fail-if-refuted", help=FAILS)]
Client = Annotated[str, typer.Option(help="all, or a client's number.")]


@epsilon_app.command("one-run")
def one_run(
    canaries: Annotated[
        int, typer.Option(min=1, max=MOST, help="Number of canaries; each was put in or left out by its own coin.")
    ],
    correct: Annotated[int, typer.Option(min=0, max=MOST, help="Number of right guesses.")],
    guesses: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Number of guesses. Default: one per canary.")
    ] = None,
    delta: Delta = 1e-5,
    confidence: Confidence = 0.95,
    claim: Claim = None,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Bound epsilon by guesses about canaries of one run: Steinke et al. 2023, and f-DP of Mahloujifar et al. 2024."""
    from fedaudit.epsilon.lower_bounds import one_run_fdp, one_run_steinke

    made = canaries if guesses is None else guesses
    by = {"steinke": one_run_steinke} | (
        {"f_dp": one_run_fdp} if delta > 0 else {}
    )  # f-DP is about Gaussian noise, which never has delta = 0
    bounds = {name: bound(canaries, made, correct, delta, confidence) for name, bound in by.items()}
    best = {name: bound(canaries, made, made, delta, confidence) for name, bound in by.items()}
    _print_bounds(bounds, best, claim, as_json, fail_if_refuted)


@epsilon_app.command("from-scores")
def from_scores(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|FILE.csv", help="An attacked run, or a table with columns score and member (0 or 1)."
        ),
    ],
    attack: Annotated[str, typer.Option(help="For a run: the attack whose scores are used.")] = "loss",
    threat: Annotated[str, typer.Option(help="For a run: server, peer:k or outsider.")] = "server",
    client: Client = "all",
    delta: Delta = 1e-5,
    confidence: Confidence = 0.95,
    correction: Annotated[
        str, typer.Option(help="Correction for choosing the threshold: exact | bonferroni | split")
    ] = "exact",
    claim: Claim = None,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Bound epsilon by a membership attack's scores, over thresholds, corrected for their choice."""
    from fedaudit.epsilon.lower_bounds import from_scores as bound_from

    scores: ArrayLike
    member: ArrayLike
    if source.is_dir():
        from fedaudit.attack.stored_scores import pooled_scores

        scores, member = pooled_scores(source, attack, threat, chosen_clients(client))
    else:
        scores, member = read_scores(source)
    bound = bound_from(scores, member, delta, confidence, correction)  # type: ignore[arg-type]
    best = bound_from(member, member, delta, confidence, correction)  # type: ignore[arg-type]
    _print_bounds({"from_scores": bound}, {"from_scores": best}, claim, as_json, fail_if_refuted)


@epsilon_app.command("release-path")
def release_path(
    run: RunArgument,
    kind: Annotated[list[str] | None, typer.Option(help="A protected kind; repeatable. Default: all.")] = None,
    client: Client = "all",
    trials: Annotated[int, typer.Option(min=1, max=MOST, help="Releases of each of the two neighbours.")] = 1000,
    confidence: Confidence = 0.95,
    trust: Trust = False,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Test each protected kind's claim: run its own release path many times on a worst-case pair of records."""
    from fedaudit import registry
    from fedaudit.epsilon.release_path import audit_releases

    registry.trust(trust)
    with progress_bar("release path") as watch:
        audits = audit_releases(
            run, kinds=kind, clients=chosen_clients(client), trials=trials, confidence=confidence, watch=watch
        )
    print_audits(audits, run, as_json)
    _fail_if(fail_if_refuted and run_refuted(run))


@epsilon_app.command("residuals")
def residuals(
    run: RunArgument,
    kind: Annotated[list[str] | None, typer.Option(help="A protected kind; repeatable. Default: all.")] = None,
    client: Client = "all",
    confidence: Confidence = 0.95,
    trust: Trust = False,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Test the noise in the bytes that a run sent against its ledger: the clients' tasks run again without noise."""
    from fedaudit import registry
    from fedaudit.epsilon.residuals import audit_residuals

    registry.trust(trust)
    with progress_bar("residuals") as watch:
        audits = audit_residuals(run, kinds=kind, clients=chosen_clients(client), confidence=confidence, watch=watch)
    print_audits(audits, run, as_json)
    _fail_if(fail_if_refuted and run_refuted(run))


@epsilon_app.command("clipping")
def clipping(
    run: RunArgument,
    kind: Annotated[list[str] | None, typer.Option(help="A protected kind; repeatable. Default: all.")] = None,
    client: Client = "all",
    trust: Trust = False,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Hand each protected release values of any length, and test its clipping and noise by formulas of its own."""
    from fedaudit import registry
    from fedaudit.epsilon.clipping import audit_clipping

    registry.trust(trust)
    audits = audit_clipping(run, kinds=kind, clients=chosen_clients(client))
    print_audits(audits, run, as_json)
    _fail_if(fail_if_refuted and run_refuted(run))


@epsilon_app.command("sums")
def sums(
    run: RunArgument,
    trials: Annotated[
        int, typer.Option(min=1, max=MOST, help="Sums with a canary client, and as many without.")
    ] = 1000,
    confidence: Confidence = 0.95,
    trust: Trust = False,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Test a guarantee for clients: the noise on a run's sums, canary clients, and the masks of secure sums."""
    from fedaudit import registry
    from fedaudit.epsilon.sums import audit_sums

    registry.trust(trust)
    with progress_bar("sums") as watch:
        audits = audit_sums(run, trials=trials, confidence=confidence, watch=watch)
    print_audits(audits, run, as_json)
    _fail_if(fail_if_refuted and claims_refuted(audits))


@epsilon_app.command("canaries")
def canaries(
    run: RunArgument,
    number: Annotated[
        int, typer.Option("--canaries", min=4, max=MOST, help="Number of canaries for each client.")
    ] = 400,
    client: Client = "all",
    confidence: Confidence = 0.95,
    trust: Trust = False,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Test the claim for private training with canaries in gradient space, one parameter each."""
    from fedaudit import registry
    from fedaudit.epsilon.gradient_canaries import audit_canaries

    registry.trust(trust)
    with progress_bar("canaries") as watch:
        audits = audit_canaries(
            run, canaries=number, clients=chosen_clients(client), confidence=confidence, watch=watch
        )
    print_audits(audits, run, as_json)
    _fail_if(fail_if_refuted and run_refuted(run))


@epsilon_app.command("audit")
def audit(
    run: RunArgument,
    attack: Annotated[str, typer.Option(help="A membership attack's name.")] = "loss",
    threat: Annotated[str, typer.Option(help="server, peer:k or outsider.")] = "server",
    client: Client = "all",
    guesses: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Pairs to guess on. Default: by number and claim.")
    ] = None,
    confidence: Confidence = 0.95,
    trust: Trust = False,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Test the claims for a whole run by guesses about its canaries (`run --canaries M`), or about its audit split."""
    from fedaudit import registry
    from fedaudit.epsilon.one_run import audit_run

    registry.trust(trust)
    with progress_bar("one run") as watch:
        audits = audit_run(
            run, attack=attack, threat=threat, clients=chosen_clients(client), guesses=guesses, confidence=confidence,
            watch=watch,
        )  # fmt: skip
    print_audits(audits, run, as_json)
    _fail_if(fail_if_refuted and run_refuted(run))


# --- input and output --------------------------------------------------------------------------------------------


_FLAGS = {"0": False, "1": True, "false": False, "true": True}


def read_scores(path: Path) -> tuple[list[float], list[bool]]:
    """Return the columns `score` and `member` of a CSV file. An error names the line."""
    scores: list[float] = []
    member: list[bool] = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            missing = [name for name in ("score", "member") if name not in (rows.fieldnames or ())]
            if missing:
                found = ", ".join(rows.fieldnames or ()) or "nothing"
                raise DataError(
                    f"{path} has no column {' and no column '.join(missing)}: its first line must be score,member. "
                    f"It has: {found}."
                )
            for row in rows:
                scores.append(_score(row["score"], path, rows.line_num))
                flag = (row["member"] or "").strip().lower()
                if flag not in _FLAGS:
                    raise DataError(f"{path}, line {rows.line_num}: member is {row['member']!r}; write 0 or 1.")
                member.append(_FLAGS[flag])
    except FileNotFoundError:
        raise DataError(f"There is no file {path}. Give a CSV file with the columns score and member.") from None
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}. Give a CSV file with score and member.") from None
    except (UnicodeDecodeError, csv.Error) as e:
        raise DataError(f"{path} is not a CSV file: {e}. Write text with the columns score and member.") from None
    if not scores:
        raise DataError(f"{path} holds no scores: write one row per candidate below the line score,member.")
    return scores, member


def _score(text: str | None, path: Path, line: int) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise DataError(f"{path}, line {line}: score is {text!r}, which is not a number. Write a number.") from None
    if not math.isfinite(value):
        raise DataError(
            f"{path}, line {line}: score is {text!r}, which no threshold can rank. Correct the line or remove it."
        )
    return value


def claims_refuted(audits: list[EpsilonAudit]) -> bool:
    """Say if these audits refute a claim, corrected for how many audits there are."""
    from fedaudit.epsilon.joint_verdict import refuting

    return bool(refuting(audits))


def run_refuted(run: Path) -> bool:
    """Say if anything in the run is refuted, by these audits or by earlier ones that the folder keeps.

    It is what a budget of refuted claims counts: see `fedaudit check`. Where nothing is refuted and a claim could not
    be tried, it raises SettingError.
    """
    from fedaudit.metrics.guarantee import REFUTED
    from fedaudit.runtime.run_record import read_record

    return REFUTED.limited(read_record(run)) > 0


def _fail_if(refuted: bool) -> None:
    if refuted:
        raise typer.Exit(1)


def _print_bounds(
    bounds: dict[str, Bound], best: dict[str, Bound], claim: float | None, as_json: bool, fail_if_refuted: bool
) -> None:
    """Print the bounds. `best` has the bounds if every guess had been right: no claim above them can be refuted."""
    if fail_if_refuted and claim is None:
        raise SettingError("--fail-if-refuted needs a claim to refute: --claim EPSILON.")
    verdicts = {}
    if claim is not None:
        for name, bound in bounds.items():
            verdict, tells_at = bound.against(claim), best[name].p_value(claim)
            verdicts[name] = replace(verdict, verdict=said(verdict.p_value, tells_at, bound.confidence))
    if as_json:
        shown = {
            name: bound.as_dict()
            | {"ceiling": best[name].epsilon}
            | ({"against": verdicts[name].as_dict()} if verdicts else {})
            for name, bound in bounds.items()
        }
        print(json.dumps(shown, indent=1))
    for name, bound in () if as_json else bounds.items():
        at = f"delta = {bound.delta:g}, confidence {bound.confidence:g}"
        print(f"epsilon >= {bound.epsilon:.5f} at {at}: {bound.method}")
        print(f"  These trials could show at most epsilon = {best[name].epsilon:.5f}")
        print(f"  assumes: {bound.assumes}")
        if name in verdicts:
            v = verdicts[name]
            print(f"  epsilon = {v.claim:g}: {v.verdict} (p = {v.p_value:.3g}, {v.trials} trials)")
    if fail_if_refuted:
        adjusted = holm([v.p_value for v in verdicts.values()])
        level = level_of(next(iter(bounds.values())).confidence)
        _fail_if(any(p is not None and p < level for p in adjusted))


def print_audits(audits: list[EpsilonAudit], run: Path, as_json: bool) -> None:
    if as_json:
        from fedaudit.stored_model import plain

        print(json.dumps(plain(audits), indent=1))
        return
    names = {"claim_epsilon": "claimed", "ledger_epsilon": "ledger", "bound": "at least", "p_value": "p"}
    rows = [
        {"claim": audit.claim}
        | {word: getattr(audit, key) for key, word in names.items()}
        | {"trials": audit.trials, "verdict": audit.verdict, "by": audit.test.rsplit(", ", 1)[-1]}
        for audit in audits
    ]
    print_table(rows, f"epsilon of {run}")
    for audit in audits:
        print(f"{audit.claim}, {audit.test}: {audit.how}.")
