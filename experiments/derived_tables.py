"""Derived tables beside ours, and merges of custom modules whose tables were derived.

`python experiments/derived_tables.py [--only tables|merges] [--out FILE]`. Tables: every model of
`lab/small_models.EVERY`, compared with its family's table coordinate by coordinate. Merges: a GPT,
an MLP-Mixer and a ViT with registers (tests/helpers/custom_modules.py), two seeds each, trained for
seconds on the digits and texts that come with the installation; loss of the parents, of the plain
average, and of merges on the test split, for several pairs: by weights alone, by activations and by
learning, the last two on batches of the training split (`derivation.task`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch.nn import functional

import symmerge as sm
from symmerge.derivation.comparing import shortfalls, surplus
from symmerge.errors import SymmergeError
from symmerge.evaluation.data.embedded import digits, python_docs
from symmerge.lab.small_models import EVERY, small_model
from symmerge.models.outputs import ANSWERS
from symmerge.symmetry.spec import Spec
from symmerge.verification.inputs import samples

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from custom_modules import Mixer, RegisterViT, TinyGPT

LETTERS, LENGTH, PAIRS = 64, 32, 3
BATCH, SEEN = 64, 16  # batches of training data that merges may look at
METHODS = {
    "average": "none",
    "weights": "weights",
    "activations": "activations",
    "learned": "learned",
}
WITH_DATA = {"activations", "learned"}
ROWS, TOKENS = 3, 11  # of the example inputs
EXPERTS = "_experts_implementation"


def table(name: str) -> dict[str, object]:
    """One family's table against the derived one."""
    module = small_model(name)
    module.config.use_cache = False
    # others choose experts by values, or multiply in float32 alone
    setattr(module.config, EXPERTS, "batched_mm")
    model = sm.load(module)
    known, start = model.spec, time.monotonic()
    derivation = sm.derive(module, inputs_of(model), **answer_of(known))
    return {
        "model_type": module.config.model_type,
        "seconds": round(time.monotonic() - start, 1),
        "missing": shortfalls(derivation.spec, known, derivation.unused),
        "larger": surplus(derivation.spec, known, derivation.unused),
        "change": derivation.together,
        "notes": derivation.notes,
    }


def inputs_of(model: sm.Model) -> dict[str, torch.Tensor]:
    """A few short inputs; texts keep their end."""
    inputs = samples(model, 0, long=False)[0].inputs
    short = {key: value[:ROWS] for key, value in inputs.items()}
    for key in [key for key in short if key.endswith("_ids")]:
        short[key] = torch.cat([short[key][:, : TOKENS - 1], short[key][:, -1:]], 1)
    return short


def answer_of(known: Spec) -> dict[str, Any]:
    """How to read the answer of a class that does not call it logits."""
    if known.pooled:
        return {"read": lambda out: [out.pooler_output[:, : known.pooled]]}
    if known.task in ANSWERS:
        return {"read": lambda out: [*ANSWERS[known.task](out).values()]}
    return {}


def table_or_refusal(name: str) -> dict[str, object]:
    """The same; of a module that cannot be traced, why not."""
    try:
        return table(name)
    except SymmergeError as error:
        return {"missing": str(error)}


def data_of(kind: type, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    if kind is not TinyGPT:
        images, labels = digits(split)
        return torch.tensor(images)[:, None], torch.tensor(labels)
    codes = torch.tensor([min(ord(one), 127) % LETTERS for one in python_docs(split)])
    rows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return rows[:, :-1], rows[:, 1:]


def loss_of(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy on a batch."""
    return cross_entropy(module(x), y)


def cross_entropy(answer: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all images or tokens."""
    return functional.cross_entropy(answer.flatten(0, -2), targets.flatten())


def trained(kind: type, seed: int, steps: int) -> torch.nn.Module:
    """A module trained from its own seed."""
    torch.manual_seed(seed)
    module, (x, y) = kind(), data_of(kind, "train")
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        loss_of(module, x[rows], y[rows]).backward()
        optimizer.step()
        schedule.step()
    return module.eval()


@torch.no_grad()
def merges(kind: type, steps: int) -> dict[str, object]:
    """Parents, average and merge of several pairs: loss on the test split."""
    x, y = (one[:512] for one in data_of(kind, "test"))
    batches = [one[: SEEN * BATCH].split(BATCH) for one in data_of(kind, "train")]
    derivation, rows = None, []
    for pair in range(PAIRS):
        with torch.enable_grad():
            modules = [trained(kind, 2 * pair + at, steps) for at in range(2)]
        derivation = derivation or sm.derive(modules[0], x[:3])
        models = [derivation.load(module) for module in modules]
        task = derivation.task(list(zip(*batches, strict=True)), loss=cross_entropy)
        losses = {"parents": mean(loss_of(module, x, y).item() for module in modules)}
        for name, method in METHODS.items():
            data = {"data": task} if name in WITH_DATA else {}
            with torch.enable_grad():
                merged = sm.merge(models, method=method, **data)
            losses[name] = loss_of(derivation.module(merged), x, y).item()
        rows.append({name: round(loss, 4) for name, loss in losses.items()})
        print(kind.__name__, rows[-1], flush=True)
    assert derivation is not None
    summary = {
        name: [round(mean(column), 3), round(stdev(column) / len(column) ** 0.5, 3)]
        for name in rows[0]
        for column in [[row[name] for row in rows]]
    }
    return {"pairs": rows, "mean and standard error": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("tables", "merges"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("experiments/results/derived-tables.json"))
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.only != "merges":
        results["tables"] = {name: table_or_refusal(name) for name in EVERY}
        missing = {
            name: one["missing"] for name, one in results["tables"].items() if one["missing"]
        }
        print(f"{len(EVERY) - len(missing)} of {len(EVERY)} as large as ours; {missing}")
    if options.only != "tables":
        results |= {"steps": options.steps, "merges": {}}
        for kind in (Mixer, RegisterViT, TinyGPT):
            results["merges"][kind.__name__] = merges(kind, options.steps)
            print(kind.__name__, results["merges"][kind.__name__], flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
