"""Cost of a learned step, against a plain forward and backward pass on the same batch.

Small stock models and GPT-2 small with random weights, in canonical form. Plain passes and learned
steps (all symmetries, including permutations; the parents' outputs are computed once, as in a run)
take turns in one process; every round is in the JSON, none is dropped. Costs besides the steps are
reported separately: the parents' outputs, evaluations on held-out inputs, assignments. On a GPU
both are CUDA graphs in mixed precision.

    python benchmarks/learn.py [--rounds 8] [--device cuda] [--case gpt2]
    python benchmarks/learn.py --count     operations that start a kernel: what counts on a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import symmerge as sm
from symmerge.evaluation.tasks.base import LazyBatches
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning.data import LearningData
from symmerge.matching.learning.distillation import (
    DistillationBatch,
    DistillationData,
    distillation_loss,
)
from symmerge.matching.learning.learner import FLIP_BATCHES, Learner, pair_learner
from symmerge.models.alignment import Alignment
from symmerge.verification.modules import full_module

WANTED = 1.6
# Warm-up steps of both: the first replays of a graph took nearly twice as long.
WARM_UPS = {"cpu": 1, "cuda": 20}
RESULTS = Path(__file__).parent / "results"
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 4096,
}
# case -> class, config, batch size, tokens per sample
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "n_embd": 256,
            "n_layer": 6,
            "n_head": 8,
            "vocab_size": 4096,
            "n_positions": 256,
            "tie_word_embeddings": False,
        },
        12,
        256,
    ),
    "llama": (
        "LlamaForCausalLM",
        {**WIDE, "intermediate_size": 704, "num_key_value_heads": 4},
        12,
        256,
    ),
    "bert": (
        "BertForMaskedLM",
        {**WIDE, "intermediate_size": 1024, "max_position_embeddings": 128},
        24,
        128,
    ),
    "vit": (
        "ViTForImageClassification",
        {**WIDE, "intermediate_size": 512, "image_size": 32, "patch_size": 4, "num_labels": 10},
        64,
        0,
    ),
    "gpt2-small": ("GPT2LMHeadModel", {}, 4, 512),
}


# Views and allocations start no kernel.
NO_KERNEL = re.compile(
    r"_?(unsafe_)?view|view_as_.*|_?reshape(_alias)?|transpose|t|permute|slice|select|expand"
    r"|(un)?squeeze|unflatten|split(_with_sizes)?|unbind|diagonal|narrow|detach|alias|as_strided"
    r"|lift_fresh|_conj|real|imag|(new_)?empty(_like|_strided)?|_record_function_.*"
)
COUNTED_BATCH = 2, 16  # rows and tokens: the number of operations does not depend on them


class Counting(TorchDispatchMode):
    """Counts the operations that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        empty = isinstance(result, torch.Tensor) and not result.numel()
        if not empty and not NO_KERNEL.fullmatch(name):
            self.counts[name] += 1
        return result


def counted(work: Callable[[], Any]) -> Counter[str]:
    with Counting() as counting:
        work()
    return counting.counts


def count(case: str) -> str:
    learner = learner_of(case, "cpu", COUNTED_BATCH)
    batch = learner.data.train[0]
    learner.objective.place_midpoint()
    learner.descend((batch,))  # creates everything that is made once
    bare, learned = (
        counted(lambda: plain(learner, batch)),
        counted(lambda: learner.descend((batch,))),
    )
    extra = learned - bare
    most = ", ".join(f"{name} {number}" for name, number in extra.most_common(10))
    more = learned.total() - bare.total()
    return f"{case}: plain {bare.total()}, learned {learned.total()}, extra {more}: {most}"


def learner_of(case: str, device: str, batch_shape: tuple[int, int] | None = None) -> Learner:
    import transformers

    name, config, rows, length = CASES[case]
    if batch_shape:
        rows, length = batch_shape[0], min(length, batch_shape[1])
    kind = getattr(transformers, name)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(
            sm.canonicalize(sm.load(kind(kind.config_class(**{"num_labels": 10, **config}))))
        )
    a, b = models
    generator = torch.Generator().manual_seed(0)

    def batch(_: Any) -> dict[str, torch.Tensor]:
        if not length:
            return {
                "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
                "labels": torch.zeros(rows, dtype=torch.long),
            }
        tokens = torch.randint(a.spec.sizes["vocabulary"], (rows, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    parents = [full_module(model, torch.float32).to(device) for model in models]
    batches = LazyBatches(((0,),) * 4, batch)
    data = DistillationData(batches, parents, "parents", torch.device(device))
    options, start = LearnedMatching(device=device), Alignment.identity(a.spec)
    return pair_learner(options, a, b, start, LearningData(data, data))


def plain(learner: Learner, batch: DistillationBatch) -> None:
    """The cost of training the model itself: forward and backward, without the optimizer."""
    distillation_loss(learner.objective.mean.module, batch).backward()
    # Otherwise the next learned step would add to these gradients.
    for holders in learner.objective.mean.parameters.values():
        for holder in holders:
            holder.grad = None


def seconds(work: Callable[[], Any], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def graphed(work: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph.replay


def run(case: str, rounds: int, device: str) -> dict[str, Any]:
    learner = learner_of(case, device)
    batch = learner.data.train[0]
    learner.objective.place_midpoint()
    training, step = (
        (lambda: plain(learner, batch)),
        (lambda: learner.advance(0)),
    )
    for _ in range(3):
        step()
    if device == "cuda":
        training = graphed(training)
    for _ in range(WARM_UPS[device]):
        training()
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    runs = []
    for turn in range(rounds):
        load = os.getloadavg()[0]
        runs.append(
            {
                "round": turn,
                "load": load,
                "plain_seconds": seconds(training, device),
                "learned_seconds": seconds(step, device),
            }
        )
    ratios = [row["learned_seconds"] / row["plain_seconds"] for row in runs]
    probe = [learner.data.train[number] for number in range(FLIP_BATCHES)]
    forward = median(row["plain_seconds"] for row in runs)
    extras = {
        "asking_the_parents": seconds(
            lambda: learner.data.train.answer(learner.data.train.raw(1)), device
        )
        / forward,
        "an_evaluation": seconds(lambda: learner.evaluate(1), device) / forward,
        "assignments": seconds(lambda: learner.objective.reassign(probe), device) / forward,
    }
    row = {
        "case": case,
        "device": device,
        "best_ratio": min(ratios),
        "median_ratio": median(ratios),
        "worst_ratio": max(ratios),
    }
    return {
        **row,
        "limit": WANTED,
        "within": row["median_ratio"] <= WANTED,
        "in_plain_steps": extras,
        "runs": runs,
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'case':12}{'best':>7}{'median':>8}{'worst':>7}   (learned step / forward and backward;"
        f" limit {WANTED})   besides, in plain steps"
    )
    for row in rows:
        extras = ", ".join(
            f"{name.replace('_', ' ')} {value:.1f}" for name, value in row["in_plain_steps"].items()
        )
        print(
            f"{row['case']:12}{row['best_ratio']:7.3f}{row['median_ratio']:8.3f}"
            f"{row['worst_ratio']:7.3f}   {extras}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--count", action="store_true", help="count operations instead of seconds")
    arguments = parser.parse_args()
    if arguments.count:
        for case in arguments.case or CASES:
            print(count(case), flush=True)
        return
    rows = [run(case, arguments.rounds, arguments.device) for case in arguments.case or CASES]
    show(rows)
    versions = {name: version(name) for name in ("torch", "transformers")}
    gpu = {"gpu": torch.cuda.get_device_name()} if arguments.device == "cuda" else {}
    machine = {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **versions,
        **gpu,
    }
    file = arguments.results or RESULTS / f"learn-{arguments.device}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine, "cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
