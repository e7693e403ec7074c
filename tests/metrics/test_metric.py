"""One definition of a metric: what is declared in one place is read by every output, and is the same there."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import sys
from pathlib import Path

import metric_readers
import pytest
import reported

import fedaudit.metrics as package
from fedaudit.errors import SettingError
from fedaudit.metrics import metric as registry
from fedaudit.metrics.metric import Metric, limit_named, metric_named, metrics, register, report_columns
from fedaudit.reports.brief import guarantee, in_words
from fedaudit.reports.report import rows_below
from fedaudit.reports.run_tables import tables_of
from fedaudit.reports.terminal import table
from fedaudit.runtime.run_record import read_record
from fedaudit.suite.budgets import parse_budgets

GOLDEN = Path(__file__).parents[1] / "golden"
LOGITS = {"logits": {"epsilon": 1.0, "sensitivity": "clip:1"}}  # protects what is sent, and no training


def saved(folder: Path, *, published: list[str], **more) -> Path:
    record = reported._record("fke", 0, 0.8, **{"releases": True, "privacy": LOGITS, "epsilon": 1.5, **more})
    reported._save(folder, "fke-0", record.model_copy(update={"published": published}), [])
    return folder


@pytest.fixture(scope="module")
def covered(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("covered"), published=["global.safetensors"])


@pytest.fixture(scope="module")
def bare_models(tmp_path_factory) -> Path:
    """The messages have epsilon 1.5, and each client's model, trained without noise, is published."""
    return saved(tmp_path_factory.mktemp("bare"), published=["client-000000.safetensors", "client-000001.safetensors"])


@pytest.fixture
def made_up():
    """A metric that nobody but this test knows: 40 and the number of rounds."""
    metric = Metric(
        "made_up", "Made up", "Cost", "count", "low", False, "Forty and the number of rounds.",
        lambda record: 40 + len(record.rounds),
    )  # fmt: skip
    yield register(metric)
    registry._known.pop("made_up")


# MLflow takes seconds to import; test_export reads what it is given.
OUTPUTS = [pytest.param(name, marks=[pytest.mark.long] if name == "mlflow" else []) for name in metric_readers.READERS]


@pytest.mark.parametrize("output", OUTPUTS)
def test_epsilon_is_infinite_where_plain_models_are_published(bare_models, tmp_path, output):
    """The ledger says 1.5 of the messages. The models give the records away without any noise."""
    assert metric_readers.READERS[output](bare_models, metric_named("epsilon"), tmp_path) == math.inf


@pytest.mark.parametrize("output", ["mark", "report.csv", "report.tex", "show", "runs.csv", "tensorboard"])
def test_epsilon_is_the_ledgers_where_a_global_model_is_published(covered, tmp_path, output):
    assert metric_readers.READERS[output](covered, metric_named("epsilon"), tmp_path) == pytest.approx(1.5)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_new_metric_is_read_everywhere(made_up, covered, tmp_path, output):
    """Registered and nothing else: two rounds make 42."""
    assert metric_readers.READERS[output](covered, made_up, tmp_path) == 42


def test_words_about_published_models(bare_models):
    """The terminal's table and the brief have no number for it: they say it."""
    [row] = rows_below(bare_models)[0]
    assert row.open_models
    assert "∞ *" in table(bare_models)
    assert max(len(line) for line in table(bare_models).splitlines()) <= 80
    assert in_words(row) == "none: models of single participants are published without noise"
    assert guarantee([row]).sentences[0].startswith("Nothing")


def test_a_run_that_sends_nothing_and_publishes_its_models_guarantees_nothing(tmp_path):
    """Local training: the ledger is empty, and so the messages alone have 0."""
    saved(tmp_path, published=["client-000000.safetensors"], releases=False, privacy={}, epsilon=None)
    [row] = rows_below(tmp_path)[0]
    assert row.cells["epsilon"].value == math.inf
    assert row.cells["epsilon"].flag == "the messages alone: nothing computed from records is sent"
    assert metric_readers.READERS["show"](tmp_path, metric_named("epsilon"), tmp_path) == math.inf


def test_what_cannot_be_composed_has_no_epsilon_unless_models_are_bare(tmp_path):
    record = reported._record("fke", 0, 0.8, releases=True, privacy=LOGITS, epsilon=1.5)
    ledger = [client.model_copy(update={"epsilon": None}) for client in record.ledger]
    epsilon = metric_named("epsilon")
    apart = record.model_copy(update={"ledger": ledger})
    assert epsilon.value(apart) is None
    assert epsilon.why_missing([apart]) == "releases under different neighbouring relations: not composed"
    with pytest.raises(SettingError, match="different neighbouring relations"):
        epsilon.limited(apart)
    assert epsilon.value(apart.model_copy(update={"published": ["client-000000.safetensors"]})) == math.inf
    running = record.model_copy(update={"status": "running"})
    assert (epsilon.value(running), epsilon.why_missing([running])) == (None, "no run is finished")


def test_one_seed_that_cannot_be_composed_leaves_the_setting_without_epsilon(tmp_path):
    """Its largest epsilon is not known, so that the other seed's is none."""
    for seed in range(2):
        record = reported._record("fke", seed, 0.8, releases=True, privacy=LOGITS, epsilon=1.5)
        ledger = [client.model_copy(update={"epsilon": None}) for client in record.ledger] if seed else record.ledger
        reported._save(tmp_path, f"fke-{seed}", record.model_copy(update={"ledger": ledger}), [])
    [row] = rows_below(tmp_path)[0]
    assert row.cells["epsilon"].value is None
    assert row.cells["epsilon"].reason.endswith("not composed")


def test_the_best_attack_of_a_run_stands_for_it(tmp_path):
    """AUCs of 0.55 and 0.7, and a baseline that reads nothing has 0.9. Images that a baseline reaches do not count."""
    record = reported._record("fedavg", 0, 0.8, releases=True)
    attacks = [
        reported._membership("loss", "server", 0.55), reported._membership("gap", "server", 0.7),
        reported._membership("prior", "server", 0.9, blind=True), reported._reconstruction("decoder", 0.4),
        {**reported._reconstruction("guess", 0.8), "beats_baselines": False}, reported._reconstruction("other", 0.3),
    ]  # fmt: skip
    reported._save(tmp_path, "fedavg-0", record, attacks)
    found = read_record(tmp_path / "runs" / "fedavg-0")
    assert metric_named("auc").value(found) == 0.7
    assert metric_named("tpr").value(found) == pytest.approx(0.2)
    assert metric_named("identified").value(found) == pytest.approx(0.4)


# --- each figure is what it was ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audit(tmp_path_factory) -> Path:
    return reported.write(tmp_path_factory.mktemp("audit"))


def test_the_table_of_runs_has_the_columns_it_had(audit):
    """The kept runs.csv: its columns, in their order, with their text. What is new stands behind them."""
    before = list(csv.DictReader((GOLDEN / "runs.csv").read_text().splitlines()))
    now = list(csv.DictReader(tables_of(audit).csv("runs").splitlines()))
    assert list(now[0])[: len(before[0])] == list(before[0])
    assert None not in now[0], "as many cells as columns"
    assert [{key: line[key] for key in before[0]} for line in now] == before


def test_budgets_measure_what_they_measured(audit):
    """Values, and errors word by word, of before there was one definition."""
    before = json.loads((GOLDEN / "limits.json").read_text())
    for run, figures in before.items():
        record = read_record(audit / "runs" / run)
        for name, expected in figures.items():
            if isinstance(expected, str) and expected != "inf":
                with pytest.raises(SettingError) as error:
                    limit_named(name).limited(record)
                assert str(error.value) == expected
            else:
                assert limit_named(name).limited(record) == pytest.approx(float(expected), rel=1e-12)


def test_the_columns_of_the_report_are_what_they_were():
    """In their order; a new one may stand between them."""
    before = [
        "accuracy", "own", "global_own", "claim", "epsilon", "lower", "tpr", "auc", "identified", "up", "down",
        "per_byte", "seconds", "memory",
    ]  # fmt: skip
    assert [column.key for column in report_columns() if column.key in before] == before


# --- the registry ------------------------------------------------------------------------------------------------


def test_a_new_column_stands_in_its_part(made_up):
    later = dataclasses.replace(made_up, key="later", part="Utility")
    register(later)
    try:
        keys = [column.key for column in report_columns()]
        assert (keys[3], keys[-1]) == ("later", "made_up")
    finally:
        registry._known.pop("later")


def test_a_file_in_the_folder_is_found_by_being_there(tmp_path, monkeypatch):
    text = """
from fedaudit.metrics.metric import Metric, register
register(Metric("absent", "Absent", "Cost", "count", "low", False, "Answers that are missing.",
                lambda record: sum(len(row.absent) for row in record.rounds)))
"""
    (tmp_path / "absences.py").write_text(text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    try:
        assert metric_named("absent").title == "Absent"
        assert "absent" in [column.key for column in report_columns()]
    finally:
        registry._known.pop("absent", None)
        sys.modules.pop("fedaudit.metrics.absences", None)


@pytest.mark.parametrize("names", [{"key": "epsilon"}, {"key": "x", "table": "peak_memory"}, {"key": "time"}])
def test_a_name_that_is_taken_is_refused(made_up, names):
    with pytest.raises(SettingError, match="is taken"):
        register(dataclasses.replace(made_up, **names))


def test_a_new_metric_without_a_value_says_so(made_up, covered):
    nothing = dataclasses.replace(made_up, value=lambda record: None)
    registry._known["made_up"] = nothing
    [row] = rows_below(covered)[0]
    assert row.cells["made_up"].reason == "not measured"
    with pytest.raises(SettingError, match="The run of fke has no made_up: not measured"):
        nothing.limited(row.first)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"metric": "epsilom", "max": 1.0}, "epsilom.*Did you mean 'epsilon'"),
        ({"metric": "lower", "max": 1.0}, "neither more nor less of lower is better"),
        ({"metric": "own", "max": 1.0}, "own takes a floor"),
        ({"metric": "identified", "min": 0.1}, "identified takes a ceiling"),
    ],
)
def test_a_budget_follows_the_metrics_direction(budget, words):
    with pytest.raises(SettingError, match=words):
        parse_budgets([budget], "budgets.toml")


def test_every_metric_says_what_it_is():
    for metric in metrics().values():
        assert metric.help.endswith(".")
        assert metric.title
        assert metric.bounds[0] < metric.bounds[1]
