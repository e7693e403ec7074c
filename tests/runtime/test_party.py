"""What a client does within a task: trainings, draws, memory and class means, and what they cost."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from fedaudit import Augment, Running, State, Up, ce, freeze, private, run, sgd
from fedaudit.errors import ContractError, NotApplicable, PrivacyError
from fedaudit.privacy import dpsgd
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import OF_TASK, Outputs, Recorder, gated
from fedaudit.privacy.noise_key import NoiseKey
from fedaudit.privacy.policy import Policy, parse_policy
from fedaudit.runtime import party
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.party import Client, Cohort, Party, Server, check_buffers, digest_of_all
from fedaudit.runtime.site import Swap
from fedaudit.runtime.task import open_client
from fedaudit.runtime.world import World
from fedaudit.training.descent import Descent

# --- unequal clients, deltas and rounds


def privacy(*texts):
    return dict(parse_policy(text) for text in texts)


def test_two_private_fits_share_neither_noise_nor_sample(tiny, tmp_path):
    seeds = []
    real = dpsgd.fit_private

    def watched(*args, **options):
        seeds.append((options["rng"].initial_seed(), options["noise"].initial_seed()))
        return real(*args, **options)

    setting = tiny("outside:TwiceTrained", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    with mock.patch.object(dpsgd, "fit_private", watched):
        run(setting, out=tmp_path / "a")
    assert len(seeds) == 2 * 2 * 2, "two fits of two clients in two rounds"
    assert len({seed for pair in seeds for seed in pair}) == 2 * len(seeds)


def test_memory_written_from_records_is_paid_under_dp_sgd(tiny, tmp_path):
    """Hoarder keeps its records in memory and sends them, a later ask, as if they came from the model."""
    setting = tiny("outside:Hoarder", rounds=1, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        assert row.by_kind["weights"] == math.inf
        assert row.epsilon == math.inf


def test_memory_written_before_the_first_look_is_free_under_dp_sgd(tiny, tmp_path):
    """Exchange remembers the rounds, then looks at its records: its weights are post-processing all the same."""
    setting = tiny("outside:Exchange", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        assert row.by_kind["weights"] == 0
        assert row.by_kind["embeddings"] == math.inf


# --- rounds, asks and fits that differ


def test_a_plain_training_is_remembered_in_later_rounds(tiny, tmp_path):
    """Round 1 trains past DP-SGD, round 2 with it: the model of round 2 is still one that saw the records."""
    setting = tiny("outside:OncePlain", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        weights = [e for e in row.entries if e.kind == "weights"]
        assert [e.noise_multiplier for e in weights] == [0.0] * len(weights)
        assert sorted(t for e in weights if e.field == "Weights.w" for t in e.rounds) == [1, 2]


def test_trainings_are_counted_over_rounds(tiny, tmp_path):
    """Two rounds were planned for, one training each; with two a round the third, in round 2, is one too many."""
    setting = tiny("outside:TwiceTrained", rounds=2, clients=2, privacy=privacy("training:eps=2,clip=1"))
    with pytest.raises(PrivacyError, match="planned 2 trainings of client 0, and this is number 3"):
        run(setting, out=tmp_path / "a")


def test_two_fits_of_a_task_shuffle_otherwise(tiny, tmp_path):
    asked = []
    real = Party.rng

    def rng(self, purpose):
        asked.append((self._name, purpose))
        return real(self, purpose)

    with mock.patch.object(Party, "rng", rng):
        run(tiny("outside:TwiceTrained", rounds=1, clients=2), out=tmp_path / "a")
    fits = sorted(pair for pair in asked if pair[1].startswith("fit"))
    assert fits == [(f"client {k}", f"fit {i}") for k in (0, 1) for i in (1, 2)]


def test_class_means_are_of_clipped_rows(tiny):
    world = World(tiny("fedavg", privacy=privacy("prototypes:eps=1,clip=0.5")))
    client = open_client(world.site(0), 1, 0, Meter("client 0", 1, world.device), None)
    rows = torch.randn(len(client), 7, generator=torch.Generator().manual_seed(0)) * 3
    means = client.class_means(rows, "prototypes")
    assert sorted(means) == sorted(set(client.y.tolist()))
    for c, mean in means.items():
        of_class = rows[client.y == c]
        clipped = of_class * (0.5 / of_class.norm(dim=1, keepdim=True)).clamp(max=1)
        assert torch.allclose(mean, clipped.mean(0), atol=1e-6)


def test_of_classes_with_equal_means_the_smallest_counts(tiny):
    """One row moves the mean of a small class most. The noise is scaled by how many rows a mean is of."""
    world = World(tiny("fedavg", privacy=privacy("prototypes:eps=1,clip=4")))
    client = open_client(world.site(0), 1, 0, Meter("client 0", 1, world.device), None)
    n = len(client)
    y = torch.tensor([0] * 3 + [1] * 2 + [2] * (n - 5))
    rows = torch.where(y[:, None] == 2, 2.0, 1.0).expand(n, 7).contiguous()
    means = client.class_means(rows, "prototypes", y)
    assert [float(means[c][0]) for c in (0, 1, 2)] == pytest.approx([1.0, 1.0, 4 / 7**0.5])
    assert sorted(client._context.means.values()) == [(4.0, 2), (4.0, n - 5)]
    assert set(client._context.tables.values()) == {0}
    client.class_means(rows[:4] * 0.5, "prototypes", y[:4])
    assert set(client._context.tables.values()) == {0, 1}, "each call has a number of its own"
    with pytest.raises(PrivacyError, match=f"was given {n + 1} rows"):
        client.class_means(torch.ones(n + 1, 7), "prototypes", torch.zeros(n + 1).long())
    assert client.class_means(torch.ones(n + 1, 7), "logits", torch.zeros(n + 1).long()), "no policy bounds these"


@pytest.mark.parametrize(("people", "most"), [(None, 1), ([], 1), ([4, 4, 9, 4, 9], 3)])
def test_the_most_records_of_one_person(people, most):
    site = SimpleNamespace(people=lambda: None if people is None else torch.tensor(people))
    assert Client._most.func(SimpleNamespace(_site=site)) == most


def test_a_digest_tells_everything_that_a_training_is_told():
    """Names, kinds, lengths and numbers each change it."""
    one = {"a": torch.ones(2), "b": [1, 2.5, "text", None]}
    others = [
        {"a": torch.ones(2), "c": [1, 2.5, "text", None]}, {"a": torch.ones(2).int(), "b": [1, 2.5, "text", None]},
        {"a": torch.ones(1, 2), "b": [1, 2.5, "text", None]}, {"a": torch.ones(2), "b": (1, 2.5, "text", None)},
        {"a": torch.ones(2), "b": [1, 2.5, "text"]}, {"a": torch.ones(2), "b": [1, 2.5, "text", 0]},
        {"a": torch.zeros(2), "b": [1, 2.5, "text", None]},
        {"a": freeze(torch.ones(2)), "b": []}, {"a": freeze(torch.zeros(2)), "b": []},
    ]  # fmt: skip
    found = [digest_of_all(value) for value in (one, *others)]
    assert len(set(found)) == len(found)
    assert digest_of_all({"a": torch.ones(2), "b": [1, 2.5, "text", None]}) == found[0]
    linear, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    other.load_state_dict(linear.state_dict())
    assert digest_of_all(linear) == digest_of_all(other)
    torch.nn.init.ones_(other.weight)
    assert digest_of_all(linear) != digest_of_all(other)
    assert digest_of_all(SimpleNamespace(a=1)) == digest_of_all(SimpleNamespace(a=2)), "of others the type counts"


@pytest.mark.parametrize(
    ("buffers", "wrong"),
    [({"1.running_mean"}, None), ({"own.running_var"}, None), ({"0.weight"}, "0.weight"), ({"z", "extra"}, "extra"),
     ({"1.num_batches_tracked", "0.bias"}, "0.bias")],
)  # fmt: skip
def test_parameters_are_not_called_buffers(buffers, wrong):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = State({name: torch.zeros(1) for name in buffers}, buffers=frozenset(buffers))
    if wrong is None:
        check_buffers(Whole(state), model)
    else:
        with pytest.raises(ContractError, match=f"Whole.w calls '{wrong}' a buffer"):
            check_buffers(Whole(state), model)


class Whole(Up):
    w: State = private("weights", via="model", unit="client")


class Sent(Up):
    v: Tensor = private("weights", via="data", unit="client")
    n: int = private("count", via="data", unit="client")


def test_without_a_way_of_summing_a_cohorts_mean_is_the_mean_of_its_replies():
    """(1 x 2 + 3 x 6) / 4 = 5 by records, and (2 + 6) / 2 = 4 where all weigh the same."""
    replies = {0: Sent(torch.tensor([2.0]), 1), 4: Sent(torch.tensor([6.0]), 3)}
    asked = []
    cohort = Cohort([0, 4], lambda *words: asked.append(words) or replies)
    mean = cohort.mean("fn", "message", by="n")
    assert asked == [(cohort, "fn", "message")]
    assert (mean.value.v.tolist(), mean.value.n, mean.count) == ([5.0], 4, 2)
    assert cohort.mean("fn", "message").value.v.tolist() == [4.0]


def test_a_cohorts_mean_is_the_runs_where_the_run_has_one():
    cohort = Cohort([0], lambda *words: {}, lambda *words: words)
    assert cohort.mean("fn", "message", by="n") == (cohort, "fn", "message", "n")
    assert cohort.mean("fn", "message") == (cohort, "fn", "message", None)


# --- a client by hand ------------------------------------------------------------------------------------------------


class Net(torch.nn.Linear):
    """A model whose parts can be told apart."""

    def encode(self, x):
        return ("encoded", self.training, x)

    def forward(self, x):
        return ("predicted", self.training, x)


def by_hand(swap=None, seen=None, policies=None, memory=None, **facts):
    """Client 4 of seed 11 in round 3, ask 2, attempt 5, with records that say for which fit they were given."""
    given = []

    def rows(private_fits, *, fitting):
        given.append((private_fits, fitting))
        return f"x {private_fits} {fitting}", f"y {private_fits} {fitting}"

    site = SimpleNamespace(
        k=4, seed=11, device=torch.device("cpu"), shape=(1, 8, 8), classes=6, rounds=9, policies=policies or {},
        swap=swap, seen=seen, rows=rows, count=7, people=lambda: None, hyperparameters=(0.5,), method="m",
        releases="releases", absent=lambda t: f"absent in {t}", validation=lambda: "validation",
        server_model=lambda: "the server's", blank_server_model=lambda: torch.nn.Linear(1, 1, bias=False),
        public=lambda: (torch.ones(2, 1), torch.tensor([3, 4])),
    )  # fmt: skip
    found = Client(site, 3, 2, Meter("client 4", 3, site.device), Net(2, 1), memory or {}, attempt=5, **facts)
    return found, given


def test_what_the_mechanism_knows_of_a_client():
    client, _ = by_hand(plain_fits=2, spent={"logits": 3}, dirty=True)
    known = client._context
    assert (known.key, known.n, known.policies, known.releases) == ((11, "client 4", 3, 2, 5), 7, {}, "releases")
    assert (known.classes, known.plain_fits, known.dirty, known.spent, known.most) == (6, 2, True, {"logits": 3}, 1)
    assert known.absent() == "absent in 3"
    assert known.images() == "x 0 False"
    client.model.train()
    assert known.encode("x") == ("encoded", False, "x")
    client.model.train()
    assert known.predict("x") == ("predicted", False, "x")
    assert known.provenance is None
    with gated(Outputs(NoiseKey(b"key"))):
        assert client._key == (OF_TASK,), "in a run the key is the task's"


def test_a_client_of_which_nothing_is_said_has_done_nothing():
    client, given = by_hand()
    assert (client.id, client.t, client.rounds, client.classes, len(client)) == (4, 3, 9, 6, 7)
    assert (client.private_fits, client.plain_fits, client.spent, client.memory) == (0, 0, {}, {})
    assert (client.brought, client.looked, client.fitting, client.dirty) == (False, False, False, False)
    assert (client.entries, client.picked, client.released, client.watched) == ([], [], [], None)
    assert (client.private_training, client.settle(), given) == (False, {}, [])
    assert client.server_model() == "the server's"
    assert client.server_model(state={"weight": torch.tensor([[4.0]])}).weight.item() == 4
    with pytest.raises(ContractError, match=r"client.server_model\(state=None\): None is not a state"):
        client.server_model(state=None)
    assert not client.looked
    x, y = client.public
    x.zero_()
    assert client._site.public()[0].sum() == 2, "a copy"
    assert y.tolist() == [3, 4]
    entry = LedgerEntry.free("f", "logits", "public")
    client.bill(entry, entry)
    client.entries.clear()
    assert client.entries == [entry, entry]


@pytest.mark.parametrize("part", ["x", "y", "validation"])
def test_whoever_reads_records_has_looked(part):
    client, given = by_hand()
    assert getattr(client, part) == {"x": "x 0 False", "y": "y 0 False", "validation": "validation"}[part]
    assert client.looked
    assert given == ([] if part == "validation" else [(0, False)])


def test_records_are_loaded_once_and_again_where_they_are_swapped():
    client, given = by_hand()
    assert client._rows() is client._rows(fitting=True)
    assert given == [(0, False)]
    client, given = by_hand(swap=Swap(after=1))
    client._rows()
    client._rows(fitting=True)
    client.private_fits = 1
    client._rows()
    client._rows(fitting=True)
    client.private_fits = 2
    client._rows()
    client._rows(fitting=True)
    assert given == [(0, False), (0, True), (1, False), (1, True)]


def test_who_only_looks_needs_no_copy():
    client, given = by_hand(seen=lambda: "the kept ones")
    assert client._rows(look=True) == "the kept ones"
    assert client._rows()[0] == "x 0 False"
    assert client._rows(look=True)[0] == "x 0 False", "its own copy is there"
    swapped, given = by_hand(seen=lambda: "the kept ones", swap=Swap(after=9))
    assert swapped._rows(look=True)[0] == "x 0 False"
    assert by_hand()[0]._rows(look=True)[0] == "x 0 False"
    assert given == [(0, False)]


@pytest.fixture
def fitted(monkeypatch):
    """Trainings that note what they are told."""
    seen = []

    def fit(self, model, loss, rows, **options):
        seen.append((model, loss, rows, options, self.fitting))
        return "fitted"

    monkeypatch.setattr(Party, "_fit", fit)
    monkeypatch.setattr(party, "in_chunks", lambda fixed, x: (fixed, x))
    return seen


USUAL = {"opt": "o", "batch": 3, "epochs": None, "steps": 2, "given": None, "augment": None, "until": None,
         "separable": True, "turns": None, "norms": "batch"}  # fmt: skip


def test_a_training_on_the_records_is_counted(fitted):
    client, _ = by_hand(plain_fits=4)
    assert client.fit("loss", opt="o", batch=3, steps=2) == "fitted"
    model, loss, rows, options, during = fitted[0]
    assert (model, loss, rows, options, during) == (client.model, "loss", ("x 0 True", "y 0 True"), USUAL, True)
    assert (client.plain_fits, client.private_fits, client.fitting, client.brought) == (5, 1, False, False)
    client.fit("loss", opt="o", batch=3, steps=2, beside=["one", "two"], model="another", given={"a": 1})
    assert fitted[1][0] == "another"
    assert fitted[1][2] == ("x 0 True", "y 0 True", ("one", "x 0 True"), ("two", "x 0 True"))
    assert not client.brought, "what it was given was nobody's secret"


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize(
    ("data", "given", "brought"), [(None, None, False), (None, {"a": 1}, True), (("rows",), None, True)]
)
def test_what_a_task_read_itself_and_brings_to_training_counts(looked, data, given, brought, fitted):
    client, _ = by_hand()
    client.looked = looked
    client.fit("loss", data, opt="o", batch=3, epochs=1, given=given)
    assert client.brought is (looked and brought)
    assert (client.plain_fits, client.private_fits) == ((1, 1) if data is None else (int(looked), 0))
    assert fitted[0][4] is (data is None)
    assert fitted[0][3] == USUAL | {"epochs": 1, "steps": None, "given": given}


@pytest.mark.parametrize(
    ("followed", "data", "alone"), [(True, ("x",), True), (False, ("x",), False), (True, None, False)]
)
def test_a_training_that_a_twin_repeats_is_carried_out_alone(followed, data, alone, fitted, monkeypatch):
    client, _ = by_hand()
    said = []
    monkeypatch.setattr(party, "say_alone", said.append)
    monkeypatch.setattr(
        Client, "_job", lambda self, model, loss, rows, options: SimpleNamespace(alone=lambda: (loss, rows, options))
    )
    gate = Recorder(NoiseKey(b"key")) if followed else Outputs(NoiseKey(b"key"))
    with gated(gate):
        found = client.fit("loss", data, opt="o", batch=3, steps=2)
    assert found == (("loss", ("x",), USUAL) if alone else "fitted")
    assert len(said) == alone
    assert len(fitted) == (not alone)


def test_optimising_counts_as_training_and_goes_on_with_all_that_it_is_told(monkeypatch):
    client, _ = by_hand()
    told = []
    monkeypatch.setattr(party, "descend", lambda descent: told.append(descent) or "moments")
    params = [torch.zeros(1)]
    assert client.optimise(params, "closure", steps=3, opt="opt") == "moments"
    assert (client.plain_fits, client.private_fits, client.brought) == (1, 1, True)
    wanted = Descent(tuple(params), "closure", 3, "opt", None, False, None, None)
    assert vars(told[0]) == vars(wanted)
    kept = object()
    client.optimise(params, "closure", steps=3, opt="opt", moments={}, repeats=True, before="before", kept=kept)
    assert vars(told[1]) == vars(Descent(tuple(params), "closure", 3, "opt", {}, True, "before", kept))
    private = by_hand(policies=privacy("training:noise=1,clip=1"))[0]
    with pytest.raises(NotApplicable, match="cannot be made private"):
        private.optimise(params, "closure", steps=3, opt="opt")


@pytest.mark.parametrize("dirty", [True, False])
@pytest.mark.parametrize("tainted", [True, False])
@pytest.mark.parametrize("kind", ["training:noise=1,clip=1", "logits:eps=1,clip=1"])
def test_what_a_task_changed_outside_of_private_fits_is_marked(dirty, tainted, kind):
    client, _ = by_hand(policies=privacy(kind))
    client._provenance = SimpleNamespace(settle=lambda model, memory: {"kept": "1"}, dirty=dirty, tainted=tainted)
    assert client.settle() == {"kept": "1"}
    assert client.dirty is dirty
    assert client.plain_fits == int(tainted and kind.startswith("training"))
    client.dirty = True
    client.settle()
    assert client.dirty, "it stays so"


def test_a_reply_is_protected_with_what_the_task_did_and_billed(monkeypatch):
    client, _ = by_hand()
    client.plain_fits, client.dirty = 3, True
    asked = []

    def protect(reply, context):
        asked.append((reply, context.plain_fits, context.dirty))
        return "protected", {"f": "how"}, ["entry"]

    client._context.plain_fits = 0
    monkeypatch.setattr(party, "protect", protect)
    monkeypatch.setattr(party, "check_buffers", lambda reply, model: asked.append((reply, model)))
    assert client.release("reply") == ("protected", {"f": "how"})
    assert asked == [("reply", client.model), ("reply", 3, True)]
    assert client.entries == ["entry"]
    assert [span.phase for span in client._meter.close()] == ["protect"]


def test_what_protect_gave_back_is_kept_and_replayed(monkeypatch):
    client, _ = by_hand()
    monkeypatch.setattr(party, "protect_field", lambda message, field, value, context: f"noised {value}")
    assert client.protect(Whole, "w", "a") == "noised a"
    gate = Outputs(NoiseKey(b"key"))
    with gated(gate):
        assert client.protect(Whole, "w", "b") == "noised b"
        gate.replay = [torch.ones(1), torch.zeros(1)]
        assert client.protect(Whole, "w", "c").tolist() == [1.0]
    assert len(gate.replay) == 1
    assert [str(value) for value in client.released[:2]] == ["noised a", "noised b"]
    assert client.released[2].tolist() == [1.0]
    assert list(client._context.done) == ["Whole.w"]
    assert client._context.done["Whole.w"][1] == []


def test_trainings_and_purposes_have_generators_of_their_own():
    client, _ = by_hand()
    names = ["fit 1", "fit 2", "a/b", "a//b", "a"]
    states = [client.rng(name).get_state().numpy().tobytes() for name in names]
    assert len(set(states)) == len(names)
    assert client.rng("a").get_state().numpy().tobytes() == states[-1]
    jobs = [client._job("model", "loss", ["rows"], {"opt": 1}) for _ in range(2)]
    assert [job.rng.get_state().numpy().tobytes() for job in jobs] == states[:2]
    assert (jobs[0].model, jobs[0].loss, jobs[0].rows, jobs[0].options) == ("model", "loss", ("rows",), {"opt": 1})


def test_the_server_by_hand(fitted):
    hub = SimpleNamespace(
        seed=1, device=torch.device("cpu"), shape=(1, 8, 8), classes=6, rounds=9, clients=12, archs=("a", "b"),
        server_arch=lambda: "s", build=lambda arch: f"built {arch}", public_labelled=False,
        blank=lambda arch: torch.nn.Linear(1, {"s": 1, "b": 2}[arch], bias=False).eval(),
    )  # fmt: skip
    server = Server(hub, 5, Meter("server", 5, hub.device))
    assert (server.clients, server.arch(1), server.model(), server.model("b")) == (12, "b", "built s", "built b")
    w = torch.tensor([[4.0]])
    loaded = server.model(state={"weight": w})
    assert loaded.weight.tolist() == [[4.0]]
    assert loaded.weight.data_ptr() != w.data_ptr()
    assert server.model("b", state={"weight": torch.ones(2, 1)}).weight.shape == (2, 1)
    assert not loaded.training
    for state in ({"weight": w}, {}):
        with pytest.raises(ContractError, match="does not fit"):
            server.model("b", state=state)
    with pytest.raises(ContractError, match=r"server.model\(state=None\): None is not a state. Leave `state` out"):
        server.model(state=None)
    assert (server.public_labelled, server.t) == (False, 5)
    sender = server.sender(1)
    assert (sender.k, sender.t, sender.classes) == (1, 5, 6)
    server.fitting = False
    assert server.fit("model", "loss", ("x",), opt="o", batch=3, steps=2) == "fitted"
    assert fitted[0][:3] == ("model", "loss", ("x",))
    assert fitted[0][3] == {key: value for key, value in USUAL.items() if key != "norms"}


def test_all_that_a_private_training_is_told_is_described():
    """Whatever differs between two trainings differs in the entry of its name, and in no other."""
    model = torch.nn.Linear(2, 1)
    base = {"opt": sgd(0.1), "batch": 4, "epochs": 2, "steps": None, "given": {"a": 1}, "augment": Augment(crop=1)}

    def loss(f, x, tau=2.0):
        return f(x) / tau

    def other(f, x, tau=3.0):
        return f(x) / tau

    plain = party.described(model, loss, 7, base)
    assert (plain["records"], plain["batch"], plain["epochs"], plain["steps"]) == ("7", "4", "2", "None")
    changes = {
        "records": party.described(model, loss, 8, base), "batch": party.described(model, loss, 7, base | {"batch": 5}),
        "epochs": party.described(model, loss, 7, base | {"epochs": 3}),
        "steps": party.described(model, loss, 7, base | {"steps": 3}),
        "optimiser": party.described(model, loss, 7, base | {"opt": sgd(0.2)}),
        "augmentation": party.described(model, loss, 7, base | {"augment": Augment(crop=2)}),
        "loss": party.described(model, other, 7, base),
        "given": party.described(model, loss, 7, base | {"given": None}),
        "beside": party.described(model, loss, 7, base, [loss]),
    }  # fmt: skip
    for name, found in changes.items():
        assert [key for key in plain if found[key] != plain[key]] == [name]
    assert party.described(model, loss, 7, base | {"augment": None})["augmentation"] == ""
    with torch.no_grad():
        model.weight.add_(1)
    assert [key for key, value in party.described(model, loss, 7, base).items() if value != plain[key]] == ["start"]
    model.bias.requires_grad_(False)
    assert party.described(model, loss, 7, base)["parameters"] != plain["parameters"]


@pytest.fixture
def privately(monkeypatch):
    """A client that trains privately: `train` is called with each training, and `made` is what its steps cost."""

    def client(train, made=None, **policy):
        terms = {"noise_multiplier": 1.0} if "epsilon" not in policy else {}
        here, _ = by_hand(policies={"training": Policy(sensitivity="clip:1.0", **terms, **policy)})
        here.said = []
        here._provenance = SimpleNamespace(
            before_fit=lambda model: here.said.append(("before", model)),
            after_fit=lambda model: here.said.append(("after", model)),
        )
        monkeypatch.setattr(party, "Progress", lambda: SimpleNamespace(entry=lambda: made))
        monkeypatch.setattr(Client, "_train", lambda self, job: train(job))
        return here

    return client


ROWS = torch.zeros(7, 2), torch.zeros(7)
OPTIONS = {"opt": sgd(0.1), "batch": 3, "epochs": 1, "steps": None, "given": None, "augment": None}


@pytest.mark.parametrize(("policy", "planned"), [({}, 9), ({"releases": 4}, 4)])
def test_a_private_training_is_billed_and_counted(policy, planned, privately):
    jobs = []
    client = privately(lambda job: jobs.append(job) or ("fitted", f"entry {len(jobs)}"), **policy)
    for n in (1, 2):
        assert client._fit_private(client.model, ce, ROWS, None, True, OPTIONS) == "fitted"
        assert client.entries == [f"entry {i}" for i in range(1, n + 1)]
        assert (client.private_fits, client.spent, client.plain_fits) == (n, {"training": n}, 0)
    assert client.said == [("before", client.model), ("after", client.model)] * 2
    first = jobs[0]
    assert (first.job.model, first.job.rows, first.job.options) == (client.model, ROWS, OPTIONS)
    assert (first.policy, first.fits) == (client._site.policies["training"], planned)
    states = [g.get_state().numpy().tobytes() for job in jobs for g in (job.job.rng, job.noise)]
    assert len(set(states)) == 4, "samples and noise of each training are its own"


@pytest.mark.parametrize("made", [None, "an entry"])
def test_steps_of_a_private_training_that_fails_are_paid_for(made, privately):
    def fails(job):
        raise ValueError("it broke")

    client = privately(fails, made)
    with pytest.raises(ValueError, match="it broke"):
        client._fit_private(client.model, ce, ROWS, None, True, OPTIONS)
    assert client.entries == ([] if made is None else ["an entry"])
    assert (client.private_fits, client.said) == (0, [("before", client.model)])
    with pytest.raises(ValueError, match="it broke"):
        client._fit_on_records(client.model, ce, ROWS, None, True, OPTIONS, ())
    assert [getattr(entry, "field", entry) for entry in client.entries][-1] == "training (failure)"
    assert client.fitting, "a failure in there may be due to the records"


def test_what_dp_sgd_cannot_account_for_is_refused(privately):
    client = privately(lambda job: ("fitted", "entry"))
    for until in (lambda f, x, y: True, Running(0.5)):
        with pytest.raises(PrivacyError, match="stops training by looking at its records"):
            client._fit_private(client.model, ce, ROWS, until, True, OPTIONS)
    with pytest.raises(NotApplicable, match="does not separate over records"):
        client._fit_private(client.model, ce, ROWS, None, False, OPTIONS)
    assert (client.spent, client.entries) == ({}, [])
    for more in ({"turns": "turns"}, {"norms": "running"}):
        with pytest.raises(NotApplicable, match="without turns or frozen batch norms"):
            client.fit(ce, opt=sgd(0.1), batch=3, epochs=1, **more)


@pytest.mark.parametrize(("policy", "most"), [({"epsilon": 1.0, "releases": 2}, 2), ({}, None)])
def test_an_epsilon_for_so_many_trainings_is_for_no_more(policy, most, privately):
    client = privately(lambda job: ("fitted", "entry"), **policy)
    for _ in range(2):
        client._fit_private(client.model, ce, ROWS, None, True, OPTIONS)
    if most is None:
        client.spent["training"] = 50
        assert client._fit_private(client.model, ce, ROWS, None, True, OPTIONS) == "fitted"
    else:
        with pytest.raises(PrivacyError, match="planned 2 trainings of client 4, and this is number 3"):
            client._fit_private(client.model, ce, ROWS, None, True, OPTIONS)


def test_what_is_beside_a_private_training_sees_one_record_at_a_time(privately):
    """And a model that keeps something of its rows is refused."""
    jobs = []
    client = privately(lambda job: jobs.append(job) or ("fitted", "entry"))

    def fixed(x):
        return x.sum(1) + len(x)

    assert client._fit_on_records(client.model, ce, ROWS, None, True, OPTIONS, [fixed]) == "fitted"
    assert jobs[0].job.rows[2].tolist() == [1.0] * 7
    assert not client.fitting
    kept = []

    def keeps(x):
        kept.append(1)
        return x.sum(1)

    with pytest.raises(ContractError, match="keeps something of the rows"):
        client._fit_on_records(client.model, ce, ROWS, None, True, OPTIONS, [keeps])
