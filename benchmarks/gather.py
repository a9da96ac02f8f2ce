"""Cost of activation statistics: a gathering pass against plain forward passes.

Two models of BERT-base size with random weights, in canonical form. Plain passes and gathering take
turns batch by batch in one process, so that other load affects both alike; every round is in the
JSON, none is dropped. The first batch allocates the sums and is reported separately. One process
uses all threads, another a single one: on a busy machine trust only the second. Memory is measured
in its own process: the peak while gathering, minus the peak of loading both models and one forward
pass of each.

    python benchmarks/gather.py [--rounds 8]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

WANTED_RATIO, WANTED_BYTES = 2.0, 1.5e9
LENGTH = 128
RESULTS = Path(__file__).parent / "results" / "gather.json"


def make(count: int) -> tuple[Any, tuple[Any, Any], list[dict[str, Any]]]:
    """The spec, both models, and random tokens."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    import symmerge as sm
    from symmerge.evaluation.tasks.language import rows_per_batch
    from symmerge.verification.modules import full_module

    modules = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = sm.canonicalize(sm.load(BertForMaskedLM(BertConfig())))
        modules.append(full_module(model, torch.float32))
    shape = rows_per_batch(model, LENGTH), LENGTH
    tokens = [torch.randint(model.spec.sizes["vocabulary"], shape) for _ in range(count)]
    return model.spec, (modules[0], modules[1]), [{"input_ids": batch} for batch in tokens]


def plain(modules: tuple[Any, Any], batch: dict[str, Any]) -> None:
    """The baseline: plain forward passes of both models."""
    import torch

    with torch.no_grad():
        for module in modules:
            module(**batch)


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall-clock and CPU time; other load affects the first more than the second."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def speed(rounds: int) -> list[dict[str, Any]]:
    """Time plain passes and gathering in turns; round 0 is the warm-up."""
    from symmerge.observation.gathering import Gatherer

    spec, modules, batches = make(rounds + 1)
    gatherer = Gatherer(spec, modules)
    runs = []
    for turn, batch in enumerate(batches):
        load = os.getloadavg()[0]
        passes = seconds(lambda batch=batch: plain(modules, batch))
        statistics = seconds(lambda batch=batch: gatherer.add_batch(batch))
        runs.append(
            {
                "round": turn,
                "tokens": batch["input_ids"].numel(),
                "load": load,
                "plain_seconds": passes,
                "statistics_seconds": statistics,
            }
        )
    return runs


def memory() -> dict[str, Any]:
    from symmerge.checkpoints.memory import return_freed_memory
    from symmerge.observation.gathering import gather
    from symmerge.observation.moments import SUMS

    return_freed_memory()  # as the command line does
    spec, modules, batches = make(3)
    plain(modules, batches[0])
    before = peak()
    moments = gather(spec, modules, batches).moments.values()
    statistics_bytes = sum(getattr(one, name).nbytes for one in moments for name in SUMS)
    return {
        "before_bytes": before,
        "gained_bytes": peak() - before,
        "statistics_bytes": statistics_bytes,
        "limit_bytes": int(WANTED_BYTES),
        "within": peak() - before < WANTED_BYTES,
    }


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(*arguments: str, **environment: str) -> Any:
    """Run this script in a fresh process; its last line is the result."""
    settings = {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    } | environment
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=settings,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run(rounds: int) -> dict[str, Any]:
    used = child("--child", "memory")
    summary, runs = [], []
    for threads, environment in (("one", {"OMP_NUM_THREADS": "1"}), ("all", {})):
        rows = child("--child", "speed", "--rounds", str(rounds), **environment)
        runs += [{"threads": threads, **row} for row in rows]
        summary.append({"threads": threads, **summed_up(rows)})
    return {"machine": machine(), "summary": summary, "memory": used, "runs": runs}


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over batches, of wall-clock and CPU time."""
    warm = runs[1:]
    clock, processor = (
        [run["statistics_seconds"][at] / run["plain_seconds"][at] for run in warm] for at in (0, 1)
    )
    row = {
        "best_ratio": min(clock),
        "median_ratio": median(clock),
        "worst_ratio": max(clock),
        "median_cpu_ratio": median(processor),
    }
    extra = runs[0]["statistics_seconds"][1] - median(
        [run["statistics_seconds"][1] for run in warm]
    )
    return {
        **row,
        "first_batch_extra_cpu_seconds": extra,
        "limit": WANTED_RATIO,
        "within": row["median_ratio"] <= WANTED_RATIO,
    }


def machine() -> dict[str, Any]:
    versions = {name: version(name) for name in ("torch", "transformers", "symmerge")}
    return {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **versions,
    }


def show(record: dict[str, Any]) -> None:
    print(
        f"{'threads':10}{'best':>7}{'median':>8}{'worst':>7}{'cpu':>7}"
        f"   (statistics / plain passes of both models; limit {WANTED_RATIO})"
    )
    for row in record["summary"]:
        print(
            f"{row['threads']:10}{row['best_ratio']:7.3f}{row['median_ratio']:8.3f}"
            f"{row['worst_ratio']:7.3f}{row['median_cpu_ratio']:7.3f}"
        )
    used = record["memory"]
    sizes = [used[key] / 1e9 for key in ("gained_bytes", "statistics_bytes", "limit_bytes")]
    print(
        f"peak memory beyond both models: {sizes[0]:.2f} GB,"
        f" of which statistics {sizes[1]:.2f} GB (limit {sizes[2]:.1f} GB)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", choices=("speed", "memory"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(speed(arguments.rounds) if arguments.child == "speed" else memory()))
        return
    record = run(arguments.rounds)
    show(record)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
