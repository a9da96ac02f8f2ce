"""The parameters of a module: as tensors with ties, and as a model with a table."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from symmerge.checkpoints.weights import CheckedWeights, MemoryWeights
from symmerge.derivation.recording import reason_of, tensors_of
from symmerge.derivation.running import Runner
from symmerge.derivation.state import check_same_constants
from symmerge.errors import MismatchError, UnsupportedModel
from symmerge.models.model import Model
from symmerge.symmetry.spec import Spec


def own_copy(module: nn.Module) -> nn.Module:
    """A copy in float64, as it answers after training; an error says what cannot be copied."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModel(
            f"{kind} is compiled by torch.jit, which leaves nothing to trace: give the module that"
            " it was made from"
        )
    for name, one in module.named_parameters():
        if is_lazy(one):
            raise UnsupportedModel(
                f"{kind}: {name} has no shape yet: run the module once, then derive"
            )
        if one.is_complex():
            raise UnsupportedModel(
                f"{kind}: {name} is complex, and tables are of real numbers: keep its real and"
                " imaginary parts as a parameter, and use torch.view_as_complex"
            )
    parameters_of(module)  # before a copy, which would share no memory
    try:
        return copy.deepcopy(module).double().eval()
    except Exception as error:  # what users keep in modules raises every kind
        raise UnsupportedModel(
            f"{kind} cannot be copied ({reason_of(error)}): give one that copy.deepcopy copies;"
            " undo torch.nn.utils.weight_norm or prune by their remove"
        ) from error


def parameters_of(
    module: nn.Module, state: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every parameter by name as a tensor of its own, and which names share one.

    `state`: buffers that training changes, and which are parameters here.
    """
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    storages: dict[int, str] = {}
    for name, one in _embeddings_first(module, state):
        key = (one.data_ptr(), tuple(one.shape), one.stride())
        storage = one.untyped_storage().data_ptr()
        if one.numel() and key in first:
            ties[name] = first[key]
        elif one.numel() and storage in storages:
            raise UnsupportedModel(
                f"{name} and {storages[storage]} share a part of their memory: give each parameter"
                " a tensor of its own, or tie them whole"
            )
        else:
            first[key], storages[storage] = name, name
        tensors[name] = one.detach().clone()
    if not tensors:
        raise UnsupportedModel(f"{type(module).__name__} has no parameters: there is no table")
    return tensors, ties


def _embeddings_first(module: nn.Module, state: Collection[str]) -> list[tuple[str, Tensor]]:
    """All parameters; of tied ones, the embedding keeps the name."""
    rows = {id(one) for one in module.modules() if isinstance(one, nn.Embedding)}
    owners = {name: id(one) for name, one in module.named_modules()}
    parameters = tensors_of(module, buffers=False)
    named = [
        (name, one)
        for name, one in tensors_of(module).items()
        if name in parameters or name in state
    ]
    return sorted(named, key=lambda pair: owners[pair[0].rpartition(".")[0]] not in rows)


def model_of(spec: Spec, module: nn.Module, runner: Runner, where: str = "") -> Model:
    """A model with a table and a module's weights."""
    where = where or f"{type(module).__name__} in memory"
    weights = {name: one.detach() for name, one in tensors_of(module).items()}
    try:
        spec.check({name: tuple(weights[name].shape) for name in spec.tensors if name in weights})
    except MismatchError as error:
        raise MismatchError(f"{where}: {error}") from error
    if module is not runner.module:
        check_same_constants(spec, module, runner, where)
    checked = CheckedWeights(MemoryWeights({name: weights[name] for name in spec.tensors}), where)
    return Model(spec, {}, checked, checked, custom=runner)
