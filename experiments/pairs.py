"""Measure a table of methods over all pairs of models: barriers with standard errors.

    python experiments/pairs.py --models seed-0 seed-1 seed-2 --task clm --data test.txt \\
        --train train.txt --out FILE.json [--alignments DIR] \\
        --rows vanilla weights activations learned-permutations learned:steps=1000

FILE is rewritten after every cell; cells that it already has are skipped. A row is `vanilla` (the
plain average), `weights` or `activations` (ours), or a recipe's name with options of its solver
after a colon (`learned:steps=1000;lr=0.01`). `start=ROW` starts from the alignment of an earlier
row of the same pair; `data=self` learns from self-generated text. Narrow models are widened.
Barriers are the largest loss minus the mean of the ends, and above the line between them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import time
import traceback
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Cell = dict[str, Any]
OURS = {"weights": "symmerge"}


def parsed(row: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = row.partition(":")
    options = dict(item.split("=", 1) for item in rest.split(";") if item) if rest else {}
    return name, {key: _value(text) for key, text in options.items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def align_row(
    row: str, pair: list[Any], options: argparse.Namespace, earlier: dict[str, Any]
) -> Any:
    """Align a pair by the method of a row."""
    import symmerge as sm
    from symmerge.evaluation.tasks.base import subsample
    from symmerge.matching.learning.data import max_inputs
    from symmerge.matching.learning.start import START_SAMPLES
    from symmerge.matching.recipes import get_recipe, with_options

    name, settings = parsed(row)
    recipe = get_recipe(OURS.get(name, name))
    if recipe.needs_data:
        source = settings.pop("data", options.train)
        usual = max_inputs(options.task, source)
        task = sm.make_task(
            options.task,
            source,
            pair,
            max_samples=settings.pop("samples", options.samples or usual),
            seed=1,
            device=options.device,
        )
        settings["data"] = (
            subsample(task, START_SAMPLES[task.name]) if recipe.method == "activations" else task
        )
    if settings.get("start") in earlier:
        settings["start"] = earlier[settings["start"]].solution.alignment
    return sm.align(
        *pair,
        with_options(recipe, **settings, device=options.device),
        progress=lambda line: print("   ", line, flush=True) if options.verbose else None,
    )


def measure(
    row: str, pair: list[Any], held: Any, options: argparse.Namespace, earlier: dict[str, Any]
) -> Cell:
    import symmerge as sm

    began, more = time.time(), {}
    if row == "vanilla":
        a, b = pair
    else:
        aligned = earlier[row] = align_row(row, pair, options, earlier)
        a, b, settings = aligned.reference, aligned.aligned, aligned.solution.settings
        more = {name: settings[name] for name in ("learned", "chosen") if name in settings}
        more |= {
            "changed": sm.verify(pair[1], b).difference
        }  # largest change of B's logits: rounding only
        if options.alignments:
            options.alignments.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "-", f"{'-'.join(model.path.name for model in pair)}-{row}")
            aligned.solution.alignment.save(options.alignments / f"{name}.safetensors")
    seconds = time.time() - began
    curve = sm.barrier(a, b, held, options.points, device=options.device)
    losses = [point["loss"] for point in curve.points]
    return {
        "barrier_mean": curve.barrier_mean,
        "barrier_linear": curve.barrier_linear,
        "losses": losses,
        "seconds": seconds,
        **more,
    }


def table(results: list[Cell]) -> str:
    from symmerge.evaluation.estimates import Estimate
    from symmerge.report.phrases import estimate_text

    lines = [f"{'':40}{'over the mean':>20}{'over the line':>20}{'midpoint':>20}"]
    for row in dict.fromkeys(cell["row"] for cell in results):
        cells = [cell for cell in results if cell["row"] == row]
        midpoint = [
            cell["losses"][len(cell["losses"]) // 2] - (cell["losses"][0] + cell["losses"][-1]) / 2
            for cell in cells
        ]
        columns = [
            [cell["barrier_mean"] for cell in cells],
            [cell["barrier_linear"] for cell in cells],
            midpoint,
        ]
        lines.append(
            f"{row:40}" + "".join(f"{estimate_text(Estimate.of(column)):>20}" for column in columns)
        )
    return "\n".join(lines)


def main() -> None:
    import symmerge as sm

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", required=True, help="test data")
    parser.add_argument("--train", required=True, help="training data")
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alignments", type=Path, help="keep every alignment here")
    parser.add_argument("--samples", type=int, help="how many inputs to learn from, at most")
    parser.add_argument("--test-samples", type=int)
    parser.add_argument("--points", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--verbose", action="store_true", help="print the solvers' progress")
    options = parser.parse_args()
    models = [sm.load(folder) for folder in options.models]
    widest = max(models, key=lambda model: model.parameters)
    models = [
        model if model.parameters == widest.parameters else sm.widen(model, widest)
        for model in models
    ]
    held = sm.make_task(options.task, options.data, models[:2], samples=options.test_samples)
    results: list[Cell] = json.loads(options.out.read_text()) if options.out.exists() else []
    for pair in combinations(models, 2):
        earlier: dict[str, Any] = {}
        for row in options.rows:
            key = {
                "row": row,
                "pair": [model.path.name for model in pair],
                "points": options.points,
            }
            if any({name: cell[name] for name in key} == key for cell in results):
                continue
            try:
                results.append({**key, **measure(row, list(pair), held, options, earlier)})
            except Exception:
                traceback.print_exc()
                continue
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            cell = results[-1]
            print(
                " ".join(key["pair"]),
                row,
                f"over the mean {cell['barrier_mean']:.4f},",
                f"over the line {cell['barrier_linear']:.4f}, {cell['seconds']:.0f} s",
                flush=True,
            )
    print(table(results))


if __name__ == "__main__":
    main()
