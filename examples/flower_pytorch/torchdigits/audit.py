"""torchdigits: what an auditor has to know of it. The app does not import this."""

from fedaudit.flower import Records, served
from torchdigits import task


class Digits(Records):
    classes = 10

    def members(self, partition, partitions):
        return task.load_data(partition, partitions)[0]

    def nonmembers(self, partition, partitions):
        return task.load_data(partition, partitions)[1]

    def auxiliary(self):
        return tuple(part[: task.SPARE] for part in task.shuffled())

    def model(self):
        return task.Net()

    def serving(self, x, y):
        return served("torchdigits.task:load_data", ((x, y), (x, y)))
