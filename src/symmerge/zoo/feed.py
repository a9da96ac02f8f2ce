"""What a model in training sees: random batches of embedded data, and the tokenizer or image processor that goes with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from symmerge.checkpoint import write_json
from symmerge.tasks import Batch
from symmerge.tasks.embedded import digits, python_docs
from symmerge.zoo.recipes import TrainingRecipe

END = "<|endoftext|>"
MEAN, STD = 0.5, 0.5


class Feed(Protocol):
    """Batches without end, and what is saved beside the weights."""

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]: ...
    def save(self, folder: Path) -> None: ...


class Pictures:
    """The digits as they are. Moved about by a pixel they are harder, and two seeds then learn features that no symmetry relates."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        images, labels = digits("train")
        self.side = recipe.config["image_size"]
        # In 256 steps, as the image processor sees them.
        self.images = torch.from_numpy((np.rint(images * 255).astype(np.float32) / 255 - MEAN) / STD)[:, None]
        self.labels = torch.from_numpy(labels)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        while True:
            for chosen in torch.randperm(len(self.labels), generator=generator).split(size)[: len(self.labels) // size]:
                yield {"pixel_values": self.images[chosen], "labels": self.labels[chosen]}

    def save(self, folder: Path) -> None:
        size = {"height": self.side, "width": self.side}
        write_json(folder / "preprocessor_config.json", {"image_processor_type": "ViTImageProcessor", "size": size, "image_mean": [MEAN], "image_std": [STD]})


class Text:
    """Python's documentation in blocks that begin anywhere, as the tokens of a vocabulary made of that very text."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        text = python_docs("train")
        config = recipe.config
        self.length = config.get("n_positions") or config["max_position_embeddings"]
        self.tokenizer = make_tokenizer(text, config["vocab_size"])
        self.tokens = torch.tensor(self.tokenizer(text, verbose=False)["input_ids"])

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        while True:
            starts = torch.randint(0, len(self.tokens) - self.length + 1, (size, 1), generator=generator)
            tokens: Tensor = self.tokens[starts + torch.arange(self.length)]
            yield {"input_ids": tokens, "labels": tokens}

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def make_tokenizer(text: str, vocabulary: int) -> Any:
    """Byte-level pairs, the same for the same text: every seed's model speaks the same language."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END)


FEEDS = {"image": Pictures, "clm": Text}
