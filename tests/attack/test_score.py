"""Scores of claims: groups, label shares and their gains."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit.attack import score
from fedaudit.attack.claims import Attacked, Histogram
from fedaudit.attack.score import histogram, learned

# --- ties, and unequal clients


def test_groups_are_learned_on_the_other_half():
    """Five members and nine others, told perfectly by their group: three and five are judged, by two and four."""
    member = torch.arange(14) < 5
    share = learned(member.long(), member)
    judged = share != 0.5
    assert (int(judged[member].sum()), int(judged[~member].sum())) == (3, 5)
    assert share[member & judged].unique().tolist() == [pytest.approx(3 / 4)]  # (2 + 1) / (2 + 2)
    assert share[~member & judged].unique().tolist() == [pytest.approx(1 / 6)]  # (0 + 1) / (4 + 2)


@pytest.fixture
def grown(monkeypatch, tmp_path):
    """How often a forest was grown, in a folder that processes share. Call it to be another process."""
    count, grow = [], score._grown
    monkeypatch.setattr(score, "_grown", lambda *what: count.append(1) or grow(*what))
    monkeypatch.setattr(score, "_shared", None)
    monkeypatch.setattr(score, "_known", {})
    score.share_forests(tmp_path)

    def so_often():
        score._known.clear()
        return len(count)

    return so_often


def looks(seed=0, n=24):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=rng), torch.arange(n) % 2 == 0


def test_a_forest_is_grown_once_for_all_processes_of_an_audit(grown, tmp_path):
    first = score.classified(*looks())
    assert grown() == 1
    assert torch.equal(score.classified(*looks()), first)
    assert grown() == 1
    score.classified(*looks(seed=1))
    assert grown() == 2  # other candidates
    score.share_forests(None)
    assert torch.equal(score.classified(*looks()), first)
    assert grown() == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_forest_is_grown_again(grown, tmp_path):
    first = score.classified(*looks())
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-9], b"", whole.replace(b"<f8", b"<f4")):
        kept.write_bytes(damaged)
        before = grown()
        assert torch.equal(score.classified(*looks()), first)
        assert grown() == before + 1
    assert kept.read_bytes() == whole


def test_without_the_folder_each_process_grows_its_own(grown, tmp_path):
    score.share_forests(tmp_path / "gone")
    assert torch.equal(score.classified(*looks()), score._grown(*looks()))
    assert not (tmp_path / "gone").exists()


def labelled(*labels):
    """A world of three classes, of which nobody holds the last."""
    rows = [torch.tensor(y) for y in labels]
    return SimpleNamespace(classes=3, members=lambda k: (torch.zeros(len(rows[k]), 1, 2, 2), rows[k]))


def part(k, claims, member=None, n=0):
    member = torch.ones(n, dtype=torch.bool) if member is None else member
    return Attacked(k, claims, torch.zeros(len(member), 1, 2, 2), torch.zeros(len(member), dtype=torch.long), member)


def test_label_shares_are_held_against_each_clients_own():
    """Client 0 has (3/4, 1/4, 0), client 1 (0, 1, 0). Claims (1/2, 1/2, 0) and (0, 1/2, 1/2): errors 1/4 and 1/2."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.5, 0.5, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert [found.client[k].error for k in "01"] == [pytest.approx(0.25), pytest.approx(0.5)]
    assert [found.client[k].uniform for k in "01"] == [pytest.approx(5 / 12), pytest.approx(2 / 3)]


def test_a_gain_within_its_interval_is_no_leak():
    """Gains of 0.42 and 0.17 over the uniform guess: above 0 in the mean, and their interval holds 0."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.75, 0.25, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert found.pooled.gain.value > 0 > found.pooled.gain.low
    assert found.leak is False
    assert found.verdict.startswith("No leak shown")
