"""Merges of ViTs on CIFAR-10: skills, and the accuracy of the midpoint.

    python experiments/images.py --data DIR --work OUT --out FILE.json [--zoo DIR]
        [--groups skills,accuracy] [--device cuda] [--pairs 3] [--seconds S] [--tiny]

DIR holds cifar10.npz (and load_data.py beside it, if it is packed). Loss and accuracy on the test
images; no label is used but where a row says so.

| group | parents |
|---|---|
| skills | each sees 80 % of five classes and 20 % of the others |
| accuracy | of all images; which answers are learned, on which inputs, where on the line |
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from measured import (
    STEPS,
    Answer,
    Cells,
    Rows,
    Setting,
    Values,
    averaged,
    hard,
    measure,
    midpoint,
    parser,
    product,
    run,
    tempered,
)
from parents import Split, ViT, augmented, cifar, image_task, mixed, normalized
from torch import Tensor

import symmerge as sm
from symmerge.evaluation.tasks import Task
from symmerge.models.model import Model

IMAGES, LONG, LONGER = 10_000, 1000, 4000


class Images:
    """CIFAR-10, what models are measured on, and unlabelled inputs to learn from."""

    def __init__(self, options: argparse.Namespace) -> None:
        tiny = options.tiny
        self.splits = cifar(options.data / "cifar10.npz", options.work, 600 if tiny else None)
        self.count = 200 if tiny else IMAGES
        images, labels = self.splits["test"]
        images, labels = images[: self.count], labels[: self.count]
        self.test = image_task("CIFAR-10, test", normalized(images), labels, 250)
        self.made: dict[str, Task] = {}

    def inputs(self, kind: str) -> Task:
        """Training images, without labels but for `labelled`."""
        if kind not in self.made:
            images, labels = self.splits["train"]
            images, labels = images[: self.count], labels[: self.count]
            self.made[kind] = {
                "plain": lambda: image_task("plain", normalized(images)),
                "labelled": lambda: image_task("labelled", augmented(images, 1), labels),
                "augmented": lambda: image_task("augmented", augmented(images, 1)),
                "augmented x 4": lambda: image_task("augmented x 4", augmented(images, 1, 4)),
                "mixed": lambda: image_task("mixed", mixed(augmented(images, 1, 2), 2)),
                "mixed x 4": lambda: image_task("mixed x 4", mixed(augmented(images, 1, 4), 2)),
            }[kind]()
        return self.made[kind]


def vit(options: argparse.Namespace, **more: Any) -> ViT:
    size = {"layers": 2, "width": 32, "heads": 2, "rows": 32} if options.tiny else {}
    return ViT(**{**more, **size, **({"epochs": 1} if options.tiny else {})})


# Skills.


def prior_free(inputs: Task, setting: Setting) -> Answer:
    """Each parent's answers divided by how often it names a class on the unlabelled images."""
    device = setting.options.device
    priors = [_prior(model, inputs, device) for model in setting.models]

    def answer(logits: Sequence[Tensor]) -> Tensor:
        apart = [each.softmax(-1) / prior for each, prior in zip(logits, priors, strict=True)]
        return torch.stack([each / each.sum(-1, keepdim=True) for each in apart]).mean(0)

    return answer


@torch.no_grad()
def _prior(model: Model, inputs: Task, device: str) -> Tensor:
    from symmerge.verification.modules import full_module

    module = full_module(model, torch.float32).to(device)
    each = [
        module(pixel_values=batch["pixel_values"].to(device))["logits"].softmax(-1).mean(0)
        for batch in inputs.batches
    ]
    return torch.stack(each).mean(0)


def skewed(split: Split, pair: int) -> tuple[Split, Split]:
    """80 % of five classes and 20 % of the others, and the rest."""
    images, labels = split
    order = torch.randperm(10, generator=torch.Generator().manual_seed(pair))
    first = torch.zeros(10, dtype=torch.bool).index_fill(0, order[:5], True)
    mine = torch.zeros(len(labels), dtype=torch.bool)
    for number in range(10):
        places = (labels == number).nonzero()[:, 0]
        mine[places[: int(len(places) * (0.8 if first[number] else 0.2))]] = True
    return (images[mine], labels[mine]), (images[~mine], labels[~mine])


def skills(options: argparse.Namespace, cells: Cells, images: Images) -> None:
    plain, crops = images.inputs("plain"), images.inputs("augmented")

    def learned(s: Setting, steps: int = LONG, data: Task = crops) -> Model:
        return midpoint(s.learned(f"{data.data} {steps}", data=data, steps=steps))

    def balanced(s: Setting) -> Model:
        answer = prior_free(plain, s)
        return midpoint(s.learned("balanced", data=crops, steps=LONG, answer=answer))

    rows: Rows = {
        "A": lambda s: s.models[0],
        "B": lambda s: s.models[1],
        "average": averaged,
        "weights": lambda s: midpoint(s.weights()),
        f"learned {LONG}, augmented": learned,
        f"learned {LONG}, augmented, healed 300": lambda s: s.healed(learned(s), data=crops),
        f"learned {LONG}, augmented, answers without priors": balanced,
        f"learned {STEPS}, plain": lambda s: learned(s, STEPS, plain),
        f"learned {LONGER}, augmented x 4": lambda s: learned(
            s, LONGER, images.inputs("augmented x 4")
        ),
        f"A healed {LONG + 300}": lambda s: s.healed(s.models[0], LONG + 300, data=crops),
        f"average healed {LONG + 300}": lambda s: s.healed(averaged(s), LONG + 300, data=crops),
        f"learned {LONG}, mixed": lambda s: learned(s, LONG, images.inputs("mixed")),
    }
    for number in range(options.pairs):
        if cells.late:
            return
        models = [
            vit(options).train(split, 20 + 2 * number + at, options.device, folder)
            for at, split in enumerate(skewed(images.splits["train"], number))
            for folder in [options.work / f"skewed-{number}-{at}"]
        ]
        folder, held = options.work / f"skewed-{number}", {"test": images.test}
        run(cells, "skills", str(number), Setting(options, folder, models, held), rows)


# Accuracy of the midpoint.


def accuracy_rows(images: Images) -> tuple[Rows, Rows]:
    """Answers, places on the line and inputs, one changed at a time; the most telling first."""

    def row(
        inputs: str = "augmented", steps: int = LONG, answer: Answer | None = None, **more: Any
    ) -> Callable[[Setting], Model]:
        name = f"{inputs} {steps} {answer and id(answer)} {more}"
        return lambda s: midpoint(
            s.learned(name, data=images.inputs(inputs), steps=steps, answer=answer, **more)
        )

    crops = images.inputs("augmented")
    base = row()
    first: Rows = {
        "A": lambda s: s.models[0],
        "B": lambda s: s.models[1],
        "average": averaged,
        "weights": lambda s: midpoint(s.weights()),
        f"{LONG}, mean of probabilities": base,
        f"{LONG}, mean of logits": row(answer=product()),
        f"{LONG}, hard": row(answer=hard),
        f"{LONG}, mixed x 4": row("mixed x 4"),
        f"{LONG}, augmented x 4": row("augmented x 4"),
        f"{LONG}, fixed t": row(sampler="fixed"),
        f"{LONG}, labels": row("labelled", target="labels"),
        f"{LONGER}, augmented x 4": row("augmented x 4", LONGER),
        f"{LONGER}, mixed x 4": row("mixed x 4", LONGER),
        f"{LONG}, healed 300": lambda s: s.healed(base(s), data=crops),
    }
    more: Rows = {
        f"{LONG}, temperature .5": row(answer=tempered(0.5)),
        f"{LONG}, temperature .7": row(answer=tempered(0.7)),
        f"{LONG}, temperature 2": row(answer=tempered(2.0)),
        f"{LONG}, mean of logits, temperature 2": row(answer=product(2.0)),
        f"{LONG}, plain": row("plain"),
        f"{LONG}, whole line": row(sampler="wide"),
        f"{LONG}, with permutations": row(permutations=True),
        f"{LONG}, lr x 3": row(lr=1e-2),
        f"{LONG}, lr / 3": row(lr=1e-3),
        f"{LONG}, batches of 256": row(batch_size=256),
        f"{LONG}, mixed x 4, healed 300 on mixed": lambda s: s.healed(
            row("mixed x 4")(s), data=images.inputs("mixed x 4")
        ),
        "A healed 1300": lambda s: s.healed(s.models[0], 1300, data=crops),
        "average healed 1300": lambda s: s.healed(averaged(s), 1300, data=crops),
    }
    return first, more


def on_training(images: Images, models: Sequence[Model], device: str) -> Values:
    """On what the parents were trained on: the gap to the test shows who is overfitted."""
    pixels, labels = (part[: images.count] for part in images.splits["train"])
    seen = image_task("training images", normalized(pixels), labels, 250)
    return measure(models, {"training": seen}, device)


def accuracy(options: argparse.Namespace, cells: Cells, images: Images) -> None:
    first, more = accuracy_rows(images)
    held, settings = {"test": images.test}, {}
    zoo = [options.zoo / f"vit-s{at}" for at in range(2)] if options.zoo else []
    if zoo and not options.tiny:
        settings["zoo"] = [sm.load(folder) for folder in zoo]
        run(cells, "accuracy", "zoo", Setting(options, options.work / "zoo", settings["zoo"], held),
            first)  # fmt: skip
    models: list[Model] = []
    for seed in range(options.pairs):
        if cells.late:
            return
        models.append(trained(options, images, seed))
    settings |= {f"{a}-{b}": [models[a], models[b]] for a, b in combinations(range(len(models)), 2)}
    made = {
        name: Setting(options, options.work / f"accuracy-{name}", pair, held)
        for name, pair in settings.items()
    }
    for row, make in {**first, **more}.items():  # each row for all pairs, so that none is alone
        for name, setting in made.items():
            run(cells, "accuracy", name, setting, {row: make})
    for name, setting in made.items():
        overfitted(cells, name, setting, images, rows=first)


def overfitted(cells: Cells, name: str, setting: Setting, images: Images, *, rows: Rows) -> None:
    """The same on training images."""
    device = setting.options.device
    for row in ("A", "B", f"{LONG}, mean of probabilities"):
        cells.measure(
            "accuracy on training images", name, row,
            lambda row=row: on_training(images, [rows[row](setting)], device),
        )  # fmt: skip


def trained(options: argparse.Namespace, images: Images, seed: int) -> Model:
    """A seed of all training images."""
    folder = options.work / f"vit-{seed}"
    how = vit(options, epochs=options.epochs)
    return how.train(images.splits["train"], seed, options.device, folder)


GROUPS = {"skills": skills, "accuracy": accuracy}


def main() -> None:
    reading = parser(__doc__)
    reading.add_argument("--groups", default=",".join(GROUPS))
    reading.add_argument("--epochs", type=float, default=40)
    options = reading.parse_args()
    torch.set_num_threads(2)
    cells, images = Cells(options), Images(options)
    for name in options.groups.split(","):
        GROUPS[name](options, cells, images)
    print(cells.table())


if __name__ == "__main__":
    main()
