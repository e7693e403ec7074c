"""The commands `fedaudit privacy ...`: find the noise for an epsilon, and the joint cost of several releases."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedaudit.cli.help_group import Helped
from fedaudit.cli.options import Json
from fedaudit.errors import SettingError, unknown

privacy_app = typer.Typer(
    cls=Helped, help="Calibrate noise, and compose the cost of several releases.", no_args_is_help=True
)


@privacy_app.command()
def calibrate(
    epsilon: Annotated[
        float, typer.Option(max=1e6, help="The most that the release, or all releases together, may cost.")
    ],
    delta: Annotated[float, typer.Option(help="Failure probability.")],
    sensitivity: Annotated[float, typer.Option(help="L2 sensitivity.")] = 1.0,
    calibration: Annotated[str, typer.Option(help="classical | analytic | total")] = "analytic",
    releases: Annotated[
        int, typer.Option(max=1_000_000_000, help="Releases that together meet epsilon; needs --calibration total.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Print the standard deviation of Gaussian noise that meets an epsilon."""
    from fedaudit.privacy.calibration import calibrate as sigma_for

    if releases != 1 and calibration != "total":
        raise SettingError(
            f"--releases {releases}: --calibration {calibration} is for one release. "
            "With --calibration total all releases together meet epsilon."
        )
    if calibration not in ("classical", "analytic", "total"):
        raise SettingError(unknown("calibration", calibration, ["classical", "analytic", "total"]))
    sigma = sigma_for(calibration, epsilon, delta, sensitivity, releases)  # type: ignore[arg-type]
    result = {
        "sigma": sigma,
        "noise_multiplier": sigma / sensitivity,
        "epsilon": epsilon,
        "delta": delta,
        "sensitivity": sensitivity,
        "calibration": calibration,
        "releases": releases,
    }
    print(json.dumps(result, indent=1) if as_json else f"sigma = {sigma:.10g}")


@privacy_app.command()
def compose(
    noise_multiplier: Annotated[float, typer.Option(help="sigma / sensitivity.")],
    delta: Annotated[float, typer.Option(help="Failure probability.")],
    releases: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="Number of releases, or of steps.")] = 1,
    sample_rate: Annotated[float, typer.Option(help="Poisson sampling rate of a step; 1 takes all records.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Print the epsilon of several releases together, by each accountant."""
    from fedaudit.privacy.accounting import Event
    from fedaudit.privacy.accounting import compose as compose_events

    done = compose_events([Event(noise_multiplier, sample_rate, releases)], delta)
    result = {
        "epsilon_of_record": done.epsilon_of_record,
        "accountant": done.accountant,
        "epsilon": done.by_accountant,
        "delta": delta,
        "relation": "that of the sensitivity" if sample_rate == 1 else "add-or-remove",
        "reason": done.reason,
    }
    if as_json:
        print(json.dumps(result, indent=1))
        return
    print(f"epsilon = {done.epsilon_of_record:.10g} at delta = {delta:g} ({done.accountant})")
    for name, value in done.by_accountant.items():
        print(f"  {name:<22} {value:.10g}")
