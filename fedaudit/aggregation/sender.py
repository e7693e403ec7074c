"""The sender of a reply that enters a sum, by what everybody knows of it.

A reply that cannot be added up as it is (a part of a model, the means of a few classes) is brought into a form that all
clients share: `Method.summand`. That happens where the reply is: on the client if the server may learn sums only, and
on the server otherwise. So the method is told public facts alone, which both have.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedaudit.shape import Shape


@dataclass(frozen=True)
class Sender:
    """Client k of a round, and the federation that it is in."""

    k: int
    t: int  # the round
    archs: tuple[str, ...]  # of all clients' models
    shape: Shape  # of the records
    classes: int

    @property
    def arch(self) -> str:
        """Return the architecture of this client's model."""
        return self.archs[self.k]
