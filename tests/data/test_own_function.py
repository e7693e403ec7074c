"""Data of somebody's own: functions that give arrays, and what is said of those that do not."""

from __future__ import annotations

import sys

import mine
import numpy as np
import pytest
import torch

from fedaudit.data import Arrays, load
from fedaudit.data.readers.arrays import dataset_of
from fedaudit.data.transfer import fitted
from fedaudit.errors import DataError, SettingError
from fedaudit.shape import Shape

X, Y = np.random.default_rng(0).random((10, 4), dtype=np.float32), np.arange(10) % 2
IDS = np.arange(40).reshape(10, 4) % 7


@pytest.fixture
def given(monkeypatch):
    """`given(value)`: the data set of a function that gives it."""
    from fedaudit.data import datasets

    def make(value):
        module = type(sys)("given_data")
        module.data = (lambda: value) if not callable(value) else value
        monkeypatch.setitem(sys.modules, "given_data", module)
        datasets._load.cache_clear()
        return load("given_data:data")

    return make


@pytest.mark.parametrize(
    "value",
    [
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        Arrays(X, Y),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (X.tolist(), Y.tolist()),
    ],
)
def test_arrays_come_in_several_forms(given, value):
    data = given(value)
    assert (data.name, data.shape, data.classes) == ("given_data:data", Shape((4,)), 2)
    assert (data.x.dtype, len(data.x), len(data.test_x)) == (torch.float32, 8, 2)  # one in five of each class
    test = [4, 5]  # the third of each class
    torch.testing.assert_close(data.test_x, torch.from_numpy(X[test]))
    torch.testing.assert_close(data.x, torch.from_numpy(np.delete(X, test, 0)))


def test_a_test_set_of_ones_own(given):
    data = given((X, Y, X[:3] + 1, Y[:3]))
    assert (len(data.x), len(data.test_x)) == (10, 3)
    torch.testing.assert_close(data.test_x, torch.from_numpy(X[:3] + 1))


def test_texts_know_their_vocabulary(given):
    assert given((IDS, Y)).shape == Shape((4,), tokens=7)
    data = given(Arrays(IDS, Y, vocabulary=50, class_names=("no", "yes")))
    assert (data.shape, data.class_names, data.x.dtype) == (Shape((4,), tokens=50), ("no", "yes"), torch.int64)


def test_images_are_images_still(given):
    data = given((np.full((10, 6, 5), 0.5), Y))
    assert (data.shape, data.x.dtype) == (Shape((1, 6, 5)), torch.uint8)


def test_domains_are_kept(given):
    where = np.array(["south", "north"] * 5)
    data = given(Arrays(X, Y, X[:2], Y[:2], domain=where, test_domain=["north", "south"]))
    assert data.domain_names == ("north", "south")
    assert (data.domain.tolist(), data.test_domain.tolist()) == ([1, 0] * 5, [0, 1])
    assert given(Arrays(X, Y, X[:2], Y[:2], domain=where, test_domain=["north", "east"])).test_domain is None


def test_what_a_function_draws_it_draws_again():
    from fedaudit.data import datasets

    first = load("mine:drawn")
    datasets._load.cache_clear()
    np.random.rand(3)
    again = load("mine:drawn")
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)


def test_it_is_told_where_data_lie(given, tmp_path):
    def data(data_dir):
        return X, np.full(10, 0) + (data_dir.name == ".data") * Y

    assert given(data).classes == 2


def broken():
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, r"returned nothing, not arrays\. It has to return \(x, y\)"),
        (X, "returned a ndarray, not arrays"),
        ((X, Y, X), "returned 3 values, not arrays"),
        ((X, None), "returned 2 values, not arrays"),
        ({"x": X}, "returned no y"),
        ({"x": X, "y": Y, "tets_x": X}, "returned an unknown array 'tets_x'. Did you mean 'test_x'"),
        ((X, Y + 1), r"the labels in y run from 1 to 2 .*0, 1, \.\.\. without a gap"),
        ((X, Y[:9]), r"array y is int64 of shape \(9,\)"),
        ((X, Y / 2), "array y is float64"),
        ((X, ["a"] * 10), "array y is <U1"),
        ((X * np.nan, Y), "x holds NaN or infinity in columns 0, 1, 2, 3; fill or drop what is missing"),
        ((X[:, 0], Y), r"array x is float32 of shape \(10,\)"),
        ((np.array([[1, 2], [3]], dtype=object), Y), "array x holds Python objects .* pad texts with 0"),
        (([[1, 2], [3]], [0, 1]), "x is not an array .*equally long"),
        ((IDS - 1, Y), "x has token ids from -1 to 5"),
        (Arrays(IDS, Y, vocabulary=5), "x has token ids from 0 to 6, but the vocabulary has 5"),
        (Arrays(X, Y, vocabulary=5), "a vocabulary of 5 was given, but x holds"),
        ((X, Y, X[:, :3], Y), "test_x has rows of 3 numbers, x rows of 4 numbers"),
        ((X, Y, IDS, Y), "test_x is torch.int64, x torch.float32; give records of one kind"),
        (Arrays(X, Y, test_x=X), "there is no array test_y"),
        (Arrays(X, Y, domain=Y[:3]), "array domain"),
        (Arrays(X, Y, class_names=("only",)), "y has labels from 0 to 1, but there are 1 classes"),
        (broken, r"fails while it is read: KeyError: 'no such column' \(.*test_own_function\.py, line \d+\)"),
    ],
)  # fmt: skip
def test_what_is_off_is_said(given, value, says):
    with pytest.raises(DataError, match=says):
        given(value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine:nothing", "cannot be imported: .*Write package.module:function"),
        ("mine:WORDS", "is a int. Name a function that returns arrays"),
    ],
)
def test_what_is_no_function_is_said(name, says):
    with pytest.raises((DataError, SettingError), match=says):
        load(name)


def test_rows_have_no_image_size():
    with pytest.raises(SettingError, match="rows of 30 numbers, which have no image_size"):
        load("mine:cancer", size=8)


def test_npz_files_hold_rows_and_texts_too(tmp_path):
    np.savez(tmp_path / "a.npz", x=IDS, y=Y)
    assert load(f"npz:{tmp_path / 'a.npz'}").shape == Shape((4,), tokens=7)


def test_a_transfer_set_of_rows_has_their_shape():
    data, rng = dataset_of("mine", Arrays(X, Y)), torch.Generator()
    assert fitted(data, Shape((4,)), 0.5, rng).shape == (4, 4)
    with pytest.raises(SettingError, match="holds rows of 4 numbers, but the task has rows of 5 numbers"):
        fitted(data, Shape((5,)), 0.5, rng)
    with pytest.raises(SettingError, match="the task has images of 1 x 2 x 2"):
        fitted(data, Shape((1, 2, 2)), 0.5, rng)


def test_domains_share_out_rows():
    data = load("mine:by_domain")
    assert data.domain_names == ("north", "south")
    assert len(data.x) + len(data.test_x) == len(mine.cancer()[1])
