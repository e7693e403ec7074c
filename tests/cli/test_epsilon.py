"""`fedaudit epsilon ...`, as a shell sees it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from fedaudit import run
from fedaudit.cli.epsilon import print_audits
from fedaudit.cli.listing import _audit_line
from fedaudit.registry import find
from fedaudit.runtime.run_record import EpsilonAudit, read_record


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    privacy = {"soft_labels": {"epsilon": 1.0, "delta": 1e-2}}
    setting = {"model": "mlp", "partition": "iid", "clients": 2, "rounds": 1, "public": 0.1, "canaries": 30, "aux": 0.5}
    quick = dict(find("dsfl").quick)
    run(method="dsfl", set=quick, privacy=privacy, eval_clients=False, out=folder, **setting)
    return folder


def test_one_run_reference_values(fedaudit):
    counts = ("--canaries", 1000, "--guesses", 1000, "--correct", 700)
    words = ("epsilon", "one-run", *counts, "--delta", "1e-5", "--confidence", "0.95")
    code, out, _ = fedaudit(*words, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["steinke"]["epsilon"] == pytest.approx(0.73174, abs=5e-6)
    assert found["f_dp"]["epsilon"] == pytest.approx(1.37198, abs=5e-6)
    code, out, _ = fedaudit(*words, "--claim", 1)
    assert "epsilon >= 0.73174" in out
    assert "epsilon >= 1.37198" in out
    assert out.index("epsilon = 1: not refuted") < out.index("epsilon = 1: suspicious (p = 0.00")
    assert "private" not in out
    assert json.loads(fedaudit(*words[:-1], "0.5", "--json")[1])["steinke"]["epsilon"] > 0.73174
    assert "f_dp" not in json.loads(
        fedaudit("epsilon", "one-run", "--canaries", 9, "--correct", 9, "--delta", 0, "--json")[1]
    )


def test_a_refuted_claim_stops_a_build_where_that_is_asked_for(fedaudit):
    """700 of 1000 guesses: at least 0.73 by Steinke's bound, 1.37 by f-DP. Epsilon = 0.5 is refuted; of 1 f-DP says p =
    0.001, by which no build is stopped; 3 is beyond both."""
    words = ("epsilon", "one-run", "--canaries", 1000, "--correct", 700)
    assert fedaudit(*words, "--claim", 0.5)[0] == 0
    assert fedaudit(*words, "--claim", 0.5, "--fail-if-refuted")[0] == 1
    assert fedaudit(*words, "--claim", 0.5, "--fail-if-refuted", "--json")[0] == 1
    assert fedaudit(*words, "--claim", 1, "--fail-if-refuted")[0] == 0
    assert fedaudit(*words, "--claim", 3, "--fail-if-refuted")[0] == 0
    code, _, err = fedaudit(*words, "--fail-if-refuted")
    assert (code, "needs a claim to refute" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--canaries", 10, "--correct", 11), "11 correct of 10 guesses on 10 canaries is impossible"),
        (("--canaries", -1, "--correct", 0), r"greater than or equal to 1\b|1<=x"),  # as typer 0.29 says it, and 0.20
        (("--canaries", 10, "--correct", 5, "--delta", 2), "delta = 2"),
        (("--canaries", 10, "--correct", 5, "--delta", "nan"), "delta = nan"),
        (("--canaries", 10, "--correct", 5, "--confidence", 1), "confidence = 1"),
        (("--canaries", 10, "--correct", 5, "--claim", "inf"), "claim = inf"),
        (("--canaries", "ten", "--correct", 5), "Invalid value for '--canaries'"),
        (("--correct", 5), "--canaries"),
    ],
)
def test_bad_numbers(fedaudit, options, words):
    code, out, err = fedaudit("epsilon", "one-run", *options)
    assert (code, out) == (2, "")
    assert re.search(words, err)


def scores_file(path, shift, n=1000, seed=0, order=None):
    rng = np.random.default_rng(seed)
    rows = [f"{s},{int(i < n)}" for i, s in enumerate(np.concatenate([rng.normal(shift, 1, n), rng.normal(0, 1, n)]))]
    if order is not None:
        rows = [rows[i] for i in np.random.default_rng(order).permutation(2 * n)]
    path.write_text("score,member\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("correction", ["bonferroni", "split"])
def test_from_scores(fedaudit, tmp_path, correction):
    """A Gaussian toy (truth 4.377) is bounded away from 0 and below the truth; null scores give 0; the order of rows
    changes nothing."""
    options = ("--delta", 1e-5, "--correction", correction, "--json")
    ask = lambda path: fedaudit("epsilon", "from-scores", path, *options)  # noqa: E731
    code, out, _ = ask(scores_file(tmp_path / "a.csv", 1.0, 10_000))
    found = json.loads(out)["from_scores"]
    assert code == 0
    assert 1.7 <= found["epsilon"] < 4.377
    assert found["detail"]["tp"] + found["detail"]["fn"] == found["trials"] / 2
    assert ask(scores_file(tmp_path / "b.csv", 1.0, 10_000, order=1))[1] == out
    assert json.loads(ask(scores_file(tmp_path / "null.csv", 0.0))[1])["from_scores"]["epsilon"] == 0


def test_a_claim_against_scores(fedaudit, tmp_path):
    path = scores_file(tmp_path / "a.csv", 2.0)
    _, out, _ = fedaudit("epsilon", "from-scores", path, "--claim", 1, "--json")
    against = json.loads(out)["from_scores"]["against"]
    assert (against["verdict"], against["claim"], against["p_value"] < 0.05) == ("refuted", 1, True)
    _, out, _ = fedaudit("epsilon", "from-scores", path, "--claim", 4)
    assert "epsilon = 4: not refuted (p = 1, 2000 trials)" in out


def test_what_so_few_trials_could_not_refute_is_not_said_to_stand(fedaudit, tmp_path):
    """Not even if each guess had been right: 1,000 of either class show 4.9 at most, 20 canaries 1.8 and 4.7."""
    path = scores_file(tmp_path / "a.csv", 2.0)
    out = fedaudit("epsilon", "from-scores", path, "--claim", 8)[1]
    assert "These trials could show at most epsilon = 4.9" in out
    assert "epsilon = 8: cannot tell (p = 1, 2000 trials)" in out
    words = ("epsilon", "one-run", "--canaries", 20, "--correct", 12, "--claim", 3)
    assert [
        line.strip() for line in fedaudit(*words)[1].splitlines() if "epsilon = 3" in line or "These trials" in line
    ] == [
        "These trials could show at most epsilon = 1.82209",
        "epsilon = 3: cannot tell (p = 1, 20 trials)",
        "These trials could show at most epsilon = 4.73387",
        "epsilon = 3: cannot tell (p = 1, 20 trials)",  # 4.7 at 0.05, less at the level of refuting
    ]
    found = json.loads(fedaudit(*words, "--json")[1])["steinke"]
    assert (found["against"]["verdict"], round(found["ceiling"], 3)) == ("cannot tell", 1.822)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no column score and no column member"),
        (
            "points,member\n1,1\n",
            "has no column score: its first line must be score,member. It has: points, member.",
        ),
        ("score,member\n", "holds no scores"),
        ("score,member\n1,1\nnan,0\n", "line 3: score is 'nan', which no threshold can rank"),
        ("score,member\n1,1\n-inf,0\n", "line 3: score is '-inf'"),
        ("score,member\n1,1\nhigh,0\n", "line 3: score is 'high', which is not a number"),
        ("score,member\n1,1\n2\n", "line 3: member is None; write 0 or 1"),
        ("score,member\n1,1\n2,maybe\n", "line 3: member is 'maybe'; write 0 or 1"),
        ("score,member\n1,1\n2,1\n", "there are no non-members"),
        ("score,member\n1,false\n2,0\n", "there are no members"),
        (b"\xff\xfe\x00PK", "is not a CSV file"),
    ],
)
def test_bad_files(fedaudit, tmp_path, content, words):
    path = tmp_path / "scores.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = fedaudit("epsilon", "from-scores", path)
    assert (code, out) == (2, "")
    assert re.search(words, err)
    assert "Traceback" not in err


def test_a_refuted_row_without_a_bound_leaves_its_place_empty(capsys):
    """0 would say that the test found nothing. `show` has the same words."""
    facts = {
        "test": "residuals", "kind": "training", "threat": "server", "claim": "training, all rounds",
        "claim_epsilon": 3.0, "ledger_epsilon": 3.5, "p_value": 1e-15, "trials": 70, "confidence": 0.95, "delta": 1e-5,
        "method": "m", "how": "it holds other noise",
    }  # fmt: skip
    rows = [("refuted", 0.0, ""), ("refuted", 4.25, "at least 4.25"), ("not refuted", 0.0, "at least 0")]
    for verdict, bound, words in rows:
        audit = EpsilonAudit(**facts, verdict=verdict, lower_bound=bound)
        print_audits([audit], "a", False)
        row = next(line for line in capsys.readouterr().out.splitlines() if "training," in line and "1e-15" in line)
        cells = [cell.strip() for cell in row.split("\u2502")[1:-1]]
        assert cells[1:5] == ["3", "3.5", words.removeprefix("at least "), "1e-15"]
        least = f"{words}: " if words else ""
        assert _audit_line(audit).endswith(f"ledger 3.5, {least}{verdict} (p = 1e-15, 70 trials, residuals)")


def test_missing_files_and_folders(fedaudit, tmp_path):
    for words in (("from-scores", tmp_path / "no.csv"), ("release-path", tmp_path / "no"), ("audit", tmp_path / "no")):
        code, _, err = fedaudit("epsilon", *words)
        assert code == 2
        assert "There is no file" in err or "holds no run" in err
    assert fedaudit("epsilon", "from-scores", tmp_path)[0] == 2
    assert (
        "Did you mean 'split'"
        in fedaudit("epsilon", "from-scores", scores_file(tmp_path / "a.csv", 1.0, 50), "--correction", "splt")[2]
    )


def test_audits_of_a_run(fedaudit, a_run):
    code, out, _ = fedaudit("epsilon", "release-path", a_run, "--kind", "soft_labels", "--trials", 50, "--json")
    assert code == 0
    release, as_gaussian = json.loads(out)
    assert as_gaussian["lower_bound"] <= 1
    code, out, _ = fedaudit("epsilon", "audit", a_run, "--threat", "outsider", "--json")
    assert code == 0
    by_run = json.loads(out)
    keys = {
        "claim_epsilon", "ledger_epsilon", "lower_bound", "p_value", "trials", "confidence", "delta", "verdict", "kind",
        "method", "how", "threat",
    }  # fmt: skip
    for found in (release, as_gaussian, *by_run):
        assert keys <= found.keys()
        assert found["verdict"] in ("not refuted", "cannot tell")
        assert found["confidence"] == 0.95
    assert (release["claim_epsilon"], release["trials"]) == (1, 100)
    assert {found["trials"] for found in by_run} == {30}
    assert len(read_record(a_run).audits) == 2 + len(by_run)
    out = " ".join(fedaudit("show", a_run)[1].split())  # lines are broken where the terminal ends
    assert out.count("not refuted (p = ") + out.count("cannot tell (p = ") == 2 + len(by_run)
    code, out, _ = fedaudit("epsilon", "residuals", a_run, "--json")
    assert code == 0
    assert {(found["test"], found["verdict"]) for found in json.loads(out)} <= {
        ("residuals", "not refuted"), ("residuals", "cannot tell")
    }  # fmt: skip
    _, out, _ = fedaudit("epsilon", "audit", a_run, "--threat", "outsider", "--guesses", 5)
    assert "of 5 guesses right on 30 pairs of mislabelled canaries" in out
    assert fedaudit("epsilon", "audit", a_run, "--client", "first")[0] == 2


def test_help_imports_nothing_heavy():
    """Of each module of commands one, and of epsilon's all."""
    epsilon = [f"epsilon {word}" for word in ("", "one-run", "from-scores", "release-path", "audit")]
    commands = [[*word.split(), "--help"] for word in ("", "run", "audit", "compare", "privacy", *epsilon)]
    code = f"import sys\nfrom fedaudit.cli import main as cli\nfor words in {commands}:\n"
    code += "    sys.argv = ['fedaudit', *words]\n    try: cli.main()\n    except SystemExit: pass\n"
    code += (
        "    heavy = {'torch', 'numpy', 'scipy', 'pandas', 'sklearn', 'matplotlib', 'opacus', 'flwr', 'cryptography'}\n"
    )
    code += "    heavy |= {'pydantic', 'importlib.metadata', 'fedaudit.setting'} if not words[1:] else set()\n"
    code += "    assert not heavy & sys.modules.keys(), f'heavy: {words}: {heavy & sys.modules.keys()}'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(commands)


@pytest.mark.parametrize(("ps", "fails"), [((6e-4, 8e-4), False), ((4e-4, 8e-4), True), ((6e-4,), True)])
def test_several_bounds_share_one_level(ps, fails, monkeypatch):
    """At 1 in 1,000 for all bounds together, p-values of 6 and 8 in 10,000 refute nothing; one alone of 6 does."""
    from types import SimpleNamespace

    import typer

    from fedaudit.cli import epsilon as command

    class Told:
        def __init__(self, p):
            self.confidence, self.epsilon, self.delta, self.method, self.assumes, self.p = 0.95, 1.0, 1e-5, "m", "", p

        def against(self, claim):
            return SimpleNamespace(p_value=self.p, claim=claim, trials=9, verdict="")

        def p_value(self, claim):
            return 1e-9

    monkeypatch.setattr(command, "replace", lambda one, **more: SimpleNamespace(**{**vars(one), **more}))
    bounds = {str(i): Told(p) for i, p in enumerate(ps)}
    if fails:
        with pytest.raises(typer.Exit):
            command._print_bounds(bounds, bounds, 1.0, False, True)
    else:
        command._print_bounds(bounds, bounds, 1.0, False, True)
