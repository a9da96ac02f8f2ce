"""Merges of models with different skills, healed, beside controls of equal cost.

    python experiments/skills.py --data DIR --work OUT --out FILE.json --tokenizer FILE
        [--zoo DIR] [--device cuda] [--pairs 3] [--seconds S] [--tiny]

DIR holds books_train.txt.xz, books_valid.txt.xz and agnews/{train,test}.tsv. A GPT-2 of novels
(those of `--zoo` first) and one of news, from another seed, make a pair; every row is measured on
held-out text of both. No row sees data, but those that say so. `--tiny` tries it on a processor.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measured import HEAL_STEPS, STEPS, Cells, Rows, Setting, averaged, fresh, midpoint, parser, run
from parents import GPT2, both_texts, texts, tokenizer_file, tokens_of

import symmerge as sm
from symmerge.evaluation.tasks import Task, make_task
from symmerge.models.model import Model

COST, LONG = STEPS + HEAL_STEPS, 2000


def both(setting: Setting) -> Task:
    """Unlabelled training text of both domains."""
    if "both" not in setting.inputs:
        tiny, place = setting.options.tiny, setting.options.work / "both.txt"
        rows, length = (32, 32) if tiny else (2048, 256)
        how: dict[str, Any] = {"max_samples": rows, "length": length, "seed": 1}
        setting.inputs["both"] = make_task("clm", str(place), setting.models, **how)
    return setting.inputs["both"]


def learned(setting: Setting, target: str = "bayes") -> Model:
    return midpoint(setting.learned(f"learned {target}", target=target))


def long(setting: Setting) -> Model:
    how: dict[str, Any] = {"data": setting.made("long"), "steps": LONG, "target": "bayes"}
    return midpoint(setting.learned("long", **how))


def on_text(setting: Setting, steps: int = LONG) -> Model:
    how: dict[str, Any] = {"data": both(setting), "steps": steps, "target": "bayes"}
    return midpoint(setting.learned(f"text {steps}", **how))


def healed(setting: Setting, model: Model, steps: int = HEAL_STEPS, **more: Any) -> Model:
    return setting.healed(model, steps, **{"target": "bayes", **more})


FIRST: Rows = {
    "A": lambda s: s.models[0],
    "B": lambda s: s.models[1],
    "average": averaged,
    "weights": lambda s: midpoint(s.weights()),
    f"learned {STEPS}": learned,
    f"learned {STEPS}, healed 300": lambda s: healed(s, learned(s)),
    f"learned {LONG}, text of both": on_text,
    f"learned {LONG}": long,
    f"learned {LONG}, healed 300": lambda s: healed(s, long(s)),
    f"learned {LONG}, healed 300, text of both": lambda s: healed(s, on_text(s), data=both(s)),
}
CONTROLS: Rows = {
    f"A healed {COST}": lambda s: healed(s, s.models[0], COST),
    f"average healed {COST}": lambda s: healed(s, averaged(s), COST),
    f"weights healed {COST}": lambda s: healed(s, midpoint(s.weights()), COST),
    f"B healed {COST}": lambda s: healed(s, s.models[1], COST),
    f"A, the plain ensemble distilled {COST}": lambda s: healed(
        s, s.models[0], COST, target="parents"
    ),
    f"fresh model healed {COST}": lambda s: healed(s, fresh(s), COST),
    f"A healed {COST}, text of both": lambda s: healed(s, s.models[0], COST, data=both(s)),
    f"A trained {COST}, labels of both": lambda s: healed(
        s, s.models[0], COST, data=both(s), target="labels"
    ),
}
MORE: Rows = {
    f"learned {STEPS}, target parents": lambda s: learned(s, "parents"),
    f"learned {STEPS}, text of both": lambda s: on_text(s, STEPS),
    f"learned {STEPS}, healed 300, lr / 2": lambda s: healed(s, learned(s), lr=5e-4),
    f"learned {STEPS}, healed 300, lr x 2": lambda s: healed(s, learned(s), lr=2e-3),
}


def pair(options: argparse.Namespace, number: int, files: dict[str, Path]) -> list[Model]:
    """A model of novels and one of news, of different seeds."""
    gpt2 = GPT2(layers=2, width=32, heads=2, length=32, steps=20) if options.tiny else GPT2()
    characters = 200_000 if options.tiny else 20_000_000
    models = []
    for at, domain in enumerate(("novels", "news")):
        zoo = options.zoo and options.zoo / f"gpt2-s{number}"
        if domain == "novels" and zoo and zoo.exists() and not options.tiny:
            models.append(sm.load(zoo))
            continue
        seed = 100 + 2 * number + at
        tokens = tokens_of(options.tokenizer, files[f"{domain}-train"], options.work, characters)
        folder = options.work / f"{domain}-{seed}"
        models.append(gpt2.train(tokens, options.tokenizer, seed, options.device, folder))
    return models


def main() -> None:
    reading = parser(__doc__)
    reading.add_argument("--tokenizer", type=Path)
    options = reading.parse_args()
    torch.set_num_threads(2)
    files, cells, settings = texts(options.data, options.work), Cells(options), []
    both_texts(files, options.work)
    size = 1024 if options.tiny else 4096
    options.tokenizer = tokenizer_file(options.tokenizer, files, options.work, size)
    held: dict[str, Task] = {}
    for number in range(options.pairs):
        if cells.late:
            break
        models = pair(options, number, files)
        how: dict[str, Any] = {
            "max_samples": 8 if options.tiny else 64,
            "length": 32 if options.tiny else 256,
        }
        held = held or {
            name: make_task("clm", str(files[f"{name}-test"]), models, **how)
            for name in ("novels", "news")
        }
        settings.append(Setting(options, options.work / f"pair-{number}", models, held))
        run(cells, "skills", str(number), settings[-1], FIRST)
    for rows in (CONTROLS, MORE):
        for number, setting in enumerate(settings):
            run(cells, "skills", str(number), setting, rows)
    print(cells.table())


if __name__ == "__main__":
    main()
