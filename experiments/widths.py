"""A narrow model merged with a wide one: both trained here, the narrow one widened, then averaged as it is ("padded"), matched by weights, and learned.

python experiments/widths.py --out DIR [--recipes vit-digits gpt2-docs] [--seeds 0 1] [--units zero split] [--steps 100] [--points 11]

DIR keeps the trained models; widths.json in it has every loss. Barriers are of held-out data; learning looks at training data only.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# the same depth, half as wide again: six heads of the same size, and half as many units again
WIDER = {
    "vit-digits": {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 384},
    "gpt2-docs": {"n_embd": 96, "n_head": 6, "n_inner": 384},
    "llama-docs": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 288},
}
SAMPLERS = ("narrow", "wide")


def parent(recipe: Any, seed: int, folder: Path) -> Any:
    import symmerge as sm
    from symmerge.zoo.train import METRICS, train, trained

    if not trained(recipe, seed, folder):
        train(recipe, seed, folder, overwrite=(folder / METRICS).exists())
    return sm.load(folder)


def lines(wide: Any, narrow: Any, task: str, data: str, units: Any, steps: int) -> Iterator[tuple[str, Any, Any]]:
    """Every way to bring the two together: its name, and the two ends of its line."""
    import symmerge as sm
    from symmerge.widen import widen

    widened = widen(narrow, wide, units=units)
    verdict = sm.verify(narrow, widened)
    assert verdict.same, verdict
    yield "padded", sm.canonicalize(wide, ("fold",)), widened
    seen = sm.make_task(task, f"{data}:train", [wide, narrow])
    solvers = {"weights": sm.WeightMatching(), "activations": sm.LearnedMatching.activations(seen)}
    solvers |= {f"learned, {sampler}": sm.LearnedMatching(data=seen, steps=steps, sampler=sampler) for sampler in SAMPLERS}
    for name, solver in solvers.items():
        found = sm.align(wide, widened, solver)
        yield name, found.reference, found.aligned


def main() -> None:
    import symmerge as sm
    from symmerge.zoo.recipes import training_recipe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=["vit-digits", "gpt2-docs"], choices=WIDER)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the narrow model; the wide one has the next")
    parser.add_argument("--units", nargs="+", default=["zero", "split"], choices=["zero", "split"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--points", type=int, default=11)
    options = parser.parse_args()
    rows = []
    for name, seed in ((name, seed) for name in options.recipes for seed in options.seeds):
        recipe = training_recipe(name)
        wider = replace(recipe, config={**recipe.config, **WIDER[name]})
        narrow = parent(recipe, seed, options.out / f"{name}-narrow-{seed}")
        wide = parent(wider, seed + 1, options.out / f"{name}-wide-{seed + 1}")
        task = sm.make_task(recipe.task, recipe.data, [wide, narrow])
        for units in options.units:
            padded = None
            for method, a, b in lines(wide, narrow, recipe.task, recipe.data, units, options.steps):
                curve = sm.barrier(a, b, task, options.points)
                middle = curve.points[len(curve.points) // 2]["loss"] - sum(curve.ends) / 2
                padded = middle if padded is None else padded
                losses = [point["loss"] for point in curve.points]
                rows.append({"recipe": name, "seed": seed, "units": units, "method": method, "middle": middle, "barrier": curve.barrier_mean, "losses": losses})
                ends = "wide {:.3f} narrow {:.3f}".format(*curve.ends)
                print(
                    f"{name} {seed} {units:5} {method:15} middle {middle:6.3f} ({middle / padded:4.2f} of padded) barrier {curve.barrier_mean:6.3f} {ends}",
                    flush=True,
                )
                (options.out / "widths.json").write_text(json.dumps({"schema": "symmerge.widths/1", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
