"""Families are folders: the names that users import and that transcripts hold do not change with them."""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace

import pytest

from fedaudit import registry
from fedaudit.errors import SettingError


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("fedaudit.methods.fedavg", "fedaudit.methods.averaging.fedavg"),
        ("fedaudit.methods._host", "fedaudit.methods.datafree._host"),
        ("fedaudit.attacks.lira", "fedaudit.attacks.membership.lira"),
    ],
)
def test_a_module_without_its_family_is_the_same_module(short: str, whole: str) -> None:
    one, other = importlib.import_module(short), importlib.import_module(whole)
    assert one is other
    assert (one.__name__, one.__spec__.name) == (whole, whole)
    assert registry.public_module(whole) == short


def test_a_message_is_named_without_the_family() -> None:
    """A transcript from before there were families is read, and one from today has the same digests."""
    from fedaudit.methods.averaging.fedavg import FedAvg, Local

    assert Local.class_id() == "fedaudit.methods.fedavg.Local"
    assert registry.family_of(FedAvg) == "averaging"


def test_other_modules_keep_their_names() -> None:
    assert registry.public_module("fedaudit.runtime.engines.ray") == "fedaudit.runtime.engines.ray"
    assert registry.public_module("mine.methods.a.b") == "mine.methods.a.b"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fedaudit.methods.no_such_method")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("a.b:C", True), ("a:b.C", True), ("fedavg", False), ("a.b:", False), (":C", False), ("1a:C", False)],
)
def test_which_texts_name_users_own_code(text, is_one):
    assert registry.is_path(text) is is_one


# --- names of one's own, and names that a file gives -----------------------------------------------------------------


@pytest.fixture
def own(monkeypatch):
    """Registered names of the tests alone."""
    monkeypatch.setattr(registry, "_found", {"methods": {}, "attacks": {}})
    monkeypatch.setattr(registry, "_broken", {"methods": {}, "attacks": {"broken": "ImportError: no torch"}})
    monkeypatch.setattr(registry, "_loaded", {"methods", "attacks"})


def test_a_class_is_registered_once_under_its_name(own):
    """The same class may be imported again, as another object. Another class of that name is refused."""

    class First:
        pass

    class Second:
        pass

    assert registry.register("a", tables="DFFKE FedAF")(First) is First
    assert (First.registered_name, First.tables) == ("a", ("DFFKE", "FedAF"))
    again = type("First", (), {"__module__": First.__module__, "__qualname__": First.__qualname__})
    assert registry.register("a")(again).tables == ()
    assert registry.find("a") is again
    with pytest.raises(SettingError, match="'a' names two methods"):
        registry.register("a")(Second)
    elsewhere = type("First", (), {"__module__": "another", "__qualname__": First.__qualname__})
    with pytest.raises(SettingError, match="'a' names two methods"):
        registry.register("a")(elsewhere)
    assert registry.register_attack("a")(Second) is Second
    registry.register("b")(Second)
    assert registry.find("a", "attacks") is Second
    assert (registry.names("methods"), registry.names("attacks")) == (["a", "b"], ["a"])


def test_names_that_nobody_knows_and_names_that_cannot_be_imported(own):
    with pytest.raises(SettingError, match=r"^The attack 'broken' of another package .* ImportError: no torch\."):
        registry.find("broken", "attacks")
    with pytest.raises(SettingError, match=r"^Unknown method 'broken'\..* For your own method, write"):
        registry.find("broken")


def test_other_packages_add_names_and_replace_none(own, monkeypatch):
    """An entry point of a known name is ignored, and one that cannot be loaded is told when it is asked for."""

    class Mine:
        pass

    def fails():
        raise ValueError("no such class")

    asked = []
    entries = [
        SimpleNamespace(name="theirs", load=lambda: Mine), SimpleNamespace(name="wrong", load=fails),
        SimpleNamespace(name="known", load=lambda: Mine),
    ]  # fmt: skip
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: asked.append(group) or entries)
    imported = []
    monkeypatch.setattr(registry.importlib, "import_module", imported.append)
    monkeypatch.setattr(registry, "_families", {"fedaudit.attacks": {"a": "f", "_b": "f", "c": "shared", "d": "g"}})
    registry._found["attacks"]["known"] = registry._found["methods"]["other"] = int
    registry._loaded.remove("attacks")
    assert registry.names("attacks") == ["known", "theirs"]
    assert registry.find("known", "attacks") is int
    assert asked == ["fedaudit.attacks"]
    assert imported == ["fedaudit.attacks", "fedaudit.attacks.f.a", "fedaudit.attacks.g.d"]
    with pytest.raises(SettingError, match="ValueError: no such class"):
        registry.find("wrong", "attacks")
    assert registry.names("methods") == ["other"]
    assert len(asked) == 1, "each group is looked through once"


def test_to_find_a_method_imports_its_own_module_alone(own, monkeypatch):
    """All others are imported for a name that no module has, or for a module that registers another name."""

    class Mine:
        pass

    imported = []

    def imports(name):
        imported.append(name)
        if name == "fedaudit.methods.f.a":
            registry.register("a")(Mine)

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: imported.append("entry points") or [])
    monkeypatch.setattr(registry.importlib, "import_module", imports)
    monkeypatch.setattr(registry, "_families", {"fedaudit.methods": {"a": "f", "_b": "f", "c": "shared", "d": "g"}})
    registry._loaded.clear()
    assert registry.find("a") is Mine
    assert imported == ["fedaudit.methods", "fedaudit.methods.f.a"]
    whole = ["fedaudit.methods", "fedaudit.methods.f.a", "fedaudit.methods.g.d", "entry points"]
    for name, first in (("d", ["fedaudit.methods.g.d"]), ("c", []), ("a+d", [])):
        registry._loaded.clear()
        imported.clear()
        with pytest.raises(SettingError, match="Unknown method"):
            registry.find(name)
        assert imported == ["fedaudit.methods", *first, *whole]
    imported.clear()
    assert registry.find("a") is Mine
    assert imported == [], "all are there"


def test_an_own_method_may_not_take_the_name_of_one_of_the_package(own, monkeypatch):
    """Also if its module has not been imported: the name would be another method for this process alone."""

    class Mine:
        pass

    class Theirs:
        pass

    monkeypatch.setattr(
        registry.importlib, "import_module", lambda name: name[-1] == "a" and registry.register("a")(Theirs)
    )
    monkeypatch.setattr(registry, "_families", {"fedaudit.methods": {"a": "f"}})
    registry.register("a")(Mine)
    registry._loaded.clear()
    with pytest.raises(SettingError, match="'a' names two methods"):
        registry.find("a")


def test_nor_a_name_that_another_module_of_the_package_registers(own, monkeypatch):
    """`fedavg+dfrd` is in the module of `dfrd`. Who has that name already must not hide it."""

    class Mine:
        pass

    class Theirs:
        pass

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    monkeypatch.setattr(
        registry.importlib, "import_module", lambda name: name[-1] == "d" and registry.register("a+d")(Theirs)
    )
    monkeypatch.setattr(registry, "_families", {"fedaudit.methods": {"a": "f", "d": "g"}})
    registry.register("a+d")(Mine)
    registry._loaded.clear()
    with pytest.raises(SettingError, match="'a\\+d' names two methods"):
        registry.find("a+d")


def test_a_file_may_name_only_code_that_is_trusted(monkeypatch, tmp_path):
    """Code that is imported already and code of fedaudit need no trust; the user may name anything."""
    monkeypatch.setattr(registry, "_trusting", False)
    registry.check_trusted("nowhere_at_all.module:Class")
    with registry.read_from(tmp_path):
        assert registry.named_by() == str(tmp_path)
        registry.check_trusted("json.decoder:JSONDecoder")
        registry.check_trusted("fedaudit.no_such_module:Class")
        with pytest.raises(SettingError, match=r"'nowhere_at_all\.module:Class', which would be"):
            registry.check_trusted("nowhere_at_all.module:Class")
        with registry.read_from(None):
            assert registry.named_by() is None
            registry.check_trusted("nowhere_at_all.module:Class")
        registry.trust()
        registry.check_trusted("nowhere_at_all.module:Class")
        registry.trust(False)
        with pytest.raises(SettingError, match="say --trust"):
            registry.outside("nowhere_at_all.module:Class", "method")
    assert registry.named_by() is None


def test_trusted_code_comes_from_pythonpath_and_not_from_beside_the_file(monkeypatch, tmp_path):
    """Neither from the folder of the file nor from the working folder, unless PYTHONPATH names it."""
    monkeypatch.setattr(registry, "_trusting", True)
    (tmp_path / "beside_the_file.py").write_text("class Mine: pass")
    (tmp_path / "package_beside").mkdir()
    (tmp_path / "package_beside" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    names = ("beside_the_file:Mine", "package_beside.inner:Mine")
    for path in names:
        with registry.read_from(tmp_path), pytest.raises(SettingError, match="nothing is imported from the working"):
            registry.check_trusted(path)
    other = tmp_path / "other"
    other.mkdir()
    with registry.read_from(other):
        registry.check_trusted(names[0])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SettingError, match="nothing is imported from the working"):
            registry.check_trusted(names[0])
        monkeypatch.setenv("PYTHONPATH", f"/nowhere{os.pathsep}{tmp_path}")
        registry.check_trusted(names[0])
        registry.check_trusted("no_such_module_at_all:Mine")
    with registry.read_from(tmp_path):
        assert registry.outside(names[0], "method").__name__ == "Mine"


def test_users_own_objects_are_imported_and_their_errors_told(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *(part for part in sys.path if part)])
    (tmp_path / "own_a.py").write_text("class A:\n    class Inner: pass\n")
    (tmp_path / "own_b.py").write_text("class B:\n")
    (tmp_path / "own_c.py").write_text("x = 1\ny = 1 / 0\n")
    assert registry.outside("own_a:A.Inner", "model").__qualname__ == "A.Inner"
    assert sys.path[0] == "", "as python -m does"
    assert sys.path.count("") == 1
    registry.outside("own_a:A", "model")
    assert sys.path.count("") == 1
    for path, what, said in (
        ("own_a:B", "model", "cannot be imported.* Write package.module:Class,"),
        ("no_such_own:f", "data set", "cannot be imported.* Write package.module:function,"),
        ("own_b:B", "model", "has a syntax error: .*own_b.py, line 1"),
        ("own_c:C", "model", r"fails while it is imported: ZeroDivisionError: .*own_c.py, line 2\)"),
    ):
        with pytest.raises(SettingError, match=said):
            registry.outside(path, what)
    with pytest.raises(SettingError, match=r"'own_a:A' is not a Method\. .* fedaudit\.runtime\.method\.Method\."):
        registry.find("own_a:A")
    with pytest.raises(SettingError, match=r"'own_a:A' is not a Attack\. .* fedaudit\.attack\.scene\.Attack\."):
        registry.find("own_a:A", "attacks")
    assert registry.find("fedaudit.methods.fedavg:FedAvg").__name__ == "FedAvg"
    assert registry.failure(ValueError("never raised")) == "ValueError: never raised"


def test_a_path_of_a_file_leaves_the_import_path_alone(monkeypatch):
    monkeypatch.setattr("sys.path", [part for part in sys.path if part])
    with registry.read_from("somewhere"):
        assert registry.outside("json:loads", "model").__name__ == "loads"
    assert "" not in sys.path


def test_modules_in_the_folders_of_a_package_are_known_by_their_family(monkeypatch, tmp_path):
    """Two places of one package, each with folders; a module beside the folders has no family."""
    monkeypatch.setattr(registry, "_families", {})
    monkeypatch.setattr("sys.meta_path", [one for one in sys.meta_path if one is not registry._finder])
    for name in ("a/one/x.py", "a/one/__init__.py", "a/plain.py", "b/two/y.py", "b/two/__init__.py", "b/one/z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    registry.without_family("some.package", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert registry._families == {"some.package": {"x": "one", "y": "two", "z": "one"}}
    registry.without_family("some.other", [])
    assert sys.meta_path.count(registry._finder) == 1
    assert sys.meta_path[-1] is registry._finder
    assert registry.public_module("some.package.one.x") == "some.package.x"
    assert registry.public_module("some.package.one.plain") == "some.package.one.plain"
    assert registry.public_module("some.package.one.deep.x") == "some.package.one.deep.x"
    cls = type("X", (), {"__module__": "some.package.two.y"})
    assert registry.family_of(cls) == "two"
    assert registry.family_of(int) == "own"
    assert registry._finder.find_spec("some.package.x").name == "some.package.x"
    assert registry._finder.find_spec("some.package.plain") is None
    assert registry._finder.find_spec("another.x") is None
