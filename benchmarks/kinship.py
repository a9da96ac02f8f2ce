"""Cost of kinship at GPT-2 small's size: seconds, peak memory, and the ratio to one forward pass.

A random GPT-2 (124M parameters) and a disguised copy of it with noise are written to a temporary
folder, in float16. `kinship` is the whole of `sm.kinship` from two folders; `index` is reading one
model's fingerprint. The ratio is `kinship` against a plain forward pass of both models over 1,024
tokens, by the stock class, in the same run.

    python benchmarks/kinship.py [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RESULTS = Path(__file__).parent / "results" / "kinship.json"
NOISE, TOKENS, GIGABYTE = 0.1, 1024, 1e6  # of ru_maxrss, which counts kilobytes
ALLOWED = {"cpu": 60, "cuda": 15}


def write_pair(root: Path) -> tuple[Path, Path]:
    """A random model, and a relative of it in disguise."""
    import torch
    import transformers

    import symmerge as sm

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    model.half().save_pretrained(root / "a")
    _, moved = sm.random_member(sm.load(root / "a"), 1)
    sm.save(moved, root / "moved")
    relative = transformers.GPT2LMHeadModel.from_pretrained(root / "moved", dtype=torch.float32)
    with torch.no_grad():
        for parameter in relative.parameters():
            parameter.add_(NOISE * parameter.square().mean().sqrt() * torch.randn_like(parameter))
    relative.half().save_pretrained(root / "b")
    return root / "a", root / "b"


def forward_seconds(folders: tuple[Path, Path], device: str) -> float:
    import torch
    import transformers

    tokens = torch.randint(0, 50257, (1, TOKENS), device=device)
    seconds = 0.0
    for folder in folders:
        kind = transformers.GPT2LMHeadModel
        model = kind.from_pretrained(folder, dtype=torch.float32).to(device)
        began = time.perf_counter()
        with torch.no_grad():
            model(tokens)
        seconds += time.perf_counter() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", type=Path, help="where the pair is, or will be")
    options = parser.parse_args()
    import symmerge as sm
    from symmerge.lineage.fingerprints import fingerprint

    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        ready = (root / "b" / "config.json").exists()
        pair = (root / "a", root / "b") if ready else write_pair(root)
        began, busy = time.perf_counter(), time.process_time()
        found = sm.kinship(*pair, device=options.device)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIGABYTE
        began = time.perf_counter()
        fingerprint(pair[0])
        index = time.perf_counter() - began
        forward = forward_seconds(pair, options.device)  # beside the same load
    row = {
        "kinship_s": seconds,
        "processor_s": busy,  # of all threads: what counts where others use the cores as well
        "allowed_s": ALLOWED[options.device],
        "ratio_to_forward": seconds / forward,
        "index_s": index,
        "peak_gb": peak,
        "relation": found.relation,
        "p": found.p,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "processor": platform.processor() or platform.machine(),
        "python": sys.version.split()[0],
    }
    print(json.dumps(row, indent=1))
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, options.device: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
