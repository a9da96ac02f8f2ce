"""Classifiers fine-tuned from different pretrained seeds, averaged as they are and after alignment: the third table of correlation-based merging.

Every pretrained checkpoint is fine-tuned on every task from the same initial head; then every pair is measured on held-out rows: a plain average,
the published recipe (`correlation`) and ours (`activations`), both calibrated on rows of the training file. Results are kept as they come.

    python experiments/glue.py --models seed-0 seed-1 ... --data DIR --out DIR [--tasks sst2 cola ...] [--device cuda] [--jobs 4]

DIR has a folder for each task with train.tsv and a held-out file (dev.tsv or test.tsv): label, text, and a second text where the task has two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Rows of the training file, passes over them at most, and the metric of the benchmark; AdamW, warm-up and linear decay. A tenth of the training
# rows is held back, and the pass with the lowest loss there is kept: these models overfit small tasks within a few passes.
TASKS = {"sst2": (20_000, 2, "accuracy"), "cola": (10_000, 3, "matthews"), "mrpc": (10_000, 4, "f1"), "rte": (10_000, 4, "accuracy")}
RATE, DECAY, WARM, HEAD_SEED, HELD_BACK = 1e-4, 0.01, 0.1, 0, 10
METHODS = ("none", "correlation", "activations")
CALIBRATION, POINTS = 512, 11


def fine_tune(source: Path, task: str, data: Path, out: Path, seed: int, device: str) -> dict[str, Any]:
    """A stock classifier from a pretrained checkpoint; the head starts the same for every seed."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from symmerge import load, make_task

    if (out / "metrics.json").exists():
        return json.loads((out / "metrics.json").read_text())
    rows, passes, _ = TASKS[task]
    torch.manual_seed(HEAD_SEED)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2, dtype=torch.float32)
    model.save_pretrained(out)
    for file in source.glob("tokenizer*"):
        (out / file.name).write_bytes(file.read_bytes())
    training = data / task / "train.tsv"
    available = sum(1 for line in training.read_text("utf-8").splitlines() if line.strip())
    made = make_task("text", str(training), [load(out)], samples=min(rows, available), seed=seed).batches
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in made]
    kept_back, batches = batches[::HELD_BACK], [batch for at, batch in enumerate(batches) if at % HELD_BACK]
    model.to(device)
    steps = passes * len(batches)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=device != "cpu")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / (WARM * steps), (steps - step) / (steps * (1 - WARM))))
    torch.manual_seed(1 + seed)  # dropout and order, after the head
    began, losses, best = time.time(), [], None
    for _ in range(passes):
        model.train()
        for at in torch.randperm(len(batches)).tolist():
            model(**batches[at]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(torch.stack([model(**batch).loss for batch in kept_back]).mean().item())
        if losses[-1] == min(losses):
            best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert best is not None
    model.load_state_dict(best)
    model.cpu().save_pretrained(out)
    record = {"task": task, "source": source.name, "steps": steps, "seconds": time.time() - began, "held_back_losses": losses}
    (out / "metrics.json").write_text(json.dumps(record))
    return record


def held_out(folder: Path) -> Path:
    return next(file for file in (folder / "dev.tsv", folder / "test.tsv") if file.exists())


def measure(task: str, data: Path, pair: tuple[Path, Path], device: str, threads: int) -> dict[str, Any]:
    """Every method's line between two classifiers."""
    import torch

    import symmerge as sm
    from symmerge.matching.recipes import RECIPES, with_options

    torch.set_num_threads(threads)
    models = tuple(sm.load(folder) for folder in pair)
    task_ = sm.make_task("text", str(held_out(data / task)), models, samples=None)
    calibration = sm.make_task("text", str(data / task / "train.tsv"), models, samples=CALIBRATION, seed=1)
    found: dict[str, Any] = {"task": task, "pair": [folder.name for folder in pair]}
    for name in METHODS:
        began = time.time()
        ends = models
        if name != "none":
            aligned = sm.align(*models, with_options(RECIPES[name], data=calibration, device="cpu"))
            ends = aligned.reference, aligned.aligned
        curve = sm.barrier(*ends, task_, POINTS, device=device)
        found[name] = {**curve.record(), "seconds": time.time() - began}
        found["ensemble"] = dict(curve.ensemble)
    return found


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard error over pairs of both barriers, and the metric of the parents and at the middle."""
    table = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        metric = TASKS[task][2]
        line: dict[str, Any] = {"task": task, "pairs": len(mine), "metric": metric}
        line["parents"] = statistics.fmean(row["none"]["points"][end][metric] for row in mine for end in (0, -1))
        for name in METHODS:
            values = [row[name]["barrier_mean"] for row in mine]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            linear = statistics.fmean(row[name]["barrier_linear"] for row in mine)
            line[name] = {
                "barrier": statistics.fmean(values),
                "error": error,
                "barrier_linear": linear,
                "middle_loss": statistics.fmean(row[name]["points"][POINTS // 2]["loss"] for row in mine),
                "middle": statistics.fmean(row[name]["points"][POINTS // 2][metric] for row in mine),
            }
        table.append(line)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="where fine-tuned models are kept (default: OUT/models)")
    options = parser.parse_args()
    work = options.work or options.out / "models"
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "glue.json"
    rows: list[dict[str, Any]] = []
    tuned: list[dict[str, Any]] = []
    from multiprocessing import get_context

    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = []
        for task in options.tasks:
            for seed, source in enumerate(options.models):
                tuned.append(fine_tune(source, task, options.data, work / f"{task}-{source.name}", seed, options.device))
                print(json.dumps(tuned[-1]), flush=True)
            pairs = combinations([work / f"{task}-{source.name}" for source in options.models], 2)
            waiting += [pool.submit(measure, task, options.data, pair, options.device, options.threads) for pair in pairs]
        for done in as_completed(waiting):
            rows.append(done.result())
            results.write_text(json.dumps({"tuned": tuned, "rows": rows, "table": summary(rows)}, indent=1))
            print(rows[-1]["task"], rows[-1]["pair"], {name: round(rows[-1][name]["barrier_mean"], 3) for name in METHODS}, flush=True)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
