"""The suites of benchmarks/studies can be read, and none names a setting or a hyper-parameter that is not there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedaudit import registry
from fedaudit.suite.suite_file import read_suite

STUDIES = Path(__file__).resolve().parents[2] / "benchmarks" / "studies"
SUITES = sorted(path for path in STUDIES.glob("*/*.toml") if path.parent.name != "shared")  # tables, not suites


@pytest.mark.parametrize("path", SUITES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_cell_can_be_made(path, tmp_path, monkeypatch):
    """A file of arrays that a study writes first is stood in for: protections need to know its classes."""
    monkeypatch.chdir(tmp_path)
    if (data := tomllib.loads(path.read_text()).get("base", {}).get("dataset", "")).startswith("npz:"):
        (tmp_path / data.removeprefix("npz:")).parent.mkdir(parents=True)
        x, y = np.zeros((400, 1, 28, 28), np.uint8), np.arange(400) % 10
        np.savez(data.removeprefix("npz:"), x=x, y=y, test_x=x[:10], test_y=y[:10])
    for setting in read_suite(path).cells():
        registry.find(setting.method).make(setting.set, setting.preset)


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
