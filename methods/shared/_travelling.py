"""The part of a model that travels: what training changes. Parameters that are not trained stay where they are.

A model with `requires_grad = False` on some parameters (a base under adapters, for example) has the same values there
for everybody: the harness sees to it. They are a public download, once and before the run, and no part of its traffic.
`send = "all"` sends them in every message, as an implementation does that averages whole state dicts.
"""

from __future__ import annotations

from typing import Literal

from fedaudit import Method, Part, trained


class SendsTrained(Method):
    send: Literal["trained", "all"] = "trained"  # what travels: trained parameters and buffers, or all parameters

    @property
    def part(self) -> Part | None:
        """Return the part of a model that travels; None stands for the whole model."""
        return None if self.send == "all" else trained
