"""The page of DFFKE's results: its tables, its suites, and the scripts that make tables and pictures of a run."""

from __future__ import annotations

import json
import re
import tomllib
from statistics import fmean, pstdev, stdev

import pytest
import torch
from pages import RESULTS, STUDIES, of_study, script

from fedaudit import registry
from fedaudit.data.federation import federate
from fedaudit.data.records import Dataset
from fedaudit.methods.datafree._decoder import decoder_size
from fedaudit.methods.datafree.dffke import DFFKE
from fedaudit.privacy.policy import read_policies
from fedaudit.runtime import checkpoint
from fedaudit.runtime.run_record import read_record
from fedaudit.suite.paper_settings import stated
from fedaudit.suite.published import find_table, wanted
from fedaudit.suite.suite_file import read_suite
from fedaudit.training.models import count, structure
from fedaudit.wire.message import KINDS


def test_the_buffer_of_a_run_against_the_formula(dffke_run):
    for row in script("dffke_buffer").buffers(dffke_run):
        assert row["R"] == 1
        assert row["bytes"] == row["formula"] > 0


@pytest.mark.long
def test_what_an_unlimited_buffer_takes_on_disk(tmp_path, monkeypatch):
    """A round adds what the formula says, Dec and E~ once for all clients. By it 20 rounds of ten ResNet-18s on 44,100
    records of CIFAR-10 add 5.9 GB; beside them lie each client's model, its state before the exchange, the last uploads
    and the published models: below 8 GB when the run is over."""
    monkeypatch.setattr(checkpoint, "LARGE", 1024)  # all but the decoder's smallest tensors, as at full size
    disk = script("dffke_disk")
    quick = {**DFFKE.quick, "R": "unlimited", "h": 128, "w_Dec": 16, "T_FKE": 0}
    few = {"aux": 0.4, "eval_clients": False}
    found = disk.measured(tmp_path / "run", rounds=3, clients=3, keep_weights=1, eval_every=3, set=quick, **few)
    N = sum(read_record(tmp_path / "run").data.members)
    size = decoder_size(128, (1, 8, 8), 16)
    expected = disk.a_round(N, 128, 64, 10, size.payload + size.buffers)
    second, third = found["rounds"][1:]
    for part, added in expected.items():
        assert third[part] - second[part] == pytest.approx(added, rel=0.05)  # headers, and small tensors by client
    size = decoder_size(512, (3, 32, 32))
    model = 4 * count(structure("resnet18", shape=(3, 32, 32), classes=10))
    added = sum(disk.a_round(44_100, 512, 512, 10, size.payload + size.buffers).values())
    assert 20 * added == pytest.approx(5.9e9, rel=0.01)
    assert 20 * added + 4 * 10 * model < 8e9


def test_the_table_of_results(dffke_run):
    """The last round, both points of it, and the best round as the paper reports it: over clients."""
    record = read_record(dffke_run)
    last, each = record.result.last, [row.utility.clients.global_test.each for row in record.rounds]
    best = max(each, key=fmean)
    head, _, row = script("dffke_table").table(dffke_run)
    cells = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=False))
    assert cells["common"] == f"{100 * last.clients.global_test.mean:.1f}"
    assert cells["trained: common"] == f"{100 * last.points['trained'].global_test.mean:.1f}"
    assert cells["best round: common"] == f"{100 * fmean(best):.1f} ± {100 * pstdev(best):.1f}"


def test_the_page_says_what_the_gradients_are():
    """The table of docs/results/dffke.md, row by row."""
    page = (RESULTS / "dffke.md").read_text()
    rows = page.split("| margin | student-first | teacher-first |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 5
    for row in rows:
        margin, *said = (float(cell) for cell in row.strip("| ").split(" | "))
        assert said == pytest.approx(script("dffke_gradient").gradients(margin, 8.0), abs=5e-5)


def test_the_page_says_what_the_kept_rounds_are():
    """The table of readings on the GPU, from every client's accuracy in every round."""
    runs = json.loads(of_study("dffke_readings.json").read_text())["runs"]
    rows = (RESULTS / "dffke.md").read_text().split("| best round: common |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert len(rows) == len(runs)
    for row, kept in zip(rows, runs, strict=True):
        last = kept["rounds"][-1]["points"]
        each = [last[point][test] for point in ("exchanged", "trained") for test in ("global_test", "local_test")]
        each.append(max((r["points"]["exchanged"]["global_test"] for r in kept["rounds"]), key=fmean))
        said = row.strip("| ").split(" | ")[2:]
        assert said == [f"{100 * fmean(values):.1f} ± {100 * pstdev(values):.1f}" for values in each]


@pytest.mark.parametrize("study", ["dffke_digits", "dffke_noise_small", "dffke_noise_fmnist"])
def test_the_page_says_what_the_kept_records_are(study):
    lines = script("dffke_kept").table(of_study(f"records/{study}"))
    assert len(lines) > 2
    assert "\n".join(lines) in (RESULTS / "dffke.md").read_text()


def on_own(run, at=-1):
    """Return the mean of the clients' models on their own records in a round, in %."""
    return 100 * run["rounds"][at]["clients_on_own"]["mean"]


def test_what_an_exchange_costs_on_own_records():
    """The summary has every seed and both data sets: right after the exchange, against training alone."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    names = ("alone", "student-step", "teacher-step", "student-epoch", "teacher-epoch")
    first = {name: json.loads(of_study(f"records/dffke_readings/{name}.json").read_text()) for name in names}
    assert all((run["setting"]["seed"], run["rounds_done"]) == (0, 5) for run in first.values())
    lost = [on_own(first["alone"]) - on_own(first[name]) for name in names[1:]]
    told = f"on Fashion-MNIST {min(lost):.0f} to {max(lost):.0f} with seed 0 after five rounds and"
    others = []
    for seed in (1, 2):
        alone, run = (
            json.loads(of_study(f"records/dffke_seeds/{n}-{seed}.json").read_text()) for n in ("alone", "default")
        )
        assert (run["setting"]["seed"], run["rounds_done"]) == (seed, 2)
        others.append(on_own(alone, 1) - on_own(run, 1))
    told = f"{told} {others[0]:.0f} and {others[1]:.0f} with two other seeds after two, on digits"
    groups = script("dffke_kept").grouped(of_study("records/dffke_digits"))
    local = fmean(map(on_own, groups.pop("local")))
    on_digits = [local - fmean(map(on_own, of)) for name, of in groups.items() if "-first" in name]
    assert len(on_digits) == 8
    assert f"{told} {min(on_digits):.0f} to {max(on_digits):.0f}. After its next local training" in flat
    assert f"costs them {min(on_digits):.0f} to {max(on_digits):.0f} points on their own data" in flat


def test_how_many_rounds_are_the_papers():
    """One paragraph names every number; what the tables of all papers count is the paper's limit."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    paper = stated(find_table("dffke", "2"))
    assert f"Section 4.1 has at most {paper.setting['rounds']} for all methods" in flat
    assert (
        "Table 5 has Table 2's figure at 'Unlimited, up to 50', and the author's code has 30 to 40"
        in paper.because.values()
    )
    items = tomllib.loads(of_study("coverage.toml").read_text())["item"]
    counted = {i["item"]: i["rounds"] for i in items if i["paper"] == "DFFKE" and "Table" in i["item"]}
    assert {item for item, rounds in counted.items() if rounds != paper.setting["rounds"]} == {"Table 5"}
    assert "counts 300 as the paper's rounds; its rows of figures name that code's" in flat
    assert "has 30 to 40 for DFFKE, and at most 200 for the rivals, which stop after ten tests without a gain" in flat
    assert "the paper's 50" not in flat
    assert "published are 50 rounds" not in flat


def test_the_row_without_noise_is_a_row_of_the_older_table():
    """Equal settings on two processors, with two versions of torch, of two commits; apart in the first round."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    groups = [
        script("dffke_kept").grouped(of_study(f"records/{study}")) for study in ("dffke_digits", "dffke_noise_small")
    ]
    name = "`teacher-first`, R = 1, T_FKE = 2"
    there, here = (sorted(of[name], key=lambda run: run["setting"]["seed"]) for of in groups)
    ends = []
    for of in (there, here):
        assert [run["setting"]["seed"] for run in of] == [0, 1, 2]
        ends.append([100 * run["rounds"][-1]["clients"]["mean"] for run in of])
    for old, new in zip(there, here, strict=True):
        assert all(new["hyper_parameters"][key] == value for key, value in old["hyper_parameters"].items())
        assert old["rounds"][0]["clients"]["mean"] != new["rounds"][0]["clients"]["mean"]
        assert (old["commit"], old["versions"]["torch"], old["device"]) == ("fbe496a", "2.11.0", "x86_64 CPU")
        assert (new["commit"], new["versions"]["torch"], new["device"]) == ("e2d111e7", "2.13.0+cpu", "aarch64 CPU")
    told = [f"{a:.1f}, {b:.1f} and {c:.1f}" for a, b, c in ends]
    assert f"{told[0]} there ({fmean(ends[0]):.1f} ± {stdev(ends[0]):.1f}), {told[1]} here, seed by seed" in flat
    assert "commit differ (x86-64, 2.11 and fbe496a there)" in flat


def test_what_is_said_of_table_4_on_digits():
    """The differences seed by seed, what the attacks find with noise and without, and the ledger's bounds."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    records = [json.loads(path.read_text()) for path in of_study("records/dffke_noise_small").glob("*.json")]
    runs = {(run["setting"]["label"], run["setting"]["seed"]): run for run in records}
    assert len(runs) == 27
    suite = [cell.model_dump(mode="json") for cell in read_suite(of_study("dffke_noise_small.toml")).cells()]
    for run in records:
        ours = {key: value for key, value in run["setting"].items() if key not in ("engine", "onednn")}
        assert sum(all(cell[key] == value for key, value in ours.items()) for cell in suite) == 1
        assert (run["status"], run["rounds_done"], run["commit"]) == ("done", 6, "e2d111e7")

    def apart(name, other):
        of, control = ([100 * runs[n, k]["rounds"][-1]["clients"]["mean"] for k in range(3)] for n in (name, other))
        gains = [a - b for a, b in zip(of, control, strict=True)]
        mean, half = fmean(gains), 4.302653 * stdev(gains) / 3**0.5
        return f"{mean:+.1f} [{mean - half:.1f}, {mean + half:.1f}]"

    lift = apart("no noise", "alone")
    assert f"the exchange lifts a client by {lift} points over training alone without noise" in flat
    assert f"and by {apart('pure noise', 'alone')} with pure noise" in flat
    claimed = {level: apart(f"epsilon {level} as claimed", "alone") for level in ("1", "0.5", "0.25")}
    lost = apart("no noise", "epsilon 1 as claimed").split()[0].lstrip("+")
    assert f"for epsilon = 1 it is {claimed['1']}, which is {lost} less, for 0.5 {claimed['0.5']}, " in flat
    assert f"for 0.25 {claimed['0.25']}." in flat
    words = f"for epsilon = 1 takes away {lost} of the {lift.split()[0].lstrip('+')} points that the exchange gains"
    assert f"{words}, pure noise all of them" in flat
    bounded = [apart(f"epsilon {level} by clipping", "alone") for level in (8, 1)]
    assert f"the clients are {bounded[0]} points from training alone, and {bounded[1]} at epsilon = 1" in flat
    told = {round(fmean(runs[n, k]["attacks"]["embedding_match"]["auc"][0] for k in range(3)), 2): n
            for n in ("no noise", "epsilon 1 as claimed")}  # fmt: skip
    assert told == {1.0: "no noise", 0.53: "epsilon 1 as claimed"}
    assert "told with an AUC of 0.53 instead of 1.00" in flat
    of_loss = [run["attacks"]["loss"] for run in records]
    aucs = [found["auc"][0] for found in of_loss]
    said = (
        f"{min(aucs):.2f} to {max(aucs):.2f}, a leak by its own verdict in {sum(f['leak'] for f in of_loss)} of 27 runs"
    )
    assert said in flat
    for run in records:
        epsilon = run.get("epsilon_by_kind", {"weights": "Infinity", "labels": "Infinity"})
        assert epsilon["weights"] == epsilon["labels"] == "Infinity", "that of a client is infinite in every row"
    column = next(c for c in find_table("dffke", "2").column if c.name == "CIFAR-10, alpha 0.1").figures
    assert (round(column["dffke"][0] - 41.71, 1), round(41.71 - column["fedproto"][0], 1)) == (1.5, 7.5)
    minutes = [run["minutes"] for run in records]
    assert f"{min(minutes):.1f} to {max(minutes):.1f} minutes a run" in flat


def test_what_is_said_of_table_4_on_fashion_mnist():
    """Beside what digits have: the differences seed by seed, and what the attacks find with noise and without."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    records = [json.loads(path.read_text()) for path in of_study("records/dffke_noise_fmnist").glob("*.json")]
    runs = {(run["setting"]["label"], run["setting"]["seed"]): run for run in records}
    assert len(runs) == 12
    suite = read_suite(of_study("dffke_noise_fmnist.toml")).cells()
    digits = {cell.label: cell for cell in read_suite(of_study("dffke_noise_small.toml")).cells()}
    for cell in suite:
        assert (cell.set, cell.rounds) == (digits[cell.label].set, digits[cell.label].rounds), "the same training"
    for run in records:
        ours = {key: value for key, value in run["setting"].items() if key not in ("engine", "onednn")}
        asked = [cell.model_dump(mode="json") for cell in suite]
        assert sum(all(cell[key] == value for key, value in ours.items()) for cell in asked) == 1
        assert (run["status"], run["rounds_done"], run["commit"]) == ("done", 6, "919f9b2d")

    def apart(name, other="alone", key="clients"):
        of, control = ([100 * runs[n, k]["rounds"][-1][key]["mean"] for k in range(3)] for n in (name, other))
        gains = [a - b for a, b in zip(of, control, strict=True)]
        mean, half = fmean(gains), 4.302653 * stdev(gains) / 3**0.5
        return f"{mean:+.1f} [{mean - half:.1f}, {mean + half:.1f}]"

    bare, noisy, claimed = "no noise", "pure noise", "epsilon 1 as claimed"
    assert (
        f"by {apart(bare)} points without noise and by {apart(claimed)} with the noise claimed for epsilon = 1, "
        f"which is {apart(bare, claimed)[1:]} less. With pure noise it is {apart(noisy)}: no lift is shown, and "
        f"{apart(bare, noisy)[1:]} less than without noise." in flat
    )
    own = [apart(*of, key="clients_on_own")[1:] for of in (("alone", bare), (bare, claimed))]
    assert f"the exchange takes {own[0]} points without noise, and the claimed noise a further {own[1]}." in flat
    told = [runs[claimed, k]["attacks"]["embedding_match"] for k in range(3)]
    aucs = [found["auc"][0] for found in told]
    lows = [found["auc"][1] for found in told]
    assert (
        f"an AUC of {min(aucs):.2f} to {max(aucs):.2f} (lower ends of the intervals {min(lows):.2f} to "
        f"{max(lows):.2f}), a leak by the attack's own verdict with each of the three seeds" in flat
    )
    assert all(found["leak"] and found["auc"][1] > 0.5 for found in told)
    assert f"the same claim leaves {fmean(aucs):.2f}, a leak with each of three seeds." in flat
    small = [json.loads(path.read_text()) for path in of_study("records/dffke_noise_small").glob("*.json")]
    there = [run for run in small if run["setting"]["label"] == claimed]
    assert [run["attacks"]["embedding_match"]["leak"] for run in there] == [False] * 3
    alike = [
        [f"{fmean(run['cosines'][kind] for run in of):.2f}" for of in ([runs[claimed, k] for k in range(3)], there)]
        for kind in ("embeddings", "logits")
    ]
    assert f"C_E is {alike[0][0]} here and {alike[0][1]} there, C_Y {alike[1][0]} and {alike[1][1]}." in flat
    assert [runs[bare, k]["attacks"]["decoder"]["beats_baselines"] for k in range(3)] == [True] * 3
    assert [runs[claimed, k]["attacks"]["decoder"]["beats_baselines"] for k in range(3)] == [False] * 3
    minutes = [run["minutes"] for run in records]
    assert f"{min(minutes):.1f} to {max(minutes):.1f} minutes a run (`records/dffke_noise_fmnist`, commit" in flat


def test_the_page_says_what_the_buffer_holds_by_age():
    page, ages = (RESULTS / "dffke.md").read_text(), script("dffke_ages")
    kept = json.loads(of_study("dffke_ages.json").read_text())
    assert "\n".join(ages.table(kept)) in page
    first = [100 * (1 - run[0]["target"]) for run in kept]
    assert f"wrong in {first[0]:.0f} and {first[1]:.0f} % of the rows of round 1" in page
    assert all(0.2 <= run[-2]["moved"] < 0.25 for run in kept), "by a fifth"


SUITES = sorted(STUDIES.glob("dffke/dffke*.toml"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_hold_together(path):
    """Every cell names what exists, and its hyper-parameters and policies are in range."""
    for setting in read_suite(path).cells():
        registry.find(setting.method).make(setting.set, setting.preset)
        read_policies(setting.privacy, KINDS)


def test_table_2_is_run_with_the_buffer_of_its_own_figure():
    """47.49 stands in Table 2 (CIFAR-100, alpha 1) and in Table 5 beside "Unlimited, up to 50"; R = 5 has 44.18."""
    table = find_table("dffke", "2")
    (column,) = table.columns("gpu", ["CIFAR-100, alpha 1"])
    assert column.figures["dffke"][0] == 47.49
    cells = [s for cell in wanted(table, "gpu", (), ["dffke"]) for s in cell.settings]
    cells += read_suite(of_study("dffke_table2.toml")).cells()
    methods = [DFFKE.make(setting.set, setting.preset) for setting in cells]
    assert {method.R for method in methods if method.T_FKE} == {"unlimited"}


def test_the_pictures(dffke_run, tmp_path):
    pictures = script("dffke_pictures")
    found = pictures.synthetic(dffke_run, [1, 3, 9], client=1, columns=4)
    assert set(found) == {1, 3}
    for images, labels in found.values():
        assert images.shape == (4, 1, 8, 8)
        assert labels.tolist() == found[1][1].tolist()
    assert not torch.equal(found[1][0], found[3][0])
    axes = pictures.draw(found, "digits", tmp_path / "a.png").axes
    assert len(axes) == 2 * 4
    assert [axis.get_title() for axis in axes[:4]] == [f"class {label}" for label in found[1][1].tolist()]
    assert [axes[0].get_ylabel(), axes[4].get_ylabel()] == ["t = 1", "t = 3"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_show_one_record_of_each_class_first():
    rows = script("dffke_pictures").one_of_each(torch.tensor([2, 2, 0, 2, 0, 1]))
    assert rows.tolist() == [2, 5, 0, 4, 1, 3]


PUBLISHED = next(c for c in find_table("dffke", "2").column if c.name == "CIFAR-10, alpha 0.1").figures
ROWS = {  # method and point of the round
    "local training": ("local", None),
    "LG-FedAvg": ("lgfedavg", None),
    "LG-FedAvg, with the new head": ("lgfedavg", "new head"),
    "FedProto, nearest prototype": ("fedproto", None),
    "FedProto, own classifier": ("fedproto", "classifier"),
    "FedDistill": ("feddistill", None),
    "FedTGP, nearest prototype": ("fedtgp", None),
    "FedTGP, own classifier": ("fedtgp", "classifier"),
}


def scores_of(run, point):
    """Return what was tested, by round: mean and deviation on the common set, and the mean on own classes, in %."""
    for row in run["rounds"]:
        deployed = {"global_test": row["clients"], "matched_test": row["clients_on_own_mix"]}
        of = row["points"][point] if point else deployed
        common, own = of["global_test"], of["matched_test"]
        yield row["round"], 100 * common["mean"], 100 * common["std"], 100 * own["mean"]


def ends_by_the_authors_rule(curve):
    """Return the first round whose accuracy lies more than 8 points below the best one so far, or None."""
    return next((row[0] for n, row in enumerate(curve) if max(r[1] for r in curve[: n + 1]) - row[1] > 8), None)


def paired(values):
    """Return the mean of three differences with Student's 95 % interval."""
    mean, half = fmean(values), 4.302653 * stdev(values) / 3**0.5
    return f"{mean:+.2f} [{mean - half:.2f}, {mean + half:.2f}]"


def test_how_many_classes_a_client_has_in_a_deal():
    """Classes with at least 1 % of a client's 5,000 records: in the deals that were run, and in the author's."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    y = torch.arange(50_000) % 10
    data = Dataset("d", torch.zeros(50_000, 1), y, torch.zeros(10, 1), torch.arange(10), tuple("abcdefghij"))

    def classes(scheme, seed):
        parts = {"aux": 0.0, "holdout": 0.0, "validation": 0.0}
        found = federate(data, clients=10, partition=f"{scheme}:0.1", seed=seed, **parts).counts()
        assert found.sum(1).tolist() == [5_000] * 10
        return float((found >= 50).sum(1).mean())

    run = [classes("dirichlet-balanced", seed) for seed in range(3)]
    assert f"{run[0]:.1f}, {run[1]:.1f} and {run[2]:.1f} classes a client have at least 1 % of its records" in flat
    many = fmean(classes("dirichlet-filled", seed) for seed in range(60))
    assert f"which leaves {many:.1f} classes on average over 60 deals" in flat
    filled = [classes("dirichlet-filled", seed) for seed in range(3)]
    assert f"With {filled[0]:.1f}, {filled[1]:.1f} and {filled[2]:.1f} classes a client FedProto is" in flat


FILLED = {
    "local training": ("local", None),
    "LG-FedAvg": ("lgfedavg", None),
    "LG-FedAvg, with the new head": ("lgfedavg", "new head"),
    "FedProto, nearest prototype": ("fedproto", None),
    "FedProto, nearest of the new prototypes": ("fedproto", "new prototypes"),
    "FedProto, own classifier": ("fedproto", "classifier"),
    "FedTGP, nearest prototype": ("fedtgp", None),
    "FedTGP, nearest of the new prototypes": ("fedtgp", "new prototypes"),
    "FedTGP, own classifier": ("fedtgp", "classifier"),
    "FedGH": ("fedgh", None),
    "FedGH, with the new head": ("fedgh", "new head"),
    "FedDistill": ("feddistill", None),
}
TOLD = {
    "FedProto, nearest prototype": "fedproto",
    "FedTGP, nearest prototype": "fedtgp",
    "FedGH, with the new head": "fedgh",
    "LG-FedAvg, with the new head": "lgfedavg",
    "FedDistill": "feddistill",
}


def suite_of(folder):
    """Return the settings of a suite of rivals, which all have the colours of the first runs."""
    suite = [cell.model_dump(mode="json") for cell in read_suite(of_study(f"{folder}.toml")).cells()]
    rivals = [cell for cell in suite if cell["preset"] == "dffke_authors"]
    assert all(cell["set"] == {"colours": "plain"} for cell in rivals)
    return [cell | {"set": {}} for cell in rivals]


def runs_of(folder, rounds, commit, methods=("local", "fedproto")):
    """Return the kept runs of three seeds, each of which a suite of the same name asks for once."""
    runs = {
        (m, k): json.loads(of_study(f"records/{folder}/{m}-{k}.json").read_text()) for m in methods for k in range(3)
    }
    suite = suite_of(folder)
    for (method, seed), run in runs.items():
        made = {key: value for key, value in run["setting"].items() if key != "engine"} | {"set": {}}
        assert run["setting"]["set"] in ({}, {"colours": "plain"}), "the older ones had no other colours"
        assert sum(all(cell[key] == value for key, value in made.items()) for cell in suite) == 1
        assert (run["setting"]["method"], run["setting"]["seed"], run["commit"]) == (method, seed, commit)
        assert run["setting"]["preset"] == "dffke_authors"
        assert (run["status"], run["rounds_done"]) == ("done", rounds) or run["rounds_done"] < rounds
    return runs


def printed_by(name):
    """Return the figures in what a run printed at its end, what is kept of it, and its lines as one."""
    kept = json.loads(of_study("dffke_printed.json").read_text())[name]
    flat = " ".join(" ".join(kept["printed"]).split())
    found = {key: re.search(words, flat) for key, words in PRINTED.items()}
    return {key: float(of[1]) for key, of in found.items() if of}, kept, flat


PRINTED = {
    "common": r"client models, common test set (\d+\.\d+) %",
    "own": r"client models, own classes' mix (\d+\.\d+) %",
    "before": r"trained: common (\d+\.\d+) %",
    "before, own": r"trained: common .*? own classes' mix (\d+\.\d+) %",
    "shared": r"global model, common test set (\d+\.\d+) %",
    "best round": r"best test round \((\d+)\)",
    "best": r"best test round \(\d+\), as papers report it: (\d+\.\d+) %",
    "seconds": r"(\d+\.\d) s, peak memory",
    "up": r" up (\d+\.\d+) GB payload",
    "down": r" down (\d+\.\d+) GB payload",
}


@pytest.mark.parametrize(
    ("name", "suite", "label"),
    [
        ("dffke-2", "dffke_resnet18", None),
        ("alone-1", "dffke_resnet18_controls", "alone"),
        ("fml-2", "dffke_rivals_filled", None),
    ],
)
def test_what_was_printed_is_of_a_run_that_a_suite_asks_for(name, suite, label):
    """Each option of the command is what a cell of the suite has; the lines name its method, rounds and seed."""
    _, kept, flat = printed_by(name)
    seed = int(name[-1])
    words = kept["command"].split()
    assert words[:3] == ["fedaudit", "run", "--method"]
    (cell,) = [
        c
        for c in read_suite(of_study(f"{suite}.toml")).cells()
        if (c.method, c.seed, c.label) == (words[3], seed, label)
    ]
    options = re.findall(r"--([a-z-]+)(?: ([^-]\S*))?", kept["command"])
    values = dict(value.split("=") for option, value in options if option == "set")
    assert values == {key: str(value) for key, value in cell.set.items()}
    asked = {option.replace("-", "_"): value for option, value in options if option != "set"}
    assert len(asked) == 17
    for option, value in asked.items():
        there = getattr(cell, option)
        assert there == (float(value) if isinstance(there, float) else {"": True}.get(value, type(there)(value)))
    assert flat.startswith(
        f"{cell.method} on cifar10: 10 clients, {cell.partition}, {cell.rounds} of {cell.rounds} rounds,"
    )
    assert f"seed {seed} (done)" in flat
    assert kept["commit"] == "74a63e11"


def best_of(runs, method, point=None):
    """Return the best round on the common test set, by seed."""
    return [max(scores_of(runs[method, seed], point), key=lambda row: row[1]) for seed in range(3)]


def test_fml_in_round_50_has_three_seeds():
    """The row of the table: two seeds from records, the third from what was printed, beside local training."""
    text = (RESULTS / "dffke.md").read_text()
    flat = " ".join(text.split())
    printed, _, _ = printed_by("fml-2")
    assert (printed["best round"], printed["best"]) == (50, printed["shared"])
    folder = "records/dffke_rivals_filled"
    of = {
        (m, k): list(scores_of(json.loads(of_study(f"{folder}/{m}-{k}.json").read_text()), None))[-1]
        for m, seeds in (("fml", 2), ("local", 3))
        for k in range(seeds)
    }
    assert {row[0] for row in of.values()} == {50}
    common, own = ([of["fml", k][n] for k in (0, 1)] + [printed[key]] for n, key in ((1, "common"), (3, "own")))
    gains = [[row - of["local", k][n] for k, row in enumerate(rows)] for n, rows in ((1, common), (3, own))]
    cells = ["FML, own models, in round 50", "{:.2f} ± {:.2f}".format(*PUBLISHED["fml"])]
    cells.append(", ".join(f"{row:.2f}" for row in common))
    cells += [f"{fmean(common):.2f} ± {stdev(common):.2f}", paired(gains[0])]
    cells += [f"{fmean(own):.2f} ± {stdev(own):.2f}", paired(gains[1])]
    assert f"| {' | '.join(cells)} |" in text
    assert max(gains[0]) < 0 < float(cells[4].rstrip("]").split()[-1]), "below with each seed; the interval holds 0"
    assert "its own models are below it with each seed, and the interval holds 0. Of seed 2 (74a63e11) only" in flat
    alone = json.loads(of_study(f"{folder}/local-2.json").read_text())
    above = printed["shared"] - max(row[1] for row in scores_of(alone, None))
    told = (
        f"With seed 2 it has {printed['shared']:.2f} in round 50, its best test too, {above:.2f} above the best round"
    )
    assert f"{told} of local training." in flat


def test_fml_with_two_seeds_beside_local_training():
    """Its clients' own models in the best round, and the shared model, which nobody deploys, in the last."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    kept = {
        (m, k): json.loads(of_study(f"records/dffke_rivals_filled/{m}-{k}.json").read_text())
        for m in ("fml", "local")
        for k in (0, 1)
    }
    assert not list(STUDIES.glob("*/records/dffke_rivals_filled/fml-2.json")), "write the row of three seeds"
    runs = [kept["fml", k] for k in (0, 1)]
    assert {(run["status"], run["rounds_done"], run["commit"]) for run in runs} == {("done", 50, "02b30142")}
    assert {run["minutes"] < 4.45 and run["minutes"] >= 4.35 for run in runs} == {True}
    alike = ("partition", "model", "preset", "rounds", "precision", "clients", "eval_every", "dataset")
    assert {run["hyper_parameters"].get("colours", "plain") for run in kept.values()} == {"plain"}
    assert all(run["setting"][key] == kept["local", 0]["setting"][key] for run in runs for key in alike)
    best = {key: max(scores_of(run, None), key=lambda row: row[1]) for key, run in kept.items()}
    mine, alone = ([best[m, k] for k in (0, 1)] for m in ("fml", "local"))
    lower, own = ([a[column] - f[column] for a, f in zip(alone, mine, strict=True)] for column in (1, 3))
    assert (
        f"The own models have {mine[0][1]:.2f} and {mine[1][1]:.2f} in their best round, {lower[0]:.2f} and "
        f"{lower[1]:.2f} below local training, where 32.84 ± 4.61 is published;" in flat
    )
    assert f"On own classes they are {own[0]:.2f} and {own[1]:.2f} below it in those best rounds." in flat
    tests = {key: {row[0]: row[1] for row in scores_of(run, None)} for key, run in kept.items()}
    gaps = [[tests["local", k][t] - common for t, common in tests["fml", k].items()] for k in (0, 1)]
    assert all(len(of_seed) == 10 and min(of_seed) > 0 for of_seed in gaps)
    last = f"{gaps[0][-1]:.2f} and {gaps[1][-1]:.2f} points in round 50."
    assert f"below it in each of ten tests with both seeds, by {last}" in flat
    assert {run["hyper_parameters"]["eta_shared"] for run in runs} == {0.01}
    others = ("local", "lgfedavg", "fedproto", "fedtgp", "fedgh", "feddistill")
    for m in others:
        of = [json.loads(of_study(f"records/dffke_rivals_filled/{m}-{k}.json").read_text()) for k in range(3)]
        tops = [max(row[1] for row in scores_of(run, None)) for run in of]
        assert min(tops) == tops[2], "seed 2 is the lowest"
    assert PUBLISHED["fml"] == (32.84, 4.61)
    shared = [[100 * row["global"]["accuracy"] for row in run["rounds"]] for run in runs]
    assert all(max(of_seed) == of_seed[-1] for of_seed in shared)
    above, below = shared[0][-1] - alone[0][1], alone[1][1] - shared[1][-1]
    assert (
        f"has {shared[0][-1]:.2f} and {shared[1][-1]:.2f} in round 50, its best so far: {above:.2f} above and "
        f"{below:.2f} below the best round of local training." in flat
    )
    rose = [of_seed[-1] - of_seed[-3] for of_seed in shared]
    assert [row["round"] for row in runs[0]["rounds"]][-3:] == [40, 45, 50]
    assert f"It rose by {rose[0]:.2f} and {rose[1]:.2f} points in the last ten rounds." in flat


def test_five_rivals_and_local_training_in_the_authors_deal():
    """Each figure of the first section, from records of three seeds, and of the runs with the stock network."""
    text = (RESULTS / "dffke.md").read_text()
    flat = " ".join(text.split())
    runs = runs_of("dffke_rivals_filled", 50, "e3ec2f8e")
    runs |= runs_of("dffke_rivals_filled", 50, "8c0d7e50", ("lgfedavg", "feddistill"))
    runs |= runs_of("dffke_rivals_filled", 50, "cf163043", ("fedtgp", "fedgh"))
    assert all(run["status"] == "done" for run in runs.values())
    assert {run["hyper_parameters"].get("colours", "plain") for run in runs.values()} == {"plain"}
    minutes = [run["minutes"] for run in runs.values()]
    assert f"{min(minutes):.1f} to {max(minutes):.1f} minutes a run (`records/dffke_rivals_filled`" in flat
    best = {name: best_of(runs, *of) for name, of in FILLED.items()}
    alone, means, above = best["local training"], {}, {}
    for name, rows in best.items():
        figures = PUBLISHED[TOLD[name]] if name in TOLD else None
        cells = [name, f"{figures[0]:.2f} ± {figures[1]:.2f}" if figures else "-"]
        cells.append(", ".join(f"{row[1]:.2f}" for row in rows))
        for column in (1, 3):
            found = [row[column] for row in rows]
            means[name, column] = f"{fmean(found):.2f} ± {stdev(found):.2f}"
            gains = [row[column] - control[column] for row, control in zip(rows, alone, strict=True)]
            above[name, column] = "-" if rows is alone else paired(gains)
            cells += [means[name, column], above[name, column]]
        assert f"| {' | '.join(cells)} |" in text
    near = "FedProto, nearest prototype"
    assert f"FedProto has {means[near, 1]} on the common test set, where 34.23 ± 4.57 is published" in flat
    assert f"a client that never communicates {means['local training', 1]}." in flat
    assert f"FedProto is {above[near, 1]} points above it by the nearest prototype" in flat
    assert above["FedProto, own classifier", 1].startswith("-"), "by its own classifiers it is not"
    three = [means[name, 1] for name in ("LG-FedAvg", "FedDistill", "FedTGP, nearest prototype")]
    assert f"LG-FedAvg, FedDistill and FedTGP have {three[0]}, {three[1]} and {three[2]}, which three seeds" in flat
    ahead, back = above["FedGH, with the new head", 1], above["FedGH", 1]
    assert f"FedGH is {ahead} above it with the server's new head, and {back} with its own;" in flat
    assert "[-" not in ahead, "all of the interval lies above local training"
    lost = above["FedGH, with the new head", 3]
    assert lost.startswith("-"), lost
    assert ", -" in lost, "all of the interval lies below it on the own classes"
    gain = f"{ahead.split()[0]} points on the common test set, for {lost.split()[0][1:]} on the client's own classes."
    same = "The same models with the head that they trained on from the previous one have"
    assert f"{gain} {same} {back.split()[0]}, and the interval holds 0." in flat
    final = {
        of: [list(scores_of(runs[of[0], seed], of[1]))[-1][1] for seed in range(3)]
        for of in (("local", None), ("fedproto", None), ("fedgh", "new head"))
    }
    last = {
        of: paired([a - b for a, b in zip(found, final["local", None], strict=True)])
        for of, found in final.items()
        if of[0] != "local"
    }
    assert f"in the last round the former is {last['fedgh', 'new head']}." in flat
    assert f"it is {last['fedgh', 'new head']}, and FedProto's gain {last['fedproto', None]}." in flat
    below = [mine[1] - row[1] for row, mine in zip(best["FedTGP, nearest prototype"], alone, strict=True)]
    assert min(below) > 0
    assert f"FedTGP is below it in each seed, by {min(below):.1f} to {max(below):.1f} points, and" in flat
    half = 4.302653 * stdev(below) / 3**0.5
    assert f"the interval just holds 0, up to {half - fmean(below):+.3f}." in flat
    head = [row[1] - mine[1] for row, mine in zip(best["LG-FedAvg, with the new head"], alone, strict=True)]
    assert f"above it in each seed, by {min(head):.1f} to {max(head):.1f} points, and the interval holds 0" in flat
    for name in ("LG-FedAvg", "LG-FedAvg, with the new head", "FedDistill", "FedGH"):
        low, high = above[name, 1].partition("[")[2].strip("]").split(", ")
        assert float(low) < 0 < float(high), name

    other = runs_of("dffke_rivals_authors", 50, "0202dd68", ("local", "fedproto", "lgfedavg", "feddistill", "fedtgp"))
    fallen = [
        fmean(row[1] for row in best_of(other, m)) - fmean(row[1] for row in best_of(runs, m))
        for m in ("fedproto", "local", "lgfedavg", "feddistill", "fedtgp")
    ]
    lower = f"LG-FedAvg, FedDistill and FedTGP are {fallen[2]:.1f}, {fallen[3]:.1f} and {fallen[4]:.1f} below."
    assert lower in flat
    assert f"is {fallen[0]:.1f} points below what it has in the deal of the next table, and local" in flat
    assert f"and local training {fallen[1]:.1f};" in flat
    assert [round(points) for points in fallen[:2]] == [13, 13], "FedProto and local training are 13 points lower"
    there = fmean(row[1] for row in best_of(other, "fedproto"))
    here = fmean(row[1] for row in best[near])
    assert here < PUBLISHED["fedproto"][0] < there, "the published figure lies between the two"
    assert here - fmean(row[1] for row in alone) < there - fmean(row[1] for row in best_of(other, "local"))
    tested = [at for at, *_ in scores_of(runs["fedproto", 0], None)]
    assert all(row[0] in tested[-3:] for row in best[near]), "the best round is one of the last three"
    curves = [[row[1] for row in scores_of(run, None)] for run in runs.values()]
    assert f"and no run rises by more than {max(curve[-1] - curve[-3] for curve in curves):.2f}." in flat
    late = [[row[1] for row in scores_of(runs["fedproto", seed], None)] for seed in range(3)]
    a, b, c = (f"{curve[-1] - curve[-3]:+.1f}" for curve in late)
    assert f"From round 40 to 50 FedProto changes by {a}, {b} and {c} points" in flat
    spreads = [row[2] for row in best[near]]
    assert f"(FedProto's here: {min(spreads):.1f} to {max(spreads):.1f} in the best round); the seeds lie" in flat
    tops = [row[1] for row in best[near]]
    assert f"the seeds lie {max(tops) - min(tops):.1f} points apart." in flat

    stock = runs_of("dffke_resnet18", 40, "e3ec2f8e")
    done = [stock["fedproto", seed]["rounds_done"] for seed in range(3)]
    assert all(stock["local", seed]["rounds_done"] == 40 for seed in range(3))
    mine, theirs = ([row[1] for row in best_of(stock, m)] for m in ("local", "fedproto"))
    assert f"local training has {fmean(mine):.2f} ± {stdev(mine):.2f}, and FedProto, cut off after {done[0]}," in flat
    assert f"after {done[0]}, {done[1]} and {done[2]} rounds, {fmean(theirs):.2f} ± {stdev(theirs):.2f}:" in flat
    assert f": {paired([a - b for a, b in zip(theirs, mine, strict=True)])} to local training (`records/dffke_r" in flat


BREAKS = {0: 28, 1: 10}  # the first test of each seed from which on the exchange takes all tests far down


def of_dffke_itself(seed):
    """Return the kept run of a seed, which the suite asks for once, and its curves beside local training's."""
    run = json.loads(of_study(f"records/dffke_resnet18/dffke-{seed}.json").read_text())
    suite = [cell.model_dump(mode="json") for cell in read_suite(of_study("dffke_resnet18.toml")).cells()]
    made = {key: value for key, value in run["setting"].items() if key != "engine"}
    assert sum(all(cell[key] == value for key, value in made.items()) for cell in suite) == 1
    assert (run["rounds_done"], run["status"], run["commit"]) == (40, "done", "bbdbcfcf")
    assert run["setting"]["preset"] == "authors"
    alone = runs_of("dffke_resnet18", 40, "e3ec2f8e", ("local",))["local", seed]
    curves = {
        "after the exchange": list(scores_of(run, "exchanged")),
        "before the exchange": list(scores_of(run, "trained")),
        "local training": list(scores_of(alone, None)),
    }
    assert {tuple(row[0] for row in curve) for curve in curves.values()} == {tuple(range(2, 41, 2))}
    return run, curves


def test_dffke_itself_for_forty_rounds():
    """The table, the first screen and the section's sentences, from two seeds' records and what a third printed."""
    text = (RESULTS / "dffke.md").read_text()
    flat = " ".join(text.split())
    assert not list(STUDIES.glob("*/records/dffke_resnet18/dffke-2.json")), "write the rows of seed 2 from it"
    runs, curves = zip(*map(of_dffke_itself, (0, 1)), strict=True)
    best = [{name: max(curve, key=lambda row: row[1]) for name, curve in of.items()} for of in curves]
    for name in curves[0]:
        for seed, of in enumerate(curves):
            for which, row in (("best", best[seed][name]), ("last", of[name][-1])):
                assert f"| {name}, {which} | {seed} | {row[1]:.2f} | {row[0]} | {row[3]:.2f} |" in text
    third, _, _ = printed_by("dffke-2")
    local = list(scores_of(runs_of("dffke_resnet18", 40, "e3ec2f8e", ("local",))["local", 2], None))
    local_best = max(local, key=lambda row: row[1])
    for name, row in (
        ("after the exchange, best", f"{third['best']:.2f} | {third['best round']:.0f} | -"),
        ("after the exchange, last", f"{third['common']:.2f} | 40 | {third['own']:.2f}"),
        ("before the exchange, last", f"{third['before']:.2f} | 40 | {third['before, own']:.2f}"),
        ("local training, best", f"{local_best[1]:.2f} | {local_best[0]} | {local_best[3]:.2f}"),
        ("local training, last", f"{local[-1][1]:.2f} | 40 | {local[-1][3]:.2f}"),
    ):
        assert f"| {name} | 2 | {row} |" in text
    after, before = ([of[f"{when} the exchange"] for of in curves] for when in ("after", "before"))
    top, alone, just = (
        [of[name][1] for of in best] for name in ("after the exchange", "local training", "before the exchange")
    )
    ends = [curve[-1][1] for curve in after]
    assert PUBLISHED["dffke"] == (43.21, 4.82)
    three, controls = [*top, third["best"]], [*alone, local_best[1]]
    never, _, _ = printed_by("alone-1")
    assert (
        f"(stock ResNet-18, three seeds) they have {three[0]:.2f}, {three[1]:.2f} and {three[2]:.2f} in the best of 20 "
        f"tests, where 43.21 is published, and then the exchange breaks down, to {ends[0]:.2f}, {ends[1]:.2f} and "
        f"{third['common']:.2f}; clients that train as long and never exchange have {never['best']:.2f} (seed 1)."
        in flat
    )
    assert {of["local training"][0] for of in best} | {local_best[0]} == {38}, "the last but one of the tests"
    assert "and its best test is the last but one." in flat
    gains = [a - b for a, b in zip(three, controls, strict=True)]
    short = [43.21 - row for row in three]
    assert (
        f"*The best round after the exchange has {fmean(three):.2f} ± {stdev(three):.2f}*, where 43.21 ± 4.82 is "
        f"published: {short[0]:.1f}, {short[1]:.1f} and {short[2]:.1f} points less. That is {gains[0]:.2f}, "
        f"{gains[1]:.2f} and {gains[2]:.2f} above local training's best, {paired(gains)}." in flat
    )
    low = sum(row[1] < 20 for curve in after for row in curve)
    assert (
        f"the best test after the exchange lies {fmean(short):.1f} points below 43.21 on average, and {min(short):.1f} "
        f"with the best of three seeds. With seeds 0 and 1 {low} of the 40 tests" in flat
    )
    early, late = ([now - row for now, row in zip(of, alone, strict=True)] for of in ([c[0][1] for c in before], just))
    assert f"clients are {early[0]:.2f} and {early[1]:.2f} points above local training's best, and in their" in flat
    steady = [[row[1] for row in curve] for curve in before]
    assert (
        f"in their best rounds {late[0]:.2f} and {late[1]:.2f}. They stay there, at {min(steady[0]):.2f} to "
        f"{max(steady[0]):.2f} and {min(steady[1]):.2f} to {max(steady[1]):.2f} in all twenty tests." in flat
    )
    at = [{row[0]: row[1] for row in curve} for curve in after]
    told = f"between rounds 8 and 10 ({at[1][8]:.2f} to {at[1][10]:.2f}), with seed 0 in two falls, after round 18"
    falls = f"({at[0][18]:.2f} to {at[0][20]:.2f}) and after round 24 ({at[0][24]:.2f} to {at[0][28]:.2f} in round 28)."
    assert f"{told} {falls}" in flat
    stops = [ends_by_the_authors_rule(curve) for curve in after]
    assert f"after round {stops[0]} with seed 0 and after round {stops[1]} with seed 1." in flat
    assert all(max(c, key=lambda row: row[1])[0] < stop for c, stop in zip(after, stops, strict=True)), "best before"
    cells = tomllib.loads(of_study("published.toml").read_text())["cell"]
    (row,) = (cell["differs"] for cell in cells if cell["key"] == "dffke-stock")
    assert (
        f"in the last round {ends[0]:.2f} and {ends[1]:.2f}, where that code would have ended them after rounds "
        f"{stops[0]} and {stops[1]}, both after their best ones" in row
    )
    assert f"has {alone[0]:.2f} and {alone[1]:.2f} in its best rounds with these seeds" in row
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(after, before, strict=True)]
    broken, whole = (
        [(b, a) for seed, of in enumerate(pairs) for a, b in of if (a[0] >= BREAKS[seed]) is late]
        for late in (True, False)
    )
    (lost, own), (had, own_had) = (
        [[b[column] - a[column] for b, a in of] for column in (1, 3)] for of in (broken, whole)
    )
    assert (
        f"From round {BREAKS[0]} (seed 0) and {BREAKS[1]} (seed 1) on it takes {min(lost):.1f} to {max(lost):.1f} "
        "points off what clients had" in flat
    )
    assert (
        f"loses*: {min(own_had):.0f} to {max(own_had):.0f} points before round {BREAKS[0]} (seed 0) and {BREAKS[1]} "
        f"(seed 1), and {min(own):.0f} to {max(own):.0f} from then on." in flat
    )
    assert f"All 40 lose on own classes, {min(own + own_had):.0f} to {max(own + own_had):.0f} points." in flat
    raised = [-points for points in had if points < 0]
    told = f"it lowered the common accuracy in {len(had) - len(raised)} tests of {len(had)} and raised it in"
    assert f"{told} {len(raised)}, by {min(raised):.1f} to {max(raised):.1f} points." in flat
    assert min(lost) > max(had), "the break stands out: from then on each test lost more than any before"
    found = [b[1] for b, _ in broken]
    assert f"finds the clients at {min(found):.1f} to {max(found):.1f} again right after local training." in flat
    (low, high), (low_had, high_had) = (
        (min(of), max(of)) for of in ([a[2] for _, a in some] for some in (broken, whole))
    )
    assert f"over clients is {low:.1f} to {high:.1f} points from then on, and {low_had:.1f} to {high_had:.1f}" in flat
    profile = json.loads((STUDIES / "speed" / "records" / "profile" / "dffke_resnet18_authors.json").read_text())
    assert f"up to {max(profile['rounds'][0]['local_epochs'])} epochs in the first round of a run of seed 0" in flat
    up, down = ({run[key] for run in runs} for key in ("up_bytes", "down_bytes"))
    assert f"*Each run sends* {up.pop() / 1e9:.1f} GB up and {down.pop() / 1e9:.1f} GB down, all clients" in flat
    assert not up | down, "both seeds send as much"
    assert [third[key] for key in ("up", "down")] == [round(runs[0][f"{key}_bytes"] / 1e9, 2) for key in ("up", "down")]


def test_how_dffke_itself_and_its_control_trained():
    """What the section says of the runs: the settings of both, and in what they differ."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    (run, _), (second, _) = map(of_dffke_itself, (0, 1))
    alone = json.loads(of_study("records/dffke_resnet18/local-0.json").read_text())
    assert {f"one H200, {of['minutes']:.0f} minutes each (`records/" in flat for of in (run, second)} == {True}
    third, kept, _ = printed_by("dffke-2")
    assert f"Seed 2 took {third['seconds'] / 60:.0f} minutes beside other runs ({kept['commit']})." in flat
    assert f"minutes each (`records/dffke_resnet18`, commit {run['commit']}; local training {alone['commit']})" in flat
    asked = ("model", "partition", "precision", "eval_every", "image_size", "clients")
    assert [run["setting"][key] for key in asked] == ["resnet18", "dirichlet-filled:0.1", "bf16", 2, None, 10]
    assert "Every second round was tested, in bf16." in flat
    assert all(alone["setting"][key] == run["setting"][key] for key in (*asked, "rounds"))
    ours, theirs = run["hyper_parameters"], alone["hyper_parameters"]
    assert (ours["tau"], ours["stops"], theirs["E"]) == (0.98, "running", 1)
    assert "clients train to an accuracy of 98 %, up to" in flat
    assert "where local training has one epoch a round." in flat
    assert f"(`{ours['colours']}` in DFFKE, `{theirs.get('colours', 'plain')}` there)" in flat
    assert "Section 4.1 has at most 300 for all methods." in flat
    assert "The author's public code has 30 to 40 for DFFKE" in flat


def test_the_controls_of_the_exchange_change_what_they_are_named_after():
    cells = {cell.label: cell for cell in read_suite(of_study("dffke_resnet18_controls.toml")).cells()}
    (suite,) = [c for c in read_suite(of_study("dffke_resnet18.toml")).cells() if (c.method, c.seed) == ("dffke", 1)]
    usual = suite.model_dump()
    changes = {
        label: {key: value for key, value in cell.model_dump().items() if value != usual[key]}
        for label, cell in cells.items()
    }
    assert changes == {
        "alone": {"label": "alone", "set": {"T_FKE": 0, "T_Tran": 0, "T_Dec": 0}},
        "TF32": {"label": "TF32", "rounds": 12, "precision": "tf32"},
        "no discrepancy": {"label": "no discrepancy", "rounds": 12, "set": {"md": "none", "md_of": "trained"}},
        "docking layers rest": {"label": "docking layers rest", "rounds": 12, "set": {"dock": False}},
        "docking anew": {"label": "docking anew", "rounds": 12, "set": {"dock": False, "fresh": True}},
        "no past rounds": {"label": "no past rounds", "rounds": 12, "set": {"R": 0}},
    }


def test_clients_that_train_as_long_and_never_exchange():
    """Against the same seed's run with the exchange, in the tests that both records have; the rest was printed."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    _, curves = of_dffke_itself(1)
    run = json.loads(of_study("records/dffke_resnet18_controls/alone-1.json").read_text())
    (cell,) = [c for c in read_suite(of_study("dffke_resnet18_controls.toml")).cells() if c.label == "alone"]
    asked = cell.model_dump(mode="json")
    assert all(asked[key] == value for key, value in run["setting"].items() if key not in ("engine", "label"))
    assert (run["setting"]["seed"], run["commit"], run["rounds_done"]) == (1, "74a63e11", 22)
    alone = {row[0]: row[1] for row in scores_of(run, None)}
    assert list(alone) == list(range(2, 23, 2)), "eleven tests, up to round 22"
    printed, _, _ = printed_by("alone-1")
    best = max(alone, key=alone.get)
    assert (best, round(alone[best], 2)) == (printed["best round"], printed["best"])
    assert (
        f"In eleven tests, up to round 22, they have {min(alone.values()):.2f} to {max(alone.values()):.2f}; its "
        f"record ends there, and the run printed {printed['common']:.2f} in round 40 and {printed['best']:.2f} "
        f"(round {best}) as its best." in flat
    )
    after, before = (
        {row[0]: row[1] - alone[row[0]] for row in curves[f"{when} the exchange"] if row[0] in alone}
        for when in ("after", "before")
    )
    assert (
        f"DFFKE's clients lie {-min(before.values()):.2f} points below to {max(before.values()):.2f} above them right "
        "before an exchange." in flat
    )
    above = sorted(gain for gain in after.values() if gain > 0)
    late = [-gain for t, gain in after.items() if t >= 10]
    assert (
        f"After it they are above them in {len(above)} of {len(after)}, by {above[0]:.2f} and {above[1]:.2f} points, "
        f"and {min(late):.1f} to {max(late):.1f} below from round 10 on." in flat
    )
    nearest = max(abs(gain) for gain in before.values())
    assert f"right before an exchange DFFKE's clients lie within {nearest:.2f} points of them." in flat


DOCKED = ("resnet18-2", "fiftieth-resnet18")


def of_docked():
    """Return what the server saw of the runs with the stock ResNet-18, and the author's code with it, by round."""
    seen = json.loads(of_study("dffke_answers.json").read_text())
    code = json.loads(of_study("dffke_rounds_resnet18.json").read_text())
    rows = {name: {row["round"]: row for row in seen[name]} for name in DOCKED}
    return code, rows | {"code": {row["round"]: row for row in code["rows"]}}


def test_the_table_of_docked_embeddings():
    """Each row, from what the server saw and from the author's code; that code's setting is the suite's."""
    text = (RESULTS / "dffke.md").read_text()
    flat = " ".join(text.split())
    code, rows = of_docked()
    ours, small, theirs = (rows[name] for name in (*DOCKED, "code"))
    assert [list(of) for of in (ours, small, theirs)] == [list(range(1, end + 1)) for end in (40, 25, 23)]
    for t in (2, 8, 12, 14, 16, 18, 20, 22, 30, 40):
        cells = [str(t), f"{ours[t]['length']:,.1f}", f"{100 * ours[t]['said']:.1f}"]
        for of, keys in ((theirs, ("after", "before", "length", "said")), (small, ("length", "said"))):
            for key in keys:
                scale, digits = {"said": (100, 1), "length": (1, 1)}.get(key, (1, 2))
                cells.append(f"{scale * of[t][key]:.{digits}f}" if t in of else "-")
        assert f"| {' | '.join(cells)} |" in text
    assert f"cut off, that code after {len(theirs)} rounds of {code['rounds']}, fedaudit after {len(small)}." in flat
    (cell,) = [c for c in read_suite(of_study("dffke_cifar_small_resnet18.toml")).cells() if c.label is None]
    assert (code["suite"], code["seed"], code["rounds"]) == ("dffke_cifar_small_resnet18.toml", cell.seed, cell.rounds)
    assert (code["device"], cell.device, cell.model, cell.clients) == ("cuda", "cuda", "resnet18", 5)
    assert {key: value for key, value in code["values"].items() if key in cell.set} == {
        key: value for key, value in cell.set.items() if key in code["values"]
    }
    assert cell.set["colours"] == "plain"
    assert 'with 200 records each, `T_Dec = 10`, `w_Dec = 16`, `colours = "plain"`, seed 0, one H200' in flat
    assert (code["values"]["T_Dec"], code["values"]["w_Dec"]) == (10, 16)
    assert code["checkout"] == json.loads(of_study("parity_dffke.json").read_text())["checkout"]


def test_what_is_said_of_docked_embeddings_in_the_break():
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    code, rows = of_docked()
    ours, small, theirs = (rows[name] for name in (*DOCKED, "code"))
    share = {name: {t: 100 * row["said"] for t, row in of.items()} for name, of in rows.items()}
    of = share["resnet18-2"]
    broken = [of[t] for t in of if t > 13]
    assert (
        f"teachers name the class of {of[12]:.0f} % of their own images in round 12, of {of[13]:.0f} % in round 13, "
        f"and of {min(broken):.0f} to {max(broken):.0f} % from then on." in flat
    )
    whole = [ours[t]["length"] for t in range(1, 13)]
    assert (
        f"have a length of {min(whole):.1f} to {max(whole):.1f} up to round 12, {ours[15]['length']:.0f} in round 15 "
        f"and {ours[40]['length']:,.0f} in round 40. The best test after the exchange is that of round 12." in flat
    )
    assert printed_by("dffke-2")[0]["best round"] == 12
    assert ours[40]["length"] / ours[1]["length"] > 9000, "ten thousand times"
    early = [theirs[t]["length"] for t in range(1, 12)]
    assert (
        f"Its embeddings have a length of {min(early):.1f} to {max(early):.1f} up to round 11, and "
        f"{theirs[23]['length']:.0f} in round 23; the share falls from {share['code'][18]:.0f} % in round 18 to "
        f"{share['code'][22]:.0f} % in round 22." in flat
    )
    late = [theirs[t]["length"] for t in range(12, 24)]
    assert late[0] > max(early[1:]), "from round 12 on"
    assert late == sorted(late)
    authors = " ".join((RESULTS / "authors.md").read_text().split())
    assert "that code's docked embeddings grow from round 12 on" in authors
    assert f"fedaudit's do not in {len(small)} rounds there, and do on all of CIFAR-10" in authors
    quiet = [theirs[t]["epochs"] for t in range(15, 20)]
    assert (
        f"Local training needs {theirs[23]['epochs']:.0f} epochs in round 23, where {min(quiet):.0f} to "
        f"{max(quiet):.0f} were enough in rounds 15 to 19." in flat
    )
    tested = [row for row in theirs.values() if row["after"] is not None]
    lost = sum(row["after"] < row["before"] for row in tested)
    assert f"Its exchange takes points away in {lost} of {len(tested)} tests, before that too." in flat
    longest, least = max(row["length"] for row in small.values()), min(share["fiftieth-resnet18"].values())
    assert f"within {len(small)} rounds*: a length of {longest:.1f} at most, and {least:.0f} % or more." in flat
    assert code["ends_after"] is None, "that code's own rule would not have ended the run"
    curve = [(row["round"], row["after"]) for row in tested]
    assert ends_by_the_authors_rule(curve) is None
    assert f"would not have ended this one by round {tested[-1]['round']}." in flat


def test_the_picture_of_docked_embeddings_shows_what_is_kept(tmp_path, monkeypatch):
    """Each run in both panels, in a colour of its own, and the code dashed."""
    picture = script("dffke_docked_picture")
    _, rows = of_docked()
    names = {**picture.RUNS, picture.CODE: "code"}
    assert set(names.values()) == set(rows)
    found = picture.curves()
    for label, of in found.items():
        kept = rows[names[label]].values()
        assert of[picture.LENGTH] == [(row["round"], row["length"]) for row in kept]
        assert of[picture.SAID] == [(row["round"], 100 * row["said"]) for row in kept]
    drawn = []
    monkeypatch.setattr(picture, "OUT", tmp_path / "a.png")
    monkeypatch.setattr(picture, "draw", lambda found, draw=picture.draw: drawn.append(draw(found)) or drawn[0])
    picture.main()
    left, right = drawn[0].axes
    for axis, name in ((left, picture.LENGTH), (right, picture.SAID)):
        lines = {line.get_label(): line for line in axis.get_lines()}
        assert {label: line.get_xydata().tolist() for label, line in lines.items()} == {
            label: [[t, y] for t, y in of[name]] for label, of in found.items()
        }
        assert [label for label, line in lines.items() if line.get_linestyle() == "--"] == [picture.CODE]
        assert len({line.get_color() for line in lines.values()}) == len(found)
        assert (axis.get_title(loc="left") or axis.get_title()) == name
    assert (left.get_yscale(), right.get_yscale()) == ("log", "linear")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == list(found)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (RESULTS / "dffke_docked.png").read_bytes().startswith(b"\x89PNG")


def test_older_runs_of_dffke_have_the_same_figures_or_lie_near():
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    older = {path.stem: json.loads(path.read_text()) for path in of_study("records/dffke_resnet18_earlier").iterdir()}
    now = [json.loads(of_study(f"records/dffke_resnet18/dffke-{seed}.json").read_text()) for seed in (0, 1)]
    same = older.pop("dffke-0-cf163043")
    assert (same["commit"], same["rounds_done"], len(same["rounds"])) == ("cf163043", 11, 5)
    assert same["rounds"] == now[0]["rounds"][:5], "each figure that was kept"
    assert "(cf163043), cut off after round 11, has the same means and deviations in all five tests" in flat
    assert {run["commit"] for run in older.values()} == {"8c0d7e50"}
    tests = {run["setting"]["seed"]: len(run["rounds"]) for run in older.values()}
    assert tests == {0: 3, 1: 1}, "in three tests of seed 0 and one of seed 1"
    curves = {seed: dict(row[:2] for row in scores_of(run, "exchanged")) for seed, run in enumerate(now)}
    own = {seed: {row[0]: row[3] for row in scores_of(run, "exchanged")} for seed, run in enumerate(now)}
    apart, apart_own = (
        [
            abs(row[column] - of[run["setting"]["seed"]][row[0]])
            for run in older.values()
            for row in scores_of(run, "exchanged")
        ]
        for column, of in ((1, curves), (3, own))
    )
    assert (
        f"lie up to {max(apart):.1f} points beside them after the exchange on the common test set, and up to "
        f"{max(apart_own):.1f} on own classes" in flat
    )


def test_the_picture_of_forty_rounds_shows_the_records(tmp_path, monkeypatch):
    """Each curve in its panel, under its name and in a colour of its own, on one axis; `main` draws both seeds."""
    picture = script("dffke_rounds_picture")
    for seed in (0, 1):
        _, curves = of_dffke_itself(seed)
        assert picture.curves(seed) == {
            name: [(row[0], row[1]) for row in curves[name]]
            for name in ("before the exchange", "after the exchange", "local training")
        }
    figure = picture.draw([0, 1])
    assert [axis.get_title(loc="left") or axis.get_title() for axis in figure.axes] == ["seed 0", "seed 1"]
    for seed, axis in enumerate(figure.axes):
        drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
        assert drawn == {name: [[t, y] for t, y in curve] for name, curve in picture.curves(seed).items()}
        assert len({line.get_color() for line in axis.get_lines()}) == 3
        assert axis.get_ylim() == figure.axes[0].get_ylim()
    assert figure.axes[0].get_ylabel() == "common test set, %"
    drawn = []
    monkeypatch.setattr(picture, "OUT", tmp_path / "a.png")
    monkeypatch.setattr(picture, "draw", lambda seeds: drawn.append(seeds) or figure)
    picture.main()
    assert drawn == [[0, 1]]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (RESULTS / "dffke_cifar10.png").read_bytes().startswith(b"\x89PNG")


def test_forty_rounds_on_digits_in_two_precisions():
    """The table, and that the exchange goes on in both; what the server saw is kept beside the records."""
    text = (RESULTS / "dffke.md").read_text()
    flat = " ".join(text.split())
    cells_of_forty = read_suite(of_study("dffke_digits_forty.toml")).cells()
    names = ("float32", "bf16")
    runs = [json.loads(of_study(f"records/dffke_digits_forty/{name}.json").read_text()) for name in names]
    seen = json.loads(of_study("dffke_answers.json").read_text())
    for name, run in zip(names, runs, strict=True):
        setting = run["setting"]
        assert (setting["precision"], setting["seed"], run["commit"]) == (name, 0, "bbdbcfcf")
        assert (run["rounds_done"], run["versions"]["torch"][:4]) == (40, "2.13")
        assert [row["round"] for row in seen[name]] == list(range(1, 41))
    after, before = ([list(scores_of(run, point)) for run in runs] for point in ("exchanged", "trained"))
    for t in (2, 10, 20, 30, 40):
        cells = [str(t)]
        for name, out, had in zip(names, after, before, strict=True):
            common = [{row[0]: row[1] for row in of}[t] for of in (out, had)]
            row = seen[name][t - 1]
            cells += [f"{common[0]:.2f}", f"{common[1]:.2f}", f"{100 * row['said']:.1f}", f"{row['length']:.1f}"]
            cells.append(f"{row['apart']:.2f}")
        assert f"| {' | '.join(cells)} |" in text
    late = [[row[1] for row in curve if row[0] >= 10] for curve in after]
    ranges = [f"{min(of):.1f} to {max(of):.1f}" for of in late]
    assert f"from round 10 on it leaves {ranges[0]} % in float32 and {ranges[1]} in 16 bits." in flat
    gains = [
        [f"{found[1] - had[1]:.1f}" for found, had in zip(out, start, strict=True) if found[0] in (10, 40)]
        for out, start in zip(after, before, strict=True)
    ]
    assert f"{gains[0][0]} points in round 10 and {gains[0][1]} in round 40, and {' and '.join(gains[1])} in 16" in flat
    values = {cell.set[name] for cell in cells_of_forty for name in ("T_Dec", "w_Dec", "h", "B")}
    assert (values, "`T_Dec = 10`, `w_Dec = 16`, `h = 64`, batches of 32, one seed" in flat) == ({10, 16, 64, 32}, True)
    assert min(map(min, late)) > max(max(row[1] for row in curve) for curve in before) - 1, "no break"
    grown, spread = [], []
    for name in names:
        first, last = seen[name][0], seen[name][-1]
        grown.append(f"{last['length'] / first['length']:.0f} times")
        spread.append(f"from {100 * first['apart']:.0f} to {100 * last['apart']:.0f} %")
    assert f"embeddings get {grown[0]} as long from round 1 to round 40, and their variance falls {spread[0]}" in flat
    assert f"in 16 bits {grown[1]}, {spread[1]}." in flat


LABELS = {  # of the kept runs, as the suite has them
    "as-it-is": None,
    "no-limit": "no limit",
    "no-discrepancy": "no discrepancy",
    "docking-rests": "docking layers rest",
    "docking-anew": "docking anew",
    "alone": "alone",
}
EXCHANGING = [name for name in LABELS if name != "alone"]
CODES = {"dffke_rounds": "code", "dffke_rounds_no_limit": "free code"}  # of the author


def of_a_fiftieth():
    """Return the runs, those of the code, accuracies after and before each tested exchange, and lengths by round."""
    runs = {name: json.loads(of_study(f"records/dffke_cifar_small/{name}.json").read_text()) for name in LABELS}
    seen = json.loads(of_study("dffke_answers.json").read_text())
    after, before = (
        {name: {row[0]: row[1] for row in scores_of(run, point)} for name, run in runs.items()}
        for point in ("exchanged", "trained")
    )
    lengths = {name: {row["round"]: row["length"] for row in seen[name]} for name in EXCHANGING}
    codes = {name: json.loads(of_study(f"{file}.json").read_text()) for file, name in CODES.items()}
    for name, code in codes.items():
        after[name], before[name] = (
            {row["round"]: row[point] for row in code["rows"] if row[point] is not None}
            for point in ("after", "before")
        )
        lengths[name] = {row["round"]: row["length"] for row in code["rows"]}
    return runs, codes, after, before, lengths


def test_the_runs_on_a_fiftieth_of_cifar10_are_those_of_the_suite():
    runs, codes, _, _, lengths = of_a_fiftieth()
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    cells = {
        cell.label: cell.model_dump(mode="json") for cell in read_suite(of_study("dffke_cifar_small.toml")).cells()
    }
    commits = {"docking-rests": "64c35cfb", "no-limit": "919f9b2d", "alone": "919f9b2d"}
    for name, run in runs.items():
        made = {key: value for key, value in run["setting"].items() if key not in ("engine", "label", "onednn")}
        assert made == {key: cells[LABELS[name]][key] for key in made}
        assert run["commit"] == commits.get(name, "bbdbcfcf")
        if name in lengths:
            assert list(lengths[name])[: run["rounds_done"]] == list(range(1, run["rounds_done"] + 1))
    done = {name: run["rounds_done"] for name, run in runs.items()}
    cut = done.pop("no-limit")
    assert done == {"as-it-is": 40, "no-discrepancy": 40, "docking-rests": 40, "docking-anew": 25, "alone": 40}
    assert f"| fedaudit, no limit | no limit of local epochs | {cut} of 40, cut off | {commits['no-limit']} |" in flat
    assert f"*fedaudit without the limit* ran for {cut} rounds, in which nothing falls" in flat
    for code in codes.values():
        assert (code["suite"], code["seed"], code["rounds"]) == ("dffke_cifar_small.toml", 0, 40)
        assert code["checkout"] == json.loads(of_study("parity_dffke.json").read_text())["checkout"]
    limited, free = (len(codes[name]["rows"]) for name in CODES.values())
    assert f"from the same first weights | {limited} of 40, cut off | ff966a31 |" in flat
    assert f"| the same without the limit | {free} of 40{', cut off' * (free < 40)} | ff3cbb46 |" in flat
    row = runs["as-it-is"]["hyper_parameters"]
    given = {name: row[name] for name in codes["free code"]["values"]}
    assert codes["free code"]["values"] == {**given, "E_local": 1000}
    assert row["E_local"] == 10


def test_the_tables_of_a_fiftieth_of_cifar10():
    text = (RESULTS / "dffke.md").read_text()
    _, _, after, before, lengths = of_a_fiftieth()
    for t in (2, 8, 14, 16, 18, 20, 26, 32, 40):
        for names, last in (
            (("code", "free code", "as-it-is", "no-limit"), [f"{after['alone'][t]:.2f}"]),
            (("no-discrepancy", "docking-rests", "docking-anew"), []),
        ):
            row = [str(t)]
            for name in names:
                known = t in after[name]
                row.append(f"{after[name][t]:.2f} ({before[name][t]:.2f})" if known else "-")
                row.append(f"{lengths[name][t]:.1f}" if known else "-")
            assert f"| {' | '.join([*row, *last])} |" in text


def test_what_is_said_of_the_fall_on_a_fiftieth_of_cifar10():
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    runs, codes, after, before, lengths = of_a_fiftieth()
    gain = {name: {t: after[name][t] - before[name][t] for t in after[name]} for name in after}
    stops = {name: ends_by_the_authors_rule(list(after[name].items())) for name in after}
    assert {name: code["ends_after"] for name, code in codes.items()} == {name: stops[name] for name in codes}
    assert (
        f"its exchange gains {gain['code'][16]:.2f} points in round 16 and takes {-gain['code'][18]:.2f} in round 18. "
        f"By its own rule it would have ended after round {stops['code']}." in flat
    )
    assert f"from {before['code'][14]:.2f} in round 14 to {before['code'][26]:.2f} in round 26" in flat

    rows = codes["free code"]["rows"]
    trained = [row["epochs"] for row in rows]
    rest = trained[1:]
    assert f"for {trained[0]:.0f} epochs in round 1, on average, and {min(rest):.0f} to {max(rest):.0f} in each" in flat
    free = [value for t, value in gain["free code"].items() if t >= 4]
    assert f"the exchange takes {-gain['free code'][2]:.1f} points in round 2 and gains {min(free):.1f} to" in flat
    assert f"{min(free):.1f} to {max(free):.1f} in each test from round 4 to {len(rows) // 2 * 2}." in flat
    assert min(free) > 0
    assert stops["free code"] is None
    said = [codes[name]["rows"][0]["said"] for name in ("code", "free code")]
    assert (
        f"name the class of {100 * said[0]:.0f} % of their own images in round 1, and {100 * said[1]:.0f} % without"
        in flat
    )
    assert f"and not in the {len(rows)} rounds that it ran for without the limit.*" in flat
    assert f"falls with ten local epochs a round, and not in {len(rows)} rounds without that limit, which" in flat
    authors = " ".join((RESULTS / "authors.md").read_text().split())
    assert f"without that limit it does not in {len(rows)} rounds. With the stock" in authors
    falls = {
        name: min(t for t in of if all(v < 0 for u, v in of.items() if u >= t))
        for name, of in gain.items()
        if of[max(of)] < 0
    }
    assert {name: falls[name] for name in ("code", "as-it-is", "no-discrepancy")} == {
        "code": 18, "as-it-is": 28, "no-discrepancy": 22,
    }  # fmt: skip
    assert not {"free code", "no-limit", "docking-anew"} & set(falls)
    assert "that code's from round 18 on and the preset's from 28 on" in authors
    assert "in which each exchange from round 22 on takes points away" in flat

    for name, words in (("as-it-is", "the first row"), ("no-discrepancy", "without the discrepancy it")):
        top = max(after[name], key=after[name].get)
        assert f"{words} rises to {after[name][top]:.2f} % in round {top}" in flat
        assert f"{after[name][40]:.2f} in round 40, {-gain[name][40]:.2f} points below what the clients" in flat
    worst = max(after["as-it-is"].values()) - after["as-it-is"][40]
    assert (stops["as-it-is"], worst < 8) == (None, True)
    ending = f"would end the latter after round {stops['no-discrepancy']}, and not the first row, whose last test is"
    assert f"{ending} {worst:.2f} below its best." in flat
    back = min(before[name][t] for name in ("as-it-is", "no-discrepancy") for t in before[name] if t >= 20)
    assert f"they are back at {back:.1f} % or more right before each exchange from round 20 on" in flat

    own = [[row[3] for row in scores_of(runs["as-it-is"], point)] for point in ("exchanged", "trained")]
    shown = [f"{min(of):.0f} to {max(of):.0f}" for of in own]
    assert f"clients of the first row have {shown[0]} % after an exchange and {shown[1]} before it." in flat
    alone, there = after["alone"], after["as-it-is"]
    best = max(alone, key=alone.get)
    assert after["alone"] == before["alone"]
    assert f"have {alone[best]:.2f} % in their best test, of round {best}, and {alone[40]:.2f} in round 40" in flat
    over = max(there.values()) - alone[best]
    below = sum(before["as-it-is"][t] < alone[t] for t in alone)
    assert f"first row's best test after an exchange is {over:.2f} points above that" in flat
    assert f"right before an exchange it is below them in {below} of {len(alone)}." in flat

    first, last = ({name: of[edge(of)] for name, of in lengths.items()} for edge in (min, max))
    highest = {name: max(of.values()) for name, of in lengths.items()}
    assert f"from {first['code']:.1f} to {last['code']:,.0f} in 26 rounds of the code" in flat
    assert (
        f"from {first['as-it-is']:.1f} to {last['as-it-is']:.0f} and {last['no-discrepancy']:.0f} in 40 rounds of "
        "fedaudit" in flat
    )
    assert f"They stay at {highest['free code']:.1f} at most in the code without the limit" in flat
    assert f"at {highest['docking-rests']:.1f} where docking layers rest" in flat
    assert f"and at {highest['docking-anew']:.1f} where they begin anew" in flat

    rests, tested = gain["docking-rests"], len(gain["docking-rests"])
    lost = sum(value < 0 for value in rests.values())
    deepest = min(rests, key=rests.get)
    most = f"most in round {deepest} ({-rests[deepest]:.2f}), and {-rests[40]:.2f} in round 40"
    assert f"takes points away in {lost} of {tested} tests, {most}" in flat
    anew = gain["docking-anew"]
    assert f"the exchange gains {anew[22]:.2f} and {anew[24]:.2f} points in rounds 22 and 24" in flat
    within = lengths["no-limit"].values()
    assert f"docked embeddings have a length of {min(within):.1f} to {max(within):.1f}." in flat


def test_the_picture_of_a_fiftieth_of_cifar10_shows_the_records(tmp_path, monkeypatch):
    """Each run in both panels, in a colour of its own, and those of the code dashed."""
    picture = script("dffke_drift_picture")
    _, _, after, before, lengths = of_a_fiftieth()
    names = {**picture.RUNS, **{label: CODES[name] for label, name in picture.CODE.items()}}
    found = picture.curves()
    assert {names[label] for label in found} == {*EXCHANGING, *CODES.values()}
    for label, of in found.items():
        name = names[label]
        assert of[picture.GAIN] == [(t, pytest.approx(after[name][t] - before[name][t])) for t in after[name]]
        assert of[picture.LENGTH] == list(lengths[name].items())
    monkeypatch.setattr(picture, "OUT", tmp_path / "a.png")
    drawn = []
    monkeypatch.setattr(picture, "draw", lambda found, draw=picture.draw: drawn.append(draw(found)) or drawn[0])
    picture.main()
    left, right = drawn[0].axes
    for axis, name in ((left, picture.GAIN), (right, picture.LENGTH)):
        lines = {line.get_label(): line for line in axis.get_lines() if line.get_label() in found}
        assert {label: line.get_xydata().tolist() for label, line in lines.items()} == {
            label: [[t, y] for t, y in of[name]] for label, of in found.items()
        }
        assert [label for label, line in lines.items() if line.get_linestyle() == "--"] == list(picture.CODE)
        assert len({line.get_color() for line in lines.values()}) == len(found)
        assert (axis.get_title(loc="left") or axis.get_title()) == name
    (zero,) = (line for line in left.get_lines() if line.get_label() not in found)
    assert list(zero.get_ydata()) == [0, 0], "what an exchange gains is above it"
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "log")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_four_rivals_and_local_training():
    """Each figure of the first table from the records of three seeds, which the suite made."""
    text = (RESULTS / "dffke.md").read_text()
    flat = " ".join(text.split())
    folder = "records/dffke_rivals_authors"
    runs = {
        (m, seed): json.loads(of_study(f"{folder}/{m}-{seed}.json").read_text())
        for m in {method for method, _ in ROWS.values()}
        for seed in range(3)
    }
    suite = suite_of("dffke_rivals_authors")
    for (method, seed), run in runs.items():
        made = {
            key: value for key, value in run["setting"].items() if key != "engine"
        }  # "auto": the machine says which
        assert sum(all(cell[key] == value for key, value in made.items()) for cell in suite) == 1
        assert (run["setting"]["method"], run["setting"]["seed"], run["status"]) == (method, seed, "done")
        assert (run["rounds_done"], run["commit"], run["setting"]["preset"]) == (50, "0202dd68", "dffke_authors")
        of = run["hyper_parameters"]
        assert (of["crop"], of["flip"], of["jitter"], of["weight_decay"]) == (4, True, 0.4, 1e-5)
    minutes = [run["minutes"] for run in runs.values()]
    assert f"{min(minutes):.1f} to {max(minutes):.1f} minutes a run" in flat

    best = {
        name: [max(scores_of(runs[method, seed], point), key=lambda row: row[1]) for seed in range(3)]
        for name, (method, point) in ROWS.items()
    }
    alone, above, means = best["local training"], {}, {}
    for name, rows in best.items():
        method, point = ROWS[name]
        where = {"lgfedavg": "new head"}.get(method)  # that code reports the best of its tests
        figures = PUBLISHED.get(method) if point == where and method != "local" else None
        cells = [name, f"{figures[0]:.2f} ± {figures[1]:.2f}" if figures else "-"]
        cells.append(", ".join(f"{row[1]:.2f}" for row in rows))
        for column in (1, 3):
            values = [row[column] for row in rows]
            gains = [row[column] - control[column] for row, control in zip(rows, alone, strict=True)]
            means[name, column] = f"{fmean(values):.2f} ± {stdev(values):.2f}"
            above[name, column] = "-" if rows is alone else paired(gains)
            cells += [means[name, column], above[name, column]]
        assert f"| {' | '.join(cells)} |" in text

    by = {(name, column): float(said.split()[0]) for (name, column), said in above.items() if said != "-"}
    near = above["FedProto, nearest prototype", 1]
    assert "[-" not in near
    deployed = {"LG-FedAvg", "FedDistill", "FedTGP, nearest prototype"}
    assert all("[-" in above[name, 1] for name in deployed), "the others are not above local training either"
    assert all(", -" not in above[name, 1] for name in deployed - {"FedTGP, nearest prototype"})
    lower = [control[1] - row[1] for row, control in zip(best["FedTGP, nearest prototype"], alone, strict=True)]
    assert f"FedTGP is lower with each seed, by {min(lower):.1f} to {max(lower):.1f} points" in flat
    ends = [[list(scores_of(runs[m, k], None))[-1][1] for k in range(3)] for m in ("fedtgp", "local")]
    assert f"interval holds 0 ({paired([a - b for a, b in zip(*ends, strict=True)])})" in flat
    assert f"the largest mean gain is {max(gain for (_, column), gain in by.items() if column == 3):.2f} points" in flat
    both = list(zip(best["FedProto, nearest prototype"], best["FedProto, own classifier"], strict=True))
    gain = paired([a[1] - b[1] for a, b in both]).lstrip("+")
    assert f"by their own classifiers the same models are {gain} points lower" in flat
    assert all(a[3] < b[3] for a, b in both), "on its own classes it is lower with each seed"
    assert ", -" not in paired([a[3] - b[3] for a, b in both]), "and the interval holds 0"

    rivals = {ROWS[name][0]: rows for name, rows in best.items() if ROWS[name][1] is None}
    over = [fmean(row[1] for row in rows) - PUBLISHED[m][0] for m, rows in rivals.items() if m != "local"]
    assert (round(min(over)), round(max(over))) == (5, 8), "5 to 8 points above their published figures"
    apart = [max(row[1] for row in rows) - min(row[1] for row in rows) for rows in rivals.values()]
    assert f"the seeds lie {min(apart):.1f} to {max(apart):.1f} points apart" in flat
    assert all(rows[0][1] == max(row[1] for row in rows) for rows in rivals.values()), "seed 0 above the others"
    spreads = [row[2] for rows in rivals.values() for row in rows]
    assert f"(ours: {min(spreads):.1f} to {max(spreads):.1f} in the best round)" in flat
    assert f"the last one in {sum(row[0] == 50 for rows in rivals.values() for row in rows)} of 15 runs" in flat
    curves = [[row[1] for row in scores_of(run, None)] for run in runs.values()]
    assert f"over the last ten rounds is at most {max(curve[-1] - curve[-3] for curve in curves):.1f} points" in flat
    plain = [json.loads(of_study(f"records/dffke_rivals_cifar10/fedproto-{s}.json").read_text()) for s in range(3)]
    tops = [max(row["points"]["prototypes"]["global_test"]["mean"] for row in run["rounds"]) for run in plain]
    lower = fmean(row[1] for row in rivals["fedproto"]) - 100 * fmean(tops)
    assert f"at {100 * fmean(tops):.2f} (below), {lower:.1f} points lower" in flat


def test_fedproto_at_full_length():
    """Each figure of the section on Table 2 is one of the records, and the authors' rule stops within their rounds."""
    flat = " ".join((RESULTS / "dffke.md").read_text().split())
    runs = [json.loads(of_study(f"records/dffke_rivals_cifar10/fedproto-{seed}.json").read_text()) for seed in range(3)]
    suite = [cell.model_dump(mode="json") for cell in read_suite(of_study("dffke_rivals_cifar10.toml")).cells()]
    asked = ("method", "preset", "set", "dataset", "partition", "model", "rounds", "eval_every", "precision", "seed")
    for run in runs:
        assert sum(all(cell[key] == run["setting"][key] for key in asked) for cell in suite) == 1
        assert (run["rounds_done"], run["commit"]) == (100, "7e262cd9")
        assert run["minutes"] == pytest.approx(15, abs=0.5)

    def curve(run, point):
        found = [(row["round"], row["points"][point]["global_test"]) for row in run["rounds"]]
        return [(at, 100 * test["mean"], 100 * test["std"]) for at, test in found]

    def row(name, published, tests):
        means = [mean for _, mean, _ in tests]
        each = " | ".join(f"{mean:.2f} ± {std:.2f}" for _, mean, std in tests)
        return f"| {name} | {published} | {each} | {fmean(means):.2f} ± {stdev(means):.2f} |"

    mean, spread = next(c for c in find_table("dffke", "2").column if c.name == "CIFAR-10, alpha 0.1").figures[
        "fedproto"
    ]
    near, own = ([curve(run, point) for run in runs] for point in ("prototypes", "classifier"))
    best = [max(one, key=lambda test: test[1]) for one in near]
    assert row("best round, nearest prototype", f"{mean:.2f} ± {spread:.2f}", best) in flat
    theirs = [max(one, key=lambda test: test[1]) for one in own]
    assert row("best round, own classifier", "-", theirs) in flat
    last = [one[-1] for one in near]
    assert row("last round, nearest prototype", "-", last) in flat
    stops = []
    for one in near:
        gains = [at for i, (at, mean, _) in enumerate(one) if mean > max((m for _, m, _ in one[:i]), default=-1)]
        stops.append(next(at for at, _, _ in one if at - max(g for g in gains if g <= at) >= 50))  # ten tests
    said = " | ".join(f"{at}; {stop}" for (at, _, _), stop in zip(best, stops, strict=True))
    assert f"| its round; stop by the authors' rule | - | {said} | - |" in flat
    lower = [a[1] - b[1] for a, b in zip(best, theirs, strict=True)]
    assert f"its classifier is {min(lower):.1f} to {max(lower):.1f} points lower" in flat
    fallen = [a[1] - b[1] for a, b in zip(best, last, strict=True)]
    assert f"the last one is {min(fallen):.1f} to {max(fallen):.1f} points lower" in flat
    means = [at[1] for at in best]
    assert f"The seeds lie {max(means) - min(means):.1f} points apart" in flat
    assert f"comes to its best within {max(at for at, _, _ in best)} rounds, at {fmean(means):.2f} (below)" in flat
    assert fmean(at[1] for at in theirs) < mean < fmean(means), "the published figure lies between the two"
