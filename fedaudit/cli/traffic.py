"""The commands `fedaudit comm`, which plans traffic, and `fedaudit check`, which holds runs against budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli import completion
from fedaudit.cli.options import Json
from fedaudit.cli.output import print_table
from fedaudit.errors import FedauditError, SettingError, unknown
from fedaudit.units import MANY


def comm(
    method: Annotated[
        str, typer.Argument(help="A method's name, or package.module:Class.", autocompletion=completion.methods)
    ],
    dataset: Annotated[str, typer.Option(help="A data set's name; its files are not needed.")] = "cifar10",
    model: Annotated[
        str, typer.Option(help="A model, a group of models, or a mix such as resnet18:3,resnet34:3,resnet50:4.")
    ] = "resnet18",
    server_model: Annotated[
        str | None, typer.Option(help="The server's model, needed if the clients' models differ.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=MANY, help="Number of clients, K.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, max=MANY, help="Number of rounds, T.")] = 100,
    participation: Annotated[float, typer.Option(help="Share of clients asked in a round.")] = 1.0,
    public: Annotated[float, typer.Option(help="Share of the records in a public set.")] = 0.0,
    public_dataset: Annotated[str | None, typer.Option(help="Another data set as the public set.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side length of the images.")] = None,
    partition: Annotated[
        str | None, typer.Option(help="Average over partitions such as dirichlet:0.1. Default: records spread evenly.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, max=10_000, help="How many partitions to average over.")] = 30,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed for drawing the partitions.")] = 0,
    preset: Annotated[str | None, typer.Option(help="The method's published hyper-parameters.")] = None,
    set_: Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="A hyper-parameter; repeatable.")] = [],  # noqa: B006
    compress: Annotated[
        str | None, typer.Option(help="Compress what clients send: topk:0.1 | int8 | svd:0.95.")
    ] = None,
    aggregate: Annotated[str, typer.Option(help="plain | secure: the messages of secure sums, too.")] = "plain",
    threshold: Annotated[float, typer.Option(help="secure: share of clients that must stay.")] = 0.6,
    convention: Annotated[
        str, typer.Option(help="payload (as papers count) | wire (headers and buffers too)")
    ] = "payload",
    as_json: Json = False,
) -> None:
    """Compute the traffic of a full-size experiment to the byte, without training and without data."""
    from fedaudit.runtime.planned_traffic import plan_traffic
    from fedaudit.setting import Setting, nested, parse_pairs

    setting = Setting.make(
        method=method, dataset=dataset, model=model, server_model=server_model, clients=clients, rounds=rounds,
        participation=participation, public=public, public_dataset=public_dataset, image_size=image_size, preset=preset,
        set=nested(parse_pairs(set_)), seed=seed, compress=compress,
        aggregate=aggregate, threshold=threshold, **({"partition": partition} if partition else {}),
    )  # fmt: skip
    planned = plan_traffic(setting, convention, draws if partition else 0)
    if as_json:
        print(json.dumps(planned, indent=1))
        return
    over = f", mean of {draws} partitions {partition}" if partition else ""
    print_table(planned["fields"], f"{method}, one round of {planned['participants']} clients ({convention}{over})")
    for name in ("up", "down", "total"):
        part = planned[name]
        big = max(planned["total"].values()) >= 1e9
        units = ("GB", "GiB") if big else ("MB", "MiB")
        print(
            f"{name:<6} {part['bytes']:>20,.0f} B over {rounds} rounds = "
            + " = ".join(f"{part[unit]:.2f} {unit}" for unit in units)
            + (f", ± {part['bytes_std'] / part['bytes']:.1%} between partitions"
               if part.get("bytes_std") and part["bytes"] else "")
        )  # fmt: skip
    if planned.get("at_most"):
        print(f"These are upper bounds: only a run tells how far {compress} shrinks {', '.join(planned['at_most'])}.")


def check(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or the folder of an audit.")],
    budget: Annotated[Path, typer.Option(help="A TOML file of ceilings and floors.")],
    format: Annotated[str, typer.Option(help="table | github | junit")] = "table",
) -> None:
    """Check runs against budgets, and that their folders do not contradict themselves.

    Exit code 0 if all budgets are kept, 1 if one is broken or a folder contradicts itself, 2 if a budget is not valid.
    """
    from fedaudit.runtime.run_record import reading
    from fedaudit.suite.budgets import FORMATS, check_runs, contradicted_in, github_error
    from fedaudit.suite.junit import Case, junit

    if format not in FORMATS:
        raise SettingError(unknown("format", format, FORMATS))
    if wrong := contradicted_in(runs):
        if format == "junit":
            print(junit([Case("verify", text.partition(": ")[0], "failure", text) for text in wrong]))
        for text in wrong if format != "junit" else ():
            print(github_error("fedaudit verify", text) if format == "github" else text)
        raise typer.Exit(1)
    try:
        with reading(", ".join(map(str, runs))):
            outcomes = check_runs(runs, budget)
    except FedauditError as e:
        if format == "github":  # GitHub shows it beside the change, not only in a log
            print(github_error("fedaudit", str(e)))
        raise
    if format == "table":
        print_table([outcome.row() for outcome in outcomes], f"{budget}")
        for outcome in outcomes:
            if not outcome.kept:
                print(outcome.message())
    else:
        print(FORMATS[format](outcomes))
    if not all(outcome.kept for outcome in outcomes):
        raise typer.Exit(1)
