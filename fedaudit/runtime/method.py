"""The base class of methods, and the functions by which a method reaches its clients.

A method is a frozen set of hyper-parameters. Its state lives in the record that `round` returns and in `client.model`
and `client.memory`, never on `self`. It can reach the server it runs on, the cohort it asks and the client it is sent
to. `cohort.ask` and `cohort.mean` are the only ways to a client.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import nn

from fedaudit.aggregation.sender import Sender
from fedaudit.data import Federation
from fedaudit.errors import ContractError, SettingError, unknown
from fedaudit.setting import Frozen, Setting, validated
from fedaudit.shape import Shape
from fedaudit.training import models
from fedaudit.wire.message import Down, Record, Size, Up
from fedaudit.wire.traffic import Plan

if TYPE_CHECKING:
    from fedaudit.runtime.party import Client, Cohort, Server


class Method(Frozen):
    """A federated protocol: one file, one paper. Subclass it, declare hyper-parameters as fields, and register it."""

    registered_name: ClassVar[str] = ""
    tables: ClassVar[tuple[str, ...]] = ()  # the papers whose tables list it; set where it is registered
    quick: ClassVar[Mapping[str, Any]] = {}  # hyper-parameters with which a tiny run takes a second

    on_digits: ClassVar[Mapping[str, Any]] = {}  # hyper-parameters with which a first run on the embedded digits learns
    needs_public: ClassVar[bool] = False  # True if it needs a transfer set that everybody holds

    # Why the server must see each client's reply by itself, so that secure aggregation is refused; empty: it does not.
    single_replies: ClassVar[str] = ""

    # In words, whose numbers stand alone in a sum, because other clients add nothing to them; empty: nobody's.
    alone_in_sums: ClassVar[str] = ""

    images_only: ClassVar[str] = ""  # in words, what it does that needs images; empty if it takes any records

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # the paper's hyper-parameters per data set, by name
    # True: another framework carries the messages and decides the rounds, and its bytes are not those of our wire.
    foreign_transport: ClassVar[bool] = False

    def archs(self, model: str, clients: int) -> list[str]:
        """Return which architecture each client runs, by the setting's `model`. Sub-model methods scale widths here."""
        return models.assign(model, clients)

    def server_arch(self, model: str) -> str | None:
        """Return the server's own architecture; None: the clients' common one, or the setting's `server_model`."""
        return None

    def federation(self, setting: Setting) -> Federation | None:
        """Return the records of a protocol that brings its own, such as another framework's app. None: the setting's
        data."""
        return None

    def build(self, arch: str) -> nn.Module | None:
        """Return a model of a protocol that brings its own. None: one of fedaudit's, by its name."""
        return None

    def cannot_take(self, shape: Shape) -> str | None:
        """Return why this method does not apply to records of this shape; None if it does."""
        if self.images_only and shape.kind != "images":
            name = self.registered_name or type(self).__name__
            return f"{name} {self.images_only}: it is for images, and the records are {shape}"
        return None

    def wants_public(self) -> bool:
        """Return whether a run with these hyper-parameters needs a transfer set."""
        return self.needs_public

    def init(self, server: Server) -> Record:
        """Return the state before round 1."""
        raise ContractError(f"{type(self).__name__}.init is missing: it returns the state before round 1, a Record.")

    def round(self, s: Any, server: Server, cohort: Cohort) -> Record:
        """Carry out one communication round on the server: take the state before it, and return the state after it."""
        raise ContractError(f"{type(self).__name__}.round is missing: it returns the state after a round, a Record.")

    def predictor(self, s: Any, server: Server) -> nn.Module | None:
        """Return the global model; None if the method has none."""
        return None

    def personal(self, client: Client) -> nn.Module:
        """Return the model that this client would deploy."""
        return client.model

    def points(self, client: Client) -> dict[str, nn.Module]:
        """Return this client's models at other points of the round, by name: they are evaluated beside the deployed
        one."""
        return {}

    def next_points(self, s: Any, client: Client) -> dict[str, nn.Module]:
        """Return this client's models as the next round's message would leave them, by name: they are evaluated beside
        the deployed one. `s` is the state after the round. Nothing crosses the wire for it."""
        return {}

    def global_points(self, s: Any, server: Server) -> dict[str, nn.Module]:
        """Return the server's models at other points of the round, by name: they are evaluated like the global one."""
        return {}

    def diagnostics(self, s: Any) -> dict[str, float]:
        """Return numbers about the round that ended in this state, by name, for its record. No attack sees them."""
        return {}

    def needs_single_replies(self) -> str:
        """Return why the server must see single replies with these hyper-parameters; empty: it does not."""
        return self.single_replies

    def summand(self, sender: Sender, reply: Any, message: Any) -> Up:
        """Return a client's reply in the form in which it enters `cohort.mean`: all clients' have the same shape.

        `message` is what it answers. It runs on the client if the server may learn sums only, and on the server
        otherwise. Under a guarantee for clients, a field of kind `count` that is not whole comes back as None.
        """
        return cast(Up, reply)

    def summed_numbers(self, plan: Plan) -> list[int] | None:
        """Return how many numbers a client adds to each sum of a round. None: one sum, of all that it declares to
        send."""
        return None

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int] | None:
        """Return the bytes of one round over the whole cohort, by ("up" or "down", "Message.field"). None: not
        declared."""
        return None

    @classmethod
    def make(cls, values: Mapping[str, Any], preset: str | None = None) -> Method:
        """Return the method with `values` over the preset over its defaults."""
        name = cls.registered_name or cls.__name__
        if preset is not None and preset not in cls.presets:
            raise SettingError(unknown(f"preset of {name}", preset, cls.presets))
        merged = dict(cls.presets[preset]) if preset is not None else {}
        for key, value in values.items():  # a table overrides the preset's table key by key
            tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = {**merged[key], **value} if tables else value
        method: Method = validated(cls, merged, f"hyper-parameter of {name}")
        check_ranges(method.model_dump(), name)
        return method


# Ranges by the papers' names: batch sizes, epochs, learning rates. The pattern, the least value, and what it is.
RANGES = ((r"B(_\w+)?|batch", 1, "a batch size"), (r"E(_\w+)?|epochs", 0, "a number of epochs"),
          (r"eta(_\w+)?", 0, "a learning rate"))  # fmt: skip


def check_ranges(values: Mapping[str, Any], name: str, within: str = "") -> None:
    """Raise SettingError before a run if a hyper-parameter has a value with which no training can go on."""
    for key, value in values.items():
        where = f"{within}{key}"
        if isinstance(value, Mapping):
            check_ranges(value, name, f"{where}.")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise SettingError(f"hyper-parameter of {name} {where} = {value}: it is not finite. Give a finite number.")
        for pattern, least, what in RANGES:
            if re.fullmatch(pattern, key) and value < least:
                raise SettingError(
                    f"hyper-parameter of {name} {where} = {value}: it is {what}, and must be at least {least}."
                )


def offers_next_points(method: Method) -> bool:
    return type(method).next_points is not Method.next_points


def function_path(method: Method, fn: Callable[..., Any]) -> str:
    """Return the name by which a client finds `fn` again: a function of the method, or of a method inside it."""
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    for prefix, part in parts_of(method, ""):
        if owner is part and getattr(type(part), name, None) is getattr(fn, "__func__", None):
            return f"{prefix}{name}"
    raise ContractError(
        f"cohort.ask was given {getattr(fn, '__qualname__', fn)!r}, which is not a function of "
        f"{type(method).__name__}. A closure or a foreign function would be a download that nobody bills: write it as "
        "a function of the method, and send what it needs in the message."
    )


def check_path(method: Method, path: str) -> None:
    """Raise ContractError unless a name from another process is that of a function of the method, or of a method inside
    it."""
    for prefix, part in parts_of(method, ""):
        if path.startswith(prefix) and callable(vars_of(type(part)).get(path.removeprefix(prefix))):
            return
    raise ContractError(f"cohort.ask named {path[:80]!r}, which is not a function of {type(method).__name__}.")


def vars_of(cls: type) -> dict[str, Any]:
    """Return what a class and the classes that it derives from define."""
    return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}


def parts_of(method: Method, prefix: str) -> list[tuple[str, Method]]:
    found = [(prefix, method)]
    for name in type(method).model_fields:
        value = getattr(method, name)
        if isinstance(value, Method):
            found += parts_of(value, f"{prefix}{name}.")
    return found


def find_function(method: Method, path: str) -> Callable[[Client, Down], Up]:
    found: Any = method
    for part in path.split("."):
        found = getattr(found, part)
    return cast("Callable[[Client, Down], Up]", found)
