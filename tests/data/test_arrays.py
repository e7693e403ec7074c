"""Whose record each one is: the column `person` of every reader of users' own data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit.data import load
from fedaudit.data.readers import own_function
from fedaudit.data.readers.arrays import Arrays, dataset_of, one_in_five
from fedaudit.data.readers.folder import read_folder
from fedaudit.errors import DataError

X = np.arange(10 * 4, dtype=np.float32).reshape(10, 4)
Y = np.arange(10) % 2
WHO = np.array(["eve", "ann", "eve", "bob", "ann", "eve", "bob", "cy", "cy", "ann"])  # numbered as they are sorted


def test_arrays_of_a_function_say_it():
    d = dataset_of("own", Arrays(X, Y, X[:2], Y[:2], person=WHO))
    assert d.person.tolist() == [3, 0, 3, 1, 0, 3, 1, 2, 2, 0]
    assert dataset_of("own", Arrays(X, Y)).person is None


def test_records_that_become_the_test_set_leave_with_their_persons():
    """One in five of each class is for the test: records 4 and 5."""
    d = dataset_of("own", Arrays(X, Y, person=WHO))
    left = np.isin(X[:, 0], d.x[:, 0].numpy())
    assert (~left).sum() == 2
    assert d.person.tolist() == np.unique(WHO, return_inverse=True)[1][left].tolist()


def test_a_column_of_another_length_is_refused():
    with pytest.raises(DataError, match=r"array person is .* one whole number or string for each of the 10 records"):
        dataset_of("own", Arrays(X, Y, person=WHO[:9]))


def test_an_archive_says_it(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y, test_x=X[:2], test_y=Y[:2], person=np.arange(10) // 3)
    assert load(f"npz:{tmp_path / 'a.npz'}").person.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_it_counts_for_the_digest():
    one, other, none = (dataset_of("own", Arrays(X, Y, person=who)) for who in (WHO, WHO[::-1], None))
    assert len({own_function.digest(d) for d in (one, other, none)}) == 3


def test_a_folder_says_it_in_a_table(tmp_path):
    from PIL import Image

    for part, names in (("train", "abc"), ("test", "d")):
        for kind in ("cat", "dog"):
            for name in names:
                path = tmp_path / part / kind / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((4, 4), ord(name), np.uint8)).save(path)
    assert read_folder("mine", tmp_path, None).person is None
    whose = {"cat/a": "eve", "cat/b": "ann", "cat/c": "eve", "dog/a": "ann", "dog/b": "ann", "dog/c": "bob"}
    table = tmp_path / "persons.csv"
    table.write_text("".join(f"train/{file}.png,{who}\n" for file, who in whose.items()))
    found = read_folder("mine", tmp_path, None).person.tolist()
    groups = [list(whose.values())[i] for i in range(6)]
    assert [found[i] == found[j] for i in range(6) for j in range(6)] == [a == b for a in groups for b in groups]
    table.write_text("train/cat/a.png,eve\n")
    with pytest.raises(DataError, match=r"does not say whose image train/cat/b.png is \(5 are missing\)"):
        read_folder("mine", tmp_path, None)


def test_a_column_of_hugging_face_says_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {"a": X[:, 0], "b": X[:, 1], "label": Y, "person": WHO, "house": [f"h{i % 2}" for i in range(10)]}
    made = datasets.Dataset.from_dict(columns)
    for name, part in (("plain", made.remove_columns("house")), ("both", made.remove_columns("person"))):
        datasets.DatasetDict(train=part, test=part.select(range(4))).save_to_disk(str(tmp_path / name))
    d = load(f"hf:{tmp_path / 'plain'}")
    assert (d.x.shape[1], d.person.tolist()) == (2, [3, 0, 3, 1, 0, 3, 1, 2, 2, 0])
    assert load(f"hf:{tmp_path / 'both'}?person=house").person.tolist() == [i % 2 for i in range(10)]
    with pytest.raises(DataError, match=r"has no column 'hous'. Did you mean 'house'"):
        load(f"hf:{tmp_path / 'both'}?person=hous")


# --- everything at once ------------------------------------------------------------------------------------------


def test_a_whole_data_set_by_hand():
    """Eleven records of two domains and three classes; records 2 and 7 of each group are the test set."""
    y = np.array([2, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0])
    domain = np.array(["sea", "sea", "sea", "land", "sea", "sea", "sea", "land", "sea", "sea", "sea"])
    x = np.arange(44, dtype=np.float64).reshape(11, 4) / 7
    person = np.array([9, 5, 5, 9, 9, 9, 7, 7, 7, 7, 7])
    found = dataset_of("mine", Arrays(x, y, domain=domain, person=person, class_names=["a", "b", "c"]))
    test = [4, 10]  # the third and the eighth of class 0 in the sea
    kept = [i for i in range(11) if i not in test]
    np.testing.assert_allclose(found.x.numpy(), x[kept].astype(np.float32))
    np.testing.assert_allclose(found.test_x.numpy(), x[test].astype(np.float32))
    assert (found.y.tolist(), found.test_y.tolist()) == (y[kept].tolist(), [0, 0])
    assert (found.name, found.class_names, found.domain_names) == ("mine", ("a", "b", "c"), ("land", "sea"))
    assert found.domain.tolist() == [int(domain[i] == "sea") for i in kept]
    assert found.test_domain.tolist() == [1, 1]
    assert found.person.tolist() == [{5: 0, 7: 1, 9: 2}[person[i]] for i in kept]


def test_domains_of_the_test_set_are_numbered_as_those_of_training():
    """A test record of a domain that nobody trains on leaves the test set without domains."""
    x, y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    for of_test, wanted in ((["c", "a", "b"], [2, 0, 1]), (["a", "a", "d"], None)):
        given = Arrays(x, y, x[:3], y[:3], domain=["b", "c", "a", "b"], test_domain=of_test)
        found = dataset_of("mine", given)
        assert found.domain.tolist() == [1, 2, 0, 1]
        assert (None if found.test_domain is None else found.test_domain.tolist()) == wanted


@pytest.mark.parametrize(
    ("low", "high", "said"), [(-0.1, 0.9, "-0.1 to 0.9"), (0.2, 1.1, "0.2 to 1.1"), (0.0, 1.0, "")]
)
def test_floats_of_images_lie_from_0_to_1(low, high, said):
    x = np.full((2, 3, 3), 0.5)
    x[0, 0, 0], x[1, 2, 1] = low, high
    if said:
        with pytest.raises(DataError, match=f"floats from {said}; they have to lie from 0 to 1"):
            dataset_of("mine", Arrays(x, [0, 1], x, [0, 1]))
    else:
        found = dataset_of("mine", Arrays(x, [0, 1], x, [0, 1])).x
        assert found.shape == (2, 1, 3, 3)
        assert (found[0, 0, 0, 0], found[1, 0, 2, 1], found[0, 0, 1, 1]) == (0, 255, 128)


def test_tensors_are_taken_with_their_gradients_left_behind():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    found = dataset_of("mine", Arrays(x, torch.tensor([0, 1]), x, torch.tensor([1, 0])))
    assert (found.x.tolist(), found.x.requires_grad) == ([[1.0, 2.0], [3.0, 4.0]], False)
    assert (found.y.tolist(), found.test_y.tolist()) == ([0, 1], [1, 0])


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 5, 6), (2, 1, 5, 6)), ((2, 5, 6, 3), (2, 3, 5, 6)), ((2, 3, 5, 6), (2, 3, 5, 6)),
                        ((2, 1, 5, 6), (2, 1, 5, 6)), ((2, 5, 6, 1), (2, 1, 5, 6))]
)  # fmt: skip
def test_the_axis_of_channels_becomes_the_second(shape, axes):
    x = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    found = dataset_of("mine", Arrays(x, [0, 1], x, [0, 1])).x
    assert tuple(found.shape) == axes
    wanted = x[:, None] if len(shape) == 3 else x if shape[1] in (1, 3) else np.moveaxis(x, 3, 1)
    np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("labels", [[0, -1], [0, 2**31], [0.0, 1.0], [0, 1, 0]])
def test_labels_that_are_none(labels):
    x = np.zeros((2, 4))
    with pytest.raises(DataError, match="array y"):
        dataset_of("mine", Arrays(x, np.array(labels)))


def test_one_in_five_of_each_group():
    """Groups of 7, 2 and 3: records 3 of the first and of the last, by their order in the group."""
    group = np.array([0, 1, 0, 2, 0, 0, 2, 0, 1, 0, 2, 0])
    assert np.flatnonzero(one_in_five(group)).tolist() == [4, 10]
    assert np.flatnonzero(one_in_five(np.zeros(14, dtype=int))).tolist() == [2, 7, 12]
