"""DFFKE on the server: docking layers and decoder, Eqs. 10-12 and Appendix E by hand, sizes, and who is trained."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedaudit import Turns, adam
from fedaudit.errors import ContractError
from fedaudit.methods.datafree import _decoder
from fedaudit.methods.datafree._decoder import (
    Decoder,
    Docked,
    _of_each_client,
    decode,
    decoder_size,
    discrepancy,
    fidelity,
    model_discrepancy,
    resize,
    train_decoder,
)
from fedaudit.methods.datafree._docking import Docking, alignment, unify, z
from fedaudit.training import cuda_graphs
from fedaudit.training.models import build, count
from fedaudit.wire.message import State, state_of

LN = math.log


def docking():
    """Client 0 of width 1: z(e) = (2 e, e) + (0, 1). Client 1 of width 2: z(e) = (e_2, e_1). The head: identity."""
    first, second = nn.Linear(1, 2), nn.Linear(2, 2)
    first.weight.data, first.bias.data = torch.tensor([[2.0], [1.0]]), torch.tensor([0.0, 1.0])
    second.weight.data, second.bias.data = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.zeros(2)
    model = Docking([first, second], classes=2)
    model.head.weight.data, model.head.bias.data = torch.eye(2), torch.zeros(2)
    return model


def test_the_gradient_of_docking_layers_lies_as_they_do():
    """An optimiser would copy it otherwise, in each of tens of thousands of steps."""
    model = Docking([nn.Linear(6, 5), nn.Linear(4, 5), nn.Linear(6, 5)], classes=2)
    loss = model(torch.randn(8, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])).square().sum()
    (grad,) = torch.autograd.grad(loss, model.weight)
    assert grad.stride() == model.weight.stride()


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
    Teacher (1, 0), student (0, 1): both reach the bound -2/n = -1.
    Inverse CE: -(3/4 ln(1/2) + 1/4 ln(1/2)) = ln 2; against a student (1/4, 3/4), -(3/4 ln(3/4) + 1/4 ln(1/4))."""
    teacher, student = torch.tensor([[LN(3), 0.0]]), torch.zeros(1, 2)
    expected = {"KL": -0.1 * (0.75 * LN(1.5) + 0.25 * LN(0.5)), "MAE": -0.25, "MSE": -0.0625}
    for choice, value in expected.items():
        assert discrepancy(choice, teacher, student).tolist() == pytest.approx([value], abs=1e-6)
    assert discrepancy("inverse-CE", teacher, student).tolist() == pytest.approx([LN(2)], abs=1e-6)
    other = discrepancy("inverse-CE", teacher, torch.tensor([[0.0, LN(3)]])).item()
    assert other == pytest.approx(-(0.75 * LN(0.75) + 0.25 * LN(0.25)), abs=1e-6)
    assert discrepancy("inverse-CE", teacher, torch.tensor([[200.0, 0.0]])).isfinite()
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
    theta_z = State({"weight": torch.ones(1, 1), "bias": torch.ones(1)})
    x, e = torch.ones(1, 1), torch.full((1, 1), 5.0)
    assert fidelity(Docked(clients[0], theta_z)(x), e).tolist() == [4.0]
    assert Docked(clients[0], theta_z, answers=True)(x).tolist() == [pytest.approx([3, LN(3), 0])]
    said = clients[0](x)
    assert model_discrepancy(0, x, clients, "MSE", said).tolist() == pytest.approx([-1 / 32], abs=1e-6)
    assert model_discrepancy(0, x, {0: clients[0]}, "MSE", said).tolist() == [0.0], "nobody to differ from"


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

        def optimise(self, params, closure, *, steps, opt, repeats, before, kept):
            trained.extend(params)
            optimiser = opt.build(params)
            for i in range(steps):
                before(i)
                optimiser.zero_grad()
                closure().backward()
                optimiser.step()

    E = {0: torch.randn(5, 4), 1: torch.randn(9, 4)}
    others = {k: build("cnn_bn", shape=(1, 8, 8), classes=3) for k in (0, 1)}  # which are frozen on another line
    options = {"epochs": 2, "batch": 6, "opt": adam(0.01), "md": "none", "peers": others}
    after = train_decoder(Server(), Dec, clients, theta_z, E, **options)
    assert {id(p) for p in trained} == {id(p) for p in Dec.parameters()}
    assert all(not p.requires_grad for net in clients.values() for p in net.parameters())
    for k, net in clients.items():
        assert all(torch.equal(t, before[0][k][name]) for name, t in state_of(net).items())
        assert all(torch.equal(t, before[1][k][name]) for name, t in theta_z[k].items())
    assert not torch.equal(after["linear.weight"], start["linear.weight"])


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


@pytest.mark.parametrize("output", ["tanh", "standardised"])
def test_checkpoints_of_one_form_decode_one_after_the_other(output):
    """Each is a checkpoint of its own: nothing of one is left when the next decodes, and none is changed."""
    models = [Decoder(4, (1, 8, 8), 2, output, (0.2, 0.7)) for _ in range(2)]
    for model in models:
        model(torch.randn(50, 4))
        model.eval()
    e, states = torch.randn(7, 4), [state_of(model) for model in models]
    before = [{name: t.clone() for name, t in state.items()} for state in states]
    for i in (0, 1, 0):
        assert torch.allclose(decode(states[i], e, (1, 8, 8), 3, (0.2, 0.7)), models[i](e), atol=1e-6)
    assert not torch.allclose(decode(states[0], e, (1, 8, 8), 3), models[0](e), atol=1e-2) or output == "tanh"
    assert all(torch.equal(t, before[i][name]) for i, state in enumerate(states) for name, t in state.items())


def test_a_checkpoint_decodes_in_its_own_precision():
    """Whatever was decoded before, and whatever the default is: a process decodes for several runs."""
    before = torch.get_default_dtype()
    made = {}
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            torch.manual_seed(3)
            model = Decoder(5, (1, 6, 7), width=4).to(dtype).eval()
            e = torch.linspace(-1, 1, 10, dtype=dtype).reshape(2, 5)
            for default in (torch.float32, torch.float64):
                torch.set_default_dtype(default)
                made[dtype] = decode(state_of(model), e, (1, 6, 7))
                assert made[dtype].dtype == dtype
                assert torch.allclose(made[dtype], model(e))
    finally:
        torch.set_default_dtype(before)


def test_a_checkpoint_that_does_not_fit_is_refused_and_one_of_another_layout_is_not():
    state = state_of(Decoder(4, (1, 8, 8), width=2))
    e = torch.randn(3, 4)
    wanted = decode(state, e, (1, 8, 8))
    turned = State({**state, "linear.weight": state["linear.weight"].T.contiguous().T})
    assert torch.allclose(decode(turned, e, (1, 8, 8)), wanted, atol=1e-6)
    with pytest.raises(ContractError, match="does not fit"):
        decode(State({name: t for name, t in state.items() if name != "linear.bias"}), e, (1, 8, 8))
    assert torch.equal(decode(state, e, (1, 8, 8)), wanted), "the refused one left nothing behind"


def test_images_are_decoded_in_the_precision_of_the_setting(monkeypatch):
    """With factors of 16 bits, in the type of the embeddings. In training channels lie last on a GPU's tensor cores."""
    torch.manual_seed(0)
    model, e = Decoder(4, (3, 8, 8), width=2).eval(), torch.randn(7, 4)
    exact = decode(state_of(model), e, (3, 8, 8))
    with cuda_graphs.conditions("eager", bf16=True):
        rounded = decode(state_of(model), e, (3, 8, 8))
    assert rounded.dtype == exact.dtype
    assert 1e-4 < (rounded - exact).abs().max() < 0.05
    seen, wanted, before = [], copy.deepcopy(model).train()(e), copy.deepcopy(model.state_dict())
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, x: seen.append(x[0].is_contiguous()))
    for gpu, cores, training in itertools.product((True, False), repeat=3):
        monkeypatch.setattr(_decoder, "on_gpu", lambda rows, gpu=gpu: gpu)
        monkeypatch.setattr(_decoder, "tensor_cores", lambda cores=cores: cores)
        seen.clear()
        out = model.train(training)(e)
        model.load_state_dict(before)
        assert torch.allclose(out, wanted if training else exact, atol=1e-5)
        last = gpu and cores and training
        assert (any if last else all)(seen) is not last


def test_the_decoders_loss_is_the_sum_of_both():
    """Eq. 12: all 5 + 9 rows are one batch, sorted by client. Beside the fidelity there is L_md of each client's
    images, which the one peer decides."""
    torch.manual_seed(0)
    clients = {k: build("mlp", shape=(1, 8, 8), classes=3) for k in (0, 1)}
    theta_z = {k: state_of(nn.Linear(net.width, 4)) for k, net in clients.items()}
    E, Dec, found = {0: torch.randn(5, 4), 1: torch.randn(9, 4)}, Decoder(4, (1, 8, 8), width=2), {}

    class Server:
        def rng(self, purpose):
            return torch.Generator().manual_seed(1)

        def optimise(self, params, closure, *, before, **how):
            before(0)
            found[md] = float(closure())

    for md in ("none", "MSE"):
        train_decoder(Server(), Dec, clients, theta_z, E, epochs=1, batch=14, opt=adam(0.01), md=md)
    x = Dec(torch.cat(list(E.values()))).detach()
    said = [net(x).softmax(1) for net in clients.values()]
    assert found["MSE"] - found["none"] == pytest.approx(-float((said[0] - said[1]).square().mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "batch", "turns"), [((3, 7), 3, 4), ((3, 8), 4, 4), ((3, 5), 10, 2)], ids=["unequal", "even", "few rows"]
)
def test_batches_of_each_client_in_turn(sizes, batch, turns):
    """Two epochs. Whole batches of the largest count, and one where nobody has a whole one. Each is the first of a new
    shuffle of that client's rows."""
    found = list(_of_each_client(sizes, batch, 2, torch.Generator().manual_seed(5)))
    rng = torch.Generator().manual_seed(5)
    wanted = [
        begin + torch.randperm(n, generator=rng)[:batch]
        for _ in range(turns)
        for begin, n in zip((0, sizes[0]), sizes, strict=True)
    ]
    assert [index.tolist() for index in found] == [index.tolist() for index in wanted]


class OneStep:
    """A server that takes the gradient of a decoder's first step, and no more."""

    def rng(self, purpose):
        return torch.Generator().manual_seed(1)

    def optimise(self, params, closure, *, before, **how):
        before(0)
        closure().backward()


def test_peers_are_frozen_too():
    """Models of an earlier point, with which L_md compares, answer in evaluation mode and stay as they were."""
    torch.manual_seed(0)
    clients, peers = ({k: build("cnn_bn", shape=(1, 8, 8), classes=3).train() for k in (0, 1)} for _ in range(2))
    theta_z = {k: state_of(nn.Linear(net.width, 4)) for k, net in clients.items()}
    before = {k: state_of(net) for k, net in peers.items()}
    E, Y = ({k: torch.randn(n, width) for k, n in ((0, 5), (1, 9))} for width in (4, 3))

    options = {"epochs": 1, "batch": 3, "opt": adam(0.01), "md": "inverse-CE", "by_client": True}
    train_decoder(OneStep(), Decoder(4, (1, 8, 8), width=2), clients, theta_z, E, Y=Y, peers=peers, **options)
    for k, net in peers.items():
        assert all(p.grad is None for p in net.parameters())
        assert all(torch.equal(t, before[k][name]) for name, t in state_of(net).items())


@pytest.mark.parametrize("bf16", [True, False])
def test_the_decoder_is_trained_in_the_precision_of_the_setting(bf16):
    """Its own factors have 16 bits; clients' networks get images of 32, and round by themselves where they do."""
    torch.manual_seed(0)
    clients = {k: build("cnn_bn", shape=(1, 8, 8), classes=3) for k in (0, 1)}
    theta_z = {k: state_of(nn.Linear(net.width, 4)) for k, net in clients.items()}
    E, Dec, seen = {k: torch.randn(5, 4) for k in (0, 1)}, Decoder(4, (1, 8, 8), width=2), []
    for net in clients.values():
        net.encoder.register_forward_pre_hook(lambda m, x: seen.append((x[0].dtype, torch.is_autocast_enabled("cpu"))))
    made = []
    Dec.layers[2].register_forward_hook(lambda m, x, out: made.append(out.dtype))

    with cuda_graphs.conditions("eager", bf16=bf16):
        train_decoder(OneStep(), Dec, clients, theta_z, E, epochs=1, batch=10, opt=adam(0.01), md="none")
    assert set(seen) == {(torch.float32, False)}
    assert made == [torch.bfloat16 if bf16 else torch.float32]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in Dec.parameters())


class DockingServer:
    """Keeps what a training of docking layers is given; `optimise` carries it out."""

    classes, device = 3, torch.device("cpu")

    def __init__(self):
        self.fitted, self.optimised = [], []

    def fit(self, model, loss, rows, **how):
        self.fitted.append((model, rows, how))

    def optimise(self, parameters, closure, *, steps, opt, before):
        optimiser = opt.build(parameters)
        for step in range(steps):
            before(step)
            optimiser.zero_grad()
            closure().backward()
            self.optimised.append([None if p.grad is None else p.grad.clone() for p in parameters])
            optimiser.step()


SHARED = {4: (torch.randn(5, 3), torch.arange(5) % 3), 7: (torch.randn(8, 3), torch.arange(8) % 3)}
SHARED |= {9: (torch.randn(6, 2), torch.arange(6) % 3)}  # another width


def test_docking_layers_take_turns_client_by_client():
    """One step on all rows of each client in an epoch."""
    server = DockingServer()
    unify(server, SHARED, {}, 4, epochs=5, batch="client", opt=adam(0.1))
    ((model, (_, owner, _), how),) = server.fitted
    assert (how["batch"], how["turns"], how["epochs"]) == (8, Turns((5, 8, 6), "epoch"), 5)
    assert owner.tolist() == [0] * 5 + [1] * 8 + [2] * 6
    assert not torch.equal(model.weight[0], model.weight[1]), "each has a draw of its own"


def test_docking_layers_that_rest_and_begin_alike():
    """In a step of one client only its own layer and the head have a gradient; a layer that was there goes on."""
    server, before = DockingServer(), {7: State({"weight": torch.ones(4, 3), "bias": torch.zeros(4)})}
    still = {"epochs": 0, "batch": "client", "opt": adam(0.1, weight_decay=0.5), "alike": True, "rests": True}
    first = unify(server, {**SHARED, 5: SHARED[4]}, before, 4, **still)
    assert torch.equal(first[4]["weight"], first[5]["weight"])
    assert torch.equal(first[4]["bias"], first[5]["bias"])
    assert torch.equal(first[7]["weight"], torch.ones(4, 3))
    assert first[9]["weight"].shape == (4, 2)
    torch.manual_seed(0)
    unify(server, SHARED, {}, 4, **{**still, "epochs": 2})
    assert not server.fitted
    moved = [[place for place, g in enumerate(step) if g is not None] for step in server.optimised]
    assert moved == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]] * 2, "the head, and the layer whose turn it is"


def test_a_layer_rests_as_if_the_others_steps_were_not_there():
    """One client's layer after two epochs, with two others between its steps, by torch's own Adam on its gradients."""
    server = DockingServer()
    torch.manual_seed(3)
    start = unify(server, SHARED, {}, 4, epochs=0, batch="client", opt=adam(0.1, weight_decay=0.5), rests=True)
    torch.manual_seed(3)
    found = unify(server, SHARED, {}, 4, epochs=2, batch="client", opt=adam(0.1, weight_decay=0.5), rests=True)
    w = start[4]["weight"].clone().requires_grad_()
    by_hand = torch.optim.Adam([w], lr=0.1, weight_decay=0.5)
    for step in (0, 3):
        w.grad = server.optimised[step][2]
        by_hand.step()
    assert torch.allclose(found[4]["weight"], w.detach(), atol=1e-6)
