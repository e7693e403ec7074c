"""FedMD beside its round by hand: a public set of another task, and clients that stay away."""

from __future__ import annotations

from fedaudit import run
from fedaudit.wire.transcript import Transcript


def test_labels_of_another_set_are_not_learned(tiny, tmp_path, monkeypatch):
    """Labels of another data set are -1: the training on the public set is left out, and the run goes through."""
    from fedaudit.runtime.world import World

    real = World.public

    def other(self):
        x, y = real(self)
        return x, y * 0 - 1

    monkeypatch.setattr(World, "public", other)
    record = run(tiny("fedmd", rounds=1, clients=2), out=tmp_path / "a")
    assert not record.rounds[0].absent


def test_the_part_of_the_public_set_changes_from_round_to_round(tiny, tmp_path):
    run(tiny("fedmd", rounds=2, clients=2), out=tmp_path / "a")
    chosen = [e["d"].tolist() for e in Transcript(tmp_path / "a" / "transcript").entries() if e.message == "Chosen"]
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]
