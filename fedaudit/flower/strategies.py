"""Flower's strategies, watched while they run unchanged, for facts that are in no message.

These are: which strategy it is, its claim of differential privacy, and the global model after each round. Strategies of
the newer API (`start`) and of the older one (`aggregate_fit`, `evaluate`) are watched, and also those whose own code
takes the place of Flower's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from flwr.app import ArrayRecord
from flwr.common import Parameters
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server.strategy import Strategy as OlderStrategy
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedaudit.flower.claims import strategy_claim
from fedaudit.flower.messages import tensor_of
from fedaudit.flower.recorder import Recorder

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def watched_strategies(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of each strategy that runs while this is open: its name, its claims, its models."""
    watch = _Watch(recorder)
    with contextlib.ExitStack() as stack:
        for base, methods in (
            (Strategy, {"start": watch.start, "aggregate_train": watch.aggregate_train}),
            (OlderStrategy, {"aggregate_fit": watch.aggregate_fit, "evaluate": watch.evaluate}),
        ):
            for cls in _with_subclasses(base):
                for name, wrapper in methods.items():
                    if inspect.isfunction(own := cls.__dict__.get(name)):
                        stack.enter_context(mock.patch.object(cls, name, wrapper(own)))
        yield


def _with_subclasses(cls: type) -> list[type]:
    found: dict[type, None] = {cls: None}
    below: list[type] = cls.__subclasses__()
    for sub in below:
        found |= dict.fromkeys(_with_subclasses(sub))
    return list(found)


class _Watch:
    """The wrappers around strategies' methods. A wrapper's strategy calls another one: the outermost call counts."""

    def __init__(self, recorder: Recorder):
        self.recorder, self._inside = recorder, threading.local()
        self._met: list[Any] = []

    @contextlib.contextmanager
    def _call(self, strategy: Any) -> Iterator[bool]:
        """Yield whether this call is the outermost of a strategy in this thread, and note its name if so."""
        depth = getattr(self._inside, "depth", 0)
        if depth == 0:
            self._meet(strategy)
        self._inside.depth = depth + 1
        try:
            yield depth == 0
        finally:
            self._inside.depth = depth

    def _meet(self, strategy: Any) -> None:
        """Note a strategy's name and claim when it is first seen. Adaptive clipping changes its norm later."""
        if any(strategy is known for known in self._met):
            return
        self._met.append(strategy)
        self.recorder.note(f"server strategy: {type(strategy).__name__}")
        if (claim := strategy_claim(strategy)) is not None:
            self.recorder.central.append(claim)
            self.recorder.note(claim.text)

    def start(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a strategy's `start` with a central evaluation that also shows the model, if it takes one."""
        takes = inspect.signature(own)

        @functools.wraps(own)
        def start(*args: Any, **options: Any) -> Any:
            self._meet(args[0])
            if "evaluate_fn" not in takes.parameters:
                return own(*args, **options)
            given = takes.bind(*args, **options)
            given.arguments["evaluate_fn"] = self._evaluating(given.arguments.get("evaluate_fn"))
            return own(*given.args, **given.kwargs)

        return start

    def _evaluating(self, theirs: Callable[..., Any] | None) -> Callable[..., Any]:
        def evaluate(server_round: int, arrays: ArrayRecord, *more: Any, **options: Any) -> Any:
            measured = None if theirs is None else theirs(server_round, arrays, *more, **options)
            if server_round > 0:
                self.recorder.model_after(_tensors(arrays), dict(measured or {}))
            return measured

        return evaluate

    def aggregate_train(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def aggregate_train(strategy: Any, *args: Any, **options: Any) -> Any:
            with self._call(strategy) as outermost:
                made = own(strategy, *args, **options)
            arrays = made[0] if isinstance(made, tuple) and made else None
            if outermost and isinstance(arrays, ArrayRecord):
                self.recorder.model_after(_tensors(arrays))
            return made

        return aggregate_train

    def aggregate_fit(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def aggregate_fit(strategy: Any, *args: Any, **options: Any) -> Any:
            with self._call(strategy) as outermost:
                results = args[1] if len(args) > 1 else options.get("results")
                if outermost and results:  # after secure aggregation, each result holds the mean of all
                    self.recorder.summed(functools.partial(_parameters, results[0][1].parameters))
                made = own(strategy, *args, **options)
            parameters = made[0] if isinstance(made, tuple) and made else None
            if outermost and isinstance(parameters, Parameters):
                self.recorder.model_after(_parameters(parameters))
            return made

        return aggregate_fit

    def evaluate(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def evaluate(strategy: Any, *args: Any, **options: Any) -> Any:
            with self._call(strategy) as outermost:
                measured = own(strategy, *args, **options)
            server_round = args[0] if args else options.get("server_round", 0)
            if outermost and measured is not None and server_round > 0:
                self.recorder.measured({"loss": measured[0], **measured[1]})
            return measured

        return evaluate


def _tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    return {name: tensor_of(array) for name, array in arrays.items()}


def _parameters(parameters: Parameters) -> dict[str, Tensor]:
    return _tensors(parameters_to_arrayrecord(parameters, keep_input=True))
