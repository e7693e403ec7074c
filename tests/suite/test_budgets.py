"""Budgets: kept, broken, against a baseline, malformed, about nothing; and the plugin in somebody else's suite."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import reported
import unequal

from fedaudit import run
from fedaudit.errors import SettingError
from fedaudit.runtime.run_record import read_record
from fedaudit.suite.budgets import (
    Budget,
    Outcome,
    ceilings,
    check_budget,
    check_runs,
    measure,
    parse_budgets,
    read_budgets,
)
from fedaudit.units import bytes_text, parse_bytes

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """FedAvg on digits: the model is 4 x 13,706 = 54,824 bytes up and down, and 8 for the count."""
    folder = tmp_path_factory.mktemp("gate") / "a"
    run(method="fedavg", rounds=2, clients=3, flops=True, out=folder)
    return folder


def budgets(tmp_path, text):
    path = tmp_path / "budgets.toml"
    path.write_text(text)
    return path


def one(tmp_path, a_run, text):
    (outcome,) = check_runs([a_run], budgets(tmp_path, "[[budget]]\n" + text))
    return outcome


@pytest.mark.parametrize(
    ("text", "value", "kept"),
    [
        ('direction = "up"\nmax = "54832 B"', 54832, True),
        ('direction = "up"\nmax = "54831 B"', 54832, False),
        ('direction = "down"\nmax = 54824', 54824, True),
        ('max = "1 MiB"', 54824 + 54832, True),
        ('field = "Local.n"\nmax = "8 B"', 8, True),
        ('message = "Local"\nper = "round"\nmax = "1 B"', 3 * 54832, False),
        ('message = "Local"\nper = "run"\nmax = "1 GB"', 6 * 54832, True),
        ('metric = "accuracy"\nmin = 0.01', None, True),
        ('metric = "accuracy"\nmin = 0.999', None, False),
        ('metric = "peak_memory"\nmax = "1 MiB"', None, False),
        ('metric = "peak_memory"\nmax = "1 TiB"', None, True),
        ('metric = "flops"\nmax = 1e12', None, True),
        ('metric = "flops"\nmax = 1000', None, False),
    ],
)
def test_ceilings_and_floors(tmp_path, a_run, text, value, kept):
    outcome = one(tmp_path, a_run, text)
    assert outcome.kept == kept
    if value is not None:
        assert outcome.value == value


def test_wire_bytes_are_more_than_payload(tmp_path, a_run):
    text = 'direction = "up"\nmax = "1 MiB"\n'
    payload, wire = (one(tmp_path, a_run, text + f'convention = "{c}"').value for c in ("payload", "wire"))
    assert payload < wire < 1.03 * payload


@pytest.mark.long
def test_a_fattened_method_is_caught_against_the_baseline(tmp_path):
    """4 kB more in 110 kB: beyond the 1 % of growth that is allowed, and the field that grew is named."""
    run(method="outside:Fat", rounds=2, clients=3, out=tmp_path / "main")
    shutil.copy(tmp_path / "main" / "record.json", tmp_path / "main.json")
    path = budgets(tmp_path, '[[budget]]\nbaseline = "main.json"\nmax_growth = "1 %"\n')
    run(method="outside:Fat", rounds=2, clients=3, set={"extra": 200}, out=tmp_path / "same")
    assert check_runs([tmp_path / "same"], path)[0].kept
    run(method="outside:Fat", rounds=2, clients=3, set={"extra": 1000}, out=tmp_path / "fat")
    (outcome,) = check_runs([tmp_path / "fat"], path)
    assert not outcome.kept
    assert "up Extra.x grew most, by 4.00 kB" in outcome.message()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"it has no table \[\[budget\]\]\. Write one or more tables \[\[budget\]\]"),
        ("[[budgets]]\nmax = 1", "Did you mean 'budget'"),
        ('[[budget]]\nmaximum = "1 B"', "Unknown key of a budget"),
        ("[[budget]]\n", "needs one of max, min and baseline"),
        ('[[budget]]\nmax = "1 B"\nmin = 2.0', "needs one of max, min and baseline"),
        ('[[budget]]\nmax = "12 elephants"', "is not a size in bytes"),
        ('[[budget]]\nbaseline = "b.json"', "give baseline and max_growth together"),
        ('[[budget]]\nbaseline = "b.json"\nmax_growth = "much"', "write a share"),
        ('[[budget]]\nbaseline = "b.json"\nmax_growth = "1 %"', "The baseline .*b.json is missing"),
        ('[[budget]]\nmetric = "accuracy"\nmax = 1', "accuracy takes a floor"),
        ('[[budget]]\nmethod = "fedsomething"\nmax = "1 B"', "matches none of the 1 runs"),
        ('[[budget]]\nfield = "Local.weights"\nmax = "1 B"', "matches nothing that fedavg sends"),
        ('[[budget]]\nmetric = "flops"\nmax = "1 GB"', "flops takes a number"),
        ('[[budget]]\nmetric = "flops"\ndirection = "up"\nmax = 1', "flops has no 'up'"),
        ("rounds = = 3", "is not valid TOML"),
    ],
)
def test_a_budget_that_makes_no_sense_is_an_error_not_a_pass(tmp_path, a_run, text, words):
    with pytest.raises(SettingError, match=words):
        check_runs([a_run], budgets(tmp_path, text))


def test_flops_need_a_run_that_counted_them(tmp_path):
    run(method="fedavg", rounds=1, clients=2, out=tmp_path / "a")
    with pytest.raises(SettingError, match="needs a run that counted them"):
        check_runs([tmp_path / "a"], budgets(tmp_path, '[[budget]]\nmetric = "flops"\nmax = 1'))


def test_flops_may_grow_over_a_baseline_too(tmp_path, a_run):
    shutil.copy(a_run / "record.json", tmp_path / "main.json")
    assert one(tmp_path, a_run, 'metric = "flops"\nbaseline = "main.json"\nmax_growth = "0 %"').kept


def test_a_baseline_of_another_method_is_an_error(tmp_path, a_run):
    run(method="local", rounds=1, clients=2, out=tmp_path / "other")
    shutil.copy(tmp_path / "other" / "record.json", tmp_path / "main.json")
    with pytest.raises(SettingError, match=r"main\.json is of local, but .* is of fedavg"):
        one(tmp_path, a_run, 'baseline = "main.json"\nmax_growth = "1 %"')


def test_an_unfinished_run_neither_keeps_nor_breaks_a_budget(tmp_path, a_run):
    record = read_record(a_run)
    record.status = "running"
    record.save(tmp_path)
    with pytest.raises(SettingError, match="is not finished"):
        check_runs([tmp_path], budgets(tmp_path, '[[budget]]\nmax = "1 MiB"'))


def test_exit_codes_and_formats(fedaudit, tmp_path, a_run):
    good = budgets(tmp_path, '[[budget]]\nmax = "1 MiB"\n')
    assert fedaudit("check", a_run, "--budget", good)[0] == 0
    bad = budgets(tmp_path, '[[budget]]\ndirection = "up"\nmax = "50 kB"\n[[budget]]\nmax = "1 MiB"\n')
    code, out, _ = fedaudit("check", a_run, "--budget", bad)
    assert code == 1
    assert "the largest field is up Local.w" in out
    code, out, _ = fedaudit("check", a_run, "--budget", bad, "--format", "github")
    assert code == 1
    assert out.startswith("::error title=fedaudit budget::")
    assert out.count("::error") == 1
    assert "(9.7%25 over)" in out  # a workflow command wants its percent signs so
    code, out, _ = fedaudit("check", a_run, "--budget", bad, "--format", "junit")
    assert code == 1
    suite = ElementTree.fromstring(out)
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert "Local.w" in suite.find("testcase/failure").get("message")
    growth = budgets(tmp_path, '[[budget]]\nbaseline = "gone.json"\nmax_growth = "1 %"\n')
    code, _, err = fedaudit("check", a_run, "--budget", growth)
    assert code == 2
    assert "gone.json is missing. Copy" in err
    nothing = budgets(tmp_path, '[[budget]]\nmethod = "fedzge"\nmax = "1 MiB"\n')
    assert fedaudit("check", a_run, "--budget", nothing)[0] == 2
    assert fedaudit("check", a_run, "--budget", budgets(tmp_path, "[[budget]]\n"))[0] == 2
    assert fedaudit("check", a_run, "--budget", good, "--format", "yaml")[0] == 2
    assert fedaudit("check", tmp_path / "nothing", "--budget", good)[0] == 2


@pytest.mark.long
def test_the_plugin_gates_somebody_elses_method(pytester, monkeypatch):
    pytester.makepyfile(
        somebody_elses="""
        from outside import Averages

        class Mine(Averages):
            pass
        """,
        test_of_somebody_elses="""
        import pytest

        @pytest.mark.comm_budget(uplink="60 kB", downlink="60 kB")
        def test_small(federated_run):
            assert federated_run(method="somebody_elses:Mine", rounds=1, clients=2).status == "done"

        @pytest.mark.comm_budget(uplink="10 kB")
        def test_too_large(federated_run):
            federated_run(method="somebody_elses:Mine", rounds=1, clients=2)

        def test_by_hand(federated_run, comm_budget):
            record = federated_run(method="somebody_elses:Mine", rounds=1, clients=2)
            comm_budget(record, downlink="1 kB", per="run")
        """,
    )
    monkeypatch.syspath_prepend(str(pytester.path))
    result = pytester.runpytest_inprocess("-q", "--strict-markers")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*somebody_elses:Mine: up traffic is *the largest field is up Weights.w*"])


def test_the_plugin_names_the_field_that_grew(pytester, tmp_path):
    """Against a record of the leaner method, saved beside the tests: Fat's 1000 floats are 4.00 kB more than one."""
    run(method="outside:Fat", rounds=1, clients=2, out=tmp_path / "main")
    shutil.copy(tmp_path / "main" / "record.json", pytester.path / "main.json")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.comm_budget(baseline="main.json", max_growth="1 %")
        @pytest.mark.parametrize("extra", [1, 1000])
        def test_growth(federated_run, extra):
            federated_run(method="outside:Fat", rounds=1, clients=2, set={"extra": extra})

        @pytest.mark.comm_budget(baseline="main.json")
        def test_half_a_budget(federated_run):
            federated_run(method="outside:Fat", rounds=1, clients=2)
        """
    )
    result = pytester.runpytest_inprocess("-q", "--strict-markers")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*outside:Fat: traffic is *; up Extra.x grew most, by 4.00 kB.*"])
    result.stdout.fnmatch_lines(["*give baseline and max_growth together*"])


@pytest.mark.parametrize(("text", "value"), [("12 MiB", 12 * 2**20), ("1.5kB", 1500), ("7 b", 7), ("2 GiB", 2**31)])
def test_sizes_in_words(text, value):
    assert parse_bytes(text) == value


def test_decimal_and_binary_units_are_told_apart():
    assert bytes_text(1_500_000) == "1.50 MB"
    assert bytes_text(1.5 * 2**20, binary=True) == "1.50 MiB"
    assert bytes_text(999) == "999 B"
    assert [bytes_text(n) for n in (1000, -1000, 10**6)] == ["1.00 kB", "-1.00 kB", "1.00 MB"]
    assert [bytes_text(n, binary=True) for n in (1000, 1024, 2**20)] == ["1000 B", "1.00 KiB", "1.00 MiB"]
    assert bytes_text(5e15) == "5000.00 TB"


# --- the documents' workflow ---------------------------------------------------------------------------------------


def block(language: str, containing: str) -> str:
    """The code block of the how-to's section on gating that holds a word."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "howto.md").read_text()
    section = text[text.index("### Gate communication in your CI") :].split("\n## ")[0]
    (found,) = [b for b in re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL) if containing in b]
    return found


def readme_method() -> str:
    """The tutorial's own method, whole."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "tutorial.md").read_text()
    section = text[text.index("## How to add a method") :].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


@pytest.mark.long
def test_the_readmes_workflow_works_when_copied(fedaudit, tmp_path, monkeypatch):
    """Its commands, in its order, on a package that holds the tutorial's method; only the floor on accuracy is another,
    because three rounds of that method's default settings reach next to nothing."""
    yaml = pytest.importorskip("yaml", reason="to read the workflow")
    workflow = yaml.safe_load(block("yaml", "jobs:"))
    steps = [step["run"] for step in workflow["jobs"]["budget"]["steps"] if "run" in step]
    assert all(word in " ".join(steps) for word in ("pip install", "fedaudit run", "fedaudit check", "--format github"))
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "my_method.py").write_text(readme_method().replace("class FedAvg(", "class MyMethod("))
    (tmp_path / "budgets.toml").write_text(block("toml", "[[budget]]").replace("min = 0.9", "min = 0.05"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    commands = [shlex.split(step)[1:] for step in steps if step.startswith("fedaudit ")]
    assert [words[0] for words in commands] == ["run", "check"]
    assert fedaudit(*commands[0])[0] == 0
    code, _, err = fedaudit(*commands[1])
    assert code == 2
    assert "main.json is missing. Copy a run's record.json there" in err
    shutil.copy("run/record.json", "main.json")  # as the how-to says
    code, out, err = fedaudit(*commands[1])
    assert (code, out.strip()) == (0, ""), err


def test_the_readmes_test_file_is_a_test_file(pytester):
    pytester.makepyfile("import pytest\n" + block("python", "comm_budget"))
    result = pytester.runpytest_inprocess("-q", "--strict-markers", "--collect-only")
    result.stdout.fnmatch_lines(["2 tests collected*"])


@pytest.mark.parametrize(
    ("limit", "said"), [("40 kB", ("38.45 kB", "40.00 kB")), ("40 KiB", ("37.55 KiB", "40.00 KiB"))]
)
def test_sizes_are_told_in_the_units_of_the_budget(limit, said):
    budget = Budget(max=limit)
    row = Outcome(budget, "a", 38_450.0, budget.limit(), True).row()
    assert (row["measured"], row["allowed"]) == said


# --- unequal rounds


@pytest.fixture
def record():
    """Two clients in round 1, one in round 2; 4000 bytes up and 2000 down."""
    made = reported._record("fedavg", 0, 0.8, releases=True)
    made.rounds[1].participants = [0]
    return made


@pytest.mark.parametrize(("per", "value"), [("client-round", 4000 / 3), ("round", 2000), ("run", 4000)])
def test_bytes_per_client_round_per_round_and_per_run(record, per, value):
    found, fields = measure(Budget(direction="up", per=per, max=1.0), record)
    assert found == pytest.approx(value)
    assert fields == {"up Local.w": pytest.approx(value)}


def test_directions_fields_and_conventions_are_told_apart(record):
    assert measure(Budget(per="run", max=1.0), record)[0] == 6000
    assert measure(Budget(per="run", max=1.0, direction="down"), record)[0] == 2000
    assert measure(Budget(per="run", max=1.0, field="Global.w"), record)[0] == 2000
    assert measure(Budget(per="run", max=1.0, message="Local"), record)[0] == 4000
    assert measure(Budget(per="run", max=1.0, convention="wire"), record)[0] == 6040
    with pytest.raises(SettingError, match="matches nothing"):
        measure(Budget(per="run", max=1.0, message="Loca"), record)


def test_a_budget_is_kept_up_to_its_limit_and_not_beyond(record):
    assert check_budget(Budget(per="run", max=6000.0), record, "r").kept
    assert not check_budget(Budget(per="run", max=5999.0), record, "r").kept
    assert check_budget(Budget(metric="accuracy", min=0.8), record, "r").kept
    assert not check_budget(Budget(metric="accuracy", min=0.81), record, "r").kept


def test_accuracy_is_of_the_last_round(record):
    record.result.chosen = reported._reached(1, 0.95)
    assert measure(Budget(metric="accuracy", min=0.1), record)[0] == pytest.approx(0.8)


def test_growth_is_measured_against_the_baseline(record, tmp_path):
    """The baseline sent 6000 bytes; 5 % more are allowed: 6300."""
    record.save(tmp_path)
    budget = Budget(per="run", baseline="record.json", max_growth="5 %")
    record.traffic[0].payload += 300
    assert check_budget(budget, record, "r", tmp_path).kept
    record.traffic[0].payload += 1
    found = check_budget(budget, record, "r", tmp_path)
    assert not found.kept
    assert found.limit == pytest.approx(6300)
    assert "Local.w grew most" in found.message()


@pytest.mark.parametrize(("key", "value"), [("dataset", "mnist"), ("method", "local"), ("compress", "topk:0.1")])
def test_a_budget_of_another_run_is_not_about_this_one(key, value, record):
    assert Budget(max=1).is_about(record)
    assert Budget(max=1, method="fedavg", dataset="digits", compress="none").is_about(record)
    assert not Budget(max=1, **{key: value}).is_about(record)


def test_the_ceilings_of_single_fields(record):
    """A budget without a direction is about both; others are of another convention, method or data set, or no size."""
    mine = Budget(per="run", max=9.0)
    budgets = [
        Budget(per="run", field="Local.w", max=1.0),
        Budget(per="run", field="Local.n", direction="up", max=2.0),
        Budget(per="run", field="Global.w", direction="down", method="fedavg", dataset="digits", max="3 kB"),
        Budget(per="run", message="Local", max=4.0),
        Budget(per="round", field="a.a", max=5.0),
        Budget(per="run", field="b.b", convention="wire", max=5.0),
        Budget(per="run", field="c.c", method="local", max=5.0),
        Budget(per="run", field="d.d", dataset="mnist", max=5.0),
        Budget(per="run", field="e.e", baseline="b.json", max_growth="1 %"),
        mine,
    ]
    assert ceilings(budgets, mine, record) == {
        "up Local.w": 1.0, "down Local.w": 1.0, "up Local.n": 2.0, "down Global.w": 3000.0,
    }  # fmt: skip


# --- runs in which everything differs: helpers/runs/unequal


@pytest.mark.parametrize("name", ["digits-0", "digits-1", "mnist-0"])
def test_figures_of_unequal_runs(uneven, name):
    told, made = unequal.raw(uneven, name), read_record(uneven / "runs" / name)
    by = {"client-round": 8, "round": 4, "run": 1}
    for direction in ("up", "down"):
        for convention in ("payload", "wire"):
            for per, parts in by.items():
                budget = Budget(direction=direction, convention=convention, per=per, max=1.0)
                assert measure(budget, made)[0] == pytest.approx(unequal.sent(told, direction, convention) / parts)
    assert measure(Budget(field="Local.n", per="run", max=1.0), made)[0] == 64
    assert measure(Budget(metric="epsilon", max=1.0), made)[0] == unequal.most_spent(told)
    assert measure(Budget(metric="time", baseline="b", max_growth="1 %"), made)[0] == pytest.approx(unequal.work(told))
    assert measure(Budget(metric="flops", max=1.0), made)[0] == 5250 + made.setting.seed
    reached = told["rounds"][3]["utility"]["global"]["test"]["accuracy"]
    assert measure(Budget(metric="accuracy", min=0.1), made)[0] == reached


def test_each_budget_is_held_against_its_own_runs(uneven, tmp_path):
    """Three runs of one method on two data sets, of which one breaks each budget."""
    path = budgets(
        tmp_path,
        """
[[budget]]
method = "uneven"
dataset = "digits"
metric = "epsilon"
max = 8.0

[[budget]]
dataset = "mnist"
metric = "auc"
max = 0.54

[[budget]]
method = "uneven"
metric = "refuted"
max = 0
""",
    )
    found = [(o.budget.metric, Path(o.run).name, o.value, o.kept) for o in check_runs([uneven], path)]
    assert found == [
        ("epsilon", "digits-0", 7.25, True), ("epsilon", "digits-1", 8.25, False), ("auc", "mnist-0", 0.54, True),
        ("refuted", "digits-0", 1.0, False), ("refuted", "digits-1", 0.0, True), ("refuted", "mnist-0", 0.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([("a", 50.0, 40.0), ("b", 90.0, 60.0), ("c", 99.0, None), ("d", 10.0, 10.0)], "; b grew most, by 30 B."),
        ([("a", 50.0, 50.0), ("b", 90.0, None), ("c", 60.0, 70.0)], "; the largest field is b with 90 B."),
        ([], "."),
    ],
)
def test_a_broken_budget_names_the_field_that_grew_most(fields, said):
    (budget,) = parse_budgets([{"metric": "up", "max": 100}], "budgets.toml")
    assert Outcome(budget, "a run", 150.0, 100.0, False, fields).message().endswith(f"(50.0% over){said}")


def test_the_share_that_a_budget_may_grow():
    found = [Budget(max_growth=text).growth() for text in ("1 %", " 50%", "2.5", "0 %")]
    assert found == pytest.approx([0.01, 0.5, 0.025, 0.0])
    for text in ("much", "", None, "1 % more"):
        with pytest.raises(SettingError, match="write a share such as '1 %'"):
            Budget(max_growth=text).growth()


def test_titles_of_budgets():
    assert Budget().title() == "traffic"
    assert Budget(metric="accuracy", method="fedavg").title() == "fedavg accuracy"
    assert Budget(compress="int8", direction="up", message="Local").title() == "int8 up Local"
    assert Budget(direction="down", message="Local", field="Local.w").title() == "down Local.w"


@pytest.mark.parametrize(
    ("budget", "value", "shown"),
    [
        ({"max": "1 kB"}, 2500.0, "2.50 kB"), ({"max": "1 KiB"}, 2048.0, "2.00 KiB"),
        ({"metric": "peak_memory", "max": "1 MB"}, 2048.0, "2.00 KiB"),
        ({"metric": "time", "baseline": "a"}, 1.23456, "1.235 s"),
        ({"metric": "accuracy", "min": 0.5}, 0.123456, "0.1235"), ({"metric": "epsilon", "max": 8.0}, 2.0, "2"),
    ],
)  # fmt: skip
def test_values_are_shown_in_the_units_of_their_metric(budget, value, shown):
    assert Outcome(Budget(**budget), "run", value, 1.0, True).show(value) == shown


def test_rows_and_messages_of_outcomes():
    kept = Outcome(Budget(metric="accuracy", min=0.5), "a", 0.6, 0.5, True)
    assert kept.row() == {"run": "a", "budget": "accuracy", "measured": "0.6", "allowed": "0.5", "kept": "yes"}
    broken = Outcome(Budget(metric="accuracy", min=0.5), "a", 0.4, 0.5, False)
    assert broken.row()["kept"] == "no, 20.0% off"
    assert broken.message() == "a: accuracy is 0.4, the budget 0.5 (20.0% under)."
    over = Outcome(Budget(metric="epsilon", max=8.0), "b", 10.0, 8.0, False)
    assert over.message() == "b: epsilon is 10, the budget 8 (25.0% over)."
    for value, limit in ((float("inf"), 8.0), (3.0, 0.0)):
        assert Outcome(Budget(metric="epsilon", max=8.0), "b", value, limit, False).off("(", ")") == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zzz = 1\nbudgte = 2", r"it has 'budgte', 'zzz'\. Did you mean 'budget'\? Write"),
        ("", r"it has no table \[\[budget\]\]\. Write one or more tables \[\[budget\]\], and nothing else\.$"),
        ("budget = []", r"tables \[\[budget\]\], and nothing else\.$"), ("budget = [3]", "3 is not a budget"),
        ("[[budget]]\nmax = '1 kB'\n[other]", r"budgets\.toml is not a file of budgets: it has 'other'\. Write one or"),
    ],
)  # fmt: skip
def test_files_that_hold_no_budgets(text, said, tmp_path):
    (tmp_path / "budgets.toml").write_text(text)
    with pytest.raises(SettingError, match=said):
        read_budgets(tmp_path / "budgets.toml")
