"""Rows of unequal runs: clients of unequal epsilon and delta, a run that gets worse, audits of which one found more."""

from __future__ import annotations

import copy
import math

import pytest
import reported
import unequal

from fedaudit.cli.listing import summary
from fedaudit.metrics.metric import report_columns
from fedaudit.reports import tests_over_seeds
from fedaudit.reports.attack_rows import attacks_of, best_attack
from fedaudit.reports.html import page
from fedaudit.reports.row_comparisons import best_row, pareto
from fedaudit.reports.runs import grouped, read_runs
from fedaudit.reports.summary_rows import rows_of, undertrained
from fedaudit.reports.terminal import table
from fedaudit.reports.tests_over_seeds import compared
from fedaudit.runtime.run_record import LONG, NOT_AWAITED, Absence


def noisy(seed, epsilons=(2.0, 7.0), deltas=(0.1, 0.01), **more):
    """A run under DP-SGD whose two clients spent unequally."""
    training = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}
    record = reported._record("fedavg", seed, 0.8, releases=True, privacy=training, epsilon=1.0, **more)
    for client, epsilon, delta in zip(record.ledger, epsilons, deltas, strict=True):
        client.epsilon, client.delta = epsilon, delta
    return record


def rows(folder, *saved):
    for i, (record, attacks, audits) in enumerate(saved):
        reported._save(folder, str(i), record, attacks, audits)
    return rows_of(grouped(read_runs(folder)[0]))


def test_epsilon_is_that_of_the_worst_off_client_of_the_worst_seed(tmp_path):
    [row] = rows(tmp_path, (noisy(0), [], []), (noisy(1, (3.0, 1.0)), [], []))
    cell = row.cells["epsilon"]
    assert cell.each == {0: 7.0, 1: 3.0}
    assert (cell.value, cell.low, cell.high) == (7.0, 3.0, 7.0)
    assert cell.detail == "δ ≤ 0.1"


def test_one_client_that_cannot_be_composed_is_told(tmp_path):
    record = noisy(0)
    record.ledger[1].epsilon = None
    [row] = rows(tmp_path, (record, [], []))
    assert row.cells["epsilon"].value is None
    assert "not composed" in row.cells["epsilon"].reason


def test_a_client_that_was_never_asked_does_not_count(tmp_path):
    record = noisy(0)
    record.ledger = record.ledger[:1]
    [row] = rows(tmp_path, (record, [], []))
    assert row.cells["epsilon"].value == 2.0


def test_of_two_claims_the_larger_is_told(tmp_path):
    privacy = {"weights": {"epsilon": 1.0}, "count": {"epsilon": 4.0}}
    record = reported._record("fedavg", 0, 0.8, releases=True, privacy=privacy)
    [row] = rows(tmp_path, (record, [], []))
    assert row.cells["claim"].value == 4.0
    assert row.cells["claim"].detail == "count, weights"


def test_of_two_audits_the_larger_lower_bound_is_told(tmp_path):
    audits = [
        reported._audit("not refuted", 9.2, 1.5, claim="one release of Local.w"),
        reported._audit("not refuted", 9.2, 0.5, claim="the run"),
    ]
    for order in (audits, audits[::-1]):
        [row] = rows(tmp_path / str(audits.index(order[0])), (noisy(0), [], copy.deepcopy(order)))
        assert (row.cells["lower"].value, row.cells["lower"].low, row.cells["lower"].high) == (1.5, 1.5, math.inf)
        assert row.cells["lower"].detail == "one release of Local.w"


def test_accuracy_is_of_the_last_round_also_where_it_fell(tmp_path):
    """0.9 in round 1, 0.6 in round 2: the row says 0.6, and nothing of rising."""
    record = reported._record("fedavg", 0, 0.6, releases=True)
    record.rounds[0].utility = reported._utility(0.9)
    record.curve = []
    record.result.chosen = reported._reached(1, 0.9)
    [row] = rows(tmp_path, (record, [], []))
    assert row.cells["accuracy"].value == pytest.approx(0.6)
    assert row.cells["own"].value == pytest.approx(0.55)
    assert not any("Under-trained" in note for note in row.notes)


def test_a_rise_in_the_mean_over_seeds_is_what_counts(tmp_path):
    """One seed rose by 10 points and the other fell by 9: half a point in the mean, and no warning."""
    saved = []
    for seed, before in ((0, 0.7), (1, 0.89)):
        record = reported._record("fedavg", seed, 0.8, releases=True)
        record.rounds[0].utility = reported._utility(before)
        record.curve = []
        saved.append((record, [], []))
    [row] = rows(tmp_path, *saved)
    assert undertrained(row.group, row.cells["accuracy"]) == []


def test_bytes_are_shared_out_over_who_was_asked(tmp_path):
    """Two clients in round 1, one in round 2: 4000 bytes over three."""
    record = reported._record("fedavg", 0, 0.8, releases=True)
    record.rounds[1].participants = [0]
    [row] = rows(tmp_path, (record, [], []))
    assert row.cells["up"].value == pytest.approx(4000 / 3)
    assert row.cells["down"].value == pytest.approx(2000 / 3)


def test_the_best_attack_is_the_best_in_the_mean_over_seeds(tmp_path):
    """Loss finds 0.9 and 0.5, entropy 0.8 and 0.8: entropy is the better one."""
    saved = [
        (reported._record("fedavg", seed, 0.8, releases=True), [
            reported._membership("loss", "server", loss), reported._membership("entropy", "server", 0.8),
            reported._membership("prior", "server", 0.99, blind=True),
        ], [])
        for seed, loss in ((0, 0.9), (1, 0.5))
    ]  # fmt: skip
    [row] = rows(tmp_path, *saved)
    assert best_attack(row.group, "membership", "auc").attack == "entropy"
    assert row.cells["auc"].value == pytest.approx(0.8)
    assert row.cells["auc"].detail == "entropy, server; the best blind attacker has 0.990"
    assert {found.attack for found in attacks_of(row.group)} == {"loss", "entropy", "prior"}


def test_tpr_is_the_one_at_one_percent(tmp_path):
    attack = reported._membership("loss", "server", 0.7)
    attack["pooled"]["tpr_at_fpr"] = [
        {"fpr": fpr, "value": value, "low": value, "high": value, "interval": ""}
        for fpr, value in ((0.1, 0.5), (0.01, 0.2), (0.001, 0.1))
    ]
    [row] = rows(tmp_path, (reported._record("fedavg", 0, 0.8, releases=True), [attack], []))
    assert row.cells["tpr"].value == pytest.approx(0.2)


def test_two_seeds_never_count_and_three_may():
    """Differences of 10 points with next to no spread: p is below 0.01 either way."""
    two = compared({0: 0.5, 1: 0.501}, {0: 0.6, 1: 0.6012})
    three = compared({0: 0.5, 1: 0.501, 2: 0.499}, {0: 0.6, 1: 0.6012, 2: 0.5995})
    assert two.p < 0.05
    assert three.p < 0.05
    assert (two.more_than_noise, three.more_than_noise) == (False, True)
    assert not tests_over_seeds.Test(0.1, 0.06, "", seeds=9).more_than_noise


def test_unequal_seeds_are_paired_by_the_shared_ones():
    """Seed 3 is on one side only: three pairs are left, and its outlier does not count."""
    found = compared({0: 0.5, 1: 0.6, 2: 0.7, 3: 0.0}, {0: 0.6, 1: 0.71, 2: 0.79})
    assert found.how == "paired t-test, 3 seeds"
    assert found.difference == pytest.approx(0.1)


def test_the_best_row_follows_the_columns_direction(tmp_path):
    """fedavg is the more accurate one and sends more; local sends nothing, which is least."""
    made = rows(
        tmp_path,
        (reported._record("fedavg", 0, 0.9, releases=True), [], []),
        (reported._record("local", 0, 0.6), [], []),
    )
    at = {row.group.method: i for i, row in enumerate(made)}
    best = {column.key: next(iter(best_row(made, column).values()), None) for column in report_columns()}
    assert best["accuracy"] == at["fedavg"]
    assert best["up"] == at["local"]


def test_the_front_leaves_out_who_is_dearer_and_no_better():
    assert pareto([(1, 0.5), (2, 0.5), (3, 0.9), (3, 0.8), (0.5, 0.1)]) == [4, 0, 2]


def test_who_has_learnt_nothing_is_not_the_best(tmp_path):
    """26 % of four classes is near chance: its attack at 0.5 is no merit beside 0.6 on a model that learnt."""
    made = rows(
        tmp_path,
        (reported._record("fedavg", 0, 0.9, releases=True), [reported._membership("loss", "server", 0.6)], []),
        (reported._record("protos", 0, 0.26, releases=True), [reported._membership("loss", "server", 0.5)], []),
    )
    auc = next(column for column in report_columns() if column.key == "auc")
    assert auc.better == "low"
    [at] = best_row(made, auc).values()
    assert made[at].group.method == "fedavg"


def test_a_finished_run_is_not_replaced_by_an_unfinished_one(tmp_path):
    done, cut = (reported._record("fedavg", 0, accuracy, releases=True) for accuracy in (0.9, 0.3))
    cut.status = "running"
    [row] = rows(tmp_path, (done, [], []), (cut, [], []))
    assert row.cells["accuracy"].value == pytest.approx(0.9)


def test_what_a_run_has_sent_is_both_ways_up_to_each_round(monkeypatch):
    """Rounds of 10 + 1, 20 + 2 and 40 + 4 bytes; the second was not evaluated."""
    from types import SimpleNamespace

    from fedaudit.reports import figures

    rounds = [SimpleNamespace(round=i + 1, up_payload=10 * 2**i, down_payload=2**i) for i in range(3)]
    monkeypatch.setattr(figures, "curve", lambda run: ([1, 3], [0.2, 0.6]))
    run = SimpleNamespace(record=SimpleNamespace(rounds=rounds))
    assert figures._spent(run) == [(11, 0.2), (77, 0.6)]


# --- runs in which everything differs: helpers/runs/unequal


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """The rows of the report: "uneven" on digits with two seeds, on MNIST with one, and "local"."""
    folder = unequal.write(tmp_path_factory.mktemp("unequal"))
    found = rows_of(grouped(read_runs(folder)[0]))
    of = {(row.group.method, row.group.setting.dataset): row for row in found}
    assert len(of) == len(found) == 3
    return folder, of


@pytest.mark.parametrize(
    ("key", "figure"),
    [
        ("accuracy", lambda told: told["rounds"][3]["utility"]["global"]["test"]["accuracy"]),
        ("own", lambda told: told["rounds"][3]["utility"]["clients"]["local_test"]["mean"]),
        ("global_own", lambda told: told["rounds"][3]["utility"]["global"]["local_test"]["mean"]),
        ("up", lambda told: unequal.sent(told, "up") / unequal.times_asked(told)),
        ("down", lambda told: unequal.sent(told, "down") / unequal.times_asked(told)),
        ("seconds", unequal.work),
        ("memory", lambda told: told["peak_rss_bytes"]),
    ],
)
def test_a_column_over_two_seeds_is_their_mean_with_students_interval(uneven, key, figure):
    folder, of = uneven
    values = [figure(unequal.raw(folder, name)) for name in ("digits-0", "digits-1")]
    cell = of["uneven", "digits"].cells[key]
    mean, low, high = unequal.student(values)
    assert cell.each == {0: pytest.approx(values[0]), 1: pytest.approx(values[1])}
    if values[0] == values[1]:
        assert (cell.value, cell.low, cell.high) == (values[0],) * 3
        return
    assert cell.value == pytest.approx(mean)
    most = 1.0 if key in ("accuracy", "own", "global_own") else math.inf
    assert cell.low == pytest.approx(max(0.0, low))
    assert cell.high == pytest.approx(min(most, high))
    assert cell.n == 2
    alone = of["uneven", "mnist"].cells[key]
    assert alone.value == pytest.approx(figure(unequal.raw(folder, "mnist-0")))
    assert alone.n == 1


def test_the_guarantee_of_unequal_clients_and_seeds(uneven):
    """Client 1 spent 7.25 with seed 0 and 8.25 with seed 1; of those who sent something delta is 0.02 at most."""
    cell = uneven[1]["uneven", "digits"].cells["epsilon"]
    assert (cell.value, cell.low, cell.high, cell.each) == (8.25, 7.25, 8.25, {0: 7.25, 1: 8.25})
    assert cell.detail == "δ ≤ 0.02", "client 3, with 0.09, sent nothing"
    assert uneven[1]["local", "digits"].cells["epsilon"].value == 0.0


def test_claims_bounds_and_attacks_of_unequal_seeds(uneven):
    digits, mnist = (uneven[1]["uneven", dataset].cells for dataset in ("digits", "mnist"))
    assert (digits["claim"].value, digits["claim"].detail) == (5.0, "logits, training")
    assert digits["lower"].each == {0: 4.25, 1: 2.5}
    assert (digits["lower"].value, digits["lower"].high) == (4.25, math.inf)
    assert digits["lower"].flag == "refuted: ε = 3 for a claim of 3", "and the claim of 5 holds"
    assert (mnist["lower"].value, mnist["lower"].flag) == (0.5, "")
    half = math.hypot(0.04, 0.04) / 2  # over the candidates of both seeds, each known to 0.04
    auc = digits["auc"]
    assert (auc.value, auc.low, auc.high) == tuple(map(pytest.approx, (0.68, 0.68 - half, 0.68 + half)))
    assert mnist["auc"].value == 0.54
    assert digits["tpr"].value == pytest.approx((0.21 + 0.15) / 2)


def test_points_of_the_figures_of_unequal_runs(uneven):
    """Round 3 was not evaluated: it has no point, and its bytes count."""
    pytest.importorskip("matplotlib")
    from fedaudit.reports.figures import _spent, per_round

    folder, of = uneven
    row = of["uneven", "digits"]
    scores = []
    for run, name in zip(row.group.runs, ("digits-0", "digits-1"), strict=True):
        told = unequal.raw(folder, name)["rounds"]
        sizes = [one["up_payload"] + one["down_payload"] for one in told]
        each = [one["utility"]["global"]["test"]["accuracy"] for one in told if one["utility"]]
        scores.append(each)
        assert _spent(run) == [(sizes[0], each[0]), (sum(sizes[:2]), each[1]), (sum(sizes), each[2])]
    (axes,) = per_round([row]).axes
    line, band = axes.lines[0], axes.collections[0]
    assert list(line.get_xdata()) == [1, 2, 4]
    assert list(line.get_ydata()) == [pytest.approx((a + b) / 2) for a, b in zip(*scores, strict=True)]
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    for t, a, b in zip((1, 2, 4), *scores, strict=True):
        assert {(t, round(a, 6)), (t, round(b, 6))} <= corners, "the band goes from the worst seed to the best"


def test_that_clients_failed_to_answer_is_told_with_the_first_reason(tmp_path):
    """A client that drops out as the setting has it, or that no strategy waits for, is none of them."""
    fell, whole, expected = (reported._record("fedavg", seed, 0.8, releases=True) for seed in (0, 1, 2))
    rounds, because = len(fell.rounds), ("dropped out", "dropped out (share)", NOT_AWAITED)
    assert rounds > 1
    for record in (fell, whole, expected):
        record.setting = record.setting.model_copy(update={"rounds": 90})  # of which so many were carried out
    expected.rounds[0].absent = [Absence(client=0, ask=0, reason=of) for of in because]
    fell.rounds[0].absent = [Absence(client=1, ask=0, reason="dropped out")]
    letters = "".join(chr(ord("a") + i % 26) for i in range(LONG + 1))
    fell.rounds[1].absent = [Absence(client=k, ask=1, reason=letters) for k in (1, 0)]
    assert (whole.failures, expected.failures) == ("", "")
    [row] = rows(tmp_path, (fell, [], []), (whole, [], []), (expected, [], []))
    assert row.clients_failed
    [note] = [note for note in row.notes if "failed to answer" in note]
    told = f"Clients failed to answer 2 times, in 1 of {rounds} rounds. The first: client 1 in round 2: "
    where = "If more is known, it is in errors.log in the run's folder."
    assert note == f"Seed 0: {told}{letters[: LONG - 1]}…. {where}"
    fell.rounds[1].absent = [Absence(client=1, ask=1, reason=letters[:-1])]
    one = f"Clients failed to answer 1 time, in 1 of {rounds} rounds. The first: client 1 in round 2: "
    assert fell.failures == f"{one}{letters[:-1]}. {where}"


@pytest.mark.parametrize("failed", [True, False])
def test_rows_whose_clients_failed_say_so_wherever_they_are_shown(tmp_path, failed):
    record = reported._record("fedavg", 0, 0.8, releases=True)
    if failed:
        record.rounds[0].absent = [Absence(client=1, ask=0, reason="no images")]
    [row] = rows(tmp_path, (record, [], []))
    words = "The first: client 1 in round 1: no images. If more is known, it is in errors.log"
    assert (words in summary(record)[1]) is failed
    assert ("1 row: clients failed to answer" in table(tmp_path)) is failed
    html = page([row], {}, "title")
    assert ('<span class="pill">clients failed</span>' in html) is failed
    assert (words in html) is failed
