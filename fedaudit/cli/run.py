"""The command `fedaudit run`. It has one option per field of `Setting`, and its own defaults for the digits."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from fedaudit.cli import completion
from fedaudit.cli.options import Json, Trust
from fedaudit.cli.output import print_summary, progress_bar
from fedaudit.errors import FedauditError, SettingError
from fedaudit.runtime import nursery

if TYPE_CHECKING:  # pydantic, with which settings are made, is slow to import, and --help lists this command without
    from fedaudit.setting import Setting

_SHORT = {"set", "privacy"}  # given by repeated options of their own
COMPLETED: dict[str, Any] = {
    "method": completion.methods, "dataset": completion.datasets, "public_dataset": completion.datasets,
    "model": completion.models, "server_model": completion.models, "preset": completion.presets,
    "partition": completion.partitions,
}  # fmt: skip
AS_IS = "Keep the method's own defaults on digits too, instead of settings tuned for digits."


def run(
    file: Path | None,
    from_: Path | None,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    as_is: bool,
    trust: bool,
    noise_key: Path | None,
    seeds_together: str | None,
    as_json: bool,
    set_: list[str],
    privacy: list[str],
    **options: Any,
) -> None:
    """Run one method on one data set, and write record, transcript and models to a folder.

    Options can also come from a file, TOML or a run's setting.json, or from a run (--from). The command line wins over
    the file, and the file over the defaults.
    """
    from fedaudit.setting import Setting, nested, parse_pairs, parse_value, read_values

    values: dict[str, Any] = {}
    if from_ is not None:
        if file is not None or resume:
            raise SettingError("--from runs a run's setting again, in another folder. Leave out the file and --resume.")
        values = _setting_of(from_)
        out = out or from_.parent / f"{from_.resolve().name}-again"
    if resume and out is not None and file is None and (out / "setting.json").exists():
        try:
            values = json.loads((out / "setting.json").read_text())
        except (ValueError, RecursionError, OSError) as e:
            raise SettingError(f"{out / 'setting.json'} is damaged ({e}). Name the settings again.") from None
        if not isinstance(values, dict):
            raise SettingError(f"{out / 'setting.json'} is damaged: it does not hold a table. Name the settings again.")
    of_folder = dict(values)  # the user did not type these: code that they name is imported by the rules of trust
    of_run = file is not None and file.suffix == ".json"  # a run left it: code in it needs --trust, as with --from
    if file is not None:
        values |= read_values(file)
        of_folder = dict(values) if of_run else of_folder
    given = {key: value for key, value in options.items() if value is not None}
    named_by_user = (file is not None and not of_run) or "method" in given or not values
    values |= given
    if isinstance(values.get("start"), str):
        values["start"] = parse_value(values["start"])
    for key in ("set", "privacy", "start"):
        if not isinstance(values.get(key) or {}, dict):
            raise SettingError(f"{key} = {values[key]!r} is not a table. Write [{key}] in the file.")
    values["set"] = _over(values.get("set", {}), nested(parse_pairs(set_)))
    # Before the imports that take seconds: that process has the same ones to do.
    nursery.start_for(privacy or values.get("privacy") or (), str(values.get("twins", "auto")))
    if privacy:
        from fedaudit.privacy.policy import parse_policy

        values["privacy"] = {**values.get("privacy", {}), **dict(parse_policy(text) for text in privacy)}
    if named_by_user and file is None and not as_is:
        values = _first_run(values)
    setting = Setting.make(**values)
    from fedaudit import registry
    from fedaudit.runtime.code_digest import outside_code
    from fedaudit.runtime.folder import default_folder
    from fedaudit.runtime.runner import run as run_setting

    folder = out or default_folder(setting)
    seeds = None if seeds_together is None else _seeds(seeds_together, setting, given, noise_key)
    registry.trust(trust)
    by_folder = not named_by_user or bool(outside_code(of_folder, but=given))
    named_in = from_ or (file.parent if file is not None and of_run else folder)
    source = registry.read_from(named_in) if by_folder else contextlib.nullcontext()
    try:
        with source, progress_bar(f"{setting.method} on {setting.dataset}") as watch:
            if seeds is not None:
                from fedaudit.runtime.seeds_together import run_seeds

                folders = [folder.with_name(f"{folder.name}-{seed}") for seed in seeds]
                records = run_seeds(setting, seeds, out=folders, resume=resume, watch=watch, overwrite=overwrite)
            else:
                folders = [folder]
                records = [
                    run_setting(
                        setting, out=folder, resume=resume, watch=watch, overwrite=overwrite, noise_key=noise_key
                    )
                ]
    except Exception as e:
        _say_ways_on(folder, str(e))
        raise
    except KeyboardInterrupt:
        words = shlex.join(["fedaudit", "run", "--out", str(folder), "--resume"])
        how = "the same command with --resume" if seeds is not None else f"`{words}`"
        print(f"stopped; {how} goes on from the last whole round", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json and seeds is not None:
        print(json.dumps([record.model_dump(mode="json") for record in records], indent=1))
    elif as_json:
        print(records[0].model_dump_json(indent=1))
    else:
        for record, place in zip(records, folders, strict=True):
            print_summary(record)
            print(f"Everything is in {place}")


def _seeds(text: str, setting: Setting, given: dict[str, Any], noise_key: Path | None) -> list[int]:
    """Return the seeds of `--seeds-together 0,1,2`."""
    from fedaudit.setting import Setting

    if "seed" in given or noise_key is not None:
        other = "--seed" if "seed" in given else "--noise-key"
        raise SettingError(f"{other} is for one run, and --seeds-together {text} names several. Leave one of them out.")
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingError(f"--seeds-together {text}: write the seeds with commas between, for example 0,1,2.")
    return [Setting.make(**{**setting.model_dump(), "seed": int(part)}).seed for part in parts]


def _setting_of(folder: Path) -> dict[str, Any]:
    """Return the setting of a run: that of its record, which is the one of its last round, or that of setting.json."""
    from fedaudit.runtime.run_record import read_record
    from fedaudit.setting import read_values

    if not folder.is_dir():
        raise SettingError(f"--from {folder}: there is no such folder. Name the folder of a run.")
    if (folder / "record.json").is_file():
        return read_record(folder).setting.model_dump()
    return read_values(folder / "setting.json")


def _say_ways_on(folder: Path, error: str) -> None:
    """Print what can be done with the folder of a run that has just failed, unless the error has said it."""
    from fedaudit.runtime.folder import ways_on
    from fedaudit.runtime.run_record import read_record

    with contextlib.suppress(FedauditError):
        there = "--overwrite" not in error and (folder / "record.json").is_file()
        if there and read_record(folder).status == "running":
            print(ways_on(folder), file=sys.stderr)


def _first_run(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with settings tuned for the embedded digits, if the user did not say how to train.

    The settings added are printed, and the record holds them as if they had been typed."""
    from fedaudit import registry
    from fedaudit.setting import Setting

    name = values.get("method", Setting.model_fields["method"].default)
    if values.get("dataset", "digits") != "digits" or ":" in name:
        return values
    cls: Any = registry.find(name)
    more: dict[str, Any] = {}
    if cls.needs_public and not values.get("public") and not values.get("public_dataset"):
        more["public"] = 0.2
    if cls.on_digits and not values["set"] and values.get("preset") is None:
        more["set"] = dict(cls.on_digits)
    if more:
        print(
            f"No --set given: using settings tuned for digits: {', '.join(f'{k} = {v}' for k, v in more.items())} "
            "(--as-is leaves them out)",
            file=sys.stderr,
        )
    return {**values, **more}


def _over(table: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the file's table with the command line's values over it. Inner tables are merged key by key."""
    merged = dict(table)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _run_signature() -> inspect.Signature:
    """Return the command's signature: one option per field of `Setting`, with the description that stands there."""
    from fedaudit.setting import Setting

    def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    setting_file = typer.Argument(
        metavar="[SETTING.toml]", help="A file with settings, or a run's setting.json.", show_default=False
    )
    set_option = typer.Option("--set", metavar="NAME=VALUE", help="A hyper-parameter of the method; repeatable.")
    privacy_option = typer.Option(
        "--privacy", metavar="KIND:...", help="A policy, such as training:eps=8,clip=1; repeatable."
    )
    parameters = [
        keyword("file", Annotated[Path | None, setting_file], None),
        keyword(
            "out",
            Annotated[Path | None, typer.Option(help="The run folder, for all that is written.", show_default=False)],
            None,
        ),
        keyword(
            "from_",
            Annotated[
                Path | None,
                typer.Option(
                    "--from", help="Run the setting of this run again, to RUN-again if no --out.", show_default=False
                ),
            ],
            None,
        ),
        keyword(
            "overwrite",
            Annotated[bool, typer.Option("--overwrite", help="Start anew in the folder of an unfinished run.")],
            False,
        ),
        keyword("resume", Annotated[bool, typer.Option("--resume", help="Go on from the last whole round.")], False),
        keyword("as_is", Annotated[bool, typer.Option("--as-is", help=AS_IS)], False),
        keyword("trust", Trust, False),
        keyword(
            "noise_key",
            Annotated[Path | None, typer.Option(help="Another run's noise.key: the same noise.", show_default=False)],
            None,
        ),
        keyword(
            "seeds_together",
            Annotated[
                str | None,
                typer.Option(
                    metavar="N,N,...",
                    help="Run these seeds side by side, their clients as one stack, each in OUT-SEED.",
                    show_default=False,
                ),
            ],
            None,
        ),
        keyword("as_json", Json, False),
        keyword("set_", Annotated[list[str], set_option], []),
        keyword("privacy", Annotated[list[str], privacy_option], []),
    ]
    for name, field in Setting.model_fields.items():
        if name in _SHORT:
            continue
        kind: Any = field.annotation
        if get_origin(kind) is Literal:
            kind = str
        elif type(None) in get_args(kind):
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
            kind = str if get_origin(kind) is dict else kind  # a table, as TOML writes it
        shown = False if field.default is None else str(field.default)
        words = COMPLETED.get(name)
        option = typer.Option(help=_sentence(field.description or ""), show_default=shown, autocompletion=words)
        parameters.append(keyword(name, Annotated[kind | None, option], None))
    return inspect.Signature(parameters)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else ""


@functools.cache
def give_options() -> None:
    """Give the command its options. Until then it has none that typer could read."""
    signature = _run_signature()
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
