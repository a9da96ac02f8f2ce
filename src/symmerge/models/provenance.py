"""Where a model came from, what was done to it, and how it was checked: the content of symmerge.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmerge.models.model import Model

from symmerge.checkpoints.card import SCHEMA, versions


def provenance(model: Model, evidence: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where a model came from, what was done to it, and how it was checked."""
    return {
        "schema": SCHEMA,
        "source": model.where,
        "source_sha256": model.digest(),
        "architecture": model.spec.architecture,
        "stock": model.stock,
        "family": model.spec.family,
        "spec_sha256": model.spec.fingerprint,
        "steps": [dict(step) for step in model.history],
        "verified": dict(evidence) if evidence else None,
        "versions": versions(),
    }
