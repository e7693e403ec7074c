"""Clipping tested apart from what clips: honest releases hold, and each way of clipping less is found by its words."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from protected import ALL, everything, once

from fedaudit.epsilon import clipping
from fedaudit.epsilon.clipping import SLACK, Broken, FieldTest, audit_clipping, least_multiplier
from fedaudit.epsilon.joint_verdict import judged, told
from fedaudit.errors import ContractError
from fedaudit.privacy import sensitivity
from fedaudit.privacy.calibration import analytic
from fedaudit.privacy.mechanisms import additive
from fedaudit.privacy.mechanisms.base import mechanism_named
from fedaudit.privacy.mechanisms.gaussian import Gaussian
from fedaudit.privacy.policy import Policy
from fedaudit.runtime.run_record import read_record

REAL = sensitivity.clip_rows


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("clipping") / "honest")


def by_kind(audits):
    return {audit.kind: audit for audit in audits}


def clip_by(monkeypatch, clip):
    for module in (sensitivity, additive):
        monkeypatch.setattr(module, "clip_rows", clip)


def test_honest_releases_hold_for_every_kind(honest):
    found = by_kind(audit_clipping(honest))
    assert sorted(found) == sorted(ALL)
    assert {a.verdict for a in found.values()} == {"not refuted"}
    assert found["embeddings"].trials > 40, "values, formats, the path, two clients"
    assert all(a.certain and a.p_value == 1 for a in found.values())
    assert {a.test for a in read_record(honest).audits} >= {"clipping"}


def test_clipping_that_is_left_out_is_found(honest, monkeypatch):
    clip_by(monkeypatch, lambda t, *_: t.clone())
    found = by_kind(audit_clipping(honest))
    assert {kind for kind, a in found.items() if a.verdict == "refuted"} == {"embeddings", "logits", "soft_labels"}
    assert found["embeddings"].lower_bound > 10
    assert "times as long as C" in found["embeddings"].how
    assert "one record moves a class mean" in found["logits"].how


def test_a_little_more_than_c_is_found(honest, monkeypatch):
    clip_by(monkeypatch, lambda t, C, norm=2: REAL(t, 1.01 * C, norm))
    found = by_kind(audit_clipping(honest, kinds=["embeddings"]))
    assert found["embeddings"].verdict == "refuted"


def test_clipping_in_one_format_only_is_found(honest, monkeypatch):
    clip_by(monkeypatch, lambda t, C, norm=2: t.clone() if t.dtype == torch.bfloat16 else REAL(t, C, norm))
    (found,) = audit_clipping(honest, kinds=["embeddings"])
    assert found.verdict == "refuted"
    assert "bfloat16" in found.how


def test_a_release_that_clips_where_it_is_looked_at_only_is_found(honest, monkeypatch):
    """`prepare` is honest, and the noise is added to something else: the path with one noise twice shows it."""
    real = Gaussian.noised

    def other(self, ready, *rest):
        return [noisy + 3 * leaf for noisy, leaf in zip(real(self, ready, *rest), ready.leaves, strict=True)]

    monkeypatch.setattr(Gaussian, "noised", other)
    (found,) = audit_clipping(honest, kinds=["embeddings"])
    assert found.verdict == "refuted"
    assert "as released" in found.how


@pytest.mark.parametrize("what", ["sensitivity", "calibration", "delta"])
def test_noise_that_is_scaled_for_less_is_found(honest, monkeypatch, what):
    bounded, multiplier, delta = additive.bounded, Gaussian.multiplier, additive.AddsNoise.delta
    if what == "sensitivity":

        def half(*args, **more):
            leaves, sensitivities, how = bounded(*args, **more)
            return leaves, [s / 2 for s in sensitivities], how

        monkeypatch.setattr(additive, "bounded", half)
    elif what == "calibration":
        monkeypatch.setattr(Gaussian, "multiplier", lambda self, *a: 0.97 * multiplier(self, *a))
    else:
        monkeypatch.setattr(additive.AddsNoise, "delta", lambda self, *a: 3 * delta(self, *a))
    found = by_kind(audit_clipping(honest))
    expected = set(ALL) if what == "sensitivity" else set(ALL) - {"synthetic_images"}  # these have a multiplier
    assert {kind for kind, a in found.items() if a.verdict == "refuted"} == expected
    assert "of what epsilon, delta and the sensitivity ask for" in found["label_counts"].how


def test_a_delta_of_one_in_n_is_that_of_the_clients_records(tmp_path, monkeypatch):
    """Noise a tenth too small for epsilon = 1 at delta = 1 / n is told as such."""
    folder = once(tmp_path / "a", label_counts={"epsilon": 1.0, "delta": "1/n"})
    assert by_kind(audit_clipping(folder))["label_counts"].verdict == "not refuted"
    real = Gaussian.multiplier
    monkeypatch.setattr(Gaussian, "multiplier", lambda self, *a: 0.9 * real(self, *a))
    found = by_kind(audit_clipping(folder))["label_counts"]
    assert found.verdict == "refuted"
    assert "is 0.9 of what epsilon, delta and the sensitivity ask for" in found.how


def test_counts_that_are_none_must_be_refused(honest, monkeypatch):
    monkeypatch.setattr(sensitivity, "_histogram_sensitivity", lambda *a: math.sqrt(2))
    (found,) = audit_clipping(honest, kinds=["label_counts"])
    assert found.verdict == "refuted"
    assert "counts of" in found.how


def test_pixels_beyond_their_range_are_found(honest, monkeypatch):
    real = additive.bounded

    def loose(leaves, *rest):
        _, sensitivities, how = real(leaves, *rest)
        return leaves, sensitivities, how

    monkeypatch.setattr(additive, "bounded", loose)
    (found,) = audit_clipping(honest, kinds=["synthetic_images"])
    assert found.verdict == "refuted"


def test_laplace_noise_is_held_against_its_own_norm(tmp_path, monkeypatch):
    laplace = {"embeddings": {"epsilon": 1.0, "mechanism": "laplace"}}
    folder = everything(tmp_path / "a", **laplace)
    (found,) = audit_clipping(folder)
    assert found.verdict == "not refuted"
    clip_by(monkeypatch, lambda t, C, norm=2: REAL(t, C, 2))  # in L2, where the noise is for L1
    (found,) = audit_clipping(folder)
    assert found.verdict == "refuted"


def test_the_least_multiplier_is_that_of_the_analytic_mechanism():
    for epsilon, delta in ((0.1, 1e-5), (1.0, 1e-2), (8.0, 1e-5)):
        assert least_multiplier(epsilon, delta) == pytest.approx(analytic(epsilon, delta, 1.0), rel=1e-6)
        assert least_multiplier(epsilon, delta, 4) == pytest.approx(2 * analytic(epsilon, delta, 1.0), rel=1e-6)


@pytest.mark.long
def test_a_bound_that_is_not_random_weakens_no_test_and_needs_no_correction(honest, monkeypatch):
    from fedaudit.epsilon.residuals import audit_residuals

    random = audit_residuals(honest)
    both = [*random, *audit_clipping(honest)]
    assert told(both) == told(random)
    assert [word for audit, word in judged(both) if not audit.certain] == [word for _, word in judged(random)]
    clip_by(monkeypatch, lambda t, *_: t.clone())
    assert told([*random, *audit_clipping(honest)]) == "refuted"


@pytest.mark.parametrize("n", [20, 50])
def test_a_delta_of_one_over_n_is_that_of_the_clients_own_records(n):
    """epsilon = 1 and delta = 1 / n, a record moves the values by 2 at most: nine tenths of that noise lack a ninth."""
    needs = analytic(1.0, 1 / n, 2.0)
    for share, lacking in ((1.0, []), (0.9, [pytest.approx(1 / 0.9, rel=1e-4)])):
        field = SimpleNamespace(
            release=SimpleNamespace(policy=Policy(epsilon=1.0, delta="1/n"), how=mechanism_named("gaussian")),
            client=SimpleNamespace(_context=SimpleNamespace(n=n)),
            ready=lambda share=share: SimpleNamespace(sigmas=[share * needs], deviation=1.0),
            _sensitivities=lambda ready: [2.0],
        )
        ((tried, broken),) = FieldTest._noise(field)
        assert tried == 1
        assert [one.factor for one in broken] == lacking


def of_field(leaves, *, C=3.0, power=2, depends="record", most=1, kind="embeddings", relation="replace-one", **more):
    """A test of a field whose parts are given, so that one step of it can be looked at by itself."""
    field = FieldTest.__new__(FieldTest)
    field.leaves, field.C, field.power, field.depends = leaves, C, power, depends
    field.rng = torch.Generator().manual_seed(0)
    context = SimpleNamespace(most=most, n=more.pop("n", 7))
    y = torch.tensor(more.pop("labels", [0]))
    field.client = SimpleNamespace(_context=context, y=y)
    policy = SimpleNamespace(relation=relation, clip=C, secure=False)
    declared = SimpleNamespace(kind=kind, via=more.pop("via", "data"))
    field.release = SimpleNamespace(policy=policy, declared=declared)
    for name, value in more.items():
        setattr(field, name, value)
    return field


@pytest.mark.parametrize(
    ("depends", "kind", "relation", "power", "wanted"),
    [
        ("record", "embeddings", "replace-one", 2, [2 * 3 * math.sqrt(5 * 2)] * 2),  # 5 rows of a person in 2 tensors
        ("record", "embeddings", "zero-out", 2, [3 * math.sqrt(5 * 2)] * 2),
        ("record", "embeddings", "replace-one", 1, [2 * 3 * 5 * 2] * 2),
        ("all", "prototypes", "replace-one", 2, [2 * 3 * math.sqrt(4 + 1)] * 2),  # 4 rows, and a tensor that is one
        ("range", "synthetic_images", "replace-one", 2, [2 * math.sqrt(8 + 3)] * 2),  # all numbers of both
        ("range", "synthetic_images", "replace-one", 1, [2 * (8 + 3)] * 2),
        ("class", "logits", "replace-one", 2, [math.sqrt(2) * 2 * 3 / 2, math.sqrt(2) * 2 * 3 / 1]),  # of 3 and of 1
        ("class", "logits", "zero-out", 1, [2 * 3 / 2, 2 * 3 / 1]),
        ("histogram", "label_counts", "replace-one", 2, [5 * math.sqrt(2)] * 2),
        ("histogram", "label_counts", "zero-out", 2, [5.0] * 2),
        ("histogram", "statistics", "replace-one", 2, [5 * math.sqrt(8 + 3)] * 2),
    ],
)
def test_how_far_one_record_moves_a_release_by_hand(depends, kind, relation, power, wanted):
    """C = 3; a person has 5 records; a tensor of 4 rows of 2 numbers, and one of 3 numbers; classes of 3 and 1."""
    leaves = [torch.zeros(4, 2), torch.zeros(3)]
    field = of_field(leaves, depends=depends, kind=kind, relation=relation, power=power, most=5, labels=[0, 0, 1, 0])
    assert FieldTest._sensitivities(field, SimpleNamespace(leaves=leaves)) == pytest.approx(wanted)


@pytest.mark.parametrize("power", [1, 2])
def test_rows_that_are_tried_have_the_lengths_that_are_said(power):
    """C = 3: rows of 30, 0.3 and 3, and such with one coordinate only."""
    made = dict(FieldTest._values(of_field([torch.zeros(4, 2), torch.zeros(3)], power=power)))
    lengths = {name: [torch.linalg.vector_norm(leaf.reshape(-1, n), power, dim=1).tolist()
                      for leaf, n in zip(leaves, (2, 3), strict=True)] for name, leaves in made.items()}  # fmt: skip
    for name, length in (("rows 10 C long", 30.0), ("rows 0.1 C long", 0.3), ("rows 1 C long", 3.0),
                         ("rows of both signs", 30.0), ("one coordinate of each row", 30.0)):  # fmt: skip
        assert lengths.pop(name) == [pytest.approx([length] * 4), pytest.approx([length])], name
    assert list(lengths) == ["one row or number alone"]
    alone, nothing = made["one row or number alone"]
    assert alone.tolist() == [[30.0, 30.0], [0, 0], [0, 0], [0, 0]]
    assert nothing.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "power", "grid", "plain", "path"),
    [
        ((6, 4), 2, None, 4, 16 * 2.0 * 2 / 3),  # rows of 4 numbers: the larger sigma, sqrt(4), over C
        ((6, 4), 1, None, 4 * 2, 16 * 2.0 * 4 / 3),
        ((9,), 2, None, 4, 16 * 2.0 * 3 / 3),  # one row of 9
        ((6, 4), 2, 0.25, 4, 16 * 2.0 * 2 / 3 + 0.25 * 2 / 3 * 2**23),
    ],
)
def test_what_rounding_may_add_to_a_row_by_hand(shape, power, grid, plain, path):
    """In spacings of float32, 2^-23; the noise was added and taken off, and a grid moves each number by one step."""
    field = of_field([], power=power, ready=lambda: SimpleNamespace(sigmas=[0.5, 2.0], grid=grid))
    leaf = torch.zeros(shape)
    assert FieldTest._rounding(field, leaf, torch.float32, False) * 2**23 == pytest.approx(plain)
    assert FieldTest._rounding(field, leaf, torch.float32, True) * 2**23 == pytest.approx(plain + path)


def test_a_client_with_one_class_has_a_release_that_is_ready():
    """One mean of 4 numbers: each of the client's 7 rows is C long."""
    field = of_field([torch.zeros(4)], depends="class", _prepared_means=lambda rows: rows)

    class Seven(SimpleNamespace):
        def __len__(self):
            return 7

    field.client = Seven()
    rows = FieldTest.ready(field)
    assert rows.shape == (7, 4)
    assert rows.norm(dim=1).tolist() == pytest.approx([3.0] * 7)


@pytest.mark.parametrize(
    ("via", "depends", "C", "wanted"),
    [
        ("released", "record", 3.0, []),  # it was bounded and billed where it was released first
        ("data", "record", 3.0, ["rows", "noise"]),
        ("data", "class", 3.0, ["means", "noise"]),
        ("data", "histogram", 3.0, ["counts", "noise"]),
        ("data", "range", None, ["rows"]),
        ("data", "record", None, []),
    ],
)
def test_which_bounds_a_field_has(via, depends, C, wanted):
    steps = {f"_{name}": lambda name=name: iter([name]) for name in ("rows", "means", "counts", "noise")}
    assert list(FieldTest.all(of_field([], via=via, depends=depends, C=C, **steps))) == wanted


def test_rows_that_are_a_little_too_long_are_told_with_their_length():
    """C = 3. Of rows themselves only rounding is taken off; where noise was added and taken off, its rounding too."""
    sizes = SimpleNamespace(sigmas=[1e6], grid=None)
    field = of_field([], ready=lambda: sizes)
    rows = [torch.tensor([[3.0, 0.0], [0.0, 3.003]], dtype=torch.float64)]
    (broken,) = FieldTest._bounded(field, "rows", rows, torch.float32)
    assert (broken.words, broken.factor) == ("rows (float32) leave 1.001 times as long as C", pytest.approx(1.001))
    assert FieldTest._bounded(field, "rows", rows, torch.float32, path=True) == []
    assert FieldTest._bounded(field, "rows", [rows[0][:1], torch.zeros(0, 2)], torch.float32) == []


def noise_found(sigma, *, spent=None, normal=False, **policy):
    """What is said of noise of this deviation on a release of sensitivity 2, drawn with a deviation of 4 per unit."""
    how = SimpleNamespace(normal=normal, epsilon=lambda multiplier, delta: spent(multiplier, delta))
    base = {"delta": 1e-3, "noise_multiplier": None, "epsilon": 1.0, "calibration": "analytic", "releases": None}
    of = SimpleNamespace(
        release=SimpleNamespace(policy=SimpleNamespace(**(base | policy)), how=how), _planned=lambda: 3,
        ready=lambda: SimpleNamespace(sigmas=[sigma], deviation=4.0), _sensitivities=lambda ready: [2.0],
        client=SimpleNamespace(_context=SimpleNamespace(n=50)),
    )  # fmt: skip
    return [None if not broken else round(broken[0].factor, 6) for _, broken in FieldTest._noise(of)]


def test_noise_is_what_its_policy_asks_for_by_hand():
    """sigma = 16 over 4 and over 2: a multiplier of 2."""
    assert noise_found(16.0, noise_multiplier=2.0) == [None]
    assert noise_found(16.0, noise_multiplier=2.0 * (1 + SLACK)) == [None], "exactly as much as a search may lack"
    assert noise_found(16.0, noise_multiplier=4.0) == [2.0], "half of it is lacking"
    asked = []

    def spent(multiplier, delta):
        asked.append((multiplier, delta))
        return 1.0 if multiplier >= 2 else 1.5

    assert noise_found(16.0, spent=spent) == [None]
    assert noise_found(15.0, spent=spent) == [round(1 + 2 * SLACK, 6)], "more than the epsilon is spent"
    assert noise_found(16.0, spent=spent, delta="1/n") == [None]
    assert asked == [(2.0, 1e-3), (1.875, 1e-3), (2.0, 0.02)]
    assert noise_found(16.0, spent=spent, calibration="total") == [], "for all releases together it has no formula"


@pytest.mark.parametrize(
    ("policy", "releases"), [({}, 1), ({"calibration": "total"}, 3), ({"calibration": "total", "releases": 5}, 5)]
)
def test_gaussian_noise_is_for_as_many_releases_as_are_planned(policy, releases):
    needed = least_multiplier(1.0, 1e-3, releases)
    enough, half = 8 * needed, 4 * needed
    assert noise_found(enough * 1.0001, normal=True, **policy) == [None]
    assert noise_found(half, normal=True, **policy) == [pytest.approx(2.0)]


# --- whole functions, on clients and bounds of which no two are alike


class FakeHow:
    """A mechanism that says what it was asked."""

    path = None

    def claim(self, policy, ready):
        return policy.epsilon + 0.25

    def epsilon_at(self, ready, share, delta):
        return 10 * share + delta


def audited(monkeypatch, tests, *, epsilon=1.5):
    """Return the audit of a field that as many clients released as there are tests: (bounds, ready) or an error."""
    queue = iter(tests)

    class FakeTest:
        def __init__(self, run, release):
            self.bounds = next(queue)

        def all(self):
            if isinstance(self.bounds, Exception):
                raise self.bounds
            yield from self.bounds

        def ready(self):
            return SimpleNamespace(delta=0.125)

    monkeypatch.setattr(clipping, "FieldTest", FakeTest)
    policy = SimpleNamespace(epsilon=epsilon, delta_for=lambda n: 1 / n)
    release = SimpleNamespace(policy=policy, declared=SimpleNamespace(kind="logits"), where="Up.x", how=FakeHow())
    rows = [SimpleNamespace(n=n, by_kind=by, observers=seen) for n, by, seen in (
        (40, {"logits": 2.0}, {"logits": ["client"]}),
        (10, {"logits": 3.0, "other": 1.0}, {"logits": ["all", "server"]}),
        (90, {"other": 9.0}, {}),
    )]  # fmt: skip
    run = SimpleNamespace(record=SimpleNamespace(ledger=rows))
    return clipping._audit_field(run, [release] * len(tests), 0.9)


def test_a_fields_audit_tells_the_worst_of_all_clients_bounds(monkeypatch):
    """Of each step the worst counts: three are broken of nine, by 2.5 at most, which leaves 1 / 2.5 of the noise."""
    first = [(2, []), (3, [Broken("short", 1.5), Broken("long", 2.5)])]
    second = [(1, [Broken("middle", 2.0)]), (3, [Broken("least", 1.25)])]
    found = audited(monkeypatch, [first, second])
    assert found.model_dump(include={"kind", "claim", "trials", "p_value", "confidence", "verdict", "test"}) == {
        "kind": "logits", "claim": "Up.x, one release", "trials": 9, "p_value": 1e-15, "confidence": 0.9,
        "verdict": "refuted", "test": "clipping",
    }  # fmt: skip
    assert found.how == "long; 3 of 9 bounds are broken"
    assert found.threat == "whoever sees the release: all, server"
    assert (found.claim_epsilon, found.ledger_epsilon, found.delta) == (1.75, 3.0, 0.1)
    assert found.lower_bound == pytest.approx(10 / 2.5 + 0.125)


def test_a_fields_audit_says_what_was_not_tried(monkeypatch):
    fails = ContractError("cannot be made")
    held = audited(monkeypatch, [[(2, []), (5, [])]])
    assert (held.how, held.verdict, held.p_value, held.lower_bound, held.trials) == (
        "7 bounds held", "not refuted", 1.0, 0.0, 7,
    )  # fmt: skip
    some = audited(monkeypatch, [[(2, [Broken("long", 2.5)])], fails])
    assert some.how == "long; 1 of 2 bounds are broken; not tried on all clients: cannot be made"
    assert (some.verdict, some.claim_epsilon, some.lower_bound) == ("refuted", 1.5, 0.0)
    none = audited(monkeypatch, [fails, ContractError("nor this")], epsilon=None)
    assert (none.verdict, none.trials, none.claim_epsilon) == ("not tried", 0, math.inf)
    assert none.how == "0 bounds held; not tried on all clients: cannot be made"


class Labelled(SimpleNamespace):
    def __len__(self):
        return len(self.y)


def means_of(clip, labels=(1, 0, 1, 1, 2), d=3, C=2.0, power=2):
    """Return what is found of class means whose rows are clipped by `clip`."""
    field = of_field([torch.zeros(d)] * 3, C=C, power=power, depends="class")
    y = torch.tensor(labels)

    def class_means(rows, kind):
        assert kind == "embeddings"
        return {int(c): torch.stack([clip(row) for row in rows[y == c]]).mean(0) for c in y.unique()}

    field.client, field.world = Labelled(y=y, class_means=class_means), SimpleNamespace(device="cpu")
    return [(count, [(b.words, round(b.factor, 4)) for b in broken]) for count, broken in FieldTest._means(field)]


@pytest.mark.parametrize("power", [1, 2])
def test_class_means_of_far_rows_are_held_against_c(power):
    def clip(C):
        return lambda row: row * min(1.0, C / float(torch.linalg.vector_norm(row, power)))

    assert means_of(clip(2.0), power=power) == [(1, [])] * 6
    found = means_of(clip(3.0), power=power)
    assert [count for count, _ in found] == [1] * 6
    words = [broken[0][0] if broken else "" for _, broken in found]
    assert words[0] == "class means of random rows 10 C long (float32) leave 1.5 times as long as C"
    assert words[1].startswith("class means of rows of one direction 10 C long (float32) leave 1.5")
    assert words[2] == "one record moves a class mean by 1.5 times 2 C / N_c"
    assert words[3:5] == ["", ""]
    # A row of 0.1 C, turned and ten times as long, is C long: it moves the mean by 1.1 C / N_c, clipped or not.
    assert words[5] == ""
    unclipped = means_of(lambda row: row, power=power)
    assert unclipped[2][1] == [("one record moves a class mean by 55 times 2 C / N_c", 55.0)]  # (10 + 100) C / 2 C
    assert means_of(lambda row: row, C=None) == []


def test_a_record_that_moves_a_mean_by_just_what_it_may_is_no_fault():
    ends = means_of(lambda row: row / row.norm() * 2.0 * (1 + 5e-5))
    assert [broken for _, broken in ends][2] == []
    beyond = means_of(lambda row: row / row.norm() * 2.0 * 1.001)
    assert beyond[2][1] == [("one record moves a class mean by 1.001 times 2 C / N_c", 1.001)]


def test_counts_that_are_released_are_told_by_name():
    for kind, wrong in (("label_counts", {0.5: 0, -1.0: 0, 8.0: 0}), ("statistics", {0.5: 0, -1.0: 0})):
        seen = []

        def prepared(leaves, seen=seen):
            seen.append([leaf.tolist() for leaf in leaves])
            if leaves[0].view(-1)[0] == -1:
                raise ContractError("negative")

        field = of_field([torch.zeros(2, 2), torch.zeros(3)], kind=kind, n=7, _prepared=prepared)
        found = list(FieldTest._counts(field))
        assert seen == [[[[value, 0.0], [0.0, 0.0]], [0.0, 0.0, 0.0]] for value in wrong]
        assert [count for count, _ in found] == [1] * len(wrong)
        names = [broken[0].words.split(" are released")[0] if broken else "" for _, broken in found]
        wanted = ["counts of half a record", "", "counts of one more than there are"]
        assert names == wanted[: len(wrong)]
        assert found[0][1][0].factor == 2.0


def test_rows_are_tried_in_every_format_and_as_released():
    """Two values in four formats, and as released where noise is added that can be drawn twice."""

    def rows(dtype="float32", secure=False, sensitivity="analytic"):
        asked = []

        def bounded(name, leaves, dtype, path=False):
            asked.append((name, [leaf.tolist() for leaf in leaves], leaves[0].dtype, dtype, path))
            return [asked[-1][0]]

        field = of_field(
            [], _values=lambda: iter([("a", [torch.tensor([1.5])]), ("b", [torch.tensor([2.5])])]), _bounded=bounded,
            _before=lambda leaves: [2 * leaf for leaf in leaves], _added=lambda value: [3 * leaf for leaf in value],
        )  # fmt: skip
        field.release.policy = SimpleNamespace(secure=secure, sensitivity=sensitivity)
        field.release.declared.dtype = dtype
        assert list(FieldTest._rows(field)) == [(1, [row[0]]) for row in asked]
        return asked

    asked, formats = rows(), (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    one = [("a", [[3.0]], torch.float64, dtype, False) for dtype in formats]
    assert asked[:4] == one
    assert asked[4] == ("a, as released", [[4.5]], torch.float32, torch.float32, True)
    assert [name for name, *_ in asked[5:]] == ["b"] * 4 + ["b, as released"]
    assert len(rows("uint8")) == len(rows(secure=True)) == len(rows(sensitivity="random bits")) == 8


def test_values_of_both_signs_alternate_by_row():
    made = dict(FieldTest._values(of_field([torch.zeros(4, 2), torch.zeros(3)])))
    again = of_field([torch.zeros(4, 2), torch.zeros(3)])
    plain = [FieldTest._long(again, torch.zeros(4, 2), 1.0) for _ in range(1)]
    for _ in range(2):
        FieldTest._long(again, torch.zeros(3), 1.0), FieldTest._long(again, torch.zeros(4, 2), 1.0)
    FieldTest._long(again, torch.zeros(3), 1.0)
    rows, numbers = (FieldTest._long(again, torch.zeros(shape), 30.0) for shape in ((4, 2), (3,)))
    sign = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    torch.testing.assert_close(made["rows of both signs"][0], rows * sign[:, None])
    torch.testing.assert_close(made["rows of both signs"][1], numbers * sign[:3])
    assert plain[0].norm(dim=1).tolist() == pytest.approx([1.0] * 4)
    assert made["one coordinate of each row"][0].tolist() == [[0.0, -30.0]] * 4
    assert made["one coordinate of each row"][1].tolist() == [0.0, 0.0, -30.0]
    free = dict(FieldTest._values(of_field([torch.zeros(2, 2)], C=None)))
    assert free["rows 10 C long"][0].norm(dim=1).tolist() == pytest.approx([10.0] * 2)


def test_pixels_are_held_against_their_range_and_rows_against_c():
    pixels = of_field([], depends="range", C=5.0)
    (broken,) = FieldTest._bounded(pixels, "images", [torch.tensor([[0.5, -1.25]]).double()], torch.float32)
    assert broken.factor == 1.25
    numbers = [torch.tensor([3.0, -4.0, 12.0]).double()]  # one row of three numbers: 13 long, 19 in L1
    for power, factor in ((2, 13 / 3), (1, 19 / 3)):
        (broken,) = FieldTest._bounded(of_field([], power=power), "row", numbers, torch.float64)
        assert broken.factor == pytest.approx(factor)
    (broken,) = FieldTest._bounded(of_field([], C=None), "row", numbers, torch.float64)
    assert broken.factor == pytest.approx(13.0)


def test_a_row_may_be_exactly_as_long_as_rounding_allows():
    field = of_field([], C=2.0, _rounding=lambda leaf, dtype, path: 0.5)
    rows = [torch.tensor([[3.0, 0.0]]).double(), torch.tensor([[0.0, 3.0], [0.0, 3.25]]).double()]
    assert FieldTest._bounded(field, "row", rows[:1], torch.float64) == []
    (broken,) = FieldTest._bounded(field, "row", rows, torch.float64)
    assert (broken.factor, broken.words) == (1.625, "row (float64) leave 1.625 times as long as C")


def test_without_noise_rounding_is_that_of_the_row_alone():
    field = of_field([], ready=lambda: SimpleNamespace(sigmas=[], grid=None))
    assert FieldTest._rounding(field, torch.zeros(6, 4), torch.float32, True) * 2**23 == pytest.approx(4)


def test_a_field_of_a_single_number_has_values_too():
    made = dict(FieldTest._values(of_field([torch.zeros(())], C=2.0)))
    assert {name: float(leaf.abs()) for name, (leaf,) in made.items()} == pytest.approx(
        {
            "rows 10 C long": 20.0,
            "rows 0.1 C long": 0.2,
            "rows 1 C long": 2.0,
            "rows of both signs": 20.0,
            "one row or number alone": 20.0,
            "one coordinate of each row": 20.0,
        }
    )


def test_each_field_of_each_kind_is_audited_with_all_its_releases(monkeypatch):
    """Kinds by name, fields as they come. Private training is left to its repetition; the seconds are kept."""
    asked, saved, clock = [], [], iter([10.0, 12.5, 20.0, 21.0])
    policies = {"logits": None, clipping.TRAINING: None, "embeddings": None}
    run = SimpleNamespace(
        world=SimpleNamespace(policies=policies), folder="folder", record=SimpleNamespace(transcript_digest="digest")
    )

    def released(run, kind, clients):
        asked.append((kind, clients))
        return iter([SimpleNamespace(where=f"{kind}.{name}") for name in ("a", "b", "a")])

    monkeypatch.setattr(clipping, "closed_run", lambda *of: run)
    monkeypatch.setattr(clipping, "compute", lambda world: contextlib.nullcontext())
    monkeypatch.setattr(clipping, "released_fields", released)
    monkeypatch.setattr(clipping, "_audit_field", lambda run, of, level: (of[0].where, len(of), level))
    monkeypatch.setattr(clipping, "save_audits", lambda *of: saved.append(of))
    monkeypatch.setattr(clipping, "time", SimpleNamespace(perf_counter=clock.__next__))
    found = audit_clipping("folder", clients=[3], confidence=0.9)
    wanted = [("embeddings.a", 2), ("embeddings.b", 1), ("logits.a", 2), ("logits.b", 1)]
    assert found == [(*one, 0.9) for one in wanted]
    assert asked == [("embeddings", [3]), ("logits", [3])]
    assert saved == [("folder", "digest", found, 2.5)]
    assert audit_clipping("folder", kinds=["logits"]) == [("logits.a", 2, 0.95), ("logits.b", 1, 0.95)]
    assert (asked[2:], saved[1][3]) == ([("logits", None)], 1.0)


class Holder:
    """Stands in for a client of five records of two classes, whose class means nobody clips."""

    y = torch.tensor([1, 0, 1, 1, 0])

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 5

    def class_means(self, rows, kind):
        self.asked.append((rows, kind))
        return {c: rows[self.y == c].mean(0) for c in (0, 1)}

    def context(self, *of):
        return of


@pytest.mark.parametrize(("power", "entry"), [(2, 1.5), (1, 0.75)])
def test_class_means_that_nobody_clips_are_too_long_and_move_too_far(power, entry):
    """C = 3 and four numbers in a row. Three records are of the first one's class: turned and 10 times as long, it
    moves the mean by 11 / 3 of its length, where 2 C / 3 is allowed."""
    client = Holder()
    field = of_field([torch.zeros(4), torch.zeros(2)], power=power, client=client)
    field.world = SimpleNamespace(device=torch.device("cpu"))
    found = [(count, [(b.words, b.factor) for b in broken]) for count, broken in FieldTest._means(field)]
    assert [count for count, _ in found] == [1] * 6
    assert [len(broken) for _, broken in found[1:3]] == [2, 1]
    assert found[1][1][0] == (
        "class means of rows of one direction 10 C long (float32) leave 10 times as long as C",
        pytest.approx(10.0),
    )
    assert found[2][1] == [("one record moves a class mean by 55 times 2 C / N_c", pytest.approx(55.0))]
    assert found[3:] == [(1, [])] * 3, "0.1 C is within all bounds: 0.3 x 11 / 3 is less than 2"
    assert {kind for _, kind in client.asked} == {"embeddings"}
    for (random, _), (along, _), (before, _), (turned, _), length in (
        (*client.asked[:4], 10.0), (*client.asked[4:], 0.1),
    ):  # fmt: skip
        assert FieldTest._lengths(field, random).tolist() == pytest.approx([3 * length] * 5, rel=1e-5)
        assert along.tolist() == before.tolist() == [pytest.approx([entry * length] * 4)] * 5
        assert turned[0].tolist() == pytest.approx([-10 * entry * length] * 4)
        assert torch.equal(turned[1:], before[1:])


@pytest.mark.parametrize(("share", "held"), [(1 + 1e-4, True), (1 + 1.1e-4, False)])
def test_a_class_mean_may_move_by_exactly_what_is_allowed_and_rounding(share, held):
    """2 C / 3 is 2. A turned record begins with a negative number."""

    def by_class(rows):
        return {1: torch.tensor([2 * share if rows[0, 0] < 0 else 0.0], dtype=torch.float64)}

    field = of_field([torch.zeros(4)], power=1, client=Holder(), _by_class=by_class)
    found = list(FieldTest._means(field))
    assert [len(broken) for _, broken in found] == [0, 0, not held] * 2


@pytest.mark.parametrize(("leaves", "as_it_was"), [(2, True), (3, False)])
def test_class_means_have_the_form_of_the_field_if_it_has_as_many(leaves, as_it_was, monkeypatch):
    client, asked = Holder(), []
    monkeypatch.setattr(clipping, "prepare", lambda *of: asked.append(of) or "ready")
    monkeypatch.setattr(clipping, "rebuilt", lambda template, made: (template, list(made)))
    field = of_field([torch.zeros(2)] * leaves, client=client, template="template")
    field.world, field.release.where = SimpleNamespace(device=torch.device("cpu")), "Y.means"
    assert FieldTest._prepared_means(field, torch.arange(10.0).view(5, 2)) == "ready"
    ((value, *rest),) = asked
    means = value[1] if as_it_was else list(value.values())
    assert [m.tolist() for m in means] == [[5.0, 6.0], [pytest.approx(10 / 3), pytest.approx(13 / 3)]]
    assert value[0] == "template" if as_it_was else list(value) == [0, 1]
    assert rest == ["Y.means", field.release.declared, field.release.policy, (clipping.TEST,)]


@pytest.mark.parametrize(
    ("spent", "lacking"), [(2.0, None), (2.0001, None), (2 * (1 + SLACK), None), (2.0003, 1.0002), (9.0, 1.0002)]
)
def test_noise_that_is_not_normal_may_spend_a_little_more_than_its_epsilon(spent, lacking):
    """How much is lacking is not told by what is spent: only that something is."""
    assert noise_found(8.0, spent=lambda multiplier, delta: spent, epsilon=2.0) == [lacking]


def test_each_deviation_has_a_sensitivity_of_its_own():
    """8 and 4, drawn with 4 per unit, are multipliers of 1 and 1/2 of a sensitivity of 2."""

    def lacking(*needed):
        of = SimpleNamespace(
            release=SimpleNamespace(policy=SimpleNamespace(delta=1e-3, noise_multiplier=1.0), how=None),
            ready=lambda: SimpleNamespace(sigmas=[8.0, 4.0], deviation=4.0),
            client=SimpleNamespace(_context=SimpleNamespace(n=50)),
            _sensitivities=lambda ready: needed,
        )
        return [[b.factor for b in broken] for _, broken in FieldTest._noise(of)]

    assert lacking(2.0, 2.0) == [[], [2.0]]
    assert lacking(4.0, 1.0) == [[2.0], []]
    with pytest.raises(ValueError, match="shorter"):
        lacking(2.0)
