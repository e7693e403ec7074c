"""Data sets of Hugging Face's library: from a folder, from the cache, and never from the network."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fedaudit.data import available, load
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
