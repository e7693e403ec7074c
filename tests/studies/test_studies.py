"""The suites of benchmarks/studies can be read, and none names a setting or a hyper-parameter that is not there."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedaudit import registry
from fedaudit.suite.suite_file import SUITES as PACKAGE
from fedaudit.suite.suite_file import read_suite

STUDIES = Path(__file__).resolve().parents[2] / "benchmarks" / "studies"
SUITES = sorted(path for path in STUDIES.glob("*/*.toml") if path.parent.name != "shared")  # tables, not suites
SHIPPED = sorted(PACKAGE.glob("*.toml"))


def stand_in(path, tmp_path, monkeypatch):
    """Write a file of arrays for one that a study writes first: protections need to know its classes."""
    monkeypatch.chdir(tmp_path)
    if (data := tomllib.loads(path.read_text()).get("base", {}).get("dataset", "")).startswith("npz:"):
        (tmp_path / data.removeprefix("npz:")).parent.mkdir(parents=True)
        x, y = np.zeros((400, 1, 28, 28), np.uint8), np.arange(400) % 10
        np.savez(data.removeprefix("npz:"), x=x, y=y, test_x=x[:10], test_y=y[:10])


@pytest.mark.parametrize("path", SUITES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_cell_can_be_made(path, tmp_path, monkeypatch):
    stand_in(path, tmp_path, monkeypatch)
    for setting in read_suite(path).cells():
        registry.find(setting.method).make(setting.set, setting.preset)


@pytest.mark.parametrize("path", SUITES + SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_two_cells_are_the_same(path, tmp_path, monkeypatch):
    """With presets and defaults filled in, whatever a row is called: a default that changed makes rows coincide."""
    stand_in(path, tmp_path, monkeypatch)
    found = {}
    for cell in read_suite(path).cells():
        method = registry.find(cell.method).make(cell.set, cell.preset).model_dump()
        setting = cell.model_dump(exclude={"label", "preset", "set"})
        other = found.setdefault(json.dumps([setting, method], sort_keys=True, default=str), cell)
        assert other is cell, f"{other.method} {other.set} and {cell.set}, seed {cell.seed}"


def flat(values, within=""):
    """Return a table's values by their whole names."""
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{within}{key}.") if isinstance(value, dict) else {f"{within}{key}": value}
    return found


@pytest.mark.parametrize(
    ("suite", "records", "whole"),
    [
        ("dffke/dffke", "dffke_digits", True),
        ("dffke/dffke_authors_digits", "dffke_authors_digits", True),
        ("dffke/dffke_digits_forty", "dffke_digits_forty", True),
        ("dffke/dffke_readings", "dffke_readings", False),
        ("dffke/dffke_seeds", "dffke_seeds", True),
        ("dfrd/dfrd_control", "dfrd_control", False),
        ("dfrd/dfrd_dense", "dfrd_dense", True),
        ("dfrd/dfrd_fmnist", "dfrd_fmnist", True),
        ("dfrd/dfrd_hosts", "dfrd_hosts", False),
        ("dfrd/dfrd_scratch_cnn", "dfrd_scratch_cnn", True),
        ("dfrd/dfrd_scratch_fmnist", "dfrd_scratch_fmnist", True),
        ("dfrd/dfrd_table1_fmnist", "dfrd_table1_fmnist", True),
        ("fedaf/fedaf_authors_fmnist", "fedaf_authors_fmnist", False),
        ("fedzge/fedzge_table2_cifar10", "fedzge_central_cifar10", False),
    ],
)
def test_a_suite_still_makes_the_older_runs_of_its_page(suite, records, whole):
    """One cell for each record, in all that the record says. What is younger than the record is as it was: default."""
    cells = []
    for cell in read_suite(STUDIES / f"{suite}.toml").cells():
        kind = registry.find(cell.method)
        method, usual = (flat(of.model_dump(mode="json")) for of in (kind.make(cell.set, cell.preset), kind.make({})))
        cells.append((cell.model_dump(mode="json"), method, usual))
    runs = [json.loads(path.read_text()) for path in (STUDIES / suite).parent.glob(f"records/{records}/*.json")]
    assert runs
    apart = ("label", "preset", "set", "device", "engine", "onednn", "twins")  # how it was said, and carried out
    for run in runs:
        setting = {key: value for key, value in run["setting"].items() if key not in apart}
        had = flat(run["hyper_parameters"])
        if run["setting"]["method"] == "dffke" and not had["T_FKE"]:
            del had["kl"]  # there is no exchange
        same = [
            cell
            for cell, method, usual in cells
            if all(cell[key] == value for key, value in setting.items())
            and all(method[key] == had[key] if key in had else method[key] == usual[key] for key in method)
        ]
        assert len(same) == 1, f"{run['setting']['method']} {run['setting']['set']}, seed {run['setting']['seed']}"
    assert not whole or len(cells) == len(runs)


def test_figure_4_is_the_whole_grid():
    """Six weights of each loss: 36 pairs, three seeds."""
    cells = read_suite(STUDIES / "dfrd" / "figure4.toml").cells()
    assert len({(c.set["beta_tran"], c.set["beta_div"]) for c in cells}) == 36
    assert len(cells) == 108


def test_resnet_18_of_fedaf_has_the_reading_of_its_table_1():
    """The paper gives one image learning rate for CIFAR-10, whatever the network. ResNet-18 needs it in deviations."""

    def readings(suite):
        cells = read_suite(STUDIES / "fedaf" / suite).cells()
        return {c.method: (c.preset, c.set) for c in cells if c.method in ("fedaf", "feddm")}

    assert readings("fedaf_resnet.toml") == readings("fedaf_table1_cifar10.toml")
    assert readings("fedaf_resnet.toml")["fedaf"][1]["sigma_x"] == 0.402


# Methods whose messages depend on the records: on which classes a client holds, or on how near its layers are.
BY_RECORDS = {"dffke", "fedaf", "feddm", "fedproto", "feddistill", "fedgh", "fedtgp", "fedfree"}


def test_seeds_of_one_setting_sent_as_much_in_a_round() -> None:
    """Whole models are as large in each round: what one of several seeds lacks shows here."""
    found: dict[str, set[tuple[float, ...]]] = {}
    for path in STUDIES.glob("*/records/**/*.json"):
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or not record.get("rounds_done") or "up_bytes" not in record:
            continue
        setting = {name: value for name, value in record["setting"].items() if name != "seed"}
        if setting["method"] in BY_RECORDS or setting["dropout"]:
            continue
        key = f"{path.parent.name}: {json.dumps(setting, sort_keys=True)}"
        both = (record[f"{way}_bytes"] / record["rounds_done"] for way in ("up", "down"))
        found.setdefault(key, set()).add(tuple(both))
    assert sum(len(of) == 1 for of in found.values()) > 60
    assert {key[:300]: of for key, of in found.items() if len(of) > 1} == {}


def test_no_answer_of_fedaf_s_clients_is_missing_in_kept_runs() -> None:
    """As many images come in each round as classes are held. What is missing leaves a part of a class a round."""
    sizes, found = {"cifar10": 3 * 32 * 32, "fashion-mnist": 28 * 28}, 0
    for path in STUDIES.glob("fedaf/records/**/*.json"):
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or "up_bytes" not in record or not record.get("rounds_done"):
            continue
        setting, values = record["setting"], record["hyper_parameters"]
        if setting["method"] not in ("fedaf", "feddm") or setting["dataset"] not in sizes or setting["privacy"]:
            continue
        pixel = 4 if values["clamp"] == "none" else 1
        images, each = values["IPC"] * sizes[setting["dataset"]] * pixel, record["up_bytes"] / record["rounds_done"]
        sent = [each / (images + 8 + 48 * means) for means in range(3)]  # a label, and mean logits or soft labels
        assert any(classes.is_integer() for classes in sent), f"{path.parent.name}/{path.stem}: {sent} classes a round"
        found += 1
    assert found > 40
