"""Functions of a method by their names, also of a method inside another."""

from __future__ import annotations

import pytest
from outside import Averages, Exchange

from fedaudit.errors import ContractError
from fedaudit.runtime.method import Method, check_path, find_function, function_path, parts_of


class Around(Method):
    """Holds a method beside a number."""

    inner: Exchange = Exchange(steps=7)
    times: int = 3

    def ask_all(self, client, message):
        return None


class Outermost(Method):
    first: Averages = Averages()
    second: Around = Around()


def test_functions_of_methods_inside_a_method_have_the_path_to_them():
    method = Outermost()
    assert [(prefix, type(part).__name__) for prefix, part in parts_of(method, "")] == [
        ("", "Outermost"), ("first.", "Averages"), ("second.", "Around"), ("second.inner.", "Exchange"),
    ]  # fmt: skip
    inner = method.second.inner
    name = next(name for name in vars(Exchange) if callable(vars(Exchange)[name]) and not name.startswith("_"))
    for fn, path in ((getattr(inner, name), f"second.inner.{name}"), (method.second.ask_all, "second.ask_all")):
        assert function_path(method, fn) == path
        assert find_function(method, path) == fn
        check_path(method, path)


def test_functions_of_other_methods_are_refused():
    method = Outermost()
    with pytest.raises(ContractError, match="not a function of Outermost"):
        function_path(method, Around().ask_all)
    for path in ("second.inner.nothing", "third.ask_all", "ask_all"):
        with pytest.raises(ContractError, match="not a function of Outermost"):
            check_path(method, path)
