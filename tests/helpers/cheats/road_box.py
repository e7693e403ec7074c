"""A module of its own in which methods of `roads` leave what they saw."""

from __future__ import annotations

from array import array
from collections import deque

box: list[object] = []
queue: deque[float] = deque()
numbers = array("d")
