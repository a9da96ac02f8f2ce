"""Merging at the sizes people have: seconds, peak memory, beside a file copy and a forward pass.

Two Llama checkpoints of random weights (trained ones would cost the same) are written in bfloat16,
then `symmerge merge A B --effort fast` runs as a user would run it: align, gate, merge, write.
Ratios are against copying both files and against a plain forward pass of one model over 1,024
tokens, in the same run. Memory is sampled while the command runs: `anonymous` is what the process
itself holds, `resident` counts the mapped files as well, which the system may drop at any time.

    python benchmarks/scale.py --size 1.5b [--device cuda] [--cores 2] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "scale.json"
FIELDS = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
SIZES = {
    "0.1b": (768, 2048, 12, 12, 4, 32_000),
    "1.5b": (2048, 8192, 16, 32, 8, 128_256),
    "3b": (3072, 8192, 28, 24, 8, 128_256),
    "7b": (4096, 14_336, 32, 32, 8, 32_000),
}
POLL = 0.2  # seconds
GB = 1e9


def config(size: str) -> dict[str, Any]:
    *body, key_value_heads, words = SIZES[size]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **dict(zip(FIELDS, body, strict=True)),
        "num_key_value_heads": key_value_heads,
        "vocab_size": words,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def make(folder: Path, size: str, device: str) -> list[Path]:
    """Two checkpoints with independent random weights, tensor by tensor."""
    import torch

    from symmerge.checkpoints.files import write_json
    from symmerge.checkpoints.folders import new_folder
    from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
    from symmerge.checkpoints.writing import write_weights
    from symmerge.families import family_of
    from symmerge.models.binding import bind

    written = config(size)
    spec = bind(family_of("llama", size), written, ["lm_head.weight"], size)
    paths = []
    for seed in (0, 1):
        paths.append(folder / f"{size}-{seed}")
        if paths[-1].exists():
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
        with new_folder(paths[-1]) as target:
            write_json(target / "config.json", written)
            write_weights(target, weights)
    return paths


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


class Memory(threading.Thread):
    """The most memory that a process held while it ran, in GB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.most, self.going = (
            pid,
            dict.fromkeys(("anonymous", "resident", "gpu"), 0.0),
            True,
        )

    def run(self) -> None:
        while self.going:
            for name, value in self._now():
                self.most[name] = max(self.most[name], value / GB)
            time.sleep(POLL)

    def _now(self) -> Iterator[tuple[str, float]]:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:  # it has ended
            return
        sizes = dict(line.split(":", 1) for line in lines)
        for name, key in (("anonymous", "RssAnon"), ("resident", "VmRSS")):
            yield name, float(sizes.get(key, "0 kB").split()[0]) * 1024
        if shutil.which("nvidia-smi"):
            asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            yield "gpu", float(subprocess.check_output(asked, text=True).split()[0]) * 2**20


def measure(size: str, folder: Path, device: str, cores: int | None, first: int) -> dict[str, Any]:
    paths = [folder / f"{size}-{seed}" for seed in (0, 1)]
    out = folder / f"{size}-merged"
    shutil.rmtree(out, ignore_errors=True)
    pinned = ["taskset", "-c", f"{first}-{first + cores - 1}"] if cores else []
    command = [*pinned, sys.executable, "-u", "-m", "symmerge", "merge", *map(str, paths)]
    command += ["--out", str(out), "--effort", "fast", "--no-verdict", "--device", device]
    threads = {"OMP_NUM_THREADS": str(cores)} if cores else {}
    began = time.perf_counter()
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **threads},
    )
    memory = Memory(child.pid)
    memory.start()
    assert child.stdout
    phases = []
    for line in child.stdout:
        phases.append([round(time.perf_counter() - began, 1), line.rstrip()[:100]])
        print(*phases[-1], flush=True)
    code = child.wait()
    seconds, memory.going = time.perf_counter() - began, False
    shutil.rmtree(out, ignore_errors=True)
    copy, plain = copied(paths, folder), forward(paths[0], device)
    return {
        "size": size,
        "device": device,
        "cores": cores or os.cpu_count(),
        "exit_code": code,
        "seconds": round(seconds, 1),
        "over_copying_both": round(seconds / copy, 1),
        "over_forward_1024_tokens": round(seconds / plain, 1),
        "copy_seconds": round(copy, 2),
        "forward_seconds": round(plain, 3),
        "memory_gb": {name: round(value, 1) for name, value in memory.most.items()},
        "phases": phases[-40:],
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for size in options.size:
            make(folder, size, options.device)
            row = measure(size, folder, options.device, options.cores, options.first_core)
            print(json.dumps({**row, "phases": "..."}, indent=1), flush=True)
            add(options.results, row)


def add(results: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of an earlier one of the same size, device and cores."""
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    same = "size", "device", "cores"
    rows = [other for other in rows if any(other[key] != row[key] for key in same)]
    packages = {name: version(name) for name in ("torch", "transformers", "scipy")}
    content = {"machine": {"machine": platform.machine(), **packages}, "rows": [*rows, row]}
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
