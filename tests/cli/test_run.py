"""`fedaudit run --method X` and nothing else: it learns on the embedded digits, or says that it did not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import reported

from fedaudit import registry, run
from fedaudit.cli.listing import summary
from fedaudit.errors import SettingError
from fedaudit.registry import find

METHODS = [name for name in registry.names("methods") if name != "constant"]


@pytest.fixture
def told(fedaudit, monkeypatch):
    """The setting that a command line comes to; nothing is run."""
    seen = []

    def no_run(setting, **_):
        seen.append(setting)
        raise SettingError("enough")

    def call(*words):
        monkeypatch.setattr("fedaudit.runtime.runner.run", no_run)
        _, _, err = fedaudit("run", *words)
        return seen[-1], err

    return call


def test_a_first_run_takes_settings_that_learn_and_says_so(told):
    setting, err = told("--method", "fke")
    assert (setting.set, setting.public) == (dict(find("fke").on_digits), 0.2)
    assert err.startswith("No --set given: using settings tuned for digits: public = 0.2, set = {'E_local': 10")


@pytest.mark.parametrize(
    "words",
    [("--set", "E=1"), ("--preset", "fedaf"), ("--dataset", "mnist"), ("--method", "outside:Fat")],
)
def test_whoever_says_how_to_train_is_heeded(told, words):
    setting, err = told(*words)
    assert setting.set == ({"E": 1} if "--set" in words else {})
    assert "tuned for digits" not in err


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_such_settings(name):
    cls = find(name)
    assert cls.on_digits
    assert cls.make(dict(cls.on_digits)), "and takes them"


WHAT_A_RUN_NEED_NOT_IMPORT = """
import sys, torch
from fedaudit.cli.main import main
try:
    main()
except SystemExit as e:
    assert not e.code, e.code
from fedaudit.training.fit import adam, fit, sgd
from fedaudit.training.losses import ce
model, rows = torch.nn.Linear(3, 2), (torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
for opt in (sgd(0.1, momentum=0.9), adam()):
    fit(model, ce, rows, opt=opt, batch=4, epochs=2, steps=None, rng=torch.Generator())
heavy = ["torch._dynamo", "scipy.special", "scipy.stats", "sklearn", "matplotlib", "torchvision", "opacus", "pandas"]
heavy += ["fedaudit.methods.datafree.dense", "fedaudit.privacy.mechanisms.laplace", "fedaudit.attack"]
heavy += ["fedaudit.reports"]
print([name for name in heavy if name in sys.modules])
"""


def test_a_run_without_noise_imports_only_what_it_needs(tmp_path):
    """Each of these takes as long as such a run itself: torch's compiler, scipy's functions, and all other methods."""
    words = ["run", "--clients", "2", "--rounds", "1", "--model", "mlp", "--set", "E=1", "--out", tmp_path / "run"]
    command = [sys.executable, "-c", WHAT_A_RUN_NEED_NOT_IMPORT, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "done"


def test_a_method_without_its_transfer_set_fails_before_it_begins(tmp_path):
    with pytest.raises(SettingError, match="fke needs a public transfer set: set --public"):
        run(method="fke", rounds=1, out=tmp_path / "a")


def test_near_chance_is_said_with_what_to_set(fedaudit, tmp_path):
    """26 % where guessing among four classes gives 25 %."""
    reported._save(tmp_path, "a", reported._record("fedavg", 0, 0.26, releases=True), [])
    _, out, _ = fedaudit("show", tmp_path / "runs" / "a")
    assert "NEAR CHANCE: on 100 test records it is not clearly above the 25 % of guessing." in out
    assert "Try --set E=5 --set B=16 --set eta=0.1, or more --rounds." in " ".join(out.split())
    reported._save(tmp_path, "b", reported._record("fedavg", 0, 0.6, releases=True), [])
    assert "NEAR CHANCE" not in fedaudit("show", tmp_path / "runs" / "b")[1]


def test_near_chance_under_dp_sgd_wants_other_settings(fedaudit, tmp_path):
    record = reported._record(
        "fedavg", 0, 0.26, privacy={"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}
    )
    reported._save(tmp_path, "a", record, [])
    _, out, _ = fedaudit("show", tmp_path / "runs" / "a")
    assert "Try larger batches and a larger learning rate" in " ".join(out.split())
    assert "Try --set E=5" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_run_with_these_settings_is_not_told_to_take_them(fedaudit, tmp_path):
    record = reported._record("fedavg", 0, 0.26, releases=True, set=dict(find("fedavg").on_digits))
    reported._save(tmp_path, "a", record, [])
    _, out, _ = fedaudit("show", tmp_path / "runs" / "a")
    assert "NEAR CHANCE" in out
    said = " ".join(out.split())
    assert "Try another --seed, --partition iid, a smaller learning rate, or more --rounds." in said


def test_what_clients_deploy_may_have_learnt_where_the_global_model_has_not():
    """A model that each client adapts is at chance before."""
    record = reported._record("fedavg", 0, 0.26, releases=True)
    assert record.result.last.clients.global_test.mean < 0.5
    record.result.last.clients.global_test.mean = 0.6886
    said = summary(record)
    assert any(line.startswith("  GLOBAL MODEL NEAR CHANCE: on 100 test records") for line in said)
    assert any("The clients' own models learnt: 68.86 %." in line for line in said)
    assert not any("nothing was learnt" in line for line in said)


def test_what_is_the_same_round_is_said_once():
    record = reported._record("fedavg", 0, 0.9, releases=True)
    record.result.chosen = record.result.last.model_copy(deep=True)
    once = summary(record)
    assert once[1] == "  last round, also the one chosen on validation data (2):"
    assert sum("global model, common test set" in line for line in once) == 1
    record.result.chosen.round = 1
    twice = summary(record)
    assert [line for line in twice if "round" in line and line.endswith(":")] == [
        "  last round (2):", "  round chosen on validation data (1):",
    ]  # fmt: skip
    assert sum("global model, common test set" in line for line in twice) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_the_first_run_of_every_method_learns(fedaudit, tmp_path, record_property, name, seed):
    """Well above chance, which is 10 %; or it is said."""
    code, out, err = fedaudit("run", "--method", name, "--seed", seed, "--out", tmp_path / "a", "--json")
    assert code == 0, err
    last = json.loads(out)["result"]["last"]
    reached = (last.get("global") or {}).get("test", {}).get("accuracy")
    reached = last["clients"]["global_test"]["mean"] if reached is None else reached
    said = "NEAR CHANCE" in fedaudit("show", tmp_path / "a")[1]
    record_property("accuracy", reached)
    record_property("said", said)
    assert reached > 0.3 or said, reached
