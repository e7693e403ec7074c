"""Synthetic images that a view shows, and how near candidates are to those of their class."""

from __future__ import annotations

import pytest
import torch
from scenes import Entry, scene

from fedaudit.attacks.membership import nearest_synthetic
from fedaudit.attacks.membership.nearest_synthetic import NearestSynthetic, images, labelled


def flat(value, n=1):
    return torch.full((n, 1, 2, 2), float(value))


def shown(found):
    return [(c, x[:, 0, 0, 0].tolist()) for c, x in found]


def test_released_images_come_before_those_that_were_sent():
    sent = Entry("down", 0, 1, role="public", x=(None, flat(5)))
    released = Entry("up", 0, 1, s=("synthetic_images", {2: flat(1), 0: flat(3)}))
    plain = Entry("up", 0, 2, s=("synthetic_images", flat(4, 2)))
    assert shown(images(scene(sent, released, plain))) == [(2, [1.0]), (0, [3.0]), (None, [4.0, 4.0])]
    assert shown(images(scene(sent))) == [(None, [5.0])]
    assert images(scene()) == []
    assert images(scene(public=flat(1))) == []
    other = Entry("down", 1, 1, role="public", x=(None, flat(6)))
    assert shown(images(scene(other))) == [], "sent to somebody else"


def test_images_of_the_public_set_are_nobodys_records():
    sent = [
        Entry("down", 0, t, role="public", x=(None, x)) for t, x in ((1, torch.cat([flat(1), flat(2)])), (2, flat(1)))
    ]
    assert shown(images(scene(*sent, public=flat(1)))) == [(None, [2.0])]
    assert shown(images(scene(*sent))) == [(None, [1.0, 2.0]), (None, [1.0])]


def test_a_table_says_the_classes_of_its_images_where_it_can():
    assert shown(labelled(scene(), {1: flat(1), 2: [flat(2), flat(3)]})) == [(1, [1.0]), (2, [2.0]), (2, [3.0])]
    assert shown(labelled(scene(), {1: flat(1), 7: flat(2)})) == [(None, [1.0]), (None, [2.0])], "no such class"


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        # Images: class 0 at 3, class 1 at 1 and 6. Candidates at 0, 0, 0 (class 2) and 4. A step is 2 in distance.
        ({}, [-6.0, -2.0, -2.0, -2.0]),
        ({"same_class": False}, [-2.0, -2.0, -2.0, -2.0]),
        # Auxiliary records at 2 (class 0) and 5 (class 1). Class 2 has no image: the nearest of all counts.
        ({"calibrate": True}, [-6.0 + 4.0, -2.0 + 10.0, -2.0 + 4.0, -2.0 + 4.0]),
    ],
)
def test_the_nearest_image_of_the_candidates_class(settings, scores):
    released = Entry("up", 0, 1, s=("synthetic_images", {0: flat(3), 1: torch.cat([flat(1), flat(6)])}))
    x = torch.cat([flat(0, 3), flat(4)])
    here = scene(
        released, x=x, y=torch.tensor([0, 1, 2, 0]), auxiliary=(torch.cat([flat(2), flat(5)]), torch.tensor([0, 1]))
    )
    assert NearestSynthetic(**settings).run(here).scores.tolist() == pytest.approx(scores)


def test_the_last_model_that_a_client_got_gives_the_features(monkeypatch):
    uploads = [Entry("up", 0, t, dropped=t == 3, w=("weights", None)) for t in (1, 2, 3)]
    known = {1: "got in 1", 2: "got in 2", 3: "got in 3"}
    monkeypatch.setattr(nearest_synthetic, "received", lambda scene, entry: known.get(entry.round))
    own = {4: ("entry", "own of 4"), 2: ("entry", "own of 2")}
    monkeypatch.setattr(nearest_synthetic, "uploaded", lambda scene, k: own)
    attack = NearestSynthetic(space="feature")
    assert attack._encoder(scene(*uploads)) == "got in 2", "round 3 was not kept"
    known.clear()
    assert attack._encoder(scene(*uploads)) == "own of 4"
    own.clear()
    assert attack._encoder(scene(*uploads)) is None
    assert "use space = pixel" in attack.cannot(scene(Entry("up", 0, 1, s=("synthetic_images", flat(1)))))
    assert NearestSynthetic().cannot(scene(Entry("up", 0, 1, s=("synthetic_images", flat(1))))) is None
    assert "sees no synthetic images" in NearestSynthetic().cannot(scene())
