"""The figures of docs/results/dfrd.md are those of the kept runs beside it, and what it says of them holds."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest
import torch
from pages import RESULTS, STUDIES, of_study, script

from fedaudit import registry
from fedaudit.methods.datafree._generator import Generator
from fedaudit.methods.datafree.dfrd import DFRD
from fedaudit.suite.suite_file import read_suite


def table():
    return script("dfrd_table")


def kept(name):
    return json.loads(of_study(name).read_text())


@pytest.mark.parametrize("name", sorted(path.name for path in STUDIES.glob("dfrd/dfrd_*.json")))
def test_every_row_is_a_kept_run(name):
    text = (RESULTS / "dfrd.md").read_text()
    rows = table().page(kept(name))
    assert rows
    for row in rows:
        assert row in text, f"python benchmarks/studies/dfrd/dfrd_table.py --page benchmarks/studies/dfrd/{name}"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 8, 8), "-90 for an untrained generator at 8 x 8"),
        ((1, 28, 28), "-320 at 28 x 28"),
        ((3, 32, 32), "-620 at 3"),
    ],
)
def test_what_the_page_says_of_eq_4_as_printed(shape, words):
    """The exponent with plain norms, batches of 64, mean of three untrained generators."""
    assert words in (RESULTS / "dfrd.md").read_text()
    exponents = []
    for seed in range(3):
        torch.manual_seed(seed)
        G = Generator("mul", 100, shape, 10, 32)
        with torch.no_grad():
            h = G.h(torch.randn(64, 100), torch.randint(10, (64,)))
            s = G(h).flatten(1)
            exponents.append(-(torch.cdist(s, s) * torch.cdist(h, h)).mean().item())
    assert sum(exponents) / 3 == pytest.approx(float(words.split()[0]), rel=0.1)


def test_what_the_page_says_of_fine_tuning():
    names = ("eta_d", "statistics")
    runs = {(run["method"], *map(run["set"].get, names)): run for run in kept("dfrd_factors.json")}

    def lost(*key):
        return [100 * (at["before"]["accuracy"] - at["test"]["accuracy"]) for at in runs["fedavg+dfrd", *key]["rounds"]]

    assert [round(points) for points in lost(0.01, "synthetic")[2:]] == [18, 10]
    assert [round(points) for points in lost(0.01, "host")[2:]] == [13, 1]
    assert max(lost(0.001, "host")) < 1.45
    alone, tuned = runs["fedavg", None, None], runs["fedavg+dfrd", 0.001, "host"]
    end = [run["rounds"][-1]["test"]["accuracy"] for run in (alone, tuned)]
    assert 100 * (end[0] - end[1]) < 1


def test_what_the_page_says_of_fine_tuning_on_fashion_mnist():
    def told(run):
        return {name: value for name, value in run["set"].items() if name != "host"}

    def run_of(method, **values):
        (found,) = [
            r for r in kept("dfrd_fmnist.json") if r["method"] == method and (method == "fedavg" or told(r) == values)
        ]
        return found["rounds"]

    def gained(rounds):
        return [100 * (at["test"]["accuracy"] - at["before"]["accuracy"]) for at in rounds]

    alone, default = run_of("fedavg"), run_of("fedavg+dfrd", weighting="dynamic")
    uniform = run_of("fedavg+dfrd", weighting="uniform")
    guarded = run_of("fedavg+dfrd", weighting="dynamic", eta_d=0.01, guard=True)
    assert (round(max(gained(default)), 1), round(min(gained(default)), 1)) == (-1.7, -4.5)
    assert min(gained(uniform)) > 0
    assert round(100 * (uniform[-1]["test"]["accuracy"] - alone[-1]["test"]["accuracy"]), 1) == 1.2
    assert [at["test"] for at in guarded] == [at["test"] for at in alone]
    assert all(at["diagnostics"]["kept_host"] == 1 for at in guarded)
    tau, plain = (round(default[-1]["diagnostics"][name], 2) for name in ("fidelity", "fidelity_mean"))
    assert (tau, plain) == (0.89, 0.41)


def ends(name, method, **values):
    """The last round's accuracy in % by seed."""
    runs = [r for r in kept(name) if r["method"] == method]
    told = [r for r in runs if all(r["set"].get(key) == value for key, value in values.items())]
    return {r["seed"]: 100 * r["rounds"][-1]["test"]["accuracy"] for r in told}


def test_what_the_page_says_of_hosts_over_seeds():
    """All teachers alike beat tau with every seed, and cost FedAvg less than a point on average, but not with each."""
    text = (RESULTS / "dfrd.md").read_text()
    runs = kept("dfrd_fmnist.json") + kept("dfrd_hosts.json")
    for row in table().gains(runs):
        assert row in text
    alone = {**ends("dfrd_fmnist.json", "fedavg"), **ends("dfrd_hosts.json", "fedavg")}
    alike = ends("dfrd_hosts.json", "fedavg+dfrd", weighting="uniform")
    alike |= ends("dfrd_fmnist.json", "fedavg+dfrd", weighting="uniform")
    tau = ends("dfrd_hosts.json", "fedavg+dfrd", weighting="dynamic")
    tau[0] = next(
        100 * r["rounds"][-1]["test"]["accuracy"]
        for r in kept("dfrd_fmnist.json")
        if r["set"].keys() == {"weighting", "host"} and r["set"]["weighting"] == "dynamic"
    )
    assert alone.keys() == alike.keys() == tau.keys() == {0, 1, 2}
    better = sorted(alike[seed] - tau[seed] for seed in tau)
    assert (round(better[0], 1), round(better[-1], 1)) == (3.3, 6.3)
    assert round(sum(alike[seed] - alone[seed] for seed in alone) / 3, 1) == -0.1
    assert [seed for seed in alone if alike[seed] < alone[seed] - 1] == [2]


def test_what_the_changes_say_of_tau():
    """The default is the code's, and a difference whose interval holds 0 is not said as a cost."""
    changes = " ".join((RESULTS.parents[1] / "CHANGELOG.md").read_text().split())
    assert DFRD.make({}).weighting == registry.find("fedavg+dfrd").make({}).weighting == "dynamic"
    assert 'the default is tau in both (`"dynamic"`), as in the paper' in changes
    assert "teachers alike by default" not in changes
    rows = table().gains(kept("dfrd_fmnist.json") + kept("dfrd_hosts.json"))
    tau, alike = (
        next(row for row in rows if row.startswith(f"| weighting = {name} |")).split(" | ")[-1].strip(" |")
        for name in ("dynamic", "uniform")
    )
    assert all("[-" in said and "+" in said.split("[")[1] for said in (tau, alike)), "both intervals hold 0"
    assert f"(over three seeds it cannot be told: {tau}, below)" in " ".join((RESULTS / "dfrd.md").read_text().split())
    told = tau.replace(" [", " points [")
    assert f"cannot be told from three seeds: {told}, and {alike} with all alike" in changes


def test_where_tau_acts_is_of_one_seed_and_two_precisions():
    """Losses by tau's place, and what the runs that are compared do not have in common, are those of the records."""
    flat = " ".join((RESULTS / "dfrd.md").read_text().split())
    folders = ("dfrd_fmnist", "dfrd_hosts")
    runs = [json.loads(p.read_text()) for study in folders for p in of_study(f"records/{study}").glob("*.json")]
    found = {}
    for run in runs:
        setting, more = run["setting"], set(run["setting"]["set"]) & {"eta_d", "statistics", "ensemble", "guard"}
        tuned = setting["method"] == "fedavg+dfrd" and setting["partition"] == "dirichlet:0.1" and not more
        if setting["seed"] == 0 and (tuned or setting["method"] == "fedavg"):
            key = run["hyper_parameters"]["weighting"] if tuned else "fedavg"
            assert key not in found
            found[key] = run
    ends = {key: 100 * run["rounds"][-1]["global"]["accuracy"] for key, run in found.items()}
    made = {key: (run["setting"]["precision"], run["commit"]) for key, run in found.items()}
    assert made["images"] == made["targets"] == ("float32", "fbe496a")
    assert made["fedavg"] == made["dynamic"] == ("tf32", "f0a75ba")
    assert f"tau where images are made costs nothing ({ends['images']:.1f}, as FedAvg" in flat
    assert f"{ends['fedavg']:.1f}" == f"{ends['images']:.1f}"
    lost = {key: ends["fedavg"] - ends[key] for key in ("targets", "dynamic")}
    assert (
        f"tau in the targets alone {lost['targets']:.1f} points, in both {lost['dynamic']:.1f}. One seed, and" in flat
    )
    assert "*It may be the targets.*" in flat
    assert "in float32 (commit fbe496a), FedAvg and the one with both in TF32 (commit f0a75ba)" in flat


def test_what_the_page_says_of_dense_without_l_bn():
    """The control: the network has batch norm, and L_BN is left out."""
    with_bn, without = ends("dfrd_scratch_fmnist.json", "dense")[0], ends("dfrd_dense.json", "dense", lambda_1=0.0)[0]
    text = (RESULTS / "dfrd.md").read_text()
    assert f"Without it DENSE is {without - with_bn:.1f} points above DENSE with it ({with_bn:.1f})" in text
    shares = [kept(f"dfrd_{name}.json")[-1]["rounds"][-1]["diagnostics"]["fidelity"] for name in ("dense",)]
    shares += [
        r["rounds"][-1]["diagnostics"]["fidelity"] for r in kept("dfrd_scratch_fmnist.json") if r["method"] == "dense"
    ]
    assert f"(`fidelity` {shares[0]:.2f}, with L_BN {shares[1]:.2f})" in text


def test_what_the_page_says_of_the_order_from_scratch():
    by = {method: ends("dfrd_scratch_cnn.json", method) for method in ("dfrd", "fedftg", "dense")}
    mean = {method: sum(found.values()) / len(found) for method, found in by.items()}
    assert all(found.keys() == {0, 1, 2} for found in by.values())
    assert mean["dfrd"] > mean["fedftg"] > mean["dense"]
    assert min(min(by["dfrd"][k], by["fedftg"][k]) - by["dense"][k] for k in (0, 1, 2)) > 17
    assert round(by["fedftg"][0] - by["dfrd"][0], 1) == 2.3


def above(of, hosts, statistic):
    """Return how far the curves lie above their hosts: mean and Student's interval of three seeds."""
    values = [statistic(curve) - statistic(host) for curve, host in zip(of, hosts, strict=True)]
    mean, half = statistics.mean(values), 4.302653 * statistics.stdev(values) / 3**0.5  # two degrees of freedom
    return f"{mean:+.2f} [{mean - half:.2f}, {mean + half:.2f}]"


def after_distillation(run):
    """Return the distilled model's accuracy in each tested round, %."""
    return [100 * r["global"]["accuracy"] for r in run["rounds"]]


def late(curve):
    return statistics.mean(curve[-10:])  # every second round is tested


RIVALS = {"dense": "DENSE", "fedftg": "FedFTG", "dfrd": "DFRD"}
PUBLISHED = {  # Table 1 at omega = 0.1
    "cifar10": {"fedavg": (56.36, 2.09), "dense": (57.48, 3.13), "fedftg": (58.17, 2.02), "dfrd": (61.34, 1.21)},
    "fmnist": {"fedavg": (83.24, 1.41), "dense": (84.10, 1.55), "fedftg": (84.93, 1.40), "dfrd": (85.66, 1.21)},
}


def rivals(data):
    """Return the runs of DFRD and its rivals by method and seed, in the reading of the authors' code."""
    runs = {(m, seed): kept(f"records/dfrd_rivals_{data}/{m}-{seed}.json") for m in RIVALS for seed in range(3)}
    for (method, seed), run in runs.items():
        setting, of = run["setting"], run["hyper_parameters"]
        assert (setting["method"], setting["seed"], setting["model"]) == (f"fedavg+{method}", seed, "conv4_pooled")
        assert setting["partition"] == "dirichlet-capped:0.1"
        later = data == "fmnist" and seed
        assert (run["rounds_done"], run["status"]) == (100, "done")
        assert run["commit"] == ("0202dd68" if later else "5bad8a19")
        told = [of["host"].get(key) for key in ("steps", "B", "eta", "crop", "flip")]
        assert told == [20, 64, 0.01, 0, False]
        assert (of["I"], of["I_g"], of["I_d"], of["T"], of["tran"]) == (10, 2, 5, 10.0, "student-detached")
        assert (of["feedback"], of["statistics"]) == (False, "batch")
    return runs


def rows_of_table_1(data):
    """Return FedAvg's curves by seed, those of the three others, and the rows that the page has to have of them."""
    runs = rivals(data)
    hosts = [before_distillation(runs["dfrd", seed]) for seed in range(3)]
    assert all(before_distillation(run) == hosts[seed] for (_, seed), run in runs.items())  # one host for all

    def row(name, published, of):
        tops = [max(curve) for curve in of]
        cells = [name, "{:.2f} ± {:.2f}".format(*published), ", ".join(f"{top:.2f}" for top in tops)]
        cells.append(f"{statistics.mean(tops):.2f} ± {statistics.stdev(tops):.2f}")
        gains = ["-", "-"] if of is hosts else [above(of, hosts, max), above(of, hosts, late)]
        return f"| {' | '.join([*cells, gains[0], ', '.join(f'{late(c):.2f}' for c in of), gains[1]])} |"

    curves = {m: [after_distillation(runs[m, seed]) for seed in range(3)] for m in RIVALS}
    told = [row("FedAvg (before the distillation)", PUBLISHED[data]["fedavg"], hosts)]
    told += [row(f"FedAvg + {name}", PUBLISHED[data][m], curves[m]) for m, name in RIVALS.items()]
    return runs, hosts, curves, told


def test_dfrd_and_its_rivals_on_one_host():
    """Table 1's fine-tuning on CIFAR-10 at the top of the page: every figure from the records, by seed."""
    text = (RESULTS / "dfrd.md").read_text()
    flat = " ".join(text.split())
    runs, hosts, curves, told = rows_of_table_1("cifar10")
    assert all(row in text for row in told)
    for i, r in enumerate(runs["dfrd", 0]["rounds"]):
        if r["round"] in (2, 10, 20, 50, 80, 100):
            cells = [f"{of[seed][i]:.2f}" for seed in range(3) for of in (hosts, *curves.values())]
            assert f"| {r['round']} | {' | '.join(cells)} |" in text
    gains = {m: above(curves[m], hosts, max) for m in RIVALS}
    assert f"DFRD is {gains['dfrd']} points above FedAvg in the best round" in flat
    assert f"FedFTG {gains['fedftg']} and DENSE {gains['dense']}" in flat
    assert all("[-" in gain for gain in gains.values()), "all intervals hold 0"
    tops = {m: [max(curve) for curve in of] for m, of in curves.items()}
    own = [max(host) for host in hosts]
    assert all(tops["dfrd"][k] > max(own[k], tops["fedftg"][k], tops["dense"][k]) for k in range(3))
    assert f"{statistics.mean(own):.2f} ± {statistics.stdev(own):.2f} on CIFAR-10 (published 56.36 ± 2.09)" in flat
    assert sum(abs(top - 56.36) < 4 for top in own) == 2, "two of three seeds within four points"
    published = {m: round(PUBLISHED["cifar10"][m][0] - 56.36, 2) for m in RIVALS}
    assert (published["dfrd"], published["fedftg"], published["dense"]) == (4.98, 1.81, 1.12)
    by = [max(c) - max(h) for c, h in zip(curves["dfrd"], hosts, strict=True)]
    assert f"{by[2]:.2f} points in the best round, against {by[0]:.2f} and {by[1]:.2f}" in flat
    by = [late(c) - late(h) for c, h in zip(curves["dfrd"], hosts, strict=True)]
    assert f"with each seed, by {by[0]:.2f}, {by[1]:.2f} and {by[2]:.2f}" in flat
    rise = [host[-1] - host[39] for host in hosts]  # round 80 is the 40th that was tested
    assert f"it rises by {rise[0]:.1f}, {rise[1]:.1f} and {rise[2]:.1f} points in the last 20 rounds" in flat
    said = {
        m: [
            statistics.mean(r["diagnostics"]["fidelity_mean"] for r in runs[m, k]["rounds"][-10:])
            for k in range(3)
        ]
        for m in RIVALS
    }  # fmt: skip
    assert f"the wanted label of {100 * min(said['dense'] + said['fedftg']):.1f} % of their images" in flat
    assert f"and of {100 * min(said['dfrd']):.0f} to {100 * max(said['dfrd']):.0f} % of DFRD's" in flat


def test_dfrd_and_its_rivals_on_fashion_mnist():
    """The same three seeds on the other data set: the table, what is said of it, and of both together."""
    text = (RESULTS / "dfrd.md").read_text()
    flat = " ".join(text.split())
    _, hosts, curves, told = rows_of_table_1("fmnist")
    assert all(row in text for row in told)
    gains = {m: above(curves[m], hosts, max) for m in RIVALS}
    assert f"On Fashion-MNIST they are {gains['dfrd']}, {gains['fedftg']} and {gains['dense']}." in flat
    assert all("[-" in gain for gain in gains.values()), "their intervals hold 0"
    own, tops = ([max(curve) for curve in of] for of in (hosts, curves["dfrd"]))
    assert all(tops[k] > max(own[k], *(max(curves[m][k]) for m in ("fedftg", "dense"))) for k in range(3))
    assert f"{statistics.mean(own):.2f} ± {statistics.stdev(own):.2f} on Fashion-MNIST (83.24 ± 1.41)" in flat
    assert sum(abs(top - 83.24) < 4 for top in own) == 2, "two of three seeds within four points in both"
    published = {m: round(PUBLISHED["fmnist"][m][0] - 83.24, 2) for m in RIVALS}
    assert (published["dfrd"], published["fedftg"], published["dense"]) == (2.42, 1.69, 0.86)
    by = [top - host for top, host in zip(tops, own, strict=True)]
    assert own[2] == min(own)
    assert f"{by[2]:.2f} points in the best round, against {by[0]:.2f} and {by[1]:.2f}. A seed deals" in flat
    moved = [late(host) - late(host[:-10]) for host in hosts]
    assert f"lies {moved[0]:+.1f}, {moved[1]:+.1f} and {moved[2]:+.1f} points from that of the 20 before" in flat
    _, other, of, _ = rows_of_table_1("cifar10")
    each = [[(by[k] + max(of["dfrd"][k]) - max(other[k])) / 2] for k in range(3)]
    together = above(each, [[0.0]] * 3, max)
    assert f"above its host by {together} points if each seed counts once" in flat
    assert "[-" in together, "nor both together"
    margins, within = [], []
    for host_tops, by_method in ((hosts, curves), (other, of)):
        others = [host_tops, by_method["fedftg"], by_method["dense"]]
        margins += [max(by_method["dfrd"][k]) - max(rival[k]) for rival in others for k in range(3)]
        means = [statistics.mean(max(curve) for curve in rival) for rival in others]
        within.append(max(means) - min(means))
    assert f"(by {min(margins):.2f} to {max(margins):.2f} points)" in flat
    assert f"they lie within {within[1]:.2f} points on CIFAR-10 and {within[0]:.2f} on Fashion-MNIST" in flat


def test_what_the_fourth_pooling_changes():
    """The seed of Fashion-MNIST and FedAvg at omega = 1, beside the older rows."""
    flat = " ".join((RESULTS / "dfrd.md").read_text().split())
    host = before_distillation(rivals("fmnist")["dfrd", 0])
    older = max(before_distillation(kept("records/dfrd_table1_fmnist/fedavg+dfrd-0.json")))
    assert f"lifts FedAvg from {older:.2f} to {max(host):.2f} (seed 0)" in flat
    one = [kept(f"records/dfrd_rivals_cifar10/fedavg_1-{seed}.json") for seed in range(3)]
    assert all(r["setting"]["partition"] == "dirichlet-capped:1" and r["rounds_done"] == 100 for r in one)
    tops = [max(before_distillation(run)) for run in one]
    assert f"CIFAR-10*: {tops[0]:.2f}, {tops[1]:.2f} and {tops[2]:.2f} in the best round" in flat
    assert f"above its figure: {statistics.mean(tops):.2f} ± {statistics.stdev(tops):.2f} (67.16 ± 0.98)" in flat
    was = [max(before_distillation(kept(f"records/dfrd_fedavg_cifar10/omega_1-{seed}.json"))) for seed in range(3)]
    assert round(statistics.mean(tops) - statistics.mean(was)) == 10, "cost it ten points"


def test_the_whole_runs_without_the_fourth_pooling():
    """Table 1's fine-tuning: every figure from the records, by seed, with Student's interval of the differences."""
    text = (RESULTS / "dfrd.md").read_text()
    flat = " ".join(text.split())
    runs = {
        (method, seed): kept(f"records/dfrd_table1_fmnist/fedavg+{method}-{seed}.json")
        for method in ("dfrd", "fedftg")
        for seed in range(3)
    }
    for (method, seed), run in runs.items():
        assert (run["setting"]["method"], run["setting"]["seed"]) == (f"fedavg+{method}", seed)
        assert (run["rounds_done"], run["status"], run["commit"]) == (200, "done", "cfec1f0")
        host = run["hyper_parameters"]["host"]
        assert (host["steps"], host["B"], host["eta"]) == (20, 64, 0.01)
        assert run["hyper_parameters"]["feedback"] is False

    def before(of):
        return [100 * r["global_points"]["before distillation"]["accuracy"] for r in of["rounds"]]

    hosts = [before(runs["dfrd", seed]) for seed in range(3)]
    assert hosts == [before(runs["fedftg", seed]) for seed in range(3)]  # one host for both
    rows = {"FedAvg (before the distillation)": hosts} | {
        f"FedAvg + {name}": [[100 * r["global"]["accuracy"] for r in runs[key, seed]["rounds"]] for seed in range(3)]
        for name, key in (("DFRD", "dfrd"), ("FedFTG", "fedftg"))
    }

    def apart(of, statistic):
        return above(of, hosts, statistic)

    def late(curve):
        return statistics.mean(curve[-20:])  # every second round is tested

    for name, of in rows.items():
        tops = [max(curve) for curve in of]
        shown = (
            f"{', '.join(f'{top:.2f}' for top in tops)} | {statistics.mean(tops):.2f} ± {statistics.stdev(tops):.2f}"
        )
        gains = ["-", "-"] if of is hosts else [apart(of, max), apart(of, late)]
        means = ", ".join(f"{late(curve):.2f}" for curve in of)
        assert f"| {shown} | {gains[0]} | {means} | {gains[1]} |" in text, name
    for i, r in enumerate(runs["dfrd", 0]["rounds"]):
        if r["round"] in (2, 10, 20, 50, 100, 150, 200):
            cells = [f"{of[seed][i]:.2f}" for seed in range(3) for of in rows.values()]
            assert f"| {r['round']} | {' | '.join(cells)} |" in text
    dfrd, fedftg = rows["FedAvg + DFRD"], rows["FedAvg + FedFTG"]
    assert f"at omega = 0.1: {apart(dfrd, max)} points in the best round" in flat
    assert f"FedFTG is {apart(fedftg, max)} points above the same host in the best round" in flat
    assert f"over the last 40 rounds it is {apart(fedftg, late)}" in flat
    assert [r["round"] for r in runs["fedftg", 0]["rounds"]] == [*range(2, 201, 2)]
    early = apart(fedftg, lambda curve: statistics.mean(curve[:50]))
    assert "[-" not in early
    assert "[-" in apart(fedftg, late)
    assert f"It is above early and not to the end: over rounds 1 to 100 the mean is {early} above" in flat
    assert "did not run, is above its host early and not to the end (below)" in flat
    assert "luck" not in flat
    jumps = [max(abs(b - a) for a, b in itertools.pairwise(curve[50:])) for curve in fedftg]
    assert [round(min(jumps)), round(max(jumps))] == [8, 10]
    assert "jumps by 8 to 10 points" in flat
    short = [83.24 - max(host) for host in hosts]
    assert f"{statistics.mean(short):.1f} points below its 83.24, and seed 2 by {short[2]:.0f}" in flat
    sure = [
        statistics.mean(r["diagnostics"]["fidelity_mean"] for r in runs["dfrd", seed]["rounds"][-20:])
        for seed in range(3)
    ]
    assert f"of {min(sure):.2f} to {max(sure):.2f} of its images" in flat


def test_what_the_older_sections_say_of_their_network_and_images():
    """The network without the fourth pooling, and images that move anew in each step; no word to the contrary."""
    text = (RESULTS / "dfrd.md").read_text()
    flat = " ".join(text.split())
    columns = text.split("## FedAvg without the fourth pooling")[1].split("```")[0]
    hosts = text.split("## Table 2, the hosts on CIFAR-10, without the fourth pooling")[1].split("```")[0]
    once = "anew in each step, where the authors' code does so once, when it deals out the records"
    assert f"training moves images by 4 pixels at most and mirrors them, {once}" in " ".join(columns.split())
    assert "The authors' code moves and mirrors an image once, when it deals out the records" in flat
    assert "mirrors them, as the authors' code does" not in flat
    told = (
        "the network `conv4`, which leaves out the fourth pooling of the authors' network, images that move and mirror"
    )
    assert f"{told} anew in each step" in " ".join(hosts.split())
    for study in ("dfrd_fedavg_cifar10", "dfrd_hosts_cifar10"):
        for path in of_study(f"records/{study}").glob("*.json"):
            run = json.loads(path.read_text())
            host = run["hyper_parameters"]["host"]
            assert (run["setting"]["model"], host["crop"], host["flip"]) == ("conv4", 4, True)


def test_which_direction_of_eq_7_the_older_runs_have():
    """As printed in the records of the sections that say so, and in their suites; as the authors ran it at the top."""
    flat = " ".join((RESULTS / "dfrd.md").read_text().split())
    assert (
        'All runs of DFRD from "Positive control" to here have Eq. 7 as printed, student first, and their suites set'
        in flat
    )

    def orders(*studies):
        paths = [path for study in studies for path in of_study(f"records/{study}").glob("*.json")]
        made = [json.loads(path.read_text())["hyper_parameters"] for path in paths]
        return {of["md"] for of in made if "md" in of}

    older = ("dfrd_control", "dfrd_fmnist", "dfrd_hosts", "dfrd_scratch_cnn", "dfrd_scratch_fmnist")
    assert orders(*older) == {"student-teacher"}
    assert orders("dfrd_rivals_cifar10", "dfrd_rivals_fmnist", "dfrd_table1_fmnist") == {"teacher-student"}
    for study in (*older, "dfrd_factors"):
        cells = read_suite(of_study(f"{study}.toml")).cells()
        assert {cell.set.get("md") for cell in cells if cell.method.endswith("dfrd")} == {"student-teacher"}


def before_distillation(run, rounds=100):
    """Return the host's accuracy in each tested round up to the last one given, %."""
    points = [r for r in run["rounds"] if r["round"] <= rounds]
    return [100 * r["global_points"]["before distillation"]["accuracy"] for r in points]


@pytest.mark.parametrize(
    ("data", "omega", "theirs", "commit"),
    [
        ("fmnist", "1", "89.71 ± 1.10", "4337627e"),
        ("fmnist", "0.01", "60.89 ± 3.24", "7e262cd9"),
        ("cifar10", "1", "67.16 ± 0.98", "7e262cd9"),
        ("cifar10", "0.1", "56.36 ± 2.09", "7e262cd9"),
        ("cifar10", "0.01", "32.92 ± 7.40", "7e262cd9"),
    ],
)
def test_a_column_of_fedavg_in_the_authors_reading(data, omega, theirs, commit):
    """Setting, length, best and last rounds are those of the records."""
    flat = " ".join((RESULTS / "dfrd.md").read_text().split())
    runs = [kept(f"records/dfrd_fedavg_{data}/omega_{omega}-{seed}.json") for seed in range(3)]
    for seed, run in enumerate(runs):
        setting, of = run["setting"], run["hyper_parameters"]
        assert (setting["seed"], setting["partition"]) == (seed, f"dirichlet-capped:{omega}")
        assert (setting["model"], run["rounds_done"], run["commit"]) == ("conv4", 100, commit)
        assert (of["host"]["steps"], of["host"]["B"], of["host"]["eta"], of["feedback"]) == (20, 64, 0.01, False)
        moved = (of["host"].get("crop", 0), of["host"].get("flip", False))
        assert moved == ((4, True) if data == "cifar10" else (0, False))
    curves = [before_distillation(run) for run in runs]
    tops = [max(curve) for curve in curves]
    name = {"fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}[data]
    row = f"| {name} | {float(omega)} | {theirs} | {', '.join(f'{top:.2f}' for top in tops)} | "
    row += f"{statistics.mean(tops):.2f} ± {statistics.stdev(tops):.2f} | "
    row += f"{', '.join(f'{curve[-1]:.2f}' for curve in curves)} |"
    assert row in flat


def test_what_is_said_of_fedavgs_columns():
    """Distances, rises and the plain Dirichlet are recomputed from the records."""
    flat = " ".join((RESULTS / "dfrd.md").read_text().split())

    def curves(study, name):
        return [before_distillation(kept(f"records/{study}/{name}-{seed}.json")) for seed in range(3)]

    one = [max(curve) for curve in curves("dfrd_fedavg_fmnist", "omega_1")]
    assert all(abs(top - 89.71) <= 1.10 for top in one), "all seeds lie within the published deviation"
    said = f"FedAvg itself has its published figure: {statistics.mean(one):.2f} ± {statistics.stdev(one):.2f}"
    assert f"{said} (89.71 ± 1.10)" in flat
    hundredth = [max(curve) for curve in curves("dfrd_fedavg_fmnist", "omega_0.01")]
    assert f"Fashion-MNIST lie {max(hundredth) - min(hundredth):.0f} points apart" in flat
    tenth = [max(curve) for curve in curves("dfrd_table1_fmnist", "fedavg+dfrd")]
    assert f"There FedAvg has {tenth[0]:.2f}, {tenth[1]:.2f} and {tenth[2]:.2f} within 100 rounds" in flat
    (plain,) = [before_distillation(kept("records/dfrd_fedavg_fmnist/plain_0.1-1.json"))]
    setting = kept("records/dfrd_fedavg_fmnist/plain_0.1-1.json")["setting"]
    assert (setting["partition"], setting["seed"]) == ("dirichlet:0.1", 1)
    assert f"has {max(plain):.2f} in the best of 100 rounds" in flat
    assert f"the one seed that was run gains {max(plain) - tenth[1]:.1f} points" in flat
    assert f"and {83.24 - max(plain):.1f} points below the published 83.24" in flat
    ours = curves("dfrd_fedavg_cifar10", "omega_1")
    short = 67.16 - statistics.mean(max(curve) for curve in ours)
    assert f"On CIFAR-10 it is {short:.1f} points short of it" in flat
    rise = [curve[-1] - curve[39] for curve in ours]  # round 80 is the 40th that was tested
    assert f"rise by {rise[0]:.1f}, {rise[1]:.1f} and {rise[2]:.1f} points in the last 20 rounds" in flat
    ours = curves("dfrd_fedavg_cifar10", "omega_0.1")
    missing = [56.36 - max(curve) for curve in ours]
    assert f"on CIFAR-10 it is {statistics.mean(missing):.1f} points below its 56.36" in flat
    rise = [curve[-1] - curve[39] for curve in ours]
    said = f"they rise by {rise[0]:.1f}, {rise[1]:.1f} and {rise[2]:.1f} points, where"
    assert f"{said} {min(missing):.0f} to {max(missing):.0f} are missing" in flat


HOSTS = {
    ("HeteroFL", 5): "21.00 ± 3.28",
    ("HeteroFL", 10): "13.89 ± 3.73",
    ("HeteroFL", 40): "11.16 ± 1.95",
    ("Federated Dropout", 5): "17.36 ± 3.13",
    ("Federated Dropout", 10): "12.52 ± 1.41",
    ("Federated Dropout", 40): "11.08 ± 1.83",
    ("FedRolex", 5): "21.11 ± 1.76",
    ("FedRolex", 10): "16.57 ± 4.40",
    ("FedRolex", 40): "14.73 ± 2.91",
}


def hosts_runs(host, rho):
    name = {"HeteroFL": "heterofl", "Federated Dropout": "feddropout", "FedRolex": "fedrolex"}[host]
    return name, [kept(f"records/dfrd_hosts_cifar10/{name}_{rho}-{seed}.json") for seed in range(3)]


@pytest.mark.parametrize(("host", "rho"), list(HOSTS))
def test_a_row_of_the_hosts_with_several_widths(host, rho):
    """Setting, length, best and last rounds and what nobody has trained are those of the records."""
    name, runs = hosts_runs(host, rho)
    for seed, run in enumerate(runs):
        setting, of = run["setting"], run["hyper_parameters"]
        assert (setting["method"], setting["seed"], setting["partition"]) == (
            f"{name}+dfrd", seed, "dirichlet-capped:0.1",
        )  # fmt: skip
        assert (setting["model"], run["rounds_done"], run["commit"]) == ("conv4", 100, "27a5599f")
        told = {key: of["host"][key] for key in ("rho", "steps", "B", "eta", "crop", "flip")}
        assert told == {"rho": rho, "steps": 20, "B": 64, "eta": 0.01, "crop": 4, "flip": True}
        assert of["feedback"] is False
        assert of["host"].get("sbn", False) is False
    curves = [before_distillation(run) for run in runs]
    tops = [max(curve) for curve in curves]
    cells = [
        host, f"{rho}", HOSTS[host, rho], ", ".join(f"{top:.2f}" for top in tops),
        f"{statistics.mean(tops):.2f} ± {statistics.stdev(tops):.2f}",
        ", ".join(f"{curve[-1]:.2f}" for curve in curves),
        f"{100 * runs[0]['rounds'][-1]['diagnostics']['untrained']:.1f} %",
    ]  # fmt: skip
    assert f"| {' | '.join(cells)} |" in (RESULTS / "dfrd.md").read_text()


def test_what_is_said_of_the_hosts_with_several_widths():
    """Ranges, distances and the seed that learns little are recomputed from the records."""
    flat = " ".join((RESULTS / "dfrd.md").read_text().split())
    tops = {key: [max(before_distillation(run)) for run in hosts_runs(*key)[1]] for key in HOSTS}
    means = {key: statistics.mean(of) for key, of in tops.items()}
    theirs = {key: tuple(map(float, said.split(" ± "))) for key, said in HOSTS.items()}
    assert 12 < min(means.values()) < max(means.values()) < 20
    assert 11 < min(mean for mean, _ in theirs.values()) < max(mean for mean, _ in theirs.values()) < 21.2
    apart = {key: means[key] - theirs[key][0] for key in HOSTS}
    within = [key for key in HOSTS if abs(apart[key]) <= theirs[key][1]]
    assert len(within) == 4
    assert "Four of the nine lie within the published deviation" in flat
    below = sorted((-apart[key], key[1]) for key in HOSTS if key not in within and apart[key] < 0)
    assert [rho for _, rho in below] == [5, 5]
    assert f"below it, by {below[0][0]:.1f} and {below[1][0]:.1f} points" in flat
    above = sorted(apart[key] for key in HOSTS if key not in within and apart[key] > 0)
    assert len(above) == 3
    assert f"three are above it, by {above[0]:.1f} to {above[-1]:.1f}" in flat
    for host in ("HeteroFL", "Federated Dropout"):
        assert means[host, 5] > means[host, 10] > means[host, 40]
    assert means["FedRolex", 5] == min(means["FedRolex", rho] for rho in (5, 10, 40))
    assert f"Seeds lie up to {max(max(of) - min(of) for of in tops.values()):.0f} points apart" in flat
    first = [tops[host, 5] for host in ("HeteroFL", "Federated Dropout", "FedRolex")]
    others = [of[seed] for of in first for seed in (0, 2)]
    said = f"{first[0][1]:.2f}, {first[1][1]:.2f} and {first[2][1]:.2f}, where the others have"
    assert f"{said} {min(others):.1f} to {max(others):.1f}" in flat
    fedavg = [max(before_distillation(kept(f"records/dfrd_fedavg_cifar10/omega_0.1-{seed}.json"))) for seed in range(3)]
    assert f"FedAvg, all ten clients at full width, has {statistics.mean(fedavg):.2f} on the same records" in flat
