"""Partitions and the audit split."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2

from fedaudit.data import Dataset, Federation, bubbles, federate, partition
from fedaudit.data import partitions as module
from fedaudit.errors import DataError, SettingError


def labels(n: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, n)


def split(spec: str, y: np.ndarray, clients: int, seed: int = 0, **rest) -> list[np.ndarray]:
    rest.setdefault("classes", int(y.max()) + 1)
    return partition(spec, y, clients, np.random.default_rng(seed), **rest)


def table(parts: list[np.ndarray], y: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(y[part], minlength=int(y.max()) + 1) for part in parts])


def entropy(counts: np.ndarray) -> float:
    """Mean over clients of the entropy of their labels, in nats."""
    p = counts / counts.sum(1, keepdims=True)
    return float(-(p * np.log(np.where(p > 0, p, 1))).sum(1).mean())


# --- what every scheme promises ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    spec=st.sampled_from(
        [
            *("iid", "dirichlet:0.01", "dirichlet:0.5", "dirichlet:1e6", "classes:1", "classes:3", "ratio:6:2:2"),
            *("dirichlet-capped:0.01", "dirichlet-capped:2"),
        ]
    ),
    n=st.integers(1, 2000),
    classes=st.integers(3, 12),
    clients=st.integers(1, 30),
    minimum=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_disjoint_sorted_enough_and_repeatable(spec, n, classes, clients, minimum, seed):
    y = labels(n, classes, seed)
    may_refuse = (DataError, SettingError) if spec.startswith(("classes", "ratio")) else ()
    if n < clients * minimum:
        with pytest.raises(DataError, match="too few"):
            split(spec, y, clients, seed, classes=classes, minimum=minimum)
        return
    try:
        parts = split(spec, y, clients, seed, classes=classes, minimum=minimum)
    except may_refuse:
        return
    assert len(parts) == clients
    assert all(len(part) >= minimum and (np.diff(part) > 0).all() for part in parts)
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    if spec.startswith(("iid", "dirichlet")):
        assert len(together) == n
    again = split(spec, y, clients, seed, classes=classes, minimum=minimum)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_another_seed_gives_another_partition():
    y = labels(500, 10)
    for spec in ("iid", "dirichlet:0.5", "classes:2", "ratio:8:1:1"):
        one, other = split(spec, y, 5, 1), split(spec, y, 5, 2)
        assert any(len(a) != len(b) or (a != b).any() for a, b in zip(one, other, strict=True)), spec


# --- the schemes ------------------------------------------------------------------------------------------------


def test_iid_is_even():
    sizes = [len(part) for part in split("iid", labels(503, 10), 10)]
    assert sorted(sizes) == [50] * 7 + [51] * 3


def test_dirichlet_skews_and_alpha_says_how_much():
    y = labels(10_000, 10)
    mean = {a: np.mean([entropy(table(split(f"dirichlet:{a}", y, 10, s), y)) for s in range(5)]) for a in (0.1, 1, 100)}
    assert mean[0.1] < 1.3 < mean[1] < 2.15 < mean[100] < np.log(10)


def test_dirichlet_proportions_have_the_mean_and_variance_of_the_distribution():
    """p ~ Dir(a, ..., a) over K: E p = 1/K and Var p = (1/K)(1 - 1/K) / (K a + 1); K = 4, a = 2: 3/16/9 = 0.02083.

    800 draws (200 seeds x 4 clients of one class): standard errors are 0.0051 and about 0.0011.
    """
    y = np.zeros(4000, dtype=np.int64)
    p = np.array([[len(part) / 4000 for part in split("dirichlet:2", y, 4, seed, minimum=1)] for seed in range(200)])
    assert p[:, 0].mean() == pytest.approx(0.25, abs=0.04)
    assert p.var() == pytest.approx(0.02083, rel=0.2)


def test_capped_clients_take_part_in_no_further_class():
    """Classes are dealt in order: who holds a tenth of the records from the classes before gets nothing of the next,
    and the clients' sizes differ less than those of the plain draw."""
    y = labels(10_000, 10)
    sizes = {}
    for spec in ("dirichlet:0.1", "dirichlet-capped:0.1"):
        counts = [table(split(spec, y, 10, seed, minimum=1), y) for seed in range(5)]
        sizes[spec] = np.mean([c.sum(1).std() for c in counts])
        over = [(c[:, :k].sum(1) >= 1000) & (c[:, k] > 0) for c in counts for k in range(1, 10)]
        assert np.any(over) == (spec == "dirichlet:0.1")
    assert sizes["dirichlet-capped:0.1"] < sizes["dirichlet:0.1"]


def test_dirichlet_of_a_hundred_clients_at_tiny_alpha_is_mended_and_fast():
    y = labels(50_000, 10)
    for alpha in ("0.01", "1e-8"):
        start = time.perf_counter()
        parts = split(f"dirichlet:{alpha}", y, 100)
        assert time.perf_counter() - start < 0.8
        assert min(len(part) for part in parts) >= 10
        assert sum(len(part) for part in parts) == 50_000
    tight = split("dirichlet:0.01", labels(1000, 10), 100, minimum=10)  # nothing to spare at all
    assert [len(part) for part in tight] == [10] * 100


def test_classes_gives_k_to_each_and_every_class_to_someone():
    y = np.repeat(np.arange(10), 60)
    for clients, k in ((5, 2), (7, 3), (20, 1), (6, 10)):
        held = table(split(f"classes:{k}", y, clients, minimum=1), y) > 0
        assert (held.sum(1) == k).all()
        holders = held.sum(0)
        assert holders.min() >= 1
        assert holders.max() - holders.min() <= 1
    few = table(split("classes:2", y, 3), y)
    assert few.sum() == 6 * 60  # the other four classes go to nobody


def test_ratio_is_kept_and_uses_everything_when_it_comes_out_even():
    y = np.repeat(np.arange(10), 100)
    counts = table(split("ratio:8:1:1", y, 20), y)
    assert counts.sum() == 1000
    assert (np.sort(counts, axis=1)[:, -3:] == [5, 5, 40]).all()
    assert (np.bincount(counts.argmax(1)) == 2).all()  # each class dominates at two clients
    counts = table(split("ratio:6:2:2", y, 7), y)
    assert len(set(counts.sum(1))) == 1
    dominant = counts.max(1) / counts.sum(1)
    assert dominant == pytest.approx([0.6] * 7, abs=0.01)
    assert (split("ratio:3", y, 10)[0] == np.sort(split("ratio:1", y, 10)[0])).all()  # parts may sum to anything


def test_domain_gives_each_client_one_domain():
    y, domain = labels(300, 3), np.repeat([0, 1, 2], 100)
    for clients in (3, 6):
        parts = split("domain", y, clients, domain=domain)
        assert sum(len(part) for part in parts) == 300
        assert [set(domain[part]) for part in parts] == [{k * 3 // clients} for k in range(clients)]
    with pytest.raises(SettingError, match="4 clients do not divide evenly over 3 domains"):
        split("domain", y, 4, domain=domain)
    with pytest.raises(SettingError, match="has no domains"):
        split("domain", y, 3)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("dirichlett:0.1", "Did you mean 'dirichlet:ALPHA'"),
        ("", "There is: classes:K"),
        ("iid:3", "no parameter"),
        ("dirichlet", "not a number"),
        ("dirichlet:x", "not a number"),
        ("dirichlet:0", "positive"),
        ("dirichlet:-1", "positive"),
        ("dirichlet:nan", "positive"),
        ("dirichlet:inf", "positive"),
        ("classes:0", "from 1 to the 10"),
        ("classes:11", "from 1 to the 10"),
        ("classes:2.5", "from 1 to the 10"),
        ("ratio", "numbers"),
        ("ratio:8:a", "numbers"),
        ("ratio:8:0", "positive"),
        ("ratio:" + ":".join("1" * 11), "11 parts"),
        ("domain:2", "no parameter"),
    ],
)
def test_a_bad_spec_is_explained(spec, says):
    with pytest.raises(SettingError, match=says):
        split(spec, np.repeat(np.arange(10), 50), 5)


def test_too_few_records_name_the_remedy():
    with pytest.raises(DataError, match="at most 10 clients, a minimum of at most 5"):
        split("iid", labels(100, 10), 20)
    with pytest.raises(DataError, match="fewer than the minimum of 10"):
        split("classes:2", np.repeat(np.arange(10), [5] * 9 + [500]), 10)
    with pytest.raises(DataError, match="whole numbers from 0 to 2"):
        split("iid", np.array([0, 1, 3] * 20), 2, classes=3)
    with pytest.raises(SettingError, match="clients is 0"):
        split("iid", labels(100, 10), 0)


def test_names_are_specs_with_a_line_each():
    known = {
        "iid",
        "dirichlet",
        "dirichlet-capped",
        "dirichlet-balanced",
        "dirichlet-filled",
        "classes",
        "ratio",
        "domain",
    }
    assert {form.partition(":")[0] for form in module.names()} == known
    assert all(module.names().values())


# --- the audit split --------------------------------------------------------------------------------------------


def toy(n: int = 600, classes: int = 5, domains: int = 0) -> Dataset:
    y = torch.from_numpy(labels(n, classes))
    x = torch.arange(n).remainder(256).to(torch.uint8).view(n, 1, 1, 1).expand(n, 1, 2, 2).contiguous()
    domain = torch.arange(n) % domains if domains else None
    return Dataset("toy", x, y, x[:20], y[:20], tuple("abcde"[:classes]), domain, tuple("PQR"[:domains]))


def pieces(fed: Federation) -> list[np.ndarray]:
    return [fed.aux, fed.public, *(a for s in fed.shards for a in (s.members, s.nonmembers, s.validation))]


@settings(deadline=None, max_examples=40)
@given(
    spec=st.sampled_from(["iid", "dirichlet:0.1", "classes:2", "ratio:8:1:1", "domain"]),
    seed=st.integers(0, 10**9),
    fractions=st.tuples(*[st.sampled_from([0.0, 0.01, 0.2, 0.45])] * 4),
)
def test_no_record_is_in_two_places(spec, seed, fractions):
    holdout, validation, aux, public = fractions
    fed = federate(
        toy(domains=3),
        clients=3,
        partition=spec,
        seed=seed,
        holdout=holdout,
        validation=validation,
        aux=aux,
        public=public,
        minimum=4,
    )
    together = np.concatenate(pieces(fed))
    assert len(np.unique(together)) == len(together)
    assert together.max() < 600
    if not spec.startswith(("classes", "ratio")):
        assert len(together) == 600
    assert len(fed.aux) == round(aux * 600)
    assert len(fed.public) == round(public * 600)
    for shard in fed.shards:
        assert len(shard.members) >= 2
        assert (len(shard.nonmembers) > 0) == (holdout > 0)
        assert (len(shard.validation) > 0) == (validation > 0)
    assert fed.counts().sum() == sum(len(s.members) for s in fed.shards)


def test_every_record_is_equally_likely_a_member():
    """60 records, 3 clients of 20, of which 5 non-members and 2 for validation: a member with probability 13/20.

    Over 800 seeds the number of times that a record is a member is binomial. Two bounds, each at a false alarm of
    about 1e-6 for the whole test: every single count in its two-sided interval, and the sum of squared standardised
    deviations below the chi-square quantile (memberships of a seed are negatively correlated, which lowers the sum).
    """
    data, rate, trials = toy(60), 13 / 20, 800
    hits = np.zeros(60)
    for seed in range(trials):
        for shard in federate(data, clients=3, partition="iid", seed=seed, aux=0.0).shards:
            assert (len(shard.members), len(shard.nonmembers), len(shard.validation)) == (13, 5, 2)
            hits[shard.members] += 1
    low, high = binom.interval(1 - 1e-6 / 60, trials, rate)
    assert low <= hits.min()
    assert hits.max() <= high
    z2 = (hits - trials * rate) ** 2 / (trials * rate * (1 - rate))
    assert z2.sum() < chi2.isf(1e-6, 60)


def test_membership_does_not_depend_on_the_label_or_the_place():
    """Within a skewed client the member rate of its rarest class and of its first records is that of all."""
    data, trials = toy(400), 400
    rare, first = [], []
    for seed in range(trials):
        fed = federate(data, clients=2, partition="dirichlet:0.5", seed=seed, aux=0.0)
        for shard in fed.shards:
            held = np.sort(np.concatenate([shard.members, shard.nonmembers, shard.validation]))
            excess = np.isin(held, shard.members) - len(shard.members) / len(held)
            y = data.y.numpy()[held]
            rare.append(
                excess[y == np.argmin(np.bincount(y, minlength=5) + 1e9 * (np.bincount(y, minlength=5) == 0))].mean()
            )
            first.append(excess[:5].mean())
    for sample in (rare, first):
        assert abs(np.mean(sample)) < 5 * np.std(sample) / np.sqrt(len(sample))


def test_the_same_seed_gives_the_same_split_and_each_step_its_own_generator():
    setting = {"clients": 4, "partition": "dirichlet:0.5"}
    one, again = (federate(toy(), seed=7, public=0.1, **setting) for _ in range(2))
    assert all((a == b).all() for a, b in zip(pieces(one), pieces(again), strict=True))
    other = federate(toy(), seed=8, public=0.1, **setting)
    assert (one.aux != other.aux).any()
    more = federate(toy(), seed=7, public=0.2, **setting)
    assert (one.aux == more.aux).all()  # the attackers' set does not move when the public one grows
    assert set(one.public) < set(more.public)
    held = federate(toy(), seed=7, public=0.1, holdout=0.4, **setting)
    whole = [np.sort(np.concatenate([s.members, s.nonmembers, s.validation])) for f in (one, held) for s in f.shards]
    assert all((a == b).all() for a, b in zip(whole[:4], whole[4:], strict=True))  # nor the clients with the holdout


def test_rows_are_the_records_scaled():
    fed = federate(toy(), clients=3, partition="iid", seed=0, public=0.1)
    for (x, y), index in (
        (fed.members(1), fed.shards[1].members),
        (fed.nonmembers(1), fed.shards[1].nonmembers),
        (fed.validation(2), fed.shards[2].validation),
        (fed.auxiliary(), fed.aux),
        (fed.public_set(), fed.public),
    ):
        assert x.dtype == torch.float32
        assert torch.equal(x[:, 0, 0, 0], torch.from_numpy(index % 256).float() / 127.5 - 1)
        assert torch.equal(y, fed.dataset.y[torch.from_numpy(index)])
    assert len(fed.test()[1]) == 20
    empty = federate(toy(), clients=3, partition="iid", seed=0).public_set()
    assert empty[0].shape == (0, 1, 2, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"holdout": 1.0}, "holdout is 1"),
        ({"validation": -0.1}, "validation is -0.1"),
        ({"aux": float("nan")}, "aux is nan"),
        ({"aux": 0.5, "public": 0.5}, "aux 0.5 and public 0.5 leave no records"),
        ({"holdout": 0.6, "validation": 0.4}, "holdout 0.6 and validation 0.4"),
    ],
)
def test_fractions_are_checked(change, says):
    with pytest.raises(SettingError, match=says):
        federate(toy(), clients=3, partition="iid", seed=0, **change)


def test_a_client_too_small_to_split_is_named():
    with pytest.raises(DataError, match="client 0 has 3 records"):
        federate(toy(30), clients=10, partition="iid", seed=0, minimum=1, aux=0.0)


# --- the picture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (5, 10), pytest.param(100, 200, marks=pytest.mark.long)])
def test_bubbles_are_written(tmp_path, clients, classes):
    counts = np.random.default_rng(0).integers(0, 40, (clients, classes))
    names = [f"class {c}" for c in range(classes)]
    figure = bubbles(counts, tmp_path / "new" / "b.png", title="a title " * 20, class_names=names)
    assert (tmp_path / "new" / "b.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    assert len(axes.collections[0].get_offsets()) == (counts > 0).sum()
    assert len(axes.get_xticks()) <= 50
    assert len(axes.get_yticks()) <= 70


def test_the_area_is_the_count():
    (axes,) = bubbles(np.array([[100, 25, 0]]), None, title="").axes
    large, small = axes.collections[0].get_sizes()
    assert large / small == pytest.approx(4)
    assert (
        not bubbles(np.zeros((2, 3), dtype=int), None, title="nobody has anything")
        .axes[0]
        .collections[0]
        .get_sizes()
        .size
    )


def test_svg_is_the_same_twice_and_other_endings_are_refused(tmp_path):
    for name in ("a.svg", "b.svg"):
        bubbles(np.eye(3, dtype=int), tmp_path / name, title="t")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(SettingError, match=r"\.png or \.svg"):
        bubbles(np.eye(3, dtype=int), tmp_path / "a.gif", title="t")
    with pytest.raises(SettingError, match="2 class names for 3"):
        bubbles(np.eye(3, dtype=int), None, title="t", class_names=["a", "b"])
    with pytest.raises(SettingError, match="clients x classes"):
        bubbles(np.arange(3), None, title="t")


def test_balanced_clients_have_one_size_and_skewed_classes():
    """1,003 records of ten classes, seven clients: 144 or 143 each, every record once; the smaller alpha, the larger
    the share of a client's largest class."""
    y = np.arange(1003) % 10
    largest = {}
    for alpha in (0.05, 1.0, 100.0):
        parts = split(f"dirichlet-balanced:{alpha}", y, 7)
        assert sorted(len(part) for part in parts) == [143] * 5 + [144] * 2
        assert sorted(np.concatenate(parts)) == list(range(1003))
        largest[alpha] = np.mean([np.bincount(y[part]).max() / len(part) for part in parts])
    assert largest[0.05] > 0.4 > largest[1.0] > 0.2 > largest[100.0]


class Told(np.random.Generator):
    """A generator whose Dirichlet draws are given."""

    draws: list[list[float]]

    def dirichlet(self, alpha, size=None):
        return np.array(self.draws.pop(0))


def test_filled_clients_get_each_class_until_they_are_full():
    """Three clients with room for 4, classes of 6, 4 and 2. Class 0 by (1/2, 1/2, 0): 3 and 3. Class 1 by (3/4, 1/4, 0)
    would be 3 and 1, but there is room for 1 and 1, and nobody else wants it: 2 go to the third. Class 2 fills it."""
    y = np.repeat([0, 1, 2], [6, 4, 2])
    rng = Told(np.random.PCG64(0))
    rng.draws = [[0.5, 0.5, 0.0], [0.75, 0.25, 0.0], [1.0, 0.0, 0.0]]
    parts = partition("dirichlet-filled:0.5", y, 3, rng, classes=3, minimum=1)
    assert table(parts, y).tolist() == [[3, 1, 0], [3, 1, 0], [0, 2, 2]]
    rng.draws = [[0.5, 0.25, 0.25], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]
    parts = partition("dirichlet-filled:0.5", y, 3, rng, classes=3, minimum=1)
    # Class 0: the third takes 6/4 = 1, the second a third of 5, which is 1, the first all 4. Class 1: 4 in halves.
    # Class 2: the third takes 8/9 of 2, which is 1, the second what is left.
    assert table(parts, y).tolist() == [[4, 0, 0], [1, 2, 1], [1, 2, 1]]


def test_filled_clients_have_one_size_and_fewer_classes_than_balanced_ones():
    """The public code that deals like this has 3.7 classes a client with at least 1 % of its records at alpha = 0.1,
    over 200 draws; a Dirichlet for each client has 5.0."""
    y = np.repeat(np.arange(10), 500)
    held = {}
    for scheme in ("dirichlet-filled:0.1", "dirichlet-balanced:0.1"):
        found = []
        for seed in range(40):
            parts = partition(scheme, y, 10, np.random.default_rng(seed), classes=10, minimum=10)
            assert [len(part) for part in parts] == [500] * 10
            assert sorted(np.concatenate(parts)) == list(range(5000))
            found.append((table(parts, y) >= 5).sum(1).mean())
        held[scheme] = np.mean(found)
    assert held["dirichlet-filled:0.1"] == pytest.approx(3.7, abs=0.3)
    assert held["dirichlet-balanced:0.1"] == pytest.approx(5.0, abs=0.3)
    even = table(split("dirichlet-filled:1000", y, 10), y)
    assert even.min() > 30, "large alphas have all classes"


def test_a_ratio_may_name_every_class():
    y = np.repeat(np.arange(3), 90)
    counts = table(split("ratio:5:3:1", y, 3), y)
    assert (np.sort(counts, axis=1) == [10, 30, 50]).all()
    assert (counts.sum(0) == 90).all()
    with pytest.raises(SettingError, match="it has 4 parts, but there are 3 classes"):
        split("ratio:5:3:1:1", y, 3)


def test_a_picture_is_as_wide_as_its_parts_and_names_of_22_letters_fit():
    """Three clients and two classes: 0.62 and 0.075 a letter on the left, at least 2.4 of bubbles, 1.25 for the legend.
    Below 0.62, at least 2 of bubbles, above 0.25 and 0.2 for one line of title."""
    figure = bubbles(np.ones((3, 2), dtype=int), None, title="t")
    assert tuple(figure.get_size_inches()) == pytest.approx((0.695 + 2.4 + 1.25, 0.62 + 2.0 + 0.45))
    assert {handle.get_markeredgewidth() for handle in figure.axes[0].get_legend().legend_handles} == {0}, "no edge"
    figure = bubbles(np.ones((3, 2), dtype=int), None, title="t", class_names=["a" * 22, "b" * 23])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a" * 22, "b" * 21 + "…"]
    assert figure.get_size_inches()[0] == pytest.approx(0.62 + 0.075 * 22 + 2.4 + 1.25)


# --- counts by hand -----------------------------------------------------------------------------------------------


def task(y, clients, minimum=1, argument=""):
    return module._Task("spec", argument, np.asarray(y), clients, np.random.default_rng(0), 4, minimum, None)


def test_a_draw_that_lacks_nothing_is_taken_at_once():
    """Three draws: 4, 2 and 0 records are lacking. The third is the table."""
    draws = iter([[[10, 0], [0, 0]], [[8, 0], [2, 0]], [[4, 1], [4, 1]], [[9, 9], [9, 9]]])
    made = module._at_least(task([0] * 10, 2, minimum=4), lambda: np.array(next(draws)))
    assert made.tolist() == [[4, 1], [4, 1]]
    assert next(draws) == [[9, 9], [9, 9]], "it was not drawn"


def test_the_draw_that_lacks_least_is_mended(monkeypatch):
    """The second of three lacks least: 3 records of client 2. They come from the largest class of the largest client,
    half of what that client can spare at a time: 2 of 3 from client 0, then 1 of 2 from client 1."""
    draws = iter([[[9, 9], [0, 0], [0, 0]], [[5, 2], [1, 5], [1, 0]], [[9, 9], [0, 0], [0, 0]]])
    monkeypatch.setattr(module, "_REDRAWS", 3)
    made = module._at_least(task([0] * 10, 3, minimum=4), lambda: np.array(next(draws)))
    assert made.tolist() == [[3, 2], [1, 4], [3, 1]]


def test_each_class_is_held_equally_often():
    """Five clients of two classes each, of three classes that there are: ten places, three or four for a class."""
    for seed in range(20):
        one = module._Task("spec", "", np.array([0, 1, 3] * 5), 5, np.random.default_rng(seed), 4, 1, None)
        table = one.turns(2)
        assert table.shape == (5, 2)
        assert all(len(set(row)) == 2 for row in table.tolist()), "two classes, not one twice"
        held = np.bincount(table.ravel(), minlength=4)
        assert held[2] == 0
        assert sorted(held[[0, 1, 3]].tolist()) == [3, 3, 4]


def test_records_that_nobody_gets_have_no_owner():
    y = [0] * 5 + [1] * 3 + [3] * 4
    owner = task(y, 2).deal(np.array([[2, 1, 0, 4], [2, 0, 0, 0]]))
    found = {k: np.bincount(np.asarray(y)[owner == k], minlength=4).tolist() for k in (0, 1, -1)}
    assert found == {0: [2, 1, 0, 4], 1: [2, 0, 0, 0], -1: [1, 2, 0, 0]}


@pytest.mark.parametrize(("n", "among", "sizes"), [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 3, [1, 1, 0])])
def test_numbers_are_spread_evenly(n, among, sizes):
    assert module._spread(n, among).tolist() == sizes


def test_a_ratio_takes_as_many_as_its_scarcest_class_has():
    """3 : 1 for two clients of classes 0 and 1, of which there are 10 and 9: 9 = 3/4 n + 1/4 n, so n = 9. The larger
    share is 7 and the smaller 2: class 0 gives 9 of its 10."""
    y = np.array([0] * 10 + [1] * 9)
    counts = table(split("ratio:3:1", y, 2, minimum=1), y)
    assert sorted(map(sorted, counts.tolist())) == [[2, 7], [2, 7]]
    assert counts.sum(0).tolist() == [9, 9]


def test_domains_that_do_not_fit_are_refused():
    y = np.arange(12) % 3
    for domain, says in (([0, 1] * 5, "10 domain labels for 12 records"), ([0, 1, 2] * 4, "4 clients do not divide")):
        with pytest.raises((DataError, SettingError), match=says):
            partition("domain", y, 4, np.random.default_rng(0), classes=3, minimum=1, domain=np.array(domain))
    parts = partition(
        "domain", y, 4, np.random.default_rng(0), classes=3, minimum=1, domain=np.array([7] * 5 + [9] * 7)
    )
    assert [len(part) for part in parts] == [3, 2, 4, 3]
    assert sorted(np.concatenate(parts[:2]).tolist()) == list(range(5))


def test_a_ratio_takes_as_many_records_as_rounding_allows():
    """One record of class 0 and two of class 1, half and half: where class 1 leads, all three are taken."""
    taken = set()
    for seed in range(8):
        (mine,) = partition("ratio:1:1", np.array([0, 1, 1]), 1, np.random.default_rng(seed), classes=2, minimum=1)
        held = [0, 1, 1]
        taken.add(tuple(held[i] for i in mine))
    assert taken == {(0, 1, 1), (0, 1)}


def test_clients_that_want_a_class_that_is_used_up_take_others():
    """Shares of one class each: both of two clients may want the same, and both get ten records all the same."""
    y = np.repeat([0, 1], 10)
    alike = 0
    for seed in range(8):
        parts = partition("dirichlet-balanced:1e-6", y, 2, np.random.default_rng(seed), classes=2, minimum=1)
        assert [len(part) for part in parts] == [10, 10]
        alike += len({int(y[i]) for i in parts[0]}) > 1
    assert alike > 0


def test_clients_of_a_few_records_are_filled_one_by_one():
    """A tenth of five records is none: a turn takes one at least."""
    parts = partition("dirichlet-balanced:1", np.repeat([0, 1], 5), 2, np.random.default_rng(0), classes=2, minimum=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    assert [len(part) for part in parts] == [5, 5]


def test_what_a_federation_is_like_unless_it_is_said():
    """Of 100 records 10 are set aside, and 9 clients get 10 each: 3 (2.5 and up) held out, 1 to validate, 6 members."""
    y = torch.arange(100) % 2
    data = Dataset("d", torch.zeros(100, 2), y, torch.zeros(2, 2), torch.tensor([0, 1]), ("a", "b"))
    found = federate(data, clients=9, partition="iid", seed=0)
    assert (len(found.aux), len(found.public)) == (10, 0)
    sizes = {(len(s.members), len(s.nonmembers), len(s.validation), len(s.canaries)) for s in found.shards}
    assert {sum(size) for size in sizes} == {10}
    assert all(size[1:] in {(3, 1, 0), (2, 1, 0)} for size in sizes)
    with pytest.raises(DataError, match="90 records are too few for 10 clients of at least 10 each"):
        federate(data, clients=10, partition="iid", seed=0)


def test_a_client_with_exactly_its_fair_share_gets_no_more():
    """Two classes of ten, each wholly for one of two clients: whoever has the first does not get the second."""
    y = np.repeat([0, 1], 10)
    for seed in range(8):
        parts = partition("dirichlet-capped:1e-6", y, 2, np.random.default_rng(seed), classes=2, minimum=1)
        assert sorted(sorted(y[part].tolist()) for part in parts) == [[0] * 10, [1] * 10]
