"""Cost of a curve: 21 points on a line against 21 plain evaluations of one loaded model.

Models have random weights; trained ones would cost the same. Every case runs in its own process,
where curve and evaluations take turns, `--rounds` times; every run is in the JSON, none is dropped.
The curve's time is everything from two checkpoints on disk to the finished curve; the evaluations
start with a loaded transformers model. Memory is the growth of the process at its peak, in float32
copies of the weights, for a model so large that activations are negligible.

    python benchmarks/barrier.py [--points 21] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Import nothing large here: a child's peak memory starts at its parent's.
WANTED_RATIO = 1.15
MEMORY_COPIES, MEMORY_FIXED = (
    3,
    50 * 10**6,
)  # allowed: three copies of the weights, and 50 MB for inputs, activations and torch's own buffers
RESULTS = Path(__file__).parent / "results" / "barrier.json"

# case -> (class, config, task, samples, length)
CASES: dict[str, tuple[str, dict[str, Any], str, int, int]] = {
    "causal, 7M, 256 tokens": (
        "GPT2LMHeadModel",
        {"n_embd": 256, "n_layer": 6, "n_head": 8, "vocab_size": 4096, "n_positions": 256},
        "clm",
        16,
        256,
    ),
    "masked, 6M, 128 tokens": (
        "BertForMaskedLM",
        {
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "intermediate_size": 1024,
            "vocab_size": 4096,
        },
        "mlm",
        32,
        128,
    ),
    "images, 3M, 65 patches": (
        "ViTForImageClassification",
        {
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "intermediate_size": 512,
            "image_size": 32,
            "patch_size": 4,
            "num_labels": 10,
        },
        "image",
        64,
        0,
    ),
}
MEMORY = {"n_embd": 1024, "n_layer": 6, "n_head": 16, "vocab_size": 8192, "n_positions": 64}


def save_models(folder: Path, architecture: str, config: dict[str, Any]) -> list[Path]:
    import torch
    import transformers

    paths = [folder / "a", folder / "b"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        kind = getattr(transformers, architecture)
        kind(kind.config_class(**config)).save_pretrained(path)
    return paths


def make_task(name: str, model: Any, samples: int, length: int) -> Any:
    """A task with random inputs, in batches of the library's size."""
    import torch

    from symmerge.evaluation.tasks import Task
    from symmerge.evaluation.tasks.image_classification import BATCH_ROWS
    from symmerge.evaluation.tasks.language import rows_per_batch
    from symmerge.evaluation.tasks.readouts import ImageReadout, TokenReadout

    torch.manual_seed(0)
    if name == "image":
        images, labels = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
        batches = [
            {"pixel_values": x, "labels": y}
            for x, y in zip(images.split(BATCH_ROWS), labels.split(BATCH_ROWS), strict=True)
        ]
        return Task(name, "random", samples, 0, ImageReadout(), batches, {})
    tokens = torch.randint(model.spec.sizes["vocabulary"], (samples, length))
    labels = torch.where(torch.rand(tokens.shape) < 0.15, tokens, -100) if name == "mlm" else tokens
    rows = rows_per_batch(model, length)
    batches = [
        {"input_ids": x, "labels": y}
        for x, y in zip(tokens.split(rows), labels.split(rows), strict=True)
    ]
    return Task(
        name, "random", samples, 0, TokenReadout(causal=name == "clm"), batches, {"block": length}
    )


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall-clock and CPU time; other load affects the first more than the second."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def speed(case: str, points: int, rounds: int) -> list[dict[str, Any]]:
    """Curve and evaluations in turns, in this process."""
    import transformers

    from symmerge.evaluation.lines import barrier
    from symmerge.models.model import load

    architecture, config, name, samples, length = CASES[case]
    runs = []
    with tempfile.TemporaryDirectory(prefix="symmerge-bench-") as folder:
        paths = save_models(Path(folder), architecture, config)
        task = make_task(name, load(paths[0]), samples, length)
        stock = getattr(transformers, architecture).from_pretrained(paths[0]).eval()
        task.evaluate(stock)  # warm up
        for turn in range(rounds):
            load_before = os.getloadavg()[0]
            plain = seconds(lambda: [task.evaluate(stock) for _ in range(points)])
            curve = seconds(lambda: barrier(load(paths[0]), load(paths[1]), task, points))
            ratios = {"ratio": curve[0] / plain[0], "cpu_ratio": curve[1] / plain[1]}
            runs.append(
                {
                    "case": case,
                    "round": turn,
                    "load_before": load_before,
                    "plain_seconds": plain,
                    "curve_seconds": curve,
                    **ratios,
                }
            )
    return runs


def memory() -> dict[str, Any]:
    """Growth of peak memory during a curve, in copies of the weights."""
    import torch

    from symmerge.checkpoints.memory import return_freed_memory
    from symmerge.evaluation.lines import barrier
    from symmerge.models.model import load
    from symmerge.verification.modules import empty_module

    folder = Path(os.environ["BENCH_FOLDER"])
    return_freed_memory()
    a, b = load(folder / "a"), load(folder / "b")
    task = make_task("clm", a, 2, 16)
    empty_module(a, torch.float32)  # imports must not count as memory of the curve
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    barrier(a, b, task, 3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "weights_bytes": a.bytes,
        "before_bytes": before,
        "gained_bytes": peak - before,
        "copies": (peak - before) / a.bytes,
    }


def child(*arguments: str, **environment: str) -> Any:
    """Run this script in a fresh process; its last line is the result."""
    settings = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=settings,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run(points: int, rounds: int) -> dict[str, Any]:
    runs = [
        run
        for case in CASES
        for run in child("--case", case, "--points", str(points), "--rounds", str(rounds))
    ]
    with tempfile.TemporaryDirectory(prefix="symmerge-bench-") as folder:
        child("--save", folder)
        used = child("--memory", BENCH_FOLDER=folder)
    summary = []
    for case in CASES:
        mine = [run for run in runs if run["case"] == case]
        ratios = [run["ratio"] for run in mine]
        row = {
            "case": case,
            "points": points,
            "best_ratio": min(ratios),
            "median_ratio": statistics.median(ratios),
            "worst_ratio": max(ratios),
        }
        row["median_cpu_ratio"] = statistics.median(run["cpu_ratio"] for run in mine)
        summary.append(
            {**row, "limit": WANTED_RATIO, "within": row["median_ratio"] <= WANTED_RATIO}
        )
    limit = MEMORY_COPIES * used["weights_bytes"] + MEMORY_FIXED
    used = {**used, "limit_bytes": limit, "within": used["gained_bytes"] <= limit}
    return {"machine": machine(), "summary": summary, "memory": used, "runs": runs}


def machine() -> dict[str, Any]:
    versions = {
        name: version(name) for name in ("torch", "transformers", "safetensors", "symmerge")
    }
    return {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "python": platform.python_version(),
        **versions,
    }


def show(record: dict[str, Any]) -> None:
    print(
        f"{'case':26}{'best':>7}{'median':>8}{'worst':>7}{'cpu':>7}"
        f"   (curve / plain evaluations; limit {WANTED_RATIO})"
    )
    for row in record["summary"]:
        print(
            f"{row['case']:26}{row['best_ratio']:7.3f}{row['median_ratio']:8.3f}"
            f"{row['worst_ratio']:7.3f}{row['median_cpu_ratio']:7.3f}"
        )
    used = record["memory"]
    sizes = [used[key] / 1e6 for key in ("gained_bytes", "weights_bytes", "limit_bytes")]
    print(
        f"peak memory of a curve: {sizes[0]:.0f} MB, {used['copies']:.2f} copies"
        f" of {sizes[1]:.0f} MB of weights (limit {sizes[2]:.0f} MB)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(speed(arguments.case, arguments.points, arguments.rounds)))
    elif arguments.save:
        print(
            json.dumps(
                [str(path) for path in save_models(arguments.save, "GPT2LMHeadModel", MEMORY)]
            )
        )
    elif arguments.memory:
        print(json.dumps(memory()))
    else:
        record = run(arguments.points, arguments.rounds)
        show(record)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
