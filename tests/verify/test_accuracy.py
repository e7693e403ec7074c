"""Accuracies and published models, compared as on one machine type and as on another."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit.runtime.scores import Accuracy, GlobalScores, Spread, Utility
from fedaudit.stats import wilson
from fedaudit.verify import accuracy
from fedaudit.verify.finding import Findings


def share(hits, n):
    low, high = wilson(hits, n)
    return Accuracy(accuracy=hits / n, low=low, high=high, n=n)


def spread(*each):
    mean = sum(each) / len(each)
    return Spread(mean=mean, std=(sum((x - mean) ** 2 for x in each) / len(each)) ** 0.5, each=list(each))


def utility(hits=800, n=1000, clients=(0.5, 0.75), small=3):
    scores = GlobalScores(test=share(hits, n), local_test=spread(*clients), test_by_domain={"d": share(small, 10)})
    return Utility.model_validate({"global": scores})


@pytest.mark.parametrize("elsewhere", ["", "another machine"])
@pytest.mark.parametrize(
    ("now", "here", "there"),
    [
        ({}, [], []),
        ({"hits": 801}, ["global.test.accuracy", "global.test.low", "global.test.high"], []),
        ({"hits": 789}, ["global.test.accuracy"], ["global.test"]),  # 0.011 apart
        ({"hits": 811}, ["global.test.accuracy"], ["global.test"]),
        ({"small": 5}, ["global.test_by_domain.d.accuracy"], []),  # two of ten records
        ({"small": 6}, ["global.test_by_domain.d.accuracy"], ["global.test_by_domain.d"]),
        ({"clients": (0.55, 0.79)}, ["global.local_test"], []),  # the mean by 0.045
        ({"clients": (0.6, 0.78)}, ["global.local_test"], ["global.local_test"]),  # by 0.065
    ],
)
def test_a_few_records_may_differ_on_another_machine_type(now, here, there, elsewhere):
    case = SimpleNamespace(found=Findings(), other_machine=elsewhere)
    same = accuracy.compare_utility(case, "f", "rounds.3.utility", utility(), utility(**now), "note")
    found = [one.field for one in case.found.list if one.verdict == "contradicted"]
    expected = there if elsewhere else here
    assert same is not bool(expected)
    assert bool(found) is bool(expected)
    assert all(any(field.startswith(f"rounds.3.utility.{place}") for field in found) for place in expected)
    if elsewhere:
        assert found == [f"rounds.3.utility.{place}" for place in there]
    assert ("recomputed" in [one.verdict for one in case.found.list]) is same


def test_a_score_that_the_other_lacks_is_no_match_anywhere():
    case = SimpleNamespace(found=Findings(), other_machine="another machine")
    bare = Utility.model_validate({"global": GlobalScores(test=share(800, 1000))})
    assert not accuracy.compare_utility(case, "f", "at", utility(), bare, "note")


def test_figures_that_follow_from_others():
    """3 of 8 records, whatever digits are left; of clients the mean, and the deviation of all of them."""
    low, high = wilson(3, 8)
    told = Accuracy.model_construct(accuracy=0.3751, low=0.1, high=0.9, n=8)
    assert accuracy._derived(told) == [("accuracy", 0.3751, 0.375), ("low", 0.1, low), ("high", 0.9, high)]
    empty = Accuracy.model_construct(accuracy=0.5, low=0.0, high=1.0, n=0)
    assert accuracy._derived(empty)[0] == ("accuracy", 0.5, 0.5)
    beyond = Accuracy.model_construct(accuracy=1.5, low=0.0, high=1.0, n=8)
    assert accuracy._derived(beyond)[1][2] == wilson(8, 8)[0], "no more hits than records"
    below = Accuracy.model_construct(accuracy=-0.5, low=0.0, high=1.0, n=8)
    assert accuracy._derived(below)[2][2] == wilson(0, 8)[1]
    of = Spread(mean=0.1, std=0.2, each=[0.25, 0.75])
    assert accuracy._derived(of) == [("mean", 0.1, 0.5), ("std", 0.2, pytest.approx(0.25))]
    assert accuracy._derived(Spread(mean=0.1, std=0.2, each=[])) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"numbers": [1, 3]}, ["rounds.round.1", "setting.rounds"]),
        ({"wanted": 3}, ["setting.rounds"]),
        ({"numbers": []}, ["setting.rounds"]),
        ({"result": "another"}, ["result"]),
    ],
)
def test_rounds_are_numbered_and_as_many_as_the_setting_says(change, named, monkeypatch):
    monkeypatch.setattr(accuracy, "results", lambda rounds: "the result")
    facts = {"numbers": [1, 2], "wanted": 2, "result": "the result"} | change
    rounds = [SimpleNamespace(round=t, utility=None) for t in facts["numbers"]]
    record = SimpleNamespace(rounds=rounds, result=facts["result"], setting=SimpleNamespace(rounds=facts["wanted"]))
    case = SimpleNamespace(found=Findings(), record=record)
    accuracy.check_sums(case)
    assert [one.field for one in case.found.list if one.verdict == "contradicted"] == named
    assert case.found.list[0].figure == "intervals and means"


def test_an_interval_is_that_of_its_hits(monkeypatch):
    monkeypatch.setattr(accuracy, "results", lambda rounds: None)
    wrong = utility()
    wrong.global_.test.low -= 0.01
    wrong.global_.local_test.mean += 2e-6
    rounds = [SimpleNamespace(round=1, utility=utility()), SimpleNamespace(round=2, utility=wrong)]
    record = SimpleNamespace(rounds=rounds, result=None, setting=SimpleNamespace(rounds=2))
    case = SimpleNamespace(found=Findings(), record=record)
    accuracy.check_sums(case)
    assert [one.field for one in case.found.list if one.verdict == "contradicted"] == [
        "rounds.1.utility.global.test.low", "rounds.1.utility.global.local_test.mean",
    ]  # fmt: skip
    assert "intervals and means" not in [one.figure for one in case.found.list if one.verdict == "recomputed"]


@pytest.mark.parametrize("elsewhere", ["", "another machine"])
def test_models_are_the_same_to_the_bit_or_nearly(elsewhere):
    case = SimpleNamespace(other_machine=elsewhere)
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    assert accuracy._close(one, one.clone(), case)
    assert accuracy._close(nan, nan.clone(), case)
    assert not accuracy._close(nan, torch.tensor([2.0, float("nan")]), case)
    assert not accuracy._close(one, nan, case)
    assert accuracy._close(one, one + 1e-3, case) is bool(elsewhere)
    assert not accuracy._close(one, one + 1e-2, case)
    assert accuracy._close(torch.zeros(1), torch.tensor([5e-6]), case) is bool(elsewhere)


class Store:
    clients = (2, 7)

    def server(self, name):
        assert name == "server.4"
        return b"state"


@pytest.mark.parametrize("deployed", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"published": ["client-000002.safetensors"]}, ["published"]),
        ({"differs": "client-000007.safetensors"}, []),  # `_differs` notes it
        ({"stranger": True}, ["the file"]),
    ],
)
def test_published_models_are_those_of_the_checkpoint(deployed, change, named, tmp_path, monkeypatch):
    """The global model is published where there is one; else every client's own."""
    monkeypatch.setattr(accuracy, "decode", lambda blob, cls, device: "state")
    monkeypatch.setattr(accuracy, "seeded", lambda *of, device: nullcontext())
    monkeypatch.setattr(accuracy, "Server", lambda *of: "server")
    monkeypatch.setattr(accuracy, "_opener", lambda case, world: lambda k: k)
    monkeypatch.setattr(accuracy, "_differs", lambda case, name, state: name == change.get("differs"))
    predictor = nn.Linear(1, 1) if deployed else None
    method = SimpleNamespace(predictor=lambda state, server: predictor, personal=lambda k: nn.Linear(1, 1))
    world = SimpleNamespace(method=method, hub=None, device=torch.device("cpu"), setting=SimpleNamespace(seed=1))
    names = [*(["global.safetensors"] if deployed else []), "client-000002.safetensors", "client-000007.safetensors"]
    (tmp_path / "models").mkdir()
    for name in [*names, *(["z.safetensors"] if "stranger" in change else [])]:
        (tmp_path / "models" / name).touch()
    published = change.get("published", names[:1] if deployed else names)
    record = SimpleNamespace(rounds=[SimpleNamespace(round=4)], published=published)
    case = SimpleNamespace(found=Findings(), record=record, store=Store(), folder=tmp_path)
    assert accuracy._check_models(case, world) is predictor
    wrong = [one.field for one in case.found.list if one.verdict == "contradicted"]
    assert [field.partition(".")[0] for field in wrong] == named
    said = [one.reason for one in case.found.list if one.figure == "published models" and one.verdict == "recomputed"]
    assert said == ([] if change else [f"{len(names)} files, to the bit, from the checkpoint"])


def test_models_of_a_file_that_differ(tmp_path, monkeypatch):
    case = SimpleNamespace(found=Findings(), folder=tmp_path, other_machine="")
    monkeypatch.setattr(accuracy, "_tensors", lambda path: {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2)})

    def differs(**state):
        case.found = Findings()
        found = accuracy._differs(case, "m.safetensors", state)
        assert found is bool(case.found.list)
        return [(one.field, one.recorded, one.recomputed) for one in case.found.list]

    assert differs(a=torch.tensor([3.0, 4.0]), b=torch.ones(2)) == []
    assert differs(a=torch.tensor([3.0, 4.0]), b=torch.zeros(2)) == [("b", "1.41421356", "0")]
    assert differs(a=torch.tensor([[3.0, 4.0]]), b=torch.ones(2)) == [("a", "5", "5")], "of another shape"
    assert differs(a=torch.tensor([3.0, 4.0])) == [("b", "there", "missing")]


@pytest.mark.parametrize(("foreign", "arch"), [(False, "server's"), (True, "first")])
@pytest.mark.parametrize(("elsewhere", "hits", "verdict"), [("", 8, "recomputed"), ("", 9, "contradicted"),
                                                             ("another machine", 9, "contradicted")])  # fmt: skip
def test_without_a_checkpoint_the_published_model_is_tried(
    foreign, arch, elsewhere, hits, verdict, tmp_path, monkeypatch
):
    built = []
    monkeypatch.setattr(accuracy, "_tensors", lambda path: {})
    monkeypatch.setattr(accuracy, "compute", lambda world: nullcontext())
    monkeypatch.setattr(accuracy, "load", lambda model, state: model)
    monkeypatch.setattr(accuracy, "accuracy", lambda model, x, y: share(8, 10))
    world = SimpleNamespace(archs=["first", "second"], server_arch="server's", test=("x", "y"),
                            build=lambda arch: built.append(arch) or nn.Linear(1, 1))  # fmt: skip
    last = SimpleNamespace(utility=Utility.model_validate({"global": GlobalScores(test=share(hits, 10))}))
    early = SimpleNamespace(utility=None)
    case = SimpleNamespace(
        found=Findings(), folder=tmp_path, record=SimpleNamespace(rounds=[early, last]), foreign_transport=foreign,
        other_machine=elsewhere,
    )  # fmt: skip
    accuracy._check_published(case, world)
    assert [one.verdict for one in case.found.list] == ["the author's word"], "no model is here"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "global.safetensors").touch()
    case.found = Findings()
    accuracy._check_published(case, world)
    assert built == [arch]
    assert case.found.list[0].verdict == verdict
    if verdict == "contradicted":
        assert case.found.list[0].field == "rounds.1.utility.global.test.accuracy"
    assert case.found.list[-1].figure == "accuracy of clients and of earlier rounds"
