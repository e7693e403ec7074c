"""The default and the bounds of every setting of every attack, typed in by hand.

A default that changes by mistake changes what an attack's name in a table stands for; a bound, what a user may try.
"""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from fedaudit import registry

NONE = None
# A setting: its default, the least and the largest value that it takes. "above 0" takes all above, and not 0 itself.
SHADOWS = {"shadows": (16, 2), "rounds": (NONE, 1), "together": (64, 1), "compile": (False,)}
DESCENT = {"steps": (300, 1), "lr": (0.05, "above 0"), "tv": (1e-2, 0.0)}
STATED = {
    "blind_nearest": {},
    "blind_pixels": {},
    "blind_prior": {},
    "chosen_queries": {},
    "class_inversion": {
        "form": ("auto",), **DESCENT, "l2": (1e-4, 0.0), "bn": (0.1, 0.0), "per_class": (2, 1), "restarts": (1, 1),
    },
    "combined": SHADOWS,
    "decoder": {
        "steps": (600, 1), "batch": (64, 2), "width": (16, 1), "lr": (4e-3, "above 0"), "mix": (0.5, 0.0, 1.0),
        "releases": (1, 1), "labels": (False,),
    },
    "embedding_match": {"labels": (True,), "join": (True,)},
    "entropy": {"rounds": (NONE, 1)},
    "feature_match": {"release": ("auto",), **DESCENT, "restarts": (2, 1), "most": (64, 1), "batch": (64, 1)},
    "gradient_cosine": {},
    "gradient_match": {
        "form": ("cosine",), "steps": (NONE, 1), "lr": (0.1, "above 0"), "tv": (1e-3, 0.0), "restarts": (NONE, 1),
        "together": (16, 1), "most": (8, 1), "uploads": (1, 1), "epochs": (NONE, 1), "size": (NONE, 1),
        "eta": (NONE, "above 0"), "records": (NONE, 1),
    },
    "gradient_norm": {},
    "imprint": {},
    "label_histogram": {},
    "label_only": {"rounds": (NONE, 1), "queries": (500, 16), "probes": (30, 2), "bisections": (8, 1), "steps": (4, 1)},
    "lira": {**SHADOWS, "variance": ("auto",)},
    "lira_offline": {**SHADOWS, "variance": ("auto",)},
    "logit_gap": {"pair": ("clients",), "rounds": (5, 1), "steps": (500, 1)},
    "logit_lira": {"null": ("clients",), "shadows": (8, 2), "rounds": (5, 1), "steps": (500, 1), "few": (8, 2)},
    "loss": {"rounds": (NONE, 1)},
    "modified_entropy": {"rounds": (NONE, 1)},
    "nearest_synthetic": {"space": ("pixel",), "same_class": (True,), "calibrate": (False,)},
    "paired_logits": {
        "steps": (400, 1), "batch": (64, 2), "width": (16, 1), "lr": (2e-3, "above 0"), "server_steps": (150, 1),
        "tau": (1.0, "above 0"), "p": (NONE, 0.0, 1.0), "gamma": (0.03, 0.0, "below 1"), "most": (2000, 16),
    },
    "participation": {"steps": (500, 1)},
    "prototype_inversion": {"shadows": (32, 4), "together": (64, 1)},
    "prototype_membership": {"shadows": (32, 4), "together": (64, 1)},
    "prototype_property": {},
    "relayed_match": {},
    "relayed_means": {},
    "rmia": {**SHADOWS, "gamma": (NONE, "above 0"), "a": (NONE, 0.0, 1.0)},
    "shadow": {**SHADOWS, "rounds": (1, 1), "classifier": ("forest",), "per_class": (True,), "least": (20, 2)},
    "synthetic_leak": {"most": (500, 1)},
    "update_alignment": {"measure": ("both",), "null": ("shrunken",), "rounds": (NONE, 1)},
}  # fmt: skip
ACTIVE = {"chosen_queries", "imprint"}
BLIND = {"blind_nearest", "blind_pixels", "blind_prior"}


def takes(attack, name, value) -> bool:
    try:
        registry.find(attack, "attacks")(**{name: value})
    except ValidationError:
        return False
    return True


def ends(bound, way: int) -> tuple[list, list]:
    """Return values just inside of a bound, and just outside. `way`: 1 if it is the largest, -1 if it is the least."""
    if isinstance(bound, str):
        open_end = float(bound.split()[1])
        return [math.nextafter(open_end, -way * math.inf)], [open_end]
    if isinstance(bound, int):
        return [bound, bound - way], [bound + way]
    return [bound], [math.nextafter(bound, way * math.inf)]


@pytest.mark.parametrize("attack", STATED)
def test_defaults_and_bounds_are_as_stated(attack):
    cls = registry.find(attack, "attacks")
    found = {name: field.default for name, field in cls.model_fields.items()}
    assert found == {name: default for name, (default, *_) in STATED[attack].items()}
    assert {name: type(value) for name, value in found.items()} == {
        name: type(default) for name, (default, *_) in STATED[attack].items()
    }
    for name, (_, *bounds) in STATED[attack].items():
        for bound, way in zip(bounds, (-1, 1), strict=False):
            inside, outside = ends(bound, way)
            assert all(takes(attack, name, value) for value in inside), (name, inside)
            assert not any(takes(attack, name, value) for value in outside), (name, outside)
        if len(bounds) == 1:
            assert takes(attack, name, 10**6), name


def test_every_attack_has_its_row():
    assert set(registry.names("attacks")) == set(STATED)


def test_who_sends_messages_and_who_reads_nothing():
    classes = {name: registry.find(name, "attacks") for name in STATED}
    assert {name for name, cls in classes.items() if cls.active} == ACTIVE
    assert {name for name, cls in classes.items() if cls.blind} == BLIND
