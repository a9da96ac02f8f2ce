"""Linear probes trained on A, moved to B: how accurate are they there?

    python experiments/probes.py --models seed-0 seed-1 --data text.txt --out FILE.json

Properties of a token: it begins a word; the next one does; it is one of the common ones. Logistic
probes read the stream after --layers. Rows, per ordered pair: A itself; B with A's probe unaligned;
moved by the alignment of every --efforts; by the rotation, by the regression, and by a new probe
fitted to the old one's answers, all three on text that both models write; and B with a probe of its
own. `kept` is accuracy over that of A's probe on A.
"""

from __future__ import annotations

import argparse
import json
import lzma
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


def properties(model: Any, tokens: Tensor, blocks: Tensor) -> dict[str, Tensor]:
    """What the probes are for, one truth value per token."""
    from symmerge.evaluation.tasks.preprocessing import tokenizer_of

    count = model.spec.sizes["vocabulary"]
    pieces = tokenizer_of(model).convert_ids_to_tokens(range(count))
    begins = torch.tensor([bool(piece) and piece[0] in "Ġ▁ " for piece in pieces])[blocks]
    often = torch.bincount(tokens, minlength=count)
    ranked = often.sort(descending=True).values
    common = often >= ranked[ranked.cumsum(0) * 2 <= len(tokens)].min()  # half of the text
    return {
        "begins a word": begins.flatten(),
        "before a word": begins.roll(-1, 1).flatten(),
        "common": common[blocks].flatten(),
    }


def cell(pair: Any, read: Any, labels: Tensor, layer: int, options: Any, found: Any) -> Any:
    """The accuracy of every way to get a probe for B."""
    import symmerge as sm

    (a, b), train = pair, torch.arange(len(labels)) < len(labels) * 3 // 4

    def accuracy(x: Tensor, weight: Tensor, bias: Tensor) -> float:
        return float((((x @ weight + bias) > 0) == labels)[~train].double().mean())

    weight, bias = probe_for(read[a][train], labels[train].float())
    own = probe_for(read[b][train], labels[train].float())
    share = float(labels[~train].double().mean())
    result = {
        "A": accuracy(read[a], weight, bias),
        "B, probe of its own": accuracy(read[b], *own),
        "majority": max(share, 1 - share),
        "B, unaligned": accuracy(read[b], weight, bias),
    }
    for effort in options.efforts:
        moved = sm.carry_direction(found[effort], weight, use="compared")
        result[f"B, {effort}"] = accuracy(read[b], moved, bias)
    for how in ("rotation", "regression"):
        result[f"B, {how}"] = accuracy(read[b], *found[how, layer].probe(weight, bias))
    how = {"layer": layer, "data": options.text, "device": options.device}
    answers = sm.carry_probe(*options.models_of[a, b], weight, bias, **how)
    return {**result, "B, answers": accuracy(read[b], *answers)}


def main() -> None:
    import symmerge as sm
    from symmerge.evaluation.tasks import make_task, task_of
    from symmerge.evaluation.tasks.preprocessing import tokenizer_of

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 6])
    parser.add_argument("--efforts", nargs="*", default=["fast"])
    parser.add_argument("--texts", type=int, default=192, help="rows of 128 that models write")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    models = [sm.load(folder) for folder in options.models]
    raw = options.data.read_bytes()
    raw = lzma.decompress(raw) if options.data.suffix == ".xz" else raw
    text = raw.decode("utf-8", "ignore")[:300_000]
    encoded = tokenizer_of(models[0])(text, verbose=False, add_special_tokens=False)
    tokens = torch.tensor(encoded["input_ids"])
    blocks = tokens[: len(tokens) // 128 * 128].view(-1, 128)[:96]
    truths = properties(models[0], tokens, blocks)
    results = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(*one["pair"], one["layer"]) for one in results}
    pairs = sorted(permutations(range(len(models)), 2), key=lambda p: (p[1] - p[0]) % len(models))
    for a, b in pairs[: options.pairs]:
        layers = [layer for layer in options.layers if (a, b, layer) not in done]
        if not layers:
            continue
        both = models[a], models[b]
        how = {"samples": options.texts, "length": 128, "seed": 3, "device": options.device}
        options.text = make_task(task_of(both[0]), "self", both, **how)
        options.models_of = {(a, b): both}
        found: dict[Any, Any] = {
            effort: sm.align(*both, sm.AlignOptions(effort=effort, device=options.device))
            for effort in options.efforts
        }
        for layer in layers:
            for kind in ("rotation", "regression"):
                fit = {"layer": layer, "data": options.text, "device": options.device}
                found[kind, layer] = sm.fit_streams(*both, how=kind, **fit)
            read = {at: states(models[at], blocks, layer) for at in (a, b)}
            for name, labels in truths.items():
                known = cell((a, b), read, labels, layer, options, found)
                kept = {key: value / known["A"] for key, value in known.items() if key[0] == "B"}
                results.append({"pair": [a, b], "layer": layer, "property": name, **known})
                results[-1]["kept"] = kept
                shown = {key: round(value, 3) for key, value in kept.items()}
                print(a, b, layer, name, shown, flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    names = results[0]["kept"]
    for name in names:
        kept = torch.tensor([one["kept"][name] for one in results])
        enough = f"above .95 in {int((kept >= 0.95).sum())} of {len(kept)}"
        print(f"{name:24} kept {kept.mean():.3f}, least {kept.min():.3f}, {enough}")


if __name__ == "__main__":
    main()
