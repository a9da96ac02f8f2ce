"""Absorb a norm right after the embedding into the embedding, so that its stream can rotate. Exact.

No reader can take such a norm's gain: its output lies on an ellipsoid, and a constant gain c only
makes spheres. But epsilon shortens the output of small rows, so a row e of the right size gives
any vector u that is short enough (d is the width):
``c e / sqrt(|e|^2 / d + epsilon)`` is u for ``e = u / c * sqrt(epsilon / (1 - |u|^2 / d c^2))``.
Only means are lost. Later norms remove them anyway, and a map that reads the stream before any
norm (if there is one) can recover them: without its shift, a norm of gain g gives outputs
orthogonal to 1 / g.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.errors import SymmetryError
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Norm, Spec

STEP = 4.0  # the constant gain is a power of this, so that two models get the same one
CANCELLED = 1e3  # how much recovering the mean may magnify rounding


def absorb(spec: Spec, weights: Weights, norm: Norm) -> dict[str, Callable[[], Tensor]]:
    """The tensors that change when a norm's gain becomes constant and the embedding absorbs it."""
    if norm.readers:
        _refuse_cancelled(norm, weights)
    embedding = f"{norm.writer}.weight"
    axis = spec.axis_of(embedding, norm.stream, Role.WRITES)
    computed: dict[str, Callable[[], Tensor]] = {
        embedding: partial(_embedding, weights, norm, axis),
        norm.gain: partial(_gain, weights, norm, axis),
    }
    if norm.shift and norm.readers:  # else the mean of the shift is read by norms alone
        computed[norm.shift] = partial(_shift, weights, norm)
    for reader in norm.readers:
        name = f"{reader}.weight"
        axis = spec.axis_of(name, norm.stream, Role.READS)
        computed[name] = partial(_reader, weights, norm, name, axis)
    return computed


def _outputs(weights: Weights, norm: Norm, axis: int) -> tuple[Float[Tensor, "rows d"], float]:
    """The norm's output for each row, without means and shift; a constant gain that can make it."""
    rows = weights[f"{norm.writer}.weight"].movedim(axis, -1).double()
    gain = weights[norm.gain].double()
    outputs = gain * torch.nn.functional.layer_norm(rows, gain.shape, eps=norm.epsilon)
    outputs = outputs - outputs.mean(-1, keepdim=True)
    longest = outputs.square().mean(-1).amax().sqrt().item()
    constant = STEP ** torch.tensor(2 * max(longest, 1e-30)).log2().div(2).ceil().item()
    return outputs, constant


def _embedding(weights: Weights, norm: Norm, axis: int) -> Tensor:
    outputs, constant = _outputs(weights, norm, axis)
    share = outputs.square().mean(-1, keepdim=True) / constant**2
    rows = outputs / constant * (norm.epsilon / (1 - share)).sqrt()
    return rows.movedim(-1, axis).to(weights[f"{norm.writer}.weight"])


def _gain(weights: Weights, norm: Norm, axis: int) -> Tensor:
    return torch.full_like(weights[norm.gain], _outputs(weights, norm, axis)[1])


def _mean_reader(gain: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Recovers the mean of gain * z from its centred value, for every z with mean zero."""
    zero = gain == 0
    normal = zero.to(gain) if zero.any() else 1 / gain
    return -normal / normal.sum()


def _reader(weights: Weights, norm: Norm, name: str, axis: int) -> Tensor:
    return with_mean(weights[name].movedim(axis, -1), weights[norm.gain]).movedim(-1, axis)


def with_mean(readers: Float[Tensor, "rows d"], gain: Float[Tensor, " d"]) -> Tensor:
    """Readers of the norm's output as readers of the output without its mean.

    The mean of the shift is read as before.
    """
    from_rest = _mean_reader(gain.double()).to(readers) + 1 / readers.shape[-1]
    return readers + readers.sum(-1, keepdim=True) * from_rest


def _shift(weights: Weights, norm: Norm) -> Tensor:
    assert norm.shift
    shift = weights[norm.shift].double()
    rest = shift - shift.mean()
    return (shift - _mean_reader(weights[norm.gain].double()) @ rest).to(weights[norm.shift])


def _refuse_cancelled(norm: Norm, weights: Weights) -> None:
    reader = _mean_reader(weights[norm.gain].double())
    if not reader.norm() * len(reader) ** 0.5 <= CANCELLED:
        raise SymmetryError(
            f"{norm.gain} has gains of both signs that cancel, so that the mean of the stream"
            f" cannot be computed from the rest: rotations of '{norm.stream}' are not possible;"
            " restrict it to permutations"
        )
