"""Losses in Flower's own simulation on Ray: a worker that died is replaced, and its task is done again.

Flower puts a dead worker back among the idle ones, and every task that it is given counts as a node that failed. But a
task is a function of its message and of its node's context, and the context is kept only after the answer. So it is
done again, and the run is the one that it would have been. Without Ray itself nothing can be done again: that ends the
run with an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedaudit.errors import RunError
from fedaudit.flower.client import FAILED, partition_of
from fedaudit.flower.messages import AUDIT
from fedaudit.runtime.engines.losses import TRIES
from fedaudit.runtime.engines.ray_contact import OUTLIVE, RayContact, environment

GO_ON = (
    "The folder holds the rounds that were whole. Use --resume if the app goes on from a state of its own, or run it "
    "without --ray, one node after the other."
)


@contextlib.contextmanager
def lost_workers_replaced(redone: Callable[[], None]) -> Iterator[None]:
    """Replace workers that die while this is open, and do their tasks again. Call `redone` for each such task.

    A task that is lost `TRIES` times ends the run with an error, and so does the loss of Ray.
    """
    import ray
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool

    losses = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
    fetch, process = BasicActorPool.fetch_result_and_return_actor_to_pool, RayBackend.process_message
    contact = functools.cache(lambda: RayContact(ray))  # made with the first task, when Ray has been started

    def fetched(pool: Any, future: Any) -> Any:
        try:
            return fetch(pool, future)
        except losses:
            contact().check(GO_ON)
            pool._future_to_actor[future] = pool.create_actor_fn()  # the backend puts this one among the idle ones
            raise

    def processed(backend: Any, message: Message, context: Context) -> tuple[Message, Context]:
        for begun in range(1, TRIES + 1):
            try:
                contact().check(GO_ON)
                return process(backend, message, context)
            except losses as e:
                if begun == TRIES:
                    return failed(message, context, lost_too_often(e)), context
                redone()
            except RunError as e:  # Ray is gone
                return failed(message, context, str(e)), context
        raise AssertionError("the last try returns")

    with (
        environment(OUTLIVE),
        mock.patch.object(BasicActorPool, "fetch_result_and_return_actor_to_pool", fetched),
        mock.patch.object(RayBackend, "process_message", processed),
    ):
        yield


def failed(message: Message, context: Context, why: str) -> Message:
    """Return an answer for which the server's side of the audit ends the run with an error."""
    said = f"node {partition_of(context)}, {message.metadata.message_type}: {why}"
    return Message(RecordDict({AUDIT: ConfigRecord({FAILED: said})}), reply_to=message)


def lost_too_often(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return (
        f"the task was lost {TRIES} times with the process that did it: {type(error).__name__}: {first} The likely "
        f"cause is memory: the system kills a process when there is none left. {GO_ON}"
    )
