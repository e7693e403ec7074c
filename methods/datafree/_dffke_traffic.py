"""Counts the bytes of a round of DFFKE: models, everybody's rows circulated twice (Appendix D), and what `sync`
resends.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fedaudit import NUMBER, Plan, Size
from fedaudit.methods.datafree._decoder import decoder_size
from fedaudit.shape import Shape
from fedaudit.training import models

if TYPE_CHECKING:
    from fedaudit.methods.datafree.dffke import DFFKE

Traffic = dict[tuple[str, str], Size | int]


@functools.cache
def width_of(arch: str, shape: Shape, classes: int) -> int:
    return int(models.describe(arch, shape, classes)["width"])


def traffic(method: DFFKE, plan: Plan) -> Traffic:
    unifies = 2 if method.sync else 1  # the number of the ask that does
    shared, answered = method.members(plan, plan.replied(0)), method.members(plan, plan.replied(unifies))
    unified, asked = method.members(plan, plan.asked(unifies)), method.members(plan, plan.asked(unifies + 1))
    width = {k: width_of(plan.archs[k], plan.shape, plan.classes) for k in shared}
    embeddings = sum(plan.tensor(plan.n[k], method.h) + NUMBER for k in shared)
    unify = "UnifiedDocked" if method.embed else "Unified"
    answer, told = ("AnsweredDocked", "PeersDocked") if method.embed == "answered" else ("Answered", "Peers")
    docking = sum(plan.tensor(method.h, width[k]) + plan.tensor(method.h) for k in unified) if method.embed else None
    return {
        ("up", "Shared.theta"): sum(plan.state(k) for k in shared),
        ("up", "Shared.E"): sum(plan.tensor(plan.n[k], width[k]) for k in shared),
        ("up", "Shared.Y"): sum(plan.tensor(plan.n[k], size=8) for k in shared),
        **(_missed(method, plan) if method.sync else {}),
        ("down", f"{unify}.Dec"): decoder_size(method.h, plan.shape, method.w_Dec, method.output) * len(unified),
        ("down", f"{unify}.E"): embeddings * len(unified),
        ("down", f"{unify}.seed"): NUMBER * len(unified),
        **({} if docking is None else {("down", "UnifiedDocked.z"): docking}),
        **_exchanged(method, plan, unifies + 1, width),
        **_circulated("Y", {k: _answers(method, plan, k, answer, plan.classes) for k in answered}, answer, told, asked),
        **(
            _circulated("Z", {k: _answers(method, plan, k, answer, method.h) for k in answered}, answer, told, asked)
            if method.embed == "answered"
            else {}
        ),
    }


def _circulated(field: str, sizes: dict[int, Size], up: str, down: str, asked: list[int]) -> Traffic:
    """Return the traffic of what each client answers, and everybody else is told."""
    return {
        ("up", f"{up}.{field}"): sum(sizes.values(), Size()),
        ("down", f"{down}.{field}"): sum((sizes[i] + NUMBER for k in asked for i in sizes if i != k), Size()),
    }


def _exchanged(method: DFFKE, plan: Plan, ask: int, width: dict[int, int]) -> Traffic:
    """Return the traffic of what clients send after an exchange: their models, and their docking layers."""
    done = method.members(plan, plan.replied(ask))
    theta = sum((plan.state(k) for k in done), Size())
    z = sum((plan.tensor(method.h, width[k]) + plan.tensor(method.h) for k in done), Size())
    return {
        **({("up", "ExchangedModel.theta"): theta} if method.md_of == "exchanged" else {}),
        **({("up", "ExchangedModel.z"): z} if method.dock else {}),
    }


def _answers(method: DFFKE, plan: Plan, k: int, message: str, columns: int) -> Size:
    """Return the size of client k's answers: N_k rows on D^_k, as many on B^t_k once there is a buffer, or so many
    times as many, if the buffer holds them.

    Each round has a key.
    """
    rounds = plan.choice(f"{message}.Y", k)
    if rounds is None:  # planning: the rounds in which a client is expected to have taken part
        rho = len(plan.participants) / max(plan.clients, 1)
        window = plan.t - 1 if method.R == "unlimited" else min(plan.t - 1, method.R)
        past = round(window * rho) if method.sync else round((plan.t - 1) * rho)
        past = past if method.R == "unlimited" else min(past, method.R)
    else:
        past = len(rounds) - 1
    of_round = plan.tensor(plan.n[k], columns)
    return of_round * (1 + min(past, method.reviewed)) + NUMBER * (1 + past)


def _missed(method: DFFKE, plan: Plan) -> Traffic:
    """Return the traffic for the rounds that a client lacks: for each the decoder, and the rows of all its members."""
    Dec = decoder_size(method.h, plan.shape, method.w_Dec, method.output) + NUMBER
    if plan.asks is None:  # planning: a client lacks the round j back if it sat out that one and all since
        members = method.members(plan, plan.participants)
        absent = 1 - len(plan.participants) / max(plan.clients, 1)
        window = plan.t - 1 if method.R == "unlimited" else min(plan.t - 1, method.R)
        lacking = round(len(members) * sum(absent**j for j in range(1, window + 1)))
        rows = sum(plan.tensor(plan.n[k], method.h) + NUMBER for k in members) + NUMBER
        return {("down", "Missed.Dec"): Dec * lacking, ("down", "Missed.E"): rows * lacking}
    sizes = {("down", "Missed.Dec"): Size(), ("down", "Missed.E"): Size()}
    for k in plan.asked(1):
        for peers in plan.choice("Missed.E", k, {}).values():
            sizes["down", "Missed.Dec"] += Dec
            sizes["down", "Missed.E"] += NUMBER
            sizes["down", "Missed.E"] += sum(plan.tensor(plan.records[i], method.h) + NUMBER for i in peers)
    return dict(sizes)
