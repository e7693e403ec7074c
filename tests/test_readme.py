"""The README as a newcomer copies it: every block, in order, in an empty folder. And the examples."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from inner_session import import_everything

from fedaudit.cli.starters import BUDGETS, CI
from fedaudit.metrics.utility import near_chance
from fedaudit.runtime.run_record import read_record

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_it_is_short_and_every_block_says_what_it_is():
    assert len(README.splitlines()) < 200
    blocks = BLOCK.findall(README)
    assert len(blocks) == README.count("```") // 2
    assert {kind.split("=")[0] for _, kind, _ in blocks} == {"install", "run", "file", "out"}


def test_both_commands_stand_at_its_top_and_are_there():
    """A newcomer's first two commands: named before anything else, with what each needs and takes."""
    first = README[: README.index("## A run, and what it gives away")]
    assert first.index("## Two commands") < 1200
    makefile = (ROOT / "Makefile").read_text()
    for command in ("audit", "test"):
        assert re.search(rf"^make {command} +# ", first, re.MULTILINE)
        assert re.search(rf"^\| `make {command}` \| .*GB.* \| .*minutes \|$", first, re.MULTILINE)
        assert re.search(rf"^{command}\b.*: \$", makefile, re.MULTILINE)


def test_an_audit_installs_only_what_it_needs():
    """The core, with opacus: no cluster, no Flower, no trackers, no test tools."""
    makefile = (ROOT / "Makefile").read_text()
    assert "\naudit: $(CORE) " in makefile

    def extras(stamp: str) -> list[str]:
        found = re.search(rf'^\$\({stamp}\): .*?-e "\.(?:\[(.*?)\])?"', makefile, re.MULTILINE | re.DOTALL)
        assert found is not None
        return (found[1] or "").split(",")

    assert extras("CORE") == [""]
    assert {"ray", "flower", "test"} <= set(extras("STAMP"))


@pytest.fixture(scope="module")
def imported():
    import_everything()


@pytest.fixture
def follow(imported, fedaudit, quick, pytester, tmp_path, monkeypatch):
    """Do what a page says, block by block: write its files, run its commands, look for what it says comes out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the workers of an audit, where fedaudit is not installed

    def call(page: str, blocks: list[tuple[str, str, str]]) -> None:
        printed = ""
        for language, kind, text in blocks:
            if kind.startswith("file="):
                Path(kind.removeprefix("file=")).write_text(text)
            elif kind == "out":
                for line in text.splitlines():
                    assert re.search(rf"^{re.escape(line)}", printed, re.MULTILINE), line
            elif kind == "run" and language == "python":
                exec(compile(text, page, "exec"), {})
            elif kind == "run":
                printed = ""
                for line in text.splitlines():
                    words = shlex.split(line, comments=True)
                    if words[0] == "pytest":  # times are a matter of the slow tests of gates
                        done = pytester.runpytest_inprocess(*words[1:], "--benchmark-disable", "-p", "no:cacheprovider")
                        assert done.ret == 0, line
                        continue
                    assert words[0] == "fedaudit", line
                    code, out, err = fedaudit(*words[1:])
                    assert code == 0, f"{line}\n{out}\n{err}"
                    printed += out
        assert near_chance_below(Path()) == [], "a command that a reader types ends above chance, by its own settings"

    return call


def near_chance_below(folder: Path) -> list[str]:
    """Return the finished runs below a folder that learnt nothing."""
    found = []
    for path in sorted(folder.glob("**/record.json")):
        record = read_record(path.parent)
        score = record.result.last.test_score() if record.status == "done" and record.result.last else None
        if score is not None and near_chance(score, record.data):
            found.append(f"{path.parent}: {100 * score:.1f} % of {record.data.classes} classes")
    return found


def test_every_block_runs_in_order(follow):
    follow("README.md", BLOCK.findall(README))
    assert Path("mine/report.html").is_file()
    assert Path("mine/report.tex").is_file()


TAGGED = re.compile(r"^<!-- (run|file: (\S+)|not run: [^>]+) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


PAGES = ["guide/tutorial.md", "guide/howto.md", "guide/testing.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_docs_says_what_it_is(page):
    """In comments: what follows the language of a fence would be shown on the site."""
    text = (ROOT / "docs" / page).read_text()
    assert len(TAGGED.findall(text)) == text.count("```") // 2


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_docs_runs_in_order(follow, page):
    found = TAGGED.findall((ROOT / "docs" / page).read_text())
    follow(page, [(language, f"file={file}" if file else tag, body) for tag, file, language, body in found])


@pytest.mark.long
def test_the_section_on_own_models_and_data_runs(follow):
    """Of the tutorial, by itself and in the quick suite."""
    _, _, section = (ROOT / "docs" / "guide" / "tutorial.md").read_text().partition("## Your own model and data")
    found = TAGGED.findall(section)
    assert len(found) == 2
    follow(
        "guide/tutorial.md", [(language, f"file={file}" if file else tag, body) for tag, file, language, body in found]
    )
    assert Path("own/report.md").is_file()


def test_the_first_block_is_what_make_does():
    [(_, _, text)] = [block for block in BLOCK.findall(README) if block[1] == "install"]
    assert "make audit" in text
    said = subprocess.run(["make", "-n", "audit"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "fedaudit audit --out audit --jobs 2" in said


def test_its_links_lead_somewhere():
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_it_names_every_row_of_the_quickstart():
    """Each row of the suite by its words in the README; a row of which it says nothing has none here."""
    words = {
        "Local training": "local training;",
        "FedAvg": "FedAvg on skewed",
        "FedAvg, iid": "and on iid records,",
        "FedAvg, secure sums": "with secure sums,",
        "FedAvg, epsilon 32": "at epsilon = 32,",
        "FedAvg, epsilon 8": "32, 8 and",
        "FedAvg, epsilon 2": "8 and 2,",
        "FedAvg, iid, epsilon 8": "on iid records at 8;",
        "FedZGE": "FedAF, FedZGE,",
        "FedZGE, epsilon 8": "FedZGE also at epsilon = 8;",
        "DFRD on FedAvg": "DFRD and",
        "DFFKE": "(DFFKE,",
        "DFFKE, random-pixel noise": "one published claim that is refuted.",
        "FedAF": "DFFKE, FedAF,",
        "FedFree": "and FedFree)",
    }
    suite = tomllib.loads((ROOT / "fedaudit" / "suites" / "quickstart.toml").read_text())
    assert words.keys() == {row["label"] for row in suite["methods"]}
    _, _, said = " ".join(README.split()).partition("It runs three seeds of every row: ")
    lost = [label for label, text in words.items() if text not in said.partition("Its page,")[0]]
    assert not lost


def test_what_it_says_of_parity_is_what_the_record_has():
    """A method equals a library as it is where a row that compares trained models says so."""
    rows = json.loads((ROOT / "benchmarks" / "studies" / "parity" / "parity.json").read_text())["rows"]
    trained = [row for row in rows if row["rounds"] and row["equal"]]
    equal = {row["method"] for row in trained}
    as_it_is = {row["method"] for row in trained if row["reference"].startswith("as it is")}
    assert len(equal) == len({row["method"] for row in rows}) == 16
    changed = len(equal - as_it_is)
    told = f"But for rounding, {len(as_it_is)} equal the library as it is, and {changed} equal it after named points"
    assert told in " ".join(README.split())


# --- examples ----------------------------------------------------------------------------------------------------


def test_the_notebook_runs(undrawn, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in json.loads((ROOT / "examples" / "first_audit.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first_audit.ipynb", "exec"), names)
    out = capsys.readouterr().out
    assert "loss server 0." in out
    assert "['report.html', 'report.md']" in out


@pytest.mark.parametrize(("name", "text"), [("federated.yml", CI), ("budgets.toml", BUDGETS)])
def test_the_workflow_is_what_init_writes(name, text):
    assert (ROOT / "examples" / "ci" / name).read_text() == text


@pytest.mark.slow
def test_the_own_method_is_a_method_and_its_tests_pass(imported, pytester, monkeypatch):
    folder = ROOT / "examples" / "own_method"
    monkeypatch.syspath_prepend(str(folder))
    pytester.makepyfile((folder / "tests" / "test_calm.py").read_text())
    # The time of its rounds is a matter of the slow tests of gates.
    pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "--benchmark-disable").assert_outcomes(passed=3)


pytest_plugins = ["pytester"]


def test_the_picture_has_a_row_for_each_setting_of_the_quickstart():
    """The kept figures behind docs/curves.png are of the suite as it is: same rows, same seeds."""
    kept = json.loads((ROOT / "benchmarks" / "studies" / "shared" / "quickstart.json").read_text())["rows"]
    suite = tomllib.loads((ROOT / "fedaudit" / "suites" / "quickstart.toml").read_text())
    assert sorted(row["label"] for row in kept) == sorted(row["label"] for row in suite["methods"])
    assert all(sorted(row["seeds"]) == suite["grid"]["seed"] for row in kept)
    assert f"the {len(kept)} settings of that audit" in (ROOT / "README.md").read_text()
    for row in kept:
        value, low, high = row["accuracy"]
        assert low <= value <= high
