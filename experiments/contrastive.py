"""A small CLIP on embedded data: handwritten digits, and what they are called.

Each batch has images, and one text for each of the ten digits ("seven", "a seven" or "digit seven",
letter by letter). The loss is the cross-entropy of an image's scores for the ten texts.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FORMS = ("{}", "a {}", "digit {}")
END, LENGTH, BATCH = 28, 12, 64
MEAN, DEVIATION = 0.305, 0.376  # of the pixels
_BODY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG: dict[str, Any] = {
    "projection_dim": 48,
    "text_config": {
        **_BODY,
        "intermediate_size": 256,
        "vocab_size": END + 1,
        "max_position_embeddings": LENGTH,
        "eos_token_id": END,
        **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    },
    "vision_config": {
        **_BODY,
        "intermediate_size": 256,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
    },
}


def texts(form: str) -> Tensor:
    """The ten texts of a form: letters are 1 to 26, a space is 27."""
    rows = []
    for name in NAMES:
        letters = [27 if c == " " else ord(c) - ord("a") + 1 for c in form.format(name)]
        rows.append(letters + [END] * (LENGTH - len(letters)))
    return torch.tensor(rows)


def images(part: str) -> tuple[Tensor, Tensor]:
    """Pixel values and digits."""
    from symmerge.evaluation.data.images import read_images

    read = read_images(part)
    labels = torch.tensor([int(str(label)) for label in read.labels])
    pixels = torch.tensor(np.asarray(read.items), dtype=torch.float32)[:, None] / 255
    return (pixels - MEAN) / DEVIATION, labels


def trained(folder: Path, seed: int, steps: int) -> bool:
    """Whether a folder holds what `train` would write there."""
    record = folder / "contrastive.json"
    return record.exists() and json.loads(record.read_text()) == {"seed": seed, "steps": steps}


def train(folder: Path, seed: int, *, steps: int = 600, device: str = "cpu") -> Path:
    """Train a model from a seed, and write a stock checkpoint."""
    from transformers import CLIPConfig, CLIPModel

    if trained(folder, seed, steps):
        return folder
    torch.manual_seed(seed)
    model: Any = CLIPModel(CLIPConfig(**CONFIG)).to(device).train()
    pixels, labels = (each.to(device) for each in images("digits:train"))
    forms = torch.stack([texts(form) for form in FORMS]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, max(2, steps), pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(pixels), (BATCH,), generator=generator).to(device)
        form = int(torch.randint(len(forms), (), generator=generator))
        scores = model(pixel_values=pixels[rows], input_ids=forms[form]).logits_per_image
        loss = torch.nn.functional.cross_entropy(scores, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.cpu().eval().save_pretrained(folder)
    (folder / "contrastive.json").write_text(json.dumps({"seed": seed, "steps": steps}))
    return folder


def task(part: str, max_samples: int | None = None) -> Any:
    """Name the digit: an image's scores for the ten texts of the first form."""
    from symmerge.evaluation.tasks.base import Task, batched
    from symmerge.evaluation.tasks.readouts import ImageReadout

    pixels, labels = images(part)
    numbers = range(len(labels))[:max_samples]
    batches = batched(
        numbers, BATCH, key=lambda number: number, collate=partial(_batch, pixels, labels)
    )
    return Task("image", part, len(numbers), 0, ImageReadout(), batches, {"texts": FORMS[0]})


def _batch(pixels: Tensor, labels: Tensor, numbers: Any) -> dict[str, Tensor]:
    rows = torch.tensor(list(numbers))
    return {"pixel_values": pixels[rows], "labels": labels[rows], "input_ids": texts(FORMS[0])}
