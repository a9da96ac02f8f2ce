"""Train small pairs of the new families on embedded data, and measure what alignment gives.

    python experiments/new_families.py [--families mixtral gemma3 ...] [--pairs 3] \\
        [--rows fast standard learned] [--device cuda] [--models DIR] [--out FILE.json] \\
        [--jobs 8] [--tiny]

Each family is one recipe of the laboratory's kind: Python's documentation for language models,
handwritten digits for images (with their names for CLIP, see `contrastive.py`). Pair p is made of
seeds 2p and 2p + 1. Rows are `averaging`, the efforts `fast` and `standard` (no data), and
`learned` (on training data). Barriers are the largest loss on the line, minus the mean of the ends,
on held-out data. FILE is rewritten after every cell,
and cells that it already has are skipped. `planted` says, for mixtures of experts, how many experts
a permuted copy (random elements of all groups) is given back to their places by weights alone.
With `--jobs`, so many families at a time run in processes of their own, and FILE is put together
from theirs. `--tiny` takes a few steps of everything: it shows that the script runs, no more.
On two loaded cores a model takes about a minute; on an H200 all takes a few.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import contrastive

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY, LENGTH, POINTS = 1024, 64, 11
TINY_STEPS = 2
BODY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    **BODY,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
GATED = {**TEXT, "num_key_value_heads": 2, "intermediate_size": 192}
DROPLESS = {"dropout": 0.0, "attention_dropout": 0.0}
IMAGE = {**BODY, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
# family -> class, config, task
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": (
        "MixtralForCausalLM",
        {**GATED, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
        "clm",
    ),
    "gemma3": ("Gemma3ForCausalLM", {**GATED, "head_dim": 16, "sliding_window": 32}, "clm"),
    "qwen3": ("Qwen3ForCausalLM", {**GATED, "head_dim": 16}, "clm"),
    "olmo2": ("Olmo2ForCausalLM", GATED, "clm"),
    "opt": (
        "OPTForCausalLM",
        {**TEXT, "ffn_dim": 256, "word_embed_proj_dim": 64, **DROPLESS},
        "clm",
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 256,
            "vocab_size": 512,
            "max_position_embeddings": 16,
            **DROPLESS,
        },
        "mlm",
    ),
    "clip": ("CLIPModel", contrastive.CONFIG, "pairs"),
    "bloom": (
        "BloomForCausalLM",
        {
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        },
        "clm",
    ),
    "dinov2": ("Dinov2ForImageClassification", {**IMAGE, "mlp_ratio": 4}, "image"),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_max_distance": LENGTH,
            "n_positions": LENGTH,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
        "seq2seq",
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            **{f"{stack}_layers": 2 for stack in ("encoder", "decoder")},
            **{f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")},
            **{f"{stack}_ffn_dim": 256 for stack in ("encoder", "decoder")},
            "max_position_embeddings": LENGTH,
            "decoder_start_token_id": 0,
            "dropout": 0.0,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        },
        "seq2seq",
    ),
}
DATA = {
    **dict.fromkeys(("clm", "seq2seq", "mlm"), "python-docs"),
    **dict.fromkeys(("image", "pairs"), "digits"),
}
SAMPLES = {"clm": 200, "seq2seq": 200, "mlm": 1200, "image": 1200, "pairs": 1200}
# A decoder that answers half a block sees half as many tokens of it.
SCHEDULES = {"seq2seq": {"steps": 1500, "batch_size": 32, "warmup": 100}}
Cell = dict[str, Any]


def recipe_of(family: str, tiny: bool = False) -> Any:
    """How a model of a family is trained."""
    from symmerge.lab.training.embedded import EMBEDDED
    from symmerge.lab.training.recipe import TrainingRecipe

    architecture, config, task = FAMILIES[family]
    like = {"mlm": "bert-docs", "image": "vit-digits"}.get(task, "llama-docs")
    schedule = replace(EMBEDDED[like].schedule, **SCHEDULES.get(task, {}))
    if tiny:
        schedule = replace(schedule, steps=8, warmup=2)
    return TrainingRecipe(
        about=f"a small {family}",
        architecture=architecture,
        config=config,
        task=task,  # type: ignore[arg-type]
        data=DATA[task],
        schedule=schedule,
        length=None if task == "image" else 16 if task == "mlm" else LENGTH,
    )


def parent(family: str, seed: int, options: argparse.Namespace) -> Path:
    """The folder of a trained model; one that is there is used again."""
    from symmerge.lab.training.loop import train, trained

    if FAMILIES[family][2] == "pairs":
        steps = 8 if options.tiny else 600
        folder = options.models / f"{family}-{seed}"
        return contrastive.train(folder, seed, steps=steps, device=options.device)
    recipe, folder = recipe_of(family, options.tiny), options.models / f"{family}-{seed}"
    if trained(recipe, seed, folder):
        return folder
    # six models of a kind are trained before a compiler would be done
    how = {"device": options.device, "acceleration": "eager", "overwrite": folder.exists()}
    return train(recipe, seed, folder, **how)


def aligned(row: str, a: Any, b: Any, family: str, options: argparse.Namespace) -> Any:
    """The pair aligned by the method of a row."""
    import symmerge as sm
    from symmerge.matching.recipes import RECIPES, with_options

    steps = TINY_STEPS if options.tiny else None
    if row != "learned":
        chosen = sm.AlignOptions(effort=row, device=options.device)
        return sm.align(a, b, replace(chosen, steps=None if row == "fast" else steps))
    _, _, task = FAMILIES[family]
    data = task_for(task, f"{DATA[task]}:train", a, b, SAMPLES[task])
    method = with_options(
        RECIPES["learned"], steps=steps or options.steps, device=options.device, data=data
    )
    return sm.align(a, b, method)


def task_for(task: str, data: str, a: Any, b: Any, max_samples: int | None = None) -> Any:
    """The task of a family, on a part of its data."""
    from symmerge.evaluation.tasks import make_task

    if task == "pairs":
        return contrastive.task(data, max_samples)
    return make_task(task, data, [a, b], max_samples=max_samples)


def measured(family: str, pair: int, row: str, options: argparse.Namespace) -> Cell:
    """One cell: the barrier between two models, aligned by one method."""
    import symmerge as sm
    from symmerge.evaluation.lines import LineMethod, measure_lines

    a, b = (sm.load(parent(family, 2 * pair + which, options)) for which in (0, 1))
    _, _, task = FAMILIES[family]
    test, start = task_for(task, DATA[task], a, b), time.perf_counter()
    first, second = a, b
    if row != "averaging":
        found = aligned(row, a, b, family, options)
        first, second = found.reference, found.aligned
    seconds = time.perf_counter() - start
    line = LineMethod(row, row, first, second)
    points = 3 if options.tiny else POINTS
    curve = measure_lines(a, b, [line], test, points=points, device=options.device).methods[0]
    losses = [point.metrics["loss"] for point in curve.points]
    return {
        "barrier": curve.barrier_mean,
        "ends": [losses[0], losses[-1]],
        "midpoint": losses[len(losses) // 2],
        "seconds": round(seconds, 1),
    }


def planted(family: str, options: argparse.Namespace) -> Cell:
    """Whether weights alone give the experts of a moved copy back to their places."""
    import torch

    import symmerge as sm
    from symmerge.models.orbit import random_member

    model = sm.load(parent(family, 0, options))
    moved_by, moved = random_member(model, 1)
    found = sm.align(model, moved, sm.AlignOptions(effort="fast", device=options.device))
    spaces = [name for name in model.spec.spaces if name.startswith("expert.")]
    right = [
        torch.equal(
            found.solution.alignment[name]["index"][moved_by[name]["index"]],
            torch.arange(model.spec.sizes[name]),
        )
        or torch.equal(
            moved_by[name]["index"][found.solution.alignment[name]["index"]],
            torch.arange(model.spec.sizes[name]),
        )
        for name in spaces
    ]
    moved_experts = sum(
        int((moved_by[name]["index"] != torch.arange(model.spec.sizes[name])).sum())
        for name in spaces
    )
    verdict = sm.verify(found.reference, found.aligned)
    return {
        "layers": len(spaces),
        "recovered": sum(right),
        "experts moved": moved_experts,
        "weights apart": distance(found.reference, found.aligned),
        "same function": verdict.same,
    }


def distance(a: Any, b: Any) -> float:
    """How far the weights of two models are apart, relative to the first."""
    apart = sum((a.weights[name] - b.weights[name]).square().sum().item() for name in a.weights)
    return (apart / sum(a.weights[name].square().sum().item() for name in a.weights)) ** 0.5


def summary(cells: dict[str, Cell]) -> dict[str, Cell]:
    """Mean and standard error of each family's rows, and their share of averaging's barrier."""
    from statistics import mean, stdev

    rows: dict[str, dict[str, dict[str, float]]] = {}
    for key, cell in cells.items():
        family, pair, row = key.split("/")
        if "barrier" in cell:
            rows.setdefault(family, {}).setdefault(row, {})[pair] = cell["barrier"]
    table: dict[str, Cell] = {}
    for family, by_row in rows.items():
        plain = by_row.get("averaging", {})
        table[family] = {
            row: {
                "barrier": round(mean(found.values()), 4),
                "error": round(stdev(found.values()) / len(found) ** 0.5, 4)
                if len(found) > 1
                else None,
                "pairs": len(found),
                "share": round(mean(found[p] / plain[p] for p in found if p in plain), 3)
                if found.keys() & plain.keys()
                else None,
            }
            for row, found in by_row.items()
        }
    return table


def main() -> None:
    options = arguments()
    options.models.mkdir(parents=True, exist_ok=True)
    if options.jobs > 1:
        together(options)
        return
    state = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    cells: dict[str, Cell] = state.get("cells", {})
    jobs = [
        (family, pair, row)
        for pair in range(options.pairs)
        for family in options.families
        for row in ("averaging", *options.rows, *(("planted",) if family == "mixtral" else ()))
        if row != "planted" or pair == 0
    ]
    for family, pair, row in jobs:
        key = f"{family}/{pair}/{row}"
        if key in cells and "error" not in cells[key]:
            continue
        try:
            cells[key] = (
                planted(family, options)
                if row == "planted"
                else measured(family, pair, row, options)
            )
        except Exception as error:  # one cell that fails is told, and the others go on
            cells[key] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(key, cells[key], flush=True)
        write(options, cells)


def together(options: argparse.Namespace) -> None:
    """Every family in a process of its own, `jobs` at a time; their files become one."""

    def run(family: str) -> Path:
        part = options.out.with_suffix(f".{family}.json")
        command = [sys.executable, __file__, "--families", family, "--out", str(part)]
        command += ["--pairs", str(options.pairs), "--steps", str(options.steps)]
        command += ["--device", options.device, "--models", str(options.models)]
        command += [*(["--tiny"] if options.tiny else []), "--rows", *options.rows]
        subprocess.run(command, check=False)
        return part

    with ThreadPoolExecutor(options.jobs) as pool:
        parts = [part for part in pool.map(run, options.families) if part.exists()]
    state = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    cells: dict[str, Cell] = state.get("cells", {})
    for part in parts:
        cells |= json.loads(part.read_text("utf-8"))["cells"]
    write(options, cells)


def write(options: argparse.Namespace, cells: dict[str, Cell]) -> None:
    """All cells, and what they say of each family."""
    state = {"settings": settings(options), "summary": summary(cells), "cells": cells}
    beside = options.out.with_suffix(".new")
    beside.write_text(json.dumps(state, indent=1) + "\n", "utf-8")
    beside.replace(options.out)


def settings(options: argparse.Namespace) -> Cell:
    return {"points": POINTS, "learned steps": options.steps, "length": LENGTH, "data": DATA}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    results = Path(__file__).parent / "results" / "new-families.json"
    parser.add_argument("--families", nargs="+", default=[*FAMILIES], choices=[*FAMILIES])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=["fast", "standard", "learned"])
    parser.add_argument("--steps", type=int, default=200, help="of learning on training text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="families side by side")
    parser.add_argument("--tiny", action="store_true", help="a few steps of everything")
    parser.add_argument("--models", type=Path, default=Path("new-families-models"))
    parser.add_argument("--out", type=Path, default=results)
    return parser.parse_args()


if __name__ == "__main__":
    main()
