"""Data sets that are off are refused at once, with the array that is."""

from __future__ import annotations

import pytest
import torch

from fedaudit.data.records import Dataset, to_float, to_input, to_uint8
from fedaudit.errors import DataError

X = torch.zeros(6, 1, 2, 3, dtype=torch.uint8)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
ROWS = torch.ones(6, 4)
TEXT = torch.tensor([[0, 1, 7]] * 6)
NAN, INF = ROWS.clone(), ROWS.clone()
NAN[2, 3], INF[5, 1] = float("nan"), float("inf")


def made(**more):
    values = {"x": X, "y": Y, "test_x": X[:2], "test_y": Y[:2], "class_names": ("a", "b", "c"), **more}
    return Dataset("mine", **values)


def test_three_kinds_of_records():
    assert (tuple(made().shape), made().classes) == ((1, 2, 3), 3)
    assert tuple(made(x=ROWS, test_x=ROWS[:2]).shape) == (4,)
    text = made(x=TEXT, test_x=TEXT[:2], vocabulary=8)
    assert (tuple(text.shape), text.shape.tokens) == ((3,), 8)
    assert made().shape.tokens == 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"test_x": ROWS[:2]}, "test_x is torch.float32, x torch.uint8"),
        ({"y": Y.int()}, "y is torch.int32 of shape"),
        ({"y": Y[:5]}, r"has to be int64 of shape \(6,\)"),
        ({"test_y": Y[:1]}, "test_y is torch.int64"),
        ({"x": X[:0], "y": Y[:0]}, "x holds no records"),
        ({"y": Y + 1}, "labels from 1 to 3, but there are 3 classes"),
        ({"y": Y - 1}, "labels from -1 to 1"),
        ({"test_x": X[:2, :, :, :2]}, "test_x has"),
        ({"x": X[0], "y": Y[:1]}, "has to be uint8"),
        ({"x": X.int()}, "test_x is torch.uint8, x torch.int32"),
        ({"x": NAN, "test_x": ROWS[:2]}, "x holds NaN or infinity in columns 3"),
        ({"x": INF, "test_x": ROWS[:2]}, "in columns 1"),
        ({"x": TEXT, "test_x": TEXT[:2], "vocabulary": 7}, "token ids from 0 to 7, but the vocabulary has 7"),
        ({"x": TEXT - 1, "test_x": TEXT[:2], "vocabulary": 9}, "token ids from -1 to 6"),
        ({"domain": Y, "domain_names": ("p", "q")}, "domain has to be int64"),
        ({"domain": Y - 1, "domain_names": ("p", "q", "r")}, "domain has to be int64"),
        ({"domain": Y.int(), "domain_names": ("p", "q", "r")}, "domain has to be int64"),
        ({"test_domain": Y[:1], "domain_names": ("p", "q", "r")}, "test_domain has to be int64"),
        ({"person": Y[:3]}, "person has to be int64"),
        ({"person": Y.int()}, "person has to be int64"),
    ],
)
def test_what_is_off_is_named(more, says):
    with pytest.raises(DataError, match=says):
        made(**more)


def test_domains_and_persons_that_fit():
    kept = made(domain=Y, test_domain=Y[:2], domain_names=("p", "q", "r"), person=Y + 100)
    assert kept.person is not None
    assert int(kept.person.max()) == 102


def test_numbers_of_a_models_input():
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert to_float(pixels).tolist() == pytest.approx([-1.0, -0.6, 1.0])
    assert to_uint8(torch.tensor([-1.0, -0.6, 0.0, 1.0, 1.2, -9.0])).tolist() == [0, 51, 128, 255, 255, 0]
    assert to_input(pixels).dtype == torch.float32
    assert to_input(torch.tensor([0.25], dtype=torch.float64)).dtype == torch.float32
    assert to_input(TEXT) is TEXT


def test_records_that_are_no_texts_have_no_vocabulary():
    x, y = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1])
    assert Dataset("d", x, y, x, y, ("a", "b")).vocabulary == 0
