"""Scores reconstructions: how near they come to a client's records, and whether guessing would have come as near.

Images are scored as pixels in [0, 1]. The claim decides what an image is compared with, and when it is identified:

- `rows`: it is compared with the record of its row (a release with one row per record keeps the order of
  world.members). It is identified if that record is the nearest of the client's N members. Chance is 1/N.
- `labels`: it is compared with the nearest member of its class. It is identified if the nearest of all members is of
  that class. Chance is the class's share of the members. Images of classes not held are left out and counted.
- neither: the members are assigned to the images so that the sum of squared errors is least; images beyond the number
  of members go without. Any image has a nearest member, so that says nothing: an image is identified if its nearest
  among the client's members and non-members is a member. Chance is the share of members, exactly, because that split is
  random. A record counts once, for the nearest of the images that are nearest to it: copies of one image are one draw.

Distances are Euclidean in pixels. `ratio` is the distance to the nearest member, divided by what it would be if the
members had been drawn anew among the client's members and non-members (geometric means). It is 1 if images come no
nearer to what was trained on than to what was not.

`cosine` is taken between features of a fixed reference: the registered `cnn`, seeded, trained on the auxiliary set.
Baselines have the freedom that the attack has: if it is matched to records, so are they. Intervals assume that images
are independent draws; those of MSE, PSNR, SSIM and cosine do not leave the values that these can have. An attack beats
the baselines

- in MSE, if the paired difference to each of them is above zero beyond its interval; if images are assigned, the
  difference to members drawn anew too, because images that come near to everything come near to members;
- in identification, if it is beyond chance and, unless images are assigned, finds more than each of them does.

Either is enough, each at 97.5 %, so that together they hold at 95 %.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedaudit.attack import pictures, shared_results
from fedaudit.attack.claims import Attacked, Reconstructions
from fedaudit.attack.similarity import DATA_RANGE, PSNR_LIMIT, mse, pixels, psnr, ssim, window_for
from fedaudit.errors import ContractError, DataError
from fedaudit.rng import generator, seeded
from fedaudit.runtime.attack_result import (
    Difference,
    OnlyOne,
    Rate,
    Ratio,
    ReconstructionFound,
    ReconstructionScores,
)
from fedaudit.runtime.world import World
from fedaudit.setting import ROUNDING
from fedaudit.stats import Estimate, clopper_pearson, mean_in_range, student_t
from fedaudit.training import models
from fedaudit.training.fit import adam, fit
from fedaudit.training.losses import ce
from fedaudit.wire.codec import digest_of

RANGES = {"mse": (0.0, DATA_RANGE**2), "psnr": (0.0, PSNR_LIMIT), "ssim": (-1.0, 1.0), "cosine": (-1.0, 1.0)}
MEANS = tuple(RANGES)
DECIDING = 0.975  # confidence of each of the two measures that decide
SHOWN = 10  # images in a picture
NEAR = 1e-6  # distances below this are copies; keeps the logarithm of a ratio finite
CHUNK = 512
REDRAWN = 20  # how often members are drawn anew

Scores = dict[str, np.ndarray]  # by measure: one value per image, NaN if it has none


def reconstruction(parts: Sequence[Attacked], world: World, folder: Path, name: str, seed: int) -> ReconstructionFound:
    """Return the scores of one attack on several clients. The picture goes to `folder`, which lies in RUN/pictures."""
    auxiliary = _auxiliary(world)
    reference = _reference(world, *auxiliary)
    clients = {part.client: _Client(part, world, auxiliary, reference, name) for part in parts}
    scored = {k: client.scores() for k, client in clients.items()}
    names = ["attack", *_BASELINES]
    joint = {what: _joined([scored[k][what] for k in scored]) for what in names}
    assigned = {client.rule for client in clients.values()} == {"assignment"}
    differences = {what: _difference(joint["attack"], joint[what], assigned) for what in _BASELINES}
    if assigned:
        differences["redrawn_members"] = Difference(mse=_mean(joint["attack"]["gain"], DECIDING), confidence=DECIDING)
    pooled = _estimates(joint["attack"])
    beaten = _beaten(joint["attack"], differences)
    chosen = _chosen(list(clients.values()))
    path = folder / f"{re.sub('[^A-Za-z0-9_.-]', '_', name)}.png"
    if chosen:
        titles = [f"class {label}" for label in chosen["label"].tolist()]
        pictures.draw({"original": chosen["originals"], "claimed": chosen["images"]}, path, titles=titles)
        pictures.save(path.with_suffix(".safetensors"), chosen)
    return ReconstructionFound(
        pooled=pooled,
        baselines={what: _estimates(joint[what]) for what in _BASELINES},
        client={str(k): _estimates(of["attack"]) for k, of in scored.items()},
        differences=differences,
        beats_baselines=bool(beaten),
        verdict=_verdict(pooled, beaten, differences),
        picture=path.relative_to(_run_of(folder)).as_posix() if chosen else None,
        matched_by=sorted({client.rule for client in clients.values()}),
        not_held=sum(client.not_held for client in clients.values()),
        unassigned=int(np.isnan(joint["attack"]["mse"]).sum()),
        data_range=DATA_RANGE,
        window=window_for(*world.shape[1:]),
    )


def _run_of(folder: Path) -> Path:
    for parent in (folder, *folder.parents):
        if parent.name == "pictures":
            return parent.parent
    return folder


def _auxiliary(world: World) -> tuple[Tensor, Tensor]:
    x, y = world._to_device(world.federation.auxiliary())
    if not len(y):
        raise DataError("Reconstructions are held against auxiliary images, and this run has none: set --aux above 0.")
    return x, y


_references: dict[str, nn.Module] = {}  # for the auxiliary sets seen last: all attacks on a run share one


# Settings under which a network is trained to the same bits: see `compute` in fedaudit.runtime.task.
CONDITIONS = ("threads", "deterministic", "onednn", "engine", *ROUNDING)


def _reference(world: World, x: Tensor, y: Tensor) -> nn.Module:
    """Return the network whose features the cosine uses: small, the same for every attack, and trained on no member.

    Cells of an audit that have the same auxiliary set train it once.
    """
    how = [str(getattr(world.setting, name)) for name in CONDITIONS]
    how += [*map(str, world.shape), str(world.classes), str(world.device), str(torch.get_default_dtype())]
    key = f"reference {digest_of([x, y, *how])}"
    if key not in _references:
        for oldest in list(_references)[:-7]:
            del _references[oldest]
        model = _trained_elsewhere(world, key)
        if model is None:
            model = _trained_reference(world, x, y)
            shared_results.for_others(key, save(model.state_dict()))
        _references[key] = model
    return _references[key]


def _built_reference(world: World) -> nn.Module:
    return models.build("cnn", shape=world.shape, classes=world.classes).to(world.device)


def _trained_elsewhere(world: World, key: str) -> nn.Module | None:
    """Return the network that another process left; None if there is none."""
    if (data := shared_results.from_others(key)) is None:
        return None
    with seeded("inversion", "reference", device=world.device):  # so that building it draws nothing from the attacks'
        model = _built_reference(world)
    try:
        model.load_state_dict(load(data))
    except (SafetensorError, RuntimeError):  # a damaged file, or not all of its tensors: it is trained again
        return None
    return model.eval()


def _trained_reference(world: World, x: Tensor, y: Tensor) -> nn.Module:
    with seeded("inversion", "reference", device=world.device):
        model = _built_reference(world)
        rng = generator("inversion", "reference", device=world.device)
        fit(model, ce, (x, y), opt=adam(1e-3), batch=32, steps=100, rng=rng)
    return model.eval()


# --- one client ---------------------------------------------------------------------------------------------------


@dataclass
class _Client:
    """The claims on one client, with the truth about it."""

    part: Attacked
    world: World
    auxiliary: tuple[Tensor, Tensor]
    reference: nn.Module
    name: str

    def __post_init__(self) -> None:
        claims: Reconstructions = self.part.claims
        self.members, self.y = self.world.members(self.part.client)
        self.images, rows, labels = claims.images.detach().to(self.members.device), claims.rows, claims.labels
        n = len(self.images)
        if self.images.shape != (n, *self.world.shape) or not n or not bool(torch.isfinite(self.images).all()):
            raise ContractError(
                f"{self.name} gave images of shape {tuple(self.images.shape)} for client {self.part.client}. Give "
                f"finite images, at least one, of shape (n, {', '.join(map(str, self.world.shape))})."
            )
        if rows is not None and labels is not None:
            raise ContractError(
                f"{self.name} gave both rows and labels. Give one of them: an image is one record's, or one class's."
            )
        self.rule = "row" if rows is not None else "class" if labels is not None else "assignment"
        self.not_held = 0
        self.given = self._index(rows, len(self.y), "rows") if rows is not None else None
        if labels is not None:
            self.given = self._index(labels, self.world.classes, "labels")
            held = (self.given[:, None] == self.y).any(1)
            self.not_held = int((~held).sum())
            self.images, self.given = self.images[held], self.given[held]

    def _index(self, index: Tensor, limit: int, what: str) -> Tensor:
        index = index.detach().to(self.members.device).long()
        if index.shape != (len(self.images),) or bool((index < 0).any() | (index >= limit).any()):
            raise ContractError(
                f"{self.name} gave {what} of shape {tuple(index.shape)} for {len(self.images)} images of client "
                f"{self.part.client}. Give one number from 0 to {limit - 1} for each image."
            )
        return index

    @cached_property
    def target(self) -> Tensor:
        """Return the member that each claimed image is compared with; -1 for none."""
        return self.matched(self.images)

    def matched(self, images: Tensor) -> Tensor:
        if self.rule == "row":
            assert self.given is not None
            return self.given
        if not len(images):
            return torch.zeros(0, dtype=torch.long, device=images.device)
        d = distances(images, self.members)
        if self.rule == "class":
            assert self.given is not None
            return d.masked_fill(self.given[:, None] != self.y, math.inf).argmin(1)
        from scipy.optimize import linear_sum_assignment

        target = torch.full((len(images),), -1, device=images.device)
        i, j = linear_sum_assignment(d.square().cpu().numpy())
        target[torch.from_numpy(i).to(target.device)] = torch.from_numpy(j).to(target.device)
        return target

    def scores(self) -> dict[str, Scores]:
        sets = {"attack": self.images, **{what: make(self) for what, make in _BASELINES.items()}}
        return {what: self._scored(images) for what, images in sets.items()}

    def _scored(self, images: Tensor) -> Scores:
        target = self.target if images is self.images else self.matched(images)
        scores = {measure: np.full(len(images), np.nan) for measure in MEANS}
        has = (target >= 0).nonzero()[:, 0]
        for index in has.split(CHUNK):
            a, b = images[index], self.members[target[index]]
            at = index.cpu().numpy()
            for measure, function in (("mse", mse), ("psnr", psnr), ("ssim", ssim)):
                scores[measure][at] = function(pixels(a), pixels(b)).cpu().numpy()
            scores["cosine"][at] = self._cosine(a, b).cpu().numpy()
        return {**scores, **self._identified(images, target)}

    @torch.no_grad()
    def _cosine(self, a: Tensor, b: Tensor) -> Tensor:
        features = self.reference.encode(torch.cat([a, b]).clamp(-1, 1)).double()  # type: ignore[operator]
        return nn.functional.cosine_similarity(*features.chunk(2))

    def _identified(self, images: Tensor, target: Tensor) -> Scores:
        if not len(images):
            return {key: np.zeros(0) for key in ("hit", "chance", "log_ratio", "gain")}
        n = len(self.y)
        d = distances(images, torch.cat([self.members, self.world.nonmembers(self.part.client)[0]]))
        near, i = d[:, :n].min(1)
        if self.rule == "row":  # if members are identical, each of them is the right one
            hit = (distances_of_pairs(images, self.members[target]) <= near + 1e-12).double()
            chance = torch.full((len(images),), 1 / n)
        elif self.rule == "class":
            assert self.given is not None
            hit, chance = (self.y[i] == self.given).double(), (self.given[:, None] == self.y).double().mean(1)
        else:
            nearest, i = d.min(1)
            hit, chance = (i < n).double(), torch.full((len(images),), n / d.shape[1])
            hit[_repeats(nearest, i)] = torch.nan
        log_ratio, gain = _against_redrawn(near, d, n)
        found = {"hit": hit, "chance": chance, "log_ratio": log_ratio, "gain": gain}
        return {key: value.double().cpu().numpy() for key, value in found.items()}

    # --- baselines ---

    def labels(self) -> Tensor:
        """Return the true class of each image: its record's, the claimed one, or that of the member it was assigned."""
        if self.rule == "class":
            assert self.given is not None
            return self.given
        spare = distances(self.images, self.members).argmin(1) if self.rule == "assignment" else self.target
        return self.y[torch.where(self.target >= 0, self.target, spare)]

    def mean_image(self) -> Tensor:
        return self.auxiliary[0].mean(0).expand_as(self.images)

    def class_mean(self) -> Tensor:
        """Return the auxiliary mean of each image's true class; the mean of all auxiliary images if there is none of
        that class."""
        x, y = self.auxiliary
        member = (torch.arange(self.world.classes, device=y.device)[:, None] == y).to(x)
        n = member.sum(1)
        means = (member @ x.flatten(1)).unflatten(1, x.shape[1:]) / n.clamp(min=1)[:, None, None, None]
        return torch.where((n > 0)[:, None, None, None], means, x.mean(0))[self.labels()]

    def nearest_auxiliary(self) -> Tensor:
        if not len(self.images):
            return self.images.clone()
        x = self.auxiliary[0]
        return x[distances(self.images, x).argmin(1)]


_BASELINES = {
    "mean_image": _Client.mean_image,
    "class_mean": _Client.class_mean,
    "nearest_auxiliary": _Client.nearest_auxiliary,
}


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the root mean squared difference in pixels of every image in `a` to every one in `b`."""
    flat = pixels(b).flatten(1)
    scale = math.sqrt(flat.shape[1])
    exact = "donot_use_mm_for_euclid_dist"  # the fast way cannot tell a copy from a near copy
    return torch.cat([torch.cdist(pixels(part).flatten(1), flat, compute_mode=exact) for part in a.split(64)]) / scale


def distances_of_pairs(a: Tensor, b: Tensor) -> Tensor:
    return mse(pixels(a), pixels(b)).sqrt()


def _repeats(distance: Tensor, record: Tensor) -> Tensor:
    """Return the images that share their nearest record with a nearer image."""
    order = distance.argsort(stable=True)
    first: set[int] = set()
    later = []
    for i in order.tolist():
        if (j := int(record[i])) in first:
            later.append(i)
        first.add(j)
    return torch.tensor(later, dtype=torch.long, device=distance.device)


def _against_redrawn(near: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Compare the nearest member's distance with that of n records drawn anew: return log ratio, and gain in mean
    square."""
    rng = generator("inversion", "redrawn")
    logs, squares = torch.zeros_like(near), torch.zeros_like(near)
    for _ in range(REDRAWN):
        drawn = d[:, torch.randperm(d.shape[1], generator=rng)[:n].to(d.device)].min(1).values
        logs += drawn.clamp(min=NEAR).log() / REDRAWN
        squares += drawn.square() / REDRAWN
    return near.clamp(min=NEAR).log() - logs, squares - near.square()


# --- numbers ------------------------------------------------------------------------------------------------------


def _joined(of_clients: list[Scores]) -> Scores:
    return {key: np.concatenate([scores[key] for scores in of_clients]) for key in of_clients[0]}


def _mean(values: np.ndarray, confidence: float = 0.95) -> Estimate:
    return student_t(values[~np.isnan(values)].tolist(), confidence)


def _within(values: np.ndarray, lowest: float, highest: float) -> Estimate:
    return mean_in_range(values[~np.isnan(values)].tolist(), lowest, highest)


def _estimates(scores: Scores) -> ReconstructionScores:
    found = {measure: _within(scores[measure], *RANGES[measure]) for measure in MEANS}
    rate, ratio = _rate(scores["hit"], scores["chance"]), _ratio(scores["log_ratio"])
    return ReconstructionScores(**found, identification=rate, ratio=ratio)


def _rate(hit: np.ndarray, chance: np.ndarray, confidence: float = 0.95) -> Rate:
    counted = ~np.isnan(hit)
    hits, n = int(hit[counted].sum()), int(counted.sum())
    if not n:
        return Rate(value=None, reason="there are no images to identify", n=0)
    low, high = clopper_pearson(hits, n, confidence)
    guessed = float(chance[counted].mean())
    return Rate(value=hits / n, low=low, high=high, interval="Clopper-Pearson", chance=guessed, hits=hits, n=n)


def _ratio(log_ratio: np.ndarray) -> Ratio:
    found = _mean(log_ratio)
    given = {name: getattr(found, name) for name in found.model_fields_set}
    if found.value is not None:
        given |= {key: math.exp(given[key]) for key in ("value", "low", "high") if given[key] is not None}
        given["mean"] = "geometric"
    return Ratio(**given)


def _difference(attack: Scores, baseline: Scores, assigned: bool) -> Difference:
    """Return how much better the attack is, image by image; above 0 (MSE) and 1/2 (identification) it is the better
    one.

    If images are assigned, identifications are not paired image by image: they are then held against chance alone.
    """
    found = Difference(mse=_mean(baseline["mse"] - attack["mse"], DECIDING), confidence=DECIDING)
    if assigned:
        return found
    only, other = int((attack["hit"] > baseline["hit"]).sum()), int((attack["hit"] < baseline["hit"]).sum())
    counts: dict[str, Any] = {"attack_only": only, "baseline_only": other}
    if only + other:
        low, high = clopper_pearson(only, only + other, DECIDING)
        share = only / (only + other)
        found.identification = OnlyOne(value=share, low=low, high=high, interval="Clopper-Pearson", **counts)
    else:
        found.identification = OnlyOne(value=None, reason="both identify the same images", **counts)
    return found


def _beaten(attack: Scores, differences: dict[str, Difference]) -> list[str]:
    """Return the measures in which the attack is better than every baseline."""
    won = []
    if all(_above(d.mse, 0) for d in differences.values()):
        won.append("MSE")
    rate = _rate(attack["hit"], attack["chance"], DECIDING)
    rivals = [d.identification for d in differences.values() if d.identification is not None]
    if rate.chance is not None and _above(rate, rate.chance) and all(_above(d, 0.5) for d in rivals):
        won.append("identification")
    return won


def _above(estimate: Estimate, bar: float) -> bool:
    return estimate.low is not None and estimate.low > bar


def _verdict(pooled: ReconstructionScores, won: list[str], differences: dict[str, Difference]) -> str:
    rate, error = pooled.identification, pooled.mse
    if rate.value is None or error.value is None:
        return "Failed: it claimed no image of a class that the client holds."
    what = f"MSE {error.value:.4f}, {rate.hits} of {rate.n} identified (chance {rate.chance:.1%})"
    if won:
        return f"Succeeded: it beats the baselines in {' and '.join(won)}: {what}."
    unbeaten = [name.replace("_", " ") for name, d in differences.items() if not _above(d.mse, 0)]
    mse = f"in MSE it does not beat {', '.join(unbeaten)}" if unbeaten else "it has no interval in MSE"
    return f"Failed: {mse}; nor does it identify more than chance and the baselines: {what}."


def _chosen(clients: list[_Client]) -> dict[str, Tensor]:
    """Return the images for the picture: the first image of every class, then the second of every class, and so on."""
    rows = [
        (client, i, int(client.target[i]))
        for client in clients
        for i in range(len(client.images))
        if int(client.target[i]) >= 0
    ]
    seen: dict[int, int] = {}
    order = []
    for client, i, j in rows:
        label = int(client.y[j])
        seen[label] = seen.get(label, 0) + 1
        order.append((seen[label], label, client, i, j))
    order.sort(key=lambda row: row[:2])
    if not order:
        return {}
    picked = order[:SHOWN]
    return {
        "originals": pixels(torch.stack([client.members[j] for _, _, client, _, j in picked])).float(),
        "images": pixels(torch.stack([client.images[i] for _, _, client, i, _ in picked])).float(),
        "client": torch.tensor([client.part.client for _, _, client, _, _ in picked]),
        "record": torch.tensor([j for _, _, _, _, j in picked]),
        "label": torch.tensor([label for _, label, _, _, _ in picked]),
    }
