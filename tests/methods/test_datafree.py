"""What the distillations without data share: statistics, optimisers, the guard, diagnostics, what they cost."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedaudit import load, registry, run, state_of
from fedaudit.errors import SettingError
from fedaudit.methods.datafree import _datafree
from fedaudit.methods.datafree._datafree import diagnose, take_turns
from fedaudit.methods.datafree._generator import Generator, combined, diversity
from fedaudit.methods.datafree._host import Host, Plain, host_of
from fedaudit.methods.shared._statistics import batch_norms
from fedaudit.methods.submodels._submodel import average, choose, extract, layout, placed, positions
from fedaudit.runtime.world import World
from fedaudit.training import models
from fedaudit.wire.message import State
from fedaudit.wire.transcript import Transcript

LOCAL = {"B": 32, "eta": 0.05}
STEPS = {"I": 1, "I_g": 1, "I_d": 2, "B": 16, "d": 8, "width": 8, "eta_d": 0.1}


def final(folder):
    return load_file(folder / "models" / "global.safetensors")


def entries(folder):
    return list(Transcript(folder / "transcript").entries())


def statistics(w):
    return {name: t for name, t in w.items() if "running" in name}


# --- teachers -------------------------------------------------------------------------------------------------------


def test_ensembles_of_logits_and_of_probabilities_by_hand():
    """Teachers say (ln 9, 0) and (0, 0), y = 1, tau_{.,1} = (1/4, 3/4), tau_{.,0} is another. Logits: (ln 9 / 4, 0).
    Probabilities: 1/4 (9/10, 1/10) + 3/4 (1/2, 1/2) = (0.6, 0.4)."""
    logits = torch.tensor([[[math.log(9), 0.0]], [[0.0, 0.0]]])
    tau, y = torch.tensor([[0.5, 0.25], [0.5, 0.75]]), torch.tensor([1])
    assert combined(logits, tau, y).flatten().tolist() == pytest.approx([math.log(9) / 4, 0])
    assert combined(logits, tau, y, "probabilities").softmax(1).flatten().tolist() == pytest.approx([0.6, 0.4])


def test_diagnosis_by_hand():
    """Four images, y = 0 throughout. Two teachers: the first always says 0, strongly, and has all the weight of the
    ensemble in three rows; the mean of both says 0 once. The student says 0 in the last two rows. So the ensemble says
    y in 3/4, the mean in 1/4, the two disagree as DFRD's mask asks in rows 1 and 2, and agree in row 3 alone."""

    class Student(nn.Module):
        def forward(self, s):
            return torch.tensor([[0.0, 1], [0, 1], [1, 0], [1, 0]])

    logits = torch.tensor([[[1.0, 0]] * 4, [[3.0, 0], [0, 3], [0, 3], [0, 3]]])
    ensemble = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    s, h = torch.zeros(4, 1, 2, 2), torch.arange(4.0)[:, None]
    seen = diagnose(Student(), logits, ensemble, s, torch.zeros(4, dtype=torch.int64), h)
    assert (seen.fidelity, seen.fidelity_mean, seen.epsilon, seen.agreement) == (0.75, 0.25, 0.5, 0.25)
    assert seen.L_div == 1, "all images are the same"


# --- hosts ----------------------------------------------------------------------------------------------------------


def test_every_host_keeps_the_protocol():
    for name in ("heterofl", "feddropout", "fedrolex"):
        host = registry.find(name).make({})
        assert host_of(host) is host
        assert not host.goes_on()
    assert isinstance(host_of(registry.find("fedavg").make({})), Plain)
    assert isinstance(Plain(registry.find("fedavg").make({})), Host)
    assert registry.find("dfrd").make({}).host.goes_on()
    assert registry.find("heterofl").make({}).measures_statistics()
    assert not registry.find("heterofl").make({"sbn": False}).measures_statistics()


def test_fine_tuning_goes_carefully_and_all_three_have_one_budget():
    """On a host: a tenth of the rate, and the host's statistics if those are of networks as wide as the global model.
    The presets of the three are the same."""

    def budget(name, preset):
        made = registry.find(name).make({}, preset)
        return [getattr(made, field) for field in ("I", "I_g", "I_d", "B", "eta_g", "eta_d", "momentum", "d", "width")]

    for distillation in ("dfrd", "fedftg", "dense"):
        made = registry.find(distillation).make({})
        assert (made.statistics, made.eta_d) == ("synthetic", 0.01)
        assert getattr(made, "weighting", "dynamic") == "dynamic", "as the paper defines it"
        for preset in (None, "digits", "fashion-mnist"):
            assert budget(distillation, preset) == budget("dfrd", preset)
        for host in ("fedavg", "heterofl", "feddropout", "fedrolex"):
            made = registry.find(f"{host}+{distillation}").make({})
            assert (made.statistics, made.eta_d) == ("host" if host == "fedavg" else "synthetic", 0.001)
            assert getattr(made, "weighting", "dynamic") == "dynamic", "as published, on a host too"
            for preset in (None, "digits", "fashion-mnist"):
                assert budget(f"{host}+{distillation}", preset) == budget("fedavg+dfrd", preset)


@pytest.mark.parametrize("statistics", ["host", "synthetic"])
def test_a_distillation_that_diverges_is_an_error_that_names_the_remedy(tiny, tmp_path, statistics):
    """The host's statistics are a second cause, where they were kept."""
    values = {**STEPS, "I_d": 4, "eta_d": 1e30, "statistics": statistics, "host": LOCAL}
    said = r"^Round 1: the global model of fedavg\+dfrd holds NaN or infinity .* eta_d = 1e\+30 its steps grew without"
    remedy = {
        "host": r" bound, on batch norms .* host's average\. Set eta_d=\.\.\. lower, or statistics=",
        "synthetic": r" bound\. Set eta_d=\.\.\. lower\.$",
    }
    with pytest.raises(SettingError, match=said + remedy[statistics]):
        run(tiny("fedavg+dfrd", model="cnn_bn", rounds=1, set=values), out=tmp_path / "run")


@pytest.mark.parametrize(("lost", "rate"), [("global model", "eta_d = 0.5"), ("generator", "eta_g = 0.25")])
def test_a_number_that_is_lost_in_either_network_is_found(lost, rate):
    method = registry.find("fedrolex+dfrd").make({"eta_d": 0.5, "eta_g": 0.25})
    f, nets = nn.Linear(2, 2), _datafree.Generators(state_of(nn.Linear(2, 2)))
    method._check(SimpleNamespace(t=3), f, nets)
    (f.weight if lost == "global model" else nets.G["weight"]).data[1, 0] = math.inf
    with pytest.raises(SettingError, match=rf"^Round 3: the {lost} of fedrolex\+dfrd holds .* with {rate} its steps "):
        method._check(SimpleNamespace(t=3), f, nets)


# --- batch-norm statistics ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    """One round of FedAvg with batch norm, and what each setting of `statistics` makes of it."""
    from fedaudit.setting import Setting

    folder = tmp_path_factory.mktemp("statistics")
    common = {"model": "cnn_bn", "rounds": 1, "clients": 3, "partition": "dirichlet:0.3", "aux": 0.5}
    common["eval_clients"] = False
    run(Setting.make(method="fedavg", set=LOCAL, **common), out=folder / "fedavg")
    for kept in ("synthetic", "host", "recalibrated"):
        values = {**STEPS, "statistics": kept, "host": LOCAL}
        run(Setting.make(method="fedavg+dfrd", set=values, **common), out=folder / kept)
    return folder


def test_host_keeps_its_statistics_and_synthetic_ones_follow_the_images(hosted):
    before, kept, synthetic = (statistics(final(hosted / name)) for name in ("fedavg", "host", "synthetic"))
    assert all(torch.equal(before[name], kept[name]) for name in before)
    assert not any(torch.equal(before[name], synthetic[name]) for name in before)
    weight = "encoder.conv1.weight"
    assert not torch.equal(final(hosted / "fedavg")[weight], final(hosted / "host")[weight]), "it learned all the same"
    assert not torch.equal(final(hosted / "synthetic")[weight], final(hosted / "host")[weight]), "by other statistics"


@pytest.mark.long
def test_statistics_of_narrow_networks_do_not_fit_a_wide_one():
    """Each layer of a ResNet-18 sums over sixteen times as many channels as in the client whose statistics it has. By
    those its logits are many times as long as by its own: the loss of Eq. 7 then has gradients that no rate bears."""
    shape, sixteenth = (1, 8, 8), Fraction(1, 16)
    torch.manual_seed(0)
    f, x = models.build("resnet18_cifar", shape=shape, classes=10), torch.rand(8, *shape) * 2 - 1
    w, plan = state_of(f), layout("resnet18_cifar", shape, 10)
    where = positions(plan, choose(plan, sixteenth, lambda width, m: torch.arange(m)), w)
    narrow = load(models.build("resnet18_cifar@0.0625", shape=shape, classes=10), extract(w, where, w.buffers))
    for norm in batch_norms(narrow).values():
        norm.momentum = 1.0
    with torch.no_grad():
        narrow.train()(x)
        change = {name: t - w[name][where[name]] for name, t in narrow.state_dict().items()}
        moved = placed(change, where, {name: t.shape for name, t in w.items()}, w.buffers)
        load(f, average(w, moved, {0: 1.0}, {0: where}))
        by_narrow, by_own = f.eval()(x), f.train()(x)
    assert by_narrow.norm() > 10 * by_own.norm()


def test_recalibrated_statistics_are_those_of_the_records(hosted):
    """Of the distilled model on each client's records, averaged by their number: here over whole clients as one batch,
    while a client takes batches, so only nearly; the ones of the average before the distillation are far off."""
    from fedaudit import read_record

    record = read_record(hosted / "recalibrated")
    assert [e.message for e in entries(hosted / "recalibrated") if e.client == 0 and e.direction == "down"] == [
        "Global", "HowMany", "Query",
    ]  # fmt: skip
    assert {r.kind for r in record.releases} >= {"statistics", "label_counts", "weights"}
    w = final(hosted / "recalibrated")
    world = World(record.setting)
    n = [world.count(k) for k in range(3)]
    mean = torch.zeros(16)
    for k in range(3):
        net = models.build("cnn_bn", shape=world.shape, classes=10)
        net.load_state_dict(w)
        mean += n[k] / sum(n) * net.encoder.conv1(world.members(k)[0]).mean((0, 2, 3)).detach()
    torch.testing.assert_close(w["encoder.bn1.running_mean"], mean, atol=0.02, rtol=0.05)
    up = {row.field: row.payload for row in record.traffic if row.direction == "up"}
    assert up["Statistics.s"] == 3 * 2 * 4 * (16 + 32), "a mean and a variance of each channel from each client"


def test_heterofl_asks_once_for_statistics(tiny, tmp_path):
    """Its own query comes after the distillation: `recalibrated` adds no second one."""
    values = {**STEPS, "statistics": "recalibrated"}
    run(tiny("heterofl+dfrd", model="cnn_bn", rounds=1, set=values), out=tmp_path / "a")
    asked = [e.message for e in entries(tmp_path / "a") if e.direction == "down" and e.client == 0]
    assert asked == ["Part", "HowMany", "Query"]


# --- optimisers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "f_goes_on"), [("dfrd", True), ("fedavg+dfrd", False)])
def test_optimisers_go_on_over_rounds(method, f_goes_on, tiny, tmp_path, monkeypatch):
    """Adam counts its steps: 2 a round. The momentum of f goes on from scratch only; on a host another model has taken
    f's place. `reset` begins anew."""
    cls, states, begun = registry.find(method), [], []
    step = cls.round

    def round(self, s, server, cohort):
        states.append(step(self, s, server, cohort))
        return states[-1]

    def watched(*args, moments, **options):
        begun.append(tuple(map(bool, moments)))
        return take_turns(*args, moments=moments, **options)

    monkeypatch.setattr(cls, "round", round)
    monkeypatch.setattr("fedaudit.methods.datafree._datafree.take_turns", watched)
    for optimisers, steps, taken_up in (("kept", [2, 4], (True, f_goes_on)), ("reset", [2, 2], (False, False))):
        states.clear()
        begun.clear()
        run(tiny(method, rounds=2, set={**STEPS, "I_g": 2, "optimisers": optimisers}), out=tmp_path / optimisers)
        assert [int(s.nets.opt_G["0.step"]) for s in states] == steps
        assert begun == [(False, False), taken_up]


# --- the guard ------------------------------------------------------------------------------------------------------


def test_the_guard_keeps_the_host_where_the_distillation_spoils_it(tiny, tmp_path):
    """A student's rate of 50 spoils any model; none at all spoils none. Clients count on their validation records."""
    common, local = {"rounds": 1, "partition": "iid", "model": "mlp"}, {"E": 6, "B": 8, "eta": 0.1}
    alone = run(tiny("fedavg", set=local, **common), out=tmp_path / "fedavg")
    assert alone.result.last.global_.validation > 0.5, "there is something to spoil"
    spoilt = {**STEPS, "eta_d": 50.0, "guard": True, "host": local}
    record = run(tiny("fedavg+dfrd", set=spoilt, **common), out=tmp_path / "kept")
    average = final(tmp_path / "fedavg")
    assert all(torch.equal(t, average[name]) for name, t in final(tmp_path / "kept").items())
    assert record.rounds[0].diagnostics["kept_host"] == 1
    record = run(tiny("fedavg+dfrd", set={**spoilt, "guard": False}, **common), out=tmp_path / "spoilt")
    assert record.rounds[0].diagnostics["kept_host"] == 0
    assert any(not torch.equal(t, average[name]) for name, t in final(tmp_path / "spoilt").items())
    record = run(tiny("fedavg+dfrd", set={**spoilt, "eta_d": 0.0}, **common), out=tmp_path / "same")
    assert record.rounds[0].diagnostics["kept_host"] == 0, "it did not fall"


def test_the_guard_counts_validation_records_and_is_billed(tiny, tmp_path):
    values = {**STEPS, "guard": True, "host": LOCAL}
    record = run(tiny("fedavg+dfrd", rounds=1, set=values), out=tmp_path / "a")
    world, rows = World(record.setting), entries(tmp_path / "a")
    for e in (e for e in rows if e.message == "Right"):
        sent = next(other for other in rows if other.message == "Candidates" and other.client == e.client)
        x, y = world.validation(e.client)
        for i, field in enumerate(("host", "distilled")):
            net = models.build("cnn", shape=world.shape, classes=10)
            net.load_state_dict(sent[field])
            assert e["n"][i] == (net.eval()(x).argmax(1) == y).sum()
    down = {row.field: row.payload for row in record.traffic if row.direction == "down"}
    assert down["Candidates.host"] == down["Candidates.distilled"] == 3 * 4 * 13_706
    policy = {"statistics": {"epsilon": 1.0}}
    record = run(tiny("fedavg+dfrd", rounds=1, set=values, privacy=policy), out=tmp_path / "b")
    release = next(r for r in record.releases if r.kind == "statistics")
    assert release.protection.sensitivity == pytest.approx(math.sqrt(2)), "one record: each of two counts by one"


# --- the record -----------------------------------------------------------------------------------------------------


def test_the_record_has_the_model_before_and_after_and_what_was_measured(tiny, tmp_path, fedaudit):
    common = {"rounds": 1, "partition": "dirichlet:0.3"}
    alone = run(tiny("fedavg", set=LOCAL, **common), out=tmp_path / "fedavg")
    both = run(tiny("fedavg+dfrd", set={**STEPS, "eta_d": 50.0, "host": LOCAL}, **common), out=tmp_path / "both")
    before = both.result.last.global_points["before distillation"]
    assert before == alone.result.last.global_ != both.result.last.global_, "a rate of 50 spoils any model"
    assert both.rounds[0].diagnostics.keys() == {
        "fidelity", "fidelity_mean", "epsilon", "L_div", "agreement", "kept_host",
    }  # fmt: skip
    assert alone.rounds[0].diagnostics == {}
    _, shown, _ = fedaudit("show", tmp_path / "both")
    assert "global model, before distillation" in shown
    fedaudit("report", tmp_path, "--format", "html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("Numbers that the method measured in its own rounds") == 1, "FedAvg alone has nothing to draw"
    assert all(word in page for word in ("before distillation", "fidelity mean", "kept host")), "drawn, by name"


def test_eq_4_acts_as_public_code_has_it_and_is_dead_as_printed():
    """An untrained generator at 28 x 28: with plain norms the exponent is in the hundreds, and no gradient is left."""
    torch.manual_seed(0)
    G = Generator("mul", 100, (1, 28, 28), 10, 16)
    z, y = torch.randn(32, 100), torch.randint(10, (32,))
    left = {}
    for metric in ("l2", "mean"):
        G.zero_grad()
        h = G.h(z, y)
        diversity(G(h), h, metric).backward()
        left[metric] = float(G.project.weight.grad.norm())
    assert left["l2"] == 0
    assert left["mean"] > 1e-6


def test_without_feedback_the_distilled_model_is_scored(tiny, tmp_path):
    """A rate of 50 spoils any model. With feedback it goes to the clients of round 2; without, they get FedAvg's
    average, and the spoiled one is scored."""
    common = {"rounds": 2, "partition": "dirichlet:0.3"}
    alone = run(tiny("fedavg", set=LOCAL, **common), out=tmp_path / "fedavg")
    values = {**STEPS, "eta_d": 50.0, "host": LOCAL, "feedback": False}
    both = run(tiny("fedavg+dfrd", set=values, **common), out=tmp_path / "both")
    assert both.result.last.global_points["before distillation"] == alone.result.last.global_
    assert both.result.last.global_ != alone.result.last.global_
    w = [
        {e.client: e["w"] for e in entries(tmp_path / d) if (e.message, e.round) == ("Global", 2)}
        for d in ("fedavg", "both")
    ]
    assert all(torch.equal(t, w[1][k][name]) for k in w[0] for name, t in w[0][k].items())


def test_fedftg_weighs_teachers_as_it_is_told(tiny, tmp_path):
    """All alike, for teachers and labels, as in `dfrd`: no counts are asked for, and the model is another one."""
    made = {}
    for how in ("dynamic", "uniform"):
        values = {**STEPS, "host": LOCAL, "weighting": how, "labels": how}
        run(tiny("fedavg+fedftg", rounds=1, partition="dirichlet:0.3", set=values), out=tmp_path / how)
        counted = any(e.message == "LabelCounts" for e in entries(tmp_path / how))
        assert counted == (how == "dynamic")
        made[how] = final(tmp_path / how)
    values = {**STEPS, "host": LOCAL, "weighting": "uniform"}
    run(tiny("fedavg+fedftg", rounds=1, partition="dirichlet:0.3", set=values), out=tmp_path / "weights")
    mixed = final(tmp_path / "weights")
    assert any(not torch.equal(t, mixed[name]) for name, t in made["dynamic"].items())


@pytest.mark.parametrize(("counts", "better"), [([[3.0, 2.0], [1.0, 2.0]], True), ([[3.0, 2.0], [1.0, 1.0]], False),
                                                ([[1.0, 2.0]], True)])  # fmt: skip
def test_a_distilled_model_has_to_be_right_as_often_as_the_hosts(counts, better):
    """Over all clients together. As often is enough."""
    asked = []

    def ask(fn, message):
        asked.append((fn, message))
        return {k: SimpleNamespace(n=torch.tensor(n)) for k, n in enumerate(counts)}

    method = SimpleNamespace(compare="compare")
    host, distilled = State({"w": torch.zeros(1)}), State({"w": torch.ones(1)})
    assert _datafree.DataFree._better(method, SimpleNamespace(ask=ask), host, distilled) is better
    ((fn, message),) = asked
    assert fn == "compare"
    assert message.host is host
    assert message.distilled is distilled


def test_turns_have_recordings_for_all_their_steps():
    """Three turns of 2 and 5 steps. What the losses draw is drawn before each step, and all buffers are kept."""
    G, f, other = nn.BatchNorm1d(1), nn.Linear(1, 1), nn.BatchNorm1d(2)
    asked, drawn = [], (lambda i: None, lambda i: True)

    def optimise(params, loss, **how):
        asked.append((len(params), loss, how))
        return {f"after {len(asked)}": 1}

    server = SimpleNamespace(optimise=optimise)
    opts, losses = ("opt G", "opt f"), (lambda: "G", lambda: "f")
    found = take_turns(
        server,
        G,
        f,
        *losses,
        turns=3,
        steps=(2, 5),
        opts=opts,
        settle=drawn,
        beside=[other],
        moments=({"a": 1}, {"b": 2}),
    )
    assert found == ({"after 5": 1}, {"after 6": 1})
    assert [how["moments"] for *_, how in asked] == [{"a": 1}, {"b": 2}, *({f"after {i}": 1} for i in range(1, 5))]
    for i, (count, loss, how) in enumerate(asked):
        assert (count, loss, how["steps"], how["opt"]) == (2, losses[i % 2], (2, 5)[i % 2], opts[i % 2])
        assert (how["repeats"], how["before"]) == (True, drawn[i % 2])
        assert how["kept"].steps == (6, 15)[i % 2]
        kept = [id(t) for t in (*G.buffers(), *other.buffers())]
        assert [id(t) for t in how["kept"].changes] == kept
        assert how["kept"] is asked[i % 2][2]["kept"], "one recording for all turns"
    asked.clear()
    take_turns(server, G, f, *losses, turns=2, steps=(1, 1), opts=opts, anew=True, moments=({"a": 1}, {"b": 2}))
    assert [how["moments"] for *_, how in asked] == [{}] * 4
    assert not {"repeats", "before", "kept"} & set(asked[0][2])
