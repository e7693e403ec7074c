"""FedAF and FedDM on CIFAR-10: every figure of docs/results/fedaf.md is computed again from the kept records."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from fedaudit import registry
from fedaudit.suite import published
from fedaudit.suite.suite_file import read_suite

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "benchmarks" / "studies" / "fedaf"
PAGE = ROOT / "docs" / "results" / "fedaf.md"
SPEED = ROOT / "benchmarks" / "studies" / "speed" / "records" / "cifar10" / "table1_rounds.json"
MACHINE = ("data_dir", "workers", "gpu_fraction", "ray_address")
# A row of the gate, the row that it changes, and the settings that it changes there.
GATE = {
    "base": ("-", set()),
    "unit": ("base", {"sigma_x"}),
    "plain": ("unit", {"aug_w"}),
    "joint": ("unit", {"norm"}),
    "sum": ("unit", {"lgkm_scale"}),
    "floats": ("unit", {"clamp"}),
    "views": ("floats", {"aug_w", "aug_fill", "aug_sigma"}),
    "both": ("views", {"aug"}),
}

Run = dict[str, Any]


def kept(study: str, name: str) -> Run:
    found: Run = json.loads((STUDY / "records" / study / f"{name}.json").read_text())
    return found


def gate(name: str) -> Run:
    return kept("fedaf_gate_cifar10", name)


def curve(run: Run) -> list[float]:
    """Return the test accuracy of the global model after each round, in percent."""
    assert [row["round"] for row in run["rounds"]] == list(range(1, run["rounds_done"] + 1))
    return [100 * row["global"]["accuracy"] for row in run["rounds"]]


def best_of(run: Run) -> dict[str, float]:
    found: dict[str, float] = max((row["global"] for row in run["rounds"]), key=lambda test: test["accuracy"])
    return found


def curves(method: str) -> list[list[float]]:
    return [curve(kept("fedaf_table1_cifar10", f"{method}-{seed}")) for seed in range(3)]


def figures() -> dict[str, tuple[float, float]]:
    (column,) = (c for c in published.find_table("fedaf", "1").column if c.name == "CIFAR-10, alpha 0.02")
    return column.figures


def interval(pairs: list[float]) -> str:
    """Return mean and Student's interval of three differences: 4.302653 is the quantile for two degrees of freedom."""
    mean, half = statistics.mean(pairs), 4.302653 * statistics.stdev(pairs) / 3**0.5
    return f"{mean:+.2f} [{mean - half:.2f}, {mean + half:.2f}]"


def listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


@pytest.fixture(scope="module")
def flat() -> str:
    return " ".join(PAGE.read_text().split())


@pytest.mark.parametrize("study", ["fedaf_gate_cifar10", "fedaf_table1_cifar10"])
def test_the_suite_makes_the_kept_runs(study: str) -> None:
    """Setting by setting; on a GPU the engine `auto` is `stacked`, and the record has it so."""
    cells = [cell.model_dump(mode="json") for cell in read_suite(STUDY / f"{study}.toml").cells()]
    for cell in cells:
        cell["engine"] = {"auto": "stacked"}[cell["engine"]]
    made = [{key: value for key, value in cell.items() if key not in MACHINE} for cell in cells]
    runs = [json.loads(path.read_text()) for path in sorted((STUDY / "records" / study).glob("*.json"))]
    for run in runs:
        assert made.count(run["setting"]) == 1
        commit = "7e262cd9" if run["setting"]["method"] == "fedavg" else "7085fdc"
        assert (run["commit"], run["device"], run["versions"]["torch"]) == (commit, "NVIDIA H200", "2.11.0")
    left = [cell for cell in made if cell not in [run["setting"] for run in runs]]
    assert {cell["method"] for cell in left} == (
        set(figures()) - {"fedaf", "feddm", "fedavg"} if "table1" in study else set()
    )
    assert all(cell["preset"] == "fedaf" for cell in left)


def test_the_suite_names_the_published_figures() -> None:
    text = (STUDY / "fedaf_table1_cifar10.toml").read_text()
    beside = {name: float(figure) for name, figure in re.findall(r'^method = "(\w+)"  # ([\d.]+\d)', text, re.M)}
    assert beside == {name: mean for name, (mean, _) in figures().items()}


def test_the_winner_is_the_preset_of_the_authors() -> None:
    ours = {"start": "single", "T_over": "batch", "lgkm_scale": "mean"}
    wanted = registry.find("fedaf").make(ours, "authors").model_dump(mode="json")
    for run in (gate("both"), *(kept("fedaf_table1_cifar10", f"fedaf-{seed}") for seed in range(3))):
        assert run["hyper_parameters"] == wanted


def test_the_gate_is_on_the_page(flat: str) -> None:
    """A row is another one with the named settings changed, and no other; the best went on."""
    page = PAGE.read_text()
    runs = {name: gate(name) for name in GATE}
    rows = []
    for name, (of, changed) in GATE.items():
        run, best = runs[name], best_of(runs[name])
        assert (run["status"], run["rounds_done"], run["setting"]["seed"]) == ("done", 6, 0)
        change = "-"
        if of in runs:
            had, has = runs[of]["hyper_parameters"], run["hyper_parameters"]
            assert {key for key in has if has[key] != had[key]} == changed
            change = f"{100 * (best['accuracy'] - best_of(runs[of])['accuracy']):+.2f}"
        ours = f"{100 * best['accuracy']:.2f} [{100 * best['low']:.2f}, {100 * best['high']:.2f}]"
        rows.append((f"| {name} | {of} | ", f" | {ours} | {change} | {curve(run)[-1]:.2f} |"))
    lines = page[page.index("| base | - |") :].splitlines()[: len(rows)]
    for line, (start, end) in zip(lines, rows, strict=True):
        assert line.startswith(start)
        assert line.endswith(end)
    assert max(runs, key=lambda name: best_of(runs[name])["accuracy"]) == "both"
    assert "the row with the best of them, `both`, was then run with three seeds" in flat


def test_the_seeds_are_on_the_page() -> None:
    page = PAGE.read_text()
    fedaf, feddm = curves("fedaf"), curves("feddm")
    short = [theirs[: len(ours)] for ours, theirs in zip(fedaf, feddm, strict=True)]
    methods = ("fedaf", "feddm", "fedavg")
    status = {m: {kept("fedaf_table1_cifar10", f"{m}-{s}")["status"] for s in range(3)} for m in methods}
    assert status == {"fedaf": {"running"}, "feddm": {"done"}, "fedavg": {"done"}}
    for name, of, method in (
        ("FedAF", fedaf, "fedaf"),
        ("FedDM", feddm, "feddm"),
        ("FedAvg", curves("fedavg"), "fedavg"),
        ("FedDM, the rounds that FedAF has", short, ""),
    ):
        done, told = ", ".join(str(len(one)) for one in of), "-"
        if method:
            told = "{:.2f} ± {:.2f}".format(*figures()[method])
        tops = [max(one) for one in of]
        late = listed([statistics.mean(one[-5:]) for one in of])
        ends = f"{listed([one[-1] for one in of])} | {late}"
        assert f"| {name} | {done} | {told} | {listed(tops)} | {spread(tops)} | {ends} |" in page
    rows = {
        "best round, of the rounds that both have": [max(a) - max(b) for a, b in zip(fedaf, short, strict=True)],
        "last five of the rounds that both have": [
            statistics.mean(a[-5:]) - statistics.mean(b[-5:]) for a, b in zip(fedaf, short, strict=True)
        ],
        "best round, FedDM's of all 20": [max(a) - max(b) for a, b in zip(fedaf, feddm, strict=True)],
    }
    for name, pairs in rows.items():
        seeds = " | ".join(f"{pair:+.2f}" for pair in pairs)
        assert f"| {name} | {seeds} | {interval(pairs)} |" in page


def test_the_first_screen_says_what_the_runs_have(flat: str) -> None:
    fedaf, feddm = curves("fedaf"), curves("feddm")
    tops = {"fedaf": [max(one) for one in fedaf], "feddm": [max(one) for one in feddm]}
    told = {name: "({:.2f} ± {:.2f})".format(*figures()[name]) for name in tops}
    top = flat.partition(" ## ")[0]
    assert f"CIFAR-10: FedDM {spread(tops['feddm'])} after 20 rounds {told['feddm']}" in top
    least, most = min(map(len, fedaf)), max(map(len, fedaf))
    assert f"FedAF {spread(tops['fedaf'])} after {least} to {most} of 20 {told['fedaf']}" in top
    for name, of in tops.items():
        mean, deviation = figures()[name]
        assert abs(statistics.mean(of) - mean) <= deviation, "within the published deviation"
    assert all(a > b for a, b in zip(*tops.values(), strict=True)), "above FedDM in each seed"
    assert f"which had no part in it, have 87.35 and 87.18, {tops['fedaf'][1]:.2f} and {tops['fedaf'][2]:.2f}" in flat
    pairs = [max(a) - max(b[: len(a)]) for a, b in zip(fedaf, feddm, strict=True)]
    assert f"On CIFAR-10 it is {interval(pairs)} over the rounds that both have" in top
    sigma = gate("unit")["hyper_parameters"]["sigma_x"]
    assert f"its image steps were {1 / sigma**2:.1f} times too long there" in flat
    assert f"FedAF's last {20 - most} to {20 - least} rounds on CIFAR-10" in top
    took = json.loads(SPEED.read_text())["runs"]
    whole = [sum(took[f"feddm-{seed}"]["rounds_s"]) / 60 for seed in range(3)]
    would = [20 * statistics.mean(took[f"fedaf-{seed}"]["rounds_s"]) / 60 for seed in range(3)]
    fashion = {
        name: [kept("fedaf_table1_fmnist", f"{name}-{seed}")["minutes"] for seed in range(3)]
        for name in ("fedaf", "feddm", "fedavg", "fedprox", "moon", "fedbn")
    }
    condensing = fashion.pop("fedaf") + fashion.pop("feddm")
    rivals = [minutes for of in fashion.values() for minutes in of]
    words = f"{min(condensing):.0f} to {max(condensing):.0f} minutes of FedAF or FedDM and {min(rivals):.0f} to "
    assert f"{words}{max(rivals):.0f} of a rival on Fashion-MNIST, four at a time" in flat
    said = f"FedDM took {min(whole):.0f} to {max(whole):.0f}, and FedAF would take {min(would):.0f} to {max(would):.0f}"
    assert said in flat


def test_what_the_page_says_of_the_seeds(flat: str) -> None:
    fedaf, feddm = curves("fedaf"), curves("feddm")
    done = sorted(map(len, fedaf))
    assert f"**FedAF was cut off after {done[0]} to {done[-1]} of 20 rounds**" in flat
    runs = [*(STUDY / "records").glob("fedaf_gate_cifar10/*"), *(STUDY / "records").glob("fedaf_table1_cifar10/*")]
    runs = [path for path in runs if not path.stem.startswith("fedavg")]
    made = {(r["commit"], r["versions"]["torch"]) for r in (json.loads(path.read_text()) for path in runs)}
    ((commit, torch),) = made
    told = f"{len(runs)} are of commit {commit}, four"
    assert f"all with TF32, compiled steps, torch {torch.removesuffix('.0')}. Global" in flat
    assert told in flat
    assert f"seed 1 is {max(fedaf[1]) - figures()['fedaf'][0]:.2f} above the published mean" in flat
    assert curve(gate("both")) == fedaf[0][:6]
    assert max(fedaf[0]) == fedaf[0][5]
    fallen = [max(one) - one[-1] for one in fedaf]
    words = f"From round 6 to round {len(fedaf[0])} it falls by {fallen[0]:.2f} points; seeds 1 and 2 end "
    assert f"{words}{fallen[1]:.2f} and {fallen[2]:.2f} below their best round" in flat
    unit, six = max(curve(gate("unit"))), max(feddm[0][:6])
    words = f"`unit` below is {unit:.2f} within six rounds, FedDM's {six:.2f} within six and "
    assert f"{words}{max(feddm[0]):.2f} within {len(feddm[0])}" in flat
    own, theirs = (
        run["hyper_parameters"] for run in (gate("unit"), kept("fedaf_table1_cifar10", "feddm-0"))
    )  # the one pair that differs in the unit alone
    assert {key for key in own.keys() & theirs.keys() if own[key] != theirs[key]} == {"sigma_x"}
    up = [gate(name)["up_bytes"] / 6 / 1e6 for name in ("both", "unit")]
    assert f"{up[0]:.1f} MB a round for all clients of seed 0, where 8 bits take {up[1]:.1f}" in flat


def test_what_the_page_says_of_the_gate(flat: str) -> None:
    top = {name: max(curve(gate(name))) for name in GATE}
    feddm = kept("fedaf_table1_cifar10", "feddm-0")
    six = max(curve(feddm)[:6])
    words = f"`base` is {six - top['base']:.2f} points below FedDM's best of the same six rounds, and falls to "
    assert (
        f"{words}{curve(gate('base'))[-1]:.2f}; with the step put right FedAF is {top['unit'] - six:.2f} above" in flat
    )
    sigma = gate("unit")["hyper_parameters"]["sigma_x"]
    assert f"image steps in standardised pixels (`sigma_x = {sigma}`)" in flat
    assert f"1 / {sigma}² = {1 / sigma**2:.1f} times as long" in flat
    assert f"clips its gradient at a norm of {feddm['hyper_parameters']['clip']:.0f}" in flat
    assert gate("unit")["hyper_parameters"]["eta_S"] == 1.0
    parts = [top["unit"] - top["plain"], top["views"] - top["floats"], top["both"] - top["views"]]
    words = f"{parts[0]:.2f} points for the server's as it was, {parts[1]:.2f} for the authors' way of drawing it, "
    assert f"{words}{parts[2]:.2f} for drawing it while condensing too" in flat
    assert f"(without them it is {top['unit'] - top['floats']:.2f} lower)" in flat
    assert f"Eq. 15 summed is {top['unit'] - top['sum']:.2f} lower, both within the intervals" in flat
    assert all(100 * best_of(gate(name))["high"] > top["unit"] for name in ("floats", "sum"))
    assert f"Joint statistics are {top['unit'] - top['joint']:.2f} points lower" in flat


def test_what_was_chosen_where(flat: str) -> None:
    """The settings in which the two tables' FedAF differ, and how the authors' preset differs on Fashion-MNIST."""
    cifar = kept("fedaf_table1_cifar10", "fedaf-0")["hyper_parameters"]
    fashion = kept("fedaf_table1_fmnist", "fedaf-0")["hyper_parameters"]
    published_ones = {"eta_S", "lambda_loc", "lambda_glob"}  # the paper gives them for each data set
    fashion = {"aug_fill": -1.0, "aug_sigma": 1.0, **fashion}  # that run is older than the two settings
    apart = {key for key in cifar if cifar[key] != fashion[key]} - published_ones
    assert apart == {"sigma_x", "clamp", "aug_w", "aug_fill", "aug_sigma", "aug"}
    lower = max(curve(gate("unit"))) - max(curve(gate("floats")))
    words = {"clamp": f"Fashion-MNIST; on CIFAR-10 a fact of the authors' code, {lower:.2f} lower"}
    for key in ("clamp", "aug_w", "aug"):
        assert f"| `{key}` | `{fashion[key]}` | `{cifar[key]}` | {words.get(key, 'each its own')} |" in flat
    assert f"| `sigma_x` | {fashion['sigma_x']:.0f} | {cifar['sigma_x']} |" in flat
    assert f"| black, {fashion['aug_sigma']:.0f} | the data's mean, {cifar['aug_sigma']} |" in flat
    assert f"| `{fashion['start']}`, `{fashion['lgkm_scale']}` | the same |" in flat
    assert (cifar["start"], cifar["lgkm_scale"]) == (fashion["start"], fashion["lgkm_scale"])
    ours = {"start": "single", "T_over": "batch", "lgkm_scale": "mean"}
    twin = registry.find("fedaf").make(ours, "authors-fashion-mnist").model_dump(mode="json")
    assert {key for key in twin if twin[key] != fashion[key]} == {"clamp", "aug_fill", "aug_w", "aug"}
    assert "it differs from that table's reading in four things" in flat
    near = {}
    for path in (STUDY / "records" / "fedaf_readings").glob("*.json"):
        run = json.loads(path.read_text())
        set_ = {key: value for key, value in run["setting"]["set"].items() if key.startswith("aug")}
        near[tuple(sorted(set_))] = max(curve(run)) if set_ else 0.0
    assert f"{near['aug', 'aug_w']:.2f} against {near[('aug_w',)]:.2f} on the server alone, one seed" in flat


def test_the_suite_makes_the_kept_runs_of_the_reading_on_fashion_mnist() -> None:
    """Setting by setting, and the preset is the authors' with three things set. One seed of FedDM was cut off."""
    path = STUDY / "fedaf_authors_fmnist.toml"
    made = [cell.model_dump(mode="json") | {"engine": "stacked"} for cell in read_suite(path).cells()]
    made = [{key: value for key, value in cell.items() if key not in MACHINE} for cell in made]
    runs = [json.loads(file.read_text()) for file in sorted((STUDY / "records" / "fedaf_authors_fmnist").glob("*"))]
    assert [made.count(run["setting"]) for run in runs] == [1] * 6
    assert not [cell for cell in made if cell not in [run["setting"] for run in runs]]
    told = [(run["commit"], run["status"], run["rounds_done"], run["versions"]["torch"]) for run in runs]
    later = [("8c0d7e50", "done", 20, "2.11.0"), ("8c0d7e50", "running", 18, "2.11.0")]
    assert told == [("d71ced80", "done", 20, "2.11.0")] * 4 + later
    assert "Both have been run with three seeds; seed 2 of FedDM was cut off after 18 rounds." in path.read_text()
    ours = {"start": "single", "T_over": "batch", "lgkm_scale": "mean"}
    plain = registry.find("fedaf").make({}, "authors-fashion-mnist").model_dump(mode="json")
    had = runs[0]["hyper_parameters"]
    assert {key for key in had if had[key] != plain[key]} == set(ours)
    assert [plain[key] for key in ours] == ["average", "all", "sum"]


def test_the_reading_of_cifar10_on_fashion_mnist(flat: str) -> None:
    """Every figure of the section and of the first screen, from the six records."""
    page, study = PAGE.read_text(), "fedaf_authors_fmnist"
    (column,) = (c for c in published.find_table("fedaf", "1").column if c.name == "Fashion-MNIST, alpha 0.02")
    told = column.figures
    fedaf = [curve(kept(study, f"fedaf-{seed}")) for seed in range(3)]
    feddm = [curve(kept(study, f"feddm-{seed}")) for seed in range(3)]
    tops, late = [max(of) for of in fedaf], [statistics.mean(of[-5:]) for of in fedaf]
    ends = f"{listed([of[-1] for of in fedaf])} | {listed(late)}"
    mean, deviation = told["fedaf"]
    assert f"| FedAF | {mean:.2f} ± {deviation:.2f} | {listed(tops)} | {spread(tops)} | {ends} |" in page
    best = [max(of) for of in feddm]
    ends = f"{listed([of[-1] for of in feddm])} | {listed([statistics.mean(of[-5:]) for of in feddm])}"
    cells = f"{told['feddm'][0]:.2f} ± {told['feddm'][1]:.2f} | {listed(best)} | {spread(best)} | {ends}"
    assert f"| FedDM, seed 2 with {len(feddm[2])} rounds | {cells} |" in page
    assert abs(statistics.mean(best) - told["feddm"][0]) < told["feddm"][1], "within its published deviation"
    above, off = statistics.mean(tops) - mean, interval([top - mean for top in tops])
    assert above > deviation, "outside the published deviation, upwards"
    top = flat.partition(" ## ")[0]
    assert f"On Fashion-MNIST it has {spread(tops)}, three seeds, 20 rounds. That is {above:.1f} above" in top
    assert f"upwards: {off}, which three seeds do not tell from 0." in top.replace(" points [", " [")
    assert f"it is outside the spread: {above:.1f} above the mean, where the published deviation is {deviation}" in flat
    assert (
        f"no part in any choice, have {tops[1]:.2f} and {tops[2]:.2f}. With three seeds the distance is {off}" in flat
    )
    other = [curve(kept("fedaf_table1_fmnist", f"fedaf-{seed}")) for seed in range(3)]
    gains = [a - max(b) for a, b in zip(tops, other, strict=True)]
    later = [a - statistics.mean(b[-5:]) for a, b in zip(late, other, strict=True)]
    assert (
        f"not shown to be: {interval(gains)} in the best round, {interval(later)} in the mean of the last five" in flat
    )
    assert [gain > 0 for gain in (*gains, *later)] == [False, True, True] * 2, "seed 0 lower, the others higher"
    equal = [(mine[: len(theirs)], theirs) for mine, theirs in zip(fedaf, feddm, strict=True)]
    first = [max(mine) - max(theirs) for mine, theirs in equal]
    five = interval([statistics.mean(mine[-5:]) - statistics.mean(theirs[-5:]) for mine, theirs in equal])
    published_gap = f"where {mean - told['feddm'][0]:+.2f} are published"
    assert f"is {interval(first)}** in the best of the rounds that both have, {published_gap}, and {five} in" in flat
    every = interval([max(mine) - max(theirs) for mine, theirs in zip(fedaf, feddm, strict=True)])
    short = [f"{float(number):+.1f}".replace("+-", "-") for number in re.findall(r"-?\d+\.\d+", every)]
    assert f"of all papers has {short[0]} [{short[1]}, {short[2]}], by all rounds" in flat
    assert f"in each seed, by {first[0]:.2f}, {first[1]:.2f} and {first[2]:.2f} points; three seeds do not" in flat
    assert f"and {interval(first)} in CIFAR-10's reading" in top
    assert f"With the reading of CIFAR-10 in both it is {interval(first)} there, above in each seed" in flat
    done = sorted(map(len, curves("fedaf")))
    assert f"that of CIFAR-10 (there after {done[0]} to {done[-1]} rounds)" in top
    assert f"within the published deviation after {done[0]} to {done[-1]} of 20 rounds, here it is above it" in flat
    minutes = [kept(study, f"fedaf-{seed}")["minutes"] for seed in range(3)]
    took = f"{min(minutes):.0f} to {max(minutes):.0f} minutes a seed of FedAF, "
    others = [kept(study, f"feddm-{seed}")["minutes"] for seed in range(3)]
    assert (
        f"{took}{others[0]:.0f} of FedDM; seeds 1 and 2 of FedDM are of 8c0d7e50, {others[1]:.0f} minutes each" in flat
    )
    assert round(others[1]) == round(others[2])
    cells = (ROOT / "docs" / "results" / "README.md").read_text()
    assert f"| 87.53 ± 0.32 | {spread(tops)} | 0, 1, 2 / 20 of 20" in cells
    assert f"outside the spread, in another setting: {above:.1f} above; the three seeds lie further apart" in cells
    assert f"from the published mean is {off.partition(' ')[2]} |" in cells


def test_the_times_on_the_page_on_speed() -> None:
    text = " ".join((ROOT / "docs" / "results" / "speed.md").read_text().split())
    runs = json.loads(SPEED.read_text())["runs"]
    total = {name: sum(run["rounds_s"]) for name, run in runs.items()}
    whole = [total[f"feddm-{seed}"] for seed in range(3)]
    assert f"FedDM's 20 rounds took {min(whole):.0f} to {max(whole):.0f} s with four to eight" in text
    a_round = [statistics.mean(runs[f"fedaf-{seed}"]["rounds_s"]) for seed in range(3)]
    assert f"took {min(a_round):.0f} to {max(a_round):.0f} s a round with six to eight at a time" in text
    assert f"would take {min(a_round) / 3:.0f} to {max(a_round) / 3:.0f} minutes; six rounds" in text
    six = [total[f"gate-{name}"] for name in GATE]
    assert f"took {min(six):.0f} to {max(six):.0f} s. FedAvg" in text
    fedavg = [runs[f"fedavg-{seed}"]["rounds_s"] for seed in range(3)]
    firsts, rest = [one[0] for one in fedavg], [s for one in fedavg for s in one[1:]]
    words = f"FedAvg took {min(rest):.0f} to {max(rest):.0f} s a round after a first of {min(firsts):.0f} to "
    assert f"{words}{max(firsts):.0f} s" in text
    longest = {"fedavg": fedavg[0], "fedprox": runs["fedprox-0"]["rounds_s"]}
    minutes = {name: (one[0] + 19 * statistics.mean(one[1:])) / 60 for name, one in longest.items()}
    said = f"so 20 rounds would take {minutes['fedavg']:.0f} minutes, and FedProx {minutes['fedprox']:.0f}"
    assert said in text
    assert [len(one) for one in longest.values()] == [7, 5]
    cells = (ROOT / "docs" / "results" / "README.md").read_text()
    assert f"about {minutes['fedprox']:.0f} minutes a seed of FedProx" in cells
    whole = [kept("fedaf_table1_cifar10", f"fedavg-{seed}")["minutes"] for seed in range(3)]
    assert f"beside runs of ResNet-18 FedAvg took {statistics.mean(whole):.0f}" in cells
    assert f"took {min(whole):.0f} to {max(whole):.0f} minutes instead of {minutes['fedavg']:.0f}" in text
    for name, run in runs.items():  # the times of the kept records are these
        study = "fedaf_gate_cifar10" if name.startswith("gate-") else "fedaf_table1_cifar10"
        if name.startswith(("gate-", "fedaf", "feddm")):
            assert abs(kept(study, name.removeprefix("gate-"))["minutes"] - total[name] / 60) < 0.02
            assert len(run["rounds_s"]) == kept(study, name.removeprefix("gate-"))["rounds_done"]


def test_what_the_page_says_of_fedavg(flat: str) -> None:
    """Its distance from the published figure, FedDM's lead over it seed by seed, and what a seed took."""
    fedavg, feddm = curves("fedavg"), curves("feddm")
    assert [len(one) for one in fedavg] == [20, 20, 20]
    above = interval([max(one) - figures()["fedavg"][0] for one in fedavg])
    assert f"FedAvg on CIFAR-10 is {above} from its own, which three seeds do not tell from 0" in flat
    assert f"minutes a seed, and is {above} from its published figure." in flat
    lead = [max(a) - max(b) for a, b in zip(feddm, fedavg, strict=True)]
    assert f"and by {interval(lead).removeprefix('+')} on CIFAR-10" in flat
    gap = figures()["feddm"][0] - figures()["fedavg"][0]
    each = f"by {lead[0]:.2f}, {lead[1]:.2f} and {lead[2]:.2f} points, {interval(lead)}"
    assert f"{each}, where {gap:.2f} are published" in flat
    minutes = [kept("fedaf_table1_cifar10", f"fedavg-{seed}")["minutes"] for seed in range(3)]
    assert f"FedAvg took {min(minutes):.0f} to {max(minutes):.0f} minutes a seed" in flat
