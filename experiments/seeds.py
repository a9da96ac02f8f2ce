"""Merges of 2, 3, 5 and 8 seeds of the same data, learned together: loss and accuracy.

    python experiments/seeds.py --data DIR --work OUT --out FILE.json --kind vit|gpt2
        [--tokenizer FILE] [--device cuda] [--seconds S] [--tiny]

DIR holds cifar10.npz, or books_train.txt.xz, books_valid.txt.xz and agnews. ViTs learn on training
images without labels, GPT-2s on text that all of them sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from images import Images, trained
from measured import Cells, Values, measure, parser
from parents import GPT2, texts, tokenizer_file, tokens_of

import symmerge as sm
from symmerge.evaluation.tasks import Task, make_task
from symmerge.matching.efforts import effort_recipe, learning_rate
from symmerge.models.model import Model

COUNTS, STEPS, ROWS, GENERATED = (2, 3, 5, 8), 1000, {"clm": 12, "image": 64}, 1024


def together(models: Sequence[Model], data: Task, options: argparse.Namespace) -> Model:
    """The mean of all, matched by weights and then learned together."""
    start = effort_recipe("fast", models[0], device=options.device).matching
    method = sm.LearnedMatching(
        data=data,
        start=start,  # type: ignore[arg-type]
        steps=5 if options.tiny else STEPS,
        lr=learning_rate(models[0], data.name),
        permutations=False,
        target="parents",
        mixed=options.mixed,
        batch_size=4 if options.tiny else ROWS[data.name],
        device=options.device,
    )
    if len(models) == 2:
        return sm.average(*sm.align(models[0], models[1], method).models)
    return sm.merge(sm.align_many(list(models), method, rounds=1))


def count_cells(
    cells: Cells,
    options: argparse.Namespace,
    models: Sequence[Model],
    data: Callable[[], Task],
    held: dict[str, Task],
) -> None:
    """What so many seeds make: merged, together as an ensemble, averaged as they are."""
    count, device = len(models), options.device

    def one(model: Model) -> Values:
        return measure([model], held, device)

    for at, model in enumerate(models):
        cells.measure(options.kind, f"seed {at}", "alone", lambda model=model: one(model))
    how = {"group": options.kind, "pair": "all"}
    cells.measure(**how, row=f"{count} ensemble", make=lambda: measure(models, held, device))
    cells.measure(
        **how, row=f"{count} learned", make=lambda: one(together(models, data(), options))
    )
    cells.measure(
        **how, row=f"{count} averaged", make=lambda: one(sm.merge(list(models), method="none"))
    )


def vits(options: argparse.Namespace, cells: Cells, counts: Sequence[int]) -> None:
    images = Images(options)
    models: list[Model] = []
    for seed in range(counts[-1]):
        if cells.late:
            return
        models.append(trained(options, images, seed))
        if len(models) in counts:
            held = {"test": images.test}
            count_cells(cells, options, models, lambda: images.inputs("augmented"), held)


def gpt2s(options: argparse.Namespace, cells: Cells, counts: Sequence[int]) -> None:
    files = texts(options.data, options.work)
    size = 1024 if options.tiny else 4096
    options.tokenizer = tokenizer_file(options.tokenizer, files, options.work, size)
    how = GPT2(layers=2, width=32, heads=2, length=32, steps=20) if options.tiny else GPT2()
    characters = 200_000 if options.tiny else 20_000_000
    text = tokens_of(options.tokenizer, files["novels-train"], options.work, characters)
    models: list[Model] = []
    for seed in range(counts[-1]):
        if cells.late:
            return
        folder = options.work / f"gpt2-{seed}"
        models.append(how.train(text, options.tokenizer, seed, options.device, folder))
        if len(models) in counts:
            test = {"max_samples": 8 if options.tiny else 64, "length": how.length}
            held = {"novels": make_task("clm", str(files["novels-test"]), models, **test)}  # type: ignore[arg-type]
            count_cells(cells, options, models, lambda: sampled(options, models), held)


def sampled(options: argparse.Namespace, models: Sequence[Model]) -> Task:
    """Text that all of them write."""
    rows, length = (16, 32) if options.tiny else (GENERATED, 256)
    how = {"max_samples": rows, "length": length, "device": options.device}
    return make_task("clm", "self", models, **how)  # type: ignore[arg-type]


def main() -> None:
    reading = parser(__doc__)
    reading.add_argument("--kind", choices=("vit", "gpt2"), required=True)
    reading.add_argument("--tokenizer", type=Path)
    reading.add_argument("--epochs", type=float, default=20)
    reading.add_argument("--mixed", action="store_true", help="learn from mixed images")
    options = reading.parse_args()
    torch.set_num_threads(2)
    cells = Cells(options)
    kinds = {"vit": vits, "gpt2": gpt2s}
    kinds[options.kind](options, cells, COUNTS[:2] if options.tiny else COUNTS)
    print(cells.table())


if __name__ == "__main__":
    main()
