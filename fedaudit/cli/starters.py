"""The files that `fedaudit init` writes. Each of them runs as it is."""

from __future__ import annotations

from pathlib import Path

from fedaudit.errors import SettingError, unknown

METHOD = '''"""A method of your own: FedAvg to begin with. Run it: fedaudit run --method STEM:Mine --rounds 5"""

from fedaudit import NUMBER, Down, Method, Record, State, Up, ce, load, private, sgd, state_of, weighted_mean


class Global(Down):
    w: State


class Local(Up):  # every field that leaves a client says what it is
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


class Averaged(Record):
    w: State


class Mine(Method):
    E: int = 5  # hyper-parameters: --set E=2
    B: int = 16
    eta: float = 0.1

    def init(self, server):
        return Averaged(state_of(server.model()))

    def round(self, s, server, cohort):  # on the server
        replies = cohort.ask(self.client_update, Global(s.w))  # the only way to reach a client
        w, n = ({k: getattr(r, name) for k, r in replies.items()} for name in ("w", "n"))
        return Averaged(weighted_mean(w, n))

    def client_update(self, client, msg):  # on client k
        load(client.model, msg.w)
        client.fit(ce, epochs=self.E, batch=self.B, opt=sgd(self.eta))
        return Local(state_of(client.model), len(client))

    def predictor(self, s, server):  # the global model, if there is one
        return server.model(state=s.w)

    def traffic(self, plan):  # bytes of a round, as a paper counts them; every run is checked against it
        return {
            ("down", "Global.w"): plan.state() * len(plan.asked(0)),
            ("up", "Local.w"): plan.state() * len(plan.replied(0)),
            ("up", "Local.n"): NUMBER * len(plan.replied(0)),
        }
'''

ATTACK = '''"""An attack of your own. Run it: fedaudit attack RUN --attack STEM:Margin"""

import torch

from fedaudit import Attack, Claims


class Margin(Attack):
    needs = frozenset({"weights"})  # kinds of release it needs; if the threat sees none, the record says so

    def run(self, scene):  # has the threat's view, candidates x and y, auxiliary data; not the truth
        message, field = scene.released("weights")[-1]
        model = scene.model(scene.arch(scene.target), message[field])
        with torch.no_grad():
            return Claims(model(scene.x).softmax(1).gather(1, scene.y[:, None])[:, 0])  # one score per candidate
'''

SUITE = (
    Path(__file__).parents[1] / "suites" / "starter.toml"
).read_text()  # a file of its own, because it names a method

TESTS = '''"""Gates for a method of your own. Run them: pytest NAME. Limits are kept, broken, or cannot be told."""

import pytest

METHOD = "my_method:Mine"  # `fedaudit init method` writes it
SETTING = {"dataset": "digits", "clients": 2, "partition": "iid", "model": "mlp"}
DP = {"training": {"epsilon": 8.0, "delta": 1e-3, "sensitivity": "clip:1"}}  # DP-SGD in every local training


@pytest.mark.comm_budget(uplink="40 kB", downlink="40 kB")  # per client and round
@pytest.mark.accuracy_floor(0.8)
@pytest.mark.leak_budget(attack="loss", auc=0.7)  # fails where the attack is shown to reach more, by its interval
def test_what_it_sends_reaches_and_leaks(federated_run):
    federated_run(method=METHOD, rounds=3, set={"E": 3}, **SETTING)


@pytest.mark.privacy_budget(epsilon=8, delta=1e-3)  # by the ledger, all rounds together
@pytest.mark.claims_hold  # the noise that was sent is as large as the ledger says
def test_what_it_guarantees(federated_run):
    federated_run(method=METHOD, rounds=2, privacy=DP, set={"E": 1, "B": 64, "eta": 0.5}, **SETTING)


def test_how_fast_it_is(federated_benchmark):  # rounds of both in turns; needs pytest-benchmark
    limits = {"max_ratio": 1.3, "max_bytes_ratio": 1.0, "max_flops_ratio": 1.0}
    federated_benchmark(method=METHOD, relative_to="fedavg", set={"E": 1, "B": 64}, **limits, **SETTING)
'''

CI = """# Checks on every pull request what a method sends, guarantees and leaks, and how fast it is.
name: federated
on: [pull_request]
env:
  FEDAUDIT: third_party/fedaudit  # where fedaudit is: a checkout (say, a submodule), a wheel, or git+https://...
jobs:
  communication:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
        with: { submodules: true }
      - uses: actions/setup-python@v5
        with: { python-version: "3.12" }
      - run: pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu
      - run: pip install "$FEDAUDIT"
      - run: fedaudit run --method my_method:Mine --rounds 5 --out run
      - run: fedaudit check run --budget budgets.toml --format github
  privacy:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
        with: { submodules: true }
      - uses: actions/setup-python@v5
        with: { python-version: "3.12" }
      - run: pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu
      - run: pip install pytest "$FEDAUDIT"
      - run: pytest -k "guarantees or leaks" --fedaudit-format github
  performance:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
        with: { fetch-depth: 0, submodules: true }
      - uses: actions/setup-python@v5
        with: { python-version: "3.12" }
      - run: pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu
      - run: pip install pytest pytest-benchmark "$FEDAUDIT"
      - run: git worktree add ../base ${{ github.event.pull_request.base.sha }}
      # Both on this machine, one after the other. A base without these tests leaves nothing to compare with.
      - run: pytest -k fast --benchmark-storage "$GITHUB_WORKSPACE/.benchmarks" --benchmark-save base || true
        working-directory: ../base
      - run: >
          pytest -k fast --benchmark-storage "$GITHUB_WORKSPACE/.benchmarks" --benchmark-save change
          --benchmark-compare --benchmark-compare-fail median:50% --fedaudit-format github
      - uses: actions/upload-artifact@v4
        if: always()
        with: { name: benchmarks, path: .benchmarks, include-hidden-files: true }
"""

BUDGETS = """# Ceilings and floors for `fedaudit check RUN --budget budgets.toml`. It is an error if one matches no run.
[[budget]]
direction = "up"
max = "60 kB"            # per client and round; for other sums: per = "round" or "run"

[[budget]]
metric = "accuracy"      # also epsilon, auc, tpr, refuted (of attacked and audited runs), flops, peak_memory
min = 0.8
"""

# For each thing to begin: the file's usual name and its content.
STARTERS = {
    "method": ("my_method.py", METHOD),
    "attack": ("my_attack.py", ATTACK),
    "suite": ("suite.toml", SUITE),
    "tests": ("test_my_method.py", TESTS),
}
WORKFLOW = Path(".github") / "workflows" / "federated.yml"


def begin(what: str, path: Path | None) -> list[Path]:
    """Write the starter file and return its path; overwrite nothing.

    For `ci` that is the workflow with its budgets, and the tests and the method that the workflow runs if there are
    none yet.
    """
    if what not in (*STARTERS, "ci"):
        raise SettingError(unknown("thing to begin", what, [*STARTERS, "ci"]))
    if what == "ci":
        files = {path or WORKFLOW: CI, Path("budgets.toml"): BUDGETS}
        missing = {Path(name): text for name, text in (STARTERS["tests"], STARTERS["method"])}
        extra = {file: text for file, text in missing.items() if not (file.exists() or file.is_symlink())}
    else:
        usual, text = STARTERS[what]
        files, extra = {path or Path(usual): text}, {}
    for file, text in files.items():
        if file.exists() or file.is_symlink():
            raise SettingError(_in_the_way(file, text, what))
    files |= extra
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_filled(file, text))
    return list(files)


def _filled(file: Path, text: str) -> str:
    return text.replace("NAME", file.name).replace("STEM", file.stem)


def _in_the_way(file: Path, text: str, what: str) -> str:
    """Return why a file is not written, and what to do: a starter that is there already may be used as it is."""
    if file.is_file() and file.read_bytes() == _filled(file, text).encode():
        by = f"`fedaudit init {what}`" + (" or `fedaudit init ci`" if what in ("tests", "method") else "")
        return f"{file} is there already, as {by} wrote it, and was not changed. Use it, or name another file."
    return f"{file} exists already and was not changed. Name another file."
