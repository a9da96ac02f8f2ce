"""Carry fine-tunes between seeds: novels to news, every ordered pair, by every method.

    python experiments/transport.py --models seed-0 seed-1 seed-2 --recipe books-gpt2-small \\
        --old books_valid.txt.xz --train news/train.tsv --test news/test.tsv \\
        --work out/transport --out experiments/results/transport.json --device cuda

Folders that are missing are trained by --recipe (--data-dir: where its data are). Every model is
fine-tuned on --train (kept in --work). FILE is rewritten after every cell, and cells that it has
are skipped. `share` is (OTHER - carried) / (OTHER - OTHER fine-tuned itself) in loss on --test;
`old` is how much the loss on --old rises, beside that of TUNED over BASE (`old_tuned`).

| row | what is added to OTHER |
|---|---|
| unaligned, random | the change as it is; by a random symmetry |
| permutations | aligned by permutations alone, as published |
| weights, midpoint | by weights alone; learned for the midpoint. `:1.25` is the scale |
| fast, standard, best | `symmerge transport --effort`: learned for carrying, no data |
| learned-random, learned-unaligned | as standard, from no alignment: how much is only learned |
| learned-midpoint | as standard, from the alignment learned for the midpoint |
| masks | weights where they agree with OTHER's gradient on 32 labelled blocks; scaled on these |
| labelled | no change: OTHER fine-tuned on the same 32 blocks |
| distilled | no change: all weights of OTHER learn TUNED's answers to its own text |
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
import traceback
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = (
    "unaligned random permutations weights weights:1.25 weights:1.5 midpoint midpoint:2 fast"
    " standard best learned-random learned-unaligned learned-midpoint masks labelled distilled"
)
LABELLED = 32  # blocks


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


def module_of(model: Any, device: str) -> Any:
    from symmerge.verification.modules import full_module

    return full_module(model, torch.float32).to(device).eval()


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


@torch.no_grad()
def loss_of(model: Any, data: Tensor, device: str) -> float:
    module = module_of(model, device)
    losses = [float(module(input_ids=x, labels=x).loss) for x in data.to(device).split(16)]
    return sum(losses) / len(losses)


def trained(module: Any, data: Tensor, device: str, *, steps: int, lr: float, seed: int) -> Any:
    """AdamW on labelled blocks, half a cosine."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    generator, data = torch.Generator().manual_seed(seed), data.to(device)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    for step in range(steps):
        rate = min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * rate
        rows = torch.randint(len(data), (8,), generator=generator).to(device)
        with autocast(device):
            loss = module(input_ids=data[rows], labels=data[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


def written(module: Any, like: Any, folder: Path) -> None:
    """Save weights of a module beside the tokenizer of the model they came from."""
    import symmerge as sm
    from symmerge.checkpoints.provenance import HistoryStep
    from symmerge.checkpoints.weights import MemoryWeights

    named = dict(module.named_parameters(remove_duplicate=False))
    tensors = {name: named[name].detach().cpu().float() for name in like.spec.tensors}
    step = HistoryStep("fine-tune", "on news, by experiments/transport.py")
    sm.save(like.derive(MemoryWeights(tensors), step=step), folder)


class Cells:
    """Everything that the rows of one ordered pair share."""

    def __init__(self, base: Any, tuned: Any, other: Any, options: Any, news: Tensor) -> None:
        self.base, self.tuned, self.other, self.options = base, tuned, other, options
        self.labelled, self.passages = news[:LABELLED], {}

    def passage(self, name: str) -> Any:
        import symmerge as sm
        from symmerge.models.alignment import Alignment
        from symmerge.transporting.frames import Passage, framed

        if name not in self.passages:
            spec, generator = framed(self.base).spec, torch.Generator().manual_seed(5)
            if name in ("unaligned", "random"):
                kinds = {"unaligned": Alignment.identity, "random": Alignment.random}
                more = (generator,) if name == "random" else ()
                self.passages[name] = Passage(self.base, self.other, kinds[name](spec, *more), ())
            else:
                methods = {"weights": "fast", "midpoint": "standard"}
                method = sm.AlignOptions(**self._how(methods.get(name, name)))
                self.passages[name] = Passage.of(sm.align(self.base, self.other, method))
        return self.passages[name]

    def _how(self, name: str) -> dict[str, Any]:
        kind = "effort" if name in ("fast", "standard") else "recipe"
        return {kind: name, "device": self.options.device}

    def model(self, row: str) -> Any:
        from symmerge.transporting.carrying import carried

        name, _, scale = row.partition(":")
        if name in ("unaligned", "random", "permutations", "weights", "midpoint"):
            return carried(self.passage(name), self.tuned, float(scale or 1))
        special = {"masks": self._masks, "labelled": self._labelled, "distilled": self._distilled}
        return special[name]() if name in special else self._learned(name)

    def _learned(self, row: str) -> Any:
        from symmerge.transporting.carrying import carried
        from symmerge.transporting.learning import learn_passage

        start = row.removeprefix("learned-") if row.startswith("learned-") else "weights"
        effort = "standard" if row.startswith("learned-") else row
        how = {"effort": effort, "steps": self.options.steps, "device": self.options.device}
        result = learn_passage(self.passage(start), self.tuned, **how)
        return carried(result.passage, self.tuned, result.scales)

    def _masks(self) -> Any:
        """The change by weights, where a step along it agrees with OTHER's own gradient."""
        from dataclasses import replace

        from symmerge.checkpoints.weights import MemoryWeights
        from symmerge.transporting.carrying import carried

        device, moved = self.options.device, carried(self.passage("weights"), self.tuned)
        module = module_of(self.other, device)
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        for rows in self.labelled.to(device).split(8):
            module(input_ids=rows, labels=rows).loss.backward()
        named = dict(module.named_parameters(remove_duplicate=False))
        before = {name: self.other.weights[name] for name in self.other.spec.tensors}
        change = {name: moved.weights[name] - value for name, value in before.items()}
        kept = {name: d * (d * named[name].grad.cpu() < 0) for name, d in change.items()}
        tried = [  # every entry goes downhill: at full size, far beyond
            MemoryWeights({name: before[name] + scale * kept[name] for name in kept})
            for scale in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
        ]
        models = [replace(self.other, weights=weights) for weights in tried]
        return min(models, key=lambda model: loss_of(model, self.labelled, device))

    def _labelled(self) -> Any:
        device = self.options.device
        tried = [  # steps few enough not to learn 32 blocks by heart
            trained(module_of(self.other, device), self.labelled, device, steps=n, lr=lr, seed=1)
            for n, lr in ((20, 3e-4), (40, 5e-4))
        ]
        return min(map(self._of, tried), key=lambda m: loss_of(m, self.options.held, device))

    def _of(self, module: Any) -> Any:
        from dataclasses import replace

        from symmerge.checkpoints.weights import MemoryWeights

        named = dict(module.named_parameters(remove_duplicate=False))
        tensors = {name: named[name].detach().cpu() for name in self.other.spec.tensors}
        return replace(self.other, weights=MemoryWeights(tensors))

    def _distilled(self) -> Any:
        """All weights of OTHER learn TUNED's answers on the text and steps of `standard`."""
        from symmerge.matching.learned import LearnedMatching
        from symmerge.matching.learning.data import load_data
        from symmerge.matching.learning.distillation import distillation_loss
        from symmerge.transporting.learning import _amount

        device = self.options.device
        amount = _amount("standard", "clm", device)
        amount["steps"] = self.options.steps or amount["steps"]
        how = LearnedMatching(start="identity", **amount, device=device)
        data = load_data(how, [self.tuned], lambda line: None).train
        module = module_of(self.other, device)
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(module.parameters(), lr=5e-4, betas=(0.9, 0.98))
        generator = torch.Generator().manual_seed(0)
        for step in range(amount["steps"]):
            rate = min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / amount["steps"]))
            optimizer.param_groups[0]["lr"] = 5e-4 * rate
            number = int(torch.randint(len(data), (), generator=generator))
            distillation_loss(module, data[number]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return self._of(module)


def table(results: list[dict[str, Any]]) -> str:
    from symmerge.evaluation.estimates import Estimate
    from symmerge.report.phrases import estimate

    lines = [f"{'':24}{'share of the gain':>22}{'old rises by':>18}{'seconds':>10}"]
    for row in dict.fromkeys(cell["row"] for cell in results):
        cells = [cell for cell in results if cell["row"] == row]
        columns = [[cell[name] for cell in cells] for name in ("share", "old")]
        shown = [estimate(Estimate.of(column)) for column in columns]
        seconds = sum(cell["seconds"] for cell in cells) / len(cells)
        lines.append(f"{row:24}{shown[0]:>22}{shown[1]:>18}{seconds:>10.1f}")
    return "\n".join(lines)


def parsed() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--recipe", help="to train the models that are missing")
    parser.add_argument("--data-dir", type=Path, help="the data of --recipe")
    for name in ("old", "train", "test", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=ROWS.split())
    parser.add_argument("--steps", type=int, help="to learn, instead of those of the effort")
    parser.add_argument("--tuning-steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=99, help="ordered pairs, at most")
    parser.add_argument("--blocks", type=int, default=128, help="to measure on")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    import symmerge as sm
    from symmerge.lab.training.loop import train
    from symmerge.lab.training.recipes import training_recipe

    options = parsed()
    for seed, folder in enumerate(options.models):
        if not folder.exists():
            recipe = training_recipe(options.recipe)
            how = {"data": options.data_dir, "device": options.device}
            train(recipe, seed, folder, **how)
    models = [sm.load(folder) for folder in options.models]
    length = min(256, models[0].spec.sizes.get("position", 256))
    news = blocks_of(options.train, models[0], length)
    held = blocks_of(options.test, models[0], length, options.blocks)
    old, options.held = blocks_of(options.old, models[0], length, options.blocks), news[-16:]
    tuned = []
    for seed, model in enumerate(models):
        folder = options.work / f"{model.path.name}-news"
        if not folder.exists():
            options.work.mkdir(parents=True, exist_ok=True)
            how = {"steps": options.tuning_steps, "lr": 5e-4, "seed": seed}
            module = trained(module_of(model, options.device), news, options.device, **how)
            written(module, model, folder)
        tuned.append(sm.load(folder))
    both = {"new": held, "old": old}
    ends = [
        {name: loss_of(one, data, options.device) for name, data in both.items()}
        for one in (*models, *tuned)
    ]
    print("losses of models, then of fine-tunes:", json.dumps(ends), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.out.read_text()) if options.out.exists() else []
    for a, b in [*permutations(range(len(models)), 2)][: options.pairs]:
        cells = Cells(models[a], tuned[a], models[b], options, news)
        before, own, mine = ends[b], ends[len(models) + b], ends[len(models) + a]
        for row in options.rows:
            key = {"row": row, "from": models[a].path.name, "to": models[b].path.name}
            if any({name: cell[name] for name in key} == key for cell in results):
                continue
            began = time.time()
            try:
                model = cells.model(row)
                losses = {name: loss_of(model, data, options.device) for name, data in both.items()}
            except Exception:
                traceback.print_exc()
                continue
            cell = {
                **key,
                "share": (before["new"] - losses["new"]) / (before["new"] - own["new"]),
                "old": losses["old"] - before["old"],
                "old_tuned": mine["old"] - ends[a]["old"],
                "losses": {**losses, "other": before["new"], "own": own["new"]},
                "seconds": time.time() - began,
            }
            results.append(cell)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(
                *key.values(), f"share {cell['share']:.3f}", f"old +{cell['old']:.3f}", flush=True
            )
    print(table(results))


if __name__ == "__main__":
    main()
