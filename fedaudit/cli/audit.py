"""The commands `fedaudit attack` and `fedaudit audit`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaudit.cli import completion
from fedaudit.cli.options import Json, RunArgument, SeedsTogether, Trust
from fedaudit.cli.output import chosen_clients, print_forecast, print_table, progress_bar, wrapped
from fedaudit.cli.show import show_audit
from fedaudit.errors import SettingError, unknown

if TYPE_CHECKING:
    from fedaudit.suite.beside import Beside
    from fedaudit.suite.cell import Cell


def attack(
    run: RunArgument,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="An attack's name; repeatable. Default: all.", autocompletion=completion.attacks),
    ] = None,
    set_: Annotated[list[str], typer.Option("--set", metavar="[ATTACK.]NAME=VALUE", help="An attack's setting.")] = [],  # noqa: B006
    threat: Annotated[
        str, typer.Option(help="server, active-server, peer:k or outsider.", autocompletion=completion.threats)
    ] = "server",
    client: Annotated[str, typer.Option(help="all, or a client's number.")] = "all",
    again: Annotated[
        bool, typer.Option("--rescore", help="Attack nothing; score and judge again what earlier attacks kept.")
    ] = False,
    trust: Trust = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="All figures, and why an attack did not run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Attack what crossed the wire in a run, and score the attacks with intervals."""
    from fedaudit import registry
    from fedaudit.attack.attack_run import attack_run, rescore
    from fedaudit.cli.attack_lines import print_attacks
    from fedaudit.registry import names
    from fedaudit.setting import parse_pairs
    from fedaudit.stored_model import plain

    registry.trust(trust)
    clients = chosen_clients(client)
    chosen = _with_settings(attack or names("attacks"), parse_pairs(set_))
    if again:
        if attack or set_ or client != "all":
            raise SettingError("--rescore scores everything that was kept. Leave out --attack, --set and --client.")
        results = rescore(run)
    else:
        with progress_bar("attacks") as watch:
            results = attack_run(run, attacks=chosen, threat=threat, clients=clients, watch=watch)
    if as_json:
        print(json.dumps(plain(results), indent=1))
    else:
        print_attacks(results, verbose)


def _with_settings(attacks: list[str], pairs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attacks with their settings. `NAME=VALUE` needs a single attack; `ATTACK.NAME=VALUE` names one."""
    tables: dict[str, dict[str, Any]] = {name: {"attack": name} for name in attacks}
    for key, value in pairs.items():
        name, dot, setting = key.rpartition(".")
        if not dot and len(attacks) == 1:
            name = attacks[0]
        if name not in tables:
            raise SettingError(
                f"--set {key}=... does not name an attack. Write --set ATTACK.{setting}=..., with ATTACK from "
                f"{', '.join(attacks)}."
            )
        tables[name][setting] = value
    return list(tables.values())


def audit(
    suite: Annotated[
        Path | None, typer.Argument(help="A suite file. Default: the quickstart.", show_default=False)
    ] = None,
    shipped: Annotated[
        str | None,
        typer.Option("--suite", help="A suite of fedaudit's own: quickstart, or all (methods).", show_default=False),
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="With --suite all: run only cells of which no record is kept.")
    ] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Run the suite of this audit again.", show_default=False)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="With --beside: your method, as for `fedaudit run`.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="With --method: its hyper-parameters.")
    ] = [],  # noqa: B006
    beside: Annotated[
        str | None,
        typer.Option(help="Set --method beside the kept records of this suite: all.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --beside: one seed, unprotected, without attacks that take long.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --beside: run methods again whose records other code made.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder for runs and report.")] = Path("audit"),
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Number of runs at a time, each in its own process.")] = 1,
    engine: Annotated[
        str | None, typer.Option(help="auto | serial | stacked | ray, for all runs.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List cells, bytes and time, and run nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run every cell again, finished or not.")] = False,
    keep_stale: Annotated[
        bool, typer.Option("--keep-stale", help="Keep finished cells that another version of the code made.")
    ] = False,
    seeds_together: SeedsTogether = False,
    trust: Trust = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --dry-run: time a round of each kind.")] = False,
    on: Annotated[str, typer.Option(help="here | ray: cells as processes, or as tasks of a Ray cluster.")] = "here",
    ray_address: Annotated[
        str | None, typer.Option(help="With --on ray: the cluster. Default: one on this machine.", show_default=False)
    ] = None,
) -> None:
    """Run a whole suite, attack its runs, and write a report. Finished cells are not repeated, also after a kill.

    Exit code 0 if every cell succeeded and every budget was kept, 1 if not, 2 if the suite is not valid.
    """
    from fedaudit import registry
    from fedaudit.suite.suite_file import read_suite, saved_suite
    from fedaudit.suite.suite_file import shipped as shipped_suite

    registry.trust(trust)
    compared: Beside | None = None
    if beside is None and (set_ or quick or fresh):
        raise SettingError("--set, --quick and --fresh go with --method and --beside only. A suite file has `set`.")
    if shipped is not None:
        if suite is not None or from_ is not None:
            raise SettingError(f"--suite {shipped} names a suite already: leave out the suite file and --from.")
        suite = shipped_suite(shipped)
    if missing and shipped is None:
        raise SettingError("--missing goes with --suite all, whose records are kept.")
    if from_ is not None:
        if suite is not None or out.resolve() == from_.resolve():
            raise SettingError(f"--from {from_} runs its suite again: name no suite file, and another folder as --out.")
        with registry.read_from(from_):
            what = saved_suite(from_)
    elif beside is not None or method is not None:
        compared = _beside(beside, method, set_, suite, quick=quick, fresh=fresh)
        what = compared.suite
    elif missing and shipped is not None:
        from fedaudit.suite.beside import without_kept

        what = without_kept(shipped)
    else:
        what = read_suite(suite)
    if dry_run:
        _forecast(what, out, jobs, engine, measure, seeds_together, force=force, keep_stale=keep_stale)
        return
    from fedaudit.reports.report import write_report
    from fedaudit.suite.scheduler import audit as audit_suite

    try:
        with progress_bar("audit", remaining=False) as watch:
            cells = audit_suite(
                what, out, watch, jobs, engine, force=force, keep_stale=keep_stale, on=_where(on, ray_address),
                ray_address=ray_address, report=True, trust=trust, seeds_together=seeds_together,
            )  # fmt: skip
            pages = write_report(out)  # it also lists the cells that failed, as the audit noted them
    except KeyboardInterrupt:
        print("stopped; the same command goes on from each run's last whole round", file=sys.stderr)
        raise typer.Exit(130) from None
    errors = {str(cell.folder): cell.error for cell in cells if cell.error}
    for cell in cells:
        if cell.again is not None:
            print(f"run again: {cell.folder}: {cell.again}")
    _say_not_compared(cells)
    refused = Counter(f"{c.setting.method}: {c.reason}" for c in cells if c.status == "refused")
    for reason, number in refused.items():
        print(f"does not apply ({number} cells): {reason}")
    for folder, error in errors.items():
        print(f"failed: {folder}: {error}", file=sys.stderr)
    show_audit(out, as_json=False)
    kept = _budgets_kept(what, [cell.folder for cell in cells if cell.status == "done"])
    print(f"The report is in {pages[0]}")
    if compared is not None and method is not None:
        from fedaudit.cli.method_place import say_place

        say_place(compared, method, out)
    if errors or not kept:
        raise typer.Exit(1)


def _beside(
    beside: str | None, method: str | None, pairs: list[str], suite: Path | None, *, quick: bool, fresh: bool
) -> Beside:
    """Return what `--method` and `--beside` ask for."""
    from fedaudit.setting import nested, parse_pairs
    from fedaudit.suite.beside import beside as beside_suite

    if beside is None or method is None:
        raise SettingError("--method and --beside go together: --method MINE --beside all.")
    if suite is not None:
        raise SettingError(f"--beside {beside} is a suite itself: leave out {suite}, or --suite.")
    return beside_suite(beside, method, nested(parse_pairs(pairs)), quick=quick, fresh=fresh)


def _where(on: str, ray_address: str | None) -> Any:
    if on not in ("here", "ray"):
        raise SettingError(unknown("place for cells", on, ("here", "ray")))
    if ray_address is not None and on != "ray":
        raise SettingError("--ray-address is for --on ray only. Add --on ray, or leave the address out.")
    return on


def _forecast(
    suite: Any, out: Path, jobs: int, engine: str | None, measure: bool, seeds_together: bool, **how: bool
) -> None:
    from fedaudit.suite.forecast import forecast
    from fedaudit.suite.scheduler import make_cells

    cells = make_cells(suite, out, engine, seeds_together)
    print_forecast(forecast(cells, measure, **how), jobs)
    _say_not_compared(cells)


def _say_not_compared(cells: list[Cell]) -> None:
    """Print once how many cells count though nobody can tell whether today's code made them."""
    from fedaudit.runtime.code_digest import NOT_COMPARED

    if number := sum(cell.not_compared for cell in cells):
        print(wrapped(f"kept ({number} cells): {NOT_COMPARED}. --force runs them again."))


def _budgets_kept(suite: Any, runs: list[Path]) -> bool:
    if not suite.budgets:
        return True
    from fedaudit.suite.budgets import check_budgets

    outcomes = check_budgets(suite.budgets, runs, "budgets of the suite")
    print_table([outcome.row() for outcome in outcomes], "budgets")
    for outcome in outcomes:
        if not outcome.kept:
            print(outcome.message())
    return all(outcome.kept for outcome in outcomes)
