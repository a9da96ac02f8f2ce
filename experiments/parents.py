"""Parents for experiments: stock models trained for seconds, and the data they are trained on.

A captured graph takes many steps at once on a GPU; on a processor steps are taken one by one.
Models stay in their folders, so that an interrupted run goes on.
"""

from __future__ import annotations

import csv
import importlib.util
import lzma
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor

import symmerge as sm
from symmerge.evaluation.tasks import Task
from symmerge.evaluation.tasks.base import IGNORED, batched
from symmerge.evaluation.tasks.readouts import ImageReadout
from symmerge.lab.training.augmentation import RANDOM_NUMBERS, augment
from symmerge.lab.training.datasets import CausalText, Dataset, Images, batch_order, map_tensors
from symmerge.lab.training.recipe import Schedule
from symmerge.lab.training.step import TrainingStep, no_packed_sequences
from symmerge.models.model import Model

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10
BEGINNING = 2_000_000  # characters of each text, where both are read
ROWS_AT_ONCE = 1000


def train(
    module: Any, data: Dataset, schedule: Schedule, seed: int, device: str, *, anywhere: bool
) -> None:
    """Train a stock module in place."""
    place = torch.device(device)
    order = batch_order(data, schedule.steps, schedule.batch_size, seed, anywhere=anywhere)
    moved = map_tensors(data, lambda tensor: tensor.to(place))
    with no_packed_sequences(), torch.random.fork_rng():
        torch.manual_seed(seed)
        stepper = TrainingStep(module, moved, order, schedule, place)
        before = stepper.state()
        if place.type == "cuda":
            stepper.prepare("graph", 0)
            stepper.restore(before)
        done = 0
        while done < schedule.steps:
            done = stepper.advance()
    module.cpu().eval()


def kept(folder: Path, make: Callable[[], None]) -> Model:
    """The model of a folder, trained once."""
    if not (folder / "done").exists():
        make()
        (folder / "done").touch()
    return sm.load(folder)


# Text.


def texts(data: Path, work: Path) -> dict[str, Path]:
    """Plain text of novels and news, training and test."""
    work.mkdir(parents=True, exist_ok=True)
    files = {}
    for part, name in (("train", "books_train"), ("test", "books_valid")):
        files[f"novels-{part}"] = data / f"{name}.txt.xz"
        with open(data / "agnews" / f"{part}.tsv", encoding="utf-8") as lines:
            rows = [row[1:] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
        files[f"news-{part}"] = work / f"news-{part}.txt"
        files[f"news-{part}"].write_text("\n".join(" ".join(row) for row in rows[1:] if row))
    return files


def beginning(file: Path, characters: int = BEGINNING) -> str:
    how: Any = lzma.open if file.suffix == ".xz" else open
    with how(file, "rt", encoding="utf-8") as text:
        return str(text.read(characters))


def both_texts(files: dict[str, Path], work: Path) -> Path:
    """As much of each training text as of the other, in turns."""
    place = work / "both.txt"
    if not place.exists():
        novels, news = (beginning(files[f"{name}-train"]) for name in ("novels", "news"))
        size, at = 20_000, range(0, BEGINNING, 20_000)
        place.write_text("".join(novels[i : i + size] + news[i : i + size] for i in at), "utf-8")
    return place


def tokenizer_file(given: Path | None, files: dict[str, Path], work: Path, size: int) -> Path:
    if given:
        return given
    from tokenizers import ByteLevelBPETokenizer

    place = work / "tokens.json"
    if not place.exists():
        bpe = ByteLevelBPETokenizer()
        text = [beginning(files[f"{name}-train"]) for name in ("novels", "news")]
        bpe.train_from_iterator(text, vocab_size=size, special_tokens=["<|endoftext|>"])
        bpe.save(str(place))
    return place


def tokens_of(tokens: Path, text: Path, work: Path, characters: int) -> Tensor:
    """The token ids of a text; they are kept."""
    place = work / f"{text.name.split('.')[0]}-{characters}.npy"
    if not place.exists():
        from tokenizers import Tokenizer

        content, step = beginning(text, characters), 100_000
        parts = [content[at : at + step] for at in range(0, len(content), step)]
        encoded = Tokenizer.from_file(str(tokens)).encode_batch(parts)
        np.save(place, np.concatenate([np.array(part.ids, np.int32) for part in encoded]))
    return torch.from_numpy(np.load(place).astype(np.int64))


@dataclass(frozen=True)
class GPT2:
    """Size and training of a GPT-2: those of the zoo, unless said otherwise."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    length: int = 256
    steps: int = 1500
    rows: int = 64
    lr: float = 1e-3

    def train(self, text: Tensor, tokens: Path, seed: int, device: str, folder: Path) -> Model:
        """Train on token ids from fresh weights."""
        from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

        def make() -> None:
            tokenizer = GPT2TokenizerFast(tokenizer_file=str(tokens))
            config = GPT2Config(
                vocab_size=len(tokenizer), n_positions=self.length, n_embd=self.width,
                n_layer=self.layers, n_head=self.heads, n_inner=4 * self.width,
                tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
            )  # fmt: skip
            torch.manual_seed(seed)
            module = GPT2LMHeadModel(config)
            schedule = Schedule(
                self.steps, self.rows, self.lr, warmup=max(1, self.steps // 20), decay=0.1
            )
            train(module, CausalText(text, self.length), schedule, seed, device, anywhere=True)
            module.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        return kept(folder, make)


# Images.

Split = tuple[Tensor, Tensor]
"""Images [n, side, side, 3] in bytes, and labels."""


def cifar_arrays(file: Path) -> dict[str, Any]:
    """CIFAR as plain arrays; packed files are read as load_data.py beside them reads them."""
    content: Any = dict(np.load(file))
    if "d_train" in content:
        spec = importlib.util.spec_from_file_location("load_data", file.parent / "load_data.py")
        assert spec and spec.loader
        reader = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(reader)
        content = reader.load_cifar(str(file))
    return {f"{x}_{part}": content[f"{x}_{part}"] for x in "xy" for part in ("train", "test")}


def cifar(file: Path, work: Path, limit: int | None = None) -> dict[str, Split]:
    """CIFAR-10, shuffled."""
    place = work / "cifar10.npz"
    if not place.exists():
        work.mkdir(parents=True, exist_ok=True)
        np.savez(place, **cifar_arrays(file))
    arrays, splits = np.load(place), {}
    for part in ("train", "test"):
        order = np.random.default_rng(0).permutation(len(arrays[f"y_{part}"]))[:limit]
        images, labels = (torch.from_numpy(arrays[f"{x}_{part}"][order]) for x in "xy")
        splits[part] = images, labels.long()
    return splits


def normalized(images: Tensor) -> Tensor:
    """Bytes, or numbers in [0, 1], as models take them."""
    scaled = images.float() / 255 if images.dtype == torch.uint8 else images
    return ((scaled - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2).contiguous()


def augmented(images: Tensor, seed: int, times: int = 1) -> Tensor:
    """Each image cropped, flipped and coloured anew, `times` over; normalized."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for _ in range(times):
        for chunk in images.split(ROWS_AT_ONCE):
            noise = torch.rand(len(chunk), RANDOM_NUMBERS, generator=generator)
            parts.append(normalized(augment(chunk.float() / 255, noise)))
    return torch.cat(parts)


def mixed(images: Tensor, seed: int) -> Tensor:
    """Every image mixed with another: inputs on which nobody is certain."""
    generator = torch.Generator().manual_seed(seed)
    other = torch.randperm(len(images), generator=generator)
    share = 0.5 + 0.5 * torch.rand(len(images), 1, 1, 1, generator=generator)
    return share * images + (1 - share) * images[other]


def image_task(name: str, images: Tensor, labels: Tensor | None = None, rows: int = 64) -> Task:
    """A task of images that are normalized already; without labels nothing may ask for them."""
    truth = torch.full((len(images),), IGNORED) if labels is None else labels

    def collate(samples: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        index = torch.tensor([number for number, _ in samples])
        return {"pixel_values": images[index], "labels": truth[index]}

    samples = [(number, 0) for number in range(len(images))]
    batches = batched(samples, rows, key=lambda sample: sample[0], collate=collate)
    return Task("image", name, len(images), 0, ImageReadout(), batches, {})


@dataclass(frozen=True)
class ViT:
    """Size and training of a ViT: that of the zoo."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    epochs: float = 30
    rows: int = 256
    lr: float = 1e-3

    def train(self, split: Split, seed: int, device: str, folder: Path) -> Model:
        """Train on images, augmented."""
        from transformers import ViTConfig, ViTForImageClassification

        def make() -> None:
            config = ViTConfig(
                image_size=32, patch_size=4, num_channels=3, num_labels=10,
                hidden_size=self.width, num_hidden_layers=self.layers,
                num_attention_heads=self.heads, intermediate_size=2 * self.width,
            )  # fmt: skip
            config.problem_type = "single_label_classification"
            torch.manual_seed(seed)
            module = ViTForImageClassification(config)
            rows = min(self.rows, len(split[0]))
            steps = max(1, int(self.epochs * (len(split[0]) // rows)))
            schedule = Schedule(steps, rows, self.lr, warmup=max(1, steps // 20), decay=0.05)
            data = Images(*split, MEAN, STD)
            train(module, data, schedule, seed, device, anywhere=False)
            module.save_pretrained(folder)

        return kept(folder, make)
