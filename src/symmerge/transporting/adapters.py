"""Carry a LoRA adapter: both factors move, so its ranks stay as they are. Exact.

`B A` reads a module's input and writes its output: `A` moves as what reads, `B` as what writes. A
module's input may have a constant part (the shift of the norm before it, the value biases before
an output map) which in OTHER is another one. What the adapter makes of the difference is a bias of
its second factor (peft's `lora_bias`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.models.alignment import Alignment
from symmerge.models.canonical.absorption import with_mean
from symmerge.models.canonical.biases import passing_values
from symmerge.models.canonical.gains import (
    SMALLEST_GAIN,
    along,
    folded_norms,
    folded_scales,
)
from symmerge.models.model import Model
from symmerge.symmetry.groups import Trivial
from symmerge.symmetry.notation import Atom, Product, Role, pieces
from symmerge.symmetry.spec import Norm, Space, Spec
from symmerge.transporting.adapter_files import Adapter, Factors
from symmerge.transporting.frames import Passage

RANK = "rank"  # the space between the factors


def carried_adapter(
    passage: Passage, adapter: Adapter, scale: Mapping[str, float] | float = 1.0
) -> Adapter:
    """An adapter of BASE as one of OTHER, times `scale`, which may be by weight."""
    ends = _End(passage.base, passage), _End(passage.other, passage)

    def factor(name: str) -> float:
        return scale.get(f"{name}.weight", 1.0) if isinstance(scale, Mapping) else scale

    modules = {
        name: _carried(passage, adapter, ends, name, factor(name)) for name in adapter.modules
    }
    # peft gives all modules biases, or none.
    if not any(factors.bias is not None and factors.bias.any() for factors in modules.values()):
        modules = {name: replace(factors, bias=None) for name, factors in modules.items()}
    biased = any(factors.bias is not None for factors in modules.values())
    if biased and any(factors.embedding for factors in modules.values()):
        raise MismatchError(
            f"{adapter.path} adapts embeddings and maps that need a bias in {passage.other.where},"
            " which peft cannot store: merge it into its base and carry the model"
        )
    return replace(adapter, config=_config(adapter, passage.other, biased), modules=modules)


def _config(adapter: Adapter, other: Model, biased: bool) -> dict[str, Any]:
    config: dict[str, Any] = {**adapter.config, "revision": None}
    config["base_model_name_or_path"] = str(other.path or other.where)
    if biased or "lora_bias" in config:
        config["lora_bias"] = biased
    if biased and isinstance(config.get("init_lora_weights"), str):
        config["init_lora_weights"] = True  # how it began is over; peft takes no other with biases
    return config


def warn_unmerged(adapter: Adapter, other: Model) -> None:
    """Say so if peft can load an adapter, but not merge it."""
    biased = any(factors.bias is not None for factors in adapter.modules.values())
    odd = [name for name in adapter.modules if f"{name}.bias" not in other.spec.tensors]
    if biased and odd:
        warnings.warn(
            f"peft loads the adapter, but cannot merge it: in {other.where} it needs biases"
            f" (lora_bias), and {odd[0]} has none; to merge, carry the merged model",
            SymmergeWarning,
            stacklevel=3,
        )


@final
@dataclass(frozen=True)
class _End:
    """A model, as an adapter's factors meet it."""

    model: Model
    passage: Passage

    @cached_property
    def own(self) -> Model:
        return self.model.restrict(**(self.passage.restrict or {}))

    @cached_property
    def frame(self) -> Model:
        passage = self.passage
        return passage.start if self.model is passage.base else passage.end

    @cached_property
    def norms(self) -> dict[str, Norm]:
        """The folded norm that each module reads."""
        norms = folded_norms(self.own, constant=True)
        return {reader: norm for norm in norms for reader in norm.readers}

    @cached_property
    def absorbed(self) -> list[Norm]:
        """The folded norms that sit on an embedding."""
        return [norm for norm in folded_norms(self.own, constant=True) if norm.writer]

    @cached_property
    def scales(self) -> dict[str, str]:
        """The folded gain that follows each module."""
        return {scale.writer: scale.gain for scale in folded_scales(self.own)}

    @cached_property
    def values(self) -> dict[str, str]:
        """The values that each output map reads, whose biases are a constant part of its input."""
        return {
            target.removesuffix(".bias"): space for target, space in passing_values(self.own.spec)
        }

    def check_own(self, module: str, adapter: Adapter) -> None:
        """Refuse a module whose weight another use shares, or whose norm its embedding absorbs."""
        norm, aliases = self.norms.get(module), self.model.spec.aliases
        tied = f"{module}.weight" in {*aliases, *aliases.values()}
        shares = any(norm.writer == module for norm in self.absorbed)
        if tied or shares or (norm and norm.writer and norm.shift):
            raise MismatchError(
                f"{adapter.path} adapts {module}, which shares its weight or its norm with others"
                f" in {self.model.where}: merge it into its base and carry the model"
            )

    def gain(self, name: str) -> Tensor:
        gain = self.own.weights[name]
        if (gain.abs() <= SMALLEST_GAIN * gain.abs().amax()).any():
            raise MismatchError(
                f"{self.model.where}: {name} has gains of zero, which no adapter can be written"
                " behind: merge it into its base and carry the model"
            )
        return gain

    def framed(self, module: str, a: Tensor) -> Tensor:
        """What reads a module's input in its own coordinates, as it reads it in the frame."""
        if not (norm := self.norms.get(module)):
            return a
        gain = self.own.weights[norm.gain]
        return with_mean(a, gain) if norm.writer else a * along(gain, a.shape[1])

    def unframed(self, module: str, a: Tensor) -> Tensor:
        """The other way round."""
        if not (norm := self.norms.get(module)):
            return a
        if norm.writer:  # in the frame, the embedding's norm gives out no mean
            return a - a.mean(-1, keepdim=True)
        return a / along(self.gain(norm.gain), a.shape[1])

    def constant(self, module: str, spec: Spec, length: int) -> Tensor | None:
        """The constant part of a module's input, in its own coordinates.

        A shift that some reader has no bias for stays in its norm, and moves with the stream.
        """
        norm = self.norms.get(module)
        if norm and norm.shift and not norm.writer and self.own.spec.passes_shift(norm):
            return along(self.own.weights[norm.shift], length)
        if space := self.values.get(module):
            return _values(spec, self.frame.weights, module, space)
        return None


def _values(spec: Spec, weights: Weights, module: str, space: str) -> Tensor:
    """The value biases, repeated for all heads that read them, as an output map reads them."""
    name = f"{module}.weight"
    result = weights[name].new_zeros(weights[name].shape)
    for bias in spec.occurrences(space):
        if bias.role is Role.WRITES and len(spec.tensors[bias.piece.tensor]) == 1:
            view = bias.piece.view(weights[bias.piece.tensor])
            places = {atom.space: at for at, atom in enumerate(bias.piece.atoms)}
            for piece in spec.pieces[name]:
                if any(piece.positions(space)):
                    shape = [
                        view.shape[places[atom.space]] if atom.space in places else 1
                        for atom in piece.atoms
                    ]
                    order = [places[a.space] for a in piece.atoms if a.space in places]
                    piece.view(result).add_(view.permute(order).reshape(shape))
    return result.select(1 - _reading_axis(spec, name), 0)


def _reading_axis(spec: Spec, name: str) -> int:
    """The axis of an output map that reads values."""
    reads = [
        axis
        for axis, product in enumerate(spec.tensors[name])
        for factor in product.factors
        if isinstance(factor, Atom) and factor.role is Role.READS and spec.spaces[factor.space].per
    ]
    return reads[0]


def _carried(
    passage: Passage, adapter: Adapter, ends: tuple[_End, _End], module: str, scale: float
) -> Factors:
    factors, (base, other) = adapter.modules[module], ends
    name = f"{module}.weight"
    for end in ends:
        end.check_own(module, adapter)
    spec = passage.end.spec
    turned = factors.embedding or module in adapter.transposed
    into, out = (0, 1) if turned else (1, 0)
    a, b = factors.a, factors.b * scale
    a = base.framed(module, a)
    if gain := base.scales.get(module):
        b = b * base.own.weights[gain][:, None]
    a = _moved(passage, name, into, a.mT).mT
    b = _moved(passage, name, out, b)
    a = other.unframed(module, a)
    if gain := other.scales.get(module):
        b = b / other.gain(gain)[:, None]
    bias = None
    if factors.bias is not None:
        bias = _moved_bias(passage, base, other, module, out, factors.bias * scale)
    constants = [end.constant(module, spec, a.shape[1]) for end in ends]
    if constants[0] is not None and constants[1] is not None:
        lost = b @ (factors.a @ constants[0] - a @ constants[1])
        bias = lost if bias is None else bias + lost
    bias = b.new_zeros(len(b)) if bias is None else bias
    return replace(factors, a=a.contiguous(), b=b.contiguous(), bias=bias)


def _moved_bias(
    passage: Passage, base: _End, other: _End, module: str, axis: int, bias: Tensor
) -> Tensor:
    for end, power in ((base, 1), (other, -1)):
        if power < 0:
            bias = _moved(passage, f"{module}.weight", axis, bias[:, None])[:, 0]
        if gain := end.scales.get(module):
            bias = bias * end.gain(gain) ** power
    return bias


def _moved(passage: Passage, name: str, axis: int, factor: Tensor) -> Tensor:
    """A factor [coordinates, rank] along one axis of a tensor, in OTHER's frame."""
    spec, rank = passage.end.spec, factor.shape[1]
    room = Space(RANK, Trivial(rank))
    axes = (spec.tensors[name][axis], Product((Atom(RANK, Role.WRITES),)))
    wider = replace(spec, spaces={**spec.spaces, RANK: room})
    cut = pieces(name, axes, wider.sizes)
    there = Alignment(wider, passage.there.elements)
    result = torch.empty_like(factor, memory_format=torch.contiguous_format)
    for piece in cut:
        piece.view(result).copy_(there.act_on(piece, piece.view(factor.contiguous())))
    return result


def adapted(base: Model, adapter: Adapter) -> Model:
    """The base with the adapter merged into it. Lazy."""

    def compute(name: str, module: str) -> Tensor:
        weight = base.weights[name]
        return weight + adapter.change(module).to(weight)

    def bias(name: str, module: str) -> Tensor:
        factors = adapter.modules[module]
        assert factors.bias is not None
        return base.weights[name] + factors.scale * factors.bias.to(base.weights[name])

    computed: dict[str, Any] = {}
    for module, factors in adapter.modules.items():
        name = base.spec.ties.get(f"{module}.weight", f"{module}.weight")
        computed[name] = lambda name=name, module=module: compute(name, module)
        if factors.bias is not None and factors.bias.any():
            if (name := f"{module}.bias") not in base.spec.tensors:
                raise MismatchError(
                    f"{adapter.path}: {module} has no bias in {base.where} that the adapter's"
                    " lora_bias could be added to: train it without lora_bias"
                )
            computed[name] = lambda name=name, module=module: bias(name, module)
    step = HistoryStep("adapt", f"a LoRA of {len(adapter.modules)} modules added")
    return base.derive(DerivedWeights(base.weights, computed), step=step)
