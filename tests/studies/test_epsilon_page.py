"""docs/results/epsilon.md is what its script makes of the kept figures, and they are what the page says of them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from pages import script
from scipy import stats

from fedaudit.epsilon.joint_verdict import told
from fedaudit.runtime.run_record import EpsilonAudit
from fedaudit.significance import LEVEL
from fedaudit.stats import clopper_pearson


@pytest.fixture(scope="module")
def table():
    return script("epsilon_table")


def test_the_page_is_made_from_the_kept_figures(table):
    assert table.PAGE.read_text() == table.page()


def test_no_bound_is_wrong_more_often_than_it_may_be(table):
    rows = [*table.kept("bounds"), *table.kept("one_run")]
    assert len(rows) == 84, "seven bounds, two deltas, the null and five epsilons"
    assert all(row["of"] == 400 and row["low"] <= 0.05 for row in rows)


def test_gaussian_bounds_are_tighter_than_free_ones(table):
    by = {(r["bound"], r["delta"], r["epsilon"]): r["found_over_true"] for r in table.kept("bounds")}
    for delta in (1e-5, 1e-2):
        for epsilon in (1.0, 2.0, 8.0):
            shift, fixed, free = (
                by[name, delta, epsilon]
                for name in ("mu-GDP, mean shift", "mu-GDP, fixed threshold", "Clopper-Pearson, ranks")
            )
            assert shift > fixed > free


def test_intervals_of_the_tpr_cover(table):
    rows = table.kept("coverage")
    assert {row["n"] for row in rows} == {100, 500, 2000}
    for row in rows:
        assert row["of"] == 2000
        assert row["covered"] >= 0.93
        assert row["covered"] <= (0.97 if row["n"] * row["fpr"] > 1 else 1.0)


def test_less_noise_is_never_silent_and_honest_noise_is_not_refuted(table):
    """Under the rule as it stands, on seeds that nobody had looked at when it was set: 20 honest ones of each case, and
    10 at each scale."""
    rows = table.runs()
    cases = {row["case"] for row in rows}
    assert len(cases) == 7
    for case in cases:
        for noise, seeds in ((1, 20), (0.9, 10), (0.5, 10), (0, 10)):
            told = [row["told"] for row in rows if (row["case"], row["noise"]) == (case, noise)]
            assert len(told) == seeds
            if noise == 1:
                assert "refuted" not in told
                assert told.count("suspicious") <= 4, "5 % of 20 are one: more than 4 have a probability of 0.3 %"
            else:
                assert "not refuted" not in told
            if noise == 0:
                assert set(told) == {"refuted"}
    one = [(row["case"], row["noise"], row["seed"]) for row in table.kept("sabotage")]
    assert len(one) == len(set(one)), "no run counts twice"


def test_what_the_page_says_of_a_run_follows_from_its_audits(table):
    """p-values and power are kept; the word is the rule's."""
    for row in table.runs():
        audits = [
            EpsilonAudit(
                test=test, kind="", threat="", claim="", claim_epsilon=1.0, ledger_epsilon=1.0, lower_bound=a["bound"],
                p_value=a["p"], trials=a["n"], confidence=0.95, delta=0.01, verdict=a["verdict"], method="", how="",
                tells_at=a["tells_at"], seeks=0.9 if test == "residuals" else None if "f-DP" in test else 0.5,
            )
            for test, a in row["tests"].items()
        ]  # fmt: skip
        assert told(audits) == row["told"], (row["case"], row["noise"], row["seed"])


def test_honest_p_values_are_even(table):
    """Of no case does evenness fall at a level of 0.001, nor are there too many below 0.05 (binomial, the same)."""
    rows = [row for row in table.kept("sabotage") if row["noise"] == 1]
    for case in {row["case"] for row in rows}:
        mine = [row["tests"] for row in rows if row["case"] == case]
        shift = [tests["release path, Gaussian"]["p"] for tests in mine if "release path, Gaussian" in tests]
        residuals = [tests["residuals"]["p"] for tests in mine]
        assert not shift or stats.kstest(shift, "uniform").pvalue > 0.001
        for ps in filter(None, (shift, residuals)):
            assert stats.binomtest(sum(p < 0.05 for p in ps), len(ps), 0.05, "greater").pvalue > 0.001


def test_guesses_on_the_surest_canaries_are_worth_more_than_on_half_of_them(table):
    """With 1,000 canaries, at every claim; with fewer within a hundredth. No bound is above the truth too often."""
    rows = table.kept("guesses")
    assert {row["of"] for row in rows} == {20_000}
    assert {row["canaries"] for row in rows} == {50, 100, 200, 1000}
    assert all(row["high"] <= 0.05 for row in rows)
    by = {(row["canaries"], row["epsilon"], row["way"]): row["mean_over_true"] for row in rows}
    for canaries, epsilon, way in by:
        if way == "surest":
            spare = 0.0 if canaries == 1000 else 0.01
            assert by[canaries, epsilon, "surest"] > by[canaries, epsilon, "half"] - spare
            assert by[canaries, epsilon, "surest"] > by[canaries, epsilon, "all"]
    assert by[1000, 4.0, "surest"] > 0.57


def test_the_table_of_guesses_is_what_its_script_draws(table):
    """The cells with 50 canaries, drawn again: the same seeds, the same counts and the same bounds."""
    kept = [row for row in table.kept("guesses") if row["canaries"] == 50]
    calibration = script("epsilon_calibration")
    for epsilon in (1.0, 4.0, 8.0):
        mine = {row["way"]: row for row in kept if row["epsilon"] == epsilon}
        numbers = [mine[way]["guesses"] for way in ("surest", "half", "all")]
        again = calibration._mean_bounds(20_000, 50, epsilon, numbers, [0, 9])
        for row, found in zip((mine["surest"], mine["half"], mine["all"]), again, strict=True):
            assert found["wrong"] == row["wrong"]
            assert found["mean_over_true"] == pytest.approx(row["mean_over_true"], rel=1e-6)
        assert calibration.eps.best_guesses(50, epsilon, 1e-5) == mine["surest"]["guesses"]


def test_no_number_of_guesses_shows_six_tenths_of_epsilon_4(table):
    """Neither the bound that is used nor the largest valid one, which the page says; by less than three hundredths."""
    rows, finer = table.kept("reach"), table.kept("slopes")
    assert {row["of"] for row in rows} == {20_000}
    used = max(row["used"] for row in rows)
    exact = max(row["exact"] for row in rows if "exact" in row)
    more = max(row["all"] - row["few"] for row in finer)
    assert 0.57 < used < exact < exact + more < 0.6
    assert all(0 <= row["all"] - row["few"] < 0.003 for row in finer)
    best = max((row for row in rows if "exact" in row), key=lambda row: row["exact"])["guesses"]
    assert min(r["guesses"] for r in rows if "exact" in r) < best < max(r["guesses"] for r in rows if "exact" in r)


def test_the_largest_valid_bound_is_kept_and_attained():
    """20 guesses on 60 canaries, 17 of them right: the programme's probability is below the recursion's, so that the
    bound is larger. A mechanism that draws the programme's distribution keeps a little more than the claim in all its
    trade-offs, and has as many right guesses in 5 % of its runs: no valid bound is larger by more than that."""
    from scipy.stats import binom

    reach = script("epsilon_reach")
    m, r, v = 60, 20, 17
    used = reach.eps.one_run_fdp(m, r, v, 1e-5).detail["mu"]
    assert reach.largest(used, m, r, v)[0] == pytest.approx(0.0464, abs=2e-4), "the recursion says 0.05"
    exact = reach.exact_mu(m, r, v)
    assert used < exact < 1.05 * used
    _, p = reach.largest(1.012 * exact, m, r, v, reach.ALL)
    # The programme leaves out very improbable numbers, which would tell. Some of binomial distributions is mixed in.
    rest = sum(binom.pmf(range(r + 1), r, k / 20 * v / r) for k in range(1, 21)) / 20
    made = [(1 - w) * p + w * rest for w in (1e-6, 1e-5, 1e-4, 1e-3)]
    assert min(reach.mu_of(q, m) for q in made if q[v:].sum() > 0.05) == pytest.approx(exact, rel=0.02)


def test_what_is_true_is_refuted_in_one_of_a_thousand_at_most(table):
    """Every bound and test: an interval that holds 0.1 % (0.05 for suspicion) or lies below it."""
    rows = table.kept("level")
    names = {row["test"].split(", epsilon")[0] for row in rows}
    assert len(names) == 7, "three releases, four bounds"
    for name in {row["test"] for row in rows}:
        mine = [row for row in rows if row["test"] == name]
        for word, most in (("refuted", LEVEL), ("suspicious", 0.05)):
            wrong, of = (sum(row[word][key] for row in mine) for key in ("wrong", "of"))
            assert of >= (500 if "uint8" in name else 20_000)
            assert clopper_pearson(wrong, of)[0] <= most, name


def test_the_shape_test_is_right_far_out_where_another_was_not(table):
    rows = table.kept("shape")
    assert [row["numbers"] for row in rows] == [20, 60, 1000]
    for row in rows:
        assert row["geary"]["low"] <= 1e-4 < row["skewness_and_kurtosis"]["low"]


def test_tests_of_noise_keep_their_level(table):
    rows = table.kept("noise")
    honest = [row for row in rows if row["noise"] == 1]
    assert {(row["release"], row["sigma"]) for row in honest} == {("float", 2.0), ("uint8", 0.5), ("uint8", 20.0)}
    assert all(row["of"] == 400 and row["low"] <= 0.05 and row["refuted"]["low"] <= LEVEL for row in honest)
    assert all(row["refuted"]["rate"] > 0.95 for row in rows if row["noise"] < 1 and row["noise"] <= row["finds"])


def test_audits_on_whole_runs_keep_their_level(table):
    """400 runs of each: an interval that holds 5 % or lies below it; of baselines 1 % for the three together. Refuted
    (p < 0.001) are at most two of 400: more have a probability of 0.8 %."""
    by = {(r["test"], r["regime"], r["case"]): r for r in table.kept("whole_runs")}
    assert len(by) == 16
    assert all(row["of"] == 400 for row in by.values())
    for (test, _, case), row in by.items():
        if case == "dithered":
            assert (row["rate"] > 0.99) is (test == "blind_pixels")
        else:
            assert row["low"] <= (0.01 / 3 if case == "honest" else 0.05)
        assert case != "true claim" or row["refuted"]["wrong"] <= 2


def test_all_rounds_tell_more_than_the_last(table):
    """In the mean over seeds, for every attack that looks at several rounds."""
    rows = table.kept("rounds")
    assert {row["seed"] for row in rows} == {3, 4, 5}
    means = {}
    for attack in {row["attack"] for row in rows}:
        mine = [row for row in rows if row["attack"] == attack]
        means[attack] = sum(row["auc"] for row in mine) / 3
        assert means[attack] > sum(row["last"] for row in mine) / 3, attack
    assert means["lira"] >= 0.82
    assert means["rmia"] >= 0.83
    assert means["update_alignment"] >= 0.74


def test_every_forged_release_is_refuted_or_said_to_be_untold(table):
    """Of each way and each kind of release the same seeds; none that the audits could have told is silent."""
    rows = [row for row in table.kept("forged") if row["way"] != "honest"]
    seeds = {tuple(row["seeds"]) for row in rows}
    assert len(seeds) == 1
    assert len(seeds.pop()) == 20
    assert len({row["way"] for row in rows}) >= 25 > len(table.REVIEWED) == 15
    assert set(table.REVIEWED) <= {row["way"] for row in rows}
    assert {row["kind"] for row in rows} == set(table.KINDS)
    for row in rows:
        assert "not refuted" not in row["told"], (row["way"], row["kind"])
        if row["kind"] in ("embeddings", "logits") or "training" in row["kind"]:
            assert set(row["told"]) == {"refuted"}, (row["way"], row["kind"])


def test_honest_runs_beside_them_are_refuted_in_one_of_two_hundred_at_most(table):
    rows = [row for row in table.kept("forged") if row["way"] == "honest"]
    runs = {(row["kind"] if "training" in row["kind"] else "fields", seed) for row in rows for seed in row["seeds"]}
    assert len(runs) == 400
    (together,) = table.kept("honest_runs")
    assert together["runs"] == 400
    assert together["refuted"] <= 2, "as a report judges a run, with the correction for all its fields"
    refuted, suspicious = (sum(row["told"].get(word, 0) for row in rows) for word in ("refuted", "suspicious"))
    releases = sum(len(row["seeds"]) for row in rows)
    assert stats.binomtest(refuted, releases, LEVEL, "greater").pvalue > 0.001, "each release alone"
    assert stats.binomtest(suspicious, releases, 0.05, "greater").pvalue > 0.001
    assert f"So {refuted} honest releases were refuted by mistake" in table.page()


def test_an_honest_run_is_judged_by_all_its_fields_together():
    """p = 0.0004 and 0.03 alone are refuted and suspicious. Of five fields Holm makes 0.002 and 0.15 of them. Bounds
    that hold for certain do not count, nor does what could not be told."""

    def row(seed, *ps, way="honest"):
        tests = [{"test": "residuals", "p": p, "verdict": "refuted" if p < 1e-3 else "suspicious"} for p in ps]
        unsure = [{"test": "residuals", "p": 0.01, "verdict": "cannot tell"}] * (5 - len(ps))
        sure = [{"test": "clipping", "p": 1.0, "verdict": "not refuted"}] * 5
        return {"way": way, "job": "fields", "seed": seed, "tests": [*tests, *unsure, *sure]}

    rows = [row(0, 4e-4), row(1, 1e-4), row(2, 0.03), row(3), row(4, 1e-9, way="no noise")]
    found = script("epsilon_forged").honest_runs(rows)
    assert found == [{"runs": 4, "refuted": 1, "suspicious": 1}]


def test_an_exact_test_of_counts_covers(table):
    rows = table.kept("exact")
    assert {(row["n"], row["epsilon"]) for row in rows} == {(n, e) for n in (50, 200, 1000) for e in (0.5, 1.0, 4.0)}
    assert {row["case"].split(",")[0] for row in rows} == {"edge", "corner", "Gaussian"}
    for row in rows:
        assert row["of"] == 20_000
        assert row["exact"]["low"] <= 0.05
    found = [row for row in rows if row["case"] == "Gaussian"]
    assert all(row["exact_finds"] >= row["limits_find"] for row in found)
    assert sum(row["exact_finds"] > 1.05 * row["limits_find"] for row in found) >= 4


def test_the_shift_of_means_is_wrong_in_five_percent_at_most(table):
    rows = table.kept("shift")
    wrong, of = sum(row["wrong"] for row in rows), sum(row["of"] for row in rows)
    assert of == 1_800_000
    assert clopper_pearson(wrong, of)[1] <= 0.05


def test_power_grows_with_the_numbers_and_honest_noise_is_let_be(table):
    rows = table.kept("power")
    by = {(row["way"], row["how"], row["numbers"]): row["rate"] for row in rows}
    assert all(rate <= 0.03 for (way, _, _), rate in by.items() if way == "honest")
    for way, how in {(row["way"], row["how"]) for row in rows} - {("honest", "")}:
        assert by[way, how, 60_000] == 1.0, (way, how)
        rates = [by[way, how, n] for n in (60, 600, 6000, 60_000)]
        assert all(later >= earlier - 0.05 for earlier, later in pairwise(rates))


def test_every_field_of_every_method_has_an_attack_or_a_reason(table):
    """A method that sends something new has to be in the table: run epsilon_attacked.py for it."""
    from fedaudit.registry import names

    rows = table.kept("attacked")
    assert {row["method"] for row in rows} | {"constant", "local"} == set(names("methods")), "these two send nothing"
    for row in rows:
        assert row["attacks"] or row["kind"] in table.REASONS, (row["method"], row["field"])
    for method in names("methods"):
        if "+" not in method:
            listed = {row["field"] for row in rows if row["method"] == method}
            assert listed <= declared_fields(method), method


def declared_fields(method):
    from fedaudit.registry import find
    from fedaudit.wire.message import Up, message_classes

    modules = {base.__module__ for base in find(method).__mro__ if "methods" in base.__module__}
    classes = [cls for module in modules for cls in message_classes(module) if issubclass(cls, Up)]
    return {f"{cls.__name__}.{name}" for cls in classes for name, d in cls.declared().items() if d and d.kind}


def test_what_an_attack_reads_is_seen_again(table):
    """The rows of one method, made anew."""
    made = list(script("epsilon_attacked").rows("dsfl"))
    assert made == [row for row in table.kept("attacked") if row["method"] == "dsfl"]


@pytest.mark.long
def test_the_scripts_run_in_small(tmp_path):
    calibration = script("epsilon_calibration")
    calibration.main([str(tmp_path / "a.json"), "--repetitions", "2", "--table", "bounds", "--table", "one_run"])
    assert (tmp_path / "a.json").exists()
    forged = script("epsilon_forged")
    forged.main([str(tmp_path), "--shard", "0/1", "--seeds", "1", "--honest", "0", "--only", "sensitivity halved"])
    forged.main([str(tmp_path), "--keep", str(tmp_path / "kept.json")])
    kept = json.loads((tmp_path / "kept.json").read_text())["forged"]
    assert {row["kind"] for row in kept} == set(forged.KINDS)
    assert all(row["told"] == {"refuted": 1} and row["by"] == {"calibration": 1} for row in kept)


def test_forged_runs_are_of_each_kind_that_the_method_releases():
    """Kinds come from the method's own message, and all but the images are claimed at epsilon = 1."""
    forged = script("epsilon_forged")
    assert forged.KINDS == ("embeddings", "logits", "label_counts", "soft_labels", "synthetic_images")
    assert {kind: policy.get("epsilon") for kind, policy in forged.FIELDS.items()} == dict.fromkeys(
        forged.KINDS[:-1], 1.0
    ) | {"synthetic_images": None}


def test_rates_of_whole_runs_are_counted_with_their_limits():
    """Three of four runs spoke, and one of them beyond the level of a refutation."""
    ps = [0.2, 0.04, 0.03, LEVEL / 2]
    rows = [
        {"test": "t", "regime": "r", "case": "true claim", "seed": s, "wrong": p < 0.05, "p": p}
        for s, p in enumerate(ps, 1000)
    ]
    (row,) = script("epsilon_whole_runs").counted(rows)
    assert (row["spoke"], row["of"], row["rate"], row["seeds"]) == (3, 4, 0.75, [1000, 1003])
    assert (row["low"], row["high"]) == clopper_pearson(3, 4)
    assert row["refuted"] == dict(
        zip(("wrong", "of", "rate", "low", "high"), (1, 4, 0.25, *clopper_pearson(1, 4)), strict=True)
    )
