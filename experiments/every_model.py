"""Is every table exact, and no larger than it says? All small models, one row each.

    python experiments/every_model.py [--models gpt2 t5 ...] [--out FILE.json]

For every model of `lab/small_models.EVERY`, from its own seed:

- `float64`: how much random members of its orbit change its answers, relative (three of them)
- `float32`: the same, written and loaded by the stock class of transformers, run by it alone
- `forbidden`: elements of the next larger groups, space by space: how many change the answers by
  1e-2 or more (or cannot be applied at all, since a gain would have to change), and those of which
  nothing is known; none may change nothing
- `recovered`: how far a copy in random coordinates is from the canonical form after `fast`
- `same`, `gate`: of a random member; the control is one matrix with 5 % of noise
- `stored`: members written in float32, float16 and bfloat16, read again, verified

The file is rewritten after every model, and models that it has are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from derived_tables import answer_of, inputs_of  # which finds tests/helpers
from differences import difference as answers_apart

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.derivation.proving import FORBIDDEN, larger_groups
from symmerge.derivation.running import EXACT, difference, outputs_of
from symmerge.errors import SymmetryError
from symmerge.lab.small_models import EVERY, small_model
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model
from symmerge.models.orbit import random_member
from symmerge.symmetry.notation import atoms
from symmerge.symmetry.spec import Space, layer_of

RESULTS = Path(__file__).parent / "results" / "every-model.json"
PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)
SEEDS, NOISE = 3, 0.05
Row = dict[str, Any]


def row(name: str, folder: Path) -> Row:
    """All that is asked of one small model."""
    start, module = time.monotonic(), small_model(name)
    exact = sm.load(small_model(name, dtype=torch.float64))
    members = [random_member(exact, seed)[1] for seed in range(SEEDS)]
    compared = [sm.verify(exact, member, dtype=torch.float64) for member in members]
    return {
        "model_type": module.config.model_type,
        "class": type(module).__name__,
        "float64": max(one.difference for one in compared),
        "float32": by_stock_class(name, folder / "float32"),
        **forbidden(exact),
        **recovered(exact, members[0]),
        **judged(name),
        "stored": [stored(name, one, folder / str(one)) for one in PRECISIONS],
        "seconds": round(time.monotonic() - start, 1),
    }


def by_stock_class(name: str, folder: Path) -> float:
    """How much a written member's answers differ; symmerge loads and runs nothing of it."""
    module = small_model(name)
    model = sm.load(module)
    sm.save(random_member(model, 1)[1], folder)
    member = type(module).from_pretrained(folder, dtype=torch.float32).eval()
    inputs, read = inputs_of(model), answer_of(model.spec).get("read", outputs_of)
    with torch.no_grad():
        return difference(read(member(**inputs)), read(module(**inputs)))


def forbidden(model: Model) -> Row:
    """What elements of larger groups change, space by space."""
    folded = sm.canonicalize(model, ("fold",)).cached()
    spaces = list(folded.spec.hidden.values())
    heads = {space.per for space in spaces}
    found = {
        (space.name, group.name): larger(folded, replace(space, group=group))
        for space in spaces
        for group in larger_groups(space.group, holds=space.name in heads)
    }
    finite = [change for change in found.values() if change < float("inf")]
    refused = [change for change in finite if change >= FORBIDDEN]
    known = [change for change in finite if change <= EXACT]
    return {
        "spaces": len(spaces),
        "forbidden": len(refused) + len(found) - len(finite),
        "impossible": len(found) - len(finite),
        "least forbidden change": min(refused, default=None),
        "unsure": len(finite) - len(refused) - len(known),
        "larger than the table": len(known),
        "allowed change": max(moved(folded, space, seed=7) for space in spaces),
    }


def larger(model: Model, space: Space) -> float:
    """The largest change of a few elements; infinite if they cannot be applied."""
    try:
        return max(moved(model, space, seed) for seed in range(SEEDS))
    except SymmetryError:  # a gain that is not constant: it would have to change
        return float("inf")


def moved(model: Model, space: Space, seed: int) -> float:
    """How much a random element of one space's group changes the answers."""
    spec = replace(model.spec, spaces={**model.spec.spaces, space.name: space})
    element = space.group.random(torch.Generator().manual_seed(seed), spec.batch(space.name))
    identity = Alignment.identity(spec)
    alignment = replace(identity, elements={**identity.elements, space.name: element})
    return answers_apart(model, sm.apply(alignment, replace(model, spec=spec)))


def recovered(model: Model, moved: Model) -> Row:
    """What weights alone make of a copy in random coordinates."""
    found = sm.align(model, moved, sm.AlignOptions(effort="fast"))
    return {
        "recovered": farthest(found.reference, found.aligned),
        "before": farthest(found.reference, sm.canonicalize(moved)),
    }


def farthest(a: Model, b: Model) -> float:
    """The largest relative distance of a tensor."""
    return max(
        (
            (a.weights[name] - b.weights[name]).norm() / a.weights[name].norm().clamp_min(1e-30)
        ).item()
        for name in a.spec.tensors
    )


def judged(name: str) -> Row:
    """`same` and the gate, of a member and of a damaged one."""
    model = sm.load(small_model(name))
    member = random_member(model, 1)[1]
    wrong = damaged(member)
    return {
        "same": [sm.same(model, member).same, sm.same(model, wrong).same],
        "gate": [sm.verify(model, member).same, sm.verify(model, wrong).same],
    }


def damaged(model: Model) -> Model:
    """One matrix of a layer, of those that move on both sides, with noise."""
    hidden = model.spec.hidden.keys()
    name = max(
        (one for one in model.spec.tensors if len(model.weights.shape(one)) == 2),
        key=lambda one: (
            layer_of(one) is not None,  # what is outside of layers may be read by no answer
            sum(part.space in hidden for part in atoms(model.spec.tensors[one])),
        ),
    )
    weight, generator = model.weights[name], torch.Generator().manual_seed(0)
    noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    wrong: Mapping[str, Callable[[], torch.Tensor]] = {
        name: partial(torch.add, weight, NOISE * weight.std() * noise)
    }
    return model.derive(DerivedWeights(model.weights, wrong), step=model.history[-1])


def stored(name: str, dtype: torch.dtype, folder: Path) -> bool:
    """Whether a member is still the same function after it was written and read."""
    model = sm.load(small_model(name, dtype=dtype))
    again = sm.load(sm.save(random_member(model, 1)[1], folder))
    return again.dtype == dtype and sm.verify(model, again).same


def summary(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The worst of everything."""
    complete = [one for one in rows.values() if "error" not in one]
    if not complete:
        return {"models": len(rows), "failed": len(rows)}
    return {
        "models": len(rows),
        "failed": len(rows) - len(complete),
        "model types": len({one["model_type"] for one in complete}),
        "float64, largest": max(one["float64"] for one in complete),
        "float32, largest": max(one["float32"] for one in complete),
        "forbidden, fewest of a model": min(one["forbidden"] for one in complete),
        "forbidden, least change": min(one["least forbidden change"] or 9 for one in complete),
        "unsure": sum(one["unsure"] for one in complete),
        "larger than the table": sum(one["larger than the table"] for one in complete),
        "recovered, farthest": max(one["recovered"] for one in complete),
        "not recovered": [name for name, one in rows.items() if one.get("recovered", 0) > 1e-5],
        "same": [sum(one["same"][at] for one in complete) for at in (0, 1)],
        "gate": [sum(one["gate"][at] for one in complete) for at in (0, 1)],
        "stored": [sum(one["stored"][at] for one in complete) for at in range(len(PRECISIONS))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[*EVERY], choices=[*EVERY])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    state = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    rows: dict[str, Row] = state.get("models", {})
    for name in options.models:
        if name in rows and "error" not in rows[name]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows[name] = row(name, Path(folder))
            except Exception as error:  # one model that fails is told, and the others go on
                rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(name, rows[name], flush=True)
        text = json.dumps({"summary": summary(rows), "models": rows}, indent=1) + "\n"
        options.out.write_text(text, "utf-8")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
