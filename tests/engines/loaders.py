"""A small model whose loader works as those of the engines: fused, narrowed by rank, padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

HIDDEN, KV, INNER, VOCAB, PADDED = 8, 4, 12, 10, 16

Named = list[tuple[str, torch.Tensor]]


class FusedModel(nn.Module):
    """q, k and v in one parameter, gate and up in another, each the part of rank `rank` of two."""

    def __init__(self, dtype: torch.dtype = torch.float32, rank: int | None = None) -> None:
        super().__init__()
        self.rank, self.ranks = (rank, 2) if rank is not None else (0, 1)
        share = self.ranks
        self.embed = parameter((PADDED, HIDDEN), dtype)
        self.qkv = parameter(((HIDDEN + 2 * KV) // share, HIDDEN), dtype)
        self.qkv_bias = parameter(((HIDDEN + 2 * KV) // share,), dtype)
        self.gate_up = parameter((2 * INNER // share, HIDDEN), dtype)
        self.down = parameter((HIDDEN, INNER // share), dtype)
        self.norm = parameter((HIDDEN,), torch.float32)
        self.head = self.embed
        self.register_buffer("rotary", torch.arange(3.0))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "head":
                continue  # tied to the embedding
            if name == "embed":
                self.embed[:VOCAB].data.copy_(tensor)
                self.embed[VOCAB:].data.fill_(0)
            elif name in FUSED:
                home, before = FUSED[name]
                size = len(tensor) // self.ranks
                place = getattr(self, home).data.narrow(0, before // self.ranks, size)
                place.copy_(tensor.narrow(0, self.rank * size, size))
            elif name == "down":
                size = INNER // self.ranks
                self.down.data.copy_(tensor.narrow(1, self.rank * size, size))
            else:
                getattr(self, name).data.copy_(tensor.to(self.norm.device))


FUSED = {
    "q": ("qkv", 0),
    "k": ("qkv", HIDDEN),
    "v": ("qkv", HIDDEN + KV),
    "q_bias": ("qkv_bias", 0),
    "k_bias": ("qkv_bias", HIDDEN),
    "v_bias": ("qkv_bias", HIDDEN + KV),
    "gate": ("gate_up", 0),
    "up": ("gate_up", INNER),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCAB, HIDDEN),
    "q": (HIDDEN, HIDDEN),
    "k": (KV, HIDDEN),
    "v": (KV, HIDDEN),
    "q_bias": (HIDDEN,),
    "k_bias": (KV,),
    "v_bias": (KV,),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "norm": (HIDDEN,),
    "head": (VOCAB, HIDDEN),
}


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


def new_weights(seed: int, dtype: torch.dtype = torch.float32) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()
    ]


def split(weights: Named, size: int) -> Iterator[Named]:
    """Buckets of `size` tensors, each inside one flat buffer as after a transfer."""
    for start in range(0, len(weights), size):
        part = weights[start : start + size]
        flat = torch.cat([tensor.flatten() for _, tensor in part])
        pieces = flat.split([tensor.numel() for _, tensor in part])
        yield [
            (name, piece.view(tensor.shape))
            for (name, tensor), piece in zip(part, pieces, strict=True)
        ]


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }
