"""The embedding decoder of DFFKE, Dec: R^h -> R^d (Sections 3.2 and 4.1), "3-layer, 4.4M-parameter", and its training.

The paper gives this description, a source (the generator of Fang et al., "Contrastive Model Inversion", IJCAI 2021) and
a size on disk, 16.89 MB. The structure below is the one with these numbers: a linear layer h -> 128 x H/4 x W/4, batch
norm, two times (up-sampling x 2, convolution 3x3 without bias, batch norm, leaky ReLU 0.2) of widths 128 and 64, and an
output convolution 3x3 with bias. At h = 512 and 3x32x32 it has 4,426,051 parameters, and with the batch norms' buffers
17,706,788 bytes = 16.89 MiB (without them 16.88).

The paper leaves these points open, and we chose:

- The output's range is that of tanh, because images live in [-1, 1] here. The author's public code puts a batch norm
  without weights behind it (`output = "standardised"`): images then have mean 0 and deviation 1 in each channel, as its
  standardised real images do. Here they are brought to the real images' mean and deviation (`pixels`).
- The size of the images. They are 128 x 128 in the experiments, where a decoder of H/4 x W/4 would have 67.5 M
  parameters. The 4.4 M are those of 32 x 32. So larger images are decoded at 32 x 32 and resized (bilinear). Smaller
  ones are decoded at their own size, rounded up to a multiple of four, and resized back.
- Batches mix all clients, so that Dec's batch norms see in training what they are averaged over.
- The clients' batch norms are in evaluation mode while Dec is trained, with the statistics of the records behind E_k.
- The student of L_md (Appendix E) is every peer of the client whose embedding is decoded, on average. MAE and MSE are
  of probabilities, which the bound 2/n implies. L_fid and L_md add up, KL scaled by 0.1.

The author's public code has a fourth L_md, the "inverse CE" -p log(1 - q): peers' answers q to a decoded image lose
mass where p has it, the client's own answer to the record. It also adds KL[p || f_k] of the client's answers to
decoded images (`answers`), and takes each batch from one client: the first rows of a new shuffle (`by_client`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit import Many, Opt, Server, Size, State, in_chunks, kl, load, state_of
from fedaudit.shape import Shape
from fedaudit.training.descent import Kept
from fedaudit.training.fit import batches
from fedaudit.training.model_copies import copied, copied_with
from fedaudit.training.models import Net
from fedaudit.training.stacked.mixed_batches import Mixed
from fedaudit.training.stacked.side_by_side import as_tensor_cores_take_it, rounded, tensor_cores
from fedaudit.training.stacked.stackable import on_gpu

Discrepancy = Literal["none", "KL", "MAE", "MSE", "inverse-CE"]
Output = Literal["tanh", "standardised"]
LARGEST = 32  # pixels along a side that the decoder itself makes


class Decoder(nn.Module):
    def __init__(
        self, h: int, shape: Shape, width: int = 64, output: Output = "tanh", pixels: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.output, self.pixels = output, pixels
        self.size = (height, breadth)
        self.seed = tuple(math.ceil(min(side, LARGEST) / 4) for side in self.size)  # before two up-samplings
        self.width = width
        self.linear = nn.Linear(h, 2 * width * math.prod(self.seed))
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Tanh(),
            *([nn.BatchNorm2d(channels, affine=False)] if output == "standardised" else []),
        )

    def forward(self, e: Tensor) -> Tensor:
        x = self.linear(e).unflatten(1, (2 * self.width, *self.seed))
        if self.training and on_gpu([x]) and tensor_cores():  # without a gradient the other layout is faster
            x = as_tensor_cores_take_it(x)
        x = self.layers(x)
        if self.output == "standardised":
            mean, deviation = self.pixels
            x = x * deviation + mean
        return resize(x, self.size)


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return x resized bilinearly, by one matrix product per side.

    torch's own has no fast gradient on CUDA that repeats its bits.
    """
    for dim, side in zip((-2, -1), size, strict=True):
        if x.shape[dim] != side:
            x = (x.transpose(dim, -1) @ _linear_weights(x.shape[dim], side, x.device, x.dtype)).transpose(dim, -1)
    return x


@functools.cache
def _linear_weights(old: int, new: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the old x new matrix of linear interpolation: its rows are the images of the unit vectors."""
    return F.interpolate(torch.eye(old)[None], size=new, mode="linear", align_corners=False)[0].to(device, dtype)


@torch.no_grad()
def decode(Dec: State, e: Tensor, shape: Shape, batch: int = 1000, pixels: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Return D^ = Dec(E~): the synthetic images that a decoder's checkpoint makes of translated embeddings."""
    output: Output = "standardised" if "layers.11.running_mean" in Dec else "tanh"
    inner = Dec["layers.6.weight"]
    blank = _blank(e.shape[1], shape, len(inner), output, pixels, e.device, inner.dtype)
    model = copied_with(blank, Dec) or load(copied(blank), Dec)
    with rounded(e.device):
        return in_chunks(model, e, batch).to(e.dtype)


@functools.lru_cache(maxsize=8)
def _blank(
    h: int,
    shape: Shape,
    width: int,
    output: Output,
    pixels: tuple[float, float],
    device: torch.device,
    dtype: torch.dtype,
) -> Decoder:
    """Return a decoder without weights, to be copied: a round of a long run decodes by a hundred checkpoints, and to
    build a decoder takes longer than to run it.
    """
    with torch.device("meta"):
        return Decoder(h, shape, width, output, pixels).to(dtype).to_empty(device=device).eval()


@functools.cache
def decoder_size(h: int, shape: Shape, width: int = 64, output: Output = "tanh") -> Size:
    """Return |Dec| in bytes, parameters and buffers, found without allocating it."""
    with torch.device("meta"):
        model = Decoder(h, shape, width, output)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return Size(parameters, sum(b.numel() * b.element_size() for b in model.buffers()))


# --- training it ------------------------------------------------------------------------------------------------------


def fidelity(pred: Tensor, e: Tensor) -> Tensor:
    """Return MSE(z(h(Dec(e); theta_k^h); theta_k^z), e), Eq. 12."""
    return (pred - e).square().mean(1)


def discrepancy(choice: Discrepancy, teacher: Tensor, student: Tensor) -> Tensor:
    """Return L_md of Eq. 4 and Appendix E: minus the gap of two models' logits. MAE and MSE lie in [-2/n, 0]."""
    if choice == "KL":
        return -0.1 * kl(teacher, student)  # Appendix E says that it diverges unscaled
    if choice == "inverse-CE":
        return -(teacher.softmax(-1) * (1 - student.softmax(-1) + 1e-9).log()).sum(-1)
    gap = teacher.softmax(-1) - student.softmax(-1)
    return -(gap.abs() if choice == "MAE" else gap.square()).mean(-1)


def model_discrepancy(
    k: int, x: Tensor, peers: Mapping[int, nn.Module], choice: Discrepancy, teacher: Tensor
) -> Tensor:
    """Return L_md (Eq. 4) of client k's images x, of which it says `teacher`: the mean over every peer."""
    others = [model for i, model in peers.items() if i != k]
    return torch.stack([discrepancy(choice, teacher, model(x)) for model in others] or [x.new_zeros(len(x))]).mean(0)


class Docked(nn.Module):
    """z(h(x; theta_k^h); theta_k^z): client k's encoder and its docking layer, frozen. With `answers`, f(x; theta_k)
    stands beside it.
    """

    def __init__(self, model: Net, theta_z: State, answers: bool = False) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.answers = answers
        self.register_buffer("weight", theta_z["weight"])
        self.register_buffer("bias", theta_z["bias"])

    def forward(self, x: Tensor) -> Tensor:
        h = self.model.encode(x)
        docked = F.linear(h, self.weight, self.bias)  # type: ignore[arg-type]
        return torch.cat([docked, self.model.classify(h)], 1) if self.answers else docked


def train_decoder(
    server: Server,
    Dec: Decoder,
    clients: Mapping[int, Net],
    theta_z: Mapping[int, State],
    E: Mapping[int, Tensor],
    *,
    epochs: int,
    batch: int,
    opt: Opt,
    md: Discrepancy,
    Y: Mapping[int, Tensor] | None = None,
    peers: Mapping[int, nn.Module] | None = None,
    answers: bool = False,
    by_client: bool = False,
) -> State:
    """Train Dec by Eq. 12, and return its state.

    Dec's images have to give each row back when they go through the frozen encoder and docking layer of the row's
    client. `Y`: f(x; theta_k) of the records behind E, for `answers` and the inverse CE. `peers`: the models that L_md
    compares with, where they are not `clients`.
    """
    rows, rng, sizes = torch.cat(list(E.values())), server.rng("Dec"), [len(e) for e in E.values()]
    mixed = (i for _ in range(epochs) for i in batches(len(rows), batch, rng))
    drawn_rows = _of_each_client(sizes, batch, epochs, rng) if by_client else mixed
    order = [i.cpu().sort().values for i in drawn_rows]  # sorted: by client
    docked = Many(Docked(clients[k], theta_z[k], answers or md != "none") for k in E)
    drawn = Mixed(docked, sizes, order, rows.device)
    known = rows.new_empty(0) if Y is None else torch.cat([Y[k] for k in E])
    against = _Against(list(E), clients if peers is None else peers, md, one_each=by_client and drawn.repeats)

    def loss() -> Tensor:
        e = rows[drawn.index]
        with rounded(e.device):
            x = Dec(e).to(e.dtype)
        out, peers_said = against.beside(drawn, x)
        back, said = out.tensor_split([e.shape[1]], 1)
        L = fidelity(back, e)
        if answers:
            L = L + kl(known[drawn.index], said)  # KL[f(x) || f(Dec(e))]
        if md != "none":
            L = L + against(x, known[drawn.index] if md == "inverse-CE" else said, drawn, peers_said)
        return L.mean()

    Dec.train()
    same = drawn.repeats and (md == "none" or against.one_each)
    kept = Kept(len(order), list(Dec.buffers()))
    server.optimise(
        list(Dec.parameters()), loss, steps=len(order), opt=opt, repeats=same, before=drawn.put, kept=kept
    )  # fmt: skip
    return state_of(Dec)


def _of_each_client(sizes: Sequence[int], batch: int, epochs: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield a batch of each client in turn, the first of a new shuffle, for as many turns as the largest has whole
    batches in all epochs.
    """
    begins = list(accumulate(sizes, initial=0))
    for _ in range(epochs * max(max(n // batch, 1) for n in sizes)):
        for begin, n in zip(begins, sizes, strict=False):
            yield begin + torch.randperm(n, generator=rng, device=rng.device)[:batch]


class _Against:
    """L_md of a batch (Eq. 4). `one_each`: the batch is of one client, whose number a recorded step reads; then all
    models answer, and those that are no peers of that client do not count.
    """

    def __init__(self, ids: Sequence[int], peers: Mapping[int, nn.Module], md: Discrepancy, one_each: bool) -> None:
        self.ids, self.peers, self.md = ids, peers, md
        self.one_each = one_each and md != "none"
        for model in peers.values():
            model.requires_grad_(False).eval()
        if self.one_each:
            self._all = Many(peers.values())
            of = next(iter(next(iter(peers.values())).parameters()))
            others = [[float(i != k) for i in peers] for k in ids]
            self._weights = of.new_tensor(others) / torch.tensor([[max(sum(row), 1)] for row in others]).to(of)

    def beside(self, drawn: Mixed, x: Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """Return what each image's own client makes of it, and with `one_each` what all models say of it."""
        return drawn.beside(x, self._all) if self.one_each else (drawn(x), None)

    def __call__(self, x: Tensor, teacher: Tensor, drawn: Mixed, said: list[Tensor] | None) -> Tensor:
        if said is not None:
            found = discrepancy(self.md, teacher, torch.stack(said))  # model, row
            return self._weights.index_select(0, drawn.owner)[0] @ found
        parts = zip(self.ids, x.split(drawn.split), teacher.split(drawn.split), strict=True)
        return torch.cat([model_discrepancy(k, x_k, self.peers, self.md, said) for k, x_k, said in parts])
