"""What each choice of learned matching buys: the barrier of one pair of models, cell by cell. Writes FILE anew after every cell; cells that are there are skipped.

    python experiments/ablations.py --models seed-0 seed-1 --task image --data held-out.npz --train train.npz --out FILE.json [--tables spaces samplers]

Tables: spaces (which symmetries are learned), samplers (where between A and B is learned), starts, targets (the parents' answers or labels), permutations (that
stay or may flip), iterations (sweeps of weight matching, permutation against orthogonal), amount (how many inputs), soft, and for images made (inputs that
are no data: noise with natural spectrum, dead leaves; a few real ones cut into pieces and put together anew).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Cell = dict[str, Any]
TABLES: dict[str, list[Cell]] = {
    "spaces": [{"spaces": spaces} for spaces in (("residual",), ("heads",), ("ff",), ("residual", "heads"), ("residual", "ff"), ("residual", "heads", "ff"))],
    "samplers": [{"sampler": name} for name in ("narrow", "fixed", "wide", "normal", "beta:2,2")],
    "starts": [{"start": name} for name in ("weights", "activations", "identity")],
    "targets": [{"target": name} for name in ("parents", "labels")],
    "permutations": [{"permutations": flag} for flag in (True, False)],
    "iterations": [{"recipe": name, "max_sweeps": count} for name in ("permutations", "orthogonal") for count in (1, 2, 5, 10)],
    "amount": [{"samples": count} for count in (32, 128, 512, 2048)],
    "soft": [{"recipe": name, "sampler": sampler} for sampler in ("narrow", "wide") for name in ("soft", "soft-hardened")],
    "made": [{"made": name} for name in ("noise", "leaves", "mosaic")],
    "steps": [{"steps": count} for count in (30, 100, 300)],
}


def made_images(kind: str, real: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Pictures in the models' own scale, as [n, channel, side, side]. Only `mosaic` looks at real ones, and at 32 of them."""
    channels, side = real.shape[1:3]
    if kind == "mosaic":
        few, half = real[:32], side // 2
        found = np.empty((count, channels, side, side), np.float32)
        for picture in found:
            for top in (0, half):
                for left in (0, half):
                    one, (y, x) = few[rng.integers(len(few))], rng.integers(0, half + 1, 2)
                    piece = one[:, y : y + half, x : x + half]
                    picture[:, top : top + half, left : left + half] = piece[:, :, :: rng.choice((-1, 1))]
        return found
    if kind == "leaves":
        return np.stack([_leaves(channels, side, rng) for _ in range(count)])
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None])
    frequency[0, 0] = 1 / side
    found = np.fft.ifft2(np.fft.fft2(rng.standard_normal((count, channels, side, side))) / frequency).real
    return (found / found.std()).astype(np.float32)


def _leaves(channels: int, side: int, rng: np.random.Generator) -> np.ndarray:
    """Discs that hide each other, with sizes of a power law: edges and areas as in pictures of the world."""
    y, x = np.mgrid[:side, :side]
    found = np.zeros((channels, side, side), np.float32)
    for _ in range(60):
        radius = side * 0.06 / rng.uniform(0.05, 1) ** 0.7
        inside = np.hypot(y - rng.uniform(0, side), x - rng.uniform(0, side)) < radius
        found[:, inside] = (rng.standard_normal() + 0.5 * rng.standard_normal(channels))[:, None]
    return found + 0.1 * rng.standard_normal(found.shape).astype(np.float32)


def _written(kind: str, train: str, folder: Path, classes: int, count: int = 4000) -> str:
    rng = np.random.default_rng(0)
    images = made_images(kind, np.load(train)["x"], count, rng)
    np.savez(folder / f"{kind}.npz", x=images, y=rng.integers(0, classes, count))  # labels are needed by the format, and not looked at
    return str(folder / f"{kind}.npz")


def measure(pair: tuple[Any, Any], cell: Cell, options: argparse.Namespace, held: Any, folder: Path, starts: dict[tuple[str, str], Any]) -> Cell:
    import symmerge as sm
    from symmerge.matching.learned import LearnedMatching
    from symmerge.matching.recipes import RECIPES, with_options
    from symmerge.matching.weights import WeightMatching

    cell = dict(cell)
    chosen = RECIPES[cell.pop("recipe", "learned")]
    count = cell.pop("samples", options.samples)
    train = _written(cell.pop("made"), options.train, folder, pair[0].spec.sizes["label"]) if "made" in cell else options.train
    start = cell.pop("start", "weights")
    if chosen.needs_data:
        data = sm.make_task(options.task, train, pair, most=count, seed=1)
        cell |= {"data": data, "steps": cell.get("steps", options.steps)}
        if chosen.matching.start is None:  # found once for all cells: it is what takes longest
            solvers = {"weights": WeightMatching(), "activations": LearnedMatching.activations(data)}
            if start in solvers and (start, chosen.about) not in starts:
                ready = [chosen.ready(model) for model in pair]
                starts[start, chosen.about] = replace(solvers[start], device=options.device).solve(*ready).alignment
            cell["start"] = starts.get((start, chosen.about), start)
    began = time.time()
    found = sm.align(*pair, with_options(chosen, **cell, device=options.device))
    seconds = time.time() - began
    curve = sm.barrier(found.reference, found.aligned, held, options.points, device=options.device)
    settings = found.solution.settings
    row = {"barrier_mean": curve.barrier_mean, "barrier_linear": curve.barrier_linear, "losses": [point["loss"] for point in curve.points]}
    return row | {"seconds": seconds, **{name: settings[name] for name in ("learned", "soft") if name in settings}}


def cells(tables: list[str]) -> Iterator[tuple[str, Cell]]:
    yield from ((table, cell) for table in tables for cell in TABLES[table])


def main() -> None:
    import symmerge as sm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs=2, required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", required=True, help="what is measured on")
    parser.add_argument("--train", required=True, help="what is learned from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--test-samples", type=int)
    parser.add_argument("--points", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    pair = sm.load(options.models[0]), sm.load(options.models[1])
    held = sm.make_task(options.task, options.data, pair, samples=options.test_samples)
    starts: dict[tuple[str, str], Any] = {}
    found = json.loads(options.out.read_text()) if options.out.exists() else []
    settings = {"steps": options.steps, "samples": options.samples, "models": [folder.name for folder in options.models], "points": options.points}
    with tempfile.TemporaryDirectory() as folder:
        for table, cell in cells(options.tables):
            key = {"table": table, "cell": json.loads(json.dumps(cell)), "settings": settings}
            if any({name: row[name] for name in key} == key for row in found):
                continue
            row = {**key, **measure(pair, cell, options, held, Path(folder), starts)}
            found.append(row)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            print(
                f"{table:14}{json.dumps(cell):44} over the mean {row['barrier_mean']:.4f}, over the line {row['barrier_linear']:.4f}, {row['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
