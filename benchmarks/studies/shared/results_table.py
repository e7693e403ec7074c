"""Make docs/results/README.md: published cells beside ours, from published.toml and the kept records.

python benchmarks/studies/shared/results_table.py            prints it
python benchmarks/studies/shared/results_table.py --write    writes it

A verdict is computed, never typed in, by `fedaudit.suite.published.verdict`, which says what each means: reproduced;
within the spread, in another setting; undecided (cut off, and still below); outside the spread, in another setting;
not reproduced, in the paper's own setting; both with the reason, and the control that shows it where there is one; not
run, with its cost.

An order of several seeds is by Student's interval of the differences seed by seed, and undecided where runs were cut
off. It is of the best rounds; where `published.toml` gives the order `last = N`, the verdict also says how the means of
the last N tested rounds compare. Of one seed no order is said to be reproduced or turned round: two models of one seed
do not decide between two methods. The first is above or below if the 95 % intervals of the two models are apart, and
level if they overlap; undecided where the first was cut off and may still rise.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaudit.suite import published
from fedaudit.suite.suite_file import read_suite

HERE = Path(__file__).resolve().parent
STUDIES = HERE.parent
RESULTS = HERE.parents[2] / "docs" / "results"
README = RESULTS / "README.md"

HEAD = """# Published against measured

`python benchmarks/studies/shared/results_table.py --write` makes this page from the suites,
`coverage.toml`, `published.toml` and the records under `benchmarks/studies/`; a test makes it again. The script says
what the verdicts mean. `keep_records.py` makes the records from run folders, `first_tables.py` the table at the top of
each paper's page.
`fedaudit reproduce PAPER TABLE` runs a table, as far as `--budget MINUTES` goes, and prints our figures beside the
published ones.
"""
RUNS = """## Published figures beside ours

**What these runs can show.** {whole} of the {tried} rows with runs have three seeds at a length that the paper states.
{coded} more have three seeds at the length that its authors' public code states, where our copy of the paper states
none, or only a limit. Together they stand beside {figures}. The others have fewer seeds, fewer rounds, or a length
that is ours. All are on an NVIDIA H200 that several runs shared. No setting is the paper's in every respect (the
column before the last), so no cell is "reproduced" in the sense of the papers' tables. Our figure is that of the round
that is best on the test set, unless the row says that it is the last one's. ± is the sample standard deviation over
our seeds; the published one is as the paper has it. An interval is Wilson's, for one model on 10,000 test records (95
%): it does not cover other seeds. If a default was chosen among such runs, it was chosen by test accuracy. Minutes are
the rounds of all seeds, added up, on the shared GPU. Seeds, rounds, precision, device and commit are read from the
records. If the runs of a row do not agree in one of them, the row says so for each seed, and its verdict counts that
as another setting.
"""


NOT_RUN = """## What was not run, and how long it would take

For rows on CIFAR-10 and Fashion-MNIST that nobody has run, the first rounds were timed on an NVIDIA H200, beside at
most so many other runs (`records/not_run.json`; `first_rounds.py` times them anew). A forecast is the first round and
the later ones, as many as the column says, for one seed at that load; alone a run takes less. Where no later round was
timed, each is taken to last as long as the first. They are the paper's rounds; where it gives a limit alone, as DFFKE
does, they are those of our suite. Rows on CIFAR-100, SVHN, Tiny ImageNet, Food-101 and DomainNet were not timed: these
data sets are not here.
"""


def forecast(run: dict[str, Any]) -> str:
    """Return the minutes of all rounds of a paper: the first as it was timed, the others as the later ones were.

    If no later round was timed, the first stands for each of them. Nothing is forecast of a run without any.
    """
    if not run["rounds_s"]:
        return "-"
    first, *later = run["rounds_s"]
    return f"{(first + (run['rounds'] - 1) * statistics.mean(later or [first])) / 60:.0f}"


def timed(run: dict[str, Any]) -> list[str]:
    """Return the row of a run of which some rounds were timed."""
    first, *later = run["rounds_s"] or [None]
    said = f"not ended after {run['waited_s']}" if first is None else f"{first:.0f}"
    then = f"{statistics.mean(later):.0f}" if later else "-"
    beside = str(run["beside"]) if run["beside"] else "alone"
    cells = [run["paper"], run["item"], run["row"], said, then, str(run["rounds"]), forecast(run), beside]
    return [*cells, run["commit"], run.get("note", "")]


def not_run() -> list[str]:
    """Return the table of what was not run, from the rounds that were timed."""
    head = ["paper", "table or figure", "row", "first round, s", "later ones, s", "rounds", "minutes a seed"]
    runs = json.loads((HERE / "records" / "not_run.json").read_text())["runs"]
    return [*NOT_RUN.splitlines(), "", *lines([*head, "beside", "commit", ""], list(map(timed, runs))), ""]


def read(name: str) -> dict[str, Any]:
    """Return a kept record by its name, `STUDY/RUN`; which folder of studies keeps it, its name tells."""
    found: dict[str, Any] = json.loads(record_at(name).read_text())
    return found


def record_at(name: str) -> Path:
    there = sorted(STUDIES.glob(f"*/records/{name}.json"))
    if len(there) != 1:
        sys.exit(f"published.toml names the record {name}: there are {len(there)} files */records/{name}.json.")
    return there[0]


def checked(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The record, which must be of the run that the cell means."""
    record = read(name)
    setting = {**record["setting"], "set": {k: v for k, v in record["setting"]["set"].items() if k != "host"}}
    had = record.get("hyper_parameters", {})
    setting["values"] = {key: had.get(key) for key in asked.get("values", {})}
    wrong = {key: setting[key] for key, value in asked.items() if setting[key] != value}
    if wrong:
        sys.exit(f"{record_at(name)} is not the run that published.toml asks for: it has {wrong}. Name another record.")
    return record


def rise(cell: dict[str, Any], record: dict[str, Any]) -> float:
    """Return by how many points the second half of a run's rounds raised its best figure."""
    of = cell.get("point", ""), cell.get("whose", "global")
    early = [r for r in record["rounds"] if 2 * r["round"] <= record["rounds_done"]]
    if not early:
        return math.inf
    return 100 * (best(record, *of)["accuracy"] - best({"rounds": early}, *of)["accuracy"])


def best(record: dict[str, Any], point: str = "", whose: str = "global") -> dict[str, float]:
    """Test accuracy of the round that is best on the test set, with its interval: at the end, or at a point.

    Of the clients' models (`whose`) it is the mean over the clients, on the common test set or on their own records.
    """
    if whose != "global":
        return {"accuracy": max(r[whose]["mean"] for r in record["rounds"])}
    found = (r["global_points"][point] if point else r["global"] for r in record["rounds"])
    return max(found, key=lambda test: test["accuracy"])


@dataclass(frozen=True)
class Made:
    """What made the runs of a row, as their records have it, one entry for each run."""

    seeds: tuple[int, ...]
    rounds: tuple[int, ...]
    precisions: tuple[str, ...]
    devices: tuple[str, ...]
    commits: tuple[str, ...]
    minutes: float

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> Made:
        settings = [record["setting"] for record in records]
        return cls(
            tuple(setting["seed"] for setting in settings),
            tuple(record["rounds_done"] for record in records),
            tuple({"tf32": "TF32", "float32": "float32"}.get(s["precision"], s["precision"]) for s in settings),
            tuple(record["device"] for record in records),
            tuple(record["commit"] for record in records),
            sum(record["minutes"] for record in records),
        )

    def said(self, values: Sequence[Any]) -> str:
        """Return the one value that all runs have, or that of each seed."""
        if len(set(values)) == 1:
            return str(values[0])
        return ", ".join(f"{value} (seed {seed})" for seed, value in zip(self.seeds, values, strict=True))

    def mixed(self) -> str:
        """Return in which respects the runs differ; empty if they agree."""
        kinds = {"rounds": self.rounds, "precision": self.precisions, "commit": self.commits, "device": self.devices}
        return ", ".join(name for name, values in kinds.items() if len(set(values)) > 1)

    def differs(self) -> str:
        """Return what the runs themselves have that no paper states: TF32, and that they are not of one kind."""
        tf32 = ["TF32" if set(self.precisions) == {"TF32"} else f"precision {self.said(self.precisions)}"]
        mixed = [f"the seeds differ in {self.mixed()}"] if self.mixed() else []
        return "; ".join([*(tf32 if "TF32" in self.precisions else []), *mixed])

    def text(self, planned: Any, stated: str = "") -> str:
        """Return what made the runs. `stated` says who states the planned rounds, if it is not the paper."""
        planned = f"{planned} ({stated})" if stated else planned
        seeds = ", ".join(map(str, self.seeds))
        how = f"{self.said(self.precisions)} on {self.said(self.devices)}, {self.minutes:.1f} min"
        return f"{seeds} / {self.said(self.rounds)} of {planned} / {how} / {self.said(self.commits)}"


def off(cell: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Return all that differs from the paper: what published.toml says, and what the records show."""
    return "; ".join(filter(None, (Made.of(records).differs() if records else "", cell.get("differs", ""))))


def percent(test: dict[str, float]) -> str:
    return f"{100 * test['accuracy']:.2f} [{100 * test['low']:.2f}, {100 * test['high']:.2f}]"


def verdict(cell: dict[str, Any], records: list[dict[str, Any]]) -> str:
    if not records:
        return f"not run: {cell['cost']}"
    done = min(record["rounds_done"] for record in records)
    ours = published.Ours(values(cell, records), done, rise=max(rise(cell, record) for record in records))
    why = cell.get("why", "")
    if "control" in cell:
        asked = {**cell["asked"], "set": cell["control_set"]}
        why = why.format(control=percent(best(checked(cell["control"], asked))))
    figure = (cell["mean"], cell["spread"])
    said = published.verdict(figure, ours, cell.get("rounds", 0), cell["seeds"], off(cell, records), why)
    cut = ours.rounds < cell.get("rounds", 0) and said.startswith("within")
    return f"{said}, after {span(records)} of {cell['rounds']} rounds" if cut else said


def values(cell: dict[str, Any], records: list[dict[str, Any]]) -> tuple[float, ...]:
    """The figure of each seed, in percent: of the best round, or of the last that was evaluated."""
    of = cell.get("point", ""), cell.get("whose", "global")
    first = -1 if cell.get("statistic") == "last" else 0
    return tuple(100 * best({"rounds": record["rounds"][first:]}, *of)["accuracy"] for record in records)


def figure(cell: dict[str, Any]) -> str:
    """Return a published figure as the paper has it: some have no spread."""
    return f"{cell['mean']:.2f}" + (f" ± {cell['spread']:.2f}" if cell["spread"] >= 0 else "")


def row(cell: dict[str, Any]) -> list[str]:
    records = [checked(name, cell["asked"]) for name in cell.get("records", [])]
    start = [cell["paper"], cell["table"], cell["cell"]]
    if not records:
        return [*start, cell["published"], "-", "-", f"`{cell['suite']}`", verdict(cell, records)]
    one, found = len(records) == 1, values(cell, records)
    ours = percent(best(records[0])) if one else f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}"
    if cell.get("statistic") == "last":
        assert not one, "an interval of one model is that of its best round"
        ours += " in the last round"
    made = Made.of(records).text(cell.get("rounds") or "?", cell.get("stated", ""))
    return [*start, figure(cell), ours, made, off(cell, records), verdict(cell, records)]


def ordered(order: dict[str, Any], cells: dict[str, dict[str, Any]]) -> list[str]:
    """Two cells: the published above, and what came out, by the seeds that both have, or else the first records."""
    by_seed = [
        {r["setting"]["seed"]: values(cells[key], [r])[0] for r in map(read, cells[key]["records"])}
        for key in order["cells"]
    ]
    common = sorted(by_seed[0].keys() & by_seed[1].keys())
    if len(common) > 1:
        pair = [[of[seed] for seed in common] for of in by_seed]
        means = [cells[key]["mean"] for key in order["cells"]]
        said = published.order_verdict(*means, published.order(*pair), differs(order, cells))
        told = " > ".join(f"{cells[key]['mean']:.2f}" for key in order["cells"])
        ours = [f"{statistics.mean(one):.2f} ± {statistics.stdev(one):.2f}" for one in pair]
        cut = cut_off([cells[key] for key in order["cells"]])
        if cut and not said.startswith("cannot"):
            said = f"undecided: {published.order(*pair).replace(',', ' so far,', 1)}"
        said += at_the_end(order, cells, common)
        return [order["paper"], order["table"], order["claim"], told, *ours, f"{said} ({len(common)} seeds{cut})"]
    first, second = (best(read(cells[key]["records"][0])) for key in order["cells"])
    rounds = [read(cells[key]["records"][0])["rounds_done"] for key in order["cells"]]
    asked = [cells[key].get("rounds", 0) for key in order["cells"]]
    short = rounds[0] < asked[0]  # the first may still rise
    apart = first["low"] > second["high"], first["high"] < second["low"]
    said = "above" if apart[0] else "below" if apart[1] else "level"
    brackets = ["two models of one seed"]
    if short and not apart[0]:
        said, brackets = f"undecided: {said} so far", []
    elif differs(order, cells):
        said += " in another setting"
    if any(done < of for done, of in zip(rounds, asked, strict=True)):
        brackets.append(f"{rounds[0]} and {rounds[1]} of {asked[0]} rounds")
    said += f" ({'; '.join(brackets)})"
    told = " > ".join(f"{cells[key]['mean']:.2f}" for key in order["cells"])
    return [order["paper"], order["table"], order["claim"], told, percent(first), percent(second), said]


def at_the_end(order: dict[str, Any], cells: dict[str, dict[str, Any]], seeds: list[int]) -> str:
    """Return how the means of the last tested rounds compare, seed by seed, if the order asks for so many of them."""
    if "last" not in order:
        return ""
    pair = []
    for key in order["cells"]:
        found = {r["setting"]["seed"]: r["rounds"][-order["last"] :] for r in map(read, cells[key]["records"])}
        assert all(len(found[seed]) == order["last"] for seed in seeds), "a run has fewer tested rounds"
        of = cells[key].get("point", ""), cells[key].get("whose", "global")
        each = {s: [100 * best({"rounds": [r]}, *of)["accuracy"] for r in found[s]] for s in seeds}
        pair.append([statistics.mean(each[seed]) for seed in seeds])
    return f"; in the last {order['last']} tests {published.order(*pair)}"


def cut_off(pair: list[dict[str, Any]]) -> str:
    """Return how many rounds the runs of two cells have; empty if all have the paper's."""
    records = [[read(name) for name in cell["records"]] for cell in pair]
    both = zip(pair, records, strict=True)
    if all(record["rounds_done"] >= cell.get("rounds", 0) for cell, of in both for record in of):
        return ""
    return f"; {' and '.join(map(span, records))} of {pair[0]['rounds']} rounds"


def differs(order: dict[str, Any], cells: dict[str, dict[str, Any]]) -> str:
    """What is not the paper's setting in one of the two."""
    found = (off(cells[key], [read(name) for name in cells[key].get("records", [])]) for key in order["cells"])
    return "; ".join(filter(None, found))


def lines(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


# --- what the papers' tables and figures have here ---

PAPERS = ("fedaf", "dffke", "dfrd", "fedzge", "fedfree", "inversion")
DATA = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "tinyimagenet": "Tiny ImageNet",
    "food101": "Food-101",
    "folder:.data/domainnet": "DomainNet",
}
COVERAGE = """## What of the papers is here

For each table or figure and each data set, this table names the suite that makes its runs, and the kept runs. A data
set in brackets is not the paper's and stands in its place. "Whole" means that every kept run has the paper's rounds.
"Part" means that some have fewer, or that our copy of the paper does not give the number. Kept runs may leave out
methods, columns and seeds of the table, so each method is named with its seeds. `reproduce` stands for
`fedaudit reproduce PAPER TABLE`, with the number of its columns on that data.
"""


@functools.cache
def cells_of(suite: str) -> dict[str, int]:
    """Return how many cells a suite has on each data set. A suite is NAME, or TOPIC/NAME where two have one name."""
    there = sorted(STUDIES.glob(f"{suite}.toml" if "/" in suite else f"*/{suite}.toml"))
    if len(there) != 1:
        sys.exit(f"coverage.toml names the suite {suite}, and {len(there)} files have this name: say TOPIC/NAME.")
    return dict(Counter(setting.dataset for setting in read_suite(there[0]).cells()))


@functools.cache
def kept(study: str) -> list[dict[str, Any]]:
    """Return the kept runs of a study, without those that only trained the clients of others."""
    runs = [json.loads(path.read_text()) for path in sorted(STUDIES.glob(f"*/records/{study}/*.json"))]
    starts = [start for run in runs if (start := run["setting"].get("start"))]
    return [run for run in runs if not any(start["method"] == run["setting"]["method"] for start in starts)]


@functools.cache
def tables() -> dict[str, published.Table]:
    return {table.name: table for table in published.tables()}


@functools.cache
def columns_of(paper: str, table: str) -> dict[str, int]:
    """Return how many columns of a table `fedaudit reproduce` runs on each data set."""
    found = tables()[f"{paper} {table}"]
    return dict(
        Counter(
            cell.settings[0].dataset for cell in {c.column.name: c for c in published.wanted(found, "gpu")}.values()
        )
    )


def reproduced(item: dict[str, Any], data: str) -> list[str]:
    """Return the commands that run this item on a data set."""
    paper = item["paper"].lower()
    known = tables()
    said = item.get("reproduce") or ", ".join(re.findall(r"(?<=Table )\d+", item["item"]))
    numbers = [number for number in said.split(", ") if f"{paper} {number}" in known]
    return [f"reproduce {n} ({c})" for n in numbers if (c := columns_of(paper, n).get(data))]


def runs_of(runs: list[dict[str, Any]]) -> str:
    """Return the methods of runs with their seeds."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run["setting"]["method"], set()).add(run["setting"]["seed"])
    return "; ".join(f"{name}: {', '.join(map(str, sorted(of)))}" for name, of in sorted(seeds.items()))


def rounds_of(runs: list[dict[str, Any]], planned: int) -> str:
    """Return whether runs have all of the paper's rounds, and how many they have."""
    if planned and min(run["rounds_done"] for run in runs) >= planned:
        return f"whole, {planned}"
    return f"part, {span(runs)} of {planned or '?'}"


def span(runs: list[dict[str, Any]]) -> str:
    """Return the number of rounds that runs have, from the least to the most."""
    done = sorted({run["rounds_done"] for run in runs})
    return str(done[0]) if len(done) == 1 else f"{done[0]} to {done[-1]}"


def covered(item: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a table or figure: its own data sets first, then those that stand in their place."""
    suites, studies, summaries = item.get("suites", []), item.get("records", []), item.get("summaries", {})
    for name in summaries:
        if not list(STUDIES.glob(f"*/{name}.json")):
            sys.exit(f"coverage.toml names the summary {name}, and no study has a file {name}.json.")
    runs = [run for study in studies for run in kept(study)]
    others = {data for suite in suites for data in cells_of(suite)} | {run["setting"]["dataset"] for run in runs}
    rows = []
    for data in [*item["data"], *sorted((others | set(summaries.values())) - set(item["data"]))]:
        name = DATA.get(data, data)
        there = [*reproduced(item, data), *(suite for suite in suites if data in cells_of(suite))]
        of = [run for run in runs if run["setting"]["dataset"] == data]
        told = [f"{name}.json, figures alone" for name, on in summaries.items() if on == data]
        if script := item.get("script"):
            there, told = [f"{script}.py"], ["computed, no run needed"]
        rows.append(
            [
                item["paper"],
                f"{item['item']}: {item['about']}",
                name if data in item["data"] else f"({name})",
                ", ".join(f"`{suite}`" for suite in there) or "no",
                runs_of(of) if of else "; ".join(told) or "no",
                rounds_of(of, item.get("rounds", 0)) if of else "-",
            ]
        )
    return rows


def coverage() -> list[str]:
    """Return the table of all papers' tables and figures."""
    items = tomllib.loads((HERE / "coverage.toml").read_text())["item"]
    rows = [row for item in items for row in covered(item)]
    head = ["paper", "table or figure", "data", "suite", "kept runs: seeds", "rounds"]
    own = [row for row in rows if not row[2].startswith("(")]
    run = sum(row[4] != "no" for row in own)
    count = (
        f"{len(own)} pairs of an item and a data set of the papers: {sum(row[3] != 'no' for row in own)} have a suite"
    )
    return [COVERAGE, *lines(head, rows), "", f"{count} or a script, {run} have kept runs or are computed.", ""]


def whole(cell: dict[str, Any]) -> bool:
    """Tell if a cell has three seeds or more, each with all rounds of the paper, or of its authors' code."""
    records = [read(name) for name in cell.get("records", [])]
    seeds = {record["setting"]["seed"] for record in records}
    return len(seeds) >= 3 and all(record["rounds_done"] >= cell.get("rounds", 0) > 0 for record in records)


def figures(cells: list[dict[str, Any]]) -> str:
    """Return beside how many published figures cells stand, in all and of each paper.

    A figure that several readings stand beside is one.
    """
    each = {(cell["paper"], cell["table"], cell["asked"]["dataset"], cell["mean"], cell["spread"]) for cell in cells}
    papers = Counter(paper for paper, *_ in each)
    return f"{len(each)} published figures ({', '.join(f'{paper} {n}' for paper, n in sorted(papers.items()))})"


def markdown() -> str:
    told = tomllib.loads((HERE / "published.toml").read_text())
    cells = {cell["key"]: cell for cell in told["cell"]}
    made = "seeds / rounds / precision, device, time / commit"
    head = [
        "paper",
        "table",
        "cell",
        "published, %",
        "ours, %",
        made,
        "what differs, or the suite",
        "verdict",
    ]
    pairs = ["paper", "table", "published order", "published", "ours, first", "ours, second", "verdict"]
    pages = [f"- [{path.stem}]({path.name})" for path in sorted(RESULTS.glob("*.md")) if path != README]
    tables = [*lines(head, [row(cell) for cell in told["cell"]]), "", *not_run(), "## Orders", ""]
    tables += [*lines(pairs, [ordered(order, cells) for order in told["order"]]), "", "## Pages", "", *pages]
    full = [cell for cell in told["cell"] if whole(cell)]
    coded = sum("stated" in cell for cell in full)
    tried = sum("records" in cell for cell in told["cell"])
    runs = RUNS.format(whole=len(full) - coded, coded=coded, tried=tried, figures=figures(full))
    return "\n".join([HEAD, *coverage(), *runs.splitlines(), "", *tables]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    README.write_text(markdown()) if sys.argv[1:] else print(markdown(), end="")
