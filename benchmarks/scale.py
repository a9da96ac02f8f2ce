"""Merging at the sizes people have: seconds, peak memory, beside a file copy and a forward pass.

Two Llama checkpoints of random weights (trained ones would cost the same) are written in bfloat16,
then `symmerge merge A B --effort fast` runs as a user would run it: align, gate, merge, write.
Ratios are against copying both files and against a plain forward pass of one model over 1,024
tokens, in the same run. Memory is sampled while the command runs: `anonymous` is what the process
itself holds, `resident` counts the mapped files as well, which the system may drop at any time.

    python benchmarks/scale.py --size 1.5b [--device cuda] [--cores 2] [--folder DIR]
    python benchmarks/scale.py --size 1.5b --layers 2 4    the same widths, extrapolated to 16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from watched import watch

RESULTS = Path(__file__).parent / "results" / "scale.json"
FIELDS = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
SIZES = {
    "0.1b": (768, 2048, 12, 12, 4, 32_000),
    "1.5b": (2048, 8192, 16, 32, 8, 128_256),
    "3b": (3072, 8192, 28, 24, 8, 128_256),
    "7b": (4096, 14_336, 32, 32, 8, 32_000),
}
PHASES = {"match": "matching", "verify": "checking", "write": "writing"}  # by their first lines
LAYERS = FIELDS.index("num_hidden_layers")


@dataclass(frozen=True)
class Job:
    """One pair to merge: a size, with all of its layers or fewer."""

    size: str
    layers: int
    device: str
    cores: int | None
    first_core: int
    pin: bool

    def __str__(self) -> str:
        return f"{self.size}-{self.layers}"


def config(job: Job) -> dict[str, Any]:
    *body, key_value_heads, words = SIZES[job.size]
    body[LAYERS] = job.layers
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **dict(zip(FIELDS, body, strict=True)),
        "num_key_value_heads": key_value_heads,
        "vocab_size": words,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def make(folder: Path, job: Job) -> None:
    """Two checkpoints with independent random weights, tensor by tensor."""
    import torch

    from symmerge.checkpoints.files import write_json
    from symmerge.checkpoints.folders import new_folder
    from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
    from symmerge.checkpoints.writing import write_weights
    from symmerge.families import family_of
    from symmerge.models.binding import bind

    written, size, device = config(job), job.size, job.device
    spec = bind(family_of("llama", size), written, ["lm_head.weight"], size)
    for seed in (0, 1):
        path = folder / f"{job}-{seed}"
        if path.exists():
            continue
        generator = torch.Generator(device).manual_seed(seed)

        def draw(name: str, generator: torch.Generator = generator) -> torch.Tensor:
            shape = spec.shapes[name]
            if len(shape) == 1:
                return torch.ones(shape)
            return (0.02 * torch.randn(shape, generator=generator, device=device)).cpu()

        weights = DerivedWeights(
            MemoryWeights({}),
            {name: (lambda name=name, draw=draw: draw(name)) for name in spec.tensors},
            added={name: (spec.shapes[name], torch.bfloat16) for name in spec.tensors},
        )
        with new_folder(path) as target:
            write_json(target / "config.json", written)
            write_weights(target, weights)


def copied(paths: list[Path], folder: Path) -> float:
    """Seconds of copying both checkpoints."""
    began = time.perf_counter()
    for path in paths:
        shutil.copytree(path, folder / "copy")
        shutil.rmtree(folder / "copy")
    return time.perf_counter() - began


def forward(path: Path, device: str) -> float:
    """Seconds of one plain forward pass of the stock class over 1,024 tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    # float32 on a processor: products of bfloat16 end some of them
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    tokens = torch.randint(0, module.config.vocab_size, (4, 256), device=device)
    with torch.no_grad():
        module(input_ids=tokens[:1, :16])
        began = time.perf_counter()
        module(input_ids=tokens).logits.float().sum().item()
    return time.perf_counter() - began


def products(paths: list[Path]) -> dict[str, float]:
    """Seconds of reading both once, and of moving one by a random element of every group."""
    import torch

    from symmerge.models.alignment import Alignment, apply
    from symmerge.models.canonical.form import canonicalize
    from symmerge.models.model import load

    began = time.perf_counter()
    for path in paths:
        weights = load(path).weights
        for name in weights:
            weights[name]
    read = time.perf_counter() - began
    model = canonicalize(load(paths[0]))
    alignment = Alignment.random(model.spec, torch.Generator().manual_seed(0))
    began = time.perf_counter()
    moved = apply(alignment, model).weights
    for name in moved:
        moved[name]
    return {"read_both": round(read, 1), "apply": round(time.perf_counter() - began, 1)}


def measure(job: Job, folder: Path) -> dict[str, Any]:
    paths = [folder / f"{job}-{seed}" for seed in (0, 1)]
    out = folder / f"{job}-merged"
    shutil.rmtree(out, ignore_errors=True)
    last = job.first_core + (job.cores or 0) - 1
    pinned = ["taskset", "-c", f"{job.first_core}-{last}"] if job.cores and job.pin else []
    command = [*pinned, sys.executable, "-u", "-m", "symmerge", "merge", *map(str, paths)]
    command += ["--out", str(out), "--effort", "fast", "--no-verdict", "--device", job.device]
    threads = {"OMP_NUM_THREADS": str(job.cores)} if job.cores else {}
    watched = watch(command, {**os.environ, **threads})
    shutil.rmtree(out, ignore_errors=True)
    copy, plain = copied(paths, folder), forward(paths[0], job.device)
    seconds = watched.lines[-1].seconds
    return {
        "size": job.size,
        "device": job.device,
        "cores": job.cores or os.cpu_count(),
        "layers": job.layers,
        "exit_code": watched.exit_code,
        "seconds": round(seconds, 1),
        "processor_seconds": round(watched.lines[-1].processor, 1),
        "over_copying_both": round(seconds / copy, 1),
        "over_forward_1024_tokens": round(seconds / plain, 1),
        "copy_seconds": round(copy, 2),
        "forward_seconds": round(plain, 3),
        "memory_gb": {name: round(value, 1) for name, value in watched.memory_gb.items()},
        "by_phase": {
            phase: {name: round(value, 1) for name, value in row.items()}
            for phase, row in watched.phases(PHASES).items()
        },
        "once": products(paths) if job.device == "cpu" else {},
        "phases": [[round(line.seconds, 1), line.text[:100]] for line in watched.lines[-41:-1]],
    }


def extrapolated(rows: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """All layers by the straight line through two depths: seconds per phase, and memory."""
    few, more = sorted(rows, key=lambda row: row["layers"])
    apart = more["layers"] - few["layers"]

    def at_full_depth(first: float, second: float) -> dict[str, float]:
        slope = (second - first) / apart
        whole = first + slope * (layers - few["layers"])
        return {"per_layer": round(slope, 2), "in_all": round(whole, 1)}

    by_phase = {
        phase: {
            kind: at_full_depth(value, more["by_phase"][phase][kind]) for kind, value in row.items()
        }
        for phase, row in few["by_phase"].items()
    }
    totals = {
        name: at_full_depth(few[name], more[name])
        for name in ("seconds", "processor_seconds", "copy_seconds", "forward_seconds")
    }
    memory = at_full_depth(*(row["memory_gb"]["anonymous"] for row in (few, more)))
    return {
        **{name: few[name] for name in ("size", "device", "cores")},
        "layers": f"{layers}, extrapolated from {few['layers']} and {more['layers']}",
        **totals,
        "anonymous_gb": memory,
        "by_phase": by_phase,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, action="append", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cores", type=int, help="run the command on so many cores")
    parser.add_argument("--first-core", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where checkpoints stay (else: temporary)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        help="the same widths with so few layers; two numbers: all layers are extrapolated",
    )
    parser.add_argument("--no-pin", action="store_true", help="so many threads, on any core")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for size in options.size:
            rows = []
            for layers in options.layers or [SIZES[size][LAYERS]]:
                where = options.device, options.cores, options.first_core
                job = Job(size, layers, *where, pin=not options.no_pin)
                make(folder, job)
                rows.append(measure(job, folder))
                print(json.dumps({**rows[-1], "phases": "..."}, indent=1), flush=True)
                add(options.results, rows[-1])
            if len(rows) == 2:
                whole = extrapolated(rows, SIZES[size][LAYERS])
                print(json.dumps(whole, indent=1))
                add(options.results, whole)


def add(results: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of an earlier one of the same size, depth, device and cores."""
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    same = "size", "layers", "device", "cores"
    rows = [other for other in rows if any(other.get(key) != row[key] for key in same)]
    packages = {name: version(name) for name in ("torch", "transformers", "scipy")}
    content = {"machine": {"machine": platform.machine(), **packages}, "rows": [*rows, row]}
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
