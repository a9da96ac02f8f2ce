"""Speed and memory of `apply`, against rewriting the same files with safetensors.

A sharded Llama checkpoint with random values is written to a temporary folder. Every job runs in
its own process, in turns, `--rounds` times; every run is in the JSON, none is dropped. Imports and
the creation of the alignments are not timed. Throughput is bytes of the checkpoint per second, once
until the files are closed (page cache) and once until they are on disk. `products` does only the
matrix products with the stream's rotation: a lower bound for any program that rotates. With
`--device cuda` they and `apply` work on the GPU, whose driver is awake before the clock starts.

    python benchmarks/apply.py [--gb 2] [--dtype float32|bfloat16] [--width 1024] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Import nothing large here: a child's peak memory starts at its parent's.
SHARD_BYTES = 500 * 10**6
MEMORY_FIXED, MEMORY_TENSORS = 700 * 10**6, 3  # allowed: 700 MB and three times the largest tensor
WANTED_RATIO = 0.5
RESULTS = Path(__file__).parent / "results" / "apply.json"
Job = Callable[[Path, Path, str], Callable[[], None]]
"""Checkpoints and alignments, output, device -> the work to be measured."""


def config(width: int, layers: int, dtype: str) -> dict[str, Any]:
    """A stock Llama config: heads of 64, four queries per key, FF four times as wide."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 256,
        "num_hidden_layers": layers,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def shapes(width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (32000, width)
    for i in range(layers):
        yield f"model.layers.{i}.input_layernorm.weight", (width,)
        for name, rows in (("q", width), ("k", width // 4), ("v", width // 4), ("o", width)):
            yield f"model.layers.{i}.self_attn.{name}_proj.weight", (rows, width)
        yield f"model.layers.{i}.post_attention_layernorm.weight", (width,)
        for name in ("gate", "up"):
            yield f"model.layers.{i}.mlp.{name}_proj.weight", (4 * width, width)
        yield f"model.layers.{i}.mlp.down_proj.weight", (width, 4 * width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (32000, width)


def make(folder: Path, gigabytes: float, dtype: str, width: int) -> dict[str, Any]:
    """Write the checkpoint, shard by shard, with as many layers as needed, and both alignments."""
    import torch
    from safetensors.torch import save_file

    from symmerge.models.model import load
    from symmerge.models.orbit import keep, random_member

    kind = getattr(torch, dtype)
    count = {
        layers: sum(torch.Size(shape).numel() for _, shape in shapes(width, layers))
        for layers in (0, 1)
    }
    layers = max(1, -int(-(gigabytes * 1e9 / kind.itemsize - count[0]) // (count[1] - count[0])))
    generator = torch.Generator().manual_seed(0)
    source = folder / "source"
    source.mkdir()
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map: dict[str, str] = {}

    def close() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shards[-1], source / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shards.pop(), file))
        shards.append({})

    for name, shape in shapes(width, layers):
        spread = torch.randn(shape, generator=generator)
        tensor = (1 + 0.2 * spread if len(shape) == 1 else spread * shape[-1] ** -0.5).to(kind)
        if sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            close()
        shards[-1][name] = tensor
    close()
    (source / "config.json").write_text(json.dumps(config(width, layers, dtype)))
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )

    model = load(source)
    keep(random_member(model, seed=1)[0], model, folder / "full.safetensors")
    restrict = {"residual": "permutation"}
    keep(
        random_member(model.restrict(**restrict), seed=1)[0],
        model,
        folder / "permutation.safetensors",
        restrict=restrict,
    )
    largest = max(torch.Size(shape).numel() * kind.itemsize for _, shape in shapes(width, layers))
    return {
        "layers": layers,
        "tensors": len(weight_map),
        "shards": len(set(weight_map.values())),
        "bytes": model.bytes,
        "largest": largest,
    }


# The jobs: each imports what it needs and returns the work to be measured.


def rewrite(folder: Path, out: Path, device: str) -> Callable[[], None]:
    from safetensors.torch import load_file, save_file

    def work() -> None:
        out.mkdir()
        for shard in sorted((folder / "source").glob("*.safetensors")):
            save_file(load_file(shard), out / shard.name)

    return work


def apply_with(alignment: str, *, verified: bool) -> Job:
    def prepare(folder: Path, out: Path, device: str) -> Callable[[], None]:
        import torch

        from symmerge import cli

        torch.zeros(1, device=device)

        for module in (
            "symmerge.models.orbit",
            "symmerge.cli.apply",
            "symmerge.verification.verdict",
            "transformers.models.llama.modeling_llama",
        ):
            import_module(module)
        command = [
            "apply",
            str(folder / f"{alignment}.safetensors"),
            str(folder / "source"),
            "--out",
            str(out),
        ]
        command += [
            "--max-shard-size",
            str(SHARD_BYTES / 1e9),
            *([] if verified else ["--no-verify"]),
            *("--device", device),
        ]
        return lambda: cli.app(command, standalone_mode=False)

    return prepare


def products(folder: Path, out: Path, device: str) -> Callable[[], None]:
    import torch

    from symmerge.checkpoints.reading import open_checkpoint

    source = open_checkpoint(folder / "source")
    width = source.config["hidden_size"]
    sizes = [
        torch.Size(source.weights.shape(name)).numel() // width
        for name in source.weights
        if len(source.weights.shape(name)) == 2
    ]
    rotation = torch.randn(width, width, device=device)
    rows = torch.randn(max(sizes), width, device=device)
    result = torch.zeros_like(rows)

    def work() -> None:
        for size in sizes:
            torch.mm(rows[:size], rotation, out=result[:size])
        result[0, 0].item()  # a GPU has done everything by then

    return work


JOBS: dict[str, Job] = {
    "rewrite (baseline)": rewrite,
    "products": products,
    "apply": apply_with("full", verified=False),
    "apply + gate": apply_with("full", verified=True),
    "apply permutation": apply_with("permutation", verified=False),
    "permutation + gate": apply_with("permutation", verified=True),
}
GUARDED = {"apply + gate": "apply", "permutation + gate": "apply permutation"}
"""Job with the gate -> the write that it guards."""


def measure(job: str, folder: Path, device: str) -> dict[str, Any]:
    """One run, in the process that does it."""
    out = folder / "out"
    work = JOBS[job](folder, out, device)
    before, start = time.process_time(), time.perf_counter()
    work()
    closed = time.perf_counter() - start
    os.sync()
    synced = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": closed,
        "seconds_to_disk": synced,
        "cpu_seconds": used.ru_utime + used.ru_stime - before,
        "peak_rss": used.ru_maxrss * 1024,
    }


def child(*arguments: str) -> dict[str, Any]:
    """Run this script in a fresh process; its last line is the result."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="symmerge-bench-", dir=arguments.temp) as temporary:
        folder = Path(temporary)
        checkpoint = child(
            "--make",
            temporary,
            "--gb",
            str(arguments.gb),
            "--dtype",
            arguments.dtype,
            "--width",
            str(arguments.width),
        )
        runs = []
        for turn in range(arguments.rounds):
            for job in JOBS:
                os.sync()  # flush pending writes before a job starts
                load = os.getloadavg()[0]
                runs.append(
                    {
                        "job": job,
                        "round": turn,
                        "load_before": load,
                        **child(
                            *("--job", job, "--folder", temporary, "--device", arguments.device)
                        ),
                    }
                )
                shutil.rmtree(folder / "out", ignore_errors=True)
    checkpoint = {"dtype": arguments.dtype, "width": arguments.width, **checkpoint}
    return {
        "machine": machine(),
        "device": arguments.device,
        "checkpoint": checkpoint,
        "summary": summary(runs, checkpoint),
        "runs": runs,
    }


def machine() -> dict[str, Any]:
    versions = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    return {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **versions,
    }


def summary(runs: list[dict[str, Any]], checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """For each job: the best and the median of all runs, and the largest peak of any."""
    limit = MEMORY_FIXED + MEMORY_TENSORS * checkpoint["largest"]
    rows = []
    for job in JOBS:
        mine = [run for run in runs if run["job"] == job]
        speeds = {
            key: [checkpoint["bytes"] / run[key] / 1e9 for run in mine]
            for key in ("seconds", "seconds_to_disk")
        }
        peak = max(run["peak_rss"] for run in mine)
        rows.append(
            {
                "job": job,
                "best_gb_s": max(speeds["seconds"]),
                "median_gb_s": statistics.median(speeds["seconds"]),
                "best_to_disk_gb_s": max(speeds["seconds_to_disk"]),
                "median_to_disk_gb_s": statistics.median(speeds["seconds_to_disk"]),
                "peak_mb": peak / 1e6,
                "limit_mb": limit / 1e6,
                "within_memory": peak <= limit,
            }
        )
    for row in rows:
        row["ratio"] = row["best_gb_s"] / rows[0]["best_gb_s"]
        row["ratio_to_disk"] = row["best_to_disk_gb_s"] / rows[0]["best_to_disk_gb_s"]
    seconds = {row["job"]: 1 / row["best_gb_s"] for row in rows}
    for row in rows:
        if write := GUARDED.get(row["job"]):
            row["gate_over_write"] = seconds[row["job"]] / seconds[write] - 1
    return rows


def show(result: dict[str, Any]) -> None:
    checkpoint = result["checkpoint"]
    print(
        f"{checkpoint['bytes'] / 1e9:.2f} GB, {checkpoint['dtype']}, width {checkpoint['width']},"
        f" {checkpoint['layers']} layers, largest tensor {checkpoint['largest'] / 1e6:.0f} MB"
    )
    columns = f"{'median':>8}{'ratio':>7}"
    print(f"{'job':20}{'GB/s':>7}{columns}  | to disk{columns}  | peak MB  limit")
    for row in result["summary"]:
        print(
            f"{row['job']:20}{row['best_gb_s']:7.2f}{row['median_gb_s']:8.2f}{row['ratio']:7.2f}"
            f"  |{row['best_to_disk_gb_s']:8.2f}{row['median_to_disk_gb_s']:8.2f}"
            f"{row['ratio_to_disk']:7.2f}  |{row['peak_mb']:8.0f}{row['limit_mb']:7.0f}"
        )
    for row in result["summary"]:
        if "gate_over_write" in row:
            gate, write = f"{row['gate_over_write']:.2f}", GUARDED[row["job"]]
            print(f"the gate takes {gate} times as long as the write it guards ({write})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gb", type=float, default=2.0, help="at least so many gigabytes of weights"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--width", type=int, default=1024, help="of the stream; a multiple of 256")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--temp", type=Path, help="where to put the checkpoints; three times --gb are needed"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        print(json.dumps(make(arguments.make, arguments.gb, arguments.dtype, arguments.width)))
    elif arguments.job:
        print(json.dumps(measure(arguments.job, arguments.folder, arguments.device)))
    else:
        result = run(arguments)
        show(result)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
