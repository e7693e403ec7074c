"""Maps a loss over a stack of models: one call gives the mean loss of each, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedaudit.training.cuda_graphs import each_run, fall_back, halves
from fedaudit.training.fit import (
    Running,
    check_value,
    running_score,
)
from fedaudit.training.model_copies import copied
from fedaudit.training.stacked import stackable
from fedaudit.training.stacked.convolution_products import instead_of
from fedaudit.training.stacked.given import form_of_given, map_given
from fedaudit.training.stacked.layers import FullNorm, in_full, quicker
from fedaudit.training.stacked.likeness import same_function
from fedaudit.training.stacked.masked_norms import CountingTogether, MaskedNorms, counts_of
from fedaudit.training.stacked.side_by_side import (
    as_tensor_cores_take_it,
    drawing_nothing,
    halved,
    rounded,
)
from fedaudit.training.stacked.stackable import fills
from fedaudit.training.stacked.steppers import Tensors

if TYPE_CHECKING:
    from fedaudit.training.stacked.stack import Job

# Parameters, other tensors, rows, given -> mean loss and sum of losses of each model. With a running score the sum has
# two numbers, of losses and of scores.
Mapped = Callable[..., tuple[Tensor, Tensor]]

FORMS = 8  # forms of batches and numbers for which a loss is compiled in a run: each takes seconds


class MappedLoss:
    """A job's loss for a whole stack, and the model whose layers it runs with the stack's tensors in their place.

    `apart`: the stack has one model, which trains side by side with others, each by itself.
    """

    def __init__(self, job: Job, given_dims: Any, compile: bool, several: bool, apart: bool = False):
        self.model, self.loss, self._separable = job.model, job.loss, job.option("separable", True)
        self._scored = running_score(job.option("until"), self._separable) is not None
        self.apart = apart
        if stackable.on_gpu(job.rows) and (compile or several) and not apart:
            slow = not (compile or torch.backends.cudnn.allow_tf32 or halves())
            self.model = quicker(self.model, apart=slow, compiled=compile)
        if compile and halves() is not None and not apart:  # elsewhere hooks do it (`Functional`), without a copy
            self.model = in_full(self.model)
        if compile and self.model is job.model:  # others use it too, and this one's owner may change it meanwhile
            self.model = copied(self.model)
        self._caller = Caller(self.model)
        self._places = places(self._caller)
        self._counts = counts_of(self.model) if apart else []
        self._dims = given_dims
        self._plain: Mapped = vmap(self._of_one, in_dims=(0, 0, 0, given_dims, None), randomness="error")
        self._masked: Mapped = vmap(self._of_one, in_dims=(0, 0, 0, given_dims, 0), randomness="error")
        self._compiled: dict[Any, Mapped] = {}  # by all that a compiler takes for granted
        self.compiles, self._several = compile, several
        self._masks_norms = not fills(job)
        self.products = False  # convolutions as products of matrices

    def __call__(
        self,
        params: Tensors,
        rest: Tensors,
        rows: list[Tensor],
        given: Any,
        mask: Tensor | None,
        compiled: bool = True,
    ) -> Any:
        """Return the mean loss of each model and its sum. `compiled`: where losses are compiled, rows of this shape are
        worth it, because many batches have it.
        """
        run = (self._plain if mask is None else self._masked) if self._several else self._alone
        return self._way(run, rows, given, mask, compiled)(params, rest, rows, given, mask)

    def _way(self, run: Mapped, rows: list[Tensor], given: Any, mask: Tensor | None, compiled: bool) -> Mapped:
        """Return the function as it is carried out: compiled for rows of this form if that is worth it, or as it is."""
        if not (self.compiles and compiled) or (self._masks_norms and mask is not None):
            return run
        form = mask is None, [(row.shape, row.dtype) for row in rows], form_of_given(given)
        return self._compiled_for(repr(form), run)

    def _compiled_for(self, form: str, run: Mapped) -> Mapped:
        """Return what was compiled for rows and plain values of this form, at the first time by compiling; the loss
        itself if there are too many forms, or if its compiling has failed."""
        if form not in self._compiled and len(self._compiled) < FORMS:
            self._compiled[form] = self._guarded(form, run)
        if form not in self._compiled:
            fall_back(f"not compiled: a loss whose batches or numbers come in more than {FORMS} forms")
        return self._compiled.get(form, run)

    def _guarded(self, form: str, run: Mapped) -> Mapped:
        """Return the compiled loss, which runs as it is from the first call on if it cannot be compiled."""
        compiled = _compile(run)

        def call(*of: Any) -> Any:
            from torch._dynamo.exc import TorchDynamoException  # takes a second to import

            try:
                return compiled(*of)
            except TorchDynamoException as e:
                self._compiled[form] = run
                fall_back(f"not compiled: {type(e).__name__}: {e}".splitlines()[0])
                return run(*of)

        return call

    def gradients(
        self,
        params: Tensors,
        rest: Tensors,
        rows: list[Tensor],
        given: Any,
        mask: Tensor | None,
        compiled: bool = True,
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Return the gradient of each model's mean loss by its own parameters, stacked, and the sums of the losses."""
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        if self.apart:
            with drawing_nothing(rows[0].device):
                means, sums = self._beside(leaves, rest, rows, given, mask, compiled)
        else:
            means, sums = self(leaves, rest, rows, given, mask, compiled)
        grads = torch.autograd.grad(means.sum(), list(leaves.values()), allow_unused=True)
        return dict(zip(leaves, grads, strict=True)), sums

    def _alone(self, params: Tensors, rest: Tensors, rows: list[Tensor], given: Any, mask: Tensor | None) -> Any:
        """Return what the map over models gives for a stack of one, without a map: a loss may draw random numbers here,
        such as one view of a mini-batch, which a map refuses."""
        mean, total = self._of_one(*self._of_first(params, rest, rows, given, mask))
        return mean[None], total[None]

    def _beside(
        self, params: Tensors, rest: Tensors, rows: list[Tensor], given: Any, mask: Tensor | None, compiled: bool
    ) -> Any:
        """Return the same for a model that trains side by side with others, as tensor cores take it."""
        mine, others, seen, told, only = self._of_first(params, rest, rows, given, mask)
        mine, seen = halved(self.model, mine), [as_tensor_cores_take_it(row) for row in seen]
        run = self._way(self._of_one, seen, told, only, compiled)
        if run == self._of_one:
            with CountingTogether(others[name] for name in self._counts) as counts:
                mean, total = run(mine, others, seen, told, only)
            counts.add()
        else:  # a compiler adds up the batches within its own kernels
            mean, total = run(mine, others, seen, told, only)
        return mean[None], total[None]

    def _of_first(self, params: Tensors, rest: Tensors, rows: list[Tensor], given: Any, mask: Tensor | None) -> Any:
        """Return the tensors of the only model of a stack: parameters, others, rows, what the loss is given, mask."""
        mine, others = ({name: t.squeeze(0) for name, t in part.items()} for part in (params, rest))
        told = map_given(given, self._dims, lambda t: t.squeeze(0))
        return mine, others, [row.squeeze(0) for row in rows], told, None if mask is None else mask.squeeze(0)

    @property
    def convolves(self) -> bool:
        """Return whether there is a choice between two ways: convolutions, on a GPU, mapped and not compiled."""
        mapped = self._several and not self.compiles
        return mapped and any(isinstance(m, nn.Conv2d) for m in self.model.modules())

    def _of_one(self, params: Any, rest: Any, rows: Any, given: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        f = Functional(self._caller, params, rest, self._places, apart=self.apart)
        plain = self.apart or not stackable.on_gpu(rows)
        if self._masks_norms and mask is not None:
            with MaskedNorms(mask), nullcontext() if plain else _PICKS[self.products]:
                value = self.loss(f, *rows, **given)
        elif torch.compiler.is_compiling() or plain:
            value = self.loss(f, *rows, **given)
        else:
            with _PICKS[self.products]:
                value = self.loss(f, *rows, **given)
        check_value(value, len(rows[0]), self.loss, self._separable, self._scored)
        if self._scored:
            both = value.detach() if mask is None else torch.where(mask[:, None], value.detach(), 0.0)
            value = value[:, 0]
            mean = value.mean() if mask is None else torch.where(mask, value, 0.0).sum() / mask.sum()
            return mean, both.sum(0)
        if mask is not None:
            value = torch.where(mask, value, 0.0)
            return value.sum() / mask.sum(), value.detach().sum()
        detached = value.detach()
        return value.mean(), detached.sum() if self._separable else detached.mean() * len(rows[0])


def _compile(run: Mapped) -> Mapped:
    """Compile, with random numbers from torch's own generator, so that a compiled loss draws what an eager one does.

    Torch compiles one piece of code eight times at most, whatever it is called with, and then runs it as it is, without
    a word. All losses run through the same code here. So each gets a piece of its own. Nor does torch say that it
    compiles only parts of a loss, or none; it is asked for all of it, and says why that cannot be.
    """

    def own(*of: Any) -> Any:
        return run(*of)

    own.__code__ = own.__code__.replace()
    made: Mapped = torch.compile(own, dynamic=False, fullgraph=True, options={"fallback_random": True})
    return made


class _Picks(TorchFunctionMode):
    """Makes cross-entropy pick each row's class by comparing.

    Mapped over models, torch's own picks by an index. On a GPU the gradient of that is a sum in no fixed order or, if a
    fixed order is asked for, a sort that cannot be recorded.

    With `products`, convolutions are done as products of matrices.
    """

    def __init__(self, products: bool = False):
        super().__init__()
        self._products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._products and func is torch.conv2d and (found := instead_of(args, kwargs)) is not None:
            return found
        plain = kwargs.get("reduction") == "none" and not kwargs.get("label_smoothing") and kwargs.get("weight") is None
        if func in (F.cross_entropy, F.nll_loss) and len(args) == 2 and plain:
            out, y = args
            if out.dim() == 2 and not y.is_floating_point():
                logs = F.log_softmax(out, 1) if func is F.cross_entropy else out
                mine = y[:, None] == torch.arange(out.shape[1], device=out.device)
                return -torch.where(mine, logs, 0.0).sum(1)
        return func(*args, **kwargs)


_PICKS = {products: _Picks(products) for products in (False, True)}
PRODUCTS_WIN = 1.2  # times as fast, so that a tie is not left to chance


def picking(products: bool) -> AbstractContextManager[Any]:
    """Return a context in which convolutions are products of matrices, or one that changes nothing."""
    return _PICKS[True] if products else nullcontext()


compiled_losses: dict[str, list[MappedLoss]] = {}  # used again for models of the same structure, until a run ends
each_run(compiled_losses.clear)


def mapped_loss(job: Job, given_dims: Any, compile: bool, several: bool, apart: bool = False) -> MappedLoss:
    """Return the job's loss for a stack. A compiled one is that of an earlier job with a loss that does the same."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in job.model.modules())  # hooks come and go
    if not compile or hooked:
        return MappedLoss(job, given_dims, False, several, apart)
    scored = isinstance(job.option("until"), Running)
    how = given_dims, job.option("separable", True), job.option("norms", "batch"), scored, halves()
    known = compiled_losses.setdefault(repr((job.structure, how, several, apart)), [])
    for mapped in known:
        if same_function(mapped.loss, job.loss):
            return mapped
    known.append(MappedLoss(job, given_dims, True, several, apart))
    return known[-1]


class Caller(nn.Module):
    """Makes every method of a model reachable for `functional_call`, which knows `forward` only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any) -> Any:
        return self.model(*args) if method == "forward" else getattr(self.model, method)(*args)


def places(caller: Caller) -> dict[str, str]:
    """Return the name of the tensor at each place of the caller: a shared parameter has one name and several places.

    A layer under two names is visited once: `functional_call` would leave a replaced tensor behind in it.
    """
    model = caller.model
    name_of = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    own = {"recurse": False, "remove_duplicate": False}
    return {
        place: name_of[id(t)]
        for prefix, layer in caller.named_modules()
        for place, t in [*layer.named_parameters(prefix, **own), *layer.named_buffers(prefix, **own)]
    }


class Functional:
    """The `f` of a loss, for one model of the stack. Batch norm writes its statistics into `rest`.

    `apart`: the model is not mapped over, so that torch itself rounds its factors where the setting says so.
    """

    def __init__(
        self,
        caller: Caller,
        params: dict[str, Tensor],
        rest: dict[str, Tensor],
        places: dict[str, str],
        *,
        apart: bool = False,
    ):
        self._caller, self._apart = caller, apart
        tensors = {**params, **rest}
        self._tensors = {place: tensors[name] for place, name in places.items()}
        self.params = {name: tensors[name] for name, _ in caller.model.named_parameters()}

    def _call(self, method: str, *args: Any) -> Any:
        if (dtype := halves()) is None:
            return functional_call(self._caller, self._tensors, (method, *args), tie_weights=False)
        if self._apart:
            with rounded(args[0].device):
                out = functional_call(self._caller, self._tensors, (method, *args), tie_weights=False)
            return _cast(out, args[0].dtype)
        norms = {name: m for name, m in self._caller.named_modules() if isinstance(m, _BatchNorm)}
        kept = {place for place in self._tensors if place.rpartition(".")[0] in norms}
        tensors = {place: t if place in kept else _cast(t, dtype) for place, t in self._tensors.items()}
        before, full = [_cast(a, dtype) for a in args], args[0].dtype
        others = [m for m in norms.values() if not isinstance(m, FullNorm)]  # those keep their precision by themselves
        hooks = [m.register_forward_pre_hook(lambda m, x: (_cast(x[0], full),)) for m in others]
        hooks += [m.register_forward_hook(lambda m, x, out: _cast(out, dtype)) for m in others]
        try:
            return _cast(functional_call(self._caller, tensors, (method, *before), tie_weights=False), full)
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(self, *args: Any) -> Any:
        return self._call("forward", *args)

    def encode(self, x: Tensor) -> Tensor:
        return self._call("encode", x)

    def classify(self, e: Tensor) -> Tensor:
        return self._call("classify", e)


def _cast(t: Any, dtype: torch.dtype) -> Any:
    return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
