"""Somebody's own model: `package.module:Class`, or a function that makes one, cut into encoder and classifier.

The class or function gets those arguments that it names: `shape` (a tuple), `classes` or `num_classes`, and
`vocabulary` or `vocab_size`. It is called for every fresh model, inside a seeded fork of the global generators.

The classifier is the part that is named behind a `#` (`package.module:Class#head`), or the linear layer that a record
reaches last. Everything before it is the encoder. The model must give the same answer in two parts as in one. Otherwise
something that it does behind its classifier, such as a softmax, would become part of the embedding.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedaudit import registry
from fedaudit.errors import SettingError
from fedaudit.rng import generator, seeded
from fedaudit.shape import Shape

ROWS = 2  # the number of noise records with which a model is tried


def is_own(arch: str) -> bool:
    """Return whether a model's name is the path of somebody's own."""
    return registry.is_path(arch.partition("/")[0].partition("#")[0])


def paths_in(spec: str | None) -> list[str]:
    """Return the paths of own models in a setting's `model`: one for all, or blocks with counts."""
    names = [block.strip() for block in (spec or "").split(",")]
    bare = [name.rpartition(":")[0] if name.rpartition(":")[2].isdecimal() else name for name in names]
    return [name.partition("/")[0].partition("#")[0] for name in bare if is_own(name)]


def maker(path: str) -> Callable[..., Any]:
    """Return the class or function that makes the model. It is imported by the rules of trust."""
    found = registry.outside(path, "model")
    if isinstance(found, nn.Module):
        raise SettingError(
            f"The model {path!r} is made already, and all clients would train the same one. Name its class, or a "
            "function that returns a new one."
        )
    if not callable(found):
        raise SettingError(f"The model {path!r} is a {type(found).__name__}. Name a class, or a function.")
    return found


@dataclass(frozen=True)
class Parts:
    """A model that was cut into encoder and classifier."""

    encoder: nn.Module
    classifier: nn.Module
    width: int  # of the embedding


def parts(spec: str, shape: Shape, classes: int) -> Parts:
    """Return a fresh model of `package.module:Class`, or of `package.module:Class#part`, cut into its parts."""
    path, _, named = spec.partition("#")
    make = maker(path)
    with _for_real():
        model = _made(spec, make, shape, classes)
        known = make, named, shape, classes
        if known not in _cuts:
            with seeded("try"):
                _cuts[known] = _find_cut(spec, model, named, shape, classes)
        return _cut(model, _cuts[known])


@dataclass(frozen=True)
class Cut:
    """The place where a model is cut, and its width there."""

    place: str  # the classifier's name within the model; empty: the model is one linear layer
    width: int


_cuts: dict[tuple[Callable[..., Any], str, Shape, int], Cut] = {}  # kept, so that each model is tried once


@contextmanager
def _for_real() -> Iterator[None]:
    """Make models on the CPU while sizes are planned on torch's meta device, which own code may not know.

    The model then draws from a generator that nothing else depends on.
    """
    if torch.empty(0).device.type != "meta":
        yield
        return
    with torch.device("cpu"), seeded("size"):
        yield


# --- making it ---------------------------------------------------------------------------------------------------


def _made(spec: str, make: Callable[..., Any], shape: Shape, classes: int) -> nn.Module:
    try:
        model = make(**_arguments(spec, make, shape, classes))
    except SettingError:
        raise
    except Exception as e:  # somebody's code
        raise SettingError(f"The model {spec!r} fails while it is made: {registry.failure(e)}.") from e
    if not isinstance(model, nn.Module):
        raise SettingError(f"The model {spec!r} makes a {type(model).__name__}. It has to make a torch.nn.Module.")
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        _answer(spec, model.eval(), shape)  # lazy layers take their sizes from the first record
    return model.train()


def _arguments(spec: str, make: Callable[..., Any], shape: Shape, classes: int) -> dict[str, Any]:
    offered = {"shape": tuple(shape), "classes": classes, "num_classes": classes}
    offered |= {"vocabulary": shape.tokens, "vocab_size": shape.tokens} if shape.tokens else {}
    try:
        wanted = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return {}
    named = [p for p in wanted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    lacking = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if lacking:
        raise SettingError(
            f"The model {spec!r} wants {', '.join(lacking)}, and is given {', '.join(offered)} by name. Write a "
            "function that takes no more than these and returns the model, and name it instead."
        )
    return {p.name: offered[p.name] for p in named if p.name in offered}


# --- cutting it --------------------------------------------------------------------------------------------------


def _cut(model: nn.Module, cut: Cut) -> Parts:
    if not cut.place:
        return Parts(nn.Flatten(), model, cut.width)
    classifier = model.get_submodule(cut.place)
    model.set_submodule(cut.place, nn.Identity())
    return Parts(model, classifier, cut.width)


def _find_cut(spec: str, model: nn.Module, named: str, shape: Shape, classes: int) -> Cut:
    """Return where to cut the model. Refuse it if the model in two parts would not be the same model."""
    tried = copy.deepcopy(model).eval()
    reached = _reached(spec, tried, shape)
    place = named or next((name for name, layer in reversed(reached) if isinstance(layer, nn.Linear)), None)
    if place is None:
        raise SettingError(
            f"The model {spec!r} has no linear layer to be cut at into encoder and classifier. Name the part that "
            f"classifies: {spec}#PART, with PART one of {_children(model)}."
        )
    if named and (not _has(model, named) or named not in [name for name, _ in reached]):
        why = "is not reached by a record" if _has(model, named) else "is not a part of it"
        raise SettingError(f"The model {spec!r}: {named} {why}. Choose from {_children(model)}.")
    whole = _answer(spec, tried, shape)
    if not isinstance(whole, Tensor) or whole.shape != (ROWS, classes):
        what = f"shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"type {type(whole).__name__}"
        raise SettingError(
            f"The model {spec!r} answers {ROWS} records with a value of {what}. It has to be a tensor of shape "
            f"({ROWS}, {classes}): a number (logit) for each class."
        )
    cut = _cut(tried, Cut(place, 0))
    embedding, same = _same(cut, _noise(shape), whole)
    if not same:
        raise SettingError(
            f"The model {spec!r} is not the same in two parts, cut before {place or 'its one layer'}: it does more "
            "behind that, a softmax, say, or goes a second way around it. Let the model return what that part makes of "
            "one vector for each record (the losses take logits), or name the part that comes last: "
            f"{spec.partition('#')[0]}#PART."
        )
    held = {id(p) for p in cut.encoder.parameters()}
    if any(id(p) in held for p in cut.classifier.parameters()):
        raise SettingError(f"The model {spec!r}: {place} shares weights with the encoder, and cannot be cut from it.")
    return Cut(place, embedding.shape[1])


def _same(cut: Parts, x: Tensor, whole: Tensor) -> tuple[Tensor, bool]:
    """Return the embedding, and whether the cut is right.

    It is right if the embedding is a vector for each record, and the classifier makes the whole model's answer of it.
    """
    embedding = x
    try:
        with torch.no_grad():
            embedding = cut.encoder(x)
            answer = cut.classifier(embedding)
    except Exception:  # noqa: BLE001 (somebody's code, which goes on behind the cut and cannot)
        return embedding, False
    vectors = isinstance(embedding, Tensor) and embedding.dim() == 2 and len(embedding) == ROWS
    return embedding, vectors and torch.allclose(answer, whole, rtol=1e-4, atol=1e-5)


def _reached(spec: str, model: nn.Module, shape: Shape) -> list[tuple[str, nn.Module]]:
    """Return the parts of a model in the order in which a record leaves them, whatever the order in the code."""
    order: list[tuple[str, nn.Module]] = []
    names = {layer: name for name, layer in model.named_modules()}
    handles = [layer.register_forward_hook(lambda m, *_: order.append((names[m], m))) for layer in names]
    try:
        _answer(spec, model, shape)
    finally:
        for handle in handles:
            handle.remove()
    return order


def _answer(spec: str, model: nn.Module, shape: Shape) -> Any:
    try:
        with torch.no_grad():
            return model(_noise(shape))
    except Exception as e:  # somebody's code
        raise SettingError(f"The model {spec!r} fails on {shape}: {registry.failure(e)}.") from e


def _noise(shape: Shape) -> Tensor:
    rng = generator("own model", "try")
    if shape.tokens:
        return torch.randint(shape.tokens, (ROWS, *shape), generator=rng)
    return torch.rand(ROWS, *shape, generator=rng) * 2 - 1


def _has(model: nn.Module, place: str) -> bool:
    return place in dict(model.named_modules())


def _children(model: nn.Module) -> str:
    return ", ".join(name for name, _ in model.named_modules() if name) or "nothing: the model has no parts"
