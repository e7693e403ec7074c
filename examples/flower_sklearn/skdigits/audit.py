"""skdigits: what an auditor has to know of it. The app does not import this."""

import torch
from torch import nn

from fedaudit.flower import Records, served
from skdigits import task


class Logistic(nn.Module):
    """What the two arrays are, under the names that Flower gives to arrays in a list: 0 and 1."""

    def __init__(self):
        super().__init__()
        self.register_parameter("0", nn.Parameter(torch.zeros(task.CLASSES, task.FEATURES)))
        self.register_parameter("1", nn.Parameter(torch.zeros(task.CLASSES)))

    def forward(self, x):
        weight, bias = self.parameters()
        return x @ weight.T + bias


class Digits(Records):
    classes = task.CLASSES

    def members(self, partition, partitions):
        return task.load_data(partition, partitions)[0]

    def nonmembers(self, partition, partitions):
        return task.load_data(partition, partitions)[1]

    def auxiliary(self):
        return tuple(part[: task.SPARE] for part in task.shuffled())

    def model(self):
        return Logistic()

    def serving(self, x, y):
        rows = x.numpy().astype("float64"), y.numpy()
        return served("skdigits.task:load_data", (rows, rows))
