"""Data sets of Hugging Face's library: from a folder, from the cache, and never from the network."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from fedaudit.data import available, load
from fedaudit.data.readers import huggingface
from fedaudit.data.readers.huggingface import Choice, choice_of, hashed
from fedaudit.errors import DataError, SettingError
from fedaudit.shape import Shape

N = 20
Y = [i % 2 for i in range(N)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders as save_to_disk writes them: texts, rows, token ids, images; and the files of a data set."""
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("hf")
    label = datasets.ClassLabel(names=["neg", "pos"])

    def save(name, columns, kinds, splits=("train", "test")):
        kinds = datasets.Features({key: datasets.Value(of) if isinstance(of, str) else of for key, of in kinds.items()})
        made = {split: datasets.Dataset.from_dict(columns, features=kinds) for split in splits}
        datasets.DatasetDict(made).save_to_disk(str(folder / name))
        return made

    texts = save(
        "texts", {"text": ["good film", "a bad, BAD film"] * 10, "label": Y}, {"text": "string", "label": label}
    )
    (folder / "files").mkdir()
    for split, of in texts.items():
        of.to_parquet(str(folder / "files" / f"{split}.parquet"))
    rows = {"a": np.arange(N) / N, "b": list(range(N)), "kind": ["x", "y"] * 10}
    save("rows", rows, {"a": "float32", "b": "int64", "kind": "string"}, ("train",))
    numbered = {"idx": list(range(N)), "text": ["good film", "a bad film"] * 10, "label": Y}
    save("numbered", numbered, {"idx": "int64", "text": "string", "label": label}, ("train",))
    ids = {"input_ids": [[5, 6, 7][: 1 + i % 3] for i in range(N)], "label": Y}
    save("ids", ids, {"input_ids": datasets.List(datasets.Value("int32")), "label": label}, ("train",))
    pictures = [Image.fromarray(np.full((6, 5), i, np.uint8)) for i in range(N)]
    save("images", {"image": pictures, "label": Y}, {"image": datasets.Image(), "label": label}, ("train",))
    contest = {"text": ["a", "b"] * 10, "label": [-1] * N}
    both = save(
        "contest", {"text": ["a", "b"] * 10, "label": Y}, {"text": "string", "label": label}, ("train", "validation")
    )
    hidden = datasets.Dataset.from_dict(contest, features=both["train"].features)
    datasets.DatasetDict(**both, test=hidden).save_to_disk(str(folder / "contest"))
    return folder


def test_texts_become_ids_by_their_words(saved):
    data = load(f"hf:{saved / 'texts'}?length=5&vocabulary=100")
    assert (data.shape, data.class_names) == (Shape((5,), tokens=100), ("neg", "pos"))
    assert (len(data.x), len(data.test_x)) == (N, N)
    good, bad = data.x[0].tolist(), data.x[1].tolist()
    assert good[1] == bad[3]  # film
    assert bad[1] == bad[2]  # bad, BAD
    assert good[2:] == [0, 0, 0]
    assert bad == hashed("a bad, BAD film", 5, 100).tolist()


def test_the_hash_is_the_same_everywhere():
    assert hashed("Good film", 3, 4096).tolist() == [327, 2528, 0]
    assert 0 < hashed("x " * 50, 50, 2).min() <= hashed("x " * 50, 50, 2).max() < 2


def test_a_folder_of_files_is_read(saved, monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    data = load(f"hf:{saved / 'files'}?length=5&vocabulary=100")
    assert torch.equal(data.x, load(f"hf:{saved / 'texts'}?length=5&vocabulary=100").x)
    # What lies in the cache under a name is found by it.
    [made] = tmp_path.glob("files")
    made.rename(tmp_path / "nobody___made")
    for arrow in (tmp_path / "nobody___made").rglob("files-*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace("files-", "made-")))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert available("hf:nobody/made")
    assert not available("hf:nobody/else")
    assert torch.equal(load("hf:nobody/made?length=5&vocabulary=100").x, data.x)


def test_rows_ids_and_images(saved):
    rows = load(f"hf:{saved / 'rows'}?x=a,b&y=kind")
    assert (rows.shape, rows.class_names, len(rows.x), len(rows.test_x)) == (Shape((2,)), ("x", "y"), 16, 4)
    assert rows.x[3].tolist() == pytest.approx([3 / N, 3])
    ids = load(f"hf:{saved / 'ids'}")
    assert ids.shape == Shape((3,), tokens=8)
    assert ids.x[:3].tolist() == [[5, 0, 0], [5, 6, 0], [5, 6, 7]]
    images = load(f"hf:{saved / 'images'}")
    assert images.shape == Shape((1, 6, 5))
    assert images.x[:, 0, 0, 0].tolist() == [i for i in range(N) if i not in (4, 5, 14, 15)]


def test_a_column_that_numbers_the_records_is_no_choice(saved):
    """Texts with an index beside them are texts; texts with numbers beside them are nobody's guess."""
    assert load(f"hf:{saved / 'numbered'}").shape.kind == "tokens"


def test_hidden_labels_make_no_test_set(saved):
    data = load(f"hf:{saved / 'contest'}?length=2")
    assert data.test_y.tolist() == Y


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("texts?x=txt", "has no column 'txt'. Did you mean 'text'"),
        ("texts?y=txt", "has no column 'txt'"),
        ("texts?test=tset", "has no split 'tset'. Did you mean 'test'"),
        ("texts?z=1", "unknown option 'z'"),
        ("texts?length=none", "length = 'none'; give a whole number"),
        ("rows", r"clearly the label\. Write hf:.*y=COLUMN, with one of a \(number\), b \(number\), kind \(text\)"),
        ("rows?y=a&x=b", "array y is float64"),
        ("rows?y=b", r"clearly holds the records\. Write hf:.*x=COLUMN, with one of a \(number\), .* kind \(text\)"),
        ("nowhere", r"cannot be read \(.*save_to_disk wrote, or fetch it once"),
    ],
)
def test_what_is_off_is_said(saved, choice, says):
    with pytest.raises((DataError, SettingError), match=says):
        load(f"hf:{saved / choice}")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install .datasets>=2\.19"):
        load("hf:imdb?length=7")


def test_nothing_is_fetched(monkeypatch):
    """With the network at hand: the library is told to be offline, and opens no connection."""
    pytest.importorskip("datasets")
    import socket

    asked = []

    def refused(*where, **_):
        asked.append(where)
        raise OSError("no network")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refused)
    with pytest.raises(DataError, match="fetch it once"):
        load("hf:nobody/nothing-of-the-sort")
    assert not asked


def test_a_name_says_what_to_read():
    assert choice_of("hf:imdb") == Choice("imdb", None, None, None, None, None, None, 64, 4096)
    asked = choice_of("hf:a/b?x=text&y=score&person=who&config=en&train=big&test=small&length=2&vocabulary=10000000")
    assert asked == Choice("a/b", "text", "score", "who", "en", "big", "small", 2, 10_000_000)


@pytest.mark.parametrize("option", ["length=1", "length=10000001", "vocabulary=x", "vocabulary=-3", "lenght=3"])
def test_an_option_that_is_off_is_refused(option):
    with pytest.raises(SettingError, match=r"give a whole number|unknown option"):
        choice_of(f"hf:imdb?{option}")


# --- columns by hand, without the library ----------------------------------------------------------------------------


def column(kind, **facts):
    """A column of one kind, as the library describes it."""
    name = {"image": "Image", "tokens": "List", "lists": "Sequence", "class": "ClassLabel"}.get(kind, "Value")
    dtype = {"image": "", "tokens": "", "lists": "", "class": "int64"}.get(kind, kind)
    inside = {"tokens": "int32", "lists": "float32"}.get(kind, "")
    return type(name, (), {"dtype": dtype, "feature": SimpleNamespace(dtype=inside), **facts})()


@pytest.mark.parametrize(
    ("kind", "found"),
    [("image", "image"), ("tokens", "tokens"), ("lists", "numbers"), ("string", "text"), ("large_string", "text"),
     ("int8", "number"), ("uint64", "number"), ("float32", "number"), ("bool", "number"), ("timestamp[s]", "other")],
)  # fmt: skip
def test_kinds_of_columns(kind, found):
    assert huggingface._kind(column(kind)) == found


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"a": "image", "b": "string", "c": "int64"}, ["a"]),  # an image comes first
        ({"a": "tokens", "b": "string"}, ["a"]),
        ({"a": "string"}, ["a"]),
        ({"a": "string", "b": "float32"}, None),  # between a text and numbers nobody guesses
        ({"a": "tokens", "b": "float32"}, ["a"]),
        ({"a": "float32", "b": "int8"}, ["a", "b"]),
        ({"a": "float32", "ID": "int64", "idx": "int64"}, ["a"]),
        ({"a": "image", "b": "image"}, None),
        ({"a": "float32", "b": "timestamp[s]"}, None),
        ({"a": "string", "b": "string"}, None),
        ({}, None),
    ],
)
def test_which_columns_are_the_records(columns, found):
    every = {name: column(kind) for name, kind in ({"y": "class", "whose": "string"} | columns).items()}
    if found is None:
        with pytest.raises(DataError, match="no column clearly holds the records"):
            huggingface._records("hf:d", Choice("d"), every, "y", "whose")
    else:
        assert huggingface._records("hf:d", Choice("d"), every, "y", "whose") == found
    assert huggingface._records("hf:d", Choice("d", x="id,b"), every | {"id": 0, "b": 0}, "y", None) == ["id", "b"]
    with pytest.raises(DataError, match="has no column 'y'"):
        huggingface._records("hf:d", Choice("d", x="y"), every, "y", None)


@pytest.mark.parametrize(
    ("columns", "found"),
    [({"a": "class", "label": "int64"}, "a"), ({"a": "class", "b": "class", "target": "int64"}, "target"),
     ({"target": "int64", "labels": "int64"}, "labels"), ({"a": "int64"}, None), ({"a": "class", "b": "class"}, None)],
)  # fmt: skip
def test_which_column_is_the_label(columns, found):
    every = {name: column(kind) for name, kind in columns.items()}
    if found is None:
        with pytest.raises(DataError, match="no column is clearly the label"):
            huggingface._label("hf:d", Choice("d"), every)
    else:
        assert huggingface._label("hf:d", Choice("d"), every) == found
    assert huggingface._label("hf:d", Choice("d", y="a"), every | {"a": 0}) == "a"
    with pytest.raises(DataError, match="has no column 'z'"):
        huggingface._label("hf:d", Choice("d", y="z"), every)


def test_whose_records_they_are():
    person = huggingface._person
    assert person("hf:d", Choice("d"), {"a": 0}) is None
    assert person("hf:d", Choice("d"), {"person": 0, "a": 0}) == "person"
    assert person("hf:d", Choice("d", person="a"), {"person": 0, "a": 0}) == "a"
    with pytest.raises(DataError, match="has no column 'b'"):
        person("hf:d", Choice("d", person="b"), {"person": 0})


def split(y, a, persons=None, **more):
    columns = {"a": column("float32"), "label": column("class", names=["no", "yes"])}
    values = {"a": a, "label": y}
    if persons is not None:
        columns["person"], values["person"] = column("string"), persons
    return type("Rows", (), {"features": columns, "__getitem__": lambda self, key: values[key]})()


def test_splits_labels_and_persons_come_together(monkeypatch):
    """A data set in memory: four records to train on, two in each of two test sets, the first with hidden labels."""
    train = split([0, 1, 1, 0], [1.0, 2.0, 3.0, 4.0], ["p", "q", "p", "p"])
    hidden, shown = split([-1, -1], [9.0, 9.0], ["p", "q"]), split([1, 0], [7.0, 8.0], ["p", "q"])
    monkeypatch.setattr(
        huggingface, "_read", lambda name, choice: {"test": hidden, "train": train, "validation": shown}
    )
    found = huggingface.dataset("hf:d", None)
    assert found.x.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (found.y.tolist(), found.test_y.tolist()) == ([0, 1, 1, 0], [1, 0])
    assert found.test_x.flatten().tolist() == [7.0, 8.0]
    assert found.person.tolist() == [0, 1, 0, 0]
    assert found.class_names == ("no", "yes")
    other = split([0, 0, 1, 1], [4.0, 3.0, 2.0, 1.0])
    monkeypatch.setattr(huggingface, "_read", lambda name, choice: {"part": other, "test": shown})
    again = huggingface.dataset("hf:d", None)
    assert again.x.flatten().tolist() == [4.0, 3.0, 2.0, 1.0], "the only split that is left"
    assert again.person is None
    monkeypatch.setattr(huggingface, "_read", lambda name, choice: {"test": split([0, 1] * 10, [1.0] * 20)})
    alone = huggingface.dataset("hf:d", None)
    assert (len(alone.y), len(alone.test_y)) == (16, 4), "it trains on the test set, and a fifth becomes one"


def test_columns_of_numbers_and_ids():
    rows = type("Rows", (), {"features": {"a": column("float32"), "b": column("int8"), "t": column("tokens"),
                                          "s": column("string"), "v": column("string"), "l": column("lists")},
                             "__getitem__": lambda self, key: {"a": [1.5, 2.5], "b": [3, 4], "t": [[5, 6, 7], [8]],
                                                               "l": [[1.0, 2.0], [3.0, 4.0]]}[key]})()  # fmt: skip

    def of(*x, length=64):
        return huggingface._column("hf:d", Choice("d", length=length), list(x), rows, None).tolist()

    assert of("a", "b") == [[1.5, 3.0], [2.5, 4.0]]
    assert of("t") == [[5, 6, 7], [8, 0, 0]]
    assert of("t", length=2) == [[5, 6], [8, 0]]
    assert of("l") == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(DataError, match="s, v are columns of texts"):
        of("s", "v")


@pytest.mark.parametrize(("modes", "channels"), [(["L", "L"], 1), (["L", "RGB"], 3), (["1", "LA"], 1)])
def test_images_are_grey_where_all_are(modes, channels):
    from PIL import Image

    pictures = [Image.new(mode, (5, 6)) for mode in modes]
    assert huggingface._images(pictures, None).shape == (2, channels, 6, 5)
    assert huggingface._images(pictures, 4).shape == (2, channels, 4, 4)


def test_labels_that_are_words_are_numbered_over_all_splits():
    parts = [{"y": ["cat", "ant"]}, {"y": ["bee", "cat"]}]
    values, names = huggingface._labels("hf:d", "y", column("string"), parts)
    assert [of.tolist() for of in values] == [[2, 0], [1, 2]]
    assert names == ["ant", "bee", "cat"]
    values, names = huggingface._labels("hf:d", "y", column("int64"), [{"y": [3, 1]}])
    assert (values[0].tolist(), names) == ([3, 1], None)


def test_data_are_there_in_a_folder_or_in_the_cache(monkeypatch, tmp_path):
    """The cache is where the environment says; a name with a slash has a folder with three underscores."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    (tmp_path / "home" / "datasets").mkdir(parents=True)
    assert not huggingface.there("hf:somebody/data?x=text")
    (tmp_path / "home" / "datasets" / "somebody___data").mkdir()
    assert huggingface.there("hf:somebody/data?x=text")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert not huggingface.there("hf:somebody/data")
    (tmp_path / "cache" / "somebody___data").mkdir(parents=True)
    assert huggingface.there("hf:somebody/data")
    assert huggingface.there(f"hf:{tmp_path}")


def test_every_option_of_a_name():
    text = "hf:a/b?x=text,more&y=label&person=who&config=&train=tr&test=te&length=2&vocabulary=10000000"
    assert choice_of(text) == Choice("a/b", "text,more", "label", "who", "", "tr", "te", 2, 10_000_000)
    assert choice_of("hf:a") == Choice("a", None, None, None, None, None, None, 64, 4096)
    for wrong in ("length=1", "length=10000001", "vocabulary=2.5", "length="):
        with pytest.raises(SettingError, match="give a whole number from 2 to 10,000,000"):
            choice_of(f"hf:a?{wrong}")


def test_the_library_reads_a_saved_folder_a_folder_of_files_or_a_name_always_offline(monkeypatch, tmp_path):
    """Both of its modules are told to be offline, also where one knows no such word, and are as before afterwards."""
    asked = []
    hub, config = ModuleType("huggingface_hub.constants"), SimpleNamespace(HF_HUB_OFFLINE="as it was")
    package = ModuleType("huggingface_hub")
    package.constants = hub

    def reading(name, found):
        def read(*given):
            asked.append((name, *given, hub.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE))
            return found

        return read

    library = ModuleType("datasets")
    library.config = config
    library.load_from_disk = reading("disk", {"train": 1, "test": 2})
    library.load_dataset = reading("name", "one table")
    for name, module in (("datasets", library), ("huggingface_hub", package), ("huggingface_hub.constants", hub)):
        monkeypatch.setitem(sys.modules, name, module)

    def read(place):
        return huggingface._read(f"hf:{place}", Choice(str(place), config="en"))

    assert read("a/b") == {"train": "one table"}
    assert read(tmp_path) == {"train": "one table"}
    for file in ("state.json", "dataset_dict.json"):
        (tmp_path / file).mkdir()
        assert read(tmp_path) == {"train": "one table"}, "a folder is no file"
        (tmp_path / file).rmdir()
        (tmp_path / file).write_text("{}")
        assert read(tmp_path) == {"train": 1, "test": 2}
        (tmp_path / file).unlink()
    of_folder = [("name", str(tmp_path), "en", True, True), ("disk", str(tmp_path), True, True)]
    assert asked == [("name", "a/b", "en", True, True), of_folder[0], *of_folder, *of_folder]
    assert (config.HF_HUB_OFFLINE, hasattr(hub, "HF_HUB_OFFLINE")) == ("as it was", False)

    def fails(*given):
        raise ValueError("no such data\nand more of it")

    library.load_dataset = fails
    with pytest.raises(DataError, match=r"cannot be read \(ValueError: no such data\)\. .*load_dataset\('a/b'\)"):
        read("a/b")
