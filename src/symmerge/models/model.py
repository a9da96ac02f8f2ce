"""A model: a table, a config and lazy weights. `load` opens one, `save` writes one; everything between returns new models."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from symmerge.checkpoints.card import model_card
from symmerge.checkpoints.files import write_json, write_text
from symmerge.checkpoints.folders import new_folder
from symmerge.checkpoints.provenance import HistoryStep, Provenance, Verdict
from symmerge.checkpoints.reading import open_checkpoint
from symmerge.checkpoints.versions import installed_versions
from symmerge.checkpoints.weights import (
    CachedWeights,
    CheckedWeights,
    MemoryWeights,
    StoredWeights,
    Weights,
)
from symmerge.checkpoints.writing import DEFAULT_SHARD, write_weights
from symmerge.errors import CheckpointError, MismatchError, UnsupportedModel
from symmerge.families import Family, family_of
from symmerge.symmetry.groups import GeneralLinear, Group, Permutation, RotaryPairs, Trivial
from symmerge.symmetry.spec import Space, Spec, listing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]
INFLATED = "symmerge_inflated_attention"
"""A key of config.json: heads of twice the size, which the stock class refuses."""


@dataclass(frozen=True)
class Model:
    """A checkpoint seen through its table. Weights are lazy: nothing is read until it is needed.

    `source` is what was loaded, `stored_as` the names its file used where they differ from today's, `files` what is
    copied beside the weights, `history` what was done to it since, for the model card.
    """

    spec: Spec
    config: Mapping[str, Any]
    weights: Weights
    source: CheckedWeights
    path: Path | None = None
    stored_as: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    history: tuple[HistoryStep, ...] = ()

    @property
    def where(self) -> str:
        """Where it came from, for messages."""
        return self.source.where

    @property
    def bytes(self) -> int:
        """What the weights take when stored."""
        return sum(
            torch.Size(self.weights.shape(name)).numel() * self.weights.dtype(name).itemsize
            for name in self.weights
        )

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(torch.Size(self.weights.shape(name)).numel() for name in self.weights)

    @property
    def stock(self) -> bool:
        """Whether transformers loads it: not if its heads have twice the size."""
        return not self.config.get(INFLATED)

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest precision any of its tensors is stored in: what tolerances go by."""
        return max(
            {self.weights.dtype(name) for name in self.weights},
            key=lambda dtype: torch.finfo(dtype).eps,
        )

    def digest(self) -> str:
        """The hash of the checkpoint it came from; reads whatever has not been read yet."""
        return self.source.digest()

    def derive(self, weights: Weights, *, step: HistoryStep, **changes: Any) -> Model:
        """The same model with other weights, and a record of why."""
        return replace(self, weights=weights, history=(*self.history, step), **changes)

    def cached(self) -> Model:
        """The same model whose tensors stay in memory once read: canonical forms cost a decomposition per head, and solvers read them many times."""
        return replace(self, weights=CachedWeights(self.weights))

    def restrict(self, **groups: str) -> Model:
        """The same model, allowed to move less: for example ``residual="permutation"`` or ``ff="identity"``, for all layers."""
        known = {name.partition(".")[0] for name in self.spec.spaces}
        if unknown := groups.keys() - known:
            raise MismatchError(
                f"no space called {listing(unknown)} in {self.spec.family}: there are {', '.join(sorted(known))}"
            )
        spaces = {
            name: _restricted(space, groups.get(name.partition(".")[0], "full"))
            for name, space in self.spec.spaces.items()
        }
        return replace(self, spec=replace(self.spec, spaces=spaces))


def _restricted(space: Space, to: str) -> Space:
    n = space.group.size
    choices: dict[str, Group] = {
        "full": space.group,
        "permutation": Permutation(n),
        "identity": Trivial(n),
    }
    if to not in choices:
        raise MismatchError(f"{space.name}: '{to}' is not one of {', '.join(choices)}")
    if to == "permutation" and isinstance(space.group, Trivial | RotaryPairs):
        raise MismatchError(
            f"{space.name}: permutations are no symmetry of a {space.group.name} space; use identity"
        )
    return replace(space, group=choices[to])


def inflated(spec: Spec) -> Spec:
    """The table with room for two circuits in every head."""
    spaces = {
        name: replace(space, group=GeneralLinear(2 * space.group.size))
        if space.per and isinstance(space.group, GeneralLinear)
        else space
        for name, space in spec.spaces.items()
    }
    return replace(spec, spaces=spaces)


def device_of(name: str) -> torch.device:
    """A device by name; one that is not there is refused."""
    try:
        found = torch.device(name)
    except RuntimeError:  # no such word
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise MismatchError(f"device {name}: there are cpu and cuda")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise MismatchError(
            f"device {name}: PyTorch sees {torch.cuda.device_count() or 'no'} CUDA devices here; use cpu or one that is there"
        )
    return found


def load(source: str | os.PathLike[str] | PreTrainedModel) -> Model:
    """Open a checkpoint folder, or take a transformers model that is in memory.

    Preconditions: a supported architecture; a local folder. No tensor is read yet, no code from the folder is run.
    """
    if isinstance(source, str | os.PathLike):
        opened = open_checkpoint(Path(source))
        return _model(opened.weights, opened.config, str(opened.path), opened.path, opened.files)
    config = {
        **json.loads(source.config.to_json_string(use_diff=False)),
        "architectures": [type(source).__name__],
    }
    weights = MemoryWeights({name: tensor.detach() for name, tensor in source.state_dict().items()})
    return _model(weights, config, f"{type(source).__name__} in memory", None, ())


def _model(
    weights: StoredWeights,
    config: dict[str, Any],
    where: str,
    path: Path | None,
    files: tuple[Path, ...],
) -> Model:
    family = family_of(config.get("model_type"), where)
    stored_as = _current_names(family, weights, where)
    config = _untangle_ties(family, weights, stored_as, config, where)
    spec = _bind(family, config, stored_as.keys(), where)
    spec = inflated(spec) if config.get(INFLATED) else spec
    try:
        spec.check({name: weights.shape(stored) for name, stored in stored_as.items()})
    except MismatchError as error:
        raise MismatchError(f"{where}: {error}") from error
    checked = CheckedWeights(
        weights.select({name: stored_as[name] for name in spec.tensors}), where
    )
    # A tensor that was read from its tied twin is written under its own name: after untying, both are there.
    own = {name: stored for name, stored in stored_as.items() if family.rename(stored) == name}
    return Model(spec, config, checked, checked, path, own, files)


def _typed(config: Mapping[str, Any], where: str) -> Any:
    from transformers import CONFIG_MAPPING  # slow to import, and only needed here

    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    except Exception as error:  # transformers validates configs with many kinds of exceptions
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(
            f"{where}: transformers refuses config.json ({reason}): restore it from where the model came"
        ) from error


def _bind(family: Family, config: Mapping[str, Any], names: Collection[str], where: str) -> Spec:
    typed, declared = _typed(config, where), config.get("architectures")
    if declared is not None and not isinstance(declared, list):
        raise UnsupportedModel(
            f"{where}: 'architectures' in config.json is {declared!r}, not a list: restore it from where the model came"
        )
    if not declared:
        import transformers

        # Llama and Mistral have the same tensors: only classes for this very config come into question.
        known = {
            name: about
            for name, about in family.architectures.items()
            if getattr(transformers, name).config_class is type(typed)
        }
        family = replace(family, architectures=known)
    try:
        architecture = family.architecture(declared, names)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{where}: {error}") from error
    try:
        return family.bind(typed, names, architecture)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{where}: config.json has impossible sizes ({error!r}): restore it from where the model came"
        ) from error


def _current_names(family: Family, weights: Weights, where: str) -> dict[str, str]:
    """Today's name -> the name in the file, buffers left out."""
    found: dict[str, str] = {}
    for stored in weights.names():
        if family.is_buffer(stored):
            continue
        name = family.rename(stored)
        if name in found:
            raise CheckpointError(
                f"{where}: {stored} and {found[name]} are two names of the same tensor: remove one"
            )
        if not weights.dtype(stored).is_floating_point:
            raise CheckpointError(
                f"{where}: {stored} is stored as {weights.dtype(stored)}, quantised: use the float16 or float32 checkpoint"
            )
        found[name] = stored
    return found


def _untangle_ties(
    family: Family, weights: Weights, stored_as: dict[str, str], config: dict[str, Any], where: str
) -> dict[str, Any]:
    """Do as transformers does: a stored copy of a tied tensor is dropped if equal; if one differs, the model is not tied."""
    if not family.ties or not _typed(config, where).tie_word_embeddings:
        return config
    for alias, target in family.ties.items():
        if alias in stored_as and target not in stored_as:
            stored_as[target] = stored_as.pop(alias)
    stored = {alias: target for alias, target in family.ties.items() if alias in stored_as}
    if all(
        torch.equal(weights[stored_as[alias]], weights[stored_as[target]])
        for alias, target in stored.items()
    ):
        for alias in stored:
            del stored_as[alias]
        return config
    for (
        alias,
        target,
    ) in family.ties.items():  # the config unties all or none: one that is still shared gets a copy
        if target in stored_as:
            stored_as.setdefault(alias, stored_as[target])
    return {**config, "tie_word_embeddings": False}


def rebind(
    model: Model, config: Mapping[str, Any], weights: Weights, *, step: HistoryStep
) -> Model:
    """The model under a changed config: for a head that is no longer tied."""
    spec = _bind(
        family_of(config.get("model_type"), model.where), config, weights.names(), model.where
    )
    spec = replace(
        spec,
        spaces={name: model.spec.spaces.get(name, space) for name, space in spec.spaces.items()},
    )
    return model.derive(weights, step=step, config=config, spec=spec)


def save(
    model: Model,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD,
    progress: Progress | None = None,
    gate: Callable[[Model], Verdict] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write a stock checkpoint: weights, config, tokenizer and processor files, and a card that says what was done.

    The folder appears whole or not at all. `gate` sees the written checkpoint before it appears; what it returns goes into the
    record, and if it raises, nothing appears. `beside` may write more files into the folder.
    """
    inputs = (model.path,) if model.path else ()
    with new_folder(
        Path(target), overwrite=overwrite, needs_bytes=model.bytes, inputs=inputs
    ) as folder:
        for file in model.files:
            shutil.copyfile(file, folder / file.name)
        write_json(
            folder / "config.json", {**model.config, "architectures": [model.spec.architecture]}
        )
        write_weights(
            folder,
            model.weights,
            stored_as=model.stored_as,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
        if beside:
            beside(folder)
        record = provenance_of(model, gate(load(folder)) if gate else None)
        record.write(folder / "symmerge.json")
        write_text(folder / "README.md", model_card(record))
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
    )
