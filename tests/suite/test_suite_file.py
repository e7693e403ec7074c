"""What a row of a suite may have of its own: a name in reports, and attacks that the others do not get."""

from __future__ import annotations

import json

import pytest

from fedaudit.errors import SettingError
from fedaudit.runtime.folder import folder_name
from fedaudit.suite.scheduler import _save, make_cells
from fedaudit.suite.suite_file import read_suite

SUITE = """
attacks = ["loss"]
[base]
rounds = 1
clients = 2
[grid]
seed = [0, 1]
[[methods]]
method = "fedavg"
label = "Ours"
attacks = [{ attack = "rmia", shadows = 4 }]
[[methods]]
method = "local"
"""


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "suite.toml").write_text(SUITE)
    return read_suite(tmp_path / "suite.toml")


def test_a_rows_own_attacks_are_for_its_cells_alone(suite, tmp_path):
    cells = make_cells(suite, tmp_path)
    found = [(cell.setting.method, cell.setting.seed, len(cell.attacks)) for cell in cells]
    assert found == [("fedavg", 0, 2), ("fedavg", 1, 2), ("local", 0, 1), ("local", 1, 1)]
    assert cells[0].attacks[1] == {"attack": "rmia", "shadows": 4}


def test_a_name_changes_no_folder_and_is_in_the_audits_note(suite, tmp_path):
    """Whoever names a row later does not run it again."""
    cells = make_cells(suite, tmp_path)
    nameless = cells[0].setting.model_copy(update={"label": None})
    assert folder_name(nameless) == cells[0].folder.name
    _save(tmp_path, cells)
    noted = json.loads((tmp_path / "audit.json").read_text())["cells"]
    assert [cell.get("label") for cell in noted] == ["Ours", "Ours", None, None]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('attacks = [{ attack = "rmia", shadows = 4 }]', 'attacks = ["rmiaa"]', "rmiaa"),
        ('attacks = [{ attack = "rmia", shadows = 4 }]', 'attacks = [{ attack = "loss" }]', "listed twice"),
        ('attacks = [{ attack = "rmia", shadows = 4 }]', 'attacks = "rmia"', "is not a list"),
        ('label = "Ours"', 'label = "a\\nb"', "label"),
    ],
)
def test_a_wrong_row_is_an_error_before_anything_runs(tmp_path, before, after, said):
    (tmp_path / "suite.toml").write_text(SUITE.replace(before, after))
    with pytest.raises(SettingError, match=said):
        read_suite(tmp_path / "suite.toml")
