"""Merges of models with different skills, healed, beside controls of equal cost.

    python experiments/skills.py --data DIR --work OUT/skills --out FILE.json [--device cuda]
        [--tokenizer FILE] [--zoo DIR] [--images FILE.npz] [--pairs 3] [--steps 1500]
        [--size 6,256] [--seconds S] [--tiny]

DIR holds books_train.txt.xz, books_valid.txt.xz and agnews/{train,test}.tsv; `--tokenizer` is a
tokenizers file (else one is trained). For every pair a GPT-2 is trained on novels and another, from
another seed, on news; then every row of ROWS is measured on held-out text of both. The novel models
of all pairs make pairs of equal data; `--zoo` adds the pairs NAME-s0, NAME-s1 of a folder. No row
sees data, but those that say so. FILE is rewritten after every cell and cells it has are skipped;
models stay in OUT. `--tiny` makes everything small, to try the script on a processor.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import symmerge as sm
from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.matching.efforts import effort_recipe, learning_rate
from symmerge.matching.learning.targets import Target
from symmerge.merging.healing import HealOptions, heal
from symmerge.models.model import Model
from symmerge.report.phrases import estimate_text
from symmerge.verification.modules import full_module

LEARNED_STEPS, HEAL_STEPS = 250, 300
TEXTS = {"learn": 512, "heal": 1024}  # rows of self-generated text
TRAINED, TRAIN_ROWS, TRAIN_LR = 8000, 32, 2e-3


@dataclass
class Setting:
    """What a pair is measured with: the models, text they write, held-out data."""

    options: argparse.Namespace
    folder: Path
    models: list[Model]
    held_out: dict[str, Task]
    texts: dict[str, Task] = field(default_factory=dict)
    alignments: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> dict[str, Any]:
        return {"batch_size": 4 if self.options.tiny else 12, "device": self.options.device}

    def steps(self, count: int) -> int:
        return max(2, count // 50) if self.options.tiny else count

    def text(self, use: str) -> Task:
        """Text that the parents sample, the same for every row."""
        if use not in self.texts:
            kind, rows = task_of(self.models[0]), 16 if self.options.tiny else TEXTS[use]
            if kind == "image":
                rows *= 4
            how = {"max_samples": rows, "seed": 0 if use == "learn" else 500}
            length = None if kind == "image" else 128 if kind == "mlm" else 256
            length = 32 if self.options.tiny and length else length
            how |= {"device": self.options.device, "length": length}
            self.texts[use] = make_task(kind, "self", self.models, **how)
        return self.texts[use]

    def stored(self, name: str, make: Callable[[], Model]) -> Model:
        """A model that is made once and kept, so that an interrupted run goes on."""
        folder = self.folder / name
        if not folder.exists():
            sm.save(make(), folder)
        return sm.load(folder)


# How a row's model is made.


def weights(setting: Setting) -> Model:
    return setting.stored("weights", lambda: sm.merge(_weights(setting)))


def _weights(setting: Setting) -> Any:
    if "weights" not in setting.alignments:
        a, b = setting.models
        recipe = effort_recipe("fast", a, device=setting.options.device)
        setting.alignments["weights"] = sm.align(a, b, recipe)
    return setting.alignments["weights"]


def learned(
    setting: Setting, target: Target, data: Task | None = None, steps: int = LEARNED_STEPS
) -> Model:
    """The midpoint after learned alignment from weights."""

    def make() -> Model:
        start, (a, b) = _weights(setting), setting.models
        method = sm.LearnedMatching(
            data=data or setting.text("learn"),
            start=start.solution.alignment,
            steps=setting.steps(steps),
            lr=learning_rate(a, task_of(a)),
            permutations=False,
            target=target,
            **setting.size,
        )
        return sm.merge(sm.align(a, b, method))

    name = f"learned-{target}{'-data' if data else ''}"
    return setting.stored(name if steps == LEARNED_STEPS else f"{name}-{steps}", make)


def healed(setting: Setting, model: Model, steps: int, target: Target, **more: Any) -> Model:
    """Distil the parents into all weights of a model."""
    data = more.pop("data", None) or setting.text("heal")
    how = {**setting.size, **more}
    options = HealOptions(steps=setting.steps(steps), data=data, target=target, **how)
    return heal(model, setting.models, options=options).model


def scratch(setting: Setting) -> Model:
    """A fresh model of the same size."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(99)
    config = GPT2Config(**{k: v for k, v in setting.models[0].config.items() if k != "dtype"})
    model = sm.load(AutoModelForCausalLM.from_config(config))
    from dataclasses import replace

    return replace(model, files=setting.models[0].files, path=setting.models[0].path)


Make = Callable[[Setting], Model]
COST = HEAL_STEPS + LEARNED_STEPS
ROWS: dict[str, Make] = {
    "A": lambda s: s.models[0],
    "B": lambda s: s.models[1],
    "average": lambda s: sm.average(*s.models),
    "weights": weights,
    "learned, parents": lambda s: learned(s, "parents"),
    "learned, author": lambda s: learned(s, "author"),
    "learned, bayes": lambda s: learned(s, "bayes"),
    "learned, healed 100": lambda s: healed(s, learned(s, "bayes"), 100, "bayes"),
    "learned, healed 300": lambda s: healed(s, learned(s, "bayes"), HEAL_STEPS, "bayes"),
    "learned, healed 300, target parents": lambda s: healed(
        s, learned(s, "parents"), HEAL_STEPS, "parents"
    ),
    "weights, healed 300": lambda s: healed(s, weights(s), HEAL_STEPS, "bayes"),
    f"control: A healed {COST}": lambda s: healed(s, s.models[0], COST, "bayes"),
    f"control: ensemble into A, {COST}": lambda s: healed(s, s.models[0], COST, "parents"),
    f"control: average healed {COST}": lambda s: healed(s, ROWS["average"](s), COST, "bayes"),
    f"control: fresh model, {COST}": lambda s: healed(s, scratch(s), COST, "bayes"),
}
MORE: dict[str, Make] = {
    "control: A healed 300": lambda s: healed(s, s.models[0], HEAL_STEPS, "bayes"),
    f"control: B healed {COST}": lambda s: healed(s, s.models[1], COST, "bayes"),
    "learned, healed 300, lr x 1/2": lambda s: healed(
        s, learned(s, "bayes"), HEAL_STEPS, "bayes", lr=5e-4
    ),
    "learned, healed 300, lr x 2": lambda s: healed(
        s, learned(s, "bayes"), HEAL_STEPS, "bayes", lr=2e-3
    ),
    "learned, bayes, 1000 steps": lambda s: learned(s, "bayes", steps=1000),
    "learned, bayes, 1000 steps, healed 300": lambda s: healed(
        s, learned(s, "bayes", steps=1000), HEAL_STEPS, "bayes"
    ),
}
SAME_DATA: dict[str, Make] = {
    **{name: ROWS[name] for name in ("A", "B", "average", "weights", "learned, parents")},
    "learned, healed 100": lambda s: healed(s, learned(s, "parents"), 100, "parents"),
    "learned, healed 300": lambda s: healed(s, learned(s, "parents"), HEAL_STEPS, "parents"),
    "control: A healed 300": lambda s: healed(s, s.models[0], HEAL_STEPS, "parents"),
    f"control: A healed {COST}": lambda s: healed(s, s.models[0], COST, "parents"),
    f"control: average healed {COST}": lambda s: healed(s, ROWS["average"](s), COST, "parents"),
}


# Data and parents.


def prepare(options: argparse.Namespace) -> dict[str, Path]:
    """Plain text of both domains, training and test."""
    options.work.mkdir(parents=True, exist_ok=True)
    files = {}
    for part, name in (("train", "books_train"), ("test", "books_valid")):
        files[f"novels-{part}"] = options.data / f"{name}.txt.xz"
        with open(options.data / "agnews" / f"{part}.tsv", encoding="utf-8") as lines:
            rows = [row[1:] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
        files[f"news-{part}"] = options.work / f"news-{part}.txt"
        files[f"news-{part}"].write_text("\n".join(" ".join(row) for row in rows[1:] if row))
    return files


def beginnings(files: dict[str, Path]) -> str:
    """As much of each training text as of the other."""
    with lzma.open(files["novels-train"], "rt", encoding="utf-8") as novels:
        return novels.read(4_000_000) + files["news-train"].read_text("utf-8")[:4_000_000]


def tokenizer_file(options: argparse.Namespace, files: dict[str, Path]) -> Path:
    if options.tokenizer:
        return options.tokenizer
    from tokenizers import ByteLevelBPETokenizer

    place = options.work / "tokens.json"
    if not place.exists():
        bpe, size = ByteLevelBPETokenizer(), 1024 if options.tiny else 4096
        text = beginnings(files)
        bpe.train_from_iterator([text], vocab_size=size, special_tokens=["<|endoftext|>"])
        bpe.save(str(place))
    return place


def train(options: argparse.Namespace, text: Path, tokens: Path, seed: int, folder: Path) -> Model:
    """A GPT-2 trained on a text: the loop that heals, with labels and from fresh weights."""
    if (folder / "done").exists():
        return sm.load(folder / "done")
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

    layers, width = (2, 32) if options.tiny else map(int, options.size.split(","))
    tokenizer = GPT2TokenizerFast(tokenizer_file=str(tokens))
    length = 32 if options.tiny else 256
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=length, n_embd=width, n_layer=layers,
        n_head=max(2, width // 64), tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    torch.manual_seed(seed)
    GPT2LMHeadModel(config).save_pretrained(folder / "begin")
    tokenizer.save_pretrained(folder / "begin")
    fresh = sm.load(folder / "begin")
    samples = 64 if options.tiny else TRAINED
    task = make_task("clm", str(text), [fresh], max_samples=samples, length=length, seed=seed)
    how = {"target": "labels", "held_out": 0.02, "seed": seed, "device": options.device}
    how |= {
        "batch_size": TRAIN_ROWS,
        "lr": TRAIN_LR,
        "steps": 20 if options.tiny else options.steps,
    }
    trained = heal(fresh, [], options=HealOptions(data=task, **how)).model  # type: ignore[arg-type]
    sm.save(trained, folder / "done")
    return sm.load(folder / "done")


# Measuring.


@torch.no_grad()
def losses(setting: Setting, model: Model) -> dict[str, float]:
    """Loss, and accuracy where there is one, on held-out data of each domain."""
    device = setting.options.device
    module, found = full_module(model, torch.float32).to(device), {}
    for name, task in setting.held_out.items():
        batches = ({k: v.to(device) for k, v in batch.items()} for batch in task.batches)
        metrics = task.summary(task.losses(module, batch) for batch in batches)
        found[name] = metrics["loss"]
        if "accuracy" in metrics:
            found[f"{name} accuracy"] = metrics["accuracy"]
    return found


@torch.no_grad()
def ensemble(setting: Setting) -> dict[str, float]:
    """The mean of the parents' probabilities."""
    device, found = setting.options.device, {}
    modules = [full_module(model, torch.float32).to(device) for model in setting.models]
    for name, task in setting.held_out.items():
        columns = []
        for batch in task.batches:
            batch = {key: value.to(device) for key, value in batch.items()}
            each = [task.readout.predict(module, batch) for module in modules]
            columns.append(task.readout.score(task.readout.ensemble(each), batch))
        metrics = task.summary(columns)
        found[name] = metrics["loss"]
        if "accuracy" in metrics:
            found[f"{name} accuracy"] = metrics["accuracy"]
    return found


def run(setting: Setting, group: str, pair: str, rows: dict[str, Make], cells: list[Any]) -> None:
    """Every row of a pair that is not there yet."""
    measured: dict[str, Callable[[], dict[str, float]]] = {
        name: lambda make=make: losses(setting, make(setting)) for name, make in rows.items()
    }
    measured["ensemble"] = lambda: ensemble(setting)
    for row, measure in measured.items():
        if any((c["group"], c["pair"], c["row"]) == (group, pair, row) for c in cells):
            continue
        if time.perf_counter() > setting.options.until:
            print(f"out of time before {group} {pair} {row}: the same command goes on", flush=True)
            return
        began = time.perf_counter()
        try:
            found = measure()
        except Exception:
            traceback.print_exc()
            continue
        domains = [value for name, value in found.items() if not name.endswith("accuracy")]
        cell = {"group": group, "pair": pair, "row": row, **found}
        cell |= {"mean": sum(domains) / len(domains)}
        cells.append(cell | {"seconds": round(time.perf_counter() - began, 2)})
        setting.options.out.write_text(json.dumps(cells, indent=1) + "\n")
        print(group, pair, f"{row:36}", {k: round(v, 3) for k, v in found.items()},
              f"mean {cell['mean']:.3f}", f"{cells[-1]['seconds']:.1f} s", flush=True)  # fmt: skip


def table(cells: list[Any]) -> str:
    """Mean and standard error over pairs, by group and row."""
    lines = []
    for group in dict.fromkeys(cell["group"] for cell in cells):
        mine = [cell for cell in cells if cell["group"] == group]
        names = [name for name in mine[0] if name not in ("group", "pair", "row", "seconds")]
        lines += ["", f"{group:38}" + "".join(f"{name:>22}" for name in names)]
        for row in dict.fromkeys(cell["row"] for cell in mine):
            of = [cell for cell in mine if cell["row"] == row]
            columns = [estimate_text(Estimate.of([cell[name] for cell in of])) for name in names]
            lines.append(f"{row:38}" + "".join(f"{column:>22}" for column in columns))
    return "\n".join(lines)


def zoo_pairs(options: argparse.Namespace, files: dict[str, Path]) -> dict[str, Setting]:
    """The pairs of a folder, with what they are measured on."""
    settings = {}
    for first in sorted(options.zoo.glob("*-s0")) if options.zoo else ():
        name = first.name.removesuffix("-s0")
        models = [sm.load(first), sm.load(first.with_name(f"{name}-s1"))]
        kind = task_of(models[0])
        data = options.images if kind == "image" else files["novels-test"]
        if data is None:
            continue
        samples = {"image": 1000, "mlm": 128}.get(kind, 64)
        task = make_task(kind, str(data), models, max_samples=8 if options.tiny else samples)
        held = {"held out": task}
        settings[name] = Setting(options, options.work / f"zoo-{name}", models, held)
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="models stay here")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--zoo", type=Path)
    parser.add_argument("--images", type=Path, help="CIFAR-10 as plain arrays, for ViTs of --zoo")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--size", default="6,256")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after this")
    options = parser.parse_args()
    options.until = time.perf_counter() + options.seconds
    files, cells = prepare(options), []
    if options.out.exists():
        cells = json.loads(options.out.read_text())
    tokens, settings = tokenizer_file(options, files), []
    held: dict[str, Task] = {}
    for number in range(options.pairs):
        models = []
        for at, domain in enumerate(("novels", "news")):
            seed = 2 * number + at
            folder = options.work / f"{domain}-{seed}"
            models.append(train(options, files[f"{domain}-train"], tokens, seed, folder))
        how = {"max_samples": 8 if options.tiny else 128, "length": 32 if options.tiny else 256}
        held = held or {
            name: make_task("clm", str(files[f"{name}-test"]), models, **how)
            for name in ("novels", "news")
        }
        setting = Setting(options, options.work / f"skills-{number}", models, held)
        both = {f"{name}, text of both": make for name, make in with_data(options, files).items()}
        run(setting, "skills", str(number), {**ROWS, **both}, cells)
        settings.append(setting)
    for name, setting in zoo_pairs(options, files).items():
        run(setting, f"zoo {name}", name, SAME_DATA, cells)
    same = {"novels": held["novels"]}
    for i, j in combinations(range(options.pairs), 2):
        models = [settings[number].models[0] for number in (i, j)]
        setting = Setting(options, options.work / f"same-{i}-{j}", models, same)
        run(setting, "same data", f"{i}-{j}", SAME_DATA, cells)
    for number, setting in enumerate(settings):
        run(setting, "skills", str(number), MORE, cells)
    print(table(cells))


def with_data(options: argparse.Namespace, files: dict[str, Path]) -> dict[str, Make]:
    """Rows that see unlabelled text of both domains."""

    def task(setting: Setting) -> Task:
        both = options.work / "both.txt"
        if not both.exists():
            both.write_text(beginnings(files), "utf-8")
        tiny = options.tiny
        how = {"max_samples": 32 if tiny else 1024, "length": 32 if tiny else 256}
        return make_task("clm", str(both), setting.models, seed=1, **how)

    return {
        "learned, bayes": lambda s: learned(s, "bayes", task(s)),
        "learned, healed 300": lambda s: healed(
            s, learned(s, "bayes", task(s)), HEAL_STEPS, "bayes", data=task(s)
        ),
    }


if __name__ == "__main__":
    main()
