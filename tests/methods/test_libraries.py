"""The presets `htfllib` and `pflib`: the settings that these libraries run, and forms that learn at all."""

from __future__ import annotations

import pytest

from fedaudit import FedauditError, registry, run

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
