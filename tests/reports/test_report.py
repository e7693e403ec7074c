"""Reports: golden files for every format, statistics against SciPy, and what may never be said.

The golden files are written anew by `FEDAUDIT_GOLDEN=write pytest tests/reports/test_report.py`; look at the
difference.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import reported
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from fedaudit.cli.main import app
from fedaudit.errors import FedauditError, SettingError
from fedaudit.metrics.metric import report_columns
from fedaudit.reports.attack_rows import Found
from fedaudit.reports.compare import as_json, as_text, compare
from fedaudit.reports.figures import figures_of, inline, style
from fedaudit.reports.formats import escape
from fedaudit.reports.report import write_report
from fedaudit.reports.row_comparisons import best_row, differences, pareto
from fedaudit.reports.runs import command, grouped, privacy_text, read_runs
from fedaudit.reports.summary_rows import rows_of
from fedaudit.reports.tests_over_seeds import compared, holm, over_seeds
from fedaudit.reports.vocabulary import BY_KEY
from fedaudit.runtime.attack_result import ReconstructionResult
from fedaudit.runtime.meter import Timing
from fedaudit.runtime.scores import Result
from fedaudit.setting import Setting

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = ("html", "md", "json", "csv", "latex")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return reported.write(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def rows(folder):
    return rows_of(grouped(read_runs(folder)[0]))


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory) -> dict[str, str]:
    paths = write_report(folder, FORMATS, tmp_path_factory.mktemp("report"), {"runs/lost": "it was lost"})
    return {name: path.read_text() for name, path in zip(FORMATS, paths, strict=True)}


# --- golden files ------------------------------------------------------------------------------------------------


def _stable(name: str, text: str) -> str:
    """What the golden files hold: without drawings, which are matplotlib's, and whole settings, which may grow."""
    text = re.sub(r"<svg .*?</svg>", "<svg/>", text, flags=re.DOTALL)
    text = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", text, flags=re.DOTALL)
    text = re.sub(r"(The whole setting.*?</p>\s*<pre>).*?(</pre>)", r"\1\2", text, flags=re.DOTALL)
    if name == "json":
        document = json.loads(text)
        for row in document["rows"]:
            assert Setting.make(**row.pop("setting"), seed=0)
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    return text


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_what_it_was(written, name):
    path = GOLDEN / f"report.{'tex' if name == 'latex' else name}"
    text = _stable(name, written[name])
    if os.environ.get("FEDAUDIT_GOLDEN") == "write":
        path.write_text(text)
    if name == "json":
        assert _rounded(json.loads(text)) == _rounded(json.loads(path.read_text()))
    else:
        assert text == path.read_text()


def _rounded(value):
    """Nine digits: the last bits are the platform's."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_called_private_or_secure(written, name):
    text = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", written[name], flags=re.DOTALL)
    assert not re.search(r"\b(private|secure|safe|anonymous)\b", text, re.IGNORECASE)


@pytest.mark.long
def test_a_report_is_made_twice_the_same(folder, written, tmp_path):
    """No dates, no random names, no order of dictionaries: the same runs give the same bytes."""
    again = write_report(folder, FORMATS, tmp_path, {"runs/lost": "it was lost"})
    assert [path.read_text() for path in again] == list(written.values())


def test_hostile_names_stay_names(written):
    """The method is called my_pkg.a|b:Evil<i>_&%$: no tag in HTML, no cell in Markdown, no command in LaTeX."""
    assert "Evil<i>" not in written["html"]
    assert "Evil&lt;i&gt;_&amp;%$" in written["html"]
    table = [line for line in written["md"].splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "my\\_pkg.a|b:Evil\\textless{}i\\textgreater{}\\_\\&\\%\\$" in written["latex"]
    lines = list(csv.reader(io.StringIO(written["csv"])))
    assert {len(line) for line in lines} == {6 + 4 * len(report_columns())}
    assert reported.HOSTILE in [line[0] for line in lines]


@given(st.text("\\~^<>&%$#_{}εδ∞≥≤·aé \n'\"|"))
@settings(max_examples=200, deadline=None)
def test_latex_escapes_what_is_special(text):
    """Outside of commands that `escape` itself writes no special character is left bare."""
    made = escape(text)
    for written in sorted(
        ["\\textbackslash{}", "\\textasciitilde{}", "\\textasciicircum{}", "\\textless{}", "\\textgreater{}",
         "$\\varepsilon$", "$\\delta$", "$\\infty$", "$\\ge$", "$\\le$", "$\\cdot$"], key=len, reverse=True,
    ):  # fmt: skip
        made = made.replace(written, "")
    assert not re.search(r"(?<!\\)[&%$#_{}~^]", made)


def test_the_json_is_strict_and_says_infinity_in_words(written):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    document = json.loads(written["json"], parse_constant=refuse)
    cells = {row["label"]: row["cells"] for row in document["rows"]}
    assert cells["fedavg"]["epsilon"]["value"] == "Infinity"
    assert cells["local"]["epsilon"]["value"] == 0
    assert document["failed"] == {"runs/lost": "it was lost"}


def test_the_schema_document_names_every_key(written):
    """docs/reference/report_schema.md is what others program against: each key of JSON and CSV is in it."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "report_schema.md").read_text()
    document = json.loads(written["json"])
    keys = {*document, *document["rows"][1], *document["columns"][0], *document["comparisons"]["accuracy"][0]}
    keys |= {key for row in document["rows"] for cell in row["cells"].values() for key in cell}
    assert not [key for key in sorted(keys) if f"`{key}`" not in text]


def test_the_schema_document_says_of_each_figure_what_the_metric_says():
    """Its table has the metrics of fedaudit itself; others say in `columns` what they are."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "report_schema.md").read_text()
    told = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.*?) \| ?(.*?) \| (yes|no) \|", text, re.MULTILINE)}
    assert len(told) >= 14
    for key, (unit, better, sampled) in told.items():
        metric = BY_KEY[key]
        assert unit == {"auc": "0 to 1"}.get(metric.unit, metric.unit)
        assert better == (metric.better or "")
        assert sampled == ("yes" if metric.sampled else "no")
        assert metric.column


# --- the rows ----------------------------------------------------------------------------------------------------


def test_rows_are_means_over_seeds_with_their_interval(rows):
    """fedavg reached 0.90, 0.91 and 0.89: mean 0.90, standard error 0.01/sqrt(3), t(0.975, 2) = 4.3027."""
    cell = rows[1].cells["accuracy"]
    half = 4.302652729696142 * 0.01 / math.sqrt(3)
    assert (cell.value, cell.n) == (pytest.approx(0.9), 3)
    assert (cell.low, cell.high) == (pytest.approx(0.9 - half), pytest.approx(0.9 + half))


def test_seconds_leave_out_what_is_inside_other_phases_and_evaluation(rows):
    """Seed 0: tasks 1.0 and 2.0, round 0.25; fit lies inside a task, evaluation is nobody's cost."""
    assert rows[1].cells["seconds"].each[0] == pytest.approx(3.25)


def test_bytes_are_of_one_client_and_round(rows):
    """2 clients x 2 rounds sent 4000 bytes of payload in all."""
    assert rows[1].cells["up"].value == 1000
    assert rows[1].cells["up"].low == rows[1].cells["up"].high == 1000


def test_one_seed_says_so_and_shows_the_runs_own_interval(rows):
    protos = next(row for row in rows if row.group.method == "protos")
    cell = protos.cells["accuracy"]
    assert (cell.low, cell.high) == (pytest.approx(0.16), pytest.approx(0.35))
    assert cell.interval == "Wilson, over test records, of the one run; none over seeds"
    assert any(note.startswith("One seed") for note in protos.notes)
    assert (protos.cells["own"].low, protos.cells["own"].interval) == (None, "none: one seed")


def test_cells_that_mislead_say_so(rows, written):
    """Near chance, a policy that applied to nothing, a setting that does not apply, a refuted claim: on the page."""
    notes = {row.group.method: " ".join(row.notes) for row in rows if row.label != "fedavg"}
    assert "accuracy is not clearly above the 25 % of guessing" in notes["protos"]
    assert "on embeddings applied to nothing" in notes["protos"]
    assert "does not apply to this method" in notes["fedaf"]
    assert "refuted: ε = 1 for one release of Local.w" in notes[reported.HOSTILE]
    for pill in ("under-trained", "setting applied to nothing"):
        assert f'<span class="pill">{pill}</span>' in written["html"]
    assert "applies to nothing that they send: fedaf · logits ε=1, clip 1." in written["html"]


def test_still_rising_accuracy_is_under_trained(tmp_path):
    record = reported._record("fedavg", 0, 0.8, releases=True)
    record.rounds[0].utility = reported._utility(0.7)
    record.curve = []
    reported._save(tmp_path, "a", record, [])
    [row] = rows_of(grouped(read_runs(tmp_path)[0]))
    assert "Under-trained: accuracy still rose by 10.0 points in the last evaluated round." in row.notes


def test_the_best_attack_is_no_baseline(rows):
    """`prior` looks at nothing; it is listed, and never the best."""
    assert rows[1].cells["auc"].detail == "loss, server; the best blind attacker has 0.500"
    assert rows[1].cells["auc"].value == pytest.approx(0.62)
    assert rows[1].cells["tpr"].value == pytest.approx(0.12)
    assert "guessing gives 4.0 %, the best baseline 5.0 %" in rows[1].cells["identified"].detail


def test_the_best_reconstruction_is_the_one_furthest_beyond_its_own_chance():
    """75 % where guessing gives 72 % is less than 10 % where it gives 0.4 %; beating the baselines comes first."""

    def found(value, chance, beats):
        raw = reported._reconstruction("a", value)
        raw["pooled"]["identification"]["chance"] = chance
        result = ReconstructionResult(**{**raw, "beats_baselines": beats})
        return Found("a", "server", "reconstruction", False, {0: result})

    order = [found(0.75, 0.72, False), found(0.1, 0.004, False), found(0.02, 0.004, True)]
    keys = [(f.success(), f.beyond_chance("identification")) for f in order]
    assert keys == sorted(keys)
    assert keys[0] == pytest.approx((0, 0.03))


def test_a_refutation_without_a_bound_has_a_dash_in_its_row(tmp_path):
    """The hostile method's claim is refuted at 2.25; what refutes without a bound did not find 0."""
    folder = reported.write(tmp_path / "audit")
    paths = [path for path in folder.glob("runs/*/audits.json") if '"refuted"' in path.read_text()]
    cells = {}
    for bound in (2.25, 0.0):
        for path in paths:
            path.write_text(re.sub(r'"lower_bound": ?[\d.]+', f'"lower_bound": {bound}', path.read_text()))
        (page,) = write_report(folder, ("html",), tmp_path / f"report-{bound}")
        rows = [row for row in page.read_text().split("<tr>") if '<td class="open">refuted' in row]
        cells[bound] = {re.findall(r"<td[^>]*>(.*?)</td>", row)[4] for row in rows}
    assert cells == {2.25: {"2.25"}, 0.0: {"–"}}


def test_every_attack_is_rendered_whatever_it_claims(written):
    for text in ("error of the label shares 0.1", "did not run: the peer:1 sees no embeddings of client 0",
                 "baseline: looks at nothing that was sent", "baselines: mean image 0.05; better than all of them",
                 "Succeeded: it beats every baseline.", "A leak: it is above chance."):  # fmt: skip
        assert text in re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", written["html"])), text


def test_labels_are_distinct_and_name_the_privacy_setting(tmp_path):
    """Two settings that differ in E alone, and one in its noise: no two legend entries are the same."""
    for name, values in {
        "a": {"set": {"E": 1}},
        "b": {"set": {"E": 5}},
        "c": {"privacy": {"training": {"epsilon": 8}}},
    }.items():
        record = reported._record("fedavg", 0, 0.8)
        setting = Setting.make(**{**record.setting.model_dump(), **values})
        reported._save(tmp_path, name, record.model_copy(update={"setting": setting}), [])
    labels = [group.label for group in grouped(read_runs(tmp_path)[0])]
    assert labels == ["fedavg · E=1", "fedavg · E=5", "fedavg · DP-SGD, ε = 8"]


def test_alike_policies_are_named_together():
    policy = {"epsilon": 1.0, "sensitivity": "clip:1"}
    assert privacy_text({"logits": policy, "embeddings": policy}) == "embeddings, logits ε=1, clip 1"
    assert privacy_text({"embeddings": {"epsilon": 1, "sensitivity": "random-pixel"}}) == "embeddings ε=1, random-pixel"
    assert privacy_text({}) == "none"


def test_rows_on_other_data_are_not_compared(tmp_path):
    for name, dataset in (("a", "digits"), ("b", "mnist")):
        record = reported._record("fedavg", 0, 0.8)
        setting = Setting.make(**{**record.setting.model_dump(), "dataset": dataset})
        reported._save(tmp_path, name, record.model_copy(update={"setting": setting}), [])
    rows = rows_of(grouped(read_runs(tmp_path)[0]))
    assert [row.label for row in rows] == ["fedavg · dataset=digits", "fedavg · dataset=mnist"]
    assert differences(rows, BY_KEY["accuracy"]) == [[None, None], [None, None]]
    assert best_row(rows, BY_KEY["accuracy"]) == {}


@pytest.mark.parametrize(
    "values",
    [
        {"set": {"E": 5, "eta": 0.1, "name": "a b", "layers": [1, 2]}, "rounds": 3},
        {"privacy": {"embeddings": {"epsilon": 1.0, "sensitivity": "clip:1", "relation": "zero-out"}}},
        {"privacy": {"training": {"noise_multiplier": 1.5}}, "deterministic": False, "partition": "dirichlet:0.1"},
        {"server_model": "cnn", "participation": 0.5, "norm": "group", "eval_clients": False},
    ],
)
def test_the_command_makes_the_setting_again(values, monkeypatch):
    """The command line on the page, read by the command line itself, gives the very setting."""
    setting = Setting.make(method="fedavg", seed=7, **values)
    seen = {}
    monkeypatch.setattr("fedaudit.runtime.runner.run", lambda s, **_: seen.update(setting=s))
    CliRunner().invoke(app, shlex.split(command(setting))[1:])
    assert seen["setting"] == setting


# --- statistics --------------------------------------------------------------------------------------------------

values = st.lists(st.floats(-1e3, 1e3).map(lambda v: round(v, 6)), min_size=2, max_size=8)


@given(values)
@settings(max_examples=100, deadline=None)
def test_intervals_are_scipys(xs):
    found = over_seeds(xs)
    assert found.value == pytest.approx(np.mean(xs), abs=1e-9)
    if stats.sem(xs) > 1e-9:
        low, high = stats.t.interval(0.95, len(xs) - 1, np.mean(xs), stats.sem(xs))
        assert (found.low, found.high) == (
            pytest.approx(low, rel=1e-9, abs=1e-9),
            pytest.approx(high, rel=1e-9, abs=1e-9),
        )


def test_intervals_stay_in_the_possible_range():
    """0.9 and 1.0: the t-interval is 0.95 ± 0.64, and no accuracy is above 1."""
    found = over_seeds([0.9, 1.0], (0.0, 1.0))
    assert (found.low, found.high) == (pytest.approx(0.95 - 12.706204736 * 0.05), 1.0)


@given(values, values)
@example([0.0, 804.0, 0.0, 0.0, 6.1e-05, -1.0], [6.1e-05, 804.0, 0.0, 0.0, 6.1e-05, -1.0])
@settings(max_examples=100, deadline=None)
def test_comparisons_are_scipys(xs, ys):
    """Paired where there are at least two shared seeds, else Welch; p-value and interval of the difference. A small
    difference beside large figures does not cancel."""
    n = min(len(xs), len(ys))
    paired = compared(dict(enumerate(xs)), dict(enumerate(ys)))
    if np.std(np.subtract(ys[:n], xs[:n])) > 1e-6:
        expected = stats.ttest_rel(ys[:n], xs[:n])
        assert paired.p == pytest.approx(expected.pvalue, abs=1e-9)
        assert (paired.low, paired.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    if np.std(xs) > 1e-6 and np.std(ys) > 1e-6:
        apart = compared({("a", i): x for i, x in enumerate(xs)}, {("b", i): y for i, y in enumerate(ys)})
        assert apart.p == pytest.approx(stats.ttest_ind(ys, xs, equal_var=False).pvalue, abs=1e-9)
        assert apart.how.startswith("Welch")


def test_what_cannot_be_told_is_not_told():
    assert compared({0: 0.5}, {0: 0.9}).p is None, "one seed"
    assert compared({0: 0.5, 1: 0.6}, {0: 0.7, 1: 0.8}).p is None, "no spread: a t-test would give p = 0"
    assert compared({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6}).p == 1.0
    assert not compared({0: 0.5, 1: 0.6}, {0: 0.7, 1: 0.8000001}).more_than_noise, "two seeds are too few"
    assert compared({0: 0.5, 1: 0.6, 2: 0.5}, {0: 0.7, 1: 0.8, 2: 0.701}).more_than_noise
    assert compared({0: math.inf, 1: 1.0}, {0: 1.0, 1: 1.0}).p is None


def test_holm_by_hand():
    """Sorted 0.01, 0.03, 0.04 times 3, 2, 1 is 0.03, 0.06, 0.04; never below the one before: 0.03, 0.06, 0.06."""
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_holm_lies_between_the_p_value_and_bonferroni(ps):
    for p, adjusted in zip(ps, holm(ps), strict=True):
        assert p <= adjusted <= min(1.0, len(ps) * p) + 1e-12


def test_holm_keeps_the_family_wise_error():
    """Under the null, 5 comparisons of 4 seeds with a reference: in at most 5 % of families one is called different
    (400 families; 0.05 + 3 standard errors = 0.083). Without the correction it would be about 17 %."""
    rng = np.random.default_rng(0)
    wrong = raw = 0
    for _ in range(400):
        reference = dict(enumerate(rng.normal(size=4)))
        ps = [compared(reference, dict(enumerate(rng.normal(size=4)))).p for _ in range(5)]
        wrong += min(holm(ps)) < 0.05
        raw += min(ps) < 0.05
    assert wrong / 400 <= 0.083
    assert raw / 400 > 0.1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_front_is_what_nobody_beats(points):
    """Against the definition: a point is beaten if another costs no more and gains no less, and is better in one."""
    front = {points[i] for i in pareto(points)}
    slow = {
        (x, y) for x, y in points
        if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
    }  # fmt: skip
    assert front == slow


def test_differences_within_noise_are_marked(rows, written):
    """Attack AUC: noise in training has the least (0.53). Against it local's differences are +0.03, +0.03, +0.00 (seed
    by seed 0.55-0.52, 0.56-0.53, 0.54-0.54): within noise. Unprotected FedAvg's are 0.09, 0.10, 0.08: more."""
    best = best_row(rows, BY_KEY["auc"])[rows[0].group.arena]
    assert rows[best].label.startswith("fedavg · DP-SGD")
    tests = differences(rows, BY_KEY["auc"])[best]
    p = holm(
        [
            stats.ttest_rel([0.61, 0.63, 0.62], [0.52, 0.53, 0.54]).pvalue,
            stats.ttest_rel([0.55, 0.56, 0.54], [0.52, 0.53, 0.54]).pvalue,
        ]
    )
    assert [tests[1].p, tests[3].p] == pytest.approx(p)
    looks = [match.split() for match in re.findall(r'<td data-key="auc"[^>]*class="([^"]*)"', written["html"])]
    assert looks == [["worse"], [], [], ["none"], ["none"]], "a leak is no noise, and of a tie nobody is the best"


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(written):
    page = written["html"]
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)""", page)
    assert not re.search(r"url\((?!#)|@import|<iframe|<object|<embed|<link (?!rel=\"icon\")", page)
    assert page.count("<svg ") >= 3 + 2 + 2, "overview, ROC curves, partitions"
    assert "data:image/png;base64," in page


def test_a_picture_outside_the_run_folder_is_not_shown(undrawn, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"\x89PNG secret")
    attack = {**reported._reconstruction("decoder", 0.5), "picture": "../../secret.png"}
    reported._save(tmp_path, "a", reported._record("fedavg", 0, 0.9, releases=True), [attack])
    [page] = write_report(tmp_path, ["html"])
    assert "data:image/png" not in page.read_text()
    assert "The picture ../../secret.png is not in the run folder." in page.read_text()


@pytest.mark.long
def test_twenty_runs_stay_below_5_mb(tmp_path):
    """10 settings of 2 seeds, 12 attacks each, ROC curves of 200 points, and a picture of 600 kB in every run."""
    from PIL import Image

    rng = np.random.default_rng(0)
    fpr = np.geomspace(0.001, 1, 200).tolist()
    Image.fromarray(rng.integers(0, 256, (400, 500, 3), dtype=np.uint8)).save(tmp_path / "noise.png")
    for i in range(20):
        record = reported._record(f"method{i // 2}", i % 2, 0.5 + 0.02 * i, releases=True)
        attacks = []
        for j in range(12):
            attack = reported._membership(f"attack{j}", "server", 0.5 + 0.01 * j)
            attack["pooled"]["roc"] = {"fpr": fpr, "tpr": np.sort(rng.uniform(size=200)).tolist(), "drawn": ""}
            attacks.append(attack)
        reported._save(tmp_path, str(i), record, [*attacks, reported._reconstruction("decoder", 0.5)], picture=True)
        shutil.copy(tmp_path / "noise.png", tmp_path / "runs" / str(i) / "pictures" / "decoder.png")
    [page] = write_report(tmp_path, ["html"])
    assert page.stat().st_size < 5_000_000
    assert page.read_text().count("data:image/png") == 10


def test_figures_have_a_mark_for_each_row_and_whole_rounds(rows):
    figures = figures_of(rows)
    assert {"tradeoff", "bytes", "rounds", "roc-2", "partition-1"} <= set(figures)
    labels = " ".join(text.get_text() for text in figures["rounds"].axes[0].texts).split()
    shown = [row.label for row in rows if row.group.method != "fedaf"]  # which was refused: nothing to see
    assert sorted(labels) == sorted(word for label in shown for word in label.split())
    ticks = figures["rounds"].axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)
    assert (figures["roc-2"].axes[0].get_xscale(), figures["roc-2"].axes[0].get_yscale()) == ("log", "log")


def test_figures_take_the_pages_colours(rows):
    with style("a"):
        svg = inline(figures_of(rows)["tradeoff"], "a")
    assert "var(--ink)" in svg
    assert not re.search(r"(fill|stroke): #(?!000000)[0-9a-f]{6}", svg), "a colour that does not change with the theme"


def test_runs_with_little_in_them_are_reported(tmp_path):
    """No round, nothing measured; a measure that has no name of its own; a GPU: every format takes them."""
    record = reported._record("fedavg", 0, 0.5)
    nothing = {"status": "running", "rounds": [], "curve": [], "result": Result(), "traffic": [], "timings": []}
    reported._save(tmp_path, "a", record.model_copy(update=nothing), [])
    gpu = {"timings": [Timing(party="client 0", phase="task", calls=1, wall_s=9.0, gpu_s=0.5)]}
    odd = reported._reconstruction("odd", 0.5)
    odd["pooled"]["ratio"] = {"value": 2.5}
    other = reported._record("local", 0, 0.5).model_copy(update={**gpu, "peak_gpu_bytes": 2_000_000_000})
    reported._save(tmp_path, "b", other, [odd])
    write_report(tmp_path, FORMATS)
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert rows[0]["notes"][0] == "Unfinished: seed 0 has not run all its rounds."
    assert rows[1]["attacks"][0]["figures"]["ratio"]["value"] == 2.5
    assert (rows[1]["cells"]["seconds"]["value"], rows[1]["cells"]["memory"]["value"]) == (0.5, 2e9)


# --- compare -----------------------------------------------------------------------------------------------------


def _pair(tmp_path, after, before=((0.5, 0), (0.6, 1), (0.5, 2)), **changes):
    """Two folders of fedavg runs: (accuracy, seed) each; `changes` to the records of the second."""
    for name, runs in (("a", before), ("b", after)):
        for accuracy, seed in runs:
            record = reported._record("fedavg", seed, accuracy, releases=True)
            record.transcript_digest += f"-{accuracy}"
            if name == "b":
                record = record.model_copy(update=changes)
            reported._save(tmp_path / name, str(seed), record, [])
    return tmp_path / "a", tmp_path / "b"


def test_the_same_runs_have_not_changed(folder):
    result = compare(folder, folder)
    assert not result.changed
    assert {change.test.difference for change in result.changes} == {0.0}
    assert "fedavg: every message is the same to the bit" in as_text(result)


def test_a_change_beyond_noise_is_told_with_scipys_p(tmp_path):
    """0.5, 0.6, 0.5 against 0.7, 0.8, 0.71: paired differences 0.2, 0.2, 0.21. The family is accuracy, own data and
    the global model on it (which move alike), seconds and memory (equal): 5 comparisons, so the smallest p-value is
    multiplied by 5."""
    result = compare(*_pair(tmp_path, ((0.7, 0), (0.8, 1), (0.71, 2))))
    change = next(c for c in result.changes if c.column.key == "accuracy")
    assert result.changed
    assert change.test.p == pytest.approx(5 * stats.ttest_rel([0.7, 0.8, 0.71], [0.5, 0.6, 0.5]).pvalue)
    assert change.direction == "better"
    assert "fedavg: Accuracy 53.3 % -> 73.7 % better" in as_text(result)


def test_a_change_within_noise_is_not(tmp_path):
    result = compare(*_pair(tmp_path, ((0.6, 0), (0.5, 1), (0.52, 2))))
    assert not result.changed
    assert "Within noise: 3 figures" in as_text(result)
    assert not result.untold


def test_seeds_that_are_not_shared_are_compared_by_welch(tmp_path):
    result = compare(*_pair(tmp_path, ((0.8, 5), (0.81, 6), (0.8, 7))))
    change = next(c for c in result.changes if c.column.key == "accuracy")
    assert change.test.how == "Welch's t-test, 3 and 3 seeds"
    expected = stats.ttest_ind([0.8, 0.81, 0.8], [0.5, 0.6, 0.5], equal_var=False)
    assert (change.test.low, change.test.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_one_seed_cannot_be_told_but_bytes_can(tmp_path):
    """Twice the bytes with one seed: counted, so it is a change. The accuracy of one seed is not."""
    traffic = [
        t.model_copy(update={"payload": 2 * t.payload}) for t in reported._record("f", 0, 0.5, releases=True).traffic
    ]
    result = compare(*_pair(tmp_path, ((0.9, 0),), ((0.5, 0),), traffic=traffic))
    told = [c.column.key for c in result.changes if c.counts]
    assert told == ["up", "down"]
    assert "Accuracy 50.0 % -> 90.0 % (one seed: the spread is not known)" in as_text(result)


def test_time_and_memory_do_not_count(tmp_path):
    slow = [reported._timing("client 0", "task", 500.0)]
    same = ((0.5, 0), (0.6, 1), (0.5, 2))
    before, after = _pair(tmp_path, same, same)
    for seed in range(3):
        record = reported._record("fedavg", seed, 0.5, releases=True)
        slow = [reported._timing("client 0", "task", 500.0 + seed * 0.1 + 0.01 * seed**2)]
        reported._save(after, str(seed), record.model_copy(update={"timings": slow}), [])
        reported._save(before, str(seed), record, [])
    result = compare(before, after)
    assert any(c.test.more_than_noise and c.column.key == "seconds" for c in result.changes)
    assert not result.changed


def test_a_changed_setting_is_paired_and_named(tmp_path):
    for name, epochs in (("a", 1), ("b", 5)):
        record = reported._record("fedavg", 0, 0.5)
        setting = Setting.make(**{**record.setting.model_dump(), "set": {"E": epochs}})
        reported._save(tmp_path / name, "x", record.model_copy(update={"setting": setting}), [])
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.settings == {"fedavg": {"E": [1, 5]}}
    assert json.loads(as_json(result))["settings"] == {"fedavg": {"E": [1, 5]}}


# --- the command line --------------------------------------------------------------------------------------------


def _invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.long
def test_the_command_line_writes_what_is_asked_for(tmp_path):
    reported._save(tmp_path, "a", reported._record("fedavg", 0, 0.5, releases=True), [])
    done = _invoke("report", tmp_path, "--format", "csv,json", "--out", tmp_path / "o")
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"report.csv", "report.json", "figures"}
    kinds = {path.suffix for path in (tmp_path / "o" / "figures").iterdir() if not path.name.startswith(".")}
    assert kinds == {".svg", ".png"}
    assert (tmp_path / "o" / "figures" / "tradeoff.png").read_bytes().startswith(b"\x89PNG")


def test_exit_codes_of_compare(tmp_path):
    """0: no change beyond noise. 1: a change. 2: nothing to compare."""
    before, after = _pair(tmp_path, ((0.7, 0), (0.8, 1), (0.71, 2)))
    assert _invoke("compare", before, before).exit_code == 0
    done = _invoke("compare", before, after, "--json")
    assert done.exit_code == 1
    assert json.loads(done.output)["changed"] is True
    reported._save(tmp_path / "c", "x", reported._record("other", 0, 0.5), [])
    with pytest.raises(SettingError, match="have no setting in common"):
        compare(before, tmp_path / "c")
    assert isinstance(_invoke("compare", before, tmp_path / "c").exception, FedauditError)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "There is no folder nowhere"),
        (["compare", "nowhere", "nowhere"], "There is no folder nowhere"),
        (["report", ".", "--format", "html,pfd"], "Unknown format 'pfd'"),
    ],
)
def test_errors_name_the_cause(words, message):
    done = _invoke(*words)
    assert isinstance(done.exception, FedauditError)
    assert message in str(done.exception)


def test_a_damaged_record_is_listed_and_does_not_stop_the_rest(undrawn, tmp_path):
    reported._save(tmp_path, "good", reported._record("fedavg", 0, 0.5), [])
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "record.json").write_text("{")
    (tmp_path / "audit.json").write_text('{"cells": [{"folder": "runs/x", "status": "failed", "reason": "no memory"}]}')
    page, _ = write_report(tmp_path)
    assert "2 runs failed" in page.read_text()
    assert "runs/bad/record.json cannot be read" in page.read_text()
    assert "no memory" in page.read_text()
