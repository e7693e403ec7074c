"""The tables of docs/results/speed.md, from what `benchmarks/gpu_speed.py --out FOLDER` left.

python benchmarks/studies/speed/speed_table.py [FOLDER]          # default: what is kept beside this file
python benchmarks/studies/speed/speed_table.py --write           # puts them into the page
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = ["line", "carried out", "precision", "floor, s", "a round, s", "times", "clients, s", "times"]
HEAD += ["server, s", "times", "first round, s", "commit"]
# A setting's precision as the page writes it.
PRECISIONS = {"float32": "float32", "tf32": "TF32", "bf16": "bf16"}


def rows(folder: Path) -> list[str]:
    """A row for each line and each way of carrying it out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        figures: dict[str, Any] = json.loads(path.read_text())
        for way, values in figures.items():
            if isinstance(values, dict) and "round_s" in values:
                parts = [(values[f"{part}_s"], values[f"{part}_times"]) for part in ("round", "clients", "server")]
                cells = [text for seconds, times in parts for text in (f"{seconds:.2f}", f"{times:.1f}")]
                floor = figures.get("floor_s", {}).get(values["precision"])
                cells = [PRECISIONS[values["precision"]], "" if floor is None else f"{floor:.3f}", *cells]
                found.append([path.stem, way, *cells, f"{values['first_round_s']:.1f}", figures["commit"]])
            elif isinstance(values, dict) and "times" in values:
                seconds, times, first = values["s"], values["times"], values["first_s"]
                floor = f"{values['floor_s']:.3f}" if "floor_s" in values else ""
                found.append(
                    [
                        path.stem,
                        way,
                        "",
                        floor,
                        f"{seconds:.2f}",
                        f"{times:.1f}",
                        "",
                        "",
                        "",
                        "",
                        f"{first:.1f}",
                        figures["commit"],
                    ]
                )
    return ["| " + " | ".join(cells) + " |" for cells in found]


# What was aimed at: in words, how many times as fast, the line, which of its figures, and which ways it was run.
GOALS = [
    ("FedAvg, ConvNet, a round", 6, "fedavg", "round_times", ("stacked_tf32_compiled", "stacked_tf32", "stacked")),
    (
        "`fedfree_cnn`, B = 10, a round",
        12,
        "fedfree_cnn",
        "round_times",
        ("stacked", "stacked_tf32", "stacked_tf32_compiled"),
    ),
    ("the same, the clients' training alone", 12, "fedfree_cnn", "clients_times", ("stacked", "stacked_tf32")),
    ("DFRD's server", 4, "dfrd", "server_times", ("stacked_tf32", "stacked")),
    ("DFFKE, a round", 4, "dffke", "round_times", ("stacked_tf32", "stacked")),
    ("64 shadows", 10, "shadows", "times", ("stacked_compiled", "stacked_recorded")),
    ("three seeds of FedFree's row, over one after another", 2, "seeds_together", "times", ("three_seeds",)),
]


def baselines(folder: Path) -> dict[str, list[str]]:
    """Return the lines that have a way `serial`, by the precision in which it ran."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        precision = json.loads(path.read_text()).get("serial", {}).get("precision")
        if precision is not None:
            found.setdefault(PRECISIONS[precision], []).append(path.stem)
    return found


def goals(folder: Path) -> list[str]:
    """Return a row for each goal: what was aimed at, and what was measured.

    Ways in the precision of the line's way `serial` are judged apart from ways in another, whose factor is of the
    engine and the precision together.
    """
    found = []
    for words, aim, line, figure, ways in GOALS:
        path = folder / f"{line}.json"
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        base = figures.get("serial", {}).get("precision")
        judged: dict[str, list[str]] = {}
        for way in ways:
            if figure in figures.get(way, {}):
                judged.setdefault(over(base, figures[way].get("precision")), []).append(way)
        said = []
        for how, these in sorted(judged.items()):
            met = "met" if any(figures[way][figure] >= aim for way in these) else "not met"
            times = ", ".join(f"{figures[way][figure]:.1f} (`{way}`)" for way in these)
            said.append(f"{how} {met}: {times}".strip())
        found.append(f"| {words} | {aim} times | {'; '.join(said) or 'not measured'} |")
    return found


def over(base: str | None, precision: str | None) -> str:
    """Return in words what a way's time is held against; nothing for a line without a way `serial`."""
    if base is None or precision is None:
        return ""
    if precision == base:
        return f"at equal precision ({PRECISIONS[base]})"
    return f"in {PRECISIONS[precision]} over `serial` in {PRECISIONS[base]}"


SOAK = ["line", "rounds", "recordings", "s", "host, kB a round", "GPU, kB a round", "threads", "files", "idle, GB"]


def soak(folder: Path) -> list[str]:
    """Return a row for each line of `benchmarks/gpu_soak.py` that reads memory."""
    found = []
    for path in sorted(folder.glob("*.json")):
        figures: dict[str, Any] = json.loads(path.read_text())
        if "judged" in figures:
            slope = figures["slopes_a_round"]
            cells = [path.stem, figures["rounds"], figures["recordings"], f"{figures['seconds']:.0f}"]
            host = f"{slope['host'] / 1e3:.0f}" if "host" in figures["judged"] else "settling"
            cells += [host, f"{slope['allocated'] / 1e3:.1f}"]
            cells += [f"{slope[name] + 0.0:.2f}" for name in ("threads", "files")]
            found.append("| " + " | ".join(str(cell) for cell in [*cells, f"{figures['most_idle'] / 1e9:.1f}"]) + " |")
    return [line.replace("-0.00", "0.00").replace("| -0.0 |", "| 0.0 |") for line in found]


WAYS = ["serial eager", "one by one", "streams", "streams, channels last", "streams, channels last, free", "grouped"]
WAYS += ["grouped, free", "streams, channels last, compiled", "grouped, compiled"]
RESNETS = ["network", "batch", "precision", "floor", *WAYS]


def resnets(folder: Path) -> list[str]:
    """Return a row for each case of `benchmarks/gpu_resnets.py`: a step's milliseconds, and times over serial eager."""
    found = []
    for path in sorted(folder.glob("*.json")):
        figures: dict[str, Any] = json.loads(path.read_text())
        arch, batch, precision = path.stem.rsplit("_", 2)
        serial = figures[WAYS[0]]
        said = [f"{figures[way]:.1f} ({serial / figures[way]:.1f})" if way in figures else "" for way in WAYS[1:]]
        cells = [f"`{arch}`", batch, precision.replace("tf", "TF"), f"{figures['floor']:.1f}", f"{serial:.1f}", *said]
        found.append("| " + " | ".join(cells) + " |")
    return found


def tables(folder: Path) -> dict[str, list[str]]:
    """By their first line."""
    first = "| " + " | ".join(HEAD) + " |"
    found = {first: ["|" + "---|" * len(HEAD), *rows(folder)], GOALS_HEAD: ["|---|---|---|", *goals(folder)]}
    if (folder / "soak").exists():
        found["| " + " | ".join(SOAK) + " |"] = ["|" + "---|" * len(SOAK), *soak(folder / "soak")]
    if (folder / "resnets").exists():
        found["| " + " | ".join(RESNETS) + " |"] = ["|" + "---|" * len(RESNETS), *resnets(folder / "resnets")]
    return found


GOALS_HEAD = "| | aimed at | measured |"


def write(page: Path, folder: Path) -> None:
    lines, found = page.read_text().split("\n"), tables(folder)
    for head, body in found.items():
        begin = end = lines.index(head) + 1
        while lines[end].startswith("|"):
            end += 1
        lines[begin:end] = body
    page.write_text("\n".join(lines))


def main() -> None:
    here = Path(__file__).resolve()
    kept = here.with_name("records")
    if sys.argv[1:] == ["--write"]:
        write(here.parents[3] / "docs" / "results" / "speed.md", kept)
        return
    for head, body in tables(Path(sys.argv[1]) if len(sys.argv) > 1 else kept).items():
        print("\n".join([head, *body, ""]))


if __name__ == "__main__":
    main()
