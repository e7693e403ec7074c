"""The presets `htfllib`, `pflib` and `dffke_authors`: what public code runs, and forms that learn at all."""

from __future__ import annotations

import pytest

from fedaudit import Augment, FedauditError, registry, run

HTFLLIB = ["lgfedavg", "fedgh", "fedproto", "fedtgp", "fml", "fedkd", "feddistill", "fedgen_lg", "fedktl"]
PFLIB = ["fedavg", "fedprox", "moon", "feddyn", "fedntd", "scaffold", "perfedavg", "fedgen"]


def made(name, preset, **values):
    return registry.find(name).make(values, preset)


@pytest.mark.parametrize(("preset", "names", "rate"), [("htfllib", HTFLLIB, 0.01), ("pflib", PFLIB, 0.005)])
def test_who_has_them(preset, names, rate):
    """One epoch in batches of 10, at the library's rate; nobody else has such a preset but who inherits it."""
    for name in names:
        method = made(name, preset)
        rates = [getattr(method, field) for field in ("eta", "eta_l", "beta") if field in type(method).model_fields]
        assert (method.E, method.B) == (1, 10), name
        assert rate in rates, name
    own = [n for n in registry.names("methods") if preset in vars(registry.find(n)).get("presets", {})]
    assert sorted(own) == sorted(names)


# What configs/experiment_CIFAR10_Dir0.1_HtFE1 and flcore/ of DFFKE's public code have beside local training.
RIVALS = {
    "local": {},
    "lgfedavg": {},
    "fedproto": {"lam": 10.0, "distance": "mse", "weights": "equal", "predict": "prototypes"},
    "fedtgp": {"lam": 10.0, "S": 100, "B_s": 100, "eta_s": 0.01, "tau": 100.0, "margin": "nearest", "hidden": 512,
               "start": "network", "distance": "mse", "weights": "equal", "predict": "prototypes"},
    "fedgh": {"S": 1, "B_s": 100, "eta_s": 0.01, "rows": "clients"},
    "feddistill": {"gamma": 1.0, "distance": "ce", "others": False},
    "fedgen_lg": {"B_hat": 100, "I_g": 100, "B_g": 100, "eta_g": 0.1, "d": 32, "hidden": 512, "noise": "uniform",
                  "teacher": "samples", "weights": "samples", "alpha": 1.0, "first": 1, "lambda_div": 0.0,
                  "space": "latent"},
    "fml": {"alpha": 0.5, "beta": 0.5, "teaching": "joint", "clip": 10.0, "eta_shared": 0.01},
    "fedkd": {"T_start": 0.95, "T_end": 0.98, "intensity": "batch", "weights": "equal", "clip": 10.0,
              "eta_shared": 0.01},
}  # fmt: skip
TRAINED = {"opt": "adam", "eta": 0.001, "E": 1, "B": 100, "weight_decay": 1e-5, "crop": 4, "flip": True, "jitter": 0.4}


def test_who_runs_as_in_dffkes_code():
    for name, values in RIVALS.items():
        method = made(name, "dffke_authors").model_dump()
        assert {key: method[key] for key in TRAINED | values} == TRAINED | values, name
    own = [n for n in registry.names("methods") if "dffke_authors" in vars(registry.find(n)).get("presets", {})]
    assert sorted(own) == sorted(RIVALS)


@pytest.mark.parametrize("name", RIVALS)
def test_dffkes_rivals_train_on_other_views_of_their_images(name, tiny, augments, tmp_path):
    """Each setting reaches `fit` by itself; pixels from outside are black, and by default nothing is augmented.
    A second round is like the first."""
    cases = [
        ({}, None),
        ({"crop": 2}, Augment(crop=2, fill=-1.0)),
        ({"flip": True}, Augment(flip=True, fill=-1.0)),
        ({"jitter": 0.3}, Augment(jitter=0.3, fill=-1.0)),
    ]
    for i, (more, wanted) in enumerate(cases):
        augments.clear()
        setting = {**getattr(registry.find(name), "quick", {}), "B": 64, **more}
        run(
            tiny(name, engine="serial", model="cnn@0.25", rounds=1 + ("crop" in more), set=setting),
            out=tmp_path / str(i),
        )
        assert set(augments) == {wanted}


def test_dffke_ran_the_cross_entropy():
    assert made("feddistill", "dffke").distance == "ce"
    assert not made("feddistill", "dffke").others


def test_clipping_belongs_to_sgd():
    for name in ("fml", "fedkd"):
        with pytest.raises(FedauditError, match=r"clip belongs to opt"):
            made(name, "htfllib", opt="adam")


@pytest.mark.parametrize("name", ["fml", "fedkd", "fedgen_lg"])
def test_the_forms_of_the_library_run(name, tiny, tmp_path):
    """With other losses, another optimiser and other noise, and with the traffic that they declare."""
    setting = tiny(name, clients=2, preset="htfllib", set={"B": 32}, model="cnn@0.25", aux=0.85)
    record = run(setting, out=tmp_path / "a")
    assert not record.rounds[-1].absent
