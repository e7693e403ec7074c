"""Protections of a suite: which policies a method gets, how they share an epsilon, and on which cells attacks are."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from fedaudit import registry
from fedaudit.errors import SettingError
from fedaudit.setting import Setting
from fedaudit.suite import protections
from fedaudit.suite.protections import Protection, chosen, kinds_of, variants
from fedaudit.suite.suite_file import read_suite, shipped

BOTH = Protection(
    name="both", epsilon=8.0, delta=4e-4, policies={"training": {}, "logits": {"sensitivity": "clip:2"}, "labels": {}}
)

SUITE = """
attacks = ["loss"]
[base]
rounds = 2
clients = 2
model = "mlp"
public = 0.1
[grid]
seed = [0, 1]
[[protections]]
name = "none"
[[protections]]
name = "DP-SGD"
epsilon = 8.0
policies = { training = { sensitivity = "clip:1" } }
[[protections]]
name = "messages"
epsilon = 8.0
policies = { logits = { sensitivity = "clip:1" }, prototypes = { sensitivity = "clip:1" } }
[[protections]]
name = "both"
epsilon = 8.0
policies = { training = { sensitivity = "clip:1" }, logits = { sensitivity = "clip:1" } }
[[extra]]
on = { privacy = [{}], seed = [1] }
attacks = ["entropy"]
[[methods]]
method = "fedavg"
set = { E = 1 }
under_dp_sgd = { set = { E = 3 } }
attacks = ["modified_entropy"]
[[methods]]
method = "mhat"
releases = { training = 7 }
[[methods]]
method = "local"
protections = ["none"]
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    file = tmp_path_factory.mktemp("suite") / "suite.toml"
    file.write_text(SUITE)
    return read_suite(file)


def test_an_epsilon_is_shared_evenly_over_the_policies_that_apply():
    """8 over two policies is 4 each, and 4e-4 is 2e-4 each: simple composition gives back the whole."""
    privacy = BOTH.privacy(frozenset({"logits", "weights"}))
    assert privacy == {
        "training": {"epsilon": 4.0, "delta": 2e-4},
        "logits": {"epsilon": 4.0, "delta": 2e-4, "sensitivity": "clip:2"},
    }


def test_policies_stay_if_none_applies_or_nothing_is_known():
    messages = Protection(name="messages", epsilon=6.0, policies={"logits": {}, "labels": {}})
    assert messages.privacy(frozenset({"weights"})) == {"logits": {"epsilon": 3.0}, "labels": {"epsilon": 3.0}}
    assert set(BOTH.privacy(None)) == set(BOTH.policies)


def test_equal_protections_of_a_method_are_one_cell(suite):
    """FedAvg sends no logits: "both" is DP-SGD for it. MHAT has all four."""
    cells = [cell for cell in suite.cells() if cell.seed == 0]
    kinds = [(cell.method, tuple(cell.privacy)) for cell in cells]
    assert kinds == [
        ("fedavg", ()),
        ("fedavg", ("training",)),
        ("fedavg", ("logits", "prototypes")),
        ("mhat", ()),
        ("mhat", ("training",)),
        ("mhat", ("logits",)),
        ("mhat", ("training", "logits")),
        ("local", ()),
    ]


def test_settings_under_dp_sgd_and_releases_are_for_cells_with_it(suite):
    of = {tuple(cell.privacy): cell for cell in suite.cells() if cell.method == "fedavg"}
    assert [of[key].set for key in ((), ("training",), ("logits", "prototypes"))] == [{"E": 1}, {"E": 3}, {"E": 1}]
    trained = [cell.privacy["training"] for cell in suite.cells() if "training" in cell.privacy]
    assert [policy.get("releases") for policy in trained if policy["epsilon"] == 4.0] == [7, 7]
    assert all("releases" not in cell.privacy["logits"] for cell in suite.cells() if "logits" in cell.privacy)


def test_extra_attacks_are_on_the_cells_that_they_name(suite):
    found = {(c.method, bool(c.privacy), c.seed): suite.wanted(c) for c in suite.cells()}
    assert found["mhat", False, 1] == ["loss", "entropy"]
    assert found["mhat", False, 0] == found["mhat", True, 1] == ["loss"]
    assert found["fedavg", True, 0] == ["loss", "modified_entropy"]  # a row's own attacks, also under DP-SGD


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('protections = ["none"]', 'protections = ["nothing"]', "'nothing' in .* is not a protection"),
        ("on = { privacy", "on = { privasy", r"Unknown setting 'privasy' in \[\[extra\]\]"),
    ],
)
def test_wrong_names_are_refused(tmp_path, old, new, message):
    (tmp_path / "suite.toml").write_text(SUITE.replace(old, new))
    with pytest.raises(SettingError, match=message):
        read_suite(tmp_path / "suite.toml")


def test_a_method_without_declared_traffic_has_the_kinds_of_its_messages(suite, tmp_path, monkeypatch):
    text = (
        "from fedaudit import Down, Method, Record, Up, private\nfrom torch import Tensor\n"
        "class Sent(Up):\n    p: Tensor = private('prototypes', via='data', unit='client')\n"
        "class Silent(Method):\n    pass\n"
    )
    (tmp_path / "silent_method.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    registry.trust()
    setting = suite.cells()[0].model_copy(update={"method": "silent_method:Silent", "set": {}})
    assert kinds_of(setting) == frozenset({"prototypes"})


def test_the_suite_of_all_methods_has_all_methods():
    suite = read_suite(shipped("all"))
    cells = suite.cells()
    assert {cell.method for cell in cells} == set(registry.names("methods"))
    for method in registry.names("methods"):
        plain = [cell for cell in cells if cell.method == method and not cell.privacy]
        assert {(cell.partition, cell.seed) for cell in plain} == {
            (partition, seed) for partition in ("iid", "dirichlet:0.3") for seed in (0, 1, 2)
        }
    epsilons = {round(sum(p["epsilon"] for p in cell.privacy.values()), 6) for cell in cells if cell.privacy}
    assert epsilons == {2.0, 8.0}
    assert suite.threats == ["server", "peer:0", "outsider"]


def test_only_suites_of_this_package_have_names():
    with pytest.raises(SettingError, match="quickstart"):
        shipped("everything")


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("name", "", False), ("name", "a", True), ("epsilon", 0.0, False), ("epsilon", 1e-9, True),
        ("epsilon", 0.5, True), ("delta", 0.0, False), ("delta", 1e-9, True), ("delta", 0.9, True),
        ("delta", 1.0, False),
    ],
)  # fmt: skip
def test_what_a_protection_may_be(name, value, taken):
    try:
        made = Protection(**{"name": "a", name: value})
    except ValidationError:
        made = None
    assert (made is not None) is taken


def test_which_changes_a_row_gets(monkeypatch):
    """Epsilon and delta of two policies; releases of the row; other settings under DP-SGD; equal changes once."""
    asked = []
    monkeypatch.setattr(protections, "kinds_of", lambda setting: asked.append(setting) or frozenset({"logits"}))
    row = {"method": "mhat", "releases": {"logits": 3, "labels": 4}, "under_dp_sgd": {"rounds": 9}}
    none = Protection(name="none")
    weak = Protection(name="weak", epsilon=6.0, policies={"logits": {"clip": 1}})
    again = Protection(name="again", epsilon=6.0, policies={"logits": {"clip": 1}, "labels": {}})
    setting = Setting.make()
    assert variants(row, setting, [none, weak, BOTH, again]) == [
        {"privacy": {}},
        {"privacy": {"logits": {"epsilon": 6.0, "clip": 1, "releases": 3}}},
        {
            "privacy": {
                "training": {"epsilon": 4.0, "delta": 2e-4},
                "logits": {"epsilon": 4.0, "delta": 2e-4, "sensitivity": "clip:2", "releases": 3},
            },
            "rounds": 9,
        },
    ]
    assert asked == [setting] * 3, "a protection without policies needs no kinds"
    assert chosen({"protections": ["both", "none"]}, [none, weak, BOTH]) == [none, BOTH]
    assert chosen({}, [none, weak]) == [none, weak]
    for wrong in ("none", ["none", "stranger"]):
        with pytest.raises(SettingError, match=r"is not a protection of the suite\. Choose from none, weak"):
            chosen({"protections": wrong}, [none, weak])


@pytest.mark.parametrize(("rounds", "planned"), [(0, [1, 2]), (1, [1, 2]), (7, [1, 2, 7])])
def test_kinds_are_those_of_the_first_the_second_and_the_last_round(rounds, planned, monkeypatch):
    @dataclass(frozen=True)
    class Planned:
        t: int

    asked = []

    def released(method, plans):
        asked.append((method, [plan.t for plan in plans]))
        return frozenset({"logits"})

    monkeypatch.setattr("fedaudit.runtime.planned_traffic.make_plan", lambda setting: (setting, Planned(5)))
    monkeypatch.setattr("fedaudit.runtime.applicability.released_kinds", released)
    monkeypatch.setattr(protections, "_kinds", inspect.unwrap(protections._kinds))
    setting = Setting.make(rounds=rounds, seed=4, privacy={"logits": {"epsilon": 1.0}})
    assert kinds_of(setting) == frozenset({"logits"})
    assert asked == [(setting.model_copy(update={"seed": 0, "privacy": {}}), planned)]
