"""The pages on architecture and privacy: every path in them exists, and the walk is the way that a run takes.

The reviewer's page: every block runs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import reference_pages

import fedaudit

ROOT = Path(__file__).parents[1]
PAGES = ("docs/design/architecture.md", "docs/design/privacy.md")
STEP = re.compile(r"^(\d+)\. `([^`]+\.py)`, `([\w.]+)`:", re.MULTILINE)


def walk() -> list[tuple[str, str]]:
    found = STEP.findall((ROOT / "docs/design/architecture.md").read_text())
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    return [(path, name) for _, path, name in found]


def paths(page: str) -> set[str]:
    """What stands in code marks and looks like a file or folder of the repository."""
    marked = re.findall(r"`([^`\s]+)`", (ROOT / page).read_text())
    return {text for text in marked if "/" in text and not text.startswith("-")}


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    assert len(paths(page)) > 10
    missing = sorted(path for path in paths(page) if not (ROOT / path).exists())
    assert not missing, f"{page} names {missing}"


def test_rules_cited_in_comments_are_there():
    rules = set(re.findall(r"^\*\*(\d+)\. ", (ROOT / "docs/design/privacy.md").read_text(), re.MULTILINE))
    assert rules == {str(n) for n in range(1, 11)}
    cited = {
        number
        for folder in ("fedaudit", "methods", "attacks", "reports")
        for path in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"privacy rule (\d+)|rule (\d+) of the privacy", path.read_text())
        for number in number
        if number
    }
    assert cited
    assert cited <= rules


def code_of(path: str, name: str) -> tuple[str, int]:
    """File and first line of a function that is named as in `Class.function`."""
    node: Any = ast.parse((ROOT / path).read_text())
    for part in name.split("."):
        inner = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
        assert inner, f"{path} has no {name}"
        node = inner[0]
    return path, min([node.lineno, *(d.lineno for d in node.decorator_list)])


@pytest.mark.long
def test_the_walk_is_the_way_of_an_embedding(undrawn, tmp_path):
    """The first call of each step, from the method's own lines on, comes after the first call of the step before."""
    steps = {code_of(path, name): number for number, (path, name) in enumerate(walk())}
    method = [path for path, _ in walk()].index("methods/datafree/dffke.py")
    guess = [path for path, _ in walk()].index("attacks/membership/embedding_match.py")
    scored = guess + 1  # baselines, which look at nothing, are scored before it
    first: dict[int, int] = {}
    known: dict[CodeType, int | None] = {}
    calls = 0

    def step_of(code: CodeType) -> int | None:
        file = Path(code.co_filename).resolve()
        if not file.is_relative_to(ROOT):
            return None
        return steps.get((file.relative_to(ROOT).as_posix(), code.co_firstlineno))

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event != "call":
            return
        code = frame.f_code
        if code not in known:
            known[code] = step_of(code)
        number = known[code]
        if number is not None and (number <= method or method in first) and (number != scored or guess in first):
            calls += 1
            first.setdefault(number, calls)

    sys.setprofile(watch)
    try:
        fedaudit.run(
            method="dffke", rounds=1, clients=2, model="mlp", engine="serial", out=tmp_path / "run",
            set={"E_local": 1, "h": 8, "T_Tran": 1, "T_Dec": 1, "T_FKE": 1, "w_Dec": 2, "R": 1}, eval_clients=False,
        )  # fmt: skip
        fedaudit.attack(tmp_path / "run", attacks=["embedding_match"])
        fedaudit.report(tmp_path, formats=["html"])
    finally:
        sys.setprofile(None)
    skipped = [walk()[number] for number in range(len(steps)) if number not in first]
    assert not skipped, f"never called: {skipped}"
    assert sorted(first, key=lambda number: first[number]) == list(range(len(steps)))


def test_the_reference_is_made_from_the_code(tmp_path):
    """Commands from the command line, settings from the class. They are made in a process of their own: what
    other tests do to typer's commands does not show."""
    subprocess.run([sys.executable, reference_pages.__file__, "--write", tmp_path], check=True)
    for name in reference_pages.PAGES:
        made = (tmp_path / name).read_text()
        assert (reference_pages.FOLDER / name).read_text() == made, f"python {reference_pages.__file__} --write"


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    lost = [page for page in pages if not re.search(rf" {re.escape(page)}$", menu, re.MULTILINE)]
    assert not lost, f"add them to nav in mkdocs.yml: {lost}"


def test_docs_hold_prose_and_pictures():
    kinds = (".md", ".png", ".css", ".js")
    other = [p.name for p in (ROOT / "docs").rglob("*") if p.is_file() and p.suffix not in kinds]
    other.remove("methods.html")  # the tables of methods.md, to be sorted and filtered
    assert not other, "suites, scripts and records belong into benchmarks/studies"


def test_the_start_page_has_a_picture_an_example_and_four_doors():
    text = (ROOT / "docs" / "index.md").read_text()
    assert text.index("![") < text.index("## Install") < text.index("## An example") < text.index("## Four doors")
    for door in ("author", "engineer", "reviewer", "officer"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| **{door}**")]
        assert "](" in line, "a page to begin with"


@pytest.mark.slow
def test_the_site_needs_no_network(tmp_path):
    """Code is coloured when the site is built, and the buttons that copy it are a script of the site's own."""
    pytest.importorskip("mkdocs", reason="needs mkdocs, in the extra `docs`")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.glob("**/*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["'](https?:)?//""", text), page.name
        assert "copy.js" in text
    assert '<span class="' in (tmp_path / "guide" / "tutorial.html").read_text()


# --- the reviewer's page -----------------------------------------------------------------------------------------

REVIEW = ROOT / "docs" / "guide" / "review.md"
TAGGED = re.compile(r"^<!-- run(, exit code 1)? -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_every_block_of_the_reviewers_page_runs(fedaudit, tmp_path, monkeypatch):
    """In order, in an empty folder; what it says of the forgery is what comes out."""
    pytest.importorskip("cryptography")
    monkeypatch.chdir(tmp_path)
    text = REVIEW.read_text()
    blocks = TAGGED.findall(text)
    assert len(blocks) == text.count("```") // 2
    printed = []
    for fails, language, body in blocks:
        if language == "python":
            exec(compile(body, REVIEW.name, "exec"), {})
            continue
        for line in body.splitlines():
            code, out, err = fedaudit(*line.split()[1:])
            assert code == (1 if fails else 0), f"{line}\n{out}\n{err}"
            printed.append(" ".join(out.split()))
    assert "record.json: rounds.1.utility.global.test.accuracy is" in printed[-3]
    assert "it is not signed" in printed[-2]
    assert "every message is the same to the bit, but accuracy of round 2" in printed[-1]
