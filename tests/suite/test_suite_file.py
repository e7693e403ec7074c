"""A row of its own in a suite: a name in reports, attacks that the others do not get; a suite that extends another."""

from __future__ import annotations

import json

import pytest

from fedaudit.errors import SettingError
from fedaudit.runtime.folder import folder_name
from fedaudit.suite.scheduler import _save, make_cells
from fedaudit.suite.suite_file import read_suite, shipped

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


def extending(tmp_path, text, below=SUITE):
    (tmp_path / "below.toml").write_text(below)
    (tmp_path / "above.toml").write_text(text)
    return read_suite(tmp_path / "above.toml")


def test_a_suite_that_extends_another_joins_base_and_grid_and_replaces_the_rest(tmp_path):
    """Of [base] rounds are changed and clients stay, of [grid] partition is added; attacks and methods are replaced."""
    above = 'extends = "below.toml"\nattacks = []\n[base]\nrounds = 3\n[grid]\npartition = ["iid", "classes:2"]\n'
    suite = extending(tmp_path, above)
    assert suite.base == {"rounds": 3, "clients": 2}
    assert suite.grid == {"seed": [0, 1], "partition": ["iid", "classes:2"]}
    assert suite.attacks == []
    assert [row["method"] for row in suite.methods] == ["fedavg", "local"]
    only = extending(tmp_path, 'extends = "below.toml"\n[[methods]]\nmethod = "fedprox"\n')
    assert ([row["method"] for row in only.methods], only.attacks) == (["fedprox"], ["loss"])


def test_a_shipped_suite_is_extended_by_its_name(tmp_path):
    suite = extending(tmp_path, 'extends = "all"\n[base]\nrounds = 1\n[grid]\nseed = [7]\n')
    all_ = read_suite(shipped("all"))
    assert suite.base == {**all_.base, "rounds": 1}
    assert suite.grid == {**all_.grid, "seed": [7]}
    assert (suite.methods, suite.protections, suite.extra) == (all_.methods, all_.protections, all_.extra)


def test_budgets_of_a_suite_that_is_extended_lie_beside_it(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "below.toml").write_text('budgets = "limits.toml"\n' + SUITE)
    (folder / "limits.toml").write_text('[[budget]]\nmethod = "fedavg"\nmax = "1 kB"\n')
    (tmp_path / "above.toml").write_text('extends = "folder/below.toml"\n')
    (budget,) = read_suite(tmp_path / "above.toml").budgets
    assert (budget.method, budget.max) == ("fedavg", "1 kB")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends = 3", "extends = 3 is not a suite: give the name of one, or a file"),
        ('extends = "al"', "Unknown suite 'al'. Did you mean 'all'?"),
        ('extends = "above.toml"', "a suite cannot extend itself"),
        ('extends = "nowhere.toml"', "nowhere.toml"),
        ('extends = "below.toml"\nbase = 3', "base"),
    ],
)
def test_what_cannot_be_extended_is_told(text, said, tmp_path):
    with pytest.raises(SettingError) as told:
        extending(tmp_path, text)
    assert said in str(told.value)


def test_two_suites_that_extend_each_other_are_told(tmp_path):
    with pytest.raises(SettingError, match=r"leads back to .*a suite cannot extend itself"):
        extending(tmp_path, 'extends = "below.toml"', below='extends = "above.toml"')
