"""The commands `fedaudit flower ...`, which audit Flower apps without changing them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedaudit.cli.epsilon import Fail, claims_refuted, print_audits
from fedaudit.cli.help_group import Helped
from fedaudit.cli.options import Json
from fedaudit.cli.output import print_summary, print_table, progress_bar
from fedaudit.errors import SettingError
from fedaudit.units import MANY

flower_app = typer.Typer(cls=Helped, help="Audit a Flower app without changing it.", no_args_is_help=True)


@flower_app.command("run")
def run(
    app: Annotated[Path, typer.Argument(metavar="APP", help="An app's folder, with its pyproject.toml.")],
    out: Annotated[Path, typer.Option(help="The run folder.")],
    nodes: Annotated[int, typer.Option(min=1, max=MANY, help="Number of SuperNodes in the simulation.")] = 3,
    run_config: Annotated[
        list[str], typer.Option("--run-config", metavar="NAME=VALUE", help="A value of the app's config; repeatable.")
    ] = [],  # noqa: B006
    kind: Annotated[
        list[str], typer.Option(metavar="RECORD=KIND", help="The kind of a record, such as arrays=weights; repeatable.")
    ] = [],  # noqa: B006
    adapter: Annotated[
        str | None, typer.Option(help="package.module:Class that tells which records were members.")
    ] = None,
    privacy: Annotated[list[str], typer.Option(help="A policy, such as gradients:eps=1,clip=1; repeatable.")] = [],  # noqa: B006
    canaries: Annotated[int, typer.Option(min=0, max=MANY, help="Number of pairs of mislabelled records.")] = 0,
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed for everything random in this process.")
    ] = 0,
    keep_weights: Annotated[
        int, typer.Option(min=0, max=MANY, help="Number of rounds whose model states are kept.")
    ] = 10,
    ray: Annotated[bool, typer.Option(help="Use Flower's own simulation on Ray, not this process.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Go on with an unfinished run, if the app goes on from a state of its own.")
    ] = False,
    client_args: Annotated[
        str,
        typer.Option(help="Arguments of a script with start_client, such as '--partition-id {partition-id}'."),
    ] = "",
    verbose: Annotated[bool, typer.Option(help="Show what Flower logs.")] = False,
    as_json: Json = False,
) -> None:
    """Run an app with every message recorded, metered and protected. The result is a run folder like any other."""
    import logging

    from fedaudit.flower import read_app, run_app
    from fedaudit.privacy.policy import parse_policy
    from fedaudit.setting import parse_pairs

    if not verbose:
        logging.getLogger("flwr").setLevel(logging.ERROR)
    kinds: dict[str, Any] = {}
    for pair in kind:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingError(f"--kind {pair!r}: write RECORD=KIND, such as arrays=weights, or arrays=weights:update.")
        what, _, more = value.partition(":")
        if more not in ("", "update", "record"):
            raise SettingError(f"--kind {pair!r}: only update or record may follow the colon.")
        kinds[name] = {"kind": what, "update": more == "update", "unit": "record" if more == "record" else "client"}
    with progress_bar(f"flower {app.name}") as watch:
        record = run_app(
            read_app(app, client_args), out=out, nodes=nodes, privacy=dict(parse_policy(text) for text in privacy),
            kinds=kinds, adapter=adapter, config=parse_pairs(run_config), canaries=canaries, seed=seed,
            keep_weights=keep_weights, ray=ray, watch=watch, resume=resume,
        )  # fmt: skip
    if as_json:
        print(record.model_dump_json(indent=1))
    else:
        print_summary(record)
        print(f"Everything is in {out}")


@flower_app.command("epsilon")
def epsilon(
    app: Annotated[Path, typer.Argument(metavar="APP", help="The app's folder.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of it.")],
    trials: Annotated[int, typer.Option(min=2, max=MANY, help="Number of uploads of each of two updates.")] = 1000,
    confidence: Annotated[float, typer.Option(help="Probability with which the bound holds.")] = 0.95,
    seed: Annotated[
        int,
        typer.Option(min=0, max=(1 << 63) - 1, help="Seed for the direction of the two updates, and for the noise."),
    ] = 0,
    fail_if_refuted: Fail = False,
    as_json: Json = False,
) -> None:
    """Test what the app's local DP mods claim: run the mods themselves many times on two updates."""
    from fedaudit.flower import audit_mods, read_app

    with progress_bar("mods") as watch:
        audits = audit_mods(run, read_app(app).client, trials=trials, confidence=confidence, seed=seed, watch=watch)
    print_audits(audits, run, as_json)
    if fail_if_refuted and claims_refuted(audits):
        raise typer.Exit(1)


@flower_app.command("comm")
def comm(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A short run of the app.")],
    nodes: Annotated[int, typer.Option(min=1, max=MANY, help="Number of nodes in the planned run.")],
    rounds: Annotated[int, typer.Option(min=1, max=MANY, help="Number of rounds in the planned run.")],
    wire: Annotated[bool, typer.Option(help="Count the bytes that Flower sends, not as papers count.")] = False,
    as_json: Json = False,
) -> None:
    """Compute what a larger run of an app would send, from a short run."""
    from fedaudit.flower.traffic_forecast import planned
    from fedaudit.units import bytes_text

    found = planned(run, nodes=nodes, rounds=rounds, convention="wire" if wire else "payload")
    if as_json:
        print(found.model_dump_json(indent=1))
        return
    print_table(
        [row.model_dump() for row in found.fields], f"one round of {nodes} nodes ({'wire' if wire else 'payload'})"
    )
    for way in ("up", "down", "total"):
        sent: int = getattr(found, way)
        print(f"{way:<6} {sent:>20,} B over {rounds} rounds = {bytes_text(sent)}")


@flower_app.command("collect")
def collect(
    pages: Annotated[
        Path, typer.Argument(metavar="PAGES", help="The folder that the RecordingMod of all nodes wrote to.")
    ],
    out: Annotated[Path, typer.Option(help="The run folder.")],
    nodes: Annotated[int, typer.Option(min=1, max=MANY, help="Number of nodes that took part.")],
    name: Annotated[str, typer.Option(help="The app's name.")] = "app",
) -> None:
    """Make a run folder from what nodes kept that ran with fedaudit's mod alone."""
    from fedaudit.flower import collect as put_together

    print_summary(put_together(pages, out=out, nodes=nodes, name=name))
    print(f"Everything is in {out}")
