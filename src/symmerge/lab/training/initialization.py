"""The starting point of training (`Origin`): everything the trained weights depend on."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from symmerge.checkpoints.hashes import files_digest
from symmerge.checkpoints.versions import installed_versions
from symmerge.errors import CheckpointError, MismatchError
from symmerge.lab.training.recipe import TrainingRecipe
from symmerge.lab.training.reinitialization import fresh_parameters, open_model, reinitialize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCHEMA = "symmerge.training/2"


@dataclass(frozen=True)
class Origin:
    """A recipe, a seed, and optionally a trained model to start from (the folder `begin`).

    `fresh` names a component to re-initialise; with `only_fresh` nothing else is trained.
    `head_seed` initialises a classifier's head: the same for all seeds, or heads would not match.
    """

    recipe: TrainingRecipe
    seed: int
    begin: Path | None = None
    fresh: str | None = None
    only_fresh: bool = False
    head_seed: int = 0

    def __post_init__(self) -> None:
        if self.fresh and self.begin is None:
            raise MismatchError(
                f"fresh {self.fresh}: only a trained model has fresh parts; give it with --begin"
            )
        if self.only_fresh and not self.fresh:
            raise MismatchError("only fresh parts are trained, but none is fresh: give --fresh")

    def record(self) -> dict[str, object]:
        """As JSON. Includes Python's version: its documentation is training data."""
        known = {
            "schema": SCHEMA,
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "versions": {**installed_versions(), "python": platform.python_version()},
        }
        if self.begin is not None:
            begun = {
                "begin": _digest(self.begin),
                "fresh": self.fresh,
                "only_fresh": self.only_fresh,
            }
            known |= begun | ({"head_seed": self.head_seed} if self.recipe.task == "text" else {})
        return json.loads(json.dumps(known))

    def model(self) -> PreTrainedModel:
        """The initial model."""
        import transformers

        recipe = self.recipe
        if self.begin is None:
            kind = getattr(transformers, recipe.architecture)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                return _initialized(kind(kind.config_class(**recipe.config)), recipe.initial)
        if self.fresh:
            model = reinitialize(self.begin, self.fresh, self.seed)
        elif recipe.task == "text":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.head_seed)
                return open_model(self.begin, recipe.architecture, **recipe.config)
        else:
            model = open_model(self.begin)
        _check(model, recipe, self.begin)
        if self.only_fresh and self.fresh:
            chosen = set(fresh_parameters(model, self.fresh))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in chosen)
        return model


@torch.no_grad()
def _initialized(model: PreTrainedModel, deviations: Mapping[str, float]) -> PreTrainedModel:
    """The fresh model, with some parameters drawn again with another standard deviation."""
    for name, parameter in model.named_parameters():
        for end, deviation in deviations.items():
            if name.endswith(end):
                parameter.normal_(0.0, deviation)
    return model


def _check(model: PreTrainedModel, recipe: TrainingRecipe, folder: Path) -> None:
    """Refuse a model whose class or config is not the recipe's."""
    differs = [
        name
        for name, value in recipe.config.items()
        if not _agrees(getattr(model.config, name, None), value)
    ]
    if type(model).__name__ != recipe.architecture or differs:
        what = f"differs in {', '.join(differs)}" if differs else f"is a {type(model).__name__}"
        raise MismatchError(
            f"{folder} {what}, and the recipe trains another {recipe.architecture}:"
            " choose its own recipe, or change it (--change)"
        )


def _agrees(there: object, wanted: object) -> bool:
    return (
        all(there.get(name) == value for name, value in wanted.items())
        if isinstance(wanted, dict) and isinstance(there, dict)
        else there == wanted
    )


def _digest(folder: Path) -> str:
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    if not files:
        raise CheckpointError(f"{folder} has no weights: give the folder of a trained model")
    return files_digest(folder, files)
