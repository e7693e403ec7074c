"""pFedLA: its layers, its hypernetworks, and where their weights go."""

from __future__ import annotations

import pytest
import torch
from bench import DIGITS, Bench

from fedaudit import State
from fedaudit.methods.layers import pfedla
from fedaudit.training import models


def test_a_layer_is_what_lies_in_one_module():
    names = ["encoder.conv1.weight", "encoder.conv1.bias", "encoder.bn1.weight", "encoder.bn1.running_mean", "token"]
    assert pfedla.layers(names) == [names[:2], names[2:4], ["token"]]


def test_pfedla_round_by_hand():
    """Two clients, one layer of one number, theta = (1, 3); a hypernetwork without hidden layers whose weights and
    biases are 0 gives alpha = (1/2, 1/2), so theta-bar = 2 for both. Client 0 answers +1, client 1 does not answer.

    In alpha_j the slope of theta-bar_0 Delta theta_0 is theta_j: (1, 3), mean 2. Through the softmax the biases of
    hypernetwork 0 move by eta_h / 2 (1 - 2, 3 - 2), its weights by that times v_0, and v_0 by 0, as the weights are 0.
    theta_0 = 2 + 1, theta_1 = 3 as before; a counter (3, 4) is mixed to 3.5, rounded to 4, and grows by 5.
    """
    theta = State({"a.weight": torch.tensor([[1.0], [3.0]]), "a.count": torch.tensor([3, 4])}, buffers=["a.count"])
    psi = State({"0.weight": torch.zeros(2, 1, 2), "0.bias": torch.zeros(2, 2)})
    v = torch.tensor([[10.0], [20.0]])
    sent = {}

    class Cohort:
        ids = (0, 1)

        def ask(self, fn, messages):
            sent.update(messages)
            return {0: pfedla.Update(State({"a.weight": torch.tensor([1.0]), "a.count": torch.tensor(5)}, ["a.count"]))}

    method = pfedla.PFedLA(eta_h=0.01, depth=0)
    after = method.round(pfedla.Hyper(theta, v, psi), Bench(clients=2), Cohort())
    assert [m.theta_bar["a.weight"].item() for m in sent.values()] == [2, 2]
    assert [m.theta_bar["a.count"].item() for m in sent.values()] == [4, 4]
    assert after.theta["a.weight"].flatten().tolist() == [3, 3]
    assert after.theta["a.count"].tolist() == [9, 4]
    assert after.psi["0.bias"].flatten().tolist() == pytest.approx([-0.005, 0.005, 0, 0])
    assert after.psi["0.weight"].flatten().tolist() == pytest.approx([-0.05, 0.05, 0, 0])
    assert after.v.flatten().tolist() == [10, 20]
    assert (theta["a.weight"].flatten().tolist(), psi["0.bias"].abs().sum().item()) == ([1, 3], 0)


def test_hypernetworks_give_weights_that_sum_to_one_for_each_layer():
    server = Bench(clients=3, model=lambda: models.build("cnn", **DIGITS))
    s = pfedla.PFedLA(width=8, depth=2).init(server)
    alpha = pfedla.HN(s.v, s.psi, 3)
    assert alpha.shape == (3, 4, 3)
    assert torch.allclose(alpha.sum(2), torch.ones(3, 4))
    by_hand = s.v[1]
    for d in range(3):
        by_hand = by_hand @ s.psi[f"{d}.weight"][1] + s.psi[f"{d}.bias"][1]
        by_hand = by_hand.relu() if d < 2 else by_hand
    assert torch.allclose(alpha[1], by_hand.view(4, 3).softmax(1), atol=1e-6)


def two_camps(rounds, apart):
    """Four clients, one layer of three numbers. Each round client i answers with half its way from theta-bar_i to its
    own optimum: clients 0 and 1 want (+1, 0, 0), 2 and 3 want (-1, 0, 0), or all want the first where not `apart`."""
    optimum = [torch.tensor([1.0, 0.0, 0.0])] * 2 + [torch.tensor([-1.0 if apart else 1.0, 0.0, 0.0])] * 2

    class Cohort:
        ids = (0, 1, 2, 3)

        def ask(self, fn, messages):
            wanted = {i: (optimum[i] - m.theta_bar["a.weight"]) / 2 for i, m in messages.items()}
            return {i: pfedla.Update(State({"a.weight": t})) for i, t in wanted.items()}

    method = pfedla.PFedLA(eta_h=0.1, width=8, depth=1)
    server = Bench(clients=4)
    start = State({"a.weight": torch.zeros(4, 3)})
    psi = {"0.weight": torch.zeros(4, 8, 8), "0.bias": torch.zeros(4, 8)}  # alpha is uniform
    psi |= {"1.weight": torch.zeros(4, 8, 4), "1.bias": torch.zeros(4, 4)}
    s = pfedla.Hyper(start, torch.ones(4, 8), State(psi))
    for _ in range(rounds):
        s = method.round(s, server, Cohort())
    return pfedla.HN(s.v, s.psi, 4)[:, 0]


def test_the_weights_leave_uniform_where_clients_disagree_and_only_there():
    """What the hypernetwork is for: from (1/4, 1/4, 1/4, 1/4), the weight that a client gives to the two who want what
    it wants grows round by round; where all want the same, nothing speaks for or against anybody."""
    camps = [0, 0, 1, 1]
    alike = torch.tensor([[a == b for a in camps] for b in camps])
    shares = [(two_camps(rounds, apart=True) * alike).sum(1) for rounds in (0, 20, 100)]
    assert shares[0].tolist() == pytest.approx([0.5] * 4)
    assert (shares[1] > 0.55).all()
    assert (shares[2] > shares[1]).all()
    assert (shares[2] > 0.7).all()
    assert torch.allclose(two_camps(100, apart=False), torch.full((4, 4), 0.25), atol=1e-6)
