"""A round of the constant predictor by hand: the majority among the client's own records, whatever the image."""

from __future__ import annotations

from collections import Counter

import torch
from by_hand import close, played


def test_one_round(tmp_path):
    ran = played("constant", tmp_path, model="cnn_bn:2,mlp:1")
    answers = set()
    for k, (x, y) in ran.rows.items():
        assert not vars(ran.down()[k])
        assert not vars(ran.up()[k])
        ((majority, often), (_, second)) = Counter(y.tolist()).most_common(2)
        assert often > second, "a majority, not a tie"
        told = dict(ran.first[k])
        told["classifier.weight"] = torch.zeros_like(told["classifier.weight"])
        told["classifier.bias"] = torch.nn.functional.one_hot(torch.tensor(majority), 10).double()
        close(told, ran.model(k), f"client {k}")
        assert ran.net(ran.model(k), ran.world.archs[k]).eval()(x).argmax(1).eq(majority).all()
        answers.add(majority)
    assert len(answers) > 1, "skewed clients differ in their majorities"
