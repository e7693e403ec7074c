"""The command `fedaudit check-method`, which tests what a method declares about its messages."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedaudit.cli.options import Json
from fedaudit.cli.output import print_table, wrapped


def check_method(
    methods: Annotated[
        list[str],
        typer.Argument(metavar="METHOD...", help="Methods' names, package.module:Class, all, or edited."),
    ],
    set_: Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="A hyper-parameter; repeatable.")] = [],  # noqa: B006
    model: Annotated[str, typer.Option(help="The clients' models.")] = "cnn",
    clients: Annotated[int, typer.Option(min=1, max=1000, help="How many clients.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds.")] = 2,
    privacy: Annotated[list[str], typer.Option("--privacy", metavar="KIND:...", help="A policy; repeatable.")] = [],  # noqa: B006
    write: Annotated[
        bool, typer.Option("--write", help="Keep the verdict beside the code, for later records.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Test what a method declares about its messages: swap records; declared fields must stay equal to the bit.

    Then all clients of a protected run have twins with several sets of other records, and replies must stay equal.
    --privacy names the run's policies.

    A further trial has 6 clients, of which 3 are asked in each of 4 rounds, unless --clients and --rounds give as many.
    What a method does only for clients or in rounds beyond those, or only under other settings, is not seen.

    `all` takes every registered method, `edited` takes those without a verdict on their present source. Exit code 0
    if all declarations held, 1 if one is broken.
    """
    from fedaudit import registry
    from fedaudit.privacy.policy import parse_policy
    from fedaudit.runtime.declarations import contract, tested
    from fedaudit.setting import parse_pairs

    given = {"model": model, "clients": clients, "rounds": rounds, "privacy": dict(map(parse_policy, privacy))}
    verdicts: list[contract.MethodVerdict] = []
    for name in tested.chosen(methods):
        setting = contract.setting_for(name, set=parse_pairs(set_), **given)
        verdict = contract.check_method(setting, beyond=contract.further(setting))
        verdicts.append(verdict)
        path = tested.write(registry.find(name), verdict.entry()) if write else None
        if not as_json:
            word = "held" if verdict.held else "BROKEN"
            print_table([vars(row) for row in verdict.fields], f"{name}, source {verdict.source[:12]}: {word}")
            if path is not None:
                print(f"Kept in {path}")
    if as_json:
        rows = [
            {
                "method": v.method,
                **v.entry().model_dump(),
                "why": {r.field: r.why for r in v.fields},
                "unseen": v.unseen,
            }
            for v in verdicts
        ]
        print(json.dumps(rows, indent=1))
    else:
        for text in dict.fromkeys(verdict.unseen for verdict in verdicts):
            print(wrapped(text))
    if not all(verdict.held for verdict in verdicts):
        raise typer.Exit(1)
