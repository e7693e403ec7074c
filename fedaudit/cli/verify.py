"""The commands `fedaudit verify` and `fedaudit seal`: for a reviewer who trusts nobody, and for an author who signs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli.options import Json, RunArgument, Trust
from fedaudit.cli.output import progress_bar, wrapped
from fedaudit.errors import SettingError

if TYPE_CHECKING:
    from fedaudit.verify.finding import Checked, Verdict

WORD: Verdict = "the author's word"


def verify(
    folder: Annotated[Path, typer.Argument(metavar="RUN|AUDIT", help="A run folder, or the folder of an audit.")],
    rerun: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of client tasks to do again, with the server's rounds.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Your seed, which chooses these tasks. Default: a new one.", show_default=False),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="The author's public key: the seal must be signed with it.", show_default=False)
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Where you keep data sets. Default: as in the run.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Number of runs at a time, each in its own process.")] = 1,
    trust: Trust = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List recomputed figures, too.")] = False,
    as_json: Json = False,
) -> None:
    """Recompute a run's figures from its folder: each is recomputed, contradicted, or the author's word.

    Exit code 0 if nothing is contradicted, 1 if something is, 2 if there is nothing to check.
    """
    from fedaudit import registry
    from fedaudit.suite.budgets import runs_below
    from fedaudit.verify.many import verify_all

    registry.trust(trust)
    if not folder.exists():
        raise SettingError(f"There is no folder {folder}. Name the folder of a run or of an audit.")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    runs = runs_below([folder])
    with progress_bar("verify") as watch:
        checked = verify_all(
            runs, jobs=jobs, trust=trust, rerun=rerun, seed=seed, key=key, data_dir=data_dir, watch=watch
        )
    if as_json:
        print(json.dumps([of.model_dump(mode="json") for of in checked], indent=1))
    else:
        _print(checked, verbose)
    if any(of.contradictions for of in checked):
        raise typer.Exit(1)


def _print(checked: Sequence[Checked], verbose: bool) -> None:
    words: dict[str, dict[str, list[str]]] = {}  # runs by reason and figure
    for of in checked:
        counts = f"{of.count('recomputed')} figures recomputed, {len(of.contradictions)} contradicted, "
        counts += f"{of.count(WORD)} the author's word"
        again = f"; {of.rerun} of {of.tasks} client tasks done again" if of.tasks else ""
        print(wrapped(f"{of.folder}: {counts}{again}"))
        for finding in of.findings:
            if finding.verdict == "contradicted" or (verbose and finding.verdict == "recomputed"):
                print(wrapped(f"  {finding.text()}"))
            elif finding.verdict == WORD:
                words.setdefault(finding.reason, {}).setdefault(finding.figure, []).append(of.folder)
    if words:
        print("The author's word:")
        for reason, figures in words.items():  # what keeps several figures from being recomputed is said once
            for runs in dict.fromkeys(tuple(of) for of in figures.values()):
                named = ", ".join(figure for figure, of in figures.items() if tuple(of) == runs)
                print(wrapped(f"  {named}: {reason}" + (f" ({len(runs)} runs)" if len(runs) > 1 else "")))
    number = sum(len(of.contradictions) for of in checked)
    print(
        f"CONTRADICTED: {number} figures are not what the folder's own files say."
        if number
        else "Nothing is contradicted."
    )


def seal(
    run: RunArgument,
    key: Annotated[
        Path | None, typer.Option(help="Your private key (Ed25519, PEM), to sign the seal.", show_default=False)
    ] = None,
    new_key: Annotated[
        Path | None, typer.Option(help="Make a key in this file first, and sign with it.", show_default=False)
    ] = None,
) -> None:
    """Seal a run folder as it is now: one digest over its files, signed if you give a key."""
    from fedaudit.runtime.run_record import read_record
    from fedaudit.runtime.seal import Seal, write_seal
    from fedaudit.verify.noise_key import told_by_folder
    from fedaudit.verify.signature import new_key as make_key
    from fedaudit.verify.signature import signed

    if key is not None and new_key is not None:
        raise SettingError("--key and --new-key: give one of them.")
    record = read_record(run)
    if record.status != "done":
        raise SettingError(f"The run in {run} is not finished, so there is nothing to seal. Finish it with --resume.")
    if new_key is not None:
        print(f"public key, for `fedaudit verify --key`: {make_key(new_key)}")
    made = Seal.of(run)
    private = key or new_key
    if private is not None:
        made = signed(made, private)
    write_seal(run, made)
    for line in told_by_folder(run, record.setting):
        print(wrapped(f"{line}."))
    print(f"seal {made.digest} over {len(made.files)} files" + (", signed" if made.signature else ", not signed"))
