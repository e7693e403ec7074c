"""A row of its own in a suite: a name in reports, attacks that the others do not get; a suite that extends another."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from fedaudit import registry
from fedaudit.errors import FedauditError, SettingError
from fedaudit.runtime.folder import folder_name, setting_key
from fedaudit.setting import Setting
from fedaudit.suite.budgets import Budget
from fedaudit.suite.scheduler import _save, make_cells
from fedaudit.suite.suite_file import (
    Extra,
    Suite,
    _budgets,
    check_suite,
    read_suite,
    save_suite,
    saved_suite,
    shipped,
)

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


# --- each function alone ----------------------------------------------------------------------------------------------


def test_the_grid_is_walked_and_equal_points_are_one_cell():
    """Methods outermost. The second method fixes the rounds, so that its two points of rounds are one cell."""
    suite = Suite(
        base={"clients": 3, "rounds": 9, "seed": 8},
        grid={"rounds": [1, 2], "seed": [0, 5]},
        methods=[{"method": "local", "attacks": ["loss"]}, {"method": "fedavg", "rounds": 4}],
    )
    assert [(cell.method, cell.rounds, cell.seed, cell.clients) for cell in suite.cells()] == [
        ("local", 1, 0, 3), ("local", 1, 5, 3), ("local", 2, 0, 3), ("local", 2, 5, 3), ("fedavg", 4, 0, 3),
        ("fedavg", 4, 5, 3),
    ]  # fmt: skip
    (plain,) = Suite(base={"rounds": 2}).cells()
    assert (plain.method, plain.rounds) == ("fedavg", 2)


def test_cells_that_have_a_kept_record_are_left_out():
    suite = Suite(grid={"seed": [0, 1, 2]})
    keys = [setting_key(cell)[:12] for cell in suite.cells()]
    assert len(set(keys)) == 3
    left = suite.model_copy(update={"left_out": [keys[1], "another"]})
    assert [cell.seed for cell in left.cells()] == [0, 2]
    with pytest.raises(SettingError, match="has a kept record by today's code"):
        suite.model_copy(update={"left_out": keys}).cells()
    with pytest.raises(SettingError, match=r"a list in \[grid\] is empty"):
        Suite(grid={"seed": []}).cells()


def test_trials_are_of_the_named_seeds():
    assert [Suite(trials=trials).trials for trials in (0, 1)] == [0, 1]
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        Suite(trials=-1)
    suite = Suite(grid={"seed": [0, 1]}, trials=7)
    assert [suite.tries(cell) for cell in suite.cells()] == [7, 7]
    assert [suite.model_copy(update={"trials_on": [1]}).tries(cell) for cell in suite.cells()] == [0, 7]
    assert [suite.model_copy(update={"trials_on": []}).tries(cell) for cell in suite.cells()] == [0, 0]


def test_which_attacks_are_wanted():
    """Of the suite, then of the cell's row, also as it is under DP-SGD, then of tables [[extra]]; each once."""
    rows = [
        {"method": "fedavg", "rounds": 2, "attacks": ["rmia", "loss"], "under_dp_sgd": {"rounds": 3}},
        {"method": "fedavg", "rounds": 5, "attacks": ["lira"]},
        {"method": "local"},
    ]
    extra = [
        Extra(attacks=["entropy"], on={"seed": [1, 2], "rounds": [2, 3]}), Extra(attacks=["shadow", "loss"]),
    ]  # fmt: skip
    suite = Suite(methods=rows, attacks=["loss"], extra=extra)

    def wanted(**values):
        return suite.wanted(Setting.make(**values))

    assert wanted(rounds=2) == ["loss", "rmia", "shadow"]
    assert wanted(rounds=3, seed=2) == ["loss", "rmia", "entropy", "shadow"]
    assert wanted(rounds=5, seed=1) == ["loss", "lira", "shadow"]
    assert wanted(method="local", rounds=2) == ["loss", "shadow"]
    assert suite.wanted() == ["loss"]
    assert "loss" in Suite().wanted()
    assert len(Suite().wanted()) > 10, "all there are"
    assert Suite(attacks=[]).wanted() == []


def test_a_saved_suite_is_read_again_without_files_that_are_not_there(tmp_path):
    """Budgets against a baseline are left out, as the baseline is not in the folder."""
    budgets = [Budget(max="1 kB"), Budget(baseline="main.json", max_growth="1 %"), Budget(metric="accuracy", min=0.5)]
    suite = Suite(base={"rounds": 1}, attacks=["loss"], trials=3, threats=["outsider"], budgets=budgets)
    save_suite(suite, tmp_path)
    assert (tmp_path / "suite.json").read_text() == json.dumps(suite.model_dump(), indent=1)
    found = saved_suite(tmp_path)
    assert found == suite.model_copy(update={"budgets": [budgets[0], budgets[2]]})
    with pytest.raises(SettingError, match="there is no such folder"):
        saved_suite(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError, match="from before suites were kept"):
        saved_suite(tmp_path / "empty")
    save_suite(suite.model_copy(update={"base": {"method": "stranger_of_all.module:Method"}}), tmp_path)
    with registry.read_from(tmp_path), pytest.raises(SettingError, match=r"suite\.json: .* names code outside"):
        saved_suite(tmp_path)


def test_baselines_lie_beside_the_file_that_names_them(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "limits.toml").write_text('[[budget]]\nbaseline = "a.json"\nmax_growth = "1 %"\n')
    (of_file,) = _budgets("inner/limits.toml", tmp_path / "suite.toml")
    assert of_file.baseline == str(tmp_path / "inner" / "a.json")
    one = {"baseline": "b.json", "max_growth": "1 %"}
    for given in (one, [one]):
        (inline,) = _budgets(given, tmp_path / "suite.toml")
        assert inline.baseline == str(tmp_path / "b.json")
    first, second = _budgets([{"max": "2 kB"}, one], tmp_path / "suite.toml")
    assert (first.baseline, first.max, second.max_growth) == (None, "2 kB", "1 %")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base": {"roundz": 1}}, r"'roundz' in \[base\]\. Did you mean 'rounds'"),
        ({"grid": {"sead": [1]}}, r"'sead' in \[grid\]\. Did you mean 'seed'"),
        ({"methods": [{"metod": "local"}]}, r"'metod' in \[\[methods\]\]\. Did you mean 'method'"),
        ({"base": {"attacks": ["loss"]}}, r"'attacks' in \[base\]"),
        ({"extra": [Extra(attacks=[], on={"sead": [1]})]}, r"'sead' in \[\[extra\]\]"),
        ({"base": {"method": "fedvag"}}, "Unknown method 'fedvag'"),
        ({"base": {"dataset": "digitz"}}, "digitz"),
        ({"base": {"privacy": {"logitz": {"epsilon": 1.0}}}}, "logitz"),
        ({"trials_on": [0, 4, 3]}, r"trials_on = \[0, 4, 3\]: no cell has the seed 3\."),
        ({"methods": [{"attacks": "loss"}]}, "is not a list"),
        ({"attacks": ["loss", {"attack": "loss"}]}, "The attack 'loss' is listed twice"),
        ({"threats": ["nobody"]}, "nobody"),
        ({"threats": ["server", "outsider", "server"]}, "The threat 'server' is listed twice"),
        ({"budgets": [Budget(method="local", max="1 kB")]}, "about the method 'local', which no cell has"),
        ({"budgets": [Budget(dataset="mnist", max="1 kB")]}, "about the dataset 'mnist', which no cell has"),
    ],
)
def test_each_thing_that_is_wrong_with_a_suite(change, said):
    usual = {"attacks": ["loss"], "threats": ["server", "outsider"], "trials_on": [0]}
    right = {"budgets": [Budget(method="fedavg", max="1 kB"), Budget(dataset="digits", max="1 kB"), Budget(max="1 kB")]}
    check_suite(Suite(**usual, **right, extra=[Extra(attacks=[], on={"seed": [1]})], methods=[{"attacks": []}]))
    with pytest.raises(FedauditError, match=said):
        check_suite(Suite(**{**usual, **change}))


ROWS = [{"method": "dffke", "set": {"R": 1}}, {"method": "dffke", "set": {"R": 1, "kl": "teacher-first"}}]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            ROWS,
            r'method = "dffke", set = \{"R": 1\}, and method = "dffke", set = \{"R": 1, "kl": "teacher-first"\} \(s',
        ),
        ([{"label": "a"}, {"label": "b"}], r'label = "a", set = \{\}, and method = "fedavg", label = "b", set = \{\}'),
        ([{"set": {"E": 1}}, {"set": {"E": 1.0}}], r'\{"E": 1\}, and method = "fedavg", set = \{"E": 1.0\}'),
        ([{"preset": "P"}, {"set": {"E": 1}}], r'preset = "P", set = \{\}, and method = "fedavg", set = \{"E": 1\}'),
    ],
)
def test_two_rows_with_the_same_settings_are_an_error_that_names_both(rows, said, monkeypatch):
    """Presets and defaults are filled in before the rows are compared, and a name makes no difference."""
    fedavg = registry.find("fedavg")
    monkeypatch.setattr(fedavg, "presets", {**fedavg.presets, "P": {"E": 1}})
    other = [*rows[:1], {**rows[1], "rounds": 9}]
    check_suite(Suite(attacks=[], grid={"seed": [3, 4]}, methods=other))
    with pytest.raises(SettingError, match=said) as told:
        check_suite(Suite(attacks=[], grid={"seed": [3, 4]}, methods=rows))
    assert str(told.value).endswith("(seed 3). Remove one, or set what they should differ in.")


def test_rows_that_cannot_be_made_fail_by_themselves():
    """A cell with a wrong hyper-parameter fails when it runs, and the others go on."""
    wrong = [{"set": {"eta": -1.0}}, {"set": {"eta": -2.0}}, {"set": {"Z": 1}}]
    check_suite(Suite(attacks=[], methods=wrong))
