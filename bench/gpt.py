"""The bench's model and data: a pre-norm GPT of 33.7M parameters, and the bytes of Python's standard library in a fixed order.

Shapes in names: B batch, T time, D width, H heads.
"""
import pathlib
import sysconfig

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD):
        batch, time, width = x_BTD.shape
        parts = self.qkv(self.attention_norm(x_BTD)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class GPT(nn.Module):
    """Returns the loss, so that every mode is used alike. The head isn't tied: FSDP2 and DeepSpeed treat tied weights in different ways."""

    def __init__(self, layers=8, width=512, heads=8, vocab=8192, context=256):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT, targets_BT):
        x_BTD = self.token(tokens_BT) + self.position(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def stdlib_bytes(files=120):
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:files])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(rank, world, size, context, seed=0):
    """Endless (tokens, targets); every rank draws all ranks' places and takes its own."""
    data, generator = stdlib_bytes(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - context - 1, (world, size), generator=generator)[rank]
        windows = torch.stack([data[start:start + context + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]
