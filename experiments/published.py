"""The models of "Generalized Linear Mode Connectivity for Transformers" as published, trained with stock transformers classes on one GPU.

    python experiments/published.py train KIND --seeds 0,1,2 --data DIR --out DIR [--epochs N] [--dry]
    python experiments/published.py data KIND --data DIR --out DIR        only the files that tasks read

KIND is cifar10 (ViT; cifar10-l2 as below) or shakespeare (GPT-2). DIR has cifar10.npz and load_data.py, or tinyshakespeare.txt and gpt2_tokenizer/. Every seed has its own
initialisation and order of batches. Written are OUT/KIND-sN (a checkpoint as soon as it is trained), OUT/KIND-train.json (anew after every seed; seeds
that are in it with the same settings are left alone, so a call that was cut short can be repeated), and once the files that tasks read: cifar10-train.npz,
-augmented.npz and -test.npz, or shakespeare-train.txt, -valid.txt and -test.txt.

Where the paper is silent or unclear: its public code for Tiny Shakespeare has blocks of 256 tokens, a rate of 3e-4, an output of its own, a look at the
validation part every 50 steps, five looks of patience, and keeps the best; so do we. The paper calls Trainer's AdamW "Adam", so the ViT has AdamW, too; with
Adam's own L2 penalty (`cifar10-l2`) most of layers 2 to 5 becomes zero, and accuracy stays at 75%. What does not fill a batch is left out of an epoch. No gradients
are clipped.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Part: TypeAlias = tuple[Tensor, Tensor]  # inputs and labels

SIDE, PADDING, JITTER, HUE = 32, 4, 0.4, 0.1
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BLOCK = 256
CHANCES = 7  # random numbers that one augmentation takes
LEVELS = ("compile+graph", "graph", "eager")  # each in a process of its own: an error on the GPU can leave a process unusable
COMPILE_LIMIT = 240  # seconds until the first steps must be done
WARM_STEPS, MOST_STEPS_PER_GRAPH, REPORTS = 3, 16, 10


@dataclass(frozen=True)
class Kind:
    """What differs between the two."""

    model: Callable[[], Any]
    read: Callable[[Path, Path], dict[str, Part]]
    inputs: Callable[[Tensor, Tensor | None], dict[str, Any]]
    targets: Callable[[Tensor], Tensor]
    beside: Callable[[Path, Path], None]  # what else a checkpoint's folder needs
    optimiser: Callable[..., Any]
    rate_at: Callable[[int, int, int], float]  # share of the rate at a step, of so many, so many to an epoch
    settings: dict[str, Any]
    chances: int = 0
    look: int = 0  # steps from one look at the validation part to the next; the best model is kept. 0: the last one is


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 512, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=SIDE, patch_size=4))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, masking_utils

    # It looks for packed sequences in the positions: a wait for the device, which a CUDA graph forbids, and a full mask when compiled. There are none.
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    return GPT2LMHeadModel(GPT2Config(vocab_size=50257, n_positions=BLOCK, n_embd=256, n_layer=6, n_head=4, n_inner=1024, tie_word_embeddings=False))


def augmented(pictures: Tensor, chances: Tensor) -> Tensor:
    """Pictures [n, h, w, 3] from 0 to 1, each cropped, flipped and jittered as its random numbers say; torchvision's definitions, brightness first."""
    near, count = torch.arange(SIDE, device=pictures.device), len(pictures)
    top, left = (chances[:, :2] * (2 * PADDING + 1)).long().clamp(max=2 * PADDING).split(1, 1)
    rows, columns = top + near, left + torch.where(chances[:, 2:3] < 0.5, SIDE - 1 - near, near)
    padded = functional.pad(pictures, (0, 0, *(PADDING,) * 4))
    cropped = padded[torch.arange(count, device=pictures.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
    brightness, contrast, saturation = (1 + JITTER * (2 * chances[:, 3:6, None, None, None] - 1)).unbind(1)
    bright = (cropped * brightness).clamp(0, 1)
    contrasted = (contrast * bright + (1 - contrast) * _grey(bright).mean((1, 2, 3), keepdim=True)).clamp(0, 1)
    saturated = (saturation * contrasted + (1 - saturation) * _grey(contrasted)).clamp(0, 1)
    return _turned(saturated, HUE * (2 * chances[:, 6, None, None] - 1))


def _grey(pictures: Tensor) -> Tensor:
    red, green, blue = pictures.split(1, -1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _turned(pictures: Tensor, hue: Tensor) -> Tensor:
    """Pictures with their hue turned by a part of the circle."""
    red, green, blue = pictures.unbind(-1)
    most = torch.maximum(torch.maximum(red, green), blue)
    span = most - torch.minimum(torch.minimum(red, green), blue)
    safe = span + (span == 0)  # a number in torch.where would be copied to the device, which a graph forbids
    sixths = torch.where(most == red, (green - blue) / safe, torch.where(most == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)) + 6 * hue
    places = [(sixths + offset).remainder(6) for offset in (5, 3, 1)]
    return torch.stack([most - span * torch.minimum(place, 4 - place).clamp(0, 1) for place in places], -1)


def picture_inputs(pictures: Tensor, chances: Tensor | None) -> dict[str, Any]:
    scaled = pictures.float() / 255
    channels = (scaled if chances is None else augmented(scaled, chances)).unbind(-1)
    # Numbers, not tensors: nothing is copied to the device while a graph is captured.
    return {"pixel_values": torch.stack([(channel - mean) / std for channel, mean, std in zip(channels, MEAN, STD, strict=True)], 1)}


def text_inputs(blocks: Tensor, _: Tensor | None) -> dict[str, Any]:
    return {"input_ids": blocks, "use_cache": False}


def next_tokens(blocks: Tensor) -> Tensor:
    return functional.pad(blocks[:, 1:], (0, 1), value=-100)


def per_epoch_cosine(step: int, steps: int, epoch: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * (step // epoch * epoch) / steps))


def warm_cosine(step: int, steps: int, _: int) -> float:
    warm = math.ceil(0.05 * steps)
    return step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def read_cifar10(data: Path, out: Path) -> dict[str, Part]:
    """Pictures [n, h, w, 3] and labels, from the files that tasks read."""
    if not (out / "cifar10-augmented.npz").exists():
        write_cifar10(data, out)
    files = {part: np.load(out / f"cifar10-{part}.npz") for part in ("train", "test")}
    return {part: (torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])) for part, file in files.items()}


def write_cifar10(data: Path, out: Path) -> None:
    """Shuffled, as the stored data is sorted by class. Decoding takes 20 s."""
    sys.path.insert(0, str(data.resolve()))
    from load_data import load_cifar  # pyright: ignore[reportMissingImports]

    found, generator = load_cifar(str(data / "cifar10.npz")), torch.Generator().manual_seed(0)
    for part in ("test", "train"):
        order = torch.randperm(len(found[f"y_{part}"]), generator=generator).numpy()
        images, labels = found[f"x_{part}"][order], found[f"y_{part}"][order]
        np.savez(out / f"cifar10-{part}.npz", images=images, labels=labels)
    chances = torch.rand(len(labels), CHANCES, generator=generator)
    changed = [augmented(some.float() / 255, by) for some, by in zip(torch.from_numpy(images).split(1000), chances.split(1000), strict=True)]
    np.savez(out / "cifar10-augmented.npz", images=(torch.cat(changed) * 255).round().byte().numpy(), labels=labels)


def read_shakespeare(data: Path, out: Path) -> dict[str, Part]:
    """Blocks of tokens of the first 90%, the next 5% and the last 5% of the characters."""
    from tokenizers import Tokenizer

    text = (data / "tinyshakespeare.txt").read_bytes().decode()
    tokenizer = Tokenizer.from_file(str(data / "gpt2_tokenizer" / "tokenizer.json"))
    ends, parts = [0, len(text) * 90 // 100, len(text) * 95 // 100, len(text)], {}
    for part, begin, end in zip(("train", "valid", "test"), ends, ends[1:], strict=False):
        (out / f"shakespeare-{part}.txt").write_bytes(text[begin:end].encode())
        tokens = torch.tensor(tokenizer.encode(text[begin:end], add_special_tokens=False).ids)
        blocks = tokens[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK)
        parts[part] = blocks, blocks
    return parts


def processor_beside(folder: Path, _: Path) -> None:
    size = {"height": SIDE, "width": SIDE}
    processor = {"image_processor_type": "ViTImageProcessor", "size": size, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def tokenizer_beside(folder: Path, data: Path) -> None:
    for file in (data / "gpt2_tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)  # copyfile: the source may be read-only


PICTURES, TEXT = {"epochs": 150, "batch": 128, "rate": 3e-4, "decay": 1e-3}, {"epochs": 100, "batch": 32, "rate": 3e-4, "decay": 0.01}
PATIENCE = 5
PICTURE_KIND = Kind(vit, read_cifar10, picture_inputs, lambda labels: labels, processor_beside, torch.optim.AdamW, per_epoch_cosine, PICTURES, CHANCES)
KINDS = {
    "cifar10": PICTURE_KIND,
    "cifar10-l2": replace(PICTURE_KIND, optimiser=torch.optim.Adam),
    "shakespeare": Kind(gpt2, read_shakespeare, text_inputs, next_tokens, tokenizer_beside, torch.optim.AdamW, warm_cosine, TEXT, look=50),
}


def batch_loss(kind: Kind, net: nn.Module, part: Part, order: Tensor, chances: Tensor, at: Tensor) -> Tensor:
    """Fetching, augmentation and forward pass in one function, for the compiler to fuse. `at`: the step's number, on the device."""
    (inputs, labels), rows = part, order[at].squeeze(0)
    ready, targets = kind.inputs(inputs[rows], chances[at].squeeze(0)), kind.targets(labels[rows])
    with torch.autocast(at.device.type, torch.bfloat16):
        logits = net(**ready).logits
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def working_copy(model: nn.Module) -> nn.Module:
    """The model with bfloat16 matrices, everything else shared: autocast then casts no weights, 70 small kernels a step. The numbers stay the same."""
    from transformers.pytorch_utils import Conv1D

    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}  # in float32, also as a tied head
    matrices = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d | Conv1D) and id(module.weight) not in looked_up}
    own = {id(parameter) for name in matrices for parameter in model.get_submodule(name).parameters()}
    net = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in own})
    for name in matrices:
        net.get_submodule(name).bfloat16()
    return net.train()


@torch.no_grad()
def copy_all(into: Sequence[Any], source: Sequence[Any]) -> None:
    """Many tensors in a kernel or two, also from one type to another."""
    torch._foreach_copy_(list(into), list(source))  # pyright: ignore[reportPrivateImportUsage]


class Trainer:
    """A model and its step. All that a step reads and writes stays in its place on the device, so one captured graph serves every seed."""

    def __init__(self, kind: Kind, settings: dict[str, Any], train: Part, device: torch.device, level: str) -> None:
        self.kind, self.part, batch = kind, train, settings["batch"]
        self.epoch = len(train[1]) // batch
        self.steps = settings["epochs"] * self.epoch
        self.model = kind.model().to(device).eval()
        self.net = working_copy(self.model)
        pairs = [(mine, copied) for mine, copied in zip(self.model.parameters(), self.net.parameters(), strict=True) if mine is not copied]
        self.masters, self.halves = zip(*pairs, strict=True)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        rates = [settings["rate"] * kind.rate_at(step, self.steps, self.epoch) for step in range(self.steps)]
        self.rates, self.losses = torch.tensor(rates, device=device), torch.zeros(self.steps, device=device)
        options = {"weight_decay": settings["decay"], "fused": True, "capturable": device.type == "cuda"}
        self.optimiser = kind.optimiser(self.model.parameters(), lr=torch.tensor(settings["rate"], device=device), **options)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.order = torch.zeros(self.steps, batch, dtype=torch.long, device=device)
        self.chances = torch.zeros(self.steps, batch, kind.chances, device=device)
        self.loss = torch.compile(batch_loss, dynamic=False) if "compile" in level else batch_loss
        self.unit, self.advance = 1, self.step
        if device.type == "cuda":
            self._prepare("graph" in level)

    def step(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = None
        self.optimiser.param_groups[0]["lr"].copy_(self.rates[self.at].squeeze(0))
        loss = self.loss(self.kind, self.net, self.part, self.order, self.chances, self.at)
        loss.backward()
        copy_all([master.grad for master in self.masters], [half.grad for half in self.halves])
        self.optimiser.step()
        copy_all(self.halves, self.masters)
        self.losses.index_copy_(0, self.at, loss.detach().view(1))
        self.at.add_(1)

    def _prepare(self, capture: bool) -> None:
        """Compile, let the optimiser make its state, and capture several steps as one graph; what these steps do is undone by `restart`."""
        signal.alarm(COMPILE_LIMIT)  # ends this process, and the next level takes over
        began, side = time.time(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                self.step()
        torch.cuda.synchronize()
        if capture:
            whole = math.gcd(self.steps, self.kind.look)
            self.unit = max(size for size in range(1, MOST_STEPS_PER_GRAPH + 1) if whole % size == 0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):  # the same stream: gradients remember theirs
                for _ in range(self.unit):
                    self.step()
            self.advance = graph.replay
        torch.cuda.synchronize()
        signal.alarm(0)
        print(f"ready after {time.time() - began:.0f} s, {self.unit} steps to a graph", flush=True)

    @torch.no_grad()
    def restart(self, seed: int) -> None:
        """A fresh initialisation, optimiser and order, in place."""
        torch.manual_seed(seed)  # initialisation, and dropout on the device
        for parameter, fresh in zip(self.model.parameters(), self.kind.model().parameters(), strict=True):
            parameter.copy_(fresh)
        copy_all(self.halves, self.masters)
        for state in self.optimiser.state.values():
            for tensor in state.values():
                tensor.zero_()
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1))
        for order in self.order.split(self.epoch):
            order.copy_(torch.randperm(len(self.part[1]), generator=generator)[: order.numel()].view_as(order))
        self.chances.uniform_(generator=torch.Generator(self.at.device).manual_seed(seed))
        for tensor in (self.at, self.losses):
            tensor.zero_()

    def run(self) -> Iterator[tuple[int, int, float]]:
        """Train; now and then the step, the one before, and seconds spent training."""
        done, seconds, looks = 0, 0.0, self.steps // self.kind.look if self.kind.look else REPORTS
        for end in [self.steps * part // looks // self.unit * self.unit for part in range(1, looks)] + [self.steps]:
            if end == done:
                continue
            began = time.time()
            for _ in range(done, end, self.unit):
                self.advance()
            int(self.at)  # waits for the device
            before, done, seconds = done, end, seconds + time.time() - began
            yield done, before, seconds


@torch.no_grad()
def evaluate(kind: Kind, model: nn.Module, part: Part) -> dict[str, float]:
    """Loss and accuracy in float32."""
    losses, right = [], []
    for inputs, labels in zip(*(tensor.split(4 * kind.settings["batch"]) for tensor in part), strict=True):
        logits, targets = model(**kind.inputs(inputs, None)).logits.flatten(0, -2), kind.targets(labels).flatten()
        losses.append(functional.cross_entropy(logits, targets, reduction="none")[targets >= 0])
        right.append((logits.argmax(-1) == targets)[targets >= 0])
    return {"loss": torch.cat(losses).mean().item(), "accuracy": torch.cat(right).float().mean().item()}


class Pupil:
    """A model in training: its curve, and the best of it where looks are had at the validation part."""

    def __init__(self, trainer: Trainer, seed: int, folder: Path, parts: dict[str, Part]) -> None:
        trainer.restart(seed)
        self.trainer, self.folder, self.parts = trainer, folder, parts
        self.curve: list[dict[str, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (math.inf, 0, {})

    def look(self, step: int, before: int, seconds: float) -> bool:
        """Whether there is more to hope for."""
        trainer, kind = self.trainer, self.trainer.kind
        loss = trainer.losses[before:step].mean().item()
        assert int(trainer.at) == step and math.isfinite(loss), f"step {int(trainer.at)}, expected {step}; loss {loss}"
        self.curve.append({"step": step, "training": loss, "seconds": seconds, **evaluate(kind, trainer.model, self.parts["valid" if kind.look else "test"])})
        line = f"training {loss:.4f}, held out {self.curve[-1]['loss']:.4f}, accuracy {self.curve[-1]['accuracy']:.4f}, {1000 * seconds / step:.3f} ms/step"
        print(f"{self.folder.name} {step}/{trainer.steps} {line}", flush=True)
        if kind.look and self.curve[-1]["loss"] < self.best[0]:
            self.best = self.curve[-1]["loss"], step, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        return not kind.look or step - self.best[1] < PATIENCE * kind.look

    def saved(self, data: Path) -> dict[str, Any]:
        """Save, and judge what was saved."""
        trainer = self.trainer
        if self.best[2]:
            trainer.model.load_state_dict(self.best[2])
        trainer.model.save_pretrained(self.folder)
        trainer.kind.beside(self.folder, data)
        saved = type(trainer.model).from_pretrained(self.folder).to(trainer.at.device).eval()
        kept = {"step": self.best[1] or self.curve[-1]["step"], "seconds": self.curve[-1]["seconds"]}
        return {**kept, **{part: evaluate(trainer.kind, saved, both) for part, both in self.parts.items()}, "curve": self.curve}


def train_here(options: argparse.Namespace) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind, device = KINDS[options.kind], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    level, rows = options.level if device.type == "cuda" else "eager", 6 if options.dry else None
    settings = kind.settings | ({"epochs": 2, "batch": 2} if options.dry else {}) | ({"epochs": options.epochs} if options.epochs else {})
    results = options.out / f"{options.kind}-train.json"
    records = json.loads(results.read_text()) if results.exists() else {}
    missing = {f"{options.kind}-s{seed}": seed for seed in options.seeds}
    missing = {name: seed for name, seed in missing.items() if records.get(name, {}).get("settings") != settings}
    if not missing:
        return
    parts = {part: (x[:rows].to(device), y[:rows].to(device)) for part, (x, y) in kind.read(options.data, options.out).items()}
    trainer = Trainer(kind, settings, parts["train"], device, level)
    for name, seed in missing.items():
        pupil = Pupil(trainer, seed, options.out / name, parts)
        for moment in trainer.run():
            if not pupil.look(*moment):
                break
        records[name] = {"settings": settings, "level": level, **pupil.saved(options.data)}
        results.write_text(json.dumps(records, indent=1) + "\n")
        print(name, {part: records[name][part] for part in parts}, flush=True)


def train(options: argparse.Namespace) -> None:
    """At the fastest level that works; seeds that one level has finished are not trained again at the next."""
    if options.level:
        return train_here(options)
    for level in LEVELS:
        if subprocess.run([sys.executable, __file__, *sys.argv[1:], "--level", level]).returncode == 0:
            return None
        print(f"{level} failed", flush=True)
    raise SystemExit("failed at every level: the reasons are above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for verb, function in (("train", train), ("data", lambda options: KINDS[options.kind].read(options.data, options.out))):
        command = commands.add_parser(verb)
        command.set_defaults(function=function)
        command.add_argument("kind", choices=KINDS)
        command.add_argument("--data", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
    command = commands.choices["train"]
    command.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    command.add_argument("--epochs", type=int)
    command.add_argument("--dry", action="store_true", help="a few steps with tiny batches, to see that everything works")
    command.add_argument("--level", choices=LEVELS, help="only this one, in this process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.function(options)


if __name__ == "__main__":
    main()
