"""The bounds on one record's effect, by hand, for each way in which a release depends on records."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy import sensitivity
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.sensitivity import (
    Bounding,
    Context,
    bounded,
    clip_rows,
    dependence,
    joint,
    random_pixel_sensitivity,
    row_count,
)
from fedaudit.wire.codec import digest_of


def declared_of(kind="embeddings", unit="client", depends=None):
    return SimpleNamespace(kind=kind, unit=unit, depends=depends)


def context_of(n=10, **facts):
    values = {"key": ("a",), "n": n, "policies": {}, "releases": lambda kind: 1, "images": None, "encode": None}
    return Context(**{**values, **facts})


def of(leaves, declared, policy=None, norm=2, **facts):
    return bounded(
        leaves, "A.x", declared, policy or Policy(epsilon=1.0, sensitivity="clip:3"), context_of(**facts), norm
    )


LEAVES = (torch.full((2, 3), 4.0), torch.full((5,), -1.0))  # seven numbers in two rows and a vector: 11 in all


def test_things_that_move_together():
    assert (joint(9), joint(9, 2), joint(9, 1)) == (3.0, 3.0, 9.0)


@pytest.mark.parametrize(
    ("declared", "wanted"),
    [
        (declared_of("label_counts", "record", "all"), "all"),
        (declared_of("label_counts", "record"), "histogram"),
        (declared_of("synthetic_images"), "range"),
        (declared_of("prototypes"), "class"),
        (declared_of("embeddings", "record"), "record"),
        (declared_of("embeddings"), "all"),
        (declared_of(None), "all"),
    ],
)
def test_how_a_release_depends_on_records(declared, wanted):
    assert dependence(declared) == wanted


@pytest.mark.parametrize(("relation", "swing"), [("replace-one", 2.0), ("zero-out", 1.0)])
@pytest.mark.parametrize("norm", [2, 1])
def test_rows_of_records_are_clipped_and_move_in_every_view(relation, swing, norm):
    """Two tensors hold one record's rows, up to 3 records of a person: 6 rows of C = 3 move at a time."""
    policy = Policy(epsilon=1.0, sensitivity="clip:3", relation=relation)
    leaves, bounds, how = of(list(LEAVES), declared_of(unit="record"), policy, norm, most=3)
    moved = math.sqrt(6) if norm == 2 else 6.0
    assert bounds == pytest.approx([swing * 3 * moved] * 2)
    assert how == Bounding(relation, 3.0, "given the encoder")
    assert how.guaranteed
    sizes = [leaf.abs().sum(-1) if norm == 1 else leaf.square().sum(-1).sqrt() for leaf in leaves]
    assert sizes[0].tolist() == pytest.approx([3.0, 3.0])
    assert float(sizes[1]) == pytest.approx(3.0 if norm == 1 else math.sqrt(5))
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in LEAVES]


def test_records_of_persons_are_said_to_be():
    policy = Policy(epsilon=1.0, sensitivity="clip:3", unit="person")
    _, bounds, how = of(list(LEAVES), declared_of(unit="record"), policy, most=2)
    assert bounds == pytest.approx([2 * 3 * 2.0] * 2)
    assert how.condition == f"given the encoder; {sensitivity.of_persons(2)}"
    _, _, how = of(list(LEAVES), declared_of(), policy, most=2)
    assert how == Bounding("replace-one", 3.0, sensitivity.of_persons(2))
    _, _, how = of(list(LEAVES), declared_of("synthetic_images"), policy, most=2)
    assert how == Bounding("replace-one", None, sensitivity.of_persons(2))


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_what_depends_on_all_records_moves_every_row_across_its_ball(relation):
    """Three rows in all, from C to -C, whatever the relation is."""
    policy = Policy(epsilon=1.0, sensitivity="clip:3", relation=relation)
    leaves, bounds, how = of(list(LEAVES), declared_of(), policy, most=4)
    assert bounds == pytest.approx([6 * math.sqrt(3)] * 2)
    assert how == Bounding(relation, 3.0, None)
    assert leaves[0].norm(dim=1).tolist() == pytest.approx([3.0, 3.0])
    assert of(list(LEAVES), declared_of(), norm=1)[1] == pytest.approx([18.0] * 2)


def test_pixels_move_across_their_range():
    """Eleven pixels, each by 2; 4 is clamped to 1, and -1 stays."""
    leaves, bounds, how = of(list(LEAVES), declared_of("synthetic_images"))
    assert bounds == pytest.approx([2 * math.sqrt(11)] * 2)
    assert of(list(LEAVES), declared_of("synthetic_images"), norm=1)[1] == [22.0, 22.0]
    assert (leaves[0].unique().tolist(), leaves[1].unique().tolist()) == ([1.0], [-1.0])
    assert how == Bounding("replace-one", None, None)


@pytest.mark.parametrize(
    ("relation", "norm", "wanted"),
    [("replace-one", 2, math.sqrt(2)), ("replace-one", 1, 2.0), ("zero-out", 2, 1.0), ("zero-out", 1, 1.0)],
)
def test_a_record_leaves_one_count_for_another(relation, norm, wanted):
    """Two records of a person count twice. All records may be counted, and not one more."""
    policy = Policy(epsilon=1.0, relation=relation)
    counts = [torch.tensor([3.0, 0.0]), torch.tensor([6.0, 1.0])]
    leaves, bounds, how = of(counts, declared_of("label_counts"), policy, norm, most=2)
    assert bounds == pytest.approx([2 * wanted] * 2)
    assert [leaf.tolist() for leaf in leaves] == [[3.0, 0.0], [6.0, 1.0]]
    assert how == Bounding(relation, None, None)
    with pytest.raises(PrivacyError, match="counts 10 labels, but the client has 9 records"):
        of(counts, declared_of("label_counts"), policy, norm, n=9)


def test_other_counts_may_all_change():
    """Of four counts that are not of labels a record may change each by 1; of none it changes one."""
    counts = [torch.tensor([30.0, 0.0]), torch.tensor([60.0, 1.0])]
    assert of(counts, declared_of("logits", depends="histogram"))[1] == [2.0, 2.0]
    assert of(counts, declared_of("logits", depends="histogram"), norm=1)[1] == [4.0, 4.0]
    assert of([torch.zeros(0)], declared_of("logits", depends="histogram"))[1] == [1.0]


@pytest.mark.parametrize("wrong", [0.5, -1.0])
def test_what_counts_nothing_is_refused(wrong):
    """One wrong number among many, in one tensor of two."""
    with pytest.raises(PrivacyError, match="not counts"):
        of([torch.tensor([1.0, wrong]), torch.zeros(2)], declared_of("label_counts"))


class Means:
    """Class means of 5 and 1 records, clipped to 3, of one table."""

    leaves = (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))

    def __init__(self, C=3.0):
        self.means = {digest_of(leaf): (C, n) for leaf, n in zip(self.leaves, (5, 1), strict=True)}
        self.tables = {digest_of(leaf): 1 for leaf in self.leaves}

    def bounds(self, leaves=None, policy=None, norm=2):
        leaves = list(self.leaves) if leaves is None else leaves
        return of(leaves, declared_of("prototypes"), policy, norm, means=self.means, tables=self.tables)


@pytest.mark.parametrize(("relation", "swing"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_a_record_moves_two_class_means(relation, swing):
    """By C / (N - 1) for each unit of its swing: 3/4, and 3 for the class of one record."""
    policy = Policy(epsilon=1.0, sensitivity="clip:3", relation=relation)
    leaves, bounds, how = Means().bounds(policy=policy)
    assert bounds == pytest.approx([math.sqrt(2) * swing * 3 / 4, math.sqrt(2) * swing * 3])
    assert Means().bounds(policy=policy, norm=1)[1] == pytest.approx([2 * swing * 3 / 4, 2 * swing * 3])
    assert how == Bounding(relation, 3.0, "given the classes and their counts")
    assert [leaf.tolist() for leaf in leaves] == [[1.0, 2.0], [3.0, 4.0]]


def test_class_means_of_several_tables_move_together():
    """Two tables by their number, or one that was sent twice; in both a record moves sqrt(2) times as much."""
    one, other = Means.leaves
    base = Means().bounds()[1]
    two = Means()
    two.tables[digest_of(other)] = 2
    assert two.bounds()[1] == pytest.approx([math.sqrt(2) * bound for bound in base])
    assert two.bounds(norm=1)[1] == pytest.approx([2 * bound for bound in Means().bounds(norm=1)[1]])
    again = Means().bounds([one, other, one])[1]
    assert again == pytest.approx([math.sqrt(2) * base[0], math.sqrt(2) * base[1], math.sqrt(2) * base[0]])
    unknown = Means()
    unknown.tables = {digest_of(one): 1}
    assert unknown.bounds()[1] == pytest.approx(two.bounds()[1]), "one that nobody numbered is another table"
    assert Means().bounds([])[1] == []


def test_class_means_that_were_made_otherwise_are_refused():
    with pytest.raises(NotApplicable, match=r"client\.class_means"):
        Means().bounds([torch.tensor([9.0, 9.0])])
    with pytest.raises(PrivacyError, match=r"clipped to 2\.0, but the policy says 3\.0"):
        Means(2.0).bounds()
    with pytest.raises(NotApplicable, match="not bounded for all records of a person"):
        Means().bounds(policy=Policy(epsilon=1.0, sensitivity="clip:3", unit="person"))


@pytest.mark.parametrize("norm", [2, 1])
def test_longer_rows_alone_are_scaled_down(norm):
    """(3, 4) is 5 or 7 long. At exactly that C it stays; so does what is shorter."""
    long = 5.0 if norm == 2 else 7.0
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0], [0.0, 0.0]])
    assert clip_rows(rows, long, norm).tolist() == [
        pytest.approx(row) for row in ([3.0, 4.0], [0.3, 0.4], [3.0, 4.0], [0.0, 0.0])
    ]
    assert clip_rows(rows[2], long, norm).tolist() == pytest.approx([3.0, 4.0]), "a vector is one row"
    cube = clip_rows(rows.reshape(2, 2, 2), long, norm)
    assert cube.shape == (2, 2, 2)
    assert cube[0].flatten().norm(norm) <= long * (1 + 1e-6)
    assert clip_rows(rows[2], long).norm() == pytest.approx(long if norm == 2 else 7.0)
    empty = torch.zeros(0, 2)
    assert clip_rows(empty, 1.0, norm) is not empty
    assert clip_rows(empty, 1.0, norm).shape == (0, 2)
    assert clip_rows(torch.zeros(0), 1.0, norm).shape == (0,)
    assert clip_rows(torch.zeros(2, 0), 1.0, norm).shape == (2, 0)


def test_rows_are_counted_by_the_first_of_several_dimensions():
    assert [row_count(t) for t in (torch.zeros(4), torch.zeros(4, 1), torch.zeros(3, 2, 2), torch.tensor(1.0))] == [
        1, 4, 3, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("samples", [3, 256, 300])
def test_the_largest_change_by_edits_of_single_pixels(samples):
    """The same draws by hand, one edit at a time: at most 256 are drawn together."""
    images = torch.rand(4, 2, 3, 5, generator=torch.Generator().manual_seed(1)) * 2 - 1
    weights = torch.arange(30.0).reshape(2, 3, 5)

    def encode(x):
        return torch.stack([(x * weights).sum((1, 2, 3)), x[:, 0].sum((1, 2))], 1)

    rng = noise_generator(("k", 3), "random-pixel", device=images.device)
    largest = 0.0
    for count in [256] * (samples // 256) + [samples % 256] * (samples % 256 > 0):
        index, row, column = (torch.randint(high, (count,), generator=rng).tolist() for high in (4, 3, 5))
        values = torch.rand(count, 2, generator=rng) * 2 - 1
        for i, r, c, value in zip(index, row, column, values, strict=True):
            by = value - images[i, :, r, c]
            change = math.hypot(float((by * weights[:, r, c]).sum()), float(by[0]))
            largest = max(largest, change)
    assert random_pixel_sensitivity(images, encode, samples, ("k", 3)) == pytest.approx(largest, rel=1e-4)


def test_edits_that_change_nothing_or_have_no_pixel_are_refused():
    with pytest.raises(PrivacyError, match="no sampled edit changed"):
        random_pixel_sensitivity(torch.zeros(2, 1, 2, 2), lambda x: torch.zeros(len(x), 1), 4, ("k",))
    with pytest.raises(PrivacyError, match="not images"):
        random_pixel_sensitivity(torch.zeros(2, 4), lambda x: x, 4, ("k",))


def test_the_heuristic_of_edited_pixels_is_no_guarantee(monkeypatch):
    """Embeddings go through the encoder, logits through the whole model, if that is assumed."""
    asked = []

    def largest(images, output, samples, key):
        asked.append((images, output, samples, key))
        return 0.7

    monkeypatch.setattr(sensitivity, "random_pixel_sensitivity", largest)
    facts = {"images": lambda: "images", "encode": "encode", "predict": "predict"}
    policy = Policy(epsilon=1.0, sensitivity="random-pixel:9")
    leaves, bounds, how = of(list(LEAVES), declared_of(unit="record"), policy, **facts)
    assert [leaf is mine for leaf, mine in zip(leaves, LEAVES, strict=True)] == [True, True]
    assert bounds == [0.7, 0.7]
    words = "random-pixel edits bound no neighbouring data set"
    assert how == Bounding("replace-one", None, words, guaranteed=False)
    assumed = policy.model_copy(update={"assume": "logits-of-records"})
    _, _, how = of(list(LEAVES), declared_of("logits"), assumed, **facts)
    assert how.condition == f"counted as if computed on the client's records; {words}"
    assert asked == [("images", output, 9, ("a", "A.x")) for output in ("encode", "predict")]
    for declared, given in (
        (declared_of(), policy), (declared_of("logits", "record"), policy), (declared_of("z", "record"), assumed),
    ):  # fmt: skip
        with pytest.raises(NotApplicable, match="not applicable"):
            of(list(LEAVES), declared, given, **facts)
