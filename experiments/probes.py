"""A linear probe trained on A, moved to B: how accurate is it there?

    python experiments/probes.py --models seed-0 seed-1 --data text.txt --out FILE.json

The property of a token is whether it begins a word (its text begins with a space). A logistic probe
reads the stream after --layer layers. Rows: A itself, B with A's probe unaligned, moved by weights
and by the alignment of --effort standard, and B with a probe of its own. No data is used to align.
"""

from __future__ import annotations

import argparse
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def states(model: Any, blocks: Tensor, layer: int) -> Tensor:
    from symmerge.verification.modules import full_module

    module = full_module(model, torch.float32).eval()
    read = [module(x, output_hidden_states=True).hidden_states[layer] for x in blocks.split(8)]
    return torch.cat(read).flatten(0, 1)


def probe_for(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Logistic regression by L-BFGS."""
    weight, bias = (torch.zeros(n, requires_grad=True) for n in (x.shape[1], 1))
    solver = torch.optim.LBFGS([weight, bias], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, y)
        loss = loss + 1e-4 * weight.square().sum()
        loss.backward()
        return loss

    solver.step(closure)  # type: ignore[arg-type]
    return weight.detach(), bias.detach()


def main() -> None:
    import symmerge as sm
    from symmerge.evaluation.tasks.preprocessing import tokenizer_of

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--efforts", nargs="+", default=["fast", "standard"])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    models = [sm.load(folder) for folder in options.models]
    tokenizer = tokenizer_of(models[0])
    text = options.data.read_text("utf-8", "ignore")[:300_000]
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    blocks = tokens[: len(tokens) // 128 * 128].view(-1, 128)[:96]
    pieces = tokenizer.convert_ids_to_tokens(range(models[0].spec.sizes["vocabulary"]))
    begins = torch.tensor([bool(piece) and piece[0] in "Ġ▁ " for piece in pieces])
    labels = begins[blocks].flatten().float()
    train = torch.arange(len(labels)) < len(labels) * 3 // 4

    def accuracy(x: Tensor, weight: Tensor, bias: Tensor) -> float:
        return float((((x @ weight + bias) > 0) == (labels > 0.5))[~train].double().mean())

    read = {model.where: states(model, blocks, options.layer) for model in models}
    results = []
    for a, b in permutations(models, 2):
        weight, bias = probe_for(read[a.where][train], labels[train])
        own = probe_for(read[b.where][train], labels[train])
        cell = {
            "pair": [a.path.name, b.path.name],  # type: ignore[union-attr]
            "A": accuracy(read[a.where], weight, bias),
            "B, probe of its own": accuracy(read[b.where], *own),
            "B, unaligned": accuracy(read[b.where], weight, bias),
            "majority": float(labels[~train].mean().clamp(min=float(1 - labels[~train].mean()))),
        }
        for effort in options.efforts:
            how = sm.AlignOptions(effort=effort, device=options.device)
            moved = sm.carry_direction(sm.align(a, b, how), weight, use="compared")
            cell[f"B, moved, {effort}"] = accuracy(read[b.where], moved, bias)
        results.append(cell)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
