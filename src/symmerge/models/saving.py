"""Write a model as a stock checkpoint, checked by a gate, with a record of where it came from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from symmerge.checkpoints.card import model_card
from symmerge.checkpoints.files import write_json, write_text
from symmerge.checkpoints.folders import new_folder
from symmerge.checkpoints.provenance import Provenance, Verdict
from symmerge.checkpoints.versions import installed_versions
from symmerge.checkpoints.writing import DEFAULT_SHARD, write_weights
from symmerge.models.model import Gate, Model, load
from symmerge.models.progress import Progress
from symmerge.symmetry.threads import same_bytes


@same_bytes()
def save(
    model: Model,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD,
    progress: Progress | None = None,
    gate: Gate | None = None,
    beside: Callable[[Path], None] | None = None,
    quality: str = "",
    inputs: tuple[Path, ...] = (),
) -> Path:
    """Write a stock checkpoint: weights, config, tokenizer files, and a model card.

    The folder appears complete or not at all. `gate` sees the written checkpoint, and the model
    that was written, before it appears; its verdict goes into the record, and if it raises,
    nothing appears. `beside` may write more files into the folder; `quality` is for the card, and
    says how good the model is. `inputs` are files that were read beside the model: `target` may
    not hold them.
    """
    inputs = (*inputs, model.path) if model.path else inputs
    config = {**model.config, "architectures": [model.spec.architecture]}
    with new_folder(
        Path(target), overwrite=overwrite, needs_bytes=model.bytes, inputs=inputs
    ) as folder:
        for file in model.files:
            shutil.copyfile(file, folder / file.name)
        write_json(folder / "config.json", config)
        write_weights(
            folder,
            model.weights,
            stored_as=model.stored_as,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
        if beside:
            beside(folder)
        # The gate runs the stock class: no need to build it for a check before.
        verdict = gate(load(folder, check_class=False), model) if gate else None
        record = provenance_of(model, verdict)
        record.write(folder / "symmerge.json")
        write_text(folder / "README.md", model_card(record, quality))
    return Path(target)


def provenance_of(model: Model, verdict: Verdict | None) -> Provenance:
    """Where a model came from, what was done to it, and how it was checked."""
    return Provenance(
        source=model.where,
        source_sha256=model.digest(),
        architecture=model.spec.architecture,
        stock=model.stock,
        family=model.spec.family,
        spec_sha256=model.spec.fingerprint,
        steps=model.history,
        verified=verdict,
        versions=installed_versions(),
        task=model.spec.task,
        license=model.license,
    )
