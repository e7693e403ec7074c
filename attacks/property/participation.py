"""Client-level membership: whether a client's records went into the published model at all, after Kandpal et al., "User
Inference Attacks on Large Language Models", arXiv 2310.09266.

    score = mean over the records that the attacker holds of the client of log p(y | x, theta) - log p(y | x, ref)

theta is the published model that all clients made, ref one of the same architecture, trained on the auxiliary set: a
client whose records are easy is easy for both. The attacker holds the candidates of the client: if it took part, half
of them were trained on; if it was never asked, none. The server asks clients itself, and has nothing to find out.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.attack.claims import TookPart
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._models import logits_of
from fedaudit.attacks.shared._surrogate import taught
from fedaudit.registry import register_attack

ASKERS = ("server", "active-server")


@register_attack("participation")
class Participation(Attack):
    steps: int = Field(500, ge=1)  # of the reference model's training

    def cannot(self, scene: Scene) -> str | None:
        if scene.view.threat.name in ASKERS:
            return f"not attacked by this: the {scene.view.threat} asks clients itself, and knows who took part"
        if scene.of_all() is None:
            return "not visible: no model that all clients made is published"
        return None

    def run(self, scene: Scene) -> TookPart:
        found = scene.of_all()
        assert found is not None  # cannot() has looked
        theta, arch = found
        likelihood = of_labels(theta, scene.x, scene.y)
        if len(scene.auxiliary[1]):
            likelihood -= of_labels(taught(scene, arch, *scene.auxiliary, self.steps), scene.x, scene.y)
        return TookPart(float(likelihood.mean()))


def of_labels(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return log p(y | x) of each record."""
    return -cross_entropy(logits_of(model, x), y, reduction="none")
