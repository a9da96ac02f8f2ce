"""The record that travels with a written checkpoint: symmerge.json for programs, README.md for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

SCHEMA = 1


def versions() -> dict[str, str]:
    """Of what can change a result."""
    return {name: version(name) for name in ("symmerge", "torch", "transformers", "numpy", "scipy")}


def model_card(record: Mapping[str, Any]) -> str:
    """A model card in the hub's form."""
    merge = next((step for step in record["steps"] if step["step"] == "merge"), None)
    merged = merge is not None
    how = merge.get("method", "mean") if merge else ""
    what = (
        f"{'a weighted mean' if how == 'mean' else how} of aligned models, of the original size"
        if merged
        else "other weights, the same function"
    )
    kind = (
        f"It is a stock checkpoint: {what}.\nLoad it with `transformers` as you would the source."
    )
    if not record["stock"]:
        kind = "**It is no stock checkpoint**: its heads have twice the size, for research. Only symmerge loads it."
    steps = "\n".join(
        f"{number}. **{step['step']}**: {step['what']}"
        for number, step in enumerate(record["steps"], 1)
    )
    return f"""---
library_name: transformers
tags:
- symmerge
---
# {record["architecture"]}, {"merged" if merged else "moved along its symmetries"}

Written by [symmerge](symmerge.json) {record["versions"]["symmerge"]} from `{record["source"]}`. {kind}

## What was done
{steps or "Nothing: the weights are the source's."}

{_parents(merge) if merge else "## Is it the same function?" + chr(10) + _verdict(record["verified"]) + chr(10)}

## Provenance
```json
{json.dumps({key: record[key] for key in ("source_sha256", "spec_sha256", "versions")}, indent=2)}
```
"""


def _parents(merge: Mapping[str, Any]) -> str:
    """What was merged, with what was done to each parent before."""
    rows = []
    for parent in merge["parents"]:
        done = (
            "; ".join(f"{step['step']}: {step['what']}" for step in parent["steps"]) or "as it is"
        )
        rows.append(
            f"| `{parent['where']}` | {parent['weight']:g} | {done} | `{parent['sha256'][:16]}` |"
        )
    evidence = merge.get("evidence")
    found = (
        [f"- {name.replace('_', ' ')}: {value}" for name, value in evidence.items()]
        if evidence
        else ["None was given: the parents were averaged as they are."]
    )
    return "\n".join(
        [
            "## Parents",
            "| model | weight | done before | sha256 |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Evidence that they belong together",
            *found,
            "",
        ]
    )


def _verdict(verified: Mapping[str, Any] | None) -> str:
    if not verified:
        return "Not checked: it was written without verification."
    return (
        f"Yes. Relative difference of the logits {verified['difference']:.1e} (tolerance {verified['tolerance']:.0e} for {verified['dtype']}),"
        f" largest absolute difference {verified['largest']:.1e}, on {verified['inputs']}."
    )
