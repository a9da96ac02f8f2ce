"""How much data activation matching needs: the barrier of every pair of models, calibrated on more and more samples. Writes amount.json and a
picture, anew after every pair.

python experiments/amount.py --models seed-0 seed-1 [...] --task mlm --data held-out.txt --calibration train.txt --out DIR
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import combinations
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    import symmerge as sm
    from symmerge.matching.recipes import RECIPES, with_options
    from symmerge.report.figures import amount

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", required=True, help="what is measured on")
    parser.add_argument("--calibration", required=True, help="what methods look at")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[12, 48, 200])
    parser.add_argument("--methods", nargs="+", default=["correlation", "activations"], choices=RECIPES)
    parser.add_argument("--points", type=int, default=5)
    options = parser.parse_args()
    pairs = list(combinations([sm.load(folder) for folder in options.models], 2))
    found = {name: {count: [] for count in options.samples} for name in options.methods}
    options.out.mkdir(parents=True, exist_ok=True)
    for pair in pairs:
        held = sm.make_task(options.task, options.data, pair)
        for count in options.samples:
            seen = sm.make_task(options.task, options.calibration, pair, samples=count, seed=1)
            for name in options.methods:
                aligned = sm.align(*pair, with_options(RECIPES[name], data=seen))
                barrier = sm.barrier(aligned.reference, aligned.aligned, held, options.points).barrier_mean
                found[name][count].append(barrier)
                print(*(model.where for model in pair), name, count, f"{barrier:.3f}", flush=True)
        rows = [{"name": name, "label": name, "points": [{"samples": count, "barriers": values} for count, values in by.items()]} for name, by in found.items()]
        record = {"schema": "symmerge.amount/1", "unit": "samples", "methods": rows}
        (options.out / "amount.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "amount.svg").write_text(amount(record), "utf-8")


if __name__ == "__main__":
    main()
