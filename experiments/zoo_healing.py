"""Pairs of the same data, healed beside controls of equal cost; and what helps post-norm models.

    python experiments/zoo_healing.py --zoo DIR --data DIR --work OUT --out FILE.json
        [--families gpt2,llama,vit,bert] [--post-norm] [--device cuda] [--seconds S] [--tiny]

Every two models NAME-sI of `--zoo` are a pair. Measured on held-out novels, or on CIFAR-10's test
images. Language models are healed without data, ViTs on dead leaves and on unlabelled images.
`--post-norm` adds rows for BERT: longer, on text, other rates, flips and soft permutations of the
stream, an untied decoder.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from images import Images
from measured import HEAL_STEPS, STEPS, Cells, Rows, Setting, averaged, midpoint, parser, run
from parents import beginning
from safetensors.torch import save_file

import symmerge as sm
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.matching.recipes import get_recipe, with_options
from symmerge.models.model import Model

COST, LONG = STEPS + HEAL_STEPS, 3000


def learned(setting: Setting) -> Model:
    return midpoint(setting.learned())


ROWS: Rows = {
    "A": lambda s: s.models[0],
    "B": lambda s: s.models[1],
    "weights": lambda s: midpoint(s.weights()),
    f"learned {STEPS}": learned,
    f"learned {STEPS}, healed 300": lambda s: s.healed(learned(s)),
    "A healed 300": lambda s: s.healed(s.models[0]),
    f"A healed {COST}": lambda s: s.healed(s.models[0], COST),
    "average": averaged,
    f"average healed {COST}": lambda s: s.healed(averaged(s), COST),
    f"weights healed {COST}": lambda s: s.healed(midpoint(s.weights()), COST),
    f"B healed {COST}": lambda s: s.healed(s.models[1], COST),
}


def image_rows(images: Images) -> Rows:
    """The same on unlabelled images."""

    def crops() -> Task:
        return images.inputs("augmented")

    def from_images(s: Setting) -> Model:
        return midpoint(s.learned("images", data=crops()))

    return {
        f"learned {STEPS} on images": from_images,
        f"learned {STEPS} on images, healed 300": lambda s: s.healed(from_images(s), data=crops()),
        "A healed 300 on images": lambda s: s.healed(s.models[0], data=crops()),
        f"A healed {COST} on images": lambda s: s.healed(s.models[0], COST, data=crops()),
        f"average healed {COST} on images": lambda s: s.healed(averaged(s), COST, data=crops()),
    }


# Post-norm models.


def novels(setting: Setting) -> Task:
    """Unlabelled training text."""
    options = setting.options
    if "novels" not in setting.inputs:
        place = options.work / "novels.txt"
        if not place.exists():
            text = beginning(options.data / "books_train.txt.xz", 3_000_000)
            place.write_text(text, "utf-8")
        rows, length = (16, 32) if options.tiny else (4096, 128)
        how: dict[str, Any] = {"max_samples": rows, "length": length, "seed": 1}
        setting.inputs["novels"] = make_task("mlm", str(place), setting.models, **how)
    return setting.inputs["novels"]


def on_novels(setting: Setting, name: str, **how: Any) -> Model:
    return midpoint(setting.learned(name, **{"data": novels(setting), "steps": LONG, **how}))


def soft(setting: Setting, steps: int) -> Any:
    """Aligned by soft permutations of stream, units and heads, hardened."""
    if "soft" not in setting.aligned:
        how: dict[str, Any] = {
            "data": novels(setting),
            "start": setting.weights().solution.alignment,
        }
        how |= {"steps": setting.steps(steps), "target": "parents", **setting.size}
        recipe = with_options(get_recipe("soft-hardened"), **how)
        setting.aligned["soft"] = sm.align(setting.models[0], setting.models[1], recipe)
    return setting.aligned["soft"]


def after_soft(setting: Setting) -> Model:
    soft(setting, 1000)
    return on_novels(setting, "after soft", start="soft", permutations=True)


def untied(setting: Setting) -> Setting:
    """The same pair with a decoder of its own, whose input may permute apart from the stream."""
    if "untied" not in setting.aligned:
        models = [_untied(model, setting.folder / f"untied-{at}")
                  for at, model in enumerate(setting.models)]  # fmt: skip
        folder = setting.folder / "untied"
        made = Setting(setting.options, folder, models, setting.held_out, setting.inputs)
        setting.aligned["untied"] = made
    return setting.aligned["untied"]


def _untied(model: Model, folder: Path) -> Model:
    """Written with the decoder's tensors of its own, and a config that says so."""
    assert model.path is not None
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model.path / "config.json").read_text())
    tensors = {name: model.weights[name].clone() for name in model.weights}
    decoder = "cls.predictions.decoder"
    tensors[f"{decoder}.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors[f"{decoder}.bias"] = tensors["cls.predictions.bias"].clone()
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file(tensors, folder / "model.safetensors")
    for file in model.files:
        (folder / file.name).write_bytes(file.read_bytes())
    return sm.load(folder)


POST_NORM: Rows = {
    f"learned {LONG} on text, flips": lambda s: on_novels(s, "flips", permutations=True),
    f"learned {LONG} on text, flips, healed 300 on text": lambda s: s.healed(
        on_novels(s, "flips", permutations=True), data=novels(s)
    ),
    f"average healed {LONG} on text": lambda s: s.healed(averaged(s), LONG, data=novels(s)),
    f"A healed {LONG + 300} on text": lambda s: s.healed(s.models[0], LONG + 300, data=novels(s)),
    f"learned {LONG} on text, flips, untied": lambda s: on_novels(
        untied(s), "flips", permutations=True
    ),
    "soft permutations 1000 on text, hardened": lambda s: midpoint(soft(s, 1000)),
    f"soft permutations 1000, then learned {LONG} on text": after_soft,
    f"learned {LONG} on text": lambda s: on_novels(s, "text"),
    f"learned {LONG} on text, flips, lr x 3": lambda s: on_novels(
        s, "lr x 3", permutations=True, lr=3e-2
    ),
    f"learned {LONG} on text, flips, lr / 3": lambda s: on_novels(
        s, "lr / 3", permutations=True, lr=3e-3
    ),
    f"learned {LONG} on text, flips of a fifth": lambda s: on_novels(
        s, "many flips", permutations=True, flips=0.2
    ),
    f"learned {3 * LONG} on text, flips": lambda s: on_novels(
        s, "longer", permutations=True, steps=3 * LONG
    ),
}


# All pairs.


def pairs(options: argparse.Namespace, family: str) -> dict[str, list[Model]]:
    folders = sorted(options.zoo.glob(f"{family}-s*"))
    return {
        f"{a.name.split('-')[-1]}-{b.name.split('-')[-1]}": [sm.load(a), sm.load(b)]
        for a, b in combinations(folders, 2)
    }


def held_out(options: argparse.Namespace, models: list[Model], images: Images) -> dict[str, Task]:
    kind, tiny = task_of(models[0]), options.tiny
    if kind == "image":
        return {"test": images.test}
    rows, length = (8, 32) if tiny else (64, 256) if kind == "clm" else (256, 128)
    text = str(options.data / "books_valid.txt.xz")
    return {"novels": make_task(kind, text, models, max_samples=rows, length=length)}


def main() -> None:
    reading = parser(__doc__)
    reading.add_argument("--families", default="gpt2,llama,vit,bert")
    reading.add_argument("--post-norm", action="store_true")
    options = reading.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    cells, families = Cells(options), options.families.split(",")
    images: Any = Images(options) if "vit" in families else None
    for family in families:
        for name, models in pairs(options, family).items():
            folder = options.work / f"{family}-{name}"
            setting = Setting(options, folder, models, held_out(options, models, images))
            rows = {**ROWS, **(image_rows(images) if family == "vit" else {})}
            rows |= POST_NORM if options.post_norm and family == "bert" else {}
            run(cells, family, name, setting, rows)
    print(cells.table())


if __name__ == "__main__":
    main()
