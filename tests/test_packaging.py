"""What is shipped: every module in the wheel, one copy of every class, nothing heavy imported unasked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from suite_tools import Born

ROOT = Path(__file__).parent.parent
FOLDERS = ("methods", "attacks", "reports")


def sources():
    """Every module and data file that an installed fedaudit needs, as its path in the wheel."""
    files = [
        p for p in (ROOT / "fedaudit").rglob("*") if not any(part in FOLDERS for part in p.relative_to(ROOT).parts)
    ]
    found = {p.relative_to(ROOT).as_posix() for p in files}
    for folder in FOLDERS:
        found |= {f"fedaudit/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / folder).rglob("*")}
    return {name for name in found if name.endswith((".py", ".toml", ".html", ".md", ".typed", ".css", ".js"))}


def test_the_wheel_holds_every_module(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert sources() <= inside, sources() - inside
    assert not [name for name in inside if name.startswith(("methods/", "attacks/", "reports/", "tests/"))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_second_copy_of_a_package_is_refused(folder):
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"Write `import fedaudit.{folder}`" in done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_checkout_without_links_says_so(folder, tmp_path):
    """What git writes where a system has no symbolic links: a text file that holds the link's target."""
    (tmp_path / "fedaudit").mkdir()
    (tmp_path / "fedaudit" / "__init__.py").write_text((ROOT / "fedaudit" / "__init__.py").read_text())
    code = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fedaudit"]
    for other in FOLDERS:
        (tmp_path / "fedaudit" / other).mkdir()
    assert subprocess.run(code, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "fedaudit" / folder).rmdir()
    (tmp_path / "fedaudit" / folder).write_text(f"../{folder}")
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{folder} is a text file. In the repository it is a symbolic link" in done.stderr
    assert "core.symlinks" in done.stderr


def test_the_package_says_posix():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "Operating System :: POSIX" in about["classifiers"]


def test_runs_from_a_bare_checkout_without_opacus_and_ray(nursery_at, tmp_path):
    ours, theirs = os.pipe()
    Born(nursery_at, [theirs], main="bare", words=[str(tmp_path)], cwd=str(ROOT), env=dict(os.environ))
    os.close(theirs)
    with open(ours) as told:
        assert told.read() == f"came through {ROOT / 'fedaudit' / '__init__.py'}"
    assert (tmp_path / "a" / "record.json").exists()


def test_the_harness_knows_no_method_attack_or_report_by_name():
    names = {p.stem for folder in ("methods", "attacks") for p in (ROOT / folder).rglob("*.py")} - {
        "__init__",
        "local",
        "loss",
        "participation",  # a setting, too
        "constant",  # a schedule of the learning rate, too
    }
    for path in (ROOT / "fedaudit").rglob("*.py"):
        if any(part in FOLDERS for part in path.relative_to(ROOT).parts) or path.parts[-2:] in (
            ("cli", "show.py"),  # reports
            ("cli", "audit.py"),
            ("cli", "method_place.py"),
            ("cli", "starters.py"),  # a test that it writes for users compares with a method
            ("fedaudit", "setting.py"),
            ("fedaudit", "__init__.py"),  # what the package offers
        ):
            continue
        text = path.read_text()
        assert not re.search(r"(from|import) fedaudit\.(methods|attacks|reports)", text), path
        told = re.search(rf"[\"']({'|'.join(sorted(names))})[\"']", text)
        assert not told, f"{path} names {told[1]}"


def test_nothing_pickles():
    for path in [*ROOT.glob("fedaudit/**/*.py"), *(p for f in FOLDERS for p in (ROOT / f).glob("**/*.py"))]:
        assert not re.search(
            r"^\s*(import|from) (pickle|cloudpickle|dill|joblib|marshal|shelve)|(?<!safetensors\.)torch\.(load|save)\(",
            path.read_text(),
            re.M,
        ), path


def test_versions_agree():
    from fedaudit import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "tool", [["ruff", "check"], ["ruff", "format", "--check"], pytest.param(["mypy"], marks=pytest.mark.slow)]
)
def test_lint_and_types(tool):
    """Types take a minute without a cache, so they are checked by `make lint`, which .ci/run calls, and here slowly."""
    done = subprocess.run(
        [sys.executable, "-m", *tool, *([] if tool[0] == "mypy" else ["."])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


# --- a release ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = folder.glob("*.whl")
    return found


def test_the_news_can_be_read_in_two_minutes():
    """About 200 words a minute, and the newest version stands first."""
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = text.split("\n## ")[1]
    assert newest.startswith("0.2.0")
    assert len(newest.split()) <= 400


@pytest.mark.slow
def test_twine_accepts_the_wheel(wheel):
    pytest.importorskip("twine", reason="needs twine, in the extra `test`")
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(wheel)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_alone_runs_a_method_a_private_run_an_attack_and_a_report(wheel, tmp_path):
    """In an environment that sees no checkout. Packages of this one are its dependencies: nothing is downloaded."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    (site,) = venv.glob("lib/python*/site-packages")
    here = Path(pytest.__file__).parents[1]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    # Without the path to a checkout: pip would take what is there for the installed package.
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    assert subprocess.run([*pip, str(wheel)], env=env, check=False).returncode == 0
    # Dependencies come from here. The wheel's own folder is first in the path, so its fedaudit is found.
    (site / "dependencies.pth").write_text(f"{here}\n")

    def fedaudit(*words):
        done = subprocess.run(
            [str(venv / "bin" / "fedaudit"), *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    where = subprocess.run(
        [str(python), "-c", "import fedaudit; print(fedaudit.__file__)"], cwd=tmp_path, env=env, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert where.returncode == 0, where.stderr
    assert str(site) in where.stdout
    small = ("--model", "mlp", "--clients", "2", "--rounds", "1", "--partition", "iid")
    fedaudit("run", *small, "--out", "runs/a")
    private = ("--set", "E=3", "--set", "B=64", "--set", "eta=0.5", "--privacy", "training:eps=8,clip=1,delta=5e-4")
    assert "epsilon = " in fedaudit("run", *small, *private, "--out", "runs/dp")
    fedaudit("attack", "runs/a", "--attack", "loss")
    fedaudit("report", "runs", "--format", "html,md,csv,latex")
    assert "What leaks" in (tmp_path / "runs" / "report.html").read_text()
