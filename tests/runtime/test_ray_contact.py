"""Whether Ray is still there: which of its processes is asked, how often, and what is said of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from fedaudit.errors import RunError
from fedaudit.runtime.engines import ray_contact
from fedaudit.runtime.engines.ray_contact import RayContact, environment


def ray(connected=False):
    """A cluster of two machines, of which this is the second."""
    context = SimpleNamespace(get_node_id=lambda: "here", gcs_address="[::1]:6379")
    nodes = [
        {"NodeID": "there", "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": "1"},
        {"NodeID": "here", "NodeManagerAddress": "10.0.0.2", "NodeManagerPort": "2"},
    ]
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: connected))
    return SimpleNamespace(
        util=SimpleNamespace(client=client), nodes=lambda: nodes, get_runtime_context=lambda: context
    )


AGENT, DIRECTORY = ("10.0.0.2", 2), ("::1", 6379)


@pytest.fixture
def asked(monkeypatch):
    """Who was asked, in order; those in `silent` do not answer. The clock stands until it is set."""
    found = SimpleNamespace(said=[], silent=set(), now=100.0)

    def answers(where, comes_back):
        found.said.append((where, comes_back))
        return where not in found.silent

    monkeypatch.setattr(ray_contact, "_answers", answers)
    monkeypatch.setattr(ray_contact.time, "monotonic", lambda: found.now)
    return found


def test_the_directory_is_asked_again_after_a_second_alone(asked):
    contact = RayContact(ray())
    for now, wanted in (
        (100.0, [(AGENT, False), (DIRECTORY, True)]),
        (100.9, [(AGENT, False)]),
        (101.0, [(AGENT, False)]),
        (101.1, [(AGENT, False), (DIRECTORY, True)]),
        (102.0, [(AGENT, False)]),
    ):
        asked.now = now
        contact.check("then")
        assert asked.said == wanted, now
        asked.said.clear()


@pytest.mark.parametrize(
    ("silent", "says"),
    [
        (AGENT, "Ray is gone: its agent on this machine (the raylet, 10.0.0.2:2) does not answer."),
        (DIRECTORY, "Ray is gone: the directory of its cluster (the GCS, ::1:6379) does not answer."),
    ],
)
def test_what_is_gone_stays_gone(asked, silent, says):
    contact = RayContact(ray())
    asked.silent = {silent}
    with pytest.raises(RunError) as raised:
        contact.check("All is kept.")
    assert str(raised.value).startswith(says)
    assert str(raised.value).endswith("All is kept.")
    asked.silent, before = set(), len(asked.said)
    with pytest.raises(RunError):
        contact.check("All is kept.")
    assert len(asked.said) == before, "nobody is asked again"


def test_a_client_of_ray_leaves_that_to_another_process(asked):
    contact = RayContact(ray(connected=True))
    contact.check("then")
    assert asked.said == []


@pytest.mark.parametrize(
    ("error", "comes_back", "seconds"),
    [(ConnectionRefusedError, False, 0), (ConnectionRefusedError, True, 31), (TimeoutError, False, 31)],
)
def test_a_refusal_is_final_unless_it_may_come_back(monkeypatch, error, comes_back, seconds):
    """Whatever else goes wrong is tried for 30 seconds, here one at a time."""
    now = [50.0]
    monkeypatch.setattr(ray_contact.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_contact.time, "sleep", lambda s: now.__setitem__(0, now[0] + 5 * s))

    def connect(where, answer):
        assert (where, answer) == (("host", 9), 5.0)
        raise error

    monkeypatch.setattr(ray_contact.socket, "create_connection", connect)
    assert not ray_contact._answers(("host", 9), comes_back)
    assert now[0] - 50.0 == pytest.approx(seconds)


def test_variables_are_set_for_a_while(monkeypatch):
    monkeypatch.setenv("FEDAUDIT_A", "before")
    monkeypatch.delenv("FEDAUDIT_B", raising=False)
    with environment({"FEDAUDIT_A": "1", "FEDAUDIT_B": "2"}):
        assert (os.environ["FEDAUDIT_A"], os.environ["FEDAUDIT_B"]) == ("1", "2")
    assert os.environ["FEDAUDIT_A"] == "before"
    assert "FEDAUDIT_B" not in os.environ
