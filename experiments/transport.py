"""Carry fine-tunes between seeds, by every method, beside the controls; one command per setting.

    python experiments/transport.py gpt2 --data-dir data --work out/work --out out/transport \\
        --device cuda

Settings, one after the other: gpt2, llama, gpt2-base (novels to news), vit (CIFAR-10 to corrupted
images), bert-agnews, bert-sst2 (masked models of novels; classifiers are carried to another seed,
with their head). Seeds that are missing in --work are trained, then fine-tuned, full and as a LoRA
of rank 8. Every cell is a file of its own, and cells that are there are skipped. --tiny: seconds on
a processor.

`share` is (OTHER - carried) / (OTHER - OTHER fine-tuned itself) in loss, `share_accuracy` the same
in accuracy, on held-out data; `old` is how much the loss of the old domain rises, `old_tuned` how
much that of TUNED does.

| row | what is added to OTHER |
|---|---|
| unaligned, random | the change as it is; by a random symmetry |
| permutations | aligned by permutations alone, as published |
| weights, midpoint | by weights alone; learned for the midpoint. `:1.25` is the scale |
| fast, standard, best | `symmerge transport --effort`: learned for carrying, no data |
| standard-data, best-data | the same, learned on inputs of the new domain, without labels |
| lora-... | an adapter of rank 8 by that method; share of OTHER's own adapter |
| learned-random, learned-unaligned | as standard, from no alignment: how much is only learned |
| learned-midpoint | as standard, from the alignment learned for the midpoint |
| masks | weights where they agree with OTHER's gradient on 32 labelled inputs; scaled on these |
| labelled | no change: OTHER fine-tuned on the same 32 |
| heal | no change: all weights of OTHER learn TUNED's answers on what it writes |
| ...+heal | the same from what was carried; of an adapter, only its factors learn |
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from transport_rows import Cells, own_low_rank
from transport_settings import SETTINGS, Setting, module_of, prepared, scores, trained

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="+", choices=SETTINGS)
    parser.add_argument("--data-dir", type=Path, required=True, help="data sets, by name")
    parser.add_argument("--work", type=Path, required=True, help="models are kept here")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the cells")
    parser.add_argument("--models", type=Path, nargs="+", help="trained seeds, instead of --seeds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train-steps", type=int, help="of a seed, instead of the recipe's")
    parser.add_argument("--rows", nargs="+", help="instead of the setting's")
    parser.add_argument("--steps", type=int, help="to learn, instead of those of the effort")
    parser.add_argument("--best-steps", type=int, default=2000, help="of the effort best")
    parser.add_argument("--heal-steps", type=int, default=300)
    parser.add_argument("--tuning-steps", type=int)
    parser.add_argument("--pairs", type=int, default=3, help="ordered pairs, at most")
    parser.add_argument("--jobs", type=int, default=3, help="processes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="small models on little data")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def in_parallel(jobs: int, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    if jobs < 2 or len(items) < 2:
        return [work(item) for item in items]
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(items))) as pool:
        return pool.map(work, items, chunksize=1)


def seed_of(setting: Setting, options: Any, data: Path, seed: int) -> Path:
    """Train a seed, unless it is there."""
    from symmerge.lab.training.loop import train

    folder = options.work / f"{setting.recipe}{'-tiny' if options.tiny else ''}-{seed}"
    if not folder.exists():
        recipe = setting.training(options.tiny, options.train_steps)
        how = {"data": data, "device": options.device}
        try:  # without the compiler, whose minute is worth it for longer runs only
            train(recipe, seed, folder, **how, acceleration="graph" if options.graph else None)
        except Exception:
            traceback.print_exc()
            train(recipe, seed, folder, **how)
        print("trained", folder.name, flush=True)
    return folder


def tuned_of(setting: Setting, options: Any, data: Path, item: tuple[int, Path]) -> dict[str, Any]:
    """Fine-tune a seed, and train its adapter; where they are, and their scores."""
    import symmerge as sm

    seed, folder = item
    model = sm.load(folder)
    name = f"{folder.name}-{setting.data or 'tuned'}"
    target, low = options.work / name, options.work / f"{name}-lora.pt"
    rows = setting.read(model, data, setting)
    if not target.exists():
        written(full_module(setting, model, rows, options, seed), model, target)
    tuned, result = sm.load(target), {"folder": target, "lora": low}
    result["tuned"] = scored(tuned, rows, options.device)
    if setting.classifier is None:
        result["base"] = scored(model, rows, options.device)
        if any(row.startswith("lora") for row in chosen_rows(setting, options)):
            if not low.exists():
                torch.save(own_low_rank(setting, model, rows["train"], options, seed), low)
            from symmerge.transporting.adapters import adapted

            adapter = torch.load(low, weights_only=False)
            result["adapted"] = scored(adapted(model, adapter), rows, options.device)
    shown = {name: value for name, value in result.items() if name not in ("folder", "lora")}
    print(folder.name, json.dumps(shown), flush=True)
    return result


def full_module(setting: Setting, model: Any, rows: Any, options: Any, seed: int) -> Any:
    """The fine-tuned module; of a classifier, from the same head in all seeds."""
    import transformers

    if setting.classifier is None:
        module = module_of(model, options.device)
    else:
        kind, classes = (
            getattr(transformers, setting.classifier),
            int(rows["train"]["labels"].max()),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = kind.from_pretrained(model.path, num_labels=classes + 1, dtype=torch.float32)
        module = module.to(options.device).eval()
    steps = options.tuning_steps or (15 if options.tiny else setting.steps)
    how = {"steps": steps, "lr": setting.lr, "batch": setting.batch, "seed": seed}
    return trained(module, rows["train"], options.device, **how)


def written(module: Any, like: Any, folder: Path) -> None:
    """A checkpoint of the module, with the tokenizer of the model it came from."""
    import shutil

    module.cpu().save_pretrained(folder)
    for file in like.files:
        shutil.copyfile(file, folder / file.name)


def scored(model: Any, rows: Any, device: str) -> dict[str, float]:
    """Loss and accuracy on the new domain, and the loss on the old one, if there is one."""
    old = {"old": scores(model, rows["old"], device)["loss"]} if "old" in rows else {}
    return {**scores(model, rows["new"], device), **old}


def chosen_rows(setting: Setting, options: Any) -> list[str]:
    return options.rows or setting.rows.split()


def pair_done(
    setting: Setting, options: Any, data: Path, ends: list[dict[str, Any]], pair: tuple[int, int]
) -> None:
    """All rows of one ordered pair."""
    import symmerge as sm

    a, b = pair
    base, other = (sm.load(options.models[at]) for at in pair)
    rows = setting.read(base, data, setting)
    adapter = None
    if ends[a]["lora"].exists():
        adapter = torch.load(ends[a]["lora"], weights_only=False)
    models = base, sm.load(ends[a]["folder"]), other
    cells = Cells(setting, models, rows, options, adapter)
    before = ends[b].get("base") or scored(cells.start(), rows, options.device)
    for row in chosen_rows(setting, options):
        file = options.out / options.setting / f"{a}-{b}-{row.replace(':', '-times-')}.json"
        if file.exists():
            continue
        began = time.time()
        try:
            after = scored(cells.model(row), rows, options.device)
        except Exception:
            traceback.print_exc()
            continue
        own = ends[b]["adapted" if row.startswith("lora") else "tuned"]
        cell = cell_of(row, pair, (before, after, own), ends[a], time.time() - began)
        file.write_text(json.dumps({"setting": options.setting, **cell}, indent=1) + "\n")
        shares = ", ".join(f"{name} {cell[name]:.3f}" for name in ("share", "share_accuracy"))
        print(f"{options.setting} {a} to {b}, {row}: {shares}, {cell['seconds']:.0f} s", flush=True)


def cell_of(
    row: str, pair: tuple[int, int], scores: tuple[Any, Any, Any], first: Any, seconds: float
) -> dict[str, Any]:
    before, after, own = scores

    def share(metric: str) -> float:
        gap = own[metric] - before[metric]
        return (after[metric] - before[metric]) / gap if gap else float("nan")

    cell = {"row": row, "from": pair[0], "to": pair[1], "share": share("loss")}
    cell |= {"share_accuracy": share("accuracy"), "other": before, "carried": after, "own": own}
    if "old" in before:
        tuned = first["adapted" if row.startswith("lora") else "tuned"]
        cell["old"] = after["old"] - before["old"]
        cell["old_tuned"] = tuned["old"] - first["base"]["old"]
    return {**cell, "seconds": seconds}


def table(cells: list[dict[str, Any]]) -> str:
    from symmerge.evaluation.estimates import Estimate
    from symmerge.report.phrases import estimate_text

    titles = {"share": "share of the gain", "share_accuracy": "in accuracy", "old": "old rises by"}
    titles["old_tuned"] = "TUNED's old"
    lines = [f"{'':20}" + "".join(f"{title:>20}" for title in titles.values()) + f"{'s':>7}"]
    for row in dict.fromkeys(cell["row"] for cell in cells):
        chosen = [cell for cell in cells if cell["row"] == row]
        columns = [[cell[name] for cell in chosen if name in cell] for name in titles]
        shown = [estimate_text(Estimate.of(column)) if column else "-" for column in columns]
        seconds = sum(cell["seconds"] for cell in chosen) / len(chosen)
        lines.append(f"{row:20}" + "".join(f"{one:>20}" for one in shown) + f"{seconds:>7.0f}")
    return "\n".join(lines)


def seeds_of(setting: Setting, options: Any, data: Path) -> list[Path]:
    from symmerge.lab.training.splits import load_splits

    # Prepared once (tokens, pictures): the seeds read it.
    load_splits(setting.training(options.tiny, options.train_steps), data)
    make = partial(seed_of, setting, options, data)
    return in_parallel(options.jobs, make, range(options.seeds))


def main() -> None:
    options = parsed()
    options.graph = options.device != "cpu"
    if options.tiny:
        options.out, options.steps = options.out / "tiny", options.steps or 3
        options.heal_steps = 3
    for name in options.settings:
        values = {**vars(options), "setting": name, "work": options.work / SETTINGS[name].recipe}
        run(SETTINGS[name], argparse.Namespace(**values))


def run(setting: Setting, options: Any) -> None:
    """One setting: seeds, fine-tunes, then all ordered pairs beside one another."""
    (options.out / options.setting).mkdir(parents=True, exist_ok=True)
    data = prepared(setting, options)
    options.models = options.models or seeds_of(setting, options, data)
    tune = partial(tuned_of, setting, options, data)
    ends = in_parallel(options.jobs, tune, list(enumerate(options.models)))
    pairs = ordered(len(options.models))[: options.pairs]
    in_parallel(options.jobs, partial(pair_done, setting, options, data, ends), pairs)
    files = sorted((options.out / options.setting).glob("*.json"))
    cells = [json.loads(file.read_text()) for file in files]
    order = chosen_rows(setting, options)
    cells = sorted(cells, key=lambda cell: order.index(cell["row"]) if cell["row"] in order else 99)
    (options.out / f"{options.setting}.json").write_text(json.dumps(cells, indent=1) + "\n")
    print(table(cells))


def ordered(count: int) -> list[tuple[int, int]]:
    """Ordered pairs, those first in which every model gives and takes once: 0-1, 1-2, 2-0."""
    return sorted(permutations(range(count), 2), key=lambda pair: (pair[1] - pair[0]) % count)


if __name__ == "__main__":
    main()
