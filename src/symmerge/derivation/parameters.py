"""The parameters of a module: as tensors with ties, and as a model with a table."""

from __future__ import annotations

from torch import Tensor, nn

from symmerge.checkpoints.weights import CheckedWeights, MemoryWeights
from symmerge.derivation.running import Runner
from symmerge.errors import MismatchError, UnsupportedModel
from symmerge.models.model import Model
from symmerge.symmetry.spec import Spec


def parameters_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every parameter by name as a tensor of its own, and which names share one."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    storages: dict[int, str] = {}
    for name, one in _embeddings_first(module):
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


def _embeddings_first(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters; of tied ones, the embedding keeps the name."""
    rows = {id(one) for one in module.modules() if isinstance(one, nn.Embedding)}
    owners = {name: id(one) for name, one in module.named_modules()}
    named = list(module.named_parameters(remove_duplicate=False))
    return sorted(named, key=lambda pair: owners[pair[0].rpartition(".")[0]] not in rows)


def model_of(spec: Spec, module: nn.Module, runner: Runner, where: str = "") -> Model:
    """A model with a table and a module's weights."""
    where = where or f"{type(module).__name__} in memory"
    weights = {name: one.detach() for name, one in module.named_parameters(remove_duplicate=False)}
    try:
        spec.check({name: tuple(weights[name].shape) for name in spec.tensors if name in weights})
    except MismatchError as error:
        raise MismatchError(f"{where}: {error}") from error
    checked = CheckedWeights(MemoryWeights({name: weights[name] for name in spec.tensors}), where)
    return Model(spec, {}, checked, checked, custom=runner)
