"""Time the first rounds of rows that nobody has run. docs/results/README.md makes its forecasts from them.

    python benchmarks/studies/shared/first_rounds.py time "eight networks" "alpha 0.1" --out first_rounds.json
    python benchmarks/studies/shared/first_rounds.py keep first_rounds.json --commit HASH

The first runs those rows of `records/not_run.json` whose paper and row contain one of the texts, each in a process of
its own and all at once. It writes a row's seconds as soon as a round ends, so that a limit loses nothing. The second
puts them in the place of those that are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

from round_seconds import each_round  # noqa: E402

KEPT = HERE / "records" / "not_run.json"
Row = dict[str, Any]


def name(row: Row) -> str:
    return f"{row['paper']}: {row['row']}"


def chosen(rows: list[Row], texts: list[str]) -> list[Row]:
    """Return the rows whose name has one of the texts in it. A text that no row has ends the program."""
    for text in texts:
        if not any(text in name(row) for row in rows):
            sys.exit(f"No row has {text!r} in its name. Choose from: {'; '.join(map(name, rows))}.")
    return [row for row in rows if any(text in name(row) for text in texts)]


def one(row: Row, rounds: int, data: str | None, device: str, file: Path) -> None:
    """Run so many rounds of a row in this process, and write the seconds of each into the file."""
    import torch

    import fedaudit

    seconds: list[float] = []

    def tell(so_far: list[float]) -> None:
        seconds[:] = so_far
        print(f"{name(row)}: round {len(seconds)} took {seconds[-1]} s", flush=True)
        _put(file, {"rounds_s": seconds, "device": where})

    where = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    whole = {"aux": 0.0, "holdout": 0.0, "validation": 0.0, "keep_weights": 1, "twins": "off", "seed": 0}
    setting = {**whole, **row["setting"], "rounds": rounds, "eval_every": rounds, "device": device}
    if data:
        setting["data_dir"] = data
    with tempfile.TemporaryDirectory() as folder:
        try:
            fedaudit.run(out=Path(folder) / "run", watch=each_round(tell), **setting)
        except Exception as e:
            why = f"ended in round {len(seconds) + 1}: {e}".splitlines()[0]
            _put(file, {"rounds_s": seconds, "device": where, "note": why})
            raise


def _put(file: Path, what: Any) -> None:
    """Write the file in one step: who reads it meanwhile finds it whole."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(what, indent=1) + "\n")
    new.replace(file)


def timed(rows: list[Row], rounds: int, limit: float, more: list[str], out: Path) -> None:
    """Run all rows at once, for at most so many seconds, and keep writing what is known of them."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(len(rows))]
        for row, file in zip(rows, files, strict=True):
            file.with_suffix(".row").write_text(json.dumps(row))
        words = [sys.executable, __file__, "one", "--rounds", str(rounds), *more]
        runs = [subprocess.Popen([*words, "--out", str(file)]) for file in files]
        ended: dict[int, float] = {}
        try:
            while len(ended) < len(runs) and time.perf_counter() - begun < limit:
                time.sleep(0.2)
                now = time.perf_counter()
                ended |= {i: now for i, run in enumerate(runs) if i not in ended and run.poll() is not None}
                _write(rows, files, begun, ended, out)
        finally:
            for run in runs:
                run.kill()
                run.wait()
        _write(rows, files, begun, ended, out)


def _write(rows: list[Row], files: list[Path], begun: float, ended: dict[int, float], out: Path) -> None:
    told = []
    for i, (row, file) in enumerate(zip(rows, files, strict=True)):
        found = json.loads(file.read_text()) if file.exists() else {"rounds_s": []}
        waited = {} if found["rounds_s"] else {"waited_s": round(ended.get(i, time.perf_counter()) - begun)}
        told.append({"paper": row["paper"], "row": row["row"], **found, **waited, "beside": len(rows) - 1})
    _put(out, told)


def kept(runs: list[Row], told: list[Row], commit: str) -> list[Row]:
    """Return the rows with the seconds that were timed anew. Notes on the seconds before are gone.

    A row in which no round ended stays as it is.
    """
    new = {name(row): row for row in told if row["rounds_s"]}
    if unknown := new.keys() - {name(row) for row in runs}:
        sys.exit(f"{KEPT.name} has no row {', '.join(sorted(unknown))}.")
    gone = ("waited_s", "note")
    return [
        row
        if name(row) not in new
        else {**{k: v for k, v in row.items() if k not in gone}, **new[name(row)], "commit": commit}
        for row in runs
    ]


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    todo = asked.add_subparsers(dest="todo", required=True)
    for verb in ("time", "one"):
        these = todo.add_parser(verb)
        these.add_argument("--rounds", type=int, default=3)
        these.add_argument("--data-dir")
        these.add_argument("--device", default="cuda")
        these.add_argument("--out", type=Path, required=True)
    todo.choices["time"].add_argument("rows", nargs="+", help="texts in the names of rows")
    todo.choices["time"].add_argument("--limit", type=float, default=500.0, help="seconds")
    keep = todo.add_parser("keep")
    keep.add_argument("file", type=Path)
    keep.add_argument("--commit", required=True)
    found = asked.parse_args(words)
    whole = json.loads(KEPT.read_text())
    if found.todo == "keep":
        told = json.loads(found.file.read_text())
        KEPT.write_text(json.dumps({**whole, "runs": kept(whole["runs"], told, found.commit)}, indent=1) + "\n")
    elif found.todo == "one":
        row = json.loads(found.out.with_suffix(".row").read_text())
        one(row, found.rounds, found.data_dir, found.device, found.out)
    else:
        more = ["--device", found.device, *(["--data-dir", found.data_dir] if found.data_dir else [])]
        timed(chosen(whole["runs"], found.rows), found.rounds, found.limit, more, found.out)


if __name__ == "__main__":
    main()
