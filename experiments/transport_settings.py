"""The settings of transport.py: what seeds are, what they are fine-tuned on, what is measured."""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parents import cifar_arrays
from torch import Tensor
from torch.nn import functional

Rows = dict[str, Tensor]  # inputs and labels of a stock class, by name
IGNORED, RANK, ALPHA = -100, 8, 16
TINY_TEXT, TINY_ROWS = 400_000, 600


@dataclass(frozen=True)
class Setting:
    """Seeds of a recipe, fine-tuned on other data for `steps` of `batch` rows."""

    recipe: str
    read: Callable[[Any, Path, Setting], dict[str, Rows]]
    tiny: Mapping[str, Any]
    steps: int = 300
    batch: int = 8
    lr: float = 5e-4
    rows: str = (
        "unaligned weights fast standard lora-fast lora-standard best lora-best permutations"
        " learned-unaligned heal fast+heal lora-fast+heal lora-unaligned+heal masks labelled random"
        " standard+heal weights:1.25 lora-weights standard-data learned-random midpoint"
        " learned-midpoint"
    )
    classifier: str | None = None  # the class of fine-tunes, where it is not that of seeds
    data: str = ""
    schedule: Mapping[str, Any] = field(default_factory=dict)

    def training(self, tiny: bool, steps: int | None) -> Any:
        from symmerge.lab.training.recipes import training_recipe, with_changes

        recipe, schedule = training_recipe(self.recipe), dict(self.schedule)
        if steps:
            schedule["steps"] = steps
        if tiny:
            return with_changes(recipe, config=self.tiny, schedule={"steps": 12, "batch_size": 8})
        return with_changes(recipe, schedule=schedule)


def text_of(path: Path) -> str:
    content = path.read_bytes()
    raw = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
    if path.suffix == ".tsv":  # label, title, description
        lines = (" ".join(line.split("\t")[1:]) for line in raw.split("\n")[1:])
        return "\n".join(filter(None, lines))
    return raw


def blocks_of(path: Path, model: Any, length: int, count: int | None = None) -> Tensor:
    from symmerge.evaluation.tasks.preprocessing import tokenizer_of

    text = text_of(path)
    text = text[: count * length * 12] if count else text  # enough characters for so many tokens
    tokens = tokenizer_of(model)(text, return_tensors="pt", verbose=False)["input_ids"][0]
    cut = tokens[: len(tokens) // length * length].view(-1, length)
    return cut[:count]


def news(model: Any, data: Path, _: Setting) -> dict[str, Rows]:
    """Novels to news, in blocks."""
    length = min(256, model.spec.sizes.get("position", 256))
    blocks = {
        "train": blocks_of(data / "agnews/train.tsv", model, length),
        "new": blocks_of(data / "agnews/test.tsv", model, length, 128),
        "old": blocks_of(data / "books_valid.txt.xz", model, length, 128),
    }
    return {name: {"input_ids": rows, "labels": rows} for name, rows in blocks.items()}


def corrupted(model: Any, data: Path, _: Setting) -> dict[str, Rows]:
    """CIFAR-10 to images with noise, blur or little contrast, in equal parts."""
    from symmerge.lab.training.images import IMAGE_SETS

    result, kind = {}, IMAGE_SETS["cifar10"]
    with np.load(data / "cifar10.npz") as arrays:
        for split, count in (("train", 20_000), ("test", 4_000)):
            labels = torch.from_numpy(arrays[f"y_{split}"].astype(np.int64)).reshape(-1)
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[:count]
            images = torch.from_numpy(arrays[f"x_{split}"][order.numpy()]).float() / 255
            images, labels = images.permute(0, 3, 1, 2), labels[order]
            if split == "test":
                result["old"] = {"pixel_values": images, "labels": labels}
            name = "train" if split == "train" else "new"
            result[name] = {"pixel_values": corrupt(images), "labels": labels}
    mean, std = (torch.tensor(value)[:, None, None] for value in (kind.mean, kind.std))
    return {
        name: {**rows, "pixel_values": (rows["pixel_values"] - mean) / std}
        for name, rows in result.items()
    }


def corrupt(images: Tensor) -> Tensor:
    """A third with noise, a third blurred, a third with little contrast."""
    generator = torch.Generator().manual_seed(2)
    noisy, blurred, pale = images[0::3], images[1::3], images[2::3]
    noise = torch.randn(noisy.shape, generator=generator)
    at = torch.arange(-2, 3).float()
    line = torch.exp(-at.square() / (2 * 1.5**2))
    kernel = (line[:, None] * line / line.sum() ** 2).expand(3, 1, 5, 5)
    blurred = functional.conv2d(functional.pad(blurred, (2, 2, 2, 2), "reflect"), kernel, groups=3)
    result = images.clone()
    result[0::3] = (noisy + 0.2 * noise).clamp(0, 1)
    result[1::3] = blurred
    result[2::3] = (0.25 * pale + 0.2).clamp(0, 1)
    return result


def labelled_texts(model: Any, data: Path, setting: Setting) -> dict[str, Rows]:
    """Rows of a table of labelled texts, cut to the positions of the model."""
    from symmerge.evaluation.data.text import read_rows
    from symmerge.evaluation.tasks.preprocessing import max_length, tokenizer_of

    tokenizer, result = tokenizer_of(model), {}
    held = "dev" if setting.data == "sst2" else "test"
    for name, split in (("train", "train"), ("new", held)):
        table = read_rows(str(data / setting.data / f"{split}.tsv"))
        columns = [list(column)[:20_000] for column in zip(*table.texts, strict=True)]
        options = {"padding": True, "truncation": True, "return_tensors": "pt", "verbose": False}
        encoded = tokenizer(*columns, max_length=min(128, max_length(model)), **options)
        labels = torch.tensor([int(label) for label in table.labels[: len(columns[0])]])
        known = {key: encoded[key] for key in ("input_ids", "attention_mask")}
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
        if name == "new":
            order = order[:2000]
        rows = {**known, "labels": labels}
        result[name] = {key: value[order] for key, value in rows.items()}
    return result


def prepared(setting: Setting, options: Any) -> Path:
    """The folder of data: CIFAR as plain arrays, and everything small if --tiny."""
    place = options.work / ("data-tiny" if options.tiny else "data")
    place.mkdir(parents=True, exist_ok=True)
    for folder in ("agnews", "sst2"):
        if (options.data_dir / folder).exists() and not (place / folder).exists():
            _table(options.data_dir / folder, place / folder, options.tiny)
    for name in ("books_train.txt.xz", "books_valid.txt.xz"):
        if (options.data_dir / name).exists() and not (place / name).exists():
            _text(options.data_dir / name, place / name, options.tiny)
    if setting.read is corrupted and not (place / "cifar10.npz").exists():
        _images(options.data_dir, place / "cifar10.npz", options.tiny)
    return place


def _table(source: Path, target: Path, tiny: bool) -> None:
    target.mkdir()
    for file in source.iterdir():
        lines = file.read_text("utf-8").split("\n")
        kept = lines[: TINY_ROWS + 1] if tiny else lines
        (target / file.name).write_text("\n".join(kept), "utf-8")


def _text(source: Path, target: Path, tiny: bool) -> None:
    content = source.read_bytes()
    if tiny:
        content = lzma.compress(lzma.decompress(content)[:TINY_TEXT])
    target.write_bytes(content)


def _images(source: Path, target: Path, tiny: bool) -> None:
    arrays = cifar_arrays(source / "cifar10.npz")
    if tiny:
        arrays = {name: one[:: max(1, len(one) // TINY_ROWS)] for name, one in arrays.items()}
    np.savez(target, **arrays)


def take(rows: Rows, index: Tensor, device: str) -> Rows:
    """Some rows on a device; texts cut to the longest of them."""
    chosen = {name: value[index].to(device) for name, value in rows.items()}
    if "attention_mask" in chosen:
        longest = int(chosen["attention_mask"].sum(1).max())
        chosen = {k: v[:, :longest] if v.ndim == 2 else v for k, v in chosen.items()}
    return chosen


def module_of(model: Any, device: str) -> Any:
    from symmerge.verification.modules import full_module

    module = full_module(model, torch.float32).to(device).eval()
    if "label" in model.spec.sizes:  # stock classes set this when they first compute a loss
        module.config.problem_type = "single_label_classification"
    return module


@torch.no_grad()
def scores(model: Any, rows: Rows, device: str) -> dict[str, float]:
    """Loss and accuracy: of the next token, or of the class."""
    module, size = module_of(model, device), 16 if rows["labels"].ndim == 2 else 250
    losses, hits, count = 0.0, 0, 0
    for index in torch.arange(len(rows["labels"])).split(size):
        batch = take(rows, index, device)
        labels = batch.pop("labels")
        logits = module(**batch).logits
        if labels.ndim == 2:
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        losses += float(functional.cross_entropy(logits, labels, reduction="sum"))
        hits += int((logits.argmax(-1) == labels).sum())
        count += len(labels)
    return {"loss": losses / count, "accuracy": hits / count}


def trained(
    module: Any,
    rows: Rows,
    device: str,
    *,
    steps: int,
    lr: float,
    seed: int,
    batch: int = 8,
    parameters: list[Any] | None = None,
) -> Any:
    """AdamW on labelled rows, half a cosine; of all parameters, or of some."""
    chosen = list(module.parameters()) if parameters is None else parameters
    optimizer = torch.optim.AdamW(chosen, lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    for parameter in chosen:
        parameter.requires_grad_(True)
    for step in range(steps):
        rate = min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * rate
        index = torch.randint(len(rows["labels"]), (batch,), generator=generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = module(**take(rows, index, device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


class LowRank(torch.nn.Module):
    """A weight plus B A, as LoRA; `turned`: stored as [in, out]."""

    def __init__(self, weight: Tensor, turned: bool, seed: int) -> None:
        super().__init__()
        out, into = weight.shape[::-1] if turned else weight.shape
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(RANK, into, generator=generator) / into**0.5
        self.a = torch.nn.Parameter(a.to(weight))
        self.b = torch.nn.Parameter(weight.new_zeros(out, RANK))
        self.turned = turned

    def forward(self, weight: Tensor) -> Tensor:
        product = ALPHA / RANK * self.b @ self.a
        return weight + (product.mT if self.turned else product)


def low_rank(model: Any, rows: Rows, setting: Setting, device: str, seed: int) -> Any:
    """A LoRA of rank 8 of all maps inside the layers, trained by hand: the box has no peft."""
    from torch.nn.utils import parametrize

    from symmerge.transporting.adapter_files import Adapter, Factors

    module, factors = module_of(model, device), {}
    for at, (name, child) in enumerate(module.named_modules()):
        kind = type(child).__name__
        if kind in ("Linear", "Conv1D") and any(part.isdigit() for part in name.split(".")):
            factors[name] = LowRank(child.weight.detach(), kind == "Conv1D", seed * 1000 + at)
    for name, factor in factors.items():
        child = module.get_submodule(name)
        parametrize.register_parametrization(child, "weight", factor.to(device))
    parameters = [one for factor in factors.values() for one in (factor.a, factor.b)]
    how = {"steps": setting.steps, "lr": 6 * setting.lr, "batch": setting.batch, "seed": seed}
    trained(module, rows, device, **how, parameters=parameters)
    kept = {
        name: Factors(factor.a.detach().cpu(), factor.b.detach().cpu(), ALPHA / RANK)
        for name, factor in factors.items()
    }
    turned = frozenset(name for name, factor in factors.items() if factor.turned)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    return Adapter(config, kept, Path("lora"), torch.float32, turned)


_BODY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_BODY, "vocab_size": 300, "intermediate_size": 64, "max_position_embeddings": 32}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": 32}
_GPT2 = {**_GPT2, "vocab_size": 300}
_CLASSES = (
    "unaligned weights fast standard heal fast+heal learned-unaligned best labelled random"
    " permutations standard-data"
)

_bert = Setting(
    "books-bert",
    labelled_texts,
    _TEXT,
    steps=800,
    batch=32,
    lr=1e-4,
    rows=_CLASSES,
    classifier="BertForSequenceClassification",
    schedule={"steps": 4000},
)
SETTINGS: Mapping[str, Setting] = {
    "gpt2": Setting("books-gpt2-small", news, _GPT2),
    "llama": Setting("books-llama", news, {**_TEXT, "num_key_value_heads": 2}),
    "vit": Setting(
        "cifar10-vit-short",
        corrupted,
        {**_BODY, "intermediate_size": 64},
        batch=64,
        lr=2e-4,
        rows="unaligned weights fast standard standard-data best permutations learned-unaligned"
        " heal fast+heal best-data masks labelled random lora-weights lora-standard weights:1.25",
        schedule={"steps": 4680},
    ),
    "bert-agnews": replace(_bert, data="agnews"),
    "bert-sst2": replace(_bert, data="sst2"),
    "gpt2-base": Setting(
        "books-gpt2-base",
        news,
        _GPT2,
        lr=2e-4,
        rows="unaligned weights standard best fast heal fast+heal learned-unaligned labelled",
        schedule={"steps": 1500},
    ),
}
