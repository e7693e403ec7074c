"""Models by name: sizes, splits, scaled widths, who gets what."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import adaptive_avg_pool1d, cross_entropy

from fedaudit import _torchvision
from fedaudit.errors import SettingError
from fedaudit.training import models

BIG = (
    "efficientnet_v2_s",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet34_cifar",
    "resnet50_cifar",
    "resnet101_cifar",
    "resnet152_cifar",
)
# The larger ones of a family that a smaller one stands for.
KIN = ("googlenet", "mobilenet_v3_large", "resnet18_cifar", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0")
ALL = [
    pytest.param(name, marks=pytest.mark.slow if name in BIG else pytest.mark.long if name in KIN else [])
    for name in models.names("images")
]
SCALABLE = [of for of in ALL if of.values != ("vit_tiny",)]


@pytest.fixture(autouse=True)
def _onednn(_computing):
    """Large networks take it, whatever their images: without it they are much slower."""
    torch.backends.mkldnn.set_flags(True)


def meta(arch: str, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> models.Net:
    """The network's structure, without its numbers."""
    return models.structure(arch, shape=shape, classes=classes)


def seeded(arch: str, shape: tuple[int, int, int] = (1, 8, 8)) -> models.Net:
    torch.manual_seed(7)
    return models.build(arch, shape=shape, classes=10)


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "shape", "parameters"),
    [
        # FedAF: 3*128*9+128 + 2*(128*128*9+128) + 3*2*128 = 299,520, and 10*(128*8*8+1) or 10*(128*4*4+1) on top.
        ("convnet", (3, 64, 64), 381_450),
        ("convnet", (3, 32, 32), 320_010),
        ("resnet18", (3, 64, 64), 11_181_642),  # FedAF, the communication table
        # torchvision's published 21,797,672 and 25,557,032, less 990 rows of fc: 990 * 513 and 990 * 2049.
        ("resnet34", (3, 32, 32), 21_289_802),
        ("resnet50", (3, 32, 32), 23_528_522),
        # The stem's 7x7 kernel becomes 3x3: 64*3*(49-9) = 7,680 fewer. With one channel: 64*2*49 = 6,272 fewer.
        ("resnet18_cifar", (3, 32, 32), 11_181_642 - 7_680),
        ("resnet18", (1, 28, 28), 11_181_642 - 6_272),
        # 1*16*9+16 + 16*32*9+32 + 64*(32*2*2+1) + 10*(64+1); batch norm adds 2*(16+32).
        ("cnn", (1, 8, 8), 13_706),
        ("cnn_bn", (1, 8, 8), 13_706 + 96),
        # Half of every width: 1*8*9+8 + 8*16*9+16 + 32*(16*2*2+1) + 10*(32+1).
        ("cnn@0.5", (1, 8, 8), 3_658),
        ("mlp", (1, 8, 8), 128 * 65 + 10 * 129),
        # Convolutions with bias, batch norms of two numbers a channel, 512 features whatever the image's side.
        ("conv4", (1, 28, 28), 64 * 10 + 128 * 577 + 256 * 1153 + 512 * 2305 + 2 * 960 + 5_130),
        ("conv4", (3, 32, 32), 64 * 28 + 128 * 577 + 256 * 1153 + 512 * 2305 + 2 * 960 + 5_130),
        ("conv4_pooled", (3, 32, 32), 64 * 28 + 128 * 577 + 256 * 1153 + 512 * 2305 + 2 * 960 + 5_130),
        # A layer: norms 2*2*192, attention 4*192*192+4*192, MLP 2*4*192*192+5*192. Around twelve of them: positions of
        # 64 patches and the token, the token, patches of 4x4x3, last norm, classifier.
        ("vit_tiny", (3, 32, 32), 12 * 444_864 + 65 * 192 + 192 + 192 * 49 + 384 + 1_930),
    ],
)
def test_parameter_counts(arch: str, shape: tuple[int, int, int], parameters: int) -> None:
    assert models.count(meta(arch, shape)) == parameters


@pytest.mark.parametrize(
    ("arch", "millions"),
    [
        ("fedfree_cnn", 3.2),
        ("resnet18", 11.2),
        ("resnet34", 21.3),
        ("resnet50", 23.5),
        ("resnet101", 42.5),
        ("resnet152", 58.2),
    ],
)
def test_fedfree_table_a1(arch: str, millions: float) -> None:
    assert round(models.describe(arch, (3, 32, 32), 10)["parameters"] / 1e6, 1) == millions


def test_describe_agrees_with_the_built_model_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    told = models.describe("cnn_bn@0.5", (1, 8, 8), 10)
    assert torch.equal(before, torch.get_rng_state())
    net = seeded("cnn_bn@0.5")
    # Two batch norms of width 8 and 16: mean and variance each, and a counter.
    assert told == {"arch": "cnn_bn@0.5", "parameters": models.count(net), "buffers": 2 * 24 + 2, "width": 32}
    assert net.width == 32


def test_the_convnet_is_the_one_of_fedaf() -> None:
    kinds = [type(m) for m in meta("convnet").encoder.children()]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.AvgPool2d] * 3 + [nn.Flatten]


@pytest.mark.parametrize(("arch", "pooled"), [("conv4", 3), ("conv4_pooled", 4)])
def test_the_network_of_dfrds_authors_ends_in_a_mean_over_pixels(arch: str, pooled: int) -> None:
    layers = list(meta(arch).encoder.children())
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    plain = block * (4 - pooled)
    assert [type(m) for m in layers] == [*block, models.Halving] * pooled + [*plain, nn.AdaptiveAvgPool2d, nn.Flatten]
    x = torch.rand(2, 512, 4, 4)
    assert torch.allclose(layers[-1](layers[-2](x)), x.mean((2, 3)))


def test_the_cifar_stem_keeps_the_resolution() -> None:
    x = torch.empty(1, 3, 32, 32, device="meta")
    for arch, side in (("resnet18", 8), ("resnet18_cifar", 32)):
        encoder = meta(arch).encoder
        assert encoder.get_submodule("maxpool")(encoder.get_submodule("conv1")(x)).shape == (1, 64, side, side)


def test_only_the_normalised_small_cnn_has_batch_norm() -> None:
    assert not list(meta("cnn").buffers())
    assert len(list(meta("cnn_bn").buffers())) == 6


@pytest.mark.parametrize(
    ("shape", "patches"),
    [((1, 8, 8), 64), ((1, 28, 28), 49), ((3, 32, 32), 64), ((3, 64, 64), 64), ((3, 224, 224), 196), ((3, 30, 33), 72)],
)
def test_patches_of_the_vision_transformer(shape: tuple[int, int, int], patches: int) -> None:
    assert meta("vit_tiny", shape).get_parameter("encoder.position").shape == (1, 1 + patches, 192)


def test_the_vision_transformer_looks_at_every_pixel() -> None:
    net = seeded("vit_tiny", (1, 30, 30)).eval()
    x = torch.zeros(1, 1, 30, 30, requires_grad=True)
    net(x)[0, 0].backward()
    assert x.grad is not None
    assert (x.grad != 0).all()


@pytest.mark.parametrize(("side", "kept"), [(32, 3), (15, 3), (14, 2), (8, 2), (2, 0)])
def test_googlenet_gives_up_only_the_pooling_that_does_not_fit(side: int, kept: int) -> None:
    encoder = meta("googlenet", (3, side, side)).encoder
    pools = [encoder.get_submodule(f"maxpool{i}") for i in (1, 2, 3)]
    assert [isinstance(p, nn.MaxPool2d) for p in pools] == [i < kept for i in range(3)]


# --- forward, backward, split ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 8), pytest.param((3, 32, 32), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("arch", ALL)
def test_forward_backward_and_split(arch: str, shape: tuple[int, int, int]) -> None:
    net = seeded(arch, shape)
    assert net.training
    assert net(torch.randn(2, *shape)).isfinite().all()
    # Sixteen: from 8x8 pixels a stock ResNet101 keeps one, and batch norm over two values lets its gradient overflow.
    x = torch.randn(16 if arch in ("resnet101", "resnet152") else 4, *shape)
    cross_entropy(net(x), torch.arange(len(x)) % 10).backward()
    for name, p in net.named_parameters():
        assert name.startswith(("encoder.", "classifier."))
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    net.eval()
    with torch.no_grad():
        e = net.encode(x)
        y = net(x)
        assert e.shape == (len(x), net.width)
        assert y.shape == (len(x), 10)
        assert y.isfinite().all()
        assert torch.equal(y, net.classify(e))
        torch.testing.assert_close(y, e @ net.classifier.weight.T + net.classifier.bias)


@pytest.mark.parametrize(
    "arch", ["cnn", "cnn_bn", "mlp", "convnet", "fedfree_cnn", "googlenet", "resnet18", "vit_tiny"]
)
def test_odd_sizes(arch: str) -> None:
    net = seeded(arch, (2, 3, 5))
    assert net(torch.randn(2, 2, 3, 5)).isfinite().all()


@pytest.mark.parametrize("last", ["contiguous", "channels last", "one record", "a stack of models"])
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (2, 3)])
def test_halving_without_a_gradient_gives_the_same_bits(size: tuple[int, int], last: str) -> None:
    """Odd sizes lose their last row or column, ties and what is not a number come out alike; in the order of memory in
    which torch's own leaves it."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, *size).mul(4).round()
    x[0, 0, 0, 0] = math.nan
    x = {"one record": x[0], "channels last": x.to(memory_format=torch.channels_last)}.get(last, x)
    stock, ours = nn.MaxPool2d(2), models.Halving(2)
    with torch.no_grad():
        wanted = stock(x)
        got = torch.func.vmap(ours)(x[:, None])[:, 0] if last == "a stack of models" else ours(x)
    assert got.stride() == wanted.stride()
    assert torch.equal(got.nan_to_num(99), wanted.nan_to_num(99))


def test_halving_gives_its_gradient_to_the_first_maximum() -> None:
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    models.Halving(2)(x).sum().backward()
    assert x.grad is not None
    assert x.grad[0, 0].tolist() == [[1, 0, 1, 0], [0] * 4] * 2


def test_a_structure_is_that_of_the_network_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    for arch in ("resnet18", "shufflenet_v2_x1_5@0.5", "cnn_bn/p7"):
        ours = models.structure(arch, shape=(3, 16, 16), classes=10)
        with torch.device("meta"):
            wanted = models.build(arch, shape=(3, 16, 16), classes=10)
        assert str(ours) == str(wanted)
        assert {n: (t.shape, t.dtype, t.is_meta) for n, t in ours.state_dict().items()} == {
            n: (t.shape, t.dtype, True) for n, t in wanted.state_dict().items()
        }
    assert torch.equal(before, torch.get_rng_state())


def test_the_global_generator_decides() -> None:
    first, again = seeded("mobilenet_v3_small"), seeded("mobilenet_v3_small")
    other = models.build("mobilenet_v3_small", shape=(1, 8, 8), classes=10)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("arch", ["cnn_bn", "mobilenet_v3_small@0.5"])
def test_copies_and_functional_calls(arch: str) -> None:
    net = seeded(arch).eval()
    twin = copy.deepcopy(net)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(net(x), twin(x))
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert not functional_call(net, zeros, (x,)).any()
    assert net(x).any()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())


@pytest.mark.parametrize("arch", ["cnn", "vit_tiny", "mobilenet_v3_small"])
def test_second_derivatives(arch: str) -> None:
    """Gradient inversion differentiates a gradient; fused attention and torch's hard sigmoid would refuse."""
    net = seeded(arch).eval()
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    g = torch.autograd.grad(cross_entropy(net(x), torch.tensor([1, 2])), list(net.parameters()), create_graph=True)
    (gx,) = torch.autograd.grad(torch.stack([v.square().sum() for v in g]).sum(), x)
    assert gx.isfinite().all()
    assert gx.any()


def test_mending_the_hard_sigmoid_changes_nothing() -> None:
    x = torch.linspace(-5, 5, 101)
    torch.testing.assert_close(models._Hardsigmoid()(x), nn.functional.hardsigmoid(x))
    kinds = {type(m) for m in meta("mobilenet_v3_small").modules()}
    assert models._Hardsigmoid in kinds
    assert nn.Hardsigmoid not in kinds


# --- scaled widths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", SCALABLE)
def test_scaled_variant_works_and_is_a_prefix_of_the_full_one(arch: str) -> None:
    full, net = meta(arch), seeded(f"{arch}@0.3", (3, 32, 32))
    assert all(m.training for m in net.modules())
    y = net(torch.randn(2, 3, 32, 32))
    y.square().sum().backward()
    assert y.shape == (2, 10)
    assert y.isfinite().all()
    assert all(p.grad is not None for p in net.parameters())

    large, small = full.state_dict(), net.state_dict()
    assert list(large) == list(small)
    for name, tensor in small.items():
        assert tensor.dim() == large[name].dim()
        assert all(a <= b for a, b in zip(tensor.shape, large[name].shape, strict=True)), name
    for name, m in full.encoder.named_modules():
        scaled = net.encoder.get_submodule(name)
        if isinstance(m, nn.Conv2d) and m.groups == 1:
            assert scaled.out_channels == scaled.weight.shape[0] == math.ceil(m.out_channels * Fraction("0.3")), name
            assert scaled.in_channels == scaled.weight.shape[1], name
        elif isinstance(m, nn.Conv2d):
            assert scaled.groups == scaled.in_channels == scaled.out_channels == scaled.weight.shape[0], name
        elif isinstance(m, nn.Linear):
            assert scaled.out_features == scaled.weight.shape[0] == math.ceil(m.out_features * Fraction("0.3")), name
        elif isinstance(m, nn.BatchNorm2d):
            assert scaled.num_features == len(scaled.running_mean) == len(scaled.weight), name
    assert net.classifier.in_features == net.width == net.classifier.weight.shape[1]
    assert net.classifier.out_features == 10


@pytest.mark.parametrize("arch", ["resnet18", "mobilenet_v3_small"])
def test_scaled_weights_are_the_leading_slices(arch: str) -> None:
    full, half = seeded(arch).state_dict(), seeded(f"{arch}@0.5").state_dict()
    for name, tensor in half.items():
        assert torch.equal(tensor, full[name][tuple(map(slice, tensor.shape))]), name
    assert half["classifier.weight"].shape[1] * 2 == full["classifier.weight"].shape[1]


def test_building_a_scaled_network_leaves_batch_statistics_alone() -> None:
    for name, buffer in seeded("mobilenet_v2@0.5").named_buffers():
        assert (buffer == (1 if name.endswith("running_var") else 0)).all(), name


@pytest.mark.parametrize("arch", ["cnn", "convnet", "mlp", "shufflenet_v2_x1_5"])
def test_ratio_one_is_the_plain_network(arch: str) -> None:
    plain, one = seeded(arch), seeded(f"{arch}@1.0")
    assert str(plain) == str(one)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), one.parameters(), strict=True))


def test_ratios_are_exact() -> None:
    """7 % of 200 channels are 14; in floating point it is 14.000000000000002, which would round up to 15."""
    assert math.ceil(0.07 * 200) == 15
    full, net = meta("mobilenet_v3_large"), meta("mobilenet_v3_large@0.07")
    wide = [name for name, m in full.named_modules() if isinstance(m, nn.Conv2d) and m.out_channels == 200]
    assert [net.get_submodule(name).out_channels for name in wide] == [14, 14]  # expansion and depthwise


@pytest.mark.parametrize("arch", ["cnn", "shufflenet_v2_x1_5", "mobilenet_v3_small"])
def test_the_smallest_ratio_leaves_one_channel(arch: str) -> None:
    net = seeded(f"{arch}@0.0001")
    assert net.width == 1
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 10)


# --- names ----------------------------------------------------------------------------------------------------------


def test_groups_hold_known_models() -> None:
    assert all(member in models.names() for group in models.GROUPS.values() for member in group)
    assert len(models.names()) == len(set(models.names()))
    for n in (1, 2, 5, 10):
        assert len(set(models.GROUPS[f"HtFE-{n}"])) == n
    assert models.GROUPS["HtFE-1"] == ("resnet18",)
    assert models.GROUPS["HtFE-10"][-1] == "vit_tiny"
    assert len(set(models.GROUPS["fedfree-8"])) == 8


def test_assign() -> None:
    assert models.assign("cnn@0.5", 3) == ["cnn@0.5"] * 3
    assert models.assign("digits-3", 5) == ["cnn", "cnn_bn", "mlp", "cnn", "cnn_bn"]
    assert models.assign("resnet18:1, resnet34@0.5:2", 3) == ["resnet18", "resnet34@0.5", "resnet34@0.5"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("resnet18:3,resnet34:3", "are for 6 clients, but there are 10. Make the counts sum to 10"),
        ("resnet18:x,cnn:2", "'resnet18:x' does not say for how many clients"),
        ("resnet18:0,cnn:10", "'resnet18:0' does not say for how many clients"),
        ("resnet18,cnn", "'resnet18' does not say for how many clients"),
        ("resnet18:5,resnet43:5", "Unknown model 'resnet43'. Did you mean 'resnet34'?"),
        ("HtFE-11", "Unknown model 'HtFE-11'. Did you mean 'HtFE-1'?"),
        ("cnm", "Unknown model 'cnm'. Did you mean 'cnn'?"),
    ],
)
def test_assign_says_what_is_wrong(spec: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        models.assign(spec, 10)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "shape", "classes", "says"),
    [
        ("resnet19", (3, 32, 32), 10, "Unknown model 'resnet19'. Did you mean 'resnet18'?"),
        ("vit_tiny@0.5", (3, 32, 32), 10, "no scaled variants"),
        ("cnn@2", (1, 8, 8), 10, "the ratio '2' is not a number in (0, 1]"),
        ("cnn@0", (1, 8, 8), 10, "the ratio '0' is not a number in (0, 1]"),
        ("cnn@half", (1, 8, 8), 10, "Write for example cnn@0.5"),
        ("cnn@1/0", (1, 8, 8), 10, "'0' is not an embedding width"),
        ("cnn@", (1, 8, 8), 10, "the ratio ''"),
        ("cnn", (8, 8), 10, "is for images"),
        ("cnn", (1, 8, 0), 10, "positive sizes"),
        ("cnn", (1, 8, 8), 0, "at least one class"),
    ],
)
def test_build_says_what_is_wrong(arch: str, shape: tuple[int, ...], classes: int, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        models.build(arch, shape=shape, classes=classes)
    assert says in str(caught.value)


# --- torchvision ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchvision_is_imported_late_and_also_where_its_wheel_does_not_fit_torch() -> None:
    code = """
import sys
import fedaudit.training.models
from fedaudit import _torchvision
assert "torchvision" not in sys.modules, "imported too early"
fedaudit.training.models.build("cnn", shape=(1, 8, 8), classes=10)
assert "torchvision" not in sys.modules, "imported without need"
try:
    import torchvision
    fits = True
except RuntimeError:
    fits = False
assert _torchvision.torchvision().models.get_model("mobilenet_v2", weights=None) is not None
assert _torchvision.torchvision() is sys.modules["torchvision"]
assert bool(_torchvision._declared) == (not fits), "operators are declared exactly where they are missing"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Importer:
    """An import that fails with each of the given messages, then succeeds."""

    def __init__(self, *failures: str) -> None:
        self.failures = list(failures)
        self.defined: list[str] = []

    def __call__(self, name: str) -> str:
        if self.failures:
            raise RuntimeError(self.failures.pop(0))
        return name

    def library(self, namespace: str, kind: str) -> Importer:
        return self

    def define(self, schema: str) -> None:
        self.defined.append(schema.partition("(")[0])


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch):
    def install(*failures: str) -> Importer:
        importer = Importer(*failures)
        monkeypatch.setattr(_torchvision, "_declared", [])
        monkeypatch.setattr(_torchvision.importlib, "import_module", importer)
        monkeypatch.setattr(torch.library, "Library", importer.library)
        return importer

    return install


def test_nothing_is_declared_where_torchvision_imports(importing) -> None:
    importer = importing()
    assert _torchvision.torchvision() == "torchvision"
    assert importer.defined == []


def test_missing_operators_are_declared_once(importing) -> None:
    importer = importing("operator torchvision::nms does not exist")
    assert _torchvision.torchvision() == "torchvision"
    assert importer.defined == ["nms", "qnms"]


@pytest.mark.parametrize(
    "failures",
    [("CUDA versions differ",), ("operator torchvision::nms does not exist", "operator torchvision::x is not")],
)
def test_an_import_that_cannot_be_mended_says_what_to_install(importing, failures: tuple[str, ...]) -> None:
    importing(*failures)
    with pytest.raises(SettingError, match="Install the torchvision release that belongs to torch"):
        _torchvision.torchvision()


def test_the_padded_convnet_drops_no_row():
    """28 x 28 becomes 32-16-8-4 with 128 x 4 x 4 = 2,048 features, where `convnet` has 28-14-7-3 and 1,152; sides that
    halve evenly are left as they are."""
    assert models.build("convnet_padded", shape=(1, 28, 28), classes=10).width == 2048
    assert models.build("convnet", shape=(1, 28, 28), classes=10).width == 1152
    padded, plain = (models.build(name, shape=(3, 32, 32), classes=10) for name in ("convnet_padded", "convnet"))
    assert padded.width == plain.width == 2048
    padded.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(padded.eval()(x), plain.eval()(x))
    net = models.build("convnet_padded", shape=(1, 28, 28), classes=10)
    assert net.encoder.conv1(torch.zeros(1, 1, 28, 28)).shape[2:] == (32, 32)
    edge = torch.zeros(1, 1, 28, 28)
    edge[..., -1, -1] = 1.0  # the last pixel: `convnet` loses what comes of the 7th row and column of 7
    with torch.no_grad():
        assert not torch.equal(net.eval().encode(edge), net.encode(torch.zeros(1, 1, 28, 28)))


@pytest.mark.parametrize(("sides", "padding"), [((28, 30), (3, 2)), ((30, 28), (2, 3)), ((25, 32), (5, 1))])
def test_each_side_is_padded_by_itself(sides, padding):
    """A kernel of 3 pads by 1. To be a multiple of 8, 28 needs 2 more on either side, 30 one, 25 four (of 33 one is
    left over), 32 none."""
    net = models.build("convnet_padded", shape=(1, *sides), classes=10)
    assert net.encoder.conv1.padding == padding
    assert net.encoder.conv2.padding == (1, 1)
    assert net.width == 128 * 4 * 4
    assert net(torch.zeros(2, 1, *sides)).shape == (2, 10)


# --- a common embedding width: `name/512` pools, `name/p512` projects.


def build(arch, shape=(1, 8, 8)):
    torch.manual_seed(3)
    return models.build(arch, shape=shape, classes=10)


@pytest.mark.parametrize("width", [7, 16, 64, 100, 128])
def test_pooling_is_torchs(width):
    """Narrower, wider, and widths that do not divide one another, against torch's own."""
    own, wide = build("cnn"), build(f"cnn/{width}")
    x = torch.randn(5, 1, 8, 8)
    wide.encoder.own.load_state_dict(own.encoder.state_dict())
    assert wide.width == width
    assert torch.allclose(wide.encode(x), adaptive_avg_pool1d(own.encode(x), width), atol=1e-6)
    assert wide(x).shape == (5, 10)
    assert sum(p.numel() for p in wide.parameters()) == models.count(own) - 640 + 10 * width


def test_projection_is_one_linear_layer():
    own, wide = build("cnn"), build("cnn/p20")
    assert wide.width == 20
    assert models.count(wide) == models.count(own) - 650 + 64 * 20 + 20 + 210
    x = torch.randn(2, 1, 8, 8)
    step = wide.encoder.width
    assert torch.allclose(wide.encode(x), wide.encoder.own(x) @ step.weight.T + step.bias, atol=1e-6)


@pytest.mark.long
def test_every_member_of_a_group_gets_it():
    assert models.assign("digits-3/32", 4) == ["cnn/32", "cnn_bn/32", "mlp/32", "cnn/32"]
    assert {models.describe(arch, (3, 32, 32), 10)["width"] for arch in models.assign("HtFE-10/512", 10)} == {512}
    assert {models.describe(arch, (3, 32, 32), 10)["width"] for arch in models.assign("fedfree-8/p512", 8)} == {512}
    assert models.assign("cnn@0.5/32:2,mlp/32:1", 3) == ["cnn@0.5/32", "cnn@0.5/32", "mlp/32"]


@pytest.mark.parametrize("arch", ["cnn/", "cnn/0", "cnn/q5", "cnn/p", "digits-3/x", "cnn/64@0.5"])
def test_what_is_no_width_says_so(arch):
    with pytest.raises(SettingError, match=r"is not an embedding width\. Write for example"):
        models.assign(arch, 3)


def test_one_class_is_enough_and_none_is_not():
    assert models.build("mlp", shape=(1, 8, 8), classes=1)(torch.zeros(2, 1, 8, 8)).shape == (2, 1)
    with pytest.raises(SettingError, match="at least one class"):
        models.build("mlp", shape=(1, 8, 8), classes=0)


def test_a_model_of_ones_own_is_built_of_its_parts(monkeypatch):
    """And widened, if a common width is asked for."""
    parts, asked = (nn.Flatten(), nn.Linear(4, 3), 4), []
    monkeypatch.setattr(models, "_own", lambda *of: asked.append(of) or parts)
    net = models.build("mine:Net", shape=(4,), classes=3)
    assert (net.encoder, net.classifier, net.width, net.arch) == (*parts, "mine:Net")
    assert asked == [("mine:Net", (4,), 3)]
    wide = models.build("mine:Net/p6", shape=(4,), classes=3)
    assert (wide.width, wide.classifier.in_features) == (6, 6)


@pytest.mark.parametrize(("digits", "right"), [("1", True), ("1234567", True), ("12345678", False), ("0", False)])
def test_a_common_width_has_seven_digits_at_most(digits, right):
    if right:
        assert models._parse(f"mlp/p{digits}")[2] == (int(digits), "p")
        assert models._parse(f"mlp/{digits}") == ("mlp", Fraction(1), (int(digits), ""))
    else:
        with pytest.raises(SettingError, match="is not an embedding width"):
            models._parse(f"mlp/{digits}")


def test_a_stock_model_of_whole_width_is_not_narrowed(monkeypatch):
    narrowed = []
    monkeypatch.setattr(models, "_stock", lambda name, shape, classes: (nn.Flatten(), nn.Linear(4, classes)))
    monkeypatch.setattr(models, "_narrow", lambda *of: narrowed.append(of[3]))
    assert models.build("resnet18", shape=(1, 2, 2), classes=3).width == 4
    assert narrowed == []
    models.build("resnet18@0.5", shape=(1, 2, 2), classes=3)
    assert narrowed == [Fraction(1, 2)]
