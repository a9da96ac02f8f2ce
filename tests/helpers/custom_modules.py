"""Modules as users write them: a GPT, an MLP-Mixer and a ViT with registers, in plain PyTorch."""

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention with fused queries, keys and values, as in nanoGPT."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (
            one.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for one in (q, k, v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(functional.gelu(self.c_fc(self.ln_2(x))))


class TinyGPT(nn.Module):
    """A GPT in the manner of nanoGPT, with a tied head."""

    def __init__(self, vocabulary=65, length=32, width=32, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class MixerBlock(nn.Module):
    def __init__(self, patches, width, tokens, channels):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(patches, tokens), nn.GELU(), nn.Linear(tokens, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, channels), nn.ReLU(), nn.Linear(channels, width)
        )

    def forward(self, x):
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class Mixer(nn.Module):
    """An MLP-Mixer on small grey pictures."""

    def __init__(self, side=8, patch=2, width=32, tokens=24, channels=64, layers=2, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, width, patch, patch)
        patches = (side // patch) ** 2
        self.blocks = nn.ModuleList(
            MixerBlock(patches, width, tokens, channels) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Gain(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class RegisterBlock(nn.Module):
    def __init__(self, width, heads, units):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = Gain(width), Gain(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, units), nn.Linear(width, units)
        self.down = nn.Linear(units, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))
        h = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class RegisterViT(nn.Module):
    """A vision transformer with a class token and registers, RMSNorm and gated units."""

    def __init__(self, side=8, patch=2, width=32, heads=4, units=48, layers=2, classes=10):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.cls, self.registers = (nn.Parameter(0.02 * torch.randn(1, n, width)) for n in (1, 3))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(RegisterBlock(width, heads, units) for _ in range(layers))
        self.norm = Gain(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        patches = functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        x = self.embed(patches) + self.positions
        batch = len(x)
        x = torch.cat([self.cls.expand(batch, -1, -1), self.registers.expand(batch, -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Units(nn.Module):
    """A hidden layer with any activation."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.activation = activation

    def forward(self, x):
        return self.second(self.activation(self.first(x)))
