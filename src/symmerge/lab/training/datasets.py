"""Data sets on a device: batches of inputs and targets. Shapes are static, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import Tensor
from torch.nn import functional

from symmerge.errors import DataError
from symmerge.evaluation.data.self_generated import halves
from symmerge.evaluation.tasks.base import IGNORED
from symmerge.evaluation.tasks.language import MASKING
from symmerge.lab.training.augmentation import RANDOM_NUMBERS, augment

Batch = tuple[Mapping[str, Tensor | bool], Tensor]
# As in BERT: of the predicted tokens 80 % become [MASK], 10 % a random token, 10 % stay.
MASKED, REPLACED = 0.8, 0.9


@final
@dataclass(frozen=True)
class FixedSamples:
    """Samples that are the same in every epoch."""

    inputs: Mapping[str, Tensor]
    targets: Tensor
    noise_size: ClassVar[int] = 0

    def rows(self) -> Tensor:
        return torch.arange(len(self.targets))

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        return {name: tensor[rows] for name, tensor in self.inputs.items()}, self.targets[rows]


@final
@dataclass(frozen=True)
class LabelledTexts:
    """Labelled rows of text, truncated to the longest of a batch. Not for CUDA graphs."""

    inputs: Mapping[str, Tensor]
    lengths: Tensor
    targets: Tensor
    noise_size: ClassVar[int] = 0

    def rows(self) -> Tensor:
        return torch.arange(len(self.targets))

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        longest = int(self.lengths[rows].max())
        inputs = {name: tensor[rows, :longest] for name, tensor in self.inputs.items()}
        return inputs, self.targets[rows]


@final
@dataclass(frozen=True)
class Images:
    """Images [n, h, w, 3] in uint8, augmented in training, normalised per channel."""

    pixels: Tensor
    targets: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    noise_size: ClassVar[int] = RANDOM_NUMBERS

    def rows(self) -> Tensor:
        return torch.arange(len(self.targets))

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        scaled = self.pixels[rows].float() / 255
        channels = (scaled if noise is None else augment(scaled, noise)).unbind(-1)
        # Python numbers, not tensors: nothing may be copied to the device during graph capture.
        normal = [
            (channel - mean) / std
            for channel, mean, std in zip(channels, self.mean, self.std, strict=True)
        ]
        return {"pixel_values": torch.stack(normal, 1)}, self.targets[rows]


@final
@dataclass(frozen=True)
class CausalText:
    """Blocks of text for causal models. A row is the start position of a block."""

    tokens: Tensor
    length: int
    noise_size: ClassVar[int] = 0

    def rows(self) -> Tensor:
        return block_starts(self.tokens, self.length)

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        tokens = blocks(self.tokens, rows, self.length)
        targets = functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        return {"input_ids": tokens, "use_cache": False}, targets


@final
@dataclass(frozen=True)
class Continued:
    """Blocks of text for encoder-decoders, which write the second half of each."""

    tokens: Tensor
    length: int
    start_token: int
    noise_size: ClassVar[int] = 0

    def rows(self) -> Tensor:
        return block_starts(self.tokens, self.length)

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        given, answer = halves(blocks(self.tokens, rows, self.length))
        # a pad, not a tensor of the start: nothing may be copied during graph capture
        before = functional.pad(answer[:, :-1], (1, 0), value=self.start_token)
        return {"input_ids": given, "decoder_input_ids": before, "use_cache": False}, answer


@final
@dataclass(frozen=True)
class MaskedText:
    """Blocks of text for masked models, with fresh masks every time."""

    tokens: Tensor
    length: int
    mask_token: int
    special: int  # number of special tokens; they come first
    vocab_size: int

    @property
    def noise_size(self) -> int:
        return 2 * self.length

    def rows(self) -> Tensor:
        return block_starts(self.tokens, self.length)

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        assert noise is not None
        tokens = blocks(self.tokens, rows, self.length)
        position, action = noise.chunk(2, 1)
        ordinary = self.vocab_size - self.special
        rank = ((action - MASKED) / (REPLACED - MASKED) * ordinary).long().clamp(0, ordinary - 1)
        # masked_fill: a number in torch.where would be copied to the device, which a graph forbids
        changed = torch.where(action < REPLACED, self.special + rank, tokens)
        changed = changed.masked_fill(action < MASKED, self.mask_token)
        inputs = torch.where(position < MASKING, changed, tokens)
        return {"input_ids": inputs}, tokens.masked_fill(position >= MASKING, IGNORED)

    def fixed(self) -> FixedSamples:
        """For evaluation: the same positions every time, all replaced by [MASK]."""
        tokens = blocks(self.tokens, self.rows(), self.length)
        masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < MASKING
        inputs = {"input_ids": tokens.masked_fill(masked, self.mask_token)}
        return FixedSamples(inputs, tokens.masked_fill(~masked, IGNORED))


Dataset = FixedSamples | LabelledTexts | Images | CausalText | Continued | MaskedText
"""Each has `rows` (one per sample), `batch`, and `noise_size` (random numbers per sample)."""


def blocks(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """The blocks of tokens that begin at `starts`."""
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)]


def block_starts(tokens: Tensor, length: int) -> Tensor:
    """Starts of adjacent blocks; an incomplete last block is left out."""
    return torch.arange(len(tokens) // length) * length


Kind = TypeVar("Kind", bound=Any)


def map_tensors(dataset: Kind, change: Callable[[Tensor], Tensor]) -> Kind:
    """The data set with `change` applied to every tensor: moved to a device, or sliced."""
    values = {field.name: getattr(dataset, field.name) for field in fields(dataset)}
    for name, value in values.items():
        if isinstance(value, Mapping):
            values[name] = {key: change(tensor) for key, tensor in value.items()}
        elif isinstance(value, Tensor):
            values[name] = change(value)
    return replace(dataset, **values)


def batch_order(
    dataset: Dataset, steps: int, batch_size: int, seed: int, *, anywhere: bool
) -> Tensor:
    """Rows of every step: each once per epoch, or (`anywhere`) random start positions."""
    generator = torch.Generator().manual_seed(seed)
    if anywhere and isinstance(dataset, CausalText | MaskedText):
        last, shape = len(dataset.tokens) - dataset.length + 1, (1, batch_size)
        return torch.cat([torch.randint(0, last, shape, generator=generator) for _ in range(steps)])
    rows, epochs = dataset.rows(), []
    epoch = steps_per_epoch(dataset, batch_size)
    while len(epochs) * epoch < steps:
        chosen = torch.randperm(len(rows), generator=generator)[: epoch * batch_size]
        epochs.append(rows[chosen].view(epoch, batch_size))
    return torch.cat(epochs)[:steps]


def steps_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Number of full batches per epoch."""
    count = len(dataset.rows())
    if count < batch_size:
        raise DataError(
            f"{count} samples do not fill a batch of {batch_size}:"
            " give more data, or a smaller batch size"
        )
    return count // batch_size
