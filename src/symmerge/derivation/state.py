"""Buffers: those that training changes are weights, others must be the same in all models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from symmerge.derivation.recording import arguments, reason_of, running, tensors_of
from symmerge.derivation.running import EXACT, Inputs, Runner, difference
from symmerge.errors import MismatchError
from symmerge.symmetry.spec import Spec

STEPS = 3  # of a forward in training: a second one sees what the first has left


@torch.no_grad()
def train_buffers(module: nn.Module, inputs: Iterable[Inputs], seed: int) -> frozenset[str]:
    """Run a module as in training, and name the buffers of floats that this changes.

    They keep what they got: fresh statistics, all zeros and ones, would allow what no trained ones
    do. Those of norms are changed as well where the module cannot run so.
    """
    before = {name: one.clone() for name, one in _buffers(module)}
    module.train()
    with torch.random.fork_rng(devices=[]), running():
        torch.manual_seed(seed)
        try:
            for _ in range(STEPS):
                for one in inputs:
                    positional, named = arguments(one)
                    module(*positional, **named)
        except Exception as error:  # a user's code raises every kind; it need not run so
            reason_of(error)
    module.eval()
    own = {id(one) for one in _statistics(module, seed)}
    names = {
        name
        for name, one in _buffers(module)
        if id(one) in own or (name in before and not _equal(one, before[name]))
    }
    return frozenset(names)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    parameters = tensors_of(module, buffers=False)
    for name, one in tensors_of(module).items():
        if name not in parameters and one.is_floating_point():
            yield name, one


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or torch.equal(one, other)  # what grows is a cache


def _statistics(module: nn.Module, seed: int) -> Iterator[Tensor]:
    """The statistics of norms, with noise."""
    generator = torch.Generator().manual_seed(seed)
    for norm in module.modules():
        if not isinstance(norm, _NormBase) or norm.running_mean is None:
            continue
        assert norm.running_var is not None
        noise = torch.randn((2, norm.num_features), generator=generator, dtype=torch.float64)
        norm.running_mean += 0.2 * noise[0]
        norm.running_var *= noise[1].mul(0.2).exp()
        yield from (norm.running_mean, norm.running_var)


def check_same_constants(spec: Spec, module: nn.Module, runner: Runner, where: str) -> None:
    """Refuse a module whose outputs depend on what the table leaves out, and that differs there."""
    own = dict(_left_out(spec, module))
    different = {
        name: own[name]
        for name, one in _left_out(spec, runner.module)
        if name in own and not _alike(own[name], one)
    }
    if not different:
        return
    tensors = {name: one.detach() for name, one in tensors_of(runner.module).items()}
    source = runner.outputs(tensors)
    for name, one in different.items():
        if (
            not difference(runner.outputs({**tensors, name: one.to(tensors[name])}), source)
            <= EXACT
        ):
            raise MismatchError(
                f"{where}: {name} differs from that of the module whose table was derived, and is"
                " no part of the table, since nothing trains it: give both the same, or make it"
                " an nn.Parameter with requires_grad before derive"
            )


def _left_out(spec: Spec, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, one in tensors_of(module).items():
        if name not in spec.tensors and name not in spec.ties:
            yield name, one.detach()


def _alike(one: Tensor, other: Tensor) -> bool:
    """Up to the rounding of a module in lower precision; what has another size is a cache."""
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape != other.shape or torch.equal(one, other.to(one.dtype))
    rounding = 4 * torch.finfo(one.dtype).eps
    return torch.allclose(one.double(), other.double(), rtol=rounding, atol=0, equal_nan=True)
