"""All pages: every path in them exists, and every command of theirs and of the studies' suites can be parsed.

The page on architecture: its walk is the way that a run takes. The reviewer's page: every block runs.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click
import pytest
import reference_pages

import fedaudit
from fedaudit.cli.main import _command

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


# --- paths on all pages ------------------------------------------------------------------------------------------

ALL_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
STUDIES = ROOT / "benchmarks" / "studies"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ENDING = r"\.(?:py|toml|json|md|sh)"
PATH_LIKE = re.compile(rf"{ENDING}$|^[\w.+*-]+/(?:[\w.+*-]+/?)*$")
FROM_THE_ROOT = re.compile(rf"(?<![\w/.-])(?:benchmarks|docs|examples|fedaudit|tests)/[\w./-]+{ENDING}\b")
# What looks like a path of the repository and is none, and why: whole words, or beginnings up to a slash or a dash.
ELSEWHERE = {
    "audit/": "made by `fedaudit audit` or `make audit`",
    "build/": "made by a study's commands",
    "mine/": "made by a command of the page",
    "runs/": "made by a command of the page",
    "record.json": "of a run folder",
    "setting.toml": "of a run folder",
    "verified.json": "of a run folder",
    "report.json": "made by `fedaudit report`",
    "beside.md": "made by `fedaudit audit --beside`",
    "fedaudit-tested.json": "beside a method's code, also the reader's",
    "my_attack.py": "the reader's",
    "my_file.py": "the reader's",
    "my_project.py": "the reader's",
    "other.toml": "the reader's",
    "private.toml": "the reader's",
    "suite.toml": "the reader's",
    ".github/workflows/communication.yml": "the reader's",
    "examples/flower-secure-aggregation": "an app of Flower's",
    "examples/opacus": "an app of Flower's",
    "examples/quickstart-": "an app of Flower's",
    "hitorilabs/iris": "a data set of Hugging Face",
    "jxie/higgs": "a data set of Hugging Face",
    "uoft-cs/cifar10": "a data set of Hugging Face",
    "ZhangLin-PKU/FedFTG": "a repository of that name",
    "methods/local_fn_gan.py": "of the code of DFRD's authors",
    "methods/train_gan_fn.py": "of the code of DFRD's authors",
    "system/total.sh": "of PFLlib",
    "HtFE-1/512": "a group of networks and its width",
}


def marked(text: str) -> Iterator[str]:
    """Yield the words in code marks, outside of blocks, that look like a path."""
    for code in re.findall(r"`([^`]+)`", FENCED.sub("", text)):
        for word in code.split():
            bare = word.strip(",;:()[]\"'")
            if PATH_LIKE.search(bare.partition("::")[0]) and "://" not in bare:
                yield bare


def is_elsewhere(word: str) -> bool:
    """Return whether a word stands for something outside of the repository: a listed one, or NAME for any name."""
    if re.search(r"<\w+>|(?<![A-Za-z])[A-Z]{3,}(?![A-Za-z])(?!\.md)", word):
        return True
    return any(word == known or (known[-1] in "/-" and word.startswith(known)) for known in ELSEWHERE)


def bases(page: Path, text: str) -> list[Path]:
    """Return the folders from which a page names files: its study is the one of its name, or named before a heading."""
    studies = [page.stem, *re.findall(r"benchmarks/studies/(\w+)", text.partition("\n## ")[0])]
    own = [STUDIES / study / part for study in studies for part in ("", "records")]
    return [ROOT, ROOT / "fedaudit", page.parent, ROOT / "tests", STUDIES, *own]


def is_there(word: str, folders: list[Path]) -> bool:
    """Return whether a file or folder is there. Suites and records of studies may go without their ending."""
    name, _, test = word.rstrip("/").partition("::")
    found = [path for ending in ("", ".toml", ".json") for base in folders for path in base.glob(name + ending)]
    if test:
        return any(f"def {test.partition('[')[0]}(" in path.read_text() for path in found)
    return bool(found)


def lost_paths(page: Path, text: str) -> list[str]:
    folders = bases(page, text)
    if page == ROOT / "docs" / "results" / "README.md":  # about all studies
        folders += [folder for folder in STUDIES.iterdir() if folder.is_dir()]
    lost = [word for word in marked(text) if not is_elsewhere(word) and not is_there(word, folders)]
    whole = FROM_THE_ROOT.findall(text)  # also in blocks, and without marks
    return sorted({*lost, *(word for word in whole if not is_elsewhere(word) and not (ROOT / word).exists())})


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_of_a_page_exists(page):
    """From the root, from `fedaudit/` or `tests/`, from the page's folder, or from the study that the page is about."""
    lost = lost_paths(page, page.read_text())
    assert not lost, f"{page.relative_to(ROOT)} names {lost}, which are not there; ELSEWHERE is for what need not be"


def test_a_wrong_path_is_found_and_every_exception_is_needed():
    speed = ROOT / "docs" / "results" / "speed.md"
    right = "`training/stacked/layers.py`, `equality.json`, `profile/` `tests/test_docs.py::test_every_path_exists`"
    assert lost_paths(speed, right) == []
    wrong = "`training/layers.py` `speed/equality.json`, `profiles/`\n`tests/test_docs.py::test_none`, docs/none.md"
    found = ["docs/none.md", "profiles/", "speed/equality.json", "tests/test_docs.py::test_none", "training/layers.py"]
    assert lost_paths(speed, wrong) == found
    words = {word for page in ALL_PAGES for word in marked(page.read_text())}
    unused = [known for known in ELSEWHERE if not any(word.startswith(known) for word in words)]
    assert not unused


# --- commands on all pages and in suites -------------------------------------------------------------------------


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the commands of a page, and whether each is whole: one inside a sentence may leave out its arguments."""
    blocks = "\n".join([*FENCED.findall(text), *re.findall(r"^ {4,}\S.*$", text, re.MULTILINE)])
    for line in blocks.replace("\\\n", " ").splitlines():
        for part in re.split(r"; | && | \| ", line.strip().removeprefix("$ ")):
            if part.startswith("fedaudit "):
                yield part, True
    for code in re.findall(r"`(fedaudit [^`]+)`", FENCED.sub("", text)):
        yield code, False


def commented(text: str) -> str:
    """Return the comment of a suite as a page would have it: its commands, one a line, as blocks."""
    said = "\n".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    return re.sub(r"^fedaudit ", "    fedaudit ", said, flags=re.MULTILINE)


@cache
def program() -> Any:
    return _command(None)


def refused(line: str, whole: bool) -> str:
    """Return why the program would not know a command; nothing if it does. No command is carried out."""
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "--help"]
    if not words or words[0].startswith("-") or words[0].isupper():
        return ""  # options of the program itself act at once, and COMMAND is any of them
    command: Any = program()
    while isinstance(command, click.Group):
        if not words:
            return ""
        name = words.pop(0)
        if name not in command.commands:
            return f"{name} is not a command"
        command = command.commands[name]
    if not words and not whole:
        return ""
    try:
        command.make_context("fedaudit", words)
    except click.MissingParameter as e:
        return e.format_message() if whole else ""
    except click.UsageError as e:
        return e.format_message()
    return ""


SUITES = sorted(STUDIES.rglob("*.toml"))


@pytest.mark.parametrize("page", [*ALL_PAGES, STUDIES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_or_of_a_suites_comment_can_be_parsed(page):
    """Those of the README and of the guides are run, too, by tests of their own."""
    texts = {page: page.read_text()} if page != STUDIES else {suite: commented(suite.read_text()) for suite in SUITES}
    found = [(path, line, whole) for path, text in texts.items() for line, whole in commands(text)]
    assert page != STUDIES or len(found) > 80
    wrong = [f"{path.name}: {line}: {why}" for path, line, whole in found if (why := refused(line, whole))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "why"),
    [("    fedaudit audit a.toml --out b --device cuda\n", "device"), ("see `fedaudit adit`", "not a command"),
     ("`fedaudit show --none`", "none"), ("```sh\nfedaudit show\n```", "RUN"), ("`fedaudit show`", ""),
     ("`fedaudit --install-completion`", ""), ("    fedaudit run \\\n        --rounds 2 --out b\n", "")],
)  # fmt: skip
def test_which_commands_are_refused(text: str, why: str):
    ((line, whole),) = commands(text)
    said = refused(line, whole)
    assert why in said
    assert bool(said) == bool(why)


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
