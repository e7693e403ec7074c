"""The first paragraph of each paper's page: what a reader who has no more time takes along."""

from __future__ import annotations

import re

import pytest
from pages import RESULTS

TITLE = "**In three sentences.**"


@pytest.mark.parametrize("paper", ["dffke", "dfrd", "fedaf", "fedfree", "fedzge"])
def test_a_page_begins_with_its_verdict_in_three_sentences(paper: str) -> None:
    """Each figure in it stands on the page once more, where another test holds it against records."""
    before, title, rest = (RESULTS / f"{paper}.md").read_text().partition(TITLE)
    assert title, "the page has no verdict"
    assert "**" not in before, "nothing stands above it but the title and where files lie"
    verdict, _, page = rest.strip().partition("\n\n")
    sentences = re.findall(r"[^.]+(?:\.\d[^.]*)*\.(?=\s|$)", verdict)
    assert len(sentences) == 3, sentences
    assert len(verdict.split()) <= 110
    figures = re.findall(r"[+-]?\d+\.\d+", verdict)
    assert len(figures) >= 4
    missing = [figure for figure in figures if figure not in page]
    assert missing == []
