"""DFFKE and FKE: Eqs. 8-15 by hand, the decoder's size, the buffer's size and alignment, and what crosses the wire."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from fedaudit import Turns, adam, registry, run
from fedaudit.errors import PrivacyError, SettingError
from fedaudit.methods._buffer import Sample, buffer_bytes, formula_bytes, held, remember
from fedaudit.methods._decoder import (
    Decoder,
    decode,
    decoder_loss,
    decoder_size,
    discrepancy,
    fidelity,
    resize,
    train_decoder,
)
from fedaudit.methods._docking import Docking, alignment, z
from fedaudit.methods.dffke import DFFKE, Peers, Unified
from fedaudit.methods.fke import FKE, outputs, reached, student_first, teacher_first
from fedaudit.privacy.policy import read_policies
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.task import ClientState
from fedaudit.suite.suite_file import read_suite
from fedaudit.training.models import build, count
from fedaudit.wire.codec import decode as decode_record
from fedaudit.wire.message import KINDS, Size, State, state_of
from fedaudit.wire.traffic import Plan
from fedaudit.wire.transcript import Transcript

LN = math.log


def script(name):
    path = Path(__file__).parents[2] / "docs" / "results" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the losses by hand -----------------------------------------------------------------------------------------------


def test_exchange_and_review_losses_by_hand():
    """The student says p = (3/4, 1/4), one peer q = (1/2, 1/2), another r = p.
    Eqs. 13-14: KL[p || q] + KL[p || r] = 3/4 ln(3/2) + 1/4 ln(1/2) + 0.
    Eq. 8:      KL[q || p] + KL[r || p] = 1/2 ln(2/3) + 1/2 ln 2 + 0."""
    x = torch.tensor([[LN(3), 0.0]])
    ys = torch.tensor([[[5.0, 5.0], [LN(3), 0.0]]])  # row x peer x class; a shift of logits changes nothing
    assert student_first(lambda x: x, x, ys).tolist() == pytest.approx([0.75 * LN(1.5) + 0.25 * LN(0.5)], abs=1e-6)
    assert teacher_first(lambda x: x, x, ys).tolist() == pytest.approx([0.5 * LN(2 / 3) + 0.5 * LN(2)], abs=1e-6)


def docking():
    """Client 0 of width 1: z(e) = (2 e, e) + (0, 1). Client 1 of width 2: z(e) = (e_2, e_1). The head: identity."""
    first, second = nn.Linear(1, 2), nn.Linear(2, 2)
    first.weight.data, first.bias.data = torch.tensor([[2.0], [1.0]]), torch.tensor([0.0, 1.0])
    second.weight.data, second.bias.data = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.zeros(2)
    model = Docking([first, second], classes=2)
    model.head.weight.data, model.head.bias.data = torch.eye(2), torch.zeros(2)
    return model


def test_unification_by_hand():
    """Eqs. 10-11. e = ln 2 at client 0: z = (2 ln 2, ln 2 + 1), and with label 0 the cross-entropy is
    ln(1 + exp(ln 2 + 1 - 2 ln 2)) = ln(1 + e / 2). e = (ln 3, 0) at client 1: z = (0, ln 3), label 1: ln(1 + 1/3)."""
    model = docking()
    e, k, y = torch.tensor([[LN(2), 0.0], [LN(3), 0.0]]), torch.tensor([0, 1]), torch.tensor([0, 1])
    assert alignment(model, e, k, y).tolist() == pytest.approx([LN(1 + math.e / 2), LN(4 / 3)], abs=1e-6)
    assert z(torch.tensor([[LN(2)]]), model.layer(0, 1)).tolist() == [pytest.approx([2 * LN(2), LN(2) + 1])]
    assert z(torch.tensor([[LN(3), 0.0]]), model.layer(1, 2)).tolist() == [pytest.approx([0, LN(3)])]


def test_the_padding_of_narrow_embeddings_is_never_trained():
    model = docking()
    e, k, y = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([0, 1]), torch.tensor([0, 1])
    alignment(model, e, k, y).sum().backward()
    assert model.weight.grad[0, 1].abs().max() == 0
    assert model.weight.grad[0, 0].abs().max() > 0
    assert model.weight.grad[1].abs().min() > 0


def test_fidelity_by_hand():
    """Eq. 12, MSE over h = 2 entries: ((3 - 1)^2 + (0 - 1)^2) / 2 = 5/2, and 0 for what comes back as it was."""
    assert fidelity(torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2)).tolist() == [2.5, 0.0]


def test_discrepancy_by_hand():
    """Appendix E, teacher (3/4, 1/4), student (1/2, 1/2), n = 2 classes.
    KL: -0.1 (3/4 ln(3/2) + 1/4 ln(1/2)). MAE: -(1/4 + 1/4) / 2 = -1/4. MSE: -(1/16 + 1/16) / 2 = -1/16.
    Teacher (1, 0), student (0, 1): both reach the bound -2/n = -1."""
    teacher, student = torch.tensor([[LN(3), 0.0]]), torch.zeros(1, 2)
    expected = {"KL": -0.1 * (0.75 * LN(1.5) + 0.25 * LN(0.5)), "MAE": -0.25, "MSE": -0.0625}
    for choice, value in expected.items():
        assert discrepancy(choice, teacher, student).tolist() == pytest.approx([value], abs=1e-6)
    far = torch.tensor([[100.0, 0.0]])
    assert discrepancy("MAE", far, -far).item() == discrepancy("MSE", far, -far).item() == -1


def net(encoder, classifier):
    """A client's model with 1x1 weights: encode(x) = encoder x, classify(e) = (classifier e, 0)."""

    class Net(nn.Module):
        def encode(self, x):
            return encoder * x

        def classify(self, e):
            return torch.cat((classifier * e, 0 * e), 1)

        def forward(self, x):
            return self.classify(self.encode(x))

    return Net()


def test_decoder_loss_by_hand():
    """Client 0: h(x) = 2 x, z(e) = e + 1. An image x = 1 from e = 5 comes back as 3: (3 - 5)^2 = 4.
    With MSE: client 0 says softmax(2 ln 3 / 2, 0) = (3/4, 1/4). Peer 1 says (1/2, 1/2) with a zero classifier, peer 2
    as client 0 does. The mean over peers is -(1/16 + 0) / 2 = -1/32."""
    clients = {0: net(2.0, LN(3) / 2), 1: net(1.0, 0.0), 2: net(1.0, LN(3))}
    theta_z = {0: State({"weight": torch.ones(1, 1), "bias": torch.ones(1)})}
    x, e = torch.ones(1, 1), torch.full((1, 1), 5.0)
    assert decoder_loss(0, x, e, clients, theta_z).tolist() == [4.0]
    assert decoder_loss(0, x, e, clients, theta_z, "MSE").tolist() == pytest.approx([4 - 1 / 32], abs=1e-6)
    assert decoder_loss(0, x, e, {0: clients[0]}, theta_z, "MSE").tolist() == [4.0], "nobody to differ from"


def test_the_goal_is_reached_at_tau_and_not_before():
    """Three of four right is 0.75."""
    x, y = torch.eye(4), torch.tensor([0, 1, 2, 0])
    assert reached(lambda x: x, x, y, tau=0.75)
    assert not reached(lambda x: x, x, y, tau=0.76)


# --- the decoder ------------------------------------------------------------------------------------------------------


def test_the_decoder_has_the_papers_size():
    """Linear 512 x 8192 + 8192; batch norms 2 (128 + 128 + 64); convolutions 128 x 128 x 9, 128 x 64 x 9 and
    64 x 3 x 9 + 3: 4,426,051 parameters. Buffers: 2 (128 + 128 + 64) numbers and three 8-byte counters. In all
    17,706,788 bytes, which is the paper's 16.89 MB in units of 2^20."""
    parameters = 512 * 8192 + 8192 + 2 * 320 + 128 * 128 * 9 + 128 * 64 * 9 + 64 * 3 * 9 + 3
    assert count(Decoder(512, (3, 32, 32))) == parameters == 4_426_051
    size = decoder_size(512, (3, 32, 32))
    assert (size.payload, size.buffers) == (4 * parameters, 4 * 2 * 320 + 3 * 8)
    assert size.payload + size.buffers == 17_706_788
    assert round((size.payload + size.buffers) / 2**20, 2) == 16.89


@pytest.mark.parametrize("shape", [(3, 128, 128), (1, 8, 8), (1, 28, 28), (1, 10, 7), (3, 48, 16)])
def test_images_come_out_in_their_own_size(shape):
    """Above 32 pixels the parameters stay those of 32; 10 x 7 is decoded as 12 x 8."""
    model = Decoder(4, shape, width=2)
    assert model(torch.randn(3, 4)).shape == (3, *shape)
    h, w = (min(side + -side % 4, 32) for side in shape[1:])
    assert model.linear.out_features == 4 * (h // 4) * (w // 4)
    x = decode(state_of(model), torch.randn(5, 4), shape, batch=2)
    assert x.shape == (5, *shape)
    assert x.abs().max() <= 1


def test_resizing_is_torchs_bilinear_one():
    x = torch.randn(2, 3, 8, 12)
    expected = F.interpolate(x, size=(13, 10), mode="bilinear", align_corners=False)
    assert torch.allclose(resize(x, (13, 10)), expected, atol=1e-6)


def test_a_checkpoint_decodes_as_its_model_does():
    model = Decoder(4, (1, 8, 8), width=2)
    model(torch.randn(50, 4))  # batch-norm statistics of its own
    e = torch.randn(7, 4)
    assert torch.allclose(decode(state_of(model), e, (1, 8, 8), batch=3), model.eval()(e), atol=1e-6)


# --- the memory buffer ------------------------------------------------------------------------------------------------


def test_the_buffer_keeps_the_newest_rounds_by_number():
    for R, expected in ((0, []), (1, [7]), (2, [4, 7]), ("unlimited", [1, 2, 4, 7])):
        memory = {}
        for t in (1, 2, 4, 7):  # this client sat out rounds 3, 5 and 6
            remember(memory, t, State(), {0: torch.full((1, 1), t)}, R)
        assert list(held(memory)) == expected
        assert all(int(held(memory)[s]["E"][0]) == s for s in expected)


def test_the_buffers_bytes_are_the_papers_formula():
    """Three rounds of a decoder at h = 8, 1x8x8, width 2 and of N = 5 + 6 rows: 3 (|Dec| + 11 x 8 x 4). |Dec| by hand:
    linear 8 x 16 + 16, batch norms 2 (4 + 4 + 2), convolutions 4 x 4 x 9, 4 x 2 x 9, 2 x 1 x 9 + 1: 399 parameters; 20
    buffers and three counters: 399 x 4 + 20 x 4 + 24 = 1700."""
    memory = {}
    for t in (1, 2, 3):
        E = {0: torch.zeros(5, 8), 1: torch.zeros(6, 8)}
        remember(memory, t, state_of(Decoder(8, (1, 8, 8), width=2)), E, "unlimited")
    assert buffer_bytes(memory) == formula_bytes(3, 1700, 11, 8) == 3 * (1700 + 352)


def test_the_sample_is_uniform_over_the_buffer_and_as_large_as_the_client():
    """N = 400 rows out of 3 x 400: each round gives 400/3 on average; hypergeometric, standard deviation 7.7."""
    counts = Sample(11).counts(2, [1, 3, 4], 400)
    assert sum(counts.values()) == 400
    assert all(abs(m - 400 / 3) < 5 * 7.7 for m in counts.values())
    assert Sample(11).counts(2, [5], 9) == {5: 9}
    assert Sample(11).counts(2, [], 9) == {}
    assert len({Sample(s).counts(2, [1, 2], 40)[1] for s in range(9)}) > 1
    assert len(set(Sample(11).rows(2, 3, 50, 20).tolist())) == 20
    assert Sample(11).rows(2, 3, 50, 20).tolist() == Sample(11).rows(2, 3, 50, 30).tolist()[:20]
    others = [Sample(12).rows(2, 3, 50, 20), Sample(11).rows(1, 3, 50, 20), Sample(11).rows(2, 4, 50, 20)]
    assert all(Sample(11).rows(2, 3, 50, 20).tolist() != rows.tolist() for rows in others)


def party(k, t, memory, n=6):
    torch.manual_seed(100 + k)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    facts = {"id": k, "t": t, "memory": memory, "model": model, "shape": (1, 8, 8), "device": torch.device("cpu")}

    class Fake(SimpleNamespace):
        def __len__(self):
            return n

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
    teacher = party(1, 5, {"B": {s: past[s] for s in (1, 3, 4)}})
    student = party(0, 5, {"B": {s: past[s] for s in (2, 3, 4)}})
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
        x, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
        assert x.shape == (expected, 1, 8, 8)
        assert y.shape == (expected, 1, 3)
        assert torch.allclose(outputs(teacher.model, x), y[:, 0], atol=1e-6)
    wrong = method.review_rows(student, Sample(4), held(student.memory), Y)  # another seed, other rows
    assert sum(len(x) for x, _ in wrong) == expected
    assert not all(torch.allclose(outputs(teacher.model, x), y[:, 0], atol=1e-3) for x, y in wrong)


# --- the exchange -----------------------------------------------------------------------------------------------------


def exchanged(**options):
    """Student 0 and teachers 1 and 2 of 6, 7 and 8 rows in round 3 hold rounds 1 and 2. Returns them, what they
    answered, the rounds, and what the student's exchange asked `fit` for."""
    torch.manual_seed(0)
    sizes = {0: 6, 1: 7, 2: 8}
    rounds = {}
    for t in (1, 2, 3):
        E = {k: torch.randn(n, 4) for k, n in sizes.items()}
        rounds[t] = {"Dec": state_of(Decoder(4, (1, 8, 8), width=2)), "E": E}
    everybody = {k: party(k, 3, {"B": {s: rounds[s] for s in (1, 2)}}, n) for k, n in sizes.items()}
    method = DFFKE(h=4, w_Dec=2, **options)
    message = Unified(rounds[3]["Dec"], rounds[3]["E"], seed=3)
    answers = {k: method.answer(client, message).Y for k, client in everybody.items()}
    student, asked = everybody[0], []
    student.fit = lambda loss, rows, **how: asked.append((loss, rows, how))
    method.exchange(student, Peers({i: answers[i] for i in (1, 2)}))
    return everybody, answers, rounds, asked


def test_exchange_learns_eq_13_and_eq_14_in_turn():
    """One fit, so one Adam: T_FKE epochs in which the 7 + 8 current rows and the 7 + 8 reviewed ones take turns, the
    current ones first. Every row has the logits of the teacher whose embedding it was decoded from."""
    everybody, answers, rounds, asked = exchanged(T_FKE=5, B=9, eta=0.25)
    ((loss, (x, y), how),) = asked
    assert loss is student_first
    assert (how["epochs"], how["batch"], how["opt"].options["lr"], how["norms"]) == (5, 9, 0.25, "batch")
    assert how["turns"] == Turns((15, 15), "step")
    images = [decode(rounds[3]["Dec"], rounds[3]["E"][i], (1, 8, 8)) for i in (1, 2)]
    assert torch.equal(x[:15], torch.cat(images)), "Eq. 13 first, D^_1 and D^_2"
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


def test_every_reading_of_the_exchange_reaches_fit():
    """The other direction, by epoch, batch norms left alone, the student's own six rows with its own logits last."""
    _, answers, rounds, asked = exchanged(kl="teacher-first", alternate="epoch", statistics="own", own=True, T_FKE=1)
    ((loss, (x, y), how),) = asked
    assert loss is teacher_first
    assert (how["epochs"], how["norms"], how["turns"]) == (1, "running", Turns((21, 15), "epoch"))
    assert torch.equal(x[15:21], decode(rounds[3]["Dec"], rounds[3]["E"][0], (1, 8, 8)))
    assert torch.equal(y[15:21, 0], answers[0][3])
    assert not exchanged(T_FKE=0)[3]


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


def test_encoders_and_docking_layers_are_frozen_while_the_decoder_learns():
    """Eq. 12 trains Dec alone: the clients' networks, batch norms' statistics among them, stay bit for bit."""
    torch.manual_seed(0)
    clients = {k: build("cnn_bn", shape=(1, 8, 8), classes=3).train() for k in (0, 1)}
    for net in clients.values():
        net(torch.randn(20, 1, 8, 8))  # statistics of their own
    theta_z = {k: state_of(nn.Linear(net.width, 4)) for k, net in clients.items()}
    before = {k: state_of(net) for k, net in clients.items()}, {k: dict(t) for k, t in theta_z.items()}
    Dec = Decoder(4, (1, 8, 8), width=2)
    start = state_of(Dec)
    trained = []

    class Server:
        def rng(self, purpose):
            return torch.Generator().manual_seed(1)

        def optimise(self, params, closure, *, steps, opt):
            trained.extend(params)
            optimiser = opt.build(params)
            for _ in range(steps):
                optimiser.zero_grad()
                closure().backward()
                optimiser.step()

    E = {0: torch.randn(5, 4), 1: torch.randn(9, 4)}
    after = train_decoder(Server(), Dec, clients, theta_z, E, epochs=2, batch=6, opt=adam(0.01), md="none")
    assert {id(p) for p in trained} == {id(p) for p in Dec.parameters()}
    assert all(not p.requires_grad for net in clients.values() for p in net.parameters())
    for k, net in clients.items():
        assert all(torch.equal(t, before[0][k][name]) for name, t in state_of(net).items())
        assert all(torch.equal(t, before[1][k][name]) for name, t in theta_z[k].items())
    assert not torch.equal(after["linear.weight"], start["linear.weight"])


def test_numbers_out_of_range_are_refused():
    for name, value in (("tau", 98), ("tau", 0), ("R", -1), ("T_FKE", -1), ("kl", "forward"), ("alternate", "round")):
        with pytest.raises(SettingError, match=f"hyper-parameter of dffke {name}"):
            DFFKE.make({name: value})
    assert DFFKE.make({"tau": "off", "R": "unlimited"}).tau == "off"


# --- runs -------------------------------------------------------------------------------------------------------------

QUICK = dict(DFFKE.quick)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three clients with encoders of width 64, 64 and 128, three rounds, a buffer of one round."""
    out = tmp_path_factory.mktemp("dffke") / "run"
    run(method="dffke", rounds=3, clients=3, model="digits-3", set={**QUICK, "R": 1}, out=out)
    return out


def sent(folder, t):
    """Payload by message and field in one round, and how many messages."""
    sizes = {}
    for entry in Transcript(folder / "transcript").entries():
        if entry.round == t:
            for name, field in entry.fields.items():
                sizes.setdefault(f"{entry.message}.{name}", []).append(field["payload"] + field["buffers"])
    return {name: (sum(values), len(values)) for name, values in sizes.items()}


def test_both_circulations_one_copy_up_and_the_others_down(folder):
    """n = members. Up: theta_k, n_k h_k embeddings and as many labels, each once. Down: everybody gets Dec and all
    translated embeddings (h = 16). Logits: n_k x 10 up, in later rounds twice as many (B^t_k); each copy goes down to
    the K - 1 = 2 others, with eight bytes more for the peer's number."""
    n = read_record(folder).data["members"]
    widths = [64, 64, 128]
    for t in (1, 2, 3):
        size = sent(folder, t)
        assert size["Shared.E"] == (sum(4 * a * b for a, b in zip(n, widths, strict=True)), 3)
        assert size["Shared.Y"] == (8 * sum(n), 3)
        assert size["Unified.E"] == (3 * (4 * sum(n) * 16 + 3 * 8), 3)
        Dec = decoder_size(16, (1, 8, 8), QUICK["w_Dec"])
        assert size["Unified.Dec"] == (3 * (Dec.payload + Dec.buffers), 3)
        rounds = 1 if t == 1 else 2  # this one, and the one in the buffer (R = 1)
        assert size["Answered.Y"] == (4 * 10 * sum(n) * rounds + 3 * 8 * rounds, 3)
        assert size["Peers.Y"] == (2 * size["Answered.Y"][0] + 3 * 2 * 8, 3)


def test_the_buffer_of_a_run_against_the_formula(folder):
    for row in script("dffke_buffer").buffers(folder):
        assert row["R"] == 1
        assert row["bytes"] == row["formula"] > 0


def test_the_table_of_results(folder):
    """The last round, both points of it, and the best round as the paper reports it: over clients."""
    record = read_record(folder)
    last, each = record.result.last, [row.utility.clients.global_test.each for row in record.rounds]
    best = max(each, key=fmean)
    head, _, row = script("dffke_table").table(folder)
    cells = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=False))
    assert cells["common"] == f"{100 * last.clients.global_test.mean:.1f}"
    assert cells["trained: common"] == f"{100 * last.points['trained'].global_test.mean:.1f}"
    assert cells["best round: common"] == f"{100 * fmean(best):.1f} ± {100 * pstdev(best):.1f}"


def test_the_page_says_what_the_gradients_are():
    """The table of docs/results/dffke.md, row by row."""
    page = (Path(__file__).parents[2] / "docs" / "results" / "dffke.md").read_text()
    rows = page.split("| margin | student-first | teacher-first |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 5
    for row in rows:
        margin, *said = (float(cell) for cell in row.strip("| ").split(" | "))
        assert said == pytest.approx(script("dffke_gradient").gradients(margin, 8.0), abs=5e-5)


def test_the_page_says_what_the_kept_rounds_are():
    """The table of readings on the GPU, from every client's accuracy in every round."""
    results = Path(__file__).parents[2] / "docs" / "results"
    runs = json.loads((results / "dffke_readings.json").read_text())["runs"]
    rows = (results / "dffke.md").read_text().split("| best round: common |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert len(rows) == len(runs)
    for row, kept in zip(rows, runs, strict=True):
        last = kept["rounds"][-1]["points"]
        each = [last[point][test] for point in ("exchanged", "trained") for test in ("global_test", "local_test")]
        each.append(max((r["points"]["exchanged"]["global_test"] for r in kept["rounds"]), key=fmean))
        said = row.strip("| ").split(" | ")[2:]
        assert said == [f"{100 * fmean(values):.1f} ± {100 * pstdev(values):.1f}" for values in each]


SUITES = sorted((Path(__file__).parents[2] / "docs" / "results").glob("dffke*.toml"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_hold_together(path):
    """Every cell names what exists, and its hyper-parameters and policies are in range."""
    for setting in read_suite(path).cells():
        registry.find(setting.method).make(setting.set, setting.preset)
        read_policies(setting.privacy, KINDS)


def test_the_pictures(folder, tmp_path):
    pictures = script("dffke_pictures")
    found = pictures.synthetic(folder, [1, 3, 9], client=1, columns=4)
    assert set(found) == {1, 3}
    for images, labels in found.values():
        assert images.shape == (4, 1, 8, 8)
        assert labels.tolist() == found[1][1].tolist()
    assert not torch.equal(found[1][0], found[3][0])
    axes = pictures.draw(found, "digits", tmp_path / "a.png").axes
    assert len(axes) == 2 * 4
    assert [axis.get_title() for axis in axes[:4]] == [f"class {label}" for label in found[1][1].tolist()]
    assert [axes[0].get_ylabel(), axes[4].get_ylabel()] == ["t = 1", "t = 3"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_show_one_record_of_each_class_first():
    rows = script("dffke_pictures").one_of_each(torch.tensor([2, 2, 0, 2, 0, 1]))
    assert rows.tolist() == [2, 5, 0, 4, 1, 3]


def test_the_paper_noise_and_what_the_ledger_says(tmp_path):
    """Eq. 15: sigma = sqrt(2 ln(1.25 / delta)) Delta / epsilon with delta = 1/n; Delta = 2 C = 2 under clipping. Pure
    noise on the logits: they keep their size and nothing else. theta_k and Y_k are unprotected: epsilon is infinite."""
    privacy = {
        "embeddings": {"epsilon": 0.5, "calibration": "classical", "sensitivity": "clip:1.0"},
        "logits": {"mechanism": "pure-noise"},
    }
    record = run(method="dffke", rounds=1, clients=3, set=QUICK, privacy=privacy, out=tmp_path / "a")
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
    values = {"method": "dffke", "rounds": 1, "clients": 2, "model": "mlp", "privacy": privacy}
    with pytest.raises(PrivacyError, match="Set its stopping rule off"):
        run(**values, set={**QUICK, "tau": 0.9}, out=tmp_path / "a")
    record = run(**values, set=QUICK, out=tmp_path / "b")
    for client in record.ledger:
        assert {e.field: e.mechanism for e in client.entries}["Shared.theta"] == "post-processing of DP-SGD"


def decoders(folder):
    """The decoder that was sent in each round."""
    entries = [e for e in Transcript(folder / "transcript").entries() if e.message == "Unified"]
    return {e.round: e["Dec"] for e in entries}


def test_the_decoder_goes_on_unless_fresh(tmp_path):
    """Without training (T_Dec = 0) a decoder that goes on stays bit for bit what it was."""
    for fresh in (False, True):
        values = {**QUICK, "T_Dec": 0, "T_Tran": 0, "fresh": fresh}
        run(method="dffke", rounds=2, clients=2, set=values, out=tmp_path / str(fresh))
        sent = decoders(tmp_path / str(fresh))
        assert torch.equal(sent[1]["linear.weight"], sent[2]["linear.weight"]) is not fresh


def test_limited_collaboration_asks_the_first_clients_only(tmp_path):
    """pi = 0.5 of four clients: 0 and 1, in every round; the others' models stay as they were."""
    for name in ("dffke", "fke"):
        quick = {"dffke": QUICK, "fke": dict(FKE.quick)}[name]
        folder = tmp_path / name
        run(method=name, rounds=2, clients=4, public=0.1, set={**quick, "pi": 0.5}, out=folder)
        assert {e.client for e in Transcript(folder / "transcript").entries()} == {0, 1}


def buffers(folder, clients):
    """The rounds that each client holds after a run, with whose rows."""
    states = {k: RunFolder(folder).client_state(k) for k in range(clients)}
    memories = {k: decode_record(state, ClientState).memory for k, state in states.items() if state is not None}
    return {k: {s: sorted(past["E"]) for s, past in held(memory).items()} for k, memory in memories.items()}


@pytest.mark.slow
def test_missed_rounds_are_sent_again_and_billed(tmp_path):
    """Two of four clients a round, six rounds, R = 3. Without `sync` a client holds the rounds that it was in; with it,
    whoever was in the last round holds the last three, with the rows of those who were in them. The run itself compares
    what was declared with what crossed the wire; here the bytes once more by hand, from who sat out which round."""
    values = {"method": "dffke", "rounds": 6, "clients": 4, "participation": 0.5}
    records = {}
    for sync in (False, True):
        records[sync] = run(**values, set={**QUICK, "R": 3, "sync": sync}, out=tmp_path / str(sync))
    took_part = {row.round: row.participants for row in records[True].rounds}
    for k, rounds in buffers(tmp_path / "False", 4).items():
        mine = [t for t in took_part if k in took_part[t]]
        assert rounds == {t: took_part[t] for t in mine[-3:]}
    caught_up = buffers(tmp_path / "True", 4)
    for k in took_part[6]:
        assert caught_up[k] == {t: took_part[t] for t in (4, 5, 6)}
    n = records[True].data["members"]
    Dec, rows, holds = 0, 0, {k: set() for k in range(4)}
    one = decoder_size(16, (1, 8, 8), QUICK["w_Dec"])
    for t, present in took_part.items():
        for k in present:
            lacks = set(range(max(t - 3, 1), t)) - holds[k]
            Dec += len(lacks) * (one.payload + 8)
            rows += sum(8 + sum(8 + 4 * 16 * n[i] for i in took_part[s]) for s in lacks)
            holds[k] |= lacks | {t}
    sent = {row.field: row.payload for row in records[True].traffic}
    assert (sent["Missed.Dec"], sent["Missed.E"]) == (Dec, rows)
    assert Dec > 0, "the seed was chosen so that somebody misses a round"
    assert "Missed.Dec" not in {row.field for row in records[False].traffic}


@pytest.mark.slow
def test_sync_survives_drop_outs(tmp_path):
    """Who drops out after catching up holds what it got, and is sent no more than it lacks."""
    setting = {"rounds": 5, "clients": 5, "participation": 0.8, "dropout": 0.15, "quorum": 0.25}
    record = run(method="dffke", **setting, set={**QUICK, "R": "unlimited", "sync": True}, out=tmp_path / "a")
    assert {absence.ask for row in record.rounds for absence in row.absent} >= {1, 2}
    assert record.status == "done"


def test_both_points_of_a_round_are_evaluated(tmp_path):
    """In round 2 of one run: `trained` is the accuracy of the models that clients uploaded, `exchanged` of what they
    then became and deploy. On the common test set and on own held-out records, mean and deviation over clients."""
    record = run(method="dffke", rounds=2, clients=3, set={**QUICK, "T_FKE": 2, "eta": 0.01}, out=tmp_path / "a")
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
        run(method="dffke", rounds=1, clients=2, set={**QUICK, "deploy": deploy}, out=folder)
        shared = next(e for e in Transcript(folder / "transcript").entries() if e.message == "Shared" and e.client == 1)
        final = load_file(folder / "models" / "client-000001.safetensors")
        same = all(torch.equal(t, final[name]) for name, t in shared["theta"].items())
        assert same is (deploy == "trained")


# --- planning ---------------------------------------------------------------------------------------------------------


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


def test_traffic_when_clients_drop_out():
    """Client 1 fails after the first ask, client 3 in the last: 0 and 3 are unified with the rows of all three, and
    exchange with each other."""
    asks = [((0, 1, 3), (0, 1, 3)), ((0, 1, 3), (0, 3)), ((0, 3), (0,))]
    choices = {"Answered.Y": {0: {7: None}, 3: {7: None, 2: None}}}
    size = DFFKE(h=16).traffic(plan(7, asks=asks, choices=choices))
    assert size["down", "Unified.E"] == Size(3 * (4 * 60 * 16 + 3 * 8))
    assert size["up", "Answered.Y"] == Size(4 * 10 * (10 + 60) + 8 + 16)
    assert size["down", "Peers.Y"] == Size(4 * 10 * (10 + 60) + 8 + 16 + 2 * 8)


def test_presets_are_the_papers():
    assert {name: (DFFKE.make({}, name).T_Dec, DFFKE.make({}, name).T_FKE) for name in DFFKE.presets} == {
        "cifar10": (3, 2),
        "cifar100": (6, 4),
        "tinyimagenet": (6, 4),
    }
    assert (DFFKE().T_Tran, DFFKE().h, DFFKE().tau, DFFKE().eta, DFFKE().B) == (100, 512, 0.98, 1e-3, 100)
