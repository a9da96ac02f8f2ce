"""A model: a table, a config and lazy weights. `load` opens one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from symmerge.checkpoints.hub import is_hub_name, local_folder
from symmerge.checkpoints.licenses import read_license
from symmerge.checkpoints.parts import put_together
from symmerge.checkpoints.provenance import HistoryStep, Verdict
from symmerge.checkpoints.reading import open_checkpoint
from symmerge.checkpoints.weights import (
    CachedWeights,
    CheckedWeights,
    MemoryWeights,
    PlacedWeights,
    StoredWeights,
    Weights,
    stored_bytes,
)
from symmerge.errors import MismatchError
from symmerge.families import family_of
from symmerge.models.binding import (
    bind,
    current_names,
    drop_copies,
    drop_unread,
    untangle_ties,
    written_out,
)
from symmerge.models.config_rules import check_counts
from symmerge.models.stock import check_stock
from symmerge.symmetry.groups import GeneralLinear, Group, Permutation, RotaryPairs, Signs, Trivial
from symmerge.symmetry.spec import Space, Spec, listing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from symmerge.models.alignment import Moved

Gate = Callable[["Model", "Model"], Verdict]
"""A check before writing: of the written checkpoint, against the model it was written from."""


@runtime_checkable
class CustomModule(Protocol):
    """Runs a module that is no stock class, with the weights of a model whose table was derived."""

    def compare(self, a: Model, b: Model) -> Verdict:
        """Whether two models of this module compute the same function."""
        ...

    def runnable(self, model: Model, dtype: torch.dtype) -> nn.Module:
        """The module with a model's weights, called as a stock class."""
        ...


# Config key that marks heads of twice the size, which stock classes refuse.
INFLATED = "symmerge_inflated_attention"


@dataclass(frozen=True, repr=False)
class Model:
    """A checkpoint seen through its table. Weights are lazy: nothing is read until it is needed.

    `source` is what was loaded, `stored_as` the names its file used where they differ from
    today's, `files` what is copied beside the weights, `history` what was done since, `moved` the
    alignment if the last of it was one, `custom` what runs a module that is no stock class.
    """

    spec: Spec
    config: Mapping[str, Any]
    weights: Weights
    source: CheckedWeights
    path: Path | None = None
    stored_as: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    history: tuple[HistoryStep, ...] = ()
    moved: Moved | None = None
    custom: CustomModule | None = None

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        steps = ", ".join(step.step for step in self.history) or "none"
        tensors, spaces = f"{len(self.spec.tensors)} tensors", f"{len(self.spec.hidden)} spaces"
        return (
            f"<Model {self.spec.architecture} from {self.where}\n"
            f" {self.parameters:,} parameters in {dtype}, {tensors}, {spaces}\n"
            f" steps: {steps if len(steps) <= 80 else steps[:77] + '...'}>"
        )

    @property
    def where(self) -> str:
        """Where it came from, for messages."""
        return self.source.where

    @property
    def bytes(self) -> int:
        """The size of the weights in bytes, as stored."""
        return sum(stored_bytes(self.weights, name) for name in self.weights)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(torch.Size(self.weights.shape(name)).numel() for name in self.weights)

    @property
    def stock(self) -> bool:
        """Whether transformers can load it: not with heads of twice the size."""
        return not self.config.get(INFLATED)

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest stored precision of its tensors; tolerances depend on it."""
        dtypes = {self.weights.dtype(name) for name in self.weights}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def license(self) -> str | None:
        """Its licence, as the card in its folder names it."""
        return read_license(self.path)

    def digest(self) -> str:
        """The hash of the checkpoint it came from; reads whatever has not been read yet."""
        return self.source.digest()

    def derive(self, weights: Weights, *, step: HistoryStep, **changes: object) -> Model:
        """The same model with other weights, and a record of why."""
        changes = {"moved": None, **changes}
        return replace(self, weights=weights, history=(*self.history, step), **changes)

    def cached(self) -> Model:
        """The same model, with tensors that stay in memory once read.

        Canonical forms cost a decomposition per head, and solvers read them many times.
        """
        return replace(self, weights=CachedWeights(self.weights))

    def placed(self, device: str) -> Model:
        """The same model, whose tensors are copied to a device as they are read."""
        place = device_of(device)
        if place.type == "cpu":
            return self
        return replace(self, weights=PlacedWeights(self.weights, place))

    def restrict(self, /, **groups: str) -> Model:
        """The same model with smaller groups in all layers, as ``residual="permutation"``."""
        known = {name.partition(".")[0] for name in self.spec.spaces}
        if unknown := groups.keys() - known:
            raise MismatchError(
                f"no space called {listing(unknown)} in {self.spec.family}:"
                f" choose one of {', '.join(sorted(known))}"
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
    if to == "permutation" and isinstance(space.group, Trivial | RotaryPairs | Signs):
        raise MismatchError(
            f"{space.name}: permutations are not a symmetry of a {space.group.name} space;"
            " use identity"
        )
    return replace(space, group=choices[to])


def inflated(spec: Spec, inside: Set[str] | None = None) -> Spec:
    """The table with room for two circuits in every head: in the spaces `inside`, or all GL."""
    if inside is None:
        inside = {
            name
            for name, space in spec.spaces.items()
            if space.per and isinstance(space.group, GeneralLinear)
        }
    spaces = {
        name: replace(space, group=GeneralLinear(2 * space.group.size)) if name in inside else space
        for name, space in spec.spaces.items()
    }
    return replace(spec, spaces=spaces)


def device_of(name: str) -> torch.device:
    """A torch device by name; unavailable ones are refused."""
    try:
        device = torch.device(name)
    except RuntimeError:  # not a device
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise MismatchError(f"device {name}: choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MismatchError(
            f"device {name}: PyTorch sees {torch.cuda.device_count() or 'no'} CUDA devices here;"
            " use cpu or an existing device"
        )
    if device.type == "cuda":
        _load_solvers(device)
    return device


@cache
def _load_solvers(device: torch.device) -> None:
    """Load PyTorch's solvers for a GPU now: it cannot do so in several threads at once."""
    torch.linalg.inv(torch.eye(2, device=device))


def load(source: str | os.PathLike[str] | PreTrainedModel, *, check_class: bool = True) -> Model:
    """Open a checkpoint folder or a hub name, or take a transformers model that is in memory.

    Preconditions: a supported architecture. No tensor is read yet, no code of the folder is run.
    Without `check_class`, the stock class is not built to see whether the config suits it: that
    takes the second and more that importing the class takes.
    """
    if isinstance(source, str | os.PathLike):
        where = str(Path(source))
        fetched = is_hub_name(where) and not os.path.exists(where)
        opened = open_checkpoint(local_folder(where) if fetched else where)
        model = _model(opened.weights, opened.config, where, opened.path, opened.files)
        if check_class and model.stock:
            check_stock(model.spec, model.config, where)
        return model
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
    family = family_of(config.get("model_type"), where, config.get("architectures"))
    weights = put_together(weights, family.parts, where)
    check_counts(config, weights, where)
    stored_as = current_names(family, weights, where)
    drop_copies(family, weights, stored_as, where)
    config = written_out(family, config, where)
    config = untangle_ties(family, weights, stored_as, config, where)
    spec = bind(family, config, stored_as.keys(), where)
    spec = inflated(spec) if config.get(INFLATED) else spec
    stored_as = drop_unread(family, spec, stored_as)
    try:
        spec.check({name: weights.shape(stored) for name, stored in stored_as.items()})
    except MismatchError as error:
        raise MismatchError(f"{where}: {error}") from error
    checked = CheckedWeights(
        weights.select({name: stored_as[name] for name in spec.tensors}), where
    )
    # A tensor read from its tied twin keeps its own name: after untying, both are written.
    own = {name: stored for name, stored in stored_as.items() if family.rename(stored) == name}
    return Model(spec, config, checked, checked, path, own, files)


def rebind(
    model: Model, config: Mapping[str, Any], weights: Weights, *, step: HistoryStep
) -> Model:
    """The model under a changed config: for a head that is no longer tied."""
    if model.custom:
        assert model.spec.untied, "a derived table has one for its own copies"
        return model.derive(weights, step=step, config=config, spec=model.spec.untied)
    family = family_of(config.get("model_type"), model.where, config.get("architectures"))
    spec = bind(family, config, weights.names(), model.where)
    spaces = {name: model.spec.spaces.get(name, space) for name, space in spec.spaces.items()}
    return model.derive(weights, step=step, config=config, spec=replace(spec, spaces=spaces))
