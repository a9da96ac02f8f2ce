"""The model card: README.md of a written checkpoint, rendered from its provenance."""

from __future__ import annotations

import json

from symmerge.checkpoints.provenance import HistoryStep, Provenance, Verdict

NOT_STOCK = (
    "**It is not a stock checkpoint**: its heads have twice the size, for research."
    " Only symmerge loads it."
)


def model_card(provenance: Provenance) -> str:
    """A model card in the hub's form."""
    merge = next((step for step in provenance.steps if step.parents is not None), None)
    record = provenance.to_json()
    origin = {key: record[key] for key in ("source_sha256", "spec_sha256", "versions")}
    return f"""---
library_name: transformers
tags:
- symmerge
---
# {provenance.architecture}, {"merged" if merge else "moved along its symmetries"}

Written by [symmerge](symmerge.json) {provenance.versions["symmerge"]} from `{provenance.source}`.
{_kind(merge) if provenance.stock else NOT_STOCK}

## What was done
{_steps(provenance)}

{_parents(merge) if merge else _verdict(provenance.verified)}

## Provenance
```json
{json.dumps(origin, indent=2)}
```
"""


def _kind(merge: HistoryStep | None) -> str:
    what = "other weights, the same function"
    if merge:
        method = merge.details.get("method", "mean")
        how = "a weighted mean" if method == "mean" else method
        what = f"{how} of aligned models, of the original size"
    return (
        f"It is a stock checkpoint: {what}.\nLoad it with `transformers` as you would the source."
    )


def _steps(provenance: Provenance) -> str:
    lines = [
        f"{number}. **{step.step}**: {step.what}" for number, step in enumerate(provenance.steps, 1)
    ]
    return "\n".join(lines) or "Nothing: the weights are the source's."


def _parents(merge: HistoryStep) -> str:
    """The merged models, and what was done to each before."""
    rows = [
        f"| `{parent.where}` | {parent.weight:g} | {_before(parent.steps)}"
        f" | `{parent.sha256[:16]}` |"
        for parent in merge.parents or ()
    ]
    evidence = [
        f"- {name.replace('_', ' ')}: {value}" for name, value in (merge.evidence or {}).items()
    ] or ["None was given: the parents were averaged as they are."]
    table = ["| model | weight | done before | sha256 |", "|---|---|---|---|", *rows, ""]
    return "\n".join(["## Parents", *table, "## Evidence that they belong together", *evidence, ""])


def _before(steps: tuple[HistoryStep, ...]) -> str:
    return "; ".join(f"{step.step}: {step.what}" for step in steps) or "as it is"


def _verdict(verdict: Verdict | None) -> str:
    text = "Not checked: it was written without verification."
    if verdict:
        tensors = f"All {verdict.tensors} tensors are transports of the source's, computed again."
        text = (
            f"Yes. {tensors if verdict.tensors else ''}\nRelative difference of the logits"
            f" {verdict.difference:.1e} (one more rounding makes {verdict.rounding:.1e}),"
            f" largest absolute difference {verdict.largest:.1e}, on {verdict.inputs}."
        )
    return f"## Is it the same function?\n{text}\n"
