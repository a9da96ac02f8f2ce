"""Cost of a data-free alignment: seconds, peak memory and where the time goes.

Two checkpoints with independent random weights are written to a temporary folder; trained weights
would cost the same. Each case runs in its own process. `solve` is `sm.align` from two folders to a
solution; `merge` also writes the merged checkpoint. The ratio is `solve` against plain forward
passes of both models over 1,024 tokens, by the stock class, in the same run.

    python benchmarks/align.py [--case gpt2-small|llama-1b|llama-1.5b] [--folder DIR]
        [--device cuda] [--fast]     on a GPU; weights alone, without self-generated text
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "align.json"
CASES: dict[str, dict[str, Any]] = {
    "gpt2-small": {
        "config": {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "tie_word_embeddings": False,
        },
        "dtype": "float32",
        "allowed": {"solve_s": 90, "peak_gb": 3},
    },
    "llama-1b": {
        "config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
        "dtype": "bfloat16",
        "allowed": {"peak_gb": 24},
    },
}
CASES["llama-1.5b"] = {
    "config": {**CASES["llama-1b"]["config"], "vocab_size": 128256},
    "dtype": "bfloat16",
    "allowed": {"cpu": {"solve_s": 200}, "cuda": {"solve_s": 30}},
}
# The functions that take most of the time, and what they do.
COSTS = {
    "_match_stream": "stream: products and rotation",
    "side_by_side": "heads and units of all layers, and the objective",
    "_polar": "rotation of the stream and of bases (SVD)",
    "balance_circuit": "canonical form of heads (QR, SVD)",
    "scale_costs": "scales of all pairs of units",
    "make_probe": "self-generated text and activations",
    "_measure": "objective",
    "distance": "distances before and after",
}


def make(folder: Path, case: str) -> list[Path]:
    """Two checkpoints with independent random weights, tensor by tensor."""
    import torch

    from symmerge.checkpoints.files import write_json
    from symmerge.checkpoints.folders import new_folder
    from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
    from symmerge.checkpoints.writing import write_weights
    from symmerge.families import family_of
    from symmerge.models.binding import bind

    config, dtype = CASES[case]["config"], getattr(torch, CASES[case]["dtype"])
    spec = bind(family_of(config["model_type"], case), config, ["lm_head.weight"], case)
    paths = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)

        def draw(name: str, generator: torch.Generator = generator) -> torch.Tensor:
            shape = spec.shapes[name]
            gain = len(shape) == 1 and name.endswith("weight")
            return torch.ones(shape) if gain else 0.02 * torch.randn(shape, generator=generator)

        computed = {name: (lambda name=name, draw=draw: draw(name)) for name in spec.tensors}
        weights = DerivedWeights(
            MemoryWeights({}),
            computed,
            added={name: (spec.shapes[name], dtype) for name in spec.tensors},
        )
        paths.append(folder / f"{case}-{seed}")
        if not paths[-1].exists():
            with new_folder(paths[-1]) as target:
                write_json(target / "config.json", {**config, "dtype": CASES[case]["dtype"]})
                write_weights(target, weights)
    return paths


def forward(model: Any) -> float:
    """Seconds of one plain forward pass of the stock class over 1,024 tokens."""
    import torch

    from symmerge.verification.modules import full_module

    module = full_module(model, torch.float32)
    tokens = torch.randint(
        0, model.spec.sizes["vocabulary"], (4, 256), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        module(input_ids=tokens[:1, :16])
        began = time.perf_counter()
        module(input_ids=tokens)
    return time.perf_counter() - began


def measure(case: str, folder: Path, device: str, fast: bool) -> dict[str, Any]:
    import symmerge as sm
    from symmerge.checkpoints.memory import return_freed_memory
    from symmerge.matching.weights import WeightMatching

    merge, method = case == "llama-1b", WeightMatching(generate_text=not fast, device=device)

    return_freed_memory()  # as the command line does
    models = [sm.load(path) for path in (folder / f"{case}-0", folder / f"{case}-1")]
    profile = cProfile.Profile()
    began = time.perf_counter()
    aligned = profile.runcall(sm.align, *models, method)
    solved = time.perf_counter() - began
    if merge:
        merged = sm.average(aligned.reference, aligned.aligned)
        sm.save(merged, folder / f"{case}-merged", overwrite=True)
    total = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    passes = sum(forward(model) for model in models)
    entries: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    costs = {
        COSTS[name]: round(
            sum(row[3] for (_, _, function), row in entries.items() if function == name), 1
        )
        for name in COSTS
        if any(f == name for _, _, f in entries)
    }
    return {
        "case": case + (", fast" if fast else "") + (f", {device}" if device != "cpu" else ""),
        "solve_s": round(solved, 1),
        "solve_and_merge_s": round(total, 1) if merge else None,
        "peak_gb": round(peak / 1e9, 2),
        "forward_s": round(passes, 2),
        "solve_over_forward": round(solved / passes, 1),
        "costs_s": dict(sorted(costs.items(), key=lambda item: -item[1])),
        "distance_after": round(aligned.after, 3),
        "allowed": CASES[case]["allowed"],
    }


def _child(step: str, case: str, folder: Path, *more: str) -> str:
    """Run a step in its own process, so that peak memory is measured per step."""
    command = [sys.executable, __file__, "--child", step, "--case", case, "--folder", str(folder)]
    command += more
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument(
        "--folder", type=Path, help="where to keep the checkpoints (default: a temporary folder)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--child", choices=("make", "measure"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "make":
        make(options.folder, options.case[0])
        return
    if options.child == "measure":
        case = options.case[0]
        print(json.dumps(measure(case, options.folder, options.device, options.fast)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rows, fast = [], ["--fast"] if options.fast else []
        for case in options.case or CASES:
            _child("make", case, folder)
            output = _child("measure", case, folder, "--device", options.device, *fast)
            rows.append(json.loads(output.splitlines()[-1]))
            print(json.dumps(rows[-1], indent=2))
    rows_by_case = (
        {row["case"]: row for row in json.loads(RESULTS.read_text())["rows"]}
        if RESULTS.exists()
        else {}
    )
    rows_by_case |= {row["case"]: row for row in rows}
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "transformers", "scipy")},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"machine": machine, "rows": list(rows_by_case.values())}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
