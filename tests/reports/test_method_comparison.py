"""All methods side by side: which attack is the best, what a protection costs, and what cannot be protected."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from fedaudit.reports import method_comparison as comparison
from fedaudit.suite.kept_records import CellFigures, Found, MethodRecords


def member(attack, value, leak, threat="server", below=0.02):
    return Found(
        attack=attack, threat=threat, claims="membership", value=value, low=value - below, high=value + 0.02, leak=leak
    )


def cell(seed, *attacks, accuracy=0.9, protection="none", asked=None, epsilon=None, **more):
    return CellFigures(
        key=f"{protection}{asked}{seed}", partition="iid", seed=seed, protection=protection, asked=asked,
        status=more.pop("status", "done"), global_test=accuracy, own=accuracy, epsilon=epsilon, attacks=attacks, **more,
    )  # fmt: skip


def row_of(*cells, method="fedavg"):
    return comparison.rows_of({method: MethodRecords(method=method, cells=cells)}, [method], ["iid"])[0]


def test_an_attack_is_found_if_it_leaks_in_most_seeds():
    """One leak of three is not enough, however high its AUC is; of two attacks that work the better one counts."""
    cells = [
        cell(0, member("loss", 0.9, True), member("entropy", 0.6, True), member("rmia", 0.55, True)),
        cell(1, member("loss", 0.5, False), member("entropy", 0.6, True), member("rmia", 0.55, True)),
        cell(2, member("loss", 0.5, False), member("entropy", 0.6, False), member("rmia", 0.55, True)),
    ]
    best = row_of(*cells).membership["server"]
    assert (best.attack, best.leaks, best.seeds, best.found) == ("entropy", 2, 3, True)
    assert best.value == pytest.approx(0.6)
    alone = row_of(*(one.model_copy(update={"attacks": one.attacks[:1]}) for one in cells)).membership["server"]
    assert not alone.found
    assert comparison.shown(alone) == "not found (0.63)"
    assert comparison.shown(None) == "nothing to attack"


def test_one_of_many_attacks_has_to_be_further_above_a_guess():
    """0.55 with a lower bound of 0.51 is 2.45 errors above 0.5: enough for one attack (1.96), not for ten (2.81)."""
    one = member("loss", 0.55, True, below=0.04)
    assert row_of(cell(0, one)).membership["server"].found
    others = [member(f"other{number}", 0.5, False) for number in range(9)]
    assert not row_of(cell(0, one, *others)).membership["server"].found


def test_half_of_the_seeds_are_not_enough():
    assert (
        not row_of(cell(0, member("loss", 0.7, True)), cell(1, member("loss", 0.7, False))).membership["server"].found
    )


def test_noise_on_messages_does_not_cover_published_clients_models():
    cells = [cell(0), cell(0, protection="messages", asked=8.0, epsilon=8.0)]
    own = [of.model_copy(update={"global_test": None, "common": 0.9}) for of in cells]
    assert comparison.guarantee(row_of(*cells)) == "8.0 by messages: +0.0"
    assert comparison.guarantee(row_of(*own)) == "8.0 by messages, models not covered: +0.0"


def test_threats_have_attacks_of_their_own():
    row = row_of(cell(0, member("loss", 0.7, True), member("loss", 0.6, True, "peer")))
    assert [row.membership[threat] and row.membership[threat].value for threat in comparison.THREATS] == [
        0.7,
        0.6,
        None,
    ]


def test_a_protections_cost_is_against_the_same_seeds():
    """Seed 0 loses 10 points and seed 1 loses 20; seed 2 was not run protected and does not count."""
    plain = [cell(0, accuracy=0.9), cell(1, accuracy=0.8), cell(2, accuracy=0.1)]
    private = [
        cell(seed, accuracy=accuracy, protection="DP-SGD", asked=8.0, epsilon=7.5 + seed)
        for seed, accuracy in ((0, 0.8), (1, 0.6))
    ]
    row = row_of(*plain, *private)
    (one,) = row.protected
    assert one.cost == pytest.approx(15)
    assert one.epsilon == 8.5
    assert comparison.guarantee(row) == "8.5 by DP-SGD: -15.0"


def test_one_infinite_ledger_is_no_guarantee():
    private = [
        cell(0, protection="messages", asked=8.0, epsilon=8.0),
        cell(1, protection="messages", asked=8.0, open={"Local.w": ""}),
    ]
    row = row_of(cell(0), cell(1), *private)
    assert row.protected[0].epsilon is None
    assert comparison.guarantee(row) == "none"
    assert comparison.why_unprotected(row) == "messages: epsilon stays infinite by Local.w"


def test_refusals_are_told_in_the_codes_words():
    nothing = "a policy on labels, logits protects nothing where count, weights is released."
    sums = "heterofl trains on a loss that does not separate over records (separable=False); no clipping. Run it."
    row = row_of(
        cell(0),
        cell(0, protection="messages", asked=8.0, status="refused", reason=nothing),
        cell(0, protection="DP-SGD", asked=8.0, status="refused", reason=sums),
    )
    assert comparison.why_unprotected(row) == (
        "DP-SGD: heterofl trains on a loss that does not separate over records (separable=False); no clipping; "
        "messages: of count, weights, none takes noise"
    )


def test_a_method_without_records_is_named():
    rows = comparison.rows_of({}, ["fedavg", "fedproto"], ["iid"])
    assert [(row.method, row.missing) for row in rows] == [("fedavg", "not run yet"), ("fedproto", "not run yet")]
    table = comparison.table(rows)
    assert "**Averaging**" in table
    assert "**Prototypes**" in table
    assert table.count("no figures: not run yet") == 2


def test_a_methods_place_among_the_others():
    records = {
        name: MethodRecords(method=name, cells=(cell(0, member("loss", auc, True), accuracy=accuracy),))
        for name, accuracy, auc in (("fedavg", 0.9, 0.6), ("fedprox", 0.8, 0.7), ("mine:Own", 0.85, 0.55))
    }
    rows = comparison.rows_of(records, list(records), ["iid"])
    mine = next(row for row in rows if row.method == "mine:Own")
    assert mine.family == comparison.OWN
    assert comparison.place(mine, rows) == (
        "iid: accuracy 85.0 %, rank 2 of 3; the server's best membership AUC 0.55, 2 of 2 methods give away more"
    )


def test_the_picture_is_drawn(tmp_path):
    file = comparison.picture([row_of(cell(0, member("loss", 0.6, True)))], tmp_path / "all.png", mine="fedavg")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_no_name_in_the_picture_lies_over_another(tmp_path, monkeypatch):
    """Thirty methods in a narrow place, three of them at one: every name is there once, and no two overlap."""
    names = [f"method{i}" for i in range(30)]
    records = {
        name: MethodRecords(
            method=name,
            cells=(cell(0, member("loss", 0.6 + 0.006 * max(i, 2), True), accuracy=0.9 + 0.001 * max(i, 2)),),
        )
        for i, name in enumerate(names)
    }
    names.append("far")  # so that the others are near each other
    records["far"] = MethodRecords(method="far", cells=(cell(0, member("loss", 1.0, True), accuracy=0.1),))
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **o: drawn.append(self) or save(self, *a, **o))
    comparison.picture(comparison.rows_of(records, names, ["iid"]), tmp_path / "all.png", mine="method7")
    (figure,) = drawn
    texts = [one for one in figure.axes[0].texts if one.get_text()]
    said = [name for one in texts for name in one.get_text().replace("\n", " ").split(", ")]
    assert sorted(said) == sorted(names)
    assert "method0, method1, method2" in [one.get_text() for one in texts]  # one place, one label
    assert [one.get_text() for one in texts if one.get_fontweight() == "bold"] == ["method7"]
    boxes = [Text.get_window_extent(one) for one in texts]
    for i, box in enumerate(boxes):
        assert not any(Bbox.intersection(box, other) for other in boxes[:i])
        assert box.x1 <= figure.bbox.x1
