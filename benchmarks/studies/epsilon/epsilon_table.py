"""Make docs/results/epsilon.md of the records beside this: how tight bounds are, how often they err, what is found.

    python benchmarks/studies/epsilon/epsilon_table.py            # print the page
    python benchmarks/studies/epsilon/epsilon_table.py --write    # write it

The figures come from the other scripts here, which write those files.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEPT, PAGE = HERE / "records", HERE.parents[2] / "docs" / "results" / "epsilon.md"
Row = dict[str, Any]


def kept(table: str) -> list[Row]:
    """The rows of one table, from whichever files hold some of them."""
    found: list[Row] = []
    for path in sorted(KEPT.glob("*.json")):
        found += json.loads(path.read_text()).get(table, [])
    return found


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def percent(row: Row) -> str:
    return f"{100 * row['rate']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def tightness() -> str:
    """The median bound over the truth, and how often it exceeded the truth."""
    rows = [*kept("bounds"), *kept("one_run")]
    names = list(dict.fromkeys(row["bound"] for row in rows))
    cases = list(dict.fromkeys((row["delta"], row["epsilon"]) for row in rows))
    by = {(row["bound"], row["delta"], row["epsilon"]): row for row in rows}
    found = []
    for delta, epsilon in cases:
        cells = []
        for name in names:
            row = by[name, delta, epsilon]
            over = "" if row["found_over_true"] is None else f"{row['found_over_true']:.2f}, "
            cells.append(f"{over}{100 * row['rate']:.1f} %")
        found.append([f"{delta:g}", f"{epsilon:g}" if epsilon else "0 (null)", *cells])
    return markdown(["delta", "epsilon", *names], found)


def worst() -> str:
    rows = [*kept("bounds"), *kept("one_run")]
    most = max(rows, key=lambda row: (row["rate"], row["bound"]))
    over = [row for row in rows if row["low"] > 0.05]
    return (
        f"The highest rate of {len(rows)} cells is {percent(most)} % ({most['bound']}, epsilon {most['epsilon']:g}, "
        f"delta {most['delta']:g}; interval of Clopper and Pearson for {most['of']} repetitions). "
        + ("In no cell does that interval lie above 5 %." if not over else f"In {len(over)} cells it lies above 5 %.")
    )


def guesses() -> str:
    """How many canaries are guessed on, and what that gives in the mean, beside half of them and all."""
    found = []
    rows = kept("guesses")
    for at in dict.fromkeys((row["canaries"], row["epsilon"]) for row in rows):
        mine = {row["way"]: row for row in rows if (row["canaries"], row["epsilon"]) == at}
        cells = [
            f"{mine[way]['mean_over_true']:.3f}, {100 * mine[way]['rate']:.2f} [{100 * mine[way]['low']:.2f}, "
            f"{100 * mine[way]['high']:.2f}] %"
            for way in mine
        ]
        found.append([at[0], f"{at[1]:g}", mine["surest"]["guesses"], *cells])
    return markdown(["canaries", "epsilon", "surest: guesses", "surest", "half", "all"], found)


def reach() -> str:
    """The mean bound for any number of guesses, as a share of the truth."""
    rows = kept("reach")
    head = ["guesses", *(str(row["guesses"]) for row in rows)]
    used = ["bound used", *(f"{row['used']:.3f}" for row in rows)]
    exact = ["largest valid bound", *(f"{row['exact']:.3f}" if "exact" in row else "" for row in rows)]
    return markdown(head, [used, exact])


def reach_in_short() -> str:
    rows, finer = kept("reach"), kept("slopes")
    used = max(rows, key=lambda row: row["used"])
    exact = max((row for row in rows if "exact" in row), key=lambda row: row["exact"])
    more = max(row["all"] - row["few"] for row in finer)
    return (
        f"The bound that audits use has its largest mean with {used['guesses']} guesses, {used['used']:.3f} of the "
        f"truth. The largest that is valid has {exact['exact']:.3f} with {exact['guesses']}, or up to {more:.4f} more "
        "with three times as many conditions"
    )


def noise() -> str:
    rows = kept("noise")
    if not rows:
        return "Not run yet."
    head = ["release", "sigma", "noise", "p < 0.05, %", "refuted (p < 0.001), %", "repetitions", "would find noise x"]
    return markdown(
        head,
        (
            [r["release"], f"{r['sigma']:g}", f"{r['noise']:g}", percent(r), percent(r["refuted"]), r["of"],
             f"{r['finds']:.2f}"]
            for r in rows
        ),
    )  # fmt: skip


def whole_runs() -> str:
    """Of honest runs and splits: how often they were accused; of broken splits: how often that was found."""
    found = []
    for r in kept("whole_runs"):
        what = r["test"] + (f", {r['regime']}" if r["regime"] else "")
        found.append([what, r["case"], percent(r), r["of"]])
    return markdown(["audit", "case", "spoke, %", "runs"], found)


SET = {"first": (0, 100), "second": (100, 200), "present": (200, 10**9)}  # seeds: which rule they were made under
WORDS = ("refuted", "suspicious", "cannot tell", "not refuted")


def runs(of: str = "present") -> list[Row]:
    low, high = SET[of]
    return [row for row in kept("sabotage") if low <= row["seed"] < high]


def sabotage(of: str = "present") -> str:
    rows = runs(of)
    if not rows:
        return "Not run yet."
    scales = sorted({row["noise"] for row in rows}, reverse=True)
    found = []
    for case in sorted({row["case"] for row in rows}):
        cells = []
        for scale in scales:
            told = [row["told"] for row in rows if row["case"] == case and row["noise"] == scale]
            cells.append("; ".join(f"{told.count(word)} {word}" for word in WORDS if word in told) or "not run")
        found.append([case, *cells])
    return markdown(["release", *(f"noise x {scale:g}" for scale in scales)], found)


def by_test() -> str:
    """Which audit found what, at half of the noise and at 0.9."""
    rows = [row for row in runs() if row["noise"] in (0.9, 0.5)]
    if not rows:
        return "Not run yet."
    found = []
    for case, scale in sorted({(row["case"], row["noise"]) for row in rows}, key=lambda at: (at[0], -at[1])):
        some = [row["tests"] for row in rows if (row["case"], row["noise"]) == (case, scale)]
        for test in dict.fromkeys(name for tests in some for name in tests):
            mine = [tests[test] for tests in some if test in tests]
            said = [row["verdict"] for row in mine]
            words = ", ".join(f"{said.count(word)} {word}" for word in WORDS if word in said)
            p = sorted(row["p"] for row in mine)[len(mine) // 2]
            finds = mine[0]["finds"]
            shown = f"{finds:.2f}" if finds is not None else ""
            found.append([case, f"{scale:g}", test, mine[0]["n"], words, f"{p:.1g}", shown])
    return markdown(["release", "noise x", "audit", "trials", "by itself", "p, median", "finds x"], found)


def spread() -> str:
    """Whether honest p-values are spread as they should be: evenly where a test is exact at its claim."""
    from scipy.stats import kstest

    found = []
    rows = [row for row in kept("sabotage") if row["noise"] == 1]
    for case in sorted({row["case"] for row in rows}):
        mine = [row for row in rows if row["case"] == case]
        shift = [
            row["tests"]["release path, Gaussian"]["p"] for row in mine if "release path, Gaussian" in row["tests"]
        ]
        residuals = [row["tests"]["residuals"]["p"] for row in mine]
        even = f"{kstest(shift, 'uniform').pvalue:.2f}" if shift else ""
        below = [sum(p < 0.05 for p in ps) for ps in (shift, residuals)]
        shifts = f"{below[0]} of {len(shift)}" if shift else ""
        found.append([case, even, shifts, f"{below[1]} of {len(residuals)}"])
    return markdown(["release", "mean shift: even, p", "mean shift: p < 0.05", "residuals: p < 0.05"], found)


def shape() -> str:
    rows = kept("shape")
    if not rows:
        return "Not run yet."
    head = ["numbers", "skewness and kurtosis, %", "Geary's ratio and signs, %", "repetitions"]
    cells = (
        [r["numbers"], *(f"{100 * r[of]['rate']:.3g}" for of in ("skewness_and_kurtosis", "geary")), r["geary"]["of"]]
        for r in rows
    )
    return markdown(head, cells)


def levels() -> str:
    """Rates of refuting what is true, of several files together."""
    from fedaudit.stats import clopper_pearson

    sums: dict[str, list[int]] = {}
    for row in kept("level"):
        of = sums.setdefault(row["test"], [0, 0, 0])
        for i, count in enumerate((row["refuted"]["wrong"], row["suspicious"]["wrong"], row["refuted"]["of"])):
            of[i] += count
    for row in kept("whole_runs"):
        if row["case"] == "true claim" and "refuted" in row:
            sums[f"{row['test']}, {row['regime']}, whole runs"] = [row["refuted"]["wrong"], row["spoke"], row["of"]]
    if not sums:
        return "Not run yet."
    found = []
    for test, (refuted, suspicious, n) in sums.items():
        shares = []
        for count in (refuted, suspicious):
            low, high = clopper_pearson(count, n)
            shares.append(f"{100 * count / n:.3g} [{100 * low:.2g}, {100 * high:.2g}]")
        found.append([test, *shares, f"{n:,}"])
    return markdown(["test", "p < 0.001, %", "p < 0.05, %", "repetitions"], found)


def coverage() -> str:
    rows = kept("coverage")
    shifts = sorted({row["shift"] for row in rows})
    by = {(row["n"], row["fpr"], row["shift"]): row for row in rows}
    found = []
    for n, fpr in dict.fromkeys((row["n"], row["fpr"]) for row in rows):
        cells = [f"{100 * by[n, fpr, s]['covered']:.1f} (width {by[n, fpr, s]['mean_width']:.3f})" for s in shifts]
        found.append([n, f"{fpr:g}", *cells])
    return markdown(["members = non-members", "FPR", *(f"means {s:g} apart" for s in shifts)], found)


def rounds() -> str:
    """AUC by attack, over all rounds and in the last: the mean over seeds, and the least and the largest."""
    rows = kept("rounds")
    found = []
    for attack in dict.fromkeys(row["attack"] for row in rows):
        mine = [row for row in rows if row["attack"] == attack]
        cells = []
        for values in ([row["auc"] for row in mine], [row["last"] for row in mine if row["last"] is not None]):
            cells.append(f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "")
        found.append([attack, *cells])
    seeds, shadows = sorted({row["seed"] for row in rows}), sorted({row["shadows"] for row in rows})
    head = markdown(["attack", "all five rounds", "last round alone"], found)
    return (
        f"{head}\n\nAUC, the mean of the seeds {', '.join(map(str, seeds))} (least to largest); {shadows[0]} shadows "
        "of each client."
    )


KINDS = {
    "embeddings": "rows", "logits": "class means", "label_counts": "counts", "soft_labels": "rows of all",
    "synthetic_images": "images", "training, serial": "DP-SGD", "training, stacked": "DP-SGD, stacked",
}  # fmt: skip
REVIEWED = (
    "clipping removed", "run only: no noise", "run only: noise x 0.5", "run only: clipping removed",
    "run only: all records in each step", "all noise in the last step", "every second step x sqrt 2",
    "steps halved in the ledger", "sample rate halved in the ledger", "grid of 0.1 sigma", "bfloat16",
    "pool of 1,000 numbers", "period of 50", "one number in 50 without", "batches of fixed size",
)  # fmt: skip


def forged() -> str:
    """What was found, by way and kind of release; of the others, what was said instead."""
    by = {(row["way"], row["kind"]): row for row in kept("forged")}
    ways = [way for way in dict.fromkeys(way for way, _ in by) if way != "honest"]
    ways.sort(key=lambda way: (REVIEWED.index(way) if way in REVIEWED else len(REVIEWED), way))
    found = []
    for way in ways:
        cells = []
        for kind in KINDS:
            row = by.get((way, kind))
            if row is None:
                cells.append("")
                continue
            many, refuted = len(row["seeds"]), row["told"].get("refuted", 0)
            rest = ", ".join(f"{n} {word}" for word, n in row["told"].items() if word != "refuted")
            cells.append(f"{refuted} of {many}" + (f" ({rest})" if rest else ""))
        tests = Counter(name for kind in KINDS if (way, kind) in by for name in by[way, kind]["by"])
        names = ", ".join(name for name, _ in tests.most_common(3))
        found.append([way, *cells, names])
    return markdown(["way", *KINDS.values(), "mostly by"], found)


def forged_in_short() -> str:
    """How many runs were found, and what was said of the others, in a sentence."""
    rows = [row for row in kept("forged") if row["way"] != "honest"]
    honest = [row for row in kept("forged") if row["way"] == "honest"]
    words = Counter(word for row in rows for word, n in row["told"].items() for _ in range(n))
    said = Counter(word for row in honest for word, n in row["told"].items() for _ in range(n))
    runs = len(
        {(row["kind"] if "training" in row["kind"] else "fields", seed) for row in honest for seed in row["seeds"]}
    )
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    return (
        f"Releases of forged runs: {sum(words.values())} (seeds {seeds[0]} to {seeds[-1]}), of which refuted: "
        f"{words['refuted']}, suspicious: {words['suspicious']}, cannot tell: {words['cannot tell']}, silent: "
        f"{words['not refuted']}. Honest runs: {runs}, with {sum(said.values())} releases, of which refuted: "
        f"{said['refuted']}, suspicious: {said['suspicious']} "
        f"({100 * said['suspicious'] / max(1, sum(said.values())):.1f} %, where 5 % are allowed). {_honest(said)}"
    )


def _honest(said: Counter[str]) -> str:
    """What refuted releases of honest runs amount to: by chance, and among all that was tested in a run."""
    from scipy.stats import binom

    (all_,), of = kept("honest_runs"), sum(said.values())
    chance = float(binom.sf(said["refuted"] - 1, of, 0.001))
    return (
        f"So {said['refuted']} honest releases were refuted by mistake. At one in 1,000, {of / 1000:.1f} are to be "
        f"expected, and as many or more have a probability of {100 * chance:.0f} %. Here each release is judged alone; "
        f"a report corrects for all fields of a run, and would have refuted {all_['refuted']} of the {all_['runs']} "
        f"honest runs and called {all_['suspicious']} suspicious."
    )


def costs() -> str:
    """Median seconds of one core: a run, and its audits."""
    rows = [row for row in kept("forged") if row["way"] == "honest"]
    found = [
        [KINDS[row["kind"]], f"{row['numbers']:,}", f"{row['run_s']:.2f}", f"{row['audit_s']:.2f}"]
        for row in rows
        if "training" in row["kind"] or row["kind"] == "embeddings"
    ]
    for row in found:
        row[0] = "all five fields" if row[0] == "rows" else row[0]
    return markdown(["release", "numbers", "run, s", "audits, s"], found)


def power() -> str:
    """Share refuted, by how many numbers there are."""
    rows = kept("power")
    sizes = sorted({row["numbers"] for row in rows})
    by = {(row["way"], row["how"], row["numbers"]): row for row in rows}
    found = []
    for way, how in dict.fromkeys((row["way"], row["how"]) for row in rows):
        found.append([way, how, *(f"{100 * by[way, how, n]['rate']:.0f}" for n in sizes)])
    return markdown(["noise", "", *(f"{n:,}" for n in sizes)], found)


def exact() -> str:
    rows = kept("exact")
    by = {
        (row["n"], row["epsilon"], row["case"].split(",")[0]): row
        for row in rows
        if row["case"] in ("corner", "Gaussian")
    }
    found = []
    for n, epsilon in dict.fromkeys((row["n"], row["epsilon"]) for row in rows):
        edges = [row for row in rows if (row["n"], row["epsilon"]) == (n, epsilon) and row["case"].startswith("edge")]
        cells = [f"{100 * max(row[of]['rate'] for row in edges):.2f}" for of in ("exact", "limits")]
        corner = by.get((n, epsilon, "corner"))
        cells += [f"{100 * corner[of]['rate']:.2f}" if corner else "" for of in ("exact", "limits")]
        gaussian = by[n, epsilon, "Gaussian"]
        cells += [f"{gaussian[of] / epsilon:.2f}" for of in ("exact_finds", "limits_find")]
        found.append([n, f"{epsilon:g}", *cells])
    head = ["n", "epsilon", "edge: exact, %", "limits, %", "corner: exact, %", "limits, %", "finds: exact", "limits"]
    return markdown(head, found)


def shift() -> str:
    rows = kept("shift")
    wrong, of = sum(row["wrong"] for row in rows), sum(row["of"] for row in rows)
    from fedaudit.stats import clopper_pearson

    low, high = clopper_pearson(wrong, of)
    cells = (
        [r["n"], f"{r['epsilon']:g}", f"{100 * r['rate']:.2f} [{100 * r['low']:.2f}, {100 * r['high']:.2f}]"]
        for r in rows
    )
    table = markdown(["n of each", "epsilon", "above the truth, %"], cells)
    return f"{table}\n\nAll together: {100 * wrong / of:.3f} [{100 * low:.3f}, {100 * high:.3f}] % of {of:,}."


REASONS = {  # of fields that no attack reads, and why
    "count": "a number of records (or of steps, which follow from it): all neighbours have the same one, so that it "
    "tells nothing of a record. Attacks with shadows read it, to train shadows of the same size.",
}
REMARKS = {
    "Critical.layers": "the gradients of a record run through layers that never leave the client, so that only its "
    "label shares can be read off a last layer",
    "Critical.types": "the names of the layers above",
    "Answered.Y": "on the images that the client's own embeddings decode to; the server has the model that answered, "
    "and with it what these answers say. A peer has not, and compares the rows",
}


def attacked() -> str:
    """Each field of each method, and the attacks that read it."""
    found: dict[tuple[str, str, str], tuple[set[str], list[str]]] = {}
    for row in kept("attacked"):
        attacks, methods = found.setdefault((row["field"], row["kind"], " ".join(row["attacks"])), (set(), []))
        attacks.update(row["attacks"])
        methods.append(row["method"])
    cells = []
    for (field, kind, _), (attacks, methods) in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        many = f"{methods[0]} and {len(methods) - 1} more" if len(methods) > 2 else ", ".join(methods)
        names = ", ".join(sorted(attacks)) or f"none: {REASONS[kind]}"
        remark = f" ({REMARKS[field]})" if field in REMARKS else ""
        cells.append([kind, field, many, names + remark])
    return markdown(["kind", "field", "methods", "attacks"], cells)


def silent(of: str = "present") -> str:
    """What a set of seeds says of the rule it was made under, in a sentence."""
    rows = runs(of)
    less = [row for row in rows if row["noise"] < 1]
    quiet = [row for row in less if row["told"] == "not refuted"]
    honest = [row for row in rows if row["noise"] == 1]
    accused, doubted = (sum(row["told"] == word for row in honest) for word in ("refuted", "suspicious"))
    where = sorted({f"{row['case']}, x {row['noise']:g}, seed {row['seed']}" for row in quiet})
    who = f" ({'; '.join(where)})" if where else ""
    also = f", suspicious: {doubted}" if of == "present" else ""
    return (
        f"Runs with less noise than promised: {len(less)}, of which silent: {len(quiet)}, that is neither refuted nor "
        f'suspicious nor "cannot tell"{who}. Honest runs: {len(honest)}, of which refuted: {accused}{also}.'
    )


TABLES: dict[str, Callable[[], str]] = {
    "tightness": tightness, "worst": worst, "guesses": guesses, "reach": reach, "reach_in_short": reach_in_short,
    "noise": noise, "sabotage": sabotage, "by_test": by_test,
    "coverage": coverage, "whole_runs": whole_runs, "silent": silent, "rounds": rounds, "spread": spread,
    "levels": levels, "shape": shape, "second": lambda: sabotage("second"), "silent_first": lambda: silent("first"),
    "silent_second": lambda: silent("second"), "forged": forged, "forged_in_short": forged_in_short, "costs": costs,
    "power": power, "exact": exact, "shift": shift, "attacked": attacked,
}  # fmt: skip

TEXT = """# Measured epsilon: how tight, how often wrong, what it finds

Made by `python benchmarks/studies/epsilon/epsilon_table.py --write` from benchmarks/studies/epsilon/records/*.json.

## Bounds

Two Gaussians, as far apart as (epsilon, delta) allows, 1,000 draws of each; one run: 1,000 canaries, each told by the
sign of such a score. In each cell the median bound over the true epsilon, and how often the bound was above the truth
(5 % are allowed), of 400 repetitions. "mu-GDP" bounds take scores for Gaussian with one variance, as a Gaussian
mechanism's are; the others take nothing for granted. One-run bounds pay for every canary being in the same run.
"Surest": guesses on as many canaries as is best for a claim of that epsilon, by their number and the claim alone.

{tightness}

{worst}

How many canaries are worth a guess depends on how many there are and on the claim, and is chosen by these alone: the
number with the largest mean bound, of those with which an attacker who is right nine times of ten, or always, could
refute the claim at one in 1,000, unless that costs more than a tenth of the bound. In each cell the mean bound over the
true epsilon, and how often it was above the truth (interval of Clopper and Pearson), of 20,000 draws at delta = 1e-5.
Canaries of whole runs and of sabotaged ones, further down, were guessed on by an earlier rule.

{guesses}

Can 1,000 canaries show .6 of an epsilon of 4 in one run? Not by the number of right guesses. The mean bound over the
truth, of 20,000 draws, for any number of guesses:

{reach}

{reach_in_short}
(epsilon_reach.py). It is a linear programme over all distributions of the number of right guesses; a larger bound would
refute, too often, a mechanism that keeps its claim. It takes a second for each value that is tried and adds a thirtieth
to what audits use in milliseconds, so audits do not use it. A bound from more than the number of right guesses is not
ruled out by this.

Two counts at a fixed threshold, by an exact test of both at once (fedaudit/epsilon/exact_counts.py), beside a limit on
each. How often a true claim is refuted at 5 %, of 20,000 draws: at the edge of the claim (the worse of two rates), and
in the corner where its demands on TPR and on TNR are both just met. "Finds": the bound at the median counts of two
Gaussians, as a share of the true epsilon; delta is 1e-5.

{exact}

The shift of means, at its own claim, of 200,000 draws each. Its p-values are exact, and 2 % are added to them:

{shift}

## Tests of noise

1,000 numbers of ten clients; noise of so many times what is promised. `float`: sent as it is. `uint8`: clamped to
[-1, 1] and rounded to 256 values, as images are; with sigma = 20 nearly every number arrives as -1 or 1, and what is
left to see of the scale is how many do not. "Would find": refuted with a probability of 99 %.

{noise}

## Audits on whole runs

FedAvg with DP-SGD on digits, two clients, one round, a run for each repetition, as epsilon_whole_runs.py makes them.
"True claim": the run is honest, and a refutation is an error. "Null": canaries without any gradient, so that every
bound above 0 is one. "Honest": a random split, "dithered": noise of at most 0.02 on the pixels of non-members; the
verdict is "the split is broken", at 99 % for the three baselines together. "Spoke": p < 0.05 in the first two cases,
which 5 % may have; 1 % of three baselines together in the third.

{whole_runs}

## At one in a thousand

A claim is refuted where p < 0.001 after correction for all audits of a run (Holm), and suspicious up to 0.05. How often
that happens to what is true: honest noise, and bounds held against exactly what two Gaussians have. Bounds that take
nothing for granted err less often than they may.

{levels}

Before these were counted, the shape of noise was tested by its skewness and kurtosis (D'Agostino and Pearson 1973),
whose approximation fails far out. Now it is Geary's ratio of the mean absolute value to the root mean square, whose
moments are exact, and the signs against the squares. Normal numbers with p < 0.0001, where 0.01 % are to have it:

{shape}

## Every way to forget noise

One field of each kind, two clients and two rounds; FedAvg with DP-SGD, each client alone or both as a stack
(epsilon_forged.py). The code was tampered with in the run; what is wrong in the release's own code is wrong in its
audit, too, and "run only" says that the audit of private training was honest. In each cell how many releases were
refuted at one in 1,000, by the residuals and the clipping of the run together. Empty: the way does not apply there. The
first {reviewed} rows are ways that earlier audits did not find.

{forged}

{forged_in_short}

All runs are of 2575f31.

Where nothing was found: 40 counts are few for noise x 0.9, for tails and for a period longer than their ten numbers,
and 800 numbers that all depend on every record ("rows of all") for noise x 0.9 and for a cut at 2 sigma.
Images travel as 256 levels, so that a grid, a format or a pool finer than a level leaves no trace in what is sent, and
half of the pixels are clamped. Of these releases an audit says that it cannot tell.

What single values and their order tell (fedaudit/epsilon/noise_values.py), by how many numbers there are: share refuted
in %, of 100 repetitions (50 for 60,000 numbers), as single-precision numbers of two clients in two rounds.

{power}

What audits cost, in seconds of one core (median of the honest runs):

{costs}

## Sabotage

Digits, three clients, two rounds; the noise is scaled where it is drawn, and the ledger goes on to claim epsilon = 1
(DP-SGD: what a noise multiplier of 1 gives). Seeds from 200 on, which nobody had looked at when the rule was set. What
a report says of a run (fedaudit/epsilon/joint_verdict.py): *refuted* at 0.001 and *suspicious* at 0.05, after Holm's
correction for its audits; else *cannot tell*, where the sharpest audit of a claim (residuals) would not find noise x
0.9 with 99 % probability at its share of 0.001; else *not refuted*.

{sabotage}

{silent}

DFRD's 60 counts and FedAF's 600 class means are too few numbers for noise x 0.9, and of FedAF's images nearly all
arrive as -1 or 1: of these an audit says that it cannot tell, unless what it found is far out.

Audit by audit, each by itself:

{by_test}

Earlier sets of seeds were held against earlier rules, which refuted at 0.05 after Holm's correction. Seeds below 100,
of which some were made again after the rule had been changed for them:

{silent_first}

Seeds from 100 to 199:

{second}

{silent_second}

The silent one was refuted by its residuals alone (p = 0.045), which hid that they could find too little, and Holm's
correction took the refutation away. Both faults are why power is now asked at the corrected level, by its own number.
Was the test at fault that refuted two of FedZGE's 20 honest runs? Of all honest runs of all sets, with the p-value of a
Kolmogorov-Smirnov test of evenness for the mean shift, which is exact at its claim (residuals are corrected by
Bonferroni, and so have larger p-values than even ones):

{spread}

## Intervals of the TPR at a low FPR

Gaussian scores; share of 2,000 intervals that hold the true TPR, where 95 % are promised. With one non-member expected
above the threshold (100, 1 %) the interval is wider than it would have to be.

{coverage}

## Membership over rounds

A server sees a client's model in every round. FedAvg on digits, three clients of some 50 records, ten epochs a round,
five rounds, all attacks as they are by default; each upload has shadows of its own (epsilon_rounds.py).

{rounds}

## Fields and attacks

Each field that clients send, and the attacks that can read it, as the server, an active server or a peer
(epsilon_attacked.py, on two rounds of every method).

{attacked}
"""


def page() -> str:
    return TEXT.format(reviewed=len(REVIEWED), **{name: make() for name, make in TABLES.items()})


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page())
