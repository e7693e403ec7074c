"""What gates: `compare` on what nobody can judge, `check` on figures of privacy; and the table at 80 columns."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import reported
import unequal

from fedaudit.errors import SettingError
from fedaudit.reports import sentences, verdicts
from fedaudit.reports.compare import Limit, as_text, compare
from fedaudit.significance import said
from fedaudit.suite.budgets import check_runs

DP = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}


def runs(folder, accuracies, method="fedavg", **more):
    for seed, accuracy in enumerate(accuracies):
        reported._save(folder, f"{method}-{seed}", reported._record(method, seed, accuracy, releases=True, **more), [])
    return folder


@pytest.fixture
def two_seeds(tmp_path):
    """95.3 % becomes 12.1 %, over two seeds."""
    return runs(tmp_path / "a", [0.95, 0.956]), runs(tmp_path / "b", [0.12, 0.122])


def test_what_cannot_be_told_has_a_heading_and_an_exit_code_of_its_own(fedaudit, two_seeds):
    result = compare(*two_seeds)
    assert (result.changed, result.untold) == (False, True)
    heads = [line for line in as_text(result).splitlines() if line and not line.startswith(" ")]
    assert any(line.startswith("Cannot be told, with fewer than 3 seeds") for line in heads)
    told = as_text(result).partition("Cannot be told")[2].partition("Within noise")[0]
    assert "Accuracy 95.3 % -> 12.1 %" in told
    assert fedaudit("compare", *two_seeds)[0] == 3
    assert fedaudit("compare", two_seeds[0], two_seeds[0])[0] == 0, "equal figures are told"


def test_no_difference_of_shares_is_beyond_100_points(tmp_path):
    """Student's t over two seeds gives an interval of hundreds of points; a share can change by 100."""
    result = compare(runs(tmp_path / "a", [0.9, 0.2]), runs(tmp_path / "b", [0.1, 0.8]))
    spreads = re.findall(r"difference \[([-+.\d]+), ([-+.\d]+)\] points", as_text(result))
    assert spreads
    assert all(-100 <= float(low) <= float(high) <= 100 for low, high in spreads)
    assert ("-100", "+100") in spreads


@pytest.mark.parametrize(
    ("limit", "code"),
    [("accuracy=2", 1), ("accuracy=3", 0), ("accuracy=10%", 0), ("accuracy=3%", 1), ("up=0", 0), ("epsilon=0", 0)],
)
def test_a_gate_is_on_the_mean(fedaudit, tmp_path, limit, code):
    """90 % became 87.2 %: 2.8 points, 3.1 % of what it was. Bytes and the ledger's infinity stayed."""
    before, after = runs(tmp_path / "a", [0.9, 0.9, 0.9]), runs(tmp_path / "b", [0.872, 0.862, 0.882])
    found = fedaudit("compare", before, after, "--max-drop", limit)
    assert found[0] == code, found
    assert ("worse than allowed: fedavg: Accuracy 90.0 % -> 87.2 %" in found[2]) == (code == 1)
    assert fedaudit("compare", after, before, "--max-drop", limit)[0] == 0, "better is no drop"


@pytest.mark.parametrize("text", ["accuracy", "speed=2", "claim=1", "accuracy=-1", "accuracy=much", "accuracy=inf"])
def test_a_gate_that_makes_no_sense(text):
    with pytest.raises(SettingError):
        Limit.parse(text)


def test_a_figure_that_is_gone_breaks_its_gate(fedaudit, tmp_path):
    before, after = runs(tmp_path / "a", [0.9] * 3), runs(tmp_path / "b", [0.9] * 3)
    for seed in range(3):
        record = reported._record("fedavg", seed, 0.9, releases=True)
        reported._save(before, f"fedavg-{seed}", record, [reported._membership("loss", "server", 0.6)])
    assert fedaudit("compare", before, after, "--max-drop", "auc=0.1")[0] == 1


# --- budgets on privacy ------------------------------------------------------------------------------------------


@pytest.fixture
def audited(tmp_path):
    """Two runs of one audit: epsilon 9.2 and 9.3, AUC 0.62 and 0.55, one claim refuted in the first."""
    for seed, epsilon, auc, verdict in ((0, 9.2, 0.62, "refuted"), (1, 9.3, 0.55, "not refuted")):
        record = reported._record("fedavg", seed, 0.9, releases=True, privacy=DP, epsilon=epsilon)
        blind = reported._membership("blind_prior", "server", 0.99, blind=True)
        attacks = [reported._membership("loss", "server", auc), blind]
        reported._save(tmp_path / "audit", f"r{seed}", record, attacks, [reported._audit(verdict, 9.2, 1.5)])
    return tmp_path / "audit"


def held(folder, tmp_path, text):
    (tmp_path / "budgets.toml").write_text(f"[[budget]]\n{text}\n")
    return check_runs([folder], tmp_path / "budgets.toml")


@pytest.mark.parametrize(
    ("text", "values", "kept"),
    [
        ('metric = "epsilon"\nmax = 9.25', [9.2, 9.3], [True, False]),
        ('metric = "auc"\nmax = 0.6', [0.62, 0.55], [False, True]),
        ('metric = "tpr"\nmax = 0.1', [0.12, 0.05], [False, True]),
        ('metric = "refuted"\nmax = 0', [1, 0], [False, True]),
        ('metric = "accuracy"\nmin = 0.9', [0.9, 0.9], [True, True]),
    ],
)
def test_budgets_on_privacy_over_the_folder_of_an_audit(audited, tmp_path, text, values, kept):
    """All runs below it. Blind baselines look at nothing that was sent: their AUC of 0.99 is no leak."""
    outcomes = held(audited, tmp_path, text)
    assert [outcome.value for outcome in outcomes] == pytest.approx(values)
    assert [outcome.kept for outcome in outcomes] == kept


def test_an_open_release_breaks_every_epsilon(tmp_path):
    [outcome] = held(runs(tmp_path / "x", [0.9]), tmp_path, 'metric = "epsilon"\nmax = 1000')
    assert not outcome.kept
    assert "epsilon is inf, the budget 1000." in outcome.message()


@pytest.mark.parametrize(("published", "kept"), [("client-0.safetensors", False), ("global.safetensors", True)])
def test_models_that_no_noise_covers_break_every_epsilon(tmp_path, published, kept):
    """Messages under epsilon 1, and at the end clients' plain models, or one that follows from the messages."""
    record = reported._record("fke", 0, 0.9, releases=True, privacy={"logits": {"epsilon": 1.0}}, epsilon=1.0)
    record.published = [published]
    reported._save(tmp_path / "x", "r", record, [], [])
    [outcome] = held(tmp_path / "x", tmp_path, 'metric = "epsilon"\nmax = 1.5')
    assert outcome.kept is kept


def test_time_is_held_against_a_baseline(tmp_path):
    """3.25 s of work in seed 0, 3.35 s in seed 1: 3.1 % more. Evaluation is no work."""
    folder = runs(tmp_path / "x", [0.9, 0.9])
    (tmp_path / "main.json").write_bytes((folder / "runs" / "fedavg-0" / "record.json").read_bytes())
    text = 'metric = "time"\nbaseline = "main.json"\nmax_growth = "{} %"'
    assert [o.kept for o in held(folder, tmp_path, text.format(3))] == [True, False]
    assert [o.kept for o in held(folder, tmp_path, text.format(4))] == [True, True]
    assert held(folder, tmp_path, text.format(3))[1].value == pytest.approx(3.35)
    with pytest.raises(SettingError, match="seconds depend on the machine"):
        held(folder, tmp_path, 'metric = "time"\nmax = 10')


@pytest.mark.parametrize(
    ("metric", "words"), [("auc", "no membership attack with a AUC"), ("refuted", "No claim .* was tested")]
)
def test_a_budget_on_what_was_not_measured_is_an_error(tmp_path, metric, words):
    with pytest.raises(SettingError, match=words):
        held(runs(tmp_path / "x", [0.9]), tmp_path, f'metric = "{metric}"\nmax = 1')


def test_a_budget_that_makes_no_sense_is_shown_beside_the_change(fedaudit, audited, tmp_path):
    (tmp_path / "budgets.toml").write_text('[[budget]]\nmethod = "nobody"\nmax = "1 kB"\n')
    code, out, err = fedaudit("check", audited, "--budget", tmp_path / "budgets.toml", "--format", "github")
    assert code == 2
    assert out.startswith("::error title=fedaudit::")
    assert "matches none of the 2 runs" in out
    assert "matches none" in err


# --- the table in a terminal -------------------------------------------------------------------------------------


def test_an_audit_is_shown_in_80_columns(fedaudit, tmp_path):
    code, out, _ = fedaudit("show", reported.write(tmp_path))
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert out == (Path(__file__).parents[1] / "golden" / "show.txt").read_text()
    assert '"report_schema": 1' in fedaudit("show", tmp_path, "--json")[1]


def test_a_run_is_shown_in_80_columns(fedaudit, tmp_path):
    """Attacks, a ledger, audits and a hostile name: what is too long goes on, indented."""
    folder = reported.write(tmp_path)
    runs = [folder / "runs" / name for name in ("fedavg-0", "fedavg-dp-0", "evil-0", "protos-0")]
    out = "".join(fedaudit("show", run)[1] for run in runs)
    assert max(map(len, out.splitlines())) <= 80
    assert out == (Path(__file__).parents[1] / "golden" / "show_runs.txt").read_text()


# --- what audits of a claim say together ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ps", "tells_at", "outcome", "words"),
    [
        ((1e-4,), 1e-9, "failure", ": the claim is refuted (at a level of 0.001, corrected for all audits (1))"),
        ((4e-4, 0.9, 0.9), 1e-9, "skipped", ": suspicious, so repeat the audit; a claim is refuted at a level of"),
        ((0.9, 0.9, 0.9), 5e-4, "skipped", "could not tell if the noise is as promised at a level of 0.001"),
        ((0.9, 0.9, 0.9), 1e-9, "passed", "; no claim is refuted at a level of 0.001, corrected for all audits (3)"),
    ],
)
def test_a_claim_in_ci_and_in_words(ps, tells_at, outcome, words):
    """One audit in each of some seeds. Of three, 0.0004 is 0.0012; and what tells at 0.0005 does not at 0.00033."""
    audits = [
        reported._audit(said(p, tells_at), 1.0, 0.5).model_copy(update={"p_value": p, "tells_at": tells_at}) for p in ps
    ]
    row = SimpleNamespace(label="a", group=SimpleNamespace(runs=[SimpleNamespace(seed=0, audits=[a]) for a in audits]))
    (case,) = verdicts._claims(row)
    assert case.outcome == outcome
    assert words in sentences._said_of_claims(row)
    assert len({found["together"] for found in sentences.audit_rows(row)} & {"refuted", "suspicious"}) == (
        min(ps) < 0.05
    )


def test_a_refutation_without_a_bound_names_none_in_ci():
    for bound, words in ((0.0, "by scores"), (2.25, "at least 2.25 at 95 %; by scores")):
        runs = [SimpleNamespace(seed=0, audits=[reported._audit("refuted", 1.0, bound)])]
        (case,) = verdicts._claims(SimpleNamespace(label="a", group=SimpleNamespace(runs=runs)))
        assert case.message == f"refuted at a level of 0.001, p = 1e-06: {words}"


# --- runs in which everything differs: helpers/runs/unequal


def test_changes_of_unequal_runs_are_between_means(tmp_path):
    """Before: both seeds on digits and MNIST. After: seed 0 of digits lost accuracy and sends more; MNIST is gone."""
    unequal.write(tmp_path / "before")
    for seed in (0, 1):
        worse = unequal.record(seed=seed)
        test = worse.result.last.global_.test
        test.accuracy, test.low = test.accuracy - 0.2 - 0.02 * seed, 0.1
        worse.traffic[0].payload += 800
        reported._save(tmp_path / "after", f"digits-{seed}", worse, [])
    result = compare(tmp_path / "before", tmp_path / "after")
    assert len(result.pairs) == 1
    assert sorted(label.split()[0] for label in result.only_before) == ["local", "uneven"]
    assert result.only_after == []
    found = {change.column.key: change for change in result.changes}
    told = [unequal.raw(tmp_path / "before", f"digits-{seed}") for seed in (0, 1)]
    reached = [one["rounds"][3]["utility"]["global"]["test"]["accuracy"] for one in told]
    assert found["accuracy"].before == pytest.approx(sum(reached) / 2)
    assert found["accuracy"].after == pytest.approx(sum(reached) / 2 - 0.21)
    assert found["accuracy"].worse_by == pytest.approx(0.21)
    up = [unequal.sent(one, "up") / 8 for one in told]
    assert found["up"].before == pytest.approx(sum(up) / 2)
    assert found["up"].after == pytest.approx(sum(up) / 2 + 100)
    assert found["up"].worse_by == pytest.approx(100)
    assert found["epsilon"].before == found["epsilon"].after == 8.25
    assert found["auc"].after is None
    assert Limit.parse("accuracy=21").breaks(result) == []
    assert len(Limit.parse("accuracy=20.9").breaks(result)) == 1
    assert len(Limit.parse("up=40%").breaks(result)) == 1
    assert Limit.parse("up=50%").breaks(result) == []
