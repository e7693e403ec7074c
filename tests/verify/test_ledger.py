"""The number of times that verification calls an accountant, which is what it takes its time for."""

from __future__ import annotations

import math

import pytest

from fedaudit.privacy import dpsgd, ledger
from fedaudit.runtime.run_record import read_record
from fedaudit.verify.case import Case
from fedaudit.verify.ledger import check_totals


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of an accountant."""
    seen = []
    for module in (ledger, dpsgd):
        real = module.compose

        def counted(*args, _real=real, **named):
            seen.append((args, named))
            return _real(*args, **named)

        monkeypatch.setattr(module, "compose", counted)
    return seen


def test_clients_with_equal_entries_share_their_totals(honest, calls):
    record = read_record(honest / "trained")
    first = record.ledger[0]
    record.ledger = [first.model_copy(deep=True, update={"client": k}) for k in range(20)]
    case = Case(honest / "trained", record)
    check_totals(case)
    assert not [f for f in case.found.list if f.verdict == "contradicted"]
    assert len(calls) == len(first.by_kind) + len(first.by_relation)


def test_a_shared_total_accuses_the_client_whose_figure_is_another(honest):
    record = read_record(honest / "trained")
    record.ledger = [record.ledger[0].model_copy(deep=True, update={"client": k}) for k in range(3)]
    record.ledger[2].epsilon /= 2
    case = Case(honest / "trained", record)
    check_totals(case)
    (wrong,) = [f for f in case.found.list if f.verdict == "contradicted"]
    assert wrong.field == "ledger.2.epsilon"


def test_gates_leave_out_accountants_that_they_do_not_need(honest, calls):
    case = Case(honest / "trained", read_record(honest / "trained"))
    check_totals(case, compare=False)
    assert not any(named["compare"] for _, named in calls)


def test_a_multiplier_is_recognised_by_two_calls(calls):
    """epsilon = 8 over 40 steps at a rate of 0.1, as a run with DP-SGD calibrates it."""
    terms = (8.0, 1e-3, 0.1, 40)
    found = dpsgd.multiplier_for(*terms)
    calls.clear()
    assert dpsgd.is_multiplier_for(found, *terms)
    assert len(calls) <= 2
    assert not dpsgd.is_multiplier_for(found * 0.99, *terms)
    assert not dpsgd.is_multiplier_for(found * 1.01, *terms)
    assert math.isclose(found, dpsgd.multiplier_for(*terms))
