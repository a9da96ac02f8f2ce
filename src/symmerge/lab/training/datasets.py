"""Samples on a device, and what a model is asked about some of them: inputs, and the answers it should give. Shapes never change, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import Tensor
from torch.nn import functional

from symmerge.errors import DataError
from symmerge.evaluation.tasks.base import IGNORED
from symmerge.evaluation.tasks.language import MASKING
from symmerge.lab.training.augmentation import RANDOM_NUMBERS, augment

Batch = tuple[dict[str, Any], Tensor]
MASKED, REPLACED = (
    0.8,
    0.9,
)  # of the tokens that are asked for: so many become a blank, the next tenth another token, the rest stay


@final
@dataclass(frozen=True)
class FixedSamples:
    """Samples that are always the same."""

    inputs: Mapping[str, Tensor]
    targets: Tensor
    noise: ClassVar[int] = 0

    def rows(self) -> Tensor:
        return torch.arange(len(self.targets))

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        return {name: tensor[rows] for name, tensor in self.inputs.items()}, self.targets[rows]


@final
@dataclass(frozen=True)
class LabelledTexts:
    """Rows of text with a label each, cut to the longest that is asked for. Not for graphs."""

    inputs: Mapping[str, Tensor]
    lengths: Tensor
    targets: Tensor
    noise: ClassVar[int] = 0

    def rows(self) -> Tensor:
        return torch.arange(len(self.targets))

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        longest = int(self.lengths[rows].max())
        return {name: tensor[rows, :longest] for name, tensor in self.inputs.items()}, self.targets[
            rows
        ]


@final
@dataclass(frozen=True)
class Images:
    """Pictures [n, h, w, 3] in 8 bits, changed by chance in training, and shown with this mean and deviation of each colour."""

    pictures: Tensor
    targets: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    noise: ClassVar[int] = RANDOM_NUMBERS

    def rows(self) -> Tensor:
        return torch.arange(len(self.targets))

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        scaled = self.pictures[rows].float() / 255
        channels = (scaled if noise is None else augment(scaled, noise)).unbind(-1)
        # Numbers, not tensors: nothing is copied to the device while a graph is captured.
        normal = [
            (channel - mean) / std
            for channel, mean, std in zip(channels, self.mean, self.std, strict=True)
        ]
        return {"pixel_values": torch.stack(normal, 1)}, self.targets[rows]


@final
@dataclass(frozen=True)
class CausalText:
    """Blocks of a text, for models that predict the next token. A row is the place where a block begins."""

    tokens: Tensor
    length: int
    noise: ClassVar[int] = 0

    def rows(self) -> Tensor:
        return block_starts(self.tokens, self.length)

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        found = blocks(self.tokens, rows, self.length)
        return {"input_ids": found, "use_cache": False}, functional.pad(
            found[:, 1:], (0, 1), value=IGNORED
        )


@final
@dataclass(frozen=True)
class MaskedText:
    """Blocks of a text, for models that fill gaps: other ones every time."""

    tokens: Tensor
    length: int
    blank: int
    special: int  # so many tokens, the first ones, never stand for a word
    vocabulary: int

    @property
    def noise(self) -> int:
        return 2 * self.length

    def rows(self) -> Tensor:
        return block_starts(self.tokens, self.length)

    def batch(self, rows: Tensor, noise: Tensor | None) -> Batch:
        assert noise is not None
        found, (which, what) = blocks(self.tokens, rows, self.length), noise.chunk(2, 1)
        words = self.vocabulary - self.special
        others = self.special + ((what - MASKED) / (REPLACED - MASKED) * words).long().clamp(
            0, words - 1
        )
        # masked_fill: a number in torch.where would be copied to the device, which a graph forbids
        hidden = torch.where(what < REPLACED, others, found).masked_fill(what < MASKED, self.blank)
        return {"input_ids": torch.where(which < MASKING, hidden, found)}, found.masked_fill(
            which >= MASKING, IGNORED
        )

    def fixed(self) -> FixedSamples:
        """To judge with: the same gaps every time, and nothing but blanks in them."""
        found = blocks(self.tokens, self.rows(), self.length)
        gap = torch.rand(found.shape, generator=torch.Generator().manual_seed(0)) < MASKING
        return FixedSamples(
            {"input_ids": found.masked_fill(gap, self.blank)}, found.masked_fill(~gap, IGNORED)
        )


Dataset = FixedSamples | LabelledTexts | Images | CausalText | MaskedText
"""Each has `rows` (all samples once), `ask`, and `chances`: how many random numbers a sample takes in training."""


def blocks(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """The tokens from each start on."""
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)]


def block_starts(tokens: Tensor, length: int) -> Tensor:
    """Where blocks begin that lie one after the other; what does not fill one is left out."""
    return torch.arange(len(tokens) // length) * length


Kind = TypeVar("Kind", bound=Any)


def map_tensors(lessons: Kind, change: Callable[[Tensor], Tensor]) -> Kind:
    """The same lessons with every tensor changed: moved to a device, or some of its rows."""
    values = {field.name: getattr(lessons, field.name) for field in fields(lessons)}
    for name, value in values.items():
        if isinstance(value, Mapping):
            values[name] = {key: change(tensor) for key, tensor in value.items()}
        elif isinstance(value, Tensor):
            values[name] = change(value)
    return replace(lessons, **values)


def batch_order(lessons: Dataset, steps: int, batch: int, seed: int, *, anywhere: bool) -> Tensor:
    """Which rows every step sees: all of them once in every epoch, or (`anywhere`) blocks that begin at any token."""
    generator = torch.Generator().manual_seed(seed)
    if anywhere and isinstance(lessons, CausalText | MaskedText):
        last = len(lessons.tokens) - lessons.length + 1
        return torch.cat(
            [torch.randint(0, last, (1, batch), generator=generator) for _ in range(steps)]
        )
    rows, epochs = lessons.rows(), []
    epoch = steps_per_epoch(lessons, batch)
    while len(epochs) * epoch < steps:
        epochs.append(
            rows[torch.randperm(len(rows), generator=generator)[: epoch * batch]].view(epoch, batch)
        )
    return torch.cat(epochs)[:steps]


def steps_per_epoch(lessons: Dataset, batch: int) -> int:
    """How many batches the samples fill."""
    count = len(lessons.rows())
    if count < batch:
        raise DataError(
            f"{count} samples do not fill a batch of {batch}: give more data, or a smaller batch"
        )
    return count // batch
