"""Time of linear assignments: scipy's dense solver, LAPJV packages, and ours with its proof.

Instances: FF units of two trained networks (`--pair`, given twice for two families), independent
units of low rank, units of uneven norms, a planted permutation under noise, pure noise. Every
solver takes the same centred scores in one thread of one process; times are ratios to scipy on the
same instance in the same run. A warm start solves the scores plus 2 % noise from earlier prices.
LAPJV packages (`lapx`, `lapjv`) take part if they are installed.

    python benchmarks/assign.py [--sizes 1024 3072] [--pair A B] [--device cuda]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symmerge.symmetry.groups.assignment import dense_assignment, gap_at, solve_assignments

RESULTS = Path(__file__).parent / "results"
FF = ("c_fc.weight", "gate_proj.weight", "up_proj.weight")  # [in, out] in GPT-2, [out, in] else
EMBEDDINGS = ("wte.weight", "embed_tokens.weight", "lm_head.weight")


def units(folder: Path, rotation: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
    """Incoming weights of the hidden units of some layers, [units, width]."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for layer in (1, 3):
        rows = [
            weight.double().mT if name.endswith(FF[0]) else weight.double()
            for name, weight in sorted(tensors.items())
            if name.endswith(FF) and f".{layer}." in name
        ]
        moved = rows if rotation is None else [each @ rotation for each in rows]
        yield f"{folder.name}, layer {layer}", torch.cat(moved, 1)


def rotation(a: Path, b: Path) -> Tensor:
    """From A's stream to B's, by their embeddings."""
    from safetensors.torch import load_file

    sides = [
        torch.cat([t.double() for name, t in sorted(load_file(f / "model.safetensors").items())
                   if name.endswith(EMBEDDINGS)])
        for f in (a, b)
    ]  # fmt: skip
    u, _, v = torch.linalg.svd(sides[0].mT @ sides[1])
    return u @ v


def trained(pair: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Scores of hidden units of two networks, after their streams are aligned."""
    a, b = map(Path, pair)
    for (name, x), (_, y) in zip(units(a, rotation(a, b)), units(b), strict=True):
        yield f"{name} and {b.name}", x @ y.mT


def made(n: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """Instances of any size."""
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    a, b, width = normal(n, n // 4), normal(n, n // 4), (n // 4) ** 0.5
    yield "noise", normal(n, n)
    yield "independent units", a @ b.mT / width
    yield "uneven norms", (a * normal(n, 1).exp()) @ (b * normal(n, 1).exp()).mT / width
    order = torch.randperm(n, generator=generator).to(device)
    for level in (2.0, 8.0):
        yield f"planted, noise {level:g}", a @ (a[order] + level * b).mT / width


def packages() -> dict[str, Callable[[Tensor], Tensor]]:
    """LAPJV from the registry."""
    solvers: dict[str, Callable[[Tensor], Tensor]] = {}
    if importlib.util.find_spec("lap"):
        import lap  # pyright: ignore[reportMissingImports]

        solvers["lapx"] = lambda cost: torch.as_tensor(
            lap.lapjv(cost.numpy(), return_cost=False)[0]
        )
    if importlib.util.find_spec("lapjv"):
        from lapjv import lapjv  # pyright: ignore[reportMissingImports]

        solvers["lapjv"] = lambda cost: torch.as_tensor(lapjv(cost.numpy())[0])
    return solvers


def timed(solve: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    start = time.perf_counter()
    result = solve()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def total(score: Tensor, index: Tensor) -> float:
    """The value of a permutation."""
    return float(score[torch.arange(len(index)), index.long()].double().sum())


def compare(name: str, score: Tensor) -> dict[str, Any]:
    """All solvers on one instance."""
    solve_assignments(score[:64, :64])
    ours, found = timed(lambda: solve_assignments(score))
    again = score + 0.02 * score.std() * torch.randn_like(score)
    warm, _ = timed(lambda: solve_assignments(again, found.prices))
    host = score.cpu().double()
    dense, index = timed(lambda: dense_assignment(host))
    seconds = {"scipy": dense, "ours": ours, "ours, warm": warm}
    differences = {"ours": total(host, index) - total(host, found.index)}
    centred = -(host - host.mean(1, keepdim=True) - host.mean(0, keepdim=True))
    for package, solve in packages().items():
        seconds[package], other = timed(lambda solve=solve: solve(centred))
        differences[package] = total(host, index) - total(host, other)
    return {
        "instance": name,
        "units": len(score),
        "exact": bool(found.exact),
        "gap": gap_at(host, found.index, found.prices),
        "same_permutation": bool(torch.equal(index, found.index)),
        "value_of_scipy_less": differences,
        "seconds": {key: round(value, 4) for key, value in seconds.items()},
        "ratio_to_scipy": {key: round(value / dense, 3) for key, value in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1024, 3072])
    parser.add_argument("--pair", nargs=2, action="append", default=[])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    instances = [pair for folders in options.pair for pair in trained(folders)]
    rows = [compare(name, score.to(options.device)) for name, score in instances]
    for n in options.sizes:
        for name, score in made(n, options.device):
            rows.append(compare(name, score))
            print(json.dumps(rows[-1]), flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    versions = {name: version(name) for name in ("torch", "scipy", "numpy", *packages())}
    results = {"machine": machine, "versions": versions, "device": options.device, "rows": rows}
    path = RESULTS / f"assign-{options.device}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
