"""Records from a weight update. DLG (Zhu et al., NeurIPS 2019), iDLG (Zhao et al., 2020), cosine and total variation
(Geiping et al., NeurIPS 2020), and the closed form for a first linear layer (Phong et al., 2017).

An update is the model that the client was sent minus the one it sent back. Dummy images are trained to give the same
update, by simulating the client's own steps: plain SGD with its public batch size, epochs and learning rate.

- `dlg`: squared distance, L-BFGS, labels optimised too. `idlg`: as `dlg`, with labels inferred. `cosine`: one minus the
  cosine plus `tv` times the total variation, Adam on the gradient's sign, labels inferred.
- `closed`: the first layer has to be linear with a bias. Row i of its weight's update over entry i of its bias' update
  is then a weighted mean of the records that reach neuron i, and a record itself if it is the only one. Rows outside
  the range of pixels are not such a mean of one sign and are dropped. Of the rest, the ones with the largest bias
  update are taken, no two alike.

The papers leave these points open, and we chose. Labels of several records are inferred before images are matched,
from the last bias: its gradient is the mean of p - y, and p is taken as the model's mean on auxiliary images (for one
record: the entry below zero, as iDLG does). A class whose entry is below zero is there in any case, because p is above
zero. The order of the records in a client's epochs is not known; other orders are simulated. If a client has more than
`most` records, `most` images are asked for in one averaged step. This does not simulate what happened and recovers
little: 200 steps from one start are made for it. Else there are 2,000 steps, or as many as their operations allow
(`forecast` in _matching.py), and four starts, of which the one that matches the update best is kept. A search whose
loss no longer falls ends sooner. Settings `epochs`, `size` and `eta` are the method's E, B and eta if it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedaudit.attack.claims import Reconstructions
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.inversion._invert import stacks_on, starts
from fedaudit.attacks.inversion._matching import LEAST, Steps, Update, flat, forecast, match_cosine, simulated
from fedaudit.attacks.shared._models import records as records_of
from fedaudit.attacks.shared._view import in_chunks, received, uploaded
from fedaudit.progress import Watch, unwatched
from fedaudit.registry import find, register_attack
from fedaudit.shape import IMAGES, Kind
from fedaudit.training.fit import batches
from fedaudit.training.models import Net

CALL = 50  # steps of L-BFGS after which the loss is looked at
GAIN = 0.01  # share of the loss by which it has to fall in these
STARTS = 4  # of a search that simulates what happened
EXACT = 1e-7  # relative squared distance of updates below which a further restart cannot improve


@register_attack("gradient_match")
class GradientMatch(Attack):
    takes: ClassVar[frozenset[Kind]] = IMAGES
    form: Literal["cosine", "dlg", "idlg", "closed"] = "cosine"
    steps: int | None = Field(None, ge=1)  # of the optimiser, at most; None: as many as the forecast allows
    lr: float = Field(0.1, gt=0)  # of Adam
    tv: float = Field(1e-3, ge=0)  # cosine: weight of the total variation
    restarts: int | None = Field(None, ge=1)  # None: 4, or 1 if there are more records than images
    together: int = Field(16, ge=1)  # cosine, on a GPU: restarts, of all clients, that are descended at the same time
    most: int = Field(8, ge=1)  # images from one update
    uploads: int = Field(1, ge=1)  # the first so many that the transcript kept
    epochs: int | None = Field(None, ge=1)  # of the client's training
    size: int | None = Field(None, ge=1)  # of its batches
    eta: float | None = Field(None, gt=0)  # its learning rate
    records: int | None = Field(None, ge=1)  # how many it trained on; None: as uploaded, or estimated from the split

    def cannot(self, scene: Scene) -> str | None:
        updates = self._updates(scene)
        if not updates:
            return (
                f"the {scene.view.threat} does not see both the model that client {scene.target} was sent and the one "
                "that it sent back"
            )
        if self.form == "closed":
            if first_linear(updates[0][0], math.prod(scene.shape)) is None:
                return f"the first layer of client {scene.target}'s model is not linear with a bias; use another form"
        elif missing := [name for name, value in self._public(scene).items() if value is None]:
            return f"the method does not say its {', '.join(missing)}: set {', '.join(f'{m}=...' for m in missing)}"
        return None

    def at_once(self, scene: Scene) -> int:
        """Return how many clients are attacked at once.

        `dlg` and `idlg` go one after the other, because L-BFGS searches along a line of its own for each.
        """
        return self.together if self.form == "cosine" and stacks_on(scene.device) else 1

    def run(self, scene: Scene) -> Reconstructions:
        rng = scene.rng("gradient_match")
        images = []
        for model, update in self._updates(scene)[: self.uploads]:
            n = self.records or records_of(scene)
            if self.form == "closed":
                name = first_linear(model, math.prod(scene.shape))
                assert name is not None  # cannot() has looked
                found = closed_form(update, name, min(n, self.most))
                images.append(found.unflatten(1, scene.shape).float().clamp(-1, 1))
                continue
            steps = self._steps(scene, n, rng)
            count = min(n, self.most)
            labels = None if self.form == "dlg" else inferred(model, update, steps, count, scene.auxiliary[0])
            begin = starts(scene, count, rng)
            how = self._search(scene, model, n, steps) | {"tell": scene.tell}
            if self.form == "cosine":
                assert labels is not None
                how |= {"tv": self.tv, "lr": self.lr, "together": self.together, "trial": trial(how["iterations"])}
                images.append(match_cosine(model, update, steps, labels, begin, **how))
            else:
                images.append(match_lbfgs(model, update, steps, labels, scene.classes, begin, rng, **how))
        return Reconstructions(torch.cat(images))

    def _search(self, scene: Scene, model: Net, n: int, steps: Steps) -> dict[str, Any]:
        """Return how many steps and starts a search has."""
        simulates = n <= self.most
        iterations = self.steps or LEAST
        if self.steps is None and simulates:
            like = torch.zeros(n, *scene.shape, device=scene.device)
            iterations = forecast(model, like, scene.classes, steps)
        return {"iterations": iterations, "restarts": self.restarts or (STARTS if simulates else 1)}

    def _updates(self, scene: Scene) -> list[tuple[Net, Update]]:
        """Return the models that were sent, ready to be differentiated, and the update of each; oldest first."""
        found = []
        for _, (entry, after) in sorted(uploaded(scene, scene.target).items()):
            before = received(scene, entry)
            if before is None:
                continue
            now = dict(after.named_parameters())
            update = {name: (p - now[name]).detach() for name, p in before.named_parameters()}
            if any(bool(change.any()) for change in update.values()):
                found.append((before.train(), update))
        return found

    def _public(self, scene: Scene) -> dict[str, Any]:
        setting = scene.setting
        method = find(setting["method"]).make(setting["set"], setting["preset"])  # type: ignore[attr-defined]
        named = {"epochs": (self.epochs, "E"), "size": (self.size, "B"), "eta": (self.eta, "eta")}
        known = {key: own if own is not None else getattr(method, name, None) for key, (own, name) in named.items()}
        return {key: value if isinstance(value, int | float) else None for key, value in known.items()}

    def _steps(self, scene: Scene, n: int, rng: torch.Generator) -> Steps:
        public = self._public(scene)
        epochs, size, eta = int(public["epochs"]), int(public["size"]), float(public["eta"])
        if n <= self.most:
            return Steps([index for _ in range(epochs) for index in batches(n, size, rng)], eta)
        every = torch.arange(self.most, device=scene.device)
        return Steps([every], eta * epochs * math.ceil(n / size))


# --- labels -----------------------------------------------------------------------------------------------------------


def inferred(model: nn.Module, update: Update, steps: Steps, n: int, auxiliary: Tensor) -> Tensor:
    """Return labels of n records, from the last bias: its gradient is the mean of p - y."""
    name = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None][-1]
    gradient = update[f"{name}.bias"].double() / steps.length
    if n == 1:
        return gradient.argmin()[None]  # the only entry below zero
    was = model.training
    p = torch.full_like(gradient, 1 / len(gradient))
    if len(auxiliary):
        p = in_chunks(model.eval(), auxiliary).double().softmax(1).mean(0)
    model.train(was)
    counts = n * (p - gradient)
    held = torch.zeros_like(gradient)  # records that each class has at least
    held[gradient.argsort()[:n]] = 1
    held[gradient >= 0] = 0
    whole = torch.maximum(counts.floor(), held)
    for _ in range(2 * n):  # correct the number of labels until there are n
        if whole.sum() > n:
            whole[(counts - whole).masked_fill(whole <= held, math.inf).argmin()] -= 1
        elif whole.sum() < n:
            whole[(counts - whole).argmax()] += 1
    return torch.arange(len(whole), device=whole.device).repeat_interleave(whole.long())[:n]


# --- matching --------------------------------------------------------------------------------------------------------


def trial(iterations: int) -> int:
    """Return after how many steps only the best of several starts goes on; 0 if there are too few to choose by."""
    return iterations // 20 if iterations >= 2 * LEAST else 0


def match_lbfgs(
    model: nn.Module,
    update: Update,
    steps: Steps,
    labels: Tensor | None,
    classes: int,
    begin: Callable[[int], Tensor],
    rng: torch.Generator,
    *,
    iterations: int,
    restarts: int = 1,
    tell: Watch = unwatched,
) -> Tensor:
    """Return the images of DLG, or of iDLG if labels are given.

    They are computed in double precision, because L-BFGS depends on small differences.
    """
    model = model.double()
    wanted = flat(update).double()
    size = wanted.square().sum()
    best, least = None, math.inf
    for r in range(restarts):
        x = begin(r).double().requires_grad_()
        if labels is None:
            guess = torch.randn(len(x), classes, generator=rng, device=x.device, dtype=x.dtype).requires_grad_()
            free = [x, guess]
        else:
            guess, free = one_hot(labels, classes).to(x), [x]
        optimiser = torch.optim.LBFGS(
            free, max_iter=min(iterations, CALL), history_size=50, line_search_fn="strong_wolfe",
            tolerance_change=1e-16, tolerance_grad=1e-14,
        )  # fmt: skip

        def gap(x: Tensor = x, guess: Tensor = guess) -> Tensor:
            y = guess.softmax(1) if labels is None else guess
            return (flat(simulated(model, x, y, steps)) - wanted).square().sum() / size

        def closure(free: list[Tensor] = free, gap: Callable[[], Tensor] = gap) -> float:
            value = gap()
            for t, g in zip(free, torch.autograd.grad(value, free), strict=True):
                t.grad = g
            return float(value.detach())

        value = math.inf
        for done in range(0, iterations, CALL):
            tell(r + done / iterations, restarts, f"restart {r + 1} of {restarts}, step {done} of {iterations}")
            before = value
            optimiser.step(closure)
            value = float(gap().detach())
            if not value < (1 - GAIN) * before or value < EXACT:
                break
        if best is None or value < least:
            best, least = x.detach(), value
        if least < EXACT:
            break
    model.float()
    assert best is not None, "restarts is at least 1"
    return best.float().nan_to_num().clamp(-1, 1)


# --- the closed form --------------------------------------------------------------------------------------------------


def first_linear(model: nn.Module, pixels: int) -> str | None:
    """Return the first layer's name, if it is linear on the pixels and has a bias."""
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            linear = isinstance(module, nn.Linear) and module.in_features == pixels and module.bias is not None
            return name if linear else None
    return None


def closed_form(update: Update, name: str, n: int) -> Tensor:
    """Return up to n inputs of a linear layer, flat: update of the weight's row over update of the bias' entry."""
    weight, bias = update[f"{name}.weight"].double(), update[f"{name}.bias"].double()
    order = bias.abs().argsort(descending=True)
    order = order[bias[order].abs() > 0]
    rows = weight[order] / bias[order, None]
    within = (rows.abs() <= 1 + 1e-3).all(1)
    rows = rows[within] if bool(within.any()) else rows[:1].clamp(-1, 1)
    kept: list[Tensor] = []
    for row in rows:
        if len(kept) == n:
            break
        if all(bool((row - other).abs().max() > 1e-2) for other in kept):
            kept.append(row)
    return torch.stack(kept)
