"""Whose record each one is: the column `person` of every reader of users' own data."""

from __future__ import annotations

import numpy as np
import pytest

from fedaudit.data import load
from fedaudit.data.readers import own_function
from fedaudit.data.readers.arrays import Arrays, dataset_of
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
