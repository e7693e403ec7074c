"""A data set of somebody's own that holds each record ten times: `tenfold:records`."""

from __future__ import annotations

import dataclasses

import torch

from fedaudit.data import load


def records():
    digits = load("digits", ".data")
    index = torch.arange(60).repeat_interleave(10)
    return dataclasses.replace(digits, name="tenfold", x=digits.x[index], y=digits.y[index])


def of_persons():
    """Three records in a row are of one person; each record is there once."""
    digits = load("digits", ".data")
    n = 600
    return dataclasses.replace(
        digits, name="of_persons", x=digits.x[:n], y=digits.y[:n], person=torch.arange(n).div(3, rounding_mode="floor")
    )
