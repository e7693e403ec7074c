"""Accuracies and published models, compared as on one machine type and as on another."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit.errors import RunError
from fedaudit.runtime.run_record import DataFacts
from fedaudit.runtime.scores import Accuracy, ClientScores, GlobalScores, Spread, Utility
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


def of_clients(matched, points):
    """Clients' scores on the common test set, with or without their own mix of classes, at some points of the round."""
    scores = ClientScores(global_test=spread(0.5, 0.75), matched_test=spread(0.8, 0.9) if matched else None)
    return Utility(clients=scores, points=dict.fromkeys(points, scores))


@pytest.mark.parametrize("elsewhere", ["", "another machine"])
@pytest.mark.parametrize("code", ["", "fedaudit's own code is another here"])
@pytest.mark.parametrize(
    ("said", "now", "added"),
    [
        ((False, ["a"]), (True, ["a"]), "matched_test"),
        ((True, ["a"]), (True, ["a", "b"]), "b"),
        ((False, []), (True, ["a"]), "a, matched_test"),
    ],
)
def test_figures_that_a_later_version_adds_are_no_contradiction(said, now, added, code, elsewhere):
    """A run of an earlier version has none; a run of this code that lacks one has been changed."""
    case = SimpleNamespace(found=Findings(), other_machine=elsewhere, other_code=code)
    same = accuracy.compare_utility(case, "f", "at", of_clients(*said), of_clients(*now), "note")
    assert same is bool(code)
    words = [one.figure for one in case.found.list if one.verdict == "the author's word"]
    assert words == ([f"f: {added}"] if code else [])


def test_a_figure_that_the_code_here_does_not_measure_stays_a_contradiction():
    """Other code or not: somebody may have added it."""
    case = SimpleNamespace(found=Findings(), other_machine="", other_code="another")
    assert not accuracy.compare_utility(case, "f", "at", of_clients(True, ["a"]), of_clients(False, ["a"]), "note")
    assert not accuracy.compare_utility(case, "f", "at", of_clients(True, ["a"]), of_clients(True, []), "note")


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


# --- the last round's accuracies ------------------------------------------------------------------------------------


def data_of(digest="d", **changes):
    facts = {"shape": [4], "classes": 3, "class_names": [], "test": 9, "aux": 0, "public": 0, "members": [5, 7],
             "nonmembers": [1, 2], "validation": [], "counts": [], "digest": digest}  # fmt: skip
    return DataFacts(**(facts | changes))


@pytest.mark.parametrize(
    ("said", "now", "sizes", "wrong", "words"),
    [
        (data_of(), data_of(), [3], [], []),
        (data_of(), data_of("e"), [3], ["data.digest"], []),
        (data_of(None), data_of("e"), [3], [], ["the data set's digest"]),
        (data_of(None), data_of("e", members=[5, 8]), [3], ["data.members.1"], ["the data set's digest"]),
        (data_of(), data_of(), [4], ["models.0"], []),
    ],
)
def test_the_data_here_are_the_runs(said, now, sizes, wrong, words, monkeypatch):
    monkeypatch.setattr(accuracy, "data_facts", lambda world: now)
    monkeypatch.setattr(accuracy, "model_facts", lambda world: sizes)
    record = SimpleNamespace(data=said, models=[3], setting=SimpleNamespace(dataset="digits"))
    case = SimpleNamespace(found=Findings(), record=record, world="a world", foreign_transport=False)
    accuracy.check_data(case)
    assert [one.field for one in case.found.list if one.verdict == "contradicted"] == wrong
    assert [one.figure for one in case.found.list if one.verdict == "the author's word"] == words


class Kept:
    """A case whose last of four rounds is evaluated again, with notes of what was asked for."""

    def __init__(self, monkeypatch, *, elsewhere="", eval_clients=True, points=True, utilities="u-uu", error=None):
        self.calls = calls = []

        def evaluate(world, predictor, opener, **points):
            if error is not None:
                raise error
            calls.append(("evaluate", predictor, opener, points["global_points"], points["next_points"]))
            return "utility now"

        method = SimpleNamespace(
            predictor=lambda state, server: ("predictor", state, server),
            global_points=lambda state, server: ("points", state, server),
            next_points=lambda state: ("next", state),
            diagnostics=lambda state: {"norm": 2.0, "of": state},
        )
        setting = SimpleNamespace(seed=11, eval_clients=eval_clients)
        world = SimpleNamespace(method=method, setting=setting, hub="hub", device=torch.device("cpu"))
        rows = [
            SimpleNamespace(
                round=2 * i + 1, utility="utility then" if letter == "u" else None,
                diagnostics={"norm": 2.0 * (1 + 1e-3), "of": "state of server.7"},
            )
            for i, letter in enumerate(utilities)
        ]  # fmt: skip
        self.case = SimpleNamespace(
            found=Findings(), record=SimpleNamespace(rounds=rows), world=world, other_machine=elsewhere,
            store=SimpleNamespace(server=lambda name: name), foreign_transport=False, why_no_world="no data",
        )  # fmt: skip

        @contextmanager
        def seeded(*of, device):
            calls.append(("seeded", *of))
            yield

        for name, value in {
            "compute": lambda world: nullcontext(),
            "_check_models": lambda case, world: calls.append("models"),
            "_check_published": lambda case, world: calls.append("published"),
            "decode": lambda blob, cls, device: f"state of {blob}",
            "Server": lambda hub, t, meter: f"server in {t}",
            "_opener": lambda case, world: "opener",
            "evaluate": evaluate,
            "offers_next_points": lambda method: points,
            "seeded": seeded,
            "compare_utility": lambda *of: calls.append(of[1:]),
        }.items():
            monkeypatch.setattr(accuracy, name, value)

    def checked(self):
        accuracy.check_accuracy(self.case)
        return [(one.verdict, one.figure, one.field) for one in self.case.found.list]


@pytest.mark.parametrize("elsewhere", ["", "another machine"])
def test_the_last_round_is_evaluated_from_the_checkpoint(elsewhere, monkeypatch):
    """Rounds 1, 5 and 7 of four were evaluated. The diagnostics are a thousandth apart."""
    kept = Kept(monkeypatch, elsewhere=elsewhere)
    found = kept.checked()
    models, seed, (name, predictor, opener, points, following), compared = kept.calls
    of = ("state of server.7", "server in 7")
    assert (models, seed, name) == ("models", ("seeded", 11, "evaluation", 7), "evaluate")
    assert (predictor, opener, points) == (("predictor", *of), "opener", ("points", *of))
    assert following() == ("next", of[0])
    note = "of round 7, from the kept models"
    assert compared == ("accuracy", "rounds.3.utility", "utility then", "utility now", note)
    word = ("the author's word", "accuracy of earlier rounds", "")
    if elsewhere:
        assert found == [("recomputed", "diagnostics", ""), word]
    else:
        assert found == [("contradicted", "diagnostics", "rounds.3.diagnostics.norm"), word]
    assert kept.case.found.list[-1].reason.startswith("2 evaluated rounds:")


def test_clients_and_next_points_are_evaluated_where_the_run_did(monkeypatch):
    kept = Kept(monkeypatch, eval_clients=False, points=False, utilities="u")
    kept.case.store.server = lambda name: "server.7"
    assert [one[1] for one in kept.checked()] == ["diagnostics"], "there is no earlier round"
    assert next(call for call in kept.calls if call[0] == "evaluate")[2:5:2] == (None, None)


def test_a_last_round_that_was_not_evaluated(monkeypatch):
    kept = Kept(monkeypatch, utilities="uuu-")
    assert kept.checked() == [("the author's word", "accuracy", "")]
    assert kept.calls == ["models"]


@pytest.mark.parametrize(
    ("change", "calls", "found"),
    [
        ({"rounds": []}, [], []),
        ({"world": None}, [], [("the author's word", "accuracy", "")]),
        ({"store": None}, ["published"], []),
        ({"foreign_transport": True}, ["published"], []),
    ],
)
def test_where_there_is_no_checkpoint_to_look_into(change, calls, found, monkeypatch):
    kept = Kept(monkeypatch)
    kept.case.record.rounds = change.pop("rounds", kept.case.record.rounds)
    for name, value in change.items():
        setattr(kept.case, name, value)
    assert (kept.checked(), kept.calls) == (found, calls)


@pytest.mark.parametrize(
    ("error", "words"), [(RunError("no " + "x" * 300), "no xxx"), (ValueError("five"), "ValueError: five")]
)
def test_states_that_cannot_be_read_are_a_contradiction(error, words, monkeypatch):
    kept = Kept(monkeypatch, error=error)
    assert kept.checked() == [("contradicted", "accuracy", "the states after the last round")]
    told = kept.case.found.list[0].recomputed
    assert told.startswith(words)
    assert len(told) <= 200


def test_a_client_is_opened_as_the_checkpoint_has_it(monkeypatch):
    monkeypatch.setattr(accuracy, "open_client", lambda *of: of)
    monkeypatch.setattr(accuracy, "Meter", lambda who, t, device: (who, t, device))
    case = SimpleNamespace(store=SimpleNamespace(client=lambda k: f"state of {k}"))
    world = SimpleNamespace(site=lambda k: f"site {k}", setting=SimpleNamespace(rounds=6), device="a device")
    meter = ("client 4", 6, "a device")
    assert accuracy._opener(case, world)(4) == ("site 4", 0, 0, meter, "state of 4")


def test_how_far_a_model_may_be_apart_on_another_machine():
    """A thousandth of a large number, a hundred thousandth of a small one, and not a bit here."""
    for elsewhere in ("", "another machine"):
        case = SimpleNamespace(other_machine=elsewhere)
        for said, now, close in (
            (100.0, 100.09, True),
            (100.0, 100.15, False),
            (0.0, 9e-6, True),
            (0.0, 1.5e-5, False),
        ):
            found = accuracy._close(torch.tensor([said]), torch.tensor([now]), case)
            assert found is (close and bool(elsewhere))
