"""Models by name, or your own. Every one is an encoder and a classifier: `classify(encode(x))`.

Most are for images. `mlp` takes rows of numbers as well, `transformer` is for texts of token ids (id 0 is padding), and
`package.module:Class` is somebody's own, for whatever records it takes (fedaudit/training/own_model.py).

The papers leave these points open, and we chose:

- The embedding is the input of the last linear layer. Hidden layers and dropout that torchvision puts into its
  `classifier` (the MobileNets, EfficientNet, GoogLeNet) therefore belong to the encoder.
- `convnet` (FedAF): three times convolution 3x3 of width 128 with bias, batch norm, ReLU, 2x2 average pooling. This is
  the structure with the paper's 381,450 parameters; it has them at 3x64x64 (at 3x32x32 there are 320,010).
  `convnet_padded` widens the zeros around its input until every pooling comes out even, as dataset condensation's
  network does for 28x28. Its sides are 32-16-8-4, with 2,048 features. `convnet` has 28-14-7-3, with 1,152 features,
  and drops a row and a column.
- `fedfree_cnn` (FedFree, Table A1, Model_1 and global model): the paper says "2 Conv layers, 3 FC layers, about 3.2M"
  and gives no widths. 5x5 convolutions of width 32 and 64, as in the CNN of FedAvg, and linear layers of width 704 and
  384 come to 3.21 M at 3x32x32.
- `conv4` (DFRD): four times convolution 3x3 of width 64, 128, 256 and 512, batch norm, ReLU; 2x2 max-pooling behind
  all but the last, and the mean over pixels behind that. `conv4_pooled` has a fourth pooling before that mean. It is
  the small network of the authors' public code; the paper's appendix, which has its networks, is not at hand.
- `vit_tiny` (DFFKE): width 192, 12 layers, 3 heads, as in every ViT-Tiny. The patch is the largest power of two up to
  16 with at least seven patches along the shorter side: 1 at 8x8, 4 at 28x28 and 32x32, 8 at 64x64, 16 at 224x224.
- `efficientnet_v2_s` stands for DFFKE's "EfficientNetV2": the smallest that torchvision has.
- HtFE-2 and HtFE-5 (DFFKE): the paper names the members of HtFE-1 and HtFE-10 only. We take the first 2 and 5 of its
  ten. HtFLlib, from which the names come, has other members: a small CNN and ResNet18 in the group of two;
  GoogLeNet, MobileNetV2 and ResNet18/34/50 in the group of five. Write those as `resnet18:2,googlenet:2,...`.
- `_cifar`: the ResNet with a 3x3 stride-1 stem and no max-pooling. Without the suffix the stem is the stock one,
  which leaves a single pixel of an 8x8 image. Batch norm then sees one value per record, and in mini-batches of two the
  gradients of the deep ResNets overflow. Use `_cifar`, or larger batches, for small images.

`name@ratio` is the family at a fraction of its hidden widths (rounded up); input channels and classes stay.

`name/width` has an embedding of that width, whatever the encoder's own width is. It puts adaptive average pooling
before the classifier, as HtFLlib does where clients differ (DFFKE's rivals: `HtFE-10/512`). `name/pWIDTH` puts a linear
projection there instead.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedaudit._torchvision import torchvision
from fedaudit.errors import SettingError, unknown
from fedaudit.shape import Kind, Shape
from fedaudit.training import own_model
from fedaudit.training.transformer import Block, Transformer


class Net(nn.Module):
    """An encoder into `width` numbers and a classifier on top of them."""

    def __init__(self, encoder: nn.Module, classifier: nn.Module, *, width: int, arch: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier
        self.width = width
        self.arch = arch

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def classify(self, e: Tensor) -> Tensor:
        return self.classifier(e)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.encode(x))


# --- the plain networks ---------------------------------------------------------------------------------------------


class Halving(nn.MaxPool2d):
    """2x2 max-pooling.

    On a CPU, where nothing is differentiated, the maxima are taken row by row instead of window by window: the same
    bits in a tenth of the time. Its gradient would differ where two pixels share the maximum, so with gradients torch's
    own pooling runs.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.device.type != "cpu":
            return super().forward(x)
        h, w = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
        rows = torch.maximum(x[..., 0:h:2, :], x[..., 1:h:2, :])
        return torch.maximum(rows[..., 0:w:2], rows[..., 1:w:2])


def _scaled(width: int, ratio: Fraction) -> int:
    return max(
        1, math.ceil(width * ratio)
    )  # fractions are exact: 0.07 of 200 is 14; as floats it is 14.000000000000002, hence 15


def _plain(
    shape: Shape,
    ratio: Fraction,
    *,
    convs: Sequence[int] = (),
    linears: Sequence[int] = (),
    kernel: int = 3,
    norm: bool = False,
    pool: Callable[[int], nn.Module] = Halving,
    even: bool = False,
    mean: Literal["none", "last", "behind"] = "none",
) -> tuple[nn.Module, int]:
    """Return an encoder and its embedding's width: convolutions that keep the size, each with a halving, then linear
    layers.

    `even`: the first convolution adds so many zeros around the image that no halving drops a row. `mean`: the mean over
    all pixels stands in the place of the last halving, or behind it.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, h, w = shape if shape.kind == "images" else (math.prod(shape), 1, 1)
    edge = tuple(math.ceil(-side % 2 ** len(convs) / 2) for side in (h, w)) if even else (0, 0)
    h, w = h + 2 * edge[0], w + 2 * edge[1]
    for i, full in enumerate(convs, 1):
        width = _scaled(full, ratio)
        more = edge if i == 1 else (0, 0)
        padding = kernel // 2 + more[0], kernel // 2 + more[1]
        layers[f"conv{i}"] = nn.Conv2d(channels, width, kernel, padding=padding)
        if norm:
            layers[f"bn{i}"] = nn.BatchNorm2d(width)
        layers[f"relu{i}"] = nn.ReLU()
        in_its_place = mean == "last" and i == len(convs)
        if min(h, w) >= 2 and not in_its_place:  # images under 8x8 run out of pixels to pool
            layers[f"pool{i}"] = pool(2)
            h, w = h // 2, w // 2
        channels = width
    if mean != "none":
        layers["mean"], h, w = nn.AdaptiveAvgPool2d(1), 1, 1
    layers["flatten"] = nn.Flatten()
    features = channels * h * w
    for i, full in enumerate(linears, 1):
        width = _scaled(full, ratio)
        layers[f"fc{i}"] = nn.Linear(features, width)
        layers[f"fc{i}_relu"] = nn.ReLU()
        features = width
    return nn.Sequential(layers), features


_PLAIN: dict[str, Callable[[Shape, Fraction], tuple[nn.Module, int]]] = {
    "cnn": partial(_plain, convs=(16, 32), linears=(64,)),
    "cnn_bn": partial(_plain, convs=(16, 32), linears=(64,), norm=True),
    "mlp": partial(_plain, linears=(128,)),
    "convnet": partial(_plain, convs=(128, 128, 128), norm=True, pool=nn.AvgPool2d),
    "convnet_padded": partial(_plain, convs=(128, 128, 128), norm=True, pool=nn.AvgPool2d, even=True),
    "conv4": partial(_plain, convs=(64, 128, 256, 512), norm=True, mean="last"),
    "conv4_pooled": partial(_plain, convs=(64, 128, 256, 512), norm=True, mean="behind"),
    "fedfree_cnn": partial(_plain, convs=(32, 64), linears=(704, 384), kernel=5),
}


# --- the vision transformer -----------------------------------------------------------------------------------------


class _ViT(nn.Module):
    """The vision transformer of Dosovitskiy et al., ICLR 2021. The embedding is the class token after the last norm."""

    def __init__(self, shape: Shape, *, width: int, depth: int, heads: int) -> None:
        super().__init__()
        channels, h, w = shape
        patch = next((p for p in (16, 8, 4, 2) if min(h, w) >= 7 * p), 1)
        self.pad = nn.ZeroPad2d(
            (0, -w % patch, 0, -h % patch)
        )  # without it the model would never see pixels beyond the last whole patch
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        count = math.ceil(h / patch) * math.ceil(w / patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1 + count, width), std=0.02))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(self.pad(x)).flatten(2).mT
        x = torch.cat((self.token.expand(len(x), -1, -1), patches), 1) + self.position
        return self.norm(self.blocks(x))[:, 0]


# --- torchvision's networks -----------------------------------------------------------------------------------------

_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_CIFAR = tuple(f"{name}_cifar" for name in _RESNETS)
_MOBILE = ("mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0")
_STOCK = (*_RESNETS, *_CIFAR, "googlenet", "efficientnet_v2_s", "mobilenet_v2", *_MOBILE)


def _stock(name: str, shape: Shape, classes: int) -> tuple[nn.Module, nn.Linear]:
    """Return torchvision's network with its own random initialisation, cut before the last linear layer."""
    settings: dict[str, Any] = {"weights": None, "num_classes": classes}
    if name == "googlenet":
        settings |= {"aux_logits": False, "transform_input": False, "init_weights": True}
    net: nn.Module = torchvision().models.get_model(name.removesuffix("_cifar"), **settings)

    path, classifier = [(path, m) for path, m in net.named_modules() if isinstance(m, nn.Linear)][-1]
    net.set_submodule(path, nn.Identity())

    for path in [path for path, m in net.named_modules() if isinstance(m, nn.Hardsigmoid)]:  # MobileNet v3
        net.set_submodule(path, _Hardsigmoid())

    channels, h, w = shape
    path, stem = next((path, m) for path, m in net.named_modules() if isinstance(m, nn.Conv2d))
    if name.endswith("_cifar"):
        net.set_submodule(path, _stem(channels, stem.out_channels, kernel_size=3, padding=1))
        net.set_submodule("maxpool", nn.Identity())
    elif channels != stem.in_channels:
        like = {"kernel_size": stem.kernel_size, "stride": stem.stride, "padding": stem.padding}
        net.set_submodule(path, _stem(channels, stem.out_channels, **like))

    if name == "googlenet":
        # This is the only network whose pooling has no padding. A pooling is left out if its input has a single row or
        # column (the third one, for images under 15x15 pixels). Larger images go through the stock network.
        side = (min(h, w) + 1) // 2
        for pool in ("maxpool1", "maxpool2", "maxpool3"):
            if side < 2:
                net.set_submodule(pool, nn.Identity())
            side //= 2
    return net, classifier


class _Hardsigmoid(nn.Module):
    """nn.Hardsigmoid in a form that has a second derivative, which gradient inversion needs."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu6(x + 3) / 6


def _stem(channels: int, width: int, **settings: Any) -> nn.Conv2d:
    conv = nn.Conv2d(channels, width, bias=False, **settings)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNets
    return conv


def _narrow(encoder: nn.Module, classifier: nn.Linear, shape: Shape, ratio: Fraction) -> None:
    """Cut every layer to its scaled width, in place.

    One forward pass visits the layers in the order of execution. Each layer sees from its input how many channels the
    layers before it kept, so residuals, concatenations and channel splits need no special care. Weights are the leading
    slices of the full network's, because torchvision initialises in its constructors only.
    """

    def cut(module: nn.Module, name: str, *sizes: int) -> None:
        full = getattr(module, name)
        if full is not None:  # a convolution without bias
            part = full.detach()[tuple(map(slice, sizes))].clone()
            setattr(module, name, nn.Parameter(part) if isinstance(full, nn.Parameter) else part)

    def fit(module: nn.Module, arrived: tuple[Tensor]) -> None:
        inputs = arrived[0].shape[1]
        if isinstance(module, nn.BatchNorm2d):
            module.num_features = inputs
            for name in ("weight", "bias", "running_mean", "running_var"):
                cut(module, name, inputs)
        elif isinstance(module, nn.Conv2d):
            depthwise = module.groups > 1  # the only groups there are in these families
            outputs = inputs if depthwise else _scaled(module.out_channels, ratio)
            module.in_channels, module.out_channels = inputs, outputs
            module.groups = inputs if depthwise else 1
            cut(module, "weight", outputs, inputs // module.groups)
            cut(module, "bias", outputs)
        elif isinstance(module, nn.Linear):
            module.in_features, module.out_features = inputs, _scaled(module.out_features, ratio)
            cut(module, "weight", module.out_features, inputs)
            cut(module, "bias", module.out_features)

    handles = [m.register_forward_pre_hook(fit) for m in encoder.modules()]
    encoder.eval()  # without batch statistics and dropout this pass changes nothing and draws no random number
    with torch.no_grad():
        width = encoder(torch.zeros(2, *shape, device=classifier.weight.device)).shape[1]
    encoder.train()
    for handle in handles:
        handle.remove()
    classifier.in_features = width
    cut(classifier, "weight", classifier.out_features, width)


# --- a common embedding width ---------------------------------------------------------------------------------------


class _Pool(nn.Module):
    """Adaptive average pooling of vectors: entry i is the mean over [floor(i L / W), ceil((i + 1) L / W)).

    It is written as a product, because torch's own has no deterministic gradient on GPUs.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, e: Tensor) -> Tensor:
        length = e.shape[-1]
        i, j = torch.arange(self.width, device=e.device), torch.arange(length, device=e.device)[:, None]
        inside = (j >= i * length // self.width) & (j < -(-(i + 1) * length // self.width))
        return e @ (inside / inside.sum(0)).to(e.dtype)


def _widened(encoder: nn.Module, own_model: int, width: int, how: str, classes: int) -> tuple[nn.Module, nn.Linear]:
    step = nn.Linear(own_model, width) if how == "p" else _Pool(width)
    return nn.Sequential(OrderedDict(own=encoder, width=step)), nn.Linear(width, classes)


# --- by name --------------------------------------------------------------------------------------------------------

_TEN = (*_RESNETS[:3], "googlenet", "efficientnet_v2_s", *_MOBILE, "vit_tiny")
GROUPS: dict[str, tuple[str, ...]] = {
    **{f"HtFE-{n}": _TEN[:n] for n in (1, 2, 5, 10)},
    "fedfree-8": ("fedfree_cnn", *_RESNETS, "googlenet", "mobilenet_v2"),
    "digits-3": ("cnn", "cnn_bn", "mlp"),
}


def names(kind: Kind | None = None) -> list[str]:
    """Return the names of all models, or of those for one kind of records."""
    known = [*_PLAIN, "vit_tiny", *_STOCK, "transformer"]
    return known if kind is None else [name for name in known if kind in takes(name)]


def takes(name: str) -> tuple[Kind, ...]:
    """Return the kinds of records that a named model is for."""
    return {"mlp": ("images", "rows"), "transformer": ("tokens",)}.get(name, ("images",))  # type: ignore[return-value]


def build(arch: str, *, shape: Sequence[int], classes: int) -> Net:
    """Return a fresh network for records of `shape`, drawn from the global generator."""
    name, ratio, common = _parse(arch)
    shape = shape if isinstance(shape, Shape) else Shape(shape)
    if min(shape, default=0) < 1 or classes < 1:
        raise SettingError(
            f"Model {arch!r} cannot be built for shape {tuple(shape)} and {classes} classes. "
            "Give positive sizes and at least one class."
        )
    _check_kind(arch, name, shape)
    if own_model.is_own(name):
        encoder, classifier, width = _own(name, shape, classes)
    elif name in _PLAIN:
        encoder, width = _PLAIN[name](shape, ratio)
        classifier = nn.Linear(width, classes)
    elif name == "vit_tiny":
        encoder, width = _ViT(shape, width=192, depth=12, heads=3), 192
        classifier = nn.Linear(width, classes)
    elif name == "transformer":
        encoder, width = Transformer(shape, width=64, depth=2, heads=4), 64
        classifier = nn.Linear(width, classes)
    else:
        encoder, classifier = _stock(name, shape, classes)
        if ratio < 1:
            _narrow(encoder, classifier, shape, ratio)
        width = classifier.in_features
    if common is not None:
        encoder, classifier = _widened(encoder, width, *common, classes)
        width = common[0]
    return Net(encoder, classifier, width=width, arch=arch)


def _own(name: str, shape: Shape, classes: int) -> tuple[nn.Module, nn.Module, int]:
    cut = own_model.parts(name, shape, classes)
    return cut.encoder, cut.classifier, cut.width


def _check_kind(arch: str, name: str, shape: Shape) -> None:
    if not own_model.is_own(name) and shape.kind not in takes(name):
        raise SettingError(
            f"Model {arch!r} is for {' and '.join(takes(name))}, and the records are {shape}. Choose from "
            f"{', '.join(names(shape.kind))}, or name your own as package.module:Class."
        )


def assign(spec: str, clients: int) -> list[str]:
    """Return each client's model: `cnn` for all, a group's members in turn, or blocks `resnet18:3,resnet34:7`."""
    group, slash, width = spec.partition("/")
    if group in GROUPS:
        of = [f"{name}{slash}{width}" for name in GROUPS[group]]
        _parse(of[0])
        return [of[i % len(of)] for i in range(clients)]
    if "," not in spec and (":" not in spec or own_model.is_own(spec)):
        _parse(spec, GROUPS)
        return [spec] * clients
    given: list[str] = []
    for block in spec.split(","):
        arch, _, count = (part.strip() for part in block.rpartition(":"))
        if not arch or not (count.isdecimal() and len(count) < 8 and int(count)):
            first = block.partition(":")[0].strip()
            arch = block.strip() if own_model.is_own(block.strip()) and first not in names() else first
            _parse(arch)
            raise SettingError(
                f"Models {spec!r}: {block.strip()!r} does not say for how many clients. Write for example {arch}:3."
            )
        _parse(arch)
        given += [arch] * int(count)
    if len(given) != clients:
        raise SettingError(
            f"Models {spec!r} are for {len(given)} clients, but there are {clients}. Make the counts sum to {clients}."
        )
    return given


class _Undrawn(TorchFunctionMode):
    """Skips filling tensors that hold no numbers. Filling them would take as long as building the network."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args[0] if args else (kwargs or {}).get("tensor")
        if function.__name__ in _FILLING and isinstance(given, Tensor) and given.is_meta:
            return given
        return function(*args, **(kwargs or {}))


_FILLING = {"normal_", "uniform_", "zero_", "fill_", "kaiming_normal_", "kaiming_uniform_", "trunc_normal_", "erfinv_"}


def structure(arch: str, *, shape: Sequence[int], classes: int) -> Net:
    """Return the network without its numbers: nothing is allocated, nothing is drawn."""
    with torch.device("meta"), _Undrawn():
        return build(arch, shape=shape, classes=classes)


def describe(arch: str, shape: Sequence[int], classes: int) -> dict[str, Any]:
    """Return the sizes of a model, found without allocating it."""
    net = structure(arch, shape=shape, classes=classes)
    buffers = sum(b.numel() for b in net.buffers())
    return {"arch": arch, "parameters": count(net), "buffers": buffers, "width": net.width}


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())


def _parse(arch: str, groups: Iterable[str] = ()) -> tuple[str, Fraction, tuple[int, str] | None]:
    """Return the family, the ratio of its widths, and the common embedding width with the way to reach it."""
    rest, slash, text = arch.partition("/")
    common = None
    if slash:
        how, digits = ("p", text[1:]) if text.startswith("p") else ("", text)
        if not (digits.isdecimal() and len(digits) < 8 and int(digits)):
            raise SettingError(
                f"Model {arch!r}: {text!r} is not an embedding width. Write for example {rest}/512 (average pooling) "
                f"or {rest}/p512 (a linear projection)."
            )
        common = int(digits), how
    name, at, text = rest.partition("@")
    if own_model.is_own(name):
        if at:
            raise SettingError(
                f"Model {arch!r}: only named models have scaled variants. Write a function for each width instead."
            )
        own_model.maker(name.partition("#")[0])
        return name, Fraction(1), common
    if ":" in rest:
        raise SettingError(f"Model {arch!r}: {rest!r} is not the path of a model. Write package.module:Class.")
    if name not in names():
        raise SettingError(unknown("model", name, [*names(), *groups]) + " Your own: package.module:Class.")
    if not at:
        return name, Fraction(1), common
    if name in ("vit_tiny", "transformer"):
        raise SettingError(
            f"Model {arch!r}: a transformer's width is tied to its attention heads, so it has no scaled variants. "
            f"Use {name!r}, or scale one of the others."
        )
    try:
        ratio = Fraction(text)
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(0)
    if not 0 < ratio <= 1:
        raise SettingError(
            f"Model {arch!r}: the ratio {text!r} is not a number in (0, 1]. Write for example {name}@0.5."
        )
    return name, ratio, common
