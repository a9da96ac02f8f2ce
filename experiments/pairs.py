"""A table of methods over every pair of some models: barriers with standard errors.

    python experiments/pairs.py --models seed-0 seed-1 seed-2 --task clm --data test.txt \\
        --train train.txt --out FILE.json [--alignments DIR] \\
        --rows vanilla weights activations learned-permutations learned:steps=1000

FILE is written anew after every cell; cells that are there are skipped. A row is `vanilla` (the
plain average), `weights` or `activations` (ours), or a recipe's name with options of its solver
behind a colon (`learned:steps=1000;lr=0.01`). `start=ROW` begins where an earlier row of the same
pair ended; `data=self` learns from self-generated text. Narrow models are widened. The barrier is
the highest point of the curve over the mean of its ends, and over the line between them.
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


def found_by(
    row: str, pair: list[Any], options: argparse.Namespace, earlier: dict[str, Any]
) -> Any:
    """The pair aligned as the row says."""
    import symmerge as sm
    from symmerge.evaluation.tasks.base import subsample
    from symmerge.matching.learned import FIRST_SAMPLES, most_inputs
    from symmerge.matching.recipes import get_recipe, with_options

    name, given = parsed(row)
    chosen = get_recipe(OURS.get(name, name))
    if chosen.needs_data:
        source = given.pop("data", options.train)
        usual = most_inputs(options.task, source)
        task = sm.make_task(
            options.task,
            source,
            pair,
            max_samples=given.pop("samples", options.samples or usual),
            seed=1,
            device=options.device,
        )
        given["data"] = (
            subsample(task, FIRST_SAMPLES[task.name]) if chosen.method == "activations" else task
        )
    if given.get("start") in earlier:
        given["start"] = earlier[given["start"]].solution.alignment
    return sm.align(
        *pair,
        with_options(chosen, **given, device=options.device),
        progress=lambda line: print("   ", line, flush=True) if options.talk else None,
    )


def measure(
    row: str, pair: list[Any], held: Any, options: argparse.Namespace, earlier: dict[str, Any]
) -> Cell:
    import symmerge as sm

    began, more = time.time(), {}
    if row == "vanilla":
        a, b = pair
    else:
        found = earlier[row] = found_by(row, pair, options, earlier)
        a, b, settings = found.reference, found.aligned, found.solution.settings
        more = {name: settings[name] for name in ("learned", "chosen") if name in settings}
        more |= {
            "changed": sm.verify(pair[1], b).difference
        }  # how far B's function moved: rounding
        if options.alignments:
            options.alignments.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "-", f"{'-'.join(model.path.name for model in pair)}-{row}")
            found.solution.alignment.save(options.alignments / f"{name}.safetensors")
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


def table(found: list[Cell]) -> str:
    from symmerge.report.phrases import estimate
    from symmerge.evaluation.estimates import Estimate

    lines = [f"{'':40}{'over the mean':>20}{'over the line':>20}{'middle':>20}"]
    for row in dict.fromkeys(cell["row"] for cell in found):
        cells = [cell for cell in found if cell["row"] == row]
        middle = [
            cell["losses"][len(cell["losses"]) // 2] - (cell["losses"][0] + cell["losses"][-1]) / 2
            for cell in cells
        ]
        columns = [
            [cell["barrier_mean"] for cell in cells],
            [cell["barrier_linear"] for cell in cells],
            middle,
        ]
        lines.append(
            f"{row:40}" + "".join(f"{estimate(Estimate.of(column)):>20}" for column in columns)
        )
    return "\n".join(lines)


def main() -> None:
    import symmerge as sm

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", required=True, help="what is measured on")
    parser.add_argument("--train", required=True, help="what is learned from")
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alignments", type=Path, help="keep every alignment here")
    parser.add_argument("--samples", type=int, help="most inputs that are learned from")
    parser.add_argument("--test-samples", type=int)
    parser.add_argument("--points", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--talk", action="store_true", help="print the solvers' own lines")
    options = parser.parse_args()
    models = [sm.load(folder) for folder in options.models]
    widest = max(models, key=lambda model: model.parameters)
    models = [
        model if model.parameters == widest.parameters else sm.widen(model, widest)
        for model in models
    ]
    held = sm.make_task(options.task, options.data, models[:2], samples=options.test_samples)
    found: list[Cell] = json.loads(options.out.read_text()) if options.out.exists() else []
    for pair in combinations(models, 2):
        earlier: dict[str, Any] = {}
        for row in options.rows:
            key = {
                "row": row,
                "pair": [model.path.name for model in pair],
                "points": options.points,
            }
            if any({name: cell[name] for name in key} == key for cell in found):
                continue
            try:
                found.append({**key, **measure(row, list(pair), held, options, earlier)})
            except Exception:
                traceback.print_exc()
                continue
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            cell = found[-1]
            print(
                " ".join(key["pair"]),
                row,
                f"over the mean {cell['barrier_mean']:.4f},",
                f"over the line {cell['barrier_linear']:.4f}, {cell['seconds']:.0f} s",
                flush=True,
            )
    print(table(found))


if __name__ == "__main__":
    main()
