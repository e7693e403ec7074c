"""DFFKE and FKE: the losses of the exchange by hand, what an exchange asks for, and what a round is to be billed."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from precision import close
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from fedaudit import Running, State, Turns, adam, ce, kl, run
from fedaudit.errors import PrivacyError, SettingError
from fedaudit.methods.datafree import dffke as module
from fedaudit.methods.datafree._buffer import Sample, a_round, held
from fedaudit.methods.datafree._decoder import (
    Decoder,
    decode,
    decoder_size,
)
from fedaudit.methods.datafree._dffke_traffic import width_of
from fedaudit.methods.datafree._docking import z as docked
from fedaudit.methods.datafree.dffke import DFFKE, DataFree, Peers, PeersDocked, Unified, UnifiedDocked, WithDocking
from fedaudit.methods.distillation.fke import FKE, ce_and_hits, outputs, reached, student_first, teacher_first
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.training.models import build
from fedaudit.training.stacked.stack import Job, fit_together
from fedaudit.wire.message import Size, load, state_of
from fedaudit.wire.traffic import Plan
from fedaudit.wire.transcript import Transcript

LN = math.log

# Rows decoded alone and among others round otherwise. Terms behind a pixel, with h = 4 and w_Dec = 2: 4 of the linear
# layer, 3 x 3 over 4, 4 and 2 channels of the convolutions, a bias of the first and one of the last layer, two for each
# of three batch norms, and the hyperbolic tangent.
DECODER = 4 + 9 * (4 + 4 + 2) + 2 + 3 * 2 + 1


def test_exchange_and_review_losses_by_hand():
    """The student says p = (3/4, 1/4), one peer q = (1/2, 1/2), another r = p.
    Eqs. 13-14: KL[p || q] + KL[p || r] = 3/4 ln(3/2) + 1/4 ln(1/2) + 0.
    Eq. 8:      KL[q || p] + KL[r || p] = 1/2 ln(2/3) + 1/2 ln 2 + 0."""
    x = torch.tensor([[LN(3), 0.0]])
    ys = torch.tensor([[[5.0, 5.0], [LN(3), 0.0]]])  # row x peer x class; a shift of logits changes nothing
    assert student_first(lambda x: x, x, ys).tolist() == pytest.approx([0.75 * LN(1.5) + 0.25 * LN(0.5)], abs=1e-6)
    assert teacher_first(lambda x: x, x, ys).tolist() == pytest.approx([0.5 * LN(2 / 3) + 0.5 * LN(2)], abs=1e-6)


def test_the_goal_is_reached_at_tau_and_not_before():
    """Three of four right is 0.75."""
    x, y = torch.eye(4), torch.tensor([0, 1, 2, 0])
    assert reached(lambda x: x, x, y, tau=0.75)
    assert not reached(lambda x: x, x, y, tau=0.76)


def test_losses_and_hits_by_hand():
    """p = (3/4, 1/4) in both rows; the labels are 0, which is right, and 1, which is not."""
    x, y = torch.tensor([[LN(3), 0.0], [LN(3), 0.0]], dtype=torch.float64), torch.tensor([0, 1])
    wanted = torch.tensor([[-LN(0.75), 1.0], [-LN(0.25), 0.0]], dtype=torch.float64)
    torch.testing.assert_close(ce_and_hits(lambda x: x, x, y), wanted)


@pytest.mark.parametrize("method", [FKE, DFFKE])
def test_what_ends_local_training(method):
    loss, until = method(tau=0.9).stopping
    assert (loss, until.func, until.keywords) == (ce, reached, {"tau": 0.9})
    assert method(tau=0.9, stops="running").stopping == (ce_and_hits, Running(0.9))
    for stops in ("after", "running"):
        assert method(tau="off", stops=stops).stopping == (ce, None)
    with pytest.raises(SettingError, match="stops"):
        method.make({"stops": "never"})


def test_the_authors_code_stops_by_its_running_accuracy_without_a_limit():
    method = DFFKE.make({}, "authors")
    assert (*method.stopping, method.E_local) == (ce_and_hits, Running(0.98), 1000)


def party(k, t, memory, n=6):
    torch.manual_seed(100 + k)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    facts = {"id": k, "t": t, "memory": memory, "model": model, "shape": (1, 8, 8), "device": torch.device("cpu")}

    class Fake(SimpleNamespace):
        def __len__(self):
            return n

        @staticmethod
        def once(make, *parts, **given):
            return make(*(part.read() for part in parts), **given)

    return Fake(**facts)


def test_logits_meet_their_rows_whatever_rounds_peers_hold():
    """Teacher 1 holds rounds 1, 3 and 4, student 0 rounds 2, 3 and 4, so 3 and 4 are reviewed. Every row that the
    student trains on must have the logits that the teacher's model gives to that very image; and the buffer's rows are
    those of rounds 3 and 4 only."""
    torch.manual_seed(0)
    past = {}
    for t in (1, 2, 3, 4, 5):
        E = {0: torch.randn(6, 4), 1: torch.randn(6, 4)}
        past[t] = {"Dec": state_of(Decoder(4, (1, 8, 8), width=2)), "E": E}
    teacher = party(1, 5, {"B": {s: a_round(**past[s]) for s in (1, 3, 4)}})
    student = party(0, 5, {"B": {s: a_round(**past[s]) for s in (2, 3, 4)}})
    method = DFFKE(h=4, w_Dec=2)
    message = Unified(past[5]["Dec"], past[5]["E"], seed=3)
    reply = method.answer(teacher, message)
    method.answer(student, message)
    assert {s: len(y) for s, y in reply.Y.items() if s != 5} == Sample(3).counts(1, [1, 3, 4], 6)
    assert set(reply.Y) >= {1, 3, 4, 5}, "the seed was chosen so that all rounds are in the sample"
    Y = {1: reply.Y}
    past_rows = method.review_rows(student, Sample(3), held(student.memory), Y)
    for rows, expected in (
        (method.current_rows(student, student.memory["now"], Y), 6),
        (past_rows, len(reply.Y[3]) + len(reply.Y[4])),
    ):
        assert {i for i, _ in rows} == {1}, "each is of the peer that answered"
        x, y = (torch.cat(parts) for parts in zip(*(row for _, row in rows), strict=True))
        assert x.shape == (expected, 1, 8, 8)
        assert y.shape == (expected, 1, 3)
        assert torch.allclose(outputs(teacher.model, x), y[:, 0], atol=1e-6)
    wrong = method.review_rows(student, Sample(4), held(student.memory), Y)  # another seed, other rows
    assert sum(len(x) for _, (x, _) in wrong) == expected
    assert not all(torch.allclose(outputs(teacher.model, x), y[:, 0], atol=1e-3) for _, (x, y) in wrong)


def exchanged(**options):
    """Student 0 and teachers 1 and 2 of 6, 7 and 8 rows in round 3 hold rounds 1 and 2. Returns them, what they
    answered, the rounds, and what the student's exchange asked `fit` for."""
    torch.manual_seed(0)
    sizes = {0: 6, 1: 7, 2: 8}
    rounds = {}
    for t in (1, 2, 3):
        E = {k: torch.randn(n, 4) for k, n in sizes.items()}
        rounds[t] = {"Dec": state_of(Decoder(4, (1, 8, 8), width=2)), "E": E}
    everybody = {k: party(k, 3, {"B": {s: a_round(**rounds[s]) for s in (1, 2)}}, n) for k, n in sizes.items()}
    method = DFFKE(h=4, w_Dec=2, **options)
    message = Unified(rounds[3]["Dec"], rounds[3]["E"], seed=3)
    answers = {k: method.answer(client, message).Y for k, client in everybody.items()}
    student, asked = everybody[0], []
    student.x, student.y = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    student.fit = lambda loss, rows, **how: asked.append((loss, rows, how))
    method.exchange(student, Peers({i: answers[i] for i in (1, 2)}))
    return everybody, answers, rounds, asked


def test_exchange_learns_eq_13_and_eq_14_in_turn():
    """One fit, so one Adam: T_FKE epochs in which the 7 + 8 current rows and the 7 + 8 reviewed ones take turns, the
    current ones first. Every row has the logits of the teacher whose embedding it was decoded from."""
    everybody, answers, rounds, asked = exchanged(T_FKE=5, B=9, eta=0.25)
    ((loss, (x, y), how),) = asked
    assert loss is teacher_first
    assert (how["epochs"], how["batch"], how["opt"].options["lr"], how["norms"]) == (5, 9, 0.25, "batch")
    assert how["turns"] == Turns((15, 15), "step")
    images = [decode(rounds[3]["Dec"], rounds[3]["E"][i], (1, 8, 8)) for i in (1, 2)]
    assert close(x[:15], torch.cat(images), DECODER), "Eq. 13 first, D^_1 and D^_2"
    assert torch.allclose(y[:7, 0], outputs(everybody[1].model, x[:7]), atol=1e-6)
    assert torch.allclose(y[7:15, 0], outputs(everybody[2].model, x[7:15]), atol=1e-6)
    begin = 15
    for s in (1, 2):
        for i in (1, 2):
            m = len(answers[i][s])
            rows = decode(rounds[s]["Dec"], rounds[s]["E"][i], (1, 8, 8))
            part = x[begin : begin + m]
            assert all(any(torch.allclose(image, row, atol=1e-6) for row in rows) for image in part), (s, i)
            assert torch.allclose(y[begin : begin + m, 0], outputs(everybody[i].model, part), atol=1e-6)
            begin += m
    assert begin == 30
    assert list(held(everybody[0].memory)) == [1, 2, 3]


def test_own_records_are_spread_over_mixed_rows():
    ((_, (x, _, _, y, own), how),) = exchanged(T_FKE=1, review=True)[3]
    assert how["turns"] == Turns((15, 15, 6), "even")
    assert own.tolist() == [0] * 30 + [1] * 6
    assert y[30:].tolist() == [0, 1, 2, 0, 1, 2]
    assert len(x) == 36


@pytest.mark.parametrize("review", [False, True])
def test_by_peer_a_batch_is_of_one_peer(review):
    """Own records first, if they are reviewed, then each peer's past rows, then each peer's current ones; each part
    holds the images on which that peer's model gave these very logits."""
    everybody, _, rounds, asked = exchanged(T_FKE=1, batches="peer", review=review, alternate="epoch")
    ((_, (x, y, *_), how),) = asked
    own = (6,) * review
    assert how["turns"] == Turns((*own, 7, 8, 7, 8), "step"), "peers take turns, whatever `alternate` says"
    begin = sum(own)
    for i, n in ((1, 7), (2, 8), (1, 7), (2, 8)):
        part = slice(begin, begin + n)
        assert torch.allclose(y[part, 0], outputs(everybody[i].model, x[part]), atol=1e-6)
        begin += n
    images = [decode(rounds[3]["Dec"], rounds[3]["E"][i], (1, 8, 8)) for i in (1, 2)]
    assert close(x[-15:], torch.cat(images), DECODER), "the current ones last"


def test_more_past_rows_are_for_later_epochs_without_embeddings_too():
    """Two epochs as one: the 14 and 16 past rows of two peers once, their 7 and 8 current ones twice."""
    ((_, (x, _), how),) = exchanged(T_FKE=2, batches="peer", reviewed=2)[3]
    assert (how["epochs"], how["turns"]) == (1, Turns((14, 16, 7, 8), "step", (1, 1, 2, 2)))
    assert len(x) == 45


def test_rows_have_the_docked_embeddings_of_who_answered():
    """A peer's, and with `own` the client's own on its own images; reviewed ones too, of the peer and the round."""
    torch.manual_seed(0)
    sizes, layers = {0: 6, 1: 7, 2: 8}, {}
    rounds = {
        t: {"Dec": state_of(Decoder(4, (1, 8, 8), width=2)), "E": {k: torch.randn(n, 4) for k, n in sizes.items()}}
        for t in (1, 2)
    }
    method, said = DFFKE(h=4, w_Dec=2, embed="answered", own=True), {}
    clients = {k: party(k, 2, {"B": {1: a_round(**rounds[1])}}, n) for k, n in sizes.items()}
    for k, client in clients.items():
        client.model = build("mlp", shape=(1, 8, 8), classes=3).eval()
        layers[k] = state_of(nn.Linear(client.model.width, 4))
        said[k] = method.answer_embedded(client, UnifiedDocked(**rounds[2], seed=3, z=layers[k]))
    Y, Z = ({i: getattr(said[i], field) for i in (2, 1)} for field in "YZ")
    now = clients[0].memory["now"]
    found = method.current_rows(clients[0], now, Y, Z)
    assert [(i, len(x)) for i, (x, *_) in found] == [(2, 8), (1, 7), (0, 6)]
    past = method.review_rows(clients[0], method.sample(3), held(clients[0].memory), Y, Z)
    assert [(i, len(x)) for i, (x, *_) in past] == [(2, 8), (1, 7)]
    for i, (x, ys, e) in (*found, *past):
        model = clients[i].model
        assert torch.allclose(ys[:, 0], outputs(model, x), atol=1e-6)
        assert torch.allclose(e, docked(outputs(model.encode, x), layers[i]), atol=1e-6)


@pytest.mark.parametrize("review", [False, True])
@pytest.mark.parametrize("embed", [True, "answered"])
def test_a_docking_layer_learns_with_the_model_and_leaves_what_was_sent(embed, review):
    """One step of 1 on every number of what is trained: the client's model, and a docking layer of its own."""
    torch.manual_seed(0)
    layer, E = state_of(nn.Linear(5, 4)), {k: torch.randn(6, 4) for k in (0, 1)}
    before, asked = {name: t.clone() for name, t in layer.items()}, []
    now = {"round": a_round(state_of(Decoder(4, (1, 8, 8), width=2)), E), "seed": 1, "z": layer}
    student = party(0, 1, {"now": now})
    student.x, student.y = torch.randn(6, 1, 8, 8), torch.zeros(6, dtype=torch.long)

    def fit(loss, rows, *, model, given, **how):
        asked.append((loss, model.net, given, {name for name, _ in model.named_parameters() if "net" not in name}))
        with torch.no_grad():
            for p in model.parameters():
                p += 1

    student.fit, weight = fit, student.model[1].weight.detach().clone()
    told = {1: {1: torch.zeros(6, 3)}}, {1: {1: torch.zeros(6, 4)}}
    msg = PeersDocked(*told) if embed == "answered" else Peers(told[0])
    values = {"embed": embed, "review": review, "dock": True, "md": "MSE", "md_of": "exchanged"}
    back = DFFKE(h=4, w_Dec=2, **values).exchange_returning(student, msg)
    learned = {"student_first": False, "z": "learns"}
    assert asked == [(module.exchanged, student.model, learned, {"z_weight", "z_bias"})]
    assert all(torch.equal(back.z[name], t + 1) and torch.equal(layer[name], t) for name, t in before.items())
    assert torch.equal(back.theta["1.weight"], weight + 1)


def test_a_docking_layer_comes_back_as_it_was_without_an_exchange():
    layer = state_of(nn.Linear(5, 4))
    now = {"round": a_round(state_of(Decoder(4, (1, 8, 8), width=2)), {0: torch.randn(6, 4)}), "seed": 1, "z": layer}
    for T_FKE in (0, 2):  # no epoch, or no peer
        client = party(0, 1, {"now": dict(now)})
        back = DFFKE(h=4, w_Dec=2, embed="answered", dock=True, T_FKE=T_FKE).exchange_returning(
            client, PeersDocked({}, {})
        )
        assert (back.theta, {name: t.tolist() for name, t in back.z.items()}) == (
            None,
            {name: t.tolist() for name, t in layer.items()},
        )
        assert set(client.memory) == {"trained", "B"}, "nothing else is left"


def test_every_reading_of_the_exchange_reaches_fit():
    """The other direction, by epoch, batch norms left alone, the student's own six rows with its own logits last."""
    _, answers, rounds, asked = exchanged(kl="student-first", alternate="epoch", statistics="own", own=True, T_FKE=1)
    ((loss, (x, y), how),) = asked
    assert loss is student_first
    assert (how["epochs"], how["norms"], how["turns"]) == (1, "running", Turns((21, 15), "epoch"))
    assert close(x[15:21], decode(rounds[3]["Dec"], rounds[3]["E"][0], (1, 8, 8)), DECODER)
    assert torch.equal(y[15:21, 0], answers[0][3])
    assert not exchanged(T_FKE=0)[3]


@pytest.mark.parametrize("more", [{}, {"embed": True}, {"embed": True, "review": True}])
def test_decoded_images_do_not_lie_in_memory_twice(more, monkeypatch):
    """Seven rows of this round, two and three of the rounds before, six own records. When training begins, what was
    decoded round by round is gone: all of it lies in the rows that are trained on."""
    made, begun, real = [], [], DFFKE.images

    def images(self, client, Dec, e):
        found = real(self, client, Dec, e)
        made.append(weakref.ref(found))
        return found

    def begins(self, client, loss, rows, **how):
        gc.collect()
        begun.append((len(made), sum(ref() is not None for ref in made), len(rows[0])))

    monkeypatch.setattr(DFFKE, "images", images)
    monkeypatch.setattr(DFFKE, "teach", begins)
    rounds = {
        t: a_round(state_of(Decoder(4, (1, 8, 8), width=2)), {k: torch.randn(7, 4) for k in (0, 1)}) for t in (1, 2, 3)
    }
    student = party(0, 3, {"B": {s: rounds[s] for s in (1, 2)}})
    student.x, student.y = torch.randn(6, 1, 8, 8), torch.zeros(6, dtype=torch.long)
    z = {"z": {"weight": torch.eye(4), "bias": torch.zeros(4)}} if more else {}
    Y = {1: {s: torch.zeros(n, 3) for s, n in ((3, 7), (1, 2), (2, 3))}}
    DFFKE(h=4, w_Dec=2, **more).learn_from_peers(student, {"round": rounds[3], "seed": 3, **z}, Y)
    assert begun == [(3, 0, 18 if "review" in more else 12)]


def test_an_exchange_without_a_buffer_or_without_peers():
    method = DFFKE(h=4, w_Dec=2, R=0)
    torch.manual_seed(0)
    now = {"Dec": state_of(Decoder(4, (1, 8, 8), width=2)), "E": {0: torch.randn(6, 4), 1: torch.randn(7, 4)}}
    for peers, expected in (((1,), [Turns((7, 0))]), ((), [])):
        clients = {k: party(k, 1, {}, len(now["E"][k])) for k in (0, 1)}
        answers = {k: method.answer(client, Unified(**now, seed=1)).Y for k, client in clients.items()}
        asked = []
        clients[0].fit = lambda loss, rows, asked=asked, **how: asked.append(how["turns"])
        method.exchange(clients[0], Peers({i: answers[i] for i in peers}))
        assert asked == expected
        assert not held(clients[0].memory)


def test_numbers_out_of_range_are_refused():
    for name, value in (("tau", 98), ("tau", 0), ("R", -1), ("T_FKE", -1), ("kl", "forward"), ("alternate", "round")):
        with pytest.raises(SettingError, match=f"hyper-parameter of dffke {name}"):
            DFFKE.make({name: value})
    assert DFFKE.make({"tau": "off", "R": "unlimited"}).tau == "off"


def test_presets_are_the_papers():
    assert {name: (DFFKE.make({}, name).T_Dec, DFFKE.make({}, name).T_FKE) for name in DFFKE.presets} == {
        "authors": (3, 2),
        "cifar10": (3, 2),
        "cifar100": (6, 4),
        "tinyimagenet": (6, 4),
    }
    assert (DFFKE().T_Tran, DFFKE().h, DFFKE().tau, DFFKE().eta, DFFKE().B) == (100, 512, 0.98, 1e-3, 100)


def test_what_is_the_authors_is_off_unless_it_is_asked_for():
    """Every setting of the preset but T_Dec and T_FKE: without the preset, and with it."""
    besides = {
        "kl": ("teacher-first", "teacher-first"),
        "embed": (False, "answered"),
        "review": (False, True),
        "fresh": (False, "decoder"),
        "output": ("tanh", "standardised"),
        "mean_x": (0.0, -0.053),
        "sigma_x": (1.0, 0.5),
        "B_Tran": (100, "client"),
        "decay_Tran": (0.0, 1e-3),
        "alike": (False, True),
        "rests": (False, True),
        "batches": ("mixed", "peer"),
        "dock": (False, True),
        "reviewed": (1, 2),
        "batches_Dec": ("mixed", "client"),
        "answer_Dec": (False, True),
        "md": ("none", "inverse-CE"),
        "md_of": ("trained", "exchanged"),
        "decay": (0.0, 1e-5),
        "crop": (0, 4),
        "jitter": (0.0, 0.4),
        "colours": ("plain", "torchvision"),
        "flip": (False, True),
        "stops": ("after", "running"),
        "E_local": (100, 1000),
    }
    paper, author = DFFKE(), DFFKE.make({}, "authors")
    assert {name: (getattr(paper, name), getattr(author, name)) for name in besides} == besides
    assert DFFKE.presets["authors"].keys() == {"T_Dec", "T_FKE", *besides}


def plan(t, **facts):
    sizes = {"cnn": Size(1000, 10)}
    return Plan(
        t=t, participants=[0, 1, 3], n={0: 10, 1: 20, 3: 30}, archs=dict.fromkeys((0, 1, 3), "cnn"), server_arch="cnn",
        shape=(1, 8, 8), classes=10, model_size=sizes.__getitem__, clients=6, public=50, **facts,
    )  # fmt: skip


def test_traffic_of_a_planned_round():
    """Three of six clients: by round 7 a client is expected in three earlier rounds, of which R = 2 are held. Client 3:
    2 x 30 x 10 logits and three round numbers."""
    method = DFFKE(h=16, R=2)
    first, later = method.traffic(plan(1)), method.traffic(plan(7))
    assert first["up", "Answered.Y"] == Size(4 * 10 * 60 + 3 * 8)
    assert later["up", "Answered.Y"] == Size(2 * 4 * 10 * 60 + 3 * 3 * 8)
    assert later["down", "Peers.Y"] == Size(2 * (2 * 4 * 10 * 60 + 3 * 3 * 8) + 6 * 8)
    assert later["up", "Shared.theta"] == Size(3000, 30)
    assert DFFKE(R=0).traffic(plan(7))["up", "Answered.Y"] == first["up", "Answered.Y"]


@pytest.mark.parametrize(("R", "t", "lacking"), [(2, 7, 2), ("unlimited", 7, 3), (2, 1, 0), (2, 2, 2), (4, 3, 2)])
def test_what_is_sent_again_is_planned(R, t, lacking):
    """Three of six clients take part, so that one lacks the round j back with probability 2^-j. With R = 2 in round 7
    it lacks 1/2 + 1/4 rounds, three of them 2.25; with R unlimited 63/64, 2.95; in round 2 one half, 1.5. A round is
    the decoder, its number, and the rows of 10, 20 and 30 records with whose they are."""
    size = DFFKE(h=16, R=R, sync=True).traffic(plan(t))
    rows = 4 * 16 * (10 + 20 + 30) + 3 * 8 + 8
    assert size["down", "Missed.E"] == Size(rows * lacking)
    decoder = size["down", "Unified.Dec"]
    assert size["down", "Missed.Dec"].payload == (decoder.payload // 3 + 8) * lacking
    assert size["down", "Missed.Dec"].buffers == decoder.buffers // 3 * lacking


def test_traffic_when_clients_drop_out():
    """Client 1 fails after the first ask, client 3 in the last: 0 and 3 are unified with the rows of all three, and
    exchange with each other."""
    asks = [((0, 1, 3), (0, 1, 3)), ((0, 1, 3), (0, 3)), ((0, 3), (0,))]
    choices = {"Answered.Y": {0: {7: None}, 3: {7: None, 2: None}}}
    size = DFFKE(h=16).traffic(plan(7, asks=asks, choices=choices))
    assert size["down", "Unified.E"] == Size(3 * (4 * 60 * 16 + 3 * 8))
    assert size["up", "Answered.Y"] == Size(4 * 10 * (10 + 60) + 8 + 16)
    assert size["down", "Peers.Y"] == Size(4 * 10 * (10 + 60) + 8 + 16 + 2 * 8)


@pytest.mark.parametrize("sync", [False, True])
def test_traffic_of_the_authors_code_when_clients_drop_out(sync):
    """As above; answers have h = 16 numbers more a row, and client 0 alone comes to send its model and docking layer.
    With `sync` an ask of nobody comes before. A client that answers on two past rounds has three times its rows."""
    caught_up = [((), ())] * sync
    asks = [((0, 1, 3), (0, 1, 3)), *caught_up, ((0, 1, 3), (0, 3)), ((0, 3), (0,))]
    choices = {"AnsweredDocked.Y": {0: {7: None}, 3: {7: None, 2: None, 5: None}}}
    values = {"embed": "answered", "dock": True, "batches": "peer", "reviewed": 2, "md": "KL", "md_of": "exchanged"}
    size = DFFKE(h=16, sync=sync, **values).traffic(plan(7, asks=asks, choices=choices))
    layer = Size(4 * (16 * width_of("cnn", (1, 8, 8), 10) + 16))
    assert size["down", "UnifiedDocked.z"] == layer * 3
    assert size["up", "ExchangedModel.z"] == layer
    assert size["up", "ExchangedModel.theta"] == Size(1000, 10)
    for field, columns in (("Y", 10), ("Z", 16)):
        answers = Size(4 * columns * (10 + 3 * 30) + 8 + 24)
        assert size["up", f"AnsweredDocked.{field}"] == answers
        assert size["down", f"PeersDocked.{field}"] == answers + Size(2 * 8)
    assert not size.keys() & {("up", "Answered.Y"), ("down", "Peers.Y"), ("down", "Unified.E")}


# --- runs of DFFKE: what crosses the wire, noise and ledger, collaboration, and both points of a round.


QUICK = dict(DFFKE.quick)


FEW = {"aux": 0.7, "eval_clients": False}


def sent(folder, t):
    """Payload by message and field in one round, and how many messages."""
    sizes = {}
    for entry in Transcript(folder / "transcript").entries():
        if entry.round == t:
            for name, field in entry.fields.items():
                sizes.setdefault(f"{entry.message}.{name}", []).append(field.payload + field.buffers)
    return {name: (sum(values), len(values)) for name, values in sizes.items()}


def test_both_circulations_one_copy_up_and_the_others_down(dffke_run):
    """n = members. Up: theta_k, n_k h_k embeddings and as many labels, each once. Down: everybody gets Dec and all
    translated embeddings (h = 16). Logits: n_k x 10 up, in later rounds twice as many (B^t_k); each copy goes down to
    the K - 1 = 2 others, with eight bytes more for the peer's number."""
    n = read_record(dffke_run).data.members
    widths = [64, 64, 128]
    for t in (1, 2, 3):
        size = sent(dffke_run, t)
        assert size["Shared.E"] == (sum(4 * a * b for a, b in zip(n, widths, strict=True)), 3)
        assert size["Shared.Y"] == (8 * sum(n), 3)
        assert size["Unified.E"] == (3 * (4 * sum(n) * 16 + 3 * 8), 3)
        Dec = decoder_size(16, (1, 8, 8), QUICK["w_Dec"])
        assert size["Unified.Dec"] == (3 * (Dec.payload + Dec.buffers), 3)
        rounds = 1 if t == 1 else 2  # this one, and the one in the buffer (R = 1)
        assert size["Answered.Y"] == (4 * 10 * sum(n) * rounds + 3 * 8 * rounds, 3)
        assert size["Peers.Y"] == (2 * size["Answered.Y"][0] + 3 * 2 * 8, 3)


def test_a_docking_layer_and_a_standardised_decoder_are_billed(tmp_path):
    """`embed`: client k gets its own theta_k^z, 16 x h_k weights and 16 biases of four bytes. The decoder has two more
    numbers and a count, of the batch norm behind its output."""
    values = {**QUICK, "embed": True, "output": "standardised"}
    record = run(method="dffke", rounds=1, clients=2, model="cnn:1,mlp:1", set=values, out=tmp_path / "a", **FEW)
    size = sent(tmp_path / "a", 1)
    assert size["UnifiedDocked.z"] == (sum(4 * (16 * h + 16) for h in (64, 128)), 2)
    plain, standard = (decoder_size(16, (1, 8, 8), QUICK["w_Dec"], output) for output in ("tanh", "standardised"))
    assert size["UnifiedDocked.Dec"] == (2 * (standard.payload + standard.buffers), 2)
    assert (standard.payload, standard.buffers) == (plain.payload, plain.buffers + 4 + 4 + 8)
    assert not [note for note in record.notes if "traffic" in note.lower()], "declared as it was sent"


AUTHOR = {
    **QUICK, "R": 2, "T_FKE": 2, "embed": "answered", "review": True, "batches": "peer", "dock": True, "reviewed": 2,
    "fresh": "decoder", "batches_Dec": "client", "answer_Dec": True, "md": "inverse-CE", "md_of": "exchanged",
}  # fmt: skip


def test_what_the_authors_code_sends_besides_is_billed(tmp_path):
    """Teachers answer with h = 16 numbers a row beside ten logits. Round 3 reviews two rounds, so that there are three
    times n_k rows. After the exchange theta_k and theta_k^z go up."""
    record = run(method="dffke", rounds=3, clients=3, model="cnn:2,mlp:1", set=AUTHOR, out=tmp_path / "a", **FEW)
    n, widths = record.data.members, (64, 64, 128)
    for t in (1, 2, 3):
        size = sent(tmp_path / "a", t)
        assert size["AnsweredDocked.Y"] == (t * (4 * 10 * sum(n) + 3 * 8), 3)
        assert size["AnsweredDocked.Z"] == (t * (4 * 16 * sum(n) + 3 * 8), 3)
        assert size["PeersDocked.Z"] == (2 * size["AnsweredDocked.Z"][0] + 3 * 2 * 8, 3)
        assert size["ExchangedModel.theta"] == size["Shared.theta"]
        assert size["ExchangedModel.z"] == size["UnifiedDocked.z"] == (sum(4 * (16 * h + 16) for h in widths), 3)
    assert record.traffic_declared
    assert not record.notes


@pytest.mark.parametrize(("off", "gone"), [("dock", "z"), ("md_of", "theta")])
def test_only_what_is_used_is_sent_after_the_exchange(off, gone, tmp_path):
    values = {name: value for name, value in AUTHOR.items() if name != off}
    run(method="dffke", rounds=1, clients=2, set=values, out=tmp_path / "a", **FEW)
    size = sent(tmp_path / "a", 1)
    assert f"ExchangedModel.{gone}" not in size or size[f"ExchangedModel.{gone}"][0] == 0
    assert size["ExchangedModel.theta" if gone == "z" else "ExchangedModel.z"][0] > 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dock": True}, "set embed"),
        ({"dock": True, "embed": True, "fresh": True}, 'set fresh = "decoder"'),
        ({"reviewed": 2}, 'set batches = "peer"'),
        ({"md_of": "exchanged"}, "set md, or"),
    ],
)
def test_settings_of_the_authors_code_that_do_not_go_together_are_refused(values, said):
    with pytest.raises(SettingError, match=said):
        DFFKE.make(values)


def test_docking_layers_learn_beside_networks_alone_and_in_a_stack():
    """Two clients of one architecture and unequal size; a batch is of own records or of images. Both ways are those
    of torch's Adam on (MSE + KL) or CE, with a gradient of 0 for a docking layer that a batch does not reach."""
    trained = []
    for together in (False, True):
        jobs, nets = [], []
        for k, n in ((0, 6), (1, 8)):
            torch.manual_seed(k)
            net = build("mlp@0.25", shape=(1, 8, 8), classes=3).double()
            z = State({"weight": torch.randn(4, net.width).double(), "bias": torch.randn(4).double()})
            x, ys, e = (torch.randn(2 * n, *shape).double() for shape in ((1, 8, 8), (1, 3), (4,)))
            y, own = torch.arange(2 * n) % 3, (torch.arange(2 * n) < n).double()
            nets.append((net, WithDocking(net, z), (x, ys, e, y, own), n))
            options = {"opt": adam(0.01, weight_decay=0.1), "batch": 4, "epochs": 2, "turns": Turns((n, n))}
            options["given"] = {"student_first": False, "z": "learns"}
            jobs.append(Job(nets[-1][1], module.exchanged, nets[-1][2], torch.Generator().manual_seed(k), options))
        if together:
            fit_together(jobs)
        else:
            for job in jobs:
                job.alone()
        trained.append(
            [{**state_of(net), **{f"z.{name}": t for name, t in both.docking.items()}} for net, both, *_ in nets]
        )
    for alone, stacked in zip(*trained, strict=True):
        assert all(torch.allclose(alone[name], stacked[name], atol=1e-12) for name in alone)
    torch.manual_seed(0)
    net, rows, n = build("mlp@0.25", shape=(1, 8, 8), classes=3).double(), nets[0][2], nets[0][3]
    first = torch.randn(4, net.width).double(), torch.randn(4).double()
    z = nn.Linear(net.width, 4).double()
    z.weight.data, z.bias.data = first
    by_hand, order = (
        torch.optim.Adam([*net.parameters(), *z.parameters()], lr=0.01, weight_decay=0.1),
        torch.Generator(),
    )
    order.manual_seed(0)
    for _ in range(2):
        for b in Turns((n, n)).batches(4, order):
            x, ys, e, y, own = (row[b] for row in rows)
            h = net.encode(x)
            drawn = (z(h) - e).square().mean(1) + kl(ys[:, 0], net.classify(h))
            loss = F.cross_entropy(net.classify(h), y) if own[0] else drawn.mean()
            by_hand.zero_grad()
            (loss + 0 * z.weight.sum() + 0 * z.bias.sum()).backward()
            by_hand.step()
    found = trained[0][0]
    assert torch.allclose(found["z.weight"], z.weight, atol=1e-12)
    assert torch.allclose(found["z.bias"], z.bias, atol=1e-12)
    assert all(torch.allclose(found[name], t, atol=1e-12) for name, t in net.state_dict().items())


def test_past_rows_have_as_many_steps_as_current_ones():
    """Two epochs; own records, then the past rows of two peers, then their current ones. One peer's 14 past rows are
    gone through once, the other's seven twice."""
    method = DFFKE(T_FKE=2, batches="peer", reviewed=2)
    sizes = (14, 7, 7, 7)
    assert method.in_all_epochs(Turns((6, *sizes)), sizes) == Turns((6, *sizes), "step", (2, 1, 2, 2, 2))
    assert method.in_all_epochs(Turns(sizes), sizes).times == (1, 2, 2, 2)
    assert method.in_all_epochs(Turns((0, 7)), (0, 7)).times == (2, 2), "an empty part has no turn"
    assert method.in_all_epochs(Turns((1, 7)), (1, 7)).times == (2, 2), "few rows are not seen more often for that"
    assert DFFKE(T_FKE=1, batches="peer", reviewed=2).in_all_epochs(Turns(sizes), sizes).times == (1, 1, 1, 1)


def test_the_paper_noise_and_what_the_ledger_says(tmp_path):
    """Eq. 15: sigma = sqrt(2 ln(1.25 / delta)) Delta / epsilon with delta = 1/n; Delta = 2 C = 2 under clipping. Pure
    noise on the logits: they keep their size and nothing else. theta_k and Y_k are unprotected: epsilon is infinite."""
    privacy = {
        "embeddings": {"epsilon": 0.5, "calibration": "classical", "sensitivity": "clip:1.0"},
        "logits": {"mechanism": "pure-noise"},
    }
    record = run(method="dffke", rounds=1, clients=3, set=QUICK, privacy=privacy, out=tmp_path / "a", **FEW)
    for client in record.ledger:
        entries = {e.field: e for e in client.entries}
        sigma = math.sqrt(2 * LN(1.25 * client.n)) * 2 / 0.5
        assert entries["Shared.E"].sigma == pytest.approx(sigma)
        assert entries["Answered.Y"].mechanism == "pure-noise"
        assert abs(entries["Answered.Y"].cosine) < 0.1
        assert client.by_kind["logits"] == 0
        assert client.by_kind["labels"] == client.by_kind["weights"] == math.inf


def test_dp_sgd_needs_the_goal_switched_off(tmp_path):
    privacy = {"training": {"noise_multiplier": 1.0}}
    values = {"method": "dffke", "rounds": 1, "clients": 2, "model": "mlp", "privacy": privacy, **FEW}
    for stops in ("after", "running"):
        with pytest.raises(PrivacyError, match="Set its stopping rule off"):
            run(**values, set={**QUICK, "tau": 0.9, "stops": stops}, out=tmp_path / stops)
    record = run(**values, set=QUICK, out=tmp_path / "b")
    for client in record.ledger:
        assert {e.field: e.mechanism for e in client.entries}["Shared.theta"] == "post-processing of DP-SGD"


@pytest.mark.parametrize(
    ("values", "answers", "by_client", "known", "compared"),
    [
        ({}, False, False, False, None),
        ({"answer_Dec": True}, True, False, True, None),
        ({"md": "inverse-CE"}, False, False, True, None),
        ({"md": "MSE", "batches_Dec": "client"}, False, True, False, None),
        ({"md": "MSE", "md_of": "exchanged", "batches": "peer"}, False, False, False, [1.0, 5.0]),
    ],
    ids=["the paper", "answers", "inverse CE", "by client", "exchanged"],
)
def test_what_the_decoder_is_trained_with(values, answers, by_client, known, compared, monkeypatch):
    """Models of one weight: 1 and 2 now, 5 where client 8's last exchange left it. Client 3 has exchanged nothing."""

    class One(nn.Module):
        def __init__(self, w=0.0):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(w))

        def classify(self, e):
            return self.w * e

    asked = []
    monkeypatch.setattr(module, "train_decoder", lambda *of, **how: asked.append((of, how)))
    server = SimpleNamespace(
        shape=(1, 8, 8), device="cpu", arch=lambda k: "cnn", model=lambda arch, state: load(One(), state)
    )
    method, clients = DFFKE(h=4, w_Dec=2, **values), {3: One(1.0), 8: One(2.0)}
    past = {8: state_of(One(5.0)), 9: state_of(One(6.0))}
    h = {3: torch.ones(2, 3), 8: torch.ones(4, 3)}
    method.train_decoder(DataFree(state_of(method.decoder(server)), {}, past, {}, {}), server, clients, {}, {}, h)
    (((_, _, given, *_), how),) = asked
    assert given is clients
    assert (how["answers"], how["by_client"], how["md"], "Y" in how) == (answers, by_client, method.md, known)
    if known:
        assert {k: y.tolist() for k, y in how["Y"].items()} == {3: [[1.0] * 3] * 2, 8: [[2.0] * 3] * 4}
    found = how.get("peers")
    assert (found and [net.w.item() for net in found.values()]) == compared


def decoders(folder):
    """The decoder that was sent in each round."""
    entries = [e for e in Transcript(folder / "transcript").entries() if e.message == "Unified"]
    return {e.round: e["Dec"] for e in entries}


def test_the_decoder_goes_on_unless_fresh(tmp_path):
    """Without training (T_Dec = 0) a decoder that goes on stays bit for bit what it was."""
    for fresh in (False, True):
        values = {**QUICK, "T_Dec": 0, "T_Tran": 0, "fresh": fresh}
        run(method="dffke", rounds=2, clients=2, set=values, out=tmp_path / str(fresh), **FEW)
        sent = decoders(tmp_path / str(fresh))
        assert torch.equal(sent[1]["linear.weight"], sent[2]["linear.weight"]) is not fresh


def test_limited_collaboration_asks_the_first_clients_only(tmp_path):
    """pi = 0.5 of four clients: 0 and 1, in every round; the others' models stay as they were."""
    for name in ("dffke", "fke"):
        quick = {"dffke": QUICK, "fke": dict(FKE.quick)}[name]
        folder = tmp_path / name
        run(method=name, rounds=2, clients=4, public=0.1, set={**quick, "pi": 0.5}, out=folder, **FEW)
        assert {e.client for e in Transcript(folder / "transcript").entries()} == {0, 1}


def test_both_points_of_a_round_are_evaluated(tmp_path):
    """In round 2 of one run: `trained` is the accuracy of the models that clients uploaded, `exchanged` of what they
    then became and deploy. On the common test set and on own held-out records, mean and deviation over clients."""
    record = run(
        method="dffke", rounds=2, clients=3, set={**QUICK, "T_FKE": 2, "eta": 0.01}, aux=0.7, out=tmp_path / "a"
    )
    world = RunFolder(tmp_path / "a").world
    utility = record.rounds[1].utility
    points = utility.points
    uploaded = {
        e.client: e["theta"]
        for e in Transcript(tmp_path / "a" / "transcript").entries()
        if e.message == "Shared" and e.round == 2
    }
    right = []
    for k, theta in uploaded.items():
        model = world.blank_model(k)
        model.load_state_dict(theta)
        x, y = world.test
        right.append(float((outputs(model.eval(), x).argmax(1) == y).float().mean()))
    found = points["trained"].global_test
    assert found.each == pytest.approx(right)
    assert found.mean == pytest.approx(sum(right) / 3)
    assert points["exchanged"].global_test.each != found.each
    assert points["exchanged"] == utility.clients


def test_what_is_deployed(tmp_path):
    """The exchange moves theta_k. `trained` is tested as local training left it: what the client uploaded."""
    for deploy in ("exchanged", "trained"):
        folder = tmp_path / deploy
        run(method="dffke", rounds=1, clients=2, set={**QUICK, "deploy": deploy}, out=folder, **FEW)
        shared = next(e for e in Transcript(folder / "transcript").entries() if e.message == "Shared" and e.client == 1)
        final = load_file(folder / "models" / "client-000001.safetensors")
        same = all(torch.equal(t, final[name]) for name, t in shared["theta"].items())
        assert same is (deploy == "trained")


# --- what DFFKE is for, on a small real setting: its clients know what only others have seen. Minutes on a CPU.


SETTING = {"dataset": "digits", "clients": 5, "partition": "dirichlet:0.1", "keep_weights": 1, "eval_every": 3}


ROUNDS, E, B = 3, 10, 20


EXCHANGE = {"h": 64, "w_Dec": 16, "B_Dec": 20, "T_Tran": 20, "T_Dec": 5, "T_FKE": 4, "R": 1, "kl": "teacher-first"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clients_beat_training_alone_by_fifteen_points(seed, tmp_path):
    """Five clients with a few classes each, three rounds, the KL as in Eq. 8; Adam, its step, the batch and the local
    epochs are the same with and without the exchange. Accuracy of the clients' models on the common test set, mean over
    clients."""
    values = {**SETTING, "rounds": ROUNDS, "seed": seed}
    dffke = {"tau": "off", "E_local": E, "B": B, "eta": 1e-3, **EXCHANGE}
    with_peers = run(method="dffke", set=dffke, out=tmp_path / "dffke", **values)
    local = {"opt": "adam", "E": E, "B": B, "eta": 1e-3}
    alone = run(method="local", set=local, out=tmp_path / "local", **values)
    print(f"seed {seed}: {score(with_peers):.3f} with the exchange, {score(alone):.3f} alone")
    assert score(with_peers) >= score(alone) + 0.15


def score(record):
    return record.result.last.clients.global_test.mean
