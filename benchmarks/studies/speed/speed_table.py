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
# The precision of lines whose files do not tell it: attacks compute as their run did, and torch's own default, under
# which the shadows train, is TF32 in convolutions.
UNTOLD = {"decoders": "float32", "matching": "float32", "seeds_together": "tf32", "shadows": "tf32"}


def over(figures: dict[str, Any], way: str) -> str:
    """Return the way that a way is held against: the serial one of its precision, else a serial one, else the first.

    A factor over another precision is of the engine and the precision together.
    """
    ways = [name for name, values in figures.items() if isinstance(values, dict) and "round_s" in values]
    serial = [name for name in ways if name.startswith("serial")]
    same = [name for name in serial if figures[name]["precision"] == figures[way]["precision"]]
    return [*same, *serial, *ways][0]


def times(figures: dict[str, Any], way: str, part: str) -> float:
    """Return how many times as fast as the way that it is held against a way is in a part: a round, clients, server."""
    return float(figures[over(figures, way)][f"{part}_s"] / figures[way][f"{part}_s"])


def floors(folder: Path) -> dict[str, dict[str, float]]:
    """Return the least seconds of a round by line and precision, for lines whose arithmetic `arithmetic.py` counted.

    The rate of a large product of matrices on the GPU's machine follows from the line `fedavg`, which has both.
    """
    counted = json.loads((folder / "arithmetic.json").read_text())
    measured = json.loads((folder / "fedavg.json").read_text())["floor_s"]
    rates = {precision: counted["fedavg"]["flops"] / seconds for precision, seconds in measured.items()}
    return {line: {precision: of["flops"] / rate for precision, rate in rates.items()} for line, of in counted.items()}


def rows(folder: Path) -> list[str]:
    """A row for each line and each way of carrying it out."""
    found, least = [], floors(folder)
    for path in sorted(folder.glob("*.json")):
        figures: dict[str, Any] = {"floor_s": least.get(path.stem, {}), **json.loads(path.read_text())}
        for way, values in figures.items():
            if isinstance(values, dict) and "round_s" in values:
                floor = figures["floor_s"].get(values["precision"])
                cells = [PRECISIONS[values["precision"]], "" if floor is None else f"{floor:.3f}"]
                for part in ("round", "clients", "server"):
                    cells += [f"{values[f'{part}_s']:.2f}", f"{times(figures, way, part):.1f}"]
                cells += [f"{values['first_round_s']:.1f}", figures["commit"]]
            elif isinstance(values, dict) and "times" in values:
                precision = UNTOLD[path.stem]
                floor = values.get("floor_s", least.get(path.stem, {}).get(precision))
                cells = [PRECISIONS[precision], "" if floor is None else f"{floor:.3f}"]
                cells += [f"{values['s']:.2f}", f"{values['times']:.1f}", "", "", "", ""]
                cells += [f"{values['first_s']:.1f}", figures["commit"]]
            else:
                continue
            named_so = way if as_its_base(figures, way) else f"{way}, {values['step']}"
            found.append([path.stem, named_so, *cells])
    return ["| " + " | ".join(cells) + " |" for cells in found]


# What was aimed at: in words, how many times as fast, the line, which part of it, and which ways it was run.
GOALS = [
    ("FedAvg, ConvNet, a round", 6, "fedavg", "round", ("stacked", "stacked_tf32", "stacked_tf32_compiled")),
    (
        "`fedfree_cnn`, B = 10, a round",
        12,
        "fedfree_cnn",
        "round",
        ("stacked", "stacked_tf32", "stacked_tf32_compiled"),
    ),
    ("the same, the clients' training alone", 12, "fedfree_cnn", "clients", ("stacked", "stacked_tf32")),
    ("DFRD's server, second round (3.0 in TF32 on another machine)", 4, "dfrd", "server", ("stacked", "stacked_tf32")),
    ("DFFKE, first round, with its recordings", 4, "dffke", "round", ("stacked", "stacked_tf32")),
    ("64 shadows", 10, "shadows", "", ("stacked_compiled", "stacked_recorded")),
    ("three seeds of FedFree's row, over one after another", 2, "seeds_together", "", ("three_seeds",)),
]
# What was aimed at in seconds: in words, how many, the line, which figure, and which ways.
SECONDS = [
    ("FedFree's Table 1 row on CIFAR-10, one seed, a round", 2, "seeds_together", "s", ("one_seed",)),
    ("FedAF on Fashion-MNIST, 20 rounds (7e6f52ec)", 240, "whole/fedaf", "run_s", ("stacked_tf32_compiled",)),
    (
        "FedAF on CIFAR-10, `sigma_x = 0.402`, 20 rounds (7e6f52ec)",
        240,
        "whole/fedaf_cifar10",
        "run_s",
        ("stacked_bf16_compiled",),
    ),
]


def baselines(folder: Path) -> dict[str, list[str]]:
    """Return the lines that have a serial way, by the precision in which it ran."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        for way, values in json.loads(path.read_text()).items():
            if way.startswith("serial"):
                found.setdefault(PRECISIONS[values["precision"]], []).append(path.stem)
    return found


def goals(folder: Path) -> list[str]:
    """Return a row for each goal: what was aimed at, and what was measured.

    Ways that a serial one of their precision stands beside are judged apart from others, whose factor is of the engine
    and the precision together.
    """
    found = []
    for words, aim, line, part, ways in GOALS:
        figures: dict[str, Any] = json.loads((folder / f"{line}.json").read_text())
        judged: dict[str, list[tuple[float, str]]] = {}
        for way in ways:
            factor = times(figures, way, part) if part else figures[way]["times"]
            judged.setdefault(held(figures, way) if part else "", []).append((factor, way))
        said = []
        for how, these in sorted(judged.items()):
            alike = all(as_its_base(figures, way) for _, way in these)
            met = "not judged" if not alike else "met" if any(factor >= aim for factor, _ in these) else "not met"
            told = ", ".join(f"{factor:.1f} ({named(figures, way)})" for factor, way in these)
            said.append(f"{how} {met}: {told}".strip())
        found.append(f"| {words} | {aim} times | {'; '.join(said)} |")
    for words, most, line, figure, ways in SECONDS:
        figures = json.loads((folder / f"{line}.json").read_text())
        met = "met" if any(figures[way][figure] <= most for way in ways) else "not met"
        took = ", ".join(f"{figures[way][figure]:.{1 if most < 10 else 0}f} s (`{way}`)" for way in ways)
        found.append(f"| {words} | {most} s | {met}: {took} |")
    return found


def as_its_base(figures: dict[str, Any], way: str) -> bool:
    """Return whether a way stepped as the first way of its line did, where the figures say so: compiled or recorded."""
    steps = [
        values["step"]
        for values in figures.values()
        if isinstance(values, dict) and "times" in values and "step" in values
    ]
    return not steps or figures[way].get("step", steps[0]) == steps[0]


def named(figures: dict[str, Any], way: str) -> str:
    """Return a way's name, with its steps where they are not those of the way that it is held against."""
    return f"`{way}`" if as_its_base(figures, way) else f"`{way}`, in {figures[way]['step']} steps"


def held(figures: dict[str, Any], way: str) -> str:
    """Return in words what a way's time is held against."""
    base, precision = (PRECISIONS[figures[name]["precision"]] for name in (over(figures, way), way))
    return f"at equal precision ({precision})" if precision == base else f"in {precision} over serial in {base}"


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
